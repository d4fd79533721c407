"""The command line, ``python -m tileattn`` or ``tileattn``: run, bench, cost and info.

``run`` is the main job live: it runs one attention block, compares the result with the reference,
times it beside NumPy, and prints the table of the cost model with what was measured. Faults of the
user's files and sizes end in one line on stderr and exit status 2.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

import tileattn
from tileattn import AttentionBlock, LayerNorm, _core, reference
from tileattn._command import CommandError, blaming, check_output, duration, whole_number
from tileattn._values import shortened
from tileattn.bench import command as bench
from tileattn.bench.in_numpy import numpy_attention
from tileattn.bench.needs import check_matplotlib
from tileattn.bench.rounds import PAUSE, ratio
from tileattn.cost import BlockCost, attention_block_cost, format_count, table_text

Array = npt.NDArray[Any]

SIZES = {"B": 1, "T": 512, "D": 768, "N": 12, "K": 4, "H": 64}
#: Which rows of the cost table each of `_operations` covers. Scores, softmax and values are one: a
#: tile of scores never leaves the cache.
ROWS_OF_OPERATION = (slice(1), slice(1, 2), slice(2, 3), slice(3, 6), slice(6, 7), slice(7, 8))
OPERATIONS = (
    "Q = X W_Q",
    "K = X W_K",
    "V = X W_V",
    "attention",
    "Z = Y W_O",
    "LayerNorm(X + Z)",
)
ATTENTION = 3
#: Timed rounds where nobody says how many, and the seconds after which no other one begins.
ROUNDS, LEAST_ROUNDS = 15, 3
SECONDS = 2.5
#: Of a time as text, such as 12.3 ms.
DURATION_WIDTH = 7
#: Error that always passes, in units of the output's root mean square: some 80 roundings.
TOLERANCE = {"float32": 1e-5, "float64": 2e-14}
#: Tries to explain a larger error by roundings; some signs of theirs cancel in the worst row.
SHAKES = 8
#: The comparison in NumPy holds all scores at once; beyond this it is left out.
NUMPY_SCORE_BYTES = 1 << 30


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the program's name; those of the process where not given.

    Returns
    -------
    int
        Exit status: 0; 1 where the result differs from the reference; 2 for unusable input;
        130 for Ctrl-C; 141 where the reader of the output has gone.

    Examples
    --------
    >>> main(["cost", "-T", "128"])  # doctest: +ELLIPSIS
    B 1  T 128 ...
    0
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names of files may be no text, or none that the terminal can show.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = 0
        try:
            arguments = _parser().parse_args(argv)
        except SystemExit:
            pass  # --help has been printed
        else:
            arguments.given = list(sys.argv[1:] if argv is None else argv)
            status = arguments.command(arguments)
        # Here, where a reader that has gone can still be answered for. Without a standard output
        # (closed by the shell) there is nobody to write to.
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except CommandError as error:
        message = str(error)
    except MemoryError as error:
        message = f"out of memory: {error}" if str(error) else "out of memory"
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _abandon_output()
        return 141
    except OSError as error:
        _abandon_output()
        message = f"cannot write the output: {error}"
    print(f"tileattn: error: {shortened(message)}", file=sys.stderr)
    return 2


def _abandon_output() -> None:
    """Keep the interpreter's own flush at exit from failing once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# ------------------------------------------------------------------ arguments


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, as all others here."""

    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message} (see {self.prog} --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="tileattn",
        description="Exact transformer attention on NumPy arrays.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="run | bench | cost | info")

    run = commands.add_parser(
        "run",
        help="run one attention block, check it, time it",
        description="Run one attention block, check it against the reference, time it beside "
        "NumPy, and print what each operation costs. The block has seeded random weights, or those "
        "of a layer in a file.",
        allow_abbrev=False,
    )
    run.set_defaults(command=_run)
    _add_sizes(run, minimum=1, causal="default: causal; with --weights, if its model is")
    run.add_argument("--threads", type=whole_number(1), metavar="n", help="default: all allowed")
    run.add_argument("--seed", type=whole_number(0), default=0, metavar="n", help="default: 0")
    run.add_argument(
        "--repeats",
        type=whole_number(1),
        metavar="n",
        help=f"timed rounds (at most {ROUNDS}, in some {SECONDS:g} seconds)",
    )
    run.add_argument("--plot", metavar="FILE", help="draw the operations' times (.svg or .png)")
    file = run.add_argument_group("a real layer")
    file.add_argument("--weights", metavar="FILE", help=".npz or .safetensors")
    file.add_argument("--layer", type=whole_number(0), metavar="n", help="default: 0")
    file.add_argument("--prefix", help="what stands before the names of the layers")
    file.add_argument("--heads", type=whole_number(1), metavar="N", help="query heads")
    file.add_argument("--kv-heads", type=whole_number(1), metavar="K", help="default: N")
    file.add_argument("--input", metavar="X.npy", help="x[B,T,D] or x[T,D]; default: random")
    file.add_argument("--output", metavar="Y.npy", help="where the block's output is saved")

    beside = "speed and memory beside NumPy, PyTorch and onnxruntime"
    bench.add_options(commands.add_parser("bench", help=beside, allow_abbrev=False))

    cost = commands.add_parser(
        "cost",
        help="FLOPs, parameters and bytes of a block",
        description="Print FLOPs, parameters, bytes and arithmetic intensity of each operation.",
        allow_abbrev=False,
    )
    cost.set_defaults(command=_cost)
    _add_sizes(cost, minimum=0, causal="default: causal")
    cost.add_argument("-S", type=whole_number(0), metavar="n", help="keys and values (T)")
    cost.add_argument("--query-offset", type=int, metavar="n", help="position of the first query")

    info = commands.add_parser("info", help="version, ISA, threads", allow_abbrev=False)
    info.set_defaults(command=_info)
    return parser


def _add_sizes(parser: argparse.ArgumentParser, minimum: int, causal: str) -> None:
    names = ("batch", "queries", "model width", "query heads", "key/value heads", "head width")
    for (letter, default), name in zip(SIZES.items(), names, strict=True):
        parser.add_argument(
            f"-{letter}", type=whole_number(minimum), metavar="n", help=f"{name} ({default})"
        )
    parser.add_argument("--dtype", choices=["float32", "float64"], help="default: float32")
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, help=causal)


def _sizes(arguments: argparse.Namespace) -> dict[str, int]:
    given = {letter: getattr(arguments, letter) for letter in SIZES}
    return {letter: SIZES[letter] if size is None else size for letter, size in given.items()}


# ------------------------------------------------------------------ info and cost


def _info(arguments: argparse.Namespace) -> int:
    tileattn.show_config()
    return 0


def _cost(arguments: argparse.Namespace) -> int:
    with blaming(None, ValueError, TypeError):
        cost = attention_block_cost(
            **_sizes(arguments),
            S=arguments.S,
            is_causal=arguments.causal is not False,
            query_offset=arguments.query_offset,
            itemsize=np.dtype(arguments.dtype or "float32").itemsize,
        )
        text = str(cost)  # which Python has no digits for, if it is too large
    print(text)
    return 0


# ------------------------------------------------------------------ run


@dataclass
class _Problem:
    """What `run` runs; `weights` are the arguments that made the block."""

    title: str
    weights: dict[str, Any]
    block: AttentionBlock
    x: Array
    is_real: bool  # from a file, where nothing is known of the sizes of its values

    @property
    def batch_and_length(self) -> tuple[int, int]:
        """B and T of x[B,T,D] or x[T,D]."""
        B, T = (1, *self.x.shape)[-3:-1]
        return B, T


@dataclass
class _Times:
    """Seconds in each round, and the best FMA rate of any round, in GFLOP/s."""

    operations: list[list[float]]  # each by itself, as `_operations` has them
    block: list[float]
    numpy: tuple[list[float], list[float]] | None  # the block, and the attention in it
    fma_peak: float


def _run(arguments: argparse.Namespace) -> int:
    if arguments.output is not None:
        check_output("--output", arguments.output)
    if arguments.plot is not None:
        check_output("--plot", arguments.plot)
        if not arguments.plot.endswith((".svg", ".png")):
            raise CommandError(f"--plot {arguments.plot}: expected the name of a .svg or .png")
        check_matplotlib()
    problem = _seeded(arguments) if arguments.weights is None else _from_file(arguments)
    x, block, threads = problem.x, problem.block, arguments.threads or tileattn.get_num_threads()
    dtype = x.dtype.name
    with blaming(None, ValueError, TypeError):
        y = block(x, num_threads=threads)
    if arguments.output is not None:
        _save(arguments.output, y)

    error, limit, stray = _check(problem, y)
    times = _time(problem, threads, arguments.repeats)

    B, T = problem.batch_and_length
    cost = attention_block_cost(
        B,
        T,
        block.model_dim,
        block.num_heads,
        block.num_kv_heads,
        block.head_dim,
        Hv=block.v_head_dim,
        is_causal=block.is_causal,
        itemsize=x.itemsize,
    )
    if block.norm is None:
        cost = replace(cost, rows=cost.rows[:-1])
    print(f"{problem.title}, {dtype}, {'causal' if block.is_causal else 'not causal'}")
    print(cost.sizes_text(), end="\n\n")
    print(_table(cost, times))
    print(
        "Each operation by itself, then the block in one call: medians of "
        f"{len(times.block)} rounds."
    )
    print("Totals and GFLOP/s count matrix products over visible pairs", end="")
    print("." if block.norm is None else "; LayerNorm's row, 8 FLOPs an element.")
    print()
    print(_comparison(times))
    print(_spread(times))
    verdict = "passes" if error <= limit else "FAILS"
    print(f"max error   {error:.1e} against the float64 reference: {verdict}, limit {limit:.0e}")
    if stray:
        print(f"            (where finite: the result must have its {stray} NaN or inf as well)")
    print(f"FMA peak    {times.fma_peak:.1f} GFLOP/s in {dtype}, the best of these rounds")
    print(f"ISA         {tileattn.isa()}")
    print(f"threads     {threads}")
    if arguments.plot is not None:
        _plot(problem, times, f"{cost.sizes_text()};  {dtype}, {tileattn.isa()}", arguments.plot)
    return 0 if error <= limit else 1


def _seeded(arguments: argparse.Namespace) -> _Problem:
    for option in ("layer", "prefix", "heads", "kv_heads", "input"):
        if getattr(arguments, option) is not None:
            raise CommandError(f"--{option.replace('_', '-')} needs --weights")
    B, T, D, N, K, H = _sizes(arguments).values()
    if N % K:
        raise CommandError(f"-K must divide -N, got {N} query heads and {K} key/value heads")
    is_causal = arguments.causal is not False
    dtype = np.dtype(arguments.dtype or "float32")
    draw = np.random.default_rng(arguments.seed).standard_normal

    def normal(*shape: int, deviation: float = 1.0) -> Array:
        array: Array = draw(shape, dtype=dtype)
        array *= dtype.type(deviation)
        return array

    # ValueError: NumPy's word for more elements than an address can count.
    with blaming("sizes beyond this machine", ValueError, MemoryError):
        x = normal(B, T, D)
        weights: dict[str, Any] = {
            # Deviations that keep queries, keys, values and outputs at a deviation of about 1.
            "w_q": normal(D, N, H, deviation=D**-0.5),
            "w_k": normal(D, K, H, deviation=D**-0.5),
            "w_v": normal(D, K, H, deviation=D**-0.5),
            "w_o": normal(N, H, D, deviation=(N * H) ** -0.5),
            "norm": LayerNorm(1 + normal(D, deviation=0.1), normal(D, deviation=0.1)),
            "residual": True,
            "is_causal": is_causal,
        }
        block = AttentionBlock(**weights)
    title = f"attention block with random weights (seed {arguments.seed})"
    return _Problem(title, weights, block, x, is_real=False)


def _from_file(arguments: argparse.Namespace) -> _Problem:
    # Imported here, so that whoever has no weights needs nothing that reads them.
    from tileattn.weights import load_arguments

    for letter in "DNKH":
        if getattr(arguments, letter) is not None:
            raise CommandError(f"-{letter} comes from the file where --weights is given")
    if arguments.dtype is not None:
        raise CommandError("--dtype comes from the file where --weights is given")
    layer = arguments.layer or 0
    with blaming(None, ValueError, TypeError, OSError, ImportError):
        weights = load_arguments(
            arguments.weights,
            layer=layer,
            num_heads=arguments.heads,
            num_kv_heads=arguments.kv_heads,
            prefix=arguments.prefix,
            is_causal=arguments.causal,
        )
        if weights.get("norm_position") == "pre":
            raise CommandError(
                f"{arguments.weights}: layer {layer} is pre-norm, and run takes apart post-norm "
                f"layers only; tileattn.weights.load_block loads it"
            )
        block = AttentionBlock(**weights)
    if block.context_dim != block.model_dim:
        raise CommandError(
            f"{arguments.weights}: layer {layer} attends to a context of width "
            f"{block.context_dim}, and run offers self-attention of width {block.model_dim} only"
        )
    if arguments.input is None:
        sizes = _sizes(arguments)
        draw = np.random.default_rng(arguments.seed).standard_normal
        x = draw((sizes["B"], sizes["T"], block.model_dim), dtype=block.dtype)
    else:
        for letter in "BT":
            if getattr(arguments, letter) is not None:
                raise CommandError(f"-{letter} comes from the file where --input is given")
        x = _load(arguments.input, block)
    title = f"layer {layer} of {os.path.basename(arguments.weights)}"
    return _Problem(title, weights, block, x, is_real=True)


def _load(path: str, block: AttentionBlock) -> Array:
    """x[B,T,D] or x[T,D] from a .npy file, in the block's dtype."""
    # Damaged headers raise whatever the parser met; objects are never unpickled.
    if os.path.exists(path) and not os.path.isfile(path):
        raise CommandError(f"--input {path} cannot be read: it is no regular file")
    with blaming(f"--input {path} cannot be read", Exception), open(path, "rb") as file:
        x: Array = np.lib.format.read_array(file, allow_pickle=False)
    if x.ndim not in (2, 3) or x.shape[-1] != block.model_dim or not x.size:
        raise CommandError(
            f"--input {path} has shape {list(x.shape)}, expected [B,T,{block.model_dim}] or "
            f"[T,{block.model_dim}], not empty"
        )
    x = x.astype(x.dtype.newbyteorder("="), copy=False)
    if x.dtype != block.dtype:
        raise CommandError(
            f"--input {path} is {x.dtype}, expected {block.dtype} as the weights are: save "
            f"x.astype(np.{block.dtype})"
        )
    return x


