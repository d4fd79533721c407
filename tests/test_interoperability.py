"""Arrays of other libraries, by the protocols that NumPy and they share."""

import functools
import sys
import warnings

import numpy as np
import pytest

import tileattn
from tileattn import reference
from tileattn._values import as_array
from tileattn.cost import attention_block_cost

pytestmark = pytest.mark.any_isa

B, T, N, K, H, D = 1, 5, 4, 2, 8, 16


def random(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


class HasArray:
    def __init__(self, array):
        self.array = np.asarray(array)

    def __array__(self, dtype=None, copy=None):
        return self.array


class HasInterface:
    def __init__(self, array):
        self.array = np.asarray(array)
        self.__array_interface__ = self.array.__array_interface__


class HasDLPack:
    """Nothing but DLPack; NumPy before 2.1 exports nothing that is read-only."""

    def __init__(self, array):
        self.array = np.asarray(array)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)


class OldDLPack(HasDLPack):
    """As it was before it had versions."""

    def __dlpack__(self, stream=None):
        return self.array.__dlpack__(stream=stream)


class Sequence(HasDLPack):
    """Which NumPy would read number by number."""

    def __len__(self):
        raise AssertionError("it is to be read by DLPack")

    def __getitem__(self, _):
        raise AssertionError("it is to be read by DLPack")


HOLDERS = [HasArray, HasInterface, HasDLPack, OldDLPack, Sequence]


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize(
    "view",
    [
        np.s_[:],
        np.s_[:, ::2],
        np.s_[::-1, :, 1:],
        np.s_[..., ::3],
        np.s_[:, :0],
        np.s_[0, 0, 0, ...],
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int64, np.bool_])
def test_memory_is_shared(holder, view, dtype):
    array = np.ones((3, 4, 5), dtype)[view]
    read = as_array("q", holder(array))
    assert type(read) is np.ndarray
    assert (read.dtype, read.shape) == (array.dtype, array.shape)
    if array.size:
        assert read.strides == array.strides
        assert read.ctypes.data == array.ctypes.data


def test_what_is_repeated_is_not_copied():
    array = np.broadcast_to(np.float32(1), (3, 4))
    read = as_array("bias", HasArray(array))
    assert read.strides == (0, 0)
    assert np.shares_memory(read, array)


@pytest.mark.parametrize("holder", [HasArray, HasInterface, HasDLPack])
def test_read_only_memory_is_read(holder):
    array = random(0, 3, 4)
    array.flags.writeable = False
    if holder is HasDLPack and np.lib.NumpyVersion(np.__version__) < "2.1.0":
        pytest.skip("this NumPy has no read-only DLPack to export")
    read = as_array("q", holder(array))
    assert not read.flags.writeable
    assert np.shares_memory(read, array)


