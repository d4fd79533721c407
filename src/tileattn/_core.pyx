# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The loops: which tile is worked on when, and by which thread.

Seven operations, each a plan (a struct that says what to do and in how many independent work items)
and one function that does an item, its loops in textbook order:

    gemm_item           C = A B + bias         a block of rows times a range of packed panels
    attention_item      softmax(Q K^T) V       one tile of the stacked query rows of a K/V head
    weights_item        exp(Q K^T - LSE)       the same, or a block of keys under all rows
    merge_states_item   parts of the keys      a block of rows of their union
    norm_item           LayerNorm(X + Z)       a block of rows; or RMSNorm
    finish_heads        RoPE(norm(Q))          a share of the heads
    append_item         K and V into a cache   a block of rows

The Python functions at the end read arrays into plans and have their items dealt out by `deal`. Those
of attention and of a block, which come stage by stage (stage_item), wait for one another inside one
parallel region. Items write to disjoint memory and fix every order of summation, so no bit of a
result depends on how they are dealt. The arithmetic is done by the C tile kernels in csrc/. Inside the
loops there are pointers and strides only; strides count elements.
"""

from cpython.buffer cimport (
    PyBUF_STRIDES, PyBUF_WRITABLE, Py_buffer, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer,
)
from cython.parallel cimport parallel, prange, threadid
from libc.math cimport isfinite
from libc.stdint cimport int64_t, uint16_t, uint32_t, uintptr_t
from libc.stdlib cimport qsort
from libc.string cimport memcpy, memset

cdef extern from "omp.h" nogil:
    int omp_get_max_threads() noexcept
    int omp_get_num_procs() noexcept
    int omp_get_num_threads() noexcept
    int omp_get_proc_bind() noexcept
    int omp_get_thread_limit() noexcept
    double omp_get_wtime() noexcept

cdef extern from *:
    """
    static const double LOG2_E = 1.4426950408889634074;
    static const double MINUS_INFINITY = -1.0 / 0.0;

    /* Between two loops of a region: Cython's `prange` does not wait (omp for nowait). */
    static void wait_for_all(void)
    {
        _Pragma("omp barrier")
    }
    """
    void wait_for_all() noexcept nogil
    const double LOG2_E
    const double MINUS_INFINITY
    const Py_ssize_t PY_SSIZE_T_MAX

cdef enum:
    # Length of the slices in which every product sums over its contracted axis, whatever the number
    # of rows: one order of summation for all. One pass over 4096 doubles the error of blocked sums.
    GEMM_KC = 512
    # Bytes ahead that a single register tile prefetches. Without, 4 rows read B from DRAM at 68% of the
    # bandwidth instead of 88%; 64 KiB ahead are no better, and worse where B lies in a cache.
    STREAM_AHEAD = 4096
    # The same for dot products: 4 KiB took 1.1 times as long for one row of 4096 x 4096, 32 KiB as long.
    DOT_AHEAD = 1 << 14
    # Bytes of a block of A up to which it is packed over the whole depth, so that every panel of B is
    # read in one stream and C stays in the first-level cache: a part of any second-level cache.
    WHOLE_DEPTH = 1 << 19
    # The same, and the rows of a packed block of A, where weights are multiplied in bfloat16 dot products.
    # 256 rows in slices of the depth, 256 and 512 over the whole of it took up to 1.2 times as long.
    DOT_WHOLE_DEPTH = 1 << 20
    DOT_MC = 128
    # Products of int8 whose sum an int32 holds: 2^31 / 128 / 128.
    EXACT_DEPTH = 1 << 17
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
    # Strides of scratch rows are kept off powers of two, which would share a few cache sets.
    SKEW = 16
    CACHE_LINE = 64


# ------------------------------------------------------------------ arrays and scratch memory

cdef struct Array:
    char *data
    int storage            # of its elements: a ta_storage
    int axes
    Py_ssize_t shape[4]
    Py_ssize_t stride[4]   # in elements
    # Of TA_INT8, else NULL: that of row i, j, l lies at i * scale_stride[0] + j + l * scale_stride[1], and
    # behind those of all j come as many as fill a panel.
    float *scales
    Py_ssize_t scale_stride[2]


cdef int read_array(object source, Array *array, bint writable=False) except -1:
    """Pointer, shape and strides of an array of up to four axes; the caller keeps it alive."""
    cdef Py_buffer view
    PyObject_GetBuffer(source, &view, PyBUF_STRIDES | (PyBUF_WRITABLE if writable else 0))
    if view.ndim > 4:
        PyBuffer_Release(&view)
        raise ValueError("an array has more axes than when it was checked")
    array.data = <char *>view.buf
    array.storage = TA_REAL
    array.scales = NULL
    array.axes = view.ndim
    cdef int i
    cdef Py_ssize_t left = 0
    for i in range(view.ndim):
        array.shape[i] = view.shape[i]
        array.stride[i] = 0
        if view.shape[i] > 1:
            array.stride[i] = view.strides[i] // view.itemsize
            left |= view.strides[i] & (view.itemsize - 1)  # sizes are powers of two
    PyBuffer_Release(&view)
    if left != 0:
        raise ValueError("an array has strides that are no multiples of its elements' size")
    return 0


cdef int read_stored(const ta_kernels *kernels, object source, Array *array,
                     bint writable=False) except -1:
    """The same of an array that may hold something else than the kernels compute in."""
    cdef Py_ssize_t itemsize = source.itemsize
    cdef int storage = TA_REAL if itemsize == kernels.itemsize else TA_OTHER_REAL
    if itemsize == 2:
        storage = TA_F16 if source.dtype.kind == "f" else TA_BF16
        source = source.view("uint16")  # bfloat16 has no buffer of its own
    elif itemsize == 1:
        storage = TA_INT8
    read_array(source, array, writable)
    array.storage = storage
    return 0


cdef int read_kept(const ta_kernels *kernels, object source, object scales, Array *array,
                   bint writable=False) except -1:
    """The same of keys or values [B, S, K, ...]; int8 comes with scales[B, S, K], others with None."""
    cdef Array of_rows
    read_stored(kernels, source, array, writable)
    if scales is not None:
        read_array(scales, &of_rows, writable)
        array.scales = <float *>of_rows.data
        array.scale_stride[0], array.scale_stride[1] = of_rows.stride[0], of_rows.stride[2]
    return 0


cdef bint may_meet(const ta_kernels *kernels, const Array *x, const Array *y) noexcept:
    """Whether the bytes from the first to the last of one overlap those of the other."""
    cdef const Array *both[2]
    cdef char *begin[2]
    cdef char *end[2]
    cdef Py_ssize_t i, j, reach
    both[0], both[1] = x, y
    for i in range(2):
        begin[i] = both[i].data
        end[i] = both[i].data + size_of(kernels, both[i])
        for j in range(both[i].axes):
            if both[i].shape[j] == 0:
                return False
            reach = (both[i].shape[j] - 1) * both[i].stride[j] * size_of(kernels, both[i])
            if reach < 0:
                begin[i] += reach
            else:
                end[i] += reach
    return begin[0] < end[1] and begin[1] < end[0]


cdef object read_apart(const ta_kernels *kernels, object source, Array *array, const Array *written,
                       int count):
    """Reads an array, or a copy of it if writing to those others might change it; returns which."""
    cdef int i
    read_stored(kernels, source, array)
    for i in range(count):
        if may_meet(kernels, array, written + i):
            source = source.copy()
            read_stored(kernels, source, array)
            break
    return source


cdef int read_written(const ta_kernels *kernels, keys, values, key_scales, value_scales,
                      Array *written) except -1:
    """All arrays of a cache that gets new positions; returns how many they are, four at most."""
    read_stored(kernels, keys, written, True)
    read_stored(kernels, values, written + 1, True)
    if key_scales is None:
        return 2
    read_array(key_scales, written + 2, True)
    read_array(value_scales, written + 3, True)
    return 4


cdef const int64_t *read_integers(object source) except? NULL:
    """Pointer to a contiguous int64 array, NULL for None."""
    cdef Array array
    if source is None:
        return NULL
    read_array(source, &array)
    return <const int64_t *>array.data


cdef const char *read_vector(object source) except? NULL:
    """Pointer to a contiguous array, NULL for None."""
    cdef Array array
    if source is None:
        return NULL
    read_array(source, &array)
    return array.data


cdef inline Py_ssize_t size_of(const ta_kernels *kernels, const Array *x) noexcept nogil:
    """Bytes of an element."""
    if x.storage == TA_REAL:
        return kernels.itemsize
    if x.storage == TA_INT8:
        return 1
    return 12 - kernels.itemsize if x.storage == TA_OTHER_REAL else 2


cdef inline Py_ssize_t ceil_div(Py_ssize_t a, Py_ssize_t b) noexcept nogil:
    return (a + b - 1) // b


cdef inline Py_ssize_t round_up(Py_ssize_t a, Py_ssize_t b) noexcept nogil:
    return ceil_div(a, b) * b


# Between calls one piece of scratch memory is kept, since mapping and zeroing new pages would cost a
# small call more than its arithmetic. Taken and given back with the GIL held.
cdef size_t keep_at_most = 64 << 20
cdef void *kept = NULL
cdef size_t kept_bytes = 0


cdef struct Scratch:
    char *data
    size_t size


cdef Scratch take_scratch(size_t size) except *:
    global kept, kept_bytes
    cdef Scratch scratch
    if kept != NULL and kept_bytes >= size:
        scratch.data = <char *>kept
        scratch.size = kept_bytes
        kept = NULL
        return scratch
    scratch.data = <char *>ta_allocate(size)
    scratch.size = size
    if scratch.data == NULL:
        raise MemoryError(f"could not allocate {size} bytes of working memory")
    return scratch


cdef void give_scratch(Scratch scratch) noexcept:
    global kept, kept_bytes
    if scratch.size > keep_at_most or (kept != NULL and kept_bytes >= scratch.size):
        ta_release(scratch.data)
        return
    ta_release(kept)
    kept = scratch.data
    kept_bytes = scratch.size


def keep_scratch(size_t at_most):
    """Sets how many bytes are kept, and forgets what is. Returns how many it was before."""
    global kept, keep_at_most
    before, keep_at_most = keep_at_most, at_most
    ta_release(kept)
    kept = NULL
    return before


cdef inline char *carve(uintptr_t *cursor, Py_ssize_t size) noexcept nogil:
    """The next piece of a scratch area. From 0 on it only measures, and the piece is nobody's."""
    cdef uintptr_t piece = cursor[0]
    cursor[0] = piece + round_up(size, CACHE_LINE)
    return <char *>piece


