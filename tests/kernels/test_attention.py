"""The kernels of attention: weights, values, merging, and all of them over many blocks."""

import itertools
from typing import NamedTuple

import numpy as np
import pytest

from tests.kernels.kernels import address
from tests.kernels.test_pack import pack_columns
from tests.oracle import GUARD, Guarded, gamma, random, same_bits

RAISE = 8  # kernel/attention.inc.h: a maximum is raised for scores more than this above it
GAP = 5  # between rows of queries, keys, weights, values and outputs

both = pytest.mark.parametrize("kernel", ["weigh_tile", "weigh_few"])


# ------------------------------------------------------------------ single kernels on arrays


class Weighed(NamedTuple):
    """What weighing keys leaves behind."""

    weights: np.ndarray  # [rows, keys of whole panels]; NaN where nothing was written
    row_max: np.ndarray  # [rows]
    row_sum: np.ndarray  # [rows, vl]
    out: np.ndarray  # [rows, columns]

    def row(self, i):
        return [np.ascontiguousarray(a[i : i + 1]) for a in self]


def packed_panels(kernels, k, begin, end):
    """Keys as weigh_tile reads them, in panels; NaN for keys outside [begin, end)."""
    (keys, head_dim), nr = k.shape, kernels.attention_nr
    panels = -(-keys // nr)
    padded = np.full((panels * nr, head_dim), np.nan, kernels.dtype)
    padded[begin:end] = k[begin:end]
    return np.ascontiguousarray(padded.reshape(panels, nr, head_dim).swapaxes(1, 2))


def rows_in_place(kernels, k, begin, end, stride):
    """Keys as weigh_few reads them, `stride` elements apart, whole vectors wide; the rest NaN."""
    keys, width = k.shape
    memory = np.full((keys - 1) * abs(stride) + width, np.nan, kernels.dtype)
    place = np.lib.stride_tricks.as_strided(memory, k.shape, (abs(stride) * k.itemsize, k.itemsize))
    place = place[::-1] if stride < 0 else place
    place[begin:end] = k[begin:end]
    return place


def weigh(
    kernels,
    q,
    k,
    row_max=None,
    row_sum=None,
    out=None,
    *,
    kernel="weigh_tile",
    first=None,
    last=None,
    all_sees=None,
    key_start=0,
    key_begin=0,
    key_end=None,
    k_stride=None,
    place=None,
    **ahead,
):
    """weigh_tile or weigh_few of q[rows, head_dim] and k[keys, head_dim] on copies of the state.

    Rows have seen nothing yet unless row_max says otherwise, and see all keys unless first and last
    do. What a kernel must not read is NaN. `place` says where else the keys lie.
    """
    q, k = np.asarray(q, kernels.dtype), np.asarray(k, kernels.dtype)
    rows, keys = len(q), len(k)
    key_end = keys if key_end is None else key_end
    first = np.full(rows, key_start + key_begin) if first is None else np.asarray(first)
    last = np.full(rows, key_start + key_end) if last is None else np.asarray(last)
    all_begin, all_end = (
        (max(first) - key_start, min(last) - key_start) if all_sees is None else all_sees
    )
    if kernel == "weigh_few":
        width = kernels.whole_vectors(q.shape[1])
        q, k = (np.pad(a, ((0, 0), (0, width - a.shape[1]))) for a in (q, k))
        k_stride = width + GAP if k_stride is None else k_stride
        k = rows_in_place(kernels, k, key_begin, key_end, k_stride)
    else:
        k_stride = 0
        k = packed_panels(kernels, k, key_begin, key_end)
    head_dim = q.shape[1]
    queries = np.full((rows, head_dim + GAP), np.nan, kernels.dtype)
    queries[:, :head_dim] = q
    row_max = np.full(rows, -np.inf) if row_max is None else np.asarray(row_max)
    row_sum = np.zeros((rows, kernels.vl)) if row_sum is None else row_sum
    out = np.zeros((rows, kernels.vl)) if out is None else out
    panels = -(-keys // kernels.attention_nr)
    guarded = {
        "weights": weight_rows(kernels, rows, panels * kernels.attention_nr),
        "row_max": Guarded(row_max.shape, kernels.dtype),
        "row_sum": Guarded(row_sum.shape, kernels.dtype),
        "out": Guarded(out.shape, kernels.dtype, row_gap=GAP),
    }
    for name, value in (("row_max", row_max), ("row_sum", row_sum), ("out", out)):
        guarded[name].array[...] = value
    tile = kernels.attention_tile(
        rows=rows,
        head_dim=head_dim,
        v_columns=out.shape[1],
        q=queries,
        q_stride=head_dim + GAP,
        **({"k": k, "k_stride": k_stride} if place is None else place),
        key_start=key_start,
        key_begin=key_begin,
        key_end=key_end,
        all_begin=all_begin,
        all_end=all_end,
        first=first,
        last=last,
        out_stride=out.shape[1] + GAP,
        **{name: g.array for name, g in guarded.items()},
        **ahead,
    )
    getattr(kernels, kernel)(tile)
    for g in guarded.values():
        g.check()
    return Weighed(*(g.array.copy() for g in guarded.values()))


def weight_rows(kernels, rows, keys):
    """Rows of weights as far apart as the kernels have them; one by itself may be longer."""
    gap = kernels.weight_stride - keys
    assert rows == 1 or gap >= 0
    return Guarded((rows, keys), kernels.dtype, row_gap=max(gap, 0))


def operands(scores):
    """q and k whose products are exactly these scores, which may be -inf, inf or NaN too.

    Key j is the unit vector j. Where a score is not finite, its key has inf in one place more, and
    no row's score may be finite there.
    """
    special = np.flatnonzero(~np.isfinite(scores).all(axis=0))
    assert not np.isfinite(scores[:, special]).any()
    q = np.where(np.isfinite(scores), scores, 0)
    factor = np.where(np.isnan(scores), 0, np.sign(scores))[:, special]  # 0 * inf is NaN
    k = np.eye(scores.shape[1])
    infinite = np.zeros((len(k), len(special)))
    infinite[special, np.arange(len(special))] = np.inf
    return np.concatenate([q, factor], axis=1), np.concatenate([k, infinite], axis=1)


def weighed(kernels, scores, row_max=None, row_sum=None, out=None):
    """What the kernels make of scores: exactly that for whole numbers, whose weights are exact.

    A row without a maximum takes its first panel's. Then only a score more than RAISE above it
    raises it, and rescales what the row has summed up, and the weights of the panels before.
    """
    rows, keys = scores.shape
    nr, vl, dtype = kernels.attention_nr, kernels.vl, kernels.dtype
    row_max = np.full(rows, -np.inf) if row_max is None else np.asarray(row_max)
    row_max = row_max.astype(dtype)
    row_sum = np.zeros((rows, vl), dtype) if row_sum is None else row_sum.copy()
    out = np.zeros((rows, vl), dtype) if out is None else out.copy()
    weights = np.full((rows, keys), np.nan, dtype)
    for i, panel in itertools.product(range(rows), range(0, keys, nr)):
        here = slice(panel, panel + nr)
        highest = np.fmax.reduce(scores[i, here])
        if row_max[i] == -np.inf and highest > -np.inf:
            row_max[i] = highest
        elif highest > row_max[i] + RAISE:
            factor = dtype.type(np.exp2(row_max[i] - highest))
            row_max[i] = highest
            for a in (weights[i, :panel], row_sum[i], out[i]):
                a *= factor
        weights[i, here] = np.exp2(scores[i, here] - (0 if row_max[i] == -np.inf else row_max[i]))
        for j in range(panel, panel + nr, vl):
            row_sum[i] += weights[i, j : j + vl]
    return Weighed(weights, row_max, row_sum, out)


def check_exact(kernels, got, expected):
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def values(kernels, weights, v, out, key_begin=0, key_end=None, **ahead):
    """out + weights v for weights[rows, keys], v[keys, columns of whole vectors], as they lie."""
    (rows, keys), columns = weights.shape, v.shape[1]
    target = Guarded(out.shape, kernels.dtype, row_gap=GAP)
    target.array[...] = out
    spread = weight_rows(kernels, rows, keys)
    spread.array[...] = weights
    kernels.value_tile(
        kernels.attention_tile(
            rows=rows,
            v_columns=columns,
            v=v,
            v_stride=v.strides[0] // v.itemsize,
            key_begin=key_begin,
            key_end=keys if key_end is None else key_end,
            weights=spread.array,
            out=target.array,
            out_stride=columns + GAP,
            **ahead,
        )
    )
    target.check()
    return target.array.copy()


def widened(a, gap):
    """a with NaN between its rows."""
    return np.pad(a, ((0, 0), (0, gap)), constant_values=np.nan)[:, : a.shape[1]]


def merge(kernels, state, other):
    """merge_row of (out, row_max, row_sum) of two rows -> the three of their union."""
    guarded = [Guarded(np.size(a), kernels.dtype) for a in state]
    for g, a in zip(guarded, state, strict=True):
        g.array[...] = a
    other = [np.atleast_1d(np.asarray(a, kernels.dtype)) for a in other]
    before = [a.copy() for a in other]
    addresses = [address(g.array) for g in guarded] + [address(a) for a in other]
    kernels.merge_row(*addresses, len(other[0]))
    for g in guarded:
        g.check()
    assert all(same_bits(a, b) for a, b in zip(other, before, strict=True))
    return [g.array.copy() for g in guarded]


def finish(kernels, out, row_max, row_sum, columns, column_stride=1, with_lse=True, dtype=None):
    """finish_row -> result[columns] of dtype (default: the kernels' own), lse."""
    dtype = kernels.dtype if dtype is None else np.dtype(dtype)
    row_max, row_sum = np.array([row_max], kernels.dtype), np.asarray(row_sum, kernels.dtype)
    span = abs(column_stride) * columns
    target = Guarded(span, dtype)
    forward = target.array if column_stride > 0 else target.array[::-1]
    view = forward[:: abs(column_stride)]
    lse = Guarded(1, kernels.dtype)
    kernels.finish_row[dtype](
        address(view),
        column_stride,
        columns,
        address(lse.array) if with_lse else None,
        address(out),
        address(row_max),
        address(row_sum),
    )
    target.check()
    lse.check()
    between = np.ones(span, bool)
    between[:: abs(column_stride)] = False
    assert np.isnan(forward[between]).all()
    return view.copy(), lse.array[0]


def key_counts(kernels):
    nr = kernels.attention_nr
    return sorted({1, nr - 1, nr, nr + 1, 2 * nr, 3 * nr - 1, 67})


def head_dims(kernels, kernel):
    """Of weigh_few whole vectors."""
    return [kernels.vl * n for n in (0, 1, 2, 5)] if kernel == "weigh_few" else [0, 1, 2, 13]


# ------------------------------------------------------------------ weigh_tile and weigh_few


def scores_in_order(kernels, q, k, row_max):
    """q k^T - row_max as weigh_tile sums: from -row_max on, over the head in order."""
    total = np.repeat(-row_max[:, None], len(k), axis=1)
    for h in range(q.shape[1]):
        total = kernels.multiply_add(q[:, h, None], k[:, h], total)
    return total


def scores_by_lanes(kernels, q, k, row_max):
    """q k^T - row_max as weigh_few sums: in each lane in order, then by halves."""
    vl = kernels.vl
    lanes = np.zeros((len(q), len(k), vl), kernels.dtype)
    for h in range(0, q.shape[1], vl):
        lanes = kernels.multiply_add(q[:, None, h : h + vl], k[None, :, h : h + vl], lanes)
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0] - row_max[:, None]


@both
def test_bits_of_the_scores(kernels, kernel):
    """They show in the weights: those of the same scores, had from the model of the sums."""
    model = scores_by_lanes if kernel == "weigh_few" else scores_in_order
    for rows in range(1, kernels.attention_mr + 1):
        for head_dim in head_dims(kernels, kernel):
            for keys in (1, kernels.attention_nr, kernels.attention_nr + 1):
                q = random(0, rows, head_dim, dtype=kernels.dtype) / 4
                k = random(1, keys, head_dim, dtype=kernels.dtype)
                row_max = random(2, rows, dtype=kernels.dtype) + 3
                scores = model(kernels, q, k, row_max)
                got = weigh(kernels, q, k, row_max, kernel=kernel)
                expected = weigh(kernels, *operands(scores), np.zeros(rows), kernel=kernel)
                assert same_bits(got.row_max, row_max)  # no score is so far above it
                assert same_bits(got.weights, expected.weights)
                assert same_bits(got.row_sum, expected.row_sum)


@both
def test_whole_scores_have_exact_weights_and_sums(kernels, kernel):
    for rows in range(1, kernels.attention_mr + 1):
        scores = whole_scores(kernels, rows, 3)
        scores[0, 5] = RAISE  # not above it
        old_sum = random(1, rows, kernels.vl, dtype=kernels.dtype) ** 2
        old_out = random(2, rows, 3 * kernels.vl, dtype=kernels.dtype)
        state = np.zeros(rows), old_sum, old_out
        got = weigh(kernels, *operands(scores), *state, kernel=kernel)
        check_exact(kernels, got, weighed(kernels, scores, *state))
        assert not got.row_max.any()
        assert same_bits(got.out, old_out)
        row_max = np.arange(rows) - 3.0
        again = weigh(
            kernels, *operands(scores + row_max[:, None]), row_max, *state[1:], kernel=kernel
        )
        assert same_bits(again.weights, got.weights)
        assert same_bits(again.row_sum, got.row_sum)
        np.testing.assert_array_equal(again.row_max, row_max)


@both
def test_error_of_the_weights(kernels, kernel):
    eps = float(np.finfo(kernels.dtype).eps)
    for rows in range(1, kernels.attention_mr + 1):
        for keys in key_counts(kernels):
            q = random(keys, rows, 64, dtype=kernels.dtype)
            k = random(rows, keys, 64, dtype=kernels.dtype)
            got = weigh(kernels, q, k, random(2, rows, dtype=kernels.dtype), kernel=kernel)
            exact = q.astype(np.longdouble) @ k.astype(np.longdouble).T - got.row_max[:, None]
            # A sum of 64 products, with the maximum and its rises; 2^x turns its error into a
            # relative one, and has one of less than two units. Raised weights are multiplied twice.
            size = np.abs(q) @ np.abs(k).T + np.abs(got.row_max)[:, None] + 2 * RAISE
            relative = np.expm1(np.log(2) * gamma(64 + 6, kernels.dtype) * size) + 6 * eps
            seen = got.weights[:, :keys]
            tiny = float(np.finfo(kernels.dtype).smallest_normal)
            assert (np.abs(seen - np.exp2(exact)) <= relative * np.exp2(exact) + tiny).all()
            assert not got.weights[:, keys:].any()
            total = seen.astype(np.longdouble).sum(axis=1)
            error = np.abs(got.row_sum.astype(np.longdouble).sum(axis=1) - total)
            assert (error <= gamma(keys + 4, kernels.dtype) * total).all()


@both
def test_a_row_does_not_depend_on_the_rows_beside_it(kernels, kernel):
    """Whether its maximum rises, or it has one yet; whatever set of few rows it comes into."""
    mr, head_dim = kernels.attention_mr, 2 * kernels.vl
    q, k = random(0, mr, head_dim, dtype=kernels.dtype), random(1, 67, head_dim)
    q *= np.geomspace(0.1, 40, mr)[:, None].astype(kernels.dtype)
    row_max = np.where(np.arange(mr) % 3 == 1, -np.inf, 0)
    out = random(2, mr, kernels.vl, dtype=kernels.dtype)
    out[row_max == -np.inf] = 0
    whole = weigh(kernels, q, k, row_max, out=out, kernel=kernel)
    for begin, end in itertools.combinations(range(mr + 1), 2):
        some = slice(begin, end)
        got = weigh(kernels, q[some], k, row_max[some], out=out[some], kernel=kernel)
        for a, b in zip(got, whole, strict=True):
            assert same_bits(a, b[some])


@both
@pytest.mark.parametrize("key_start", [0, 512, 1 << 40])
def test_keys_outside_first_and_last_weigh_nothing(kernels, kernel, key_start):
    mr, keys = kernels.attention_mr, 3 * kernels.attention_nr - 2
    scores = whole_scores(kernels, mr, 3)
    position = key_start + np.arange(scores.shape[1])
    q, k = operands(scores[:, :keys])
    rng = np.random.default_rng(3)
    for _ in range(50):
        # Anywhere: before the block, inside it, empty.
        first = key_start + rng.integers(-2 * keys, 2 * keys, mr)
        last = key_start + np.minimum(rng.integers(-2 * keys, 2 * keys, mr), keys)
        for row_max in (None, np.zeros(mr)):
            got = weigh(
                kernels, q, k, row_max, first=first, last=last, key_start=key_start, kernel=kernel
            )
            sees = (first[:, None] <= position) & (position < last[:, None])
            hidden = np.where(sees, scores, -np.inf)
            check_exact(kernels, got, weighed(kernels, hidden, row_max))


@both
def test_positions_far_beyond_a_lane_hide_or_show_whole_rows(kernels, kernel):
    scores = whole_scores(kernels, 1, 2)
    q, k = operands(scores)
    plain = weigh(kernels, q, k, [0], kernel=kernel).weights
    far = 1 << 62
    for first, last, sees in ((-far, far, True), (far, far + 1, False), (-far, -far + 1, False)):
        got = weigh(kernels, q, k, [0], first=[first], last=[last], all_sees=(0, 0), kernel=kernel)
        assert same_bits(got.weights, plain) if sees else not got.weights.any()


@both
def test_key_ranges_that_begin_and_end_inside_panels(kernels, kernel):
    """Only their panels are written, and keys outside, all NaN here, leave no trace."""
    nr = kernels.attention_nr
    scores = whole_scores(kernels, 3, 4)
    q, k = operands(scores)
    for begin, end in ((0, 1), (nr - 1, nr + 1), (nr + 1, 3 * nr - 1), (nr, 2 * nr), (5, 4 * nr)):
        first, last = [begin, begin + 1, begin], [end, end, max(end - 1, begin)]
        got = weigh(
            kernels, q, k, first=first, last=last, key_begin=begin, key_end=end, kernel=kernel
        )
        panels = slice(begin // nr * nr, -(-end // nr) * nr)
        j = np.arange(4 * nr)
        sees = (np.array(first)[:, None] <= j) & (j < np.array(last)[:, None])
        expected = weighed(kernels, np.where(sees, scores, -np.inf)[:, panels])
        check_exact(kernels, (got.weights[:, panels], *got[1:]), expected)
        outside = np.ones(4 * nr, bool)
        outside[panels] = False
        assert np.isnan(got.weights[:, outside]).all()


def test_few_rows_read_no_key_outside_the_range(kernels):
    """Where nothing is hidden, lanes outside it show what was read: its first or last key."""
    nr = kernels.attention_nr
    scores = whole_scores(kernels, kernels.attention_mr, 2)
    q, k = operands(scores)
    for begin, end in ((0, 1), (3, 4), (nr - 1, nr + 1), (nr + 1, 2 * nr - 1)):
        got = weigh(
            kernels,
            q,
            k,
            np.zeros(len(q)),
            key_begin=begin,
            key_end=end,
            all_sees=(-nr, 3 * nr),
            kernel="weigh_few",
        )
        panels = np.arange(begin // nr * nr, -(-end // nr) * nr)
        expected = np.exp2(scores[:, np.clip(panels, begin, end - 1)])
        np.testing.assert_array_equal(got.weights[:, panels], expected)


def test_few_rows_take_keys_at_any_stride(kernels):
    width, keys = 2 * kernels.vl, kernels.attention_nr + 3
    q, k = (random(i, n, width, dtype=kernels.dtype) for i, n in enumerate((3, keys)))
    packed = weigh(kernels, q, k, kernel="weigh_few", k_stride=width)
    for stride in (width + 1, 3 * width, -width, -width - 7):
        got = weigh(kernels, q, k, kernel="weigh_few", k_stride=stride)
        for a, b in zip(got, packed, strict=True):
            assert same_bits(a, b)
    k[:] = k[:1]  # one key for all
    same = weigh(kernels, q, k, kernel="weigh_few", k_stride=0)
    assert same_bits(same.weights, weigh(kernels, q, k, kernel="weigh_few").weights)


@pytest.mark.parametrize("next_stride", [0, 1, -1000, 1 << 20])
def test_what_is_fetched_ahead_changes_no_bit_and_is_not_read(kernels, next_stride):
    """Not even where there is no memory."""
    scores = whole_scores(kernels, kernels.attention_mr, 2)
    q, k = operands(scores)
    ahead = {"next": 8, "next_stride": next_stride}
    plain = weigh(kernels, q, k, kernel="weigh_few")
    got = weigh(kernels, q, k, kernel="weigh_few", **ahead)
    for a, b in zip(got, plain, strict=True):
        assert same_bits(a, b)
    for rows in range(1, len(q) + 1):
        for columns in column_counts(kernels):
            weights = plain.weights[:rows]
            v = random(1, weights.shape[1], columns, dtype=kernels.dtype)
            out = random(2, rows, columns, dtype=kernels.dtype)
            expected = values(kernels, weights, v, out)
            assert same_bits(values(kernels, weights, v, out, **ahead), expected)


# ------------------------------------------------------------------ maxima


def whole_scores(kernels, rows, panels, seed=0):
    """Whole numbers in [-20, RAISE]: powers of two, so that weights and sums are exact."""
    keys = panels * kernels.attention_nr
    return np.random.default_rng(seed).integers(-20, RAISE + 1, (rows, keys)).astype(kernels.dtype)


@both
def test_the_first_panel_sets_the_maximum(kernels, kernel):
    scores = whole_scores(kernels, 4, 2)
    scores[1] -= 1000
    scores[2] += 100
    scores[3, : kernels.attention_nr] = 0
    got = weigh(kernels, *operands(scores), kernel=kernel)
    check_exact(kernels, got, weighed(kernels, scores))
    of_panel = scores[:, : kernels.attention_nr].max(axis=1)
    # None of them is raised in the second panel.
    assert same_bits(got.row_max, of_panel)


@both
@pytest.mark.parametrize("hidden", [0, 1])
def test_kept_maxima_stay_whatever_the_scores(kernels, kernel, hidden):
    """Weights are powers of two: beside those that overflow, and up to the range's end."""
    nr, top = kernels.attention_nr, np.finfo(kernels.dtype).maxexp
    scores = whole_scores(kernels, 4, 2)
    scores[:, nr + 1] = [top - 1, top, 1e4, 3 * top - 1]
    scores[0, 2] = top - 2
    row_max = np.array([0, -20, 4, 2 * top], kernels.dtype)
    last = [2 * nr - hidden] * 4  # whether a panel takes its scores from memory changes no bit
    got = weigh(kernels, *operands(scores), row_max, last=last, kernel=kernel, keeps_max=1)
    with np.errstate(over="ignore", under="ignore"):
        one = kernels.dtype.type(1)
        expected = np.ldexp(one, (scores - row_max[:, None]).astype(int))  # exp2 need not be exact
    expected[:, 2 * nr - hidden :] = 0
    np.testing.assert_array_equal(got.weights, expected)
    assert np.isinf(got.weights).sum() == 2
    sums = np.zeros((4, kernels.vl), kernels.dtype)
    for j in range(0, 2 * nr, kernels.vl):
        sums += expected[:, j : j + kernels.vl]
    np.testing.assert_array_equal(got.row_sum, sums)
    assert same_bits(got.row_max, row_max)
    assert not got.out.any()


@both
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_kept_maximum_that_is_not_finite_hides_no_hidden_key(kernels, kernel, bad):
    scores = whole_scores(kernels, 3, 2)
    quiet = weigh(kernels, *operands(scores), [0, 0, 0], kernel=kernel, keeps_max=1)
    got = weigh(kernels, *operands(scores), [0, bad, 0], last=[9, 3, 9], kernel=kernel, keeps_max=1)
    assert not got.weights[1, 3:].any()
    np.testing.assert_array_equal(got.weights[1, :3], [np.exp2(-bad)] * 3)
    for i in (0, 2):
        assert same_bits(got.weights[i, :9], quiet.weights[i, :9])


@both
def test_a_score_far_above_raises_its_own_row_only(kernels, kernel):
    mr, nr = kernels.attention_mr, kernels.attention_nr
    old_sum = np.full((mr, kernels.vl), 4, kernels.dtype)
    old_out = random(2, mr, 3 * kernels.vl, dtype=kernels.dtype)
    state = np.ones(mr), old_sum, old_out
    quiet = weigh(kernels, *operands(whole_scores(kernels, mr, 3)), *state, kernel=kernel)
    for raised, lane in itertools.product(
        {0, mr // 2, mr - 1}, (0, kernels.vl - 1, nr, 3 * nr - 1)
    ):
        for above in (RAISE + 1, RAISE + 30):
            scores = whole_scores(kernels, mr, 3)
            scores[raised, lane] = 1 + above
            got = weigh(kernels, *operands(scores), *state, kernel=kernel)
            check_exact(kernels, got, weighed(kernels, scores, *state))
            assert got.row_max[raised] == 1 + above
            assert same_bits(got.out[raised], old_out[raised] * kernels.dtype.type(2.0**-above))
            for i in set(range(mr)) - {raised}:
                assert all(map(same_bits, got.row(i), quiet.row(i)))


@both
def test_maxima_that_rise_from_panel_to_panel(kernels, kernel):
    """Each rise rescales the weights of all panels before, the sums, and the outputs."""
    mr, nr = kernels.attention_mr, kernels.attention_nr
    heights = np.resize([[0, 9, 20, 12, 40], [30, 0, 39, 60, 39], [0, 12, 24, 36, 48]], (mr, 5))
    for begin in (0, nr + 2):
        scores = whole_scores(kernels, mr, 5) + np.repeat(heights, nr, axis=1)
        row_max = np.where(np.arange(mr) % 2, 0, -np.inf)
        row_sum = np.where(np.arange(mr) % 2, 3.0, 0)[:, None] * np.ones(kernels.vl)
        row_sum = row_sum.astype(kernels.dtype)
        out = random(2, mr, 3 * kernels.vl, dtype=kernels.dtype) * (row_sum[:, :1] > 0)
        state = row_max, row_sum, out
        got = weigh(kernels, *operands(scores), *state, key_begin=begin, kernel=kernel)
        panels = slice(begin // nr * nr, None)
        hidden = np.where(np.arange(5 * nr) < begin, -np.inf, scores)[:, panels]
        expected = weighed(kernels, hidden, *state)
        assert (expected.row_max > row_max + RAISE).all()
        check_exact(kernels, (got.weights[:, panels], *got[1:]), expected)


@both
def test_rows_that_see_nothing_stay_as_they_were(kernels, kernel):
    q, k = operands(whole_scores(kernels, 3, 2))
    out = random(2, 3, kernels.vl, dtype=kernels.dtype)
    row_sum = np.ones((3, kernels.vl), kernels.dtype)
    row_max = [-np.inf, 7, -np.inf]
    out[0] = row_sum[0] = 0
    out[2] = row_sum[2] = np.nan  # a NaN before any maximum
    got = weigh(kernels, q, k, row_max, row_sum, out, last=[0, 0, 0], kernel=kernel)
    assert not got.weights.any()
    assert same_bits(got.row_sum, row_sum)
    assert same_bits(got.out, out)
    assert got.row_max.tolist() == row_max


@both
def test_a_first_key_in_a_later_panel(kernels, kernel):
    nr, rows = kernels.attention_nr, kernels.attention_mr
    scores = whole_scores(kernels, rows, 3)
    first = np.resize([0, nr - 1, nr, 2 * nr + 1, 3 * nr - 1, 3 * nr], rows)
    got = weigh(kernels, *operands(scores), first=first, kernel=kernel)
    hidden = np.where(np.arange(3 * nr) < first[:, None], -np.inf, scores)
    check_exact(kernels, got, weighed(kernels, hidden))


@both
@pytest.mark.parametrize("row_max", [-np.inf, 0.0])
def test_nan_stays_in_its_row(kernels, kernel, row_max):
    """Its own weight is NaN, and its row's sum; maxima rise around it, in its row and in others."""
    nr = kernels.attention_nr
    for lane, other in itertools.product(range(nr), (0, kernels.vl - 1, kernels.vl, nr - 1)):
        for nan_row, panel, raised_panel in ((0, 0, 0), (2, 0, 1), (1, 1, 1), (0, 1, 0)):
            scores = whole_scores(kernels, 3, 2)
            scores[:, panel * nr + lane] = -np.inf
            scores[nan_row, panel * nr + lane] = np.nan
            if (panel, lane) != (raised_panel, other):
                scores[:, raised_panel * nr + other] = 2 * RAISE + np.arange(3)
            got = weigh(kernels, *operands(scores), [row_max] * 3, kernel=kernel)
            check_exact(kernels, got, weighed(kernels, scores, [row_max] * 3))
            assert np.isnan(got.weights).sum() == 1
            assert np.isnan(got.row_sum).sum() == 1


@both
def test_a_row_of_nan_and_a_row_of_infinity(kernels, kernel):
    scores = whole_scores(kernels, 4, 3)
    q, k = operands(scores)
    quiet = weigh(kernels, q, k, kernel=kernel)
    for bad in (np.nan, np.inf):
        for i in range(4):
            q_bad = q.copy()
            q_bad[i] = bad  # inf * 0 is NaN: such a row has no maximum, yet its sum is NaN
            got = weigh(kernels, q_bad, k, kernel=kernel)
            assert np.isnan(got.weights[i]).all()
            assert np.isnan(got.row_sum[i]).all()
            assert got.row_max[i] == -np.inf
            for j in set(range(4)) - {i}:
                assert all(map(same_bits, got.row(j), quiet.row(j)))
    # A score of +inf: inf - inf is NaN, at that key; all others weigh nothing.
    scores[:, 5] = [np.inf, -np.inf, -np.inf, np.inf]
    got = weigh(kernels, *operands(scores), kernel=kernel)
    assert np.isnan(got.row_sum[[0, 3]].sum(axis=1)).all()
    check_exact(kernels, (a[1:3] for a in got), weighed(kernels, scores[1:3]))


# ------------------------------------------------------------------ value_tile


def column_counts(kernels):
    """Whole vectors: few rows take up to eight at once, or half as many, or two, or one."""
    return [kernels.vl * n for n in (0, 1, 2, 3, 4, 5, 8, 11, 15, 16)]


def test_value_bits_are_those_of_a_sum_in_order(kernels):
    for rows in range(1, kernels.attention_mr + 1):
        weights, v = (
            random(0, rows, 13, dtype=kernels.dtype),
            random(1, 13, 16 * kernels.vl, dtype=kernels.dtype),
        )
        out = random(2, rows, 16 * kernels.vl, dtype=kernels.dtype)
        of_block = np.zeros_like(out)
        for j in range(13):
            of_block = kernels.multiply_add(weights[:, j, None], v[j], of_block)
        for columns in column_counts(kernels):
            got = values(kernels, weights, v[:, :columns], out[:, :columns])
            assert same_bits(got, (out + of_block)[:, :columns])


def test_values_and_weights_of_any_strides(kernels):
    for rows in (1, 3, kernels.attention_mr):
        for columns in column_counts(kernels):
            weights = random(0, rows, 40, dtype=kernels.dtype)
            v = random(1, 40, columns, dtype=kernels.dtype)
            out = random(2, rows, columns, dtype=kernels.dtype)
            plain = values(kernels, weights, v, out)
            spread = widened(weights, GAP)
            for view in (widened(v, 1), widened(v, kernels.vl), v[::-1].copy()[::-1]):
                assert same_bits(values(kernels, spread, view, out), plain)
            one = np.broadcast_to(v[:1], v.shape)
            assert same_bits(
                values(kernels, weights, one, out), values(kernels, weights, one.copy(), out)
            )


def test_value_error(kernels):
    for rows in range(1, kernels.attention_mr + 1):
        for columns in column_counts(kernels):
            weights = random(0, rows, 256, dtype=kernels.dtype)
            v = random(1, 256, columns, dtype=kernels.dtype)
            out = random(2, rows, columns, dtype=kernels.dtype)
            exact = out + weights.astype(np.longdouble) @ v.astype(np.longdouble)
            size = np.abs(out) + np.abs(weights) @ np.abs(v)
            error = np.abs(values(kernels, weights, v, out) - exact)
            assert (error <= gamma(257, kernels.dtype) * size).all()


def test_a_rows_values_do_not_depend_on_the_rows_beside_it(kernels):
    mr, columns = kernels.attention_mr, 5 * kernels.vl
    weights = random(0, mr, 67, dtype=kernels.dtype)
    v, out = (
        random(1, 67, columns, dtype=kernels.dtype),
        random(2, mr, columns, dtype=kernels.dtype),
    )
    whole = values(kernels, weights, v, out)
    for rows in range(1, mr):
        assert same_bits(values(kernels, weights[:rows], v, out[:rows]), whole[:rows])
        assert same_bits(values(kernels, weights[-rows:], v, out[-rows:]), whole[-rows:])


def test_keys_outside_the_range_are_not_read(kernels):
    weights, v = (
        random(0, 2, 40, dtype=kernels.dtype),
        random(1, 40, kernels.vl, dtype=kernels.dtype),
    )
    out = random(2, 2, kernels.vl, dtype=kernels.dtype)
    for begin, end in ((0, 40), (3, 40), (0, 17), (11, 12)):
        inside = slice(begin, end)
        expected = values(kernels, np.ascontiguousarray(weights[:, inside]), v[inside], out)
        poisoned_weights, poisoned_v = np.full_like(weights, np.nan), np.full_like(v, np.nan)
        poisoned_weights[:, inside], poisoned_v[inside] = weights[:, inside], v[inside]
        assert same_bits(values(kernels, poisoned_weights, poisoned_v, out, begin, end), expected)


def test_a_weight_of_zero_changes_no_bit(kernels):
    weights, v = (
        random(0, 1, 40, dtype=kernels.dtype),
        random(1, 40, kernels.vl, dtype=kernels.dtype),
    )
    out = random(2, 1, kernels.vl, dtype=kernels.dtype)
    weights[:, 25:] = 0
    v[25:] = np.finfo(kernels.dtype).max
    assert same_bits(values(kernels, weights, v, out), values(kernels, weights, v, out, 0, 25))


# ------------------------------------------------------------------ a row's start and end


def test_start_row(kernels):
    for columns in column_counts(kernels):
        out, row_max = Guarded(columns, kernels.dtype), Guarded(1, kernels.dtype)
        row_sum = Guarded(kernels.vl, kernels.dtype)
        arrays = [address(g.array) for g in (row_max, row_sum)]
        kernels.start_row(address(out.array), columns, *arrays, -np.inf)
        for g in (out, row_max, row_sum):
            g.check()
        assert not out.array.any()
        assert not row_sum.array.any()
        assert row_max.array[0] == -np.inf


@pytest.mark.parametrize("column_stride", [1, 2, 7, -1, -3])
def test_finish_row_divides_and_takes_the_logarithm(kernels, column_stride):
    eps = float(np.finfo(kernels.dtype).eps)
    for columns in sorted({0, 1, kernels.vl - 1, kernels.vl, kernels.vl + 1, 37}):
        out = random(columns, columns, dtype=kernels.dtype)
        row_sum = np.arange(1, kernels.vl + 1).astype(kernels.dtype)
        total = row_sum.sum()
        got, lse = finish(kernels, out, 12.25, row_sum, columns, column_stride)
        exact = out.astype(np.longdouble) / total
        assert (np.abs(got - exact) <= 1.5 * eps * np.abs(exact)).all()
        expected = 12.25 * np.log(2.0) + np.log(float(total))
        assert abs(lse - expected) <= eps * expected
        again, untouched = finish(kernels, out, 12.25, row_sum, columns, column_stride, False)
        assert same_bits(again, got)
        assert np.isnan(untouched)


def test_finish_row_of_a_row_that_saw_nothing(kernels):
    zeros = np.zeros(2 * kernels.vl + 1, kernels.dtype)
    for column_stride in (1, 3):
        got, lse = finish(kernels, zeros, -np.inf, zeros[: kernels.vl], len(zeros), column_stride)
        assert not got.any()
        assert lse == -np.inf


@pytest.mark.parametrize("sign", [1, -1])
def test_finish_row_at_the_end_of_the_range(kernels, sign):
    """The largest bias counts as ln 2 of it; its LSE is that bias, and one below is a logarithm."""
    real, largest = kernels.dtype.type, np.finfo(kernels.dtype).max
    bound = largest * real(0.6931471) * real(np.log2(np.e))
    row_sum = np.full(kernels.vl, 1 / kernels.vl, kernels.dtype)
    for row_max, expected in (
        (bound, largest),
        (largest, largest),
        (np.nextafter(bound, real(0)), bound * np.log(2.0)),
    ):
        _, lse = finish(kernels, np.ones(3, kernels.dtype), sign * row_max, row_sum, 3)
        np.testing.assert_allclose(lse, sign * expected, rtol=2 * np.finfo(kernels.dtype).eps)


@pytest.mark.parametrize("sign", [1, -1])
def test_finish_row_of_a_large_bias_leads_back_to_it(kernels, sign):
    """In log2 it is rounded once, and its LSE, which no count of keys moves, gives that again."""
    real, info = kernels.dtype.type, np.finfo(kernels.dtype)
    log2_e = real(np.log2(np.e))
    sizes = np.linspace(info.nmant + 8, info.maxexp - 1, 99)  # half a unit there is above 2^6
    for bias in (sign * 2.0**sizes).astype(kernels.dtype):
        for count in (1, 3, 1000):
            row_sum = np.full(kernels.vl, count / kernels.vl, kernels.dtype)
            _, lse = finish(kernels, np.ones(3, kernels.dtype), bias * log2_e, row_sum, 3)
            assert lse * log2_e == bias * log2_e
            np.testing.assert_allclose(lse, bias, rtol=2 * info.eps)


def test_finish_row_of_nan(kernels):
    row_sum = np.ones(kernels.vl, kernels.dtype)
    for lane in range(kernels.vl):
        one = row_sum.copy()
        one[lane] = np.nan
        got, lse = finish(kernels, np.ones(5, kernels.dtype), 0.0, one, 5)
        assert np.isnan(got).all()
        assert np.isnan(lse)


def test_all_finite(kernels):
    big = np.finfo(kernels.dtype).max
    for rows, vectors, gap in itertools.product((0, 1, 3, 4, 5, 8), (0, 1, 2), (0, 1, 9)):
        columns = vectors * kernels.vl
        memory = np.full((rows + 2, columns + gap), np.nan, kernels.dtype)  # NaN on all sides
        v = memory[1:-1, :columns]
        v[:] = np.random.default_rng(0).choice([-big, big, -0.0, 5e-324, 1.0], v.shape)
        size = address(v), rows, columns, columns + gap
        assert kernels.all_finite(*size)
        for bad in (np.nan, np.inf, -np.inf):
            for at in np.ndindex(v.shape):
                old, v[at] = v[at], bad
                assert not kernels.all_finite(*size)
                v[at] = old


# ------------------------------------------------------------------ merge_row


def parts(kernels, columns, maxima):
    """(out, row_max, row_sum) of a row, for each of the maxima."""
    return [
        (
            random(i, columns, dtype=kernels.dtype),
            m,
            random(i + 50, kernels.vl, dtype=kernels.dtype) ** 2,
        )
        for i, m in enumerate(maxima)
    ]


def test_merging_scales_the_part_of_the_lower_maximum(kernels):
    for columns in column_counts(kernels):
        for a_max, b_max in ((0, 0), (3, 5), (5, 3), (-7.0, 20), (90.5, 90.5), (1e30, 1e30)):
            a, b = parts(kernels, columns, (a_max, b_max))
            top = max(a_max, b_max)
            keep, take = (kernels.dtype.type(np.exp2(m - top)) for m in (a_max, b_max))
            out, row_max, row_sum = merge(kernels, a, b)
            # Factors are powers of two, so that only the additions round.
            assert same_bits(out, a[0] * keep + b[0] * take)
            assert same_bits(row_sum, a[2] * keep + b[2] * take)
            assert row_max[0] == kernels.dtype.type(top)


def test_merging_error(kernels):
    eps = float(np.finfo(kernels.dtype).eps)
    a, b = parts(kernels, 3 * kernels.vl, (0.3, 2.9))
    a_max, b_max = (float(kernels.dtype.type(m)) for m in (0.3, 2.9))
    for one, two, factors in (
        (a, b, (np.exp2(a_max - b_max), 1)),
        (b, a, (1, np.exp2(a_max - b_max))),
    ):
        out, _, row_sum = merge(kernels, one, two)
        for got, x, y in ((out, one[0], two[0]), (row_sum, one[2], two[2])):
            terms = [f * z.astype(np.longdouble) for f, z in zip(factors, (x, y), strict=True)]
            # The difference of the maxima, 2^x in two units, a product and the sum.
            assert (np.abs(got - sum(terms)) <= 6 * eps * sum(map(np.abs, terms))).all()


def test_merging_with_a_part_that_saw_nothing_changes_no_bit(kernels):
    columns = 3 * kernels.vl
    (some,) = parts(kernels, columns, [2.5])
    some[0][:4] = [-0.0, 0.0, np.inf, np.finfo(kernels.dtype).smallest_subnormal]
    none = np.zeros(columns, kernels.dtype), -np.inf, np.zeros(kernels.vl, kernels.dtype)
    for merged in (merge(kernels, some, none), merge(kernels, none, some)):
        assert same_bits(merged[0], some[0])
        assert merged[1][0] == 2.5
        assert same_bits(merged[2], some[2])
    out, row_max, row_sum = merge(kernels, none, none)
    assert not out.any()
    assert row_max[0] == -np.inf
    assert not row_sum.any()


@pytest.mark.parametrize("maxima", [(0, 0), (0, 3), (3, 0), (-np.inf, 0), (0, -np.inf), (0, 200)])
def test_nan_of_either_part_comes_through_the_merge(kernels, maxima):
    """Of a row without a maximum too: 0 * inf, where all scores of that part are -inf."""
    columns = 2 * kernels.vl
    for which, of_sum in itertools.product((0, 1), (False, True)):
        two = parts(kernels, columns, maxima)
        for i in (0, 1):
            if maxima[i] == -np.inf:
                two[i][0][:] = two[i][2][:] = 0
        two[which][2 if of_sum else 0][1] = np.nan
        out, row_max, row_sum = merge(kernels, *two)
        assert np.flatnonzero(np.isnan(out)).tolist() == ([] if of_sum else [1])
        assert np.flatnonzero(np.isnan(row_sum)).tolist() == ([1] if of_sum else [])
        assert row_max[0] == max(maxima)


# ------------------------------------------------------------------ all together


def run_blocks(kernels, q, blocks, sees=None, kernel="weigh_tile", parts=1):
    """Attention of stacked rows over a list of (k, v): the whole chain, as the loops call it.

    With more parts than one, these are runs of blocks by themselves, merged in order.
    """
    rows, columns = len(q), kernels.whole_vectors(blocks[0][1].shape[1])
    scaled = pack_columns(kernels, q, q.shape[1], q.shape[1], np.log2(np.e))
    state, start = None, 0
    for part in np.array_split(np.arange(len(blocks)), parts):
        out = np.full((rows, columns), np.nan, kernels.dtype)
        row_max = np.empty(rows, kernels.dtype)
        row_sum = np.empty((rows, kernels.vl), kernels.dtype)
        for i in range(rows):
            kernels.start_row(
                address(out[i:]), columns, address(row_max[i:]), address(row_sum[i:]), -np.inf
            )
        for k, v in (blocks[i] for i in part):
            first, last = (
                sees if sees is not None else (np.zeros(rows, int), np.full(rows, 1 << 30))
            )
            got = weigh(
                kernels,
                scaled,
                k,
                row_max,
                row_sum,
                out,
                first=first,
                last=np.minimum(last, start + len(k)),
                key_start=start,
                kernel=kernel,
            )
            weights, row_max, row_sum, out = got
            padded = np.zeros((len(v), columns), kernels.dtype)
            padded[:, : v.shape[1]] = v
            out = values(kernels, weights, padded, out, key_end=len(k))
            start += len(k)
        of_part = list(zip(out, row_max, row_sum, strict=True))
        if state is not None:
            of_part = [merge(kernels, a, b) for a, b in zip(state, of_part, strict=True)]
        state = of_part
    width = blocks[0][1].shape[1]
    results = [finish(kernels, a, np.ravel(m)[0], b, width) for a, m, b in state]
    return np.array([r[0] for r in results]), np.array([r[1] for r in results])


def whole_softmax(q, blocks, sees=None):
    """softmax(q k^T) v in extended precision -> out, lse, bound of the scores' errors."""
    wide = np.longdouble
    k, v = (np.concatenate(x).astype(wide) for x in zip(*blocks, strict=True))
    scores = q.astype(wide) @ k.T
    if sees is not None:
        j = np.arange(len(k))
        scores = np.where((sees[0][:, None] <= j) & (j < sees[1][:, None]), scores, -np.inf)
    top = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - np.where(np.isinf(top), 0, top))
    total = weights.sum(axis=1, keepdims=True)
    size = (np.abs(q).astype(wide) @ np.abs(k).T).max(axis=1)
    out = weights @ v / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        return out, (top + np.log(total))[:, 0], size


def make_blocks(kernels, lengths, head_dim, columns, seed=0):
    return [
        (
            random(seed + 2 * i, n, head_dim, dtype=kernels.dtype),
            random(seed + 2 * i + 1, n, columns, dtype=kernels.dtype),
        )
        for i, n in enumerate(lengths)
    ]


def check_blocks(kernels, q, blocks, sees=None):
    for kernel, parts in itertools.product(("weigh_tile", "weigh_few"), (1, 2, 3)):
        check_result(kernels, run_blocks(kernels, q, blocks, sees, kernel, parts), q, blocks, sees)


def check_result(kernels, result, q, blocks, sees):
    got, lse = result
    exact, exact_lse, size = whole_softmax(q, blocks, sees)
    keys, largest = sum(len(k) for k, _ in blocks), max(np.abs(v).max() for _, v in blocks)
    # A score is a sum of head_dim + 3 terms (the scale, the maximum and its rises), and its error a
    # relative one of the weight; then come two sums over the keys, and 2^x of about one unit.
    # Merging takes the difference of two maxima, like a rise.
    of_score = gamma(q.shape[1] + 3 + 2 * len(blocks), kernels.dtype) * 2 * size
    bound = 2 * of_score + 2 * gamma(keys + 4, kernels.dtype)
    assert (np.abs(got - exact) <= (bound * largest)[:, None]).all()
    seen = np.isfinite(exact_lse)
    error = np.abs(lse[seen] - exact_lse[seen])
    assert (error <= (bound + gamma(4, kernels.dtype) * size)[seen]).all()
    assert (lse[~seen] == -np.inf).all()
    assert not got[~seen].any()


def test_many_blocks_are_one_softmax(kernels):
    for lengths in ([1], [kernels.attention_nr] * 3, [7, 64, 3, 33, 1]):
        q = random(9, kernels.attention_mr, 24, dtype=kernels.dtype)
        check_blocks(kernels, q, make_blocks(kernels, lengths, 24, 19))


@pytest.mark.parametrize("order", ["rising", "falling", "jumping"])
def test_scores_that_change_by_powers_of_eighty_between_blocks(kernels, order):
    """Each block lies 2^80 above or below another: the maximum is raised, or nothing counts."""
    heights = {"rising": [0, 1, 2, 3, 4], "falling": [4, 3, 2, 1, 0], "jumping": [0, 3, 1, 4, 2]}
    blocks = make_blocks(kernels, [16] * 5, 8, 11)
    for (k, _), height in zip(blocks, heights[order], strict=True):
        k[:, 0] = 80 * np.log(2) * height
    q = random(9, kernels.attention_mr, 8, dtype=kernels.dtype)
    q[:, 0] = 1
    check_blocks(kernels, q, blocks)
    q[:, 0] = -1
    check_blocks(kernels, q, blocks)


def test_scores_that_rise_slowly_below_the_limit(kernels):
    """Never more than RAISE above the maximum of the block before, far above that of the first."""
    blocks = make_blocks(kernels, [16] * 8, 8, 11)
    for i, (k, _) in enumerate(blocks):
        k[:, 0] = 0.9 * RAISE * np.log(2) * i
    q = 0.1 * random(9, kernels.attention_mr, 8, dtype=kernels.dtype)
    q[:, 0] = 1
    check_blocks(kernels, q, blocks)


def test_rows_that_see_their_first_key_in_a_later_block(kernels):
    mr = kernels.attention_mr
    q = random(9, mr, 8, dtype=kernels.dtype)
    blocks = make_blocks(kernels, [32] * 4, 8, 11)
    first = np.resize([0, 31, 32, 40, 127, 128], mr)
    last = np.resize([128, 128, 128, 41, 128, 128], mr)
    check_blocks(kernels, q, blocks, (first, last))


def test_large_values_do_not_overflow_before_the_division(kernels):
    """Weights reach 2^RAISE before the maximum is raised: so much room is left above the values."""
    blocks = make_blocks(kernels, [16] * 2, 4, 3)
    for i, (k, v) in enumerate(blocks):
        k[...] = 0
        k[:, 0] = 0.9 * RAISE * np.log(2) * i
        v[...] = np.finfo(kernels.dtype).max / 2.0 ** (RAISE + 5)
    q = np.ones((1, 4), kernels.dtype)
    check_blocks(kernels, q, blocks)


def test_the_guards_see_a_stray_write():
    g = Guarded((2, 3), np.float32, row_gap=1)
    g.check()
    for at in (GUARD - 1, GUARD + 3, GUARD + 8):
        old, g.memory[at] = g.memory[at], 0
        with pytest.raises(AssertionError, match="written at"):
            g.check()
        g.memory[at] = old
    g.memory[GUARD + 8] = 0
    g.check(slack=1)


@both
def test_blocks_order_is_fixed(kernels, kernel):
    """One long run and the same blocks with the rows apart give the same bits."""
    q = random(9, kernels.attention_mr, 8, dtype=kernels.dtype)
    blocks = make_blocks(kernels, [32] * 3, 8, 11)
    for parts in (1, 2):
        together, lse = run_blocks(kernels, q, blocks, kernel=kernel, parts=parts)
        for a, b in itertools.pairwise(range(len(q) + 1)):
            alone, lse_alone = run_blocks(kernels, q[a:b], blocks, kernel=kernel, parts=parts)
            assert same_bits(alone, together[a:b])
            assert same_bits(lse_alone, lse[a:b])
