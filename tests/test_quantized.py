"""Blocks of weights in fewer bits: what they compute with, and what a QuantizedMatrix takes."""

import numpy as np
import pytest

import tileattn
from tests.oracle import random, same_bits
from tests.test_block import Sizes, norm_of
from tileattn import AttentionBlock, KVCache, QuantizedMatrix, Rope, _core, reference
from tileattn.quantized import GROUP_SIZES

WEIGHT_DTYPES = ["bfloat16", "int8", "int4"]
BITS = {"int8": 8, "int4": 4}


def relative(got, exact):
    return np.linalg.norm(got.astype(np.float64) - exact) / np.linalg.norm(exact)


def of_rounding(w, weight_dtype):
    """How far weights [out, in] may be from what they are rounded to, relative in the norm.

    bfloat16 is off by half of the last of 8 bits at most. The others are off by half a step at
    most, evenly spread: by step / sqrt(12) on average, and over many weights hardly more. A step is
    the 254th part of a row's width, or the 15th of that of 32 weights, where the scale and the
    minimum are rounded to float16, too.
    """
    if weight_dtype == "bfloat16":
        return 2.0**-8
    if weight_dtype == "int8":
        steps = np.broadcast_to(2 * abs(w).max(axis=1, keepdims=True) / 254, w.shape)
        of_scales = 0.0
    else:
        groups = w.reshape(len(w), -1, 32)
        ranges = groups.max(axis=2) - groups.min(axis=2)
        steps, of_scales = np.repeat(ranges / 15, 32, axis=1), 2.0**-10
    many = 1 + 4 / np.sqrt(w.size)  # four deviations of the mean of that many squares
    return many * np.linalg.norm(steps) / 12**0.5 / np.linalg.norm(w) + of_scales


def rounded(w, weight_dtype):
    """Weights [out, in] as they are computed with, in float32."""
    if weight_dtype == "bfloat16":
        bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
        return w.astype(bfloat16).astype(np.float32)
    return QuantizedMatrix.from_float(w, bits=BITS[weight_dtype]).dequantize()


def packed(w, weight_dtype):
    if weight_dtype == "bfloat16":
        return _core.PackedMatrix(w.T, bfloat16=True)
    return _core.PackedMatrix(QuantizedMatrix.from_float(w, bits=BITS[weight_dtype]))


def product(x, w, bias=None, threads=1):
    out = np.full((len(x), *w.columns), np.nan, np.float32)
    _core.project(x[None], w, (out,), (bias,), threads)
    return out


# ------------------------------------------------------------------ products


@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES)
@pytest.mark.parametrize(
    "out, depth", [(1, 1), (47, 31), (48, 32), (49, 33), (147, 520), (97, 1031)]
)
def test_bits_are_those_of_the_rounded_weights_for_any_number_of_rows(weight_dtype, out, depth):
    w, bias = random(1, out, depth), random(2, out)
    floats = _core.PackedMatrix(rounded(w, weight_dtype).T)
    words = packed(w, weight_dtype)
    x = random(3, 300, depth)
    whole = product(x, floats, bias)
    for rows in (1, 2, 3, 4, 5, 9, 10, 16, 17, 109, 300):
        for threads in (1, 2, 3):
            assert same_bits(product(x[:rows], words, bias, threads), whole[:rows])


@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES)
def test_errors_of_rounding_and_of_arithmetic(weight_dtype):
    w, x = random(1, 500, 1024), random(2, 20, 1024)
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    of_rounded = x.astype(np.float64) @ rounded(w, weight_dtype).T.astype(np.float64)
    for rows in (1, 20):
        got = product(x[:rows], packed(w, weight_dtype))
        assert relative(got, of_rounded[:rows]) <= 2.0**-24 * 1024**0.5
        # Products spread over so many outputs, too.
        many = 1 + 4 / np.sqrt(got.size)
        assert relative(got, exact[:rows]) <= many * of_rounding(w, weight_dtype)