cdef int require_possible(double size, str what) except -1:
    """Refuses sizes that no address space holds, before integer arithmetic on them can overflow."""
    if size > 1e18:
        raise MemoryError(f"{size:.2g} bytes would be needed for {what}: more than any address space holds")
    return 0


# ------------------------------------------------------------------ C = A B + bias

cdef struct Rows:
    # Rows of one matrix, laid out as blocks of `inner` rows (a batch of sequences).
    const char *data
    Py_ssize_t inner
    Py_ssize_t outer_stride
    Py_ssize_t inner_stride
    Py_ssize_t column_stride


cdef inline const char *row_at(const Rows *rows, Py_ssize_t row, Py_ssize_t itemsize) noexcept nogil:
    return rows.data + itemsize * (
        row // rows.inner * rows.outer_stride + row % rows.inner * rows.inner_stride
    )


cdef struct Panel:
    # A packed range of columns of one of the matrices that lie side by side in B.
    const char *data       # [depth][columns rounded up to whole vectors], or words of that
    int matrix
    int columns
    Py_ssize_t column      # its first column in that matrix
    int words              # what data is: a ta_weights
    const char *scales     # of words; group and unit as in ta_words
    Py_ssize_t group
    double unit


cdef inline Py_ssize_t panel_bits(const ta_kernels *kernels, const Panel *b) noexcept nogil:
    """Bits of a row of a panel. In a slice, which is whole words deep, they are whole bytes."""
    cdef Py_ssize_t bits = 8 * kernels.itemsize
    if b.words != TA_WORDS_NONE:
        bits = 32 // TA_WORD_ROWS(b.words)
    return bits * round_up(b.columns, kernels.vl)


cdef inline Py_ssize_t scale_bytes(int words) noexcept nogil:
    """Of a column's group: a float, or a scale and a minimum in float16."""
    return 4 if words in (TA_WORDS_INT8, TA_WORDS_INT4) else 0


cdef inline const char *scales_at(const ta_kernels *kernels, const Panel *b, Py_ssize_t kc) noexcept nogil:
    """Those of the slice of a panel that begins at kc, where a group does or in the only one."""
    return b.scales + kc // b.group * round_up(b.columns, kernels.vl) * scale_bytes(b.words)


cdef struct Target:
    # Where the product with one of the matrices goes.
    char *data
    Py_ssize_t row_stride
    const char *bias       # one element a column, or NULL


cdef struct Norm:
    const ta_kernels *kernels
    ta_norm how
    Py_ssize_t rows
    Rows x
    Rows residual          # data is NULL for none
    char *out              # may be x's rows
    Py_ssize_t out_stride


cdef struct Heads:
    # What heads go through once they are projected: a norm each, then the rotation of their position.
    const ta_kernels *kernels
    ta_norm norm           # of one head
    ta_rope rope           # rotary_dim is 0 for none; the strides of heads in x and out
    Array x                # [B, T, N, H], heads with contiguous columns
    Array out              # the same; may be x
    const char *cos        # rows of rotary_dim / 2, that of b and t at b * batch_rows + first[b] + t
    const char *sin
    Py_ssize_t batch_rows
    const int64_t *first   # [B], or NULL for zeros
    # Into a cache: row t < counts[b] goes to row (starts[b] + t) modulo the rows of out. The heads of a row
    # lie side by side then, and out may be of another type, which costs x its contents.
    const int64_t *starts  # [B], or NULL for zeros
    const int64_t *counts  # [B], or NULL for all


cdef struct Gemm:
    const ta_kernels *kernels
    Rows a
    Py_ssize_t rows
    Py_ssize_t depth
    const ta_norm *a_norm  # what each row of A goes through when it is packed, or NULL
    const Panel *panels
    Py_ssize_t panel_count
    bint has_words         # some panels may
    const ta_dots *dots    # what multiplies the panels, all words of one type; NULL for none
    int words              # that type: TA_WORDS_BF16, or TA_WORDS_INT8 for sums over the whole depth
    Py_ssize_t mr          # rows of a tile
    Py_ssize_t mc          # rows of a packed block of A
    const Target *targets
    Py_ssize_t row_parts   # items are row_parts x panel_parts
    Py_ssize_t panel_parts
    # What whole rows of the product go through, while hot if panel_parts is 1; NULL for nothing.
    const Norm *norm
    const Heads *heads[3]      # of q, k and v


cdef void split_gemm(Gemm *g, int threads) noexcept nogil:
    """Decides the work items: columns for few rows, so that each thread reads its share of B once.

    Few are up to 8 register tiles a thread: if each read all of B, that would take longer than what it
    multiplies with it.
    """
    g.mr = g.kernels.gemm_mr if g.dots == NULL else TA_DOT_ROWS
    g.mc = g.kernels.gemm_mc if g.dots == NULL else DOT_MC
    if g.rows < 8 * g.kernels.gemm_mr * threads:
        g.row_parts = 1
        g.panel_parts = min(threads, g.panel_count)
    else:
        g.row_parts = threads * ceil_div(g.rows, threads * g.mc)
        g.panel_parts = 1


cdef Py_ssize_t gemm_items(const Gemm *g) noexcept nogil:
    return g.row_parts * g.panel_parts if g.rows else 0


cdef inline Py_ssize_t word_count(Py_ssize_t elements, int words=TA_WORDS_BF16) noexcept nogil:
    """Words of so many elements, in whole steps of dot products."""
    return ceil_div(elements, TA_WORD_ROWS(words) * TA_DOT_WORDS) * TA_DOT_WORDS


cdef Py_ssize_t a_bytes(const Gemm *g, Py_ssize_t rows, Py_ssize_t depth) noexcept nogil:
    """Bytes of so many packed rows of A."""
    if g.dots == NULL:
        return g.kernels.itemsize * rows * depth
    return sizeof(uint32_t) * round_up(rows, TA_DOT_LOT) * word_count(depth, g.words)


