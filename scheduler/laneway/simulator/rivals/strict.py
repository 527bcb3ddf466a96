"""Strict priority between lanes, first come first served in each: without preemption, and with it."""

from __future__ import annotations

from dataclasses import dataclass

from laneway.simulator.rivals.base import Rival
from laneway.simulator.rivals.order import ByKey, Order, by_lane
from laneway.simulator.rivals.params import Common
from laneway.simulator.rivals.station import Station
from laneway.simulator.rivals.yielding import newest_of_lowest, yield_to
from laneway.simulator.ticket import Ticket


class Strict(Rival[Common]):
    """A lower lane's request starts only when no higher one waits for the room. What runs, runs to its end."""

    name = "strict"

    def make_order(self) -> Order:
        return ByKey(by_lane)


@dataclass(frozen=True, slots=True)
class PreemptParams(Common):
    preempting_lanes: int = 1  # so many of the first lanes make lower ones yield
    after_s: float = 0.0  # once a request has waited so long: before, a slot may become free by itself
    yields: int = 3  # of one request; then it stays to its end. 0: no such end


class StrictPreempt(Rival[PreemptParams]):
    """As `Strict`, and a request that finds no room makes lower lanes yield, as many as it takes.

    Source: recompute preemption of vLLM's priority policy (lowest priority, latest arrival; tokens that were made are
    kept and their KV is computed again with the prompt). Better than that: it takes the worker where least is lost, and
    only when it is known to be enough; a request yields a few times at most, so that none is computed for ever; and it
    may wait a little first, since what is stopped is lost (vLLM stops it at once).
    """

    name = "strict-preempt"

    def make_order(self) -> Order:
        return ByKey(by_lane)

    def make_room(self, ticket: Ticket) -> Station | None:
        waited_s = self.world.now_s - ticket.came_s
        if ticket.lane >= self.params.preempting_lanes or waited_s < self.params.after_s:
            return None
        yields = self.params.yields

        def may(each: Ticket) -> bool:
            return each.lane > ticket.lane and not (yields and each.mind.yields >= yields)

        return yield_to(ticket, self, may, newest_of_lowest)
