"""attention_weights: exp(score - lse), of chosen rows and summed, without holding all of them."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.oracle import (
    HALVES,
    LAYOUTS,
    WRITABLE,
    Guarded,
    check_attention,
    check_weights,
    random,
    same_bits,
)
from tileattn import attention_weights, dot_product_attention, reference

DTYPES = [np.float32, np.float64]
REDUCE = [None, "queries", "keys"]


def arrays(B=2, T=5, S=None, N=4, K=2, H=8, dtype=np.float32, seed=0, **options):
    """q, k and the LSE that attention with these options gives."""
    S = T if S is None else S
    q, k = random(seed, B, T, N, H, dtype=dtype), random(seed + 1, B, S, K, H, dtype=dtype)
    return q, k, dot_product_attention(q, k, k, return_lse=True, **options)[1]


def some_options(B, T, S, N, seed=0):
    """Calls with each option, and with all."""
    rng = np.random.default_rng(seed)
    bias = rng.standard_normal((N, T, S))
    bias[rng.random(bias.shape) < 0.2] = -np.inf
    offset = {"query_offset": S - T}
    each = [
        {},
        {"scale": 2.5},
        {"is_causal": True, **offset},
        {"local_window_size": (20, 3), **offset},
        {"softcap": 1.5},
        {"mask": rng.random((B, 1, T, S)) < 0.7},
        {"mask": rng.random((B, 1, 1, S)) < 0.7},
        {"bias": bias},
        {"alibi_slopes": rng.random((B, N)), **offset},
        {
            "query_seq_lengths": rng.integers(0, T + 1, B),
            "key_value_seq_lengths": rng.integers(0, S + 1, B),
        },
    ]
    together = {}
    for options in each:
        together |= options
    return [*each, together]


SIZES = {
    "small": {},
    "one query": {"T": 1, "S": 300, "H": 5},
    "tiles": {"B": 1, "T": 200, "S": 300, "N": 2, "K": 1, "H": 16},
    "one group": {"T": 17, "S": 67, "N": 6, "K": 1, "H": 33},
    "more queries than keys": {"T": 400, "S": 7, "N": 2, "H": 3},
}


@pytest.mark.parametrize("reduce", REDUCE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_every_option(size, dtype, reduce):
    shape = {"B": 2, "T": 5, "S": 9, "N": 4} | size
    rows = [shape["T"] - 1, 0, 0, shape["T"] // 2]
    for options in some_options(*(shape[axis] for axis in "BTSN")):
        q, k, lse = arrays(**shape | size, dtype=dtype, **options)
        for some in (None, rows, np.array([], int)):
            call = {"rows": some, "reduce": reduce, **options}
            got = attention_weights(q, k, lse, **call)
            expected = reference.attention_weights(q, k, lse, **call)
            assert got.shape == expected.shape
            check_weights(got, q, k, lse, **call)


@pytest.mark.parametrize("reduce", REDUCE)
@pytest.mark.parametrize("dtype", HALVES)
def test_halves_weigh_as_in_float32(dtype, reduce):
    q, k, lse = arrays(T=20, S=40, dtype=dtype)
    wide = attention_weights(q.astype(np.float32), k.astype(np.float32), lse, reduce=reduce)
    assert same_bits(attention_weights(q, k, lse, reduce=reduce), wide)


def test_weights_times_values_are_attention():
    options = {"is_causal": True, "query_offset": 230}
    q, k, lse = arrays(T=70, S=300, **options)
    w = attention_weights(q, k, lse, **options).astype(np.float64)
    out = np.einsum("bnts,bsnh->btnh", w, np.repeat(k, 2, axis=2)).astype(np.float32)
    check_attention((out, lse), q, k, k, **options)
    sums = attention_weights(q, k, lse, **options, reduce="keys")
    check_attention(sums.swapaxes(1, 2)[..., None], q, k, np.ones_like(k[..., :1]), **options)


def test_sinks_are_in_the_lse():
    sinks = np.array([0.0, 3.0, -np.inf, 1.0])
    q, k, lse = arrays(T=9, sinks=sinks)
    sums = attention_weights(q, k, lse, reduce="keys")
    check_weights(sums, q, k, lse, reduce="keys")
    assert (sums[:, [0, 1, 3]] < 1).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [-40, -8, -3, 5, 60])
def test_any_lse_is_taken_as_it_is(shift, dtype):
    """It need not be that of all keys, nor near the scores."""
    q, k, lse = arrays(T=21, S=530, dtype=dtype)
    lse = lse + dtype(shift)
    for reduce in REDUCE:
        check_weights(attention_weights(q, k, lse, reduce=reduce), q, k, lse, reduce=reduce)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [1, 21])
def test_an_infinite_weight_leaves_those_beside_it_as_they_are(T, dtype):
    """A score far above its row's LSE, or infinite, has an infinite weight, as exp has it."""
    q, k, lse = arrays(T=T, S=130, dtype=dtype)
    quiet = attention_weights(q, k, lse)
    for high in (1e5, np.inf):
        bias = np.zeros(130, dtype)
        bias[[3, 77]] = high
        weights = attention_weights(q, k, lse, bias=bias)
        assert (weights[..., [3, 77]] == np.inf).all()
        assert same_bits(*(np.delete(w, [3, 77], axis=-1) for w in (weights, quiet)))
        sums = attention_weights(q, k, lse, bias=bias, reduce="queries")
        assert (sums[..., [3, 77]] == np.inf).all()
        assert (sums[..., :3] < np.inf).all()
        assert (attention_weights(q, k, lse, bias=bias, reduce="keys") == np.inf).all()


