"""Attention and blocks in bfloat16 dot products, where the CPU has them."""

import itertools
import sys

import numpy as np
import pytest

import tileattn
from tests.oracle import check_attention, random, same_bits
from tests.process import run_python
from tests.test_block import Sizes, norm_of
from tests.test_quantized import BLOCKS
from tileattn import (
    AttentionBlock,
    KVCache,
    QuantizedMatrix,
    _core,
    dot_product_attention,
    reference,
)

bfloat16 = pytest.importorskip("ml_dtypes").bfloat16

WEIGHTS = 2.0**-8  # what a weight's rounding to bfloat16 may change of it
FEW = 8  # query rows of a K/V head up to which float32 is faster


def inputs(B, T, S, N, K, H, Hv=None, seed=1):
    sizes = (B, T, N, H), (B, S, K, H), (B, S, K, Hv or H)
    return [random(seed + i, *size).astype(bfloat16) for i, size in enumerate(sizes)]


def exact(x):
    return x.astype(np.float64)


def attend(q, k, v, **options):
    """out in float32, and the LSE."""
    out = np.full((*q.shape[:3], v.shape[3]), np.nan, np.float32)
    return dot_product_attention(q, k, v, out=out, return_lse=True, **options)


SHAPES = [
    (1, 9, 1, 1, 1, 1, 1),
    (1, 17, 31, 2, 1, 31, 15),
    (2, 16, 32, 2, 2, 32, 16),
    (1, 33, 33, 3, 1, 33, 17),
    (1, 31, 255, 2, 2, 64, 64),
    (2, 32, 256, 4, 2, 63, 100),
    (1, 65, 257, 6, 3, 80, 48),
    (1, 64, 300, 1, 1, 128, 128),
    (1, 20, 70, 1, 1, 256, 272),
    (3, 5, 40, 8, 2, 24, 40),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention(shape):
    B, T, S, N, _, _, _ = shape
    q, k, v = inputs(*shape)
    rng = np.random.default_rng(5)
    lengths = rng.integers(0, S + 1, B)
    for options in (
        {},
        {"is_causal": True, "query_offset": S - T},
        {"local_window_size": (20, 3), "query_offset": S - T},
        {"is_causal": True, "local_window_size": (7, None), "query_offset": 0},
        {"key_value_seq_lengths": lengths, "query_seq_lengths": rng.integers(0, T + 1, B)},
        {"mask": rng.random((B, N, T, S)) < 0.7},
        {"mask": rng.random((B, 1, 1, S)) < 0.5},
        {"bias": random(6, B, N, T, S)},
        {"bias": random(6, 1, 1, 1, S), "softcap": 3.0},
        {"bias": np.where(rng.random((B, N, T, S)) < 0.2, -np.inf, random(7, B, N, T, S))},
        {"alibi_slopes": random(8, N), "query_offset": S - T},
        {"sinks": random(9, N), "softcap": 20.0, "is_causal": True, "query_offset": S - T},
        {"scale": 2.5},
    ):
        got = attend(q, k, v, **options)
        check_attention(got, q, k, v, **options, is_dots=True)
        for threads in (1, 2, 3, 7):
            again = attend(q, k, v, num_threads=threads, **options)
            assert same_bits(again[0], got[0])
            assert same_bits(again[1], got[1])


def test_any_strides():
    q, k, v = inputs(2, 20, 45, 4, 2, 34, 22)
    expected = attend(q, k, v)
    for strided in (
        lambda x: np.asfortranarray(x),
        lambda x: np.repeat(x, 2, axis=3)[..., ::2],
        lambda x: np.flip(np.flip(x, (1, 3)).copy(), (1, 3)),
        lambda x: np.concatenate([x, x[..., :1]], axis=3)[..., :-1],
    ):
        got = attend(*map(strided, (q, k, v)))
        assert same_bits(got[0], expected[0])
        assert same_bits(got[1], expected[1])


def test_equal_values_are_their_own_mean_within_the_rounding_of_weights():
    q, k, v = inputs(1, 20, 100, 2, 1, 16)
    v[:] = 3
    out, _ = attend(q, k, v)
    assert (np.abs(out - 3) <= 3 * (WEIGHTS + 1e-5)).all()


def test_one_visible_key_gives_its_value_exactly():
    q, k, v = inputs(1, 20, 100, 2, 1, 16)
    out, _ = attend(q, k, v, local_window_size=(0, 0), query_offset=30)
    assert same_bits(out, np.repeat(v[:, 30:50], 2, axis=2).astype(np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "options, hidden",
    [
        ({"key_value_seq_lengths": [37]}, slice(37, None)),
        ({"mask": np.arange(300) % 7 != 3}, slice(3, None, 7)),
        ({"bias": np.where(np.arange(300) % 7 == 3, -np.inf, 0)}, slice(3, None, 7)),
        ({"local_window_size": (40, 0), "query_offset": 200}, slice(0, 160)),
    ],
)
def test_hidden_keys_may_hold_anything(bad, options, hidden):
    q, k, v = inputs(1, 40, 300, 4, 2, 64)
    expected = attend(q, k, v, **options)
    k[:, hidden], v[:, hidden] = bad, bad
    got = attend(q, k, v, **options)
    assert same_bits(got[0], expected[0])
    assert same_bits(got[1], expected[1])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_seen_and_not_finite_comes_through_and_no_further(bad):
    q, k, v = inputs(1, 70, 70, 2, 1, 32)
    clean, _ = attend(q, k, v, is_causal=True)
    v[0, 40, 0, 5] = bad
    got, _ = attend(q, k, v, is_causal=True)
    assert not np.isfinite(got[0, 40:, :, 5]).any()
    got[0, 40:, :, 5] = clean[0, 40:, :, 5]
    assert same_bits(got, clean)
    k[0, 50, 0, 3] = np.nan
    got, lse = attend(q, k, v, is_causal=True)
    assert np.isnan(got[0, 50:]).all()
    assert np.isnan(lse[0, 50:]).all()
    assert same_bits(got[0, :40], clean[0, :40])


def test_rows_that_see_nothing_are_zero():
    q, k, v = inputs(2, 20, 40, 2, 2, 16)
    out, lse = attend(q, k, v, key_value_seq_lengths=[0, 40])
    assert not out[0].any()
    assert (lse[0] == -np.inf).all()
    assert np.isfinite(lse[1]).all()


def test_scores_that_rise_along_the_keys():
    q, k, v = inputs(1, 40, 600, 1, 1, 32)
    q[:], k[..., 1:] = 1, 0
    k[0, :, 0, 0] = (np.arange(600) * 8).astype(bfloat16)
    check_attention(attend(q, k, v, scale=1.0), q, k, v, scale=1.0, is_dots=True)
    check_attention(attend(q, k[:, ::-1], v, scale=1.0), q, k[:, ::-1], v, scale=1.0, is_dots=True)


def test_an_output_in_bfloat16_is_that_in_float32_rounded():
    q, k, v = inputs(1, 40, 100, 4, 2, 32)
    assert same_bits(
        dot_product_attention(q, k, v).view(np.uint16),
        attend(q, k, v)[0].astype(bfloat16).view(np.uint16),
    )


def test_packed_sequences_have_the_bits_of_each_alone():
    q, k, v = (x[0] for x in inputs(1, 90, 90, 4, 2, 64))
    starts = [0, 20, 20, 75, 90]
    out = tileattn.varlen_attention(q, k, v, starts, starts, is_causal=True)
    for begin, end in itertools.pairwise(starts):
        if begin < end:
            one = dot_product_attention(*(x[begin:end] for x in (q, k, v)), is_causal=True)
            assert same_bits(out[begin:end].view(np.uint16), one.view(np.uint16))


def test_a_cache_of_bfloat16_attends_in_dot_products():
    q, k, v = inputs(1, 30, 30, 4, 2, 64)
    cache = KVCache(1, 64, num_kv_heads=2, head_dim=64, dtype="bfloat16")
    cache.append(k, v)
    expected = dot_product_attention(q, k, v, is_causal=True)
    assert same_bits(cache.attend(q).view(np.uint16), expected.view(np.uint16))
    in_float = dot_product_attention(q, k, v, is_causal=True, arithmetic="float32")
    got = cache.attend(q, arithmetic="float32")
    assert same_bits(got.view(np.uint16), in_float.view(np.uint16))


# ------------------------------------------------------------------ which arithmetic


def test_explain_says_which_arithmetic_runs():
    q, k, v = inputs(1, 40, 100, 4, 2, 32)
    floats = [x.astype(np.float32) for x in (q, k, v)]
    assert tileattn.explain(q, k, v).arithmetic == "bfloat16"
    assert tileattn.explain(q, k, v, arithmetic="float32").arithmetic == "float32"
    assert tileattn.explain(*floats).arithmetic == "float32"
    step = tileattn.explain(q[:, : FEW // 2], k, v)
    assert (step.path, step.arithmetic) == ("streaming", "float32")
    more = tileattn.explain(q[:, : FEW // 2 + 1], k, v)
    assert (more.path, more.arithmetic) == ("tiled", "bfloat16")


def test_arithmetic_in_float32_has_the_bits_of_the_instruction_set_without_dot_products():
    q, k, v = inputs(1, 40, 100, 4, 2, 32)

    def block_of(**options):
        return AttentionBlock(*Sizes(D=96, N=6, K=2, H=16).weights(), **options)

    x = random(20, 2, 30, 96)
    got = attend(q, k, v, arithmetic="float32")
    y = block_of(weight_dtype="bfloat16", arithmetic="float32")(x)
    before = _core.active_isa()
    _core.select_isa("avx512")
    expected, y_expected = attend(q, k, v), block_of(weight_dtype="bfloat16")(x)
    _core.select_isa(before)
    assert same_bits(got[0], expected[0])
    assert same_bits(got[1], expected[1])
    assert same_bits(y, y_expected)


# Linux grants tiles to no process that has a signal stack too small to save them.
REFUSED = """
import ctypes
import numpy as np
from ml_dtypes import bfloat16

class Stack(ctypes.Structure):
    _fields_ = ("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)

memory = ctypes.create_string_buffer(4096)
stack = Stack(ctypes.addressof(memory), 0, len(memory))
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0
import tileattn

q = np.random.default_rng(1).standard_normal((1, 20, 2, 8)).astype(bfloat16)
w = [np.ones(shape, np.float32) for shape in ((8, 1, 4), (8, 1, 4), (8, 1, 4), (1, 4, 8))]
got = tileattn.dot_product_attention(q, q, q)
in_float = tileattn.dot_product_attention(q, q, q, arithmetic="float32")
assert np.array_equal(got.view(np.uint16), in_float.view(np.uint16))
block = tileattn.AttentionBlock(*w, weight_dtype="bfloat16")
block(np.ones((1, 20, 8), np.float32))
print(tileattn.explain(q, q, q).arithmetic, block.arithmetic)
"""


def test_where_the_system_refuses_tiles_float32_does_the_work(isa):
    if isa != "amx" or sys.platform != "linux":
        pytest.skip("there is nothing that the system may refuse")
    assert run_python(REFUSED, TILEATTN_ISA=isa) == "float32 float32\n"


@pytest.mark.parametrize(
    "wrong, error", [("float64", ValueError), ("bfloat16", ValueError), (32, TypeError)]
)
def test_a_wrong_arithmetic_is_refused_before_any_work(wrong, error):
    q, k, v = inputs(1, 4, 6, 2, 1, 8)
    cache = KVCache(1, 8, num_kv_heads=1, head_dim=8, dtype="bfloat16")
    cache.append(k, v)
    rows = [x[0] for x in (q, k, v)]
    weights = Sizes(D=8, N=2, K=1, H=4).weights()
    for call in (
        lambda: dot_product_attention(q, k, v, arithmetic=wrong),
        lambda: tileattn.explain(q, k, v, arithmetic=wrong),
        lambda: tileattn.varlen_attention(*rows, [0, 4], [0, 6], arithmetic=wrong),
        lambda: cache.attend(q, arithmetic=wrong),
        lambda: reference.dot_product_attention(q, k, v, arithmetic=wrong),
    ):
        with pytest.raises(error, match=r"arithmetic must be 'float32' or None, not"):
            call()
    with pytest.raises(error, match=r"arithmetic must be 'float32', 'int8' or None, not"):
        AttentionBlock(*weights, arithmetic=wrong)


# ------------------------------------------------------------------ blocks


def product(x, w, columns, threads=1):
    out = np.full((len(x), columns), np.nan, np.float32)
    _core.project(x[None], w, (out,), (None,), threads)
    return out


@pytest.mark.parametrize("columns, depth", [(1, 1), (47, 31), (48, 32), (49, 33), (97, 1031)])
def test_products_are_those_of_the_rounded_rows_and_weights(columns, depth):
    x, w = random(1, 300, depth), random(2, depth, columns)
    packed = _core.PackedMatrix(w, bfloat16=True)
    whole = product(x, packed, columns)
    rounded_x, rounded_w = exact(x.astype(bfloat16)), exact(w.astype(bfloat16))
    sizes = np.abs(rounded_x) @ np.abs(rounded_w)
    assert (np.abs(whole - rounded_x @ rounded_w) <= (depth + 1) * 2.0**-24 * sizes).all()
    for rows in (1, 2, 15, 16, 17, 31, 32, 33, 100, 256, 257):
        for threads in (1, 2, 3):
            assert same_bits(product(x[:rows], packed, columns, threads), whole[:rows])


@pytest.mark.parametrize("sizes", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_blocks(sizes, norm_position):
    weights, biases = sizes.weights(), sizes.biases()
    options = dict(biases, norm=norm_of(sizes["D"])[0], norm_position=norm_position)
    block = AttentionBlock(*weights, **options, weight_dtype="bfloat16")
    assert block.arithmetic == "bfloat16"
    is_cross = sizes["D"] != sizes["Dc"]
    x = random(30, 2, 120, sizes["D"])
    context = random(31, 2, 9, sizes["Dc"]) if is_cross else None
    expected = reference.attention_block(
        x, *weights, context=context, weight_dtype="bfloat16", **options
    )
    whole = block(x, context=context)
    error = np.linalg.norm(whole - expected) / np.linalg.norm(expected)
    # Rows are rounded before each of the two products: by 2^-8 at most, each time.
    assert error <= 2 * 2.0**-8
    for threads in (1, 2, 3):
        assert same_bits(block(x, context=context, num_threads=threads), whole)
    if is_cross:  # rows of tiles that share a context do not depend on their number
        assert same_bits(block(x[:, :41], context=context), whole[:, :41])


@pytest.mark.parametrize(
    "options",
    [{"weight_dtype": "bfloat16"}, {"weight_dtype": "int8", "arithmetic": "int8"}],
    ids=["bfloat16", "int8"],
)
def test_a_step_has_the_bits_of_the_prompt_s_projections(options):
    sizes = BLOCKS["whole vectors"]
    block = AttentionBlock(*sizes.weights(), **options, norm=None)
    x = random(30, 1, 9, 96)
    caches = [KVCache(1, 16, num_kv_heads=2, head_dim=16) for _ in range(2)]
    block(x, cache=caches[0])
    for t in range(9):
        block(x[:, t : t + 1], cache=caches[1])
    for i in ("keys", "values"):
        assert same_bits(*(getattr(cache, i)[:, :9] for cache in caches))


def test_a_block_says_what_it_computes_in():
    weights = Sizes(D=96, N=6, K=2, H=16).weights()
    block = AttentionBlock(*weights, weight_dtype="bfloat16")
    assert block.arithmetic == "bfloat16"
    assert "arithmetic='bfloat16'" in repr(block)
    for options in (
        {},
        {"weight_dtype": "int8"},
        {"weight_dtype": "bfloat16", "arithmetic": "float32"},
    ):
        block = AttentionBlock(*weights, **options)
        assert block.arithmetic == "float32"
        assert "arithmetic" not in repr(block)
    assert AttentionBlock(*(w.astype(np.float64) for w in weights)).arithmetic == "float64"


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_that_are_not_finite_stay_so_and_alone(bad):
    x, w = random(1, 40, 64), random(2, 64, 48)
    packed = _core.PackedMatrix(w, bfloat16=True)
    clean = product(x, packed, 48)
    x[5, 7] = bad
    got = product(x, packed, 48)
    assert not np.isfinite(got[5]).any()
    assert same_bits(np.delete(got, 5, axis=0), np.delete(clean, 5, axis=0))


# ------------------------------------------------------------------ int8 times int8


def rounded_rows(x):
    """Rows as int8, and their scales, as float64."""
    scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    return exact(np.rint(x / np.where(scale == 0, 1, scale))), exact(scale)


@pytest.mark.parametrize("columns, depth", [(1, 1), (47, 63), (48, 64), (49, 65), (97, 1031)])
def test_products_of_bytes_are_exact_sums(columns, depth):
    x, w = random(1, 300, depth), random(2, columns, depth)
    x[7] = 0
    quantized = QuantizedMatrix.from_float(w)
    packed = _core.PackedMatrix(quantized, int8=True)
    whole = product(x, packed, columns)
    rows, row_scales = rounded_rows(x)
    sums = rows @ exact(quantized._values.T)
    expected = sums * row_scales * exact(quantized._scales.T)
    # The sum becomes a float, and is multiplied twice.
    assert (np.abs(whole - expected) <= 3 * 2.0**-24 * np.abs(expected)).all()
    for count in (1, 2, 15, 16, 17, 31, 32, 33, 100, 128, 129):
        for threads in (1, 2, 3):
            assert same_bits(product(x[:count], packed, columns, threads), whole[:count])
    # Half a scale of each row and of each column, times what meets it.
    exact_x, exact_w = exact(x), exact(w.T)
    column_scales = exact(quantized._scales.T)
    bound = (
        row_scales / 2 * np.abs(exact_w).sum(axis=0)
        + column_scales / 2 * np.abs(exact_x).sum(axis=1, keepdims=True)
        + depth / 4 * row_scales * column_scales
    )
    assert (np.abs(whole - exact_x @ exact_w) <= 1.001 * bound).all()


def test_extremes_of_bytes_do_not_overflow():
    depth = 1 << 17
    x, values = np.ones((3, depth), np.float32), np.full((2, depth), -128, np.int8)
    packed = _core.PackedMatrix(QuantizedMatrix(values, np.ones((2, 1), np.float32)), int8=True)
    x[1] = -1
    got = product(x, packed, 2)
    assert np.allclose(got[0], -128 * depth, rtol=1e-6)
    assert np.allclose(got[1], 128 * depth, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_of_bytes_that_are_not_finite_are_nan_and_alone(bad):
    x, w = random(1, 40, 64), random(2, 48, 64)
    packed = _core.PackedMatrix(QuantizedMatrix.from_float(w), int8=True)
    clean = product(x, packed, 48)
    x[5, 7] = bad
    got = product(x, packed, 48)
    assert np.isnan(got[5]).all()
    assert same_bits(np.delete(got, 5, axis=0), np.delete(clean, 5, axis=0))


@pytest.mark.parametrize("sizes", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_blocks_of_bytes(sizes, norm_position):
    weights, biases = sizes.weights(), sizes.biases()
    options = dict(biases, norm=norm_of(sizes["D"])[0], norm_position=norm_position)
    block = AttentionBlock(*weights, **options, weight_dtype="int8", arithmetic="int8")
    assert block.arithmetic == "int8"
    assert "arithmetic='int8'" in repr(block)
    is_cross = sizes["D"] != sizes["Dc"]
    x = random(30, 2, 150, sizes["D"])
    context = random(31, 2, 9, sizes["Dc"]) if is_cross else None
    expected = reference.attention_block(
        x, *weights, context=context, weight_dtype="int8", **options
    )
    whole = block(x, context=context)
    # Twice what rounding rows to int8 may do to a product: a largest element of up to 4 times the
    # root mean square gives 4 / 127 / sqrt(12) = 0.9%, in each of two products.
    assert np.linalg.norm(whole - expected) <= 4 * 0.009 * np.linalg.norm(expected)
    for threads in (1, 2, 3):
        assert same_bits(block(x, context=context, num_threads=threads), whole)


def test_strided_rows_of_bytes_have_the_bits_of_whole_ones():
    x, w = random(1, 40, 70), random(2, 48, 70)
    packed = _core.PackedMatrix(QuantizedMatrix.from_float(w), int8=True)
    out = np.empty((40, 48), np.float32)
    _core.project(np.repeat(x, 2, axis=1)[None, :, ::2], packed, (out,), (None,), 1)
    assert same_bits(out, product(x, packed, 48))


def test_bytes_are_for_weights_of_bytes():
    sizes = Sizes(D=64, N=2, K=1, H=32)
    weights = sizes.weights()
    with pytest.raises(
        ValueError, match=r"arithmetic = 'int8' takes weight_dtype = 'int8' for w_q"
    ):
        AttentionBlock(*weights, arithmetic="int8")
    rows = [np.ascontiguousarray(w.reshape(64, -1).T) for w in weights]
    grouped = [QuantizedMatrix.from_float(w, group_size=32) for w in rows]
    whole = [QuantizedMatrix.from_float(w) for w in rows]
    heads = {"num_heads": 2, "num_kv_heads": 1, "arithmetic": "int8"}
    with pytest.raises(
        ValueError, match=r"a scale for each row of w_q, which has 8 bits and group_size"
    ):
        AttentionBlock.from_linear(*grouped, **heads)
    x = random(5, 1, 20, 64)
    got = AttentionBlock.from_linear(*whole, **heads)(x)
    assert same_bits(got, AttentionBlock(*weights, weight_dtype="int8", arithmetic="int8")(x))


def test_measured_peak_is_positive():
    assert _core.measure_dot_peak(1) > 0
