"""AttentionBlock, attention_block and the norms: every promise of their documentation."""

import copy
import inspect
import itertools
import pickle
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tileattn
from tests.oracle import (
    LAYOUTS,
    WRITABLE,
    check_block,
    check_norm,
    layer_norm,
    random,
    same_bits,
)
from tileattn import (
    AttentionBlock,
    LayerNorm,
    RMSNorm,
    Rope,
    RopeScaling,
    _core,
    attention_block,
    reference,
)

DTYPES = [np.float32, np.float64]


class Sizes(dict):
    """D, Dc, N, K, H, Hv of a block."""

    def __init__(self, D=24, N=4, K=2, H=8, Hv=None, Dc=None):
        super().__init__(D=D, N=N, K=K, H=H, Hv=Hv or H, Dc=Dc or D)

    def weights(self, dtype=np.float32, seed=0):
        D, N, K, H, Hv, Dc = (self[letter] for letter in ("D", "N", "K", "H", "Hv", "Dc"))
        shapes = (D, N, H), (Dc, K, H), (Dc, K, Hv), (N, Hv, D)
        depths = D, Dc, Dc, N * Hv
        return [
            (random(seed + i, *shape) / np.sqrt(depth)).astype(dtype)
            for i, (shape, depth) in enumerate(zip(shapes, depths, strict=True))
        ]

    def biases(self, dtype=np.float32, seed=10):
        D, N, K, H, Hv = (self[letter] for letter in ("D", "N", "K", "H", "Hv"))
        shapes = {"b_q": (N, H), "b_k": (K, H), "b_v": (K, Hv), "b_o": (D,)}
        return {
            name: random(seed + i, *shape, dtype=dtype)
            for i, (name, shape) in enumerate(shapes.items())
        }


def norm_of(D, dtype=np.float32, eps=1e-5):
    """A LayerNorm, and what the oracle takes for it."""
    parts = (1 + random(20, D, dtype=dtype) / 4, random(21, D, dtype=dtype), eps)
    return LayerNorm(*parts), parts


def rms_norm_of(D, dtype=np.float32, eps=1e-6):
    """An RMSNorm, and what the oracle takes for it."""
    weight = 1 + random(22, D, dtype=dtype) / 4
    return RMSNorm(weight, eps), (weight, None, eps, False)


PLAIN = (None, None, 1e-5)
PLAIN_RMS = (None, None, 1e-6, False)

SIZES = {
    "one of each": Sizes(D=1, N=1, K=1, H=1),
    "small": Sizes(),
    "odd": Sizes(D=33, N=3, K=1, H=11, Hv=5),
    "whole vectors": Sizes(D=64, N=4, K=4, H=16),
    "two slices of depth": Sizes(D=520, N=9, K=3, H=60),
}


# ------------------------------------------------------------------ against the oracle


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_block(sizes, dtype):
    weights, (norm, parts) = sizes.weights(dtype), norm_of(sizes["D"], dtype)
    x = random(30, 2, 19, sizes["D"], dtype=dtype)
    for is_causal in (False, True):
        block = AttentionBlock(*weights, is_causal=is_causal)
        check_block(block(x), x, *weights, norm=PLAIN, is_causal=is_causal)
    everything = sizes.biases(dtype)
    block = AttentionBlock(*weights, **everything, norm=norm, is_causal=True)
    check_block(block(x), x, *weights, **everything, norm=parts, is_causal=True)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 13, 14, 15, 27, 29, 55, 57, 111, 113, 225])
def test_every_number_of_rows_around_the_tiles(rows):
    sizes = Sizes(D=40, N=2, K=1, H=12)
    weights, x = sizes.weights(), random(30, 1, rows, 40)
    check_block(attention_block(x, *weights), x, *weights, norm=PLAIN)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("residual", [True, False])
def test_biases_norm_and_residual_alone_and_together(norm, residual):
    sizes = Sizes(D=20, N=4, K=2, H=5, Hv=3)
    weights, biases, x = sizes.weights(), sizes.biases(), random(30, 2, 9, 20)
    norm, parts = norm_of(20) if norm else (None, None)
    for count in range(5):
        for names in itertools.combinations(biases, count):
            some = {name: biases[name] for name in names}
            got = attention_block(x, *weights, **some, norm=norm, residual=residual)
            check_block(got, x, *weights, **some, norm=parts, residual=residual)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_takes_an_rms_norm(dtype):
    for sizes in (Sizes(), SIZES["two slices of depth"]):
        weights, x = sizes.weights(dtype), random(30, 2, 9, sizes["D"], dtype=dtype)
        for norm, parts in (rms_norm_of(sizes["D"], dtype), (RMSNorm(), PLAIN_RMS)):
            got = attention_block(x, *weights, norm=norm)
            check_block(got, x, *weights, norm=parts)
            # 1 position: columns are split among threads, and the norm comes after them.
            got = attention_block(x[:, :1], *weights, norm=norm, num_threads=2)
            check_block(got, x[:, :1], *weights, norm=parts)


