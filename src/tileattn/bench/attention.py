"""Attention against the machine's limits and peers."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

import tileattn
from tileattn.bench import peers
from tileattn.bench.arrays import Alignment, Array, copies_if_cold, copy, empty, normal
from tileattn.bench.cells import Attention
from tileattn.bench.records import OURS
from tileattn.bench.rounds import Candidate
from tileattn.bench.work import WITHOUT_DOTS, Work, rotation


def prepare(cell: Attention, alignment: Alignment = "line") -> Work:
    rng = np.random.default_rng(0)
    q, k, v = (
        normal(rng, (cell.B, length, heads, cell.H), alignment, dtype=cell.dtype)
        for length, heads in ((cell.T, cell.N), (cell.S, cell.K), (cell.S, cell.K))
    )
    bias = normal(rng, (cell.B, cell.N, cell.T, cell.S), alignment) if cell.bias else None
    mask = None
    if cell.lengths is not None:
        mask = np.arange(cell.S) < np.reshape(cell.lengths, (cell.B, 1, 1, 1))
    others = range(copies_if_cold(cell.cold, k.nbytes + v.nbytes) - 1)
    keys = [k, *(copy(k, alignment) for _ in others)]
    values = [v, *(copy(v, alignment) for _ in others)]
    out = empty(q.shape, alignment, cell.dtype)
    turn = rotation(len(keys))
    options: dict[str, Any] = {
        "bias": bias,
        "mask": mask,
        "is_causal": cell.causal,
        "query_offset": cell.S - cell.T,
        "local_window_size": None if cell.window is None else (cell.window - 1, None),
    }

    def ours(arithmetic: Literal["float32"] | None = None) -> Candidate:
        def call(threads: int) -> Array:
            i = next(turn)
            tileattn.dot_product_attention(
                q,
                keys[i],
                values[i],
                arithmetic=arithmetic,
                out=out,
                num_threads=threads,
                **options,
            )
            return out

        return Candidate(call)

    return Work(
        cell,
        {
            OURS: ours(),
            **({WITHOUT_DOTS: ours("float32")} if cell.bfloat16 else {}),
            **peers.attention(
                q,
                keys,
                values,
                turn,
                causal=cell.causal,
                window=cell.window,
                bias=bias,
                mask=mask,
                alignment=alignment,
            ),
        },
        exact=lambda: tileattn.reference.dot_product_attention(
            *(a.astype(np.float64) for a in (q, k, v)), **options
        ),
        streams=[
            (k.view(np.float32), v.view(np.float32)) for k, v in zip(keys, values, strict=True)
        ],
        turn=turn,
    )
