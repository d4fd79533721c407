"""The tests' own measure: right results pass it, and slightly wrong ones do not."""

import numpy as np
import pytest

from tests.oracle import (
    HALF_ROUNDING,
    HALVES,
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


def all_options(T=33, S=300, B=2, N=4):
    """Every option of attention at once."""
    bias = random(3, B, N, 1, S)
    bias[:, 1, :, ::7] = -np.inf
    return {
        "bias": bias,
        "mask": random(4, B, 1, T, S) > -1,
        "softcap": 1.5,
        "is_causal": True,
        "query_offset": np.array([S - T, S - T - 3]),
        "local_window_size": (250, None),
        "query_seq_lengths": np.array([T, T - 2]),
        "key_value_seq_lengths": np.array([S - 1, S]),
        "alibi_slopes": np.array([0.5, 0.1, 0.02, -0.001]),
        "sinks": np.array([0.3, -np.inf, 4, -2]),
    }


@pytest.mark.parametrize("dtype", [*DTYPES, *HALVES])
def test_right_attention_with_all_options_passes(dtype):
    q, k, v = qkv(dtype)
    options = all_options()
    if dtype in HALVES:
        options["bias"] = options["bias"].astype(dtype)
    given = reference.dot_product_attention(q, k, v, return_lse=True, **options)
    check_attention(given, q, k, v, **options)
    for name in options:
        one = {name: options[name], "query_offset": 5}
        given = reference.dot_product_attention(q, k, v, return_lse=True, **one)
        check_attention(given, q, k, v, **one)
    if dtype in HALVES:
        out = np.empty((*q.shape[:3], 16), np.float32)
        check_attention(reference.dot_product_attention(q, k, v, out=out), q, k, v)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_with_a_wrong_option_is_refused(dtype):
    q, k, v = qkv(dtype)
    options = all_options()
    eps = float(np.finfo(dtype).eps)
    bias, mask = options["bias"].astype(np.float64), options["mask"].copy()
    mask[1, 0, 3, 260] ^= True
    bias[0, 2, 0, 280] += 1000 * eps
    for change in (
        {"bias": bias},
        {"mask": mask},
        {"softcap": 1.5 * (1 + 1000 * eps)},
        {"softcap": None},
        {"is_causal": False},
        {"query_offset": options["query_offset"] - 1},
        {"local_window_size": (249, None)},
        {"local_window_size": (250, 0), "is_causal": False, "query_seq_lengths": None},
        {"alibi_slopes": options["alibi_slopes"] * (1 + 1000 * eps)},
        {"sinks": options["sinks"] + 1000 * eps},
        {"sinks": None},
    ):
        wrong = attention(q, k, v, higher(dtype), **{**options, **change})
        with pytest.raises(AssertionError, match=r"rounding explains|infinite"):
            check_attention(rounded(wrong, dtype), q, k, v, **options)


@pytest.mark.parametrize("dtype", HALVES)
def test_wrong_halves_are_refused(dtype):
    q, k, v = qkv(dtype)
    out, lse = rounded(attention(q, k, v, np.float64), np.float32)
    check_attention((out.astype(dtype), lse), q, k, v)
    relative, _ = HALF_ROUNDING[np.dtype(dtype).name]
    for factor in (1 + 3 * relative, 1 - 3 * relative):
        with pytest.raises(AssertionError, match=REFUSED):
            check_attention((out * np.float32(factor)).astype(dtype), q, k, v)
    for wrong in (
        (out.astype(np.float64), lse),
        (out.astype(dtype), lse.astype(dtype)),
        (out.astype(dtype).astype(np.float32), lse),  # float32 must not have been rounded to halves
    ):
        with pytest.raises(AssertionError):
            check_attention(wrong, q, k, v)


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
