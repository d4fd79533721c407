"""The command `tileattn bench`: what it takes, and the run from its arguments to its pictures."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.util import find_spec
from typing import Any

import tileattn
from tileattn import _core
from tileattn._command import CommandError, blaming, check_output, whole_number
from tileattn.bench import machine, memory, needs, records, report
from tileattn.bench.cells import SHORT, Attention, Cell
from tileattn.bench.groups import GROUPS, MEMORY, Group
from tileattn.bench.records import OURS, GroupResults, Memory, MemoryResults, Run
from tileattn.bench.work import measure
from tileattn.config import resolve_threads

_DESCRIPTION = """\
Measure tileattn beside the peers that are installed, all in turns within short
rounds, and print their times as ratios. Without a GROUP a short selection is
measured, which takes a minute or two on two cores: three blocks, attention of
two prompts and of a decoding step, a small model's step and two projections."""
_EPILOG = "groups:\n" + "\n".join(f"  {g.name:12} {g.about}" for g in GROUPS.values())
_MODULES = ("torch", "onnxruntime", "ml_dtypes")  # whose versions a run tells, beside NumPy's
#: Without one of these some cells are left out.
_OPTIONAL = ("ml_dtypes",)

Plan = list[tuple[Group, list[Cell]]]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = _DESCRIPTION
    parser.epilog = _EPILOG
    parser.set_defaults(command=run)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help="see below")
    parser.add_argument(
        "--only", nargs="+", metavar="CELL", help="cells whose names contain one of these texts"
    )
    parser.add_argument("--list", action="store_true", help="list the cells instead")
    parser.add_argument(
        "--threads",
        type=whole_number(1),
        nargs="+",
        metavar="n",
        help="numbers of threads (1 and all allowed)",
    )
    parser.add_argument("--rounds", type=whole_number(1), default=11, metavar="n", help="(11)")
    parser.add_argument(
        "--peers",
        nargs="*",
        metavar="PEER",
        help=f"of {', '.join(needs.PACKAGES)}, or names of columns (all that are installed)",
    )
    parser.add_argument("--isa", choices=tileattn.available_isas(), help="instruction set (best)")
    parser.add_argument(
        "--alignment",
        choices=("line", "numpy"),
        default="line",
        help="of arrays, not of weights (line)",
    )
    parser.add_argument(
        "--errors", action="store_true", help="also errors against float64, which takes long"
    )
    parser.add_argument("--json", metavar="FILE", help="write all of the run there")
    parser.add_argument("--plot", metavar="FOLDER", help="draw pictures there (SVG and PNG)")
    parser.add_argument(
        "--from",
        dest="files",
        nargs="+",
        metavar="FILE",
        help="measure nothing: print and draw what --json wrote",
    )


def run(options: argparse.Namespace) -> int:
    """All of the command; its exit status."""
    if options.files:
        return _show(options)
    if options.list:
        _print_cells(_plan(options.groups or list(GROUPS), options.only or []))
        return 0
    plan = _plan(options.groups, options.only or [])
    columns = {group.name: _columns(group, options.peers) for group, _ in plan}
    if options.json:
        check_output("--json", options.json)
    if options.plot:
        _check_plot(options.plot)
    if any(group.name == MEMORY for group, _ in plan):
        memory.check_system()
    with blaming("--threads", ValueError):
        threads = sorted({resolve_threads(n) for n in options.threads or [1, None]})
    before = _core.active_isa()
    _core.select_isa(options.isa or before)
    try:
        done = _measure(plan, columns, options, threads)
    finally:
        _core.select_isa(before)
    if options.json:
        records.save(done, options.json)
        print(f"Written: {options.json}")
    if options.plot and not done.interrupted:
        _draw([done], options.plot)
    if done.interrupted:
        return 130
    peaks = done.memory.results if done.memory else []
    return 1 if any(OURS in each.failed for each in peaks) else 0


# ------------------------------------------------------------------ what to measure


