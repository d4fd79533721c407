/* Attention with an online softmax: one tile of query rows against one block of keys.
 *
 *   start_row      nothing seen yet, but for a sink
 *   weigh_tile     weights[i][j] = 2^(q_i . k_j - row_max_i), 0 where unseen; row_sum += weights;
 *   weigh_few      raises row_max where it must; the second for keys as they lie in memory
 *   value_tile     out[i] += weights[i] . v
 *   add_rows       their sums over rows
 *   merge_row      the union of two disjoint parts of the keys
 *   finish_row     out / row_sum, and the LSE
 *
 * The query rows of a group are stacked: row t * G + g is head g of position t, so that one block of
 * keys and one of values serve all heads of the group.
 *
 *   q  [row][q_stride]                        times scale * log2(e), zeros up to whole vectors
 *   k  [panel][head_dim][attention_nr]        each panel interleaved by pack_rows; or [key][k_stride]
 *   v  [key][v_stride]                        whole vectors of columns
 *   weights  [row][TA_WEIGHT_STRIDE]          lanes along keys; panel p starts at p * attention_nr
 *
 * The maximum is lazy (row_max need not be the true one, only near it): scores start from -row_max,
 * and only a row with a score that exceeds it by TA_RAISE is rescaled, once its scores in this panel have
 * been computed from 0. A row decides that alone, panel by panel, so its bits do not depend on the rows
 * beside it. Lanes of keys beyond the block's end hold anything until they are hidden.
 */
/* In units of log2. Rarely does a row of real data rise so far above its first panel's maximum; weights,
 * and the values that they multiply, stay within 2^8 of what the true maximum would make of them. */
#define TA_RAISE 8
/* From here on a maximum has too few bits behind the binary point for scores to start from it: they start
 * from 0, lose what they lose, and are taken relative to it in the end, so that equal keys weigh the same
 * in every panel. */
#define TA_FAR 128

/* Sets a panel's scores outside [first, last), or of keys that the tile leaves out, to -inf. */
#define hide_unseen TA_NAME(hide_unseen)
TA_NOINLINE void hide_unseen(const ta_attention_tile *t, ptrdiff_t panel)
{
    for (int i = 0; i < t->rows; i++) {
        ptrdiff_t first = t->first[i] - t->key_start, last = t->last[i] - t->key_start;
        first = first < t->key_begin ? t->key_begin : first;
        last = last < t->key_end ? last : t->key_end;
        real *scores = (real *)t->weights + i * TA_WEIGHT_STRIDE;
        for (ptrdiff_t j = panel; j < panel + TA_KEYS; j += TA_VL) {
            if (first <= j && j + TA_VL <= last)
                continue;
            /* Clipped, since positions need not fit into a lane's integer. */
            ptrdiff_t from = first - j, to = last - j;
            from = from < 0 ? 0 : from > TA_VL ? TA_VL : from;
            to = to < 0 ? 0 : to > TA_VL ? TA_VL : to;
            veci lane = vec_iota();
            veci seen = (lane >= (integer)from) & (lane < (integer)to);
            vec_store(scores + j, vec_select(seen, vec_load(scores + j), vec_all(-INFINITY)));
        }
    }
}

/* What the scores of a tile's rows start from. */
#define starts TA_NAME(starts)
typedef struct starts {
    real of_row[TA_ACC_ROWS];
    int whole;  /* bit i: the scores of row i start from 0, and its maximum is taken off in the end */
    int hidden; /* start_panel has hidden keys of some row */
} starts;

/* Takes the rows whose scores are whole to their maximum, and what they have summed up to this panel with
 * it. Returns whether other rows rise: their scores have to be computed anew, since what is left of a score
 * beside a far lower maximum may be no bit at all. */
