"""Weights read from files: every naming, every way in which a file can be wrong."""

import gc
import json
import os
import re
import sys
import zipfile

import numpy as np
import pytest

from tileattn import AttentionBlock, LayerNorm, RMSNorm, Rope, RopeScaling, reference
from tileattn.weights import NAMINGS, WeightsError, load_arguments, load_block, load_tensors

D, N, K, H = 10, 4, 2, 3
FORMATS = ["npz", "safetensors"]
BERT = "bert.encoder.layer.{i}."
RELATIVES_OF_BERT = [
    "bert",
    "bert-generation",
    "camembert",
    "data2vec-text",
    "electra",
    "ernie",
    "roberta",
    "roc_bert",
    "xlm-roberta",
]
# float64 through three products over fewer than 100 terms, and a LayerNorm that divides by about 1
TOLERANCE = 1000 * np.finfo(np.float64).eps


def make_layer(seed, dtype=np.float64, num_kv_heads=K):
    """Arguments of AttentionBlock, and its LayerNorm's weight and bias, drawn at random."""
    random = np.random.default_rng(seed)
    kv_heads = num_kv_heads
    shapes = {
        "w_q": (D, N, H), "w_k": (D, kv_heads, H), "w_v": (D, kv_heads, H), "w_o": (N, H, D),
        "b_q": (N, H), "b_k": (kv_heads, H), "b_v": (kv_heads, H), "b_o": (D,),
        "norm_weight": (D,), "norm_bias": (D,),
    }  # fmt: skip
    return {name: random.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def linear(layer):
    """The same layer as torch.nn.Linear holds it: [out, in] matrices and flat biases."""
    flat = {name: layer[name].reshape(D, -1).T for name in ("w_q", "w_k", "w_v")}
    flat["w_o"] = layer["w_o"].reshape(-1, D).T
    return flat | {name: layer[name].reshape(-1) for name in layer if not name.startswith("w_")}


def own_names(layer, i=None):
    return {f"layers.{i}.{name}" if i is not None else name: layer[name] for name in layer}


def bert_names(layer, i):
    flat, base = linear(layer), BERT.format(i=i) + "attention."
    tensors = {}
    for part, name in zip("qkv", ("query", "key", "value"), strict=True):
        tensors[f"{base}self.{name}.weight"] = flat[f"w_{part}"]
        tensors[f"{base}self.{name}.bias"] = flat[f"b_{part}"]
    tensors[f"{base}output.dense.weight"] = flat["w_o"]
    tensors[f"{base}output.dense.bias"] = flat["b_o"]
    tensors[f"{base}output.LayerNorm.weight"] = flat["norm_weight"]
    tensors[f"{base}output.LayerNorm.bias"] = flat["norm_bias"]
    return tensors


def torch_names(layer, base, norm=True):
    flat = linear(layer)
    attention = f"{base}self_attn." if norm else base
    tensors = {
        f"{attention}in_proj_weight": np.concatenate([flat["w_q"], flat["w_k"], flat["w_v"]]),
        f"{attention}in_proj_bias": np.concatenate([flat["b_q"], flat["b_k"], flat["b_v"]]),
        f"{attention}out_proj.weight": flat["w_o"],
        f"{attention}out_proj.bias": flat["b_o"],
    }
    if norm:
        tensors[f"{base}norm1.weight"] = flat["norm_weight"]
        tensors[f"{base}norm1.bias"] = flat["norm_bias"]
    return tensors


def llama_names(layer, i, biases=()):
    """Those of the biases that `biases` names, and the norms of heads that the layer has."""
    flat, base = linear(layer), f"model.layers.{i}."
    tensors = {f"{base}input_layernorm.weight": layer["norm_weight"]}
    for part in "qkvo":
        tensors[f"{base}self_attn.{part}_proj.weight"] = flat[f"w_{part}"]
    for part in biases:
        tensors[f"{base}self_attn.{part}_proj.bias"] = flat[f"b_{part}"]
    for part in "qk":
        if f"{part}_norm" in layer:
            tensors[f"{base}self_attn.{part}_norm.weight"] = layer[f"{part}_norm"]
    return tensors


def gpt2_names(layer, i):
    tensors, base = torch_names(layer, "", norm=False), f"transformer.h.{i}."
    return {
        f"{base}attn.c_attn.weight": tensors["in_proj_weight"].T,
        f"{base}attn.c_attn.bias": tensors["in_proj_bias"],
        f"{base}attn.c_proj.weight": tensors["out_proj.weight"].T,
        f"{base}attn.c_proj.bias": tensors["out_proj.bias"],
        f"{base}ln_1.weight": layer["norm_weight"],
        f"{base}ln_1.bias": layer["norm_bias"],
    }


def configure(path, **values):
    path.with_name("config.json").write_text(json.dumps(values))
    return path


def save(path, tensors):
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    if path.suffix == ".npz":
        np.savez(path, **tensors)
    else:
        pytest.importorskip("safetensors.numpy").save_file(tensors, path)
    return path


def save_raw(path, tensors):
    """Write a .safetensors file by hand: name -> (dtype's name in the format, shape, bytes)."""
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def check(block, layer, *, eps=1e-5, is_causal=False, norm=True):
    """The block computes what the reference says of the layer, and the bits of a hand-made one."""
    arguments = {name: layer[name] for name in layer if not name.startswith("norm")}
    ln = LayerNorm(layer.get("norm_weight"), layer.get("norm_bias"), eps) if norm else None
    arguments |= {"norm": ln, "residual": norm, "is_causal": is_causal}
    x = np.random.default_rng(99).normal(size=(2, 7, D)).astype(block.dtype)
    output = block(x)
    assert output.dtype == layer["w_q"].dtype
    np.testing.assert_array_equal(output, AttentionBlock(**arguments)(x))
    if block.dtype == np.float64:
        expected = reference.attention_block(x, **arguments)
        np.testing.assert_allclose(output, expected, rtol=0, atol=TOLERANCE * abs(expected).max())


@pytest.fixture(params=FORMATS)
def path(request, tmp_path):
    if request.param == "safetensors":
        pytest.importorskip("safetensors")
    return tmp_path / f"weights.{request.param}"


@pytest.fixture
def npz(tmp_path):
    return tmp_path / "weights.npz"


# ---------------------------------------------------------------- each naming


def test_own_names(path):
    layer = make_layer(0)
    block = load_block(save(path, own_names(layer)), is_causal=True)
    assert (block.num_heads, block.num_kv_heads, block.head_dim, block.model_dim) == (N, K, H, D)
    check(block, layer, is_causal=True)


def test_own_names_of_several_layers(path):
    layers = [make_layer(seed) for seed in range(12)]
    save(path, {k: v for i, layer in enumerate(layers) for k, v in own_names(layer, i).items()})
    for i in (0, 1, 10, 11):
        check(load_block(path, layer=i), layers[i])


@pytest.mark.parametrize("absent", [["b_q"], ["b_o", "norm_bias"], ["norm_weight", "norm_bias"]])
def test_own_names_with_tensors_left_out(npz, absent):
    layer = make_layer(1)
    for name in absent:
        del layer[name]
    check(load_block(save(npz, own_names(layer))), layer)


def test_own_names_with_other_widths(npz):
    random = np.random.default_rng(2)
    shapes = {"w_q": (D, N, H), "w_k": (6, K, H), "w_v": (6, K, 5), "w_o": (N, 5, D)}
    layer = {name: random.normal(size=shape) for name, shape in shapes.items()}
    block = load_block(save(npz, layer), num_heads=N, num_kv_heads=K)
    assert (block.context_dim, block.v_head_dim) == (6, 5)
    x, context = random.normal(size=(1, 3, D)), random.normal(size=(1, 4, 6))
    expected = reference.attention_block(x, **layer, context=context)
    np.testing.assert_allclose(block(x, context=context), expected, rtol=0, atol=5 * TOLERANCE)


def test_bert_names(path):
    layers = [make_layer(seed, num_kv_heads=N) for seed in range(3)]
    save(path, {k: v for i, layer in enumerate(layers) for k, v in bert_names(layer, i).items()})
    for i, layer in enumerate(layers):
        check(load_block(path, layer=i, num_heads=N), layer, eps=1e-12)


def test_bert_names_with_fewer_kv_heads(npz):
    layer = make_layer(3)
    save(npz, bert_names(layer, 0))
    check(load_block(npz, num_heads=N, num_kv_heads=K), layer, eps=1e-12)


def test_bert_takes_heads_and_eps_from_config(npz):
    layer = make_layer(4, num_kv_heads=N)
    save(npz, bert_names(layer, 0))
    config = npz.with_name("config.json")
    config.write_text(json.dumps({"num_attention_heads": N, "layer_norm_eps": 0.25}))
    check(load_block(npz), layer, eps=0.25)
    check(load_block(npz, num_heads=N), layer, eps=0.25)
    with pytest.raises(WeightsError, match=r"num_heads is 2, but the config\.json .* says 4"):
        load_block(npz, num_heads=2)
    config.write_text("{}")
    check(load_block(npz, num_heads=N), layer, eps=1e-12)


def test_no_other_model_counts_as_bert():
    (naming,) = (n for n in NAMINGS if n.title == "Hugging Face BERT")
    assert set(naming.models) == set(RELATIVES_OF_BERT)


@pytest.mark.parametrize("model", RELATIVES_OF_BERT)
def test_relatives_of_bert(npz, model):
    layer = make_layer(4, num_kv_heads=N)
    config = {"model_type": model, "num_attention_heads": N, "layer_norm_eps": 0.25}
    configure(save(npz, bert_names(layer, 0)), **config)
    check(load_block(npz), layer, eps=0.25)
    configure(npz, **config, is_decoder=True)
    check(load_block(npz), layer, eps=0.25, is_causal=True)
    check(load_block(npz, is_causal=False), layer, eps=0.25)


@pytest.mark.parametrize("model", ["roformer", "xmod", "big_bird", ["bert"], 3])
def test_models_with_bert_s_names_and_another_formula(npz, model):
    save(npz, bert_names(make_layer(4, num_kv_heads=N), 0))
    configure(npz, model_type=model, num_attention_heads=N, pre_norm=True)
    message = rf"model_type is {re.escape(repr(model))}, expected one of bert, .* Hugging Face BERT"
    fails(npz, message, blamed="config.json")


@pytest.mark.parametrize("base", ["", "layers.{i}.", "model.encoder.layers.{i}."])
def test_torch_encoder_names(path, base):
    layers = [make_layer(seed, num_kv_heads=N) for seed in range(2 if "{i}" in base else 1)]
    tensors = {}
    for i, layer in enumerate(layers):
        tensors |= torch_names(layer, base.format(i=i))
        tensors[base.format(i=i) + "linear1.weight"] = np.zeros((2, 2))
    save(path, tensors)
    for i, layer in enumerate(layers):
        check(load_block(path, layer=i, num_heads=N), layer)


def test_torch_encoder_without_biases(npz):
    layer = make_layer(5, num_kv_heads=N)
    tensors = torch_names(layer, "layers.0.")
    save(npz, {name: tensor for name, tensor in tensors.items() if "bias" not in name})
    without = {name: tensor for name, tensor in layer.items() if not name.startswith("b_")}
    del without["norm_bias"]
    check(load_block(npz, num_heads=N), without)


def test_torch_attention_alone_has_neither_residual_nor_norm(npz):
    layer = make_layer(6)
    save(npz, torch_names(layer, "", norm=False))
    check(load_block(npz, num_heads=N, num_kv_heads=K), layer, norm=False)


LAYER = make_layer(26)
KINDS = [
    (own_names(LAYER), 1e-5),
    (bert_names(LAYER, 0), 1e-12),
    (torch_names(LAYER, "layers.0."), 1e-5),
    (torch_names(LAYER, "", norm=False), None),
]


def without_biases(tensors):
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not name.endswith("bias") and ".b_" not in f".{name}"
    }