def _save(path: str, y: Array) -> None:
    with (
        blaming(f"--output {path} cannot be written", OSError, ValueError),  # of a zero byte
        open(path, "wb") as file,
    ):
        np.save(file, y)


@np.errstate(all="ignore")
def _check(problem: _Problem, y: Array) -> tuple[float, float, int]:
    """The largest error of y against the reference, the limit for it to pass, and a count.

    The count is of the reference's values that are not finite. Where y differs from one of them,
    the error is inf or NaN.
    """
    # Arguments in float64 keep the reference from rounding its result.
    weights = {name: _float64(value) for name, value in problem.weights.items()}
    if (norm := weights["norm"]) is not None:
        weights["norm"] = LayerNorm(_float64(norm.weight), _float64(norm.bias), norm.eps)
    x = _float64(problem.x)
    exact = reference.attention_block(x, **weights)
    same = (y == exact) | (np.isnan(y) & np.isnan(exact))
    is_finite = np.isfinite(exact)
    finite = exact[is_finite]
    root_mean_square = np.linalg.norm(finite) / max(1, finite.size) ** 0.5
    limit = TOLERANCE[y.dtype.name] * root_mean_square
    error = float(np.where(same, 0, np.abs(y - exact)).max())
    generator = np.random.default_rng(0)
    for shake in range(SHAKES):
        if error <= limit and (shake or not problem.is_real):
            break
        # Sums of D or N H terms collect some roundings, as the root of their number. Large scores,
        # a mean far from 0 or a norm of few columns amplify them in any computation in y's dtype;
        # as much error in x and in the weights shows how far.
        terms = max(problem.block.model_dim, problem.block.num_heads * problem.block.v_head_dim)
        rounding = np.finfo(y.dtype).eps * terms**0.5
        shaken = {
            name: array * (1 + rounding * generator.choice([-1.0, 1.0], array.shape))
            for name, array in ({"x": x} | weights).items()
            if name in ("x", "w_q", "w_k", "w_v", "w_o")
        }
        result = reference.attention_block(**(weights | shaken))
        limit = max(limit, np.abs(result - exact).max(initial=0, where=is_finite))
    return error, float(limit), exact.size - finite.size


