"""Checks shared by the fast path and the reference: every fault is found here, before any work.

A message names the argument, what came and what was expected.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from tileattn._core import Scores, Visibility


class SupportsDLPack(Protocol):
    """An array of another library, which need not have more in common with NumPy's."""

    def __dlpack_device__(self) -> tuple[int, int]: ...

    def __dlpack__(self) -> Any: ...


ArrayLike: TypeAlias = npt.ArrayLike | SupportsDLPack
Array: TypeAlias = npt.NDArray[Any]
Integers: TypeAlias = npt.NDArray[np.int64]
Bool: TypeAlias = npt.NDArray[np.bool_]
Window: TypeAlias = int | tuple[int | None, int | None] | None
NormPosition: TypeAlias = Literal["pre", "post"] | None

# More is a mistake, and a failing thread creation would end the process.
MAX_THREADS = 1024

FLOAT_TYPES = (np.dtype(np.float32), np.dtype(np.float64))

# Only stored; the arithmetic is float32's. By name, since bfloat16 is another package's.
HALF_TYPES = ("float16", "bfloat16")

# Far beyond any sequence, and far from where position + offset would overflow.
OFFSET_LIMIT = 1 << 60

# The integers up to it are float64 too.
POSITION_LIMIT = 1 << 53

# DLPack's numbers of what the CPU reads as its own memory: that, and what CUDA or ROCm pinned.
HOST_DEVICES = (1, 3, 11)
DEVICES = {2: "CUDA", 8: "Metal", 10: "ROCm", 14: "oneAPI"}

# What comes with every step, and has no device: looking for one would take longer than reading it.
PLAIN = (float, int, list, np.ndarray)

# A copy that takes long is not made in silence.
TO_CPU = "copy it to the CPU first: .cpu() in PyTorch, .get() in CuPy, jax.device_get(x) in JAX"


#: Characters of a message that repeats what a file or a command line holds.
LONGEST_MESSAGE = 1000


def shortened(message: str) -> str:
    """A message as one line that is not too long to be read."""
    line = " ".join(message.split())
    return line if len(line) <= LONGEST_MESSAGE else line[:LONGEST_MESSAGE] + " ..."


class SetOnce:
    """Base of objects whose attributes do not change: what was checked stays so."""

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(self, name):
            raise AttributeError(f"{type(self).__name__}.{name} does not change: make another")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} does not change: make another")


class AttentionArguments(NamedTuple):
    """What `check_attention` found, with the B axis in place."""

    q: Array
    k: Array
    v: Array
    sizes: tuple[int, int, int, int, int, int, int]  # B, T, N, H, S, K, Hv
    has_batch: bool
    scores: Scores
    visibility: Visibility
    arithmetic: Arithmetic | None
    out: Array | None
    k_scales: Array | None = None  # [B, S, K], of k and v in int8, which only a cache has
    v_scales: Array | None = None


class VarlenArguments(NamedTuple):
    """What `check_varlen` found; sequence b has the rows starts[b] to starts[b + 1]."""

    q: Array  # [total_q, N, H]
    k: Array
    v: Array
    query_starts: Integers  # [B + 1]
    key_starts: Integers  # [B + 1]
    scores: Scores
    visibility: Visibility
    arithmetic: Arithmetic | None
    out: Array | None


class WeightsArguments(NamedTuple):
    """What `check_attention_weights` found, with the B axis in place."""

    q: Array
    k: Array
    lse: Array
    has_batch: bool
    scores: Scores
    visibility: Visibility
    rows: Integers | None
    reduce: Literal["queries", "keys"] | None
    out: Array | None


class NormParameters(SetOnce):
    """Weight, bias and eps of a LayerNorm or RMSNorm; the arrays are read-only copies."""

    subtract_mean = True  # as LayerNorm does

    def __init__(
        self,
        weight: ArrayLike | None = None,
        bias: ArrayLike | None = None,
        eps: float = 1e-5,
    ) -> None:
        self.weight = check_vector("weight", weight)
        self.bias = check_vector("bias", bias)
        self.eps = check_real("eps", eps)
        if self.eps < 0:
            raise ValueError(f"eps must not be negative, got {eps}")
        if self.weight is not None:
            self._check_fit(len(self.weight), self.weight.dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.weight, self.bias, self.eps)

    def _check_fit(self, D: int, dtype: np.dtype[Any], prefix: str = "") -> None:
        """Raise unless rows of that width and dtype can be normalised."""
        for name, vector in (("weight", self.weight), ("bias", self.bias)):
            if vector is None:
                continue
            if vector.dtype != dtype:
                raise TypeError(
                    f"{prefix}{name} has dtype {vector.dtype}, expected {dtype}; convert it with "
                    f".astype"
                )
            if len(vector) != D:
                raise ValueError(f"{prefix}{name} has shape {vector.shape}, expected ({D},)")


class RopeParameters(SetOnce):
    """What the checks need to know of a Rope."""

    rotary_dim: int | None
    interleaved: bool


Result = TypeVar("Result")


class CacheSpan(NamedTuple):
    """A cache as one call reads it, and writes to it if it adds positions."""

    keys: Array  # [B, slots, K, H]
    values: Array  # [B, slots, K, Hv]
    key_scales: Array | None  # [B, slots, K], of int8
    value_scales: Array | None
    is_ring: bool
    starts: Integers | None  # [B], the positions that new keys go to; None for no new ones
    counts: Integers | None  # [B], how many of them, or None for all
    lengths: Integers  # [B], with the new ones
    longest: Integers  # [B], in a ring the most that each has had since it was empty


