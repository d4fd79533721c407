"""The README's examples run as they stand there, and the version is one."""

import doctest
import importlib.metadata
from pathlib import Path

import pytest

import tileattn

README = Path(__file__).parents[1] / "README.md"


def test_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # one of them writes a file
    text = README.read_text("utf-8")
    test = doctest.DocTestParser().get_doctest(text, {}, README.name, str(README), 0)
    assert len(test.examples) == text.count("\n>>> ") > 0
    failures = []
    runner = doctest.DocTestRunner()
    runner.run(test, out=failures.append)
    assert not runner.failures, "".join(failures)


@pytest.mark.any_isa
def test_the_installed_version_is_the_package_s_own():
    assert importlib.metadata.version("tileattn") == tileattn.__version__
