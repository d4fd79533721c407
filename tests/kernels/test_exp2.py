"""2^x, as the weights of keys are computed."""

import numpy as np
import pytest

from tests.kernels.test_attention import RAISE, weigh
from tests.oracle import random

# What kernel/exp2.inc.h promises; 4e-16 leaves its 2e-16 the last rounding of the result.
RELATIVE_ERROR = {np.dtype(np.float32): 1e-7, np.dtype(np.float64): 4e-16}


def exp2(kernels, x):
    """2^x for a vector with x <= RAISE, at most which the scores' maximum stays where it is."""
    return weigh(kernels, [[1]], np.reshape(x, (-1, 1)), row_max=[0]).weights[0, : x.size]


def lowest(kernels):
    """Binary exponent of the smallest normal number."""
    return -126 if kernels.dtype == np.float32 else -1022


def relative_error(kernels, x):
    x = x.astype(kernels.dtype)
    exact = np.exp2(x.astype(np.longdouble))
    return np.abs(exp2(kernels, x) / exact - 1).max()


def test_relative_error(kernels):
    step = np.random.default_rng(0).random(1 << 18)
    near_half = np.arange(-126, RAISE)[:, None] + 0.5 + np.linspace(-1e-6, 1e-6, 101)
    for x in (
        lowest(kernels) + (RAISE - lowest(kernels)) * step,
        -2 * step,
        2 * step - 1,
        1e-6 * (step - 0.5),
        near_half.ravel(),
    ):
        assert relative_error(kernels, x) <= RELATIVE_ERROR[kernels.dtype]


def test_whole_numbers_are_exact(kernels):
    n = np.arange(lowest(kernels), RAISE + 1)
    np.testing.assert_array_equal(exp2(kernels, n.astype(kernels.dtype)), np.exp2(n.astype(float)))


def test_exactly_zero_below_the_clamp(kernels):
    x = [
        lowest(kernels) - 1,
        lowest(kernels) - 1.5,
        -3000,
        -1e30,
        -np.finfo(kernels.dtype).max,
        -np.inf,
    ]
    got = exp2(kernels, np.array(x, kernels.dtype))
    assert not got.any()
    assert not np.signbit(got).any()


def test_absolute_error_between_the_clamp_and_the_normal_numbers(kernels):
    """Not relative to numbers this small, but within one smallest normal number of them."""
    x = np.linspace(lowest(kernels) - 1, lowest(kernels), 4001).astype(kernels.dtype)
    got = exp2(kernels, x)
    error = np.abs(got - np.exp2(x.astype(np.longdouble)))
    assert (got >= 0).all()
    assert (error <= np.exp2(np.longdouble(lowest(kernels)))).all()


def test_positive_everywhere_above(kernels):
    x = lowest(kernels) + (RAISE - lowest(kernels)) * np.linspace(0, 1, 1 << 16)
    assert (exp2(kernels, x.astype(kernels.dtype)) > 0).all()


@pytest.mark.parametrize("payload", [0, 1, 3, 0x55, 0x7A2, 0xFFF])
@pytest.mark.parametrize("sign", [0, 1])
def test_nan_stays_nan_whatever_its_payload(kernels, payload, sign):
    """R's NA, for one, is a NaN with the payload 1954."""
    bits = {4: np.uint32, 8: np.uint64}[kernels.dtype.itemsize]
    nan = np.array([np.nan], kernels.dtype).view(bits)
    nan |= bits(payload)
    nan |= bits(sign) << bits(8 * kernels.dtype.itemsize - 1)
    x = random(0, kernels.attention_nr, dtype=kernels.dtype)
    for at in (0, kernels.vl - 1, kernels.attention_nr - 1):
        one = x.copy()
        one.view(bits)[at] = nan[0]
        got = exp2(kernels, one)
        assert np.isnan(got[at])
        assert np.isnan(got).sum() == 1
