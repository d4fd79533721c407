/* What a call may ask for beside q . k: a soft cap, a bias, ALiBi and a mask; scores count in log2 units.
 *
 *   load_key_options   what a bias and a mask that are the same for all rows do to a block of keys
 *   trim_tile          narrows a tile to the keys that its rows' masks and biases let it see
 *   start_panel        what the products q . k of a panel are added to
 *   cap_panel          a cap on these products
 *   add_strays         values that are not finite, to just the rows that see them
 *
 * A bias and a mask are read by their strides, once for a tile, or once for a block of keys if all rows
 * share them. What they hide gets the score -inf by selection: its own score may be NaN.
 */
#define TA_LOWEST (TA_BITS == 32 ? (real) - FLT_MAX : (real) - DBL_MAX)

#define load_bias_row TA_NAME(load_bias_row)
static void (*const load_bias_row[TA_STORAGES])(void *, const void *, ptrdiff_t, ptrdiff_t) = {
#define TA_ENTRY(STORAGE, NAME) [STORAGE] = TA_NAME(NAME),
    TA_EACH_SOURCE(TA_ENTRY, load_row)
#undef TA_ENTRY
};

/* Bytes of an element of the bias. */
#define bias_size TA_NAME(bias_size)
TA_INLINE ptrdiff_t bias_size(const ta_score_options *o)
{
    static const unsigned char sizes[TA_STORAGES] = {
        [TA_REAL] = sizeof(real), [TA_BF16] = 2, [TA_F16] = 2, [TA_OTHER_REAL] = sizeof(other_real)};
    return sizes[o->bias_storage];
}

#if TA_BITS == 32
#define bound_double TA_NAME(bound_double)
TA_INLINE float bound_double(double number)
{
    if (number == INFINITY || number == -INFINITY)
        return (float)number;
    return number < 0 ? -FLT_MAX : FLT_MAX;
}
#endif

/* A row's bias from a position on, where it lies or in `copy`; -inf behind the `count` that there are. */
#define bias_at TA_NAME(bias_at)
TA_INLINE const real *bias_at(const ta_score_options *o, const ta_score_row *row, ptrdiff_t position,
                              ptrdiff_t count, real copy[TA_KEYS])
{
    const char *from = (const char *)row->bias + position * o->bias_stride * bias_size(o);
    if (count >= TA_KEYS && o->bias_stride == 1 && o->bias_storage == TA_REAL)
        return (const real *)from;
    count = count < TA_KEYS ? count : TA_KEYS;
    if (o->bias_stride == 0) {
        load_bias_row[o->bias_storage](copy, from, 1, 0);
        for (ptrdiff_t j = 1; j < count; j++)
            copy[j] = copy[0];
    } else {
        load_bias_row[o->bias_storage](copy, from, count, o->bias_stride);
    }
#if TA_BITS == 32
    if (o->bias_storage == TA_OTHER_REAL)
        for (ptrdiff_t j = 0; j < count; j++)
            if (copy[j] == INFINITY || copy[j] == -INFINITY) /* or a finite number beyond float */
                copy[j] = bound_double(((const double *)from)[j * o->bias_stride]);
#endif
    for (ptrdiff_t j = count; j < TA_KEYS; j++)
        copy[j] = -INFINITY;
    return copy;
}

/* The same of a mask, and zeros behind. */
#define mask_at TA_NAME(mask_at)
TA_INLINE const unsigned char *mask_at(const ta_score_options *o, const ta_score_row *row,
                                       ptrdiff_t position, ptrdiff_t count, unsigned char copy[TA_KEYS])
{
    const unsigned char *from = (const unsigned char *)row->mask + position * o->mask_stride;
    if (count >= TA_KEYS && o->mask_stride == 1)
        return from;
    for (ptrdiff_t j = 0; j < TA_KEYS; j++)
        copy[j] = j < count ? from[j * o->mask_stride] : 0;
    return copy;
}

/* Finite biases stay finite in log2 units, so that a row of the lowest number is one of equals: -inf alone
 * hides. */
