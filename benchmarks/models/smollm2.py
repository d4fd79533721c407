"""SmolLM2-135M-Instruct, a small language model, in NumPy with tileattn's block as its attention.

    python -m benchmarks.models.smollm2 "How do I keep bread fresh?"

streams the model's answer, and then says how many tokens a second it read and wrote; --compare
answers, and measures every decoder on that answer. --weights and --cache say what the blocks keep
their weights and the K/V cache as; `benchmarks.models.precisions` measures what each costs. The
model is a Llama with 30 layers, D = 576, N = 9, K = 3, H = 64; with X' = RMSNorm(X), each layer is

    X = X + softmax(Q K^T / sqrt(H)) V W_O          causal, Q K V from X', Q and K turned by RoPE
    X = X + (silu(X' W_gate) * (X' W_up)) W_down    silu(x) = x / (1 + exp(-x))

and the next token's logits are X' E^T, where E is the table that the tokens' vectors come from.

`reference_logits` is the whole model in float64. A `Decoder` is the same in float32, a few tokens
at a time. It leaves the first of the two lines to an `Attention`, which also keeps the K/V cache,
so that attention can be exchanged (`--with`) and all else stays equal. The peers, which compute the
whole model in PyTorch, are in `smollm2_torch`.

The file has the matrices in 4 bits a weight (Q4_1), and the table in 8. tileattn's blocks take the
former as they are. The second line and the logits are NumPy's, which multiplies floats only: there
the weights are unpacked to float32, once, whatever attention keeps.
"""

import argparse
import codecs
import importlib
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import tileattn
from benchmarks.models import WEIGHTS, record
from benchmarks.models.fetch import SMOLLM2, FetchError, fetch
from tileattn._command import CommandError, check_output
from tileattn.bench.rounds import Turn, interleave, ratio
from tileattn.weights import WeightsError

Array = NDArray[Any]

CHUNK = 512  # tokens of a prompt computed at once, which bounds the scores' memory
CACHES = ("float32", "bfloat16", "float16", "int8")  # what keys and values may be kept as


# ---------------------------------------------------------------- the weights


