"""What the machine's peaks are measured with: it must do the work that it claims."""

import numpy as np

from tests.kernels.kernels import address
from tileattn import _core


def test_fma_rounds_counts_operations(kernels):
    assert kernels.fma_rounds(0) == 0
    assert kernels.fma_rounds(20) == 2 * kernels.fma_rounds(10) > 0


def test_read_all_reads_every_value_once(kernels):
    step = 8 * kernels.vl
    for count in (0, step, 5 * step):
        memory = np.full(count + 2, np.nan, kernels.dtype)
        values = memory[1:-1]
        values[:] = np.random.default_rng(count).permutation(count)  # sums of these are exact
        assert kernels.read_all(address(values), count) == count * (count - 1) / 2
        for j in range(count):
            values[j] += 1
            assert kernels.read_all(address(values), count) == count * (count - 1) / 2 + 1
            values[j] -= 1


def test_no_peak_of_dot_products_where_there_are_none():
    assert _core.measure_dot_peak(1) == 0
