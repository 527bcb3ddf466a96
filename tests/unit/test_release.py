"""Release: work is conserved, order is kept, nothing leaves too early, and each job at most once."""

import tracemalloc
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from laneway.core.fleet import LanePlan, PoolPlan, WorkerLease, WorkerState
from laneway.core.lanes import PARKING_LANES, Lane
from laneway.core.subjects import ParkSubject
from laneway.policy.fairness import FairParams, Ledger
from laneway.policy.holding import Hold
from laneway.policy.parked import COALESCE_MS, STALE_MIN, WAKE_MAX, ParkIndex
from laneway.policy.release import (
    FIRE_GUARD_S,
    HoldReason,
    Release,
    ReleaseParams,
    ReleaseReason,
    Room,
    choose,
    room_of,
    why_held,
)

NOW_S = 1_000.0
PARAMS = ReleaseParams()
FAR_S = NOW_S + 3_600.0


def park(
    job: str,
    due_s: float = FAR_S,
    *,
    lane: Lane = Lane.DEFERRABLE,
    tenant: str = "acme",
    cost_ms: int = 100,
    group: str = "g",
    not_before_s: float = 0.0,
    pool: str = "p",
) -> ParkSubject:
    return ParkSubject("local", lane, pool, tenant, int(not_before_s * 1000), int(due_s * 1000), cost_ms, group, job)


def run(
    parks: Sequence[ParkSubject],
    room: Room,
    *,
    now_s: float = NOW_S,
    paused: frozenset[Lane] = frozenset(),
    params: ReleaseParams = PARAMS,
    ledger: Ledger | None = None,
) -> list[Release]:
    index = ParkIndex(parks, now_ms=int(now_s * 1000))
    return choose(index, room, ledger or Ledger(), now_s=now_s, paused=paused, params=params)


def ids(releases: Sequence[Release]) -> list[str]:
    return [release.park.job for release in releases]


def test_an_idle_pool_takes_jobs_at_once_and_then_a_short_queue() -> None:
    out = run([park(f"j{i}", FAR_S + i) for i in range(10)], Room("p", idle=2, queue=3))
    assert ids(out) == ["j0", "j1", "j2", "j3", "j4"]
    assert [r.reason for r in out] == [ReleaseReason.IDLE_CAPACITY] * 2 + [ReleaseReason.READY_SHORT] * 3


def test_a_full_pool_holds_all_but_what_is_at_its_latest_start() -> None:
    out = run(
        [park("far"), park("near", NOW_S + 4), park("late", NOW_S - 10), park("soon", NOW_S + 8)], Room("p", 0, 0)
    )
    assert [(r.park.job, r.reason) for r in out] == [
        ("late", ReleaseReason.OVERDUE),
        ("near", ReleaseReason.LATEST_START_NEAR),
    ]


def test_urgent_jobs_go_by_latest_start_before_fair_turns() -> None:
    jobs = [park("b", NOW_S + 9, lane=Lane.BATCH), park("d1", NOW_S + 12), park("d0", FAR_S, tenant="other")]
    assert ids(run(jobs, Room("p", 2, 0))) == ["b", "d1"]
    slow = [park("u", NOW_S + 90, lane=Lane.BATCH), park("d", FAR_S)]
    assert ids(run(slow, Room("p", 1, 0, service_s=60.0))) == ["u"], "urgent reaches as far as two services"


def test_lanes_share_by_weight_of_device_time() -> None:
    jobs = [park(f"d{i:03}", FAR_S + i) for i in range(100)]
    jobs += [park(f"b{i:03}", FAR_S + i, lane=Lane.BATCH) for i in range(100)]
    out = run(jobs, Room("p", 50, 0))
    assert Counter(r.park.lane for r in out) == {Lane.DEFERRABLE: 40, Lane.BATCH: 10}


def test_tenants_take_turns_by_what_they_were_given_and_a_newcomer_owns_no_past() -> None:
    ledger = Ledger(FairParams(locality_tokens=0.0))
    many = [park(f"a{i:02}", FAR_S + i, tenant="a") for i in range(30)]
    for release in run(many, Room("p", 20, 0), ledger=ledger):
        ledger.charge(release.park, release.charge)
    rest = many[20:] + [park(f"b{i:02}", FAR_S + 100 + i, tenant="b", cost_ms=300) for i in range(10)]
    out = run(rest, Room("p", 8, 0), ledger=ledger)
    given_ms = Counter[str]()
    for release in out:
        given_ms[release.park.tenant] += release.park.cost_ms
    assert abs(given_ms["a"] - given_ms["b"]) <= 300, "neither is paid for the past of the other"


