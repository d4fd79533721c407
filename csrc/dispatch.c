/* Which instruction sets are compiled in, and which of them this machine can run. */
#include "region.h"
#include "tileattn.h"

#if TA_HAVE_X86_REGIONS
#include <cpuid.h>

/* Bits of XCR0: register state the system saves. */
enum { XMM_YMM = 0x06, XMM_YMM_ZMM = 0xe6, TILES = 0x60000 };
/* Bits of leaf 7 that gcc's and clang's headers name differently. */
enum { AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24, AMX_INT8 = 1 << 25 };

/* __builtin_cpu_supports is not used: one distribution's clang answers 0 to everything. */
static int leaf1_has(unsigned wanted)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & wanted) == wanted;
}

static int system_saves(unsigned state)
{
    if (!leaf1_has(bit_OSXSAVE))
        return 0;
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & state) == state;
}

static int leaf7_has(unsigned wanted)
{
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & wanted) == wanted;
}

static int supported_avx2(void)
{
    return system_saves(XMM_YMM) && leaf1_has(bit_AVX | bit_FMA | bit_F16C) && leaf7_has(bit_AVX2);
}

static int supported_avx512(void)
{
    return supported_avx2() && system_saves(XMM_YMM_ZMM) &&
           leaf7_has(bit_AVX512F | bit_AVX512VL | bit_AVX512DQ | bit_AVX512BW);
}

static int supported_avx512_bf16(void)
{
    unsigned a, b, c, d;
    return supported_avx512() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c & bit_AVX512VNNI) &&
           __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & bit_AVX512BF16);
}

/* Intel's take twice the time of multiply-adds in float (76 against 150 GFLOP/s on Sapphire Rapids), AMD's
 * half of it. */
static int has_fast_bf16(void)
{
    unsigned a, b, c, d;
    return supported_avx512_bf16() && __get_cpuid(0, &a, &b, &c, &d) && b == signature_AMD_ebx;
}

static int supported_amx(void)
{
    unsigned a, b, c, d;
    const unsigned wanted = AMX_TILE | AMX_BF16 | AMX_INT8;
    return supported_avx512_bf16() && system_saves(TILES) && __get_cpuid_count(7, 0, &a, &b, &c, &d) &&
           (d & wanted) == wanted;
}

extern const ta_dots ta_dots_avx512_bf16, ta_dots_amx;
#endif

static int supported_baseline(void)
{
    return 1;
}

#define TA_ISA(name, chosen, kernels, dots) \
    extern const ta_kernels ta_kernels_f32_##kernels, ta_kernels_f64_##kernels;
#include "isa_list.h"
#undef TA_ISA

const ta_isa ta_isas[] = {
#define TA_ISA(name, chosen, kernels, dots) \
    {#name, supported_##name, chosen, &ta_kernels_f32_##kernels, &ta_kernels_f64_##kernels, dots},
#include "isa_list.h"
#undef TA_ISA
};

const int ta_isa_count = (int)(sizeof ta_isas / sizeof ta_isas[0]);
