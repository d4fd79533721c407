"""Checks shared by the fast path and the reference: every fault is found here, before any work.

A message names the argument, what came and what was expected.
"""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
Integers: TypeAlias = npt.NDArray[np.int64]

# More is a mistake, and a failing thread creation would end the process.
MAX_THREADS = 1024

FLOAT_TYPES = (np.dtype(np.float32), np.dtype(np.float64))

# Far beyond any sequence, and far from where position + offset would overflow.
OFFSET_LIMIT = 1 << 60


class SetOnce:
    """Base of objects whose attributes do not change: what was checked stays so."""

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(self, name):
            raise AttributeError(f"{type(self).__name__}.{name} does not change: make another")
        super().__setattr__(name, value)


class Mask(NamedTuple):
    """Which query sees which key, as `check_mask` found it."""

    is_causal: bool
    query_offset: Integers | None
    query_lengths: Integers | None
    key_value_lengths: Integers | None


class AttentionArguments(NamedTuple):
    """What `check_attention` found, with the B axis in place."""

    q: Array
    k: Array
    v: Array
    has_batch: bool
    scale: float
    mask: Mask
    out: Array | None


class NormParameters(SetOnce):
    """Weight, bias and eps of a LayerNorm; the arrays are read-only copies."""

    def __init__(
        self,
        weight: npt.ArrayLike | None = None,
        bias: npt.ArrayLike | None = None,
        eps: float = 1e-5,
    ) -> None:
        self.weight = check_vector("weight", weight)
        self.bias = check_vector("bias", bias)
        self.eps = check_real("eps", eps)
        if self.eps < 0:
            raise ValueError(f"eps must not be negative, got {eps}")
        if self.weight is not None:
            self.check_fit(len(self.weight), self.weight.dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.weight, self.bias, self.eps)

    def check_fit(self, D: int, dtype: np.dtype[Any], prefix: str = "") -> None:
        """Raise unless rows of that width and dtype can be normalised."""
        for name, vector in (("weight", self.weight), ("bias", self.bias)):
            if vector is None:
                continue
            if vector.dtype != dtype:
                raise TypeError(
                    f"{prefix}{name} has dtype {vector.dtype}, expected {dtype}; convert it with "
                    f".astype"
                )
            if len(vector) != D:
                raise ValueError(f"{prefix}{name} has shape {vector.shape}, expected ({D},)")


class BlockWeights(NamedTuple):
    """What `check_block_weights` found, in the order of `_core.Block`; vectors are copies."""

    matrices: tuple[Array, Array, Array, Array]
    biases: tuple[Array | None, Array | None, Array | None, Array | None]
    norm: tuple[Array | None, Array | None, float] | None
    residual: bool
    scale: float
    is_causal: bool


def check_attention(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    *,
    scale: float | None,
    is_causal: bool,
    query_offset: npt.ArrayLike | None,
    query_seq_lengths: npt.ArrayLike | None,
    key_value_seq_lengths: npt.ArrayLike | None,
    out: Array | None,
) -> AttentionArguments:
    """Check all arguments of an attention call and bring them into one form."""
    q = check_array("q", q)
    k, v = check_array("k", k, q.dtype), check_array("v", v, q.dtype)
    if q.ndim not in (3, 4):
        raise ValueError(f"q must have the axes [B, T, N, H] or [T, N, H], not shape {q.shape}")
    has_batch = q.ndim == 4
    if k.ndim != q.ndim or v.ndim != q.ndim:
        name, array, width = ("k", k, "H") if k.ndim != q.ndim else ("v", v, "Hv")
        axes = f"[{'B, ' if has_batch else ''}S, K, {width}]"
        raise ValueError(
            f"{name} must have the axes {axes} since q has shape {q.shape}, not shape {array.shape}"
        )
    if not has_batch:
        q, k, v = q[None], k[None], v[None]
    B, T, N, H = q.shape
    k_batch, S, K, k_width = k.shape
    v_batch, v_length, v_heads, Hv = v.shape
    if k_batch != B or v_batch != B:
        raise ValueError(f"q, k and v must have the same batch B, not {B}, {k_batch} and {v_batch}")
    if k_width != H:
        raise ValueError(f"k has head width H = {k_width}, but q has H = {H}")
    if v_length != S:
        raise ValueError(f"v has {v_length} positions S, but k has {S}")
    if v_heads != K:
        raise ValueError(f"v has {v_heads} heads K, but k has {K}")
    if N != 0 and (K == 0 or N % K != 0):
        raise ValueError(
            f"q has N = {N} heads, which must be a multiple of the K = {K} heads of k and v"
        )
    if out is not None:
        expected = (B, T, N, Hv) if has_batch else (T, N, Hv)
        check_out(out, expected, q.dtype, q=q, k=k, v=v)
        if not has_batch:
            out = out[None]
    mask = check_mask(B, T, S, is_causal, query_offset, query_seq_lengths, key_value_seq_lengths)
    return AttentionArguments(q, k, v, has_batch, check_scale(scale, H), mask, out)


