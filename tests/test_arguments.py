"""Faulty arguments are refused before any work: the right error, what it names, `out` untouched."""

import inspect
import itertools

import numpy as np
import pytest

from tests.oracle import HALVES, LAYOUTS, WRITABLE, random, same_bits
from tileattn import (
    AttentionBlock,
    KVCache,
    LayerNorm,
    QuantizedMatrix,
    RMSNorm,
    Rope,
    RopeScaling,
    apply_rope,
    attention_block,
    attention_weights,
    dot_product_attention,
    explain,
    reference,
    varlen_attention,
)
from tileattn._arguments import check_attention
from tileattn._values import check_num_threads, overlaps, overlaps_itself

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
    "ragged list": ({"k": [[1.0, 2.0], [3.0]]}, ValueError, ["k", "inhomogeneous"]),
    "ragged lengths": (
        {"query_seq_lengths": [[1], [2, 3]]},
        ValueError,
        ["query_seq_lengths", "inhomogeneous"],
    ),
    "objects": ({"q": np.full((B, T, N, H), None)}, TypeError, ["q", "object"]),
    "mixture k": ({"k": random(1, B, S, K, H, dtype=F64)}, TypeError, ["k", "float64", "float32"]),
    "list of q": (
        {"q": random(0, B, T, N, H).tolist()},
        TypeError,
        ["k has dtype float32, but q has float64", "both arrays of one dtype (with .astype)"],
    ),
    "list of k": (
        {"k": random(0, B, S, K, H).tolist()},
        TypeError,
        ["k (of type list) has dtype float64, but q has float32; make both arrays"],
    ),
    "mixture v": ({"v": random(1, B, S, K, HV, dtype=F64)}, TypeError, ["v", "float64", "float32"]),
    "q with 2 axes": ({"q": random(0, N, H)}, ValueError, ["q", "[B, T, N, H]", (N, H)]),
    "q with 5 axes": ({"q": random(0, 1, B, T, N, H)}, ValueError, ["q", (1, B, T, N, H)]),
    "scalar q": ({"q": F32(1)}, ValueError, ["q", "()"]),
    "q without B": ({"q": random(0, T, N, H)}, ValueError, ["k", (B, S, K, H), (T, N, H)]),
    "k without B": ({"k": random(0, S, K, H)}, ValueError, ["k", "[B, S, K, H]", (S, K, H)]),
    "v without B": ({"v": random(0, S, K, HV)}, ValueError, ["v", "[B, S, K, Hv]", (S, K, HV)]),
    "batch of k": ({"k": random(0, 3, S, K, H)}, ValueError, ["k has", "B = 3", "B = 2"]),
    "batch of v": ({"v": random(0, 1, S, K, HV)}, ValueError, ["v has", "B = 1", "B = 2"]),
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
        ["key_value_seq_lengths", "5", "6 at index 1"],
    ),
    "negative length": (
        {"key_value_seq_lengths": ints([-1, 3])},
        ValueError,
        ["key_value_seq_lengths", "0", "-1 at index 0"],
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
    "float16 out": (
        {"out": np.full((B, T, N, HV), 7, np.float16)},
        TypeError,
        ["out", "float16", "float32"],
    ),
    "mixed halves": (
        {"q": np.ones((B, T, N, H), np.float16)},
        TypeError,
        ["k", "float32", "float16"],
    ),
    "long double q": ({"q": np.ones((B, T, N, H), np.longdouble)}, TypeError, ["q", "bfloat16"]),
    "float mask": ({"mask": np.ones((T, S))}, TypeError, ["mask", "float64", "bias", "astype"]),
    "integer mask": ({"mask": np.ones((T, S), int)}, TypeError, ["mask", "int64", "astype(bool)"]),
    "masked mask": ({"mask": masked(np.ones((T, S))) > 0}, TypeError, ["mask", ".filled"]),
    "mask of other keys": (
        {"mask": np.ones((B, 1, T, 6), bool)},
        ValueError,
        ["mask", (B, 1, T, 6), (B, N, T, S)],
    ),
    "mask of 5 axes": (
        {"mask": np.ones((1, B, N, T, S), bool)},
        ValueError,
        ["mask", (1, B, N, T, S), "[B, N, T, S]"],
    ),
    "mask with heads of k": (
        {"mask": np.ones((B, K, T, S), bool)},
        ValueError,
        ["mask", (B, K, T, S), (B, N, T, S)],
    ),
    "mask by batch and key": (
        {"mask": np.ones((B, S), bool)},
        ValueError,
        ["mask", (B, S), (B, N, T, S)],
    ),
    "boolean bias": ({"bias": np.ones((T, S), bool)}, TypeError, ["bias", "bool", "mask"]),
    "integer bias": ({"bias": np.ones((T, S), int)}, TypeError, ["bias", "int64", "astype"]),
    "complex bias": ({"bias": np.ones((T, S), complex)}, TypeError, ["bias", "complex128"]),
    "bias of other queries": (
        {"bias": np.ones((B, N, 4, S))},
        ValueError,
        ["bias", (B, N, 4, S), (B, N, T, S)],
    ),
    "softcap of 0": ({"softcap": 0.0}, ValueError, ["softcap", "0.0", "None"]),
    "negative softcap": ({"softcap": -1.0}, ValueError, ["softcap", "-1.0"]),
    "infinite softcap": ({"softcap": float("inf")}, ValueError, ["softcap", "inf"]),
    "softcap below float32": ({"softcap": 1e-46}, ValueError, ["softcap", "1e-46", "1.18e-38"]),
    "softcap beyond float32": ({"softcap": 1e39}, ValueError, ["softcap", "1e+39", "2.36e+38"]),
    "softcap as text": ({"softcap": "30"}, TypeError, ["softcap", "'30'"]),
    "negative window": (
        {"local_window_size": -1},
        ValueError,
        ["local_window_size", "-1", "None"],
    ),
    "negative left": (
        {"local_window_size": (-3, None)},
        ValueError,
        ["local_window_size", "-3"],
    ),
    "boolean window": ({"local_window_size": True}, TypeError, ["local_window_size", "True"]),
    "boolean right": ({"local_window_size": (1, False)}, TypeError, ["local_window_size", "False"]),
    "float window": ({"local_window_size": 2.0}, TypeError, ["local_window_size", "2.0"]),
    "window of three": (
        {"local_window_size": (1, 2, 3)},
        ValueError,
        ["local_window_size", "(left, right)", (1, 2, 3)],
    ),
    "window without offset": (
        {"local_window_size": 1},
        ValueError,
        ["local_window_size", "query_offset", "T = 3", "S = 5", "S - T = 2"],
    ),
    "left window without offset": (
        {"local_window_size": (1, None)},
        ValueError,
        ["local_window_size", "query_offset"],
    ),
    "slopes without offset": (
        {"alibi_slopes": np.ones(N)},
        ValueError,
        ["alibi_slopes", "query_offset", "T = 3", "S = 5"],
    ),
    "slopes of other heads": (
        {"alibi_slopes": np.ones(K), "query_offset": 0},
        ValueError,
        ["alibi_slopes", (K,), (N,), (B, N)],
    ),
    "slopes by head and batch": (
        {"alibi_slopes": np.ones((N, B)), "query_offset": 0},
        ValueError,
        ["alibi_slopes", (N, B), (B, N)],
    ),
    "integer slopes": (
        {"alibi_slopes": np.ones(N, int), "query_offset": 0},
        TypeError,
        ["alibi_slopes", "int64"],
    ),
    "slopes as NaN": (
        {"alibi_slopes": np.full(N, np.nan), "query_offset": 0},
        ValueError,
        ["alibi_slopes", "finite", "nan"],
    ),
    "slopes beyond float32": (
        {"alibi_slopes": np.full(N, 1e39), "query_offset": 0},
        ValueError,
        ["alibi_slopes", "float32", "1.e+39"],
    ),
    "sinks of other heads": ({"sinks": np.ones(K)}, ValueError, ["sinks", (K,), (N,)]),
    "sinks by batch": ({"sinks": np.ones((B, N))}, ValueError, ["sinks", (B, N), (N,)]),
    "boolean sinks": ({"sinks": np.ones(N, bool)}, TypeError, ["sinks", "bool"]),
    "sinks as NaN": ({"sinks": np.full(N, np.nan)}, ValueError, ["sinks", "finite", "nan"]),
    "infinite sinks": ({"sinks": np.full(N, np.inf)}, ValueError, ["sinks", "-inf", "inf"]),
    "sinks beyond float32": ({"sinks": np.full(N, 1e39)}, ValueError, ["sinks", "float32"]),
    "sinks below float32": ({"sinks": np.full(N, -1e39)}, ValueError, ["sinks", "float32", "-inf"]),
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


def test_arguments_that_do_not_exist_are_not_ignored():
    refused(lambda: dot_product_attention(**attention_arguments(), dropout=None), TypeError)
    block_arguments = [random(i, *s) for i, s in enumerate(BLOCK_SHAPES.values())]
    for name in ("dropout", "alibi_slopes", "return_lse", "theta"):
        refused(
            lambda name=name: attention_block(random(9, B, T, D), *block_arguments, **{name: None}),
            TypeError,
            name,
        )


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "mask"])
def test_out_may_not_overlap_an_input(name):
    memory = np.zeros(4096, F32)
    out = memory[5 : 5 + B * T * N * HV].reshape(B, T, N, HV)
    arguments = attention_arguments() | {"bias": np.zeros((B, N, T, S)), "out": out}
    arguments["mask"] = np.ones((B, N, T, S), bool)
    given = arguments[name].astype(F32) if name == "bias" else arguments[name]
    arguments[name] = memory.view(given.dtype)[: given.size].reshape(given.shape)
    for function in (dot_product_attention, reference.dot_product_attention):
        refused(lambda f=function: f(**arguments), ValueError, "out overlaps", name)
    assert not memory.any()


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
    checked = checked_attention(
        **given,
        is_causal=np.True_,
        query_offset=np.int8(2),
        query_seq_lengths=np.array([1, 3], np.uint8),
        key_value_seq_lengths=[5, 0],
    )
    assert checked.q is given["q"]
    assert checked.out.base is given["out"]
    assert checked.sizes == (B, T, N, H, S, K, HV)
    assert checked.has_batch
    scores = checked.scores
    assert (scores.scale, scores.softcap) == (1 / np.sqrt(H), 0.0)
    assert (scores.bias, scores.alibi_slopes, scores.sinks) == (None, None, None)
    assert checked.visibility.is_causal is True
    assert checked.visibility.window is None
    assert checked.visibility.mask is None
    for array, values in (
        (checked.visibility.query_offset, [2, 2]),
        (checked.visibility.query_lengths, [1, 3]),
        (checked.visibility.key_value_lengths, [5, 0]),
    ):
        assert array.dtype == np.int64
        assert array.flags.c_contiguous
        assert array.tolist() == values


