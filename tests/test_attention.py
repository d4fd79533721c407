"""dot_product_attention: every promise of its documentation."""

import itertools
import os
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tileattn
from tests.oracle import (
    HALVES,
    LAYOUTS,
    WRITABLE,
    check_attention,
    random,
    same_bits,
    visible,
)
from tests.process import run_python
from tileattn import dot_product_attention, reference

NAN, INF = np.nan, np.inf
DTYPES = [np.float32, np.float64]
STORED = [*DTYPES, *HALVES]  # halves are computed in float32


def qkv(B=1, T=5, S=None, N=2, K=None, H=8, Hv=None, dtype=np.float32, seed=0):
    S, K, Hv = T if S is None else S, N if K is None else K, H if Hv is None else Hv
    return (
        random(seed, B, T, N, H, dtype=dtype),
        random(seed + 1, B, S, K, H, dtype=dtype),
        random(seed + 2, B, S, K, Hv, dtype=dtype),
    )


# T for two heads of a group. Up to 16 rows a group's keys are read as they lie, and up to 128 in
# chunks that are merged.
PATHS = {"few rows": 3, "chunked tiles": 30, "many rows": 90}

# ------------------------------------------------------------------ sizes

SIZES = {
    "one of each": {"T": 1, "N": 1, "H": 1},
    "small": {"B": 2, "T": 5, "S": 7, "N": 4, "K": 2, "H": 8, "Hv": 5},
    "one query": {"B": 3, "T": 1, "S": 513, "N": 8, "K": 2, "H": 64},
    "usual": {"T": 64, "N": 4, "H": 64},
    "one group": {"T": 17, "S": 300, "N": 6, "K": 1, "H": 33, "Hv": 24},
    "many tiles": {"B": 2, "T": 200, "S": 600, "N": 3, "K": 1, "H": 16},
    "more queries than keys": {"T": 130, "S": 77, "N": 2, "H": 100, "Hv": 20},
    "primes": {"T": 211, "S": 257, "N": 2, "H": 31, "Hv": 67},
    "wide heads": {"T": 40, "N": 2, "H": 257, "Hv": 160},
    "narrow heads": {"T": 300, "N": 4, "K": 2, "H": 2, "Hv": 1},
}


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_result_and_lse(size, dtype):
    q, k, v = qkv(**size, dtype=dtype)
    B, T, S = len(q), q.shape[1], k.shape[1]
    rng = np.random.default_rng(3)
    query_lengths, key_lengths = rng.integers(0, T + 1, B), rng.integers(0, S + 1, B)
    for options in (
        {},
        {"is_causal": True, "query_offset": 0},
        {"is_causal": True, "query_offset": S - T},
        {"key_value_seq_lengths": key_lengths},
        {
            "is_causal": True,
            "query_offset": rng.integers(-T, S, B),
            "query_seq_lengths": query_lengths,
            "key_value_seq_lengths": key_lengths,
        },
    ):
        got = dot_product_attention(q, k, v, return_lse=True, **options)
        check_attention(got, q, k, v, **options)
        assert same_bits(dot_product_attention(q, k, v, **options), got[0])


def test_every_length_around_the_blocks_of_keys():
    for S in [*range(1, 36), 63, 64, 65, 255, 256, 257, 511, 512, 513]:
        q, k, v = qkv(T=3, S=S, H=12, seed=S)
        check_attention(dot_product_attention(q, k, v, return_lse=True), q, k, v)


def test_every_number_of_rows_around_the_tiles():
    for T in [*range(1, 20), 31, 32, 33, 191, 192, 193, 385]:
        q, k, v = qkv(T=T, N=1, H=8, seed=T)
        got = dot_product_attention(q, k, v, is_causal=True, return_lse=True)
        check_attention(got, q, k, v, is_causal=True)


@pytest.mark.parametrize("dtype", STORED)
def test_every_number_of_few_rows(dtype):
    """Up to 16 rows of a group, and the first numbers above; widths off the vectors, and whole."""
    for T in range(1, 16):
        for G in range(1, 17):
            H, Hv = ((32, 48), (7, 19), (64, 5), (1, 16))[(T + G) % 4]
            q, k, v = qkv(T=T, S=37, N=2 * G, K=2, H=H, Hv=Hv, dtype=dtype, seed=T + G)
            got = dot_product_attention(q, k, v, return_lse=True)
            check_attention(got, q, k, v)
            if T * G < 21:
                options = {"is_causal": True, "query_offset": 37 - T, "return_lse": True}
                got = dot_product_attention(q, k, v, **options)
                del options["return_lse"]
                check_attention(got, q, k, v, **options)


CHUNK_EDGES = [511, 512, 513, 1023, 1024, 1025, 16383, 16384, 16385, 17407, 17408, 17409]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("S", CHUNK_EDGES)
def test_every_length_around_the_chunks_of_keys(S, dtype):
    for T, N, H, Hv in ((1, 2, 16, 16), (3, 2, 9, 5), (20, 1, 4, 3)):
        q, k, v = qkv(B=2, T=T, S=S, N=N, K=1, H=H, Hv=Hv, dtype=dtype)
        options = {
            "is_causal": True,
            "query_offset": np.array([S - T, S - T - 1]),
            "key_value_seq_lengths": np.array([S - 1, S]),
        }
        got = dot_product_attention(q, k, v, return_lse=True, num_threads=3, **options)
        check_attention(got, q, k, v, **options)


def test_inputs_without_batch_axis():
    q, k, v = qkv(T=9, S=30, N=4, K=2)
    out, lse = dot_product_attention(q, k, v, return_lse=True)
    out_3, lse_3 = dot_product_attention(q[0], k[0], v[0], return_lse=True)
    assert same_bits(out_3, out[0])
    assert same_bits(lse_3, lse[0])
    options = {
        "is_causal": True,
        "query_offset": np.array([3]),
        "query_seq_lengths": np.array([7]),
        "key_value_seq_lengths": np.array([20]),
    }
    target = np.empty_like(out_3)
    got = dot_product_attention(q[0], k[0], v[0], out=target, **options)
    assert got is target
    assert same_bits(got, dot_product_attention(q, k, v, **options)[0])


