"""Runs as pictures: speed beside each peer, the roofline, scaling and memory over T, operations.

All are on a white card, which reads on dark pages too, in colours that differ for colour-blind eyes
and in shapes that differ for all. SVGs have outlines for letters, so that they look the same
everywhere, and no date, so that the same run gives the same file.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from tileattn._command import duration
from tileattn.bench.arrays import Array
from tileattn.bench.needs import package
from tileattn.bench.records import OURS, Result, Run, Timing
from tileattn.bench.rounds import Spread

INK, GREY, RULE = "#1b1f24", "#5d6670", "#d9dde1"


class Look(NamedTuple):
    colour: str
    marker: str
    name: str


LOOKS = {
    OURS: Look(INK, "o", "tileattn"),
    "numpy": Look("#0072b2", "s", "NumPy"),
    "torch": Look("#d55e00", "^", "PyTorch"),
    "onnxruntime": Look("#009e73", "D", "onnxruntime"),
}
_MARKERS = {
    "blocks": "o",
    "attention": "s",
    "decoding": "^",
    "projections": "D",
    "options": "v",
    "varlen": "P",
    "scaling": "o",
}
_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": RULE,
    "axes.labelcolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "svg.fonttype": "path",
    "svg.hashsalt": "tileattn",
}
_HALO = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # behind text that lines cross
#: Where a label may stand: so many pixels from its point, nearest first, and in which directions.
_REACHES = (9, 16, 26, 38, 52, 68, 86, 106, 128, 152, 180)
_ANGLES = (0, 180, 90, 270, 30, 330, 150, 210, 60, 300, 120, 240)
_POINTS_TOGETHER = 14  # in one panel of the roofline, for their labels
_WIDTH = 10.0  # inches of every picture
_EDGE = 0.3
_HEADING = 0.38
_LINE = 0.19  # inches from one line of small text to the next


def draw(runs: Sequence[Run], folder: str) -> list[str]:
    """Every picture that the runs have something for, as SVG and PNG; the files' names.

    Of a cell that several runs have, the last one counts.
    """
    written = []
    with matplotlib.rc_context(_STYLE):
        for name, picture in {
            "speed": _speed,
            "roofline": _roofline,
            "scaling": _scaling,
            "memory": _memory,
        }.items():
            figure = picture(runs)
            if figure is not None:
                for kind in ("svg", "png"):
                    written.append(os.path.join(folder, f"{name}.{kind}"))
                    _save(figure, written[-1])
    return written


class Peer(NamedTuple):
    """The other bar of an operation; the ratio is the median of those within rounds."""

    seconds: float
    times_ours: float


class Operation(NamedTuple):
    """A bar of `operations`, and NumPy's where it was timed."""

    name: str
    seconds: float
    numpy: Peer | None = None


def operations(
    parts: Sequence[Operation], whole: Operation, title: str, subtitle: str, path: str
) -> None:
    """Where a block's time goes: its operations one by one, and all of it in one call."""
    with matplotlib.rc_context(_STYLE):
        _save(_operations(parts, whole, title, subtitle), path)


def _save(figure: Figure, path: str) -> None:
    # A date would make another file of the same run.
    metadata = {"Date": None} if path.endswith(".svg") else None
    figure.savefig(path, dpi=160, metadata=metadata)


# ------------------------------------------------------------------ what all share


def _card(height: float, title: str, subtitle: str, notes: Sequence[str] = ()) -> Figure:
    """A white figure so many inches high, with its title above and notes below."""
    figure = Figure(figsize=(_WIDTH, height), facecolor="white")
    FigureCanvasAgg(figure)
    x = _EDGE / _WIDTH
    figure.text(x, 1 - 0.32 / height, title, fontsize=14, fontweight="bold", va="center")
    figure.text(x, 1 - 0.60 / height, subtitle, color=GREY, va="center")
    for i, note in enumerate(reversed(notes)):
        figure.text(x, (0.22 + 0.17 * i) / height, note, color=GREY, fontsize=8, va="center")
    return figure


def _axes(figure: Figure, left: float, right: float, top: float, bottom: float) -> Any:
    """Axes whose margins are so many inches."""
    width, height = figure.get_size_inches()
    box = (
        left / width,
        bottom / height,
        (width - left - right) / width,
        (height - top - bottom) / height,
    )
    return figure.add_axes(box)


