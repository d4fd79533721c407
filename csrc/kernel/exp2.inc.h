/* 2^x for x <= 127 (1023 in double): relative error below 1e-7 (2e-16), 0 for x <= -127 (-1023), so
 * for -inf too, and NaN for NaN.
 *
 * x = n + f with n whole and |f| <= 1/2; 2^f is a minimax polynomial whose constant term is exactly
 * 1, and n goes into the exponent by an integer addition. At the clamp the exponent field becomes 0
 * with an empty mantissa: zero, not the smallest normal number. Degree 5 gains less than 1% of an
 * attention call and misses 1e-7.
 */
#define vec_exp2 TA_NAME(vec_exp2)
TA_INLINE vec vec_exp2(vec x)
{
#if TA_BITS == 32
    const real lowest = -127, to_integer = 0x1.8p23f;
    enum { MANTISSA_BITS = 23, DEGREE = 6 };
    static const real c[DEGREE + 1] = {
        1.0f,           0.693147225395f,  0.240226510841f, 0.0555029731420f,
        0.00961803078f, 0.00134100009661f, 0.00015469731977f,
    };
#else
    const real lowest = -1023, to_integer = 0x1.8p52;
    enum { MANTISSA_BITS = 52, DEGREE = 11 };
    static const real c[DEGREE + 1] = {
        1.0,
        0.693147180559945697,
        0.24022650695910098,
        0.0555041086647903893,
        0.009618129107607002,
        0.00133335581534413348,
        0.00015403530441572599,
        0.0000152527273838724629,
        1.32154426751155851e-6,
        1.01806481965558124e-7,
        7.07257044546929407e-9,
        4.07799385624635378e-10,
    };
#endif
    x = vec_max(vec_all(lowest), x);
    vec shifted = x + vec_all(to_integer); /* rounds x to a whole number, held in the low bits */
    vec f = x - (shifted - vec_all(to_integer));
    vec power = vec_all(c[DEGREE]);
    TA_UNROLL
    for (int i = DEGREE - 1; i >= 0; i--)
        power = power * f + vec_all(c[i]);
    return (vec)((veci)power + ((veci)shifted << MANTISSA_BITS));
}
