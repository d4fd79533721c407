"""A block with a cache: any chunks give what one call gives, and a fault changes nothing."""

import numpy as np
import pytest

from tests.oracle import HALVES, arithmetic, contents, poison, random, refused, same_bits
from tests.test_model_blocks import MODELS, B, D, T
from tileattn import (
    AttentionBlock,
    KVCache,
    LayerNorm,
    RMSNorm,
    Rope,
    RopeScaling,
    attention_block,
    block,
    reference,
)

NAN = np.nan
STORED = [np.float32, np.float64, *HALVES, np.int8]
ROUNDED = (*HALVES, np.int8)


def rounding(dtype):
    """The distance from 1 to the next number."""
    name = np.dtype(dtype).name
    known = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "int8": 2.0**-7}
    return known.get(name) or float(np.finfo(dtype).eps)


def close(got, expected, units=None, dtype=None):
    """To so many units in the last place of the largest number.

    By default to what two sums of D products in a row lose, to and from the heads, with as much for
    attention and norms: the errors of n additions grow like sqrt(n).
    """
    size = np.abs(expected).max(initial=0)
    units = 2 * np.sqrt(got.shape[-1]) if units is None else units
    atol = units * rounding(dtype or got.dtype) * size
    np.testing.assert_allclose(got, expected, rtol=0, atol=atol)


def cache_for(layer, capacity=T, batch=B, **options):
    """A cache whose memory, while not in use, holds what would show."""
    options = {"dtype": layer.dtype} | options
    cache = KVCache(
        batch, capacity, layer.num_kv_heads, layer.head_dim, layer.v_head_dim, **options
    )
    poison(cache)
    return cache


def decode(call, x, chunks, **options):
    """What calls for one chunk after the other give."""
    ends = np.cumsum(chunks)
    assert ends[-1] == x.shape[1]
    pieces = np.split(x, ends[:-1], axis=1)
    return np.concatenate([call(piece, **options) for piece in pieces], axis=1)


# ------------------------------------------------------------------ the models


@pytest.fixture
def rewire(monkeypatch):
    """Changes the options that a model of test_model_blocks calls its block with."""
    call = AttentionBlock.__call__

    def rewire(change):
        monkeypatch.setattr(
            AttentionBlock, "__call__", lambda layer, x, **o: call(layer, x, **change(layer, o))
        )

    return rewire


CHUNKS = {
    "one by one": [1] * T,
    "a prompt, then one by one": [T - 5] + [1] * 5,
    "chunks": [3, 9, 1, T - 13],
    "one call": [T],
}
CAUSAL = [
    "GPT-2",
    "Llama 3",
    "Qwen 3",
    "Gemma 2",
    "Gemma 3, window",
    "Gemma 3, global",
    "Mistral",
    "GPT-OSS",
]


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("name", CAUSAL)
def test_a_model_decodes(name, chunks, stored, rewire):
    dtype = arithmetic(stored)
    x, caches = random(50, B, T, D, dtype=dtype), []
    expected, model = MODELS[name](dtype, x.astype(np.float64))

    def add_cache(layer, options):
        if not caches:
            caches.extend(cache_for(layer, dtype=stored) for _ in range(2))
        return options | {"cache": caches[0]}

    rewire(add_cache)
    got = decode(model, x, chunks)
    assert got.dtype == dtype
    # Where it is rounded, half a unit of the values, and of keys, which scores multiply by some.
    close(got, expected, 2 if stored in ROUNDED else None, stored)
    # Keys do not depend on how many are projected at a time, so that halves round alike.
    caches.reverse()
    close(got, model(x))
    for one, other in zip(*map(contents, caches), strict=True):
        assert same_bits(one[:, :T].copy(), other[:, :T].copy())
    assert np.array_equal(caches[0].lengths, caches[1].lengths)


