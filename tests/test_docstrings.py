"""Every public object is documented with an example, and every example runs."""

import doctest
import importlib
import inspect
import pkgutil
import re
from types import FunctionType

import pytest

import tileattn
from tileattn import weights

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
    """What users call: all of the package, and the functions of its public modules."""
    for module in (tileattn, tileattn.reference, tileattn.cost, weights):
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


# What numpydoc asks for beyond that, and these docstrings do without.
EXCUSED = {
    "ES01": "many a summary says all",
    "SA01": "what is related is named where it matters",
    "PR04": "what means the same as elsewhere is named there, several parameters in a line",
    "PR07": "and of some, like a weight's, name and shape say all",
    "RT03": "as they do of many results",
}


def public_names():
    """Functions, classes, and what these have: methods, properties, and the call."""
    for module in (tileattn, tileattn.reference, tileattn.cost, tileattn.weights):
        for name in module.__all__:
            item = getattr(module, name)
            if inspect.isfunction(item):
                yield f"{module.__name__}.{name}"
            elif inspect.isclass(item):
                yield f"{module.__name__}.{name}"
                for of_class in dir(item):
                    member = inspect.getattr_static(item, of_class)
                    kinds = (FunctionType, property, classmethod, staticmethod)
                    if isinstance(member, kinds) and is_public(of_class):
                        yield f"{module.__name__}.{name}.{of_class}"


def is_public(name):
    return name == "__call__" or not name.startswith("_")


@pytest.mark.parametrize("name", list(public_names()))
def test_numpydoc_finds_no_fault(name):
    found = pytest.importorskip("numpydoc.validate").validate(name)
    excused = {*EXCUSED, *(["EX01"] if found["type"] == "property" else [])}
    assert not [error for error in found["errors"] if error[0] not in excused]


@pytest.mark.parametrize(
    "item", [param for param in public_objects() if inspect.isclass(*param.values)]
)
def test_what_checks_need_of_a_class_is_not_for_users(item):
    public = [name for name in dir(item) if not name.startswith("_")]
    methods = [method for name in public if inspect.isfunction(method := getattr(item, name))]
    assert not [method for method in methods if method.__module__ == "tileattn._arguments"]
