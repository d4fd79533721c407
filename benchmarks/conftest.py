"""Shared by the benchmarks that pytest runs: `pytest benchmarks --benchmark-only`."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from tileattn.bench import arrays
from tileattn.bench.records import OURS
from tileattn.bench.work import Work, relative_error

#: Between two results for the same cell. Those of bfloat16 differ by 2**-8; one key too many or too
#: few among 4096 would make twice as much. Those of float32 differ by sums in another order.
TOLERANCES = {"bfloat16": 2**-7, "float32": 1e-5}

Measure = Callable[[Work, str, int], None]


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("benchmark_disable"):
        arrays.COLD_BYTES = 0  # each call runs once, so one set of arrays will do


@pytest.fixture
def measure(benchmark: BenchmarkFixture) -> Measure:
    """Times one candidate of a cell, grouped with the others of that cell and number of threads,
    and compares its result with ours."""

    def run(work: Work, name: str, threads: int) -> None:
        if name not in work.candidates:
            pytest.skip(f"{name} is not installed, or does not take {work.cell.name}")
        benchmark.group = f"{work.cell.name}, {threads} threads"
        candidate = work.candidates[name]
        if candidate.counted is not None:
            pytest.skip(f"{name} is a part of a call, which pytest-benchmark times as a whole")
        candidate.prepare(threads)
        result = benchmark(candidate.call, threads)
        if candidate.same and name != OURS:
            expected = np.array(work.candidates[OURS].call(threads), np.float64)
            dtype = "bfloat16" if "bfloat16" in work.cell.name else "float32"
            assert relative_error(result, expected) < TOLERANCES[dtype]
        if benchmark.stats is not None:  # None under --benchmark-disable
            seconds = benchmark.stats.stats.median
            amount, unit = work.rate
            limit = statistics.median(work.limit(threads)() for _ in range(3))
            benchmark.extra_info[unit] = round(amount / seconds, 1)
            benchmark.extra_info[f"% of {work.cell.of_limit}"] = round(100 * limit / seconds, 1)

    return run
