"""Checks of what shapes the scores, and of which keys a query sees: the options of attention."""

from __future__ import annotations

import functools
import math
from typing import Any, TypeAlias

import numpy as np

from tileattn._core import Scores, Visibility
from tileattn._values import (
    Array,
    ArrayLike,
    Bool,
    Integers,
    arithmetic_type,
    as_array,
    as_integers,
    bounds,
    check_array,
    check_flag,
    check_int,
    check_integers,
    check_real,
    first_outside,
    frozen,
)

Window: TypeAlias = int | tuple[int | None, int | None] | None

# Far beyond any sequence, and far from where position + offset would overflow.
OFFSET_LIMIT = 1 << 60

# The integers up to it are float64 too.
POSITION_LIMIT = 1 << 53


@functools.cache
def largest_score(dtype: np.dtype[Any]) -> float:
    """What is still finite in units of log2, in which the arithmetic for that dtype counts."""
    # A little less than ln 2, to be told from the largest bias.
    return 0.693 * float(np.finfo(arithmetic_type(dtype)).max)


def check_scale(scale: float | None, H: int, dtype: np.dtype[Any]) -> float:
    if scale is None:
        return 1.0 / math.sqrt(H) if H else 1.0
    number, largest = check_real("scale", scale), largest_score(dtype)
    if abs(number) > largest:
        raise ValueError(
            f"scale must lie between {-largest:.3g} and {largest:.3g} in "
            f"{arithmetic_type(dtype)}, got {scale!r}"
        )
    return number


def check_scores(
    B: int | None,
    N: int,
    H: int,
    dtype: np.dtype[Any],
    *,
    scale: float | None,
    softcap: float | None,
    bias: Array | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
) -> Scores:
    """Check what q k^T goes through for inputs of that dtype. The bias is checked already."""
    return Scores(
        check_scale(scale, H, dtype),
        check_softcap(softcap, dtype),
        bias,
        check_alibi_slopes(alibi_slopes, B, N, dtype),
        check_sinks(sinks, N, dtype),
    )


def check_softcap(softcap: float | None, dtype: np.dtype[Any]) -> float:
    """The cap, 0 for none; what the arithmetic would round to 0 or infinity is refused."""
    if softcap is None:
        return 0.0
    cap = check_real("softcap", softcap)
    smallest, largest = float(np.finfo(arithmetic_type(dtype)).tiny), largest_score(dtype)
    if not smallest <= cap <= largest:
        raise ValueError(
            f"softcap must lie between {smallest:.3g} and {largest:.3g}, got {softcap!r}; None "
            f"caps nothing"
        )
    return cap


def check_mask(mask: ArrayLike | None, shape: tuple[int, ...]) -> Bool | None:
    """The mask as a view [B, N, T, S]; `shape` is that, or without B where the inputs are."""
    if mask is None:
        return None
    array = as_array("mask", mask)
    if array.dtype != bool:
        raise TypeError(
            f"mask must be boolean, True where a query may attend, not {array.dtype}; numbers to "
            f"add to the scores are a bias, and zeros and ones become a mask with .astype(bool)"
        )
    return _broadcast("mask", array, shape)


def check_bias(bias: ArrayLike | None, shape: tuple[int, ...]) -> Array | None:
    """The bias as a view [B, N, T, S]; `shape` is that, or without B where the inputs are."""
    if bias is None:
        return None
    array = as_array("bias", bias)
    if array.dtype == bool:
        raise TypeError(
            "bias must be floating, not bool; give what is True where a query may attend as mask"
        )
    return _broadcast("bias", check_array("bias", array, halves=True), shape)


def _broadcast(name: str, array: Array, shape: tuple[int, ...]) -> Array:
    try:
        view = np.broadcast_to(array, shape)
    except ValueError:
        axes = "[B, N, T, S]" if len(shape) == 4 else "[N, T, S]"
        raise ValueError(
            f"{name} has shape {array.shape}, expected one that broadcasts to {axes} = {shape}"
        ) from None
    return view if len(shape) == 4 else view[None]


def check_alibi_slopes(
    alibi_slopes: ArrayLike | None, B: int | None, N: int, dtype: np.dtype[Any]
) -> Array | None:
    """Slopes as a copy [B, N], from [N] or [B, N]; B is None where the inputs have no such axis."""
    if alibi_slopes is None:
        return None
    slopes = check_array("alibi_slopes", alibi_slopes, halves=True)
    if slopes.shape not in ((N,), (B, N)):
        either = f"[N] = ({N},)" + ("" if B is None else f" or [B, N] = ({B}, {N})")
        raise ValueError(f"alibi_slopes must be of shape {either}, not {slopes.shape}")
    copy = np.empty((1 if B is None else B, N), arithmetic_type(dtype))
    with np.errstate(all="ignore"):  # a signalling NaN is an invalid operand
        copy[...] = slopes
    largest = largest_score(dtype)
    if not (np.abs(copy) <= largest).all():
        raise ValueError(
            f"alibi_slopes must be finite, between {-largest:.3g} and {largest:.3g} in "
            f"{copy.dtype}, got {slopes}"
        )
    return copy


def check_sinks(sinks: ArrayLike | None, N: int, dtype: np.dtype[Any]) -> Array | None:
    """Sinks as a read-only copy [N]."""
    if sinks is None:
        return None
    array = check_array("sinks", sinks, halves=True)
    if array.shape != (N,):
        raise ValueError(f"sinks must be of shape [N] = ({N},), not {array.shape}")
    with np.errstate(all="ignore"):  # a signalling NaN is an invalid operand
        copy = np.array(array, arithmetic_type(dtype), order="C")
    largest = largest_score(dtype)
    if not ((np.abs(copy) <= largest) | (array == -np.inf)).all():
        raise ValueError(
            f"sinks must be finite, between {-largest:.3g} and {largest:.3g} in {copy.dtype}, or "
            f"-inf for none, got {array}"
        )
    return frozen(copy)