def test_groups_come_together_among_equals_only() -> None:
    jobs = [park(f"j{i}", FAR_S + i / 1000, group="xy"[i % 2]) for i in range(6)] + [park("next", FAR_S + 1, group="a")]
    assert ids(run(jobs, Room("p", 7, 0))) == ["j0", "j2", "j4", "j1", "j3", "j5", "next"]


def test_nothing_of_another_pool_is_released() -> None:
    assert run([park("j", NOW_S, pool="q")], Room("p", 5, 5)) == []


def test_one_decision_is_bounded() -> None:
    params = ReleaseParams(releases_max=3)
    assert len(run([park(f"j{i}") for i in range(9)], Room("p", 9, 9), params=params)) == 3
    assert len(run([park(f"j{i}", NOW_S) for i in range(9)], Room("p", 9, 9), params=params)) == 3


@pytest.mark.parametrize(
    ("free", "ready_priority", "ready_lower", "service_s", "idle", "queue"),
    [
        (8, 0, 0, 0.0, 8, 8),  # nothing measured: one queue of all places
        (8, 3, 0, 0.0, 5, 8),  # priority goes first
        (0, 0, 5, 0.0, 0, 3),
        (0, 0, 9, 0.0, 0, 0),
        (2, 0, 5, 0.0, 0, 5),  # two of the five are about to be pulled
        (0, 0, 0, 8.0, 0, 2),  # 8 places / 8 s service: 2 end within two seconds
        (0, 0, 0, 1000.0, 0, 2),  # at least one for each worker
        (0, 0, 0, 2.0, 0, 8),
        (0, 0, 0, 0.1, 0, 40),  # 80 a second and two looks to bridge
    ],
)
def test_room(free: int, ready_priority: int, ready_lower: int, service_s: float, idle: int, queue: int) -> None:
    lanes = (LanePlan(Lane.PRIORITY, ready=ready_priority), LanePlan(Lane.BATCH, ready=ready_lower))
    plan = PoolPlan("p", workers=2, slots=8, free_slots=free, service_s=service_s, lanes=lanes)
    room = room_of(plan, PARAMS)
    assert (room.idle, room.queue) == (idle, queue)


def test_a_pool_without_workers_has_no_room() -> None:
    assert room_of(PoolPlan("p")) == Room("p", 0, 0)


def test_why_a_job_is_held() -> None:
    busy, empty = Room("p", 0, 0, workers=1), Room("p", 0, 0)
    job = park("j")
    assert why_held(job, busy, awake=True, now_s=NOW_S) is HoldReason.POOL_BUSY
    assert why_held(job, empty, awake=True, now_s=NOW_S) is HoldReason.NO_WORKER
    assert why_held(job, busy, awake=False, now_s=NOW_S) is HoldReason.FIRES_SOON
    assert why_held(job, Room("p", 1, 0, workers=1), awake=True, now_s=NOW_S) is HoldReason.OTHERS_FIRST
    assert why_held(job, busy, awake=True, now_s=NOW_S, paused=frozenset({Lane.DEFERRABLE})) is HoldReason.LANE_PAUSED
    assert why_held(park("k", not_before_s=NOW_S + 1), busy, awake=False, now_s=NOW_S) is HoldReason.NOT_BEFORE


def test_held_work_goes_as_far_as_its_plan_allows_and_urgent_work_whatever_it_says() -> None:
    jobs = [park("urgent", NOW_S + 10), *(park(f"j{i}", FAR_S + i, cost_ms=500) for i in range(9))]
    out = choose(
        ParkIndex(jobs, now_ms=int(NOW_S * 1000)), Room("p", 9, 0), Ledger(), now_s=NOW_S, hold=Hold(1.2, 0.7, low=True)
    )
    assert [(r.park.job, r.reason) for r in out] == [
        ("urgent", ReleaseReason.IDLE_CAPACITY), *((f"j{i}", ReleaseReason.PRICE_LOW) for i in range(3)),
    ]  # fmt: skip
    room = Room("p", 5, 0, workers=1)
    assert why_held(jobs[4], room, awake=True, now_s=NOW_S, hold=Hold(0.0)) is HoldReason.HELD_FOR_TROUGH
    assert (
        why_held(jobs[4], Room("p", 0, 0, workers=1), awake=True, now_s=NOW_S, hold=Hold(0.0)) is HoldReason.POOL_BUSY
    )


