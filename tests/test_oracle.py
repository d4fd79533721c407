"""The tests' own measure: right results pass it, and slightly wrong ones do not."""

import numpy as np
import pytest

from tests.oracle import (
    LAYOUTS,
    attention,
    block,
    check_attention,
    check_block,
    higher,
    random,
    same_bits,
)
from tileattn import reference

DTYPES = [np.float32, np.float64]
REFUSED = "rounding explains"


def qkv(dtype, T=33, S=300):
    return (
        random(0, 2, T, 4, 32, dtype=dtype),
        random(1, 2, S, 2, 32, dtype=dtype),
        random(2, 2, S, 2, 16, dtype=dtype),
    )


def rounded(arrays, dtype):
    return tuple(x.astype(dtype) for x in arrays)


@pytest.mark.parametrize("dtype", DTYPES)
def test_right_attention_passes(dtype):
    q, k, v = qkv(dtype)
    for options in ({}, {"is_causal": True, "query_offset": 7}):
        exact = attention(q, k, v, higher(dtype), **options)
        check_attention(rounded(exact, dtype), q, k, v, **options)
        check_attention(attention(q, k, v, dtype, **options), q, k, v, **options)
        given = reference.dot_product_attention(q, k, v, return_lse=True, **options)
        check_attention(given, q, k, v, **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_wrong_attention_is_refused(dtype):
    q, k, v = qkv(dtype)
    eps = float(np.finfo(dtype).eps)
    options = {"is_causal": True, "query_offset": 267}
    out, lse = attention(q, k, v, higher(dtype), **options)

    def refuse(out, lse, message=REFUSED):
        with pytest.raises(AssertionError, match=message):
            check_attention((out.astype(dtype), lse.astype(dtype)), q, k, v, **options)

    def other(q=q, k=k, v=v, **changes):
        return attention(q, k, v, higher(dtype), **{**options, **changes})

    refuse(*other(query_offset=266))  # one key of 300 in each row
    refuse(*other(scale=32**-0.5 * (1 + 100 * eps)))
    refuse(*other(v=v + dtype(100 * eps)))
    k_without = k.copy()
    k_without[:, 17] = 0
    refuse(*other(k=k_without))
    refuse(out * (1 + 100 * eps), lse)
    refuse(out, lse * (1 + 100 * eps))
    refuse(out, lse / np.log(2))
    wrong = out.copy()
    wrong[1, 20, 3, 15] += 100 * eps
    refuse(wrong, lse)
    wrong[1, 20, 3, 15] = np.nan
    refuse(wrong, lse, "NaN")
    missing = lse.copy()
    missing[1, 3, 2] = -np.inf
    refuse(out, missing)
    with pytest.raises(AssertionError, match="shape"):
        check_attention(out.astype(dtype)[:, :-1], q, k, v, **options)
    with pytest.raises(AssertionError):
        check_attention(out.astype(np.float16), q, k, v, **options)


def test_a_row_that_sees_nothing_must_say_so():
    q, k, v = qkv(np.float32)
    options = {"query_seq_lengths": np.array([33, 5])}
    out, lse = rounded(attention(q, k, v, np.float64, **options), np.float32)
    check_attention((out, lse), q, k, v, **options)
    for array, value, message in ((out, 1e-30, REFUSED), (lse, -1e30, "infinite")):
        wrong = {id(out): out.copy(), id(lse): lse.copy()}
        wrong[id(array)][1, 6] = value
        with pytest.raises(AssertionError, match=message):
            check_attention((wrong[id(out)], wrong[id(lse)]), q, k, v, **options)


def weights(dtype, D=24, N=4, K=2, H=8, Hv=6):
    shapes = (D, N, H), (D, K, H), (D, K, Hv), (N, Hv, D)
    return [(random(i, *s) / np.sqrt(D)).astype(dtype) for i, s in enumerate(shapes)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [None, (None, None, 1e-5)])
def test_wrong_blocks_are_refused(dtype, norm):
    x, w = random(9, 2, 15, 24, dtype=dtype), weights(dtype)
    eps = float(np.finfo(dtype).eps)
    exact = block(x, *w, higher(dtype), norm=norm)
    check_block(exact.astype(dtype), x, *w, norm=norm)
    check_block(block(x, *w, dtype, norm=norm), x, *w, norm=norm)
    for wrong in (
        exact * (1 + 100 * eps),
        exact + 100 * eps,
        block(x, *w, higher(dtype), norm=norm, is_causal=True),
        block(x, *w, higher(dtype), norm=norm, residual=False),
        block(x, *w, higher(dtype), norm=norm, b_o=random(5, 24, dtype=dtype) / 1000),
    ):
        with pytest.raises(AssertionError, match=REFUSED):
            check_block(wrong.astype(dtype), x, *w, norm=norm)


def test_layouts_hold_the_same_numbers():
    a = random(0, 2, 3, 4, 5)
    for name, change in LAYOUTS.items():
        view = change(a)
        np.testing.assert_array_equal(view, a, err_msg=name)
        assert same_bits(view.astype(np.float32, order="C"), a), name
    assert not LAYOUTS["unaligned"](a).flags.aligned
    assert not LAYOUTS["read-only"](a).flags.writeable
    assert min(LAYOUTS["all axes reversed"](a).strides) < 0
