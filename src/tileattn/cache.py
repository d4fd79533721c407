"""Keys and values of earlier positions, kept for the next step of decoding."""

from __future__ import annotations

from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from tileattn import _core
from tileattn._arguments import Arithmetic, AttentionArguments, CacheParameters, check_arithmetic
from tileattn._scores import POSITION_LIMIT, Window, check_lengths, check_scores, check_window
from tileattn._values import (
    FLOAT_TYPES,
    HALF_TYPES,
    Array,
    ArrayLike,
    Integers,
    arithmetic_type,
    bfloat16_type,
    bounds,
    check_array,
    check_flag,
    check_int,
    check_integers,
    check_out,
    first_outside,
    is_half,
)
from tileattn.attention import attend
from tileattn.config import resolve_threads

CACHE_LINE = 64
ASIDE = -1  # where `reorder` keeps the sequence that it takes out of a cycle
INT8 = np.dtype(np.int8)


class KVCache(CacheParameters):
    """Keys and values of B sequences, appended to step by step and attended to in place.

    Parameters
    ----------
    batch : int
        B, the number of sequences. Each has its own length.
    capacity : int
        How many positions of a sequence there is room for. It is fixed, and so is the memory; the
        system provides pages of it when they are first used.
    num_kv_heads : int
        K, how many key/value heads there are.
    head_dim : int
        H, the width of a key.
    v_head_dim : int, optional
        Hv, the width of a value; by default H.
    dtype : dtype, optional
        What keys and values are stored as: float32, float64, or float16 or bfloat16 (which needs
        the package ml_dtypes) for half the memory and traffic; these are rounded to the nearest
        when appended, and computed with in float32. Or int8, for about a quarter: see below.
    window : int, optional
        Keep only what a sliding window of so many positions sees: each position sees itself and the
        ``window - 1`` before it, as with ``local_window_size=(window - 1, 0)``. Sequences may then
        be of any length, and `capacity`, at least `window`, is that of a ring: one `append` takes
        up to ``capacity - window + 1`` positions, more only while nothing has to be overwritten.

    Attributes
    ----------
    batch, capacity, num_kv_heads, head_dim, v_head_dim : int
    dtype : numpy.dtype
    window : int or None

    Notes
    -----
    Give it to a call of an `AttentionBlock` (``block(x, cache=cache)``), one cache for each layer:
    what the block projects goes here without a detour. Layers that share keys and values share a
    cache: one appends, all attend; a second block reads what the first has added with
    ``block(x, context=cache, query_offset=cache.lengths - T)``.

    **int8.** Each row, the key or the value of one position and head, is kept as integers from -127
    to 127 and a float32 scale. Attention is what float32 gives of their products,
    ``cache.keys * cache.key_scales[..., None]``, and of the values likewise. Such a product is off
    by at most half a scale and its own rounding; the scale is 1/127 of the row's largest number, no
    less than 2**-126, or 0 for a row of zeros. A row with a NaN or an infinity is all NaN, as its
    scale is.

    Several threads may attend at a time, but nothing else while one appends, truncates, reorders or
    resets.

    A call that raises has changed nothing.

    Examples
    --------
    A prompt of 5 positions, then one new token:

    >>> import numpy as np, tileattn
    >>> rng = np.random.default_rng(0)
    >>> cache = tileattn.KVCache(batch=1, capacity=64, num_kv_heads=2, head_dim=8)
    >>> q = rng.standard_normal((1, 6, 4, 8), dtype=np.float32)
    >>> k, v = rng.standard_normal((2, 1, 6, 2, 8), dtype=np.float32)
    >>> cache.append(k[:, :5], v[:, :5])
    >>> prompt = cache.attend(q[:, :5])
    >>> cache.append(k[:, 5:], v[:, 5:])
    >>> token = cache.attend(q[:, 5:])
    >>> cache.lengths
    array([6])
    >>> whole = tileattn.dot_product_attention(q, k, v, is_causal=True)
    >>> np.allclose(np.concatenate([prompt, token], axis=1), whole, atol=1e-6)
    True
    """

    def __init__(
        self,
        batch: int,
        capacity: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        dtype: npt.DTypeLike = "float32",
        window: int | None = None,
    ) -> None:
        self.batch = _check_size("batch", batch)
        self.capacity = _check_size("capacity", capacity)
        self.num_kv_heads = _check_size("num_kv_heads", num_kv_heads)
        self.head_dim = _check_size("head_dim", head_dim)
        self.v_head_dim = (
            self.head_dim if v_head_dim is None else _check_size("v_head_dim", v_head_dim)
        )
        self.dtype = _check_dtype(dtype)
        self.window = None if window is None else _check_size("window", window)
        slots = self.capacity
        if self.window is not None:
            if self.capacity < self.window:
                raise ValueError(
                    f"capacity must be at least window = {self.window}, got {capacity}"
                )
            # The kernels' blocks of keys must not reach around the end.
            slots = -(-slots // _core.KEY_BLOCK) * _core.KEY_BLOCK
        # Positions start on cache lines. Keeping them off multiples of a page changes no time.
        steps = [
            -(-self.num_kv_heads * width * self.dtype.itemsize // CACHE_LINE) * CACHE_LINE
            for width in (self.head_dim, self.v_head_dim)
        ]
        memory = memoryview(_core.Memory(self.batch * slots * sum(steps)))
        arrays, offset = [], 0
        for step, width in zip(steps, (self.head_dim, self.v_head_dim), strict=True):
            size = self.dtype.itemsize
            arrays.append(
                np.ndarray(
                    (self.batch, slots, self.num_kv_heads, width),
                    self.dtype,
                    memory,
                    offset,
                    (slots * step, step, width * size, size),
                )
            )
            offset += self.batch * slots * step
        self._keys, self._values = arrays
        self._key_scales = self._value_scales = None
        if self.dtype == INT8:
            self._key_scales, self._value_scales = (self._make_scales(slots) for _ in "kv")
        self._lengths = np.zeros(self.batch, np.int64)
        self._longest = np.zeros(self.batch, np.int64)

    def _make_scales(self, slots: int) -> Array:
        """[B, slots, K]; those of a head lie side by side, and fill what a kernel reads at once."""
        padded = -(-slots // _core.KEY_BLOCK) * _core.KEY_BLOCK
        memory = memoryview(_core.Memory(self.batch * self.num_kv_heads * padded * 4))
        shape = (self.batch, self.num_kv_heads, padded)
        scales: Array = np.ndarray(shape, np.float32, memory)
        return scales[..., :slots].swapaxes(1, 2)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, or what comes out of a pickle, has memory of its own, laid out as this one's."""
        sizes = (self.batch, self.capacity, self.num_kv_heads, self.head_dim, self.v_head_dim)
        kept = (self._arrays(), self._lengths, self._longest)
        return type(self), (*sizes, self.dtype, self.window), kept

    def __setstate__(self, kept: tuple[list[Array], Integers, Integers]) -> None:
        arrays, lengths, longest = kept
        for own, other in zip(self._arrays(), arrays, strict=True):
            own[...] = other
        self._lengths, self._longest = lengths.copy(), longest.copy()

    def __repr__(self) -> str:
        parts = [f"B={self.batch}", f"capacity={self.capacity}"]
        parts += [f"K={self.num_kv_heads}", f"H={self.head_dim}"]
        if self.v_head_dim != self.head_dim:
            parts.append(f"Hv={self.v_head_dim}")
        if self.window is not None:
            parts.append(f"window={self.window}")
        return f"KVCache({', '.join(parts)}, {self.dtype})"

    @property
    def lengths(self) -> Integers:
        """Positions of each sequence, those that a ring has forgotten included: a copy, [B]."""
        return self._lengths.copy()

    @property
    def keys(self) -> Array:
        """The keys where they lie, [B, slots, K, H], read-only.

        Position j lies in slot ``j % slots``; there are `capacity` slots, or somewhat more in a
        ring. Slots not in use hold anything. Integers of int8 count in `key_scales`.
        """
        return _read_only(self._keys)

    @property
    def values(self) -> Array:
        """The values where they lie, [B, slots, K, Hv], read-only; as `keys`."""
        return _read_only(self._values)

    @property
    def key_scales(self) -> Array | None:
        """The factors of `keys` in int8, float32 [B, slots, K], read-only; None for others."""
        return None if self._key_scales is None else _read_only(self._key_scales)

    @property
    def value_scales(self) -> Array | None:
        """The factors of `values` in int8; as `key_scales`."""
        return None if self._value_scales is None else _read_only(self._value_scales)

    @property
    def nbytes(self) -> int:
        """Bytes that keys and values, with their scales, take when all slots are in use."""
        return sum(a.shape[0] * a.strides[0] for a in self._arrays())

    def append(
        self,
        k: ArrayLike,
        v: ArrayLike,
        seq_lengths: ArrayLike | None = None,
        *,
        num_threads: int | None = None,
    ) -> None:
        """Add positions at the end of the sequences: one, or a chunk.

        Parameters
        ----------
        k : array [B, T, K, H]
            Keys, of the cache's dtype, or float32 for a cache of float16 or bfloat16, to which
            they are rounded: what is beyond 65504 becomes infinite as float16. For a cache of int8
            they are float32, float16 or bfloat16.
        v : array [B, T, K, Hv]
            Values, likewise.
        seq_lengths : int array [B], optional
            Sequence b gets only the first ``seq_lengths[b]`` of the T positions.
        num_threads : int, optional
            For this call, by default `get_num_threads()`.

        Raises
        ------
        TypeError, ValueError
            For arrays that do not fit the cache, or if a sequence has not enough room left. No
            sequence has changed then.

        Examples
        --------
        >>> import numpy as np, tileattn
        >>> cache = tileattn.KVCache(batch=2, capacity=4, num_kv_heads=1, head_dim=8)
        >>> k = v = np.ones((2, 3, 1, 8), np.float32)
        >>> cache.append(k, v, seq_lengths=[3, 1])
        >>> cache.lengths
        array([3, 1])
        """
        k, v = self._check_input("k", k), self._check_input("v", v)
        B, K = self.batch, self.num_kv_heads
        if k.ndim != 4 or (k.shape[0], *k.shape[2:]) != (B, K, self.head_dim):
            raise ValueError(
                f"k must have the shape [B, T, K, H] = ({B}, T, {K}, {self.head_dim}), "
                f"not {k.shape}"
            )
        T = k.shape[1]
        if v.shape != (B, T, K, self.v_head_dim):
            raise ValueError(
                f"v must have the shape [B, T, K, Hv] = {(B, T, K, self.v_head_dim)}, not {v.shape}"
            )
        counts = check_lengths("seq_lengths", seq_lengths, B, T)
        threads = resolve_threads(num_threads)
        span = self._longer_span("k", T, counts)
        if counts is None:
            counts = np.full(B, T, np.int64)
        if T:
            self._write(
                span,
                _core.append,
                k,
                v,
                self._keys,
                self._values,
                self._key_scales,
                self._value_scales,
                self._lengths,
                counts,
                threads,
            )
        self._advance(span)

    @overload
    def attend(
        self,
        q: ArrayLike,
        *,
        scale: float | None = ...,
        softcap: float | None = ...,
        is_causal: bool = ...,
        local_window_size: Window = ...,
        query_seq_lengths: ArrayLike | None = ...,
        alibi_slopes: ArrayLike | None = ...,
        sinks: ArrayLike | None = ...,
        return_lse: Literal[False] = ...,
        arithmetic: Arithmetic | None = ...,
        out: Array | None = ...,
        num_threads: int | None = ...,
    ) -> Array: ...

    @overload
    def attend(
        self,
        q: ArrayLike,
        *,
        scale: float | None = ...,
        softcap: float | None = ...,
        is_causal: bool = ...,
        local_window_size: Window = ...,
        query_seq_lengths: ArrayLike | None = ...,
        alibi_slopes: ArrayLike | None = ...,
        sinks: ArrayLike | None = ...,
        return_lse: Literal[True],
        arithmetic: Arithmetic | None = ...,
        out: Array | None = ...,
        num_threads: int | None = ...,
    ) -> tuple[Array, Array]: ...

    @overload
    def attend(
        self,
        q: ArrayLike,
        *,
        scale: float | None = ...,
        softcap: float | None = ...,
        is_causal: bool = ...,
        local_window_size: Window = ...,
        query_seq_lengths: ArrayLike | None = ...,
        alibi_slopes: ArrayLike | None = ...,
        sinks: ArrayLike | None = ...,
        return_lse: bool,
        arithmetic: Arithmetic | None = ...,
        out: Array | None = ...,
        num_threads: int | None = ...,
    ) -> Array | tuple[Array, Array]: ...

    def attend(
        self,
        q: ArrayLike,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        is_causal: bool = True,
        local_window_size: Window = None,
        query_seq_lengths: ArrayLike | None = None,
        alibi_slopes: ArrayLike | None = None,
        sinks: ArrayLike | None = None,
        return_lse: bool = False,
        arithmetic: Arithmetic | None = None,
        out: Array | None = None,
        num_threads: int | None = None,
    ) -> Array | tuple[Array, Array]:
        """Attention of the latest T positions to all that the cache holds.

        Parameters
        ----------
        q : array [B, T, N, H]
            Queries of the T positions appended last, so that the last row of q stands at position
            ``lengths - 1``; of a dtype that `append` takes.
        scale, softcap
            As in `dot_product_attention`.
        is_causal : bool, optional
            Each position sees itself and those before it; otherwise all.
        local_window_size : int or (left, right), optional
            As in `dot_product_attention`, within the `window` of the cache.
        query_seq_lengths : int array [B], optional
            In sequence b the first ``query_seq_lengths[b]`` rows are the positions appended last;
            the others give zeros and an LSE of -inf.
        alibi_slopes, sinks, return_lse, arithmetic, out, num_threads
            As in `dot_product_attention`.

        Returns
        -------
        out : array [B, T, N, Hv]
            Of q's dtype.
        lse : array [B, T, N], only with `return_lse`

        Raises
        ------
        TypeError, ValueError
            As `dot_product_attention`; also for more queries than positions, unless no option asks
            where they stand, and for positions whose window a ring has overwritten.

        Examples
        --------
        >>> import numpy as np, tileattn
        >>> cache = tileattn.KVCache(1, 16, num_kv_heads=2, head_dim=8, dtype="float16")
        >>> cache.append(np.ones((1, 4, 2, 8), np.float32), np.ones((1, 4, 2, 8), np.float32))
        >>> y, lse = cache.attend(np.ones((1, 1, 6, 8), np.float32), return_lse=True)
        >>> y.shape, y.dtype, lse.shape
        ((1, 1, 6, 8), dtype('float32'), (1, 1, 6))
        """
        checked_arithmetic = check_arithmetic(arithmetic)
        q = self._check_input("q", q)
        B, K, H = self.batch, self.num_kv_heads, self.head_dim
        if q.ndim != 4 or (q.shape[0], q.shape[3]) != (B, H):
            raise ValueError(
                f"q must have the shape [B, T, N, H] = ({B}, T, N, {H}), not {q.shape}"
            )
        _, T, N, _ = q.shape
        if N % K != 0:
            raise ValueError(
                f"q has N = {N} heads, which must be a multiple of the cache's K = {K}"
            )
        target = None
        if out is not None:
            shape = (B, T, N, self.v_head_dim)
            target = check_out(out, shape, q.dtype, q=q, **self._named_arrays())
        is_causal = check_flag("is_causal", is_causal)
        counts = check_lengths("query_seq_lengths", query_seq_lengths, B, T)
        scores = check_scores(
            B, N, H, q.dtype, scale=scale, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks
        )
        return_lse = check_flag("return_lse", return_lse)
        threads = resolve_threads(num_threads)
        window = check_window(local_window_size)
        offset = self._lengths - (T if counts is None else counts)
        if is_causal or window is not None or alibi_slopes is not None or self.window:
            self._check_positions(offset)
        keys, values = self._keys, self._values
        if self.window is None:
            used = bounds(self._lengths)[1]
            keys, values = keys[:, :used], values[:, :used]
        visibility = self._see(is_causal, offset, counts, self._lengths, window)
        arguments = AttentionArguments(
            q,
            keys,
            values,
            (B, T, N, H, keys.shape[1], K, self.v_head_dim),
            True,
            scores,
            visibility,
            checked_arithmetic,
            target,
            self._key_scales,
            self._value_scales,
        )
        y, lse = attend(arguments, return_lse, threads, is_ring=self.window is not None)
        y = y if out is None else out
        return y if lse is None else (y, lse)

    def reset(self) -> None:
        """Forget all positions.

        Examples
        --------
        >>> import tileattn
        >>> cache = tileattn.KVCache(batch=2, capacity=4, num_kv_heads=1, head_dim=8)
        >>> cache.reset()
        >>> cache.lengths
        array([0, 0])
        """
        self.truncate(0)

    def truncate(self, lengths: ArrayLike) -> None:
        """Forget the positions from `lengths` on: a draft that was refused, or a whole sequence.

        Parameters
        ----------
        lengths : int or int array [B]
            What is left of each sequence, at most what it has.

        Raises
        ------
        TypeError, ValueError
            For other lengths, or if a ring has overwritten what the window of the next position
            would see. Nothing has changed then.

        Examples
        --------
        >>> import numpy as np, tileattn
        >>> cache = tileattn.KVCache(batch=2, capacity=4, num_kv_heads=1, head_dim=8)
        >>> cache.append(np.ones((2, 3, 1, 8), np.float32), np.ones((2, 3, 1, 8), np.float32))
        >>> cache.truncate([2, 0])
        >>> cache.lengths
        array([2, 0])
        """
        left = check_integers("lengths", lengths, self.batch, scalar=True)
        wrong = (left < 0) | (left > self._lengths)
        if wrong.any():
            b = int(wrong.argmax())
            raise ValueError(
                f"lengths must lie between 0 and what each sequence has, got {left[b]} for "
                f"sequence {b}, which has {self._lengths[b]}"
            )
        longest = self._longest
        if self.window is not None:
            cut = (left > 0) & (left < self._lengths)
            lost = self._first_lost(np.where(cut, left, longest))  # behind all nothing is lost
            if lost is not None:
                raise ValueError(
                    f"lengths cuts sequence {lost} to {left[lost]} positions, but only those from "
                    f"{self._oldest[lost]} on are left, and the next one sees {self.window}"
                )
            longest = np.where(left == 0, 0, longest)
        self._set(left, longest)

    def reorder(self, index: ArrayLike) -> None:
        """Let sequence b go on from what sequence ``index[b]`` was, as a beam search does.

        Only positions in use are copied, and at most one sequence a second time. An interrupt
        leaves sequences empty that were to change.

        Parameters
        ----------
        index : int array [B]
            Sequences; any of them several times or not at all.

        Raises
        ------
        TypeError, ValueError
            For other integers. Nothing has changed then.

        Examples
        --------
        >>> import numpy as np, tileattn
        >>> cache = tileattn.KVCache(batch=3, capacity=4, num_kv_heads=1, head_dim=8)
        >>> k = v = np.ones((3, 2, 1, 8), np.float32)
        >>> cache.append(k, v, seq_lengths=[0, 1, 2])
        >>> cache.reorder([2, 2, 1])
        >>> cache.lengths
        array([2, 2, 1])
        """
        source = check_integers("index", index, self.batch, scalar=False)
        if source.min() < 0 or source.max() >= self.batch:
            last = self.batch - 1
            wrong = first_outside(source, 0, last)
            raise ValueError(f"index must lie between 0 and B - 1 = {last}, got {wrong}")
        # What still has to move, and how often each sequence is still to be read.
        moves = {b: int(a) for b, a in enumerate(source) if a != b}
        readers = np.bincount(list(moves.values()), minlength=self.batch)
        free = [b for b in moves if readers[b] == 0]
        steps: list[tuple[int, int]] = []
        while moves:
            if not free:  # only cycles are left: one sequence steps aside
                b = next(iter(moves))
                steps.append((ASIDE, b))
                moves[next(to for to, a in moves.items() if a == b)] = ASIDE
                free.append(b)
            b = free.pop()
            a = moves.pop(b)
            steps.append((b, a))
            if a != ASIDE:
                readers[a] -= 1
                if readers[a] == 0 and a in moves:
                    free.append(a)
        arrays = self._arrays()
        lengths, longest = self._lengths[source], self._longest[source]
        used = [int(self._lengths[a] if b == ASIDE else lengths[b]) for b, a in steps]
        room = max((n for n, (b, _) in zip(used, steps, strict=True) if b == ASIDE), default=0)
        aside = [np.empty_like(x[0, :room]) for x in arrays]
        left = self._lengths.copy()
        left[[b for b, _ in steps if b != ASIDE]] = 0
        self._lengths = left
        for n, (b, a) in zip(used, steps, strict=True):
            for x, kept in zip(arrays, aside, strict=True):
                target, origin = (kept if i == ASIDE else x[i] for i in (b, a))
                target[:n] = origin[:n]
        # Should something come in between, a ring has rather lost more than less.
        self._longest = np.maximum(self._longest, longest)
        self._lengths = lengths
        self._longest = longest

    def _check_positions(self, offset: Integers) -> None:
        if bounds(offset)[0] < 0:
            b = int((offset < 0).argmax())
            raise ValueError(
                f"q has {self._lengths[b] - offset[b]} queries for sequence {b}, which has "
                f"{self._lengths[b]} positions: append their keys first"
            )
        if self.window is None:
            return
        lost = self._first_lost(offset)
        if lost is not None:
            raise ValueError(
                f"q has {self._lengths[lost] - offset[lost]} queries for sequence {lost}, of which "
                f"the first sees {self.window} positions up to {offset[lost]}, but only those from "
                f"{self._oldest[lost]} on are left"
            )

    def _check_input(self, name: str, value: ArrayLike) -> Array:
        array = check_array(name, value, halves=True)
        allowed = dict.fromkeys((self.dtype, arithmetic_type(self.dtype)))
        if array.dtype in allowed or (self.dtype == INT8 and is_half(array.dtype)):
            return array
        types = ("float32", *HALF_TYPES) if self.dtype == INT8 else map(str, allowed)
        expected = " or ".join(types)
        raise TypeError(
            f"{name} has dtype {array.dtype}, expected {expected}; convert it with .astype"
        )


def _check_size(name: str, value: Any) -> int:
    number = check_int(name, value)
    if not 1 <= number <= POSITION_LIMIT:
        raise ValueError(f"{name} must lie between 1 and 2**53, got {number}")
    return number


def _check_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    if isinstance(dtype, str) and dtype == "bfloat16":
        dtype = bfloat16_type("dtype 'bfloat16'")
    allowed = "int8, float16, bfloat16, float32 or float64"
    try:
        native = np.dtype(dtype).newbyteorder("=")
    except (TypeError, ValueError):  # the latter for text that is none, and impossible offsets
        raise TypeError(f"dtype must be {allowed}, not {dtype!r}") from None
    if native not in (*FLOAT_TYPES, INT8) and not is_half(native):
        raise TypeError(f"dtype must be {allowed}, not {native}")
    return native


def _read_only(array: Array) -> Array:
    view = array.view()
    view.flags.writeable = False
    return view
