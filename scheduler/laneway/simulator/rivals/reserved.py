"""A share of the slots is kept for priority: lower lanes never take them, whether priority is there or not."""

from __future__ import annotations

import math
from dataclasses import dataclass

from laneway.simulator.rivals.base import Rival
from laneway.simulator.rivals.order import ByKey, Order, by_lane
from laneway.simulator.rivals.params import Common
from laneway.simulator.rivals.station import Station
from laneway.simulator.rivals.yielding import newest_of_lowest, yield_to
from laneway.simulator.ticket import Ticket


@dataclass(frozen=True, slots=True)
class ReservedParams(Common):
    slots_kept: float = 0.3  # of all slots, kept for priority: 0 to 1
    kv_kept: float = 0.2  # of each worker's KV, kept for priority: 0 to 1
    preempts: bool = False  # priority takes the slot of one that has not got a token yet


class Reserved(Rival[ReservedParams]):
    """Source: priority scheduling of SMG, the gateway of SGLang (docs/concepts/reliability/priority-scheduling.md).

    Slots are the pool's; what priority has not in use of its reservation is held back from lower lanes; classes are
    served strictly by rank; priority may take the slot of a lower request before its first token (off in practice
    there, so a parameter here), of one at most, the lowest and newest. Better than that: KV is reserved as well.
    Left out: the lengths of its queues and their timeouts (a request waits to its deadline), and starvation promotion:
    with a backlog of hours every batch request would be starved at 120 s and the reservation void.
    """

    name = "reserved"

    def make_order(self) -> Order:
        return ByKey(by_lane)

    def slots(self, station: Station, lane: int) -> int:
        if self.prefills(station):
            return 0
        if lane == 0:
            return station.slots_free
        capacity = station.slots * len(self.world.workers)
        held = max(0, math.ceil(self.params.slots_kept * capacity) - self.inflight[0])
        return min(station.slots_free, max(0, capacity - sum(self.inflight) - held))

    def kv(self, station: Station, lane: int) -> int:
        if lane == 0:
            return station.blocks_free
        priority: int = sum(each.mind.blocks for each in station.running if each.lane == 0)
        return station.blocks_free - max(0, int(self.params.kv_kept * station.blocks) - priority)

    def make_room(self, ticket: Ticket) -> Station | None:
        if not self.params.preempts or ticket.lane:
            return None
        return yield_to(ticket, self, lambda each: each.lane > 0 and not each.mind.begun, newest_of_lowest, victims=1)
