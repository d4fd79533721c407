/* Dot products of CPUs with AVX512_BF16 and AVX512_VNNI; all their other kernels are those of avx512.c. */
#include "region.h"

#if TA_HAVE_X86_REGIONS

#include "tileattn.h"

#include <immintrin.h>

void ta_round_bf16(uint16_t *dst, ptrdiff_t dst_step, const float *src,
                   ptrdiff_t count); /* amx.c has it from here */

#define TARGET __attribute__((target("avx512f,avx512bf16,avx512vnni")))
#define UNROLL _Pragma("GCC unroll 8")
typedef int32_t word __attribute__((may_alias)); /* two bfloat16 */
/* 8 x 3 accumulators, and a row of B. */
enum { LANES = 16, ROWS = 8, VECTORS = 3 };

/* C[rows x vectors] of a tile, from a row and a column of it on. Both counts are constants at each call. */
TARGET static inline __attribute__((always_inline)) void products(const int rows, const int vectors,
                                                                  const ta_dot_tile *t, int row, int column)
{
    __m512 acc[ROWS][VECTORS];
    float *c = (float *)t->c + row * t->c_stride + column;
    UNROLL
    for (int i = 0; i < rows; i++) {
        UNROLL
        for (int j = 0; j < vectors; j++)
            acc[i][j] =
                t->accumulate ? _mm512_loadu_ps(c + i * t->c_stride + j * LANES) : _mm512_setzero_ps();
    }
    const word *a[ROWS];
    UNROLL
    for (int i = 0; i < rows; i++)
        a[i] = (const word *)t->a + (row + i) / LANES * t->a_lot + (row + i) % LANES * t->a_stride;
    const int32_t *b = (const int32_t *)t->b + column;
    for (ptrdiff_t step = 0; step < t->depth; step += TA_DOT_WORDS) {
        for (int p = 0; p < TA_DOT_WORDS; p++, b += t->b_stride) {
            __m512bh b_row[VECTORS];
            UNROLL
            for (int j = 0; j < vectors; j++)
                b_row[j] = (__m512bh)_mm512_loadu_si512(b + j * LANES);
            UNROLL
            for (int i = 0; i < rows; i++) {
                const __m512bh pair = (__m512bh)_mm512_set1_epi32(a[i][p]);
                UNROLL
                for (int j = 0; j < vectors; j++)
                    acc[i][j] = _mm512_dpbf16_ps(acc[i][j], pair, b_row[j]);
            }
        }
        UNROLL
        for (int i = 0; i < rows; i++)
            a[i] += t->a_step;
    }
    UNROLL
    for (int i = 0; i < rows; i++) {
        UNROLL
        for (int j = 0; j < vectors; j++)
            _mm512_storeu_ps(c + i * t->c_stride + j * LANES, acc[i][j]);
    }
}

/* The same of int8. The instruction takes A without a sign: what adding 128 to its elements adds to a sum
 * is summed up beside, once for all rows. */
