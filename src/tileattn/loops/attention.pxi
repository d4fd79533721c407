# The calls of attention: options, packed sequences, and what runs.

cdef enum:
    ITEMS = 0
    MERGES = 1


cdef struct Turn:
    # A plan and when it has its turn: those with the longest items come first, so that the last ones to
    # finish are short.
    Attention *plan
    double cost            # of one of its items
    Py_ssize_t[2] first    # its first item, and its first merge, among those of all turns


cdef int longer_first(const void *a, const void *b) noexcept nogil:
    cdef const Turn *x = <const Turn *>a
    cdef const Turn *y = <const Turn *>b
    if x.cost != y.cost:
        return -1 if x.cost > y.cost else 1
    return -1 if x.plan < y.plan else 1


cdef void plan_turns(Turn *turns, Py_ssize_t count, int threads, double flops) noexcept nogil:
    """Makes plans that together do so many operations, and their order; turns[count] is its end."""
    cdef Py_ssize_t i, alike
    cdef double own
    cdef Attention *plan
    for i in range(count):
        plan = turns[i].plan
        own = attention_flops(plan) / plan.q.shape[0]
        alike = <Py_ssize_t>(flops / own + 0.5) if flops < 1e9 * own else count
        plan_attention(plan, threads, alike)
        turns[i].cost = own / max(attention_items(plan), <Py_ssize_t>1)
    qsort(turns, count, sizeof(Turn), longer_first)
    turns[0].first[ITEMS] = turns[0].first[MERGES] = 0
    for i in range(count):
        turns[i + 1].first[ITEMS] = turns[i].first[ITEMS] + attention_items(turns[i].plan)
        turns[i + 1].first[MERGES] = turns[i].first[MERGES] + merge_items(turns[i].plan)


cdef const Turn *turn_of(const Turn *turns, Py_ssize_t count, int which, Py_ssize_t i) noexcept nogil:
    """Whose item, or merge, number i is."""
    cdef Py_ssize_t begin = 0, end = count, middle
    while end - begin > 1:
        middle = (begin + end) // 2
        if turns[middle].first[which] <= i:
            begin = middle
        else:
            end = middle
    return turns + begin


cdef void item_in_turn(const Turn *turns, Py_ssize_t count, Py_ssize_t item, char *memory) noexcept nogil:
    cdef const Turn *turn = turn_of(turns, count, ITEMS, item)
    cdef ta_floats before = ta_take_floats()
    attention_item(turn.plan, item - turn.first[ITEMS], memory)
    ta_give_floats(before)


cdef void merge_in_turn(const Turn *turns, Py_ssize_t count, Py_ssize_t item) noexcept nogil:
    cdef const Turn *turn = turn_of(turns, count, MERGES, item)
    cdef ta_floats before = ta_take_floats()
    merge_item(turn.plan, item - turn.first[MERGES])
    ta_give_floats(before)


cdef void narrow(const ta_kernels *kernels, Array *x, const int64_t *starts, Py_ssize_t b) noexcept nogil:
    """Leaves the positions of sequence b."""
    x.data = x.data + starts[b] * x.stride[1] * size_of(kernels, x)
    x.shape[1] = starts[b + 1] - starts[b]


cdef Attention sequence_of(const Attention *packed, const int64_t *query_starts,
                           const int64_t *key_starts, Py_ssize_t b) noexcept nogil:
    """Attention of sequence b by itself."""
    cdef Attention one = packed[0]
    cdef const ta_kernels *kernels = packed.kernels
    narrow(kernels, &one.q, query_starts, b)
    narrow(kernels, &one.k, key_starts, b)
    narrow(kernels, &one.v, key_starts, b)
    narrow(kernels, &one.out, query_starts, b)
    if one.lse.data != NULL:
        narrow(kernels, &one.lse, query_starts, b)
    if one.query_offset != NULL:
        one.query_offset = one.query_offset + b
    if one.slopes != NULL:
        one.slopes = one.slopes + b * one.q.shape[2] * kernels.itemsize
    return one


