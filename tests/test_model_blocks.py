"""The attention sub-layers of well-known models, as a block spells them, against plain NumPy.

Weights are small and random, named and laid out as in the models' checkpoints; the float64 forward
passes follow the models' definitions and share no code with the package.
"""

import numpy as np
import pytest

from tests.oracle import random
from tileattn import AttentionBlock, LayerNorm, RMSNorm, Rope, RopeScaling

D, N, H, B, T = 48, 6, 10, 2, 21


class Layer(dict):
    """Weights of one layer, drawn when they are first asked for: [out, in] and [out]."""

    def __init__(self, dtype, K=N):
        self.dtype, self.K = dtype, K

    def draw(self, name, *shape, mean=0.0, deviation=1.0):
        if name not in self:
            noise = random(len(self), *shape, dtype=np.float64)
            self[name] = (mean + deviation * noise).astype(self.dtype)
        return self[name]

    def projections(self):
        kv = self.K * H
        shapes = {"q": (N * H, D), "k": (kv, D), "v": (kv, D), "o": (D, N * H)}
        return [self.draw(f"{name}_proj.weight", *s, deviation=0.2) for name, s in shapes.items()]

    def biases(self, names="qkvo"):
        sizes = {"q": N * H, "k": self.K * H, "v": self.K * H, "o": D}
        return {name: self.draw(f"{name}_proj.bias", sizes[name]) for name in names}

    def layer_norm(self):
        return self.draw("norm.weight", D, mean=1, deviation=0.2), self.draw("norm.bias", D)

    def rms_norm(self, name="norm", width=D, mean=1.0):
        return self.draw(f"{name}.weight", width, mean=mean, deviation=0.2)


# ------------------------------------------------------------------ plain NumPy


def doubles(*arrays):
    return [a.astype(np.float64) for a in arrays]


def layer_norm(x, weight, bias, eps):
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + eps) * weight + bias


def rms_norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * weight


def rotate(x, frequencies, factor=1.0):
    """x[B, heads, T, H] with halves as pairs."""
    angle = np.arange(x.shape[2])[:, None] * np.concatenate([frequencies, frequencies])
    first, second = np.split(x, 2, axis=-1)
    return factor * (x * np.cos(angle) + np.concatenate([-second, first], -1) * np.sin(angle))


def frequencies_of(theta):
    return 1 / theta ** (np.arange(0, H, 2) / H)


def causal(window=None):
    """[T, T]: itself and what came before, `window` positions in all."""
    i, j = np.arange(T)[:, None], np.arange(T)
    return (j <= i) & (i - j < (window or T))


