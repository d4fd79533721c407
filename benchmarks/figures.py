"""The figures of README and guide, from what was measured: tables and pictures.

    python -m benchmarks.figures

writes them anew from the files in `benchmarks/measured`, each of which names its command and its
machine. Tables stand below a comment with their name.
"""

import json
import re
import shlex
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tileattn.bench import records
from tileattn.bench.needs import package
from tileattn.bench.records import Result, Run
from tileattn.bench.rounds import ratio
from tileattn.bench.work import FLOAT32, PLAIN

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *(ROOT / "docs" / "guide" / f"{name}.md" for name in ("measured", "precision")),
]
MEASURED = ROOT / "benchmarks" / "measured"
PICTURES = ROOT / "docs" / "pictures"
#: Of files of `tileattn bench`, the pictures that are shown, and their names there.
DRAWN = {
    "short": {"speed": "speed"},
    "all": {"speed": "speed-all", "roofline": "roofline"},
    "lengths": {"scaling": "scaling", "memory": "memory"},
}
#: A table, below a comment with its name.
PLACE = re.compile(r"(<!-- measured: (\S+) -->\n\n```\n)(.*?)(```\n)", re.DOTALL)
NAMES = {"numpy": "NumPy", "torch": "PyTorch", "transformers": "transformers"}


def run(name: str) -> Run:
    return records.load(str(MEASURED / f"{name}.json"))


def measured(name: str) -> Any:
    return json.loads((MEASURED / f"{name}.json").read_text("utf-8"))


def written(text: str) -> str:
    """A page with its tables as they were measured."""
    return PLACE.sub(lambda place: place[1] + TABLES[place[2]]() + place[4], text)


# ------------------------------------------------------------------ tables


def _lines(heading: str, commands: Sequence[str], columns: Iterable[Sequence[str]]) -> str:
    """Rows whose first column is set left and whose others are set right, below how they came."""
    rows = list(columns)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [heading, *commands, ""]
    for first, *others in rows:
        cells = [first.ljust(widths[0])]
        cells += [each.rjust(width) for each, width in zip(others, widths[1:], strict=True)]
        lines.append("   ".join(cells).rstrip())
    return "".join(line + "\n" for line in lines)


def _machine(document: Mapping[str, Any], threads: int, packages: Sequence[str]) -> str:
    versions = ", ".join(f"{NAMES[name]} {document['versions'][name]}" for name in packages)
    number = f"{threads} thread{'s' * (threads > 1)}"
    return f"{document['machine']['cpu']} ({document['isa']}), {number}; {versions}"


def _times(value: float) -> str:
    return f"{value:.1f} x" if value >= 1.995 else f"{value:.2f} x"


def _fastest(result: Result, names: Iterable[str]) -> str:
    """How many times our time the fastest of them takes, on the most threads."""
    timing = max(result.timings, key=lambda timing: timing.threads)
    medians = [timing.ratio(name).median for name in names if name in timing.seconds]
    return _times(min(medians)) if medians else "-"


def bfloat16() -> str:
    """bfloat16 beside our own float32 and PyTorch's bfloat16."""
    beside = run("bfloat16")
    rows = [("", "float32", "PyTorch, bfloat16")]
    for group in beside.groups:
        torch = [name for name in group.peers if package(name) == "torch"]
        for result in group.results:
            rows.append(
                (
                    result.cell.replace(" bfloat16", ""),
                    _fastest(result, [PLAIN, FLOAT32]),
                    _fastest(result, torch),
                )
            )
    heading = _machine(vars(beside), beside.threads[-1], ["torch"])
    return _lines(heading, [shlex.join(beside.command)], rows)


def smollm2() -> str:
    """SmolLM2's speed with our block, and how many times that of the others it is."""
    documents = [measured("smollm2-short"), measured("smollm2-long")]
    peers = [name for name in documents[0]["seconds"] if name != "tileattn"]
    rows = [("", "tileattn", *(NAMES[name] for name in peers))]
    for document in documents:
        count = document["tokens"]["prompt"]
        rows.append((f"prompt of {count} tokens", *_speeds(document, "prompt", peers)))
    rows.append(("answer, a token at a time", *_speeds(documents[0], "answer", peers)))
    heading = _machine(documents[0], 1, peers)
    short, long = (shlex.join(document["command"]) for document in documents)
    return _lines(heading, [short, long + " < LICENSE"], rows)


def _speeds(document: Mapping[str, Any], part: str, peers: Sequence[str]) -> list[str]:
    seconds = {name: parts[part] for name, parts in document["seconds"].items()}
    speed = document["tokens"][part] / statistics.median(seconds["tileattn"])
    return [
        f"{speed:.0f} tokens/s",
        *(_times(ratio(seconds[name], seconds["tileattn"]).median) for name in peers),
    ]


def precisions() -> str:
    """What fewer bits cost and bring in two models."""
    language, encoder = measured("precisions-smollm2"), measured("precisions-minilm")
    cosines = {row["weights"]: row["cosine"] for row in encoder["rows"]}
    first = language["rows"][0]
    rows = [
        ("weights", "cache", "perplexity", "prompt", "answer", "weights", "cache", "process",
         "MiniLM"),
    ]  # fmt: skip
    for row in language["rows"]:
        is_first = row is first
        change = 100 * (row["perplexity"] / first["perplexity"] - 1)
        speeds = [
            "" if is_first else _times(ratio(first[part], row[part]).median)
            for part in ("prompt", "answer")
        ]
        sizes = [f"{row[f'{name}_bytes'] / 1e6:.0f} MB" for name in ("weight", "cache", "resident")]
        cosine = "" if is_first or row["cache"] != "float32" else f"{cosines[row['weights']]:.5f}"
        rows.append(
            (
                row["weights"],
                row["cache"],
                f"{first['perplexity']:.3f}" if is_first else f"{change:+.2f} %",
                *speeds,
                *sizes,
                cosine,
            )
        )
    commands = [shlex.join(document["command"]) for document in (language, encoder)]
    return _lines(_machine(language, 1, ["numpy"]), commands, rows)


TABLES: dict[str, Callable[[], str]] = {
    "bfloat16": bfloat16,
    "smollm2": smollm2,
    "precisions": precisions,
}


def main() -> None:
    """Write the pages and the pictures."""
    for page in PAGES:
        page.write_text(written(page.read_text("utf-8")), "utf-8")
    draw(PICTURES)


def draw(folder: Path) -> None:
    from tileattn.bench import pictures  # with matplotlib, which tables do without

    for name, shown in DRAWN.items():
        with tempfile.TemporaryDirectory() as made:
            pictures.draw([run(name)], made)
            for picture, shown_as in shown.items():
                shutil.copy(Path(made, f"{picture}.svg"), folder / f"{shown_as}.svg")


if __name__ == "__main__":
    main()
