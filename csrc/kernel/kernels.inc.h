/* All kernels of one instruction set and element type, and their table.
 *
 * The including isa/<isa>.c says TA_ISA_NAME, TA_SIMD (its vocabulary) and TA_BITS (32 or 64). The
 * bodies below name no instruction set: they are written in `real`, `vec` and the vocabulary.
 */

#if TA_BITS == 32
#define real float
#define TA_SMALLEST 0x1p-126f /* normal number */
#define other_real double
#define integer int32_t
#define natural uint32_t
#define TA_TYPE f32
#else
#define real double
#define TA_SMALLEST 0x1p-1022
#define other_real float
#define integer int64_t
#define natural uint64_t
#define TA_TYPE f64
#endif

/* ta_<name>_<type>_<isa>: static everywhere, and yet told apart in a profile. */
#define TA_JOIN4(a, b, c, d) a##b##_##c##_##d
#define TA_JOIN(a, b, c, d) TA_JOIN4(a, b, c, d)
#define TA_NAME(name) TA_JOIN(ta_, name, TA_TYPE, TA_ISA_NAME)

#define TA_CACHE_LINE 64
#define TA_INLINE static inline __attribute__((always_inline))
#define TA_NOINLINE static __attribute__((noinline))
#ifdef __clang__
#define TA_UNROLL _Pragma("clang loop unroll(full)")
#else
#define TA_UNROLL _Pragma("GCC unroll 32")
#endif

#define TA_LOG2_E 1.4426950408889634074
#define TA_LN_2 0.693147180559945309417

#include TA_SIMD

#define TA_KEYS (TA_ATTENTION_NV * TA_VL) /* of a panel */

#include "kernel/storage.inc.h"
#include "kernel/pack.inc.h"
#include "kernel/outer.inc.h"
#include "kernel/gemm.inc.h"
#if TA_BITS == 32
#include "kernel/words.inc.h"
#include "kernel/quantize.inc.h"
#endif
#include "kernel/exp2.inc.h"
#include "kernel/tanh.inc.h"
#include "kernel/options.inc.h"
#include "kernel/attention.inc.h"
#include "kernel/merge.inc.h"
#if TA_BITS == 32 && defined(TA_HAS_DOTS)
#include "kernel/dots.inc.h"
#endif
#include "kernel/norm.inc.h"
#include "kernel/rope.inc.h"
#include "kernel/peak.inc.h"

_Static_assert(TA_GEMM_MR <= TA_MAX_ROWS && TA_ATTENTION_MR <= TA_MAX_ROWS, "pointers to rows");
_Static_assert(TA_KEYS <= TA_MAX_PANEL, "pointers to keys");
_Static_assert(TA_KEY_BLOCK % TA_KEYS == 0, "whole panels");
_Static_assert(TA_FEW_BLOCK % TA_KEYS == 0, "whole panels for few rows");
_Static_assert(TA_ATTENTION_NV <= TA_ACC_VECTORS, "sums of a row of scores");
_Static_assert(TA_FEW_ROWS <= TA_ACC_ROWS, "sums of few rows");
_Static_assert(TA_WALK_ROWS <= TA_GEMM_MR, "rows that walk");
_Static_assert(TA_GEMM_NV == 2 || TA_GEMM_NV == 3, "a function for each width");

#define TA_ENTRY(STORAGE, NAME) [STORAGE] = TA_NAME(NAME),
#define TA_PACK(WORDS, NAME) [WORDS] = TA_NAME(pack_words_##NAME),
#define TA_STREAM(WORDS, NAME) [WORDS] = TA_NAME(stream_##NAME),
#define TA_CONVERT(WORDS, NAME) [WORDS] = TA_NAME(convert_panel_##NAME),
extern const ta_kernels TA_NAME(kernels);
const ta_kernels TA_NAME(kernels) = {
    .itemsize = sizeof(real),
    .vl = TA_VL,
    .gemm_mr = TA_GEMM_MR,
    .gemm_nr = TA_GEMM_NV * TA_VL,
    .gemm_mc = TA_GEMM_MC,
    .walk_rows = TA_WALK_ROWS,
    .attention_mr = TA_ATTENTION_MR,
    .attention_nr = TA_ATTENTION_NV * TA_VL,
    .lowest_score = TA_LOWEST_SCORE,
    .pack_rows = {TA_EACH_KEPT(TA_ENTRY, pack_rows)},
    .pack_columns = {TA_EACH_KEPT(TA_ENTRY, pack_columns)},
    .load_row = {TA_EACH_SOURCE(TA_ENTRY, load_row)},
    .finish_row = {TA_EACH_STORAGE(TA_ENTRY, finish_row)},
    .store_row = {TA_EACH_STORAGE(TA_ENTRY, store_row)},
    .scale_columns = TA_NAME(scale_columns),
    .merge_states = {TA_EACH_STORAGE(TA_ENTRY, merge_states)},
    .gemm_tile = TA_NAME(gemm_tile),
#if TA_BITS == 32
    .pack_words = {TA_EACH_WORDS(TA_PACK)},
    .stream_tile = {TA_EACH_WORDS(TA_STREAM)},
    .convert_panel = {TA_EACH_WORDS(TA_CONVERT)},
    .quantize_row = TA_NAME(quantize_row),
#endif
#if TA_BITS == 32 && defined(TA_HAS_DOTS)
    .pack_halves = TA_NAME(pack_halves),
    .round_row = TA_NAME(round_row),
    .pack_key_words = TA_NAME(pack_key_words),
    .pack_value_words = TA_NAME(pack_value_words),
    .drop_strays = TA_NAME(drop_strays),
    .gemm_dots = TA_NAME(gemm_dots),
    .gemm_bytes = TA_NAME(gemm_bytes),
    .weigh_dots = TA_NAME(weigh_dots),
    .round_weights = TA_NAME(round_weights),
    .value_dots = TA_NAME(value_dots),
    .dot_rounds = TA_NAME(dot_rounds),
#endif
    .start_row = TA_NAME(start_row),
    .weigh_tile = TA_NAME(weigh_tile),
    .weigh_few = TA_NAME(weigh_few),
    .add_rows = TA_NAME(add_rows),
    .value_tile = TA_NAME(value_tile),
    .load_key_options = TA_NAME(load_key_options),
    .trim_tile = TA_NAME(trim_tile),
    .copy_finite = TA_NAME(copy_finite),
    .add_strays = TA_NAME(add_strays),
    .merge_row = TA_NAME(merge_row),
    .all_finite = TA_NAME(all_finite),
    .add_norm_row = TA_NAME(add_norm_row),
    .rotate_row = TA_NAME(rotate_row),
    .fma_rounds = TA_NAME(fma_rounds),
    .read_all = TA_NAME(read_all),
};

#undef TA_ENTRY
#undef TA_PACK
#undef TA_STREAM
#undef TA_CONVERT
#undef TA_EACH_STORAGE
#undef TA_EACH_KEPT

/* The other macros mean the same for both element types and stand. */
#undef real
#undef TA_SMALLEST
#undef other_real
#undef integer
#undef natural
#undef TA_TYPE
#undef TA_FEW_ROWS