def checked_attention(**given):
    options = dict.fromkeys(inspect.signature(check_attention).parameters)
    return check_attention(**{**options, "is_causal": False, **given})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("axes", list(itertools.product((False, True), repeat=4)))
def test_mask_and_bias_become_views(axes, layout):
    shape = tuple(size if whole else 1 for size, whole in zip((B, N, T, S), axes, strict=True))
    for name, values in (("bias", random(3, *shape)), ("mask", random(3, *shape) > 0)):
        given = LAYOUTS[layout](values)
        checked = checked_attention(**attention_arguments(), **{name: given})
        view = checked.scores.bias if name == "bias" else checked.visibility.mask
        assert view.shape == (B, N, T, S)
        assert view.dtype == values.dtype  # native
        assert view.flags.aligned
        assert all(step % view.itemsize == 0 for step in view.strides)
        assert all(
            step == 0
            for step, size, whole in zip(view.strides, view.shape, axes, strict=True)
            if not whole and size > 1
        )
        np.testing.assert_array_equal(view, np.broadcast_to(values, view.shape))
        copied = name == "bias" and layout in (
            "unaligned",
            "field of a packed record",
            "byte-swapped",
        )
        assert np.shares_memory(view, given) is not copied


def test_a_broadcast_bias_is_not_expanded_by_a_copy():
    for name in ("unaligned", "byte-swapped"):
        row = LAYOUTS[name](random(0, 1, S))
        given = np.broadcast_to(row, (B, N, T, S))
        view = checked_attention(**attention_arguments(), bias=given).scores.bias
        assert view.strides == (0, 0, 0, 4)
        np.testing.assert_array_equal(view, given)


def test_mask_and_bias_may_lack_axes():
    without_batch = {
        name: array[0] for name, array in attention_arguments().items() if name != "out"
    }
    for shape in ((), (S,), (T, 1), (N, 1, S), (N, T, S)):
        bias, mask = random(0, *shape), random(0, *shape) > 0
        for arguments, batch in ((attention_arguments(), B), (without_batch, 1)):
            checked = checked_attention(**arguments, bias=bias, mask=mask)
            for view, given in ((checked.scores.bias, bias), (checked.visibility.mask, mask)):
                np.testing.assert_array_equal(view, np.broadcast_to(given, (batch, N, T, S)))
    refused(
        lambda: checked_attention(**without_batch, bias=random(0, 1, N, T, S)),
        ValueError,
        *("bias", (1, N, T, S), (N, T, S)),
    )
    refused(
        lambda: checked_attention(**without_batch, alibi_slopes=np.ones((1, N)), query_offset=0),
        ValueError,
        *("alibi_slopes", (1, N), (N,)),
    )


@pytest.mark.parametrize(
    "given, window",
    [
        (None, None),
        ((None, None), None),
        (2**62, None),
        (0, (0, 0)),
        (np.int8(3), (3, 3)),
        ((4, None), (4, -1)),
        ([None, 0], (-1, 0)),
        ((2**61, 2**61 + 1), (2**61, -1)),
    ],
)
def test_windows(given, window):
    checked = checked_attention(**attention_arguments(), local_window_size=given, query_offset=1)
    assert checked.visibility.window == window
    if window is None:  # then no position matters
        checked_attention(**attention_arguments(), local_window_size=given)


