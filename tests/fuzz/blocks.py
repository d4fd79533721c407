"""Cases of AttentionBlock, attention_block and QuantizedMatrix, with caches and contexts."""

import copy
from typing import NamedTuple

import numpy as np

import tileattn
from tests.dots import DOT_ISAS
from tests.fuzz import caches
from tests.fuzz.draw import FLOATS, Given, Meaning
from tests.fuzz.judge import Call, output, require
from tests.fuzz.operations import forms, threads
from tileattn import AttentionBlock, KVCache, LayerNorm, QuantizedMatrix, RMSNorm, Rope, reference
from tileattn.quantized import LEAST_SCALE

#: Beyond, squares and sums may overflow, and an error of a rounding be of any size.
CALM = 1e4
#: Positions that a call or a cache has here at most.
MOST_POSITIONS = 1024


def block(draw, isa):
    """AttentionBlock: made in every way, called several times, with a cache or a context."""
    made = _make(draw)
    if made is None:
        return
    block, arguments, call = made
    repr(block)
    require(block.nbytes > 0, "no bytes")
    errors = _errors(block, isa, arguments)
    arrays = [np.asarray(x) for x in arguments.values() if isinstance(x, np.ndarray)]
    arrays = [x for x in arrays if x.dtype.kind == "f"]
    if call.is_hostile or not all((abs(x) < CALM).all() for x in arrays):
        arguments = None  # then only what holds without the reference
    kept = (
        _cache(draw, block) if block.context_dim == block.model_dim and draw.chance(0.4) else None
    )
    for _ in range(draw.integer(1, 6) if kept else draw.integer(1, 2)):
        if kept is None or draw.chance(0.15):
            _call(draw, block, arguments, errors)
        else:
            _step(draw, block, arguments, errors, *kept)


def _norm(draw, D, dtype):
    if draw.chance(0.3):
        return LayerNorm()
    weight = draw.array((D,), dtype)
    if draw.chance(0.5):
        return RMSNorm(weight, draw.pick(1e-6, 1e-5, 0.1))
    return LayerNorm(weight, draw.array((D,), dtype), draw.pick(1e-12, 1e-5))


