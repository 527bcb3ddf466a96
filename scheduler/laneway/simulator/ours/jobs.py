"""What Laneway keeps with a request of the simulation, and the ready part of its lanes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from laneway.core.lanes import LANES, Lane
from laneway.core.subjects import ParkSubject
from laneway.policy.admit import Decision
from laneway.policy.stealing import Slot, Turn, look_in_s, next_turn
from laneway.simulator.ours.entry import Entry
from laneway.simulator.ticket import Ticket

ANY = ""  # the home slot of what any worker may take


class Job:
    __slots__ = ("decision", "entry", "gone", "home", "key", "latest_start_s", "park", "predicted", "preemptions")

    def __init__(self, predicted: int) -> None:
        self.predicted = predicted  # tokens of its answer, near the upper end
        self.decision: Decision | None = None  # the verdict that accepted it
        self.latest_start_s = math.inf
        self.park: ParkSubject | None = None
        self.entry: Entry | None = None  # in a worker's engine
        self.preemptions = 0
        self.gone = False  # its caller left
        self.key = ""  # equal for jobs that gain from one worker's caches; empty: none
        self.home = ANY


class Lanes:
    """Ready jobs, first come first served in each lane and home slot."""

    def __init__(self) -> None:
        self.served: dict[str, int] = {}  # home: number of the worker that serves it
        self._ready: dict[Lane, dict[str, deque[Ticket]]] = {lane: {} for lane in LANES}  # no queue is empty for long
        self._counts = dict.fromkeys(LANES, 0)
        self._heads_s: dict[tuple[Lane, str], float] = {}  # since when the head may have been there, or was taken from

    def put(self, ticket: Ticket, now_s: float) -> None:
        lane, home = LANES[ticket.lane], ticket.mind.home
        queue = self._ready[lane].get(home)
        if queue is None:
            queue = self._ready[lane][home] = deque()
            self._heads_s[lane, home] = now_s
        queue.append(ticket)
        self._counts[lane] += 1

    def give_back(self, ticket: Ticket, now_s: float) -> None:
        """To the front: a message that was not taken comes again before what is newer."""
        lane, home = LANES[ticket.lane], ticket.mind.home
        self._ready[lane].setdefault(home, deque()).appendleft(ticket)
        self._heads_s.setdefault((lane, home), now_s)
        self._counts[lane] += 1

    def pop(self, lane: Lane, home: str, now_s: float) -> Ticket | None:
        queue = self._living(lane, home)
        if queue is None:
            return None
        self._counts[lane] -= 1
        self._heads_s[lane, home] = now_s
        ticket = queue.popleft()
        self._living(lane, home)
        return ticket

    def turn(self, lane: Lane, own: str, now_s: float, patience_s: float) -> Turn | None:
        """The slot that the worker of home `own` takes from next."""
        slots = self._slots(lane, own, now_s)
        return next_turn(slots, plan_fresh=True, patience_s=patience_s) if slots else None

    def look_in_s(self, lane: Lane, own: str, now_s: float, patience_s: float) -> float | None:
        """When a job of another's home will have waited long enough for it."""
        return look_in_s(self._slots(lane, own, now_s), patience_s=patience_s)

    def _slots(self, lane: Lane, own: str, now_s: float) -> list[Slot]:
        slots = []
        for home in list(self._ready[lane]):
            queue = self._living(lane, home)
            if queue is not None:
                ours = home in (ANY, own)
                waited_s = now_s - self._heads_s[lane, home]
                slots.append(Slot(home, ours, waited_s, ours or home in self.served, len(queue)))
        return slots

    def _living(self, lane: Lane, home: str) -> deque[Ticket] | None:
        """The queue without those whose callers left; None: there is none."""
        queue = self._ready[lane].get(home)
        while queue and queue[0].mind.gone:
            queue.popleft()
        if queue:
            return queue
        if queue is not None:
            del self._ready[lane][home]
            del self._heads_s[lane, home]
        return None

    def head(self, lane: Lane) -> Ticket | None:
        """That came first, of all homes."""
        heads = [queue[0] for home in list(self._ready[lane]) if (queue := self._living(lane, home)) is not None]
        return min(heads, key=lambda ticket: (ticket.came_s, ticket.index), default=None)

    def waits(self, lane: Lane) -> bool:
        return self._counts[lane] > 0

    def forget(self, ticket: Ticket) -> None:
        """Its caller left while it was here."""
        ticket.mind.gone = True
        self._counts[LANES[ticket.lane]] -= 1

    def count(self, lane: Lane) -> int:
        return self._counts[lane]

    def at_home(self, home: str) -> int:
        """Ready jobs of all lanes in a home slot."""
        return sum(len(queues[home]) for queues in self._ready.values() if home in queues)

    def counts(self) -> Sequence[int]:
        return [self._counts[lane] for lane in LANES]
