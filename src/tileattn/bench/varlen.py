"""Packed sequences against the same ones padded."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

import tileattn
from tileattn.bench.arrays import Alignment, Array, copies_if_cold, copy, empty, normal
from tileattn.bench.cells import Varlen
from tileattn.bench.records import OURS
from tileattn.bench.rounds import Candidate
from tileattn.bench.work import PADDED, Work, rotation


def prepare(cell: Varlen, alignment: Alignment = "line") -> Work:
    """Arrays both packed and padded; the padded call also takes its rows out of the padding."""
    rng = np.random.default_rng(0)
    key_lengths = np.array(cell.lengths)
    query_lengths = np.ones_like(key_lengths) if cell.decode else key_lengths
    q, q_padded, q_starts = _sequences(rng, query_lengths, (cell.N, cell.H), alignment)
    k, k_padded, k_starts = _sequences(rng, key_lengths, (cell.K, cell.H), alignment)
    v, v_padded, _ = _sequences(rng, key_lengths, (cell.K, cell.H), alignment)
    sets = copies_if_cold(cell.decode, k.nbytes + v.nbytes)
    packed, padded = (
        [(k, v), *((copy(k, alignment), copy(v, alignment)) for _ in range(sets - 1))]
        for k, v in ((k, v), (k_padded, v_padded))
    )
    turn = rotation(sets)
    out, out_padded = empty(q.shape, alignment), empty(q_padded.shape, alignment)
    is_query = np.arange(q_padded.shape[1]) < query_lengths[:, None]
    is_full = bool(is_query.all())

    def ours(threads: int) -> Array:
        k, v = packed[next(turn)]
        tileattn.varlen_attention(
            q,
            k,
            v,
            q_starts,
            k_starts,
            out=out,
            num_threads=threads,
            is_causal=cell.causal,
        )
        return out

    def theirs(threads: int) -> Array:
        k, v = padded[next(turn)]
        tileattn.dot_product_attention(
            q_padded,
            k,
            v,
            query_seq_lengths=query_lengths,
            key_value_seq_lengths=key_lengths,
            out=out_padded,
            num_threads=threads,
            is_causal=cell.causal,
        )
        return out_padded.reshape(out.shape) if is_full else out_padded[is_query]

    def exact() -> Array:
        q64, k64, v64 = (a.astype(np.float64) for a in (q, k, v))
        return tileattn.reference.varlen_attention(
            q64, k64, v64, q_starts, k_starts, is_causal=cell.causal
        )

    return Work(
        cell,
        {OURS: Candidate(ours), PADDED: Candidate(theirs)},
        exact=exact,
        streams=packed,
        turn=turn,
    )


def _sequences(
    rng: np.random.Generator,
    lengths: Array,
    width: tuple[int, int],
    alignment: Alignment,
) -> tuple[Array, Array, Array]:
    """Sequences of those lengths, packed and padded, and where they start."""
    starts = np.concatenate([[0], np.cumsum(lengths)])
    packed = normal(rng, (int(starts[-1]), *width), alignment)
    padded = empty((len(lengths), int(lengths.max()), *width), alignment)
    padded[...] = 0
    for sequence, (begin, end) in zip(padded, pairwise(starts), strict=True):
        sequence[: end - begin] = packed[begin:end]
    return packed, padded, starts