def check_block_weights(
    w_q: npt.ArrayLike,
    w_k: npt.ArrayLike,
    w_v: npt.ArrayLike,
    w_o: npt.ArrayLike,
    *,
    b_q: npt.ArrayLike | None,
    b_k: npt.ArrayLike | None,
    b_v: npt.ArrayLike | None,
    b_o: npt.ArrayLike | None,
    norm: NormParameters | None,
    residual: bool,
    scale: float | None,
    is_causal: bool,
) -> BlockWeights:
    """Check what an attention block is made of."""
    w_q = check_array("w_q", w_q)
    dtype = w_q.dtype
    w_k, w_v = check_array("w_k", w_k, dtype), check_array("w_v", w_v, dtype)
    w_o = check_array("w_o", w_o, dtype)
    for name, weight, axes in (
        ("w_q", w_q, "[D, N, H]"),
        ("w_k", w_k, "[Dc, K, H]"),
        ("w_v", w_v, "[Dc, K, Hv]"),
        ("w_o", w_o, "[N, Hv, D]"),
    ):
        if weight.ndim != 3 or 0 in weight.shape:
            raise ValueError(f"{name} must have the axes {axes}, none empty, not {weight.shape}")
    (D, N, H), (Dc, K, Hv) = w_q.shape, w_v.shape
    if N % K != 0:
        raise ValueError(f"w_q has N = {N} heads, which must be a multiple of w_v's K = {K}")
    for name, weight, expected in (("w_k", w_k, (Dc, K, H)), ("w_o", w_o, (N, Hv, D))):
        if weight.shape != expected:
            raise ValueError(
                f"{name} has shape {weight.shape}, expected {expected} from w_q {w_q.shape} and "
                f"w_v {w_v.shape}"
            )
    if norm is not None:
        if not isinstance(norm, NormParameters):
            raise TypeError(f"norm must be a LayerNorm or None, not {type(norm).__name__}")
        norm.check_fit(D, dtype, "norm.")
    biases = (
        check_vector("b_q", b_q, (N, H), dtype),
        check_vector("b_k", b_k, (K, H), dtype),
        check_vector("b_v", b_v, (K, Hv), dtype),
        check_vector("b_o", b_o, (D,), dtype),
    )
    return BlockWeights(
        (w_q, w_k, w_v, w_o),
        biases,
        None if norm is None else (norm.weight, norm.bias, norm.eps),
        check_flag("residual", residual),
        check_scale(scale, H),
        check_flag("is_causal", is_causal),
    )


