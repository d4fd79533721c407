"""The pictures of `tileattn bench` and `tileattn run`: what is on them, where they are refused."""

import itertools
import re
from dataclasses import asdict, replace
from xml.etree import ElementTree

import numpy as np
import pytest

from tileattn import __main__ as main
from tileattn import _core
from tileattn.bench import needs, records
from tileattn.bench.cells import ATTENTION, MEMORY, SCALING, SHORT, VARLEN
from tileattn.bench.groups import GROUPS
from tileattn.bench.records import (
    OURS,
    GroupResults,
    Memory,
    MemoryResults,
    Result,
    Roof,
    Run,
    Timing,
)

SMALL = ["-B", "2", "-T", "12", "-D", "16", "-N", "4", "-K", "2", "-H", "8", "--repeats", "1"]
#: How many times ours each takes; two of onnxruntime's ways, the second the faster.
TIMES = {"numpy": 4.0, "torch": 1.5, "ORT MHA": 3.0, "ORT GQA": 2.5}
NAMES = ["NumPy", "PyTorch", "onnxruntime"]


def result_of(cell, times=TIMES):
    # Twice what the roofs below allow.
    seconds = 2 * max(cell.flops / 100e9, cell.bytes / 10e9)
    ours = [seconds, seconds / 2, 2 * seconds]
    seconds = {
        OURS: ours,
        **{name: [ratio * each for each in ours] for name, ratio in times.items()},
    }
    timings = [Timing(n, [0.01] * 3, seconds) for n in (1, 2)]
    return Result(
        cell.name,
        cell.label,
        asdict(cell),
        cell.flops,
        cell.bytes,
        cell.of_limit,
        1.0,
        "GFLOP/s",
        timings,
        {},
    )


def run_of(plan, times=TIMES):
    """A run of those cells, on every number of threads alike."""
    peers = list(times)
    return Run(
        command=["tileattn", "bench"],
        date="2026-01-02T03:04:05+00:00",
        machine={"cpu": "A CPU", "cpus": 2, "threads": 2, "isas": [], "caches": {}, "load": 0.0,
                 "os": "an OS"},
        versions={"tileattn": "1.2", "python": "3", "numpy": "4.5", "blas": "b", "torch": "6.7",
                  "onnxruntime": "8.9"},
        isa="avx2",
        alignment="line",
        threads=[1, 2],
        rounds=3,
        errors=False,
        not_installed={},
        groups=[
            GroupResults(name, [cell.name for cell in cells], peers,
                         [result_of(cell, times) for cell in cells])
            for name, cells in plan.items()
        ],
        roofs=[Roof("FMA peak", 2, [90.0, 100.0]), Roof("read bandwidth", 2, [9.0, 10.0])],
    )  # fmt: skip


def memory_of(cells):
    peaks = [(OURS, 2_000_000), ("numpy", 50_000_000), ("torch", 0)]
    results = [Memory(cell.name, asdict(cell), 2, 1_000_000, dict(peaks), {}) for cell in cells]
    return MemoryResults([cell.name for cell in cells], ["numpy", "torch"], results)


@pytest.fixture
def draw(tmp_path, capsys):
    """Draws runs by way of their files -> the folder."""
    pytest.importorskip("matplotlib", reason="pictures are matplotlib's")

    def through_files(*runs):
        paths = [str(tmp_path / f"{i}.json") for i in range(len(runs))]
        for run, path in zip(runs, paths, strict=True):
            records.save(run, path)
        folder = tmp_path / "pictures"
        assert main.main(["bench", "--from", *paths, "--plot", str(folder)]) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        drawn = captured.out.splitlines()[-1].removeprefix("Drawn: ")
        if folder.exists() and any(folder.iterdir()):
            assert {*drawn.split(", ")} == {str(path) for path in folder.iterdir()}
        return folder

    return through_files


def texts_of(path):
    """What stands on an SVG: matplotlib leaves each text in a comment, beside its outlines."""
    builder = ElementTree.TreeBuilder(insert_comments=True)
    root = ElementTree.parse(path, ElementTree.XMLParser(target=builder)).getroot()
    return [node.text.strip() for node in root.iter(ElementTree.Comment)]


