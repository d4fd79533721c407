# softmax(Q K^T) V: how it is cut into items, tiles and chunks, and the memory that those take.

cdef enum:
    # Query rows (positions times heads of the group) that share one packed block of keys: 384 take 2-5%
    # longer, 192 spend twice the time on packing, 768 leave little to balance on several threads.
    # Shorter sequences take several K/V heads into an item, 4-9% faster at 128 rows of 32 columns.
    TILE_ROWS = 512
    # Up to this many query rows a K/V head the keys are cut into chunks of this many and more, whose
    # results are merged: few rows leave no other way to use all threads, and merging costs them little.
    CHUNKED_ROWS = 128
    CHUNK = 512
    # Up to this many rows, keys and values are read as they lie, without packing them first. At 8 rows
    # packing takes 1.2 to 1.6 times as long, at 16 from 1.0 to 1.35 times; the two cross at 20 to 24 rows,
    # on every ISA. Asking for whole blocks ahead, in the order of their addresses, was 6% slower than
    # asking for what the next product reads.
    FEW_ROWS = 16
    # The same where dot products could do it in tiles: 8 rows took 3.3 ms in float and 12 rows 4.3, 24 rows
    # in dot products 2.8. Keys read as they lie enter dot products as rows and not columns; that was 1.4
    # times as slow as float for 4 rows, each step waiting for what the one before has stored.
    FEW_ROWS_OF_DOTS = 8


cdef enum Sum:
    OVER_NOTHING
    OVER_QUERIES
    OVER_KEYS


cdef struct Attention:
    const ta_kernels *kernels
    const ta_dots *dots    # what multiplies q, k and v, all of bfloat16; NULL for none
    Array q                # [B, T, N, H]
    Array k                # [B, S, K, H]
    Array v                # [B, S, K, Hv]
    Array out              # [B, T, N, Hv]
    Array lse              # [B, T, N]; data is NULL if not wanted
    double scale
    bint causal
    Py_ssize_t left        # neighbours of its position that a query sees, -1 for all
    Py_ssize_t right
    const int64_t *query_offset    # [B], or NULL for zeros
    const int64_t *query_lengths   # [B], or NULL for T
    const int64_t *key_lengths     # [B], or NULL for S
    Array mask             # [B, N, T, S] of bytes; data is NULL for none
    Array bias             # [B, N, T, S]; data is NULL for none
    double softcap         # 0 for none
    const char *slopes     # [B, N], or NULL
    const char *sinks      # [N], or NULL
    Py_ssize_t ring        # position j lies at j modulo this, a multiple of TA_KEY_BLOCK
    Py_ssize_t group       # G
    Array weights_out      # [B, N, T, S], or without the axis summed over; data is NULL for attention
    Sum sum_over           # weights are relative to lse then, and there are no values
    const int64_t *positions   # [T] of the query rows, counted from row 0, or NULL for 0, 1, 2, ...
    # The plan: an item is some K/V heads, a tile of their rows, and all chunks of the keys or one.
    bint few               # rows: keys and values are read as they lie, for all heads of an item at once
    bint k_in_place
    bint v_in_place
    bint mask_of_keys      # is the same for all rows of a sequence
    bint bias_of_keys
    bint has_score_rows    # rows have options of their own
    Py_ssize_t head_parts
    Py_ssize_t tiles       # of the G * T stacked rows of one K/V head
    Py_ssize_t chunks      # of the keys
    bint split             # an item does one chunk; then merge_item puts them together
    char *parts            # what the items found of each chunk, if split


cdef struct Seen:
    # What a register tile of query rows sees.
    Py_ssize_t begin       # keys that any of its rows sees
    Py_ssize_t end
    Py_ssize_t all_begin   # keys that all of them see
    Py_ssize_t all_end


cdef struct State:
    # What rows have summed up so far: see kernel/attention.inc.h.
    char *out              # [rows][out_stride]
    char *row_max
    char *row_sum          # [rows][vl]


