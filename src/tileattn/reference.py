"""The attention block in plain NumPy: the oracle of the tests, and the definition in code.

`dot_product_attention`, `attention_block` and `apply_rope` stand here once more, with the same
arguments and the same checks, written to be read; `layer_norm` and `rms_norm` are a LayerNorm and
an RMSNorm made and called in one. There are no classes here: an AttentionBlock's arguments and
those of its call go to `attention_block`. Attention of packed sequences, the merging of results and
the weights themselves stand beside them.

All arithmetic is float64, whatever comes in; the result has the dtype of the input. So float64
inputs give the oracle, and other inputs give the oracle rounded once.

Nothing here is fast, though it is sparing: float64 copies are made for one sequence and one
key/value head at a time, and scores for a block of query rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar, cast

import numpy as np
import numpy.typing as npt

from tileattn import attention
from tileattn._arguments import (
    Arithmetic,
    BlockArithmetic,
    CacheSpan,
    HeadMatrix,
    NormParameters,
    NormPosition,
    Weight,
    check_attention,
    check_attention_weights,
    check_block_inputs,
    check_block_weights,
    check_norm_inputs,
    check_rope_inputs,
    check_states,
    check_varlen,
)
from tileattn._core import Scores, Visibility
from tileattn._scores import Window, check_bias, check_mask, check_window, largest_score
from tileattn._values import (
    Array,
    ArrayLike,
    Bool,
    Integers,
    arithmetic_type,
    as_array,
    check_flag,
    check_integers,
)
from tileattn.block import DEFAULT_NORM, LayerNorm, RMSNorm
from tileattn.cache import KVCache
from tileattn.config import resolve_threads
from tileattn.quantized import WeightDtype, convert_weights
from tileattn.rope import Rope, RopeScaling

__all__ = [
    "apply_rope",
    "attention_block",
    "attention_weights",
    "dot_product_attention",
    "layer_norm",
    "merge_states",
    "rms_norm",
    "varlen_attention",
    "visible",
]

Float64 = npt.NDArray[np.float64]

Function = TypeVar("Function", bound=Callable[..., Any])

#: Scores held at once: 1 Mi float64 of them are 8 MiB, small beside the arrays worth a loop.
SCORES_AT_ONCE = 1 << 20

#: Of a row of int8: a smaller one would be subnormal, and 127 times a larger one infinite.
SMALLEST_SCALE, LARGEST_SCALE = np.float32(2.0**-126), np.float32(8454659 * 2.0**98)


def visible(
    B: int,
    T: int,
    S: int,
    *,
    is_causal: bool = False,
    query_offset: ArrayLike | None = None,
    query_lengths: ArrayLike | None = None,
    key_value_lengths: ArrayLike | None = None,
    local_window_size: Window = None,
    mask: ArrayLike | None = None,
    bias: ArrayLike | None = None,
) -> Bool:
    """Say which query sees which key.

    Parameters
    ----------
    B, T, S : int
        Batch, query positions, key positions.
    is_causal : bool
        Query t stands at position t + query_offset and sees keys j <= that position only.
    query_offset : int or int[B], optional
        0 where not given. It means nothing without `is_causal` and `local_window_size`.
    query_lengths : int or int[B], optional
        Queries at or beyond the length see nothing.
    key_value_lengths : int or int[B], optional
        Keys at or beyond the length are seen by nobody.
    local_window_size : int or (left, right), optional
        Query t sees that many keys before its position and behind it, and the one there. One int
        stands for both sides; None bounds nothing.
    mask : bool[B,N,T,S], optional
        Query t of head n sees only what is True here. Axes may be 1 or missing in front.
    bias : floating [B,N,T,S], optional
        -inf hides a key. Axes may be 1 or missing in front.

    Returns
    -------
    bool[B,T,S], or bool[B,N,T,S] where `mask` or `bias` is given
        True where query t of sequence b (and head n) sees key j. N is 1 if all heads see the same.

    Raises
    ------
    TypeError, ValueError
        For what `dot_product_attention` refuses of these.

    Examples
    --------
    >>> visible(1, 2, 4, is_causal=True, query_offset=1).astype(int)
    array([[[1, 1, 0, 0],
            [1, 1, 1, 0]]])
    """
    t, j = np.arange(T)[:, None], np.arange(S)
    left, right = check_window(local_window_size) or (-1, -1)
    sees = np.ones((B, T, S), dtype=bool)

    def per_sequence(name: str, value: ArrayLike) -> Array:
        return check_integers(name, value, B, scalar=True)[:, None, None]

    # Not j <= t + offset and the like: that sum could overflow.
    offset = per_sequence("query_offset", 0 if query_offset is None else query_offset)
    if is_causal:
        sees &= j - t <= offset
    if left >= 0:
        sees &= j - t + left >= offset
    if right >= 0:
        sees &= j - t - right <= offset
    if query_lengths is not None:
        sees &= t < per_sequence("query_lengths", query_lengths)
    if key_value_lengths is not None:
        sees &= j < per_sequence("key_value_lengths", key_value_lengths)
    if mask is None and bias is None:
        return sees
    mask = None if mask is None else as_array("mask", mask)
    bias = None if bias is None else as_array("bias", bias)
    N = max(a.shape[-3] if a.ndim > 2 else 1 for a in (mask, bias) if a is not None)
    mask, bias = check_mask(mask, (B, N, T, S)), check_bias(bias, (B, N, T, S))
    sees = np.broadcast_to(sees[:, None], (B, N, T, S))
    if mask is not None:
        sees = sees & mask
    if bias is not None:
        sees = sees & (bias != -np.inf)
    return sees


def _typed_as(_: Function) -> Callable[[Callable[..., Any]], Function]:
    """Gives a function the type of that one, which has the same arguments, overloads and all."""
    return lambda function: cast(Function, function)


@_typed_as(attention.dot_product_attention)
@np.errstate(all="ignore")
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
    """Compute softmax(scale * q k^T + bias) v in float64.

    Parameters
    ----------
    q : float32, float64, float16 or bfloat16 [B,T,N,H]
        Queries.
    k : [B,S,K,H], of the same dtype
        Keys. Query head n uses key/value head n // (N / K).
    v : [B,S,K,Hv], of the same dtype
        Values. q, k and v may all lack the B axis.
    bias : floating, broadcasts to [B,N,T,S], optional
        Added to the scores after scale and softcap. -inf hides a key.
    mask : bool, broadcasts to [B,N,T,S], optional
        Query t of head n sees only what is True here.
    scale : float, optional
        1 / sqrt(H) where not given.
    softcap : float, optional
        A positive c turns a scaled score s into c * tanh(s / c).
    is_causal : bool
        Query t sees keys j <= t + query_offset only.
    query_offset : int or int[B], optional
        Position of the first query; needed where T != S and a position means something: with
        `is_causal`, `local_window_size` or `alibi_slopes`.
    local_window_size : int or (left, right), optional
        Query t sees that many keys before its position and behind it, and the one there.
    query_seq_lengths, key_value_seq_lengths : int[B], optional
        Queries at or beyond the length see nothing; keys at or beyond it are seen by nobody.
    alibi_slopes : floating [N] or [B,N], optional
        Adds ``-slope * |t + query_offset - j|`` to the scores.
    sinks : floating [N], optional
        A score of each head's own in the denominator.
    return_lse : bool
        Also return the log-sum-exp of each row's scores and its sink.
    arithmetic : "float32" or None, optional
        Accepted, too; here it is always float64.
    out : array [B,T,N,Hv] of q's dtype, optional
        Filled, once everything is computed, and returned; float32 for float16 and bfloat16 too.
    num_threads : int, optional
        Accepted so that the signature is that of `tileattn.dot_product_attention`; NumPy decides.

    Returns
    -------
    out : [B,T,N,Hv] of q's dtype
        Zeros in rows that see nothing.
    lse : [B,T,N] of float64 for float64, else float32
        Only with `return_lse`. Rows that see nothing have their sink here, -inf without one or
        beyond `query_seq_lengths`.

    Raises
    ------
    TypeError, ValueError
        As `tileattn.dot_product_attention`, which shares these checks.

    Examples
    --------
    >>> q = np.ones((1, 2, 2, 8))
    >>> k, v = np.ones((1, 2, 1, 8)), np.array([2.0, 4.0]).reshape(1, 2, 1, 1)
    >>> dot_product_attention(q, k, v, is_causal=True)[..., 0]
    array([[[2., 2.],
            [3., 3.]]])
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
    resolve_threads(num_threads)
    B, T, N, _ = a.q.shape
    y_BTNH = np.empty((B, T, N, a.v.shape[-1]), dtype=a.q.dtype if out is None else out.dtype)
    lse_BTN = np.empty((B, T, N), dtype=arithmetic_type(a.q.dtype))
    for b in range(B):
        y_BTNH[b], lse_TN = _attend(a.q[b], a.k[b], a.v[b], a.scores, a.visibility, b)
        lse_BTN[b] = _bounded(lse_TN, np.finfo(lse_BTN.dtype).max)
    y, lse = (y_BTNH, lse_BTN) if a.has_batch else (y_BTNH[0], lse_BTN[0])
    y = _deliver(y, out)
    return (y, lse) if return_lse else y


