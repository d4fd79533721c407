# The attention block: its stages, one after the other in one parallel region.

cdef struct Fresh:
    # The keys and values of new positions, and the cache that they go to, if any.
    Array[2] rows          # [B, T, K, H] and [B, T, K, Hv]: where they are projected to
    Array[2] slots         # [B, slots, K, H] and [B, slots, K, Hv] of the cache
    const int64_t *starts  # [B]: row t goes to slot (starts[b] + t) modulo slots; NULL without a cache
    const int64_t *counts  # [B]: only rows t < counts[b] do; NULL for all
    bint in_scratch        # rows are; otherwise in their slots


cdef int read_span(const ta_kernels *kernels, span, Fresh *fresh) except -1:
    """Reads a CacheSpan (see _arguments.py), or None."""
    fresh.starts = fresh.counts = NULL
    if span is None:
        return 0
    is_written = span.starts is not None
    read_kept(kernels, span.keys, span.key_scales, &fresh.slots[0], is_written)
    read_kept(kernels, span.values, span.value_scales, &fresh.slots[1], is_written)
    fresh.starts = read_integers(span.starts)
    fresh.counts = read_integers(span.counts)
    return 0


cdef bint fit_in_slots(const Fresh *fresh, Py_ssize_t B, Py_ssize_t T) noexcept nogil:
    """Whether a product can write its rows into their slots: of its type, and evenly apart."""
    cdef Py_ssize_t slots = fresh.slots[0].shape[1], first = fresh.starts[0] % slots, b
    if fresh.slots[0].storage != TA_REAL or first + T > slots or (B > 1 and T > 1):
        return False
    for b in range(B):
        if fresh.starts[b] % slots != first or (fresh.counts != NULL and fresh.counts[b] < T):
            return False
    return True


cdef int place_fresh(const ta_kernels *kernels, Fresh *fresh, uintptr_t *cursor, Py_ssize_t B, Py_ssize_t T,
                     Py_ssize_t K, Py_ssize_t H, Py_ssize_t Hv) except -1:
    """Decides where T new rows of each sequence are projected to."""
    cdef Py_ssize_t width, i
    cdef Array *rows
    fresh.in_scratch = fresh.starts == NULL or not fit_in_slots(fresh, B, T)
    for i in range(2):
        rows = &fresh.rows[i]
        if fresh.in_scratch:
            width = Hv if i else H
            rows[0] = whole_array(carve(cursor, B * T * K * width * kernels.itemsize), B, T, K, width)
        else:
            rows[0] = fresh.slots[i]
            rows.data += fresh.starts[0] % rows.shape[1] * rows.stride[1] * kernels.itemsize
            rows.shape[1] = T
    return 0


cdef enum:
    # The stages of a block, one after the other, each in items of its own.
    PRE_NORM
    PROJECT
    FINISH_HEADS
    ATTEND
    MERGE
    OUTPUT
    FINISH_OUTPUT
    STAGES


cdef struct Stages:
    Norm pre_norm
    Gemm q, kv, o
    Attention a
    Py_ssize_t items[STAGES]
    double began[STAGES + 1]


cdef void stage_item(const Stages *s, int stage, Py_ssize_t i, char *memory) noexcept nogil:
    """Item i of a stage."""
    cdef Py_ssize_t items = s.items[stage], q_items
    cdef ta_floats before = ta_take_floats()
    if stage == PRE_NORM:
        norm_item(&s.pre_norm, i, items)
    elif stage == PROJECT:
        q_items = gemm_items(&s.q)
        if i < q_items:
            gemm_item(&s.q, i, memory)
        else:
            gemm_item(&s.kv, i - q_items, memory)
    elif stage == FINISH_HEADS:
        finish_item(&s.q, i, items)
        finish_item(&s.kv, i, items)
    elif stage == ATTEND:
        attention_item(&s.a, i, memory)
    elif stage == MERGE:
        merge_item(&s.a, i)
    elif stage == OUTPUT:
        gemm_item(&s.o, i, memory)
    else:
        finish_item(&s.o, i, items)
    ta_give_floats(before)