@pytest.mark.parametrize("dtype", [np.float16, F32, F64, ">f4"])
def test_slopes_and_sinks_are_copies_in_the_type_of_the_arithmetic(dtype):
    slopes, sinks = np.linspace(-1, 1, N).astype(dtype), np.array([0, -np.inf, 1, 2], dtype)
    for arithmetic in (F32, F64):
        arguments = {
            name: array.astype(arithmetic) for name, array in attention_arguments().items()
        }
        for given in (slopes, np.stack([slopes, 2 * slopes]), np.stack([slopes] * 2, 1).T):
            scores = checked_attention(
                **arguments, alibi_slopes=given, sinks=sinks, query_offset=0
            ).scores
            for array, values in (
                (scores.alibi_slopes, np.broadcast_to(given, (B, N))),
                (scores.sinks, sinks),
            ):
                assert array.dtype == arithmetic
                assert array.flags.c_contiguous
                assert not np.shares_memory(array, given)
                np.testing.assert_array_equal(array, values.astype(arithmetic))


def test_softcap_is_a_number():
    for given, cap in ((None, 0.0), (30, 30.0), (np.float32(0.5), 0.5)):
        assert checked_attention(**attention_arguments(), softcap=given).scores.softcap == cap
    wide = {name: array.astype(F64) for name, array in attention_arguments().items()}
    assert checked_attention(**wide, softcap=1e-46).scores.softcap == 1e-46


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("name", ["scale", "softcap", "alibi_slopes", "sinks"])
def test_options_are_finite_in_units_of_log2(name, dtype):
    """Scores count in these: up to their largest number, all give what the reference gives."""
    q = np.zeros((1, 1, 2, 4), dtype)
    k, v = (random(i, 1, 1, 1, 4, dtype=dtype) for i in (1, 2))
    cache = KVCache(1, 4, num_kv_heads=1, head_dim=4, dtype=dtype)
    cache.append(k, v)
    starts = [0, 1]
    weights = [np.ones(shape, dtype) for shape in ((4, 2, 4), (4, 1, 4), (4, 1, 4), (2, 4, 4))]
    calls = {
        "dot_product_attention": lambda **o: dot_product_attention(q, k, v, **o),
        "varlen_attention": lambda **o: varlen_attention(q[0], k[0], v[0], starts, starts, **o),
        "attend": lambda **o: cache.attend(q, **o),
        "explain": lambda **o: explain(q, k, v, **o),
        "reference": lambda **o: reference.dot_product_attention(q, k, v, **o),
    }
    if name != "sinks":
        calls["weights"] = lambda **o: attention_weights(q, k, np.zeros((1, 1, 2), dtype), **o)
    if name != "alibi_slopes":
        calls["block"] = lambda **o: AttentionBlock(*weights, **o)
    limit = float(np.finfo(dtype).max) * 0.69299
    told = {np.float32: "2.36e+38", np.float64: "1.25e+308"}[dtype]
    for sign in (1, -1)[: 1 if name == "softcap" else 2]:
        number = np.full(2, sign * limit) if name.endswith("s") else sign * limit
        got = dot_product_attention(q, k, v, **{name: number}, return_lse=True)
        expected = reference.dot_product_attention(q, k, v, **{name: number}, return_lse=True)
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
        for call in calls.values():
            call(**{name: number})
            beyond = {name: number * 1.0001}
            refused(lambda call=call, o=beyond: call(**o), ValueError, name, told)


@pytest.mark.parametrize("dtype", HALVES)
def test_halves_are_storage_types(dtype):
    arguments = {name: array.astype(dtype) for name, array in attention_arguments().items()}
    assert checked_attention(**arguments).q.dtype == dtype
    arguments["out"] = arguments["out"].astype(F32)
    checked_attention(**arguments)
    swapped = arguments["k"].astype(arguments["k"].dtype.newbyteorder("S"))
    back = checked_attention(**{**arguments, "k": swapped}).k
    assert back.dtype == dtype
    assert same_bits(np.ascontiguousarray(back), arguments["k"])
    for other in (F64, *(half for half in HALVES if half != dtype)):
        faulty = {**arguments, "out": arguments["out"].astype(other)}
        refused(
            lambda faulty=faulty: checked_attention(**faulty),
            TypeError,
            *("out", np.dtype(other), np.dtype(dtype), "float32"),
        )
        faulty = {**arguments, "k": arguments["k"].astype(other)}
        refused(
            lambda faulty=faulty: checked_attention(**faulty),
            TypeError,
            *("k", np.dtype(other), np.dtype(dtype)),
        )
    for bias in (random(0, T, S).astype(other) for other in (F64, F32, *HALVES)):
        assert checked_attention(**arguments, bias=bias).scores.bias.dtype == bias.dtype
    refused(lambda: LayerNorm()(arguments["q"]), TypeError, "x", np.dtype(dtype), "float32")


# ------------------------------------------------------------------ varlen_attention


def varlen_arguments():
    return {
        "q": random(0, 7, N, H),
        "k": random(1, 9, K, H),
        "v": random(2, 9, K, HV),
        "cu_seqlens_q": [0, 3, 3, 7],
        "cu_seqlens_k": [0, 4, 5, 9],
        "out": np.full((7, N, HV), 7, F32),
    }


