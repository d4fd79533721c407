"""float16 and bfloat16 as storage: each bit pattern is loaded, each rounding boundary is stored.

The oracles are NumPy's float16 and ml_dtypes' bfloat16, whose conversions round to nearest even.
"""

import ctypes

import numpy as np
import pytest

from tests.kernels.kernels import Kernels, address
from tests.kernels.test_attention import finish, values, weigh
from tests.kernels.test_pack import load_row, pack_columns, pack_rows
from tests.oracle import HALVES, Guarded, random, same_bits

NARROW = [np.dtype(half) for half in HALVES]
PATTERNS = np.arange(1 << 16).astype(np.uint16)
STORAGE = dict(zip(NARROW, (2, 1), strict=False))  # enum ta_storage
QUIET = dict(zip(NARROW, (0x0200, 0x0040), strict=False))


@pytest.fixture(params=NARROW, ids=str)
def narrow(request):
    return request.param


@pytest.fixture(scope="module")
def f32(isa):
    return Kernels(np.float32)


def check(got, expected):
    """The same bits, but for NaN: that it is one, not which."""
    bits = np.dtype(f"u{got.itemsize}")
    assert got.dtype == expected.dtype
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got[~nan].view(bits), expected[~nan].view(bits))


def converted(values, dtype):
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return values.astype(dtype)


# ------------------------------------------------------------------ loading


def test_every_pattern_of_a_row(kernels, narrow):
    values = PATTERNS.view(narrow)
    expected = converted(values, kernels.dtype)
    check(load_row(kernels, values, len(values), 1), expected)  # whole vectors
    check(load_row(kernels, values[::-1], len(values), -1), expected[::-1])  # one by one


def test_every_pattern_of_packed_columns(f32, narrow):
    values = PATTERNS.reshape(1 << 10, 64).view(narrow)
    expected = converted(values, np.float32)
    for src in (values, values.copy(order="F")):
        packed = pack_columns(f32, src, 64, 64)
        check(packed.ravel(), expected.ravel())


def test_every_pattern_of_packed_rows(f32, narrow):
    values = PATTERNS.reshape(64, 1 << 10).view(narrow)
    expected = converted(values.T, np.float32)
    check(pack_rows(f32, list(values), 1 << 10, 1).ravel(), expected.ravel())
    mirrored = pack_rows(f32, list(values[:, ::-1]), 1 << 10, -1)
    check(mirrored.ravel(), expected[::-1].ravel())


