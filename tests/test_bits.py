"""Each public operation gives the same bits again: on any number of threads, with any company in
its batch, and wherever in memory its arrays lie."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

import tileattn
from tests.oracle import HALVES, random, same_bits
from tests.test_block import Sizes, norm_of, rms_norm_of
from tileattn import (
    AttentionBlock,
    KVCache,
    QuantizedMatrix,
    Rope,
    apply_rope,
    attention_block,
    attention_weights,
    dot_product_attention,
    merge_states,
    varlen_attention,
)

B = 3
THREADS = 1, 2, 3, 7
PAGE = 4096


class Operation(NamedTuple):
    """Arrays whose first axis is the batch, and a call that gives such arrays for them."""

    inputs: list[np.ndarray]
    call: Callable[..., tuple[np.ndarray, ...]]


def qkv(T, S, N, K, H, Hv=None, dtype=np.float32):
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, Hv or H)
    return [random(i, *shape).astype(dtype) for i, shape in enumerate(shapes)]


def attention(*sizes, dtype=np.float32, **options):
    def call(q, k, v, threads):
        return dot_product_attention(q, k, v, return_lse=True, num_threads=threads, **options)

    return Operation(qkv(*sizes, dtype=dtype), call)


def attention_with_options(T, S, N, K, H):
    def call(q, k, v, mask, bias, lengths, threads):
        return dot_product_attention(
            q,
            k,
            v,
            mask=mask,
            bias=bias,
            key_value_seq_lengths=lengths,
            query_offset=lengths - T,
            is_causal=True,
            local_window_size=(S // 2, None),
            softcap=20.0,
            alibi_slopes=np.linspace(0.1, 1, N, dtype=np.float32),
            sinks=np.ones(N, np.float32),
            return_lse=True,
            num_threads=threads,
        )

    mask = np.random.default_rng(0).random((B, 1, T, S)) < 0.8
    lengths = np.array([S, S - 3, S // 2 + T])[:B]
    return Operation([*qkv(T, S, N, K, H), mask, random(5, B, N, 1, S), lengths], call)


def packed_attention(T, S, N, K, H):
    """Sequences of T queries and S keys each, end to end."""

    def call(q, k, v, threads):
        count = len(q)
        flat = (a.reshape(-1, *a.shape[2:]) for a in (q, k, v))
        begins = np.arange(count + 1)
        options = {"is_causal": True, "query_offset": S - T, "return_lse": True}
        out, lse = varlen_attention(*flat, begins * T, begins * S, num_threads=threads, **options)
        return out.reshape(q.shape), lse.reshape(q.shape[:-1])

    return Operation(qkv(T, S, N, K, H), call)


def weights_of_keys(T, S, reduce, **options):
    def call(q, k, lse, threads):
        return (attention_weights(q, k, lse, reduce=reduce, num_threads=threads, **options),)

    q, k, v = qkv(T, S, 4, 2, 24)
    return Operation([q, k, dot_product_attention(q, k, v, return_lse=True)[1]], call)


def merging(*shape):
    parts = [random(i, B, *shape) for i in range(3)]
    lses = [random(i, B, *shape[:-1]) for i in range(3)]

    def call(*arrays, threads):
        return merge_states(*arrays, num_threads=threads)

    return Operation([a for pair in zip(parts, lses, strict=True) for a in pair], call)


def cached(T, chunk, stored=np.float32, dtype=np.float32, window=None):
    """Appended in chunks, the last T rows attended to, cut back, attended to again."""
    S, N, K, H = 700, 6, 2, 40

    def call(q, k, v, threads):
        cache = KVCache(len(q), S, K, H, dtype=stored, window=window)
        for begin in range(0, S, chunk):
            rows = slice(begin, begin + chunk)
            cache.append(k[:, rows], v[:, rows], num_threads=threads)
        first = cache.attend(q, num_threads=threads)
        cache.truncate(cache.lengths - 3)
        return (first, *cache.attend(q, return_lse=True, num_threads=threads))

    q, k, v = qkv(T, S, N, K, H, dtype=dtype)
    return Operation([q, k, v], call)


SIZES = Sizes(D=96, N=6, K=3, H=16)


def block_of(T, dtype=np.float32, **options):
    options = {**SIZES.biases(dtype), "norm": norm_of(96, dtype)[0], "is_causal": True, **options}
    return calls_of(AttentionBlock(*SIZES.weights(dtype), **options), T, dtype)


def block_of_quantized_matrices(T):
    w_q, w_k, w_v, w_o = SIZES.weights()
    rows = [w.reshape(96, -1).T for w in (w_q, w_k, w_v)] + [w_o.reshape(-1, 96).T]
    rows[1] = QuantizedMatrix.from_float(rows[1], bits=4, group_size=32)
    rows[2] = QuantizedMatrix.from_float(rows[2])
    return calls_of(AttentionBlock.from_linear(*rows, num_heads=6, num_kv_heads=3), T)


def block_packed_anew(T):
    def call(x, num_threads):
        return attention_block(x, *SIZES.weights(), is_causal=True, num_threads=num_threads)

    return calls_of(call, T)


def calls_of(function, T, dtype=np.float32, D=96):
    def call(x, threads):
        return (function(x, num_threads=threads),)

    return Operation([random(30, B, T, D, dtype=dtype)], call)


MODERN = {
    "norm": rms_norm_of(96)[0],
    "norm_position": "pre",
    "rope": Rope(),
    "q_norm": rms_norm_of(16)[0],
    "k_norm": rms_norm_of(16)[0],
    "local_window_size": (30, None),
}


def block_with_cache(stored=np.float32, window=None):
    """A prompt, a chunk and single tokens."""
    block = AttentionBlock(*SIZES.weights(), **SIZES.biases(), **MODERN, is_causal=True)

    def call(x, threads):
        cache = KVCache(len(x), 130, 3, 16, dtype=stored, window=window)
        parts = [x[:, :100], x[:, 100:109], *(x[:, t : t + 1] for t in range(109, 113))]
        out = [block(part, cache=cache, num_threads=threads) for part in parts]
        return (np.concatenate(out, axis=1),)

    return Operation([random(30, B, 113, 96)], call)


def block_with_context():
    sizes = Sizes(D=96, N=6, K=3, H=16, Dc=48)
    block = AttentionBlock(*sizes.weights(), **sizes.biases())

    def call(x, context, threads):
        cache = block.context_cache(context, num_threads=threads)
        return (
            block(x, context=context, num_threads=threads),
            block(x, context=cache, num_threads=threads),
        )

    return Operation([random(30, B, 20, 96), random(31, B, 300, 48)], call)


def rotation(**options):
    def call(x, positions, threads):
        return (apply_rope(x, positions, num_threads=threads, **options),)

    positions = np.random.default_rng(0).integers(0, 10**5, (B, 257))
    return Operation([random(0, B, 257, 8, 66), positions], call)


OPERATIONS = {
    "attention, many rows": lambda: attention(
        300, 400, 4, 2, 32, is_causal=True, query_offset=100
    ),
    "attention, chunked tiles": lambda: attention(20, 1500, 2, 1, 24, 40),
    "attention, few rows": lambda: attention(3, 3000, 2, 1, 40),
    "attention, one row": lambda: attention(1, 5000, 4, 2, 32, 48),
    "attention, little": lambda: attention(2, 9, 2, 2, 8),
    "attention, float64": lambda: attention(150, 300, 4, 2, 32, dtype=np.float64),
    "attention, one row of float64": lambda: attention(1, 3000, 4, 2, 32, dtype=np.float64),
    **{
        f"attention, {T} rows of {dtype.__name__}": (
            lambda T=T, dtype=dtype: attention(T, 1100, 4, 2, 32, dtype=dtype)
        )
        for dtype in HALVES
        for T in (1, 150)
    },
    "attention, bfloat16 in float32": lambda: attention(
        150, 300, 4, 2, 32, dtype=HALVES[-1], arithmetic="float32"
    ),
    "attention, options": lambda: attention_with_options(40, 700, 4, 2, 24),
    "attention, options, few rows": lambda: attention_with_options(2, 2000, 4, 2, 24),
    "varlen": lambda: packed_attention(90, 140, 4, 2, 24),
    "varlen, few rows": lambda: packed_attention(2, 2000, 4, 2, 24),
    "weights": lambda: weights_of_keys(130, 300, None),
    "weights, sums of queries": lambda: weights_of_keys(130, 300, "queries"),
    "weights, sums of keys": lambda: weights_of_keys(130, 300, "keys"),
    "weights, rows": lambda: weights_of_keys(130, 300, "queries", rows=[100, 3, 3]),
    "merge": lambda: merging(200, 4, 33),
    "cache": lambda: cached(40, 300),
    "cache, one row": lambda: cached(1, 50),
    "cache, float64": lambda: cached(2, 300, np.float64, np.float64),
    "cache, float16": lambda: cached(2, 300, np.float16),
    "cache, int8": lambda: cached(2, 300, "int8"),
    "cache, int8, many rows": lambda: cached(40, 300, "int8"),
    "ring": lambda: cached(2, 300, window=600),
    "ring, int8": lambda: cached(40, 300, "int8", window=600),
    "block": lambda: block_of(60),
    "block, few rows": lambda: block_of(2),
    "block, float64": lambda: block_of(60, dtype=np.float64),
    "block, modern": lambda: block_of(60, **MODERN),
    "block, bfloat16": lambda: block_of(60, weight_dtype="bfloat16"),
    "block, bfloat16 in float32": lambda: block_of(
        60, weight_dtype="bfloat16", arithmetic="float32"
    ),
    "block, int8": lambda: block_of(60, weight_dtype="int8"),
    "block, int8 x int8": lambda: block_of(60, weight_dtype="int8", arithmetic="int8"),
    "block, int8 x int8, few rows": lambda: block_of(1, weight_dtype="int8", arithmetic="int8"),
    "block, int4": lambda: block_of(60, weight_dtype="int4"),
    "block, quantized matrix": lambda: block_of_quantized_matrices(9),
    "block, packed anew": lambda: block_packed_anew(60),
    "block, cache": block_with_cache,
    "block, int8 cache": lambda: block_with_cache("int8"),
    "block, ring": lambda: block_with_cache(window=40),
    "block, context": block_with_context,
    "LayerNorm": lambda: calls_of(norm_of(500)[0], 300, D=500),
    "RMSNorm": lambda: calls_of(rms_norm_of(500)[0], 300, D=500),
    "RMSNorm, float64": lambda: calls_of(
        rms_norm_of(77, np.float64)[0], 300, np.float64, D=77
    ),
    "rope": rotation,
    "rope, interleaved": lambda: rotation(interleaved=True, rotary_dim=34),
}  # fmt: skip


@pytest.fixture(params=OPERATIONS.values(), ids=OPERATIONS)
def operation(request):
    return request.param()


def check_equal(got, expected, what):
    for one, other in zip(got, expected, strict=True):
        assert np.isfinite(np.asarray(other, np.float64)).any(), "nothing to compare"
        assert same_bits(np.ascontiguousarray(one), np.ascontiguousarray(other)), what


def test_threads_and_runs(operation):
    inputs, call = operation
    expected = call(*inputs, threads=1)
    for threads in THREADS:
        for run in range(2):
            check_equal(call(*inputs, threads=threads), expected, (threads, run))


def test_company(operation):
    """Alone, and between neighbours of NaN."""
    inputs, call = operation
    whole = call(*inputs, threads=2)
    for b in range(B):
        own = [a[b : b + 1] for a in whole]
        for threads in (1, 7):
            check_equal(call(*(a[b : b + 1] for a in inputs), threads=threads), own, (b, threads))
        beside = [a.copy() for a in inputs]
        for a in beside:
            if a.dtype.kind not in "biu":
                a[np.arange(B) != b] = np.nan
        got = call(*beside, threads=3)
        check_equal([a[b : b + 1] for a in got], own, (b, "neighbours"))


def placed(a, offset):
    """A copy that begins so many bytes behind the begin of a page."""
    memory = np.empty(a.nbytes + offset + PAGE, np.uint8)
    begin = -memory.ctypes.data % PAGE + offset
    copy = memory[begin : begin + a.nbytes].view(a.dtype).reshape(a.shape)
    copy[...] = a
    return copy


def spread(a):
    """A copy with something between its rows, and all of its axes but the last turned."""
    wide = np.empty((*a.shape[-2::-1], a.shape[-1] + 3), a.dtype)
    copy = wide[..., : a.shape[-1]].transpose(*range(a.ndim - 1)[::-1], a.ndim - 1)
    copy[...] = a
    return copy


@pytest.mark.parametrize("offset", [1, 8, PAGE - 40])
def test_places(operation, offset):
    """In the page; one byte off is aligned to nothing."""
    inputs, call = operation
    expected = call(*inputs, threads=2)
    check_equal(call(*(placed(a, offset) for a in inputs), threads=2), expected, offset)


def test_strides(operation):
    inputs, call = operation
    check_equal(call(*map(spread, inputs), threads=2), call(*inputs, threads=2), "strides")


@pytest.mark.parametrize("stored", [np.float32, "int8"])
@pytest.mark.parametrize("T", [1, 40])
def test_slots_of_a_cache(T, stored):
    """More room, other slots of a ring: the same positions in other places."""
    q, k, v = qkv(T, 900, 4, 2, 32)
    results = []
    for capacity, window in ((900, None), (1300, None), (512, 300), (600, 300), (1024, 300)):
        cache = KVCache(B, capacity, 2, 32, dtype=stored, window=window)
        for begin in range(0, 900, 100):
            rows = slice(begin, begin + 100)
            cache.append(k[:, rows], v[:, rows])
        results.append((cache.attend(q, local_window_size=(200, None)),))
    for capacity, got in enumerate(results):
        check_equal(got, results[0], capacity)


def test_every_operation_is_here():
    """Of what the package exports, all that computes."""
    others = {"Plan", "RopeScaling", "available_isas", "cost", "explain", "get_num_threads", "isa"}
    others |= {"reference", "set_num_threads", "show_config", "threads"}
    tested = {name for name in tileattn.__all__ if name in globals()}
    tested |= {"LayerNorm", "RMSNorm"}
    assert tested | others == set(tileattn.__all__)