@pytest.mark.parametrize(
    "tensors, eps, biases",
    # BERT's layers have all their biases always.
    [(*kind, True) for kind in KINDS]
    + [(without_biases(tensors), eps, False) for tensors, eps in KINDS if eps != 1e-12],
)
def test_arguments_are_the_constructor_s(npz, tensors, eps, biases):
    save(npz, tensors)
    arguments = load_arguments(npz, num_heads=N, num_kv_heads=K, is_causal=True)
    norm = arguments.pop("norm")
    assert arguments.pop("residual") is (eps is not None)
    assert arguments.pop("is_causal") is True
    names = [name for name in (LAYER if biases else without_biases(LAYER)) if "norm" not in name]
    assert sorted(arguments) == sorted(names)
    for name in names:
        np.testing.assert_array_equal(arguments[name], LAYER[name], strict=True)
    if eps is None:
        assert norm is None
    else:
        assert norm.eps == eps
        np.testing.assert_array_equal(norm.weight, LAYER["norm_weight"])
        assert (norm.bias is not None) == biases


def test_a_layer_of_linear_matrices_is_from_linear_s(npz):
    flat = linear(LAYER)
    norm = LayerNorm(flat.pop("norm_weight"), flat.pop("norm_bias"))
    block = AttentionBlock.from_linear(**flat, num_heads=N, num_kv_heads=K, norm=norm)
    x = np.random.default_rng(0).normal(size=(5, D))
    for tensors in (own_names(LAYER), torch_names(LAYER, "layers.0.")):
        loaded = load_block(save(npz, tensors), num_heads=N, num_kv_heads=K)
        np.testing.assert_array_equal(block(x), loaded(x))


