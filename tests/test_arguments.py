"""Faulty arguments are refused before any work: the right error, what it names, `out` untouched."""

import inspect
import itertools

import numpy as np
import pytest

from tests.oracle import LAYOUTS, WRITABLE, random
from tileattn import AttentionBlock, LayerNorm, attention_block, dot_product_attention, reference
from tileattn._arguments import check_attention, check_num_threads, overlaps, overlaps_itself

B, T, S, N, K, H, HV = 2, 3, 5, 4, 2, 8, 6
D, DC = 16, 12
F32, F64 = np.float32, np.float64


def refused(call, error, *names):
    """The call raises the error, and its message holds each of the names."""
    with pytest.raises(error) as raised:
        call()
    for name in names:
        assert str(name) in str(raised.value), f"{name!r} is not in {str(raised.value)!r}"


# ------------------------------------------------------------------ dot_product_attention


def attention_arguments():
    return {
        "q": random(0, B, T, N, H),
        "k": random(1, B, S, K, H),
        "v": random(2, B, S, K, HV),
        "out": np.full((B, T, N, HV), 7, F32),
    }


def masked(a):
    return np.ma.masked_array(a, a > 0)


def on_itself(*shape):
    """An array whose rows are all the same memory."""
    return np.lib.stride_tricks.as_strided(
        np.full(shape[-1], 7, F32), shape, (0,) * (len(shape) - 1) + (4,)
    )


def read_only(*shape):
    array = np.full(shape, 7, F32)
    array.flags.writeable = False
    return array


ints = np.array