cdef struct AttentionScratch:
    # One thread's, for one item.
    char *q                # rows times scale, of all heads of the item
    char *k                # a block of keys: packed panels, or rows padded to whole vectors
    char *v                # a block of values, their rows padded to whole vectors
    char *finite_v         # the same, zeros instead of what is not finite
    char *key_bias         # of a block of keys
    char *weights          # of one register tile
    char *value_words      # a block of values, the rest of a tile's: for dot products
    char *products
    char *rounded_weights
    State first_chunk
    State other_chunk
    Py_ssize_t *first      # row i sees the keys [first[i], last[i])
    Py_ssize_t *last
    ta_score_row *score_rows   # of all heads of the item, and zeros
    Seen *seen             # of each register tile
    Py_ssize_t first_row   # of the item's, among the stacked rows
    char *weights_sum      # [G][TA_KEY_BLOCK], over queries


cdef Py_ssize_t chunk_begin(Py_ssize_t chunk) noexcept nogil:
    """The position where a chunk of keys begins, the same for all calls.

    32 chunks of 512 keys, 32 of 1024, and so on: their number grows with the logarithm of S. The first 32
    are two items for each of 16 threads.
    """
    cdef Py_ssize_t level = chunk // 32, size = <Py_ssize_t>CHUNK << level
    return 32 * (size - CHUNK) + chunk % 32 * size


cdef Py_ssize_t chunks_of(Py_ssize_t S) noexcept nogil:
    cdef Py_ssize_t chunk = 1
    while chunk_begin(chunk) < S:
        chunk = chunk + 1
    return chunk


cdef bint in_place(const Attention *a, const Array *x) noexcept nogil:
    """Whether the kernels for few rows can read keys or values as they lie."""
    return a.few and x.shape[3] % a.kernels.vl == 0 and x.stride[3] == 1


cdef void plan_options(Attention *a) noexcept nogil:
    """Which options are of keys and which are of rows."""
    a.mask_of_keys = a.mask.data != NULL and a.mask.stride[1] == 0 and a.mask.stride[2] == 0
    a.bias_of_keys = a.bias.data != NULL and a.bias.stride[1] == 0 and a.bias.stride[2] == 0
    a.has_score_rows = (a.softcap != 0 or a.slopes != NULL
                        or (a.mask.data != NULL and not a.mask_of_keys)
                        or (a.bias.data != NULL and not a.bias_of_keys))


cdef bint may_be_cut(const Attention *a) noexcept nogil:
    """Whether the threads have a say in how the stacked rows of a K/V head are cut into tiles."""
    return a.group * a.q.shape[1] > CHUNKED_ROWS


