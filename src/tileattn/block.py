"""The attention block: projections, attention, residual and norm in one call."""

from __future__ import annotations

import functools
import math
from typing import Any, NoReturn, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from tileattn import _core
from tileattn._arguments import (
    BlockArithmetic,
    BlockWeights,
    HeadMatrix,
    NormParameters,
    NormPosition,
    check_block_inputs,
    check_block_weights,
    check_norm_inputs,
)
from tileattn._scores import Window, check_lengths, check_scale
from tileattn._values import (
    Array,
    ArrayLike,
    Integers,
    SetOnce,
    bounds,
    check_array,
    check_int,
    check_stored_type,
    check_vector,
)
from tileattn.cache import KVCache
from tileattn.config import resolve_threads
from tileattn.quantized import QuantizedMatrix, WeightDtype, convert_weights
from tileattn.rope import Rope


class _Norm(NormParameters):
    """What a LayerNorm and an RMSNorm have in common: the call."""

    def __repr__(self) -> str:
        width = next((str(len(a)) for a in (self.weight, self.bias) if a is not None), "any")
        return f"{type(self).__name__}(D={width}, eps={self.eps:g})"

    def __call__(
        self,
        x: ArrayLike,
        *,
        residual: ArrayLike | None = None,
        out: Array | None = None,
        num_threads: int | None = None,
    ) -> Array:
        """Normalise ``x + residual``.

        Parameters
        ----------
        x : array [..., D], float32 or float64
        residual : array of x's shape and dtype, optional
        out : array of x's shape and dtype, optional
            No overlap with an input.
        num_threads : int, optional
            For this call, by default `get_num_threads()`.

        Returns
        -------
        array [..., D]

        Raises
        ------
        TypeError, ValueError
            For dtypes or shapes that do not fit.

        Examples
        --------
        >>> import numpy as np, tileattn
        >>> x = np.array([[3.0, 4.0, 0.0, 0.0]])
        >>> tileattn.RMSNorm(eps=0.0)(x, residual=x)
        array([[1.2, 1.6, 0. , 0. ]])
        """
        norm = self if type(self) in (LayerNorm, RMSNorm) else self._frozen()
        x, residual, given = check_norm_inputs(x, residual, norm, out)
        threads = resolve_threads(num_threads)
        D = x.shape[-1]
        if not x.size:
            return np.empty(x.shape, x.dtype) if out is None else out
        # A view of out, or a copy where no stride can express its rows as one axis.
        target = None if given is None else given.reshape(1, -1, D)
        if target is None or not _has_whole_rows(target):
            target = np.empty((1, x.size // D, D), x.dtype)
        _core.add_norm(
            _as_rows(x),
            None if residual is None else _as_rows(residual),
            target,
            norm,
            threads,
        )
        if given is None:
            return target.reshape(x.shape)
        if not np.may_share_memory(target, given):
            given[...] = target.reshape(x.shape)
        return cast(Array, out)


class LayerNorm(_Norm):
    """Normalise the last axis: ``(x - mean) / sqrt(variance + eps) * weight + bias``.

    Parameters
    ----------
    weight : array [D], optional
        Ones if not given.
    bias : array [D], optional
        Zeros if not given.
    eps : float, optional
        Added to the variance; 1e-5 as in PyTorch (BERT's models have 1e-12).

    Attributes
    ----------
    weight, bias : read-only array [D] or None
        Copies of what was given.
    eps : float

    Raises
    ------
    TypeError, ValueError
        For arrays that are not floating or not one-dimensional, or an `eps` that is negative or
        not finite.

    Notes
    -----
    A LayerNorm does not change once it is made.

    The variance is that of the distances from the mean, in a second pass, corrected for the mean's
    own rounding [1]_: a mean a thousand times the deviation costs no accuracy.

    References
    ----------
    .. [1] T. F. Chan, G. H. Golub and R. J. LeVeque, "Algorithms for computing the sample variance:
       analysis and recommendations", The American Statistician 37 (1983).

    Examples
    --------
    >>> import numpy as np, tileattn
    >>> norm = tileattn.LayerNorm(eps=0.0)
    >>> norm(np.array([[1.0, 3.0], [10.0, 10.5]]))
    array([[-1.,  1.],
           [-1.,  1.]])
    """


class RMSNorm(_Norm):
    """Scale the last axis to a root mean square of 1: ``x / sqrt(mean(x^2) + eps) * weight``.

    Parameters
    ----------
    weight : array [D], optional
        Ones if not given.
    eps : float, optional
        Added to the mean square; 1e-6 as in Llama and Qwen (some of their models have 1e-5).

    Attributes
    ----------
    weight : read-only array [D] or None
        A copy of what was given.
    eps : float

    Raises
    ------
    TypeError, ValueError
        For a `weight` that is not floating or not one-dimensional, or an `eps` that is negative or
        not finite.

    Notes
    -----
    An RMSNorm does not change once it is made.

    Gemma's models multiply by ``1 + weight``: give them ``RMSNorm(1 + weight)``.

    A row of numbers too large to be squared (1e20 in float32) is scaled before; a plain evaluation
    would give zeros.

    Examples
    --------
    >>> import numpy as np, tileattn
    >>> norm = tileattn.RMSNorm(eps=0.0)
    >>> norm(np.array([[1.0, -1.0], [1.0, 7.0]]))
    array([[ 1. , -1. ],
           [ 0.2,  1.4]])
    """

    subtract_mean = False

    def __init__(self, weight: ArrayLike | None = None, eps: float = 1e-6) -> None:
        super().__init__(weight, None, eps)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.weight, self.eps)


DEFAULT_NORM = LayerNorm()

Angles: TypeAlias = tuple[Array, Array]  # cos and sin

# Positions up to which a block with a cache keeps cos and sin: 16 MB for float32 heads 128 wide.
# Beyond, they are computed for the positions of each call, once for all blocks that share a Rope.
LONG_TABLE = 1 << 15


class AttentionBlock(SetOnce):
    """A transformer's attention block with its weights packed once, called as often as needed.

    ``norm(x + softmax(scale * (x W_Q + b_Q) (c W_K + b_K)^T) (c W_V + b_V) W_O + b_O)``, where c is
    the context: x itself, or another sequence in cross attention.

    Parameters
    ----------
    w_q : array [D, N, H], float32 or float64
    w_k : array [Dc, K, H], of w_q's dtype
        Dc is the width of the context, D in self-attention; K divides N.
    w_v : array [Dc, K, Hv], of w_q's dtype
    w_o : array [N, Hv, D], of w_q's dtype
    b_q, b_k, b_v, b_o : arrays [N, H], [K, H], [K, Hv], [D], optional
    norm : LayerNorm, RMSNorm or None, optional
        By default a LayerNorm without weight and bias; None for no normalisation.
    norm_position : "post", "pre" or None, optional
        Behind the sum, as above, or before the projections: ``x + attention(norm(x)) W_O + b_o``,
        where a context comes as it is. None leaves the norm out, too; where `norm` is None, no
        position means anything.
    residual : bool, optional
        Add x, before the norm if that comes last.
    rope : Rope, optional
        Rotates queries by their positions ``t + query_offset``, and keys by theirs, j.
    q_norm, k_norm : LayerNorm or RMSNorm, optional
        Over the H columns of each head of queries or keys, behind their bias and before `rope`.
    scale : float, optional
        Factor of the scores, by default ``1 / sqrt(H)``.
    softcap : float, optional
        As in `dot_product_attention`.
    is_causal : bool, optional
        Row t sees only the positions ``j <= t + query_offset``.
    local_window_size, sinks
        As in `dot_product_attention`.
    weight_dtype : "bfloat16", "int8", "int4" or None, optional
        What float32 weights are rounded to and kept as, in 1/2, 1/4 and 1/6 of the memory. int8 has
        a scale for each output column, int4 a scale and a minimum for each 32 of its weights.
    arithmetic : "float32", "int8" or None, optional
        "float32" multiplies bfloat16 weights with x in float32, too, where bfloat16 dot products
        would do it. "int8" allows that what meets weights of int8 is rounded to int8 as well, with
        a scale for each row, where the CPU has dot products of it.

    Attributes
    ----------
    num_heads, num_kv_heads, head_dim, v_head_dim, model_dim, context_dim : int
        N, K, H, Hv, D, Dc.
    dtype : numpy.dtype
    norm, norm_position, residual, rope, q_norm, k_norm
    scale, softcap, is_causal, local_window_size, sinks
        As given; `sinks` is a copy.
    weight_dtype : str, tuple of four or None
        As given; of blocks with a `QuantizedMatrix` what all of w_q, w_k, w_v and w_o are, or each.
    arithmetic : {"int8", "bfloat16", "float32", "float64"}
        What the projections are computed in.
    nbytes : int
        Bytes of the packed weights.

    Raises
    ------
    TypeError, ValueError
        For weights whose dtypes or shapes do not fit together, and for NaN and infinity with a
        `weight_dtype` of integers.

    Notes
    -----
    The arithmetic is in `dtype`, whatever `weight_dtype` is: a block of rounded weights gives the
    bits of one that was given these weights in float32. There are two exceptions, on CPUs with AMX,
    or AVX512_BF16 and AVX512_VNNI. What meets weights of bfloat16 is rounded to bfloat16 as well,
    multiplied in the CPU's dot products and summed up in float32, unless `arithmetic` is "float32"
    or a `QuantizedMatrix` is among the weights; denormal numbers count as zeros there. And if
    `arithmetic` is "int8", what meets weights of int8 is rounded to int8 with a scale for each row,
    and summed up exactly; a row with a NaN or an infinity becomes NaN. Attention between the
    projections stays float32's.

    The arrays given are copied into packed form and not referred to again; a block does not change
    once it is made. Since it has its weights in that form only, which belongs to one instruction
    set, it can be neither pickled nor copied: hand the weights to another process and build the
    block there.

    Examples
    --------
    >>> import numpy as np, tileattn
    >>> rng = np.random.default_rng(0)
    >>> D, N, K, H = 32, 4, 2, 8
    >>> w_q, w_o = rng.standard_normal((D, N, H)), rng.standard_normal((N, H, D))
    >>> w_k, w_v = rng.standard_normal((2, D, K, H))
    >>> block = tileattn.AttentionBlock(w_q, w_k, w_v, w_o, is_causal=True)
    >>> block(rng.standard_normal((1, 6, D))).shape
    (1, 6, 32)
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    model_dim: int
    context_dim: int

    def __init__(
        self,
        w_q: ArrayLike,
        w_k: ArrayLike,
        w_v: ArrayLike,
        w_o: ArrayLike,
        *,
        b_q: ArrayLike | None = None,
        b_k: ArrayLike | None = None,
        b_v: ArrayLike | None = None,
        b_o: ArrayLike | None = None,
        norm: LayerNorm | RMSNorm | None = DEFAULT_NORM,
        norm_position: NormPosition = "post",
        residual: bool = True,
        rope: Rope | None = None,
        q_norm: LayerNorm | RMSNorm | None = None,
        k_norm: LayerNorm | RMSNorm | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        is_causal: bool = False,
        local_window_size: Window = None,
        sinks: ArrayLike | None = None,
        weight_dtype: WeightDtype | None = None,
        arithmetic: BlockArithmetic | None = None,
    ) -> None:
        w = check_block_weights(
            w_q,
            w_k,
            w_v,
            w_o,
            b_q=b_q,
            b_k=b_k,
            b_v=b_v,
            b_o=b_o,
            norm=norm,
            norm_position=norm_position,
            residual=residual,
            rope=rope,
            q_norm=q_norm,
            k_norm=k_norm,
            scale=scale,
            softcap=softcap,
            is_causal=is_causal,
            local_window_size=local_window_size,
            sinks=sinks,
            weight_dtype=weight_dtype,
            arithmetic=arithmetic,
        )
        w = convert_weights(w)
        shape_q, _, shape_v, _ = (tuple(matrix.shape) for matrix in w.matrices)
        self.weight_dtype = _held(w)
        self.dtype = w.matrices[0].dtype
        self.model_dim, self.num_heads, self.head_dim = shape_q
        self.context_dim, self.num_kv_heads, self.v_head_dim = shape_v
        self.norm, self.norm_position = norm, norm_position
        self.rope, self.q_norm, self.k_norm = rope, q_norm, k_norm
        self.residual, self.scale, self.is_causal = w.residual, w.scores.scale, w.is_causal
        self._reads_rows = w.residual or (w.is_pre_norm and w.norm is not None)
        self.softcap, self.local_window_size, self.sinks = (
            softcap,
            local_window_size,
            w.scores.sinks,
        )
        self._scores = w.scores
        self._kv_heads = (self.num_kv_heads, self.head_dim, self.v_head_dim)
        self._core = _core.Block(w)
        self.arithmetic = self._core.arithmetic

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an AttentionBlock can be neither pickled nor copied: pass on the weights that it was "
            "made of and build another from them"
        )

    @classmethod
    def from_linear(
        cls,
        w_q: ArrayLike | QuantizedMatrix | None = None,
        w_k: ArrayLike | QuantizedMatrix | None = None,
        w_v: ArrayLike | QuantizedMatrix | None = None,
        w_o: ArrayLike | QuantizedMatrix | None = None,
        *,
        w_qkv: ArrayLike | QuantizedMatrix | None = None,
        b_q: ArrayLike | None = None,
        b_k: ArrayLike | None = None,
        b_v: ArrayLike | None = None,
        b_qkv: ArrayLike | None = None,
        b_o: ArrayLike | None = None,
        num_heads: int,
        num_kv_heads: int | None = None,
        norm: LayerNorm | RMSNorm | None = DEFAULT_NORM,
        norm_position: NormPosition = "post",
        residual: bool = True,
        rope: Rope | None = None,
        q_norm: LayerNorm | RMSNorm | None = None,
        k_norm: LayerNorm | RMSNorm | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        is_causal: bool = False,
        local_window_size: Window = None,
        sinks: ArrayLike | None = None,
        weight_dtype: WeightDtype | None = None,
        arithmetic: BlockArithmetic | None = None,
    ) -> AttentionBlock:
        """Build a block from ``[out, in]`` matrices, as ``torch.nn.Linear`` holds them.

        Parameters
        ----------
        w_q : array or QuantizedMatrix [N*H, D]
        w_k : array or QuantizedMatrix [K*H, Dc]
        w_v : array or QuantizedMatrix [K*Hv, Dc]
        w_o : array or QuantizedMatrix [D, N*Hv]
        w_qkv : array or QuantizedMatrix [(N + 2K)*H, D]
            Instead of `w_q`, `w_k` and `w_v`: their rows, one after the other.
        b_q, b_k, b_v : arrays [N*H], [K*H], [K*Hv], optional
        b_qkv : array [(N + 2K)*H], optional
            With `w_qkv`, instead of `b_q`, `b_k` and `b_v`.
        b_o : array [D], optional
        num_heads : int
            N, how many query heads there are.
        num_kv_heads : int, optional
            K, by default N.
        norm, norm_position, residual, rope, q_norm, k_norm
        scale, softcap, is_causal, local_window_size, sinks, weight_dtype, arithmetic
            As in the constructor.

        Returns
        -------
        AttentionBlock

        Raises
        ------
        TypeError, ValueError
            For weights whose dtypes or shapes do not fit together.

        Examples
        --------
        >>> import numpy as np, tileattn
        >>> rng = np.random.default_rng(0)
        >>> block = tileattn.AttentionBlock.from_linear(
        ...     w_qkv=rng.standard_normal((96, 32)), w_o=rng.standard_normal((32, 32)), num_heads=4)
        >>> block.head_dim
        8
        """
        arguments = _from_linear_arguments(
            w_q=w_q,
            w_k=w_k,
            w_v=w_v,
            w_o=w_o,
            w_qkv=w_qkv,
            b_q=b_q,
            b_k=b_k,
            b_v=b_v,
            b_qkv=b_qkv,
            b_o=b_o,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
        )
        return cls(
            **arguments,
            norm=norm,
            norm_position=norm_position,
            residual=residual,
            rope=rope,
            q_norm=q_norm,
            k_norm=k_norm,
            scale=scale,
            softcap=softcap,
            is_causal=is_causal,
            local_window_size=local_window_size,
            sinks=sinks,
            weight_dtype=weight_dtype,
            arithmetic=arithmetic,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights."""
        return self._core.nbytes

    def __repr__(self) -> str:
        parts = [f"D={self.model_dim}"]
        if self.context_dim != self.model_dim:
            parts.append(f"Dc={self.context_dim}")
        parts += [f"N={self.num_heads}", f"K={self.num_kv_heads}", f"H={self.head_dim}"]
        if self.v_head_dim != self.head_dim:
            parts.append(f"Hv={self.v_head_dim}")
        parts.append(str(self.dtype))
        defaults = {
            "norm": DEFAULT_NORM,
            "norm_position": "post",
            "residual": True,
            "rope": None,
            "q_norm": None,
            "k_norm": None,
            "scale": check_scale(None, self.head_dim, self.dtype),
            "softcap": None,
            "is_causal": False,
            "local_window_size": None,
            "sinks": None,
            "weight_dtype": None,
            "arithmetic": str(self.dtype),
        }
        for name, default in defaults.items():
            value = getattr(self, name)
            # Norms have no equality, but a text that tells all that one without arrays does.
            if value is not default and repr(value) != repr(default):
                parts.append(f"{name}={'...' if name == 'sinks' else repr(value)}")
        return f"AttentionBlock({', '.join(parts)})"

    def __call__(
        self,
        x: ArrayLike,
        *,
        context: ArrayLike | KVCache | None = None,
        cache: KVCache | None = None,
        bias: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        query_offset: ArrayLike | None = None,
        query_seq_lengths: ArrayLike | None = None,
        key_value_seq_lengths: ArrayLike | None = None,
        out: Array | None = None,
        num_threads: int | None = None,
    ) -> Array:
        """Run the block.

        Parameters
        ----------
        x : array [B, T, D] or [T, D], of the block's dtype
        context : array [B, S, Dc] or [S, Dc], or KVCache, optional
            Keys and values come from here (cross attention); by default from x. A cache holds them
            already: that which `context_cache` made, or another layer's. S is the length of its
            longest sequence.
        cache : KVCache, optional
            Where the sequences of x begin (decoding): the T positions of x come behind those that
            it holds, their keys and values are added to it, and x attends to all. S is the length
            of its longest sequence then.
        bias : floating array, broadcasts to [B, N, T, S], optional
        mask : bool array, broadcasts to [B, N, T, S], optional
            As in `dot_product_attention`; not with a cache that is a ring.
        query_offset : int or int array [B], optional
            As in `dot_product_attention`. Not with `cache`, whose lengths say it.
        query_seq_lengths, key_value_seq_lengths : int arrays [B], optional
            As in `dot_product_attention`. A row beyond its length attends to nothing: it is
            ``norm(x + b_o)``, and is not added to `cache`. A cache knows the lengths of its keys.
        out : array of x's shape and dtype, optional
            No overlap with an input.
        num_threads : int, optional
            For this call, by default `get_num_threads()`.

        Returns
        -------
        array [B, T, D] or [T, D]

        Raises
        ------
        TypeError, ValueError
            For dtypes or shapes that do not fit, and for a cache that has not enough room left.
            Nothing has been written then, and no cache has changed.

        Examples
        --------
        A prompt of 5 positions, then one new token:

        >>> import numpy as np, tileattn
        >>> rng = np.random.default_rng(0)
        >>> w_q, w_k, w_v = rng.standard_normal((3, 32, 4, 8))
        >>> w_o = rng.standard_normal((4, 8, 32))
        >>> block = tileattn.AttentionBlock(
        ...     w_q, w_k, w_v, w_o, rope=tileattn.Rope(), is_causal=True)
        >>> cache = tileattn.KVCache(1, 64, num_kv_heads=4, head_dim=8, dtype=block.dtype)
        >>> x = rng.standard_normal((1, 6, 32))
        >>> prompt = block(x[:, :5], cache=cache)
        >>> token = block(x[:, 5:], cache=cache)
        >>> np.allclose(np.concatenate([prompt, token], axis=1), block(x))
        True
        """
        return self._run(
            x,
            context,
            cache,
            bias,
            mask,
            query_offset,
            query_seq_lengths,
            key_value_seq_lengths,
            out,
            num_threads,
        )[0]

    def profile(
        self,
        x: ArrayLike,
        *,
        context: ArrayLike | KVCache | None = None,
        cache: KVCache | None = None,
        bias: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        query_offset: ArrayLike | None = None,
        query_seq_lengths: ArrayLike | None = None,
        key_value_seq_lengths: ArrayLike | None = None,
        out: Array | None = None,
        num_threads: int | None = None,
    ) -> tuple[Array, list[tuple[str, float]]]:
        """Run the block and say how long its parts took.

        Parameters
        ----------
        x : array [B, T, D] or [T, D]
        context, cache, bias, mask, query_offset, query_seq_lengths, key_value_seq_lengths
            As those of a call.
        out, num_threads
            The same.

        Returns
        -------
        output : array
            What the call returns.
        parts : list of (name, seconds)
            Of the three stages that run one after the other.

        Examples
        --------
        >>> import numpy as np, tileattn
        >>> w, w_o, x = np.ones((32, 4, 8)), np.ones((4, 8, 32)), np.ones((1, 6, 32))
        >>> block = tileattn.AttentionBlock(w, w, w, w_o)
        >>> output, parts = block.profile(x)
        >>> [name for name, seconds in parts]
        ['project q, k, v', 'attention', 'project output + LayerNorm']
        """
        output, seconds = self._run(
            x,
            context,
            cache,
            bias,
            mask,
            query_offset,
            query_seq_lengths,
            key_value_seq_lengths,
            out,
            num_threads,
        )
        first, last = "project q, k, v", "project output"
        if self.norm is not None and self.norm_position == "pre":
            first = f"{type(self.norm).__name__} + {first}"
        elif self.norm is not None and self.norm_position == "post":
            last += f" + {type(self.norm).__name__}"
        return output, list(zip((first, "attention", last), seconds, strict=True))

    def _run(
        self,
        x: ArrayLike,
        context: ArrayLike | KVCache | None,
        cache: KVCache | None,
        bias: ArrayLike | None,
        mask: ArrayLike | None,
        query_offset: ArrayLike | None,
        query_seq_lengths: ArrayLike | None,
        key_value_seq_lengths: ArrayLike | None,
        out: Array | None,
        num_threads: int | None,
    ) -> tuple[Array, tuple[float, float, float]]:
        x, context, bias, visibility, positions, span, given, has_batch = check_block_inputs(
            x,
            context,
            self.model_dim,
            self.context_dim,
            (self.num_heads, *self._kv_heads),
            self.dtype,
            cache=cache,
            bias=bias,
            mask=mask,
            is_causal=self.is_causal,
            query_offset=query_offset,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            local_window_size=self.local_window_size,
            has_rope=self.rope is not None,
            out=out,
        )
        threads = resolve_threads(num_threads)
        # Norms and the residual read x by whole vectors; projections take any strides.
        if self._reads_rows and not _has_whole_rows(x):
            x = np.ascontiguousarray(x)
        if given is not None and given.flags.c_contiguous:
            result = given
        else:
            result = np.empty(x.shape if has_batch else x.shape[1:], x.dtype)
        run = self._core.run
        if cache is not None and span is not None:
            run = functools.partial(cache._write, span, run)
        seconds = run(
            x,
            context,
            self._scores if bias is None else self._scores.with_bias(bias),
            visibility,
            positions,
            *self._angles(x, context, positions, span is not None),
            result if has_batch else result[None],
            threads,
            span,
        )
        if given is not None and result is not given:
            given[...] = result
        if cache is not None and span is not None:
            cache._advance(span)
        return result if out is None else out, seconds

    def context_cache(
        self,
        context: ArrayLike,
        *,
        key_value_seq_lengths: ArrayLike | None = None,
        dtype: npt.DTypeLike | None = None,
        num_threads: int | None = None,
    ) -> KVCache:
        """Project a context once, for all calls that attend to it: ``block(x, context=cache)``.

        Parameters
        ----------
        context : array [B, S, Dc] or [S, Dc], of the block's dtype
        key_value_seq_lengths : int array [B], optional
            Only the first positions of each sequence are taken, and seen.
        dtype : dtype, optional
            Of the cache: the block's by default, or float16, bfloat16 or int8 for one of float32.
        num_threads : int, optional
            For this call, by default `get_num_threads()`.

        Returns
        -------
        KVCache
            Of B sequences, 1 for a context [S, Dc], and room for S positions of each.

        Raises
        ------
        TypeError, ValueError
            For dtypes or shapes that do not fit, and for a batch of no sequences.

        Examples
        --------
        >>> import numpy as np, tileattn
        >>> rng = np.random.default_rng(0)
        >>> w_q, w_k, w_v = rng.standard_normal((3, 32, 4, 8))
        >>> block = tileattn.AttentionBlock(w_q, w_k, w_v, rng.standard_normal((4, 8, 32)))
        >>> audio, x = rng.standard_normal((1, 50, 32)), rng.standard_normal((1, 3, 32))
        >>> cache = block.context_cache(audio)
        >>> np.array_equal(block(x, context=cache), block(x, context=audio))
        True
        """
        context = check_array("context", context, self.dtype)
        if context.ndim not in (2, 3) or context.shape[-1] != self.context_dim:
            raise ValueError(
                f"context must have the shape [B, S, {self.context_dim}] or "
                f"[S, {self.context_dim}], not {context.shape}"
            )
        if context.ndim == 2:
            context = context[None]
        B, S, _ = context.shape
        if B == 0:
            raise ValueError("context has no sequences, B = 0")
        counts = check_lengths("key_value_seq_lengths", key_value_seq_lengths, B, S)
        threads = resolve_threads(num_threads)
        cache = KVCache(B, max(S, 1), *self._kv_heads, self.dtype if dtype is None else dtype)
        check_stored_type("dtype", cache.dtype, self.dtype)
        span = cache._longer_span("context", S, counts)
        _, angles = self._angles(context, None, None, True)
        self._core.fill(context, span, angles, threads)
        cache._advance(span)
        return cache

    def _angles(
        self, x: Array, context: Array | None, offset: Integers | None, is_cached: bool
    ) -> tuple[Angles | None, Angles | None]:
        """cos and sin for queries and keys: one table by position, where the keys' serves both.

        Keys that go to a cache stand where the queries do.
        """
        if self.rope is None:
            return None, None
        B, T, _ = x.shape
        S = T if context is None else context.shape[1]
        end = T if offset is None or B == 0 else bounds(offset)[1] + T
        of_first = None
        if not is_cached or end <= max(T, LONG_TABLE):
            count = end if is_cached else S
            of_first = self.rope._tables_of_first(count, self.head_dim, self.dtype)
            if end <= count:
                return of_first, of_first
        assert offset is not None
        positions = offset[:, None] + np.arange(T)
        of_queries = self.rope._tables(positions, self.head_dim, self.dtype)
        return of_queries, of_queries if of_first is None else of_first


def _from_linear_arguments(
    *,
    w_q: ArrayLike | QuantizedMatrix | None = None,
    w_k: ArrayLike | QuantizedMatrix | None = None,
    w_v: ArrayLike | QuantizedMatrix | None = None,
    w_o: ArrayLike | QuantizedMatrix | None = None,
    w_qkv: ArrayLike | QuantizedMatrix | None = None,
    b_q: ArrayLike | None = None,
    b_k: ArrayLike | None = None,
    b_v: ArrayLike | None = None,
    b_qkv: ArrayLike | None = None,
    b_o: ArrayLike | None = None,
    num_heads: int,
    num_kv_heads: int | None,
) -> dict[str, Any]:
    """Weights of `from_linear` as the constructor takes them, and the biases that are given."""
    N = check_int("num_heads", num_heads)
    K = N if num_kv_heads is None else check_int("num_kv_heads", num_kv_heads)
    if N < 1 or K < 1 or N % K != 0:
        raise ValueError(f"num_heads = {N} must be a positive multiple of num_kv_heads, here {K}")
    if w_o is None:
        raise TypeError("w_o is missing")
    if w_qkv is not None:
        given = [a is not None for a in (w_q, w_k, w_v, b_q, b_k, b_v)]
        if any(given):
            raise TypeError("w_qkv already holds what w_q, w_k, w_v, b_q, b_k and b_v would")
        packed = _check_matrix("w_qkv", w_qkv)
        shape = packed.shape
        if len(shape) != 2 or 0 in shape or shape[0] % (N + 2 * K) != 0:
            raise ValueError(
                f"w_qkv must have the shape [(N + 2K) * H, D] with N + 2K = {N + 2 * K}, "
                f"not {shape}"
            )
        rows = shape[0]
        H = rows // (N + 2 * K)
        cuts = [N * H, (N + K) * H]
        is_quantized = isinstance(packed, QuantizedMatrix)
        w_q, w_k, w_v = packed._split(cuts) if is_quantized else np.split(packed, cuts)
        if b_qkv is not None:
            dtype = np.dtype(np.float32) if is_quantized else packed.dtype
            bias = check_array("b_qkv", b_qkv, dtype)
            if bias.shape != (rows,):
                raise ValueError(f"b_qkv has shape {bias.shape}, expected ({rows},)")
            b_q, b_k, b_v = np.split(bias, cuts)
    elif w_q is None or w_k is None or w_v is None:
        raise TypeError("either w_qkv or all of w_q, w_k and w_v must be given")
    elif b_qkv is not None:
        raise TypeError("b_qkv goes with w_qkv; give b_q, b_k and b_v instead")

    def heads(name: str, matrix: Any, count: int, axes: str, given_as: str) -> Any:
        array = _check_matrix(name, matrix)
        shape = array.shape
        if len(shape) != 2 or 0 in shape or shape[0] % count != 0:
            raise ValueError(
                f"{name} must have the shape {axes}, [out, in], with {given_as}, not {shape}"
            )
        return _as_heads(array, (shape[1], count, shape[0] // count))

    of_keys = f"K = num_kv_heads = {K}" + (", as num_heads" if num_kv_heads is None else "")
    q = heads("w_q", w_q, N, "[N * H, D]", f"N = num_heads = {N}")
    k = heads("w_k", w_k, K, "[K * H, Dc]", of_keys)
    v = heads("w_v", w_v, K, "[K * Hv, Dc]", of_keys)
    (D, _, H), (Dc, _, Hv) = q.shape, v.shape
    o = _check_matrix("w_o", w_o)
    for name, shape, axes, expected in (
        ("w_k", (K * k.shape[2], k.shape[0]), "[K * H, Dc]", (K * H, Dc)),
        ("w_o", o.shape, "[D, N * Hv]", (D, N * Hv)),
    ):
        if shape != expected:
            raise ValueError(
                f"{name} has shape {shape}, expected {axes} = {expected}, [out, in], with "
                f"D = {D}, N = {N} and H = {H} from w_q, Dc = {Dc} and Hv = {Hv} from w_v, and "
                f"{of_keys}"
            )
    arguments: dict[str, Any] = {
        "w_q": q,
        "w_k": k,
        "w_v": v,
        "w_o": _as_heads(o, (N, Hv, D)),
    }
    for name, head_bias, weight in (("b_q", b_q, q), ("b_k", b_k, k), ("b_v", b_v, v)):
        shape = weight.shape[1:]
        if (flat := check_vector(name, head_bias, (math.prod(shape),), weight.dtype)) is not None:
            arguments[name] = flat.reshape(shape)
    if b_o is not None:
        arguments["b_o"] = b_o
    return arguments


def _check_matrix(name: str, matrix: Any) -> Any:
    return matrix if isinstance(matrix, QuantizedMatrix) else check_array(name, matrix)


def _as_heads(matrix: Any, shape: tuple[int, int, int]) -> Any:
    """[out, in] as weights of that shape."""
    if isinstance(matrix, QuantizedMatrix):
        return HeadMatrix(matrix, shape)
    return matrix.T.reshape(shape)


def _held(w: BlockWeights) -> str | tuple[str | None, ...] | None:
    """What the weights are kept as: one name for all, or one for each."""
    names = tuple(
        f"int{m.matrix.bits}" if isinstance(m, HeadMatrix) else w.weight_dtype for m in w.matrices
    )
    return names[0] if len(set(names)) == 1 else names


def attention_block(
    x: ArrayLike,
    w_q: ArrayLike,
    w_k: ArrayLike,
    w_v: ArrayLike,
    w_o: ArrayLike,
    *,
    b_q: ArrayLike | None = None,
    b_k: ArrayLike | None = None,
    b_v: ArrayLike | None = None,
    b_o: ArrayLike | None = None,
    norm: LayerNorm | RMSNorm | None = DEFAULT_NORM,
    norm_position: NormPosition = "post",
    residual: bool = True,
    rope: Rope | None = None,
    q_norm: LayerNorm | RMSNorm | None = None,
    k_norm: LayerNorm | RMSNorm | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    is_causal: bool = False,
    local_window_size: Window = None,
    sinks: ArrayLike | None = None,
    weight_dtype: WeightDtype | None = None,
    arithmetic: BlockArithmetic | None = None,
    context: ArrayLike | KVCache | None = None,
    cache: KVCache | None = None,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    query_offset: ArrayLike | None = None,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    out: Array | None = None,
    num_threads: int | None = None,
) -> Array:
    """The attention block in one call: `AttentionBlock` built and called once.

    To call it again with the same weights, keep an `AttentionBlock`: it packs them once.

    Parameters
    ----------
    x : array [B, T, D] or [T, D], float32 or float64
    w_q, w_k, w_v, w_o, b_q, b_k, b_v, b_o
    norm, norm_position, residual, rope, q_norm, k_norm
    scale, softcap, is_causal, local_window_size, sinks, weight_dtype, arithmetic
        As in the constructor of `AttentionBlock`.
    context, cache, bias, mask, query_offset, query_seq_lengths, key_value_seq_lengths, out
    num_threads
        As in a call of it.

    Returns
    -------
    array [B, T, D] or [T, D]

    Raises
    ------
    TypeError, ValueError
        For dtypes or shapes that do not fit. Nothing has been written then.

    Examples
    --------
    >>> import numpy as np, tileattn
    >>> rng = np.random.default_rng(0)
    >>> x = rng.standard_normal((1, 6, 32))
    >>> w_q, w_k, w_v = rng.standard_normal((3, 32, 4, 8))
    >>> w_o = rng.standard_normal((4, 8, 32))
    >>> tileattn.attention_block(x, w_q, w_k, w_v, w_o).shape
    (1, 6, 32)
    """
    block = AttentionBlock(
        w_q,
        w_k,
        w_v,
        w_o,
        b_q=b_q,
        b_k=b_k,
        b_v=b_v,
        b_o=b_o,
        norm=norm,
        norm_position=norm_position,
        residual=residual,
        rope=rope,
        q_norm=q_norm,
        k_norm=k_norm,
        scale=scale,
        softcap=softcap,
        is_causal=is_causal,
        local_window_size=local_window_size,
        sinks=sinks,
        weight_dtype=weight_dtype,
        arithmetic=arithmetic,
    )
    return block(
        x,
        context=context,
        cache=cache,
        bias=bias,
        mask=mask,
        query_offset=query_offset,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        out=out,
        num_threads=num_threads,
    )


def _has_whole_rows(array: Array) -> bool:
    """Whether the elements of a row lie side by side, as the norm's kernel wants them."""
    return array.strides[-1] == array.itemsize or array.shape[-1] == 1


def _as_rows(array: Array) -> Array:
    """[..., D] as [B, T, D] with whole rows: a view, but for what strides cannot express."""
    if array.ndim != 3:
        array = array.reshape(-1, array.shape[-2] if array.ndim > 1 else 1, array.shape[-1])
    return array if _has_whole_rows(array) else np.ascontiguousarray(array)