def check_block_inputs(
    x: npt.ArrayLike,
    context: npt.ArrayLike | None,
    D: int,
    Dc: int,
    dtype: np.dtype[Any],
    *,
    is_causal: bool,
    query_offset: npt.ArrayLike | None,
    query_seq_lengths: npt.ArrayLike | None,
    key_value_seq_lengths: npt.ArrayLike | None,
    out: Array | None,
) -> tuple[Array, Array | None, Mask, bool]:
    """Check a call of an attention block that is made for those widths and that dtype.

    Returns x and context with the B axis in place, who sees whom, and whether B was given.
    """
    x = check_array("x", x, dtype)
    if x.ndim not in (2, 3) or x.shape[-1] != D:
        raise ValueError(f"x must have the shape [B, T, {D}] or [T, {D}], not {x.shape}")
    has_batch = x.ndim == 3
    if context is not None:
        context = check_array("context", context, dtype)
        if context.ndim != x.ndim or context.shape[-1] != Dc:
            raise ValueError(
                f"context must have the shape [{'B, ' if has_batch else ''}S, {Dc}] since x has "
                f"shape {x.shape}, not {context.shape}"
            )
    elif Dc != D:
        raise ValueError(
            f"context is missing: this block's keys and values come from a context of width {Dc}, "
            f"not from x of width {D}"
        )
    if out is not None:
        check_out(out, x.shape, dtype, x=x, context=context)
    if not has_batch:
        x, context = x[None], None if context is None else context[None]
    B, T, _ = x.shape
    S = T if context is None else context.shape[1]
    if context is not None and len(context) != B:
        raise ValueError(f"context has batch B = {len(context)}, but x has {B}")
    mask = check_mask(B, T, S, is_causal, query_offset, query_seq_lengths, key_value_seq_lengths)
    return x, context, mask, has_batch


def check_norm_inputs(
    x: npt.ArrayLike, residual: npt.ArrayLike | None, norm: NormParameters, out: Array | None
) -> tuple[Array, Array | None]:
    """Check x, and what is added to it, for a LayerNorm with those parameters."""
    x = check_array("x", x)
    if x.ndim == 0:
        raise ValueError("x must have at least one axis, [..., D]")
    if residual is not None:
        residual = check_array("residual", residual, x.dtype)
        if residual.shape != x.shape:
            raise ValueError(f"residual has shape {residual.shape}, expected {x.shape}")
    norm.check_fit(x.shape[-1], x.dtype)
    if out is not None:
        check_out(out, x.shape, x.dtype, x=x, residual=residual)
    return x, residual


def as_array(name: str, value: npt.ArrayLike) -> Array:
    if type(value) is np.ndarray:
        return value
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(
            f"{name} is a masked array, and its mask would be lost: fill it with .filled(value)"
        )
    return np.asarray(value)


def check_array(name: str, value: npt.ArrayLike, dtype: np.dtype[Any] | None = None) -> Array:
    """A float32 or float64 array that pointers and whole-element strides can reach."""
    array = as_array(name, value)
    if array.dtype not in FLOAT_TYPES:
        native = array.dtype.newbyteorder("=")
        if native not in FLOAT_TYPES:
            raise TypeError(
                f"{name} must be float32 or float64, not {array.dtype}; convert it with "
                f".astype(np.float32)"
            )
        array = array.astype(native)
    if dtype is not None and array.dtype != dtype:
        raise TypeError(
            f"{name} has dtype {array.dtype}, expected {dtype}; convert it with .astype"
        )
    return array if _has_whole_strides(array) else array.copy()


def _has_whole_strides(array: Array) -> bool:
    flags, itemsize = array.flags, array.itemsize
    return flags.carray or (
        flags.aligned and all(stride % itemsize == 0 for stride in array.strides)
    )


def check_flag(name: str, value: bool) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    raise TypeError(f"{name} must be True or False, not {value!r}")


def check_int(name: str, value: Any) -> int:
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{name} must be an int, not {value!r}")


def check_real(name: str, value: Any) -> float:
    array = as_array(name, value)
    if array.ndim != 0 or array.dtype.kind not in "fiub":
        raise TypeError(f"{name} must be a real number, not {value!r}")
    number = float(array)
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, not {value!r}")
    return number


def check_scale(scale: float | None, H: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(H) if H else 1.0
    return check_real("scale", scale)


def check_mask(
    B: int,
    T: int,
    S: int,
    is_causal: bool,
    query_offset: npt.ArrayLike | None,
    query_seq_lengths: npt.ArrayLike | None,
    key_value_seq_lengths: npt.ArrayLike | None,
) -> Mask:
    return Mask(
        check_flag("is_causal", is_causal),
        check_query_offset(query_offset, B, T, S, is_causal),
        check_lengths("query_seq_lengths", query_seq_lengths, B, T),
        check_lengths("key_value_seq_lengths", key_value_seq_lengths, B, S),
    )


def check_integers(name: str, value: npt.ArrayLike, B: int, *, scalar: bool) -> Integers:
    """Integers of shape [B] as contiguous int64, from an int too where `scalar` says so."""
    array = as_array(name, value)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers, not {array.dtype}")
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name} is too large: {array.max()}")
    if array.ndim == 0 and scalar:
        return np.full(B, array, np.int64)
    if array.shape != (B,):
        either = "an int or " if scalar else ""
        raise ValueError(f"{name} must be {either}of shape [B] = ({B},), not {array.shape}")
    return np.ascontiguousarray(array, np.int64)