def test_state_dict_of_torch(npz):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(12, 4, 24, dtype=torch.float64, batch_first=True)
    stack = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    for parameter in stack.parameters():  # as made, biases are 0 and LayerNorm's weights 1
        torch.nn.init.uniform_(parameter, -1, 1)
    save(npz, {name: tensor.numpy() for name, tensor in stack.state_dict().items()})
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    second = stack.eval().layers[1]  # eval: no dropout
    with torch.no_grad():
        attended = second.self_attn(x, x, x, need_weights=False)[0]
        expected = second.norm1(x + attended).numpy()
    output = load_block(npz, layer=1, num_heads=4)(x.numpy())
    np.testing.assert_allclose(output, expected, rtol=0, atol=TOLERANCE * abs(expected).max())


LLAMA = {
    "model_type": "llama",
    "num_attention_heads": N,
    "num_key_value_heads": K,
    "rms_norm_eps": 0.01,
    "rope_theta": 50.0,
}


def make_decoder_layer(seed, dtype=np.float64):
    """As make_layer, with an even head width, and norms of heads."""
    random = np.random.default_rng(seed)
    shapes = {
        "w_q": (D, N, 4), "w_k": (D, K, 4), "w_v": (D, K, 4), "w_o": (N, 4, D),
        "b_q": (N, 4), "b_k": (K, 4), "b_v": (K, 4), "b_o": (D,),
        "norm_weight": (D,), "norm_bias": (D,), "q_norm": (4,), "k_norm": (4,),
    }  # fmt: skip
    return {name: random.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def plain_decoder(layer):
    return {name: layer[name] for name in layer if name not in ("q_norm", "k_norm")}


def check_decoder(block, layer, *, biases="", **options):
    """As `check`, for a pre-norm block with those options, of which the norm is one."""
    names = [f"w_{part}" for part in "qkvo"] + [f"b_{part}" for part in biases]
    arguments = {name: layer[name] for name in names}
    arguments |= {"norm_position": "pre", "is_causal": True} | options
    x = np.random.default_rng(99).normal(size=(2, 7, D)).astype(block.dtype)
    output = block(x)
    np.testing.assert_array_equal(output, AttentionBlock(**arguments)(x))
    if block.dtype == np.float64:
        expected = reference.attention_block(x, **arguments)
        np.testing.assert_allclose(output, expected, rtol=0, atol=TOLERANCE * abs(expected).max())


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_llama_names(path, dtype):
    layers = [plain_decoder(make_decoder_layer(seed, dtype)) for seed in range(3)]
    tensors = {k: v for i, layer in enumerate(layers) for k, v in llama_names(layer, i).items()}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, dtype)
    tensors["model.layers.0.post_attention_layernorm.weight"] = np.ones(D, dtype)
    configure(save(path, tensors), **LLAMA)
    for i, layer in enumerate(layers):
        norm = RMSNorm(layer["norm_weight"], eps=0.01)
        check_decoder(load_block(path, layer=i), layer, norm=norm, rope=Rope(theta=50.0))
    assert not load_block(path, is_causal=False).is_causal


