"""Attention as a function of q, k and v."""

from __future__ import annotations

from typing import Literal, overload

import numpy as np

from tileattn import _core
from tileattn._arguments import (
    Arithmetic,
    AttentionArguments,
    check_attention,
    check_attention_weights,
    check_states,
    check_varlen,
)
from tileattn._scores import Window
from tileattn._values import Array, ArrayLike, arithmetic_type, check_flag
from tileattn.config import resolve_threads


@overload
def dot_product_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    is_causal: bool = ...,
    query_offset: ArrayLike | None = ...,
    local_window_size: Window = ...,
    query_seq_lengths: ArrayLike | None = ...,
    key_value_seq_lengths: ArrayLike | None = ...,
    alibi_slopes: ArrayLike | None = ...,
    sinks: ArrayLike | None = ...,
    return_lse: Literal[False] = ...,
    arithmetic: Arithmetic | None = ...,
    out: Array | None = ...,
    num_threads: int | None = ...,
) -> Array: ...


@overload
def dot_product_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    is_causal: bool = ...,
    query_offset: ArrayLike | None = ...,
    local_window_size: Window = ...,
    query_seq_lengths: ArrayLike | None = ...,
    key_value_seq_lengths: ArrayLike | None = ...,
    alibi_slopes: ArrayLike | None = ...,
    sinks: ArrayLike | None = ...,
    return_lse: Literal[True],
    arithmetic: Arithmetic | None = ...,
    out: Array | None = ...,
    num_threads: int | None = ...,
) -> tuple[Array, Array]: ...


@overload
def dot_product_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    is_causal: bool = ...,
    query_offset: ArrayLike | None = ...,
    local_window_size: Window = ...,
    query_seq_lengths: ArrayLike | None = ...,
    key_value_seq_lengths: ArrayLike | None = ...,
    alibi_slopes: ArrayLike | None = ...,
    sinks: ArrayLike | None = ...,
    return_lse: bool,
    arithmetic: Arithmetic | None = ...,
    out: Array | None = ...,
    num_threads: int | None = ...,
) -> Array | tuple[Array, Array]: ...


