"""A call leaves each thread's floating-point state as it was, and does not depend on it."""

import contextlib
import ctypes
import platform
import shutil
import subprocess
import sys

import numpy as np
import pytest

import tileattn
from tests.operations import operations
from tests.oracle import attention, same_bits
from tests.process import run_python

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="reads x86-64's MXCSR"
)

FLAGS, INEXACT, DENORMALS_ARE_ZERO, FLUSH_TO_ZERO = 0x3F, 0x20, 0x40, 0x8000
MASKS, ROUNDING = 0x1F80, 0x6000
INVALID_TRAPS = MASKS & ~0x80
DOWN, UP, TO_ZERO = 0x2000, 0x4000, 0x6000

# NumPy's own arithmetic, before and after the kernels', need not survive these.
STATES = {
    "default": MASKS,
    "flags": MASKS | FLAGS,
    "no subnormals": MASKS | FLUSH_TO_ZERO | DENORMALS_ARE_ZERO,
    "down": MASKS | DOWN,
    "up": MASKS | UP,
    "to zero": MASKS | TO_ZERO | 0x01,
    "invalid traps": INVALID_TRAPS,
}

THREADS = r"""
#include <immintrin.h>
#include <omp.h>
/* Sets and reads MXCSR of a team, which is the one that the next region of this thread gets. */
void set_states(const unsigned *states, int threads)
{
#pragma omp parallel num_threads(threads)
    _mm_setcsr(states[omp_get_thread_num()]);
}
void get_states(unsigned *states, int threads)
{
#pragma omp parallel num_threads(threads)
    states[omp_get_thread_num()] = _mm_getcsr();
}
"""


def environment():
    """x86-64's fenv_t of this thread, and the C library; MXCSR comes last."""
    libm = ctypes.CDLL(None)
    found = (ctypes.c_uint32 * 8)()
    assert libm.fegetenv(found) == 0
    return libm, found


def state():
    return environment()[1][7]


@contextlib.contextmanager
def in_state(mxcsr):
    libm, found = environment()
    before = found[7]
    found[7] = mxcsr
    libm.fesetenv(found)
    try:
        yield
    finally:
        found[7] = before
        libm.fesetenv(found)


@pytest.fixture(scope="module")
def every(isa):
    """The operations and what they give."""
    found = operations()
    return {name: (operation, operation.run(1)) for name, operation in found.items()}


@pytest.mark.any_isa
def test_import_changes_nothing():
    printed = run_python("""
        import sys, numpy, tests.test_float_state as t
        before = t.state() & ~0x3F
        del sys.modules["tileattn"]
        import tileattn
        print(before, t.state())
    """)
    before, after = map(int, printed.split())
    assert before == after & ~FLAGS == MASKS


@pytest.mark.any_isa
@pytest.mark.parametrize("num_threads", [1, 2])
def test_calls_leave_the_state_as_it_was(every, num_threads):
    for name, (operation, _) in every.items():
        for label in ("default", "no subnormals", "up"):
            with in_state(STATES[label]):
                operation.run(num_threads)
                after = state()
            assert after & ~FLAGS == STATES[label], (name, label)


# Tables of angles and scales, which NumPy computes in the call: it follows the state of the thread.
BY_NUMPY = {"rope", "rope, interleaved", "QuantizedMatrix"}


@pytest.mark.any_isa
@pytest.mark.parametrize("label", STATES)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_bits_do_not_depend_on_the_state(every, label, num_threads):
    for name, (operation, expected) in every.items():
        if name in BY_NUMPY and label in ("down", "up", "to zero"):
            continue
        with in_state(STATES[label]):
            got = operation.run(num_threads)
        assert same_bits(got, expected), name


def test_kernels_raise_no_flag_that_stays(isa):
    """Overflow, underflow, subnormals, inf - inf and 0 * inf: nothing of it is a user's."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 40, 4, 32)).astype(np.float32)
    q[0, :10] *= np.float32(1e30)
    k[0, :10] *= np.float32(1e30)
    v[0, 3:6] = np.float32(1e-40)
    v[0, 7] = np.inf
    k[0, 8] = -np.inf
    q[0, 9] = np.nan
    hidden = np.full((40, 40), -np.inf, np.float32)
    cache = tileattn.KVCache(1, 100, 4, 32, dtype="float16")
    for num_threads in (1, 2):
        with in_state(MASKS):
            out, lse = tileattn.dot_product_attention(
                q, k, v, bias=hidden, return_lse=True, num_threads=num_threads
            )
            tileattn.dot_product_attention(q, k, v, is_causal=True, num_threads=num_threads)
            cache.append(k, v)
            cache.attend(q)
            tileattn.LayerNorm(np.ones(32, np.float32))(q * 1)
            tileattn.merge_states(out, lse, out, lse)
            raised = state() & FLAGS & ~INEXACT
        assert raised == 0


@pytest.mark.any_isa
def test_numpy_reports_nothing(every):
    with np.errstate(all="raise"):
        for operation, expected in every.values():
            assert same_bits(operation.run(2), expected)


@pytest.fixture(scope="module")
def team(tmp_path_factory):
    """set_states and get_states of OpenMP's threads, in the runtime that tileattn uses."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler, cc")
    folder = tmp_path_factory.mktemp("team")
    (folder / "team.c").write_text(THREADS)
    command = ["cc", "-shared", "-fPIC", "-O1", "-fopenmp", "team.c", "-o", "team.so"]
    if subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode != 0:
        pytest.skip("cc has no OpenMP")
    return ctypes.CDLL(str(folder / "team.so"))


@pytest.mark.any_isa
def test_threads_of_a_team_keep_their_states(every, team):
    """Theirs may differ from the caller's: they come from the thread that once made them."""
    states = (ctypes.c_uint32 * 2)(MASKS, MASKS | FLUSH_TO_ZERO | DENORMALS_ARE_ZERO | UP)
    after = (ctypes.c_uint32 * 2)()
    before = (ctypes.c_uint32 * 2)()
    team.get_states(before, 2)
    try:
        for name, (operation, expected) in every.items():
            team.set_states(states, 2)
            got = operation.run(2)
            team.get_states(after, 2)
            assert after[0] & ~FLAGS == states[0], name
            assert after[1] == states[1], name
            assert same_bits(got, expected), name
    finally:
        team.set_states(before, 2)


@pytest.mark.parametrize("T", [1, 40])
@pytest.mark.parametrize("label", ["default", "no subnormals"])
def test_subnormal_numbers_count(isa, T, label):
    """Values that are subnormal as float32, and queries that only a large scale makes count."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, 2, 16)).astype(np.float32) for n in (T, 50, 50))
    q, k, v, scale = q * np.float32(2.0**-135), k * 2**15, v * np.float32(2.0**-135), 2.0**118
    expected, _ = attention(q, k, v, np.float64, scale=scale)
    with in_state(STATES[label]):
        got = tileattn.dot_product_attention(q, k, v, scale=scale)
    assert abs(expected).max() > 100 * 2.0**-149
    # Each of 50 products is rounded to a multiple of 2^-149, and so is their quotient.
    error = abs(got.astype(np.float64) - expected).max()
    assert error <= (50 + 1) * 2.0**-149
