"""The extension modules; everything else about the build stands in pyproject.toml."""

import os
import sys
from glob import glob

from Cython.Build import cythonize
from setuptools import Extension, setup

# No -march, no -ffast-math: each ISA opens its own target region inside its source file, and the
# floating-point state of the user's process is left alone. FMA contraction is wanted. Some Pythons
# hand their own -flto down, but nothing may move between the ISAs' regions at link time.
COMPILE = [
    "-O2",
    "-std=gnu11",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-fno-lto",
]
LINK = ["-fno-lto"]
# Nearly every build of Python hands its own -g down, and symbols would be six sevenths of the file.
# Profilers and debuggers need them: CFLAGS=-g keeps them.
if sys.platform == "linux" and "-g" not in os.environ.get("CFLAGS", "").split():
    COMPILE.append("-g0")
    LINK.append("-Wl,-s")
# Apple's clang has no OpenMP of its own: Homebrew's libomp is found through CFLAGS and LDFLAGS.
OPENMP_COMPILE, OPENMP_LINK = (
    (["-Xpreprocessor", "-fopenmp"], ["-lomp"])
    if sys.platform == "darwin"
    else (["-fopenmp"], ["-fopenmp"])
)


def extension(name: str, sources: list[str]) -> Extension:
    return Extension(
        f"tileattn.{name}",
        sources=sources,
        include_dirs=["csrc"],
        depends=glob("csrc/**/*.h", recursive=True),
        extra_compile_args=COMPILE + OPENMP_COMPILE,
        extra_link_args=LINK + OPENMP_LINK,
    )


setup(
    ext_modules=cythonize(
        [
            extension(
                "_core",
                ["src/tileattn/_core.pyx", *sorted(glob("csrc/*.c") + glob("csrc/isa/*.c"))],
            )
        ],
        compiler_directives={"language_level": 3},
    )
)
