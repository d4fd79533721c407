"""The command `tileattn bench` on small cells: what it measures, prints, keeps and refuses."""

import io
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest

import tileattn
from tileattn import __main__ as main
from tileattn import _core
from tileattn.bench import (
    arrays,
    attention,
    command,
    machine,
    memory,
    needs,
    records,
    rounds,
    work,
)
from tileattn.bench.cells import (
    SHORT,
    Attention,
    Block,
    Projection,
    Step,
    Varlen,
)
from tileattn.bench.groups import GROUPS
from tileattn.bench.records import OURS
from tileattn.bench.rounds import Candidate
from tileattn.cost import attention_block_cost

SMALL = {
    "blocks": (Block(T=4, D=16, N=2, K=1, H=8, B=2, causal=True),),
    "attention": (
        Attention("A1", B=1, T=5, S=5, N=2, K=1, H=8, causal=True),
        Attention("A2", B=1, T=1, S=9, N=2, K=2, H=8, cold=True),
    ),
    "decoding": (Step(B=2, S=6, D=16, N=2, K=1, H=8, cold=True),),
    "projections": (Projection(3, 16, 16), Projection(3, 16, 16, weight_dtype="int8")),
    "options": (
        Attention("M1 bias", B=1, T=4, S=4, N=2, K=2, H=8, bias=True),
        Attention("M2 padding mask", B=2, T=4, S=4, N=2, K=2, H=8, lengths=(4, 2)),
        Attention("W1 window", B=1, T=8, S=8, N=2, K=1, H=8, causal=True, window=3),
        Attention("D1 int8", B=1, T=1, S=9, N=2, K=1, H=32, int8=True),
    ),
    "varlen": (Varlen("V1", (3, 1, 4), N=2, K=1, H=8, causal=True),),
    "scaling": (
        *(Attention("attention", 1, T, T, N=2, K=1, H=8, causal=True) for T in (4, 8)),
        *(Block(T=T, D=16, N=2, K=1, H=8, B=1, causal=True) for T in (4, 8)),
    ),
    "memory": (Attention("attention", B=1, T=1500, S=1500, N=1, K=1, H=8),),
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Cells that take no time, in no time; the selection is a block and a projection."""
    monkeypatch.setattr(arrays, "COLD_BYTES", 1 << 16)
    monkeypatch.setattr(rounds, "PAUSE", 0.0)
    monkeypatch.setattr(rounds, "TURN", 0.0)
    monkeypatch.setattr(_core, "measure_fma_peak", lambda dtype, threads: 50.0 * threads)
    monkeypatch.setattr(_core, "measure_dot_peak", lambda threads: 0.0)
    for name, cells in SMALL.items():
        monkeypatch.setitem(GROUPS, name, replace(GROUPS[name], cells=cells))
    monkeypatch.setattr(command, "SHORT", {n: SMALL[n][:1] for n in ("blocks", "projections")})


@pytest.fixture
def bench(capsys):
    """Runs the command -> its exit status, output and errors."""

    def run(*arguments):
        status = main.main(["bench", *map(str, arguments)])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def refusal(bench):
    """The one line with which the command refuses, before anything is printed."""

    def run(*arguments):
        status, output, errors = bench(*arguments)
        assert status == 2
        assert output == ""
        (line,) = errors.splitlines()
        return line.removeprefix("tileattn: error: ")

    return run


def quick(*arguments):
    return [*arguments, "--threads", 1, "--rounds", 1]


def table_of(output, group):
    """The lines of a group's table, its heading first."""
    lines = output.splitlines()
    start = lines.index(group) + 1
    return lines[start : lines.index("", start)]


# ------------------------------------------------------------------ measuring


def test_every_group_runs_and_its_candidates_agree(bench):
    pytest.importorskip("threadpoolctl", reason="NumPy's turns need threadpoolctl")
    timed = [name for name in GROUPS if name != "memory"]
    arguments = [*timed, "--threads", 2, 1, "--rounds", 3, "--peers", "numpy", "--errors"]
    status, output, errors = bench(*arguments)
    assert (status, errors) == (0, "")
    for name in timed:
        heading, *rows = table_of(output, name)
        assert [row.split("  ")[0] for row in rows] == [
            cell.name for cell in SMALL[name] for _ in range(2)
        ]
        assert heading.split() == [
            *("cell", "threads", "time", "rate", "%", "of", "limit", "1", "thread"),
            *(["numpy"] if name != "varlen" else []),
            "error",
        ]
        for row in rows:
            found = {name: float(error) for error, name in re.findall(r"(\S+e[-+]\d+) (\w+)", row)}
            bound = 0.02 if "int8" in row else 1e-5
            assert found
            assert all(error < bound for error in found.values()), row


def test_without_a_group_the_selection_is_measured(bench):
    status, output, errors = bench(*quick("--peers"))
    assert (status, errors) == (0, "")
    assert table_of(output, "blocks")[1].startswith(SMALL["blocks"][0].name)
    assert len(table_of(output, "projections")) == 2
    assert "attention" not in output.splitlines()
    assert re.search(r"^FMA peak on 1 thread: 50\.0 GFLOP/s at best$", output, flags=re.MULTILINE)


def test_the_true_selection_is_part_of_the_groups(monkeypatch):
    monkeypatch.undo()
    for name, cells in SHORT.items():
        assert cells
        assert set(cells) <= set(GROUPS[name].cells)
    for group in GROUPS.values():
        assert len({cell.name for cell in group.cells}) == len(group.cells)


def test_only_the_cells_asked_for_of_all_groups(bench):
    status, output, _ = bench(*quick("--only", "A1", "V1", "--peers"))
    assert status == 0
    assert len(table_of(output, "attention")) == 2
    assert len(table_of(output, "varlen")) == 2
    assert "A2" not in output


def test_the_candidates_take_their_turns_round_by_round(monkeypatch):
    """In an order that is reversed every other round."""
    calls = []

    def candidate(name):
        return Candidate(lambda threads: calls.append((name, threads)))

    monkeypatch.setattr(rounds, "WARM_UP_BELOW", 0.0)
    cell = SMALL["blocks"][0]
    done = work.Work(
        cell, {OURS: candidate(OURS), "other": candidate("other")}, None, [], work.rotation(1)
    )
    after = []
    result = work.measure(
        done, ["other", "absent"], [1, 2], 2, after_round=lambda: after.append(len(calls))
    )
    once = [(OURS, 1), ("other", 1), (OURS, 2), ("other", 2)]
    assert calls == [*once, *reversed(once)]
    assert after == [4, 8]
    assert [list(timing.seconds) for timing in result.timings] == [[OURS, "other"]] * 2


def test_own_ways_are_measured_where_peers_are_not_chosen(bench, monkeypatch):
    monkeypatch.setattr(needs, "find_spec", lambda module: None)
    _, output, _ = bench(*quick("blocks"))
    assert "in parts" in table_of(output, "blocks")[0]
    assert "numpy" not in table_of(output, "blocks")[0]
    _, output, _ = bench(*quick("blocks", "--peers", "in parts"))
    assert "in parts" in table_of(output, "blocks")[0]


def test_peers_that_are_not_installed_are_named_with_the_way_to_get_them(bench, monkeypatch):
    monkeypatch.setattr(needs, "find_spec", lambda module: None)
    _, output, _ = bench(*quick())
    (line,) = (line for line in output.splitlines() if line.startswith("Left out"))
    for words in ("numpy (pip install threadpoolctl)", "torch (pip install torch)"):
        assert words in line
    _, output, _ = bench(*quick("--peers"))
    assert "Left out" not in output


def test_a_package_stands_for_all_its_columns(monkeypatch):
    monkeypatch.setattr(needs, "find_spec", lambda module: module)
    columns = {name: command._columns(GROUPS[name], ["torch"]) for name in GROUPS}
    assert columns["decoding"] == ["torch", "torch folded"]
    assert columns["options"] == ["torch", "torch folded", "torch in blocks"]
    assert command._columns(GROUPS["attention"], ["ORT GQA"]) == ["ORT GQA"]
    assert len(command._columns(GROUPS["attention"], ["onnxruntime"])) == 3


def test_a_cell_that_needs_a_package_says_so(bench, monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    cells = (*SMALL["attention"], replace(SMALL["attention"][0], title="A3 low", bfloat16=True))
    monkeypatch.setitem(GROUPS, "attention", replace(GROUPS["attention"], cells=cells))
    status, output, _ = bench(*quick("attention", "--peers"))
    assert status == 0
    assert f"{cells[2].name} needs ml_dtypes: pip install ml_dtypes" in output
    assert cells[0].name in output


def test_no_other_missing_module_is_taken_for_a_need(bench, monkeypatch):
    def fail(*_):
        raise ModuleNotFoundError("No module named 'tileattn._core'", name="tileattn._core")

    monkeypatch.setattr(attention, "prepare", fail)
    with pytest.raises(ModuleNotFoundError, match="_core"):
        bench(*quick("attention"))


def test_the_instruction_set_is_chosen_for_the_run_only(bench):
    before = tileattn.isa()
    _, output, _ = bench(*quick("--isa", "baseline", "--peers"))
    assert "(baseline)" in output.splitlines()[0]
    assert tileattn.isa() == before


def test_without_dot_products_bfloat16_is_held_against_multiply_adds(monkeypatch):
    monkeypatch.setattr(_core, "measure_fma_peak", lambda dtype, threads: 50.0)
    for peak, seconds in ((0.0, 1 / 50), (500.0, 1 / 500)):
        monkeypatch.setattr(_core, "measure_dot_peak", lambda threads, peak=peak: peak)
        assert rounds.at_dot_peak(1e9, 1)() == seconds


# ------------------------------------------------------------------ cells


def test_names_tell_the_sizes():
    assert [cell.name for cell in SMALL["attention"]] == [
        "A1 B1 T5 S5 N2 K1 H8 causal hot",
        "A2 B1 T1 S9 N2 K2 H8 cold",
    ]
    assert SMALL["options"][2].name == "W1 window B1 T8 S8 N2 K1 H8 causal window 3 hot"
    assert SMALL["varlen"][0].name == "V1 B3 S1..4 N2 K1 H8 causal hot"
    assert SMALL["decoding"][0].name == "B2 S6 D16 N2 K1 H8 cold"


def test_flops_and_bytes_are_those_of_the_cost_model():
    block = SMALL["blocks"][0]
    cost = attention_block_cost(2, 4, 16, 2, 1, 8, is_causal=True)
    assert (block.flops, block.bytes) == (cost.matmul_flops, cost.bytes)
    step = SMALL["decoding"][0]
    projections = 2 * 2 * 16 * (2 * 2 + 2 * 1) * 8
    assert step.flops == projections + 4 * 2 * 7 * 2 * 8
    one = attention_block_cost(2, 1, 16, 2, 1, 8, is_causal=True)
    further_keys = 4 * 2 * 2 * 6 * 1 * 8  # bytes, of six keys and values of two sequences
    assert step.bytes == one.bytes + further_keys
    plain = Attention("", B=2, T=4, S=4, N=2, K=2, H=8)
    assert plain.flops == 4 * 2 * 4 * 4 * 2 * 8
    assert plain.bytes == 4 * 2 * 4 * (2 + 2 + 2 + 2) * 8  # q, k, v and y
    assert replace(plain, bias=True).bytes == plain.bytes + 4 * 2 * 2 * 4 * 4
    assert replace(plain, bfloat16=True).bytes == plain.bytes // 2
    int8 = 2 * 2 * 4 * 2 * (8 + 4)  # k and v, each with a scale for eight
    assert replace(plain, int8=True).bytes == plain.bytes // 2 + int8
    varlen = SMALL["varlen"][0]
    assert varlen.flops == 4 * (6 + 1 + 10) * 2 * 8
    assert varlen.bytes == 4 * 8 * (2 + 1 + 1 + 2) * 8
    assert Projection(3, 16, 8).bytes == 4 * (3 * 8 + 3 * 16 + 8 * 16)
    assert Projection(3, 16, 8, weight_dtype="int4").bytes == 4 * (3 * 8 + 3 * 16) + 8 * 16 // 2


# ------------------------------------------------------------------ lists and refusals


def test_list(bench):
    status, output, errors = bench("--list")
    assert (status, errors) == (0, "")
    for name, cells in SMALL.items():
        assert f"{name}: {GROUPS[name].about}" in output
        for cell in cells:
            assert re.search(rf"^  . {re.escape(cell.name)}$", output, flags=re.MULTILINE)
    assert output.count("  * ") == 2
    _, output, _ = bench("attention", "--list", "--only", "A2")
    assert output.splitlines()[1:-1] == [f"    {SMALL['attention'][1].name}"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["nonsense"], ["'nonsense'", "blocks, attention, decoding"]),
        (["--only", "A1", "nonsense"], ["--only 'nonsense'", "tileattn bench --list"]),
        (["varlen", "--only", "A1"], ["--only 'A1'", "tileattn bench varlen --list"]),
        (["--peers", "jax"], ["--peers 'jax'", "numpy, torch, onnxruntime"]),
        (["--threads", "0"], ["--threads", "at least 1"]),
        (["--threads", "1", "5000"], ["--threads", "5000"]),
        (["--rounds", "0"], ["--rounds", "at least 1"]),
        (["--isa", "z80"], ["--isa", "z80", "baseline"]),
        (["--json", "."], ["--json .", "directory"]),
        (["--json", "no/such.json"], ["no directory no"]),
        (["--from", "no.json"], ["--from no.json cannot be read"]),
        (["blocks", "--from", "no.json"], ["GROUP and --from"]),
        (["--list", "--from", "no.json"], ["--list and --from"]),
        (["--threads", "2", "--from", "no.json"], ["--threads and --from"]),
    ],
)
def test_refused_arguments(refusal, arguments, words):
    line = refusal(*arguments)
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    "name, words",
    [
        ("numpy", "numpy needs threadpoolctl: pip install threadpoolctl"),
        ("torch", "torch needs torch: pip install torch"),
        ("ORT MHA", "ORT MHA needs onnxruntime and onnx: pip install onnxruntime onnx"),
    ],
)
def test_peers_that_are_not_there(refusal, monkeypatch, name, words):
    monkeypatch.setattr(needs, "find_spec", lambda module: None)
    assert words in refusal("--peers", name)


