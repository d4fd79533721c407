"""A run as text: a heading, a table for each group, the machine's limits."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from tileattn._command import duration
from tileattn.bench.records import (
    OURS,
    GroupResults,
    Memory,
    MemoryResults,
    Result,
    Run,
)
from tileattn.bench.rounds import Spread, ratio
from tileattn.bench.work import PARTS
from tileattn.cost import format_bytes

_ONE_THREAD = "1 thread"
_UNITS = {"FMA peak": "GFLOP/s", "dot product peak": "GFLOP/s", "read bandwidth": "GB/s"}


def text(run: Run) -> str:
    """All of it, as it is printed while it is measured."""
    lines = [*heading(run)]
    for group in run.groups:
        table = Table(run, group)
        lines += table.heading()
        for cell in group.cells:
            lines += table.rows(group, cell)
    if run.memory is not None:
        lines += memory_heading(run.memory)
        for result in run.memory.results:
            lines += memory_rows(run.memory, result)
    return "\n".join([*lines, *ending(run)])


def heading(run: Run) -> list[str]:
    versions, machine = dict(run.versions), run.machine
    packages = [
        f"tileattn {versions.pop('tileattn')} ({run.isa})",
        f"numpy {versions.pop('numpy')} ({versions.pop('blas')})",
        *(f"{name} {version}" for name, version in versions.items()),
    ]
    load = ""
    if machine["load"] is not None:
        load = f", load of the last minute {machine['load']:.1f}"
    caches = ", ".join(f"{name} {format_bytes(size)}" for name, size in machine["caches"].items())
    lines = [
        ", ".join(packages),
        f"{machine['cpu']}, {machine['cpus']} CPUs" + load,
        *[f"Caches: {caches}"] * bool(caches),
        f"{run.date}, {machine['os']}",
    ]
    if run.not_installed:
        how = "; ".join(f"{name} ({how})" for name, how in run.not_installed.items())
        lines.append(f"Left out, since not installed: {how}")
    if run.groups:
        lines += [
            "",
            f"Ratios are of times in one round: the median (quartiles) of {run.rounds}.",
            "Above 1, tileattn is faster; with %, a part of its time. The limit is the peak of",
            "FMAs (with bfloat16, of dot products) for GFLOP/s, reading for GB/s. Arrays are",
            f"aligned as {run.alignment}.",
        ]
    return lines


class Table:
    """The table of a group; cells may still be missing when it is made."""

    def __init__(self, run: Run, group: GroupResults) -> None:
        self._name = group.name
        many = [_ONE_THREAD] * (len(run.threads) > 1 and 1 in run.threads)
        self._widths = {
            "cell": max(map(len, group.cells)),
            "threads": 7,
            "time": 8,
            "rate": 14,
            "% of limit": 20,
            **dict.fromkeys([*many, *group.peers], 18),
            **({"error": 7} if run.errors else {}),
        }

    def heading(self) -> list[str]:
        return ["", self._name, self._line({name: name for name in self._widths})]

    def rows(self, group: GroupResults, cell: str) -> Iterator[str]:
        """Of a cell, on each number of threads, or why there are none."""
        if cell in group.skipped:
            yield f"{cell} {group.skipped[cell]}"
        for result in group.results:
            if result.cell == cell:
                yield from map(self._line, _cells_of(result))

    def _line(self, cells: dict[str, str]) -> str:
        texts = ((cells.get(name, "-"), width) for name, width in self._widths.items())
        (cell, width), *others = texts
        return "  ".join([cell.ljust(width), *(text.rjust(width) for text, width in others)])


def _cells_of(result: Result) -> Iterator[dict[str, str]]:
    on_one = next((t.seconds[OURS] for t in result.timings if t.threads == 1), None)
    for timing in result.timings:
        ours = timing.seconds[OURS]
        seconds = statistics.median(ours)
        ratios = {name: timing.ratio(name) for name in timing.seconds if name != OURS}
        if on_one is not None and timing.threads > 1:
            ratios[_ONE_THREAD] = ratio(on_one, ours)
        yield {
            "cell": result.cell,
            "threads": str(timing.threads),
            "time": duration(seconds),
            "rate": f"{result.amount / seconds:.1f} {result.unit}",
            "% of limit": _spread(timing.of_limit, 100, 1),
            **{
                name: _spread(of, 100, 0) + " %" if name in PARTS else _spread(of, 1, 2)
                for name, of in ratios.items()
            },
            "error": ", ".join(f"{error:.1e} {name}" for name, error in result.errors.items()),
        }


def _spread(of: Spread, scale: float, digits: int) -> str:
    median, low, high = (f"{scale * value:.{digits}f}" for value in of)
    return f"{median} ({low}..{high})"


def memory_heading(memory: MemoryResults) -> list[str]:
    columns = ["result", OURS, *memory.peers]
    names = _memory_line(memory, "cell", "threads", columns)
    return ["", "memory, at the peak of a call, beside its inputs", names]


def memory_rows(memory: MemoryResults, result: Memory) -> Iterator[str]:
    """Of a cell, and why candidates failed on it."""
    sizes = {"result": result.result, **result.peak}
    columns = [
        format_bytes(sizes[name]) if name in sizes else "-"
        for name in ("result", OURS, *memory.peers)
    ]
    yield _memory_line(memory, result.cell, str(result.threads), columns)
    for name, why in result.failed.items():
        yield f"{result.cell}: {name} failed: {why}"


def _memory_line(memory: MemoryResults, cell: str, threads: str, columns: Sequence[str]) -> str:
    width = max(map(len, memory.cells))
    return "  ".join([cell.ljust(width), threads.rjust(7), *(f"{c:>9}" for c in columns)])


def ending(run: Run) -> list[str]:
    lines = []
    if any(roof.samples for roof in run.roofs):
        lines.append("")
    for roof in run.roofs:
        if roof.samples:
            best = f"{max(roof.samples):.1f} {_UNITS[roof.limit]}"
            lines.append(f"{roof.limit} on {_threads(roof.threads)}: {best} at best")
    if run.interrupted:
        done = sum(len(group.results) + len(group.skipped) for group in run.groups)
        planned = sum(len(group.cells) for group in run.groups)
        if run.memory is not None:
            done, planned = done + len(run.memory.results), planned + len(run.memory.cells)
        lines += ["", f"Interrupted: {done} of {planned} cells were measured."]
    return lines


def _threads(number: int) -> str:
    return f"{number} thread{'s' * (number > 1)}"