@_typed_as(attention.varlen_attention)
@np.errstate(all="ignore")
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
    """Compute the attention of sequences of several lengths, packed one after the other.

    Parameters
    ----------
    q : float32, float64, float16 or bfloat16 [total_q,N,H]
        Queries of all sequences.
    k, v : [total_k,K,H], [total_k,K,Hv], of the same dtype
        Keys and values of all sequences.
    cu_seqlens_q, cu_seqlens_k : int[B+1]
        Sequence b has the queries from cu_seqlens_q[b] to cu_seqlens_q[b + 1], and the keys
        likewise. The first is 0, the last the total; they do not decrease.
    scale, softcap, is_causal
        As in :func:`dot_product_attention`, in each sequence.
    query_offset : int or int[B], optional
        Position of each sequence's first query among its keys. Needed where a position means
        something and any sequence has not as many queries as keys.
    local_window_size, alibi_slopes, sinks
        As in :func:`dot_product_attention`, in each sequence.
    return_lse : bool
        Also return the log-sum-exp of each row's scores and its sink.
    arithmetic : "float32" or None, optional
        Accepted, too; here it is always float64.
    out : array [total_q,N,Hv] of q's dtype, optional
        Filled, once everything is computed, and returned; float32 for float16 and bfloat16 too.
    num_threads : int, optional
        Accepted as in :func:`dot_product_attention`; NumPy decides.

    Returns
    -------
    out : [total_q,N,Hv] of q's dtype
        Zeros in rows that see nothing.
    lse : [total_q,N] of float64 for float64, else float32
        Only with `return_lse`.

    Raises
    ------
    TypeError, ValueError
        Where dtypes, shapes or starts do not fit together.

    Examples
    --------
    >>> q = k = np.ones((3, 1, 8))
    >>> v = np.array([2.0, 4.0, 7.0]).reshape(3, 1, 1)
    >>> varlen_attention(q, k, v, [0, 2, 3], [0, 2, 3]).ravel()
    array([3., 3., 7.])
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
    resolve_threads(num_threads)
    total, N, _ = a.q.shape
    y = np.empty((total, N, a.v.shape[-1]), dtype=a.q.dtype if out is None else out.dtype)
    lse = np.empty((total, N), dtype=arithmetic_type(a.q.dtype))
    for b in range(len(a.query_starts) - 1):
        queries = slice(a.query_starts[b], a.query_starts[b + 1])
        keys = slice(a.key_starts[b], a.key_starts[b + 1])
        y[queries], lse_TN = _attend(a.q[queries], a.k[keys], a.v[keys], a.scores, a.visibility, b)
        lse[queries] = _bounded(lse_TN, np.finfo(lse.dtype).max)
    y = _deliver(y, out)
    return (y, lse) if return_lse else y


@np.errstate(all="ignore")
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
    out_a, lse_a, out_b, lse_b : [...,Hv], [...], [...,Hv], [...]
        Attention over two parts of the keys, float32, float64, float16 or bfloat16, and the
        log-sum-exp of each, float64 for float64, else float32. A row with an LSE of -inf has seen
        nothing, and its out is not looked at.
    *more
        Further parts: out, lse, out, lse, ...
    num_threads : int, optional
        Accepted as in :func:`dot_product_attention`; NumPy decides.

    Returns
    -------
    out : [...,Hv] of out_a's dtype
        Zeros in rows where no part has seen anything.
    lse : [...] of lse_a's dtype

    Raises
    ------
    TypeError, ValueError
        Where dtypes or shapes do not fit together.

    Notes
    -----
    Sinks belong to the LSE of one part only, or they count several times.

    Examples
    --------
    >>> q, kv = np.ones((1, 1, 1)), np.arange(5.0).reshape(5, 1, 1)
    >>> part = lambda *keys: dot_product_attention(q, kv[keys,], kv[keys,], return_lse=True)
    >>> whole, _ = part(0, 1, 2, 3, 4)
    >>> out, lse = merge_states(*part(0, 3), *part(1), *part(2, 4))
    >>> np.allclose(out, whole)
    True
    """
    parts = check_states(out_a, lse_a, out_b, lse_b, more)
    resolve_threads(num_threads)
    outs = [_float64(out) for out, _ in parts]
    lses = np.stack([_float64(lse) for _, lse in parts])
    max_lse = lses.max(axis=0)
    # -inf - -inf would be NaN: where all weights are 0, any finite maximum serves.
    max_lse = np.where(max_lse == -np.inf, 0.0, max_lse)
    weights = np.exp(lses - max_lse)
    total = weights.sum(axis=0)
    y = np.zeros(outs[0].shape)
    for out, lse, weight in zip(outs, lses, weights, strict=True):
        # 0 * NaN is NaN: what has seen nothing is left out.
        y += np.where(lse[..., None] == -np.inf, 0.0, weight[..., None] * out)
    y /= np.where(total == 0, 1.0, total)[..., None]
    dtypes = [array.dtype for array in parts[0]]
    return y.astype(dtypes[0]), (max_lse + np.log(total)).astype(dtypes[1])


