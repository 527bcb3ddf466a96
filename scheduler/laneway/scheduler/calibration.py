"""Hears how jobs ended against what their verdicts said; owns what the plan says of it, and counts what was covered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
from prometheus_client import Counter

from laneway.core.fleet import EtaFit, Plan
from laneway.core.lanes import LANES, Lane
from laneway.policy.calibration import Calibrator, Outcome, Span
from laneway.runtime import metrics
from laneway.runtime.records import RecordHead

_LABELS = ("pool", "lane", "outcome")
_text = "of ended jobs against the 90 % bounds of their verdicts: covered, missed."
_ttft = metrics.counter("laneway_admission_ttft_bounds_total", f"Times to the first token {_text}", _LABELS)
_completion = metrics.counter("laneway_admission_completion_bounds_total", f"Times to the end {_text}", _LABELS)


class Calibration:
    """`before`: the newest plan of an earlier term, whose factors are gone on from."""

    def __init__(self, pools: Iterable[str], before: Plan | None = None) -> None:
        self._pools = frozenset(pools)
        self._calibrator = Calibrator()
        for pool in before.pools if before else ():
            for lane in pool.lanes if pool.pool in self._pools else ():
                self._calibrator.resume(pool.pool, lane.lane, lane.ttft_fit, lane.completion_fit)

    def heard(self, head: RecordHead) -> None:
        """Of a job that ended. What cannot be read, or names a pool that is gone, says nothing."""
        if not head.outcome:
            return
        try:
            outcome = msgspec.json.decode(head.outcome, type=Outcome)
        except msgspec.DecodeError:
            return
        if outcome.pool not in self._pools:
            return
        self._calibrator.add(outcome)
        _count(_ttft, outcome, outcome.ttft)
        _count(_completion, outcome, outcome.completion)

    def fits(self) -> Mapping[tuple[str, Lane], tuple[EtaFit, EtaFit]]:
        return {(pool, lane): self._calibrator.fits(pool, lane) for pool in self._pools for lane in LANES}


def _count(counter: Counter, outcome: Outcome, span: Span | None) -> None:
    if span is not None:
        word = "missed" if span.missed else "covered"
        counter.labels(pool=outcome.pool, lane=outcome.lane.value, outcome=word).inc()
