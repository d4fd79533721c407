/* What surrounds dot products of bfloat16, and of int8 (ta_dots): their operands, and the use of what they
 * give.
 *
 * Operands are words of two successive elements of the contracted axis, the first in the lower half; the
 * axis is padded with zeros to whole steps of TA_DOT_WORDS. A has its rows one behind the other, B the
 * words of all columns:
 *
 *     C = A B          A [rows][words]                  B [words][columns]
 *     projections      rows of X, rounded to bfloat16   a panel of TA_WORDS_BF16; A by lots and steps
 *     scores           query rows                       keys, a panel of TA_DOT_KEYS after the other
 *     values           weights, rounded to bfloat16     values, a word from two keys
 */
_Static_assert(TA_DOT_LOT == TA_VL, "vectors of columns are lots");
_Static_assert(TA_DOT_WORDS == TA_VL, "keys are transposed a step at a time");
_Static_assert(TA_DOT_KEYS == TA_KEYS, "products lie in the panels that are weighed");
_Static_assert(TA_DOT_ROWS % TA_WEIGH_ROWS == 0, "a tile is whole register tiles");
_Static_assert(TA_WEIGH_ROWS <= TA_ATTENTION_MR, "accumulators");

/* dst = a row of bfloat16, zeros behind it up to `width` elements. */
static void TA_NAME(pack_halves)(uint16_t *dst, const uint16_t *src, ptrdiff_t columns, ptrdiff_t width,
                                 ptrdiff_t column_stride)
{
    if (column_stride == 1)
        memcpy(dst, src, columns * sizeof *dst);
    else
        for (ptrdiff_t j = 0; j < columns; j++)
            dst[j] = src[j * column_stride];
    memset(dst + columns, 0, (width - columns) * sizeof *dst);
}

/* dst = a row of floats, rounded to nearest, zeros behind it up to whole steps, which are dst_step apart.
 */
static void TA_NAME(round_row)(const ta_dots *dots, uint16_t *dst, ptrdiff_t dst_step, const real *src,
                               ptrdiff_t columns, ptrdiff_t column_stride)
{
    const ptrdiff_t step = 2 * TA_DOT_WORDS, whole = column_stride == 1 ? columns / step * step : 0;
    dots->round(dst, dst_step, src, whole);
    for (ptrdiff_t j = whole; j < columns; j += step) {
        uint16_t *to = dst + j / step * dst_step;
        for (ptrdiff_t i = 0; i < step; i++)
            to[i] = j + i < columns ? bf16_from_real(src[(j + i) * column_stride]) : 0;
    }
}

/* One panel of keys: dst[words][TA_DOT_KEYS] of the rows of as many keys. */
static void TA_NAME(pack_key_words)(uint32_t *dst, const void *const *keys, ptrdiff_t head_dim,
                                    ptrdiff_t column_stride)
{
    uint16_t padded[TA_DOT_KEYS][2 * TA_DOT_WORDS];
    const void *rows[TA_DOT_KEYS];
    const ptrdiff_t step = 2 * TA_DOT_WORDS;
    for (ptrdiff_t h = 0; h < head_dim; h += step) {
        for (int i = 0; i < TA_DOT_KEYS; i++) {
            const uint16_t *from = (const uint16_t *)keys[i] + h * column_stride;
            rows[i] = from;
            if (column_stride != 1 || h + step > head_dim) {
                const ptrdiff_t left = head_dim - h < step ? head_dim - h : step;
                TA_NAME(pack_halves)(padded[i], from, left, step, column_stride);
                rows[i] = padded[i];
            }
        }
        for (int i = 0; i < TA_DOT_KEYS; i += TA_VL) {
            vec words[TA_VL]; /* which move like floats, but come from rows that may begin anywhere */
            TA_UNROLL
            for (int j = 0; j < TA_VL; j++)
                memcpy(&words[j], rows[i + j], sizeof words[j]);
            transpose(words);
            TA_UNROLL
            for (int j = 0; j < TA_VL; j++)
                vec_store((real *)dst + j * TA_DOT_KEYS + i, words[j]);
        }
        dst += TA_DOT_WORDS * TA_DOT_KEYS;
    }
}