def _float64(value: Any) -> Any:
    """An array in float64; anything else as it is."""
    return value.astype(np.float64) if isinstance(value, np.ndarray) else value


def _operations(problem: _Problem, threads: int) -> tuple[list[Callable[[], object]], Array]:
    """The block's operations, each by itself, and the array that the last one writes.

    Each reads what those before it have written: all in order make the block.
    """
    weights = problem.weights
    x = problem.x if problem.x.ndim == 3 else problem.x[None]
    B, T, D = x.shape
    _, N, H = weights["w_q"].shape
    _, K, Hv = weights["w_v"].shape
    q, k, v, y, z = (
        np.empty((B, T, *axes), x.dtype) for axes in ((N, H), (K, H), (K, Hv), (N, Hv), (D,))
    )

    def projection(name: str, source: Array, result: Array) -> Callable[[], object]:
        matrix = weights[f"w_{name}"].reshape(source.shape[-1], -1)
        packed = _core.PackedMatrix(np.require(matrix, requirements="A"))
        bias = weights.get(f"b_{name}")
        biases = (None if bias is None else np.require(bias.reshape(-1), requirements=["C", "A"]),)
        results = (result.reshape(B * T, -1),)
        return lambda: _core.project(source, packed, results, biases, threads)

    operations = [
        projection("q", x, q),
        projection("k", x, k),
        projection("v", x, v),
        lambda: tileattn.dot_product_attention(
            q, k, v, is_causal=weights["is_causal"], out=y, num_threads=threads
        ),
        projection("o", y.reshape(B, T, N * Hv), z),
    ]
    if (norm := weights["norm"]) is None:
        return operations, z
    output, residual = np.empty_like(z), x if weights["residual"] else None
    operations.append(lambda: norm(z, residual=residual, out=output, num_threads=threads))
    return operations, output


