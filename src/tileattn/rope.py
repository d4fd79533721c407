"""Rotary position embedding (RoPE), and how it is stretched for longer sequences."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from tileattn import _core
from tileattn._arguments import RopeParameters, check_rope_inputs, fit_rotary_dim
from tileattn._scores import POSITION_LIMIT
from tileattn._values import (
    Array,
    ArrayLike,
    Integers,
    check_at_least,
    check_flag,
    check_int,
    check_real,
)
from tileattn.config import resolve_threads

Float64 = npt.NDArray[np.float64]


class RopeScaling(ABC):
    """How RoPE is stretched beyond the length that a model was trained for.

    Made by one of `linear`, `ntk`, `yarn` and `llama3`; a model's configuration says which, and
    `Rope.from_config` reads it.

    Attributes
    ----------
    attention_factor : float
        What multiplies cos and sin; 1 but for YaRN.

    Notes
    -----
    A scaling does not change once it is made. It changes the frequencies ``theta**(-2 i / R)`` of
    the R / 2 pairs of columns, R being `rotary_dim`:

    - linear: divided by `factor`, which interpolates positions [1]_;
    - ntk: those of ``theta * factor**(R / (R - 2))``, so that the slowest is divided by `factor`
      and the fastest stays;
    - yarn: divided by `factor` for pairs that turn slowly, kept for those that turn fast, with a
      ramp over i in between [2]_;
    - llama3: the same with a ramp over the number of turns.

    The paper on YaRN describes a ramp over the number of turns as well. Its authors' code, and
    the models that use it, have one over i.

    References
    ----------
    .. [1] S. Chen et al., "Extending context window of large language models via positional
       interpolation", 2023.
    .. [2] B. Peng et al., "YaRN: efficient context window extension of large language models",
       2023.

    Examples
    --------
    >>> import tileattn
    >>> tileattn.RopeScaling.linear(4)
    RopeScaling.linear(factor=4.0)
    >>> tileattn.Rope(scaling=tileattn.RopeScaling.llama3(8, 1, 4, 8192)).frequencies(4)
    array([1.  , 0.01])
    """

    kind: ClassVar[str]
    attention_factor: float = 1.0

    @abstractmethod
    def frequencies(self, theta: float, rotary_dim: int) -> Float64:
        """Angle in radians by which each pair turns from one position to the next.

        Parameters
        ----------
        theta : float
            The base of the frequencies, above 1.
        rotary_dim : int
            How many of a head's columns are rotated.

        Returns
        -------
        float64 array [rotary_dim / 2]

        Examples
        --------
        >>> import tileattn
        >>> tileattn.RopeScaling.linear(4).frequencies(10000.0, 4)
        array([0.25  , 0.0025])
        """

    def __repr__(self) -> str:
        parameters = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"RopeScaling.{self.kind}({parameters})"

    @staticmethod
    def linear(factor: float) -> RopeScaling:
        """Positional interpolation: positions are divided by `factor`.

        Parameters
        ----------
        factor : float
            At least 1.

        Returns
        -------
        RopeScaling

        Raises
        ------
        TypeError, ValueError
            For another `factor`.

        Examples
        --------
        >>> import tileattn
        >>> tileattn.RopeScaling.linear(4).frequencies(10000.0, 4)
        array([0.25  , 0.0025])
        """
        return _Linear(check_at_least("factor", factor, 1))

    @staticmethod
    def ntk(factor: float) -> RopeScaling:
        """NTK-aware interpolation with a fixed `factor`.

        What is called dynamic takes a new factor, ``factor * length / original_max_position -
        (factor - 1)``, for each length beyond the original one, and so turns the keys already in a
        cache out of place.

        Parameters
        ----------
        factor : float
            At least 1.

        Returns
        -------
        RopeScaling

        Raises
        ------
        TypeError, ValueError
            For another `factor`.

        Examples
        --------
        >>> import tileattn
        >>> tileattn.RopeScaling.ntk(4).frequencies(10000.0, 4)
        array([1.    , 0.0025])
        """
        return _Ntk(check_at_least("factor", factor, 1))

    @staticmethod
    def yarn(
        factor: float,
        original_max_position: int,
        *,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        attention_factor: float | None = None,
        truncate: bool = True,
    ) -> RopeScaling:
        """YaRN: pairs that turn slowly are interpolated.

        Parameters
        ----------
        factor : float
            At least 1.
        original_max_position : int
            The length that the model was trained for.
        beta_fast, beta_slow : float, optional
            Pairs that turn more than `beta_fast` times over that length stay as they are, those
            that turn less than `beta_slow` times are interpolated, and between them is a ramp.
        attention_factor : float, optional
            What multiplies cos and sin, by default ``0.1 * log(factor) + 1``.
        truncate : bool, optional
            Whether the ramp begins and ends at whole numbers of a pair.

        Returns
        -------
        RopeScaling

        Raises
        ------
        TypeError, ValueError
            For parameters of another type or out of range.

        Examples
        --------
        >>> import tileattn
        >>> scaling = tileattn.RopeScaling.yarn(32, 4096)
        >>> round(scaling.attention_factor, 4)
        1.3466
        """
        factor = check_at_least("factor", factor, 1)
        fast, slow = check_real("beta_fast", beta_fast), check_real("beta_slow", beta_slow)
        if not 0 < slow < fast:
            raise ValueError(
                f"beta_slow = {slow:g} must be positive and below beta_fast = {fast:g}"
            )
        if attention_factor is None:
            attention_factor = _yarn_attention_factor(factor)
        if (attention := check_real("attention_factor", attention_factor)) <= 0:
            raise ValueError(f"attention_factor must be positive, got {attention_factor!r}")
        return _Yarn(
            factor,
            _check_length("original_max_position", original_max_position),
            fast,
            slow,
            check_flag("truncate", truncate),
            attention,
        )

    @staticmethod
    def llama3(
        factor: float,
        low_freq_factor: float,
        high_freq_factor: float,
        original_max_position: int,
    ) -> RopeScaling:
        """Interpolation as in Llama 3.1 (8, 1, 4, 8192) and 3.2 (32, 1, 4, 8192).

        Parameters
        ----------
        factor : float
            At least 1.
        low_freq_factor, high_freq_factor : float
            Pairs that turn less than `low_freq_factor` times over `original_max_position` are
            interpolated, those that turn more than `high_freq_factor` times stay as they are, and
            between them is a ramp.
        original_max_position : int
            The length that the model was trained for.

        Returns
        -------
        RopeScaling

        Raises
        ------
        TypeError, ValueError
            For parameters of another type or out of range.

        Examples
        --------
        >>> import tileattn
        >>> tileattn.RopeScaling.llama3(8, 1, 4, 8192).frequencies(10000.0, 4)
        array([1.  , 0.01])
        """
        low = check_real("low_freq_factor", low_freq_factor)
        high = check_real("high_freq_factor", high_freq_factor)
        if not 0 < low < high:
            raise ValueError(
                f"low_freq_factor = {low:g} must be positive and below high_freq_factor = {high:g}"
            )
        length = _check_length("original_max_position", original_max_position)
        return _Llama3(check_at_least("factor", factor, 1), low, high, length)


@dataclass(frozen=True, repr=False)
class _Linear(RopeScaling):
    kind = "linear"
    factor: float

    def frequencies(self, theta: float, rotary_dim: int) -> Float64:
        return _frequencies(theta, rotary_dim) / self.factor


@dataclass(frozen=True, repr=False)
class _Ntk(RopeScaling):
    kind = "ntk"
    factor: float

    def frequencies(self, theta: float, rotary_dim: int) -> Float64:
        # theta and the power of the factor one by one, since their product may overflow. A single
        # pair has the frequency 1, whatever they are.
        shares = np.arange(0, rotary_dim, 2) / max(1, rotary_dim - 2)
        return _frequencies(theta, rotary_dim) * self.factor**-shares


@dataclass(frozen=True, repr=False)
class _Yarn(RopeScaling):
    kind = "yarn"
    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float

    def frequencies(self, theta: float, rotary_dim: int) -> Float64:
        kept = _frequencies(theta, rotary_dim)

        def pair_that_turns(times: float) -> float:
            wavelength = self.original_max_position / times
            return rotary_dim / 2 * math.log(wavelength / (2 * math.pi)) / math.log(theta)

        # Numbers of a pair far outside, even infinite ones, are as good as those just outside.
        begin, end = (
            min(max(pair_that_turns(times), -1.0), float(rotary_dim))
            for times in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            begin, end = math.floor(begin), math.ceil(end)
        # Counted in columns, not pairs, as in the authors' code: the models were trained with it.
        begin, end = max(begin, 0), min(end, rotary_dim - 1)
        if end <= begin:
            end = begin + 0.001
        ramp = np.clip((np.arange(rotary_dim // 2) - begin) / (end - begin), 0, 1)
        return _interpolate(kept, self.factor, ramp)


@dataclass(frozen=True, repr=False)
class _Llama3(RopeScaling):
    kind = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def frequencies(self, theta: float, rotary_dim: int) -> Float64:
        kept = _frequencies(theta, rotary_dim)
        low, high = self.low_freq_factor, self.high_freq_factor
        turns = self.original_max_position * kept / (2 * math.pi)
        ramp = np.clip((high - turns) / (high - low), 0, 1)
        return _interpolate(kept, self.factor, ramp)


class Rope(RopeParameters):
    """Rotary position embedding: pairs of columns are turned by angles that grow with position.

    Done to queries and keys, it makes the scores ``q . k`` depend on the differences of their
    positions [1]_. Call it with either and with their positions.

    Parameters
    ----------
    theta : float, optional
        The base of the frequencies, above 1.
    rotary_dim : int, optional
        How many of a head's columns, from the first on, are rotated: even, and by default all.
    interleaved : bool, optional
        Pairs are the columns 2i and 2i + 1 (GPT-J, Cohere, GLM, the original Llama weights). By
        default they are i and i + rotary_dim / 2 (GPT-NeoX, and nearly everything in Hugging Face's
        layout).
    scaling : RopeScaling, optional
        How the frequencies are changed for longer sequences.

    Attributes
    ----------
    theta, rotary_dim, interleaved, scaling
        As given.

    Raises
    ------
    TypeError, ValueError
        For parameters of another type or out of range.

    Notes
    -----
    A Rope does not change once it is made. It keeps cos and sin of the last positions that it was
    called with: q and k of all layers share them if the same Rope rotates them.

    Frequencies and angles are float64, off by up to ``1e-15 * position`` radians, and only cos and
    sin are rounded to x's dtype. Libraries that compute angles in float32 are off by up to
    ``6e-8 * position`` radians.

    References
    ----------
    .. [1] J. Su et al., "RoFormer: enhanced transformer with rotary position embedding", 2021.

    Examples
    --------
    >>> import numpy as np, tileattn
    >>> rope = tileattn.Rope(theta=500000.0)
    >>> q, k = np.ones((2, 3, 1, 64))
    >>> q, k = rope(q, [0, 1, 2]), rope(k, [7, 8, 9])
    >>> score = np.einsum("tnh,tnh->tn", q, k)
    >>> np.allclose(score, score[0])
    True
    """

    def __init__(
        self,
        *,
        theta: float = 10000.0,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        scaling: RopeScaling | None = None,
    ) -> None:
        self.theta = check_real("theta", theta)
        if self.theta <= 1:
            raise ValueError(f"theta must be greater than 1, got {theta!r}")
        self.rotary_dim = None if rotary_dim is None else check_int("rotary_dim", rotary_dim)
        if self.rotary_dim is not None and (self.rotary_dim < 2 or self.rotary_dim % 2 != 0):
            raise ValueError(f"rotary_dim must be even and at least 2, got {rotary_dim}")
        self.interleaved = check_flag("interleaved", interleaved)
        if scaling is not None and not isinstance(scaling, RopeScaling):
            raise TypeError(
                f"scaling must be a RopeScaling, such as RopeScaling.linear(2), or None, not "
                f"{type(scaling).__name__}; Rope.from_config reads a model's configuration"
            )
        self.scaling = scaling
        self._latest: list[_Tables | None] = [None]
        self._first: list[_Tables | None] = [None]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_latest": [None], "_first": [None]}

    def __repr__(self) -> str:
        parts = [f"theta={self.theta}"]
        if self.rotary_dim is not None:
            parts.append(f"rotary_dim={self.rotary_dim}")
        if self.interleaved:
            parts.append("interleaved=True")
        if self.scaling is not None:
            parts.append(f"scaling={self.scaling}")
        return f"Rope({', '.join(parts)})"

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, interleaved: bool = False) -> Rope:
        """The Rope of a model's config.json, as Hugging Face's transformers write it.

        Parameters
        ----------
        config : mapping
            What is read: ``rope_theta``, ``rope_scaling`` or ``rope_parameters`` (of the types
            default, linear, yarn and llama3), ``partial_rotary_factor`` with ``head_dim`` or what
            it follows from, and ``max_position_embeddings`` for YaRN without
            ``original_max_position_embeddings``.
        interleaved : bool, optional
            As in the constructor; the configuration does not say it.

        Returns
        -------
        Rope

        Raises
        ------
        TypeError
            For what is no mapping, such as the name of a file.
        ValueError
            For a type that depends on the length of each sequence (dynamic, longrope) or is not
            known, and for a parameter that is missing.

        Examples
        --------
        >>> from tileattn import Rope
        >>> Rope.from_config({"rope_theta": 500000.0, "rope_scaling": {
        ...     "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        ...     "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}).theta
        500000.0
        """
        _check_mapping("config", config)
        name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
        parameters = config.get(name) or {}
        _check_mapping(f"config's {name}", parameters)
        theta = parameters.get("rope_theta", config.get("rope_theta", 10000.0))
        partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        rotary_dim = None
        partial = check_real("config's partial_rotary_factor", partial)
        if not 0 < partial <= 1:
            raise ValueError(
                f"config's partial_rotary_factor must be above 0, and 1 at most, not {partial}"
            )
        if partial != 1:
            if config.get("head_dim") is None:
                head_dim = _size(config, "hidden_size") // _size(config, "num_attention_heads")
            else:
                head_dim = _size(config, "head_dim")
            rotary_dim = int(head_dim * partial)
        return cls(
            theta=theta,
            rotary_dim=rotary_dim,
            interleaved=interleaved,
            scaling=_scaling_from_config(parameters, config),
        )

    def frequencies(self, head_dim: int) -> Float64:
        """Angle in radians by which each pair turns from one position to the next.

        Parameters
        ----------
        head_dim : int
            H, the width of a head.

        Returns
        -------
        float64 array [rotary_dim / 2]

        Raises
        ------
        TypeError, ValueError
            For heads that are narrower than `rotary_dim`, or without it of an odd width.

        Examples
        --------
        >>> import tileattn
        >>> tileattn.Rope().frequencies(4)
        array([1.  , 0.01])
        """
        head_dim = check_int("head_dim", head_dim)
        if head_dim < 0:
            raise ValueError(f"head_dim must not be negative, got {head_dim}")
        rotary_dim = fit_rotary_dim(self.rotary_dim, head_dim)
        if self.scaling is None:
            return _frequencies(self.theta, rotary_dim)
        return self.scaling.frequencies(self.theta, rotary_dim)

    def _tables(
        self, positions: Integers, head_dim: int, dtype: npt.DTypeLike
    ) -> tuple[Array, Array]:
        """cos and sin [..., rotary_dim / 2] of positions [...], times the attention factor.

        Both are contiguous and read-only. Those of the latest positions are kept.
        """
        latest = self._latest[0]
        if (
            latest is None
            or not latest.fit(head_dim, dtype)
            or not np.array_equal(latest.positions, positions)
        ):
            latest = self._latest[0] = self._make_tables(positions.copy(), head_dim, dtype)
        return latest.cos, latest.sin

    def _tables_of_first(
        self, count: int, head_dim: int, dtype: npt.DTypeLike
    ) -> tuple[Array, Array]:
        """`_tables` of positions 0 to count - 1, or more: kept, and grown by half where needed."""
        first = self._first[0]
        if first is None or not first.fit(head_dim, dtype):
            first = self._first[0] = self._make_tables(np.arange(count), head_dim, dtype)
        elif len(first.positions) < count:
            count = max(count, len(first.positions) * 3 // 2)
            first = self._first[0] = self._make_tables(np.arange(count), head_dim, dtype)
        return first.cos, first.sin

    def _turns(self, head_dim: int) -> tuple[Float64, float]:
        """The frequencies and the attention factor, of whatever scaling somebody has written."""
        frequencies = np.asarray(self.frequencies(head_dim), np.float64)
        pairs = fit_rotary_dim(self.rotary_dim, head_dim) // 2
        if frequencies.shape != (pairs,):
            raise ValueError(
                f"the scaling's frequencies must have the shape [rotary_dim / 2] = ({pairs},), not "
                f"{frequencies.shape}"
            )
        return frequencies, 1.0 if self.scaling is None else float(self.scaling.attention_factor)

    def _make_tables(self, positions: Integers, head_dim: int, dtype: npt.DTypeLike) -> _Tables:
        frequencies, factor = self._turns(head_dim)
        with np.errstate(all="ignore"):  # a factor beyond float32 makes infinity
            angles = positions[..., None] * frequencies
            cos, sin = ((factor * f(angles)).astype(dtype) for f in (np.cos, np.sin))
        cos.flags.writeable = sin.flags.writeable = False
        return _Tables(positions, head_dim, cos, sin)

    def __call__(
        self,
        x: ArrayLike,
        positions: ArrayLike,
        *,
        out: Array | None = None,
        num_threads: int | None = None,
    ) -> Array:
        """Rotate the heads of x by their positions.

        Parameters
        ----------
        x : array [B, T, N, H] or [T, N, H], float32 or float64
            Queries or keys.
        positions : int array [T] or [B, T]
            From 0 on; in any order.
        out : array of x's shape and dtype, optional
            Either x itself, or no overlap with it.
        num_threads : int, optional
            For this call, by default `get_num_threads()`.

        Returns
        -------
        array of x's shape and dtype

        Raises
        ------
        TypeError, ValueError
            For dtypes or shapes that do not fit, and negative positions.

        Examples
        --------
        >>> import numpy as np, tileattn
        >>> tileattn.Rope()(np.array([[[1.0, 0.0]]]), [1]).round(4)
        array([[[0.5403, 0.8415]]])
        """
        x, positions, rotary_dim, given = check_rope_inputs(x, positions, self.rotary_dim, out)
        threads = resolve_threads(num_threads)
        H = x.shape[-1]
        if not x.size:
            return np.empty(x.shape, x.dtype) if out is None else out
        # The kernel reads and writes by whole vectors.
        if not _has_whole_heads(x):
            x = np.ascontiguousarray(x)
        if given is not None and _has_whole_heads(given):
            target = given
        else:
            target = np.empty(x.shape, x.dtype)
        has_batch = x.ndim == 4
        cos, sin = self._tables(positions, H, x.dtype)
        _core.rope(
            x if has_batch else x[None],
            target if has_batch else target[None],
            cos,
            sin,
            rotary_dim,
            self.interleaved,
            threads,
        )
        if given is not None and target is not given:
            given[...] = target
        return target if out is None else out


def apply_rope(
    x: ArrayLike,
    positions: ArrayLike,
    *,
    theta: float = 10000.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    scaling: RopeScaling | None = None,
    out: Array | None = None,
    num_threads: int | None = None,
) -> Array:
    """Rotary position embedding of queries or keys: a `Rope` made and called once.

    To rotate more with the same positions, keep a `Rope`: it computes cos and sin once.

    Parameters
    ----------
    x : array [B, T, N, H] or [T, N, H], float32 or float64
        Queries or keys.
    positions : int array [T] or [B, T]
        From 0 on; in any order.
    theta, rotary_dim, interleaved, scaling
        As in the constructor of `Rope`.
    out, num_threads
        As in a call of it.

    Returns
    -------
    array of x's shape and dtype

    Raises
    ------
    TypeError, ValueError
        For dtypes or shapes that do not fit, and negative positions. Nothing has been written then.

    Examples
    --------
    >>> import numpy as np, tileattn
    >>> tileattn.apply_rope(np.array([[[1.0, 0.0]]]), [1]).round(4)
    array([[[0.5403, 0.8415]]])
    """
    rope = Rope(theta=theta, rotary_dim=rotary_dim, interleaved=interleaved, scaling=scaling)
    return rope(x, positions, out=out, num_threads=num_threads)


@dataclass(frozen=True)
class _Tables:
    """cos and sin of some positions."""

    positions: Integers
    head_dim: int
    cos: Array
    sin: Array

    def fit(self, head_dim: int, dtype: npt.DTypeLike) -> bool:
        return self.head_dim == head_dim and self.cos.dtype == dtype


def _frequencies(theta: float, rotary_dim: int) -> Float64:
    """theta**(-2 i / rotary_dim) for each pair i."""
    frequencies: Float64 = theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    return frequencies


def _interpolate(frequencies: Float64, factor: float, share: Float64) -> Float64:
    """Frequencies divided by `factor` where `share` is 1, kept where it is 0, or a mixture."""
    mixture: Float64 = frequencies * (1 - share) + frequencies / factor * share
    return mixture


def _yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1


def _check_length(name: str, value: Any) -> int:
    length = check_int(name, value)
    if not 1 <= length <= POSITION_LIMIT:
        raise ValueError(f"{name} must lie between 1 and 2**53, got {length}")
    return length


def _required(config: Mapping[str, Any], name: str) -> Any:
    value = config.get(name)
    if value is None:
        raise ValueError(f"config lacks {name}, which its rotary embedding needs")
    return value


def _size(config: Mapping[str, Any], name: str) -> int:
    """A size that the configuration must have."""
    return _check_length(f"config's {name}", _required(config, name))


def _check_mapping(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(
            f"{name} must be a mapping, as json.load makes it of a config.json, not {value!r}"
        )


def _scaling_from_config(
    parameters: Mapping[str, Any], config: Mapping[str, Any]
) -> RopeScaling | None:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        if nested := [name for name, value in parameters.items() if isinstance(value, Mapping)]:
            raise ValueError(
                f"config has rotary embeddings by kind of layer, {', '.join(nested)}: give it with "
                f"rope_parameters replaced by those of one"
            )
        return None
    if kind == "linear":
        return RopeScaling.linear(_required(parameters, "factor"))
    if kind == "llama3":
        return RopeScaling.llama3(
            _required(parameters, "factor"),
            _required(parameters, "low_freq_factor"),
            _required(parameters, "high_freq_factor"),
            _required(parameters, "original_max_position_embeddings"),
        )
    if kind == "yarn":
        original = parameters.get("original_max_position_embeddings")
        factor = _required(parameters, "factor")
        attention = parameters.get("attention_factor")
        mscale, mscale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
        if attention is None and mscale and mscale_all:
            factor = check_at_least("config's factor", factor, 1)
            mscale = check_at_least("config's mscale", mscale, 0)
            mscale_all = check_at_least("config's mscale_all_dim", mscale_all, 0)
            attention = _yarn_attention_factor(factor, mscale) / _yarn_attention_factor(
                factor, mscale_all
            )
        return RopeScaling.yarn(
            factor,
            _required(config, "max_position_embeddings") if original is None else original,
            beta_fast=parameters.get("beta_fast") or 32.0,
            beta_slow=parameters.get("beta_slow") or 1.0,
            attention_factor=attention,
            truncate=parameters.get("truncate", True),
        )
    raise ValueError(
        f"config has the rope_type {kind!r}, expected default, linear, yarn or llama3; what "
        f"depends on the length of a sequence needs a Rope for each, as with RopeScaling.ntk"
    )


def _has_whole_heads(array: Array) -> bool:
    """Whether the columns of a head lie side by side."""
    return array.strides[-1] == array.itemsize or array.shape[-1] == 1
