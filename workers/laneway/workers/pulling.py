"""Pulling: turns bells, freed room and the passage of time into pulls, and deliveries into runs.

Asks policy.pull what to do next until that says to rest, and does it. Sources owns where jobs come from, Staging what
was pulled and does not fit yet, HeldPulls the priority pulls that are open at the server; Placing puts what came where
it belongs. It never holds more than the engine can start, so whatever it cannot take stays in the lane for others.

While slots are free that lower lanes must leave to priority anyway, one pull of one priority job is held open for each,
from our own home slot and from `any`. All other pulls never wait.

Where there is no room for priority, and lower work could yield, a worker leaves the job to others for a moment; then it
pulls one, and lets one run yield to it. The run's place is the job's: while it is staged nothing else starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from laneway.core.clock import Clock
from laneway.core.lanes import LANES, Lane
from laneway.policy.overload import OverloadParams
from laneway.policy.pull import (
    LaneView,
    LetGo,
    MakeRoom,
    PullParams,
    Room,
    Start,
    lower_waits,
    next_step,
    short_of_room,
)
from laneway.policy.stealing import StealReason, Turn
from laneway.runtime.bells import Ring
from laneway.runtime.puller import Delivery
from laneway.workers.claims import Nak
from laneway.workers.deliveries import answer
from laneway.workers.floor import Floor, Gate, NoRelief, Relief
from laneway.workers.held import HeldPulls
from laneway.workers.ledger import Seats
from laneway.workers.placing import Placing
from laneway.workers.sources import LOOK_AGAIN_S, Source, Sources
from laneway.workers.staging import Staged, Staging

GRAIN_S = 0.001  # nobody waits for less


class PullLoop:
    """One for a worker. `run` pulls until cancelled; `pause` and `go_on` for drains."""

    def __init__(
        self,
        sources: Sources,
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
        overload: Callable[[], OverloadParams] = OverloadParams,
        tpot_p95_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`tpot_p95_s`: as priority has it here; 0: not measured."""
        self._sources = sources
        self._seats = seats
        self._floor = floor
        self._gate = gate
        self._params = params
        self._clock = clock
        self._fallback_s = fallback_s
        self._paused = paused
        self._relief = relief or NoRelief()
        self._staging = Staging(floor, clock, ack_wait_s, engine_steps)
        self._held = HeldPulls(clock, self.room_changed, self._start_at_once)
        self._placing = Placing(
            seats,
            floor,
            gate,
            self._staging,
            clock,
            params=params,
            overload=overload,
            ack_wait_s=ack_wait_s,
            paused=paused,
            may_start=self._may_pull,
            waiting_s=lambda: sources.waiting_s(Lane.PRIORITY, self._held.sources),
            tpot_p95_s=tpot_p95_s,
        )
        self._next: dict[Lane, Turn | None] = dict.fromkeys(LANES)  # where each lane's next pull goes, at the last look
        self._relief_from_s = 0.0  # monotonic; before that nobody yields
        self._look_in_s = fallback_s
        self._draining = False
        self._held_back = False  # at the last look the gate let no lower lane in
        self._wake = asyncio.Event()
        self._none_held = asyncio.Event()

    # --- what makes it look --------------------------------------------------------------------------

    def ring(self, ring: Ring) -> None:
        """A job became ready."""
        self._sources.ring(ring)
        self._wake.set()

    def room_changed(self) -> None:
        """Room was freed, a held pull ended, or there is a new plan."""
        self._wake.set()

    def engine_stepped(self) -> None:
        """A lower-lane job may have got its first token, which lets the next one start."""
        if self._held_back and self._gate.lower_places() > 0:
            self._wake.set()

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def home(self) -> str:
        """The home slot that this worker serves; empty: none."""
        return self._sources.home

    @property
    def staged(self) -> Mapping[Lane, Staged]:
        return self._staging.jobs

    async def look_after_staged(self) -> None:
        await self._staging.look_after(self._paused())

    async def unstage(self, job_id: str) -> None:
        await self._staging.unstage(job_id)

    async def pause(self) -> None:
        """No further pulls; what is staged goes back."""
        self._draining = True
        await self._staging.give_back_all("draining")
        self._wake.set()
        if self._held.sources:  # what they still bring goes back
            self._none_held.clear()
            await self._none_held.wait()

    def go_on(self) -> None:
        self._draining = False
        self._sources.look_everywhere()
        self._wake.set()

    async def run(self) -> None:
        looked_s = self._clock.monotonic()
        self._sources.look_everywhere()
        while True:
            self._wake.clear()
            await self._settle_homes()
            await self._take_held()
            await self._round()
            await self._hold()
            try:
                async with asyncio.timeout(self._look_in_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
            if self._clock.monotonic() - looked_s >= self._fallback_s:
                looked_s = self._clock.monotonic()
                self._sources.look_everywhere()

    # --- pulls that are held open ----------------------------------------------------------------------

    async def _settle_homes(self) -> None:
        """Takes on the home slot that the newest plan gives us. What we hold of another is let go first."""
        if self._sources.settled:
            return
        for source in self._sources.lost():
            if source in self._held.sources:
                await self._let_go(source)
        await self._sources.settle()

    async def _hold(self) -> None:
        """Holds as many priority pulls as there are slots for their jobs that nothing else may take."""
        most, now_s = self._held_most(), self._clock.monotonic()
        while self._held.slots > most:
            await self._let_go()
        for source in sorted(self._sources.ours(Lane.PRIORITY), key=lambda source: (source.held_s, source.home)):
            if len(self._held.sources) < most and source not in self._held.sources and now_s >= source.hold_from_s:
                self._held.hold(source)

    def _held_most(self) -> int:
        """One for each reserved slot, and for each that is free beyond the next one that a lower lane may take."""
        seats, lane, reserved = self._seats, Lane.PRIORITY, self._gate.reserved_slots()
        if reserved <= 0 or lane in self._staging.jobs or lane in self._paused() or not self._may_pull():
            return 0
        free = seats.slots_free
        if free <= 0 or seats.kv_tokens_free <= 0:
            return 0
        fit = 1 + max(0, seats.kv_tokens_free) // max(1, seats.largest)  # the last of them may have to be staged
        return min(free, fit, reserved + max(0, free - reserved - 1))

    def _start_at_once(self, source: Source, delivery: Delivery) -> bool:
        """Straight from the connection's read loop, where nothing is to be asked."""
        if not self._placing.start_at_once(delivery, self._views):
            return False
        source.hint = delivery.pending > 0
        return True

    async def _take_held(self) -> None:
        """Starts what held pulls brought. Whether more waits is known from their deliveries."""
        for source in self._held.ended():
            deliveries = await self._held.collect(source, self._fallback_s)
            if deliveries:
                source.hint = deliveries[-1].pending > 0
            now_s = self._clock.monotonic()
            if deliveries and not self._seats.slots_free:  # something else took its slot: another worker may have one
                await answer(deliveries[0], Nak(0.0, "no_room"))
                source.want(now_s)
            elif deliveries:
                await self._placing.place_all(deliveries, source, self._views(), now_s)
        if not self._held.sources:
            self._none_held.set()

    async def _let_go(self, source: Source | None = None) -> None:
        """One held pull, if there is any: what it brought meanwhile starts."""
        self._held.let_go(source)
        await self._take_held()

    # --- the loop's step -----------------------------------------------------------------------------

    async def _round(self) -> None:
        self._look_in_s = self._fallback_s
        while self._may_pull():
            views = self._views()
            room = self._room(views)
            step = next_step(views, room, self._placing.turns, self._params())
            self._held_back = lower_waits(views) and room.lower_places <= 0
            if step is None:
                self._look_with_others(views, room)
                return
            if isinstance(step, Start):
                await self._placing.start_staged(step.lane, views)
            elif isinstance(step, MakeRoom):
                await self._make_room()
            elif isinstance(step, LetGo):
                await self._let_go()
            else:
                await self._pull(step.lane, step.batch, views)

    def _look_with_others(self, views: list[LaneView], room: Room) -> None:
        """When room or jobs for us may come without a sound."""
        looks = []
        if lower_waits(views):
            looks.append(self._gate.look_in_s())
        if room.slots > 0:
            looks.append(self._sources.look_in_s())
        for look_in_s in looks:
            if look_in_s is not None:
                self._look_in_s = min(self._look_in_s, max(GRAIN_S, look_in_s))

    async def _make_room(self) -> None:
        """One run for one priority job. Where none would do, the job is not kept from other workers."""
        staged = self._staging.jobs[Lane.PRIORITY]
        if self._relief.make_room(self._seats.need(staged.ask), staged.job.record.job_id):
            staged.relieved = True
            return
        self._relief_from_s = self._clock.monotonic() + self._fallback_s
        if not self._seats.slots_free:
            await self._staging.give_back(Lane.PRIORITY, "no_room")
            self._sources.hint_lane(Lane.PRIORITY)

    def _yields(self, views: list[LaneView], room: Room) -> bool:
        """Whether a run may yield to priority now; when not yet, the loop looks again in time."""
        staged = self._staging.jobs.get(Lane.PRIORITY)
        if not short_of_room(views, room) or (staged is not None and staged.relieved):
            return False
        wait_s = self._relief.wait_s(staged=staged is not None)
        if wait_s is None:
            return False
        since_s = staged.since_s if staged is not None else self._sources.wanted_since_s(Lane.PRIORITY)
        left_s = max(since_s + wait_s, self._relief_from_s) - self._clock.monotonic()
        if left_s < GRAIN_S:
            return True
        self._look_in_s = min(self._look_in_s, left_s)
        return False

    async def _pull(self, lane: Lane, batch: int, views: list[LaneView]) -> None:
        turn = self._next[lane]
        assert turn is not None, "the lane has a source that may hold a job"
        source = self._sources.source(lane, turn.home)
        if turn.reason is StealReason.WAITED:
            batch = 1  # the rest may still meet its caches
            source.looks = 0  # its bell was long ago
        if lane is Lane.PRIORITY and not self._seats.slots_free:  # it was there long ago, or is another's by now
            source.looks = 0
        asked_s = source.wanted_s
        source.hint = False  # before the pull: a bell during it counts
        puller = await self._sources.puller(source)
        deliveries = await puller.pull(batch)
        source.hear_trouble()
        source.turn_s = self._clock.monotonic()
        if len(deliveries) == batch and deliveries[-1].pending > 0:
            source.hint = True
        elif not deliveries and source.looks:
            asyncio.get_running_loop().call_later(LOOK_AGAIN_S[-source.looks], self._look_again, source)
            source.looks -= 1
        if not deliveries or deliveries[-1].pending == 0:
            source.due_looks = 0
        source.misses = source.misses + 1 if turn.reason is StealReason.WAITED and not deliveries else 0
        for delivery in deliveries:
            delivery.steal = turn.reason.value if turn.reason is not None else ""
        await self._placing.place_all(deliveries, source, views, asked_s)

    def _look_again(self, source: Source) -> None:
        source.want(self._clock.monotonic())
        self._wake.set()

    def _may_pull(self) -> bool:
        return not self._draining and self._floor.may_start()

    def _views(self) -> list[LaneView]:
        paused, held, staging = self._paused(), self._held.sources, self._staging.jobs
        views = []
        for lane in LANES:
            turn = self._next[lane] = self._sources.turn(lane, held, self._idle)
            staged, tokens, due = staging.get(lane), None, False
            if staged is not None:
                tokens, due = self._seats.need(staged.ask), self._placing.is_due(staged.delivery, staged.job)
            elif turn is not None:
                due = self._sources.may_be_due(lane)
            views.append(LaneView(lane, turn is not None, lane in paused, tokens, due))
        return views

    def _idle(self) -> bool:
        return self._seats.slots_free > 0 and self._seats.kv_tokens_free > 0

    def _room(self, views: list[LaneView]) -> Room:
        """What concerns lower lanes alone is asked only where one waits: it is not free, and priority is in a hurry."""
        seats, gate, lower = self._seats, self._gate, lower_waits(views)
        room = Room(
            seats.slots_free,
            seats.kv_tokens_free,
            seats.largest,
            lower_places=gate.lower_places() if lower else 0,
            floor_places=gate.floor_places() if lower else 0,
            reserved_slots=gate.reserved_slots(),
            reserved_kv_tokens=self._placing.reserve(
                max(v.staged_tokens or 0 for v in views if v.lane is not Lane.PRIORITY)
            ),
            held=self._held.slots,
            overloaded=lower and self._placing.overloaded(),
        )
        return replace(room, yields=True) if self._yields(views, room) else room