@dataclass(frozen=True)
class Config:
    num_layers: int
    num_heads: int
    num_kv_heads: int
    theta: float  # RoPE's base
    eps: float  # RMSNorm's
    context: int  # the most tokens that the model was trained to see


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer's weights: attention's as the file has them, all others in float32.

    The rows of w_q and w_k stand in the order of the file, in which RoPE turns the pairs (0, 1),
    (2, 3), ... of a head; the model's authors pair 0 with H / 2, 1 with H / 2 + 1, and so on.
    """

    attention_norm: Array  # [D]
    # w_q[N H, D], w_k[K H, D], w_v[K H, D], w_o[D, N H], unpacked from the file by each call: no
    # copy is kept of what a block packs again.
    matrices: Callable[[], Sequence[tileattn.QuantizedMatrix]]
    mlp_norm: Array  # [D]
    w_gate: Array  # [D, F]
    w_up: Array  # [D, F]
    w_down: Array  # [F, D]

    def by_axes(self, config: Config) -> tuple[Array, Array, Array, Array]:
        """w_q[D, N, H], w_k[D, K, H], w_v[D, K, H] and w_o[N, H, D], in float32."""
        w_q, w_k, w_v, w_o = (matrix.dequantize().T for matrix in self.matrices())
        D, N, K = len(w_q), config.num_heads, config.num_kv_heads
        return (
            w_q.reshape(D, N, -1),
            w_k.reshape(D, K, -1),
            w_v.reshape(D, K, -1),
            w_o.reshape(N, -1, D),
        )


@dataclass(frozen=True, eq=False)
class Weights:
    """Everything that was learnt."""

    config: Config
    embedding: Array  # [vocabulary, D]
    layers: Sequence[Layer]
    norm: Array  # [D]


def load(folder: Path) -> tuple[Weights, "Tokenizer"]:
    """Read the model out of the folder that `fetch(SMOLLM2)` returns.

    Raises
    ------
    WeightsError
        The file is missing or damaged.
    ImportError
        gguf or tokenizers is not installed.
    """
    gguf = _import("gguf")
    path = Path(folder, *SMOLLM2.files)
    try:
        reader = gguf.GGUFReader(path)
    except (OSError, ValueError, LookupError) as error:
        raise WeightsError(f"{path}: cannot be read: {error}") from error
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def field(key: str) -> Any:
        if key not in reader.fields:
            raise WeightsError(f"{path}: has no {key}")
        return reader.fields[key].contents()

    def stored(name: str) -> tuple[Array, Any]:
        if name not in tensors:
            raise WeightsError(f"{path}: the tensor {name} is missing")
        return tensors[name].data, tensors[name].tensor_type

    def tensor(name: str) -> Array:
        return gguf.dequantize(*stored(name))

    def blocks(name: str) -> Array:
        data, kind = stored(name)
        if kind != gguf.GGMLQuantizationType.Q4_1:
            raise WeightsError(f"{path}: the tensor {name} is {kind.name}, expected Q4_1")
        return data

    config = Config(
        num_layers=field("llama.block_count"),
        num_heads=field("llama.attention.head_count"),
        num_kv_heads=field("llama.attention.head_count_kv"),
        theta=field("llama.rope.freq_base"),
        eps=field("llama.attention.layer_norm_rms_epsilon"),
        context=field("llama.context_length"),
    )
    control = gguf.TokenType.CONTROL
    tokenizer = Tokenizer(
        vocabulary=field("tokenizer.ggml.tokens"),
        merges=field("tokenizer.ggml.merges"),
        special=[i for i, kind in enumerate(field("tokenizer.ggml.token_type")) if kind == control],
    )
    return _arrange(config, tensor, blocks), tokenizer


def unpack(blocks: Array) -> tileattn.QuantizedMatrix:
    """The matrix [out, in] of uint8[out, in / 32 * 20], GGUF's Q4_1, value for value.

    Each 32 weights of a row are 20 bytes: the scale and the minimum in float16, then bytes with
    the values of the weights 0 to 15 in their lower halves and of 16 to 31 in their upper ones.
    """
    of_groups = blocks.reshape(len(blocks), -1, 20)
    scales, minima = np.moveaxis(np.ascontiguousarray(of_groups[..., :4]).view("<f2"), -1, 0)
    pairs = of_groups[..., 4:]
    values = np.concatenate([pairs & 15, pairs >> 4], axis=-1).reshape(len(blocks), -1)
    return tileattn.QuantizedMatrix(values, scales, minima, bits=4, group_size=32)


def _arrange(
    config: Config, tensor: Callable[[str], Array], blocks: Callable[[str], Array]
) -> Weights:
    """Gather the file's tensors; of its [out, in] matrices those of float32 are transposed."""

    def layer(name: str) -> Layer:
        parts = ("attn_q", "attn_k", "attn_v", "attn_output")
        stored = [blocks(f"{name}.{part}.weight") for part in parts]
        return Layer(
            attention_norm=tensor(f"{name}.attn_norm.weight"),
            matrices=lambda: [unpack(each) for each in stored],
            mlp_norm=tensor(f"{name}.ffn_norm.weight"),
            w_gate=tensor(f"{name}.ffn_gate.weight").T,
            w_up=tensor(f"{name}.ffn_up.weight").T,
            w_down=tensor(f"{name}.ffn_down.weight").T,
        )

    layers = [layer(f"blk.{i}") for i in range(config.num_layers)]
    return Weights(config, tensor("token_embd.weight"), layers, tensor("output_norm.weight"))