def test_who_waited_for_others_is_told_so() -> None:
    jobs = [park(f"j{i}", FAR_S + i) for i in range(3)]
    index = ParkIndex(jobs, now_ms=int(NOW_S * 1000))
    out = choose(index, Room("p", 3, 0), Ledger(), now_s=NOW_S, coalesced={"j0", "j1"})
    assert [r.reason for r in out] == [ReleaseReason.COALESCED] * 2 + [ReleaseReason.IDLE_CAPACITY]
    assert (
        why_held(jobs[0], Room("p", 0, 0, workers=1), awake=False, now_s=NOW_S, gathers=True) is HoldReason.COALESCING
    )


def lower_lease(name: str, places: int, theta: float = 0.8) -> WorkerLease:
    return WorkerLease(name, name, "p", "simulated", WorkerState.READY, slots=8, lower_places=places, theta=theta)


def test_room_is_what_the_workers_budgets_and_the_headroom_leave() -> None:
    plan = PoolPlan("p", workers=2, slots=16, free_slots=12, service_s=2.0)
    assert room_of(plan, PARAMS).idle == 12
    assert room_of(replace(plan, reserved_slots=3), PARAMS).idle == 9
    said = [lower_lease("a", 6), lower_lease("b", 6)]
    assert room_of(replace(plan, reserved_slots=3), PARAMS, leases=said).idle == 12, "workers know better"
    assert room_of(plan, PARAMS, leases=[lower_lease("a", 1), lower_lease("b", 4)]).idle == 5
    assert room_of(plan, PARAMS, leases=[lower_lease("a", 0), lower_lease("b", 0)]).idle == 0
    old = [lower_lease("a", 1), lower_lease("b", 0, theta=0.0)]
    assert room_of(plan, PARAMS, leases=old).idle == 12, "a worker that does not say is not taken for full"


def test_what_waits_ready_is_counted_in_the_tokens_that_budgets_leave() -> None:
    plan = PoolPlan("p", workers=2, slots=16, free_slots=0, service_s=2.0, lower_tokens_per_s=1_000.0)
    assert room_of(plan, PARAMS).queue == 16
    assert room_of(plan, PARAMS, prompt_tokens=400.0).queue == 5, "2,000 tokens in two seconds"
    assert room_of(plan, PARAMS, prompt_tokens=50_000.0).queue == 2, "one for each worker at least"
    assert room_of(replace(plan, lower_tokens_per_s=0.0), PARAMS, prompt_tokens=400.0).queue == 16


jobs_of_any_kind = st.lists(
    st.builds(
        lambda due, lane, tenant, cost, group, not_before: (due, lane, tenant, cost, group, not_before),
        st.floats(NOW_S - 60, NOW_S + 200),
        st.sampled_from(PARKING_LANES),
        st.sampled_from(["a", "b", "c"]),
        st.integers(0, 500),
        st.sampled_from(["g", "h"]),
        st.one_of(st.just(0.0), st.floats(NOW_S - 30, NOW_S + 30)),
    ),
    max_size=40,
).map(
    lambda rows: [
        park(f"j{i}", due, lane=lane, tenant=tenant, cost_ms=cost, group=group, not_before_s=not_before)
        for i, (due, lane, tenant, cost, group, not_before) in enumerate(rows)
    ]
)
any_paused = st.sets(st.sampled_from(PARKING_LANES)).map(frozenset)


