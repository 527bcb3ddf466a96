"""How long a request will wait and run: estimates from the plan, the leases and what this door accepted since.

Units: spans in seconds from now; work in device-seconds (a worker with all its slots in use does one device-second a
second); rates in tokens a second. Measured values win, the catalogue's are the prior.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from laneway.core.catalogue import Pool
from laneway.core.fleet import Plan, PoolPlan, WorkerLease, WorkerState
from laneway.core.lanes import PARKING_LANES, Lane


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
    return sum(known) / len(known) if known else 0.0


class Rates(Struct, frozen=True):
    prefill_tokens_per_s: float
    decode_tokens_per_s: float

    def ttft_s(self, prompt_tokens: int) -> float:
        return prompt_tokens / self.prefill_tokens_per_s + 1.0 / self.decode_tokens_per_s

    def service_s(self, prompt_tokens: int, completion_tokens: int) -> float:
        return prompt_tokens / self.prefill_tokens_per_s + max(1, completion_tokens) / self.decode_tokens_per_s


def rates(pool: Pool, plan: PoolPlan) -> Rates:
    """Measured rates, or the prior. An idle pool is judged by the better of both: a bad measurement that keeps work
    away would otherwise never be corrected."""
    if plan.slots and plan.free_slots >= plan.slots:
        return best_rates(pool, plan)
    return Rates(
        plan.prefill_tokens_per_s if plan.prefill_tokens_per_s > 0.0 else pool.prefill_tokens_per_s,
        plan.decode_tokens_per_s if plan.decode_tokens_per_s > 0.0 else pool.decode_tokens_per_s,
    )


def best_rates(pool: Pool, plan: PoolPlan) -> Rates:
    """The better of measured and prior: what the pool may do once it is idle."""
    return Rates(
        max(pool.prefill_tokens_per_s, plan.prefill_tokens_per_s),
        max(pool.decode_tokens_per_s, plan.decode_tokens_per_s),
    )


class Eta(Struct, frozen=True):
    """`wait_s` and its standard deviation come from load; `ttft_s` and `completion_s` are expectations from now."""

    wait_s: float
    wait_sigma_s: float
    ttft_s: float
    completion_s: float

    def scaled(self, factor: float) -> Eta:
        return Eta(self.wait_s * factor, self.wait_sigma_s * factor, self.ttft_s * factor, self.completion_s * factor)


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
    pool: Pool, view: PoolView, prompt_tokens: int, completion_tokens: int, *, yield_wait_s: float | None = None
) -> Eta:
    """Of a priority job sent to ready now. The pool has a worker.

    `yield_wait_s`: how long a job without a place waits until running lower work has yielded one; None: none yields.
    """
    rate = rates(pool, view.plan)
    service = rate.service_s(prompt_tokens, completion_tokens)
    free = min(view.plan.slots, view.plan.free_slots - view.since.jobs) - view.plan.lane(Lane.PRIORITY).ready
    wait = sigma = 0.0
    if free <= 0:
        ahead = -free
        wait = slot_wait_s(pool, view, jobs_ahead=ahead, service_s=service)
        sigma = SERVICE_SPREAD * wait / (ahead + 1) ** 0.5
        lower = sum(view.plan.lane(lane).running for lane in PARKING_LANES)
        if yield_wait_s is not None and ahead < YIELDING_SHARE * lower and yield_wait_s < wait:
            wait, sigma = yield_wait_s, SERVICE_SPREAD * yield_wait_s
    prefill_ahead = view.since.prompt_tokens / (rate.prefill_tokens_per_s * max(1, view.plan.workers))
    before_prefill = wait + prefill_ahead
    return Eta(before_prefill, sigma, before_prefill + rate.ttft_s(prompt_tokens), before_prefill + service)


def parking_eta(
    pool: Pool, view: PoolView, lane: Lane, prompt_tokens: int, completion_tokens: int, *, floor: float
) -> Eta:
    """Of a deferrable or batch job behind all work of its own lane and of the parking lanes above it.

    Capacity is what the present priority work leaves, at least the floor. A pool without workers is expected to have
    its planned ones after its load time.
    """
    rate = rates(pool, view.plan)
    service = rate.service_s(prompt_tokens, completion_tokens)
    ahead_s = work_ahead_s(pool, view, lane, service_s=service)
    load = 0.0
    if view.plan.workers:
        slots = max(1, view.plan.slots)
        share = 1.0 - min(1.0, view.plan.lane(Lane.PRIORITY).running / slots)
        capacity = view.plan.workers * max(floor, share)
        if not ahead_s and view.plan.free_slots <= 0:
            ahead_s = (view.plan.service_s or service) / slots
    else:
        load = pool.load_s
        capacity = float(max(1, pool.workers))
    each = device_s(pool, service)
    sigma = SERVICE_SPREAD * (ahead_s * each) ** 0.5 / capacity
    wait = load + ahead_s / capacity
    return Eta(wait, sigma, wait + rate.ttft_s(prompt_tokens), wait + service)


def work_ahead_s(pool: Pool, view: PoolView, lane: Lane, *, service_s: float) -> float:
    """Device-seconds of the parking lanes down to `lane`, parked or ready and not claimed."""
    above = PARKING_LANES[: PARKING_LANES.index(lane) + 1]
    mean = device_s(pool, view.plan.service_s or service_s)
    known = sum(plan.parked_device_s + plan.ready * mean for plan in map(view.plan.lane, above))
    return known + view.since.device_s


def device_s(pool: Pool, service_s: float) -> float:
    """The part of a worker's time that a job of this service takes: it shares the worker with its other slots."""
    return service_s / max(1, pool.slots)
