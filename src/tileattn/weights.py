"""Reading the weights of one attention layer from a .npz or .safetensors file.

``NAMINGS`` below is the whole of what is understood: how each kind of file names its tensors, and
their shapes. Only layers that compute ::

    LayerNorm(X + softmax(Q K^T / sqrt(H)) V W_O)        (post-norm, no positions in the scores)
    X + softmax(Q K^T / sqrt(H)) V W_O                   (decoders: pre-norm, causal,
                                                          Q K V from the norm of X)

are read, and for a bare attention module the first without X and LayerNorm. In the second, layers
with the names of Llama turn Q and K by a rope, after norms of the heads if there are any, and may
see a window of the positions only. A file that holds anything else in the layer's attention is
refused by name, rather than computed wrongly. Models whose formulas differ in what is no tensor
share their names; which of them a file is of, the config.json beside it says: a file with the
names of a decoder must have one, and one that says a model not listed here is refused.
"""

import importlib
import json
import os
import re
import stat
import sys
import zipfile
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from tileattn._values import check_flag, check_int, shortened
from tileattn.block import AttentionBlock, LayerNorm, RMSNorm, _from_linear_arguments
from tileattn.rope import Rope

__all__ = ["WeightsError", "load_arguments", "load_block", "load_tensors"]


@dataclass(frozen=True, eq=False)
class Naming:
    """One way of naming a layer's tensors; a full name is prefix + layers + name."""

    title: str
    layers: str  # what numbers the layers; in brackets where a file of one layer may omit it
    # argument of the constructor -> (name in the file, its axes). Letters side by side are
    # multiplied; R = N + 2 K is the number of heads that a matrix of stacked Q, K and V rows holds.
    tensors: Mapping[str, tuple[str, str]]
    sign: str  # the arguments, any of whose names in a file show that it uses this naming
    scope: str  # pattern of the names which, beside those above, would change the formula
    optional: tuple[str, ...] = ()  # arguments that may be absent, those of one entry together
    matrices: Literal["out in", "in out", "heads"] = "out in"  # "heads": as the constructor's
    norm: type[LayerNorm] | type[RMSNorm] | None = LayerNorm  # None: neither norm nor residual
    norm_position: Literal["post", "pre"] = "post"
    eps: float = 1e-5
    is_decoder: bool = False
    has_rope: bool = False  # the rope, and the window, that a config.json says
    # What a config.json beside the file calls N, K, D and eps.
    heads_key: str | None = None
    kv_heads_key: str | None = None
    width_key: str | None = None
    eps_key: str | None = None
    # What it may say of the formula: the model_type (anything, if empty), and the switches that are
    # understood with one value only, which they have where it does not say them.
    models: tuple[str, ...] = ()
    switches: Mapping[str, bool] = field(default_factory=dict)
    needs_config: bool = False  # refused without a model_type
    any_prefix: bool = True  # False: with no prefix given, only names without one are looked at


#: Far beyond any model, and few enough digits to be printed.
MOST_HEADS = 1 << 20

