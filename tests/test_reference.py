"""The reference against loops in plain Python, and against the meaning that is pinned for it."""

import cmath
import functools
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.oracle import HALVES, LAYOUTS
from tileattn import LayerNorm, RMSNorm, Rope, RopeScaling, reference

INF, NAN = math.inf, math.nan
# Two float64 evaluations of sums of at most some dozens of terms of size about 1, in another order.
CLOSE = {"rtol": 1e-13, "atol": 1e-13}


def sees(
    b, n, t, j,
    is_causal=False, query_offset=None, query_lengths=None, key_value_lengths=None,
    local_window_size=None, mask=None, bias=None,
):  # fmt: skip
    """Whether query t of head n of sequence b sees key j, as one sentence."""
    position = t + (0 if query_offset is None else query_offset[b])
    w = local_window_size
    left, right = w if isinstance(w, tuple) else (w, w)
    return (
        (not is_causal or j <= position)
        and (left is None or position - j <= left)
        and (right is None or j - position <= right)
        and (query_lengths is None or t < query_lengths[b])
        and (key_value_lengths is None or j < key_value_lengths[b])
        and (mask is None or bool(mask[b, n, t, j]))
        and (bias is None or bias[b, n, t, j] != -INF)
    )


def attention_by_loops(q, k, v, scale, *, softcap=None, alibi_slopes=None, sinks=None, **who):
    """Attention with lists and floats, every sum exact -> y[B,T,N,Hv], lse[B,T,N], w[B,N,T,S]."""
    (B, T, N, H), (_, S, K, Hv) = q.shape, v.shape
    offset, lengths = who.get("query_offset"), who.get("query_lengths")
    y, lse, w = np.zeros((B, T, N, Hv)), np.full((B, T, N), -INF), np.zeros((B, N, T, S))
    for b, t, n in np.ndindex(B, T, N):
        head = n // (N // K)
        keys = [j for j in range(S) if sees(b, n, t, j, **who)]
        scores = []
        for j in keys:
            products = (float(q[b, t, n, h]) * float(k[b, j, head, h]) for h in range(H))
            score = scale * math.fsum(products)
            if softcap is not None:
                score = softcap * math.tanh(score / softcap)
            if who.get("bias") is not None:
                score += float(who["bias"][b, n, t, j])
            if alibi_slopes is not None:
                position = t + (0 if offset is None else offset[b])
                score -= float(alibi_slopes[b, n]) * abs(position - j)
            scores.append(score)
        has_sink = sinks is not None and (lengths is None or t < lengths[b])
        sink = [float(sinks[n])] if has_sink and sinks[n] != -INF else []
        if not scores + sink:
            continue
        top = max(scores + sink)
        weights = [math.exp(score - top) for score in scores]
        total = math.fsum(weights + [math.exp(score - top) for score in sink])
        lse[b, t, n] = top + math.log(total)
        w[b, n, t, keys] = [weight / total for weight in weights]
        for h in range(Hv):
            products = (w * float(v[b, j, head, h]) for w, j in zip(weights, keys, strict=True))
            y[b, t, n, h] = math.fsum(products) / total
    return y, lse, w


def norm_by_loops(row, weight, bias, eps):
    mean = math.fsum(row) / len(row)
    variance = math.fsum((value - mean) ** 2 for value in row) / len(row)
    return [
        (value - mean) / math.sqrt(variance + eps) * float(w) + float(b)
        for value, w, b in zip(row, weight, bias, strict=True)
    ]


def rms_norm_by_loops(row, weight, eps):
    mean_square = math.fsum(value * value for value in row) / len(row)
    return [
        value / math.sqrt(mean_square + eps) * float(w)
        for value, w in zip(row, weight, strict=True)
    ]


def turned_by_loops(x, positions, *, theta, rotary_dim=None, interleaved=False, factor=1.0):
    """RoPE of x[B,T,N,H] by positions[B,T], one pair of columns at a time, as complex numbers."""
    y, R = x.copy(), rotary_dim or x.shape[3]
    for b, t, n, i in np.ndindex(*x.shape[:3], R // 2):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + R // 2)
        angle = int(positions[b][t]) / factor * theta ** (-2 * i / R)
        turned = complex(x[b, t, n, first], x[b, t, n, second]) * cmath.rect(1, angle)
        y[b, t, n, first], y[b, t, n, second] = turned.real, turned.imag
    return y


def qkv(B=2, T=4, S=5, N=4, K=2, H=3, Hv=2, dtype=np.float64, seed=0):
    draw = np.random.default_rng(seed).standard_normal
    return tuple(draw(shape).astype(dtype) for shape in ((B, T, N, H), (B, S, K, H), (B, S, K, Hv)))


@st.composite
def problems(draw):
    size = st.integers(1, 5)
    B, T, S, K, G, H, Hv = draw(st.tuples(st.integers(1, 3), size, size, *[st.integers(1, 3)] * 4))
    per_sequence = lambda low, high: st.lists(  # noqa: E731
        st.integers(low, high), min_size=B, max_size=B
    )
    mask = {
        "is_causal": draw(st.booleans()),
        "query_offset": draw(per_sequence(-T - 1, S + 1)),
        "query_lengths": draw(st.none() | per_sequence(0, T)),
        "key_value_lengths": draw(st.none() | per_sequence(0, S)),
    }
    N, seed = K * G, draw(st.integers(0, 99))
    side = st.none() | st.integers(0, 5)
    mask["local_window_size"] = draw(st.none() | st.integers(0, 5) | st.tuples(side, side))
    rng = np.random.default_rng(seed)
    shape = [draw(st.sampled_from([1, size])) for size in (B, N, T, S)]
    lacking = slice(draw(st.integers(0, 3)), None)
    if draw(st.booleans()):
        mask["mask"] = rng.random(shape[lacking]) < 0.7
    if draw(st.booleans()):
        bias = rng.standard_normal(shape[lacking])
        mask["bias"] = np.where(rng.random(bias.shape) < 0.2, -INF, bias)
    scores = {
        "scale": draw(st.sampled_from([None, 0.0, 0.3, -2.0])),
        "softcap": draw(st.sampled_from([None, 0.5, 30.0])),
        "alibi_slopes": draw(
            st.sampled_from([None, rng.standard_normal(N), rng.standard_normal((B, N))])
        ),
        "sinks": draw(st.sampled_from([None, rng.standard_normal(N), np.full(N, -INF)])),
    }
    return qkv(B, T, S, N, K, H, Hv, seed=seed), scores, mask


def as_options(scores, mask):
    """A problem's options by the names that attention has for them."""
    renamed = {
        "query_lengths": "query_seq_lengths",
        "key_value_lengths": "key_value_seq_lengths",
    }
    return scores | {renamed.get(name, name): value for name, value in mask.items()}


def solved_by_loops(q, k, v, scores, mask):
    B, T, N, H = q.shape
    whole = {
        name: np.broadcast_to(mask[name], (B, N, T, k.shape[1]))
        for name in ("mask", "bias")
        if name in mask
    }
    slopes = scores["alibi_slopes"]
    scores = scores | {
        "scale": 1 / math.sqrt(H) if scores["scale"] is None else scores["scale"],
        "alibi_slopes": None if slopes is None else np.broadcast_to(slopes, (B, N)),
    }
    return attention_by_loops(q, k, v, **scores, **(mask | whole))


@given(problems(), st.sampled_from([1, 7, 1 << 20]), st.data())
def test_attention_and_its_weights_equal_loops(problem, scores_at_once, data):
    (q, k, v), scores, mask = problem
    y, lse, w = solved_by_loops(q, k, v, scores, mask)
    options = as_options(scores, mask)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "SCORES_AT_ONCE", scores_at_once)
        got = reference.dot_product_attention(q, k, v, return_lse=True, **options)
        np.testing.assert_allclose(got[0], y, **CLOSE)
        np.testing.assert_allclose(got[1], lse, **CLOSE)
        del options["sinks"]
        T = q.shape[1]
        rows = data.draw(st.none() | st.lists(st.integers(0, T - 1), max_size=T + 2))
        if rows is not None:
            w = w[:, :, rows]
            options["rows"] = np.array(rows, int)
        for reduce, expected in ((None, w), ("queries", w.sum(axis=2)), ("keys", w.sum(axis=3))):
            weights = reference.attention_weights(q, k, got[1], reduce=reduce, **options)
            np.testing.assert_allclose(weights, expected, **CLOSE)


