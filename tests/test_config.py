"""Threads and instruction sets: who decides, and for whom."""

import builtins
import concurrent.futures
import contextvars
import io
import os
import sys

import pytest

import tileattn
from tests.dots import DOT_ISAS
from tests.process import run_python
from tileattn import _core, config

pytestmark = pytest.mark.any_isa


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    """Nothing was set in the process before."""
    monkeypatch.setattr(config, "_process_threads", None)


THREADS = "import tileattn; print(tileattn.get_num_threads())"
ISA = "import tileattn; print(tileattn.isa())"


# ------------------------------------------------------------------ threads


def test_set_num_threads_holds_for_the_process():
    tileattn.set_num_threads(3)
    assert tileattn.get_num_threads() == 3
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(tileattn.get_num_threads).result() == 3


def test_threads_holds_inside_the_block_only():
    before = tileattn.get_num_threads()
    with tileattn.threads(5):
        assert tileattn.get_num_threads() == 5
        with tileattn.threads(2):
            assert tileattn.get_num_threads() == 2
        assert tileattn.get_num_threads() == 5
        tileattn.set_num_threads(7)
        assert tileattn.get_num_threads() == 5
    assert tileattn.get_num_threads() == 7
    config._process_threads = None
    assert tileattn.get_num_threads() == before


def test_threads_ends_with_an_error_too():
    before = tileattn.get_num_threads()
    with pytest.raises(KeyError), tileattn.threads(5):
        raise KeyError
    assert tileattn.get_num_threads() == before


def test_threads_does_not_reach_other_threads_or_contexts():
    before = tileattn.get_num_threads()
    fresh = contextvars.copy_context()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        # Another library may have limited OpenMP in this thread only.
        there = pool.submit(tileattn.get_num_threads).result()
        with tileattn.threads(before + there + 1):
            assert pool.submit(tileattn.get_num_threads).result() == there
            assert fresh.run(tileattn.get_num_threads) == before


def test_an_argument_beats_every_setting():
    tileattn.set_num_threads(3)
    with tileattn.threads(5):
        assert config.resolve_threads(2) == 2
        assert config.resolve_threads(None) == 5


@pytest.mark.parametrize(
    "number, error", [(0, ValueError), (-1, ValueError), (1025, ValueError), (2**40, ValueError),
                      (1.0, TypeError), ("2", TypeError), (None, TypeError), (True, TypeError)],
)  # fmt: skip
def test_no_other_numbers(number, error):
    before = tileattn.get_num_threads()
    with pytest.raises(error, match="num_threads"):
        tileattn.set_num_threads(number)
    with pytest.raises(error, match="num_threads"), tileattn.threads(number):
        pass
    assert tileattn.get_num_threads() == before


def test_default_obeys_omp_num_threads():
    assert run_python(THREADS, OMP_NUM_THREADS="1") == "1\n"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no CPU affinity on this system")
def test_default_obeys_the_affinity():
    limit = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
    assert run_python(limit + THREADS) == "1\n"
    # Asked anew at each call, not remembered from the import.
    assert run_python("import tileattn; tileattn.get_num_threads(); " + limit + THREADS) == "1\n"


def test_default_is_at_most_the_quota(monkeypatch):
    monkeypatch.setattr(config, "_cpu_quota", 1)
    assert tileattn.get_num_threads() == 1


MEMBERSHIP = "/proc/self/cgroup"
VERSION_1 = ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us")


