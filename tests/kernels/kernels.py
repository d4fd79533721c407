"""The C tile kernels as Python functions on NumPy arrays, with the structs of csrc/tileattn.h."""

import ctypes
import ctypes.util
import platform
from ctypes import CFUNCTYPE, POINTER, Structure, byref, c_double, c_int, c_ssize_t, c_void_p

import numpy as np

from tileattn import _core

try:
    from ml_dtypes import bfloat16
except ImportError:
    bfloat16 = np.void  # in the place of a dtype that no array can have then


class GemmTile(Structure):
    _fields_ = (
        ("rows", c_int),
        ("columns", c_int),
        ("depth", c_ssize_t),
        ("a", c_void_p),
        ("b", c_void_p),
        ("c", c_void_p),
        ("c_stride", c_ssize_t),
        ("accumulate", c_int),
        ("bias", c_void_p),
        ("panels", c_int),
        ("panel_stride", c_ssize_t),
        ("next", c_void_p),
        ("next_bytes", c_ssize_t),
    )


class Words(Structure):
    _fields_ = (
        ("data", c_void_p),
        ("scales", c_void_p),
        ("group", c_ssize_t),
        ("unit", c_double),
    )


class DotTile(Structure):
    _fields_ = (
        ("rows", c_int),
        ("columns", c_int),
        ("depth", c_ssize_t),
        ("a", c_void_p),
        ("a_stride", c_ssize_t),
        ("a_step", c_ssize_t),
        ("a_lot", c_ssize_t),
        ("b", c_void_p),
        ("b_stride", c_ssize_t),
        ("c", c_void_p),
        ("c_stride", c_ssize_t),
        ("accumulate", c_int),
        ("next", c_void_p),
        ("next_bytes", c_ssize_t),
    )


class Dots(Structure):
    _fields_ = (
        ("allowed", CFUNCTYPE(c_int)),
        ("begin", CFUNCTYPE(None)),
        ("end", CFUNCTYPE(None)),
        ("multiply", CFUNCTYPE(None, POINTER(DotTile))),
        ("multiply_bytes", CFUNCTYPE(None, POINTER(DotTile))),
        ("round", CFUNCTYPE(None, c_void_p, c_ssize_t, c_void_p, c_ssize_t)),
    )


class ScoreOptions(Structure):
    _fields_ = (
        ("softcap", c_double),
        ("bias_storage", c_int),
        ("bias_stride", c_ssize_t),
        ("mask_stride", c_ssize_t),
        ("key_bias", c_void_p),
    )


class ScoreRow(Structure):
    _fields_ = (
        ("bias", c_void_p),
        ("mask", c_void_p),
        ("slope", c_double),
        ("position", c_ssize_t),
    )


class AttentionTile(Structure):
    _fields_ = (
        ("rows", c_int),
        ("head_dim", c_ssize_t),
        ("v_columns", c_ssize_t),
        ("q", c_void_p),
        ("q_stride", c_ssize_t),
        ("k", c_void_p),
        ("k_stride", c_ssize_t),
        ("k_storage", c_int),
        ("v", c_void_p),
        ("v_stride", c_ssize_t),
        ("v_storage", c_int),
        ("k_scales", c_void_p),
        ("v_scales", c_void_p),
        ("key_start", c_ssize_t),
        ("key_begin", c_ssize_t),
        ("key_end", c_ssize_t),
        ("all_begin", c_ssize_t),
        ("all_end", c_ssize_t),
        ("first", c_void_p),
        ("last", c_void_p),
        ("options", c_void_p),
        ("score_rows", c_void_p),
        ("weights", c_void_p),
        ("row_max", c_void_p),
        ("keeps_max", c_int),
        ("row_sum", c_void_p),
        ("out", c_void_p),
        ("out_stride", c_ssize_t),
        ("next", c_void_p),
        ("next_stride", c_ssize_t),
        ("next_size", c_ssize_t),
    )


class State(Structure):
    _fields_ = (
        ("out", c_void_p),
        ("row_stride", c_ssize_t),
        ("column_stride", c_ssize_t),
        ("lse", c_void_p),
        ("lse_stride", c_ssize_t),
    )


class MergeTile(Structure):
    _fields_ = (
        ("rows", c_int),
        ("columns", c_ssize_t),
        ("parts", c_void_p),
        ("part_count", c_ssize_t),
        ("weights", c_void_p),
        ("out", c_void_p),
        ("lse", c_void_p),
    )


class Norm(Structure):
    _fields_ = (
        ("columns", c_ssize_t),
        ("normalize", c_int),
        ("subtract_mean", c_int),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("epsilon", c_double),
    )


class Rope(Structure):
    _fields_ = (
        ("heads", c_ssize_t),
        ("head_dim", c_ssize_t),
        ("rotary_dim", c_ssize_t),
        ("interleaved", c_int),
        ("dst_stride", c_ssize_t),
        ("src_stride", c_ssize_t),
    )


