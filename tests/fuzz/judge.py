"""What must hold of every call, whatever it was given.

1. No crash, no hang, no warning.
2. An error is a TypeError or a ValueError whose message names an argument.
3. After an error nothing has been written: outputs and caches are, bit for bit, what they were.
4. A result is the reference's, within a tolerance that follows from the sizes, and NaN or infinite
   where that is.
5. A second call gives the same bits, with another number of threads, too. Inputs are not modified.
"""

import inspect
import re
import warnings

import numpy as np

import tileattn
from tests.fuzz.draw import Given, HostileError, LiarOfShape, Meaning
from tests.oracle import same_bits

GUARD = 1.2345678
EDGE = 64  # elements beyond each end of an output's memory


class FaultError(AssertionError):
    """A call did what none may do."""


def require(condition, text):
    if not condition:
        raise FaultError(text)


def shown(value):
    """An argument in a line."""
    if isinstance(value, np.ndarray):
        return f"{type(value).__name__}{np.ndarray.shape.__get__(value)} {value.dtype!s:.40}"
    try:
        text = repr(value)
    except Exception:
        return f"<{type(value).__name__}>"
    return text if len(text) < 90 else text[:60] + "..."


def state_of(cache):
    """All bits of a cache: of what is in use and what is not."""
    arrays = (cache.lengths, cache._longest, *cache._arrays())
    return [a.tobytes() for a in arrays] + [(a.shape, a.strides) for a in arrays]


