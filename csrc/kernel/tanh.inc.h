/* tanh(x): relative error at most 4e-7 (6e-16), +-1 for +-inf, and NaN for NaN.
 *
 * Up to 0.625, where the formula beyond would cancel, an odd polynomial: x + x^3 P(x^2), interpolated at
 * Chebyshev's nodes. Beyond, 1 - 2 e / (1 + e) with e = exp(-2 |x|), which cannot overflow.
 */
#define vec_tanh TA_NAME(vec_tanh)
TA_INLINE vec vec_tanh(vec x)
{
#if TA_BITS == 32
    enum { DEGREE = 5 };
    static const real c[DEGREE] = {-0.3333332894f, 0.1333276974f, -0.05385090958f, 0.020997179f,
                                   -0.006096714166f};
#else
    enum { DEGREE = 11 };
    static const real c[DEGREE] = {
        -0.3333333333333332256,   0.1333333333332665774,     -0.05396825396139557082,
        0.02186948826055911465,   -0.008863229830925708746,  0.003592058977473455315,
        -0.001455309297534642025, 0.0005874372860094381897,  -0.000230776162695198579,
        0.00007959955735264808,   -0.00001724487449484433017};
#endif
    vec size = vec_size(x), square = x * x;
    vec series = vec_all(c[DEGREE - 1]);
    TA_UNROLL
    for (int i = DEGREE - 2; i >= 0; i--)
        series = series * square + vec_all(c[i]);
    vec e = vec_exp2(size * vec_all((real)(-2 * TA_LOG2_E)));
    vec beyond = vec_all(1) - (e + e) / (vec_all(1) + e);
    beyond = (vec)((veci)beyond | ((veci)x ^ (veci)size)); /* its sign */
    return vec_select((veci)(size < vec_all((real)0.625)), x + x * (square * series), beyond);
}
