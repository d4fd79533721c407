"""Attention with options, against peers and the same call without them, on bfloat16 without dot
products, too."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

import tileattn
from tileattn.bench import attention
from tileattn.bench.arrays import Alignment, Array, copies_if_cold, empty, normal
from tileattn.bench.cells import Attention
from tileattn.bench.records import OURS
from tileattn.bench.rounds import Candidate
from tileattn.bench.work import PLAIN, Work, rotation


def prepare(cell: Attention, alignment: Alignment = "line") -> Work:
    work = _from_int8(cell, alignment) if cell.int8 else attention.prepare(cell, alignment)
    plain = attention.prepare(cell.plain, alignment).candidates[OURS]
    return replace(work, candidates={**work.candidates, PLAIN: replace(plain, same=False)})


def _from_int8(cell: Attention, alignment: Alignment) -> Work:
    """Without peers, which keep nothing in int8."""
    rng = np.random.default_rng(0)
    q = normal(rng, (cell.B, cell.T, cell.N, cell.H), alignment)
    k, v = (normal(rng, (cell.B, cell.S, cell.K, cell.H)) for _ in "kv")

    def filled() -> tileattn.KVCache:
        cache = tileattn.KVCache(cell.B, cell.S, cell.K, cell.H, dtype="int8")
        cache.append(k, v)
        return cache

    first = filled()
    caches = [first, *(filled() for _ in range(copies_if_cold(cell.cold, first.nbytes) - 1))]
    out = empty(q.shape, alignment)
    turn = rotation(len(caches))

    def ours(threads: int) -> Array:
        return caches[next(turn)].attend(q, out=out, num_threads=threads)

    def exact() -> Array:
        scaled = ((first.keys, first.key_scales), (first.values, first.value_scales))
        products = [a * scales[..., None] for a, scales in scaled if scales is not None]
        return tileattn.reference.dot_product_attention(
            *(a.astype(np.float64) for a in (q, *products)),
            is_causal=True,
            query_offset=cell.S - cell.T,
        )

    return Work(
        cell,
        {OURS: Candidate(ours)},
        exact=exact,
        streams=[(c.keys.view(np.float32), c.values.view(np.float32)) for c in caches],
        turn=turn,
    )
