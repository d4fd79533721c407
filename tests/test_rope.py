"""apply_rope, Rope and RopeScaling: every promise of their documentation."""

import copy
import math
import pickle
import threading
from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.oracle import LAYOUTS, WRITABLE, check_rotation, random, same_bits
from tileattn import Rope, RopeScaling, apply_rope, reference

DTYPES = [np.float32, np.float64]
DTYPE = st.sampled_from(DTYPES)
EPS64 = float(np.finfo(np.float64).eps)
PI = Decimal(
    "3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803"
)

layouts = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
any_isa = pytest.mark.any_isa

SCALINGS = {
    "none": None,
    "linear": RopeScaling.linear(4),
    "ntk": RopeScaling.ntk(4),
    "yarn": RopeScaling.yarn(4, 4096),
    "llama3": RopeScaling.llama3(8, 1, 4, 8192),
}


def exact_turns(positions, pairs, theta):
    """cos and sin [..., pairs] of angles that are exact far beyond float64."""
    positions = np.asarray(positions)
    cos, sin = np.empty((2, *positions.shape, pairs))
    with localcontext() as context:
        context.prec = 80
        frequencies = [Decimal(theta) ** (Decimal(-i) / pairs) for i in range(pairs)]
        for at in np.ndindex(positions.shape):
            for i, frequency in enumerate(frequencies):
                angle = float(int(positions[at]) * frequency % (2 * PI))
                cos[(*at, i)], sin[(*at, i)] = math.cos(angle), math.sin(angle)
    return cos, sin


def angle_error(positions, pairs, theta):
    """How far float64 angles may be off, and cos and sin be rounded in float64.

    The exponent of theta is rounded, which costs a frequency up to log(theta) half-units; the power
    is off by less than two, and the product with the position is rounded.
    """
    frequencies = theta ** (-np.arange(pairs) / pairs)
    angles = np.asarray(positions, float)[..., None] * frequencies
    return EPS64 + EPS64 / 2 * (math.log(theta) + 3) * angles


# ------------------------------------------------------------------ rotations

POSITIONS = [0, 1, 2, 77, 4095, 131071, 2**24 + 1, 2**31 - 1, 2**31 + 11, 2**40 + 1]


@any_isa
def test_parameters_at_the_ends_of_float64_overflow_nowhere():
    slowest = RopeScaling.ntk(1e300).frequencies(1e300, 66)
    assert slowest[0] == 1
    np.testing.assert_allclose(slowest[1:3], 1e300 ** -(np.array([2, 4]) * (1 / 66 + 1 / 64)))
    plain = Rope().frequencies(64)
    for slow, fast in ((1e-320, 1e-310), (1e300, 1e305), (1e-320, 1e305)):
        got = RopeScaling.yarn(4, 4096, beta_slow=slow, beta_fast=fast).frequencies(10000.0, 64)
        assert ((plain / 4 * (1 - 1e-12) <= got) & (got <= plain)).all()
    x = np.ones((1, 1, 4), np.float32)
    scaling = RopeScaling.yarn(4, 4096, attention_factor=1e300)
    assert np.isinf(apply_rope(x, [0], scaling=scaling)[0, 0, :2]).all()


@layouts
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("H, rotary_dim", [(2, None), (64, None), (80, 32), (7, 4), (66, 66)])
def test_rotations_are_exact_at_any_position(dtype, interleaved, H, rotary_dim):
    for theta in (10000.0, 500000.0):
        x = random(H, len(POSITIONS), 3, H, dtype=dtype)
        got = apply_rope(x, POSITIONS, theta=theta, rotary_dim=rotary_dim, interleaved=interleaved)
        pairs = (rotary_dim or H) // 2
        cos, sin = (turn[:, None] for turn in exact_turns(POSITIONS, pairs, theta))
        off = angle_error(POSITIONS, pairs, theta)[:, None]
        check_rotation(got, x, cos, sin, interleaved, off)
        assert same_bits(got[..., 2 * pairs :], x[..., 2 * pairs :])


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@layouts
def test_rotations_equal_the_reference(interleaved, scaling):
    options = {"theta": 5e5, "rotary_dim": 40, "interleaved": interleaved, "scaling": scaling}
    positions = np.random.default_rng(0).integers(0, 10**6, (2, 9))
    for dtype in DTYPES:
        x = random(1, 2, 9, 3, 50, dtype=dtype)
        for at in (positions, positions[0]):
            got, expected = (f(x, at, **options) for f in (apply_rope, reference.apply_rope))
            # The reference is rounded once, so at most as far off as a rotation may be, 1.5 eps.
            size = np.abs(x).max() * np.sqrt(2) * (scaling.attention_factor if scaling else 1)
            np.testing.assert_allclose(got, expected, rtol=0, atol=2 * np.finfo(dtype).eps * size)


