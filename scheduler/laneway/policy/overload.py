"""Whether priority misses its targets at a worker, so that the floor of the lower lanes yields to it there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OverloadParams:
    ttft_target_s: float = 1.0  # of priority
    tpot_target_s: float = 0.1
    wait_share: float = 0.5  # of the TTFT target: priority that waited longer for a worker is about to miss it
    memory_s: float = 5.0  # how long a wait that was too long counts


class Waits:
    """How long the priority job that this worker took last had waited in its lane, as a share of its TTFT target."""

    def __init__(self) -> None:
        self._share = 0.0
        self._heard_s = float("-inf")

    def heard(self, wait_s: float, ttft_target_s: float, now_s: float) -> None:
        """`wait_s`: from the moment at which the job was in its lane to its first delivery."""
        share = wait_s / ttft_target_s
        self._share, self._heard_s = share, now_s

    def share(self, now_s: float, memory_s: float) -> float:
        """0 when it was taken long ago."""
        return self._share if now_s - self._heard_s <= memory_s else 0.0


def overloaded(
    waits: Waits, *, waiting_s: float, tpot_p95_s: float, now_s: float, params: OverloadParams = OverloadParams()
) -> bool:
    """Whether priority attainment is below target here.

    p95 TPOT of priority > its target, or priority waits or waited > 0.5 x its TTFT target: `waiting_s` for the one that
    waits now, `waits` for the one that was taken last. Seconds; policy.md (b2), "floor unless attainment < target";
    DESIGN 5. O(1). Failure mode: where priority is overloaded for good, lower lanes get what priority leaves and their
    accepted jobs run at their latest starts only: then they should not have been accepted.
    """
    if 0.0 < params.tpot_target_s < tpot_p95_s:
        return True
    share = max(waiting_s / params.ttft_target_s, waits.share(now_s, params.memory_s))
    return share > params.wait_share
