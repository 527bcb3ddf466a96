"""How long a request will wait and run: estimates from the plan, the leases and what this door accepted since.

    priority   wait  = (jobs ahead + 1) x mean service / slots, over the share that the lower lanes' floor leaves, where
                       no slot is free; the time until running lower work yields, where that is sooner
               TTFT  = wait + (prompt tokens ahead / workers + own) x seconds a token + one step
    parking    wait  = max( W / mu_res, P / lower_tokens_per_s ) (+ the load time of a pool without workers)
               W     = device-seconds of its lane that are due no later, and of the lanes above; P the same in prompt
                       tokens, by the mix of this request; less what free slots take at once
               mu_res = max( floor x mu, mu - lambda_priority x service / slots ), by turns with the lanes above and
               after what comes in there, and all on its way to its long-run mean (policy.turns)
    all        completion = wait + service; service from the step times at the expected batch, or from mean rates
               bound = estimate + z x sigma of the wait; for the answer, with what it takes longer at its 90 % length

Units: spans in seconds from now; work in device-seconds (a worker with all its slots in use does one device-second a
second); rates in tokens a second. Measured values win, the catalogue's are the prior. Source: policy.md (a). O(lanes x
buckets of demand). Failure modes: tenants share by fairness, so a small tenant's job comes before a flood that counts
as ahead here (the bound is too late then); work of one pool with very unlike requests makes P wrong; both move what
policy.calibration learns, which corrects the mean over a lane and not one kind of request.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

from msgspec import Struct
from msgspec.structs import replace

from laneway.core.catalogue import Pool
from laneway.core.fleet import LanePlan, Plan, PoolPlan, WorkerLease, WorkerState
from laneway.core.lanes import PARKING_LANES, Lane
from laneway.policy.inflow import Flow
from laneway.policy.turns import REVERSION_S, Supply, turns_s


class Load(Struct, frozen=True):
    """Work on its way to a pool that its plan does not show yet."""

    jobs: int = 0  # sent to ready, less those that ended
    prompt_tokens: int = 0  # not prefilled yet
    device_s: float = 0.0  # of what was parked or sent to ready in the parking lanes

    def __add__(self, other: Load) -> Load:
        return Load(self.jobs + other.jobs, self.prompt_tokens + other.prompt_tokens, self.device_s + other.device_s)

    def __sub__(self, other: Load) -> Load:
        left_s = max(0.0, self.device_s - other.device_s)  # rounding must not leave negative work
        return Load(self.jobs - other.jobs, self.prompt_tokens - other.prompt_tokens, left_s)


class PoolView(Struct, frozen=True):
    """What is known of a pool at this moment."""

    plan: PoolPlan
    stale: bool = False  # no valid plan: the numbers of workers come from leases, those of lanes may be old
    since: Load = Load()
    paused: frozenset[Lane] = frozenset()
    inflow: Mapping[Lane, Flow] = {}  # work that comes into each lane


def pool_view(pool: str, plan: Plan | None, leases: Iterable[WorkerLease], since: Load, *, fresh: bool) -> PoolView:
    """The plan where it is fresh; otherwise live workers as their leases say, on top of the last known lanes."""
    if plan is not None and fresh:
        return PoolView(plan.pool(pool), False, since, plan.paused)
    last = plan.pool(pool) if plan is not None else PoolPlan(pool)
    paused: frozenset[Lane] = plan.paused if plan is not None else frozenset()
    return PoolView(_from_leases(last, leases), True, since, paused)


def _from_leases(last: PoolPlan, leases: Iterable[WorkerLease]) -> PoolPlan:
    ready = [w for w in leases if w.pool == last.pool and w.state is WorkerState.READY]
    return replace(
        last,
        workers=len(ready),
        slots=sum(w.slots for w in ready),
        free_slots=sum(max(0, w.slots - w.running) for w in ready),
        prefill_tokens_per_s=_mean([w.prefill_tokens_per_s for w in ready]) or last.prefill_tokens_per_s,
        decode_tokens_per_s=_mean([w.decode_tokens_per_s for w in ready]) or last.decode_tokens_per_s,
        service_s=_mean([w.service_s for w in ready]) or last.service_s,
    )


def _mean(measured: list[float]) -> float:
    known = [value for value in measured if value > 0.0]
    return math.fsum(known) / len(known) if known else 0.0


class Rates(Struct, frozen=True):
    prefill_tokens_per_s: float
    decode_tokens_per_s: float

    def ttft_s(self, prompt_tokens: int) -> float:
        return prompt_tokens / self.prefill_tokens_per_s + 1.0 / self.decode_tokens_per_s

    def service_s(self, prompt_tokens: int, completion_tokens: int) -> float:
        return prompt_tokens / self.prefill_tokens_per_s + max(1, completion_tokens) / self.decode_tokens_per_s


def rates(pool: Pool, plan: PoolPlan, *, context_tokens: int = 0) -> Rates:
    """By step times at the present batch and one more; else measured means, or the prior. `context_tokens`: of each
    sequence. An idle pool is judged by the best that is known: a bad measurement that keeps work away would otherwise
    never be corrected."""
    if plan.slots and plan.free_slots >= plan.slots:
        return best_rates(pool, plan, context_tokens=context_tokens)
    running = max(0, plan.slots - plan.free_slots)
    stepped = _by_steps(plan, min(running / max(1, plan.workers) + 1.0, max(1, pool.slots)), context_tokens)
    if stepped is not None:
        return stepped
    return Rates(
        plan.prefill_tokens_per_s if plan.prefill_tokens_per_s > 0.0 else pool.prefill_tokens_per_s,
        plan.decode_tokens_per_s if plan.decode_tokens_per_s > 0.0 else pool.decode_tokens_per_s,
    )


def prefill_rate(pool: Pool, plan: PoolPlan) -> float:
    """Prompt tokens a second that all workers of a pool compute beside what runs there, with the contexts that it has:
    what its queue of prompts is emptied with. O(1)."""
    running = max(0, plan.slots - plan.free_slots)
    context = max(0, plan.kv_tokens - plan.free_kv_tokens) // running if running else 0
    return rates(pool, plan, context_tokens=context).prefill_tokens_per_s * max(1, plan.workers)


def best_rates(pool: Pool, plan: PoolPlan, *, context_tokens: int = 0) -> Rates:
    """The better of measured and prior: what the pool may do once it is idle."""
    alone = _by_steps(plan, 1.0, context_tokens)
    return Rates(
        max(pool.prefill_tokens_per_s, plan.prefill_tokens_per_s, alone.prefill_tokens_per_s if alone else 0.0),
        max(pool.decode_tokens_per_s, plan.decode_tokens_per_s, alone.decode_tokens_per_s if alone else 0.0),
    )


def _by_steps(plan: PoolPlan, batch: float, context_tokens: int) -> Rates | None:
    """A prompt token costs its part of a step of `batch` sequences besides its own: gamma + t(b, 0) / (C - b), since
    each sequence takes one token of the step."""
    times = plan.step_times
    if times.base_s <= 0.0:
        return None
    step_s = times.decode_s(round(batch), round(batch * context_tokens))
    chunk = max(1.0, times.chunk_tokens - batch) if times.chunk_tokens else math.inf
    token_s = times.prefill_token_s + step_s / chunk
    return Rates(1.0 / token_s, 1.0 / step_s) if token_s > 0.0 else None


class Eta(Struct, frozen=True):
    """`wait_s` and its standard deviation come from load; `ttft_s` and `completion_s` are expectations from now."""

    wait_s: float
    wait_sigma_s: float
    ttft_s: float
    completion_s: float
    longer_s: float = 0.0  # that the answer takes at the upper end of its length, beyond what is expected
    ahead_jobs: float = 0.0
    ahead_tokens: float = 0.0  # of prompts, not prefilled
    ahead_device_s: float = 0.0
    capacity: float = 0.0  # device-seconds a second that the lane gets

    @property
    def service_s(self) -> float:
        return self.completion_s - self.wait_s

    def scaled(self, factor: float) -> Eta:
        return replace(
            self,
            wait_s=self.wait_s * factor,
            wait_sigma_s=self.wait_sigma_s * factor,
            ttft_s=self.ttft_s * factor,
            completion_s=self.completion_s * factor,
            longer_s=self.longer_s * factor,
        )

    def waiting_until(self, start_in_s: float) -> Eta:
        """The same for a job that may not start earlier: the queue is worked off meanwhile."""
        shift = max(0.0, start_in_s - self.wait_s)
        return replace(
            self, wait_s=self.wait_s + shift, ttft_s=self.ttft_s + shift, completion_s=self.completion_s + shift
        )

    def bounds_s(self, z: float) -> tuple[float, float]:
        """Of the first token and of the whole answer: wait and length are independent, so their spreads add in
        squares."""
        doubt_s = z * self.wait_sigma_s
        return self.ttft_s + doubt_s, self.completion_s + math.hypot(doubt_s, self.longer_s)


# Standard deviation of a job's service over its mean. Output lengths of chat traffic spread about this much around a
# learned quantile (reference value of docs/policy.md).
SERVICE_SPREAD = 0.5


def slot_wait_s(pool: Pool, view: PoolView, *, jobs_ahead: int, service_s: float) -> float:
    """Expected time until a slot is free for a job that has `jobs_ahead` waiting before it; all slots are busy."""
    slots = max(1, view.plan.slots or pool.slots)
    return (jobs_ahead + 1) * (view.plan.service_s or service_s) / slots


# Of the running lower work, what is counted on to yield: the rest may be pinned, nearly done or not resumable.
YIELDING_SHARE = 0.5


def priority_eta(
    pool: Pool,
    view: PoolView,
    prompt_tokens: int,
    completion_tokens: int,
    *,
    long_tokens: int = 0,
    yield_wait_s: float | None = None,
    floor: float = 0.0,
) -> Eta:
    """Of a priority job sent to ready now. The pool has a worker.

    `yield_wait_s`: how long a job without a place waits until running lower work has yielded one; None: none yields.
    `floor`: share of the places that lower lanes take while they have work that waits.
    """
    plan = view.plan
    rate = rates(pool, plan, context_tokens=prompt_tokens)
    service = rate.service_s(prompt_tokens, completion_tokens)
    free = min(plan.slots, plan.free_slots - view.since.jobs) - plan.lane(Lane.PRIORITY).ready
    wait = sigma = 0.0
    ahead = max(0, -free)
    if free <= 0:
        lower_waits = any(plan.lane(lane).ready + plan.lane(lane).parked for lane in PARKING_LANES)
        share = 1.0 - min(0.9, floor) if lower_waits else 1.0
        wait = slot_wait_s(pool, view, jobs_ahead=ahead, service_s=service) / share
        sigma = SERVICE_SPREAD * wait / (ahead + 1) ** 0.5
        lower = sum(plan.lane(lane).running for lane in PARKING_LANES)
        if yield_wait_s is not None and ahead < YIELDING_SHARE * lower and yield_wait_s < wait:
            wait, sigma = yield_wait_s, SERVICE_SPREAD * yield_wait_s
    tokens_ahead = max(0, view.since.prompt_tokens)
    before_prefill = wait + tokens_ahead / (rate.prefill_tokens_per_s * max(1, plan.workers)) + _lower_chunk_s(plan)
    return Eta(
        before_prefill,
        sigma,
        before_prefill + rate.ttft_s(prompt_tokens),
        before_prefill + service,
        longer_s=max(0.0, rate.service_s(prompt_tokens, long_tokens) - service),
        ahead_jobs=ahead,
        ahead_tokens=tokens_ahead,
        capacity=float(plan.workers),
    )


def _lower_chunk_s(plan: PoolPlan) -> float:
    """What a priority prompt waits for a chunk of a lower lane's that is under way: its share of steps x its length."""
    chunk_s = plan.step_times.chunk_tokens * plan.step_times.prefill_token_s
    busy = plan.lower_tokens_per_s * plan.step_times.prefill_token_s / max(1, plan.workers)
    return min(1.0, busy) * chunk_s / 2.0 if any(plan.lane(lane).running for lane in PARKING_LANES) else 0.0


