"""The command line: what it prints, what it refuses, and how it ends."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tileattn
from tileattn import __main__ as command
from tileattn import _core, cost, reference
from tileattn._command import duration
from tileattn._values import shortened

SMALL = ["-B", "2", "-T", "12", "-D", "16", "-N", "4", "-K", "2", "-H", "8", "--repeats", "1"]
PEAK = 80.0
LIMIT = command.TOLERANCE["float32"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """A peak to calculate with, and no rests."""
    monkeypatch.setattr(command, "PAUSE", 0.0)
    monkeypatch.setattr(_core, "measure_fma_peak", lambda dtype, num_threads: PEAK)


def lines_of(capsys, *arguments, status=0):
    """The lines that a successful command prints."""
    assert command.main([str(argument) for argument in arguments]) == status
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out.splitlines()


def refusal_of(capsys, *arguments):
    """The one line with which a command refuses."""
    assert command.main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.endswith("\n")
    (line,) = captured.err.splitlines()
    assert line.startswith("tileattn: error: ")
    return line


def layer(N=4, K=2, H=8, D=16, Hv=8, dtype=np.float32):
    draw = np.random.default_rng(7).standard_normal
    shapes = {
        "w_q": (D, N, H),
        "w_k": (D, K, H),
        "w_v": (D, K, Hv),
        "w_o": (N, Hv, D),
        "b_q": (N, H),
        "b_k": (K, H),
        "b_v": (K, Hv),
        "b_o": (D,),
        "norm_weight": (D,),
        "norm_bias": (D,),
    }
    return {name: draw(shape).astype(dtype) / 4 for name, shape in shapes.items()}


def expected_of(arrays, x, **options):
    arrays = {name: array.astype(np.float64) for name, array in arrays.items()}
    norm = tileattn.LayerNorm(arrays.pop("norm_weight"), arrays.pop("norm_bias"))
    return reference.attention_block(x.astype(np.float64), **arrays, norm=norm, **options)


@pytest.fixture
def weights(tmp_path):
    """A layer in tileattn's own names."""
    path = tmp_path / "layer.npz"
    np.savez(path, **layer())
    return path


@pytest.fixture
def x_file(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.random.default_rng(8).standard_normal((2, 5, 16), dtype=np.float32))
    return path


# ------------------------------------------------------------------ run, seeded


def test_run_prints_every_operation_and_passes(capsys):
    lines = lines_of(capsys, "run", *SMALL)
    sizes = cost.attention_block_cost(2, 12, 16, 4, 2, 8, is_causal=True)
    assert lines[0] == "attention block with random weights (seed 0), float32, causal"
    assert lines[1] == sizes.sizes_text()
    for row in sizes.rows:
        (line,) = (line for line in lines if line.startswith(row.operation))
        assert f"  {row.output_text}  " in line
        assert f" {cost.format_count(row.flops)} " in line
        assert f" {cost.format_count(row.params) if row.params else '-'} " in line
    text = "\n".join(lines)
    error, limit = re.search(r"max error +(\S+) against .*: passes, limit (\S+)", text).groups()
    assert float(error) < 1e-5
    assert float(limit) < 2e-5
    assert f"FMA peak    {PEAK} GFLOP/s in float32, the best of these rounds" in lines
    assert f"ISA         {tileattn.isa()}" in lines
    assert f"threads     {tileattn.get_num_threads()}" in lines


def test_run_defaults_to_the_documented_block_and_fits_the_screen(capsys):
    lines = lines_of(capsys, "run", "--repeats", 1)
    assert lines[1].startswith("B 1  T 512  S 512  D 768  N 12  K 4  G 3  H 64 ")
    assert max(map(len, lines)) <= 100
    assert any(": passes, " in line for line in lines)


@pytest.mark.parametrize(
    "options, first_line",
    [
        (["--dtype", "float64"], "float64, causal"),
        (["--no-causal", "--threads", 1, "--seed", 3], "seed 3), float32, not causal"),
        (["--dtype", "float64", "--no-causal"], "float64, not causal"),
    ],
)
def test_run_options(capsys, options, first_line):
    lines = lines_of(capsys, "run", *SMALL, *options)
    assert lines[0].endswith(first_line)
    if "--threads" in options:
        assert lines[-1] == "threads     1"
    if "float64" in options:
        (line,) = (line for line in lines if line.startswith("max error"))
        assert float(line.split()[2]) < 1e-13


SECONDS = [2e-6, 3e-3, 0.025, 0.25, 3.0, 1e-4]  # of the operations, each by itself


