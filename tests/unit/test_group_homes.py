"""Which groups' homes are busy, as far as the bells tell."""

import pytest

from laneway.core.fleet import HomePlan, PoolPlan
from laneway.core.lanes import Lane
from laneway.core.subjects import HOME_ANY, ParkSubject
from laneway.scheduler import group_homes
from laneway.scheduler.group_homes import GroupHomes


def park(job: str, group: str) -> ParkSubject:
    return ParkSubject("local", Lane.BATCH, "p", "acme", 0, 1, 1, group, job)


def pool(*homes: HomePlan) -> PoolPlan:
    return PoolPlan("p", workers=2, slots=8, homes=homes)


FULL = HomePlan("h0", "w0", ready=1, running=4)
FREE = HomePlan("h1", "w1", ready=0, running=4)


def test_a_group_is_busy_while_its_home_is_full_and_more_waits_there() -> None:
    homes = GroupHomes()
    homes.released(park("a", "ga"))
    homes.became_ready("a", "h0", None)
    homes.became_ready("b", "h1", park("b", "gb"))
    busy = homes.busy(pool(FULL, FREE))
    assert ["ga" in busy, "gb" in busy, "unknown" in busy] == [True, False, False]
    assert "ga" not in homes.busy(pool(HomePlan("h0", "", ready=9, running=9))), "nobody serves it: anyone takes them"
    assert "ga" not in homes.busy(PoolPlan("p"))


def test_what_has_no_home_or_was_not_released_here_tells_nothing() -> None:
    homes = GroupHomes()
    homes.became_ready("a", "h0", None)
    homes.became_ready("b", HOME_ANY, park("b", "gb"))
    assert homes.groups == 0


def test_so_many_groups_and_releases_are_known_and_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_homes, "GROUPS_MAX", 2)
    monkeypatch.setattr(group_homes, "RELEASED_MAX", 2)
    homes = GroupHomes()
    for i in range(3):
        homes.became_ready(f"j{i}", "h0", park(f"j{i}", f"g{i}"))
    busy = homes.busy(pool(FULL))
    assert [f"g{i}" in busy for i in range(3)] == [False, True, True]
    for i in range(3):
        homes.released(park(f"r{i}", f"r{i}"))
    for i in range(3):
        homes.became_ready(f"r{i}", "h0", None)
    assert [f"r{i}" in homes.busy(pool(FULL)) for i in range(3)] == [False, True, True]