def _log_axis(axis: Any, ticks: Iterable[float], text: Callable[[float], str]) -> None:
    axis.set_major_locator(FixedLocator(list(ticks)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))


def _one_two_five(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten, from low to high."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = (digit * 10.0**exponent for exponent in exponents for digit in (1, 2, 5))
    return [value for value in values if low <= value <= high]


def _results(runs: Sequence[Run]) -> dict[str, dict[str, Result]]:
    """By group and cell."""
    found: dict[str, dict[str, Result]] = {}
    for run in runs:
        for group in run.groups:
            found.setdefault(group.name, {}).update((each.cell, each) for each in group.results)
    return {name: results for name, results in found.items() if results}


def _widest(result: Result) -> Timing:
    """On the most threads."""
    return max(result.timings, key=lambda timing: timing.threads)


def _fastest(timing: Timing) -> dict[str, str]:
    """By package, the fastest of its candidates."""
    found: dict[str, str] = {}
    for name in timing.seconds:
        owner = OURS if name == OURS else package(name)
        if owner is not None and (
            owner not in found or timing.ratio(name).median < timing.ratio(found[owner]).median
        ):
            found[owner] = name
    return {owner: found[owner] for owner in LOOKS if owner in found}


def _conditions(runs: Sequence[Run], owners: Iterable[str]) -> str:
    """What was measured, and on what, in a line."""
    run = runs[-1]
    threads = run.threads[-1]
    shown = [OURS, *owners]
    known = {name: version for each in runs for name, version in each.versions.items()}
    versions = [f"{look.name} {known[name]}" for name, look in LOOKS.items() if name in shown]
    number = f"{threads} thread{'s' * (threads > 1)}"
    return f"{run.machine['cpu']} ({run.isa}), {number};  {', '.join(versions)}"


# ------------------------------------------------------------------ speed


def _speed(runs: Sequence[Run]) -> Figure | None:
    """Each cell's peers as dots, at how many times tileattn's time they take."""
    rows: list[tuple[str, dict[str, Spread]]] = []  # that of a group's name has no dots
    for group, results in _results(runs).items():
        if group == "scaling":
            continue  # which has a picture of its own
        cells = []
        for result in results.values():
            timing = _widest(result)
            names = _fastest(timing)
            del names[OURS]
            if names:
                spreads = {owner: timing.ratio(name) for owner, name in names.items()}
                cells.append((result.cell, spreads))
        if cells:
            rows += [(group, {}), *cells]
    if not rows:
        return None
    all_spreads = [spread for _, row in rows for spread in row.values()]
    heights = [_LINE * len(row) + 0.13 if row else _HEADING for _, row in rows]
    top, bottom = 1.2, 0.95
    figure = _card(
        sum(heights) + top + bottom,
        "How many times as fast as each peer tileattn is",
        _conditions(runs, (owner for _, row in rows for owner in row)),
        [
            "Dots: median of the ratios of times within a round; lines: the middle half of the "
            "rounds. Each peer's fastest way.",
        ],
    )
    left = 0.5 + 0.072 * max(len(name) for name, row in rows if row)
    axes = _axes(figure, left, 0.4, top, bottom)
    axes.set_xscale("log")
    low = min(0.8, 0.85 * min(spread.low for spread in all_spreads))
    high = 1.5 * max(1.5, *(spread.high for spread in all_spreads))
    axes.set_xlim(low, high)
    axes.set_ylim(sum(heights), 0)
    axes.axvline(1, color=INK, linewidth=1)
    y, ticks = 0.0, []
    seen: set[str] = set()
    for (name, row), height in zip(rows, heights, strict=True):
        if not row:
            axes.text(
                0,
                y + 0.6 * _HEADING,
                name,
                fontweight="bold",
                va="center",
                transform=axes.get_yaxis_transform(),
            ).set_x((_EDGE - left) / (_WIDTH - left - 0.4))
            axes.axhline(y + _HEADING, color=RULE, linewidth=0.8)
        for i, (owner, spread) in enumerate(row.items()):
            look = LOOKS[owner]
            at = y + 0.065 + _LINE * (i + 0.5)
            axes.plot(
                [spread.low, spread.high],
                [at, at],
                color=look.colour,
                linewidth=2.2,
                alpha=0.4,
                solid_capstyle="butt",
            )
            axes.plot(
                [spread.median],
                [at],
                color=look.colour,
                marker=look.marker,
                markersize=5,
                linestyle="",
                label=look.name if owner not in seen else None,
            )
            axes.annotate(
                f"{_figures(spread.median)}×",
                (spread.high, at),
                (6, 0),
                textcoords="offset points",
                color=look.colour,
                fontsize=8,
                va="center",
                bbox=_HALO,
            )
            seen.add(owner)
        if row:
            ticks.append((y + height / 2, name))
        y += height
    axes.set_yticks([at for at, _ in ticks], [name for _, name in ticks], fontsize=8, color=INK)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    ticks_of_ratios = _one_two_five(low, high)
    if len(ticks_of_ratios) < 5:
        ticks_of_ratios = [tick for tick in (0.5, 0.7, 1, 1.5, 2, 3, 4, 5, 7) if low < tick < high]
    _log_axis(axes.xaxis, ticks_of_ratios, lambda value: f"{value:g}×")
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        bbox_transform=axes.transAxes,
        ncols=3,
        frameon=False,
        borderaxespad=0.3,
        handletextpad=0.1,
        columnspacing=1.4,
    )
    axes.set_xlabel("the peer's time / tileattn's  (right of 1×: tileattn is faster)", labelpad=6)
    return figure


