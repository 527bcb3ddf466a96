"""What all rivals have in common: one central queue, and a request that starts where it fits and is answered soonest.

A rival says who is next (`make_order`), how much room a lane has at a worker (`slots`, `kv`), who makes room
for it (`make_room`) and whom it lets in (`admits`). The rest is here, the same and as good for each of them:

- Work conserving: nothing waits while a worker has room for it that its rule does not keep.
- KV is set aside as the engine does it (prompt and `max_tokens`; in a paged engine the prompt and the answer that its
  lane makes on average), so that the engine's own queue stays empty unless a rival means it to be used.
- A request that fits nowhere is not passed over for ever: the worker with most free KV takes nobody after it in the
  order until it fits there; all other workers go on.
- An engine that has prompts enough to compute is given no more (SkyLB's selective pushing): what waits stays within
  reach of the order, and goes to whichever engine is through first.
- Of the workers with room the one that will give the first token soonest, prefixes that were sent there counted.
- A request that was not begun by its deadline is dropped: it is of no use to anybody.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Generic, TypeVar

from laneway.core.fleet import StepTimes
from laneway.core.lanes import LANES
from laneway.simulator.rivals.order import Order
from laneway.simulator.rivals.params import Common
from laneway.simulator.rivals.station import Seat, Station
from laneway.simulator.ticket import Ticket
from laneway.simulator.world import Worker, World

P = TypeVar("P", bound=Common)

PLENTY = 1 << 40  # room that is not counted
LENGTHS_KNOWN = 20  # answers of a lane from which its mean length is believed


class Rival(Generic[P]):
    name = ""

    def __init__(self, times: StepTimes, params: P) -> None:
        """`times`: of the engine's profile, at the chunk of `params`."""
        self.times = times
        self.params = params
        self.inflight = [0] * len(LANES)  # in engines, by lane
        self._came = 0
        self._dues: list[tuple[float, int, Ticket]] = []
        self._lengths = [(0, 0)] * len(LANES)  # answers and their tokens
        self._dispatching = False

    # --- what makes the rival ----------------------------------------------------------------------------

    def make_order(self) -> Order:
        raise NotImplementedError

    def admits(self, ticket: Ticket) -> bool:
        """Whether it is let in; else it is refused."""
        return True

    def slots(self, station: Station, lane: int) -> int:
        """How many more requests of the lane may start there."""
        return 0 if self.prefills(station) else station.slots_free

    def prefills(self, station: Station, less_tokens: int = 0) -> bool:
        """Its engine has prompts enough to compute: what is pushed now would wait there, out of the order's reach.

        `less_tokens`: of those that would leave it.
        """
        pending = self.params.pending_tokens
        return bool(pending) and sum(station.prefill_tokens) - less_tokens >= pending

    def kv(self, station: Station, lane: int) -> int:
        """KV blocks that a request of the lane may get there."""
        return station.blocks_free

    def make_room(self, ticket: Ticket) -> Station | None:
        """The head fits nowhere: a station where others yielded to it, so that now it does."""
        return None

    def closes(self, lane: int, lanes: Sequence[int]) -> list[int]:
        """The lanes that may go on when the head's lane has no room: all others."""
        return [each for each in lanes if each != lane]

    def first_token_s(self, station: Station, ticket: Ticket, prefill_tokens: int) -> float:
        return station.first_token_s(prefill_tokens)

    def engine_priority(self, ticket: Ticket) -> float:
        return 0.0

    def started(self, ticket: Ticket, station: Station) -> None:
        """It was given to an engine."""

    def stopped(self, ticket: Ticket) -> None:
        """It left an engine, done or not; its caller has `ticket.made` tokens now."""

    def over(self, ticket: Ticket) -> None:
        """It was let in, and has ended one way or another."""

    # --- the world's calls -------------------------------------------------------------------------------

    def begin(self, world: World) -> None:
        self.world = world
        self.order = self.make_order()
        for worker in world.workers:
            self._equip(worker)

    def arrive(self, ticket: Ticket) -> None:
        if ticket.mind is None:
            self._came += 1
            ticket.mind = Seat(self._came)
        if not self._fits_ever(ticket) or not self.admits(ticket):
            self.world.count("refused")
            self.world.refuse(ticket)
            return
        if ticket.due_s < math.inf:
            heapq.heappush(self._dues, (ticket.due_s, ticket.mind.order, ticket))
        self.order.put(ticket)
        self.dispatch()

    def first(self, ticket: Ticket) -> None:
        seat: Seat = ticket.mind
        if seat.station is not None:
            seat.station.begin(ticket, self.world.now_s)

    def sliced(self, ticket: Ticket, worker: Worker) -> None:
        raise AssertionError("no rival computes prompts in parts")

    def ended(self, ticket: Ticket, worker: Worker) -> None:
        seat: Seat = ticket.mind
        if seat.station is None:
            return
        self._vacate(ticket)
        if ticket.made >= ticket.output_tokens:
            count, tokens = self._lengths[ticket.lane]
            self._lengths[ticket.lane] = count + 1, tokens + ticket.made
        else:
            seat.gone = True
        self.over(ticket)

    def left(self, ticket: Ticket) -> None:
        seat: Seat = ticket.mind
        seat.gone = True
        self.over(ticket)
        if seat.waits:
            self.order.take(ticket)
            self.dispatch()

    def lost(self, tickets: Sequence[Ticket], worker: Worker) -> None:
        for ticket in list(worker.mind.running):
            self._vacate(ticket)
        for ticket in tickets:
            if not ticket.mind.gone:
                self._again(ticket)
        self.dispatch()

    def joined(self, worker: Worker) -> None:
        self._equip(worker)
        self.dispatch()

    def stepped(self, worker: Worker) -> None:
        self.dispatch()

    def tick(self) -> None:
        self._expire()
        self.dispatch()

    def waiting(self) -> Sequence[int]:
        """Those in engines without a token yet wait too."""
        counts = self.order.counts()
        for station in self.stations():
            counts = [count + there for count, there in zip(counts, station.waiting, strict=True)]
        return counts

    def parameters(self) -> dict[str, float | str | bool]:
        return {field.name: getattr(self.params, field.name) for field in fields(self.params)}

    # --- starting ----------------------------------------------------------------------------------------

    def stations(self) -> list[Station]:
        return [worker.mind for worker in self.world.workers]

    def dispatch(self) -> None:
        """Starts what may start now."""
        if self._dispatching:
            return
        self._dispatching = True
        try:
            for ticket in self._round():
                self.order.put_back(ticket)
        finally:
            self._dispatching = False

    def _round(self) -> list[Ticket]:
        """Those that were taken from the order and found no room."""
        stations, aside = self.stations(), list[Ticket]()
        lanes = list(range(len(LANES)))
        while lanes and stations:
            ticket = self.order.head(lanes)
            if ticket is None:
                break
            lane = ticket.lane
            rooms = [station for station in stations if self.slots(station, lane) > 0]
            need = self.need(ticket, stations[0])
            fits = [each for each in rooms if self.kv(each, lane) >= need or not each.running]
            if fits:
                self._start(ticket, self._soonest(fits, ticket), need)
            elif (station := self.make_room(ticket)) is not None:
                self._start(ticket, station, need)
            elif rooms:
                self.order.take(ticket)
                aside.append(ticket)
                stations.remove(self._freest(rooms, lane))
            else:
                lanes = self.closes(lane, lanes)
        return aside

    def _freest(self, stations: list[Station], lane: int) -> Station:
        return max(stations, key=lambda station: self.kv(station, lane))

    def need(self, ticket: Ticket, station: Station) -> int:
        """KV blocks that are set aside for it, at any station alike."""
        answer = ticket.max_tokens
        if station.worker.engine.paged:
            answer = max(ticket.made + 1, self.expected_tokens(ticket))
        return -(-(ticket.prompt_tokens + answer) // station.block_tokens)

    def _fits_ever(self, ticket: Ticket) -> bool:
        """An engine is asked for room for all that the caller allows, paged or not."""
        tokens = ticket.prompt_tokens + ticket.max_tokens
        return all(tokens <= worker.engine.kv_tokens for worker in self.world.workers[:1])

    def expected_tokens(self, ticket: Ticket) -> int:
        """Of its answer: the mean of its lane; at first what its caller allows."""
        count, tokens = self._lengths[ticket.lane]
        return min(ticket.max_tokens, tokens // count) if count >= LENGTHS_KNOWN else ticket.max_tokens

    def uncached(self, ticket: Ticket, station: Station) -> int:
        """Prompt tokens that the station's engine would have to compute, as far as a router can tell."""
        prompt = ticket.prompt_tokens + ticket.made
        prefixes = self.world.trace.prefixes
        if not ticket.blocks or prefixes is None or not self.params.affinity:
            return prompt
        return max(1, prompt - station.prefixes.match(ticket.blocks) * prefixes.block_tokens)

    def _soonest(self, stations: list[Station], ticket: Ticket) -> Station:
        if len(stations) == 1:
            return stations[0]
        return min(stations, key=lambda station: self.first_token_s(station, ticket, self.uncached(ticket, station)))

    def _start(self, ticket: Ticket, station: Station, blocks: int) -> None:
        self.order.take(ticket)
        station.enter(ticket, blocks, self.uncached(ticket, station), self.world.now_s)
        if ticket.blocks:
            station.prefixes.sent(ticket.blocks)
        self.inflight[ticket.lane] += 1
        self.started(ticket, station)
        self.world.start(ticket, station.worker, priority=self.engine_priority(ticket))

    # --- stopping ----------------------------------------------------------------------------------------

    def preempt(self, ticket: Ticket) -> None:
        """It leaves its engine for another, and is computed again later (recompute preemption)."""
        if self._stop(ticket):
            ticket.mind.yields += 1
            self.world.count("preemptions")
            self._again(ticket)

    def _stop(self, ticket: Ticket) -> bool:
        """False when it ended at this very moment."""
        self.world.stop(ticket)
        if ticket.mind.station is None:
            return False
        self._vacate(ticket)
        return True

    def _vacate(self, ticket: Ticket) -> None:
        ticket.mind.station.leave(ticket)
        self.inflight[ticket.lane] -= 1
        self.stopped(ticket)

    def _again(self, ticket: Ticket) -> None:
        if ticket.due_s <= self.world.now_s:
            self._drop(ticket)
        else:
            self.order.put_back(ticket)

    def _drop(self, ticket: Ticket) -> None:
        ticket.mind.gone = True
        self.over(ticket)
        self.world.drop(ticket)

    def _expire(self) -> None:
        now_s, dues = self.world.now_s, self._dues
        while dues and dues[0][0] <= now_s:
            ticket = heapq.heappop(dues)[2]
            seat: Seat = ticket.mind
            if seat.gone:
                continue
            if seat.waits:
                self.order.take(ticket)
                self._drop(ticket)
            elif ticket.where is not None and not seat.begun and self._stop(ticket):
                self._drop(ticket)

    def _equip(self, worker: Worker) -> None:
        worker.mind = Station(worker, self.times, self.params.kv_ceiling)