cdef bint sums_bytes(const Gemm *g) noexcept nogil:
    """Whether A becomes int8, with a scale for each row, and its products are summed up exactly."""
    return g.dots != NULL and g.words == TA_WORDS_INT8


cdef Py_ssize_t whole_depth(const Gemm *g) noexcept nogil:
    """Bytes of a block of A up to which it is packed over the whole depth."""
    if sums_bytes(g):
        return PY_SSIZE_T_MAX
    return WHOLE_DEPTH if g.dots == NULL else DOT_WHOLE_DEPTH


cdef Py_ssize_t slice_depth(const Gemm *g) noexcept nogil:
    """Rows of B of a slice."""
    return g.depth if sums_bytes(g) else GEMM_KC


cdef Py_ssize_t packed_size(const Gemm *g) noexcept nogil:
    """Bytes of packed A that a thread needs."""
    return round_up(max(
        a_bytes(g, g.mr, g.depth),
        a_bytes(g, g.mc, min(<Py_ssize_t>GEMM_KC, g.depth)),
        min(whole_depth(g), a_bytes(g, g.mc, g.depth)),
    ) + g.kernels.vl * g.kernels.itemsize, CACHE_LINE)


cdef Py_ssize_t slice_size(const Gemm *g) noexcept nogil:
    """Bytes of a slice of a panel that is converted from words: the second-level cache holds it. Where rows
    of A become int8: of their scales, and of one of them as floats and as bytes.
    """
    if sums_bytes(g):
        return round_up((g.mc + g.depth) * sizeof(float) + 4 * word_count(g.depth, g.words), CACHE_LINE)
    if not g.has_words or g.dots != NULL:
        return 0
    return min(<Py_ssize_t>GEMM_KC, g.depth) * g.kernels.gemm_nr * g.kernels.itemsize


cdef Py_ssize_t gemm_scratch(const Gemm *g) noexcept nogil:
    """Bytes that a thread needs: packed A, a slice of B and a block of rows that are normalised first."""
    cdef Py_ssize_t rows = min(g.mc, g.rows) if g.a_norm != NULL else 0
    return packed_size(g) + slice_size(g) + rows * (g.depth + SKEW) * g.kernels.itemsize


cdef Rows normalise_a(const Gemm *g, Py_ssize_t row, Py_ssize_t count, char *memory) noexcept nogil:
    """Rows [row, row + count) of A, normalised into `memory`: a block that the second-level cache holds."""
    cdef Py_ssize_t i, itemsize = g.kernels.itemsize, stride = g.depth + SKEW
    for i in range(count):
        g.kernels.add_norm_row(memory + i * stride * itemsize, row_at(&g.a, row + i, itemsize), NULL,
                               g.a_norm)
    return Rows(memory, count, 0, stride, 1)


cdef void pack_a(const ta_kernels *kernels, const Rows *a, Py_ssize_t row, Py_ssize_t count,
                 Py_ssize_t tiles, Py_ssize_t pc, Py_ssize_t depth, char *packed) noexcept nogil:
    """Packs A[row : row + count, pc : pc + depth], one register tile after the other."""
    cdef Py_ssize_t itemsize = kernels.itemsize, tile, i, begin, end
    cdef const void *rows[TA_MAX_ROWS]
    for tile in range(tiles):
        begin = tile * count // tiles
        end = (tile + 1) * count // tiles
        for i in range(begin, end):
            rows[i - begin] = row_at(a, row + i, itemsize) + pc * a.column_stride * itemsize
        kernels.pack_rows[TA_REAL](packed + begin * depth * itemsize, rows, <int>(end - begin), depth,
                                   a.column_stride)


cdef void round_a(const Gemm *g, const Rows *a, Py_ssize_t row, Py_ssize_t count, Py_ssize_t pc,
                  Py_ssize_t depth, char *packed) noexcept nogil:
    """Packs the same as words of bfloat16: [lot][step][row] of TA_DOT_WORDS each."""
    cdef Py_ssize_t itemsize = g.kernels.itemsize, lot = TA_DOT_LOT * word_count(depth), i, at
    for i in range(count):
        at = i // TA_DOT_LOT * lot + i % TA_DOT_LOT * TA_DOT_WORDS
        g.kernels.round_row(
            g.dots, <uint16_t *>(packed + at * sizeof(uint32_t)), 2 * TA_DOT_LOT * TA_DOT_WORDS,
            <const float *>(row_at(a, row + i, itemsize) + pc * a.column_stride * itemsize), depth,
            a.column_stride)


