"""varlen_attention: packed sequences get what each gets alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.oracle import HALVES, LAYOUTS, WRITABLE, Guarded, check_attention, random, same_bits
from tileattn import dot_product_attention, reference, varlen_attention

DTYPES = [np.float32, np.float64]

# Lengths (T, S) of the sequences: all paths (few rows, chunks of keys, tiles), alone and together.
LENGTHS = {
    "one": [(5, 5)],
    "none": [],
    "only empty": [(0, 0), (0, 0)],
    "empty among others": [(0, 3), (4, 4), (3, 0), (0, 0), (1, 2)],
    "decode": [(1, 700), (1, 1), (1, 40), (1, 513)],
    "chunks": [(30, 600), (7, 1100), (2, 9)],
    "tiles": [(300, 300), (65, 130), (400, 20), (31, 257)],
    "of all kinds": [(1, 530), (140, 140), (0, 7), (20, 520), (9, 9), (129, 33)],
}


def starts(lengths):
    return np.concatenate([[0], np.cumsum(np.array(lengths, np.int64).reshape(-1))])


def packed(lengths, N=4, K=2, H=8, Hv=None, dtype=np.float32, seed=0):
    """q, k, v and where their sequences start."""
    q_starts, k_starts = (starts([length[i] for length in lengths]) for i in (0, 1))
    q = random(seed, q_starts[-1], N, H, dtype=dtype)
    k = random(seed + 1, k_starts[-1], K, H, dtype=dtype)
    v = random(seed + 2, k_starts[-1], K, H if Hv is None else Hv, dtype=dtype)
    return q, k, v, q_starts, k_starts


def one_by_one(q, k, v, q_starts, k_starts, query_offset=None, alibi_slopes=None, **options):
    """Each sequence's slice of q, its arrays and its options."""
    for b in range(len(q_starts) - 1):
        queries, keys = (slice(s[b], s[b + 1]) for s in (q_starts, k_starts))
        own = dict(options)
        if query_offset is not None:
            own["query_offset"] = np.broadcast_to(query_offset, len(q_starts) - 1)[b]
        if alibi_slopes is not None:
            own["alibi_slopes"] = alibi_slopes[b] if alibi_slopes.ndim == 2 else alibi_slopes
        yield queries, (q[queries], k[keys], v[keys]), own


def check_bits(call, options, **how):
    """Refuses a packed call that gives a sequence other bits than it gets alone."""
    out, lse = varlen_attention(*call, return_lse=True, **how, **options)
    assert out.shape == (*call[0].shape[:2], call[2].shape[2])
    assert lse.shape == call[0].shape[:2]
    for queries, arrays, own in one_by_one(*call, **options):
        alone = dot_product_attention(*arrays, return_lse=True, **own)
        assert same_bits(out[queries], alone[0])
        assert same_bits(lse[queries], alone[1])
    return out, lse