def _figures(value: float) -> str:
    return f"{value:.2f}" if value < 1.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


# ------------------------------------------------------------------ roofline


class _Point(NamedTuple):
    """Of one cell: FLOPs a byte, GFLOP/s."""

    group: str
    result: Result
    at: tuple[float, float]


def _roofline(runs: Sequence[Run]) -> Figure | None:
    """Our cells as points below the machine's limits; many of them, group by group."""
    threads = max((roof.threads for run in runs for roof in run.roofs), default=0)
    best: dict[str, float] = {}
    for run in runs:
        for roof in run.roofs:
            if roof.threads == threads and roof.samples:
                best[roof.limit] = max(best.get(roof.limit, 0.0), *roof.samples)
    points = []
    for group, results in _results(runs).items():
        if group == "scaling":
            continue  # which has a picture of its own
        for result in results.values():
            rate = result.flops / 1e9 / statistics.median(_widest(result).seconds[OURS])
            points.append(_Point(group, result, (result.flops / result.bytes, rate)))
    if not points or not best:
        return None
    panels = {"": points}
    if len(points) > _POINTS_TOGETHER:
        panels = {
            group: [point for point in points if point.group == group]
            for group in dict.fromkeys(point.group for point in points)
        }
    top, bottom, panel = 0.95, 0.8, 5.2
    figure = _card(
        top + bottom + panel * len(panels),
        "What the machine allows, and what tileattn reaches",
        _conditions(runs, ()),
        [
            "Lines: the most that multiply-adds and reading from memory reached during the run. "
            "FLOPs of matrix products over visible pairs,",
            "bytes of each operation's operands, once. Hollow: the data may stay in caches, "
            "whose bandwidth is not a limit here.",
        ],
    )
    for i, (title, shown) in enumerate(panels.items()):
        axes = _axes(
            figure, 0.85, 0.5, top + panel * i, bottom + panel * (len(panels) - 1 - i) + 0.65
        )
        _below_roofs(axes, best, shown, named=not title)
        if title:
            axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK, pad=-2)
    return figure