def _make(draw):
    """A block, the reference's arguments for it, and the call that made it; or None if refused."""
    K, G = draw.pick(1, 1, 2, 3), draw.pick(1, 1, 2, 4)
    N, D = K * G, draw.pick(1, 2, 3, 8, 16, 17, 33, 64, 96, 130, 520)
    H, Hv = draw.pick(1, 2, 4, 8, 11, 16, 33), draw.pick(1, 2, 5, 8, 16, 17)
    Dc = D if draw.chance(0.75) else draw.pick(1, 7, 24, 40)
    dtype = np.dtype(draw.pick(np.float32, *FLOATS))
    contents = draw.pick("normal", "normal", "normal", "normal", "sprinkled", "wild")
    shapes = {"w_q": (D, N, H), "w_k": (Dc, K, H), "w_v": (Dc, K, Hv), "w_o": (N, Hv, D)}
    plain = {}
    for name, shape in shapes.items():
        plain[name] = draw.array(shape, dtype, contents)
        if contents == "normal":
            plain[name] /= dtype.type(np.sqrt(D if name != "w_o" else N * Hv))
    for name, shape in (("b_q", (N, H)), ("b_k", (K, H)), ("b_v", (K, Hv)), ("b_o", (D,))):
        if draw.chance(0.3):
            plain[name] = draw.array(shape, dtype)
    if draw.chance(0.5):
        plain["norm"] = _norm(draw, D, dtype) if draw.chance(0.8) else None
    for name, values in (
        ("norm_position", ("pre", "post", None)),
        ("residual", (True, False)),
        ("is_causal", (True, True, False)),
        ("softcap", (5.0, 0.5)),
        ("scale", (0.3, -0.1, 0.0)),
        ("local_window_size", (0, 3, (5, None), (2, 1), 10**30)),
    ):
        if draw.chance(0.3):
            plain[name] = draw.pick(*values)
    if draw.chance(0.2):
        plain["q_norm"], plain["k_norm"] = _norm(draw, H, dtype), _norm(draw, H, dtype)
    if draw.chance(0.3) and H >= 2:
        plain["rope"] = Rope(rotary_dim=2 * draw.integer(1, H // 2), interleaved=draw.chance(0.5))
    if draw.chance(0.2):
        plain["sinks"] = 2 * draw.array((N,), dtype)
    if dtype == np.float32 and draw.chance(0.4):
        plain["weight_dtype"] = draw.pick("bfloat16", "int8", "int4")
        if draw.chance(0.4):
            plain["arithmetic"] = "int8" if plain["weight_dtype"] == "int8" else "float32"
    given = forms(draw, plain)
    if draw.chance(0.3) and given["w_q"].meaning is Meaning.SAME:
        return _make_linear(draw, plain, N, K)
    refusable = contents != "normal" and plain.get("weight_dtype", "bfloat16") != "bfloat16"
    if refusable:
        given = {n: g._replace(meaning=Meaning.OPEN) if g.meaning is Meaning.SAME else g
                 for n, g in given.items()}  # fmt: skip
    call = Call(AttentionBlock, given, names=("D", "N", "H", "K"))
    block = call()
    return None if block is None else (block, call.values, call)


def _make_linear(draw, plain, N, K):
    """From [out, in] matrices, some quantised."""
    rows = {n: plain[n].reshape(len(plain[n]), -1).T for n in ("w_q", "w_k", "w_v")}
    rows["w_o"] = plain["w_o"].reshape(-1, plain["w_o"].shape[2]).T
    rest = {n: v for n, v in plain.items() if n not in rows}
    for name in ("b_q", "b_k", "b_v"):
        if name in rest:
            rest[name] = rest[name].reshape(-1)
    exact, is_quantized = dict(plain), plain["w_q"].dtype == np.float32 and draw.chance(0.5)
    if is_quantized:
        rest.pop("weight_dtype", None)
        rest.pop("arithmetic", None)
        exact = {n: v for n, v in exact.items() if n not in ("weight_dtype", "arithmetic")}
        for name in rows:
            if draw.chance(0.3) or not (abs(rows[name]) < 1e30).all():
                continue
            bits = draw.pick(8, 4)
            size = draw.pick(None, 32, 64)
            rows[name] = QuantizedMatrix.from_float(rows[name], bits=bits, group_size=size)
            exact[name] = rows[name].dequantize().T.reshape(plain[name].shape)
    elif (
        rows["w_q"].shape[1] == rows["w_k"].shape[1]
        and rows["w_k"].shape == rows["w_v"].shape
        and draw.chance(0.4)
    ):
        rows["w_qkv"] = np.concatenate([rows.pop(n) for n in ("w_q", "w_k", "w_v")])
        if all(n in rest for n in ("b_q", "b_k", "b_v")):
            rest["b_qkv"] = np.concatenate([rest.pop(n) for n in ("b_q", "b_k", "b_v")])
        else:
            for name in ("b_q", "b_k", "b_v"):
                rest.pop(name, None)
                exact.pop(name, None)
    given = forms(draw, {**rows, **rest, "num_heads": N, "num_kv_heads": K}, spoil=False)
    if any(g.meaning is not Meaning.SAME for g in given.values()):
        Call(AttentionBlock.from_linear, given, names=("D", "N", "H", "K"))()
        return None
    open_ = plain.get("weight_dtype", "bfloat16") != "bfloat16" and not all(
        (abs(x) < 1e30).all() for x in rows.values() if isinstance(x, np.ndarray)
    )
    if open_:
        given = {n: g._replace(meaning=Meaning.OPEN) for n, g in given.items()}
    call = Call(AttentionBlock.from_linear, given, names=("D", "N", "H", "K", "w_q", "w_k", "w_v"))
    block = call()
    return None if block is None else (block, exact, call)


class Errors(NamedTuple):
    """What a block's arithmetic may be off by, whatever the order of its sums."""

    relative: float  # of what enters its products
    least: float  # of a result, beside that


def _errors(block, isa, arguments):
    if block.arithmetic == "int8":
        return Errors(1 / 127, 0.0)
    if block.arithmetic == "bfloat16" or (block.weight_dtype == "bfloat16" and isa in DOT_ISAS):
        return Errors(2.0**-8, _flushed(block, arguments))
    # Of a sum of D products in any order, and of the few roundings beside it.
    return Errors(float(np.finfo(block.dtype).eps) * (16 + block.model_dim) ** 0.5, 0.0)


def _flushed(block, arguments):
    """What a result misses where dot products take every number below the normal range for 0.

    A step of a sum may miss its product and the sum so far, each less than the least normal number:
    so does a value, and what `w_o` and a norm behind it make of that. Scores so small are none.
    """
    step = 2 * float(np.finfo(np.float32).tiny)
    w_o = abs(np.asarray(arguments["w_o"], np.float64))
    values = step * (block.context_dim + MOST_POSITIONS)
    z = values * w_o.sum(axis=(0, 1)).max() + step * w_o.shape[0] * w_o.shape[1]
    if block.norm is None or block.norm_position != "post":
        return z
    weight = block.norm.weight
    largest = 1.0 if weight is None else abs(np.asarray(weight, np.float64)).max()
    return z * largest / block.norm.eps**0.5


#: Relative size of the step between numbers that a cache can hold.
STEPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "int8": 2.0**-6}


def _exact(arguments, block, dtype):
    """The reference's arguments in dtype, with the weights that the block has made of them."""
    exact = {}
    for name, value in arguments.items():
        if isinstance(value, (LayerNorm, RMSNorm)):
            value = _norm_of(value, lambda a: a.astype(dtype))
        elif name[:2] in ("w_", "b_") and value is not None:
            value = np.asarray(value, dtype)
        exact[name] = value
    return _unrounded(exact, block)


def _norm_of(norm, change):
    parts = [None if a is None else change(a) for a in (norm.weight, getattr(norm, "bias", None))]
    return (LayerNorm(*parts, norm.eps) if isinstance(norm, LayerNorm)
            else RMSNorm(parts[0], norm.eps))  # fmt: skip


class Shaken:
    """Arguments that are off by as much as a block's arithmetic and its cache may make them."""

    def __init__(self, draw, tolerance, step=0.0):
        self.signs = lambda a: draw.numpy.choice([-1.0, 1.0], a.shape)
        self.tolerance, self.step = tolerance, max(tolerance, step)

    def __call__(self, name, value):
        if isinstance(value, KVCache):
            return self._cache(value)
        if isinstance(value, (LayerNorm, RMSNorm)):
            return _norm_of(value, lambda a: self._array(a, self.tolerance))
        if value is None or not (name[:2] in ("w_", "b_") or name in ("x", "context", "sinks")):
            return value
        # Keys and values are stored as what is a step away.
        off = self.step if name in ("w_k", "w_v", "b_k", "b_v") else self.tolerance
        return self._array(np.asarray(value), off)

    def _array(self, a, off):
        size = abs(a)
        if off > 1e-3 and a.ndim > 1:  # of int8, errors are those of the largest of a row
            size = size.max(axis=-1, keepdims=True, initial=0)
        return (a + off * size * self.signs(a)).astype(a.dtype)

    def _cache(self, cache):
        cache = copy.deepcopy(cache)
        for a in cache._arrays():
            if a.dtype == np.int8:
                a[...] = np.clip(a + self.signs(a), -127, 127)
            else:
                a[...] = a.astype(np.float64) * (1 + self.step * self.signs(a))
        return cache


def _judge(draw, call, got, run, shaken, least):
    """Against the reference: what shaken arguments change there, and `least`, an error may be.

    `run` gives the reference's result, of what its argument makes of each of the call's. Returns
    whether there was anything to compare.
    """
    others = [run(shaken) for _ in range(4)]
    expected = run(lambda name, value: value)
    if not np.isfinite(expected).all() or abs(expected).max(initial=0) > 1e20:
        return False
    allowed = max(abs(other - expected).max(initial=0) for other in others)
    if not np.isfinite(allowed):
        return False
    # Three times: what enters is shaken by one rounding, while q, k, v, y and z are rounded, too.
    # And the last steps of a result that is the same whatever enters them; below the normal range
    # they are absolute, and a norm may make more of them.
    limits = np.finfo(got.dtype)
    rounding = 4 * float(limits.eps) * abs(expected).max(initial=0) + float(limits.tiny)
    error = abs(got - expected)
    if not (error <= 3 * allowed + rounding + least).all():
        call.fault(f"is off by {np.nanmax(error):.3g}, where {allowed:.3g} is explained")
    return True


def _x(draw, block, B, T):
    has_batch = B != 1 or draw.chance(0.8)
    shape = (B, T, block.model_dim) if has_batch else (T, block.model_dim)
    return draw.array(
        shape, block.dtype, draw.pick("normal", "normal", "normal", "sprinkled", "wild")
    )


def _options(draw, block, B, T, S, plain, *, with_lengths=True):
    """A mask and a bias for these sizes."""
    N = block.num_heads
    shape = (B, N, T, S) if plain["x"].ndim == 3 else (N, T, S)
    if draw.chance(0.15):
        plain["mask"] = draw.numpy.random(draw.broadcast_shape(*shape)) < draw.pick(0.0, 0.3, 0.9)
    if draw.chance(0.15):
        plain["bias"] = draw.array(draw.broadcast_shape(*shape), draw.pick(*FLOATS))
    for name, limit in (("query_seq_lengths", T), ("key_value_seq_lengths", S)):
        if draw.chance(0.2) and with_lengths:
            plain[name] = draw.lengths(B, limit)


def _call(draw, block, arguments, errors):
    """Without a cache, or with a context, perhaps projected before."""
    B, T = draw.pick(0, 1, 1, 2, 3), draw.pick(0, 1, 1, 2, 5, 9, 16, 17, 33, 70)
    plain, S = {"x": _x(draw, block, B, T)}, T
    if block.context_dim != block.model_dim or draw.chance(0.3):
        S = draw.pick(0, 1, 3, 8, 31, 65)
        shape = (S, block.context_dim) if plain["x"].ndim == 2 else (B, S, block.context_dim)
        plain["context"] = draw.array(shape, block.dtype)
    _options(draw, block, B, T, S, plain)
    positioned = block.is_causal or block.rope is not None
    positioned = positioned or block.local_window_size not in (None, 10**30)
    if positioned and S != T:
        plain["query_offset"] = draw.pick(0, abs(S - T), draw.lengths(B, 99))
    given = forms(draw, plain)
    given["num_threads"] = threads(draw)
    given["out"] = output(draw, plain["x"].shape, block.dtype, [g.value for g in given.values()])
    call = Call(AttentionBlock.__call__, given, names=("D", "T", "S"), invoke=lambda v: block(**v))
    result = call()
    fresh = call.fresh_out()
    kept = None if result is None else np.array(result)
    call.twice(draw, result, **fresh)
    if call.is_hostile or kept is None or arguments is None:
        return
    if draw.chance(0.2):
        same, parts = block.profile(**{**call.values, **fresh})
        require(len(parts) == 3 and all(t >= 0 for _, t in parts), "no seconds")
        require(same.shape == kept.shape, "another shape")
    values = {n: g.plain for n, g in given.items() if n not in ("out", "num_threads")}
    x = np.asarray(values["x"])
    if (
        x.dtype.kind != "f"
        or not (abs(x) <= CALM).all()
        or isinstance(values.get("context"), KVCache)
    ):
        return
    for name in ("x", "context"):
        if values.get(name) is not None:
            values[name] = values[name].astype(np.float64)
    values |= _exact(arguments, block, np.float64)

    def run(change):
        return _quiet(reference.attention_block, **{n: change(n, v) for n, v in values.items()})

    _judge(draw, call, kept, run, Shaken(draw, errors.relative), errors.least)


def _unrounded(exact, block):
    """Arguments whose weights are what a block has rounded them to."""
    exact = dict(exact)
    weight_dtype = exact.pop("weight_dtype", None)
    exact.pop("arithmetic", None)
    if weight_dtype is None or np.ndim(weight_dtype):
        return exact
    for name in ("w_q", "w_k", "w_v", "w_o"):
        w = exact[name].astype(np.float32)
        depth = len(w) if name != "w_o" else w.shape[0] * w.shape[1]
        if weight_dtype == "bfloat16":
            bits = w.view(np.uint32).astype(np.uint64)
            rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32)
            rounded = np.where(np.isnan(w), w, rounded.view(np.float32))
            exact[name] = rounded.astype(exact[name].dtype)
            continue
        bits, size = (8, None) if weight_dtype == "int8" else (4, 32)
        rows = w.reshape(depth, -1).T
        matrix = QuantizedMatrix.from_float(
            rows, bits=bits, group_size=size if size != depth else None
        )
        exact[name] = matrix.dequantize().T.reshape(w.shape).astype(exact[name].dtype)
    return exact