# What is given instead; the error; what its message must name: the argument, what came, what not.
ATTENTION_FAULTS = {
    "integer q": ({"q": np.ones((B, T, N, H), int)}, TypeError, ["q", "int64", "float32"]),
    "boolean q": ({"q": np.ones((B, T, N, H), bool)}, TypeError, ["q", "bool"]),
    "complex k": ({"k": np.ones((B, S, K, H), complex)}, TypeError, ["k", "complex128"]),
    "float16 v": ({"v": np.ones((B, S, K, HV), np.float16)}, TypeError, ["v", "float16", "astype"]),
    "long double v": ({"v": np.ones((B, S, K, HV), np.longdouble)}, TypeError, ["v"]),
    "text": ({"q": "query"}, TypeError, ["q"]),
    "None": ({"k": None}, TypeError, ["k"]),
    "objects": ({"q": np.full((B, T, N, H), None)}, TypeError, ["q", "object"]),
    "mixture k": ({"k": random(1, B, S, K, H, dtype=F64)}, TypeError, ["k", "float64", "float32"]),
    "mixture v": ({"v": random(1, B, S, K, HV, dtype=F64)}, TypeError, ["v", "float64", "astype"]),
    "q with 2 axes": ({"q": random(0, N, H)}, ValueError, ["q", "[B, T, N, H]", (N, H)]),
    "q with 5 axes": ({"q": random(0, 1, B, T, N, H)}, ValueError, ["q", (1, B, T, N, H)]),
    "scalar q": ({"q": F32(1)}, ValueError, ["q", "()"]),
    "q without B": ({"q": random(0, T, N, H)}, ValueError, ["k", (B, S, K, H), (T, N, H)]),
    "k without B": ({"k": random(0, S, K, H)}, ValueError, ["k", "[B, S, K, H]", (S, K, H)]),
    "v without B": ({"v": random(0, S, K, HV)}, ValueError, ["v", "[B, S, K, Hv]", (S, K, HV)]),
    "batch of k": ({"k": random(0, 3, S, K, H)}, ValueError, ["batch", "2, 3 and 2"]),
    "batch of v": ({"v": random(0, 1, S, K, HV)}, ValueError, ["batch", "2, 2 and 1"]),
    "width of k": ({"k": random(0, B, S, K, 7)}, ValueError, ["k", "H = 7", "H = 8"]),
    "length of v": ({"v": random(0, B, 4, K, HV)}, ValueError, ["v", "4", "5"]),
    "heads of v": ({"v": random(0, B, S, 4, HV)}, ValueError, ["v", "4 heads", "2"]),
    "N % K": ({"q": random(0, B, T, 3, H)}, ValueError, ["N = 3", "multiple", "K = 2"]),
    "no K": (
        {"k": random(0, B, S, 0, H), "v": random(0, B, S, 0, HV)},
        ValueError,
        ["N = 4", "K = 0"],
    ),
    "masked q": ({"q": masked(random(0, B, T, N, H))}, TypeError, ["q", "mask", ".filled"]),
    "masked v": ({"v": masked(random(2, B, S, K, HV))}, TypeError, ["v", "mask", ".filled"]),
    "scale as text": ({"scale": "0.5"}, TypeError, ["scale", "'0.5'"]),
    "masked scale": ({"scale": np.ma.masked}, TypeError, ["scale", "mask"]),
    "enormous scale": ({"scale": 10**400}, TypeError, ["scale"]),
    "scale as NaN": ({"scale": float("nan")}, ValueError, ["scale", "nan"]),
    "infinite scale": ({"scale": -np.float32(np.inf)}, ValueError, ["scale", "inf"]),
    "causal as text": ({"is_causal": "no"}, TypeError, ["is_causal", "'no'"]),
    "causal as number": ({"is_causal": 1}, TypeError, ["is_causal", "1"]),
    "return_lse as text": ({"return_lse": "no"}, TypeError, ["return_lse", "'no'"]),
    "complex scale": ({"scale": 1j}, TypeError, ["scale", "1j"]),
    "several scales": ({"scale": np.ones(2)}, TypeError, ["scale"]),
    "causal without offset": ({"is_causal": True}, ValueError, ["query_offset", "T = 3", "S = 5"]),
    "causal without keys": (
        {"is_causal": True, "k": random(1, B, 0, K, H), "v": random(2, B, 0, K, HV)},
        ValueError,
        ["query_offset", "T = 3", "S = 0"],
    ),
    "causal without queries": (
        {"is_causal": True, "q": random(0, B, 0, N, H), "out": None},
        ValueError,
        ["query_offset", "T = 0", "S = 5"],
    ),
    "causal without batch": (
        {
            "is_causal": True,
            "q": random(0, 0, T, N, H),
            "k": random(1, 0, S, K, H),
            "v": random(2, 0, S, K, HV),
            "out": None,
        },
        ValueError,
        ["query_offset", "T = 3", "S = 5"],
    ),
    "masked lengths": (
        {"query_seq_lengths": masked(ints([1, 0]))},
        TypeError,
        ["query_seq_lengths", "mask", ".filled"],
    ),
    "float offset": ({"query_offset": 1.0}, TypeError, ["query_offset", "float64"]),
    "boolean offset": ({"query_offset": True}, TypeError, ["query_offset", "bool"]),
    "three offsets": (
        {"query_offset": ints([1, 2, 3])},
        ValueError,
        ["query_offset", "(3,)", "(2,)"],
    ),
    "offset too large": ({"query_offset": 2**61}, ValueError, ["query_offset", "2**60"]),
    "offset too small": ({"query_offset": -(2**61)}, ValueError, ["query_offset", "2**60"]),
    "offset beyond int64": (
        {"query_offset": np.uint64(2**63)},
        ValueError,
        ["query_offset", 2**63],
    ),
    "enormous offset": ({"query_offset": 2**70}, TypeError, ["query_offset"]),
    "float lengths": (
        {"query_seq_lengths": np.ones(B)},
        TypeError,
        ["query_seq_lengths", "integers", "float64"],
    ),
    "one length": ({"query_seq_lengths": 3}, ValueError, ["query_seq_lengths", "[B]", "()"]),
    "three lengths": (
        {"key_value_seq_lengths": ints([1, 1, 1])},
        ValueError,
        ["key_value_seq_lengths", "(3,)", "(2,)"],
    ),
    "lengths as a column": (
        {"key_value_seq_lengths": ints([[1], [1]])},
        ValueError,
        ["key_value_seq_lengths", "(2, 1)"],
    ),
    "key length beyond S": (
        {"key_value_seq_lengths": ints([1, 6])},
        ValueError,
        ["key_value_seq_lengths", "5", "6"],
    ),
    "negative length": (
        {"key_value_seq_lengths": ints([-1, 3])},
        ValueError,
        ["key_value_seq_lengths", "0", "-1"],
    ),
    "query length beyond T": (
        {"query_seq_lengths": ints([4, 3])},
        ValueError,
        ["query_seq_lengths", "3", "4"],
    ),
    "length beyond int64": (
        {"query_seq_lengths": ints([2**63, 0], np.uint64)},
        ValueError,
        ["query_seq_lengths", 2**63],
    ),
    "out as a list": ({"out": [0.0]}, TypeError, ["out", "list"]),
    "out of float64": (
        {"out": np.full((B, T, N, HV), 7.0)},
        TypeError,
        ["out", "float64", "float32"],
    ),
    "masked out": (
        {"out": np.ma.masked_array(np.full((B, T, N, HV), 7, F32))},
        TypeError,
        ["out", "MaskedArray"],
    ),
    "out on itself": ({"out": on_itself(B, T, N, HV)}, ValueError, ["out", "memory", "each"]),
    "byte-swapped out": ({"out": np.full((B, T, N, HV), 7, ">f4")}, TypeError, ["out", ">f4"]),
    "shape of out": (
        {"out": np.full((B, T, N, H), 7, F32)},
        ValueError,
        ["out", (B, T, N, H), (B, T, N, HV)],
    ),
    "out without B": (
        {"out": np.full((T, N, HV), 7, F32)},
        ValueError,
        ["out", (T, N, HV), (B, T, N, HV)],
    ),
    "read-only out": ({"out": read_only(B, T, N, HV)}, ValueError, ["out", "read-only"]),
    "unaligned out": (
        {"out": np.zeros(4 * B * T * N * HV + 1, np.uint8)[1:].view(F32).reshape(B, T, N, HV)},
        ValueError,
        ["out", "aligned"],
    ),
    "no threads": ({"num_threads": 0}, ValueError, ["num_threads", "0"]),
    "negative threads": ({"num_threads": -2}, ValueError, ["num_threads", "-2"]),
    "too many threads": ({"num_threads": 10**6}, ValueError, ["num_threads", "1024", 10**6]),
    "half a thread": ({"num_threads": 0.5}, TypeError, ["num_threads", "0.5"]),
    "threads as text": ({"num_threads": "two"}, TypeError, ["num_threads", "'two'"]),
    "boolean threads": ({"num_threads": True}, TypeError, ["num_threads", "True"]),
}


