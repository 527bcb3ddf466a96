"""What Laneway keeps with a request of the simulation, and the ready part of its lanes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from laneway.core.lanes import LANES, Lane
from laneway.core.subjects import ParkSubject
from laneway.policy.admit import Decision
from laneway.simulator.ours.entry import Entry
from laneway.simulator.world import Ticket


class Job:
    __slots__ = ("charged", "decision", "entry", "gone", "latest_start_s", "park", "predicted", "preemptions")

    def __init__(self, predicted: int) -> None:
        self.predicted = predicted  # tokens of its answer, near the upper end
        self.decision: Decision | None = None  # the verdict that accepted it
        self.latest_start_s = math.inf
        self.park: ParkSubject | None = None
        self.entry: Entry | None = None  # in a worker's engine
        self.preemptions = 0
        self.gone = False  # its caller left
        self.charged = False


class Lanes:
    """Ready jobs, first come first served in each lane."""

    def __init__(self) -> None:
        self._ready: dict[Lane, deque[Ticket]] = {lane: deque() for lane in LANES}
        self._counts = dict.fromkeys(LANES, 0)

    def put(self, ticket: Ticket) -> None:
        lane = LANES[ticket.lane]
        self._ready[lane].append(ticket)
        self._counts[lane] += 1

    def give_back(self, ticket: Ticket) -> None:
        """To the front: a message that was not taken comes again before what is newer."""
        lane = LANES[ticket.lane]
        self._ready[lane].appendleft(ticket)
        self._counts[lane] += 1

    def pop(self, lane: Lane, now_s: float) -> Ticket | None:
        self.head(lane)
        if not self._ready[lane]:
            return None
        self._counts[lane] -= 1
        return self._ready[lane].popleft()

    def head(self, lane: Lane) -> Ticket | None:
        ready = self._ready[lane]
        while ready and ready[0].mind.gone:
            ready.popleft()
        return ready[0] if ready else None

    def waits(self, lane: Lane) -> bool:
        return self.head(lane) is not None

    def forget(self, ticket: Ticket) -> None:
        """Its caller left while it was here."""
        ticket.mind.gone = True
        self._counts[LANES[ticket.lane]] -= 1

    def count(self, lane: Lane) -> int:
        return self._counts[lane]

    def counts(self) -> Sequence[int]:
        return [self._counts[lane] for lane in LANES]