@layouts
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_scores_depend_on_the_difference_of_positions(interleaved, scaling):
    rope = Rope(interleaved=interleaved, scaling=scaling, rotary_dim=48)
    q, k = random(0, 1, 1, 64, dtype=np.float64), random(1, 1, 1, 64, dtype=np.float64)
    for difference in (0, 1, 1000):
        scores = [
            np.vdot(rope(q, [start + difference]), rope(k, [start])) for start in (0, 5, 30000)
        ]
        # Angles of up to 31000 radians, each off by 6.2 units of rounding (see angle_error), turn q
        # and k, whose lengths YaRN stretches by less than a fifth.
        tolerance = 31000 * 6.2 * EPS64 * 2 * 1.2**2 * np.linalg.norm(q) * np.linalg.norm(k)
        np.testing.assert_allclose(scores, scores[0], rtol=0, atol=tolerance)
    factor = 1 if scaling is None else scaling.attention_factor
    rotated = rope(q, [123])[..., :48]
    np.testing.assert_allclose(
        np.linalg.norm(rotated), factor * np.linalg.norm(q[..., :48]), rtol=1e-14
    )


def test_position_0_is_the_identity():
    x = random(0, 2, 3, 4, 10)
    assert same_bits(apply_rope(x, np.zeros(3, int)), x)


def test_interleaved_is_the_same_rotation_of_other_columns():
    x = random(0, 5, 3, 20)
    order = np.arange(20).reshape(2, 10).T.ravel()  # 0, 10, 1, 11, ...
    got = apply_rope(x[..., order], range(5), interleaved=True)
    np.testing.assert_allclose(got, apply_rope(x, range(5))[..., order], rtol=0, atol=1e-6)


# ------------------------------------------------------------------ arrays


def test_positions_of_each_sequence():
    x, positions = random(0, 3, 4, 2, 16), np.arange(12).reshape(3, 4)[:, ::-1]
    got = apply_rope(x, positions)
    for b in range(3):
        assert same_bits(got[b], apply_rope(x[b], positions[b]))
        assert same_bits(got[b], apply_rope(x, positions[b])[b])
    assert same_bits(apply_rope(x[:1], positions[:1])[0], got[0])


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int32, np.uint64, ">i4"])
def test_positions_of_any_integer_type(kind):
    x, positions = random(0, 5, 2, 8), np.array([3, 0, 100, 5, 3])
    assert same_bits(apply_rope(x, positions.astype(kind)), apply_rope(x, positions))
    assert same_bits(apply_rope(x, positions.tolist()), apply_rope(x, positions))


@layouts
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_out_and_in_place(dtype, interleaved):
    rope = Rope(rotary_dim=12, interleaved=interleaved)
    x, positions = random(0, 2, 5, 3, 18, dtype=dtype), [4, 0, 9, 1, 1]
    expected = rope(x, positions)
    for name, change in LAYOUTS.items():
        assert same_bits(rope(change(x), positions), expected), name
        # Without B, whose axis is then not the first of memory either.
        assert same_bits(rope(change(x)[1], positions), expected[1]), name
    for name in WRITABLE:
        view = LAYOUTS[name](np.full(x.shape, np.nan, dtype))
        assert rope(x, positions, out=view) is view
        assert same_bits(view.copy(order="C"), expected), name
        view = LAYOUTS[name](x)
        assert rope(view, positions, out=view) is view
        assert same_bits(view.copy(order="C"), expected), f"{name}, in place"