def test_llama_with_biases_and_a_scaled_rope(npz):
    layer = plain_decoder(make_decoder_layer(30))
    scaling = {"rope_type": "linear", "factor": 4.0}
    configure(save(npz, llama_names(layer, 0, "qkvo")), **LLAMA, rope_scaling=scaling)
    norm = RMSNorm(layer["norm_weight"], eps=0.01)
    rope = Rope(theta=50.0, scaling=RopeScaling.linear(4.0))
    check_decoder(load_block(npz), layer, biases="qkvo", norm=norm, rope=rope)


def test_llama_whose_config_leaves_out_what_is_usual(npz):
    layer = plain_decoder(make_decoder_layer(31))
    save(npz, llama_names(layer, 0))
    configure(npz, model_type="llama")
    norm = RMSNorm(layer["norm_weight"], eps=1e-6)
    block = load_block(npz, num_heads=N, num_kv_heads=K)
    check_decoder(block, layer, norm=norm, rope=Rope())
    fails(npz, "num_heads must be given")


def test_gemma_s_weights_are_distances_from_one(npz):
    layer = plain_decoder(make_decoder_layer(32))
    configure(save(npz, llama_names(layer, 0)), **LLAMA | {"model_type": "gemma"})
    norm = RMSNorm(1 + layer["norm_weight"], eps=0.01)
    check_decoder(load_block(npz), layer, norm=norm, rope=Rope(theta=50.0))


def test_qwen3_has_norms_of_heads(path):
    layer = make_decoder_layer(33)
    configure(save(path, llama_names(layer, 0)), **LLAMA | {"model_type": "qwen3"})
    norms = {
        "norm": RMSNorm(layer["norm_weight"], eps=0.01),
        "q_norm": RMSNorm(layer["q_norm"], eps=0.01),
        "k_norm": RMSNorm(layer["k_norm"], eps=0.01),
    }
    check_decoder(load_block(path), layer, **norms, rope=Rope(theta=50.0))
    configure(path, **LLAMA)
    fails(path, "model_type is 'llama', but the layer has a q_norm", blamed="config.json")
    save(path, llama_names(plain_decoder(layer), 0))
    configure(path, **LLAMA | {"model_type": "qwen3"})
    fails(path, "model_type is 'qwen3', but the layer has no q_norm", blamed="config.json")


QWEN = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 3}
FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    "values, window",
    [
        ({"model_type": "llama", "sliding_window": 3}, None),
        ({"model_type": "llama", "layer_types": [SLIDING, FULL]}, None),
        ({"model_type": "mistral", "sliding_window": 3}, (2, None)),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "mistral", "sliding_window": None, "layer_types": [FULL] * 2}, None),
        ({"model_type": "mistral"}, (4095, None)),
        ({"model_type": "mistral", "layer_types": [SLIDING] * 2}, (4095, None)),
        (QWEN | {"max_window_layers": 0, "use_sliding_window": False}, None),
        (QWEN | {"max_window_layers": 0, "use_sliding_window": None}, None),
        (QWEN | {"use_sliding_window": False, "layer_types": [FULL] * 2}, None),
        (QWEN | {"max_window_layers": 0}, (2, None)),
        (QWEN | {"max_window_layers": 1}, (2, None)),
        (QWEN | {"max_window_layers": 2}, None),
        (QWEN, None),
        (QWEN | {"max_window_layers": None}, None),
        (QWEN | {"max_window_layers": 0, "sliding_window": None}, None),
        # What is said of each layer counts, not from which on.
        (QWEN | {"layer_types": [FULL, SLIDING]}, (2, None)),
        (QWEN | {"max_window_layers": 0, "layer_types": [SLIDING, FULL]}, None),
    ],
)
def test_windows_of_decoders(npz, values, window):
    layer = plain_decoder(make_decoder_layer(34))
    configure(save(npz, llama_names(layer, 1, "qkv")), **LLAMA | values)
    norm = RMSNorm(layer["norm_weight"], eps=0.01)
    options = {"norm": norm, "rope": Rope(theta=50.0), "local_window_size": window}
    block = load_block(npz, layer=1)
    assert block.local_window_size == window
    check_decoder(block, layer, biases="qkv", **options)


def test_gpt2_names(path):
    layers = [make_layer(seed, num_kv_heads=N) for seed in range(2)]
    tensors = {k: v for i, layer in enumerate(layers) for k, v in gpt2_names(layer, i).items()}
    tensors["transformer.h.0.attn.bias"] = np.ones((1, 1, 5, 5))
    tensors["transformer.h.0.attn.masked_bias"] = np.ones(())
    configure(save(path, tensors), model_type="gpt2")
    for i, layer in enumerate(layers):
        norm = LayerNorm(layer["norm_weight"], layer["norm_bias"])
        block = load_block(path, layer=i, num_heads=N)
        check_decoder(block, layer, biases="qkvo", norm=norm)
    configure(path, model_type="gpt2", n_head=N, layer_norm_epsilon=0.5)
    norm = LayerNorm(layers[1]["norm_weight"], layers[1]["norm_bias"], eps=0.5)
    check_decoder(load_block(path, layer=1), layers[1], biases="qkvo", norm=norm)


