"""Workers that hold running work are wanted though nothing waits, and never more of them than there are jobs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneway.core.catalogue import Capabilities, Pool
from laneway.core.fleet import LanePlan
from laneway.core.lanes import LANES, PARKING_LANES, Lane
from laneway.policy.plan import desired_workers

POOL = Pool(
    name="p", model="chat", tier="small", engine="simulated", context_length=4096, vocabulary_size=300, slots=1,
    workers=0, kv_tokens=16384, tokenizer="bytes", capabilities=Capabilities(), load_s=10.0,
)  # fmt: skip


@pytest.mark.parametrize("running", [1, 4, 40])
def test_running_priority_work_keeps_its_workers_though_nothing_waits(running: int) -> None:
    assert desired_workers(POOL, [LanePlan(Lane.PRIORITY, ready=0, running=running)], (), 100.0) == running


@pytest.mark.parametrize("lane", LANES)
def test_a_pool_that_runs_anything_is_never_scaled_to_nothing(lane: Lane) -> None:
    assert desired_workers(POOL, [LanePlan(lane, running=1)], (), 100.0) == 1
    assert desired_workers(POOL, [LanePlan(lane)], (), 100.0) == 0


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
    assert desired_workers(POOL, lanes, demand, 100.0) <= jobs
