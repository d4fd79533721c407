# Instruction sets, threads, how items are dealt out to them, and what the machine can do at most.

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
    # A round is 200 cycles of AMX, and three thousand of AVX512_BF16.
    return 0.0 if dots == NULL else measure_peak(active.f32, dots, 10_000, threads)


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