TARGET static inline __attribute__((always_inline)) void
byte_products(const int rows, const int vectors, const ta_dot_tile *t, int row, int column)
{
    __m512i acc[ROWS][VECTORS], added[VECTORS];
    const __m512i signs = _mm512_set1_epi32((int)0x80808080);
    UNROLL
    for (int j = 0; j < vectors; j++) {
        added[j] = _mm512_setzero_si512();
        UNROLL
        for (int i = 0; i < rows; i++)
            acc[i][j] = _mm512_setzero_si512();
    }
    const word *a[ROWS];
    UNROLL
    for (int i = 0; i < rows; i++)
        a[i] = (const word *)t->a + (row + i) / LANES * t->a_lot + (row + i) % LANES * t->a_stride;
    const int32_t *b = (const int32_t *)t->b + column;
    for (ptrdiff_t step = 0; step < t->depth; step += TA_DOT_WORDS) {
        for (int p = 0; p < TA_DOT_WORDS; p++, b += t->b_stride) {
            __m512i b_row[VECTORS];
            UNROLL
            for (int j = 0; j < vectors; j++) {
                b_row[j] = _mm512_loadu_si512(b + j * LANES);
                added[j] = _mm512_dpbusd_epi32(added[j], signs, b_row[j]);
            }
            UNROLL
            for (int i = 0; i < rows; i++) {
                const __m512i quad = _mm512_xor_si512(_mm512_set1_epi32(a[i][p]), signs);
                UNROLL
                for (int j = 0; j < vectors; j++)
                    acc[i][j] = _mm512_dpbusd_epi32(acc[i][j], quad, b_row[j]);
            }
        }
        UNROLL
        for (int i = 0; i < rows; i++)
            a[i] += t->a_step;
    }
    int32_t *c = (int32_t *)t->c + row * t->c_stride + column;
    UNROLL
    for (int i = 0; i < rows; i++) {
        UNROLL
        for (int j = 0; j < vectors; j++)
            _mm512_storeu_si512(c + i * t->c_stride + j * LANES, _mm512_sub_epi32(acc[i][j], added[j]));
    }
}

#define EACH_ROWS(X, PRODUCTS) \
    X(1, PRODUCTS)             \
    X(2, PRODUCTS) X(3, PRODUCTS) X(4, PRODUCTS) X(5, PRODUCTS) X(6, PRODUCTS) X(7, PRODUCTS) X(8, PRODUCTS)
#define INSTANCE(R, PRODUCTS)                                                                  \
    TARGET static __attribute__((noinline)) void PRODUCTS##_##R(const ta_dot_tile *t, int row) \
    {                                                                                          \
        int column = 0;                                                                        \
        for (; column + VECTORS * LANES <= t->columns; column += VECTORS * LANES)              \
            PRODUCTS(R, VECTORS, t, row, column);                                              \
        if (column + 2 * LANES == t->columns)                                                  \
            PRODUCTS(R, 2, t, row, column);                                                    \
        else if (column < t->columns)                                                          \
            PRODUCTS(R, 1, t, row, column);                                                    \
    }
#define ENTRY(R, PRODUCTS) PRODUCTS##_##R,
EACH_ROWS(INSTANCE, products)
EACH_ROWS(INSTANCE, byte_products)

typedef void (*rows_of_tile)(const ta_dot_tile *, int);

static void by_rows(const rows_of_tile instances[ROWS], const ta_dot_tile *t)
{
    const char *next = t->next;
    for (ptrdiff_t at = 0; at < t->next_bytes; at += 64)
        __builtin_prefetch(next + at, 0, 2);
    const int tiles = (t->rows + ROWS - 1) / ROWS;
    for (int tile = 0; tile < tiles; tile++) {
        const int begin = tile * t->rows / tiles, end = (tile + 1) * t->rows / tiles;
        instances[end - begin - 1](t, begin);
    }
}

static void multiply(const ta_dot_tile *t)
{
    static const rows_of_tile instances[ROWS] = {EACH_ROWS(ENTRY, products)};
    by_rows(instances, t);
}

static void multiply_bytes(const ta_dot_tile *t)
{
    static const rows_of_tile instances[ROWS] = {EACH_ROWS(ENTRY, byte_products)};
    by_rows(instances, t);
}

TARGET void ta_round_bf16(uint16_t *dst, ptrdiff_t dst_step, const float *src, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i += LANES) {
        uint16_t *to = dst + i / (2 * TA_DOT_WORDS) * dst_step + i % (2 * TA_DOT_WORDS);
        _mm256_storeu_si256((void *)to, (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(src + i)));
    }
}

static int allowed(void)
{
    return 1;
}

static void nothing(void) {}

extern const ta_dots ta_dots_avx512_bf16;
const ta_dots ta_dots_avx512_bf16 = {allowed, nothing, nothing, multiply, multiply_bytes, ta_round_bf16};

#endif
