"""What a case draws from: sizes, arrays, and what may be given in their place."""

import enum
import random
from typing import Any, NamedTuple

import numpy as np

from tests.oracle import HALVES, LAYOUTS, arithmetic

FLOATS = (np.float32, np.float64)
STORED = (*FLOATS, *HALVES)
# Around the lanes, register tiles and blocks of the kernels, and primes.
SMALL = (0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 17, 31, 32, 33)
LARGE = (47, 63, 64, 65, 96, 127, 128, 129, 255, 256, 257, 300, 511, 512, 513, 1025)


class Meaning(enum.Enum):
    """What becomes of an argument that is given in some form."""

    SAME = "it stands for its plain value"
    WRONG = "it is refused"
    OPEN = "it is refused, or stands for its plain value: the reference knows"
    HOSTILE = "nobody knows"


class Given(NamedTuple):
    """An argument as it is handed over, and what it means."""

    value: Any
    plain: Any
    meaning: Meaning = Meaning.SAME


class HostileError(Exception):
    """Of an argument's own code."""


class Draw:
    """The choices of one case: the same key gives the same ones."""

    def __init__(self, *key):
        self.random = random.Random("/".join(map(str, key)))
        self.numpy = np.random.default_rng(self.random.getrandbits(64))

    def chance(self, probability):
        return self.random.random() < probability

    def pick(self, *choices):
        return self.random.choice(choices)

    def integer(self, lowest, highest):
        return self.random.randint(lowest, highest)

    def real(self, lowest, highest):
        return self.random.uniform(lowest, highest)

    def size(self, large=0.15, least=0):
        size = self.pick(*(LARGE if self.chance(large) else SMALL))
        return max(size, least)

    # -------------------------------------------------------------- arrays

    def array(self, shape, dtype, contents="normal"):
        """Random numbers of one of some kinds; `contents` says how wild they are."""
        x = self.numpy.standard_normal(shape)
        if contents == "wild":
            kind = self.pick("huge", "tiny", "denormal", "mixed", "constant", "bits")
            if kind == "bits":
                size = x.size * np.dtype(dtype).itemsize
                return np.frombuffer(self.numpy.bytes(size), dtype).reshape(shape).copy()
            top = float(np.finfo(np.float32).max) if arithmetic(dtype) == np.float32 else 1e308
            if kind == "huge":
                x = x * (top / 4)
            elif kind == "tiny":
                x = x / top
            elif kind == "denormal":
                x = x * float(np.finfo(arithmetic(dtype)).tiny) / 100
            elif kind == "mixed":
                x = x * 10.0 ** self.numpy.integers(-40, 39, shape)
            else:
                x = np.full(shape, self.pick(0.0, -0.0, 1.0, -3e38, 65504.0))
        with np.errstate(all="ignore"):
            x = np.asarray(x, dtype)
        if contents != "normal" and x.size:
            for _ in range(self.integer(0, 3)):
                place = tuple(self.integer(0, n - 1) for n in x.shape)
                x[place] = self.pick(np.nan, np.inf, -np.inf)
        return x

    def contents(self):
        return self.pick("normal", "normal", "normal", "sprinkled", "wild")

    def lengths(self, B, limit):
        return np.array([self.integer(0, limit) for _ in range(B)], np.int64)

    def broadcast_shape(self, *shape):
        """A shape that broadcasts to `shape`: axes of 1, or missing in front."""
        return tuple(self.pick(1, n) for n in shape)[self.integer(0, len(shape)) :]

    # -------------------------------------------------------------- in other forms

    def form(self, value, others=()):
        """That value as it is, or in another form; `others` are arguments that it may spoil."""
        if self.chance(0.75):
            return self.odd(value) if self.chance(0.4) else Given(value, value)
        kind = self.pick("wrong", "wrong", "changed", "hostile")
        if kind == "hostile":
            return self.hostile(value, others)
        if kind == "changed" and isinstance(value, np.ndarray):
            return self.changed(value)
        return self.wrong(value)

    def odd(self, value):
        """In a form that means the same."""
        if isinstance(value, np.ndarray):
            return Given(self._odd_array(value), value)
        if isinstance(value, bool):
            return Given(np.bool_(value), value)
        if isinstance(value, int):
            if abs(value) < 2**31:
                form = self.pick(np.int64, np.int32, np.array, Index)
                return Given(form(value), value, Meaning.OPEN if form is Index else Meaning.SAME)
        elif isinstance(value, float):
            form = self.pick(np.float64, np.array, np.longdouble, AsArray)
            return Given(form(value), value)
        elif isinstance(value, tuple):
            return Given(list(value), value)
        return Given(value, value)

    def _odd_array(self, a):
        forms = ["subclass", "as array", "0 strides"]
        if a.dtype in (np.int64, np.float64, bool):
            forms += ["list", "list"] if a.size else []
        if a.dtype == np.int64:
            forms += ["narrow"]
        if a.ndim >= 3:
            forms += ["layout"] * 5
        if a.ndim == 2:
            forms += ["matrix"]
        form = self.pick(*forms)
        if form == "list":
            return a.tolist()
        if form == "narrow":
            return a.astype(self.pick("i4", ">i8", "i2") if abs(a).max(initial=0) < 2**15 else "i8")
        if form == "layout":
            return LAYOUTS[self.pick(*sorted(LAYOUTS))](a)
        if form == "matrix":
            return np.asmatrix(a)
        if form == "subclass":
            return a.view(self.pick(Child, np.recarray, Liar))
        if form == "0 strides" and a.size and (a.view() == a.flat[0]).all():
            return np.broadcast_to(a[(slice(0, 1),) * a.ndim], a.shape)
        return AsArray(a)

    def changed(self, a):
        """An array of another shape or dtype."""
        kind = self.pick("longer", "shorter", "axis more", "axis less", "swapped", "dtype", "dtype")
        axis = self.integer(0, max(a.ndim - 1, 0))
        if kind == "dtype":
            dtype = self.pick(*DTYPES)
            try:
                with np.errstate(all="ignore"):
                    b = a.astype(dtype)
            except (TypeError, ValueError):
                b = np.zeros(a.shape, dtype)
        elif kind == "axis more":
            b = a[(slice(None),) * axis + (None,)]
        elif a.ndim == 0:
            b = np.array([a, a])
        elif kind == "longer":
            b = np.concatenate([a, a[(slice(None),) * axis + (slice(0, 1),)]], axis=axis)
        elif kind == "shorter":
            b = a[(slice(None),) * axis + (slice(1, None),)]
        elif kind == "axis less":
            b = a.sum(axis=axis).astype(a.dtype)
        else:
            b = a.swapaxes(axis, self.integer(0, a.ndim - 1))
        return Given(b, b, Meaning.OPEN)

    def wrong(self, value):
        """Of a type or size that has no meaning there, or perhaps has."""
        other = self.pick(*OTHERS)()
        return Given(other, other, Meaning.OPEN)

    def hostile(self, value, others):
        arrays = [a for a in others if isinstance(a, np.ndarray)]
        kind = self.pick("raises", "raises", "spoils", "spoils", "spoils")
        if kind == "raises" or not arrays:
            return Given(self.pick(*RAISING)(), None, Meaning.HOSTILE)
        return Given(Spoiler(value, self, arrays), None, Meaning.HOSTILE)


