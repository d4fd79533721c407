"""Types of the compiled loops; see _core.pyx for what they do."""

from typing import Any

import numpy as np
import numpy.typing as npt

from tileattn._arguments import BlockWeights, CacheSpan, NormParameters, QuantizedParameters

_Array = npt.NDArray[Any]
_Integers = npt.NDArray[np.int64]

KEY_BLOCK: int
SLICE_DEPTH: int

def compiled_isas() -> tuple[str, ...]: ...
def available_isas() -> tuple[str, ...]: ...
def active_isa() -> str: ...
def select_isa(name: str) -> None: ...
def kernel_table(dtype: str) -> dict[str, int | list[int]]: ...
def keep_scratch(at_most: int) -> int: ...
def allowed_threads(limit: int) -> int: ...
def measure_fma_peak(dtype: str, threads: int) -> float: ...
def measure_dot_peak(threads: int) -> float: ...
def measure_read_bandwidth(source: _Array, threads: int) -> float: ...

class PackedMatrix:
    depth: int
    columns: tuple[int, ...]
    nbytes: int
    def __new__(
        cls,
        *matrices: _Array | QuantizedParameters,
        bfloat16: bool = ...,
        float32: bool = ...,
        int8: bool = ...,
    ) -> PackedMatrix: ...

class Visibility:
    is_causal: bool
    query_offset: _Integers | None
    query_lengths: _Integers | None
    key_value_lengths: _Integers | None
    window: tuple[int, int] | None
    mask: npt.NDArray[np.bool_] | None
    def __init__(
        self,
        is_causal: bool,
        query_offset: _Integers | None,
        query_lengths: _Integers | None,
        key_value_lengths: _Integers | None,
        window: tuple[int, int] | None = None,
        mask: npt.NDArray[np.bool_] | None = None,
    ) -> None: ...
    def with_mask(self, mask: npt.NDArray[np.bool_] | None) -> Visibility: ...

class Scores:
    scale: float
    softcap: float
    bias: _Array | None
    alibi_slopes: _Array | None
    sinks: _Array | None
    def __init__(
        self,
        scale: float,
        softcap: float = 0.0,
        bias: _Array | None = None,
        alibi_slopes: _Array | None = None,
        sinks: _Array | None = None,
    ) -> None: ...
    def with_bias(self, bias: _Array | None) -> Scores: ...

def attention(
    q: _Array,
    k: _Array,
    v: _Array,
    out: _Array | None,
    lse: _Array | None,
    scores: Scores,
    visibility: Visibility,
    threads: int,
    query_starts: _Integers | None = None,
    key_starts: _Integers | None = None,
    sizes: tuple[int, ...] | None = None,
    ring: bool = ...,
    report: bool = ...,
    float32: bool = ...,
    k_scales: _Array | None = None,
    v_scales: _Array | None = None,
) -> Any: ...  # with a report the fields of a Plan, else None
def attention_weights(
    q: _Array,
    k: _Array,
    lse: _Array,
    out: _Array,
    scores: Scores,
    visibility: Visibility,
    rows: _Integers | None,
    summed: str | None,
    threads: int,
) -> None: ...
def merge_states(
    outs: list[_Array],
    lses: list[_Array],
    out: _Array,
    lse: _Array,
    threads: int,
) -> None: ...

class Memory:
    def __new__(cls, nbytes: int) -> Memory: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

def append(
    k: _Array,
    v: _Array,
    keys: _Array,
    values: _Array,
    key_scales: _Array | None,
    value_scales: _Array | None,
    starts: _Integers,
    counts: _Integers,
    threads: int,
) -> None: ...

class Block:
    nbytes: int
    arithmetic: str
    def __init__(self, w: BlockWeights) -> None: ...
    def run(
        self,
        x: _Array,
        context: _Array | None,
        scores: Scores,
        visibility: Visibility,
        positions: _Integers | None,
        q_angles: tuple[_Array, _Array] | None,
        k_angles: tuple[_Array, _Array] | None,
        out: _Array,
        threads: int,
        span: CacheSpan | None,
    ) -> tuple[float, float, float]: ...
    def fill(
        self,
        context: _Array,
        span: CacheSpan,
        angles: tuple[_Array, _Array] | None,
        threads: int,
    ) -> None: ...

def project(
    x: _Array,
    w: PackedMatrix,
    outputs: tuple[_Array, ...],
    biases: tuple[_Array | None, ...],
    threads: int,
) -> None: ...
def add_norm(
    x: _Array,
    residual: _Array | None,
    out: _Array,
    norm: NormParameters,
    threads: int,
) -> None: ...
def rope(
    x: _Array,
    out: _Array,
    cos: _Array,
    sin: _Array,
    rotary_dim: int,
    interleaved: bool,
    threads: int,
) -> None: ...