@given(problems())
def test_visible_equals_its_definition(problem):
    (q, k, _), _, mask = problem
    (B, T, N), S = q.shape[:3], k.shape[1]
    whole = {
        name: np.broadcast_to(mask[name], (B, N, T, S)) for name in ("mask", "bias") if name in mask
    }
    expected = np.zeros((B, N, T, S), bool)
    for b, n, t, j in np.ndindex(B, N, T, S):
        expected[b, n, t, j] = sees(b, n, t, j, **(mask | whole))
    actual = reference.visible(B, T, S, **mask)
    assert actual.dtype == bool
    if not whole:
        assert actual.shape == (B, T, S)
        actual = actual[:, None]
    np.testing.assert_array_equal(np.broadcast_to(actual, expected.shape), expected)


@pytest.mark.any_isa
@pytest.mark.parametrize("name, dtype", [("mask", bool), ("bias", np.float32)])
@pytest.mark.parametrize("shape", [(2, 4), (5, 1, 7, 4), (3, 2, 2, 2, 3, 4), (2, 2, 3, 4)])
def test_visible_names_what_does_not_fit(name, dtype, shape):
    with pytest.raises(ValueError, match=rf"^{name} has shape \({shape[0]}, .*\[B, N, T, S\]"):
        reference.visible(1, 3, 4, **{name: np.ones(shape, dtype)})


def test_visible_takes_numbers_for_all_sequences_and_extreme_offsets():
    one = reference.visible(2, 3, 4, is_causal=True, query_offset=1, key_value_lengths=3)
    np.testing.assert_array_equal(one, [[[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0]]] * 2)
    big = np.iinfo(np.int64).max
    assert reference.visible(1, 3, 4, is_causal=True, query_offset=big).all()
    assert not reference.visible(1, 3, 4, is_causal=True, query_offset=-big).any()


def test_causal_offset_zero_is_aligned_to_the_first_key_and_s_minus_t_to_the_last():
    q, k, v = qkv(B=1, T=2, S=5)
    first = reference.dot_product_attention(q, k, v, is_causal=True, query_offset=0)
    last = reference.dot_product_attention(q, k, v, is_causal=True, query_offset=3)
    np.testing.assert_array_equal(first[:, 0], v[:, 0].repeat(2, axis=1))
    np.testing.assert_allclose(
        last,
        reference.dot_product_attention(q, k, v, key_value_seq_lengths=[5])
        * np.array([0, 1]).reshape(1, 2, 1, 1)
        + reference.dot_product_attention(q, k[:, :4], v[:, :4])
        * np.array([1, 0]).reshape(1, 2, 1, 1),
        **CLOSE,
    )
    np.testing.assert_array_equal(
        reference.dot_product_attention(q[:, :1].repeat(5, axis=1), k, v, is_causal=True)[:, 0],
        first[:, 0],
    )


def test_causal_with_other_key_length_needs_an_offset():
    q, k, v = qkv(T=2, S=5)
    with pytest.raises(ValueError, match="query_offset"):
        reference.dot_product_attention(q, k, v, is_causal=True)


def test_query_head_n_uses_key_value_head_n_over_g():
    q, k, v = qkv(N=6, K=2)
    repeated = reference.dot_product_attention(q, k.repeat(3, axis=2), v.repeat(3, axis=2))
    np.testing.assert_allclose(reference.dot_product_attention(q, k, v), repeated, **CLOSE)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dtype_of_output_and_lse_is_that_of_q_and_float32_is_rounded_once(dtype):
    q, k, v = qkv(dtype=dtype)
    y, lse = reference.dot_product_attention(q, k, v, return_lse=True)
    wide = reference.dot_product_attention(
        *(a.astype(np.float64) for a in (q, k, v)), return_lse=True
    )
    assert y.dtype == lse.dtype == dtype
    np.testing.assert_array_equal(y, wide[0].astype(dtype))
    np.testing.assert_array_equal(lse, wide[1].astype(dtype))


def test_without_batch_axis():
    q, k, v = qkv(B=1)
    y, lse = reference.dot_product_attention(q[0], k[0], v[0], return_lse=True)
    whole, whole_lse = reference.dot_product_attention(q, k, v, return_lse=True)
    np.testing.assert_array_equal(y, whole[0])
    np.testing.assert_array_equal(lse, whole_lse[0])


def test_out_is_filled_and_returned():
    q, k, v = qkv()
    memory = np.full((2, 4, 4, 2, 2), 7.0)
    out = memory[..., 1]
    assert reference.dot_product_attention(q, k, v, out=out) is out
    np.testing.assert_array_equal(out, reference.dot_product_attention(q, k, v))
    assert (memory[..., 0] == 7).all()
    bare = np.empty((4, 4, 2))
    assert reference.dot_product_attention(q[0], k[0], v[0], out=bare) is bare
    np.testing.assert_array_equal(bare, out[0])


def test_rows_that_see_nothing_are_zero_with_lse_minus_infinity():
    q, k, v = qkv(B=3, T=4, S=4)
    y, lse = reference.dot_product_attention(
        q,
        k,
        v,
        is_causal=True,
        query_offset=[0, -2, 0],
        query_seq_lengths=[4, 4, 3],
        key_value_seq_lengths=[0, 4, 4],
        return_lse=True,
    )
    empty = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 1]], dtype=bool)
    assert not y[empty].any()
    assert (lse[empty] == -INF).all()
    assert np.isfinite(lse[~empty]).all()
    assert y[~empty].all()