def _quiet(function, **arguments):
    with np.errstate(all="ignore"):
        return function(**arguments)


def _cache(draw, block):
    """Two caches that fit, one for the reference."""
    dtypes = [np.float64]
    if block.dtype == np.float32:
        dtypes = [x for x in caches.TYPES if x is not np.float64]
    sizes = {
        "batch": draw.pick(1, 1, 2, 3),
        "num_kv_heads": block.num_kv_heads,
        "head_dim": block.head_dim,
        "v_head_dim": block.v_head_dim,
        "dtype": draw.pick(*dtypes),
    }
    state = draw.random.getstate(), draw.numpy.bit_generator.state
    first, model = caches.make(draw, **sizes)
    draw.random.setstate(state[0])
    draw.numpy.bit_generator.state = state[1]
    second, _ = caches.make(draw, **sizes)
    return (first, second, model) if first is not None and second is not None else None


def _step(draw, block, arguments, errors, cache, slow, model):
    """Decoding: what comes behind the positions that a cache holds; `slow` is the reference's."""
    B, T = cache.batch, draw.pick(0, 1, 1, 1, 2, 5, 9, 30)
    plain = {"x": draw.array((B, T, block.model_dim), block.dtype)}
    counts = [T] * B
    if draw.chance(0.3):
        plain["query_seq_lengths"] = counts = draw.lengths(B, T)
    if cache.window is None and draw.chance(0.3):
        S = int((cache.lengths + counts).max())
        _options(draw, block, B, T, S, plain, with_lengths=False)
    given = forms(draw, plain, spoil=False)
    own = _own_memory(cache, block, T) if draw.chance(0.1) else None
    if own is not None:
        given["x"] = Given(own, own.copy())
    given["num_threads"] = threads(draw)
    given["out"] = output(draw, plain["x"].shape, block.dtype, [given["x"].value])
    given["cache"] = Given(cache, cache)
    model.sequences, model.longest = [range(n) for n in cache.lengths], list(cache._longest)
    if not model.fits(counts):
        given = {n: g._replace(meaning=Meaning.OPEN) if g.meaning is Meaning.SAME else g
                 for n, g in given.items()}  # fmt: skip
    values = {n: g.plain for n, g in given.items() if n not in ("out", "num_threads", "cache")}
    call = Call(AttentionBlock.__call__, given, names=("D", "T", "S"), caches=[cache],
                may_change=own is not None, invoke=lambda v: block(**v))  # fmt: skip
    result = call()
    if call.error is not None and not call.is_hostile:
        return
    x = values.pop("x")
    if call.is_hostile or arguments is None or type(x) is not np.ndarray or x.dtype != block.dtype:
        cache.reset()
        slow.reset()
        return
    values |= {"x": x, "cache": slow, **_exact(arguments, block, block.dtype)}

    def run(change):
        return _quiet(reference.attention_block, **{n: change(n, v) for n, v in values.items()})

    step = STEPS.get(cache.dtype.name, 0.0)
    is_known = _judge(draw, call, result, run, Shaken(draw, errors.relative, step), errors.least)
    if not np.array_equal(cache.lengths, slow.lengths):
        call.fault(f"the lengths are {cache.lengths}, the reference's {slow.lengths}")
    if not is_known:
        cache.reset()
        slow.reset()