class CacheParameters(SetOnce):
    """What the checks need to know of a KVCache, and what becomes of its lengths."""

    batch: int
    capacity: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: np.dtype[Any]
    window: int | None
    _keys: Array
    _values: Array
    _key_scales: Array | None
    _value_scales: Array | None
    _lengths: Integers  # replaced, never changed in place
    _longest: Integers  # likewise; the most that a ring's sequences have had since they were empty

    def __setattr__(self, name: str, value: Any) -> None:
        # The memory is of the sizes that it was made with; what it holds changes.
        if name[0] == "_":
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def _set(self, lengths: Integers, longest: Integers) -> None:
        # Each call does: past the above, and not through __dict__, which makes every later look at
        # an attribute slower.
        object.__setattr__(self, "_lengths", lengths)
        object.__setattr__(self, "_longest", longest)

    def _check_fit(
        self, name: str, B: int, heads: tuple[int, int, int], dtype: np.dtype[Any]
    ) -> None:
        """Raise unless it is for B sequences of those K, H and Hv, computed in that dtype."""
        if self.batch != B:
            raise ValueError(f"{name} has a batch of B = {self.batch}, but x has B = {B}")
        own = (self.num_kv_heads, self.head_dim, self.v_head_dim)
        if own != heads:
            raise ValueError(f"{name} has (K, H, Hv) = {own}, but this block has {heads}")
        check_stored_type(f"{name}.dtype", self.dtype, dtype)

    def _arrays(self) -> list[Array]:
        return list(self._named_arrays().values())

    def _named_arrays(self) -> dict[str, Array]:
        """All that is kept of a position, [B, slots, ...], and what it is called."""
        arrays = {
            "the cache's keys": self._keys,
            "the cache's values": self._values,
            "the cache's key scales": self._key_scales,
            "the cache's value scales": self._value_scales,
        }
        return {name: array for name, array in arrays.items() if array is not None}

    def _span(self) -> CacheSpan:
        """What it holds."""
        return self._span_of(None, None, self._lengths, self._longest)

    def _span_of(
        self,
        starts: Integers | None,
        counts: Integers | None,
        lengths: Integers,
        longest: Integers,
    ) -> CacheSpan:
        return CacheSpan(
            self._keys,
            self._values,
            self._key_scales,
            self._value_scales,
            self.window is not None,
            starts,
            counts,
            lengths,
            longest,
        )

    def _longer_span(self, name: str, T: int, counts: Integers | None) -> CacheSpan:
        """What it will hold with T more positions, or counts[b], which argument `name` brings."""
        lengths = self._lengths + (T if counts is None else counts)
        longest, window = self._longest, self.window
        if window is None:
            full = None if bounds(lengths)[1] <= self.capacity else lengths > self.capacity
        else:
            longest = np.maximum(longest, lengths)
            # What the next position sees is always left.
            full = None
            if window + T > self.capacity + 1:
                oldest = longest - self.capacity
                full = (lengths > self._lengths) & (self._first_seen(self._lengths) < oldest)
        if full is not None and full.any():
            b = int(full.argmax())
            limit = "" if window is None else f", and a window of {window}"
            raise ValueError(
                f"{name} has {lengths[b] - self._lengths[b]} positions for sequence {b}, which has "
                f"{self._lengths[b]} already: that does not fit a capacity of {self.capacity}"
                f"{limit}"
            )
        return self._span_of(self._lengths, counts, lengths, longest)

    def _write(self, span: CacheSpan, write: Callable[..., Result], *arguments: Any) -> Result:
        """What `write` returns, which writes new positions; they count from `_advance` on.

        An interrupt may come in between: what a ring has overwritten is lost by then.
        """
        before = self._longest
        self._set(self._lengths, span.longest)
        try:
            return write(*arguments)
        except Exception:  # it has not begun
            self._longest = before
            raise

    def _advance(self, span: CacheSpan) -> None:
        """What the span says has been written."""
        self._set(span.lengths, span.longest)

    @property
    def _oldest(self) -> Integers:
        """What a ring has not overwritten starts here."""
        return np.maximum(self._longest - self.capacity, 0)

    def _first_seen(self, positions: Integers) -> Integers:
        """The first key that a query at each position sees."""
        return np.maximum(positions + 1 - (self.window or self.capacity), 0)

    def _first_lost(self, positions: Integers) -> int | None:
        """The first sequence of which a ring has lost what a query at that position sees."""
        lost = self._first_seen(positions) < self._oldest
        return int(lost.argmax()) if lost.any() else None

    def _check_left(self, offset: Integers) -> None:
        """Raise unless a ring still has what queries from the offset on see."""
        b = self._first_lost(offset)
        if b is not None:
            raise ValueError(
                f"query_offset is {offset[b]} for sequence {b}, where a query sees {self.window} "
                f"positions, but only those from {self._oldest[b]} on are left"
            )

    def _see(
        self,
        is_causal: bool,
        offset: Integers | None,
        counts: Integers | None,
        lengths: Integers,
        window: tuple[int, int] | None,
    ) -> Visibility:
        """Who sees whom, where the first queries stand at the offset and the keys have lengths."""
        if self.window is not None:
            left, right = window or (-1, -1)
            window = (min(self.window - 1, left) if left >= 0 else self.window - 1, right)
        return Visibility(is_causal, offset, counts, lengths, window)


class QuantizedParameters(SetOnce):
    """What a QuantizedMatrix [out, in] holds, and PackedMatrix reads."""

    shape: tuple[int, int]
    bits: int
    group_size: int
    _values: Array  # int8, or uint8 with 4 bits
    _scales: Array  # float32, or with 4 bits float16, times _unit
    _minima: Array | None  # the same, with 4 bits
    _unit: float


class HeadMatrix(NamedTuple):
    """A QuantizedMatrix [out, in] in place of an array [in, *heads] or, for w_o, [*heads, out]."""

    matrix: Any
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype[Any]:
        return FLOAT_TYPES[0]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def has_one_scale_a_row(self) -> bool:
        """Of 8 bits: so that sums over the whole of it are integers."""
        return bool(self.matrix.bits == 8 and self.matrix.group_size >= self.matrix.shape[1])

    def reshape(self, *_: int) -> Any:
        """As two axes, whichever they are, it is the matrix."""
        return self.matrix


Weight: TypeAlias = Array | HeadMatrix
Arithmetic: TypeAlias = Literal["float32"]
BlockArithmetic: TypeAlias = Literal["float32", "int8"]


class BlockWeights(NamedTuple):
    """What `check_block_weights` found; vectors are copies."""

    matrices: tuple[Weight, ...]  # w_q, w_k, w_v and w_o
    weight_dtype: str | None
    arithmetic: BlockArithmetic | None
    biases: tuple[Array | None, Array | None, Array | None, Array | None]
    norm: NormParameters | None  # None if it has no position, too
    is_pre_norm: bool
    residual: bool
    rope: RopeParameters | None
    rotary_dim: int  # 0 without rope
    q_norm: NormParameters | None
    k_norm: NormParameters | None
    scores: Scores  # without the bias, which comes with a call
    is_causal: bool
    window: tuple[int, int] | None

    @property
    def has_quantized(self) -> bool:
        """Whether a QuantizedMatrix is among the matrices, for arithmetic in float32 or int8."""
        return any(isinstance(matrix, HeadMatrix) for matrix in self.matrices)


class BlockInputs(NamedTuple):
    """What `check_block_inputs` found, with the B axis in place."""

    x: Array
    context: Array | None  # None too where the keys lie in a cache
    bias: Array | None
    visibility: Visibility
    positions: Integers | None  # [B], of the first queries, or None for 0
    span: CacheSpan | None
    out: Array | None  # as it was given, but for its type
    has_batch: bool


def check_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    bias: ArrayLike | None,
    mask: ArrayLike | None,
    scale: float | None,
    softcap: float | None,
    is_causal: bool,
    query_offset: ArrayLike | None,
    local_window_size: Window,
    query_seq_lengths: ArrayLike | None,
    key_value_seq_lengths: ArrayLike | None,
    alibi_slopes: ArrayLike | None,
    sinks: ArrayLike | None,
    arithmetic: str | None,
    out: Array | None,
) -> AttentionArguments:
    """Check all arguments of an attention call and bring them into one form."""
    checked_arithmetic = check_arithmetic(arithmetic)
    q, k, has_batch = check_queries_and_keys(q, k)
    v = check_values(v, q, k, has_batch)
    (B, T, N, H), (_, S, K, Hv) = q.shape, v.shape
    shape = (B, N, T, S) if has_batch else (N, T, S)
    mask, bias = check_mask(mask, shape), check_bias(bias, shape)
    if out is not None:
        expected = (B, T, N, Hv)
        out = check_out(
            out,
            expected if has_batch else expected[1:],
            q.dtype,
            q=q,
            k=k,
            v=v,
            mask=mask,
            bias=bias,
        )
        if not has_batch:
            out = out[None]
    visibility = check_visibility(
        B,
        T,
        S,
        is_causal=is_causal,
        query_offset=query_offset,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        alibi_slopes=alibi_slopes,
        mask=mask,
    )
    scores = check_scores(
        B if has_batch else None,
        N,
        H,
        q.dtype,
        scale=scale,
        softcap=softcap,
        bias=bias,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
    )
    sizes = (B, T, N, H, S, K, Hv)
    return AttentionArguments(
        q, k, v, sizes, has_batch, scores, visibility, checked_arithmetic, out
    )


