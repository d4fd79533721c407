/* C[rows x columns] (+)= A B + bias over one slice of the contracted axis.
 *
 *          b  [depth][width]                    one packed panel, width = columns rounded up to TA_VL
 *   a   ┌─────────────┐
 *  [depth][rows]      │                         c + i * c_stride: `columns` of them are written,
 *   └──────────────── C  rows x columns         memory beyond is neither read nor written
 *
 * The first slice overwrites C, later ones accumulate; the last adds the bias. C may not overlap A, B
 * or bias. A panel's padding may hold anything, NaN too. A tile that is alone walks one or several whole
 * panels, `panel_stride` apart in B and side by side in C.
 */

/* What a plain store cannot do: a bias, or columns that are no whole vectors. */
#define gemm_store TA_NAME(gemm_store)
TA_NOINLINE void gemm_store(const ta_gemm_tile *t, const real *products, int width)
{
    const real *bias = t->bias;
    for (int i = 0; i < t->rows; i++) {
        real *c = (real *)t->c + i * t->c_stride;
        int j = 0;
        for (; j + TA_VL <= t->columns; j += TA_VL) {
            vec sum = vec_load(products + j);
            sum = t->accumulate ? vec_load(c + j) + sum : sum;
            vec_store(c + j, bias != NULL ? sum + vec_load(bias + j) : sum);
        }
        for (; j < t->columns; j++) {
            real sum = t->accumulate ? c[j] + products[j] : products[j];
            c[j] = bias != NULL ? sum + bias[j] : sum;
        }
        products += width;
    }
}

#define gemm_finish TA_NAME(gemm_finish)
TA_INLINE void gemm_finish(const int rows, const int vectors, vec acc[TA_ACC_ROWS][TA_ACC_VECTORS],
                           const ta_gemm_tile *t)
{
    const int width = vectors * TA_VL;
    int plain = t->columns == width && t->bias == NULL;
    real products[TA_GEMM_MR * TA_GEMM_NV * TA_VL];
    real *to = plain ? t->c : products;
    ptrdiff_t stride = plain ? t->c_stride : width;
    int accumulate = plain && t->accumulate;
    TA_UNROLL
    for (int i = 0; i < rows; i++) {
        TA_UNROLL
        for (int j = 0; j < vectors; j++) {
            real *at = to + i * stride + j * TA_VL;
            vec_store(at, accumulate ? vec_load(at) + acc[i][j] : acc[i][j]);
        }
    }
    if (!plain)
        gemm_store(t, products, width);
}

/* Steps between two lots of prefetching. What stands between the parts costs as much as a step: parts of 2
 * took 20-50% longer where B lies in the second-level cache. Parts of 4 are no faster. */
#define TA_GEMM_STEPS 8

#define gemm_body TA_NAME(gemm_body)
TA_INLINE void gemm_body(const int rows, const int vectors, const ta_gemm_tile *t)
{
    const int width = vectors * TA_VL;
    vec acc[TA_ACC_ROWS][TA_ACC_VECTORS];
    TA_UNROLL
    for (int i = 0; i < rows; i++) {
        TA_UNROLL
        for (int j = 0; j < vectors; j++)
            acc[i][j] = vec_all(0);
    }
    /* Each part of the slice asks for a row of C, while there are any, and for its share of what comes
     * next: more misses at once would fill the line buffers, and A and B, which come from the second-level
     * cache through the same buffers, would wait. */
    const real *a = t->a, *b = t->b;
    const ptrdiff_t parts = t->depth / TA_GEMM_STEPS;
    uintptr_t next = (uintptr_t)t->next, stop = next;
    const ptrdiff_t share = parts ? t->next_bytes / parts : 0;
    const real *c = t->c;
    for (ptrdiff_t part = 0; part < parts; part++) {
        if (part < rows) {
            TA_UNROLL
            for (int j = 0; j < width; j += TA_CACHE_LINE / (int)sizeof(real))
                __builtin_prefetch(c + j, 1, 3);
            c += t->c_stride;
        }
        for (stop += share; next < stop; next += TA_CACHE_LINE)
            __builtin_prefetch((const void *)next, 0, 2);
        outer_products(acc, rows, vectors, TA_GEMM_STEPS, a, 1, rows, TA_REAL, b, width);
        a += TA_GEMM_STEPS * rows;
        b += TA_GEMM_STEPS * width;
    }
    outer_products(acc, rows, vectors, t->depth % TA_GEMM_STEPS, a, 1, rows, TA_REAL, b, width);
    gemm_finish(rows, vectors, acc, t);
}