@pytest.mark.parametrize("name", ["BERT", "ViT", "Whisper's encoder"])
def test_an_encoder_sees_all_that_came_with_it(name, rewire):
    x = random(50, B, T, D)
    expected, model = MODELS[name](np.float32, x.astype(np.float64))
    lengths = np.array([T, T - 5] if name == "BERT" else [T, T])
    rewire(lambda layer, o: {"cache": cache_for(layer), "query_seq_lengths": lengths})
    seen = np.arange(T) < lengths[:, None]
    close(model(x)[seen], expected[seen])


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_a_model_keeps_the_context_of_cross_attention(chunks, rewire):
    x = random(50, B, T, D)
    expected, model = MODELS["Whisper's cross attention"](np.float32, x.astype(np.float64))
    whole, caches = model(x), []

    def project_once(layer, options):
        if not caches:
            caches.append(layer.context_cache(options["context"]))
        return options | {"context": caches[0]}

    rewire(project_once)
    got = decode(model, x, chunks)
    close(got, expected)
    if chunks == [T]:
        assert same_bits(got, whole)


# ------------------------------------------------------------------ of other sizes


class Made:
    """A block, and the same of the reference."""

    def __init__(self, sizes=(24, 24, 4, 2, 8, 8), dtype=np.float32, **options):
        D, Dc, N, K, H, Hv = sizes
        shapes = (D, N, H), (Dc, K, H), (Dc, K, Hv), (N, Hv, D)
        self.weights = [
            random(i, *shape, dtype=dtype) / dtype(np.sqrt(D)) for i, shape in enumerate(shapes)
        ]
        self.options = {"is_causal": True} | options
        self.block = AttentionBlock(*self.weights, **self.options)

    def reference(self, x, **options):
        return reference.attention_block(x, *self.weights, **self.options, **options)


def everything(dtype=np.float32, sizes=(24, 24, 4, 2, 8, 8), **options):
    """All that comes before attention."""
    _, _, N, K, H, Hv = sizes
    return Made(
        sizes,
        dtype,
        b_q=random(10, N, H, dtype=dtype),
        b_k=random(11, K, H, dtype=dtype),
        b_v=random(12, K, Hv, dtype=dtype),
        norm=RMSNorm(),
        norm_position="pre",
        rope=Rope(rotary_dim=6),
        q_norm=RMSNorm(),
        k_norm=LayerNorm(),
        **options,
    )


