"""Desired workers: what asks for them, what bounds them, and that what is published moves calmly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from laneway.core.catalogue import Capabilities, Pool
from laneway.core.fleet import Demand, LanePlan, StepTimes
from laneway.core.lanes import Lane
from laneway.policy.demand import POINTS_MAX, demand_curve
from laneway.policy.desired import DesiredParams, Load, Scaling, Wanted, desired, merged
from laneway.policy.forecast import Outlook

POOL = Pool(
    name="p", model="chat", tier="small", engine="simulated", context_length=4096, vocabulary_size=300, slots=4,
    workers=2, kv_tokens=16384, tokenizer="bytes", capabilities=Capabilities(), queue_length=10, load_s=10.0,
    prefill_tokens_per_s=1000.0, decode_tokens_per_s=50.0,
)  # fmt: skip
COLD = replace(POOL, workers=0)
PARAMS = DesiredParams()
NOW_S = 100.0
MANY = (LanePlan(Lane.DEFERRABLE, parked=400),)


def curve(*due: tuple[float, float]) -> list[Demand]:
    return list(demand_curve(due, NOW_S))


@pytest.mark.parametrize(
    ("lanes", "due", "wanted"),
    [
        ([], [], Wanted(1, "PLANNED")),
        # 18 / (4 x 0.85) = 5.3, but 18 jobs fill 5 workers
        ([LanePlan(Lane.PRIORITY, ready=10, running=8)], [], Wanted(5, "SLO")),
        ([LanePlan(Lane.PRIORITY, ready=0, running=8)], [], Wanted(2, "SLO")),
        ([LanePlan(Lane.BATCH, running=8)], [], Wanted(2, "RUNNING")),
        (MANY, [(1110.0, 850.0)], Wanted(1, "DUE")),  # 850 device-s in 1000 s at 0.85
        (MANY, [(1110.0, 2550.0)], Wanted(3, "DUE")),
        (MANY, [(150.0, 100.0), (9999.0, 100.0)], Wanted(3, "DUE")),  # the near ones decide
        (MANY, [(50.0, 34.0)], Wanted(4, "DUE")),  # overdue: in the time of one load
        ([LanePlan(Lane.DEFERRABLE, parked=3)], [(101.0, 500.0)], Wanted(1, "DUE")),  # three jobs fill one worker
    ],
)
def test_what_asks_for_workers(lanes: list[LanePlan], due: list[tuple[float, float]], wanted: Wanted) -> None:
    assert desired(POOL, Load(lanes, deferrable=curve(*due), workers=1), NOW_S) == wanted


def test_a_cold_pool_with_held_work_is_wanted() -> None:
    assert desired(COLD, Load(), NOW_S) == Wanted(0, "")
    assert desired(COLD, Load([LanePlan(Lane.DEFERRABLE, parked=1)]), NOW_S) == Wanted(1, "COLD")
    batch = Load([LanePlan(Lane.BATCH, parked=1)], batch=curve((90_000.0, 1.0)))
    assert desired(COLD, batch, NOW_S).workers == 1, "batch alone as well"


def test_forecast_priority_work_is_provided_for_before_it_is_here() -> None:
    outlook = Outlook(per_s=2.0, burstiness=1.0, jobs=8.0, jobs_q90=10.0)
    calm = desired(POOL, Load(outlook=outlook), NOW_S)
    assert calm == Wanted(5, "SLO")  # (10 + 2.33 x sqrt(1 x 2 x 2)) / 3.4
    bursty = desired(POOL, Load(outlook=replace(outlook, burstiness=9.0)), NOW_S)
    assert bursty.workers == 8


def test_places_come_from_step_times_where_they_are_known() -> None:
    lanes = [LanePlan(Lane.PRIORITY, running=64)]
    pool = replace(POOL, slots=64)
    # 0.8 x 100 ms - 20 ms leave 60 ms: 12 sequences at 5 ms
    slow = Load(lanes, step_times=StepTimes(base_s=0.02, sequence_s=0.005), workers=1)
    assert desired(pool, slow, NOW_S).workers == 1, "no more than jobs fill"
    outlook = Outlook(per_s=0.0, jobs=64.0, jobs_q90=64.0)
    assert desired(pool, replace(slow, outlook=outlook), NOW_S).workers == 6


def test_predicted_kv_asks_for_workers() -> None:
    lanes = [LanePlan(Lane.DEFERRABLE, ready=10, running=3)]
    load = Load(lanes, workers=1, kv_tokens_used=12_000, kv_tokens=16_384, job_tokens=2_000.0)
    assert desired(POOL, load, NOW_S) == Wanted(3, "KV")  # 32,000 / 14,746


def test_priority_takes_its_share_of_the_time_until_a_deadline() -> None:
    load = Load(MANY, deferrable=curve((1110.0, 850.0)))
    busy = replace(load, outlook=Outlook(jobs=4.0))
    assert (desired(POOL, load, NOW_S).workers, desired(POOL, busy, NOW_S).workers) == (1, 3)


def test_batch_alone_raises_no_more_than_its_limit() -> None:
    lanes = [LanePlan(Lane.BATCH, parked=400)]
    load = Load(lanes, batch=curve((1110.0, 8500.0)))
    assert desired(POOL, load, NOW_S) == Wanted(2, "DUE"), "unset: as many as are planned"
    assert desired(POOL, load, NOW_S, DesiredParams(batch_workers_max=5)).workers == 5
    assert desired(POOL, load, NOW_S, DesiredParams(batch_workers_max=20)).workers == 10
    with_others = replace(load, lanes=(*lanes, *MANY), deferrable=curve((1110.0, 3400.0)))
    assert desired(POOL, with_others, NOW_S).workers == 4, "what others ask for stands"
    running = replace(load, lanes=[LanePlan(Lane.BATCH, parked=400, running=16)])
    assert desired(POOL, running, NOW_S).workers == 4, "what runs keeps its workers"


def test_a_tenants_mis_set_deadline_buys_no_fleet() -> None:
    near = [("wrong", 105.0, 10.0) for _ in range(100)]
    others = [("a", 105.0, 8.0), ("b", 106.0, 8.0)]
    jobs = sorted(near + others, key=lambda job: job[1])
    load = Load(MANY, deferrable=curve((110.0, 1016.0)), near=jobs)
    assert desired(POOL, replace(load, near=()), NOW_S).workers == 100
    assert desired(POOL, load, NOW_S).workers == 7  # (4 x 10 s + 16) / 10 s / 0.85
    later = replace(load, deferrable=curve((110.0, 1016.0), (5_110.0, 1017.0)))
    assert desired(POOL, later, NOW_S).workers == 7


@given(
    st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1e4)), max_size=20).map(sorted),
    st.integers(0, 500),
    st.integers(0, 50),
)
def test_desired_workers_bounds(due: list[tuple[float, float]], parked: int, running: int) -> None:
    lanes = [LanePlan(Lane.DEFERRABLE, parked=parked), LanePlan(Lane.PRIORITY, running=running)]
    load = Load(lanes, deferrable=curve(*due))
    wanted = desired(POOL, load, NOW_S).workers
    assert 1 <= wanted <= max(1, -(-(parked + running) // POOL.slots))
    assert wanted <= desired(POOL, load, NOW_S, DesiredParams(utilisation=0.5)).workers


@given(st.lists(st.tuples(st.floats(0, 2_600_000), st.floats(0, 100)), max_size=200).map(sorted))
def test_a_curve_is_exact_where_it_has_points_and_short(due: list[tuple[float, float]]) -> None:
    points = demand_curve([(NOW_S + away, work) for away, work in due], NOW_S)
    for point in points:
        assert point.device_s == pytest.approx(sum(work for away, work in due if NOW_S + away <= point.by_s))
    assert [point.by_s for point in points] == sorted({point.by_s for point in points})
    assert bool(points) == bool(due)
    if points:
        assert points[-1].by_s == NOW_S + due[-1][0]


def test_a_month_of_due_times_is_a_curve_of_some_hundred_points_that_the_next_plan_mostly_shows_again() -> None:
    grains = [(1_000_000.0 + 10.0 * i, 1.0) for i in range(259_200)]
    points = demand_curve(grains, 1_000_000.0)
    assert len(points) < 300
    again = demand_curve(grains, 1_000_000.25)
    assert len(set(points) ^ set(again)) <= 30, "two where cells become wider"


def test_all_curves_of_a_plan_have_so_many_points_and_no_more() -> None:
    grains = [(NOW_S + 10.0 * i, 1.0) for i in range(POINTS_MAX)]
    near = demand_curve(grains, NOW_S + 10.0 * POINTS_MAX)  # all are overdue: cells as narrow as they get
    assert len(near) == POINTS_MAX
    more = demand_curve([*grains, (NOW_S + 10.0 * POINTS_MAX, 1.0)], NOW_S + 10.0 * POINTS_MAX)
    assert POINTS_MAX // 2 <= len(more) <= POINTS_MAX
    assert more[-1].device_s == POINTS_MAX + 1, "the whole of it is always told"
    assert set(more) <= {Demand(by_s, float(i + 1)) for i, (by_s, _) in enumerate(grains)} | {more[-1]}, "and exactly"


def test_curves_of_two_lanes_add_up() -> None:
    both = merged(curve((110.0, 1.0), (300.0, 2.0)), curve((120.0, 5.0), (300.0, 1.0)))
    assert [(point.by_s, point.device_s) for point in both] == [(110.0, 1.0), (120.0, 6.0), (300.0, 7.0), (300.0, 9.0)]


# --- calm --------------------------------------------------------------------------------------------


def scaled(scaling: Scaling, wanted: int, begin_s: float, seconds: int, there: int = 0) -> list[int]:
    return [
        scaling.step(wanted, begin_s + i, load_s=10.0, there=there, params=PARAMS) for i in range(seconds)
    ]  # fmt: skip


def test_up_at_once_but_no_more_than_twofold_in_thirty_seconds() -> None:
    scaling = Scaling(2)
    steps = scaled(scaling, 20, 0.0, 120)
    assert (steps[0], steps[29], steps[31], steps[61], steps[91], steps[119]) == (4, 4, 8, 16, 20, 20)
    assert scaled(Scaling(0), 1, 0.0, 1) == [1], "a cold pool gets its first worker at once"
    assert scaled(Scaling(0), 6, 0.0, 1, there=4) == [6], "what is there counts, whatever was published"


def test_down_by_one_in_two_minutes_and_only_after_a_long_calm() -> None:
    scaling = Scaling(10)
    steps = scaled(scaling, 2, 0.0, 600)
    assert steps[189] == 10
    assert steps[190] == 9
    assert (steps[309], steps[310], steps[430]) == (9, 8, 7)


def test_a_short_dip_or_a_small_one_changes_nothing() -> None:
    scaling = Scaling(10)
    scaled(scaling, 2, 0.0, 180)
    assert scaled(scaling, 9, 180.0, 1) == [10], "9 is within 85 % of 10: the calm begins anew"
    assert scaled(scaling, 2, 181.0, 180)[-1] == 10
    assert scaled(scaling, 9, 400.0, 1_000)[-1] == 10


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 50)), min_size=1, max_size=60), st.integers(0, 20))
def test_scaling_never_passes_what_is_wanted_and_never_moves_wildly(steps: list[tuple[int, int]], begin: int) -> None:
    scaling, now_s, history = Scaling(begin), 0.0, [(-1e9, begin)]
    for gap_s, wanted in steps:
        now_s += gap_s
        before = history[-1][1]
        n = scaling.step(wanted, now_s, load_s=10.0, there=0, params=PARAMS)
        assert before - 1 <= n <= max(before, wanted)
        then = [count for at_s, count in history if at_s <= now_s - PARAMS.up_span_s][-1]
        if n > before:
            assert n <= max(then + 1, 2 * then)
        history.append((now_s, n))