@pytest.mark.parametrize(
    "shape", [(0, 5, 2, 8), (2, 0, 2, 8), (2, 5, 0, 8), (2, 5, 2, 0), (0, 2, 8)]
)
def test_nothing_to_rotate(shape):
    for function in (apply_rope, reference.apply_rope):
        x = np.empty(shape, np.float32)
        assert function(x, np.arange(shape[-3])).shape == shape
        assert function(x, np.arange(shape[-3]), out=x) is x


def test_bits_do_not_depend_on_threads_or_company():
    # More than the arithmetic below which one thread does all.
    x = random(0, 3, 257, 8, 66)
    positions = np.random.default_rng(0).integers(0, 10**5, (3, 257))
    rope = Rope()
    whole = rope(x, positions, num_threads=1)
    for threads in (2, 3, 5):
        assert same_bits(rope(x, positions, num_threads=threads), whole)
    for b, t in ((0, 0), (2, 256), (1, 130)):
        assert same_bits(rope(x[b, t : t + 1], positions[b, t : t + 1]), whole[b, t : t + 1])
        assert same_bits(rope(x[b, t : t + 1, 3:4], [positions[b, t]]), whole[b, t : t + 1, 3:4])


@st.composite
def calls(draw):
    B, T, N = (draw(st.integers(0, n)) for n in (3, 9, 4))
    rotary_dim, rest = 2 * draw(st.integers(1, 35)), draw(st.integers(0, 20))
    x = random(draw(st.integers(0, 9)), B, T, N, rotary_dim + rest, dtype=draw(DTYPE))
    shape = (B, T) if draw(st.booleans()) else (T,)
    positions = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 2**32, shape)
    if B and draw(st.booleans()):
        x, positions = x[0], positions[0] if positions.ndim == 2 else positions
    options = {
        "rotary_dim": None if rest == 0 and draw(st.booleans()) else rotary_dim,
        "interleaved": draw(st.booleans()),
        "theta": draw(st.sampled_from([100.0, 1e6])),
    }
    return LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](x), positions, options


@given(calls(), st.integers(1, 3))
def test_random_calls(call, num_threads):
    x, positions, options = call
    got = apply_rope(x, positions, num_threads=num_threads, **options)
    expected = reference.apply_rope(x, positions, **options)
    eps = np.finfo(got.dtype).eps
    size = np.abs(x).max(initial=0) * np.sqrt(2)
    np.testing.assert_allclose(got, expected, rtol=0, atol=2 * eps * size)
    assert got.dtype == expected.dtype


# ------------------------------------------------------------------ frequencies


def plain_frequency(theta, i, R):
    return theta ** (-2 * i / R)


