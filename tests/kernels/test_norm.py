"""add_norm_row: residual and LayerNorm or RMSNorm of one row."""

from ctypes import byref

import numpy as np
import pytest

from tests.kernels.kernels import Norm, address
from tests.oracle import Guarded, check_norm, layer_norm, random, same_bits

kinds = pytest.mark.parametrize("subtract_mean", [True, False], ids=["LayerNorm", "RMSNorm"])


def add_norm(
    kernels, x, residual=None, weight=None, bias=None, eps=1e-5, normalize=True, subtract_mean=True
):
    target = Guarded(x.shape, kernels.dtype)
    norm = Norm(len(x), normalize, subtract_mean, address(weight), address(bias), eps)
    kernels.add_norm_row(address(target.array), address(x), address(residual), byref(norm))
    target.check()
    return target.array.copy()


def lengths(kernels):
    vl = kernels.vl
    return sorted({1, 2, 3, vl - 1, vl, vl + 1, 3 * vl - 1, 3 * vl, 37, 384, 1021} - {0})


@kinds
def test_every_part_alone_and_together(kernels, subtract_mean):
    for n in lengths(kernels):
        x, residual, weight, bias = random(n, 4, n, dtype=kernels.dtype)
        for z in (None, residual):
            for w in (None, weight):
                for b in (None, bias):
                    got = add_norm(kernels, x, z, w, b, subtract_mean=subtract_mean)
                    check_norm(got, x, z, w, b, subtract_mean=subtract_mean)


def test_without_normalisation_only_the_residual_is_added(kernels):
    for n in lengths(kernels):
        x, residual, weight, bias = random(n, 4, n, dtype=kernels.dtype)
        got = add_norm(kernels, x, residual, weight, bias, normalize=False)
        assert same_bits(got, x + residual)
        assert same_bits(add_norm(kernels, x, normalize=False), x)


@kinds
def test_no_columns(kernels, subtract_mean):
    add_norm(kernels, np.empty(0, kernels.dtype), subtract_mean=subtract_mean)


@pytest.mark.parametrize("mean", [1e2, 1e4, -1e6])
def test_a_large_mean_costs_no_accuracy(kernels, mean):
    """Numbers of one binade: x itself is all the rounding there is, and the oracle reads that x."""
    for n in (37, 384, 1021):
        x = (mean + random(n, n, dtype=np.float64)).astype(kernels.dtype)
        exact = layer_norm(x, None, None, 1e-5, np.longdouble)
        error = np.abs(add_norm(kernels, x) - exact).max()
        # Distances from the rounded mean are exact; what is left are sums of n of them.
        unit = float(np.finfo(kernels.dtype).eps)
        assert error <= unit * (4 + np.sqrt(n)) * np.abs(exact).max()


@pytest.mark.parametrize("eps", [1e-5, 1e-12])
def test_constant_rows_give_the_bias(kernels, eps):
    """No deviation, no noise blown up by 1 / sqrt(eps), and no root of a negative variance."""
    for value in (0.0, 0.1, 1234.567, -3e6, 1e-20):
        for n in (1, 2, 7, 16, 37, 384, 1021):
            x = np.full(n, value, kernels.dtype)
            bias = random(n, n, dtype=kernels.dtype)
            got = add_norm(kernels, x, bias=bias, eps=eps)
            np.testing.assert_array_equal(got, bias)


def test_rms_norm_does_not_see_the_mean(kernels):
    """A row of equal numbers gives its sign, where LayerNorm gives 0."""
    for n in lengths(kernels):
        x = np.full(n, -4, kernels.dtype)
        got = add_norm(kernels, x, eps=0.0, subtract_mean=False)
        np.testing.assert_array_equal(got, np.full(n, -1, kernels.dtype))


@kinds
def test_numbers_too_large_to_be_squared(kernels, subtract_mean):
    """A power of two changes no bit of the result, but for epsilon, which does not count here."""
    top = np.finfo(kernels.dtype).maxexp
    for n in lengths(kernels)[1:]:  # one number has no deviation
        x = random(n, n, dtype=kernels.dtype)
        x /= np.abs(x).max()
        x[0] = 1
        for exponent in (top // 2 - 8, top // 2 + 8, top - 2):
            large = np.ldexp(x, exponent)
            got = add_norm(kernels, large, eps=1e-6, subtract_mean=subtract_mean)
            check_norm(got, x, eps=0, subtract_mean=subtract_mean)


def test_large_equal_numbers_give_the_bias(kernels):
    large = np.ldexp(kernels.dtype.type(1), np.finfo(kernels.dtype).maxexp - 1)
    bias = random(0, 37, dtype=kernels.dtype)
    got = add_norm(kernels, np.full(37, large), bias=bias)
    np.testing.assert_array_equal(got, bias)


@kinds
def test_epsilon_is_that_of_the_struct(kernels, subtract_mean):
    """The struct's last field: it arrives only if all the others do."""
    x = np.array([-1, 1] * 8, kernels.dtype)
    got = add_norm(kernels, x, eps=3.0, subtract_mean=subtract_mean)
    np.testing.assert_allclose(got, x / 2, rtol=1e-6)


@kinds
def test_result_may_lie_on_x_or_on_the_residual(kernels, subtract_mean):
    for n in lengths(kernels):
        x, residual, weight, bias = random(n, 4, n, dtype=kernels.dtype)
        expected = add_norm(kernels, x, residual, weight, bias, subtract_mean=subtract_mean)
        norm = byref(Norm(n, True, subtract_mean, address(weight), address(bias), 1e-5))
        for on_x in (True, False):
            a, b = x.copy(), residual.copy()
            target = a if on_x else b
            kernels.add_norm_row(address(target), address(a), address(b), norm)
            assert same_bits(target, expected)


@kinds
def test_nan_and_infinity_come_through(kernels, subtract_mean):
    for bad in (np.nan, np.inf):
        for at in (0, kernels.vl, 36):
            x = random(1, 37, dtype=kernels.dtype)
            x[at] = bad
            got = add_norm(kernels, x, subtract_mean=subtract_mean)
            assert np.isnan(got[at])
            # Without a mean, an infinite number leaves nothing of the others.
            zeros = np.isposinf(bad) and not subtract_mean
            assert (np.delete(got, at) == 0).all() if zeros else np.isnan(got).all()
