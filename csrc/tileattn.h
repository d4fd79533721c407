/* The boundary between the Cython loops and the C tile kernels: one table of kernels for each
 * instruction set and element type, and the choice between the tables.
 *
 * Kernels work on one tile, allocate nothing, know nothing of Python and start no threads. Strides
 * count elements. `real` stands for the table's element type, float or double.
 */
#ifndef TILEATTN_H
#define TILEATTN_H

#ifndef __SSE2__
#include <fenv.h>
#endif
#include <stddef.h>
#include <stdint.h>

enum {
    TA_MAX_ROWS = 16,  /* at least gemm_mr and attention_mr: the loops keep so many pointers to rows */
    TA_MAX_PANEL = 64, /* at least attention_nr, for the same reason */
    /* Keys of a block: a multiple of attention_nr. Blocks stand at multiples of it, whatever else
     * differs: one order of summation for all calls. */
    TA_KEY_BLOCK = 256,
    /* The same for few rows, whose keys and values are read as they lie: blocks of 64, 128 and 256 keys
     * read DRAM at 70, 75 and 62% of the bandwidth, where 32 reach 83%. */
    TA_FEW_BLOCK = 32,
    /* From a row of weights to the next. A constant, since values are multiplied with up to 14 rows at
     * once: with their addresses in registers, value_tile stayed at 86% of the FMA peak instead of 95%. */
    TA_WEIGHT_STRIDE = TA_KEY_BLOCK + 16,
    /* Of dot products, see ta_dot_tile: two lots of rows, so that AMX uses what it loads of B twice; a lot
     * and a step are what a register of AMX holds, 16 rows of 16 words. */
    TA_DOT_ROWS = 32,
    TA_DOT_LOT = 16,
    TA_DOT_WORDS = 16,
    TA_DOT_KEYS = 32, /* of a panel: those whose scores are weighed at once, and a step of weights */
    TA_ROUNDED_STRIDE = TA_KEY_BLOCK + 32, /* of weights as bfloat16: whole lines of the cache */
    /* What weigh_dots takes at once of a tile's rows: whole shares of it, whose scores are in registers. */
    TA_WEIGH_ROWS = 8
};

/* What the elements of a caller's array are stored as; the arithmetic is always that of `real`. */
enum ta_storage {
    TA_REAL, /* float or double, whichever the table is for */
    TA_BF16,
    TA_F16,
    TA_OTHER_REAL, /* the other of float and double */
    TA_INT8,       /* times a float of each row: keys and values, in the table for float */
    TA_STORAGES
};

/* A few rows have too few sums to hide the latency of a multiply-add in one panel. */
#define TA_WALK_PANELS(rows, walk_rows) ((rows) == 1 ? 4 : (rows) <= (walk_rows) ? 2 : 1)

/* What the panels of a packed matrix hold: floats, or words of several weights. See kernel/words.inc.h. */
enum ta_weights {
    TA_WORDS_NONE, /* `real` */
    TA_WORDS_BF16,
    TA_WORDS_INT8,
    TA_WORDS_INT4,
    TA_WORDS_TYPES
};

/* Weights of one column in a word. */
#define TA_WORD_ROWS(words) \
    ((words) == TA_WORDS_NONE ? 1 : (words) == TA_WORDS_BF16 ? 2 : (words) == TA_WORDS_INT8 ? 4 : 8)

/* A slice of a panel of words: it begins with a group of rows that share their scales, or lies in one. */
typedef struct ta_words {
    const void *data;
    const void *scales; /* of the slice's first group and those behind it */
    ptrdiff_t group;    /* rows of a group */
    double unit;        /* of the scales and minima that are float16: a power of two */
} ta_words;

/* C[rows x columns] (+)= A B + bias over one slice of the contracted axis. See kernel/gemm.inc.h. */
typedef struct ta_gemm_tile {
    int rows;        /* 1 .. gemm_mr */
    int columns;     /* 1 .. gemm_nr */
    ptrdiff_t depth; /* length of the slice */
    const void *a;   /* [depth][rows], packed */
    const void *b;   /* [depth][columns rounded up to vl], packed */
    void *c;         /* row i starts at c + i * c_stride */
    ptrdiff_t c_stride;
    int accumulate;   /* add to C; otherwise C is written without being read */
    const void *bias; /* [columns], added last; NULL for none */
    int panels;       /* 0 for a tile among others in one panel, that has `next`; alone, a tile walks
                         TA_WALK_PANELS whole ones side by side */
    ptrdiff_t panel_stride;
    const void *next; /* memory to bring into the second-level cache meanwhile */
    ptrdiff_t next_bytes;
} ta_gemm_tile;

