"""GEMM tiles: few rows by packed panels that stay in the L2 cache, one thread."""

import pytest

from tileattn.bench.cells import Projection
from tileattn.bench.projections import prepare
from tileattn.bench.records import OURS

# Depths and widths of which no tile size is left with a remainder; 512 KB of weights.
DEPTH, COLUMNS = 512, 256


@pytest.mark.parametrize("rows", [1, 2, 4, 6, 8, 14])
def test_gemm_tile(measure, isa, rows):
    measure(prepare(Projection(rows, COLUMNS, DEPTH)), OURS, 1)
