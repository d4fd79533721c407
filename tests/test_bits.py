"""Each public operation gives the same bits again: on any number of threads, with any company in
its batch, and wherever in memory its arrays lie."""

import numpy as np
import pytest

import tileattn
from tests import fuzz
from tests.operations import OPERATIONS, B, operations, qkv
from tests.oracle import HALVES, same_bits
from tileattn import KVCache

THREADS = 1, 2, 3, 7
PAGE = 4096


@pytest.fixture(params=OPERATIONS.values(), ids=OPERATIONS)
def operation(request):
    return request.param(130)


def check_equal(got, expected, what):
    for one, other in zip(got, expected, strict=True):
        assert np.isfinite(np.asarray(other, np.float64)).any(), "nothing to compare"
        assert same_bits(np.ascontiguousarray(one), np.ascontiguousarray(other)), what


@pytest.mark.parametrize(
    "name",
    [name for name in OPERATIONS if name.startswith("attention, ") and "options" not in name],
)
def test_names_say_how_attention_is_done(name):
    q, k, v = OPERATIONS[name](130).inputs
    plan = tileattn.explain(q, k, v)
    is_few = "one row" in name or "few rows" in name or name == "attention, little"
    assert plan.path == ("streaming" if is_few else "tiled")
    if "chunked" in name:
        assert plan.chunks > 1


def test_threads_and_runs(operation):
    _, inputs, call, _ = operation
    expected = call(*inputs, num_threads=1)
    for threads in THREADS:
        for run in range(2):
            check_equal(call(*inputs, num_threads=threads), expected, (threads, run))


@pytest.mark.parametrize("dtype", [np.float32, *HALVES[1:]])  # float16 cannot overflow
def test_overflows_beside_infinities(dtype):
    """Which of them comes first decides between inf and NaN, and threads how rows share tiles."""
    q, k, v = qkv(65, 65, 9, 1, 8)
    v[...] = -2e38
    v[:, 30::7] = np.inf
    q, k, v = (a.astype(dtype) for a in (q, k, v))
    results = [
        tileattn.dot_product_attention(q, k, v, is_causal=True, num_threads=n) for n in range(1, 8)
    ]
    assert np.isneginf(results[0].astype(np.float32)).any()
    assert not np.isfinite(results[0][:, 30:].astype(np.float32)).any()
    for threads, result in enumerate(results, start=1):
        assert same_bits(result, results[0], nan_equal=True), threads


def test_company(operation):
    """Alone, and between neighbours of NaN, which a quantized matrix refuses."""
    of, inputs, call, _ = operation
    whole = call(*inputs, num_threads=2)
    for b in range(B):
        own = [a[b : b + 1] for a in whole]
        for threads in (1, 7):
            check_equal(
                call(*(a[b : b + 1] for a in inputs), num_threads=threads), own, (b, threads)
            )
        beside = [a.copy() for a in inputs]
        for a in beside:
            if a.dtype.kind not in "biu":
                a[np.arange(B) != b] = 1e30 if of == "QuantizedMatrix" else np.nan
        got = call(*beside, num_threads=3)
        check_equal([a[b : b + 1] for a in got], own, (b, "neighbours"))


def placed(a, offset):
    """A copy that begins so many bytes behind the begin of a page."""
    memory = np.empty(a.nbytes + offset + PAGE, np.uint8)
    begin = -memory.ctypes.data % PAGE + offset
    copy = memory[begin : begin + a.nbytes].view(a.dtype).reshape(a.shape)
    copy[...] = a
    return copy


def spread(a):
    """A copy with something between its rows, and all of its axes but the last turned."""
    wide = np.empty((*a.shape[-2::-1], a.shape[-1] + 3), a.dtype)
    copy = wide[..., : a.shape[-1]].transpose(*range(a.ndim - 1)[::-1], a.ndim - 1)
    copy[...] = a
    return copy


@pytest.mark.parametrize("offset", [1, 8, PAGE - 40])
def test_places(operation, offset):
    """In the page; one byte off is aligned to nothing."""
    _, inputs, call, _ = operation
    expected = call(*inputs, num_threads=2)
    check_equal(call(*(placed(a, offset) for a in inputs), num_threads=2), expected, offset)


def test_strides(operation):
    _, inputs, call, _ = operation
    check_equal(call(*map(spread, inputs), num_threads=2), call(*inputs, num_threads=2), "strides")


@pytest.mark.parametrize("stored", [np.float32, "int8"])
@pytest.mark.parametrize("T", [1, 40])
def test_slots_of_a_cache(T, stored):
    """More room, other slots of a ring: the same positions in other places."""
    q, k, v = qkv(T, 900, 4, 2, 32)
    results = []
    for capacity, window in ((900, None), (1300, None), (512, 300), (600, 300), (1024, 300)):
        cache = KVCache(B, capacity, 2, 32, dtype=stored, window=window)
        for begin in range(0, 900, 100):
            rows = slice(begin, begin + 100)
            cache.append(k[:, rows], v[:, rows])
        results.append((cache.attend(q, local_window_size=(200, None)),))
    for capacity, got in enumerate(results):
        check_equal(got, results[0], capacity)


def test_every_operation_is_here():
    """Of what the package exports, all that computes; and the fuzzer has all."""
    tested = {operation.of for operation in operations(positions=6).values()}
    others = {"Plan", "RopeScaling", "available_isas", "cost", "get_num_threads", "isa"}
    others |= {"reference", "set_num_threads", "show_config", "threads"}
    assert tested | others == set(tileattn.__all__)
    assert not tested & others
    assert set().union(*fuzz.OF.values()) == set(tileattn.__all__)
