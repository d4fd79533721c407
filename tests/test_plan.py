"""explain() foretells what a call then does."""

import dataclasses
import inspect
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tileattn
from tests.oracle import HALVES, arithmetic
from tests.process import run_python
from tileattn import _core


def arrays(B=1, T=1, S=64, N=4, K=2, H=32, Hv=None, dtype=np.float32):
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H if Hv is None else Hv)
    return [np.ones(shape, dtype) for shape in shapes]


@pytest.fixture(scope="module")
def done():
    """Reports of the calls so far, as they counted their threads, items and merges."""
    reports = []
    attention = _core.attention

    def reporting(q, k, v, out, *rest, report=False, **options):
        result = attention(q, k, v, out, *rest, report=True, **options)
        if out is not None:
            reports.append(result)
        return result if report else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_core, "attention", reporting)
        yield reports


def check(done, q, k, v, **options):
    """The plan of a call, which the call follows."""
    plan = tileattn.explain(q, k, v, **options)
    done.clear()
    tileattn.dot_product_attention(q, k, v, **options)
    assert [dataclasses.asdict(plan)] == done
    (B, T, N, _), (S, K) = q.shape, k.shape[1:3]
    rows = N // max(K, 1) * T
    assert plan.isa == tileattn.isa()
    assert plan.arithmetic == np.dtype(arithmetic(q.dtype)).name
    assert plan.path == ("streaming" if rows <= 16 else "tiled")
    assert plan.key_block == (32 if rows <= 16 else 256)
    assert plan.tile_rows == -(-rows // plan.tiles) <= 512
    assert plan.splits in (1, plan.chunks)
    assert plan.merges == (B * K if plan.splits > 1 else 0)
    assert plan.threads <= min(plan.items, options.get("num_threads") or 1024)
    if rows <= 128:
        assert plan.tiles == 1
        assert S > 32 * 512 or plan.chunks == max(1, -(-S // 512))
    else:
        assert plan.chunks == 1
    if B * rows == 0:
        assert plan.items == plan.threads == plan.workspace_bytes == 0
    else:
        assert 1 <= plan.head_parts <= K
        assert plan.items == B * plan.head_parts * plan.tiles * plan.splits
    return plan


SIZES = [
    {},
    {"T": 7},
    {"T": 8},
    {"S": 3000},
    {"S": 3000, "B": 5},
    {"S": 700, "N": 10, "K": 5, "H": 64},
    {"S": 20000, "N": 8, "K": 1},
    {"S": 512, "N": 17, "K": 1, "H": 128},
    {"S": 513, "N": 17, "K": 1, "H": 128},
    {"T": 64, "S": 600, "N": 2},
    {"T": 64, "S": 600},
    {"T": 65, "S": 600},
    {"T": 300, "S": 300, "B": 2, "Hv": 5},
    {"T": 128, "S": 300, "B": 2, "N": 7, "K": 7},
    {"T": 900, "S": 300, "N": 1, "K": 1},
    {"T": 0},
    {"T": 200, "S": 0},
    {"S": 0},
    {"B": 0, "T": 200},
    {"N": 0},
    {"N": 0, "K": 0},
    {"H": 0, "Hv": 0},
    {"B": 0, "S": 1, "N": 1, "K": 1, "H": 1 << 58},
]


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, *HALVES])
def test_calls_do_what_was_foretold(done, dtype, threads):
    for sizes in SIZES:
        check(done, *arrays(**sizes, dtype=dtype), num_threads=threads)


@pytest.mark.parametrize("T", [3, 150])
@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True, "query_offset": 5},
        {"local_window_size": (3, 0), "query_offset": [1200, 0]},
        {"key_value_seq_lengths": [0, 700], "query_seq_lengths": [1, 2]},
        {"mask": np.arange(1300) < 900},
        {"mask": np.zeros((1, 1, 1, 1), bool)},
        {"mask": np.arange(4 * 1300).reshape(4, 1, 1300) % 3 == 0},
        {"bias": np.zeros((2, 1, 1, 1300))},
        {"bias": np.zeros((4, 1, 1), np.float16)},
        {"softcap": 20.0, "scale": 0.1, "sinks": np.ones(4)},
        {"alibi_slopes": np.ones(4), "query_offset": 1000},
        {"return_lse": True},
    ],
    ids=str,
)
def test_so_do_calls_with_options(done, options, T):
    for threads in (1, 3):
        check(done, *arrays(B=2, T=T, S=1300), **options, num_threads=threads)


@given(
    sizes=st.fixed_dictionaries(
        {
            "B": st.integers(0, 4),
            "T": st.integers(0, 20) | st.integers(100, 200),
            "S": st.integers(0, 20) | st.integers(500, 1100),
            "H": st.integers(1, 70),
        }
    ),
    G=st.integers(1, 4),
    K=st.integers(1, 5),
    threads=st.integers(1, 9),
)
def test_so_do_random_calls(done, sizes, G, K, threads):
    check(done, *arrays(**sizes, N=G * K, K=K), num_threads=threads)