/* Values of the keys [begin, end) of a block: dst[key / 2][width], zeros in what fills the panels of keys
 * at both ends and the columns up to `width`. */
static void TA_NAME(pack_value_words)(uint32_t *dst, const uint16_t *v, ptrdiff_t begin, ptrdiff_t end,
                                      ptrdiff_t columns, ptrdiff_t width, ptrdiff_t key_stride,
                                      ptrdiff_t column_stride)
{
    const ptrdiff_t first = begin / TA_DOT_KEYS * TA_DOT_KEYS;
    const ptrdiff_t last = (end + TA_DOT_KEYS - 1) / TA_DOT_KEYS * TA_DOT_KEYS;
    for (ptrdiff_t key = first; key < last; key += 2) {
        uint32_t *to = dst + key / 2 * width;
        const uint16_t *low = begin <= key && key < end ? v + key * key_stride : NULL;
        const uint16_t *high = begin <= key + 1 && key + 1 < end ? v + (key + 1) * key_stride : NULL;
        ptrdiff_t j = 0;
        if (column_stride == 1 && low != NULL && high != NULL)
            for (; j + TA_VL <= columns; j += TA_VL) {
                typedef uint32_t words __attribute__((vector_size(TA_VECTOR_BYTES)));
                /* Each comes as the upper half of a float. */
                words w = (words)vec_load_bf16(low + j) >> 16 | (words)vec_load_bf16(high + j);
                vec_store((real *)to + j, (vec)w);
            }
        for (; j < columns; j++)
            to[j] = (low != NULL ? low[j * column_stride] : 0) |
                    (uint32_t)(high != NULL ? high[j * column_stride] : 0) << 16;
        memset(to + columns, 0, (width - columns) * sizeof *to);
    }
}

/* Puts zeros in place of what is not finite among whole vectors of words; returns whether there was any. */
static int TA_NAME(drop_strays)(uint32_t *words, ptrdiff_t count)
{
    veci dropped = {0};
    for (ptrdiff_t i = 0; i < count; i += TA_VL) {
        veci w = (veci)vec_load((const real *)words + i);
        veci low = (veci)((w & 0x7f80) != 0x7f80) & 0xffff;
        veci high = (veci)((w & 0x7f800000) != 0x7f800000) & (integer)0xffff0000;
        vec_store((real *)words + i, (vec)(w & (low | high)));
        dropped |= w ^ (w & (low | high));
    }
    int any = 0;
    for (int i = 0; i < TA_VL; i++)
        any |= dropped[i] != 0;
    return any;
}

#define panel_product TA_NAME(panel_product)
TA_INLINE ta_dot_tile panel_product(const ta_gemm_tile *t, ptrdiff_t a_lot, int elements)
{
    const int width = (t->columns + TA_VL - 1) / TA_VL * TA_VL, step = elements * TA_DOT_WORDS;
    return (ta_dot_tile){
        .rows = t->rows,
        .columns = width,
        .depth = (t->depth + step - 1) / step * TA_DOT_WORDS,
        .a = t->a,
        .a_stride = TA_DOT_WORDS,
        .a_step = TA_DOT_LOT * TA_DOT_WORDS,
        .a_lot = a_lot,
        .b = t->b,
        .b_stride = width,
        .c_stride = width,
        .next = t->next,
        .next_bytes = t->next_bytes,
    };
}

/* C[rows x columns] (+)= A B + bias as gemm_tile has it, up to TA_DOT_ROWS rows. A is in words
 * [lot][step][row], lots of TA_DOT_LOT rows a_lot apart, and B a panel of words. Rows one behind the other
 * took 1.1 to 1.7 times as long: a tile's rows lay in several pages. */
