"""The extension module; everything else about the build stands in pyproject.toml."""

import os
import shutil
import sys
import sysconfig
from glob import glob
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# No -march, no -ffast-math: each ISA opens its own target region inside its source file, and the
# floating-point state of the user's process is left alone. FMA contraction is wanted.
COMPILE = ["-O2", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno"]
if sys.platform == "win32":
    # clang-cl, since MSVC does not take GNU C; what it shares with no MSVC goes behind /clang:.
    COMPILE = ["/openmp", *(f"/clang:{option}" for option in COMPILE)]
    LINK = []
else:
    # Some Pythons hand their own -flto down, but nothing may move between the ISAs' regions at link
    # time.
    COMPILE += ["-fvisibility=hidden", "-fno-lto"]
    LINK = ["-fno-lto"]
    # Apple's clang has no OpenMP of its own: Homebrew's libomp is found through CFLAGS and LDFLAGS.
    COMPILE += ["-Xpreprocessor", "-fopenmp"] if sys.platform == "darwin" else ["-fopenmp"]
    LINK += ["-lomp"] if sys.platform == "darwin" else ["-fopenmp"]
# Nearly every build of Python hands its own -g down, and symbols would be six sevenths of the file.
# Profilers and debuggers need them: CFLAGS=-g, or -g3 and the like, keeps them.
WANTS_SYMBOLS = any(
    flag.startswith("-g") and flag != "-g0" for flag in os.environ.get("CFLAGS", "").split()
)
if sys.platform == "linux" and not WANTS_SYMBOLS:
    COMPILE.append("-g0")
    LINK.append("-Wl,-s")
# One wheel serves every Python from 3.11 on, for some 0.4 us more a call than one of its own.
# Builds without the GIL have no stable ABI.
IS_LIMITED = not sysconfig.get_config_var("Py_GIL_DISABLED")


class BuildExt(build_ext):
    """Compiles with clang-cl where setuptools would take MSVC."""

    def build_extensions(self) -> None:
        if self.compiler.compiler_type == "msvc":
            clang = shutil.which("clang-cl")
            if clang is None:
                sys.exit("building tileattn on Windows needs clang-cl (LLVM) on the PATH")
            self.compiler.initialize()
            self.compiler.cc = clang
            self.compiler.add_library_dir(str(Path(clang).parents[1] / "lib"))  # of libomp
        super().build_extensions()


def extension(name: str, sources: list[str]) -> Extension:
    return Extension(
        f"tileattn.{name}",
        sources=sources,
        include_dirs=["csrc"],
        depends=glob("csrc/**/*.h", recursive=True),
        define_macros=[("Py_LIMITED_API", "0x030B0000")] if IS_LIMITED else [],
        py_limited_api=IS_LIMITED,
        extra_compile_args=COMPILE,
        extra_link_args=LINK,
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
    ),
    cmdclass={"build_ext": BuildExt},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if IS_LIMITED else {},
)
