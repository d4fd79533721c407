"""The cells of `benchmarks.options` under pytest-benchmark."""

from functools import lru_cache

import pytest

from benchmarks import peers
from benchmarks.cells import OPTIONS
from benchmarks.options import PLAIN, prepare
from benchmarks.report import OURS, WITHOUT_DOTS

# Cold cells take gigabytes: one at a time.
prepared = lru_cache(maxsize=1)(prepare)


@pytest.mark.parametrize("name", [OURS, PLAIN, WITHOUT_DOTS, *peers.OPTIONS])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("cell", OPTIONS, ids=lambda cell: cell.name)
def test_options(measure, cell, threads, name):
    measure(prepared(cell), name, threads)
