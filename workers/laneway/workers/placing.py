"""Where pulled jobs go: into the engine, among the staged, back to their lane, or to their end.

Owns whose turn it is between the lanes, since it counts what was started, and how long priority waited before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from laneway.core.clock import Clock
from laneway.core.job import QueuedJob
from laneway.core.lanes import Lane
from laneway.policy.overload import OverloadParams, Waits, overloaded
from laneway.policy.pull import LaneView, PullParams, Turns, floor_is_due, started
from laneway.runtime.bells import is_due
from laneway.runtime.puller import Delivery
from laneway.runtime.wire.reading import UnreadableMessage
from laneway.workers.claims import Nak
from laneway.workers.deliveries import answer
from laneway.workers.floor import Floor, Gate, Holder
from laneway.workers.held import HELD_PULL_S
from laneway.workers.ledger import KvAsk, Seats
from laneway.workers.sources import Source
from laneway.workers.staging import Staging

NOT_DUE_S = 1.0  # a job that the floor took too early goes to the lane's end for so long, if it is not due before


class Placing:
    """`may_start`: whether jobs may start here at all. `waiting_s`: how long priority may have waited for a pull."""

    def __init__(
        self,
        seats: Seats,
        floor: Floor,
        gate: Gate,
        staging: Staging,
        clock: Clock,
        *,
        params: Callable[[], PullParams],
        overload: Callable[[], OverloadParams],
        ack_wait_s: Mapping[Lane, float],
        paused: Callable[[], frozenset[Lane]],
        may_start: Callable[[], bool],
        waiting_s: Callable[[], float],
        tpot_p95_s: Callable[[], float],
    ) -> None:
        self.turns = Turns()
        self._seats = seats
        self._floor = floor
        self._gate = gate
        self._staging = staging
        self._clock = clock
        self._params = params
        self._overload = overload
        self._ack_wait_s = ack_wait_s
        self._paused = paused
        self._may_start = may_start
        self._waiting_s = waiting_s
        self._tpot_p95_s = tpot_p95_s
        self._waits = Waits()

    async def start_staged(self, lane: Lane, views: list[LaneView]) -> None:
        staged = self._staging.jobs[lane]
        staged.ask = self._seats.ask(staged.job)  # longer answers may have been learned since it was put by
        if not self._seats.fits(staged.ask):
            return
        self._staging.pop(lane)
        if not await self._is_duplicate(staged.delivery, staged.job.record.job_id, lane):
            self._launch(staged.delivery, staged.job, views)

    def start_at_once(self, delivery: Delivery, views: Callable[[], list[LaneView]]) -> bool:
        """Starts a priority job in the turn of the loop that brought it; False where something is to be asked."""
        if delivery.deliveries > 1 or Lane.PRIORITY in self._paused() or not self._may_start():
            return False
        try:
            job = delivery.job
        except UnreadableMessage:
            return False
        contract, now_s = job.record.contract, self._clock.now()
        if self._holder(job.record.job_id) is not None or not contract.not_before_s <= now_s < contract.deadline_s:
            return False
        ask = self._seats.ask(job)
        if not (self._seats.can_ever_fit(ask) and self._seats.fits(ask)):
            return False
        self._hear_wait(delivery, job)
        self._launch(delivery, job, views())
        return True

    async def place_all(
        self, deliveries: list[Delivery], source: Source, views: list[LaneView], asked_s: float
    ) -> None:
        """`asked_s`: since when they may have been there (monotonic)."""
        for delivery in deliveries:
            if source.lane in self._paused():
                await answer(delivery, Nak(HELD_PULL_S, "paused"))
            elif self._may_start():
                await self._place(delivery, source, views, asked_s)
            else:
                await answer(delivery, Nak(0.0, "draining"))

    async def _place(self, delivery: Delivery, source: Source, views: list[LaneView], asked_s: float) -> None:
        try:
            job = delivery.job
        except UnreadableMessage as error:
            self._floor.dispose_unreadable(delivery, source.lane, str(error))
            return
        job_id = job.record.job_id
        if await self._is_duplicate(delivery, job_id, source.lane):
            return
        now_s = self._clock.now()
        contract = job.record.contract
        first = delivery.deliveries == 1  # otherwise the record decides
        if first and now_s >= contract.deadline_s:
            self._floor.dispose_expired(delivery, job)
        elif first and contract.not_before_s > now_s:
            await answer(delivery, Nak(min(3600.0, contract.not_before_s - now_s), "not_before"))
        else:
            await self._take(delivery, job, source, views, asked_s)

    async def _take(
        self, delivery: Delivery, job: QueuedJob, source: Source, views: list[LaneView], asked_s: float
    ) -> None:
        lane, ask = source.lane, self._seats.ask(job)
        self._hear_wait(delivery, job)
        if not self._seats.can_ever_fit(ask):
            self._floor.dispose_too_large(delivery, job)
        elif lane is not Lane.PRIORITY and self._too_early(delivery, job, views):
            source.due_looks -= 1
            left_s = job.record.latest_start_s - self._clock.now()
            await answer(delivery, Nak(min(NOT_DUE_S, left_s), "not_due"))
        elif self._has_room(lane, ask, views):
            self._launch(delivery, job, views)
        elif lane not in self._staging.jobs:
            self._staging.put(lane, delivery, job, ask, asked_s)
        else:
            await answer(delivery, Nak(0.0, "no_room"))

    def _too_early(self, delivery: Delivery, job: QueuedJob, views: list[LaneView]) -> bool:
        """Whether it has the floor's turn only because it might have been due."""
        due = job.record.contract.lane in self._due(views)
        return due and self.overloaded() and not self.is_due(delivery, job)

    def _has_room(self, lane: Lane, ask: KvAsk, views: list[LaneView]) -> bool:
        """Its size is known only now, and an earlier job of the same pull may have used up what the gate allows."""
        if not self._seats.fits(ask) or lane is Lane.PRIORITY:
            return self._seats.fits(ask)
        if lane in self._due(views):
            return self._gate.floor_places() > 0
        need = self._seats.need(ask)
        return self._gate.lower_places() > 0 and need + self.reserve(need) <= self._seats.kv_tokens_free

    def reserve(self, need: int) -> int:
        """KV that lower lanes leave free; less for a job which beside it would not fit into an empty engine."""
        return min(self._gate.reserved_kv_tokens(), self._seats.kv_tokens - need)

    def _launch(self, delivery: Delivery, job: QueuedJob, views: list[LaneView]) -> None:
        lane = job.record.contract.lane
        kept = lane is not Lane.PRIORITY and lane in self._due(views)
        self.turns = started(self.turns, lane, 1, views)
        self._floor.launch(delivery, job, kept=kept)

    def _due(self, views: list[LaneView]) -> frozenset[Lane]:
        return floor_is_due(views, self.turns, self._params(), overloaded=self.overloaded())

    def is_due(self, delivery: Delivery, job: QueuedJob) -> bool:
        """Whether its latest start has come."""
        return is_due(delivery.headers) or job.record.latest_start_s <= self._clock.now()

    def _hear_wait(self, delivery: Delivery, job: QueuedJob) -> None:
        """How long a priority job waited in its lane; later deliveries have other reasons."""
        contract, now_s = job.record.contract, self._clock.now()
        if contract.lane is Lane.PRIORITY and delivery.deliveries == 1:
            wait_s = now_s - max(delivery.stored_s, contract.not_before_s)
            self._waits.heard(wait_s, contract.ttft_target_s, self._clock.monotonic())

    def overloaded(self) -> bool:
        """Whether priority misses its targets here."""
        staged, now_s = self._staging.jobs.get(Lane.PRIORITY), self._clock.monotonic()
        waiting_s = self._waiting_s() if staged is None else now_s - staged.since_s
        return overloaded(
            self._waits, waiting_s=waiting_s, tpot_p95_s=self._tpot_p95_s(), now_s=now_s, params=self._overload()
        )

    async def _is_duplicate(self, delivery: Delivery, job_id: str, lane: Lane) -> bool:
        """Whether the job is held here already, by a run or staged.

        The same message delivered again replaces the older delivery. Another message with the same job waits until the
        job has ended: then its record says so.
        """
        holder = self._holder(job_id)
        if holder is None:
            return False
        if holder.delivery.stream_sequence == delivery.stream_sequence:
            holder.delivery = delivery
        else:
            await answer(delivery, Nak(self._ack_wait_s[lane], "duplicate"))
        return True

    def _holder(self, job_id: str) -> Holder | None:
        return self._floor.running(job_id) or self._staging.holder(job_id)
