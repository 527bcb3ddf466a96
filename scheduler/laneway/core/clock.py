"""Time as something that is handed in: wall time for people and deadlines, monotonic time for decisions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """Reads time. Implementations must be cheap and must not block."""

    def now(self) -> float:
        """Wall time, Unix seconds (UTC). May step."""
        ...

    def monotonic(self) -> float:
        """Seconds since an arbitrary origin. Never goes back."""
        ...


@dataclass
class ManualClock:
    """A clock that moves only when told to; both readings advance together."""

    wall_s: float = 1_800_000_000.0
    elapsed_s: float = 0.0

    def now(self) -> float:
        return self.wall_s

    def monotonic(self) -> float:
        return self.elapsed_s

    def advance(self, seconds: float) -> None:
        if not seconds >= 0.0:
            raise ValueError(f"a clock cannot go back: {seconds}")
        self.wall_s += seconds
        self.elapsed_s += seconds