def _own_memory(cache, block, T):
    """An x that lies in the cache, where the sizes allow it."""
    width = cache.num_kv_heads * cache.head_dim
    if cache.dtype != block.dtype or width != block.model_dim or cache.keys.shape[1] < T:
        return None
    keys = cache.keys[:, :T]
    try:
        x = np.lib.stride_tricks.as_strided(
            keys, (cache.batch, T, width), (*keys.strides[:2], keys.itemsize), writeable=False
        )
    except ValueError:
        return None
    return x if np.isfinite(x).all() else None


def quantized(draw, isa):
    """QuantizedMatrix: its constructors, and what they mean."""
    out, depth = draw.pick(1, 2, 7, 33), draw.pick(1, 7, 31, 32, 33, 64, 100, 130, 600)
    bits = draw.pick(8, 8, 4)
    size = draw.pick(None, 32, 64, 128, 512, depth)
    if draw.chance(0.4):
        contents = draw.contents()
        weights = draw.array((out, depth), draw.pick(*FLOATS), contents)
        plain = {"weights": weights, "bits": bits, "group_size": size}
        given = forms(draw, plain)
        if contents != "normal":
            given["weights"] = given["weights"]._replace(meaning=max(
                given["weights"].meaning, Meaning.OPEN, key=list(Meaning).index))  # fmt: skip
        call = Call(QuantizedMatrix.from_float, given, names=("out",))
        matrix = call()
        if (
            matrix is not None
            and not call.is_hostile
            and isinstance(call.plain["weights"], np.ndarray)
        ):
            w = np.asarray(call.plain["weights"])
            error = abs(matrix.dequantize() - w)
            step = 2 * abs(w).max(axis=1, keepdims=True) / (127 if matrix.bits == 8 else 7)
            # With 4 bits, scales are float16 times one power of two: its least step is shared.
            shared = abs(w).max() * 2.0**-38 if matrix.bits == 4 else 0
            if not (error <= step + abs(w) * 2.0**-10 + shared + 127 * LEAST_SCALE).all():
                call.fault(f"is off by {error.max()}")
    else:
        groups, contents = -(-depth // (size or depth)), draw.contents()
        has_minima = bits == 4 and draw.chance(0.5)
        low, high = (-127, 128) if bits == 8 else (0, 16) if has_minima else (-8, 8)
        plain = {
            "values": draw.numpy.integers(low, high, (out, depth)).astype(
                "u1" if has_minima else "i1"
            ),
            "scales": draw.array((out, groups), draw.pick(np.float16, np.float32), contents),
        }
        if bits == 4:
            with np.errstate(all="ignore"):
                plain["scales"] = plain["scales"].astype(np.float16)
        if has_minima:
            plain["minima"] = draw.array((out, groups), plain["scales"].dtype)
        plain |= {"bits": bits, "group_size": size}
        given = forms(draw, plain)
        if (
            contents != "normal" or bits == 4
        ):  # which need not be float16 numbers times one power of two
            given["scales"] = given["scales"]._replace(meaning=max(
                given["scales"].meaning, Meaning.OPEN, key=list(Meaning).index))  # fmt: skip
        call = Call(QuantizedMatrix, given, names=("out",))
        matrix = call()
        if (
            matrix is not None
            and call.meanings <= {Meaning.SAME, Meaning.OPEN}
            and not _changed(call, plain)
        ):
            columns = np.repeat(plain["scales"].astype(np.float32), size or depth, axis=1)[
                :, :depth
            ]
            expected = plain["values"] * columns.astype(np.float64)
            if has_minima:
                expected += np.repeat(plain["minima"].astype(np.float64), size or depth, axis=1)[
                    :, :depth
                ]
            if not np.allclose(
                matrix.dequantize(), expected, rtol=1e-5, atol=1e-5 * abs(expected).max()
            ):
                call.fault("does not stand for values * scales + minima")
    if matrix is not None:
        repr(matrix)
        require(matrix.dequantize().shape == matrix.shape, "another shape")


def _changed(call, plain):
    return any(call.given[n].plain is not plain[n] for n in plain)


def once(draw, isa):
    """attention_block in one call, with everything, and what the reference refuses."""
    D, N, H = draw.pick(1, 8, 20), draw.pick(1, 2), draw.pick(2, 4, 5)
    dtype = np.dtype(draw.pick(*FLOATS))
    B, T = draw.pick(0, 1, 2), draw.pick(0, 1, 5)
    shapes = {
        "x": (B, T, D),
        "w_q": (D, N, H),
        "w_k": (D, N, H),
        "w_v": (D, N, H),
        "w_o": (N, H, D),
    }
    plain = {name: draw.array(shape, dtype) for name, shape in shapes.items()}
    names = [
        "b_q", "b_k", "b_v", "b_o", "norm", "norm_position", "residual", "rope", "q_norm",
        "k_norm", "scale", "softcap", "is_causal", "local_window_size", "sinks", "weight_dtype",
        "arithmetic", "context", "cache", "bias", "mask", "query_offset", "query_seq_lengths",
        "key_value_seq_lengths",
    ]  # fmt: skip
    given = forms(draw, plain)
    for name in draw.random.sample(names, draw.integer(1, 3)):
        given[name] = draw.wrong(None)
    given["num_threads"] = threads(draw)
    call = Call(tileattn.attention_block, given, names=("D", "N", "K", "H", "T", "S"))
    result = call()
    kept = None if result is None else np.array(result)
    call.agrees(reference.attention_block, kept)
