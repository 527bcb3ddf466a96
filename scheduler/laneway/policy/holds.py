"""Keeps the plan of each pool's hold windows, made anew each minute, and how much was released since.

In the scheduler's memory alone: with every scheduler dead, jobs fire at their fire times as if nothing had been held.

Units: Unix seconds, device-seconds. Cost: a plan is O(points of the demand curve + slots) each minute, a look O(slots).
Source: policy.holding, policy.md (c). Known failure mode: within its minute a plan knows nothing of work parked since.
"""

from __future__ import annotations

from collections.abc import Mapping

from laneway.core.fleet import PoolPlan
from laneway.core.lanes import PARKING_LANES, Lane
from laneway.core.subjects import ParkSubject
from laneway.policy.forecast import PoolForecast
from laneway.policy.holding import NO_HOLD, SLOTS_MAX, Hold, HoldParams, HoldPlan, held_until_s, hold_now, plan_holds
from laneway.policy.parked import ParkIndex

PLAN_EVERY_S = 60.0


class Holds:
    def __init__(self, forecasts: Mapping[str, PoolForecast]) -> None:
        self._forecasts = forecasts
        self._plans: dict[str, HoldPlan] = {}
        self._released_s: dict[str, float] = {}  # device-seconds since the plan was made
        self._made_s: dict[str, float] = {}
        self._limits_s: dict[str, dict[float, float]] = {}  # by pool: latest start -> until when it is held at most
        self.now: dict[str, Hold] = {}  # as of the last look

    def look(self, pool: PoolPlan, index: ParkIndex, now_s: float, params: HoldParams) -> Hold:
        """How much of a pool's parked work may go at this moment."""
        if not params.on:
            self._plans.pop(pool.pool, None)
        if now_s - self._made_s.get(pool.pool, float("-inf")) >= PLAN_EVERY_S:
            self._plan(pool, index, now_s, params)
        plan = self._plans.get(pool.pool)
        hold = NO_HOLD
        if plan is not None and plan.portions and pool.slots and not self._forecasts[pool.pool].broken:
            priority = pool.lane(Lane.PRIORITY)
            hold = hold_now(
                plan,
                released_device_s=self._released_s[pool.pool],
                price_now=(priority.ready + priority.running) / pool.slots,
                in_use=1.0 - pool.free_slots / pool.slots,
                now_s=now_s,
                params=params,
            )
        self.now[pool.pool] = hold
        return hold

    def _plan(self, pool: PoolPlan, index: ParkIndex, now_s: float, params: HoldParams) -> None:
        self._made_s[pool.pool] = now_s
        self._released_s[pool.pool] = 0.0
        self._plans.pop(pool.pool, None)
        forecast = self._forecasts.get(pool.pool)
        demand = index.demand(pool.pool, PARKING_LANES)
        if not params.on or forecast is None or not pool.workers or not demand:
            return
        before = self._limits_s.get(pool.pool, {})
        limits = {due_s: before.get(due_s, held_until_s(due_s, now_s, params)) for due_s, _ in demand}
        self._limits_s[pool.pool] = limits
        coming = forecast.coming(SLOTS_MAX, max(1, pool.slots // pool.workers))
        if coming:
            self._plans[pool.pool] = plan_holds(
                demand, coming, workers=pool.workers, now_s=now_s, limits=limits, params=params
            )

    def released(self, park: ParkSubject) -> None:
        if park.pool in self._released_s:
            self._released_s[park.pool] += park.cost_ms / 1000.0

    def facts(self, park: ParkSubject) -> dict[str, str]:
        """When and at what price the work due with this job is planned to go."""
        plan = self._plans.get(park.pool)
        part = plan.planned(park.due_ms / 1000.0) if plan is not None else None
        if part is None:
            return {}
        now = self.now.get(park.pool, NO_HOLD)
        return {
            "planned_release_ms": str(round(part.start_s * 1000)),
            "planned_price": f"{part.price:.2f}",
            "price_now": f"{now.price:.2f}",
        }
