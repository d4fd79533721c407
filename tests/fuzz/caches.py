"""Cases of a KVCache: sequences of calls of all its methods, beside a model in plain lists."""

import copy
import pickle

import numpy as np

from tests import oracle
from tests.dots import DOT_ISAS
from tests.fuzz.draw import STORED, Given, Meaning
from tests.fuzz.judge import Call, output, require
from tests.fuzz.operations import checked, forms, normal, score_options, threads
from tileattn import KVCache

TYPES = (*STORED, np.int8)


class Model:
    """What a cache should hold: for each sequence a list of positions, each a key and a value."""

    def __init__(self, cache):
        self.cache = cache
        self.window, self.capacity = cache.window, cache.capacity
        self.sequences = [[] for _ in range(cache.batch)]
        self.longest = [0] * cache.batch  # of a ring's sequences since they were empty

    def first_seen(self, position):
        return max(0, position + 1 - (self.window or self.capacity))

    def has_from(self, b, first):
        return self.window is None or first >= self.longest[b] - self.capacity

    def fits(self, counts):
        for b, (sequence, count) in enumerate(zip(self.sequences, counts, strict=True)):
            longest = max(self.longest[b], len(sequence) + count)
            if self.window is None:
                if len(sequence) + count > self.capacity:
                    return False
            elif count and self.first_seen(len(sequence)) < longest - self.capacity:
                return False
        return True

    def append(self, k, v, counts):
        dtype = self.cache.dtype
        with np.errstate(all="ignore"):
            k, v = (oracle.stored(np.asarray(x), dtype) for x in (k, v))
        for b, count in enumerate(counts):
            self.sequences[b] += [(k[b, t], v[b, t]) for t in range(count)]
            self.longest[b] = max(self.longest[b], len(self.sequences[b]))

    def agree(self, call):
        """What the cache holds is what the model does, bit for bit."""
        lengths = [len(sequence) for sequence in self.sequences]
        if list(self.cache.lengths) != lengths:
            call.fault(f"the lengths are {self.cache.lengths}, not {lengths}")
        keys, values = oracle.contents(self.cache)
        for b, sequence in enumerate(self.sequences):
            first = 0 if self.window is None else self.first_seen(len(sequence))
            for j in range(first, len(sequence)):
                for kept, row in ((keys, sequence[j][0]), (values, sequence[j][1])):
                    got = np.asarray(kept[b, j % kept.shape[1]], row.dtype)
                    if not np.array_equal(got, row, equal_nan=True):
                        call.fault(f"position {j} of sequence {b} is not what was appended")


def make(draw, **fixed):
    """A cache of drawn sizes, which may be refused, and its model; or None."""
    window = draw.pick(None, None, 1, 3, 16, 40)
    plain = {
        "batch": draw.pick(1, 1, 2, 3),
        "capacity": draw.pick(1, 8, 40, 300)
        if window is None
        else window + draw.pick(0, 1, 7, 260),
        "num_kv_heads": draw.pick(1, 1, 2, 3),
        "head_dim": draw.pick(1, 3, 8, 16, 31, 64),
        "dtype": draw.pick(*TYPES),
        **fixed,
    }
    if draw.chance(0.4):
        plain["v_head_dim"] = draw.pick(1, 5, 16, 33)
    if window is not None:
        plain["window"] = window
    plain |= fixed
    given = {name: Given(value, value) for name, value in plain.items()}
    if draw.chance(0.15):
        name = draw.pick(*(n for n in plain if n not in fixed))
        given[name] = draw.form(plain[name])
    call = Call(KVCache, given)
    cache = call()
    if cache is None or call.is_hostile or cache.nbytes > 1 << 26:
        return None, None
    oracle.poison(cache)
    return cache, Model(cache)


def cache(draw, isa):
    """KVCache: every method, in any order."""
    cache, model = make(draw)
    if cache is None:
        return
    steps = (_append, _append, _append, _attend, _attend, _truncate, _reorder, _look, _reset, _own)
    for _ in range(draw.integer(1, 12)):
        draw.pick(*steps)(draw, isa, cache, model)


def _input_type(draw, cache):
    """A dtype that the cache takes."""
    if cache.dtype == np.int8:
        return draw.pick(np.float32, *oracle.HALVES)
    return draw.pick(cache.dtype, oracle.arithmetic(cache.dtype))


