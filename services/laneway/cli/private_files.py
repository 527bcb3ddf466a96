"""Files for their owner alone: each is written whole or not at all, and is never readable by others on the way."""

from __future__ import annotations

import os
from pathlib import Path

from laneway.core.errors import ConfigError


def make_folder(path: Path) -> None:
    """A folder that only its owner may look into; the folders above it are made as usual."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(exist_ok=True, mode=0o700)
        path.chmod(0o700)
    except OSError as error:
        raise ConfigError(f"{path} cannot be made a folder of one's own: {error.strerror}") from None


def write(path: Path, text: str | bytes) -> None:
    """Raises ConfigError."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    data = text.encode() if isinstance(text, str) else text
    try:
        partial.unlink(missing_ok=True)
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
