"""What the fleet does during a replay, by polling the scheduler: workers, how busy they are, and what waits.

A scheduler that does not answer, or does not tell this caller, leaves a gap: the row's figures are nan. Tokens are
those that the callers got, by lane, and so are the device-seconds that they are worth.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from laneway.cli.replaying.notes import Notes
from laneway.client.values import LaneStatus, Worker
from laneway.core.errors import LanewayError
from laneway.core.lanes import LANES
from laneway.simulator.outcomes import Usage
from laneway.simulator.trace import Floats, Ints

EVERY_S = 5.0  # workers tell once a second how busy they were


class Scheduler(Protocol):
    """What of laneway.client.SchedulerClient is used here."""

    def list_workers(self) -> AsyncIterator[Worker]: ...

    def list_lanes(self) -> AsyncIterator[LaneStatus]: ...


@dataclass(slots=True)
class _Seen:
    """The fleet at one moment."""

    at_s: float
    tokens: Ints  # of each lane, so far
    device_s: Floats
    busy_s: dict[str, float] = field(default_factory=dict)  # by worker
    waiting: dict[str, int] = field(default_factory=dict)  # by lane
    kv: float = math.nan
    known: bool = False


class _Row(NamedTuple):
    """Of Usage, from one look to the next."""

    workers: float
    busy: float
    tokens: Ints
    device_s: Floats
    waiting: list[float]
    kv: float


class FleetWatch:
    """`pools`: those that serve the model."""

    def __init__(self, scheduler: Scheduler, pools: frozenset[str], notes: Notes, every_s: float = EVERY_S) -> None:
        self.trouble: LanewayError | None = None  # the last answer's
        self.workers = 0
        self._scheduler, self._pools, self._notes, self._every_s = scheduler, pools, notes, every_s
        self._looks = 0
        self._before: _Seen | None = None
        self._rows: list[_Row] = []

    async def run(self, begin_s: float) -> None:
        """Looks from `begin_s` on the loop's clock until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(max(0.0, begin_s + self._looks * self._every_s - loop.time()))
            await self.look()

    async def look(self) -> None:
        now_s, notes = asyncio.get_running_loop().time(), self._notes
        seen = _Seen(now_s, notes.lane_tokens.copy(), notes.lane_device_s.copy())
        try:
            workers = [worker async for worker in self._scheduler.list_workers() if worker.pool in self._pools]
            lanes = [lane async for lane in self._scheduler.list_lanes() if lane.pool in self._pools]
        except LanewayError as error:
            self.trouble = error
        else:
            self.trouble, self.workers, seen.known = None, len(workers), True
            seen.busy_s = {worker.worker_id: worker.busy_s for worker in workers}
            room = sum(worker.kv_tokens for worker in workers)
            seen.kv = sum(worker.kv_tokens_used for worker in workers) / room if room else 0.0
            for lane in lanes:
                seen.waiting[lane.lane] = seen.waiting.get(lane.lane, 0) + lane.ready + lane.parked
        if self._before is not None:
            self._rows.append(_row(self._before, seen))
        self._before = seen
        self._looks += 1

    def usage(self) -> Usage:
        """A row for each two looks that follow each other; the last may cover less time than the others."""
        shape = (len(self._rows), len(LANES))
        return Usage(
            every_s=self._every_s,
            workers=np.array([row.workers for row in self._rows], dtype=np.float64),
            busy=np.array([row.busy for row in self._rows], dtype=np.float64),
            tokens=np.array([row.tokens for row in self._rows], dtype=np.float64).reshape(shape),
            device_s=np.array([row.device_s for row in self._rows], dtype=np.float64).reshape(shape),
            waiting=np.array([row.waiting for row in self._rows], dtype=np.float64).reshape(shape),
            kv=np.array([row.kv for row in self._rows], dtype=np.float64),
        )


def _row(before: _Seen, after: _Seen) -> _Row:
    waiting = [float(before.waiting.get(lane, 0)) if before.known else math.nan for lane in LANES]
    return _Row(
        workers=float(len(before.busy_s)) if before.known else math.nan,
        busy=_busy(before, after),
        tokens=after.tokens - before.tokens,
        device_s=after.device_s - before.device_s,
        waiting=waiting,
        kv=before.kv,
    )


def _busy(before: _Seen, after: _Seen) -> float:
    """Share of the time of the workers that were there at both ends."""
    both = before.busy_s.keys() & after.busy_s.keys()
    span_s = after.at_s - before.at_s
    if not both or span_s <= 0.0:
        return math.nan
    spent_s = sum(after.busy_s[worker] - before.busy_s[worker] for worker in both)
    return min(1.0, max(0.0, spent_s / (span_s * len(both))))