def functions():
    """By name: a function of arrays, and what it is given."""
    q, k, v = random(0, B, T, N, H), random(1, B, T, K, H), random(2, B, T, K, H)
    x, row = random(3, B, T, D), random(4, D)
    w_q, w_k, w_v, w_o = (
        random(i, *shape) for i, shape in enumerate([(D, N, H), (D, K, H), (D, K, H), (N, H, D)])
    )
    weights = {"w_q": w_q, "w_k": w_k, "w_v": w_v, "w_o": w_o}
    biases = {"b_q": w_q[0], "b_k": w_k[0], "b_v": w_v[0], "b_o": w_o[0, 0]}
    attention = {
        "q": q,
        "k": k,
        "v": v,
        "bias": random(5, N, T, T),
        "mask": np.tri(T, dtype=bool),
        "query_offset": np.array([0]),
        "query_seq_lengths": np.array([T - 1]),
        "key_value_seq_lengths": np.array([T - 2]),
        "alibi_slopes": random(6, N),
        "sinks": random(7, N),
    }
    starts = np.array([0, 2, T])
    varlen = {"q": q[0], "k": k[0], "v": v[0], "cu_seqlens_q": starts, "cu_seqlens_k": starts}
    states = {"out_a": q, "lse_a": q[..., 0], "out_b": q[::-1], "lse_b": q[..., 1]}
    of_weights = {"q": q, "k": k, "lse": q[..., 0], "rows": np.array([0, 3])}
    rotated = {"x": q, "positions": np.arange(T)}
    normed = {"x": x, "residual": x[:, ::-1]}
    parameters = {"weight": row, "bias": row[::-1]}
    linear = {name: w.reshape(D, -1).T for name, w in weights.items() if name != "w_o"}
    linear["w_o"] = w_o.reshape(-1, D).T
    stacked = np.concatenate([linear.pop(name) for name in ("w_q", "w_k", "w_v")])
    integers = np.arange(-8, 8, dtype=np.int8).reshape(1, 16)
    scales = np.ones((1, 1), np.float16)

    def cached(k, v, q, lengths, index, seq_lengths):
        cache = tileattn.KVCache(B, 2 * T, num_kv_heads=K, head_dim=H)
        cache.append(k, v, seq_lengths=seq_lengths)
        out = cache.attend(q)
        cache.truncate(lengths)
        cache.reorder(index)
        return out, cache.keys[:, :2]

    def made(x, **arguments):
        return tileattn.AttentionBlock(**arguments)(x)

    def crossing(context, **arguments):
        block = tileattn.AttentionBlock(**arguments)
        return block(x, context=context), block(x, context=block.context_cache(context))

    def from_linear(w_qkv, b_qkv, w_o):
        heads = {"num_heads": N, "num_kv_heads": K}
        return tileattn.AttentionBlock.from_linear(w_qkv=w_qkv, b_qkv=b_qkv, w_o=w_o, **heads)(x)

    def masked(mask, bias, key_value_seq_lengths):
        return tileattn.attention_block(
            x, **weights, mask=mask, bias=bias, key_value_seq_lengths=key_value_seq_lengths
        )

    def norm(x, residual, **parameters):
        return tileattn.LayerNorm(**parameters)(x, residual=residual)

    def rms_norm(x, weight):
        return tileattn.RMSNorm(weight)(x)

    def quantized(values, scales):
        return tileattn.QuantizedMatrix(values, scales, bits=4).dequantize()

    def rounded(weights):
        return tileattn.QuantizedMatrix.from_float(weights).dequantize()

    def plan(**arguments):
        return np.array(str(tileattn.explain(**arguments)))

    def cost(query_offset, key_value_seq_lengths):
        lengths = {"key_value_seq_lengths": key_value_seq_lengths}
        total = attention_block_cost(
            B, T, D, N, K, H, is_causal=True, query_offset=query_offset, **lengths
        )
        return np.array(total.matmul_flops)

    def seen(mask, bias, query_offset, query_lengths, key_value_lengths):
        return reference.visible(
            B,
            T,
            T,
            is_causal=True,
            mask=mask,
            bias=bias,
            query_offset=query_offset,
            query_lengths=query_lengths,
            key_value_lengths=key_value_lengths,
        )

    visibility = {name: attention[name] for name in ("mask", "bias", "query_offset")}
    lengths = {"query_lengths": np.array([3]), "key_value_lengths": np.array([4])}
    planned = {name: a for name, a in attention.items() if name != "sinks"}
    every = {
        "KVCache": (
            cached,
            {"k": k, "v": v, "q": q}
            | {"lengths": np.array([2]), "index": np.array([0]), "seq_lengths": np.array([T])},
        ),
        "AttentionBlock": (made, weights | biases | {"x": x, "sinks": random(8, N)}),
        "AttentionBlock context": (crossing, weights | {"context": x[:, :3]}),
        "from_linear": (
            from_linear,
            {"w_qkv": stacked, "b_qkv": stacked[:, 0], "w_o": linear["w_o"]},
        ),
        "block's visibility": (
            masked,
            {"mask": attention["mask"], "bias": attention["bias"]}
            | {"key_value_seq_lengths": np.array([4])},
        ),
        "LayerNorm": (norm, normed | parameters),
        "RMSNorm": (rms_norm, {"x": x, "weight": row}),
        "QuantizedMatrix": (quantized, {"values": integers, "scales": scales}),
        "from_float": (rounded, {"weights": w_o[0]}),
        "explain": (plan, planned),
        "cost": (cost, {"query_offset": np.array([0]), "key_value_seq_lengths": np.array([3])}),
        "visible": (seen, visibility | lengths),
        "reference.layer_norm": (reference.layer_norm, normed | parameters),
        "reference.rms_norm": (reference.rms_norm, {"x": x, "weight": row}),
    }
    for prefix, module in (("", tileattn), ("reference.", reference)):
        every |= {
            f"{prefix}dot_product_attention": (module.dot_product_attention, attention),
            f"{prefix}varlen_attention": (module.varlen_attention, varlen),
            f"{prefix}merge_states": (module.merge_states, states),
            f"{prefix}attention_weights": (module.attention_weights, of_weights),
            f"{prefix}attention_block": (module.attention_block, {"x": x} | weights | biases),
            f"{prefix}apply_rope": (module.apply_rope, rotated),
        }
    return every


FUNCTIONS = functions()


