"""Verdicts: what is accepted can be kept, what is refused says why and when to come back."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from laneway.core.catalogue import Capabilities, Pool
from laneway.core.errors import (
    Infeasible,
    InvalidRequest,
    LaneSaturated,
    RegionNotAllowed,
    StorageFull,
    TenantLimit,
    Unavailable,
)
from laneway.core.fleet import EtaFit, LanePlan, Plan, PoolPlan, WorkerLease, WorkerState
from laneway.core.job import Contract, GenerateTask, Sampling
from laneway.core.lanes import LANES, PARKING_LANES, Lane, VerdictKind
from laneway.policy import eta as etas
from laneway.policy.admit import AdmitParams, Ask, Candidate, Decision, Placement, Situation, admit, brought
from laneway.policy.calibration import BOUND_PRIOR
from laneway.policy.contract import bounded_by_call, output_room, within_reach
from laneway.policy.eta import Load, PoolView, pool_view
from laneway.policy.feasible import WAIT_FACTOR_MAX
from laneway.policy.grouping import group_of

NOW = 1_800_000_000.0
POOL = Pool(
    name="chat-small",
    model="chat",
    tier="small",
    engine="simulated",
    context_length=4096,
    vocabulary_size=1000,
    slots=4,
    workers=2,
    kv_tokens=16_384,
    tokenizer="bytes",
    capabilities=Capabilities(),
    price_per_million_prompt_tokens=1.0,
    price_per_million_completion_tokens=2.0,
)
STRONG = replace(POOL, name="chat-strong", tier="strong", price_per_million_completion_tokens=20.0)
PARAMS = AdmitParams(ttft_default_s={Lane.PRIORITY: 1.0, Lane.DEFERRABLE: 600.0, Lane.BATCH: 3600.0})
IDLE = PoolPlan("chat-small", workers=2, slots=8, free_slots=8)


def contract(lane: Lane = Lane.PRIORITY, *, due_s: float = 60.0, ttft_s: float = 1.0, **more) -> Contract:
    return Contract(lane=lane, ttft_target_s=ttft_s, tpot_target_s=0.1, deadline_s=NOW + due_s, **more)


def candidate(pool: Pool = POOL, prompt: int = 100, tokens: int = 50) -> Candidate:
    return Candidate(pool, prompt, tokens, tokens, tokens)


def replace_params(**changes) -> AdmitParams:
    return dataclasses.replace(PARAMS, **changes)


def seconds(span_s: float | None) -> float:
    assert span_s is not None
    return span_s


def decide(
    promised: Contract,
    *views: PoolView,
    candidates: tuple[Candidate, ...] = (candidate(),),
    storage: float | None = 0.1,
    jitter: float = 0.4,
    refusing: frozenset[str] = frozenset(),
) -> Decision:
    known = {v.plan.pool: v for v in views} or {"chat-small": PoolView(IDLE)}
    return admit(Ask(promised, candidates, "local"), Situation(known, NOW, jitter, storage, refusing), PARAMS)


def test_an_idle_pool_takes_every_lane_at_once():
    for lane in LANES:
        decision = decide(contract(lane, due_s=600))
        assert (decision.verdict.kind, decision.placement) == (VerdictKind.ACCEPTED, Placement.READY), lane
        assert decision.verdict.reason == "LANE_OPEN"
        assert decision.verdict.completion_eta_s == pytest.approx(100 / 1000 + 50 / 50)


@pytest.mark.parametrize("lane", LANES)
def test_a_tenant_has_as_many_open_jobs_in_a_lane_as_it_may_and_no_more(lane: Lane):
    params = replace_params(tenant_jobs_max={lane: 5})
    ask = Ask(contract(lane, due_s=600), (candidate(),), "local")
    at = [Situation({"chat-small": PoolView(IDLE)}, NOW, 0.4, 0.1, tenant_open=count) for count in (4, 5)]
    assert admit(ask, at[0], params).refusal is None
    refused = admit(ask, at[1], params)
    assert refused.refusal is TenantLimit
    error = refused.error()
    assert (error.reason, error.facts["quota"], error.facts["limit"]) == ("TENANT_LIMIT", "tenant_jobs_max", "5")
    assert seconds(error.retry_after_s) >= params.retry_s_min
    assert admit(ask, at[1], replace_params(tenant_jobs_max={lane: 0})).refusal is None, "0 is no limit"
    assert admit(ask, at[1], PARAMS).refusal is None


def test_a_region_that_is_not_allowed_is_named():
    decision = decide(contract(regions=("eu", "us")))
    assert decision.refusal is RegionNotAllowed
    assert "eu, us" in decision.verdict.message
    assert decision.verdict.retry_after_s is None


@pytest.mark.parametrize("used", [None, 0.81, 1.0])
def test_nearly_full_or_unknown_storage_refuses_with_a_retry_time(used: float | None):
    decision = decide(contract(), storage=used)
    wanted = (Unavailable, "STORAGE_UNKNOWN") if used is None else (StorageFull, "STORAGE_FULL")
    assert (decision.refusal, decision.verdict.reason) == wanted
    assert decision.verdict.retry_after_s == pytest.approx(2.0 * (0.8 + 0.5 * 0.4))


def test_storage_at_the_limit_accepts():
    assert decide(contract(), storage=0.8).refusal is None


def test_a_cost_cap_counts_the_longest_answer():
    most = POOL.cost(100, 50)
    assert decide(contract(cost_max=most)).refusal is None
    decision = decide(contract(cost_max=most * 0.999))
    assert (decision.refusal, decision.verdict.reason) == (Infeasible, "COST_ABOVE_MAX")


def test_a_prompt_that_no_worker_can_hold_is_refused_for_good():
    fits = candidate(prompt=100, tokens=16_284)
    assert decide(contract(due_s=3600), candidates=(fits,)).refusal is None
    decision = decide(contract(due_s=3600), candidates=(candidate(prompt=101, tokens=16_284),))
    assert (decision.refusal, decision.verdict.reason) == (Infeasible, "KV_TOO_SMALL")


@pytest.mark.parametrize("lane", LANES)
def test_a_deadline_that_an_idle_pool_misses_is_infeasible(lane: Lane):
    decision = decide(contract(lane, due_s=1.0))
    assert (decision.refusal, decision.verdict.reason) == (Infeasible, "DEADLINE_INFEASIBLE")
    assert decision.verdict.retry_after_s is None


def test_a_chosen_target_below_the_prefill_is_infeasible_and_the_default_gives_way():
    long = (candidate(prompt=3000),)
    assert decide(contract(ttft_s=0.9), candidates=long).verdict.reason == "TTFT_TARGET_INFEASIBLE"
    decision = decide(contract(ttft_s=1.0), candidates=long)
    assert decision.refusal is None
    assert decision.contract.ttft_target_s > 3.0


@pytest.mark.parametrize("lane", PARKING_LANES)
def test_a_cold_pool_holds_what_may_wait(lane: Lane):
    cold = PoolView(PoolPlan("chat-small"))
    decision = decide(contract(lane, due_s=600), cold)
    assert (decision.placement, decision.verdict.reason) == (Placement.PARKED, "HELD_FOR_WORKERS")
    assert decision.verdict.completion_eta_s == pytest.approx(POOL.load_s + 1.1)
    assert decision.fire_at_s == pytest.approx(decision.latest_start_s)


def test_a_cold_pool_refuses_priority_with_its_load_time():
    decision = decide(contract(), PoolView(PoolPlan("chat-small")))
    assert (decision.refusal, decision.verdict.reason) == (Unavailable, "NO_WORKER")
    assert decision.verdict.retry_after_s == pytest.approx(POOL.load_s)


def test_a_full_priority_lane_says_when_a_slot_frees():
    full = replace(IDLE, free_slots=0, service_s=4.0, lanes=(LanePlan(Lane.PRIORITY, ready=32, running=8, limit=40),))
    decision = decide(contract(ttft_s=100.0, due_s=1000), PoolView(full))
    assert (decision.refusal, decision.verdict.reason) == (LaneSaturated, "LANE_SATURATED")
    assert decision.verdict.retry_after_s is not None
    room = replace(full, lanes=(LanePlan(Lane.PRIORITY, ready=31, running=8, limit=40),))
    assert decide(contract(ttft_s=100.0, due_s=1000), PoolView(room)).refusal is None


def test_a_queue_longer_than_the_target_refuses_until_it_shrinks():
    busy = replace(IDLE, free_slots=0, service_s=4.0, lanes=(LanePlan(Lane.PRIORITY, ready=10, running=8),))
    decision = decide(contract(), PoolView(busy))
    assert decision.refusal is LaneSaturated
    assert seconds(decision.verdict.retry_after_s) >= seconds(decision.verdict.ttft_eta_s) - 1.0
    error = decision.error()
    assert error.reason == "LANE_SATURATED"
    assert error.facts["lane"] == "priority"


def test_what_this_door_accepted_since_the_plan_counts():
    busy = PoolView(replace(IDLE, free_slots=1, service_s=4.0))
    assert decide(contract(), busy).refusal is None
    assert decide(contract(), replace(busy, since=Load(jobs=20))).refusal is LaneSaturated


def test_a_refusing_pool_asks_for_some_room_before_it_opens():
    edge = PoolView(replace(IDLE, free_slots=0, service_s=4.0))
    target = decide(contract(ttft_s=50.0), edge).verdict.ttft_eta_s
    assert target is not None
    eta = etas.priority_eta(POOL, edge, 100, 50)
    exact = contract(ttft_s=eta.ttft_s + PARAMS.z * eta.wait_sigma_s + 1e-6)
    assert decide(exact, edge).refusal is None
    assert decide(exact, edge, refusing=frozenset({"chat-small"})).refusal is LaneSaturated


def test_running_lower_work_is_counted_on_to_yield_but_only_half_of_it():
    lanes = (LanePlan(Lane.DEFERRABLE, running=2), LanePlan(Lane.BATCH, running=6))
    full = PoolView(replace(IDLE, free_slots=0, service_s=60.0, lanes=lanes))
    ask = Ask(contract(), (candidate(),), "local")

    def asked(view: PoolView, yield_wait_s: float | None) -> Decision:
        situation = Situation({"chat-small": view}, NOW, 0.4, 0.1)
        return admit(ask, situation, replace_params(yield_wait_s=yield_wait_s))

    assert asked(full, None).refusal is LaneSaturated
    taken = asked(full, 0.2)
    assert taken.refusal is None
    assert taken.verdict.ttft_eta_s == pytest.approx(0.2 + 100 / 1000 + 1 / 50)
    assert asked(replace(full, since=Load(jobs=3)), 0.2).refusal is None
    assert asked(replace(full, since=Load(jobs=4)), 0.2).refusal is LaneSaturated
    priority = (LanePlan(Lane.PRIORITY, running=8),)
    assert asked(replace(full, plan=replace(full.plan, lanes=priority)), 0.2).refusal is LaneSaturated
    assert asked(replace(full, plan=replace(full.plan, service_s=0.4)), 0.2).verdict.ttft_eta_s == pytest.approx(
        0.4 / 8 + 100 / 1000 + 1 / 50
    ), "where a place frees sooner by itself, that counts"


def test_a_busy_cheap_tier_moves_to_the_next():
    busy = PoolView(replace(IDLE, free_slots=0, service_s=40.0))
    free = PoolView(replace(IDLE, pool="chat-strong"))
    decision = decide(contract(), busy, free, candidates=(candidate(), candidate(STRONG)))
    assert decision.verdict.kind is VerdictKind.MOVED
    assert (decision.verdict.tier, decision.candidate.pool.name) == ("strong", "chat-strong")


def test_of_several_refusals_the_one_that_can_be_retried_wins():
    busy = PoolView(replace(IDLE, free_slots=0, service_s=40.0))
    cap = contract(cost_max=POOL.cost(100, 50))
    free = PoolView(replace(IDLE, pool="chat-strong"))
    decision = decide(cap, busy, free, candidates=(candidate(STRONG), candidate()))
    assert decision.refusal is LaneSaturated


@pytest.mark.parametrize(
    ("view", "more", "reason"),
    [
        (PoolView(replace(IDLE, free_slots=0)), {}, "HELD_FOR_CAPACITY"),
        (PoolView(replace(IDLE, lanes=(LanePlan(Lane.BATCH, parked=1),))), {}, "HELD_FOR_CAPACITY"),
        (PoolView(IDLE, since=Load(jobs=8)), {}, "HELD_FOR_CAPACITY"),
        (PoolView(IDLE, stale=True), {}, "HELD_FOR_PLAN"),
        (PoolView(IDLE, paused=frozenset({Lane.BATCH})), {}, "HELD_LANE_PAUSED"),
        (PoolView(IDLE), {"not_before_s": NOW + 5}, "HELD_UNTIL_NOT_BEFORE"),
    ],
)
def test_batch_work_is_held(view: PoolView, more: dict, reason: str):
    decision = decide(contract(Lane.BATCH, due_s=600, **more), view)
    assert (decision.placement, decision.verdict.reason) == (Placement.PARKED, reason)
    assert decision.verdict.hold_until_s == decision.fire_at_s
    assert NOW + more.get("not_before_s", NOW) - NOW <= decision.fire_at_s <= decision.latest_start_s


def test_batch_work_behind_too_much_work_is_refused():
    deep = PoolView(replace(IDLE, free_slots=0, lanes=(LanePlan(Lane.BATCH, parked=900, parked_device_s=900.0),)))
    decision = decide(contract(Lane.BATCH, due_s=300), deep)
    assert decision.refusal is LaneSaturated
    assert decide(contract(Lane.DEFERRABLE, due_s=300), deep).refusal is None, "batch does not stand before deferrable"


def test_a_paused_priority_lane_is_unavailable():
    decision = decide(contract(), PoolView(IDLE, paused=frozenset({Lane.PRIORITY})))
    assert (decision.refusal, decision.verdict.reason) == (Unavailable, "LANE_PAUSED")


def test_without_a_valid_plan_the_leases_tell_and_doubt_doubles():
    lease = WorkerLease("w1", "w", "chat-small", "simulated", WorkerState.READY, slots=4, running=1, service_s=2.0)
    starting = replace(lease, worker_id="w2", state=WorkerState.STARTING)
    old = Plan("local", pools=(replace(IDLE, lanes=(LanePlan(Lane.BATCH, parked=3),)),))
    view = pool_view("chat-small", old, [lease, starting], Load(), fresh=False)
    assert view.stale
    assert (view.plan.workers, view.plan.slots, view.plan.free_slots) == (1, 4, 3)
    assert view.plan.lane(Lane.BATCH).parked == 3
    decision = decide(contract(ttft_s=5.0), view)
    assert decision.refusal is None
    assert decision.verdict.completion_eta_s == pytest.approx(2 * 1.1)
    nobody = pool_view("chat-small", None, [], Load(), fresh=True)
    assert decide(contract(), nobody).refusal is Unavailable


def test_a_bad_measurement_cannot_keep_an_idle_pool_closed():
    slow = replace(IDLE, decode_tokens_per_s=0.01, prefill_tokens_per_s=0.01)
    assert decide(contract(), PoolView(slow)).refusal is None
    assert decide(contract(), PoolView(replace(slow, free_slots=7))).refusal is LaneSaturated


lanes = st.sampled_from(LANES)
counts = st.integers(0, 200)
rates = st.sampled_from([0.0, 0.5, 20.0, 1000.0])


@st.composite
def views(draw: st.DrawFn, name: str) -> PoolView:
    workers = draw(st.integers(0, 3))
    slots = workers * 4
    plans = tuple(
        LanePlan(
            lane,
            ready=draw(counts),
            running=draw(st.integers(0, 12)),
            parked=draw(counts),
            parked_device_s=draw(st.floats(0, 1e4)),
            limit=draw(st.sampled_from([0, 40])),
        )
        for lane in LANES
    )
    plan = PoolPlan(
        name,
        workers=workers,
        slots=slots,
        free_slots=draw(st.integers(0, slots)),
        prefill_tokens_per_s=draw(rates),
        decode_tokens_per_s=draw(rates),
        service_s=draw(st.sampled_from([0.0, 0.3, 30.0])),
        lanes=plans,
    )
    paused = frozenset(draw(st.lists(lanes, max_size=1)))
    return PoolView(plan, draw(st.booleans()), Load(draw(counts), draw(counts), draw(st.floats(0, 100))), paused)


@given(
    lane=lanes,
    due_s=st.floats(-10, 1e5),
    ttft_s=st.floats(0.001, 100),
    delay_s=st.floats(-5, 1e4),
    cost_max=st.none() | st.floats(0, 1),
    prompt=st.integers(1, 4000),
    tokens=st.integers(1, 20_000),
    small=views("chat-small"),
    strong=views("chat-strong"),
    storage=st.none() | st.floats(0, 1),
    jitter=st.floats(0, 0.999),
    refusing=st.booleans(),
)
def test_what_is_accepted_is_feasible_and_what_is_refused_says_why(
    lane, due_s, ttft_s, delay_s, cost_max, prompt, tokens, small, strong, storage, jitter, refusing
):
    not_before = NOW + delay_s if lane.may_park and delay_s > 0 else 0.0
    promised = contract(lane, due_s=due_s, ttft_s=ttft_s, cost_max=cost_max, not_before_s=not_before)
    decision = decide(
        promised,
        small,
        strong,
        candidates=(candidate(POOL, prompt, tokens), candidate(STRONG, prompt, tokens)),
        storage=storage,
        jitter=jitter,
        refusing=frozenset({"chat-small"}) if refusing else frozenset(),
    )
    verdict = decision.verdict
    assert verdict.reason
    assert verdict.message
    assert all(math.isfinite(x) for x in (decision.fire_at_s, decision.latest_start_s, decision.device_s))
    if decision.refusal is not None:
        assert verdict.kind is VerdictKind.REFUSED
        assert (verdict.retry_after_s is not None) == decision.refusal.row.retryable
        if verdict.retry_after_s is not None:
            most = PARAMS.place_s_max if decision.refusal is LaneSaturated else PARAMS.retry_s_max
            assert PARAMS.retry_s_min <= verdict.retry_after_s <= most * PARAMS.jitter_max
        return
    assert storage is not None
    assert storage <= 0.8
    assert NOW + seconds(verdict.completion_eta_s) <= promised.deadline_s
    assert NOW + seconds(verdict.ttft_eta_s) >= not_before
    if lane is Lane.PRIORITY:
        assert decision.placement is Placement.READY
        assert seconds(verdict.ttft_eta_s) <= decision.contract.ttft_target_s
        assert (small if decision.candidate.pool is POOL else strong).plan.workers
    if decision.placement is Placement.PARKED:
        assert decision.fire_at_s >= max(NOW, not_before)
        assert verdict.kind is VerdictKind.HELD
    if cost_max is not None:
        assert decision.candidate.pool.cost(prompt, tokens) <= cost_max


@given(jitter=st.floats(0, 0.999999))
def test_retry_times_spread_over_the_stated_range(jitter: float):
    decision = decide(contract(), PoolView(PoolPlan("chat-small")), jitter=jitter)
    assert 0.8 * POOL.load_s <= seconds(decision.verdict.retry_after_s) <= 1.3 * POOL.load_s


@pytest.mark.parametrize(("load_s", "retry_s"), [(30.0, 30.0), (31.0, 30.0), (29.0, 29.0)])
def test_no_retry_time_is_longer_than_the_longest(load_s: float, retry_s: float):
    unspread = dataclasses.replace(PARAMS, jitter_min=1.0, jitter_max=1.0)
    view = PoolView(PoolPlan("chat-small"))
    ask = Ask(contract(), (candidate(replace(POOL, load_s=load_s)),), "local")
    decision = admit(ask, Situation({"chat-small": view}, NOW, 0.4, 0.1), unspread)
    assert (decision.verdict.reason, decision.verdict.retry_after_s) == ("NO_WORKER", retry_s)


def test_the_context_holds_prompt_and_answer():
    assert output_room(POOL, 4000, None) == 96
    assert output_room(POOL, 100, None) == POOL.max_tokens_default
    assert output_room(POOL, 4095, 1) == 1
    with pytest.raises(InvalidRequest) as error:
        output_room(POOL, 4000, 97)
    assert error.value.field == "spec.generate.sampling.max_tokens"
    assert {"4000", "97", "4096"} <= set(error.value.facts.values())
    with pytest.raises(InvalidRequest) as error:
        output_room(POOL, 4096, None)
    assert error.value.field == "spec.generate.prompt"
    assert "4096" in str(error.value)


def test_the_calls_time_only_shortens_a_deadline():
    promised = contract(due_s=60)
    assert bounded_by_call(promised, NOW, None) is promised
    assert bounded_by_call(promised, NOW, 100.0) is promised
    assert bounded_by_call(promised, NOW, 10.0).deadline_s == pytest.approx(NOW + 9.95)
    assert bounded_by_call(promised, NOW, 0.1).deadline_s == pytest.approx(NOW + 0.095)
    assert within_reach(promised, 1.0, 0.4) is promised


def test_groups_join_equal_beginnings_of_one_tenant():
    task = GenerateTask(tuple(range(100)), Sampling(max_tokens=5))
    same_start = replace(task, prompt_ids=(*range(64), 9, 9))
    assert group_of("p", "a", task) == group_of("p", "a", same_start)
    others = [
        group_of("p", "b", task),
        group_of("q", "a", task),
        group_of("p", "a", replace(task, cache_salt="s")),
        group_of("p", "a", replace(task, prompt_ids=(7, *range(1, 100)))),
    ]
    assert group_of("p", "a", task) not in others
    assert all(len(g) == 10 and g.isalnum() and g == g.lower() for g in others)


def test_a_region_that_drains_takes_no_new_work_and_says_when_to_come_again():
    for lane in LANES:
        ask = Ask(contract(lane, due_s=600), (candidate(),), "local")
        known = {"chat-small": PoolView(IDLE)}
        decision = admit(ask, Situation(known, NOW, 0.4, 0.1, draining=True), PARAMS)
        assert (decision.refusal, decision.verdict.reason) == (Unavailable, "REGION_DRAINING")
        assert seconds(decision.error().retry_after_s) > 0.0


def test_what_was_learned_corrects_what_is_stated_and_what_a_wait_may_come_to():
    fit = EtaFit(2.0, 3.0, 200)  # more than what decides may be multiplied by
    plain = replace(IDLE, free_slots=0, service_s=0.8, lanes=(LanePlan(Lane.PRIORITY, running=8),))
    taught = replace(plain, lanes=(replace(plain.lanes[0], ttft_fit=fit, completion_fit=fit),))
    before, after = (decide(contract(ttft_s=5.0), PoolView(plan)).verdict for plan in (plain, taught))
    assert after.ttft_eta_s == pytest.approx(2 * seconds(before.ttft_eta_s))
    assert after.ttft_bound_s == pytest.approx(3 / BOUND_PRIOR * seconds(before.ttft_bound_s))
    assert after.completion_bound_s == pytest.approx(3 / BOUND_PRIOR * seconds(before.completion_bound_s))
    assert after.estimate == before.estimate, "what is learned of next does not count twice"
    wait = etas.priority_eta(POOL, PoolView(plain), 100, 50)
    least = wait.ttft_s - wait.wait_s + WAIT_FACTOR_MAX * (wait.wait_s + PARAMS.z * wait.wait_sigma_s)
    assert decide(contract(ttft_s=least + 1e-6), PoolView(taught)).refusal is None
    assert decide(contract(ttft_s=least - 1e-3), PoolView(taught)).refusal is LaneSaturated
    idle = replace(IDLE, lanes=taught.lanes)
    assert decide(contract(ttft_s=0.13), PoolView(idle)).refusal is None, "nothing is learned of a pool at rest"


def test_a_verdict_shows_the_numbers_it_rests_on():
    busy = PoolView(replace(IDLE, free_slots=0, service_s=4.0, lanes=(LanePlan(Lane.BATCH, parked=3),)))
    for lane in LANES:
        for due_s in (600.0, 2.0):
            verdict = decide(contract(lane, due_s=due_s), busy).verdict
            facts = dict(verdict.facts)
            assert {"wait_s", "service_s", "capacity"} <= set(facts)
            assert "0" not in (facts[name] for name in facts if name != "wait_s"), "what is nothing is not said"
            assert len(verdict.facts) <= 16
            assert seconds(verdict.completion_bound_s) >= seconds(verdict.completion_eta_s)
            assert seconds(verdict.ttft_bound_s) >= seconds(verdict.ttft_eta_s)
    both = (candidate(), candidate(STRONG))
    slow = replace(busy, plan=replace(busy.plan, service_s=40.0))
    other = PoolView(replace(IDLE, pool="chat-strong", free_slots=0, service_s=40.0))
    refused = decide(contract(ttft_s=0.2), slow, other, candidates=both)
    assert dict(refused.verdict.facts)["other_tiers"] in ("small:LANE_SATURATED", "strong:LANE_SATURATED")


def situation(view: PoolView, jitter: float = 0.4, **more) -> Situation:
    return Situation({view.plan.pool: view}, NOW, jitter, 0.1, **more)


def test_who_comes_at_its_time_is_judged_by_expectation():
    edge = PoolView(replace(IDLE, free_slots=0, service_s=4.0))
    eta = etas.priority_eta(POOL, edge, 100, 50)
    ask = Ask(contract(ttft_s=eta.ttft_s + 1e-6), (candidate(),), "local")
    here = frozenset({"chat-small"})
    assert admit(ask, situation(edge), PARAMS).refusal is LaneSaturated
    redeemed = admit(ask, situation(edge, redeeming=here, refusing=here), PARAMS)
    assert redeemed.refusal is None
    assert redeemed.redeemed
    assert dict(redeemed.verdict.facts)["place"] == "promised"
    sooner = replace(ask, contract=contract(ttft_s=eta.ttft_s - 1e-3))
    assert admit(sooner, situation(edge, redeeming=here), PARAMS).refusal is LaneSaturated


def test_a_place_comes_after_all_that_was_promised():
    busy = PoolView(replace(IDLE, free_slots=0, service_s=4.0, lanes=(LanePlan(Lane.PRIORITY, ready=10, running=8),)))
    ask = Ask(contract(), (candidate(),), "local")
    alone = seconds(admit(ask, situation(busy, 0.0), PARAMS).place_s)
    behind = admit(ask, situation(busy, 0.0, promised_later={"chat-small": Load(6)}), PARAMS)
    assert behind.place_s == pytest.approx(alone + 6 * 4.0 / 8)
    assert seconds(admit(ask, situation(busy, 0.999), PARAMS).place_s) <= alone + PARAMS.place_spread_s


def test_a_place_lies_no_farther_ahead_than_may_be_promised():
    busy = PoolView(replace(IDLE, free_slots=0, service_s=4.0, lanes=(LanePlan(Lane.PRIORITY, ready=10, running=8),)))
    ask = Ask(contract(), (candidate(),), "local")
    after_s = seconds(admit(ask, situation(busy, 0.0), PARAMS).place_s)
    exactly, less = (replace_params(place_s_max=most) for most in (after_s, after_s - 0.001))
    assert admit(ask, situation(busy, 0.0), exactly).place_s == after_s
    beyond = admit(ask, situation(busy, 0.0), less)
    assert beyond.place_s is None
    assert beyond.verdict.retry_after_s == pytest.approx(less.place_s_max)


def test_one_in_a_hundred_refusals_is_tried_if_it_may_well_be_kept():
    edge = PoolView(replace(IDLE, free_slots=0, service_s=4.0))
    eta = etas.priority_eta(POOL, edge, 100, 50)
    near, far = (Ask(contract(ttft_s=share * eta.ttft_s), (candidate(),), "local") for share in (1.05, 0.3))
    tried = admit(near, situation(edge, 0.009), PARAMS)
    assert (tried.refusal, tried.verdict.reason) == (None, "AUDIT")
    assert admit(near, situation(edge, 0.01), PARAMS).refusal is LaneSaturated
    assert admit(far, situation(edge, 0.0), PARAMS).refusal is LaneSaturated, "hopeless"
    assert admit(near, situation(edge, 0.0), replace_params(audit_share=0.0)).refusal is LaneSaturated


@given(view=views("chat-small"), lane=lanes, due_s=st.floats(1, 1e4), ttft_s=st.floats(0.1, 50))
def test_pools_that_look_alike_get_the_same_verdict_in_either_order(view, lane, due_s, ttft_s):
    twin = replace(POOL, name="chat-twin")
    known = {"chat-small": view, "chat-twin": replace(view, plan=replace(view.plan, pool="chat-twin"))}
    orders = ((candidate(), candidate(twin)), (candidate(twin), candidate()))
    promised = contract(lane, due_s=due_s, ttft_s=ttft_s)
    first, second = (admit(Ask(promised, order, "local"), Situation(known, NOW, 0.4, 0.1), PARAMS) for order in orders)
    assert (first.refusal, first.placement) == (second.refusal, second.placement)
    assert first.verdict.reason == second.verdict.reason
    assert first.verdict.retry_after_s == second.verdict.retry_after_s
    assert first.verdict.completion_bound_s == second.verdict.completion_bound_s


@given(view=views("chat-small"), lane=lanes, due_s=st.floats(-5, 1e4), delay_s=st.floats(-5, 100))
def test_deadlines_never_grow(view, lane, due_s, delay_s):
    not_before = NOW + delay_s if lane.may_park and delay_s > 0 else 0.0
    promised = contract(lane, due_s=due_s, not_before_s=not_before)
    decision = admit(Ask(promised, (candidate(),), "local"), situation(view), PARAMS)
    assert decision.contract.deadline_s == promised.deadline_s
    assert decision.latest_start_s <= promised.deadline_s
    assert decision.device_s >= 0.0
    if decision.refusal is None:
        assert decision.fire_at_s <= max(NOW, not_before, promised.deadline_s)


def test_priority_is_not_kept_out_by_the_prompts_of_lower_lanes_that_came_before_it():
    """A flood of batch prompts that an idle pool takes at once: its budget lets them in one by one, behind priority."""
    view = PoolView(IDLE)
    batch = decide(contract(Lane.BATCH, due_s=3600.0), view, candidates=(candidate(prompt=3000),))
    chat = decide(contract(), view, candidates=(candidate(prompt=3000),))
    assert (batch.placement, chat.placement) == (Placement.READY, Placement.READY)
    assert (brought(batch).jobs, brought(batch).prompt_tokens) == (1, 0)
    assert (brought(chat).jobs, brought(chat).prompt_tokens, brought(chat).device_s) == (1, 3000, 0.0)
    behind = Load(jobs=4, prompt_tokens=4 * brought(batch).prompt_tokens)
    assert decide(contract(), replace(view, since=behind)).refusal is None
    assert decide(contract(), replace(view, since=Load(jobs=4, prompt_tokens=4 * 3000))).refusal is LaneSaturated
