/* Whether this compiler can compile a part of a file for a better CPU than the rest. */
#ifndef TILEATTN_REGION_H
#define TILEATTN_REGION_H

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define TA_HAVE_X86_REGIONS 1
#else
#define TA_HAVE_X86_REGIONS 0
#endif

#endif
