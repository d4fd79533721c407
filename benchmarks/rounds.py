"""Fair timing on a noisy machine: candidates take turns, and a figure is the median of its turns.

Absolute times prove little where other work shares the machine. So candidates run in turn within
one process, every turn is preceded by one unmeasured call and a pause (the threads of another
library's pool may still be spinning), and what is quoted is a ratio of medians within the run:
against a peer, or against the machine's own multiply-add peak, which takes its turn like any other
candidate.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

#: Long enough for an OpenMP or OpenBLAS pool to go to sleep, in seconds.
PAUSE = 0.01
#: A turn repeats a call until this much time has passed, in seconds.
TURN = 0.02


def interleave(
    candidates: Mapping[str, Callable[[], object]], rounds: int = 11
) -> dict[str, list[float]]:
    """Seconds of one call, for each candidate and round; read the medians, not the minima."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, call in candidates.items():
            time.sleep(PAUSE)
            call()
            calls, start = 0, time.perf_counter()
            while True:
                call()
                calls += 1
                passed = time.perf_counter() - start
                if passed >= TURN:
                    break
            seconds[name].append(passed / calls)
    return seconds


def medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in seconds.items()}