@pytest.mark.parametrize(
    "values, message",
    [
        # The first GPT's layers are post-norm, with the same names.
        ({}, "is missing or has no model_type, which .* Hugging Face GPT-2 needs"),
        ({"model_type": "openai-gpt"}, "model_type is 'openai-gpt', expected one of gpt2 for"),
        ({"scale_attn_by_inverse_layer_idx": True}, "layer_idx is True, expected False"),
        ({"scale_attn_weights": False}, "scale_attn_weights is False, expected True"),
        ({"scale_attn_weights": 1}, "scale_attn_weights is 1, expected true or false"),
        ({"is_causal": False}, "is_causal is False, expected True"),
    ],
)
def test_config_of_gpt2_that_cannot_be_used(npz, values, message):
    save(npz, gpt2_names(make_layer(37, num_kv_heads=N), 0))
    if values:
        configure(npz, **{"model_type": "gpt2"} | values)
    fails(npz, message, blamed="config.json", num_heads=N)


@pytest.mark.parametrize(
    "values, message",
    [
        ({}, "is missing or has no model_type"),
        (LLAMA | {"model_type": "gemma2"}, "model_type is 'gemma2', expected one of llama, "),
        (LLAMA | {"num_key_value_heads": 0}, "num_key_value_heads is 0, expected an integer of at"),
        (LLAMA | {"rms_norm_eps": "0"}, "rms_norm_eps is '0', expected a number"),
        (LLAMA | {"rope_scaling": {"rope_type": "dynamic"}}, "rope_type 'dynamic'"),
        (LLAMA | {"rope_parameters": [1]}, "rope_parameters"),
        (LLAMA | {"partial_rotary_factor": np.inf, "head_dim": 4}, "must be finite"),
        (LLAMA | {"rope_theta": 10**399}, "theta must be a real number"),
        (LLAMA | {"rms_norm_eps": 10**399}, "rms_norm_eps is 1000"),
        (LLAMA | {"is_causal": False}, "is_causal is False, expected True"),
        (LLAMA | {"layer_types": []}, r"layer_types is \[\], expected .* for layer 0"),
        (LLAMA | {"layer_types": 5}, "layer_types is 5, expected a list"),
        (LLAMA | {"layer_types": {"0": FULL}}, r"layer_types is \{'0': .*\}, expected a list"),
        (LLAMA | {"layer_types": [[FULL]]}, r"layer_types is \[\['full_.*\]\], expected a list"),
        (
            LLAMA | {"layer_types": [SLIDING]},
            "'sliding_attention' for .* llama has 'full_attention'",
        ),
        (
            LLAMA | {"model_type": "mistral", "sliding_window": 3, "layer_types": [FULL]},
            "layer_types has 'full_attention' for layer 0, .* mistral has 'sliding_attention'",
        ),
        (
            LLAMA | {"model_type": "mistral", "sliding_window": "3"},
            "sliding_window is '3', expected",
        ),
        (
            LLAMA | {"model_type": "gemma", "use_bidirectional_attention": True},
            "use_bidirectional_attention is True, expected False",
        ),
        (
            LLAMA | QWEN | {"use_sliding_window": False, "layer_types": [SLIDING]},
            "layer_types has 'sliding_attention' for layer 0, .* qwen2 has 'full_attention' there",
        ),
        (
            LLAMA | QWEN | {"sliding_window": None, "layer_types": [SLIDING]},
            "layer_types has 'sliding_attention' for layer 0, .* qwen2 has 'full_attention' there",
        ),
        (LLAMA | QWEN | {"use_sliding_window": "false"}, "is 'false', expected true or false"),
        (LLAMA | QWEN | {"max_window_layers": "28"}, "max_window_layers is '28', expected an int"),
        (LLAMA | QWEN | {"max_window_layers": -1}, "max_window_layers is -1, expected .* least 0"),
    ],
)
def test_config_of_a_decoder_that_cannot_be_used(npz, values, message):
    tensors = llama_names(plain_decoder(make_decoder_layer(35)), 0)
    # A tensor that cannot be read: what the config.json says is judged before any is.
    np.savez(npz, **tensors | {"model.layers.0.self_attn.q_proj.weight": np.array([None])})
    if values:
        configure(npz, **values)
    fails(npz, message, blamed="config.json")


@pytest.mark.parametrize(
    "values, message",
    [
        ({"head_dim": 8}, "head_dim is 8, but the tensors have H = 4"),
        ({"head_dim": 10**399}, "head_dim is 1000"),
        ({"hidden_size": D + 1}, f"hidden_size is {D + 1}, but the tensors have D = {D}"),
    ],
)
def test_config_of_a_decoder_of_other_widths(npz, values, message):
    configure(save(npz, llama_names(plain_decoder(make_decoder_layer(35)), 0)), **LLAMA | values)
    fails(npz, message, blamed="config.json")
    configure(npz, **LLAMA | {"head_dim": 4, "hidden_size": D})
    load_block(npz)


def test_a_decoder_of_another_formula(npz):
    tensors = llama_names(plain_decoder(make_decoder_layer(36)), 0)
    stranger = "model.layers.0.self_attn.sinks"
    configure(save(npz, tensors | {stranger: np.ones(N)}), **LLAMA)
    fails(npz, f"{stranger} is not part of a Hugging Face Llama layer")
    tensors = gpt2_names(make_layer(36, num_kv_heads=N), 0)
    stranger = "transformer.h.0.attn.q_attn.weight"
    configure(save(npz, tensors | {stranger: np.eye(D)}), model_type="gpt2")
    fails(npz, f"{stranger} is not part of a Hugging Face GPT-2 layer")