def _below_roofs(
    axes: Any, best: dict[str, float], points: Sequence[_Point], *, named: bool
) -> None:
    flat = {"FMA peak": "multiply-adds"}
    if any(point.result.limit == "dot product peak" for point in points):
        flat["dot product peak"] = "bfloat16 dot products"
    flat = {limit: label for limit, label in flat.items() if limit in best}
    bandwidth, peak = best["read bandwidth"], max(best[limit] for limit in flat)
    ridge = peak / bandwidth
    left = min(x for x, _ in (point.at for point in points)) / 2
    right = 4 * max(ridge, *(point.at[0] for point in points))
    rates = [point.at[1] for point in points]
    low, high = min(rates) / 2.5, 1.6 * max(peak, *rates)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    axes.set_ylim(low, high)
    _log_axis(axes.xaxis, _one_two_five(left, right), lambda value: f"{value:g}")
    _log_axis(axes.yaxis, _one_two_five(low, high), lambda value: f"{value:g}")
    axes.set_xlabel("arithmetic intensity, FLOPs a byte")
    axes.set_ylabel("GFLOP/s")

    start = max(left, low / bandwidth)
    along = start * (ridge / start) ** 0.3
    roofs = [((start, start * bandwidth), (ridge, peak))]
    names = [(f"reading: {bandwidth:.0f} GB/s", (along, along * bandwidth), (-6, 4))]
    for limit, label in flat.items():
        roofs.append(((best[limit] / bandwidth, best[limit]), (right, best[limit])))
        names.append((f"{label}: {best[limit]:.0f} GFLOP/s", (right, best[limit]), (0, 4)))
    room = _Room()
    for begin, end in roofs:
        axes.plot([begin[0], end[0]], [begin[1], end[1]], color=GREY, linewidth=1.6)
        first, last = axes.transData.transform([begin, end])
        room.add_mark(_boxes(first, last, 2.0))
    for text, place, offset in names:
        note = axes.annotate(
            text,
            place,
            offset,
            textcoords="offset points",
            color=GREY,
            fontsize=8.5,
            ha="right",
            va="bottom",
        )
        room.add_text(note.get_window_extent().extents)

    for point in points:
        axes.plot(
            *point.at,
            marker=_MARKERS[point.group],
            color=INK,
            markerfacecolor=INK if "cold" in point.result.cell.split() else "white",
            markersize=6,
        )
        pixel = axes.transData.transform(point.at)
        room.add_mark(np.concatenate([pixel - 5, pixel + 5]))
    groups = dict.fromkeys(point.group for point in points)
    if len(groups) > 1:
        for group in groups:
            axes.plot([], [], marker=_MARKERS[group], color=INK, linestyle="", label=group)
        legend = axes.legend(loc="lower right", frameon=False, fontsize=8.5)
        room.add_text(legend.get_window_extent().extents)
    for point in sorted(points, key=lambda point: -point.at[1]):
        operation, _, sizes = point.result.label.partition(" ")
        _label(axes, f"{operation} {sizes}" if named else sizes, point.at, room)


class _Room:
    """What of a panel is taken, in pixels: by marks, which lines may cross, and by text."""

    def __init__(self) -> None:
        self.marks = np.empty((0, 4))  # boxes: left, low, right, high
        self.texts = np.empty((0, 4))

    def add_mark(self, *boxes: Array) -> None:
        self.marks = np.vstack([self.marks, *boxes])

    def add_text(self, *boxes: Array) -> None:
        self.texts = np.vstack([self.texts, *boxes])

    def has(self, box: Array, lead: Array) -> bool:
        """For a text, and a line that leads to it."""
        return not (
            _overlap(box, self.marks) or _overlap(box, self.texts) or _overlap(lead, self.texts)
        )


def _overlap(a: Array, b: Array) -> bool:
    """Whether any of the boxes a[n, 4] overlaps any of b[m, 4]."""
    a, b = a[:, None], b[None]
    return bool(((a[..., :2] < b[..., 2:]) & (b[..., :2] < a[..., 2:])).all(axis=-1).any())


def _boxes(start: Array, end: Array, reach: float) -> Array:
    """Small boxes along a line between two places, [n, 4]."""
    steps = 1 + int(np.hypot(*(end - start)) / (2 * reach))
    centres = start + np.linspace(0, 1, steps + 1)[:, None] * (end - start)
    return np.hstack([centres - reach, centres + reach])


def _label(axes: Any, text: str, place: tuple[float, float], room: _Room) -> None:
    """Writes beside a place, where nothing stands yet; far from it with a line that leads there."""
    at: Array = axes.transData.transform(place)
    sample = axes.text(0, 0, text, fontsize=8)
    size = np.array(sample.get_window_extent().size)
    sample.remove()
    inside: Array = axes.get_window_extent().extents
    # A line that crosses others where there is no other way.
    for may_cross, reach, angle in itertools.product((False, True), _REACHES, _ANGLES):
        direction = np.array([math.cos(math.radians(angle)), math.sin(math.radians(angle))])
        corner = at + reach * direction + size * (direction - 1) / 2
        box = np.concatenate([corner - 2, corner + size + 2])[None]
        lead = np.empty((0, 4))
        if reach > _REACHES[1]:
            lead = _boxes(at + 9 * direction, corner + size / 2, 2)
        is_inside = (box[0, :2] >= inside[:2]).all() and (box[0, 2:] <= inside[2:]).all()
        if is_inside and room.has(box, lead[:0] if may_cross else lead):
            break
    else:
        return  # no name is better than one on top of others
    room.add_text(box, lead)
    line = {"arrowstyle": "-", "color": GREY, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 4}
    axes.annotate(
        text,
        place,
        (corner - at) * 72 / axes.figure.dpi,
        textcoords="offset points",
        fontsize=8,
        va="bottom",
        bbox=_HALO,
        arrowprops={**line, "relpos": (0.5, 0.5)} if len(lead) else None,
    )


