"""Attention with options, against peers and the same call without them:
`python -m benchmarks.options`."""

from __future__ import annotations

from dataclasses import replace

from benchmarks import attention, peers
from benchmarks.arrays import Alignment
from benchmarks.cells import OPTIONS, Attention
from benchmarks.report import OURS, Work, run

PLAIN = "plain"


def prepare(cell: Attention, alignment: Alignment = "line") -> Work:
    work = attention.prepare(cell, alignment)
    plain = attention.prepare(cell.plain, alignment).candidates[OURS]
    return replace(work, candidates={**work.candidates, PLAIN: replace(plain, same=False)})


if __name__ == "__main__":
    run(__doc__, OPTIONS, prepare, [PLAIN, *peers.OPTIONS])
