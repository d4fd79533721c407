"""Keys and values of int8, with a scale a row: as rows come, and as kernels read them in place."""

import numpy as np
import pytest

from tests.kernels.kernels import Kernels, address
from tests.kernels.test_attention import values, weigh
from tests.kernels.test_pack import pack_columns, pack_rows
from tests.kernels.test_storage import near_panels
from tests.oracle import GUARD, Guarded, quantized, random, same_bits

INT8 = 4  # enum ta_storage
EVERY = np.arange(-128, 128).astype(np.int8)


@pytest.fixture(scope="module")
def f32(isa):
    return Kernels(np.float32)


def lengths(kernels):
    return sorted({0, 1, kernels.vl - 1, kernels.vl, kernels.vl + 1, 4 * kernels.vl, 67})


# ------------------------------------------------------------------ rows


def quantize(kernels, row):
    """quantize_row -> int8 [count], scale; nothing else is written, and no more is read."""
    source = Guarded(len(row), np.float32)
    source.memory[...] = np.nan
    source.array[...] = row
    target, scale = np.full(len(row) + 2 * GUARD, 77, np.int8), Guarded(1, np.float32)
    inner = target[GUARD : GUARD + len(row)]
    kernels.quantize_row(address(inner), address(scale.array), address(source.array), len(row))
    scale.check()
    assert (target[:GUARD] == 77).all()
    assert (target[GUARD + len(row) :] == 77).all()
    return inner.copy(), scale.array[0]


@pytest.mark.parametrize(
    "size", [1e-45, 1e-39, 1.4e-36, 1.6e-36, 1e-20, 1, 127, 1e20, 3.4028235e38]
)
def test_rows_become_the_nearest_integers(f32, size):
    for count in lengths(f32)[1:]:
        for seed in range(5):
            row = random(seed, count)
            row = row / np.abs(row).max() * np.float32(size)
            got, scale = quantize(f32, row)
            expected, expected_scale = quantized(row)
            assert same_bits(got, expected)
            assert scale == expected_scale
            assert np.isfinite(np.float32(127) * scale)
            assert scale >= np.float32(2.0**-126)


def test_halves_go_to_the_even_integer(f32):
    row = np.append(np.arange(-126.5, 127, 1), 127).astype(np.float32)
    got, scale = quantize(f32, row)
    assert scale == 1
    assert np.array_equal(got, np.rint(row))


def test_rows_without_a_scale(f32):
    assert quantize(f32, np.zeros(0, np.float32))[1] == 0
    for count in lengths(f32)[1:]:
        for zero in (0.0, -0.0):
            got, scale = quantize(f32, np.full(count, zero, np.float32))
            assert not got.any()
            assert same_bits(np.array([scale]), np.zeros(1, np.float32))
        for at in {0, count // 2, count - 1}:
            for stray in (np.nan, np.inf, -np.inf):
                row = random(count, count)
                row[at] = stray
                got, scale = quantize(f32, row)
                assert np.isnan(scale)
                assert not got.any()


# ------------------------------------------------------------------ packing


def test_every_integer_is_packed(f32):
    for width in (64, f32.vl - 1, f32.vl + 3):
        rows = np.resize(EVERY, (-(-256 // width), width))
        expected = rows.astype(np.float32)
        assert np.array_equal(pack_rows(f32, list(rows), width, 1), expected.T)
        packed = pack_columns(f32, rows, width, width)
        assert np.array_equal(packed, expected)


def test_columns_are_scaled(kernels):
    for depth in (0, 1, 7):
        for vectors in (1, 2, 3):
            width = vectors * kernels.vl
            scales = random(1, width, dtype=kernels.dtype)
            target = Guarded((depth, width), kernels.dtype)
            target.array[...] = a = random(0, depth, width, dtype=kernels.dtype)
            kernels.scale_columns(address(target.array), address(scales), depth, width)
            target.check()
            assert same_bits(target.array.copy(), a * scales)


# ------------------------------------------------------------------ in place


def some_rows(seed, *shape):
    """Integers and their scales: powers of two, so that products are exact in any order."""
    rng = np.random.default_rng(seed)
    integers = rng.integers(-127, 128, shape).astype(np.int8)
    return integers, np.exp2(rng.integers(-9, -4, shape[0])).astype(np.float32)


def panels_of(kernels, scales):
    """The scales and what fills the last panel: nobody sees that."""
    nr = kernels.attention_nr
    return np.append(scales, np.full(-len(scales) % nr, np.nan, np.float32))


def test_few_rows_weigh_keys_of_int8(f32):
    """Scaled by powers of two, the sums round as those of the products do."""
    for keys in near_panels(f32):
        for width in (f32.vl, 5 * f32.vl, 128):
            k, scales = some_rows(keys, keys, width)
            for rows in range(1, f32.attention_mr + 1):
                q = random(rows, rows, width) / 16
                for begin in {0, keys // 2}:
                    seen = {"key_begin": begin, "kernel": "weigh_few"}
                    expected = weigh(f32, q, k * scales[:, None], **seen)
                    memory = np.full((keys, width + 3), 99, np.int8)
                    memory[begin:, :width] = k[begin:]
                    of_panels = panels_of(f32, scales)
                    of_panels[:begin] = np.nan
                    place = {"k": memory, "k_stride": width + 3, "k_storage": INT8}
                    got = weigh(f32, q, k, place=place | {"k_scales": of_panels}, **seen)
                    for a, b in zip(got, expected, strict=True):
                        assert same_bits(a, b)


def test_a_key_without_a_scale_weighs_nan_or_what_zeros_do(f32):
    k, scales = some_rows(0, 3, f32.vl)
    scales[1] = np.nan
    scales[2] = 0
    place = {"k": k, "k_stride": f32.vl, "k_storage": INT8, "k_scales": panels_of(f32, scales)}
    q = random(0, 2, f32.vl)
    got = weigh(f32, q, k, np.zeros(2), kernel="weigh_few", place=place).weights
    assert np.isnan(got[:, 1]).all()
    assert (got[:, 2] == 1).all()
    assert np.isfinite(got[:, 0]).all()


def test_values_of_int8_are_added(f32):
    for keys in near_panels(f32):
        for columns in (f32.vl, 3 * f32.vl, 8 * f32.vl):
            v, scales = some_rows(keys, keys, columns)
            for rows in range(1, f32.attention_mr + 1):
                whole = np.full((rows, len(panels_of(f32, scales))), np.nan, np.float32)
                whole[:, :keys] = weights = random(rows, rows, keys)
                out = random(columns, rows, columns)
                for begin in {0, keys // 2}:
                    expected = values(f32, weights, v * scales[:, None], out, key_begin=begin)
                    memory = np.full((keys, columns + 5), 99, np.int8)
                    memory[begin:, :columns] = v[begin:]
                    of_panels = panels_of(f32, scales)
                    of_panels[:begin] = np.nan
                    got = values(
                        f32, whole, memory[:, :columns], out, begin, keys, v_storage=INT8,
                        v_scales=of_panels,
                    )  # fmt: skip
                    assert same_bits(got, expected)