#define TA_LOWEST_BIAS (TA_LOWEST * (real)0.6931471)
#define TA_LOWEST_SCORE (TA_LOWEST_BIAS * (real)TA_LOG2_E)
#define bound_bias TA_NAME(bound_bias)
TA_INLINE vec bound_bias(vec bias)
{
    const vec lowest = vec_all(TA_LOWEST_BIAS);
    vec bound = -vec_max(lowest, -vec_max(lowest, bias));
    return vec_select((veci)(vec_size(bias) == vec_all(INFINITY)), bias, bound);
}

#define cap_scores TA_NAME(cap_scores)
TA_INLINE vec cap_scores(vec score, vec cap)
{
    /* Far below the cap tanh changes nothing, and a quotient might be subnormal. */
    veci below = (veci)(vec_size(score) < cap * vec_all((real)(TA_BITS == 32 ? 0x1p-14 : 0x1p-28)));
    return vec_select(below, score, cap * vec_tanh(score / cap));
}

/* Asks for a panel of the next tile's rows. Asking for the tile's own, two panels ahead, left the first and
 * the last panel, which trim_tile reads, waiting for memory: 3% of a call. */
#define ask_panel TA_NAME(ask_panel)
TA_INLINE void ask_panel(const ta_score_options *o, const ta_score_row *row, ptrdiff_t position)
{
    if (row->bias != NULL) {
        const char *bias = (const char *)row->bias + position * o->bias_stride * bias_size(o);
        for (ptrdiff_t at = 0; at < TA_KEYS * bias_size(o); at += TA_CACHE_LINE)
            __builtin_prefetch(bias + at, 0, 2);
    }
    if (row->mask != NULL)
        __builtin_prefetch((const char *)row->mask + position * o->mask_stride, 0, 2);
}

/* What a panel's products are added to, into the panel's weights: what the row starts from and all but the
 * cap, and -inf for keys that a row does not see. Returns whether there are such. */
#define start_panel TA_NAME(start_panel)
TA_NOINLINE int start_panel(const ta_attention_tile *t, ptrdiff_t panel, const real *of_row)
{
    const ta_score_options *o = t->options;
    const ptrdiff_t position = t->key_start + panel, count = t->key_end - panel;
    vec deepest = vec_all(0);
    for (int i = 0; i < t->rows; i++) {
        const ta_score_row *row = t->score_rows + i;
        ask_panel(o, row + t->rows, position);
        real *to = (real *)t->weights + i * TA_WEIGHT_STRIDE + panel;
        vec start[TA_ATTENTION_NV];
        TA_UNROLL
        for (int j = 0; j < TA_ATTENTION_NV; j++)
            start[j] = vec_all(of_row[i]);
        if (row->bias != NULL) {
            real copy[TA_KEYS];
            const real *bias = bias_at(o, row, position, count, copy);
            TA_UNROLL
            for (int j = 0; j < TA_ATTENTION_NV; j++)
                start[j] += bound_bias(vec_load(bias + j * TA_VL)) * vec_all((real)TA_LOG2_E);
        }
        if (o->key_bias != NULL) {
            TA_UNROLL
            for (int j = 0; j < TA_ATTENTION_NV; j++)
                start[j] +=
                    vec_load((const real *)o->key_bias + panel + j * TA_VL) * vec_all((real)TA_LOG2_E);
        }
        if (row->slope != 0) {
            /* Positions need not fit into a lane's integer. */
            vec distance = vec_all((real)(position - row->position)) + vec_iota_real();
            TA_UNROLL
            for (int j = 0; j < TA_ATTENTION_NV; j++)
                start[j] -= vec_all((real)row->slope) * vec_size(distance + vec_all((real)(j * TA_VL)));
        }
        if (row->mask != NULL) {
            unsigned char copy[TA_KEYS];
            const unsigned char *mask = mask_at(o, row, position, count, copy);
            TA_UNROLL
            for (int j = 0; j < TA_ATTENTION_NV; j++)
                start[j] = vec_select(vec_any_bit(mask + j * TA_VL), start[j], vec_all(-INFINITY));
        }
        if (o->key_bias != NULL) {
            TA_UNROLL
            for (int j = 0; j < TA_ATTENTION_NV; j++) {
                vec of_key = vec_load((const real *)o->key_bias + panel + j * TA_VL);
                start[j] = vec_select((veci)(of_key == vec_all(-INFINITY)), of_key, start[j]);
            }
        }
        TA_UNROLL
        for (int j = 0; j < TA_ATTENTION_NV; j++) {
            deepest = vec_max(-start[j], deepest);
            vec_store(to + j * TA_VL, start[j]);
        }
    }
    return vec_any_greater(deepest, vec_all(-TA_LOWEST));
}