def check_varlen(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    scale: float | None,
    softcap: float | None,
    is_causal: bool,
    query_offset: ArrayLike | None,
    local_window_size: Window,
    alibi_slopes: ArrayLike | None,
    sinks: ArrayLike | None,
    arithmetic: str | None,
    out: Array | None,
) -> VarlenArguments:
    """Check a call of attention on sequences of several lengths, packed one after the other."""
    checked_arithmetic = check_arithmetic(arithmetic)
    q, k, has_batch = check_queries_and_keys(q, k)
    if has_batch:
        raise ValueError(f"q must have the axes [total_q, N, H], not shape {q.shape}")
    v = check_values(v, q, k, has_batch)
    _, total, N, H = q.shape
    query_starts = check_starts("cu_seqlens_q", cu_seqlens_q, "q", total)
    key_starts = check_starts("cu_seqlens_k", cu_seqlens_k, "k", k.shape[1])
    B = len(query_starts) - 1
    if len(key_starts) - 1 != B:
        raise ValueError(
            f"cu_seqlens_k is of {len(key_starts) - 1} sequences, but cu_seqlens_q is of {B}"
        )
    if out is not None:
        out = check_out(out, (total, N, v.shape[3]), q.dtype, q=q, k=k, v=v)
    causal, window = check_flag("is_causal", is_causal), check_window(local_window_size)
    lengths = np.stack([np.diff(query_starts), np.diff(key_starts)], axis=1)
    ragged = np.flatnonzero(lengths[:, 0] != lengths[:, 1])
    T, S = lengths[ragged[0]].tolist() if len(ragged) else (0, 0)
    offset = check_query_offset(
        query_offset,
        B,
        T,
        S,
        needed_by=_what_needs_positions(causal, window, alibi_slopes),
        where=f" in sequence {ragged[0]}" if len(ragged) else "",
    )
    scores = check_scores(
        B, N, H, q.dtype, scale=scale, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks
    )
    visibility = Visibility(causal, offset, None, None, window)
    return VarlenArguments(
        q[0],
        k[0],
        v[0],
        query_starts,
        key_starts,
        scores,
        visibility,
        checked_arithmetic,
        out,
    )


def check_attention_weights(
    q: ArrayLike,
    k: ArrayLike,
    lse: ArrayLike,
    *,
    rows: ArrayLike | None,
    reduce: str | None,
    bias: ArrayLike | None,
    mask: ArrayLike | None,
    scale: float | None,
    softcap: float | None,
    is_causal: bool,
    query_offset: ArrayLike | None,
    local_window_size: Window,
    query_seq_lengths: ArrayLike | None,
    key_value_seq_lengths: ArrayLike | None,
    alibi_slopes: ArrayLike | None,
    out: Array | None,
) -> WeightsArguments:
    """Check a call that asks for weights, given the LSE of the rows."""
    q, k, has_batch = check_queries_and_keys(q, k)
    q, k = q[...], k[...]
    B, T, N, H = q.shape
    S = k.shape[1]
    dtype = arithmetic_type(q.dtype)
    lse = check_array("lse", lse, dtype)
    expected = (B, T, N) if has_batch else (T, N)
    if lse.shape != expected:
        raise ValueError(f"lse has shape {lse.shape}, expected {expected}")
    rows = check_rows(rows, T)
    check_choice("reduce", reduce, "queries", "keys")
    shape = (B, N, T, S) if has_batch else (N, T, S)
    mask, bias = check_mask(mask, shape), check_bias(bias, shape)
    if out is not None:
        expected = (B, N)[not has_batch :]
        if reduce != "queries":
            expected += (T if rows is None else len(rows),)
        if reduce != "keys":
            expected += (S,)
        out = check_out(out, expected, dtype, q=q, k=k, lse=lse, mask=mask, bias=bias)
        if not has_batch:
            out = out[None]
    visibility = check_visibility(
        B,
        T,
        S,
        is_causal=is_causal,
        query_offset=query_offset,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        alibi_slopes=alibi_slopes,
        mask=mask,
    )
    scores = check_scores(
        B if has_batch else None,
        N,
        H,
        q.dtype,
        scale=scale,
        softcap=softcap,
        bias=bias,
        alibi_slopes=alibi_slopes,
    )
    return WeightsArguments(
        q,
        k,
        lse if has_batch else lse[None],
        has_batch,
        scores,
        visibility,
        rows,
        cast(Literal["queries", "keys"] | None, reduce),
        out,
    )


def check_states(
    out_a: ArrayLike,
    lse_a: ArrayLike,
    out_b: ArrayLike,
    lse_b: ArrayLike,
    more: tuple[ArrayLike, ...],
) -> list[tuple[Array, Array]]:
    """Check two or more pairs of results and their LSE; all of one shape and type."""
    if len(more) % 2:
        raise TypeError(f"more must be pairs of an out and its lse, but {len(more)} arrays came")
    values = (out_a, lse_a, out_b, lse_b, *more)
    names = ("out_a", "lse_a", "out_b", "lse_b", *(f"more[{i}]" for i in range(len(more))))
    parts: list[tuple[Array, Array]] = []
    for i in range(0, len(values), 2):
        dtype = parts[0][0].dtype if parts else None
        out = check_array(names[i], values[i], dtype, halves=True, like="out_a")
        lse = check_array(names[i + 1], values[i + 1], arithmetic_type(out.dtype))
        if out.ndim == 0:
            raise ValueError(f"{names[i]} must have at least one axis, [..., Hv]")
        if parts and out.shape != parts[0][0].shape:
            raise ValueError(f"{names[i]} has shape {out.shape}, expected {parts[0][0].shape}")
        if lse.shape != out.shape[:-1]:
            raise ValueError(
                f"{names[i + 1]} has shape {lse.shape}, expected {out.shape[:-1]} since "
                f"{names[i]} has {out.shape}"
            )
        parts.append((out, lse))
    return parts


def check_queries_and_keys(q: ArrayLike, k: ArrayLike) -> tuple[Array, Array, bool]:
    """Returns q and k with the B axis in place, and whether it was given.

    They may be the arrays themselves, not views, which take a fiftieth of a small call each:
    attention compares their shapes with the sizes that were checked.
    """
    q = _check_floats("q", q, None, True, "")
    k = _check_floats("k", k, q.dtype, True, "q")
    if q.ndim not in (3, 4):
        raise ValueError(f"q must have the axes [B, T, N, H] or [T, N, H], not shape {q.shape}")
    has_batch = q.ndim == 4
    if k.ndim != q.ndim:
        axes = "[B, S, K, H]" if has_batch else "[S, K, H]"
        raise ValueError(
            f"k must have the axes {axes} since q has shape {q.shape}, not shape {k.shape}"
        )
    if not has_batch:
        q, k = q[None], k[None]
    (B, _, N, H), (k_batch, _, K, k_width) = q.shape, k.shape
    if k_batch != B:
        raise ValueError(f"k has a batch of B = {k_batch}, but q has B = {B}")
    if k_width != H:
        raise ValueError(f"k has head width H = {k_width}, but q has H = {H}")
    if N != 0 and (K == 0 or N % K != 0):
        raise ValueError(
            f"q has N = {N} heads, which must be a multiple of the K = {K} heads of k and v"
        )
    return q, k, has_batch


