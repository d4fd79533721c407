"""The groups of cells that `tileattn bench` knows, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from tileattn.bench import cells, needs
from tileattn.bench.cells import Cell
from tileattn.bench.work import FLOAT32, IN_PARTS, PADDED, PARTS, PLAIN, WITHOUT_DOTS, Work


@dataclass(frozen=True)
class Group:
    """`peers` are the columns beside tileattn's: other packages, or itself called otherwise."""

    name: str
    about: str
    cells: tuple[Cell, ...]
    peers: tuple[str, ...]

    @property
    def prepare(self) -> Callable[..., Work]:
        """Makes a cell's work; imports the peers that are installed."""
        prepare: Callable[..., Work] = import_module(f"tileattn.bench.{self.name}").prepare
        return prepare


#: Bytes instead of seconds.
MEMORY = "memory"

GROUPS = {
    group.name: group
    for group in (
        Group(
            "blocks",
            "whole blocks, also called in parts",
            cells.BLOCKS,
            (IN_PARTS, *needs.BLOCK),
        ),
        Group(
            "attention", "attention alone, prompts and decoding", cells.ATTENTION, needs.ATTENTION
        ),
        Group(
            "decoding",
            "steps of a block with its cache, and their parts",
            cells.DECODING,
            (IN_PARTS, *PARTS, *needs.DECODING),
        ),
        Group(
            "projections",
            "rows times weights, also of fewer bits",
            cells.PROJECTIONS,
            (FLOAT32, WITHOUT_DOTS, *needs.LINEAR),
        ),
        Group(
            "options",
            "bias, mask, window, bfloat16, int8, against none of them",
            cells.OPTIONS,
            (PLAIN, WITHOUT_DOTS, *needs.OPTIONS),
        ),
        Group("varlen", "packed sequences against padded ones", cells.VARLEN, (PADDED,)),
        Group("scaling", "attention and blocks, T from 64 to 8192", cells.SCALING, needs.ATTENTION),
        Group(MEMORY, "what attention takes beside its inputs, over T", cells.MEMORY, needs.BLOCK),
    )
}
