"""How an attempt begins after an earlier one: from the prompt, from what was delivered, or not at all.

An answer must never be a splice of two runs. Going on from the ids that a door delivered is sound where the sampling
state is in the ids; running again from the prompt and keeping back what was delivered is sound where the engine gives
the same answer every time. Where neither holds and a caller has seen output, the job ends.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from laneway.core.job import GenerateTask, resumable


class Offer(Struct, frozen=True):
    """What a door has delivered to its caller."""

    next_index: int
    ids: tuple[int, ...]  # ids 0 .. next_index, or fewer where the door does not hold them all


class Continue(Struct, frozen=True):
    """Prefill prompt and `ids`, and generate what follows; with no ids, start from the prompt."""

    ids: tuple[int, ...] = ()

    @property
    def start_index(self) -> int:
        return len(self.ids)


class Rerun(Struct, frozen=True):
    """Generate from the prompt and emit from `start_index` on; the first tokens must equal `expected`."""

    start_index: int
    expected: tuple[int, ...]


class Unsound(Struct, frozen=True):
    """No sound way to go on exists."""

    start_index: int


def plan_resume(task: GenerateTask, offers: Iterable[Offer], *, exact: bool) -> Continue | Rerun | Unsound:
    """`exact`: the engine gives the same greedy answer alone, batched and again."""
    longest = max(offers, key=lambda offer: (offer.next_index, len(offer.ids)), default=None)
    if longest is None or longest.next_index == 0:
        return Continue()
    if resumable(task) and len(longest.ids) == longest.next_index:
        return Continue(longest.ids)
    if exact and task.sampling.greedy and task.sampling.n == 1:
        return Rerun(longest.next_index, longest.ids)
    return Unsound(longest.next_index)