@np.errstate(all="ignore")
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
    """Compute the weights exp(score - lse) that attention gives to its values.

    Parameters
    ----------
    q : float32, float64, float16 or bfloat16 [B,T,N,H]
        Queries.
    k : [B,S,K,H], of the same dtype
        Keys. q and k may both lack the B axis.
    lse : [B,T,N] of float64 for float64, else float32
        What attention with these options returned. With sinks it holds them, so they are no option
        here. A row with -inf gives zeros.
    rows : int[R], optional
        Only the weights of these queries, in this order.
    reduce : "queries" or "keys", optional
        Sum over the queries, those of `rows` if given, or over the keys.
    bias, mask, scale, softcap, is_causal, query_offset, local_window_size
        As in :func:`dot_product_attention`.
    query_seq_lengths, key_value_seq_lengths, alibi_slopes
        As in :func:`dot_product_attention`.
    out : array of the result's shape and dtype, optional
        Filled, once everything is computed, and returned.
    num_threads : int, optional
        Accepted as in :func:`dot_product_attention`; NumPy decides.

    Returns
    -------
    [B,N,T,S], [B,N,S] if reduced over the queries, [B,N,T] if reduced over the keys
        Of lse's dtype; R instead of T with `rows`, and no B axis if q has none.

    Raises
    ------
    TypeError, ValueError
        Where dtypes or shapes do not fit together.

    Examples
    --------
    >>> q = k = np.zeros((3, 1, 8))
    >>> _, lse = dot_product_attention(q, k, k, is_causal=True, return_lse=True)
    >>> attention_weights(q, k, lse, rows=[1, 0], is_causal=True)
    array([[[0.5, 0.5, 0. ],
            [1. , 0. , 0. ]]])
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
    resolve_threads(num_threads)
    (B, T, N, _), (_, S, K, _) = a.q.shape, a.k.shape
    t = np.arange(T) if a.rows is None else a.rows
    shapes = {None: (B, N, len(t), S), "queries": (B, N, S), "keys": (B, N, len(t))}
    largest = largest_score(a.lse.dtype)
    # A sum over the queries grows from block to block, and is rounded at the end.
    w = np.zeros(shapes[a.reduce], np.float64 if a.reduce == "queries" else a.lse.dtype)
    for b in range(B):
        for head, heads in _groups(N, K):
            k_SH = _float64(a.k[b, :, head])
            for some in _row_blocks(len(t), (heads.stop - heads.start) * S):
                score_GTS, sees_GTS = _score(
                    a.q[b], k_SH, a.scores, a.visibility, b, heads, t[some]
                )
                lse_GT1 = _float64(a.lse[b, t[some], heads]).T[..., None]
                # Beyond the largest score an LSE says no more than that.
                exponent_GTS = _bounded(score_GTS, largest) - _bounded(lse_GT1, largest)
                counts_GTS = sees_GTS & (score_GTS != -np.inf) & (lse_GT1 != -np.inf)
                weight_GTS = np.where(counts_GTS, np.exp(exponent_GTS), 0.0)
                if a.reduce == "queries":
                    w[b, heads] += weight_GTS.sum(axis=1)
                elif a.reduce == "keys":
                    w[b, heads, some] = weight_GTS.sum(axis=2)
                else:
                    w[b, heads, some] = weight_GTS
    w = w.astype(a.lse.dtype, copy=False)
    return _deliver(w if a.has_batch else w[0], out)


@np.errstate(all="ignore")
def attention_block(
    x: ArrayLike,
    w_q: ArrayLike,
    w_k: ArrayLike,
    w_v: ArrayLike,
    w_o: ArrayLike,
    *,
    b_q: ArrayLike | None = None,
    b_k: ArrayLike | None = None,
    b_v: ArrayLike | None = None,
    b_o: ArrayLike | None = None,
    norm: LayerNorm | RMSNorm | None = DEFAULT_NORM,
    norm_position: NormPosition = "post",
    residual: bool = True,
    rope: Rope | None = None,
    q_norm: LayerNorm | RMSNorm | None = None,
    k_norm: LayerNorm | RMSNorm | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    is_causal: bool = False,
    local_window_size: Window = None,
    sinks: ArrayLike | None = None,
    weight_dtype: WeightDtype | None = None,
    arithmetic: BlockArithmetic | None = None,
    context: ArrayLike | KVCache | None = None,
    cache: KVCache | None = None,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    query_offset: ArrayLike | None = None,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    out: Array | None = None,
    num_threads: int | None = None,
) -> Array:
    """Compute LayerNorm(x + attention(x W_Q, c W_K, c W_V) W_O) in float64; c is x or `context`.

    Nothing is rounded between the steps.

    Parameters
    ----------
    x : float32 or float64 [B,T,D]
        Input; may lack the B axis.
    w_q, w_k, w_v, w_o : [D,N,H], [Dc,K,H], [Dc,K,Hv], [N,Hv,D], of the same dtype
        Weights.
    b_q, b_k, b_v, b_o : [N,H], [K,H], [K,Hv], [D], optional
        Biases, added to the projections.
    norm : LayerNorm, RMSNorm or None
        None leaves the normalisation out.
    norm_position : "post", "pre" or None
        "pre" is x + attention(norm(x) W_Q, c W_K, c W_V) W_O, where c is norm(x), or `context` as
        it is. None leaves the normalisation out.
    residual : bool
        Whether x is added to the attention's output.
    rope : Rope, optional
        Rotates queries by their positions t + query_offset, and keys by theirs, j.
    q_norm, k_norm : LayerNorm or RMSNorm, optional
        Of each head's H columns of queries or keys, after the bias and before `rope`.
    scale, softcap, is_causal, local_window_size, sinks
        As in :func:`dot_product_attention`.
    weight_dtype : "bfloat16", "int8", "int4" or None, optional
        What float32 weights are rounded to first.
    arithmetic : "float32", "int8" or None, optional
        Accepted, too; here it is always float64.
    context : [B,S,Dc] or KVCache, optional
        What keys and values are made from, in cross attention, or a cache that holds them.
    cache : KVCache, optional
        Holds the positions before those of x, and gets theirs, rounded to x's dtype and its own.
    bias, mask, query_offset, query_seq_lengths, key_value_seq_lengths
        As in :func:`dot_product_attention`. Queries beyond their length have an attention of zero,
        so their output is LayerNorm(x + b_o). `rope` needs `query_offset` where T != S, too, and
        allows none that is negative.
    out : array [B,T,D] of x's dtype, optional
        Filled, once everything is computed, and returned.
    num_threads : int, optional
        Accepted so that the signature is that of `tileattn.attention_block`; NumPy decides.

    Returns
    -------
    [B,T,D] of x's dtype

    Raises
    ------
    TypeError, ValueError
        Where dtypes or shapes do not fit together.

    Examples
    --------
    >>> x, w = np.eye(2)[None], np.ones((2, 1, 1))
    >>> attention_block(x, w, w, w, np.ones((1, 1, 2)), norm=None)
    array([[[2., 1.],
            [1., 2.]]])
    """
    w = check_block_weights(
        w_q,
        w_k,
        w_v,
        w_o,
        b_q=b_q,
        b_k=b_k,
        b_v=b_v,
        b_o=b_o,
        norm=norm,
        norm_position=norm_position,
        residual=residual,
        rope=rope,
        q_norm=q_norm,
        k_norm=k_norm,
        scale=scale,
        softcap=softcap,
        is_causal=is_causal,
        local_window_size=local_window_size,
        sinks=sinks,
        weight_dtype=weight_dtype,
        arithmetic=arithmetic,
    )
    w = convert_weights(w, round_bfloat16=True)
    w_q, w_k, w_v, w_o = (_float64(_as_floats(matrix)) for matrix in w.matrices)
    b_q, b_k, b_v, b_o = (_float64(bias) for bias in w.biases)
    x_BTD, c_BSD, bias, visibility, positions, span, _, has_batch = check_block_inputs(
        x,
        context,
        len(w_q),
        len(w_v),
        (w_q.shape[1], *w_k.shape[1:], w_v.shape[2]),
        w.matrices[0].dtype,
        cache=cache,
        bias=bias,
        mask=mask,
        is_causal=w.is_causal,
        local_window_size=local_window_size,
        has_rope=rope is not None,
        query_offset=query_offset,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        out=out,
    )
    resolve_threads(num_threads)

    if cache is not None and any(np.may_share_memory(x_BTD, kept) for kept in cache._arrays()):
        x_BTD = x_BTD.copy()
    pre_norm, post_norm = (w.norm, None) if w.is_pre_norm else (None, w.norm)
    scores = w.scores.with_bias(bias)
    y_BTD = np.empty(x_BTD.shape, x_BTD.dtype)
    rotate = _rotation(rope, w_q.shape[2])  # a scaling's own code raises before a ring has changed
    if cache is not None and span is not None:
        cache._longest = span.longest  # an interrupt may come when a ring is half written
    for b in range(len(x_BTD)):
        x_TD = _float64(x_BTD[b])
        in_TD = _normalise(x_TD, pre_norm)
        q_TNH = _normalise(np.tensordot(in_TD, w_q, axes=1) + b_q, q_norm)
        first = 0 if positions is None else positions[b]
        q_TNH = rotate(q_TNH, first + np.arange(len(q_TNH)))
        if span is None or span.starts is not None:
            c_SD = in_TD if c_BSD is None else _float64(c_BSD[b])
            k_SKH = _normalise(np.tensordot(c_SD, w_k, axes=1) + b_k, k_norm)
            v_SKH = np.tensordot(c_SD, w_v, axes=1) + b_v
            k_first = 0 if span is None else first
            k_SKH = rotate(k_SKH, k_first + np.arange(len(k_SKH)))
        sees = visibility
        if span is not None:
            if span.starts is not None:
                _store(span, b, k_SKH.astype(x_BTD.dtype), v_SKH.astype(x_BTD.dtype))
            k_SKH, v_SKH, sees = _stored(span, b, visibility)
        y_TNH, _ = _attend(q_TNH, k_SKH, v_SKH, scores, sees, b)
        y_TD = np.tensordot(y_TNH, w_o, axes=2) + b_o
        if w.residual:
            y_TD = x_TD + y_TD
        y_BTD[b] = _normalise(y_TD, post_norm)
    if cache is not None and span is not None:
        cache._advance(span)
    return _deliver(y_BTD if has_batch else y_BTD[0], out)


def _as_floats(matrix: Weight) -> Array:
    if not isinstance(matrix, HeadMatrix):
        return matrix
    rows: Array = matrix.matrix.dequantize()  # [out, in]
    return rows.T.reshape(matrix.shape)


@np.errstate(all="ignore")
def layer_norm(
    x: ArrayLike,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    eps: float = 1e-5,
    *,
    residual: ArrayLike | None = None,
    out: Array | None = None,
    num_threads: int | None = None,
) -> Array:
    """Normalise x + residual over the last axis in float64, in two passes.

    Parameters
    ----------
    x : float32 or float64 [...,D]
        Input.
    weight, bias : [D] of x's dtype, optional
        1 and 0 where not given.
    eps : float
        Added to the variance.
    residual : [...,D], optional
        Added to x first.
    out : array [...,D] of x's dtype, optional
        Filled, once everything is computed, and returned.
    num_threads : int, optional
        Accepted so that the signature is that of `tileattn.LayerNorm`; NumPy decides.

    Returns
    -------
    [...,D] of x's dtype

    Raises
    ------
    TypeError, ValueError
        Where dtypes or shapes do not fit together.

    Examples
    --------
    >>> layer_norm(np.array([1.0, 3.0]), eps=0.0)
    array([-1.,  1.])
    """
    norm = LayerNorm(weight, bias, eps)
    x, residual, _ = check_norm_inputs(x, residual, norm, out)
    resolve_threads(num_threads)
    y = _normalise(_float64(x) + _float64(residual), norm)
    return _deliver(y.astype(x.dtype), out)


@np.errstate(all="ignore")
def rms_norm(
    x: ArrayLike,
    weight: ArrayLike | None = None,
    eps: float = 1e-6,
    *,
    residual: ArrayLike | None = None,
    out: Array | None = None,
    num_threads: int | None = None,
) -> Array:
    """Scale x + residual over the last axis to a root mean square of 1, in float64.

    Parameters
    ----------
    x : float32 or float64 [...,D]
        Input.
    weight : [D] of x's dtype, optional
        1 where not given.
    eps : float
        Added to the mean square.
    residual : [...,D], optional
        Added to x first.
    out : array [...,D] of x's dtype, optional
        Filled, once everything is computed, and returned.
    num_threads : int, optional
        Accepted so that the signature is that of `tileattn.RMSNorm`; NumPy decides.

    Returns
    -------
    [...,D] of x's dtype

    Raises
    ------
    TypeError, ValueError
        Where dtypes or shapes do not fit together.

    Examples
    --------
    >>> rms_norm(np.array([1.0, 7.0]), eps=0.0)
    array([0.2, 1.4])
    """
    norm = RMSNorm(weight, eps)
    x, residual, _ = check_norm_inputs(x, residual, norm, out)
    resolve_threads(num_threads)
    y = _normalise(_float64(x) + _float64(residual), norm)
    return _deliver(y.astype(x.dtype), out)


@np.errstate(all="ignore")
def apply_rope(
    x: ArrayLike,
    positions: ArrayLike,
    *,
    theta: float = 10000.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    scaling: RopeScaling | None = None,
    out: Array | None = None,
    num_threads: int | None = None,
) -> Array:
    """Turn pairs of columns of each head by angles that grow with position, in float64.

    Parameters
    ----------
    x : float32 or float64 [B,T,N,H] or [T,N,H]
        Queries or keys.
    positions : int [T] or [B,T]
        From 0 on.
    theta : float
        The base of the frequencies.
    rotary_dim : int, optional
        Columns of a head that are rotated; all where not given.
    interleaved : bool
        Whether pairs are neighbours, not half of `rotary_dim` apart.
    scaling : RopeScaling, optional
        How the frequencies are changed for longer sequences.
    out : array of x's shape and dtype, optional
        Filled, once everything is computed, and returned. It may be x.
    num_threads : int, optional
        Accepted so that the signature is that of `tileattn.apply_rope`; NumPy decides.

    Returns
    -------
    array of x's shape and dtype

    Raises
    ------
    TypeError, ValueError
        As `tileattn.apply_rope`, which shares these checks.

    Examples
    --------
    >>> apply_rope(np.array([[[1.0, 0.0]]]), [1]).round(4)
    array([[[0.5403, 0.8415]]])
    """
    rope = Rope(theta=theta, rotary_dim=rotary_dim, interleaved=interleaved, scaling=scaling)
    x, positions, *_ = check_rope_inputs(x, positions, rope.rotary_dim, out)
    resolve_threads(num_threads)
    rotate = _rotation(rope, x.shape[-1])
    y = rotate(_float64(x), positions if x.ndim == 4 else positions[0])
    return _deliver(y.astype(x.dtype), out)


def _store(span: CacheSpan, b: int, k_TKH: Array, v_TKH: Array) -> None:
    """Put sequence b's new keys and values where a cache keeps them."""
    assert span.starts is not None
    count = len(k_TKH) if span.counts is None else span.counts[b]
    slots = (span.starts[b] + np.arange(count)) % span.keys.shape[1]
    for rows, kept, scales in (
        (k_TKH[:count], span.keys, span.key_scales),
        (v_TKH[:count], span.values, span.value_scales),
    ):
        if scales is None:
            kept[b, slots] = rows
        else:
            kept[b, slots], scales[b, slots] = _quantize(rows)


