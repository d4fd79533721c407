/* Attention with an online softmax: one tile of query rows against one block of keys.
 *
 *   start_row      nothing seen yet
 *   score_tile     scores[i][j] = q_i . k_j - row_max_i          in units of log2, -inf where unseen
 *   softmax_tile   scores = 2^scores, row_sum += scores; raises row_max where it must
 *   value_tile     out[i] += scores[i] . v
 *   finish_row     out / row_sum, and the LSE
 *
 * The query rows of a group are stacked: row t * G + g is head g of position t, so that one packed
 * block of keys and one of values serve all heads of the group.
 *
 *   q  [head_dim][rows]                       interleaved by pack_rows, times scale * log2(e)
 *   k  [panel][head_dim][attention_nr]        each panel interleaved by pack_rows
 *   v  [key][v_columns]                       padded by pack_columns
 *   scores  [row][score_stride]               lanes along keys; panel p starts at p * attention_nr
 *
 * The maximum is lazy (row_max need not be the true one, only near it): scores start from -row_max,
 * and only a row with a score that exceeds it by TA_RAISE is rescaled. A row decides that alone, so
 * its bits do not depend on the rows beside it. A panel's lanes of keys beyond the block's end hold
 * anything; no row sees them.
 */
/* In units of log2. Few rows of real data rise so far above their first block's maximum; weights, and the
 * values that they multiply, stay within 2^8 of what the true maximum would make of them. */
#define TA_RAISE 8
#define TA_KEYS (TA_ATTENTION_NV * TA_VL)

#define score_body TA_NAME(score_body)
TA_INLINE void score_body(const int rows, const ta_attention_tile *t)
{
    const real *row_max = t->row_max;
    for (ptrdiff_t panel = t->key_begin / TA_KEYS; panel * TA_KEYS < t->key_end; panel++) {
        const real *k = (const real *)t->k + panel * t->head_dim * TA_KEYS;
        vec acc[TA_ACC_ROWS][TA_ACC_VECTORS];
        TA_UNROLL
        for (int i = 0; i < rows; i++) {
            TA_UNROLL
            for (int j = 0; j < TA_ATTENTION_NV; j++)
                acc[i][j] = vec_all(row_max[i] == -INFINITY ? 0 : -row_max[i]);
        }
        outer_products(acc, rows, TA_ATTENTION_NV, t->head_dim, t->q, 1, rows, k, TA_KEYS);
        real *scores = (real *)t->scores + panel * TA_KEYS;
        TA_UNROLL
        for (int i = 0; i < rows; i++) {
            TA_UNROLL
            for (int j = 0; j < TA_ATTENTION_NV; j++)
                vec_store(scores + i * t->score_stride + j * TA_VL, acc[i][j]);
        }
    }
}

