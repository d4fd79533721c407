"""add_rows: what becomes of weights that meet no values."""

import numpy as np

from tests.kernels.kernels import address
from tests.oracle import Guarded, gamma, random


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
