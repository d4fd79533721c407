"""What options do to scores: in the kernels that weigh, and those that look at masks and values."""

import ctypes
from ctypes import byref, c_ssize_t

import numpy as np
import pytest

from tests.kernels.kernels import ScoreOptions, ScoreRow, address
from tests.kernels.test_attention import both, weigh
from tests.oracle import HALVES, Guarded, random, same_bits

LOG2_E = np.longdouble(np.log2(np.exp(np.longdouble(1))))
STORAGES = {np.dtype(dtype).name: i + 1 for i, dtype in enumerate(reversed(HALVES))}


def strided(a, stride):
    """a with that stride along its last axis, in memory that is NaN or 1 elsewhere."""
    if stride == 0:
        assert (a == a[..., :1]).all()
        return np.broadcast_to(a[..., :1].copy(), a.shape)
    wide = np.full((*a.shape[:-1], (a.shape[-1] - 1) * abs(stride) + 1), 1).astype(a.dtype)
    wide[..., :: abs(stride)] = a
    view = wide[..., :: abs(stride)]
    if stride < 0:
        wide[..., :: abs(stride)] = a[..., ::-1]
        view = view[..., ::-1]
    return view


class Options:
    """The options of a tile's rows, for weigh(); bias and mask are [rows, positions]."""

    def __init__(
        self,
        kernels,
        rows,
        *,
        softcap=0,
        bias=None,
        mask=None,
        slopes=0,
        positions=0,
        key_bias=None,
    ):
        self.kept = bias, mask, key_bias
        self.options = ScoreOptions(softcap=float(softcap), key_bias=address(key_bias))
        if bias is not None:
            other = kernels.dtype.itemsize == 12 - bias.itemsize
            self.options.bias_storage = STORAGES.get(bias.dtype.name, 3 if other else 0)
            self.options.bias_stride = bias.strides[1] // bias.itemsize
        if mask is not None:
            self.options.mask_stride = mask.strides[1]
        slopes, positions = (np.broadcast_to(a, rows).tolist() for a in (slopes, positions))
        self.rows = (ScoreRow * (2 * rows))(
            *(
                ScoreRow(
                    None if bias is None else address(bias[i]),
                    None if mask is None else address(mask[i]),
                    slopes[i],
                    positions[i],
                )
                for i in range(rows)
            )
        )

    def fields(self, rows=True):
        fields = {"options": ctypes.addressof(self.options)}
        return fields | ({"score_rows": ctypes.addressof(self.rows)} if rows else {})


def check_weights(kernels, got, scores, size, row_max):
    """2^(scores - row_max), where a score may be off by some units of rounding of `size`."""
    eps = float(np.finfo(kernels.dtype).eps)
    exact = np.exp2(scores - np.asarray(row_max)[:, None])
    error = np.abs(got.weights[:, : scores.shape[1]] - exact)
    assert (
        error <= exact * (4 * eps * size + 1e-7 * (kernels.dtype == np.float32) + 4 * eps)
    ).all()
    assert (got.weights[:, : scores.shape[1]][exact == 0] == 0).all()


@both
def test_bias_and_mask_of_any_type_and_stride(kernels, kernel):
    for rows in {1, 3, kernels.attention_mr}:
        for keys in (1, kernels.attention_nr, 3 * kernels.attention_nr - 1):
            key_start, H = 7, kernels.vl
            q, k = random(1, rows, H, dtype=kernels.dtype), random(2, keys, H, dtype=kernels.dtype)
            row_max = np.full(rows, 20.0)
            products = q.astype(np.longdouble) @ k.T.astype(np.longdouble)
            rng = np.random.default_rng(rows)
            for dtype in (np.float32, np.float64, *HALVES):
                for stride in (1, 0, 3, -1):
                    bias = rng.standard_normal((rows, key_start + keys))
                    bias[rng.random(bias.shape) < 0.3] = -np.inf
                    mask = rng.random(bias.shape) < 0.7
                    if stride == 0:
                        bias, mask = (np.repeat(a[:, :1], a.shape[1], axis=1) for a in (bias, mask))
                    bias, mask = strided(bias.astype(dtype), stride), strided(mask, stride)
                    for use_bias, use_mask in ((1, 0), (0, 1), (1, 1)):
                        given = {"bias": bias} if use_bias else {}
                        given |= {"mask": mask} if use_mask else {}
                        options = Options(kernels, rows, **given)
                        got = weigh(
                            kernels, q, k, row_max, kernel=kernel, key_start=key_start,
                            **options.fields(),
                        )  # fmt: skip
                        scores = products.copy()
                        if use_bias:
                            scores += bias[:, key_start:].astype(np.longdouble) * LOG2_E
                        if use_mask:
                            scores[~mask[:, key_start:]] = -np.inf
                        check_weights(kernels, got, scores, 20 + H, row_max)


