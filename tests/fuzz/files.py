"""Cases of files: weights, their config.json, and the command line that reads them."""

import contextlib
import io
import json
import math
import os
import re
import resource
import struct
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from pathlib import Path

import numpy as np

from tests.fuzz.draw import FLOATS
from tests.fuzz.judge import FaultError, require, shown
from tileattn import AttentionBlock, Rope, weights
from tileattn.__main__ import main

try:
    import safetensors.numpy as safetensors
except ImportError:
    safetensors = None

#: What a case may take, of files of some kilobytes.
SECONDS = 30
KILOBYTES = 500_000

# Texts of JSON values that do not fit, or hardly.
HUGE = "9" * 400
VALUES = (
    "null", "true", "false", "0", "-1", "1", "2", "3", "0.5", "1e999", "-1e999", "1e-400", "NaN",
    "Infinity", "-Infinity", HUGE, HUGE, "-" + "9" * 5000, "0." + "3" * 400, '""', '"a"',
    '"llama"', '"gpt2"', '"bert"', '"float32"', '"\\ud800"', '"\\u0000"', "[]", "[1]", "{}",
    '{"rope_type": "linear"}', "[null]", '{"rope_type": "yarn", "factor": 4}',
    '{"type": "llama3"}', '{"rope_type": ["linear"]}', '["full_attention"]',
    '["sliding_attention", "full_attention"]', "[[[[]]]]", "9007199254740993", "1.0",
    '{"rope_type": "linear", "factor": "8"}', '{"rope_type": "linear", "factor": 1e999}',
    '{"rope_type": "linear", "factor": ' + "7" * 400 + "}",
    '{"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 100, "mscale": "1", '
    '"mscale_all_dim": [2]}',
    '{"rope_type": "yarn", "factor": "2", "mscale": 1, "mscale_all_dim": 1}',
    '{"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 1e400, '
    '"mscale": 1e308, "mscale_all_dim": -1e308}',
    '{"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, '
    '"original_max_position_embeddings": 8192}',
    '{"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, '
    '"original_max_position_embeddings": 8192.5}',
    '{"full_attention": {"rope_type": "default"}}',
)  # fmt: skip
KEYS = (
    "model_type", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size",
    "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "n_head", "n_embd", "rope_theta",
    "rope_scaling", "rope_parameters", "partial_rotary_factor", "max_position_embeddings",
    "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "is_causal",
    "is_decoder", "use_bidirectional_attention", "scale_attn_weights", "query_pre_attn_scalar",
)  # fmt: skip


def _tensors(draw, naming):
    """A layer's tensors by their full names, its sizes, and the config.json that goes with them."""
    K, G, H = draw.pick(1, 1, 2), draw.pick(1, 2), draw.pick(2, 4, 8)
    sizes = {"K": K, "N": K * G, "H": H, "Hv": H, "D": draw.pick(3, 8, 16)}
    if naming.title.startswith("torch") or naming.title.endswith(("BERT", "GPT-2")):
        sizes["K"] = sizes["N"]
    sizes |= {"Dc": sizes["D"], "R": sizes["N"] + 2 * sizes["K"]}
    base = draw.pick("", "", "model.") if naming.any_prefix else ""
    base += naming.layers.strip("[]").replace("{i}", "0")
    dtype = draw.pick(np.float32, np.float32, np.float64, np.float16)
    tensors = {}
    dropped = [n for group in naming.optional if draw.chance(0.5) for n in group.split()]
    for argument, (name, axes) in naming.tensors.items():
        if argument in dropped or (argument[:2] in ("q_", "k_") and naming.has_rope):
            continue
        shape = [
            math.prod(sizes[x] for x in re.findall("[A-Z][a-z]?", axis)) for axis in axes.split()
        ]
        tensors[base + name] = draw.array(shape, dtype)
    config = {}
    if naming.heads_key:
        config[naming.heads_key] = sizes["N"]
    if naming.kv_heads_key:
        config[naming.kv_heads_key] = sizes["K"]
    if naming.models:
        config["model_type"] = draw.pick(*(m for m in naming.models if m != "qwen3"))
    if naming.has_rope:
        config |= {"head_dim": H, "hidden_size": sizes["D"], "rope_theta": 10000.0}
    return tensors, sizes, config