def _import(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ImportError(
            f"this program needs the package {package}: pip install '.[models]'"
        ) from None


# ---------------------------------------------------------------- the tokenizer

# What the model was trained to be told first.
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

# A vocabulary of bytes is written with one visible character a byte: the visible characters of
# Latin-1 stand for themselves, and the other bytes, in order, for those from U+0100.
_VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = [byte for byte in range(0x100) if byte not in set(_VISIBLE)]
BYTES = {chr(byte): byte for byte in _VISIBLE} | {
    chr(0x100 + i): byte for i, byte in enumerate(_HIDDEN)
}


class Tokenizer:
    """Byte-pair encoding, with digits one by one.

    A few control characters and rare planes of Unicode have no token; encoding drops them.

    Parameters
    ----------
    vocabulary : sequence of str
        The tokens, in the characters of BYTES.
    merges : sequence of str
        The pairs that are joined, with a space between their halves, first come first joined.
    special : sequence of int
        The tokens that are no text. Nothing in a text encodes to them.
    """

    def __init__(
        self, vocabulary: Sequence[str], merges: Sequence[str], special: Sequence[int]
    ) -> None:
        tokenizers = _import("tokenizers")
        split = tokenizers.pre_tokenizers
        ids = {token: i for i, token in enumerate(vocabulary)}
        pairs = [tuple(merge.split(" ")) for merge in merges]
        self._encoder = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=ids, merges=pairs))
        self._encoder.pre_tokenizer = split.Sequence(
            [split.Digits(individual_digits=True), split.ByteLevel(add_prefix_space=False)]
        )
        self.special = {vocabulary[i]: i for i in special}
        self._bytes = [
            b"" if token in self.special else bytes(BYTES[character] for character in token)
            for token in vocabulary
        ]

    def encode(self, text: str) -> list[int]:
        return list(self._encoder.encode(text).ids)

    def decode(self, tokens: Iterable[int]) -> str:
        return "".join(self.stream(tokens))

    def stream(self, tokens: Iterable[int]) -> Iterator[str]:
        """Yield the text as its tokens come; a character is held back until it is complete."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in tokens:
            if piece := decoder.decode(self._bytes[token]):
                yield piece
        if piece := decoder.decode(b"", final=True):
            yield piece

    def chat(self, prompt: str) -> list[int]:
        """Encode a question as the model was trained to be asked one."""
        start, end = self.special["<|im_start|>"], self.special["<|im_end|>"]
        tokens = []
        for role, text in (("system", SYSTEM), ("user", prompt)):
            tokens += [start, *self.encode(f"{role}\n{text}"), end, *self.encode("\n")]
        return [*tokens, start, *self.encode("assistant\n")]

    @property
    def stops(self) -> set[int]:
        """The tokens that end an answer."""
        return {self.special["<|im_end|>"], self.special["<|endoftext|>"]}


# ---------------------------------------------------------------- all but attention


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def swiglu(x: Array, layer: Layer) -> Array:
    gate = x @ layer.w_gate
    with np.errstate(over="ignore"):  # where exp(-gate) is infinite, silu is 0 to rounding
        gate /= 1 + np.exp(-gate)
    gate *= x @ layer.w_up
    return gate @ layer.w_down


def rotate(x_TNH: Array, positions: Array, theta: float) -> Array:
    """Turn the pairs (0, 1), (2, 3), ... of each head: pair i by position * theta^(-2 i / H)."""
    H = x_TNH.shape[-1]
    angles = positions[:, None, None] * theta ** (-np.arange(0, H, 2) / H)
    as_complex = np.result_type(x_TNH.dtype, np.complex64)
    turned = x_TNH.view(as_complex) * np.exp(1j * angles).astype(as_complex)
    return turned.view(x_TNH.dtype)


# ---------------------------------------------------------------- the model in float64


def reference_logits(weights: Weights, tokens: Sequence[int]) -> Array:
    """Return logits[T, vocabulary]: row t is about the token after tokens[t]. All in float64."""
    config = weights.config
    T, K = len(tokens), config.num_kv_heads
    positions = np.arange(T)
    future_TS = positions > positions[:, None]
    x_TD = weights.embedding[tokens].astype(np.float64)
    for layer in weights.layers:
        w_q, w_k, w_v, w_o = layer.by_axes(config)
        h_TD = rms_norm(x_TD, layer.attention_norm, config.eps)
        q_TNH = rotate(np.tensordot(h_TD, w_q, axes=1), positions, config.theta)
        k_SKH = rotate(np.tensordot(h_TD, w_k, axes=1), positions, config.theta)
        v_SKH = np.tensordot(h_TD, w_v, axes=1)
        N, H = q_TNH.shape[1:]
        q_TKGH = q_TNH.reshape(T, K, N // K, H)
        score_KGTS = np.einsum("tkgh,skh->kgts", q_TKGH, k_SKH) / math.sqrt(H)
        score_KGTS[..., future_TS] = -np.inf
        share_KGTS = np.exp(score_KGTS - score_KGTS.max(axis=-1, keepdims=True))
        share_KGTS /= share_KGTS.sum(axis=-1, keepdims=True)
        y_TKGH = np.einsum("kgts,skh->tkgh", share_KGTS, v_SKH)
        x_TD = x_TD + np.tensordot(y_TKGH.reshape(T, N, H), w_o, axes=2)
        x_TD = x_TD + swiglu(rms_norm(x_TD, layer.mlp_norm, config.eps), layer)
    return rms_norm(x_TD, weights.norm, config.eps) @ weights.embedding.T


# ---------------------------------------------------------------- decoding, a few tokens at a time


class Attention(Protocol):
    """A layer's attention, and the keys and values of the tokens that it has seen."""

    def __call__(self, x_TD: Array) -> Array:
        """Return x, which the next T tokens gave, with attention added."""

    def truncate(self, length: int) -> None:
        """Forget all tokens but the first `length`."""