@pytest.mark.any_isa
@pytest.mark.parametrize("size", [1e-35, 1e-20, 1e-6, 1.0, 1e5, 1e30])
def test_rounding_does_not_depend_on_the_size_of_the_weights(size):
    w = random(1, 40, 256)
    for bits, weight_dtype in ((8, "int8"), (4, "int4")):
        large = (w * np.float64(size)).astype(np.float32)
        got = QuantizedMatrix.from_float(large, bits=bits).dequantize()
        if size == 1e-35 and bits == 8:  # scales that kernels could not tell from zero
            assert not got.any()
        else:
            error = relative(got / np.float64(size), w.astype(np.float64))
            assert error <= of_rounding(w, weight_dtype)


@pytest.mark.any_isa
def test_no_group_lies_in_two_slices():
    assert all(_core.SLICE_DEPTH % size == 0 for size in GROUP_SIZES)


@pytest.mark.any_isa
def test_what_is_kept_exactly():
    grid = np.arange(-127, 128, dtype=np.float32)[None] / 4
    assert same_bits(QuantizedMatrix.from_float(grid).dequantize(), grid)
    nibbles = 3 + np.arange(16, dtype=np.float32)[None] / 8
    assert same_bits(QuantizedMatrix.from_float(nibbles, bits=4).dequantize(), nibbles)
    for same in (0, 1, -2.5):
        w = np.full((3, 70), same, np.float32)
        assert np.array_equal(QuantizedMatrix.from_float(w, bits=4).dequantize(), w)


# ------------------------------------------------------------------ blocks


def rounded_weights(weights, weight_dtype):
    """The weights of a block, as they are computed with."""
    result = []
    for i, w in enumerate(weights):
        depth = len(w) if i < 3 else w.shape[0] * w.shape[1]
        rows = rounded(np.ascontiguousarray(w.reshape(depth, -1).T), weight_dtype)
        result.append(np.ascontiguousarray(rows.T).reshape(w.shape))
    return result


BLOCKS = {
    "one of each": Sizes(D=1, N=1, K=1, H=1),
    "odd": Sizes(D=33, N=3, K=1, H=11, Hv=5),
    "whole vectors": Sizes(D=96, N=6, K=2, H=16),
    "cross": Sizes(D=40, N=4, K=2, H=10, Dc=56),
    "two slices of depth": Sizes(D=520, N=9, K=3, H=60),
}


@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES)
@pytest.mark.parametrize("sizes", BLOCKS.values(), ids=BLOCKS)
def test_a_block_has_the_bits_of_one_of_rounded_weights(sizes, weight_dtype):
    weights, biases = sizes.weights(), sizes.biases()
    options = dict(biases, norm=norm_of(sizes["D"])[0])
    block = AttentionBlock(*weights, **options, weight_dtype=weight_dtype)
    floats = AttentionBlock(*rounded_weights(weights, weight_dtype), **options)
    is_cross = sizes["D"] != sizes["Dc"]
    for T in (1, 3, 16, 17, 120):
        x = random(30, 2, T, sizes["D"])
        context = random(31, 2, 9, sizes["Dc"]) if is_cross else None
        expected = floats(x, context=context)
        for threads in (1, 2):
            assert same_bits(block(x, context=context, num_threads=threads), expected)


@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES)
@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_a_block_with_a_cache_and_fused_norms(weight_dtype, norm_position):
    sizes = Sizes(D=96, N=6, K=2, H=16)
    weights = sizes.weights()
    options = {
        "norm": norm_of(96)[0],
        "norm_position": norm_position,
        "rope": Rope(),
        "q_norm": tileattn.RMSNorm(),
        "k_norm": tileattn.RMSNorm(),
        "is_causal": True,
    }
    blocks = [
        AttentionBlock(*weights, **options, weight_dtype=weight_dtype),
        AttentionBlock(*rounded_weights(weights, weight_dtype), **options),
    ]
    caches = [KVCache(2, 80, 2, 16) for _ in blocks]
    x = random(30, 2, 60, 96)
    for begin, end in ((0, 50), (50, 51), (51, 54), (54, 60)):
        got, expected = (
            block(x[:, begin:end], cache=cache) for block, cache in zip(blocks, caches, strict=True)
        )
        assert same_bits(got, expected)


