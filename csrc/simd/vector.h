/* The SIMD vocabulary that compilers' vector types give on every instruction set.
 *
 * Included by each simd/<isa>.h, once for an element type, after it has said TA_VECTOR_BYTES and
 * before it adds the few operations for which these types lose to an intrinsic: vec_max,
 * vec_any_greater, vec_any_bit, conversion from and to what `real` is stored as, and vec_lookup where there
 * is a fast one. `vec` is TA_VL lanes of `real`, `veci` and `vecu` as many integers of the same width (and
 * what comparisons give: all bits of a lane set, or none).
 */

#define vec TA_NAME(vec)
#define veci TA_NAME(veci)
#define vecu TA_NAME(vecu)
typedef real vec __attribute__((vector_size(TA_VECTOR_BYTES)));
typedef integer veci __attribute__((vector_size(TA_VECTOR_BYTES)));
typedef natural vecu __attribute__((vector_size(TA_VECTOR_BYTES)));
/* the same in memory, aligned as an element is */
typedef real TA_NAME(loose) __attribute__((vector_size(TA_VECTOR_BYTES), aligned(sizeof(real)), may_alias));

#define TA_VL (TA_VECTOR_BYTES / (int)sizeof(real))
/* Query rows whose products with a few keys fill the lanes of a vector: at most so many at once. */
#if TA_VECTOR_BYTES * 8 / TA_BITS >= 16
#define TA_FEW_ROWS 8
#elif TA_VECTOR_BYTES * 8 / TA_BITS >= 4
#define TA_FEW_ROWS 4
#else
#define TA_FEW_ROWS 2
#endif

#define vec_load TA_NAME(vec_load)
static inline vec vec_load(const real *from)
{
    return *(const TA_NAME(loose) *)from;
}

#define vec_store TA_NAME(vec_store)
static inline void vec_store(real *to, vec v)
{
    *(TA_NAME(loose) *)to = v;
}

#define vec_all TA_NAME(vec_all)
static inline vec vec_all(real value)
{
    return value - (vec){0}; /* not +: it would turn -0 into 0 */
}

/* where ? a : b, lane by lane */
#define vec_select TA_NAME(vec_select)
static inline vec vec_select(veci where, vec a, vec b)
{
    return (vec)((where & (veci)a) | (~where & (veci)b));
}

/* Interleaving of two vectors' lower and upper halves: the steps of every transposition here. */
#if TA_VECTOR_BYTES * 8 / TA_BITS == 16
#define TA_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define TA_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#define TA_SWAPPED 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14
#elif TA_VECTOR_BYTES * 8 / TA_BITS == 8
#define TA_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define TA_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#define TA_SWAPPED 1, 0, 3, 2, 5, 4, 7, 6
#elif TA_VECTOR_BYTES * 8 / TA_BITS == 4
#define TA_LOW 0, 4, 1, 5
#define TA_HIGH 2, 6, 3, 7
#define TA_SWAPPED 1, 0, 3, 2
#else
#define TA_LOW 0, 2
#define TA_HIGH 1, 3
#define TA_SWAPPED 1, 0
#endif

#define vec_zip_low TA_NAME(vec_zip_low)
static inline vec vec_zip_low(vec a, vec b)
{
    return __builtin_shufflevector(a, b, TA_LOW);
}

#define vec_zip_high TA_NAME(vec_zip_high)
static inline vec vec_zip_high(vec a, vec b)
{
    return __builtin_shufflevector(a, b, TA_HIGH);
}

/* Lanes 1, 0, 3, 2, ... */
#define vec_swap_pairs TA_NAME(vec_swap_pairs)
static inline vec vec_swap_pairs(vec v)
{
    return __builtin_shufflevector(v, v, TA_SWAPPED);
}

#undef TA_LOW
#undef TA_HIGH
#undef TA_SWAPPED

/* Sum and maximum of the lanes, halving in a fixed order. */
#define vec_sum TA_NAME(vec_sum)
static inline real vec_sum(vec v)
{
    for (int step = 1; step < TA_VL; step *= 2)
        v = vec_zip_low(v, v) + vec_zip_high(v, v);
    return v[0];
}

#define vec_lanes_max TA_NAME(vec_lanes_max)
static inline real vec_lanes_max(vec v)
{
    for (int step = 1; step < TA_VL; step *= 2) {
        vec low = vec_zip_low(v, v), high = vec_zip_high(v, v);
        v = vec_select((veci)(low > high), low, high);
    }
    return v[0];
}

/* |v|, lane by lane */
#define vec_size TA_NAME(vec_size)
static inline vec vec_size(vec v)
{
    return (vec)((veci)v & ~(veci)vec_all((real)-0.0));
}

/* Lane numbers 0, 1, 2, ... */
#define vec_iota TA_NAME(vec_iota)
static inline veci vec_iota(void)
{
    static const integer lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    veci v;
    memcpy(&v, lanes, sizeof v);
    return v;
}

#define vec_iota_real TA_NAME(vec_iota_real)
static inline vec vec_iota_real(void)
{
    static const real lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return vec_load(lanes);
}

/* bfloat16 is the upper half of a float. */
#define real_from_bf16 TA_NAME(real_from_bf16)
static inline real real_from_bf16(uint16_t half)
{
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#if TA_BITS == 32
/* Where a shuffle of each 16 bytes finds byte k of a lane for its highest; what is negative gives zero. */
#define top_byte_places TA_NAME(top_byte_places)
static inline const signed char *top_byte_places(int k)
{
    static const signed char places[4][16] = {
        {-1, -1, -1, 0, -1, -1, -1, 4, -1, -1, -1, 8, -1, -1, -1, 12},
        {-1, -1, -1, 1, -1, -1, -1, 5, -1, -1, -1, 9, -1, -1, -1, 13},
        {-1, -1, -1, 2, -1, -1, -1, 6, -1, -1, -1, 10, -1, -1, -1, 14},
        {-1, -1, -1, 3, -1, -1, -1, 7, -1, -1, -1, 11, -1, -1, -1, 15},
    };
    return places[k];
}

/* Rounded to nearest, ties to even. A NaN stays one, made quiet. */
#define vec_round_bf16 TA_NAME(vec_round_bf16)
static inline veci vec_round_bf16(vec v)
{
    veci bits = (veci)v, is_nan = (veci)(v != v);
    veci carry = 0x7fff + (bits >> 16 & 1);
    return ((bits + (carry & ~is_nan)) | (is_nan & 0x400000)) >> 16;
}

#define bf16_from_real TA_NAME(bf16_from_real)
static inline uint16_t bf16_from_real(real value)
{
    return (uint16_t)vec_round_bf16(vec_all(value))[0];
}

#define vec_store_bf16 TA_NAME(vec_store_bf16)
static inline void vec_store_bf16(uint16_t *to, vec v)
{
    typedef uint16_t halves __attribute__((vector_size(TA_VECTOR_BYTES / 2)));
    halves h = __builtin_convertvector(vec_round_bf16(v), halves);
    memcpy(to, &h, sizeof h);
}
#endif