/* A tile that is alone in its panels reads B once, and asks for it in every step: 5 to 9 rows read DRAM 3%
 * faster than if they ask in parts. Few rows walk several panels at once, each in its own order.
 * (Splitting the depth would hide the latency, too, and make a row's bits depend on how many rows there
 * are.) In a cache, 576 x 576: 57 -> 95 GB/s for one row, 42 -> 67 for two. */
#define TA_WALK_AHEAD 4096 /* bytes */
#define walk_body TA_NAME(walk_body)
TA_INLINE void walk_body(const int rows, const int panels, const ta_gemm_tile *t)
{
    const int width = TA_GEMM_NV * TA_VL;
    vec acc[TA_WALK_PANELS(1, TA_WALK_ROWS)][TA_ACC_ROWS][TA_ACC_VECTORS];
    TA_UNROLL
    for (int q = 0; q < panels; q++) {
        TA_UNROLL
        for (int i = 0; i < rows; i++) {
            TA_UNROLL
            for (int j = 0; j < TA_GEMM_NV; j++)
                acc[q][i][j] = vec_all(0);
        }
    }
    const real *a = t->a, *b = t->b;
    for (ptrdiff_t p = 0; p < t->depth; p++) {
        TA_UNROLL
        for (int q = 0; q < panels; q++) {
            const real *row = b + q * t->panel_stride;
            /* For one row the hardware's prefetching suffices; four read DRAM at 74% without. */
            for (int j = 0; rows > 1 && j < width * (int)sizeof(real); j += TA_CACHE_LINE)
                __builtin_prefetch((const char *)row + TA_WALK_AHEAD + j, 0, 2);
            outer_products(acc[q], rows, TA_GEMM_NV, 1, a, 1, rows, TA_REAL, row, width);
        }
        a += rows;
        b += width;
    }
    TA_UNROLL
    for (int q = 0; q < panels; q++) {
        ta_gemm_tile one = *t;
        one.c = (real *)t->c + q * width;
        one.bias = t->bias == NULL ? NULL : (const real *)t->bias + q * width;
        gemm_finish(rows, TA_GEMM_NV, acc[q], &one);
    }
}

#define TA_INSTANCE(MR, NV)                                    \
    TA_NOINLINE void TA_NAME(walk_##MR)(const ta_gemm_tile *t) \
    {                                                          \
        walk_body(MR, TA_WALK_PANELS(MR, TA_WALK_ROWS), t);    \
    }
#define TA_ENTRY(MR, NV) TA_NAME(walk_##MR),
TA_EACH_GEMM_ROWS(TA_INSTANCE, )
static void (*const TA_NAME(walks)[])(const ta_gemm_tile *) = {TA_EACH_GEMM_ROWS(TA_ENTRY, )};
#undef TA_INSTANCE
#undef TA_ENTRY

/* One function for each height and width, so that each has its own registers. */
#define TA_INSTANCE(MR, NV)                                           \
    TA_NOINLINE void TA_NAME(gemm_##MR##x##NV)(const ta_gemm_tile *t) \
    {                                                                 \
        gemm_body(MR, NV, t);                                         \
    }
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
    if (t->panels > 0)
        TA_NAME(walks)[t->rows - 1](t);
    else
        instances[(t->columns - 1) / TA_VL][t->rows - 1](t);
}
#undef TA_INSTANCE
#undef TA_ENTRY