#define TA_INSTANCE(MR, NV)                                          \
    TA_NOINLINE void TA_NAME(score_##MR)(const ta_attention_tile *t) \
    {                                                                \
        score_body(MR, t);                                           \
    }
#define TA_ENTRY(MR, NV) TA_NAME(score_##MR),
TA_EACH_ATTENTION_ROWS(TA_INSTANCE, )

/* Sets the scores outside [first, last) to -inf, in whole panels. */
#define hide_unseen TA_NAME(hide_unseen)
static void hide_unseen(const ta_attention_tile *t)
{
    ptrdiff_t begin = t->key_begin / TA_KEYS * TA_KEYS;
    ptrdiff_t end = (t->key_end + TA_KEYS - 1) / TA_KEYS * TA_KEYS;
    for (int i = 0; i < t->rows; i++) {
        ptrdiff_t first = t->first[i] - t->key_start, last = t->last[i] - t->key_start;
        real *scores = (real *)t->scores + i * t->score_stride;
        for (ptrdiff_t j = begin; j < end; j += TA_VL) {
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

static void TA_NAME(score_tile)(const ta_attention_tile *t)
{
    static void (*const instances[TA_ATTENTION_MR])(const ta_attention_tile *) = {
        TA_EACH_ATTENTION_ROWS(TA_ENTRY, )};
    instances[t->rows - 1](t);
    if (t->edge || t->key_begin % TA_KEYS != 0 || t->key_end % TA_KEYS != 0)
        hide_unseen(t);
}
#undef TA_INSTANCE
#undef TA_ENTRY

/* Takes a row to a new maximum, `rise` above the one that its scores were computed from. */
#define raise_row TA_NAME(raise_row)
static void raise_row(const ta_attention_tile *t, int i, real *scores, ptrdiff_t begin, ptrdiff_t end)
{
    vec highest = vec_all(-INFINITY);
    for (ptrdiff_t j = begin; j < end; j += TA_VL)
        highest = vec_max(highest, vec_load(scores + j));
    real rise = vec_lanes_max(highest);
    if (!(rise > -INFINITY)) /* nothing seen yet, or NaN: then the sum becomes NaN by itself */
        return;
    real *row_max = (real *)t->row_max + i;
    int unset = *row_max == -INFINITY;
    *row_max = unset ? rise : *row_max + rise;
    for (ptrdiff_t j = begin; j < end; j += TA_VL)
        vec_store(scores + j, vec_load(scores + j) - vec_all(rise));
    if (unset) /* what has been summed so far is zero, or NaN */
        return;
    vec factor = vec_exp2(vec_all(-rise));
    real *sum = (real *)t->row_sum + i * TA_VL;
    vec_store(sum, vec_load(sum) * factor);
    real *out = (real *)t->out + i * t->out_stride;
    for (ptrdiff_t j = 0; j < t->v_columns; j += TA_VL)
        vec_store(out + j, vec_load(out + j) * factor);
}

static void TA_NAME(softmax_tile)(const ta_attention_tile *t)
{
    ptrdiff_t begin = t->key_begin / TA_KEYS * TA_KEYS;
    ptrdiff_t end = (t->key_end + TA_KEYS - 1) / TA_KEYS * TA_KEYS;
    for (int i = 0; i < t->rows; i++) {
        real *scores = (real *)t->scores + i * t->score_stride;
        vec highest = vec_all(-INFINITY);
        for (ptrdiff_t j = begin; j < end; j += TA_KEYS)
            highest = vec_max(highest, vec_max(vec_load(scores + j), vec_load(scores + j + TA_VL)));
        if (((const real *)t->row_max)[i] == -INFINITY || vec_any_greater(highest, vec_all(TA_RAISE)))
            raise_row(t, i, scores, begin, end);
        real *row_sum = (real *)t->row_sum + i * TA_VL;
        vec sum = vec_load(row_sum);
        for (ptrdiff_t j = begin; j < end; j += TA_VL) {
            vec p = vec_exp2(vec_load(scores + j));
            vec_store(scores + j, p);
            sum += p;
        }
        vec_store(row_sum, sum);
    }
}

#define value_body TA_NAME(value_body)
TA_INLINE void value_body(const int rows, const int vectors, const ta_attention_tile *t, ptrdiff_t column)
{
    real *out = (real *)t->out + column;
    vec acc[TA_ACC_ROWS][TA_ACC_VECTORS];
    TA_UNROLL
    for (int i = 0; i < rows; i++) {
        TA_UNROLL
        for (int j = 0; j < vectors; j++)
            acc[i][j] = vec_all(0);
    }
    outer_products(acc, rows, vectors, t->key_end - t->key_begin, (const real *)t->scores + t->key_begin,
                   t->score_stride, 1, (const real *)t->v + t->key_begin * t->v_columns + column,
                   t->v_columns);
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

#define value_rows TA_NAME(value_rows)
TA_INLINE void value_rows(const int rows, const ta_attention_tile *t)
{
    ptrdiff_t column = 0;
    for (; column + TA_KEYS <= t->v_columns; column += TA_KEYS)
        value_body(rows, TA_ATTENTION_NV, t, column);
    for (; column < t->v_columns; column += TA_VL)
        value_body(rows, 1, t, column);
}

#define TA_INSTANCE(MR, NV)                                          \
    TA_NOINLINE void TA_NAME(value_##MR)(const ta_attention_tile *t) \
    {                                                                \
        value_rows(MR, t);                                           \
    }
#define TA_ENTRY(MR, NV) TA_NAME(value_##MR),
TA_EACH_ATTENTION_ROWS(TA_INSTANCE, )

static void TA_NAME(value_tile)(const ta_attention_tile *t)
{
    static void (*const instances[TA_ATTENTION_MR])(const ta_attention_tile *) = {
        TA_EACH_ATTENTION_ROWS(TA_ENTRY, )};
    instances[t->rows - 1](t);
}
#undef TA_INSTANCE
#undef TA_ENTRY

static void TA_NAME(start_row)(void *out_, ptrdiff_t columns, void *row_max, void *row_sum)
{
    real *out = out_;
    for (ptrdiff_t j = 0; j < columns; j += TA_VL)
        vec_store(out + j, vec_all(0));
    vec_store(row_sum, vec_all(0));
    *(real *)row_max = -INFINITY;
}

static void TA_NAME(finish_row)(void *dst_, ptrdiff_t column_stride, ptrdiff_t columns, void *lse,
                                const void *out_, const void *row_max, const void *row_sum)
{
    real *dst = dst_;
    const real *out = out_;
    real sum = vec_sum(vec_load(row_sum));
    /* Zero: the row saw no key, or none with a score above -inf. */
    real inverse = sum == 0 ? 0 : 1 / sum;
    if (column_stride == 1) {
        for (ptrdiff_t j = 0; j + TA_VL <= columns; j += TA_VL)
            vec_store(dst + j, vec_load(out + j) * vec_all(inverse));
        for (ptrdiff_t j = columns / TA_VL * TA_VL; j < columns; j++)
            dst[j] = out[j] * inverse;
    } else {
        for (ptrdiff_t j = 0; j < columns; j++)
            dst[j * column_stride] = out[j] * inverse;
    }
    if (lse != NULL)
        *(real *)lse = (real)((*(const real *)row_max + log2((double)sum)) * 0.693147180559945309417);
}

static int TA_NAME(all_finite)(const void *src, ptrdiff_t count)
{
    vec zeros = vec_all(0); /* x * 0 is NaN where x is not finite */
    for (ptrdiff_t i = 0; i < count; i += TA_VL)
        zeros += vec_load((const real *)src + i) * vec_all(0);
    return vec_sum(zeros) == 0;
}
