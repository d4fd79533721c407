/* What the machine's multiply-add units can do: the yardstick of every "percent of peak". */
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
