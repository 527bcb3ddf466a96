"""One request on its way through a simulated pool."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from laneway.simulator.engine import Work
from laneway.simulator.trace import NO_SESSION, Trace

if TYPE_CHECKING:
    from laneway.simulator.world import Worker


class Ticket:
    """One request on its way: what a discipline may know of it, what it has got, and where it is."""

    __slots__ = (
        "asked_s", "blocks", "came_s", "due_s", "first_s", "index", "lane", "made", "max_tokens", "mind",
        "output_tokens", "prompt_tokens", "recomputed", "retries", "session", "starts", "tenant", "tpot_s",
        "ttft_s", "warming", "where", "work",
    )  # fmt: skip

    def __init__(
        self, index: int, asked_s: float, lane: int, tenant: int, prompt_tokens: int, output_tokens: int,
        max_tokens: int, ttft_s: float, tpot_s: float, deadline_s: float, session: int, *, blocks: Sequence[int] | None,
    ) -> None:  # fmt: skip
        self.index = index
        self.asked_s = asked_s  # for the first time
        self.came_s = asked_s  # this time: what it is promised counts from here
        self.lane = lane  # index into LANES
        self.tenant = tenant
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens  # the world's: no discipline but a clairvoyant one may look
        self.max_tokens = max_tokens
        self.ttft_s = ttft_s
        self.tpot_s = tpot_s
        self.due_s = asked_s + deadline_s
        self.session = session
        self.blocks = blocks
        self.first_s = math.nan
        self.made = 0  # tokens that the caller has
        self.recomputed = 0
        self.retries = 0
        self.starts = 0
        self.where: Worker | None = None
        self.work: Work | None = None
        self.warming = False  # its work is a part of its prompt, not the request
        self.mind: Any = None  # what a discipline keeps with it


def tickets(trace: Trace, begin: int, end: int) -> Iterator[Ticket]:
    prefixes = trace.prefixes
    columns = (
        trace.arrival_s, trace.lane, trace.tenant, trace.prompt_tokens, trace.output_tokens, trace.max_tokens,
        trace.ttft_s, trace.tpot_s, trace.deadline_s, trace.session,
    )  # fmt: skip
    rows: Iterable[tuple[Any, ...]] = zip(*(column[begin:end].tolist() for column in columns), strict=True)
    for index, row in enumerate(rows, begin):
        blocks = prefixes.of(index).tolist() if prefixes is not None else None
        yield Ticket(index, *row, blocks=blocks)


def next_turns(trace: Trace) -> dict[int, int]:
    """Of each turn of a session the one after it."""
    before: dict[int, int] = {}
    following: dict[int, int] = {}
    for index in np.flatnonzero(trace.session != NO_SESSION).tolist():
        session = int(trace.session[index])
        if session in before:
            following[before[session]] = index
        before[session] = index
    return following
