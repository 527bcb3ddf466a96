"""The home slots of a region's pools as the plan shows them: what waits and runs in each, and who serves it.

Owns who served a home last, by name, so that a worker that restarts finds its own again. A new leader begins with what
the leases say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from laneway.core.catalogue import Catalogue, Pool
from laneway.core.fleet import HomePlan, WorkerLease
from laneway.core.lanes import LANES, Lane
from laneway.core.subjects import HOME_ANY
from laneway.policy.affinity import assign_homes
from laneway.policy.plan import Depth

HomeDepths = Mapping[tuple[str, Lane, str], Depth]  # by pool, lane and home


def lane_totals(depths: HomeDepths) -> dict[tuple[str, Lane], Depth]:
    """Of each pool and lane, over its homes; where there is no consumer for jobs without a home, it is unknown."""
    totals: dict[tuple[str, Lane], Depth] = {}
    for (pool, lane, _), depth in depths.items():
        if (pool, lane, HOME_ANY) in depths:
            before = totals.get((pool, lane), Depth())
            totals[pool, lane] = Depth(before.ready + depth.ready, before.running + depth.running)
    return totals


class Homes:
    """One scheduler's. `plans` is called once a look."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._pools = catalogue.pools
        self._holders: dict[str, dict[str, str]] = {pool.name: {} for pool in self._pools}  # pool: home -> name

    def plans(
        self, depths: HomeDepths, leases: Sequence[WorkerLease], oldest_s: Callable[[str, Lane, int, str], float]
    ) -> dict[str, tuple[HomePlan, ...]]:
        """By pool. `oldest_s`: how long the oldest of so many ready messages of a pool, lane and home has waited."""
        return {pool.name: tuple(self._plans(pool, depths, leases, oldest_s)) for pool in self._pools}

    def _plans(
        self,
        pool: Pool,
        depths: HomeDepths,
        leases: Sequence[WorkerLease],
        oldest_s: Callable[[str, Lane, int, str], float],
    ) -> list[HomePlan]:
        # Only what every lane has a consumer for: to any other home a job would be sent for good.
        homes = [home for home in pool.homes if all((pool.name, lane, home) in depths for lane in LANES)]
        served = self._serve(pool.name, homes, leases)
        plans = []
        for home in (*homes, *_left_over(pool, depths)):
            found = {lane: depths.get((pool.name, lane, home), Depth()) for lane in LANES}
            plans.append(
                HomePlan(
                    home=home,
                    worker_id=served.get(home, ""),
                    ready=sum(depth.ready for depth in found.values()),
                    running=sum(depth.running for depth in found.values()),
                    oldest_wait_s=max(oldest_s(pool.name, lane, found[lane].ready, home) for lane in LANES),
                )
            )
        return plans

    def _serve(self, pool: str, homes: Sequence[str], leases: Sequence[WorkerLease]) -> Mapping[str, str]:
        # One of a release that has no budget takes jobs of `any` alone: what went to its home would wait for others.
        workers = [each for each in leases if each.pool == pool and each.theta > 0.0]
        served = assign_homes(homes, workers, self._holders[pool])
        names = {each.worker_id: each.name for each in workers}
        self._holders[pool].update({home: names[worker_id] for home, worker_id in served.items()})
        return served


def _left_over(pool: Pool, depths: HomeDepths) -> list[str]:
    """Homes that the catalogue had once, and where jobs are: nobody serves them, so that anyone takes those."""
    known = {HOME_ANY, *pool.homes}
    return sorted(
        {home for (name, _, home), depth in depths.items()
         if name == pool.name and home not in known and depth.ready + depth.running}
    )  # fmt: skip