def test_query_head_n_uses_key_head_n_over_group():
    """Each head by itself gives the same bits, where its rows are as few or many as a group's."""
    for T, N, K in ((1, 6, 2), (4, 6, 3), (3, 4, 1), (17, 6, 2), (17, 12, 4), (130, 6, 2)):
        q, k, v = qkv(T=T, S=21, N=N, K=K, H=8)
        out = dot_product_attention(q, k, v)
        for n in range(N):
            head = slice(n // (N // K), n // (N // K) + 1)
            one = dot_product_attention(q[:, :, n : n + 1], k[:, :, head], v[:, :, head])
            assert same_bits(one, np.ascontiguousarray(out[:, :, n : n + 1]))


def test_few_rows_of_each_head_and_many_of_a_group_agree():
    """A head by itself has few rows, its group many: both are as near to the exact result."""
    for T, N, K in ((4, 8, 1), (8, 12, 2), (15, 32, 2)):
        q, k, v = qkv(T=T, S=600, N=N, K=K, H=8)
        check_attention(dot_product_attention(q, k, v, return_lse=True), q, k, v)
        for n in range(N):
            head = slice(n // (N // K), n // (N // K) + 1)
            one = q[:, :, n : n + 1], k[:, :, head], v[:, :, head]
            check_attention(dot_product_attention(*one, return_lse=True), *one)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", ["B", "T", "N"])
def test_empty_queries_give_empty_results(axis, dtype):
    size = {"B": 2, "T": 3, "S": 4, "N": 2, "K": 2, "H": 8, "Hv": 5, axis: 0}
    size["K"] = min(size["K"], size["N"]) or 1
    out, lse = dot_product_attention(*qkv(**size, dtype=dtype), return_lse=True)
    assert out.shape == (size["B"], size["T"], size["N"], 5)
    assert lse.shape == out.shape[:3]
    assert out.dtype == lse.dtype == dtype


def test_no_keys_no_width_no_values():
    q, k, v = qkv(B=2, T=3, S=0, N=4, K=2, H=8, Hv=5)
    for options in ({}, {"is_causal": True, "query_offset": 0}):
        out, lse = dot_product_attention(q, k, v, return_lse=True, **options)
        assert out.shape == (2, 3, 4, 5)
        assert not out.any()
        assert (lse == -INF).all()
    q, k, v = qkv(T=3, S=7, N=4, K=2, H=0, Hv=5)  # all scores are 0
    out, lse = dot_product_attention(q, k, v, return_lse=True)
    check_attention((out, lse), q, k, v)
    q, k, v = qkv(T=3, S=7, N=4, K=2, H=8, Hv=0)
    out, lse = dot_product_attention(q, k, v, return_lse=True)
    assert out.shape == (1, 3, 4, 0)
    check_attention((out, lse), q, k, v)
    out, lse = dot_product_attention(*qkv(T=3, N=0, K=0), return_lse=True)
    assert out.shape == (1, 3, 0, 8)
    assert lse.shape == (1, 3, 0)


# ------------------------------------------------------------------ which keys are seen


def seen(T, S, **options):
    """[B, T, S]: the keys that a call sees, read off equal weights on values of their own."""
    B = options.pop("B", 1)
    q, k = np.zeros((B, T, 1, 4)), np.zeros((B, S, 1, 4))
    v = np.broadcast_to(np.eye(S)[:, None], (B, S, 1, S))
    out, lse = dot_product_attention(q, k, v, return_lse=True, **options)
    count = (out[:, :, 0] > 0).sum(axis=-1)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(lse[..., 0], np.log(count), rtol=1e-14)
    return out[:, :, 0] > 0


def test_causal_defaults_to_offset_zero_for_equal_lengths():
    for S in (1, 2, 40, 300):
        np.testing.assert_array_equal(seen(S, S, is_causal=True)[0], np.tri(S))


@pytest.mark.parametrize("T, S", [(1, 8), (3, 40), (40, 3), (70, 300), (300, 70)])
def test_causal_offset_is_the_position_of_the_first_query(T, S):
    for offset in (0, 1, S - T, -1, -T, S, 10**6, -(10**6), 1 << 60, -(1 << 60)):
        expected = np.arange(S) <= np.arange(T)[:, None] + offset
        np.testing.assert_array_equal(seen(T, S, is_causal=True, query_offset=offset)[0], expected)


def test_causal_offset_for_each_sequence():
    for dtype in (np.int64, np.int32, np.int8):
        offset = np.array([0, 5, -3, 20], dtype)
        expected = visible(4, 6, 20, is_causal=True, query_offset=offset)
        got = seen(6, 20, B=4, is_causal=True, query_offset=offset)
        np.testing.assert_array_equal(got, expected)


def test_offset_means_nothing_without_causal():
    q, k, v = qkv(T=4, S=9)
    assert same_bits(
        dot_product_attention(q, k, v, query_offset=-7), dot_product_attention(q, k, v)
    )


@pytest.mark.parametrize("T, S", [(4, 9), (9, 4)])
def test_causal_with_unequal_lengths_asks_for_the_offset(T, S):
    q, k, v = qkv(T=T, S=S)
    with pytest.raises(ValueError, match="query_offset") as error:
        dot_product_attention(q, k, v, is_causal=True)
    message = str(error.value)
    assert "0 aligns" in message
    assert f"S - T = {S - T}" in message
    assert f"T = {T}" in message
    # Lengths of the sequences do not stand in for it.
    with pytest.raises(ValueError, match="query_offset"):
        dot_product_attention(q, k, v, is_causal=True, key_value_seq_lengths=np.array([min(T, S)]))


@pytest.mark.parametrize("T", PATHS.values(), ids=PATHS)
def test_key_lengths_equal_slices_bit_for_bit(T):
    q, k, v = qkv(B=5, T=T, S=1030, N=4, K=2)
    lengths = [1030, 1, 513, 512, 0]
    for dtype in (np.int64, np.int32, np.uint8):
        n = np.array([min(x, 255) for x in lengths] if dtype == np.uint8 else lengths, dtype)
        out, lse = dot_product_attention(q, k, v, key_value_seq_lengths=n, return_lse=True)
        for b in range(5):
            one = dot_product_attention(q[b], k[b, : n[b]], v[b, : n[b]], return_lse=True)
            assert same_bits(one[0], out[b])
            assert same_bits(one[1], lse[b])


def test_lengths_do_not_move_the_offset():
    n = np.array([3, 5])
    got = seen(5, 5, B=2, is_causal=True, key_value_seq_lengths=n, query_seq_lengths=n)
    expected = np.tri(5, dtype=bool) & (np.arange(5) < n[:, None, None])
    expected &= (np.arange(5) < n[:, None])[..., None]
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", STORED)
def test_rows_that_see_nothing_are_zero_with_lse_minus_infinity(dtype):
    q, k, v = qkv(B=3, T=70, S=300, N=4, K=2, dtype=dtype)
    options = {
        "is_causal": True,
        "query_offset": np.array([-20, -300, 0]),
        "query_seq_lengths": np.array([50, 70, 0]),
    }
    out, lse = dot_product_attention(q, k, v, return_lse=True, **options)
    blind = np.ones((3, 70), bool)
    blind[0, 20:50] = False
    assert not out[blind].any()
    assert (lse[blind] == -INF).all()
    assert np.isfinite(lse[~blind]).all()
    check_attention((out, lse), q, k, v, **options)


# ------------------------------------------------------------------ windows, masks, biases, sinks


@pytest.mark.parametrize("T, S", [(1, 8), (3, 40), (40, 3), (70, 300), (300, 70), (300, 300)])
def test_window_counts_neighbours_of_the_position(T, S):
    for window in (0, 3, (0, 2), (5, 0), (None, 1), (20, None), (1 << 62, 4), (S, S)):
        for offset in (0, S - T, -1, 10**6, 1 << 60, -(1 << 60)):
            for is_causal in (False, True):
                options = {
                    "is_causal": is_causal,
                    "query_offset": offset,
                    "local_window_size": window,
                }
                expected = visible(1, T, S, **options)
                np.testing.assert_array_equal(seen(T, S, **options), expected)


def test_a_window_of_zero_is_self_only():
    np.testing.assert_array_equal(seen(9, 9, local_window_size=0)[0], np.eye(9))


@pytest.mark.parametrize("T", [1, 40, 130])
def test_masks_hide_and_compose(T):
    S, B, rng = 300, 2, np.random.default_rng(0)
    lengths, offset = np.array([290, 40]), np.array([S - T, 20])
    for shape in ((S,), (1, 1, 1, S), (B, 1, 1, S), (T, S), (T, 1), (B, 1, T, S), (1, 1, 1, 1)):
        mask = rng.random(shape) < 0.4
        bias = np.where(mask, 0, -INF).astype(np.float32)
        options = {"is_causal": True, "query_offset": offset, "local_window_size": (60, None)}
        expected = visible(B, T, S, key_lengths=lengths, **options)
        expected = expected & np.broadcast_to(mask, (B, 1, T, S))[:, 0]
        for hides in ({"mask": mask}, {"bias": bias}, {"mask": mask, "bias": bias}):
            got = seen(T, S, B=B, key_value_seq_lengths=lengths, **hides, **options)
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [2, 40])
def test_mask_and_bias_differ_by_head(T, dtype):
    q, k, v = qkv(B=2, T=T, S=270, N=4, K=2, dtype=dtype)
    mask = np.random.default_rng(0).random((2, 4, T, 270)) < 0.5
    bias = random(5, 4, T, 1, dtype=dtype)  # the same for all keys: only the LSE tells
    got = dot_product_attention(q, k, v, mask=mask, bias=bias, return_lse=True)
    check_attention(got, q, k, v, mask=mask, bias=bias)


@pytest.mark.parametrize("T", [3, 40])
def test_masks_and_biases_of_every_layout_give_the_same_bits(T):
    q, k, v = qkv(B=2, T=T, S=90, N=4, K=2)
    mask = np.random.default_rng(0).random((2, 4, T, 90)) < 0.5
    bias = random(1, 2, 4, T, 90)
    expected = dot_product_attention(q, k, v, mask=mask, bias=bias)
    for name, change in LAYOUTS.items():
        got = dot_product_attention(q, k, v, mask=change(mask), bias=change(bias))
        assert same_bits(got, expected), name
    wide = dot_product_attention(q, k, v, mask=mask[:, :1], bias=bias[:1, :, :, :1])
    same = [np.broadcast_to(a, mask.shape).copy() for a in (mask[:, :1], bias[:1, :, :, :1])]
    assert same_bits(dot_product_attention(q, k, v, mask=same[0], bias=same[1]), wide)


@pytest.mark.parametrize("bad", [NAN, INF, -INF, 3e38])
@pytest.mark.parametrize("T", [1, 6, 100])
def test_what_masks_and_biases_hide_changes_no_bit(T, bad):
    B, S, rng = 2, 300, np.random.default_rng(0)
    q, k, v = qkv(B=B, T=T, S=S, N=4, K=2, H=8, Hv=5)
    rows = rng.random((B, 4, T, S)) < 0.5
    rows &= (rng.random((B, 2, 1, S)) < 0.5).repeat(2, axis=1)
    keys = rng.random((B, 1, 1, S)) < 0.5
    keys[1, ..., 100:] = False
    for mask in (rows, keys):
        bias = np.where(mask, 0.5, -INF).astype(np.float32)
        every_head = np.broadcast_to(mask, (B, 4, mask.shape[2], S)).reshape(B, 2, -1, S)
        unseen = ~every_head.any(axis=2).swapaxes(1, 2)  # [B, S, K]
        assert unseen.any()
        for options in ({"mask": mask}, {"bias": bias}, {"mask": mask, "softcap": 4.0}):
            clean = dot_product_attention(q, k, v, return_lse=True, **options)
            k_bad, v_bad = k.copy(), v.copy()
            k_bad[unseen] = v_bad[unseen] = bad
            got = dot_product_attention(q, k_bad, v_bad, return_lse=True, **options)
            for a, b in zip(got, clean, strict=True):
                assert same_bits(a, b)


def test_a_double_bias_beyond_float_does_not_hide():
    for T, S in ((1, 40), (40, 300)):
        q, k, v = qkv(T=T, S=S, N=2)
        keys = np.where(np.arange(S) < 7, 0, np.finfo(np.float64).min)
        mean = np.broadcast_to(v.mean(axis=1, keepdims=True, dtype=np.float64), q.shape)
        for shape in ((S,), (2, T, S)):
            bias = np.broadcast_to(keys, shape).copy()
            expected = dot_product_attention(q, k[:, :7], v[:, :7])
            np.testing.assert_allclose(
                dot_product_attention(q, k, v, bias=bias), expected, atol=1e-6
            )
            bias[...] = np.finfo(np.float64).min
            out = dot_product_attention(q, k, v, bias=bias)
            np.testing.assert_allclose(out, mean, rtol=0, atol=64 * np.finfo(np.float32).eps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_how_a_bias_is_broadcast(dtype):
    for T, S in ((4, 300), (40, 300), (150, 600)):
        q, k, v = qkv(T=T, S=S, N=2, dtype=dtype)
        bias = random(5, S, dtype=dtype)
        bias[::7] = -INF
        expected = dot_product_attention(q, k, v, bias=bias)
        for shape in ((T, S), (2, T, S), (2, 1, S)):
            given = np.broadcast_to(bias, shape).copy()
            assert same_bits(dot_product_attention(q, k, v, bias=given), expected)


@pytest.mark.parametrize("size", [1.0, 2.0**6, 2.0**10, 2.0**20, 2.0**40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_keys_weigh_the_same_however_large_their_score(size, dtype):
    for T, S in ((1, 1100), (40, 300), (200, 600)):
        q, k, v = qkv(T=T, S=S, N=2, H=64, dtype=dtype)
        k[...] = k[:, :1]
        q *= dtype(size)
        mean = np.broadcast_to(v.mean(axis=1, keepdims=True, dtype=np.float64), q.shape)
        out = dot_product_attention(q, k, v)
        # Below a maximum of 128 scores start from it, and a panel's may differ by a unit there.
        np.testing.assert_allclose(out, mean, rtol=0, atol=192 * np.finfo(dtype).eps)


def test_the_lowest_bias_everywhere_does_not_hide():
    """A number so large takes in any score beside it: all keys weigh the same."""
    for dtype, T, S in itertools.product(DTYPES, (2, 40, 200), (9, 300, 1100)):
        low = np.finfo(dtype).min
        q, k, v = qkv(T=T, S=S, dtype=dtype)
        mean = np.broadcast_to(v.mean(axis=1, keepdims=True, dtype=np.float64), q.shape)
        for bias in (np.full(S, low), np.full((T, S), low), np.full((T, S), low / 3)):
            out, lse = dot_product_attention(q, k, v, bias=bias, return_lse=True)
            # A sum of S values of size 1 and less, of blocks' sums.
            np.testing.assert_allclose(out, mean, rtol=0, atol=64 * np.finfo(dtype).eps)
            np.testing.assert_allclose(lse, bias.flat[0], rtol=1e-6)
            high = dot_product_attention(q, k, v, bias=-bias)
            np.testing.assert_allclose(high, mean, rtol=0, atol=64 * np.finfo(dtype).eps)
            if bias.flat[0] == low:  # as far as the LSE tells
                weights = tileattn.attention_weights(q, k, lse, bias=bias)
                np.testing.assert_array_equal(weights, 1)


@pytest.mark.parametrize("T, S", [(1, 1500), (2, 9), (60, 70), (200, 600)])
def test_sinks_count_once_and_are_part_of_the_lse(T, S):
    q, k, v = qkv(B=2, T=T, S=S, N=4, K=2, dtype=np.float64)
    plain, plain_lse = dot_product_attention(q, k, v, return_lse=True)
    sinks = np.array([0.0, 3.0, -INF, 30.0])
    for threads in (1, 3):
        out, lse = dot_product_attention(q, k, v, sinks=sinks, return_lse=True, num_threads=threads)
        np.testing.assert_allclose(lse, np.logaddexp(plain_lse, sinks), rtol=1e-13)
        shrink = np.exp(plain_lse - lse)[..., None]
        np.testing.assert_allclose(out, plain * shrink, rtol=1e-12, atol=1e-15)


def test_sinks_of_rows_that_see_nothing():
    q, k, v = qkv(T=5, S=9, N=2)
    out, lse = dot_product_attention(
        q, k, v, sinks=[1.0, -INF], query_seq_lengths=[3], mask=np.zeros(9, bool), return_lse=True
    )
    assert not out.any()
    np.testing.assert_allclose(lse[0, :3, 0], 1, rtol=1e-6)
    assert (lse[0, 3:] == -INF).all()
    assert (lse[..., 1] == -INF).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T, S", [(1, 300), (5, 40), (60, 300)])
def test_softcap_comes_before_bias_and_slopes(T, S, dtype):
    q, k, v = qkv(B=2, T=T, S=S, N=4, K=2, H=8, dtype=dtype)
    options = {
        "softcap": 0.7,
        "bias": random(4, 4, 1, S, dtype=dtype),
        "alibi_slopes": np.array([0.5, -0.01, 0.0, 2.0]),
        "query_offset": S - T,
    }
    for names in (["softcap"], ["alibi_slopes", "query_offset"], ["softcap", "bias"], options):
        some = {name: options[name] for name in names}
        got = dot_product_attention(q, k, v, scale=3.0, return_lse=True, **some)
        check_attention(got, q, k, v, scale=3.0, **some)


# ------------------------------------------------------------------ NaN, infinity, extreme numbers


@pytest.mark.parametrize("bad", [NAN, INF, -INF, 3e38])
@pytest.mark.parametrize("Hv", [16, 5])
@pytest.mark.parametrize("T", [1, 6, 20, 100])
@pytest.mark.parametrize("S", [300, 1100])
def test_what_is_not_seen_changes_no_bit(S, T, Hv, bad):
    q, k, v = qkv(B=2, T=T, S=S, N=4, K=2, H=16 if Hv == 16 else 8, Hv=Hv)
    lengths = np.array([37, 256 if S == 300 else 521])
    for options in (
        {"key_value_seq_lengths": lengths},
        {"is_causal": True, "query_offset": np.array([40, 5])},
        {"is_causal": True, "query_offset": 100, "key_value_seq_lengths": lengths},
        {"is_causal": True, "query_offset": S - 590 if S > 590 else -T},
        {"query_seq_lengths": np.array([T // 2, 0]), "key_value_seq_lengths": lengths},
    ):
        sees = visible(
            2,
            T,
            S,
            is_causal=options.get("is_causal", False),
            query_offset=options.get("query_offset"),
            query_lengths=options.get("query_seq_lengths"),
            key_lengths=options.get("key_value_seq_lengths"),
        )
        clean = dot_product_attention(q, k, v, return_lse=True, **options)
        q_bad, k_bad, v_bad = q.copy(), k.copy(), v.copy()
        q_bad[~sees.any(axis=2)] = bad
        k_bad[~sees.any(axis=1)] = v_bad[~sees.any(axis=1)] = bad
        got = dot_product_attention(q_bad, k_bad, v_bad, return_lse=True, **options)
        for a, b in zip(got, clean, strict=True):
            assert same_bits(a, b)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("Hv", [16, 5])
def test_what_is_not_finite_reaches_exactly_the_rows_that_see_it(Hv, bad):
    q, k, v = qkv(T=70, S=70, N=4, K=2, H=8, Hv=Hv)
    q = np.abs(q)
    clean = dot_product_attention(q, k, v, is_causal=True)

    def differing(q, k, v):
        out = dot_product_attention(q, k, v, is_causal=True)
        with np.errstate(all="ignore"):
            expected = reference.dot_product_attention(q, k, v, is_causal=True)
        np.testing.assert_array_equal(np.isnan(out), np.isnan(expected))
        infinite = np.isinf(expected)
        np.testing.assert_array_equal(out[infinite], expected[infinite])
        return ~np.equal(out, clean)

    for j in (0, 15, 16, 33, 69):
        touched = np.zeros(clean.shape, bool)
        v_bad = v.copy()
        v_bad[0, j, 1, 3] = bad
        touched[0, j:, 2:, 3] = True
        np.testing.assert_array_equal(differing(q, k, v_bad), touched)

        q_bad = q.copy()
        q_bad[0, j, 1] = bad
        if np.isnan(bad):
            touched[:] = False
            touched[0, j, 1] = True
            np.testing.assert_array_equal(differing(q_bad, k, v), touched)

        k_bad = k.copy()
        k_bad[0, j, 1] = bad
        touched[:] = False
        touched[0, j:, 2:] = True
        got = differing(q, k_bad, v)
        assert not got[~touched].any()
        # A key of -inf has the score -inf: it weighs nothing, but others weigh more.
        assert got[touched].all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 40, 256, 290])
def test_rows_whose_scores_are_all_minus_infinity_are_zero(count, dtype):
    q, k, v = qkv(T=7, S=300, N=4, K=2, H=8, Hv=5, dtype=dtype)
    q, k[:, :count] = np.abs(q), -INF
    v[0, 0, 1, 3] = INF  # 0 * inf is NaN
    options = {"is_causal": True, "query_offset": count - 4, "return_lse": True}
    for T in (7, 1):
        out, lse = dot_product_attention(q[:, :T], k, v, **options)
        expected, _ = reference.dot_product_attention(q[:, :T], k, v, **options)
        weightless = np.arange(T) < 4
        np.testing.assert_array_equal(out[:, weightless], expected[:, weightless])
        assert not out[:, weightless, :2].any()
        assert (lse[:, weightless] == -INF).all()
        assert np.isfinite(lse[:, ~weightless]).all()
        assert np.isfinite(out[:, ~weightless, :2]).all()


@pytest.mark.parametrize("number", [NAN, INF])
@pytest.mark.parametrize("T", PATHS.values(), ids=PATHS)
def test_a_mask_of_all_rows_hides_what_is_not_finite_in_the_bias_of_each(T, number):
    q, k, v = qkv(T=T, S=70, N=4, K=2, H=8, Hv=5)
    bias = random(3, 4, T, 70)
    mask = np.arange(70) % 3 != 1
    hidden = np.where(mask, bias, np.float32(number))
    for softcap in (None, 3.0):
        options = {"mask": mask, "softcap": softcap, "return_lse": True}
        out, lse = dot_product_attention(q, k, v, bias=hidden, **options)
        clean, clean_lse = dot_product_attention(q, k, v, bias=bias, **options)
        assert np.isfinite(clean).all()
        assert same_bits(out, clean)
        assert same_bits(lse, clean_lse)


@pytest.mark.parametrize("T", PATHS.values(), ids=PATHS)
def test_an_infinite_value_without_weight_is_nan_wherever_its_chunk_is_merged(T):
    """0 * inf, in a chunk of keys without any weight: not lost beside chunks that have some."""
    for begin, end in ((0, 512), (512, 1024), (1024, 1100)):
        q, k, v = qkv(T=T, S=1100, N=4, K=2, H=8, Hv=5)
        q, k[:, begin:end] = np.abs(q), -INF
        clean, lse = dot_product_attention(q, k, v, return_lse=True)
        assert np.isfinite(clean).all()
        v[0, begin + 9, 1, 3] = INF
        out, same_lse = dot_product_attention(q, k, v, return_lse=True)
        assert np.isnan(out[:, :, 2:, 3]).all()
        out[:, :, 2:, 3] = clean[:, :, 2:, 3]
        assert same_bits(out, clean)
        assert same_bits(same_lse, lse)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_with_a_payload_is_nan(dtype):
    """Not every NaN is np.nan: R's NA has the payload 1954, and arithmetic keeps it."""
    bits = {4: np.uint32, 8: np.uint64}[np.dtype(dtype).itemsize]
    for payload in (1, 3, 0x7A2):
        for which in range(3):
            inputs = qkv(T=4, S=9, dtype=dtype)
            bad = inputs[which][0, 2, 1, 3:4].view(bits)
            bad[:] = np.array(NAN, dtype).view(bits) | bits(payload)
            out = dot_product_attention(*inputs)
            expected = reference.dot_product_attention(*inputs)
            np.testing.assert_array_equal(np.isnan(out), np.isnan(expected))
            assert np.isnan(out).any()


def test_scores_of_any_size():
    """Rising by far more than the range of exp from block to block of keys, or all far below 0."""
    rng = np.random.default_rng(0)
    S = 5 * 256 + 7
    for heights in (np.arange(S), np.arange(S)[::-1], rng.permutation(S), -1e6 + np.zeros(S)):
        q, k, v = qkv(T=3, S=S, N=2, H=4)
        q[..., 0], k[..., 0] = 1, heights[:, None] / 2
        for scale in (1.0, 80.0, 1e-3):
            got = dot_product_attention(q, k, v, scale=scale, return_lse=True)
            check_attention(got, q, k, v, scale=scale)
            assert np.isfinite(got[0]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", PATHS.values(), ids=PATHS)
def test_a_start_far_below_leaves_later_scores_all_their_bits(T, dtype):
    """As if what lies so far below were not there: a finite bias on padding in front, or a sink."""
    S, hidden, rows = 600, 300, np.ones((T, 1))
    for low in (-1e3, -1e4, -1e9, -1e30, np.finfo(np.float32).min):
        q, k, v = qkv(B=1, T=T, S=S, N=2, H=64, dtype=dtype)
        bias = np.where(np.arange(S) < hidden, low, 0).astype(dtype)
        shown = q, k[:, hidden:], v[:, hidden:]
        for options in ({"bias": bias}, {"bias": rows * bias}, {"bias": bias, "softcap": 50.0}):
            got = dot_product_attention(q, k, v, return_lse=True, **options)
            del options["bias"]
            check_attention(got, *shown, **options)
        sinks = np.full(2, low / 2)
        check_attention(dot_product_attention(q, k, v, sinks=sinks, return_lse=True), q, k, v)


def test_a_key_far_below_the_maximum_weighs_exactly_nothing():
    q, k, v = qkv(T=3, S=70, N=2, H=8)
    q[..., 0], k[..., 0] = 1, 0
    k[:, 1::2, :, 0] = -200
    v[:, 1::2] = 1e38
    got = dot_product_attention(q, k, v, scale=1.0)
    check_attention(got, q, k[:, ::2], v[:, ::2], scale=1.0)


def test_lse_is_a_natural_logarithm_of_the_parts_that_it_joins():
    q, k, v = qkv(B=2, T=6, S=600, N=4, K=2, dtype=np.float64)
    whole, lse = dot_product_attention(q, k, v, return_lse=True)
    parts = [
        dot_product_attention(q, k[:, a:b], v[:, a:b], return_lse=True)
        for a, b in itertools.pairwise((0, 100, 356, 600))
    ]
    weights = [np.exp(part_lse - lse) for _, part_lse in parts]
    np.testing.assert_allclose(sum(weights), 1, rtol=1e-13)
    joined = sum(w[..., None] * out for w, (out, _) in zip(weights, parts, strict=True))
    np.testing.assert_allclose(joined, whole, rtol=0, atol=1e-13)


def test_lse_of_one_key_is_its_score():
    q, k, v = qkv(T=1, S=1, N=2, H=4, dtype=np.float64)
    _, lse = dot_product_attention(q, k, v, return_lse=True)
    np.testing.assert_allclose(lse, (q * k).sum(axis=-1) / 2, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize(
    "scale", [0, 0.0, 1, -1.5, 1e-3, np.float32(0.3), np.float64(0.3), np.array(0.3), True]
)
def test_scale_is_used_as_given(scale):
    for T, S in ((1, 9), (4, 300)):
        q, k, v = qkv(T=T, S=S, H=16)
        got = dot_product_attention(q, k, v, scale=scale, return_lse=True)
        check_attention(got, q, k, v, scale=float(scale))
        if scale == 0:
            np.testing.assert_allclose(got[1], np.log(S), rtol=1e-6)


def test_scale_defaults_to_one_over_the_root_of_the_head_width():
    q, k, v = qkv(H=9, dtype=np.float64)
    default = dot_product_attention(q, k, v)
    assert same_bits(dot_product_attention(q, k, v, scale=1 / np.sqrt(9)), default)


# ------------------------------------------------------------------ arrays as they come


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize(
    "size",
    [
        {"B": 2, "T": 5, "S": 7, "N": 4, "K": 2, "H": 8, "Hv": 8},
        {"B": 2, "T": 33, "S": 40, "N": 2, "K": 2, "H": 16, "Hv": 32},
        {"B": 1, "T": 1, "S": 300, "N": 2, "K": 1, "H": 7, "Hv": 3},
        {"B": 2, "T": 3, "S": 600, "N": 4, "K": 2, "H": 32, "Hv": 16},
    ],
    ids=["small", "whole vectors", "one query", "few rows of whole vectors"],
)
def test_every_layout_gives_the_same_bits(size, dtype):
    arrays = qkv(**size, dtype=dtype)
    options = {"is_causal": True, "query_offset": 4}
    expected = dot_product_attention(*arrays, **options)
    for name, change in LAYOUTS.items():
        changed = [change(a) for a in arrays]
        for which in ((0,), (1,), (2,), (0, 1, 2)):
            mixed = [changed[i] if i in which else arrays[i] for i in range(3)]
            before = [a.tobytes() for a in mixed]
            assert same_bits(dot_product_attention(*mixed, **options), expected), (name, which)
            assert [a.tobytes() for a in mixed] == before


def test_broadcast_inputs():
    q, k, v = qkv(B=1, T=4, S=40, N=1, H=16)
    shape = (3, 4, 6, 16)
    wide = [np.broadcast_to(a, (3, a.shape[1], 6, 16)) for a in (q, k, v)]
    out = dot_product_attention(*wide)
    assert same_bits(out, np.broadcast_to(dot_product_attention(q, k, v), shape).copy())
    row = np.broadcast_to(random(0, 16), (2, 40, 2, 16))  # all keys and values the same
    np.testing.assert_allclose(dot_product_attention(row[:, :4], row, row), row[:, :4], rtol=1e-5)
    column = np.broadcast_to(random(0, 1, 40, 2, 1), (1, 40, 2, 16))
    got = dot_product_attention(column[:, :7], column, column)
    check_attention(got, column[:, :7], column, column)


def test_nested_lists_and_subclasses_are_arrays_too():
    q, k, v = qkv(T=2, dtype=np.float64)
    expected = dot_product_attention(q, k, v)
    assert same_bits(dot_product_attention(q.tolist(), k.tolist(), v.tolist()), expected)

    class Sub(np.ndarray):
        pass

    assert same_bits(dot_product_attention(*(a.view(Sub) for a in (q, k, v))), expected)


# ------------------------------------------------------------------ out


@pytest.mark.parametrize("Hv", [5, 16])
@pytest.mark.parametrize("dtype", STORED)
def test_out_of_any_strides(dtype, Hv):
    q, k, v = qkv(B=2, T=9, S=40, N=4, K=2, H=8, Hv=Hv, dtype=dtype)
    expected = dot_product_attention(q, k, v)
    for name in WRITABLE:
        view = LAYOUTS[name](np.full_like(expected, NAN))
        got = dot_product_attention(q, k, v, out=view)
        assert got is view
        assert same_bits(view.copy(order="C"), expected), name


@pytest.mark.parametrize("T", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("dtype", HALVES)
def test_halves_are_what_they_are_in_float32(dtype, T):
    """They are read exactly; the result is rounded once, or not at all for an out of float32."""
    for H in (16, 9):
        q, k, v = qkv(B=2, T=T, S=600, N=4, K=2, H=H, dtype=dtype)
        options = {"is_causal": True, "query_offset": 570, "return_lse": True}
        wide, wide_lse = dot_product_attention(
            *(a.astype(np.float32) for a in (q, k, v)), **options
        )
        got, lse = dot_product_attention(q, k, v, **options)
        assert same_bits(got, wide.astype(dtype))
        out, _ = dot_product_attention(q, k, v, out=np.empty(got.shape, np.float32), **options)
        assert same_bits(out, wide)
        assert same_bits(lse, wide_lse)


def test_nothing_is_written_around_out():
    q, k, v = qkv(B=2, T=9, S=40, N=4, K=2, H=8, Hv=5)
    memory = np.full((4, 11, 6, 9), 7.0, np.float32)
    inside = (slice(1, 3), slice(1, 10), slice(1, 5), slice(2, 7))
    dot_product_attention(q, k, v, out=memory[inside])
    assert same_bits(memory[inside].copy(), dot_product_attention(q, k, v))
    memory[inside] = 7
    assert (memory == 7).all()


def test_out_that_overlaps_an_input_is_refused():
    for which, name in enumerate("qkv"):
        arrays = list(qkv(T=6, N=2, H=8))
        before = arrays[which].copy()
        with pytest.raises(ValueError, match=f"out overlaps {name}"):
            dot_product_attention(*arrays, out=arrays[which])
        with pytest.raises(ValueError, match=f"out overlaps {name}"):
            dot_product_attention(*arrays, out=arrays[which][:, ::-1])
        assert same_bits(arrays[which], before)


def test_out_interleaved_with_an_input_does_not_overlap_it():
    q, k, v = qkv(T=6, N=2, H=8)
    both = np.empty((1, 6, 2, 16), np.float32)
    both[..., :8] = q
    out = dot_product_attention(both[..., :8], k, v, out=both[..., 8:])
    assert same_bits(out.copy(), dot_product_attention(q, k, v))
    assert same_bits(both[..., :8].copy(), q)


# ------------------------------------------------------------------ bits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "T, ranges",
    [
        (5, ((0, 1), (2, 4), (4, 5))),
        (42, ((0, 6), (17, 23), (10, 42), (36, 42))),
        (300, ((0, 43), (17, 81), (100, 300), (257, 300))),
    ],
    ids=["few rows", "chunked tiles", "many rows"],
)
def test_bits_do_not_depend_on_the_queries_beside_it(T, ranges, dtype):
    """As long as these are as few, or as many."""
    S = 700
    q, k, v = qkv(T=T, S=S, N=6, K=2, H=24, dtype=dtype)
    for offset in (0, S - T):
        options = {"is_causal": True, "return_lse": True}
        whole, lse = dot_product_attention(q, k, v, query_offset=offset, **options)
        for begin, end in ranges:
            options["query_offset"] = offset + begin
            got = dot_product_attention(q[:, begin:end], k, v, **options)
            assert same_bits(got[0], np.ascontiguousarray(whole[:, begin:end]))
            assert same_bits(got[1], np.ascontiguousarray(lse[:, begin:end]))
            # Keys that no query sees may as well be absent.
            seen = offset + end
            cut = dot_product_attention(q[:, begin:end], k[:, :seen], v[:, :seen], **options)
            assert same_bits(cut[0], got[0])
            assert same_bits(cut[1], got[1])


# ------------------------------------------------------------------ threads, processes, memory


@pytest.mark.any_isa  # the loops lay out this memory, not the kernels
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads Linux's counters")
def test_memory_of_a_long_call_is_that_of_its_tiles(isa):
    """16384 x 16384 scores of 4 heads would be 4 GiB."""
    grown = run_python(
        """
        import numpy as np
        import tileattn

        def peak():  # of this program only: ru_maxrss starts with that of the parent
            with open("/proc/self/status") as status:
                return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

        q, k, v = (np.full((1, 16384, 4, 64), x, np.float32) for x in (0.1, 0.2, 0.3))
        out = np.ones_like(q)
        tileattn.dot_product_attention(q[:, :64], k[:, :64], v[:, :64], num_threads=2)
        before = peak()
        tileattn.dot_product_attention(q, k, v, is_causal=True, out=out, num_threads=2)
        every = {
            "mask": np.broadcast_to(np.arange(16384) < 16000, (16384, 16384)),
            "bias": np.broadcast_to(np.float16(1), (1, 4, 16384, 16384)),
            "local_window_size": (1000, 20),
        }
        tileattn.dot_product_attention(q, k, v, out=out, num_threads=2, **every)
        assert abs(out - 0.3).max() < 1e-3
        print(peak() - before)
        """,
        TILEATTN_ISA=isa,
    )
    assert int(grown) < 32 * 1024


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs mprotect")
def test_no_byte_outside_the_arrays_is_touched(isa):
    """Each array ends, or begins, at a page that must not be read."""
    run_python(
        """
        import ctypes, itertools, mmap
        import numpy as np
        import tileattn

        PAGE = mmap.PAGESIZE
        libc = ctypes.CDLL(None, use_errno=True)

        def fenced(a, at_end):
            size = -(-max(a.nbytes, 1) // PAGE) * PAGE
            memory = mmap.mmap(-1, size + 2 * PAGE)
            start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            for fence in (start, start + PAGE + size):
                assert libc.mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(PAGE), 0) == 0
            offset = PAGE + (size - a.nbytes if at_end else 0)
            inside = np.frombuffer(memory, a.dtype, a.size, offset).reshape(a.shape)
            inside[...] = a
            return inside

        rng = np.random.default_rng(0)
        for dtype, at_end in itertools.product((np.float32, np.float64), (True, False)):
            for T, S, N, K, H, Hv in (
                (1, 1, 1, 1, 1, 1), (3, 5, 2, 1, 7, 5), (17, 300, 4, 2, 33, 16),
                (9, 40, 2, 2, 64, 64), (40, 31, 3, 1, 15, 67),
            ):
                q = fenced(rng.standard_normal((1, T, N, H)).astype(dtype), at_end)
                k = fenced(rng.standard_normal((1, S, K, H)).astype(dtype), at_end)
                v = fenced(rng.standard_normal((1, S, K, Hv)).astype(dtype), at_end)
                out = fenced(np.zeros((1, T, N, Hv), dtype), at_end)
                for options in ({}, {"is_causal": True, "query_offset": S // 2}):
                    tileattn.dot_product_attention(q, k, v, out=out, return_lse=True, **options)

            for M, D, N, K, H, Hv in (
                (1, 1, 1, 1, 1, 1), (3, 7, 2, 1, 5, 3), (20, 33, 4, 2, 16, 17),
            ):
                w_q, w_k, w_v, w_o = (
                    fenced(rng.standard_normal(shape).astype(dtype), at_end)
                    for shape in ((D, N, H), (D, K, H), (D, K, Hv), (N, Hv, D))
                )
                b_q, b_k, b_v, b_o, weight, bias = (
                    fenced(rng.standard_normal(shape).astype(dtype), at_end)
                    for shape in ((N, H), (K, H), (K, Hv), D, D, D)
                )
                norm = tileattn.LayerNorm(weight, bias)
                x = fenced(rng.standard_normal((1, M, D)).astype(dtype), at_end)
                out = fenced(np.zeros((1, M, D), dtype), at_end)
                tileattn.attention_block(
                    x, w_q, w_k, w_v, w_o, b_q=b_q, b_k=b_k, b_v=b_v, b_o=b_o, norm=norm, out=out
                )
                norm(x, residual=fenced(x, at_end), out=out)
        """,
        TILEATTN_ISA=isa,
    )


# ------------------------------------------------------------------ random calls


def integers(values):
    return np.array(values, np.int64)


@st.composite
def broadcast_shapes(draw, *shape):
    """A shape that broadcasts to `shape`: axes of 1, or missing in front."""
    return [draw(st.sampled_from([1, n])) for n in shape][draw(st.integers(0, len(shape))) :]


@st.composite
def layouts(draw, array):
    names = ["contiguous", "Fortran", "every second", "all axes reversed", "read-only"]
    return LAYOUTS[draw(st.sampled_from(names))](array) if array.ndim > 1 else array


@st.composite
def calls(draw):
    """Inputs of random shape, dtype and layout, and options that fit them."""
    sizes = st.integers(0, 70)
    B, K, G = draw(st.integers(0, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    T = draw(sizes | st.integers(1, 5))  # few rows read keys and values as they lie
    S = draw(sizes | st.integers(250, 262) | st.sampled_from([511, 513, 1030]))
    H, Hv = (draw(sizes | st.sampled_from([16, 32])) for _ in range(2))
    dtype = draw(st.sampled_from(STORED))
    arrays = []
    for i, shape in enumerate(((B, T, K * G, H), (B, S, K, H), (B, S, K, Hv))):
        values = random(draw(st.integers(0, 9)) + i, *shape, dtype=dtype)
        arrays.append(LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](values))
    N = K * G
    options = {
        "is_causal": draw(st.booleans()),
        "softcap": draw(st.none() | st.sampled_from([0.5, 3.0, 30.0])),
        "local_window_size": draw(
            st.none() | st.integers(0, 40) | st.tuples(*[st.none() | st.integers(0, 40)] * 2)
        ),
        "scale": draw(st.sampled_from([None, 0.0]) | st.floats(0.01, 2) | st.floats(-2, -0.01)),
        "query_offset": draw(
            st.none()
            | st.integers(-80, 80)
            | st.lists(st.integers(-80, 80), min_size=B, max_size=B).map(integers)
        ),
    }
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    some = draw(st.sets(st.sampled_from(["mask", "bias", "alibi_slopes", "sinks"])))
    if "mask" in some:
        mask = rng.random(draw(broadcast_shapes(B, N, T, S))) < draw(st.sampled_from([0.1, 0.9]))
        options["mask"] = draw(layouts(mask))
    if "bias" in some:
        bias = rng.standard_normal(draw(broadcast_shapes(B, N, T, S)))
        if bias.ndim:
            bias[..., : bias.shape[-1] // 2] += draw(st.sampled_from([0, -1e3, -3e4]))
        bias[rng.random(bias.shape) < draw(st.sampled_from([0, 0.2, 0.8]))] = -INF
        options["bias"] = draw(layouts(bias.astype(draw(st.sampled_from([*DTYPES, *HALVES])))))
    if "alibi_slopes" in some:
        options["alibi_slopes"] = rng.standard_normal(draw(st.sampled_from([(N,), (B, N)])))
    if "sinks" in some:
        options["sinks"] = draw(
            st.sampled_from([np.full(N, -INF), np.full(N, -1e30), 3 * rng.standard_normal(N)])
        )
    positioned = options["is_causal"] or options["local_window_size"] or "alibi_slopes" in some
    positioned = positioned or options["local_window_size"] == 0
    if positioned and T != S and options["query_offset"] is None:
        options["query_offset"] = S - T
    for name, limit in (("query_seq_lengths", T), ("key_value_seq_lengths", S)):
        some = st.lists(st.integers(0, limit), min_size=B, max_size=B).map(integers)
        options[name] = draw(st.none() | some)
    return arrays, options


@given(calls(), st.integers(1, 3), st.booleans())
def test_random_calls(call, num_threads, with_out):
    (q, k, v), options = call
    out = np.full((*q.shape[:3], v.shape[3]), NAN, q.dtype.newbyteorder("="))
    extra = {"out": out} if with_out else {}
    got = dot_product_attention(
        q, k, v, return_lse=True, num_threads=num_threads, **extra, **options
    )
    check_attention(got, q, k, v, **options)


@given(calls(), st.data())
def test_random_calls_with_numbers_that_are_not_finite(call, data):
    """NaN and infinities appear where the reference has them, and nowhere else."""
    (q, k, v), options = call
    # No weight so small that float32 has only 0 for it: 0 * inf is NaN.
    if options["scale"] is not None:
        options["scale"] /= 8
    if "alibi_slopes" in options:
        options["alibi_slopes"] = options["alibi_slopes"] / 64
    arrays = []
    for a in (q, k, v):
        a = a.astype(a.dtype.newbyteorder("="))
        if a.size:
            places = st.lists(st.integers(0, a.size - 1), max_size=3)
            np.put(a, data.draw(places), data.draw(st.sampled_from([NAN, INF, -INF])))
        arrays.append(a)
    out, lse = dot_product_attention(*arrays, return_lse=True, **options)
    expected, expected_lse = reference.dot_product_attention(*arrays, return_lse=True, **options)
    # A row whose scores are all -inf has weights of 0: it is 0, or NaN where 0 meets inf or NaN.
    weightless = expected_lse == -INF
    # As float64: a NaN of bfloat16 equals none.
    wide, expected_wide = (a[weightless].astype(np.float64) for a in (out, expected))
    np.testing.assert_array_equal(wide, expected_wide)
    for a, b in ((out, expected), (lse, expected_lse)):
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        np.testing.assert_array_equal(a[np.isinf(b)], b[np.isinf(b)])
        np.testing.assert_array_equal(np.isinf(a), np.isinf(b))


def test_large_values_meet_no_weight_far_above_one(isa):
    """The maximum rises in a later block, by 37 in units of log2: weights must not reach 2^37."""
    q, k = np.ones((1, 1, 1, 1), np.float32), np.zeros((1, 512, 1, 1), np.float32)
    k[0, 256:] = 26
    v = np.full((1, 512, 1, 1), 1e28, np.float32)
    of_a_sum = 256 * np.finfo(np.float32).eps
    np.testing.assert_allclose(dot_product_attention(q, k, v, scale=1.0), 1e28, rtol=of_a_sum)


def test_sizes_beyond_any_address_space_raise_memory_error(isa):
    H = -(-(2**64) // 1028)  # (TILE_ROWS + TA_KEY_BLOCK) * H * 4 bytes wraps around
    q = np.broadcast_to(np.float32(0), (1, 1, 1, H))
    with pytest.raises(MemoryError):
        dot_product_attention(q, q, np.zeros((1, 1, 1, 1), np.float32))