@both
def test_hidden_keys_may_hold_anything(kernels, kernel):
    rows, keys = 3, 2 * kernels.attention_nr - 3
    q, k = random(1, rows, 8, dtype=kernels.dtype), random(2, keys, 8, dtype=kernels.dtype)
    hidden = np.random.default_rng(0).random(keys) < 0.5
    hidden[0] = False
    key_bias = np.zeros(2 * kernels.attention_nr, kernels.dtype)
    key_bias[:keys][hidden] = -np.inf
    bias = np.repeat(key_bias[None, :keys], rows, axis=0)
    options = [Options(kernels, rows, key_bias=key_bias), Options(kernels, rows, bias=bias)]
    options += [Options(kernels, rows, mask=bias == 0, softcap=cap) for cap in (0, 5)]
    ways = [option.fields(rows=i > 0) for i, option in enumerate(options)]
    for fields in ways:
        clean = weigh(kernels, q, k, kernel=kernel, **fields)
        assert (clean.weights[:, :keys][:, hidden] == 0).all()
        assert (clean.weights[:, :keys][:, ~hidden] > 0).all()
        for bad in (np.nan, np.inf, -np.inf, 3e38):
            dirty = k.copy()
            dirty[hidden] = bad
            got = weigh(kernels, q, dirty, kernel=kernel, **fields)
            for a, b in zip(got, clean, strict=True):
                assert same_bits(a, b)


@both
def test_slopes_count_from_the_rows_positions(kernels, kernel):
    rows, keys = 3, 2 * kernels.attention_nr
    q, k = random(1, rows, 8, dtype=kernels.dtype), random(2, keys, 8, dtype=kernels.dtype)
    products = q.astype(np.longdouble) @ k.T.astype(np.longdouble)
    for positions in ([0, 5, keys], [-3, 100, 1000], [2**40, -(2**40), 2**60]):
        far = np.abs(np.array(positions, np.longdouble)[:, None] - np.arange(keys))
        slopes = np.array([0.5, -0.25, 0.125]) * 30 / far.max(axis=1).astype(float)
        scores = products - slopes[:, None].astype(np.longdouble) * far
        options = Options(kernels, rows, slopes=slopes, positions=positions)
        row_max = scores.max(axis=1).astype(kernels.dtype)
        got = weigh(kernels, q, k, row_max, kernel=kernel, **options.fields())
        check_weights(kernels, got, scores, 100, row_max)


@both
def test_error_of_a_capped_score(kernels, kernel):
    """A row that sees one key has its score as the maximum: cap * tanh(score / cap)."""
    eps = float(np.finfo(kernels.dtype).eps)
    bound = (4e-7 if kernels.dtype == np.float32 else 6e-16) + 2 * eps
    x = np.concatenate([np.geomspace(1e-30, 50, 2000), np.linspace(0.6, 0.65, 200), [1e30, np.inf]])
    x = np.concatenate([x, -x, [0]])
    for cap in (1.0, 3.0, 1e-20, 1e20):
        with np.errstate(over="ignore", under="ignore"):
            scores = (x * cap).astype(kernels.dtype)
        got = np.empty_like(scores)
        for i in range(0, len(x), 2):
            q = np.zeros((len(scores[i : i + 2]), 2))
            q[:, 0] = scores[i : i + 2]
            options = Options(kernels, len(q), softcap=cap)
            row_max = weigh(kernels, q, [[1, 0]], kernel=kernel, **options.fields()).row_max
            got[i : i + 2] = row_max
        exact = np.longdouble(cap) * np.tanh(scores.astype(np.longdouble) / np.longdouble(cap))
        finite = np.isfinite(scores)  # inf * 0 is NaN in the other place of the head
        assert (np.abs(got - exact)[finite] <= (bound * np.abs(exact))[finite]).all()
        assert (np.abs(got[finite]) <= cap * (1 + 2 * eps)).all()