def check_values(v: ArrayLike, q: Array, k: Array, has_batch: bool) -> Array:
    """Returns v with the B axis in place; q and k have it already. It may be no view, too."""
    v = _check_floats("v", v, q.dtype, True, "q")
    if v.ndim != (4 if has_batch else 3):
        axes = "[B, S, K, Hv]" if has_batch else "[S, K, Hv]"
        shape = q.shape if has_batch else q.shape[1:]
        raise ValueError(
            f"v must have the axes {axes} since q has shape {shape}, not shape {v.shape}"
        )
    if not has_batch:
        v = v[None]
    (B, S, K, _), (v_batch, v_length, v_heads, _) = k.shape, v.shape
    if v_batch != B:
        raise ValueError(f"v has a batch of B = {v_batch}, but q and k have B = {B}")
    if v_length != S:
        raise ValueError(f"v has {v_length} positions S, but k has {S}")
    if v_heads != K:
        raise ValueError(f"v has {v_heads} heads K, but k has {K}")
    return v


def check_block_weights(
    w_q: ArrayLike | HeadMatrix,
    w_k: ArrayLike | HeadMatrix,
    w_v: ArrayLike | HeadMatrix,
    w_o: ArrayLike | HeadMatrix,
    *,
    b_q: ArrayLike | None,
    b_k: ArrayLike | None,
    b_v: ArrayLike | None,
    b_o: ArrayLike | None,
    norm: NormParameters | None,
    norm_position: NormPosition,
    residual: bool,
    rope: RopeParameters | None,
    q_norm: NormParameters | None,
    k_norm: NormParameters | None,
    scale: float | None,
    softcap: float | None,
    is_causal: bool,
    local_window_size: Window,
    sinks: ArrayLike | None,
    weight_dtype: str | None,
    arithmetic: str | None,
) -> BlockWeights:
    """Check what an attention block is made of."""
    check_choice("weight_dtype", weight_dtype, "bfloat16", "int8", "int4")
    check_choice("arithmetic", arithmetic, "float32", "int8")
    w_q = check_weight("w_q", w_q, None)
    dtype = w_q.dtype
    w_k, w_v, w_o = (
        check_weight(name, weight, dtype)
        for name, weight in (("w_k", w_k), ("w_v", w_v), ("w_o", w_o))
    )
    if weight_dtype is not None and dtype != np.float32:
        raise TypeError(
            f"weight_dtype = {weight_dtype!r} takes float32 weights, and w_q has {dtype}; "
            "convert all with .astype(np.float32)"
        )
    if arithmetic == "int8":
        for name, weight in (("w_q", w_q), ("w_k", w_k), ("w_v", w_v), ("w_o", w_o)):
            if weight_dtype != "int8" and not isinstance(weight, HeadMatrix):
                raise ValueError(f"arithmetic = 'int8' takes weight_dtype = 'int8' for {name}")
            if isinstance(weight, HeadMatrix) and not weight.has_one_scale_a_row:
                raise ValueError(
                    f"arithmetic = 'int8' takes 8 bits and a scale for each row of {name}, which "
                    f"has {weight.matrix.bits} bits and group_size = {weight.matrix.group_size}"
                )
    for name, weight, axes in (
        ("w_q", w_q, "[D, N, H]"),
        ("w_k", w_k, "[Dc, K, H]"),
        ("w_v", w_v, "[Dc, K, Hv]"),
        ("w_o", w_o, "[N, Hv, D]"),
    ):
        if weight.ndim != 3 or 0 in weight.shape:
            raise ValueError(f"{name} must have the axes {axes}, none empty, not {weight.shape}")
    (D, N, H), (Dc, K, Hv) = w_q.shape, w_v.shape
    if N % K != 0:
        raise ValueError(f"w_q has N = {N} heads, which must be a multiple of w_v's K = {K}")
    for name, weight, expected in (("w_k", w_k, (Dc, K, H)), ("w_o", w_o, (N, Hv, D))):
        if weight.shape != expected:
            raise ValueError(
                f"{name} has shape {weight.shape}, expected {expected} from w_q {w_q.shape} and "
                f"w_v {w_v.shape}"
            )
    for name, given, width in (("norm", norm, D), ("q_norm", q_norm, H), ("k_norm", k_norm, H)):
        if given is None:
            continue
        if not isinstance(given, NormParameters):
            raise TypeError(
                f"{name} must be a LayerNorm, an RMSNorm or None, not {type(given).__name__}"
            )
        given._check_fit(width, dtype, f"{name}.")
    check_choice("norm_position", norm_position, "pre", "post")
    rotary_dim = 0
    if rope is not None:
        if not isinstance(rope, RopeParameters):
            raise TypeError(f"rope must be a Rope or None, not {type(rope).__name__}")
        rotary_dim = fit_rotary_dim(rope.rotary_dim, H, "rope.")
    biases = (
        check_vector("b_q", b_q, (N, H), dtype),
        check_vector("b_k", b_k, (K, H), dtype),
        check_vector("b_v", b_v, (K, Hv), dtype),
        check_vector("b_o", b_o, (D,), dtype),
    )
    return BlockWeights(
        (w_q, w_k, w_v, w_o),
        weight_dtype,
        cast(BlockArithmetic | None, arithmetic),
        biases,
        None if norm_position is None else norm,
        norm_position == "pre",
        check_flag("residual", residual),
        rope,
        rotary_dim,
        q_norm,
        k_norm,
        check_scores(None, N, H, dtype, scale=scale, softcap=softcap, sinks=sinks),
        check_flag("is_causal", is_causal),
        check_window(local_window_size),
    )


def check_choice(name: str, value: str | None, *choices: str) -> str | None:
    """One of a few names, or None."""
    if value is None:
        return None
    message = f"{name} must be {', '.join(map(repr, choices))} or None, not {value!r}"
    if not isinstance(value, str):
        raise TypeError(message)
    if value not in choices:
        raise ValueError(message)
    return value


def check_arithmetic(arithmetic: str | None) -> Arithmetic | None:
    return cast(Arithmetic | None, check_choice("arithmetic", arithmetic, "float32"))


def check_weight(name: str, weight: ArrayLike | HeadMatrix, dtype: np.dtype[Any] | None) -> Weight:
    """A float array, or a quantised matrix that from_linear has put in its place."""
    if isinstance(weight, QuantizedParameters):
        raise TypeError(
            f"{name} is a QuantizedMatrix, [out, in]: hand it to AttentionBlock.from_linear"
        )
    if not isinstance(weight, HeadMatrix):
        return check_array(name, weight, dtype, like="" if dtype is None else "w_q")
    if dtype is not None and dtype != weight.dtype:
        raise TypeError(f"{name} is quantised, for arithmetic in float32, but w_q has {dtype}")
    return weight