@pytest.mark.parametrize(
    "files, quota",
    [
        ({"/sys/fs/cgroup/cpu.max": "max 100000\n"}, config.UNLIMITED),
        ({"/sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        ({"/sys/fs/cgroup/cpu.max": "150000 100000\n"}, 2),
        ({"/sys/fs/cgroup/cpu.max": "10000 100000\n"}, 1),
        ({"/sys/fs/cgroup/cpu.max": "100000 0\n"}, config.UNLIMITED),
        ({"/sys/fs/cgroup/cpu.max": "nonsense\n"}, config.UNLIMITED),
        (dict(zip(VERSION_1, ("400000\n", "100000\n"), strict=True)), 4),
        (dict(zip(VERSION_1, ("-1\n", "100000\n"), strict=True)), config.UNLIMITED),
        ({}, config.UNLIMITED),
        # Of a service: a group inside others, each with a limit of its own.
        (
            {
                MEMBERSHIP: "0::/system.slice/search.service\n",
                "/sys/fs/cgroup/system.slice/search.service/cpu.max": "250000 100000\n",
                "/sys/fs/cgroup/system.slice/cpu.max": "max 100000\n",
            },
            3,
        ),
        (
            {
                MEMBERSHIP: "0::/a/b\n",
                "/sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
                "/sys/fs/cgroup/a/cpu.max": "200000 100000\n",
                "/sys/fs/cgroup/cpu.max": "800000 100000\n",
            },
            2,
        ),
        (
            {
                MEMBERSHIP: "4:cpu,cpuacct:/a\n3:memory:/m\n0::/\n",
                "/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "50000\n",
                "/sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
            },
            1,
        ),
        ({MEMBERSHIP: "0::/elsewhere\n", "/sys/fs/cgroup/cpu.max": "100000 100000\n"}, 1),
        ({MEMBERSHIP: "nonsense\n", "/sys/fs/cgroup/cpu.max": "100000 100000\n"}, 1),
    ],
)
def test_quota_of_the_container(files, quota, monkeypatch):
    def opened(path, *rest, **options):
        if path != MEMBERSHIP and not str(path).startswith("/sys/fs/cgroup"):
            return real_open(path, *rest, **options)
        if path not in files:
            raise FileNotFoundError(path)
        return io.StringIO(files[path])

    real_open = builtins.open
    monkeypatch.setattr(builtins, "open", opened)
    assert config._read_quota() == quota


# ------------------------------------------------------------------ instruction sets


def test_available_isas_are_those_compiled_in_best_first():
    compiled = _core.compiled_isas()
    available = tileattn.available_isas()
    assert compiled[-1] == available[-1] == "baseline"
    assert [name for name in compiled if name in available] == list(available)


def test_the_best_isa_is_the_default(monkeypatch):
    assert run_python(ISA, TILEATTN_ISA="").strip() == tileattn.available_isas()[0]
    monkeypatch.delenv("TILEATTN_ISA", raising=False)
    assert run_python(ISA).strip() == tileattn.available_isas()[0]


@pytest.mark.parametrize("name", tileattn.available_isas())
def test_the_environment_names_an_isa(name):
    assert run_python(ISA, TILEATTN_ISA=name).strip() == name


def test_an_unknown_isa_is_an_import_error():
    with pytest.raises(AssertionError) as failure:
        run_python(ISA, TILEATTN_ISA="mmx")
    message = str(failure.value).splitlines()[-1]
    for part in ("ImportError", "TILEATTN_ISA", "'mmx'", *tileattn.available_isas()):
        assert part in message


def test_selecting_an_isa():
    before = tileattn.isa()
    try:
        for name in tileattn.available_isas():
            _core.select_isa(name)
            assert tileattn.isa() == name
        with pytest.raises(ValueError, match="'mmx'"):
            _core.select_isa("mmx")
        assert tileattn.isa() == name
    finally:
        _core.select_isa(before)


@pytest.mark.every_isa
def test_isa_under_test_is_the_active_one(isa):
    assert tileattn.isa() == isa


def test_show_config_says_what_a_report_needs(capsys):
    tileattn.set_num_threads(3)
    tileattn.show_config()
    printed = capsys.readouterr().out
    for part in (
        tileattn.__version__,
        tileattn.isa(),
        *_core.compiled_isas(),
        "3 of",
        sys.platform,
    ):
        assert part in printed


def test_measured_peak_is_positive():
    for dtype in ("float32", "float64"):
        assert _core.measure_fma_peak(dtype, 1) > 0


@pytest.mark.any_isa
def test_which_instruction_sets_have_dot_products():
    assert {"amx", "avx512_bf16"} & set(tileattn.available_isas()) == DOT_ISAS
