# softmax(Q K^T) V: the work on a tile of query rows, key block by key block.

cdef void see_keys(const Attention *a, Py_ssize_t b, Py_ssize_t row, Py_ssize_t rows,
                   Py_ssize_t *first, Py_ssize_t *last) noexcept nogil:
    """The keys that stacked rows [row, row + rows) see: first[i] <= position < last[i]."""
    cdef Py_ssize_t i = 0, t = row // a.group, next_t = a.group - row % a.group, begin, end, position
    cdef Py_ssize_t length = a.k.shape[1] if a.key_lengths == NULL else a.key_lengths[b]
    cdef Py_ssize_t offset = 0 if a.query_offset == NULL else a.query_offset[b]
    cdef Py_ssize_t queries = PY_SSIZE_T_MAX if a.query_lengths == NULL else a.query_lengths[b]
    while i < rows:
        position = position_of(a, t) + offset
        begin = 0
        end = length
        if a.causal:
            end = min(end, position + 1)
        if a.left >= 0:
            begin = max(begin, position - a.left)
        if a.right >= 0:
            end = min(end, position + a.right + 1)
        if position_of(a, t) >= queries:
            end = 0
        while i < min(next_t, rows):
            first[i] = begin
            last[i] = max(end, <Py_ssize_t>0)
            i = i + 1
        t = t + 1
        next_t = next_t + a.group


cdef Seen seen_by(const AttentionScratch *s, Py_ssize_t begin, Py_ssize_t end) noexcept nogil:
    """What rows [begin, end) of a tile see, together and all of them."""
    cdef Seen seen = Seen(PY_SSIZE_T_MAX, 0, 0, PY_SSIZE_T_MAX)
    cdef Py_ssize_t i
    for i in range(begin, end):
        if s.first[i] < s.last[i]:
            seen.begin = min(seen.begin, s.first[i])
            seen.end = max(seen.end, s.last[i])
        seen.all_begin = max(seen.all_begin, s.first[i])
        seen.all_end = min(seen.all_end, s.last[i])
    return seen


cdef void pack_q(const Attention *a, Py_ssize_t b, Py_ssize_t head, Py_ssize_t row, Py_ssize_t rows,
                 char *packed) noexcept nogil:
    """Stacked rows [row, row + rows) of a K/V head, padded with zeros; times scale but for dot products."""
    cdef Py_ssize_t itemsize = a.kernels.itemsize, size = size_of(a.kernels, &a.q), H = a.q.shape[3]
    cdef Py_ssize_t stride = q_stride(a)
    cdef Py_ssize_t t = row // a.group, g = row % a.group, end = row + rows, count
    cdef const char *q
    while row < end:                        # runs of rows that are evenly apart
        count = end - row if a.group == 1 else min(a.group - g, end - row)
        q = at3(&a.q, b, t, head * a.group + g, size)
        if a.dots != NULL:
            count = 1
            a.kernels.pack_halves(<uint16_t *>packed, <const uint16_t *>q, H, 2 * (stride - SKEW),
                                  a.q.stride[3])
        else:
            a.kernels.pack_columns[a.q.storage](
                packed, q, count, H, stride, a.q.stride[1 if a.group == 1 else 2], a.q.stride[3],
                a.scale * LOG2_E)
        packed = packed + count * stride * itemsize
        row = row + count
        g = g + count
        if g == a.group:
            t = t + 1
            g = 0


