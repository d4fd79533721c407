"""The kernels of attention: scores, online softmax, values, and all of them over many blocks."""

from itertools import pairwise

import numpy as np
import pytest

from tests.kernels.kernels import address
from tests.kernels.test_pack import pack_rows
from tests.oracle import GUARD, Guarded, gamma, random, same_bits

RAISE = 8  # kernel/attention.inc.h: a maximum is raised for scores more than this above it
GAP = 5  # between rows of scores and of outputs


# ------------------------------------------------------------------ single kernels on arrays


def score(kernels, q, k, row_max, first=None, last=None, key_start=0, key_begin=0, key_end=None):
    """q k^T - row_max over whole panels for q[rows, head_dim], k[keys, head_dim]; else NaN."""
    (rows, head_dim), nr = q.shape, kernels.attention_nr
    keys = len(k)
    key_end = keys if key_end is None else key_end
    edge = first is not None or last is not None
    first = np.full(rows, key_start) if first is None else np.asarray(first)
    last = np.full(rows, key_start + key_end) if last is None else np.asarray(last)
    panels = -(-keys // nr)
    packed_k = np.full((panels * nr, head_dim), np.nan, kernels.dtype)  # unseen keys: anything
    packed_k[:keys] = k
    packed_k = np.ascontiguousarray(packed_k.reshape(panels, nr, head_dim).swapaxes(1, 2))
    packed_q = np.ascontiguousarray(q.T)
    row_max = np.asarray(row_max, kernels.dtype)
    scores = Guarded((rows, panels * nr), kernels.dtype, row_gap=GAP)
    fields = {
        "rows": rows,
        "head_dim": head_dim,
        "q": packed_q,
        "k": packed_k,
        "key_start": key_start,
        "key_begin": key_begin,
        "key_end": key_end,
        "edge": edge,
        "first": first,
        "last": last,
        "scores": scores.array,
        "score_stride": panels * nr + GAP,
        "row_max": row_max,
    }
    kernels.score_tile(kernels.attention_tile(**fields))
    scores.check()
    return scores.array.copy()


def softmax(kernels, scores, row_max, row_sum=None, out=None, key_begin=0, key_end=None):
    """softmax_tile on copies -> weights, row_max, row_sum, out; scores are whole panels."""
    rows, keys = scores.shape
    out = np.zeros((rows, kernels.vl), kernels.dtype) if out is None else out
    row_sum = np.zeros((rows, kernels.vl)) if row_sum is None else row_sum
    guarded = {
        name: Guarded(np.shape(value), kernels.dtype, row_gap=gap)
        for name, value, gap in (
            ("scores", scores, GAP),
            ("row_max", row_max, 0),
            ("row_sum", row_sum, 0),
            ("out", out, GAP),
        )
    }
    for name, value in (
        ("scores", scores),
        ("row_max", row_max),
        ("row_sum", row_sum),
        ("out", out),
    ):
        guarded[name].array[...] = value
    fields = {name: g.array for name, g in guarded.items()}
    kernels.softmax_tile(
        kernels.attention_tile(
            rows=rows,
            v_columns=out.shape[1],
            key_begin=key_begin,
            key_end=keys if key_end is None else key_end,
            score_stride=keys + GAP,
            out_stride=out.shape[1] + GAP,
            **fields,
        )
    )
    for g in guarded.values():
        g.check()
    return tuple(guarded[name].array.copy() for name in ("scores", "row_max", "row_sum", "out"))


def values(kernels, weights, v, out, key_begin=0, key_end=None):
    """out + weights v for weights[rows, keys], v[keys, columns of whole vectors]."""
    (rows, keys), columns = weights.shape, v.shape[1]
    weights, v = weights.copy(), v.copy()
    target = Guarded(out.shape, kernels.dtype, row_gap=GAP)
    target.array[...] = out
    kernels.value_tile(
        kernels.attention_tile(
            rows=rows,
            v_columns=columns,
            v=v,
            key_begin=key_begin,
            key_end=keys if key_end is None else key_end,
            scores=weights,
            score_stride=keys,
            out=target.array,
            out_stride=columns + GAP,
        )
    )
    target.check()
    return target.array.copy()


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


# ------------------------------------------------------------------ score_tile


def scores_in_order(kernels, q, k, row_max):
    """-row_max + q k^T, summed over the head dimension in order."""
    start = -np.asarray(row_max, kernels.dtype)
    start[np.isinf(start)] = 0
    total = np.repeat(start[:, None], len(k), axis=1)
    for h in range(q.shape[1]):
        total = kernels.multiply_add(q[:, h, None], k[:, h], total)
    return total


def test_score_bits_are_those_of_a_sum_in_order(kernels):
    for rows in (1, kernels.attention_mr):
        for head_dim in (0, 1, 2, 13):
            for keys in (1, kernels.attention_nr, kernels.attention_nr + 1):
                q = random(0, rows, head_dim, dtype=kernels.dtype)
                k = random(1, keys, head_dim, dtype=kernels.dtype)
                row_max = random(2, rows, dtype=kernels.dtype)
                row_max[0] = -np.inf
                got = score(kernels, q, k, row_max)[:, :keys]
                assert same_bits(np.ascontiguousarray(got), scores_in_order(kernels, q, k, row_max))


def test_score_error_and_unseen_lanes(kernels):
    for rows in range(1, kernels.attention_mr + 1):
        for keys in key_counts(kernels):
            q = random(keys, rows, 64, dtype=kernels.dtype)
            k = random(rows, keys, 64, dtype=kernels.dtype)
            row_max = random(2, rows, dtype=kernels.dtype)
            got = score(kernels, q, k, row_max)
            exact = q.astype(np.longdouble) @ k.astype(np.longdouble).T - row_max[:, None]
            size = np.abs(q) @ np.abs(k).T + np.abs(row_max)[:, None]
            assert (np.abs(got[:, :keys] - exact) <= gamma(65, kernels.dtype) * size).all()
            assert (got[:, keys:] == -np.inf).all()


def test_a_rows_scores_do_not_depend_on_the_rows_beside_it(kernels):
    mr = kernels.attention_mr
    q, k = random(0, mr, 33, dtype=kernels.dtype), random(1, 67, 33, dtype=kernels.dtype)
    row_max = random(2, mr, dtype=kernels.dtype)
    whole = score(kernels, q, k, row_max)
    for rows in range(1, mr):
        assert same_bits(score(kernels, q[:rows], k, row_max[:rows]), whole[:rows])
        assert same_bits(score(kernels, q[-rows:], k, row_max[-rows:]), whole[-rows:])


@pytest.mark.parametrize("key_start", [0, 512, 1 << 40])
def test_scores_outside_first_and_last_are_minus_infinity(kernels, key_start):
    mr, keys = kernels.attention_mr, 3 * kernels.attention_nr - 2
    q, k = random(0, mr, 5, dtype=kernels.dtype), random(1, keys, 5, dtype=kernels.dtype)
    row_max = np.zeros(mr, kernels.dtype)
    plain = score(kernels, q, k, row_max)
    rng = np.random.default_rng(3)
    for _ in range(50):
        # Anywhere: before the block, inside it, behind it, empty.
        first, last = key_start + rng.integers(-2 * keys, 2 * keys, (2, mr))
        got = score(kernels, q, k, row_max, first, last, key_start)
        position = key_start + np.arange(got.shape[1])
        sees = (first[:, None] <= position) & (position < last[:, None])
        sees[:, keys:] = False
        # Lanes beyond the last key hold anything where a row's `last` lies beyond them too.
        np.testing.assert_array_equal(
            got[:, :keys][sees[:, :keys]], plain[:, :keys][sees[:, :keys]]
        )
        assert (got[:, :keys][~sees[:, :keys]] == -np.inf).all()


def test_positions_far_beyond_a_lane_hide_or_show_whole_rows(kernels):
    q, k = random(0, 1, 5, dtype=kernels.dtype), random(1, 40, 5, dtype=kernels.dtype)
    plain = score(kernels, q, k, [0])[:, :40]
    far = 1 << 62
    for first, last, sees in ((-far, far, True), (far, far + 1, False), (-far, -far + 1, False)):
        got = score(kernels, q, k, [0], [first], [last])[:, :40]
        assert same_bits(got.copy(), plain.copy()) if sees else (got == -np.inf).all()


def test_only_the_panels_of_the_keys_asked_for_are_written(kernels):
    nr = kernels.attention_nr
    q, k = random(0, 2, 9, dtype=kernels.dtype), random(1, 4 * nr, 9, dtype=kernels.dtype)
    plain = score(kernels, q, k, [0, 0])
    got = score(kernels, q, k, [0, 0], [nr + 3, 0], [2 * nr + 1, 3 * nr - 1], 0, nr + 1, 3 * nr - 1)
    assert np.isnan(got[:, :nr]).all()
    assert np.isnan(got[:, 3 * nr :]).all()
    position = np.arange(nr, 3 * nr)
    for row, first, last in ((0, nr + 3, 2 * nr + 1), (1, 0, 3 * nr - 1)):
        sees = (first <= position) & (position < last)
        expected = np.where(sees, plain[row, nr : 3 * nr], -np.inf)
        np.testing.assert_array_equal(got[row, nr : 3 * nr], expected)


# ------------------------------------------------------------------ softmax_tile


def whole_scores(kernels, rows, panels, seed=0):
    """Whole numbers in [-20, RAISE]: powers of two, so that weights and sums are exact."""
    keys = panels * kernels.attention_nr
    return np.random.default_rng(seed).integers(-20, RAISE + 1, (rows, keys)).astype(kernels.dtype)


def lane_sums(kernels, weights):
    """Sums of each lane in order of the keys."""
    total = np.zeros((len(weights), kernels.vl), weights.dtype)
    for j in range(0, weights.shape[1], kernels.vl):
        total = total + weights[:, j : j + kernels.vl]
    return total


def test_weights_and_their_sums_without_a_new_maximum(kernels):
    for rows in (1, kernels.attention_mr):
        scores = whole_scores(kernels, rows, 3)
        scores[0, 5] = RAISE  # not above it
        old_sum = random(1, rows, kernels.vl, dtype=kernels.dtype) ** 2
        old_out = random(2, rows, 3 * kernels.vl, dtype=kernels.dtype)
        weights, row_max, row_sum, out = softmax(kernels, scores, [3.5] * rows, old_sum, old_out)
        np.testing.assert_array_equal(weights, np.exp2(scores))
        assert (row_max == 3.5).all()
        assert same_bits(out, old_out)
        in_order = old_sum
        for j in range(0, scores.shape[1], kernels.vl):
            in_order = in_order + weights[:, j : j + kernels.vl]
        assert same_bits(row_sum, in_order)


def test_the_first_block_sets_the_maximum(kernels):
    scores = whole_scores(kernels, 3, 2)
    scores[1] -= 1000
    scores[2] += 100
    weights, row_max, row_sum, out = softmax(kernels, scores, [-np.inf] * 3)
    top = scores.max(axis=1)
    assert same_bits(row_max, top)
    np.testing.assert_array_equal(weights, np.exp2(scores - top[:, None]))
    assert same_bits(row_sum, lane_sums(kernels, weights))
    assert not out.any()


def test_a_score_far_above_raises_its_own_row_only(kernels):
    mr = kernels.attention_mr
    for lane in (0, kernels.vl - 1, kernels.vl, 2 * kernels.attention_nr - 1):
        scores = whole_scores(kernels, mr, 2)
        old_sum = np.full((mr, kernels.vl), 4, kernels.dtype)
        old_out = random(2, mr, 3 * kernels.vl, dtype=kernels.dtype)
        quiet = softmax(kernels, scores, [1] * mr, old_sum, old_out)
        raised = mr - 1
        scores[raised, lane] = RAISE + 8
        weights, row_max, row_sum, out = softmax(kernels, scores, [1] * mr, old_sum, old_out)
        for before, after in zip(quiet, (weights, row_max, row_sum, out), strict=True):
            assert same_bits(before[:raised], after[:raised])
        factor = kernels.dtype.type(2.0 ** -(RAISE + 8))
        assert row_max[raised] == 1 + RAISE + 8
        expected = np.exp2(scores[raised] - RAISE - 8)
        np.testing.assert_array_equal(weights[raised], expected)
        assert same_bits(out[raised], old_out[raised] * factor)
        in_order = old_sum[raised] * factor
        for j in range(0, scores.shape[1], kernels.vl):
            in_order = in_order + expected[j : j + kernels.vl]
        assert same_bits(row_sum[raised], in_order)


def test_rows_that_see_nothing_stay_as_they_were_started(kernels):
    scores = np.full((2, 2 * kernels.attention_nr), -np.inf, kernels.dtype)
    weights, row_max, row_sum, out = softmax(kernels, scores, [-np.inf, 7])
    assert not weights.any()
    assert not row_sum.any()
    assert not out.any()
    assert row_max.tolist() == [-np.inf, 7]


@pytest.mark.parametrize("row_max", [-np.inf, 0.0])
def test_nan_makes_the_sum_nan_and_no_other_row(kernels, row_max):
    for lane in range(2 * kernels.attention_nr):
        scores = whole_scores(kernels, 2, 2)
        scores[0, lane] = np.nan
        scores[0, (lane + 1) % scores.shape[1]] = 2 * RAISE
        weights, _, row_sum, _ = softmax(kernels, scores, [row_max] * 2)
        assert np.isnan(weights[0, lane])
        assert np.isnan(row_sum[0].sum())
        assert np.isfinite(weights[1]).all()
        assert np.isfinite(row_sum[1]).all()


def test_panels_outside_the_keys_asked_for_are_left_alone(kernels):
    nr = kernels.attention_nr
    scores = whole_scores(kernels, 2, 4)
    scores[:, :nr] = scores[:, 3 * nr :] = np.nan
    weights, _, row_sum, _ = softmax(kernels, scores, [0, 0], key_begin=nr + 1, key_end=3 * nr - 1)
    inside = slice(nr, 3 * nr)
    np.testing.assert_array_equal(weights[:, inside], np.exp2(scores[:, inside]))
    assert same_bits(row_sum, lane_sums(kernels, weights[:, inside]))
    assert np.isnan(weights[:, :nr]).all()
    assert np.isnan(weights[:, 3 * nr :]).all()


# ------------------------------------------------------------------ value_tile


def column_counts(kernels):
    vl = kernels.vl
    return (0, vl, 2 * vl, 3 * vl, 4 * vl, 5 * vl)


def test_value_bits_are_those_of_a_sum_in_order(kernels):
    for rows in (1, kernels.attention_mr):
        for columns in column_counts(kernels):
            for keys in (1, 2, 13):
                weights = random(0, rows, keys, dtype=kernels.dtype)
                v = random(1, keys, columns, dtype=kernels.dtype)
                out = random(2, rows, columns, dtype=kernels.dtype)
                of_block = np.zeros_like(out)
                for j in range(keys):
                    of_block = kernels.multiply_add(weights[:, j, None], v[j], of_block)
                assert same_bits(values(kernels, weights, v, out), out + of_block)


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
        kernels.start_row(address(out.array), columns, *arrays)
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
    for count in range(0, 5 * kernels.vl, kernels.vl):
        memory = np.full(count + 2, np.nan, kernels.dtype)  # NaN on both sides
        v = memory[1:-1]
        v[:] = np.random.default_rng(0).choice([-big, big, -0.0, 5e-324, 1.0], count)
        assert kernels.all_finite(address(v), count)
        for bad in (np.nan, np.inf, -np.inf):
            for j in range(count):
                old, v[j] = v[j], bad
                assert not kernels.all_finite(address(v), count)
                v[j] = old


# ------------------------------------------------------------------ all together


def run_blocks(kernels, q, blocks, sees=None):
    """Attention of stacked rows over a list of (k, v): the whole chain, as the loops call it."""
    rows, columns = len(q), kernels.whole_vectors(blocks[0][1].shape[1])
    out = np.full((rows, columns), np.nan, kernels.dtype)
    row_max, row_sum = np.empty(rows, kernels.dtype), np.empty((rows, kernels.vl), kernels.dtype)
    for i in range(rows):
        kernels.start_row(address(out[i:]), columns, address(row_max[i:]), address(row_sum[i:]))
    q = pack_rows(kernels, list(q), q.shape[1], 1, np.log2(np.e)).T
    start = 0
    for k, v in blocks:
        first, last = sees if sees is not None else (np.zeros(rows, int), np.full(rows, 1 << 30))
        last = np.minimum(last, start + len(k))
        scores = score(kernels, q, k, row_max, first, last, start)
        weights, row_max, row_sum, out = softmax(kernels, scores, row_max, row_sum, out)
        padded = np.zeros((weights.shape[1], columns), kernels.dtype)
        padded[: len(v), : v.shape[1]] = v
        out = values(kernels, weights, padded, out, key_end=len(k))
        start += len(k)
    width = blocks[0][1].shape[1]
    results = [finish(kernels, out[i], row_max[i], row_sum[i], width) for i in range(rows)]
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
    got, lse = run_blocks(kernels, q, blocks, sees)
    exact, exact_lse, size = whole_softmax(q, blocks, sees)
    keys, largest = sum(len(k) for k, _ in blocks), max(np.abs(v).max() for _, v in blocks)
    # A score is a sum of head_dim + 3 terms (the scale, the maximum and its rises), and its error a
    # relative one of the weight; then come two sums over the keys, and 2^x of about one unit.
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


def test_blocks_order_is_fixed(kernels):
    """One long run and the same blocks with the rows apart give the same bits."""
    q = random(9, kernels.attention_mr, 8, dtype=kernels.dtype)
    blocks = make_blocks(kernels, [32] * 3, 8, 11)
    together, lse = run_blocks(kernels, q, blocks)
    for a, b in pairwise(range(len(q) + 1)):
        alone, lse_alone = run_blocks(kernels, q[a:b], blocks)
        assert same_bits(alone, together[a:b])
        assert same_bits(lse_alone, lse[a:b])
