"""Says when an engine that has work has made no step for too long.

Only time counts in which this worker looked: an engine that just got its first work, and a worker that was itself
stopped or starved for a while, must not look like an engine that hangs.
"""

from __future__ import annotations

LOOK_S_MAX = 1.0  # most that one look may count


class StepWatch:
    """Asked a few times a second."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._looked_s = 0.0
        self._steps: int | None = None  # at the last look, if there was work
        self._stood_s = 0.0

    def hung(self, now_s: float, steps: int, *, has_work: bool) -> bool:
        """Whether the engine has stood still with work for too long; then the count begins anew."""
        passed_s = min(LOOK_S_MAX, now_s - self._looked_s)
        stands = has_work and steps == self._steps
        self._stood_s = self._stood_s + passed_s if stands else 0.0
        self._looked_s = now_s
        self._steps = steps if has_work else None
        if self._stood_s <= self._timeout_s:
            return False
        self._stood_s = 0.0
        return True
