"""Where the settings of a process come from, so that they can be read again while it runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from laneway.core.errors import ConfigError
from laneway.runtime.config_load import find_file
from laneway.runtime.settings import Settings, load_settings


@dataclass(frozen=True, slots=True)
class SettingsSource:
    """The arguments of load_settings: a flag and the environment keep their precedence over the file."""

    config: str | Path | None = None
    flags: Mapping[str, object] | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def load(self) -> Settings:
        """Raises ConfigError."""
        return load_settings(config=self.config, flags=self.flags, environ=self.environ)

    def content(self) -> bytes | None:
        """What the file holds now; None where there is none. An editor may have put another in its place."""
        try:
            path = find_file(self.config, self.environ)
            return path.read_bytes() if path is not None else None
        except (ConfigError, OSError):
            return None
