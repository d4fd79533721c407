/* AVX2 + FMA vocabulary and tile sizes: 16 registers of 32 bytes. */
#define TA_VECTOR_BYTES 32
#include "simd/vector.h"

#define TA_GEMM_MR 6 /* 6 x 2 accumulators, a row of B and a broadcast fill 15 of 16 registers */
#define TA_GEMM_NV 2
#define TA_WALK_ROWS 3
#define TA_GEMM_MC 96
#define TA_ATTENTION_MR 6
#define TA_ATTENTION_NV 2
#define TA_FEW_VECTORS 4 /* of values at once, for one or two rows; half of it for more */
#define TA_LOOKUP_BITS 0 /* exp2 without a table: there is no fast lookup */
#define TA_EACH_GEMM_ROWS(X, NV) X(1, NV) X(2, NV) X(3, NV) X(4, NV) X(5, NV) X(6, NV)
#define TA_EACH_WALK_ROWS(X, NV) X(1, NV) X(2, NV) X(3, NV)
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