def test_help_says_what_the_selection_is(bench):
    status, output, _ = bench("--help")
    assert status == 0
    for words in ("minute or two", *GROUPS, *needs.PACKAGES):
        assert words in output


# ------------------------------------------------------------------ progress and Ctrl-C


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_stands_on_stderr_where_that_is_a_terminal(bench, monkeypatch):
    pytest.importorskip("tqdm", reason="the bar is tqdm's")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    status, output, _ = bench(*quick("--peers"))
    assert status == 0
    assert SMALL["blocks"][0].name in terminal.getvalue()
    assert "2/2" in terminal.getvalue()
    assert "2/2" not in output


def test_without_tqdm_there_is_no_bar(bench, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda module: None)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    status, output, _ = bench(*quick("--peers"))
    assert status == 0
    assert terminal.getvalue() == ""
    assert SMALL["blocks"][0].name in output


def test_ctrl_c_leaves_what_is_done(bench, monkeypatch, tmp_path):
    path = tmp_path / "run.json"

    def interrupt(*_):
        raise KeyboardInterrupt

    from tileattn.bench import projections

    monkeypatch.setattr(projections, "prepare", interrupt)
    status, output, errors = bench(*quick("--peers", "--json", path))
    assert (status, errors) == (130, "")
    assert table_of(output, "blocks")[1].startswith(SMALL["blocks"][0].name)
    assert "Interrupted: 1 of 2 cells were measured." in output.splitlines()
    assert records.load(str(path)).interrupted
    assert bench("--from", path)[1].splitlines() == output.splitlines()[:-1]


