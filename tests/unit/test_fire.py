"""Latest start and fire time: what makes the lane outlive its brain."""

from hypothesis import given
from hypothesis import strategies as st

from laneway.policy.fire import Due, FireParams, fire_at_s, latest_start_s, stagger

times = st.floats(min_value=0.0, max_value=4e9)
work = st.floats(min_value=0.0, max_value=1e6)


def test_latest_start_leaves_room_for_service_and_margin() -> None:
    assert latest_start_s(100.0, 2.0) == 97.5
    assert latest_start_s(100.0, 20.0) == 78.0
    assert latest_start_s(100.0, 0.0, FireParams(margin_s=1.0)) == 99.0


def test_a_job_alone_fires_at_its_latest_start() -> None:
    assert fire_at_s(now_s=0, not_before_s=0, latest_start_s=50, parked_device_s_ahead=0, floor_rate=0.5) == 50


def test_work_ahead_moves_the_fire_time_forward_by_its_time_at_the_floor_rate() -> None:
    assert fire_at_s(now_s=0, not_before_s=0, latest_start_s=50, parked_device_s_ahead=10, floor_rate=0.5) == 30


def test_never_before_now_nor_before_not_before() -> None:
    assert fire_at_s(now_s=40, not_before_s=0, latest_start_s=50, parked_device_s_ahead=100, floor_rate=1) == 40
    assert fire_at_s(now_s=40, not_before_s=45, latest_start_s=50, parked_device_s_ahead=100, floor_rate=1) == 45


def test_a_pool_without_a_floor_fires_at_once_when_work_is_ahead() -> None:
    assert fire_at_s(now_s=7, not_before_s=0, latest_start_s=50, parked_device_s_ahead=1, floor_rate=0) == 7
    assert fire_at_s(now_s=7, not_before_s=0, latest_start_s=50, parked_device_s_ahead=0, floor_rate=0) == 50


@given(times, times, times, work, st.floats(min_value=0.01, max_value=100.0))
def test_fire_time_bounds(now: float, not_before: float, latest: float, ahead: float, rate: float) -> None:
    at = fire_at_s(
        now_s=now, not_before_s=not_before, latest_start_s=latest, parked_device_s_ahead=ahead, floor_rate=rate
    )
    assert at >= now
    assert at >= not_before
    assert at <= max(now, not_before, latest)


@given(st.lists(st.tuples(st.floats(1.0, 1000.0), st.floats(0.001, 20.0)), max_size=30))
def test_staggered_jobs_all_fit_at_the_floor_rate(jobs: list[tuple[float, float]]) -> None:
    """Served one after the other from their fire times, no job starts later than its latest start, where that could
    be at all: the first fire time is not in the past."""
    rate = 0.5
    ordered = [Due(str(i), 0.0, 1e5 + due, cost) for i, (due, cost) in enumerate(sorted(jobs))]
    fires = stagger(ordered, now_s=0.0, floor_rate=rate)
    assert fires == sorted(fires)
    at = 0.0
    for job, fire in zip(ordered, fires, strict=True):
        start = max(at, fire)
        assert start <= job.latest_start_s + 1e-6
        at = start + job.device_s / rate


def test_staggering_leaves_jobs_that_do_not_meet_at_their_latest_start() -> None:
    jobs = [Due("a", 0.0, 100.0, 5.0), Due("b", 0.0, 200.0, 5.0), Due("c", 0.0, 202.0, 5.0)]
    assert stagger(jobs, now_s=0.0, floor_rate=1.0) == [100.0, 197.0, 202.0]
    assert stagger(jobs, now_s=0.0, floor_rate=0.0) == [0.0, 0.0, 202.0]
    assert stagger([], now_s=0.0, floor_rate=1.0) == []


def test_staggering_keeps_not_before() -> None:
    assert stagger([Due("a", 150.0, 160.0, 50.0), Due("b", 0.0, 161.0, 5.0)], now_s=0.0, floor_rate=0.5)[0] == 150.0
