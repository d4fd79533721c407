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
TA_INLINE void pack_chunk(const int storage, real *dst, const void *const *rows, int count, int dst_stride,
                          ptrdiff_t depth)
{
    const ptrdiff_t size = stored_size(storage);
    ptrdiff_t j = 0;
    for (; j + TA_VL <= depth; j += TA_VL) {
        vec v[TA_VL];
        TA_UNROLL
        for (int i = 0; i < TA_VL; i++) {
            const char *row = rows[i < count ? i : count - 1];
            v[i] = load_vector(storage, row + j * size);
        }
        transpose(v);
        TA_UNROLL
        for (int i = 0; i < TA_VL; i++)
            vec_store(dst + (j + i) * dst_stride, v[i]);
    }
    for (; j < depth; j++)
        for (int i = 0; i < count; i++)
            dst[j * dst_stride + i] = load_one(storage, (const char *)rows[i] + j * size);
}

#define pack_rows_body TA_NAME(pack_rows_body)
TA_INLINE void pack_rows_body(const int storage, real *dst, const void *const *rows, int count,
                              ptrdiff_t depth, ptrdiff_t column_stride)
{
    if (column_stride != 1) {
        const ptrdiff_t step = column_stride * stored_size(storage);
        for (int i = 0; i < count; i++)
            for (ptrdiff_t j = 0; j < depth; j++)
                dst[j * count + i] = load_one(storage, (const char *)rows[i] + j * step);
        return;
    }
    /* The last chunk first: what it stores beyond the last row belongs to chunks still to come. */
    for (int i = (count - 1) / TA_VL * TA_VL; i >= 0; i -= TA_VL) {
        int left = count - i < TA_VL ? count - i : TA_VL;
        pack_chunk(storage, dst + i, rows + i, left, count, depth);
    }
}

/* dst[j][i] = rows[i][j * column_stride], dst[depth][count] with TA_VL - 1 elements of slack
 * behind it. Nothing of a row is read beyond its `depth` elements. */
#define TA_INSTANCE(STORAGE, NAME)                                                            \
    static void TA_NAME(NAME)(void *dst, const void *const *rows, int count, ptrdiff_t depth, \
                              ptrdiff_t column_stride)                                        \
    {                                                                                         \
        pack_rows_body(STORAGE, dst, rows, count, depth, column_stride);                      \
    }
TA_EACH_KEPT(TA_INSTANCE, pack_rows)
#undef TA_INSTANCE

#define load_row_body TA_NAME(load_row_body)
TA_INLINE void load_row_body(const int storage, real *dst, const char *src, ptrdiff_t count,
                             ptrdiff_t stride, real scale)
{
    const ptrdiff_t step = stride * stored_size(storage);
    ptrdiff_t j = 0;
    if (stride == 1)
        for (; j + TA_VL <= count; j += TA_VL)
            vec_store(dst + j, vec_all(scale) * load_vector(storage, src + j * step));
    for (; j < count; j++)
        dst[j] = scale * load_one(storage, src + j * step);
}

/* dst[j] = src[j * stride] for j < count. */
#define TA_INSTANCE(STORAGE, NAME)                                                           \
    static void TA_NAME(NAME)(void *dst, const void *src, ptrdiff_t count, ptrdiff_t stride) \
    {                                                                                        \
        load_row_body(STORAGE, dst, src, count, stride, 1);                                  \
    }
TA_EACH_SOURCE(TA_INSTANCE, load_row)
#undef TA_INSTANCE

#define store_row_body TA_NAME(store_row_body)
TA_INLINE void store_row_body(const int storage, char *dst, const real *src, ptrdiff_t count)
{
    const ptrdiff_t size = stored_size(storage);
    ptrdiff_t j = 0;
    for (; j + TA_VL <= count; j += TA_VL)
        store_vector(storage, dst + j * size, vec_load(src + j));
    for (; j < count; j++)
        store_one(storage, dst + j * size, src[j]);
}

/* dst[j] = src[j] for j < count, rounded to nearest. */
#define TA_INSTANCE(STORAGE, NAME)                                         \
    static void TA_NAME(NAME)(void *dst, const void *src, ptrdiff_t count) \
    {                                                                      \
        store_row_body(STORAGE, dst, src, count);                          \
    }
TA_EACH_STORAGE(TA_INSTANCE, store_row)
#undef TA_INSTANCE

#define pack_columns_body TA_NAME(pack_columns_body)
TA_INLINE void pack_columns_body(const int storage, real *dst, const char *row, ptrdiff_t depth,
                                 ptrdiff_t columns, ptrdiff_t width, ptrdiff_t row_stride,
                                 ptrdiff_t column_stride, real scale)
{
    for (ptrdiff_t p = 0; p < depth; p++) {
        load_row_body(storage, dst, row, columns, column_stride, scale);
        ptrdiff_t j = columns;
        for (; j < width && j % TA_VL != 0; j++)
            dst[j] = 0;
        for (; j + TA_VL <= width; j += TA_VL)
            vec_store(dst + j, vec_all(0));
        for (; j < width; j++)
            dst[j] = 0;
        row += row_stride * stored_size(storage);
        dst += width;
    }
}

/* dst[p][j] = scale * src[p * row_stride + j * column_stride] for j < columns, zero up to `width`. */
#define TA_INSTANCE(STORAGE, NAME)                                                             \
    static void TA_NAME(NAME)(void *dst, const void *src, ptrdiff_t depth, ptrdiff_t columns,  \
                              ptrdiff_t width, ptrdiff_t row_stride, ptrdiff_t column_stride,  \
                              double scale)                                                    \
    {                                                                                          \
        pack_columns_body(STORAGE, dst, src, depth, columns, width, row_stride, column_stride, \
                          (real)scale);                                                        \
    }
TA_EACH_KEPT(TA_INSTANCE, pack_columns)
#undef TA_INSTANCE

/* rows[i][j] *= scales[j] for i < count and j < columns, rounded up to whole vectors. */
#define scale_rows TA_NAME(scale_rows)
TA_INLINE void scale_rows(real *rows, ptrdiff_t count, ptrdiff_t columns, ptrdiff_t row_stride,
                          const real *scales)
{
    for (ptrdiff_t i = 0; i < count; i++, rows += row_stride)
        for (ptrdiff_t j = 0; j < columns; j += TA_VL)
            vec_store(rows + j, vec_load(rows + j) * vec_load(scales + j));
}

static void TA_NAME(scale_columns)(void *dst, const void *scales, ptrdiff_t depth, ptrdiff_t width)
{
    scale_rows(dst, depth, width, width, scales);
}
