"""Which peers there are, what each needs, and what of it is missing; imports none of them."""

from __future__ import annotations

from importlib.util import find_spec

from tileattn._command import CommandError

#: The packages that peers are, and how each comes with what it needs.
PACKAGES = {
    "numpy": "pip install threadpoolctl",
    "torch": "pip install torch",
    "onnxruntime": "pip install onnxruntime onnx",
}
#: Their ways to do the work, each a peer of its own.
_WAYS = {
    "numpy": ("numpy",),
    "torch": ("torch", "torch bfloat16", "torch in blocks", "torch folded"),
    "onnxruntime": ("onnxruntime", "ORT MHA", "ORT GQA", "ORT Attention"),
}
_MODULES = {
    "numpy": ("threadpoolctl",),
    "torch": ("torch",),
    "torch bfloat16": ("torch", "ml_dtypes"),
    "onnxruntime": ("onnxruntime", "onnx"),
}

#: Names of the peers, installed or not; not each of them takes every cell.
BLOCK = ("numpy", "torch")
LINEAR = (*BLOCK, "onnxruntime", "torch bfloat16")
ATTENTION = (*BLOCK, "torch folded", "ORT MHA", "ORT GQA", "ORT Attention")
OPTIONS = (*ATTENTION, "torch in blocks")
DECODING = (*BLOCK, "torch folded")


def package(peer: str) -> str | None:
    """The package that a peer belongs to; None for what is tileattn itself, called otherwise."""
    return next((name for name, ways in _WAYS.items() if peer in ways), None)


def missing(peer: str) -> list[str]:
    """The modules that the peer lacks."""
    needed = _MODULES.get(peer) or _MODULES.get(package(peer) or "", ())
    return [module for module in needed if find_spec(module) is None]


def check_matplotlib() -> None:
    if find_spec("matplotlib") is None:
        raise CommandError("--plot needs matplotlib: pip install matplotlib")


def not_installed() -> dict[str, str]:
    """The packages that cannot be measured, and how to get them."""
    return {name: how for name, how in PACKAGES.items() if missing(name)}
