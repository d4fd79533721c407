/* Packing: the only kernels that read memory in an order of the caller's.
 *
 *   pack_rows      rows[0]  a0 a1 a2 ...        dst  a0 b0 c0
 *   (interleaves)  rows[1]  b0 b1 b2 ...   ->        a1 b1 c1
 *                  rows[2]  c0 c1 c2 ...             a2 b2 c2 ...
 *
 *   pack_columns   row 0    a0 a1 a2            dst  a0 a1 a2 0
 *   (pads)         row 1    b0 b1 b2       ->        b0 b1 b2 0 ...
 *
 * Rows of A and keys are interleaved; columns of B, query rows and values are padded.
 */

/* In registers: lane i of vector j becomes lane j of vector i. */
#define transpose TA_NAME(transpose)
TA_INLINE void transpose(vec v[TA_VL])
{
    vec w[TA_VL];
    TA_UNROLL
    for (int step = 1; step < TA_VL; step *= 2) {
        TA_UNROLL
        for (int i = 0; i < TA_VL / 2; i++) {
            w[2 * i] = vec_zip_low(v[i], v[i + TA_VL / 2]);
            w[2 * i + 1] = vec_zip_high(v[i], v[i + TA_VL / 2]);
        }
        TA_UNROLL
        for (int i = 0; i < TA_VL; i++)
            v[i] = w[i];
    }
}

/* Interleaves up to TA_VL rows, of which each vector stored holds one column. Where the vector is
 * wider than the rows are many, it reaches into the next column, which is stored later: dst needs
 * TA_VL - 1 elements of slack behind it. */
#define pack_chunk TA_NAME(pack_chunk)
TA_INLINE void pack_chunk(real *dst, const void *const *rows, int count, int dst_stride, ptrdiff_t depth)
{
    ptrdiff_t j = 0;
    for (; j + TA_VL <= depth; j += TA_VL) {
        vec v[TA_VL];
        TA_UNROLL
        for (int i = 0; i < TA_VL; i++)
            v[i] = vec_load((const real *)rows[i < count ? i : count - 1] + j);
        transpose(v);
        TA_UNROLL
        for (int i = 0; i < TA_VL; i++)
            vec_store(dst + (j + i) * dst_stride, v[i]);
    }
    for (; j < depth; j++)
        for (int i = 0; i < count; i++)
            dst[j * dst_stride + i] = ((const real *)rows[i])[j];
}

/* dst[j][i] = rows[i][j * column_stride], dst[depth][count] with TA_VL - 1 elements of slack
 * behind it. Nothing of a row is read beyond its `depth` elements. */
static void TA_NAME(pack_rows)(void *dst_, const void *const *rows, int count, ptrdiff_t depth,
                               ptrdiff_t column_stride)
{
    real *dst = dst_;
    if (column_stride != 1) {
        for (int i = 0; i < count; i++)
            for (ptrdiff_t j = 0; j < depth; j++)
                dst[j * count + i] = ((const real *)rows[i])[j * column_stride];
        return;
    }
    /* The last chunk first: what it stores beyond the last row belongs to chunks still to come. */
    for (int i = (count - 1) / TA_VL * TA_VL; i >= 0; i -= TA_VL) {
        int left = count - i < TA_VL ? count - i : TA_VL;
        pack_chunk(dst + i, rows + i, left, count, depth);
    }
}

/* dst[p][j] = scale * src[p * row_stride + j * column_stride] for j < columns, zero up to `width`. */
static void TA_NAME(pack_columns)(void *dst_, const void *src_, ptrdiff_t depth, ptrdiff_t columns,
                                  ptrdiff_t width, ptrdiff_t row_stride, ptrdiff_t column_stride,
                                  double scale)
{
    real *dst = dst_;
    for (ptrdiff_t p = 0; p < depth; p++) {
        const real *row = (const real *)src_ + p * row_stride;
        ptrdiff_t j = 0;
        if (column_stride == 1)
            for (; j + TA_VL <= columns; j += TA_VL)
                vec_store(dst + j, vec_all((real)scale) * vec_load(row + j));
        for (; j < columns; j++)
            dst[j] = (real)scale * row[j * column_stride];
        for (; j < width && j % TA_VL != 0; j++)
            dst[j] = 0;
        for (; j + TA_VL <= width; j += TA_VL)
            vec_store(dst + j, vec_all(0));
        for (; j < width; j++)
            dst[j] = 0;
        dst += width;
    }
}
