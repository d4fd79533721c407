"""The file of `--json`: what was measured, by which command, on which machine."""

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tileattn
from tileattn._command import blaming
from tileattn.bench import machine

PACKAGES = ("torch", "transformers", "ml_dtypes")  # whose versions are told, beside NumPy's


def save(path: str, module: str, figures: dict[str, Any]) -> None:
    """Write them; lists of seconds have one entry a round, so that two can be divided."""
    document = {
        "command": ["python", "-m", module, *sys.argv[1:]],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "versions": machine.versions(PACKAGES),
        "isa": tileattn.isa(),
        **figures,
    }
    with blaming(f"--json {path}", OSError):
        Path(path).write_text(json.dumps(document, indent=1) + "\n", "utf-8")
