"""Cases of functions of arrays: attention, its weights, packed sequences, merging, rope, norms."""

import math

import numpy as np

import tileattn
from tests import oracle
from tests.fuzz.draw import FLOATS, STORED, Given, HostileError, Meaning
from tests.fuzz.judge import Call, output, require
from tileattn import reference

#: Elements of scores times head width that the dense oracle may have.
AFFORDABLE = 1_500_000


def checked(check, call, *arguments, **options):
    try:
        with np.errstate(all="ignore"):
            check(*arguments, **options)
    except AssertionError as error:
        call.fault(str(error))


def threads(draw):
    return draw.form(draw.integer(1, 5)) if draw.chance(0.7) else Given(None, None)


def sizes(draw):
    """B, T, S, N, K, H and Hv that the oracle can afford."""
    K, G = draw.pick(1, 1, 2, 3), draw.pick(1, 1, 2, 3, 4, 9, 17)
    B = draw.pick(0, 1, 1, 1, 2, 3)
    T, S, H, Hv = draw.size(), draw.size(0.35), draw.size(), draw.size()
    if draw.chance(0.3):
        S = T
    while B * T * S * K * G * max(H, Hv, 1) > AFFORDABLE:
        if T * S > 4096:
            T, S = -(-T // 2), (S if S < T else -(-S // 2))
        else:
            H, Hv = -(-H // 2), -(-Hv // 2)
    return B, T, S, K * G, K, H, Hv


def score_options(draw, B, T, S, N, contents, dtype, names):
    """Options that fit, a few of `names`, by name."""
    options = {}

    def maybe(name, value, probability=0.25):
        if name in names and draw.chance(probability):
            options[name] = value()

    calm = contents != "normal"
    maybe("scale", lambda: draw.pick(0.0, draw.real(-0.3, 0.3), 0.25) if calm else draw.real(-2, 2))
    maybe("softcap", lambda: draw.pick(0.5, 3.0, 30.0))
    maybe("is_causal", lambda: draw.chance(0.8), 0.5)
    maybe("local_window_size", lambda: draw.pick(
        0, 3, draw.integer(0, 300), (draw.integer(0, 40), None), (None, 2), (None, None),
        (draw.integer(0, 9), draw.integer(0, 9)), 10**30))  # fmt: skip
    rng = draw.numpy
    maybe(
        "mask", lambda: rng.random(draw.broadcast_shape(B, N, T, S)) < draw.pick(0.0, 0.1, 0.9, 1.0)
    )

    def bias():
        x = rng.standard_normal(draw.broadcast_shape(B, N, T, S))
        if x.ndim and not calm:
            x[..., : x.shape[-1] // 2] += draw.pick(0, -1e3, -3e4)
        x[rng.random(x.shape) < draw.pick(0, 0.2, 0.8, 1.0)] = -np.inf
        return np.asarray(x, draw.pick(*STORED))

    maybe("bias", bias)
    slopes = 0.1 if calm else 1.0
    maybe(
        "alibi_slopes",
        lambda: (slopes * rng.standard_normal(draw.pick((N,), (B, N)))).astype(draw.pick(*STORED)),
    )
    none = np.full(N, -np.inf)
    maybe("sinks", lambda: draw.pick(none, np.full(N, -1e30), 3 * rng.standard_normal(N)))
    window = options.get("local_window_size")
    positioned = options.get("is_causal") or "alibi_slopes" in options
    positioned = positioned or window not in (None, (None, None), 10**30)
    if (positioned and T != S) or draw.chance(0.2):
        options["query_offset"] = draw.pick(
            S - T, 0, draw.integer(-80, 80), rng.integers(-80, 80, B), 2**60, -(2**60)
        )
        if (
            abs(np.asarray(options["query_offset"])).max(initial=0) > 2**50
            and "alibi_slopes" in options
        ):
            options["query_offset"] = S - T
    maybe("query_seq_lengths", lambda: draw.lengths(B, T))
    maybe("key_value_seq_lengths", lambda: draw.lengths(B, S))
    return options


def forms(draw, plain, spoil=True):
    """Arguments in some form: mostly at most one of them is not what it stands for."""
    given = {name: Given(value, value) for name, value in plain.items()}
    others = [v for v in plain.values() if isinstance(v, np.ndarray)]
    if draw.chance(0.6):
        for name in draw.random.sample(sorted(given), min(len(given), draw.pick(1, 1, 2, 3))):
            given[name] = draw.form(plain[name], others if spoil else ())
    return given


def normal(options):
    """Options as the oracle takes them."""
    normal = {}
    for name, value in options.items():
        if value is None:
            continue
        if name in ("scale", "softcap"):
            value = float(value)
        elif name == "is_causal":
            value = bool(value)
        elif name == "local_window_size":
            sides = value if isinstance(value, (tuple, list)) else (value, value)
            value = tuple(None if w is None or int(w) > 2**40 else int(w) for w in sides)
        elif name != "rows" and name != "reduce":
            value = np.asarray(value)
        normal[name] = value
    return normal


def far(options):
    return abs(np.asarray(options.get("query_offset", 0), np.float64)).max(initial=0) > 2**50


def overflows(q, k, bias, scale):
    """Whether a score, which counts in units of log2, may be beyond the range."""
    product = q.shape[-1] * float(abs(q).max(initial=0)) * float(abs(k).max(initial=0))
    product *= max(1.0, abs(1.0 if scale is None else scale))
    added = float(abs(bias[np.isfinite(bias)]).max(initial=0))
    return product + added > float(np.finfo(oracle.arithmetic(q.dtype)).max) / 2


def same_pattern(call, got, expected, what):
    """Not finite at the same places, in the same way."""
    a, b = (np.asarray(x).astype(np.float64) for x in (got, expected))
    if not np.array_equal(np.isnan(a), np.isnan(b)):
        call.fault(f"{what}: {np.isnan(a).sum()} NaN, the reference has {np.isnan(b).sum()}")
    if not np.array_equal(a[np.isinf(b)], b[np.isinf(b)]) or np.isinf(a).sum() != np.isinf(b).sum():
        call.fault(f"{what}: infinite elsewhere than the reference")


ATTENTION_OPTIONS = (
    "bias", "mask", "scale", "softcap", "is_causal", "query_offset", "local_window_size",
    "query_seq_lengths", "key_value_seq_lengths", "alibi_slopes", "sinks",
)  # fmt: skip


def attention(draw, isa):
    """dot_product_attention and explain."""
    B, T, S, N, K, H, Hv = sizes(draw)
    dtype, contents = np.dtype(draw.pick(*STORED)), draw.contents()
    plain = {
        name: draw.array(shape, dtype, contents)
        for name, shape in (("q", (B, T, N, H)), ("k", (B, S, K, H)), ("v", (B, S, K, Hv)))
    }
    plain |= score_options(draw, B, T, S, N, contents, dtype, ATTENTION_OPTIONS)
    has_batch = B != 1 or draw.chance(0.8)
    if not has_batch:
        for name, value in plain.items():
            if name in "qkv" or (name in ("mask", "bias") and value.ndim == 4):
                plain[name] = value[0]
            elif name == "alibi_slopes":
                plain[name] = value.reshape(-1)
    given = forms(draw, plain)
    given["return_lse"] = Given(True, True) if draw.chance(0.9) else draw.form(True)
    if draw.chance(0.2):
        given["arithmetic"] = draw.pick(Given("float32", "float32"), draw.wrong(None))
    given["num_threads"] = threads(draw)
    shape = (B, T, N, Hv) if has_batch else (T, N, Hv)
    wide = np.float32 if dtype.name in oracle.HALF_ROUNDING and draw.chance(0.3) else dtype
    given["out"] = output(draw, shape, wide, [g.value for g in given.values()])
    call = Call(tileattn.dot_product_attention, given, names=("S", "T", "B", "N", "K"))
    result = call()
    arithmetic = given.get("arithmetic")
    explained = Call(tileattn.explain, given, names=call.names)
    plan = explained()
    if not call.is_hostile and (plan is None) != (result is None):
        call.fault(f"explain: {explained.error!r}, the call itself: {call.error!r}")
    if result is not None and call.out is not None:
        first = result[0] if isinstance(result, tuple) else result
        require(call.is_hostile or first is call.out, "another array than out is returned")
    fresh = call.fresh_out()
    kept = tuple(map(np.array, result)) if isinstance(result, tuple) else result
    call.twice(draw, result, **fresh)
    expected = call.agrees(reference.dot_product_attention, kept, **fresh)
    if not isinstance(kept, tuple) or expected is None:
        return
    is_dots = plan.arithmetic == "bfloat16"
    require(not (is_dots and arithmetic and arithmetic.value == "float32"), "not in float32")
    judge_attention(call, kept, expected, contents, is_dots, isa)


def judge_attention(call, got, expected, contents, is_dots, isa):
    plain = call.plain
    q, k, v = (np.asarray(plain.pop(name)) for name in "qkv")
    options = normal({n: plain[n] for n in plain if n in ATTENTION_OPTIONS})
    bias = np.asarray(options.get("bias", 0.0), np.float64)
    if contents == "normal" and (~(bias < np.inf)).any():
        contents = "sprinkled"
    is_beyond = far(options) or overflows(q, k, bias, options.get("scale"))
    if contents == "normal" and not is_beyond:
        checked(oracle.check_attention, call, got, q, k, v, is_dots=is_dots, **options)
    elif contents == "sprinkled" and not is_dots:
        out, lse = got
        weightless = np.asarray(expected[1]) == -np.inf
        same_pattern(call, lse, expected[1], "lse")
        keep = ~weightless[..., None] & np.ones(out.shape, bool)
        same_pattern(call, out[keep], np.asarray(expected[0])[keep], "out")


def weights(draw, isa):
    """attention_weights."""
    B, T, S, N, K, H, _ = sizes(draw)
    dtype, contents = np.dtype(draw.pick(*STORED)), draw.contents()
    names = [n for n in ATTENTION_OPTIONS if n != "sinks"]
    q, k = draw.array((B, T, N, H), dtype, contents), draw.array((B, S, K, H), dtype, contents)
    options = score_options(draw, B, T, S, N, contents, dtype, names)
    if far(options):
        options["query_offset"] = S - T
    v = np.zeros((B, S, K, 1), dtype)
    with np.errstate(all="ignore"):
        _, lse = reference.dot_product_attention(q, k, v, return_lse=True, **options)
    if contents == "normal" and draw.chance(0.2):
        lse = lse + draw.array(lse.shape, lse.dtype)
    plain = {"q": q, "k": k, "lse": lse, **options}
    if draw.chance(0.4):
        plain["rows"] = draw.numpy.integers(0, max(T, 1), draw.integer(0, 5) if T else 0)
    if draw.chance(0.6):
        plain["reduce"] = draw.pick("queries", "keys")
    given = forms(draw, plain)
    given["num_threads"] = threads(draw)
    R = len(plain["rows"]) if "rows" in plain else T
    shape = {None: (B, N, R, S), "queries": (B, N, S), "keys": (B, N, R)}[plain.get("reduce")]
    given["out"] = output(draw, shape, lse.dtype, [g.value for g in given.values()])
    call = Call(tileattn.attention_weights, given, names=("S", "T", "B", "N", "K"))
    result = call()
    fresh = call.fresh_out()
    kept = None if result is None else np.array(result)
    call.twice(draw, result, **fresh)
    expected = call.agrees(reference.attention_weights, kept, **fresh)
    if expected is None:
        return
    plain = call.plain
    scale = plain.get("scale")
    if scale is not None and abs(float(scale)) > 10:  # far from what the LSE was made with
        return
    if contents == "normal":
        q, k, lse = (np.asarray(plain.pop(name)) for name in ("q", "k", "lse"))
        options = normal({n: plain[n] for n in plain if n != "num_threads"})
        checked(oracle.check_weights, call, kept, q, k, lse, **options)
    elif contents == "sprinkled":
        same_pattern(call, kept, expected, "weights")


def varlen(draw, isa):
    """varlen_attention."""
    B, T, S, N, K, H, Hv = sizes(draw)
    dtype, contents = np.dtype(draw.pick(*STORED)), draw.contents()
    B = draw.integer(0, 5)
    names = [n for n in ATTENTION_OPTIONS if n not in ("mask", "bias") and "lengths" not in n]
    options = score_options(draw, B, T, S, N, contents, dtype, names)
    is_even = draw.chance(0.4)

    def starts():
        return np.concatenate([[0], np.cumsum(draw.lengths(B, draw.pick(1, 7, 30, 300)))]).astype(
            int
        )

    q_starts = starts()
    k_starts = q_starts if is_even else starts()
    while (q_starts[-1] + 1) * (k_starts[-1] + 1) * N * max(H, Hv, 1) > AFFORDABLE:
        q_starts, k_starts = q_starts // 2, k_starts // 2
    if not is_even:
        options["query_offset"] = draw.pick(0, draw.numpy.integers(-20, 20, B))
    if far(options):
        options["query_offset"] = 0
    plain = {
        "q": draw.array((q_starts[-1], N, H), dtype, contents),
        "k": draw.array((k_starts[-1], K, H), dtype, contents),
        "v": draw.array((k_starts[-1], K, Hv), dtype, contents),
        "cu_seqlens_q": q_starts,
        "cu_seqlens_k": k_starts,
        **options,
    }
    given = forms(draw, plain)
    given["return_lse"] = Given(True, True)
    given["num_threads"] = threads(draw)
    shape = (q_starts[-1], N, Hv)
    given["out"] = output(draw, shape, dtype, [g.value for g in given.values()])
    call = Call(tileattn.varlen_attention, given, names=("S", "T", "B", "N", "K"))
    result = call()
    fresh = call.fresh_out()
    kept = None if result is None else tuple(map(np.array, result))
    call.twice(draw, result, **fresh)
    expected = call.agrees(reference.varlen_attention, kept, **fresh)
    if expected is None or Meaning.OPEN in call.meanings:
        return
    for b in range(B):  # each sequence has the bits that it gets alone
        rows, keys = slice(*q_starts[b : b + 2]), slice(*k_starts[b : b + 2])
        alone = dict(options)
        for name in ("query_offset", "alibi_slopes"):
            value = alone.get(name)
            if value is not None and np.ndim(value) == (2 if name == "alibi_slopes" else 1):
                alone[name] = value[b] if name == "alibi_slopes" else int(value[b])
        q, k, v = plain["q"][rows], plain["k"][keys], plain["v"][keys]
        out, lse = tileattn.dot_product_attention(q, k, v, return_lse=True, **alone)
        if call.out is None and not oracle.same_bits(
            (out, lse), (kept[0][rows], kept[1][rows]), nan_equal=True
        ):
            call.fault(f"sequence {b} has other bits than alone")


def merge(draw, isa):
    """merge_states."""
    dtype, contents = np.dtype(draw.pick(*STORED)), draw.contents()
    shape = tuple(draw.pick(0, 1, 2, 3, 5, 17) for _ in range(draw.integer(1, 6)))
    count = draw.pick(2, 2, 2, 3, 5)
    names = ["out_a", "lse_a", "out_b", "lse_b"]
    names += [f"more[{i}]" for i in range(2 * count - 4)]
    plain = {}
    for i in range(0, 2 * count, 2):
        plain[names[i]] = draw.array(shape, dtype, contents)
        with np.errstate(all="ignore"):
            lse = draw.array(shape[:-1], oracle.arithmetic(dtype), contents)
            lse *= lse.dtype.type(5)
        lse[draw.numpy.random(lse.shape) < draw.pick(0, 0.3, 1.0)] = -np.inf
        plain[names[i + 1]] = lse
    given = forms(draw, plain)
    given["num_threads"] = threads(draw)

    def invoke(values, function=tileattn.merge_states):
        num_threads = values.pop("num_threads")
        return function(*values.values(), num_threads=num_threads)

    call = Call(tileattn.merge_states, given, names=("more",), invoke=invoke)
    result = call()
    call.twice(draw, result)
    expected = call.agrees(lambda **values: invoke(values, reference.merge_states), result)
    if expected is None:
        return
    arrays = [np.asarray(g.plain) for name, g in given.items() if name != "num_threads"]
    parts = list(zip(arrays[0::2], arrays[1::2], strict=True))
    if contents == "normal" and any((~(lse < np.inf)).any() for _, lse in parts):
        contents = "sprinkled"
    if contents == "normal":
        checked(oracle.check_merge, call, result, parts)
    elif contents == "sprinkled":
        same_pattern(call, result[0], expected[0], "out")
        same_pattern(call, result[1], expected[1], "lse")


# ------------------------------------------------------------------ rope and norms


def scaling(draw):
    """A RopeScaling, of right or odd parameters, or None."""
    kind = draw.pick(None, "linear", "ntk", "yarn", "llama3")
    if kind is None:
        return None
    factor = draw.pick(1, 2.0, 8, draw.real(1, 100), 1e300)
    plain = {"factor": factor}
    if kind == "yarn":
        plain["original_max_position"] = draw.pick(1, 100, 8192, 2**53)
        if draw.chance(0.5):
            plain |= {
                "beta_fast": draw.pick(32.0, 1e-3, 1e9),
                "beta_slow": draw.pick(1.0, 1e-4, 31.0),
            }
        if draw.chance(0.3):
            plain["attention_factor"] = draw.pick(1.0, 0.5, 1e-320, 1e300)
        if draw.chance(0.3):
            plain["truncate"] = draw.chance(0.5)
    elif kind == "llama3":
        plain |= {"low_freq_factor": draw.pick(1.0, 0.01, 1e-300)}
        plain |= {"high_freq_factor": draw.pick(4.0, 1.001, 1e300)}
        plain |= {"original_max_position": draw.pick(1, 8192, 2**53)}
    given = {
        n: draw.form(v) if draw.chance(0.1) else Given(v, v, Meaning.OPEN) for n, v in plain.items()
    }
    function = getattr(tileattn.RopeScaling, kind)
    made = Call(function, given)()
    if made is not None:
        require(repr(made).startswith(f"RopeScaling.{kind}("), repr(made))
    return made


def rope(draw, isa):
    """apply_rope, Rope, RopeScaling."""
    B, T, N, H = draw.pick(0, 1, 2, 3), draw.size(), draw.pick(0, 1, 2, 5), 2 * draw.size()
    dtype, contents = np.dtype(draw.pick(*FLOATS)), draw.contents()
    has_batch = draw.chance(0.7)
    shape = (B, T, N, H) if has_batch else (T, N, H)
    far_away = draw.pick(10, 1000, 2**20, 2**53)
    positions = draw.numpy.integers(0, far_away + 1, shape[:-2] if draw.chance(0.5) else (T,))
    plain = {"x": draw.array(shape, dtype, contents), "positions": positions}
    if draw.chance(0.4):
        plain["theta"] = draw.pick(500000.0, 1.0000001, 1e300, 2.0)
    if draw.chance(0.4) and H >= 2:
        plain["rotary_dim"] = 2 * draw.integer(1, H // 2)
    if draw.chance(0.4):
        plain["interleaved"] = draw.chance(0.7)
    given = forms(draw, plain)
    if draw.chance(0.6):
        made = scaling(draw)
        given["scaling"] = Given(made, made)
    given["num_threads"] = threads(draw)
    given["out"] = output(draw, shape, dtype, [g.value for g in given.values()])
    x = given["x"].value
    out = given["out"].value
    if draw.chance(0.1) and type(x) is np.ndarray and x.flags.writeable:
        out = x
        given["out"] = Given(x, None, Meaning.OPEN)
    in_place = type(x) is type(out) is np.ndarray and np.may_share_memory(x, out)
    before = x.copy() if in_place else None
    call = Call(tileattn.apply_rope, given, names=("T", "H"))
    if in_place:
        try:
            kept = tileattn.apply_rope(**call.values).copy()
        except (TypeError, ValueError, HostileError):
            return
        if not call.is_hostile:
            expected = reference.apply_rope(**{**call.values, "x": before, "out": None})
            judge_rope(call, kept, before, expected, contents)
        return
    result = call()
    fresh = call.fresh_out()
    kept = None if result is None else np.array(result)
    call.twice(draw, result, **fresh)
    expected = call.agrees(reference.apply_rope, kept, **fresh)
    if expected is not None:
        judge_rope(call, kept, np.asarray(call.plain["x"]), expected, contents)


def judge_rope(call, got, x, expected, contents):
    if contents != "normal" or not np.isfinite(np.asarray(expected, np.float64)).all():
        return
    plain = {n: v for n, v in call.plain.items() if v is not None}
    options = {n: plain[n] for n in ("theta", "rotary_dim", "interleaved", "scaling") if n in plain}
    rope = tileattn.Rope(**options)
    angle = np.asarray(plain["positions"])[..., None, None] * rope.frequencies(x.shape[-1])
    factor = 1.0 if rope.scaling is None else rope.scaling.attention_factor
    off = float(np.finfo(np.float64).eps)  # of cos and sin in float64
    checked(oracle.check_rotation, call, got, np.asarray(x, got.dtype), factor * np.cos(angle),
            factor * np.sin(angle), rope.interleaved, off)  # fmt: skip


def norm(draw, isa):
    """LayerNorm and RMSNorm."""
    shape = *(draw.pick(0, 1, 2, 3, 5) for _ in range(draw.integer(0, 4))), draw.size(0.4)
    dtype, contents = np.dtype(draw.pick(*FLOATS)), draw.contents()
    is_layer = draw.chance(0.5)
    D = shape[-1]
    parameters = {}
    if draw.chance(0.6):
        parameters["weight"] = draw.array((D,), dtype)
    if is_layer and draw.chance(0.6):
        parameters["bias"] = draw.array((D,), dtype)
    if draw.chance(0.5):
        parameters["eps"] = draw.pick(0.0, 1e-12, 1e-5, 1.0, 1e300)
    made_of = forms(draw, parameters)
    kind = tileattn.LayerNorm if is_layer else tileattn.RMSNorm
    made = Call(kind, made_of)
    layer = made()
    if layer is None:
        return
    repr(layer)
    plain = {"x": draw.array(shape, dtype, contents)}
    if draw.chance(0.5):
        plain["residual"] = draw.array(shape, dtype, contents)
    given = forms(draw, plain)
    given["num_threads"] = threads(draw)
    given["out"] = output(draw, shape, dtype, [g.value for g in given.values()])
    if made.meanings - {Meaning.SAME}:
        given = {n: Given(g.value, g.plain, max(g.meaning, Meaning.OPEN, key=list(Meaning).index))
                 for n, g in given.items()}  # fmt: skip
    names = ("D", "weight", "bias")
    call = Call(kind.__call__, given, names=names, invoke=lambda values: layer(**values))
    result = call()
    fresh = call.fresh_out()
    kept = None if result is None else np.array(result)
    call.twice(draw, result, **fresh)
    if made.is_hostile:
        return
    function = reference.layer_norm if is_layer else reference.rms_norm
    expected = call.agrees(lambda **values: function(**made.values, **values), kept, **fresh)
    if expected is None or contents != "normal" or layer.eps > 1e30 or not np.size(expected):
        return
    if D and np.isfinite(np.asarray(expected, np.float64)).all():
        # In the type of the result: a norm has one of its own, where only x has one.
        x, residual = (
            None if (a := call.plain.get(n)) is None else np.asarray(a, kept.dtype)
            for n in ("x", "residual")
        )
        bias = layer.bias if is_layer else None
        checked(oracle.check_norm, call, kept, x, residual, layer.weight, bias, layer.eps, is_layer)


# ------------------------------------------------------------------ numbers


def cost(draw, isa):
    """attention_block_cost and visible."""
    big = draw.chance(0.3)
    K, G = draw.pick(1, 2, 3), draw.pick(0, 1, 2, 5)
    plain = {
        n: draw.pick(0, 1, 7, 10**9, 10**30) if big else draw.pick(0, 1, 2, 7, 20) for n in "BTDH"
    }
    plain |= {"N": K * G, "K": K}
    for n in ("S", "Hv", "Dc", "itemsize"):
        if draw.chance(0.5):
            plain[n] = draw.pick(0, 1, 3, 20)
    T, S = plain["T"], plain.get("S", plain["T"])
    if draw.chance(0.6):
        plain["is_causal"] = draw.chance(0.7)
    if draw.chance(0.3):
        plain["local_window_size"] = draw.pick(0, 3, (2, None), (None, 4), 10**30)
    has_positions = plain.get("is_causal") or "local_window_size" in plain
    if (has_positions and T != S) or draw.chance(0.3):
        plain["query_offset"] = draw.pick(0, draw.integer(-30, 30), 2**60, -(2**60))
    B = plain["B"]
    if B <= 20:
        for n, limit in (("query_seq_lengths", T), ("key_value_seq_lengths", S)):
            if draw.chance(0.3) and limit < 2**40:
                plain[n] = draw.lengths(B, limit)
    given = forms(draw, plain)
    call = Call(tileattn.cost.attention_block_cost, given, names="BTSDNKH")
    result = call()
    if result is None or call.is_hostile:
        return
    text = str(result)
    require("visible pairs" in text and len(text.splitlines()) == 15, text)
    if not big and not call.meanings - {Meaning.SAME}:
        visible = reference.visible(
            B,
            T,
            S,
            is_causal=plain.get("is_causal", False),
            query_offset=plain.get("query_offset"),
            query_lengths=plain.get("query_seq_lengths"),
            key_value_lengths=plain.get("key_value_seq_lengths"),
            local_window_size=plain.get("local_window_size"),
        )
        if result.visible_pairs != visible.sum():
            call.fault(f"counts {result.visible_pairs} visible pairs instead of {visible.sum()}")


def settings(draw, isa):
    """Threads and instruction sets."""
    before = tileattn.get_num_threads()
    given = {"num_threads": draw.form(draw.pick(1, 2, 3, 1024, 1025, 0, -1, 10**30))}
    if isinstance(given["num_threads"].plain, int) and not 1 <= given["num_threads"].plain <= 1024:
        given["num_threads"] = Given(given["num_threads"].value, None, Meaning.OPEN)

    def enter(values):
        with tileattn.threads(**values):
            require(1 <= tileattn.get_num_threads() <= 1024, "no number of threads")
        return True

    Call(tileattn.threads, given, invoke=enter)()
    require(tileattn.get_num_threads() == before, "threads() does not leave what it found")
    inner = draw.integer(1, 9)
    with tileattn.threads(inner):
        set_it = Call(tileattn.set_num_threads, given)
        set_it()
        require(tileattn.get_num_threads() == inner, "the process's setting reaches into a with")
    if set_it.error is not None:
        require(tileattn.get_num_threads() == before, "changed in spite of an error")
    tileattn.set_num_threads(before)
    name = draw.wrong("avx2").value
    try:
        tileattn._core.select_isa(name)
    except (TypeError, ValueError):
        require(tileattn.isa() == isa, "another instruction set in spite of an error")
    number = draw.pick(0, 999, 1000, 999_949, 10**18, 10**30, 10**400, draw.integer(0, 10**20))
    require(math.isfinite(len(tileattn.cost.format_count(number))), "no text")
    tileattn.cost.format_bytes(number)
