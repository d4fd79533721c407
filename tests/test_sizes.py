"""Indices beyond 2^32, sequences of a million, and memory that is not to be had."""

import contextlib
import mmap
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

import tileattn
from tests.operations import OPERATIONS
from tests.oracle import HALVES
from tests.process import run_python
from tileattn import _core

FAR = 2**32 + 2**20  # elements from one index to the next: any product with it needs 64 bits

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or sys.maxsize < 2**32, reason="maps memory that it does not use"
)


class Space:
    """Addresses for sparse arrays, of which only pages that are touched become memory."""

    def __init__(self, nbytes):
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        try:
            self.map = mmap.mmap(-1, nbytes, kind)
        except OSError as error:
            pytest.skip(f"{nbytes} bytes of addresses are not to be had: {error}")
        with contextlib.suppress(OSError):  # of kernels without huge pages
            self.map.madvise(mmap.MADV_NOHUGEPAGE)

    def spread(self, array, axis, sign=1):
        """A copy of an array, its elements FAR from each other along an axis, or -FAR."""
        array = np.moveaxis(array, axis, 0)
        size = array[0].size
        near = np.empty(array[0].shape, np.int8).strides
        extent = FAR * (len(array) - 1) + size
        memory = np.frombuffer(self.map, array.dtype, extent)
        strides = np.array((FAR, *near)) * array.itemsize
        view = np.lib.stride_tricks.as_strided(memory, array.shape, strides)[::sign]
        view[...] = array
        return np.moveaxis(view, 0, axis)


@pytest.fixture
def space():
    """Three of them."""
    return [Space(2**40) for _ in range(3)]


