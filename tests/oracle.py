"""What the tests compare with: exact results, bounds that follow from them, and awkward arrays.

An operation is right if its error is at most twice that of a plain evaluation in its own precision,
which sums in another order, plus a floor that follows from the sizes: no tolerance is tuned.
"""

import numpy as np

GUARD = 64  # elements on each side of a guarded array


def higher(dtype):
    """A precision in which rounding does not count beside that of dtype."""
    return np.float64 if dtype == np.float32 else np.longdouble


def gamma(n, dtype):
    """Bound of the relative error of a sum of n products in any order: n u / (1 - n u)."""
    u = float(np.finfo(dtype).eps) / 2
    return n * u / (1 - n * u)


# ------------------------------------------------------------------ attention


def visible(B, T, S, *, is_causal=False, query_offset=0, query_lengths=None, key_lengths=None):
    """[B, T, S]: which query sees which key."""
    t, j = np.arange(T)[None, :, None], np.arange(S)[None, None, :]
    offset = np.broadcast_to(0 if query_offset is None else query_offset, B)[:, None, None]
    sees = np.ones((B, T, S), bool)
    if is_causal:
        sees &= j <= t + offset
    if query_lengths is not None:
        sees &= t < np.asarray(query_lengths)[:, None, None]
    if key_lengths is not None:
        sees &= j < np.asarray(key_lengths)[:, None, None]
    return sees


def attention(q, k, v, precision, *, scale=None, query_seq_lengths=None, key_value_seq_lengths=None,
              **causal):  # fmt: skip
    """Attention of 4-D arrays with the whole score matrix -> out, lse, floor, all in `precision`.

    floor[B, T, N] is what rounding alone may cost an output row: eps sqrt(S) for the sum over keys
    and, since an error of a score is a relative error of its weight, 2 eps sqrt(H) sum |q| |k|.
    """
    q, k, v = (np.asarray(x).astype(precision) for x in (q, k, v))
    (B, T, N, H), (_, S, K, Hv) = q.shape, v.shape
    G = N // K if K else 1
    scale = precision(1 / np.sqrt(precision(H)) if scale is None else scale)
    sees = visible(
        B, T, S, query_lengths=query_seq_lengths, key_lengths=key_value_seq_lengths, **causal
    )[:, None]
    out, lse = np.zeros((B, T, N, Hv), precision), np.full((B, T, N), -np.inf, precision)
    floor = np.zeros((B, T, N))
    eps = float(np.finfo(precision).eps)
    if 0 in (B, T, N, S):
        return out, lse, floor
    q_BNTH = q.transpose(0, 2, 1, 3)
    k_BNHS = np.repeat(k, G, axis=2).transpose(0, 2, 3, 1)
    v_BNSH = np.repeat(v, G, axis=2).transpose(0, 2, 1, 3)
    score = np.where(sees, scale * (q_BNTH @ k_BNHS), -np.inf)
    top = score.max(axis=-1, keepdims=True)
    weight = np.exp(score - np.where(top == -np.inf, 0, top))
    total = weight.sum(axis=-1, keepdims=True)
    some = total > 0
    out = np.where(some, weight / np.where(some, total, 1), 0).astype(precision) @ v_BNSH
    with np.errstate(divide="ignore"):
        lse = np.where(some, top + np.log(total), -np.inf)[..., 0]
    size = np.where(sees, abs(scale) * (np.abs(q_BNTH) @ np.abs(k_BNHS)), 0).max(axis=-1)
    largest = np.abs(v_BNSH).max(axis=(2, 3), initial=0)[..., None]
    floor = eps * (np.sqrt(S) + 2 * np.sqrt(H) * size) * largest
    floor_lse = eps * (
        np.sqrt(S) + 2 * np.sqrt(H) * size + np.abs(np.where(np.isfinite(lse), lse, 0))
    )
    swap = (0, 2, 1)
    return (
        out.transpose(0, 2, 1, 3),
        lse.transpose(swap),
        np.stack([floor.transpose(swap), floor_lse.transpose(swap)]).astype(float),
    )


def check_attention(got, q, k, v, **options):
    """Refuses an attention result (out, or out and LSE) whose error rounding does not explain."""
    got, got_lse = got if isinstance(got, tuple) else (got, None)
    q, k, v = (x if x.ndim == 4 else x[None] for x in map(np.asarray, (q, k, v)))
    dtype = q.dtype.newbyteorder("=")
    assert got.dtype == dtype
    exact, exact_lse, _ = attention(q, k, v, higher(dtype), **options)
    plain, plain_lse, (floor, floor_lse) = attention(q, k, v, dtype.type, **options)
    if got.ndim == 3:
        exact, plain = exact[0], plain[0]
        floor, floor_lse, exact_lse, plain_lse = (
            x[0] for x in (floor, floor_lse, exact_lse, plain_lse)
        )
    check(got, exact, plain, floor[..., None], "out")
    if got_lse is not None:
        assert got_lse.dtype == dtype
        check(got_lse, exact_lse, plain_lse, floor_lse, "lse")


def check(got, exact, plain, floor, what="result"):
    """Each error at most twice the largest of the plain evaluation's row (last axis), plus floor."""
    assert got.shape == exact.shape, f"{what}: shape {got.shape}, expected {exact.shape}"
    if not got.size:
        return
    infinite = ~np.isfinite(exact)
    assert np.array_equal(got[infinite], exact[infinite]), (
        f"{what}: not infinite where it should be"
    )
    finite = np.where(infinite, 0, exact)
    error = np.abs(np.where(infinite, 0, got) - finite)
    plain_error = np.abs(np.where(infinite, 0, plain) - finite)
    if got.ndim:
        plain_error = plain_error.max(axis=-1, keepdims=True)
    excess = error - (2 * plain_error + floor)
    assert not np.isnan(error).any(), f"{what}: NaN"
    worst = np.unravel_index(np.argmax(excess), excess.shape)
    assert excess[worst] <= 0, (
        f"{what}{list(map(int, worst))} has error {float(error[worst]):.3g}; a plain evaluation "
        f"has {float(np.broadcast_to(plain_error, error.shape)[worst]):.3g}, rounding explains "
        f"{float(np.broadcast_to(floor, error.shape)[worst]):.3g}"
    )


