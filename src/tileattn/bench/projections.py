"""Projections against the machine's limits and peers, with weights in fewer bits against our own
float32 and, of bfloat16, without dot products, too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tileattn import QuantizedMatrix, _core
from tileattn.bench import peers
from tileattn.bench.arrays import Alignment, Array, copies_if_cold, copy, empty, normal
from tileattn.bench.cells import Projection
from tileattn.bench.records import OURS
from tileattn.bench.rounds import Candidate
from tileattn.bench.work import FLOAT32, WITHOUT_DOTS, Work, rotation
from tileattn.quantized import WeightDtype


def prepare(cell: Projection, alignment: Alignment = "line") -> Work:
    rng = np.random.default_rng(0)
    x = normal(rng, (cell.M, cell.K), alignment)
    w = normal(rng, (cell.K, cell.N))
    weights = [w] + [copy(w) for _ in range(copies_if_cold(cell.cold, w.nbytes) - 1)]
    out = empty((cell.M, cell.N), alignment)
    turn = rotation(len(weights))

    def ours(packed: list[_core.PackedMatrix], turn: Iterator[int]) -> Candidate:
        def call(threads: int) -> Array:
            _core.project(x[None], packed[next(turn)], (out,), (None,), threads)
            return out

        return Candidate(call)

    candidates = {
        OURS: ours([_core.PackedMatrix(w) for w in weights], turn),
        **peers.linear(x, weights, turn),
    }
    streams: list[tuple[Array, ...]] = [(w,) for w in weights]
    if cell.weight_dtype is not None:
        candidates = {name: replace(each, same=False) for name, each in candidates.items()}
        candidates[FLOAT32] = candidates[OURS]
        packed = _packed(w, cell.weight_dtype, cell.cold)
        candidates[OURS] = ours(packed, rotation(len(packed)))
        if cell.weight_dtype == "bfloat16":
            undotted = _packed(w, cell.weight_dtype, cell.cold, float32=True)
            candidates[WITHOUT_DOTS] = ours(undotted, rotation(len(undotted)))
            candidates.update(peers.linear_bfloat16(x, w, len(packed)))
        # As many bytes, of the float32 weights.
        size = packed[0].nbytes // 4
        streams = [
            (w.reshape(-1)[i : i + size],)
            for w in weights
            for i in range(0, w.size - size + 1, size)
        ]
        turn = rotation(len(streams))
    return Work(
        cell,
        candidates,
        exact=lambda: x.astype(np.float64) @ w.astype(np.float64),
        streams=streams,
        turn=turn,
    )


def _packed(
    w: Array, weight_dtype: WeightDtype, cold: bool, float32: bool = False
) -> list[_core.PackedMatrix]:
    """Of w[K, N], as many as a cell rotates over; to multiply in float32 even if it is bfloat16."""

    def pack() -> _core.PackedMatrix:
        return _core.PackedMatrix(source, bfloat16=weight_dtype == "bfloat16", float32=float32)

    source: Array | QuantizedMatrix = w
    if weight_dtype != "bfloat16":
        source = QuantizedMatrix.from_float(w.T, bits=8 if weight_dtype == "int8" else 4)
    first = pack()
    return [first, *(pack() for _ in range(copies_if_cold(cold, first.nbytes) - 1))]