#define raise_rows TA_NAME(raise_rows)
TA_NOINLINE int raise_rows(const ta_attention_tile *t, ptrdiff_t panel, starts *from)
{
    int again = 0;
    for (int i = 0; i < t->rows; i++) {
        real *scores = (real *)t->weights + i * TA_WEIGHT_STRIDE;
        real *row_max = (real *)t->row_max + i;
        vec highest = vec_all(-INFINITY);
        for (ptrdiff_t j = panel; j < panel + TA_KEYS; j += TA_VL)
            highest = vec_max(vec_load(scores + j), highest);
        real top = vec_lanes_max(highest);
        if (!(from->whole >> i & 1)) {
            if (top > TA_RAISE) {
                from->of_row[i] = 0;
                from->whole |= 1 << i;
                again = 1;
            }
            continue;
        }
        if (top == -INFINITY)
            continue;
        const real before = *row_max;
        *row_max = before == -INFINITY || top > before + TA_RAISE ? top : before;
        for (ptrdiff_t j = panel; j < panel + TA_KEYS; j += TA_VL)
            vec_store(scores + j, vec_load(scores + j) - vec_all(*row_max));
        if (before == -INFINITY || before == *row_max) /* what has been summed is zero, or NaN; no rise */
            continue;
        vec factor = vec_exp2(vec_all(before - *row_max));
        /* What would become subnormal becomes 0: where scores rise from key to key, as with ALiBi, most
         * weights of a block do, and each product with one takes over a hundred cycles. A NaN stays. Where
         * a lone score makes one, in vec_exp2, it is too rare to pay for a comparison. */
        vec least = vec_all(TA_SMALLEST) / factor;
        for (ptrdiff_t j = t->key_begin / TA_KEYS * TA_KEYS; j < panel; j += TA_VL) {
            vec weight = vec_load(scores + j);
            weight = (vec)((veci)weight & ~(veci)(weight < least));
            vec_store(scores + j, weight * factor);
        }
        real *sum = (real *)t->row_sum + i * TA_VL;
        vec_store(sum, vec_load(sum) * factor);
        real *out = (real *)t->out + i * t->out_stride;
        for (ptrdiff_t j = 0; j < t->v_columns; j += TA_VL)
            vec_store(out + j, vec_load(out + j) * factor);
    }
    return again;
}

#define start_scores TA_NAME(start_scores)
TA_INLINE void start_scores(const int rows, const ta_attention_tile *t, starts *from)
{
    from->whole = from->hidden = 0;
    for (int i = 0; i < rows; i++) {
        real row_max = ((const real *)t->row_max)[i];
        int near = -TA_FAR < row_max && row_max < TA_FAR; /* or far, or the row has seen no key, or NaN */
        from->of_row[i] = near ? -row_max : 0;
        from->whole |= !near << i;
    }
}

#define store_panel TA_NAME(store_panel)
TA_INLINE void store_panel(const int rows, real *to, ptrdiff_t stride, vec acc[TA_ACC_ROWS][TA_ACC_VECTORS])
{
    TA_UNROLL
    for (int i = 0; i < rows; i++) {
        TA_UNROLL
        for (int j = 0; j < TA_ATTENTION_NV; j++)
            vec_store(to + i * stride + j * TA_VL, acc[i][j]);
    }
}

#define load_panel TA_NAME(load_panel)
TA_INLINE void load_panel(const int rows, vec acc[TA_ACC_ROWS][TA_ACC_VECTORS], const real *from,
                          ptrdiff_t stride)
{
    TA_UNROLL
    for (int i = 0; i < rows; i++) {
        TA_UNROLL
        for (int j = 0; j < TA_ATTENTION_NV; j++)
            acc[i][j] = vec_load(from + i * stride + j * TA_VL);
    }
}