def check_block_inputs(
    x: ArrayLike,
    context: ArrayLike | CacheParameters | None,
    D: int,
    Dc: int,
    heads: tuple[int, int, int, int],
    dtype: np.dtype[Any],
    *,
    cache: CacheParameters | None,
    bias: ArrayLike | None,
    mask: ArrayLike | None,
    is_causal: bool,
    local_window_size: Window = None,
    has_rope: bool = False,
    query_offset: ArrayLike | None,
    query_seq_lengths: ArrayLike | None,
    key_value_seq_lengths: ArrayLike | None,
    out: Array | None,
) -> BlockInputs:
    """Check a call of an attention block that is made for those widths, N, K, H, Hv and dtype."""
    x = check_array("x", x, dtype)
    if x.ndim not in (2, 3) or x.shape[-1] != D:
        raise ValueError(f"x must have the shape [B, T, {D}] or [T, {D}], not {x.shape}")
    has_batch = x.ndim == 3
    B, T = len(x) if has_batch else 1, x.shape[-2]
    S, span = T, None
    holder: CacheParameters | None = None
    if cache is None and not isinstance(context, CacheParameters):
        context = check_context(context, x, D, Dc)
        if context is not None:
            S = context.shape[-2]
        visibility = check_visibility(
            B,
            T,
            S,
            is_causal=is_causal,
            query_offset=query_offset,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            local_window_size=local_window_size,
            has_rope=has_rope,
        )
        positions = visibility.query_offset
    else:
        span, visibility, positions = check_cached_keys(
            B,
            T,
            context,
            cache,
            heads[1:],
            dtype,
            is_cross=Dc != D,
            is_causal=is_causal,
            local_window_size=local_window_size,
            has_rope=has_rope,
            query_offset=query_offset,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
        )
        holder = cast(CacheParameters, context if cache is None else cache)
        context = None
        if span.is_ring and not (mask is None and bias is None):
            raise TypeError(
                f"{'bias' if mask is None else 'mask'} does not go with a ring, a cache with a "
                f"window, which does not keep all the keys that it would be about"
            )
    if not (mask is None and bias is None):
        S = S if span is None else bounds(span.lengths)[1]
        shape = (*x.shape[:-2], heads[0], T, S)
        mask, bias = check_mask(mask, shape), check_bias(bias, shape)
        if cache is not None:
            mask, bias = _apart(mask, cache), _apart(bias, cache)
        visibility = visibility.with_mask(mask)
    if out is not None:
        kept = {} if holder is None else holder._named_arrays()
        out = check_out(out, x.shape, dtype, x=x, context=context, mask=mask, bias=bias, **kept)
    if not has_batch:
        x, context = x[None], None if context is None else context[None]
    return BlockInputs(x, context, bias, visibility, positions, span, out, has_batch)


def _apart(array: Array | None, cache: CacheParameters) -> Array | None:
    """The array, or a copy if it lies in the memory that new positions are written to."""
    if array is None or not any(overlaps(array, kept) for kept in cache._arrays()):
        return array
    return array.copy()


def check_context(context: ArrayLike | None, x: Array, D: int, Dc: int) -> Array | None:
    """Check the context, of width Dc, of a block for that x."""
    if context is None:
        if Dc != D:
            raise ValueError(
                f"context is missing: this block's keys and values come from a context of width "
                f"{Dc}, not from x of width {D}"
            )
        return None
    context = check_array("context", context, x.dtype, like="x")
    if context.ndim != x.ndim or context.shape[-1] != Dc:
        raise ValueError(
            f"context must have the shape [{'B, ' if x.ndim == 3 else ''}S, {Dc}] since x has "
            f"shape {x.shape}, not {context.shape}"
        )
    if x.ndim == 3 and len(context) != len(x):
        raise ValueError(f"context has batch B = {len(context)}, but x has {len(x)}")
    return context


def check_cached_keys(
    B: int,
    T: int,
    context: ArrayLike | CacheParameters | None,
    cache: CacheParameters | None,
    heads: tuple[int, int, int],
    dtype: np.dtype[Any],
    *,
    is_cross: bool,
    is_causal: bool,
    local_window_size: Window,
    has_rope: bool,
    query_offset: ArrayLike | None,
    query_seq_lengths: ArrayLike | None,
    key_value_seq_lengths: ArrayLike | None,
) -> tuple[CacheSpan, Visibility, Integers | None]:
    """Check a block's call with a cache, or with a context that is one; heads are K, H, Hv.

    Returns also the positions of the first queries, None for 0.
    """
    if key_value_seq_lengths is not None:
        raise TypeError("key_value_seq_lengths is what the cache knows: leave it out")
    causal, window = check_flag("is_causal", is_causal), check_window(local_window_size)
    counts = check_lengths("query_seq_lengths", query_seq_lengths, B, T)
    offset: Integers | None
    if cache is None:
        kept = cast(CacheParameters, context)
        kept._check_fit("context", B, heads, dtype)
        span = kept._span()
        needed_by = _what_needs_positions(causal, window, None, has_rope)
        if kept.window is not None:
            needed_by = "the window of context"
        S = bounds(span.lengths)[1]
        offset = check_query_offset(query_offset, B, T, S, needed_by=needed_by)
        if kept.window is not None:
            offset = np.zeros(B, np.int64) if offset is None else offset
            kept._check_left(offset)
    else:
        kept = cache
        if not isinstance(kept, CacheParameters):
            raise TypeError(f"cache must be a KVCache, not {type(kept).__name__}")
        if context is not None:
            raise TypeError("context does not go with cache, which is for the keys of x itself")
        if is_cross:
            raise TypeError(
                "cache is for the keys of x itself, but this block's come from a context: give "
                "what context_cache makes of that as context"
            )
        if query_offset is not None:
            raise TypeError("query_offset is what the cache knows: leave it out")
        kept._check_fit("cache", B, heads, dtype)
        span = kept._longer_span("x", T, counts)
        offset = span.starts
    if has_rope:
        check_rope_offset("query_offset" if cache is None else "cache.lengths", offset, T)
    return span, kept._see(causal, offset, counts, span.lengths, window), offset


def check_norm_inputs(
    x: ArrayLike, residual: ArrayLike | None, norm: NormParameters, out: Array | None
) -> tuple[Array, Array | None, Array | None]:
    """Check x, what is added to it, and the output, for a norm with those parameters."""
    x = check_array("x", x)
    if x.ndim == 0:
        raise ValueError("x must have at least one axis, [..., D]")
    if residual is not None:
        residual = check_array("residual", residual, x.dtype, like="x")
        if residual.shape != x.shape:
            raise ValueError(f"residual has shape {residual.shape}, expected {x.shape}")
    norm._check_fit(x.shape[-1], x.dtype)
    if out is not None:
        out = check_out(out, x.shape, x.dtype, x=x, residual=residual)
    return x, residual, out


class RopeInputs(NamedTuple):
    """What `check_rope_inputs` found."""

    x: Array
    positions: Integers  # [B, T], or [1, T] for all sequences
    rotary_dim: int
    out: Array | None


def check_rope_inputs(
    x: ArrayLike, positions: ArrayLike, rotary_dim: int | None, out: Array | None
) -> RopeInputs:
    """Check heads, and the positions that rotate them; `out` may be x."""
    x = check_array("x", x)
    if x.ndim not in (3, 4):
        raise ValueError(f"x must have the axes [B, T, N, H] or [T, N, H], not shape {x.shape}")
    *batch, T, _, H = x.shape
    rotary_dim = fit_rotary_dim(rotary_dim, H)
    positions = as_integers("positions", positions)
    if positions.shape not in ((T,), (*batch, T)):
        either = f" or [B, T] = {(*batch, T)}" if batch else ""
        raise ValueError(
            f"positions must have the shape [T] = ({T},){either}, not {positions.shape}"
        )
    if positions.size and (positions.min() < 0 or positions.max() > POSITION_LIMIT):
        wrong = first_outside(positions, 0, POSITION_LIMIT)
        raise ValueError(f"positions must lie between 0 and 2**53, got {wrong}")
    if out is not None:
        out = check_out(out, x.shape, x.dtype)
        if (out.ctypes.data, out.strides) != (x.ctypes.data, x.strides):
            _check_apart(out, x=x)
    return RopeInputs(x, np.atleast_2d(positions).astype(np.int64), rotary_dim, out)


