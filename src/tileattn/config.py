"""Threads, instruction sets, and what this installation can do."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Iterator
from contextvars import ContextVar

import numpy as np

from tileattn import _core
from tileattn._values import check_num_threads

_process_threads: int | None = None
_context_threads: ContextVar[int | None] = ContextVar("tileattn_threads", default=None)
_cpu_quota: int | None = None

#: Where control groups of versions 2 and 1 lie, what /proc/self/cgroup calls them, and the files
#: that hold a quota and its period.
CONTROL_GROUPS = (
    ("/sys/fs/cgroup", "", ("cpu.max",)),
    ("/sys/fs/cgroup/cpu", "cpu", ("cpu.cfs_quota_us", "cpu.cfs_period_us")),
)
UNLIMITED = 1 << 20


def set_num_threads(num_threads: int) -> None:
    """Set how many threads calls use, for the whole process.

    Parameters
    ----------
    num_threads : int
        1 to 1024. A call never uses more threads than it has tiles of work.

    Raises
    ------
    TypeError, ValueError
        If `num_threads` is no integer or out of range.

    See Also
    --------
    threads : The same for a `with` block.

    Examples
    --------
    >>> import tileattn
    >>> before = tileattn.get_num_threads()
    >>> tileattn.set_num_threads(1)
    >>> tileattn.get_num_threads()
    1
    >>> tileattn.set_num_threads(before)
    """
    global _process_threads
    _process_threads = check_num_threads(num_threads)


def get_num_threads() -> int:
    """How many threads a call from here uses at most.

    Set by `threads` or `set_num_threads`; otherwise the smallest of what OMP_NUM_THREADS (or the
    OpenMP runtime, as threadpoolctl limits it), OMP_THREAD_LIMIT, the CPU affinity and the CPU
    quota of the container or service allow.

    Returns
    -------
    int
        At least 1.

    Notes
    -----
    The child of an `os.fork()` has none of its parent's OpenMP threads: calls there work on one
    thread, whatever this says.

    Examples
    --------
    >>> import tileattn
    >>> tileattn.get_num_threads() >= 1
    True
    """
    return _context_threads.get() or _process_threads or _core.allowed_threads(_quota())


@contextlib.contextmanager
def threads(num_threads: int) -> Iterator[None]:
    """Use this many threads inside a `with` block, in the calling thread or task only.

    Parameters
    ----------
    num_threads : int
        1 to 1024.

    Yields
    ------
    None

    Raises
    ------
    TypeError, ValueError
        If `num_threads` is no integer or out of range.

    Examples
    --------
    >>> import tileattn
    >>> with tileattn.threads(1):
    ...     tileattn.get_num_threads()
    1
    """
    token = _context_threads.set(check_num_threads(num_threads))
    try:
        yield
    finally:
        _context_threads.reset(token)


def resolve_threads(num_threads: int | None) -> int:
    """The number of threads for one call, from its own argument or the settings above."""
    return get_num_threads() if num_threads is None else check_num_threads(num_threads)


def _quota() -> int:
    """Whole CPUs of the quota of the container or service, rounded up; read once."""
    global _cpu_quota
    if _cpu_quota is None:
        _cpu_quota = _read_quota()
    return _cpu_quota


def _read_quota() -> int:
    paths: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError), open("/proc/self/cgroup") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            paths.update(dict.fromkeys(controllers.split(","), path))
    least = UNLIMITED
    for root, name, files in CONTROL_GROUPS:
        path = paths.get(name, "/").rstrip("/")
        while True:  # a group, and those that it lies in
            least = min(least, _quota_in(root + path, files))
            if not path:
                break
            path = path.rpartition("/")[0]
    return least


def _quota_in(folder: str, files: tuple[str, ...]) -> int:
    words: list[str] = []
    try:
        for name in files:
            with open(f"{folder}/{name}") as file:
                words += file.read().split()
        quota, period = map(int, words)
        return max(1, -(-quota // period)) if quota > 0 else UNLIMITED
    except (OSError, ValueError, ZeroDivisionError):  # "max": no limit
        return UNLIMITED


def isa() -> str:
    """Name of the instruction set that calls use.

    "amx", "avx512_bf16", "avx512", "avx2" or "baseline": the best one that the CPU and the
    operating system support, or what the environment variable TILEATTN_ISA named when tileattn was
    imported. The first two add bfloat16 dot products to the third. "avx512_bf16" is the best one on
    AMD's CPUs only; Intel's multiply faster in float32.

    Returns
    -------
    str

    Examples
    --------
    >>> import tileattn
    >>> tileattn.isa() in tileattn.available_isas()
    True
    """
    name: str = _core.active_isa()
    return name


def available_isas() -> tuple[str, ...]:
    """List the names of the instruction sets that this machine can run, best first.

    Returns
    -------
    tuple of str

    Examples
    --------
    >>> import tileattn
    >>> tileattn.available_isas()[-1]
    'baseline'
    """
    names: tuple[str, ...] = _core.available_isas()
    return names


def show_config() -> None:
    """Print versions, instruction sets and threads: what a bug report should contain.

    Examples
    --------
    >>> import tileattn
    >>> tileattn.show_config()  # doctest: +ELLIPSIS
    tileattn   ...
    """
    from tileattn import __version__

    rows = {
        "tileattn": __version__,
        "python": f"{platform.python_version()} on {platform.machine()} {sys.platform}",
        "numpy": np.__version__,
        "isa": f"{isa()} (available: {', '.join(available_isas())}; "
        f"compiled in: {', '.join(_core.compiled_isas())})",
        "threads": f"{get_num_threads()} of {os.cpu_count()} CPUs",
    }
    for name, value in rows.items():
        print(f"{name:10} {value}")


def _select_isa() -> None:
    """Honour TILEATTN_ISA, once, at import."""
    name = os.environ.get("TILEATTN_ISA")
    if name:
        try:
            _core.select_isa(name)
        except ValueError as error:
            raise ImportError(f"TILEATTN_ISA: {error}") from None


_select_isa()