# ------------------------------------------------------------------ odd types


class Child(np.ndarray):
    """A subclass that does nothing."""


class Liar(np.ndarray):
    """A subclass whose operations and attributes are not those of its memory."""

    def __getitem__(self, key):
        return np.zeros(1)

    def __array_ufunc__(self, *_, **__):
        return self

    def __array_function__(self, *_, **__):
        return self

    def astype(self, *_, **__):
        return self

    def reshape(self, *_, **__):
        return np.zeros(1)

    def view(self, *arguments):
        return self if arguments else super().view()

    @property
    def itemsize(self):
        return 1


class LiarOfShape(np.ndarray):
    """A subclass that claims to be of another shape than its memory."""

    claimed = ()

    @property
    def shape(self):
        return self.claimed


class Index:
    """An integer by its __index__."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


class AsArray:
    """An array, or a number, by its __array__."""

    def __init__(self, value):
        self.value = np.asarray(value)

    def __array__(self, dtype=None, copy=None):
        return self.value


class Spoiler:
    """An argument that changes another one when it is asked for its value."""

    def __init__(self, value, draw, arrays):
        self.value, self.draw, self.arrays = value, draw, arrays

    def _spoil(self):
        a = self.draw.pick(*self.arrays)
        kind = self.draw.pick("resize", "fill", "fill", "shape", "read-only", "strides")
        try:
            if kind == "resize":
                a.resize(self.draw.pick((0,), (1,), a.shape[::-1]))
            elif kind == "fill":
                a.fill(self.draw.pick(-1, 10**6, 2**62) if a.dtype.kind == "i" else 1)
            elif kind == "shape":
                a.shape = self.draw.pick((a.size,), a.shape[::-1], (1, *a.shape))
            elif kind == "strides":
                a.strides = (0,) * a.ndim
            else:
                a.flags.writeable = False
        except (ValueError, AttributeError, OverflowError, DeprecationWarning):
            pass

    def __array__(self, dtype=None, copy=None):
        self._spoil()
        return np.asarray(self.value)

    def __index__(self):
        self._spoil()
        return self.value if isinstance(self.value, int) else 1

    def __len__(self):
        self._spoil()
        return 2


def _raises(*_, **__):
    raise HostileError


def _raising(*names):
    return type("Raising" + "".join(names), (), dict.fromkeys(names, _raises))


RAISING = tuple(
    _raising(*names)
    for names in (
        ["__array__"],
        ["__index__"],
        ["__len__", "__getitem__"],
        ["__iter__"],
        ["__eq__", "__hash__"],
        ["__repr__"],
        ["__float__", "__int__", "__bool__"],
        ["__array__", "__index__", "__len__", "__eq__", "__bool__", "__repr__", "__float__"],
    )
)

DTYPES = (
    "?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", ">i8", "f2", "f4", "f8", ">f4", ">f8",
    ">f2", "g", "F", "D", "G", "O", "S4", "U4", "V8", "M8[s]", "m8[s]", [("x", "f4")],
    [("x", "f4", 2), ("y", "i1")],
)  # fmt: skip
try:
    import ml_dtypes
except ImportError:
    pass
else:
    DTYPES += tuple(
        getattr(ml_dtypes, name)
        for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4", "float6_e2m3fn")
        if hasattr(ml_dtypes, name)
    )
if hasattr(np.dtypes, "StringDType"):
    DTYPES += (np.dtypes.StringDType(),)

OTHERS = (
    lambda: None, lambda: True, lambda: False, lambda: 0, lambda: 1, lambda: -1, lambda: 2,
    lambda: 10**30, lambda: -(10**30), lambda: 10**400, lambda: 2**63, lambda: 2**31,
    lambda: -(2**63), lambda: 0.0, lambda: 0.5, lambda: -1.0, lambda: float("nan"),
    lambda: float("inf"), lambda: -float("inf"), lambda: 1e308, lambda: 1e39, lambda: 5e-324,
    lambda: 1j, lambda: "", lambda: "float32", lambda: "int8", lambda: "1", lambda: b"1",
    lambda: "queries", lambda: (), lambda: [], lambda: {}, lambda: {1}, lambda: (1, 2),
    lambda: [0, None], lambda: [[1, 2], [3]], lambda: (None, None), lambda: [1.5],
    lambda: object(), lambda: object, lambda: len, lambda: range(3), lambda: slice(2), lambda: ...,
    lambda: memoryview(b"12345678"), lambda: bytearray(4), lambda: np.ma.masked,
    lambda: np.ma.masked_array([1.0, 2.0], [True, False]), lambda: np.matrix([[1.0, 2.0]]),
    lambda: np.float16(2), lambda: np.float32(2), lambda: np.float64(2), lambda: np.longdouble(2),
    lambda: np.longdouble("1e4000"), lambda: np.int8(2), lambda: np.uint64(2**63),
    lambda: np.bool_(True), lambda: np.datetime64("2020"), lambda: np.timedelta64(1),
    lambda: np.str_("x"), lambda: np.void(b"ab"), lambda: np.array(1), lambda: np.array(1.0),
    lambda: np.array(None), lambda: np.array([]), lambda: np.array([1]), lambda: np.array([True]),
    lambda: np.zeros((0, 3)), lambda: np.zeros((1,) * 8), lambda: np.dtype("f4"),
    lambda: np.array([2**63], "u8"), lambda: np.array([2**200, 1], object), lambda: float,
    lambda: np.nan, lambda: np.array(np.nan), lambda: "\ud800", lambda: "a\nb",
)  # fmt: skip
