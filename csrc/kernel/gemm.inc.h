/* C[rows x columns] (+)= A B + bias over one slice of the contracted axis.
 *
 *          b  [depth][width]                    one packed panel, width = columns rounded up to TA_VL
 *   a   ┌─────────────┐
 *  [depth][rows]      │                         c + i * c_stride: `columns` of them are written,
 *   └──────────────── C  rows x columns         memory beyond is neither read nor written
 *
 * The first slice overwrites C, later ones accumulate; the last adds the bias. C may not overlap A, B
 * or bias. A panel's padding may hold anything, NaN too.
 */
#define gemm_body TA_NAME(gemm_body)
TA_INLINE void gemm_body(const int rows, const int vectors, const ta_gemm_tile *t)
{
    real *c = t->c;
    vec acc[TA_ACC_ROWS][TA_ACC_VECTORS];
    TA_UNROLL
    for (int i = 0; i < rows; i++) {
        __builtin_prefetch(c + i * t->c_stride, 1, 3);
        TA_UNROLL
        for (int j = 0; j < vectors; j++)
            acc[i][j] = vec_all(0);
    }
    if (t->b_next != NULL)
        outer_products(acc, rows, vectors, t->depth, t->a, 1, rows, t->b, vectors * TA_VL, t->b_next);
    else
        outer_products(acc, rows, vectors, t->depth, t->a, 1, rows, t->b, vectors * TA_VL, NULL);

    const real *bias = t->bias;
    TA_UNROLL
    for (int j = 0; j < vectors; j++) {
        ptrdiff_t left = t->columns - j * TA_VL;
        if (left >= TA_VL) {
            TA_UNROLL
            for (int i = 0; i < rows; i++) {
                real *to = c + i * t->c_stride + j * TA_VL;
                vec sum = t->accumulate ? vec_load(to) + acc[i][j] : acc[i][j];
                vec_store(to, bias != NULL ? sum + vec_load(bias + j * TA_VL) : sum);
            }
        } else {
            TA_UNROLL
            for (int i = 0; i < rows; i++) {
                real *to = c + i * t->c_stride + j * TA_VL;
                vec sum = t->accumulate ? vec_load_part(to, left) + acc[i][j] : acc[i][j];
                vec_store_part(to, bias != NULL ? sum + vec_load_part(bias + j * TA_VL, left) : sum, left);
            }
        }
    }
}

/* One function for each height and width, so that each has its own registers. */
#define TA_INSTANCE(MR, NV) \
    TA_NOINLINE void TA_NAME(gemm_##MR##x##NV)(const ta_gemm_tile *t) { gemm_body(MR, NV, t); }
#define TA_ENTRY(MR, NV) TA_NAME(gemm_##MR##x##NV),
TA_EACH_GEMM_ROWS(TA_INSTANCE, 1)
TA_EACH_GEMM_ROWS(TA_INSTANCE, 2)
#if TA_GEMM_NV == 3
TA_EACH_GEMM_ROWS(TA_INSTANCE, 3)
#endif

static void TA_NAME(gemm_tile)(const ta_gemm_tile *t)
{
    static void (*const instances[TA_GEMM_NV][TA_GEMM_MR])(const ta_gemm_tile *) = {
        {TA_EACH_GEMM_ROWS(TA_ENTRY, 1)},
        {TA_EACH_GEMM_ROWS(TA_ENTRY, 2)},
#if TA_GEMM_NV == 3
        {TA_EACH_GEMM_ROWS(TA_ENTRY, 3)},
#endif
    };
    instances[(t->columns - 1) / TA_VL][t->rows - 1](t);
}
#undef TA_INSTANCE
#undef TA_ENTRY
