"""Every public object is documented with an example, and every example runs."""

import doctest
import importlib
import inspect
import pkgutil
import re

import pytest

import tileattn

pytestmark = pytest.mark.any_isa

MODULES = [
    importlib.import_module(f"tileattn.{info.name}")
    for info in pkgutil.iter_modules(tileattn.__path__)
    if not info.name.startswith("_")
]
EXAMPLES = [
    test
    for module in (tileattn, *MODULES)
    for test in doctest.DocTestFinder().find(module)
    if test.examples
]


@pytest.mark.parametrize("test", EXAMPLES, ids=lambda test: test.name)
def test_examples_run(test):
    failures = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    runner.run(test, out=failures.append)
    assert not runner.failures, "".join(failures)


def public_objects():
    """What users call: all of the package, and the functions of its two public modules."""
    for module in (tileattn, tileattn.reference, tileattn.cost):
        for name in module.__all__:
            item = getattr(module, name)
            if inspect.isfunction(item) or (module is tileattn and inspect.isclass(item)):
                yield pytest.param(item, id=f"{module.__name__}.{name}")


def documented_parameters(text):
    """Names in the section Parameters of a numpydoc docstring."""
    section = re.search(r"Parameters\n-+\n(.*?)(\n\n\w+\n---|\Z)", text, flags=re.DOTALL)
    heads = re.findall(r"^(\S[^:\n]*)", section[1], flags=re.MULTILINE) if section else []
    return {name.strip(" *") for head in heads for name in head.split(",")}


@pytest.mark.parametrize("item", list(public_objects()))
def test_public_objects_are_documented(item):
    text = inspect.getdoc(item)
    assert text
    assert "Examples\n--------" in text
    parameters = set(inspect.signature(item).parameters)
    assert documented_parameters(text) == parameters


@pytest.mark.parametrize(
    "item", [param for param in public_objects() if inspect.isclass(*param.values)]
)
def test_what_checks_need_of_a_class_is_not_for_users(item):
    public = [name for name in dir(item) if not name.startswith("_")]
    methods = [method for name in public if inspect.isfunction(method := getattr(item, name))]
    assert not [method for method in methods if method.__module__ == "tileattn._arguments"]
