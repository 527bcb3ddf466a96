"""A host with a generated `tensorrt_llm`: where its processes find it, and engine options that load it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from laneway.runtime.engine_options import EngineOptions
from tests.support.trtllm_fake import Options
from tests.support.trtllm_package import write_package


class TrtllmSite:
    """Processes that start while `patch` holds have the package."""

    def __init__(self, folder: Path, version: str, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.journal = folder / "journal"
        before = os.environ.get("PYTHONPATH", "")
        patch.setenv("PYTHONPATH", write_package(folder / "package", version) + (f":{before}" if before else ""))

    def options(
        self, *, llm: Mapping[str, Any] | None = None, fake: Options | None = None, **changes: Any
    ) -> EngineOptions:
        """`llm`: keys of the llm_file beside its model, which says what the fake does."""
        model = msgspec.structs.replace(fake or Options(), journal=str(self.journal))
        path = self.folder / "llm.toml"
        keys = {"model": msgspec.json.encode(model).decode(), **(llm or {})}
        path.write_text("".join(f"{name} = {toml(value)}\n" for name, value in keys.items()), encoding="utf-8")
        return EngineOptions(llm_file=str(path), **changes)

    def journal_lines(self) -> list[dict[str, Any]]:
        return [msgspec.json.decode(line) for line in self.journal.read_bytes().splitlines()]


def toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{toml(name)} = {toml(each)}" for name, each in value.items()) + " }"
    return msgspec.json.encode(value).decode()