static void TA_NAME(gemm_dots)(const ta_gemm_tile *t, ptrdiff_t a_lot, const ta_dots *dots)
{
    real products[TA_DOT_ROWS * TA_GEMM_NV * TA_VL];
    ta_dot_tile d = panel_product(t, a_lot, 2);
    const int width = d.columns;
    const int plain = t->rows % TA_DOT_LOT == 0 && t->columns == width && t->bias == NULL;
    d.accumulate = t->accumulate;
    d.c = plain ? t->c : products;
    d.c_stride = plain ? t->c_stride : width;
    /* multiply adds to what `products` holds, so C goes there first. */
    for (int i = 0; !plain && t->accumulate && i < t->rows; i++)
        memcpy(products + i * width, (const real *)t->c + i * t->c_stride, t->columns * sizeof(real));
    dots->multiply(&d);
    if (!plain) {
        ta_gemm_tile finish = *t;
        finish.accumulate = 0;
        gemm_store(&finish, products, width);
    }
}

/* C = A B + bias over the whole depth, of words of int8 laid out likewise: sums are exact, and their
 * integers become floats once, times the scale of the row and then that of the column. */
static void TA_NAME(gemm_bytes)(const ta_gemm_tile *t, ptrdiff_t a_lot, const real *row_scales,
                                const real *column_scales, const ta_dots *dots)
{
    integer sums[TA_DOT_ROWS * TA_GEMM_NV * TA_VL];
    real products[TA_DOT_ROWS * TA_GEMM_NV * TA_VL];
    ta_dot_tile d = panel_product(t, a_lot, 4);
    d.c = sums;
    dots->multiply_bytes(&d);
    for (int i = 0; i < t->rows; i++) {
        for (int j = 0; j < d.columns; j += TA_VL) {
            const int at = i * d.columns + j;
            const vec sum = __builtin_convertvector((veci)vec_load((const real *)sums + at), vec);
            vec_store(products + at, sum * vec_all(row_scales[i]) * vec_load(column_scales + j));
        }
    }
    gemm_store(t, products, d.columns);
}

/* weigh_tile from products with keys, [row][q_stride] in place of the query rows, that lack `scale`. */
#define weigh_products TA_NAME(weigh_products)
TA_INLINE void weigh_products(const int rows, const ta_attention_tile *t, real scale)
{
    starts from;
    start_scores(rows, t, &from);
    for (ptrdiff_t panel = t->key_begin / TA_KEYS * TA_KEYS; panel < t->key_end; panel += TA_KEYS) {
        vec acc[TA_ACC_ROWS][TA_ACC_VECTORS];
        do {
            start_products(rows, acc, t, panel, &from);
            TA_UNROLL
            for (int i = 0; i < rows; i++) {
                const real *products = (const real *)t->q + i * t->q_stride + panel;
                TA_UNROLL
                for (int j = 0; j < TA_ATTENTION_NV; j++)
                    acc[i][j] += vec_all(scale) * vec_load(products + j * TA_VL);
            }
        } while (weigh_panel(rows, acc, t, panel, &from));
    }
}