def results(name, arrays):
    """What a function makes of them, as a list of arrays."""
    result = FUNCTIONS[name][0](**arrays)
    return list(result) if isinstance(result, tuple) else [result]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("holder", HOLDERS)
def test_every_function_reads_what_they_hold(name, holder):
    arrays = FUNCTIONS[name][1]
    got = results(name, {argument: holder(a) for argument, a in arrays.items()})
    for a, b in zip(got, results(name, arrays), strict=True):
        assert type(a) is np.ndarray
        np.testing.assert_array_equal(a, b)


class Elsewhere(HasArray):
    """On another device, from which its library would copy it."""

    def __init__(self, array, device=(2, 0)):
        super().__init__(array)
        self.device = device

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **_):
        raise AssertionError("it is to be left where it is")

    __array__ = __dlpack__


class OnlyCuda(HasArray):
    __cuda_array_interface__ = {"version": 3}  # noqa: RUF012

    def __array__(self, dtype=None, copy=None):
        raise AssertionError("it is to be left where it is")


class Lost(HasArray):
    def __dlpack_device__(self):
        raise KeyError("sharded")


class Broken(HasArray):
    def __array__(self, dtype=None, copy=None):
        raise LookupError("deleted")


class BrokenDLPack(HasDLPack):
    def __dlpack__(self, **_):
        raise BufferError("deleted")


@pytest.mark.parametrize("name, argument", [(f, a) for f in FUNCTIONS for a in FUNCTIONS[f][1]])
@pytest.mark.parametrize(
    "holder, words",
    [
        (Elsewhere, ["CUDA device 0", ".cpu()"]),
        (OnlyCuda, ["CUDA", ".cpu()"]),
        (Lost, ["unknown device", "sharded", ".cpu()"]),
        (Broken, ["deleted"]),
        (BrokenDLPack, ["deleted"]),
    ],
)
def test_every_argument_that_cannot_be_read_is_named(name, argument, holder, words):
    arrays = FUNCTIONS[name][1]
    with pytest.raises(TypeError) as raised:
        results(name, arrays | {argument: holder(arrays[argument])})
    message = str(raised.value)
    assert message.startswith(f"{argument} (of type {holder.__name__}) ")
    assert all(word in message for word in words)
    if holder not in (Elsewhere, OnlyCuda):
        assert isinstance(raised.value.__cause__, (LookupError, BufferError))


@pytest.mark.parametrize("name, argument", [(f, a) for f in FUNCTIONS for a in FUNCTIONS[f][1]])
def test_what_is_no_array_is_refused(name, argument):
    with pytest.raises(TypeError, match=f"^{argument} .*object"):
        results(name, FUNCTIONS[name][1] | {argument: object()})


@pytest.mark.parametrize(
    "device, where",
    [((8, 1), "Metal device 1"), ((13, 0), "DLPack type 13 device 0"), ((2, 3), "CUDA device 3")],
)
def test_devices_are_named(device, where):
    with pytest.raises(TypeError, match=f"^q .* is on {where}; copy it to the CPU first"):
        as_array("q", Elsewhere(np.ones(3), device))


@pytest.mark.parametrize("device", [1, 3, 11])
def test_pinned_memory_is_the_cpu_s(device):
    array = np.ones(3)
    holder = HasArray(array)
    holder.__dlpack_device__ = lambda: (device, 0)
    assert as_array("q", holder) is array


def test_no_memory_stays_what_it_is():
    class Large:
        def __array__(self, dtype=None, copy=None):
            raise MemoryError

    with pytest.raises(MemoryError):
        as_array("q", Large())


def test_an_output_is_an_array_of_numpy():
    q = random(0, B, T, N, H)
    for call in (
        functools.partial(tileattn.dot_product_attention, q, q, q),
        functools.partial(tileattn.apply_rope, q, range(T)),
    ):
        for holder in (*HOLDERS, Elsewhere, Broken):
            with pytest.raises(
                TypeError, match=r"out must be a plain NumPy array, not .*numpy\(\)"
            ):
                call(out=holder(np.zeros_like(q)))


# ------------------------------------------------------------------ PyTorch


