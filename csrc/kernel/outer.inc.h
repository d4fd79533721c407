/* The inner loop of every product here: a tile of C gains one outer product a step.
 *
 *     acc[i][j] += A[i][p] * B[p][j]      i < rows, j < vectors, p < depth, in order of p
 *
 * rows and vectors are constants at each call, so the accumulators live in registers; A is read one
 * element at a time and broadcast, B by whole vectors. One order of summation for every tile height:
 * a row's bits do not depend on the rows beside it. B may be of another storage; A never is.
 */
#define TA_ACC_ROWS (TA_GEMM_MR > TA_ATTENTION_MR ? TA_GEMM_MR : TA_ATTENTION_MR)
#define TA_ACC_VECTORS (TA_GEMM_NV > TA_FEW_VECTORS ? TA_GEMM_NV : TA_FEW_VECTORS)

#define outer_products TA_NAME(outer_products)
TA_INLINE void outer_products(vec acc[TA_ACC_ROWS][TA_ACC_VECTORS], const int rows, const int vectors,
                              ptrdiff_t depth, const real *a, ptrdiff_t a_row_stride, ptrdiff_t a_stride,
                              const int b_storage, const void *b_, ptrdiff_t b_stride)
{
    const ptrdiff_t b_size = stored_size(b_storage);
    const char *b = b_;
    for (ptrdiff_t p = 0; p < depth; p++) {
        vec b_row[TA_ACC_VECTORS];
        TA_UNROLL
        for (int j = 0; j < vectors; j++)
            b_row[j] = load_vector(b_storage, b + j * TA_VL * b_size);
        TA_UNROLL
        for (int i = 0; i < rows; i++) {
            vec a_all = vec_all(a[i * a_row_stride]);
            TA_UNROLL
            for (int j = 0; j < vectors; j++)
                acc[i][j] += a_all * b_row[j];
        }
        a += a_stride;
        b += b_stride * b_size;
    }
}