def _quantize(rows: Array) -> tuple[Array, Array]:
    """Rows of float32 as int8 and a scale each, NaN where a row is not finite, 0 for zeros."""
    size = np.abs(rows).max(axis=-1)
    scale = np.clip(size / np.float32(127), SMALLEST_SCALE, LARGEST_SCALE)
    scale = np.where(size == 0, np.float32(0), scale)
    scale = np.where(np.isfinite(size), scale, np.float32(np.nan))
    values = np.rint(rows / scale[..., None])
    return np.nan_to_num(values, nan=0).astype(np.int8), scale


def _stored(span: CacheSpan, b: int, visibility: Visibility) -> tuple[Array, Array, Visibility]:
    """The keys and values that a cache has of sequence b, in order, and who sees them."""
    keys, values = span.keys[b], span.values[b]
    if span.key_scales is not None and span.value_scales is not None:
        keys = keys * span.key_scales[b, ..., None]
        values = values * span.value_scales[b, ..., None]
    if not span.is_ring:
        S = span.lengths.max()
        return keys[:S], values[:S], visibility
    first = max(0, span.lengths[b] - len(keys))
    slots = (first + np.arange(len(keys))) % len(keys)
    offset, lengths = visibility.query_offset, visibility.key_value_lengths
    assert offset is not None
    assert lengths is not None
    sees = Visibility(
        visibility.is_causal,
        offset - first,
        visibility.query_lengths,
        lengths - first,
        visibility.window,
        visibility.mask,
    )
    return keys[slots], values[slots], sees