def dot_product_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    is_causal: bool = False,
    query_offset: ArrayLike | None = None,
    local_window_size: Window = None,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    return_lse: bool = False,
    arithmetic: Arithmetic | None = None,
    out: Array | None = None,
    num_threads: int | None = None,
) -> Array | tuple[Array, Array]:
    """Exact attention ``softmax(scale * q k^T + bias) v``, without a T x S matrix of scores.

    Query head n uses key/value head ``n // (N / K)``. Working memory is a megabyte or so a thread,
    whatever T and S are; `explain` says how much.

    Parameters
    ----------
    q : array [B, T, N, H] or [T, N, H], float32, float64, float16 or bfloat16
        Queries. Any strides, read-only too. float16 and bfloat16 (of ml_dtypes) are computed in
        float32, or bfloat16 in dot products where the CPU has them (see Notes).
    k : array [B, S, K, H] or [S, K, H], of q's dtype
        Keys; K divides N.
    v : array [B, S, K, Hv] or [S, K, Hv], of q's dtype
        Values; Hv may differ from H.
    bias : floating array that broadcasts to [B, N, T, S], optional
        Added to the scores after `scale` and `softcap`, of any floating dtype; -inf hides the key.
        It is read as it lies, never expanded. [N, T, S] if q has no B axis.
    mask : bool array that broadcasts to [B, N, T, S], optional
        True where a query may attend to a key; what else hides keys still does. It is read as it
        lies, never expanded. [N, T, S] if q has no B axis.
    scale : float, optional
        Factor of the scores, by default ``1 / sqrt(H)``.
    softcap : float, optional
        A positive c turns each scaled score s into ``c * tanh(s / c)``.
    is_causal : bool, optional
        Query row t sees only the keys ``j <= t + query_offset``.
    query_offset : int or int array [B], optional
        Absolute position of query row 0. By default 0; required with `is_causal`,
        `local_window_size` and `alibi_slopes` where T differs from S: 0 aligns the first query with
        the first key, S - T the last with the last.
    local_window_size : int or (left, right), optional
        Query row t sees only the keys from ``t + query_offset - left`` to ``t + query_offset +
        right``, both included: (0, 0) is itself only. One int stands for both sides, None for no
        bound on a side.
    query_seq_lengths : int array [B], optional
        Rows ``t >= query_seq_lengths[b]`` give zeros and an LSE of -inf.
    key_value_seq_lengths : int array [B], optional
        Keys ``j >= key_value_seq_lengths[b]`` are not seen, whatever they hold.
    alibi_slopes : floating array [N] or [B, N], optional
        Adds ``-slope * |t + query_offset - j|`` to the scores.
    sinks : floating array [N], optional
        One more score for each head, that counts in the softmax's denominator and has no value;
        -inf for none. It is part of the LSE.
    return_lse : bool, optional
        Also return the natural logarithm of the softmax's denominator.
    arithmetic : "float32" or None, optional
        "float32" computes bfloat16 in float32, too, where it would be multiplied in dot products.
    out : array [B, T, N, Hv], optional
        Where to put the result: q's dtype, or float32 for float16 and bfloat16; any strides, no
        overlap with an input or itself.
    num_threads : int, optional
        For this call, by default `get_num_threads()`.

    Returns
    -------
    out : array [B, T, N, Hv], or [T, N, Hv] if the inputs have no B axis
        Of q's dtype. A row that sees no key is zero.
    lse : array [B, T, N], only with `return_lse`
        Of float64 for float64, else float32. A row that sees no key has -inf, or its head's sink.

    Raises
    ------
    TypeError
        For a dtype other than these, or different ones, for masked arrays, a mask that is not
        boolean, a bias that is not floating, and options of another type.
    ValueError
        For shapes, lengths or an `out` that do not fit, a query position that is not known, or
        numbers outside of their range. Nothing has been written then.

    Notes
    -----
    The same inputs give the same bits whatever the number of threads and whatever else is in the
    batch. The softmax is computed online, block by block of keys [1]_.

    On CPUs with AMX or AVX512_BF16, q, k and v of bfloat16 are multiplied in the CPU's bfloat16
    dot products: their products are exact and summed up in float32, the softmax is float32's, and
    its weights are rounded to bfloat16 before they meet the values. That moves a result by up to
    2^-8 of the mean size of its values, as storing it in bfloat16 does. Denormal numbers count as
    zeros there, and `scale` comes after q.k, which overflows beyond 3e38. `explain` says which
    arithmetic a call gets, and `arithmetic` asks for float32's.

    References
    ----------
    .. [1] M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax", 2018.

    Examples
    --------
    >>> import numpy as np, tileattn
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((1, 5, 4, 8), dtype=np.float32)
    >>> k, v = rng.standard_normal((2, 1, 5, 2, 8), dtype=np.float32)
    >>> tileattn.dot_product_attention(q, k, v, is_causal=True).shape
    (1, 5, 4, 8)
    """
    a = check_attention(
        q,
        k,
        v,
        bias=bias,
        mask=mask,
        scale=scale,
        softcap=softcap,
        is_causal=is_causal,
        query_offset=query_offset,
        local_window_size=local_window_size,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        arithmetic=arithmetic,
        out=out,
    )
    return_lse = check_flag("return_lse", return_lse)
    threads = resolve_threads(num_threads)
    result, lse = attend(a, return_lse, threads)
    if out is not None:
        result = out
    elif not a.has_batch:
        result = result[0]
    if lse is None:
        return result
    return result, lse if a.has_batch else lse[0]