def _write(draw, path, tensors):
    if path.suffix == ".safetensors":
        safetensors.save_file({n: np.ascontiguousarray(t) for n, t in tensors.items()}, path)
    else:
        draw.pick(np.savez, np.savez, np.savez_compressed)(path, **tensors)


def _damage(draw, path):
    """Changes bytes of a file."""
    content = bytearray(path.read_bytes())
    for _ in range(draw.pick(1, 1, 2, 8)):
        kind = draw.pick("flip", "flip", "cut", "insert", "zero", "swap", "number", "double")
        at = draw.integer(0, max(0, len(content) - 1))
        if draw.chance(0.3):  # most of a file is data; what counts lies at its ends
            at = draw.pick(min(at, 200), max(0, len(content) - 1 - min(at, 200)))
        if not content:
            break
        if kind == "flip":
            content[at] ^= 1 << draw.integer(0, 7)
        elif kind == "cut":
            del content[at:]
        elif kind == "insert":
            content[at:at] = draw.random.randbytes(draw.integer(1, 9))
        elif kind == "zero":
            content[at : at + draw.integer(1, 40)] = b""
        elif kind == "number":
            number = draw.pick(0, 1, 0xFFFFFFFF, 0x7FFFFFFF, 2**63 - 1, 2**64 - 1, 2**40)
            content[at : at + 8] = struct.pack("<Q", number)
        elif kind == "double":
            content += content[at:]
        else:
            content[at : at + 4], content[:4] = content[:4], content[at : at + 4]
    path.write_bytes(content)


def _npy(draw, tensor):
    """A .npy file with a header that may claim anything."""
    shape = draw.pick(
        str(tensor.shape), str(tensor.shape), "(1152921504606846976,)", f"({2**31}, {2**31})",
        "(-1, 4)", "(True, 2)", "()", "(3,)", "('a',)", "(1.5,)", "[2, 3]", f"(0, {2**62})",
        "(" + "1, " * 40 + ")", "(" + "9" * 400 + ",)", "1", "(" * 300, f"({2**33},)",
    )  # fmt: skip
    descr = draw.pick(
        repr(tensor.dtype.str), repr(tensor.dtype.str), "'<f4'", "'|O'", "'<U2000000000'", "'|V0'",
        "'<M8[s]'", "'f4,f4'", "[('a', '<f4')]", "'<f16'", "'|S0'", "None", "'x'", "''",
        "'(2,2)<f4'", "'<f2'", "'>f8'", "[('a', '<f4', (1000000000, 1000000000))]",
    )  # fmt: skip
    order = draw.pick("False", "False", "True", "None", "2")
    header = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}".encode()
    if draw.chance(0.1):
        header = draw.pick(
            b"__import__('os').getcwd()", b"{" * 200, b"", b"\xff\xfe", b"{}", b"[1]"
        )
    length = draw.pick(len(header), len(header), len(header), 0, 65535, 10)
    version = draw.pick(b"\x01\x00", b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x09\x00")
    packed = struct.pack("<H", length) if version[0] == 1 else struct.pack("<I", length)
    return (
        b"\x93NUMPY"
        + version
        + packed
        + header
        + draw.pick(tensor.tobytes(), tensor.tobytes(), b"")
    )


def _odd_archive(draw, path, tensors):
    """A .npz whose members are odd."""
    victim = draw.pick(*tensors)
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w", draw.pick(0, 8)) as archive:
        warnings.simplefilter("ignore")  # of a name that comes twice
        for name, tensor in tensors.items():
            stream = io.BytesIO()
            np.lib.format.write_array(stream, tensor)
            content, member = stream.getvalue(), name + ".npy"
            if name == victim:
                kind = draw.pick(
                    "header", "header", "header", "twice", "object", "text", "name", "dtype"
                )
                if kind == "header":
                    content = _npy(draw, tensor)
                elif kind == "object":
                    content = pickled()
                elif kind == "text":
                    member, content = draw.pick(name, name + ".txt", name + "/"), b"hello"
                elif kind == "twice":
                    archive.writestr(member, draw.pick(content, b"", _npy(draw, tensor)))
                elif kind == "dtype":
                    stream = io.BytesIO()
                    other = tensor.astype(
                        draw.pick("i4", "?", "F", "U3", "M8[s]", ">f4", "f2", "g")
                    )
                    np.lib.format.write_array(stream, other)
                    content = stream.getvalue()
                else:
                    member = draw.pick(
                        ".npy", "../a.npy", "/a.npy", "a\nb.npy", "é.npy", "x" * 60000
                    )
            archive.writestr(member, content)


def pickled():
    """An array of an object that would say so if it were unpickled."""
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.array([Pickled()], object), allow_pickle=True)
    return stream.getvalue()


