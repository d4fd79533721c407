# Arrays as pointers and strides, rows of them, and the memory that calls work in.

cdef enum:
    # Strides of scratch rows are kept off powers of two, which would share a few cache sets.
    SKEW = 16
    CACHE_LINE = 64


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


cdef inline char *at3(const Array *x, Py_ssize_t i, Py_ssize_t j, Py_ssize_t l,
                      Py_ssize_t itemsize) noexcept nogil:
    return x.data + (i * x.stride[0] + j * x.stride[1] + l * x.stride[2]) * itemsize


cdef inline float *scales_of(const Array *x, Py_ssize_t i, Py_ssize_t j, Py_ssize_t l) noexcept nogil:
    """Those of rows i, j, l, then i, j + 1, l, and so on; NULL if rows have none."""
    return NULL if x.scales == NULL else x.scales + i * x.scale_stride[0] + j + l * x.scale_stride[1]


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
