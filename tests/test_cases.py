"""Cases of faults that attention libraries really had, where a folder of them is at hand.

The folder is a package: functions case_*(api) for an object like cases_adapter, and proc_*(name)
for one that is imported by name in a process of its own. TILEATTN_CASES names it.
"""

import importlib.util
import os
import pkgutil
import sys
from pathlib import Path

import pytest

from tests import cases_adapter


def load(folder):
    """The folder as the package `cases`: its functions case_* and proc_* by name."""
    folder = Path(folder).resolve()
    spec = importlib.util.spec_from_file_location(
        "cases", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    sys.modules["cases"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["cases"])
    modules = [
        importlib.import_module(f"cases.{info.name}")
        for info in pkgutil.iter_modules([str(folder)])
        if not info.name.startswith("_")
    ]
    return {
        name: function
        for module in modules
        for name, function in vars(module).items()
        if name.startswith(("case_", "proc_"))
    }


FOLDER = os.environ.get("TILEATTN_CASES")
CASES = load(FOLDER) if FOLDER else {}


def named(prefix):
    cases = [pytest.param(f, id=name) for name, f in CASES.items() if name.startswith(prefix)]
    missing = pytest.mark.skip(reason="no folder of cases: set TILEATTN_CASES")
    return cases or [pytest.param(None, marks=missing, id="none")]


@pytest.fixture(autouse=True)
def same_threads():
    before = cases_adapter.tileattn.get_num_threads()
    yield
    cases_adapter.set_num_threads(before)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the cases' own NumPy
@pytest.mark.parametrize("case", named("case_"))
def test_case(case):
    case(cases_adapter)


@pytest.mark.any_isa
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the cases' own NumPy
@pytest.mark.parametrize("case", named("case_"))
def test_case_with_the_reference(case):
    case(cases_adapter.of_reference)


@pytest.mark.any_isa
@pytest.mark.parametrize("case", named("proc_"))
def test_case_in_a_process_of_its_own(case):
    case("tests.cases_adapter")
