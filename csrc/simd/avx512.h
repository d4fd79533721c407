/* AVX-512 vocabulary and tile sizes: 32 registers of 64 bytes. */
#define TA_VECTOR_BYTES 64
#include "simd/vector.h"

/* 9 x 3 accumulators, a row of B and a broadcast fill 31 of 32 registers. 14 x 2 load more for each
 * multiply-add (16 for 28, against 12 for 27) and are 3-8% slower where a core is shared; so are 8 x 3. */
#define TA_GEMM_MR 9
#define TA_GEMM_NV 3
#define TA_WALK_ROWS 4 /* of 3 vectors in 2 panels: 24 sums; 5 rows would not leave room for B */
#define TA_GEMM_MC 108 /* times a slice of 512 floats: 216 KiB of the second-level cache */
#define TA_ATTENTION_MR 14
#define TA_ATTENTION_NV 2
#define TA_FEW_VECTORS 8 /* of values at once, for one or two rows; half of it for more */
#define TA_EACH_GEMM_ROWS(X, NV) \
    X(1, NV) X(2, NV) X(3, NV) X(4, NV) X(5, NV) X(6, NV) X(7, NV) X(8, NV) X(9, NV)
/* clang-format off */
#define TA_EACH_ATTENTION_ROWS(X, NV) \
    X(1, NV) X(2, NV) X(3, NV) X(4, NV) X(5, NV) X(6, NV) X(7, NV) \
    X(8, NV) X(9, NV) X(10, NV) X(11, NV) X(12, NV) X(13, NV) X(14, NV)
/* clang-format on */

/* a > b ? a : b, so that a NaN in b comes through */
#define vec_max TA_NAME(vec_max)
static inline vec vec_max(vec a, vec b)
{
#if TA_BITS == 32
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return (vec)_mm512_max_pd((__m512d)a, (__m512d)b);
#endif
}

/* Whether any lane of a is greater than that of b. */
#define vec_any_greater TA_NAME(vec_any_greater)
static inline int vec_any_greater(vec a, vec b)
{
#if TA_BITS == 32
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ) != 0;
#else
    return _mm512_cmp_pd_mask((__m512d)a, (__m512d)b, _CMP_GT_OQ) != 0;
#endif
}

/* Elements of a table of TA_VL, by the low bits of each index. */
#define TA_LOOKUP_BITS 3 /* exp2 in steps of 1/8 */
#define vec_lookup TA_NAME(vec_lookup)
static inline veci vec_lookup(const integer *table, veci index)
{
#if TA_BITS == 32
    return (veci)_mm512_permutexvar_epi32((__m512i)index, _mm512_loadu_si512(table));
#else
    return (veci)_mm512_permutexvar_epi64((__m512i)index, _mm512_loadu_si512(table));
#endif
}

/* Which of TA_VL bytes are not zero. */
#define vec_any_bit TA_NAME(vec_any_bit)
static inline veci vec_any_bit(const unsigned char *from)
{
#if TA_BITS == 32
    return (veci)((veci)_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)from)) != 0);
#else
    return (veci)((veci)_mm512_cvtepu8_epi64(_mm_loadl_epi64((const void *)from)) != 0);
#endif
}

#if TA_BITS == 32
/* Byte k of each lane as its highest, above zeros. */
#define vec_top_byte TA_NAME(vec_top_byte)
static inline veci vec_top_byte(veci w, int k)
{
    const __m512i places = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)top_byte_places(k)));
    return (veci)_mm512_shuffle_epi8((__m512i)w, places);
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
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)from)), 16);
}

#define vec_load_int8 TA_NAME(vec_load_int8)
static inline vec vec_load_int8(const signed char *from)
{
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)from)));
}

static inline vec vec_load_f16(const uint16_t *from)
{
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)from));
}

static inline vec vec_load_other(const double *from)
{
    __m256 low = _mm512_cvtpd_ps(_mm512_loadu_pd(from)), high = _mm512_cvtpd_ps(_mm512_loadu_pd(from + 8));
    return (vec)_mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
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
    _mm256_storeu_si256((void *)to, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
}
#else
static inline vec vec_load_bf16(const uint16_t *from)
{
    __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)from)), 16);
    return (vec)_mm512_cvtps_pd((__m256)bits);
}

static inline vec vec_load_f16(const uint16_t *from)
{
    return (vec)_mm512_cvtps_pd(_mm256_cvtph_ps(_mm_loadu_si128((const void *)from)));
}

static inline vec vec_load_other(const float *from)
{
    return (vec)_mm512_cvtps_pd(_mm256_loadu_ps(from));
}
#endif
