"""Checks of a single argument, whatever call it belongs to: an array, a number, an output.

A message names the argument, what came and what was expected.
"""

from __future__ import annotations

import math
import operator
import sys
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt


class SupportsDLPack(Protocol):
    """An array of another library, which need not have more in common with NumPy's."""

    def __dlpack_device__(self) -> tuple[int, int]: ...

    def __dlpack__(self) -> Any: ...


ArrayLike: TypeAlias = npt.ArrayLike | SupportsDLPack
Array: TypeAlias = npt.NDArray[Any]
Integers: TypeAlias = npt.NDArray[np.int64]
Bool: TypeAlias = npt.NDArray[np.bool_]

# More is a mistake, and a failing thread creation would end the process.
MAX_THREADS = 1024

FLOAT_TYPES = (np.dtype(np.float32), np.dtype(np.float64))

# Only stored; the arithmetic is float32's. By name, since bfloat16 is another package's.
HALF_TYPES = ("float16", "bfloat16")

# DLPack's numbers of what the CPU reads as its own memory: that, and what CUDA or ROCm pinned.
HOST_DEVICES = (1, 3, 11)
DEVICES = {2: "CUDA", 8: "Metal", 10: "ROCm", 14: "oneAPI"}

# What comes with every step, and has no device: looking for one would take longer than reading it.
PLAIN = (float, int, list, np.ndarray)

# A copy that takes long is not made in silence.
TO_CPU = "copy it to the CPU first: .cpu() in PyTorch, .get() in CuPy, jax.device_get(x) in JAX"

#: Characters of a message that repeats what a file or a command line holds.
LONGEST_MESSAGE = 1000


def shortened(message: str) -> str:
    """A message as one line that is not too long to be read, and that no terminal obeys."""
    line = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode()
        for c in " ".join(message.split())
    )
    return line if len(line) <= LONGEST_MESSAGE else line[:LONGEST_MESSAGE] + " ..."


class SetOnce:
    """Base of objects whose attributes do not change: what was checked stays so."""

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(self, name):
            raise AttributeError(f"{type(self).__name__}.{name} does not change: make another")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} does not change: make another")


def check_choice(name: str, value: str | None, *choices: str) -> str | None:
    """One of a few names, or None."""
    if value is None:
        return None
    message = f"{name} must be {', '.join(map(repr, choices))} or None, not {value!r}"
    if not isinstance(value, str):
        raise TypeError(message)
    if value not in choices:
        raise ValueError(message)
    return value


def as_array(name: str, value: ArrayLike) -> Array:
    """What has an array (`__array__`, `__array_interface__`, DLPack) as one, in place."""
    if type(value) is np.ndarray:
        return value
    is_plain = isinstance(value, PLAIN)
    if not is_plain:
        _check_device(name, value)
    try:
        array = np.asanyarray(value) if is_plain else _read(value)
    except MemoryError:
        raise
    except Exception as error:  # such as rows of several lengths, or a gradient that would be lost
        refusal = ValueError if isinstance(error, ValueError) else TypeError
        raise refusal(f"{name}{_type_of(value)} gives no array: {error}") from error
    if _is_masked(array) or _is_masked(value):
        raise TypeError(
            f"{name} is a masked array, and its mask would be lost: fill it with .filled(value)"
        )
    return np.asarray(array)


def _is_masked(value: Any) -> bool:
    """Whether NumPy would drop a mask: that of an array, or of one in a list."""
    if isinstance(value, (list, tuple)):
        return any(map(_is_masked, value))
    return isinstance(value, np.ma.MaskedArray)


def _check_device(name: str, value: Any) -> None:
    """Raise if the memory is not the CPU's; what does not say so is a matter of its `__array__`."""
    try:
        # A class has these for its objects, not for itself.
        if hasattr(type(value), "__dlpack_device__"):
            kind, number = map(int, value.__dlpack_device__())
            if kind in HOST_DEVICES:
                return
            device = f"{DEVICES.get(kind, f'DLPack type {kind}')} device {number}"
        elif hasattr(value, "__cuda_array_interface__"):
            device = "a CUDA device"
        else:
            return
    except Exception as error:
        raise TypeError(
            f"{name}{_type_of(value)} is on an unknown device: {error}; {TO_CPU}"
        ) from error
    raise TypeError(f"{name}{_type_of(value)} is on {device}; {TO_CPU}")


