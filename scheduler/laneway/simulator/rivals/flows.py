"""Orders by tenants: lanes are strict, and in a lane tenants share it: by turns, by tokens (VTC) or deficit (DLPM)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from laneway.core.lanes import LANES
from laneway.simulator.rivals.order import Heap, as_they_came
from laneway.simulator.rivals.station import Seat
from laneway.simulator.ticket import Ticket


class Flows:
    """The tenants of a lane that have something waiting, each first come first served."""

    def __init__(self) -> None:
        self.size = 0
        self.waiting: dict[int, int] = {}  # by tenant: how many wait
        self._heaps: dict[int, Heap] = {}

    def put(self, ticket: Ticket) -> None:
        self._heaps.setdefault(ticket.tenant, Heap()).push(ticket, as_they_came(ticket))
        self.waiting[ticket.tenant] = self.waiting.get(ticket.tenant, 0) + 1
        self.size += 1

    def head(self, tenant: int) -> Ticket:
        first = self._heaps[tenant].first()
        assert first is not None, "it has something waiting"
        return first[2]

    def take(self, ticket: Ticket) -> None:
        seat: Seat = ticket.mind
        seat.waits = False
        self.size -= 1
        self.waiting[ticket.tenant] -= 1
        if not self.waiting[ticket.tenant]:
            del self.waiting[ticket.tenant]


class ByTenant:
    """Strict between lanes; in a lane the tenant that `next_tenant` names."""

    def __init__(self) -> None:
        self.lanes = [Flows() for _ in LANES]

    def next_tenant(self, lane: int) -> int:
        """Of those with something waiting, of which there is one."""
        raise NotImplementedError

    def put(self, ticket: Ticket) -> None:
        self.lanes[ticket.lane].put(ticket)

    def put_back(self, ticket: Ticket) -> None:
        self.lanes[ticket.lane].put(ticket)

    def head(self, lanes: Sequence[int]) -> Ticket | None:
        lane = next((lane for lane in lanes if self.lanes[lane].waiting), None)
        return self.lanes[lane].head(self.next_tenant(lane)) if lane is not None else None

    def take(self, ticket: Ticket) -> None:
        self.lanes[ticket.lane].take(ticket)

    def counts(self) -> list[int]:
        return [flows.size for flows in self.lanes]


class RoundRobin(ByTenant):
    """The tenant whose turn was longest ago."""

    def __init__(self) -> None:
        super().__init__()
        self._turns: list[dict[int, int]] = [{} for _ in LANES]
        self._turn = 0

    def next_tenant(self, lane: int) -> int:
        turns = self._turns[lane]
        return min(self.lanes[lane].waiting, key=lambda tenant: (turns.get(tenant, 0), tenant))

    def take(self, ticket: Ticket) -> None:
        super().take(ticket)
        self._turn += 1
        self._turns[ticket.lane][ticket.tenant] = self._turn


class ByTokens(ByTenant):
    """VTC: the tenant that was served the fewest weighted tokens; who comes back is lifted to the least active."""

    def __init__(self) -> None:
        super().__init__()
        self.served: list[dict[int, float]] = [{} for _ in LANES]
        self._last = [0] * len(LANES)  # the tenant whose last request was taken last

    def next_tenant(self, lane: int) -> int:
        served = self.served[lane]
        return min(self.lanes[lane].waiting, key=lambda tenant: (served.get(tenant, 0.0), tenant))

    def put(self, ticket: Ticket) -> None:
        lane, tenant = ticket.lane, ticket.tenant
        active, served = self.lanes[lane].waiting, self.served[lane]
        if tenant not in active:
            least = min((served.get(each, 0.0) for each in active), default=served.get(self._last[lane], 0.0))
            served[tenant] = max(served.get(tenant, 0.0), least)
        super().put(ticket)

    def take(self, ticket: Ticket) -> None:
        super().take(ticket)
        self._last[ticket.lane] = ticket.tenant

    def charge(self, ticket: Ticket, tokens: float) -> None:
        served = self.served[ticket.lane]
        served[ticket.tenant] = served.get(ticket.tenant, 0.0) + tokens


class ByDeficit(ByTenant):
    """DLPM: among tenants with something left of their quantum, with which they begin, the head with the longest cached
    prefix."""

    def __init__(self, quantum: float, match: Callable[[Ticket], int]) -> None:
        """`quantum`: weighted tokens; `match`: cached tokens of a prompt at the worker that has most of it."""
        super().__init__()
        self.left: list[dict[int, float]] = [{} for _ in LANES]
        self._quantum = quantum
        self._match = match

    def next_tenant(self, lane: int) -> int:
        left, flows = self.left[lane], self.lanes[lane]
        able = [tenant for tenant in flows.waiting if left.get(tenant, self._quantum) > 0.0]
        if not able:
            self._refill(lane)
            able = [tenant for tenant in flows.waiting if left.get(tenant, self._quantum) > 0.0]
        return min(able, key=lambda tenant: self._rank(flows.head(tenant)))

    def charge(self, ticket: Ticket, tokens: float) -> None:
        left = self.left[ticket.lane]
        left[ticket.tenant] = left.get(ticket.tenant, self._quantum) - tokens

    def _rank(self, ticket: Ticket) -> tuple[int, int]:
        seat: Seat = ticket.mind
        return -self._match(ticket), seat.order

    def _refill(self, lane: int) -> None:
        """Rounds in which each that has nothing left gets a quantum, until one that waits has something."""
        left, waiting, quantum = self.left[lane], self.lanes[lane].waiting, self._quantum

        def rounds_owed(tenant: int) -> int:
            return int(-left[tenant] // quantum) + 1

        rounds = min(map(rounds_owed, waiting))
        for tenant, tokens in left.items():
            if tokens <= 0.0:
                left[tenant] = tokens + quantum * min(rounds, rounds_owed(tenant))
