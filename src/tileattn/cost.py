"""The cost model of the attention block: FLOPs, parameters and bytes, operation by operation.

Nothing is measured here and no array of the block's is made: sizes go in, exact whole numbers come
out, and their text is the table that the package prints beside its measurements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from tileattn._core import Visibility
from tileattn._scores import Window, check_lengths, check_visibility
from tileattn._values import ArrayLike, as_array, check_int

__all__ = [
    "LAYER_NORM_FLOPS_PER_ELEMENT",
    "SOFTMAX_FLOPS_PER_PAIR",
    "BlockCost",
    "OperationCost",
    "attention_block_cost",
    "format_bytes",
    "format_count",
]

#: Scale, compare with the maximum, subtract it, exponential, add to the sum: one each.
SOFTMAX_FLOPS_PER_PAIR = 5
#: Residual; add to the mean, subtract it; square, add to the variance; times 1/std, weight; bias.
LAYER_NORM_FLOPS_PER_ELEMENT = 8


@dataclass(frozen=True, slots=True)
class OperationCost:
    """One row of the table.

    Parameters
    ----------
    operation : str
        The formula in axis letters, such as ``X[B,T,D] . W_Q[D,N,H]``.
    flops, params, bytes : int
        As :func:`attention_block_cost` defines them.
    output : str
        Name of the result.
    shape : tuple of int
        Shape of the result.
    is_matmul : bool
        Whether the FLOPs are multiply-adds of a matrix product (two each), and so count towards
        GFLOP/s.

    Examples
    --------
    >>> row = attention_block_cost(1, 512, 768, 12, 4, 64).rows[0]
    >>> row.operation, row.output_text
    ('X[B,T,D] . W_Q[D,N,H]', 'Q[1,512,12,64]')
    """

    operation: str
    flops: int
    params: int
    bytes: int
    output: str
    shape: tuple[int, ...]
    is_matmul: bool

    @property
    def intensity(self) -> float:
        """Arithmetic intensity, FLOPs for each byte moved; NaN where no byte moves."""
        return _ratio(self.flops, self.bytes)

    @property
    def output_text(self) -> str:
        """Name and shape of the result, such as ``Q[1,512,12,64]``."""
        return f"{self.output}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class BlockCost:
    """The whole table; ``str()`` of it is the table as text.

    Parameters
    ----------
    sizes : dict of str to int
        Every axis letter, ``B`` to ``Dc``.
    visible_pairs : int
        (query, key) pairs that attend, over the whole batch, for one head.
    rows : tuple of OperationCost
        In the order of computation.

    Examples
    --------
    >>> cost = attention_block_cost(1, 512, 768, 12, 4, 64)
    >>> cost.params, [row.output for row in cost.rows]
    (1574400, ['Q', 'K', 'V', 'score', 'score', 'Y', 'Z', 'Output'])
    """

    sizes: dict[str, int] = field(hash=False)
    visible_pairs: int
    rows: tuple[OperationCost, ...]

    @property
    def matmul_flops(self) -> int:
        """FLOPs of the matrix products, the only ones that GFLOP/s figures count."""
        return sum(row.flops for row in self.rows if row.is_matmul)

    @property
    def other_flops(self) -> int:
        """FLOPs of softmax and LayerNorm, by the convention of this module."""
        return sum(row.flops for row in self.rows if not row.is_matmul)

    @property
    def params(self) -> int:
        """All parameters."""
        return sum(row.params for row in self.rows)

    @property
    def bytes(self) -> int:
        """Sum of the rows' bytes."""
        return sum(row.bytes for row in self.rows)

    @property
    def intensity(self) -> float:
        """Matmul FLOPs for each byte moved; NaN where no byte moves."""
        return _ratio(self.matmul_flops, self.bytes)

    def sizes_text(self) -> str:
        """One line: the sizes, and how many of the (query, key) pairs are visible.

        Returns
        -------
        str

        Examples
        --------
        >>> attention_block_cost(1, 512, 768, 12, 4, 64, is_causal=True).sizes_text()
        'B 1  T 512  S 512  D 768  N 12  K 4  G 3  H 64    visible pairs 131,328 of 262,144'
        """
        shown = dict(self.sizes)
        if shown["Hv"] == shown["H"]:
            del shown["Hv"]
        if shown["Dc"] == shown["D"]:
            del shown["Dc"]
        pairs = self.sizes["B"] * self.sizes["T"] * self.sizes["S"]
        letters = "  ".join(f"{letter} {size}" for letter, size in shown.items())
        return f"{letters}    visible pairs {self.visible_pairs:,} of {pairs:,}"

    def __str__(self) -> str:
        heading = ("operation", "FLOPs", "params", "bytes", "FLOP/B", "output")
        body = [
            (
                row.operation,
                format_count(row.flops),
                format_count(row.params) if row.params else "-",
                format_bytes(row.bytes) if row.bytes else "-",
                f"{row.intensity:.1f}" if row.bytes else "-",
                row.output_text,
            )
            for row in self.rows
        ]
        total = (
            "total (FLOPs of matrix products)",
            format_count(self.matmul_flops),
            format_count(self.params),
            format_bytes(self.bytes),
            f"{self.intensity:.1f}" if self.bytes else "-",
            "",
        )
        other = ("FLOPs of softmax and LayerNorm", format_count(self.other_flops), "", "", "", "")
        return f"{self.sizes_text()}\n\n{table_text(heading, body, [total, other], left={0, 5})}"