def check_window(local_window_size: Window) -> tuple[int, int] | None:
    """(left, right) with -1 where unbounded; None where both are."""
    if local_window_size is None:
        return None
    sides = local_window_size
    if not isinstance(sides, (tuple, list)):
        sides = (sides, sides)
    if len(sides) != 2:
        raise ValueError(f"local_window_size must be an int or a pair (left, right), not {sides!r}")
    left, right = map(_check_neighbours, sides)
    return None if left < 0 and right < 0 else (left, right)


def _check_neighbours(size: int | None) -> int:
    if size is None:
        return -1
    number = check_int("local_window_size", size)
    if number < 0:
        raise ValueError(f"local_window_size must not be negative, got {size}; None is unbounded")
    # So many reach every key from any position that an offset may give.
    return -1 if number > 2 * OFFSET_LIMIT else number


def check_visibility(
    B: int,
    T: int,
    S: int,
    *,
    is_causal: bool,
    query_offset: ArrayLike | None,
    query_seq_lengths: ArrayLike | None,
    key_value_seq_lengths: ArrayLike | None,
    local_window_size: Window = None,
    alibi_slopes: ArrayLike | None = None,
    has_rope: bool = False,
    mask: Bool | None = None,
) -> Visibility:
    """Check who sees whom. The mask is checked already; slopes only count as given or not."""
    causal, window = check_flag("is_causal", is_causal), check_window(local_window_size)
    needed_by = what_needs_positions(causal, window, alibi_slopes, has_rope)
    offset = check_query_offset(query_offset, B, T, S, needed_by=needed_by)
    if has_rope:
        check_rope_offset("query_offset", offset, T)
    return Visibility(
        causal,
        offset,
        check_lengths("query_seq_lengths", query_seq_lengths, B, T),
        check_lengths("key_value_seq_lengths", key_value_seq_lengths, B, S),
        window,
        mask,
    )


def what_needs_positions(
    is_causal: bool,
    window: tuple[int, int] | None,
    alibi_slopes: ArrayLike | None,
    has_rope: bool = False,
) -> str | None:
    """The argument, if any, whose meaning depends on where the queries stand."""
    if is_causal:
        return "is_causal"
    if window is not None:
        return "local_window_size"
    if has_rope:
        return "rope"
    return None if alibi_slopes is None else "alibi_slopes"


def check_starts(name: str, value: ArrayLike, packed: str, total: int) -> Integers:
    """Where each sequence starts, and the end of the last, as a copy [B + 1]."""
    array = as_integers(name, value)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{name} must be of shape [B + 1], not {array.shape}")
    starts = np.array(array, np.int64, order="C")
    if starts[0] != 0 or starts[-1] != total:
        raise ValueError(
            f"{name} must start at 0 and end at {total}, the rows of {packed}, "
            f"not {starts[0]} ... {starts[-1]}"
        )
    falls = np.flatnonzero(starts[1:] < starts[:-1])
    if len(falls):
        b = falls[0]
        raise ValueError(f"{name} must not decrease, but {starts[b + 1]} follows {starts[b]}")
    return starts


def check_rows(rows: ArrayLike | None, T: int) -> Integers | None:
    """Positions of queries as a copy [R]."""
    if rows is None:
        return None
    array = as_integers("rows", rows)
    if array.ndim != 1:
        raise ValueError(f"rows must be of shape [R], not {array.shape}")
    if array.size and (array.min() < 0 or array.max() >= T):
        wrong = first_outside(array, 0, T - 1)
        raise ValueError(f"rows must lie between 0 and T - 1 = {T - 1}, got {wrong}")
    return np.array(array, np.int64, order="C")


def check_query_offset(
    query_offset: ArrayLike | None,
    B: int,
    T: int,
    S: int,
    *,
    needed_by: str | None,
    where: str = "",
) -> Integers | None:
    """The position of query row 0 in each sequence; None for 0 in all."""
    if query_offset is None:
        if needed_by is not None and T != S:
            raise ValueError(
                f"{needed_by} with T = {T} queries and S = {S} keys{where} needs query_offset, the "
                f"position of the first query: 0 aligns it with the first key, S - T = {S - T} the "
                f"last query with the last key"
            )
        return None
    offset = check_integers("query_offset", query_offset, B, scalar=True)
    if B:
        lowest, highest = bounds(offset)
        if lowest < -OFFSET_LIMIT or highest > OFFSET_LIMIT:
            raise ValueError(f"query_offset must lie within +-2**60, got {query_offset!r}")
    return offset


def check_rope_offset(name: str, offset: Integers | None, T: int) -> None:
    if offset is None or not offset.size:
        return
    lowest, highest = bounds(offset)
    if lowest < 0 or highest + T > POSITION_LIMIT:
        raise ValueError(
            f"{name} must lie between 0 and 2**53 - T with rope, got {offset.tolist()}"
        )


def check_lengths(name: str, value: ArrayLike | None, B: int, limit: int) -> Integers | None:
    if value is None:
        return None
    lengths = check_integers(name, value, B, scalar=False)
    if B:
        lowest, highest = bounds(lengths)
        if lowest < 0 or highest > limit:
            wrong = first_outside(lengths, 0, limit)
            raise ValueError(f"{name} must lie between 0 and {limit}, got {wrong}")
    return lengths