/* C[rows x columns] (+)= A B in dot products of bfloat16, their sums in float, or of int8, in int32. A word
 * holds two or four successive elements of the contracted axis, the first in its lowest bits. bfloat16 that
 * is subnormal counts as zero. */
typedef struct ta_dot_tile {
    int rows;        /* 1 .. TA_DOT_ROWS; A is readable, C writable up to whole lots of TA_DOT_LOT */
    int columns;     /* whole lots of TA_DOT_LOT */
    ptrdiff_t depth; /* words: whole steps of TA_DOT_WORDS */
    const void *a;   /* words: those of a step lie side by side, of a row a_stride apart, */
    ptrdiff_t a_stride;
    ptrdiff_t a_step; /* of the next step a_step further, */
    ptrdiff_t a_lot;  /* and of the next TA_DOT_LOT rows a_lot further */
    const void *b;    /* [depth][b_stride] words */
    ptrdiff_t b_stride;
    void *c; /* [rows][c_stride] floats or int32 */
    ptrdiff_t c_stride;
    int accumulate;
    const void *next; /* memory to bring into the second-level cache meanwhile */
    ptrdiff_t next_bytes;
} ta_dot_tile;

/* An instruction set's dot products of bfloat16, and of int8. What a row of C holds does not depend on the
 * other rows. */
typedef struct ta_dots {
    int (*allowed)(void); /* whether the operating system lets this process use them; asks it to */
    void (*begin)(void);  /* before a thread's first product, and after its last */
    void (*end)(void);
    void (*multiply)(const ta_dot_tile *tile);
    /* The same of words of four int8; C is int32, and is not added to. */
    void (*multiply_bytes)(const ta_dot_tile *tile);
    /* To bfloat16, to nearest, ties to even: a step's elements side by side, the next step's dst_step
     * further. count is whole lots of TA_DOT_LOT. */
    void (*round)(uint16_t *dst, ptrdiff_t dst_step, const float *src, ptrdiff_t count);
} ta_dots;

/* What `round` is for all of them. See isa/avx512_bf16.c. */
void ta_round_bf16(uint16_t *dst, ptrdiff_t dst_step, const float *src, ptrdiff_t count);

/* What changes the scores of a call's rows. See kernel/options.inc.h. */
typedef struct ta_score_options {
    double softcap; /* times log2(e); 0 for none */
    int bias_storage;
    ptrdiff_t bias_stride; /* from key to key */
    ptrdiff_t mask_stride;
    const void *key_bias; /* [key], of all rows alike; -inf hides; NULL for none */
} ta_score_options;

/* What changes those of one row. */
typedef struct ta_score_row {
    const void *bias; /* for position 0; NULL for none */
    const void *mask; /* for position 0: bytes, 0 where the key is hidden; NULL for none */
    double slope;     /* times log2(e) */
    ptrdiff_t position;
} ta_score_row;

/* One tile of stacked query rows against one block of keys. See kernel/attention.inc.h. */
typedef struct ta_attention_tile {
    int rows;            /* 1 .. attention_mr */
    ptrdiff_t head_dim;  /* whole vectors for weigh_few */
    ptrdiff_t v_columns; /* value columns, rounded up to whole vectors */
    const void *q;       /* [rows][q_stride], times scale * log2(e) */
    ptrdiff_t q_stride;
    const void *k; /* [panel][head_dim][attention_nr], packed; [key][k_stride] for weigh_few */
    ptrdiff_t k_stride;
    int k_storage; /* a ta_storage, TA_REAL where packed */
    const void *v; /* [key][v_stride] */
    ptrdiff_t v_stride;
    int v_storage;
    const void *k_scales; /* [key], whole panels: of keys in TA_INT8 */
    const void *v_scales; /* the same of values */
    ptrdiff_t key_start;  /* position of the block's first key; from here on keys are counted from it: */
    ptrdiff_t key_begin;  /* keys that any of the rows sees: [key_begin, key_end) */
    ptrdiff_t key_end;
    ptrdiff_t all_begin; /* keys that all of the rows see: [all_begin, all_end) */
    ptrdiff_t all_end;
    const ptrdiff_t *first; /* row i sees the positions [first[i], last[i]) */
    const ptrdiff_t *last;
    const ta_score_options *options; /* NULL for none */
    /* [rows], and behind them as many of the tile that is next, or zeros; NULL if no row has options. */
    const ta_score_row *score_rows;
    /* [rows][TA_WEIGHT_STRIDE], whole panels; written before it is read. Values in TA_INT8 have value_tile
     * multiply it by their scales. */
    void *weights;
    void *row_max; /* [rows]; -inf until the row has seen a key */
    int keeps_max; /* whether row_max is given, and stays: for weights without values */
    void *row_sum; /* [rows][vl]; the sum is that of the lanes */
    void *out;     /* [rows][out_stride], running sum of weighted values */
    ptrdiff_t out_stride;
    const char
        *next; /* what the second-level cache is asked for meanwhile, a row a key; NULL for nothing */
    ptrdiff_t next_stride; /* in bytes */
    ptrdiff_t next_size;   /* bytes of an element there */
} ta_attention_tile;

