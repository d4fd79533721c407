"""all-MiniLM-L6-v2, a sentence encoder, in NumPy with tileattn's block as its attention.

    python -m benchmarks.models.minilm "what does it cost?" notes.txt letters.txt

prints the passages of the files that are nearest in meaning to the question. The model is BERT with
6 layers, D = 384, N = 12, H = 32: each layer is exactly the attention block

    X = LayerNorm(X + softmax(Q K^T / sqrt(H)) V W_O)

followed by a feed-forward sub-layer, X = LayerNorm(X + gelu(X W_1) W_2). A text's embedding is the
mean of its tokens' vectors, scaled to length 1, so that a dot product is a cosine.
"""

import argparse
import importlib
import json
import math
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.polynomial import Chebyshev, Polynomial
from numpy.typing import ArrayLike, DTypeLike, NDArray

import tileattn.reference
from benchmarks.models import WEIGHTS
from benchmarks.models.fetch import MINILM, FetchError, fetch
from tileattn._command import CommandError
from tileattn.weights import WeightsError, load_tensors

Array = NDArray[Any]

MAX_TOKENS = 256  # what the model was trained with; longer texts are cut
PASSAGE_WORDS = (100, 190)  # at 1.3 tokens a word in English, 190 words are about MAX_TOKENS


# ---------------------------------------------------------------- the activation

# gelu(x) = x Phi(x) with the exact normal distribution function Phi, not its tanh approximation.
# With t = |x|, it is max(x, 0) - t exp(-t^2 / 2) r(t), where r(t) = exp(t^2 / 2) Phi(-t) falls
# smoothly from 1/2. As a function of s = 1 / (1 + t / 3), r is all but a polynomial: interpolated
# at 10 Chebyshev nodes on 0 <= t <= TAIL it adds 1e-9 to the result's error, a sixtieth of
# float32's rounding of 1. Beyond TAIL, exp(-t^2 / 2) is below 3e-18 and r stays bounded.
TAIL = 9.0


def _ratio(s: float) -> float:
    t = 3 * (1 / s - 1)
    return 0.5 * math.exp(t * t / 2) * math.erfc(t / math.sqrt(2))


RATIO = (
    Chebyshev.interpolate(np.vectorize(_ratio), 9, domain=[1 / (1 + TAIL / 3), 1])
    .convert(kind=Polynomial)
    .coef.astype(np.float32)
)
BLOCK = 1 << 15  # elements handled at once, so that the steps' operands stay in cache

_erfc = np.frompyfunc(math.erfc, 1, 1)


def gelu(x: Array) -> Array:
    """x Phi(x), elementwise: float32 to its rounding, float64 by its definition (and slowly)."""
    if x.dtype != np.float32:
        return 0.5 * x * _erfc(x * -math.sqrt(0.5)).astype(x.dtype)
    result = np.empty(x.shape, np.float32)
    source, target = x.reshape(-1), result.reshape(-1)
    for start in range(0, source.size, BLOCK):
        part, y = source[start : start + BLOCK], target[start : start + BLOCK]
        t = np.minimum(np.abs(part), 40)  # where exp(-t^2 / 2) is 0 and t^2 still finite
        s = 1 / (1 + t * np.float32(1 / 3))
        y[...] = RATIO[-1]
        for coefficient in RATIO[-2::-1]:
            y *= s
            y += coefficient
        y *= t
        t *= t
        t *= np.float32(-0.5)
        y *= np.exp(t, out=t)
        np.subtract(np.maximum(part, 0), y, out=y)
    return result


# ---------------------------------------------------------------- the encoder


@dataclass(frozen=True)
class _Layer:
    attention: Callable[..., Array]
    w_1: Array  # [D, 4 D]
    b_1: Array
    w_2: Array  # [4 D, D]
    b_2: Array
    norm: Callable[..., Array]

    def __call__(self, x_BTD: Array, lengths: Array) -> Array:
        x_BTD = self.attention(x_BTD, key_value_seq_lengths=lengths)
        # Only the attention sub-layer is tileattn's; the feed-forward products are NumPy's.
        y_BTF = x_BTD @ self.w_1
        y_BTF += self.b_1
        y_BTD = gelu(y_BTF) @ self.w_2
        y_BTD += self.b_2
        return self.norm(x_BTD, residual=y_BTD)