def _read(value: Any) -> Array:
    if not hasattr(value, "__dlpack__"):
        return np.asanyarray(value)
    torch: Any = sys.modules.get("torch")
    is_tensor = torch is not None and isinstance(value, torch.Tensor)
    # torch itself refuses to drop a gradient, but not what forward mode carries along.
    if is_tensor and torch.autograd.forward_ad.unpack_dual(value).tangent is not None:
        raise TypeError("it has a tangent, which would be lost")
    # As integers, since torch and NumPy's DLPack have no such type in common; but with a gradient,
    # which would be lost in silence, it is torch that refuses below.
    if is_tensor and value.dtype == torch.bfloat16 and not value.requires_grad:
        return np.asarray(value.view(torch.int16)).view(bfloat16_type("bfloat16"))
    return np.asanyarray(value) if hasattr(value, "__array__") else np.from_dlpack(value)


def bfloat16_type(name: str) -> np.dtype[Any]:
    try:
        import ml_dtypes
    except ImportError:
        raise TypeError(f"{name} needs the package ml_dtypes: pip install ml_dtypes") from None
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def check_array(
    name: str,
    value: ArrayLike,
    dtype: np.dtype[Any] | None = None,
    *,
    halves: bool = False,
    like: str = "",
) -> Array:
    """A view of a floating array that pointers and whole-element strides can reach.

    It stays what it is if another argument's own code changes the array's shape meanwhile. The
    array is float32 or float64, or float16 or bfloat16 where `halves` says so; or else `dtype`,
    which may be that of the argument `like`.
    """
    return check_floats(name, value, dtype, halves, like)[...]


def check_floats(
    name: str, value: ArrayLike, dtype: np.dtype[Any] | None, halves: bool, like: str
) -> Array:
    array = as_array(name, value)
    native = given = array.dtype
    if native not in FLOAT_TYPES:
        if native.kind in "fV":  # bfloat16 is a V; others may have no byte order
            native = native.newbyteorder("=")
        if native not in FLOAT_TYPES and not (halves and is_half(native)):
            types = "float16, bfloat16, float32 or float64" if halves else "float32 or float64"
            raise TypeError(
                f"{name}{_type_of(value)} must be {types}, not {given}; convert it with "
                ".astype(np.float32)"
            )
    if dtype is not None and native != dtype:
        if like:
            raise TypeError(
                f"{name}{_type_of(value)} has dtype {given}, but {like} has {dtype}; make both "
                "arrays of one dtype (with .astype)"
            )
        raise TypeError(f"{name} has dtype {given}, expected {dtype}; convert it with .astype")
    if native == given and _has_whole_strides(array):
        return array
    # What a stride of 0 repeats is copied once.
    once = array[(*(slice(None if step else 1) for step in array.strides), ...)]
    return np.broadcast_to(once.astype(native), array.shape)


def _type_of(value: Any) -> str:
    return "" if isinstance(value, np.ndarray) else f" (of type {type(value).__name__})"


def check_stored_type(name: str, stored: np.dtype[Any], dtype: np.dtype[Any]) -> None:
    """Raise unless a cache of that type is for arithmetic in `dtype`."""
    if arithmetic_type(stored) != dtype:
        halves = ", float16, bfloat16 or int8" if dtype == np.float32 else ""
        raise TypeError(f"{name} is {stored}, expected {dtype}{halves}")


def is_half(dtype: np.dtype[Any]) -> bool:
    # Their names alone would admit what calls itself so, of any size.
    return dtype.name in HALF_TYPES and dtype.type.__name__ == dtype.name and dtype.itemsize == 2