cdef void pack_k(const Attention *a, Py_ssize_t b, Py_ssize_t head, Py_ssize_t key_start,
                 Py_ssize_t begin, Py_ssize_t end, char *packed) noexcept nogil:
    """Packs the panels that hold keys [begin, end) of a block; a last panel repeats its last key."""
    cdef const void *pointers[TA_MAX_PANEL]
    cdef float scales[TA_MAX_PANEL]
    cdef Py_ssize_t itemsize = a.kernels.itemsize, size = size_of(a.kernels, &a.k)
    cdef Py_ssize_t H = a.k.shape[3], nr = a.kernels.attention_nr, slot = key_start % a.ring, panel, i
    for panel in range(begin // nr, ceil_div(end, nr)):
        for i in range(nr):
            pointers[i] = at3(&a.k, b, slot + min(panel * nr + i, end - 1), head, size)
        a.kernels.pack_rows[a.k.storage](packed + panel * nr * H * itemsize, pointers, <int>nr, H,
                                         a.k.stride[3])
        if a.k.storage == TA_INT8:
            for i in range(nr):
                scales[i] = scales_of(&a.k, b, slot + min(panel * nr + i, end - 1), head)[0]
            a.kernels.scale_columns(packed + panel * nr * H * itemsize, scales, H, nr)


cdef void pad_rows(const Attention *a, const Array *x, Py_ssize_t b, Py_ssize_t head,
                   Py_ssize_t key_start, Py_ssize_t begin, Py_ssize_t end, char *padded) noexcept nogil:
    """Keys or values [begin, end) of a block, each padded to whole vectors."""
    cdef Py_ssize_t width = width_of(a, x), itemsize = a.kernels.itemsize, key
    cdef Py_ssize_t slot = key_start % a.ring
    if x.storage == TA_INT8:
        for key in range(begin, end):
            a.kernels.pack_columns[TA_INT8](
                padded + key * width * itemsize, at3(x, b, slot + key, head, 1), 1, x.shape[3], width,
                x.stride[1], x.stride[3], scales_of(x, b, slot + key, head)[0])
        return
    a.kernels.pack_columns[x.storage](
        padded + begin * width * itemsize, at3(x, b, slot + begin, head, size_of(a.kernels, x)),
        end - begin, x.shape[3], width, x.stride[1], x.stride[3], 1.0)


cdef inline const char *per_row(const Array *x, Py_ssize_t b, Py_ssize_t n, Py_ssize_t t,
                                Py_ssize_t itemsize) noexcept nogil:
    """A mask's or a bias's row of a head and a query; NULL if there is none."""
    return at3(x, b, n, t, itemsize) if x.data != NULL else NULL


cdef inline double number_at(const Attention *a, const char *vector, Py_ssize_t i) noexcept nogil:
    return (<const float *>vector)[i] if a.kernels.itemsize == 4 else (<const double *>vector)[i]


cdef inline void set_number(const Attention *a, char *vector, Py_ssize_t i, double value) noexcept nogil:
    if a.kernels.itemsize == 4:
        (<float *>vector)[i] = <float>value
    else:
        (<double *>vector)[i] = value


cdef void read_score_rows(const Attention *a, Py_ssize_t b, Py_ssize_t head, Py_ssize_t row,
                          Py_ssize_t rows, ta_score_row *to) noexcept nogil:
    """The options of stacked rows [row, row + rows) of a K/V head."""
    cdef Py_ssize_t i, n, t, offset = 0 if a.query_offset == NULL else a.query_offset[b]
    for i in range(rows):
        n = head * a.group + (row + i) % a.group
        t = position_of(a, (row + i) // a.group)
        to[i].mask = NULL if a.mask_of_keys else per_row(&a.mask, b, n, t, 1)
        to[i].bias = NULL if a.bias_of_keys else per_row(&a.bias, b, n, t, size_of(a.kernels, &a.bias))
        to[i].slope = 0
        if a.slopes != NULL:
            to[i].slope = number_at(a, a.slopes, b * a.q.shape[2] + n) * LOG2_E
        to[i].position = t + offset


cdef void take_weights(const Attention *a, const AttentionScratch *s, const ta_attention_tile *t,
                       Py_ssize_t b, Py_ssize_t head, Py_ssize_t row) noexcept nogil:
    """What becomes of the weights of a register tile, whose rows start at `row` of the item's."""
    cdef const ta_kernels *kernels = a.kernels
    cdef Py_ssize_t itemsize = kernels.itemsize, G = a.group, nr = kernels.attention_nr
    cdef Py_ssize_t begin = t.key_begin // nr * nr, end = round_up(t.key_end, nr), i, g, of_all
    cdef const char *weights
    if a.sum_over == OVER_QUERIES:
        for g in range(min(G, <Py_ssize_t>t.rows)):
            of_all = s.first_row + row + g
            kernels.add_rows(
                s.weights_sum + (of_all % G * TA_KEY_BLOCK + begin) * itemsize,
                <const char *>t.weights + (g * TA_WEIGHT_STRIDE + begin) * itemsize,
                ceil_div(t.rows - g, G), end - begin, G * TA_WEIGHT_STRIDE)
    elif a.sum_over == OVER_NOTHING:
        for i in range(t.rows):
            of_all = s.first_row + row + i
            weights = <const char *>t.weights + (i * TA_WEIGHT_STRIDE + t.key_begin) * itemsize
            write_numbers(
                at3(&a.weights_out, b, head * G + of_all % G, of_all // G, itemsize)
                + (t.key_start + t.key_begin) * a.weights_out.stride[3] * itemsize,
                a.weights_out.stride[3], weights, t.key_end - t.key_begin, itemsize)


cdef void write_numbers(char *to, Py_ssize_t stride, const char *numbers, Py_ssize_t count,
                        Py_ssize_t itemsize) noexcept nogil:
    cdef Py_ssize_t i
    if stride == 1:
        memcpy(to, numbers, count * itemsize)
        return
    for i in range(count):
        memcpy(to + i * stride * itemsize, numbers + i * itemsize, itemsize)


cdef struct Values:
    # A block of values of one head, as they lie or padded in the scratch.
    const char *data
    Py_ssize_t stride
    int storage
    int finite             # whether all are; -1 if that has not been looked at


cdef void add_values(const Attention *a, const AttentionScratch *s, Py_ssize_t b, Py_ssize_t head,
                     Py_ssize_t key_begin, Py_ssize_t key_end, bint some_hidden, Values *v,
                     ta_attention_tile *t) noexcept nogil:
    """Adds the values of keys [key_begin, key_end) of a block to the rows of a tile, times its weights.

    Values that are not finite go by themselves where some rows see them and others don't, since 0 * NaN of
    an unseen value must not arise. Where the threads decide which rows share a tile they always do: an
    overflow of the others would come before or behind them.
    """
    cdef const ta_kernels *kernels = a.kernels
    cdef Py_ssize_t at, itemsize = kernels.itemsize
    cdef bint by_themselves = some_hidden or may_be_cut(a)
    if by_themselves and v.storage != TA_REAL:      # what follows needs them converted
        pad_rows(a, &a.v, b, head, t.key_start, key_begin, key_end, s.v)
        v.data = s.v
        v.stride = t.v_columns
        v.storage = TA_REAL
    if by_themselves and v.finite < 0:
        at = key_begin * v.stride * itemsize
        v.finite = kernels.all_finite(v.data + at, key_end - key_begin, t.v_columns, v.stride)
        if not v.finite:
            kernels.copy_finite(s.finite_v + key_begin * t.v_columns * itemsize, v.data + at,
                                key_end - key_begin, t.v_columns, v.stride)
    t.v_storage = v.storage
    if by_themselves and not v.finite:
        t.v = s.finite_v
        t.v_stride = t.v_columns
        kernels.value_tile(t)
        kernels.add_strays(t, v.data, v.stride)
    else:
        t.v = v.data
        t.v_stride = v.stride
        kernels.value_tile(t)


cdef void pack_words_of(const Attention *a, const AttentionScratch *s, Py_ssize_t b, Py_ssize_t head,
                        Py_ssize_t key_start, Py_ssize_t begin, Py_ssize_t end) noexcept nogil:
    """Packs keys and values [begin, end) of a block as words; the last panel repeats its last key."""
    cdef const void *pointers[TA_DOT_KEYS]
    cdef Py_ssize_t H = a.k.shape[3], slot = key_start % a.ring, panel, i
    cdef Py_ssize_t size = TA_DOT_KEYS * word_count(H) * sizeof(uint32_t)
    for panel in range(begin // TA_DOT_KEYS, ceil_div(end, TA_DOT_KEYS)):
        for i in range(TA_DOT_KEYS):
            pointers[i] = at3(&a.k, b, slot + min(panel * TA_DOT_KEYS + i, end - 1), head, sizeof(uint16_t))
        a.kernels.pack_key_words(<uint32_t *>(s.k + panel * size), pointers, H, a.k.stride[3])
    a.kernels.pack_value_words(
        <uint32_t *>s.value_words, <const uint16_t *>at3(&a.v, b, slot, head, sizeof(uint16_t)), begin, end,
        a.v.shape[3], width_of(a, &a.v), a.v.stride[1], a.v.stride[3])


cdef void attend_dots(const Attention *a, const AttentionScratch *s, Py_ssize_t b, Py_ssize_t head,
                      Py_ssize_t at, Py_ssize_t rows, Py_ssize_t key_begin, Py_ssize_t key_end,
                      bint own_hidden, const State *state, ta_attention_tile *t) noexcept nogil:
    """Adds what keys [key_begin, key_end) of a block give the rows of one head, in dot products.

    The head's rows are those from `at` on in the scratch. A tile of them is multiplied with keys at once,
    and then weighed in register tiles.
    """
    cdef const ta_kernels *kernels = a.kernels
    cdef Py_ssize_t stride = q_stride(a), words = stride - SKEW, width = t.v_columns, vl = kernels.vl
    cdef Py_ssize_t block = t.key_start, row = 0, row_end, begin, end, r, r_end, panel, first, last
    cdef bint packed = False, hidden
    cdef int dropped = -1                   # whether values that are not finite have been; -1 for unknown
    cdef Seen seen
    cdef ta_dot_tile d

    d.columns = TA_DOT_KEYS
    d.depth = words
    d.a_stride = stride
    d.a_step = TA_DOT_WORDS
    d.a_lot = TA_DOT_LOT * stride
    d.b_stride = TA_DOT_KEYS
    d.c_stride = TA_WEIGHT_STRIDE
    d.accumulate = False
    d.next = NULL
    d.next_bytes = 0
    while row < rows:                                           # tiles
        row_end = min(row + TA_DOT_ROWS, rows)
        r_end = ceil_div(row_end, TA_WEIGH_ROWS)
        begin = key_end
        end = key_begin
        hidden = own_hidden or t.options != NULL and t.options.key_bias != NULL
        for r in range(row // TA_WEIGH_ROWS, r_end):
            begin = min(begin, max(s.seen[r].begin - block, key_begin))
            end = max(end, min(s.seen[r].end - block, key_end))
            if s.seen[r].all_begin - block > key_begin or s.seen[r].all_end - block < key_end:
                hidden = True
        if begin >= end:
            row = row_end
            continue
        if not packed:
            packed = True
            pack_words_of(a, s, b, head, block, key_begin, key_end)
        if (hidden or may_be_cut(a)) and dropped < 0:           # as in add_values
            dropped = kernels.drop_strays(
                <uint32_t *>s.value_words + key_begin // TA_DOT_KEYS * TA_DOT_WORDS * width,
                (ceil_div(key_end, TA_DOT_KEYS) - key_begin // TA_DOT_KEYS) * TA_DOT_WORDS * width)
            if dropped:
                pad_rows(a, &a.v, b, head, block, key_begin, key_end, s.v)
        d.rows = <int>(row_end - row)
        d.a = s.q + (at + row) * stride * sizeof(uint32_t)
        for panel in range(begin // TA_DOT_KEYS, ceil_div(end, TA_DOT_KEYS)):
            d.b = s.k + panel * TA_DOT_KEYS * words * sizeof(uint32_t)
            d.c = s.products + panel * TA_DOT_KEYS * sizeof(float)
            a.dots.multiply(&d)
        for r in range(row // TA_WEIGH_ROWS, r_end):            # register tiles
            seen = s.seen[r]
            first = r * TA_WEIGH_ROWS
            last = min(first + TA_WEIGH_ROWS, row_end)
            t.rows = <int>(last - first)
            t.weights = s.weights
            t.key_begin = max(seen.begin - block, begin)
            t.key_end = min(seen.end - block, end)
            t.first = s.first + first
            t.last = s.last + first
            t.score_rows = s.score_rows + at + first if a.has_score_rows else NULL
            if own_hidden and t.key_begin < t.key_end:
                kernels.trim_tile(t)
            if t.key_begin < t.key_end:
                t.all_begin = max(seen.all_begin - block, t.key_begin)
                t.all_end = min(seen.all_end - block, t.key_end)
                t.q = s.products + (first - row) * TA_WEIGHT_STRIDE * sizeof(float)
                t.q_stride = TA_WEIGHT_STRIDE
                t.row_max = state.row_max + (at + first) * sizeof(float)
                t.row_sum = state.row_sum + (at + first) * vl * sizeof(float)
                t.out = state.out + (at + first) * t.out_stride * sizeof(float)
                kernels.weigh_dots(t, a.scale * LOG2_E)
                if dropped > 0:
                    kernels.add_strays(t, s.v, width)
            else:
                t.key_begin = t.key_end = 0
            kernels.round_weights(
                a.dots, <uint16_t *>s.rounded_weights + (first - row) * TA_ROUNDED_STRIDE, t, begin, end)
        t.rows = d.rows
        t.key_begin = begin
        t.key_end = end
        t.weights = s.rounded_weights
        t.v = s.value_words
        t.v_stride = width
        t.out = state.out + (at + row) * t.out_stride * sizeof(float)
        kernels.value_dots(t, a.dots)
        row = row_end


cdef void attend(const Attention *a, const AttentionScratch *s, Py_ssize_t b, Py_ssize_t head_begin,
                 Py_ssize_t head_end, Py_ssize_t rows, Py_ssize_t begin, Py_ssize_t end,
                 const State *state) noexcept nogil:
    """Adds what keys [begin, end) give the rows of a tile, for each of the heads."""
    cdef const ta_kernels *kernels = a.kernels
    cdef Py_ssize_t itemsize = kernels.itemsize, vl = kernels.vl
    cdef Py_ssize_t row_tiles = row_tiles_of(a, rows)
    cdef Py_ssize_t step = block_keys(a)
    cdef Py_ssize_t block, head, next_head, next_block, r, row, row_end, at, key_begin, key_end
    cdef Seen seen
    cdef bint of_keys = a.mask_of_keys or a.bias_of_keys
    cdef bint own_hidden = (a.mask.data != NULL and not a.mask_of_keys
                            or a.bias.data != NULL and not a.bias_of_keys)
    cdef bint packed, some_hidden
    cdef Py_ssize_t k_size = size_of(kernels, &a.k), v_size = size_of(kernels, &a.v)
    cdef const char *next_k
    cdef const char *next_v
    cdef Values v
    cdef ta_score_options options
    cdef ta_score_row all_rows
    cdef ta_attention_tile t

    t.head_dim = width_of(a, &a.k) if a.few else a.k.shape[3]
    t.v_columns = width_of(a, &a.v)
    t.q_stride = q_stride(a)
    t.k = s.k
    t.k_stride = a.k.stride[1] if a.k_in_place else t.head_dim
    t.k_storage = a.k.storage if a.k_in_place else TA_REAL
    t.weights = s.weights
    t.keeps_max = a.weights_out.data != NULL
    t.out_stride = t.v_columns + SKEW
    options.softcap = a.softcap * LOG2_E
    options.bias_storage = a.bias.storage
    options.bias_stride = a.bias.stride[3]
    options.mask_stride = a.mask.stride[3]
    options.key_bias = NULL
    all_rows.mask = per_row(&a.mask, b, 0, 0, 1) if a.mask_of_keys else NULL
    all_rows.bias = per_row(&a.bias, b, 0, 0, size_of(kernels, &a.bias)) if a.bias_of_keys else NULL
    block = begin // step * step
    while block < end:                                          # blocks of keys
        key_begin = max(begin - block, <Py_ssize_t>0)
        key_end = min(end - block, step)
        t.key_start = block
        if of_keys:
            options.key_bias = s.key_bias
            if not kernels.load_key_options(s.key_bias, &options, &all_rows, block, &key_begin, &key_end):
                options.key_bias = NULL
            if key_begin >= key_end:
                block = block + step
                continue
        t.options = &options if a.has_score_rows or options.key_bias != NULL else NULL
        for head in range(head_begin, head_end):                # K/V heads
            if a.dots != NULL:
                attend_dots(a, s, b, head, (head - head_begin) * rows, rows, key_begin, key_end, own_hidden,
                            state, &t)
                continue
            packed = False
            v = Values(s.v, t.v_columns, TA_REAL, -1)
            if a.v_in_place:
                v = Values(at3(&a.v, b, block % a.ring, head, v_size), a.v.stride[1], a.v.storage, -1)
            t.k_scales = scales_of(&a.k, b, block % a.ring, head)
            t.v_scales = scales_of(&a.v, b, block % a.ring, head)
            next_head = head + 1 if head + 1 < head_end else head_begin
            next_block = block if head + 1 < head_end else block + step
            next_k = at3(&a.k, b, next_block % a.ring, next_head, k_size)
            next_v = v.data
            if not a.v_in_place:                                # then these have been read by now
                next_v = at3(&a.v, b, next_block % a.ring, next_head, v_size)
            for r in range(row_tiles):                          # register tiles of query rows
                row = tile_row(a, r, rows)
                row_end = tile_row(a, r + 1, rows)
                seen = s.seen[r]
                t.key_begin = max(seen.begin - block, key_begin)
                t.key_end = min(seen.end - block, key_end)
                if t.key_begin >= t.key_end:
                    continue
                t.rows = <int>(row_end - row)
                t.first = s.first + row
                t.last = s.last + row
                at = (head - head_begin) * rows + row
                t.score_rows = s.score_rows + at if a.has_score_rows else NULL
                if own_hidden:
                    kernels.trim_tile(&t)
                    if t.key_begin >= t.key_end:
                        continue
                t.all_begin = max(seen.all_begin - block, t.key_begin)
                t.all_end = min(seen.all_end - block, t.key_end)
                some_hidden = (own_hidden or options.key_bias != NULL or t.key_begin < t.all_begin
                               or t.all_end < t.key_end)
                if not packed:
                    packed = True
                    if a.k_in_place:
                        t.k = at3(&a.k, b, block % a.ring, head, k_size)
                    elif a.few:
                        pad_rows(a, &a.k, b, head, block, key_begin, key_end, s.k)
                    else:
                        pack_k(a, b, head, block, key_begin, key_end, s.k)
                    # Many rows: values in place, off a cache line and at a stride of the caller's, cost
                    # a third.
                    if not a.v_in_place:
                        pad_rows(a, &a.v, b, head, block, key_begin, key_end, s.v)
                t.q = s.q + at * t.q_stride * itemsize
                t.row_max = state.row_max + at * itemsize
                t.row_sum = state.row_sum + at * vl * itemsize
                t.out = state.out + at * t.out_stride * itemsize
                t.next = NULL
                if a.few:
                    if r == 0:
                        t.next = next_v
                        t.next_stride = a.v.stride[1] * v_size
                        t.next_size = v_size
                    kernels.weigh_few(&t)
                    if r == 0:
                        t.next = next_k
                        t.next_stride = a.k.stride[1] * k_size
                        t.next_size = k_size
                else:
                    # Asking for the next block here, as above, made nothing faster and 128 keys slower.
                    kernels.weigh_tile(&t)
                if a.weights_out.data != NULL:
                    take_weights(a, s, &t, b, head, row)
                    continue
                add_values(a, s, b, head, key_begin, key_end, some_hidden, &v, &t)
        block = block + step


cdef void start_rows(const Attention *a, const State *state, Py_ssize_t rows) noexcept nogil:
    cdef Py_ssize_t i, itemsize = a.kernels.itemsize, width = width_of(a, &a.v)
    for i in range(rows):
        a.kernels.start_row(state.out + i * (width + SKEW) * itemsize, width, state.row_max + i * itemsize,
                            state.row_sum + i * a.kernels.vl * itemsize, MINUS_INFINITY)


cdef void add_sinks(const Attention *a, const State *state, Py_ssize_t b, Py_ssize_t head,
                    Py_ssize_t row, Py_ssize_t rows) noexcept nogil:
    """The sinks of stacked rows [row, row + rows) of a K/V head, which are the first of `state`."""
    cdef Py_ssize_t queries = a.q.shape[1] if a.query_lengths == NULL else a.query_lengths[b]
    cdef Py_ssize_t i, itemsize = a.kernels.itemsize, width = width_of(a, &a.v)
    cdef Py_ssize_t end = min(rows, queries * a.group - row)
    for i in range(end if a.sinks != NULL else 0):
        a.kernels.start_row(
            state.out + i * (width + SKEW) * itemsize, width, state.row_max + i * itemsize,
            state.row_sum + i * a.kernels.vl * itemsize,
            LOG2_E * number_at(a, a.sinks, head * a.group + (row + i) % a.group))


cdef void merge_rows(const Attention *a, const State *into, const State *other,
                     Py_ssize_t rows) noexcept nogil:
    cdef Py_ssize_t i, itemsize = a.kernels.itemsize, width = width_of(a, &a.v)
    cdef Py_ssize_t out_step = (width + SKEW) * itemsize, sum_step = a.kernels.vl * itemsize
    for i in range(rows):
        a.kernels.merge_row(
            into.out + i * out_step, into.row_max + i * itemsize, into.row_sum + i * sum_step,
            other.out + i * out_step, other.row_max + i * itemsize, other.row_sum + i * sum_step, width)


cdef void finish_rows(const Attention *a, const State *state, Py_ssize_t b, Py_ssize_t head,
                      Py_ssize_t row, Py_ssize_t rows) noexcept nogil:
    """Writes stacked rows [row, row + rows) of a K/V head, which are the first of `state`."""
    cdef Py_ssize_t i, itemsize = a.kernels.itemsize, size = size_of(a.kernels, &a.out)
    cdef Py_ssize_t t = row // a.group, g = row % a.group
    cdef Py_ssize_t out_stride = width_of(a, &a.v) + SKEW, n
    cdef void *lse = NULL
    for i in range(rows):
        n = head * a.group + g
        if a.lse.data != NULL:
            lse = at3(&a.lse, b, t, n, itemsize)
        a.kernels.finish_row[a.out.storage](
            at3(&a.out, b, t, n, size), a.out.stride[3], a.v.shape[3], lse,
            state.out + i * out_stride * itemsize, state.row_max + i * itemsize,
            state.row_sum + i * a.kernels.vl * itemsize)
        g = g + 1
        if g == a.group:
            g = 0
            t = t + 1


cdef void start_weights(const Attention *a, const AttentionScratch *s, Py_ssize_t b, Py_ssize_t head,
                        Py_ssize_t rows) noexcept nogil:
    """Has the scores of an item's rows start from minus their LSE. Rows without one see nothing."""
    cdef Py_ssize_t i, t, n, itemsize = a.kernels.itemsize
    cdef double lse, start, lowest = a.kernels.lowest_score
    for i in range(rows):
        t = (s.first_row + i) // a.group
        n = head * a.group + (s.first_row + i) % a.group
        lse = number_at(a, at3(&a.lse, b, t, n, itemsize), 0)
        if lse == MINUS_INFINITY:
            lse = 0
            s.first[i] = s.last[i] = 0
        # In the kernels' own arithmetic: a large bias has to meet itself as an LSE to the bit.
        start = <float>lse * <float>LOG2_E if itemsize == 4 else lse * LOG2_E
        if isfinite(lse):  # as bound_bias has it
            start = min(max(start, lowest), -lowest)
        set_number(a, s.first_chunk.row_max, i, start)
    memset(s.first_chunk.row_sum, 0, rows * a.kernels.vl * itemsize)


cdef void finish_weights(const Attention *a, const AttentionScratch *s, Py_ssize_t b, Py_ssize_t head,
                         Py_ssize_t rows) noexcept nogil:
    """Writes the sums of the weights of an item's rows over the keys."""
    cdef Py_ssize_t i, j, t, n, vl = a.kernels.vl
    cdef double total
    for i in range(rows):
        t = (s.first_row + i) // a.group
        n = head * a.group + (s.first_row + i) % a.group
        total = 0
        for j in range(vl):
            total = total + number_at(a, s.first_chunk.row_sum, i * vl + j)
        set_number(a, at3(&a.weights_out, b, n, t, a.kernels.itemsize), 0, total)


cdef Py_ssize_t weights_items(const Attention *a) noexcept nogil:
    return a.q.shape[0] * a.k.shape[2] * (
        ceil_div(a.k.shape[1], TA_KEY_BLOCK) if a.sum_over == OVER_QUERIES else a.tiles)


cdef void weights_item(const void *plan, Py_ssize_t item, Py_ssize_t _items, char *memory) noexcept nogil:
    """Weights of one K/V head: of a tile of rows, or, for sums over queries, of a block of keys."""
    cdef const Attention *a = <const Attention *>plan
    cdef Py_ssize_t all_rows = a.group * a.q.shape[1], K = a.k.shape[2], S = a.k.shape[1], G = a.group
    cdef Py_ssize_t parts = weights_items(a) // (a.q.shape[0] * K), part = item % parts
    cdef Py_ssize_t b = item // parts // K, head = item // parts % K, itemsize = a.kernels.itemsize
    cdef Py_ssize_t tile = part, tile_end = part + 1, key_begin = 0, key_end = S, rows, begin, end, g
    cdef AttentionScratch s

    attention_scratch(a, &s, memory)
    if a.sum_over == OVER_QUERIES:
        tile, tile_end = 0, a.tiles
        key_begin = part * TA_KEY_BLOCK
        key_end = min(S, key_begin + TA_KEY_BLOCK)
        memset(s.weights_sum, 0, G * TA_KEY_BLOCK * itemsize)
    while tile < tile_end:
        s.first_row = tile * all_rows // a.tiles
        rows = (tile + 1) * all_rows // a.tiles - s.first_row
        see_keys(a, b, s.first_row, rows, s.first, s.last)
        start_weights(a, &s, b, head, rows)
        read_tile(a, &s, b, head, head + 1, rows, &begin, &end)
        attend(a, &s, b, head, head + 1, rows, max(begin, key_begin), min(end, key_end), &s.first_chunk)
        if a.sum_over == OVER_KEYS:
            finish_weights(a, &s, b, head, rows)
        tile = tile + 1
    if a.sum_over == OVER_QUERIES:
        for g in range(G):
            write_numbers(at3(&a.weights_out, b, head * G + g, key_begin, itemsize),
                          a.weights_out.stride[2], s.weights_sum + g * TA_KEY_BLOCK * itemsize,
                          key_end - key_begin, itemsize)


cdef void read_tile(const Attention *a, AttentionScratch *s, Py_ssize_t b, Py_ssize_t head_begin,
                    Py_ssize_t head_end, Py_ssize_t rows, Py_ssize_t *begin,
                    Py_ssize_t *end) noexcept nogil:
    """Packs the rows of an item for its heads, and finds the keys [begin, end) that any of them sees."""
    cdef Py_ssize_t head, r
    cdef Py_ssize_t size = q_stride(a) * a.kernels.itemsize, heads = head_end - head_begin
    begin[0] = PY_SSIZE_T_MAX
    end[0] = 0
    for r in range(row_tiles_of(a, rows)):
        s.seen[r] = seen_by(s, tile_row(a, r, rows), tile_row(a, r + 1, rows))
        begin[0] = min(begin[0], s.seen[r].begin)
        end[0] = max(end[0], s.seen[r].end)
    for head in range(heads):
        pack_q(a, b, head_begin + head, s.first_row, rows, s.q + head * rows * size)
        if a.has_score_rows:
            read_score_rows(a, b, head_begin + head, s.first_row, rows, s.score_rows + head * rows)
    if a.has_score_rows:
        memset(s.score_rows + heads * rows, 0, TA_MAX_ROWS * sizeof(ta_score_row))


cdef void attention_item(const Attention *a, Py_ssize_t item, char *memory) noexcept nogil:
    """out[T, G, Hv] of some K/V heads from q[T, G, H], k[S, H] and v[S, Hv]: of a tile of the stacked T * G
    rows, and of all chunks of S or one.
    """
    cdef Py_ssize_t all_rows = a.group * a.q.shape[1], K = a.k.shape[2]
    cdef Py_ssize_t first_chunk = item % a.chunks if a.split else 0
    cdef Py_ssize_t left = item // a.chunks if a.split else item
    # Inside a (b, head) the later tiles come first: causal, they are the longest.
    cdef Py_ssize_t tile = a.tiles - 1 - left % a.tiles
    cdef Py_ssize_t part = left // a.tiles % a.head_parts, b = left // a.tiles // a.head_parts
    cdef Py_ssize_t head_begin = part * K // a.head_parts, head_end = (part + 1) * K // a.head_parts
    cdef Py_ssize_t row = tile * all_rows // a.tiles
    cdef Py_ssize_t rows = (tile + 1) * all_rows // a.tiles - row
    cdef Py_ssize_t heads = head_end - head_begin, head, chunk, begin, end, tile_begin, tile_end
    cdef bint apart
    cdef AttentionScratch s
    cdef State state, first

    attention_scratch(a, &s, memory)
    if a.dots != NULL:
        a.dots.begin()
    s.first_row = row
    see_keys(a, b, row, rows, s.first, s.last)
    read_tile(a, &s, b, head_begin, head_end, rows, &tile_begin, &tile_end)

    # Sinks count once: in the first chunk.
    state = part_state(a, b, first_chunk, head_begin) if a.split else s.first_chunk
    start_rows(a, &state, heads * rows)
    for head in range(heads if first_chunk == 0 else 0):
        first = skip_rows(a, &state, head * rows)
        add_sinks(a, &first, b, head_begin + head, row, rows)
    for chunk in range(first_chunk, first_chunk + 1 if a.split else a.chunks):
        begin = max(tile_begin, chunk_begin(chunk))
        end = tile_end if chunk + 1 == a.chunks else min(tile_end, chunk_begin(chunk + 1))
        if begin >= end:
            continue
        apart = chunk > first_chunk
        if apart:
            state = s.other_chunk
            start_rows(a, &state, heads * rows)
        attend(a, &s, b, head_begin, head_end, rows, begin, end, &state)
        if apart:
            merge_rows(a, &s.first_chunk, &state, heads * rows)
    if a.dots != NULL:
        a.dots.end()
    if a.split:
        return
    for head in range(heads):
        state = skip_rows(a, &s.first_chunk, head * rows)
        finish_rows(a, &state, b, head_begin + head, row, rows)


cdef void merge_item(const Attention *a, Py_ssize_t item) noexcept nogil:
    """Puts the chunks of one K/V head together, in their order."""
    cdef Py_ssize_t b = item // a.k.shape[2], head = item % a.k.shape[2], rows = item_rows(a), chunk
    cdef State into = part_state(a, b, 0, head), other
    for chunk in range(1, a.chunks):
        other = part_state(a, b, chunk, head)
        merge_rows(a, &into, &other, rows)
    finish_rows(a, &into, b, head, 0, rows)
