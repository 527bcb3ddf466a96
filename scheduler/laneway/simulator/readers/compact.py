"""The compact CSV files that Laneway's own measurements use: recorded traces, converted, one small file each.

- requests: t_ms, tokens_in, tokens_out, and where known tenant and blocks (512-token ids and ranges: `0 14-27`);
- lengths: tokens_in, tokens_out, of jobs without times, which all arrive at 0;
- sessions: session, turn, agent, t_s, tokens_in, tokens_out, tokens_reused (in blocks of 64), think_s, api_s.
All met: azure-2023-*, mooncake-*, servegen-* excerpts, arxiv-summarization-lengths, agent-sessions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from laneway.simulator.columns import starts_of, trace_of
from laneway.simulator.readers.mooncake import BLOCK_TOKENS, without_ticks
from laneway.simulator.readers.rows import Parse, count, fault, head, maybe, positive, read_csv, text
from laneway.simulator.readers.sessions import Session, reusing, trace_of_sessions
from laneway.simulator.readers.tokens import at_least_one
from laneway.simulator.trace import Floats, Ints, Prefixes, Trace

REUSED_BLOCK_TOKENS = 64
SESSION_COLUMNS = {
    "session": count, "agent": count, "t_s": positive, "tokens_in": count, "tokens_out": count,
    "tokens_reused": count, "think_s": maybe, "api_s": maybe,
}  # fmt: skip


def read(path: Path, *, spread: bool = True, seed: int = 0) -> Trace:
    """Requests. `spread`: ticks that are found, by draws of `seed`. ConfigError names file, line and field."""
    header = {name.strip() for name in head(path).partition("\n")[0].split(",")}
    extra: dict[str, Parse] = {name: text for name in ("tenant", "blocks") if name in header}
    rows = read_csv(path, {"t_ms": positive, "tokens_in": count, "tokens_out": count, **extra})
    arrival_s = rows["t_ms"] / 1000.0
    notes = [path.name]
    if spread:
        arrival_s = without_ticks(arrival_s, seed, notes)
    tenants, tenant = ("default",), None
    if "tenant" in rows:
        found, tenant = np.unique(rows["tenant"].astype(str), return_inverse=True)
        tenants, tenant = tuple(found.tolist()), tenant.astype(np.int64)
    prompt_tokens = at_least_one(rows["tokens_in"], "prompts", notes)
    return trace_of(
        path.name.partition(".")[0],
        arrival_s - (arrival_s.min() if len(arrival_s) else 0.0),
        prompt_tokens,
        at_least_one(rows["tokens_out"], "answers", notes),
        tenant=tenant,
        tenants=tenants,
        prefixes=_prefixes(path, rows["blocks"], prompt_tokens) if "blocks" in rows else None,
        notes=notes,
    )


def read_lengths(path: Path) -> Trace:
    """Jobs without times. ConfigError names file, line and field."""
    rows = read_csv(path, {"tokens_in": count, "tokens_out": count})
    notes = [path.name]
    return trace_of(
        path.name.partition(".")[0],
        np.zeros(len(rows["tokens_in"])),
        at_least_one(rows["tokens_in"], "prompts", notes),
        at_least_one(rows["tokens_out"], "answers", notes),
        notes=notes,
    )


def read_sessions(
    path: Path,
    *,
    starts_s: Floats | None = None,
    think_s_most: float = float("inf"),
    prompt_tokens_most: int | None = None,
) -> Trace:
    """Sessions in a closed loop; see `trace_of_sessions`. ConfigError names file, line and field.

    A turn's reused tokens are taken to be the begin of the last prompt of its kind (main loop, sub-agent) before it.
    """
    rows = read_csv(path, SESSION_COLUMNS)
    rows["think_s"] = _think_s(rows)
    _, numbers = np.unique(rows["session"], return_inverse=True)
    starts = np.concatenate(([0], np.flatnonzero(np.diff(numbers)) + 1, [len(numbers)])).astype(np.int64)
    sessions, fresh = [], 0
    for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        mine = {name: column[begin:end] for name, column in rows.items()}
        # Ids of half a million tokens a turn are made only for sessions that are kept.
        kept = prompt_tokens_most is None or mine["tokens_in"].max() <= prompt_tokens_most
        session, fresh = _session(mine, fresh, with_blocks=kept)
        sessions.append(session)
    return trace_of_sessions(
        path.name.partition(".")[0],
        sessions,
        block_tokens=REUSED_BLOCK_TOKENS,
        starts_s=starts_s,
        think_s_most=think_s_most,
        prompt_tokens_most=prompt_tokens_most,
        notes=[path.name],
    )


def _think_s(rows: dict[str, NDArray[Any]]) -> Floats:
    """Where it is not known: from the end of the turn before, as far as that is known."""
    ended_s = np.roll(rows["t_s"] + np.nan_to_num(rows["api_s"]), 1)
    think_s: Floats = np.where(np.isnan(rows["think_s"]), np.maximum(0.0, rows["t_s"] - ended_s), rows["think_s"])
    return think_s


def _session(rows: dict[str, NDArray[Any]], fresh: int, *, with_blocks: bool) -> tuple[Session, int]:
    session = Session(str(rows["session"][0]) if len(rows["session"]) else "")
    last: dict[int, Ints] = {}
    none = np.zeros(0, dtype=np.int64)
    for agent, tokens, out, reused, think_s in zip(
        *(rows[name].tolist() for name in ("agent", "tokens_in", "tokens_out", "tokens_reused", "think_s")), strict=True
    ):
        blocks = max(1, tokens) // REUSED_BLOCK_TOKENS if with_blocks else 0
        ids = reusing(last.get(agent, none), reused // REUSED_BLOCK_TOKENS, blocks, fresh)
        fresh += blocks
        last[agent] = ids
        session.think_s.append(think_s)
        session.prompt_tokens.append(max(1, tokens))
        session.output_tokens.append(max(1, out))
        session.blocks.append(ids)
    return session, fresh


def _prefixes(path: Path, blocks: NDArray[np.object_], prompt_tokens: Ints) -> Prefixes:
    """Of each prompt the blocks that it fills."""
    ids = []
    for line, (row, tokens) in enumerate(zip(blocks.tolist(), prompt_tokens.tolist(), strict=True), 2):
        ids.append(_ids(path, line, row)[: tokens // BLOCK_TOKENS])
    flat = np.concatenate([*ids, np.zeros(0, dtype=np.int64)])
    return Prefixes(BLOCK_TOKENS, flat, starts_of(np.array([len(row) for row in ids], dtype=np.int64)))


def _ids(path: Path, line: int, row: str) -> Ints:
    parts = []
    for part in row.split():
        first, _, last = part.partition("-")
        try:
            begin, end = int(first), int(last or first)
        except ValueError:
            raise fault(path, line, "blocks", f"{part!r} is no id and no range") from None
        if end < begin:
            raise fault(path, line, "blocks", f"{part!r} is no range")
        parts.append(np.arange(begin, end + 1))
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
