/* Every instruction set that can be compiled in, best first: TA_ISA(name).
 * Dispatch, tests and benchmarks all read this list. */
#if TA_HAVE_X86_REGIONS
TA_ISA(avx512)
TA_ISA(avx2)
#endif
TA_ISA(baseline)
