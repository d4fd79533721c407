"""Attention tiles: rows of one key/value head by keys that stay in the L2 cache, one thread."""

import pytest

from tileattn.bench.attention import prepare
from tileattn.bench.cells import Attention
from tileattn.bench.records import OURS

KEYS = 512


@pytest.mark.parametrize("H", [32, 64, 128, 256])
@pytest.mark.parametrize("rows", [1, 4, 16, 64, 192])
def test_attention_tile(measure, isa, rows, H):
    cell = Attention(f"{rows} rows, H {H}", B=1, T=rows, S=KEYS, N=1, K=1, H=H)
    measure(prepare(cell), OURS, 1)