@settings(max_examples=150)
@given(jobs_of_any_kind, st.integers(0, 20), st.integers(0, 20), any_paused)
def test_what_always_holds(parks: list[ParkSubject], idle: int, queue: int, paused: frozenset[Lane]) -> None:
    out = run(parks, Room("p", idle, queue), paused=paused)
    chosen = ids(out)
    assert len(set(chosen)) == len(chosen), "each job at most once"
    assert not any(r.park.lane in paused for r in out), "nothing of a paused lane"
    assert all(r.park.not_before_ms <= NOW_S * 1000 for r in out), "nothing before its not-before"
    releasable = [p for p in parks if p.lane not in paused and p.not_before_ms <= NOW_S * 1000]
    assert len(out) >= min(idle, len(releasable)), "no place stays empty while a job could fill it"
    near = [p.job for p in releasable if p.due_ms <= (NOW_S + PARAMS.lead_s) * 1000]
    assert set(near) <= set(chosen), "what is at its latest start goes, room or not"
    assert len(out) <= max(len(near), idle + queue), "and nothing else beyond the room"
    for release in out:
        assert (release.reason is ReleaseReason.OVERDUE) == (release.park.due_ms <= (NOW_S - FIRE_GUARD_S) * 1000)


@given(jobs_of_any_kind, st.integers(0, 40))
def test_a_tenants_jobs_go_by_latest_start_to_the_grain_of_coalescing(parks: list[ParkSubject], places: int) -> None:
    chosen = {r.park.job for r in run(parks, Room("p", places, 0))}
    releasable = [p for p in parks if p.not_before_ms <= NOW_S * 1000]
    for kept in (p for p in releasable if p.job not in chosen):
        for gone in (p for p in releasable if p.job in chosen):
            if (gone.lane, gone.tenant) == (kept.lane, kept.tenant):
                assert gone.due_ms < kept.due_ms + COALESCE_MS[gone.lane]


def test_jobs_that_are_predicted_to_cost_nothing_leave_one_after_the_other():
    """Less than half a millisecond is 0 in a park subject."""
    index = ParkIndex([park(f"j{i}", 940.0, cost_ms=0) for i in range(3)], now_ms=int(NOW_S * 1000))
    assert [index.discard(f"j{i}") is not None for i in range(3)] == [True] * 3
    assert len(index) == 0
    assert index.demand("p", PARKING_LANES) == []


@given(jobs_of_any_kind, st.lists(st.integers(0, 39), max_size=40))
def test_the_index_forgets_what_left(parks: list[ParkSubject], leave: list[int]) -> None:
    now_ms = int(NOW_S * 1000)
    index = ParkIndex(now_ms=now_ms)
    for each in parks:
        assert index.add(each, now_ms=now_ms)
        assert not index.add(each, now_ms=now_ms)
    gone = {f"j{i}" for i in leave}
    for job in gone:
        known = job in index
        assert (index.discard(job) is not None) == known
    left = [p for p in parks if p.job not in gone]
    assert len(index) == len(left)
    for lane in PARKING_LANES:
        mine = [p for p in left if p.lane is lane]
        assert index.count("p", lane) == len(mine)
        assert index.device_s("p", lane) == pytest.approx(sum(p.cost_ms for p in mine) / 1000)
        assert index.next_due_ms("p", lane) == min((p.due_ms for p in mine), default=None)
        assert [p.job for p in index.by_due("p", [lane])] == [
            p.job for p in sorted(mine, key=lambda p: (p.due_ms, p.job))
        ]
        queued = [q.job for tenant in index.tenants("p", lane) for q in index.queue("p", lane, tenant)]
        assert sorted(queued) == sorted(p.job for p in mine if p.not_before_ms <= now_ms)
    assert sum(work for _, work in index.demand("p", PARKING_LANES)) == pytest.approx(
        sum(p.cost_ms for p in left) / 1000
    )
    rebuilt = ParkIndex(left, now_ms=now_ms)
    assert [p.job for p in rebuilt.by_due("p", PARKING_LANES)] == [p.job for p in index.by_due("p", PARKING_LANES)]


def test_sleepers_wake_at_their_time_and_a_job_left_alone_comes_back() -> None:
    index = ParkIndex([park("nb", not_before_s=NOW_S + 10), park("j")], now_ms=int(NOW_S * 1000))
    room, ledger = Room("p", 9, 0), Ledger()
    assert ids(choose(index, room, ledger, now_s=NOW_S)) == ["j"]
    index.leave_alone("j", int((NOW_S + 5) * 1000))
    index.leave_alone("nb", int((NOW_S + 5) * 1000))
    index.leave_alone("unknown", 0)
    assert choose(index, room, ledger, now_s=NOW_S) == []
    assert index.next_wake_ms() == int((NOW_S + 5) * 1000)
    assert index.wake(int((NOW_S + 5) * 1000)) == 1
    assert ids(choose(index, room, ledger, now_s=NOW_S + 5)) == ["j"]
    assert index.wake(int((NOW_S + 10) * 1000)) == 1
    assert sorted(ids(choose(index, room, ledger, now_s=NOW_S + 10))) == ["j", "nb"]


