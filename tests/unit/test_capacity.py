"""What a leader keeps of priority work and of wanted workers, and what a new one takes over."""

import pytest
from msgspec.structs import replace

from laneway.core.catalogue import Capabilities, Catalogue, Pool
from laneway.core.clock import ManualClock
from laneway.core.fleet import Plan, PoolPlan
from laneway.core.lanes import Lane
from laneway.policy.desired import DesiredParams
from laneway.policy.plan import Depth
from laneway.scheduler.capacity import OUTLOOK_AGE_S, Capacity

POOL = Pool(
    name="p", model="chat", tier="small", engine="simulated", context_length=4096, vocabulary_size=300, slots=4,
    workers=1, kv_tokens=16384, tokenizer="bytes", capabilities=Capabilities(), load_s=10.0,
)  # fmt: skip
CATALOGUE = Catalogue((POOL,))
BEFORE = Plan("local", pools=(PoolPlan("p", desired_workers=4, priority_per_s=3.0, burstiness=6.0),))


def test_a_new_leader_goes_on_from_the_plan_before_it() -> None:
    capacity = Capacity(CATALOGUE, ManualClock(), BEFORE)
    outlook = capacity.observe({})["p"]
    assert (outlook.per_s, outlook.burstiness) == (3.0, 6.0)
    wanted = Plan("local", made_s=1.0, pools=(PoolPlan("p", desired_workers=1),))
    assert capacity.calm(wanted, DesiredParams()).pool("p").desired_workers == 4, "not down at once"
    up = replace(wanted, pools=(PoolPlan("p", desired_workers=20),))
    assert capacity.calm(up, DesiredParams()).pool("p").desired_workers == 8


def test_arrivals_count_in_the_priority_lane_of_known_pools_alone() -> None:
    clock = ManualClock()
    capacity = Capacity(CATALOGUE, clock)
    for tenth in range(700):
        clock.advance(0.1)
        capacity.arrived("p", Lane.PRIORITY if tenth % 2 else Lane.BATCH)
        capacity.arrived("gone", Lane.PRIORITY)
        capacity.observe({("p", Lane.PRIORITY): Depth(1, 2), ("p", Lane.BATCH): Depth(50, 50)})
    clock.advance(OUTLOOK_AGE_S)
    outlook = capacity.observe({("p", Lane.PRIORITY): Depth(1, 2)})["p"]
    assert outlook.per_s == pytest.approx(5.0, rel=0.1)
    assert outlook.jobs == pytest.approx(3.0, rel=0.1)
