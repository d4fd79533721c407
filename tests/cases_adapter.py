"""tileattn as the shared cases call it: their names, and their default position of the queries.

The module is an adapter for the package itself, `of_reference` one for its NumPy reference.
"""

from types import SimpleNamespace

import numpy as np

import tileattn

set_num_threads = tileattn.set_num_threads


def attention(q, k, v, **options):
    """Attention; the last query stands at the last key where nothing else is said."""
    return _attention(tileattn, q, k, v, **options)


def _attention(module, q, k, v, *, query_offset=None, key_value_seq_lengths=None, **options):
    if query_offset is None and min(np.ndim(q), np.ndim(k)) >= 3:
        T, S = np.shape(q)[-3], np.shape(k)[-3]
        query_offset = S - T
        if key_value_seq_lengths is not None:
            query_offset = np.asarray(key_value_seq_lengths).astype(np.int64) - T
    return module.dot_product_attention(
        q,
        k,
        v,
        query_offset=query_offset,
        key_value_seq_lengths=key_value_seq_lengths,
        **options,
    )


def block(*arguments, **options):
    """The attention block with a LayerNorm made of its parts."""
    return _block(tileattn, *arguments, **options)


def _block(module, *arguments, ln_weight=None, ln_bias=None, eps=1e-5, **options):
    norm = tileattn.LayerNorm(ln_weight, ln_bias, eps)
    return module.attention_block(*arguments, norm=norm, **options)


of_reference = SimpleNamespace(
    attention=lambda *arguments, **options: _attention(tileattn.reference, *arguments, **options),
    block=lambda *arguments, **options: _block(tileattn.reference, *arguments, **options),
    set_num_threads=set_num_threads,
)
