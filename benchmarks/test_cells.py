"""The cells of `tileattn bench` under pytest-benchmark, as "group: cell"."""

from functools import lru_cache

import pytest

from tileattn.bench.groups import GROUPS, MEMORY
from tileattn.bench.records import OURS

CASES = [
    pytest.param(group, cell, threads, name, id=f"{group.name}: {cell.name}-{threads}-{name}")
    for group in GROUPS.values()
    if group.name != MEMORY
    for cell in group.cells
    for threads in (1, 2)
    for name in (OURS, *group.peers)
]


# Cold cells take gigabytes: one at a time.
@lru_cache(maxsize=1)
def prepared(group, cell):
    return group.prepare(cell)


@pytest.mark.parametrize("group, cell, threads, name", CASES)
def test_cell(measure, group, cell, threads, name):
    measure(prepared(group, cell), name, threads)