cdef Py_ssize_t tiles_of(const Attention *a, int threads, Py_ssize_t sequences) noexcept nogil:
    """Into how many tiles the stacked rows of a K/V head are cut.

    Tiles balance the threads, which wait for the last item in the end: 4 items a thread, of tiles as long
    as a packed block of keys still serves 32 rows.
    """
    cdef Py_ssize_t rows = a.group * a.q.shape[1], heads = sequences * a.k.shape[2]
    cdef Py_ssize_t tiles = ceil_div(rows, TILE_ROWS)
    if not may_be_cut(a):
        return 1
    if threads > 1 and heads > 0:
        tiles = max(tiles, min(ceil_div(4 * threads, heads), rows // 32))
    return tiles


cdef void plan_attention(Attention *a, int threads, Py_ssize_t sequences) noexcept nogil:
    """Decides path and items. What changes bits depends on one sequence's shape only, never on threads.

    The threads have as much to do as so many sequences of this shape.
    """
    cdef Py_ssize_t rows = a.group * a.q.shape[1], K = a.k.shape[2], items
    a.few = rows <= (FEW_ROWS if a.dots == NULL else FEW_ROWS_OF_DOTS)
    if a.few:                               # in float, to which what they read is converted in registers
        a.dots = NULL
    a.k_in_place = in_place(a, &a.k)
    a.v_in_place = in_place(a, &a.v)
    plan_options(a)
    a.chunks = 1 if may_be_cut(a) else chunks_of(a.k.shape[1])
    a.tiles = tiles_of(a, threads, sequences)
    a.head_parts = 1 if a.few else ceil_div(K, max(TILE_ROWS // max(rows, <Py_ssize_t>1), <Py_ssize_t>1))
    a.split = False
    a.parts = NULL
    if threads > 1 and sequences * K > 0:
        # 2 items a thread will do where cutting costs merging, or reading keys in shorter runs.
        items = sequences * a.head_parts * a.tiles
        a.split = a.chunks > 1 and items < 2 * threads
        if a.split:
            items = items * a.chunks
        if items < 2 * threads:
            a.head_parts = min(K, a.head_parts * ceil_div(2 * threads, items))


cdef void plan_weights(Attention *a, int threads) noexcept nogil:
    """The same of weights. One path for all, so that a row's bits do not depend on the others."""
    a.few = a.k_in_place = a.split = False
    a.v_in_place = True
    plan_options(a)
    a.chunks = 1
    a.tiles = tiles_of(a, 1 if a.sum_over == OVER_QUERIES else threads, a.q.shape[0])
    a.head_parts = a.k.shape[2]
    a.parts = NULL


cdef double attention_flops(const Attention *a) noexcept nogil:
    return 2.0 * a.q.shape[0] * a.q.shape[1] * a.q.shape[2] * a.k.shape[1] * (
        a.q.shape[3] + a.v.shape[3])


cdef Py_ssize_t attention_items(const Attention *a) noexcept nogil:
    if a.group * a.q.shape[1] == 0:
        return 0
    return a.q.shape[0] * a.head_parts * a.tiles * (a.chunks if a.split else 1)


cdef Py_ssize_t merge_items(const Attention *a) noexcept nogil:
    return a.q.shape[0] * a.k.shape[2] if a.split else 0


cdef Py_ssize_t width_of(const Attention *a, const Array *x) noexcept nogil:
    """A row of x in whole vectors."""
    return round_up(x.shape[3], a.kernels.vl)


cdef Py_ssize_t item_rows(const Attention *a) noexcept nogil:
    """Rows of a tile, at most."""
    return min(<Py_ssize_t>TILE_ROWS, a.group * a.q.shape[1])


cdef Py_ssize_t block_keys(const Attention *a) noexcept nogil:
    """Keys of a block."""
    return TA_FEW_BLOCK if a.few else TA_KEY_BLOCK


cdef Py_ssize_t item_heads(const Attention *a) noexcept nogil:
    """K/V heads of an item, at most."""
    return ceil_div(a.k.shape[2], a.head_parts)


cdef Py_ssize_t q_stride(const Attention *a) noexcept nogil:
    """From a packed query row to the next."""
    return (word_count(a.q.shape[3]) if a.dots != NULL else width_of(a, &a.q)) + SKEW


cdef Py_ssize_t row_tiles_of(const Attention *a, Py_ssize_t rows) noexcept nogil:
    """Register tiles of so many query rows."""
    return ceil_div(rows, TA_WEIGH_ROWS if a.dots != NULL else a.kernels.attention_mr)


cdef Py_ssize_t tile_row(const Attention *a, Py_ssize_t r, Py_ssize_t rows) noexcept nogil:
    """The first row of register tile r; of the one behind the last, their number."""
    if a.dots != NULL:
        return min(r * TA_WEIGH_ROWS, rows)
    return r * rows // row_tiles_of(a, rows)


cdef State carve_state(const Attention *a, uintptr_t *cursor, Py_ssize_t rows) noexcept nogil:
    cdef State state
    cdef Py_ssize_t itemsize = a.kernels.itemsize
    state.out = carve(cursor, rows * (width_of(a, &a.v) + SKEW) * itemsize)
    state.row_max = carve(cursor, rows * itemsize)
    state.row_sum = carve(cursor, rows * a.kernels.vl * itemsize)
    return state


cdef Py_ssize_t attention_scratch(const Attention *a, AttentionScratch *s, char *memory) noexcept nogil:
    """Lays out a thread's scratch from `memory` on; returns its size in bytes."""
    cdef Py_ssize_t itemsize = a.kernels.itemsize, vl = a.kernels.vl
    cdef Py_ssize_t rows = item_rows(a), states = rows * item_heads(a)
    cdef Py_ssize_t step = block_keys(a)
    cdef uintptr_t cursor = <uintptr_t>memory
    cdef bint dots = a.dots != NULL
    s.q = carve(&cursor, (states + TA_DOT_LOT * dots) * q_stride(a) * itemsize)
    s.k = carve(&cursor, 0 if a.k_in_place else (
        step * (word_count(a.k.shape[3]) if dots else width_of(a, &a.k)) + vl) * itemsize)
    s.v = carve(&cursor, 0 if a.v_in_place and a.v.storage == TA_REAL
                else step * width_of(a, &a.v) * itemsize)
    s.finite_v = carve(&cursor, step * width_of(a, &a.v) * itemsize)
    s.key_bias = carve(&cursor, TA_KEY_BLOCK * itemsize)
    s.weights = carve(&cursor, TA_MAX_ROWS * TA_WEIGHT_STRIDE * itemsize)
    s.value_words = carve(&cursor, dots * step // 2 * width_of(a, &a.v) * sizeof(uint32_t))
    s.products = carve(&cursor, dots * TA_DOT_ROWS * TA_WEIGHT_STRIDE * sizeof(float))
    s.rounded_weights = carve(&cursor, dots * TA_DOT_ROWS * TA_ROUNDED_STRIDE * sizeof(uint16_t))
    s.first_chunk = carve_state(a, &cursor, 0 if a.split else states)
    s.other_chunk = carve_state(a, &cursor, 0 if a.split or a.chunks == 1 else states)
    s.first = <Py_ssize_t *>carve(&cursor, rows * sizeof(Py_ssize_t))
    s.last = <Py_ssize_t *>carve(&cursor, rows * sizeof(Py_ssize_t))
    s.score_rows = <ta_score_row *>carve(
        &cursor, (states + TA_MAX_ROWS) * sizeof(ta_score_row) if a.has_score_rows else 0)
    s.seen = <Seen *>carve(&cursor, row_tiles_of(a, rows) * sizeof(Seen))
    s.weights_sum = carve(&cursor, a.group * TA_KEY_BLOCK * itemsize if a.weights_out.data != NULL else 0)
    return cursor - <uintptr_t>memory


cdef State skip_rows(const Attention *a, const State *state, Py_ssize_t rows) noexcept nogil:
    """The state of the rows behind the first `rows`."""
    cdef Py_ssize_t itemsize = a.kernels.itemsize
    return State(state.out + rows * (width_of(a, &a.v) + SKEW) * itemsize,
                 state.row_max + rows * itemsize, state.row_sum + rows * a.kernels.vl * itemsize)


cdef Py_ssize_t parts_size(const Attention *a) noexcept nogil:
    """Bytes of what the items find of each sequence and chunk, for all heads."""
    cdef uintptr_t cursor = 0
    if not a.split:
        return 0
    carve_state(a, &cursor, a.k.shape[2] * item_rows(a))
    return a.q.shape[0] * a.chunks * <Py_ssize_t>cursor


cdef State part_state(const Attention *a, Py_ssize_t b, Py_ssize_t chunk, Py_ssize_t head) noexcept nogil:
    """Where the rows of a sequence, a chunk and the heads from `head` on lie in a.parts."""
    cdef Py_ssize_t rows = item_rows(a), parts = a.q.shape[0] * a.chunks
    cdef uintptr_t cursor = <uintptr_t>a.parts + parts_size(a) // parts * (b * a.chunks + chunk)
    cdef State state = carve_state(a, &cursor, a.k.shape[2] * rows)
    return skip_rows(a, &state, head * rows)


cdef int require_attention(const Attention *a) except -1:
    cdef double width = <double>a.q.shape[3] + a.v.shape[3] + 64
    return require_possible(a.kernels.itemsize * width * (
        TILE_ROWS + TA_KEY_BLOCK + <double>a.chunks * a.q.shape[0] * a.q.shape[2] * item_rows(a)),
        "working memory")


cdef inline Py_ssize_t position_of(const Attention *a, Py_ssize_t t) noexcept nogil:
    return t if a.positions == NULL else a.positions[t]
