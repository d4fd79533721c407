"""The C tile kernels, as the Cython loops see them (csrc/tileattn.h documents each)."""

from libc.stdint cimport uint16_t, uint32_t


cdef extern from "tileattn.h" nogil:
    cdef enum:
        TA_MAX_ROWS
        TA_MAX_PANEL
        TA_KEY_BLOCK
        TA_FEW_BLOCK
        TA_WEIGHT_STRIDE
        TA_REAL
        TA_BF16
        TA_F16
        TA_OTHER_REAL
        TA_INT8
        TA_STORAGES
        TA_WORDS_NONE
        TA_WORDS_BF16
        TA_WORDS_INT8
        TA_WORDS_INT4
        TA_WORDS_TYPES
        TA_DOT_ROWS
        TA_DOT_LOT
        TA_DOT_WORDS
        TA_DOT_KEYS
        TA_ROUNDED_STRIDE
        TA_WEIGH_ROWS

    int TA_WALK_PANELS(int rows, int walk_rows)
    int TA_WORD_ROWS(int words)

    ctypedef struct ta_words:
        const void *data
        const void *scales
        Py_ssize_t group
        double unit

    ctypedef struct ta_gemm_tile:
        int rows
        int columns
        Py_ssize_t depth
        const void *a
        const void *b
        void *c
        Py_ssize_t c_stride
        int accumulate
        const void *bias
        int panels
        Py_ssize_t panel_stride
        const void *next
        Py_ssize_t next_bytes

    ctypedef struct ta_dot_tile:
        int rows
        int columns
        Py_ssize_t depth
        const void *a
        Py_ssize_t a_stride
        Py_ssize_t a_step
        Py_ssize_t a_lot
        const void *b
        Py_ssize_t b_stride
        void *c
        Py_ssize_t c_stride
        int accumulate
        const void *next
        Py_ssize_t next_bytes

    ctypedef struct ta_dots:
        int (*allowed)() noexcept nogil
        void (*begin)() noexcept nogil
        void (*end)() noexcept nogil
        void (*multiply)(const ta_dot_tile *tile) noexcept nogil
        void (*multiply_bytes)(const ta_dot_tile *tile) noexcept nogil
        void (*round)(uint16_t *dst, Py_ssize_t dst_step, const float *src,
                      Py_ssize_t count) noexcept nogil

    ctypedef struct ta_score_options:
        double softcap
        int bias_storage
        Py_ssize_t bias_stride
        Py_ssize_t mask_stride
        const void *key_bias

    ctypedef struct ta_score_row:
        const void *bias
        const void *mask
        double slope
        Py_ssize_t position

    ctypedef struct ta_attention_tile:
        int rows
        Py_ssize_t head_dim
        Py_ssize_t v_columns
        const void *q
        Py_ssize_t q_stride
        const void *k
        Py_ssize_t k_stride
        int k_storage
        const void *v
        Py_ssize_t v_stride
        int v_storage
        const void *k_scales
        const void *v_scales
        Py_ssize_t key_start
        Py_ssize_t key_begin
        Py_ssize_t key_end
        Py_ssize_t all_begin
        Py_ssize_t all_end
        const Py_ssize_t *first
        const Py_ssize_t *last
        const ta_score_options *options
        const ta_score_row *score_rows
        void *weights
        void *row_max
        int keeps_max
        void *row_sum
        void *out
        Py_ssize_t out_stride
        const char *next
        Py_ssize_t next_stride
        Py_ssize_t next_size

    ctypedef struct ta_state:
        const void *out
        Py_ssize_t row_stride
        Py_ssize_t column_stride
        const void *lse
        Py_ssize_t lse_stride

    ctypedef struct ta_merge_tile:
        int rows
        Py_ssize_t columns
        const ta_state *parts
        Py_ssize_t part_count
        void *weights
        void *out
        void *lse

    ctypedef struct ta_norm:
        Py_ssize_t columns
        int normalize
        int subtract_mean
        const void *weight
        const void *bias
        double epsilon

    ctypedef struct ta_rope:
        Py_ssize_t heads
        Py_ssize_t head_dim
        Py_ssize_t rotary_dim
        int interleaved
        Py_ssize_t dst_stride
        Py_ssize_t src_stride

    ctypedef struct ta_kernels:
        int itemsize
        int vl
        int gemm_mr
        int gemm_nr
        int gemm_mc
        int walk_rows
        double lowest_score
        int attention_mr
        int attention_nr
        void (*pack_rows[TA_STORAGES])(void *dst, const void *const *rows, int count, Py_ssize_t depth,
                                       Py_ssize_t column_stride) noexcept nogil
        void (*pack_columns[TA_STORAGES])(void *dst, const void *src, Py_ssize_t depth,
                                          Py_ssize_t columns, Py_ssize_t width, Py_ssize_t row_stride,
                                          Py_ssize_t column_stride, double scale) noexcept nogil
        void (*load_row[TA_STORAGES])(void *dst, const void *src, Py_ssize_t count,
                                      Py_ssize_t stride) noexcept nogil
        void (*finish_row[TA_STORAGES])(void *dst, Py_ssize_t column_stride, Py_ssize_t columns,
                                        void *lse, const void *out, const void *row_max,
                                        const void *row_sum) noexcept nogil
        void (*store_row[TA_STORAGES])(void *dst, const void *src, Py_ssize_t count) noexcept nogil
        void (*quantize_row)(void *dst, void *scale, const void *src, Py_ssize_t count) noexcept nogil
        void (*scale_columns)(void *dst, const void *scales, Py_ssize_t depth,
                              Py_ssize_t width) noexcept nogil
        void (*merge_states[TA_STORAGES])(const ta_merge_tile *tile) noexcept nogil
        void (*gemm_tile)(const ta_gemm_tile *tile) noexcept nogil
        void (*pack_words[TA_WORDS_TYPES])(void *dst, const void *src, Py_ssize_t depth,
                                           Py_ssize_t columns, Py_ssize_t width, Py_ssize_t row_stride,
                                           Py_ssize_t column_stride) noexcept nogil
        void (*stream_tile[TA_WORDS_TYPES])(const ta_gemm_tile *tile, const ta_words *b) noexcept nogil
        void (*convert_panel[TA_WORDS_TYPES])(void *dst, const ta_words *b, Py_ssize_t depth,
                                              Py_ssize_t width) noexcept nogil
        void (*pack_halves)(uint16_t *dst, const uint16_t *src, Py_ssize_t columns, Py_ssize_t width,
                            Py_ssize_t column_stride) noexcept nogil
        void (*round_row)(const ta_dots *dots, uint16_t *dst, Py_ssize_t dst_step, const float *src,
                          Py_ssize_t columns, Py_ssize_t column_stride) noexcept nogil
        void (*pack_key_words)(uint32_t *dst, const void *const *keys, Py_ssize_t head_dim,
                               Py_ssize_t column_stride) noexcept nogil
        void (*pack_value_words)(uint32_t *dst, const uint16_t *v, Py_ssize_t begin, Py_ssize_t end,
                                 Py_ssize_t columns, Py_ssize_t width, Py_ssize_t key_stride,
                                 Py_ssize_t column_stride) noexcept nogil
        int (*drop_strays)(uint32_t *words, Py_ssize_t count) noexcept nogil
        void (*gemm_dots)(const ta_gemm_tile *tile, Py_ssize_t a_lot,
                          const ta_dots *dots) noexcept nogil
        void (*gemm_bytes)(const ta_gemm_tile *tile, Py_ssize_t a_lot, const float *row_scales,
                           const float *column_scales, const ta_dots *dots) noexcept nogil
        void (*weigh_dots)(const ta_attention_tile *tile, double scale) noexcept nogil
        void (*round_weights)(const ta_dots *dots, uint16_t *dst, const ta_attention_tile *tile,
                              Py_ssize_t begin, Py_ssize_t end) noexcept nogil
        void (*value_dots)(const ta_attention_tile *tile, const ta_dots *dots) noexcept nogil
        double (*dot_rounds)(const ta_dots *dots, Py_ssize_t rounds) noexcept nogil
        void (*start_row)(void *out, Py_ssize_t columns, void *row_max, void *row_sum,
                          double sink) noexcept nogil
        void (*weigh_tile)(const ta_attention_tile *tile) noexcept nogil
        void (*weigh_few)(const ta_attention_tile *tile) noexcept nogil
        void (*add_rows)(void *dst, const void *src, Py_ssize_t rows, Py_ssize_t columns,
                         Py_ssize_t row_stride) noexcept nogil
        void (*value_tile)(const ta_attention_tile *tile) noexcept nogil
        int (*load_key_options)(void *key_bias, const ta_score_options *options, const ta_score_row *row,
                                Py_ssize_t key_start, Py_ssize_t *key_begin,
                                Py_ssize_t *key_end) noexcept nogil
        void (*trim_tile)(ta_attention_tile *tile) noexcept nogil
        void (*copy_finite)(void *dst, const void *src, Py_ssize_t rows, Py_ssize_t columns,
                            Py_ssize_t row_stride) noexcept nogil
        void (*add_strays)(const ta_attention_tile *tile, const void *v,
                           Py_ssize_t v_stride) noexcept nogil
        void (*merge_row)(void *out, void *row_max, void *row_sum, const void *other_out,
                          const void *other_max, const void *other_sum,
                          Py_ssize_t columns) noexcept nogil
        int (*all_finite)(const void *src, Py_ssize_t rows, Py_ssize_t columns,
                          Py_ssize_t row_stride) noexcept nogil
        void (*add_norm_row)(void *dst, const void *x, const void *residual,
                             const ta_norm *norm) noexcept nogil
        void (*rotate_row)(void *dst, const void *src, const void *cos, const void *sin,
                           const ta_rope *rope) noexcept nogil
        double (*fma_rounds)(Py_ssize_t rounds) noexcept nogil
        double (*read_all)(const void *src, Py_ssize_t count) noexcept nogil

    ctypedef struct ta_isa:
        const char *name
        int (*supported)() noexcept nogil
        int (*chosen)() noexcept nogil
        const ta_kernels *f32
        const ta_kernels *f64
        const ta_dots *dots

    const ta_isa *ta_isas
    const int ta_isa_count

    int ta_allowed_cpus() noexcept nogil
    int ta_watch_fork() noexcept nogil
    int ta_is_forked_child() noexcept nogil
    void *ta_allocate(size_t size) noexcept nogil
    void ta_release(void *memory) noexcept nogil

    ctypedef struct ta_floats:
        pass

    ta_floats ta_take_floats() noexcept nogil
    void ta_give_floats(ta_floats before) noexcept nogil