def test_jobs_cancelled_long_before_their_time_are_not_remembered() -> None:
    index = ParkIndex([park("stays", not_before_s=NOW_S + 1e6)], now_ms=int(NOW_S * 1000))
    for i in range(20 * STALE_MIN):
        index.add(park(f"j{i}", not_before_s=NOW_S + 1e6), now_ms=int(NOW_S * 1000))
        index.discard(f"j{i}")
    assert len(index._sleeping) <= STALE_MIN + 10
    assert index.wake(int((NOW_S + 1e6) * 1000)) == 1
    assert index.awake("stays")


def test_a_hundred_thousand_parked_jobs_cost_a_decision_little() -> None:
    """Counted, not timed: a decision reads the jobs it gives and the tenants, not the whole index."""
    parks = [park(f"j{i:06}", FAR_S + i % 5000, tenant=f"t{i % 50}") for i in range(100_000)]
    index = ParkIndex(parks, now_ms=int(NOW_S * 1000))
    reads = 0
    plain = index.queue

    def counted(pool: str, lane: Lane, tenant: str):
        nonlocal reads
        for each in plain(pool, lane, tenant):
            reads += 1
            yield each

    index.queue = counted  # type: ignore[method-assign]  # to count what is read
    out = choose(index, Room("p", 32, 32), Ledger(), now_s=NOW_S)
    assert len(out) == 64
    assert reads <= 50 + 64 + 2


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9), st.sampled_from(["add", "add_all", "discard"]))))
def test_order_holds_across_blocks(steps: list[tuple[int, int, str]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("laneway.policy.parked.BLOCK", 3)
        index = ParkIndex()
        present: dict[str, ParkSubject] = {}
        for number, (due, many, how) in enumerate(steps):
            parks = [park(f"j{(number * 7 + i * 13) % 50}", FAR_S + (due * 31 + i * 17) % 60) for i in range(many)]
            parks = [p for p in parks if p.job not in present]
            if how == "discard":
                for job in list(present)[due % 5 :: 5]:
                    assert index.discard(job) == present.pop(job)
            elif how == "add":
                for each in parks:
                    assert index.add(each, now_ms=0) == (each.job not in present)
                    present.setdefault(each.job, each)
            else:
                for each in parks:
                    present.setdefault(each.job, each)
                index.add_all(parks, now_ms=0)
            by_due = sorted(present.values(), key=lambda p: (p.due_ms, p.job))
            assert list(index.by_due("p", PARKING_LANES)) == by_due
            assert index.count("p", Lane.DEFERRABLE) == len(by_due)
            turns = [
                p for tenant in index.tenants("p", Lane.DEFERRABLE) for p in index.queue("p", Lane.DEFERRABLE, tenant)
            ]
            assert turns == sorted(by_due, key=lambda p: (p.due_ms // 1000, p.group, p.due_ms, p.job))


def test_a_crowd_with_one_not_before_wakes_in_parts() -> None:
    count = WAKE_MAX + 10
    index = ParkIndex([park(f"j{i}", not_before_s=NOW_S + 5) for i in range(count)], now_ms=int(NOW_S * 1000))
    now_ms = int((NOW_S + 5) * 1000)
    assert index.wake(now_ms) == WAKE_MAX
    assert index.next_wake_ms() == now_ms, "the next look comes at once"
    assert index.wake(now_ms) == 10


def test_a_parked_job_takes_little_memory() -> None:
    """Read from subjects, as a new scheduler does; a million must fit into well under 1 GiB."""
    count = 20_000
    names = [str(park(f"local-01a22c2c-29e7-72b4-b8d2-{i:012}", FAR_S + i, cost_ms=1000 + i)) for i in range(count)]
    tracemalloc.start()
    try:
        index = ParkIndex(map(ParkSubject.parse, names))
        used_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(index) == count
    assert used_bytes / count < 450