class Call:
    """One call of `function`, and how it is to be judged."""

    def __init__(
        self, function, given, *, names=(), errors=(), caches=(), may_change=False, invoke=None
    ):
        self.function, self.given, self.caches = function, given, caches
        self.may_change = may_change  # the inputs, which lie in a cache that is written to
        self.invoke = invoke or (lambda values: function(**values))
        self.errors = (TypeError, ValueError, *errors)
        self.names = {*inspect.signature(function).parameters, *names, *given} - {"self"}
        self.meanings = {g.meaning for g in given.values()}
        self.values = {name: g.value for name, g in given.items()}
        self.out = self.values.get("out")
        self.error = None

    @property
    def is_hostile(self):
        return Meaning.HOSTILE in self.meanings

    @property
    def plain(self):
        """What was given, in its plain form."""
        return {name: g.plain for name, g in self.given.items() if name != "out"}

    def fresh_out(self):
        """Another output in place of the one that was given, if one was."""
        if not isinstance(self.out, np.ndarray):
            return {}
        shape = np.ndarray.shape.__get__(self.out)  # not what it says of itself
        return {"out": np.full(shape, 7, self.out.dtype)}

    def __str__(self):
        arguments = ", ".join(f"{name}={shown(v)}" for name, v in self.values.items())
        return f"{self.function.__qualname__}({arguments})"

    def fault(self, text):
        raise FaultError(f"{text}\n    {self}")

    def __call__(self, **changes):
        """The result, or None after an error that is one of those allowed."""
        arrays = [
            (name, a, np.ndarray.tobytes(a))
            for name, a in self.values.items()
            if isinstance(a, np.ndarray) and a is not self.out and a.dtype.kind not in "OT"
        ]
        written = _memory(self.out)
        before = None if written is None else written.tobytes()
        caches = [state_of(cache) for cache in self.caches]
        self.error = None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                result = self.invoke({**self.values, **changes})
        except (HostileError, *self.errors) as error:
            self.error, result = error, None
        except MemoryError as error:
            if not self._is_enormous():
                self.fault(f"MemoryError: {error}")
            self.error, result = error, None
        except Exception as error:
            self.fault(f"{type(error).__name__}: {error}")
        if self.is_hostile:
            return result
        for name, a, bits in arrays:
            if (
                name not in changes
                and not self.may_change
                and not _share(a, self.out)
                and np.ndarray.tobytes(a) != bits
            ):
                self.fault(f"{name} was modified")
        if self.error is not None:
            self._judge_error(written, before, caches)
        elif written is not None and not isinstance(self.out, (list, LiarOfShape)):
            self._judge_edges(written, before)
        wrong = {name for name, g in self.given.items() if g.meaning is Meaning.WRONG}
        # What an out says of its shape counts for nothing: an x that changed may have its real one.
        first = next((self.given[name] for name in ("x", "q") if name in self.given), None)
        if isinstance(self.out, LiarOfShape) and first and first.meaning is Meaning.OPEN:
            wrong.discard("out")
        if self.error is None and wrong:
            self.fault(f"was not refused: {', '.join(sorted(wrong))}")
        return result

    def _is_enormous(self):
        return any(
            np.ndarray.size.__get__(v) > 1 << 26 if isinstance(v, np.ndarray)
            else isinstance(v, int) and abs(v) > 1 << 24
            for v in self.values.values()
        )  # fmt: skip

    def _judge_error(self, written, before, caches):
        error = self.error
        if self.meanings <= {Meaning.SAME}:
            self.fault(f"was refused: {type(error).__name__}: {error}")
        if isinstance(error, (TypeError, ValueError)):
            words = set(re.findall(r"[A-Za-z_]\w*", str(error)))
            if not words & self.names:
                self.fault(f"the message names no argument: {type(error).__name__}: {error}")
        if written is not None and written.tobytes() != before:
            self.fault(f"wrote to out in spite of {type(error).__name__}: {error}")
        if [state_of(cache) for cache in self.caches] != caches:
            self.fault(f"changed the cache in spite of {type(error).__name__}: {error}")

    def _judge_edges(self, written, before):
        """Only the elements of out are written."""
        inside = np.zeros(written.size, bool)
        base = written.ctypes.data
        size = self.out.itemsize
        out = np.asarray(self.out)
        places = np.full(out.shape, out.ctypes.data - base, np.int64)
        for axis, (n, step) in enumerate(zip(out.shape, out.strides, strict=True)):
            places += (np.arange(n) * step).reshape((-1,) + (1,) * (out.ndim - 1 - axis))
        for i in range(size):
            inside[places.ravel() + i] = True
        now, then = written.view(np.uint8), np.frombuffer(before, np.uint8)
        if (now != then)[~inside].any():
            self.fault("wrote around out")

    def twice(self, draw, result, **fresh):
        """A second call, with another number of threads, gives the same bits."""
        arrays = [
            v for v in self.values.values() if isinstance(v, np.ndarray) and v is not self.out
        ]
        if self.is_hostile or result is None or any(_share(a, self.out) for a in arrays):
            return
        first = _copy(result)
        changes = {"num_threads": draw.integer(1, 5), **fresh}
        second = self(**changes)
        if second is None:
            self.fault(f"a second call is refused: {self.error}")
        if not same_bits(first, _copy(second), nan_equal=True):
            self.fault(f"other bits in a second call with {changes['num_threads']} threads")

    def agrees(self, reference, result, **fresh):
        """The reference refuses and accepts the same; its result."""
        if self.is_hostile:
            return None
        if result is None:
            fresh = {}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                expected = reference(**{**self.values, **fresh})
        except (MemoryError, *self.errors) as error:
            if result is not None:
                self.fault(f"the reference refuses: {error}")
            if isinstance(error, MemoryError) or isinstance(self.error, MemoryError):
                return None
            if type(error) is not type(self.error) or str(error) != str(self.error):
                self.fault(f"the reference says {error!r}, not {self.error!r}")
            return None
        if result is None:
            self.fault(f"the reference accepts what is refused with {self.error!r}")
        return expected


def _copy(result):
    return tuple(map(_copy, result)) if isinstance(result, tuple) else np.array(result)


def _share(a, out):
    return isinstance(out, np.ndarray) and np.may_share_memory(np.asarray(a), np.asarray(out))


