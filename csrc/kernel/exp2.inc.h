/* 2^x for x <= 127 (1023 in double): relative error at most 1e-7 (4e-16), 0 for x <= -127 (-1023), so
 * for -inf too, and NaN for NaN. Between there and the smallest normal number the error is absolute.
 *
 * x = n + j / steps + f with n, j whole and f at most half a step. 2^(n + j / steps) is looked up by j
 * and gets n added to its exponent; 2^f - 1 is a polynomial without a constant term, interpolated at
 * Chebyshev's nodes. At the clamp the exponent field becomes 0 with an empty mantissa: zero, not the
 * smallest normal number. The final multiplication, rather than an addition to the exponent, keeps a
 * NaN one, whatever its payload.
 *
 * 8 steps take degree 4 where one step (no lookup) takes 6. Degree 3 with 16 steps misses 1e-7 by 6%, for
 * the rounding of the table comes on top; so does degree 5 with one step.
 */
#define vec_exp2 TA_NAME(vec_exp2)
TA_INLINE vec vec_exp2(vec x)
{
#if TA_BITS == 32
    const real lowest = -127;
    enum { MANTISSA_BITS = 23 };
#if TA_LOOKUP_BITS == 3
    /* bits of 2^(j / 8), less the j that the shift below adds to the mantissa; the index has one bit
     * of n above j */
    static const integer power[16] = {
        0x3f800000, 0x3f7b95c2, 0x3f7837f0, 0x3f75fed7, 0x3f7504f3, 0x3f75672a, 0x3f7744fd, 0x3f7ac0c7,
        0x3f800000, 0x3f7b95c2, 0x3f7837f0, 0x3f75fed7, 0x3f7504f3, 0x3f75672a, 0x3f7744fd, 0x3f7ac0c7};
    enum { DEGREE = 4 };
    static const real c[DEGREE] = {0.693147178017f, 0.240226506665f, 0.0555093172896f, 0.00961873082568f};
#else
    enum { DEGREE = 6 };
    static const real c[DEGREE] = {0.693147188026f,   0.240226507606f,   0.0555035711422f,
                                   0.00961808255728f, 0.00133908663647f, 0.000154531629451f};
#endif
#else
    const real lowest = -1023;
    enum { MANTISSA_BITS = 52 };
#if TA_LOOKUP_BITS == 3
    static const integer power[8] = {0x3ff0000000000000, 0x3fef72b83c7d517b, 0x3fef06fe0a31b715,
                                     0x3feebfdad5362a27, 0x3feea09e667f3bcd, 0x3feeace5422aa0db,
                                     0x3feee89f995ad3ad, 0x3fef5818dcfba487};
    enum { DEGREE = 7 };
    static const real c[DEGREE] = {0.693147180559945309,    0.240226506959109328,   0.0555041086648222435,
                                   0.00961812908998330078,  0.00133335581328388558, 0.000154044338193475813,
                                   0.0000152534295864969094};
#else
    enum { DEGREE = 11 };
    static const real c[DEGREE] = {
        0.693147180559945309,   0.240226506959100982,    0.0555041086648215943,    0.00961812910760688853,
        0.00133335581464169353, 0.000154035304417360502, 0.0000152527338298361184, 1.32154425879216897e-6,
        1.01780624458457735e-7, 7.0725859692492237e-9,   4.45496059818651839e-10};
#endif
#endif
    const real to_step = (real)1.5 * ((integer)1 << (MANTISSA_BITS - TA_LOOKUP_BITS));
    x = vec_max(vec_all(lowest), x);
    vec shifted = x + vec_all(to_step); /* rounds x to a step; its low bits hold n and j */
    vec f = x - (shifted - vec_all(to_step));
    vecu exponent = (vecu)shifted << (MANTISSA_BITS - TA_LOOKUP_BITS); /* unsigned: a NaN's is anything */
#if TA_LOOKUP_BITS > 0
    vec scale = (vec)((vecu)vec_lookup(power, (veci)shifted) + exponent);
#else
    vec scale = (vec)((vecu)vec_all(1) + exponent);
#endif
    vec less_one = vec_all(c[DEGREE - 1]);
    TA_UNROLL
    for (int i = DEGREE - 2; i >= 0; i--)
        less_one = less_one * f + vec_all(c[i]);
    return scale * (less_one * f) + scale;
}