def normal(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
@pytest.mark.parametrize("T", [1, 20])
def test_strides_of_attention(isa, space, axis, sign, T):
    q, k, v = normal(0, 2, T, 4, 16), normal(1, 2, 20, 2, 16), normal(2, 2, 20, 2, 16)
    expected = tileattn.dot_product_attention(q, k, v)
    spread = [s.spread(x, axis, sign) for s, x in zip(space, (q, k, v), strict=True)]
    assert all(abs(x.strides[axis]) == 4 * FAR for x in spread if x.shape[axis] > 1)
    assert np.array_equal(tileattn.dot_product_attention(*spread), expected)
    out = Space(2**40).spread(np.zeros_like(q), axis, sign)
    tileattn.dot_product_attention(*spread, out=out)
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("axis", [1, 2, 3])
@pytest.mark.parametrize("T", [1, 20])
def test_strides_of_mask_and_bias(isa, space, axis, T):
    q, k, v = normal(0, 1, T, 4, 16), normal(1, 1, 40, 2, 16), normal(2, 1, 40, 2, 16)
    mask = np.random.default_rng(3).random((1, 4, T, 40)) < 0.7
    bias = normal(4, 1, 4, T, 40)
    expected = tileattn.dot_product_attention(q, k, v, mask=mask, bias=bias)
    far_mask, far_bias = space[0].spread(mask, axis), space[1].spread(bias, axis, -1)
    got = tileattn.dot_product_attention(q, k, v, mask=far_mask, bias=far_bias)
    assert np.array_equal(got, expected)


@pytest.mark.any_isa  # the best one, which may have dot products of bfloat16
@pytest.mark.parametrize("dtype", [*HALVES, np.float64])
def test_strides_of_other_types(isa, space, dtype):
    for T in (1, 20):
        arrays = [normal(i, 1, t, 2, 16, dtype=dtype) for i, t in enumerate((T, 20, 20))]
        expected = tileattn.dot_product_attention(*arrays)
        for axis in (1, 3):
            spread = [s.spread(x, axis) for s, x in zip(space, arrays, strict=True)]
            assert np.array_equal(tileattn.dot_product_attention(*spread), expected)


def test_strides_of_other_operations(isa, space):
    x = normal(0, 3, 40, 32)
    weights = [normal(i, *shape) for i, shape in enumerate([(32, 4, 8), (32, 2, 8), (32, 2, 8)])]
    w_o, rope, norm = normal(4, 4, 8, 32), tileattn.Rope(), tileattn.LayerNorm()
    block = tileattn.AttentionBlock(*weights, w_o, rope=rope, is_causal=True)
    expected = block(x)
    for axis in range(3):
        far = space[0].spread(x, axis, -1)
        assert np.array_equal(block(far), expected)
        out = space[1].spread(np.zeros_like(x), axis)
        assert np.array_equal(block(far, out=out), expected)
        assert np.array_equal(norm(far, residual=far), norm(x, residual=x))
        heads, far_heads = x[:, :, None], far[:, :, None]
        places = np.arange(40)
        assert np.array_equal(rope(far_heads, places), rope(heads, places))
        far_weights = [s.spread(w, axis) for s, w in zip(space, weights, strict=True)]
        far_o = Space(2**40).spread(w_o, axis)
        same = tileattn.AttentionBlock(*far_weights, far_o, rope=rope, is_causal=True)
        assert np.array_equal(same(x), expected)

    q, k, v = normal(0, 60, 4, 16), normal(1, 60, 2, 16), normal(2, 60, 2, 16)
    starts = [0, 7, 7, 60]
    expected = tileattn.varlen_attention(q, k, v, starts, starts, is_causal=True)
    far = [s.spread(a, 0) for s, a in zip(space, (q, k, v), strict=True)]
    assert np.array_equal(tileattn.varlen_attention(*far, starts, starts, is_causal=True), expected)
    out, lse = tileattn.dot_product_attention(q, k, v, return_lse=True)
    expected = tileattn.merge_states(out, lse, out, lse)
    far_out, far_lse = space[0].spread(out, 0), space[1].spread(lse, 0)
    got = tileattn.merge_states(far_out, far_lse, far_out, far_lse)
    assert all(map(np.array_equal, got, expected))
    far_q, far_k = space[0].spread(q, 0), space[2].spread(k, 1)
    for reduce in (None, "queries", "keys"):
        assert np.array_equal(
            tileattn.attention_weights(far_q, far_k, far_lse, reduce=reduce),
            tileattn.attention_weights(q, k, lse, reduce=reduce),
        )


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_a_cache_larger_than_memory(isa, dtype, monkeypatch):
    """Of 2^33 elements for each sequence, which nothing touches but what is in use."""
    batch, capacity, H = 3, 2**27, 64
    with monkeypatch.context() as patch:
        patch.setattr(_core, "Memory", lambda nbytes: Space(nbytes).map)
        cache = tileattn.KVCache(batch, capacity, 1, H, dtype=dtype)
    assert cache._keys.strides[0] >= 2**33
    k, v, q = normal(0, batch, 70, 1, H), normal(1, batch, 70, 1, H), normal(2, batch, 9, 2, H)
    small = tileattn.KVCache(batch, 100, 1, H, dtype=dtype)
    small.append(k, v, [70, 3, 40])
    cache.append(k, v, [70, 3, 40])
    counts = [9, 3, 2]
    expected = small.attend(q, query_seq_lengths=counts)
    assert np.array_equal(cache.attend(q, query_seq_lengths=counts), expected)
    for each in (small, cache):
        each.reorder([1, 2, 0])
    counts = [3, 2, 9]
    expected = small.attend(q, query_seq_lengths=counts)
    assert np.array_equal(cache.attend(q, query_seq_lengths=counts), expected)


@pytest.mark.parametrize("T", [1, 20])
def test_a_million_keys(isa, T):
    """Of weight 1 or 0, and values that are small integers: their sums are exact in any order."""
    S, last, left = 1_000_003, 999_990, 900_000
    rng = np.random.default_rng(0)
    v = rng.integers(-8, 9, (1, S, 1, 16)).astype(np.float32)
    counts = rng.random(S) < 0.5
    k = rng.standard_normal((1, S, 1, 16), dtype=np.float32)
    k[0, :, 0, 0] = np.where(counts, 0, -1e4)
    q = np.zeros((1, T, 1, 16), np.float32)
    q[..., 0] = 1
    out, lse = tileattn.dot_product_attention(
        q,
        k,
        v,
        is_causal=True,
        query_offset=S - T,
        key_value_seq_lengths=[last],
        local_window_size=(left, 0),
        return_lse=True,
    )
    for t in range(T):
        seen = slice(S - T + t - left, min(last, S - T + t + 1))
        count = counts[seen].sum()
        mean = v[0, seen, 0][counts[seen]].sum(axis=0, dtype=np.float64) / count
        # A reciprocal and a product are rounded, or a quotient; and a logarithm of base 2 or e.
        assert np.allclose(out[0, t, 0], mean, rtol=2 * np.finfo(np.float32).eps, atol=0)
        assert np.isclose(lse[0, t, 0], np.log(count), rtol=2 * np.finfo(np.float32).eps, atol=0)


def test_more_positions_than_32_bits_count(isa):
    """Of arrays that repeat one row: only those that a window shows are read."""
    S = 2**33
    q, k, v = (
        np.broadcast_to(normal(i, 1, 1, 1, 16), (1, n, 1, 16)) for i, n in enumerate((5, S, S))
    )
    for offset in (S - 5, 2**32 - 2, 2**31 - 2, 0):
        got = tileattn.dot_product_attention(
            q, k, v, is_causal=True, query_offset=offset, local_window_size=(30, 0)
        )
        assert np.allclose(got, v[:, :1], rtol=1e-6)
    starts = [0, 2**32 + 10, S]
    got = tileattn.varlen_attention(
        q[0],
        k[0],
        v[0],
        [0, 2, 5],
        starts,
        is_causal=True,
        local_window_size=(30, 0),
        query_offset=[2**32, 2**31],
    )
    assert np.allclose(got, v[0, :1], rtol=1e-6)


# ------------------------------------------------------------------ memory that is not to be had

SHIM = r"""
/* The n-th allocation fails: of at least so many bytes, or any that is aligned. */
#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
static long left = -1;
static size_t least;
static int fails(size_t size, int always)
{
    return (always || size >= least) && __atomic_load_n(&left, 5) >= 0
        && __atomic_fetch_sub(&left, 1, 5) == 0;
}
void arm(long n, size_t bytes) { least = bytes; left = n; }
long disarm(void) { long was = left; left = -1; return was; }
void *malloc(size_t size) { return fails(size, 0) ? NULL : __libc_malloc(size); }
void *calloc(size_t n, size_t size) { return fails(n * size, 0) ? NULL : __libc_calloc(n, size); }
void *realloc(void *p, size_t size) { return fails(size, 0) ? NULL : __libc_realloc(p, size); }
int posix_memalign(void **to, size_t alignment, size_t size)
{
    void *memory = fails(size, 1) ? NULL : __libc_memalign(alignment, size);
    if (memory == NULL)
        return ENOMEM;
    *to = memory;
    return 0;
}
"""

EACH_ALLOCATION = """
import ctypes, sys
import numpy as np
import tileattn
from tests.operations import operations
from tests.oracle import same_bits

libc = ctypes.CDLL(None)
libc.arm.argtypes = [ctypes.c_long, ctypes.c_size_t]
failures = {}
tileattn._core.keep_scratch(0)  # or none would be asked for
for num_threads in (1, 2):
    for name, operation in operations(positions=300).items():
        expected = operation.run(num_threads)
        for n in range(1000):
            if operation.out is not None:
                operation.out[...] = 0
            message = None
            # NumPy's own buffers are smaller: it does not survive it where one is not to be had.
            libc.arm(n, 200_000)
            try:
                got = operation(num_threads)
            except MemoryError as error:
                message = str(error)
            spent = libc.disarm() < 0
            if not spent:
                assert message is None and same_bits(got, expected), name
                break
            failures[name] = failures.get(name, 0) + 1
            if message is None:
                # Python or NumPy has done without it.
                assert same_bits(got, expected), (name, n)
            else:
                assert "allocate" in message or message == "", (name, message)
                written = operation.out is not None and operation.out.astype(np.float32).any()
                assert not written, (name, n)
        else:
            raise AssertionError(f"{name} allocates without end")
for name in sorted(failures):
    print(name)
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    if shutil.which("cc") is None or os.environ.get("LD_PRELOAD"):
        pytest.skip("needs a C compiler, cc, and to be the first library that is loaded")
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(SHIM)
    command = [
        "cc",
        "-shared",
        "-fPIC",
        "-O1",
        "-fno-builtin",
        "-Wl,-z,defs",
        "shim.c",
        "-o",
        "shim.so",
    ]
    if subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode != 0:
        pytest.skip("the C library has no __libc_malloc")
    return folder / "shim.so"


@pytest.mark.any_isa
def test_each_allocation_that_fails_changes_nothing(shim):
    """Outputs and caches are as they were then, and all works when there is memory again."""
    failed = run_python(EACH_ALLOCATION, LD_PRELOAD=str(shim)).splitlines()
    # Norms and ropes write into their output and need no more; these others need too little.
    small = {"explain", "attention, little", "block, quantized matrix"}
    some = ("one row", "few rows", "LayerNorm", "RMSNorm", "rope")
    small |= {name for name in OPERATIONS if any(each in name for each in some)}
    assert set(OPERATIONS) - small <= set(failed)


@pytest.mark.any_isa
def test_a_process_short_of_addresses():
    """The error says how much was wanted, and by whom."""
    print(
        run_python("""
import resource
import numpy as np
import tileattn

q = np.ones((64, 16, 8, 512), np.float32)
many = np.broadcast_to(q[:1], (1024, 16, 8, 512))
w = np.ones((4096, 8, 512), np.float32)
tileattn.dot_product_attention(q[:1], q[:1], q[:1])
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (40 << 20), resource.RLIM_INFINITY))
for call, said in (
    (lambda: tileattn.KVCache(1, 1 << 20, 8, 512), "could not allocate"),
    (lambda: tileattn.AttentionBlock(w, w, w, w.reshape(8, 512, 4096)), "packed weights"),
    (lambda: tileattn.dot_product_attention(many, many, many), "llocate"),
):
    try:
        call()
    except MemoryError as error:
        assert said in str(error) and any(c.isdigit() for c in str(error)), error
    else:
        raise AssertionError(said)
small = tileattn.dot_product_attention(q[:1], q[:1], q[:1])
assert np.allclose(small, 1)
""")
    )
