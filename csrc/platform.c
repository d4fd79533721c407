/* What the operating system says: CPUs, forks, memory. And a thread's floating-point state. */
#ifdef __linux__
#define _GNU_SOURCE
#include <sched.h>
#include <sys/mman.h>
#endif
#ifdef _WIN32
#include <malloc.h>
#else
#include <pthread.h>
#endif
#ifdef __SSE2__
#include <immintrin.h>
#endif
#include <stdint.h>
#include <stdlib.h>

#include "tileattn.h"

int ta_allowed_cpus(void)
{
#ifdef __linux__
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        return CPU_COUNT(&set);
#endif
    return 0;
}

/* The child of a fork has none of its parent's OpenMP threads, and libgomp waits for them for ever:
 * such a child works on one thread. */
static volatile int forked_child;

#ifndef _WIN32
static void note_fork(void)
{
    forked_child = 1;
}
#endif

int ta_watch_fork(void)
{
#ifndef _WIN32
    return pthread_atfork(NULL, NULL, note_fork);
#else
    return 0;
#endif
}

int ta_is_forked_child(void)
{
    return forked_child;
}

/* Sets the state that kernels are written for: what another library or an earlier call of the user's has
 * set would change bits, and each thread of a team has its own. */
ta_floats ta_take_floats(void)
{
    ta_floats before;
#ifdef __SSE2__
    enum { DEFAULT = 0x1f80 }; /* all exceptions masked, to nearest, denormals kept */
    before.mxcsr = _mm_getcsr();
    _mm_setcsr(DEFAULT);
#else
    (void)fegetenv(&before.environment);
    (void)fesetenv(FE_DFL_ENV);
#endif
    return before;
}

void ta_give_floats(ta_floats before)
{
#ifdef __SSE2__
    _mm_setcsr(before.mxcsr);
#else
    (void)fesetenv(&before.environment);
#endif
}

enum { CACHE_LINE = 64, HUGE_PAGE = 2 << 20 };

void *ta_allocate(size_t bytes)
{
    /* From half a huge page on, a whole one: small pages land in a cache's sets by chance. */
    size_t alignment = bytes >= HUGE_PAGE / 2 ? HUGE_PAGE : CACHE_LINE;
    if (alignment == HUGE_PAGE && bytes <= SIZE_MAX - HUGE_PAGE)
        bytes = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    void *memory = NULL;
#ifdef _WIN32
    memory = _aligned_malloc(bytes ? bytes : 1, alignment);
#else
    if (posix_memalign(&memory, alignment, bytes ? bytes : 1) != 0)
        return NULL;
#endif
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    /* Advice: where huge pages are not to be had, the memory works all the same. */
    if (memory != NULL && alignment == HUGE_PAGE)
        (void)madvise(memory, bytes, MADV_HUGEPAGE);
#endif
    return memory;
}

void ta_release(void *memory)
{
#ifdef _WIN32
    _aligned_free(memory);
#else
    free(memory);
#endif
}
