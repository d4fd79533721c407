"""What the tests compare with: exact results, bounds that follow from them, and awkward arrays.

An operation is right if its error is at most twice that of a plain evaluation in its own precision,
which sums in another order, plus a floor that follows from the sizes: no tolerance is tuned.
"""

import functools
from typing import NamedTuple

import numpy as np

try:
    from ml_dtypes import bfloat16
except ImportError:  # it has no wheel for musl
    HALVES = (np.float16,)
else:
    HALVES = (np.float16, bfloat16)

# Largest relative error of a number rounded to a half, and absolute one below its normal range.
HALF_ROUNDING = {"float16": (2.0**-11, 2.0**-25), "bfloat16": (2.0**-8, 2.0**-134)}

GUARD = 64  # elements on each side of a guarded array


def arithmetic(dtype):
    """What arrays of that dtype are computed in."""
    name = np.dtype(dtype).name
    return np.float32 if name in HALF_ROUNDING or name == "int8" else np.dtype(dtype).type


def higher(dtype):
    """A precision in which rounding does not count beside that of dtype's arithmetic."""
    return np.float64 if arithmetic(dtype) == np.float32 else np.longdouble


def gamma(n, dtype):
    """Bound of the relative error of a sum of n products in any order: n u / (1 - n u)."""
    u = float(np.finfo(dtype).eps) / 2
    return n * u / (1 - n * u)


def remember(function):
    """Keeps the latest results: the same inputs come again for each instruction set."""
    results = {}

    def key(value):
        if isinstance(value, np.ndarray):
            return value.dtype.str, value.shape, hash(value.tobytes())
        if isinstance(value, tuple):
            return tuple(map(key, value))
        return value

    @functools.wraps(function)
    def remembering(*arguments, **options):
        call = key(arguments), tuple((name, key(options[name])) for name in sorted(options))
        if call not in results:
            if len(results) == 1000:
                del results[next(iter(results))]
            results[call] = function(*arguments, **options)
        return results[call]

    return remembering


# ------------------------------------------------------------------ attention


def positions(B, T, query_offset):
    """[B, T]: where each query stands."""
    return np.arange(T) + np.broadcast_to(0 if query_offset is None else query_offset, B)[:, None]


def visible(
    B,
    T,
    S,
    *,
    is_causal=False,
    query_offset=0,
    local_window_size=None,
    query_lengths=None,
    key_lengths=None,
):
    """[B, T, S]: which query sees which key, but for what a mask or a bias hides."""
    t, j = np.arange(T)[None, :, None], np.arange(S)[None, None, :]
    position = positions(B, T, query_offset)[:, :, None]
    sees = np.ones((B, T, S), bool)
    if is_causal:
        sees &= j <= position
    if not isinstance(local_window_size, tuple):
        local_window_size = (local_window_size, local_window_size)
    left, right = local_window_size
    if left is not None:
        sees &= j >= position - left
    if right is not None:
        sees &= j <= position + right
    if query_lengths is not None:
        sees &= t < np.asarray(query_lengths)[:, None, None]
    if key_lengths is not None:
        sees &= j < np.asarray(key_lengths)[:, None, None]
    return sees


class Scores(NamedTuple):
    """A call's arrays by head, and its weights: the whole matrix that the package never makes."""

    q: np.ndarray  # [B, N, T, H]
    k: np.ndarray  # [B, N, H, S]
    v: np.ndarray  # [B, N, S, Hv]
    scale: float
    scaled: np.ndarray  # [B, N, T, S], scale * q k
    capped: np.ndarray  # [B, N, T, S], the same where there is no cap
    added: np.ndarray  # [B, N, T, S], sizes of what a bias and ALiBi add
    score: np.ndarray  # [B, N, T, S], -inf where unseen
    sink: np.ndarray  # [B, N, T], -inf for none
    weight: np.ndarray  # [B, N, T, S], each row and its sink of sum 1, or of zeros
    out: np.ndarray  # [B, N, T, Hv]
    lse: np.ndarray  # [B, N, T]


