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

Each has a file of loops/, attention three, where the Python function that reads arrays into its plan
comes last. `deal` deals a plan's items out to the threads. Those of attention and of a block, which come
stage by stage (stage_item), wait for one another inside one parallel region. Items write to disjoint
memory and fix every order of summation, so no bit of a result depends on how they are dealt. The
arithmetic is done by the C tile kernels in csrc/. Inside the loops there are pointers and strides only;
strides count elements.

The files are one module, so that what an inner loop calls is compiled with it.
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

include "loops/arrays.pxi"
include "loops/threads.pxi"
include "loops/norm.pxi"
include "loops/rope.pxi"
include "loops/gemm.pxi"
include "loops/attention_plan.pxi"
include "loops/attention_tiles.pxi"
include "loops/merge.pxi"
include "loops/cache.pxi"
include "loops/attention.pxi"
include "loops/block.pxi"