NAMINGS = (
    Naming(
        title="tileattn",
        layers="[layers.{i}.]",
        tensors={
            "w_q": ("w_q", "D N H"),
            "w_k": ("w_k", "Dc K H"),  # Dc is D, but for a layer that attends to another width
            "w_v": ("w_v", "Dc K Hv"),
            "w_o": ("w_o", "N Hv D"),
            "b_q": ("b_q", "N H"),
            "b_k": ("b_k", "K H"),
            "b_v": ("b_v", "K Hv"),
            "b_o": ("b_o", "D"),
            "norm_weight": ("norm_weight", "D"),
            "norm_bias": ("norm_bias", "D"),
        },
        sign="w_q w_k w_v w_o",
        scope=r"[^.]+",
        optional=("b_q", "b_k", "b_v", "b_o", "norm_weight", "norm_bias"),
        matrices="heads",
    ),
    Naming(
        title="Hugging Face BERT",
        layers="encoder.layer.{i}.",
        tensors={
            "w_q": ("attention.self.query.weight", "NH D"),
            "w_k": ("attention.self.key.weight", "KH D"),
            "w_v": ("attention.self.value.weight", "KHv D"),
            "w_o": ("attention.output.dense.weight", "D NHv"),
            "b_q": ("attention.self.query.bias", "NH"),
            "b_k": ("attention.self.key.bias", "KH"),
            "b_v": ("attention.self.value.bias", "KHv"),
            "b_o": ("attention.output.dense.bias", "D"),
            "norm_weight": ("attention.output.LayerNorm.weight", "D"),
            "norm_bias": ("attention.output.LayerNorm.bias", "D"),
        },
        sign="w_q w_k w_v",
        scope=r"attention\..+",
        eps=1e-12,
        heads_key="num_attention_heads",
        width_key="hidden_size",
        eps_key="layer_norm_eps",
        # Others with these names have positions in the scores (RoFormer), norms elsewhere (X-MOD),
        # or do not let each position see all (BigBird).
        models=(
            "bert",
            "bert-generation",
            "camembert",
            "data2vec-text",
            "electra",
            "ernie",
            "roberta",
            "roc_bert",
            "xlm-roberta",
        ),
    ),
    Naming(
        title="torch.nn.TransformerEncoderLayer",
        layers="[layers.{i}.]",
        tensors={
            "w_qkv": ("self_attn.in_proj_weight", "RH D"),
            "w_o": ("self_attn.out_proj.weight", "D NH"),
            "b_qkv": ("self_attn.in_proj_bias", "RH"),
            "b_o": ("self_attn.out_proj.bias", "D"),
            "norm_weight": ("norm1.weight", "D"),
            "norm_bias": ("norm1.bias", "D"),
        },
        sign="w_qkv",
        scope=r"self_attn\..+",
        optional=("b_qkv b_o norm_bias",),
    ),
    Naming(
        title="torch.nn.MultiheadAttention",
        layers="",
        tensors={
            "w_qkv": ("in_proj_weight", "RH D"),
            "w_o": ("out_proj.weight", "D NH"),
            "b_qkv": ("in_proj_bias", "RH"),
            "b_o": ("out_proj.bias", "D"),
        },
        sign="w_qkv",
        scope=r"[^.]+|out_proj\..+",
        optional=("b_qkv b_o",),
        norm=None,
        any_prefix=False,
    ),
    Naming(
        title="Hugging Face Llama",
        layers="layers.{i}.",
        tensors={
            "w_q": ("self_attn.q_proj.weight", "NH D"),
            "w_k": ("self_attn.k_proj.weight", "KH D"),
            "w_v": ("self_attn.v_proj.weight", "KH D"),
            "w_o": ("self_attn.o_proj.weight", "D NH"),
            "b_q": ("self_attn.q_proj.bias", "NH"),
            "b_k": ("self_attn.k_proj.bias", "KH"),
            "b_v": ("self_attn.v_proj.bias", "KH"),
            "b_o": ("self_attn.o_proj.bias", "D"),
            "norm_weight": ("input_layernorm.weight", "D"),
            "q_norm_weight": ("self_attn.q_norm.weight", "H"),
            "k_norm_weight": ("self_attn.k_norm.weight", "H"),
        },
        sign="w_q w_k w_v",
        # Old files have the rope's frequencies, which follow from the config.json.
        scope=r"self_attn\.(?!rotary_emb\.inv_freq$).+",
        optional=("b_q b_k b_v", "b_o", "q_norm_weight k_norm_weight"),
        norm=RMSNorm,
        norm_position="pre",
        eps=1e-6,
        is_decoder=True,
        has_rope=True,
        heads_key="num_attention_heads",
        kv_heads_key="num_key_value_heads",
        width_key="hidden_size",
        eps_key="rms_norm_eps",
        models=("llama", "mistral", "qwen2", "qwen3", "gemma"),
        switches={"is_causal": True, "use_bidirectional_attention": False},
        needs_config=True,
    ),
    Naming(
        title="Hugging Face GPT-2",
        layers="h.{i}.",
        tensors={
            "w_qkv": ("attn.c_attn.weight", "D RH"),
            "w_o": ("attn.c_proj.weight", "NH D"),
            "b_qkv": ("attn.c_attn.bias", "RH"),
            "b_o": ("attn.c_proj.bias", "D"),
            "norm_weight": ("ln_1.weight", "D"),
            "norm_bias": ("ln_1.bias", "D"),
        },
        sign="w_qkv",
        # Old files have the causal mask, and what it masks with.
        scope=r"attn\.(?!(masked_)?bias$).+",
        matrices="in out",
        norm_position="pre",
        is_decoder=True,
        heads_key="n_head",
        width_key="n_embd",
        eps_key="layer_norm_epsilon",
        models=("gpt2",),  # the first GPT has these names, and post-norm
        switches={
            "is_causal": True,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
        },
        needs_config=True,
    ),
)


