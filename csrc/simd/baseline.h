/* Baseline vocabulary and tile sizes: 16-byte vectors, the compiler's vector types and, where elements
 * have two bytes, a few intrinsics. */
#define TA_VECTOR_BYTES 16
#include "simd/vector.h"

#if defined(__aarch64__) /* 32 registers, FMA */
#define TA_GEMM_MR 8
#define TA_GEMM_NV 3
#define TA_ATTENTION_MR 8
#define TA_EACH_GEMM_ROWS(X, NV) X(1, NV) X(2, NV) X(3, NV) X(4, NV) X(5, NV) X(6, NV) X(7, NV) X(8, NV)
#define TA_EACH_ATTENTION_ROWS TA_EACH_GEMM_ROWS
#else /* SSE2: 16 registers; 4 x 3 accumulators leave four for a row of B and a broadcast */
#define TA_GEMM_MR 4
#define TA_GEMM_NV 3
#define TA_ATTENTION_MR 6
#define TA_EACH_GEMM_ROWS(X, NV) X(1, NV) X(2, NV) X(3, NV) X(4, NV)
#define TA_EACH_ATTENTION_ROWS(X, NV) X(1, NV) X(2, NV) X(3, NV) X(4, NV) X(5, NV) X(6, NV)
#endif
#define TA_WALK_ROWS 2 /* of 3 vectors in 2 panels: 12 sums, with 16 registers */
#define TA_GEMM_MC \
    (14 * TA_GEMM_MR) /* times a slice of 512 floats: 112 or 224 KiB of the second-level cache */
#define TA_ATTENTION_NV 2
#define TA_FEW_VECTORS 4 /* of values at once, for one or two rows; half of it for more */
#define TA_LOOKUP_BITS 0 /* exp2 without a table: there is no fast lookup */

/* a > b ? a : b, so that a NaN in b comes through */
#define vec_max TA_NAME(vec_max)
static inline vec vec_max(vec a, vec b)
{
    return vec_select((veci)(a > b), a, b);
}

/* Whether any lane of a is greater than that of b. */
#define vec_any_greater TA_NAME(vec_any_greater)
static inline int vec_any_greater(vec a, vec b)
{
    veci greater = (veci)(a > b);
    integer any = 0;
    for (int i = 0; i < TA_VL; i++)
        any |= greater[i];
    return any != 0;
}

/* Which of TA_VL bytes are not zero. */
#define vec_any_bit TA_NAME(vec_any_bit)
static inline veci vec_any_bit(const unsigned char *from)
{
    veci v;
    for (int i = 0; i < TA_VL; i++)
        v[i] = from[i];
    return (veci)(v != 0);
}

#if TA_BITS == 32
/* Byte k of each lane as its highest, above zeros. */
#define vec_top_byte TA_NAME(vec_top_byte)
static inline veci vec_top_byte(veci w, int k)
{
    return w >> 8 * k << 24;
}
#endif

/* as many lanes as `vec` has, of other widths */
#define halves TA_NAME(halves)
#define words TA_NAME(words)
#define counts TA_NAME(counts)
#define floats TA_NAME(floats)
#define others TA_NAME(others)
typedef uint16_t halves __attribute__((vector_size(2 * TA_VL)));
typedef int32_t words __attribute__((vector_size(4 * TA_VL)));
typedef uint32_t counts __attribute__((vector_size(4 * TA_VL))); /* whose sums may overflow */
typedef float floats __attribute__((vector_size(4 * TA_VL)));
typedef other_real others __attribute__((vector_size(sizeof(other_real) * TA_VL)));

#define load_words TA_NAME(load_words)
#if TA_BITS == 32 && defined(__aarch64__)
static inline words load_words(const uint16_t *from)
{
    return (words)vmovl_u16(vld1_u16(from));
}
#elif TA_BITS == 32 && defined(__SSE2__)
static inline words load_words(const uint16_t *from)
{
    return (words)_mm_unpacklo_epi16(_mm_loadl_epi64((const void *)from), _mm_setzero_si128());
}
#else /* gcc makes three times as many instructions of this */
static inline words load_words(const uint16_t *from)
{
    halves h;
    memcpy(&h, from, sizeof h);
    return __builtin_convertvector(h, words);
}
#endif

/* TA_VL elements as `real`: bfloat16, float16, and the other of float and double. */
#define vec_load_bf16 TA_NAME(vec_load_bf16)
static inline vec vec_load_bf16(const uint16_t *from)
{
    return __builtin_convertvector((floats)(load_words(from) << 16), vec);
}