def _append(draw, isa, cache, model):
    B, T = cache.batch, draw.pick(0, 1, 1, 2, 5, 30, 200)
    contents = draw.contents()
    plain = {
        "k": draw.array(
            (B, T, cache.num_kv_heads, cache.head_dim), _input_type(draw, cache), contents
        ),
        "v": draw.array(
            (B, T, cache.num_kv_heads, cache.v_head_dim), _input_type(draw, cache), contents
        ),
    }
    counts = [T] * B
    if draw.chance(0.5):
        plain["seq_lengths"] = draw.lengths(B, T)
        counts = plain["seq_lengths"]
    given = forms(draw, plain) | {"num_threads": threads(draw)}
    fits = model.fits(counts)
    if not fits:
        given = {n: g._replace(meaning=Meaning.OPEN) if g.meaning is Meaning.SAME else g
                 for n, g in given.items()}  # fmt: skip
    call = Call(KVCache.append, given, caches=[cache], invoke=lambda values: cache.append(**values))
    before = cache.lengths
    if _did(call, cache, model):
        plain = call.plain
        if plain.get("seq_lengths") is None:
            counts = [np.shape(plain["k"])[1]] * B
        else:
            counts = [int(n) for n in np.asarray(plain["seq_lengths"])]
        require(model.fits(counts), f"{call} fits? it has {before}")
        model.append(plain["k"], plain["v"], counts)
    model.agree(call)


def _did(call, cache, model):
    """Whether a call has done what the model is to do; after a hostile one both start again."""
    call()
    if call.is_hostile:
        _start_again(cache, model)
    return call.error is None and not call.is_hostile


def _start_again(cache, model):
    cache.reset()
    require(not cache.lengths.any(), "reset leaves something")
    model.sequences = [[] for _ in model.sequences]
    model.longest = [0] * len(model.longest)


def _attend(draw, isa, cache, model):
    B, K = cache.batch, cache.num_kv_heads
    N, T = K * draw.pick(1, 1, 2, 5), draw.pick(0, 1, 1, 2, 5, 17, 40)
    dtype = np.dtype(_input_type(draw, cache))
    S = int(cache.lengths.max())
    names = ("scale", "softcap", "local_window_size", "alibi_slopes", "sinks")
    options = score_options(draw, B, T, S, N, "normal", dtype, names)
    options.pop("query_offset", None)
    for name in ("query_seq_lengths", "key_value_seq_lengths"):
        options.pop(name, None)
    if draw.chance(0.4):
        options["is_causal"] = draw.chance(0.5)
    counts = [T] * B
    if draw.chance(0.7):
        counts = []
        for b, sequence in enumerate(model.sequences):
            count = min(T, len(sequence))
            while count and not model.has_from(b, model.first_seen(len(sequence) - count)):
                count -= 1
            counts.append(count)
        options["query_seq_lengths"] = np.array(counts)
    q = draw.array((B, T, N, cache.head_dim), dtype)
    given = forms(draw, {"q": q, **options})
    if draw.chance(0.2):
        given["arithmetic"] = Given("float32", "float32")
    given["return_lse"] = Given(True, True)
    given["num_threads"] = threads(draw)
    shape = (B, T, N, cache.v_head_dim)
    given["out"] = output(draw, shape, dtype, [given["q"].value])
    window = options.get("local_window_size")
    asks = options.get("is_causal", True) or "alibi_slopes" in options or cache.window is not None
    asks = asks or window not in (None, (None, None), 10**30)
    stands = all(
        len(sequence) >= n and model.has_from(b, model.first_seen(len(sequence) - n))
        for b, (sequence, n) in enumerate(zip(model.sequences, counts, strict=True))
    )
    if asks and not stands:
        given["q"] = given["q"]._replace(meaning=max(
            given["q"].meaning, Meaning.OPEN, key=list(Meaning).index))  # fmt: skip
    call = Call(KVCache.attend, given, caches=[cache], invoke=lambda values: cache.attend(**values))
    result = call()
    if not call.is_hostile:
        fresh = call.fresh_out()
        kept = None if result is None else tuple(map(np.array, result))
        call.twice(draw, result, **fresh)
        model.agree(call)
        if kept is not None:
            _judge_attention(call, model, kept, isa)


def _judge_attention(call, model, got, isa):
    plain = {n: v for n, v in call.plain.items() if v is not None}
    q = np.asarray(plain.pop("q"))
    if q.ndim != 4 or not np.isfinite(q.astype(np.float64)).all():
        return
    arithmetic = plain.pop("arithmetic", None)
    is_dots = isa in DOT_ISAS and arithmetic is None and q.dtype == model.cache.dtype
    is_dots = is_dots and q.dtype.name == "bfloat16"
    counts = plain.pop("query_seq_lengths", None)
    options = normal({n: v for n, v in plain.items() if n not in ("num_threads", "return_lse")})
    options.setdefault("is_causal", True)
    left, right = options.pop("local_window_size", (None, None))
    if model.window is not None:
        left = model.window - 1 if left is None else min(left, model.window - 1)
    for b, sequence in enumerate(model.sequences):
        n = q.shape[1] if counts is None else int(np.asarray(counts)[b])
        first = 0 if model.window is None else max(0, len(sequence) - model.capacity)
        if not sequence[first:] or n == 0:
            continue
        k, v = (np.array([row[i] for row in sequence[first:]])[None] for i in (0, 1))
        sizes = np.concatenate([abs(a[a != 0]) for a in (k, v)])
        if is_dots and sizes.size and sizes.min() < 1e-30:
            continue  # denormal numbers count as zeros there
        if not (
            np.isfinite(k).all() and np.isfinite(v).all() and max(abs(k).max(), abs(v).max()) < 1e4
        ):
            continue
        one = dict(options)
        if np.ndim(one.get("alibi_slopes")) == 2:
            one["alibi_slopes"] = one["alibi_slopes"][b : b + 1]
        parts = tuple(a[b : b + 1, :n] for a in got)
        checked(oracle.check_attention, call, parts, q[b : b + 1, :n], k, v, is_dots=is_dots,
                query_offset=len(sequence) - n - first, local_window_size=(left, right),
                **one)  # fmt: skip


