"""Fair timing on a noisy machine: candidates take short turns, figures are ratios within a round.

Where other work shares the machine, its speed changes by half within seconds, so absolute times
prove little and neither does a ratio of medians. Instead, candidates take turns of some 20 ms in
one process, in an order that is reversed every other round. Each round gives one ratio of any two,
and what is quoted is the median of those ratios, with the quartiles between which half of the
rounds lie: the worst of them tells of the machine alone. The machine's own limits, its
multiply-adds and its reading of memory, take their turns like any candidate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from tileattn import _core

#: Seconds of rest before another's turn. Threads of a BLAS or an OpenMP runtime spin on for some
#: 30 ms after a call, and would take the cores from whoever is timed next.
PAUSE = 0.05
#: A turn repeats a call until this much time has passed, in seconds.
TURN = 0.02
#: The first call after a change of candidates takes up to 30% longer, if it takes less than this.
WARM_UP_BELOW = 0.2

#: A turn gives the seconds of one call.
Turn = Callable[[], float]
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Candidate:
    """`call(threads)` does the work and returns its result; `prepare(threads)` is not timed.

    One that is not `same` computes something else, and only its time is of interest; with
    `counted` it is only so many seconds of it, as the result tells.
    """

    call: Callable[[int], Any]
    prepare: Callable[[int], object] = lambda threads: None
    same: bool = True
    counted: Callable[[Any], float] | None = None


class Spread(NamedTuple):
    """Of the rounds' ratios: their median and quartiles."""

    median: float
    low: float
    high: float


def timed(candidate: Candidate, threads: int) -> Turn:
    """The turn of a candidate: one call that does not count, then calls for TURN seconds."""
    call, counted, seconds = candidate.call, candidate.counted, 0.0

    def turn() -> float:
        nonlocal seconds
        candidate.prepare(threads)
        if seconds < WARM_UP_BELOW:
            call(threads)
        calls, part, start = 0, 0.0, time.perf_counter()
        while True:
            result = call(threads)
            calls += 1
            passed = time.perf_counter() - start
            if counted is not None:
                part += counted(result)
            if passed >= TURN:
                seconds = passed / calls
                return seconds if counted is None else part / calls

    return turn


def at_fma_peak(flops: float, threads: int) -> Turn:
    """A turn that gives what so many float32 operations take at the machine's peak."""
    return lambda: flops / (1e9 * _core.measure_fma_peak("float32", threads))


def at_dot_peak(flops: float, threads: int) -> Turn:
    """The same in bfloat16 dot products, where the instruction set has them."""
    if not _core.measure_dot_peak(threads):
        return at_fma_peak(flops, threads)
    return lambda: flops / (1e9 * _core.measure_dot_peak(threads))


def interleave(
    turns: Mapping[Key, Turn], rounds: int, after_round: Callable[[], object] = lambda: None
) -> dict[Key, list[float]]:
    """Seconds of one call, for each candidate and round; read them through `ratio`."""
    seconds: dict[Key, list[float]] = {key: [] for key in turns}
    order = list(turns)
    for _ in range(rounds):
        for key in order:
            time.sleep(PAUSE)
            seconds[key].append(turns[key]())
        order.reverse()
        after_round()
    return seconds


def ratio(numerator: list[float], denominator: list[float]) -> Spread:
    """Round by round, numerator / denominator."""
    ratios = [a / b for a, b in zip(numerator, denominator, strict=True)]
    low, median, high = np.quantile(ratios, [0.25, 0.5, 0.75]).tolist()
    return Spread(median, low, high)