def arithmetic_type(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """What inputs of that type are computed in; the LSE is of it."""
    return dtype if dtype in FLOAT_TYPES else FLOAT_TYPES[0]


def _has_whole_strides(array: Array) -> bool:
    flags = array.flags
    return flags.carray or (
        flags.aligned and all(stride % array.itemsize == 0 for stride in array.strides)
    )


def check_flag(name: str, value: bool) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    raise TypeError(f"{name} must be True or False, not {value!r}")


def check_int(name: str, value: Any) -> int:
    cause = None
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except Exception as error:  # a tensor without data has errors of its own
        cause = error
    raise TypeError(f"{name} must be an int, not {value!r}") from cause


def check_real(name: str, value: Any) -> float:
    array = as_array(name, value)
    if array.ndim != 0 or array.dtype.kind not in "fiub":
        raise TypeError(f"{name} must be a real number, not {value!r}")
    number = float(array)
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, not {value!r}")
    return number


def check_at_least(name: str, value: Any, least: float) -> float:
    number = check_real(name, value)
    if number < least:
        raise ValueError(f"{name} must be at least {least:g}, got {value!r}")
    return number


def as_integers(name: str, value: ArrayLike) -> Array:
    """An array of integers that int64 can hold."""
    array = as_array(name, value)
    if array.size == 0 and isinstance(value, (list, tuple)):  # of floats, for NumPy
        array = array.astype(np.int64)
    kind = array.dtype.kind
    if kind not in "iu":
        raise TypeError(f"{name} must hold integers, not {array.dtype}")
    if kind == "u" and array.size and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name} is too large: {array.max()}")
    return array


def bounds(integers: Integers) -> tuple[int, int]:
    """The smallest and the largest of some integers."""
    # A reduction of NumPy's takes 2 us, a small block 10.
    if integers.size <= 32:
        values = sorted(integers.tolist())
        return values[0], values[-1]
    return int(integers.min()), int(integers.max())


def first_outside(integers: Array, lowest: int, highest: int) -> str:
    """The first of some integers that does not lie there, and where it stands."""
    wrong = (integers < lowest) | (integers > highest)
    index = tuple(map(int, np.unravel_index(int(wrong.argmax()), wrong.shape)))
    return f"{integers[index]} at index {index[0] if len(index) == 1 else index}"


def check_integers(name: str, value: ArrayLike, B: int, *, scalar: bool) -> Integers:
    """Integers of shape [B] as a copy in int64, from an int too where `scalar` says so.

    A copy, since loops trust what has been checked.
    """
    array = as_integers(name, value)
    if array.ndim == 0 and scalar:
        array = array.repeat(B)
    elif array.shape != (B,):
        either = "an int or " if scalar else ""
        raise ValueError(f"{name} must be {either}of shape [B] = ({B},), not {array.shape}")
    return array.astype(np.int64)


def check_vector(
    name: str,
    value: ArrayLike | None,
    shape: tuple[int, ...] | None = None,
    dtype: np.dtype[Any] | None = None,
) -> Array | None:
    """A read-only contiguous copy of a bias or the like, by default any [D]; None for None."""
    if value is None:
        return None
    vector = check_array(name, value, dtype)
    if vector.ndim != 1 if shape is None else vector.shape != shape:
        raise ValueError(f"{name} has shape {vector.shape}, expected {shape or '[D]'}")
    return frozen(vector)


def frozen(array: Array) -> Array:
    """A contiguous copy that nobody can write to, or resize: loops keep pointers to it."""
    return np.ndarray(array.shape, array.dtype, array.tobytes())


def check_out(
    out: Any, shape: tuple[int, ...], dtype: np.dtype[Any], **inputs: Array | None
) -> Array:
    """The output as an array that is no subclass, whose attributes could say anything."""
    if not isinstance(out, np.ndarray) or isinstance(out, np.ma.MaskedArray):
        raise TypeError(
            f"out must be a plain NumPy array, not {type(out).__name__}; for a tensor of the CPU, "
            "out=tensor.numpy()"
        )
    array = as_array("out", out)
    if array.dtype != dtype and not (is_half(dtype) and array.dtype == np.float32):
        either = f"{dtype} or float32" if is_half(dtype) else dtype
        raise TypeError(f"out has dtype {array.dtype}, expected {either}")
    if array.shape != shape:
        raise ValueError(f"out has shape {array.shape}, expected {shape}")
    if not array.flags.writeable:
        raise ValueError("out is read-only")
    if not _has_whole_strides(array):
        raise ValueError("out must be aligned to its elements")
    if overlaps_itself(array):
        raise ValueError("out must have a place of its own in memory for each element")
    check_apart(array, **inputs)
    return array[...]  # a view, as in check_array


def check_apart(out: Array, **inputs: Array | None) -> None:
    for name, other in inputs.items():
        if other is not None and overlaps(out, other):
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
