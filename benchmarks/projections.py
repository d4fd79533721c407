"""Projections against the machine's limits and peers: `python -m benchmarks.projections`."""

from __future__ import annotations

import numpy as np

from benchmarks import peers
from benchmarks.arrays import Alignment, Array, copies_if_cold, copy, empty, normal
from benchmarks.cells import PROJECTIONS, Projection
from benchmarks.report import OURS, Work, rotation, run
from benchmarks.rounds import Candidate
from tileattn import _core


def prepare(cell: Projection, alignment: Alignment = "line") -> Work:
    rng = np.random.default_rng(0)
    x = normal(rng, (cell.M, cell.K), alignment)
    w = normal(rng, (cell.K, cell.N))
    weights = [w] + [copy(w) for _ in range(copies_if_cold(cell.cold, w.nbytes) - 1)]
    packed = [_core.PackedMatrix(w) for w in weights]
    out = empty((cell.M, cell.N), alignment)
    turn = rotation(len(weights))

    def ours(threads: int) -> Array:
        _core.project(x[None], packed[next(turn)], (out,), (None,), threads)
        return out

    return Work(
        cell,
        {OURS: Candidate(ours), **peers.linear(x, weights, turn)},
        exact=lambda: x.astype(np.float64) @ w.astype(np.float64),
        streams=[(w,) for w in weights],
        turn=turn,
    )


if __name__ == "__main__":
    run(__doc__, PROJECTIONS, prepare, peers.LINEAR)