def parking_eta(
    pool: Pool,
    view: PoolView,
    lane: Lane,
    prompt_tokens: int,
    completion_tokens: int,
    *,
    floor: float,
    long_tokens: int = 0,
    due_s: float | None = None,
    share: float = 1.0,
    rate: Rates | None = None,
) -> Eta:
    """Of a deferrable or batch job behind the work of its own lane that is due by `due_s` (Unix; its latest start;
    None: behind all) and of the parking lanes above it.

    `share`: of what parking lanes get, its lane's least while those above have work; 1: it has none. `rate`: as `rates`
    has it for this prompt, where that is known. A pool without workers is expected to have its planned ones after its
    load time.
    """
    plan = view.plan
    rate = rate or rates(pool, plan, context_tokens=prompt_tokens)
    service = rate.service_s(prompt_tokens, completion_tokens)
    each = device_s(pool, service)
    mean = device_s(pool, plan.service_s or service)
    own, above = _work_ahead(pool, view, lane, service_s=service, due_s=due_s)
    load, free = 0.0, 0
    if plan.workers:
        capacity = plan.workers * max(floor, 1.0 - _priority_share(pool, plan, service))
        later = plan.workers * max(floor, 1.0 - _mean_share(view, plan)) if view.inflow else capacity
        waiting = sum(each_lane.ready for each_lane in plan.lanes) + view.since.jobs
        free = max(0, plan.free_slots - max(0, waiting))
    else:
        load = pool.load_s
        capacity = later = float(max(1, pool.workers))
        free = max(1, pool.workers) * pool.slots
    taken_at_once = free * mean
    ahead = max(0.0, own + above - taken_at_once)
    flows = [view.inflow[each] for each in _above(lane) if each in view.inflow]
    inflow, mean_inflow = sum(flow.rate for flow in flows), sum(flow.mean for flow in flows)
    supply = Supply(capacity, later, inflow, mean_inflow, share)
    above = min(ahead, above)
    queue = turns_s(ahead - above, above, supply)
    less = _unsteady(view, lane, queue + service, mean)
    longer_s = turns_s(ahead - above, above, supply.less(less, floor)) - queue if ahead and less else 0.0
    sigma = math.hypot(SERVICE_SPREAD * (ahead * mean) ** 0.5 / capacity, longer_s)
    tokens_ahead = ahead * prompt_tokens / each if each > 0.0 else 0.0
    prefill_s = 0.0
    if plan.workers and plan.lower_tokens_per_s > 0.0:
        queue = max(queue, tokens_ahead / plan.lower_tokens_per_s)
        prefill_s = max(
            0.0, prompt_tokens * (plan.workers / plan.lower_tokens_per_s) - prompt_tokens / rate.prefill_tokens_per_s
        )
    if plan.workers and free < 1:
        queue += mean / capacity  # until the first place frees
    wait = load + queue
    return Eta(
        wait,
        sigma,
        wait + rate.ttft_s(prompt_tokens) + prefill_s,
        wait + service + prefill_s,
        longer_s=max(0.0, rate.service_s(prompt_tokens, long_tokens) - service),
        ahead_jobs=ahead / mean if mean > 0.0 else 0.0,
        ahead_tokens=tokens_ahead,
        ahead_device_s=ahead,
        capacity=capacity,
    )


