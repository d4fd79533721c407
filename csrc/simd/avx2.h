/* AVX2 + FMA vocabulary and tile sizes: 16 registers of 32 bytes. */
#define TA_VECTOR_BYTES 32
#include "simd/vector.h"

#define TA_GEMM_MR 6 /* 6 x 2 accumulators, a row of B and a broadcast fill 15 of 16 registers */
#define TA_GEMM_NV 2
#define TA_WALK_ROWS 3 /* of 2 vectors in 2 panels: 12 sums; 4 rows would fill all registers */
#define TA_GEMM_MC 96  /* times a slice of 512 floats: 192 KiB of the second-level cache */
#define TA_ATTENTION_MR 6
#define TA_ATTENTION_NV 2
#define TA_FEW_VECTORS 4 /* of values at once, for one or two rows; half of it for more */
#define TA_LOOKUP_BITS 0 /* exp2 without a table: there is no fast lookup */
#define TA_EACH_GEMM_ROWS(X, NV) X(1, NV) X(2, NV) X(3, NV) X(4, NV) X(5, NV) X(6, NV)
#define TA_EACH_ATTENTION_ROWS TA_EACH_GEMM_ROWS

/* a > b ? a : b, so that a NaN in b comes through */
#define vec_max TA_NAME(vec_max)
static inline vec vec_max(vec a, vec b)
{
#if TA_BITS == 32
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return (vec)_mm256_max_pd((__m256d)a, (__m256d)b);
#endif
}

/* Whether any lane of a is greater than that of b. */
#define vec_any_greater TA_NAME(vec_any_greater)
static inline int vec_any_greater(vec a, vec b)
{
#if TA_BITS == 32
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_GT_OQ)) != 0;
#else
    return _mm256_movemask_pd(_mm256_cmp_pd((__m256d)a, (__m256d)b, _CMP_GT_OQ)) != 0;
#endif
}

/* Which of TA_VL bytes are not zero. */
#define vec_any_bit TA_NAME(vec_any_bit)
static inline veci vec_any_bit(const unsigned char *from)
{
#if TA_BITS == 32
    return (veci)((veci)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)from)) != 0);
#else
    int bytes;
    memcpy(&bytes, from, sizeof bytes);
    return (veci)((veci)_mm256_cvtepu8_epi64(_mm_cvtsi32_si128(bytes)) != 0);
#endif
}

#if TA_BITS == 32
/* Byte k of each lane as its highest, above zeros. */
#define vec_top_byte TA_NAME(vec_top_byte)
static inline veci vec_top_byte(veci w, int k)
{
    const __m256i places = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)top_byte_places(k)));
    return (veci)_mm256_shuffle_epi8((__m256i)w, places);
}
#endif

#define real_from_f16 TA_NAME(real_from_f16)
static inline real real_from_f16(uint16_t half)
{
    return _cvtsh_ss(half);
}

/* TA_VL elements as `real`: bfloat16, float16, and the other of float and double. */
#define vec_load_bf16 TA_NAME(vec_load_bf16)
#define vec_load_f16 TA_NAME(vec_load_f16)
#define vec_load_other TA_NAME(vec_load_other)
#if TA_BITS == 32
static inline vec vec_load_bf16(const uint16_t *from)
{
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)from)), 16);
}

#define vec_load_int8 TA_NAME(vec_load_int8)
static inline vec vec_load_int8(const signed char *from)
{
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)from)));
}

static inline vec vec_load_f16(const uint16_t *from)
{
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const void *)from));
}

static inline vec vec_load_other(const double *from)
{
    __m128 low = _mm256_cvtpd_ps(_mm256_loadu_pd(from)), high = _mm256_cvtpd_ps(_mm256_loadu_pd(from + 4));
    return (vec)_mm256_insertf128_ps(_mm256_castps128_ps256(low), high, 1);
}

/* To float16: rounded to nearest, ties to even. A NaN stays one, made quiet. */
#define f16_from_real TA_NAME(f16_from_real)
static inline uint16_t f16_from_real(real value)
{
    return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
}

#define vec_store_f16 TA_NAME(vec_store_f16)
static inline void vec_store_f16(uint16_t *to, vec v)
{
    _mm_storeu_si128((void *)to, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
}
#else
static inline vec vec_load_bf16(const uint16_t *from)
{
    __m128i bits = _mm_slli_epi32(_mm_cvtepu16_epi32(_mm_loadl_epi64((const void *)from)), 16);
    return (vec)_mm256_cvtps_pd((__m128)bits);
}

static inline vec vec_load_f16(const uint16_t *from)
{
    return (vec)_mm256_cvtps_pd(_mm_cvtph_ps(_mm_loadl_epi64((const void *)from)));
}

static inline vec vec_load_other(const float *from)
{
    return (vec)_mm256_cvtps_pd(_mm_loadu_ps(from));
}
#endif