def test_run_table_is_made_of_flops_time_and_peak(capsys, monkeypatch):
    # Rounds of once, twice and half the time; NumPy's block is slow in all but the second.
    operations = [[seconds, 2 * seconds, seconds / 2] for seconds in SECONDS]
    numpy = ([2.0, 4.0, 2.0], [0.5, 0.5, 0.05])
    times = command._Times(operations, [0.004, 0.005, 0.003], numpy, PEAK)
    monkeypatch.setattr(command, "_time", lambda problem, threads, rounds: times)
    lines = lines_of(capsys, "run", *SMALL)
    rows = cost.attention_block_cost(2, 12, 16, 4, 2, 8, is_causal=True).rows

    def check(line, flops, seconds, text):
        rate = flops / seconds / 1e9
        assert line.split()[-4:] == [*text.split(), f"{rate:.1f}", f"{rate / PEAK:.1%}"]

    def line_of(start):
        (line,) = (line for line in lines if line.startswith(start))
        return line

    # Scores, softmax and values run as one, and softmax's FLOPs are of another kind.
    timed = (
        (0, rows[0].flops, "2.00 us"),
        (1, rows[1].flops, "3.00 ms"),
        (2, rows[2].flops, "25.0 ms"),
        (4, rows[3].flops + rows[5].flops, "250 ms"),
        (6, rows[6].flops, "3.00 s"),
        (7, rows[7].flops, "100 us"),
    )
    for (index, flops, text), seconds in zip(timed, SECONDS, strict=True):
        check(line_of(rows[index].operation), flops, seconds, text)
    ends = [line_of(rows[index].operation).split(rows[index].output_text)[1] for index in (3, 4, 5)]
    assert [end.split()[0] for end in ends] == ["\\", ">", "/"]
    assert [len(end.split()) for end in ends] == [1, 5, 1]
    flops = sum(row.flops for row in rows if row.is_matmul)
    check(line_of("one after the other"), flops, sum(SECONDS), "3.28 s")
    check(line_of("the block in one call"), flops, 0.004, "4.00 ms")
    assert any("medians of 3 rounds" in line for line in lines)
    assert "NumPy       block 2.00 s, 666.7 (583.3..733.3) times tileattn's" in lines
    assert "            attention 500 ms, 1.0 (0.7..1.5) times tileattn's" in lines
    (line,) = (line for line in lines if line.startswith("rounds"))
    assert line.split("rounds")[1].strip() == (
        "3.00 ms to 5.00 ms for the block; 50% to 200% of their medians for the operations"
    )


@pytest.mark.parametrize(
    "sizes",
    [(1, 512, 768, 12, 4, 64), (128, 512, 1024, 16, 16, 64), (1, 16384, 8192, 64, 8, 128)],
)
def test_run_table_fits_the_screen(sizes):
    model = cost.attention_block_cost(*sizes, is_causal=True)
    # At 4321 GFLOP/s, which is more than CPUs reach.
    seconds = [
        sum(row.flops for row in model.rows[covered]) / 4321e9
        for covered in command.ROWS_OF_OPERATION
    ]
    times = command._Times([[each] for each in seconds], [sum(seconds)], None, 5000.0)
    assert max(map(len, command._table(model, times).splitlines())) <= 100