@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e308])
def test_what_is_invisible_does_not_leak(garbage):
    q, k, v = qkv(B=2, T=4, S=6)
    mask = {
        "is_causal": True,
        "query_offset": [1, 0],
        "key_value_seq_lengths": [4, 6],
        "query_seq_lengths": [4, 2],
        "return_lse": True,
    }
    expected = reference.dot_product_attention(q, k, v, **mask)
    k[0, 4:] = v[0, 4:] = k[1, 4:] = v[1, 4:] = q[1, 2:] = garbage
    for actual, clean in zip(
        reference.dot_product_attention(q, k, v, **mask), expected, strict=True
    ):
        np.testing.assert_array_equal(actual, clean)


@pytest.mark.parametrize("stray", [NAN, INF, -INF])
def test_a_stray_value_reaches_the_rows_that_see_it_in_its_column(stray):
    q, k, v = qkv(B=1, T=5, S=5, N=4, K=2, Hv=3)
    expected = reference.dot_product_attention(q, k, v, is_causal=True)
    v[0, 2, 1, 1] = stray
    expected[0, 2:, 2:, 1] = stray
    np.testing.assert_array_equal(
        reference.dot_product_attention(q, k, v, is_causal=True), expected
    )


def test_infinities_of_both_signs_in_one_column_make_nan():
    q, k, v = qkv(B=1, T=4, S=4, N=1, K=1, Hv=1)
    v[0, 1], v[0, 2] = INF, -INF
    y = reference.dot_product_attention(q, k, v, is_causal=True)[0, :, 0, 0]
    assert np.isfinite(y[0])
    assert y[1] == INF
    assert np.isnan(y[2:]).all()


def test_a_stray_query_or_key_makes_the_rows_that_see_it_nan():
    q, k, v = qkv(B=1, T=4, S=4, N=2, K=1)
    clean, clean_lse = reference.dot_product_attention(q, k, v, is_causal=True, return_lse=True)
    q[0, 1, 1, 0] = NAN
    k[0, 3, 0, 0] = NAN
    y, lse = reference.dot_product_attention(q, k, v, is_causal=True, return_lse=True)
    hit = np.zeros((1, 4, 2), dtype=bool)
    hit[0, 1, 1] = hit[0, 3] = True
    assert np.isnan(y[hit]).all()
    assert np.isnan(lse[hit]).all()
    np.testing.assert_array_equal(y[~hit], clean[~hit])
    np.testing.assert_array_equal(lse[~hit], clean_lse[~hit])


def test_a_score_of_minus_infinity_weighs_nothing_and_plus_infinity_makes_nan():
    q, k, v = np.ones((1, 1, 1, 1)), np.ones((1, 3, 1, 1)), np.arange(3.0).reshape(1, 3, 1, 1)
    k[0, 2] = -INF
    y, lse = reference.dot_product_attention(q, k, v, return_lse=True)
    assert y.item() == 0.5
    assert lse.item() == pytest.approx(1 + math.log(2))
    y, lse = reference.dot_product_attention(q, np.full_like(k, -INF), v, return_lse=True)
    assert (y.item(), lse.item()) == (0, -INF)
    k[0, 2] = INF
    assert np.isnan(reference.dot_product_attention(q, k, v)).all()


def test_scores_far_from_zero_neither_overflow_nor_vanish():
    q = np.ones((1, 1, 1, 1))
    v = np.array([1.0, 3.0, 1e300]).reshape(1, 3, 1, 1)
    for base in (-1e6, 1e6):
        k = np.array([base, base, base - 1e4]).reshape(1, 3, 1, 1)
        y, lse = reference.dot_product_attention(q, k, v, return_lse=True)
        assert y.item() == 2
        assert lse.item() == pytest.approx(base + math.log(2), rel=1e-15)


@pytest.mark.parametrize("size", [{"T": 0}, {"S": 0}, {"B": 0}, {"H": 0}, {"Hv": 0}])
def test_empty_axes(size):
    q, k, v = qkv(**{"B": 2, "T": 3, "S": 4} | size)
    y, lse = reference.dot_product_attention(q, k, v, scale=1.0, return_lse=True)
    assert y.shape == (*q.shape[:3], v.shape[3])
    assert lse.shape == q.shape[:3]
    if "S" in size:
        assert not y.any()
        assert (lse == -INF).all()
    if "H" in size:  # no score to tell the keys apart
        np.testing.assert_allclose(y, v.mean(axis=1, keepdims=True).repeat(2, 2).repeat(3, 1))
        np.testing.assert_allclose(lse, math.log(4))


def test_inputs_may_be_strided_reversed_read_only_swapped_and_unaligned():
    q, k, v = qkv()
    expected = reference.dot_product_attention(q, k, v)
    wide = np.zeros((*q.shape[:3], 6))
    wide[..., ::2] = q
    q_strided = wide[..., ::2]
    k_backwards = np.ascontiguousarray(k[:, ::-1])[:, ::-1]
    memory = np.zeros(v.nbytes + 1, dtype=np.uint8)
    v_unaligned = memory[1:].view(np.float64).reshape(v.shape)
    v_unaligned[...] = v
    for array in (q_strided, k_backwards, v_unaligned):
        array.flags.writeable = False
    got = reference.dot_product_attention(q_strided, k_backwards, v_unaligned)
    # NumPy may sum in another order where its strides are others; values are of the order of 1.
    np.testing.assert_allclose(got, expected, rtol=0, atol=64 * np.finfo(np.float64).eps)
    swapped = reference.dot_product_attention(*(a.astype(">f8") for a in (q, k, v)))
    assert swapped.dtype.isnative
    np.testing.assert_allclose(swapped, expected, rtol=0, atol=64 * np.finfo(np.float64).eps)


def test_a_block_of_rows_at_a_time_keeps_memory_small():
    tracemalloc = pytest.importorskip("tracemalloc")
    q, k, v = qkv(B=1, T=2048, S=2048, N=4, K=2, H=8, Hv=8, dtype=np.float32)
    tracemalloc.start()
    try:
        reference.dot_product_attention(q, k, v, is_causal=True)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # One float64 array of all scores would be 134 MB; a block holds about six of 8 MiB.
    assert peak < 64 << 20


# ------------------------------------------------------------------ scores, masks and sinks


def test_windows_count_neighbours_on_both_sides_and_the_position_itself():
    visible = functools.partial(reference.visible, 1, 4, 4)
    eye = np.eye(4, dtype=bool)[None]
    np.testing.assert_array_equal(visible(local_window_size=0), eye)
    np.testing.assert_array_equal(visible(local_window_size=(0, 0), is_causal=True), eye)
    band = np.abs(np.arange(4)[:, None] - np.arange(4)) <= 1
    np.testing.assert_array_equal(visible(local_window_size=1), band[None])
    np.testing.assert_array_equal(visible(local_window_size=(1, 1)), band[None])
    np.testing.assert_array_equal(visible(local_window_size=1, is_causal=True), np.tril(band)[None])
    np.testing.assert_array_equal(
        visible(local_window_size=(None, 0)), visible(is_causal=True), strict=True
    )
    assert visible(local_window_size=(None, None)).all()
    shifted = visible(local_window_size=(0, 1), query_offset=2)
    np.testing.assert_array_equal(np.argwhere(shifted[0]), [[0, 2], [0, 3], [1, 3]])
    for far in (-(2**60), 2**60):
        assert not visible(local_window_size=2**59, query_offset=far).any()
        assert visible(local_window_size=2**61, query_offset=far).all()


