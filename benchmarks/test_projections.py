"""The cells of `benchmarks.projections` under pytest-benchmark."""

from functools import lru_cache

import pytest

from benchmarks import peers
from benchmarks.cells import PROJECTIONS
from benchmarks.projections import FLOAT32, prepare
from benchmarks.report import OURS, WITHOUT_DOTS

# Cold cells take gigabytes: one at a time.
prepared = lru_cache(maxsize=1)(prepare)


@pytest.mark.parametrize("name", [OURS, FLOAT32, WITHOUT_DOTS, *peers.LINEAR])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("cell", PROJECTIONS, ids=lambda cell: cell.name)
def test_projection(measure, cell, threads, name):
    measure(prepared(cell), name, threads)
