"""merge_states: a few rows, from what was found in several parts of the keys."""

import ctypes
from ctypes import byref

import numpy as np

from tests.kernels.kernels import MergeTile, State, address
from tests.oracle import Guarded, check_merge, random, same_bits


def merge(kernels, dtype, parts, row_gap=3, column_stride=1, lse_stride=2):
    """The union of parts, each an out[rows, columns] and lse[rows]; NaN lies around them."""
    rows, columns = parts[0][0].shape
    kept, states = [], (State * len(parts))()
    for p, (out, lse) in enumerate(parts):
        wide = np.full((rows, columns * column_stride + row_gap), np.nan, dtype)
        wide[:, : columns * column_stride : column_stride] = out
        apart = np.full(rows * lse_stride, np.nan, kernels.dtype)
        apart[::lse_stride] = lse
        kept += [wide, apart]
        states[p] = State(address(wide), wide.shape[1], column_stride, address(apart), lse_stride)
    out, lse = Guarded((rows, columns), dtype), Guarded(rows, kernels.dtype)
    weights = Guarded(len(parts) * kernels.vl, kernels.dtype)
    tile = MergeTile(
        rows,
        columns,
        ctypes.addressof(states),
        len(parts),
        address(weights.array),
        address(out.array),
        address(lse.array),
    )
    kernels.merge_states[np.dtype(dtype)](byref(tile))
    for guarded in (out, lse, weights):
        guarded.check()
    return out.array.copy(), lse.array.copy()


def some_parts(kernels, dtype, rows, columns, count, seed=0):
    lses = 5 * random(seed, count, rows, dtype=kernels.dtype)
    return [(random(seed + 1 + p, rows, columns).astype(dtype), lses[p]) for p in range(count)]


def test_every_size_storage_and_stride(kernels):
    vl = kernels.vl
    for dtype in kernels.merge_states:
        for rows in {1, 2, vl - 1, vl}:
            for columns in {0, 1, vl - 1, vl, vl + 1, 4 * vl - 1, 4 * vl, 4 * vl + 1, 67}:
                for count in (1, 2, 3, 7):
                    parts = some_parts(kernels, dtype, rows, columns, count)
                    got = merge(kernels, dtype, parts)
                    check_merge(got, parts)
                    strided = merge(kernels, dtype, parts, column_stride=2, lse_stride=1)
                    check_merge(strided, parts)
                    assert same_bits(strided[1], got[1])


def test_rows_have_the_bits_that_they_have_alone(kernels):
    for dtype in kernels.merge_states:
        parts = some_parts(kernels, dtype, kernels.vl, 67, 3)
        together = merge(kernels, dtype, parts)
        for i in range(kernels.vl):
            alone = merge(kernels, dtype, [(out[i : i + 1], lse[i : i + 1]) for out, lse in parts])
            assert same_bits(alone[0][0], together[0][i])
            assert same_bits(alone[1][0], together[1][i])


def test_parts_that_have_seen_nothing_are_not_read(kernels):
    for dtype in kernels.merge_states:
        parts = some_parts(kernels, dtype, 2, 37, 3)
        clean = merge(kernels, dtype, [parts[0], parts[2]])
        unseen = np.full_like(parts[1][0], np.nan), np.full_like(parts[1][1], -np.inf)
        for bad in (np.nan, np.inf):
            unseen[0][:] = bad
            got = merge(kernels, dtype, [parts[0], unseen, parts[2]])
            assert same_bits(got[0], clean[0])
            assert same_bits(got[1], clean[1])
            out, lse = merge(kernels, dtype, [unseen, unseen])
            assert not out.any()
            assert (lse == -np.inf).all()


def test_one_part_alone_is_itself(kernels):
    for dtype in kernels.merge_states:
        (out, lse), *_ = parts = some_parts(kernels, dtype, 2, 37, 1)
        got = merge(kernels, dtype, parts)
        assert same_bits(got[0], out)
        assert same_bits(got[1], lse)


def test_nan_and_infinity_come_through(kernels):
    for dtype in kernels.merge_states:
        parts = some_parts(kernels, dtype, 2, 37, 2)
        clean = merge(kernels, dtype, parts)[0].astype(np.float64)
        parts[1][0][1, 5], parts[1][0][1, 36] = np.nan, -np.inf
        clean[1, 5], clean[1, 36] = np.nan, -np.inf
        np.testing.assert_array_equal(merge(kernels, dtype, parts)[0].astype(np.float64), clean)
        for bad in (np.nan, np.inf):
            parts[0][1][0] = bad
            out, lse = merge(kernels, dtype, parts)
            assert np.isnan(out[0]).all()
            assert np.isnan(lse[0])
            np.testing.assert_array_equal(out[1:].astype(np.float64), clean[1:])
