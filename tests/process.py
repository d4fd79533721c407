"""Python in a process of its own."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_python(code, tmp_path=None, timeout=120, **environment):
    """Runs code, which must end well and without a traceback; returns what it prints.

    From a file, which the processes that it makes can import, if there is a tmp_path.
    """
    code = textwrap.dedent(code)
    arguments = ["-c", code]
    if tmp_path is not None:
        (tmp_path / "program.py").write_text(code)
        arguments = [str(tmp_path / "program.py")]
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout
