"""KVCache: decoding in any chunks is one causal call, and what it holds is what a list would."""

import concurrent.futures
import copy
import gc
import pickle

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.oracle import (
    HALVES,
    arithmetic,
    check_attention,
    contents,
    poison,
    quantized,
    random,
    refused,
    same_bits,
    stored,
)
from tileattn import KVCache, dot_product_attention
from tileattn._arguments import AttentionArguments
from tileattn._core import Scores, Visibility
from tileattn.attention import attend

STORED = [np.float32, np.float64, *HALVES, np.int8]
NAN = np.nan


def qkv(B, T, N, K, H, Hv, dtype=np.float32, seed=0):
    """Of the type that is appended: that of the arithmetic."""
    dtype = arithmetic(dtype)
    return (
        random(seed, B, T, N, H, dtype=dtype),
        random(seed + 1, B, T, K, H, dtype=dtype),
        random(seed + 2, B, T, K, Hv, dtype=dtype),
    )


def decode(cache, q, k, v, chunks, **options):
    """The rows that appending and attending chunk by chunk gives, and their LSE."""
    parts, t = [], 0
    for n in chunks:
        cache.append(k[:, t : t + n], v[:, t : t + n])
        parts.append(cache.attend(q[:, t : t + n], return_lse=True, **options))
        t += n
    assert t == q.shape[1]
    out, lse = zip(*parts, strict=True)
    return np.concatenate(out, axis=1), np.concatenate(lse, axis=1)


def cut(length, at_most, seed):
    """Chunks of random sizes that add up to the length."""
    rng, chunks = np.random.default_rng(seed), []
    while length:
        n = int(min(length, at_most, rng.choice([1, 1, 2, 3, 7, 15, 16, 40, 130])))
        chunks.append(n)
        length -= n
    return chunks


# ------------------------------------------------------------------ decoding