FULL, SLIDING = "full_attention", "sliding_attention"  # what layer_types says of a layer


class WeightsError(ValueError):
    """A file of weights that cannot be used; the message is one line and says why.

    Examples
    --------
    >>> from tileattn.weights import WeightsError, load_block
    >>> try:
    ...     load_block("missing.npz")
    ... except WeightsError as error:
    ...     print(error)
    missing.npz: no such file
    """


def load_block(
    path: str | os.PathLike[str],
    *,
    layer: int = 0,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    prefix: str | None = None,
    is_causal: bool | None = None,
) -> AttentionBlock:
    """Build a `tileattn.AttentionBlock` from one layer of a file of weights.

    The kinds of names are tileattn's own (the constructor's arguments, `norm_weight` and
    `norm_bias`), those of Hugging Face BERT and its relatives, those of
    ``torch.nn.TransformerEncoderLayer`` and ``torch.nn.MultiheadAttention``, and those of the
    Hugging Face decoders Llama, Mistral, Qwen 2 and 3, Gemma (the first) and GPT-2; the table
    ``NAMINGS`` in this module lists them. float16 and bfloat16 tensors are converted to float32.

    A decoder's block is pre-norm, with the rope, window and norms of heads that its config.json
    says, which must lie beside the file.

    A torch layer made with ``norm_first=True`` has the same names as one without and cannot be
    told from it: only the default, ``norm_first=False``, is the formula computed here.

    Parameters
    ----------
    path : path
        A .npz file, or a .safetensors file (needs the extra ``models``). Only the layer's own
        tensors are read.
    layer : int
        Number of the layer, from 0.
    num_heads : int, optional
        N. Only tileattn's own names carry it in their shapes; for BERT and decoders it comes from
        a config.json beside the file; otherwise it must be given.
    num_kv_heads : int, optional
        K; by default what the config.json of a decoder says, or N.
    prefix : str, optional
        What stands before ``encoder.layer.0.`` and the like; needed only where the file holds
        several stacks of layers.
    is_causal : bool, optional
        Passed on to the block; by default decoders are, by their names or by the ``is_decoder`` of
        their config.json.

    Returns
    -------
    AttentionBlock
        Of float32 or float64, as the file. The norm's eps is that of the config.json, or else
        1e-12 for BERT, 1e-6 for an RMSNorm and 1e-5 otherwise.

    Raises
    ------
    WeightsError
        The file cannot be read, holds no layer of a known kind, or a tensor is missing or of the
        wrong shape or dtype.
    TypeError
        An argument is of another type.
    ImportError
        The file is .safetensors and the package safetensors is not installed.

    Examples
    --------
    >>> import os, tempfile
    >>> import numpy as np
    >>> from tileattn.weights import load_block
    >>> w = np.ones((8, 2, 4), np.float32)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "layer.npz")
    ...     np.savez(path, w_q=w, w_k=w, w_v=w, w_o=w.reshape(2, 4, 8))
    ...     block = load_block(path)
    >>> block.num_heads, block.head_dim
    (2, 4)
    """
    arguments = load_arguments(
        path,
        layer=layer,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        prefix=prefix,
        is_causal=is_causal,
    )
    return AttentionBlock(**arguments)


