"""Fixed calls of every public operation, for tests of what surrounds them."""

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tests.oracle import HALVES, random
from tileattn import (
    AttentionBlock,
    KVCache,
    LayerNorm,
    QuantizedMatrix,
    RMSNorm,
    Rope,
    apply_rope,
    attention_block,
    attention_weights,
    dot_product_attention,
    explain,
    merge_states,
    varlen_attention,
)

B = 3
D, N, K, H = 96, 6, 3, 16  # of blocks


class Operation(NamedTuple):
    """A call of what has the public name `of`: call(*inputs, num_threads=) gives arrays.

    The first axis of inputs and results is the batch. Where there is an `out`, the call takes one:
    an array for its first result.
    """

    of: str
    inputs: list[np.ndarray]
    call: Callable[..., Sequence[np.ndarray]]
    out: np.ndarray | None = None

    def __call__(self, num_threads):
        how = {} if self.out is None else {"out": self.out}
        return self.call(*self.inputs, num_threads=num_threads, **how)

    def run(self, num_threads):
        """Copies of what the call gives."""
        return [np.array(array) for array in self(num_threads)]


def with_out(of, inputs, call):
    first, *_ = call(*inputs, num_threads=1)
    return Operation(of, inputs, call, np.zeros_like(first))


# ------------------------------------------------------------------ attention


def qkv(T, S, N, K, H, Hv=None, dtype=np.float32):
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, Hv or H)
    return [random(i, *shape).astype(dtype) for i, shape in enumerate(shapes)]


def attention(*sizes, dtype=np.float32, **options):
    def call(q, k, v, **how):
        return dot_product_attention(q, k, v, return_lse=True, **how, **options)

    return with_out("dot_product_attention", qkv(*sizes, dtype=dtype), call)


