"""Which home slot the jobs of a group go to, learned from the bells of what became ready.

A park subject names no home (its message's target does), and release needs to know only whether a group's home has room
now. What is not known is taken for not busy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from laneway.core.fleet import PoolPlan
from laneway.core.subjects import HOME_ANY, ParkSubject

GROUPS_MAX = 10_000  # groups whose home is known
RELEASED_MAX = 1_000  # jobs whose bell is awaited


class BusyGroups:
    """The groups whose home has no room; asked with `in`."""

    def __init__(self, homes: Mapping[str, str], busy: frozenset[str]) -> None:
        self._homes = homes
        self._busy = busy

    def __contains__(self, group: object) -> bool:
        return bool(self._busy) and self._homes.get(group, "") in self._busy  # type: ignore[call-overload]


class GroupHomes:
    def __init__(self) -> None:
        self._homes: OrderedDict[str, str] = OrderedDict()
        self._released: OrderedDict[str, str] = OrderedDict()  # job: group

    def released(self, park: ParkSubject) -> None:
        self._released[park.job] = park.group
        if len(self._released) > RELEASED_MAX:
            self._released.popitem(last=False)

    def became_ready(self, job: str, home: str, park: ParkSubject | None) -> None:
        """`park`: of a job that was parked until its bell rang."""
        group = park.group if park is not None else self._released.pop(job, None)
        if group is None or home == HOME_ANY:
            return
        self._homes[group] = home
        self._homes.move_to_end(group)
        if len(self._homes) > GROUPS_MAX:
            self._homes.popitem(last=False)

    @property
    def groups(self) -> int:
        """Whose home is known."""
        return len(self._homes)

    def busy(self, pool: PoolPlan) -> BusyGroups:
        """A home is busy while a place's worth of jobs waits in it already that its worker has not taken."""
        each = max(1, pool.slots // max(1, pool.workers)) if pool.workers else 1
        full = {home.home for home in pool.homes if home.worker_id and home.running >= each and home.ready}
        return BusyGroups(self._homes, frozenset(full))
