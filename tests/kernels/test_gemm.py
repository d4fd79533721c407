"""gemm_tile: its order of summation bit for bit, its bounds in memory and of its error."""

from ctypes import byref

import numpy as np
import pytest

from tests.kernels.kernels import GemmTile, address
from tests.oracle import Guarded, gamma, random, same_bits


def gemm(kernels, a, b, c=None, bias=None, ahead=None, row_gap=3):
    """(c +) a b + bias for a[rows, depth], b[depth, columns]; without c, C holds NaN before."""
    (rows, depth), columns = a.shape, b.shape[1]
    packed_a = np.ascontiguousarray(a.T)
    packed_b = np.full((depth, kernels.whole_vectors(columns)), np.nan, kernels.dtype)
    packed_b[:, :columns] = b
    target = Guarded((rows, columns), kernels.dtype, row_gap=row_gap)
    if c is not None:
        target.array[...] = c
    tile = GemmTile(
        rows=rows,
        columns=columns,
        depth=depth,
        a=address(packed_a),
        b=address(packed_b),
        c=address(target.array),
        c_stride=columns + row_gap,
        accumulate=c is not None,
        bias=address(bias),
        panels=0,
        next=address(ahead),
        next_bytes=0 if ahead is None else ahead.nbytes,
    )
    kernels.gemm_tile(byref(tile))
    target.check()
    return target.array.copy()


def in_order(kernels, a, b, c=None, bias=None):
    """The same sum element by element: over the depth in order, then C, then the bias."""
    total = np.zeros((a.shape[0], b.shape[1]), kernels.dtype)
    for p in range(a.shape[1]):
        total = kernels.multiply_add(a[:, p, None], b[p], total)
    total = total if c is None else c + total
    return total if bias is None else total + bias


def widths(kernels):
    vl, nr = kernels.vl, kernels.gemm_nr
    return sorted({1, vl - 1, vl, vl + 1, 2 * vl - 1, 2 * vl, nr - 1, nr} - {0})


def inputs(kernels, rows, columns, depth):
    a, b = random(depth, rows, depth), random(rows, depth, columns)
    c, bias = random(7, rows, columns), random(8, columns)
    return [x.astype(kernels.dtype) for x in (a, b, c, bias)]


def test_bits_are_those_of_a_sum_in_order(kernels):
    heights = (1, kernels.gemm_mr - 1, kernels.gemm_mr)
    for rows in heights:
        for columns in (1, kernels.vl + 1, kernels.gemm_nr):
            for depth in (0, 1, 2, 7, 8, 9, 13, 16, 17):
                a, b, c, bias = inputs(kernels, rows, columns, depth)
                assert same_bits(gemm(kernels, a, b), in_order(kernels, a, b))
                assert same_bits(gemm(kernels, a, b, c, bias), in_order(kernels, a, b, c, bias))


def test_error_is_within_the_bound_of_any_sum(kernels):
    """|error| <= gamma_n sum |a| |b|, for each height, width and way of storing."""
    wide = np.longdouble
    for rows in range(1, kernels.gemm_mr + 1):
        for columns in widths(kernels):
            for depth in (1, 37, 512):
                a, b, c, bias = inputs(kernels, rows, columns, depth)
                product = a.astype(wide) @ b.astype(wide)
                size = np.abs(a) @ np.abs(b)
                bound = gamma(depth + 2, kernels.dtype)
                for old, add in ((None, None), (c, None), (None, bias), (c, bias)):
                    got = gemm(kernels, a, b, old, add)
                    exact = product + (0 if old is None else old) + (0 if add is None else add)
                    allowed = bound * (size + sum(np.abs(x) for x in (old, add) if x is not None))
                    assert (np.abs(got - exact) <= allowed).all()


def test_a_row_does_not_depend_on_the_rows_beside_it(kernels):
    for columns in widths(kernels):
        a, b, c, bias = inputs(kernels, kernels.gemm_mr, columns, 41)
        whole = gemm(kernels, a, b, c, bias)
        for rows in range(1, kernels.gemm_mr):
            first, last = slice(rows), slice(kernels.gemm_mr - rows, None)
            assert same_bits(gemm(kernels, a[first], b, c[first], bias), whole[first])
            assert same_bits(gemm(kernels, a[last], b, c[last], bias), whole[last])


def test_a_column_does_not_depend_on_the_width_of_the_tile(kernels):
    a, b, c, bias = inputs(kernels, kernels.gemm_mr, kernels.gemm_nr, 41)
    whole = gemm(kernels, a, b, c, bias)
    for columns in widths(kernels):
        left = slice(columns)
        part = gemm(kernels, a, b[:, left], c[:, left], bias[left].copy())
        assert same_bits(part, np.ascontiguousarray(whole[:, left]))


def test_what_is_prefetched_changes_nothing(kernels):
    """The prefetched memory is named last in the struct: right only if all the others are."""
    a, b, c, bias = inputs(kernels, kernels.gemm_mr, kernels.gemm_nr, 33)
    for size in (0, 1, 1000):
        ahead = np.full(size, np.nan, kernels.dtype)
        assert same_bits(gemm(kernels, a, b, c, bias, ahead), gemm(kernels, a, b, c, bias))


@pytest.mark.parametrize("rows", range(1, 10))
def test_panels_walked_together_have_the_bits_of_each(kernels, rows):
    if rows > kernels.gemm_mr:
        pytest.skip(f"the highest tile has {kernels.gemm_mr} rows")
    panels = 4 if rows == 1 else 2 if rows <= kernels.walk_rows else 1
    nr, gap = kernels.gemm_nr, 5
    for depth in (0, 1, 2, 33, 512):
        a, b, c, bias = inputs(kernels, rows, panels * nr, depth)
        packed = np.full((panels, depth + gap, nr), np.nan, kernels.dtype)
        for q in range(panels):
            packed[q, :depth] = b[:, q * nr : (q + 1) * nr]
        packed_a = np.ascontiguousarray(a.T)
        for start, last in ((None, None), (c, None), (c, bias)):
            target = Guarded((rows, panels * nr), kernels.dtype, row_gap=3)
            if start is not None:
                target.array[...] = start
            tile = GemmTile(
                rows=rows,
                columns=nr,
                depth=depth,
                a=address(packed_a),
                b=address(packed),
                c=address(target.array),
                c_stride=panels * nr + 3,
                accumulate=start is not None,
                bias=address(last),
                panels=panels,
                panel_stride=(depth + gap) * nr,
            )
            kernels.gemm_tile(byref(tile))
            target.check()
            for q in range(panels):
                at = slice(q * nr, (q + 1) * nr)
                alone = gemm(
                    kernels,
                    a,
                    b[:, at],
                    None if start is None else start[:, at],
                    None if last is None else last[at].copy(),
                )
                assert same_bits(target.array[:, at].copy(), alone)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_infinity_stay_in_their_row_or_column(kernels, bad):
    a, b, _, _ = inputs(kernels, kernels.gemm_mr, kernels.gemm_nr, 9)
    clean = gemm(kernels, a, b)
    row, column = kernels.gemm_mr // 2, kernels.gemm_nr - 1
    a[row, 4] = bad
    got = gemm(kernels, a, b)
    assert not np.isfinite(got[row]).any()
    assert same_bits(np.delete(got, row, axis=0), np.delete(clean, row, axis=0))
    a[row, 4], b[3, column] = 1, bad
    got = gemm(kernels, a, b)
    assert not np.isfinite(got[:, column]).any()
    assert np.isfinite(np.delete(got, column, axis=1)).all()