PLAIN = {"sizes": (24, 24, 4, 2, 8, 8)}
ODD = {"sizes": (33, 33, 3, 1, 11, 5)}
DEEP = {"sizes": (520, 520, 9, 3, 60, 60)}
KINDS = {"full": {}, "ring": {"capacity": 60, "window": 25}}


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("options", [
    {},
    ODD,
    DEEP,
    {"local_window_size": (7, None), "softcap": 3.0},
    {"is_causal": False},
    {"is_causal": False, "local_window_size": (9, 2)},
])  # fmt: skip
@pytest.mark.parametrize("made", [Made, everything])
def test_the_reference_agrees(made, options, kind, stored):
    """Two sequences of their own lengths; each step looks at what the steps before have left."""
    dtype = arithmetic(stored)
    made = made(dtype=dtype, **options)
    fast, slow = (cache_for(made.block, **({"capacity": 200} | kind), dtype=stored) for _ in "12")
    for step, n in enumerate([36, 1, 0, 1, 17, 2, 1, 30, 29]):
        x = random(60 + step, B, n, made.block.model_dim, dtype=dtype)
        counts = None if step % 3 else np.array([n, n // 2])
        got = made.block(x, cache=fast, query_seq_lengths=counts)
        expected = made.reference(x, cache=slow, query_seq_lengths=counts)
        assert np.array_equal(fast.lengths, slow.lengths)
        # What lies between two numbers of the cache's type may have become either.
        close(got, expected, 1 if stored in ROUNDED else None, stored)


@pytest.mark.parametrize("window", [1, 7, 64])
@pytest.mark.parametrize("stored", [np.float32, *ROUNDED])
def test_a_ring_is_a_window_for_ever(window, stored):
    made = everything(local_window_size=(window - 1, 0))
    total = 10 * window + 13
    x = random(50, B, total, 24)
    full = cache_for(made.block, total, dtype=stored)
    ring = cache_for(made.block, window + 5, dtype=stored, window=window)
    rng, t = np.random.default_rng(window), 0
    expected = made.block(x, cache=full)
    while t < total:
        n = min(total - t, int(rng.integers(1, 7)))
        close(made.block(x[:, t : t + n], cache=ring), expected[:, t : t + n])
        t += n
    assert np.array_equal(ring.lengths, full.lengths)


def test_a_ring_gives_what_append_and_attend_give():
    """A prompt of more than the window; the ring's window narrows that of a block."""
    made = Made(norm=None, residual=False, local_window_size=(30, None))
    w_q, w_k, w_v, w_o = (w.astype(np.float64) for w in made.weights)
    ring, other = (cache_for(made.block, 20, window=12) for _ in "12")
    for step, n in enumerate([20, 9, 9, 1, 9]):
        x = random(step, B, n, 24)
        q, k, v = (np.einsum("btd,dnh->btnh", x, w).astype(np.float32) for w in (w_q, w_k, w_v))
        other.append(k, v)
        y = other.attend(q, local_window_size=(30, None))
        close(made.block(x, cache=ring), np.einsum("btnh,nhd->btd", y, w_o))


@pytest.mark.parametrize("stored", [np.float32, *ROUNDED])
@pytest.mark.parametrize("window", [None, 40])
def test_rows_beyond_a_length_change_no_bit(stored, window):
    made = everything(sizes=(256, 256, 8, 2, 64, 64))
    capacity = 400 if window is None else 140
    x = random(50, 3, 400, 256)
    steps = [(0, 100, [100, 30, 77]), (100, 101, [1, 1, 0]), (101, 190, [5, 89, 89])]
    steps += [(190 + t, 191 + t, [1, 1, 1]) for t in range(4)]
    cache = cache_for(made.block, capacity, 3, dtype=stored, window=window)
    together = [made.block(x[:, a:b], cache=cache, query_seq_lengths=n) for a, b, n in steps]
    for i in range(3):
        alone = cache_for(made.block, capacity, 1, dtype=stored, window=window)
        for (a, _, counts), expected in zip(steps, together, strict=True):
            n = counts[i]
            got = made.block(x[i, a : a + n], cache=alone)
            assert same_bits(got, expected[i, :n])


@pytest.mark.parametrize("layout", [
    lambda a: a[:, ::-1],
    lambda a: np.asfortranarray(a),
    lambda a: np.repeat(a, 2, axis=2)[..., ::2],
    lambda a: np.broadcast_to(a[:1], a.shape),
])  # fmt: skip
def test_x_and_out_of_any_strides(layout):
    made = everything()
    x = layout(random(50, B, 9, 24))
    expected = made.block(np.ascontiguousarray(x), cache=cache_for(made.block))
    out = np.empty((B, 24, 9), np.float32).swapaxes(1, 2)
    assert made.block(x, cache=cache_for(made.block), out=out) is out
    assert same_bits(out.copy(), expected.copy())


@pytest.mark.parametrize("bias", [False, True])
def test_masks_and_biases_are_of_all_keys(bias):
    """A left-padded batch: the mask is as long as the past and the new positions together."""
    made = everything()
    x, padding = random(50, B, 12, 24), np.array([0, 4])
    sees = (np.arange(12) >= padding[:, None])[:, None, None]
    numbers = random(51, B, 4, 12, 12)

    def given(rows, S):
        some = {"mask": sees[..., :S]}
        return some | {"bias": numbers[:, :, rows, :S]} if bias else some

    expected = made.block(x, **given(slice(None), 12))
    cache, t = cache_for(made.block), 0
    for n in (7, 1, 4):
        got = made.block(x[:, t : t + n], cache=cache, **given(slice(t, t + n), t + n))
        close(got, expected[:, t : t + n])
        t += n


def test_layers_that_share_keys():
    """The second block's own W_K and W_V are not used: it reads what the first has added."""
    first, second = everything(), everything()
    x = random(50, B, 12, 24)
    expected = first.block(x)
    for kind in ({}, {"capacity": 20, "window": 12}):
        cache, t = cache_for(first.block, **({"capacity": T} | kind)), 0
        for n in (7, 1, 4):
            rows = x[:, t : t + n]
            first.block(rows, cache=cache)
            got = second.block(rows, context=cache, query_offset=cache.lengths - n)
            close(got, expected[:, t : t + n])
            close(got, second.reference(rows, context=cache, query_offset=cache.lengths - n))
            t += n


def test_positions_beyond_the_kept_tables(monkeypatch):
    made = everything()
    x = random(50, B, T, 24)
    expected = made.block(x)
    monkeypatch.setattr(block, "LONG_TABLE", 5)
    close(decode(made.block, x, [3, 9, 1, 1, T - 14], cache=cache_for(made.block)), expected)
    near, far = np.array([5, 256 * 3 << 40])
    caches = [cache_for(made.block, 20, window=10) for _ in "12"]
    for cache in caches:
        cache._keys[...] = cache._values[...] = 0
        cache._lengths = cache._longest = np.array([near, far])
    for n in (1, 5, 11):
        rows = x[:, :n]
        close(made.block(rows, cache=caches[0]), made.reference(rows, cache=caches[1]))


def test_a_block_in_one_call():
    made = everything()
    x = random(50, B, 9, 24)
    cache, other = cache_for(made.block), cache_for(made.block)
    got = attention_block(x, *made.weights, **made.options, cache=cache)
    assert same_bits(got, made.block(x, cache=other))
    context = made.block.context_cache(x)
    got = attention_block(x, *made.weights, **made.options, context=context)
    assert same_bits(got, made.block(x, context=x))
    output, parts = made.block.profile(x[:, :1], cache=cache)
    assert same_bits(output, made.block(x[:, :1], cache=other))
    assert len(parts) == 3


def test_without_a_batch_and_without_positions():
    made = everything()
    x = random(50, 1, 9, 24)
    cache = cache_for(made.block, batch=1)
    got = decode(lambda a: made.block(a[0], cache=cache)[None], x, [4, 1, 4])
    close(got, made.block(x))
    assert made.block(x[:, :0], cache=cache).shape == (1, 0, 24)
    assert np.array_equal(cache.lengths, [9])
    nothing = cache_for(made.block, batch=1)  # no key is seen: what is left is x
    got = made.block(x, cache=nothing, query_seq_lengths=[0])
    assert same_bits(got, x)
    assert np.array_equal(nothing.lengths, [0])


# ------------------------------------------------------------------ a projected context


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("Dc", [24, 17])
def test_a_context_is_projected_as_in_a_call(Dc, stored):
    dtype = arithmetic(stored)
    made = everything(dtype, (24, Dc, 4, 2, 8, 5), is_causal=False)
    audio, x = random(7, B, 33, Dc, dtype=dtype), random(8, B, 6, 24, dtype=dtype)
    audio[1, 20:] = NAN
    given = {"context": audio, "key_value_seq_lengths": np.array([33, 20])}
    expected = made.block(x, **given, query_offset=3)
    for threads in (1, 2):
        cache = made.block.context_cache(
            audio, key_value_seq_lengths=[33, 20], dtype=stored, num_threads=threads
        )
        assert cache.dtype == stored
        assert np.array_equal(cache.lengths, [33, 20])
        got = made.block(x, context=cache, query_offset=3)
        if stored in ROUNDED:
            close(got, expected, 1, stored)
        else:
            assert same_bits(got, expected)
        close(got, made.reference(x, context=cache, query_offset=3))
        assert np.array_equal(cache.lengths, [33, 20])


def test_many_rows_of_context():
    """Rows are split among threads, and their heads finished while hot."""
    made = everything(sizes=(64, 64, 4, 2, 16, 16), is_causal=False)
    audio, x = random(7, B, 700, 64), random(8, B, 6, 64)
    expected = made.block(x, context=audio, query_offset=0)
    for threads in (1, 2):
        cache = made.block.context_cache(audio, num_threads=threads)
        assert same_bits(made.block(x, context=cache, query_offset=0), expected)


def test_a_small_context():
    made = Made(is_causal=False)
    x = random(8, 1, 6, 24)
    single = made.block.context_cache(x[0, :1])
    assert (single.batch, single.capacity) == (1, 1)
    close(made.block(x, context=single), made.reference(x, context=x[:, :1]))
    empty = made.block.context_cache(x[:, :0])
    assert same_bits(made.block(x, context=empty), made.block(x, context=x[:, :0]))


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("given, error, words", [
    ({"T": 6}, ValueError, ["x has 6 positions", "sequence 0", "which has 5", "capacity of 10"]),
    ({"T": 9, "query_seq_lengths": [1, 9]}, ValueError, ["sequence 1", "9", "which has 2"]),
    ({"query_seq_lengths": [4, 0]}, ValueError, ["query_seq_lengths", "3"]),
    ({"query_offset": 5}, TypeError, ["query_offset", "cache"]),
    ({"key_value_seq_lengths": [5, 2]}, TypeError, ["key_value_seq_lengths", "cache"]),
    ({"context": np.ones((2, 3, 24), np.float32)}, TypeError, ["context", "cache"]),
    ({"mask": np.ones((3, 5), bool)}, ValueError, ["mask", "(3, 5)", "(2, 4, 3, 8)"]),
    ({"bias": np.ones((3, 9), np.float32)}, ValueError, ["bias", "(3, 9)", "(2, 4, 3, 8)"]),
    ({"B": 1}, ValueError, ["cache", "B = 2", "B = 1"]),
    ({"out": np.ones((2, 3, 23), np.float32)}, ValueError, ["out", "(2, 3, 23)"]),
    ({"num_threads": 0}, ValueError, ["num_threads"]),
])  # fmt: skip
def test_a_call_that_does_not_fit(given, error, words):
    made = everything()
    cache = cache_for(made.block, 10)
    made.block(random(0, B, 5, 24), cache=cache, query_seq_lengths=[5, 2])
    given = dict(given)
    x = random(1, given.pop("B", B), given.pop("T", 3), 24)
    for call in (made.block, made.reference):
        refused(cache, error, lambda: call(x, cache=cache, **given), *words)  # noqa: B023


@pytest.mark.parametrize("sizes, error, words", [
    ({"num_kv_heads": 4}, ValueError, ["(4, 8, 8)", "(2, 8, 8)"]),
    ({"head_dim": 9}, ValueError, ["(2, 9, 9)", "(2, 8, 8)"]),
    ({"v_head_dim": 7}, ValueError, ["(2, 8, 7)", "(2, 8, 8)"]),
    ({"batch": 3}, ValueError, ["B = 3", "B = 2"]),
    ({"dtype": "float64"}, TypeError, ["float64", "float32, float16, bfloat16 or int8"]),
])  # fmt: skip
def test_a_cache_that_does_not_fit(sizes, error, words):
    made = Made()
    x = random(0, B, 5, 24)
    cache = KVCache(**({"batch": B, "capacity": 9, "num_kv_heads": 2, "head_dim": 8} | sizes))
    refused(cache, error, lambda: made.block(x, cache=cache), "cache", *words)
    refused(cache, error, lambda: made.block(x, context=cache), "context", *words)
    wide = Made(dtype=np.float64)
    half = KVCache(B, 9, 2, 8, dtype="float16")
    refused(half, TypeError, lambda: wide.block(x.astype(float), cache=half), "cache", "float16")


def test_rings_refuse_what_they_have_not_kept():
    made = everything()
    cache = cache_for(made.block, 10, window=4)
    x = random(0, B, 12, 24)
    for t in range(4):
        made.block(x[:, t : t + 5], cache=cache)  # 20: those from 10 on are left
    calls = {
        "does not fit a capacity of 10, and a window of 4": {"x": x[:, :8], "cache": cache},
        "mask": {"x": x[:, :1], "cache": cache, "mask": np.ones(21, bool)},
        "bias": {"x": x[:, :1], "cache": cache, "bias": np.ones(21, np.float32)},
        "needs query_offset": {"x": x[:, :1], "context": cache},
        "query_offset is 12": {"x": x[:, :1], "context": cache, "query_offset": 12},
    }
    for words, given in calls.items():
        refused(cache, (TypeError, ValueError), lambda given=given: made.block(**given), words)
    made.block(x[:, :1], context=cache, query_offset=13)


class Failing(RopeScaling):
    """Somebody's own."""

    def __init__(self, result):
        self.result = result

    def frequencies(self, theta, rotary_dim):
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.mark.parametrize(
    "result, words", [(ValueError("no such"), "no such"), (np.ones(5), "(4,), not (5,)")]
)
def test_a_scaling_that_fails_changes_no_ring(result, words):
    plain = Made((16, 16, 4, 2, 8, 8))
    made = Made((16, 16, 4, 2, 8, 8), rope=Rope(scaling=Failing(result)))
    cache = cache_for(plain.block, 4, window=2)
    plain.block(random(0, B, 3, 16), cache=cache)
    plain.block(random(1, B, 1, 16), cache=cache)
    x = random(2, B, 2, 16)  # overwrites two positions
    for call in (made.block, made.reference):
        refused(cache, ValueError, lambda call=call: call(x, cache=cache), words)


def test_other_mistakes():
    made, cross = everything(), Made((24, 17, 4, 2, 8, 8), is_causal=False)
    cache, x = cache_for(made.block), random(0, B, 5, 24)
    audio = random(1, B, 5, 17)
    projected = cross.block.context_cache(audio)
    far = cache_for(made.block, 20, window=10)
    far._lengths = far._longest = np.array([0, (1 << 53) - 2])
    for error, call, words in (
        (TypeError, lambda: made.block(x, cache={}), ["cache", "KVCache", "dict"]),
        (TypeError, lambda: cross.block(x, cache=cache), ["cache", "context_cache"]),
        (ValueError, lambda: cross.block(x), ["context is missing"]),
        (TypeError, lambda: cross.block(x, context=projected, key_value_seq_lengths=[1, 1]),
         ["key_value_seq_lengths"]),
        (ValueError, lambda: made.block(x, context=cache), ["query_offset"]),
        (ValueError, lambda: made.block(x, context=cache, query_offset=-1), ["query_offset"]),
        (ValueError, lambda: made.block(x, cache=far), ["cache.lengths", "2**53"]),
        (ValueError, lambda: cross.block.context_cache(audio[..., 1:]), ["context", "(2, 5, 16)"]),
        (ValueError, lambda: cross.block.context_cache(audio[0, 0]), ["context", "(17,)"]),
        (ValueError, lambda: cross.block.context_cache(audio[:0]), ["context", "B = 0"]),
        (TypeError, lambda: cross.block.context_cache(audio.astype(float)), ["context", "float64"]),
        (TypeError, lambda: cross.block.context_cache(audio, dtype=float), ["dtype", "float64"]),
        (TypeError, lambda: cross.block.context_cache(audio, dtype=int), ["dtype", "int64"]),
        (ValueError, lambda: cross.block.context_cache(audio, key_value_seq_lengths=[6, 1]),
         ["key_value_seq_lengths", "6"]),
        (ValueError, lambda: cross.block.context_cache(audio, num_threads=0), ["num_threads"]),
    ):  # fmt: skip
        refused(cache, error, call, *words)


def test_an_x_that_lies_in_its_cache_is_read_before_it_is_written_to():
    made = Made((16, 16, 4, 2, 8, 8), is_causal=True)
    rows = random(0, 2, 6, 16)

    def x_in(cache):
        """The slots that its own positions come to, as if they were x."""
        cache._keys[:, :6] = rows.reshape(2, 6, 2, 8)
        return np.lib.stride_tricks.as_strided(
            cache.keys, (2, 6, 16), (*cache.keys.strides[:2], 4), writeable=False
        )

    expected = made.block(rows, cache=cache_for(made.block, 10))
    for call in (made.block, made.reference):
        cache = cache_for(made.block, 10)
        close(call(x_in(cache), cache=cache), expected)
    bias = random(1, 2, 1, 6, 6)
    expected = made.block(rows, cache=cache_for(made.block, 10), bias=bias)
    cache = cache_for(made.block, 10)
    within = np.lib.stride_tricks.as_strided(cache._keys, bias.shape, bias.strides)
    within[...] = bias
    close(made.block(rows, cache=cache, bias=within), expected)