class Step(Protocol):
    """A model that remembers the tokens that it has seen."""

    def __call__(self, tokens: Sequence[int]) -> Array:
        """Return the logits of what follows these tokens, which follow those seen before."""

    def truncate(self, length: int) -> None:
        """Forget all tokens but the first `length`."""


class TileattnAttention:
    """A layer's attention by tileattn: one call, which also fills the cache.

    Parameters
    ----------
    layer : Layer
    config : Config
    rope : Rope
        Layers that share one share its table of cos and sin.
    weights : str
        One of WEIGHTS: "int4" takes the file's as they are; the others come from their float32.
    cache : str
        One of CACHES.

    Attributes
    ----------
    block : AttentionBlock
    cache : KVCache
    """

    def __init__(
        self,
        layer: Layer,
        config: Config,
        rope: tileattn.Rope,
        weights: str = "float32",
        cache: str = "float32",
    ) -> None:
        matrices: Sequence[Any] = layer.matrices()
        if weights != "int4":
            matrices = [matrix.dequantize() for matrix in matrices]
        self.block = tileattn.AttentionBlock.from_linear(
            *matrices,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            weight_dtype=None if weights == "float32" else weights,
            norm=tileattn.RMSNorm(layer.attention_norm, config.eps),
            norm_position="pre",
            rope=rope,
            is_causal=True,
        )
        # Memory that no token has reached yet is not occupied.
        self.cache = tileattn.KVCache(
            1, config.context, config.num_kv_heads, self.block.head_dim, dtype=cache
        )

    def __call__(self, x_TD: Array) -> Array:
        return self.block(x_TD, cache=self.cache)

    def truncate(self, length: int) -> None:
        self.cache.truncate(length)


