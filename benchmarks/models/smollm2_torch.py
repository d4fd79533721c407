"""SmolLM2 in PyTorch, twice: as short as it can be written, and as transformers runs it.

Both compute in float32 with the weights that tileattn's decoder has.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

if TYPE_CHECKING:
    from benchmarks.models.smollm2 import Array, Config, Layer, Weights

Tensor = torch.Tensor


def _linear(w: Array) -> Tensor:
    """[in, out] as `linear` wants it: [out, in], which is how the file has it."""
    return torch.from_numpy(w.T)


def _attention(layer: Layer) -> list[Tensor]:
    """w_q, w_k, w_v and w_o as `linear` wants them."""
    return [torch.from_numpy(matrix.dequantize()) for matrix in layer.matrices()]


class TorchDecoder:
    """The model as a `Step`, on linear and scaled_dot_product_attention."""

    def __init__(self, weights: Weights) -> None:
        config = weights.config
        H = weights.layers[0].matrices()[0].shape[0] // config.num_heads
        self._eps = config.eps
        self._embedding = torch.from_numpy(weights.embedding)
        self._norm = torch.tensor(weights.norm)
        self._layers = [
            _TorchLayer(layer, (1, config.num_kv_heads, config.context, H), config)
            for layer in weights.layers
        ]
        frequencies = config.theta ** (-np.arange(0, H, 2) / H)
        turns = np.exp(1j * np.arange(config.context)[:, None] * frequencies)
        self._turns = torch.from_numpy(turns.astype(np.complex64))
        self._length = 0

    @torch.inference_mode()
    def __call__(self, tokens: Sequence[int]) -> Array:
        start, end = self._length, self._length + len(tokens)
        # What attention takes itself: a single row sees all, and a prompt's first rows themselves.
        mask = None
        if start > 0 and len(tokens) > 1:
            mask = torch.ones(len(tokens), end, dtype=torch.bool).tril(start)
        x_TD = self._embedding[list(tokens)]
        for layer in self._layers:
            x_TD = layer(x_TD, start, self._turns[start:end], mask)
        self._length = end
        last_D = rms_norm(x_TD[-1], self._norm.shape, self._norm, self._eps)
        return (self._embedding @ last_D).numpy()

    def truncate(self, length: int) -> None:
        self._length = length


class _TorchLayer:
    def __init__(self, layer: Layer, cache: tuple[int, ...], config: Config) -> None:
        self._shape, self._eps = layer.attention_norm.shape, config.eps
        self._attention_norm = torch.tensor(layer.attention_norm)
        *w_qkv, self._w_o = _attention(layer)
        self._w_qkv = torch.cat(w_qkv)
        self._mlp_norm = torch.tensor(layer.mlp_norm)
        self._w_gate, self._w_up = _linear(layer.w_gate), _linear(layer.w_up)
        self._w_down = _linear(layer.w_down)
        self._heads = (config.num_heads, cache[-1], config.num_kv_heads)
        self._keys, self._values = torch.empty(cache), torch.empty(cache)

    def __call__(self, x_TD: Tensor, start: int, turns: Tensor, mask: Tensor | None) -> Tensor:
        T = len(x_TD)
        N, H, K = self._heads
        h_TD = rms_norm(x_TD, self._shape, self._attention_norm, self._eps)
        heads = linear(h_TD, self._w_qkv).view(1, T, N + 2 * K, H).transpose(1, 2)
        pairs = torch.view_as_complex(heads[:, : N + K].unflatten(-1, (-1, 2)))
        turned = torch.view_as_real(pairs * turns).flatten(-2)
        end = start + T
        self._keys[:, :, start:end] = turned[:, N:]
        self._values[:, :, start:end] = heads[:, N + K :]
        q = turned[:, :N]
        if T == 1:  # the heads of a group as rows of one, which takes no copies of the keys
            q = q.reshape(1, K, N // K, H)
        y = scaled_dot_product_attention(
            q,
            self._keys[:, :, :end],
            self._values[:, :, :end],
            attn_mask=mask,
            is_causal=T > 1 and mask is None,
            enable_gqa=T > 1,
        )
        y = y.reshape(1, N, T, H).transpose(1, 2)
        x_TD = x_TD + linear(y.reshape(T, N * H), self._w_o)
        h_TD = rms_norm(x_TD, self._shape, self._mlp_norm, self._eps)
        return x_TD + linear(
            silu(linear(h_TD, self._w_gate)) * linear(h_TD, self._w_up), self._w_down
        )


class TransformersDecoder:
    """The model as a `Step`, on the class that transformers has for it."""

    def __init__(self, weights: Weights) -> None:
        self._model = llama(weights)
        parameters = inspect.signature(self._model.forward).parameters
        # Releases of transformers call it by one name or the other.
        name = "cache" if "cache" in parameters else "past_key_values"
        self._cache = _transformers().DynamicCache()
        self._options = {name: self._cache, "logits_to_keep": 1}

    @torch.inference_mode()
    def __call__(self, tokens: Sequence[int]) -> Array:
        output = self._model(torch.tensor([list(tokens)]), **self._options)
        return output.logits[0, -1].numpy()

    def truncate(self, length: int) -> None:
        if (surplus := self._cache.get_seq_length() - length) > 0:
            self._cache.crop(-surplus)


def llama(weights: Weights) -> Any:
    """Return transformers' LlamaForCausalLM with these weights."""
    config = weights.config
    H = weights.layers[0].matrices()[0].shape[0] // config.num_heads

    def halves(w: Tensor) -> Tensor:  # pairs half a head apart, as transformers turns them
        return w.view(-1, H // 2, 2, w.shape[1]).transpose(1, 2).reshape(w.shape)

    state = {
        "model.embed_tokens.weight": torch.from_numpy(weights.embedding),
        "model.norm.weight": torch.tensor(weights.norm),
    }
    for i, layer in enumerate(weights.layers):
        w_q, w_k, w_v, w_o = _attention(layer)
        for name, tensor in {
            "input_layernorm": torch.tensor(layer.attention_norm),
            "self_attn.q_proj": halves(w_q),
            "self_attn.k_proj": halves(w_k),
            "self_attn.v_proj": w_v,
            "self_attn.o_proj": w_o,
            "post_attention_layernorm": torch.tensor(layer.mlp_norm),
            "mlp.gate_proj": _linear(layer.w_gate),
            "mlp.up_proj": _linear(layer.w_up),
            "mlp.down_proj": _linear(layer.w_down),
        }.items():
            state[f"model.layers.{i}.{name}.weight"] = tensor
    transformers = _transformers()
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(weights.embedding),
            hidden_size=weights.embedding.shape[1],
            intermediate_size=layer.w_gate.shape[1],
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=H,
            rms_norm_eps=config.eps,
            max_position_embeddings=config.context,
            rope_parameters={"rope_type": "default", "rope_theta": config.theta},
            tie_word_embeddings=True,
        )
    ).eval()
    left = model.load_state_dict(state, strict=False)
    if left.unexpected_keys or set(left.missing_keys) - {"lm_head.weight"}:  # tied to the table
        raise RuntimeError(f"transformers has other tensors than these: {left}")
    return model


def _transformers() -> Any:
    import transformers  # takes seconds, and only one of the two needs it

    return transformers