def load_arguments(
    path: str | os.PathLike[str],
    *,
    layer: int = 0,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    prefix: str | None = None,
    is_causal: bool | None = None,
) -> dict[str, Any]:
    """Read the arguments with which `load_block` builds its block.

    They are those of the reference too, and the arrays that a block no longer has once it has
    packed them.

    Parameters
    ----------
    path, layer, num_heads, num_kv_heads, prefix, is_causal
        As in `load_block`.

    Returns
    -------
    dict of str to object
        Arguments of `tileattn.AttentionBlock`: `w_q` [D, N, H], `w_k` [Dc, K, H], `w_v` [Dc, K, Hv]
        and `w_o` [N, Hv, D], float32 or float64; of `b_q` [N, H], `b_k` [K, H], `b_v` [K, Hv] and
        `b_o` [D] those that the file has; `norm`, `residual` and `is_causal`; where it is pre-norm,
        `norm_position`; and of `rope`, `q_norm`, `k_norm` and `local_window_size` those that apply.

    Raises
    ------
    WeightsError, TypeError, ImportError
        As `load_block`.

    Examples
    --------
    >>> import os, tempfile
    >>> import numpy as np
    >>> from tileattn.weights import load_arguments
    >>> w, w_o = np.ones((24, 8), np.float32), np.ones((8, 8), np.float32)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "attention.npz")
    ...     np.savez(path, **{"in_proj_weight": w, "out_proj.weight": w_o})
    ...     arguments = load_arguments(path, num_heads=2)
    >>> arguments["w_q"].shape, arguments["norm"]
    ((8, 2, 4), None)
    """
    path = Path(path)
    layer = check_int("layer", layer)
    num_heads = None if num_heads is None else check_int("num_heads", num_heads)
    num_kv_heads = None if num_kv_heads is None else check_int("num_kv_heads", num_kv_heads)
    is_causal = None if is_causal is None else check_flag("is_causal", is_causal)
    if prefix is not None and not isinstance(prefix, str):
        raise TypeError(f"prefix must be a str or None, not {prefix!r}")
    with _open(path) as file:
        naming, base = _find_layer(file, layer, prefix)
        names = _names_of_layer(file, naming, base)
        config = _Config(path.with_name("config.json"), naming)
        num_heads = _agree(path, "num_heads", num_heads, config.count(naming.heads_key))
        num_kv_heads = _agree(path, "num_kv_heads", num_kv_heads, config.count(naming.kv_heads_key))
        eps = naming.eps if (found := config.eps(naming.eps_key)) is None else found
        if is_causal is None:
            is_causal = naming.is_decoder or config.flag("is_decoder", False)
        of_llama = config.of_llama(layer, names) if naming.has_rope else {}
        if naming.matrices != "heads" and num_heads is None:
            _fail(path, f"the names of {naming.title} do not tell the number of heads: "
                        "num_heads must be given")  # fmt: skip
        sizes = _known_sizes(path, naming, num_heads, num_kv_heads)
        tensors = {argument: file.floats(name) for argument, name in names.items()}

    for argument, tensor in tensors.items():
        _check_shape(path, names[argument], tensor.shape, naming.tensors[argument][1], sizes)
    config.check_widths(naming, sizes)
    if sizes["N"] % sizes["K"]:
        _fail(path, f"K = {sizes['K']} key/value heads do not divide N = {sizes['N']} heads")
    first = next(iter(tensors))
    for argument, tensor in tensors.items():
        if tensor.dtype != tensors[first].dtype:
            _fail(path, f"{names[argument]} is {tensor.dtype} but {names[first]} is "
                        f"{tensors[first].dtype}: the tensors of a layer must agree")  # fmt: skip

    norms = {name: tensors.pop(name) for name in list(tensors) if "norm" in name}
    if naming.matrices == "in out":
        tensors = {argument: tensor.T for argument, tensor in tensors.items()}
    if naming.matrices != "heads":
        tensors = _from_linear_arguments(**tensors, num_heads=sizes["N"], num_kv_heads=sizes["K"])
    arguments: dict[str, Any] = {
        **tensors,
        "norm": None,
        "residual": naming.norm is not None,
        "is_causal": is_causal,
        **of_llama,
    }
    if naming.norm is LayerNorm:
        arguments["norm"] = LayerNorm(norms.get("norm_weight"), norms.get("norm_bias"), eps)
    elif naming.norm is RMSNorm:
        for name, weight in norms.items():
            if config.model == "gemma":  # whose weights are distances from 1
                weight = 1 + weight
            arguments[name.removesuffix("_weight")] = RMSNorm(weight, eps)
    if naming.norm_position == "pre":
        arguments["norm_position"] = "pre"
    return arguments


