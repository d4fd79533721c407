"""What the suite reaches: lines and branches of the Python and the Cython, lines of csrc/.

    python -m tests.coverage FOLDER [pytest arguments]

builds the extension with gcc's counters in FOLDER (which is made anew), runs the suite with it and
prints, file by file, how much was reached and which lines were not. A line of csrc/ counts if it
was run for any instruction set and type.
"""

import collections
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

TREE = Path(__file__).resolve().parent.parent
EXTRAS = ("test", "models", "bench")
BUILT = ("_core.c", "*.so", "__pycache__", "build", "dist", ".*")
# With the lines of the Cython named in the C made of it, gcc's counters speak of Cython, too:
# tracing would need the GIL inside the parallel loops.
# A name holds for what follows it, so each line of C gets it anew.
TRANSLATE = """
from pathlib import Path
from Cython.Build import cythonize

directives = {"language_level": 3}
cythonize("src/tileattn/_core.pyx", compiler_directives=directives, emit_linenums=True)
made, name, goes_on = [], "", False
for line in Path("src/tileattn/_core.c").read_text().splitlines(keepends=True):
    if line.startswith("#line"):
        name = line
    elif not goes_on:
        made.append(name)
    goes_on = line.endswith("\\\\\\n")
    made.append(line)
Path("src/tileattn/_core.c").write_text("".join(made))
"""
BUILD = {"CFLAGS": "-g -O1 --coverage -fprofile-update=atomic", "LDFLAGS": "--coverage"}
# Lines of Cython whose branches are the author's; all others have those of error checks.
CONDITION = re.compile(r"\s*(if|elif|while|for)\b|.*\b(if .* else|and|or)\b")


def main(folder: Path, arguments: list[str]) -> int:
    """Build, run, report; the suite's exit status."""
    shutil.rmtree(folder, ignore_errors=True)
    source, python = folder / "source", folder / "venv" / "bin" / "python"
    copy_tree(source)

    def run(*command: str | Path, **environment: str) -> int:
        return subprocess.run(
            command, cwd=source, env={**os.environ, "PYTHONPATH": "src", **environment}, check=False
        ).returncode

    for command, environment in (
        ([sys.executable, "-m", "venv", folder / "venv"], {}),
        ([python, "-m", "pip", "install", "--quiet", "coverage", *requirements()], {}),
        ([python, "-c", TRANSLATE], {}),
        ([python, "setup.py", "--quiet", "egg_info", "build_ext", "--inplace"], BUILD),
    ):
        if run(*command, **environment) != 0:
            sys.exit(f"failed: {' '.join(map(str, command))}")

    traced = "-m", "coverage", "run", "--branch", "--source=src/tileattn"
    status = run(python, *traced, "-m", "pytest", "-q", *arguments)
    run(python, "-m", "coverage", "report", "--show-missing")
    print(report(source))
    return status


def copy_tree(to: Path) -> None:
    """What git knows or would add; outside of its trees all but what is built."""
    if not (TREE / ".git").exists():
        shutil.copytree(TREE, to, ignore=shutil.ignore_patterns(*BUILT))
        return
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=TREE, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(TREE / name, to / name)


def requirements() -> list[str]:
    """Of the build, of the package and of its extras."""
    settings = tomllib.loads((TREE / "pyproject.toml").read_text())
    project = settings["project"]
    needed = settings["build-system"]["requires"] + project["dependencies"]
    return needed + [r for name in EXTRAS for r in project["optional-dependencies"][name]]


def report(source: Path) -> str:
    """A table of the extension's files under `source`, from the counters that its runs left."""
    lines: dict[str, dict[int, int]] = collections.defaultdict(collections.Counter)
    branches: dict[str, dict[tuple[int, int], int]] = collections.defaultdict(collections.Counter)
    for counters in source.rglob("*.gcda"):
        text = subprocess.run(
            ["gcov", "--json-format", "--stdout", "--branch-probabilities", counters],
            cwd=source,
            capture_output=True,
            check=True,
        ).stdout
        for file in json.loads(text)["files"]:
            name = file["file"]
            if not name.startswith(("csrc/", "src/tileattn/loops/")):
                continue
            for line in file["lines"]:
                number = line["line_number"]
                lines[name][number] += line["count"]
                for i, branch in enumerate(line["branches"]):
                    branches[name][number, i] += branch["count"]

    table = [f"{'':40}{'lines':>7}{'reached':>9}{'branches':>10}{'taken':>7} not reached"]
    for name in sorted(lines):
        missed = [number for number, count in sorted(lines[name].items()) if count == 0]
        text = (source / name).read_text().splitlines()
        reached = 1 - len(missed) / len(lines[name])
        row = f"{name:40}{len(lines[name]):7}{reached:9.1%}"
        if name.endswith(".pxi"):  # a kernel's are as many as the compiler unrolls
            counts = [
                n for (line, _), n in branches[name].items() if CONDITION.match(text[line - 1])
            ]
            row += f"{len(counts):10}{sum(n > 0 for n in counts) / len(counts):7.1%}"
        table.append(f"{row:74}{ranges(missed)}")
    return "\n".join(table)


def ranges(numbers: list[int]) -> str:
    """Ascending numbers as text, those in a row as one range."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in parts)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
