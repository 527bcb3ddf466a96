"""Traces from files: one module for each format, and a registry that tells by its head which format a file has.

All readers take .gz, and raise ConfigError that names file, line and field of what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laneway.core.errors import ConfigError
from laneway.simulator.readers import agents, azure, bailian, burstgpt, compact, mooncake, servegen
from laneway.simulator.readers.rows import head
from laneway.simulator.trace import Trace


@dataclass(frozen=True, slots=True)
class Format:
    """`marks`: all of them are in the head of a file of this format."""

    name: str
    what: str
    read: Callable[..., Trace]
    marks: tuple[str, ...]
    met: str  # which real files it was tried on; empty: none


FORMATS: dict[str, Format] = {
    each.name: each
    for each in (
        # Those with more marks come first where their marks include another's.
        Format(
            "azure-2025",
            "Azure multimodal CSV: TIMESTAMP, NumImages, ContextTokens, GeneratedTokens",
            azure.read_multimodal, ("TIMESTAMP", "NumImages", "ContextTokens", "GeneratedTokens"), "",
        ),
        Format(
            "azure", "Azure LLM inference CSV of 2023 and 2024: TIMESTAMP, ContextTokens, GeneratedTokens",
            azure.read, azure.COLUMNS, "2023 code and conversation; 2024 never",
        ),
        Format(
            "bailian", "Qwen-Bailian JSON lines: chat_id, parent_chat_id, timestamp, lengths, hash_ids",
            bailian.read, ('"chat_id"', '"parent_chat_id"', '"input_length"'), "",
        ),
        Format(
            "mooncake", "Mooncake JSON lines: timestamp, input_length, output_length, hash_ids",
            mooncake.read, ('"timestamp"', '"input_length"', '"hash_ids"'), "conversation, synthetic",
        ),
        Format(
            "burstgpt", "BurstGPT CSV: Timestamp, Model, Request tokens, Response tokens",
            burstgpt.read, burstgpt.COLUMNS, "",
        ),
        Format(
            "agent-sessions", "kv-cache-tester: a JSON file for each session, or a folder of them",
            agents.read, ('"requests"', '"hash_ids"', '"block_size"'), "142 session files",
        ),
        Format("servegen", "ServeGen: the folder of a pool", servegen.read, (), "m-large, but for 15 length files"),
        Format(
            "servegen-summary", "ServeGen, converted: windows beside lengths",
            servegen.read_summary, ("pool,client,window_s,rate,cv,family",), "whole",
        ),
        Format(
            "compact-sessions", "agent sessions, converted to one CSV",
            compact.read_sessions, ("session,turn,agent,t_s,tokens_in,tokens_out,tokens_reused",), "710 sessions",
        ),
        Format(
            "compact", "requests, converted: t_ms, tokens_in, tokens_out",
            compact.read, ("t_ms,",), "azure, mooncake, servegen",
        ),
        Format(
            "compact-lengths", "jobs without times: tokens_in, tokens_out",
            compact.read_lengths, ("tokens_in,",), "arXiv",
        ),
    )
}  # fmt: skip


def detected(path: Path) -> Format:
    """The format of a file, or folder, by its head. ConfigError: none that is known."""
    if path.is_dir():
        if any(path.glob("chunk-*-trace.csv*")):
            return FORMATS["servegen"]
        if any(path.glob("*.json")) or any(path.glob("*.json.gz")):
            return FORMATS["agent-sessions"]
        raise ConfigError(f"{path} has neither ServeGen's chunk-<client>-trace.csv nor sessions (*.json)")
    begin = head(path)
    first = begin.partition("\n")[0]
    for each in FORMATS.values():
        # A header says all in its first line; JSON may come with a long first line, or over many lines.
        place = begin if each.marks and each.marks[0].startswith('"') else first
        if each.marks and all(mark in place for mark in each.marks):
            return each
    raise ConfigError(f"{path}, line 1: of no known format ({', '.join(FORMATS)}): {first[:80]!r}")


def read_trace(path: Path, format_name: str | None = None, **options: Any) -> Trace:
    """`format_name`: one of FORMATS; found by the file's head by default. Options are those of the reader."""
    if format_name is None:
        return detected(path).read(path, **options)
    if format_name not in FORMATS:
        raise ConfigError(f"{format_name!r} is no format of a trace; known are {', '.join(FORMATS)}")
    return FORMATS[format_name].read(path, **options)