#if TA_BITS == 32
#define vec_load_int8 TA_NAME(vec_load_int8)
#if defined(__aarch64__)
static inline vec vec_load_int8(const signed char *from)
{
    int32x2_t four = vdup_n_s32(0);
    memcpy(&four, from, TA_VL);
    return (vec)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8((int8x8_t)four))));
}
#elif defined(__SSE2__)
static inline vec vec_load_int8(const signed char *from)
{
    int four;
    memcpy(&four, from, TA_VL);
    __m128i twice = _mm_unpacklo_epi8(_mm_cvtsi32_si128(four), _mm_cvtsi32_si128(four));
    return (vec)_mm_cvtepi32_ps(_mm_srai_epi32(_mm_unpacklo_epi16(twice, twice), 24));
}
#else
static inline vec vec_load_int8(const signed char *from)
{
    typedef signed char bytes __attribute__((vector_size(TA_VL)));
    bytes b;
    memcpy(&b, from, sizeof b);
    return __builtin_convertvector(b, vec);
}
#endif
#endif

#define vec_load_other TA_NAME(vec_load_other)
static inline vec vec_load_other(const other_real *from)
{
    others v;
    memcpy(&v, from, sizeof v);
    return __builtin_convertvector(v, vec);
}

#define vec_load_f16 TA_NAME(vec_load_f16)
#define real_from_f16 TA_NAME(real_from_f16)
#define vec_store_f16 TA_NAME(vec_store_f16)
#define f16_from_real TA_NAME(f16_from_real)
#if defined(__aarch64__) && TA_BITS == 32
static inline vec vec_load_f16(const uint16_t *from)
{
    return (vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
}

static inline real real_from_f16(uint16_t half)
{
    __fp16 value;
    memcpy(&value, &half, sizeof value);
    return value;
}

static inline void vec_store_f16(uint16_t *to, vec v)
{
    vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v)));
}

static inline uint16_t f16_from_real(real value)
{
    __fp16 rounded = value;
    uint16_t half;
    memcpy(&half, &rounded, sizeof half);
    return half;
}
#else
/* No subnormal float arises on the way: a process may have chosen to see them as zeros. */
#define vec_from_f16 TA_NAME(vec_from_f16)
static inline vec vec_from_f16(words half)
{
    words magnitude = half & 0x7fff;
    words is_subnormal = magnitude < 0x400, is_infinite = magnitude > 0x7bff; /* or NaN */
    words subnormal = (words)(__builtin_convertvector(magnitude, floats) * 0x1p-24f);
    /* The exponent's bias is 127, no longer 15. */
    words normal = (magnitude << 13) + (112 << 23) + (is_infinite & 112 << 23);
    words chosen = (subnormal & is_subnormal) | (normal & ~is_subnormal) | (half & 0x8000) << 16;
    return __builtin_convertvector((floats)chosen, vec);
}

static inline vec vec_load_f16(const uint16_t *from)
{
    return vec_from_f16(load_words(from));
}

static inline real real_from_f16(uint16_t half)
{
    return vec_from_f16((words){half})[0];
}

#if TA_BITS == 32
/* Rounded to nearest, ties to even. A NaN stays one, made quiet. */
#define vec_round_f16 TA_NAME(vec_round_f16)
static inline words vec_round_f16(vec v)
{
    words magnitude = (words)v & 0x7fffffff;
    words is_subnormal = magnitude < 113 << 23, is_nan = magnitude > 0x7f800000;
    words is_infinite = (magnitude >= 143 << 23) & ~is_nan;
    /* Beside 0.5 the last bit of a float weighs 2^-24, as that of a subnormal float16 does. */
    words subnormal = (words)((vec)magnitude + 0.5f) - 0x3f000000;
    /* A carry out of the mantissa raises the exponent, at the end to infinity. */
    counts whole = (counts)magnitude;
    words normal = (words)((whole - (112u << 23) + 0xfff + (whole >> 13 & 1)) >> 13);
    words nan = 0x7e00 | (magnitude >> 13 & 0x3ff);
    return (normal & ~is_subnormal & ~is_infinite & ~is_nan) | (subnormal & is_subnormal) |
           (0x7c00 & is_infinite) | (nan & is_nan) | ((words)v >> 16 & 0x8000);
}

static inline void vec_store_f16(uint16_t *to, vec v)
{
    halves h = __builtin_convertvector(vec_round_f16(v), halves);
    memcpy(to, &h, sizeof h);
}

static inline uint16_t f16_from_real(real value)
{
    return (uint16_t)vec_round_f16((vec){value})[0];
}
#endif
#endif

#undef halves
#undef words
#undef counts
#undef floats
#undef others
