"""No file has an instruction that its CPUs may lack: the assembler is told which ones there are.

Dispatch cannot help where a kernel for one CPU holds an instruction of a better one, or where the
code around the kernels does. GNU as knows the extension of every instruction and refuses those that
its -march does not name, so that each file is compiled to assembly with the flags of setup.py and
then assembled for no more than what csrc/dispatch.c asks the CPU for. The compiler is gcc, or what
the environment variable CC names; a cross compiler is as good.
"""

import functools
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from unittest.mock import Mock, patch

import pytest

pytestmark = pytest.mark.any_isa

ROOT = Path(__file__).parents[1]
CSRC = ROOT / "csrc"

# What the assembler calls the extensions that supported_* in csrc/dispatch.c checks, each on top of
# the one before.
AVX2 = ("avx2", "fma", "f16c")
AVX512 = (*AVX2, "avx512f", "avx512vl", "avx512dq", "avx512bw")
AVX512_BF16 = (*AVX512, "avx512_bf16", "avx512_vnni")
AMX = (*AVX512_BF16, "amx_tile", "amx_bf16", "amx_int8")

# The least CPU of an architecture, and what files may use beyond it.
LEAST = {
    # SSE2; ibt is endbr64 alone, which some compilers put at each entry and older CPUs pass over.
    "x86_64": "generic64+ibt",
    # NEON, without half-precision arithmetic.
    "aarch64": "armv8-a",
}
BEYOND = {
    "x86_64": {
        "dispatch.c": ("xsave",),  # xgetbv, once CPUID has said that there is one
        "avx2.c": AVX2,
        "avx512.c": AVX512,
        "avx512_bf16.c": AVX512_BF16,
        "amx.c": AMX,
    },
    "aarch64": {},
}

# What a linker merges with its namesake from a file for a better CPU, and what runs unasked when
# the extension is loaded.
LINKED = re.compile(r"\.weak\b|\.weakref\b|\bcomdat\b|gnu_unique|\.linkonce|\.init_array|\.ctors")


def run(*command):
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, timeout=600
    )


