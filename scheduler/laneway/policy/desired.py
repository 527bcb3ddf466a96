"""How many workers a pool should have, and what asks for them: policy.md (g).

    n* = max(n_slo, n_due, n_kv, n_running, n_min)

- n_slo: places for the priority work that is expected by the time a new worker could be ready (q90 of the forecast), or
  is here: ceil((jobs + z sqrt(F lambda tau)) / b*), with b* the sequences of one worker at which a step takes the share
  theta of the TPOT target: b* = (theta tpot - base) / per sequence, at most its places. Without measured step times:
  85 % of its places. What contexts cost is left out: nobody tells the scheduler how long those of priority are.
- n_due: the processor-demand test. For each due time d beyond the load time: (work due by d / (d - now - load time) +
  priority demand) / 85 %. Work due before a new worker could be ready asks for as many as could do it in the time of
  one load. A tenant counts with at most `tenant_workers` workers' worth by any d: a mis-set deadline buys no fleet.
- n_kv: predicted peak KV of what runs and is ready / (90 % of a worker's).
- n_running: places for all that runs, so that no worker goes which holds something.
- n_min: 1 if anything waits at all (a cold pool) or the pool is planned to have any.

Never more workers than there are jobs to fill them (now, or by the forecast). Batch alone never asks for more than
`batch_workers_max` (unset: as many as are planned).

`Scaling` keeps what is published calm: up at most to twice of 30 s before (at least one more), down by one in 120 s and
only while n* < 0.85 n for load time + 180 s.

Cost: O(D + N): D points of the demand curve, and the N nearest jobs that clipping looks at.
Known failure modes: the forecast's; a scale-up that arrives after the burst (headroom covers what is shorter than a
load); a tenant's jobs beyond the nearest N are not clipped.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from msgspec import Struct

from laneway.core.catalogue import Pool
from laneway.core.fleet import Demand, LanePlan, StepTimes
from laneway.core.lanes import LANES, PARKING_LANES, Lane
from laneway.policy.forecast import Outlook

NEAR_JOBS = 2_000  # the earliest due of a pool that tenants are clipped by


@dataclass(frozen=True, slots=True)
class DesiredParams:
    utilisation: float = 0.85  # share of a worker's time or places that may be planned with
    theta: float = 0.8  # share of the TPOT target that may be planned with
    tpot_s: float = 0.1
    z: float = 2.33
    kv_share: float = 0.9
    batch_workers_max: int | None = None  # unset: as many as the pool is planned to have, at least one
    tenant_workers: float = 4.0  # that the near deadlines of one tenant may ask for
    up_factor: float = 2.0
    up_span_s: float = 30.0
    down_ratio: float = 0.85
    down_gap_s: float = 120.0
    down_after_s: float = 180.0  # beyond the load time


class Wanted(Struct, frozen=True):
    workers: int
    reason: str  # SLO, DUE, KV, RUNNING, COLD, PLANNED, or empty: nobody asks


class Load(Struct, frozen=True):
    """What a pool has to do."""

    lanes: Sequence[LanePlan] = ()
    deferrable: Sequence[Demand] = ()
    batch: Sequence[Demand] = ()
    near: Sequence[tuple[str, float, float]] = ()  # (tenant, latest start, device-s) of the jobs due first
    workers: int = 0  # that are ready
    kv_tokens_used: int = 0  # reserved at the workers
    kv_tokens: int = 0  # of one worker; 0: the pool's
    job_tokens: float = 0.0  # prompt and output of a job of the lower lanes on average; 0: not known
    step_times: StepTimes = StepTimes()
    outlook: Outlook = Outlook()


def desired(pool: Pool, load: Load, now_s: float, params: DesiredParams = DesiredParams()) -> Wanted:
    """What asks for the most. See the module."""
    without = _desired(pool, load, load.deferrable, _jobs(load, (Lane.PRIORITY, Lane.DEFERRABLE)), now_s, params)
    both = merged(load.deferrable, load.batch) if load.batch else load.deferrable
    everything = _desired(pool, load, both, _jobs(load, LANES), now_s, params)
    most = params.batch_workers_max if params.batch_workers_max is not None else max(1, pool.workers)
    if everything.workers <= max(most, without.workers):
        return everything
    # What runs keeps its workers, whoever it belongs to.
    running = math.ceil(sum(each.running for each in load.lanes) / max(1, pool.slots))
    return max(without, Wanted(max(most, running), everything.reason), key=lambda wanted: wanted.workers)


def _jobs(load: Load, lanes: Sequence[Lane]) -> int:
    """Jobs of these lanes, and all that runs."""
    return sum(
        each.running + (each.ready + (each.parked if each.lane in PARKING_LANES else 0) if each.lane in lanes else 0)
        for each in load.lanes
    )


def _desired(
    pool: Pool, load: Load, demand: Sequence[Demand], jobs: int, now_s: float, params: DesiredParams
) -> Wanted:
    slots = max(1, pool.slots)
    priority = next((each for each in load.lanes if each.lane is Lane.PRIORITY), LanePlan(Lane.PRIORITY))
    here = priority.ready + priority.running
    places = _places(pool, load, params)
    expected = _expected(load.outlook, pool.load_s, params)
    running = sum(each.running for each in load.lanes)
    filled = math.ceil(jobs / slots)
    asks = [
        Wanted(max(min(math.ceil(here / places), filled), math.ceil(expected / places)), "SLO"),
        Wanted(min(_due(pool, load, demand, now_s, params), filled), "DUE"),
        Wanted(min(_kv(pool, load, params), filled), "KV"),
        Wanted(min(math.ceil(running / slots), filled), "RUNNING"),
        Wanted(1 if jobs else 0, "COLD" if not load.workers else "RUNNING"),
        Wanted(1 if pool.workers else 0, "PLANNED"),
    ]
    best = max(asks, key=lambda ask: ask.workers)  # the first of equals
    return best if best.workers else Wanted(0, "")


def _places(pool: Pool, load: Load, params: DesiredParams) -> float:
    """b*: priority sequences that one worker may decode within the TPOT target."""
    places = params.utilisation * max(1, pool.slots)
    times = load.step_times
    if times.base_s > 0.0 and times.sequence_s > 0.0:
        within = (params.theta * params.tpot_s - times.base_s) / times.sequence_s
        places = min(float(max(1, pool.slots)), max(1.0, within))
    return places


def _expected(outlook: Outlook, load_s: float, params: DesiredParams) -> float:
    """Priority jobs in the pool by the time of a load, with room for what bursts within the reaction time."""
    if outlook.jobs_q90 <= 0.0:
        return 0.0
    reaction_s = min(load_s, 2.0)  # beyond that, queues and slots have adapted: policy.md (b4)
    return outlook.jobs_q90 + params.z * math.sqrt(outlook.burstiness * outlook.per_s * reaction_s)


def _due(pool: Pool, load: Load, demand: Sequence[Demand], now_s: float, params: DesiredParams) -> int:
    if not demand:
        return 0
    clip = _Clip(load.near, params.tenant_workers, max(1.0, pool.load_s))
    most = 0.0
    for point in demand:
        left_s = time_left_s(point.by_s, now_s, pool.load_s)
        most = max(most, (point.device_s - clip.over(point.by_s, left_s)) / left_s)
    return math.ceil((most + load.outlook.jobs / max(1, pool.slots)) / params.utilisation - 1e-9)


def time_left_s(due_s: float, now_s: float, load_s: float) -> float:
    """In which a worker that is ordered now can work on what is due then; at least the time of one load."""
    return max(due_s - now_s - load_s, load_s, 1.0)


class _Clip:
    """What single tenants ask for beyond their share, of the jobs due first. Asked with rising times."""

    def __init__(self, near: Sequence[tuple[str, float, float]], workers: float, left_s_min: float) -> None:
        self._near = near
        self._workers = workers
        self._least = workers * left_s_min  # nobody with less is ever clipped
        self._next = 0
        self._due: dict[str, float] = {}  # by tenant: device-seconds due so far
        self._large: set[str] = set()  # those that may be clipped

    def over(self, due_s: float, left_s: float) -> float:
        """Device-seconds due by then that do not count."""
        while self._next < len(self._near) and self._near[self._next][1] <= due_s:
            tenant, _, device_s = self._near[self._next]
            self._due[tenant] = self._due.get(tenant, 0.0) + device_s
            if self._due[tenant] > self._least:
                self._large.add(tenant)
            self._next += 1
        most = self._workers * left_s
        return math.fsum(self._due[tenant] - most for tenant in self._large if self._due[tenant] > most)


def _kv(pool: Pool, load: Load, params: DesiredParams) -> int:
    kv = load.kv_tokens or pool.kv_tokens
    if not kv:
        return 0
    ready = sum(each.ready for each in load.lanes)
    return math.ceil((load.kv_tokens_used + ready * load.job_tokens) / (params.kv_share * kv))


def merged(one: Sequence[Demand], other: Sequence[Demand]) -> list[Demand]:
    """The curve of both together."""
    steps = [(point.by_s, point.device_s - before) for curve in (one, other) for point, before in _steps(curve)]
    total, out = 0.0, list[Demand]()
    for by_s, device_s in sorted(steps):
        total += device_s
        out.append(Demand(by_s, total))
    return out


def _steps(curve: Sequence[Demand]) -> Iterator[tuple[Demand, float]]:
    """Each point with what was due before it."""
    before = 0.0
    for point in curve:
        yield point, before
        before = point.device_s


class Scaling:
    """What is published of one pool over time, so that it moves calmly. Times are Unix seconds."""

    def __init__(self, workers: int = 0) -> None:
        self.workers = workers
        self._then = deque([(-math.inf, workers)])  # what was published, over the last `up_span_s`
        self._low_since_s: float | None = None
        self._down_s = -math.inf

    def step(self, wanted: int, now_s: float, *, load_s: float, there: int, params: DesiredParams) -> int:
        """`there`: workers that are ready."""
        while len(self._then) > 1 and self._then[1][0] <= now_s - params.up_span_s:
            self._then.popleft()
        before = max(self._then[0][1], there)
        n = self.workers
        if wanted > n:
            n = max(n, min(wanted, max(before + 1, math.floor(before * params.up_factor))))
        n = self._down(n, wanted, now_s, load_s, params)
        if self._then[-1][1] != n:
            self._then.append((now_s, n))
        self.workers = n
        return n

    def _down(self, n: int, wanted: int, now_s: float, load_s: float, params: DesiredParams) -> int:
        if wanted >= params.down_ratio * n or n == 0:
            self._low_since_s = None
            return n
        if self._low_since_s is None:
            self._low_since_s = now_s
        ripe = now_s - self._low_since_s >= load_s + params.down_after_s
        if not ripe or now_s - self._down_s < params.down_gap_s:
            return n
        self._down_s = now_s
        return n - 1