/* What the products with a panel's keys are added to. */
#define start_products TA_NAME(start_products)
TA_INLINE void start_products(const int rows, vec acc[TA_ACC_ROWS][TA_ACC_VECTORS],
                              const ta_attention_tile *t, ptrdiff_t panel, starts *from)
{
    const ta_score_options *o = t->options;
    if (o != NULL && t->score_rows != NULL) {
        from->hidden = start_panel(t, panel, from->of_row);
        if (o->softcap == 0) {
            load_panel(rows, acc, (const real *)t->weights + panel, TA_WEIGHT_STRIDE);
        } else {
            TA_UNROLL
            for (int i = 0; i < rows; i++) {
                TA_UNROLL
                for (int j = 0; j < TA_ATTENTION_NV; j++)
                    acc[i][j] = vec_all(0);
            }
        }
        return;
    }
    TA_UNROLL
    for (int i = 0; i < rows; i++) {
        TA_UNROLL
        for (int j = 0; j < TA_ATTENTION_NV; j++)
            acc[i][j] = vec_all(from->of_row[i]);
    }
    if (o == NULL)
        return;
    TA_UNROLL
    for (int i = 0; i < rows; i++) {
        TA_UNROLL
        for (int j = 0; j < TA_ATTENTION_NV; j++)
            acc[i][j] += vec_load((const real *)o->key_bias + panel + j * TA_VL) * vec_all((real)TA_LOG2_E);
    }
}

#define end_products TA_NAME(end_products)
TA_INLINE void end_products(const int rows, vec acc[TA_ACC_ROWS][TA_ACC_VECTORS],
                            const ta_attention_tile *t, ptrdiff_t panel, const starts *from)
{
    const real *weights = (const real *)t->weights + panel;
    if (t->options->softcap != 0) {
        real products[TA_ACC_ROWS][TA_KEYS];
        store_panel(rows, products[0], TA_KEYS, acc);
        cap_panel(t, panel, products);
        load_panel(rows, acc, weights, TA_WEIGHT_STRIDE);
    } else if (t->score_rows == NULL) {
        TA_UNROLL
        for (int j = 0; j < TA_ATTENTION_NV; j++) {
            vec start = vec_load((const real *)t->options->key_bias + panel + j * TA_VL);
            veci hidden = (veci)(start == vec_all(-INFINITY));
            TA_UNROLL
            for (int i = 0; i < rows; i++)
                acc[i][j] = vec_select(hidden, start, acc[i][j]);
        }
    } else if (from->hidden) {
        TA_UNROLL
        for (int i = 0; i < rows; i++) {
            TA_UNROLL
            for (int j = 0; j < TA_ATTENTION_NV; j++) {
                vec start = vec_load(weights + i * TA_WEIGHT_STRIDE + j * TA_VL);
                acc[i][j] = vec_select((veci)(start == vec_all(-INFINITY)), start, acc[i][j]);
            }
        }
    }
}

/* Weights of a panel whose rows keep their maxima, from its scores in memory. Such a maximum is an LSE that
 * somebody gives, NaN maybe, or less than a score: a weight beyond the range of vec_exp2 is made by half.
 */
#define weigh_kept TA_NAME(weigh_kept)
TA_NOINLINE void weigh_kept(const ta_attention_tile *t, ptrdiff_t panel, const starts *from)
{
    const vec top = vec_all(TA_BITS == 32 ? 127 : 1023), one = vec_all(1);
    for (int i = 0; i < t->rows; i++) {
        real *weights = (real *)t->weights + i * TA_WEIGHT_STRIDE;
        const vec row_max = vec_all(from->whole >> i & 1 ? ((const real *)t->row_max)[i] : 0);
        vec sum = vec_load((const real *)t->row_sum + i * TA_VL);
        for (ptrdiff_t j = panel; j < panel + TA_KEYS; j += TA_VL) {
            const vec given = vec_load(weights + j), score = given - row_max;
            const veci hidden = (veci)(given == vec_all(-INFINITY)), high = (veci)(score > top);
            const veci infinite = (veci)(score > top + one);
            const vec half = vec_select(infinite, top, score - one);
            vec weight = vec_exp2(vec_select(hidden, given, vec_select(high, half, score)));
            weight = vec_select(high, weight + weight, weight);
            vec_store(weights + j, weight);
            sum += weight;
        }
        vec_store((real *)t->row_sum + i * TA_VL, sum);
    }
}