def attend(
    a: AttentionArguments, return_lse: bool, threads: int, *, is_ring: bool = False
) -> tuple[Array, Array | None]:
    """What checked arguments give, and its LSE if wanted."""
    B, T, N, _, _, _, Hv = a.sizes
    out = a.out
    if out is None:
        out = np.empty((B, T, N, Hv), a.q.dtype)
    lse = np.empty((B, T, N), arithmetic_type(a.q.dtype)) if return_lse else None
    _core.attention(
        a.q,
        a.k,
        a.v,
        out,
        lse,
        a.scores,
        a.visibility,
        threads,
        sizes=a.sizes,
        ring=is_ring,
        float32=a.arithmetic == "float32",
        k_scales=a.k_scales,
        v_scales=a.v_scales,
    )
    return out, lse


@overload
def varlen_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    scale: float | None = ...,
    softcap: float | None = ...,
    is_causal: bool = ...,
    query_offset: ArrayLike | None = ...,
    local_window_size: Window = ...,
    alibi_slopes: ArrayLike | None = ...,
    sinks: ArrayLike | None = ...,
    return_lse: Literal[False] = ...,
    arithmetic: Arithmetic | None = ...,
    out: Array | None = ...,
    num_threads: int | None = ...,
) -> Array: ...


@overload
def varlen_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    scale: float | None = ...,
    softcap: float | None = ...,
    is_causal: bool = ...,
    query_offset: ArrayLike | None = ...,
    local_window_size: Window = ...,
    alibi_slopes: ArrayLike | None = ...,
    sinks: ArrayLike | None = ...,
    return_lse: Literal[True],
    arithmetic: Arithmetic | None = ...,
    out: Array | None = ...,
    num_threads: int | None = ...,
) -> tuple[Array, Array]: ...


@overload
def varlen_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    scale: float | None = ...,
    softcap: float | None = ...,
    is_causal: bool = ...,
    query_offset: ArrayLike | None = ...,
    local_window_size: Window = ...,
    alibi_slopes: ArrayLike | None = ...,
    sinks: ArrayLike | None = ...,
    return_lse: bool,
    arithmetic: Arithmetic | None = ...,
    out: Array | None = ...,
    num_threads: int | None = ...,
) -> Array | tuple[Array, Array]: ...


def varlen_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    is_causal: bool = False,
    query_offset: ArrayLike | None = None,
    local_window_size: Window = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    return_lse: bool = False,
    arithmetic: Arithmetic | None = None,
    out: Array | None = None,
    num_threads: int | None = None,
) -> Array | tuple[Array, Array]:
    """Attention of sequences of several lengths, packed one after the other without padding.

    Parameters
    ----------
    q : array [total_q, N, H], float32, float64, float16 or bfloat16
        Queries of all sequences. Any strides, read-only too.
    k, v : array [total_k, K, H] and [total_k, K, Hv], of q's dtype
        Keys and values of all sequences.
    cu_seqlens_q, cu_seqlens_k : int array [B + 1]
        Sequence b has the queries from ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]``, and the keys
        likewise. The first is 0, the last the total; sequences may be empty.
    scale, softcap, is_causal
        As in `dot_product_attention`, in each sequence.
    query_offset : int or int array [B], optional
        Absolute position of each sequence's first query among its keys. By default 0; required with
        `is_causal`, `local_window_size` and `alibi_slopes` where a sequence has not as many queries
        as keys.
    local_window_size, alibi_slopes, sinks
        As in `dot_product_attention`, in each sequence.
    return_lse : bool, optional
        Also return the natural logarithm of the softmax's denominator.
    arithmetic
        As in `dot_product_attention`.
    out : array [total_q, N, Hv], optional
        Where to put the result, as in `dot_product_attention`.
    num_threads : int, optional
        For this call, by default `get_num_threads()`.

    Returns
    -------
    out : array [total_q, N, Hv]
        Of q's dtype. A row that sees no key is zero.
    lse : array [total_q, N], only with `return_lse`
        Of float64 for float64, else float32. A row that sees no key has -inf, or its head's sink.

    Raises
    ------
    TypeError, ValueError
        As `dot_product_attention`; also for starts that decrease or do not span the arrays.

    Notes
    -----
    Each sequence gets the bits that `dot_product_attention` gives it alone.

    Examples
    --------
    Sequences of 2, 0 and 3 positions:

    >>> import numpy as np, tileattn
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 5, 2, 8), dtype=np.float32)
    >>> starts = [0, 2, 2, 5]
    >>> y = tileattn.varlen_attention(q, k, v, starts, starts, is_causal=True)
    >>> last = tileattn.dot_product_attention(q[2:], k[2:], v[2:], is_causal=True)
    >>> np.array_equal(y[2:], last)
    True
    """
    a = check_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        scale=scale,
        softcap=softcap,
        is_causal=is_causal,
        query_offset=query_offset,
        local_window_size=local_window_size,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        arithmetic=arithmetic,
        out=out,
    )
    return_lse = check_flag("return_lse", return_lse)
    threads = resolve_threads(num_threads)
    total, N, _ = a.q.shape
    result = a.out
    if result is None:
        result = np.empty((total, N, a.v.shape[2]), a.q.dtype)
    lse = np.empty((total, N), arithmetic_type(a.q.dtype)) if return_lse else None
    _core.attention(
        a.q[None],
        a.k[None],
        a.v[None],
        result[None],
        None if lse is None else lse[None],
        a.scores,
        a.visibility,
        threads,
        a.query_starts,
        a.key_starts,
        float32=a.arithmetic == "float32",
    )
    if out is not None:
        result = out
    return result if lse is None else (result, lse)


