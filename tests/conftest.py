"""Runs the suite on each instruction set of the machine, and sets how hard hypothesis searches."""

import os

import pytest
from hypothesis import HealthCheck, settings

import tileattn
from tests.dots import DOT_ISAS
from tileattn import _core

# Examples a property on each instruction set. HYPOTHESIS_PROFILE=long is for a machine left alone;
# with CI set, the examples are the same in each run.
settings.register_profile("short", max_examples=60, deadline=None, derandomize="CI" in os.environ)
settings.register_profile(
    "long", max_examples=2500, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))

# Files that are about something else than kernels: once is enough, but for tests marked every_isa.
# In other files tests opt out with the marker any_isa.
ANY_ISA_FILES = {
    "test_arguments.py",
    "test_bench.py",
    "test_cost.py",
    "test_main.py",
    "test_models.py",
    "test_oracle.py",
    "test_pictures.py",
    "test_processes.py",
    "test_reference.py",
    "test_smollm2.py",
    "test_weights.py",
}


# Those of DOT_ISAS differ from the next one in nothing else: the files about dot products
# (test_dots.py) run on these, those of EVERY_ISA_FILES on all, and all others on the rest.
EVERY_ISA_FILES = {"test_bits.py"}


def pytest_configure(config):
    config.addinivalue_line("markers", "any_isa: independent of the instruction set, runs once")
    config.addinivalue_line("markers", "every_isa: runs on all, in a file that otherwise runs once")


def pytest_generate_tests(metafunc):
    file, marked = metafunc.definition.path.name, metafunc.definition.get_closest_marker
    if file in EVERY_ISA_FILES or marked("every_isa"):
        isas = tileattn.available_isas()
    elif file in ANY_ISA_FILES or marked("any_isa"):
        isas = [tileattn.isa()]
    else:
        is_about_dots = file == "test_dots.py"
        isas = [x for x in tileattn.available_isas() if (x in DOT_ISAS) == is_about_dots]
    metafunc.parametrize("isa", isas, indirect=True, scope="module")


@pytest.fixture(autouse=True, scope="module")
def isa(request):
    """The instruction set that the test runs on."""
    before = _core.active_isa()
    _core.select_isa(request.param)
    yield request.param
    _core.select_isa(before)


@pytest.fixture
def command_fails(capsys):
    """Calls a command that is to fail with one line, which begins with its name and has `match`."""

    def check(main, arguments, match):
        assert main(arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith(main.__module__.rpartition(".")[2] + ": ")
        assert len(captured.err.splitlines()) == 1
        assert match in captured.err

    return check