def test_every_pattern_behind_the_last_whole_vector(f32, narrow):
    width = f32.vl - 1
    rows = np.resize(PATTERNS, (-(-PATTERNS.size // width), width)).view(narrow)
    packed = pack_rows(f32, list(rows), width, 1)
    check(packed.ravel(), converted(rows.T, np.float32).ravel())


# ------------------------------------------------------------------ storing


def boundaries(narrow):
    """float32: each number of the narrow type, each middle between two, and their neighbours."""
    infinity = 0x7F80 if narrow.name == "bfloat16" else 0x7C00
    upper = PATTERNS[:infinity].view(narrow).astype(np.float64)
    # The next step would lead to what infinity stands for: 2^128, 2^16.
    beyond = 2.0 ** (128 if narrow.name == "bfloat16" else 16)
    middles = (upper + np.append(upper[1:], beyond)) / 2
    edges = np.concatenate([upper, middles]).astype(np.float32)
    assert np.array_equal(edges.astype(np.float64), np.concatenate([upper, middles]))
    above, below = (np.nextafter(edges, np.float32(to)) for to in (np.inf, -np.inf))
    positive = np.concatenate([below, edges, above])
    return np.concatenate([positive, -positive])


def anything(_):
    """float32: any bits, and numbers of sizes that float16 has too."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 1 << 19, dtype=np.uint32).view(np.float32)
    within = rng.uniform(-30, 20, 1 << 19)
    return np.concatenate([bits, (np.exp2(within) * rng.choice([-1, 1], within.size)).astype("f4")])


def nans():
    """float32: quiet and signalling, payloads in each bit and in all, of both signs."""
    payload = np.array(
        [1 << i for i in range(23)] + [0x7FFFFF, 0x3FFFFF, 0x1FFF, 0xFFFF], np.uint32
    )
    return np.concatenate([0x7F800000 | payload, 0xFF800000 | payload]).view(np.float32)


def store(kernels, values, narrow, column_stride=1):
    """The values through finish_row, divided by a sum of 1."""
    row_sum = np.zeros(kernels.vl, np.float32)
    row_sum[0] = 1
    return finish(kernels, values, 0.0, row_sum, len(values), column_stride, dtype=narrow)[0]


@pytest.mark.parametrize("column_stride", [1, 3, -1])
@pytest.mark.parametrize("values", [boundaries, anything])
def test_numbers_are_rounded_to_nearest_even(f32, narrow, values, column_stride):
    values = values(narrow)
    expected = converted(values, narrow)
    assert np.isinf(expected).any()
    check(store(f32, values, narrow, column_stride), expected)


@pytest.mark.parametrize("column_stride", [1, 2])
def test_a_nan_stays_one_and_is_quiet(f32, narrow, column_stride):
    values = np.resize(nans(), 8 * f32.vl + len(nans()))
    stored = store(f32, values, narrow, column_stride)
    assert np.isnan(stored).all()
    assert (stored.view(np.uint16) & QUIET[narrow]).all()


@pytest.mark.parametrize("column_stride", [1, 2, 7, -1, -3])
def test_rows_of_any_length_are_divided_and_rounded_once(f32, narrow, column_stride):
    """Beside finish_row in float32, whose LSE it has too."""
    row_sum = np.arange(1, f32.vl + 1).astype(np.float32)
    for columns in sorted({0, 1, f32.vl - 1, f32.vl, f32.vl + 1, 2 * f32.vl - 1, 37}):
        out = np.random.default_rng(columns).standard_normal(columns).astype(np.float32)
        wide, lse = finish(f32, out, 12.25, row_sum, columns)
        got, same = finish(f32, out, 12.25, row_sum, columns, column_stride, dtype=narrow)
        check(got, wide.astype(narrow))
        assert same == lse


def test_rows_of_any_length_are_stored(kernels):
    """Whole vectors, what is behind the last of them, and not a byte more."""
    for stored, kernel in kernels.store_row.items():
        for count in (0, 1, kernels.vl - 1, kernels.vl, kernels.vl + 1, 2 * kernels.vl - 1, 67):
            src = random(count, count, dtype=kernels.dtype)
            target = Guarded(count, stored)
            kernel(address(target.array), address(src), count)
            target.check()
            check(target.array, converted(src, stored))


@pytest.mark.parametrize("values", [boundaries, anything])
def test_stored_numbers_are_rounded_to_nearest_even(f32, narrow, values):
    src = values(narrow)
    dst = np.empty(len(src), narrow)
    f32.store_row[narrow](address(dst), address(src), len(src))
    check(dst, converted(src, narrow))


def test_a_row_that_saw_nothing(f32, narrow):
    zeros = np.zeros(2 * f32.vl + 1, np.float32)
    got, lse = finish(f32, zeros, -np.inf, zeros[: f32.vl], len(zeros), dtype=narrow)
    assert not got.view(np.uint16).any()
    assert lse == -np.inf


def test_what_was_stored_is_loaded_again(f32, narrow):
    numbers = PATTERNS.view(narrow)
    numbers = numbers[~np.isnan(converted(numbers, np.float32))]
    loaded = load_row(f32, numbers, len(numbers), 1)
    check(store(f32, loaded, narrow), numbers)


@pytest.mark.parametrize("flag", [0x0040, 0x8040], ids=["subnormals are zero", "and flushed"])
def test_subnormals_of_float16_survive_a_process_that_has_none(f32, flag):
    """They are normal float32 numbers, whatever the process has asked the CPU to do to its own."""
    libc = ctypes.CDLL(None)
    environment = (ctypes.c_uint32 * 8)()  # x86-64's fenv_t: MXCSR comes last
    if libc.fegetenv(environment) or environment[7] & 0x1F80 != 0x1F80:
        pytest.skip("the floating-point environment is not x86-64's")
    subnormal = PATTERNS[1:0x400].view(np.float16)
    expected = subnormal.astype(np.float32)
    target = np.zeros(len(subnormal), np.float32)
    kernel, source, to = f32.load_row[np.dtype(np.float16)], address(subnormal), address(target)
    before = environment[7]
    environment[7] = before | flag
    libc.fesetenv(environment)
    kernel(to, source, len(subnormal), 1)
    environment[7] = before
    libc.fesetenv(environment)
    check(target, expected)


# ------------------------------------------------------------------ in place


def near_panels(kernels):
    nr = kernels.attention_nr
    return (1, kernels.vl - 1, nr - 1, nr, nr + 1, 2 * nr + 7)


def test_few_rows_weigh_keys_of_each_storage_alike(f32, narrow):
    for keys in near_panels(f32):
        for width in (f32.vl, 5 * f32.vl):
            k = random(keys, keys, width).astype(narrow)
            for rows in range(1, f32.attention_mr + 1):
                q = random(rows, rows, width)
                for begin in {0, keys // 2}:
                    seen = {"key_begin": begin, "kernel": "weigh_few"}
                    expected = weigh(f32, q, k.astype(np.float32), **seen)
                    memory = np.full((keys, width + 3), np.nan, narrow)
                    memory[begin:, :width] = k[begin:]
                    place = {"k": memory, "k_stride": width + 3}
                    stored = weigh(f32, q, k, place=place | {"k_storage": STORAGE[narrow]}, **seen)
                    for a, b in zip(stored, expected, strict=True):
                        assert same_bits(a, b)


def test_values_of_each_storage_are_added_alike(f32, narrow):
    for keys in near_panels(f32):
        for columns in (f32.vl, 3 * f32.vl, 8 * f32.vl):
            v = random(keys, keys, columns).astype(narrow)
            for rows in range(1, f32.attention_mr + 1):
                weights, out = random(rows, rows, keys), random(columns, rows, columns)
                expected = values(f32, weights, v.astype(np.float32), out)
                memory = np.full((keys, columns + 5), np.nan, narrow)
                memory[:, :columns] = v
                got = values(f32, weights, memory[:, :columns], out, v_storage=STORAGE[narrow])
                assert same_bits(got, expected)
