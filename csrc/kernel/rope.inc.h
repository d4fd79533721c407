/* Rotary position embedding of one row: all heads of a position, each pair of columns (a, b) turned by an
 * angle of its own that the heads share.
 *
 *   a' = a cos - b sin        halves:       a = src[i],  b = src[i + rotary_dim / 2]
 *   b' = b cos + a sin        interleaved:  a = src[2i], b = src[2i + 1]
 *
 * Pair i is turned by cos[i] and sin[i], of which there are rotary_dim / 2. Columns from rotary_dim on
 * are copied. dst may be src, with the same stride.
 */
#define rotate_halves TA_NAME(rotate_halves)
TA_INLINE void rotate_halves(real *dst, const real *src, ptrdiff_t half, const real *cos, const real *sin)
{
    ptrdiff_t whole = half / TA_VL * TA_VL;
    for (ptrdiff_t i = 0; i < whole; i += TA_VL) {
        vec a = vec_load(src + i), b = vec_load(src + half + i);
        vec c = vec_load(cos + i), s = vec_load(sin + i);
        vec_store(dst + i, a * c - b * s);
        vec_store(dst + half + i, b * c + a * s);
    }
    for (ptrdiff_t i = whole; i < half; i++) {
        real a = src[i], b = src[half + i];
        dst[i] = a * cos[i] - b * sin[i];
        dst[half + i] = b * cos[i] + a * sin[i];
    }
}

/* The pairs stay where they are in their vectors: a0 b0 a1 b1 ... times c0 c0 c1 c1 ..., plus
 * b0 a0 b1 a1 ... times -s0 s0 -s1 s1 ... */
#define rotate_pairs TA_NAME(rotate_pairs)
TA_INLINE void rotate_pairs(real *dst, const real *src, ptrdiff_t half, const real *cos, const real *sin)
{
    ptrdiff_t whole = half / TA_VL * TA_VL;
    for (ptrdiff_t i = 0; i < whole; i += TA_VL) {
        vec low = vec_load(src + 2 * i), high = vec_load(src + 2 * i + TA_VL);
        vec c = vec_load(cos + i), s = vec_load(sin + i);
        vec_store(dst + 2 * i, low * vec_zip_low(c, c) + vec_swap_pairs(low) * vec_zip_low(-s, s));
        vec_store(dst + 2 * i + TA_VL,
                  high * vec_zip_high(c, c) + vec_swap_pairs(high) * vec_zip_high(-s, s));
    }
    for (ptrdiff_t i = whole; i < half; i++) {
        real a = src[2 * i], b = src[2 * i + 1];
        dst[2 * i] = a * cos[i] - b * sin[i];
        dst[2 * i + 1] = b * cos[i] + a * sin[i];
    }
}

static void TA_NAME(rotate_row)(void *dst_, const void *src_, const void *cos, const void *sin,
                                const ta_rope *rope)
{
    real *dst = dst_;
    const real *src = src_;
    ptrdiff_t rotary_dim = rope->rotary_dim;
    for (ptrdiff_t head = 0; head < rope->heads; head++) {
        if (rope->interleaved)
            rotate_pairs(dst, src, rotary_dim / 2, cos, sin);
        else
            rotate_halves(dst, src, rotary_dim / 2, cos, sin);
        if (dst != src)
            memcpy(dst + rotary_dim, src + rotary_dim,
                   (size_t)(rope->head_dim - rotary_dim) * sizeof(real));
        dst += rope->dst_stride;
        src += rope->src_stride;
    }
}