def load_tensors(path: str | os.PathLike[str]) -> dict[str, NDArray[Any]]:
    """Read every tensor of a .npz or .safetensors file.

    Parameters
    ----------
    path : path
        The file; .safetensors needs the extra ``models``.

    Returns
    -------
    dict of str to ndarray
        The tensors by name, in native byte order; float16 and bfloat16 come as float32.

    Raises
    ------
    WeightsError
        The file or one of its tensors cannot be read.
    ImportError
        The file is .safetensors and the package safetensors is not installed.

    Examples
    --------
    >>> import os, tempfile
    >>> import numpy as np
    >>> from tileattn.weights import load_tensors
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "some.npz")
    ...     np.savez(path, half=np.ones(2, np.float16), count=np.arange(3))
    ...     {name: str(tensor.dtype) for name, tensor in load_tensors(path).items()}
    {'half': 'float32', 'count': 'int64'}
    """
    with _open(Path(path)) as file:
        return {name: file.tensor(name) for name in file.names}


def _fail(path: Path, text: str, cause: BaseException | None = None) -> NoReturn:
    # Names and messages of the libraries may hold line ends, and files names of any length; the
    # promise is one line.
    raise WeightsError(shortened(f"{path}: {text}")) from cause


# ---------------------------------------------------------------- files


@dataclass(frozen=True)
class _File:
    """An open file: its tensors' names, and a function that reads one of them."""

    path: Path
    names: tuple[str, ...]
    read: Callable[[str], NDArray[Any]]

    def tensor(self, name: str) -> NDArray[Any]:
        """Tensor of any dtype, halves widened to float32."""
        # NumPy, zipfile, zlib and safetensors share no class of errors for damaged data.
        try:
            tensor = self.read(name)
        except Exception as error:
            _fail(self.path, f"{name} cannot be read: {error}", error)
        if not isinstance(tensor, np.ndarray):  # a member of the archive which is no .npy file
            _fail(self.path, f"{name} is not an array")
        if tensor.dtype == np.float16:
            with np.errstate(invalid="ignore"):  # of a signalling NaN
                return tensor.astype(np.float32)
        return tensor.astype(tensor.dtype.newbyteorder("="), copy=False)

    def floats(self, name: str) -> NDArray[Any]:
        """Tensor which must come out as float32 or float64."""
        tensor = self.tensor(name)
        if tensor.dtype not in (np.float32, np.float64):
            _fail(self.path, f"{name} has dtype {tensor.dtype}, expected float16, bfloat16, "
                             "float32 or float64")  # fmt: skip
        return tensor


@contextmanager
def _open(path: Path) -> Iterator[_File]:
    suffix = path.suffix.lower()
    if suffix not in (".npz", ".safetensors"):
        _fail(path, "expected a file named *.npz or *.safetensors")
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        _fail(path, "no such file")
    except (OSError, ValueError) as error:  # ValueError: of a zero byte in the name
        _fail(path, f"cannot be read: {error}", error)
    if stat.S_ISDIR(mode):
        _fail(path, "is a directory, expected a file")
    if not stat.S_ISREG(mode):  # a pipe or a device may have no end
        _fail(path, "is no regular file")
    with _open_npz(path) if suffix == ".npz" else _open_safetensors(path) as file:
        yield file


@contextmanager
def _open_npz(path: Path) -> Iterator[_File]:
    with ExitStack() as stack:
        try:
            # Opened here, since NumPy leaves a file open whose archive is damaged.
            stream = stack.enter_context(open(path, "rb"))
            if not zipfile.is_zipfile(stream):
                _fail(path, "is not a .npz file (a zip archive), or is cut short")
            stream.seek(0)
            archive = stack.enter_context(np.load(stream, allow_pickle=False))
            names = tuple(archive.files)
        except WeightsError:
            raise
        except Exception as error:
            _fail(path, f"cannot be read: {error}", error)
        yield _File(path, names, archive.__getitem__)