@pytest.mark.parametrize("given, error, names", ATTENTION_FAULTS.values(), ids=ATTENTION_FAULTS)
def test_attention_refuses(given, error, names):
    arguments = {**attention_arguments(), **given}
    out = arguments["out"]
    before = out.copy() if isinstance(out, np.ndarray) else None
    refused(lambda: dot_product_attention(**arguments), error, *names)
    if before is not None:
        np.testing.assert_array_equal(out, before)


@pytest.mark.parametrize("given, error, names", ATTENTION_FAULTS.values(), ids=ATTENTION_FAULTS)
def test_the_reference_refuses_the_same(given, error, names):
    arguments = {**attention_arguments(), **given}
    refused(lambda: reference.dot_product_attention(**arguments), error, *names)


@pytest.mark.parametrize(
    "name", ["mask", "bias", "softcap", "local_window_size", "sinks", "dropout"]
)
def test_arguments_that_do_not_exist_are_not_ignored(name):
    arguments = {**attention_arguments(), name: None}
    refused(lambda: dot_product_attention(**arguments), TypeError, name)
    block_arguments = [random(i, *s) for i, s in enumerate(BLOCK_SHAPES.values())]
    refused(
        lambda: attention_block(random(9, B, T, D), *block_arguments, **{name: None}), TypeError
    )