def evaluate(
    q,
    k,
    v,
    precision,
    *,
    bias=None,
    mask=None,
    scale=None,
    softcap=None,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    is_causal=False,
    query_offset=None,
    local_window_size=None,
    alibi_slopes=None,
    sinks=None,
):
    q, k, v = (np.asarray(x).astype(precision) for x in (q, k, v))
    (B, T, N, H), (S, K) = q.shape, k.shape[1:3]
    if scale is None:
        scale = 1 / np.sqrt(precision(H)) if H else 1
    sees = visible(
        B,
        T,
        S,
        is_causal=is_causal,
        query_offset=query_offset,
        local_window_size=local_window_size,
        query_lengths=query_seq_lengths,
        key_lengths=key_value_seq_lengths,
    )[:, None]
    q = q.swapaxes(1, 2)
    k, v = (np.repeat(x, N // K if K else 1, axis=2).swapaxes(1, 2) for x in (k, v))
    k = k.swapaxes(2, 3)
    scaled = precision(scale) * (q @ k)
    capped = (
        scaled if softcap is None else precision(softcap) * np.tanh(scaled / precision(softcap))
    )
    score, added = capped, np.zeros((B, N, T, S), precision)
    if bias is not None:
        sees = sees & (bias != -np.inf)
        bias = np.where(bias == -np.inf, 0, bias.astype(precision))
        score, added = score + bias, added + np.abs(bias)
    if alibi_slopes is not None:
        slope = np.broadcast_to(np.asarray(alibi_slopes).astype(precision), (B, N))[
            :, :, None, None
        ]
        distance = np.abs(positions(B, T, query_offset)[:, None, :, None] - np.arange(S))
        alibi = -slope * distance.astype(precision)
        score, added = score + alibi, added + np.abs(alibi)
    if mask is not None:
        sees = sees & mask
    score = np.where(sees, score, -np.inf)
    sink = np.full((B, N, T), -np.inf, precision)
    if sinks is not None:
        sink[...] = np.asarray(sinks).astype(precision)[:, None]
    if query_seq_lengths is not None:
        beyond = np.arange(T) >= np.asarray(query_seq_lengths)[:, None]
        sink = np.where(beyond[:, None], -np.inf, sink)
    top = np.maximum(score.max(axis=-1, initial=-np.inf), sink)[..., None]
    finite_top = np.where(top == -np.inf, 0, top)
    weight = np.exp(score - finite_top)
    total = weight.sum(axis=-1, keepdims=True) + np.exp(sink[..., None] - finite_top)
    some = total > 0
    weight = weight / np.where(some, total, 1)
    lse = np.where(some, top + np.log(np.where(some, total, 1)), -np.inf)[..., 0]
    return Scores(
        q, k, v, abs(float(scale)), scaled, capped, added, score, sink, weight, weight @ v, lse
    )


@remember
def attention(q, k, v, precision, **options):
    """Attention of 4-D arrays in `precision` -> out[B, T, N, Hv], lse[B, T, N]."""
    s = evaluate(q, k, v, precision, **options)
    return s.out.swapaxes(1, 2), s.lse.swapaxes(1, 2)


def score_errors(s, **options):
    """[B, N, T, S]: by how many units of rounding each score may be off; see attention_floor."""
    of_score = np.sqrt(s.q.shape[-1]) * s.scale * np.sqrt((s.q**2) @ (s.k**2))
    if options.get("softcap") is not None:
        slope = 1 - (s.capped / options["softcap"]) ** 2
        of_score = slope * (of_score + 2 * np.abs(s.scaled)) + 3 * np.abs(s.capped)
    if options.get("bias") is not None or options.get("alibi_slopes") is not None:
        of_score = of_score + np.abs(s.capped) + (4 + np.sqrt(s.q.shape[-1])) * s.added
    return of_score


@remember
def attention_floor(q, k, v, dtype, **options):
    """What rounding to dtype may cost each row of out, and of the LSE: two arrays [B, T, N].

    Errors of n additions grow like sqrt(n), times the terms or what they have added up to.
    A score is off by eps sqrt(H) |q k|, each key's by something else, and by eps of itself for the
    scale and for the maximum, all keys' alike; that is the relative error of its weight. A cap
    passes on what its slope lets through, and rounds its argument, its tanh and its product; what
    is added is rounded, scaled and summed, and the H products may be summed on top of it. A sink is
    rounded like a maximum, and the products may be summed on top of its negative. Below the normal
    numbers, additions round to a step that does not shrink.
    """
    s = evaluate(q, k, v, np.float64, **options)
    S = s.k.shape[3]
    eps = float(np.finfo(arithmetic(dtype)).eps)
    seen = s.weight > 0
    of_score = np.where(seen, score_errors(s, **options), 0).max(axis=-1, initial=0)
    size = np.abs(np.where(seen, s.score, 0)).max(axis=-1, initial=0)
    counts = (s.sink > -np.inf) & (s.sink >= s.lse - 750)  # its weight is not 0
    sink = np.where(counts, np.abs(s.sink), 0)
    size = np.maximum(size, sink)
    of_score = of_score + np.sqrt(s.q.shape[-1]) * sink
    of_sum = np.sqrt(S)
    terms = np.sqrt((s.weight**2) @ (s.v**2)).max(axis=-1, initial=0)
    common = np.sqrt(s.weight @ (s.v**2)).max(axis=-1, initial=0)
    total = np.abs(s.out).max(axis=-1, initial=0)
    out = eps * ((of_sum + 2 * of_score) * terms + 2 * size * common + of_sum * total)
    out = out + (S + 1) * float(np.finfo(arithmetic(dtype)).smallest_subnormal)
    squares = np.sqrt((s.weight**2).sum(axis=-1))
    lse = eps * (of_score * squares + of_sum + 2 * size + np.log(S + 1))
    return out.swapaxes(1, 2), lse.swapaxes(1, 2)


def check_attention(got, q, k, v, *, is_dots=False, **options):
    """Refuses an attention result (out, or out and LSE) whose error rounding does not explain.

    In bfloat16 dot products each weight is rounded to bfloat16 before it meets its value.
    """
    got, lse = got if isinstance(got, tuple) else (got, None)
    dtype = np.asarray(q).dtype.newbyteorder("=")
    if np.ndim(q) == 3:
        q, k, v, got = q[None], k[None], v[None], got[None]
        lse = None if lse is None else lse[None]
    exact, exact_lse = attention(q, k, v, higher(dtype), **options)
    plain, plain_lse = attention(q, k, v, arithmetic(dtype), **options)
    floor, lse_floor = attention_floor(q, k, v, dtype, **options)
    floor = floor[..., None]
    if is_dots:
        sizes, _ = attention(q, k, np.abs(np.asarray(v)), np.float64, **options)
        floor = floor + HALF_ROUNDING["bfloat16"][0] * sizes
    if dtype.name in HALF_ROUNDING:
        assert got.dtype in (dtype, np.float32)  # float32 where out asked for it
        if got.dtype == dtype:
            relative, absolute = HALF_ROUNDING[dtype.name]
            floor = floor * (1 + relative) + relative * np.abs(exact) + absolute
            got = got.astype(np.float32)
    else:
        assert got.dtype == dtype
    check(got, exact, plain, floor, "out")
    if lse is not None:
        assert lse.dtype == arithmetic(dtype)
        check(lse, exact_lse, plain_lse, lse_floor, "lse")


def check_weights(got, q, k, lse, *, rows=None, reduce=None, **options):
    """Refuses weights exp(score - lse), or sums of them, whose error rounding does not explain.

    A weight is off by what its score is, by two units of the score and of the LSE for the scale and
    the conversion to powers of two, and by some for the exponential. The products may be summed on
    top of the LSE and what is added, so each of the H additions rounds at their size. A sum of n
    weights is off by gamma(n) as well.
    """
    dtype = np.asarray(q).dtype.newbyteorder("=")
    if np.ndim(q) == 3:
        q, k, lse, got = q[None], k[None], lse[None], got[None]
    t = np.arange(q.shape[1]) if rows is None else np.asarray(rows, int)
    axis = {None: (), "queries": 2, "keys": 3}[reduce]

    def weights(precision):
        s = evaluate(q, k, np.zeros((*k.shape[:3], 1)), precision, **options)
        start = np.asarray(lse).astype(precision).swapaxes(1, 2)[..., None]
        blind = (s.score == -np.inf) | (start == -np.inf)
        w = np.exp(np.where(blind, 0, s.score) - np.where(blind, 0, start))
        return s, np.where(blind, 0, w)[:, :, t]

    s, exact = weights(higher(dtype))
    _, plain = weights(arithmetic(dtype))
    eps = float(np.finfo(arithmetic(dtype)).eps)
    seen = s.score != -np.inf
    size = np.abs(np.where(seen, s.score, 0)) + np.abs(
        np.where(lse == -np.inf, 0, lse).swapaxes(1, 2)[..., None].astype(np.float64)
    )
    H = s.q.shape[-1]
    units = np.where(seen, score_errors(s, **options), 0)
    units = units + (2 + np.sqrt(H)) * size + 4
    units = np.where(exact == 0, 0, units[:, :, t])  # they may be infinite there
    floor = eps * exact * units + float(np.finfo(arithmetic(dtype)).tiny)
    count = {None: 0, "queries": len(t), "keys": k.shape[1]}[reduce]
    floor = floor.sum(axis=axis) + gamma(count, arithmetic(dtype)) * exact.sum(axis=axis)
    assert got.dtype == arithmetic(dtype)
    check(got, exact.sum(axis=axis), plain.sum(axis=axis), floor, "weights")


def merge(parts, precision):
    """The union of (out, lse) of parts of the keys in `precision` -> out, lse."""
    lses = np.stack([np.asarray(lse).astype(precision) for _, lse in parts])
    top = lses.max(axis=0)
    weights = np.exp(lses - np.where(top == -np.inf, 0, top))
    total = weights.sum(axis=0)
    weights = weights / np.where(total == 0, 1, total)
    terms = [
        np.where(weight[..., None] == 0, 0, weight[..., None] * np.asarray(out).astype(precision))
        for (out, _), weight in zip(parts, weights, strict=True)
    ]
    with np.errstate(divide="ignore"):
        return sum(terms), np.where(total == 0, -np.inf, top + np.log(total))


def check_merge(got, parts):
    """Refuses a union of parts whose error rounding does not explain.

    The difference of two LSE is off by eps of itself, and so is the exponent of a weight, thrice
    with the conversion to powers of two; a weight is off by some eps for the exponential, the sum
    of weights and its inverse, one for each part; and a product and a sum by one each.
    """
    (out, lse), dtype = got, np.asarray(parts[0][0]).dtype.newbyteorder("=")
    exact, exact_lse = merge(parts, higher(dtype))
    plain, plain_lse = merge(parts, arithmetic(dtype))
    eps = float(np.finfo(arithmetic(dtype)).eps)
    lses = np.stack([np.asarray(x).astype(np.float64) for _, x in parts])
    top = lses.max(axis=0)
    seen = lses != -np.inf
    below = np.where(seen, np.where(top == -np.inf, 0, top) - lses, 0)
    weights = np.where(seen, np.exp(-below), 0)
    weights = weights / np.where(top == -np.inf, 1, weights.sum(axis=0))
    sizes = [
        np.where(some[..., None], np.abs(np.asarray(y).astype(np.float64)), 0)
        for (y, _), some in zip(parts, seen, strict=True)
    ]
    off = (weights * below).sum(axis=0)  # what the sum of weights is off by
    floor = sum(
        (weight * (3 * (below_one + off) + 4 + 2 * len(parts)))[..., None] * size
        for weight, below_one, size in zip(weights, below, sizes, strict=True)
    )
    floor = eps * (floor + float(np.finfo(arithmetic(dtype)).tiny) * sum(sizes))
    if dtype.name in HALF_ROUNDING:
        relative, absolute = HALF_ROUNDING[dtype.name]
        floor = floor * (1 + relative) + relative * np.abs(exact) + absolute
    assert out.dtype == dtype
    assert lse.dtype == arithmetic(dtype)
    check(np.asarray(out).astype(arithmetic(dtype)), exact, plain, floor, "out")
    size = np.where(top == -np.inf, 0, np.abs(top))
    check(lse, exact_lse, plain_lse, eps * (size + 3 * off + 2 + len(parts)), "lse")


def check(got, exact, plain, floor, what="result"):
    """Each error at most twice the largest of the plain evaluation's row (last axis), and floor."""
    assert got.shape == exact.shape, f"{what}: shape {got.shape}, expected {exact.shape}"
    if not got.size:
        return
    with np.errstate(over="ignore"):
        rounded = exact.astype(got.dtype)
    infinite = ~np.isfinite(rounded)
    assert np.array_equal(got[infinite], rounded[infinite], equal_nan=True), (
        f"{what}: not infinite, or not NaN, where it should be"
    )
    finite = np.where(infinite, 0, exact)
    error = np.abs(np.where(infinite, 0, got) - finite)
    plain_error = np.abs(np.where(infinite, 0, plain) - finite)
    if got.ndim:
        plain_error = plain_error.max(axis=-1, keepdims=True)
    excess = np.where(infinite, 0, error - (2 * plain_error + floor))
    assert not np.isnan(error).any(), f"{what}: NaN"
    worst = np.unravel_index(np.argmax(excess), excess.shape)
    assert excess[worst] <= 0, (
        f"{what}{list(map(int, worst))} has error {float(error[worst]):.3g}; a plain evaluation "
        f"has {float(np.broadcast_to(plain_error, error.shape)[worst]):.3g}, rounding explains "
        f"{float(np.broadcast_to(floor, error.shape)[worst]):.3g}"
    )


# ------------------------------------------------------------------ norms and the block


def layer_norm(s, weight, bias, eps, precision, subtract_mean=True):
    """LayerNorm of s over its last axis, in two passes, and a third for the mean's own rounding.

    Without the mean, RMSNorm.
    """
    d = np.asarray(s).astype(precision)
    if subtract_mean:
        d = d - d.mean(axis=-1, keepdims=True)
        d = d - d.mean(axis=-1, keepdims=True)
    y = d / np.sqrt((d * d).mean(axis=-1, keepdims=True) + precision(eps))
    y = y if weight is None else y * weight.astype(precision)
    return y if bias is None else y + bias.astype(precision)


def layer_norm_floor(s, weight, bias, eps, dtype, subtract_mean=True):
    """What rounding s itself to dtype, and D additions, may do to each row of the result.

    An error of one eps in an entry of s is multiplied by weight / deviation.
    """
    s = np.asarray(s, np.float64)
    D = s.shape[-1]
    unit = float(np.finfo(dtype).eps)
    d = s - s.mean(axis=-1, keepdims=True) if subtract_mean else s
    deviation = np.sqrt((d * d).mean(axis=-1, keepdims=True) + eps)
    w = 1.0 if weight is None else np.abs(weight).max()
    y = np.abs(d).max(axis=-1, keepdims=True) / deviation * w
    size = np.abs(s).max(axis=-1, keepdims=True) / deviation * w
    b = 0.0 if bias is None else np.abs(bias).max()
    return unit * (2 * size + (4 + np.sqrt(D)) * y + b)


def check_norm(got, x, residual=None, weight=None, bias=None, eps=1e-5, subtract_mean=True):
    """Refuses a norm whose error rounding does not explain."""
    dtype = x.dtype
    s = x if residual is None else x + residual
    exact, plain = (
        layer_norm(s, weight, bias, eps, p, subtract_mean) for p in (higher(dtype), dtype.type)
    )
    assert got.dtype == dtype
    check(got, exact, plain, layer_norm_floor(s, weight, bias, eps, dtype, subtract_mean), "norm")


def block(
    x, w_q, w_k, w_v, w_o, precision, *, context=None, b_q=None, b_k=None, b_v=None, b_o=None,
    norm=None, norm_position="post", residual=True, q_norm=None, k_norm=None, rope=None, off=None,
    **options,
):  # fmt: skip
    """The attention block in `precision`; a norm is (weight, bias, eps), or None.

    A fourth part of a norm says whether the mean is subtracted.

    `off` is called with each intermediate result and how many units of rounding it may be off by,
    beside its own; it returns what to go on with.
    """

    def product(a, w, bias, axes=1):
        a, w = a.astype(precision), w.astype(precision)
        y = np.tensordot(a, w, axes)
        y = y if bias is None else y + bias.astype(precision)
        if off is None:
            return y
        return off(y, np.sqrt(np.prod(w.shape[:axes]) * np.tensordot(a**2, w**2, axes)))

    def normalise(a, norm):
        if norm is None:
            return a
        y = layer_norm(a, *norm[:3], precision, *norm[3:])
        if off is None:
            return y
        floor = layer_norm_floor(a, *norm[:3], precision, *norm[3:])
        return off(y, floor / float(np.finfo(precision).eps))

    def rotate(a, position):
        if rope is None:
            return a
        y = rotation(a, position, rope, precision)
        return y if off is None else off(y, 2 * pair_lengths(a, rope))

    pre_norm, post_norm = (norm, None) if norm_position == "pre" else (None, norm)
    if norm_position is None:
        post_norm = None
    source = normalise(x.astype(precision), pre_norm)
    q = normalise(product(source, w_q, b_q), q_norm)
    source = source if context is None else context
    k, v = normalise(product(source, w_k, b_k), k_norm), product(source, w_v, b_v)
    q = rotate(q, positions(*q.shape[:2], options.get("query_offset")))
    k = rotate(k, positions(*k.shape[:2], None))
    y = evaluate(q, k, v, precision, **options).out.swapaxes(1, 2)
    if off is not None:
        floor, _ = attention_floor.__wrapped__(q, k, v, precision, **options)
        y = off(y, floor[..., None] / float(np.finfo(precision).eps))
    z = product(y, w_o, b_o, axes=2)
    z = x.astype(precision) + z if residual else z
    z = z if off is None else off(z, 0)
    return z if post_norm is None else layer_norm(z, *norm[:3], precision, *norm[3:])


remember_block = remember(block)


@remember
def block_floor(x, w_q, w_k, w_v, w_o, dtype, **options):
    """What rounding to dtype may cost each row of a block, [B, T, 1]: the worst of 8 experiments.

    In each, every intermediate result is off by up to eps of itself and by what its sums lose, at
    random: so errors grow and cancel as they do in truth.
    """
    rng = np.random.default_rng(0)
    eps = float(np.finfo(dtype).eps)

    def off(y, units):
        return y + eps * (np.abs(y) + units) * rng.uniform(-1, 1, y.shape)

    weights = (w_q, w_k, w_v, w_o)
    exact = block(x, *weights, np.float64, **options)
    worst = np.zeros((*exact.shape[:2], 1))
    for _ in range(8):
        error = np.abs(block(x, *weights, np.float64, off=off, **options) - exact)
        worst = np.maximum(worst, error.max(axis=-1, keepdims=True, initial=0))
    norm = options.get("norm")
    if norm is None or options.get("norm_position", "post") != "post":
        return worst
    before = block(x, *weights, np.float64, **{**options, "norm": None})
    return worst + layer_norm_floor(before, *norm[:3], dtype, *norm[3:])


def check_block(got, x, w_q, w_k, w_v, w_o, **options):
    """Refuses a block's result whose error rounding does not explain."""
    dtype = x.dtype
    assert got.dtype == dtype
    if x.ndim == 2:
        x, got = x[None], got[None]
        if options.get("context") is not None:
            options = {**options, "context": options["context"][None]}
    weights = (w_q, w_k, w_v, w_o)
    exact, plain = (remember_block(x, *weights, p, **options) for p in (higher(dtype), dtype.type))
    check(got, exact, plain, block_floor(x, *weights, dtype, **options), "block")


# ------------------------------------------------------------------ rotary position embedding


def as_pairs(x, pairs, interleaved):
    """Columns [..., 2 * pairs] of x as complex numbers [..., pairs]; x is float64 or longdouble."""
    x = x[..., : 2 * pairs]
    real, imaginary = (
        (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :pairs], x[..., pairs:])
    )
    return real + 1j * imaginary


def pair_lengths(x, rope):
    """[..., H]: how long the pair of each column of x is; of a column without one, 0."""
    R = x.shape[-1] if rope.rotary_dim is None else rope.rotary_dim
    lengths = np.abs(as_pairs(x, R // 2, rope.interleaved))
    lengths = np.repeat(lengths, 2, -1) if rope.interleaved else np.concatenate([lengths] * 2, -1)
    return np.pad(lengths, [(0, 0)] * (x.ndim - 1) + [(0, x.shape[-1] - R)])


def rotation(x, position, rope, precision):
    """Heads x[..., T, N, H] turned by their positions[..., T]; angles are float64, as promised."""
    angle = (position[..., None, None] * rope.frequencies(x.shape[-1])).astype(
        np.longdouble if precision == np.longdouble else np.float64
    )
    factor = 1.0 if rope.scaling is None else rope.scaling.attention_factor
    turn = factor * np.cos(angle) + 1j * (factor * np.sin(angle))
    cos, sin = turn.real.astype(precision), turn.imag.astype(precision)
    pairs = angle.shape[-1]
    first, second = (
        (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2))
        if rope.interleaved
        else (slice(pairs), slice(pairs, 2 * pairs))
    )
    y = x.astype(precision)
    a, b = y[..., first].copy(), y[..., second].copy()
    y[..., first], y[..., second] = a * cos - b * sin, b * cos + a * sin
    return y


def check_rotation(got, x, cos, sin, interleaved, off=0.0):
    """Refuses rotated heads [..., H] whose error rounding does not explain.

    A part of a pair is a cos - b sin, or b cos + a sin: cos and sin are rounded (and may be off by
    `off` besides), then the products, then their sum. Each costs at most half an eps of |a| |cos| +
    |b| |sin|, and that is at most the length of the pair; or half of the least number. Other
    columns stay as they are.
    """
    precision = higher(x.dtype)
    pairs = np.shape(cos)[-1]
    turn = np.asarray(cos, precision) + 1j * np.asarray(sin, precision)
    before = as_pairs(x.astype(precision), pairs, interleaved)
    error = np.abs(as_pairs(got.astype(precision), pairs, interleaved) - before * turn)
    eps = float(np.finfo(x.dtype).eps)
    assert got.dtype == x.dtype
    assert got.shape == x.shape
    least = float(np.finfo(x.dtype).smallest_subnormal) * (2 + np.abs(before))
    # Both parts of a pair may be off at once.
    allowed = np.sqrt(2) * ((1.5 * eps + off) * np.abs(before) * np.abs(turn) + least)
    assert (error <= allowed).all(), f"is off by {error.max(initial=0):.3g}"
    assert same_bits(got[..., 2 * pairs :], x[..., 2 * pairs :], nan_equal=True)


# ------------------------------------------------------------------ arrays


def random(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


class Guarded:
    """An array inside memory that holds a pattern, to see what else was written."""

    def __init__(self, shape, dtype, fill=np.nan, row_gap=0):
        shape = (shape,) if np.isscalar(shape) else tuple(shape)
        width = shape[-1] + row_gap
        size = int(np.prod(shape[:-1])) * width
        self.memory = np.full(size + 2 * GUARD, 1.2345678, dtype)
        inner = self.memory[GUARD : GUARD + size].reshape(*shape[:-1], width)
        self.array = inner[..., : shape[-1]]
        self.array[...] = fill
        outside = np.ones(self.memory.shape, bool)
        outside[GUARD : GUARD + size].reshape(*shape[:-1], width)[..., : shape[-1]] = False
        self._outside = outside

    def check(self, slack=0):
        """Nothing around the array was written, but for `slack` elements right behind it."""
        touched = np.flatnonzero(self._outside & (self.memory != self.memory.dtype.type(1.2345678)))
        end = len(self.memory) - GUARD
        touched = [i for i in touched if not end <= i < end + slack]
        assert not touched, f"written at {[int(i) - GUARD for i in touched]}"


def _inside(a, *axes):
    """a in the middle of a larger array of NaN, at every second place along each of its axes."""
    big = np.full([2 * n + 1 if axes[i] else n for i, n in enumerate(a.shape)], np.nan, a.dtype)
    view = big[tuple(slice(1, None, 2) if axis else slice(None) for axis in axes)]
    view[...] = a
    return view


def _columns(a):
    wide = np.full((*a.shape[:-1], a.shape[-1] + 3), np.nan, a.dtype)
    wide[..., 1:-2] = a
    return wide[..., 1:-2]


def _unaligned(a):
    view = np.zeros(a.nbytes + 1, np.uint8)[1:].view(a.dtype).reshape(a.shape)
    view[...] = a
    return view


def _field(a):
    record = np.zeros(a.shape, np.dtype([("x", "u1"), ("y", a.dtype)]))
    record["y"] = a
    return record["y"]


def _read_only(a):
    a = a.copy()
    a.flags.writeable = False
    return a


# Views that equal an array of at least two axes. What lies around them is NaN.
LAYOUTS = {
    "contiguous": np.copy,
    "Fortran": np.asfortranarray,
    "heads first": lambda a: np.swapaxes(np.swapaxes(a, -3, -2).copy(), -3, -2),
    "last axis first": lambda a: np.moveaxis(np.moveaxis(a, -1, 0).copy(), 0, -1),
    "all axes reversed": lambda a: np.flip(np.flip(a).copy()),
    "last axis reversed": lambda a: a[..., ::-1].copy()[..., ::-1],
    "every second": lambda a: _inside(a, *[True] * a.ndim),
    "every second of the last axis": lambda a: _inside(a, *[False] * (a.ndim - 1), True),
    "columns of a wider array": _columns,
    "unaligned": _unaligned,
    "field of a packed record": _field,
    "byte-swapped": lambda a: a.astype(a.dtype.newbyteorder("S")),
    "read-only": _read_only,
}
WRITABLE = [name for name in LAYOUTS if name not in ("unaligned", "field of a packed record",
                                                     "byte-swapped", "read-only")]  # fmt: skip


def same_bits(a, b, nan_equal=False):
    """Whether arrays, or sequences of them, are the same to the last bit.

    `nan_equal` takes every NaN for the same: its own bits depend on who meets whom.
    """
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(
            same_bits(x, y, nan_equal) for x, y in zip(a, b, strict=True)
        )
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if nan_equal and a.tobytes() != b.tobytes():
        a, b = (np.where(np.isnan(x), np.array(np.nan, x.dtype), x) for x in (a, b))
    return a.tobytes() == b.tobytes()


# ------------------------------------------------------------------ a cache


def poison(cache):
    """Memory of a cache that is not in use may hold anything."""
    is_int8 = cache.dtype == np.int8
    cache._keys[...] = cache._values[...] = 99 if is_int8 else np.nan
    if is_int8:
        cache._key_scales.base[...] = cache._value_scales.base[...] = np.nan


def quantized(rows):
    """Rows [..., H] as int8 and a float32 scale each, as a cache of int8 is to keep them."""
    rows = np.asarray(rows, np.float32)
    size = np.abs(rows).max(axis=-1)
    least, top = np.finfo(np.float32).smallest_normal, np.finfo(np.float32).max
    scale = np.maximum(size / np.float32(127), least)
    with np.errstate(all="ignore"):
        scale = np.where(scale * np.float32(127) > top, np.nextafter(scale, np.float32(0)), scale)
        scale = np.where(np.isfinite(size), scale, np.float32(np.nan))
        scale = np.where(size == 0, np.float32(0), scale)
        values = np.where(scale[..., None] > 0, np.rint(rows / scale[..., None]), 0)
    return values.astype(np.int8), scale


def stored(rows, dtype):
    """What attention makes of rows in a cache of that dtype, in the type it is computed in."""
    if np.dtype(dtype) == np.int8:
        values, scales = quantized(rows)
        return values * scales[..., None]
    return rows.astype(dtype).astype(arithmetic(dtype))


def contents(cache):
    """The keys and the values that attention sees, [B, slots, K, ...]."""
    if cache.dtype != np.int8:
        return cache.keys.copy(), cache.values.copy()
    with np.errstate(invalid="ignore"):
        return (
            cache.keys * cache.key_scales[..., None],
            cache.values * cache.value_scales[..., None],
        )


def refused(cache, error, call, *words):
    """The call raises the error, whose message has the words, and leaves the cache as it was."""

    def state():
        return [a.tobytes() for a in (cache.lengths, cache._longest, *cache._arrays())]

    before, message = state(), None
    try:
        call()
    except error as caught:
        message = str(caught)
    assert message is not None, f"no {error.__name__}"
    for word in words:
        assert word in message, message
    assert state() == before