@pytest.mark.parametrize(
    "seconds, text",
    [
        (1e-9, "0.00 us"),
        (9.994e-6, "9.99 us"),
        (9.996e-6, "10.0 us"),
        (99.94e-6, "99.9 us"),
        (99.96e-6, "100 us"),
        (999.4e-6, "999 us"),
        (999.6e-6, "1.00 ms"),
        (0.9996, "1.00 s"),
        (12345.6, "12346 s"),
    ],
)
def test_durations_have_three_figures(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize("wrong", [1e-4, np.nan, np.inf])
@pytest.mark.parametrize("of_a_file", [False, True])
def test_run_with_a_wrong_result_fails(capsys, monkeypatch, weights, of_a_file, wrong):
    right = tileattn.AttentionBlock.__call__

    def spoilt(self, x, **options):
        y = right(self, x, **options)
        y[-1, -1, -1] += wrong
        return y

    monkeypatch.setattr(tileattn.AttentionBlock, "__call__", spoilt)
    options = ["--weights", weights, "-T", 9, "--repeats", 1] if of_a_file else SMALL
    lines = lines_of(capsys, "run", *options, status=1)
    assert any(line.startswith("max error") and ": FAILS, " in line for line in lines)


def problem_of(left_out=(), shape=(2, 5, 16), dtype=np.float64, **changes):
    """A layer without some of its arrays, its block, and data."""
    arrays = {name: a for name, a in layer(Hv=3, dtype=dtype).items() if name not in left_out}
    norm = tileattn.LayerNorm(arrays.pop("norm_weight", None), arrays.pop("norm_bias", None))
    weights = {**arrays, "norm": norm, "residual": True, "is_causal": False, **changes}
    x = np.random.default_rng(9).standard_normal(shape, dtype=dtype)
    return command._Problem("", weights, tileattn.AttentionBlock(**weights), x, is_real=True)


BIASES = ("b_q", "b_k", "b_v", "b_o")
PROBLEMS = [
    {},
    {"is_causal": True},
    {"shape": (5, 16)},
    {"shape": (5, 16), "is_causal": True, "norm": None},
    {"norm": None},
    {"residual": False},
    {"residual": False, "norm": None},
    {"left_out": ("norm_weight",)},
    {"left_out": ("norm_bias",)},
    {"left_out": ("norm_weight", "norm_bias")},
    {"left_out": BIASES},
    *({"left_out": [bias]} for bias in BIASES),
]


@pytest.mark.parametrize("options", PROBLEMS)
def test_the_comparison_in_numpy_computes_the_same_block(options):
    problem = problem_of(**options)
    y, (block, attention) = command._numpy_block(problem.x, problem.weights)
    # Both in float64, from sums of a dozen terms.
    expected = reference.attention_block(problem.x, **problem.weights)
    np.testing.assert_allclose(y, expected, rtol=1e-11, atol=1e-12)
    assert 0 < attention < block


@pytest.mark.parametrize(
    # Files without a norm are without a residual too: there is no row for it.
    "options",
    [o for o in PROBLEMS if o.get("norm", "") is not None or not o.get("residual", True)],
)
def test_the_operations_by_themselves_make_the_block(options):
    problem = problem_of(**options)
    # As a file may hold them: in another order of memory, and one element off.
    problem.x = np.asfortranarray(problem.x)
    raw = np.zeros(problem.weights["w_q"].nbytes + 1, dtype=np.uint8)[1:]
    unaligned = raw.view(np.float64).reshape(problem.weights["w_q"].shape)
    unaligned[...] = problem.weights["w_q"]
    problem.weights["w_q"] = unaligned
    operations, output = command._operations(problem, 1)
    for call in operations:
        call()
    expected = reference.attention_block(problem.x, **problem.weights)
    np.testing.assert_allclose(output.reshape(expected.shape), expected, rtol=1e-11, atol=1e-12)
    rows = 8 if problem.weights["norm"] is not None else 7
    assert command.ROWS_OF_OPERATION[len(operations) - 1].stop == rows


@pytest.mark.parametrize("options", PROBLEMS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_check_is_of_the_same_block(options, dtype):
    problem = problem_of(**options, dtype=dtype)
    y = problem.block(problem.x)
    error, limit, stray = command._check(problem, y)
    assert error <= limit
    tolerance = command.TOLERANCE[np.dtype(dtype).name]
    assert limit == pytest.approx(tolerance * np.sqrt(np.mean(y**2)), rel=1e-4)
    assert stray == 0
    y.flat[7] += 2 * limit
    assert command._check(problem, y)[0] > limit


@pytest.mark.parametrize(
    "options",
    # b_k adds the same to all scores of a row, which changes nothing.
    [o for o in PROBLEMS if o and "shape" not in o and o.get("left_out") != ["b_k"]],
)
def test_the_check_tells_one_block_from_another(options):
    problem = problem_of(dtype=np.float32)
    error, limit, _ = command._check(
        problem, problem_of(dtype=np.float32, **options).block(problem.x)
    )
    assert error > limit


def test_the_limit_grows_with_what_amplifies_roundings():
    problem = problem_of(dtype=np.float32, w_o=np.zeros((4, 3, 16), dtype=np.float32))
    problem.x += 1000  # LayerNorm subtracts it again, but x + b_o has been rounded
    y = problem.block(problem.x)
    error, limit, _ = command._check(problem, y)
    assert LIMIT * np.sqrt(np.mean(y**2)) < error <= limit < 1e-3
    y[0, 0, 0] += 2 * limit
    assert command._check(problem, y)[0] > limit


def test_the_limit_knows_of_roundings_in_products_that_the_norm_magnifies():
    constant = np.full((4, 3, 16), 100, dtype=np.float32)
    problem = problem_of(dtype=np.float32, w_o=constant)  # each column of Z is the same large sum
    y = problem.block(problem.x)
    error, limit, _ = command._check(problem, y)
    assert LIMIT * np.sqrt(np.mean(y**2)) < error <= limit < 1e-2
    y[0, 0, 0] += 2 * limit
    assert command._check(problem, y)[0] > limit


@pytest.mark.parametrize("there", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("result", [np.nan, np.inf, -np.inf, 0.0])
def test_what_is_not_finite_must_be_the_same(monkeypatch, there, result):
    exact = np.array([[1.0, there], [3.0, 4.0]])
    monkeypatch.setattr(reference, "attention_block", lambda x, **weights: exact)
    y = exact.astype(np.float32)
    y[1, 0] += 1e-3
    y[0, 1] = result
    error, limit, stray = command._check(problem_of(), y)
    assert limit == pytest.approx(LIMIT * np.sqrt(26 / 3))  # of the three that are finite
    assert stray == 1
    if np.array_equal(there, result, equal_nan=True):
        assert error == pytest.approx(1e-3, rel=1e-3)
    else:
        assert not error <= 1e300


def test_the_comparison_in_numpy_is_left_out_where_its_scores_would_not_fit(capsys, monkeypatch):
    score_bytes = 2 * 4 * 12 * 12 * 4
    monkeypatch.setattr(command, "NUMPY_SCORE_BYTES", score_bytes)
    assert any("times tileattn's" in line for line in lines_of(capsys, "run", *SMALL))
    monkeypatch.setattr(command, "NUMPY_SCORE_BYTES", score_bytes - 1)
    assert any("not timed" in line for line in lines_of(capsys, "run", *SMALL))


def test_a_call_of_each_round_is_timed(monkeypatch):
    problem = command._seeded(command._parser().parse_args(["run", *SMALL]))
    called = []
    monkeypatch.setattr(
        command,
        "_operations",
        lambda problem, threads: ([lambda: called.append(1), lambda: called.append(2)], None),
    )
    monkeypatch.setattr(problem.block.__class__, "__call__", lambda *a, **o: called.append(3))
    # Each round: two operations and the block, each with a start and an end.
    rounds = ((1, 10, 100), (5, 30, 500), (3, 20, 300))
    clock = iter([float(t) for times in rounds for seconds in times for t in (7, 7 + seconds)])
    numpy_seconds = iter(
        # Each after a warm-up.
        [(99.0, 99.0), (2.0, 1.0), (99.0, 99.0), (9.0, 8.0), (99.0, 99.0), (4.0, 3.0)]
    )
    monkeypatch.setattr(command, "_numpy_block", lambda x, weights: (x, next(numpy_seconds)))
    monkeypatch.setattr(command.time, "perf_counter", lambda: next(clock))
    peaks = iter([70.0, 90.0, 80.0])
    monkeypatch.setattr(_core, "measure_fma_peak", lambda dtype, num_threads: next(peaks))
    times = command._time(problem, 1, 3)
    assert times == command._Times(
        [[1.0, 5.0, 3.0], [10.0, 30.0, 20.0]],
        [100.0, 500.0, 300.0],
        ([2.0, 9.0, 4.0], [1.0, 8.0, 3.0]),
        90.0,
    )
    assert called == [1, 2, 3, 1, 2, 3] * 3  # the first turn of each round is not timed
    assert next(clock, None) is next(numpy_seconds, None) is None


def test_without_a_number_of_rounds_there_are_as_many_as_there_is_time_for(monkeypatch):
    problem = command._seeded(command._parser().parse_args(["run", *SMALL]))
    assert len(command._time(problem, 1, None).block) == command.ROUNDS
    monkeypatch.setattr(command, "SECONDS", 0.0)
    assert len(command._time(problem, 1, None).block) == command.LEAST_ROUNDS
    assert len(command._time(problem, 1, 7).block) == 7


def test_the_seed_decides_the_data(capsys, tmp_path):
    outputs = []
    for number, seed in enumerate((1, 1, 2)):
        path = tmp_path / f"{number}.npy"
        lines_of(capsys, "run", *SMALL, "--seed", seed, "--output", path)
        outputs.append(np.load(path))
    assert outputs[0].shape == (2, 12, 16)
    np.testing.assert_array_equal(outputs[0], outputs[1])
    assert not np.array_equal(outputs[0], outputs[2])


# ------------------------------------------------------------------ run, real layers


@pytest.mark.parametrize("shape", [(2, 5, 16), (5, 16)])
@pytest.mark.parametrize("causal", [[], ["--causal"]])
def test_run_of_a_layer_on_data(capsys, tmp_path, weights, shape, causal):
    x = np.random.default_rng(8).standard_normal(shape, dtype=np.float32)
    np.save(tmp_path / "x.npy", x)
    lines = lines_of(
        capsys,
        *("run", "--weights", weights, "--input", tmp_path / "x.npy"),
        *("--output", tmp_path / "y", "--repeats", 1, *causal),
    )
    assert lines[0] == f"layer 0 of layer.npz, float32, {'causal' if causal else 'not causal'}"
    y = np.load(tmp_path / "y")  # the very name that was given
    assert y.dtype == np.float32
    assert y.shape == shape
    np.testing.assert_allclose(y, expected_of(layer(), x, is_causal=bool(causal)), atol=LIMIT)
    assert any(": passes, " in line for line in lines)
    assert any("times tileattn's" in line for line in lines)


@pytest.mark.parametrize(
    "name", ["b_q", "b_v", "b_o"]
)  # b_k adds the same to all of a row's scores
def test_run_of_a_layer_with_another_bias_than_the_file_s_fails(
    capsys, monkeypatch, weights, x_file, name
):
    init = tileattn.AttentionBlock.__init__

    def spoilt(self, *arguments, **options):
        bias = options[name].copy()
        bias.flat[0] += 0.01
        init(self, *arguments, **{**options, name: bias})

    monkeypatch.setattr(tileattn.AttentionBlock, "__init__", spoilt)
    options = ("run", "--weights", weights, "--input", x_file, "--repeats", 1)
    assert any(": FAILS, " in line for line in lines_of(capsys, *options, status=1))


@pytest.mark.parametrize(
    "arrays",
    [
        {name: a for name, a in layer().items() if name not in BIASES},
        {name: a for name, a in layer().items() if not name.startswith("norm")},
        layer(Hv=5),
        layer(dtype=np.float64),
        layer(K=4, Hv=1),
    ],
)
def test_run_of_each_kind_of_layer_passes(capsys, tmp_path, arrays):
    path = tmp_path / "layer.npz"
    np.savez(path, **arrays)
    lines = lines_of(capsys, "run", "--weights", path, "-B", 2, "-T", 9, "--repeats", 1)
    assert any(": passes, " in line for line in lines)
    assert any("times tileattn's" in line for line in lines)


def test_run_of_a_layer_with_a_number(capsys, tmp_path, x_file):
    path = tmp_path / "two.npz"
    second = {name: 2 * array for name, array in layer().items()}
    both = {
        f"layers.{i}.{name}": a
        for i, arrays in enumerate((layer(), second))
        for name, a in arrays.items()
    }
    np.savez(path, **both)
    lines_of(
        capsys,
        *("run", "--weights", path, "--layer", 1, "--heads", 4, "--kv-heads", 2),
        *("--input", x_file, "--output", tmp_path / "y.npy", "--repeats", 1),
    )
    np.testing.assert_allclose(
        np.load(tmp_path / "y.npy"), expected_of(second, np.load(x_file)), atol=LIMIT
    )


def test_run_of_a_layer_with_a_prefix(capsys, tmp_path, x_file):
    path = tmp_path / "stacks.npz"
    other = {name: 2 * array for name, array in layer().items()}
    stacks = (("one", layer()), ("other", other))
    np.savez(
        path, **{f"{stack}.{name}": a for stack, arrays in stacks for name, a in arrays.items()}
    )
    assert "prefix" in refusal_of(capsys, "run", "--weights", path)
    lines_of(
        capsys,
        *("run", "--weights", path, "--prefix", "other"),
        *("--input", x_file, "--output", tmp_path / "y.npy", "--repeats", 1),
    )
    np.testing.assert_allclose(
        np.load(tmp_path / "y.npy"), expected_of(other, np.load(x_file)), atol=LIMIT
    )


def test_run_of_a_layer_on_random_data_of_the_sizes_given(capsys, weights):
    lines = lines_of(capsys, "run", "--weights", weights, "-B", 3, "-T", 9, "--repeats", 1)
    assert lines[1].startswith("B 3  T 9  S 9  D 16  N 4  K 2  G 2  H 8 ")


@pytest.fixture
def attention(tmp_path):
    """A bare attention module, in torch's names: neither residual nor norm."""
    draw = np.random.default_rng(1).standard_normal
    shapes = {
        "in_proj_weight": (48, 16),
        "in_proj_bias": (48,),
        "out_proj.weight": (16, 16),
        "out_proj.bias": (16,),
    }
    path = tmp_path / "attention.npz"
    np.savez(path, **{name: draw(shape) / 4 for name, shape in shapes.items()})
    return path


def test_run_of_a_bare_attention_module_has_no_row_for_the_norm(capsys, attention):
    lines = lines_of(capsys, "run", "--weights", attention, "--heads", 2, "-T", 4, "--repeats", 1)
    assert not any("LayerNorm" in line for line in lines)
    assert "Totals and GFLOP/s count matrix products over visible pairs." in lines
    assert any(": passes, " in line for line in lines)


def test_nan_in_the_input_is_data(capsys, tmp_path, weights):
    x = np.zeros((4, 16), dtype=np.float32)
    x[2, 3] = np.nan
    np.save(tmp_path / "x.npy", x)
    lines = lines_of(
        capsys,
        *("run", "--weights", weights, "--input", tmp_path / "x.npy", "--causal"),
        *("--output", tmp_path / "y.npy", "--repeats", 1),
    )
    nan = np.isnan(np.load(tmp_path / "y.npy"))
    np.testing.assert_array_equal(nan, np.array([False, False, True, True])[:, None].repeat(16, 1))
    (line,) = (i for i, line in enumerate(lines) if line.startswith("max error"))
    assert ": passes, " in lines[line]
    assert "32 NaN or inf" in lines[line + 1]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_everywhere_passes(capsys, tmp_path, attention, value):
    np.save(tmp_path / "x.npy", np.full((3, 16), value))
    options = ("run", "--weights", attention, "--heads", 2, "--input", tmp_path / "x.npy")
    lines = lines_of(capsys, *options, "--repeats", 1)
    assert "max error   0.0e+00 against the float64 reference: passes, limit 0e+00" in lines
    assert any("48 NaN or inf" in line for line in lines)


def test_nan_that_the_result_lacks_fails(capsys, tmp_path, monkeypatch, weights):
    x = np.ones((4, 16), dtype=np.float32)
    x[3] = np.inf
    np.save(tmp_path / "x.npy", x)
    right = tileattn.AttentionBlock.__call__
    monkeypatch.setattr(
        tileattn.AttentionBlock,
        "__call__",
        lambda self, x, **options: np.nan_to_num(right(self, x, **options)),
    )
    options = ("run", "--weights", weights, "--input", tmp_path / "x.npy", "--causal")
    lines = lines_of(capsys, *options, "--repeats", 1, status=1)
    assert any(line.startswith("max error") and ": FAILS, " in line for line in lines)
    assert any("16 NaN or inf" in line for line in lines)


def test_big_endian_input_is_read_as_what_it_is(capsys, tmp_path, weights, x_file):
    np.save(tmp_path / "swapped.npy", np.load(x_file).astype(">f4"))
    results = []
    for source in (x_file, tmp_path / "swapped.npy"):
        lines_of(
            capsys,
            *("run", "--weights", weights, "--input", source),
            *("--output", tmp_path / "y.npy", "--repeats", 1),
        )
        results.append(np.load(tmp_path / "y.npy"))
    np.testing.assert_array_equal(*results)


# ------------------------------------------------------------------ cost, info


def test_help_says_what_causal_is_by_default(capsys):
    for name, default in (
        ("cost", "default: causal"),
        ("run", "causal; with --weights, if its model is"),
    ):
        assert command.main([name, "--help"]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert default in text
        assert ("--weights" in text) == (name == "run")


def test_cost_prints_the_table(capsys):
    assert "\n".join(lines_of(capsys, "cost")) == str(
        cost.attention_block_cost(1, 512, 768, 12, 4, 64, is_causal=True)
    )
    options = ["-B", 2, "-T", 1, "-S", 9, "-D", 8, "-N", 4, "-K", 1, "-H", 2]
    options += ["--dtype", "float64", "--query-offset", 8]
    assert "\n".join(lines_of(capsys, "cost", *options)) == str(
        cost.attention_block_cost(2, 1, 8, 4, 1, 2, S=9, is_causal=True, query_offset=8, itemsize=8)
    )
    assert "\n".join(lines_of(capsys, "cost", "-S", 9, "--no-causal")) == str(
        cost.attention_block_cost(1, 512, 768, 12, 4, 64, S=9)
    )


def test_info_prints_the_configuration(capsys):
    printed = lines_of(capsys, "info")
    tileattn.show_config()
    assert printed == capsys.readouterr().out.splitlines()
    assert any(tileattn.isa() in line for line in printed)


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "arguments, text",
    [
        ("", "required: run | bench | cost | info"),
        ("fly", "invalid choice: 'fly'"),
        ("run --fly", "--fly"),
        ("run --repeat 3", "--repeat"),
        ("run -T 0", "-T: expected a whole number of at least 1, got '0'"),
        ("run -B -1", "-B: expected a whole number of at least 1"),
        ("run -D x", "-D: expected a whole number of at least 1, got 'x'"),
        ("run -H 1.5", "-H: expected"),
        ("run -N 4 -K 3", "-K must divide -N, got 4 query heads and 3 key/value heads"),
        ("run -T", "-T: expected one argument"),
        ("run -T 99999999999999999999", "sizes beyond this machine"),
        ("run -T 9999999999999", "sizes beyond this machine"),
        ("run --dtype float16", "--dtype: invalid choice: 'float16'"),
        ("run --threads 0", "--threads: expected a whole number of at least 1"),
        ("run -T 4 --threads 1000000", "num_threads"),
        ("run --repeats 0", "--repeats: expected"),
        ("run --seed -1", "--seed: expected a whole number of at least 0"),
        ("run --layer 1", "--layer needs --weights"),
        ("run --heads 2", "--heads needs --weights"),
        ("run --kv-heads 2", "--kv-heads needs --weights"),
        ("run --prefix bert", "--prefix needs --weights"),
        ("run --input x.npy", "--input needs --weights"),
        ("run --output no/such/folder/y.npy", "there is no directory no/such/folder"),
        ("run --output .", "--output . is a directory"),
        ("cost -T -1", "-T: expected a whole number of at least 0"),
        ("cost -N 4 -K 3", "K must divide N"),
        ("cost -S 9", "query_offset"),
        ("info 3", "unrecognized arguments: 3"),
    ],
)
def test_refused_arguments(capsys, arguments, text):
    assert text in refusal_of(capsys, *arguments.split())


@pytest.mark.parametrize(
    "options, text",
    [
        ("-D 16", "-D comes from the file"),
        ("-H 8", "-H comes from the file"),
        ("--dtype float32", "--dtype comes from the file"),
        ("--layer 1", "layer 1 is out of range"),
        ("--layer -1", "--layer: expected"),
        ("--heads 3", "w_q has shape"),
        ("--heads 0", "--heads: expected"),
        ("--kv-heads 3", "w_k has shape"),
        ("--input no-such.npy", "--input no-such.npy cannot be read: "),
        ("--input .", "--input . cannot be read: "),
    ],
)
def test_refused_options_of_a_layer(capsys, weights, options, text):
    assert text in refusal_of(capsys, "run", "--weights", weights, *options.split())


def test_sizes_of_the_input_are_refused_beside_an_input(capsys, weights, x_file):
    for letter in "BT":
        line = refusal_of(capsys, "run", "--weights", weights, "--input", x_file, f"-{letter}", 1)
        assert f"-{letter} comes from the file where --input is given" in line


def saved(write):
    """The bytes that `write` puts into a file."""
    import io

    file = io.BytesIO()
    write(file)
    return file.getvalue()


ARRAY = saved(lambda file: np.save(file, np.zeros((2, 16), dtype=np.float32)))


@pytest.mark.parametrize(
    "content, text",
    [
        (b"", "cannot be read"),
        (b"not an array\n", "cannot be read"),
        (ARRAY[:-1], "cannot be read"),
        (ARRAY[:20], "cannot be read"),
        (ARRAY.replace(b"{'descr'", b"{{{{{{{{"), "cannot be read"),
        (saved(lambda file: np.savez(file, x=np.zeros(2))), "cannot be read"),
        (saved(lambda file: np.save(file, np.array([{}, []], dtype=object))), "cannot be read"),
        (saved(lambda file: np.save(file, np.zeros(16, dtype=np.float32))), "shape [16], expected"),
        (saved(lambda file: np.save(file, np.float32(1))), "shape [], expected"),
        (
            saved(lambda file: np.save(file, np.zeros((0, 16), dtype=np.float32))),
            "shape [0, 16], expected [B,T,16] or [T,16], not empty",
        ),
        (
            saved(lambda file: np.save(file, np.zeros((1, 1, 2, 16), dtype=np.float32))),
            "shape [1, 1, 2, 16], expected [B,T,16] or [T,16]",
        ),
        (
            saved(lambda file: np.save(file, np.zeros((2, 15), dtype=np.float32))),
            "shape [2, 15], expected [B,T,16] or [T,16]",
        ),
        (saved(lambda file: np.save(file, np.zeros((2, 16)))), "is float64, expected float32"),
        (
            saved(lambda file: np.save(file, np.zeros((2, 16), dtype=np.int32))),
            "is int32, expected float32 as the weights are: save x.astype(np.float32)",
        ),
    ],
)
def test_refused_inputs(capsys, tmp_path, weights, content, text):
    path = tmp_path / "bad.npy"
    path.write_bytes(content)
    line = refusal_of(capsys, "run", "--weights", weights, "--input", path)
    assert f"--input {path}" in line
    assert text in line


def test_pickled_objects_are_not_run(capsys, tmp_path, weights):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "sprung"),))

    np.save(tmp_path / "x.npy", np.array([Trap()], dtype=object), allow_pickle=True)
    refusal_of(capsys, "run", "--weights", weights, "--input", tmp_path / "x.npy")
    np.savez(tmp_path / "w.npz", w_q=np.array([Trap()], dtype=object))
    refusal_of(capsys, "run", "--weights", tmp_path / "w.npz")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    "name, content, text",
    [
        ("none.npz", None, "no such file"),
        ("empty.npz", b"", "empty.npz"),
        ("text.npz", b"hello\n", "text.npz"),
        ("layer.bin", b"", "layer.bin"),
        ("cut.npz", saved(lambda file: np.savez(file, **layer()))[:-30], "cut.npz"),
        ("other.npz", saved(lambda file: np.savez(file, a=np.zeros(2))), "no attention layer"),
        (
            "shape.npz",
            saved(lambda file: np.savez(file, **layer() | {"w_o": np.zeros((4, 8, 15), "f4")})),
            "w_o has shape",
        ),
        (
            "dtype.npz",
            saved(lambda file: np.savez(file, **layer() | {"w_o": np.zeros((4, 8, 16), "i4")})),
            "int32",
        ),
    ],
)
def test_refused_weights(capsys, tmp_path, name, content, text):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    assert text in refusal_of(capsys, "run", "--weights", path)