@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES)
def test_reference_and_one_call_take_a_weight_dtype(weight_dtype):
    sizes = Sizes(D=64, N=4, K=2, H=16)
    weights, x = sizes.weights(), random(30, 1, 7, 64)
    exact = reference.attention_block(x, *weights, weight_dtype=weight_dtype)
    once = tileattn.attention_block(x, *weights, weight_dtype=weight_dtype)
    assert relative(once, exact.astype(np.float64)) <= 1e-6
    with_rounded = reference.attention_block(x, *rounded_weights(weights, weight_dtype))
    assert same_bits(exact, with_rounded)
    assert not np.allclose(exact, reference.attention_block(x, *weights), atol=1e-6)


def test_what_a_block_holds():
    sizes = Sizes(D=256, N=4, K=4, H=64)
    weights = sizes.weights()
    plain = AttentionBlock(*weights)
    assert plain.weight_dtype is None
    assert "weight_dtype" not in repr(plain)
    for weight_dtype, share in {"bfloat16": 1 / 2, "int8": 1 / 4, "int4": 5 / 32}.items():
        block = AttentionBlock(*weights, weight_dtype=weight_dtype)
        assert block.weight_dtype == weight_dtype
        assert f"weight_dtype='{weight_dtype}'" in repr(block)
        scales = 4 * 1024 if weight_dtype == "int8" else 0
        assert block.nbytes == plain.nbytes * share + scales
        assert block.dtype == np.float32


# ------------------------------------------------------------------ weights that come quantised


def linear(weights):
    return [np.ascontiguousarray(w.reshape(len(w), -1).T) for w in weights[:3]] + [
        np.ascontiguousarray(weights[3].reshape(-1, weights[3].shape[2]).T)
    ]


def test_from_linear_takes_quantised_matrices_of_any_kind_together():
    sizes = Sizes(D=96, N=6, K=2, H=16)
    w_q, w_k, w_v, w_o = linear(sizes.weights())
    mixed = (
        QuantizedMatrix.from_float(w_q, bits=4),
        QuantizedMatrix.from_float(w_k),
        w_v,
        QuantizedMatrix.from_float(w_o, group_size=32),
    )
    floats = [w if isinstance(w, np.ndarray) else w.dequantize() for w in mixed]
    options = {"num_heads": 6, "num_kv_heads": 2, **{"b_o": random(5, 96)}}
    block = AttentionBlock.from_linear(*mixed, **options)
    plain = AttentionBlock.from_linear(*floats, **options)
    assert block.weight_dtype == ("int4", "int8", None, "int8")
    assert "('int4', 'int8', None, 'int8')" in repr(block)
    for T in (1, 5, 40):
        x = random(T, 2, T, 96)
        assert same_bits(block(x), plain(x))
    rest = AttentionBlock.from_linear(*mixed, **options, weight_dtype="int8")
    assert rest.weight_dtype == ("int4", "int8", "int8", "int8")