def _plan(names: Sequence[str], only: Sequence[str]) -> Plan:
    for name in names:
        if name not in GROUPS:
            raise CommandError(f"GROUP {name!r} is none of {', '.join(GROUPS)}")
    if names or only:
        chosen: dict[str, Iterable[Cell]] = {
            name: group.cells for name, group in GROUPS.items() if name in (names or GROUPS)
        }
    else:
        chosen = {**SHORT}
    for text in only:
        if not any(text in cell.name for cells in chosen.values() for cell in cells):
            where = f"{' '.join(names)} --list".lstrip()
            raise CommandError(
                f"--only {text!r} is in no cell's name (tileattn bench {where} shows them)"
            )
    plan = [
        (GROUPS[name], [c for c in cells if not only or any(text in c.name for text in only)])
        for name, cells in chosen.items()
    ]
    return [(group, cells) for group, cells in plan if cells]


def _columns(group: Group, asked: Sequence[str] | None) -> list[str]:
    """The group's peers that are to be measured."""
    known = [*needs.PACKAGES, *(peer for each in GROUPS.values() for peer in each.peers)]
    for name in asked or ():
        if name not in known:
            raise CommandError(f"--peers {name!r} is none of {', '.join(dict.fromkeys(known))}")
        if modules := needs.missing(name):
            how = needs.PACKAGES[needs.package(name) or name]
            raise CommandError(f"--peers {name} needs {' and '.join(modules)}: {how}")
    return [
        name
        for name in group.peers
        if not needs.missing(name)
        and (asked is None or name in asked or needs.package(name) in asked)
    ]


def _print_cells(plan: Plan) -> None:
    short = {cell for cells in SHORT.values() for cell in cells}
    for group, cells in plan:
        print(f"{group.name}: {group.about}")
        for cell in cells:
            print(f"  {'*' if cell in short else ' '} {cell.name}")
    print("* is measured where no group is named.")


# ------------------------------------------------------------------ measuring


class _Progress:
    """Lines on stdout, and a bar on stderr where that is a terminal and tqdm is installed."""

    def __init__(self, total: int) -> None:
        self._bar: Any = None
        if find_spec("tqdm") is not None:
            from tqdm import tqdm

            # None: only on a terminal.
            disable = None if sys.stderr is not None else True
            self._bar = tqdm(total=total, unit="round", leave=False, disable=disable)

    def say(self, lines: Iterable[str]) -> None:
        with self._bar.external_write_mode() if self._bar else _as_it_is():
            for line in lines:
                print(line, flush=True)

    def begin(self, cell: str) -> None:
        if self._bar:
            self._bar.set_description(cell)

    def step(self, rounds: int = 1) -> None:
        if self._bar:
            self._bar.update(rounds)

    def close(self) -> None:
        if self._bar:
            self._bar.close()


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


def _measure(
    plan: Plan, columns: dict[str, list[str]], options: argparse.Namespace, threads: list[int]
) -> Run:
    done = Run(
        command=["tileattn", *options.given],
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine.describe(),
        versions=machine.versions(_MODULES),
        isa=_core.active_isa(),
        alignment=options.alignment,
        threads=threads,
        rounds=options.rounds,
        errors=options.errors,
        not_installed={} if options.peers is not None else needs.not_installed(),
    )
    timed = [(group, cells) for group, cells in plan if group.name != MEMORY]
    for group, cells in timed:
        done.groups.append(
            GroupResults(group.name, [cell.name for cell in cells], columns[group.name])
        )
    total = options.rounds * sum(len(cells) for _, cells in timed)
    cells_of_memory = [cell for group, cells in plan if group.name == MEMORY for cell in cells]
    if cells_of_memory:
        names = [cell.name for cell in cells_of_memory]
        done.memory = MemoryResults(names, columns[MEMORY])
        total += len(names)
    progress = _Progress(total)
    try:
        progress.say(report.heading(done))
        if timed:
            _measure_times(timed, done, options, progress)
        if done.memory is not None:
            _measure_memory(cells_of_memory, done.memory, done, progress)
    except KeyboardInterrupt:
        done.interrupted = True
    finally:
        progress.close()
    progress.say(report.ending(done))
    return done


