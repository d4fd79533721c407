/* The kernels for what every CPU of the architecture has: SSE2 on x86-64, NEON on aarch64. */
#include "tileattn.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define TA_ISA_NAME baseline
#define TA_SIMD "simd/baseline.h"

#define TA_BITS 32
#include "kernel/kernels.inc.h"
#undef TA_BITS
#define TA_BITS 64
#include "kernel/kernels.inc.h"