@contextmanager
def _open_safetensors(path: Path) -> Iterator[_File]:
    try:
        safetensors = importlib.import_module("safetensors")
    except ImportError:
        raise ImportError(
            "reading .safetensors files needs the package safetensors: pip install safetensors"
        ) from None
    try:
        archive = safetensors.safe_open(path, framework="numpy")
    except Exception as error:
        _fail(path, f"cannot be read: {error}", error)

    def read(name: str) -> NDArray[Any]:
        dtype = archive.get_slice(name).get_dtype()
        if dtype == "BF16":
            return _read_bfloat16(path, name)
        if dtype.startswith("F8"):  # NumPy has none, and the library's own error is obscure
            raise TypeError(f"its dtype {dtype} is not supported")
        tensor: NDArray[Any] = archive.get_tensor(name)
        return tensor

    with archive:
        yield _File(path, tuple(archive.keys()), read)


def _read_bfloat16(path: Path, name: str) -> NDArray[np.float32]:
    """Read a bfloat16 tensor as float32: the same number, whose lower 16 bits are zero.

    NumPy has no bfloat16, so the library cannot return it. Its file is a length (8 bytes), a JSON
    header of that length, and the data, which the header addresses; opening has checked them.
    """
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(length))[name]
        begin, end = entry["data_offsets"]
        file.seek(8 + length + begin)
        halves = np.frombuffer(file.read(end - begin), "<u2")
    return (halves.astype(np.uint32) << 16).view(np.float32).reshape(entry["shape"])


class _Config:
    """What a Hugging Face config.json says of a naming that takes any of it, if there is one."""

    def __init__(self, path: Path, naming: Naming) -> None:
        self.path = path
        self.values: dict[str, Any] = {}
        if naming.heads_key is not None and os.path.lexists(path):
            self._read()
        self._check_model(naming)

    def _read(self) -> None:
        if not self.path.is_file():
            _fail(self.path, "is no regular file, or a link to none")
        try:
            values = json.loads(self.path.read_text("utf-8"))
        except (OSError, ValueError, RecursionError) as error:  # the last for what is nested deeply
            _fail(self.path, f"cannot be read: {error}", error)
        if not isinstance(values, dict):
            _fail(self.path, "expected a JSON object")
        self.values = values

    def _check_model(self, naming: Naming) -> None:
        """Refuse models whose layers have these names but another formula."""
        if naming.needs_config and self.model is None:
            _fail(self.path, f"is missing or has no model_type, which a file with the names of "
                             f"{naming.title} needs: many formulas share them")  # fmt: skip
        if naming.models and self.model is not None and self.model not in naming.models:
            _fail(self.path, f"model_type is {self.model!r}, expected one of "
                             f"{', '.join(naming.models)} for a file with the names of "
                             f"{naming.title}")  # fmt: skip
        for key, usual in naming.switches.items():
            if self.flag(key, usual) != usual:
                _fail(self.path, f"{key} is {self.values[key]!r}, expected {usual}")

    @property
    def model(self) -> Any:
        return self.values.get("model_type")

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if type(value) is not bool:
            _fail(self.path, f"{key} is {value!r}, expected true or false")
        return value

    def count(self, key: str | None, least: int = 1) -> int | None:
        value = None if key is None else self.values.get(key)
        if value is not None and (type(value) is not int or value < least):
            _fail(self.path, f"{key} is {value!r}, expected an integer of at least {least}")
        return value

    def eps(self, key: str | None) -> float | None:
        value = None if key is None else self.values.get(key)
        if value is None:
            return None
        # Compared before it becomes a float, which an integer need not fit into.
        if type(value) not in (int, float) or not 0 <= value <= sys.float_info.max:
            _fail(self.path, f"{key} is {value!r}, expected a number of at least 0")
        return float(value)

    def check_widths(self, naming: Naming, sizes: Mapping[str, int]) -> None:
        """Refuse the config.json of another model: the rope, for one, would be of its widths."""
        width = self.count(naming.width_key)
        if width not in (None, sizes["D"]):
            _fail(
                self.path, f"{naming.width_key} is {width}, but the tensors have D = {sizes['D']}"
            )
        if naming.has_rope and (head_dim := self.count("head_dim")) not in (None, sizes["H"]):
            _fail(self.path, f"head_dim is {head_dim}, but the tensors have H = {sizes['H']}")

    def of_llama(self, layer: int, names: Container[str]) -> dict[str, Any]:
        """Rope and window of a layer with the names of Llama, of which it has these tensors."""
        has_norms = "q_norm_weight" in names
        if has_norms != (self.model == "qwen3"):
            _fail(self.path, f"model_type is {self.model!r}, but the layer has "
                             f"{'a' if has_norms else 'no'} q_norm")  # fmt: skip
        try:
            rope = Rope.from_config(self.values)
        except (ValueError, TypeError, ArithmeticError) as error:
            _fail(self.path, str(error), error)
        window = self._window(layer)
        windows = {} if window is None else {"local_window_size": (window - 1, None)}
        return {"rope": rope, **windows}

    def _window(self, layer: int) -> int | None:
        """How many positions a query of that layer sees, its own included; None for all."""
        kind = self._layer_type(layer)
        if self.model == "mistral":
            slides = True
        elif self.model in ("qwen2", "qwen3") and self.flag("use_sliding_window", False):
            first = self.count("max_window_layers", least=0)
            slides = layer >= (28 if first is None else first) if kind is None else kind == SLIDING
        else:
            slides = False
        size = None
        if slides:
            size = self.count("sliding_window") if "sliding_window" in self.values else 4096
        computed = FULL if size is None else SLIDING
        if kind not in (None, computed):
            _fail(self.path, f"layer_types has {kind!r} for layer {layer}, but by its other keys "
                             f"{self.model} has {computed!r} there")  # fmt: skip
        return size

    def _layer_type(self, layer: int) -> str | None:
        """What newer files say of each layer."""
        kinds = self.values.get("layer_types")
        if kinds is None:
            return None
        if isinstance(kinds, list) and layer < len(kinds) and kinds[layer] in (FULL, SLIDING):
            return str(kinds[layer])
        _fail(self.path, f"layer_types is {kinds!r}, expected a list with {FULL} or {SLIDING} "
                         f"for layer {layer}")  # fmt: skip


