"""Packing: exact copies in another order, within bounds, whatever the strides and the storage.

The kernels' own type, bfloat16 and float16 are packed alike: the oracle is NumPy's conversion.
"""

import ctypes
import mmap

import numpy as np
import pytest

from tests.kernels.kernels import address
from tests.oracle import Guarded, random, same_bits


def sizes(kernels):
    """Numbers of rows that packing meets: register tiles, panels of keys, and their neighbours."""
    vl = kernels.vl
    near = {vl - 1, vl, vl + 1, 2 * vl - 1}
    return sorted(
        {1, 2, 3, kernels.gemm_mr, kernels.attention_mr, kernels.attention_nr} | near - {0}
    )


def pack_rows(kernels, rows, depth, column_stride):
    """Packs rows of `depth` elements, each in its own memory -> [depth][count]; checks bounds."""
    count, stored = len(rows), rows[0].dtype
    target = Guarded(depth * count, kernels.dtype)
    pointers = (ctypes.c_void_p * count)(*map(address, rows))
    kernels.pack_rows[stored](address(target.array), pointers, count, depth, column_stride)
    target.check(slack=kernels.vl - 1)
    return target.array.reshape(depth, count)


def spread(row, stride):
    """The row at a stride, in memory exactly as long as it needs: what lies behind is foreign."""
    foreign = 99 if row.dtype == np.int8 else np.nan
    memory = np.full(max(1, len(row) * max(1, abs(stride))), foreign, row.dtype)
    if not len(row):
        return memory
    if stride == 0:
        memory[:] = row[0]
        return memory
    view = memory[:: abs(stride)]
    view = view if stride > 0 else view[::-1]
    view[:] = row
    return view


@pytest.mark.parametrize("column_stride", [1, 2, 5, -1, 0])
def test_rows_are_interleaved(kernels, column_stride):
    vl = kernels.vl
    for count in sizes(kernels):
        for depth in (0, 1, vl - 1, vl, vl + 1, 37, 64):
            for stored in kernels.pack_rows:
                values = random(count + depth, count, depth, dtype=stored)
                rows = [spread(row, column_stride) for row in values]
                expected = np.array([row[:depth] for row in rows]).reshape(count, depth).T
                packed = pack_rows(kernels, rows, depth, column_stride)
                assert same_bits(packed, expected.astype(kernels.dtype))


def test_special_values_stay_what_they_are(kernels):
    smallest = np.finfo(kernels.dtype).smallest_subnormal
    special = np.array([np.nan, np.inf, -np.inf, -0.0, smallest], kernels.dtype)
    rows = np.tile(special, (kernels.vl + 1, 8))
    assert same_bits(pack_rows(kernels, list(rows), 40, 1), np.ascontiguousarray(rows.T))


def test_one_row_may_stand_for_many(kernels):
    """A last panel of keys repeats its last key."""
    row = random(1, 23, dtype=kernels.dtype)
    packed = pack_rows(kernels, [row] * kernels.attention_nr, 23, 1)
    assert same_bits(packed, np.repeat(row[:, None], kernels.attention_nr, axis=1))


def pack_columns(kernels, src, columns, width, scale=1.0):
    depth = len(src)
    target = Guarded(depth * width, kernels.dtype)
    strides = (stride // src.itemsize for stride in src.strides)
    kernels.pack_columns[src.dtype](
        address(target.array), address(src), depth, columns, width, *strides, scale
    )
    target.check()
    return target.array.reshape(depth, width)


def test_columns_are_padded_with_zeros(kernels):
    nr, vl = kernels.gemm_nr, kernels.vl
    for columns in sorted({1, vl - 1, vl, vl + 1, nr - 1, nr} - {0}):
        for width in (kernels.whole_vectors(columns), nr):
            for depth in (0, 1, 7, 64):
                for stored in kernels.pack_columns:
                    src = random(columns, depth, columns, dtype=stored)
                    expected = np.zeros((depth, width), kernels.dtype)
                    expected[:, :columns] = src
                    assert same_bits(pack_columns(kernels, src, columns, width), expected)


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a[:, 1:-4],
        lambda a: a[:, 1::2],
        lambda a: a[::-1, 3:9],
        lambda a: a[::2, ::-1],
        lambda a: a.T[:, :11],
        lambda a: np.broadcast_to(a[:1, :7], (5, 7)),
        lambda a: np.broadcast_to(a[:, :1], (20, 9)),
    ],
    ids=["slice", "step", "rows reversed", "both", "transposed", "one row", "one column"],
)
def test_columns_of_any_strides(kernels, view):
    for stored in kernels.pack_columns:
        src = view(random(3, 20, 17, dtype=stored))
        columns = src.shape[1]
        width = kernels.whole_vectors(columns)
        packed = pack_columns(kernels, src, columns, width)
        assert same_bits(packed[:, :columns].copy(), src.astype(kernels.dtype, order="C"))
        assert not packed[:, columns:].any()


