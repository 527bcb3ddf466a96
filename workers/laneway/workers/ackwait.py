"""When a held delivery asks for more time: at a third of its ack wait, and only while the engine advances.

A worker whose engine stands still keeps nobody waiting: its deliveries go to others when their ack wait is over.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARE = 1.0 / 3.0


@dataclass(slots=True)
class AckWait:
    """Of one delivery."""

    interval_s: float
    due_s: float  # monotonic
    steps: int  # engine steps when time was last asked for

    @classmethod
    def begin(cls, ack_wait_s: float, now_s: float, steps: int) -> AckWait:
        interval_s = ack_wait_s * SHARE
        return cls(interval_s, now_s + interval_s, steps)

    def ask(self, now_s: float, steps: int) -> bool:
        """Whether to ask for more time now."""
        if now_s < self.due_s or steps == self.steps:
            return False
        self.due_s = now_s + self.interval_s
        self.steps = steps
        return True