@pytest.mark.parametrize("bits", [8, 4])
def test_from_linear_takes_stacked_quantised_rows(bits):
    w_q, w_k, w_v, w_o = linear(Sizes(D=64, N=4, K=2, H=16).weights())
    stacked = QuantizedMatrix.from_float(np.concatenate([w_q, w_k, w_v]), bits=bits, group_size=32)
    options = {"num_heads": 4, "num_kv_heads": 2, "b_qkv": random(3, 128)}
    x = random(1, 1, 9, 64)
    block = AttentionBlock.from_linear(w_qkv=stacked, w_o=w_o, **options)
    plain = AttentionBlock.from_linear(w_qkv=stacked.dequantize(), w_o=w_o, **options)
    assert same_bits(block(x), plain(x))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_gguf_tensors_are_used_as_they_are(kind):
    """Against the dequantisation of the package that defines the format."""
    gguf = pytest.importorskip("gguf")
    kind_id = gguf.GGMLQuantizationType[kind]
    w = random(1, 96, 160)
    blocks = gguf.quantize(w, kind_id).reshape(96, 160 // 32, -1)
    d = blocks[..., :2].copy().view(np.float16)[..., 0]
    if kind == "Q8_0":
        values = blocks[..., 2:].copy().view(np.int8).reshape(96, 160)
        matrix = QuantizedMatrix(values, d, group_size=32)
    else:
        nibbles = blocks[..., 2 if kind == "Q4_0" else 4 :]
        values = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1).reshape(96, 160)
        if kind == "Q4_0":
            signed = values.astype(np.int8) - np.int8(8)
            matrix = QuantizedMatrix(signed, d, bits=4, group_size=32)
        else:
            m = blocks[..., 2:4].copy().view(np.float16)[..., 0]
            matrix = QuantizedMatrix(values, d, m, bits=4, group_size=32)
    expected = gguf.dequantize(gguf.quantize(w, kind_id), kind_id)
    assert np.array_equal(matrix.dequantize(), expected)
    x = random(2, 5, 160)
    floats = product(x, _core.PackedMatrix(expected.T))
    assert np.array_equal(product(x, _core.PackedMatrix(matrix)), floats)


@pytest.mark.parametrize("group_size", [32, 64, 128, 256, 512, None])
@pytest.mark.parametrize("bits", [8, 4])
def test_every_group_size(bits, group_size):
    w, x = random(1, 50, 1100), random(2, 17, 1100)
    group_size = group_size or 1100
    matrix = QuantizedMatrix.from_float(w, bits=bits, group_size=group_size)
    assert (matrix.shape, matrix.bits, matrix.group_size) == ((50, 1100), bits, group_size)
    floats = _core.PackedMatrix(matrix.dequantize().T)
    for rows in (1, 17):
        got = product(x[:rows], _core.PackedMatrix(matrix))
        assert same_bits(got, product(x[:rows], floats))


@pytest.mark.any_isa
def test_float32_scales_of_4_bits_must_be_exact():
    values = np.zeros((2, 32), np.uint8)
    half = np.full((2, 1), 0.3, np.float16)
    QuantizedMatrix(values, half, half, bits=4)
    tiny = half.astype(np.float32) * np.float32(2.0**-60)
    matrix = QuantizedMatrix(values + np.uint8(3), tiny, tiny, bits=4)
    assert same_bits(matrix.dequantize(), np.repeat(4 * tiny, 32, axis=1))
    wide = np.full((2, 1), 0.3, np.float32)
    with pytest.raises(ValueError, match=r"scales of 4 bits must be float16 numbers .*astype"):
        QuantizedMatrix(values, wide, wide, bits=4)


def test_scales_may_lie_in_records_of_any_size():
    records = np.zeros((10, 4), [("scale", "<f4"), ("sum", "<u2"), ("values", "i1", 32)])
    records["values"] = np.random.default_rng(1).integers(-127, 128, (10, 4, 32))
    records["scale"] = random(2, 10, 4)
    values = records["values"].reshape(10, 128)
    matrix = QuantizedMatrix(values, records["scale"], group_size=32)
    floats = _core.PackedMatrix(matrix.dequantize().T)
    x = random(3, 17, 128)
    for rows in (1, 17):
        got = product(x[:rows], _core.PackedMatrix(matrix))
        assert same_bits(got, product(x[:rows], floats))


@pytest.mark.any_isa
@pytest.mark.parametrize("count", [0, 4])
def test_one_to_three_matrices_lie_side_by_side(count):
    with pytest.raises(ValueError, match=f"one to three matrices .*, not {count}"):
        _core.PackedMatrix(*[np.ones((2, 3), np.float32)] * count)


