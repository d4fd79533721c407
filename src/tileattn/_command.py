"""What the commands share: their one kind of error, arguments that they read alike, durations."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class CommandError(Exception):
    """A fault of what the user gave; the text is the line that is shown."""


@contextmanager
def blaming(subject: str | None, *errors: type[Exception]) -> Iterator[None]:
    """Turn `errors` of the work inside into a CommandError, about `subject` where given."""
    try:
        yield
    except errors as error:
        raise CommandError(f"{subject}: {error}" if subject else str(error)) from error


def whole_number(minimum: int) -> Callable[[str], int]:
    """Reads an argument that is at least `minimum`."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = minimum - 1
        if number < minimum:
            raise argparse.ArgumentTypeError(
                f"expected a whole number of at least {minimum}, got {text!r}"
            )
        return number

    return parse


def check_output(option: str, path: str) -> None:
    """Find out before the work, as far as possible without touching the file."""
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path):
        raise CommandError(f"{option} {path} is a directory, expected the name of a file")
    if not os.path.isdir(folder):
        raise CommandError(f"{option} {path}: there is no directory {folder}")


def duration(seconds: float) -> str:
    """Three figures and a unit: as many as repeat from run to run, in seven characters at most."""
    for factor, unit in ((1e6, "us"), (1e3, "ms"), (1, "s")):
        number = seconds * factor
        # 999.5 would be rounded to 1000: the next unit says it better.
        if number < 999.5 or unit == "s":
            break
    decimals = 2 if number < 9.995 else 1 if number < 99.95 else 0
    return f"{number:.{decimals}f} {unit}"
