/* Weights in fewer bits than a float: panels of 32-bit words, each with what one column has in several
 * successive rows of the contracted axis, the first of them in the lowest bits.
 *
 *     row p            word of a column           scales
 *     TA_WORDS_BF16    p | p+1                    none
 *     TA_WORDS_INT8    p | ... | p+3              [group][width], float
 *     TA_WORDS_INT4    p | ... | p+7              [group][2][width], float16: scales, then minima
 *
 *     words  [depth / rows in a word, rounded up][width]
 *
 * What enters a multiply-add is always the weight as a float: a bfloat16, value * scale rounded once, or
 * value * scale + minimum, whose product is exact. So a tile that converts words in registers, one that
 * reads a panel that was converted before, and one that was given these floats have the same bits.
 */
#define TA_EACH_WORDS(X) X(TA_WORDS_BF16, bf16) X(TA_WORDS_INT8, int8) X(TA_WORDS_INT4, int4)

/* dst = words of src[p * row_stride + j * column_stride], p < depth and j < columns, and of zeros up to
 * whole words and `width` columns. src holds floats for bfloat16, which are rounded, or a byte a value. */
#define pack_words_body TA_NAME(pack_words_body)
TA_INLINE void pack_words_body(const int storage, uint32_t *dst, const char *src, ptrdiff_t depth,
                               ptrdiff_t columns, ptrdiff_t width, ptrdiff_t row_stride,
                               ptrdiff_t column_stride)
{
    const int rows = TA_WORD_ROWS(storage), bits = 32 / rows;
    for (ptrdiff_t p = 0; p < depth; p += rows) {
        for (ptrdiff_t j = 0; j < width; j++) {
            uint32_t word = 0;
            for (int k = 0; k < rows && p + k < depth && j < columns; k++) {
                const ptrdiff_t at = (p + k) * row_stride + j * column_stride;
                const uint32_t value = storage == TA_WORDS_BF16 ? bf16_from_real(((const real *)src)[at])
                                                                : ((const unsigned char *)src)[at];
                word |= value << bits * k;
            }
            *dst++ = word;
        }
    }
}

#define TA_INSTANCE(STORAGE, NAME)                                                                         \
    static void TA_NAME(pack_words_##NAME)(void *dst, const void *src, ptrdiff_t depth, ptrdiff_t columns, \
                                           ptrdiff_t width, ptrdiff_t row_stride, ptrdiff_t column_stride) \
    {                                                                                                      \
        pack_words_body(STORAGE, dst, src, depth, columns, width, row_stride, column_stride);              \
    }
TA_EACH_WORDS(TA_INSTANCE)
#undef TA_INSTANCE

/* Of one vector of columns: what its values are multiplied with and what is added. */
#define scaling TA_NAME(scaling)
typedef struct scaling {
    vec scale, minimum;
} scaling;

#define load_scaling TA_NAME(load_scaling)
TA_INLINE scaling load_scaling(const int storage, const ta_words *b, ptrdiff_t group, ptrdiff_t width,
                               int column)
{
    scaling s = {vec_all(1), vec_all(0)};
    if (storage == TA_WORDS_INT8) {
        /* Values come times 2^24; a scale is no smaller than 2^-100, or zero. */
        s.scale = vec_all(0x1p-24f) * vec_load((const real *)b->scales + group * width + column);
    } else if (storage == TA_WORDS_INT4) {
        const uint16_t *scales = (const uint16_t *)b->scales + 2 * group * width + column;
        s.scale = vec_all((real)b->unit) * vec_load_f16(scales);
        s.minimum = vec_all((real)b->unit) * vec_load_f16(scales + width);
    }
    return s;
}

