/* A few rows of attention over all parts of the keys, from what was found in each part.
 *
 *   lse = max + log(sum of w_p)    w_p = exp(lse_p - max)
 *   out = sum of w_p out_p / sum of w_p
 *
 * The weights of all rows are made at once, a row a lane. Each out is read once and its products are
 * added in the order of the parts. A part whose LSE is -inf has seen nothing: its out is not read.
 */
/* Columns at once: so many chains hide the latency of a multiply-add over a few parts. */
#define TA_MERGE_VECTORS 4

#define weigh_parts TA_NAME(weigh_parts)
TA_INLINE void weigh_parts(const ta_merge_tile *t)
{
    real *weights = t->weights, lanes[2][TA_VL];
    vec max = vec_all(-INFINITY), sum = vec_all(0);
    for (ptrdiff_t p = 0; p < t->part_count; p++) {
        for (int i = 0; i < TA_VL; i++)
            lanes[0][i] =
                i < t->rows ? ((const real *)t->parts[p].lse)[i * t->parts[p].lse_stride] : -INFINITY;
        vec lse = vec_load(lanes[0]);
        vec_store(weights + p * TA_VL, lse);
        max = vec_max(max, lse);
    }
    /* Where all weights are 0, any finite maximum serves. */
    max = vec_select(max == vec_all(-INFINITY), vec_all(0), max);
    for (ptrdiff_t p = 0; p < t->part_count; p++) {
        vec weight = vec_exp2((vec_load(weights + p * TA_VL) - max) * vec_all((real)TA_LOG2_E));
        vec_store(weights + p * TA_VL, weight);
        sum += weight;
    }
    vec_store(lanes[0], max);
    vec_store(lanes[1], sum);
    for (int i = 0; i < t->rows; i++)
        ((real *)t->lse)[i] = (real)(lanes[0][i] + log((double)lanes[1][i]));
    vec inverse = vec_all(1) / vec_select(sum == vec_all(0), vec_all(1), sum);
    for (ptrdiff_t p = 0; p < t->part_count; p++)
        vec_store(weights + p * TA_VL, vec_load(weights + p * TA_VL) * inverse);
}

#define has_seen TA_NAME(has_seen)
TA_INLINE int has_seen(const ta_state *part, int row)
{
    return ((const real *)part->lse)[row * part->lse_stride] != -INFINITY;
}

#define merge_columns TA_NAME(merge_columns)
TA_INLINE void merge_columns(const int storage, const int vectors, const ta_merge_tile *t, int row,
                             ptrdiff_t column)
{
    const ptrdiff_t size = stored_size(storage);
    vec acc[TA_MERGE_VECTORS];
    TA_UNROLL
    for (int j = 0; j < vectors; j++)
        acc[j] = vec_all(0);
    for (ptrdiff_t p = 0; p < t->part_count; p++) {
        const ta_state *part = t->parts + p;
        if (!has_seen(part, row))
            continue;
        const char *from = (const char *)part->out + (row * part->row_stride + column) * size;
        vec weight = vec_all(((const real *)t->weights)[p * TA_VL + row]);
        TA_UNROLL
        for (int j = 0; j < vectors; j++)
            acc[j] += weight * load_vector(storage, from + j * TA_VL * size);
    }
    char *to = (char *)t->out + (row * t->columns + column) * size;
    TA_UNROLL
    for (int j = 0; j < vectors; j++)
        store_vector(storage, to + j * TA_VL * size, acc[j]);
}

#define merge_body TA_NAME(merge_body)
TA_INLINE void merge_body(const int storage, const ta_merge_tile *t)
{
    const ptrdiff_t size = stored_size(storage);
    int contiguous = 1;
    for (ptrdiff_t p = 0; p < t->part_count; p++)
        contiguous &= t->parts[p].column_stride == 1;
    weigh_parts(t);
    for (int row = 0; row < t->rows; row++) {
        ptrdiff_t column = 0;
        if (contiguous) {
            for (; column + TA_MERGE_VECTORS * TA_VL <= t->columns; column += TA_MERGE_VECTORS * TA_VL)
                merge_columns(storage, TA_MERGE_VECTORS, t, row, column);
            for (; column + TA_VL <= t->columns; column += TA_VL)
                merge_columns(storage, 1, t, row, column);
        }
        for (; column < t->columns; column++) {
            real acc = 0;
            for (ptrdiff_t p = 0; p < t->part_count; p++) {
                const ta_state *part = t->parts + p;
                if (has_seen(part, row))
                    acc += ((const real *)t->weights)[p * TA_VL + row] *
                           load_one(storage,
                                    (const char *)part->out +
                                        (row * part->row_stride + column * part->column_stride) * size);
            }
            store_one(storage, (char *)t->out + (row * t->columns + column) * size, acc);
        }
    }
}

#define TA_INSTANCE(STORAGE, NAME)                    \
    static void TA_NAME(NAME)(const ta_merge_tile *t) \
    {                                                 \
        merge_body(STORAGE, t);                       \
    }
TA_EACH_STORAGE(TA_INSTANCE, merge_states)
#undef TA_INSTANCE