def attention(
    layer, x, sees, *, context=None, biases="", scale=H**-0.5, norms=None, turn=None,
    softcap=None, sinks=None,
):  # fmt: skip
    """Projections, attention by the whole matrix of scores, and projection."""
    weights = dict(zip("qkvo", doubles(*layer.projections()), strict=True))
    given = {name: bias.astype(np.float64) for name, bias in layer.biases(biases).items()}
    context = x if context is None else context

    def linear(name, a):
        return a @ weights[name].T + given.get(name, 0.0)

    def heads(name, a):
        return linear(name, a).reshape(*a.shape[:2], -1, H).swapaxes(1, 2)

    q, k, v = heads("q", x), heads("k", context), heads("v", context)
    if norms is not None:
        q, k = norms[0](q), norms[1](k)
    if turn is not None:
        q, k = turn(q), turn(k)
    k, v = np.repeat(k, N // layer.K, axis=1), np.repeat(v, N // layer.K, axis=1)
    score = scale * np.einsum("bnth,bnsh->bnts", q, k)
    if softcap is not None:
        score = np.tanh(score / softcap) * softcap
    if sees is not None:
        score = np.where(sees, score, -np.inf)
    if sinks is not None:
        column = np.broadcast_to(sinks[:, None, None], (*score.shape[:3], 1))
        score = np.concatenate([score, column], axis=-1)
    weight = np.exp(score - score.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    y = np.einsum("bnts,bnsh->btnh", weight[..., : v.shape[2]], v)
    return linear("o", y.reshape(*x.shape[:2], -1))


# ------------------------------------------------------------------ the models


def make(layer, biases="", **options):
    """A block of a layer's [out, in] matrices."""
    named = {f"b_{name}": bias for name, bias in layer.biases(biases).items()}
    return AttentionBlock.from_linear(
        *layer.projections(), **named, num_heads=N, num_kv_heads=layer.K, **options
    )


def bert(dtype, x):
    """Post-norm; a padded batch."""
    layer, lengths = Layer(dtype), np.array([T, T - 5])
    weight, bias = layer.layer_norm()
    block = make(layer, "qkvo", norm=LayerNorm(weight, bias, eps=1e-12))
    sees = np.arange(T) < lengths[:, None, None, None]
    y = x + attention(layer, x, sees, biases="qkvo")
    expected = layer_norm(y, *doubles(weight, bias), 1e-12)
    return expected, lambda x: block(x, key_value_seq_lengths=lengths)


def gpt2(dtype, x):
    """c_attn and c_proj are [in, out]."""
    layer = Layer(dtype)
    weight, bias = layer.layer_norm()
    q, k, v, o = layer.projections()
    b = layer.biases()
    c_attn, c_proj = np.concatenate([q, k, v]).T, o.T
    block = AttentionBlock.from_linear(
        w_qkv=c_attn.T,
        b_qkv=np.concatenate([b["q"], b["k"], b["v"]]),
        w_o=c_proj.T,
        b_o=b["o"],
        num_heads=N,
        norm=LayerNorm(weight, bias),
        norm_position="pre",
        is_causal=True,
    )
    h = layer_norm(x, *doubles(weight, bias), 1e-5)
    return x + attention(layer, h, causal(), biases="qkvo"), block


def llama3(dtype, x):
    layer = Layer(dtype, K=2)
    weight = layer.rms_norm()
    config = {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }
    block = make(
        layer,
        norm=RMSNorm(weight, eps=1e-5),
        norm_position="pre",
        rope=Rope.from_config(config),
        is_causal=True,
    )
    frequencies = frequencies_of(500000.0)
    wavelength = 2 * np.pi / frequencies
    smooth = np.clip((8192 / wavelength - 1) / (4 - 1), 0, 1)
    frequencies = smooth * frequencies + (1 - smooth) * frequencies / 8
    h = rms_norm(x, weight.astype(np.float64), 1e-5)
    return x + attention(layer, h, causal(), turn=lambda a: rotate(a, frequencies)), block


def qwen3(dtype, x):
    layer = Layer(dtype, K=3)
    weight = layer.rms_norm()
    q_weight, k_weight = (layer.rms_norm(name, H) for name in ("q_norm", "k_norm"))
    block = make(
        layer,
        norm=RMSNorm(weight),
        norm_position="pre",
        q_norm=RMSNorm(q_weight),
        k_norm=RMSNorm(k_weight),
        rope=Rope(theta=1e6),
        is_causal=True,
    )
    q_weight, k_weight = doubles(q_weight, k_weight)
    norms = lambda q: rms_norm(q, q_weight, 1e-6), lambda k: rms_norm(k, k_weight, 1e-6)
    h = rms_norm(x, weight.astype(np.float64), 1e-6)
    turn = frequencies_of(1e6)
    return x + attention(layer, h, causal(), norms=norms, turn=lambda a: rotate(a, turn)), block


def gemma2(dtype, x):
    """A second norm before the residual is added; norms' weights are offsets from 1."""
    layer = Layer(dtype, K=2)
    before, after = (layer.rms_norm(name, mean=0.0) for name in ("input", "post_attention"))
    block = make(
        layer,
        norm=RMSNorm(1 + before),
        norm_position="pre",
        residual=False,
        rope=Rope(),
        scale=32**-0.5,  # query_pre_attn_scalar
        softcap=5.0,
        is_causal=True,
        local_window_size=(7 - 1, None),  # sliding_window = 7
    )
    post_norm = RMSNorm(1 + after)
    h = rms_norm(x, 1 + before.astype(np.float64), 1e-6)
    y = attention(
        layer,
        h,
        causal(7),
        scale=32**-0.5,
        softcap=5.0,
        turn=lambda a: rotate(a, frequencies_of(10000.0)),
    )
    expected = x + rms_norm(y, 1 + after.astype(np.float64), 1e-6)
    return expected, lambda x: x + post_norm(block(x))


def gemma3(dtype, x, is_global):
    """Layers with a window have a rope of their own."""
    layer = Layer(dtype, K=2)
    before, after = (layer.rms_norm(name, mean=0.0) for name in ("input", "post_attention"))
    q_weight, k_weight = (layer.rms_norm(name, H, mean=0.0) for name in ("q_norm", "k_norm"))
    block = make(
        layer,
        norm=RMSNorm(1 + before),
        norm_position="pre",
        residual=False,
        q_norm=RMSNorm(1 + q_weight),
        k_norm=RMSNorm(1 + k_weight),
        rope=Rope(theta=1e6, scaling=RopeScaling.linear(8)) if is_global else Rope(),
        scale=32**-0.5,
        is_causal=True,
        local_window_size=None if is_global else (7 - 1, None),
    )
    post_norm = RMSNorm(1 + after)
    q_weight, k_weight = doubles(q_weight, k_weight)
    frequencies = frequencies_of(1e6) / 8 if is_global else frequencies_of(10000.0)
    y = attention(
        layer,
        rms_norm(x, 1 + before.astype(np.float64), 1e-6),
        causal(None if is_global else 7),
        scale=32**-0.5,
        norms=(
            lambda q: rms_norm(q, 1 + q_weight, 1e-6),
            lambda k: rms_norm(k, 1 + k_weight, 1e-6),
        ),
        turn=lambda a: rotate(a, frequencies),
    )
    expected = x + rms_norm(y, 1 + after.astype(np.float64), 1e-6)
    return expected, lambda x: x + post_norm(block(x))


def mistral(dtype, x):
    layer = Layer(dtype, K=2)
    weight = layer.rms_norm()
    block = make(
        layer,
        norm=RMSNorm(weight, eps=1e-5),
        norm_position="pre",
        rope=Rope(),
        is_causal=True,
        local_window_size=(7 - 1, None),  # sliding_window = 7
    )
    h = rms_norm(x, weight.astype(np.float64), 1e-5)
    turn = frequencies_of(10000.0)
    return x + attention(layer, h, causal(7), turn=lambda a: rotate(a, turn)), block


def gpt_oss(dtype, x):
    layer = Layer(dtype, K=2)
    weight, sinks = layer.rms_norm(), layer.draw("sinks", N)
    config = {
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
    }
    block = make(
        layer,
        "qkvo",
        norm=RMSNorm(weight, eps=1e-5),
        norm_position="pre",
        rope=Rope.from_config(config),
        sinks=sinks,
        is_causal=True,
        local_window_size=(7 - 1, None),  # sliding_window = 7
    )
    # YaRN: pairs that turn 32 times within 4096 positions are kept, those that turn once or less
    # slowed down 32 times, those between are mixed.
    low, high = (H * np.log(4096 / (turns * 2 * np.pi)) / (2 * np.log(150000)) for turns in (32, 1))
    slowed = np.clip((np.arange(H // 2) - low) / (high - low), 0, 1)
    frequencies = frequencies_of(150000.0) * (1 - slowed + slowed / 32)
    y = attention(
        layer,
        rms_norm(x, weight.astype(np.float64), 1e-5),
        causal(7),
        biases="qkvo",
        turn=lambda a: rotate(a, frequencies, 0.1 * np.log(32) + 1),
        sinks=sinks.astype(np.float64),
    )
    return x + y, block


def whisper(dtype, x, is_cross):
    """No bias of keys; the decoder's cross attention reads what the encoder has normalised."""
    layer = Layer(dtype)
    weight, bias = layer.layer_norm()
    block = make(layer, "qvo", norm=LayerNorm(weight, bias), norm_position="pre")
    audio = random(99, B, 33, D, dtype=dtype) if is_cross else None
    h = layer_norm(x, *doubles(weight, bias), 1e-5)
    context = None if audio is None else audio.astype(np.float64)
    expected = x + attention(layer, h, None, context=context, biases="qvo")
    return expected, lambda x: block(x, context=audio)


def vit(dtype, x):
    layer = Layer(dtype)
    weight, bias = layer.layer_norm()
    block = make(layer, "qkvo", norm=LayerNorm(weight, bias, eps=1e-12), norm_position="pre")
    h = layer_norm(x, *doubles(weight, bias), 1e-12)
    return x + attention(layer, h, None, biases="qkvo"), block


MODELS = {
    "BERT": bert,
    "GPT-2": gpt2,
    "Llama 3": llama3,
    "Qwen 3": qwen3,
    "Gemma 2": gemma2,
    "Gemma 3, window": lambda dtype, x: gemma3(dtype, x, is_global=False),
    "Gemma 3, global": lambda dtype, x: gemma3(dtype, x, is_global=True),
    "Mistral": mistral,
    "GPT-OSS": gpt_oss,
    "Whisper's encoder": lambda dtype, x: whisper(dtype, x, is_cross=False),
    "Whisper's cross attention": lambda dtype, x: whisper(dtype, x, is_cross=True),
    "ViT": vit,
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_model(model, dtype):
    x = random(50, B, T, D, dtype=dtype)
    expected, block = model(dtype, x.astype(np.float64))
    got = block(x)
    assert got.dtype == dtype
    # Two sums of up to N H products in a row, with as much for attention and norms: the errors of n
    # additions grow like sqrt(n). A mistake in the meaning of anything is off by far more.
    atol = 2 * np.sqrt(N * H) * np.finfo(dtype).eps * np.abs(expected).max()
    np.testing.assert_allclose(got, expected, rtol=0, atol=atol)