def test_parts_of_a_norm():
    sizes = Sizes()
    weights, x = sizes.weights(), random(30, 2, 9, 24)
    _, (weight, bias, _) = norm_of(24)
    for parts in ((weight, None, 1e-5), (None, bias, 1e-5), (None, None, 0.5), (weight, bias, 0.0)):
        got = attention_block(x, *weights, norm=LayerNorm(*parts))
        check_block(got, x, *weights, norm=parts)


def modern(sizes, dtype, interleaved=False):
    """Options of a pre-norm block with rope and norms of its heads, and the oracle's for norms."""
    D, H = sizes["D"], sizes["H"]
    norms = {
        "norm": rms_norm_of(D, dtype),
        "q_norm": rms_norm_of(H, dtype),
        "k_norm": norm_of(H, dtype),
    }
    made = {
        "norm_position": "pre",
        "rope": Rope(rotary_dim=2 * (H // 2), interleaved=interleaved),
        "is_causal": True,
    }
    options = {name: norm for name, (norm, _) in norms.items()}
    return {**made, **options}, {**made, **{name: parts for name, (_, parts) in norms.items()}}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["small", "odd", "whole vectors", "two slices of depth"])
def test_pre_norm_head_norms_and_rope(name, dtype):
    sizes = SIZES[name]
    weights, biases = sizes.weights(dtype), sizes.biases(dtype)
    options, oracle_options = modern(sizes, dtype, interleaved=name == "odd")
    block = AttentionBlock(*weights, **biases, **options)
    # Few rows are split by columns, from one register tile on normalised in advance, many by rows.
    for T in (1, 3, 40, 240):
        x = random(30, 1, T, sizes["D"], dtype=dtype)
        got = block(x, num_threads=1)
        check_block(got, x, *weights, **biases, **oracle_options)
        for threads in (2, 3):
            assert same_bits(block(x, num_threads=threads), got), (T, threads)


def test_a_large_block_of_rows_is_normalised_in_slices_of_the_depth():
    """Rows that are too deep to be packed at once."""
    sizes = Sizes(D=1400, N=2, K=1, H=16)
    weights, (options, oracle_options) = sizes.weights(), modern(sizes, np.float32)
    x = 3 + random(30, 1, 230, 1400)
    for threads in (1, 2):
        got = attention_block(x, *weights, **options, num_threads=threads)
        check_block(got, x, *weights, **oracle_options)


@pytest.mark.parametrize("norm_position", ["pre", "post", None])
def test_norm_position(norm_position):
    sizes = Sizes()
    weights, x, (norm, parts) = sizes.weights(), random(30, 2, 9, 24), norm_of(24)
    for residual in (True, False):
        options = {"norm_position": norm_position, "residual": residual}
        got = attention_block(x, *weights, norm=norm, **options)
        check_block(got, x, *weights, norm=parts, **options)
        names = [name for name, _ in AttentionBlock(*weights, norm=norm, **options).profile(x)[1]]
        assert ["LayerNorm" in name for name in names] == [
            norm_position == "pre",
            False,
            norm_position == "post",
        ]


def test_pre_norm_leaves_a_context_as_it_is():
    weights, x, context = Sizes().weights(), random(30, 2, 9, 24), random(31, 2, 5, 24)
    norm, parts = norm_of(24)
    options = {"norm_position": "pre", "context": context}
    got = attention_block(x, *weights, norm=norm, **options)
    check_block(got, x, *weights, norm=parts, **options)


@pytest.mark.parametrize("Dc", [24, 600])
def test_positions_of_a_rope(Dc):
    """Queries and keys share a table, or not; each sequence has an offset of its own, or not."""
    sizes = Sizes(D=24, N=4, K=2, H=8, Dc=Dc)
    weights, rope = sizes.weights(), Rope()
    block = AttentionBlock(*weights, rope=rope)
    for T, S, offset in (
        (5, 40, 0),
        (5, 40, 35),
        (5, 40, 36),
        (1, 300, np.array([299, 7, 0])),
        (40, 5, np.array([0, 3, 10_000])),
        (7, 7, 2),
        (200, 200, np.array([0, 1, 2])),
        (3, 0, 1),
    ):
        x, context = random(30, 3, T, 24), random(31, 3, S, Dc)
        options = {"context": context, "query_offset": offset}
        check_block(block(x, **options), x, *weights, norm=PLAIN, rope=rope, **options)
    if Dc == 24:
        check_block(block(x), x, *weights, norm=PLAIN, rope=rope)
        with pytest.raises(ValueError, match=r"rope with T = 3 .* needs query_offset"):
            block(x, context=random(31, 3, 9, 24))


def test_blocks_share_a_rope():
    """Whatever other blocks have made of its tables."""
    rope, x = Rope(), random(30, 1, 40, 24)
    blocks = [
        AttentionBlock(*Sizes(H=H).weights(dtype), rope=rope) for H in (8, 6) for dtype in DTYPES
    ]
    alone = [
        AttentionBlock(*Sizes(H=H).weights(dtype), rope=Rope()) for H in (8, 6) for dtype in DTYPES
    ]
    for T in (9, 10, 40, 3):
        for block, other in zip(blocks, alone, strict=True):
            part = x[:, :T].astype(block.dtype)
            assert same_bits(block(part), other(part))


@pytest.mark.parametrize("Dc", [24, 17, 64])
def test_cross_attention(Dc):
    sizes = Sizes(D=24, Dc=Dc)
    weights, biases = sizes.weights(), sizes.biases()
    block = AttentionBlock(*weights, **biases)
    assert block.context_dim == Dc
    for T, S in ((5, 40), (40, 5), (1, 1), (3, 300)):
        x, context = random(30, 2, T, 24), random(31, 2, S, Dc)
        got = block(x, context=context)
        check_block(got, x, *weights, **biases, norm=PLAIN, context=context)
        assert same_bits(block(x[0], context=context[0]), got[0])
        options = {"key_value_seq_lengths": np.array([S, S // 2])}
        got = block(x, context=context, **options)
        check_block(got, x, *weights, **biases, norm=PLAIN, context=context, **options)
    if Dc == 24:
        assert same_bits(block(x, context=x), block(x))


def test_causal_cross_attention_needs_an_offset():
    weights = Sizes().weights()
    x, context = random(30, 2, 5, 24), random(31, 2, 9, 24)
    block = AttentionBlock(*weights, is_causal=True)
    with pytest.raises(ValueError, match="query_offset"):
        block(x, context=context)
    for offset in (4, np.array([0, 7])):
        got = block(x, context=context, query_offset=offset)
        check_block(
            got, x, *weights, norm=PLAIN, context=context, is_causal=True, query_offset=offset
        )


def test_lengths():
    sizes = Sizes()
    weights, biases, x = sizes.weights(), sizes.biases(), random(30, 3, 12, 24)
    n = np.array([12, 5, 0])
    options = {"query_seq_lengths": n, "key_value_seq_lengths": n}
    got = attention_block(x, *weights, **biases, **options)
    check_block(got, x, *weights, **biases, norm=PLAIN, **options)
    # Beyond its length a row attends to nothing: norm(x + b_o).
    only = layer_norm(x + biases["b_o"], None, None, 1e-5, np.float64)
    np.testing.assert_allclose(got[1, 5:], only[1, 5:], atol=1e-5)
    garbage = x.copy()
    garbage[1, 5:] = np.nan
    assert same_bits(attention_block(garbage, *weights, **biases, **options)[1, :5], got[1, :5])


def test_scale():
    sizes = Sizes()
    weights, x = sizes.weights(), random(30, 2, 12, 24)
    for scale in (0, -1.5, np.float32(0.3)):
        got = attention_block(x, *weights, scale=scale)
        check_block(got, x, *weights, norm=PLAIN, scale=float(scale))


@pytest.mark.parametrize("dtype", DTYPES)
def test_agrees_with_the_reference(dtype):
    sizes = Sizes(D=31, N=6, K=3, H=7, Hv=9, Dc=12)
    weights, biases = sizes.weights(dtype), sizes.biases(dtype)
    norm, parts = norm_of(31, dtype)
    x, context = random(30, 2, 12, 31, dtype=dtype), random(31, 2, 20, 12, dtype=dtype)
    options = {
        **biases,
        "norm": norm,
        "scale": 0.4,
        "is_causal": True,
        "context": context,
        "query_offset": np.array([2, 9]),
        "query_seq_lengths": np.array([12, 7]),
        "key_value_seq_lengths": np.array([9, 20]),
    }
    for function in (attention_block, reference.attention_block):
        got = function(x, *weights, **options)
        check_block(got, x, *weights, **{**options, "norm": parts})


def test_nan_reaches_the_rows_that_see_it():
    sizes = Sizes()
    x = random(30, 2, 12, 24)
    x[1, 4, 3] = np.nan
    got = attention_block(x, *sizes.weights(), is_causal=True)
    expected = np.zeros(x.shape, bool)
    expected[1, 4:] = True
    np.testing.assert_array_equal(np.isnan(got), expected)


# ------------------------------------------------------------------ bits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_modern", [False, True])
def test_a_rows_bits_do_not_depend_on_how_many_come_with_it(is_modern, dtype):
    sizes = Sizes(D=520, N=4, K=2, H=40, Hv=20)
    weights, biases = sizes.weights(dtype), sizes.biases(dtype)
    options = modern(sizes, dtype)[0] if is_modern else {"norm": norm_of(520, dtype)[0]}
    block = AttentionBlock(*weights, **biases, **{**options, "is_causal": False})
    x, context = random(30, 1, 300, 520, dtype=dtype), random(31, 1, 70, 520, dtype=dtype)
    # Attention reads keys in place for up to 8 rows of this group, and packs them for more.
    one_by_one = np.concatenate(
        [block(x[:, t, None], context=context, query_offset=t) for t in range(300)], axis=1
    )
    at_once = block(x, context=context, query_offset=0, num_threads=1)
    for expected, counts in ((one_by_one, (1, 3, 8)), (at_once, (9, 16, 17, 300))):
        for threads in (1, 2, 3, 7):
            for rows in counts:
                for start in {0, 300 - rows}:
                    part = slice(start, start + rows)
                    got = block(
                        x[:, part], context=context, query_offset=start, num_threads=threads
                    )
                    assert same_bits(got, np.ascontiguousarray(expected[:, part])), (threads, rows)
    # As many sequences of one row: the same products, in another place.
    many = np.broadcast_to(context, (300, 70, 520))[:17]
    got = block(x[0, :17, None], context=many, query_offset=np.arange(17), num_threads=2)
    assert same_bits(got[:, 0], np.ascontiguousarray(one_by_one[0, :17]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_modern", [False, True])
def test_what_follows_a_row_changes_no_bit(is_modern, dtype):
    sizes = Sizes(D=96, N=6, K=3, H=16)
    options = modern(sizes, dtype)[0] if is_modern else {"norm": norm_of(96, dtype)[0]}
    options = {**options, "is_causal": True}
    block = AttentionBlock(*sizes.weights(dtype), **sizes.biases(dtype), **options)
    x = random(30, 9, 60, 96, dtype=dtype)
    whole = block(x)
    for T in (9, 17, 59):  # 8 would be few rows
        assert same_bits(block(x[:, :T].copy()), np.ascontiguousarray(whole[:, :T]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_bits_do_not_depend_on_rows(dtype):
    norm, _ = norm_of(1000, dtype)
    x = random(30, 900, 1000, dtype=dtype)
    whole = norm(x)
    for row in (0, 1, 899):
        assert same_bits(norm(x[row]), whole[row])


def test_packed_weights_stay_with_their_instruction_set(isa):
    """A block works as it was built, whatever is selected later."""
    sizes = Sizes()
    block = AttentionBlock(*sizes.weights(), **sizes.biases())
    x = random(30, 2, 30, 24)
    expected = block(x)
    try:
        for other in tileattn.available_isas():
            _core.select_isa(other)
            assert same_bits(block(x), expected)
    finally:
        _core.select_isa(isa)


# ------------------------------------------------------------------ arrays as they come


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_layout_of_every_array(dtype):
    sizes = Sizes(D=16, N=2, K=1, H=8, Dc=12)
    weights, biases = sizes.weights(dtype), sizes.biases(dtype)
    x, context = random(30, 2, 9, 16, dtype=dtype), random(31, 2, 11, 12, dtype=dtype)
    _, (weight, bias, _) = norm_of(16, dtype)
    norm = LayerNorm(weight, bias)
    expected = [
        attention_block(x, *weights, **biases, norm=norm, context=context, residual=residual)
        for residual in (False, True)
    ]
    for name, change in LAYOUTS.items():
        if name not in ("heads first", "last axis first"):
            weight_view, bias_view = change(weight[None])[0], change(bias[None])[0]
            bias_views = {key: change(b[None])[0] for key, b in biases.items()}
        for residual in (True, False):
            got = attention_block(
                change(x),
                *map(change, weights),
                **bias_views,
                norm=LayerNorm(weight_view, bias_view),
                context=change(context),
                residual=residual,
            )
            assert same_bits(got, expected[residual]), name


def test_weights_are_copied():
    sizes = Sizes()
    weights, biases, (norm, parts) = sizes.weights(), sizes.biases(), norm_of(24)
    block = AttentionBlock(*weights, **biases, norm=norm)
    x = random(30, 2, 9, 24)
    before, before_norm = block(x), norm(x)
    for array in (*weights, *biases.values(), *parts[:2]):
        array[...] = np.nan
    assert same_bits(block(x), before)
    assert same_bits(norm(x), before_norm)


def test_out_may_be_what_the_norm_was_made_of():
    weight, bias, x = random(0, 24), random(1, 24), random(30, 24)
    norm = LayerNorm(weight, bias)
    block = AttentionBlock(*Sizes().weights(), norm=norm)
    for call in (norm, lambda x, out=None: block(x[None], out=None if out is None else out[None])):
        for array in (weight, bias):
            expected = call(x)
            call(x, out=array)
            assert same_bits(array, expected.reshape(24))
    with pytest.raises(ValueError, match="read-only"):
        norm(x, out=norm.weight)


def test_only_a_last_axis_that_is_strided_is_copied():
    """Rows may lie anywhere; a block without a residual takes x as it is."""
    shape = (4, 250, 40)
    wide, columns = np.zeros((4, 500, 60), np.float32), np.zeros((4, 250, 80), np.float32)
    strided, strided_columns = wide[:, ::2, :40], columns[..., ::2]
    rows, rows_out = np.zeros((2, 1000, 50), np.float32)[..., 5:45]
    out = np.empty(shape, np.float32)
    weights, norm = Sizes(D=40).weights(), LayerNorm()
    residual, bare = AttentionBlock(*weights), AttentionBlock(*weights, residual=False)
    for name, call in {
        "norm": lambda: norm(strided, residual=strided[:, ::-1], out=out),
        "norm of rows": lambda: norm(rows, out=rows_out),
        "block": lambda: residual(strided, out=out),
        "block without residual": lambda: bare(strided_columns, out=out),
        "context": lambda: residual(strided, context=strided_columns, out=out),
    }.items():
        tracemalloc.start()
        call()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < out.nbytes / 2, name


def test_input_without_batch_axis():
    sizes = Sizes()
    block = AttentionBlock(*sizes.weights())
    x = random(30, 1, 9, 24)
    assert same_bits(block(x[0]), block(x)[0])


@pytest.mark.parametrize("shape", [(0, 5, 24), (2, 0, 24), (0, 24)])
def test_empty_input(shape):
    got = AttentionBlock(*Sizes().weights())(np.empty(shape, np.float32))
    assert got.shape == shape
    assert got.dtype == np.float32


def test_empty_context_leaves_the_biases():
    sizes = Sizes()
    biases = sizes.biases()
    x = random(30, 2, 5, 24)
    got = attention_block(
        x, *sizes.weights(), **biases, norm=None, context=np.empty((2, 0, 24), np.float32)
    )
    np.testing.assert_array_equal(got, x + biases["b_o"])


def test_out_of_any_strides():
    sizes = Sizes()
    block = AttentionBlock(*sizes.weights())
    x = random(30, 2, 9, 24)
    expected = block(x)
    for name in WRITABLE:
        view = LAYOUTS[name](np.full(x.shape, np.nan, np.float32))
        assert block(x, out=view) is view
        assert same_bits(view.copy(order="C"), expected), name


def test_out_may_not_overlap():
    block = AttentionBlock(*Sizes().weights())
    x, context = random(30, 2, 9, 24), random(31, 2, 9, 24)
    for name, array in (("x", x), ("context", context)):
        before = array.copy()
        with pytest.raises(ValueError, match=f"out overlaps {name}"):
            block(x, context=context, out=array)
        assert same_bits(array, before)


# ------------------------------------------------------------------ the class


def test_attributes():
    block = AttentionBlock(*Sizes(D=24, N=6, K=2, H=8, Hv=5, Dc=12).weights(np.float64))
    got = (
        block.model_dim,
        block.context_dim,
        block.num_heads,
        block.num_kv_heads,
        block.head_dim,
        block.v_head_dim,
    )
    assert got == (24, 12, 6, 2, 8, 5)
    assert block.dtype == np.float64
    # At least the weights themselves; panels are padded to whole vectors.
    weights = 8 * (24 * 6 * 8 + 12 * 2 * (8 + 5) + 6 * 5 * 24)
    assert weights <= block.nbytes < 2 * weights
    assert repr(block) == "AttentionBlock(D=24, Dc=12, N=6, K=2, H=8, Hv=5, float64)"


def test_a_block_shows_what_it_does_differently():
    size = Sizes(D=24, N=6, K=2, H=8)
    every = {
        "norm": RMSNorm(eps=1e-6),
        "norm_position": "pre",
        "residual": False,
        "rope": Rope(theta=500.0),
        "q_norm": RMSNorm(),
        "k_norm": LayerNorm(),
        "scale": 0.5,
        "softcap": 30.0,
        "is_causal": True,
        "local_window_size": (4, None),
        "sinks": np.zeros(6, np.float32),
        "weight_dtype": "bfloat16",
    }
    parameters = inspect.signature(AttentionBlock).parameters
    # The arithmetic is shown where it is not the dtype's: see test_dots.py.
    assert [*every, "arithmetic"] == [name for name in parameters if name[:2] not in ("w_", "b_")]
    shown = "AttentionBlock(D=24, N=6, K=2, H=8, float32"
    for name, value in every.items():
        text = "..." if name == "sinks" else repr(value)
        block = AttentionBlock(*size.weights(), **{name: value})
        assert repr(block) == f"{shown}, {name}={text})"
    options = ", ".join(f"{n}={'...' if n == 'sinks' else repr(v)}" for n, v in every.items())
    assert repr(AttentionBlock(*size.weights(), **every)) == f"{shown}, {options})"
    assert repr(AttentionBlock(*size.weights(), norm=None)) == f"{shown}, norm=None)"
    assert repr(AttentionBlock(*size.weights(), scale=1 / np.sqrt(8))) == f"{shown})"


def test_a_block_and_a_norm_do_not_change():
    norm, _ = norm_of(24)
    block = AttentionBlock(*Sizes().weights(), **Sizes().biases(), norm=norm)
    for name, value in {"num_heads": 2, "model_dim": 1, "norm": None, "is_causal": True}.items():
        with pytest.raises(AttributeError, match=f"^AttentionBlock.{name} does not change"):
            setattr(block, name, value)
    rms_norm, _ = rms_norm_of(24)
    for name in ("weight", "bias", "eps", "subtract_mean"):
        for kind in (norm, rms_norm):
            kind_name = type(kind).__name__
            with pytest.raises(AttributeError, match=f"^{kind_name}.{name} does not change"):
                setattr(kind, name, None)
    sinks = AttentionBlock(*Sizes().weights(), sinks=random(0, 4)).sinks
    for array in (norm.weight, norm.bias, rms_norm.weight, sinks):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_a_block_is_not_copied_but_a_norm_is():
    norm, _ = norm_of(24)
    block = AttentionBlock(*Sizes().weights(), norm=norm)
    for duplicate in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"AttentionBlock.*weights"):
            duplicate(block)
    x = random(30, 9, 24)
    for norm, _ in (norm_of(24), rms_norm_of(24, eps=1e-3)):
        for twin in (pickle.loads(pickle.dumps(norm)), copy.deepcopy(norm)):
            assert type(twin) is type(norm)
            assert same_bits(twin(x), norm(x))
            assert not twin.weight.flags.writeable


def test_self_attention_needs_a_context_of_another_width():
    block = AttentionBlock(*Sizes(Dc=12).weights())
    with pytest.raises(ValueError, match=r"context is missing.*12.*24"):
        block(random(30, 2, 9, 24))


def test_profile_returns_the_result_and_its_parts():
    block = AttentionBlock(*Sizes().weights())
    x = random(30, 2, 9, 24)
    got, parts = block.profile(x, key_value_seq_lengths=np.array([4, 9]), num_threads=1)
    assert same_bits(got, block(x, key_value_seq_lengths=np.array([4, 9])))
    assert len(parts) == 3
    assert all(isinstance(name, str) and seconds >= 0 for name, seconds in parts)
    with pytest.raises(TypeError, match="lengths"):
        block.profile(x, lengths=[1])


def linear(w):
    """[in, heads, width] or [heads, width, out] as torch.nn.Linear holds it: [out, in]."""
    return np.ascontiguousarray(w.reshape(w.shape[0], -1).T)


@pytest.mark.parametrize("dtype", DTYPES)
def test_from_linear_is_the_constructor(dtype):
    sizes = Sizes(D=24, N=4, K=2, H=8, Hv=5, Dc=12)
    weights, biases = sizes.weights(dtype), sizes.biases(dtype)
    norm, _ = norm_of(24, dtype)
    options = {"norm": norm, "residual": False, "scale": 0.3, "is_causal": True}
    x, context = random(30, 2, 9, 24, dtype=dtype), random(31, 2, 9, 12, dtype=dtype)
    expected = AttentionBlock(*weights, **biases, **options)(x, context=context)
    w_q, w_k, w_v, w_o = weights
    block = AttentionBlock.from_linear(
        linear(w_q),
        linear(w_k),
        linear(w_v),
        np.ascontiguousarray(w_o.reshape(-1, 24).T),
        **{name: bias.reshape(-1) for name, bias in biases.items()},
        num_heads=4,
        num_kv_heads=2,
        **options,
    )
    assert same_bits(block(x, context=context), expected)


@pytest.mark.parametrize("K", [4, 2, None])
def test_from_linear_with_a_packed_matrix(K):
    sizes = Sizes(D=24, N=4, K=K or 4, H=8)
    w_q, w_k, w_v, w_o = sizes.weights()
    biases = sizes.biases()
    x = random(30, 2, 9, 24)
    packed = {
        "w_qkv": np.concatenate([linear(w) for w in (w_q, w_k, w_v)]),
        "b_qkv": np.concatenate([biases[name].reshape(-1) for name in ("b_q", "b_k", "b_v")]),
        "w_o": np.ascontiguousarray(w_o.reshape(-1, 24).T),
        "b_o": biases["b_o"],
    }
    block = AttentionBlock.from_linear(**packed, num_heads=4, num_kv_heads=K)
    assert same_bits(block(x), attention_block(x, w_q, w_k, w_v, w_o, **biases))
    del packed["b_qkv"], packed["b_o"]
    block = AttentionBlock.from_linear(**packed, num_heads=4, num_kv_heads=K)
    assert same_bits(block(x), attention_block(x, w_q, w_k, w_v, w_o))


# ------------------------------------------------------------------ LayerNorm and RMSNorm


SHAPES = [(1,), (7,), (3, 1), (5, 37), (2, 3, 64), (2, 1, 3, 5), (300, 384)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "made, plain, function",
    [(norm_of, PLAIN, reference.layer_norm), (rms_norm_of, PLAIN_RMS, reference.rms_norm)],
    ids=["LayerNorm", "RMSNorm"],
)
def test_norms(made, plain, function, shape, dtype):
    norm, parts = made(shape[-1], dtype)
    x, residual = random(30, *shape, dtype=dtype), random(31, *shape, dtype=dtype)
    own = (norm.weight, norm.bias) if isinstance(norm, LayerNorm) else (norm.weight,)
    for z in (None, residual):
        check_norm(norm(x, residual=z), x, z, *parts)
        check_norm(function(x, *own, norm.eps, residual=z), x, z, *parts)
        check_norm(type(norm)()(x, residual=z), x, z, *plain)


def test_norms_of_numbers_too_large_to_be_squared():
    x = random(30, 3, 384)
    for norm, kind in ((LayerNorm(), ()), (RMSNorm(), (False,))):
        check_norm(norm(np.ldexp(x, 100)), x, None, None, None, 0, *kind)


@pytest.mark.parametrize("mean", [1e3, -1e5])
def test_layer_norm_with_a_large_mean(mean):
    """E[x^2] - E[x]^2 would leave nothing of the variance."""
    x = (mean + random(30, 20, 384)).astype(np.float32)
    exact = layer_norm(x, None, None, 1e-5, np.longdouble)
    unit = float(np.finfo(np.float32).eps)
    error = np.abs(LayerNorm()(x) - exact).max()
    assert error <= unit * (4 + np.sqrt(384)) * np.abs(exact).max()


def test_layer_norm_of_equal_numbers_is_its_bias():
    _, (weight, bias, _) = norm_of(37)
    for eps in (1e-5, 1e-12):
        for value in (0.0, 0.1, 1234.5, -7e6):
            x = np.full((3, 37), value, np.float32)
            np.testing.assert_array_equal(LayerNorm(weight, bias, eps)(x), np.tile(bias, (3, 1)))


@pytest.mark.parametrize("norm", [norm_of(16)[0], rms_norm_of(16)[0]], ids=repr)
def test_norm_layouts_and_out(norm):
    x, residual = random(30, 3, 5, 16), random(31, 3, 5, 16)
    expected = norm(x, residual=residual)
    for name, change in LAYOUTS.items():
        assert same_bits(norm(change(x), residual=change(residual)), expected), name
    for name in WRITABLE:
        view = LAYOUTS[name](np.full(x.shape, np.nan, np.float32))
        assert norm(x, residual=residual, out=view) is view
        assert same_bits(view.copy(order="C"), expected), name


@pytest.mark.parametrize("norm", [LayerNorm(), RMSNorm()], ids=repr)
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5)])
def test_norm_of_nothing(shape, norm):
    assert norm(np.empty(shape, np.float32)).shape == shape


def test_layer_norm_attributes():
    weight, bias = random(0, 5), random(1, 5)
    norm = LayerNorm(weight, bias, eps=1e-12)
    np.testing.assert_array_equal(norm.weight, weight)
    np.testing.assert_array_equal(norm.bias, bias)
    assert norm.eps == 1e-12
    assert repr(norm) == "LayerNorm(D=5, eps=1e-12)"
    plain = LayerNorm()
    assert plain.weight is None
    assert plain.bias is None
    assert plain.eps == 1e-5


def test_rms_norm_attributes():
    weight = random(0, 5)
    norm = RMSNorm(weight, eps=1e-12)
    np.testing.assert_array_equal(norm.weight, weight)
    assert norm.eps == 1e-12
    assert repr(norm) == "RMSNorm(D=5, eps=1e-12)"
    assert RMSNorm().weight is None
    assert RMSNorm().eps == 1e-6


# ------------------------------------------------------------------ random calls


@st.composite
def blocks(draw):
    """A block of random sizes and options, and an input with the options of a call."""
    small = st.integers(1, 40)
    K, G = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    D, H, Hv = draw(small), draw(small), draw(small)
    dtype, has_context = draw(st.sampled_from(DTYPES)), draw(st.booleans())
    Dc = draw(small) if has_context else D
    B, T = draw(st.integers(1, 3)), draw(st.integers(0, 40))
    S = draw(st.integers(0, 40)) if has_context else T
    sizes = Sizes(D=D, N=K * G, K=K, H=H, Hv=Hv, Dc=Dc)
    layout = st.sampled_from(sorted(LAYOUTS)).map(LAYOUTS.get)
    seed = draw(st.integers(0, 9))
    weights = [draw(layout)(w) for w in sizes.weights(dtype, seed)]
    biases = {name: b for name, b in sizes.biases(dtype).items() if draw(st.booleans())}
    made = {
        "residual": draw(st.booleans()),
        "is_causal": draw(st.booleans()),
        "norm_position": draw(st.sampled_from(["post", "pre", None])),
        **biases,
    }
    norms = {}
    for name, width in (("norm", D), ("q_norm", H), ("k_norm", H)):
        kinds = [norm_of(width, dtype), (LayerNorm(), PLAIN), rms_norm_of(width, dtype)]
        norms[name] = draw(st.sampled_from([(None, None), *kinds]))
    if H > 1 and draw(st.booleans()):
        made["rope"] = Rope(
            theta=draw(st.sampled_from([10.0, 1e4])),
            rotary_dim=2 * draw(st.integers(1, H // 2)),
            interleaved=draw(st.booleans()),
            scaling=draw(st.sampled_from([None, RopeScaling.yarn(4.0, 16)])),
        )
    if draw(st.booleans()):
        made["softcap"] = draw(st.sampled_from([0.5, 3.0]))
    if draw(st.booleans()):
        side = st.one_of(st.none(), st.integers(0, 50))
        made["local_window_size"] = draw(st.one_of(st.integers(0, 50), st.tuples(side, side)))
    if draw(st.booleans()):
        made["sinks"] = random(seed + 90, K * G, dtype=dtype)
    called = {}
    shape = [draw(st.sampled_from([n, 1])) for n in (B, K * G, T, S)]
    if draw(st.booleans()):
        called["bias"] = random(seed + 70, *shape, dtype=draw(st.sampled_from(DTYPES)))
    if draw(st.booleans()):
        called["mask"] = random(seed + 80, *shape) > -0.5
    if has_context:
        called["context"] = draw(layout)(random(seed + 50, B, S, Dc, dtype=dtype))
    placed = "rope" in made or "local_window_size" in made or made["is_causal"]
    if placed and (S != T or draw(st.booleans())):
        offsets = st.integers(0 if "rope" in made else -40, 40)
        called["query_offset"] = draw(st.one_of(offsets, st.lists(offsets, min_size=B, max_size=B)))
    for name, limit in (("query_seq_lengths", T), ("key_value_seq_lengths", S)):
        if draw(st.booleans()):
            called[name] = np.array([draw(st.integers(0, limit)) for _ in range(B)])
    x = draw(layout)(random(seed + 60, B, T, D, dtype=dtype))
    return x, weights, norms, made, called


@given(blocks(), st.integers(1, 3))
def test_random_blocks(case, num_threads):
    x, weights, norms, made, called = case
    block = AttentionBlock(*weights, **made, **{name: norm for name, (norm, _) in norms.items()})
    got = block(x, num_threads=num_threads, **called)
    x, *weights = (a.astype(a.dtype.newbyteorder("=")) for a in (x, *weights))
    called = {key: np.array(n) if isinstance(n, list) else n for key, n in called.items()}
    parts = {name: parts for name, (_, parts) in norms.items()}
    check_block(got, x, *weights, **parts, **made, **called)


class ShiftedNorm(tileattn.RMSNorm):
    """Gemma's: computes its weight anew each time."""

    @property
    def weight(self):
        return 1 + self._weight

    @weight.setter
    def weight(self, weight):
        self._weight = weight


class StridedNorm(tileattn.LayerNorm):
    """Has other arrays than those that its constructor would have made."""

    def __init__(self, weight):
        self.weight = np.repeat(weight, 2)[::2]
        self.bias = np.repeat(-weight, 3)[::3]
        self.eps = 1e-5


@pytest.mark.parametrize("made", [ShiftedNorm, StridedNorm])
@pytest.mark.parametrize("position", ["pre", "post"])
def test_norms_of_derived_classes(made, position):
    size = Sizes()
    weights, x = size.weights(), random(3, 2, 9, 24)
    norm = made(random(1, 24))
    heads = made(random(2, weights[0].shape[2]))
    block = AttentionBlock(*weights, norm=norm, norm_position=position, q_norm=heads, k_norm=heads)
    assert block.norm is norm
    junk = [np.full(n, np.nan, np.float32) for n in (24, weights[0].shape[2]) for _ in range(50)]
    expected = tileattn.reference.attention_block(
        x, *weights, norm=norm, norm_position=position, q_norm=heads, k_norm=heads
    )
    np.testing.assert_allclose(block(x), expected, atol=2e-5)
    reference = tileattn.reference
    if norm.subtract_mean:
        alone = reference.layer_norm(x, norm.weight, norm.bias)
    else:
        alone = reference.rms_norm(x, norm.weight)
    np.testing.assert_allclose(norm(x), alone, atol=1e-5)
    del junk