VARLEN_FAULTS = {
    "q with B": (
        {"q": random(0, 1, 7, N, H), "k": random(1, 1, 9, K, H)},
        ValueError,
        ["q", "total_q"],
    ),
    "k with B": ({"k": random(1, 1, 9, K, H)}, ValueError, ["k", (1, 9, K, H)]),
    "integer q": ({"q": np.ones((7, N, H), int)}, TypeError, ["q", "int64"]),
    "mixture": ({"v": random(2, 9, K, HV, dtype=F64)}, TypeError, ["v", "float64"]),
    "length of v": ({"v": random(2, 8, K, HV)}, ValueError, ["v", "8", "9"]),
    "N % K": ({"q": random(0, 7, 3, H)}, ValueError, ["N = 3", "K = 2"]),
    "float starts": ({"cu_seqlens_q": [0.0, 7.0]}, TypeError, ["cu_seqlens_q", "float64"]),
    "no starts": (
        {"cu_seqlens_q": np.zeros(0, int)},
        ValueError,
        ["cu_seqlens_q", "[B + 1]", "(0,)"],
    ),
    "starts of two axes": ({"cu_seqlens_k": [[0, 9]]}, ValueError, ["cu_seqlens_k", (1, 2)]),
    "scalar starts": ({"cu_seqlens_k": 9}, ValueError, ["cu_seqlens_k", "()"]),
    "starts at 1": ({"cu_seqlens_q": [1, 3, 3, 7]}, ValueError, ["cu_seqlens_q", "0", "1 ... 7"]),
    "ends early": ({"cu_seqlens_k": [0, 4, 5, 8]}, ValueError, ["cu_seqlens_k", "9", "0 ... 8"]),
    "ends late": ({"cu_seqlens_q": [0, 3, 3, 8]}, ValueError, ["cu_seqlens_q", "7", "0 ... 8"]),
    "falling starts": (
        {"cu_seqlens_q": [0, 5, 3, 7]},
        ValueError,
        ["cu_seqlens_q", "decrease", "3 follows 5"],
    ),
    "falling starts that wrap": (
        {"cu_seqlens_q": np.array([0, 2**63 + 5, 7], np.uint64)},
        ValueError,
        ["cu_seqlens_q", 2**63 + 5],
    ),
    "other number of sequences": (
        {"cu_seqlens_k": [0, 9]},
        ValueError,
        ["cu_seqlens_k", "1 ", "cu_seqlens_q", "3"],
    ),
    "causal without offset": (
        {"is_causal": True, "cu_seqlens_k": [0, 3, 5, 9]},
        ValueError,
        ["is_causal", "query_offset", "sequence 1", "T = 0", "S = 2", "S - T = 2"],
    ),
    "window without offset": (
        {"local_window_size": (None, 2)},
        ValueError,
        ["local_window_size", "sequence 0", "T = 3", "S = 4"],
    ),
    "slopes without offset": ({"alibi_slopes": np.ones(N)}, ValueError, ["alibi_slopes"]),
    "two offsets": ({"query_offset": [0, 0]}, ValueError, ["query_offset", (2,), (3,)]),
    "slopes": ({"alibi_slopes": np.ones((2, N)), "query_offset": 0}, ValueError, ["(3, 4)"]),
    "sinks": ({"sinks": np.ones(3)}, ValueError, ["sinks", (3,), (N,)]),
    "softcap": ({"softcap": -1}, ValueError, ["softcap", "-1"]),
    "scale": ({"scale": "1"}, TypeError, ["scale", "'1'"]),
    "causal": ({"is_causal": 1}, TypeError, ["is_causal", "1"]),
    "return_lse": ({"return_lse": 1}, TypeError, ["return_lse", "1"]),
    "shape of out": (
        {"out": np.full((1, 7, N, HV), 7, F32)},
        ValueError,
        ["out", (1, 7, N, HV), (7, N, HV)],
    ),
    "out of float64": ({"out": np.full((7, N, HV), 7.0)}, TypeError, ["out", "float64"]),
    "threads": ({"num_threads": 0}, ValueError, ["num_threads", "0"]),
}


@pytest.mark.parametrize("given, error, names", VARLEN_FAULTS.values(), ids=VARLEN_FAULTS)
def test_varlen_refuses(given, error, names):
    arguments = {**varlen_arguments(), **given}
    refused(lambda: reference.varlen_attention(**arguments), error, *names)
    assert (np.asarray(arguments["out"]) == 7).all()


# ------------------------------------------------------------------ merge_states


def states():
    return [random(0, B, T, N, HV), random(1, B, T, N), random(2, B, T, N, HV), random(3, B, T, N)]


@pytest.mark.parametrize(
    "place, value, error, names",
    [
        (0, np.ones((B, T, N, HV), int), TypeError, ["out_a", "int64"]),
        (0, F32(1), ValueError, ["out_a", "[..., Hv]"]),
        (1, random(1, B, T, N, dtype=F64), TypeError, ["lse_a", "float64", "float32"]),
        (1, random(1, B, T, HV), ValueError, ["lse_a", (B, T, HV), (B, T, N), "out_a"]),
        (2, random(2, B, T, N, HV, dtype=F64), TypeError, ["out_b", "float64", "float32"]),
        (2, random(2, B, T, N, 5), ValueError, ["out_b", (B, T, N, 5), (B, T, N, HV)]),
        (3, random(3, B, T, N, 1), ValueError, ["lse_b", (B, T, N, 1), (B, T, N)]),
        (3, np.ones((B, T, N), np.float16), TypeError, ["lse_b", "float16"]),
        (4, random(2, B, N, T, HV), ValueError, ["more[0]", (B, N, T, HV), (B, T, N, HV)]),
        (5, random(2, B, N, T), ValueError, ["more[1]", (B, N, T), (B, T, N), "more[0]"]),
        (1, masked(random(1, B, T, N)), TypeError, ["lse_a", "mask"]),
    ],
)
def test_merge_refuses(place, value, error, names):
    parts = [*states(), *states()[:2]]
    parts[place] = value
    refused(lambda: reference.merge_states(*parts), error, *names)


def test_merge_refuses_an_out_without_lse():
    refused(lambda: reference.merge_states(*states(), states()[0]), TypeError, "more", "pairs", "1")
    refused(lambda: reference.merge_states(*states()[:3]), TypeError, "lse_b")


# ------------------------------------------------------------------ attention_weights


def weights_arguments():
    return {"q": random(0, B, T, N, H), "k": random(1, B, S, K, H), "lse": random(2, B, T, N)}


WEIGHTS_ARGUMENT_FAULTS = {
    "q": ({"q": random(0, B, T, N)}, ValueError, ["k", "[S, K, H]"]),
    "k": ({"k": random(1, B, S, K, 7)}, ValueError, ["k", "H = 7"]),
    "mixture": ({"k": random(1, B, S, K, H, dtype=F64)}, TypeError, ["k", "float64"]),
    "shape of lse": ({"lse": random(2, B, N, T)}, ValueError, ["lse", (B, N, T), (B, T, N)]),
    "lse of float64": ({"lse": random(2, B, T, N, dtype=F64)}, TypeError, ["lse", "float64"]),
    "no lse": ({"lse": None}, TypeError, ["lse"]),
    "one row": ({"rows": 1}, ValueError, ["rows", "[R]", "()"]),
    "float rows": ({"rows": [1.0]}, TypeError, ["rows", "float64"]),
    "boolean rows": ({"rows": np.ones(T, bool)}, TypeError, ["rows", "bool"]),
    "negative row": ({"rows": [0, -1]}, ValueError, ["rows", "T - 1 = 2", "-1 at index 1"]),
    "row beyond T": ({"rows": [3]}, ValueError, ["rows", "T - 1 = 2", "3 at index 0"]),
    "reduce": ({"reduce": "rows"}, ValueError, ["reduce", "'queries'", "'rows'"]),
    "reduce an axis": ({"reduce": -1}, TypeError, ["reduce", "'keys'", "-1"]),
    "mask": ({"mask": np.ones((T, S))}, TypeError, ["mask", "bias"]),
    "bias": ({"bias": np.ones((S, T))}, ValueError, ["bias", (S, T), (B, N, T, S)]),
    "softcap": ({"softcap": 0}, ValueError, ["softcap", "0"]),
    "scale": ({"scale": np.nan}, ValueError, ["scale", "nan"]),
    "causal": ({"is_causal": True}, ValueError, ["is_causal", "query_offset"]),
    "window": ({"local_window_size": -2}, ValueError, ["local_window_size", "-2"]),
    "slopes": (
        {"alibi_slopes": np.ones(3), "query_offset": 0},
        ValueError,
        ["alibi_slopes", (3,), (N,)],
    ),
    "lengths": ({"query_seq_lengths": [4, 1]}, ValueError, ["query_seq_lengths", "4"]),
    "sinks": ({"sinks": np.ones(N)}, TypeError, ["sinks"]),
    "threads": ({"num_threads": 0}, ValueError, ["num_threads", "0"]),
    "shape of out": (
        {"out": np.full((B, N, T, 4), 7, F32)},
        ValueError,
        ["out", (B, N, T, 4), (B, N, T, S)],
    ),
    "out of the rows": (
        {"out": np.full((B, N, T, S), 7, F32), "rows": [0]},
        ValueError,
        ["out", (B, N, 1, S)],
    ),
    "out summed over queries": (
        {"out": np.full((B, N, T), 7, F32), "reduce": "queries"},
        ValueError,
        ["out", (B, N, S)],
    ),
    "out summed over keys": (
        {"out": np.full((B, N, S), 7, F32), "reduce": "keys"},
        ValueError,
        ["out", (B, N, T)],
    ),
    "out of float64": ({"out": np.full((B, N, T, S), 7.0)}, TypeError, ["out", "float64"]),
}