@pytest.mark.any_isa
def test_arrays_off_whole_elements_are_refused_by_the_loops_too():
    records = np.zeros((3, 4), [("x", "<f4"), ("y", "<u2")])
    with pytest.raises(ValueError, match="strides that are no multiples"):
        _core.PackedMatrix(records["x"])


# ------------------------------------------------------------------ errors


BAD = {
    "values of floats": ({"values": np.zeros((2, 3))}, TypeError, "values must be int8"),
    "unsigned without minima": (
        {"values": np.zeros((2, 3), np.uint8)},
        TypeError,
        "values must be int8 without minima, not uint8",
    ),
    "one axis": ({"values": np.zeros(3, np.int8)}, ValueError, r"axes \[out, in\].*\(3,\)"),
    "empty": ({"values": np.zeros((0, 3), np.int8)}, ValueError, r"none empty"),
    "bits": ({"bits": 5}, ValueError, "bits must be 8 or 4, not 5"),
    "more than 4 bits": (
        {"values": np.full((2, 3), 8, np.int8), "bits": 4},
        ValueError,
        "values of 4 bits must lie from -8 to 7, not from 8 to 8",
    ),
    "minima": ({"minima": np.zeros((2, 1), np.float32)}, ValueError, "minima go with bits = 4"),
    "group size": ({"group_size": 48}, ValueError, "group_size must be one of 32.*not 48"),
    "shape": (
        {"scales": np.ones((2, 2), np.float32)},
        ValueError,
        r"scales must have the shape .* = \(2, 1\), not \(2, 2\)",
    ),
    "type": ({"scales": np.ones((2, 1))}, TypeError, "scales must be float16 or float32"),
    "nan": ({"scales": np.full((2, 1), np.nan, np.float32)}, ValueError, "scales has NaN"),
    "tiny": ({"scales": np.full((2, 1), 1e-35, np.float32)}, ValueError, "scales must be 0 or"),
    "huge": (
        {"scales": np.full((2, 1), -2e36, np.float32)},
        ValueError,
        r"scales has NaN or infinity, or numbers beyond 1e\+36",
    ),
}


@pytest.mark.any_isa
@pytest.mark.parametrize("given, error, words", BAD.values(), ids=BAD)
def test_errors_name_the_argument(given, error, words):
    fine = {"values": np.zeros((2, 3), np.int8), "scales": np.ones((2, 1), np.float32)}
    QuantizedMatrix(**fine)
    with pytest.raises(error, match=words):
        QuantizedMatrix(**fine | given)


@pytest.mark.any_isa
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_integers_hold_no_nan_and_no_infinity(bad):
    for i, name in enumerate(("w_q", "w_k", "w_v", "w_o")):
        weights = Sizes().weights()
        weights[i][-1, -1, -1] = bad
        for weight_dtype in ("int8", "int4"):
            with pytest.raises(ValueError, match=f"{name} has NaN or infinity"):
                AttentionBlock(*weights, weight_dtype=weight_dtype)
        AttentionBlock(*weights, weight_dtype="bfloat16")
    with pytest.raises(ValueError, match="weights has NaN or infinity"):
        QuantizedMatrix.from_float(np.array([[bad]]))


@pytest.mark.parametrize("bits", [8, 4])
def test_weights_up_to_the_greatest_are_rounded_and_no_others(bits):
    limit = 2.0**120
    w = np.array([[limit, -limit, 0.3 * limit]])
    matrix = QuantizedMatrix.from_float(w, bits=bits)
    half_step = limit / (254 if bits == 8 else 15)
    # A scale of 4 bits is a float16.
    assert (np.abs(matrix.dequantize() - w) <= half_step * (1 + 2.0**-10)).all()
    x = np.eye(3, dtype=np.float32)
    got = product(x, _core.PackedMatrix(matrix))
    assert same_bits(np.ascontiguousarray(got.T), matrix.dequantize())
    for beyond in (w * 1.001, np.array([[3e38, -3e38]], np.float32), np.array([[1e300]])):
        with pytest.raises(ValueError, match=r"weights has .* or weights beyond 1e\+36, which"):
            QuantizedMatrix.from_float(beyond, bits=bits)


