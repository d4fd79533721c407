"""README and docs: the examples run, the reference names all, the version is one."""

import doctest
import importlib.metadata
import re
from pathlib import Path

import pytest

import tileattn

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
def test_the_installed_version_is_the_package_s_own():
    assert importlib.metadata.version("tileattn") == tileattn.__version__
    assert f"\nversion: {tileattn.__version__}\n" in (ROOT / "CITATION.cff").read_text()