@pytest.mark.parametrize(
    "given, error, names", WEIGHTS_ARGUMENT_FAULTS.values(), ids=WEIGHTS_ARGUMENT_FAULTS
)
def test_weights_refuse(given, error, names):
    arguments = {**weights_arguments(), **given}
    refused(lambda: reference.attention_weights(**arguments), error, *names)
    if "out" in given:
        assert (given["out"] == 7).all()


# ------------------------------------------------------------------ smaller checks


class NoIndex:
    def __index__(self):
        raise RuntimeError("no data")

    def __repr__(self):
        return "something without data"


@pytest.mark.parametrize("name", ["num_threads", "local_window_size"])
def test_errors_of_an_index_name_the_argument(name):
    q = random(0, 3, 1, 4)
    with pytest.raises(TypeError, match=f"^{name} must be an int.*, not something") as raised:
        dot_product_attention(q, q, q, **{name: NoIndex()})
    assert "no data" in str(raised.value.__cause__)


def test_an_empty_list_holds_no_floats():
    q = random(0, 0, 3, 1, 4)
    for name in ("query_seq_lengths", "key_value_seq_lengths", "query_offset"):
        assert dot_product_attention(q, q, q, **{name: []}).shape == q.shape
        with pytest.raises(TypeError, match=f"^{name} must hold integers, not float64"):
            dot_product_attention(q, q, q, **{name: np.array([])})


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


