"""A trace as it is played here: faster, and with shorter prompts and answers where the machine is small."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np

from laneway.simulator.outcomes import Outcomes
from laneway.simulator.trace import Ints, Prefixes, Trace


def as_played(trace: Trace, *, speed: float = 1.0, divide_prompt: float = 1.0, divide_output: float = 1.0) -> Trace:
    """The trace in the player's own seconds and tokens, all divisors at least 1e-6.

    `speed` compresses arrivals and think times: it raises the load and leaves promises and patience alone. Callers
    allow as many tokens as there are to come, since a live model is told when to stop by that alone. A note of each
    change goes along.
    """
    notes = list(trace.notes)
    notes.append("played with max_tokens = output_tokens, so that answers have the trace's lengths")
    if speed != 1.0:
        notes.append(f"arrivals and think times {speed:g} times as fast")
    if divide_prompt != 1.0:
        notes.append(f"prompts divided by {divide_prompt:g}")
    if divide_output != 1.0:
        notes.append(f"answers divided by {divide_output:g}")
    output_tokens = _divided(trace.output_tokens, divide_output)
    return replace(
        trace,
        arrival_s=trace.arrival_s / speed,
        think_s=trace.think_s / speed,
        prompt_tokens=_divided(trace.prompt_tokens, divide_prompt),
        output_tokens=output_tokens,
        max_tokens=output_tokens,
        leaves_after=np.where(trace.leaves_after > 0, _divided(trace.leaves_after, divide_output), 0),
        prefixes=_divided_prefixes(trace.prefixes, divide_prompt),
        notes=tuple(notes),
    )


def _divided(tokens: Ints, by: float) -> Ints:
    return np.maximum(1, np.floor(tokens / by)).astype(np.int64)


def _divided_prefixes(prefixes: Prefixes | None, by: float) -> Prefixes | None:
    """Blocks are rounded down as well, so that a prompt's blocks still fit into it."""
    return prefixes and replace(prefixes, block_tokens=max(1, int(prefixes.block_tokens / by)))


def only(trace: Trace, outcomes: Outcomes, rows: Ints) -> tuple[Trace, Outcomes]:
    """These requests of both, in this order."""
    columns: dict[str, Any] = {name: column[rows] for name, column in _columns(trace)}
    prefixes = trace.prefixes
    if prefixes is not None:
        ids = [prefixes.of(request) for request in rows.tolist()]
        starts = np.concatenate(([0], np.cumsum([len(each) for each in ids]))).astype(np.int64)
        prefixes = Prefixes(prefixes.block_tokens, np.concatenate([*ids, prefixes.ids[:0]]), starts)
    kept = Outcomes(**{name: column[rows] for name, column in _columns(outcomes)})
    return replace(trace, prefixes=prefixes, **columns), kept


def _columns(table: Trace | Outcomes) -> Iterator[tuple[str, Any]]:
    for each in fields(table):
        column = getattr(table, each.name)
        if isinstance(column, np.ndarray):
            yield each.name, column