def test_a_softcap_comes_before_bias_and_mask():
    q, k, v = qkv(B=1, T=2, S=3, N=1, K=1)
    q *= 1e6  # so that the capped scores are +-c
    sign = np.sign(np.einsum("btnh,bjnh->bntj", q, k))
    bias = np.array([[1.0, 100.0, -INF]])
    _, lse = reference.dot_product_attention(
        q, k, v, softcap=2.0, bias=bias, mask=[True, False, True], return_lse=True
    )
    np.testing.assert_allclose(lse[0, :, 0], 2 * sign[0, 0, :, 0] + 1)


def test_alibi_falls_with_the_distance_from_the_absolute_position():
    q, k, v = np.zeros((2, 1, 2, 1)), np.zeros((2, 3, 1, 1)), np.zeros((2, 3, 1, 1))
    options = {"alibi_slopes": [[0.0, 1.0], [2.0, -1.0]], "query_offset": [0, 1]}
    _, lse = reference.dot_product_attention(q, k, v, return_lse=True, **options)
    w = reference.attention_weights(q, k, lse, **options)[:, :, 0]
    distances = np.array([[[0, 1, 2]] * 2, [[1, 0, 1]] * 2])
    exact = np.exp(-np.array(options["alibi_slopes"])[..., None] * distances)
    np.testing.assert_allclose(w, exact / exact.sum(axis=-1, keepdims=True), **CLOSE)


def test_a_bias_in_any_floating_type_and_layout_is_the_same_bias():
    q, k, v = qkv(N=4)
    bias = np.round(np.random.default_rng(1).standard_normal((2, 4, 4, 5)) * 4) / 4
    expected = reference.dot_product_attention(q, k, v, bias=bias)
    for dtype in (np.float32, np.float64, *HALVES):
        for name, change in LAYOUTS.items():
            given = change(bias.astype(dtype))
            y = reference.dot_product_attention(q, k, v, bias=given)
            np.testing.assert_array_equal(y, expected, err_msg=name)


def test_a_mask_and_a_bias_of_minus_infinity_hide_the_same_keys():
    q, k, v = qkv(B=2, T=6, S=6, N=4)
    mask = np.random.default_rng(0).random((2, 4, 6, 6)) < 0.6
    mask[:, :, 4] = False
    mask[:, :, :, 5] = False
    bias = np.where(mask, 0.0, -INF)
    expected = reference.dot_product_attention(q, k, v, mask=mask, return_lse=True)
    assert not expected[0][:, 4].any()
    assert (expected[1][:, 4] == -INF).all()
    for stray in (NAN, INF, -INF):
        k[:, 5] = v[:, 5] = stray
        for options in ({"mask": mask}, {"bias": bias}):
            got = reference.dot_product_attention(q, k, v, return_lse=True, **options)
            for actual, clean in zip(got, expected, strict=True):
                np.testing.assert_array_equal(actual, clean)


def test_heads_that_share_a_value_may_see_different_keys():
    q, k, v = qkv(B=1, T=3, S=3, N=2, K=1, Hv=2)
    mask = np.ones((2, 3, 3), bool)
    mask[0, 1, 2] = False
    expected = reference.dot_product_attention(q, k, v, mask=mask)
    v[0, 2, 0, 1] = NAN
    expected[0, :, :, 1] = np.where(mask[..., 2].T, NAN, expected[0, :, :, 1])
    np.testing.assert_array_equal(reference.dot_product_attention(q, k, v, mask=mask), expected)


def test_a_bias_of_nan_makes_the_rows_nan_that_see_the_key():
    q, k, v = qkv(B=1, T=3, S=3, N=1, K=1)
    clean = reference.dot_product_attention(q, k, v, is_causal=True)
    bias = np.zeros((3, 3))
    bias[:, 1] = NAN
    y, lse = reference.dot_product_attention(q, k, v, bias=bias, is_causal=True, return_lse=True)
    np.testing.assert_array_equal(y[0, 0], clean[0, 0])
    assert np.isnan(y[0, 1:]).all()
    assert np.isnan(lse[0, 1:]).all()


def test_sinks_are_one_more_score_without_a_value():
    q, k, v = qkv(B=1, T=4, S=4, N=2, K=1)
    plain, plain_lse = reference.dot_product_attention(q, k, v, return_lse=True)
    sinks = np.array([0.5, -INF])
    y, lse = reference.dot_product_attention(q, k, v, sinks=sinks, return_lse=True)
    np.testing.assert_allclose(lse, np.logaddexp(plain_lse, sinks), **CLOSE)
    np.testing.assert_allclose(y, plain * np.exp(plain_lse - lse)[..., None], **CLOSE)
    _, lse = reference.dot_product_attention(q, k, v, sinks=[0.0, 0.0], return_lse=True)
    np.testing.assert_allclose(np.exp(lse), 1 + np.exp(plain_lse), **CLOSE)  # off by one
    w = reference.attention_weights(q, k, lse, reduce="keys")
    np.testing.assert_allclose(w[0].T, np.exp(plain_lse - lse)[0], **CLOSE)


def test_a_row_that_sees_nothing_has_its_sink_for_lse_unless_beyond_its_length():
    q, k, v = qkv(B=2, T=3, S=3, N=2, K=1)
    sinks = np.array([1e4, -INF])
    y, lse = reference.dot_product_attention(
        q,
        k,
        v,
        sinks=sinks,
        query_seq_lengths=[3, 1],
        key_value_seq_lengths=[0, 0],
        return_lse=True,
    )
    assert not y.any()
    expected = np.broadcast_to(sinks, (2, 3, 2)).copy()
    expected[1, 1:] = -INF
    np.testing.assert_array_equal(lse, expected)


@pytest.mark.parametrize("dtype", HALVES)
def test_halves_are_rounded_once_and_have_a_float32_lse(dtype):
    q, k, v = (a.astype(dtype) for a in qkv())
    wide, wide_lse = reference.dot_product_attention(
        *(a.astype(np.float64) for a in (q, k, v)), return_lse=True
    )
    y, lse = reference.dot_product_attention(q, k, v, return_lse=True)
    assert (y.dtype, lse.dtype) == (dtype, np.float32)
    np.testing.assert_array_equal(y, wide.astype(dtype))
    np.testing.assert_array_equal(lse, wide_lse.astype(np.float32))
    out = np.empty(y.shape, np.float32)
    assert reference.dot_product_attention(q, k, v, out=out) is out
    np.testing.assert_array_equal(out, wide.astype(np.float32))
    assert reference.attention_weights(q, k, lse).dtype == np.float32


