# LayerNorm(X + Z), or RMSNorm.

cdef struct Norm:
    const ta_kernels *kernels
    ta_norm how
    Py_ssize_t rows
    Rows x
    Rows residual          # data is NULL for none
    char *out              # may be x's rows
    Py_ssize_t out_stride


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


cdef void deal_norm(const void *plan, Py_ssize_t item, Py_ssize_t items, char *_memory) noexcept nogil:
    norm_item(<const Norm *>plan, item, items)


cdef ta_norm read_norm(object norm, Py_ssize_t columns) except *:
    """What a LayerNorm or an RMSNorm does to a row, or nothing for None; the caller keeps it alive."""
    if norm is None:
        return ta_norm(columns, False, False, NULL, NULL, 0)
    return ta_norm(columns, True, norm.subtract_mean, read_vector(norm.weight),
                   read_vector(norm.bias), norm.eps)


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
