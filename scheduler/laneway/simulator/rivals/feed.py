"""Fast requests go to an engine at once; slow ones are held, and fed a few at a time while its KV is little used."""

from __future__ import annotations

import math
from dataclasses import dataclass

from laneway.simulator.rivals.base import PLENTY, Rival
from laneway.simulator.rivals.order import ByKey, Key, Order
from laneway.simulator.rivals.params import Common
from laneway.simulator.rivals.station import Station
from laneway.simulator.ticket import Ticket


@dataclass(frozen=True, slots=True)
class FeedParams(Common):
    low: float = 0.5  # share of KV in use below which `at_low` are fed at a time
    high: float = 0.6  # below which `at_high` are; above it none
    at_low: int = 2
    at_high: int = 1
    urgent_s: float = 0.0  # a slow request with less time than that beyond its service is fast; 0: never


class Feed(Rival[FeedParams]):
    """Source: the queue manager of SageServe and its simulator (arXiv 2502.14617; thresholds from its code).

    A time ends when those that were fed have their first token, so that their KV is seen before the next are fed.
    Better than that: engines start fast requests before fed ones; deferrable work comes before batch, each by its
    deadline; utilisation is exact, and a tick old at most. Left out: regions, and the hourly forecast with its plan,
    which is an autoscaler's matter.
    """

    name = "feed"

    def make_order(self) -> Order:
        return ByKey(self._key)

    def slots(self, station: Station, lane: int) -> int:
        if lane == 0:
            return PLENTY
        engine, params = station.worker.engine, self.params
        used = engine.kv_tokens_used / engine.kv_tokens
        at_a_time = params.at_low if used < params.low else params.at_high if used < params.high else 0
        return min(station.slots_free, at_a_time - sum(station.waiting[1:]))

    def kv(self, station: Station, lane: int) -> int:
        return station.blocks_free if lane else PLENTY

    def engine_priority(self, ticket: Ticket) -> float:
        return 1.0 if ticket.lane == 0 or ticket.mind.mark else 0.0

    def tick(self) -> None:
        for worker in self.world.workers:
            self.world.observe(worker)
        super().tick()
        self._hurry()

    def _key(self, ticket: Ticket) -> Key:
        return float(ticket.lane), 0.0 if ticket.lane == 0 else ticket.due_s

    def _hurry(self) -> None:
        """Slow requests that would be late if they waited on are given to an engine as fast ones are."""
        while self.params.urgent_s:
            heads = [head for lane in (1, 2) if (head := self.order.head([lane])) is not None]
            urgent = next((head for head in heads if self._spare_s(head) < self.params.urgent_s), None)
            stations = self.stations()
            if urgent is None or not stations:
                return
            urgent.mind.mark = 1.0
            self.world.count("hurried")
            self._start(urgent, self._soonest(stations, urgent), self.need(urgent, stations[0]))

    def _spare_s(self, ticket: Ticket) -> float:
        if ticket.due_s == math.inf:
            return math.inf
        rest = max(1, self.expected_tokens(ticket) - ticket.made)
        return ticket.due_s - self.world.now_s - rest * self.times.decode_s(max(1, self.params.slots // 2))