@pytest.mark.parametrize("dtype", [*DTYPES, *HALVES])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_sequences_get_the_bits_they_get_alone(lengths, dtype):
    call = packed(lengths, dtype=dtype, Hv=5)
    ends = np.array([S - T for T, S in lengths], np.int64)
    for options in (
        {},
        {"scale": 2.0},
        {"is_causal": True, "query_offset": 0},
        {"is_causal": True, "query_offset": ends},
        {"local_window_size": (17, 3), "query_offset": ends, "softcap": 2.0},
        {
            "alibi_slopes": random(7, len(lengths), 4, dtype=dtype),
            "sinks": random(8, 4, dtype=dtype),
            "query_offset": 3,
        },
    ):
        for threads in (1, 2, 5):
            out, _ = check_bits(call, options, num_threads=threads)
            assert same_bits(varlen_attention(*call, num_threads=threads, **options), out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_against_the_oracle_and_the_reference(lengths, dtype):
    call = packed(lengths, dtype=dtype)
    options = {"is_causal": True, "query_offset": np.array([S - T for T, S in lengths], np.int64)}
    for function in (varlen_attention, reference.varlen_attention):
        got = function(*call, return_lse=True, **options)
        for queries, arrays, own in one_by_one(*call, **options):
            check_attention(tuple(x[queries] for x in got), *arrays, **own)


@pytest.mark.parametrize("K", [1, 2, 6])
def test_many_threads_share_long_and_short_sequences(K):
    """One sequence is most of the work, so its tiles or chunks must be shared out."""
    for lengths in ([(1, 3000)] + [(1, 5)] * 20, [(500, 500)] + [(3, 3)] * 20):
        check_bits(packed(lengths, N=6, K=K, H=32), {}, num_threads=8)


def test_equal_lengths_equal_a_batch():
    call = packed([(70, 90)] * 3)
    q, k, v = (x.reshape(3, -1, *x.shape[1:]) for x in call[:3])
    batch = dot_product_attention(q, k, v, is_causal=True, query_offset=20)
    out = varlen_attention(*call, is_causal=True, query_offset=20)
    assert same_bits(out.reshape(batch.shape), batch)


def test_a_neighbour_leaves_no_trace():
    q, k, v, q_starts, k_starts = packed([(5, 9), (40, 300), (3, 4)])
    clean = varlen_attention(q, k, v, q_starts, k_starts)
    for x, begins in ((q, q_starts), (k, k_starts), (v, k_starts)):
        x[begins[0] : begins[1]] = np.nan
        x[begins[2] : begins[3]] = np.inf
    out = varlen_attention(q, k, v, q_starts, k_starts)
    assert same_bits(out[q_starts[1] : q_starts[2]], clean[q_starts[1] : q_starts[2]])
    assert np.isnan(out[: q_starts[1]]).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_and_out(layout):
    q, k, v, *begins = packed(LENGTHS["of all kinds"], Hv=5)
    expected = varlen_attention(q, k, v, *begins)
    q, k, v = (LAYOUTS[layout](x) for x in (q, k, v))
    assert same_bits(varlen_attention(q, k, v, *begins), expected)
    if layout in WRITABLE:
        out = LAYOUTS[layout](np.zeros_like(expected))
        assert varlen_attention(q, k, v, *begins, out=out) is out
        np.testing.assert_array_equal(out, expected)


def test_nothing_around_out_is_written():
    call = packed(LENGTHS["of all kinds"], Hv=5)
    guarded = Guarded((len(call[0]), 4, 5), np.float32, row_gap=3)
    varlen_attention(*call, out=guarded.array)
    guarded.check()
    assert np.isfinite(guarded.array).all()


def test_starts_of_any_integer_type():
    q, k, v, q_starts, k_starts = packed([(3, 4), (2, 9)])
    expected = varlen_attention(q, k, v, q_starts, k_starts)
    for dtype in (np.int32, np.uint64, np.int8):
        got = varlen_attention(q, k, v, q_starts.astype(dtype), k_starts[::-1].astype(dtype)[::-1])
        assert same_bits(got, expected)
    assert same_bits(varlen_attention(q, k, v, q_starts.tolist(), k_starts.tolist()), expected)


@pytest.mark.parametrize("N, K, H", [(0, 0, 8), (0, 2, 8), (2, 1, 0)])
def test_empty_axes(N, K, H):
    call = packed([(3, 4), (2, 1)], N=N, K=K, H=H, Hv=3)
    out, lse = varlen_attention(*call, return_lse=True)
    assert out.shape == (5, N, 3)
    assert lse.shape == (5, N)
    if N:
        check_bits(call, {})


def test_faults_are_found_before_anything_is_written():
    q, k, v, q_starts, k_starts = packed([(3, 4), (2, 9)])
    out = np.full_like(q, 7)
    falling, batched = np.array([0, 6, 5]), (q[None], k[None], v[None])
    for error, words, arguments, options in (
        (ValueError, "cu_seqlens_q must not decrease", (q, k, v, falling, k_starts), {}),
        (ValueError, "cu_seqlens_k must start at 0 and end at", (q, k, v, q_starts, falling), {}),
        (ValueError, "cu_seqlens_k is of 1", (q, k, v, q_starts, k_starts[[0, 2]]), {}),
        (TypeError, "cu_seqlens_q must hold integers", (q, k, v, q_starts * 1.0, k_starts), {}),
        (ValueError, "in sequence 0 needs query_offset", (q, k, v, q_starts, k_starts),
         {"is_causal": True}),
        (ValueError, "axes \\[total_q, N, H\\]", (*batched, q_starts, k_starts), {}),
        (ValueError, "k has head width", (q, k[..., 1:], v, q_starts, k_starts), {}),
        (TypeError, "return_lse", (q, k, v, q_starts, k_starts), {"return_lse": 1}),
        (ValueError, "num_threads", (q, k, v, q_starts, k_starts), {"num_threads": 0}),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            varlen_attention(*arguments, out=out, **options)
        assert (out == 7).all()
    with pytest.raises(ValueError, match="out overlaps q"):
        varlen_attention(q, k, v, q_starts, k_starts, out=q)


@st.composite
def calls(draw):
    lengths = draw(st.lists(st.tuples(*[st.integers(0, 40) | st.integers(0, 600)] * 2), max_size=6))
    K, G = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    H, Hv = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    call = packed(lengths, K * G, K, H, Hv, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99)))
    layout = st.sampled_from(list(LAYOUTS))
    call = (*(LAYOUTS[draw(layout)](x) for x in call[:3]), *call[3:])
    options, N = {}, K * G
    if draw(st.booleans()):
        options["softcap"] = draw(st.floats(0.5, 10))
    if draw(st.booleans()):
        options["sinks"] = random(5, N)
    positional = draw(st.sets(st.sampled_from(["is_causal", "local_window_size", "alibi_slopes"])))
    if positional:
        offset = st.integers(-50, 600)
        many = st.lists(offset, min_size=len(lengths), max_size=len(lengths))
        offset = draw(offset | many.map(lambda x: np.array(x, np.int64)))
        options["query_offset"] = offset
        options["is_causal"] = "is_causal" in positional
        if "local_window_size" in positional:
            sides = st.none() | st.integers(0, 300)
            options["local_window_size"] = draw(st.tuples(sides, sides))
        if "alibi_slopes" in positional:
            shape = draw(st.sampled_from([(N,), (len(lengths), N)]))
            options["alibi_slopes"] = random(6, *shape)
    return call, options, draw(st.integers(1, 6))


@given(calls())
def test_random_calls(call):
    arrays, options, threads = call
    check_bits(arrays, options, num_threads=threads)