def check_query_offset(
    query_offset: npt.ArrayLike | None, B: int, T: int, S: int, is_causal: bool
) -> Integers | None:
    """The position of query row 0 in each sequence; None for 0 in all."""
    if query_offset is None:
        if is_causal and T != S:
            raise ValueError(
                f"is_causal with T = {T} queries and S = {S} keys needs query_offset, the position "
                f"of the first query: 0 aligns it with the first key, S - T = {S - T} the last "
                f"query with the last key"
            )
        return None
    offset = check_integers("query_offset", query_offset, B, scalar=True)
    if B and (offset.min() < -OFFSET_LIMIT or offset.max() > OFFSET_LIMIT):
        raise ValueError(f"query_offset must lie within +-2**60, got {query_offset!r}")
    return offset


def check_lengths(name: str, value: npt.ArrayLike | None, B: int, limit: int) -> Integers | None:
    if value is None:
        return None
    lengths = check_integers(name, value, B, scalar=False)
    if B and (lengths.min() < 0 or lengths.max() > limit):
        raise ValueError(
            f"{name} must lie between 0 and {limit}, got {lengths.min()} ... {lengths.max()}"
        )
    return lengths


def check_vector(
    name: str,
    value: npt.ArrayLike | None,
    shape: tuple[int, ...] | None = None,
    dtype: np.dtype[Any] | None = None,
) -> Array | None:
    """A read-only contiguous copy of a bias or the like, by default any [D]; None for None."""
    if value is None:
        return None
    vector = check_array(name, value, dtype)
    if vector.ndim != 1 if shape is None else vector.shape != shape:
        raise ValueError(f"{name} has shape {vector.shape}, expected {shape or '[D]'}")
    vector = vector.copy()
    vector.flags.writeable = False
    return vector


def check_out(
    out: Any, shape: tuple[int, ...], dtype: np.dtype[Any], **inputs: Array | None
) -> None:
    if not isinstance(out, np.ndarray) or isinstance(out, np.ma.MaskedArray):
        raise TypeError(f"out must be a plain NumPy array, not {type(out).__name__}")
    if out.dtype != dtype:
        raise TypeError(f"out has dtype {out.dtype}, expected {dtype}")
    if out.shape != shape:
        raise ValueError(f"out has shape {out.shape}, expected {shape}")
    if not out.flags.writeable:
        raise ValueError("out is read-only")
    if not _has_whole_strides(out):
        raise ValueError("out must be aligned to its elements")
    if overlaps_itself(out):
        raise ValueError("out must have a place of its own in memory for each element")
    for name, array in inputs.items():
        if array is not None and overlaps(out, array):
            raise ValueError(f"out overlaps {name} in memory; pass an array of its own")


def overlaps(a: Array, b: Array) -> bool:
    if not np.may_share_memory(a, b):
        return False
    try:
        # NumPy's stub allows no other bound than its two names for "none" and "ranges only".
        return np.shares_memory(a, b, max_work=100_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def overlaps_itself(a: Array) -> bool:
    """Whether elements share memory, or might: each axis must step over all of the finer ones."""
    if a.flags.c_contiguous:
        return False
    extent = a.itemsize
    for step, size in sorted(zip(map(abs, a.strides), a.shape, strict=True)):
        if size > 1:
            if step < extent:
                return True
            extent += step * (size - 1)
    return False


def check_num_threads(num_threads: Any) -> int:
    number = check_int("num_threads", num_threads)
    if not 1 <= number <= MAX_THREADS:
        raise ValueError(f"num_threads must lie between 1 and {MAX_THREADS}, got {number}")
    return number