/* Rows of attention over one part of the keys. */
typedef struct ta_state {
    const void *out; /* in the storage of the kernel */
    ptrdiff_t row_stride;
    ptrdiff_t column_stride;
    const void *lse; /* natural log, -inf for a row that has seen nothing */
    ptrdiff_t lse_stride;
} ta_state;

/* A few rows, from what was found in several parts of the keys. See kernel/merge.inc.h. */
typedef struct ta_merge_tile {
    int rows; /* 1 .. vl */
    ptrdiff_t columns;
    const ta_state *parts;
    ptrdiff_t part_count;
    void *weights; /* [part_count][vl]; written before it is read */
    void *out;     /* [rows][columns], in the storage of the kernel */
    void *lse;     /* [rows] */
} ta_merge_tile;

/* What is done to a row of x + residual. See kernel/norm.inc.h. */
typedef struct ta_norm {
    ptrdiff_t columns;
    int normalize;      /* otherwise x + residual is the result */
    int subtract_mean;  /* LayerNorm; otherwise RMSNorm */
    const void *weight; /* [columns], or NULL for ones */
    const void *bias;   /* [columns], or NULL for zeros */
    double epsilon;
} ta_norm;

/* What is done to a row of heads by its position. See kernel/rope.inc.h. */
typedef struct ta_rope {
    ptrdiff_t heads;
    ptrdiff_t head_dim;
    ptrdiff_t rotary_dim; /* columns of a head that are rotated: even, up to head_dim */
    int interleaved;      /* pairs of neighbours; otherwise of columns half of rotary_dim apart */
    ptrdiff_t dst_stride; /* from head to head */
    ptrdiff_t src_stride;
} ta_rope;

