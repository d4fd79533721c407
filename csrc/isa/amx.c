/* Dot products of CPUs with AMX; all their other kernels are those of avx512.c.
 *
 * A tile register holds 16 rows of 16 words or floats. Registers 0 to 3 sum up C, 4 and 5 hold lots of A,
 * 6 and 7 of B; configuring them anew takes as long as 16 products, so that all are always whole and
 * what surplus rows hold is nobody's.
 */
#include "region.h"

#if TA_HAVE_X86_REGIONS

#include "ahead.h"
#include "tileattn.h"

#include <immintrin.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define TARGET __attribute__((target("amx-tile,amx-bf16,amx-int8")))
#define INLINE TARGET static inline __attribute__((always_inline))
enum { LOT = 16, WORD = 4, TILE = LOT * WORD /* bytes of a row */ };

TARGET static void begin_amx(void)
{
    /* Constant, since compilers think that the instruction reads no more than its first bytes. */
    static const struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {1,
                0,
                {0},
                {TILE, TILE, TILE, TILE, TILE, TILE, TILE, TILE},
                {LOT, LOT, LOT, LOT, LOT, LOT, LOT, LOT}};
    _tile_loadconfig(&config);
}

/* While tiles are configured, each change of threads saves them. */
TARGET static void end_amx(void)
{
    _tile_release();
}

#define DOT(C, A, B)                 \
    do {                             \
        if (bytes)                   \
            _tile_dpbssd(C, A, B);   \
        else                         \
            _tile_dpbf16ps(C, A, B); \
    } while (0)

/* C of one or two lots of rows and one to four of columns, four in all; what is loaded is used once for
 * each lot of the other. The counts are constants at each call. */
INLINE void tiles(const int bytes, const int rows, const int columns, const ta_dot_tile *t, int column,
                  ahead *next)
{
    const ptrdiff_t a_row = t->a_stride * WORD, b_row = t->b_stride * WORD, c_row = t->c_stride * WORD;
    const char *a = t->a, *a2 = a + t->a_lot * WORD, *b = (const char *)t->b + column * WORD;
    char *c = (char *)t->c + column * WORD, *c2 = c + LOT * c_row;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (t->accumulate) {
        _tile_loadd(0, c, c_row);
        if (columns > 1)
            _tile_loadd(1, c + TILE, c_row);
        if (columns > 2)
            _tile_loadd(2, c + 2 * TILE, c_row);
        if (columns > 3)
            _tile_loadd(3, c + 3 * TILE, c_row);
        if (rows > 1)
            _tile_loadd(2, c2, c_row);
        if (rows > 1 && columns > 1)
            _tile_loadd(3, c2 + TILE, c_row);
    }
    /* A step asks for its share of the rows of C, which are stored in the end. */
    const ptrdiff_t steps = t->depth / TA_DOT_WORDS, share = steps ? (rows * LOT + steps - 1) / steps : 0;
    const int c_rows = t->rows < rows * LOT ? t->rows : rows * LOT;
    int c_at = 0;
    for (ptrdiff_t p = 0; p < t->depth; p += TA_DOT_WORDS) {
        for (const int stop = c_at + share; c_at < stop && c_at < c_rows; c_at++) {
            const char *row = c + c_at * c_row;
            for (int j = 0; j < columns; j++)
                __builtin_prefetch(row + j * TILE, 1, 3);
        }
        _tile_loadd(4, a, a_row);
        _tile_loadd(6, b, b_row);
        DOT(0, 4, 6);
        if (columns > 1) {
            _tile_loadd(7, b + TILE, b_row);
            DOT(1, 4, 7);
        }
        if (rows > 1) {
            _tile_loadd(5, a2, a_row);
            DOT(2, 5, 6);
        }
        if (rows > 1 && columns > 1)
            DOT(3, 5, 7);
        if (columns > 2) {
            _tile_loadd(6, b + 2 * TILE, b_row);
            DOT(2, 4, 6);
        }
        if (columns > 3) {
            _tile_loadd(7, b + 3 * TILE, b_row);
            DOT(3, 4, 7);
        }
        a += t->a_step * WORD;
        a2 += t->a_step * WORD;
        b += TA_DOT_WORDS * b_row;
        fetch(next);
    }
    _tile_stored(0, c, c_row);
    if (columns > 1)
        _tile_stored(1, c + TILE, c_row);
    if (columns > 2)
        _tile_stored(2, c + 2 * TILE, c_row);
    if (columns > 3)
        _tile_stored(3, c + 3 * TILE, c_row);
    if (rows > 1)
        _tile_stored(2, c2, c_row);
    if (rows > 1 && columns > 1)
        _tile_stored(3, c2 + TILE, c_row);
}

INLINE void product_amx(const int bytes, const ta_dot_tile *t)
{
    const int lots = t->columns / LOT, passes = t->rows > LOT ? (lots + 1) / 2 : (lots + 3) / 4;
    const ptrdiff_t steps = passes * (t->depth / TA_DOT_WORDS);
    ahead next = ahead_of(t, steps ? t->next_bytes / steps + 64 : 0);
    int column = 0, left = lots;
    if (t->rows > LOT) {
        for (; left >= 2; left -= 2, column += 2 * LOT)
            tiles(bytes, 2, 2, t, column, &next);
        if (left > 0)
            tiles(bytes, 2, 1, t, column, &next);
        return;
    }
    for (; left >= 4; left -= 4, column += 4 * LOT)
        tiles(bytes, 1, 4, t, column, &next);
    if (left == 3)
        tiles(bytes, 1, 3, t, column, &next);
    else if (left == 2)
        tiles(bytes, 1, 2, t, column, &next);
    else if (left == 1)
        tiles(bytes, 1, 1, t, column, &next);
}

TARGET static void multiply_amx(const ta_dot_tile *t)
{
    product_amx(0, t);
}

TARGET static void multiply_bytes_amx(const ta_dot_tile *t)
{
    product_amx(1, t);
}

/* Linux grants the state that tiles need to processes that ask for it. */
static int allowed_amx(void)
{
#ifdef __linux__
    enum { ARCH_REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return 0;
#endif
}

extern const ta_dots ta_dots_amx;
const ta_dots ta_dots_amx = {allowed_amx,  begin_amx,          end_amx,
                             multiply_amx, multiply_bytes_amx, ta_round_bf16};

#endif