class MiniLM:
    """The sentence encoder.

    Parameters
    ----------
    folder : path
        Holds model.safetensors, tokenizer.json and config.json, as `fetch` returns it.
    dtype : float32 or float64
        Of the computation and of the embeddings.
    reference : bool
        Use `tileattn.reference` in place of the block and LayerNorm.
    weights : str
        One of WEIGHTS: what the blocks keep theirs as. "float32" leaves them in `dtype`.

    Attributes
    ----------
    layers : list
        Each with its `attention`, an AttentionBlock or the reference.

    Raises
    ------
    WeightsError
        A file is missing or damaged.
    ImportError
        tokenizers or safetensors is not installed.
    """

    def __init__(
        self,
        folder: Path,
        dtype: DTypeLike = np.float32,
        *,
        reference: bool = False,
        weights: str = "float32",
    ) -> None:
        folder = Path(folder)
        self.dtype = np.dtype(dtype)
        self._tokenizer = _load_tokenizer(folder / "tokenizer.json")
        config = _load_config(folder / "config.json")
        path = folder / "model.safetensors"
        tensors = load_tensors(path)

        def tensor(name: str) -> Array:
            if name not in tensors:
                raise WeightsError(f"{path}: the tensor {name} is missing")
            return tensors[name].astype(self.dtype, copy=False)

        def norm(name: str) -> tileattn.LayerNorm:
            eps = config["layer_norm_eps"]
            return tileattn.LayerNorm(tensor(f"{name}.weight"), tensor(f"{name}.bias"), eps)

        make_attention = _reference_attention if reference else tileattn.AttentionBlock.from_linear
        use_norm = _reference_norm if reference else lambda norm: norm
        self._words = tensor("embeddings.word_embeddings.weight")
        # A lone text's tokens are all of type 0, so that this vector belongs to the position.
        self._positions = (
            tensor("embeddings.position_embeddings.weight")
            + tensor("embeddings.token_type_embeddings.weight")[0]
        )
        self._norm = use_norm(norm("embeddings.LayerNorm"))
        self.layers = []
        for i in range(config["num_hidden_layers"]):
            name = f"encoder.layer.{i}"
            self.layers.append(
                _Layer(
                    attention=make_attention(
                        w_q=tensor(f"{name}.attention.self.query.weight"),
                        w_k=tensor(f"{name}.attention.self.key.weight"),
                        w_v=tensor(f"{name}.attention.self.value.weight"),
                        w_o=tensor(f"{name}.attention.output.dense.weight"),
                        b_q=tensor(f"{name}.attention.self.query.bias"),
                        b_k=tensor(f"{name}.attention.self.key.bias"),
                        b_v=tensor(f"{name}.attention.self.value.bias"),
                        b_o=tensor(f"{name}.attention.output.dense.bias"),
                        num_heads=config["num_attention_heads"],
                        norm=norm(f"{name}.attention.output.LayerNorm"),
                        weight_dtype=None if weights == "float32" else weights,
                    ),
                    w_1=tensor(f"{name}.intermediate.dense.weight").T,
                    b_1=tensor(f"{name}.intermediate.dense.bias"),
                    w_2=tensor(f"{name}.output.dense.weight").T,
                    b_2=tensor(f"{name}.output.dense.bias"),
                    norm=use_norm(norm(f"{name}.output.LayerNorm")),
                )
            )

    def encode(self, texts: Sequence[str], batch_size: int = 32) -> Array:
        """Embed texts.

        Parameters
        ----------
        texts : sequence of str
        batch_size : int
            Texts computed at once. Those of like length go together, to save padding.

        Returns
        -------
        array [len(texts), D]
            Rows of length 1, in the order of the texts.
        """
        if isinstance(texts, str):
            raise TypeError("texts is one str, expected a sequence of them")
        tokens = [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]
        embeddings = np.empty((len(tokens), self._words.shape[1]), self.dtype)
        order = sorted(range(len(tokens)), key=lambda text: len(tokens[text]))
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            embeddings[batch] = self._encode_batch([tokens[text] for text in batch])
        return embeddings

    def _encode_batch(self, tokens: list[list[int]]) -> Array:
        lengths = np.array([len(ids) for ids in tokens])
        T = int(lengths.max())
        ids_BT = np.zeros((len(tokens), T), np.intp)
        for row, ids in zip(ids_BT, tokens, strict=True):
            row[: len(ids)] = ids
        x_BTD = self._norm(self._words[ids_BT] + self._positions[:T])
        for layer in self.layers:
            x_BTD = layer(x_BTD, lengths)
        inside_BT1 = (np.arange(T) < lengths[:, None])[..., None]
        mean_BD = np.sum(x_BTD, axis=1, where=inside_BT1) / lengths[:, None].astype(self.dtype)
        mean_BD /= np.linalg.norm(mean_BD, axis=1, keepdims=True)
        return mean_BD


def _reference_attention(
    *, num_heads: int, norm: tileattn.LayerNorm, weight_dtype: Any, **linear: Array
) -> Callable[..., Array]:
    """Like AttentionBlock.from_linear, but computing by `tileattn.reference`."""

    def per_head(matrix: Array) -> Array:  # [N H, ...] -> [N, H, ...]
        return matrix.reshape(num_heads, -1, *matrix.shape[1:])

    w_q, w_k, w_v = (per_head(linear[name]).transpose(2, 0, 1) for name in ("w_q", "w_k", "w_v"))
    w_o = per_head(linear["w_o"].T)
    biases = {name: per_head(linear[name]) for name in ("b_q", "b_k", "b_v")}

    def attention(x: Array, *, key_value_seq_lengths: ArrayLike) -> Array:
        return tileattn.reference.attention_block(
            x, w_q, w_k, w_v, w_o, **biases, b_o=linear["b_o"], norm=norm,
            weight_dtype=weight_dtype, key_value_seq_lengths=key_value_seq_lengths,
        )  # fmt: skip

    return attention