typedef struct ta_kernels {
    int itemsize;
    int vl;              /* lanes of a vector */
    int gemm_mr;         /* rows of a register tile */
    int gemm_nr;         /* columns of a packed panel; those of the last one are rounded up to vl */
    int gemm_mc;         /* rows of a packed block of A */
    int walk_rows;       /* up to which a tile walks several panels */
    int attention_mr;    /* rows of a score tile */
    int attention_nr;    /* keys of a packed panel */
    double lowest_score; /* in log2 units, that of a key with the lowest bias */

    /* The kernels that meet a caller's array, by its ta_storage. In the table for double those for TA_BF16
     * and TA_F16 are NULL, as are those for TA_OTHER_REAL everywhere; load_row has all four. TA_INT8 has
     * pack_rows and pack_columns in the table for float, which leave the rows' scales aside. */

    /* dst[j][i] = rows[i][j * column_stride] for i < count, j < depth. */
    void (*pack_rows[TA_STORAGES])(void *dst, const void *const *rows, int count, ptrdiff_t depth,
                                   ptrdiff_t column_stride);
    /* dst[p][j] = scale * src[p * row_stride + j * column_stride], zero for j >= columns. */
    void (*pack_columns[TA_STORAGES])(void *dst, const void *src, ptrdiff_t depth, ptrdiff_t columns,
                                      ptrdiff_t width, ptrdiff_t row_stride, ptrdiff_t column_stride,
                                      double scale);
    /* dst[j] = src[j * stride] for j < count. */
    void (*load_row[TA_STORAGES])(void *dst, const void *src, ptrdiff_t count, ptrdiff_t stride);
    /* dst[j] = out[j] / sum of the lanes of row_sum, lse = natural log of the softmax's denominator;
     * zeros and -inf for a row that has seen no key. The storage is that of dst. */
    void (*finish_row[TA_STORAGES])(void *dst, ptrdiff_t column_stride, ptrdiff_t columns, void *lse,
                                    const void *out, const void *row_max, const void *row_sum);
    /* dst[j] = src[j] for j < count. The storage is that of dst. */
    void (*store_row[TA_STORAGES])(void *dst, const void *src, ptrdiff_t count);
    /* The same for TA_INT8: dst[j] * scale[0] is src[j] for j < count. NULL in the table for double. */
    void (*quantize_row)(void *dst, void *scale, const void *src, ptrdiff_t count);
    /* dst[p][j] *= scales[j] for p < depth and j < width, whole vectors. */
    void (*scale_columns)(void *dst, const void *scales, ptrdiff_t depth, ptrdiff_t width);
    /* The union of disjoint parts of the keys, for a few rows. */
    void (*merge_states[TA_STORAGES])(const ta_merge_tile *tile);

    void (*gemm_tile)(const ta_gemm_tile *tile);
    /* By the type of words; the table for double has none of the three. */
    /* dst = words of src[p * row_stride + j * column_stride], floats for bfloat16 or a byte a value; those
     * for j >= columns, and what fills the last word, are zero. */
    void (*pack_words[TA_WORDS_TYPES])(void *dst, const void *src, ptrdiff_t depth, ptrdiff_t columns,
                                       ptrdiff_t width, ptrdiff_t row_stride, ptrdiff_t column_stride);
    /* gemm_tile with words in place of its b, for one whole panel and up to walk_rows rows. */
    void (*stream_tile[TA_WORDS_TYPES])(const ta_gemm_tile *tile, const ta_words *b);
    /* dst[p][j] = the weights of a slice, p < depth and j < width, whole vectors. */
    void (*convert_panel[TA_WORDS_TYPES])(void *dst, const ta_words *b, ptrdiff_t depth, ptrdiff_t width);
    /* What surrounds ta_dots, in the table for float where there are any. See kernel/dots.inc.h. */
    /* dst = columns of a row of bfloat16, and zeros up to `width`; of floats that are rounded, and zeros up
     * to whole steps, which are dst_step apart. */
    void (*pack_halves)(uint16_t *dst, const uint16_t *src, ptrdiff_t columns, ptrdiff_t width,
                        ptrdiff_t column_stride);
    void (*round_row)(const ta_dots *dots, uint16_t *dst, ptrdiff_t dst_step, const float *src,
                      ptrdiff_t columns, ptrdiff_t column_stride);
    /* dst[words][TA_DOT_KEYS] of the rows of as many keys. */
    void (*pack_key_words)(uint32_t *dst, const void *const *keys, ptrdiff_t head_dim,
                           ptrdiff_t column_stride);
    /* dst[key / 2][width] of the values of keys [begin, end) of a block, and zeros up to whole panels. */
    void (*pack_value_words)(uint32_t *dst, const uint16_t *v, ptrdiff_t begin, ptrdiff_t end,
                             ptrdiff_t columns, ptrdiff_t width, ptrdiff_t key_stride,
                             ptrdiff_t column_stride);
    /* Puts zeros in place of what is not finite, in whole vectors; returns whether there was any. */
    int (*drop_strays)(uint32_t *words, ptrdiff_t count);
    /* gemm_tile up to TA_DOT_ROWS rows, with words [lot][step][row] as its a, lots a_lot apart. */
    void (*gemm_dots)(const ta_gemm_tile *tile, ptrdiff_t a_lot, const ta_dots *dots);
    /* C = scaled A B + bias over the whole depth, with words of four int8 in A and B, the scales of A's
     * rows and of B's columns. */
    void (*gemm_bytes)(const ta_gemm_tile *tile, ptrdiff_t a_lot, const float *row_scales,
                       const float *column_scales, const ta_dots *dots);
    /* weigh_tile up to TA_WEIGH_ROWS rows, with products that lack `scale` as its q. */
    void (*weigh_dots)(const ta_attention_tile *tile, double scale);
    /* dst[row][TA_ROUNDED_STRIDE] = weights as words, over the panels of keys [begin, end). */
    void (*round_weights)(const ta_dots *dots, uint16_t *dst, const ta_attention_tile *tile,
                          ptrdiff_t begin, ptrdiff_t end);
    /* value_tile up to TA_DOT_ROWS rows, with words as its weights and its v. */
    void (*value_dots)(const ta_attention_tile *tile, const ta_dots *dots);
    /* Floating-point operations done by `rounds` steps of a tile in the first-level cache. */
    double (*dot_rounds)(const ta_dots *dots, ptrdiff_t rounds);

    /* A row that has seen no key: out and row_sum zero, row_max -inf; or a sink, in log2 units, alone. */
    void (*start_row)(void *out, ptrdiff_t columns, void *row_max, void *row_sum, double sink);
    void (*weigh_tile)(const ta_attention_tile *tile);
    void (*weigh_few)(const ta_attention_tile *tile);
    /* After weigh_tile: the weights relative to starts[rows], from which row_max set out. */
    /* dst[j] += the sum of src[i * row_stride + j] for i < rows, j < columns, a multiple of vl. */
    void (*add_rows)(void *dst, const void *src, ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t row_stride);
    void (*value_tile)(const ta_attention_tile *tile);
    /* key_bias of the keys [*key_begin, *key_end) of a block, in whole panels, from the bias and the mask
     * of a row that stands for all. Narrows the range to the keys that are not hidden at its ends; returns
     * whether anything else is there. */
    int (*load_key_options)(void *key_bias, const ta_score_options *options, const ta_score_row *row,
                            ptrdiff_t key_start, ptrdiff_t *key_begin, ptrdiff_t *key_end);
    /* Narrows [key_begin, key_end) of a tile that has score_rows, to nothing if they hide all keys. */
    void (*trim_tile)(ta_attention_tile *tile);
    /* dst[rows][columns] = src where that is finite, else 0; columns is a multiple of vl. */
    void (*copy_finite)(void *dst, const void *src, ptrdiff_t rows, ptrdiff_t columns,
                        ptrdiff_t row_stride);
    /* What copy_finite has left out of the tile's values `v`, to the rows that see it, times its weight. */
    void (*add_strays)(const ta_attention_tile *tile, const void *v, ptrdiff_t v_stride);
    /* Adds what a row has found in other keys. */
    void (*merge_row)(void *out, void *row_max, void *row_sum, const void *other_out, const void *other_max,
                      const void *other_sum, ptrdiff_t columns);
    /* Whether all of src[rows][columns] is finite; columns is a multiple of vl. */
    int (*all_finite)(const void *src, ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t row_stride);
    /* dst = norm(x + residual); residual may be NULL, dst may be x or residual. */
    void (*add_norm_row)(void *dst, const void *x, const void *residual, const ta_norm *norm);
    /* dst = src, pair i of each head turned by the angle of cos[i] and sin[i]; dst may be src. */
    void (*rotate_row)(void *dst, const void *src, const void *cos, const void *sin, const ta_rope *rope);
    /* Floating-point operations done by `rounds` rounds of independent multiply-adds in registers. */
    double (*fma_rounds)(ptrdiff_t rounds);
    /* Sum of `count` values, a multiple of 8 vl. */
    double (*read_all)(const void *src, ptrdiff_t count);
} ta_kernels;

