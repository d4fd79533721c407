"""Words of weights: how they are packed, and that tiles compute with the floats they stand for.

The oracle unpacks with NumPy; products are compared with gemm_tile on its floats, bit for bit.
"""

from ctypes import byref

import numpy as np
import pytest

from tests.kernels.kernels import GemmTile, Kernels, Words, address
from tests.kernels.test_gemm import gemm
from tests.oracle import Guarded, random, same_bits

ROWS = {"bfloat16": 2, "int8": 4, "int4": 8}
UNIT = 2.0**-3


@pytest.fixture(scope="module")
def f32(isa):
    return Kernels(np.float32)


@pytest.fixture(params=ROWS)
def kind(request):
    return request.param


class Panel:
    """A slice of random weights: its words, its scales and the floats that they stand for.

    What no weight is made of may hold anything: values behind the depth, scales of NaN.
    """

    def __init__(self, kind, depth, width, columns, group):
        rng = np.random.default_rng(depth * width + columns)
        rows = ROWS[kind]
        bits = 32 // rows
        words = rng.integers(0, 1 << 32, (-(-depth // rows), width), dtype=np.uint32)
        if kind == "bfloat16":  # no NaN, whose payload would count
            words &= ~np.uint32(0x40004000)
        parts = [words >> np.uint32(bits * k) & np.uint32((1 << bits) - 1) for k in range(rows)]
        values = np.stack(parts, axis=1).reshape(-1, width)[:depth]
        groups = max(1, -(-depth // group))
        self.scales, self.unit = None, 1.0
        if kind == "bfloat16":
            self.floats = (values << 16).astype(np.uint32).view(np.float32)
        elif kind == "int8":
            self.scales = np.full((groups, width), np.nan, np.float32)
            self.scales[:, :columns] = rng.standard_normal((groups, columns))
            scale = np.repeat(self.scales, group, axis=0)[:depth]
            self.floats = values.astype(np.uint8).view(np.int8) * scale
        else:
            self.unit = UNIT
            self.scales = np.full((groups, 2, width), np.nan, np.float16)
            self.scales[:, :, :columns] = rng.standard_normal((groups, 2, columns))
            wide = np.repeat(self.scales, group, axis=0)[:depth].astype(np.float32) * UNIT
            self.floats = values.astype(np.float32) * wide[:, 0] + wide[:, 1]
        assert self.floats.dtype == np.float32
        self.data = words
        self.words = Words(address(words), address(self.scales), group, self.unit)


def depths(kind):
    rows = ROWS[kind]
    return sorted({0, 1, rows - 1, rows, rows + 1, 31, 32, 33, 61, 64, 511, 512})


def groups(kind, depth):
    return [depth + 1] if kind == "bfloat16" else [32, 128, depth + 1]


def test_panels_are_converted_bit_for_bit(f32, kind):
    for width in range(f32.vl, f32.gemm_nr + 1, f32.vl):
        for columns in {1, width - 1, width}:
            for depth in depths(kind):
                for group in groups(kind, depth):
                    panel = Panel(kind, depth, width, columns, group)
                    target = Guarded((depth, width), np.float32)
                    kernel = f32.convert_panel[kind]
                    kernel(address(target.array), byref(panel.words), depth, width)
                    target.check()
                    got = np.ascontiguousarray(target.array[:, :columns])
                    assert same_bits(got, np.ascontiguousarray(panel.floats[:, :columns]))


def stream(f32, kind, a, panel, c=None, bias=None):
    """(c +) a b + bias for a[rows, depth] and a whole panel; without c, C holds NaN before."""
    rows, depth = a.shape
    packed_a = np.ascontiguousarray(a.T)
    target = Guarded((rows, f32.gemm_nr), np.float32, row_gap=3)
    if c is not None:
        target.array[...] = c
    tile = GemmTile(
        rows=rows,
        columns=f32.gemm_nr,
        depth=depth,
        a=address(packed_a),
        c=address(target.array),
        c_stride=f32.gemm_nr + 3,
        accumulate=c is not None,
        bias=address(bias),
        panels=1,
    )
    f32.stream_tile[kind](byref(tile), byref(panel.words))
    target.check()
    return target.array.copy()


def test_few_rows_have_the_bits_of_a_tile_of_floats(f32, kind):
    nr = f32.gemm_nr
    for rows in range(1, f32.walk_rows + 1):
        for depth in depths(kind):
            for group in groups(kind, depth):
                panel = Panel(kind, depth, nr, nr, group)
                a, c, bias = random(1, rows, depth), random(2, rows, nr), random(3, nr)
                if kind == "bfloat16":  # up to 2^127: no sum is to overflow
                    a = a * np.float32(2.0**-30)
                for start, last in ((None, None), (c, None), (c, bias)):
                    got = stream(f32, kind, a, panel, start, last)
                    assert same_bits(got, gemm(f32, a, panel.floats, start, last))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_infinity_stay_in_their_row(f32, kind, bad):
    rows = f32.walk_rows
    panel = Panel(kind, 40, f32.gemm_nr, f32.gemm_nr, 41 if kind == "bfloat16" else 32)
    a = random(1, rows, 40) * np.float32(2.0**-30)
    clean = stream(f32, kind, a, panel)
    a[rows - 1, 7] = bad
    got = stream(f32, kind, a, panel)
    assert not np.isfinite(got[rows - 1]).any()
    assert same_bits(got[: rows - 1].copy(), clean[: rows - 1].copy())


def test_words_hold_the_first_rows_lowest_and_zeros_beyond(f32, kind):
    rows = ROWS[kind]
    for depth in (1, rows - 1, rows, rows + 1, 37):
        for columns in (1, f32.vl + 1, f32.gemm_nr):
            width = f32.whole_vectors(columns)
            if kind == "bfloat16":
                bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
                src = random(depth, depth, columns)
                src[0, 0] = np.nan
                values = src.astype(bfloat16).view(np.uint16).astype(np.uint32)
            else:
                low, high, dtype = (-128, 128, np.int8) if kind == "int8" else (0, 16, np.uint8)
                src = (
                    np.random.default_rng(depth).integers(low, high, (depth, columns)).astype(dtype)
                )
                values = src.view(np.uint8).astype(np.uint32)
            whole = np.zeros((-(-depth // rows) * rows, width), np.uint32)
            whole[:depth, :columns] = values
            expected = np.zeros((len(whole) // rows, width), np.uint32)
            for k in range(rows):
                expected |= whole[k::rows] << np.uint32(32 // rows * k)
            for given in (src, np.asfortranarray(src), src[::-1].copy()[::-1]):
                target = Guarded(expected.shape, np.uint32, fill=7)
                strides = [step // src.itemsize for step in given.strides]
                f32.pack_words[kind](
                    address(target.array), address(given), depth, columns, width, *strides
                )
                target.check()
                np.testing.assert_array_equal(target.array, expected)


def test_double_has_no_words(isa):
    f64 = Kernels(np.float64)
    assert f64.pack_words == f64.stream_tile == f64.convert_panel == {}