def test_scale_is_one_rounded_factor(kernels):
    for scale in (0.5, -1.7, 1e-3, 0.0, 1 / 3):
        for step in (1, 2):
            for stored in kernels.pack_columns:
                src = random(0, 9, 2 * 41, dtype=stored)[:, ::step][:, :41]
                packed = pack_columns(kernels, src, 41, 41, scale)
                expected = kernels.dtype.type(scale) * src.astype(kernels.dtype)
                np.testing.assert_array_equal(packed, expected)


def load_row(kernels, row, count, stride):
    target = Guarded(count, kernels.dtype)
    kernels.load_row[row.dtype](address(target.array), address(row), count, stride)
    target.check()
    return target.array


@pytest.mark.parametrize("stride", [1, 2, 5, -1, -3, 0])
def test_a_row_of_any_type_is_loaded(kernels, stride):
    vl = kernels.vl
    for count in sorted({0, 1, vl - 1, vl, vl + 1, 2 * vl - 1, 3 * vl, 37}):
        for stored in kernels.load_row:
            # Of numbers that float32 does not hold, float64 rows are rounded to the nearest.
            row = spread(random(count, count, dtype=np.float64).astype(stored), stride)
            loaded = load_row(kernels, row, count, stride)
            assert same_bits(loaded, row[:count].astype(kernels.dtype))


def test_a_row_of_special_values(kernels):
    special = np.array([np.nan, np.inf, -np.inf, -0.0, 1e300, 1e-300], np.float64)
    with np.errstate(over="ignore"):
        for stored in kernels.load_row:
            row = np.resize(special, 4 * kernels.vl + 3).astype(stored)
            for stride in (1, 2):
                count = len(row) // stride
                loaded = load_row(kernels, row, count, stride)
                assert same_bits(loaded, row[::stride][:count].astype(kernels.dtype))


# ------------------------------------------------------------------ the bounds of reading


@pytest.fixture(scope="module")
def fenced_page():
    """A page of memory between two that kill whoever touches them."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 3 * page)
    buffer = (ctypes.c_char * (3 * page)).from_buffer(memory)
    start = ctypes.addressof(buffer)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for fence in (start, start + 2 * page):
        assert protect(fence, page, 0) == 0  # PROT_NONE
    yield np.frombuffer(buffer, np.uint8, page, page)
    for fence in (start, start + 2 * page):
        assert protect(fence, page, mmap.PROT_READ | mmap.PROT_WRITE) == 0


@pytest.mark.parametrize("stride", [1, 2, -1, -2, 0])
@pytest.mark.parametrize("end", ["first", "last"])
def test_nothing_is_read_beyond_a_row(kernels, fenced_page, stride, end):
    """Rows that begin or end with the memory that may be read: a kernel that reads on crashes."""
    vl = kernels.vl
    for count in sorted({1, vl - 1, vl, vl + 1, 2 * vl - 1, 2 * vl} - {0}):
        for stored in kernels.load_row:
            values = random(count, count, dtype=np.float64).astype(stored)
            span = abs(stride) * (count - 1) + 1
            page = fenced_page.view(stored)
            memory = page[:span] if end == "first" else page[-span:]
            forward = memory if stride >= 0 else memory[::-1]
            row = forward[:: abs(stride) or 1]
            row[:] = values if stride else values[0]
            expected = (row if stride else np.repeat(row, count)).astype(kernels.dtype)
            assert same_bits(load_row(kernels, row, count, stride), expected)
            if stored in kernels.pack_rows:
                packed = pack_rows(kernels, [row] * (vl + 1), count, stride)
                assert same_bits(packed, np.repeat(expected[:, None], vl + 1, axis=1))
                target = Guarded(count, kernels.dtype)
                kernels.pack_columns[stored](
                    address(target.array), address(row), 1, count, count, 0, stride, 1.0
                )
                target.check()
                assert same_bits(target.array, expected)