typedef struct ta_isa {
    const char *name;
    int (*supported)(void); /* by this CPU and its operating system */
    int (*chosen)(void);    /* whether it is the best here, if those before it are not */
    const ta_kernels *f32;
    const ta_kernels *f64;
    const ta_dots *dots; /* NULL for none */
} ta_isa;

/* The instruction sets compiled in, best first. */
extern const ta_isa ta_isas[];
extern const int ta_isa_count;

/* What of the process decides about threads, memory and arithmetic (platform.c). */
int ta_allowed_cpus(void);       /* CPUs this thread may run on; 0 if unknown */
int ta_watch_fork(void);         /* arms ta_is_forked_child; non-zero on failure */
int ta_is_forked_child(void);    /* whether this process is a fork of one that had armed it */
void *ta_allocate(size_t bytes); /* 2 MiB-aligned on huge pages when large, else 64-byte-aligned */
void ta_release(void *memory);

/* A thread's rounding, exceptions and flags, and what becomes of denormals. */
typedef struct ta_floats {
#ifdef __SSE2__
    unsigned mxcsr;
#else
    fenv_t environment;
#endif
} ta_floats;

ta_floats ta_take_floats(void); /* the kernels' own state for this thread; returns what it was */
void ta_give_floats(ta_floats before);

#endif
