/* The kernels for CPUs with AVX-512 (F, VL, DQ, BW). */
#include "region.h"

#if TA_HAVE_X86_REGIONS

#include "tileattn.h"

/* System headers stand before the region, so that their inline functions stay baseline code. */
#include <immintrin.h>
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512vl,avx512dq,avx512bw,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512dq,avx512bw,fma,f16c")
#endif

#define TA_ISA_NAME avx512
#define TA_HAS_DOTS /* in CPUs that have all of this and more: avx512_bf16.c, amx.c */
#define TA_SIMD "simd/avx512.h"

#define TA_BITS 32
#include "kernel/kernels.inc.h"
#undef TA_BITS
#define TA_BITS 64
#include "kernel/kernels.inc.h"

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif
