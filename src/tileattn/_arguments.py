"""Checks shared by the fast path and the reference: every fault is found here, before any work.

A message names the argument, what came and what was expected.
"""

from __future__ import annotations

import math
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


class AttentionArguments(NamedTuple):
    """What `check_attention` found, with the B axis in place."""

    q: Array
    k: Array
    v: Array
    has_batch: bool
    scale: float
    query_offset: Integers | None
    query_lengths: Integers | None
    key_value_lengths: Integers | None
    out: Array | None


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
    q, k, v = check_array("q", q), check_array("k", k), check_array("v", v)
    for name, array in (("k", k), ("v", v)):
        if array.dtype != q.dtype:
            raise TypeError(
                f"{name} has dtype {array.dtype}, but q has {q.dtype}; all must be the same: "
                f"convert one with .astype"
            )
    if q.ndim not in (3, 4):
        raise ValueError(f"q must have the axes [B, T, N, H] or [T, N, H], not shape {q.shape}")
    has_batch = q.ndim == 4
    layout = "[B, S, K, {}]" if has_batch else "[S, K, {}]"
    for name, array, width in (("k", k, "H"), ("v", v, "Hv")):
        if array.ndim != q.ndim:
            raise ValueError(
                f"{name} must have the axes {layout.format(width)} since q has shape {q.shape}, "
                f"not shape {array.shape}"
            )
    if not has_batch:
        q, k, v = q[None], k[None], v[None]
    B, T, N, H = q.shape
    S, K, Hv = k.shape[1], k.shape[2], v.shape[3]
    if k.shape[0] != B or v.shape[0] != B:
        raise ValueError(f"q, k and v must have the same batch B, not {B}, {len(k)} and {len(v)}")
    if k.shape[3] != H:
        raise ValueError(f"k has head width H = {k.shape[3]}, but q has H = {H}")
    if v.shape[1] != S:
        raise ValueError(f"v has {v.shape[1]} positions S, but k has {S}")
    if v.shape[2] != K:
        raise ValueError(f"v has {v.shape[2]} heads K, but k has {K}")
    if N != 0 and (K == 0 or N % K != 0):
        raise ValueError(
            f"q has N = {N} heads, which must be a multiple of the K = {K} heads of k and v"
        )

    if out is not None:
        expected = (B, T, N, Hv) if has_batch else (T, N, Hv)
        check_out(out, expected, q.dtype, {"q": q, "k": k, "v": v})
        if not has_batch:
            out = out[None]

    return AttentionArguments(
        q,
        k,
        v,
        has_batch,
        check_scale(scale, H),
        check_query_offset(query_offset, B, T, S, is_causal),
        check_lengths("query_seq_lengths", query_seq_lengths, B, T),
        check_lengths("key_value_seq_lengths", key_value_seq_lengths, B, S),
        out,
    )


def check_array(name: str, value: npt.ArrayLike, dtype: np.dtype[Any] | None = None) -> Array:
    """A float32 or float64 array that pointers and whole-element strides can reach."""
    array = value if type(value) is np.ndarray else np.asarray(value)
    kind = array.dtype.newbyteorder("=")
    if kind not in FLOAT_TYPES:
        raise TypeError(
            f"{name} must be float32 or float64, not {array.dtype}; convert it with "
            f".astype(np.float32)"
        )
    if dtype is not None and kind != dtype:
        raise TypeError(
            f"{name} has dtype {array.dtype}, expected {dtype}; convert it with .astype"
        )
    if not array.flags.aligned or (array.dtype is not kind and not array.dtype.isnative):
        return np.array(array, kind)
    itemsize = array.itemsize
    for stride in array.strides:
        if stride % itemsize:
            return np.array(array)
    return array


def check_scale(scale: float | None, H: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(H) if H else 1.0
    try:
        return float(scale)
    except (TypeError, ValueError):
        raise TypeError(f"scale must be a real number, not {scale!r}") from None


def check_integers(name: str, value: npt.ArrayLike, B: int, *, scalar: bool) -> Integers:
    """Integers of shape [B] as contiguous int64, from an int too where `scalar` says so."""
    array = np.asarray(value)
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
        if is_causal and T != S and B * T * S != 0:
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
    name: str, value: npt.ArrayLike | None, D: int | None, dtype: np.dtype[Any] | None
) -> Array | None:
    """A contiguous [D], or None."""
    if value is None:
        return None
    vector = check_array(name, value, dtype)
    if vector.ndim != 1 or (D is not None and len(vector) != D):
        raise ValueError(f"{name} has shape {vector.shape}, expected ({'D' if D is None else D},)")
    return np.ascontiguousarray(vector)


def check_bias(
    name: str, value: npt.ArrayLike | None, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> Array | None:
    """A contiguous copy of a bias, given with its heads apart or flat; None for None."""
    if value is None:
        return None
    bias = check_array(name, value, dtype)
    if bias.shape not in (shape, (math.prod(shape),)):
        raise ValueError(f"{name} has shape {bias.shape}, expected {shape}")
    return np.array(bias.reshape(-1))


def check_out(
    out: Any, shape: tuple[int, ...], dtype: np.dtype[Any], inputs: dict[str, Array | None]
) -> None:
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a NumPy array, not {type(out).__name__}")
    if out.dtype != dtype:
        raise TypeError(f"out has dtype {out.dtype}, expected {dtype}")
    if out.shape != shape:
        raise ValueError(f"out has shape {out.shape}, expected {shape}")
    if not out.flags.writeable:
        raise ValueError("out is read-only")
    if not out.flags.aligned or any(stride % out.itemsize for stride in out.strides):
        raise ValueError("out must be aligned to its elements")
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


def check_num_threads(num_threads: Any) -> int:
    if isinstance(num_threads, bool) or not hasattr(num_threads, "__index__"):
        raise TypeError(f"num_threads must be an int, not {num_threads!r}")
    number = int(num_threads.__index__())
    if not 1 <= number <= MAX_THREADS:
        raise ValueError(f"num_threads must lie between 1 and {MAX_THREADS}, got {number}")
    return number