# ------------------------------------------------------------------ files


@pytest.fixture
def measured(bench, tmp_path):
    """A file of all groups but memory, with its output."""
    path = tmp_path / "run.json"
    names = [name for name in GROUPS if name != "memory"]
    options = ["--threads", 1, 2, "--rounds", 2, "--errors", "--json", path]
    status, output, _ = bench(*names, *options)
    assert status == 0
    assert output.splitlines()[-1] == f"Written: {path}"
    return path, output


def test_a_file_gives_the_same_text_again(bench, measured):
    path, output = measured
    status, again, errors = bench("--from", path)
    assert (status, errors) == (0, "")
    assert again.splitlines() == output.splitlines()[:-1]
    status, twice, _ = bench("--from", path, path)
    assert twice.count("\nscaling\n") == 2


def test_a_file_has_all_of_the_run(measured):
    path, _ = measured
    document = json.loads(path.read_text())
    assert (document["format"], document["version"]) == ("tileattn bench", 2)
    assert document["command"][:3] == ["tileattn", "bench", "blocks"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", document["date"])
    assert {"cpu", "cpus", "threads", "isas", "caches", "load", "os"} == set(document["machine"])
    assert {"tileattn", "python", "numpy", "blas"} <= set(document["versions"])
    assert document["isa"] == tileattn.isa()
    assert [len(roof["samples"]) for roof in document["roofs"]] == [2 * 15] * 4
    for group in document["groups"]:
        assert group["cells"] == [cell.name for cell in SMALL[group["name"]]]
        for result, cell in zip(group["results"], SMALL[group["name"]], strict=True):
            assert (result["flops"], result["bytes"]) == (cell.flops, cell.bytes)
            assert result["sizes"]["N"] == cell.N
            assert result["errors"][OURS] < 0.02
            for timing in result["timings"]:
                assert {*timing["ratios"], OURS} == set(timing["seconds"])
                for name, seconds in timing["seconds"].items():
                    assert len(seconds) == len(timing["limit"]) == 2
                    if name != OURS:
                        pairs = zip(seconds, timing["seconds"][OURS], strict=True)
                        least, most = sorted(a / b for a, b in pairs)
                        for quartile, part in (("low", 0.25), ("median", 0.5), ("high", 0.75)):
                            expected = least + part * (most - least)  # of two rounds
                            assert math.isclose(timing["ratios"][name][quartile], expected)


@pytest.mark.parametrize(
    "content, words",
    [
        ("{", "cannot be read"),
        ("[]", "expected what tileattn bench --json writes, version 2"),
        ('{"format": "tileattn bench", "version": 1}', "version 2"),
        ('{"format": "tileattn bench", "version": 2}', "is damaged"),
        ('{"format": "tileattn bench", "version": 2, "groups": [3]}', "is damaged"),
    ],
)
def test_files_that_are_none(refusal, tmp_path, content, words):
    path = tmp_path / "run.json"
    path.write_text(content)
    assert words in refusal("--from", path)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a disk that is always full")
def test_a_full_disk_is_reported(bench):
    status, output, errors = bench(*quick("--peers", "--json", "/dev/full"))
    assert status == 2
    assert SMALL["blocks"][0].name in output
    assert "--json /dev/full cannot be written" in errors


def test_the_machine_without_its_files(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "_CACHES", tmp_path / "none")

    def missing(self):
        raise FileNotFoundError

    monkeypatch.setattr(machine.Path, "read_text", missing)
    monkeypatch.delattr(machine.os, "getloadavg", raising=False)
    found = machine.describe()
    assert found["load"] is None
    assert found["caches"] == {}
    assert found["cpu"]


# ------------------------------------------------------------------ memory


@pytest.mark.skipif(not memory._CLEAR_REFS.exists(), reason="Linux's /proc is what is read")
def test_memory_is_that_of_the_scores_where_they_are_held(bench, tmp_path):
    pytest.importorskip("threadpoolctl", reason="NumPy's turns need threadpoolctl")
    path = tmp_path / "run.json"
    status, output, _ = bench(*quick("memory", "--peers", "numpy", "--json", path))
    assert status == 0
    (result,) = records.load(str(path)).memory.results
    (cell,) = SMALL["memory"]
    scores = 4 * cell.N * cell.T * cell.S
    assert result.result == 4 * cell.N * cell.T * cell.H
    # Little that the allocator kept is left to be taken again.
    assert scores - (1 << 20) < result.peak["numpy"] < 3 * scores
    assert result.peak[OURS] < scores
    assert cell.name in output
    assert bench("--from", path)[1].splitlines() == output.splitlines()[:-1]


def test_a_candidate_that_fails_in_its_process_is_reported(bench, monkeypatch, tmp_path):
    class Done:
        returncode, stdout, stderr = 1, "", "Traceback\nKilled: 9\n"

    monkeypatch.setattr(memory.subprocess, "run", lambda *_, **__: Done)
    path = tmp_path / "run.json"
    status, output, _ = bench(*quick("memory", "--peers", "--json", path))
    assert status == 1  # which a peer that fails does not make of it
    assert f"{SMALL['memory'][0].name}: tileattn failed: Killed: 9" in output.splitlines()
    assert bench("--from", path)[1].splitlines() == output.splitlines()[:-1]


# ------------------------------------------------------------------ imports


def test_the_package_imports_none_of_it():
    names = {"matplotlib", "tqdm", "torch", "onnxruntime", "threadpoolctl"}
    for statement, more in (("tileattn", "or 'bench' in m"), ("tileattn.__main__", "")):
        code = (
            f"import sys, {statement}; "
            f"print([m for m in sys.modules if m.split('.')[0] in {names!r} {more}])"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout.strip() == "[]", done.stderr