cdef class Visibility:
    """Which query sees which key; a bias of -inf hides keys as well."""

    cdef readonly bint is_causal
    cdef readonly object query_offset         # int64 [B], or None for 0
    cdef readonly object query_lengths        # int64 [B]
    cdef readonly object key_value_lengths    # int64 [B]
    cdef readonly tuple window                # neighbours to the left and right, -1 for all
    cdef readonly object mask                 # bool [B, N, T, S], broadcast by strides of 0

    def __init__(self, bint is_causal, query_offset, query_lengths, key_value_lengths, tuple window=None,
                 mask=None):
        self.is_causal = is_causal
        self.query_offset = query_offset
        self.query_lengths = query_lengths
        self.key_value_lengths = key_value_lengths
        self.window = window
        self.mask = mask

    def with_mask(self, mask):
        return Visibility(self.is_causal, self.query_offset, self.query_lengths, self.key_value_lengths,
                          self.window, mask)


cdef class Scores:
    """What a score is made of: scale q.k, capped, + bias + ALiBi, in this order; sinks beside."""

    cdef readonly double scale
    cdef readonly double softcap        # 0 for none
    cdef readonly object bias           # [B, N, T, S], broadcast by strides of 0, of any floating type
    cdef readonly object alibi_slopes   # [B, N], contiguous, of the arithmetic's type
    cdef readonly object sinks          # [N], contiguous, of the arithmetic's type

    def __init__(self, double scale, double softcap=0, bias=None, alibi_slopes=None, sinks=None):
        self.scale = scale
        self.softcap = softcap
        self.bias = bias
        self.alibi_slopes = alibi_slopes
        self.sinks = sinks

    def with_bias(self, bias):
        return Scores(self.scale, self.softcap, bias, self.alibi_slopes, self.sinks)


cdef int read_options(Attention *a, Scores scores, Visibility visibility) except -1:
    """Reads what `scores` and `visibility` say; whatever else not every call has is left out."""
    a.dots = NULL
    a.left = a.right = -1
    a.mask = a.bias = whole_array(NULL, 0, 0, 0, 0)
    a.ring = PY_SSIZE_T_MAX
    a.weights_out.data = NULL
    a.positions = NULL
    a.scale = scores.scale
    a.softcap = scores.softcap
    a.slopes = read_vector(scores.alibi_slopes)
    a.sinks = read_vector(scores.sinks)
    if scores.bias is not None:
        read_stored(a.kernels, scores.bias, &a.bias)
    a.causal = visibility.is_causal
    a.query_offset = read_integers(visibility.query_offset)
    a.query_lengths = read_integers(visibility.query_lengths)
    a.key_lengths = read_integers(visibility.key_value_lengths)
    if visibility.window is not None:
        a.left, a.right = visibility.window
    if visibility.mask is not None:
        read_array(visibility.mask, &a.mask)
    return 0


cdef bytearray unroll(Attention *a):
    """Reads keys as a ring. Returns the memory of what it now points to.

    Positions are counted from a slot 0 that no visible key lies before, since keys are cut into chunks
    that grow with the position.
    """
    cdef Py_ssize_t B = a.k.shape[0], b, start
    cdef bytearray memory = bytearray(2 * B * sizeof(int64_t))
    cdef int64_t *moved = <int64_t *><char *>memory
    a.ring = a.k.shape[1]
    for b in range(B):
        start = max(a.query_offset[b] - a.left, <Py_ssize_t>0) // a.ring * a.ring
        moved[b] = a.query_offset[b] - start
        moved[B + b] = a.key_lengths[b] - start
    a.query_offset = moved
    a.key_lengths = moved + B
    return memory


cdef Py_ssize_t longest(const Attention *a) noexcept:
    """The keys of the longest sequence."""
    cdef Py_ssize_t b, length = 0
    for b in range(a.k.shape[0]):
        length = max(length, a.key_lengths[b])
    return length