def _ratio(flops: int, bytes_moved: int) -> float:
    if not bytes_moved:
        return float("nan")
    try:
        return flops / bytes_moved
    except OverflowError:  # of integers; sizes may be of any
        return float("inf")


def attention_block_cost(
    B: int,
    T: int,
    D: int,
    N: int,
    K: int,
    H: int,
    *,
    S: int | None = None,
    Hv: int | None = None,
    Dc: int | None = None,
    is_causal: bool = False,
    query_offset: ArrayLike | None = None,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: Window = None,
    itemsize: int = 4,
) -> BlockCost:
    """Count what one call of the attention block costs.

    Parameters
    ----------
    B, T, D, N, K, H : int
        Batch, query positions, model width, query heads, key/value heads, head width.
    S : int, optional
        Key/value positions, all of them projected in this call; T where not given.
    Hv : int, optional
        Head width of the values; H where not given.
    Dc : int, optional
        Width of the context that keys and values are made from; D where not given. The context is
        counted as an array of its own, [B,S,Dc], in self-attention too.
    is_causal : bool
        Query t sees keys j <= t + query_offset only.
    query_offset : int or int[B], optional
        Position of the first query. Needed where T != S with ``is_causal`` or a window; 0 where
        T == S.
    query_seq_lengths, key_value_seq_lengths : int[B], optional
        Rows and keys at or beyond the length take no part in attention.
    local_window_size : int or (left, right), optional
        Only neighbours within these distances are seen, as in ``dot_product_attention``.
    itemsize : int
        Bytes of one number: 4 for float32, 8 for float64.

    Returns
    -------
    BlockCost
        One row for each operation, and totals.

    Raises
    ------
    ValueError
        A size that is negative, heads that do not divide, a length outside its axis, or a causal
        mask or a window whose offset is not known or beyond 2**60.
    TypeError
        A size that is not a whole number.

    Notes
    -----
    **FLOPs.** A multiply-add is two. Attention counts the visible (query, key) pairs, exactly;
    projections count every row, padded ones included, since they are computed. Softmax counts
    ``SOFTMAX_FLOPS_PER_PAIR`` for each visible pair and head (scale, maximum, subtraction,
    exponential, sum; the exponential counts as one though it takes about ten instructions) and
    LayerNorm ``LAYER_NORM_FLOPS_PER_ELEMENT`` for each element. Both conventions are loose, so
    ``matmul_flops`` leaves them out.

    **Params.** Weights without the four optional biases, and weight and bias of the LayerNorm.

    **Bytes** are what each operation must read and write if caches held nothing before it and
    everything during it: each operand once, the result once. Scores and softmax stay in a tile that
    never leaves the cache, so they read Q and the keys, and write nothing; only queries that see a
    key and keys that some query sees are read. The three projections read X each, which
    packing them side by side saves.

    Examples
    --------
    >>> cost = attention_block_cost(1, 512, 768, 12, 4, 64, is_causal=True)
    >>> cost.visible_pairs
    131328
    >>> cost.rows[0].flops == 2 * 512 * 768 * 12 * 64
    True
    """
    B, T, D, N, K, H = (
        _size(name, value) for name, value in zip("BTDNKH", (B, T, D, N, K, H), strict=True)
    )
    S = T if S is None else _size("S", S)
    Hv = H if Hv is None else _size("Hv", Hv)
    Dc = D if Dc is None else _size("Dc", Dc)
    itemsize = _size("itemsize", itemsize)
    if K < 1 or N % K:
        raise ValueError(f"K must divide N, got N = {N} query heads and K = {K} key/value heads")
    offset_array = None if query_offset is None else as_array("query_offset", query_offset)
    # One sequence stands for all where nothing tells them apart: B may be any number then.
    is_uniform = query_seq_lengths is None and key_value_seq_lengths is None
    is_uniform = is_uniform and (offset_array is None or offset_array.ndim == 0)
    # Before an offset is repeated B times.
    query_seq_lengths = check_lengths("query_seq_lengths", query_seq_lengths, B, T)
    key_value_seq_lengths = check_lengths("key_value_seq_lengths", key_value_seq_lengths, B, S)
    visibility = check_visibility(
        1 if is_uniform else B,
        T,
        S,
        is_causal=is_causal,
        query_offset=offset_array,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
    )

    pairs = queries_read = keys_read = 0
    sequences = (1, B) if is_uniform else (B, 1)
    for times, offset, rows, keys in _kinds_of_sequences(visibility, *sequences, T, S):
        # The row at position p sees the keys from p - left to p + right, as far as there are any.
        left, right = _reach(visibility, beyond=abs(offset) + rows + keys)
        end = offset + rows
        before_end = _clipped_sum(end + right, keys) - _clipped_sum(offset + right, keys)
        before_begin = _clipped_sum(end - left - 1, keys) - _clipped_sum(offset - left - 1, keys)
        pairs += times * (before_end - before_begin)
        if keys:
            queries_read += times * max(min(end, keys + left) - max(offset, -right), 0)
        if rows:
            keys_read += times * max(min(end + right, keys) - max(offset - left, 0), 0)

    G = N // K
    x, q, k, v, y = B * T * D, B * T * N * H, B * S * K * H, B * S * K * Hv, B * T * N * Hv
    context = B * S * Dc
    w_q, w_k, w_v, w_o = D * N * H, Dc * K * H, Dc * K * Hv, N * Hv * D
    H_v = "H" if Hv == H else "Hv"
    D_c = "D" if Dc == D else "Dc"
    X = "X[B,T,D]" if (S, Dc) == (T, D) else f"C[B,S,{D_c}]"

    def row(
        operation: str,
        flops: int,
        params: int,
        elements: int,
        output: str,
        shape: tuple[int, ...],
        is_matmul: bool = True,
    ) -> OperationCost:
        return OperationCost(
            operation, flops, params, itemsize * elements, output, shape, is_matmul
        )

    rows_of_table = (
        row("X[B,T,D] . W_Q[D,N,H]", 2 * B * T * w_q, w_q, x + w_q + q, "Q", (B, T, N, H)),
        row(f"{X} . W_K[{D_c},K,H]", 2 * B * S * w_k, w_k, context + w_k + k, "K", (B, S, K, H)),
        row(
            f"{X} . W_V[{D_c},K,{H_v}]",
            2 * B * S * w_v,
            w_v,
            context + w_v + v,
            "V",
            (B, S, K, Hv),
        ),
        row(
            "Q[B,T,K,G,H] . K[B,S,K,H]",
            2 * pairs * N * H,
            0,
            queries_read * N * H + keys_read * K * H,
            "score",
            (B, T, S, K, G),
        ),
        row(
            "softmax over S",
            SOFTMAX_FLOPS_PER_PAIR * pairs * N,
            0,
            0,
            "score",
            (B, T, S, K, G),
            is_matmul=False,
        ),
        row(
            f"score[B,T,S,K,G] . V[B,S,K,{H_v}]",
            2 * pairs * N * Hv,
            0,
            keys_read * K * Hv + y,
            "Y",
            (B, T, N, Hv),
        ),
        row(f"Y[B,T,N,{H_v}] . W_O[N,{H_v},D]", 2 * B * T * w_o, w_o, y + w_o + x, "Z", (B, T, D)),
        row(
            "LayerNorm(X + Z)",
            LAYER_NORM_FLOPS_PER_ELEMENT * x,
            2 * D,
            3 * x + 2 * D,
            "Output",
            (B, T, D),
            is_matmul=False,
        ),
    )
    sizes = {"B": B, "T": T, "S": S, "D": D, "N": N, "K": K, "G": G, "H": H, "Hv": Hv, "Dc": Dc}
    return BlockCost(sizes, pairs, rows_of_table)