/* From a panel's scores in registers to its weights in memory. Returns 0, or 1 if it wants the scores from
 * new starts first. */
#define weigh_panel TA_NAME(weigh_panel)
TA_INLINE int weigh_panel(const int rows, vec acc[TA_ACC_ROWS][TA_ACC_VECTORS], const ta_attention_tile *t,
                          ptrdiff_t panel, starts *from)
{
    real *weights = (real *)t->weights + panel;
    if (t->options != NULL)
        end_products(rows, acc, t, panel, from);
    int hide = panel < t->all_begin || t->all_end < panel + TA_KEYS;
    vec highest = vec_all(-INFINITY); /* a NaN does not enter it, and hides no other row's score */
    TA_UNROLL
    for (int i = 0; i < rows; i++) {
        TA_UNROLL
        for (int j = 0; j < TA_ATTENTION_NV; j++)
            highest = vec_max(acc[i][j], highest);
    }
    if (hide || from->whole || vec_any_greater(highest, vec_all(TA_RAISE))) {
        store_panel(rows, weights, TA_WEIGHT_STRIDE, acc);
        if (hide)
            hide_unseen(t, panel);
        if (t->keeps_max) {
            weigh_kept(t, panel, from);
            return 0;
        }
        if (raise_rows(t, panel, from))
            return 1;
        start_scores(rows, t, from);
        load_panel(rows, acc, weights, TA_WEIGHT_STRIDE);
    }
    TA_UNROLL
    for (int i = 0; i < rows; i++) {
        vec sum = vec_load((const real *)t->row_sum + i * TA_VL);
        TA_UNROLL
        for (int j = 0; j < TA_ATTENTION_NV; j++) {
            vec weight = vec_exp2(acc[i][j]);
            vec_store(weights + i * TA_WEIGHT_STRIDE + j * TA_VL, weight);
            sum += weight;
        }
        vec_store((real *)t->row_sum + i * TA_VL, sum);
    }
    return 0;
}

#define weigh_body TA_NAME(weigh_body)
TA_INLINE void weigh_body(const int rows, const ta_attention_tile *t)
{
    starts from;
    start_scores(rows, t, &from);
    for (ptrdiff_t panel = t->key_begin / TA_KEYS * TA_KEYS; panel < t->key_end; panel += TA_KEYS) {
        vec acc[TA_ACC_ROWS][TA_ACC_VECTORS];
        do {
            start_products(rows, acc, t, panel, &from);
            outer_products(acc, rows, TA_ATTENTION_NV, t->head_dim, t->q, t->q_stride, 1, TA_REAL,
                           (const real *)t->k + panel * t->head_dim, TA_KEYS);
        } while (weigh_panel(rows, acc, t, panel, &from));
    }
}

