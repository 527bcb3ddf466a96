"""The plan: capacity from leases and deliveries, desired workers from the work that is due."""

from hypothesis import given
from hypothesis import strategies as st

from laneway.core.catalogue import Capabilities, Catalogue, Pool
from laneway.core.fleet import LanePlan, WorkerLease, WorkerState
from laneway.core.lanes import LANES, Lane
from laneway.policy.plan import Depth, Parked, Snapshot, make_plan

POOL = Pool(
    name="p", model="chat", tier="small", engine="simulated", context_length=4096, vocabulary_size=300, slots=4,
    workers=2, kv_tokens=16384, tokenizer="bytes", capabilities=Capabilities(), queue_length=10, load_s=10.0,
    prefill_tokens_per_s=1000.0, decode_tokens_per_s=50.0,
)  # fmt: skip
CATALOGUE = Catalogue((POOL,))


def lease(name: str, *, state: WorkerState = WorkerState.READY, running: int = 0, **more: float) -> WorkerLease:
    return WorkerLease(
        f"{name}-1", name, "p", "simulated", state, slots=4, running=running, kv_tokens=1000,
        kv_tokens_used=int(more.get("used", 0)), prefill_tokens_per_s=more.get("prefill", 0.0),
        service_s=more.get("service", 0.0),
    )  # fmt: skip


def plan_of(snapshot: Snapshot):
    plan = make_plan(snapshot, CATALOGUE, region="local", epoch=3, version=7, now_s=100.0, valid_s=3.0)
    return plan, plan.pool("p")


def test_capacity_comes_from_ready_workers() -> None:
    leases = [
        lease("a", running=1, used=200, prefill=2000.0, service=2.0),
        lease("b", running=2),
        lease("c", state=WorkerState.DRAINING, running=3),
        lease("d", state=WorkerState.STARTING),
    ]
    plan, pool = plan_of(Snapshot(leases=leases))
    assert (plan.epoch, plan.version, plan.made_s, plan.valid_until_s) == (3, 7, 100.0, 103.0)
    assert (pool.workers, pool.slots, pool.free_slots) == (2, 8, 5)
    assert (pool.kv_tokens, pool.free_kv_tokens) == (2000, 1800)
    assert pool.prefill_tokens_per_s == 2000.0, "only measured values count"
    assert pool.decode_tokens_per_s == 50.0, "the catalogue's where nothing was measured"
    assert pool.service_s == 2.0


def test_places_are_counted_by_deliveries_not_by_leases_that_may_be_old() -> None:
    leases = [lease("a", running=3), lease("c", state=WorkerState.DRAINING, running=2)]
    none = {("p", lane): Depth() for lane in LANES}
    _, pool = plan_of(
        Snapshot(leases=leases, depths=none | {("p", Lane.BATCH): Depth(5, 3), ("p", Lane.PRIORITY): Depth(0, 2)})
    )
    assert pool.free_slots == 1, "5 delivered, 2 of them to the worker that drains"
    _, pool = plan_of(Snapshot(leases=leases, depths=none | {("p", Lane.BATCH): Depth(0, 99)}))
    assert pool.free_slots == 0
    _, pool = plan_of(Snapshot(leases=leases, depths=none))
    assert pool.free_slots == 4
    _, pool = plan_of(Snapshot(leases=leases))
    assert pool.free_slots == 1, "where deliveries are not known, the lease is all there is"


def test_lanes_show_depth_parked_work_limit_and_pauses() -> None:
    plan, pool = plan_of(
        Snapshot(
            depths={("p", Lane.BATCH): Depth(5, 3)},
            parked={("p", Lane.BATCH): Parked(9, 4.5)},
            oldest_wait_s={("p", Lane.BATCH): 1.5},
            paused=frozenset({Lane.BATCH}),
        )
    )
    assert pool.lane(Lane.BATCH) == LanePlan(Lane.BATCH, 5, 3, 9, 4.5, 0, 1.5)
    assert pool.lane(Lane.PRIORITY).limit == 4 * 2 + 10
    assert plan.paused == {Lane.BATCH}


@given(st.lists(st.tuples(st.sampled_from(list(WorkerState)), st.integers(0, 9)), max_size=6), st.integers(0, 50))
def test_free_places_are_never_more_than_places(states: list[tuple[WorkerState, int]], delivered: int) -> None:
    leases = [lease(f"w{i}", state=state, running=running) for i, (state, running) in enumerate(states)]
    _, pool = plan_of(Snapshot(leases=leases, depths={("p", lane): Depth(1, delivered) for lane in LANES}))
    assert 0 <= pool.free_slots <= pool.slots
