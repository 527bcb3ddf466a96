"""Which tokens of a stream leave at once, and which wait for the next step's: where many sequences share a worker, the
number of messages is what a token costs, here and at the door (docs/performance.md).

A token waits 20 ms at most, and only where steps are shorter than that: steps of 10 ms give three tokens a message. The
first tokens of a stream never wait, and its last do not pass here. A step that stalls delays what waits for it.
"""

from __future__ import annotations

JOIN_S = 0.021  # a token waits no longer than this, by the length of the last step: 20 ms, and its jitter
JOIN_STEP_S = 0.018  # a longer step is as long as a token may wait
JOIN_SEQUENCES_MIN = 32  # live sequences of the worker from which tokens are joined at all


class Joiner:
    """Of one stream. Times are monotonic seconds."""

    __slots__ = ("_oldest_s", "_stepped_s")

    def __init__(self) -> None:
        self._stepped_s = 0.0
        self._oldest_s = 0.0  # when the oldest token that waits came; 0: none waits

    def may_wait(self, now_s: float, sequences: int) -> bool:
        """Asked once a step: whether its tokens wait. Otherwise they are taken to leave now."""
        step_s, self._stepped_s = now_s - self._stepped_s, now_s
        oldest_s = self._oldest_s or now_s
        if sequences >= JOIN_SEQUENCES_MIN and step_s < JOIN_STEP_S and now_s - oldest_s + step_s <= JOIN_S:
            self._oldest_s = oldest_s
            return True
        self._oldest_s = 0.0
        return False
