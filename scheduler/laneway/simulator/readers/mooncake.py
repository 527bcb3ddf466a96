"""Mooncake traces: JSON lines with timestamp (ms), input_length, output_length, hash_ids (blocks of 512 prompt tokens).

Source: kvcache-ai/Mooncake, FAST25-release/traces, Apache-2.0. Met: conversation and synthetic, whole. Never met:
toolagent and the arXiv trace, which have the same fields.
The conversation was recorded in ticks of 3 seconds, with about ten requests at each: clumps that no service saw.
Ticks that are found are spread over their length unless the caller wants them.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from laneway.simulator.columns import starts_of, trace_of
from laneway.simulator.readers.rows import read_jsonl
from laneway.simulator.readers.tokens import at_least_one
from laneway.simulator.scaling import spread_ticks, tick_of
from laneway.simulator.trace import Floats, Ints, Prefixes, Trace

BLOCK_TOKENS = 512
SOURCE = "kvcache-ai/Mooncake, Apache-2.0"
Count = Annotated[int, msgspec.Meta(ge=0)]


class Row(msgspec.Struct, frozen=True):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Count
    output_length: Count
    hash_ids: tuple[Count, ...]


def read(path: Path, *, spread: bool = True, seed: int = 0) -> Trace:
    """`spread`: ticks that are found, by draws of `seed`. Raises ConfigError that names file, line and field."""
    rows = [row for _, row in read_jsonl(path, Row)]
    arrival_s = np.array([row.timestamp for row in rows], dtype=np.float64) / 1000.0
    notes = [f"{path.name}: {SOURCE}"]
    if spread:
        arrival_s = without_ticks(arrival_s, seed, notes)
    prompt_tokens = at_least_one(np.array([row.input_length for row in rows], dtype=np.int64), "prompts", notes)
    return trace_of(
        path.name.partition(".")[0],
        arrival_s,
        prompt_tokens,
        at_least_one(np.array([row.output_length for row in rows], dtype=np.int64), "answers", notes),
        prefixes=whole_blocks([row.hash_ids for row in rows], prompt_tokens, BLOCK_TOKENS),
        notes=notes,
    )


def without_ticks(arrival_s: Floats, seed: int, notes: list[str]) -> Floats:
    """The arrivals, spread where they were recorded in ticks; then with a note."""
    tick_s = tick_of(arrival_s)
    if tick_s is None:
        return arrival_s
    notes.append(f"recorded in ticks of {tick_s:g} s, over which the arrivals are spread (seed {seed})")
    return spread_ticks(np.sort(arrival_s), tick_s, np.random.default_rng(np.random.SeedSequence([seed, 1])))


def whole_blocks(ids: list[tuple[int, ...]], prompt_tokens: Ints, block_tokens: int) -> Prefixes:
    """Of each prompt the blocks that it fills: the last one is often part of a block, which nobody can reuse."""
    kept = [row[: tokens // block_tokens] for row, tokens in zip(ids, prompt_tokens.tolist(), strict=True)]
    starts = starts_of(np.array([len(row) for row in kept], dtype=np.int64))
    flat = np.fromiter(chain.from_iterable(kept), dtype=np.int64, count=int(starts[-1]))
    return Prefixes(block_tokens, flat, starts)
