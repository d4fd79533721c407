"""Which instruction sets have dot products of bfloat16."""

import tileattn
from tileattn import _core


def _with_dots():
    before = _core.active_isa()
    for name in tileattn.available_isas():
        _core.select_isa(name)
        if _core.kernel_table("float32")["dots"]:
            yield name
    _core.select_isa(before)


DOT_ISAS = frozenset(_with_dots())
