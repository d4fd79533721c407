/* The yardsticks: what the machine's multiply-add units and its memory can do. */
enum { TA_NAME(CHAINS) = 12 }; /* independent sums: latency 4 times 2 units, and some to spare */

static double TA_NAME(fma_rounds)(ptrdiff_t rounds)
{
    vec acc[TA_NAME(CHAINS)];
    /* Values that no compiler knows, and that stay finite: x <- x / 2 + 1 tends to 2. */
    volatile real half = (real)0.5, one = 1;
    vec a = vec_all(half), b = vec_all(one);
    TA_UNROLL
    for (int i = 0; i < TA_NAME(CHAINS); i++)
        acc[i] = vec_all((real)i);
    for (ptrdiff_t r = 0; r < rounds; r++) {
        TA_UNROLL
        for (int i = 0; i < TA_NAME(CHAINS); i++)
            acc[i] = acc[i] * a + b;
    }
    vec total = vec_all(0);
    TA_UNROLL
    for (int i = 0; i < TA_NAME(CHAINS); i++)
        total += acc[i];
    volatile real keep = vec_sum(total);
    (void)keep;
    return 2.0 * TA_VL * TA_NAME(CHAINS) * (double)rounds;
}

/* Reads `count` values, a multiple of 8 vectors, and returns their sum: a plain loop over memory. */
static double TA_NAME(read_all)(const void *src_, ptrdiff_t count)
{
    const real *src = src_;
    vec sums[8];
    TA_UNROLL
    for (int i = 0; i < 8; i++)
        sums[i] = vec_all(0);
    for (ptrdiff_t j = 0; j < count; j += 8 * TA_VL) {
        TA_UNROLL
        for (int i = 0; i < 8; i++)
            sums[i] += vec_load(src + j + i * TA_VL);
    }
    TA_UNROLL
    for (int i = 1; i < 8; i++)
        sums[0] += sums[i];
    return vec_sum(sums[0]);
}
