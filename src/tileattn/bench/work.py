"""One cell of a group, from prepared work to its times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle

import numpy as np

from tileattn import _core
from tileattn.bench.arrays import Array
from tileattn.bench.cells import Cell
from tileattn.bench.records import OURS, Result, Timing
from tileattn.bench.rounds import (
    Candidate,
    Turn,
    at_dot_peak,
    at_fma_peak,
    interleave,
    timed,
)

#: Ours, called otherwise: a block or step in calls of its parts, the parts of a step that
#: AttentionBlock.profile tells apart (in its order), sequences that are padded, options left out,
#: weights in float32, and bfloat16 that is multiplied in float32.
IN_PARTS = "in parts"
PARTS = ("project", "attention", "output")
PADDED = "padded"
PLAIN = "plain"
FLOAT32 = "float32"
WITHOUT_DOTS = "without dots"
_LIMIT = "limit"


@dataclass(frozen=True)
class Work:
    """One cell, ready to run.

    Attributes
    ----------
    candidates
        Ours and its peers by name; each that is `same` returns the same array.
    exact
        Computes that array in float64.
    streams
        What one call has to read, for each of the sets of arrays that calls rotate over; for the
        cells that are held against the bandwidth of reading it.
    """

    cell: Cell
    candidates: dict[str, Candidate]
    exact: Callable[[], Array]
    streams: Sequence[tuple[Array, ...]]
    turn: Iterator[int]

    def limit(self, threads: int) -> Turn:
        """The turn of the machine's limit: what it takes to read the stream or do the FLOPs."""
        if self.cell.of_limit == "FMA peak":
            return at_fma_peak(self.cell.flops, threads)
        if self.cell.of_limit == "dot product peak":
            return at_dot_peak(self.cell.flops, threads)
        return timed(Candidate(self._read), threads)

    @property
    def rate(self) -> tuple[float, str]:
        """Work of one call in 1e9 units, and the unit a second."""
        if self.cell.of_limit == "read bandwidth":
            return sum(array.nbytes for array in self.streams[0]) / 1e9, "GB/s"
        return self.cell.flops / 1e9, "GFLOP/s"

    def _read(self, threads: int) -> None:
        for array in self.streams[next(self.turn)]:
            _core.measure_read_bandwidth(array, threads)


def rotation(sets: int) -> Iterator[int]:
    """Which set of arrays is next, whoever asks."""
    return cycle(range(sets))


def relative_error(result: object, exact: Array) -> float:
    """In the Frobenius norm."""
    return float(np.linalg.norm(np.asarray(result, np.float64) - exact) / np.linalg.norm(exact))


def measure(
    work: Work,
    peers: Sequence[str],
    threads: Sequence[int],
    rounds: int,
    errors: bool = False,
    after_round: Callable[[], object] = lambda: None,
) -> Result:
    """Time ours and those peers that take the cell; all numbers of threads share the rounds."""
    names = [OURS, *(name for name in peers if name in work.candidates)]
    turns: dict[tuple[str, int], Turn] = {}
    for n in threads:
        turns[_LIMIT, n] = work.limit(n)
        for name in names:
            turns[name, n] = timed(work.candidates[name], n)
    seconds = interleave(turns, rounds, after_round)
    amount, unit = work.rate
    return Result(
        cell=work.cell.name,
        label=work.cell.label,
        sizes=asdict(work.cell),
        flops=work.cell.flops,
        bytes=work.cell.bytes,
        limit=work.cell.of_limit,
        amount=amount,
        unit=unit,
        timings=[
            Timing(n, seconds[_LIMIT, n], {name: seconds[name, n] for name in names})
            for n in threads
        ],
        errors=_errors(work, names, threads[0]) if errors else {},
    )


def _errors(work: Work, names: Sequence[str], threads: int) -> dict[str, float]:
    exact = work.exact()
    return {
        name: relative_error(work.candidates[name].call(threads), exact)
        for name in names
        if work.candidates[name].same
    }
