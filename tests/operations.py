"""Every public operation, for tests of what surrounds it: processes, memory, floating point."""

import numpy as np

import tileattn
from tests.oracle import HALVES


class Operation:
    """`call(num_threads)` gives arrays, `outputs` among them: one that fails leaves them alone."""

    def __init__(self, call, outputs=()):
        self.call = call
        self.outputs = list(outputs)

    def run(self, num_threads):
        """Copies of what a call gives."""
        return [np.array(array) for array in self.call(num_threads)]

    def clear(self):
        for array in self.outputs:
            array[...] = 0


def operations(positions=130, width=64):
    """By name. With these sizes all but the checks of a plan have work for two threads."""
    rng = np.random.default_rng(0)
    B, T, N, K, H = 2, positions, 4, 2, max(width // 4, 4)
    every = {}

    def operation(name, *outputs):
        def add(run):
            every[name] = Operation(run, outputs)
            return run

        return add

    def normal(*shape, dtype=np.float32):
        return rng.standard_normal(shape).astype(dtype)

    def attention(name, dtype, T=T, S=T, **options):
        q, k, v = normal(B, T, N, H), normal(B, S, K, H), normal(B, S, K, H)
        q, k, v = (x.astype(dtype) for x in (q, k, v))
        out = np.zeros_like(q)

        @operation(f"attention {name}", out)
        def run(num_threads):
            return tileattn.dot_product_attention(
                q, k, v, out=out, return_lse=True, num_threads=num_threads, **options
            )

    for dtype in (np.float32, np.float64, *HALVES):
        attention(np.dtype(dtype).name, dtype, is_causal=True)
    attention("split", np.float32, 1, 30 * T)
    attention(
        "with options",
        np.float32,
        bias=normal(T, T),
        mask=rng.random((T, T)) < 0.9,
        softcap=5.0,
        sinks=normal(N),
        alibi_slopes=np.full(N, 0.125),
        local_window_size=(T // 2, 3),
        key_value_seq_lengths=[T, T // 3],
    )

    packed_q, packed_k, packed_v = normal(2 * T, N, H), normal(2 * T, K, H), normal(2 * T, K, H)
    starts = [0, 5, 5, T, 2 * T]
    packed = np.zeros_like(packed_q)

    @operation("varlen_attention", packed)
    def varlen(num_threads):
        tileattn.varlen_attention(
            packed_q, packed_k, packed_v, starts, starts, out=packed, num_threads=num_threads
        )
        return [packed]

    states = [
        tileattn.dot_product_attention(normal(B, 8 * T, N, H), k, v, return_lse=True)
        for k, v in normal(3, 2, B, 7, K, H)
    ]

    @operation("merge_states")
    def merge(num_threads):
        return tileattn.merge_states(*states[0], *states[1], num_threads=num_threads)

    q, k = normal(B, T, N, H), normal(B, T, K, H)
    _, lse = tileattn.dot_product_attention(q, k, k, return_lse=True)
    for reduce in (None, "queries", "keys"):

        @operation(f"attention_weights {reduce}")
        def weights(num_threads, reduce=reduce):
            return [tileattn.attention_weights(q, k, lse, reduce=reduce, num_threads=num_threads)]

    many = normal(B, 16 * T, N, H)
    turned = np.zeros_like(many)

    @operation("apply_rope", turned)
    def rotate(num_threads):
        places = np.arange(16 * T)
        tileattn.apply_rope(many, places, out=turned, num_threads=num_threads)
        return [turned]

    for norm in (tileattn.LayerNorm(normal(H), normal(H)), tileattn.RMSNorm(normal(H))):
        normed = np.zeros_like(many)

        @operation(type(norm).__name__, normed)
        def normalise(num_threads, norm=norm, normed=normed):
            norm(many, residual=many, out=normed, num_threads=num_threads)
            return [normed]

    x = normal(B, T, width)
    w_q, w_k, w_v = (normal(width, n, H) / np.float32(8) for n in (N, K, K))
    w_o = normal(N, H, width) / np.float32(8)
    rope = tileattn.Rope()
    blocks = {
        "post-norm": tileattn.AttentionBlock(w_q, w_k, w_v, w_o),
        "pre-norm": tileattn.AttentionBlock(
            w_q, w_k, w_v, w_o, norm_position="pre", rope=rope, is_causal=True
        ),
        "float64": tileattn.AttentionBlock(*(w.astype(np.float64) for w in (w_q, w_k, w_v, w_o))),
    } | {
        kept: tileattn.AttentionBlock(w_q, w_k, w_v, w_o, weight_dtype=kept)
        for kept in ("bfloat16", "int8", "int4")
    }
    for name, block in blocks.items():
        given = x.astype(block.dtype)
        given_out = np.zeros_like(given)

        @operation(f"block {name}", given_out)
        def call(num_threads, block=block, given=given, given_out=given_out):
            return [block(given, out=given_out, num_threads=num_threads)]

    strided = np.zeros((B, T, 2 * width), np.float32)

    @operation("block into a strided out", strided)
    def call_strided(num_threads):
        blocks["post-norm"](x, out=strided[..., ::2], num_threads=num_threads)
        return [strided]

    @operation("attention_block")
    def once(num_threads):
        return [tileattn.attention_block(x, w_q, w_k, w_v, w_o, num_threads=num_threads)]

    @operation("context_cache")
    def project(num_threads):
        cache = blocks["post-norm"].context_cache(x, num_threads=num_threads)
        return [cache.keys[:, :T], blocks["post-norm"](x, context=cache)]

    @operation("quantize")
    def quantize(num_threads):
        matrix = tileattn.QuantizedMatrix.from_float(w_o.reshape(-1, width).T, bits=8)
        return [matrix.dequantize()]

    @operation("explain")
    def explain(num_threads):
        plan = tileattn.explain(q, k, k, num_threads=num_threads)
        return [np.array([plan.chunks, plan.key_block])]

    for dtype in (np.float32, np.float16, np.int8):
        cache = tileattn.KVCache(B, 20 * T, K, H, dtype=dtype)
        arrays = cache._arrays()
        for array in arrays:
            array[...] = 0
        cached_k, cached_v = normal(2, B, 18 * T, K, H)
        full = tileattn.KVCache(B, T, K, H, dtype=dtype)
        full.append(cached_k[:, :T], cached_v[:, :T])

        @operation(f"append {np.dtype(dtype)}", *arrays)
        def append(num_threads, cache=cache, k=cached_k, v=cached_v):
            return _from_two(cache, lambda: cache.append(k, v, num_threads=num_threads))

        @operation(f"attend {np.dtype(dtype)}")
        def attend(num_threads, full=full):
            return [full.attend(q, num_threads=num_threads)]

        @operation(f"block with a cache {np.dtype(dtype)}", *arrays)
        def decode(num_threads, cache=cache):
            block = blocks["pre-norm"]
            return _from_two(cache, lambda: block(x, cache=cache, num_threads=num_threads))

    @operation("ring")
    def ring(num_threads):
        cache = tileattn.KVCache(B, T + 100, K, H, window=50)
        for begin in range(0, 18 * T, T):
            rows = slice(begin, begin + T)
            cache.append(cached_k[:, rows], cached_v[:, rows], num_threads=num_threads)
        return [cache.attend(q, num_threads=num_threads)]

    beams = tileattn.KVCache(3, 20 * T, K, H)
    lengths = [12 * T, 3, 10]

    @operation("reorder")
    def reorder(_num_threads):
        beams._lengths = np.array(lengths)
        beams._keys[:] = np.arange(3)[:, None, None, None]
        try:
            beams.reorder([1, 0, 1])
        except MemoryError:
            assert beams.lengths.tolist() == lengths
            assert all((beams.keys[b] == b).all() for b in range(3))
            raise
        return [beams.keys[b, :n] for b, n in enumerate(beams.lengths)]

    return every


def _from_two(cache, write):
    """What a cache of two positions holds and gives when `write` has added some."""
    cache._lengths = np.full(cache.batch, 2)
    try:
        result = write()
    except MemoryError:
        assert cache.lengths.tolist() == [2] * cache.batch
        raise
    end = cache.lengths[0]
    return [a[:, :end] for a in cache._arrays()] + ([] if result is None else [result])
