/* Every instruction set that can be compiled in, best first: TA_ISA(name, chosen if, whose kernels, its
 * ta_dots). Dispatch, tests and benchmarks all read this list. */
#if TA_HAVE_X86_REGIONS
TA_ISA(amx, supported_amx, avx512, &ta_dots_amx)
TA_ISA(avx512_bf16, has_fast_bf16, avx512, &ta_dots_avx512_bf16)
TA_ISA(avx512, supported_avx512, avx512, NULL)
TA_ISA(avx2, supported_avx2, avx2, NULL)
#endif
TA_ISA(baseline, supported_baseline, baseline, NULL)