# ------------------------------------------------------------------ packed sequences


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "query_offset": [1, 0, 2, 0, -1]},
        {"local_window_size": (1, 2), "query_offset": 1, "softcap": 0.7},
        {"alibi_slopes": np.arange(20.0).reshape(5, 4), "query_offset": [0, 0, 3, 0, 1]},
        {"alibi_slopes": np.arange(4.0), "query_offset": 2, "sinks": [0, -INF, 1, 2]},
        {"scale": -0.5, "sinks": np.zeros(4)},
    ],
)
def test_packed_sequences_equal_each_alone(options):
    starts_q, starts_k = np.array([0, 3, 3, 7, 9, 10]), np.array([0, 4, 6, 6, 8, 13])
    q, k, v = (a[0] for a in qkv(B=1, T=10, S=13))
    y, lse = reference.varlen_attention(q, k, v, starts_q, starts_k, return_lse=True, **options)
    assert y.shape == (10, 4, 2)
    assert lse.shape == (10, 4)
    for b in range(5):
        queries, keys = slice(*starts_q[b : b + 2]), slice(*starts_k[b : b + 2])
        own = dict(options)
        if np.ndim(own.get("query_offset")) == 1:
            own["query_offset"] = own["query_offset"][b]
        if np.ndim(own.get("alibi_slopes")) == 2:
            own["alibi_slopes"] = own["alibi_slopes"][b]
        alone = reference.dot_product_attention(
            q[queries], k[keys], v[keys], return_lse=True, **own
        )
        np.testing.assert_array_equal(y[queries], alone[0])
        np.testing.assert_array_equal(lse[queries], alone[1])


def test_packed_sequences_of_equal_lengths_need_no_offset_and_none_give_nothing():
    q, k, v = (a[0] for a in qkv(B=1, T=5, S=5))
    y = reference.varlen_attention(q, k, v, [0, 2, 5], [0, 2, 5], is_causal=True)
    np.testing.assert_array_equal(y[2:], reference.dot_product_attention(
        q[2:], k[2:], v[2:], is_causal=True))  # fmt: skip
    out = np.empty_like(y)
    assert reference.varlen_attention(
        q, k, v, [0, 2, 5], [0, 2, 5], is_causal=True, out=out
    ) is out  # fmt: skip
    np.testing.assert_array_equal(out, y)
    y, lse = reference.varlen_attention(q[:0], k[:0], v[:0], [0], [0], return_lse=True)
    assert (y.shape, lse.shape) == ((0, 4, 2), (0, 4))


# ------------------------------------------------------------------ merging


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("cuts", [(4,), (1, 9), (3, 3, 7), (0, 12)])
def test_merged_parts_of_the_keys_equal_the_whole(cuts, dtype):
    q, k, v = qkv(T=6, S=12, dtype=dtype)
    options = {"mask": np.random.default_rng(0).random((2, 1, 6, 12)) < 0.4}
    options["mask"][:, :, 2] = False
    whole = reference.dot_product_attention(q, k, v, return_lse=True, **options)
    parts = []
    for start, stop in itertools.pairwise((0, *cuts, 12)):
        keys = slice(start, stop)
        y, lse = reference.dot_product_attention(
            q, k[:, keys], v[:, keys], mask=options["mask"][..., keys], return_lse=True
        )
        y[lse == -INF] = NAN  # nobody looks there
        parts += [y, lse]
    merged = reference.merge_states(*parts)
    # Each part has been rounded by itself: its out by eps, its weight by eps of its LSE.
    eps = float(np.finfo(dtype).eps)
    size = 2 + np.abs(np.where(np.isinf(whole[1]), 0, whole[1])).max()
    for got, expected in zip(merged, whole, strict=True):
        assert got.dtype == dtype
        np.testing.assert_allclose(
            got, expected, rtol=4 * eps, atol=4 * eps * size * np.abs(v).max()
        )


def test_merging_keeps_sinks_that_one_part_has():
    q, k, v = qkv(T=3, S=6)
    sinks = np.array([1.0, 2.0, -INF, 0.0])
    whole = reference.dot_product_attention(q, k, v, sinks=sinks, return_lse=True)
    first = reference.dot_product_attention(q, k[:, :2], v[:, :2], sinks=sinks, return_lse=True)
    rest = reference.dot_product_attention(q, k[:, 2:], v[:, 2:], return_lse=True)
    for got, expected in zip(reference.merge_states(*first, *rest), whole, strict=True):
        np.testing.assert_allclose(got, expected, **CLOSE)


def test_merging_spreads_nan_and_takes_any_number_of_axes():
    out, lse = np.array([[1.0], [2.0]]), np.array([0.0, 1.0])
    y, total = reference.merge_states(out, lse, np.array([[NAN], [NAN]]), np.array([-INF, -900.0]))
    np.testing.assert_array_equal(y, [[1.0], [NAN]])
    np.testing.assert_array_equal(total, lse)
    _, total = reference.merge_states(out, lse, out, np.array([NAN, 1.0]))
    np.testing.assert_allclose(total, [NAN, 1 + math.log(2)])
    y, total = reference.merge_states(out[0], lse[0], out[1], lse[1])
    assert (y.shape, total.shape) == ((1,), ())
    nothing = np.full(2, -INF)
    y, total = reference.merge_states(out * NAN, nothing, out, nothing)
    assert not y.any()
    assert (total == -INF).all()


def test_merged_halves_are_halves():
    out, lse = np.ones((3, 2), np.float16), np.zeros(3, np.float32)
    y, total = reference.merge_states(out, lse, 3 * out, lse)
    assert (y.dtype, total.dtype) == (np.float16, np.float32)
    assert (y == 2).all()


# ------------------------------------------------------------------ weights


def test_weights_times_values_are_attention():
    q, k, v = qkv(N=4, K=2)
    y, lse = reference.dot_product_attention(q, k, v, return_lse=True)
    w = reference.attention_weights(q, k, lse)
    np.testing.assert_allclose(np.einsum("bnts,bsnh->btnh", w, v.repeat(2, axis=2)), y, **CLOSE)


def test_weights_of_rows_without_an_lse_are_zero_and_of_a_nan_only_where_seen():
    q, k, v = qkv(B=1, T=4, S=4, N=1, K=1)
    _, lse = reference.dot_product_attention(q, k, v, is_causal=True, return_lse=True)
    lse[0, 1], lse[0, 2] = -INF, NAN
    q[0, 1] = NAN
    k[0, 3] = NAN
    w = reference.attention_weights(q, k, lse, is_causal=True)[0, 0]
    assert not w[1].any()
    np.testing.assert_array_equal(np.isnan(w), [[0] * 4, [0] * 4, [1, 1, 1, 0], [0, 0, 0, 1]])


@pytest.mark.parametrize("size", [{"T": 0}, {"S": 0}, {"B": 0}])
@pytest.mark.parametrize("reduce", [None, "queries", "keys"])
def test_weights_of_empty_axes(size, reduce):
    q, k, _ = qkv(**{"B": 2, "T": 3, "S": 4} | size)
    (B, T, N), S = q.shape[:3], k.shape[1]
    shape = {None: (B, N, T, S), "queries": (B, N, S), "keys": (B, N, T)}[reduce]
    w = reference.attention_weights(q, k, np.zeros((B, T, N)), reduce=reduce)
    assert w.shape == shape
    if 0 in (T, S):
        assert not w.any()