def _attend(
    q_TNH: Array, k_SKH: Array, v_SKH: Array, scores: Scores, visibility: Visibility, b: int
) -> tuple[Float64, Float64]:
    """Attention of sequence b -> y[T,N,Hv], lse[T,N]; q, k and v of any floating dtype."""
    (T, N, _), (S, K, Hv) = q_TNH.shape, v_SKH.shape
    query_length = T if visibility.query_lengths is None else visibility.query_lengths[b]
    sinks = np.full(N, -np.inf) if scores.sinks is None else _float64(scores.sinks)
    y_TNH, lse_TN = np.empty((T, N, Hv)), np.empty((T, N))
    for head, heads in _groups(N, K):
        k_SH, v_SH = _float64(k_SKH[:, head]), _float64(v_SKH[:, head])
        for rows in _row_blocks(T, (heads.stop - heads.start) * S):
            t = np.arange(T)[rows]
            score_GTS, sees_GTS = _score(q_TNH, k_SH, scores, visibility, b, heads, t)
            sink_GT = np.where(t < query_length, sinks[heads, None], -np.inf)
            y_GTH, lse_GT = _softmax_times_values(score_GTS, sees_GTS, sink_GT, v_SH)
            y_TNH[rows, heads], lse_TN[rows, heads] = y_GTH.swapaxes(0, 1), lse_GT.T
    return y_TNH, lse_TN


