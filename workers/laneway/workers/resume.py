"""How an attempt begins after an earlier one: from the prompt, from what was computed before, or not at all.

An answer must never be a splice of two runs. Going on from token ids is sound where the sampling state is in the ids;
running again from the prompt and keeping back what was delivered is sound where the engine gives the same answer every
time. Where neither holds and the caller has seen output, the job ends.

Two know ids: doors, what they delivered, and checkpoints, what a worker computed. What the caller's own door delivered
is the authority: a checkpoint that says anything else is left aside. Whoever else follows the job (a Watch) may add to
what is known, but neither decides nor ends anything: where a stream has tokens that this run computes anew, its door
compares them (see Outlets).
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from laneway.core.catalogue import Capabilities
from laneway.core.checkpoints import UNKNOWN, Prefix, spans
from laneway.core.job import Attempt, GenerateTask, resumable


class Offer(Struct, frozen=True):
    """What a door has delivered to its caller."""

    next_index: int
    ids: tuple[int, ...]  # ids 0 .. next_index, or fewer where the door does not hold them all

    @property
    def whole(self) -> bool:
        return len(self.ids) == self.next_index


NOTHING = Offer(0, ())
NO_PREFIX = Prefix()


class Continue(Struct, frozen=True):
    """Prefill the prompt and a prefix, and generate what follows; with an empty one, start from the prompt."""

    prefix: Prefix = NO_PREFIX
    kept: int = 0  # of its tokens, those that checkpoints hold

    @property
    def start_index(self) -> int:
        return len(self.prefix)


class Rerun(Struct, frozen=True):
    """Generate from the prompt and emit from `start_index` on; the first tokens must equal `expected`."""

    start_index: int
    expected: tuple[int, ...]


class Unsound(Struct, frozen=True):
    """No sound way to go on exists."""

    start_index: int


Plan = Continue | Rerun | Unsound


def goes_on(task: GenerateTask, can: Capabilities) -> bool:
    """Whether an engine that can do so much may go on from ids of this task. One that is given text may read other ids
    into it than those that were delivered."""
    return can.token_ids_in and resumable(task, sampling=can.resumable_sampling)


def plan_resume(
    task: GenerateTask,
    delivered: Offer = NOTHING,
    others: Iterable[Offer] = (),
    checkpoint: Prefix = NO_PREFIX,
    *,
    can: Capabilities,
) -> Plan:
    """`delivered`: by the door of the caller who waits for the job, if any; `others`: by doors whose callers watch it.
    `can`: of the engine that takes the job up.
    """
    if goes_on(task, can) and delivered.whole:
        plan = _joined(delivered.ids, checkpoint)
        for other in others:
            if other.whole and other.ids[: plan.start_index] == plan.prefix.ids:
                plan = _joined(other.ids, checkpoint)
        return plan
    if not delivered.next_index:
        return Continue()
    if can.exact and task.sampling.greedy and task.sampling.n == 1:
        return Rerun(delivered.next_index, delivered.ids)
    return Unsound(delivered.next_index)


def completed(delivered: Offer, checkpoint: Prefix, lineage: Iterable[Attempt]) -> Offer:
    """What was delivered, with ids that the door has not kept, where a checkpoint is sure to have them: both are of the
    only attempt before ours. One of an older release in between would not say that it has begun."""
    count, attempts = delivered.next_index, tuple(lineage)
    only = len(attempts) <= 2 and len(spans(attempts)) == 1
    if delivered.whole or len(checkpoint) < count or not only:
        return delivered
    if checkpoint.ids[: len(delivered.ids)] != delivered.ids:
        return delivered
    return Offer(count, checkpoint.ids[:count])


def _joined(ids: tuple[int, ...], checkpoint: Prefix) -> Continue:
    """The longer of the two, where they agree; otherwise what was delivered."""
    both = min(len(ids), len(checkpoint))
    if checkpoint.ids[:both] != ids[:both]:
        return Continue(Prefix(ids))
    if len(checkpoint) >= len(ids):
        return Continue(checkpoint, len(checkpoint))
    logprobs = checkpoint.logprobs + (UNKNOWN,) * (len(ids) - len(checkpoint)) if checkpoint.logprobs else ()
    return Continue(Prefix(ids, logprobs), len(checkpoint))
