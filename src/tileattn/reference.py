"""The attention block in plain NumPy: the oracle of the tests, and the definition in code.

`dot_product_attention` and `attention_block` stand here once more, with the same arguments and the
same checks, written to be read; `layer_norm` is a LayerNorm made and called in one. There are no
classes here: an AttentionBlock's arguments and those of its call go to `attention_block`.

All arithmetic is float64, whatever comes in; the result has the dtype of the input. So float64
inputs give the oracle, and float32 inputs give the oracle rounded once.

Nothing here is fast, though it is sparing: float64 copies are made for one sequence and one
key/value head at a time, and scores for a block of query rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from tileattn import attention
from tileattn._arguments import (
    Array,
    Mask,
    NormParameters,
    check_attention,
    check_block_inputs,
    check_block_weights,
    check_flag,
    check_norm_inputs,
)
from tileattn.block import DEFAULT_NORM, LayerNorm
from tileattn.config import resolve_threads

__all__ = ["attention_block", "dot_product_attention", "layer_norm", "visible"]

Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]

Function = TypeVar("Function", bound=Callable[..., Any])

#: Scores held at once: 1 Mi float64 of them are 8 MiB, small beside the arrays worth a loop.
SCORES_AT_ONCE = 1 << 20


def visible(
    B: int,
    T: int,
    S: int,
    *,
    is_causal: bool = False,
    query_offset: npt.ArrayLike | None = None,
    query_lengths: npt.ArrayLike | None = None,
    key_value_lengths: npt.ArrayLike | None = None,
) -> Bool:
    """Say which query sees which key.

    Parameters
    ----------
    B, T, S : int
        Batch, query positions, key positions.
    is_causal : bool
        Query t stands at position t + query_offset and sees keys j <= that position only.
    query_offset : int or int[B], optional
        0 where not given. It means nothing without `is_causal`.
    query_lengths : int or int[B], optional
        Queries at or beyond the length see nothing.
    key_value_lengths : int or int[B], optional
        Keys at or beyond the length are seen by nobody.

    Returns
    -------
    bool[B,T,S]
        True where query t of sequence b sees key j.

    Examples
    --------
    >>> visible(1, 2, 4, is_causal=True, query_offset=1).astype(int)
    array([[[1, 1, 0, 0],
            [1, 1, 1, 0]]])
    """
    t, j = np.arange(T)[:, None], np.arange(S)
    sees = np.ones((B, T, S), dtype=bool)

    def per_sequence(value: npt.ArrayLike) -> Array:
        return np.broadcast_to(np.asarray(value, dtype=np.int64), (B,))[:, None, None]

    if is_causal:
        # Not j <= t + offset: that sum could overflow.
        sees &= j - t <= per_sequence(0 if query_offset is None else query_offset)
    if query_lengths is not None:
        sees &= t < per_sequence(query_lengths)
    if key_value_lengths is not None:
        sees &= j < per_sequence(key_value_lengths)
    return sees


def _typed_as(_: Function) -> Callable[[Callable[..., Any]], Function]:
    """Gives a function the type of that one, which has the same arguments, overloads and all."""
    return lambda function: cast(Function, function)


@_typed_as(attention.dot_product_attention)
@np.errstate(all="ignore")
def dot_product_attention(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_offset: npt.ArrayLike | None = None,
    query_seq_lengths: npt.ArrayLike | None = None,
    key_value_seq_lengths: npt.ArrayLike | None = None,
    return_lse: bool = False,
    out: Array | None = None,
    num_threads: int | None = None,
) -> Array | tuple[Array, Array]:
    """Compute softmax(scale * q k^T) v in float64.

    Parameters
    ----------
    q : float32 or float64 [B,T,N,H]
        Queries.
    k : [B,S,K,H], of the same dtype
        Keys. Query head n uses key/value head n // (N / K).
    v : [B,S,K,Hv], of the same dtype
        Values. q, k and v may all lack the B axis.
    scale : float, optional
        1 / sqrt(H) where not given.
    is_causal : bool
        Query t sees keys j <= t + query_offset only.
    query_offset : int or int[B], optional
        Position of the first query; needed where `is_causal` and T != S.
    query_seq_lengths, key_value_seq_lengths : int[B], optional
        Queries at or beyond the length see nothing; keys at or beyond it are seen by nobody.
    return_lse : bool
        Also return the log-sum-exp of each row's scores.
    out : array [B,T,N,Hv] of q's dtype, optional
        Filled, once everything is computed, and returned.
    num_threads : int, optional
        Accepted so that the signature is that of `tileattn.dot_product_attention`; NumPy decides.

    Returns
    -------
    out : [B,T,N,Hv] of q's dtype
        Zeros in rows that see nothing.
    lse : [B,T,N] of q's dtype
        Only with `return_lse`. -inf in rows that see nothing.

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
        scale=scale,
        is_causal=is_causal,
        query_offset=query_offset,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        out=out,
    )
    return_lse = check_flag("return_lse", return_lse)
    resolve_threads(num_threads)
    B, T, N, _ = a.q.shape
    y_BTNH = np.empty((B, T, N, a.v.shape[-1]), dtype=a.q.dtype)
    lse_BTN = np.empty((B, T, N), dtype=a.q.dtype)
    for b in range(B):
        y_BTNH[b], lse_BTN[b] = _attend(a.q[b], a.k[b], a.v[b], a.scale, a.mask, b)
    y, lse = (y_BTNH, lse_BTN) if a.has_batch else (y_BTNH[0], lse_BTN[0])
    y = _deliver(y, out)
    return (y, lse) if return_lse else y