def table_text(
    heading: Sequence[str],
    body: Sequence[Sequence[str]],
    totals: Sequence[Sequence[str]],
    left: Container[int],
) -> str:
    """Lay out a table: rules below its heading and above its totals.

    Parameters
    ----------
    heading, body, totals : rows of cells
        As many cells in each row.
    left : container of int
        The columns that are aligned to the left; the others are aligned to the right.

    Returns
    -------
    str

    Examples
    --------
    >>> print(table_text(("row", "size"), [("a", "5"), ("bc", "16")], [("sum", "21")], left={0}))
    row  size
    ---------
    a       5
    bc     16
    ---------
    sum    21
    """
    rows = [heading, *body, *totals]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    rule = "-" * max(map(len, lines))
    end = 1 + len(body)
    return "\n".join([lines[0], rule, *lines[1:end], rule, *lines[end:]])


def _reach(visibility: Visibility, beyond: int) -> tuple[int, int]:
    """How many neighbours a query sees on either side; so many, where there is no bound."""
    left, right = visibility.window or (-1, -1)
    left, right = (beyond if side < 0 else side for side in (left, right))
    return left, 0 if visibility.is_causal else right


def _kinds_of_sequences(
    visibility: Visibility, B: int, copies: int, T: int, S: int
) -> list[tuple[int, int, int, int]]:
    """(how many, query offset, query length, key length) of each kind of B * copies sequences."""
    given = (
        visibility.query_offset,
        visibility.query_lengths,
        visibility.key_value_lengths,
    )
    if all(array is None for array in given):
        return [(B * copies, 0, T, S)]
    columns = [
        [default] * B if array is None else array.tolist()
        for array, default in zip(given, (0, T, S), strict=True)
    ]
    kinds = Counter(zip(*columns, strict=True))
    return [(count * copies, *kind) for kind, count in kinds.items()]


