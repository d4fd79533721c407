"""The cells of `benchmarks.decoding` under pytest-benchmark."""

from functools import lru_cache

import pytest

from benchmarks import peers
from benchmarks.blocks import IN_PARTS
from benchmarks.cells import DECODING
from benchmarks.decoding import prepare
from benchmarks.report import OURS

# Cold cells take gigabytes: one at a time.
prepared = lru_cache(maxsize=1)(prepare)


@pytest.mark.parametrize("name", [OURS, IN_PARTS, *peers.DECODING])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("cell", DECODING, ids=lambda cell: cell.name)
def test_decoding(measure, cell, threads, name):
    measure(prepared(cell), name, threads)
