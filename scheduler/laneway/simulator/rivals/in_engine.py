"""All lanes inside the engines: each request goes to a worker at once, and the engine's own queue has the order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from laneway.core.lanes import LANES
from laneway.simulator.rivals.base import PLENTY, Rival
from laneway.simulator.rivals.order import ByKey, Order, by_lane
from laneway.simulator.rivals.params import Common
from laneway.simulator.rivals.station import Station
from laneway.simulator.ticket import Ticket
from laneway.simulator.world import Worker

_ALL = range(len(LANES))


@dataclass(frozen=True, slots=True)
class InEngineParams(Common):
    by_budget: bool = True  # a request joins when a step has room for its prompt; else as soon as a slot is free


class InEngine(Rival[InEngineParams]):
    """Source: vLLM with `--scheduling-policy priority` behind a router; the lane is the engine's priority.

    A request is bound to a worker when it comes, and cannot be moved. There it starts by priority and then as they
    came. In vLLM it joins the batch when a step has tokens left for its prompt, so that one that waits is passed until
    then: that is `by_budget`, with `pending_tokens` for the budget, and the queue is kept here for the engine. Without
    it the engine's own queue is used, where one joins with a free slot, and prompts are computed in that order.

    The router is better than most: it counts what each engine has still to prefill for this lane and those above it,
    exactly and without delay. A paged engine that runs out of KV evicts its newest here, where vLLM evicts the newest
    of the lowest priority.
    """

    name = "in-engine"

    def make_order(self) -> Order:
        self.queues = Queues(self._home)
        return self.queues if self.params.by_budget else ByKey(by_lane)

    def slots(self, station: Station, lane: int) -> int:
        return PLENTY

    def kv(self, station: Station, lane: int) -> int:
        return PLENTY

    def engine_priority(self, ticket: Ticket) -> float:
        return float(-ticket.lane)

    def first_token_s(self, station: Station, ticket: Ticket, prefill_tokens: int) -> float:
        """Of those that wait there its own lane and above go first; without a free slot one each step at the best."""
        lanes = ticket.lane + 1
        ahead = station.waiting if not self.params.by_budget else self.queues.waiting(station)
        slots_s = (sum(ahead[:lanes]) + 1) * self.times.decode_s(station.slots) if station.slots_free <= 0 else 0.0
        queued_tokens = sum(self.queues.prompt_tokens(station)[:lanes])
        return station.first_token_s(prefill_tokens + queued_tokens, lanes) + slots_s

    def lost(self, tickets: Sequence[Ticket], worker: Worker) -> None:
        self.queues.close(worker.mind)
        super().lost(tickets, worker)

    def joined(self, worker: Worker) -> None:
        super().joined(worker)
        self.queues.close(None)
        self.dispatch()

    def _round(self) -> list[Ticket]:
        if not self.params.by_budget:
            return super()._round()
        for station in self.stations():
            while (ticket := self.queues.head_of(station)) is not None:
                need = self.need(ticket, station)
                if self.prefills(station) or station.slots_free <= 0:
                    break
                if need > station.blocks_free and station.running:
                    break
                self._start(ticket, station, need)
        return []

    def _home(self, ticket: Ticket) -> Station | None:
        stations = self.stations()
        return self._soonest(stations, ticket) if stations else None


class Queues:
    """One queue for each engine, by lane and then as they came; and one for those that came while there was none."""

    def __init__(self, home: Callable[[Ticket], Station | None]) -> None:
        self._home = home
        self._homes: dict[Ticket, Station | None] = {}  # of all that wait
        self._queues: dict[Station | None, ByKey] = {}
        self._prompt_tokens: dict[Station | None, list[int]] = {}

    def put(self, ticket: Ticket) -> None:
        home = self._homes[ticket] = self._home(ticket)
        if home not in self._queues:
            self._queues[home], self._prompt_tokens[home] = ByKey(by_lane), [0] * len(LANES)
        self._queues[home].put(ticket)
        self._prompt_tokens[home][ticket.lane] += ticket.prompt_tokens + ticket.made

    put_back = put

    def take(self, ticket: Ticket) -> None:
        home = self._homes.pop(ticket)
        self._queues[home].take(ticket)
        self._prompt_tokens[home][ticket.lane] -= ticket.prompt_tokens + ticket.made

    def head(self, lanes: Sequence[int]) -> Ticket | None:
        heads = [head for queue in self._queues.values() if (head := queue.head(lanes)) is not None]
        return min(heads, key=lambda ticket: (ticket.lane, ticket.mind.order), default=None)

    def head_of(self, station: Station) -> Ticket | None:
        return self._queues[station].head(_ALL) if station in self._queues else None

    def counts(self) -> list[int]:
        columns = [queue.counts() for queue in self._queues.values()]
        return [sum(column[lane] for column in columns) for lane in _ALL]

    def waiting(self, station: Station) -> list[int]:
        return self._queues[station].counts() if station in self._queues else [0] * len(LANES)

    def prompt_tokens(self, station: Station) -> list[int]:
        """By lane, of those that wait."""
        return self._prompt_tokens.get(station, [0] * len(LANES))

    def close(self, station: Station | None) -> None:
        """It is gone: those that wait there go to others."""
        for ticket in [ticket for ticket, home in self._homes.items() if home is station]:
            self.take(ticket)
            self.put(ticket)