def test_a_sink_is_a_score_without_a_value(kernels):
    out, row_sum = np.ones(kernels.vl, kernels.dtype), np.ones(kernels.vl, kernels.dtype)
    row_max = np.zeros(1, kernels.dtype)
    for sink in (0.0, -3.5, 100.0, -np.inf, -1e400):
        kernels.start_row(address(out), kernels.vl, address(row_max), address(row_sum), sink)
        assert not out.any()
        assert row_max == sink
        np.testing.assert_array_equal(row_sum, [sink > -np.inf] + [0] * (kernels.vl - 1))


def test_options_of_keys_narrow_their_range(kernels):
    nr = kernels.attention_nr
    rng = np.random.default_rng(0)
    for begin, end, first, last, holes in (
        (0, 3 * nr, 0, 3 * nr, 0), (1, 3 * nr - 1, nr + 2, 2 * nr - 1, 0), (3, 7, 5, 5, 0),
        (0, 2 * nr + 1, 2, 2 * nr, 0.5), (nr - 1, nr + 1, nr, nr + 1, 0),
    ):  # fmt: skip
        for with_bias in (False, True):
            key_start = 11
            mask = np.zeros((1, key_start + 3 * nr), bool)
            inside = rng.random(last - first) >= holes
            if len(inside):
                inside[[0, -1]] = True
            mask[0, key_start + first : key_start + last] = inside
            bias = rng.standard_normal(mask.shape).astype(kernels.dtype) if with_bias else None
            key_bias = Guarded(-(-end // nr) * nr, kernels.dtype)
            options = Options(kernels, 1, mask=mask, bias=bias)
            b, e = c_ssize_t(begin), c_ssize_t(end)
            some = kernels.load_key_options(
                address(key_bias.array), byref(options.options), options.rows, key_start, byref(b),
                byref(e),
            )  # fmt: skip
            key_bias.check()
            assert e.value - b.value == last - first
            if first == last:
                assert not some
                continue
            assert (b.value, e.value) == (first, last)
            assert bool(some) == (with_bias or not inside.all())
            got = key_bias.array[first:last]
            np.testing.assert_array_equal(got == -np.inf, ~inside)
            if with_bias:
                expected = bias[0, key_start + first : key_start + last][inside]
                np.testing.assert_array_equal(got[inside], expected)


def test_tiles_narrow_to_what_a_row_sees(kernels):
    nr = kernels.attention_nr
    for keys in (1, nr, nr + 1, 4 * nr - 1):
        for seen in ([], [0], [keys - 1], [keys // 2], [keys // 3, keys // 2]):
            mask = np.zeros((2, keys), bool)
            mask[1, seen] = True
            bias = np.where(mask, 0, -np.inf).astype(kernels.dtype)
            for given in ({"mask": mask}, {"bias": bias}):
                options = Options(kernels, 2, **given)
                tile = kernels.attention_tile(
                    rows=2, key_start=0, key_begin=0, key_end=keys, **options.fields()
                )
                kernels.trim_tile(tile)
                begin, end = tile._obj.key_begin, tile._obj.key_end
                if not seen:
                    assert begin >= end
                    continue
                assert begin == min(seen) // nr * nr
                assert end == min(max(seen) // nr * nr + nr, keys)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_reach_the_rows_that_see_them(kernels, bad):
    vl, keys, rows = kernels.vl, 6, 3
    v = random(0, keys, 2 * vl, dtype=kernels.dtype)
    dirty = v.copy()
    dirty[1, vl], dirty[4, 0], dirty[5, 1] = bad, bad, bad
    copy = Guarded((keys, 2 * vl), kernels.dtype)
    kernels.copy_finite(address(copy.array), address(dirty), keys, 2 * vl, 2 * vl)
    copy.check()
    assert same_bits(copy.array.copy(), np.where(np.isfinite(dirty), dirty, 0))
    mask = np.ones((rows, keys), bool)
    mask[1, 1] = False
    options = Options(kernels, rows, mask=mask)
    first, last = np.array([0, 0, 0]), np.array([6, 6, 4])
    weights = np.ones((rows, kernels.weight_stride), kernels.dtype)
    out = np.zeros((rows, 2 * vl), kernels.dtype)
    tile = kernels.attention_tile(
        rows=rows, v_columns=2 * vl, key_start=0, key_begin=0, key_end=5, first=first, last=last,
        weights=weights, out=out, out_stride=2 * vl, **options.fields(),
    )  # fmt: skip
    kernels.add_strays(tile, address(dirty), 2 * vl)
    expected = np.zeros_like(out)
    expected[[0, 2], vl] = bad
    expected[[0, 1], 0] = bad
    np.testing.assert_array_equal(out, expected)
