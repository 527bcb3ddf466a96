"""What a tenant may have open: the limit holds at N and N + 1, and every count equals a recount whatever happens."""

import random

import pytest

from laneway.admission import tenants
from laneway.admission.tenants import STORED_WITHIN_S, TenantLedger, TenantStreams
from laneway.core.clock import ManualClock
from laneway.core.errors import TenantLimit
from laneway.core.fleet import Plan, TenantDepth
from laneway.core.lanes import LANES, JobState, Lane
from laneway.policy.tenants import NAMED_SHARE, SMALL_LIMIT, TENANTS_MAX, near_limit
from laneway.runtime.records import RecordHead
from laneway.scheduler.sweeps import OpenJobs

BATCH, PRIORITY = Lane.BATCH, Lane.PRIORITY


def plan(sequence: int, *named: TenantDepth) -> Plan:
    """A plan that counts all writes up to and with `sequence`."""
    return Plan("local", tenants=named, counted_before=sequence + 1)


def head(job: str, sequence: int, *, state=JobState.WAITING, tenant="acme", lane: Lane | None = BATCH) -> RecordHead:
    return RecordHead(tenant, job, sequence, state, 100.0, lane=lane)


# --- what a plan names -----------------------------------------------------------------------------


def test_a_plan_names_each_tenant_of_a_lane_with_a_small_limit():
    named = near_limit({("a", BATCH): 1, ("b", PRIORITY): 5, ("c", BATCH): 0}, {BATCH: SMALL_LIMIT, PRIORITY: 0})
    assert named == (TenantDepth("a", BATCH, 1),), "there is no limit for the other lane"


def test_a_plan_names_tenants_from_a_share_of_a_large_limit_on():
    limit = SMALL_LIMIT * 100
    least = round(NAMED_SHARE * limit)
    assert near_limit({("a", BATCH): least - 1}, {BATCH: limit}) == ()
    assert near_limit({("a", BATCH): least}, {BATCH: limit}) == (TenantDepth("a", BATCH, least),)


def test_a_plan_names_no_more_than_its_limit_and_those_nearest_to_theirs():
    counts = {(f"t{i:04}", BATCH): i + 1 for i in range(TENANTS_MAX + 1)}
    named = near_limit(counts, {BATCH: SMALL_LIMIT})
    assert len(named) == TENANTS_MAX
    assert "t0000" not in {depth.tenant for depth in named}, "it is the farthest from its limit"
    assert named == near_limit(dict(reversed(counts.items())), {BATCH: SMALL_LIMIT})


# --- what the scheduler counts ---------------------------------------------------------------------


def test_open_jobs_are_counted_by_tenant_and_lane_until_they_end():
    jobs = OpenJobs()
    jobs.see(head("a", 1), 0.0)
    jobs.see(head("b", 2, lane=PRIORITY), 0.0)
    jobs.see(head("a", 3, state=JobState.RUNNING), 0.0)
    assert jobs.by_tenant() == {("acme", BATCH): 1, ("acme", PRIORITY): 1}
    jobs.again("a")
    jobs.see(head("a", 4, state=JobState.SUCCEEDED), 0.0)
    jobs.drop("a")
    assert jobs.by_tenant() == {("acme", PRIORITY): 1}
    assert jobs.sequence == 4


def test_a_job_of_unknown_lane_counts_nowhere_and_one_that_was_known_stays_where_it_was():
    jobs = OpenJobs()
    jobs.see(head("old", 1, lane=None), 0.0)
    jobs.see(head("a", 2), 0.0)
    jobs.see(head("a", 3, state=JobState.RUNNING, lane=None), 0.0)  # claimed by a worker of an older release
    assert jobs.by_tenant() == {("acme", BATCH): 1}
    jobs.see(head("old", 4, state=JobState.RUNNING, lane=PRIORITY), 0.0)
    assert jobs.by_tenant() == {("acme", BATCH): 1, ("acme", PRIORITY): 1}


