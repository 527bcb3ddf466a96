"""What the tokens of priority work took lately, for the outer loop of the budget and for the lease.

Units: monotonic seconds, seconds a token. Cost: O(samples kept) a look. Source: policy.md (b5), its outer loop. Known
failure mode: where few priority jobs ended, one slow one is the 95th percentile.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from msgspec import Struct

SPAN_S = 60.0
SAMPLES_KEPT = 512
LOOK_S = 0.1  # the percentile is taken anew at most so often: it is asked for with every job
LIVE_TOKENS_MIN = 8  # a run with fewer says little yet


class Tpot(Struct, frozen=True):
    """What one priority job got."""

    at_s: float  # monotonic: when it ended
    tpot_s: float
    target_s: float


class Tpots:
    """Owned by the budget."""

    def __init__(self) -> None:
        self._ended: deque[Tpot] = deque(maxlen=SAMPLES_KEPT)
        self._looked: tuple[float, float] = (-math.inf, 0.0)  # when, and what it was

    def ended(self, at_s: float, tpot_s: float, target_s: float) -> None:
        if tpot_s > 0.0 and target_s > 0.0:
            self._ended.append(Tpot(at_s, tpot_s, target_s))

    def ratio_p95(self, now_s: float, span_s: float, running: Iterable[Tpot]) -> float | None:
        """95th percentile of TPOT / target of what ended in the span and what runs; None: nothing did."""
        lately = [each for each in self._ended if now_s - each.at_s <= span_s]
        return _p95([each.tpot_s / each.target_s for each in (*lately, *running)])

    def p95_s(self, now_s: float) -> float:
        """Of what ended in the last minute; 0: nothing."""
        if now_s - self._looked[0] >= LOOK_S:
            self._looked = now_s, _p95([each.tpot_s for each in self._ended if now_s - each.at_s <= SPAN_S]) or 0.0
        return self._looked[1]


def _p95(values: list[float]) -> float | None:
    return sorted(values)[math.ceil(0.95 * len(values)) - 1] if values else None
