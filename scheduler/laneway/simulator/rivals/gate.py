"""A gateway that holds requests while the engines' telemetry says that the pool is saturated, as llm-d's does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from laneway.simulator.rivals.base import PLENTY, Rival
from laneway.simulator.rivals.flows import RoundRobin
from laneway.simulator.rivals.order import Order
from laneway.simulator.rivals.params import Common
from laneway.simulator.rivals.station import Station
from laneway.simulator.ticket import Ticket
from laneway.simulator.world import World

QUEUED = 5  # in an engine's queue: saturated; source: llm-d's utilisation detector
KV_SHARE = 0.8  # in use: saturated; source: the same


@dataclass(frozen=True, slots=True)
class GateParams(Common):
    ceiling: float = 1.0  # of saturation, for priority: from there on it is held
    deferrable_ceiling: float = 1.0  # llm-d's default is the same for every band
    batch_ceiling: float = 1.0
    inflight: int = 0  # requests of one engine that saturate it, counted by the gateway itself; 0: telemetry decides
    stale_s: float = 0.2  # between two looks at the telemetry
    handover_s: float = 0.001  # that the gateway needs for one request


class Gate(Rival[GateParams]):
    """Source: flow control of llm-d's inference scheduler (pkg/epp/flowcontrol and its plugins).

    An engine's saturation is max(queue / 5, KV / 0.8), the pool's is the unweighted mean. While that is below a band's
    ceiling its requests are handed on, else they wait; bands are strict, and one that is held holds those below. In a
    band tenants take turns, each first come first served. With `inflight` its other detector is used instead: requests
    in flight of so many per engine, counted by the gateway at once (its default: 100). An engine gets what it is given
    whether it has room or not, and its queue is first come first served.

    Simplified: all telemetry is read at one time, and stays as it was until the next look. Left out: eviction of
    negative priorities. Better than that: the endpoint is picked by exact counts, as for all rivals.
    """

    name = "gate"

    def begin(self, world: World) -> None:
        super().begin(world)
        self.saturation = 0.0
        self._handed = 0  # since the last look
        self._look()

    def make_order(self) -> Order:
        return RoundRobin()

    def slots(self, station: Station, lane: int) -> int:
        params = self.params
        ceiling = (params.ceiling, params.deferrable_ceiling, params.batch_ceiling)[lane]
        if params.inflight:
            most = params.inflight * len(self.world.workers)
            return PLENTY if sum(self.inflight) < ceiling * most else 0
        if self._handed * params.handover_s >= params.stale_s:
            return 0
        return PLENTY if self.saturation < ceiling else 0

    def kv(self, station: Station, lane: int) -> int:
        return PLENTY

    def closes(self, lane: int, lanes: Sequence[int]) -> list[int]:
        """A band that is held holds those below."""
        return [each for each in lanes if each < lane]

    def started(self, ticket: Ticket, station: Station) -> None:
        self._handed += 1

    def _look(self) -> None:
        self.world.call_at(self.world.now_s + self.params.stale_s, self._look)
        for worker in self.world.workers:
            self.world.observe(worker)
        engines = [worker.engine for worker in self.world.workers]
        shares = [max(each.queued / QUEUED, each.kv_tokens_used / each.kv_tokens / KV_SHARE) for each in engines]
        self.saturation = sum(shares) / len(shares) if shares else math.inf
        self._handed = 0
        self.dispatch()
