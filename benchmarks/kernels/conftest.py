"""Runs each kernel benchmark on each instruction set of the machine."""

import pytest

import tileattn
from tileattn import _core


@pytest.fixture(params=tileattn.available_isas())
def isa(request):
    before = _core.active_isa()
    _core.select_isa(request.param)
    yield request.param
    _core.select_isa(before)