WIDTHS = {"whole vectors": (16, 32), "others": (9, 5)}


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("H, Hv", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_decoding_in_chunks_is_one_causal_call(dtype, H, Hv, seed):
    B, T, N, K = 2, 300 if seed is None else 1100, 6, 2
    q, k, v = qkv(B, T, N, K, H, Hv, dtype)
    cache = KVCache(B, T + 3, K, H, Hv, dtype)
    poison(cache)
    got = decode(cache, q, k, v, [1] * T if seed is None else cut(T, T, seed))
    check_attention(got, q, stored(k, dtype), stored(v, dtype), is_causal=True)
    for now, then in zip(contents(cache), (k, v), strict=True):
        assert same_bits(now[:, :T].astype(then.dtype), stored(then, dtype))


RINGS = {
    "one position": (1, 1, 30),
    "no room to spare": (7, 7, 300),
    "a few": (7, 20, 600),
    "around blocks": (255, 256, 2700),
    "one slot more than a block": (100, 257, 1300),
    "many blocks": (600, 1500, 6100),
}


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("window, capacity, T", RINGS.values(), ids=RINGS)
def test_a_ring_is_a_window_for_ever(window, capacity, T, dtype):
    B, N, K, H, Hv = 1, 2, 1, 16, 5
    q, k, v = qkv(B, T, N, K, H, Hv, dtype)
    options = {"is_causal": True, "local_window_size": (window - 1, 0)}
    for seed in range(2):
        cache = KVCache(B, capacity, K, H, Hv, dtype, window)
        poison(cache)
        got = decode(cache, q, k, v, cut(T, capacity - window + 1, seed))
        full = [stored(a, dtype) for a in (k, v)]
        for begin in range(0, T, 500):  # the oracle's matrices stay small
            rows, first = slice(begin, begin + 500), max(0, begin - window + 1)
            keys = slice(first, begin + 500)
            check_attention(
                tuple(a[:, rows] for a in got),
                q[:, rows],
                *(a[:, keys] for a in full),
                query_offset=begin - first,
                **options,
            )


@pytest.mark.parametrize("T", [1, 3, 60])
def test_a_ring_far_beyond_int32(T):
    """Positions are not limited, and a long past costs nothing: only the window is read."""
    q, _k, _v = qkv(2, T, 4, 2, 16, 16)
    near, far = (KVCache(2, 600, 2, 16, window=500) for _ in range(2))
    for cache, start in ((near, 0), (far, 256 * 3 << 40)):
        cache._lengths[:] = cache._longest[:] = start
        for t in range(0, 900, 60):
            cache.append(*qkv(2, 60, 4, 2, 16, 16, seed=t)[1:])
    assert same_bits(near.attend(q), far.attend(q))


def test_windows_within_a_ring_and_within_a_cache():
    q, k, v = qkv(1, 90, 2, 1, 16, 16)
    for sizes in ({"capacity": 90}, {"capacity": 60, "window": 30}):
        for window in (0, (4, None), (50, 0), (None, 3)):
            cache = KVCache(1, num_kv_heads=1, head_dim=16, **sizes)
            got = decode(cache, q, k, v, [7] * 12 + [6], local_window_size=window)
            left, right = window if isinstance(window, tuple) else (window, window)
            inner = sizes.get("window", 91) - 1
            left = inner if left is None else min(left, inner)
            check_attention(got, q, k, v, is_causal=True, local_window_size=(left, right))


def test_without_causal_all_positions_are_seen():
    q, k, v = qkv(2, 5, 2, 2, 16, 16)
    cache = KVCache(2, 9, 2, 16)
    cache.append(k[:, :3], v[:, :3], seq_lengths=[3, 1])
    got = cache.attend(q, is_causal=False, return_lse=True)  # more queries than keys
    check_attention(got, q, k[:, :3], v[:, :3], key_value_seq_lengths=np.array([3, 1]))


def test_sequences_of_their_own_lengths():
    B, N, K, H = 4, 4, 2, 16
    cache = KVCache(B, 700, K, H)
    poison(cache)
    rng = np.random.default_rng(0)
    pasts = [[np.zeros((0, K, H), np.float32)] * 2 for _ in range(B)]
    for step, T in enumerate((300, 1, 9, 1, 350, 1)):
        q, k, v = qkv(B, T, N, K, H, H, seed=10 * step)
        counts = rng.integers(0, T + 1, B)
        k[np.arange(T) >= counts[:, None]] = NAN
        cache.append(k, v, counts)
        got, lse = cache.attend(q, query_seq_lengths=counts, return_lse=True)
        for b, n in enumerate(counts):
            pasts[b] = [
                np.concatenate([p, x[b, :n]]) for p, x in zip(pasts[b], (k, v), strict=True)
            ]
            keys, values = (p[None] for p in pasts[b])
            assert not got[b, n:].any()
            assert (lse[b, n:] == -np.inf).all()
            offset = keys.shape[1] - n
            check_attention(
                (got[b : b + 1, :n], lse[b : b + 1, :n]), q[b : b + 1, :n], keys, values,
                is_causal=True, query_offset=offset,
            )  # fmt: skip
        assert np.array_equal(cache.lengths, [len(p[0]) for p in pasts])


def test_a_shared_cache_is_attended_to_without_appending():
    q, k, v = qkv(1, 6, 4, 2, 8, 8)
    cache = KVCache(1, 8, 2, 8)
    cache.append(k, v)
    expected = dot_product_attention(q, k, v, is_causal=True)
    for _ in range(2):
        assert same_bits(cache.attend(q), expected)
    assert np.array_equal(cache.lengths, [6])


def test_options_are_those_of_attention():
    q, k, v = qkv(2, 5, 4, 2, 8, 8)
    cache = KVCache(2, 8, 2, 8)
    cache.append(k, v)
    slopes, sinks = random(7, 4), random(8, 4)
    for option in (
        {"softcap": 2.0, "local_window_size": (1, 0)},
        {"alibi_slopes": slopes},
        {"sinks": sinks, "alibi_slopes": np.stack([slopes, -slopes])},
    ):
        last = q[:, 3:]  # rows before the last chunk's are not the first positions
        got = cache.attend(last, return_lse=True, **option)
        check_attention(got, last, k, v, is_causal=True, query_offset=3, **option)
    out = np.empty_like(q)
    assert cache.attend(q, scale=0.3, out=out, num_threads=2) is out
    assert same_bits(out, dot_product_attention(q, k, v, scale=0.3, is_causal=True))
    y, lse = cache.attend(q, out=out, return_lse=True)
    expected = dot_product_attention(q, k, v, is_causal=True, return_lse=True)
    assert y is out
    assert same_bits(y, expected[0])
    assert same_bits(lse, expected[1])


@pytest.mark.parametrize("dtype", HALVES)
def test_halves_in_and_out(dtype):
    q, k, v = (a.astype(dtype) for a in qkv(1, 40, 4, 2, 16, 16))
    cache = KVCache(1, 64, 2, 16, dtype=dtype)
    got = decode(cache, q, k, v, cut(40, 40, 0))
    check_attention(got, q, k, v, is_causal=True)
    assert same_bits(cache.keys[:, :40].copy(), k)


def test_readers_at_once():
    q, k, v = qkv(1, 300, 4, 2, 16, 16)
    cache = KVCache(1, 300, 2, 16)
    cache.append(k, v)
    expected = cache.attend(q)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for y in pool.map(lambda _: cache.attend(q), range(16)):
            assert same_bits(y, expected)


@pytest.mark.parametrize("change", [lambda a: a[..., ::-1], lambda a: a[:, ::-1], lambda a: a[:1]])
def test_what_is_appended_may_have_any_strides(change):
    for dtype in (np.float32, *HALVES):
        wide = random(0, 2, 6, 2, 8)
        k = np.broadcast_to(change(wide), wide.shape)
        cache = KVCache(2, 6, 2, 8, dtype=dtype)
        cache.append(k, k)
        assert same_bits(cache.keys.copy(), k.astype(dtype))
        again = KVCache(2, 6, 2, 8, dtype=dtype)
        again.append(cache.keys, cache.values)
        assert same_bits(again.values.copy(), cache.values.copy())


# ------------------------------------------------------------------ int8


def of_all_sizes(B, T, K, H, seed=0):
    """Rows from zeros and subnormal numbers up to the largest, ordinary ones most of all."""
    rows = random(seed, B, T, K, H)
    rows = np.clip(rows / np.abs(rows).max(axis=-1, keepdims=True), -1, 1)
    sizes = np.resize(
        [0, 1e-45, 1e-40, 1e-38, 1.5e-36, 1e-30, 0.1, 1, 127, 1e30, 3e38, np.finfo("f4").max],
        (B, T, K, 1),
    ).astype(np.float32)
    return rows * sizes


@pytest.mark.parametrize("H", [1, 3, 16, 37, 128])
@pytest.mark.parametrize("dtype", [np.float32, *HALVES])
def test_rows_of_int8_are_within_half_a_scale(H, dtype):
    with np.errstate(all="ignore"):
        k = of_all_sizes(2, 48, 2, H).astype(dtype)
    k = np.where(np.isfinite(k), k, dtype(1))
    cache = KVCache(2, 50, 2, H, dtype="int8")
    poison(cache)
    cache.append(k, -k)
    exact, size = k.astype(np.float64), np.abs(k).max(axis=-1).astype(np.float64)
    scale = cache.key_scales[:, :48].astype(np.float64)
    values = cache.keys[:, :48].astype(np.float64)
    assert cache.keys.dtype == np.int8
    assert cache.key_scales.dtype == np.float32
    assert cache.key_scales.shape == (2, 50, 2)
    half = np.where(size == 0, 0, scale / 2)[..., None]
    assert (np.abs(exact - values * scale[..., None]) <= half * (1 + 2.0**-16)).all()
    assert ((scale == 0) == (size == 0)).all()
    # No larger than it must be, and as float32 neither subnormal nor infinite with 127.
    assert (scale <= np.maximum(size / 127 * (1 + 2.0**-23), 2.0**-126)).all()
    assert (scale[size > 0] >= 2.0**-126).all()
    assert np.isfinite(contents(cache)[0][:, :48]).all()
    expected = quantized(k.astype(np.float32))
    assert same_bits(cache.keys[:, :48].copy(), expected[0])
    assert same_bits(cache.key_scales[:, :48].copy(), expected[1])
    assert same_bits(cache.value_scales[:, :48].copy(), expected[1])
    assert np.array_equal(cache.values[:, :48], -expected[0])


@pytest.mark.parametrize("H", [5, 16, 33])
def test_what_int8_cannot_hold_is_nan_with_its_whole_row(H):
    k, v = random(0, 1, 9, 2, H), random(1, 1, 9, 2, H)
    k[0, 2, 0, 0], k[0, 5, 1, -1], v[0, 7, 1, H // 2] = NAN, np.inf, -np.inf
    cache = KVCache(1, 9, 2, H, dtype="int8")
    cache.append(k, v)
    broken = np.zeros((2, 1, 9, 2), bool)
    broken[0, 0, 2, 0] = broken[0, 0, 5, 1] = broken[1, 0, 7, 1] = True
    assert np.array_equal(np.isnan([cache.key_scales, cache.value_scales]), broken)
    assert np.array_equal(np.isnan(contents(cache)), np.repeat(broken[..., None], H, axis=-1))


@pytest.mark.parametrize("T", [1, 3, 40])
@pytest.mark.parametrize("H, Hv", WIDTHS.values(), ids=WIDTHS)
def test_nan_of_int8_reaches_just_the_rows_that_see_it(H, Hv, T):
    S = 75
    q, k, v = qkv(1, S, 4, 2, H, Hv)
    clean = KVCache(1, S, 2, H, Hv, "int8")
    clean.append(k, v)
    expected = clean.attend(q[:, -T:])
    for broken, head, position in ((k, 0, S - 2), (v, 1, S - 1), (v, 0, 40)):
        one = broken.copy()
        one[0, position, head, 0] = NAN
        cache = KVCache(1, S, 2, H, Hv, "int8")
        cache.append(*((one, v) if broken is k else (k, one)))
        got = cache.attend(q[:, -T:])
        sees = np.arange(S - T, S) >= position
        heads = slice(2 * head, 2 * head + 2)
        assert np.isnan(got[0, sees, heads]).all()
        got[0, sees, heads] = expected[0, sees, heads]
        assert same_bits(got, expected)


@pytest.mark.parametrize("T", [1, 2, 8, 17, 40])
@pytest.mark.parametrize("H, Hv", [(128, 64), (32, 48), (1, 1), (15, 17), (31, 33)])
def test_attention_over_int8_is_that_over_the_products(T, H, Hv):
    """Every option, on both paths; sequences of their own lengths."""
    S, lengths = 300, np.array([300, 261])
    q, k, v = qkv(2, T, 4, 2, H, Hv)[0], *qkv(2, S, 4, 2, H, Hv, seed=5)[1:]
    cache = KVCache(2, S, 2, H, Hv, "int8")
    poison(cache)
    cache.append(k, v, lengths)
    k, v = (stored(a, np.int8) for a in (k, v))
    slopes, sinks = np.abs(random(7, 4)), random(8, 4)
    for options in (
        {"is_causal": True},
        {"is_causal": False},
        {"local_window_size": (40, 0)},
        {"softcap": 2.0, "scale": 0.3},
        {"alibi_slopes": slopes},
        {"sinks": sinks, "local_window_size": (3, 7), "is_causal": False},
    ):
        got = cache.attend(q, return_lse=True, **options)
        check_attention(
            got, q, k, v, query_offset=lengths - T, key_value_seq_lengths=lengths,
            **({"is_causal": True} | options),
        )  # fmt: skip


@pytest.mark.parametrize("T", [1, 3, 16, 17, 40])
@pytest.mark.parametrize("H, Hv", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("of_keys", [True, False], ids=["of keys", "of rows"])
def test_masks_and_biases_over_int8(T, H, Hv, of_keys):
    """As a block with a cache gives them; what they hide may be no number."""
    B, N, K, S = 2, 4, 2, 300
    q, k, v = qkv(B, T, N, K, H, Hv)[0], *qkv(B, S, N, K, H, Hv, seed=5)[1:]
    rng = np.random.default_rng(T)
    shape = (B, 1, 1, S) if of_keys else (B, N, T, S)
    mask, bias = rng.random(shape) < 0.8, rng.standard_normal(shape).astype(np.float32)
    bias[rng.random(shape) < 0.1] = -np.inf
    mask[..., 17] = mask[..., 299] = False
    bias[..., 140] = -np.inf
    mask, bias = (np.broadcast_to(a, (B, N, T, S)) for a in (mask, bias))
    cache = KVCache(B, S, K, H, Hv, "int8")
    cache.append(k, v)
    cache._key_scales[:, 17] = cache._value_scales[:, [140, 299]] = NAN
    k, v = (stored(a, np.int8) for a in (k, v))
    given = AttentionArguments(
        q,
        cache._keys,
        cache._values,
        (B, T, N, H, S, K, Hv),
        True,
        Scores(H**-0.5, bias=bias),
        Visibility(False, None, None, None, None, mask),
        None,
        None,
        cache._key_scales,
        cache._value_scales,
    )
    got = attend(given, True, 1)
    check_attention(got, q, k, v, mask=mask, bias=bias)


@pytest.mark.parametrize("window", [None, 100])
def test_bits_of_int8_do_not_depend_on_chunks(window):
    _, k, v = qkv(2, 700, 8, 2, 64, 64)
    q = qkv(2, 3, 8, 2, 64, 64, seed=5)[0]
    results = []
    for chunk in (1, 7, 50):
        cache = KVCache(2, 700, 2, 64, dtype="int8", window=window)
        for t in range(0, 700, chunk):
            cache.append(k[:, t : t + chunk], v[:, t : t + chunk])
        results.append(cache.attend(q))
    assert all(same_bits(y, results[0]) for y in results)


def test_int8_takes_a_quarter_of_the_memory():
    sizes = {"batch": 1, "capacity": 512, "num_kv_heads": 2, "head_dim": 128}
    whole, kept = (KVCache(**sizes, dtype=dtype) for dtype in ("float32", np.int8))
    assert whole.key_scales is None
    assert whole.value_scales is None
    assert not kept.key_scales.flags.writeable
    assert kept.nbytes == 512 * 2 * 2 * (128 + 4)
    assert whole.nbytes == 512 * 2 * 2 * 128 * 4
    q = ones(1, 1, 2, 128)
    kept.append(ones(1, 1, 2, 128), ones(1, 1, 2, 128))
    words = "float64", "float32 or float16 or bfloat16"
    refused(kept, TypeError, lambda: kept.attend(q.astype(np.float64)), "q", *words)
    refused(kept, TypeError, lambda: kept.append(kept.keys, q[:, :, :2]), "k", "int8")
    for dtype in HALVES:
        y = kept.attend(q.astype(dtype))
        assert y.dtype == dtype
        assert (y.astype(np.float32) == 1).all()


# ------------------------------------------------------------------ changes


def test_truncate_and_go_on():
    q, k, v = qkv(2, 20, 2, 2, 8, 8)
    cache = KVCache(2, 16, 2, 8)
    cache.append(k[:, :12], v[:, :12])
    cache.truncate([5, 0])
    assert np.array_equal(cache.lengths, [5, 0])
    cache.append(k[:, 5:9], v[:, 5:9])
    got = cache.attend(q[:, 5:9])
    check_attention(got[:1], q[:1, 5:9], k[:1, :9], v[:1, :9], is_causal=True, query_offset=5)
    check_attention(got[1:], q[1:, 5:9], k[1:, 5:9], v[1:, 5:9], is_causal=True)
    cache.truncate(2)
    assert np.array_equal(cache.lengths, [2, 2])
    cache.reset()
    assert np.array_equal(cache.lengths, [0, 0])


@pytest.mark.parametrize("dtype", STORED)
def test_every_order_of_four_sequences(dtype):
    B, L = 4, 9
    _, k, v = qkv(B, L, 1, 1, 3, 2, dtype)
    for order in np.ndindex(B, B, B, B):
        cache = KVCache(B, L + 1, 1, 3, 2, dtype)
        poison(cache)
        cache.append(k, v, [9, 0, 4, 7])
        before = contents(cache)
        cache.reorder(order)
        assert np.array_equal(cache.lengths, np.array([9, 0, 4, 7])[list(order)])
        for b, a in enumerate(order):
            for now, then in zip(contents(cache), before, strict=True):
                used = cache.lengths[b]
                assert same_bits(now[b, :used].copy(), then[a, :used].copy())


def test_reorder_copies_what_is_in_use():
    cache = KVCache(2, 100, 1, 8)
    poison(cache)
    cache.append(*(np.ones((2, 3, 1, 8), np.float32),) * 2)
    cache._keys[0, 3:] = 7
    cache.reorder([1, 0])
    assert (cache.keys[0, 3:] == 7).all()
    assert np.isnan(cache.keys[1, 3:]).all()


# ------------------------------------------------------------------ what is refused


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


@pytest.mark.parametrize("window", [None, 3])
def test_what_does_not_fit_changes_nothing(window):
    cache = KVCache(2, 8, 2, 4, 5, window=window)
    poison(cache)
    k, v = ones(2, 4, 2, 4), ones(2, 4, 2, 5)
    cache.append(k, v, [4, 1])
    append = cache.append
    more = ones(2, 9, 2, 4), ones(2, 9, 2, 5)
    refused(cache, ValueError, lambda: append(*more, [0, 9]), "sequence 1", "9", "8")
    if window is None:
        refused(cache, ValueError, lambda: append(*more, [5, 5]), "sequence 0", "5", "4", "8")
    else:
        append(*(a[:, :6] for a in more), [6, 6])  # capacity - window + 1
        refused(cache, ValueError, lambda: append(*more, [0, 7]), "sequence 1", "7", "window of 3")
    for call, error, words in (
        (lambda: append(k[:1], v), ValueError, ["k", "(2, T, 2, 4)", "(1, 4, 2, 4)"]),
        (lambda: append(k[:, :, :1], v), ValueError, ["k", "(2, 4, 1, 4)"]),
        (lambda: append(k[..., :3], v), ValueError, ["k", "(2, 4, 2, 3)"]),
        (lambda: append(k[0], v), ValueError, ["k", "(4, 2, 4)"]),
        (lambda: append(k, v[:, :3]), ValueError, ["v", "(2, 4, 2, 5)", "(2, 3, 2, 5)"]),
        (lambda: append(k, k), ValueError, ["v", "(2, 4, 2, 5)", "(2, 4, 2, 4)"]),
        (lambda: append(k.astype(np.float64), v), TypeError, ["k", "float64", "float32"]),
        (lambda: append(k, v.astype(np.float16)), TypeError, ["v", "float16", "float32"]),
        (lambda: append(k, v, [5, 0]), ValueError, ["seq_lengths", "5"]),
        (lambda: append(k, v, [-1, 0]), ValueError, ["seq_lengths", "-1"]),
        (lambda: append(k, v, [1]), ValueError, ["seq_lengths", "(1,)"]),
        (lambda: append(k, v, [0, 1.0]), TypeError, ["seq_lengths", "float64"]),
        (lambda: append(k, v, num_threads=0), ValueError, ["num_threads"]),
        (lambda: cache.truncate([99, 0]), ValueError, ["lengths", "99", "sequence 0"]),
        (lambda: cache.truncate(-1), ValueError, ["lengths", "-1"]),
        (lambda: cache.truncate([1]), ValueError, ["lengths", "(1,)"]),
        (lambda: cache.truncate(1.5), TypeError, ["lengths", "float64"]),
        (lambda: cache.reorder([0, 2]), ValueError, ["index", "2"]),
        (lambda: cache.reorder([-1, 0]), ValueError, ["index", "-1"]),
        (lambda: cache.reorder(0), ValueError, ["index", "()"]),
        (lambda: cache.reorder([True, False]), TypeError, ["index", "bool"]),
    ):
        refused(cache, error, call, *words)


def test_queries_that_do_not_fit():
    cache = KVCache(2, 8, 2, 4, 5)
    cache.append(ones(2, 4, 2, 4), ones(2, 4, 2, 5), [4, 2])
    q = ones(2, 3, 4, 4)
    attend = cache.attend
    for call, error, words in (
        (lambda: attend(q), ValueError, ["q", "3 queries", "sequence 1", "2 positions"]),
        (lambda: attend(q[0]), ValueError, ["q", "(3, 4, 4)"]),
        (lambda: attend(q[:1]), ValueError, ["q", "(1, 3, 4, 4)"]),
        (lambda: attend(q[..., :3]), ValueError, ["q", "(2, 3, 4, 3)"]),
        (lambda: attend(q[:, :, :3]), ValueError, ["q", "N = 3", "K = 2"]),
        (lambda: attend(q.astype(np.float64)), TypeError, ["q", "float64", "float32"]),
        (
            lambda: attend(q[:, :2], query_seq_lengths=[3, 0]),
            ValueError,
            ["query_seq_lengths", "3"],
        ),
        (lambda: attend(q[:, :2], local_window_size=-1), ValueError, ["local_window_size"]),
        (lambda: attend(q[:, :2], is_causal=1), TypeError, ["is_causal"]),
        (lambda: attend(q[:, :2], scale="1"), TypeError, ["scale"]),
        (lambda: attend(q[:, :2], out=ones(2, 2, 4, 4)), ValueError, ["out", "(2, 2, 4, 5)"]),
        (lambda: attend(q[:, :2], out=cache._values[:, :2]), ValueError, ["out"]),
    ):
        refused(cache, error, call, *words)
    assert attend(q, query_seq_lengths=[3, 2]).shape == (2, 3, 4, 5)


def test_a_ring_says_what_it_has_overwritten():
    cache = KVCache(1, 10, 1, 4, window=4)
    for _ in range(5):
        cache.append(ones(1, 5, 1, 4), ones(1, 5, 1, 4))  # 25: those from 15 on are left
    refused(cache, ValueError, lambda: cache.truncate(17), "17", "15", "4")
    refused(cache, ValueError, lambda: cache.attend(ones(1, 8, 1, 4)), "8 queries", "15")
    cache.attend(ones(1, 7, 1, 4))
    cache.truncate(18)
    cache.append(ones(1, 7, 1, 4), ones(1, 7, 1, 4))
    refused(cache, ValueError, lambda: cache.append(ones(1, 8, 1, 4), ones(1, 8, 1, 4)), "8")
    cache.truncate(0)
    cache.append(ones(1, 10, 1, 4), ones(1, 10, 1, 4))


@pytest.mark.parametrize(
    "given, error, words",
    [
        ({"batch": 0}, ValueError, ["batch", "0"]),
        ({"capacity": -1}, ValueError, ["capacity", "-1"]),
        ({"num_kv_heads": 1.0}, TypeError, ["num_kv_heads", "1.0"]),
        ({"head_dim": True}, TypeError, ["head_dim"]),
        ({"v_head_dim": 0}, ValueError, ["v_head_dim"]),
        ({"window": 0}, ValueError, ["window"]),
        ({"window": 9}, ValueError, ["capacity", "window = 9", "8"]),
        ({"dtype": np.int32}, TypeError, ["dtype", "or float64", "int32"]),
        ({"dtype": "bf16"}, TypeError, ["dtype", "bfloat16", "bf16"]),
        ({"capacity": 1 << 50}, MemoryError, []),
        ({"head_dim": 10**400}, ValueError, ["head_dim", "2**53"]),
        ({"capacity": 1 << 53, "head_dim": 1 << 53}, MemoryError, ["for a cache"]),
    ],
)
def test_sizes_that_are_refused(given, error, words):
    sizes = {"batch": 2, "capacity": 8, "num_kv_heads": 2, "head_dim": 4}
    with pytest.raises(error) as caught:
        KVCache(**(sizes | given))
    for word in words:
        assert word in str(caught.value)


# ------------------------------------------------------------------ memory


@pytest.mark.parametrize("dtype", STORED)
def test_what_lies_in_the_cache_itself_may_be_appended(dtype):
    """It is read before anything is written, whichever slots it comes from and goes to."""
    if dtype == np.int8:
        cache = KVCache(1, 32, 32, 1, dtype=dtype)
        scales = cache.key_scales.swapaxes(1, 2)[..., None]  # float32 [1, 32, 32, 1]
        cache._key_scales[...] = random(0, 1, 32, 32)
        before = scales.copy()
        cache.append(scales, scales)
        with np.errstate(all="ignore"):
            expected = quantized(before)
        assert np.array_equal(cache.keys, expected[0])
        assert np.array_equal(cache.key_scales, expected[1])
        return
    B, T, K, H = 2, 40, 2, 8
    _, k, v = qkv(B, T, 2, K, H, H, dtype=dtype)
    for part in (slice(None), slice(None, None, -1)):
        cache = KVCache(B, T, K, H, dtype=dtype)
        cache.append(k[:, :20], v[:, :20])
        cache.truncate(3)
        keys, values = cache.keys[:, :20].copy(), cache.values[:, :20].copy()
        cache.append(cache.values[:, :20][:, part], cache.keys[:, :20][:, part])
        for kept, own, other in ((cache.keys, keys, values), (cache.values, values, keys)):
            expected = np.concatenate([own[:, :3], other[:, part]], axis=1)
            assert same_bits(np.ascontiguousarray(kept[:, :23]), expected)


def test_rows_start_on_cache_lines_of_memory_that_outlives_the_cache():
    for dtype in STORED:
        cache = KVCache(3, 70, 3, 5, 7, dtype)
        keys, values = cache.keys, cache.values
        for array in (keys, values):
            assert array.ctypes.data % 64 == 0
            assert array.strides[0] % 64 == 0
            assert array.strides[1] % 64 == 0
            assert not array.flags.writeable
        assert not np.shares_memory(keys, values)
        assert cache.nbytes >= keys.nbytes + values.nbytes
        one = 127 if dtype == np.int8 else 1
        cache.append(*(np.full((3, 70, 3, width), one, arithmetic(dtype)) for width in (5, 7)))
        del cache
        gc.collect()
        assert (keys.astype(np.float64) == one).all()
        assert (values.astype(np.float64) == one).all()


def test_lengths_are_a_copy():
    cache = KVCache(2, 4, 1, 4)
    cache.lengths[:] = 3
    assert np.array_equal(cache.lengths, [0, 0])


def test_repr():
    assert repr(KVCache(1, 8, 2, 4)) == "KVCache(B=1, capacity=8, K=2, H=4, float32)"
    ring = KVCache(1, 8, 2, 4, 6, "float16", 3)
    assert repr(ring) == "KVCache(B=1, capacity=8, K=2, H=4, Hv=6, window=3, float16)"
    assert repr(KVCache(1, 8, 2, 4, dtype="int8")) == "KVCache(B=1, capacity=8, K=2, H=4, int8)"


# ------------------------------------------------------------------ any sequence of calls


class CacheMachine(RuleBasedStateMachine):
    """A cache beside lists of positions, one list a sequence."""

    N, K, H, HV = 2, 1, 16, 3

    @initialize(
        B=st.integers(1, 3),
        sizes=st.sampled_from([(40, None), (300, None), (8, 3), (40, 16), (300, 40)]),
        dtype=st.sampled_from([np.float32, *HALVES, np.int8]),
    )
    def start(self, B, sizes, dtype):
        self.capacity, self.window = sizes
        self.cache = KVCache(B, self.capacity, self.K, self.H, self.HV, dtype, self.window)
        poison(self.cache)
        self.model = [[] for _ in range(B)]
        self.written = [0] * B  # the most positions that a ring had since it was empty
        self.seed = 0

    def fresh(self, T):
        self.seed += 10
        return qkv(len(self.model), T, self.N, self.K, self.H, self.HV, seed=self.seed)

    def oldest_needed(self, position):
        return max(0, position + 1 - (self.window or self.capacity))

    @rule(T=st.sampled_from([0, 1, 1, 2, 5, 30, 200]), data=st.data())
    def append(self, T, data):
        _, k, v = self.fresh(T)
        counts = data.draw(st.lists(st.integers(0, T), min_size=len(k), max_size=len(k)))
        written = [
            max(w, len(m) + n) for w, m, n in zip(self.written, self.model, counts, strict=True)
        ]
        fits = all(
            n == 0
            or (
                self.oldest_needed(len(m)) >= w - self.capacity
                if self.window
                else len(m) + n <= self.capacity
            )
            for m, n, w in zip(self.model, counts, written, strict=True)
        )
        if not fits:
            with pytest.raises(ValueError, match="does not fit"):
                self.cache.append(k, v, np.array(counts))
            return
        self.cache.append(k, v, np.array(counts))
        self.written = written
        for b, n in enumerate(counts):
            self.model[b] += [
                (stored(k[b, t], self.cache.dtype), stored(v[b, t], self.cache.dtype))
                for t in range(n)
            ]

    @rule(T=st.integers(0, 40))
    def attend(self, T):
        counts = []
        for m, w in zip(self.model, self.written, strict=True):
            n = min(T, len(m))
            while self.window and n and self.oldest_needed(len(m) - n) < w - self.capacity:
                n -= 1
            counts.append(n)
        q = self.fresh(T)[0]
        got = self.cache.attend(q, query_seq_lengths=counts, return_lse=True)
        for b, (m, n) in enumerate(zip(self.model, counts, strict=True)):
            if n == 0:
                assert not got[0][b].any()
                continue
            k, v = (np.array([row[i] for row in m])[None] for i in (0, 1))
            window = None if self.window is None else (self.window - 1, 0)
            check_attention(
                tuple(a[b : b + 1, :n] for a in got), q[b : b + 1, :n], k, v, is_causal=True,
                query_offset=len(m) - n, local_window_size=window,
            )  # fmt: skip

    @rule(data=st.data())
    def truncate(self, data):
        left = [data.draw(st.integers(0, len(m))) for m in self.model]
        kept = all(
            n in (0, len(m)) or self.window is None or self.oldest_needed(n) >= w - self.capacity
            for n, m, w in zip(left, self.model, self.written, strict=True)
        )
        if not kept:
            with pytest.raises(ValueError, match="are left"):
                self.cache.truncate(left)
            return
        self.cache.truncate(np.array(left))
        for b, n in enumerate(left):
            del self.model[b][n:]
            self.written[b] = self.written[b] if n else 0

    @rule(data=st.data())
    def reorder(self, data):
        B = len(self.model)
        index = data.draw(st.lists(st.integers(0, B - 1), min_size=B, max_size=B))
        self.cache.reorder(np.array(index))
        self.model = [list(self.model[a]) for a in index]
        self.written = [self.written[a] for a in index]

    @precondition(lambda self: any(self.model))
    @rule()
    def reset(self):
        self.cache.reset()
        self.model = [[] for _ in self.model]
        self.written = [0] * len(self.model)

    @invariant()
    def same(self):
        if not hasattr(self, "cache"):
            return
        keys, values = contents(self.cache)
        assert list(self.cache.lengths) == [len(m) for m in self.model]
        for b, m in enumerate(self.model):
            oldest = self.oldest_needed(len(m)) if self.window else 0
            for j in range(oldest, len(m)):
                slot = j % keys.shape[1]
                assert np.array_equal(keys[b, slot].astype(np.float32), m[j][0])
                assert np.array_equal(values[b, slot].astype(np.float32), m[j][1])


def test_any_sequence_of_calls():
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        CacheMachine, settings=settings(max_examples=25, stateful_step_count=20, deadline=None)
    )


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("stored", [np.float32, np.float64, *HALVES, "int8"])
@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))]
)
def test_a_copy_is_a_cache_of_its_own(copied, stored, window):
    """Also in how its memory is laid out, which kernels rely on."""
    dtype = np.float64 if stored == np.float64 else np.float32
    q, k, v = (x.astype(dtype) for x in qkv(2, 70, 4, 2, 24, 24))
    cache = KVCache(2, 90, 2, 24, dtype=stored, window=window)
    cache.append(k[:, :60], v[:, :60], seq_lengths=[60, 50])
    other = copied(cache)
    assert all(
        a.strides == b.strides for a, b in zip(cache._arrays(), other._arrays(), strict=True)
    )
    assert not any(
        np.shares_memory(a, b) for a, b in zip(cache._arrays(), other._arrays(), strict=True)
    )
    expected = cache.attend(q[:, :5])
    for each in (cache, other):
        assert same_bits(each.attend(q[:, :5]), expected)
        each.append(k[:, 60:], v[:, 60:])
    assert same_bits(other.attend(q[:, :9]), cache.attend(q[:, :9]))
    assert (other.lengths == [70, 60]).all()


