"""What a type checker makes of calls: mypy reads this file, pytest runs it."""

from typing import Any, Literal, assert_type

import numpy as np
import numpy.typing as npt
import pytest

import tileattn
from tileattn import cost, reference

pytestmark = pytest.mark.any_isa

Array = npt.NDArray[Any]


def arrays(*shape: int) -> npt.NDArray[np.float32]:
    return np.ones(shape, np.float32)


@pytest.mark.parametrize("flag", [False, True])
def test_an_lse_that_is_asked_for_is_returned(flag: bool) -> None:
    x, starts = arrays(1, 3, 2, 8), [0, 3]
    for attend in (tileattn.dot_product_attention, reference.dot_product_attention):
        assert_type(attend(x, x, x), Array)
        assert_type(attend(x, x, x, return_lse=True), tuple[Array, Array])
        assert_type(attend(x, x, x, return_lse=flag), Array | tuple[Array, Array])
    for varlen in (tileattn.varlen_attention, reference.varlen_attention):
        assert_type(varlen(x[0], x[0], x[0], starts, starts), Array)
        assert_type(varlen(x[0], x[0], x[0], starts, starts, return_lse=True), tuple[Array, Array])
        assert_type(
            varlen(x[0], x[0], x[0], starts, starts, return_lse=flag), Array | tuple[Array, Array]
        )
    cache = tileattn.KVCache(1, 4, num_kv_heads=2, head_dim=8)
    cache.append(x, x)
    assert_type(cache.attend(x), Array)
    assert_type(cache.attend(x, return_lse=True), tuple[Array, Array])
    both = assert_type(cache.attend(x, return_lse=flag), Array | tuple[Array, Array])
    assert isinstance(both, tuple) is flag


def test_results_are_arrays() -> None:
    x = arrays(1, 3, 2, 8)
    out, lse = tileattn.dot_product_attention(x, x, x, return_lse=True)
    assert_type(tileattn.merge_states(out, lse, out, lse), tuple[Array, Array])
    assert_type(tileattn.attention_weights(x, x, lse, reduce="keys"), Array)
    assert_type(tileattn.apply_rope(x, [0, 1, 2]), Array)
    assert_type(tileattn.LayerNorm(eps=1e-12)(x), Array)
    assert_type(tileattn.QuantizedMatrix.from_float(arrays(4, 8)).dequantize(), Array)


class Tensor:
    """With what every library has."""

    def __init__(self, array: npt.NDArray[np.float32]) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **options: Any) -> object:
        return self.array.__dlpack__(**options)


def test_dlpack_is_enough() -> None:
    x = Tensor(arrays(3, 2, 8))
    assert_type(tileattn.dot_product_attention(x, x, x, mask=np.True_), Array)
    assert_type(reference.dot_product_attention(x, x, x, sinks=Tensor(arrays(2))), Array)
    assert_type(tileattn.apply_rope(x, range(3)), Array)
    assert_type(tileattn.LayerNorm(Tensor(arrays(8)))(x), Array)
    with pytest.raises(TypeError, match="object"):
        tileattn.dot_product_attention(x, object(), x)  # type: ignore[call-overload]


def test_a_block_and_its_caches() -> None:
    w, w_o, x = arrays(16, 2, 8), arrays(2, 8, 16), arrays(1, 3, 16)
    block = tileattn.AttentionBlock(w, w, w, w_o, norm=tileattn.RMSNorm(), is_causal=True)
    assert_type(block(x), Array)
    assert_type(block.profile(x), tuple[Array, list[tuple[str, float]]])
    cache = assert_type(block.context_cache(x), tileattn.KVCache)
    assert_type(cache.lengths, npt.NDArray[np.int64])
    assert_type(cache.key_scales, Array | None)
    assert_type(block.num_heads, int)


def test_plans_and_costs() -> None:
    x = arrays(1, 3, 2, 8)
    plan = assert_type(tileattn.explain(x, x, x), tileattn.Plan)
    assert_type(plan.path, Literal["streaming", "tiled"])
    assert_type(plan.register_tile, tuple[int, int] | None)
    total = assert_type(cost.attention_block_cost(1, 3, 16, 2, 2, 8), cost.BlockCost)
    assert_type(total.rows[0].shape, tuple[int, ...])
    assert_type(total.intensity, float)


def test_names_that_do_not_exist_are_found_before_the_call() -> None:
    w, w_o, x = arrays(16, 2, 8), arrays(2, 8, 16), arrays(1, 3, 2, 8)
    with pytest.raises(ValueError, match="weight_dtype"):
        tileattn.AttentionBlock(w, w, w, w_o, weight_dtype="int2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="norm_position"):
        tileattn.AttentionBlock(w, w, w, w_o, norm_position="before")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="arithmetic"):
        tileattn.explain(x, x, x, arithmetic="float16")  # type: ignore[arg-type]
