"""How attention would be done, as the extension decides it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tileattn import _core
from tileattn._arguments import Arithmetic, check_attention
from tileattn._scores import Window
from tileattn._values import Array, ArrayLike, check_flag
from tileattn.config import resolve_threads


@dataclass(frozen=True, slots=True)
class Plan:
    """What `explain` foretells; ``str()`` of it is a table.

    An item is the work that one thread takes at a time: some K/V heads of one sequence, a tile of
    their stacked query rows (G * T for each), and all keys, or one chunk of them.

    Parameters
    ----------
    path : {"streaming", "tiled"}
        Streaming reads keys and values as they lie, once, for the few query rows of a decode step.
        Tiled packs them block by block, and each block serves a tile of query rows.
    isa : str
        Instruction set of the kernels.
    arithmetic : {"bfloat16", "float32", "float64"}
        What is computed in; bfloat16 are dot products of it, summed up in float32.
    threads : int
        That take part.
    items : int
        ``B * head_parts * tiles * splits``; without a query 0, and no threads.
    head_parts : int
        Into which the K/V heads of a sequence are divided.
    tiles : int
        Into which the query rows of a K/V head are cut.
    tile_rows : int
        Query rows of a tile, at most.
    key_block : int
        Keys that are worked on at once.
    register_tile : (int, int) or None
        Query rows and keys whose scores are summed up in registers; None for the streaming path,
        which multiplies along the head.
    chunks : int
        Of the keys, at the same positions in all calls; what they give is merged in order.
    splits : int
        Items that share the keys of a tile: `chunks` where other axes do not keep the threads busy,
        otherwise 1.
    merges : int
        Pieces of work in which the threads put split keys together: a K/V head of a sequence each.
    workspace_bytes : int
        Working memory of all threads, and of what is to be merged.

    Examples
    --------
    >>> import numpy as np, tileattn
    >>> x = np.zeros((1, 300, 12, 64), np.float32)
    >>> plan = tileattn.explain(x, x, x, num_threads=1)
    >>> plan.path, plan.tiles, plan.tile_rows, plan.items
    ('tiled', 1, 300, 12)
    """

    path: Literal["streaming", "tiled"]
    isa: str
    arithmetic: Literal["bfloat16", "float32", "float64"]
    threads: int
    items: int
    head_parts: int
    tiles: int
    tile_rows: int
    key_block: int
    register_tile: tuple[int, int] | None
    chunks: int
    splits: int
    merges: int
    workspace_bytes: int

    def __str__(self) -> str:
        return "\n".join(f"{name:16}{getattr(self, name)}" for name in self.__slots__)


def explain(
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
) -> Plan:
    """Say how `dot_product_attention` does this call, without doing it.

    Parameters
    ----------
    q, k, v
        As in `dot_product_attention`. What they hold does not matter.
    bias, mask, scale, softcap, is_causal, query_offset, local_window_size
        Likewise.
    query_seq_lengths, key_value_seq_lengths, alibi_slopes, sinks, return_lse
        Likewise.
    arithmetic
        Likewise.
    out
        Likewise; nothing is written.
    num_threads
        Likewise.

    Returns
    -------
    Plan

    Raises
    ------
    TypeError, ValueError
        As `dot_product_attention`.

    Notes
    -----
    The path follows from the G * T query rows that share a K/V head: up to 16 stream keys and
    values, since packing them would cost more than it saves, and more are tiled (with bfloat16 dot
    products from 9 rows on; fewer are computed in float32 there, too). Up to 128 rows
    attend to chunks of 512 keys and more one by one, so that threads can share them. Both, and with
    them every bit of a result, depend on the shape of one sequence only. The batch and the threads
    decide no more than who does what: into how many parts heads and rows are cut, and whether keys
    are split.

    Small work is done by one thread, and no work by more threads than there are items.

    Examples
    --------
    A step of a decoder, and its prompt:

    >>> import numpy as np, tileattn
    >>> q = np.zeros((1, 4096, 32, 128), np.float32)
    >>> k = v = np.zeros((1, 4096, 8, 128), np.float32)
    >>> plan = tileattn.explain(q[:, -1:], k, v, num_threads=2)
    >>> plan.path, plan.threads, plan.chunks, plan.splits, plan.items
    ('streaming', 2, 8, 8, 8)
    >>> plan = tileattn.explain(q, k, v, is_causal=True, num_threads=2)
    >>> plan.path, plan.threads, plan.head_parts, plan.tiles, plan.tile_rows, plan.items
    ('tiled', 2, 8, 32, 512, 256)
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
    check_flag("return_lse", return_lse)
    threads = resolve_threads(num_threads)
    return Plan(
        **_core.attention(
            a.q,
            a.k,
            a.v,
            None,
            None,
            a.scores,
            a.visibility,
            threads,
            sizes=a.sizes,
            report=True,
            float32=a.arithmetic == "float32",
        )
    )