# ------------------------------------------------------------------ LayerNorm and the block


def layer_norm(s, weight, bias, eps, precision):
    """LayerNorm of s over its last axis, in two passes, and a third for the mean's own rounding."""
    s = np.asarray(s).astype(precision)
    d = s - s.mean(axis=-1, keepdims=True)
    d = d - d.mean(axis=-1, keepdims=True)
    y = d / np.sqrt((d * d).mean(axis=-1, keepdims=True) + precision(eps))
    y = y if weight is None else y * weight.astype(precision)
    return y if bias is None else y + bias.astype(precision)


def layer_norm_floor(s, weight, bias, eps, dtype):
    """What rounding s itself to dtype, and D additions, may do to each row of the result.

    An error of one eps in an entry of s is multiplied by weight / deviation.
    """
    s = np.asarray(s, np.float64)
    D = s.shape[-1]
    unit = float(np.finfo(dtype).eps)
    deviation = np.sqrt(s.var(axis=-1, keepdims=True) + eps)
    w = 1.0 if weight is None else np.abs(weight).max()
    y = np.abs(s - s.mean(axis=-1, keepdims=True)).max(axis=-1, keepdims=True) / deviation * w
    size = np.abs(s).max(axis=-1, keepdims=True) / deviation * w
    b = 0.0 if bias is None else np.abs(bias).max()
    return unit * (2 * size + (4 + np.sqrt(D)) * y + b)


def block(x, w_q, w_k, w_v, w_o, precision, *, context=None, b_q=None, b_k=None, b_v=None, b_o=None,
          norm=None, residual=True, **options):  # fmt: skip
    """The block in `precision`, before the norm and after it; norm is (weight, bias, eps)."""

    def project(source, w, b):
        y = np.tensordot(source.astype(precision), w.astype(precision), axes=1)
        return y if b is None else y + b.astype(precision)

    source = x if context is None else context
    q, k, v = project(x, w_q, b_q), project(source, w_k, b_k), project(source, w_v, b_v)
    y = attention(q, k, v, precision, **options)[0]
    z = np.tensordot(y, w_o.astype(precision), axes=2)
    z = z if b_o is None else z + b_o.astype(precision)
    z = x.astype(precision) + z if residual else z
    return z, z if norm is None else layer_norm(z, *norm, precision)


def check_block(got, x, w_q, w_k, w_v, w_o, **options):
    """Refuses a block's result whose error rounding does not explain.

    Four products one after the other: an error of eps sqrt(D) in q and k is one of the scores, so
    their sizes multiply; the largest entries bound each stage.
    """
    dtype = x.dtype
    assert got.dtype == dtype
    has_batch = x.ndim == 3
    if not has_batch:
        x, got = x[None], got[None]
        if options.get("context") is not None:
            options = {**options, "context": options["context"][None]}
    weights = (w_q, w_k, w_v, w_o)
    before, exact = block(x, *weights, higher(dtype), **options)
    _, plain = block(x, *weights, dtype.type, **options)
    norm = options.get("norm")
    weight, bias, eps = norm if norm is not None else (None, None, 0.0)
    D = x.shape[-1]
    unit = float(np.finfo(dtype).eps) * np.sqrt(D)
    floor = unit * np.abs(before).max(axis=-1, keepdims=True, initial=0)
    if norm is not None:
        floor = np.sqrt(D) * layer_norm_floor(before, weight, bias, eps, dtype)
    check(got, exact, plain, np.asarray(floor, float), "block")


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


def layouts(a):
    """Yields (name, view): a's values in many layouts, with NaN in all memory around them."""
    yield "contiguous", a.copy()
    yield "Fortran", np.asfortranarray(a)
    if a.ndim >= 3:
        yield "heads first", np.swapaxes(np.swapaxes(a, -3, -2).copy(), -3, -2)
    yield "last axis first", np.moveaxis(np.moveaxis(a, -1, 0).copy(), 0, -1)
    backward = (slice(None, None, -1),) * a.ndim
    yield "all reversed", a[backward].copy()[backward]
    yield "last axis reversed", a[..., ::-1].copy()[..., ::-1]
    big = np.full([2 * n + 1 for n in a.shape], np.nan, a.dtype)
    big[(slice(1, None, 2),) * a.ndim] = a
    yield "every second", big[(slice(1, None, 2),) * a.ndim]
    wide = np.full((*a.shape[:-1], a.shape[-1] + 3), np.nan, a.dtype)
    wide[..., 1:-2] = a
    yield "columns of a wider array", wide[..., 1:-2]
    raw = np.zeros(a.nbytes + 1, np.uint8)
    unaligned = raw[1:].view(a.dtype).reshape(a.shape)
    unaligned[...] = a
    yield "unaligned", unaligned
    record = np.zeros(a.shape, np.dtype([("x", "u1"), ("y", a.dtype)]))
    record["y"] = a
    yield "field of a packed record", record["y"]
    yield "byte-swapped", a.astype(a.dtype.newbyteorder("S"))
    read_only = a.copy()
    read_only.flags.writeable = False
    yield "read-only", read_only


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