def merge_states(
    out_a: ArrayLike,
    lse_a: ArrayLike,
    out_b: ArrayLike,
    lse_b: ArrayLike,
    *more: ArrayLike,
    num_threads: int | None = None,
) -> tuple[Array, Array]:
    """Merge attention over parts of the keys into attention over all of them.

    Parameters
    ----------
    out_a, lse_a, out_b, lse_b : arrays [..., Hv], [...], [..., Hv], [...]
        Attention over two parts of the keys, float32, float64, float16 or bfloat16 of any strides,
        each with its log-sum-exp, float64 for float64, else float32. A row with an LSE of -inf has
        seen nothing, and its out is not looked at.
    *more
        Further parts: out, lse, out, lse, ... All are read once.
    num_threads : int, optional
        For this call, by default `get_num_threads()`.

    Returns
    -------
    out : array [..., Hv]
        Of out_a's dtype. Zero where no part has seen anything.
    lse : array [...]
        Of lse_a's dtype; -inf there.

    Raises
    ------
    TypeError, ValueError
        Where dtypes or shapes do not fit together, and for an odd number of arrays.

    Notes
    -----
    A sink is part of the LSE: give it to the call for one part only, or it counts several times.

    Examples
    --------
    >>> import numpy as np, tileattn
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 9, 2, 8), dtype=np.float32)
    >>> def part(keys):
    ...     return tileattn.dot_product_attention(q, k[:, keys], v[:, keys], return_lse=True)
    >>> out, lse = tileattn.merge_states(*part(slice(5)), *part(slice(5, None)))
    >>> np.allclose(out, tileattn.dot_product_attention(q, k, v), atol=1e-6)
    True
    """
    parts = check_states(out_a, lse_a, out_b, lse_b, more)
    threads = resolve_threads(num_threads)
    dtype, lse_dtype = (array.dtype for array in parts[0])
    out, lse = np.empty(parts[0][0].shape, dtype), np.empty(parts[0][1].shape, lse_dtype)
    _merge([part for part, _ in parts], [part for _, part in parts], out, lse, threads)
    return out, lse


def _merge(outs: list[Array], lses: list[Array], out: Array, lse: Array, threads: int) -> None:
    """The loops have three axes of rows: contiguous ones become one, more are taken apart."""
    if all(array.flags.c_contiguous for array in (*outs, *lses)):
        rows = (1, 1, lse.size)
        outs = [array.reshape(*rows, out.shape[-1]) for array in outs]
        lses = [array.reshape(rows) for array in lses]
        out, lse = out.reshape(*rows, out.shape[-1]), lse.reshape(rows)
    elif out.ndim > 4:
        for i in range(len(out)):
            _merge([y[i] for y in outs], [x[i] for x in lses], out[i], lse[i], threads)
        return
    else:
        missing = (None,) * (4 - out.ndim)
        outs, lses = [array[missing] for array in outs], [array[missing] for array in lses]
    _core.merge_states(outs, lses, out, lse, threads)