def _unsteady(view: PoolView, lane: Lane, horizon_s: float, mean_s: float) -> float:
    """One sigma of what higher lanes take of the capacity over a time: of independent arrivals of so much work a second
    in bursts of the plan's burstiness, or as their inflow was seen to swing, whichever is more."""
    above = [view.inflow[each] for each in (Lane.PRIORITY, *_above(lane)) if each in view.inflow]
    rate = sum(flow.rate for flow in above)
    horizon_s = max(1.0, horizon_s)
    chance = math.sqrt(max(1.0, view.plan.burstiness) * rate * mean_s * (1.0 + SERVICE_SPREAD**2) / horizon_s)
    lasts = min(1.0, math.sqrt(2.0 * REVERSION_S / horizon_s))  # swings even out over a long wait
    return max(chance, lasts * sum(flow.spread for flow in above))


def promised_wait_s(pool: Pool, view: PoolView, lane: Lane, load: Load, eta: Eta) -> float:
    """How long promised work keeps the pool before a request of this estimate has its turn after it."""
    if lane is Lane.PRIORITY:
        return load.jobs * (view.plan.service_s or eta.service_s) / max(1, view.plan.slots or pool.slots)
    pace = min(eta.capacity, eta.ahead_device_s / eta.wait_s) if eta.ahead_device_s and eta.wait_s else eta.capacity
    return load.device_s / max(1e-3, pace)  # at the pace of what stands ahead: a low lane gets a share alone


