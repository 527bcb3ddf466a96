"""What the scheduler decided about each job lately, kept in memory and bounded, for ExplainJob."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from msgspec import Struct, field

JOBS_MAX = 20_000
STEPS_MAX = 8  # of one job


class Step(Struct, frozen=True):
    at_s: float  # Unix seconds
    action: str  # past tense
    reason: str
    facts: Mapping[str, str] = field(default_factory=dict)


class DecisionLog:
    """The last steps of the jobs decided on last."""

    def __init__(self, jobs_max: int = JOBS_MAX, steps_max: int = STEPS_MAX) -> None:
        self._jobs_max = jobs_max
        self._steps_max = steps_max
        self._steps: OrderedDict[str, list[Step]] = OrderedDict()

    def add(self, job_id: str, step: Step) -> None:
        """A step like the last one of the job says nothing new and is left out."""
        steps = self._steps.setdefault(job_id, [])
        self._steps.move_to_end(job_id)
        if steps and (steps[-1].action, steps[-1].reason) == (step.action, step.reason):
            return
        steps.append(step)
        del steps[: -self._steps_max]
        while len(self._steps) > self._jobs_max:
            self._steps.popitem(last=False)

    def of(self, job_id: str) -> list[Step]:
        return list(self._steps.get(job_id, ()))
