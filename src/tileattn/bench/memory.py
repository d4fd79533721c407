"""What attention takes beside its inputs, at its peak: each candidate in a process of its own.

A new process prepares the inputs, calls the candidate once on a short sequence (so that code and
threads are there), sets Linux's high-water mark of its resident memory back to what is resident,
makes the call and reads the mark. The result, which each candidate allocates, is part of it; a
library that keeps memory for later calls has kept little from the short one.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

import tileattn
from tileattn._command import CommandError
from tileattn._values import shortened
from tileattn.bench.arrays import normal
from tileattn.bench.cells import Attention
from tileattn.bench.records import OURS

_SHORT = 16
_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def check_system() -> None:
    if not _CLEAR_REFS.exists():
        raise CommandError(f"memory: there is no {_CLEAR_REFS}, which Linux has")


class ProcessError(Exception):
    """A candidate's process ended without a figure; the text says why."""


def peak(cell: Attention, name: str, threads: int, isa: str) -> int | None:
    """Bytes; None if the candidate does not take the cell."""
    done = subprocess.run(
        [sys.executable, "-m", __name__, json.dumps([asdict(cell), name, threads])],
        env={**os.environ, "TILEATTN_ISA": isa},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise ProcessError(shortened(last))
    bytes_taken: int | None = json.loads(done.stdout)
    return bytes_taken


def _measure(cell: Attention, name: str, threads: int) -> int | None:
    call = _call(cell, name, threads)
    if call is None:
        return None
    if short := _call(replace(cell, T=_SHORT, S=_SHORT), name, threads):
        short()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)  # what was freed is given back, and counts if the call takes it again
    _CLEAR_REFS.write_text("5")
    before = _resident("VmRSS")
    call()
    return _resident("VmHWM") - before


def _call(cell: Attention, name: str, threads: int) -> Callable[[], object] | None:
    """Without an array for the result, which `attention.prepare` gives to those that take one."""
    rng = np.random.default_rng(0)
    q, k, v = (
        normal(rng, (cell.B, length, heads, cell.H))
        for length, heads in ((cell.T, cell.N), (cell.S, cell.K), (cell.S, cell.K))
    )
    if name == OURS:
        return lambda: tileattn.dot_product_attention(q, k, v, num_threads=threads)
    from tileattn.bench import peers  # which ours is to be measured without
    from tileattn.bench.work import rotation

    candidate = peers.attention(q, [k], [v], rotation(1), causal=False).get(name)
    if candidate is None:
        return None
    candidate.prepare(threads)
    return lambda: candidate.call(threads)


def _resident(field: str) -> int:
    (kilobytes,) = re.findall(rf"^{field}:\s*(\d+) kB", _STATUS.read_text(), flags=re.MULTILINE)
    return 1024 * int(kilobytes)


if __name__ == "__main__":
    sizes, candidate_name, thread_count = json.loads(sys.argv[1])
    print(json.dumps(_measure(Attention(**sizes), candidate_name, thread_count)))
