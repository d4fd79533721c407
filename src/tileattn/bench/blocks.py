"""Whole attention blocks against the machine's limits, the same block called in parts, and
peers."""

from __future__ import annotations

from typing import Any

import numpy as np

import tileattn
from tileattn import _core
from tileattn.bench import peers
from tileattn.bench.arrays import Alignment, Array, copies_if_cold, copy, empty, normal
from tileattn.bench.cells import Block, Step
from tileattn.bench.records import OURS
from tileattn.bench.rounds import Candidate
from tileattn.bench.work import IN_PARTS, Work, rotation


def prepare(cell: Block, alignment: Alignment = "line") -> Work:
    B, T, D, N, K, H = cell.B, cell.T, cell.D, cell.N, cell.K, cell.H
    rng = np.random.default_rng(0)
    x = normal(rng, (B, T, D), alignment)
    first = random_weights(rng, cell)
    sets = copies_if_cold(cell.cold, first.w_qkv.nbytes + first.w_o.nbytes)
    weights = [first] + [peers.BlockWeights(*map(copy, first)) for _ in range(sets - 1)]
    blocks = [tileattn.AttentionBlock(**arguments(cell, w), is_causal=cell.causal) for w in weights]
    out = empty(x.shape, alignment)
    turn = rotation(sets)

    def ours(threads: int) -> Array:
        return blocks[next(turn)](x, out=out, num_threads=threads)

    cuts = [N * H, (N + K) * H]
    norms = [tileattn.LayerNorm(w.norm_weight, w.norm_bias) for w in weights]
    packed = [
        (_core.PackedMatrix(*np.split(w.w_qkv, cuts, axis=1)), _core.PackedMatrix(w.w_o))
        for w in weights
    ]
    q, y = (empty((B, T, N, H), alignment) for _ in range(2))
    k, v = (empty((B, T, K, H), alignment) for _ in range(2))
    z = empty((B * T, D), alignment)

    def in_parts(threads: int) -> Array:
        i = next(turn)
        w_qkv, w_o = packed[i]
        qkv = tuple(a.reshape(B * T, -1) for a in (q, k, v))
        _core.project(x, w_qkv, qkv, tuple(np.split(weights[i].b_qkv, cuts)), threads)
        tileattn.dot_product_attention(q, k, v, is_causal=cell.causal, out=y, num_threads=threads)
        _core.project(y.reshape(B, T, N * H), w_o, (z,), (weights[i].b_o,), threads)
        norms[i](z.reshape(x.shape), residual=x, out=out, num_threads=threads)
        return out

    def exact() -> Array:
        doubles = peers.BlockWeights(*(array.astype(np.float64) for array in first))
        return tileattn.reference.attention_block(
            x.astype(np.float64), **arguments(cell, doubles), is_causal=cell.causal
        )

    return Work(
        cell,
        {
            OURS: Candidate(ours),
            IN_PARTS: Candidate(in_parts),
            **peers.block(x, weights, (N, K, H), cell.causal, turn),
        },
        exact=exact,
        streams=[(w.w_qkv, w.w_o) for w in weights],
        turn=turn,
    )


def random_weights(rng: np.random.Generator, cell: Block | Step) -> peers.BlockWeights:
    D, N, K, H = cell.D, cell.N, cell.K, cell.H
    columns = (N + 2 * K) * H
    return peers.BlockWeights(
        w_qkv=normal(rng, (D, columns), scale=D**-0.5),
        w_o=normal(rng, (N * H, D), scale=(N * H) ** -0.5),
        b_qkv=normal(rng, (columns,)),
        b_o=normal(rng, (D,)),
        norm_weight=normal(rng, (D,)),
        norm_bias=normal(rng, (D,)),
    )


def arguments(cell: Block | Step, w: peers.BlockWeights) -> dict[str, Any]:
    """The weights as AttentionBlock's constructor takes them."""
    N, K, H = cell.N, cell.K, cell.H
    cuts = [N * H, (N + K) * H]
    given: dict[str, Any] = {
        "w_o": w.w_o.reshape(N, H, cell.D),
        "b_o": w.b_o,
        "norm": tileattn.LayerNorm(w.norm_weight, w.norm_bias),
    }
    matrices, biases = np.split(w.w_qkv, cuts, axis=1), np.split(w.b_qkv, cuts)
    for name, heads, matrix, bias in zip("qkv", (N, K, K), matrices, biases, strict=True):
        given[f"w_{name}"] = matrix.reshape(cell.D, heads, H)
        given[f"b_{name}"] = bias.reshape(heads, H)
    return given
