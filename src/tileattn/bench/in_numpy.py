"""Attention as one writes it in NumPy, for `tileattn run` and `tileattn bench` to be held against.

A module of its own, since `peers` imports whole frameworks.
"""

from __future__ import annotations

import numpy as np

from tileattn.bench.arrays import Array


def numpy_attention(q: Array, k: Array, v: Array, bias: Array | None) -> Array:
    """As one writes it in NumPy, a matrix product for each head of k and v."""
    B, T, N, H = q.shape
    _, S, K, Hv = v.shape
    G = N // K
    q_heads = (q * q.dtype.type(H**-0.5)).reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4)
    scores = q_heads.reshape(B, K, G * T, H) @ k.transpose(0, 2, 3, 1)
    scores = scores.reshape(B, N, T, S)
    if bias is not None:
        scores += bias
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    y: Array = scores.reshape(B, K, G * T, S) @ v.transpose(0, 2, 1, 3)
    return y.reshape(B, K, G, T, Hv).transpose(0, 3, 1, 2, 4).reshape(B, T, N, Hv)
