"""Arrays to measure on: random, placed where one says, as many copies as a cold cell takes."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
#: Start on a cache line, or 16 bytes after one as NumPy's own large arrays do.
Alignment = Literal["line", "numpy"]

#: Cold cells rotate over this many bytes, more than the largest last-level caches hold.
COLD_BYTES = 1 << 29
_LINE = 64
_HUGE_PAGE = 1 << 21


def empty(
    shape: tuple[int, ...], alignment: Alignment = "line", dtype: npt.DTypeLike = np.float32
) -> Array:
    """Uninitialised. From 4 MB on NumPy asks for huge pages, and it starts on one."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    page = _HUGE_PAGE if nbytes >= _HUGE_PAGE else _LINE
    raw = np.empty(nbytes + page + _LINE, np.uint8)
    start = -raw.ctypes.data % page + (16 if alignment == "numpy" else 0)
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def normal(
    rng: np.random.Generator,
    shape: tuple[int, ...],
    alignment: Alignment = "line",
    scale: float = 1.0,
    dtype: npt.DTypeLike = np.float32,
) -> Array:
    array = empty(shape, alignment, dtype)
    array[...] = np.float32(scale) * rng.standard_normal(shape, np.float32)
    return array


def copy(array: Array, alignment: Alignment = "line") -> Array:
    """The same numbers elsewhere, contiguous."""
    other = empty(array.shape, alignment, array.dtype)
    other[...] = array
    return other


def copies_if_cold(cold: bool, nbytes: int) -> int:
    """How many sets of arrays, of `nbytes` each, a cell rotates over."""
    # One more than fill the caches: until a set is used again, all the others have gone through.
    return 1 + math.ceil(COLD_BYTES / nbytes) if cold else 1