@pytest.mark.parametrize("reduce", [None, "queries", "keys"])
def test_weights_without_batch_axis_and_into_out(reduce):
    q, k, v = qkv(B=1, dtype=np.float32)
    _, lse = reference.dot_product_attention(q, k, v, return_lse=True)
    whole = reference.attention_weights(q, k, lse, reduce=reduce, rows=[2, 2, 0])
    assert whole.dtype == np.float32
    out = np.empty_like(whole[0])
    got = reference.attention_weights(q[0], k[0], lse[0], reduce=reduce, rows=[2, 2, 0], out=out)
    assert got is out
    np.testing.assert_array_equal(out, whole[0])


# ------------------------------------------------------------------ LayerNorm


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 7)])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_layer_norm_equals_loops(shape, with_residual, affine):
    draw = np.random.default_rng(1).standard_normal
    x, residual = draw(shape), draw(shape)
    weight, bias = (draw(shape[-1]), draw(shape[-1])) if affine else (None, None)
    total = x + residual if with_residual else x
    w, b = (weight, bias) if affine else (np.ones(shape[-1]), np.zeros(shape[-1]))
    expected = [norm_by_loops(row, w, b, 1e-3) for row in total.reshape(-1, shape[-1]).tolist()]
    actual = reference.layer_norm(
        x, weight, bias, 1e-3, residual=residual if with_residual else None
    )
    np.testing.assert_allclose(actual, np.reshape(expected, shape), **CLOSE)


def test_layer_norm_with_a_large_mean():
    spread = np.random.default_rng(2).integers(-4, 5, (3, 64)).astype(np.float64)
    # Whole numbers: the shifted input is exact, so the result must not change beyond rounding.
    np.testing.assert_allclose(
        reference.layer_norm(spread + 2.0**40), reference.layer_norm(spread), rtol=1e-12
    )


def test_layer_norm_of_constant_rows_is_the_bias():
    bias = np.arange(8.0)
    np.testing.assert_array_equal(
        reference.layer_norm(np.full((2, 8), 1234.0), np.full(8, 5.0), bias), [bias, bias]
    )


def test_layer_norm_of_nothing_and_of_nan():
    assert reference.layer_norm(np.empty((0, 4))).shape == (0, 4)
    assert reference.layer_norm(np.empty((4, 0))).shape == (4, 0)
    x = np.random.default_rng(3).standard_normal((3, 4))
    expected = reference.layer_norm(x)
    x[1, 2] = NAN
    expected[1] = NAN
    np.testing.assert_array_equal(reference.layer_norm(x), expected)


def test_layer_norm_keeps_float32_and_fills_out():
    x = np.random.default_rng(4).standard_normal((3, 4)).astype(np.float32)
    out = np.empty((3, 4), dtype=np.float32)
    assert reference.layer_norm(x, out=out) is out
    expected = reference.layer_norm(x.astype(np.float64)).astype(np.float32)
    np.testing.assert_array_equal(out, expected)
    assert reference.layer_norm(x).dtype == np.float32


@pytest.mark.parametrize(
    "change, error",
    [
        ({"x": np.ones((2, 4), dtype=np.int64)}, TypeError),
        ({"weight": np.ones(4, dtype=np.float32)}, TypeError),
        ({"weight": np.ones(3)}, ValueError),
        ({"bias": np.ones((1, 4))}, ValueError),
        ({"residual": np.ones(4)}, ValueError),
        ({"out": np.ones((2, 3))}, ValueError),
        ({"out": np.ones((2, 4), dtype=np.float32)}, TypeError),
        ({"out": [[0.0] * 4] * 2}, TypeError),
        ({"x": np.float64(1)}, ValueError),
        ({"eps": -1.0}, ValueError),
        ({"num_threads": -3}, ValueError),
    ],
)
def test_layer_norm_refuses_what_does_not_fit(change, error):
    (name,) = change
    with pytest.raises(error, match=f"^{name} "):
        reference.layer_norm(**{"x": np.ones((2, 4))} | change)


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 7)])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("with_weight", [False, True])
def test_rms_norm_equals_loops(shape, with_residual, with_weight):
    draw = np.random.default_rng(1).standard_normal
    x, residual = draw(shape), draw(shape) if with_residual else None
    weight = draw(shape[-1]) if with_weight else None
    total = x + residual if with_residual else x
    w = weight if with_weight else np.ones(shape[-1])
    expected = [rms_norm_by_loops(row, w, 1e-3) for row in total.reshape(-1, shape[-1]).tolist()]
    actual = reference.rms_norm(x, weight, 1e-3, residual=residual)
    np.testing.assert_allclose(actual, np.reshape(expected, shape), **CLOSE)


def test_rms_norm_of_nothing_and_of_nan():
    assert reference.rms_norm(np.empty((0, 4))).shape == (0, 4)
    assert reference.rms_norm(np.empty((4, 0))).shape == (4, 0)
    np.testing.assert_array_equal(
        reference.rms_norm(np.array([[1.0, NAN], [3, 3]]), eps=0), [[NAN, NAN], [1, 1]]
    )


def test_rms_norm_keeps_float32_and_fills_out():
    x = np.random.default_rng(4).standard_normal((3, 4)).astype(np.float32)
    out = np.empty((3, 4), dtype=np.float32)
    assert reference.rms_norm(x, out=out) is out
    expected = reference.rms_norm(x.astype(np.float64)).astype(np.float32)
    np.testing.assert_array_equal(out, expected)


# ------------------------------------------------------------------ rotary position embedding


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("H, rotary_dim", [(8, None), (9, 6), (2, 2)])
def test_rope_equals_complex_numbers(H, rotary_dim, interleaved):
    x = np.random.default_rng(6).standard_normal((2, 3, 2, H))
    positions = np.array([[0, 1, 50], [7, 7, 1000]])
    one = {"theta": 500.0, "rotary_dim": rotary_dim, "interleaved": interleaved}
    actual = reference.apply_rope(x, positions, **one)
    np.testing.assert_allclose(actual, turned_by_loops(x, positions, **one), **CLOSE)
    np.testing.assert_array_equal(reference.apply_rope(x[1], positions[1], **one), actual[1])
    assert reference.apply_rope(x, positions, out=x, **one) is x
    np.testing.assert_array_equal(x, actual)


# ------------------------------------------------------------------ the block


def block_arguments(B=2, T=4, S=None, D=6, Dc=None, N=4, K=2, H=3, Hv=2, dtype=np.float64):
    draw = np.random.default_rng(5).standard_normal
    c = D if Dc is None else Dc
    shapes = {
        "x": (B, T, D),
        "w_q": (D, N, H),
        "w_k": (c, K, H),
        "w_v": (c, K, Hv),
        "w_o": (N, Hv, D),
        "b_q": (N, H),
        "b_k": (K, H),
        "b_v": (K, Hv),
        "b_o": (D,),
    }
    if S is not None:
        shapes["context"] = (B, S, c)
    return {name: draw(shape).astype(dtype) for name, shape in shapes.items()}