def attention_weights(
    q: ArrayLike,
    k: ArrayLike,
    lse: ArrayLike,
    *,
    rows: ArrayLike | None = None,
    reduce: Literal["queries", "keys"] | None = None,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    is_causal: bool = False,
    query_offset: ArrayLike | None = None,
    local_window_size: Window = None,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    out: Array | None = None,
    num_threads: int | None = None,
) -> Array:
    """The weights ``exp(score - lse)`` that attention gives to its values.

    All of them are as many as there are scores. Of chosen rows they are few; and sums over the
    queries (which keys matter) or over the keys are made without holding them.

    Parameters
    ----------
    q : array [B, T, N, H] or [T, N, H], float32, float64, float16 or bfloat16
        Queries. Any strides, read-only too.
    k : array [B, S, K, H] or [S, K, H], of q's dtype
        Keys; K divides N.
    lse : array [B, T, N] or [T, N], float64 for float64, else float32
        What attention with the same options returned. It holds the sinks, if any, which are no
        option here. A row with -inf gives zeros.
    rows : int array [R], optional
        Only the weights of these queries, in this order; one may come several times.
    reduce : "queries" or "keys", optional
        Sum over the queries, those of `rows` if given, or over the keys.
    bias, mask, scale, softcap, is_causal, query_offset, local_window_size
        As in `dot_product_attention`.
    query_seq_lengths, key_value_seq_lengths, alibi_slopes
        As in `dot_product_attention`.
    out : array of the result's shape and dtype, optional
        Where to put the result; any strides, no overlap with an input or itself.
    num_threads : int, optional
        For this call, by default `get_num_threads()`.

    Returns
    -------
    array [B, N, T, S], [B, N, S] if reduced over the queries, [B, N, T] if reduced over the keys
        Of lse's dtype; R instead of T with `rows`, and no B axis if q has none. Zero where a key is
        not seen.

    Raises
    ------
    TypeError, ValueError
        As `dot_product_attention`; also for an `lse`, `rows` or `reduce` that does not fit.

    Notes
    -----
    The weights of a row are the same bits whichever rows are asked for, and sums are added in an
    order that no number of threads changes.

    Examples
    --------
    How much all queries together look at each key, head by head:

    >>> import numpy as np, tileattn
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 9, 2, 8), dtype=np.float32)
    >>> _, lse = tileattn.dot_product_attention(q, k, v, is_causal=True, return_lse=True)
    >>> weights = tileattn.attention_weights(q, k, lse, reduce="queries", is_causal=True)
    >>> weights.shape
    (1, 2, 9)
    >>> np.allclose(weights.sum(axis=-1), 9)
    True
    """
    a = check_attention_weights(
        q,
        k,
        lse,
        rows=rows,
        reduce=reduce,
        bias=bias,
        mask=mask,
        scale=scale,
        softcap=softcap,
        is_causal=is_causal,
        query_offset=query_offset,
        local_window_size=local_window_size,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        alibi_slopes=alibi_slopes,
        out=out,
    )
    threads = resolve_threads(num_threads)
    q, lse = (a.q, a.lse) if a.rows is None else (a.q[:, a.rows], a.lse[:, a.rows])
    (B, T, N, _), S = q.shape, a.k.shape[1]
    result = a.out
    if result is None:
        shapes = {None: (B, N, T, S), "queries": (B, N, S), "keys": (B, N, T)}
        result = np.empty(shapes[a.reduce], lse.dtype)
    _core.attention_weights(q, a.k, lse, result, a.scores, a.visibility, a.rows, a.reduce, threads)
    if out is not None:
        return out
    return result if a.has_batch else result[0]
