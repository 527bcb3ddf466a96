"""Coding-agent sessions of kv-cache-tester: a JSON file for each session, replayed in a closed loop.

Fields: block_size, requests[] of t (s), type, in, out, hash_ids, think_time (s, absent in older files), api_time (s);
an entry of type "subagent" has duration_ms and requests of its own. Source: callanjfox/kv-cache-tester, Apache-2.0.
Met: 142 of its files, sub-agents among them, and 710 converted ones (`compact`), which say the same.

Sub-agents' turns stand where they were called, one after the other: in truth some ran side by side. Ids hold inside one
session ("hash_id_scope": "local") unless a file says "global". Without think times those are taken from `t`, less the
time that the service took where that is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from laneway.core.errors import ConfigError
from laneway.simulator.readers.rows import opened
from laneway.simulator.readers.sessions import Session, trace_of_sessions
from laneway.simulator.trace import Floats, Trace

SOURCE = "callanjfox/kv-cache-tester, Apache-2.0"
LOCAL = 1 << 40  # ids of one session, apart from those of the others and from global ones
Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Request(msgspec.Struct, frozen=True):
    t: Seconds
    type: str = "n"
    tokens_in: Count = msgspec.field(name="in", default=0)
    tokens_out: Count = msgspec.field(name="out", default=0)
    hash_ids: tuple[Count, ...] = ()
    think_time: Seconds | None = None
    api_time: Seconds | None = None
    duration_ms: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    requests: tuple[Request, ...] = ()


class File(msgspec.Struct, frozen=True):
    requests: tuple[Request, ...]
    id: str = ""
    block_size: Annotated[int, msgspec.Meta(ge=1)] = 64
    hash_id_scope: str = "local"


def read(
    path: Path,
    *,
    starts_s: Floats | None = None,
    think_s_most: float = float("inf"),
    prompt_tokens_most: int | None = None,
) -> Trace:
    """`path`: one session, or a folder of them (`*.json`, `*.json.gz`, in order of their names).

    `starts_s`, `think_s_most`, `prompt_tokens_most`: see `trace_of_sessions`; without times all sessions start at 0.
    Raises ConfigError that names file and field.
    """
    files = sorted([*path.glob("*.json"), *path.glob("*.json.gz")]) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"{path} has no session files (*.json)")
    sessions: list[Session] = []
    sizes: set[int] = set()
    for number, file in enumerate(map(_file, files), 1):
        sizes.add(file.block_size)
        sessions.append(_session(file, number, prompt_tokens_most))
    if len(sizes) > 1:
        raise ConfigError(f"{path}, block_size: the sessions have blocks of {sorted(sizes)} tokens; give them one size")
    return trace_of_sessions(
        path.name.partition(".")[0],
        sessions,
        block_tokens=sizes.pop(),
        starts_s=starts_s,
        think_s_most=think_s_most,
        prompt_tokens_most=prompt_tokens_most,
        notes=[f"{path.name}: {SOURCE}"],
    )


def _file(path: Path) -> File:
    with opened(path) as text:
        whole = text.read()
    try:
        return msgspec.json.decode(whole, type=File)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: {error}") from None


def _session(file: File, number: int, prompt_tokens_most: int | None) -> Session:
    session = Session(file.id or str(number))
    base = 0 if file.hash_id_scope == "global" else number * LOCAL
    turns = list(_turns(file.requests))
    # Ids of half a million tokens a turn are kept only of sessions that are.
    kept = prompt_tokens_most is None or max((turn.tokens_in for turn, _ in turns), default=0) <= prompt_tokens_most
    for request, think_s in turns:
        prompt_tokens = max(1, request.tokens_in)
        session.think_s.append(think_s)
        session.prompt_tokens.append(prompt_tokens)
        session.output_tokens.append(max(1, request.tokens_out))
        ids = np.array(request.hash_ids[: prompt_tokens // file.block_size] if kept else (), dtype=np.int64)
        session.blocks.append(ids + base)
    return session


def _turns(requests: Sequence[Request]) -> Iterator[tuple[Request, float]]:
    """All requests that reach an engine, in order, with their think times in seconds."""
    ended_s = 0.0
    for request in requests:
        if request.requests:
            yield from _turns(request.requests)
            ended_s = request.t + request.duration_ms / 1000.0
        elif request.tokens_in or request.hash_ids:
            think_s = request.think_time
            yield request, max(0.0, request.t - ended_s) if think_s is None else think_s
            ended_s = request.t + (request.api_time or 0.0)