def fit_rotary_dim(rotary_dim: int | None, H: int, prefix: str = "") -> int:
    """How many columns of a head are rotated: all, where None."""
    if rotary_dim is None:
        if H % 2 != 0:
            raise ValueError(
                f"{prefix}rotary_dim must be given, and even, since heads have H = {H} columns"
            )
        return H
    if rotary_dim > H:
        raise ValueError(
            f"{prefix}rotary_dim = {rotary_dim} is more than the H = {H} columns of a head"
        )
    return rotary_dim


def as_array(name: str, value: ArrayLike) -> Array:
    """What has an array (`__array__`, `__array_interface__`, DLPack) as one, in place."""
    if type(value) is np.ndarray:
        return value
    is_plain = isinstance(value, PLAIN)
    if not is_plain:
        _check_device(name, value)
    try:
        array = np.asanyarray(value) if is_plain else _read(value)
    except MemoryError:
        raise
    except Exception as error:  # such as rows of several lengths, or a gradient that would be lost
        refusal = ValueError if isinstance(error, ValueError) else TypeError
        raise refusal(f"{name}{_type_of(value)} gives no array: {error}") from error
    if _is_masked(array) or _is_masked(value):
        raise TypeError(
            f"{name} is a masked array, and its mask would be lost: fill it with .filled(value)"
        )
    return np.asarray(array)


def _is_masked(value: Any) -> bool:
    """Whether NumPy would drop a mask: that of an array, or of one in a list."""
    if isinstance(value, (list, tuple)):
        return any(map(_is_masked, value))
    return isinstance(value, np.ma.MaskedArray)


def _check_device(name: str, value: Any) -> None:
    """Raise if the memory is not the CPU's; what does not say so is a matter of its `__array__`."""
    try:
        # A class has these for its objects, not for itself.
        if hasattr(type(value), "__dlpack_device__"):
            kind, number = map(int, value.__dlpack_device__())
            if kind in HOST_DEVICES:
                return
            device = f"{DEVICES.get(kind, f'DLPack type {kind}')} device {number}"
        elif hasattr(value, "__cuda_array_interface__"):
            device = "a CUDA device"
        else:
            return
    except Exception as error:
        raise TypeError(
            f"{name}{_type_of(value)} is on an unknown device: {error}; {TO_CPU}"
        ) from error
    raise TypeError(f"{name}{_type_of(value)} is on {device}; {TO_CPU}")


def _read(value: Any) -> Array:
    if not hasattr(value, "__dlpack__"):
        return np.asanyarray(value)
    torch: Any = sys.modules.get("torch")
    is_tensor = torch is not None and isinstance(value, torch.Tensor)
    # torch itself refuses to drop a gradient, but not what forward mode carries along.
    if is_tensor and torch.autograd.forward_ad.unpack_dual(value).tangent is not None:
        raise TypeError("it has a tangent, which would be lost")
    # As integers, since torch and NumPy's DLPack have no such type in common; but with a gradient,
    # which would be lost in silence, it is torch that refuses below.
    if is_tensor and value.dtype == torch.bfloat16 and not value.requires_grad:
        return np.asarray(value.view(torch.int16)).view(bfloat16_type("bfloat16"))
    return np.asanyarray(value) if hasattr(value, "__array__") else np.from_dlpack(value)


def bfloat16_type(name: str) -> np.dtype[Any]:
    try:
        import ml_dtypes
    except ImportError:
        raise TypeError(f"{name} needs the package ml_dtypes: pip install ml_dtypes") from None
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def check_array(
    name: str,
    value: ArrayLike,
    dtype: np.dtype[Any] | None = None,
    *,
    halves: bool = False,
    like: str = "",
) -> Array:
    """A view of a floating array that pointers and whole-element strides can reach.

    It stays what it is if another argument's own code changes the array's shape meanwhile. The
    array is float32 or float64, or float16 or bfloat16 where `halves` says so; or else `dtype`,
    which may be that of the argument `like`.
    """
    return _check_floats(name, value, dtype, halves, like)[...]


def _check_floats(
    name: str, value: ArrayLike, dtype: np.dtype[Any] | None, halves: bool, like: str
) -> Array:
    array = as_array(name, value)
    native = given = array.dtype
    if native not in FLOAT_TYPES:
        if native.kind in "fV":  # bfloat16 is a V; others may have no byte order
            native = native.newbyteorder("=")
        if native not in FLOAT_TYPES and not (halves and is_half(native)):
            types = "float16, bfloat16, float32 or float64" if halves else "float32 or float64"
            raise TypeError(
                f"{name}{_type_of(value)} must be {types}, not {given}; convert it with "
                ".astype(np.float32)"
            )
    if dtype is not None and native != dtype:
        if like:
            raise TypeError(
                f"{name}{_type_of(value)} has dtype {given}, but {like} has {dtype}; make both "
                "arrays of one dtype (with .astype)"
            )
        raise TypeError(f"{name} has dtype {given}, expected {dtype}; convert it with .astype")
    if native == given and _has_whole_strides(array):
        return array
    # What a stride of 0 repeats is copied once.
    once = array[(*(slice(None if step else 1) for step in array.strides), ...)]
    return np.broadcast_to(once.astype(native), array.shape)


def _type_of(value: Any) -> str:
    return "" if isinstance(value, np.ndarray) else f" (of type {type(value).__name__})"


def check_stored_type(name: str, stored: np.dtype[Any], dtype: np.dtype[Any]) -> None:
    """Raise unless a cache of that type is for arithmetic in `dtype`."""
    if arithmetic_type(stored) != dtype:
        halves = ", float16, bfloat16 or int8" if dtype == np.float32 else ""
        raise TypeError(f"{name} is {stored}, expected {dtype}{halves}")


def is_half(dtype: np.dtype[Any]) -> bool:
    # Their names alone would admit what calls itself so, of any size.
    return dtype.name in HALF_TYPES and dtype.type.__name__ == dtype.name and dtype.itemsize == 2