#define TA_INSTANCE(MR, NV)                                          \
    TA_NOINLINE void TA_NAME(weigh_##MR)(const ta_attention_tile *t) \
    {                                                                \
        weigh_body(MR, t);                                           \
    }
#define TA_ENTRY(MR, NV) TA_NAME(weigh_##MR),
TA_EACH_ATTENTION_ROWS(TA_INSTANCE, )

static void TA_NAME(weigh_tile)(const ta_attention_tile *t)
{
    static void (*const instances[TA_ATTENTION_MR])(const ta_attention_tile *) = {
        TA_EACH_ATTENTION_ROWS(TA_ENTRY, )};
    instances[t->rows - 1](t);
}
#undef TA_INSTANCE
#undef TA_ENTRY

/* The products of `rows` query rows with TA_VL / rows keys, in lanes [row][key]: sums along the head in
 * each lane, then over the lanes by halves, the same for every row and key. */
#define dot_products TA_NAME(dot_products)
TA_INLINE vec dot_products(const int rows, const int storage, const real *q, ptrdiff_t q_stride,
                           const char *const *k, const uintptr_t *next, ptrdiff_t next_size,
                           ptrdiff_t head_dim)
{
    const int keys = TA_VL / rows;
    vec acc[TA_VL];
    TA_UNROLL
    for (int i = 0; i < TA_VL; i++)
        acc[i] = vec_all(0);
    /* A line of int8 is asked for once: it holds several vectors. */
    for (ptrdiff_t h = 0; h < head_dim; h += TA_VL) {
        vec q_part[TA_FEW_ROWS];
        TA_UNROLL
        for (int i = 0; i < rows; i++)
            q_part[i] = vec_load(q + i * q_stride + h);
        TA_UNROLL
        for (int j = 0; j < keys; j++) {
            vec k_part = load_vector(storage, k[j] + h * stored_size(storage));
            if (next != NULL && (storage != TA_INT8 || h % TA_CACHE_LINE == 0))
                __builtin_prefetch((const void *)(next[j] + h * next_size), 0, 2);
            TA_UNROLL
            for (int i = 0; i < rows; i++)
                acc[i * keys + j] += q_part[i] * k_part;
        }
    }
    TA_UNROLL
    for (int step = TA_VL / 2; step > 0; step /= 2) {
        TA_UNROLL
        for (int i = 0; i < step; i++)
            acc[i] = vec_zip_low(acc[i], acc[i + step]) + vec_zip_high(acc[i], acc[i + step]);
    }
    return acc[0];
}

#define few_body TA_NAME(few_body)
TA_INLINE void few_body(const int rows, const int storage, const ta_attention_tile *t)
{
    const int keys = TA_VL / rows;
    const ptrdiff_t k_step = t->k_stride * stored_size(storage);
    const int fetch = t->next != NULL;
    starts from;
    start_scores(rows, t, &from);
    for (ptrdiff_t panel = t->key_begin / TA_KEYS * TA_KEYS; panel < t->key_end; panel += TA_KEYS) {
        real dots[TA_FEW_ROWS][TA_KEYS];
        for (int key = 0; key < TA_KEYS; key += keys) {
            const char *k[TA_VL];
            uintptr_t next[TA_VL];
            TA_UNROLL
            for (int j = 0; j < keys; j++) {
                ptrdiff_t at = panel + key + j;
                at = at < t->key_begin ? t->key_begin : at < t->key_end ? at : t->key_end - 1;
                k[j] = (const char *)t->k + at * k_step;
                next[j] = fetch ? (uintptr_t)t->next + at * t->next_stride : 0;
            }
            real lanes[TA_VL];
            vec_store(lanes, dot_products(rows, storage, t->q, t->q_stride, k, fetch ? next : NULL,
                                          t->next_size, t->head_dim));
            TA_UNROLL
            for (int i = 0; i < rows; i++)
                memcpy(dots[i] + key, lanes + i * keys, keys * sizeof(real));
        }
        if (storage == TA_INT8)
            scale_rows(dots[0], rows, TA_KEYS, TA_KEYS, (const real *)t->k_scales + panel);
        vec acc[TA_ACC_ROWS][TA_ACC_VECTORS];
        do {
            start_products(rows, acc, t, panel, &from);
            TA_UNROLL
            for (int i = 0; i < rows; i++) {
                TA_UNROLL
                for (int j = 0; j < TA_ATTENTION_NV; j++)
                    acc[i][j] += vec_load(dots[i] + j * TA_VL);
            }
        } while (weigh_panel(rows, acc, t, panel, &from));
    }
}

#define TA_INSTANCE(STORAGE, NAME)                             \
    TA_NOINLINE void TA_NAME(NAME)(const ta_attention_tile *t) \
    {                                                          \
        few_body(TA_ROWS, STORAGE, t);                         \
    }
#define TA_ROWS 1
TA_EACH_KEPT(TA_INSTANCE, few_1)
#undef TA_ROWS
#define TA_ROWS 2
TA_EACH_KEPT(TA_INSTANCE, few_2)
#undef TA_ROWS
#if TA_FEW_ROWS >= 4
#define TA_ROWS 4
TA_EACH_KEPT(TA_INSTANCE, few_4)
#undef TA_ROWS
#endif
#if TA_FEW_ROWS >= 8
#define TA_ROWS 8
TA_EACH_KEPT(TA_INSTANCE, few_8)
#undef TA_ROWS
#endif
#undef TA_INSTANCE

#define TA_ENTRY(STORAGE, NAME) [STORAGE] = TA_NAME(NAME),
static void TA_NAME(weigh_few)(const ta_attention_tile *tile)
{
    /* By the logarithm of the number of rows. */
    static void (*const instances[][TA_STORAGES])(const ta_attention_tile *) = {
        {TA_EACH_KEPT(TA_ENTRY, few_1)},
        {TA_EACH_KEPT(TA_ENTRY, few_2)},
#if TA_FEW_ROWS >= 4
        {TA_EACH_KEPT(TA_ENTRY, few_4)},
#endif
#if TA_FEW_ROWS >= 8
        {TA_EACH_KEPT(TA_ENTRY, few_8)},
#endif
    };
    ta_attention_tile t = *tile;
    int log_rows = sizeof instances / sizeof *instances - 1;
    for (int left = tile->rows; left > 0; left -= t.rows) {
        while (1 << log_rows > left)
            log_rows--;
        t.rows = 1 << log_rows;
        instances[log_rows][t.k_storage](&t);
        t.q = (const real *)t.q + t.rows * t.q_stride;
        t.first += t.rows;
        t.last += t.rows;
        t.score_rows += t.score_rows != NULL ? t.rows : 0;
        t.weights = (real *)t.weights + t.rows * TA_WEIGHT_STRIDE;
        t.row_max = (real *)t.row_max + t.rows;
        t.row_sum = (real *)t.row_sum + t.rows * TA_VL;
        t.out = (real *)t.out + t.rows * t.out_stride;
        t.next = NULL;
    }
}
#undef TA_ENTRY

#define value_body TA_NAME(value_body)
TA_INLINE void value_body(const int rows, const int vectors, const int storage, const ta_attention_tile *t,
                          ptrdiff_t column)
{
    const ptrdiff_t v_size = stored_size(storage);
    real *out = (real *)t->out + column;
    vec acc[TA_ACC_ROWS][TA_ACC_VECTORS];
    TA_UNROLL
    for (int i = 0; i < rows; i++) {
        TA_UNROLL
        for (int j = 0; j < vectors; j++)
            acc[i][j] = vec_all(0);
    }
    const uintptr_t next = (uintptr_t)t->next;
    ptrdiff_t lot = next ? 1 : t->key_end - t->key_begin;
    for (ptrdiff_t key = t->key_begin; key < t->key_end; key += lot) {
        TA_UNROLL
        for (int j = 0; j < vectors; j++)
            if (next && (storage != TA_INT8 || j * TA_VL % TA_CACHE_LINE == 0))
                __builtin_prefetch(
                    (const void *)(next + key * t->next_stride + (column + j * TA_VL) * t->next_size), 0,
                    2);
        outer_products(acc, rows, vectors, lot, (const real *)t->weights + key, TA_WEIGHT_STRIDE, 1,
                       storage, (const char *)t->v + (key * t->v_stride + column) * v_size, t->v_stride);
    }
    /* A sum for each block, then the sum of these: one chain over 16384 keys has ten times the error. */
    TA_UNROLL
    for (int i = 0; i < rows; i++) {
        TA_UNROLL
        for (int j = 0; j < vectors; j++) {
            real *to = out + i * t->out_stride + j * TA_VL;
            vec_store(to, vec_load(to) + acc[i][j]);
        }
    }
}

/* Few rows take more columns at once: the latency of a multiply-add wants some eight chains. */
#define value_rows TA_NAME(value_rows)
TA_INLINE void value_rows(const int rows, const int storage, const ta_attention_tile *t)
{
    const int many = rows > 4 ? TA_ATTENTION_NV : rows > 2 ? TA_FEW_VECTORS / 2 : TA_FEW_VECTORS;
    ptrdiff_t column = 0;
    if (storage == TA_INT8) { /* once for all columns */
        const ptrdiff_t first = t->key_begin / TA_VL * TA_VL;
        scale_rows((real *)t->weights + first, rows, t->key_end - first, TA_WEIGHT_STRIDE,
                   (const real *)t->v_scales + first);
    }
    for (; column + many * TA_VL <= t->v_columns; column += many * TA_VL)
        value_body(rows, many, storage, t, column);
    if (many > TA_ATTENTION_NV)
        for (; column + TA_KEYS <= t->v_columns; column += TA_KEYS)
            value_body(rows, TA_ATTENTION_NV, storage, t, column);
    for (; column < t->v_columns; column += TA_VL)
        value_body(rows, 1, storage, t, column);
}

#define TA_INSTANCE(MR, STORAGE)                                              \
    TA_NOINLINE void TA_NAME(value_##MR##STORAGE)(const ta_attention_tile *t) \
    {                                                                         \
        value_rows(MR, STORAGE, t);                                           \
    }
#define TA_ENTRY(MR, STORAGE) TA_NAME(value_##MR##STORAGE),
TA_EACH_ATTENTION_ROWS(TA_INSTANCE, TA_REAL)
#if TA_BITS == 32
TA_EACH_ATTENTION_ROWS(TA_INSTANCE, TA_BF16)
TA_EACH_ATTENTION_ROWS(TA_INSTANCE, TA_F16)
TA_EACH_ATTENTION_ROWS(TA_INSTANCE, TA_INT8)
#endif

static void TA_NAME(value_tile)(const ta_attention_tile *t)
{
    static void (*const instances[TA_STORAGES][TA_ATTENTION_MR])(const ta_attention_tile *) = {
        [TA_REAL] = {TA_EACH_ATTENTION_ROWS(TA_ENTRY, TA_REAL)},
#if TA_BITS == 32
        [TA_BF16] = {TA_EACH_ATTENTION_ROWS(TA_ENTRY, TA_BF16)},
        [TA_F16] = {TA_EACH_ATTENTION_ROWS(TA_ENTRY, TA_F16)},
        [TA_INT8] = {TA_EACH_ATTENTION_ROWS(TA_ENTRY, TA_INT8)},
#endif
    };
    instances[t->v_storage][t->rows - 1](t);
}
#undef TA_INSTANCE
#undef TA_ENTRY

/* dst[j] += the sum of src[i * row_stride + j] over the rows. */
static void TA_NAME(add_rows)(void *dst, const void *src, ptrdiff_t rows, ptrdiff_t columns,
                              ptrdiff_t row_stride)
{
    for (ptrdiff_t j = 0; j < columns; j += TA_VL) {
        vec sum = vec_all(0);
        for (ptrdiff_t i = 0; i < rows; i++)
            sum += vec_load((const real *)src + i * row_stride + j);
        vec_store((real *)dst + j, vec_load((real *)dst + j) + sum);
    }
}

static void TA_NAME(start_row)(void *out_, ptrdiff_t columns, void *row_max, void *row_sum, double sink)
{
    real *out = out_;
    for (ptrdiff_t j = 0; j < columns; j += TA_VL)
        vec_store(out + j, vec_all(0));
    vec_store(row_sum, vec_all(0));
    *(real *)row_max = (real)sink;
    if ((real)sink != -INFINITY)
        *(real *)row_sum = 1;
}

/* Adds what other keys gave a row to what some keys gave it. A part that weighs nothing has zeros, or NaN
 * from 0 * inf: times -0 these change no bit of the other part, a -0 neither, and NaN comes through. */
static void TA_NAME(merge_row)(void *out, void *row_max, void *row_sum, const void *other_out,
                               const void *other_max, const void *other_sum, ptrdiff_t columns)
{
    real *max = row_max, other = *(const real *)other_max;
    vec keep = vec_all(1), take = vec_all(1);
    if (other == -INFINITY)
        take = vec_all((real)-0.0);
    else if (*max == -INFINITY)
        keep = vec_all((real)-0.0);
    else if (*max < other)
        keep = vec_exp2(vec_all(*max - other));
    else if (other < *max)
        take = vec_exp2(vec_all(other - *max));
    *max = *max > other ? *max : other;
    vec_store(row_sum, vec_load(row_sum) * keep + vec_load(other_sum) * take);
    for (ptrdiff_t j = 0; j < columns; j += TA_VL) {
        real *to = (real *)out + j;
        vec_store(to, vec_load(to) * keep + vec_load((const real *)other_out + j) * take);
    }
}

#define finish_row_body TA_NAME(finish_row_body)
TA_INLINE void finish_row_body(const int storage, char *dst, ptrdiff_t column_stride, ptrdiff_t columns,
                               real *lse, const real *out, const real *row_max, const real *row_sum)
{
    real sum = vec_sum(vec_load(row_sum));
    /* Zero: the row saw no key, or none with a score above -inf. */
    real inverse = sum == 0 ? 0 : 1 / sum;
    const ptrdiff_t step = column_stride * stored_size(storage);
    ptrdiff_t j = 0;
    if (column_stride == 1)
        for (; j + TA_VL <= columns; j += TA_VL)
            store_vector(storage, dst + j * step, vec_load(out + j) * vec_all(inverse));
    for (; j < columns; j++)
        store_one(storage, dst + j * step, out[j] * inverse);
    if (lse != NULL) {
        const double log2_lse = *row_max + log2((double)sum);
        const real size = *row_max < 0 ? -*row_max : *row_max;
        if (-TA_LOWEST_SCORE <= size && size <= -TA_LOWEST)
            /* The largest bias: bound_bias made it finite in log2. */
            *lse = *row_max < 0 ? TA_LOWEST : -TA_LOWEST;
        else if ((real)log2_lse == *row_max)
            /* The quotient gives row_max again where it is the product of a bias: a large one must meet
             * itself as an LSE to the bit, or its weight is 0 or inf. */
            *lse = *row_max / (real)TA_LOG2_E;
        else
            *lse = (real)(log2_lse * TA_LN_2);
    }
}

#define TA_INSTANCE(STORAGE, NAME)                                                              \
    static void TA_NAME(NAME)(void *dst, ptrdiff_t column_stride, ptrdiff_t columns, void *lse, \
                              const void *out, const void *row_max, const void *row_sum)        \
    {                                                                                           \
        finish_row_body(STORAGE, dst, column_stride, columns, lse, out, row_max, row_sum);      \
    }
TA_EACH_STORAGE(TA_INSTANCE, finish_row)
#undef TA_INSTANCE

static int TA_NAME(all_finite)(const void *src, ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t row_stride)
{
    enum { CHAINS = 4 }; /* one would wait for each multiply-add */
    vec zeros[CHAINS];   /* x * 0 is NaN where x is not finite */
    TA_UNROLL
    for (int c = 0; c < CHAINS; c++)
        zeros[c] = vec_all(0);
    const real *row = src;
    ptrdiff_t i = 0;
    for (; i + CHAINS <= rows; i += CHAINS, row += CHAINS * row_stride)
        for (ptrdiff_t j = 0; j < columns; j += TA_VL) {
            TA_UNROLL
            for (int c = 0; c < CHAINS; c++)
                zeros[c] += vec_load(row + c * row_stride + j) * vec_all(0);
        }
    for (; i < rows; i++, row += row_stride)
        for (ptrdiff_t j = 0; j < columns; j += TA_VL)
            zeros[0] += vec_load(row + j) * vec_all(0);
    return vec_sum(zeros[0] + zeros[1] + zeros[2] + zeros[3]) == 0;
}
