"""Which jobs of one worker may share one run of the engine: identical requests to which there is one answer.

Sharing never changes what a caller gets: each of the jobs keeps its record, its stream and its end, and only the
computing is done once. Source: `reference/policy.md` (c), single-flight.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from msgspec import Struct

from laneway.core.job import GenerateTask
from laneway.core.lanes import LANES, Lane


class Flying(Struct, frozen=True):
    """A sequence in the engine that others may join."""

    lane: Lane  # of the job that it was started for
    done: Sequence[int]  # ids of the answer that it was started with, computed by an earlier attempt
    given: Sequence[int]  # ids of the answer that the engine gave since


def flight_key(tenant: str, task: GenerateTask, *, exact: bool) -> Hashable | None:
    """Equal for jobs that may share a run; None for a job that has to run by itself.

    Deterministic is `temperature` 0 with `n` 1, or a seed where the engine is `exact`: elsewhere the draws of a seeded
    run may depend on what it is batched with, and each caller is owed draws of his own. Identical is the tenant, the
    prompt's ids, every field of the sampling (so `max_tokens` and the stops too), what constrains the output, adapter
    and salt. Compared by value, not by hash, so that no two requests are ever taken for each other. Equal temperature,
    stops and so on that are merely written differently are not recognised: such jobs run apart, which is sound.

    O(prompt tokens).
    """
    sampling = task.sampling
    seeded = sampling.seed is not None and exact
    if sampling.n != 1 or not (sampling.greedy or seeded):
        return None
    plain = tuple(getattr(sampling, name) for name in sampling.__struct_fields__ if name != "logit_bias")
    bias = tuple(sorted(sampling.logit_bias.items()))
    constraint = (task.json_object, task.json_schema, task.regex, task.grammar)
    return tenant, task.prompt_ids, plain, bias, constraint, task.adapter, task.cache_salt


def may_join(flying: Flying, lane: Lane, prefix: Sequence[int], start: int) -> bool:
    """Whether a job may go on with a sequence of its key.

    `prefix`: ids of its answer that it stands by (delivered, or from a checkpoint); `start`: index of the first id that
    it needs from the engine, which is `len(prefix)` where it goes on from ids, and 0 where it computes them again.

    Two things must hold. The answers agree: the sequence has every id from `start` on, and begins with `prefix`, so
    that nothing is a splice of two runs. And joining costs the job no time: before its first output a sequence moves at
    the pace of the lane that it was started for (lower lanes wait for the budget), so only jobs of that lane and below
    join; after it all sequences move alike.

    O(len(prefix)). Failure mode: a lower-lane job may be carried by a sequence that was started for priority, which
    no budget holds back; it costs nothing that would not have been computed anyway.
    """
    if not flying.given and LANES.index(lane) < LANES.index(flying.lane):
        return False
    known, base = len(flying.done), len(prefix) - len(flying.done)
    if start < known or base > len(flying.given):
        return False
    assert base >= 0, "nobody needs ids from beyond its prefix on"
    return tuple(prefix[:known]) == tuple(flying.done) and tuple(prefix[known:]) == tuple(flying.given[:base])