def normed_by_loops(x, norm):
    """Rows of x with a norm (weight, bias, eps) of LayerNorm, or (weight, eps) of RMSNorm."""
    D = x.shape[-1]
    parts = [np.broadcast_to(part, D) for part in norm[:-1]]
    by_loops = norm_by_loops if len(parts) == 2 else rms_norm_by_loops
    rows = [by_loops(row, *parts, norm[-1]) for row in x.reshape(-1, D).tolist()]
    return np.reshape(rows, x.shape)


def block_by_loops(
    a,
    *,
    norm=(1.0, 0.0, 1e-5),
    norm_position="post",
    residual=True,
    q_norm=None,
    k_norm=None,
    rope=None,
    **mask,
):
    """The block, its projections with einsum and the rest by loops."""
    x = a["x"]
    if norm is not None and norm_position == "pre":
        x = normed_by_loops(x, norm)
    c = a.get("context", x)
    q = np.einsum("btd,dnh->btnh", x, a["w_q"]) + a.get("b_q", 0)
    k = np.einsum("bsd,dkh->bskh", c, a["w_k"]) + a.get("b_k", 0)
    v = np.einsum("bsd,dkh->bskh", c, a["w_v"]) + a.get("b_v", 0)
    if q_norm is not None:
        q = normed_by_loops(q, q_norm)
    if k_norm is not None:
        k = normed_by_loops(k, k_norm)
    if rope is not None:
        (B, T), S = q.shape[:2], k.shape[1]
        offset = mask.get("query_offset") or [0] * B
        q = turned_by_loops(q, [[offset[b] + t for t in range(T)] for b in range(B)], **rope)
        k = turned_by_loops(k, [range(S)] * B, **rope)
    scale = mask.pop("scale", 1 / math.sqrt(q.shape[-1]))
    y, _, _ = attention_by_loops(q, k, v, scale, **mask)
    z = np.einsum("btnh,nhd->btd", y, a["w_o"]) + a.get("b_o", 0)
    z = a["x"] + z if residual else z
    return normed_by_loops(z, norm) if norm is not None and norm_position == "post" else z


@pytest.mark.parametrize("left_out", ["", "b_q", "b_k", "b_v", "b_o", "b_q b_k b_v b_o"])
@pytest.mark.parametrize("S", [None, 5])
def test_block_equals_loops_with_any_biases(left_out, S):
    a = block_arguments(S=S, Dc=None if S is None else 7)
    for name in left_out.split():
        del a[name]
    np.testing.assert_allclose(reference.attention_block(**a), block_by_loops(a), **CLOSE)


def test_block_norm_residual_and_scale():
    a = block_arguments()
    weight, bias = np.linspace(0.5, 2, 6), np.linspace(-1, 1, 6)
    for options, expected in (
        ({"norm": None}, block_by_loops(a, norm=None)),
        ({"residual": False}, block_by_loops(a, residual=False)),
        ({"norm": None, "residual": False}, block_by_loops(a, norm=None, residual=False)),
        ({"scale": 0.0}, block_by_loops(a, scale=0.0)),
        ({"norm": LayerNorm(weight, bias, 0.5)}, block_by_loops(a, norm=(weight, bias, 0.5))),
        ({"norm": LayerNorm(weight)}, block_by_loops(a, norm=(weight, 0.0, 1e-5))),
    ):
        np.testing.assert_allclose(reference.attention_block(**a, **options), expected, **CLOSE)
    expected = block_by_loops(a, norm=(weight, 0.5))
    actual = reference.attention_block(**a, norm=RMSNorm(weight, 0.5))
    np.testing.assert_allclose(actual, expected, **CLOSE)


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("position", ["pre", "post", None])
@pytest.mark.parametrize("S", [None, 5])
def test_block_norm_positions(S, position, residual):
    a = block_arguments(S=S, Dc=None if S is None else 7)
    weight, bias = np.linspace(0.5, 2, 6), np.linspace(-1, 1, 6)
    for norm, parts in (
        (LayerNorm(weight, bias, 0.5), (weight, bias, 0.5)),
        (RMSNorm(weight, 0.5), (weight, 0.5)),
        (None, None),
    ):
        where = {"norm_position": position, "residual": residual}
        actual = reference.attention_block(**a, norm=norm, **where)
        np.testing.assert_allclose(actual, block_by_loops(a, norm=parts, **where), **CLOSE)


@pytest.mark.parametrize("left_out", ["", "q_norm", "k_norm", "rope"])
@pytest.mark.parametrize("S, offset", [(None, None), (None, [3, 0]), (5, [0, 2])])
def test_block_norms_heads_behind_their_bias_and_then_rotates(S, offset, left_out):
    a = block_arguments(S=S, H=4)
    weight, bias = np.linspace(0.5, 2, 4), np.linspace(-1, 1, 4)
    rope = {"theta": 50.0, "rotary_dim": 2, "interleaved": True}
    given = {
        "q_norm": RMSNorm(weight, 0.1),
        "k_norm": LayerNorm(weight, bias),
        "rope": Rope(**rope),
    }
    parts = {"q_norm": (weight, 0.1), "k_norm": (weight, bias, 1e-5), "rope": rope}
    for options in (given, parts):
        options.pop(left_out, None)
        options["query_offset"] = offset
    np.testing.assert_allclose(
        reference.attention_block(**a, **given), block_by_loops(a, **parts), **CLOSE
    )


def test_block_rotates_as_rope_does():
    a = block_arguments(H=6)
    for rope, parts in (
        (Rope(), {"theta": 10000.0}),
        (Rope(theta=9.0, rotary_dim=4), {"theta": 9.0, "rotary_dim": 4}),
        (Rope(scaling=RopeScaling.linear(4)), {"theta": 10000.0, "factor": 4.0}),
    ):
        actual = reference.attention_block(**a, rope=rope, is_causal=True)
        np.testing.assert_allclose(actual, block_by_loops(a, rope=parts, is_causal=True), **CLOSE)
        # One offset for all sequences; without B; and by the operation itself.
        shifted = reference.attention_block(**a, rope=rope, query_offset=7)
        expected = block_by_loops(a, rope=parts, query_offset=[7, 7])
        np.testing.assert_allclose(shifted, expected, **CLOSE)
        alone = a | {"x": a["x"][1]}
        np.testing.assert_array_equal(
            reference.attention_block(**alone, rope=rope, query_offset=[7]), shifted[1]
        )
    yarn = Rope(theta=100.0, scaling=RopeScaling.yarn(4, 8))
    q, k = (
        reference.apply_rope(
            np.einsum("btd,dnh->btnh", a["x"], a[f"w_{part}"]) + a[f"b_{part}"],
            range(4),
            theta=yarn.theta,
            scaling=yarn.scaling,
        )
        for part in "qk"
    )
    v = np.einsum("btd,dkh->btkh", a["x"], a["w_v"]) + a["b_v"]
    y = reference.dot_product_attention(q, k, v)
    expected = a["x"] + np.einsum("btnh,nhd->btd", y, a["w_o"]) + a["b_o"]
    actual = reference.attention_block(**a, rope=yarn, norm=None)
    np.testing.assert_allclose(actual, expected, **CLOSE)