@any_isa
@pytest.mark.parametrize("R", [2, 4, 64, 128])
def test_frequencies_without_scaling_and_linear(R):
    for theta in (10000.0, 1e6):
        exact = [plain_frequency(theta, i, R) for i in range(R // 2)]
        np.testing.assert_allclose(Rope(theta=theta).frequencies(R), exact, rtol=1e-14)
        rope = Rope(theta=theta, scaling=RopeScaling.linear(2.5))
        np.testing.assert_allclose(rope.frequencies(R), np.divide(exact, 2.5), rtol=1e-14)
        rope = Rope(theta=theta, rotary_dim=R)
        np.testing.assert_allclose(rope.frequencies(200), exact, rtol=1e-14)


def test_linear_scaling_divides_positions():
    x, positions = random(0, 5, 2, 64), np.array([0, 3, 10, 1000, 99999])
    got = apply_rope(x, 4 * positions, scaling=RopeScaling.linear(4))
    assert same_bits(got, apply_rope(x, positions))


@any_isa
def test_ntk_keeps_the_fastest_and_divides_the_slowest():
    for R in (4, 64, 128):
        plain = Rope().frequencies(R)
        got = Rope(scaling=RopeScaling.ntk(8)).frequencies(R)
        exact = [plain_frequency(10000 * 8 ** (R / (R - 2)), i, R) for i in range(R // 2)]
        np.testing.assert_allclose(got, exact, rtol=1e-13)
        np.testing.assert_allclose([got[0], got[-1]], [1, plain[-1] / 8], rtol=1e-13)
    np.testing.assert_array_equal(Rope(scaling=RopeScaling.ntk(8)).frequencies(2), [1])


def yarn_by_formulas(theta, R, factor, length, fast, slow, whole):
    """Frequency by frequency: the dimension at which there are n turns, and a ramp between two."""

    def dimension(turns):
        return R * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(fast), dimension(slow)
    if whole:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, R - 1)
    frequencies = []
    for i in range(R // 2):
        extrapolation = plain_frequency(theta, i, R)
        interpolation = extrapolation / factor
        gamma = 1 - min(max((i - low) / (high - low), 0), 1)
        frequencies.append((1 - gamma) * interpolation + gamma * extrapolation)
    return frequencies


@any_isa
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    "theta, R, factor, length",
    [(1e6, 128, 4, 32768), (10000, 64, 40, 4096), (150000, 64, 32, 4096), (100, 16, 4, 3580)],
)
def test_yarn_frequencies(theta, R, factor, length, whole):
    for fast, slow in ((32, 1), (16, 2), (32, 0.01)):  # the last ramp may end beyond all pairs
        scaling = RopeScaling.yarn(factor, length, beta_fast=fast, beta_slow=slow, truncate=whole)
        got = Rope(theta=theta, scaling=scaling).frequencies(R)
        exact = yarn_by_formulas(theta, R, factor, length, fast, slow, whole)
        np.testing.assert_allclose(got, exact, rtol=1e-13)
        # More turns than beta_fast, and a dimension more for truncation: as they were.
        plain = Rope(theta=theta).frequencies(R)
        turns = length * plain / (2 * math.pi)
        step = theta ** (2 / R) if whole else 1
        np.testing.assert_allclose(got[turns > fast * step], plain[turns > fast * step])
        np.testing.assert_allclose(got[turns < slow / step], plain[turns < slow / step] / factor)


@any_isa
def test_yarn_scales_cos_and_sin():
    assert RopeScaling.yarn(1, 4096).attention_factor == 1
    assert RopeScaling.yarn(40, 4096).attention_factor == pytest.approx(0.1 * math.log(40) + 1)
    scaling = RopeScaling.yarn(4, 4096, attention_factor=1.5)
    x, positions = random(0, 3, 2, 64), [0, 5, 5000]
    plain = RopeScaling.yarn(4, 4096, attention_factor=1)
    np.testing.assert_allclose(
        apply_rope(x, positions, scaling=scaling),
        1.5 * apply_rope(x, positions, scaling=plain),
        rtol=0,
        atol=1e-6,
    )
    cos, sin = Rope(scaling=scaling)._tables(np.array([0]), 64, np.float32)
    assert (cos == 1.5).all()
    assert (sin == 0).all()


@any_isa
def test_yarn_of_a_length_that_no_pair_turns_often_in():
    """The ramp has no width: all but the first are interpolated."""
    got = Rope(scaling=RopeScaling.yarn(4, 4)).frequencies(64)
    np.testing.assert_allclose(got[1:], Rope().frequencies(64)[1:] / 4)


@any_isa
@pytest.mark.parametrize("factor, length", [(8, 8192), (32, 8192)])
def test_llama3_frequencies(factor, length):
    """Wavelength by wavelength, in three cases."""
    low, high = 1.0, 4.0
    rope = Rope(theta=5e5, scaling=RopeScaling.llama3(factor, low, high, length))
    cases = set()
    for i, got in enumerate(rope.frequencies(128)):
        plain = plain_frequency(5e5, i, 128)
        wavelength = 2 * math.pi / plain
        if wavelength < length / high:
            case, exact = "short", plain
        elif wavelength > length / low:
            case, exact = "long", plain / factor
        else:
            smooth = (length / wavelength - low) / (high - low)
            case, exact = "between", (1 - smooth) * plain / factor + smooth * plain
        assert got == pytest.approx(exact, rel=1e-13)
        cases.add(case)
    assert len(cases) == 3


# ------------------------------------------------------------------ configurations

any_rope = Rope(
    theta=500000.0, rotary_dim=32, interleaved=True, scaling=RopeScaling.llama3(8, 1, 4, 8192)
)


@any_isa
@pytest.mark.parametrize(
    "config, expected",
    [
        ({}, Rope()),
        ({"rope_theta": 1e6, "rope_scaling": None}, Rope(theta=1e6)),
        (
            {"rope_theta": 1e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            Rope(theta=1e5, scaling=RopeScaling.linear(2)),
        ),
        (
            {
                "rope_theta": 5e5,
                "head_dim": 128,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            Rope(theta=5e5, scaling=RopeScaling.llama3(8, 1, 4, 8192)),
        ),
        (
            {
                "max_position_embeddings": 32768,
                "rope_scaling": {"type": "yarn", "factor": 4.0},
            },
            Rope(scaling=RopeScaling.yarn(4, 32768)),
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 150000,
                    "factor": 32.0,
                    "beta_fast": 16,
                    "beta_slow": 2,
                    "truncate": False,
                    "original_max_position_embeddings": 4096,
                },
            },
            Rope(
                theta=150000,
                scaling=RopeScaling.yarn(32, 4096, beta_fast=16, beta_slow=2, truncate=False),
            ),
        ),
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 40,
                    "mscale": 0.707,
                    "mscale_all_dim": 1.0,
                    "original_max_position_embeddings": 4096,
                },
            },
            Rope(
                scaling=RopeScaling.yarn(
                    40,
                    4096,
                    attention_factor=(0.0707 * math.log(40) + 1) / (0.1 * math.log(40) + 1),
                )
            ),
        ),
        (
            {"partial_rotary_factor": 0.4, "hidden_size": 2560, "num_attention_heads": 32},
            Rope(rotary_dim=32),
        ),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e4}, "head_dim": 128},
            Rope(rotary_dim=64),
        ),
    ],
)
def test_configurations(config, expected):
    got = Rope.from_config(config)
    assert (got.theta, got.rotary_dim, got.interleaved, got.scaling) == (
        expected.theta, expected.rotary_dim, False, expected.scaling,
    )  # fmt: skip
    assert Rope.from_config(config, interleaved=True).interleaved


