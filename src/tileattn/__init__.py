"""Exact transformer attention on NumPy arrays, as fast as the CPU allows.

One attention block, end to end, and each part of it by itself::

    Q = X W_Q      K = X W_K      V = X W_V
    Y = softmax(Q K^T / sqrt(H)) V
    Z = Y W_O
    Output = LayerNorm(X + Z)

Axes: B batch, T query positions, S key positions, D model width, N query heads, K key/value heads,
G = N / K, H head width. Arrays are q[B,T,N,H], k[B,S,K,H], v[B,S,K,H].

The layers; calls go down only::

    Python API          attention.py  block.py  ...     checks, prepares weights and angles
       |
    Cython loops        _core.pyx  loops/*.pxi          blocked loops over tiles, threads (OpenMP)
       |
    C tile kernels      csrc/kernel/*.inc.h             one tile of a product, softmax, norm or rope
       |
    SIMD vocabulary     csrc/simd/*.h                   vectors of one instruction set

`reference` has its functions in plain NumPy and float64, `cost` counts operations and bytes.
"""

from tileattn import cost, reference
from tileattn.attention import (
    attention_weights,
    dot_product_attention,
    merge_states,
    varlen_attention,
)
from tileattn.block import AttentionBlock, LayerNorm, RMSNorm, attention_block
from tileattn.cache import KVCache
from tileattn.config import (
    available_isas,
    get_num_threads,
    isa,
    set_num_threads,
    show_config,
    threads,
)
from tileattn.plan import Plan, explain
from tileattn.quantized import QuantizedMatrix
from tileattn.rope import Rope, RopeScaling, apply_rope

__version__ = "0.1.0"

__all__ = [
    "AttentionBlock",
    "KVCache",
    "LayerNorm",
    "Plan",
    "QuantizedMatrix",
    "RMSNorm",
    "Rope",
    "RopeScaling",
    "apply_rope",
    "attention_block",
    "attention_weights",
    "available_isas",
    "cost",
    "dot_product_attention",
    "explain",
    "get_num_threads",
    "isa",
    "merge_states",
    "reference",
    "set_num_threads",
    "show_config",
    "threads",
    "varlen_attention",
]