#if TA_LOOKUP_BITS /* a table of sixteen floats is a lookup, too */
static const real TA_NAME(digits)[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#endif

/* Row k of those in a vector of words. */
#define unpack TA_NAME(unpack)
TA_INLINE vec unpack(const int storage, veci w, int k, scaling s)
{
    switch (storage) {
    case TA_WORDS_BF16:
        return (vec)(k == 0 ? w << 16 : w & (integer)0xffff0000);
    case TA_WORDS_INT8:
        return __builtin_convertvector(vec_top_byte(w, k), vec) * s.scale;
    default:
#if TA_LOOKUP_BITS
        return (vec)vec_lookup((const integer *)TA_NAME(digits), w >> 4 * k) * s.scale + s.minimum;
#else
        return __builtin_convertvector(w >> 4 * k & 15, vec) * s.scale + s.minimum;
#endif
    }
}

#define word_vector TA_NAME(word_vector)
TA_INLINE veci word_vector(const int32_t *from)
{
    return (veci)vec_load((const real *)from);
}

/* dst[p][j] = weights, for p < depth and j < width, whole vectors. */
#define convert_panel_body TA_NAME(convert_panel_body)
TA_INLINE void convert_panel_body(const int storage, real *dst, const ta_words *b, ptrdiff_t depth,
                                  ptrdiff_t width)
{
    const int rows = TA_WORD_ROWS(storage);
    for (int j = 0; j < width; j += TA_VL) {
        const int32_t *from = (const int32_t *)b->data + j;
        real *to = dst + j;
        ptrdiff_t p = 0;
        for (ptrdiff_t group = 0; p < depth; group++) {
            const scaling s = load_scaling(storage, b, group, width, j);
            const ptrdiff_t end = depth - p < b->group ? depth : p + b->group;
            for (; p + rows <= end; p += rows) {
                const veci w = word_vector(from);
                from += width;
                TA_UNROLL
                for (int k = 0; k < rows; k++, to += width)
                    vec_store(to, unpack(storage, w, k, s));
            }
            for (int k = 0; p < end; k++, p++, to += width) /* of the last word */
                vec_store(to, unpack(storage, word_vector(from), k, s));
        }
    }
}

#define TA_INSTANCE(STORAGE, NAME)                                                           \
    static void TA_NAME(convert_panel_##NAME)(void *dst, const ta_words *b, ptrdiff_t depth, \
                                              ptrdiff_t width)                               \
    {                                                                                        \
        convert_panel_body(STORAGE, dst, b, depth, width);                                   \
    }
TA_EACH_WORDS(TA_INSTANCE)
#undef TA_INSTANCE

/* acc += a b, one row of B whose words are w. */
#define unpacked_product TA_NAME(unpacked_product)
TA_INLINE void unpacked_product(vec acc[TA_ACC_ROWS][TA_ACC_VECTORS], const int storage, const int rows,
                                const real *a, const veci w[TA_GEMM_NV], int k, const scaling s[TA_GEMM_NV])
{
    vec b_row[TA_GEMM_NV];
    TA_UNROLL
    for (int j = 0; j < TA_GEMM_NV; j++)
        b_row[j] = unpack(storage, w[j], k, s[j]);
    TA_UNROLL
    for (int i = 0; i < rows; i++) {
        vec a_all = vec_all(a[i]);
        TA_UNROLL
        for (int j = 0; j < TA_GEMM_NV; j++)
            acc[i][j] += a_all * b_row[j];
    }
}

/* A tile of a few rows and a whole panel, whose words are converted in registers. That takes longer than a
 * multiply-add's latency: two panels at once brought one row 3% at most. It reads 4096 x 4096 from
 * DRAM 1.9, 3.3 and 4.8 times as fast as floats; int8 by shifts, without vec_top_byte, came to 3.1, and
 * int4 without vec_lookup to 4.0. */
#define stream_body TA_NAME(stream_body)
TA_INLINE void stream_body(const int storage, const int rows, const ta_gemm_tile *t, const ta_words *b)
{
    const int width = TA_GEMM_NV * TA_VL, steps = TA_WORD_ROWS(storage);
    vec acc[TA_ACC_ROWS][TA_ACC_VECTORS];
    TA_UNROLL
    for (int i = 0; i < rows; i++) {
        TA_UNROLL
        for (int j = 0; j < TA_GEMM_NV; j++)
            acc[i][j] = vec_all(0);
    }
    const real *a = t->a;
    const int32_t *from = b->data;
    ptrdiff_t p = 0;
    for (ptrdiff_t group = 0; p < t->depth; group++) {
        scaling s[TA_GEMM_NV];
        TA_UNROLL
        for (int j = 0; j < TA_GEMM_NV; j++)
            s[j] = load_scaling(storage, b, group, width, j * TA_VL);
        const ptrdiff_t end = t->depth - p < b->group ? t->depth : p + b->group;
        while (p < end) {
            veci w[TA_GEMM_NV];
            TA_UNROLL
            for (int j = 0; j < TA_GEMM_NV; j++)
                w[j] = word_vector(from + j * TA_VL);
            for (int j = 0; j < width * 4; j += TA_CACHE_LINE)
                __builtin_prefetch((const char *)from + TA_WALK_AHEAD + j, 0, 2);
            from += width;
            if (p + steps <= end) {
                TA_UNROLL
                for (int k = 0; k < steps; k++)
                    unpacked_product(acc, storage, rows, a + k * rows, w, k, s);
            } else {
                for (int k = 0; k < end - p; k++)
                    unpacked_product(acc, storage, rows, a + k * rows, w, k, s);
            }
            a += steps * rows;
            p += steps;
        }
    }
    gemm_finish(rows, TA_GEMM_NV, acc, t);
}

/* C[rows x columns] (+)= A B + bias as gemm_tile has it, words in place of t->b, up to walk_rows rows. */
#define TA_CASE(MR, STORAGE)                \
    case MR:                                \
        if (MR <= TA_WALK_ROWS)             \
            stream_body(STORAGE, MR, t, b); \
        break;
#define TA_INSTANCE(STORAGE, NAME)                                               \
    static void TA_NAME(stream_##NAME)(const ta_gemm_tile *t, const ta_words *b) \
    {                                                                            \
        switch (t->rows) {                                                       \
            TA_EACH_GEMM_ROWS(TA_CASE, STORAGE)                                  \
        }                                                                        \
    }
TA_EACH_WORDS(TA_INSTANCE)
#undef TA_INSTANCE
#undef TA_CASE
