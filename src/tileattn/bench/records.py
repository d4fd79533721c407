"""What a run measured, and the file of `tileattn bench --json`.

The file is one JSON object, a Run as its fields stand here, with a first field `format` that is
"tileattn bench" and a `version` that grows when a field changes its meaning. Times are in seconds,
sizes in bytes, and every list of times has one entry a round, so that two of them can be divided
round by round; `ratios`, which say how many times tileattn's time a peer took, are just that: the
rounds' median and quartiles.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from tileattn._command import CommandError
from tileattn.bench.rounds import Spread, ratio

FORMAT, VERSION = "tileattn bench", 2
#: Of the candidates; the peers' are in `needs`.
OURS = "tileattn"


@dataclass
class Timing:
    """One cell on so many threads: the seconds of a call, in each round.

    Attributes
    ----------
    limit
        What the machine's limit would take.
    seconds
        Of each candidate, ours first.
    """

    threads: int
    limit: list[float]
    seconds: dict[str, list[float]]

    def ratio(self, name: str) -> Spread:
        """How many times our time the candidate took."""
        return ratio(self.seconds[name], self.seconds[OURS])

    @property
    def of_limit(self) -> Spread:
        """Our speed, where 1 is the limit."""
        return ratio(self.limit, self.seconds[OURS])


@dataclass
class Result:
    """One cell.

    Attributes
    ----------
    sizes
        The fields of its class in `cells`.
    flops, bytes
        Of one call; see `cells`.
    limit, amount, unit
        The machine's limit that it is held against, and the work of a call in 1e9 units: a rate is
        `amount` a second, in `unit`.
    errors
        Relative errors of candidates against float64, where they were asked for.
    """

    cell: str
    label: str
    sizes: dict[str, Any]
    flops: int
    bytes: int
    limit: str
    amount: float
    unit: str
    timings: list[Timing]
    errors: dict[str, float]


@dataclass
class GroupResults:
    """The cells of one group: those that were to be measured, and what came out.

    Attributes
    ----------
    peers
        Names of the candidates beside ours.
    skipped
        Why, for the cells that could not be.
    """

    name: str
    cells: list[str]
    peers: list[str]
    results: list[Result] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)


@dataclass
class Memory:
    """The most that a call took beside its inputs, in bytes, by candidate.

    Attributes
    ----------
    result
        Of which so many are the result, which each of them allocates.
    failed
        Why there is no peak, for the candidates whose process ended otherwise.
    """

    cell: str
    sizes: dict[str, Any]
    threads: int
    result: int
    peak: dict[str, int]
    failed: dict[str, str] = field(default_factory=dict)


@dataclass
class MemoryResults:
    cells: list[str]
    peers: list[str]
    results: list[Memory] = field(default_factory=list)


@dataclass
class Roof:
    """A limit of the machine: its samples in GFLOP/s or GB/s, two before each cell."""

    limit: str
    threads: int
    samples: list[float]


@dataclass
class Run:
    """All of a run.

    Attributes
    ----------
    command, date
        As it was called, and when it began (UTC).
    machine, versions
        As `machine` finds them.
    isa, alignment, threads, rounds, errors
        Its options.
    not_installed
        Packages that were left out for it, and how to get them.
    interrupted
        Whether somebody ended it before all cells were measured.
    """

    command: list[str]
    date: str
    machine: dict[str, Any]
    versions: dict[str, str]
    isa: str
    alignment: str
    threads: list[int]
    rounds: int
    errors: bool
    not_installed: dict[str, str]
    groups: list[GroupResults] = field(default_factory=list)
    memory: MemoryResults | None = None
    roofs: list[Roof] = field(default_factory=list)
    interrupted: bool = False


def save(run: Run, path: str) -> None:
    document = {"format": FORMAT, "version": VERSION, **asdict(run)}
    for group in document["groups"]:
        for result in group["results"]:
            for timing in result["timings"]:
                ours = timing["seconds"][OURS]
                timing["ratios"] = {
                    name: ratio(seconds, ours)._asdict()
                    for name, seconds in timing["seconds"].items()
                    if name != OURS
                }
    try:
        with open(path, "w") as file:
            json.dump(document, file, indent=1)
            file.write("\n")
    except (OSError, ValueError) as error:  # ValueError: of a zero byte in the name
        raise CommandError(f"--json {path} cannot be written: {error}") from error


def load(path: str) -> Run:
    """The reverse."""
    try:
        with open(path) as file:
            document = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise CommandError(f"--from {path} cannot be read: {error}") from error
    kind = (document.get("format"), document.get("version")) if isinstance(document, dict) else None
    if kind != (FORMAT, VERSION):
        raise CommandError(
            f"--from {path}: expected what tileattn bench --json writes, version {VERSION}"
        )
    try:
        del document["format"], document["version"]
        for group in document["groups"]:
            for result in group["results"]:
                for timing in result["timings"]:
                    del timing["ratios"]
                result["timings"] = [Timing(**timing) for timing in result["timings"]]
            group["results"] = [Result(**result) for result in group["results"]]
        document["groups"] = [GroupResults(**group) for group in document["groups"]]
        document["roofs"] = [Roof(**roof) for roof in document["roofs"]]
        if memory := document["memory"]:
            memory["results"] = [Memory(**result) for result in memory["results"]]
            document["memory"] = MemoryResults(**memory)
        return Run(**document)
    except (AttributeError, KeyError, TypeError) as error:
        raise CommandError(f"--from {path} is damaged: {error}") from error
