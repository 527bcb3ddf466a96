"""What this door accepted that the newest plan does not show yet: without it, a burst between plans is invisible."""

from __future__ import annotations

from collections import deque

from laneway.core.clock import Clock
from laneway.policy.eta import Load

# A plan is made from numbers a little older than its arrival: consumer counts and leases of one scheduler tick.
PLAN_LAG_S = 0.3
# Without plans, leases show what was claimed within about this.
AGE_S_MAX = 2.0


class Ledger:
    """Times are monotonic."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._entries: deque[tuple[float, str, Load]] = deque()
        self._totals: dict[str, Load] = {}
        self._shown_s = 0.0

    def plan_arrived(self) -> None:
        self._shown_s = self._clock.monotonic() - PLAN_LAG_S

    def add(self, pool: str, load: Load) -> None:
        self._entries.append((self._clock.monotonic(), pool, load))
        self._totals[pool] = self._totals.get(pool, Load()) + load

    def since(self, pool: str) -> Load:
        oldest_s = max(self._shown_s, self._clock.monotonic() - AGE_S_MAX)
        while self._entries and self._entries[0][0] < oldest_s:
            _, name, load = self._entries.popleft()
            self._totals[name] = self._totals[name] - load
        return self._totals.get(pool, Load())
