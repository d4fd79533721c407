/* A row of floats as int8 and a scale: dst[j] = src[j] / scale, rounded to nearest, ties to even.
 *
 * The largest is 127 in size, so that each differs from dst[j] * scale by at most half a scale and the
 * rounding of that product. Zeros have the scale 0. A row with a NaN or an infinity has the scale NaN, and
 * is NaN as a whole: no number of int8 could say so for one of its elements.
 */
/* A smaller scale would be subnormal, and have lost bits or all of them; 127 times a larger one is
 * infinite. */
#define TA_LEAST_SCALE FLT_MIN
#define TA_LARGEST_SCALE 0x1.020406p+121f

/* Integers up to 2^22 in size, rounded to the lowest bits of a float beside this. */
#define TA_INTEGER_BITS 0x1.8p+23f

static void TA_NAME(quantize_row)(void *dst_, void *scale_, const void *src_, ptrdiff_t count)
{
    typedef signed char bytes __attribute__((vector_size(TA_VL)));
    signed char *dst = dst_;
    const real *src = src_;
    const ptrdiff_t whole = count / TA_VL * TA_VL;
    vec sizes = vec_all(0), zeros = vec_all(0); /* x * 0 is NaN where x is not finite */
    for (ptrdiff_t j = 0; j < whole; j += TA_VL) {
        const vec v = vec_load(src + j);
        sizes = vec_max(vec_size(v), sizes);
        zeros += v * vec_all(0);
    }
    real size = vec_lanes_max(sizes), zero = vec_sum(zeros);
    for (ptrdiff_t j = whole; j < count; j++) {
        const real one = src[j] < 0 ? -src[j] : src[j];
        size = one > size ? one : size;
        zero += one * 0;
    }
    real scale = size / 127;
    scale = scale > TA_LARGEST_SCALE ? TA_LARGEST_SCALE : scale < TA_LEAST_SCALE ? TA_LEAST_SCALE : scale;
    if (size == 0 || zero != 0) {
        memset(dst, 0, count);
        *(real *)scale_ = zero != 0 ? (real)NAN : 0;
        return;
    }
    *(real *)scale_ = scale;
    ptrdiff_t j = 0;
    for (; j < whole; j += TA_VL) {
        const vec rounded = vec_load(src + j) / vec_all(scale) + vec_all(TA_INTEGER_BITS);
        const bytes low = __builtin_convertvector((veci)rounded, bytes);
        memcpy(dst + j, &low, sizeof low);
    }
    for (; j < count; j++)
        dst[j] = (signed char)(src[j] / scale + TA_INTEGER_BITS - TA_INTEGER_BITS);
}