/* Caps a panel's products and adds them to what start_panel has left in its weights. */
#define cap_panel TA_NAME(cap_panel)
TA_NOINLINE void cap_panel(const ta_attention_tile *t, ptrdiff_t panel,
                           const real products[TA_ACC_ROWS][TA_KEYS])
{
    for (int i = 0; i < t->rows; i++) {
        real *scores = (real *)t->weights + i * TA_WEIGHT_STRIDE + panel;
        for (int j = 0; j < TA_KEYS; j += TA_VL) {
            vec start = vec_load(scores + j);
            vec score = start + cap_scores(vec_load(products[i] + j), vec_all((real)t->options->softcap));
            vec_store(scores + j, vec_select((veci)(start == vec_all(-INFINITY)), start, score));
        }
    }
}

/* Which of TA_KEYS keys from a position on a row's own bias and mask let it see. */
#define row_sees TA_NAME(row_sees)
TA_INLINE void row_sees(const ta_score_options *o, const ta_score_row *row, ptrdiff_t position,
                        ptrdiff_t count, veci sees[TA_ATTENTION_NV])
{
    real bias_copy[TA_KEYS];
    unsigned char mask_copy[TA_KEYS];
    const real *bias = row->bias == NULL ? NULL : bias_at(o, row, position, count, bias_copy);
    const unsigned char *mask = row->mask == NULL ? NULL : mask_at(o, row, position, count, mask_copy);
    for (int j = 0; j < TA_ATTENTION_NV; j++) {
        sees[j] = ~(veci){0};
        if (bias != NULL)
            sees[j] &= ~(veci)(vec_load(bias + j * TA_VL) == vec_all(-INFINITY));
        if (mask != NULL)
            sees[j] &= vec_any_bit(mask + j * TA_VL);
    }
}

#define sees_any TA_NAME(sees_any)
TA_NOINLINE int sees_any(const ta_attention_tile *t, int row, ptrdiff_t key)
{
    veci sees[TA_ATTENTION_NV], any = {0};
    row_sees(t->options, t->score_rows + row, t->key_start + key, t->key_end - key, sees);
    for (int j = 0; j < TA_ATTENTION_NV; j++)
        any |= sees[j];
    return vec_any_greater(vec_select(any, vec_all(1), vec_all(0)), vec_all(0));
}

/* By whole panels, from both ends: hidden stretches at the ends cost nothing but this look. */
static void TA_NAME(trim_tile)(ta_attention_tile *t)
{
    ptrdiff_t begin = t->key_begin / TA_KEYS * TA_KEYS, end = t->key_end;
    ptrdiff_t first = end, last = begin; /* panels that some row sees: [first, last] */
    for (int i = 0; i < t->rows; i++) {
        ptrdiff_t panel = begin;
        while (panel < first && !sees_any(t, i, panel))
            panel += TA_KEYS;
        first = panel < first ? panel : first;
        panel = (end - 1) / TA_KEYS * TA_KEYS;
        while (panel > last && !sees_any(t, i, panel))
            panel -= TA_KEYS;
        last = panel;
    }
    t->key_begin = first > t->key_begin ? first : t->key_begin;
    t->key_end = last + TA_KEYS < end ? last + TA_KEYS : end;
}