def test_hidden_keys_weigh_nothing_beside_infinite_weights():
    q, k, lse = arrays(T=21, S=530)
    mask = np.arange(530) % 3 > 0
    weights = attention_weights(q, k, lse - np.float32(120), mask=mask)
    assert (weights[..., mask] == np.inf).all()
    assert (weights[..., ~mask] == 0).all()


@pytest.mark.parametrize("reduce", REDUCE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("part", [-1, -0.9, -0.7, -0.6, 0.6, 0.7, 0.9, 1])
def test_biases_at_the_end_of_the_range(part, dtype, reduce):
    """Numbers so large take in any score beside them, and in an LSE the log of their count."""
    number = part * float(np.finfo(dtype).max)
    for T, S in ((1, 9), (40, 300)):
        q, k, _ = arrays(B=1, T=T, S=S, dtype=dtype)
        sums = {None: 1, "queries": T, "keys": S}
        for bias in (np.full(S, number), np.full((T, S), number), np.full(S, part * 1e308)):
            options = {"bias": bias if bias.flat[0] == part * 1e308 else bias.astype(dtype)}
            lses = [
                function(q, k, k, return_lse=True, **options)[1]
                for function in (dot_product_attention, reference.dot_product_attention)
            ]
            if abs(part) in (0.6, 1) and (dtype == np.float64 or bias.flat[0] == number):
                np.testing.assert_allclose(*lses, rtol=1e-6)
            for lse in lses:
                assert np.isfinite(lse).all()
                for function in (attention_weights, reference.attention_weights):
                    got = function(q, k, lse, reduce=reduce, **options)
                    np.testing.assert_array_equal(got, sums[reduce])


@pytest.mark.parametrize("reduce", REDUCE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T, S", [(1, 9), (40, 300)])
def test_large_biases_weigh_as_equals(T, S, dtype, reduce):
    """One unit beside its LSE such a score would weigh nothing, or infinitely much."""
    q, k, _ = arrays(B=1, T=T, S=S, dtype=dtype)
    expected = {None: 1, "queries": T, "keys": S}[reduce]
    # From where the products with the keys do not decide how the sum is rounded.
    info = np.finfo(dtype)
    sizes = np.random.default_rng(0).uniform(2 * info.nmant, info.maxexp - 1, 64)
    for size in sizes:
        for number in (dtype(2**size), dtype(-(2**size))):
            bias = np.full(S, number)
            for function in (dot_product_attention, reference.dot_product_attention):
                lse = function(q, k, k, return_lse=True, bias=bias)[1]
                got = attention_weights(q, k, lse, reduce=reduce, bias=bias)
                np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_padded_query_does_not_reach_the_sums(dtype):
    for number in (-1e32, 0.693 * float(np.finfo(dtype).min), float(np.finfo(dtype).min) / 2):
        bias = np.zeros((40, 300), dtype)
        bias[7] = number
        q, k, lse = arrays(B=1, T=40, S=300, dtype=dtype, bias=bias)
        got = attention_weights(q, k, lse, bias=bias, reduce="queries")
        others = np.delete(np.arange(40), 7)
        alone = attention_weights(q, k, lse, bias=bias, reduce="queries", rows=others)
        np.testing.assert_allclose(got, alone + 1, rtol=40 * np.finfo(dtype).eps)


def test_an_infinite_lse_leaves_no_weight():
    q, k, lse = arrays(T=21, S=53)
    lse[:, 3:9] = np.inf
    for options in ({}, {"bias": np.full(53, np.finfo(np.float32).max)}):
        for function in (attention_weights, reference.attention_weights):
            assert not function(q, k, lse, **options)[:, :, 3:9].any()


@pytest.mark.parametrize("reduce", REDUCE)
def test_rows_without_lse_give_zeros_whatever_they_hold(reduce):
    q, k, lse = arrays(T=40, S=300)
    lse[:, 3:20] = -np.inf
    clean = attention_weights(q, k, lse, reduce=reduce)
    q[:, 3:20] = np.nan
    assert same_bits(attention_weights(q, k, lse, reduce=reduce), clean)
    if reduce is None:
        assert not clean[:, :, 3:20].any()


def test_what_is_not_seen_changes_no_bit():
    options = {"is_causal": True, "key_value_seq_lengths": [30, 44]}
    q, k, lse = arrays(T=50, **options)
    for reduce in REDUCE:
        clean = attention_weights(q, k, lse, reduce=reduce, **options)
        bad = k.copy()
        bad[0, 30:] = bad[1, 44:] = np.nan
        assert same_bits(attention_weights(q, bad, lse, reduce=reduce, **options), clean)


def test_nan_reaches_the_rows_that_see_it():
    q, k, lse = arrays(T=50, is_causal=True)
    k[0, 20, 1] = np.nan
    w = attention_weights(q, k, lse, is_causal=True)
    expected = np.zeros(w.shape, bool)
    expected[0, 2:, 20:, 20] = True
    np.testing.assert_array_equal(np.isnan(w), expected)


def test_rows_have_the_same_bits_whichever_are_asked_for():
    for options in some_options(2, 150, 300, 4):
        q, k, lse = arrays(T=150, S=300, **options)
        everything = attention_weights(q, k, lse, **options)
        for rows in ([7], [149, 3, 3], np.arange(0, 150, 2), np.arange(150)[::-1]):
            got = attention_weights(q, k, lse, rows=rows, **options)
            assert same_bits(got, everything[:, :, rows])
        sums = attention_weights(q, k, lse, reduce="keys", **options)
        some = attention_weights(q, k, lse, rows=[149, 3], reduce="keys", **options)
        assert same_bits(some, sums[:, :, [149, 3]])


@pytest.mark.parametrize("reduce", REDUCE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_and_out(layout, reduce):
    q, k, lse = arrays(T=20, S=300)
    expected = attention_weights(q, k, lse, reduce=reduce)
    q, k, lse = (LAYOUTS[layout](x) for x in (q, k, lse))
    assert same_bits(attention_weights(q, k, lse, reduce=reduce), expected)
    if layout in WRITABLE:
        out = LAYOUTS[layout](np.full_like(expected, 7))
        assert attention_weights(q, k, lse, reduce=reduce, out=out) is out
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("reduce", REDUCE)
def test_nothing_around_out_is_written(reduce):
    q, k, lse = arrays(T=20, S=301)
    guarded = Guarded(attention_weights(q, k, lse, reduce=reduce).shape, np.float32, row_gap=3)
    attention_weights(q, k, lse, reduce=reduce, out=guarded.array)
    guarded.check()


@pytest.mark.parametrize("axis", ["B", "T", "S", "N", "H"])
def test_empty_axes(axis):
    size = {"B": 2, "T": 3, "S": 4, "N": 2, "K": 2, "H": 8, axis: 0}
    q, k, lse = arrays(**size)
    for reduce in REDUCE:
        got = attention_weights(q, k, lse, reduce=reduce)
        expected = reference.attention_weights(q, k, lse, reduce=reduce)
        np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_sums_do_not_hold_the_weights():
    q, k, lse = arrays(B=1, T=3000, S=3000, N=1, K=1, H=8)
    for reduce in ("queries", "keys"):
        tracemalloc.start()
        attention_weights(q, k, lse, reduce=reduce)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 3000 * 3000


def test_faults_are_found_before_anything_is_written():
    q, k, lse = arrays(T=5, S=9)
    out = np.full((2, 4, 5, 9), 7, np.float32)
    for error, words, options in (
        (ValueError, "rows must lie between 0 and T - 1 = 4", {"rows": [5]}),
        (TypeError, "rows must hold integers", {"rows": [0.5]}),
        (ValueError, "reduce must be", {"reduce": "rows"}),
        (TypeError, "reduce must be", {"reduce": 1}),
        (ValueError, "needs query_offset", {"is_causal": True}),
        (TypeError, "mask must be boolean", {"mask": np.ones((5, 9))}),
        (ValueError, "num_threads", {"num_threads": 0}),
    ):
        with pytest.raises(error, match=words):
            attention_weights(q, k, lse, out=out, **options)
        assert (out == 7).all()
    with pytest.raises(ValueError, match="lse has shape"):
        attention_weights(q, k, lse[:, 1:], out=out)
    with pytest.raises(ValueError, match="out has shape"):
        attention_weights(q, k, lse, out=out, reduce="keys")
    with pytest.raises(TypeError, match="lse has dtype"):
        attention_weights(q, k, lse.astype(np.float64), out=out)


@pytest.mark.parametrize("reduce", REDUCE)
def test_a_call_too_large_for_memory_writes_nothing(reduce):
    q = np.broadcast_to(np.float32(0), (1, 1, 1, 1 << 48))
    out = np.full({None: (1, 1, 1, 1)}.get(reduce, (1, 1, 1)), 7, np.float32)
    with pytest.raises(MemoryError):
        attention_weights(q, q, np.zeros((1, 1, 1), np.float32), reduce=reduce, out=out)
    assert (out == 7).all()


@st.composite
def calls(draw):
    B, T, S = draw(st.integers(0, 3)), draw(st.integers(0, 150)), draw(st.integers(0, 300))
    K, G, H = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 40))
    size = {"B": B, "T": T, "S": S, "N": K * G, "K": K, "H": H}
    some = draw(st.lists(st.sampled_from(some_options(B, T, S, K * G)), max_size=3))
    options = {name: value for one in some for name, value in one.items()}
    call = {"reduce": draw(st.sampled_from(REDUCE))}
    if T and draw(st.booleans()):
        call["rows"] = np.array(draw(st.lists(st.integers(0, T - 1), max_size=20)), int)
    dtype, layout = draw(st.sampled_from(DTYPES)), st.sampled_from(list(LAYOUTS))
    q, k, lse = (
        LAYOUTS[draw(layout)](x)
        for x in arrays(**size, dtype=dtype, seed=draw(st.integers(0, 99)), **options)
    )
    return (q, k, lse), options, call, draw(st.integers(1, 5))


@given(calls())
def test_random_calls(call):
    (q, k, lse), options, how, threads = call
    got = attention_weights(q, k, lse, num_threads=threads, **how, **options)
    check_weights(got, q, k, lse, **how, **options)


@pytest.mark.parametrize("reduce", REDUCE)
@pytest.mark.parametrize("hidden_by", ["window", "mask", "bias", "lengths"])
def test_an_lse_of_nan_reaches_just_the_keys_that_its_row_sees(reduce, hidden_by):
    """At the edges of what a row sees, and beyond, in panels of any number of lanes."""
    T, S = 40, 70
    q, k = random(0, 1, T, 2, 8), random(1, 1, S, 1, 8)
    sees = np.abs(np.arange(S) - np.arange(T)[:, None]) <= 3
    options = {
        "window": {"local_window_size": 3, "query_offset": 0},
        "mask": {"mask": sees},
        "bias": {"bias": np.where(sees, np.float32(0), -np.inf)},
        "lengths": {"key_value_seq_lengths": [37]},
    }[hidden_by]
    if hidden_by == "lengths":
        sees = np.broadcast_to(np.arange(S) < 37, (T, S))
    lse = dot_product_attention(q, k, k, return_lse=True, **options)[1]
    blind = [0, 1, 20, 39]
    lse[0, blind] = np.nan
    got = attention_weights(q, k, lse, reduce=reduce, **options)
    expected = np.zeros((1, 2, T, S), bool)
    expected[:, :, blind] = sees[blind]
    if reduce is not None:
        expected = expected.any(axis=2 if reduce == "queries" else 3)
    np.testing.assert_array_equal(np.isnan(got), expected)
    slow = reference.attention_weights(q, k, lse, reduce=reduce, **options)
    np.testing.assert_array_equal(np.isnan(slow), expected)
    np.testing.assert_allclose(got[~expected], slow[~expected], rtol=1e-4, atol=1e-6)