def torch_tensors(name):
    torch = pytest.importorskip("torch")
    return {a: torch.from_numpy(v.copy()) for a, v in FUNCTIONS[name][1].items()}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_reads_tensors(name):
    for a, b in zip(
        results(name, torch_tensors(name)), results(name, FUNCTIONS[name][1]), strict=True
    ):
        assert type(a) is np.ndarray
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tensors_share_their_memory(dtype):
    torch = pytest.importorskip("torch")
    pytest.importorskip("ml_dtypes")
    tensor = torch.arange(60.0).reshape(3, 4, 5).to(getattr(torch, dtype))
    for view in (
        tensor,
        tensor.permute(2, 0, 1)[1::2],
        tensor[..., :1].expand(3, 4, 9),
        tensor[:0],
    ):
        read = as_array("q", view)
        assert read.dtype.name == dtype
        np.testing.assert_array_equal(read.astype(np.float32), view.float().numpy())
        if read.size:
            assert read.ctypes.data == view.data_ptr()
            assert read.strides == tuple(s * view.element_size() for s in view.stride())


def test_attention_of_bfloat16_tensors():
    torch = pytest.importorskip("torch")
    ml_dtypes = pytest.importorskip("ml_dtypes")
    q, k, v = (random(i, B, T, N, H).astype(ml_dtypes.bfloat16) for i in range(3))
    tensors = (torch.from_numpy(a.astype(np.float32)).bfloat16() for a in (q, k, v))
    got = tileattn.dot_product_attention(*tensors)
    assert got.dtype == ml_dtypes.bfloat16
    expected = tileattn.dot_product_attention(q, k, v)
    np.testing.assert_array_equal(got.view(np.int16), expected.view(np.int16))


def test_bfloat16_tensors_need_a_package(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(TypeError, match=r"^q \(of type Tensor\) .*pip install ml_dtypes"):
        as_array("q", torch.zeros(3, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_that_numpy_would_misread_are_refused(dtype):
    torch = pytest.importorskip("torch")
    ones = torch.ones(3, dtype=getattr(torch, dtype))
    refused = {
        r"detach\(\)": ones.clone().requires_grad_(),
        r"Parameter.*detach\(\)": torch.nn.Parameter(ones),
        r"meta.*\.cpu\(\)": ones.to("meta"),
        "resolve_neg": torch.complex(torch.ones(3), torch.ones(3)).conj().imag,
        "resolve_conj": torch.complex(torch.ones(3), torch.ones(3)).conj(),
        "to_dense|parse": ones.to_sparse(),
    }
    for words, tensor in refused.items():
        with pytest.raises(TypeError, match=rf"^w_q \(of type .*{words}") as raised:
            as_array("w_q", tensor)
        assert isinstance(raised.value.__cause__, Exception)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tangents_are_not_dropped(dtype):
    torch = pytest.importorskip("torch")
    ones = torch.ones(3, dtype=getattr(torch, dtype))
    with torch.autograd.forward_ad.dual_level():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of what it compiles
            dual = torch.autograd.forward_ad.make_dual(ones, ones)
        with pytest.raises(TypeError, match=r"^w_q \(of type Tensor\) .* tangent"):
            as_array("w_q", dual)
        assert as_array("w_q", ones).tolist() == [1, 1, 1]


class Masks:
    """What gives a masked array."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


@pytest.mark.parametrize("around", [Masks, lambda a: [a], lambda a: ([a], [a.filled(0)])])
def test_masks_are_not_dropped_wherever_they_are(around):
    array = np.ma.masked_array([1.0, 2.0], [False, True])
    with pytest.raises(TypeError, match=r"^bias is a masked array.*\.filled"):
        as_array("bias", around(array))
    assert as_array("bias", Masks(np.ones((2, 2)))).tolist() == [[1, 1], [1, 1]]


def test_results_go_into_a_tensor_s_memory():
    torch = pytest.importorskip("torch")
    q = torch.from_numpy(random(0, B, T, N, H))
    out = torch.zeros_like(q)
    tileattn.dot_product_attention(q, q, q, out=out.numpy())
    np.testing.assert_array_equal(out.numpy(), tileattn.dot_product_attention(q, q, q))


# ------------------------------------------------------------------ JAX


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_arrays_of_jax(dtype):
    jax = pytest.importorskip("jax")
    array = jax.numpy.asarray(random(0, B, T, N, H), dtype=dtype)
    read = as_array("q", array)
    assert read.dtype.name == dtype
    assert read.ctypes.data == array.unsafe_buffer_pointer()
    got = tileattn.dot_product_attention(array, array, array, is_causal=True)
    expected = tileattn.dot_product_attention(read, read, read, is_causal=True)
    np.testing.assert_array_equal(got.astype(np.float32), expected.astype(np.float32))


def test_arrays_that_jax_traces_are_refused():
    jax = pytest.importorskip("jax")
    x = jax.numpy.ones((B, T, N, H))
    with pytest.raises(TypeError, match=r"^x \(of type .*Tracer\) gives no array"):
        jax.jit(lambda x: tileattn.apply_rope(x, range(T)))(x)