# ------------------------------------------------------------------ the block and norms

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
    "RMSNorm of another width": (
        {"norm": RMSNorm(random(0, 9))},
        ValueError,
        ["norm.weight", (9,), (D,)],
    ),
    "norm as text": ({"norm": "post"}, TypeError, ["norm", "LayerNorm", "RMSNorm", "str"]),
    "unused norm of another width": (
        {"norm": LayerNorm(random(0, 9)), "norm_position": None},
        ValueError,
        ["norm.weight", (9,), (D,)],
    ),
    "position of the norm": (
        {"norm_position": "before"},
        ValueError,
        ["norm_position", "'pre'", "'post'", "None", "'before'"],
    ),
    "norm for its position": (
        {"norm_position": LayerNorm()},
        TypeError,
        ["norm_position", "'pre'", "LayerNorm"],
    ),
    "q_norm as text": ({"q_norm": "rms"}, TypeError, ["q_norm", "LayerNorm", "RMSNorm", "str"]),
    "k_norm as a flag": ({"k_norm": True}, TypeError, ["k_norm", "RMSNorm", "bool"]),
    "q_norm of the model's width": (
        {"q_norm": RMSNorm(random(0, D))},
        ValueError,
        ["q_norm.weight", (D,), (H,)],
    ),
    "k_norm of another width": (
        {"k_norm": LayerNorm(bias=random(0, 9))},
        ValueError,
        ["k_norm.bias", (9,), (H,)],
    ),
    "k_norm of float64": ({"k_norm": RMSNorm(np.ones(H))}, TypeError, ["k_norm.weight", "float64"]),
    "rope as a number": ({"rope": 10000.0}, TypeError, ["rope", "Rope", "float"]),
    "rope of more columns": (
        {"rope": Rope(rotary_dim=H + 2)},
        ValueError,
        ["rope.rotary_dim", H + 2, f"H = {H}"],
    ),
    "rope of odd heads": (
        {"rope": Rope(), "w_q": random(0, D, N, 7), "w_k": random(0, D, K, 7)},
        ValueError,
        ["rope.rotary_dim", "H = 7"],
    ),
    "softcap": ({"softcap": 0}, ValueError, ["softcap", "0"]),
    "softcap as text": ({"softcap": "30"}, TypeError, ["softcap", "'30'"]),
    "window": ({"local_window_size": (1, -1)}, ValueError, ["local_window_size", "-1"]),
    "sinks by key head": ({"sinks": random(0, K)}, ValueError, ["sinks", (K,), (N,)]),
    "integer sinks": ({"sinks": np.zeros(N, int)}, TypeError, ["sinks", "int64"]),
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
    "bias of bool": ({"bias": np.ones((T, S), bool)}, TypeError, ["bias", "bool", "mask"]),
    "shape of bias": ({"bias": random(0, N, S, T)}, ValueError, ["bias", (N, S, T), (B, N, T, S)]),
    "mask of numbers": ({"mask": random(0, T, S)}, TypeError, ["mask", "float32", "bias"]),
    "heads of mask": (
        {"mask": np.ones((B, K, T, S), bool)},
        ValueError,
        ["mask", (B, K, T, S), (B, N, T, S)],
    ),
    "offset": ({"query_offset": 0.5}, TypeError, ["query_offset", "float64"]),
    "query lengths": (
        {"query_seq_lengths": ints([4, 0])},
        ValueError,
        ["query_seq_lengths", "3", "4"],
    ),
    "key lengths": (
        {"key_value_seq_lengths": ints([6, 0])},
        ValueError,
        ["key_value_seq_lengths", "5", "6 at index 0"],
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


@pytest.mark.parametrize(
    "offset, names",
    [
        (None, ["rope", "query_offset", f"T = {T}", f"S = {S}"]),
        ([0, -1], ["query_offset", "rope", "[0, -1]"]),
        (2**53, ["query_offset", "2**53", 2**53]),
    ],
)
def test_a_block_with_rope_needs_positions(offset, names):
    arguments = {**block_weights(), "x": random(0, B, T, D), "context": random(1, B, S, D)}
    refused(
        lambda: reference.attention_block(**arguments, rope=Rope(), query_offset=offset),
        ValueError,
        *names,
    )


def test_out_of_a_block_may_not_overlap_its_bias_or_mask():
    memory = np.zeros((B, T, D), F32)
    bias, mask = memory[:, :, :T], memory.view(bool)[:, :, :T]
    for name, array in (("bias", bias), ("mask", mask)):
        given = {"x": random(0, B, T, D), "out": memory, name: array[:, None]}
        for function in (attention_block, reference.attention_block):
            call = lambda f=function, given=given: f(**block_weights(), **given)  # noqa: E731
            refused(call, ValueError, "out overlaps", name)


def test_a_block_takes_what_changes_nothing():
    x = random(9, B, T, D)
    expected = attention_block(x, **block_weights(), norm=None)
    for options in (
        {"norm_position": None},
        {"norm": None, "norm_position": "pre", "local_window_size": (None, None)},
    ):
        assert same_bits(attention_block(x, **block_weights(), **options), expected)
        block = AttentionBlock(**block_weights(), **options)
        assert block.profile(x)[1][-1][0] == "project output"


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
    "rows of w_q": (
        {"w_q": random(0, N * H + 1, D)},
        ValueError,
        ["w_q", "num_heads = 4", (33, D)],
    ),
    "heads forgotten": (
        {"num_kv_heads": None},
        ValueError,
        ["w_k", "[K * H, Dc] = (32, 16)", "K = num_kv_heads = 4, as num_heads", (16, D)],
    ),
    "heads forgotten, of another width": (
        {"num_kv_heads": None, "w_k": random(0, 18, D)},
        ValueError,
        ["w_k", "[K * H, Dc]", "K = num_kv_heads = 4, as num_heads", (18, D)],
    ),
    "input of w_k": ({"w_k": random(0, K * H, 9)}, ValueError, ["w_k", (K * H, 9), (K * H, D)]),
    "output of w_o": ({"w_o": random(0, 9, N * HV)}, ValueError, ["w_o", (9, N * HV), (D, 24)]),
    "empty w_q": ({"w_q": random(0, 0, D)}, ValueError, ["w_q", "[N * H, D]", (0, D)]),
    "axes of w_k": ({"w_k": random(0, K, H, D)}, ValueError, ["w_k", (K, H, D)]),
    "columns of w_o": ({"w_o": random(0, D, 23)}, ValueError, ["w_o", "24", (D, 23)]),
    "b_q": ({"b_q": random(0, 9)}, ValueError, ["b_q", (9,), "(32,)"]),
    "b_k by head": ({"b_k": random(0, K, H)}, ValueError, ["b_k", (K, H), "(16,)"]),
    "b_o": ({"b_o": random(0, 9)}, ValueError, ["b_o", (9,), "(16,)"]),
    "b_qkv alone": ({"b_qkv": random(0, 64)}, TypeError, ["b_qkv", "w_qkv"]),
    "both": ({"w_qkv": random(0, 64, D)}, TypeError, ["w_qkv", "w_q"]),
    "rows of w_qkv": ({**PACKED, "w_qkv": random(0, 65, D)}, ValueError, ["w_qkv", "8", (65, D)]),
    "number as w_qkv": ({**PACKED, "w_qkv": 0.5}, ValueError, ["w_qkv", "8", ()]),
    "no rows of w_qkv": ({**PACKED, "w_qkv": np.ones((0, D))}, ValueError, ["w_qkv", "8", (0, D)]),
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
    if "bias" not in given:
        refused(lambda: RMSNorm(**given), error, *names)
        refused(lambda: reference.rms_norm(random(2, B, D), **given), error, *names)


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
def test_norms_refuse_inputs(given, error, names):
    norm, rms_norm = LayerNorm(random(0, D), random(1, D)), RMSNorm(random(0, D))
    arguments = {
        "x": random(2, B, D),
        "residual": random(3, B, D),
        "out": np.full((B, D), 7, F32),
        **given,
    }
    for call in (
        norm,
        lambda **given: reference.layer_norm(**given, **vars(norm)),
        rms_norm,
        lambda **given: reference.rms_norm(**given, weight=rms_norm.weight, eps=rms_norm.eps),
    ):
        refused(lambda f=call: f(**arguments), error, *names)
    assert arguments["out"] is None or (arguments["out"] == 7).all()


@pytest.mark.parametrize("norm", [LayerNorm(), RMSNorm()], ids=repr)
def test_output_of_a_norm_may_not_overlap_its_inputs(norm):
    x, residual = random(0, B, D), random(1, B, D)
    for name, array in (("x", x), ("residual", residual)):
        refused(lambda a=array: norm(x, residual=residual, out=a), ValueError, "overlaps", name)


# ------------------------------------------------------------------ rotary position embedding


ROPE_FAULTS = {
    "theta of 1": ({"theta": 1.0}, ValueError, ["theta", "1.0"]),
    "theta as text": ({"theta": "1e4"}, TypeError, ["theta", "'1e4'"]),
    "infinite theta": ({"theta": np.inf}, ValueError, ["theta", "inf"]),
    "odd rotary_dim": ({"rotary_dim": 3}, ValueError, ["rotary_dim", "even", "3"]),
    "rotary_dim of 0": ({"rotary_dim": 0}, ValueError, ["rotary_dim", "0"]),
    "rotary_dim as float": ({"rotary_dim": 4.0}, TypeError, ["rotary_dim", "4.0"]),
    "interleaved as a number": ({"interleaved": 1}, TypeError, ["interleaved", "1"]),
    "scaling as a dict": (
        {"scaling": {"type": "linear"}},
        TypeError,
        ["scaling", "dict", "RopeScaling.linear", "from_config"],
    ),
}

ROPE_CALL_FAULTS = {
    "integer x": ({"x": np.ones((B, T, N, H), int)}, TypeError, ["x", "int64"]),
    "x of two axes": ({"x": random(0, T, H)}, ValueError, ["x", "[T, N, H]", (T, H)]),
    "odd H": ({"x": random(0, B, T, N, 7), "out": None}, ValueError, ["rotary_dim", "H = 7"]),
    "rotary_dim above H": ({"rotary_dim": 10}, ValueError, ["rotary_dim", "10", "H = 8"]),
    "positions as floats": ({"positions": np.zeros(T)}, TypeError, ["positions", "float64"]),
    "positions as booleans": ({"positions": np.zeros(T, bool)}, TypeError, ["positions", "bool"]),
    "one position": ({"positions": 3}, ValueError, ["positions", "()", (T,), (B, T)]),
    "positions of other rows": ({"positions": [0, 1]}, ValueError, ["positions", (2,), (T,)]),
    "positions of one sequence": (
        {"positions": np.zeros((1, T), int)},
        ValueError,
        ["positions", (1, T), (B, T)],
    ),
    "positions of a batch that x lacks": (
        {"x": random(0, T, N, H), "positions": np.zeros((B, T), int), "out": None},
        ValueError,
        ["positions", (B, T), (T,)],
    ),
    "negative position": ({"positions": [0, -1, 2]}, ValueError, ["positions", "-1 at index 1"]),
    "negative position of a sequence": (
        {"positions": [[0, 1, 2], [0, 1, -2]]},
        ValueError,
        ["positions", "-2 at index (1, 2)"],
    ),
    "enormous position": ({"positions": [0, 2**53 + 1, 2]}, ValueError, ["positions", "2**53"]),
    "enormous unsigned": (
        {"positions": np.full(T, 2**64 - 1, np.uint64)},
        ValueError,
        ["positions", 2**64 - 1],
    ),
    "masked positions": ({"positions": masked(np.arange(T))}, TypeError, ["positions", ".filled"]),
    "shape of out": ({"out": np.full((T, N, H), 7, F32)}, ValueError, ["out", (T, N, H)]),
    "out of float64": ({"out": np.full((B, T, N, H), 7, F64)}, TypeError, ["out", "float64"]),
    "out as a list": ({"out": [0.0]}, TypeError, ["out", "list"]),
    "read-only out": ({"out": read_only(B, T, N, H)}, ValueError, ["out", "read-only"]),
    "out on itself": ({"out": on_itself(B, T, N, H)}, ValueError, ["out", "memory", "each"]),
    "threads": ({"num_threads": 0}, ValueError, ["num_threads", "0"]),
}


@pytest.mark.parametrize("given, error, names", ROPE_FAULTS.values(), ids=ROPE_FAULTS)
def test_rope_refuses_parameters(given, error, names):
    refused(lambda: Rope(**given), error, *names)
    for call in (apply_rope, reference.apply_rope):
        refused(lambda f=call: f(random(0, T, N, H), range(T), **given), error, *names)


@pytest.mark.parametrize("given, error, names", ROPE_CALL_FAULTS.values(), ids=ROPE_CALL_FAULTS)
def test_rope_refuses_inputs(given, error, names):
    arguments = {
        "x": random(0, B, T, N, H),
        "positions": range(T),
        "out": np.full((B, T, N, H), 7, F32),
        **given,
    }
    for call in (apply_rope, reference.apply_rope):
        refused(lambda f=call: f(**arguments), error, *names)
    assert not isinstance(arguments["out"], np.ndarray) or (arguments["out"] == 7).all()


def test_rotated_heads_may_lie_on_x_but_not_across_it():
    for call in (apply_rope, reference.apply_rope):
        memory = random(0, T + 1, N, H)
        refused(
            lambda f=call, m=memory: f(m[1:], range(T), out=m[:-1]), ValueError, "overlaps", "x"
        )
        backwards = memory[1:][::-1]
        refused(lambda f=call, m=memory, b=backwards: f(m[1:], range(T), out=b), ValueError, "x")
        expected = call(memory[1:].copy(), range(T))
        np.testing.assert_array_equal(call(memory[1:], range(T), out=memory[1:]), expected)


SCALING_FAULTS = {
    "factor below 1": (lambda: RopeScaling.linear(0.5), ValueError, ["factor", "1", "0.5"]),
    "factor as text": (lambda: RopeScaling.ntk("2"), TypeError, ["factor", "'2'"]),
    "factor as NaN": (lambda: RopeScaling.yarn(np.nan, 64), ValueError, ["factor", "nan"]),
    "length of 0": (
        lambda: RopeScaling.yarn(2, 0),
        ValueError,
        ["original_max_position", "between 1 and 2**53", "0"],
    ),
    "length as float": (
        lambda: RopeScaling.llama3(8, 1, 4, 8192.0),
        TypeError,
        ["original_max_position", "8192.0"],
    ),
    "slow above fast": (
        lambda: RopeScaling.yarn(2, 64, beta_slow=40),
        ValueError,
        ["beta_slow", "40", "beta_fast", "32"],
    ),
    "attention of 0": (
        lambda: RopeScaling.yarn(2, 64, attention_factor=0),
        ValueError,
        ["attention_factor", "positive", "0"],
    ),
    "truncate as a number": (
        lambda: RopeScaling.yarn(2, 64, truncate=1),
        TypeError,
        ["truncate", "1"],
    ),
    "low above high": (
        lambda: RopeScaling.llama3(8, 4, 1, 8192),
        ValueError,
        ["low_freq_factor", "4", "high_freq_factor", "1"],
    ),
    "unknown kind": (
        lambda: Rope.from_config({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
        ValueError,
        ["'dynamic'", "yarn", "llama3"],
    ),
    "no factor": (
        lambda: Rope.from_config({"rope_scaling": {"type": "linear"}}),
        ValueError,
        ["factor"],
    ),
    "no length": (
        lambda: Rope.from_config({"rope_scaling": {"type": "yarn", "factor": 2.0}}),
        ValueError,
        ["max_position_embeddings"],
    ),
    "no width": (
        lambda: Rope.from_config({"partial_rotary_factor": 0.5, "hidden_size": 64}),
        ValueError,
        ["num_attention_heads"],
    ),
    "length beyond any": (
        lambda: RopeScaling.llama3(8, 1, 4, 10**400),
        ValueError,
        ["original_max_position", "2**53"],
    ),
    "infinite share": (
        lambda: Rope.from_config({"partial_rotary_factor": np.inf, "head_dim": 8}),
        ValueError,
        ["partial_rotary_factor", "inf"],
    ),
    "share above 1": (
        lambda: Rope.from_config({"partial_rotary_factor": 1.5, "head_dim": 8}),
        ValueError,
        ["partial_rotary_factor", "1.5"],
    ),
    "share of a text": (
        lambda: Rope.from_config({"partial_rotary_factor": 0.5, "head_dim": "8"}),
        TypeError,
        ["head_dim", "'8'"],
    ),
    "heads of no number": (
        lambda: Rope.from_config(
            {"partial_rotary_factor": 0.5, "hidden_size": 8, "num_attention_heads": 0}
        ),
        ValueError,
        ["num_attention_heads", "0"],
    ),
    "factor of YaRN as text": (
        lambda: Rope.from_config(
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": "2",
                    "original_max_position_embeddings": 8,
                    "mscale": 1,
                    "mscale_all_dim": 1,
                }
            }
        ),
        TypeError,
        ["factor", "'2'"],
    ),
    "negative mscale": (
        lambda: Rope.from_config(
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 2,
                    "original_max_position_embeddings": 8,
                    "mscale": 1,
                    "mscale_all_dim": -10 / np.log(2),
                }
            }
        ),
        ValueError,
        ["mscale_all_dim"],
    ),
    "kinds of layers": (
        lambda: Rope.from_config({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}),
        ValueError,
        ["rope_parameters", "full_attention"],
    ),
}


