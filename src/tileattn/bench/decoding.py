"""Steps of decoding: blocks with rope and caches against reading weights, keys and values, the same
step called in parts, and peers.

A step adds a position and takes it away again, so that all are alike: tileattn's time includes
`KVCache.truncate`, while peers write to the same slot each time. All apply rope to q and k. The
columns "project" (with rope, and k and v stored), "attention" and "output" say what part of a step
those take; checks and `truncate` are the rest.
"""

from __future__ import annotations

from operator import itemgetter

import numpy as np

import tileattn
from tileattn import _core
from tileattn.bench import peers
from tileattn.bench.arrays import Alignment, Array, copies_if_cold, copy, empty, normal
from tileattn.bench.blocks import arguments, random_weights
from tileattn.bench.cells import Step
from tileattn.bench.records import OURS
from tileattn.bench.rounds import Candidate
from tileattn.bench.work import IN_PARTS, PARTS, Work, rotation


def prepare(cell: Step, alignment: Alignment = "line") -> Work:
    B, S, D, N, K, H = cell.B, cell.S, cell.D, cell.N, cell.K, cell.H
    rng = np.random.default_rng(0)
    rope = tileattn.Rope()
    x = normal(rng, (B, 1, D), alignment)
    first = random_weights(rng, cell)
    # The last position is for the step's own.
    past = normal(rng, (B, K, S + 1, H)), normal(rng, (B, K, S + 1, H))
    sets = copies_if_cold(cell.cold, sum(a.nbytes for a in (first.w_qkv, first.w_o, *past)))
    weights = [first] + [peers.BlockWeights(*map(copy, first)) for _ in range(sets - 1)]
    theirs = [past] + [(copy(past[0]), copy(past[1])) for _ in range(sets - 1)]
    blocks = [
        tileattn.AttentionBlock(**arguments(cell, w), rope=rope, is_causal=True) for w in weights
    ]
    caches = [_filled(*past) for _ in range(sets)]
    out = empty(x.shape, alignment)
    turn = rotation(sets)

    def ours(threads: int) -> Array:
        i = next(turn)
        blocks[i](x, cache=caches[i], out=out, num_threads=threads)
        caches[i].truncate(S)
        return out

    cuts = [N * H, (N + K) * H]
    norms = [tileattn.LayerNorm(w.norm_weight, w.norm_bias) for w in weights]
    packed = [
        (_core.PackedMatrix(*np.split(w.w_qkv, cuts, axis=1)), _core.PackedMatrix(w.w_o))
        for w in weights
    ]
    q, y = (empty((B, 1, N, H), alignment) for _ in range(2))
    k, v = (empty((B, 1, K, H), alignment) for _ in range(2))
    z = empty((B, D), alignment)

    def in_parts(threads: int) -> Array:
        i = next(turn)
        w_qkv, w_o = packed[i]
        qkv = tuple(a.reshape(B, -1) for a in (q, k, v))
        _core.project(x, w_qkv, qkv, tuple(np.split(weights[i].b_qkv, cuts)), threads)
        for heads in (q, k):
            rope(heads, [S], out=heads, num_threads=threads)
        caches[i].append(k, v, num_threads=threads)
        caches[i].attend(q, out=y, num_threads=threads)
        caches[i].truncate(S)
        _core.project(y.reshape(B, 1, N * H), w_o, (z,), (weights[i].b_o,), threads)
        norms[i](z.reshape(x.shape), residual=x, out=out, num_threads=threads)
        return out

    def profile(threads: int) -> list[float]:
        i = next(turn)
        _, parts = blocks[i].profile(x, cache=caches[i], out=out, num_threads=threads)
        caches[i].truncate(S)
        return [seconds for _, seconds in parts]

    def exact() -> Array:
        doubles = peers.BlockWeights(*(a.astype(np.float64) for a in first))
        return tileattn.reference.attention_block(
            x.astype(np.float64),
            **arguments(cell, doubles),
            rope=rope,
            is_causal=True,
            cache=_filled(*(a.astype(np.float64) for a in past)),
        )

    return Work(
        cell,
        {
            OURS: Candidate(ours),
            IN_PARTS: Candidate(in_parts),
            **{
                part: Candidate(profile, same=False, counted=itemgetter(i))
                for i, part in enumerate(PARTS)
            },
            **peers.decoding(x, weights, theirs, (N, K, H), rope.theta, turn),
        },
        exact=exact,
        streams=[(w.w_qkv, w.w_o, *cache) for w, cache in zip(weights, theirs, strict=True)],
        turn=turn,
    )


def _filled(keys: Array, values: Array) -> tileattn.KVCache:
    """A cache of all but the last positions of [B, K, S, H], for which it has room."""
    B, K, S, H = keys.shape
    cache = tileattn.KVCache(B, S, K, H, dtype=keys.dtype)
    cache.append(*(a[:, :, :-1].transpose(0, 2, 1, 3) for a in (keys, values)))
    return cache