@pytest.mark.parametrize("seed", range(5))
def test_the_schedulers_counts_equal_a_recount_whatever_happens(seed: int):
    print(f"seed {seed}")
    draw = random.Random(seed)
    jobs = OpenJobs()
    states = [JobState.WAITING, JobState.RUNNING, JobState.SUCCEEDED, JobState.CANCELLED]
    for sequence in range(1, 1000):
        job, act = f"j{draw.randrange(30)}", draw.randrange(10)
        if act < 7:
            lane = draw.choice([*LANES, None])
            jobs.see(head(job, sequence, state=draw.choice(states), tenant=f"t{draw.randrange(3)}", lane=lane), 0.0)
        elif act < 8:
            jobs.drop(job)
        else:
            jobs.overdue(draw.choice([99.0, 101.0]))
            jobs.again(job)
        assert jobs.by_tenant() == jobs.recount()
        few = {key: count for key, count in jobs.recount().items() if key[1] is BATCH and count >= 2}
        assert jobs.by_tenant({BATCH: 2.0}) == few
    for i in range(30):
        jobs.drop(f"j{i}")
    assert jobs.by_tenant() == {}


# --- what a door counts ----------------------------------------------------------------------------


def accept(ledger: TenantLedger, job: str, sequence: int, *, lane: Lane = BATCH, attached: bool = False) -> None:
    ledger.accepted(job, "acme", lane, attached=attached)
    ledger.stored(job, sequence)


def test_a_job_is_counted_by_the_plan_or_by_the_door_and_not_by_both():
    ledger = TenantLedger(ManualClock())
    for i in range(1, 11):
        accept(ledger, f"j{i}", i)
    assert ledger.open("acme", BATCH) == 10
    ledger.plan_arrived(plan(4, TenantDepth("acme", BATCH, 4)))
    assert ledger.open("acme", BATCH) == 10
    ledger.plan_arrived(plan(10, TenantDepth("acme", BATCH, 10)))
    assert ledger.open("acme", BATCH) == 10
    assert ledger.open("acme", PRIORITY) == ledger.open("other", BATCH) == 0


def test_a_job_that_is_not_stored_yet_counts_and_one_that_never_was_does_not():
    ledger = TenantLedger(ManualClock())
    ledger.accepted("a", "acme", BATCH, attached=False)
    ledger.plan_arrived(plan(100))
    assert ledger.open("acme", BATCH) == 1
    ledger.ended("a")
    ledger.ended("a")
    ledger.ended("of another door")
    assert ledger.open("acme", BATCH) == 0


def test_one_job_asked_for_twice_counts_once_and_leaves_nothing():
    ledger = TenantLedger(ManualClock())
    for _ in range(3):
        ledger.accepted("keyed", "acme", BATCH, attached=True)
    assert ledger.open("acme", BATCH) == ledger.recount("acme", BATCH) == 1
    ledger.stored("keyed", 5)
    ledger.plan_arrived(plan(6, TenantDepth("acme", BATCH, 1)))
    assert ledger.open("acme", BATCH) == 1
    ledger.ended("keyed")
    ledger.plan_arrived(plan(7))
    assert ledger.open("acme", BATCH) == ledger.recount("acme", BATCH) == 0


def test_an_end_makes_room_before_the_next_plan():
    ledger = TenantLedger(ManualClock())
    accept(ledger, "a", 7, attached=True)
    ledger.plan_arrived(plan(7, TenantDepth("acme", BATCH, 1)))
    ledger.ended("a")
    assert ledger.open("acme", BATCH) == 0
    ledger.plan_arrived(plan(8))
    assert ledger.open("acme", BATCH) == 0


def test_attached_jobs_without_a_stored_record_are_counted_as_long_as_they_live():
    clock = ManualClock()
    ledger = TenantLedger(clock)
    for i in range(3):
        accept(ledger, f"j{i}", 0, lane=PRIORITY, attached=True)
    assert ledger.open("acme", PRIORITY) == 3
    ledger.plan_arrived(plan(9, TenantDepth("acme", PRIORITY, 2)))  # two were claimed by then
    assert ledger.open("acme", PRIORITY) == 3
    ledger.ended("j0")
    assert ledger.open("acme", PRIORITY) == 2, "the plan may not have counted it"
    clock.advance(2 * STORED_WITHIN_S)
    ledger.plan_arrived(plan(20, TenantDepth("acme", PRIORITY, 2)))
    ledger.ended("j1")
    assert ledger.open("acme", PRIORITY) == 1
    ledger.left("j2")
    assert ledger.open("acme", PRIORITY) == 1, "its caller is gone, and the job goes on"


