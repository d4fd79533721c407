"""The cells of `benchmarks.attention` under pytest-benchmark."""

from functools import lru_cache

import pytest

from benchmarks import peers
from benchmarks.attention import prepare
from benchmarks.cells import ATTENTION
from benchmarks.report import OURS

# Cold cells take gigabytes: one at a time.
prepared = lru_cache(maxsize=1)(prepare)


@pytest.mark.parametrize("name", [OURS, *peers.ATTENTION])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("cell", ATTENTION, ids=lambda cell: cell.name)
def test_attention(measure, cell, threads, name):
    measure(prepared(cell), name, threads)
