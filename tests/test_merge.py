"""merge_states: parts of the keys put together are all of them."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.oracle import (
    HALVES,
    LAYOUTS,
    arithmetic,
    check_attention,
    check_merge,
    random,
    same_bits,
)
from tileattn import dot_product_attention, merge_states, reference

DTYPES = [np.float32, np.float64, *HALVES]


def some_parts(shape, count, dtype=np.float32, seed=0, blind=True):
    """Pairs out[*shape], lse; some rows have seen nothing, and then their out is NaN."""
    rng = np.random.default_rng(seed)
    parts = []
    for p in range(count):
        out = random(seed + p, *shape).astype(dtype)
        lse = np.asarray(5 * rng.standard_normal(shape[:-1]), arithmetic(dtype))
        if blind:
            unseen = rng.random(shape[:-1]) < 0.3
            lse = np.where(unseen, -np.inf, lse).astype(lse.dtype)
            out[unseen] = np.nan
        parts.append((out, lse))
    return parts


def flat(parts):
    return [array for part in parts for array in part]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(5,), (0,), (3, 8), (0, 8), (2, 7, 4, 33), (2, 3, 0, 4), (2, 1, 3, 2, 2, 9)]
)
def test_against_the_oracle(shape, dtype):
    for count in (2, 3, 6):
        parts = some_parts(shape, count, dtype)
        got = merge_states(*flat(parts))
        assert got[0].shape == shape
        assert got[1].shape == shape[:-1]
        check_merge(got, parts)
        check_merge(reference.merge_states(*flat(parts)), parts)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_attention_over_parts_is_attention(dtype):
    q = random(0, 2, 9, 4, 16, dtype=dtype)
    k, v = random(1, 2, 2, 300, 2, 16, dtype=dtype)
    bounds = [0, 1, 100, 100, 290, 300]  # one part is empty
    parts = [
        dot_product_attention(
            q, k[:, i:j], v[:, i:j], is_causal=True, query_offset=95 - i, return_lse=True
        )
        for i, j in pairwise(bounds)
    ]
    got = merge_states(*flat(parts))
    check_merge(got, parts)
    check_attention(got, q, k, v, is_causal=True, query_offset=95)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(layout, dtype):
    shape = (2, 3, 5, 37)
    parts = some_parts(shape, 3, dtype)
    mixed = [LAYOUTS[layout](parts[0][0]), parts[0][1], *flat(parts[1:])]
    mixed[3] = LAYOUTS[layout](parts[1][1])
    got = merge_states(*mixed)
    check_merge(got, parts)
    assert same_bits(got[1], merge_states(*flat(parts))[1])


def test_more_axes_than_the_loops_have():
    parts = some_parts((2, 3, 2, 3, 5, 4), 2)
    turned = [(np.asfortranarray(out), np.asfortranarray(lse)) for out, lse in parts]
    for a, b in zip(merge_states(*flat(turned)), merge_states(*flat(parts)), strict=True):
        assert same_bits(a, b)


def test_broadcast_parts():
    out, lse = some_parts((4, 8), 1)[0]
    parts = [
        (np.broadcast_to(out[:1], (4, 8)), np.broadcast_to(lse[:1], 4)),
        (out, lse),
    ]
    check_merge(merge_states(*flat(parts)), parts)


def test_inputs_stay_as_they_are():
    parts = some_parts((3, 8), 2)
    before = [array.copy() for array in flat(parts)]
    for array in flat(parts):
        array.flags.writeable = False
    merge_states(*flat(parts))
    for a, b in zip(flat(parts), before, strict=True):
        assert same_bits(a, b)


def test_faults():
    (out_a, lse_a), (out_b, lse_b) = some_parts((3, 8), 2, blind=False)
    for error, words, arguments in (
        (TypeError, "more must be pairs", (out_a, lse_a, out_b, lse_b, out_a)),
        (ValueError, "out_b has shape", (out_a, lse_a, out_b[1:], lse_b[1:])),
        (ValueError, "lse_b has shape", (out_a, lse_a, out_b, lse_b[1:])),
        (TypeError, "out_b has dtype", (out_a, lse_a, out_b.astype(np.float64), lse_b)),
        (TypeError, r"more\[1\] has dtype", (out_a, lse_a) * 2 + (out_a, lse_a.astype(np.float64))),
        (TypeError, "out_a must be", (out_a.astype(int), lse_a, out_b, lse_b)),
    ):
        for function in (merge_states, reference.merge_states):
            with pytest.raises(error, match=words):
                function(*arguments)
    with pytest.raises(ValueError, match="num_threads"):
        merge_states(out_a, lse_a, out_b, lse_b, num_threads=0)


@st.composite
def calls(draw):
    shape = (*draw(st.lists(st.integers(0, 20), max_size=4)), draw(st.integers(0, 70)))
    count, dtype = draw(st.integers(2, 5)), draw(st.sampled_from(DTYPES))
    parts = some_parts(shape, count, dtype, draw(st.integers(0, 99)), draw(st.booleans()))
    if len(shape) < 4:
        return parts
    layout = st.sampled_from(list(LAYOUTS))
    return [(LAYOUTS[draw(layout)](out), LAYOUTS[draw(layout)](lse)) for out, lse in parts]


@given(calls())
def test_random_calls(parts):
    check_merge(merge_states(*flat(parts)), parts)


@pytest.mark.parametrize("axes", [5, 8, 12, 30])
def test_any_number_of_axes(axes):
    """A Cython loop reads four; more once ran over the end of what it read them into."""
    shape = (2,) * 3 + (1,) * (axes - 4) + (3,)
    parts = [random(i, *(shape if i % 2 == 0 else shape[:-1])) for i in range(4)]
    flat = [part.reshape(8, 3) if part.ndim == axes else part.reshape(8) for part in parts]
    got, expected = merge_states(*parts), merge_states(*flat)
    assert same_bits(got[0].reshape(8, 3), expected[0])
    assert same_bits(got[1].reshape(8), expected[1])
    strided = [np.asfortranarray(part) for part in parts]
    assert all(same_bits(a, b) for a, b in zip(merge_states(*strided), got, strict=True))