def test_a_missing_extra_is_named(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    path = tmp_path / "layer.safetensors"
    path.write_bytes(bytes(16))
    assert "pip install safetensors" in refusal_of(capsys, "run", "--weights", path)


def test_a_layer_for_another_context_is_refused(capsys, tmp_path):
    arrays = layer()
    arrays["w_k"] = arrays["w_v"] = np.zeros((9, 2, 8), dtype=np.float32)
    np.savez(tmp_path / "cross.npz", **arrays)
    line = refusal_of(capsys, "run", "--weights", tmp_path / "cross.npz")
    assert "context of width 9" in line


@pytest.mark.parametrize("option, causal", [((), True), (("--no-causal",), False)])
def test_the_model_says_whether_a_layer_is_causal(capsys, tmp_path, option, causal):
    arrays, base = layer(K=4, H=4, Hv=4), "encoder.layer.0.attention."
    tensors = {}
    for part, name in zip(
        "qkvo", ("self.query", "self.key", "self.value", "output.dense"), strict=True
    ):
        matrix = arrays[f"w_{part}"].reshape(16, 16)
        tensors[f"{base}{name}.weight"] = matrix.T
        tensors[f"{base}{name}.bias"] = arrays[f"b_{part}"].reshape(16)
    for part in ("weight", "bias"):
        tensors[f"{base}output.LayerNorm.{part}"] = arrays[f"norm_{part}"]
    np.savez(tmp_path / "bert.npz", **tensors)
    config = {"model_type": "bert", "num_attention_heads": 4, "is_decoder": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ("--weights", tmp_path / "bert.npz", "-T", 9, "--repeats", 1, *option)
    first = lines_of(capsys, "run", *options)[0]
    assert first.endswith(", causal" if causal else ", not causal")


def test_a_pre_norm_layer_is_refused_before_it_is_packed(capsys, monkeypatch, tmp_path):
    random = np.random.default_rng(0)
    shapes = {
        "attn.c_attn.weight": (16, 48), "attn.c_attn.bias": (48,),
        "attn.c_proj.weight": (16, 16), "attn.c_proj.bias": (16,),
        "ln_1.weight": (16,), "ln_1.bias": (16,),
    }  # fmt: skip
    arrays = {f"h.0.{name}": random.standard_normal(shape) for name, shape in shapes.items()}
    np.savez(tmp_path / "gpt2.npz", **arrays)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    monkeypatch.delattr(command, "AttentionBlock")
    line = refusal_of(capsys, "run", "--weights", tmp_path / "gpt2.npz", "--heads", 4)
    assert "pre-norm" in line
    assert "load_block" in line


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_reported(capsys):
    line = refusal_of(capsys, "run", *SMALL, "--output", "/dev/full")
    assert "--output /dev/full cannot be written: " in line


def test_a_message_of_several_lines_is_one_line(capsys, monkeypatch):
    def refuse(arguments):
        raise command.CommandError("one\n  two")

    monkeypatch.setattr(command, "_cost", refuse)
    assert refusal_of(capsys, "cost") == "tileattn: error: one two"


def test_out_of_memory_is_reported(capsys, monkeypatch):
    def exhaust(arguments):
        raise MemoryError

    monkeypatch.setattr(command, "_cost", exhaust)
    assert refusal_of(capsys, "cost") == "tileattn: error: out of memory"


def test_a_fault_of_the_program_itself_is_not_hidden(monkeypatch):
    def fail(arguments):
        raise ValueError("a bug")

    monkeypatch.setattr(command, "_cost", fail)
    with pytest.raises(ValueError, match="a bug"):
        command.main(["cost"])


# ------------------------------------------------------------------ how it ends


def test_ctrl_c(capsys, monkeypatch):
    def interrupt(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_run", interrupt)
    assert command.main(["run"]) == 130
    assert capsys.readouterr() == ("", "")


def test_help(capsys):
    for arguments in (["--help"], ["run", "--help"]):
        assert lines_of(capsys, *arguments)[0].startswith("usage: tileattn")


def run_module(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "tileattn", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
        **options,
    )


def test_as_a_module(tmp_path):
    done = run_module("run", *SMALL, stdout=subprocess.PIPE, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert ": passes, " in done.stdout
    peak = re.search(r"FMA peak +(\S+) GFLOP/s", done.stdout)[1]
    assert float(peak) > 0  # measured: nothing stands in for it here
    done = run_module("run", "-T", "0", stdout=subprocess.PIPE, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1


def test_a_reader_that_has_gone():
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = run_module("cost", stdout=write_end)
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["cost"], ["run", "--help"]])
def test_output_that_cannot_be_written(arguments):
    with open("/dev/full", "w") as full:
        buffered = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
        done = run_module(*arguments, stdout=full, env=buffered)
    assert done.returncode == 2
    assert done.stderr.startswith("tileattn: error: cannot write the output: ")
    assert done.stderr.count("\n") == 1


def test_sizes_of_more_digits_than_python_prints(capsys):
    assert "digits" in refusal_of(capsys, "cost", "-T", "9" * 3000)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
def test_an_input_without_an_end_is_not_read(capsys, tmp_path, weights):
    os.mkfifo(tmp_path / "x.npy")
    line = refusal_of(capsys, "run", "--weights", weights, "--input", tmp_path / "x.npy")
    assert line.endswith("x.npy cannot be read: it is no regular file")


def test_no_terminal_obeys_what_a_file_holds():
    assert shortened("\x1b[31m red\n\x07 é\udc80") == r"\x1b[31m red \x07 é\udc80"


# ------------------------------------------------------------------ names and numbers of any kind


def test_a_name_that_is_no_text_is_shown(tmp_path, weights):
    """Linux has names that are no UTF-8, and terminals have encodings that lack letters."""
    odd = os.fsencode(tmp_path) + b"/\xff\xc3\xa9.npz"
    os.link(weights, odd)
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-m", "tileattn", "run", "--weights", odd, "-T", "3", "--repeats", "1"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("layer 0 of \\udcff\\xe9.npz")


def test_messages_have_an_end(capsys):
    for arguments in (["cost", "-T", "9" * 5000], ["x" * 5000], ["run", "--dtype", "y" * 5000]):
        line = refusal_of(capsys, *arguments)
        assert len(line) < 1100
        assert line.rstrip().endswith(" ...")


def test_an_output_that_no_file_can_be(capsys, tmp_path):
    assert "cannot be written" in refusal_of(capsys, "run", *SMALL, "--output", f"{tmp_path}/a\0b")


@pytest.mark.parametrize("sizes", ["-B 33 -T 7 -D 2 -H 2 --no-causal", "-B 8 -T 7 -D 2 -H 33"])
def test_a_norm_of_two_columns_amplifies_roundings(capsys, sizes):
    """One of the two is the mean's other side: their difference may be small by chance."""
    lines = lines_of(capsys, "run", "--repeats", 1, *sizes.split())
    assert any(line.startswith("max error") and ": passes, " in line for line in lines)
