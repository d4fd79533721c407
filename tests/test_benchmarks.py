"""What the benchmarks' commands say: their names of cells, and what is wrong with an argument."""

import sys

import numpy as np
import pytest

from benchmarks import peers, report
from benchmarks.cells import (
    ATTENTION,
    BLOCKS,
    DECODING,
    OPTIONS,
    PROJECTIONS,
    VARLEN,
    Attention,
    Step,
    Varlen,
)
from benchmarks.report import OURS, Work, rotation
from benchmarks.rounds import Candidate, at_dot_peak
from tileattn import _core

CELLS = [
    Attention("A1", B=1, T=2, S=4, N=2, K=1, H=8, causal=True, window=3),
    Attention("A2 low", B=1, T=1, S=4, N=2, K=1, H=8, cold=True, bfloat16=True),
]


@pytest.fixture
def command(capsys, monkeypatch):
    """Runs the command with arguments -> its exit code, output and errors."""

    def prepare(cell, alignment):
        x = np.ones(4, cell.dtype)
        return Work(cell, {OURS: Candidate(lambda _: x)}, lambda: x, [(x,)], rotation(1))

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["command", "--rounds", "1", "--threads", "1", *arguments])
        try:
            report.run("Some cells.", CELLS, prepare, ["others", *peers.ATTENTION])
            code = 0
        except SystemExit as exit:
            code = exit.code
        return code, *capsys.readouterr()

    return run


def test_names_tell_the_sizes():
    assert [cell.name for cell in CELLS] == [
        "A1 B1 T2 S4 N2 K1 H8 causal window 3 hot",
        "A2 low B1 T1 S4 N2 K1 H8 cold",
    ]
    assert Varlen("V", (5, 2, 9), N=4, K=2, H=8).name == "V B3 S2..9 N4 K2 H8 hot"
    assert Step(B=1, S=9, D=32, N=4, K=2, H=8, cold=True).name == "B1 S9 D32 N4 K2 H8 cold"
    for cells in (ATTENTION, BLOCKS, DECODING, OPTIONS, PROJECTIONS, VARLEN):
        assert len({cell.name for cell in cells}) == len(cells)


def test_only_the_cells_asked_for(command):
    code, output, _ = command("--only", "A1")
    assert code == 0
    assert CELLS[0].name in output
    assert CELLS[1].name not in output


def test_a_name_that_no_cell_has(command):
    code, output, errors = command("--only", "A1", "nonsense")
    assert code == 2
    assert output == ""
    for words in ("--only", "'nonsense'", *(cell.name for cell in CELLS)):
        assert words in errors


def test_peers_that_are_not_there(command, monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda module: None)
    for name, words in {
        "numpy": ["numpy needs threadpoolctl", "pip install --editable '.[bench]'"],
        "torch": ["torch needs torch", "pip install torch"],
        "ORT MHA": ["ORT MHA needs onnxruntime and onnx", "'.[bench]'"],
        "torch folded": ["'torch folded' is none of others, numpy, torch, ORT MHA"],
    }.items():
        code, _, errors = command("--peers", name)
        assert code == 2
        for word in ("--peers", *words):
            assert word in errors
    code, output, _ = command("--help")
    assert code == 0
    assert "others" in output
    assert "'.[bench]'" in output


def test_a_cell_that_needs_a_package_says_so(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    code, output, _ = command()
    assert code == 0
    assert f"{CELLS[1].name} needs ml_dtypes: pip install --editable '.[bench]'" in output
    assert CELLS[0].name in output


def test_no_other_missing_module_is_taken_for_a_need(command, monkeypatch):
    def fail(*_):
        raise ModuleNotFoundError("No module named 'tileattn._core'", name="tileattn._core")

    monkeypatch.setattr(Attention, "dtype", property(fail))
    with pytest.raises(ModuleNotFoundError, match="_core"):
        command()


def test_without_dot_products_bfloat16_is_held_against_multiply_adds(monkeypatch):
    monkeypatch.setattr(_core, "measure_fma_peak", lambda dtype, threads: 50.0)
    for peak, seconds in ((0.0, 1 / 50), (500.0, 1 / 500)):
        monkeypatch.setattr(_core, "measure_dot_peak", lambda threads, peak=peak: peak)
        assert at_dot_peak(1e9, 1)() == seconds