def test_prefix_chooses_among_stacks(npz):
    query, passage = make_layer(7), make_layer(8)
    tensors = {f"query.{name}": tensor for name, tensor in own_names(query, 0).items()}
    tensors |= {f"passage.{name}": tensor for name, tensor in own_names(passage, 0).items()}
    save(npz, tensors)
    check(load_block(npz, prefix="query."), query)
    check(load_block(npz, prefix="passage"), passage)
    with pytest.raises(WeightsError, match=r"'query\.layers\.{i}\.', 'passage\.layers\.{i}\.'"):
        load_block(npz)
    with pytest.raises(WeightsError, match=r"prefix 'answer\.': found 0 tensors;"):
        load_block(npz, prefix="answer")


# ---------------------------------------------------------------- dtypes


def test_float16_becomes_float32(path):
    layer = make_layer(9, np.float16)
    block = load_block(save(path, own_names(layer)))
    check(block, {name: tensor.astype(np.float32) for name, tensor in layer.items()})


def test_bfloat16_becomes_float32(tmp_path):
    pytest.importorskip("safetensors")
    # Numbers of 8 significant bits are bfloat16 numbers: the upper half of their float32 bits.
    layer = {name: np.round(t * 16) / 16 for name, t in make_layer(10, np.float32).items()}
    raw = {}
    for name, tensor in layer.items():
        halves = tensor.view(np.uint32) >> 16
        assert not (tensor.view(np.uint32) & 0xFFFF).any()
        raw[name] = ("BF16", list(tensor.shape), halves.astype("<u2").tobytes())
    path = save_raw(tmp_path / "weights.safetensors", raw)
    check(load_block(path), layer)
    loaded = load_tensors(path)
    assert loaded.keys() == layer.keys()
    for name in layer:
        np.testing.assert_array_equal(loaded[name], layer[name], strict=True)


def test_foreign_byte_order_becomes_native(npz):
    layer = make_layer(11, np.float32)
    save(npz, {name: tensor.astype(">f4") for name, tensor in layer.items()})
    check(load_block(npz), layer)
    assert load_tensors(npz)["w_q"].dtype.isnative


def test_load_tensors_returns_everything(path):
    tensors = {"half": np.ones(2, np.float16), "ids": np.arange(3), "matrix": np.eye(2)}
    loaded = load_tensors(save(path, tensors))
    assert {name: tensor.dtype.name for name, tensor in loaded.items()} == {
        "half": "float32",
        "ids": "int64",
        "matrix": "float64",
    }
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(loaded[name], tensor)


def test_only_the_tensors_of_the_layer_are_read(npz, tmp_path):
    layer = make_layer(12)
    tensors = own_names(layer, 0)
    # Neither of these can be read at all.
    np.savez(npz, **tensors, **{"layers.1.w_q": np.array([None])})
    check(load_block(npz), layer)
    with pytest.raises(WeightsError, match=r"layers\.1\.w_q cannot be read"):
        load_tensors(npz)
    pytest.importorskip("safetensors", minversion="0.5")  # older ones know no F8
    raw = {name: ("F64", list(t.shape), t.tobytes()) for name, t in tensors.items()}
    raw["layers.1.w_q"] = ("F8_E4M3", [2], b"\0\0")
    path = save_raw(tmp_path / "weights.safetensors", raw)
    check(load_block(path), layer)
    with pytest.raises(WeightsError, match=r"layers\.1\.w_q cannot be read: .*F8_E4M3"):
        load_tensors(path)


# ---------------------------------------------------------------- errors


def fails(path, match, *, blamed=None, **arguments):
    """load_block raises WeightsError with one line which names the file at fault and matches."""
    with pytest.raises(WeightsError, match=match) as caught:
        load_block(path, **arguments)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert message.startswith(f"{path.with_name(blamed) if blamed else path}: ")


def test_no_such_file(tmp_path):
    fails(tmp_path / "absent.npz", "no such file")
    fails(tmp_path / "absent.safetensors", "no such file")


def test_directory(tmp_path):
    (tmp_path / "folder.npz").mkdir()
    fails(tmp_path / "folder.npz", "is a directory")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_what_has_no_end_is_not_read(tmp_path, suffix):
    os.mkfifo(tmp_path / f"pipe.{suffix}")
    fails(tmp_path / f"pipe.{suffix}", "is no regular file")
    os.symlink("/dev/zero", tmp_path / f"device.{suffix}")
    fails(tmp_path / f"device.{suffix}", "is no regular file")


def test_names_that_no_file_can_have(tmp_path):
    fails(tmp_path / ("x" * 300 + ".npz"), "cannot be read: .*too long")
    with pytest.raises(WeightsError, match=r"zero\\x00\.npz: cannot be read: "):
        load_block(tmp_path / "zero\0.npz")


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="needs links")
def test_a_config_that_leads_nowhere_is_not_absent(npz):
    save(npz, bert_names(make_layer(0, num_kv_heads=N), 0))
    load_block(npz, num_heads=N)
    os.symlink(npz.with_name("gone.json"), npz.with_name("config.json"))
    fails(npz, "is no regular file, or a link to none", blamed="config.json", num_heads=N)


def test_numbers_of_more_digits_than_python_reads(npz):
    layer = make_layer(0, num_kv_heads=N)
    strange = BERT.format(i="1" * 5000) + "attention.self.query.weight"
    save(npz, bert_names(layer, 0) | {strange: np.ones(3)})
    check(load_block(npz, num_heads=N), layer, eps=1e-12)
    fails(npz, "N heads were asked for, more than 1048576: 999", num_heads=10**4000 - 1)


def test_other_suffix(tmp_path):
    fails(tmp_path / "weights.bin", r"\*\.npz or \*\.safetensors")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"not weights\n", b"\x80\x04N."])