# ---------------------------------------------------------------- finding the layer


@dataclass(frozen=True)
class _Stack:
    naming: Naming
    prefix: str
    numbered: bool
    layers: set[int] = field(default_factory=set, compare=False)

    def base(self, layer: int | str) -> str:
        """What stands before the names of one layer."""
        numbering = self.naming.layers.strip("[]") if self.numbered else ""
        return self.prefix + numbering.replace("{i}", str(layer))


def _find_layer(file: _File, layer: int, prefix: str | None) -> tuple[Naming, str]:
    stacks = _find_stacks(file.names)
    if prefix is None:
        found = [stack for stack in stacks if stack.naming.any_prefix or not stack.prefix]
    else:
        prefix = prefix + "." if prefix and not prefix.endswith(".") else prefix
        found = [stack for stack in stacks if stack.prefix == prefix]
    if not found:
        where = f" under the prefix {prefix!r}" if prefix else ""
        names = [name for name in sorted(file.names) if name.startswith(prefix or "")]
        _fail(file.path, f"no attention layer of a known kind{where}: found {_some(names)}; "
                         f"expected one of {_expected()}")  # fmt: skip
    if len(found) > 1:
        bases = ", ".join(repr(stack.base("{i}")) for stack in found)
        _fail(file.path, f"holds several stacks of layers, with names that begin with {bases}: "
                         "prefix must be given")  # fmt: skip
    (stack,) = found
    if layer not in stack.layers:
        count = len(stack.layers)
        numbers = ", ".join(map(str, sorted(stack.layers)))
        if stack.layers == set(range(count)):
            numbers = f"0 to {count - 1}" if count > 1 else "0"
        _fail(file.path, f"layer {layer} is out of range: the file has {count} "
                         f"layer{'s' * (count != 1)}, {numbers}")  # fmt: skip
    return stack.naming, stack.base(layer)