cdef void quantize_a(const Gemm *g, const Rows *a, Py_ssize_t row, Py_ssize_t count, char *packed,
                     char *memory) noexcept nogil:
    """Packs whole rows as words of int8, in the same order; their scales come first in `memory`."""
    cdef Py_ssize_t itemsize = g.kernels.itemsize, words = word_count(g.depth, g.words), i, at, step
    cdef Py_ssize_t size = TA_DOT_WORDS * sizeof(uint32_t)
    cdef float *scales = <float *>memory
    cdef char *floats = memory + g.mc * sizeof(float)
    cdef char *bytes = floats + g.depth * sizeof(float)
    cdef const char *source
    memset(bytes, 0, words * sizeof(uint32_t))
    for i in range(count):
        source = row_at(a, row + i, itemsize)
        if a.column_stride != 1:
            g.kernels.load_row[TA_REAL](floats, source, g.depth, a.column_stride)
            source = floats
        g.kernels.quantize_row(bytes, scales + i, source, g.depth)
        at = (i // TA_DOT_LOT * words + i % TA_DOT_LOT) * size
        for step in range(words // TA_DOT_WORDS):
            memcpy(packed + at + step * TA_DOT_LOT * size, bytes + step * size, size)


cdef int panels_to_walk(const ta_kernels *kernels, const Panel *b, Py_ssize_t count,
                        Py_ssize_t rows) noexcept nogil:
    """How many whole panels from b on a single register tile walks; 0 if there are more or fewer."""
    cdef int panels = TA_WALK_PANELS(<int>rows, kernels.walk_rows)
    if rows > kernels.gemm_mr or panels > count or b.words != TA_WORDS_NONE:
        return 0
    if b[panels - 1].matrix != b.matrix or b[panels - 1].columns != kernels.gemm_nr:
        return 0
    return panels


cdef void gemm_item(const Gemm *g, Py_ssize_t item, char *memory) noexcept nogil:
    """C[rows, columns] = A[rows, depth] B[depth, columns] + bias for a share of rows and of panels."""
    cdef const ta_kernels *kernels = g.kernels
    cdef Py_ssize_t itemsize = kernels.itemsize
    cdef Py_ssize_t row_part = item // g.panel_parts, panel_part = item % g.panel_parts
    cdef Py_ssize_t row_end = (row_part + 1) * g.rows // g.row_parts
    cdef Py_ssize_t panel_begin = panel_part * g.panel_count // g.panel_parts
    cdef Py_ssize_t panel_end = (panel_part + 1) * g.panel_count // g.panel_parts
    cdef Py_ssize_t ic, rows, tiles, pc, pack_depth, panel, kc, tile, begin, bits, a_row
    cdef char *packed = memory
    cdef char *converted = memory + packed_size(g)
    cdef Rows a = g.a
    cdef const Panel *b
    cdef const Target *c
    cdef ta_gemm_tile t
    cdef ta_words words
    cdef bint streams
    cdef const ta_dots *dots = g.dots
    cdef Py_ssize_t a_lot = 0                                   # words of a lot of rows

    if dots != NULL:
        dots.begin()
    ic = row_part * g.rows // g.row_parts
    while ic < row_end:                                         # blocks of rows
        rows = min(g.mc, row_end - ic)
        tiles = ceil_div(rows, g.mr)
        pack_depth = g.depth
        if tiles > 1 and a_bytes(g, rows, g.depth) > whole_depth(g):
            pack_depth = min(<Py_ssize_t>GEMM_KC, g.depth)
        a_row = ic
        if g.a_norm != NULL:
            a = normalise_a(g, ic, rows, converted + slice_size(g))
            a_row = 0
        pc = 0
        while True:                                             # slices of the contracted axis
            pack_depth = min(pack_depth, g.depth - pc)
            a_lot = TA_DOT_LOT * word_count(pack_depth, g.words)
            if sums_bytes(g):
                quantize_a(g, &a, a_row, rows, packed, converted)
            elif dots != NULL:
                round_a(g, &a, a_row, rows, pc, pack_depth, packed)
            else:
                pack_a(kernels, &a, a_row, rows, tiles, pc, pack_depth, packed)
            panel = panel_begin
            while panel < panel_end:                            # panels of columns
                b = g.panels + panel
                t.panels = panels_to_walk(kernels, b, panel_end - panel, rows)
                c = g.targets + b.matrix
                # Few rows take words as they are; for more, a slice is converted once for all tiles.
                streams = (dots == NULL and b.words != TA_WORDS_NONE and rows <= kernels.walk_rows
                           and b.columns == kernels.gemm_nr)
                t.columns = b.columns
                bits = panel_bits(kernels, b)
                t.c_stride = c.row_stride
                t.panel_stride = g.depth * kernels.gemm_nr
                kc = pc
                while True:
                    t.depth = min(slice_depth(g), pc + pack_depth - kc)
                    t.b = b.data + kc * bits // 8
                    t.accumulate = kc > 0
                    t.bias = NULL
                    if c.bias != NULL and kc + t.depth == g.depth:
                        t.bias = c.bias + b.column * itemsize
                    # The tiles share the prefetching of what is read a slice later; a single one has read
                    # its slice in no time, and looks less far ahead.
                    t.next_bytes = ceil_div(t.depth * bits, 8 * tiles)
                    if t.panels > 0 or (panel + 1 == panel_end and kc + t.depth == pc + pack_depth):
                        t.next = NULL
                        t.next_bytes = 0
                    elif tiles == 1:
                        t.next = <const void *>(        # by way of a number: it may lie behind all of B
                            <uintptr_t>t.b + (STREAM_AHEAD if dots == NULL else DOT_AHEAD))
                    elif pack_depth == g.depth:                 # one panel lies behind the other
                        t.next = <const char *>t.b + min(slice_depth(g), pack_depth) * bits // 8
                    else:
                        t.next = b[1].data + pc * panel_bits(kernels, b + 1) // 8
                    if dots == NULL and b.words != TA_WORDS_NONE:
                        words = ta_words(t.b, scales_at(kernels, b, kc), b.group, b.unit)
                        if not streams:
                            kernels.convert_panel[b.words](converted, &words, t.depth,
                                                           round_up(b.columns, kernels.vl))
                            t.b = converted
                    for tile in range(tiles):                   # register tiles
                        if dots != NULL:
                            begin = tile * g.mr
                            t.rows = <int>min(g.mr, rows - begin)
                            t.a = packed + (begin // TA_DOT_LOT * a_lot
                                            + (kc - pc) // 2 * TA_DOT_LOT) * sizeof(uint32_t)
                        else:
                            begin = tile * rows // tiles
                            t.rows = <int>((tile + 1) * rows // tiles - begin)
                            t.a = packed + (begin * pack_depth + (kc - pc) * t.rows) * itemsize
                        t.c = c.data + ((ic + begin) * c.row_stride + b.column) * itemsize
                        if sums_bytes(g):
                            kernels.gemm_bytes(&t, a_lot, <const float *>converted + begin,
                                               <const float *>b.scales, dots)
                        elif dots != NULL:
                            kernels.gemm_dots(&t, a_lot, dots)
                        elif streams:
                            kernels.stream_tile[b.words](&t, &words)
                        else:
                            kernels.gemm_tile(&t)
                        if t.next != NULL:
                            t.next = <const void *>(<uintptr_t>t.next + t.next_bytes)
                    kc = kc + t.depth
                    if kc >= pc + pack_depth:
                        break
                panel = panel + max(t.panels, 1)
            pc = pc + pack_depth
            if pc >= g.depth:
                break
        if g.panel_parts == 1:
            finish_product(g, ic, ic + rows, g.rows)
        ic = ic + rows
    if dots != NULL:
        dots.end()


cdef bint is_unfinished(const Gemm *g) noexcept nogil:
    """Whether finish_item has anything to do when all items are done."""
    return g.rows > 0 and g.panel_parts > 1 and (
        g.norm != NULL or g.heads[0] != NULL or g.heads[1] != NULL or g.heads[2] != NULL)


cdef void finish_item(const Gemm *g, Py_ssize_t item, Py_ssize_t items) noexcept nogil:
    if is_unfinished(g):
        finish_product(g, item, item + 1, items)


cdef void finish_product(const Gemm *g, Py_ssize_t begin, Py_ssize_t end, Py_ssize_t of) noexcept nogil:
    """What whole rows go through: shares [begin, end) of `of` equal ones."""
    cdef int i
    if g.norm != NULL:
        norm_rows(g.norm, begin * g.rows // of, end * g.rows // of)
    for i in range(3):
        if g.heads[i] != NULL:
            finish_heads(g.heads[i], begin, end, of)


# ------------------------------------------------------------------ LayerNorm(X + Z)

cdef void norm_rows(const Norm *n, Py_ssize_t begin, Py_ssize_t end) noexcept nogil:
    """out[rows, D] = norm(x[rows, D] + residual[rows, D]) for rows [begin, end)."""
    cdef Py_ssize_t row, itemsize = n.kernels.itemsize
    cdef const char *residual = NULL
    for row in range(begin, end):
        if n.residual.data != NULL:
            residual = row_at(&n.residual, row, itemsize)
        n.kernels.add_norm_row(n.out + row * n.out_stride * itemsize, row_at(&n.x, row, itemsize),
                               residual, &n.how)


cdef void norm_item(const Norm *n, Py_ssize_t item, Py_ssize_t items) noexcept nogil:
    norm_rows(n, item * n.rows // items, (item + 1) * n.rows // items)


# ------------------------------------------------------------------ RoPE(norm(Q))

cdef void finish_heads(const Heads *h, Py_ssize_t begin, Py_ssize_t end, Py_ssize_t of) noexcept nogil:
    """Shares [begin, end) of `of` equal ones of all heads, counted in the order of [B, T, N]."""
    cdef Py_ssize_t T = h.x.shape[1], N = h.x.shape[2]
    cdef Py_ssize_t heads = h.x.shape[0] * T * N, head = begin * heads // of, b, t, count
    heads = end * heads // of
    while head < heads:                                         # the heads of one position
        b = head // N // T
        t = head // N % T
        count = min(N - head % N, heads - head)
        if h.counts == NULL or t < h.counts[b]:
            finish_position(h, b, t, head % N, count)
        head = head + count


cdef void finish_position(const Heads *h, Py_ssize_t b, Py_ssize_t t, Py_ssize_t n,
                          Py_ssize_t count) noexcept nogil:
    """Heads [n, n + count) of one position."""
    cdef const ta_kernels *kernels = h.kernels
    cdef Py_ssize_t itemsize = kernels.itemsize, i, angles
    cdef Py_ssize_t row = t if h.starts == NULL else (h.starts[b] + t) % h.out.shape[1]
    cdef bint is_stored = h.out.storage != TA_REAL
    cdef ta_rope rope = h.rope
    cdef char *x = at3(&h.x, b, t, n, itemsize)
    cdef char *to = at3(&h.out, b, row, n, size_of(kernels, &h.out))
    cdef char *out = x if is_stored else to
    rope.heads = count
    if h.norm.normalize:
        for i in range(count):
            kernels.add_norm_row(out + i * rope.dst_stride * itemsize, x + i * rope.src_stride * itemsize,
                                 NULL, &h.norm)
        x = out
        rope.src_stride = rope.dst_stride
    if rope.rotary_dim > 0:
        angles = b * h.batch_rows + t + (0 if h.first == NULL else h.first[b])
        angles = angles * (rope.rotary_dim // 2) * itemsize
        kernels.rotate_row(out, x, h.cos + angles, h.sin + angles, &rope)
    elif out != x:
        memcpy(out, x, count * rope.head_dim * itemsize)
    if h.out.storage == TA_INT8:
        for i in range(count):
            kernels.quantize_row(to + i * rope.head_dim, scales_of(&h.out, b, row, n + i),
                                 out + i * rope.head_dim * itemsize, rope.head_dim)
    elif is_stored:
        kernels.store_row[h.out.storage](to, out, count * rope.head_dim)


# ------------------------------------------------------------------ softmax(Q K^T) V

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


cdef inline char *at3(const Array *x, Py_ssize_t i, Py_ssize_t j, Py_ssize_t l,
                      Py_ssize_t itemsize) noexcept nogil:
    return x.data + (i * x.stride[0] + j * x.stride[1] + l * x.stride[2]) * itemsize


cdef inline float *scales_of(const Array *x, Py_ssize_t i, Py_ssize_t j, Py_ssize_t l) noexcept nogil:
    """Those of rows i, j, l, then i, j + 1, l, and so on; NULL if rows have none."""
    return NULL if x.scales == NULL else x.scales + i * x.scale_stride[0] + j + l * x.scale_stride[1]


cdef inline Py_ssize_t position_of(const Attention *a, Py_ssize_t t) noexcept nogil:
    return t if a.positions == NULL else a.positions[t]


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


# ------------------------------------------------------------------ sequences of several lengths

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


# ------------------------------------------------------------------ merging by the LSE

cdef struct Merge:
    const ta_kernels *kernels
    Py_ssize_t part_count
    const Array *outs      # [part_count] of [I, J, L, Hv]
    const Array *lses      # [part_count] of [I, J, L]
    char *out              # [I, J, L, Hv], contiguous
    char *lse


cdef Py_ssize_t merge_scratch(const Merge *m, char *memory, ta_state **parts,
                              char **weights) noexcept nogil:
    """Lays out a thread's scratch from `memory` on; returns its size in bytes."""
    cdef uintptr_t cursor = <uintptr_t>memory
    parts[0] = <ta_state *>carve(&cursor, m.part_count * sizeof(ta_state))
    weights[0] = carve(&cursor, m.part_count * m.kernels.vl * m.kernels.itemsize)
    return cursor - <uintptr_t>memory


cdef void merge_states_item(const void *plan, Py_ssize_t item, Py_ssize_t items,
                            char *memory) noexcept nogil:
    """out[rows, Hv] and lse[rows] from those of all parts, for a share of the I * J * L rows."""
    cdef const Merge *m = <const Merge *>plan
    cdef const Array *first = m.outs
    cdef Py_ssize_t J = first.shape[1], L = first.shape[2], rows = first.shape[0] * J * L
    cdef Py_ssize_t lse_size = m.kernels.itemsize, size = size_of(m.kernels, first)
    cdef Py_ssize_t row = item * rows // items, end = (item + 1) * rows // items, i, j, at, p
    cdef ta_merge_tile t
    cdef ta_state *parts
    cdef char *weights
    merge_scratch(m, memory, &parts, &weights)
    t.columns = first.shape[3]
    t.parts = parts
    t.part_count = m.part_count
    t.weights = weights
    while row < end:                        # as many rows of the last axis as a vector has lanes
        i = row // (J * L)
        j = row // L % J
        at = row % L
        t.rows = <int>min(<Py_ssize_t>m.kernels.vl, min(L - at, end - row))
        for p in range(m.part_count):
            parts[p] = ta_state(at3(m.outs + p, i, j, at, size), m.outs[p].stride[2], m.outs[p].stride[3],
                                at3(m.lses + p, i, j, at, lse_size), m.lses[p].stride[2])
        t.out = m.out + row * t.columns * size
        t.lse = m.lse + row * lse_size
        m.kernels.merge_states[first.storage](&t)
        row = row + t.rows


# ------------------------------------------------------------------ a cache of keys and values

# A ring has a multiple of so many slots: then no block of keys reaches over its end.
KEY_BLOCK = TA_KEY_BLOCK


cdef struct Append:
    const ta_kernels *kernels
    Array[2] source        # k[B, T, K, H] and v[B, T, K, Hv]
    Array[2] target        # [B, slots, K, H] and [B, slots, K, Hv], heads with contiguous columns
    const int64_t *starts  # [B]
    const int64_t *counts  # [B]


cdef void append_item(const void *plan, Py_ssize_t item, Py_ssize_t items, char *row) noexcept nogil:
    """A share of the B * T rows [K, H] of k, and then of those [K, Hv] of v, into their slots."""
    cdef const Append *a = <const Append *>plan
    cdef const ta_kernels *kernels = a.kernels
    cdef Py_ssize_t T = a.source[0].shape[1], each = a.source[0].shape[0] * T, at, b, t, head, width
    cdef const Array *source
    cdef const Array *target
    cdef char *to
    cdef char *reals
    for at in range(item * 2 * each // items, (item + 1) * 2 * each // items):
        source = &a.source[at // each]
        target = &a.target[at // each]
        b = at % each // T
        t = at % T
        if t >= a.counts[b]:
            continue
        width = source.shape[3]
        for head in range(source.shape[2]):
            to = at3(target, b, (a.starts[b] + t) % target.shape[1], head, size_of(kernels, target))
            reals = to if target.storage == TA_REAL else row
            kernels.load_row[source.storage](
                reals, at3(source, b, t, head, size_of(kernels, source)), width, source.stride[3])
            if target.storage == TA_INT8:
                kernels.quantize_row(
                    to, scales_of(target, b, (a.starts[b] + t) % target.shape[1], head), reals, width)
            elif target.storage != TA_REAL:
                kernels.store_row[target.storage](to, reals, width)


# ------------------------------------------------------------------ instruction sets

cdef const ta_isa *active = NULL


def compiled_isas():
    """Names of the instruction sets compiled in, best first."""
    return tuple((<bytes>ta_isas[i].name).decode() for i in range(ta_isa_count))


def available_isas():
    """Names of those that this machine can run, best first."""
    return tuple((<bytes>ta_isas[i].name).decode() for i in range(ta_isa_count)
                 if ta_isas[i].supported())


def active_isa():
    return (<bytes>active.name).decode()


def select_isa(str name):
    """Makes later calls, and weights packed later, use one of available_isas()."""
    global active
    for i in range(ta_isa_count):
        if (<bytes>ta_isas[i].name).decode() == name and ta_isas[i].supported():
            active = &ta_isas[i]
            return
    raise ValueError(f"no such instruction set here: {name!r}; available: {', '.join(available_isas())}")


cdef const ta_dots *granted = NULL


cdef const ta_dots *usable_dots() noexcept:
    """Dot products of the active instruction set; NULL for none, or if the system refuses them."""
    global granted
    if active.dots != granted and active.dots != NULL and active.dots.allowed():
        granted = active.dots
    return granted if active.dots == granted else NULL


cdef const ta_kernels *kernels_for(Py_ssize_t itemsize) except NULL:
    return active.f32 if itemsize == 4 else active.f64


def kernel_table(str dtype):
    """Sizes and addresses of the active ISA's kernels, through which the tests call them."""
    cdef const ta_kernels *k = active.f32 if dtype == "float32" else active.f64
    return {
        "vl": k.vl, "gemm_mr": k.gemm_mr, "gemm_nr": k.gemm_nr, "gemm_mc": k.gemm_mc,
        "walk_rows": k.walk_rows,
        "attention_mr": k.attention_mr, "attention_nr": k.attention_nr,
        "weight_stride": TA_WEIGHT_STRIDE,
        "pack_rows": [<uintptr_t>k.pack_rows[i] for i in range(TA_STORAGES)],
        "pack_columns": [<uintptr_t>k.pack_columns[i] for i in range(TA_STORAGES)],
        "load_row": [<uintptr_t>k.load_row[i] for i in range(TA_STORAGES)],
        "finish_row": [<uintptr_t>k.finish_row[i] for i in range(TA_STORAGES)],
        "merge_states": [<uintptr_t>k.merge_states[i] for i in range(TA_STORAGES)],
        "store_row": [<uintptr_t>k.store_row[i] for i in range(TA_STORAGES)],
        "quantize_row": <uintptr_t>k.quantize_row,
        "scale_columns": <uintptr_t>k.scale_columns,
        "gemm_tile": <uintptr_t>k.gemm_tile,
        "pack_words": [<uintptr_t>k.pack_words[i] for i in range(TA_WORDS_TYPES)],
        "stream_tile": [<uintptr_t>k.stream_tile[i] for i in range(TA_WORDS_TYPES)],
        "convert_panel": [<uintptr_t>k.convert_panel[i] for i in range(TA_WORDS_TYPES)],
        "pack_halves": <uintptr_t>k.pack_halves,
        "round_row": <uintptr_t>k.round_row,
        "pack_key_words": <uintptr_t>k.pack_key_words,
        "pack_value_words": <uintptr_t>k.pack_value_words,
        "drop_strays": <uintptr_t>k.drop_strays,
        "dots": <uintptr_t>active.dots,
        "gemm_dots": <uintptr_t>k.gemm_dots,
        "gemm_bytes": <uintptr_t>k.gemm_bytes,
        "weigh_dots": <uintptr_t>k.weigh_dots,
        "round_weights": <uintptr_t>k.round_weights,
        "value_dots": <uintptr_t>k.value_dots,
        "dot_rounds": <uintptr_t>k.dot_rounds,
        "start_row": <uintptr_t>k.start_row,
        "weigh_tile": <uintptr_t>k.weigh_tile,
        "weigh_few": <uintptr_t>k.weigh_few,
        "add_rows": <uintptr_t>k.add_rows,
        "value_tile": <uintptr_t>k.value_tile,
        "load_key_options": <uintptr_t>k.load_key_options,
        "trim_tile": <uintptr_t>k.trim_tile,
        "copy_finite": <uintptr_t>k.copy_finite,
        "add_strays": <uintptr_t>k.add_strays,
        "merge_row": <uintptr_t>k.merge_row,
        "all_finite": <uintptr_t>k.all_finite,
        "add_norm_row": <uintptr_t>k.add_norm_row,
        "rotate_row": <uintptr_t>k.rotate_row,
        "fma_rounds": <uintptr_t>k.fma_rounds,
        "read_all": <uintptr_t>k.read_all,
    }


# ------------------------------------------------------------------ threads

def allowed_threads(int limit):
    """What OMP_NUM_THREADS, OpenMP and the CPU affinity allow, asked anew each time; at most `limit`."""
    cdef int threads = min(omp_get_max_threads(), omp_get_thread_limit(), limit), cpus = ta_allowed_cpus()
    # A runtime that binds threads (OMP_PROC_BIND) has bound this one to a CPU of its own.
    if cpus == 0 or omp_get_proc_bind() != 0:
        return threads
    return min(threads, cpus)


cdef enum:
    # Below this much arithmetic (some 20 us on one core) waking another thread costs more than it
    # saves: an OpenMP region costs 1 us among others and 27 us after a pause.
    FLOPS_WORTH_A_THREAD = 1 << 21
    # What an element counts that no product is made of: as in a LayerNorm (see cost.py).
    FLOPS_AN_ELEMENT = 8


cdef int team_size(int threads, double flops) noexcept:
    # The child of a fork has lost the OpenMP threads and would wait for them for ever.
    if threads < 1 or flops < FLOPS_WORTH_A_THREAD or ta_is_forked_child():
        return 1
    # Beyond a few for each CPU threads only wait, and a failed thread creation would end the process.
    return min(threads, max(16, 4 * omp_get_num_procs()), omp_get_thread_limit())


ctypedef void (*Item)(const void *plan, Py_ssize_t item, Py_ssize_t items, char *memory) noexcept nogil


cdef inline void do_alone(Item do_item, const void *plan, Py_ssize_t item, Py_ssize_t items,
                          char *memory) noexcept nogil:
    """Leaves the thread's floating-point state as it was."""
    cdef ta_floats before = ta_take_floats()
    do_item(plan, item, items, memory)
    ta_give_floats(before)


cdef void deal(Item do_item, const void *plan, Py_ssize_t items, int threads, char *memory=NULL,
               Py_ssize_t each=0) noexcept nogil:
    """Does a plan's items, of which none waits for another; each thread has so many bytes of memory."""
    cdef Py_ssize_t i
    if threads <= 1:  # without a region: making a team, even of one, takes as long as a small call
        for i in range(items):
            do_alone(do_item, plan, i, items, memory)
    else:
        for i in prange(items, num_threads=threads, schedule="dynamic"):
            do_alone(do_item, plan, i, items, memory + threadid() * each)


cdef void deal_gemm(const void *plan, Py_ssize_t item, Py_ssize_t _items, char *memory) noexcept nogil:
    gemm_item(<const Gemm *>plan, item, memory)


cdef void deal_finish(const void *plan, Py_ssize_t item, Py_ssize_t items, char *_memory) noexcept nogil:
    finish_item(<const Gemm *>plan, item, items)


cdef void deal_norm(const void *plan, Py_ssize_t item, Py_ssize_t items, char *_memory) noexcept nogil:
    norm_item(<const Norm *>plan, item, items)


cdef void deal_heads(const void *plan, Py_ssize_t item, Py_ssize_t items, char *_memory) noexcept nogil:
    finish_heads(<const Heads *>plan, item, item + 1, items)


cdef double do_rounds(const ta_kernels *k, const ta_dots *dots, Py_ssize_t rounds) noexcept nogil:
    """Rounds of dot products, or of multiply-adds without `dots`; returns their operations."""
    cdef double operations
    if dots == NULL:
        return k.fma_rounds(rounds)
    dots.begin()
    operations = k.dot_rounds(dots, rounds)
    dots.end()
    return operations


cdef double measure_peak(const ta_kernels *k, const ta_dots *dots, Py_ssize_t rounds, int threads):
    """The best of several runs, in GFLOP/s."""
    cdef double start, seconds, best = 0, total
    cdef int _thread, _attempt
    threads = team_size(threads, 1e12)
    for _attempt in range(5):
        total = 0
        start = omp_get_wtime()
        for _thread in prange(threads, nogil=True, num_threads=threads, schedule="static",
                              chunksize=1):
            total += do_rounds(k, dots, rounds)
        seconds = omp_get_wtime() - start
        best = max(best, total / seconds * 1e-9)
    return best


def measure_fma_peak(str dtype, int threads):
    """Of independent multiply-adds in registers, in GFLOP/s."""
    return measure_peak(active.f32 if dtype == "float32" else active.f64, NULL, 1_000_000, threads)


def measure_dot_peak(int threads):
    """Of bfloat16 dot products in the first-level cache, in GFLOP/s; 0 where there are none."""
    cdef const ta_dots *dots = usable_dots()
    # A round is 64 cycles of AMX, and a thousand of AVX512_BF16.
    return 0.0 if dots == NULL else measure_peak(active.f32, dots, 30_000, threads)


def measure_read_bandwidth(source, int threads):
    """Read a contiguous float32 or float64 array once, each thread its share; in GB/s."""
    cdef const ta_kernels *k = kernels_for(source.itemsize)
    cdef Array array
    cdef Py_ssize_t i, step = 8 * k.vl, steps = source.size // step, begin, end
    cdef double start, total = 0
    read_array(source, &array)
    threads = team_size(threads, 1e12)
    start = omp_get_wtime()
    for i in prange(threads, nogil=True, num_threads=threads, schedule="static", chunksize=1):
        begin = i * steps // threads
        end = (i + 1) * steps // threads
        total += k.read_all(array.data + begin * step * k.itemsize, (end - begin) * step)
    return steps * step * k.itemsize / (omp_get_wtime() - start) * 1e-9


# ------------------------------------------------------------------ packed weights

# No group of quantised weights may lie in two slices.
SLICE_DEPTH = GEMM_KC


cdef struct Source:
    # A matrix as it comes: floats, or integers and what makes weights of them.
    int words              # what it is packed as: a ta_weights
    Array values           # [depth, columns]
    Array scales           # [groups, columns]
    Array minima           # the same, where there are any
    Py_ssize_t group
    double unit


cdef int read_source(object matrix, bint bfloat16, Source *source) except -1:
    """Reads an array [depth, columns] or a QuantizedMatrix [columns, depth] (see quantized.py)."""
    source.scales.shape[0] = 0
    source.unit = 1
    if not hasattr(matrix, "bits"):
        read_array(matrix, &source.values)
        source.words = TA_WORDS_BF16 if bfloat16 else TA_WORDS_NONE
        source.group = source.values.shape[0]
        return 0
    read_array(matrix._values.T, &source.values)
    read_array(matrix._scales.T, &source.scales)
    source.words = TA_WORDS_INT8 if matrix.bits == 8 else TA_WORDS_INT4
    if source.words == TA_WORDS_INT4:
        read_array(matrix._minima.T, &source.minima)
    source.group = matrix.group_size
    source.unit = matrix._unit
    return 0


cdef class PackedMatrix:
    """Matrices [depth, columns] side by side, packed once for gemm_item.

    Panels of gemm_nr columns, each over the full depth, so that a slice of the contracted axis is an
    offset and a single row reads one stream:

        panel 0          panel 1                panel n: the last of a matrix is narrower
        [depth][nr]      [depth][nr]     ...    [depth][columns rounded up to whole vectors]

    An array is packed as it is or as bfloat16, a QuantizedMatrix as its integers, whose scales lie before
    each panel. Where all is bfloat16, it is multiplied in dot products if the CPU has them, unless float32
    is asked for; so is int8 that has a scale for each column, where `int8` is.
    """

    cdef const ta_kernels *kernels
    cdef char *memory
    cdef Panel *panels
    cdef Py_ssize_t[4] first_panel        # of each matrix, and the end
    cdef bint has_words
    cdef const ta_dots *dots
    cdef int words              # what all is packed as, if there are dots
    cdef readonly Py_ssize_t depth
    cdef readonly tuple columns           # of each matrix
    cdef readonly Py_ssize_t nbytes

    def __cinit__(self, *matrices, bint bfloat16=False, bint float32=False, bint int8=False):
        cdef Source[3] b
        cdef bint all_halves = not float32, all_bytes = int8
        cdef Py_ssize_t i, count = 0, matrix_count = len(matrices)
        cdef ta_floats before
        if not 1 <= matrix_count <= 3:
            raise ValueError(f"one to three matrices are packed side by side, not {matrix_count}")
        for i in range(matrix_count):
            read_source(matrices[i], bfloat16, &b[i])
            self.has_words = self.has_words or b[i].words != TA_WORDS_NONE
            all_halves = all_halves and b[i].words == TA_WORDS_BF16
            all_bytes = (all_bytes and b[i].words == TA_WORDS_INT8
                         and b[i].values.shape[0] <= min(b[i].group, <Py_ssize_t>EXACT_DEPTH))
        self.words = TA_WORDS_INT8 if all_bytes else TA_WORDS_BF16
        self.dots = usable_dots() if all_halves or all_bytes else NULL
        self.kernels = kernels_for(4 if self.has_words else matrices[0].itemsize)
        self.depth = b[0].values.shape[0]
        self.columns = tuple([b[i].values.shape[1] for i in range(matrix_count)])
        for i in range(matrix_count):
            require_possible(<double>self.kernels.itemsize * self.depth * (b[i].values.shape[1] + 64.0),
                             "packed weights")
            self.first_panel[i] = count
            count += ceil_div(b[i].values.shape[1], self.kernels.gemm_nr)
        self.first_panel[matrix_count] = count
        self.panels = <Panel *>ta_allocate(count * sizeof(Panel))
        if self.panels == NULL:
            raise MemoryError(f"could not allocate {count * sizeof(Panel)} bytes for panels")
        self.lay_out(b, matrix_count)
        self.memory = <char *>ta_allocate(self.nbytes)
        if self.memory == NULL:
            raise MemoryError(f"could not allocate {self.nbytes} bytes for packed weights")
        with nogil:
            before = ta_take_floats()
            for i in range(count):
                self.pack(&b[self.panels[i].matrix], &self.panels[i])
            ta_give_floats(before)

    cdef Py_ssize_t packed_depth(self, const Panel *panel) noexcept nogil:
        """In whole words, or steps of dot products."""
        return round_up(self.depth, TA_WORD_ROWS(panel.words) * (1 if self.dots == NULL else TA_DOT_WORDS))

    cdef void lay_out(self, const Source *b, Py_ssize_t matrix_count) noexcept nogil:
        """The panels of all matrices; where their parts will lie is counted from 0."""
        cdef Py_ssize_t i, column, width
        cdef uintptr_t cursor = 0
        cdef Panel *panel = self.panels
        for i in range(matrix_count):
            column = 0
            while column < b[i].values.shape[1]:
                panel.matrix = <int>i
                panel.column = column
                panel.columns = <int>min(<Py_ssize_t>self.kernels.gemm_nr, b[i].values.shape[1] - column)
                panel.words = b[i].words
                panel.group = b[i].group
                panel.unit = b[i].unit
                width = round_up(panel.columns, self.kernels.vl)
                panel.scales = <const char *>cursor
                cursor += b[i].scales.shape[0] * width * scale_bytes(panel.words)
                panel.data = <const char *>cursor
                cursor += self.packed_depth(panel) * panel_bits(self.kernels, panel) // 8
                column += panel.columns
                panel += 1
        self.nbytes = cursor

    cdef void pack(self, const Source *b, Panel *panel) noexcept nogil:
        cdef const ta_kernels *kernels = self.kernels
        cdef Py_ssize_t width = round_up(panel.columns, kernels.vl), size
        cdef char *data = self.memory + <uintptr_t>panel.data
        cdef char *scales = self.memory + <uintptr_t>panel.scales
        panel.data = data
        panel.scales = scales
        if b.words == TA_WORDS_NONE:
            kernels.pack_columns[TA_REAL](
                data, b.values.data + panel.column * b.values.stride[1] * kernels.itemsize, self.depth,
                panel.columns, width, b.values.stride[0], b.values.stride[1], 1.0)
            return
        if self.dots != NULL:  # what fills the last step counts
            memset(data, 0, self.packed_depth(panel) * panel_bits(kernels, panel) // 8)
        size = kernels.itemsize if b.words == TA_WORDS_BF16 else 1
        kernels.pack_words[b.words](
            data, b.values.data + panel.column * b.values.stride[1] * size, self.depth, panel.columns,
            width, b.values.stride[0], b.values.stride[1])
        size = scale_bytes(b.words)
        if b.words == TA_WORDS_INT8:
            pack_scales(&b.scales, panel, width, size, scales, size * width)
        elif b.words == TA_WORDS_INT4:
            pack_scales(&b.scales, panel, width, 2, scales, size * width)
            pack_scales(&b.minima, panel, width, 2, scales + 2 * width, size * width)

    def __dealloc__(self):
        ta_release(self.memory)
        ta_release(self.panels)


cdef void pack_scales(const Array *scales, const Panel *panel, Py_ssize_t width, Py_ssize_t size, char *to,
                      Py_ssize_t group_bytes) noexcept nogil:
    """A panel's columns of scales[groups, columns], elements of `size` bytes; zeros in what pads it."""
    cdef Py_ssize_t group, j
    for group in range(scales.shape[0]):
        memset(to, 0, width * size)
        for j in range(panel.columns):
            memcpy(to + j * size,
                   scales.data + (group * scales.stride[0] + (panel.column + j) * scales.stride[1]) * size,
                   size)
        to = to + group_bytes


cdef void plan_gemm(Gemm *g, PackedMatrix b, int begin, int end, const Target *targets, int threads):
    """A plan for matrices [begin, end) of b; g.a and g.rows are already set."""
    g.kernels = b.kernels
    g.depth = b.depth
    g.panels = b.panels + b.first_panel[begin]
    g.panel_count = b.first_panel[end] - b.first_panel[begin]
    g.has_words = b.has_words
    g.dots = b.dots
    g.words = b.words
    g.targets = targets - begin
    g.a_norm = NULL
    g.norm = NULL
    g.heads[0] = g.heads[1] = g.heads[2] = NULL
    split_gemm(g, threads)


cdef void read_rows(object source, Rows *rows, Py_ssize_t *count) except *:
    """The rows of an array [B, T, columns]."""
    cdef Array array
    read_array(source, &array)
    rows.data = array.data
    rows.inner = array.shape[1]
    rows.outer_stride = array.stride[0]
    rows.inner_stride = array.stride[1]
    rows.column_stride = array.stride[2] if array.shape[2] > 1 else 1
    count[0] = array.shape[0] * array.shape[1]


cdef Array whole_array(char *data, Py_ssize_t B, Py_ssize_t T, Py_ssize_t N, Py_ssize_t H) noexcept:
    cdef Array array
    array.data = data
    array.storage = TA_REAL
    array.scales = NULL
    array.axes = 4
    array.shape[0], array.shape[1], array.shape[2], array.shape[3] = B, T, N, H
    array.stride[0], array.stride[1], array.stride[2], array.stride[3] = T * N * H, N * H, H, 1
    return array


# ------------------------------------------------------------------ operations on arrays

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


cdef class Memory:
    """Uninitialised bytes on huge pages, as a buffer; released with its last view."""

    cdef void *data
    cdef Py_ssize_t nbytes

    def __cinit__(self, nbytes):
        require_possible(nbytes, "a cache")
        self.nbytes = nbytes
        self.data = ta_allocate(nbytes)
        if self.data == NULL:
            raise MemoryError(f"could not allocate {nbytes} bytes")

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.data, self.nbytes, False, flags)

    def __dealloc__(self):
        ta_release(self.data)


def append(k, v, keys, values, key_scales, value_scales, starts, counts, int threads):
    """Rows t < counts[b] of k[B, T, K, H] and v[B, T, K, Hv] into keys and values [B, slots, K, ...].

    Row t of sequence b goes to slot (starts[b] + t) modulo slots. The types may differ within float32,
    float16 and bfloat16, and become int8 with scales[B, slots, K], None for others. All is checked by the
    caller.
    """
    cdef Append a
    cdef Array[4] written
    cdef int count
    cdef Scratch scratch
    cdef Py_ssize_t items, each
    a.kernels = kernels_for(8 if k.itemsize == 8 else 4)
    count = read_written(a.kernels, keys, values, key_scales, value_scales, written)
    k = read_apart(a.kernels, k, &a.source[0], written, count)
    v = read_apart(a.kernels, v, &a.source[1], written, count)
    read_kept(a.kernels, keys, key_scales, &a.target[0], True)
    read_kept(a.kernels, values, value_scales, &a.target[1], True)
    a.starts = read_integers(starts)
    a.counts = read_integers(counts)
    threads = team_size(threads, <double>FLOPS_AN_ELEMENT * (k.size + v.size))
    items = min(<Py_ssize_t>threads, 2 * a.source[0].shape[0] * a.source[0].shape[1])
    threads = <int>items
    each = round_up(max(a.source[0].shape[3], a.source[1].shape[3]) * a.kernels.itemsize, CACHE_LINE)
    scratch = take_scratch(each * threads)
    with nogil:
        deal(append_item, &a, items, threads, scratch.data, each)
    give_scratch(scratch)


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


def merge_states(list outs, list lses, out, lse, int threads):
    """The union of parts of the keys: outs [I, J, L, Hv] with lses [I, J, L] into `out` and `lse`.

    `out` and `lse` are contiguous. All is checked by the caller.
    """
    cdef Merge m
    cdef Array written
    cdef ta_state *parts
    cdef char *weights
    cdef Scratch scratch
    cdef Py_ssize_t i, items, each
    cdef bytearray memory = bytearray(2 * len(outs) * sizeof(Array))
    cdef Array *arrays = <Array *><char *>memory
    m.kernels = kernels_for(lse.itemsize)
    m.part_count = len(outs)
    m.outs = arrays
    m.lses = arrays + m.part_count
    for i in range(m.part_count):
        read_stored(m.kernels, outs[i], arrays + i)
        read_array(lses[i], arrays + m.part_count + i)
    read_stored(m.kernels, out, &written, True)
    m.out = written.data
    read_array(lse, &written, True)
    m.lse = written.data
    threads = team_size(threads, <double>FLOPS_AN_ELEMENT * m.part_count * (out.size + lse.size))
    items = min(<Py_ssize_t>threads, lse.size)
    threads = <int>items
    each = merge_scratch(&m, NULL, &parts, &weights)
    scratch = take_scratch(each * threads)
    with nogil:
        deal(merge_states_item, &m, items, threads, scratch.data, each)
    give_scratch(scratch)


cdef ta_norm read_norm(object norm, Py_ssize_t columns) except *:
    """What a LayerNorm or an RMSNorm does to a row, or nothing for None; the caller keeps it alive."""
    if norm is None:
        return ta_norm(columns, False, False, NULL, NULL, 0)
    return ta_norm(columns, True, norm.subtract_mean, read_vector(norm.weight),
                   read_vector(norm.bias), norm.eps)


cdef struct Angles:
    # What rotates heads (see Heads); cos is NULL for none.
    const char *cos
    const char *sin
    Py_ssize_t batch_rows
    const int64_t *first


cdef Angles read_angles(tuple angles, Py_ssize_t T, const int64_t *first) except *:
    """A rope's tables for T rows, or None. Where they are of positions, row 0 has first[b]."""
    cdef Angles read = Angles(NULL, NULL, 0, NULL)
    if angles is None:
        return read
    cos, sin = angles
    read.cos = read_vector(cos)
    read.sin = read_vector(sin)
    if cos.ndim == 2:
        read.first = first
    elif len(cos) > 1:
        read.batch_rows = T
    return read


cdef void plan_heads(Heads *h, Array x, Array out, Angles angles) noexcept:
    """From x to out, the same rows of both; h's kernels, norm and rope are already set."""
    h.x = x
    h.out = out
    h.starts = h.counts = NULL
    h.cos, h.sin = angles.cos, angles.sin
    h.batch_rows = angles.batch_rows
    h.first = angles.first


cdef bint does_anything(const Heads *h) noexcept nogil:
    return h.norm.normalize or h.rope.rotary_dim > 0


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


def project(x, PackedMatrix w, tuple outputs, tuple biases, int threads):
    """x W_i + b_i into outputs[i], for each matrix W_i of w.

    x[B, T, depth]; outputs[i] [B * T, columns] with contiguous rows; biases[i] contiguous or None.
    """
    cdef Gemm g
    cdef Target[3] targets
    cdef Array array
    cdef Scratch scratch
    cdef Py_ssize_t i, items, each
    read_rows(x, &g.a, &g.rows)
    for i in range(len(w.columns)):
        read_array(outputs[i], &array, True)
        targets[i] = Target(array.data, array.stride[0], read_vector(biases[i]))
    threads = team_size(threads, 2.0 * g.rows * w.depth * sum(w.columns))
    plan_gemm(&g, w, 0, <int>len(w.columns), targets, threads)
    items = gemm_items(&g)
    threads = <int>max(<Py_ssize_t>1, min(<Py_ssize_t>threads, items))
    each = round_up(gemm_scratch(&g), CACHE_LINE)
    scratch = take_scratch(each * threads)
    with nogil:
        deal(deal_gemm, &g, items, threads, scratch.data, each)
    give_scratch(scratch)


def add_norm(x, residual, out, norm, int threads):
    """norm(x + residual) into `out`, for a LayerNorm or an RMSNorm that fits.

    x and residual are [B, T, D], out is [1, B * T, D], all with contiguous rows; residual may be None.
    """
    cdef Norm n
    cdef Array array
    cdef Py_ssize_t items
    n.kernels = kernels_for(x.itemsize)
    read_rows(x, &n.x, &n.rows)
    n.residual.data = NULL
    if residual is not None:
        read_rows(residual, &n.residual, &n.rows)
    read_array(out, &array, True)
    n.out = array.data
    n.out_stride = array.stride[1]
    n.how = read_norm(norm, x.shape[2])
    threads = team_size(threads, <double>FLOPS_AN_ELEMENT * n.rows * x.shape[2])
    items = min(<Py_ssize_t>threads, n.rows)
    threads = <int>items
    with nogil:
        deal(deal_norm, &n, items, threads)


def rope(x, out, cos, sin, Py_ssize_t rotary_dim, bint interleaved, int threads):
    """x[B, T, N, H], its pairs of columns turned, into `out`, which may be x.

    cos and sin are [B, T, rotary_dim / 2], or the same for each sequence with a B of 1. Heads have
    contiguous columns. All is checked by the caller.
    """
    cdef Heads h
    cdef Array source, target
    cdef Py_ssize_t items
    h.kernels = kernels_for(x.itemsize)
    h.norm.normalize = False
    read_array(x, &source)
    read_array(out, &target, True)
    h.rope = ta_rope(0, source.shape[3], rotary_dim, interleaved, target.stride[2], source.stride[2])
    plan_heads(&h, source, target, read_angles((cos, sin), source.shape[1], NULL))
    threads = team_size(threads, <double>FLOPS_AN_ELEMENT * x.size)
    items = min(<Py_ssize_t>threads, h.x.shape[0] * h.x.shape[1])
    threads = <int>items
    with nogil:
        deal(deal_heads, &h, items, threads)


if ta_watch_fork() != 0:
    raise ImportError("tileattn could not register its fork handler")
active = &ta_isas[0]
while not active.chosen():
    active += 1
