"""The cost model against counting one by one."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tileattn import reference
from tileattn.cost import (
    LAYER_NORM_FLOPS_PER_ELEMENT,
    SOFTMAX_FLOPS_PER_PAIR,
    attention_block_cost,
    format_bytes,
    format_count,
)

Q, K, V, SCORE, SOFTMAX, VALUE, OUT, NORM = range(8)


@st.composite
def masks(draw):
    B, T, S = draw(st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(0, 6)))
    per_sequence = lambda low, high: st.lists(  # noqa: E731
        st.integers(low, high), min_size=B, max_size=B
    ).map(lambda numbers: np.array(numbers, dtype=np.int64))
    side = st.none() | st.integers(0, 7)
    mask = {
        "is_causal": draw(st.booleans()),
        "query_offset": draw(per_sequence(-T - 2, S + 2)),
        "query_seq_lengths": draw(st.none() | per_sequence(0, T)),
        "key_value_seq_lengths": draw(st.none() | per_sequence(0, S)),
        "local_window_size": draw(st.none() | st.integers(0, 7) | st.tuples(side, side)),
    }
    return B, T, S, mask


@given(masks())
def test_visible_pairs_and_what_attention_reads_are_counted_exactly(problem):
    B, T, S, mask = problem
    N, heads, H, Hv = 6, 2, 3, 5
    cost = attention_block_cost(B, T, 4, N, heads, H, S=S, Hv=Hv, **mask, itemsize=1)
    sees = reference.visible(
        B,
        T,
        S,
        is_causal=mask["is_causal"],
        query_offset=mask["query_offset"],
        query_lengths=mask["query_seq_lengths"],
        key_value_lengths=mask["key_value_seq_lengths"],
        local_window_size=mask["local_window_size"],
    )
    pairs, queries, keys = (int(a.sum()) for a in (sees, sees.any(axis=2), sees.any(axis=1)))
    assert cost.visible_pairs == pairs
    assert cost.rows[SCORE].flops == 2 * pairs * N * H
    assert cost.rows[SOFTMAX].flops == SOFTMAX_FLOPS_PER_PAIR * pairs * N
    assert cost.rows[VALUE].flops == 2 * pairs * N * Hv
    assert cost.rows[SCORE].bytes == queries * N * H + keys * heads * H
    assert cost.rows[VALUE].bytes == keys * heads * Hv + B * T * N * Hv


def count_multiply_adds(subscripts, *shapes):
    """Multiply-adds of an einsum, by walking its index space."""
    inputs = subscripts.split("->")[0].split(",")
    sizes = dict(
        pair
        for letters, shape in zip(inputs, shapes, strict=True)
        for pair in zip(letters, shape, strict=True)
    )
    return sum(1 for _ in itertools.product(*(range(size) for size in sizes.values())))


def test_every_row_equals_counting():
    B, T, S, D, Dc, N, heads, H, Hv = 2, 3, 4, 5, 6, 4, 2, 3, 2
    cost = attention_block_cost(B, T, D, N, heads, H, S=S, Hv=Hv, Dc=Dc, itemsize=8)
    x, c = np.empty((B, T, D)), np.empty((B, S, Dc))
    w_q, w_k = np.empty((D, N, H)), np.empty((Dc, heads, H))
    w_v, w_o = np.empty((Dc, heads, Hv)), np.empty((N, Hv, D))
    q, k, v = np.empty((B, T, N, H)), np.empty((B, S, heads, H)), np.empty((B, S, heads, Hv))
    score, y = np.empty((B, T, S, heads, N // heads)), np.empty((B, T, N, Hv))
    norm = np.empty((2, D))

    # einsum of the row, operands, result, parameters
    products = {
        Q: ("btd,dnh->btnh", (x, w_q), q, w_q.size),
        K: ("bsc,ckh->bskh", (c, w_k), k, w_k.size),
        V: ("bsc,ckh->bskh", (c, w_v), v, w_v.size),
        SCORE: ("btkgh,bskh->btskg", (q.reshape(B, T, heads, -1, H), k), score, 0),
        VALUE: ("btskg,bskh->btkgh", (score, v), y, 0),
        OUT: ("btnh,nhd->btd", (y, w_o), x, w_o.size),
    }
    for index, (subscripts, operands, result, params) in products.items():
        row = cost.rows[index]
        assert row.is_matmul
        assert row.flops == 2 * count_multiply_adds(subscripts, *(a.shape for a in operands))
        assert row.params == params
        assert row.shape == result.shape
        moved = [a for a in (*operands, result) if a is not score]  # which never leaves the cache
        assert row.bytes == sum(a.nbytes for a in moved)

    assert cost.rows[SOFTMAX].shape == score.shape
    assert cost.rows[SOFTMAX].flops == SOFTMAX_FLOPS_PER_PAIR * score.size
    assert (cost.rows[SOFTMAX].params, cost.rows[SOFTMAX].bytes) == (0, 0)
    assert cost.rows[NORM].flops == LAYER_NORM_FLOPS_PER_ELEMENT * x.size
    assert cost.rows[NORM].params == norm.size
    assert cost.rows[NORM].bytes == 3 * x.nbytes + norm.nbytes
    assert cost.rows[NORM].shape == x.shape
    assert not cost.rows[SOFTMAX].is_matmul
    assert not cost.rows[NORM].is_matmul


def test_defaults_are_self_attention_of_one_width():
    assert attention_block_cost(2, 3, 8, 4, 2, 5) == attention_block_cost(
        2, 3, 8, 4, 2, 5, S=3, Hv=5, Dc=8, is_causal=False, itemsize=4
    )


def test_totals_are_sums_and_keep_softmax_and_norm_apart():
    cost = attention_block_cost(2, 16, 8, 4, 2, 4, is_causal=True)
    assert cost.matmul_flops == sum(cost.rows[i].flops for i in (Q, K, V, SCORE, VALUE, OUT))
    assert cost.other_flops == cost.rows[SOFTMAX].flops + cost.rows[NORM].flops
    assert cost.params == sum(row.params for row in cost.rows)
    assert cost.bytes == sum(row.bytes for row in cost.rows)
    assert cost.intensity == cost.matmul_flops / cost.bytes
    assert cost.rows[Q].intensity == cost.rows[Q].flops / cost.rows[Q].bytes
    assert math.isnan(cost.rows[SOFTMAX].intensity)


def test_intensity_beyond_the_floats_is_infinite():
    cost = attention_block_cost(1, 10**320, 1, 1, 1, 10**320)
    assert cost.rows[SCORE].intensity == math.inf
    assert "inf" in str(cost)


def test_sizes_that_no_array_could_have_are_exact():
    T = 10**9 + 7
    assert attention_block_cost(1, T, 1, 1, 1, 1, is_causal=True).visible_pairs == T * (T + 1) // 2


def test_result_is_frozen_and_hashable():
    cost = attention_block_cost(1, 2, 3, 4, 2, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        cost.visible_pairs = 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        cost.rows[0].flops = 0
    assert len({cost, attention_block_cost(1, 2, 3, 4, 2, 1)}) == 1


def test_text_holds_every_figure_in_aligned_columns():
    cost = attention_block_cost(1, 512, 768, 12, 4, 64, is_causal=True)
    lines = str(cost).splitlines()
    assert lines[0].startswith("B 1  T 512  S 512  D 768  N 12  K 4  G 3  H 64 ")
    assert "Hv" not in lines[0]
    assert "131,328 of 262,144" in lines[0]
    assert max(map(len, lines)) <= 100
    heading = next(line for line in lines if line.startswith("operation"))
    for row in cost.rows:
        (line,) = (line for line in lines if line.startswith(row.operation))
        assert line[heading.index("output") :] == row.output_text
        assert line[: heading.index("FLOPs") + 5].endswith(format_count(row.flops))
        bytes_text = format_bytes(row.bytes) if row.bytes else "-"
        assert line[: heading.index("bytes") + 5].endswith(f" {bytes_text}")
    (total,) = (line for line in lines if line.startswith("total"))
    assert format_count(cost.matmul_flops) in total
    assert format_count(cost.params) in total
    assert format_bytes(cost.bytes) in total


def test_text_names_other_widths_where_they_differ():
    text = str(attention_block_cost(1, 2, 8, 4, 2, 4, S=3, Hv=5, Dc=6))
    assert "Hv 5  Dc 6" in text
    assert "C[B,S,Dc] . W_V[Dc,K,Hv]" in text
    assert "Y[B,T,N,Hv] . W_O[N,Hv,D]" in text
    same_width = str(attention_block_cost(1, 2, 8, 4, 2, 4, S=3))
    assert "C[B,S,D] . W_K[D,K,H]" in same_width


def test_text_of_an_empty_batch():
    cost = attention_block_cost(0, 4, 0, 4, 2, 4)
    assert cost.matmul_flops == cost.bytes == 0
    assert "nan" not in str(cost)


@pytest.mark.parametrize(
    "number, text",
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.0 k"),
        (999_949, "999.9 k"),
        (999_950, "1.0 M"),
        (603_979_776, "604.0 M"),
        (10**9, "1.0 G"),
        (10**18, "1.0 E"),
        (10**22, "10000.0 E"),
    ],
)
def test_format_count(number, text):
    assert format_count(number) == text
    assert format_bytes(number) == (text if " " in text else text + " ") + "B"


@pytest.mark.parametrize(
    "change, error, match",
    [
        ({"B": -1}, ValueError, "^B must not be negative"),
        ({"T": 1.5}, TypeError, "^T must be an int"),
        ({"H": "64"}, TypeError, "^H must be"),
        ({"K": 3}, ValueError, "^K must divide N"),
        ({"K": 0}, ValueError, "^K must divide N"),
        ({"S": -1}, ValueError, "^S must not"),
        ({"Hv": -1}, ValueError, "^Hv must not"),
        ({"Dc": -1}, ValueError, "^Dc must not"),
        ({"itemsize": -4}, ValueError, "^itemsize must not"),
        ({"S": 9, "is_causal": True}, ValueError, "query_offset.*S - T = 5"),
        ({"query_seq_lengths": [4, 5]}, ValueError, "^query_seq_lengths must lie between 0 and 4"),
        ({"query_seq_lengths": [1, -1]}, ValueError, "^query_seq_lengths must lie"),
        ({"key_value_seq_lengths": [1, 2, 3]}, ValueError, "^key_value_seq_lengths must be"),
        ({"key_value_seq_lengths": [1.0, 2.0]}, TypeError, "^key_value_seq_lengths must hold"),
        ({"query_offset": 0.5}, TypeError, "^query_offset must hold"),
        ({"query_offset": 2**61}, ValueError, r"^query_offset must lie within \+-2\*\*60"),
        ({"S": 0, "is_causal": True}, ValueError, "needs query_offset"),
        ({"S": 0, "local_window_size": 1}, ValueError, "local_window_size.*needs query_offset"),
        ({"local_window_size": -1}, ValueError, "^local_window_size must not be negative"),
        ({"is_causal": "no"}, TypeError, "^is_causal must be True or False"),
    ],
)
def test_refused(change, error, match):
    with pytest.raises(error, match=match):
        attention_block_cost(**{"B": 2, "T": 4, "D": 8, "N": 4, "K": 2, "H": 4} | change)


def test_equal_sequences_are_counted_once():
    one = attention_block_cost(1, 5, 8, 2, 1, 4, is_causal=True)
    many = attention_block_cost(10**9, 5, 8, 2, 1, 4, is_causal=True)
    assert many.visible_pairs == 10**9 * one.visible_pairs


def test_sizes_beyond_any_memory_are_counted_too():
    """Each sequence of the batch is not an array element, and each size any whole number."""
    huge = 10**30
    cost = attention_block_cost(huge, 4, 3, 2, 1, 5, is_causal=True, query_offset=0)
    assert cost.visible_pairs == 10 * huge
    assert cost.rows[SCORE].bytes == 4 * huge * (4 * 2 * 5 + 4 * 1 * 5)
    few = attention_block_cost(2, huge, 3, 2, 1, 5, key_value_seq_lengths=[3, 7])
    assert few.visible_pairs == 10 * huge
    near = attention_block_cost(1, huge, 3, 2, 1, 5, is_causal=True, local_window_size=(9, None))
    assert near.visible_pairs == 10 * huge - 45
    none = attention_block_cost(0, huge, 3, 2, 1, 5, S=7, is_causal=True, query_offset=2)
    assert none.visible_pairs == 0
    with pytest.raises(ValueError, match="query_seq_lengths"):
        attention_block_cost(huge, 4, 3, 2, 1, 5, query_offset=0, query_seq_lengths=[1])
    assert str(cost).count("EB")
    assert format_count(10**400) == "1" + "0" * 382 + ".0 E"
