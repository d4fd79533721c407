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


def empty(shape: tuple[int, ...], alignment: Alignment = "line") -> Array:
    """Uninitialised float32. From 4 MB on NumPy asks for huge pages, and it starts on one."""
    count = math.prod(shape)
    page = _HUGE_PAGE if 4 * count >= _HUGE_PAGE else _LINE
    raw = np.empty(count + (page + _LINE) // 4, np.float32)
    start = -raw.ctypes.data % page // 4 + (4 if alignment == "numpy" else 0)
    return raw[start : start + count].reshape(shape)


def normal(
    rng: np.random.Generator,
    shape: tuple[int, ...],
    alignment: Alignment = "line",
    scale: float = 1.0,
) -> Array:
    array = empty(shape, alignment)
    rng.standard_normal(out=array, dtype=np.float32)
    array *= np.float32(scale)
    return array


def copy(array: Array, alignment: Alignment = "line") -> Array:
    """The same numbers elsewhere, contiguous."""
    other = empty(array.shape, alignment)
    other[...] = array
    return other


def copies_if_cold(cold: bool, nbytes: int) -> int:
    """How many sets of arrays, of `nbytes` each, a cell rotates over."""
    return math.ceil(COLD_BYTES / nbytes) if cold else 1
