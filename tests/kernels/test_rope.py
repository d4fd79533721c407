"""rotate_row: the heads of one position, pairs of their columns turned."""

from ctypes import byref

import numpy as np
import pytest

from tests.kernels.kernels import Rope, address
from tests.oracle import GUARD, Guarded, check_rotation, random, same_bits

HEADS = 3
layouts = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


def rotary_dims(kernels):
    """Numbers of pairs around whole vectors, and primes."""
    vl = kernels.vl
    return [2 * n for n in sorted({0, 1, 2, vl - 1, vl, vl + 1, 2 * vl, 2 * vl + 1, 37, 64})]


def angles(kernels, pairs):
    angle = np.random.default_rng(pairs).uniform(-4, 4, pairs)
    return np.cos(angle).astype(kernels.dtype), np.sin(angle).astype(kernels.dtype)


def rotate(kernels, x, cos, sin, interleaved, gap=0):
    """The rotated heads of x[heads, head_dim]; what surrounds any array is NaN or guarded."""
    target = Guarded(x.shape, kernels.dtype, row_gap=gap)
    source = np.full((len(x), x.shape[1] + gap + 1), np.nan, kernels.dtype)
    source[:, : x.shape[1]] = x
    tables = [np.full(len(table) + GUARD, np.nan, kernels.dtype) for table in (cos, sin)]
    for padded, table in zip(tables, (cos, sin), strict=True):
        padded[: len(table)] = table
    rope = Rope(*x.shape, 2 * len(cos), interleaved, x.shape[1] + gap, source.shape[1])
    kernels.rotate_row(address(target.array), address(source), *map(address, tables), byref(rope))
    target.check()
    return target.array.copy()


@layouts
def test_pairs_are_turned_and_the_rest_is_copied(kernels, interleaved):
    for rotary_dim in rotary_dims(kernels):
        cos, sin = angles(kernels, rotary_dim // 2)
        for rest in (0, 1, 2, 7, kernels.vl + 1):
            x = random(rotary_dim, HEADS, rotary_dim + rest, dtype=kernels.dtype)
            for gap in (0, 5):
                got = rotate(kernels, x, cos, sin, interleaved, gap)
                check_rotation(got, x, cos, sin, interleaved)
                assert same_bits(got[:, rotary_dim:], x[:, rotary_dim:])


@layouts
def test_in_place(kernels, interleaved):
    for rotary_dim in rotary_dims(kernels):
        cos, sin = angles(kernels, rotary_dim // 2)
        x = random(rotary_dim, HEADS, rotary_dim + 3, dtype=kernels.dtype)
        expected = rotate(kernels, x, cos, sin, interleaved)
        width = x.shape[1]
        rope = Rope(HEADS, width, rotary_dim, interleaved, width, width)
        kernels.rotate_row(address(x), address(x), address(cos), address(sin), byref(rope))
        assert same_bits(x, expected)


@layouts
def test_no_angle_changes_no_bit(kernels, interleaved):
    for rotary_dim in rotary_dims(kernels):
        x = random(rotary_dim, HEADS, rotary_dim, dtype=kernels.dtype)
        one, zero = np.ones(rotary_dim // 2, x.dtype), np.zeros(rotary_dim // 2, x.dtype)
        assert same_bits(rotate(kernels, x, one, zero, interleaved), x)


@layouts
def test_nan_stays_in_its_pair(kernels, interleaved):
    for rotary_dim in rotary_dims(kernels)[1:]:
        half = rotary_dim // 2
        cos, sin = angles(kernels, half)
        x = random(rotary_dim, HEADS, rotary_dim + 2, dtype=kernels.dtype)
        expected = rotate(kernels, x, cos, sin, interleaved)
        for pair in {0, half // 2, half - 1}:
            columns = (2 * pair, 2 * pair + 1) if interleaved else (pair, half + pair)
            for column in columns:
                bad, wanted = x.copy(), expected.copy()
                bad[1, column] = wanted[1, list(columns)] = np.nan
                np.testing.assert_array_equal(rotate(kernels, bad, cos, sin, interleaved), wanted)


def test_no_heads(kernels):
    cos, sin = angles(kernels, 2)
    rotate(kernels, np.empty((0, 4), kernels.dtype), cos, sin, False)