def _time(problem: _Problem, threads: int, rounds: int | None) -> _Times:
    """Time the block, its operations and NumPy in turns, so that a slow moment hits all of them.

    A turn begins with calls that are not timed: the first after a change of sides takes up to 30%
    longer. The FMA peak has its turns too, or a slow moment could make more than 100% of it.
    """
    x, block = problem.x, problem.block
    B, T = problem.batch_and_length
    score_bytes = B * block.num_heads * T * T * x.itemsize
    operations, _ = _operations(problem, threads)
    calls: list[Callable[[], object]] = [*operations, lambda: block(x, num_threads=threads)]
    seconds: list[list[float]] = [[] for _ in calls]
    numpy_blocks: list[float] = []
    numpy_attentions: list[float] = []
    peaks: list[float] = []
    deadline = time.monotonic() + SECONDS
    for done in range(rounds or ROUNDS):
        if rounds is None and done >= LEAST_ROUNDS and time.monotonic() > deadline:
            break
        if score_bytes <= NUMPY_SCORE_BYTES:
            time.sleep(PAUSE)
            _numpy_block(x, problem.weights)
            _, (whole, attention) = _numpy_block(x, problem.weights)
            numpy_blocks.append(whole)
            numpy_attentions.append(attention)
            time.sleep(PAUSE)
        for call in calls:
            call()
        for call, durations in zip(calls, seconds, strict=True):
            start = time.perf_counter()
            call()
            durations.append(time.perf_counter() - start)
        peaks.append(_core.measure_fma_peak(x.dtype.name, threads))
    return _Times(
        operations=seconds[:-1],
        block=seconds[-1],
        numpy=(numpy_blocks, numpy_attentions) if numpy_blocks else None,
        fma_peak=max(peaks),
    )