@any_isa
@pytest.mark.parametrize(
    "config, words",
    [
        ("config.json", "config must be a mapping.*'config.json'"),
        (None, "config must be a mapping.*None"),
        ({"rope_scaling": "linear"}, "config's rope_scaling must be a mapping.*'linear'"),
        ({"rope_parameters": [1]}, "config's rope_parameters must be a mapping"),
    ],
)
def test_what_is_no_configuration(config, words):
    with pytest.raises(TypeError, match=words):
        Rope.from_config(config)


# ------------------------------------------------------------------ the objects


@any_isa
def test_a_rope_and_a_scaling_do_not_change():
    for name in ("theta", "rotary_dim", "interleaved", "scaling"):
        with pytest.raises(AttributeError, match=f"^Rope.{name} does not change"):
            setattr(any_rope, name, None)
    for scaling in filter(None, SCALINGS.values()):
        for name in ("factor", "attention_factor"):
            with pytest.raises(AttributeError):
                setattr(scaling, name, 2.0)
    for table in any_rope._tables(np.arange(3), 64, np.float32):
        with pytest.raises(ValueError, match="read-only"):
            table[0] = 1


@any_isa
def test_representations():
    assert repr(Rope()) == "Rope(theta=10000.0)"
    assert eval(repr(any_rope), {"Rope": Rope, "RopeScaling": RopeScaling}).scaling == (
        any_rope.scaling
    )
    for scaling in filter(None, SCALINGS.values()):
        assert eval(repr(scaling), {"RopeScaling": RopeScaling}) == scaling
        assert hash(scaling) == hash(copy.copy(scaling))


