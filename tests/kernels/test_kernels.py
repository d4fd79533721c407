"""The structs that the tests hand to the kernels are those of csrc/tileattn.h."""

import re
from ctypes import POINTER, c_double, c_int, c_ssize_t, c_void_p
from pathlib import Path

import numpy as np
import pytest

from tests.kernels.kernels import (
    PROTOTYPES,
    AttentionTile,
    Dots,
    DotTile,
    GemmTile,
    MergeTile,
    Norm,
    Rope,
    ScoreOptions,
    ScoreRow,
    State,
    Words,
)
from tests.oracle import HALVES

HEADER = Path(__file__).parents[2] / "csrc" / "tileattn.h"
C_TYPES = {"int": c_int, "ptrdiff_t": c_ssize_t, "double": c_double}


def struct_body(name):
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
    return re.search(rf"typedef struct {name} {{(.*?)}} {name};", text, flags=re.DOTALL)[1]


@pytest.mark.any_isa
@pytest.mark.parametrize(
    "name, mirror",
    [
        ("ta_words", Words),
        ("ta_gemm_tile", GemmTile),
        ("ta_dot_tile", DotTile),
        ("ta_score_options", ScoreOptions),
        ("ta_score_row", ScoreRow),
        ("ta_attention_tile", AttentionTile),
        ("ta_state", State),
        ("ta_merge_tile", MergeTile),
        ("ta_norm", Norm),
        ("ta_rope", Rope),
    ],
)
def test_struct_has_the_fields_of_the_header(name, mirror):
    fields = []
    for declaration in filter(None, map(str.strip, struct_body(name).split(";"))):
        c_type, pointer, field = re.fullmatch(r"(.*?)\s*(\*?)(\w+)", declaration).groups()
        fields.append((field, c_void_p if pointer else C_TYPES[c_type.removeprefix("const ")]))
    assert fields == list(mirror._fields_)


@pytest.mark.any_isa
def test_dots_have_the_functions_of_the_header():
    functions = []
    for result, field, arguments in re.findall(
        r"(\w+) \(\*(\w+)\)\((.*?)\);", struct_body("ta_dots")
    ):
        types = [] if arguments == "void" else arguments.split(", ")
        functions.append((field, result == "int", [argument_type(t) for t in types]))
    mirrored = [(field, f._restype_ is c_int, list(f._argtypes_)) for field, f in Dots._fields_]
    assert functions == mirrored


def argument_type(declaration):
    """What stands for a pointer to a struct is one to its mirror; to numbers, an address."""
    c_type, pointer = re.fullmatch(r"(.*?)\s*(\*?)\w+", declaration.removeprefix("const ")).groups()
    if not pointer:
        return C_TYPES[c_type]
    return POINTER(DotTile) if c_type == "ta_dot_tile" else c_void_p


@pytest.mark.any_isa
def test_every_kernel_of_the_table_has_a_prototype():
    names = re.findall(r"\(\*(\w+)(?:\[TA_\w+\])?\)\(", struct_body("ta_kernels"))
    assert set(names) == set(PROTOTYPES)


def test_storages(kernels):
    """float64 has no narrow storage of its own; a row of anything can be loaded."""
    own = {kernels.dtype}
    narrow = {np.dtype(half) for half in HALVES}
    stored = own | narrow if kernels.dtype == np.float32 else own
    for name in ("finish_row", "store_row", "merge_states"):
        assert set(getattr(kernels, name)) == stored
    kept = stored | {np.dtype(np.int8)} if kernels.dtype == np.float32 else own
    for name in ("pack_rows", "pack_columns"):
        assert set(getattr(kernels, name)) == kept
    assert set(kernels.load_row) == narrow | {np.dtype(np.float32), np.dtype(np.float64)}
