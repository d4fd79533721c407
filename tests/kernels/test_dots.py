"""bfloat16 dot products and their operands, against sums in float64."""

import ctypes

import numpy as np
import pytest

from tests.kernels.kernels import DotTile, GemmTile, Kernels, address
from tests.oracle import random, same_bits

bfloat16 = pytest.importorskip("ml_dtypes").bfloat16

LOT, WORDS, KEYS, ROWS = 16, 16, 32, 32
ROUNDED = 256 + 32  # stride of weights as bfloat16
STRIDE = 256 + 16  # of weights


@pytest.fixture
def kernels():
    result = Kernels("float32")
    assert result.dots.allowed()
    result.dots.begin()
    yield result
    result.dots.end()


def halves(seed, *shape):
    return random(seed, *shape).astype(bfloat16)


def words_of(b):
    """[depth, columns] as words [depth / 2, columns]."""
    bits = b.view(np.uint16).astype(np.uint32)
    return bits[::2] | bits[1::2] << 16


def up(n, step):
    return -(-n // step) * step


def by_lots(a):
    """Rows [rows, depth] as [lot, step, row, element], with poison in rows that are too many."""
    rows, depth = a.shape
    memory = np.full((up(rows, LOT), depth), np.nan, bfloat16)
    memory[:rows] = a
    return np.ascontiguousarray(memory.reshape(-1, LOT, depth // 32, 32).swapaxes(1, 2))


def multiply(kernels, a, b, c=None, lots=False):
    """a[rows, depth] b[depth, columns] (+ c), with poison around what counts."""
    (rows, depth), columns = a.shape, b.shape[1]
    if lots:
        a_memory, a_stride, a_step, a_lot = by_lots(a), WORDS, LOT * WORDS, LOT * depth // 2
    else:
        a_memory = np.full((up(rows, LOT), depth + 6), np.nan, bfloat16)
        a_memory[:rows, :depth] = a
        a_stride, a_step, a_lot = depth // 2 + 3, WORDS, LOT * (depth // 2 + 3)
    b_memory = np.full((depth // 2, columns + 5), 0x7FC07FC0, np.uint32)
    b_memory[:, :columns] = words_of(b)
    c_memory = np.full((up(rows, LOT) + 1, columns + 3), np.nan, np.float32)
    if c is not None:
        c_memory[:rows, :columns] = c
    tile = DotTile(
        rows=rows,
        columns=columns,
        depth=depth // 2,
        a=address(a_memory),
        a_stride=a_stride,
        a_step=a_step,
        a_lot=a_lot,
        b=address(b_memory),
        b_stride=columns + 5,
        c=address(c_memory),
        c_stride=columns + 3,
        accumulate=c is not None,
        next=address(b_memory),
        next_bytes=b_memory.nbytes,
    )
    kernels.dots.multiply(ctypes.byref(tile))
    assert np.isnan(c_memory[-1]).all()
    assert np.isnan(c_memory[:, columns:]).all()
    return c_memory[:rows, :columns].copy()


@pytest.mark.parametrize("depth", [32, 64, 96, 512])
@pytest.mark.parametrize("columns", [16, 32, 48, 64, 80, 112, 272])
def test_products(kernels, columns, depth):
    a, b, c = halves(1, ROWS, depth), halves(2, depth, columns), random(3, ROWS, columns)
    for start in (None, c):
        whole = multiply(kernels, a, b, start)
        exact = a.astype(np.float64) @ b.astype(np.float64)
        sizes = np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64)
        if start is not None:
            exact, sizes = exact + c, sizes + np.abs(c)
        # Products are exact; each of `depth` sums rounds once.
        assert (np.abs(whole - exact) <= (depth + 1) * 2.0**-24 * sizes).all()
        for rows in (1, 2, 7, 8, 9, 15, 16, 17, 23, 24, 25, 31):
            for lots in (False, True):
                got = multiply(kernels, a[:rows], b, None if start is None else c[:rows], lots)
                assert same_bits(got, whole[:rows])


@pytest.mark.parametrize("depth", [64, 128, 1024])
@pytest.mark.parametrize("columns", [16, 32, 48, 64, 80])
def test_products_of_bytes(kernels, columns, depth):
    rng = np.random.default_rng(0)
    a = rng.integers(-128, 128, (ROWS, depth)).astype(np.int8)
    b = rng.integers(-128, 128, (depth, columns)).astype(np.int8)
    words = np.ascontiguousarray(b.reshape(depth // 4, 4, columns).swapaxes(1, 2)).view(np.uint32)
    expected = a.astype(np.int64) @ b.astype(np.int64)
    for rows in (1, 8, 9, 15, 16, 17, 32):
        memory = np.full((up(rows, LOT), depth), -1, np.int8)  # what surplus rows hold is nobody's
        memory[:rows] = a[:rows]
        c = np.full((up(rows, LOT) + 1, columns), 7, np.int32)
        tile = DotTile(
            rows=rows,
            columns=columns,
            depth=depth // 4,
            a=address(memory),
            a_stride=depth // 4,
            a_step=WORDS,
            a_lot=LOT * depth // 4,
            b=address(words),
            b_stride=columns,
            c=address(c),
            c_stride=columns,
        )
        kernels.dots.multiply_bytes(ctypes.byref(tile))
        assert np.array_equal(c[:rows], expected[:rows])
        assert (c[-1] == 7).all()


def test_no_product_reaches_another_row_or_column(kernels):
    a, b = halves(1, ROWS, 64), halves(2, 64, 48)
    clean = multiply(kernels, a, b)
    a[5, 3], b[7, 20] = np.nan, np.inf
    got = multiply(kernels, a, b)
    assert np.isnan(got[5]).all()
    assert not np.isfinite(got[:, 20]).any()
    touched = np.zeros(got.shape, bool)
    touched[5], touched[:, 20] = True, True
    assert same_bits(got[~touched], clean[~touched])


def test_an_empty_contraction_leaves_zeros_or_what_was_there(kernels):
    a, b, c = halves(1, 9, 0), halves(2, 0, 48), random(3, 9, 48)
    assert same_bits(multiply(kernels, a, b), np.zeros((9, 48), np.float32))
    assert same_bits(multiply(kernels, a, b, c), c)


def test_rounding_is_to_nearest_even_and_keeps_what_is_not_finite(kernels):
    x = np.concatenate(
        [
            random(1, 93) * np.float32(1e3),
            np.array([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 3.4e38, 0.0, -0.0], np.float32),
            np.array([np.inf, -np.inf, np.nan], np.float32),
            np.full(10, 1.5, np.float32),
        ]
    )
    dst = np.zeros(len(x), bfloat16)
    kernels.dots.round(address(dst), 32, address(x), len(x))
    expected = x.astype(bfloat16)
    numbers = ~np.isnan(x)
    assert same_bits(dst[numbers].view(np.uint16), expected[numbers].view(np.uint16))
    assert np.isnan(dst[~numbers].astype(np.float32)).all()


def test_dot_rounds_counts_operations(kernels):
    columns = 96  # of its yardstick
    for rounds in (0, 1, 2, 33):
        operations = 2 * ROWS * columns * 2 * WORDS * rounds
        assert kernels.dot_rounds(ctypes.byref(kernels.dots), rounds) == operations


# ------------------------------------------------------------------ operands


@pytest.mark.parametrize("columns", [0, 1, 15, 16, 17, 31, 32, 33, 61])
@pytest.mark.parametrize("stride", [1, 3])
def test_rows_become_words(kernels, columns, stride):
    width = up(columns, 2 * WORDS)
    x = random(1, columns * stride + 1)
    expected = np.zeros(width, bfloat16)
    expected[:columns] = x[: columns * stride : stride]
    dst = np.full(width + 1, np.nan, bfloat16)
    halves_of_x = x.astype(bfloat16)
    kernels.pack_halves(address(dst), address(halves_of_x), columns, width, stride)
    assert same_bits(dst[:width].view(np.uint16), expected.view(np.uint16))
    assert np.isnan(np.float32(dst[width]))
    # Steps of 32 elements, 40 apart.
    steps = np.full((width // 32 + 1, 40), np.nan, bfloat16)
    kernels.round_row(ctypes.byref(kernels.dots), address(steps), 40, address(x), columns, stride)
    assert same_bits(steps[:-1, :32].view(np.uint16), expected.reshape(-1, 32).view(np.uint16))
    assert np.isnan(np.float32(steps[-1])).all()
    assert np.isnan(np.float32(steps[:, 32:])).all()


@pytest.mark.parametrize("head_dim", [1, 2, 31, 32, 33, 64, 95])
@pytest.mark.parametrize("stride", [1, 2])
def test_keys_become_words(kernels, head_dim, stride):
    words = up(head_dim, 2 * WORDS) // 2
    k = halves(1, KEYS, head_dim * stride)
    pointers = (ctypes.c_void_p * KEYS)(*[address(row) for row in k])
    dst = np.full((words + 1, KEYS), 0xFFFFFFFF, np.uint32)
    kernels.pack_key_words(address(dst), pointers, head_dim, stride)
    padded = np.zeros((KEYS, 2 * words), bfloat16)
    padded[:, :head_dim] = k[:, ::stride]
    assert np.array_equal(dst[:words], words_of(np.ascontiguousarray(padded.T)))
    assert (dst[words] == 0xFFFFFFFF).all()


@pytest.mark.parametrize(
    "begin, end", [(0, 1), (0, 2), (1, 2), (0, 32), (3, 37), (31, 33), (33, 95)]
)
@pytest.mark.parametrize("columns", [1, 15, 16, 17, 48])
@pytest.mark.parametrize("stride", [1, 2])
def test_values_become_words(kernels, begin, end, columns, stride):
    width = up(columns, LOT)
    v = np.full((96, columns * stride), np.nan, bfloat16)
    v[begin:end] = halves(1, end - begin, columns * stride)
    dst = np.full((49, width), 0xFFFFFFFF, np.uint32)
    kernels.pack_value_words(
        address(dst), address(v), begin, end, columns, width, columns * stride, stride
    )
    padded = np.zeros((96, width), bfloat16)
    padded[begin:end, :columns] = v[begin:end, ::stride]
    first, last = begin // KEYS * KEYS // 2, up(end, KEYS) // 2
    assert np.array_equal(dst[first:last], words_of(padded)[first:last])
    assert (dst[:first] == 0xFFFFFFFF).all()
    assert (dst[last:] == 0xFFFFFFFF).all()


def test_what_is_not_finite_is_dropped(kernels):
    v = halves(1, 20, 16)
    words = words_of(v)
    before = words.copy()
    assert kernels.drop_strays(address(words), words.size) == 0
    assert np.array_equal(words, before)
    v[0, 3], v[7, 9], v[19, 15] = np.nan, np.inf, -np.inf
    words = words_of(v)
    assert kernels.drop_strays(address(words), words.size) == 1
    finite = np.isfinite(v.astype(np.float32))
    assert np.array_equal(words, words_of(np.where(finite, v, bfloat16(0))))


@pytest.mark.parametrize("key_begin, key_end", [(0, 0), (0, 40), (5, 33), (64, 96), (40, 41)])
def test_weights_become_words(kernels, key_begin, key_end):
    rows, begin, end = 3, 3, 100
    weights = random(1, rows, STRIDE)
    dst = np.full((rows, ROUNDED), np.nan, bfloat16)
    tile = kernels.attention_tile(rows=rows, weights=weights, key_begin=key_begin, key_end=key_end)
    kernels.round_weights(ctypes.byref(kernels.dots), address(dst), tile, begin, end)
    expected = np.zeros((rows, ROUNDED), np.float32)
    if key_begin < key_end:
        first, last = key_begin // KEYS * KEYS, up(key_end, KEYS)
        expected[:, first:last] = weights[:, first:last].astype(bfloat16)
    assert np.array_equal(dst[:, : up(end, KEYS)].astype(np.float32), expected[:, : up(end, KEYS)])
    assert np.isnan(dst[:, up(end, KEYS) :].astype(np.float32)).all()


# ------------------------------------------------------------------ tiles


@pytest.mark.parametrize("columns", [1, 15, 16, 17, 47, 48])
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 31, 32])
def test_gemm_tiles(kernels, rows, columns):
    depth, width = 64, up(columns, LOT)
    a, b, bias = halves(1, rows, depth), halves(2, depth, columns), random(3, columns)
    b_memory = np.full((depth, width), np.nan, bfloat16)  # what fills a panel may hold anything
    b_memory[:, :columns] = b
    words, start = words_of(b_memory), random(4, rows, columns)
    for accumulate in (0, 1):
        for added in (None, bias):
            a_memory = by_lots(a)
            c = np.full((rows + 1, columns + 2), np.nan, np.float32)
            if accumulate:
                c[:rows, :columns] = start
            tile = GemmTile(
                rows=rows,
                columns=columns,
                depth=depth,
                a=address(a_memory),
                b=address(words),
                c=address(c),
                c_stride=columns + 2,
                accumulate=accumulate,
                bias=address(added),
            )
            kernels.gemm_dots(ctypes.byref(tile), LOT * depth // 2, ctypes.byref(kernels.dots))
            expected = multiply(
                kernels,
                a,
                np.where(np.isnan(b_memory), bfloat16(0), b_memory),
                np.pad(start, ((0, 0), (0, width - columns))) if accumulate else None,
            )[:, :columns]
            expected = expected if added is None else expected + bias
            assert same_bits(c[:rows, :columns], expected)
            assert np.isnan(c[rows]).all()
            assert np.isnan(c[:, columns:]).all()


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 32])
@pytest.mark.parametrize("columns", [16, 64, 80, 144])
def test_value_tiles(kernels, rows, columns):
    begin, end = 37, 93  # in the panels of keys from 32 to 96
    weights, v = halves(1, rows, ROUNDED), halves(2, 256, columns)
    words = words_of(v)
    weights_memory = np.full((up(rows, LOT), ROUNDED), np.nan, bfloat16)
    weights_memory[:rows] = weights
    start = random(3, rows + 1, columns + 16)
    out = start.copy()
    tile = kernels.attention_tile(
        rows=rows,
        v_columns=columns,
        weights=weights_memory,
        key_begin=begin,
        key_end=end,
        v=words,
        v_stride=columns,
        out=out,
        out_stride=columns + 16,
    )
    kernels.value_dots(tile, ctypes.byref(kernels.dots))
    expected = multiply(kernels, weights[:, 32:96], v[32:96], start[:rows, :columns])
    assert same_bits(out[:rows, :columns], expected)
    assert same_bits(out[rows], start[rows])
    assert same_bits(out[:, columns:], start[:, columns:])
