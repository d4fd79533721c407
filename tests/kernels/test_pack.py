"""Packing: exact copies in another order, within bounds, whatever the strides."""

import ctypes

import numpy as np
import pytest

from tests.kernels.kernels import address
from tests.oracle import Guarded, random, same_bits


def sizes(kernels):
    """Numbers of rows that packing meets: register tiles, panels of keys, and their neighbours."""
    vl = kernels.vl
    near = {vl - 1, vl, vl + 1, 2 * vl - 1}
    return sorted(
        {1, 2, 3, kernels.gemm_mr, kernels.attention_mr, kernels.attention_nr} | near - {0}
    )


def pack_rows(kernels, rows, depth, column_stride, scale=1.0):
    """Packs rows of `depth` elements, each in its own memory -> [depth][count]; checks bounds."""
    count = len(rows)
    target = Guarded(depth * count, kernels.dtype)
    pointers = (ctypes.c_void_p * count)(*map(address, rows))
    kernels.pack_rows(address(target.array), pointers, count, depth, column_stride, scale)
    target.check(slack=kernels.vl - 1)
    return target.array.reshape(depth, count)


@pytest.mark.parametrize("column_stride", [1, 2, 5, -1, 0])
def test_rows_are_interleaved(kernels, column_stride):
    vl = kernels.vl
    for count in sizes(kernels):
        for depth in (0, 1, vl - 1, vl, vl + 1, 37, 64):
            values = random(count + depth, count, depth, dtype=kernels.dtype)
            rows = []
            for row in values:
                # Exactly as long as the row needs, so that what lies behind it is foreign.
                memory = np.full(max(1, depth * max(1, abs(column_stride))), np.nan, kernels.dtype)
                view = (
                    memory[:depth] if column_stride == 0 else memory[:: abs(column_stride)][:depth]
                )
                view[:] = row if column_stride else row[:1]
                if column_stride < 0:
                    view[:] = row[::-1]
                    view = view[::-1]
                rows.append(view if depth else memory)
            expected = np.array([row[:depth] for row in rows]).reshape(count, depth).T
            assert same_bits(pack_rows(kernels, rows, depth, column_stride), expected)


def test_scale_is_one_rounded_factor(kernels):
    for scale in (0.5, -1.7, 1e-3, 0.0, 1 / 3):
        for column_stride in (1, 2):
            rows = random(0, 9, 2 * 41, dtype=kernels.dtype)
            expected = kernels.dtype.type(scale) * rows[:, ::column_stride][:, :41].T
            packed = pack_rows(kernels, list(rows), 41, column_stride, scale)
            np.testing.assert_array_equal(packed, expected)


def test_special_values_stay_what_they_are(kernels):
    smallest = np.finfo(kernels.dtype).smallest_subnormal
    special = np.array([np.nan, np.inf, -np.inf, -0.0, smallest], kernels.dtype)
    rows = np.tile(special, (kernels.vl + 1, 8))
    assert same_bits(pack_rows(kernels, list(rows), 40, 1), np.ascontiguousarray(rows.T))


def test_one_row_may_stand_for_many(kernels):
    """A last panel of keys repeats its last key."""
    row = random(1, 23, dtype=kernels.dtype)
    packed = pack_rows(kernels, [row] * kernels.attention_nr, 23, 1)
    assert same_bits(packed, np.repeat(row[:, None], kernels.attention_nr, axis=1))


def pack_columns(kernels, src, columns, width):
    depth = len(src)
    target = Guarded(depth * width, kernels.dtype)
    strides = (stride // src.itemsize for stride in src.strides)
    kernels.pack_columns(address(target.array), address(src), depth, columns, width, *strides)
    target.check()
    return target.array.reshape(depth, width)


def test_columns_are_padded_with_zeros(kernels):
    nr, vl = kernels.gemm_nr, kernels.vl
    for columns in sorted({1, vl - 1, vl, vl + 1, nr - 1, nr} - {0}):
        for width in (kernels.whole_vectors(columns), nr):
            for depth in (0, 1, 7, 64):
                src = random(columns, depth, columns, dtype=kernels.dtype)
                expected = np.zeros((depth, width), kernels.dtype)
                expected[:, :columns] = src
                assert same_bits(pack_columns(kernels, src, columns, width), expected)


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a[:, 1:-4],
        lambda a: a[:, 1::2],
        lambda a: a[::-1, 3:9],
        lambda a: a[::2, ::-1],
        lambda a: a.T[:, :11],
        lambda a: np.broadcast_to(a[:1, :7], (5, 7)),
        lambda a: np.broadcast_to(a[:, :1], (20, 9)),
    ],
    ids=["slice", "step", "rows reversed", "both", "transposed", "one row", "one column"],
)
def test_columns_of_any_strides(kernels, view):
    src = view(random(3, 20, 17, dtype=kernels.dtype))
    columns = src.shape[1]
    width = kernels.whole_vectors(columns)
    packed = pack_columns(kernels, src, columns, width)
    assert same_bits(packed[:, :columns].copy(), np.ascontiguousarray(src))
    assert not packed[:, columns:].any()
