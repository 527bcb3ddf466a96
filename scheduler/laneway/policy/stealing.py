"""From which home slot of a lane a worker takes its next job.

Jobs wait in home slots, so that they meet the caches of one worker, or in `any`. A worker pulls its own slots and
`any`; what others serve it leaves to them, unless they are slow or gone. A home is a wish, never a condition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from msgspec import Struct

MISSES_COUNTED = 4  # of steals that found nothing, one after the other; each doubles the patience


class StealReason(StrEnum):
    WAITED = "STEAL_WAITED"  # its head waited longer than meeting the cache would save
    ORPHAN = "STEAL_ORPHAN"  # no living worker serves the slot
    NO_PLAN = "STEAL_NO_PLAN"  # who serves which slot is not known


@dataclass(frozen=True, slots=True)
class StealParams:
    ttft_share: float = 0.25  # of the TTFT target: a job waits no longer for one worker
    least_s: float = 0.05  # the time that its worker needs to take a job which it has room for

    def __post_init__(self) -> None:
        if not 0.0 <= self.ttft_share <= 1.0:
            raise ValueError("ttft_share must be from 0 to 1")


class Slot(Struct, frozen=True):
    """One home slot of a lane that may hold a job, as a worker knows it."""

    home: str
    ours: bool  # our own, or `any`
    waited_s: float  # since its head may have been there, or since we took from it last
    served: bool = True  # by a living worker; of no meaning where it is ours
    ready: int = 0  # jobs that wait in it, as the plan has it; of all lanes
    misses: int = 0  # how often we found nothing in it, one time after the other


class Turn(Struct, frozen=True):
    home: str
    reason: StealReason | None  # None: it is ours


def patience_s(
    saved_tokens: float, prefill_tokens_per_s: float, ttft_target_s: float, params: StealParams = StealParams()
) -> float:
    """How long a job of another's slot is left to it: min(seconds that its cached prefix saves, 0.25 x TTFT target).

    `saved_tokens`: prompt tokens that a job of a home finds cached on average. What they save is saved / prefill rate,
    and taken for `least_s` at least: a worker that has room takes its jobs within that, and who was quicker would keep
    caches from ever getting warm. DESIGN 5, "Affinity". O(1). Failure mode: an average hides the one long conversation,
    whose prefix would have been worth more waiting.
    """
    limit_s = params.ttft_share * ttft_target_s
    if prefill_tokens_per_s <= 0.0:
        return limit_s
    return min(limit_s, max(params.least_s, saved_tokens / prefill_tokens_per_s))


def next_turn(slots: Sequence[Slot], *, plan_fresh: bool, patience_s: float) -> Turn | None:
    """The slot to take from, for a worker that has room for a job of this lane; None: from none now.

    First what is anyone's to take: our own slots, `any`, those that no living worker serves, and without a fresh plan
    all; of them the one whose head waited longest, so that none starves, in the order of names where these are equal.
    Where none of these may hold a job we are idle, and steal from the longest slot (most ready, then longest waited)
    whose head waited for `patience_s`, doubled for each of its last misses. O(slots). Independent of their order.

    Failure mode: bells say that a job came and nobody says that it was taken, so a steal may find nothing; that costs
    one empty pull, and less and less often.
    """
    free = [slot for slot in slots if slot.ours or not plan_fresh or not slot.served]
    if free:
        slot = min(free, key=lambda slot: (-slot.waited_s, slot.home))
        return Turn(slot.home, _reason(slot, plan_fresh))
    late = [slot for slot in slots if slot.waited_s >= _patience_with(slot, patience_s)]
    if not late:
        return None
    slot = min(late, key=lambda slot: (-slot.ready, -slot.waited_s, slot.home))
    return Turn(slot.home, StealReason.WAITED)


def look_in_s(slots: Sequence[Slot], *, patience_s: float) -> float | None:
    """When the next slot that another worker serves will have waited long enough; None: there is none. O(slots)."""
    left = (_patience_with(slot, patience_s) - slot.waited_s for slot in slots if not slot.ours)
    return min((each for each in left if each > 0.0), default=None)


def _patience_with(slot: Slot, patience_s: float) -> float:
    return patience_s * 2.0 ** min(slot.misses, MISSES_COUNTED)


def _reason(slot: Slot, plan_fresh: bool) -> StealReason | None:
    if slot.ours:
        return None
    return StealReason.ORPHAN if plan_fresh else StealReason.NO_PLAN


class PrefixSaved:
    """How many prompt tokens a job of a home finds cached here: a mean that forgets, and begins with a guess, since the
    first jobs find nothing."""

    WEIGHT = 0.1
    PRIOR_TOKENS = 1024.0

    def __init__(self) -> None:
        self.tokens = self.PRIOR_TOKENS

    def heard(self, cached_tokens: int) -> None:
        """Of a job that came by our own home slot, once it has its first token."""
        self.tokens += self.WEIGHT * (cached_tokens - self.tokens)
