"""Pulling: turns bells, freed room and the passage of time into pulls, and deliveries into runs.

Owns which lanes may hold jobs, whose turn it is, and the at most one *staged* delivery a lane: pulled, not claimed,
waiting for KV. What to do next is policy.pull's decision; this module asks it until it says to rest. It never holds
more than the engine can start, so whatever it cannot take stays in the lane for other workers.

While a slot is free that lower lanes must leave to priority anyway, one pull of one priority job is held open at the
server: such a job needs no bell and no further round trip. All other pulls never wait.

Where there is no room for priority, and lower work could yield, a worker leaves the job to others for a moment; then it
pulls one, and lets one run yield to it. The run's place is the job's: while it is staged nothing else starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog
from msgspec.structs import replace

from laneway.core.clock import Clock
from laneway.core.job import QueuedJob
from laneway.core.lanes import LANES, Lane
from laneway.policy.pull import (
    LaneView,
    MakeRoom,
    PullParams,
    Room,
    Start,
    Turns,
    floor_is_due,
    next_step,
    short_of_room,
    started,
)
from laneway.runtime.bus import BusError
from laneway.runtime.puller import Delivery, LanePuller
from laneway.runtime.wire.reading import UnreadableMessage
from laneway.workers.ackwait import AckWait
from laneway.workers.claims import Nak
from laneway.workers.deliveries import answer
from laneway.workers.floor import Floor, Gate, Holder, NoRelief, Relief
from laneway.workers.ledger import KvAsk, Seats

# A bell may be ahead of its message: about one pull in 800 made at once after it finds nothing (measured on nats-server
# 2.15.1). So a rung lane that looks empty is looked at again, without waiting for it: others may have taken the job.
LOOK_AGAIN_S = (0.002, 0.015)
GRAIN_S = 0.001  # nobody waits for less
HELD_PULL_S = 1.0  # how long the server holds a priority pull; a pause or drain takes effect within this

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Staged:
    delivery: Delivery
    job: QueuedJob
    ask: KvAsk
    ack_wait: AckWait
    since_s: float  # monotonic: when it was first heard of, as far as is known
    relieved: bool = False  # a run yields to it


class PullLoop:
    """One for a worker. `run` pulls until cancelled; `pause` and `go_on` for drains."""

    def __init__(
        self,
        pullers: Mapping[Lane, LanePuller],
        seats: Seats,
        floor: Floor,
        gate: Gate,
        params: Callable[[], PullParams],
        clock: Clock,
        *,
        ack_wait_s: Mapping[Lane, float],
        fallback_s: float,
        paused: Callable[[], frozenset[Lane]],
        engine_steps: Callable[[], int],
        relief: Relief | None = None,
    ) -> None:
        self._pullers = pullers
        self._seats = seats
        self._floor = floor
        self._gate = gate
        self._params_now = params
        self._clock = clock
        self._ack_wait_s = ack_wait_s
        self._fallback_s = fallback_s
        self._paused = paused
        self._engine_steps = engine_steps
        self._relief = relief or NoRelief()
        self._hints = dict.fromkeys(LANES, True)
        self._wanted_s = clock.monotonic()  # since when priority may have work here
        self._asked_s = self._wanted_s  # the same of the job that the last pull asked for
        self._relief_from_s = 0.0  # monotonic; before that nobody yields
        self._look_in_s = fallback_s
        self._looks = dict.fromkeys(LANES, 0)  # how often a rung lane may still be looked at again
        self._trouble = dict.fromkeys(LANES, "")
        self._staged: dict[Lane, Staged] = {}
        self._turns = Turns()
        self._draining = False
        self._held_back = False  # at the last look the gate let no lower lane in
        self._wake = asyncio.Event()
        self._holding = False  # a priority pull is open at the server, or what it brought was not looked at yet
        self._held_ended = asyncio.Event()
        self._hold_from_s = 0.0  # monotonic

    @property
    def _params(self) -> PullParams:
        return self._params_now()

    # --- what makes it look --------------------------------------------------------------------------

    def ring(self, lane: Lane) -> None:
        """A job became ready in this lane."""
        self._looks[lane] = len(LOOK_AGAIN_S)
        self._look(lane)

    def _look(self, lane: Lane) -> None:
        self._hint(lane)
        self._wake.set()

    def ring_all(self) -> None:
        self._hint(*LANES)
        self._wake.set()

    def _hint(self, *lanes: Lane) -> None:
        for lane in lanes:
            if lane is Lane.PRIORITY and not self._hints[lane]:
                self._wanted_s = self._clock.monotonic()
            self._hints[lane] = True

    def room_changed(self) -> None:
        """Room was freed, or a lane was paused or resumed."""
        self._wake.set()

    def engine_stepped(self) -> None:
        """A lower-lane job may have got its first token, which lets the next one start."""
        if self._held_back and self._gate.lower_places() > 0:
            self._wake.set()

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def staged(self) -> Mapping[Lane, Staged]:
        return self._staged

    async def pause(self) -> None:
        """No further pulls; what is staged goes back."""
        self._draining = True
        for lane in tuple(self._staged):
            await self._give_back(lane, "draining")
        if self._holding:  # what it still brings goes back
            self._held_ended.clear()
            await self._held_ended.wait()

    def go_on(self) -> None:
        self._draining = False
        self.ring_all()

    async def run(self) -> None:
        looked_s = self._clock.monotonic()
        while True:
            self._wake.clear()
            await self._take_held()
            await self._round()
            self._hold()
            try:
                async with asyncio.timeout(self._look_in_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
            if self._clock.monotonic() - looked_s >= self._fallback_s:  # bells may be lost, and delays make no sound
                looked_s = self._clock.monotonic()
                self._hint(*LANES)

    # --- the loop's step -----------------------------------------------------------------------------

    def _hold(self) -> None:
        """Opens a priority pull at the server, if there is a slot for its job that nothing else may take."""
        seats, lane = self._seats, Lane.PRIORITY
        room = self._gate.reserved_slots() > 0 and seats.slots_free > 0 and seats.kv_tokens_free > 0
        busy = self._holding or lane in self._staged or lane in self._paused()
        if room and not busy and self._may_pull() and self._clock.monotonic() >= self._hold_from_s:
            self._holding = True
            self._pullers[lane].hold(HELD_PULL_S, self._wake.set, self._start_at_once)

    def _start_at_once(self, delivery: Delivery) -> bool:
        """Starts what the held pull brought, in the turn of the loop that brought it, where nothing is to be asked."""
        if delivery.deliveries > 1 or Lane.PRIORITY in self._paused() or not self._may_pull():
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
        self._hints[Lane.PRIORITY] = delivery.pending > 0
        self._launch(delivery, job, self._views())
        return True

    async def _take_held(self) -> None:
        """Starts what the held pull brought. Whether more waits is known from its delivery."""
        puller = self._pullers[Lane.PRIORITY]
        if not self._holding or puller.held:
            return
        deliveries = await puller.collect()
        self._holding = False
        self._hear_trouble(Lane.PRIORITY)
        if puller.trouble:  # it may have ended at once, and so would the next
            self._hold_from_s = self._clock.monotonic() + self._fallback_s
        if deliveries:
            self._hints[Lane.PRIORITY] = deliveries[-1].pending > 0
        self._asked_s = self._clock.monotonic()
        if deliveries and not self._seats.slots_free:  # a due floor took the slot: another worker may have one
            await answer(deliveries[0], Nak(0.0, "no_room"))
            self._hint(Lane.PRIORITY)
        else:
            await self._place_all(deliveries, Lane.PRIORITY, self._views())
        self._held_ended.set()

    async def _round(self) -> None:
        self._look_in_s = self._fallback_s
        while self._may_pull():
            views = self._views()
            room = self._room(views)
            step = next_step(views, room, self._turns, self._params)
            self._held_back = room.lower_places <= 0
            if step is None:
                self._look_with_the_gate(views)
                return
            if isinstance(step, Start):
                staged = self._staged.pop(step.lane)
                if not await self._is_duplicate(staged.delivery, staged.job.record.job_id, step.lane):
                    self._launch(staged.delivery, staged.job, views)
            elif isinstance(step, MakeRoom):
                await self._make_room()
            else:
                await self._pull(step.lane, step.batch, views)

    def _look_with_the_gate(self, views: list[LaneView]) -> None:
        look_in_s = self._gate.look_in_s() if any(v.wants for v in views if v.lane is not Lane.PRIORITY) else None
        if look_in_s is not None:
            self._look_in_s = min(self._look_in_s, max(GRAIN_S, look_in_s))

    async def _make_room(self) -> None:
        """One run for one priority job. Where none would do, the job is not kept from other workers."""
        staged = self._staged[Lane.PRIORITY]
        if self._relief.make_room(self._seats.need(staged.ask), staged.job.record.job_id):
            staged.relieved = True
            return
        self._relief_from_s = self._clock.monotonic() + self._fallback_s
        if not self._seats.slots_free:
            await self._give_back(Lane.PRIORITY, "no_room")
            self._hint(Lane.PRIORITY)

    def _yields(self, views: list[LaneView], room: Room) -> bool:
        """Whether a run may yield to priority now; when not yet, the loop looks again in time."""
        staged = self._staged.get(Lane.PRIORITY)
        if not short_of_room(views, room) or (staged is not None and staged.relieved):
            return False
        wait_s = self._relief.wait_s(staged=staged is not None)
        if wait_s is None:
            return False
        since_s = staged.since_s if staged is not None else self._wanted_s
        left_s = max(since_s + wait_s, self._relief_from_s) - self._clock.monotonic()
        if left_s < GRAIN_S:
            return True
        self._look_in_s = min(self._look_in_s, left_s)
        return False

    async def _pull(self, lane: Lane, batch: int, views: list[LaneView]) -> None:
        if lane is Lane.PRIORITY:
            self._asked_s = self._wanted_s
            if not self._seats.slots_free:  # the message was there long ago, or is another's by now
                self._looks[lane] = 0
        self._hints[lane] = False  # before the pull: a bell during it counts
        puller = self._pullers[lane]
        deliveries = await puller.pull(batch)
        self._hear_trouble(lane)
        if len(deliveries) == batch and deliveries[-1].pending > 0:
            self._hints[lane] = True
        elif not deliveries and self._looks[lane]:
            asyncio.get_running_loop().call_later(LOOK_AGAIN_S[-self._looks[lane]], self._look, lane)
            self._looks[lane] -= 1
        await self._place_all(deliveries, lane, views)

    def _hear_trouble(self, lane: Lane) -> None:
        trouble = self._pullers[lane].trouble
        if trouble and trouble != self._trouble[lane]:
            _log.warning("pull_failed", lane=lane.value, reason=trouble)
        self._trouble[lane] = trouble

    async def _place_all(self, deliveries: list[Delivery], lane: Lane, views: list[LaneView]) -> None:
        for delivery in deliveries:
            if lane in self._paused():
                await answer(delivery, Nak(HELD_PULL_S, "paused"))
            elif self._may_pull():
                await self._place(delivery, lane, views)
            else:
                await answer(delivery, Nak(0.0, "draining"))

    async def _place(self, delivery: Delivery, lane: Lane, views: list[LaneView]) -> None:
        try:
            job = delivery.job
        except UnreadableMessage as error:
            self._floor.dispose_unreadable(delivery, lane, str(error))
            return
        job_id = job.record.job_id
        if await self._is_duplicate(delivery, job_id, lane):
            return
        now_s = self._clock.now()
        contract = job.record.contract
        first = delivery.deliveries == 1  # otherwise the record decides
        if first and now_s >= contract.deadline_s:
            self._floor.dispose_expired(delivery, job)
        elif first and contract.not_before_s > now_s:
            await answer(delivery, Nak(min(3600.0, contract.not_before_s - now_s), "not_before"))
        else:
            await self._take(delivery, job, lane, views)

    async def _take(self, delivery: Delivery, job: QueuedJob, lane: Lane, views: list[LaneView]) -> None:
        ask = self._seats.ask(job)
        if not self._seats.can_ever_fit(ask):
            self._floor.dispose_too_large(delivery, job)
        elif self._has_room(lane, ask, views):
            self._launch(delivery, job, views)
        elif lane not in self._staged:
            now_s = self._clock.monotonic()
            wait = AckWait.begin(self._ack_wait_s[lane], now_s, self._engine_steps())
            self._staged[lane] = Staged(delivery, job, ask, wait, self._asked_s)
        else:
            await answer(delivery, Nak(0.0, "no_room"))

    def _has_room(self, lane: Lane, ask: KvAsk, views: list[LaneView]) -> bool:
        """Its size is known only now, and an earlier job of the same pull may have used up what the gate allows."""
        if not self._seats.fits(ask) or lane is Lane.PRIORITY:
            return self._seats.fits(ask)
        if floor_is_due(views, self._turns, self._params):
            return self._gate.floor_places() > 0
        need = self._seats.need(ask)
        return self._gate.lower_places() > 0 and need + self._reserve(need) <= self._seats.kv_tokens_free

    def _reserve(self, need: int) -> int:
        """KV that lower lanes leave free; less for a job which beside it would not fit into an empty engine."""
        return min(self._gate.reserved_kv_tokens(), self._seats.kv_tokens - need)

    def _launch(self, delivery: Delivery, job: QueuedJob, views: list[LaneView]) -> None:
        lane = job.record.contract.lane
        kept = lane is not Lane.PRIORITY and floor_is_due(views, self._turns, self._params)
        self._turns = started(self._turns, lane, 1, views)
        self._floor.launch(delivery, job, kept=kept)

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
        staged = (each for each in self._staged.values() if each.job.record.job_id == job_id)
        return self._floor.running(job_id) or next(staged, None)

    def _may_pull(self) -> bool:
        return not self._draining and self._floor.may_start()

    def _views(self) -> list[LaneView]:
        paused = self._paused()
        held = {Lane.PRIORITY} if self._holding else set()  # open at the server: no need to ask
        return [
            LaneView(
                lane,
                self._hints[lane] and lane not in held,
                lane in paused,
                self._seats.need(self._staged[lane].ask) if lane in self._staged else None,
            )
            for lane in LANES
        ]

    def _room(self, views: list[LaneView]) -> Room:
        seats, gate = self._seats, self._gate
        room = Room(
            seats.slots_free,
            seats.kv_tokens_free,
            seats.largest,
            lower_places=gate.lower_places(),
            floor_places=gate.floor_places(),
            reserved_slots=gate.reserved_slots(),
            reserved_kv_tokens=self._reserve(max(v.staged_tokens or 0 for v in views if v.lane is not Lane.PRIORITY)),
        )
        return replace(room, yields=True) if self._yields(views, room) else room

    # --- what is staged ------------------------------------------------------------------------------

    async def look_after_staged(self) -> None:
        """Asks for time while the engine advances; gives back or ends what should not wait here any longer.

        Where nothing may start, because a suspect has the engine to itself or there is none, a job would be kept from
        workers that have room, for as long as that takes.
        """
        paused, steps = self._paused(), self._engine_steps()
        for lane, staged in tuple(self._staged.items()):
            if self._clock.now() >= staged.job.record.contract.deadline_s:
                del self._staged[lane]
                self._floor.dispose_expired(staged.delivery, staged.job)
            elif lane in paused:
                await self._give_back(lane, "paused")
            elif not self._floor.may_start():
                await self._give_back(lane, "nothing_may_start")
            elif staged.ack_wait.ask(self._clock.monotonic(), steps):
                try:
                    await staged.delivery.progress()
                except BusError as error:
                    _log.warning("progress_not_sent", job_id=staged.job.record.job_id, reason=error.reason)

    async def unstage(self, job_id: str) -> None:
        """Gives a staged job back, because somebody ended it: its next delivery finds the record terminal."""
        for lane, staged in tuple(self._staged.items()):
            if staged.job.record.job_id == job_id:
                await self._give_back(lane, "ended")

    async def _give_back(self, lane: Lane, reason: str) -> None:
        staged = self._staged.pop(lane, None)
        if staged is not None:
            await answer(staged.delivery, Nak(0.0, reason))