def test_other_content(path, content):
    path.write_bytes(content)
    fails(path, "is not a .npz file|cannot be read")


def test_array_saved_under_the_name_of_an_archive(npz):
    with open(npz, "wb") as file:
        np.save(file, np.eye(3))
    fails(npz, "is not a .npz file")


def test_truncated_file(path):
    save(path, own_names(make_layer(13)))
    content = path.read_bytes()
    for size in range(0, len(content), 61):
        path.write_bytes(content[:size])
        fails(path, "cut short|cannot be read")


def test_damaged_data(npz):
    save(npz, own_names(make_layer(14)))
    content = bytearray(npz.read_bytes())
    content[content.index(b"\x93NUMPY") + 200] ^= 1
    npz.write_bytes(content)
    fails(npz, "w_q cannot be read: .*CRC")


def test_a_damaged_archive_is_closed(npz):
    """A file left open would be warned of, and a warning is an error here."""
    save(npz, own_names(make_layer(14)))
    content = npz.read_bytes()
    npz.write_bytes(content.replace(b"PK\x01\x02", b"PK\x01\x03"))
    fails(npz, "cannot be read")
    gc.collect()


@pytest.mark.parametrize(
    "shape",
    ["(1152921504606846976,)", "(2147483648, 2147483648)", "(" + "9" * 400 + ",)", "(-1, 4)"],
)
def test_a_header_that_claims_more_than_there_is(npz, shape):
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".encode()
    array = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(64)
    save(npz, {name: a for name, a in own_names(make_layer(14)).items() if name != "w_q"})
    with zipfile.ZipFile(npz, "a") as archive:
        archive.writestr("w_q.npy", array)
    fails(npz, "w_q cannot be read")


@pytest.mark.parametrize(
    "given, words",
    [
        ({"layer": "0"}, "layer must be an int, not '0'"),
        ({"layer": np.zeros(3)}, "layer must be an int"),
        ({"num_heads": 2.0}, "num_heads must be an int, not 2.0"),
        ({"num_kv_heads": "2"}, "num_kv_heads must be an int, not '2'"),
        ({"prefix": 7}, "prefix must be a str or None, not 7"),
        ({"is_causal": 1}, "is_causal must be True or False, not 1"),
    ],
)
def test_arguments_of_another_type(npz, given, words):
    save(npz, own_names(make_layer(14)))
    with pytest.raises(TypeError, match=words):
        load_block(npz, **given)


def test_pickled_array(npz):
    tensors = own_names(make_layer(15))
    tensors["w_k"] = tensors["w_k"].astype(object)
    np.savez(npz, **tensors)
    fails(npz, "w_k cannot be read: .*allow_pickle")


@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.complex64, np.longdouble, "V2", "S4"])
def test_dtype_that_is_not_floating(npz, dtype):
    tensors = own_names(make_layer(16))
    shape = tensors["w_v"].shape
    tensors["w_v"] = np.zeros(shape, dtype)
    fails(save(npz, tensors), f"w_v has dtype {np.dtype(dtype)}, expected float16")


def test_member_that_is_no_array(npz):
    tensors = own_names(make_layer(17))
    del tensors["w_q"]
    save(npz, tensors)
    with zipfile.ZipFile(npz, "a") as archive:
        archive.writestr("w_q", b"text")
    fails(npz, "w_q is not an array")


def test_dtypes_that_disagree(path):
    tensors = own_names(make_layer(18))
    tensors["b_o"] = tensors["b_o"].astype(np.float32)
    fails(save(path, tensors), "b_o is float32 but w_q is float64")


NAMED = [  # a file's tensors, the arguments and the config.json that it needs
    (own_names(make_layer(20)), {}, {}),
    (own_names(make_layer(20), 0), {}, {}),
    (bert_names(make_layer(20, num_kv_heads=N), 0), {"num_heads": N}, {}),
    (torch_names(make_layer(20, num_kv_heads=N), "layers.0."), {"num_heads": N}, {}),
    (torch_names(make_layer(20, num_kv_heads=N), "", norm=False), {"num_heads": N}, {}),
    (llama_names(plain_decoder(make_decoder_layer(20)), 0), {}, LLAMA),
    # With three biases and two norms, of which none may be absent by itself.
    (llama_names(make_decoder_layer(20), 0, "qkv"), {}, LLAMA | {"model_type": "qwen3"}),
    (gpt2_names(make_layer(20, num_kv_heads=N), 0), {"num_heads": N}, {"model_type": "gpt2"}),
]
OPTIONAL = {"b_q", "b_k", "b_v", "b_o", "norm_weight", "norm_bias"}


@pytest.mark.parametrize("tensors, arguments, config", NAMED)
def test_each_tensor_missing(npz, tensors, arguments, config):
    configure(npz, **config)
    required = [name for name in tensors if name.rpartition(".")[2] not in OPTIONAL]
    assert len(required) >= 4
    for name in required:
        save(npz, {other: tensor for other, tensor in tensors.items() if other != name})
        # Without the one tensor by which it is known, the file holds nothing known.
        known = not name.endswith(("in_proj_weight", "c_attn.weight"))
        text = f"the tensor {name} is missing" if known else "no attention layer of a known kind"
        fails(npz, text, **arguments)


