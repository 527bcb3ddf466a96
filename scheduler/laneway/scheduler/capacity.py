"""What the leader learns of each pool's priority work, and what it has published of the workers that are wanted.

Owns the forecasts and the calm of desired workers. A new leader takes the level of arrivals, their burstiness and the
number of workers from the plan of the leader before; the season it must see for itself (policy.forecast).
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from laneway.core.catalogue import Catalogue
from laneway.core.clock import Clock
from laneway.core.fleet import Plan, PoolPlan
from laneway.core.lanes import Lane
from laneway.policy.desired import DesiredParams, Scaling
from laneway.policy.forecast import Outlook, PoolForecast
from laneway.policy.plan import Depth

OUTLOOK_AGE_S = 5.0  # a plan that says something new is published: the forecast says so this often at most


class Capacity:
    def __init__(self, catalogue: Catalogue, clock: Clock, before: Plan | None = None) -> None:
        self.forecasts: dict[str, PoolForecast] = {}
        self._clock = clock
        self._catalogue = catalogue
        self._scaling: dict[str, Scaling] = {}
        self._outlooks: Mapping[str, Outlook] = {}
        self._outlook_s = float("-inf")  # monotonic
        now_s = clock.now()
        for pool in catalogue.pools:
            last = before.pool(pool.name) if before else PoolPlan(pool.name)
            self.forecasts[pool.name] = PoolForecast(now_s, per_s=last.priority_per_s, burstiness=last.burstiness)
            self._scaling[pool.name] = Scaling(last.desired_workers)

    def arrived(self, pool: str, lane: Lane) -> None:
        forecast = self.forecasts.get(pool)
        if lane is Lane.PRIORITY and forecast is not None:
            forecast.arrived(self._clock.now())

    def observe(self, depths: Mapping[tuple[str, Lane], Depth]) -> Mapping[str, Outlook]:
        """Takes in what is in the priority lanes at this moment; what is expected, by pool."""
        now_s = self._clock.now()
        for (pool, lane), depth in depths.items():
            if lane is Lane.PRIORITY and pool in self.forecasts:
                self.forecasts[pool].observe(depth.ready + depth.running, now_s)
        if self._clock.monotonic() - self._outlook_s >= OUTLOOK_AGE_S:
            self._outlook_s = self._clock.monotonic()
            self._outlooks = {
                pool.name: self.forecasts[pool.name].outlook(pool.load_s) for pool in self._catalogue.pools
            }
        return self._outlooks

    def calm(self, plan: Plan, params: DesiredParams) -> Plan:
        """The plan with desired workers as they may be published now."""
        load_s = {pool.name: pool.load_s for pool in self._catalogue.pools}
        pools = tuple(
            replace(
                pool,
                desired_workers=self._scaling[pool.pool].step(
                    pool.desired_workers, plan.made_s, load_s=load_s[pool.pool], there=pool.workers, params=params
                ),
            )
            for pool in plan.pools
        )
        return replace(plan, pools=pools)
