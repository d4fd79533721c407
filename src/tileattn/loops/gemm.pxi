# C = A B + bias: weights packed in panels, and the loops over blocks of A, slices and panels.

cdef enum:
    # Length of the slices in which every product sums over its contracted axis, whatever the number
    # of rows: one order of summation for all. One pass over 4096 doubles the error of blocked sums.
    GEMM_KC = 512
    # Bytes ahead that a single register tile prefetches. Without, 4 rows read B from DRAM at 68% of the
    # bandwidth instead of 88%; 64 KiB ahead are no better, and worse where B lies in a cache.
    STREAM_AHEAD = 4096
    # The same for dot products: with AMX, 4 KiB took 1.1 times as long for one row of 4096 x 4096, and
    # 16 KiB as long; without, 16 KiB took 1.1 times as long for 16 rows.
    DOT_AHEAD = 1 << 15
    # Bytes of a block of A up to which it is packed over the whole depth, so that every panel of B is
    # read in one stream and C stays in the first-level cache: a part of any second-level cache.
    WHOLE_DEPTH = 1 << 19
    # The same, and the rows of a packed block of A, where weights are multiplied in bfloat16 dot products.
    # 256 rows in slices of the depth, 256 and 512 over the whole of it took up to 1.2 times as long.
    DOT_WHOLE_DEPTH = 1 << 20
    DOT_MC = 128
    # Products of int8 whose sum an int32 holds: 2^31 / 128 / 128.
    EXACT_DEPTH = 1 << 17


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


cdef void deal_gemm(const void *plan, Py_ssize_t item, Py_ssize_t _items, char *memory) noexcept nogil:
    gemm_item(<const Gemm *>plan, item, memory)


cdef void deal_finish(const void *plan, Py_ssize_t item, Py_ssize_t items, char *_memory) noexcept nogil:
    finish_item(<const Gemm *>plan, item, items)


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