def arithmetic_type(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """What inputs of that type are computed in; the LSE is of it."""
    return dtype if dtype in FLOAT_TYPES else FLOAT_TYPES[0]


def _has_whole_strides(array: Array) -> bool:
    flags = array.flags
    return flags.carray or (
        flags.aligned and all(stride % array.itemsize == 0 for stride in array.strides)
    )


def check_flag(name: str, value: bool) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    raise TypeError(f"{name} must be True or False, not {value!r}")


def check_int(name: str, value: Any) -> int:
    cause = None
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except Exception as error:  # a tensor without data has errors of its own
        cause = error
    raise TypeError(f"{name} must be an int, not {value!r}") from cause


def check_real(name: str, value: Any) -> float:
    array = as_array(name, value)
    if array.ndim != 0 or array.dtype.kind not in "fiub":
        raise TypeError(f"{name} must be a real number, not {value!r}")
    number = float(array)
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, not {value!r}")
    return number


def check_at_least(name: str, value: Any, least: float) -> float:
    number = check_real(name, value)
    if number < least:
        raise ValueError(f"{name} must be at least {least:g}, got {value!r}")
    return number


@functools.cache
def largest_score(dtype: np.dtype[Any]) -> float:
    """What is still finite in units of log2, in which the arithmetic for that dtype counts."""
    # A little less than ln 2, to be told from the largest bias.
    return 0.693 * float(np.finfo(arithmetic_type(dtype)).max)


def check_scale(scale: float | None, H: int, dtype: np.dtype[Any]) -> float:
    if scale is None:
        return 1.0 / math.sqrt(H) if H else 1.0
    number, largest = check_real("scale", scale), largest_score(dtype)
    if abs(number) > largest:
        raise ValueError(
            f"scale must lie between {-largest:.3g} and {largest:.3g} in "
            f"{arithmetic_type(dtype)}, got {scale!r}"
        )
    return number


def check_scores(
    B: int | None,
    N: int,
    H: int,
    dtype: np.dtype[Any],
    *,
    scale: float | None,
    softcap: float | None,
    bias: Array | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
) -> Scores:
    """Check what q k^T goes through for inputs of that dtype. The bias is checked already."""
    return Scores(
        check_scale(scale, H, dtype),
        check_softcap(softcap, dtype),
        bias,
        check_alibi_slopes(alibi_slopes, B, N, dtype),
        check_sinks(sinks, N, dtype),
    )


def check_softcap(softcap: float | None, dtype: np.dtype[Any]) -> float:
    """The cap, 0 for none; what the arithmetic would round to 0 or infinity is refused."""
    if softcap is None:
        return 0.0
    cap = check_real("softcap", softcap)
    smallest, largest = float(np.finfo(arithmetic_type(dtype)).tiny), largest_score(dtype)
    if not smallest <= cap <= largest:
        raise ValueError(
            f"softcap must lie between {smallest:.3g} and {largest:.3g}, got {softcap!r}; None "
            f"caps nothing"
        )
    return cap


def check_mask(mask: ArrayLike | None, shape: tuple[int, ...]) -> Bool | None:
    """The mask as a view [B, N, T, S]; `shape` is that, or without B where the inputs are."""
    if mask is None:
        return None
    array = as_array("mask", mask)
    if array.dtype != bool:
        raise TypeError(
            f"mask must be boolean, True where a query may attend, not {array.dtype}; numbers to "
            f"add to the scores are a bias, and zeros and ones become a mask with .astype(bool)"
        )
    return _broadcast("mask", array, shape)


def check_bias(bias: ArrayLike | None, shape: tuple[int, ...]) -> Array | None:
    """The bias as a view [B, N, T, S]; `shape` is that, or without B where the inputs are."""
    if bias is None:
        return None
    array = as_array("bias", bias)
    if array.dtype == bool:
        raise TypeError(
            "bias must be floating, not bool; give what is True where a query may attend as mask"
        )
    return _broadcast("bias", check_array("bias", array, halves=True), shape)


def _broadcast(name: str, array: Array, shape: tuple[int, ...]) -> Array:
    try:
        view = np.broadcast_to(array, shape)
    except ValueError:
        axes = "[B, N, T, S]" if len(shape) == 4 else "[N, T, S]"
        raise ValueError(
            f"{name} has shape {array.shape}, expected one that broadcasts to {axes} = {shape}"
        ) from None
    return view if len(shape) == 4 else view[None]


def check_alibi_slopes(
    alibi_slopes: ArrayLike | None, B: int | None, N: int, dtype: np.dtype[Any]
) -> Array | None:
    """Slopes as a copy [B, N], from [N] or [B, N]; B is None where the inputs have no such axis."""
    if alibi_slopes is None:
        return None
    slopes = check_array("alibi_slopes", alibi_slopes, halves=True)
    if slopes.shape not in ((N,), (B, N)):
        either = f"[N] = ({N},)" + ("" if B is None else f" or [B, N] = ({B}, {N})")
        raise ValueError(f"alibi_slopes must be of shape {either}, not {slopes.shape}")
    copy = np.empty((1 if B is None else B, N), arithmetic_type(dtype))
    with np.errstate(all="ignore"):  # a signalling NaN is an invalid operand
        copy[...] = slopes
    largest = largest_score(dtype)
    if not (np.abs(copy) <= largest).all():
        raise ValueError(
            f"alibi_slopes must be finite, between {-largest:.3g} and {largest:.3g} in "
            f"{copy.dtype}, got {slopes}"
        )
    return copy


def check_sinks(sinks: ArrayLike | None, N: int, dtype: np.dtype[Any]) -> Array | None:
    """Sinks as a read-only copy [N]."""
    if sinks is None:
        return None
    array = check_array("sinks", sinks, halves=True)
    if array.shape != (N,):
        raise ValueError(f"sinks must be of shape [N] = ({N},), not {array.shape}")
    with np.errstate(all="ignore"):  # a signalling NaN is an invalid operand
        copy = np.array(array, arithmetic_type(dtype), order="C")
    largest = largest_score(dtype)
    if not ((np.abs(copy) <= largest) | (array == -np.inf)).all():
        raise ValueError(
            f"sinks must be finite, between {-largest:.3g} and {largest:.3g} in {copy.dtype}, or "
            f"-inf for none, got {array}"
        )
    return frozen(copy)


def check_window(local_window_size: Window) -> tuple[int, int] | None:
    """(left, right) with -1 where unbounded; None where both are."""
    if local_window_size is None:
        return None
    sides = local_window_size
    if not isinstance(sides, (tuple, list)):
        sides = (sides, sides)
    if len(sides) != 2:
        raise ValueError(f"local_window_size must be an int or a pair (left, right), not {sides!r}")
    left, right = map(_check_neighbours, sides)
    return None if left < 0 and right < 0 else (left, right)


def _check_neighbours(size: int | None) -> int:
    if size is None:
        return -1
    number = check_int("local_window_size", size)
    if number < 0:
        raise ValueError(f"local_window_size must not be negative, got {size}; None is unbounded")
    # So many reach every key from any position that an offset may give.
    return -1 if number > 2 * OFFSET_LIMIT else number


def check_visibility(
    B: int,
    T: int,
    S: int,
    *,
    is_causal: bool,
    query_offset: ArrayLike | None,
    query_seq_lengths: ArrayLike | None,
    key_value_seq_lengths: ArrayLike | None,
    local_window_size: Window = None,
    alibi_slopes: ArrayLike | None = None,
    has_rope: bool = False,
    mask: Bool | None = None,
) -> Visibility:
    """Check who sees whom. The mask is checked already; slopes only count as given or not."""
    causal, window = check_flag("is_causal", is_causal), check_window(local_window_size)
    needed_by = _what_needs_positions(causal, window, alibi_slopes, has_rope)
    offset = check_query_offset(query_offset, B, T, S, needed_by=needed_by)
    if has_rope:
        check_rope_offset("query_offset", offset, T)
    return Visibility(
        causal,
        offset,
        check_lengths("query_seq_lengths", query_seq_lengths, B, T),
        check_lengths("key_value_seq_lengths", key_value_seq_lengths, B, S),
        window,
        mask,
    )


def _what_needs_positions(
    is_causal: bool,
    window: tuple[int, int] | None,
    alibi_slopes: ArrayLike | None,
    has_rope: bool = False,
) -> str | None:
    """The argument, if any, whose meaning depends on where the queries stand."""
    if is_causal:
        return "is_causal"
    if window is not None:
        return "local_window_size"
    if has_rope:
        return "rope"
    return None if alibi_slopes is None else "alibi_slopes"


def as_integers(name: str, value: ArrayLike) -> Array:
    """An array of integers that int64 can hold."""
    array = as_array(name, value)
    if array.size == 0 and isinstance(value, (list, tuple)):  # of floats, for NumPy
        array = array.astype(np.int64)
    kind = array.dtype.kind
    if kind not in "iu":
        raise TypeError(f"{name} must hold integers, not {array.dtype}")
    if kind == "u" and array.size and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name} is too large: {array.max()}")
    return array