@pytest.mark.parametrize("only", [None, "softcap", "local_window_size", "sinks", "bias", "mask"])
@pytest.mark.parametrize("S", [None, 5])
def test_block_passes_options_to_attention(S, only):
    a = block_arguments(S=S)
    B, T, N, S = 2, 4, 4, S or 4
    rng = np.random.default_rng(8)
    options = {
        "softcap": 0.5,
        "local_window_size": (2, 1),
        "sinks": rng.standard_normal(N),
        "bias": np.where(rng.random((N, 1, S)) < 0.2, -INF, rng.standard_normal((N, T, S))),
        "mask": rng.random((B, 1, T, S)) < 0.7,
    }
    if only is not None:
        options = {only: options[only]}
    options["query_offset"] = [1, -1]
    whole = {
        name: np.broadcast_to(options[name], (B, N, T, S))
        for name in ("bias", "mask")
        if name in options
    }
    actual = reference.attention_block(**a, **options)
    np.testing.assert_allclose(actual, block_by_loops(a, **(options | whole)), **CLOSE)
    batch = {name: value[1] for name, value in a.items() if name in ("x", "context")}
    alone = options | {name: array[1] for name, array in whole.items()} | {"query_offset": [-1]}
    np.testing.assert_array_equal(reference.attention_block(**(a | batch), **alone), actual[1])


def test_block_adds_the_bias_of_the_keys():
    # A finite one adds the same to all scores of a row, so that no output shows it.
    a = block_arguments()
    a["b_k"][1, 0] = NAN
    assert np.isnan(reference.attention_block(**a)).all()


def test_block_masks():
    a = block_arguments(S=5)
    np.testing.assert_allclose(
        reference.attention_block(
            **a,
            is_causal=True,
            query_offset=[1, -1],
            query_seq_lengths=[3, 4],
            key_value_seq_lengths=[5, 2],
        ),
        block_by_loops(
            a,
            is_causal=True,
            query_offset=[1, -1],
            query_lengths=[3, 4],
            key_value_lengths=[5, 2],
        ),
        **CLOSE,
    )


def test_block_queries_beyond_their_length_keep_input_and_bias():
    a = block_arguments()
    y = reference.attention_block(**a, query_seq_lengths=[4, 2])
    np.testing.assert_allclose(y[1, 2:], reference.layer_norm(a["x"][1, 2:] + a["b_o"]), **CLOSE)
    y = reference.attention_block(
        **a, norm_position="pre", sinks=np.zeros(4), query_seq_lengths=[4, 2]
    )
    np.testing.assert_array_equal(y[1, 2:], a["x"][1, 2:] + a["b_o"])


def test_block_padding_does_not_leak():
    lengths = {"query_seq_lengths": [4, 2], "key_value_seq_lengths": [4, 2]}
    head_norms = {"q_norm": LayerNorm(), "k_norm": RMSNorm(), "rope": Rope(rotary_dim=2)}
    for options in ({}, {"norm_position": "pre", **head_norms}):
        a = block_arguments()
        expected = reference.attention_block(**a, **lengths, **options)
        a["x"][1, 2:] = NAN
        expected[1, 2:] = NAN
        actual = reference.attention_block(**a, **lengths, **options)
        np.testing.assert_array_equal(actual, expected)


def test_block_float32_is_the_float64_block_rounded_once():
    a = block_arguments(dtype=np.float32)
    weight = np.linspace(0.5, 2, 3, dtype=np.float32)
    options = {"is_causal": True, "norm_position": "pre", "rope": Rope(rotary_dim=2)}
    y = reference.attention_block(**a, **options, q_norm=RMSNorm(weight))
    wide = reference.attention_block(
        **{name: array.astype(np.float64) for name, array in a.items()},
        **options,
        q_norm=RMSNorm(weight.astype(np.float64)),
    )
    assert y.dtype == np.float32
    np.testing.assert_array_equal(y, wide.astype(np.float32))


def test_block_out_and_empty_axes():
    a = block_arguments()
    out = np.empty((2, 4, 6))
    assert reference.attention_block(**a, out=out) is out
    np.testing.assert_array_equal(out, reference.attention_block(**a))
    for size in ({"B": 0}, {"T": 0}, {"S": 0}):
        a = block_arguments(**size)
        y = reference.attention_block(**a)
        assert y.shape == a["x"].shape
        everything = {"norm_position": "pre", "q_norm": RMSNorm(), "rope": Rope(rotary_dim=2)}
        got = reference.attention_block(**a, **everything, query_offset=0, sinks=np.zeros(4))
        assert got.shape == a["x"].shape
        if "S" in size:
            np.testing.assert_allclose(y, reference.layer_norm(a["x"] + a["b_o"]), **CLOSE)


@pytest.mark.parametrize(
    "change, error",
    [
        ({"x": np.ones((2, 4, 6), dtype=np.int32)}, TypeError),
        ({"x": np.ones((4, 4, 4, 6))}, ValueError),
        ({"w_q": np.ones((6, 4))}, ValueError),
        ({"w_k": np.ones((6, 2, 4))}, ValueError),
        ({"w_v": np.ones((6, 2, 0))}, ValueError),
        ({"w_o": np.ones((4, 2, 6), dtype=np.float32)}, TypeError),
        ({"w_o": np.ones((4, 3, 6))}, ValueError),
        ({"b_q": np.ones(12)}, ValueError),
        ({"num_threads": -3}, ValueError),
        ({"b_o": np.ones(5)}, ValueError),
        ({"context": np.ones((1, 5, 6))}, ValueError),
        ({"context": np.ones((2, 5, 6), dtype=np.float32)}, TypeError),
        ({"out": np.ones((2, 4, 5))}, ValueError),
    ],
)
def test_block_refuses_what_does_not_fit(change, error):
    (name,) = change
    with pytest.raises(error, match=f"^{name} "):
        reference.attention_block(**block_arguments() | change)


def test_block_refuses_an_unknown_alignment_and_lengths_outside():
    a = block_arguments(S=5)
    with pytest.raises(ValueError, match="query_offset"):
        reference.attention_block(**a, is_causal=True)
    with pytest.raises(ValueError, match="key_value_seq_lengths"):
        reference.attention_block(**a, key_value_seq_lengths=[6, 1])


class Four:
    def __index__(self):
        return 4


def test_rotary_dim_may_be_any_integer():
    x = np.ones((1, 2, 1, 8))
    expected = reference.apply_rope(x, [0, 1], rotary_dim=4)
    np.testing.assert_array_equal(reference.apply_rope(x, [0, 1], rotary_dim=Four()), expected)