@pytest.mark.any_isa
def test_sizes_do_not_change():
    cache = KVCache(1, 8, 1, 8)
    for name in ("batch", "capacity", "num_kv_heads", "head_dim", "v_head_dim", "dtype", "window"):
        with pytest.raises(AttributeError, match=f"KVCache.{name} does not change"):
            setattr(cache, name, getattr(cache, name))
        with pytest.raises(AttributeError, match=f"KVCache.{name} does not change"):
            delattr(cache, name)


def test_out_over_scales_is_refused():
    q, k, v = qkv(1, 8, 2, 2, 8, 8)
    cache = KVCache(1, 8, 2, 8, dtype="int8")
    cache.append(k, v)
    scales = cache._value_scales
    out = np.lib.stride_tricks.as_strided(scales, (1, 1, 2, 8), (0, 0, scales.strides[2], 4))
    with pytest.raises(ValueError, match="out overlaps the cache's value scales"):
        cache.attend(q[:, :1], out=out)


@pytest.mark.any_isa
@pytest.mark.parametrize(
    "dtype",
    ["\ud800", {"names": ["x"], "formats": ["f4"], "offsets": [-4]}],
    ids=["text", "offset"],
)
def test_a_dtype_that_cannot_be_is_named(dtype):
    with pytest.raises(TypeError, match="dtype must be int8, float16"):
        KVCache(1, 8, 1, 8, dtype=dtype)