def bounds(integers: Integers) -> tuple[int, int]:
    """The smallest and the largest of some integers."""
    # A reduction of NumPy's takes 2 us, a small block 10.
    if integers.size <= 32:
        values = sorted(integers.tolist())
        return values[0], values[-1]
    return int(integers.min()), int(integers.max())


def first_outside(integers: Array, lowest: int, highest: int) -> str:
    """The first of some integers that does not lie there, and where it stands."""
    wrong = (integers < lowest) | (integers > highest)
    index = tuple(map(int, np.unravel_index(int(wrong.argmax()), wrong.shape)))
    return f"{integers[index]} at index {index[0] if len(index) == 1 else index}"


def check_integers(name: str, value: ArrayLike, B: int, *, scalar: bool) -> Integers:
    """Integers of shape [B] as a copy in int64, from an int too where `scalar` says so.

    A copy, since loops trust what has been checked.
    """
    array = as_integers(name, value)
    if array.ndim == 0 and scalar:
        array = array.repeat(B)
    elif array.shape != (B,):
        either = "an int or " if scalar else ""
        raise ValueError(f"{name} must be {either}of shape [B] = ({B},), not {array.shape}")
    return array.astype(np.int64)


def check_starts(name: str, value: ArrayLike, packed: str, total: int) -> Integers:
    """Where each sequence starts, and the end of the last, as a copy [B + 1]."""
    array = as_integers(name, value)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{name} must be of shape [B + 1], not {array.shape}")
    starts = np.array(array, np.int64, order="C")
    if starts[0] != 0 or starts[-1] != total:
        raise ValueError(
            f"{name} must start at 0 and end at {total}, the rows of {packed}, "
            f"not {starts[0]} ... {starts[-1]}"
        )
    falls = np.flatnonzero(starts[1:] < starts[:-1])
    if len(falls):
        b = falls[0]
        raise ValueError(f"{name} must not decrease, but {starts[b + 1]} follows {starts[b]}")
    return starts


def check_rows(rows: ArrayLike | None, T: int) -> Integers | None:
    """Positions of queries as a copy [R]."""
    if rows is None:
        return None
    array = as_integers("rows", rows)
    if array.ndim != 1:
        raise ValueError(f"rows must be of shape [R], not {array.shape}")
    if array.size and (array.min() < 0 or array.max() >= T):
        wrong = first_outside(array, 0, T - 1)
        raise ValueError(f"rows must lie between 0 and T - 1 = {T - 1}, got {wrong}")
    return np.array(array, np.int64, order="C")


def check_query_offset(
    query_offset: ArrayLike | None,
    B: int,
    T: int,
    S: int,
    *,
    needed_by: str | None,
    where: str = "",
) -> Integers | None:
    """The position of query row 0 in each sequence; None for 0 in all."""
    if query_offset is None:
        if needed_by is not None and T != S:
            raise ValueError(
                f"{needed_by} with T = {T} queries and S = {S} keys{where} needs query_offset, the "
                f"position of the first query: 0 aligns it with the first key, S - T = {S - T} the "
                f"last query with the last key"
            )
        return None
    offset = check_integers("query_offset", query_offset, B, scalar=True)
    if B:
        lowest, highest = bounds(offset)
        if lowest < -OFFSET_LIMIT or highest > OFFSET_LIMIT:
            raise ValueError(f"query_offset must lie within +-2**60, got {query_offset!r}")
    return offset


def check_rope_offset(name: str, offset: Integers | None, T: int) -> None:
    if offset is None or not offset.size:
        return
    lowest, highest = bounds(offset)
    if lowest < 0 or highest + T > POSITION_LIMIT:
        raise ValueError(
            f"{name} must lie between 0 and 2**53 - T with rope, got {offset.tolist()}"
        )


def check_lengths(name: str, value: ArrayLike | None, B: int, limit: int) -> Integers | None:
    if value is None:
        return None
    lengths = check_integers(name, value, B, scalar=False)
    if B:
        lowest, highest = bounds(lengths)
        if lowest < 0 or highest > limit:
            wrong = first_outside(lengths, 0, limit)
            raise ValueError(f"{name} must lie between 0 and {limit}, got {wrong}")
    return lengths


def check_vector(
    name: str,
    value: ArrayLike | None,
    shape: tuple[int, ...] | None = None,
    dtype: np.dtype[Any] | None = None,
) -> Array | None:
    """A read-only contiguous copy of a bias or the like, by default any [D]; None for None."""
    if value is None:
        return None
    vector = check_array(name, value, dtype)
    if vector.ndim != 1 if shape is None else vector.shape != shape:
        raise ValueError(f"{name} has shape {vector.shape}, expected {shape or '[D]'}")
    return frozen(vector)


def frozen(array: Array) -> Array:
    """A contiguous copy that nobody can write to, or resize: loops keep pointers to it."""
    return np.ndarray(array.shape, array.dtype, array.tobytes())


def check_out(
    out: Any, shape: tuple[int, ...], dtype: np.dtype[Any], **inputs: Array | None
) -> Array:
    """The output as an array that is no subclass, whose attributes could say anything."""
    if not isinstance(out, np.ndarray) or isinstance(out, np.ma.MaskedArray):
        raise TypeError(
            f"out must be a plain NumPy array, not {type(out).__name__}; for a tensor of the CPU, "
            "out=tensor.numpy()"
        )
    array = as_array("out", out)
    if array.dtype != dtype and not (is_half(dtype) and array.dtype == np.float32):
        either = f"{dtype} or float32" if is_half(dtype) else dtype
        raise TypeError(f"out has dtype {array.dtype}, expected {either}")
    if array.shape != shape:
        raise ValueError(f"out has shape {array.shape}, expected {shape}")
    if not array.flags.writeable:
        raise ValueError("out is read-only")
    if not _has_whole_strides(array):
        raise ValueError("out must be aligned to its elements")
    if overlaps_itself(array):
        raise ValueError("out must have a place of its own in memory for each element")
    _check_apart(array, **inputs)
    return array[...]  # a view, as in check_array


def _check_apart(out: Array, **inputs: Array | None) -> None:
    for name, other in inputs.items():
        if other is not None and overlaps(out, other):
            raise ValueError(f"out overlaps {name} in memory; pass an array of its own")


def overlaps(a: Array, b: Array) -> bool:
    if not np.may_share_memory(a, b):
        return False
    try:
        # NumPy's stub allows no other bound than its two names for "none" and "ranges only".
        return np.shares_memory(a, b, max_work=100_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def overlaps_itself(a: Array) -> bool:
    """Whether elements share memory, or might: each axis must step over all of the finer ones."""
    if a.flags.c_contiguous:
        return False
    extent = a.itemsize
    for step, size in sorted(zip(map(abs, a.strides), a.shape, strict=True)):
        if size > 1:
            if step < extent:
                return True
            extent += step * (size - 1)
    return False


def check_num_threads(num_threads: Any) -> int:
    number = check_int("num_threads", num_threads)
    if not 1 <= number <= MAX_THREADS:
        raise ValueError(f"num_threads must lie between 1 and {MAX_THREADS}, got {number}")
    return number