@np.errstate(all="ignore")
def attention_block(
    x: npt.ArrayLike,
    w_q: npt.ArrayLike,
    w_k: npt.ArrayLike,
    w_v: npt.ArrayLike,
    w_o: npt.ArrayLike,
    *,
    b_q: npt.ArrayLike | None = None,
    b_k: npt.ArrayLike | None = None,
    b_v: npt.ArrayLike | None = None,
    b_o: npt.ArrayLike | None = None,
    norm: LayerNorm | None = DEFAULT_NORM,
    residual: bool = True,
    scale: float | None = None,
    is_causal: bool = False,
    context: npt.ArrayLike | None = None,
    query_offset: npt.ArrayLike | None = None,
    query_seq_lengths: npt.ArrayLike | None = None,
    key_value_seq_lengths: npt.ArrayLike | None = None,
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
    norm : LayerNorm or None
        None leaves the normalisation out.
    residual : bool
        Whether x is added to the attention's output.
    context : [B,S,Dc], optional
        What keys and values are made from, in cross attention.
    scale, is_causal, query_offset, query_seq_lengths, key_value_seq_lengths
        As in :func:`dot_product_attention`. Queries beyond their length have an attention of zero,
        so their output is LayerNorm(x + b_o).
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
        residual=residual,
        scale=scale,
        is_causal=is_causal,
    )
    w_q, w_k, w_v, w_o = (_float64(matrix) for matrix in w.matrices)
    b_q, b_k, b_v, b_o = (_float64(bias) for bias in w.biases)
    x_BTD, c_BSD, mask, has_batch = check_block_inputs(
        x,
        context,
        len(w_q),
        len(w_v),
        w.matrices[0].dtype,
        is_causal=w.is_causal,
        query_offset=query_offset,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        out=out,
    )
    resolve_threads(num_threads)

    y_BTD = np.empty(x_BTD.shape, x_BTD.dtype)
    c_BSD = x_BTD if c_BSD is None else c_BSD
    for b in range(len(x_BTD)):
        x_TD, c_SD = _float64(x_BTD[b]), _float64(c_BSD[b])
        q_TNH = np.tensordot(x_TD, w_q, axes=1) + b_q
        k_SKH = np.tensordot(c_SD, w_k, axes=1) + b_k
        v_SKH = np.tensordot(c_SD, w_v, axes=1) + b_v
        y_TNH, _ = _attend(q_TNH, k_SKH, v_SKH, w.scale, mask, b)
        y_TD = np.tensordot(y_TNH, w_o, axes=2) + b_o
        if w.residual:
            y_TD = x_TD + y_TD
        if norm is not None:
            y_TD = _normalise(y_TD, norm)
        y_BTD[b] = y_TD
    return _deliver(y_BTD if has_batch else y_BTD[0], out)