@pytest.mark.parametrize("tensors, arguments, config", NAMED)
@pytest.mark.parametrize("change", ["longer", "flat", "empty"])
def test_each_tensor_of_the_wrong_shape(npz, tensors, arguments, config, change):
    configure(npz, **config)
    for name, tensor in tensors.items():
        if change == "longer":
            wrong = np.concatenate([tensor, tensor[-1:]])
        elif change == "flat":
            wrong = tensor[None]
        else:
            wrong = tensor[:0]
        save(npz, tensors | {name: wrong})
        # The tensor that comes first defines an axis: its longer rows are believed, and it is a
        # later tensor's shape that does not fit.
        believed = change == "longer" and name.endswith(("w_q", "w_k", "c_attn.weight"))
        culprit = r"\S+" if believed else name
        fails(npz, rf"{culprit} has shape \[.*\], expected \[.*\]", **arguments)


def test_message_of_a_wrong_shape(npz):
    tensors = own_names(make_layer(21))
    tensors["w_o"] = np.zeros((N, H, D + 1))
    message = r"w_o has shape \[4, 3, 11\], expected \[N, Hv, D\] with N = 4, Hv = 3, D = 10$"
    fails(save(npz, tensors), message)


def test_heads(npz):
    save(npz, bert_names(make_layer(22, num_kv_heads=N), 0))
    fails(npz, "num_heads must be given")
    fails(npz, r"query\.weight has shape \[12, 10\], expected \[NH, D\] with N = 5", num_heads=5)
    fails(npz, "N = 0 heads were asked for, expected at least 1", num_heads=0)
    fails(npz, "K = -1 heads were asked for", num_heads=N, num_kv_heads=-1)
    fails(npz, r"key\.weight has shape \[12, 10\], .* K = 5", num_heads=N, num_kv_heads=5)
    save(npz, own_names(make_layer(22)))
    fails(npz, r"w_q has shape \[10, 4, 3\], expected \[D, N, H\] with D = 10, N = 3", num_heads=3)
    fails(npz, "w_k has shape .* K = 4", num_kv_heads=4)
    save(npz, own_names(make_layer(22, num_kv_heads=3)))
    fails(npz, "K = 3 key/value heads do not divide N = 4 heads")


def test_layer_out_of_range(npz):
    tensors = {}
    for i in range(3):
        tensors |= own_names(make_layer(23), i)
    save(npz, tensors)
    fails(npz, "layer 3 is out of range: the file has 3 layers, 0 to 2$", layer=3)
    fails(npz, "layer -1 is out of range", layer=-1)
    save(npz, {name: tensor for name, tensor in tensors.items() if ".1." not in name})
    fails(npz, "layer 1 is out of range: the file has 2 layers, 0, 2$", layer=1)
    save(npz, own_names(make_layer(23)))
    fails(npz, "layer 1 is out of range: the file has 1 layer, 0$", layer=1)


def test_names_of_no_known_kind(path):
    names = [f"h.{i}.attn.qkv.weight" for i in range(5)]
    save(path, {name: np.eye(2) for name in names})
    fails(path, r"found 5 tensors \(h\.0\.attn\.qkv\.weight, .*\.\.\.\); expected one of ")
    fails(path, r"w_q .*encoder\.layer\.\{i\}\.attention\.self\.query\.weight .*in_proj_weight ")
    save(path, {"one": np.eye(2)})
    fails(path, r"found 1 tensor \(one\);")


@pytest.mark.parametrize(
    "tensors, arguments, stranger",
    [
        (*NAMED[0][:2], "q_norm_weight"),
        (*NAMED[2][:2], "bert.encoder.layer.0.attention.self.distance_embedding.weight"),
        (*NAMED[2][:2], "bert.encoder.layer.0.attention.self.distance\n_embedding.weight"),
        (*NAMED[3][:2], "layers.0.self_attn.bias_k"),
        (*NAMED[4][:2], "bias_v"),
    ],
)
def test_layers_of_another_formula(npz, tensors, arguments, stranger):
    save(npz, tensors | {stranger: np.ones(3)})
    fails(npz, re.escape(" ".join(stranger.split())) + " is not part of", **arguments)


def test_attention_inside_a_larger_module_is_not_taken_for_a_block(npz):
    save(npz, torch_names(make_layer(24, num_kv_heads=N), "blocks.0.attn.", norm=False))
    fails(npz, "no attention layer of a known kind", num_heads=N)
    load_block(npz, num_heads=N, prefix="blocks.0.attn")


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "cannot be read"),
        ("[]", "expected a JSON object"),
        ('{"num_attention_heads": "12"}', "num_attention_heads is '12'"),
        ('{"num_attention_heads": 0}', "num_attention_heads is 0"),
        ('{"is_decoder": "false"}', "is_decoder is 'false', expected true or false"),
        ('{"layer_norm_eps": -1}', "layer_norm_eps is -1"),
        ('{"layer_norm_eps": NaN}', "layer_norm_eps is nan"),
        ('{"layer_norm_eps": 1' + "0" * 399 + "}", "layer_norm_eps is 1000"),
        ('{"layer_norm_eps": ' + "1" * 5000 + "}", "cannot be read: "),
        ('{"a":' * 100_000, "cannot be read: "),
        ('{"model_type": "' + "x" * 10_000 + '"}', r"model_type is 'xxx.* \.\.\.$"),
        ('{"hidden_size": 12}', "hidden_size is 12, but the tensors have D = "),
    ],
)
def test_config_that_cannot_be_used(npz, text, message):
    save(npz, bert_names(make_layer(25, num_kv_heads=N), 0))
    npz.with_name("config.json").write_text(text)
    fails(npz, message, blamed="config.json", num_heads=N)


def test_safetensors_not_installed(tmp_path, monkeypatch):
    path = save_raw(tmp_path / "weights.safetensors", {})
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        load_block(path)