@any_isa
def test_copies_and_pickles():
    x, positions = random(0, 5, 2, 40), [0, 1, 5, 7, 100]
    expected = any_rope(x, positions)
    for twin in (
        pickle.loads(pickle.dumps(any_rope)),
        copy.copy(any_rope),
        copy.deepcopy(any_rope),
    ):
        assert repr(twin) == repr(any_rope)
        assert twin.scaling == any_rope.scaling
        assert same_bits(twin(x, positions), expected)
    # The tables of the last call are no part of it.
    any_rope(random(0, 5000, 1, 64), np.arange(5000))
    assert len(pickle.dumps(any_rope)) < 1000


@any_isa
def test_tables_are_kept_for_the_same_positions_only():
    rope, positions = Rope(), np.arange(6)
    first = rope._tables(positions, 16, np.float32)
    assert rope._tables(positions.copy(), 16, np.float32)[0] is first[0]
    positions[2] = 7
    changed = rope._tables(positions, 16, np.float32)
    assert not np.array_equal(changed[0], first[0])
    assert rope._tables(positions, 16, np.float64)[0].dtype == np.float64
    assert rope._tables(positions, 18, np.float64)[0].shape == (6, 9)
    assert rope._tables(positions[None], 18, np.float64)[0].shape == (1, 6, 9)
    x = random(0, 6, 2, 16)
    for at in (positions, positions + 1, positions):
        assert same_bits(rope(x, at), apply_rope(x, at))


@any_isa
def test_tables_of_the_first_positions_grow():
    rope = Rope()
    first = rope._tables_of_first(100, 16, np.float32)
    assert rope._tables_of_first(7, 16, np.float32)[0] is first[0]
    more = rope._tables_of_first(101, 16, np.float32)
    assert len(more[0]) == 150
    assert rope._tables_of_first(150, 16, np.float32)[0] is more[0]
    for table, exact in zip(more, rope._tables(np.arange(150), 16, np.float32), strict=True):
        np.testing.assert_array_equal(table, exact)
        assert not table.flags.writeable
    assert len(rope._tables_of_first(1000, 16, np.float32)[0]) == 1000
    assert rope._tables_of_first(3, 16, np.float64)[0].dtype == np.float64
    assert rope._tables_of_first(3, 18, np.float64)[0].shape == (3, 9)


@any_isa
def test_threads_may_share_a_rope():
    rope, x = Rope(), random(0, 50, 2, 64)
    starts = range(0, 4000, 1000)
    expected = {start: apply_rope(x, np.arange(50) + start) for start in starts}
    wrong = []

    def call(start):
        for _ in range(50):
            if not same_bits(rope(x, np.arange(50) + start), expected[start]):
                wrong.append(start)

    threads = [threading.Thread(target=call, args=(start,)) for start in starts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.any_isa
@pytest.mark.parametrize("scaling", [None, RopeScaling.linear(2)], ids=["none", "linear"])
def test_frequencies_name_a_width_that_is_none(scaling):
    rope = Rope(scaling=scaling)
    for width, error, words in (
        ("a", TypeError, "head_dim must be an int, not 'a'"),
        (4.0, TypeError, "head_dim must be an int, not 4.0"),
        (-4, ValueError, "head_dim must not be negative, got -4"),
    ):
        with pytest.raises(error, match=words):
            rope.frequencies(width)


class Few(RopeScaling):
    """Somebody's own, and wrong."""

    def frequencies(self, theta, rotary_dim):
        return np.ones(1)


@pytest.mark.any_isa
def test_a_scaling_of_another_number_of_pairs_is_refused():
    rope = Rope(scaling=Few())
    with pytest.raises(ValueError, match=r"frequencies must have the shape .* \(32,\), not \(1,\)"):
        rope(np.ones((1, 5, 2, 64), np.float32), np.arange(5))


@pytest.mark.any_isa
def test_an_output_that_lies_about_where_it_is():
    class Lying(np.ndarray):
        ctypes = property(lambda self: x.ctypes)

    memory = np.ones((6, 2, 8), np.float32)
    x = memory[:5]
    with pytest.raises(ValueError, match="out overlaps x"):
        apply_rope(x, np.arange(5), out=memory[1:].view(Lying))


@pytest.mark.any_isa
def test_tiny_numbers_raise_no_flag():
    with np.errstate(all="raise"):
        Rope(theta=1e300)(np.ones((5, 2, 8), np.float32), np.arange(5))