@np.errstate(all="ignore")
def layer_norm(
    x: npt.ArrayLike,
    weight: npt.ArrayLike | None = None,
    bias: npt.ArrayLike | None = None,
    eps: float = 1e-5,
    *,
    residual: npt.ArrayLike | None = None,
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
    norm = NormParameters(weight, bias, eps)
    x, residual = check_norm_inputs(x, residual, norm, out)
    resolve_threads(num_threads)
    y = _normalise(_float64(x) + _float64(residual), norm)
    return _deliver(y.astype(x.dtype), out)


def _attend(
    q_TNH: Array, k_SKH: Array, v_SKH: Array, scale: float, mask: Mask, b: int
) -> tuple[Float64, Float64]:
    """Attention of sequence b -> y[T,N,Hv], lse[T,N]; q, k and v of any floating dtype."""
    (T, N, _), (S, K, Hv) = q_TNH.shape, v_SKH.shape
    G = N // max(1, K)
    offset = 0 if mask.query_offset is None else int(mask.query_offset[b])
    query_length = T if mask.query_lengths is None else int(mask.query_lengths[b])
    key_value_length = S if mask.key_value_lengths is None else int(mask.key_value_lengths[b])
    y_TNH, lse_TN = np.empty((T, N, Hv)), np.empty((T, N))
    step = max(1, SCORES_AT_ONCE // max(1, G * S))
    for head in range(K):
        heads = slice(head * G, head * G + G)  # the query heads that share this one
        k_SH, v_SH = _float64(k_SKH[:, head]), _float64(v_SKH[:, head])
        for start in range(0, T, step):
            rows = slice(start, start + step)
            q_TGH = _float64(q_TNH[rows, heads])
            # A block of rows is a sequence of its own that stands `start` further on.
            sees_TS = visible(
                1,
                len(q_TGH),
                S,
                is_causal=mask.is_causal,
                query_offset=offset + start,
                query_lengths=query_length - start,
                key_value_lengths=key_value_length,
            )[0]
            y_TNH[rows, heads], lse_TN[rows, heads] = _softmax_times_values(
                q_TGH, k_SH, v_SH, sees_TS, scale
            )
    return y_TNH, lse_TN


def _softmax_times_values(
    q_TGH: Float64, k_SH: Float64, v_SH: Float64, sees_TS: Bool, scale: float
) -> tuple[Float64, Float64]:
    """softmax(scale * q k^T) v over the visible keys -> y[T,G,Hv], lse[T,G]."""
    score_TGS = np.where(sees_TS[:, None, :], scale * (q_TGH @ k_SH.T), -np.inf)
    max_TG = score_TGS.max(axis=-1, initial=-np.inf)
    # -inf - -inf would be NaN: where all weights are 0, any finite maximum serves.
    max_TG = np.where(max_TG == -np.inf, 0.0, max_TG)
    weight_TGS = np.exp(score_TGS - max_TG[..., None])
    sum_TG = weight_TGS.sum(axis=-1)

    # 0 * NaN is NaN, so a value that is not finite meets only the rows that see it.
    stray_SH = ~np.isfinite(v_SH)
    y_TGH = weight_TGS @ np.where(stray_SH, 0.0, v_SH)
    stray_SH[~sees_TS.any(axis=0)] = False  # seen by nobody
    for j, column in np.argwhere(stray_SH):
        rows = sees_TS[:, j]
        y_TGH[rows, :, column] += weight_TGS[rows, :, j] * v_SH[j, column]

    y_TGH /= np.where(sum_TG == 0, 1.0, sum_TG)[..., None]
    return y_TGH, max_TG + np.log(sum_TG)


def _normalise(x: Float64, norm: NormParameters) -> Float64:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last axis."""
    D = x.shape[-1]
    centred = x - x.sum(axis=-1, keepdims=True) / D
    variance = (centred * centred).sum(axis=-1, keepdims=True) / D
    y: Float64 = centred / np.sqrt(variance + norm.eps)
    return (y if norm.weight is None else y * _float64(norm.weight)) + _float64(norm.bias)


def _float64(array: npt.ArrayLike | None) -> Float64:
    """The array in float64; what is not given is 0, which changes no sum."""
    return np.asarray(0.0 if array is None else array, dtype=np.float64)


def _deliver(y: Array, out: Array | None) -> Array:
    if out is None:
        return y
    out[...] = y
    return out