@np.errstate(all="ignore")
def _numpy_block(x: Array, weights: dict[str, Any]) -> tuple[Array, tuple[float, float]]:
    """The block as one writes it in NumPy, in x's dtype.

    Its output, and the seconds that all of it took and the attention in it.
    """
    *batch, T, D = x.shape
    _, N, H = weights["w_q"].shape
    _, K, Hv = weights["w_v"].shape
    norm = weights["norm"]
    hidden = np.triu(np.full((T, T), -np.inf, x.dtype), 1) if weights["is_causal"] else None

    def project(y: Array, name: str, width: int) -> Array:
        z: Array = y @ weights[f"w_{name}"].reshape(-1, width)
        if (bias := weights.get(f"b_{name}")) is not None:
            z += bias.reshape(-1)
        return z

    times = [time.perf_counter()]
    q = project(x, "q", N * H).reshape(-1, T, N, H)
    k = project(x, "k", K * H).reshape(-1, T, K, H)
    v = project(x, "v", K * Hv).reshape(-1, T, K, Hv)
    times.append(time.perf_counter())
    y = numpy_attention(q, k, v, hidden)
    times.append(time.perf_counter())
    z = project(y.reshape(*batch, T, N * Hv), "o", D)
    if weights["residual"]:
        z += x
    if norm is not None:
        z -= z.mean(axis=-1, keepdims=True)
        z /= np.sqrt((z * z).mean(axis=-1, keepdims=True) + norm.eps)
        if norm.weight is not None:
            z *= norm.weight
        if norm.bias is not None:
            z += norm.bias
    times.append(time.perf_counter())
    return z, (times[3] - times[0], times[2] - times[1])