#define TA_EACH_WEIGH_ROWS(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8)
#define TA_INSTANCE(ROWS)                                                               \
    TA_NOINLINE void TA_NAME(weigh_dots_##ROWS)(const ta_attention_tile *t, real scale) \
    {                                                                                   \
        weigh_products(ROWS, t, scale);                                                 \
    }
#define TA_ENTRY(ROWS) TA_NAME(weigh_dots_##ROWS),
TA_EACH_WEIGH_ROWS(TA_INSTANCE)

static void TA_NAME(weigh_dots)(const ta_attention_tile *t, double scale)
{
    static void (*const instances[TA_WEIGH_ROWS])(const ta_attention_tile *,
                                                  real) = {TA_EACH_WEIGH_ROWS(TA_ENTRY)};
    instances[t->rows - 1](t, (real)scale);
}
#undef TA_INSTANCE
#undef TA_ENTRY
#undef TA_EACH_WEIGH_ROWS

/* A tile's weights as words: dst[row][key / 2] of TA_ROUNDED_STRIDE elements a row, over the panels of keys
 * [begin, end), with zeros where the tile has none. */
static void TA_NAME(round_weights)(const ta_dots *dots, uint16_t *dst, const ta_attention_tile *t,
                                   ptrdiff_t begin, ptrdiff_t end)
{
    begin = begin / TA_KEYS * TA_KEYS;
    end = (end + TA_KEYS - 1) / TA_KEYS * TA_KEYS;
    const int none = t->key_begin >= t->key_end;
    const ptrdiff_t first = none ? begin : t->key_begin / TA_KEYS * TA_KEYS;
    const ptrdiff_t last = none ? begin : (t->key_end + TA_KEYS - 1) / TA_KEYS * TA_KEYS;
    for (int i = 0; i < t->rows; i++, dst += TA_ROUNDED_STRIDE) {
        memset(dst + begin, 0, (first - begin) * sizeof *dst);
        dots->round(dst + first, TA_KEYS, (const real *)t->weights + i * TA_WEIGHT_STRIDE + first,
                    last - first);
        memset(dst + last, 0, (end - last) * sizeof *dst);
    }
}

/* out += weights v over the panels of keys [key_begin, key_end), up to TA_DOT_ROWS rows: `weights` has been
 * rounded to words, `v` are words of whole vectors of columns. */
static void TA_NAME(value_dots)(const ta_attention_tile *t, const ta_dots *dots)
{
    const ptrdiff_t first = t->key_begin / TA_KEYS * TA_KEYS;
    const ptrdiff_t last = (t->key_end + TA_KEYS - 1) / TA_KEYS * TA_KEYS;
    const int plain = t->rows % TA_DOT_LOT == 0;
    enum { LOT = 64 };            /* columns: as many as `multiply` takes at once for few rows */
    real sums[TA_DOT_ROWS * LOT]; /* in place of rows that belong to others */
    ta_dot_tile d = {
        .rows = t->rows,
        .columns = (int)t->v_columns,
        .depth = (last - first) / 2,
        .a = (const uint16_t *)t->weights + first,
        .a_stride = TA_ROUNDED_STRIDE / 2,
        .a_step = TA_DOT_WORDS,
        .a_lot = TA_DOT_LOT * TA_ROUNDED_STRIDE / 2,
        .b = (const uint32_t *)t->v + first / 2 * t->v_stride,
        .b_stride = t->v_stride,
        .c = t->out,
        .c_stride = t->out_stride,
        .accumulate = 1,
    };
    if (plain) {
        dots->multiply(&d);
        return;
    }
    d.c = sums;
    for (ptrdiff_t j = 0; j < t->v_columns; j += LOT) {
        real *out = (real *)t->out + j;
        d.columns = (int)(t->v_columns - j < LOT ? t->v_columns - j : LOT);
        d.c_stride = d.columns;
        for (int i = 0; i < t->rows; i++)
            memcpy(sums + i * d.columns, out + i * t->out_stride, d.columns * sizeof(real));
        dots->multiply(&d);
        for (int i = 0; i < t->rows; i++)
            memcpy(out + i * t->out_stride, sums + i * d.columns, d.columns * sizeof(real));
        d.b = (const uint32_t *)d.b + LOT;
    }
}

/* The yardstick, as fma_rounds is for multiply-adds: a whole tile, of columns that fill every register
 * tile, times the same words at each step, so that what it reads stays in the first-level cache. Every
 * product adds 1 to C, which so counts them, exactly for up to 2^19 rounds. */
static double TA_NAME(dot_rounds)(const ta_dots *dots, ptrdiff_t rounds)
{
    enum { COLUMNS = 96 };
    _Alignas(64) uint32_t words[TA_DOT_ROWS * TA_DOT_WORDS]; /* of A; B is one row, for every depth */
    _Alignas(64) float c[TA_DOT_ROWS * COLUMNS];
    for (int i = 0; i < TA_DOT_ROWS * TA_DOT_WORDS; i++)
        words[i] = 0x3f803f80; /* 1 and 1 */
    const ta_dot_tile t = {
        .rows = TA_DOT_ROWS,
        .columns = COLUMNS,
        .depth = rounds * TA_DOT_WORDS,
        .a = words,
        .a_stride = TA_DOT_WORDS,
        .a_lot = TA_DOT_LOT * TA_DOT_WORDS,
        .b = words,
        .c = c,
        .c_stride = COLUMNS,
    };
    dots->multiply(&t);
    double products = 0;
    for (int i = 0; i < TA_DOT_ROWS * COLUMNS; i++)
        products += c[i];
    return 2 * products;
}