@pytest.mark.parametrize("function", [dot_product_attention, attention_block])
def test_the_reference_takes_the_same_arguments(function):
    def parameters(function):
        return [
            (p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()
        ]

    assert parameters(getattr(reference, function.__name__)) == parameters(function)


def test_options_are_keywords_only():
    arguments = attention_arguments()
    with pytest.raises(TypeError, match="positional"):
        dot_product_attention(arguments["q"], arguments["k"], arguments["v"], 0.5)


def test_good_arguments_come_back_in_one_form():
    given = attention_arguments()
    checked = check_attention(
        **given,
        scale=None,
        is_causal=np.True_,
        query_offset=np.int8(2),
        query_seq_lengths=np.array([1, 3], np.uint8),
        key_value_seq_lengths=[5, 0],
    )
    assert checked.q is given["q"]
    assert checked.out is given["out"]
    assert checked.has_batch
    assert checked.scale == 1 / np.sqrt(H)
    assert checked.mask.is_causal is True
    for array, values in (
        (checked.mask.query_offset, [2, 2]),
        (checked.mask.query_lengths, [1, 3]),
        (checked.mask.key_value_lengths, [5, 0]),
    ):
        assert array.dtype == np.int64
        assert array.flags.c_contiguous
        assert array.tolist() == values


def test_num_threads_may_be_any_integer():
    assert check_num_threads(np.int16(3)) == 3
    assert check_num_threads(1024) == 1024


def test_overlap():
    a = np.zeros((4, 6), F32)
    assert overlaps(a, a[1:2, ::3])
    assert not overlaps(a, np.zeros_like(a))
    assert not overlaps(a[:, ::2], a[:, 1::2])  # between each other, in the same memory


def test_overlap_of_an_array_with_itself():
    """Against the addresses of all its elements; what cannot be told apart at once counts too."""
    memory = np.zeros(200, F32)
    for shape in itertools.product((0, 1, 2, 3), (1, 3), (2, 3)):
        for steps in itertools.product((-6, -2, 0, 1, 3), (-1, 0, 2, 9), (-1, 0, 1, 4)):
            strides = tuple(4 * step for step in steps)
            a = np.lib.stride_tricks.as_strided(memory[100:], shape, strides)
            i, j, k = np.ix_(*map(np.arange, shape))
            places = steps[0] * i + steps[1] * j + steps[2] * k
            overlap = len(np.unique(places)) < places.size
            assert overlaps_itself(a) or not overlap, (shape, steps)
    for name in WRITABLE:
        for shape in ((3, 4, 5), (1, 4, 1), (0, 4, 5)):
            assert not overlaps_itself(LAYOUTS[name](np.zeros(shape, F32))), name


# ------------------------------------------------------------------ the block and LayerNorm

BLOCK_SHAPES = {"w_q": (D, N, H), "w_k": (D, K, H), "w_v": (D, K, HV), "w_o": (N, HV, D)}

WEIGHT_FAULTS = {
    "w_q of 2 axes": ({"w_q": random(0, D, N * H)}, ValueError, ["w_q", "[D, N, H]", (D, N * H)]),
    "empty w_o": ({"w_o": random(0, N, HV, 0)}, ValueError, ["w_o", (N, HV, 0)]),
    "integer w_q": ({"w_q": np.ones((D, N, H), int)}, TypeError, ["w_q", "int64"]),
    "mixture": ({"w_v": random(0, D, K, HV, dtype=F64)}, TypeError, ["w_v", "float64", "float32"]),
    "heads of w_k": ({"w_k": random(0, D, 4, H)}, ValueError, ["w_k", (D, 4, H), (D, K, H)]),
    "width of w_k": ({"w_k": random(0, D, K, 7)}, ValueError, ["w_k", (D, K, 7), (D, K, H)]),
    "depth of w_k": ({"w_k": random(0, 9, K, H)}, ValueError, ["w_k", (9, K, H), (D, K, H)]),
    "heads of w_o": ({"w_o": random(0, 3, HV, D)}, ValueError, ["w_o", (3, HV, D), (N, HV, D)]),
    "width of w_o": ({"w_o": random(0, N, H, D)}, ValueError, ["w_o", (N, H, D), (N, HV, D)]),
    "output of w_o": ({"w_o": random(0, N, HV, 9)}, ValueError, ["w_o", (N, HV, 9), (N, HV, D)]),
    "N % K": (
        {"w_q": random(0, D, 3, H), "w_o": random(0, 3, HV, D)},
        ValueError,
        ["N = 3", "multiple", "K = 2"],
    ),
    "b_q": ({"b_q": random(0, N)}, ValueError, ["b_q", (N,), (N, H)]),
    "b_k": ({"b_k": random(0, H, K)}, ValueError, ["b_k", (H, K), (K, H)]),
    "b_v": ({"b_v": random(0, K, H)}, ValueError, ["b_v", (K, H), (K, HV)]),
    "flat b_q": ({"b_q": random(0, N * H)}, ValueError, ["b_q", (N * H,), (N, H)]),
    "b_o": ({"b_o": random(0, D + 1)}, ValueError, ["b_o", (D + 1,), (D,)]),
    "float64 b_o": ({"b_o": random(0, D, dtype=F64)}, TypeError, ["b_o", "float64", "float32"]),
    "norm of another width": (
        {"norm": LayerNorm(random(0, 9))},
        ValueError,
        ["norm.weight", (9,), (D,)],
    ),
    "norm of float64": ({"norm": LayerNorm(bias=np.ones(D))}, TypeError, ["norm.bias", "float64"]),
    "norm as text": ({"norm": "post"}, TypeError, ["norm", "LayerNorm", "str"]),
    "scale": ({"scale": "0.5"}, TypeError, ["scale", "'0.5'"]),
    "scale as NaN": ({"scale": np.nan}, ValueError, ["scale", "nan"]),
    "residual as text": ({"residual": "no"}, TypeError, ["residual", "'no'"]),
    "causal as text": ({"is_causal": "no"}, TypeError, ["is_causal", "'no'"]),
    "masked w_k": ({"w_k": masked(random(0, D, K, H))}, TypeError, ["w_k", ".filled"]),
    "masked b_k": ({"b_k": masked(random(0, K, H))}, TypeError, ["b_k", ".filled"]),
}


def block_weights():
    return {name: random(i, *shape) for i, (name, shape) in enumerate(BLOCK_SHAPES.items())}


@pytest.mark.parametrize("given, error, names", WEIGHT_FAULTS.values(), ids=WEIGHT_FAULTS)
def test_a_block_refuses_weights(given, error, names):
    refused(lambda: AttentionBlock(**{**block_weights(), **given}), error, *names)
    out = np.full((B, T, D), 7, F32)
    arguments = {**block_weights(), **given, "x": random(9, B, T, D), "out": out}
    for function in (attention_block, reference.attention_block):
        refused(lambda f=function: f(**arguments), error, *names)
    assert (out == 7).all()


CALL_FAULTS = {
    "x of float64": ({"x": random(0, B, T, D, dtype=F64)}, TypeError, ["x", "float64", "float32"]),
    "integer x": ({"x": np.ones((B, T, D), int)}, TypeError, ["x", "int64"]),
    "x of one axis": ({"x": random(0, D)}, ValueError, ["x", (D,), "16"]),
    "x of four axes": ({"x": random(0, 1, B, T, D)}, ValueError, ["x", (1, B, T, D)]),
    "width of x": ({"x": random(0, B, T, 9)}, ValueError, ["x", (B, T, 9), "16"]),
    "masked x": ({"x": masked(random(0, B, T, D))}, TypeError, ["x", ".filled"]),
    "no context": ({"context": None}, ValueError, ["context", "12", "16"]),
    "context of float64": ({"context": np.ones((B, S, DC))}, TypeError, ["context", "float64"]),
    "width of context": ({"context": random(0, B, S, D)}, ValueError, ["context", (B, S, D), "12"]),
    "context without B": ({"context": random(0, S, DC)}, ValueError, ["context", (S, DC)]),
    "batch of context": ({"context": random(0, 3, S, DC)}, ValueError, ["context", "3", "2"]),
    "offset": ({"query_offset": 0.5}, TypeError, ["query_offset", "float64"]),
    "query lengths": (
        {"query_seq_lengths": ints([4, 0])},
        ValueError,
        ["query_seq_lengths", "3", "4"],
    ),
    "key lengths": (
        {"key_value_seq_lengths": ints([6, 0])},
        ValueError,
        ["key_value_seq_lengths", "5", "6"],
    ),
    "out as a list": ({"out": []}, TypeError, ["out", "list"]),
    "shape of out": (
        {"out": np.full((B, T, 9), 7, F32)},
        ValueError,
        ["out", (B, T, 9), (B, T, D)],
    ),
    "out of float64": ({"out": np.full((B, T, D), 7.0)}, TypeError, ["out", "float64"]),
    "read-only out": ({"out": read_only(B, T, D)}, ValueError, ["out", "read-only"]),
    "out on itself": ({"out": on_itself(B, T, D)}, ValueError, ["out", "memory", "each"]),
    "threads": ({"num_threads": 0}, ValueError, ["num_threads", "0"]),
}


@pytest.mark.parametrize("given, error, names", CALL_FAULTS.values(), ids=CALL_FAULTS)
def test_a_block_refuses_inputs(given, error, names):
    weights = block_weights()
    weights["w_k"], weights["w_v"] = random(1, DC, K, H), random(2, DC, K, HV)
    block = AttentionBlock(**weights)
    arguments = {
        "x": random(0, B, T, D),
        "context": random(1, B, S, DC),
        "out": np.full((B, T, D), 7, F32),
        **given,
    }
    for call in (block, lambda **given: reference.attention_block(**weights, **given)):
        refused(lambda f=call: f(**arguments), error, *names)
    out = arguments["out"]
    assert not isinstance(out, np.ndarray) or (out == 7).all()


def linear_weights():
    return {
        "w_q": random(0, N * H, D),
        "w_k": random(1, K * H, D),
        "w_v": random(2, K * HV, D),
        "w_o": random(3, D, N * HV),
        "num_heads": N,
        "num_kv_heads": K,
    }


PACKED = {"w_q": None, "w_k": None, "w_v": None, "w_qkv": random(0, (N + 2 * K) * H, D)}

LINEAR_FAULTS = {
    "heads": ({"num_kv_heads": 3}, ValueError, ["num_heads = 4", "num_kv_heads", "3"]),
    "no heads": ({"num_heads": 0}, ValueError, ["num_heads = 0"]),
    "heads as text": ({"num_heads": "2"}, TypeError, ["num_heads", "int", "'2'"]),
    "heads as None": ({"num_heads": None}, TypeError, ["num_heads", "int", "None"]),
    "heads as float": ({"num_heads": 4.0}, TypeError, ["num_heads", "int", "4.0"]),
    "heads as bool": ({"num_heads": True}, TypeError, ["num_heads", "int", "True"]),
    "key heads as float": ({"num_kv_heads": 2.0}, TypeError, ["num_kv_heads", "int", "2.0"]),
    "no w_o": ({"w_o": None}, TypeError, ["w_o"]),
    "no w_v": ({"w_v": None}, TypeError, ["w_v", "w_qkv"]),
    "rows of w_q": ({"w_q": random(0, N * H + 1, D)}, ValueError, ["w_q", "4 heads", (33, D)]),
    "axes of w_k": ({"w_k": random(0, K, H, D)}, ValueError, ["w_k", (K, H, D)]),
    "columns of w_o": ({"w_o": random(0, D, 23)}, ValueError, ["w_o", "24", (D, 23)]),
    "b_q": ({"b_q": random(0, 9)}, ValueError, ["b_q", (9,), "(32,)"]),
    "b_k by head": ({"b_k": random(0, K, H)}, ValueError, ["b_k", (K, H), "(16,)"]),
    "b_o": ({"b_o": random(0, 9)}, ValueError, ["b_o", (9,), "(16,)"]),
    "b_qkv alone": ({"b_qkv": random(0, 64)}, TypeError, ["b_qkv", "w_qkv"]),
    "both": ({"w_qkv": random(0, 64, D)}, TypeError, ["w_qkv", "w_q"]),
    "rows of w_qkv": ({**PACKED, "w_qkv": random(0, 65, D)}, ValueError, ["w_qkv", "8", (65, D)]),
    "bias of w_qkv": ({**PACKED, "b_qkv": random(0, 9)}, ValueError, ["b_qkv", (9,), "(64,)"]),
    "b_k beside w_qkv": ({**PACKED, "b_k": random(0, K * H)}, TypeError, ["w_qkv", "b_k"]),
}


@pytest.mark.parametrize("given, error, names", LINEAR_FAULTS.values(), ids=LINEAR_FAULTS)
def test_from_linear_refuses(given, error, names):
    refused(lambda: AttentionBlock.from_linear(**{**linear_weights(), **given}), error, *names)


NORM_FAULTS = {
    "integer weight": ({"weight": np.ones(D, int)}, TypeError, ["weight", "int64"]),
    "weight of two axes": ({"weight": random(0, 2, D)}, ValueError, ["weight", (2, D)]),
    "bias of another width": (
        {"weight": random(0, D), "bias": random(1, 9)},
        ValueError,
        ["bias", (9,), (D,)],
    ),
    "mixture": ({"weight": random(0, D), "bias": np.ones(D)}, TypeError, ["bias", "float64"]),
    "negative eps": ({"eps": -1e-5}, ValueError, ["eps", "-1e-05"]),
    "eps as NaN": ({"eps": float("nan")}, ValueError, ["eps", "nan"]),
    "eps as text": ({"eps": "1e-5"}, TypeError, ["eps", "'1e-5'"]),
    "infinite eps": ({"eps": np.inf}, ValueError, ["eps", "inf"]),
    "masked weight": ({"weight": masked(random(0, D))}, TypeError, ["weight", ".filled"]),
}


@pytest.mark.parametrize("given, error, names", NORM_FAULTS.values(), ids=NORM_FAULTS)
def test_layer_norm_refuses_parameters(given, error, names):
    refused(lambda: LayerNorm(**given), error, *names)
    refused(lambda: reference.layer_norm(random(2, B, D), **given), error, *names)


NORM_CALL_FAULTS = {
    "integer x": ({"x": np.ones((B, D), int)}, TypeError, ["x", "int64"]),
    "scalar x": ({"x": F32(1)}, ValueError, ["x", "axis"]),
    "width of x": ({"x": random(0, B, 9), "residual": None}, ValueError, ["weight", (D,), "(9,)"]),
    "x of float64": ({"x": random(0, B, D, dtype=F64)}, TypeError, ["float32", "float64"]),
    "shape of residual": ({"residual": random(0, D)}, ValueError, ["residual", (D,), (B, D)]),
    "residual of float64": ({"residual": np.ones((B, D))}, TypeError, ["residual", "float64"]),
    "shape of out": ({"out": np.full((D,), 7, F32)}, ValueError, ["out", (D,), (B, D)]),
    "read-only out": ({"out": read_only(B, D)}, ValueError, ["out", "read-only"]),
    "out on itself": ({"out": on_itself(B, D)}, ValueError, ["out", "memory", "each"]),
    "masked residual": (
        {"residual": masked(random(0, B, D))},
        TypeError,
        ["residual", ".filled"],
    ),
    "threads": ({"num_threads": 0}, ValueError, ["num_threads", "0"]),
    "threads for nothing": (
        {"x": random(0, 0, D), "residual": None, "out": None, "num_threads": 0},
        ValueError,
        ["num_threads", "0"],
    ),
}


@pytest.mark.parametrize("given, error, names", NORM_CALL_FAULTS.values(), ids=NORM_CALL_FAULTS)
def test_layer_norm_refuses_inputs(given, error, names):
    norm = LayerNorm(random(0, D), random(1, D))
    arguments = {
        "x": random(2, B, D),
        "residual": random(3, B, D),
        "out": np.full((B, D), 7, F32),
        **given,
    }
    for call in (norm, lambda **given: reference.layer_norm(**given, **vars(norm))):
        refused(lambda f=call: f(**arguments), error, *names)
    assert arguments["out"] is None or (arguments["out"] == 7).all()


def test_layer_norm_output_may_not_overlap_its_inputs():
    norm = LayerNorm()
    x, residual = random(0, B, D), random(1, B, D)
    for name, array in (("x", x), ("residual", residual)):
        refused(lambda a=array: norm(x, residual=residual, out=a), ValueError, "overlaps", name)
