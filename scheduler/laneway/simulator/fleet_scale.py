"""Workers of a region in fleet mode: ordered by laneway.policy.desired, ready after the time of a load, or lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from laneway.core.catalogue import Pool
from laneway.core.fleet import Demand, LanePlan
from laneway.core.lanes import LANES
from laneway.policy.desired import DesiredParams, Load, Scaling, desired
from laneway.policy.forecast import Outlook

Q90 = 1.2816  # standard deviations above the mean


@dataclass(frozen=True, slots=True)
class Loss:
    """So many workers of a region are lost at a time, for good; or all of them until they are back."""

    at_s: int
    region: int
    workers: int = 0
    until_s: int = 0  # 0: only `workers` are lost; else the region is away until then, and back with its workers


class Workers:
    """Of one region. Times in seconds."""

    def __init__(self, pool: Pool, params: DesiredParams | None) -> None:
        """`params`: of the autoscaler; None: always as many as planned, except for those that are lost."""
        self._pool, self._params = pool, params
        self._present = pool.workers
        self._booting: deque[tuple[float, int]] = deque()  # (ready, how many)
        self._scaling = Scaling(pool.workers)
        self._away_until_s = 0.0
        self.reversals = 0  # of the direction of scaling
        self._direction = 0

    @property
    def paid(self) -> int:
        """Booting ones included."""
        return self._present + sum(count for _, count in self._booting)

    def up(self, now_s: float) -> int:
        while self._booting and self._booting[0][0] <= now_s:
            self._present += self._booting.popleft()[1]
        return 0 if now_s < self._away_until_s else self._present

    def lose(self, loss: Loss) -> None:
        self._away_until_s = max(self._away_until_s, float(loss.until_s))
        self._present = max(0, self._present - loss.workers)

    def scale(self, load: Load, now_s: float) -> None:
        """Orders or gives back workers; to be asked every few seconds."""
        if self._params is None or now_s < self._away_until_s:
            return
        wanted = desired(self._pool, load, now_s, self._params).workers
        there = self._present
        published = self._scaling.step(
            wanted, now_s, load_s=self._pool.load_s, there=there, params=self._params
        )  # fmt: skip
        change = max(1, published) - self.paid
        if change > 0:
            self._booting.append((now_s + self._pool.load_s, change))
        while change < 0 and self._booting:
            ready_s, count = self._booting.pop()
            if count + change > 0:
                self._booting.append((ready_s, count + change))
            change = min(0, change + count)
        self._present += min(0, change)
        self._turned(published - there)

    def _turned(self, change: int) -> None:
        direction = (change > 0) - (change < 0)
        if direction and self._direction and direction != self._direction:
            self.reversals += 1
        self._direction = direction or self._direction


def load_for(
    pool: Pool, waiting: Sequence[float], running: Sequence[float], arrivals_per_s: float, dispersion: float,
    demand: Sequence[Sequence[Demand]], workers: int,
) -> Load:  # fmt: skip
    """What a region asks of its autoscaler, by lane; `demand`: of the deferrable and the batch lane, by due time. The
    outlook is what runs now: no forecast."""
    jobs = running[0] + waiting[0]
    return Load(
        [
            LanePlan(lane, ready=round(waiting[i]), running=round(running[i]), demand=tuple(demand[i - 1] if i else ()))
            for i, lane in enumerate(LANES)
        ],
        demand[0], demand[1], workers=workers, step_times=pool.step_times,
        outlook=Outlook(arrivals_per_s, dispersion, jobs, jobs + Q90 * (dispersion * jobs) ** 0.5),
    )  # fmt: skip
