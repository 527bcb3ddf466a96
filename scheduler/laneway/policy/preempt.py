"""Which running job yields its place to a priority job that finds no room: at most one, or none.

Formula. A run's sunk work is the KV it has computed (prompt and answer so far, all of it prefilled again when the job
goes on), and what it frees is the KV it reserved. The victim is the least by

    (batch before deferrable, sunk / freed, newest first, job id)

among the runs of lower lanes that

- would let the priority job start: one place more, and `free KV + freed >= need`. No single one, no preemption: a
  second victim for one job would cost more than the wait of one;
- yielded less than `preemptions_max` times before. Then a job is pinned, so that it cannot be kept from its end;
- have at most `done_max` of their predicted output, since what is nearly done frees its place by itself;
- keep their own promise: `deadline - now - rest of the service >= slack_s_min + cost of going on`, where going on costs
  prefilling `prompt + answer so far`, and the slack is for the wait until there is room again. (The reference rule asks
  this of deferrable jobs only, since batch deadlines are far. One that is near was accepted all the same.);
- lose nothing but a prefill: the request is resumable (core.job.resumable), or has no output yet. Any other would
  have to begin again from its prompt, or end ABORTED where a caller has seen output: all its decoding would be lost,
  which no prefill outweighs, so it runs on;
- were not started by the lanes' floor, which would pass nothing if it could be taken back.

Source: the order and the 80 % are those of TRAIL; one preemption for each priority job is Valve's (docs/policy.md).
Complexity: O(runs) for each priority job that finds no room. The same runs give the same victim in whatever order they
are listed. Failure modes: a wrong length prediction lets a nearly finished job yield (it costs one prefill, twice at
most); a pool full of pinned or unsound jobs lets none, and priority waits for the next free place as it would without.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from msgspec import Struct

from laneway.core.fleet import PoolPlan
from laneway.core.lanes import Lane

_ORDER = {Lane.BATCH: 0, Lane.DEFERRABLE: 1}  # who yields first


@dataclass(frozen=True, slots=True)
class PreemptParams:
    preemptions_max: int = 2  # of one job; 0: nobody ever yields
    done_max: float = 0.8  # of the predicted output; who has more runs on
    slack_s_min: float = 20.0  # that a job keeps beyond what going on costs it
    delay_s: float = 0.05  # a worker without room leaves a priority job to those with room for so long
    delay_elsewhere_s: float = 0.5  # the same while the plan shows room elsewhere, which may be gone

    def __post_init__(self) -> None:
        if not self.preemptions_max >= 0:
            raise ValueError("preemptions_max must be at least 0")
        if not 0.0 <= self.done_max <= 1.0:
            raise ValueError("done_max must be from 0 to 1")
        if not (self.slack_s_min >= 0.0 and self.delay_s >= 0.0 and self.delay_elsewhere_s >= 0.0):
            raise ValueError("slack_s_min, delay_s and delay_elsewhere_s must be at least 0")


class Standing(Struct, frozen=True):
    """A run of a worker as it stands. Times of the same clock as `now_s` below."""

    job_id: str
    lane: Lane
    began_s: float
    kv_tokens: int  # reserved: what it frees
    prompt_tokens: int
    generated: int  # tokens of its answer so far, those of earlier attempts among them
    predicted: int  # tokens of its whole answer
    deadline_s: float
    resumable: bool = True
    preemptions: int = 0
    kept: bool = False  # the floor started it
    ending: bool = False  # on its way out already

    @property
    def sunk_tokens(self) -> int:
        return self.prompt_tokens + self.generated


class Speeds(Struct, frozen=True):
    """Tokens a second."""

    prefill: float
    decode: float  # of one sequence


def choose_victim(
    runs: Iterable[Standing],
    *,
    need_kv_tokens: int,
    free_kv_tokens: int,
    speeds: Speeds,
    now_s: float,
    params: PreemptParams,
) -> Standing | None:
    """The run that is to yield so that a priority job of `need_kv_tokens` can start; None: it waits."""
    fitting = (
        run
        for run in runs
        if may_yield(run, speeds, now_s, params) and free_kv_tokens + run.kv_tokens >= need_kv_tokens
    )
    return min(fitting, key=_key, default=None)


def may_yield(run: Standing, speeds: Speeds, now_s: float, params: PreemptParams) -> bool:
    """Whether a run may be asked to yield at all, whatever it frees."""
    if run.lane not in _ORDER or run.ending or run.kept or run.preemptions >= params.preemptions_max:
        return False
    if run.generated and not run.resumable:
        return False
    if run.generated > params.done_max * run.predicted:
        return False
    rest_s = (run.predicted - run.generated) / speeds.decode
    slack_s = run.deadline_s - now_s - rest_s
    return slack_s >= params.slack_s_min + run.sunk_tokens / speeds.prefill


def places_elsewhere(pool: PoolPlan, own_free: int) -> int:
    """Places that the plan shows free at other workers, beyond those that waiting priority jobs will take."""
    return max(0, pool.free_slots - own_free - pool.lane(Lane.PRIORITY).ready)


def wait_s(*, elsewhere: bool, params: PreemptParams) -> float:
    """How long after a priority job was heard of a worker without room leaves it to others."""
    return max(params.delay_s, params.delay_elsewhere_s) if elsewhere else params.delay_s


def _key(run: Standing) -> tuple[int, float, float, str]:
    return _ORDER[run.lane], run.sunk_tokens / max(1, run.kv_tokens), -run.began_s, run.job_id