def format_count(number: int) -> str:
    """Write a count with three or four figures, as in ``604.0 M``.

    Parameters
    ----------
    number : int

    Returns
    -------
    str

    Examples
    --------
    >>> format_count(603979776), format_count(999)
    ('604.0 M', '999')
    """
    return _with_prefix(number, "")


def format_bytes(number: int) -> str:
    """Write a number of bytes with a decimal prefix, as in ``5.5 MB``.

    Parameters
    ----------
    number : int

    Returns
    -------
    str

    Examples
    --------
    >>> format_bytes(5505024)
    '5.5 MB'
    """
    return _with_prefix(number, "B")


def _with_prefix(number: int, unit: str) -> str:
    if number < 1000:
        return f"{number} {unit}".rstrip()
    one = 1
    for prefix in "kMGTPE":
        one *= 1000
        # 999.95 would be rounded to 1000.0: the next prefix says it better.
        if number * 100 < 99995 * one or prefix == "E":
            break
    tenths = (20 * number + one) // (2 * one)  # no float, which ends at 1e308
    return f"{tenths // 10}.{tenths % 10} {prefix}{unit}"


def _clipped_sum(top: int, limit: int) -> int:
    """Sum of min(max(i, 0), limit) over all i <= top."""

    def triangle(n: int) -> int:
        return n * (n + 1) // 2 if n > 0 else 0

    return triangle(top) - triangle(top - limit)


def _size(name: str, value: int) -> int:
    size = check_int(name, value)
    if size < 0:
        raise ValueError(f"{name} must not be negative, got {size}")
    return size
