# RoPE(norm(Q)): what heads go through between their projection and attention.

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


cdef void deal_heads(const void *plan, Py_ssize_t item, Py_ssize_t items, char *_memory) noexcept nogil:
    finish_heads(<const Heads *>plan, item, item + 1, items)


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