def check_pixels(path):
    """A white card, and much on it."""
    from matplotlib.image import imread

    pixels = imread(path)[..., :3]
    height, width, _ = pixels.shape
    assert width == 1600
    assert height > 500
    for edge in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]):
        assert (edge == 1).all()
    dark = (pixels.min(axis=-1) < 0.9).mean()
    assert 0.01 < dark < 0.3


def test_every_picture_is_drawn(draw):
    run = run_of({**SHORT, "scaling": SCALING})
    folder = draw(replace(run, memory=memory_of(MEMORY)))
    names = ["memory", "roofline", "scaling", "speed"]
    assert sorted(path.stem for path in folder.glob("*.svg")) == names
    assert sorted(path.stem for path in folder.glob("*.png")) == names
    for path in folder.glob("*.png"):
        check_pixels(path)
    for path in folder.glob("*.svg"):
        assert "2026" not in path.read_text()
        conditions = "A CPU (avx2), 2 threads;  tileattn 1.2"
        assert any(text.startswith(conditions) for text in texts_of(path))


def test_speed_has_every_cell_and_its_peers_fastest_way(draw):
    folder = draw(run_of(SHORT))
    texts = texts_of(folder / "speed.svg")
    cells = [cell.name for cells in SHORT.values() for cell in cells]
    for text in [*cells, *SHORT, *NAMES]:
        assert texts.count(text) == 1, text
    for ratio, count in (("4.0×", len(cells)), ("1.50×", len(cells)), ("2.5×", len(cells))):
        assert texts.count(ratio) >= count
    assert "3.0×" not in texts


def test_what_has_no_peers_is_in_no_comparison(draw):
    folder = draw(run_of({"varlen": VARLEN}, times={"padded": 2.0}))
    assert not (folder / "speed.svg").exists()
    assert (folder / "roofline.svg").exists()


def test_nothing_to_draw(draw):
    assert list(draw(run_of({})).iterdir()) == []


def test_the_last_of_several_runs_counts(draw):
    plan = {"attention": ATTENTION[:2]}
    texts = texts_of(draw(run_of(plan), run_of(plan, {"numpy": 7.0})) / "speed.svg")
    assert texts.count("7.0×") == 2
    assert "PyTorch" not in texts
    for cell in plan["attention"]:
        assert texts.count(cell.name) == 1


def test_runs_of_different_machines_are_not_mixed(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="pictures are matplotlib's")
    first = run_of(SHORT)
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    records.save(first, paths[0])
    for other in (replace(first, isa="avx512"), replace(first, threads=[1])):
        records.save(other, paths[1])
        assert main.main(["bench", "--from", *paths, "--plot", str(tmp_path / "pictures")]) == 2
        assert "different machines" in capsys.readouterr().err


def test_a_package_may_be_in_one_of_several_runs(draw):
    first, second = run_of({"blocks": SHORT["blocks"]}), run_of({"attention": SHORT["attention"]})
    del second.versions["onnxruntime"]
    assert any("onnxruntime 8.9" in text for text in texts_of(draw(first, second) / "speed.svg"))


def test_the_same_run_gives_the_same_file(draw):
    run = run_of({**SHORT, "scaling": SCALING})
    folder = draw(run)
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    draw(run)
    for name, content in first.items():
        assert (folder / name).read_bytes() == content, name


def test_the_roofline_names_its_points_and_lines(draw):
    texts = texts_of(draw(run_of(SHORT)) / "roofline.svg")
    for text in (*SHORT, "multiply-adds: 100 GFLOP/s", "reading: 10 GB/s"):
        assert texts.count(text) == 1, text
    for cells in SHORT.values():
        for cell in cells:
            assert texts.count(cell.label) == 1, cell.label


@pytest.mark.parametrize(
    "plan", [SHORT, {name: GROUPS[name].cells for name in ("options", "projections")}]
)
def test_no_two_names_on_the_roofline_overlap(plan):
    pictures = pytest.importorskip("tileattn.bench.pictures", reason="pictures are matplotlib's")
    from matplotlib.text import Text

    figure = pictures._roofline([run_of(plan)])
    assert len(figure.axes) == (1 if plan is SHORT else len(plan))
    for axes in figure.axes:
        # Of the letters alone: an annotation's own box has the line that leads to it, too.
        for text in axes.texts:
            text.get_window_extent()  # places it
        boxes = [(text.get_text(), Text.get_window_extent(text)) for text in axes.texts]
        assert len(boxes) > 2
        for (name, box), (other, other_box) in itertools.combinations(boxes, 2):
            assert not box.overlaps(other_box), (name, other)