class Pickled:
    def __reduce__(self):
        return _opened, ()


def _opened():
    raise SystemExit("an object was unpickled")


def _config_text(draw, config):
    """The config.json, of the right values or not."""
    entries = {json.dumps(k): json.dumps(v) for k, v in config.items()}
    for _ in range(draw.pick(0, 1, 1, 2, 4)):
        key = json.dumps(draw.pick(*KEYS, *config))
        if draw.chance(0.2):
            entries.pop(key, None)
        else:
            entries[key] = draw.pick(*VALUES)
    text = "{" + ", ".join(f"{k}: {v}" for k, v in entries.items()) + "}"
    if draw.chance(0.15):
        text = draw.pick(
            "", "[]", "null", "7", "{", "[" * 100_000, '{"a":' * 100_000, text[:-1], text + "x",
            "\ufeff" + text, text.replace("{", '{"model_type": "other", ', 1), "9" * 5000,
        )  # fmt: skip
    content = text.encode("utf-8", "surrogatepass")
    return (
        draw.pick(content, content, content, content[:-1] + b"\xff}")
        if draw.chance(0.1)
        else content
    )


def _layer(draw, folder):
    """A layer's files in `folder`, mostly spoiled: its path, its options, whether they are good."""
    naming = draw.pick(*weights.NAMINGS)
    tensors, sizes, config = _tensors(draw, naming)
    suffix = ".safetensors" if safetensors is not None and draw.chance(0.3) else ".npz"
    path = folder / (draw.pick("layer", "layer", "a b", "\udcff", "é") + suffix)
    good = draw.chance(0.2)
    kind = (
        None
        if good
        else draw.pick("bytes", "bytes", "archive", "config", "config", "config", "shapes")
    )
    if kind == "shapes":
        name = draw.pick(*tensors)
        tensors[name] = np.ascontiguousarray(draw.changed(tensors[name]).value)
        if tensors[name].dtype.kind not in "fiu" or tensors[name].dtype.itemsize > 8:
            tensors[name] = np.zeros((0, 2), np.float32)
        tensors[name] = tensors[name].astype(tensors[name].dtype.newbyteorder("="))
    if kind == "archive" and suffix == ".npz":
        _odd_archive(draw, path, tensors)
    else:
        _write(draw, path, tensors)
    if config:
        content = _config_text(draw, config) if kind == "config" else json.dumps(config).encode()
        (folder / "config.json").write_bytes(content)
    if kind == "bytes":
        _damage(draw, path)
    options = {}
    if naming.matrices != "heads" and naming.heads_key is None:
        options["num_heads"] = sizes["N"]
        if sizes["K"] != sizes["N"]:
            options["num_kv_heads"] = sizes["K"]
    return path, options, good


@contextlib.contextmanager
def _in_bounds(what):
    """Neither long nor large."""
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    require(
        time.monotonic() - start < SECONDS, f"{what} takes {time.monotonic() - start:.0f} seconds"
    )
    require(grown < KILOBYTES, f"{what} takes {grown // 1000} MB")


