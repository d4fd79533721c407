"""What a run was measured on: the machine, its limits, the versions of what took part."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

import tileattn
from tileattn import _core
from tileattn.bench import arrays
from tileattn.bench.records import Roof

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def describe() -> dict[str, Any]:
    return {
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "threads": tileattn.get_num_threads(),
        "isas": list(tileattn.available_isas()),
        "caches": _caches(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "os": platform.platform(),
    }


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Of Python, tileattn, NumPy, its BLAS, and of those packages that are installed."""
    found = {"tileattn": tileattn.__version__, "python": platform.python_version()}
    for package in ("numpy", *packages):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    blas = np.show_config(mode="dicts")["Build Dependencies"].get("blas", {})
    found["blas"] = f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip()
    return found


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    named = re.search(r"^model name\s*: (.+)$", text, flags=re.MULTILINE)
    return named[1] if named else platform.processor() or platform.machine()


def _caches() -> dict[str, int]:
    """Bytes of each cache of the first CPU, such as L2, where the system tells."""
    found = {}
    for folder in sorted(_CACHES.glob("index*")):
        try:
            level, kind, size = (
                (folder / name).read_text().strip() for name in ("level", "type", "size")
            )
        except OSError:
            continue
        letter = {"Data": "d", "Instruction": "i"}.get(kind, "")
        found[f"L{level}{letter}"] = int(size[:-1]) * _UNITS[size[-1]]
    return found


class Roofs:
    """The machine's limits, sampled throughout a run: what they reach at best bounds all cells."""

    def __init__(self, threads: Sequence[int]) -> None:
        self._threads = threads
        self._memory = arrays.empty((arrays.COLD_BYTES // 4,))
        self._memory[...] = 1
        names = ["FMA peak", *["dot product peak"] * bool(_core.measure_dot_peak(1))]
        self.roofs = [Roof(name, n, []) for name in (*names, "read bandwidth") for n in threads]

    def sample(self) -> None:
        for roof in self.roofs:
            if roof.limit == "FMA peak":
                value = _core.measure_fma_peak("float32", roof.threads)
            elif roof.limit == "dot product peak":
                value = _core.measure_dot_peak(roof.threads)
            else:
                value = _core.measure_read_bandwidth(self._memory, roof.threads)
            roof.samples.append(value)