def _memory(out):
    """All bytes of the memory that an output lies in."""
    if not isinstance(out, np.ndarray):
        return None
    while isinstance(out.base, np.ndarray):
        out = out.base
    if out.dtype.kind in "OT" or not np.ndarray.flags.__get__(out).contiguous:
        return None
    return np.asarray(out).reshape(-1).view(np.uint8) if out.size else None


def output(draw, shape, dtype, inputs=()):
    """An output array of some layout, or something that is none; None for none at all."""
    if draw.chance(0.5):
        return Given(None, None)
    kinds = ["plain"] * 6 + ["strided"] * 4 + ["subclass"]
    kinds += ["dtype", "shape", "read-only", "unaligned", "overlaps", "itself", "liar", "other"]
    kind = draw.pick(*kinds)
    dtype = np.dtype(dtype)
    if kind == "other":
        return draw.wrong(None)
    if kind == "dtype":
        dtype = draw.pick(*map(np.dtype, ("f4", "f8", "f2", ">f4", "i4", "O", "F", "?")))
        return Given(np.full(shape, 7).astype(dtype), None, Meaning.OPEN)
    if kind == "shape":
        return draw.changed(np.full(shape, 7, dtype))
    arrays = [
        a for a in inputs if type(a) is np.ndarray and a.size and a.ndim > 2 and a.dtype.kind == "f"
    ]
    if kind == "overlaps" and arrays:
        memory = draw.pick(*arrays)
        while isinstance(memory.base, np.ndarray):
            memory = memory.base
        if memory.flags.c_contiguous and memory.flags.writeable:
            size = int(np.prod(shape)) * dtype.itemsize
            raw = memory.reshape(-1).view(np.uint8)
            start = draw.integer(0, max(0, raw.size - size)) // dtype.itemsize * dtype.itemsize
            if size and start + size <= raw.size:
                view = raw[start : start + size].view(dtype).reshape(shape)
                return Given(view, None, Meaning.OPEN)
    wide = tuple(
        n * (draw.pick(1, 1, 2) if kind == "strided" else 1)
        + (kind == "strided" and draw.pick(0, 0, 3))
        for n in shape
    )
    memory = np.full(int(np.prod(wide)) + 2 * EDGE, GUARD).astype(dtype)
    out = memory[EDGE : len(memory) - EDGE].reshape(wide)
    out = out[
        tuple(
            slice(None, None, 2) if w >= 2 * n else slice(None)
            for n, w in zip(shape, wide, strict=True)
        )
    ]
    out = out[tuple(slice(0, n) for n in shape)]
    if kind == "strided" and out.ndim > 1:
        i, j = draw.integer(0, out.ndim - 1), draw.integer(0, out.ndim - 1)
        if out.shape[i] == out.shape[j]:
            out = out.swapaxes(i, j)
        if draw.chance(0.3):
            out = np.flip(out, draw.integer(0, out.ndim - 1))
    if kind == "read-only":
        out.flags.writeable = False
        return Given(out, None, Meaning.WRONG)
    if kind == "unaligned" and dtype.itemsize > 1:
        raw = np.zeros(out.nbytes + 1, np.uint8)[1:]
        return Given(raw.view(dtype).reshape(shape), None, Meaning.OPEN)
    if kind == "itself" and out.size > 1:
        return Given(
            np.lib.stride_tricks.as_strided(out, shape, (0,) * len(shape)), None, Meaning.WRONG
        )
    if kind == "liar":
        small = np.zeros((1,) * len(shape), dtype).view(LiarOfShape)
        small.claimed = shape
        return Given(small, None, Meaning.OPEN if shape == (1,) * len(shape) else Meaning.WRONG)
    if kind == "subclass":
        out = out.view(np.recarray)
    return Given(out, None)


def select(draw):
    """An instruction set, for all that follows."""
    isa = draw.pick(*tileattn.available_isas())
    tileattn._core.select_isa(isa)
    return isa
