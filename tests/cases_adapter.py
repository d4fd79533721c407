"""tileattn as the shared cases call it: their names, and their default position of the queries."""

import numpy as np

import tileattn

set_num_threads = tileattn.set_num_threads


class NotSupported(BaseException):
    """An option that tileattn does not have yet: no error, and no result to judge.

    Not an Exception, so that no case takes it for the refusal it expects.
    """


def attention(
    q, k, v, *, is_causal=False, query_offset=None, key_value_seq_lengths=None, **options
):
    """Attention; the last query stands at the last key where nothing else is said."""
    for name in ("mask", "bias", "softcap", "local_window_size"):
        if options.pop(name, None) is not None:
            raise NotSupported(f"{name} is not supported yet")
    if is_causal and query_offset is None and min(np.ndim(q), np.ndim(k)) >= 3:
        T, S = np.shape(q)[-3], np.shape(k)[-3]
        query_offset = S - T
        if key_value_seq_lengths is not None:
            query_offset = np.asarray(key_value_seq_lengths).astype(np.int64) - T
    return tileattn.dot_product_attention(
        q,
        k,
        v,
        is_causal=is_causal,
        query_offset=query_offset,
        key_value_seq_lengths=key_value_seq_lengths,
        **options,
    )


def block(x, w_q, w_k, w_v, w_o, *, ln_weight=None, ln_bias=None, eps=1e-5, **options):
    """The attention block with a LayerNorm made of its parts."""
    norm = tileattn.LayerNorm(ln_weight, ln_bias, eps)
    return tileattn.attention_block(x, w_q, w_k, w_v, w_o, norm=norm, **options)
