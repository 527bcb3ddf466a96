"""Qwen-Bailian usage traces: JSON lines with chat_id, parent_chat_id, timestamp (s), lengths, type, turn, hash_ids.

Source: alibaba-edu/qwen-bailian-usagetraces-anon, Apache-2.0. Never met a real file: read from rows by hand with the
published fields. Ids are of the text of single blocks of 16 tokens there, and a prefix is their sequence, so they are
numbered anew by what is before them.
Open loop by default: a turn comes when it was recorded. `closed`: a turn comes as long after the end of the turn before
as it was recorded to come after its arrival, since the trace does not say when an answer ended.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from laneway.simulator.columns import trace_of
from laneway.simulator.readers.mooncake import whole_blocks
from laneway.simulator.readers.rows import fault, read_jsonl
from laneway.simulator.readers.tokens import at_least_one
from laneway.simulator.trace import NO_SESSION, Floats, Ints, Trace

BLOCK_TOKENS = 16
SHORTEST_THINK_S = 1e-3
SOURCE = "alibaba-edu/qwen-bailian-usagetraces-anon, Apache-2.0"
Count = Annotated[int, msgspec.Meta(ge=0)]


class Row(msgspec.Struct, frozen=True):
    chat_id: int
    parent_chat_id: int
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Count
    output_length: Count
    hash_ids: tuple[Count, ...]
    type: str = "text"
    turn: int = 1


def read(path: Path, *, closed: bool = False) -> Trace:
    """Raises ConfigError that names file, line and field. Types of request are tenants."""
    rows: list[Row] = []
    root: dict[int, int] = {}
    for line, row in read_jsonl(path, Row):
        if row.chat_id in root:
            raise fault(path, line, "chat_id", f"{row.chat_id} comes twice")
        # A parent from before the trace begins is unknown: the turn then begins a session.
        root[row.chat_id] = root.get(row.parent_chat_id, row.chat_id)
        rows.append(row)
    rows.sort(key=lambda row: row.timestamp)
    notes = [f"{path.name}: {SOURCE}"]
    session = np.array([root[row.chat_id] for row in rows], dtype=np.int64)
    arrival_s = np.array([row.timestamp for row in rows], dtype=np.float64)
    think_s = np.zeros(len(rows))
    if closed:
        think_s = _gaps(session, arrival_s)
        arrival_s = np.where(think_s > 0.0, 0.0, arrival_s)
        notes.append("closed loop: think times are the recorded gaps between the turns' arrivals")
    tenants, tenant = np.unique([row.type for row in rows], return_inverse=True)
    prompt_tokens = at_least_one(np.array([row.input_length for row in rows], dtype=np.int64), "prompts", notes)
    return trace_of(
        path.name.partition(".")[0],
        arrival_s,
        prompt_tokens,
        at_least_one(np.array([row.output_length for row in rows], dtype=np.int64), "answers", notes),
        tenant=tenant.astype(np.int64),
        tenants=tuple(str(name) for name in tenants) or ("default",),
        session=session if closed else np.full(len(rows), NO_SESSION, dtype=np.int64),
        think_s=think_s,
        prefixes=whole_blocks(_chained([row.hash_ids for row in rows]), prompt_tokens, BLOCK_TOKENS),
        notes=notes,
    )


def _gaps(session: Ints, arrival_s: Floats) -> Floats:
    """Of each later turn the time since the turn before; of a first turn 0."""
    order = np.argsort(session, kind="stable")
    gaps = np.diff(arrival_s[order], prepend=0.0)
    later = np.diff(session[order], prepend=-1) == 0
    think_s = np.zeros(len(session))
    think_s[order] = np.where(later, np.maximum(gaps, SHORTEST_THINK_S), 0.0)
    return think_s


def _chained(ids: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Numbers that stand for a block and all before it."""
    known: dict[tuple[int, int], int] = {}
    chained = []
    for row in ids:
        before, numbers = -1, []
        for block in row:
            before = known.setdefault((before, block), len(known))
            numbers.append(before)
        chained.append(tuple(numbers))
    return chained