# ------------------------------------------------------------------ over T


class _Curve(NamedTuple):
    """A candidate's values over T, with what they spread between."""

    lengths: list[int]
    values: list[float]
    low: list[float]
    high: list[float]


def _scaling(runs: Sequence[Run]) -> Figure | None:
    """Time of a position, of attention and of a block, from short sequences to long ones."""
    results = _results(runs).get("scaling", {}).values()
    panels: list[tuple[str, dict[str, _Curve]]] = []
    for title, is_block in (("attention", False), ("block", True)):
        curves: dict[str, _Curve] = {}
        sizes: dict[str, Any] = {}
        for result in results:
            if ("D" in result.sizes) is not is_block:
                continue
            sizes = result.sizes
            timing = _widest(result)
            positions = sizes["B"] * sizes["T"]
            for owner, name in _fastest(timing).items():
                curve = curves.setdefault(owner, _Curve([], [], [], []))
                micros = 1e6 * np.quantile(timing.seconds[name], [0.25, 0.5, 0.75]) / positions
                curve.lengths.append(sizes["T"])
                for values, value in zip(curve[1:], micros[[1, 0, 2]], strict=True):
                    values.append(float(value))
        if curves:
            axes_of = "DNKH" if is_block else "NKH"
            shape = " ".join(f"{axis} {sizes[axis]}" for axis in axes_of)
            panels.append((f"{title}, {shape}{', causal' * sizes['causal']}", curves))
    if not panels:
        return None
    figure = _card(
        5.4,
        "Time a token, over the length of the sequence",
        _conditions(runs, (owner for _, curves in panels for owner in curves)),
        ["Medians of all rounds, and the middle half of them. Lower is better."],
    )
    width = (_WIDTH - 0.4) / len(panels)
    for i, (title, curves) in enumerate(panels):
        axes = _axes(figure, 0.8 + i * width, _WIDTH - (i + 1) * width + 0.75, 1.25, 0.95)
        _over_lengths(axes, curves, title, lambda value: f"{value:g} µs")
    return figure