def attention_with_options(T, S, N, K, H, dtype=np.float32):
    def call(q, k, v, mask, bias, lengths, **how):
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
            alibi_slopes=slopes,
            sinks=np.ones(N, np.float32),
            return_lse=True,
            **how,
        )

    slopes = np.linspace(0.1, 1, N, dtype=np.float32)
    mask = np.random.default_rng(0).random((B, 1, T, S)) < 0.8
    lengths = np.array([S, S - 3, S // 2 + T])
    inputs = [*qkv(T, S, N, K, H, dtype=dtype), mask, random(5, B, N, 1, S), lengths]
    return with_out("dot_product_attention", inputs, call)


def packed_attention(T, S, N, K, H):
    """Three sequences, the second of them empty, for each element of the batch."""
    queries, keys = [T // 3, 0, T - T // 3], [S // 3, 0, S - S // 3]

    def call(q, k, v, out=None, **how):
        flat = (a.reshape(-1, *a.shape[2:]) for a in (q, k, v))
        lengths = [np.tile(n, len(q)) for n in (queries, keys)]
        starts = (np.concatenate([[0], np.cumsum(n)]) for n in lengths)
        options = {"is_causal": True, "query_offset": lengths[1] - lengths[0]}
        out = None if out is None else out.reshape(-1, *out.shape[2:])
        y, lse = varlen_attention(*flat, *starts, return_lse=True, out=out, **how, **options)
        return y.reshape(*q.shape[:3], -1), lse.reshape(q.shape[:3])

    return with_out("varlen_attention", qkv(T, S, N, K, H), call)


def weights_of_keys(T, S, reduce, **options):
    def call(q, k, lse, **how):
        return (attention_weights(q, k, lse, reduce=reduce, **how, **options),)

    q, k, v = qkv(T, S, 4, 2, 24)
    _, lse = dot_product_attention(q, k, v, return_lse=True)
    return with_out("attention_weights", [q, k, lse], call)


def merging(*shape):
    parts = [random(i, B, *shape) for i in range(3)]
    lses = [random(i, B, *shape[:-1]) for i in range(3)]
    inputs = [a for pair in zip(parts, lses, strict=True) for a in pair]
    return Operation("merge_states", inputs, merge_states)


def plan(T, S):
    def call(q, k, **how):
        made = explain(q, k, k, **how)
        return (np.full(len(q), made.chunks), np.full(len(q), made.key_block))

    return Operation("explain", qkv(T, S, 4, 2, 16)[:2], call)


# ------------------------------------------------------------------ caches


@contextlib.contextmanager
def all_or_nothing(cache):
    """A call that is short of memory leaves a cache as it was."""
    before = [a.copy() for a in (cache.lengths, cache._longest, *cache._arrays())]
    try:
        yield
    except MemoryError:
        after = (cache.lengths, cache._longest, *cache._arrays())
        assert all(map(np.array_equal, before, after)), "a cache is half written"
        raise


def empty_cache(*sizes, **options):
    """One whose memory can be compared."""
    cache = KVCache(*sizes, **options)
    for array in cache._arrays():
        array[...] = 0
    return cache


def cached(rows, positions, chunk, capacity=None, stored=np.float32, dtype=np.float32, window=None):
    """Appended in chunks, the last rows attended to, cut back, attended to again."""

    def call(q, k, v, num_threads):
        cache = empty_cache(len(q), capacity or positions, 2, 40, dtype=stored, window=window)
        for begin in range(0, positions, chunk):
            part = slice(begin, begin + chunk)
            with all_or_nothing(cache):
                cache.append(k[:, part], v[:, part], num_threads=num_threads)
        first = cache.attend(q, num_threads=num_threads)
        cache.truncate(cache.lengths - 3)
        return (first, *cache.attend(q, return_lse=True, num_threads=num_threads))

    return Operation("KVCache", qkv(rows, positions, 6, 2, 40, dtype=dtype), call)


def reordered(T):
    """Three sequences of each element of the batch: two change places, one takes another's."""
    index, lengths = np.array([1, 0, 1]), np.array([T, 3, T + 10])

    def call(k, num_threads):
        cache = empty_cache(3 * len(k), T + 10, 2, 96)
        rows = k.reshape(-1, *k.shape[2:])
        cache.append(rows, rows, np.tile(lengths, len(k)), num_threads=num_threads)
        with all_or_nothing(cache):
            cache.reorder((3 * np.arange(len(k))[:, None] + index).reshape(-1))
        return [cache.keys[i::3, :n].copy() for i, n in enumerate(lengths[index])]

    return Operation("KVCache", [random(0, B, 3, T + 10, 2, 96)], call)


# ------------------------------------------------------------------ blocks


def weights(dtype=np.float32, context=D):
    shapes = (D, N, H), (context, K, H), (context, K, H), (N, H, D)
    return [(random(i, *shape) / 10).astype(dtype) for i, shape in enumerate(shapes)]


def biases(dtype=np.float32):
    shapes = {"b_q": (N, H), "b_k": (K, H), "b_v": (K, H), "b_o": (D,)}
    return {name: random(10, *shape, dtype=dtype) for name, shape in shapes.items()}


def layer_norm(D, dtype=np.float32):
    return LayerNorm(1 + random(20, D, dtype=dtype) / 4, random(21, D, dtype=dtype))


def rms_norm(D, dtype=np.float32):
    return RMSNorm(1 + random(22, D, dtype=dtype) / 4)


def modern(dtype=np.float32):
    return {
        "norm": rms_norm(D, dtype),
        "norm_position": "pre",
        "rope": Rope(),
        "q_norm": rms_norm(H, dtype),
        "k_norm": rms_norm(H, dtype),
        "local_window_size": (30, None),
    }


def calls_of(function, T, dtype=np.float32, of="AttentionBlock"):
    def call(x, **how):
        return (function(x, **how),)

    return with_out(of, [random(30, B, T, D, dtype=dtype)], call)


def block_of(T, dtype=np.float32, **options):
    options = {**biases(dtype), "norm": layer_norm(D, dtype), "is_causal": True, **options}
    return calls_of(AttentionBlock(*weights(dtype), **options), T, dtype)


def block_into_strides(T):
    return block_of(T)._replace(out=np.zeros((B, T, 2 * D), np.float32)[..., ::2])


def block_of_quantized_matrices(T):
    w_q, w_k, w_v, w_o = weights()
    rows = [w.reshape(D, -1).T for w in (w_q, w_k, w_v)] + [w_o.reshape(-1, D).T]
    rows[1] = QuantizedMatrix.from_float(rows[1], bits=4, group_size=32)
    rows[2] = QuantizedMatrix.from_float(rows[2])
    return calls_of(AttentionBlock.from_linear(*rows, num_heads=N, num_kv_heads=K), T)


def block_packed_anew(T):
    arrays = weights()

    def call(x, **how):
        return attention_block(x, *arrays, is_causal=True, **how)

    return calls_of(call, T, of="attention_block")


def block_with_cache(T, stored=np.float32, window=None):
    """A prompt, a chunk and single tokens, fewer of them in some sequences."""
    block = AttentionBlock(*weights(), **biases(), **modern(), is_causal=True)

    def call(x, counts, num_threads):
        cache = empty_cache(len(x), T + 30, K, H, dtype=stored, window=window)
        parts = [x[:, :T], x[:, T : T + 9], *(x[:, t : t + 1] for t in range(T + 9, T + 13))]
        out = []
        for part, lengths in zip(parts, counts.T, strict=True):
            how = {"query_seq_lengths": lengths, "num_threads": num_threads}
            with all_or_nothing(cache):
                out.append(block(part, cache=cache, **how))
        return (np.concatenate(out, axis=1),)

    counts = np.array([[T, 9, 1, 1, 1, 1], [T // 3, 9, 1, 0, 1, 1], [T - 1, 0, 0, 1, 1, 0]])
    return Operation("AttentionBlock", [random(30, B, T + 13, D), counts], call)


def block_with_context(T, S):
    block = AttentionBlock(*weights(context=48), **biases())

    def call(x, context, num_threads):
        cache = block.context_cache(context, num_threads=num_threads)
        return (
            block(x, context=context, num_threads=num_threads),
            block(x, context=cache, num_threads=num_threads),
        )

    return Operation("AttentionBlock", [random(30, B, T, D), random(31, B, S, 48)], call)


def quantizing(rows, depth):
    def call(x, num_threads):
        matrix = QuantizedMatrix.from_float(x.reshape(-1, depth))
        return (matrix.dequantize().reshape(x.shape),)

    return Operation("QuantizedMatrix", [random(0, B, rows, depth)], call)


# ------------------------------------------------------------------ norms and rope


def normalising(norm, T, D, dtype=np.float32):
    def call(x, **how):
        return (norm(x, residual=x, **how),)

    return with_out(type(norm).__name__, [random(30, B, T, D, dtype=dtype)], call)


def rotation(T, function=apply_rope, of="apply_rope", **options):
    def call(x, positions, **how):
        return (function(x, positions, **how, **options),)

    positions = np.random.default_rng(0).integers(0, 10**5, (B, T))
    return with_out(of, [random(0, B, T, 8, 66), positions], call)


# ------------------------------------------------------------------ all of them

# Of attention in float64: the default is computed by Python, which follows the thread's rounding.
DOUBLE = {"dtype": np.float64, "scale": 0.25}

# By name, for a number of positions: with 60 and more nearly all have work for two threads.
OPERATIONS = {
    "attention, many rows": lambda T: attention(
        2 * T, 3 * T, 4, 2, 32, is_causal=True, query_offset=T
    ),
    "attention, chunked tiles": lambda T: attention(20, 12 * T, 2, 1, 24, 40),
    "attention, fewest chunked tiles": lambda T: attention(17, 24 * T, 2, 2, 32),
    "attention, most chunked tiles": lambda T: attention(128, 9 * T, 2, 2, 24),
    "attention, chunked tiles of float64": lambda T: attention(20, 12 * T, 2, 1, 24, 40, **DOUBLE),
    "attention, fewest chunked tiles of float64": lambda T: attention(
        17, 24 * T, 2, 2, 32, **DOUBLE
    ),
    "attention, most chunked tiles of float64": lambda T: attention(128, 9 * T, 2, 2, 24, **DOUBLE),
    "attention, most of few rows": lambda T: attention(8, 24 * T, 2, 1, 32),
    "attention, few rows of float64": lambda T: attention(3, 24 * T, 2, 1, 40, **DOUBLE),
    "attention, few rows": lambda T: attention(3, 24 * T, 2, 1, 40),
    "attention, one row": lambda T: attention(1, 40 * T, 4, 2, 32, 48),
    "attention, little": lambda _: attention(2, 9, 2, 2, 8),
    "attention, float64": lambda T: attention(T, 2 * T, 4, 2, 32, **DOUBLE),
    "attention, one row of float64": lambda T: attention(1, 24 * T, 4, 2, 32, **DOUBLE),
    **{
        f"attention, {name} of {dtype.__name__}": (
            lambda T, rows=rows, dtype=dtype: attention(rows or T, 8 * T, 4, 2, 32, dtype=dtype)
        )
        for dtype in HALVES
        for name, rows in (("one row", 1), ("rows", None))
    },
    "attention, bfloat16 in float32": lambda T: attention(
        T, 2 * T, 4, 2, 32, dtype=HALVES[-1], arithmetic="float32"
    ),
    "attention, options": lambda T: attention_with_options(T // 3, 5 * T, 4, 2, 24),
    "attention, options, few rows": lambda T: attention_with_options(2, 16 * T, 4, 2, 24),
    "attention, options, bfloat16": lambda T: attention_with_options(
        T // 3, 5 * T, 4, 2, 24, HALVES[-1]
    ),
    "varlen": lambda T: packed_attention(T, 2 * T, 4, 2, 24),
    "varlen, few rows": lambda T: packed_attention(3, 16 * T, 4, 2, 24),
    **{
        f"weights, {name}, reduce={reduce}": (
            lambda T, rows=rows, S=S, reduce=reduce: weights_of_keys(rows or T, S * T, reduce)
        )
        for name, rows, S in (("rows", None, 2), ("one row", 1, 24))
        for reduce in (None, "queries", "keys")
    },
    "weights, chosen rows": lambda T: weights_of_keys(T, 2 * T, "queries", rows=[T - 1, 3, 3]),
    "merge": lambda T: merging(6 * T, 4, 65),
    "explain": lambda T: plan(T, 20 * T),
    "cache": lambda T: cached(T // 3, 5 * T, 2 * T),
    "cache, one row": lambda T: cached(1, 20 * T, T // 2),
    "cache, float64": lambda T: cached(2, 5 * T, 2 * T, stored=np.float64, dtype=np.float64),
    "cache, float16": lambda T: cached(2, 5 * T, 2 * T, stored=np.float16),
    "cache, int8": lambda T: cached(2, 5 * T, 2 * T, stored="int8"),
    "cache, int8, many rows": lambda T: cached(T // 3, 5 * T, 2 * T, stored="int8"),
    "ring": lambda T: cached(2, 9 * T, T, 4 * T + 9, window=3 * T),
    "ring, int8": lambda T: cached(T // 3, 9 * T, T, 4 * T + 9, stored="int8", window=3 * T),
    "cache, reordered": reordered,
    "block": block_of,
    "block, few rows": lambda _: block_of(2),
    "block, float64": lambda T: block_of(T, dtype=np.float64),
    "block, modern": lambda T: block_of(T, **modern()),
    "block, modern, float64": lambda T: block_of(T, np.float64, **modern(np.float64)),
    "block, bfloat16": lambda T: block_of(T, weight_dtype="bfloat16"),
    "block, bfloat16 in float32": lambda T: block_of(
        T, weight_dtype="bfloat16", arithmetic="float32"
    ),
    "block, int8": lambda T: block_of(T, weight_dtype="int8"),
    "block, int8 x int8": lambda T: block_of(T, weight_dtype="int8", arithmetic="int8"),
    "block, int8 x int8, few rows": lambda _: block_of(1, weight_dtype="int8", arithmetic="int8"),
    "block, int4": lambda T: block_of(T, weight_dtype="int4"),
    "block, into strides": block_into_strides,
    "block, quantized matrix": lambda _: block_of_quantized_matrices(9),
    "block, packed anew": block_packed_anew,
    "block, cache": block_with_cache,
    "block, int8 cache": lambda T: block_with_cache(T, "int8"),
    "block, float16 cache": lambda T: block_with_cache(T, np.float16),
    "block, ring": lambda T: block_with_cache(T, window=T // 3),
    "block, context": lambda T: block_with_context(20, 2 * T),
    "QuantizedMatrix": lambda T: quantizing(T, 64),
    "LayerNorm": lambda T: normalising(layer_norm(500), 2 * T, 500),
    "LayerNorm, float64": lambda T: normalising(layer_norm(77, np.float64), T, 77, np.float64),
    "RMSNorm": lambda T: normalising(rms_norm(500), 2 * T, 500),
    "RMSNorm, float64": lambda T: normalising(rms_norm(77, np.float64), T, 77, np.float64),
    "rope": rotation,
    "rope, interleaved": lambda T: rotation(T, interleaved=True, rotary_dim=34),
    "rope, made once": lambda T: rotation(T, Rope(), "Rope"),
}  # fmt: skip


def operations(positions=130):
    return {name: build(positions) for name, build in OPERATIONS.items()}