static int TA_NAME(load_key_options)(void *dst, const ta_score_options *o, const ta_score_row *row,
                                     ptrdiff_t key_start, ptrdiff_t *key_begin, ptrdiff_t *key_end)
{
    real *key_bias = dst;
    const ptrdiff_t begin = *key_begin, end = *key_end;
    for (ptrdiff_t panel = begin / TA_KEYS * TA_KEYS; panel < end; panel += TA_KEYS) {
        real bias_copy[TA_KEYS];
        unsigned char mask_copy[TA_KEYS];
        ptrdiff_t position = key_start + panel, count = end - panel;
        const real *bias = row->bias == NULL ? NULL : bias_at(o, row, position, count, bias_copy);
        const unsigned char *mask = row->mask == NULL ? NULL : mask_at(o, row, position, count, mask_copy);
        for (int j = 0; j < TA_ATTENTION_NV; j++) {
            vec add = bias == NULL ? vec_all(0) : bound_bias(vec_load(bias + j * TA_VL));
            if (mask != NULL)
                add = vec_select(vec_any_bit(mask + j * TA_VL), add, vec_all(-INFINITY));
            vec_store(key_bias + panel + j * TA_VL, add);
        }
    }
    ptrdiff_t first = begin, last = end;
    while (first < end && key_bias[first] == -INFINITY)
        first++;
    while (last > first && key_bias[last - 1] == -INFINITY)
        last--;
    *key_begin = first;
    *key_end = last;
    for (ptrdiff_t key = first; key < last; key++)
        if (key_bias[key] != 0)
            return 1;
    return 0;
}

#define is_finite TA_NAME(is_finite)
TA_INLINE int is_finite(real value)
{
    return value * 0 == 0;
}

/* Whether a row sees a key of the tile's. */
#define sees_key TA_NAME(sees_key)
static int sees_key(const ta_attention_tile *t, int row, ptrdiff_t key)
{
    const ta_score_options *o = t->options;
    ptrdiff_t position = t->key_start + key;
    if (position < t->first[row] || t->last[row] <= position)
        return 0;
    if (o != NULL && o->key_bias != NULL && ((const real *)o->key_bias)[key] == -INFINITY)
        return 0;
    if (o == NULL || t->score_rows == NULL)
        return 1;
    const ta_score_row *own = t->score_rows + row;
    if (own->mask != NULL && ((const unsigned char *)own->mask)[position * o->mask_stride] == 0)
        return 0;
    if (own->bias == NULL)
        return 1;
    real copy[TA_KEYS];
    return bias_at(o, own, position, 1, copy)[0] != -INFINITY;
}

static void TA_NAME(copy_finite)(void *dst_, const void *src_, ptrdiff_t rows, ptrdiff_t columns,
                                 ptrdiff_t row_stride)
{
    real *dst = dst_;
    const real *src = src_;
    for (ptrdiff_t i = 0; i < rows; i++)
        for (ptrdiff_t j = 0; j < columns; j += TA_VL) {
            vec value = vec_load(src + i * row_stride + j);
            veci finite = (veci)(value * vec_all(0) == vec_all(0));
            vec_store(dst + i * columns + j, vec_select(finite, value, vec_all(0)));
        }
}

static void TA_NAME(add_strays)(const ta_attention_tile *t, const void *v, ptrdiff_t v_stride)
{
    for (ptrdiff_t key = t->key_begin; key < t->key_end; key++) {
        const real *value = (const real *)v + key * v_stride;
        int stray = 0;
        for (ptrdiff_t j = 0; j < t->v_columns; j += TA_VL) {
            vec zeros = vec_load(value + j) * vec_all(0);
            stray |= vec_any_greater(vec_select((veci)(zeros == zeros), zeros, vec_all(1)), vec_all(0));
        }
        for (int i = 0; stray && i < t->rows; i++) {
            if (!sees_key(t, i, key))
                continue;
            real weight = ((const real *)t->weights)[i * TA_WEIGHT_STRIDE + key];
            real *out = (real *)t->out + i * t->out_stride;
            for (ptrdiff_t j = 0; j < t->v_columns; j++)
                if (!is_finite(value[j]))
                    out[j] += weight * value[j];
        }
    }
}
