"""Groups that wait for more of their kind: when they leave, that they leave together, and that little is remembered."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneway.core.lanes import Lane
from laneway.core.subjects import ParkSubject
from laneway.policy.coalesce import STALE_MIN, CoalesceParams, Gathering

NOW_S = 1_000.0


def park(
    job: str, group: str = "g", *, lane: Lane = Lane.BATCH, due_in_s: float = 36_000.0, pool: str = "p", **more: int
) -> ParkSubject:
    due_ms = int((NOW_S + due_in_s) * 1000)
    return ParkSubject("local", lane, pool, "acme", more.get("not_before_ms", 0), due_ms, 100, group, job)


def known(gathering: Gathering, gap_s: float, group: str = "g", lane: Lane = Lane.BATCH) -> float:
    """Makes a group known to come this often; the time of its last arrival."""
    at_s = NOW_S - 3 * gap_s
    for i in range(4):
        gathering.arrived(park(f"before{group}{i}", group, lane=lane), at_s + i * gap_s)
    for groups in gathering.flush(NOW_S + 1e6):
        for each in groups:
            gathering.left(each)
    return NOW_S


def test_the_first_of_an_unknown_group_does_not_wait() -> None:
    assert Gathering().arrived(park("j"), NOW_S) is None


def test_a_group_that_comes_often_waits_for_the_next_and_leaves_when_that_is_overdue() -> None:
    gathering = Gathering()
    known(gathering, 1.0)
    until_s = gathering.arrived(park("a"), NOW_S + 1.0)
    assert until_s == NOW_S + 61.0, "a batch job waits a minute at most"
    gathering.arrived(park("b"), NOW_S + 2.0)
    assert gathering.flush(NOW_S + 4.9) == []
    (group,) = gathering.flush(NOW_S + 5.1)
    assert [each.job for each in group] == ["a", "b"]
    assert gathering.together == {"a", "b"}
    gathering.left(group[0])
    assert gathering.together == {"b"}


def test_a_group_that_comes_seldom_does_not_wait() -> None:
    gathering = Gathering()
    known(gathering, 500.0)
    assert gathering.arrived(park("a"), NOW_S + 500.0) is None


def test_a_full_group_leaves_at_once_and_the_next_begins_another() -> None:
    gathering = Gathering()
    known(gathering, 0.01)
    for i in range(15):
        gathering.arrived(park(f"j{i}"), NOW_S + 0.01 * (i + 1))
    assert gathering.flush(NOW_S + 0.15) == []
    gathering.arrived(park("j15"), NOW_S + 0.16)
    (group,) = gathering.flush(NOW_S + 0.16)
    assert len(group) == 16


@pytest.mark.parametrize(
    ("lane", "due_in_s", "waits_s"),
    [(Lane.DEFERRABLE, 36_000.0, 2.0), (Lane.DEFERRABLE, 35.0, 1.75), (Lane.BATCH, 400.0, 20.0)],
)
def test_no_job_waits_longer_than_its_lane_and_its_slack_allow(lane: Lane, due_in_s: float, waits_s: float) -> None:
    gathering = Gathering()
    known(gathering, 0.5, lane=lane)
    assert gathering.arrived(park("j", lane=lane, due_in_s=due_in_s), NOW_S) == pytest.approx(NOW_S + waits_s)


def test_it_can_be_turned_off() -> None:
    gathering = Gathering(CoalesceParams(on=False))
    known(gathering, 1.0)
    assert gathering.arrived(park("j"), NOW_S + 1.0) is None


def test_who_is_due_soon_or_sleeps_does_not_wait() -> None:
    gathering = Gathering()
    known(gathering, 0.5)
    assert gathering.arrived(park("j", due_in_s=20.0), NOW_S) is None
    assert gathering.arrived(park("k", not_before_ms=int((NOW_S + 5) * 1000)), NOW_S) is None


def test_an_idle_pool_takes_the_longest_waiting_group_whole() -> None:
    gathering = Gathering()
    for name in "gh":
        known(gathering, 1.0, name)
    for i in range(3):
        gathering.arrived(park(f"g{i}", "g"), NOW_S + i * 0.1)
        gathering.arrived(park(f"h{i}", "h"), NOW_S + 0.05 + i * 0.1)
    assert gathering.take("q", 5) == []
    (group,) = gathering.take("p", 2)
    assert [each.job for each in group] == ["g0", "g1", "g2"]
    assert gathering.holds(park("h1", "h"))
    assert not gathering.holds(park("g1", "g"))


def test_so_many_groups_gather_and_one_more_does_not_wait() -> None:
    gathering = Gathering(CoalesceParams(gathering_max=2))
    for group in "abc":
        known(gathering, 1.0, group)
    waits = [gathering.arrived(park(group, group), NOW_S + 1.0) is not None for group in "abc"]
    assert waits == [True, True, False]


def test_so_many_gaps_are_known_and_the_oldest_is_forgotten() -> None:
    gathering = Gathering(CoalesceParams(keys_max=2))
    known(gathering, 1.0, "a")
    for group in "bc":
        known(gathering, 1.0, group)
    assert gathering.arrived(park("a", "a"), NOW_S + 1.0) is None


def test_groups_that_left_leave_nothing_behind() -> None:
    gathering = Gathering()
    for i in range(3 * STALE_MIN):
        known(gathering, 1.0, f"g{i % 7}")
        each = park(f"j{i}", f"g{i % 7}")
        gathering.arrived(each, NOW_S + 1.0)
        gathering.left(each)
    assert len(gathering) == 0
    assert len(gathering._flushes) <= STALE_MIN + 10
    assert gathering.together == set()


@given(
    st.lists(
        st.tuples(st.floats(0.0, 3.0), st.sampled_from("gh"), st.booleans(), st.sampled_from(["add", "left", "take"])),
        max_size=60,
    )
)
def test_whoever_waits_is_let_go_in_time_and_once(steps: list[tuple[float, str, bool, str]]) -> None:
    gathering = Gathering()
    now_s, waiting, gone = NOW_S, dict[str, float](), list[str]()
    parks: dict[str, ParkSubject] = {}
    for i, (gap_s, group, batch, what) in enumerate(steps):
        now_s += gap_s
        freed = gathering.flush(now_s)
        for each in (each for some in freed for each in some):
            gone.append(each.job)
            del waiting[each.job]
        freed = []
        if what == "take":
            freed += gathering.take("p", 1)
        elif what == "left" and waiting:
            job = min(waiting)
            gathering.left(parks[job])
            del waiting[job]
        else:
            each = parks[f"j{i}"] = park(f"j{i}", group, lane=Lane.BATCH if batch else Lane.DEFERRABLE)
            until_s = gathering.arrived(each, now_s)
            if until_s is not None:
                waiting[each.job] = until_s
            freed += gathering.flush(now_s)
        for job in (each.job for some in freed for each in some):
            gone.append(job)
            del waiting[job]
        assert all(until_s >= now_s for until_s in waiting.values())
        assert len(gathering) == len(waiting)
    assert len(set(gone)) == len(gone)
