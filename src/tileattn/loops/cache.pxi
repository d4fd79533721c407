# Keys and values into a cache.

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
