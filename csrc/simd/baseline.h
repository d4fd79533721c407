/* Baseline vocabulary and tile sizes: 16-byte vectors, nothing but the compiler's vector types. */
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
#define TA_WALK_ROWS 2
#define TA_EACH_WALK_ROWS(X, NV) X(1, NV) X(2, NV)
#define TA_GEMM_MC (14 * TA_GEMM_MR)
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
