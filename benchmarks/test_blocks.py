"""The cells of `benchmarks.blocks` under pytest-benchmark."""

from functools import lru_cache

import pytest

from benchmarks import peers
from benchmarks.blocks import IN_PARTS, prepare
from benchmarks.cells import BLOCKS
from benchmarks.report import OURS

# Cold cells take gigabytes: one at a time.
prepared = lru_cache(maxsize=1)(prepare)


@pytest.mark.parametrize("name", [OURS, IN_PARTS, *peers.BLOCK])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("cell", BLOCKS, ids=lambda cell: cell.name)
def test_block(measure, cell, threads, name):
    measure(prepared(cell), name, threads)