def files(draw, isa):
    """load_block, load_arguments and load_tensors of files that are damaged."""
    with tempfile.TemporaryDirectory() as folder:
        path, options, good = _layer(draw, Path(folder))
        if draw.chance(0.15):
            name = draw.pick("layer", "num_heads", "num_kv_heads", "prefix", "is_causal")
            options[name], good = draw.wrong(None).value, False
        function = draw.pick(weights.load_block, weights.load_arguments, weights.load_tensors)
        if function is weights.load_tensors:
            options = {}
        config = path.with_name("config.json")
        given = ", ".join(f"{n}={shown(v)}" for n, v in options.items())
        what = f"{function.__name__}({path.name}, {given})"
        what += f" with {config.read_bytes()[:700]!r}" if config.exists() else ""
        made = None
        try:
            with _in_bounds(what):
                made = function(path, **options)
        except weights.WeightsError as error:
            require(not good, f"{what}: {error}")
            require("\n" not in str(error) and len(str(error)) < 1100, f"not one line: {error}")
        except (TypeError, ValueError) as error:
            words = set(re.findall(r"\w+", str(error)))
            if (
                not words
                & {"layer", "num_heads", "num_kv_heads", "prefix", "is_causal", "path"}
                & {*options}
            ):
                raise FaultError(f"{what}: {type(error).__name__}: {error}") from error
        except Exception as error:
            raise FaultError(f"{what}: {type(error).__name__}: {error}") from error
        if isinstance(made, dict) and function is weights.load_arguments:
            made = AttentionBlock(**made)
        if isinstance(made, AttentionBlock):
            repr(made)
            x = draw.array((2, made.model_dim), made.dtype)
            context = None
            if made.context_dim != made.model_dim:
                context = draw.array((2, made.context_dim), made.dtype)
            made(x, context=context)


def config(draw, isa):
    """Rope.from_config of what json.load makes of anything."""
    text = _config_text(
        draw, {"head_dim": 8, "hidden_size": 32, "num_attention_heads": 4, "rope_theta": 1e4}
    )
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return
    try:
        with _in_bounds("from_config"):
            made = Rope.from_config(values)
            repr(made)
            if made.rotary_dim is None or made.rotary_dim <= 8:
                made(draw.array((2, 1, 8), np.float32), [0, 1])
    except (TypeError, ValueError) as error:
        if len(str(error)) > 2000:
            raise FaultError(
                f"a message of {len(str(error))} characters: {str(error)[:200]}"
            ) from error
    except Exception as error:
        raise FaultError(f"from_config({text[:700]!r}): {type(error).__name__}: {error}") from error


# ------------------------------------------------------------------ the command line

WORDS = (
    "run", "cost", "info", "--help", "-h", "--", "-", "", "-T", "-B", "-T=3", "-T3", "--threads",
    "--seed", "0", "1", "-1", "1e3", "0x10", "٣", "1_0", "1" * 5000, "nan", "--causal",
    "--no-causal", "--dtype", "float16", "float32", "--weights", "nothing.npz", "/", ".", "\udcff",
    "a\nb", "\x00", "--input", "--output", "/dev/null", "--layer", "--prefix", "--heads",
    "--kv-heads", "--repeats", "--query-offset", "-S", "@file", "--version",
)  # fmt: skip


def _small_run(draw):
    argv = ["run", "--repeats", "1"]
    for letter in "BTDNKH":
        if letter not in "NK" or draw.chance(0.3):
            size = (
                draw.pick(1, 2, 7, 8, 33)
                if draw.chance(0.93)
                else draw.pick(0, 10**12, 10**30, 2**62)
            )
            argv += [f"-{letter}", str(size)]
    argv += draw.pick([], ["--dtype", "float64"], ["--causal"], ["--no-causal"], ["--seed", "7"])
    argv += draw.pick([], [], ["--threads", draw.pick("1", "2", "3", "1024", "1025", "9" * 30)])
    return argv