cdef dict describe(const Attention *a, int threads, Py_ssize_t items, Py_ssize_t merges, Py_ssize_t nbytes):
    """How attention is done, in the words of plan.Plan."""
    register_tile = (a.kernels.attention_mr, a.kernels.attention_nr)
    if a.dots != NULL:
        register_tile = (TA_DOT_ROWS, TA_DOT_KEYS)
    return {
        "path": "streaming" if a.few else "tiled",
        "isa": active_isa(),
        "arithmetic": ("bfloat16" if a.dots != NULL
                       else "float32" if a.kernels.itemsize == 4 else "float64"),
        "threads": threads,
        "items": items,
        "head_parts": a.head_parts,
        "tiles": a.tiles,
        "tile_rows": ceil_div(a.group * a.q.shape[1], a.tiles),
        "key_block": block_keys(a),
        "register_tile": None if a.few else register_tile,
        "chunks": a.chunks,
        "splits": a.chunks if a.split else 1,
        "merges": merges,
        "workspace_bytes": nbytes,
    }


cdef bint is_of(const Array *x, Py_ssize_t B, Py_ssize_t T, Py_ssize_t N, Py_ssize_t H) noexcept:
    return (x.axes == 4 and x.shape[0] == B and x.shape[1] == T and x.shape[2] == N and x.shape[3] == H)


cdef int require_sizes(const Attention *a, tuple sizes, bint has_out) except -1:
    """Refuses arrays whose shapes another argument's own code has changed since they were checked."""
    cdef Py_ssize_t B, T, N, H, S, K, Hv
    B, T, N, H, S, K, Hv = sizes
    if not (is_of(&a.q, B, T, N, H) and is_of(&a.k, B, S, K, H) and is_of(&a.v, B, S, K, Hv)
            and N % max(K, <Py_ssize_t>1) == 0 and (not has_out or is_of(&a.out, B, T, N, Hv))):
        raise ValueError("q, k or v has changed its shape while other arguments were read")
    return 0


def attention(q, k, v, out, lse, Scores scores not None, Visibility visibility not None, int threads,
              query_starts=None, key_starts=None, tuple sizes=None, bint ring=False, bint report=False,
              bint float32=False, k_scales=None, v_scales=None):
    """softmax(scores) v into `out`, the log of its denominator into `lse` (or None).

    q[B, T, N, H], k[B, S, K, H], v[B, S, K, Hv], out[B, T, N, Hv], lse[B, T, N]; checked by the caller,
    as are `scores` and `visibility`. With starts[sequences + 1] the arrays' B is 1, and
    sequences lie one after the other along T and S. In a ring position j of key_value_lengths lies at j
    modulo S, which is a multiple of TA_KEY_BLOCK. Keys and values of int8 come with scales (see read_kept).

    If q, k and v are all bfloat16, they are multiplied in dot products where the CPU has them, unless
    float32 is asked for. The sizes B, T, N, H, S, K and Hv, where given, must be those of the arrays still.

    A report, of dense arrays only, says how it was done, in the words of plan.Plan: threads, items and
    merges as they were counted. Without `out` nothing is done, and the report foretells it.
    """
    cdef Attention a
    cdef AttentionScratch layout
    cdef Scratch scratch
    cdef char *workspace
    cdef Turn[2] alone
    cdef Turn *turns = alone
    cdef Attention *plans = &a
    cdef const int64_t *q_starts = read_integers(query_starts)
    cdef const int64_t *k_starts = read_integers(key_starts)
    cdef bytearray memory, _unrolled
    cdef double flops = 0
    cdef Py_ssize_t i, items, merges, each = 0, parts = 0, count = 1, size
    cdef Py_ssize_t items_done = 0, merges_done = 0
    cdef int[1] team
    a.kernels = kernels_for(8 if q.itemsize == 8 else 4)
    read_stored(a.kernels, q, &a.q)
    read_kept(a.kernels, k, k_scales, &a.k)
    read_kept(a.kernels, v, v_scales, &a.v)
    if out is not None:
        read_stored(a.kernels, out, &a.out, True)
    a.lse.data = NULL
    if lse is not None:
        read_array(lse, &a.lse, True)
    if sizes is not None:
        require_sizes(&a, sizes, out is not None)
    read_options(&a, scores, visibility)
    if not float32 and a.q.storage == TA_BF16 and a.k.storage == TA_BF16 and a.v.storage == TA_BF16:
        a.dots = usable_dots()
    if ring:
        _unrolled = unroll(&a)
        a.k.shape[1] = a.v.shape[1] = longest(&a)
    a.group = a.q.shape[2] // max(a.k.shape[2], <Py_ssize_t>1)
    if q_starts != NULL:
        count = len(query_starts) - 1
        memory = bytearray(count * (sizeof(Attention) + sizeof(Turn)) + sizeof(Turn))
        plans = <Attention *><char *>memory
        turns = <Turn *>(plans + count)
        count = 0
        for i in range(len(query_starts) - 1):
            if q_starts[i] < q_starts[i + 1]:
                plans[count] = sequence_of(&a, q_starts, k_starts, i)
                count += 1
    for i in range(count):
        turns[i].plan = plans + i
        flops += attention_flops(plans + i)
    threads = team_size(threads, flops)
    plan_turns(turns, count, threads, flops)
    items = turns[count].first[ITEMS]
    merges = turns[count].first[MERGES]
    for i in range(count if items > 0 else 0):
        require_attention(plans + i)
        parts += parts_size(plans + i)
        each = max(each, attention_scratch(plans + i, &layout, NULL))
    threads = <int>min(<Py_ssize_t>threads, items)
    size = parts + each * threads
    if out is None or items == 0:
        return describe(&a, threads, items, merges, size) if report else None
    scratch = take_scratch(size)
    workspace = scratch.data
    for i in range(count):
        plans[i].parts = workspace
        workspace += parts_size(plans + i)
    if threads == 1:  # without a region: making a team, even of one, takes as long as all else here
        team[0] = 1
        with nogil:
            for i in range(items):
                item_in_turn(turns, count, i, workspace)
                items_done += 1
            for i in range(merges):
                merge_in_turn(turns, count, i)
                merges_done += 1
    else:
        with nogil, parallel(num_threads=threads):
            if threadid() == 0:
                team[0] = omp_get_num_threads()
            for i in prange(items, schedule="dynamic"):
                item_in_turn(turns, count, i, workspace + threadid() * each)
                items_done += 1
            if merges:
                wait_for_all()
            for i in prange(merges, schedule="static"):
                merge_in_turn(turns, count, i)
                merges_done += 1
    give_scratch(scratch)
    return describe(&a, team[0], items_done, merges_done, size) if report else None


