"""Which request of a trace is the next to begin, and when: by its arrival, or a think time after the turn before."""

from __future__ import annotations

import heapq

import numpy as np

from laneway.simulator.trace import NO_SESSION, Trace


class Due:
    """Requests that have not begun. Times in seconds from the trace's begin; O(log turns) for each."""

    def __init__(self, trace: Trace) -> None:
        self._think_s = trace.think_s
        self._next_turn = next_turns(trace)
        later = np.zeros(len(trace), dtype=bool)
        later[list(self._next_turn.values())] = True
        firsts = np.flatnonzero(~later)
        order = np.argsort(trace.arrival_s[firsts], kind="stable")
        self._firsts, self._firsts_s = firsts[order], trace.arrival_s[firsts][order]
        self._taken = 0  # of the firsts
        self._turns: list[tuple[float, int]] = []  # a heap

    def soonest(self) -> tuple[float, int] | None:
        """When the next one begins, and which; None: none until another turn ends."""
        turn = self._turns[0] if self._turns else None
        if self._taken == len(self._firsts):
            return turn
        first = float(self._firsts_s[self._taken]), int(self._firsts[self._taken])
        return first if turn is None else min(first, turn)

    def take(self) -> tuple[float, int]:
        """The soonest, which begins."""
        soonest = self.soonest()
        assert soonest is not None
        if self._turns and soonest == self._turns[0]:
            return heapq.heappop(self._turns)
        self._taken += 1
        return soonest

    def ended(self, request: int, at_s: float) -> bool:
        """Whether that makes another one due: the turn after it."""
        turn = self._next_turn.get(request)
        if turn is None:
            return False
        heapq.heappush(self._turns, (at_s + float(self._think_s[turn]), turn))
        return True


def next_turns(trace: Trace) -> dict[int, int]:
    """Of each turn of a session the one after it."""
    before: dict[int, int] = {}
    following: dict[int, int] = {}
    for turn in np.flatnonzero(trace.session != NO_SESSION).tolist():
        session = int(trace.session[turn])
        if session in before:
            following[before[session]] = turn
        before[session] = turn
    return following
