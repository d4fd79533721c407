"""Attention and blocks from short sequences to long ones."""

from __future__ import annotations

from tileattn.bench import attention, blocks
from tileattn.bench.arrays import Alignment
from tileattn.bench.cells import Attention, Block
from tileattn.bench.work import Work


def prepare(cell: Attention | Block, alignment: Alignment = "line") -> Work:
    if isinstance(cell, Attention):
        return attention.prepare(cell, alignment)
    return blocks.prepare(cell, alignment)
