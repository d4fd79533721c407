"""add_rows and settle_weights: what becomes of weights that meet no values."""

import numpy as np
import pytest

from tests.kernels.kernels import address
from tests.kernels.test_attention import weight_rows
from tests.oracle import Guarded, gamma, random, same_bits


def test_rows_are_added(kernels):
    vl = kernels.vl
    for rows in (0, 1, 2, 13, 16):
        for columns in (0, vl, 3 * vl):
            for gap in (0, vl, 5):
                source = np.full((rows, columns + gap), np.nan, kernels.dtype)
                source[:, :columns] = random(rows, rows, columns, dtype=kernels.dtype)
                start = random(9, columns, dtype=kernels.dtype)
                target = Guarded(columns, kernels.dtype)
                target.array[:] = start
                kernels.add_rows(
                    address(target.array), address(source), rows, columns, columns + gap
                )
                target.check()
                terms = np.vstack([start[None], source[:, :columns]]).astype(np.longdouble)
                error = np.abs(target.array - terms.sum(axis=0))
                assert (error <= gamma(rows + 1, kernels.dtype) * np.abs(terms).sum(axis=0)).all()


@pytest.mark.parametrize("rise", [9.0, -9.5, 100.0])
def test_weights_return_to_what_their_rows_started_from(kernels, rise):
    vl, panel, rows = kernels.vl, kernels.attention_nr, min(3, kernels.attention_mr)
    starts = np.array([0.5, -3.0, 2.0][:rows], kernels.dtype)
    row_max = starts.copy()
    row_max[1] += kernels.dtype.type(rise)
    weights = weight_rows(kernels, rows, 4 * panel)
    weights.array[...] = before = random(1, rows, 4 * panel, dtype=kernels.dtype)
    sums = random(2, rows, vl, dtype=kernels.dtype)
    sums_before = sums.copy()
    kernels.settle_weights(
        kernels.attention_tile(
            rows=rows,
            key_begin=panel + 1,
            key_end=3 * panel,
            weights=weights.array,
            row_max=row_max,
            row_sum=sums,
        ),
        address(starts),
    )
    weights.check()
    assert same_bits(row_max, starts)
    for got, old in ((weights.array, before), (sums, sums_before)):
        assert same_bits(got[[0, 2]], old[[0, 2]])
    inside = slice(panel, 3 * panel)
    eps = np.finfo(kernels.dtype).eps
    np.testing.assert_allclose(
        weights.array[1, inside], before[1, inside] * 2.0**rise, rtol=2 * eps
    )
    np.testing.assert_allclose(sums[1], sums_before[1] * 2.0**rise, rtol=2 * eps)
    assert same_bits(weights.array[1, :panel], before[1, :panel])
    assert same_bits(weights.array[1, 3 * panel :], before[1, 3 * panel :])