@pytest.mark.any_isa
def test_from_float_takes_the_bits_that_the_constructor_takes():
    for bits, error, words in (
        (5, ValueError, "bits must be 8 or 4, not 5"),
        (8.0, TypeError, "bits must be an int, not 8.0"),
    ):
        with pytest.raises(error, match=words):
            QuantizedMatrix.from_float(np.ones((1, 3)), bits=bits)


def test_nan_and_infinity_of_bfloat16_weights_and_of_rows_come_through():
    w, x = random(1, 60, 40), random(2, 5, 40)
    w[3, 7] = np.nan
    got = product(x, packed(w, "bfloat16"))
    assert np.isnan(got[:, 3]).all()
    assert np.isfinite(np.delete(got, 3, axis=1)).all()
    for weight_dtype in WEIGHT_DTYPES:
        for rows in (1, 5):
            y = x.copy()
            y[0, 3] = np.nan
            got = product(y[:rows], packed(random(1, 60, 40), weight_dtype))
            assert np.isnan(got[0]).all()
            assert np.isfinite(got[1:]).all()


@pytest.mark.any_isa
def test_weight_dtypes_that_are_none():
    weights = Sizes().weights()
    for make in (AttentionBlock, reference.attention_block):
        first = () if make is AttentionBlock else (random(1, 1, 2, 24),)
        with pytest.raises(ValueError, match=r"weight_dtype must be .* not 'int5'"):
            make(*first, *weights, weight_dtype="int5")
        with pytest.raises(TypeError, match="weight_dtype must be"):
            make(*first, *weights, weight_dtype=np.int8)
    with pytest.raises(TypeError, match=r"weight_dtype = 'int8' takes float32 weights.*float64"):
        AttentionBlock(*Sizes().weights(np.float64), weight_dtype="int8")


@pytest.mark.any_isa
def test_quantised_matrices_in_places_that_do_not_fit():
    weights = Sizes().weights()
    w_q, w_k, w_v, w_o = linear(weights)
    small = QuantizedMatrix.from_float(w_q)
    with pytest.raises(TypeError, match=r"w_q is a QuantizedMatrix.*from_linear"):
        AttentionBlock(small, *weights[1:])
    with pytest.raises(ValueError, match=r"w_q must have the shape \[N \* H, D\]"):
        AttentionBlock.from_linear(small, w_k, w_v, w_o, num_heads=5)
    with pytest.raises(TypeError, match="w_k is quantised, for arithmetic in float32"):
        AttentionBlock.from_linear(
            w_q.astype(np.float64), small, small, w_o.astype(np.float64), num_heads=4
        )


@pytest.mark.any_isa
def test_a_quantised_matrix_keeps_its_shape():
    values, scales = np.ones((4, 6), np.int8), np.ones((4, 1), np.float32)
    matrix = QuantizedMatrix(values, scales)
    values.resize(24, refcheck=False)
    scales.resize((1, 4), refcheck=False)
    assert (values.shape, scales.shape) == ((24,), (1, 4))
    assert matrix.dequantize().shape == matrix.shape == (4, 6)


@pytest.mark.any_isa
@pytest.mark.parametrize("bits", [8, 4])
def test_scales_are_copies(bits):
    values, scales = np.ones((4, 6), np.int8), np.ones((4, 1), np.float32)
    matrix = QuantizedMatrix(values, scales, bits=bits)
    scales[:] = np.nan
    assert (matrix.dequantize() == 1).all()


@pytest.mark.any_isa
def test_a_quantised_matrix_shows_itself_and_does_not_change():
    matrix = QuantizedMatrix.from_float(random(1, 3, 70), bits=4)
    assert repr(matrix) == "QuantizedMatrix([3, 70], bits=4, group_size=32)"
    with pytest.raises(AttributeError, match="bits does not change"):
        matrix.bits = 8