def _table(cost: BlockCost, times: _Times) -> str:
    """The rows of the cost table with what each took; rows timed together share a brace."""

    def measured(flops: int, seconds: float, brace: str = " ") -> tuple[str, str, str]:
        rate = flops / seconds / 1e9
        time = f"{brace} {duration(seconds):>{DURATION_WIDTH}}"
        return time, f"{rate:.1f}", f"{rate / times.fma_peak:.1%}"

    def params(number: int) -> str:
        return format_count(number) if number else "-"

    body = []
    medians = list(map(statistics.median, times.operations))
    for covered, seconds in zip(ROWS_OF_OPERATION, medians, strict=False):
        rows = cost.rows[covered]
        # Softmax, which is no matrix product, is left out beside those that are.
        flops = sum(row.flops for row in rows if row.is_matmul) or rows[0].flops
        cells = [measured(flops, seconds)]
        if len(rows) == 3:
            blank = " " * DURATION_WIDTH
            cells = [(f"\\ {blank}", "", ""), measured(flops, seconds, ">"), (f"/ {blank}", "", "")]
        body += [
            (row.operation, format_count(row.flops), params(row.params), row.output_text, *cell)
            for row, cell in zip(rows, cells, strict=True)
        ]
    flops = cost.matmul_flops
    totals = [
        (name, format_count(flops), params(cost.params), "", *measured(flops, seconds))
        for name, seconds in (
            ("one after the other", sum(medians)),
            ("the block in one call", statistics.median(times.block)),
        )
    ]
    heading = ("operation", "FLOPs", "params", "output", "time", "GFLOP/s", "peak")
    return table_text(heading, body, totals, left={0, 3})


def _plot(problem: _Problem, times: _Times, subtitle: str, path: str) -> None:
    # Imported here, since nothing else needs matplotlib.
    from tileattn.bench import pictures

    def bar(name: str, ours: list[float], numpy: list[float] | None) -> pictures.Operation:
        peer = numpy and pictures.Peer(statistics.median(numpy), ratio(numpy, ours).median)
        return pictures.Operation(name, statistics.median(ours), peer or None)

    blocks, attentions = times.numpy or (None, None)
    parts = [
        bar(name, seconds, attentions if i == ATTENTION else None)
        for i, (name, seconds) in enumerate(zip(OPERATIONS, times.operations, strict=False))
    ]
    whole = bar("the block in one call", times.block, blocks)
    with blaming(f"--plot {path} cannot be written", OSError, ValueError):
        pictures.operations(parts, whole, problem.title, subtitle, path)


def _comparison(times: _Times) -> str:
    if times.numpy is None:
        return "NumPy       not timed: it would hold all scores, more than 1 GiB"
    block, attention = times.numpy
    return (
        f"NumPy       block {_ratio(block, times.block)} tileattn's\n"
        f"            attention {_ratio(attention, times.operations[ATTENTION])} tileattn's\n"
        "            (in turns with the block, in the same dtype; its BLAS chooses its own threads)"
    )


def _ratio(theirs: list[float], ours: list[float]) -> str:
    """A median, and how many times ours it is, round by round: the median and the quartiles."""
    times = ratio(theirs, ours)
    return (
        f"{duration(statistics.median(theirs))}, {times.median:.1f} "
        f"({times.low:.1f}..{times.high:.1f}) times"
    )


def _spread(times: _Times) -> str:
    low, high = duration(min(times.block)), duration(max(times.block))
    parts = [seconds / statistics.median(each) for each in times.operations for seconds in each]
    return (
        f"rounds      {low} to {high} for the block; {min(parts):.0%} to {max(parts):.0%} of their "
        "medians for the operations"
    )


if __name__ == "__main__":
    sys.exit(main())