def _priority_share(pool: Pool, plan: PoolPlan, service_s: float) -> float:
    """Of the workers' time that priority takes, 0 to 1: by its arrivals where they are known, else by what runs."""
    if plan.priority_per_s > 0.0:
        each_s = device_s(pool, plan.service_s or service_s)
        return min(1.0, plan.priority_per_s * each_s / max(1, plan.workers))
    return min(1.0, plan.lane(Lane.PRIORITY).running / max(1, plan.slots))


def _mean_share(view: PoolView, plan: PoolPlan) -> float:
    """Of the workers' time that priority took lately, in the long run."""
    flow = view.inflow.get(Lane.PRIORITY)
    return min(1.0, flow.mean / max(1, plan.workers)) if flow is not None else 0.0


def work_ahead_s(pool: Pool, view: PoolView, lane: Lane, *, service_s: float, due_s: float | None = None) -> float:
    """Device-seconds of the parking lanes down to `lane`, parked or ready and not claimed; of its own lane what is due
    by `due_s` (Unix seconds; None: all)."""
    return sum(_work_ahead(pool, view, lane, service_s=service_s, due_s=due_s))


def _work_ahead(
    pool: Pool, view: PoolView, lane: Lane, *, service_s: float, due_s: float | None
) -> tuple[float, float]:
    """Of its own lane, with what this door sent since; and of those above."""
    mean = device_s(pool, view.plan.service_s or service_s)
    own_plan = view.plan.lane(lane)
    own = due_by(own_plan, due_s) + own_plan.ready * mean + view.since.device_s
    above = 0.0
    for each in _above(lane):
        plan = view.plan.lane(each)
        above += plan.parked_device_s + plan.ready * mean
    return own, above


_HIGHER = {lane: PARKING_LANES[:rank] for rank, lane in enumerate(PARKING_LANES)}


def _above(lane: Lane) -> Sequence[Lane]:
    """The parking lanes that go before it."""
    return _HIGHER[lane]


def due_by(plan: LanePlan, due_s: float | None) -> float:
    """Parked device-seconds of a lane that are due by a Unix time, linear between the points of its curve."""
    if due_s is None or not plan.demand:
        return plan.parked_device_s
    at = bisect_left(plan.demand, due_s, key=attrgetter("by_s"))
    if at == len(plan.demand):
        return plan.demand[-1].device_s
    point = plan.demand[at]
    if not at:
        return point.device_s
    before = plan.demand[at - 1]
    part = (due_s - before.by_s) / (point.by_s - before.by_s)
    return before.device_s + part * (point.device_s - before.device_s)


def device_s(pool: Pool, service_s: float) -> float:
    """The part of a worker's time that a job of this service takes: it shares the worker with its other slots."""
    return service_s / max(1, pool.slots)
