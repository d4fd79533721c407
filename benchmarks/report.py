"""From prepared work to a table: what the commands share."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import cycle
from typing import Any

import numpy as np

import tileattn
from benchmarks.arrays import Array
from benchmarks.cells import Cell
from benchmarks.peers import MODULES, missing
from benchmarks.rounds import (
    Candidate,
    Spread,
    Turn,
    at_dot_peak,
    at_fma_peak,
    interleave,
    ratio,
    timed,
)
from tileattn import _core

OURS = "tileattn"
#: Ours on the same bfloat16, multiplied in float32.
WITHOUT_DOTS = "without dots"
_LIMIT = "limit"
_INSTALL = "pip install --editable '.[bench]'"


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
    streams: list[tuple[Array, ...]]
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


def run(
    description: str,
    cells: Sequence[Cell],
    prepare: Callable[..., Work],
    peers: Sequence[str],
) -> None:
    """The command: read its arguments, measure the cells, print the table as it grows."""
    options = _options(description, [cell.name for cell in cells], peers)
    _core.select_isa(options.isa)
    machine = {
        "isa": options.isa,
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "versions": {name: version(name) for name in MODULES},
    }
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    print(f"{options.isa}; {versions}; arrays aligned as {options.alignment}")
    print(f"Load of the last minute {machine['load']:.1f} on {machine['cpus']} CPUs.")
    print(f"Ratios are of times in one round: the median (lowest..highest) of {options.rounds}.")
    print("Above 1, ours is faster. The limit is the peak of FMAs (bfloat16: of dot products) for")
    print("GFLOP/s, reading for GB/s.")
    print()
    many = ["1 thread"] if len(options.threads) > 1 and 1 in options.threads else []
    ratios = [*many, *options.peers]
    columns = {
        "cell": max(len(cell.name) for cell in cells),
        "threads": 7,
        "time": 9,
        "rate": 13,
        "% of limit": 19,
        **dict.fromkeys(ratios, 18),
        **({"error": 7} if options.errors else {}),
    }
    _print_line(columns, dict(zip(columns, columns, strict=True)))
    rows = []
    for cell in cells:
        if options.only and not any(text in cell.name for text in options.only):
            continue
        try:
            work = prepare(cell, options.alignment)
        except ModuleNotFoundError as error:
            if error.name != "ml_dtypes":
                raise
            print(f"{cell.name} needs {error.name}: {_INSTALL}")
            continue
        for row in _measure(work, options):
            _print_line(columns, _as_text(row))
            rows.append(row)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"command": sys.argv, **machine, "rows": rows}, file, indent=1)


def _options(description: str, cells: Sequence[str], peers: Sequence[str]) -> argparse.Namespace:
    def part_of_a_name(text: str) -> str:
        if not any(text in name for name in cells):
            raise argparse.ArgumentTypeError(f"{text!r} is in no cell's name: {'; '.join(cells)}")
        return text

    def peer(name: str) -> str:
        if name not in peers:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(peers)}")
        if modules := missing(name):
            how = "pip install torch" if "torch" in modules else _INSTALL
            raise argparse.ArgumentTypeError(f"{name} needs {' and '.join(modules)}: {how}")
        return name

    installed = [name for name in peers if not missing(name)]
    more = f"; {_INSTALL} and torch bring more" if len(installed) < len(peers) else ""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], metavar="n")
    parser.add_argument("--rounds", type=int, default=11, metavar="n")
    parser.add_argument(
        "--only",
        nargs="+",
        type=part_of_a_name,
        metavar="text",
        help=f"cells whose names contain it, of: {'; '.join(cells)}",
    )
    parser.add_argument(
        "--peers",
        nargs="*",
        type=peer,
        default=installed,
        metavar="name",
        help=f"of those installed: {', '.join(installed) or 'none'} (all){more}",
    )
    parser.add_argument("--isa", choices=tileattn.available_isas(), default=tileattn.isa())
    parser.add_argument(
        "--alignment", choices=("line", "numpy"), default="line", help="of arrays, not of weights"
    )
    parser.add_argument("--errors", action="store_true", help="against float64, which takes long")
    parser.add_argument("--json", metavar="file", help="also write all figures there")
    return parser.parse_args()


def _measure(work: Work, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row for each number of threads, all of them measured in the same rounds."""
    names = [OURS, *(name for name in options.peers if name in work.candidates)]
    turns: dict[tuple[str, int], Turn] = {}
    for threads in options.threads:
        turns[_LIMIT, threads] = work.limit(threads)
        for name in names:
            turns[name, threads] = timed(work.candidates[name], threads)
    seconds = interleave(turns, options.rounds)
    errors = {}
    if options.errors:
        exact = work.exact()
        for name in names:
            if work.candidates[name].same:
                errors[name] = relative_error(work.candidates[name].call(options.threads[0]), exact)
    amount, unit = work.rate
    for threads in options.threads:
        ours = seconds[OURS, threads]
        ratios = {name: ratio(seconds[name, threads], ours) for name in names[1:]}
        if 1 in options.threads and threads > 1:
            ratios["1 thread"] = ratio(seconds[OURS, 1], ours)
        yield {
            "cell": work.cell.name,
            "threads": threads,
            "seconds": statistics.median(ours),
            "rate": amount / statistics.median(ours),
            "unit": unit,
            "of_limit": ratio(seconds[_LIMIT, threads], ours),
            "ratios": ratios,
            "errors": errors,
        }


def _as_text(row: dict[str, Any]) -> dict[str, str]:
    def spread(of: Spread, scale: float, digits: int) -> str:
        median, low, high = (f"{scale * value:.{digits}f}" for value in of)
        return f"{median} ({low}..{high})"

    return {
        "cell": row["cell"],
        "threads": str(row["threads"]),
        "time": _duration(row["seconds"]),
        "rate": f"{row['rate']:.1f} {row['unit']}",
        "% of limit": spread(row["of_limit"], 100, 1),
        **{name: spread(of, 1, 2) for name, of in row["ratios"].items()},
        "error": ", ".join(f"{error:.1e} {name}" for name, error in row["errors"].items()),
    }


def _print_line(columns: dict[str, int], cells: dict[str, str]) -> None:
    parts: Iterable[str] = (
        cells.get(name, "-").ljust(width) if name == "cell" else cells.get(name, "-").rjust(width)
        for name, width in columns.items()
    )
    print("  ".join(parts), flush=True)


def _duration(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.2f} {unit}"
    return f"{seconds * 1e6:.1f} us"