@pytest.mark.parametrize("call, error, names", SCALING_FAULTS.values(), ids=SCALING_FAULTS)
def test_rope_scalings_refuse(call, error, names):
    refused(call, error, *names)


# ------------------------------------------------------------------ arguments with their own code


class Claims(np.ndarray):
    """One element, that claims to be any array."""

    @property
    def shape(self):
        return self.claimed


def claims(*shape):
    array = np.zeros((1,) * len(shape), F32).view(Claims)
    array.claimed = shape
    return array


OUTPUTS = {
    "attention": lambda out: dot_product_attention(
        *[random(i, B, T, N, H) for i in range(3)], out=out
    ),
    "varlen": lambda out: varlen_attention(
        *[random(i, T, N, H) for i in range(3)], [0, T], [0, T], out=out
    ),
    "weights": lambda out: attention_weights(
        *[random(i, B, T, N, H) for i in range(2)], random(2, B, T, N), out=out
    ),
    "rope": lambda out: apply_rope(random(0, B, T, N, H), range(T), out=out),
    "norm": lambda out: LayerNorm()(random(0, B, T, D), out=out),
    "block": lambda out: attention_block(
        random(0, B, T, D),
        *[random(i, *shape) for i, shape in enumerate([(D, N, H)] * 3 + [(N, H, D)])],
        out=out,
    ),
}
OUTPUT_SHAPES = {
    "attention": (B, T, N, H),
    "varlen": (T, N, H),
    "weights": (B, N, T, T),
    "rope": (B, T, N, H),
    "norm": (B, T, D),
    "block": (B, T, D),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_is_what_its_memory_is_not_what_it_claims(name):
    shape = OUTPUT_SHAPES[name]
    refused(lambda: OUTPUTS[name](claims(*shape)), ValueError, "out has shape (1, ")
    out = np.zeros(shape, F32).view(np.recarray)
    assert OUTPUTS[name](out) is out
    assert out.any()


class Meddler:
    """An argument that changes another one when it is asked for its value."""

    def __init__(self, change, value):
        self.change, self.value = change, value

    def __array__(self, dtype=None, copy=None):
        self.change()
        return np.asarray(self.value)


def test_an_array_that_changes_its_shape_meanwhile_is_refused_or_what_it_was():
    def reshape(array, *shape):
        array.resize(shape, refcheck=False)

    arrays = {name: random(i, 1, 6, 2, 8) for i, name in enumerate("qkv")}
    arrays["out"] = np.zeros((1, 6, 2, 8), F32)
    expected = dot_product_attention(**arrays, scale=0.5).copy()
    for name, shape in (("q", (6, 2, 8)), ("k", (1, 8, 2, 6)), ("v", (1,) * 31 + (96,))):
        given = {n: a.copy() for n, a in arrays.items()}
        late = Meddler(lambda a=given[name], s=shape: reshape(a, *s), 0.5)
        words = "more axes" if name == "v" else "q, k or v has changed its shape"
        refused(lambda g=given, s=late: dot_product_attention(**g, scale=s), ValueError, words)
        given = {n: a[0].copy() for n, a in arrays.items()}
        late = Meddler(lambda a=given[name], s=shape: reshape(a, *s), 0.5)
        np.testing.assert_array_equal(dot_product_attention(**given, scale=late), expected[0])
    given = {n: a.copy() for n, a in arrays.items()}
    late = Meddler(lambda: reshape(given["out"], 96), 0.5)
    np.testing.assert_array_equal(dot_product_attention(**given, scale=late), expected.ravel())
    x = random(3, 1, 6, 2, 8)
    late = Meddler(lambda: reshape(x, 1, 1, 1, 96), list(range(6)))
    expected = apply_rope(x.copy(), range(6))
    np.testing.assert_array_equal(apply_rope(x, late), expected)


def test_lengths_that_change_meanwhile_are_what_they_were():
    q, k, v = random(0, 2, 3, 2, 8), random(1, 2, 5, 2, 8), random(2, 2, 5, 2, 8)
    for name in ("query_seq_lengths", "key_value_seq_lengths", "query_offset"):
        lengths = np.array([1, 3])
        given = {name: lengths} | ({"is_causal": True} if name == "query_offset" else {})
        expected = dot_product_attention(q, k, v, **given)
        late = Meddler(lambda a=lengths: a.fill(1 << 40), np.zeros(2, F32))
        got = dot_product_attention(q, k, v, sinks=late, **given)
        assert got.shape == expected.shape
        given[name] = np.array([1, 3])
        expected = dot_product_attention(q, k, v, sinks=np.zeros(2, F32), **given)
        np.testing.assert_array_equal(got, expected)


def test_dtypes_without_a_byte_order_are_refused_by_name():
    if not hasattr(np.dtypes, "StringDType"):
        pytest.skip("this NumPy has no such dtype")
    text = np.full((B, T, N, H), "1.0", np.dtypes.StringDType())
    refused(lambda: dot_product_attention(text, text, text), TypeError, "q must be", "StringDType")


def test_signalling_nans_are_refused_like_others():
    """Their conversion is an invalid operation, of which NumPy would warn."""
    nan = np.array([0x7FA00000], np.uint32).view(F32)
    q = random(0, 1, 3, 1, 8)
    refused(lambda: dot_product_attention(q, q, q, sinks=nan), ValueError, "sinks")
    refused(lambda: dot_product_attention(q, q, q, alibi_slopes=nan), ValueError, "alibi_slopes")
    q, nan = q.astype(F64), nan  # from float32 to float64
    refused(lambda: dot_product_attention(q, q, q, sinks=nan), ValueError, "sinks")
    for bits in (4, 8):
        refused(
            lambda bits=bits: QuantizedMatrix.from_float(nan[None], bits=bits),
            ValueError,
            "weights",
        )


@pytest.mark.parametrize("name, size", [("bfloat16", 0), ("float16", 0), ("bfloat", 2)])
def test_what_only_calls_itself_a_half_is_refused(name, size):
    fields = [("bits", np.uint8, (size,))] if size else []
    dtype = np.dtype((type(name, (np.void,), {}), fields))
    x = np.empty((1, 2, 2, 8), dtype)
    with pytest.raises(TypeError, match="q must be float16, bfloat16, float32 or float64"):
        dot_product_attention(x, x, x)
    with pytest.raises(TypeError, match="dtype"):
        KVCache(1, 4, 2, 8, dtype=dtype)


def test_values_may_not_change_the_heads_of_queries():
    q, k = np.ones((1, 4, 6, 8), np.float32), np.ones((1, 4, 3, 8), np.float32)

    class Values:
        def __array__(self, dtype=None, copy=None):
            q.resize((1, 6, 4, 8), refcheck=False)
            return k

    with pytest.raises(ValueError, match="changed its shape"):
        dot_product_attention(q, k, Values())


def test_what_loops_point_to_stays():
    norm = LayerNorm(np.ones(8), np.zeros(8))
    with pytest.raises(AttributeError, match="does not change"):
        del norm.weight
    with pytest.raises(ValueError, match="resize"):
        norm.weight.resize((1000,), refcheck=False)
    with pytest.raises(ValueError, match="WRITEABLE"):
        norm.weight.flags.writeable = True


def test_tiny_options_raise_no_flag():
    q = np.ones((1, 2, 2, 8), np.float32)
    with np.errstate(all="raise"):
        tiny = np.full(2, 1e-300)
        dot_product_attention(q, q, q, sinks=tiny, alibi_slopes=tiny)


def test_an_array_that_cannot_be_made_is_named():
    class Text:
        def __array__(self, dtype=None, copy=None):
            raise UnicodeDecodeError("utf-8", b"x", 0, 1, "no")

    with pytest.raises(ValueError, match=r"^q .*Text.* gives no array"):
        dot_product_attention(Text(), Text(), Text())
