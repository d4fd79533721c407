"""The cells of `benchmarks.varlen` under pytest-benchmark."""

import pytest

from benchmarks.cells import VARLEN
from benchmarks.report import OURS
from benchmarks.varlen import PADDED, prepare


@pytest.mark.parametrize("name", [OURS, PADDED])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("cell", VARLEN, ids=lambda cell: cell.name)
def test_varlen(measure, cell, threads, name):
    measure(prepare(cell), name, threads)
