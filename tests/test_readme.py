"""README and docs: the examples run, the reference names all, the version is one."""

import doctest
import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

import tileattn
from benchmarks import figures
from tests.test_pictures import texts_of

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference" / "index.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # one of them writes a file
    text = page.read_text("utf-8")
    test = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    assert len(test.examples) == text.count("\n>>> ") >= text.count("```python")
    if any("bfloat16" in example.source for example in test.examples):
        pytest.importorskip("ml_dtypes")
    failures = []
    runner = doctest.DocTestRunner()
    runner.run(test, out=failures.append)
    assert not runner.failures, "".join(failures)


@pytest.mark.any_isa
def test_the_reference_has_all():
    entries = re.findall(r"^ *(\w+)$", REFERENCE.read_text("utf-8"), flags=re.MULTILINE)
    assert set(entries) >= set(tileattn.__all__)


@pytest.mark.any_isa
def test_wheels_for_musl_are_tested_with_all_but_ml_dtypes():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    extra = project["project"]["optional-dependencies"]["test"]
    (musl,) = project["tool"]["cibuildwheel"]["overrides"]
    assert musl["test-requires"] == [each for each in extra if "ml_dtypes" not in each]


@pytest.mark.any_isa
def test_the_installed_version_is_the_package_s_own():
    assert importlib.metadata.version("tileattn") == tileattn.__version__
    assert f"\nversion: {tileattn.__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.any_isa
@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.stem)
def test_tables_are_what_was_measured(page):
    text = page.read_text("utf-8")
    assert len(figures.PLACE.findall(text)) == text.count("<!-- measured:") > 0
    assert figures.written(text) == text


@pytest.mark.any_isa
def test_pictures_are_of_what_was_measured(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures are matplotlib's")
    figures.draw(tmp_path)
    for path in tmp_path.iterdir():
        assert texts_of(path) == texts_of(figures.PICTURES / path.name), path.name
