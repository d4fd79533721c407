"""What tileattn is measured against: NumPy, PyTorch and onnxruntime, each where installed.

Each function takes arrays and gives candidates by name, all of which compute the same. Every peer
gets what favours it: weights in the layout it wants, memory on the same huge pages as ours, a
preallocated result where it takes one. `turn` says which of several sets of arrays a call uses;
candidates share it, so that a call always takes the set that has gone longest without use.

NumPy also needs threadpoolctl here, to set the threads of its BLAS; onnxruntime needs onnx, to
build the model of one node that it runs.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from tileattn.bench.arrays import Alignment, Array, copy, empty
from tileattn.bench.in_numpy import numpy_attention
from tileattn.bench.needs import missing
from tileattn.bench.rounds import Candidate

HAS_NUMPY = not missing("numpy")
HAS_TORCH = not missing("torch")
HAS_ONNXRUNTIME = not missing("onnxruntime")

if HAS_NUMPY:
    from threadpoolctl import ThreadpoolController

    _blas = ThreadpoolController().select(user_api="blas")
    # Of a BLAS that it does not know, the threads could not be set: nothing would be equal.
    HAS_NUMPY = bool(_blas.lib_controllers)
if HAS_TORCH:
    import torch
    from torch.nn.functional import layer_norm
    from torch.nn.functional import linear as torch_linear
    from torch.nn.functional import scaled_dot_product_attention as torch_attention
if HAS_ONNXRUNTIME:
    import onnx.helper
    import onnxruntime

#: Peers that hold all scores at once are left out where those take more than this.
SCORE_BYTES = 1 << 30
#: Queries at a time where PyTorch computes a window block by block: the fastest of 16 to 1024.
_BLOCK = 64


def _numpy(call: Any) -> Candidate:
    return Candidate(call, lambda threads: _blas.limit(limits=threads))


def _torch(call: Any) -> Candidate:
    return Candidate(torch.inference_mode()(call), lambda threads: torch.set_num_threads(threads))


def _tensor(array: Array) -> Any:
    if array.dtype == np.float32:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def _array(tensor: Any, dtype: np.dtype[Any]) -> Array:
    """The reverse."""
    array: Array = (tensor if dtype == np.float32 else tensor.view(torch.int16)).numpy()
    return array.view(dtype)


# ------------------------------------------------------------------ projections


def linear(x: Array, weights: list[Array], turn: Iterator[int]) -> dict[str, Candidate]:
    """x[M, K] w[K, N] for each w of `weights`."""
    out = empty((len(x), weights[0].shape[1]))
    candidates = {}
    if HAS_NUMPY:
        candidates["numpy"] = _numpy(lambda _: np.matmul(x, weights[next(turn)], out=out))
    if HAS_TORCH:
        x_torch, out_torch = torch.from_numpy(x), torch.from_numpy(out)
        rows = [torch.from_numpy(copy(w.T)) for w in weights]  # [out, in], as Linear holds them
        candidates["torch"] = _torch(
            lambda _: torch_linear(x_torch, rows[next(turn)], out=out_torch)
        )
    # As a constant onnxruntime packs it, which takes one session a weight: their threads would
    # spin against each other.
    if HAS_ONNXRUNTIME and len(weights) == 1:
        candidates["onnxruntime"] = _onnx(
            "MatMul", [{"A": x}], [{"Y": out}], out, turn, constants={"B": weights[0]}
        )
    return candidates


def linear_bfloat16(x: Array, w: Array, copies: int) -> dict[str, Candidate]:
    """x[M, K] w[K, N] in bfloat16, the result too, with each of so many copies of w in turn."""
    if missing("torch bfloat16"):
        return {}
    from ml_dtypes import bfloat16

    x_torch, rows = _tensor(x.astype(bfloat16)), w.T.astype(bfloat16)
    turn = itertools.cycle([_tensor(copy(rows)) for _ in range(copies)])

    def call(_: int) -> Array:
        # Without `out`, which takes up to half as long again.
        return _array(torch_linear(x_torch, next(turn)), rows.dtype)

    return {"torch bfloat16": _torch(call)}


# ------------------------------------------------------------------ attention


def attention(
    q: Array,
    keys: list[Array],
    values: list[Array],
    turn: Iterator[int],
    *,
    causal: bool,
    window: int | None = None,
    bias: Array | None = None,
    mask: Array | None = None,
    alignment: Alignment = "line",
) -> dict[str, Candidate]:
    """Attention of q[B, T, N, H] to each k and v[B, S, K, H]; the last query sees the last key.

    At most one of the options: a causal window of so many keys, a bias[B, N, T, S] or a boolean
    mask[B, 1, 1, S].
    """
    B, T, N, H = q.shape
    S, K = keys[0].shape[1:3]
    candidates = {}
    holds_scores = 4 * B * N * T * S <= SCORE_BYTES
    takes_cache = bias is None and mask is None and (causal or T == 1)
    if causal and (T != S or window is not None):
        mask = _visible(T, S, window)
    attn_mask = mask if bias is None else bias
    is_causal = causal and attn_mask is None
    if HAS_NUMPY and holds_scores:
        added = _as_bias(_visible(T, S) if is_causal else mask) if bias is None else bias

        def call_numpy(_: int) -> Array:
            i = next(turn)
            q32, k32, v32 = (a.astype(np.float32, copy=False) for a in (q, keys[i], values[i]))
            return numpy_attention(q32, k32, v32, added)

        candidates["numpy"] = _numpy(call_numpy)
    if HAS_TORCH:
        q_torch = _tensor(q).transpose(1, 2)
        # With one query, [B, S, K, H] takes it 1.3 to 1.6 times as long as [B, K, S, H].
        keys_torch, values_torch = (
            [
                _tensor(copy(a.transpose(0, 2, 1, 3), alignment))
                if T == 1
                else _tensor(a).transpose(1, 2)
                for a in arrays
            ]
            for arrays in (keys, values)
        )
        # A boolean mask it makes a bias of at each call.
        mask_torch = None
        if attn_mask is not None:
            mask_torch = torch.from_numpy(_as_bias(attn_mask) if bias is None else bias)

        def call_torch(_: int) -> Any:
            i = next(turn)
            y = torch_attention(
                q_torch,
                keys_torch[i],
                values_torch[i],
                attn_mask=mask_torch,
                is_causal=is_causal,
                enable_gqa=K != N,
            )
            return _array(y.transpose(1, 2), q.dtype)

        candidates["torch"] = _torch(call_torch)
        if T == 1 and K != N and mask_torch is None:
            # The heads of a group as rows of one: it makes no copies of the keys then.
            folded = q_torch.reshape(B, K, N // K, H)

            def call_torch_folded(_: int) -> Any:
                i = next(turn)
                y = torch_attention(folded, keys_torch[i], values_torch[i])
                return _array(y.reshape(B, T, N, H), q.dtype)

            candidates["torch folded"] = _torch(call_torch_folded)
        if window is not None:

            def call_torch_in_blocks(_: int) -> Any:
                i = next(turn)
                return _torch_in_blocks(q_torch, keys_torch[i], values_torch[i], mask_torch, window)

            candidates["torch in blocks"] = _torch(call_torch_in_blocks)
    if not HAS_ONNXRUNTIME or q.dtype != np.float32:  # it has no bfloat16 attention for CPUs
        return candidates

    out = empty((B, T, N, H))
    out_flat = out.reshape(B, T, N * H)
    q_flat, *keys_flat = (a.reshape(*a.shape[:2], -1) for a in (q, *keys))
    values_flat = [v.reshape(B, S, -1) for v in values]
    sets = list(zip(keys_flat, values_flat, strict=True))
    if K == N and T == S and window is None and holds_scores:
        candidates["ORT MHA"] = _onnx(
            "MultiHeadAttention",
            [
                {
                    "query": q_flat,
                    "key": k,
                    "value": v,
                    "bias": None,
                    "key_padding_mask": None if mask is None else mask[:, 0, 0].astype(np.int32),
                    "attention_bias": bias,
                }
                for k, v in sets
            ],
            [{"output": out_flat}],
            out,
            turn,
            domain="com.microsoft",
            num_heads=N,
            unidirectional=int(causal),
        )
    if takes_cache:
        # All but the last T keys lie in the cache, [B, K, S, H], which the node writes in place.
        past = S - T
        caches = [
            [copy(a.transpose(0, 2, 1, 3), alignment) for a in kv]
            for kv in zip(keys, values, strict=True)
        ]
        candidates["ORT GQA"] = _onnx(
            "GroupQueryAttention",
            [
                {
                    "query": q_flat,
                    "key": k[:, past:].copy(),
                    "value": v[:, past:].copy(),
                    "past_key": cache[0] if past else None,
                    "past_value": cache[1] if past else None,
                    "seqlens_k": np.full(B, S - 1, np.int32),
                    "total_sequence_length": np.array(S, np.int32),
                }
                for (k, v), cache in zip(sets, caches, strict=True)
            ],
            [
                {"output": out_flat, "present_key": cache[0], "present_value": cache[1]}
                for cache in caches
            ],
            out,
            turn,
            domain="com.microsoft",
            num_heads=N,
            kv_num_heads=K,
            local_window_size=-1 if window is None else window,
        )
    if holds_scores:
        if attn_mask is not None:  # which must have a row for each query
            rows = np.broadcast_to(attn_mask, (*attn_mask.shape[:-2], T, S))
            attn_mask = np.ascontiguousarray(rows)
        candidates["ORT Attention"] = _onnx(
            "Attention",
            [{"Q": q_flat, "K": k, "V": v, "attn_mask": attn_mask} for k, v in sets],
            [{"Y": out_flat}],
            out,
            turn,
            q_num_heads=N,
            kv_num_heads=K,
            is_causal=int(is_causal),
        )
    return candidates


def _visible(T: int, S: int, window: int | None = None) -> Array:
    """[T, S], causal and within the window."""
    visible = np.tri(T, S, S - T, dtype=bool)
    if window is not None:
        visible ^= np.tri(T, S, S - T - window, dtype=bool)
    return visible


def _as_bias(mask: Array | None) -> Array | None:
    return None if mask is None else np.where(mask, np.float32(0), np.float32(-np.inf))


def _torch_in_blocks(q: Any, k: Any, v: Any, mask: Any, window: int) -> Any:
    """A window without the pairs far from it: blocks of queries, with the keys they may see."""
    T, S = mask.shape
    parts = []
    for t in range(0, T, _BLOCK):
        rows = slice(t, t + _BLOCK)
        seen = slice(max(S - T + t + 1 - window, 0), S - T + t + _BLOCK)
        parts.append(
            torch_attention(
                q[:, :, rows],
                k[:, :, seen],
                v[:, :, seen],
                attn_mask=mask[rows, seen],
                enable_gqa=q.shape[1] != k.shape[1],
            )
        )
    return torch.cat(parts, dim=2).transpose(1, 2)


# ------------------------------------------------------------------ whole blocks


class BlockWeights(NamedTuple):
    """w_qkv[D, (N + 2K) H], w_o[N H, D] and vectors."""

    w_qkv: Array
    w_o: Array
    b_qkv: Array
    b_o: Array
    norm_weight: Array
    norm_bias: Array


def block(
    x: Array,
    weights: list[BlockWeights],
    heads: tuple[int, int, int],
    causal: bool,
    turn: Iterator[int],
) -> dict[str, Candidate]:
    """LayerNorm(x + attention) of x[B, T, D] with each of `weights`; `heads` are N, K, H."""
    B, T, D = x.shape
    N, K, H = heads
    sizes = [N * H, K * H, K * H]
    candidates = {}
    if HAS_NUMPY and 4 * B * N * T * T <= SCORE_BYTES:
        bias = _as_bias(_visible(T, T)) if causal else None

        def call_numpy(_: int) -> Array:
            w = weights[next(turn)]
            qkv = x.reshape(B * T, D) @ w.w_qkv
            qkv += w.b_qkv
            q, k, v = (
                part.reshape(B, T, -1, H) for part in np.split(qkv, np.cumsum(sizes[:-1]), axis=1)
            )
            return _numpy_output(numpy_attention(q, k, v, bias), x, w)

        candidates["numpy"] = _numpy(call_numpy)
    if HAS_TORCH:
        x_torch = torch.from_numpy(x)
        tensors = [_linear_tensors(w) for w in weights]

        def call_torch(_: int) -> Any:
            w = tensors[next(turn)]
            q, k, v = (
                part.view(B, T, -1, H).transpose(1, 2)
                for part in torch_linear(x_torch, w.w_qkv, w.b_qkv).split(sizes, dim=-1)
            )
            y = torch_attention(q, k, v, is_causal=causal, enable_gqa=K != N)
            return _torch_output(y.transpose(1, 2).reshape(B, T, N * H), x_torch, w)

        candidates["torch"] = _torch(call_torch)
    return candidates


def decoding(
    x: Array,
    weights: list[BlockWeights],
    caches: list[tuple[Array, Array]],
    heads: tuple[int, int, int],
    theta: float,
    turn: Iterator[int],
) -> dict[str, Candidate]:
    """The same for x[B, 1, D], with rope, behind the other positions of a cache.

    Each has keys and values [B, K, S, H], and gets those of x as its last. cos and sin are computed
    beforehand.
    """
    B, _, D = x.shape
    N, K, H = heads
    S = caches[0][0].shape[2]
    # Both halves of a head times cos, and the other way round times -sin and sin.
    angles = (S - 1) * theta ** (-np.arange(0, H, 2) / H)
    cos, sin = (
        np.array(pair, np.float32)
        for pair in ((np.cos(angles),) * 2, (-np.sin(angles), np.sin(angles)))
    )
    candidates = {}
    if HAS_NUMPY:

        def call_numpy(_: int) -> Array:
            i = next(turn)
            w, (keys, values) = weights[i], caches[i]
            qkv = (x.reshape(B, D) @ w.w_qkv + w.b_qkv).reshape(B, N + 2 * K, 2, H // 2)
            qk, v = qkv[:, : N + K], qkv[:, N + K :]
            qk = (qk * cos + qk[:, :, ::-1] * sin).reshape(B, 1, N + K, H)
            keys[:, :, -1], values[:, :, -1] = qk[:, 0, N:], v.reshape(B, K, H)
            k, v = (a.transpose(0, 2, 1, 3) for a in (keys, values))
            return _numpy_output(numpy_attention(qk[:, :, :N], k, v, None), x, w)

        candidates["numpy"] = _numpy(call_numpy)
    if HAS_TORCH:
        x_torch, cos_torch, sin_torch = (torch.from_numpy(a) for a in (x, cos, sin))
        tensors = [_linear_tensors(w) for w in weights]
        caches_torch = [tuple(map(torch.from_numpy, cache)) for cache in caches]
        slots = [[a[:, :, -1] for a in cache] for cache in caches_torch]

        def in_torch(attend: Any) -> Candidate:
            def call(_: int) -> Any:
                i = next(turn)
                qkv = torch_linear(x_torch, tensors[i].w_qkv, tensors[i].b_qkv)
                qk, v = qkv.view(B, -1, 2, H // 2).split([N + K, K], dim=1)
                qk = torch.addcmul(qk * cos_torch, qk.flip(2), sin_torch).view(B, -1, H)
                slots[i][0].copy_(qk[:, N:])
                slots[i][1].copy_(v.reshape(B, K, H))
                y = attend(qk[:, :N], *caches_torch[i])
                return _torch_output(y.reshape(B, 1, N * H), x_torch, tensors[i])

            return _torch(call)

        candidates["torch"] = in_torch(
            lambda q, k, v: torch_attention(q[:, :, None], k, v, enable_gqa=K != N)
        )
        # The heads of a group as rows of one: PyTorch makes no copies of the keys then.
        candidates["torch folded"] = in_torch(
            lambda q, k, v: torch_attention(q.reshape(B, K, N // K, H), k, v)
        )
    return candidates


def _numpy_output(y: Array, x: Array, w: BlockWeights) -> Array:
    """LayerNorm(x + y w_o + b_o)"""
    z = y.reshape(-1, len(w.w_o)) @ w.w_o
    z += w.b_o
    z = z.reshape(x.shape)
    z += x
    z -= z.mean(axis=-1, keepdims=True)
    z /= np.sqrt(np.square(z).mean(axis=-1, keepdims=True) + 1e-5)
    z *= w.norm_weight
    z += w.norm_bias
    return z


def _torch_output(y: Any, x: Any, w: BlockWeights) -> Any:
    z = torch_linear(y, w.w_o, w.b_o)
    return layer_norm(x + z, x.shape[-1:], w.norm_weight, w.norm_bias)


def _linear_tensors(w: BlockWeights) -> Any:
    """Matrices as [out, in]."""
    columns = w._replace(w_qkv=copy(w.w_qkv.T), w_o=copy(w.w_o.T))
    return BlockWeights(*map(torch.from_numpy, columns))


# ------------------------------------------------------------------ onnxruntime


def _onnx(
    operator: str,
    inputs: list[dict[str, Array | None]],
    outputs: list[dict[str, Array]],
    result: Array,
    turn: Iterator[int],
    *,
    domain: str = "",
    constants: dict[str, Array] | None = None,
    **attributes: int,
) -> Candidate:
    """One node, bound to each set of inputs and of outputs, or to the only one of outputs.

    None is an input that is left out; `result` is the first output as the other peers shape it.
    """
    constants = constants or {}
    outputs = outputs if len(outputs) == len(inputs) else outputs * len(inputs)

    def describe(arrays: Mapping[str, Array | None]) -> list[Any]:
        return [
            onnx.helper.make_tensor_value_info(
                name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
            )
            for name, array in arrays.items()
            if array is not None
        ]

    names = [name if array is not None else "" for name, array in inputs[0].items()]
    node = onnx.helper.make_node(
        operator, [*names, *constants], list(outputs[0]), domain=domain, **attributes
    )
    graph = onnx.helper.make_graph(
        [node],
        operator,
        describe(inputs[0]),
        describe(outputs[0]),
        [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [onnx.helper.make_opsetid(name, version) for name, version in (("", 23), (domain, 1))]
    model = onnx.helper.make_model(graph, opset_imports=opsets[: 2 if domain else 1], ir_version=11)

    @functools.cache
    def bound(threads: int) -> list[Any]:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        calls = []
        for arrays, destinations in zip(inputs, outputs, strict=True):
            binding = session.io_binding()
            for name, array in arrays.items():
                if array is not None:
                    binding.bind_cpu_input(name, array)
            for name, out in destinations.items():
                binding.bind_output(name, "cpu", 0, out.dtype, out.shape, out.ctypes.data)
            calls.append(functools.partial(session.run_with_iobinding, binding))
        return calls

    def call(threads: int) -> Array:
        bound(threads)[next(turn)]()
        return result

    return Candidate(call, bound)