def _reference_norm(norm: tileattn.LayerNorm) -> Callable[..., Array]:
    def apply(x: Array, residual: Array | None = None) -> Array:
        return tileattn.reference.layer_norm(x, norm.weight, norm.bias, norm.eps, residual=residual)

    return apply


def _load_tokenizer(path: Path) -> Any:
    try:
        tokenizers = importlib.import_module("tokenizers")
    except ImportError:
        raise ImportError(
            "this program needs the package tokenizers: pip install '.[models]'"
        ) from None
    try:
        tokenizer = tokenizers.Tokenizer.from_str(path.read_text("utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise WeightsError(f"{path}: cannot be read: {error}") from error
    tokenizer.enable_truncation(MAX_TOKENS)
    tokenizer.no_padding()
    return tokenizer


def _load_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text("utf-8"))
        return {
            "num_attention_heads": int(config["num_attention_heads"]),
            "num_hidden_layers": int(config["num_hidden_layers"]),
            "layer_norm_eps": float(config["layer_norm_eps"]),
        }
    except (OSError, ValueError, TypeError) as error:
        raise WeightsError(f"{path}: cannot be read: {error}") from error
    except KeyError as error:
        raise WeightsError(f"{path}: has no {error}") from error


# ---------------------------------------------------------------- the command


@dataclass(frozen=True)
class Passage:
    """Some paragraphs of a file, or a piece of a long one."""

    file: str
    line: int  # of its first word, from 1
    text: str


def split_passages(text: str, file: str) -> list[Passage]:
    """Cut a text into passages of about 100 to 190 words, at blank lines as far as possible."""
    least, most = PASSAGE_WORDS
    passages: list[Passage] = []
    pending: list[tuple[str, int]] = []  # words, each with its line

    def emit() -> None:
        # Equal pieces: a paragraph of 200 words becomes two of 100, not one of 190 and one of 10.
        pieces = -(-len(pending) // most)
        for piece in range(pieces):
            begin, end = (len(pending) * edge // pieces for edge in (piece, piece + 1))
            words = " ".join(word for word, _ in pending[begin:end])
            passages.append(Passage(file, pending[begin][1], words))
        pending.clear()

    paragraph: list[tuple[str, int]] = []
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        paragraph += [(word, number) for word in line.split()]
        if not line.strip():
            if len(pending) + len(paragraph) > most:
                emit()
            pending += paragraph
            paragraph = []
            if len(pending) >= least:
                emit()
    emit()
    return passages


def best_passages(
    model: MiniLM, question: str, passages: list[Passage], top: int
) -> list[tuple[float, Passage]]:
    """Return the `top` passages nearest to the question with their cosines, nearest first."""
    scores = model.encode([passage.text for passage in passages]) @ model.encode([question])[0]
    nearest = np.argsort(-scores, kind="stable")[:top]
    return [(float(scores[i]), passages[i]) for i in nearest]


def _read_passages(file: str) -> list[Passage]:
    try:
        return split_passages(Path(file).read_text("utf-8"), file)
    except UnicodeDecodeError:
        raise CommandError(f"{file}: is not UTF-8 text") from None
    except OSError as error:
        raise CommandError(f"{file}: {error.strerror}") from None


def _run(question: str, files: list[str], top: int, weights: str) -> None:
    if not question.strip():
        raise CommandError("the question is empty")
    if top < 1:
        raise CommandError(f"--top is {top}, expected at least 1")
    passages = [passage for file in files for passage in _read_passages(file)]
    if not passages:
        raise CommandError("the files hold no text")
    model = MiniLM(fetch(MINILM), weights=weights)
    for score, passage in best_passages(model, question, passages, top):
        print(f"{score:.3f}  {passage.file}:{passage.line}")
        print(textwrap.indent(textwrap.fill(passage.text, 92), "    "))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models.minilm",
        description="Print the passages of text files that are nearest in meaning to a question.",
    )
    parser.add_argument("question")
    parser.add_argument("files", metavar="FILE", nargs="+", help="UTF-8 text")
    parser.add_argument("--top", type=int, default=5, help="passages to print (default: 5)")
    parser.add_argument("--weights", choices=WEIGHTS, default="float32",
                        help="what attention's weights are kept as (default: float32)")  # fmt: skip
    options = parser.parse_args(arguments)
    try:
        _run(options.question, options.files, options.top, options.weights)
    except (CommandError, FetchError, WeightsError, ImportError) as error:
        print(f"minilm: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