def attention_weights(q, k, lse, out, Scores scores not None, Visibility visibility not None, rows,
                      str summed, int threads):
    """exp(score - lse) into `out`: [B, N, T, S], or summed over the "queries" or "keys".

    q[B, T, N, H], k[B, S, K, H], lse[B, T, N]; checked by the caller, as are `scores` and `visibility`.
    rows[T] says where the queries stand, counted from the first; None for 0, 1, 2, ...
    """
    cdef Attention a
    cdef AttentionScratch layout
    cdef Scratch scratch
    cdef Py_ssize_t items, each
    a.kernels = kernels_for(lse.itemsize)
    read_stored(a.kernels, q, &a.q)
    read_stored(a.kernels, k, &a.k)
    read_array(lse, &a.lse)
    read_options(&a, scores, visibility)
    if q.shape[0] == 0 or q.shape[1] == 0 or q.shape[2] == 0 or k.shape[1] == 0:
        out.fill(0)
        return
    read_array(out, &a.weights_out, True)
    a.sum_over = OVER_NOTHING
    if summed is not None:
        a.sum_over = OVER_QUERIES if summed == "queries" else OVER_KEYS
    a.positions = read_integers(rows)
    a.group = a.q.shape[2] // a.k.shape[2]
    # Values without columns, which are nowhere.
    a.v = whole_array(NULL, a.k.shape[0], a.k.shape[1], a.k.shape[2], 0)
    threads = team_size(threads, attention_flops(&a))
    plan_weights(&a, threads)
    require_attention(&a)
    items = weights_items(&a)
    threads = <int>min(<Py_ssize_t>threads, items)
    each = attention_scratch(&a, &layout, NULL)
    scratch = take_scratch(each * threads)
    out.fill(0)  # what no key reaches is not written below
    with nogil:
        deal(weights_item, &a, items, threads, scratch.data, each)
    give_scratch(scratch)
