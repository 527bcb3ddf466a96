"""What was pulled and does not fit yet: at most one job a lane, unclaimed, waiting for KV or for the gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog

from laneway.core.clock import Clock
from laneway.core.job import QueuedJob
from laneway.core.lanes import Lane
from laneway.runtime.bus import BusError
from laneway.runtime.puller import Delivery
from laneway.workers.ackwait import AckWait
from laneway.workers.claims import Nak
from laneway.workers.deliveries import answer
from laneway.workers.floor import Floor
from laneway.workers.ledger import KvAsk

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Staged:
    delivery: Delivery
    job: QueuedJob
    ask: KvAsk
    ack_wait: AckWait
    since_s: float  # monotonic: when it was first heard of, as far as is known
    relieved: bool = False  # a run yields to it


class Staging:
    """Owns the staged jobs."""

    def __init__(
        self, floor: Floor, clock: Clock, ack_wait_s: Mapping[Lane, float], engine_steps: Callable[[], int]
    ) -> None:
        self._floor = floor
        self._clock = clock
        self._ack_wait_s = ack_wait_s
        self._engine_steps = engine_steps
        self._jobs: dict[Lane, Staged] = {}

    @property
    def jobs(self) -> Mapping[Lane, Staged]:
        return self._jobs

    def put(self, lane: Lane, delivery: Delivery, job: QueuedJob, ask: KvAsk, since_s: float) -> None:
        assert lane not in self._jobs, "at most one job a lane is staged"
        wait = AckWait.begin(self._ack_wait_s[lane], self._clock.monotonic(), self._engine_steps())
        self._jobs[lane] = Staged(delivery, job, ask, wait, since_s)

    def pop(self, lane: Lane) -> Staged:
        return self._jobs.pop(lane)

    def holder(self, job_id: str) -> Staged | None:
        return next((each for each in self._jobs.values() if each.job.record.job_id == job_id), None)

    async def look_after(self, paused: frozenset[Lane]) -> None:
        """Asks for time while the engine advances; gives back or ends what should not wait here any longer.

        Where nothing may start, because a suspect has the engine to itself or there is none, a job would be kept from
        workers that have room, for as long as that takes.
        """
        steps = self._engine_steps()
        for lane, staged in tuple(self._jobs.items()):
            if self._clock.now() >= staged.job.record.contract.deadline_s:
                del self._jobs[lane]
                self._floor.dispose_expired(staged.delivery, staged.job)
            elif lane in paused:
                await self.give_back(lane, "paused")
            elif not self._floor.may_start():
                await self.give_back(lane, "nothing_may_start")
            elif staged.ack_wait.ask(self._clock.monotonic(), steps):
                try:
                    await staged.delivery.progress()
                except BusError as error:
                    _log.warning("progress_not_sent", job_id=staged.job.record.job_id, reason=error.reason)

    async def unstage(self, job_id: str) -> None:
        """Gives a staged job back, because somebody ended it: its next delivery finds the record terminal."""
        for lane, staged in tuple(self._jobs.items()):
            if staged.job.record.job_id == job_id:
                await self.give_back(lane, "ended")

    async def give_back_all(self, reason: str) -> None:
        for lane in tuple(self._jobs):
            await self.give_back(lane, reason)

    async def give_back(self, lane: Lane, reason: str) -> None:
        staged = self._jobs.pop(lane, None)
        if staged is not None:
            await answer(staged.delivery, Nak(0.0, reason))
