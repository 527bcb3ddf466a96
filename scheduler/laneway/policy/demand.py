"""The curve of parked work by due time that a plan carries: what a door and the scaling need of a million jobs.

Of the sums by grain of latest starts, cumulated, a point is kept where its grid cell ends: cells are 10 s wide near and
a sixteenth of the distance farther away, so a day has some hundred points. Each kept point is exact; between them
readers interpolate. All curves of a plan together have POINTS_MAX points, since a plan is one message: where pools are
many, each keeps every second of its points, or fewer.

Units: Unix seconds, device-seconds. O(grains). Known failure mode: work of different due times far away is told apart
to a sixteenth of the time left only, and more coarsely in a plan of many pools.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from laneway.core.fleet import Demand

CELL_S = 10.0
CELLS = 16  # of a distance
POINTS_MAX = 8_192  # of all curves of a plan: some 250 KB of it


def demand_curve(
    grains: Iterable[tuple[float, float]], now_s: float, points_max: int = POINTS_MAX
) -> tuple[Demand, ...]:
    """`grains`: (latest start in Unix seconds, device-seconds due then), earliest first. The last point is always kept:
    it is all that there is."""
    out: list[Demand] = []
    total = 0.0
    last_cell = (-1.0, 0.0)
    for by_s, device_s in grains:
        total += device_s
        width_s = CELL_S * 2.0 ** max(0, math.floor(math.log2(max(1.0, (by_s - now_s) / (CELLS * CELL_S)))))
        cell = math.ceil(by_s / width_s), width_s
        if out and cell == last_cell:
            out[-1] = Demand(by_s, total)
        else:
            out.append(Demand(by_s, total))
        last_cell = cell
    while len(out) > max(1, points_max):
        out = out[-1::-2][::-1]
    return tuple(out)
