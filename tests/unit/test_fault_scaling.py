"""Workers that hold running work are wanted though nothing waits, and never more of them than there are jobs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneway.core.catalogue import Capabilities, Catalogue, Pool
from laneway.core.fleet import Demand, LanePlan, WorkerLease, WorkerState
from laneway.core.lanes import LANES, PARKING_LANES, Lane
from laneway.policy.desired import Load, desired
from laneway.policy.plan import Depth, Snapshot, make_plan

POOL = Pool(
    name="p", model="chat", tier="small", engine="simulated", context_length=4096, vocabulary_size=300, slots=1,
    workers=0, kv_tokens=16384, tokenizer="bytes", capabilities=Capabilities(), load_s=10.0,
)  # fmt: skip


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("running", [1, 4, 40])
def test_running_work_keeps_its_workers_though_nothing_waits(lane: Lane, running: int) -> None:
    assert desired(POOL, Load([LanePlan(lane, ready=0, running=running)]), 100.0).workers == running


def test_places_are_counted_from_leases_where_one_depth_is_unknown() -> None:
    lease = WorkerLease("w-1", "w", "p", "simulated", WorkerState.READY, slots=4, running=3)
    known = dict.fromkeys([("p", lane) for lane in LANES], Depth())
    for missing in (*LANES, None):
        depths = {key: depth for key, depth in known.items() if key[1] is not missing}
        snapshot = Snapshot(leases=(lease,), depths=depths)
        (plan,) = make_plan(snapshot, Catalogue((POOL,)), region="r", epoch=1, version=1, now_s=1.0, valid_s=1.0).pools
        assert plan.free_slots == (4 if missing is None else 1)


@pytest.mark.parametrize("lane", LANES)
def test_a_pool_that_runs_anything_is_never_scaled_to_nothing(lane: Lane) -> None:
    assert desired(POOL, Load([LanePlan(lane, running=1)]), 100.0).workers == 1
    assert desired(POOL, Load([LanePlan(lane)]), 100.0).workers == 0


@given(
    st.lists(st.tuples(st.sampled_from(LANES), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), max_size=3),
    st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1e6)), max_size=9).map(sorted),
)
def test_never_more_workers_than_there_are_jobs(
    depths: list[tuple[Lane, int, int, int]], demand: list[tuple[float, float]]
) -> None:
    lanes = [LanePlan(lane, ready=ready, running=running, parked=parked) for lane, ready, running, parked in depths]
    jobs = sum(each.ready + each.running for each in lanes)
    jobs += sum(each.parked for each in lanes if each.lane in PARKING_LANES)
    curve = [Demand(by_s, device_s) for by_s, device_s in demand]
    assert desired(POOL, Load(lanes, deferrable=curve), 100.0).workers <= jobs