def test_an_older_scheduler_that_says_nothing_of_tenants_limits_nobody_but_by_live_streams():
    ledger = TenantLedger(ManualClock())
    accept(ledger, "a", 5)
    accept(ledger, "b", 6, attached=True)
    ledger.plan_arrived(Plan("local"))
    assert ledger.open("acme", BATCH) == 1


def test_a_door_remembers_so_many_new_jobs_and_no_more(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tenants, "FRESH_MAX", 3)
    ledger = TenantLedger(ManualClock())
    for i in range(3):
        ledger.accepted(f"j{i}", "acme", BATCH, attached=False)
    assert ledger.open("acme", BATCH) == 3
    ledger.accepted("one more", "acme", BATCH, attached=False)
    assert ledger.open("acme", BATCH) == 3


@pytest.mark.parametrize("seed", range(5))
def test_the_doors_counts_equal_a_recount_whatever_happens(seed: int):
    print(f"seed {seed}")
    draw = random.Random(seed)
    ledger = TenantLedger(ManualClock())
    for sequence in range(1, 2000):
        job, lane, act = f"j{draw.randrange(40)}", draw.choice(LANES), draw.randrange(8)
        if act < 3:
            ledger.ended(job)
            ledger.accepted(job, "acme", lane, attached=draw.random() < 0.5)
        elif act < 5:
            ledger.stored(job, draw.choice([0, sequence]))
        elif act == 5:
            ledger.left(job)
        elif act == 6:
            ledger.ended(job)
        else:
            ledger.plan_arrived(plan(sequence - draw.randrange(20), TenantDepth("acme", lane, draw.randrange(9))))
        assert all(ledger.open("acme", each) == ledger.recount("acme", each) >= 0 for each in LANES)


@pytest.mark.parametrize("doors", [1, 2, 5])
def test_several_doors_go_beyond_a_limit_by_what_the_others_accept_between_two_plans_and_no_more(doors: int):
    limit, open_jobs = 20, 12
    ledgers = [TenantLedger(ManualClock()) for _ in range(doors)]
    for ledger in ledgers:
        ledger.plan_arrived(plan(open_jobs, TenantDepth("acme", BATCH, open_jobs)))
    sequence, taken = open_jobs, 0
    for turn in range(3 * limit):  # a storm that every door hears at once
        ledger = ledgers[turn % doors]
        if ledger.open("acme", BATCH) < limit:
            sequence += 1
            taken += 1
            accept(ledger, f"j{turn}", sequence)
    assert taken == doors * (limit - open_jobs)
    for ledger in ledgers:
        ledger.plan_arrived(plan(sequence, TenantDepth("acme", BATCH, open_jobs + taken)))
        assert ledger.open("acme", BATCH) == open_jobs + taken >= limit, "the next plan shows all, and each refuses"


# --- live streams ----------------------------------------------------------------------------------


def test_a_tenant_has_as_many_streams_as_it_may_and_no_more():
    streams = TenantStreams(2)
    with streams.take("acme"), streams.take("acme"):
        with pytest.raises(TenantLimit) as refused, streams.take("acme"):
            pass
        with streams.take("other"):
            assert streams.live("acme") == 2
    assert refused.value.reason == "TENANT_LIMIT"
    assert refused.value.retry_after_s is not None
    assert refused.value.facts == {"quota": "tenant_streams_max", "limit": "2"}
    assert streams.live("acme") == 0


def test_a_stream_that_ends_badly_gives_its_place_back():
    streams = TenantStreams(1)
    for _ in range(10):
        with pytest.raises(RuntimeError), streams.take("acme"):
            raise RuntimeError
    assert streams.live("acme") == 0
    with streams.take("acme"):
        pass


def test_without_a_limit_streams_are_counted_all_the_same():
    streams = TenantStreams(0)
    with streams.take("acme"), streams.take("acme"):
        assert streams.live("acme") == 2