def _groups(N: int, K: int) -> Iterator[tuple[int, slice]]:
    """Each key/value head and the query heads that share it."""
    for head in range(K):
        yield head, slice(head * N // K, (head + 1) * N // K)


def _row_blocks(T: int, scores_per_row: int) -> Iterator[slice]:
    """T rows in blocks of at most SCORES_AT_ONCE scores, or of one row."""
    step = max(1, SCORES_AT_ONCE // max(1, scores_per_row))
    for start in range(0, T, step):
        yield slice(start, min(start + step, T))


def _score(
    q_TNH: Array,
    k_SH: Float64,
    scores: Scores,
    visibility: Visibility,
    b: int,
    heads: slice,
    t: Integers,
) -> tuple[Float64, Bool]:
    """Scores of the queries t of some heads -> score[G,R,S], -inf where unseen; sees[G,R,S].

    G of sees is 1 where all heads see the same.
    """
    S = len(k_SH)
    offset = 0 if visibility.query_offset is None else visibility.query_offset[b]
    position = offset + t
    left, right = visibility.window or (-1, -1)
    q_GRH = _float64(q_TNH[t, heads]).swapaxes(0, 1)
    score_GRS = q_GRH @ k_SH.T
    score_GRS *= scores.scale
    if scores.softcap:
        score_GRS = scores.softcap * np.tanh(score_GRS / scores.softcap)

    # Each row is a sequence of its own here, of one query that stands at its position.
    sees_GRS = visible(
        len(t),
        1,
        S,
        is_causal=visibility.is_causal,
        query_offset=position,
        query_lengths=None if visibility.query_lengths is None else visibility.query_lengths[b] - t,
        key_value_lengths=(
            None if visibility.key_value_lengths is None else visibility.key_value_lengths[b]
        ),
        local_window_size=(None if left < 0 else left, None if right < 0 else right),
    ).swapaxes(0, 1)
    if visibility.mask is not None:
        sees_GRS = sees_GRS & visibility.mask[b, heads][:, t]
    if scores.bias is not None:
        bias_GRS = _float64(scores.bias[b, heads][:, t])
        sees_GRS = sees_GRS & (bias_GRS != -np.inf)
        score_GRS += bias_GRS
    if scores.alibi_slopes is not None:
        slope_G = _float64(scores.alibi_slopes[b, heads])
        score_GRS -= slope_G[:, None, None] * np.abs(position[:, None] - np.arange(S))
    np.copyto(score_GRS, -np.inf, where=~sees_GRS)
    return score_GRS, sees_GRS


def _softmax_times_values(
    score_GTS: Float64, sees_GTS: Bool, sink_GT: Float64, v_SH: Float64
) -> tuple[Float64, Float64]:
    """softmax(score) v, with a sink in the denominator -> y[G,T,Hv], lse[G,T]."""
    max_GT = np.maximum(score_GTS.max(axis=-1, initial=-np.inf), sink_GT)
    # -inf - -inf would be NaN: where all weights are 0, any finite maximum serves.
    max_GT = np.where(max_GT == -np.inf, 0.0, max_GT)
    weight_GTS = np.exp(score_GTS - max_GT[..., None])
    sum_GT = weight_GTS.sum(axis=-1) + np.exp(sink_GT - max_GT)

    # 0 * NaN is NaN, so a value that is not finite meets only the rows that see it.
    stray_SH = ~np.isfinite(v_SH)
    y_GTH = weight_GTS @ np.where(stray_SH, 0.0, v_SH)
    stray_SH[~sees_GTS.any(axis=(0, 1))] = False  # seen by nobody
    sees_GTS = np.broadcast_to(sees_GTS, weight_GTS.shape)
    for j, column in np.argwhere(stray_SH):
        seen_GT = sees_GTS[..., j]
        y_GTH[seen_GT, column] += weight_GTS[seen_GT, j] * v_SH[j, column]

    y_GTH /= np.where(sum_GT == 0, 1.0, sum_GT)[..., None]
    return y_GTH, max_GT + np.log(sum_GT)


def _rotation(rope: Rope | None, H: int) -> Callable[[Float64, Integers], Float64]:
    """What turns heads x[...,T,N,H] by the angles of their positions[...,T]; x without a rope."""
    if rope is None:
        return lambda x, positions: x
    frequencies, factor = rope._turns(H)
    R = 2 * len(frequencies)
    first, second = (
        (slice(0, R, 2), slice(1, R, 2))
        if rope.interleaved
        else (slice(0, R // 2), slice(R // 2, R))
    )

    def rotate(x: Float64, positions: Integers) -> Float64:
        angle = positions[..., None, None] * frequencies  # [..., T, 1, R / 2]
        cos, sin = factor * np.cos(angle), factor * np.sin(angle)
        a, b = x[..., first], x[..., second]
        y = x.copy()
        y[..., first] = a * cos - b * sin
        y[..., second] = b * cos + a * sin
        return y

    return rotate


def _normalise(x: Float64, norm: NormParameters | None) -> Float64:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last axis; RMSNorm: mean is 0.

    Without a norm, x.
    """
    if norm is None:
        return x
    D = x.shape[-1]
    centred = x - x.sum(axis=-1, keepdims=True) / D if norm.subtract_mean else x
    variance = (centred * centred).sum(axis=-1, keepdims=True) / D
    y: Float64 = centred / np.sqrt(variance + norm.eps)
    return (y if norm.weight is None else y * _float64(norm.weight)) + _float64(norm.bias)


def _float64(array: ArrayLike | None) -> Float64:
    """The array in float64; what is not given is 0, which changes no sum."""
    return np.asarray(0.0 if array is None else array, dtype=np.float64)


def _bounded(x: Float64, largest: float) -> Float64:
    """No finite number larger than that. Infinity stays: -inf says that nothing was seen."""
    return np.where(np.isinf(x), x, np.clip(x, -largest, largest))


def _deliver(y: Array, out: Array | None) -> Array:
    if out is None:
        return y
    np.asarray(out)[...] = y
    return out