class Toolchain:
    """A compiler, the GNU assembler beside it, and the architecture of both."""

    def __init__(self, name):
        self.compiler = shutil.which(name)
        # as for gcc, clang-19, cc; aarch64-linux-gnu-as for aarch64-linux-gnu-gcc
        self.assembler = shutil.which(re.sub(r"(gcc|clang|cc)(-\d+)?$", "as", name))
        if self.compiler is None or self.assembler is None:
            pytest.skip(f"{name} or its assembler is not installed")
        if "GNU assembler" not in run(self.assembler, "--version").stdout:
            pytest.skip(f"{self.assembler} is not that of GNU")
        self.machine = run(self.compiler, "-dumpmachine").stdout.split("-")[0]
        if self.machine not in LEAST:
            pytest.skip(f"no table of the instructions of {self.machine}")
        # clang writes for its own assembler, unless it is told to leave that aside.
        is_clang = "clang" in run(self.compiler, "--version").stdout
        self.options = ["-fno-integrated-as"] if is_clang else []

    def faults(self, source, folder, *options):
        """What is wrong with the code of a C file: a function and the assembler's word for each."""
        assembly = folder / f"{source.stem}.s"
        done = run(
            self.compiler, *flags(), *self.options, *options,
            "-fPIC", f"-I{CSRC}", "-S", source, "-o", assembly,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        # Compilers for ARM write into the file what it needs, and the assembler would believe them;
        # marks of inline assembly would have it count lines of the C file.
        marks = r'(?m)^\s*\.(arch|cpu)\b.*$|^# \d+ ".*$'
        lines = re.sub(marks, "", assembly.read_text()).split("\n")
        assembly.write_text("\n".join(lines))
        permitted = "+".join((LEAST[self.machine], *BEYOND[self.machine].get(source.name, ())))
        done = run(self.assembler, f"-march={permitted}", assembly, "-o", folder / "object.o")
        found = [(int(n), text) for n, text in re.findall(r":(\d+): Error: (.*)", done.stderr)]
        assert bool(found) == (done.returncode != 0), done.stderr
        found += [(n, line.strip()) for n, line in enumerate(lines, 1) if LINKED.search(line)]
        return [f"{function_at(lines, n)}: {text}" for n, text in found]


def function_at(lines, number):
    """The last label of a function at or above a line."""
    labels = (re.match(r"(\w+):", line) for line in reversed(lines[:number]))
    return next((label[1] for label in labels if label), "no function")


@functools.cache
def flags():
    """What setup.py hands to the compiler, asked without the packages that it builds with."""
    stubs = {
        name: Mock() for name in ("setuptools", "setuptools.command", "Cython", "Cython.Build")
    }
    stubs["setuptools.command.build_ext"] = Mock(build_ext=object)
    with patch.dict(sys.modules, stubs):
        runpy.run_path(str(ROOT / "setup.py"))
    extension = stubs["setuptools"].Extension.call_args.kwargs
    macros = [f"-D{name}={value}" for name, value in extension["define_macros"]]
    return [*extension["extra_compile_args"], *macros]


@pytest.fixture(scope="module")
def toolchain():
    if not CSRC.exists():
        pytest.skip("the C sources are not here")
    return Toolchain(os.environ.get("CC") or "gcc")


SOURCES = sorted(CSRC.glob("*.c")) + sorted(CSRC.glob("isa/*.c"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_a_file_has_no_instruction_beyond_its_cpus(toolchain, source, tmp_path):
    assert toolchain.faults(source, tmp_path) == []


def test_the_loops_have_no_instruction_beyond_the_least_cpu(toolchain, tmp_path):
    source = ROOT / "src" / "tileattn" / "_core.c"
    include = Path(sysconfig.get_path("include"))
    if not source.exists() or not (include / "Python.h").exists():
        pytest.skip("what Cython makes is not here, or the headers of Python are not")
    if toolchain.machine != platform.machine():
        pytest.skip("no headers of Python for another machine")
    omp = ("-fopenmp", "-include", "omp.h", "-fsyntax-only", "-xc", os.devnull)
    if run(toolchain.compiler, *omp).returncode != 0:
        pytest.skip("the compiler has no omp.h")
    assert toolchain.faults(source, tmp_path, f"-I{include}") == []


def test_every_instruction_set_has_its_row():
    names = {source.name for source in CSRC.glob("isa/*.c")}
    if not names:
        pytest.skip("the C sources are not here")
    assert names == {*BEYOND["x86_64"], "baseline.c"} - {"dispatch.c"}


# ------------------------------------------------------------------ constants of an ISA

UNFIT = {
    "pointers to rows": {"TA_GEMM_MR": 17},
    "pointers to keys": {"TA_ATTENTION_NV": 32},
    "whole panels": {"TA_ATTENTION_NV": 3},
    "whole panels for few rows": {"TA_ATTENTION_NV": 16},
    "sums of a row of scores": {"TA_ATTENTION_NV": 8},
    "sums of few rows": {"TA_FEW_ROWS": 16},
    "rows that walk": {"TA_WALK_ROWS": 9},
    "a function for each width": {"TA_GEMM_NV": 4},
}


@pytest.mark.parametrize("reason, constants", UNFIT.items(), ids=UNFIT)
def test_constants_that_do_not_fit_are_refused(toolchain, reason, constants, tmp_path):
    lines = [f"#undef {name}\n#define {name} {value}" for name, value in constants.items()]
    (tmp_path / "unfit.h").write_text("\n".join(['#include "simd/baseline.h"', *lines, ""]))
    code = (CSRC / "isa" / "baseline.c").read_text()
    (tmp_path / "baseline.c").write_text(code.replace("simd/baseline.h", "unfit.h"))
    options = (*flags(), f"-I{CSRC}", f"-I{tmp_path}", "-fsyntax-only", tmp_path / "baseline.c")
    done = run(toolchain.compiler, *options)
    assert done.returncode != 0
    assert re.search(rf'(?i)assert.* failed.*\W{reason}"?$', done.stderr, re.M), done.stderr


# ------------------------------------------------------------------ faults that must be found

X86_FAULTS = [
    ("platform.c", "haddps %xmm0, %xmm1"),  # SSE3
    ("platform.c", "xgetbv"),
    ("dispatch.c", "vzeroupper"),
    ("dispatch.c", "popcnt %eax, %eax"),
    ("baseline.c", "pshufb %xmm0, %xmm1"),  # SSSE3
    ("baseline.c", "vaddps %xmm0, %xmm1, %xmm2"),
    ("_core.c", "pmulld %xmm0, %xmm1"),  # SSE4.1
    ("avx2.c", "vpternlogd $1, %ymm0, %ymm1, %ymm2"),  # AVX512VL
    ("avx2.c", "vaddps %ymm16, %ymm0, %ymm0"),
    ("avx2.c", "kmovw %k0, %k1"),
    ("avx2.c", "shlx %eax, %ebx, %ecx"),  # BMI2
    ("avx2.c", "tzcnt %eax, %ebx"),  # BMI
    ("avx2.c", "prefetchw (%rax)"),
    ("avx512.c", "vpdpbusd %zmm0, %zmm1, %zmm2"),
    ("avx512.c", "vdpbf16ps %zmm0, %zmm1, %zmm2"),
    ("avx512.c", "vpconflictd %zmm0, %zmm1"),
    ("avx512.c", "vpermb %zmm0, %zmm1, %zmm2"),
    ("avx512_bf16.c", "vaddph %zmm0, %zmm1, %zmm2"),
    ("avx512_bf16.c", "tdpbssd %tmm0, %tmm1, %tmm2"),
    ("amx.c", "vpopcntd %zmm0, %zmm1"),
]
ARM_FAULTS = [
    ("baseline.c", "fadd v0.8h, v1.8h, v2.8h"),
    ("baseline.c", "sdot v0.4s, v1.16b, v2.16b"),
    ("platform.c", "ldadd w0, w1, [x2]"),
]


def found(toolchain, name, code, tmp_path):
    source = tmp_path / name
    source.write_text(code)
    return toolchain.faults(source, tmp_path)


def test_a_planted_instruction_is_found(toolchain, tmp_path):
    for name, instruction in X86_FAULTS if toolchain.machine == "x86_64" else ARM_FAULTS:
        code = f'void planted(void) {{ __asm__ volatile("{instruction}"); }}\n'
        (fault,) = found(toolchain, name, code, tmp_path)
        assert fault.startswith("planted: "), (name, instruction)


def test_a_region_too_wide_is_found(toolchain, tmp_path):
    if toolchain.machine != "x86_64":
        pytest.skip("there are no regions")
    code = (CSRC / "isa" / "avx2.c").read_text()
    wide = code.replace('"avx2,fma,f16c"', '"avx2,fma,f16c,avx512vl,bmi2"')
    assert wide != code
    faults = found(toolchain, "avx2.c", wide, tmp_path)
    assert any(re.match(r"ta_\w+_avx2: .*not supported", fault) for fault in faults)


@pytest.mark.parametrize("attribute", ["weak", "constructor"])
def test_what_is_merged_or_runs_unasked_is_found(toolchain, attribute, tmp_path):
    code = f'__attribute__(({attribute})) void planted(void) {{ __asm__ volatile(""); }}\n'
    assert found(toolchain, "platform.c", code, tmp_path)
    assert not found(toolchain, "platform.c", "void planted(void) {}\n", tmp_path)
