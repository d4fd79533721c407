"""Attention against the machine's limits and peers: `python -m benchmarks.attention`."""

from __future__ import annotations

from typing import Any

import numpy as np

import tileattn
from benchmarks import peers
from benchmarks.arrays import Alignment, Array, copies_if_cold, copy, empty, normal
from benchmarks.cells import ATTENTION, Attention
from benchmarks.report import OURS, Work, rotation, run
from benchmarks.rounds import Candidate


def prepare(cell: Attention, alignment: Alignment = "line") -> Work:
    rng = np.random.default_rng(0)
    q = normal(rng, (cell.B, cell.T, cell.N, cell.H), alignment)
    k = normal(rng, (cell.B, cell.S, cell.K, cell.H), alignment)
    v = normal(rng, (cell.B, cell.S, cell.K, cell.H), alignment)
    others = range(copies_if_cold(cell.cold, k.nbytes + v.nbytes) - 1)
    keys = [k, *(copy(k, alignment) for _ in others)]
    values = [v, *(copy(v, alignment) for _ in others)]
    out = empty(q.shape, alignment)
    turn = rotation(len(keys))
    options: dict[str, Any] = {"is_causal": cell.causal, "query_offset": cell.S - cell.T}

    def ours(threads: int) -> Array:
        i = next(turn)
        return tileattn.dot_product_attention(
            q, keys[i], values[i], out=out, num_threads=threads, **options
        )

    return Work(
        cell,
        {OURS: Candidate(ours), **peers.attention(q, keys, values, cell.causal, turn)},
        exact=lambda: tileattn.reference.dot_product_attention(
            *(a.astype(np.float64) for a in (q, k, v)), **options
        ),
        streams=list(zip(keys, values, strict=True)),
        turn=turn,
    )


if __name__ == "__main__":
    run(__doc__, ATTENTION, prepare, peers.ATTENTION)
