"""Weights of few bits: what a block packs them from, and how floats become them."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np

from tileattn._arguments import BlockWeights, HeadMatrix, QuantizedParameters, Weight
from tileattn._values import Array, ArrayLike, as_array, check_array, check_int

WeightDtype: TypeAlias = Literal["bfloat16", "int8", "int4"]

#: Each divides a slice of the contracted axis: no group may lie in two.
GROUP_SIZES = (32, 64, 128, 256, 512)
#: Kernels multiply 8 bits with 2^-24 of a scale, which must not be subnormal.
LEAST_SCALE = 2.0**-100
#: Of scales, minima and weights to be rounded: no step of what is made of them leaves float32.
GREATEST = np.float64(2.0**120)
#: Rows [out, in] that are quantised at once: a few megabytes of float64.
_ELEMENTS_AT_ONCE = 1 << 18


class QuantizedMatrix(QuantizedParameters):
    """Weights ``[out, in]`` as integers of 8 or 4 bits, with scales: ``values * scales + minima``.

    `AttentionBlock.from_linear` takes it for a weight, and computes in float32 with what
    `dequantize` gives, bit for bit, without ever holding all of it.

    Parameters
    ----------
    values : array [out, in]
        Of int8, with 4 bits from -8 to 7; or with `minima` of uint8, from 0 to 15.
    scales : array [out, in / group_size], float16 or float32
        Those of a group of columns each.
    minima : array of scales' shape and dtype, optional
        With 4 bits and unsigned values.
    bits : 8 or 4, optional
    group_size : int, optional
        32, 64, 128, 256 or 512, of which the last group may have fewer; by default all of a row.

    Attributes
    ----------
    shape : tuple of int
        (out, in).
    bits, group_size : int

    Raises
    ------
    TypeError, ValueError
        For dtypes, shapes or values that do not fit, scales or minima that are not finite or beyond
        2^120, and with 4 bits if they (without minima, the scales and -8 times them) are no float16
        numbers times one power of two.

    Notes
    -----
    The types of GGUF files, whose blocks are 32 weights of a row: with ``d`` and ``m`` their
    float16 numbers, Q8_0 is ``QuantizedMatrix(values, d, group_size=32)``, Q4_0 the same with
    ``values - 8`` as int8 and ``bits=4``, and Q4_1
    ``QuantizedMatrix(values, d, m, bits=4, group_size=32)``.

    The values given are not copied, but with 4 bits without minima: they are to stay as they are
    until a block has been made.

    Examples
    --------
    >>> import numpy as np, tileattn
    >>> values = np.array([[-127, 64, 3]], np.int8)
    >>> matrix = tileattn.QuantizedMatrix(values, np.array([[0.5]], np.float32))
    >>> matrix.dequantize()
    array([[-63.5,  32. ,   1.5]], dtype=float32)
    """

    def __init__(
        self,
        values: ArrayLike,
        scales: ArrayLike,
        minima: ArrayLike | None = None,
        *,
        bits: int = 8,
        group_size: int | None = None,
    ) -> None:
        values = as_array("values", values)[...]  # a view keeps its shape, whatever theirs becomes
        bits = _check_bits(bits)
        if bits == 8 and minima is not None:
            raise ValueError("minima go with bits = 4; 8 bits are symmetric")
        expected = np.dtype(np.int8 if minima is None else np.uint8)
        if values.dtype != expected:
            raise TypeError(
                f"values must be {expected} {'without' if minima is None else 'with'} minima, "
                f"not {values.dtype}"
            )
        if values.ndim != 2 or 0 in values.shape:
            raise ValueError(f"values must have the axes [out, in], none empty, not {values.shape}")
        lowest, highest = (-8, 7) if minima is None else (0, 15)
        if bits == 4 and (values.min() < lowest or values.max() > highest):
            raise ValueError(
                f"values of 4 bits must lie from {lowest} to {highest}, not from "
                f"{values.min()} to {values.max()}"
            )
        out, depth = values.shape
        group_size = _check_group_size(group_size, depth)
        scale = _check_scales("scales", scales, (out, -(-depth // group_size)))
        if bits == 8:
            if np.any((scale != 0) & (np.abs(scale) < LEAST_SCALE)):
                raise ValueError(f"scales must be 0 or {LEAST_SCALE:.1g} at least in size")
            self._set(values, scale.astype(np.float32, copy=False), None, 1.0, bits, group_size)
            return
        if minima is None:
            # v s = (v + 8) s - 8 s
            values = (values + np.int8(8)).view(np.uint8)
            minimum = -8 * scale.astype(np.float32)
        else:
            minimum = _check_scales("minima", minima, scale.shape, scale.dtype)
        unit = _unit_of(scale, minimum)
        scale, minimum = _narrowed("scales", scale, unit), _narrowed("minima", minimum, unit)
        self._set(values, scale, minimum, unit, bits, group_size)

    def _set(
        self,
        values: Array,
        scales: Array,
        minima: Array | None,
        unit: float,
        bits: int,
        group_size: int,
    ) -> None:
        out, depth = values.shape
        self.shape, self.bits, self.group_size = (out, depth), bits, group_size
        self._values, self._scales, self._minima, self._unit = values, scales, minima, unit

    @classmethod
    def from_float(
        cls, weights: ArrayLike, *, bits: int = 8, group_size: int | None = None
    ) -> QuantizedMatrix:
        """Round weights ``[out, in]`` as ``AttentionBlock(weight_dtype=...)`` does.

        Parameters
        ----------
        weights : array [out, in], float32 or float64
        bits : 8 or 4, optional
            8: symmetric, the largest of a group is 127. 4: a group's lowest is 0, its highest 15.
        group_size : int, optional
            As in the constructor; by default 32 with 4 bits.

        Returns
        -------
        QuantizedMatrix

        Raises
        ------
        TypeError, ValueError
            For dtypes and shapes that do not fit, NaN, infinity, and weights beyond 2^120.

        Examples
        --------
        >>> import numpy as np, tileattn
        >>> w = np.array([[-1.0, 0.25, 0.5]], np.float32)
        >>> tileattn.QuantizedMatrix.from_float(w).dequantize().round(2)
        array([[-1.  ,  0.25,  0.5 ]], dtype=float32)
        """
        weights = check_array("weights", weights)
        if weights.ndim != 2 or 0 in weights.shape:
            raise ValueError(
                f"weights must have the axes [out, in], none empty, not {weights.shape}"
            )
        bits = _check_bits(bits)
        if bits == 4 and group_size is None:
            group_size = 32
        return cls._rounded(
            "weights", weights, bits, _check_group_size(group_size, weights.shape[1])
        )

    @classmethod
    def _rounded(cls, name: str, weights: Array, bits: int, group_size: int) -> QuantizedMatrix:
        out, depth = weights.shape
        starts = np.arange(0, depth, group_size)
        step = max(1, _ELEMENTS_AT_ONCE // depth)
        parts = [slice(i, i + step) for i in range(0, out, step)]
        values = np.empty((out, depth), np.int8 if bits == 8 else np.uint8)
        scales: Array = np.empty((out, len(starts)), np.float32)
        minima: Array = np.zeros_like(scales)
        for part in parts:
            with np.errstate(invalid="ignore"):  # of a signalling NaN, which is refused below
                w = weights[part].astype(np.float64)
            if not (np.abs(w) <= GREATEST).all():
                raise ValueError(
                    f"{name} has NaN or infinity, or weights beyond {GREATEST:.1g}, "
                    f"which {bits} bits cannot hold"
                )
            if bits == 8:
                scale = np.maximum.reduceat(np.abs(w), starts, axis=1) / 127
                scales[part] = np.where(scale < LEAST_SCALE, 0, scale)
            else:
                minima[part] = lowest = np.minimum.reduceat(w, starts, axis=1)
                scales[part] = (np.maximum.reduceat(w, starts, axis=1) - lowest) / 15
        unit = 1.0
        if bits == 4:
            unit = _unit_of(scales, minima)
            scales, minima = ((a / np.float32(unit)).astype(np.float16) for a in (scales, minima))
        lowest_value, highest_value = (-127, 127) if bits == 8 else (0, 15)
        for part in parts:
            scale, minimum = (
                _in_columns(a[part], unit, group_size, depth).astype(np.float64)
                for a in (scales, minima)
            )
            steps = (weights[part] - minimum) / np.where(scale == 0, np.inf, scale)
            values[part] = np.clip(np.rint(steps), lowest_value, highest_value)
        matrix = cls.__new__(cls)
        matrix._set(values, scales, None if bits == 8 else minima, unit, bits, group_size)
        return matrix

    def dequantize(self) -> Array:
        """The weights [out, in] in float32: what enters the arithmetic.

        Returns
        -------
        array [out, in], float32

        Examples
        --------
        >>> import numpy as np, tileattn
        >>> values, scale = np.array([[-8, 7]], np.int8), np.array([[0.25]], np.float16)
        >>> tileattn.QuantizedMatrix(values, scale, bits=4).dequantize()
        array([[-2.  ,  1.75]], dtype=float32)
        """
        weights: Array = self._values * self._in_columns(self._scales)
        if self._minima is not None:
            weights += self._in_columns(self._minima)
        return weights

    def _in_columns(self, of_groups: Array) -> Array:
        return _in_columns(of_groups, self._unit, self.group_size, self.shape[1])

    def __repr__(self) -> str:
        out, depth = self.shape
        return f"QuantizedMatrix([{out}, {depth}], bits={self.bits}, group_size={self.group_size})"

    def _split(self, cuts: list[int]) -> list[QuantizedMatrix]:
        """Its rows, as np.split has them."""
        parts = []
        for begin, end in zip([0, *cuts], [*cuts, self.shape[0]], strict=True):
            values, scales = self._values[begin:end], self._scales[begin:end]
            minima = None if self._minima is None else self._minima[begin:end]
            part = QuantizedMatrix.__new__(QuantizedMatrix)
            part._set(values, scales, minima, self._unit, self.bits, self.group_size)
            parts.append(part)
        return parts


def convert_weights(w: BlockWeights, round_bfloat16: bool = False) -> BlockWeights:
    """The weights as `weight_dtype` says; bfloat16 is left to the packing, or rounded here."""
    if w.weight_dtype is None:
        return w
    matrices: list[Weight] = []
    for name, matrix in zip(("w_q", "w_k", "w_v", "w_o"), w.matrices, strict=True):
        if isinstance(matrix, HeadMatrix):
            matrices.append(matrix)
        elif w.weight_dtype == "bfloat16":
            matrices.append(_to_bfloat16(matrix) if round_bfloat16 else matrix)
        else:
            depth = matrix.shape[0] if name != "w_o" else matrix.shape[0] * matrix.shape[1]
            bits, group_size = (8, depth) if w.weight_dtype == "int8" else (4, 32)
            rows = matrix.reshape(depth, -1).T
            quantized = QuantizedMatrix._rounded(name, rows, bits, group_size)
            matrices.append(HeadMatrix(quantized, matrix.shape))
    return w._replace(matrices=tuple(matrices))


def _to_bfloat16(array: Array) -> Array:
    """float32, rounded to the nearest bfloat16, ties to even. A NaN stays as it is."""
    bits = array.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return np.where(np.isnan(array), array, rounded.astype(np.uint32).view(np.float32))


def _in_columns(of_groups: Array, unit: float, group_size: int, depth: int) -> Array:
    """What groups have, repeated for each column, in float32."""
    wide = of_groups.astype(np.float32) * np.float32(unit)
    return np.repeat(wide, group_size, axis=1)[:, :depth]


def _check_bits(bits: int) -> int:
    bits = check_int("bits", bits)
    if bits not in (8, 4):
        raise ValueError(f"bits must be 8 or 4, not {bits}")
    return bits


def _check_group_size(group_size: int | None, depth: int) -> int:
    if group_size is None:
        return depth
    group_size = check_int("group_size", group_size)
    if group_size not in GROUP_SIZES and group_size != depth:
        sizes = ", ".join(map(str, GROUP_SIZES))
        raise ValueError(f"group_size must be one of {sizes} or all {depth}, not {group_size}")
    return group_size


def _check_scales(
    name: str, scales: ArrayLike, shape: tuple[int, ...], dtype: np.dtype[Any] | None = None
) -> Array:
    scales = as_array(name, scales)[...]
    if scales.dtype not in (np.float16, np.float32) or (dtype and scales.dtype != dtype):
        raise TypeError(f"{name} must be {dtype or 'float16 or float32'}, not {scales.dtype}")
    if scales.shape != shape:
        raise ValueError(
            f"{name} must have the shape [out, in / group_size] = {shape}, not {scales.shape}"
        )
    scales = scales.copy()  # what is checked here stays so, and lies where pointers reach it
    if not (np.abs(scales) <= GREATEST).all():
        raise ValueError(f"{name} has NaN or infinity, or numbers beyond {GREATEST:.1g}")
    return scales


def _unit_of(scales: Array, minima: Array) -> float:
    """The power of two that brings the largest of them near to the end of float16's range."""
    largest = max(float(np.abs(scales).max()), float(np.abs(minima).max()))
    unit = 2.0 ** max(np.frexp(largest)[1] - 16, -126)
    return float(unit if largest / unit <= 65504 else 2 * unit)


def _narrowed(name: str, scales: Array, unit: float) -> Array:
    """float16 numbers that are `scales` when multiplied by `unit`."""
    wide = scales.astype(np.float64)
    narrow = (wide / unit).astype(np.float16)
    if not np.array_equal(narrow.astype(np.float64) * unit, wide):
        raise ValueError(
            f"{name} of 4 bits must be float16 numbers times one power of two, here {unit:g}; "
            f"round them with .astype(np.float16), or let from_float choose"
        )
    return narrow