def _measure_times(plan: Plan, done: Run, options: argparse.Namespace, progress: _Progress) -> None:
    limits = machine.Roofs(done.threads)
    done.roofs = limits.roofs
    for (group, cells), results in zip(plan, done.groups, strict=True):
        table = report.Table(done, results)
        progress.say(table.heading())
        for cell in cells:
            progress.begin(cell.name)
            for _ in range(2):
                limits.sample()
            try:
                work = group.prepare(cell, options.alignment)
            except ModuleNotFoundError as error:
                if error.name not in _OPTIONAL:
                    raise
                results.skipped[cell.name] = f"needs {error.name}: pip install {error.name}"
                progress.step(done.rounds)
            else:
                results.results.append(
                    measure(
                        work,
                        results.peers,
                        done.threads,
                        done.rounds,
                        options.errors,
                        progress.step,
                    )
                )
            progress.say(table.rows(results, cell.name))


def _measure_memory(
    cells: Sequence[Cell], results: MemoryResults, done: Run, progress: _Progress
) -> None:
    progress.say(report.memory_heading(results))
    threads = done.threads[-1]
    for cell in cells:
        assert isinstance(cell, Attention)
        progress.begin(f"memory {cell.name}")
        size = 4 * cell.B * cell.T * cell.N * cell.H
        result = Memory(cell.name, asdict(cell), threads, size, {})
        for name in (OURS, *results.peers):
            try:
                peak = memory.peak(cell, name, threads, done.isa)
            except memory.ProcessError as error:
                result.failed[name] = str(error)
            else:
                if peak is not None:
                    result.peak[name] = peak
        results.results.append(result)
        progress.say(report.memory_rows(results, result))
        progress.step()


# ------------------------------------------------------------------ showing


def _show(options: argparse.Namespace) -> int:
    """What files have, as if it had just been measured."""
    for name in ("groups", "only", "list", "threads", "peers", "isa", "errors", "json"):
        if getattr(options, name):
            option = "GROUP" if name == "groups" else f"--{name}"
            raise CommandError(f"{option} and --from do not go together")
    runs = [records.load(path) for path in options.files]
    if options.plot:
        _check_plot(options.plot)
    # Whatever a file that was changed by hand says instead of what was measured.
    wrong = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
    for i, (path, each) in enumerate(zip(options.files, runs, strict=True)):
        with blaming(f"--from {path} is damaged", *wrong):
            text = report.text(each)
        print("\n" * (i > 0) + text)
    if options.plot:
        with blaming(f"--from {' '.join(options.files)}: nothing can be drawn of this", *wrong):
            _draw(runs, options.plot)
    return 0


def _check_plot(folder: str) -> None:
    needs.check_matplotlib()
    with blaming(f"--plot {folder}", OSError, ValueError):  # of a zero byte
        os.makedirs(folder, exist_ok=True)


def _draw(runs: Sequence[Run], folder: str) -> None:
    from tileattn.bench import pictures

    if len({(each.machine["cpu"], each.isa, each.threads[-1]) for each in runs}) > 1:
        raise CommandError(
            "--plot: the files are of different machines, instruction sets or numbers of threads"
        )
    versions: dict[str, set[str]] = {}
    for each in runs:
        for name, version in each.versions.items():
            versions.setdefault(name, set()).add(version)
    if several := [name for name, found in versions.items() if len(found) > 1]:
        raise CommandError(f"--plot: the files are of different versions of {', '.join(several)}")
    with blaming(f"--plot {folder}", OSError):
        paths = pictures.draw(runs, folder)
    print(f"Drawn: {', '.join(paths) or 'nothing'}")
