"""What is measured: shapes of projections, of attention and of whole blocks, by name.

A cell is hot, the same arrays at each call, or cold: each call takes arrays that were last touched
half a gigabyte of others ago, so that they come from memory whatever the caches hold. `of_limit`
says which limit of the machine the cell is held against; `bytes` are those that a call must read
and write if caches held nothing before it, each operation's operands once (see `tileattn.cost`),
and `label` is its name in a picture, where there is less room.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from tileattn.cost import BlockCost, OperationCost, attention_block_cost
from tileattn.quantized import WeightDtype

Limit = Literal["FMA peak", "dot product peak", "read bandwidth"]

#: Scores, softmax and values among the rows of a block's cost.
_ATTENTION_ROWS = slice(3, 6)
_WEIGHT_BITS = {None: 32, "bfloat16": 16, "int8": 8, "int4": 4}


@dataclass(frozen=True)
class Projection:
    """x[M, K] w[K, N]: here N and K are the product's columns and depth, as everywhere.

    Ours takes the weights as `weight_dtype` says, its peers in float32, and PyTorch bfloat16 too.
    """

    M: int
    N: int
    K: int
    cold: bool = False
    weight_dtype: WeightDtype | None = None

    @property
    def name(self) -> str:
        kept_as = "" if self.weight_dtype is None else f" {self.weight_dtype}"
        return f"{_sizes(self, 'MNK')} {_temperature(self.cold)}{kept_as}"

    @property
    def of_limit(self) -> Limit:
        return "read bandwidth" if self.cold else _peak(self.weight_dtype == "bfloat16")

    @property
    def flops(self) -> int:
        return 2 * self.M * self.N * self.K

    @property
    def bytes(self) -> int:
        """The scales of quantised weights, a small part, are not counted."""
        weights = self.N * self.K * _WEIGHT_BITS[self.weight_dtype] // 8
        return 4 * self.M * (self.N + self.K) + weights

    @property
    def label(self) -> str:
        return " ".join([f"projection {self.M}·{self.K}·{self.N}", self.weight_dtype or ""]).strip()


@dataclass(frozen=True)
class Attention:
    """q[B, T, N, H], k and v[B, S, K, H]; causal means that the last query sees the last key.

    Options: a bias[B, N, T, S], a mask[B, 1, 1, S] that shows so many keys of each sequence, the
    keys that a causal query sees, its own included, q, k and v of bfloat16, and a cache that has k
    and v in int8.
    """

    title: str
    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    causal: bool = False
    cold: bool = False
    bias: bool = False
    lengths: tuple[int, ...] | None = None
    window: int | None = None
    bfloat16: bool = False
    int8: bool = False

    @property
    def name(self) -> str:
        window = "" if self.window is None else f" window {self.window}"
        return (
            f"{self.title} {_sizes(self, 'BTSNKH', self.causal)}{window} {_temperature(self.cold)}"
        )

    @property
    def label(self) -> str:
        axes = "B" * (self.B > 1) + "T" + "S" * (self.S != self.T) + "H"
        return " ".join(["attention", _sizes(self, axes, self.causal), *self.title.split()[1:]])

    @property
    def dtype(self) -> npt.DTypeLike:
        if not self.bfloat16:
            return np.float32
        from ml_dtypes import bfloat16  # which other cells do without

        dtype: npt.DTypeLike = bfloat16
        return dtype

    @property
    def plain(self) -> Attention:
        """Without its options."""
        return replace(self, bias=False, lengths=None, window=None, bfloat16=False, int8=False)

    @property
    def of_limit(self) -> Limit:
        return "read bandwidth" if self.T == 1 else _peak(self.bfloat16)

    @cached_property
    def flops(self) -> int:
        """Of scores and values, over visible pairs: those that neither causality, window nor mask
        hides."""
        return 4 * self._cost.visible_pairs * self.N * self.H

    @cached_property
    def bytes(self) -> int:
        moved = sum(row.bytes for row in self._cost.rows[_ATTENTION_ROWS])
        if self.int8:  # and a float32 scale for each key and each value
            moved += 2 * self.B * self.S * self.K * (4 - 3 * self.H)
        if self.bias:
            moved += 4 * self.B * self.N * self.T * self.S
        return moved

    @cached_property
    def _cost(self) -> BlockCost:
        return attention_block_cost(
            self.B,
            self.T,
            1,
            self.N,
            self.K,
            self.H,
            S=self.S,
            is_causal=self.causal,
            query_offset=self.S - self.T,
            key_value_seq_lengths=self.lengths,
            local_window_size=None if self.window is None else (self.window - 1, None),
            itemsize=2 if self.bfloat16 else 4,
        )


@dataclass(frozen=True)
class Varlen:
    """Packed sequences of those lengths: self-attention, or one query each against so many keys.

    The latter reads its keys and values from memory.
    """

    title: str
    lengths: tuple[int, ...]
    N: int
    K: int
    H: int
    decode: bool = False
    causal: bool = False

    @property
    def name(self) -> str:
        lengths = f"B{len(self.lengths)} S{min(self.lengths)}..{max(self.lengths)}"
        return (
            f"{self.title} {lengths} {_sizes(self, 'NKH', self.causal)} {_temperature(self.decode)}"
        )

    @property
    def of_limit(self) -> Limit:
        return "read bandwidth" if self.decode else "FMA peak"

    @property
    def label(self) -> str:
        sizes = f"B{len(self.lengths)} {_sizes(self, 'H', self.causal)}"
        return " ".join(["packed", sizes, *self.title.split()[1:]])

    @cached_property
    def flops(self) -> int:
        """Of scores and values, over visible pairs."""
        return sum(sequence.flops for sequence in self._sequences())

    @cached_property
    def bytes(self) -> int:
        return sum(sequence.bytes for sequence in self._sequences())

    def _sequences(self) -> list[Attention]:
        return [
            Attention("", 1, 1 if self.decode else S, S, self.N, self.K, self.H, self.causal)
            for S in self.lengths
        ]


@dataclass(frozen=True)
class Block:
    """Self-attention on x[B, T, D] with residual and LayerNorm."""

    T: int
    D: int
    N: int
    K: int
    H: int
    B: int
    causal: bool = False
    cold: bool = False

    @property
    def name(self) -> str:
        return f"{_sizes(self, 'TDNKHB', self.causal)} {_temperature(self.cold)}"

    @property
    def of_limit(self) -> Limit:
        return "read bandwidth" if self.cold else "FMA peak"

    @property
    def label(self) -> str:
        return f"block {_sizes(self, 'BTD' if self.B > 1 else 'TD', self.causal)}"

    @property
    def flops(self) -> int:
        """Of all matrix products, over visible pairs."""
        return self._cost.matmul_flops

    @property
    def bytes(self) -> int:
        return self._cost.bytes

    @cached_property
    def _cost(self) -> BlockCost:
        return attention_block_cost(
            self.B, self.T, self.D, self.N, self.K, self.H, is_causal=self.causal
        )


@dataclass(frozen=True)
class Step:
    """A step of decoding: one position of B sequences through a block whose cache has S of each."""

    B: int
    S: int
    D: int
    N: int
    K: int
    H: int
    cold: bool = False

    @property
    def name(self) -> str:
        return f"{_sizes(self, 'BSDNKH')} {_temperature(self.cold)}"

    @property
    def of_limit(self) -> Limit:
        return "read bandwidth"

    @property
    def label(self) -> str:
        return f"step {_sizes(self, 'BSD')}"

    @cached_property
    def flops(self) -> int:
        """Of all matrix products."""
        return sum(row.flops for row in self._rows if row.is_matmul)

    @cached_property
    def bytes(self) -> int:
        return sum(row.bytes for row in self._rows)

    @cached_property
    def _rows(self) -> list[OperationCost]:
        """Projections and norm of one position, attention to it and to those in the cache."""
        sizes = (self.B, 1, self.D, self.N, self.K, self.H)
        rows = list(attention_block_cost(*sizes).rows)
        rows[_ATTENTION_ROWS] = attention_block_cost(*sizes, S=self.S + 1).rows[_ATTENTION_ROWS]
        return rows


Cell = Projection | Attention | Varlen | Block | Step


def _sizes(cell: Cell, axes: str, causal: bool = False) -> str:
    sizes = [f"{letter}{getattr(cell, letter)}" for letter in axes]
    return " ".join([*sizes, *["causal"] * causal])


def _temperature(cold: bool) -> str:
    return "cold" if cold else "hot"


def _peak(bfloat16: bool) -> Limit:
    return "dot product peak" if bfloat16 else "FMA peak"


_QUANTIZED: tuple[WeightDtype, ...] = ("int8", "int4")

_FLOAT_PROJECTIONS = (
    Projection(2048, 4096, 4096),
    Projection(512, 768, 768),
    Projection(1024, 1152, 384),
    Projection(100, 1152, 384),
    Projection(17, 768, 768),
    Projection(8, 768, 768),
    Projection(1, 4096, 4096, cold=True),
    Projection(4, 4096, 4096, cold=True),
    Projection(16, 4096, 4096, cold=True),
)

PROJECTIONS = (
    *_FLOAT_PROJECTIONS,
    *(replace(cell, weight_dtype="bfloat16") for cell in _FLOAT_PROJECTIONS),
    *(
        Projection(M, 4096, 4096, cold=True, weight_dtype=weight_dtype)
        for weight_dtype in _QUANTIZED
        for M in (1, 4, 16)
    ),
    *(Projection(512, 768, 768, weight_dtype=weight_dtype) for weight_dtype in _QUANTIZED),
)

_DECODE = (
    ("D1", 1, 1, 4096, 32, 8, 128),
    ("D2", 8, 1, 2048, 32, 8, 128),
    ("D3", 1, 1, 32768, 8, 1, 128),
)

ATTENTION = (
    Attention("P1", B=1, T=512, S=512, N=12, K=12, H=64),
    Attention("P2", B=8, T=128, S=128, N=12, K=12, H=32),
    Attention("P3", B=1, T=2048, S=2048, N=16, K=16, H=64, causal=True),
    Attention("P4", B=1, T=4096, S=4096, N=32, K=8, H=128, causal=True),
    Attention("P5", B=1, T=2048, S=2048, N=8, K=1, H=256, causal=True),
    Attention("P6", B=1, T=16384, S=16384, N=4, K=1, H=128, causal=True),
    Attention("C1", B=1, T=256, S=4096, N=32, K=8, H=128, causal=True),
    *(Attention(*sizes, cold=cold) for sizes in _DECODE for cold in (False, True)),
)

OPTIONS = (
    Attention("M1 bias", B=1, T=512, S=512, N=12, K=12, H=64, bias=True),
    Attention(
        "M2 padding mask",
        B=8,
        T=128,
        S=128,
        N=12,
        K=12,
        H=32,
        lengths=(128, 97, 45, 113, 31, 128, 80, 64),
    ),
    Attention("W1 window", B=1, T=8192, S=8192, N=8, K=2, H=64, causal=True, window=512),
    *(
        replace(cell, title=f"{cell.title} bfloat16", bfloat16=True)
        for cell in ATTENTION
        if cell.title in ("P1", "P2", "P3", "P4", "D1", "D2")
    ),
    Attention("D1 int8", *_DECODE[0][1:], cold=True, int8=True),
)

_RAGGED = (500, 35, 128, 17, 260, 90, 411, 64, 22, 149, 310, 77, 190, 12, 45, 233)

VARLEN = (
    Varlen("V1 equal", (512,) * 8, N=12, K=12, H=64),
    Varlen("V2 ragged", _RAGGED, N=12, K=12, H=64),
    Varlen("V3 ragged", tuple(S // 4 for S in _RAGGED) * 4, N=12, K=12, H=32),
    Varlen("V4 one long", (2048,) + (64,) * 15, N=16, K=4, H=64, causal=True),
    Varlen("V5 decode", tuple(8 * S for S in _RAGGED), N=32, K=8, H=128, decode=True),
)

BLOCKS = (
    Block(T=512, D=768, N=12, K=12, H=64, B=1),
    Block(T=128, D=384, N=12, K=12, H=32, B=8),
    Block(T=2048, D=1024, N=16, K=16, H=64, B=1, causal=True),
    Block(T=2048, D=4096, N=32, K=8, H=128, B=1, causal=True),
    Block(T=1, D=4096, N=32, K=8, H=128, B=1, cold=True),
    Block(T=1, D=4096, N=32, K=8, H=128, B=8, cold=True),
)

DECODING = (
    Step(B=1, S=256, D=576, N=9, K=3, H=64),
    Step(B=1, S=2048, D=4096, N=32, K=8, H=128, cold=True),
    Step(B=8, S=2048, D=4096, N=32, K=8, H=128, cold=True),
)

_LENGTHS = tuple(64 << doubled for doubled in range(8))

#: BERT's and GPT-2's attention and block, from short to long.
SCALING: tuple[Cell, ...] = (
    *(Attention("attention", B=1, T=T, S=T, N=12, K=12, H=64, causal=True) for T in _LENGTHS),
    *(Block(T=T, D=768, N=12, K=12, H=64, B=1, causal=True) for T in _LENGTHS),
)

#: Not causal: the mask of NumPy's would be one more thing to count, or not.
MEMORY = tuple(Attention("attention", B=1, T=T, S=T, N=12, K=12, H=64) for T in _LENGTHS)

#: By group, what is measured where no group is named: one or two minutes on two cores.
SHORT: dict[str, tuple[Cell, ...]] = {
    "blocks": BLOCKS[:3],
    "attention": tuple(
        cell
        for cell in ATTENTION
        if (cell.title, cell.cold) in (("P1", False), ("P3", False), ("D1", True))
    ),
    "decoding": DECODING[:1],
    "projections": (_FLOAT_PROJECTIONS[1], _FLOAT_PROJECTIONS[5]),
}
