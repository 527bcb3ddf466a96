"""What waits, and who is next: the order by a key. Orders by tenants are in `flows`."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Protocol

from laneway.core.lanes import LANES
from laneway.simulator.rivals.station import Seat
from laneway.simulator.ticket import Ticket

Key = tuple[float, ...]


class Order(Protocol):
    def put(self, ticket: Ticket) -> None:
        """It came, and waits."""

    def put_back(self, ticket: Ticket) -> None:
        """It was taken and found no room, or has to run again: it waits where it would have, had it never left."""

    def head(self, lanes: Sequence[int]) -> Ticket | None:
        """Who is next of these lanes."""

    def take(self, ticket: Ticket) -> None:
        """It waits no more."""

    def counts(self) -> list[int]:
        """How many wait, by lane."""
        ...


class Heap:
    """Those of one queue, by key and then as they came; who left is skipped when it comes to the head."""

    def __init__(self) -> None:
        self._heap: list[tuple[Key, int, int, Ticket]] = []
        self._entries = 0

    def push(self, ticket: Ticket, key: Key) -> None:
        seat: Seat = ticket.mind
        self._entries += 1
        seat.entry, seat.waits = self._entries, True
        heapq.heappush(self._heap, (key, seat.order, self._entries, ticket))

    def first(self) -> tuple[Key, int, Ticket] | None:
        heap = self._heap
        while heap:
            key, order, entry, ticket = heap[0]
            seat: Seat = ticket.mind
            if seat.waits and seat.entry == entry:
                return key, order, ticket
            heapq.heappop(heap)
        return None


class ByKey:
    """The least key first, whatever its lane; equal keys as they came."""

    def __init__(self, key: Callable[[Ticket], Key]) -> None:
        self._key = key
        self._lanes = [Heap() for _ in LANES]
        self._counts = [0] * len(LANES)

    def put(self, ticket: Ticket) -> None:
        self._lanes[ticket.lane].push(ticket, self._key(ticket))
        self._counts[ticket.lane] += 1

    put_back = put

    def head(self, lanes: Sequence[int]) -> Ticket | None:
        heads = [first for lane in lanes if (first := self._lanes[lane].first()) is not None]
        return min(heads, key=lambda first: first[:2])[2] if heads else None

    def take(self, ticket: Ticket) -> None:
        seat: Seat = ticket.mind
        seat.waits = False
        self._counts[ticket.lane] -= 1

    def counts(self) -> list[int]:
        return list(self._counts)


def as_they_came(ticket: Ticket) -> Key:
    return ()


def by_lane(ticket: Ticket) -> Key:
    return (float(ticket.lane),)