def _truncate(draw, isa, cache, model):
    left = np.array([draw.integer(0, len(s)) for s in model.sequences])
    if draw.chance(0.2):
        left[draw.integer(0, len(left) - 1)] += draw.pick(-1, 1, 1000)
    if draw.chance(0.2):
        left = int(left.min())
    fits = all(
        n == len(s) or n == 0 or (0 < n < len(s) and model.has_from(b, model.first_seen(n)))
        for b, (n, s) in enumerate(
            zip(np.broadcast_to(left, cache.batch), model.sequences, strict=True)
        )
    )
    given = forms(draw, {"lengths": left})
    if not fits:
        given = {n: g._replace(meaning=Meaning.WRONG) if g.meaning is Meaning.SAME else g
                 for n, g in given.items()}  # fmt: skip
    call = Call(
        KVCache.truncate, given, caches=[cache], invoke=lambda values: cache.truncate(**values)
    )
    if _did(call, cache, model):
        for b, n in enumerate(np.broadcast_to(np.asarray(call.plain["lengths"]), cache.batch)):
            del model.sequences[b][n:]
            if n == 0:
                model.longest[b] = 0
    model.agree(call)


def _reorder(draw, isa, cache, model):
    index = np.array([draw.integer(0, cache.batch - 1) for _ in model.sequences])
    given = forms(draw, {"index": index})
    call = Call(
        KVCache.reorder, given, caches=[cache], invoke=lambda values: cache.reorder(**values)
    )
    if _did(call, cache, model):
        index = [int(a) for a in np.asarray(call.plain["index"])]
        model.sequences = [list(model.sequences[a]) for a in index]
        model.longest = [model.longest[a] for a in index]
    model.agree(call)


def _reset(draw, isa, cache, model):
    _start_again(cache, model)


def _look(draw, isa, cache, model):
    """What it shows cannot be written to, and changes nothing."""
    repr(cache)
    require(cache.nbytes > 0, "no bytes")
    cache.lengths[:] = 99
    for view in (cache.keys, cache.values, cache.key_scales, cache.value_scales):
        require(view is None or not view.flags.writeable, "a view can be written to")
    for copied in (copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        try:
            other = copied(cache)
        except TypeError:
            continue
        if (
            cache.window is None
            and (cache.lengths < cache.capacity).all()
            and cache.dtype != np.int8
        ):
            shape = (cache.batch, 1, cache.num_kv_heads)
            k, v = np.ones((*shape, cache.head_dim)), np.ones((*shape, cache.v_head_dim))
            before = cache.lengths
            other.append(k.astype(cache.dtype), v.astype(cache.dtype))
            require((cache.lengths == before).all(), "a copy shares the lengths")


def _own(draw, isa, cache, model):
    """Append what lies in the cache's own memory."""
    if cache.dtype == np.int8 or cache.head_dim != cache.v_head_dim:
        return
    slots = cache.keys.shape[1]
    T = draw.integer(0, min(8, slots))
    first = draw.integer(0, slots - T)
    part = (slice(None), slice(first, first + T))
    k, v = draw.pick(
        (cache.keys, cache.values), (cache.values, cache.keys), (cache.keys, cache.keys)
    )
    k, v = k[part], v[part]
    if draw.chance(0.3):
        k = k[:, ::-1]
    before = k.copy(), v.copy()
    fits = model.fits([T] * cache.batch)
    meaning = Meaning.OPEN
    given = {"k": Given(k, before[0], meaning), "v": Given(v, before[1], meaning)}
    given["num_threads"] = threads(draw)
    call = Call(KVCache.append, given, caches=[cache], may_change=True,
                invoke=lambda values: cache.append(**values))  # fmt: skip
    if _did(call, cache, model):
        require(fits, "does not fit")
        model.append(*before, [T] * cache.batch)
    model.agree(call)