PROTOTYPES = {
    "pack_rows": (None, c_void_p, POINTER(c_void_p), c_int, c_ssize_t, c_ssize_t),
    "pack_columns": (None, c_void_p, c_void_p, *[c_ssize_t] * 5, c_double),
    "load_row": (None, c_void_p, c_void_p, c_ssize_t, c_ssize_t),
    "store_row": (None, c_void_p, c_void_p, c_ssize_t),
    "quantize_row": (None, c_void_p, c_void_p, c_void_p, c_ssize_t),
    "scale_columns": (None, c_void_p, c_void_p, c_ssize_t, c_ssize_t),
    "merge_states": (None, POINTER(MergeTile)),
    "gemm_tile": (None, POINTER(GemmTile)),
    "pack_words": (None, c_void_p, c_void_p, *[c_ssize_t] * 5),
    "stream_tile": (None, POINTER(GemmTile), POINTER(Words)),
    "convert_panel": (None, c_void_p, POINTER(Words), c_ssize_t, c_ssize_t),
    "pack_halves": (None, c_void_p, c_void_p, *[c_ssize_t] * 3),
    "round_row": (None, POINTER(Dots), c_void_p, c_ssize_t, c_void_p, *[c_ssize_t] * 2),
    "pack_key_words": (None, c_void_p, POINTER(c_void_p), c_ssize_t, c_ssize_t),
    "pack_value_words": (None, c_void_p, c_void_p, *[c_ssize_t] * 6),
    "drop_strays": (c_int, c_void_p, c_ssize_t),
    "gemm_dots": (None, POINTER(GemmTile), c_ssize_t, POINTER(Dots)),
    "gemm_bytes": (None, POINTER(GemmTile), c_ssize_t, c_void_p, c_void_p, POINTER(Dots)),
    "weigh_dots": (None, POINTER(AttentionTile), c_double),
    "round_weights": (None, POINTER(Dots), c_void_p, POINTER(AttentionTile), c_ssize_t, c_ssize_t),
    "value_dots": (None, POINTER(AttentionTile), POINTER(Dots)),
    "dot_rounds": (c_double, POINTER(Dots), c_ssize_t),
    "start_row": (None, c_void_p, c_ssize_t, c_void_p, c_void_p, c_double),
    "weigh_tile": (None, POINTER(AttentionTile)),
    "weigh_few": (None, POINTER(AttentionTile)),
    "add_rows": (None, c_void_p, c_void_p, *[c_ssize_t] * 3),
    "value_tile": (None, POINTER(AttentionTile)),
    "load_key_options": (c_int, c_void_p, POINTER(ScoreOptions), POINTER(ScoreRow), c_ssize_t)
    + (POINTER(c_ssize_t),) * 2,
    "trim_tile": (None, POINTER(AttentionTile)),
    "copy_finite": (None, c_void_p, c_void_p, c_ssize_t, c_ssize_t, c_ssize_t),
    "add_strays": (None, POINTER(AttentionTile), c_void_p, c_ssize_t),
    "merge_row": (None, *[c_void_p] * 6, c_ssize_t),
    "finish_row": (None, c_void_p, c_ssize_t, c_ssize_t, *[c_void_p] * 4),
    "all_finite": (c_int, c_void_p, c_ssize_t, c_ssize_t, c_ssize_t),
    "add_norm_row": (None, c_void_p, c_void_p, c_void_p, POINTER(Norm)),
    "rotate_row": (None, *[c_void_p] * 4, POINTER(Rope)),
    "fma_rounds": (c_double, c_ssize_t),
    "read_all": (c_double, c_void_p, c_ssize_t),
}


# in the order of enum ta_weights
WORDS = (None, "bfloat16", "int8", "int4")


def address(array):
    """Where an array's first element lies; None for None."""
    return None if array is None else array.ctypes.data


class Kernels:
    """The kernels of the selected instruction set for one element type, and their tile sizes.

    Those that meet a caller's array are dicts, a kernel for each dtype that it may have, and so are
    those for words of weights.
    """

    def __init__(self, dtype):
        self.dtype = np.dtype(dtype)
        self.isa = _core.active_isa()
        # in the order of enum ta_storage
        other = np.float64 if self.dtype == np.float32 else np.float32
        storages = [np.dtype(d) for d in (dtype, bfloat16, np.float16, other, np.int8)]
        for name, value in _core.kernel_table(self.dtype.name).items():
            if name in PROTOTYPES:
                function = CFUNCTYPE(*PROTOTYPES[name])
                keys = WORDS if name in ("pack_words", "stream_tile", "convert_panel") else storages
                if isinstance(value, list):
                    pairs = zip(keys, value, strict=True)
                    value = {d: function(at) for d, at in pairs if at and d != np.void}
                else:
                    value = function(value)
            elif name == "dots":
                value = Dots.from_address(value) if value else None
            setattr(self, name, value)
        # Every instruction set but SSE2 contracts a * b + c into one rounding.
        self.fuses = self.isa != "baseline" or platform.machine() in ("aarch64", "arm64")

    def multiply_add(self, a, b, c):
        """a * b + c, rounded as the kernels round it."""
        if not self.fuses:
            return a * b + c
        fma = _fmaf if self.dtype == np.float32 else _fma
        return np.asarray(fma(a, b, c)).astype(self.dtype)

    def whole_vectors(self, n):
        return -(-n // self.vl) * self.vl

    def attention_tile(self, **fields):
        """A tile from arrays and numbers; the caller keeps the arrays alive."""
        return byref(
            AttentionTile(
                **{
                    name: address(value) if isinstance(value, np.ndarray) else int(value)
                    for name, value in fields.items()
                }
            )
        )


def _from_libm(name, c_type):
    function = getattr(ctypes.CDLL(ctypes.util.find_library("m")), name)
    function.restype, function.argtypes = c_type, [c_type] * 3
    return np.frompyfunc(function, 3, 1)


_fma, _fmaf = _from_libm("fma", c_double), _from_libm("fmaf", ctypes.c_float)