def _find_stacks(names: tuple[str, ...]) -> list[_Stack]:
    stacks: dict[_Stack, _Stack] = {}
    for naming in NAMINGS:
        signs = "|".join(re.escape(naming.tensors[sign][0]) for sign in naming.sign.split())
        numbering = re.escape(naming.layers.strip("[]")).replace(r"\{i\}", r"(?P<i>0|[1-9]\d{0,8})")
        optional = "?" if naming.layers.startswith("[") or not naming.layers else ""
        pattern = re.compile(rf"(?P<prefix>(?:.*?\.)??)(?P<n>{numbering}){optional}(?:{signs})")
        for name in names:
            if match := pattern.fullmatch(name):
                numbered = bool(match["n"])
                stack = _Stack(naming, match["prefix"], numbered)
                stacks.setdefault(stack, stack).layers.add(int(match["i"]) if numbered else 0)
    return list(stacks)


def _expected() -> str:
    kinds = []
    for naming in NAMINGS:
        name = naming.tensors[naming.sign.split()[0]][0]
        kinds.append(f"{naming.layers}{name} ({naming.title})")
    return ", ".join(kinds)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return f"{len(names)} tensor{'s' * (len(names) != 1)}" + (f" ({shown})" if names else "")


def _names_of_layer(file: _File, naming: Naming, base: str) -> dict[str, str]:
    """Constructor argument -> full name in the file, of the tensors that are there."""
    full = {argument: base + name for argument, (name, _) in naming.tensors.items()}
    present = set(file.names)
    scope = re.compile(naming.scope, re.DOTALL)
    for name in sorted(present - set(full.values())):
        if name.startswith(base) and scope.fullmatch(name, len(base)):
            formula = "" if naming.is_decoder else " (post-norm, no positions in the scores)"
            _fail(file.path, f"{name} is not part of a {naming.title} layer as computed here"
                             f"{formula}")  # fmt: skip
    missing = {argument for argument, name in full.items() if name not in present}
    absent_together = {
        argument
        for group in naming.optional
        if missing.issuperset(group.split())
        for argument in group.split()
    }
    for argument, name in full.items():
        if argument in missing - absent_together:
            _fail(file.path, f"the tensor {name} is missing")
    return {argument: name for argument, name in full.items() if argument not in missing}


# ---------------------------------------------------------------- heads and shapes


def _agree(path: Path, name: str, given: int | None, configured: int | None) -> int | None:
    if given is not None and configured is not None and given != configured:
        _fail(path, f"{name} is {given}, but the config.json beside the file says {configured}")
    return configured if given is None else given


def _known_sizes(
    path: Path, naming: Naming, num_heads: int | None, num_kv_heads: int | None
) -> dict[str, int]:
    """Sizes by axis letter, as far as they are known before any tensor is looked at."""
    sizes = {}
    for letter, count in (("N", num_heads), ("K", num_kv_heads)):
        if count is not None:
            if count < 1:
                _fail(path, f"{letter} = {count} heads were asked for, expected at least 1")
            if count > MOST_HEADS:
                _fail(path, f"{letter} heads were asked for, more than {MOST_HEADS}: {count}")
            sizes[letter] = count
    if naming.matrices != "heads":
        sizes.setdefault("K", sizes["N"])
        sizes["R"] = sizes["N"] + 2 * sizes["K"]
    return sizes


def _check_shape(
    path: Path, name: str, shape: tuple[int, ...], axes: str, sizes: dict[str, int]
) -> None:
    """Compare a shape with its axes, learning the sizes that are not known yet."""
    fits = len(shape) == len(axes.split())
    for size, letters in zip(shape, axes.split(), strict=False):
        unknown = []
        known = 1
        for letter in re.findall("[A-Z][a-z]?", letters):
            if letter in sizes:
                known *= sizes[letter]
            else:
                unknown.append(letter)
        # No axis of the table has two letters that are unknown when its tensor's turn comes.
        if fits and unknown and size and size % known == 0:
            sizes[unknown[0]] = size // known
        elif size != known:
            fits = False
    if not fits:
        axis_letters = dict.fromkeys(re.findall("[A-Z][a-z]?", axes))
        values = ", ".join(f"{axis} = {sizes[axis]}" for axis in axis_letters if axis in sizes)
        _fail(path, f"{name} has shape {list(shape)}, expected [{axes.replace(' ', ', ')}]"
                    + (f" with {values}" if values else ""))  # fmt: skip