def test_so_do_calls_of_any_layout(done):
    q, k, v = arrays(B=2, T=5, S=600)
    wide = np.ones((2, 600, 2, 64), np.float32)
    check(done, q, wide[..., ::2], v[:, ::-1], num_threads=2)
    check(done, q[0][None], k[0][None], v[0][None], out=np.empty((1, 5, 4, 32), np.float32))
    plan = tileattn.explain(q[0], k[0], v[0], num_threads=2)
    assert plan == tileattn.explain(q[:1], k[:1], v[:1], num_threads=2)


def test_the_default_is_that_of_calls(done):
    with tileattn.threads(3):
        assert check(done, *arrays(S=3000, N=16)).threads == 3


# A new process has no other threads yet: OpenMP starts them when a call is given more than before.
COUNT_TASKS = """
import os
import numpy as np, tileattn
q, k = np.ones((1, 1, 8, 64), np.float32), np.ones((1, 3000, 2, 64), np.float32)
tasks = lambda: len(os.listdir("/proc/self/task"))
others = tasks() - 1
for threads in (1, 2, 3, 40):
    before = tasks()
    plan = tileattn.explain(q, k, k, num_threads=threads)
    assert tasks() == before
    tileattn.dot_product_attention(q, k, k, num_threads=threads)
    print(plan.threads, tasks() - others)
"""


@pytest.mark.any_isa
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads as Linux does")
@pytest.mark.parametrize("limit", [2, 64])
def test_the_operating_system_sees_as_many_threads(limit):
    printed = run_python(COUNT_TASKS, OMP_THREAD_LIMIT=str(limit))
    foretold, seen = zip(*(map(int, line.split()) for line in printed.splitlines()), strict=True)
    assert foretold == seen == tuple(min(n, limit) for n in (1, 2, 3, 12))


def test_keys_are_split_only_where_other_axes_do_not_keep_the_threads_busy():
    def splits(threads, **sizes):
        return tileattn.explain(*arrays(S=5000, **sizes), num_threads=threads).splits

    assert splits(1) == 1
    assert splits(2) == 10
    assert splits(2, B=8) == 1
    assert splits(2, T=64) == 10
    assert splits(2, T=65) == 1


def test_small_work_takes_one_thread():
    assert tileattn.explain(*arrays(), num_threads=7).threads == 1


def test_working_memory_does_not_grow_with_the_sequence():
    few, many = (
        tileattn.explain(*arrays(T=T, S=T), is_causal=True, num_threads=2).workspace_bytes
        for T in (1000, 8000)
    )
    assert 0 < few == many < 4 << 20


def test_it_takes_the_arguments_of_a_call_and_refuses_the_same():
    signatures = [
        inspect.signature(function)
        for function in (tileattn.explain, tileattn.dot_product_attention)
    ]
    assert signatures[0].parameters == signatures[1].parameters
    q, k, v = arrays(T=2)
    for options in (
        {"is_causal": True},
        {"return_lse": 1.5},
        {"num_threads": 0},
        {"out": q[:, :1]},
        {"mask": np.ones(64)},
    ):
        errors = []
        for function in (tileattn.explain, tileattn.dot_product_attention):
            with pytest.raises((TypeError, ValueError)) as error:
                function(q, k, v, **options)
            errors.append((error.type, str(error.value)))
        assert errors[0] == errors[1]


def test_too_large_a_call_is_refused_too():
    q = np.broadcast_to(np.float32(0), (1 << 30, 1, 1, 1 << 30))
    with pytest.raises(MemoryError, match="working memory"):
        tileattn.explain(q, q, q, num_threads=2)


@pytest.mark.any_isa
def test_chunks_of_more_keys_than_an_int_counts():
    """32 chunks of 512 keys, 32 of 1024, and so on: after 29 doublings some 2^43 keys."""
    q = np.broadcast_to(np.float32(0), (1, 1, 1, 1))
    S = 32 * ((512 << 29) - 512)
    for beyond, chunks in ((0, 29 * 32), (1, 29 * 32 + 1)):
        k = np.broadcast_to(q, (1, S + beyond, 1, 1))
        assert tileattn.explain(q, k, k, num_threads=1).chunks == chunks


def test_nothing_is_written():
    q, k, v = arrays()
    out = np.full(q.shape, 7, q.dtype)
    tileattn.explain(q, k, v, out=out)
    assert (out == 7).all()


def test_a_plan_prints_a_line_for_each_fact():
    plan = tileattn.explain(*arrays())
    lines = [line.split(maxsplit=1) for line in str(plan).splitlines()]
    assert lines == [[name, str(value)] for name, value in dataclasses.asdict(plan).items()]
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.threads = 2
