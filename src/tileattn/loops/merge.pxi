# Parts of the keys become one by their LSE.

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