cdef class Block:
    """x + attention(x W_Q, c W_K, c W_V) W_O, normalised: the packed weights and what all calls share.

    w is what _arguments.check_block_weights returns.
    """

    cdef PackedMatrix w_q       # holds W_K and W_V as well, if D == Dc
    cdef PackedMatrix w_kv      # then the same object
    cdef PackedMatrix w_o
    cdef object kept            # the arrays that the pointers below point into
    cdef const char *biases[4]
    cdef ta_norm pre_norm, post_norm
    cdef Heads[3] heads         # what those of q, k and v go through; without arrays
    cdef bint residual
    cdef Py_ssize_t N, K, H, Hv
    cdef readonly Py_ssize_t nbytes
    cdef readonly str arithmetic    # of the projections

    def __init__(self, w):
        w_q, w_k, w_v, w_o = w.matrices
        self.N, self.H = w_q.shape[1], w_q.shape[2]
        self.K, self.Hv = w_v.shape[1], w_v.shape[2]
        # One arithmetic for all projections, so that it has a name.
        kinds = {"bfloat16": w.weight_dtype == "bfloat16",
                 "float32": w.arithmetic == "float32" or w.has_quantized,
                 "int8": w.arithmetic == "int8" and (
                     max(w_q.shape[0], w_k.shape[0], self.N * self.Hv) <= EXACT_DEPTH)}
        flat = [matrix.reshape(matrix.shape[0], -1) for matrix in (w_q, w_k, w_v)]
        if w_q.shape[0] == w_k.shape[0]:
            self.w_q = self.w_kv = PackedMatrix(*flat, **kinds)
            self.nbytes = self.w_q.nbytes
        else:
            self.w_q = PackedMatrix(flat[0], **kinds)
            self.w_kv = PackedMatrix(flat[1], flat[2], **kinds)
            self.nbytes = self.w_q.nbytes + self.w_kv.nbytes
        self.w_o = PackedMatrix(w_o.reshape(-1, w_o.shape[2]), **kinds)
        self.nbytes += self.w_o.nbytes
        self.arithmetic = "float32" if self.w_q.kernels.itemsize == 4 else "float64"
        if self.w_q.dots != NULL:
            self.arithmetic = "int8" if self.w_q.words == TA_WORDS_INT8 else "bfloat16"
        self.kept = w._replace(matrices=())
        for i in range(4):
            self.biases[i] = read_vector(w.biases[i])
        self.pre_norm = read_norm(w.norm if w.is_pre_norm else None, w_o.shape[2])
        self.post_norm = read_norm(None if w.is_pre_norm else w.norm, w_o.shape[2])
        interleaved = w.rope is not None and w.rope.interleaved
        for i in range(3):
            self.heads[i].kernels = self.w_q.kernels
            self.heads[i].norm = read_norm((w.q_norm, w.k_norm, None)[i], self.H)
            width, rotary_dim = (self.Hv, 0) if i == 2 else (self.H, w.rotary_dim)
            self.heads[i].rope = ta_rope(0, width, rotary_dim, interleaved, width, width)
        self.residual = w.residual

    cdef void plan_fresh(self, Fresh *fresh, Gemm *g, Heads *heads, Target *targets, char *scratch,
                         Angles angles) noexcept:
        """Where a product with W_K and W_V goes, and what the heads go through from there on."""
        cdef Array *rows
        cdef int i
        for i in range(2):
            rows = &fresh.rows[i]
            if fresh.in_scratch:
                rows.data = scratch + <uintptr_t>rows.data
            targets[i] = Target(rows.data, rows.stride[0] if rows.shape[1] == 1 else rows.stride[1],
                                self.biases[1 + i])
            heads[i] = self.heads[1 + i]
            plan_heads(&heads[i], rows[0], rows[0], angles if i == 0 else Angles(NULL, NULL, 0, NULL))
            if fresh.starts != NULL and fresh.in_scratch:
                heads[i].out = fresh.slots[i]
                heads[i].starts = fresh.starts
                heads[i].counts = fresh.counts
                g.heads[1 + i] = &heads[i]
            elif does_anything(&heads[i]):
                g.heads[1 + i] = &heads[i]

    cdef void plan_kv_gemm(self, Gemm *g, const Target *targets, int threads):
        """A plan for W_K and W_V by themselves."""
        cdef int begin = 1 if self.w_kv is self.w_q else 0
        plan_gemm(g, self.w_kv, begin, begin + 2, targets, threads)

    def fill(self, context, span, tuple angles, int threads):
        """The keys and values of context[B, S, Dc] into a cache (see _arguments.CacheSpan)."""
        cdef Gemm g
        cdef Fresh fresh
        cdef Angles k_angles
        cdef Heads[2] heads
        cdef Target[2] targets
        cdef Scratch scratch
        cdef char *workspace
        cdef uintptr_t cursor = 0
        cdef Py_ssize_t items, each
        read_rows(context, &g.a, &g.rows)
        if g.rows == 0:
            return
        read_span(self.w_q.kernels, span, &fresh)
        k_angles = read_angles(angles, context.shape[1], fresh.starts)
        place_fresh(self.w_q.kernels, &fresh, &cursor, context.shape[0], context.shape[1], self.K, self.H,
                    self.Hv)
        threads = team_size(threads, 2.0 * g.rows * self.w_kv.depth * self.K * (self.H + self.Hv))
        self.plan_kv_gemm(&g, targets, threads)
        items = gemm_items(&g)
        threads = <int>min(<Py_ssize_t>threads, items)
        each = round_up(gemm_scratch(&g), CACHE_LINE)
        scratch = take_scratch(cursor + each * threads)
        workspace = scratch.data + cursor
        self.plan_fresh(&fresh, &g, heads, targets, scratch.data, k_angles)
        with nogil:
            deal(deal_gemm, &g, items, threads, workspace, each)
            if is_unfinished(&g):
                deal(deal_finish, &g, threads, threads)
        give_scratch(scratch)

    def run(self, x, context, Scores scores not None, Visibility visibility not None, positions,
            tuple q_angles, tuple k_angles, out, int threads, span):
        """The block's output for x[B, T, D] into out[B, T, D], in one parallel region.

        context[B, S, Dc] is None in self-attention; x has contiguous rows, out is contiguous. The span is
        None, or the cache that the keys and values of x go to, if it has starts, and that all come from
        (see _arguments.CacheSpan). positions[B] are those of the first queries, or None for 0. The angles
        are cos and sin of a rope, or None: of positions from 0 on [positions, rotary_dim / 2], or those
        of each row [B, T, rotary_dim / 2]. Returns the seconds spent in projecting q, k and v, in
        attention, and in the rest.
        """
        cdef Stages stages
        cdef Stages *s = &stages
        cdef Fresh fresh
        cdef Angles of_q, of_k
        cdef Target[3] qkv
        cdef Target z
        cdef Norm norm
        cdef Heads[3] heads
        cdef AttentionScratch layout
        cdef Array array
        cdef Array[4] written
        cdef Scratch scratch
        cdef uintptr_t cursor = 0
        cdef char *workspace
        cdef const ta_kernels *kernels = self.w_q.kernels
        cdef Py_ssize_t itemsize = kernels.itemsize, N = self.N, K = self.K, H = self.H, Hv = self.Hv
        cdef Py_ssize_t B = x.shape[0], T = x.shape[1], D = self.post_norm.columns
        cdef bint is_projected = span is not None and span.starts is None
        cdef Py_ssize_t S = 0 if is_projected else T if context is None else context.shape[1]
        cdef Py_ssize_t i, each
        cdef int stage, last
        cdef bytearray _unrolled
        cdef bint together = context is None and self.w_kv is self.w_q and not is_projected

        if B * T == 0:
            return (0.0, 0.0, 0.0)
        if span is not None and not is_projected:
            x = read_apart(kernels, x, &array, written, read_written(
                kernels, span.keys, span.values, span.key_scales, span.value_scales, written))
        read_rows(x, &s.q.a, &s.q.rows)
        s.kv.a = s.q.a
        if context is not None:
            read_rows(context, &s.kv.a, &s.kv.rows)
        read_array(out, &array, True)
        s.a.kernels = kernels
        read_options(&s.a, scores, visibility)
        require_possible(<double>itemsize * B * (
            <double>T * (N * (H + Hv) + D) + <double>S * K * (H + Hv)), "working memory")

        # Where q, y, and k and v if they have no other place, will lie in the scratch; what each thread
        # needs comes behind them.
        s.a.q = whole_array(carve(&cursor, B * T * N * H * itemsize), B, T, N, H)
        read_span(kernels, span, &fresh)
        of_q = read_angles(q_angles, T, read_integers(positions))
        of_k = read_angles(k_angles, S, fresh.starts)
        place_fresh(kernels, &fresh, &cursor, B, S, K, H, Hv)
        s.a.k, s.a.v = fresh.rows[0], fresh.rows[1]
        if span is not None:
            s.a.k, s.a.v = fresh.slots[0], fresh.slots[1]
            if span.is_ring:
                _unrolled = unroll(&s.a)
            s.a.k.shape[1] = s.a.v.shape[1] = longest(&s.a)
        s.a.out = whole_array(carve(&cursor, B * T * N * Hv * itemsize), B, T, N, Hv)
        s.a.lse.data = NULL
        s.a.group = N // K

        threads = team_size(threads, attention_flops(&s.a) + 2.0 * (
            <double>B * T * self.w_q.depth * N * H + <double>B * S * self.w_kv.depth * K * (H + Hv)
            + <double>B * T * N * Hv * D))
        s.o.rows = s.q.rows
        plan_gemm(&s.q, self.w_q, 0, 3 if together else 1, qkv, threads)
        if together:
            s.kv.rows = 0
            plan_gemm(&s.kv, self.w_kv, 1, 1, &qkv[1], threads)
        else:
            s.kv.rows = B * S
            self.plan_kv_gemm(&s.kv, &qkv[1], threads)
        norm.residual = s.q.a
        s.items[PRE_NORM] = 0
        if self.pre_norm.normalize:
            # A row is normalised where it is packed, unless several threads would do the same to many: that
            # costs two threads up to 1%, and grows with their number. For few rows a loop of its own costs
            # as much.
            if s.q.panel_parts > 1 and s.q.rows > s.q.mr:
                s.items[PRE_NORM] = threads
                s.pre_norm.x = s.q.a
                s.pre_norm.out_stride = D + SKEW
                s.pre_norm.out = carve(&cursor, s.q.rows * s.pre_norm.out_stride * itemsize)
            else:
                s.q.a_norm = &self.pre_norm
        plan_attention(&s.a, threads, B)
        require_attention(&s.a)
        s.a.parts = carve(&cursor, parts_size(&s.a))
        plan_gemm(&s.o, self.w_o, 0, 1, &z, threads)
        s.items[PROJECT] = gemm_items(&s.q) + gemm_items(&s.kv)
        s.items[ATTEND] = attention_items(&s.a)
        s.items[MERGE] = merge_items(&s.a)
        s.items[OUTPUT] = gemm_items(&s.o)
        threads = <int>min(<Py_ssize_t>threads, max(s.items[PROJECT], s.items[ATTEND], s.items[OUTPUT]))
        each = round_up(max(gemm_scratch(&s.q), gemm_scratch(&s.kv), gemm_scratch(&s.o),
                            attention_scratch(&s.a, &layout, NULL)), CACHE_LINE)
        scratch = take_scratch(cursor + each * threads)

        s.a.q.data = scratch.data + <uintptr_t>s.a.q.data
        s.a.out.data = scratch.data + <uintptr_t>s.a.out.data
        s.a.parts = scratch.data + <uintptr_t>s.a.parts
        workspace = scratch.data + cursor
        qkv[0] = Target(s.a.q.data, N * H, self.biases[0])
        z = Target(array.data, D, self.biases[3])
        if s.items[PRE_NORM]:
            s.pre_norm.kernels = kernels
            s.pre_norm.how = self.pre_norm
            s.pre_norm.rows = s.q.rows
            s.pre_norm.residual.data = NULL
            s.pre_norm.out = scratch.data + <uintptr_t>s.pre_norm.out
            s.q.a = Rows(s.pre_norm.out, s.q.rows, 0, s.pre_norm.out_stride, 1)
        heads[0] = self.heads[0]
        plan_heads(&heads[0], s.a.q, s.a.q, of_q)
        if does_anything(&heads[0]):
            s.q.heads[0] = &heads[0]
        self.plan_fresh(&fresh, &s.q if together else &s.kv, &heads[1], &qkv[1], scratch.data, of_k)
        if span is None:
            s.a.k.data, s.a.v.data = fresh.rows[0].data, fresh.rows[1].data
        s.items[FINISH_HEADS] = threads if is_unfinished(&s.q) or is_unfinished(&s.kv) else 0
        s.o.a = Rows(s.a.out.data, s.o.rows, 0, N * Hv, 1)
        if self.post_norm.normalize or self.residual:
            norm.kernels = kernels
            norm.how = self.post_norm
            norm.rows = s.o.rows
            norm.x = Rows(z.data, norm.rows, 0, z.row_stride, 1)
            if not self.residual:
                norm.residual.data = NULL
            norm.out = z.data
            norm.out_stride = z.row_stride
            s.o.norm = &norm
        s.items[FINISH_OUTPUT] = threads if is_unfinished(&s.o) else 0
        last = FINISH_OUTPUT if s.items[FINISH_OUTPUT] else OUTPUT

        s.began[PRE_NORM] = omp_get_wtime()
        if threads == 1:  # without a region, as in attention
            with nogil:
                for stage in range(STAGES):
                    if stage > PRE_NORM:
                        s.began[stage] = omp_get_wtime()
                    for i in range(s.items[stage]):
                        stage_item(s, stage, i, workspace)
        else:
            with nogil, parallel(num_threads=threads):
                for stage in range(STAGES):
                    if stage > PRE_NORM and threadid() == 0:
                        s.began[stage] = omp_get_wtime()
                    if s.items[stage]:
                        for i in prange(s.items[stage], schedule="dynamic"):
                            stage_item(s, stage, i, workspace + threadid() * each)
                        if stage < last:  # the region's end waits by itself
                            wait_for_all()
        s.began[STAGES] = omp_get_wtime()
        give_scratch(scratch)
        return (s.began[ATTEND] - s.began[PRE_NORM], s.began[OUTPUT] - s.began[ATTEND],
                s.began[STAGES] - s.began[OUTPUT])