def command(draw, isa):
    """The command line: right and wrong arguments, good and damaged files."""
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        kind = draw.pick("words", "words", "run", "cost", "file", "file", "file")
        if kind == "words":
            argv = [draw.pick(*WORDS) for _ in range(draw.integer(0, 6))]
            if "--repeats" not in argv:
                argv += ["--repeats", "1"] if "run" in argv[:1] else []
            if argv[:1] == ["run"]:
                argv += ["-T", "5", "-D", "8", "-H", "4"]
        elif kind == "run":
            argv = _small_run(draw)
            if draw.chance(0.3):
                argv += [
                    "--output",
                    str(folder / draw.pick("y.npy", "no/y.npy", "\udcff", "a\x00b", "")),
                ]
        elif kind == "cost":
            argv = ["cost"]
            for letter in "BTDNKHS":
                if draw.chance(0.4):
                    argv += [
                        f"-{letter}",
                        draw.pick("0", "1", "12", "4096", "9" * 30, "-1", "x", "9" * 5000),
                    ]
            argv += draw.pick([], ["--query-offset", draw.pick("0", "-5", "9" * 30, "x")])
            argv += draw.pick(
                [], ["--dtype", draw.pick("float32", "float64", "int8")], ["--no-causal"]
            )
        else:
            argv = _file_run(draw, folder)
        argv = [word[:6000] for word in argv]
        _run(argv)


def _file_run(draw, folder):
    path, options, _ = _layer(draw, folder)
    argv = ["run", "--repeats", "1", "--weights", str(path)]
    for name, value in options.items():
        argv += ["--heads" if name == "num_heads" else "--kv-heads", str(value)]
    if draw.chance(0.5):
        contents = draw.contents() if draw.chance(0.3) else "normal"
        x = draw.array((draw.pick(1, 5), draw.pick(8, 16, 3)), draw.pick(*FLOATS), contents)
        if draw.chance(0.1):
            x = x > 0
        source = folder / "x.npy"
        np.save(source, x)
        if draw.chance(0.4):
            _damage(draw, source)
        elif draw.chance(0.3):
            source.write_bytes(draw.pick(_npy(draw, x), pickled()))
        argv += ["--input", str(source)]
    else:
        argv += ["-T", "3"]
    if draw.chance(0.2):
        argv += ["--output", str(folder / "y.npy")]
    if draw.chance(0.2):
        argv += [
            draw.pick("--layer", "--prefix", "--heads", "--kv-heads"),
            draw.pick("0", "1", "model", "9" * 30),
        ]
    return argv


def _run(argv):
    """One line on stderr and status 2 for what cannot be used, and never a traceback."""
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)  # as strict as a terminal's
    err = io.StringIO()
    what = f"tileattn {argv!r}"[:900]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            with _in_bounds(what):
                status = main(argv)
        except FaultError:
            raise
        except BaseException as error:
            raise FaultError(f"{what}: {type(error).__name__}: {error}") from error
    text, message = out.buffer.getvalue().decode(), err.getvalue()
    if status == 2:
        require(message.startswith("tileattn: error: "), f"{what}: {message!r}")
        require(message.count("\n") == 1, f"{what}: several lines: {message[:400]!r}")
        require(len(message) < 1100, f"{what}: a message of {len(message)} characters")
    else:
        require(message == "", f"{what}: status {status}, but {message!r}")
        require(
            status == 0 or (status == 1 and "FAILS" in text), f"{what}: status {status}\n{text}"
        )
        require(status == 0 or "--weights" in argv, f"{what}: FAILS\n{text}")


def environment(draw, isa):
    """TILEATTN_ISA and OMP_NUM_THREADS, which are read at import."""
    given = dict(os.environ)
    name = draw.pick("TILEATTN_ISA", "TILEATTN_ISA", "OMP_NUM_THREADS")
    given[name] = draw.pick(
        "", "avx2", "baseline", "AVX2", "nothing", " ", "a\nb", "x" * 5000, "0", "-1", "2,3", "é"
    )
    code = "import tileattn; print(tileattn.isa(), tileattn.get_num_threads())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=given, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        require(
            name == "TILEATTN_ISA" and "ImportError: TILEATTN_ISA" in done.stderr,
            done.stderr[-800:],
        )
    else:
        require(int(done.stdout.split()[1]) >= 1, done.stdout)
