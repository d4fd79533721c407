/* Dot products of CPUs with AVX512_BF16 and AVX512_VNNI; all their other kernels are those of avx512.c. */
#include "region.h"

#if TA_HAVE_X86_REGIONS

#include "ahead.h"
#include "tileattn.h"

#include <immintrin.h>

#define TARGET __attribute__((target("avx512f,avx512bf16,avx512vnni")))
#define UNROLL _Pragma("GCC unroll 8")
typedef int32_t word __attribute__((may_alias)); /* two bfloat16, or four int8 */
/* 8 x 3 accumulators, and a row of B. With what bytes need beside they fill all 32 registers, and gcc 12
 * spills. */
enum { LANES = 16, ROWS = 8, VECTORS = 3 };
/* Up to so many rows read B so evenly that the hardware's prefetching suffices: one row of 4096 x 4096 came
 * from DRAM at 100% of the bandwidth instead of 70%, four at 93% instead of 75%. With 8 it is 70%
 * instead of 85%. */
enum { STREAMED_ROWS = 4 };

TARGET static inline __attribute__((always_inline)) __m512i dot(const int bytes, __m512i acc, __m512i a,
                                                                __m512i b)
{
    return bytes ? _mm512_dpbusd_epi32(acc, a, b)
                 : (__m512i)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
}

/* C[rows x vectors] of a tile, from a row and a column of it on. The counts, and whether words are of
 * bytes, are constants at each call. Bytes of A are taken without a sign: what adding 128 to them adds to a
 * sum is summed up beside, once for all rows. Each word of the depth is a step of `next`: to ask for all of
 * it at once held up 2048 x 4096 x 4096 by 8%. */
TARGET static inline __attribute__((always_inline)) void products(const int bytes, const int rows,
                                                                  const int vectors, const ta_dot_tile *t,
                                                                  int row, int column, ahead *next)
{
    __m512i acc[ROWS][VECTORS], added[VECTORS];
    const __m512i signs = _mm512_set1_epi32((int)0x80808080);
    int32_t *c = (int32_t *)t->c + row * t->c_stride + column;
    UNROLL
    for (int j = 0; j < vectors; j++) {
        added[j] = _mm512_setzero_si512();
        UNROLL
        for (int i = 0; i < rows; i++)
            acc[i][j] = !bytes && t->accumulate ? _mm512_loadu_si512(c + i * t->c_stride + j * LANES)
                                                : _mm512_setzero_si512();
    }
    const word *a[ROWS];
    UNROLL
    for (int i = 0; i < rows; i++)
        a[i] =
            (const word *)t->a + (row + i) / TA_DOT_LOT * t->a_lot + (row + i) % TA_DOT_LOT * t->a_stride;
    const int32_t *b = (const int32_t *)t->b + column;
    for (ptrdiff_t step = 0; step < t->depth; step += TA_DOT_WORDS) {
        for (int p = 0; p < TA_DOT_WORDS; p++, b += t->b_stride) {
            __m512i b_row[VECTORS];
            fetch(next);
            UNROLL
            for (int j = 0; j < vectors; j++) {
                b_row[j] = _mm512_loadu_si512(b + j * LANES);
                if (bytes)
                    added[j] = dot(bytes, added[j], signs, b_row[j]);
            }
            UNROLL
            for (int i = 0; i < rows; i++) {
                __m512i a_all = _mm512_set1_epi32(a[i][p]);
                if (bytes)
                    a_all = _mm512_xor_si512(a_all, signs);
                UNROLL
                for (int j = 0; j < vectors; j++)
                    acc[i][j] = dot(bytes, acc[i][j], a_all, b_row[j]);
            }
        }
        UNROLL
        for (int i = 0; i < rows; i++)
            a[i] += t->a_step;
    }
    UNROLL
    for (int i = 0; i < rows; i++) {
        UNROLL
        for (int j = 0; j < vectors; j++) {
            const __m512i sum = bytes ? _mm512_sub_epi32(acc[i][j], added[j]) : acc[i][j];
            _mm512_storeu_si512(c + i * t->c_stride + j * LANES, sum);
        }
    }
}

/* All columns of some rows of C. */
TARGET static inline __attribute__((always_inline)) void
row_products(const int bytes, const int rows, const ta_dot_tile *t, int row, ahead *next)
{
    int column = 0;
    for (; column + VECTORS * LANES <= t->columns; column += VECTORS * LANES)
        products(bytes, rows, VECTORS, t, row, column, next);
    if (column + 2 * LANES == t->columns)
        products(bytes, rows, 2, t, row, column, next);
    else if (column < t->columns)
        products(bytes, rows, 1, t, row, column, next);
}

/* clang-format off */
#define EACH_ROWS(X, BYTES) \
    X(1, BYTES) X(2, BYTES) X(3, BYTES) X(4, BYTES) X(5, BYTES) X(6, BYTES) X(7, BYTES) X(8, BYTES)
/* clang-format on */
#define NAME(R, BYTES) rows_##R##_##BYTES##_avx512_bf16
#define INSTANCE(R, BYTES)                                                                     \
    TARGET static __attribute__((noinline)) void NAME(R, BYTES)(const ta_dot_tile *t, int row, \
                                                                ahead *next)                   \
    {                                                                                          \
        row_products(BYTES, R, t, row, next);                                                  \
    }
#define ENTRY(R, BYTES) NAME(R, BYTES),
EACH_ROWS(INSTANCE, 0)
EACH_ROWS(INSTANCE, 1)

static void product_avx512_bf16(const int bytes, const ta_dot_tile *t)
{
    static void (*const instances[2][ROWS])(const ta_dot_tile *, int, ahead *) = {{EACH_ROWS(ENTRY, 0)},
                                                                                  {EACH_ROWS(ENTRY, 1)}};
    const int tiles = (t->rows + ROWS - 1) / ROWS;
    const int groups = (t->columns + VECTORS * LANES - 1) / (VECTORS * LANES);
    const ptrdiff_t steps = tiles * groups * t->depth;
    const int is_asked = t->rows > STREAMED_ROWS && steps > 0;
    ahead next = ahead_of(t, is_asked ? (t->next_bytes + steps - 1) / steps : 0);
    for (int tile = 0; tile < tiles; tile++) {
        const int begin = tile * t->rows / tiles, end = (tile + 1) * t->rows / tiles;
        instances[bytes][end - begin - 1](t, begin, &next);
    }
}

static void multiply_avx512_bf16(const ta_dot_tile *t)
{
    product_avx512_bf16(0, t);
}

static void multiply_bytes_avx512_bf16(const ta_dot_tile *t)
{
    product_avx512_bf16(1, t);
}

TARGET void ta_round_bf16(uint16_t *dst, ptrdiff_t dst_step, const float *src, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i += LANES) {
        uint16_t *to = dst + i / (2 * TA_DOT_WORDS) * dst_step + i % (2 * TA_DOT_WORDS);
        _mm256_storeu_si256((void *)to, (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(src + i)));
    }
}

static int allowed_avx512_bf16(void)
{
    return 1;
}

static void nothing_avx512_bf16(void) {}

extern const ta_dots ta_dots_avx512_bf16;
const ta_dots ta_dots_avx512_bf16 = {allowed_avx512_bf16,  nothing_avx512_bf16,        nothing_avx512_bf16,
                                     multiply_avx512_bf16, multiply_bytes_avx512_bf16, ta_round_bf16};

#endif