class NumpyAttention:
    """A layer's attention in plain NumPy, with a K/V cache that doubles when it is full."""

    def __init__(self, layer: Layer, config: Config) -> None:
        *w_qkv, w_o = layer.by_axes(config)
        D, self._N, H = w_qkv[0].shape
        self._K = config.num_kv_heads
        self._config = config
        self._norm = layer.attention_norm
        self._w_qkv = np.concatenate([w.reshape(D, -1) for w in w_qkv], axis=1)
        self._w_o = w_o.reshape(-1, D)
        self._cache_2KSH = np.empty((2, self._K, 64, H), np.float32)
        self._length = 0

    def __call__(self, x_TD: Array) -> Array:
        T, N, K, H = len(x_TD), self._N, self._K, self._cache_2KSH.shape[-1]
        start, S = self._length, self._length + T
        h_TD = rms_norm(x_TD, self._norm, self._config.eps)
        heads = (h_TD @ self._w_qkv).reshape(T, N + 2 * K, H)
        positions = np.arange(start, S)
        heads[:, : N + K] = rotate(heads[:, : N + K], positions, self._config.theta)
        while self._cache_2KSH.shape[2] < S:
            self._cache_2KSH = np.concatenate([self._cache_2KSH] * 2, axis=2)
        self._cache_2KSH[:, :, start:S] = heads[:, N:].reshape(T, 2, K, H).transpose(1, 2, 0, 3)
        self._length = S
        k_KSH, v_KSH = self._cache_2KSH[:, :, :S]

        q_KGTH = heads[:, :N].reshape(T, K, N // K, H).transpose(1, 2, 0, 3)
        # One product a K/V head, for all the query heads that share it.
        score_KRS = q_KGTH.reshape(K, -1, H) @ k_KSH.transpose(0, 2, 1)
        score_KRS *= np.float32(1 / math.sqrt(H))
        if T > 1:
            future_TS = np.arange(S) > positions[:, None]
            score_KRS.reshape(K, -1, T, S)[..., future_TS] = -np.inf
        score_KRS -= score_KRS.max(axis=-1, keepdims=True)
        np.exp(score_KRS, out=score_KRS)
        score_KRS /= score_KRS.sum(axis=-1, keepdims=True)
        y_KGTH = (score_KRS @ v_KSH).reshape(K, -1, T, H)
        return x_TD + y_KGTH.transpose(2, 0, 1, 3).reshape(T, -1) @ self._w_o

    def truncate(self, length: int) -> None:
        self._length = length


class Decoder:
    """The model as a `Step`, around an attention of one's choice.

    Parameters
    ----------
    weights : Weights
    make_attention : callable
        Given a `Layer` and the `Config`, returns an `Attention` that has seen no token yet.

    Attributes
    ----------
    attentions : list of Attention
        The layers'.
    """

    def __init__(
        self, weights: Weights, make_attention: Callable[[Layer, Config], Attention]
    ) -> None:
        self._weights = weights
        self.attentions = [make_attention(layer, weights.config) for layer in weights.layers]

    def __call__(self, tokens: Sequence[int]) -> Array:
        if not len(tokens):
            raise ValueError("tokens is empty, expected at least one")
        for start in range(0, len(tokens), CHUNK):
            last_D = self._advance(tokens[start : start + CHUNK])[-1]
        return self._weights.embedding @ self._normalise(last_D)

    def perplexity(self, tokens: Sequence[int]) -> float:
        """Of each token after those before it, but for the first, which follows nothing."""
        return math.exp(self.surprises(tokens).mean())

    def surprises(self, tokens: Sequence[int]) -> Array:
        """The negative logarithm of the probability of each token but the first."""
        found = []
        for start in range(0, len(tokens) - 1, CHUNK):
            following = tokens[start + 1 : start + 1 + CHUNK]
            x_TD = self._advance(tokens[start : start + len(following)])
            logits = self._normalise(x_TD) @ self._weights.embedding.T
            of_following = logits[np.arange(len(following)), following]
            top = logits.max(axis=1)
            logits -= top[:, None]
            sums = np.exp(logits, out=logits).sum(axis=1, dtype=np.float64)
            found.append(np.log(sums) + top - of_following)
        return np.concatenate(found)

    def truncate(self, length: int) -> None:
        for attention in self.attentions:
            attention.truncate(length)

    def _advance(self, tokens: Sequence[int]) -> Array:
        """Return the tokens' vectors [T, D] before the final norm."""
        weights, eps = self._weights, self._weights.config.eps
        x_TD = weights.embedding[tokens]
        for layer, attention in zip(weights.layers, self.attentions, strict=True):
            x_TD = attention(x_TD)
            x_TD = x_TD + swiglu(rms_norm(x_TD, layer.mlp_norm, eps), layer)
        return x_TD

    def _normalise(self, x: Array) -> Array:
        return rms_norm(x, self._weights.norm, self._weights.config.eps)


def with_tileattn(model: Weights, weights: str = "float32", cache: str = "float32") -> Decoder:
    """The model with tileattn's blocks, which keep their weights and cache as is said."""
    rope = tileattn.Rope(theta=model.config.theta, interleaved=True)
    return Decoder(model, partial(TileattnAttention, rope=rope, weights=weights, cache=cache))


def _with_numpy(weights: Weights) -> Step:
    return Decoder(weights, NumpyAttention)


def _with_torch(weights: Weights) -> Step:
    from benchmarks.models.smollm2_torch import TorchDecoder

    return TorchDecoder(weights)


def _with_transformers(weights: Weights) -> Step:
    from benchmarks.models.smollm2_torch import TransformersDecoder

    return TransformersDecoder(weights)


DECODERS: Mapping[str, Callable[[Weights], Step]] = {
    "tileattn": with_tileattn,
    "numpy": _with_numpy,
    "torch": _with_torch,
    "transformers": _with_transformers,
}


def missing(decoder: str) -> list[str]:
    """Return the packages that a decoder needs and that are not installed."""
    needs = {"torch": ["torch"], "transformers": ["torch", "transformers"]}.get(decoder, [])
    return [package for package in needs if find_spec(package) is None]


# ---------------------------------------------------------------- generation


class Sampler:
    """Chooses a token by its logits.

    Parameters
    ----------
    temperature : float
        Divides the logits. 0 takes the likeliest token.
    top_p : float
        Only the likeliest tokens whose probabilities reach this sum are drawn from.
    seed : int
    """

    def __init__(self, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0) -> None:
        if not 0 <= temperature < math.inf:
            raise ValueError(f"temperature is {temperature}, expected 0 or more")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p is {top_p}, expected more than 0 and at most 1")
        if seed < 0:
            raise ValueError(f"seed is {seed}, expected 0 or more")
        self._temperature = temperature
        self._top_p = top_p
        self._random = np.random.default_rng(seed)

    def __call__(self, logits: Array) -> int:
        if self._temperature == 0:
            return int(logits.argmax())
        order = np.argsort(-logits)
        fall = (logits[order] - logits[order[0]]).astype(np.float64)
        total = np.cumsum(np.exp(fall / self._temperature))
        last = np.searchsorted(total, self._top_p * total[-1])
        drawn = self._random.uniform(0, total[last])
        return int(order[np.searchsorted(total[:last], drawn, side="right")])


def generate(
    step: Step, prompt: Sequence[int], sample: Callable[[Array], int], stops: set[int], limit: int
) -> Iterator[int]:
    """Yield the tokens that follow the prompt, up to a stop or the limit."""
    tokens = prompt
    for _ in range(limit):
        token = sample(step(tokens))
        if token in stops:
            return
        yield token
        tokens = [token]


# ---------------------------------------------------------------- the command


class _Stopwatch:
    """Passes tokens on, and notes them and when each of them came."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self._tokens = tokens
        self.seen: list[int] = []
        self.times: list[float] = []  # the first is that of the start

    def __iter__(self) -> Iterator[int]:
        self.times.append(time.perf_counter())
        for token in self._tokens:
            self.times.append(time.perf_counter())
            self.seen.append(token)
            yield token

    def report(self, prompt: int) -> str:
        """Tokens a second: of the prompt until the first one came, and of those after it."""
        if len(self.times) < 2:
            return "nothing generated"
        start, first, *rest = self.times
        text = f"prompt of {prompt} tokens, {prompt / (first - start):.1f} a second"
        if rest:
            text += f"; {len(rest)} more, {len(rest) / (rest[-1] - first):.1f} a second"
        return text


def _compare(
    weights: Weights, prompt: Sequence[int], answer: Sequence[int], rounds: int
) -> dict[str, Any]:
    """Measure every decoder that is installed on the same tokens, in turns; print a table."""
    steps = {name: make(weights) for name, make in DECODERS.items() if not missing(name)}
    ours = next(iter(steps))
    chunks = [prompt, *([token] for token in answer)]
    logits = {name: np.array([step(chunk) for chunk in chunks]) for name, step in steps.items()}
    scale = abs(logits[ours]).max()
    turns: dict[tuple[str, str], Turn] = {}
    for name, step in steps.items():
        turns[name, "prompt"] = timed_steps(step, 0, chunks[:1])
        turns[name, "answer"] = timed_steps(step, len(prompt), chunks[1:])
    seconds = interleave(turns, rounds)

    print(f"Prompt of {len(prompt)} tokens, answer of {len(answer)}; medians of {rounds} rounds.")
    print(f"Tokens a second, then {ours}'s speed over it in the same round (quartiles).")
    print(f"Difference: the largest of logits from {ours}'s, relative to the largest of these.")
    print()
    print(f"{'':12}  {'prompt':28}  {'answer':28}  difference")
    for name in steps:
        line = f"{name:12}"
        for part, count in (("prompt", len(prompt)), ("answer", len(answer))):
            speed = count / statistics.median(seconds[name, part])
            of = ratio(seconds[name, part], seconds[ours, part])
            beside = "" if name == ours else f"{of.median:.2f} ({of.low:.2f}..{of.high:.2f})"
            line += f"  {speed:7.1f}  {beside:19}"
        print(f"{line}  {abs(logits[name] - logits[ours]).max() / scale:.1e}")
    parts = ("prompt", "answer")
    return {
        "tokens": {"prompt": len(prompt), "answer": len(answer)},
        "seconds": {name: {part: seconds[name, part] for part in parts} for name in steps},
    }


def timed_steps(step: Step, length: int, chunks: Sequence[Sequence[int]]) -> Turn:
    """The seconds that chunks take behind the first `length` tokens that the step has seen."""

    def turn() -> float:
        step.truncate(length)
        start = time.perf_counter()
        for chunk in chunks:
            step(chunk)
        return time.perf_counter() - start

    return turn


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError:
        raise CommandError("standard input: is not UTF-8 text") from None


def _run(options: argparse.Namespace) -> None:
    for name in ("tokens", "rounds"):
        if (value := getattr(options, name)) < 1:
            raise CommandError(f"--{name} is {value}, expected at least 1")
    if options.decoder != "tileattn" and (options.weights, options.cache) != ("float32",) * 2:
        raise CommandError(f"--weights and --cache are tileattn's, not --with {options.decoder}'s")
    if absent := " ".join(missing(options.decoder)):
        raise CommandError(f"--with {options.decoder} needs more: pip install {absent}")
    if options.compare and os.environ.get("OMP_NUM_THREADS") != "1":
        raise CommandError("--compare is of one thread for each: set OMP_NUM_THREADS=1")
    if options.json:
        if not options.compare:
            raise CommandError("--json is of what --compare measures: give both")
        check_output("--json", options.json)
    try:
        sampler = Sampler(options.temperature, options.top_p, options.seed)
    except ValueError as error:
        raise CommandError(str(error)) from None
    question = _standard_input() if options.prompt == "-" else options.prompt
    if not question.strip():
        raise CommandError("the prompt is empty")
    weights, tokenizer = load(fetch(SMOLLM2))
    encode = tokenizer.encode if options.plain else tokenizer.chat
    prompt = encode(question)
    room = weights.config.context - len(prompt)
    if room < 1:
        raise CommandError(
            f"the prompt has {len(prompt)} tokens, expected less than {weights.config.context}"
        )
    if options.decoder == "tileattn":
        step: Step = with_tileattn(weights, options.weights, options.cache)
    else:
        step = DECODERS[options.decoder](weights)
    limit = min(options.tokens, room)
    tokens = _Stopwatch(generate(step, prompt, sampler, tokenizer.stops, limit))
    for piece in tokenizer.stream(tokens):
        print(piece, end="", flush=True)
    print()
    print(f"{options.decoder}: {tokens.report(len(prompt))}", file=sys.stderr)
    if options.compare and tokens.seen:
        print()
        figures = _compare(weights, prompt, tokens.seen, options.rounds)
        if options.json:
            record.save(options.json, "benchmarks.models.smollm2", figures)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models.smollm2",
        description="Stream the answer of a small language model to a question.",
    )
    parser.add_argument("prompt", help="the question; - reads it from standard input")
    parser.add_argument("--with", dest="decoder", choices=DECODERS, default="tileattn",
                        help="what computes attention; with torch and transformers, what computes "
                        "the whole model (default: tileattn)")  # fmt: skip
    parser.add_argument("--weights", choices=WEIGHTS, default="float32",
                        help="what tileattn's blocks keep their weights as; int4 is the file's "
                        "own 4 bits as they are (default: float32)")  # fmt: skip
    parser.add_argument("--cache", choices=CACHES, default="float32",
                        help="what they keep keys and values as (default: float32)")  # fmt: skip
    parser.add_argument("--tokens", type=int, default=256,
                        help="the most to generate (default: 256)")  # fmt: skip
    parser.add_argument("--temperature", type=float, default=0.0,
                        help="0, the default, always takes the likeliest token")  # fmt: skip
    parser.add_argument("--top-p", dest="top_p", type=float, default=1.0,
                        help="draw from the likeliest tokens that make up this share "
                        "(default: 1)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the drawing (default: 0)")
    parser.add_argument("--compare", action="store_true",
                        help="then measure every installed decoder on it, on one thread "
                        "(OMP_NUM_THREADS=1)")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=7,
                        help="of measurement with --compare (default: 7)")  # fmt: skip
    parser.add_argument("--json", metavar="FILE",
                        help="write what --compare measured there")  # fmt: skip
    parser.add_argument("--plain", action="store_true", help="continue the prompt as it stands")
    options = parser.parse_args(arguments)
    try:
        _run(options)
    except (CommandError, FetchError, WeightsError, ImportError) as error:
        print(f"smollm2: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
