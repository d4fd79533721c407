"""Checks of whole calls, shared by the fast path and the reference: before any work.

A single argument is checked in `_values`, the options of attention in `_scores`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np

from tileattn._core import Scores, Visibility
from tileattn._scores import (
    POSITION_LIMIT,
    Window,
    check_bias,
    check_lengths,
    check_mask,
    check_query_offset,
    check_rope_offset,
    check_rows,
    check_scores,
    check_starts,
    check_visibility,
    check_window,
    what_needs_positions,
)
from tileattn._values import (
    FLOAT_TYPES,
    Array,
    ArrayLike,
    Integers,
    SetOnce,
    arithmetic_type,
    as_integers,
    bounds,
    check_apart,
    check_array,
    check_choice,
    check_flag,
    check_floats,
    check_out,
    check_real,
    check_stored_type,
    check_vector,
    first_outside,
    overlaps,
)

NormPosition: TypeAlias = Literal["pre", "post"] | None


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

    def _frozen(self) -> NormParameters:
        """What it says of itself now: a derived class may compute that, or have other arrays."""
        frozen = NormParameters(self.weight, self.bias, self.eps)
        object.__setattr__(frozen, "subtract_mean", bool(self.subtract_mean))
        return frozen

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
        except MemoryError:  # it has not begun; what a handler of signals raises comes behind it
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
        needed_by=what_needs_positions(causal, window, alibi_slopes),
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
    q = check_floats("q", q, None, True, "")
    k = check_floats("k", k, q.dtype, True, "q")
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
    v = check_floats("v", v, q.dtype, True, "q")
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
    norm, q_norm, k_norm = (
        _check_norm(name, given, width, dtype)
        for name, given, width in (("norm", norm, D), ("q_norm", q_norm, H), ("k_norm", k_norm, H))
    )
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


def _check_norm(
    name: str, norm: NormParameters | None, width: int, dtype: np.dtype[Any]
) -> NormParameters | None:
    if norm is None:
        return None
    if not isinstance(norm, NormParameters):
        raise TypeError(
            f"{name} must be a LayerNorm, an RMSNorm or None, not {type(norm).__name__}"
        )
    frozen = norm._frozen()
    frozen._check_fit(width, dtype, f"{name}.")
    return frozen


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
        needed_by = what_needs_positions(causal, window, None, has_rope)
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
            check_apart(out, x=x)
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