def _memory(runs: Sequence[Run]) -> Figure | None:
    """The most that a call of attention takes beside its inputs, over T."""
    memory = next((run.memory for run in reversed(runs) if run.memory), None)
    if memory is None or not memory.results:
        return None
    curves: dict[str, _Curve] = {}
    for result in memory.results:
        for name, size in result.peak.items():
            # On a log axis nothing has no place; a page is the least that can be told.
            value = max(size, 4096) / 1e6
            curve = curves.setdefault(name, _Curve([], [], [], []))
            for values in (curve.values, curve.low, curve.high):
                values.append(value)
            curve.lengths.append(result.sizes["T"])
    sizes = memory.results[-1].sizes
    figure = _card(
        5.2,
        "Memory of a call of attention, beside its inputs",
        _conditions(runs, curves),
        [
            "Highest resident memory during the call, less that before it, each in a process of "
            "its own. It includes the result, which the dashed line shows.",
        ],
    )
    axes = _axes(figure, 0.95, 1.35, 1.25, 0.95)
    lengths = [result.sizes["T"] for result in memory.results]
    output = [result.result / 1e6 for result in memory.results]
    axes.plot(lengths, output, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(
        "the result",
        (lengths[len(lengths) // 2], output[len(lengths) // 2]),
        (6, -14),
        textcoords="offset points",
        color=GREY,
        fontsize=8.5,
    )
    shape = " ".join(f"{axis} {sizes[axis]}" for axis in "BNKH")
    _over_lengths(
        axes,
        curves,
        f"attention, {shape}",
        lambda value: f"{value:g} MB" if value < 1000 else f"{value / 1000:g} GB",
    )
    return figure


def _over_lengths(
    axes: Any, curves: dict[str, _Curve], title: str, text: Callable[[float], str]
) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for owner, curve in curves.items():
        look = LOOKS[owner]
        axes.fill_between(curve.lengths, curve.low, curve.high, color=look.colour, alpha=0.13, lw=0)
        axes.plot(
            curve.lengths,
            curve.values,
            color=look.colour,
            marker=look.marker,
            markersize=4.5,
            linewidth=2.2 if owner == OURS else 1.4,
            zorder=3 if owner == OURS else 2,
        )
    lengths = sorted({length for curve in curves.values() for length in curve.lengths})
    _log_axis(axes.xaxis, lengths, lambda value: f"{value:g}")
    low, high = axes.get_ylim()
    ticks = _one_two_five(low, high)
    if len(ticks) > 9:
        ticks = [tick for tick in ticks if f"{tick:e}".startswith("1")]
    _log_axis(axes.yaxis, ticks, text)
    axes.set_title(title, loc="left", fontsize=10, color=INK, pad=8)
    axes.set_xlabel("T, tokens")
    _name_ends(axes, curves)


def _name_ends(axes: Any, curves: dict[str, _Curve]) -> None:
    """Each curve's name at its end, moved apart where two would touch."""
    pixels = axes.figure.dpi * _LINE
    ends = {
        owner: axes.transData.transform((curve.lengths[-1], curve.values[-1]))
        for owner, curve in curves.items()
    }
    last = max(x for x, _ in ends.values())
    height = -math.inf
    for owner, (x, y) in sorted(ends.items(), key=lambda item: item[1][1]):
        offset = (0.0, 9.0)  # above the end of a shorter curve
        if x == last:
            height = max(y, height + pixels)
            offset = (8.0, (height - y) * 72 / axes.figure.dpi)
        axes.annotate(
            LOOKS[owner].name,
            (curves[owner].lengths[-1], curves[owner].values[-1]),
            offset,
            textcoords="offset points",
            color=LOOKS[owner].colour,
            fontweight="bold" if owner == OURS else "normal",
            ha="left" if x == last else "center",
            va="center",
            annotation_clip=False,
        )


# ------------------------------------------------------------------ operations


def _operations(parts: Sequence[Operation], whole: Operation, title: str, subtitle: str) -> Figure:
    bars = [*parts, whole]
    heights = [0.42 if bar.numpy is None else 0.62 for bar in bars]
    heights[-1] += 0.25  # a rule above the whole
    figure = _card(
        sum(heights) + 1.95,
        title,
        subtitle,
        ["Medians of the rounds; each operation by itself, in percent of their sum."],
    )
    axes = _axes(figure, 2.1, 0.4, 1.2, 0.75)
    total = sum(part.seconds for part in parts)
    longest = max(
        seconds
        for bar in bars
        for seconds in (bar.seconds, bar.numpy.seconds if bar.numpy else 0.0)
    )
    axes.set_xlim(0, 1.3 * longest)
    axes.set_ylim(sum(heights), 0)
    y, ticks = 0.0, []
    for bar, height in zip(bars, heights, strict=True):
        if bar is whole:
            axes.axhline(y + 0.125, color=GREY, linewidth=0.8)
            y, height = y + 0.25, height - 0.25
            label = duration(bar.seconds)
        else:
            part = bar.seconds / total
            label = f"{duration(bar.seconds)}   {f'{part:.0%}' if part >= 0.005 else '<1%'}"
        middle = y + height / 2
        ours = middle if bar.numpy is None else middle - 0.12
        _bar(axes, ours, bar.seconds, OURS, label)
        if bar.numpy is not None:
            label = f"{duration(bar.numpy.seconds)}   {_figures(bar.numpy.times_ours)}×"
            _bar(axes, middle + 0.12, bar.numpy.seconds, "numpy", label)
        ticks.append(middle)
        y += height
    axes.set_yticks(ticks, [bar.name for bar in bars], color=INK)
    axes.set_xticks([])
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    owners = [OURS, *["numpy"] * any(bar.numpy is not None for bar in bars)]
    for owner in owners:
        axes.barh([0], [0], color=LOOKS[owner].colour, label=LOOKS[owner].name)
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=2,
        frameon=False,
        borderaxespad=0.3,
        handlelength=1,
        handleheight=1,
    )
    return figure


def _bar(axes: Any, y: float, seconds: float, owner: str, text: str) -> None:
    axes.barh([y], [seconds], height=0.2, color=LOOKS[owner].colour)
    axes.annotate(
        text,
        (seconds, y),
        (5, 0),
        textcoords="offset points",
        color=LOOKS[owner].colour,
        fontsize=8.5,
        va="center",
    )