def test_scaling_names_its_curves(draw):
    texts = texts_of(draw(run_of({"scaling": SCALING})) / "scaling.svg")
    for name in ("tileattn", *NAMES, "64", "8192"):
        assert texts.count(name) == 2, name
    assert "attention, N 12 K 12 H 64, causal" in texts
    assert "block, D 768 N 12 K 12 H 64, causal" in texts


def test_memory_names_its_curves(draw):
    folder = draw(replace(run_of({}), memory=memory_of(MEMORY)))
    texts = texts_of(folder / "memory.svg")
    for name in ("tileattn", "NumPy", "PyTorch", "the result", "10 MB"):
        assert texts.count(name) == 1, name


def test_without_matplotlib_nothing_is_measured(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(needs, "find_spec", lambda module: None)
    for command in (["bench", "--plot", str(tmp_path)], ["run", "--plot", str(tmp_path / "x.svg")]):
        assert main.main(command) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "--plot needs matplotlib: pip install matplotlib" in captured.err


def test_a_folder_that_cannot_be(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="pictures are matplotlib's")
    (tmp_path / "file").touch()
    assert main.main(["bench", "--plot", str(tmp_path / "file" / "folder")]) == 2
    assert "--plot" in capsys.readouterr().err


# ------------------------------------------------------------------ run


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(main, "PAUSE", 0.0)
    monkeypatch.setattr(_core, "measure_fma_peak", lambda dtype, num_threads: 80.0)


@pytest.mark.usefixtures("quick")
def test_run_draws_its_operations(capsys, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib", reason="pictures are matplotlib's")
    operations = [[1e-3] * 3] * 4 + [[2e-3] * 3] * 2
    # Half the rounds' ratios are of 10 and more, which no ratio of medians is.
    numpy = ([0.08] * 3, [1e-2, 3e-3, 3e-3])
    times = main._Times(operations, [4e-3] * 3, numpy, 80.0)
    monkeypatch.setattr(main, "_time", lambda problem, threads, rounds: times)
    for kind in ("svg", "png"):
        assert main.main(["run", *SMALL, "--plot", str(tmp_path / f"run.{kind}")]) == 0
    assert capsys.readouterr().err == ""
    check_pixels(tmp_path / "run.png")
    texts = texts_of(tmp_path / "run.svg")
    for name in (*main.OPERATIONS, "the block in one call", "tileattn", "NumPy"):
        assert texts.count(name) == 1, name
    assert texts.count("1.00 ms   12%") == 4
    assert texts.count("2.00 ms   25%") == 2
    assert "4.00 ms" in texts
    assert "3.00 ms   3.0×" in texts
    assert "80.0 ms   20.0×" in texts
    assert any(re.match(r"B 2 +T 12 .*float32", text) for text in texts)


@pytest.mark.usefixtures("quick")
def test_run_without_numpy_or_norm(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib", reason="pictures are matplotlib's")
    draw = np.random.default_rng(0).standard_normal
    arrays = {
        "in_proj_weight": draw((24, 8), np.float32),
        "out_proj.weight": draw((8, 8), np.float32),
    }
    np.savez(tmp_path / "attention.npz", **arrays)
    monkeypatch.setattr(main, "NUMPY_SCORE_BYTES", 0)
    options = ["--weights", str(tmp_path / "attention.npz"), "--heads", "2", "-T", "4"]
    path = tmp_path / "run.svg"
    assert main.main(["run", *options, "--repeats", "1", "--plot", str(path)]) == 0
    texts = texts_of(path)
    assert "NumPy" not in texts
    assert "LayerNorm(X + Z)" not in texts


@pytest.mark.parametrize(
    "path, words", [("run.gif", "expected the name of a .svg or .png"), (".", "is a directory")]
)
def test_run_refuses_other_files(capsys, path, words):
    assert main.main(["run", "--plot", path]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
