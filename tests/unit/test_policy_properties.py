"""What holds of the policy whatever comes: work is conserved, no lane gets more than its share while another waits
within its contract, deadlines never grow, and budgets never fall below the debt that is stated."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import laneway.policy
from laneway.core.catalogue import Capabilities, Pool
from laneway.core.fleet import LanePlan, PoolPlan, StepTimes
from laneway.core.job import Contract
from laneway.core.lanes import LANES, PARKING_LANES, Lane
from laneway.core.subjects import ParkSubject
from laneway.policy import fire, interference, retry
from laneway.policy.admit import AdmitParams, Ask, Candidate, Situation, admit
from laneway.policy.contract import bounded_by_call, within_reach
from laneway.policy.eta import PoolView
from laneway.policy.fairness import FairParams, Ledger
from laneway.policy.holding import HoldParams, HoldPlan, Portion, hold_now
from laneway.policy.kv import Growth, KvParams, limit_blocks, peak_blocks
from laneway.policy.parked import ParkIndex
from laneway.policy.preempt import PreemptParams, Speeds, Standing, choose_victim
from laneway.policy.pull import LaneView, Pull, PullParams, Room, Start, Turns, next_step, started
from laneway.policy.release import Room as PoolRoom
from laneway.policy.release import choose

NOW_S = 1_000_000.0
counts = st.integers(0, 8)
seconds = st.floats(0.0, 1e4)


# --- work is conserved -------------------------------------------------------------------------------


@given(
    waiting=st.sets(st.sampled_from(LANES)), paused=st.sets(st.sampled_from(LANES)), slots=counts, kv=counts,
    places=counts, reserved=counts, held=st.integers(0, 2), run=st.tuples(counts, counts), overloaded=st.booleans(),
)  # fmt: skip
def test_a_worker_rests_only_without_work_without_room_or_while_the_gate_is_shut(
    waiting: set[Lane], paused: set[Lane], slots: int, kv: int, places: int, reserved: int, held: int,
    run: tuple[int, int], overloaded: bool,
):  # fmt: skip
    views = [LaneView(lane, lane in waiting, lane in paused) for lane in LANES]
    room = Room(slots, kv, 1, places, places, reserved, 0, held, overloaded)
    step = next_step(views, room, Turns(*run), PullParams())
    open_to = waiting - paused
    lower = bool(open_to & set(PARKING_LANES))
    may = slots > 0 and kv > 0 and (Lane.PRIORITY in open_to or (lower and places > 0 and slots > reserved))
    if may:
        assert step is not None
    if isinstance(step, Pull | Start):
        assert step.lane in open_to
        assert step.lane is Lane.PRIORITY or places > 0, "whatever is due, the gate holds"
    if isinstance(step, Pull):
        assert 1 <= step.batch <= slots, "no more is held than the engine can start"


@given(
    jobs=st.lists(st.tuples(st.sampled_from(PARKING_LANES), st.sampled_from("abc"), seconds), max_size=12), idle=counts,
    queue=counts, busy=st.sets(st.sampled_from(["g0", "g1"])),
)  # fmt: skip
def test_no_place_stays_empty_while_a_job_could_go(
    jobs: list[tuple[Lane, str, float]], idle: int, queue: int, busy: set[str]
):
    parks = [
        ParkSubject("local", lane, "p", tenant, 0, int((NOW_S + left_s) * 1000), 100, f"g{i % 2}", f"j{i}")
        for i, (lane, tenant, left_s) in enumerate(jobs)
    ]
    index = ParkIndex(parks, now_ms=int(NOW_S * 1000))
    chosen = choose(index, PoolRoom("p", idle, queue, 1.0, 1), Ledger(), now_s=NOW_S, busy=busy)
    assert len(chosen) >= min(idle + queue, len(jobs))
    assert len({release.park.job for release in chosen}) == len(chosen), "each once"


@given(
    parts=st.lists(st.builds(Portion, seconds, seconds, st.floats(NOW_S, NOW_S + 1e4), st.floats(0.0, 1.0))),
    in_use=st.floats(0.0, 1.0), price=st.floats(0.0, 2.0),
)  # fmt: skip
def test_an_idle_pool_never_waits_for_a_better_time(parts: list[Portion], in_use: float, price: float):
    params = HoldParams()
    hold = hold_now(
        HoldPlan(NOW_S, tuple(parts), 0.0), released_device_s=0.0, price_now=price, in_use=in_use, now_s=NOW_S,
        params=params,
    )  # fmt: skip
    assert not (hold.holds and in_use < params.busy)
    assert hold.device_s >= 0.0


growths = st.lists(st.builds(Growth, counts, counts, st.integers(1, 3)), max_size=6)


@given(running=growths, more=st.builds(Growth, counts, counts), capacity=st.integers(0, 60), drift=st.floats(0.0, 9.0))
def test_one_more_needs_no_more_than_all_of_it_and_what_is_held_counts(
    running: list[Growth], more: Growth, capacity: int, drift: float
):
    before, after = peak_blocks(running), peak_blocks([*running, more])
    assert before <= after <= before + more.held_blocks + more.sequences * more.rest_blocks
    assert after >= sum(each.held_blocks for each in (*running, more))
    predicted, reserved = (limit_blocks(capacity, drift, KvParams(), paged=paged) for paged in (True, False))
    assert 0 <= predicted <= reserved <= capacity


# --- shares ------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    appetite=st.lists(st.sets(st.sampled_from(LANES)), min_size=1, max_size=4), floor_turns=st.integers(2, 12),
    per_batch=st.integers(1, 6), slots=st.integers(1, 4),
)  # fmt: skip
def test_over_any_stretch_in_which_lanes_wait_each_gets_its_share(
    appetite: list[set[Lane]], floor_turns: int, per_batch: int, slots: int
):
    """Jobs of one size; who waits changes every fifty starts. While a lane waits all the time it gets its share of the
    starts, to one turn: lower lanes one in `floor_turns`, batch one in `per_batch + 1` of what the lower lanes get."""
    params, turns = PullParams(floor_turns, per_batch), Turns()
    for waiting in appetite:
        if not waiting:
            continue
        views = [LaneView(lane, lane in waiting) for lane in LANES]
        given_to = Counter[Lane]()
        while given_to.total() < 50:
            step = next_step(views, Room(slots, slots, 1, slots, slots), turns, params)
            assert isinstance(step, Pull)
            given_to[step.lane] += step.batch
            turns = started(turns, step.lane, step.batch, views)
        total, lower = given_to.total(), given_to.total() - given_to[Lane.PRIORITY]
        if waiting & set(PARKING_LANES):
            assert lower >= (total - slots) // floor_turns - 1, "the floor"
        if Lane.PRIORITY in waiting:
            assert lower <= total // floor_turns + 1, "and no more than the floor while priority waits"
        if waiting >= set(PARKING_LANES):
            assert given_to[Lane.BATCH] >= (lower - slots) // (per_batch + 1) - 1
            assert given_to[Lane.BATCH] <= lower // (per_batch + 1) + 2


@settings(max_examples=30)
@given(
    costs=st.dictionaries(st.sampled_from("abcd"), st.integers(50, 400), min_size=2), rounds=st.integers(20, 60),
    takes=st.integers(1, 4),
)  # fmt: skip
def test_no_tenant_gets_far_ahead_of_another_that_has_work(costs: dict[str, int], rounds: int, takes: int):
    """All have jobs all the time, each of its own size and group: what they were charged differs by 2 Q and the largest
    charge at most (policy.fairness)."""
    fair = FairParams(locality_tokens=0.0)
    ledger = Ledger(fair)
    parks = [
        ParkSubject(
            "local", Lane.BATCH, "p", tenant, 0, int((NOW_S + 9e4 + i) * 1000), cost, f"{tenant}{i}", f"{tenant}{i}"
        )
        for tenant, cost in costs.items()
        for i in range(rounds * takes)
    ]
    index = ParkIndex(parks, now_ms=int(NOW_S * 1000))
    had = Counter[str]()
    for _ in range(rounds):
        for release in choose(index, PoolRoom("p", takes, 0, 1.0, 1), ledger, now_s=NOW_S):
            index.discard(release.park.job)
            ledger.charge(release.park, release.charge)
            had[release.park.tenant] += release.park.cost_ms
    assert max(had.values()) - min(had[tenant] for tenant in costs) <= 2 * max(costs.values())


# --- deadlines ---------------------------------------------------------------------------------------

SMALL = Pool(
    name="chat-small", model="chat", tier="small", engine="simulated", context_length=4096, vocabulary_size=1000,
    slots=4, workers=2, kv_tokens=16_384, tokenizer="bytes", capabilities=Capabilities(),
)  # fmt: skip
CONTRACT = Contract(Lane.PRIORITY, 1.0, 0.1, NOW_S + 60.0)


@given(left_s=st.none() | st.floats(-10.0, 100.0), due_s=seconds, ttft_s=st.floats(0.0, 100.0))
def test_a_contract_only_gets_tighter_on_its_way(left_s: float | None, due_s: float, ttft_s: float):
    asked = replace(CONTRACT, deadline_s=NOW_S + due_s)
    bounded = bounded_by_call(asked, NOW_S, left_s)
    assert bounded.deadline_s <= asked.deadline_s
    assert within_reach(bounded, 1.0, ttft_s).deadline_s == bounded.deadline_s, (
        "a default target moves, a deadline never"
    )


@given(
    lane=st.sampled_from(LANES), due_s=st.floats(0.1, 1e4), ready=counts, free=counts, parked_s=seconds,
    not_before_s=st.floats(0.0, 100.0),
)  # fmt: skip
def test_admission_lengthens_no_deadline_and_starts_nothing_after_its_latest_start(
    lane: Lane, due_s: float, ready: int, free: int, parked_s: float, not_before_s: float
):
    contract = replace(CONTRACT, lane=lane, deadline_s=NOW_S + due_s, not_before_s=NOW_S + not_before_s)
    shown = tuple(LanePlan(each, ready=ready, parked=ready, parked_device_s=parked_s) for each in LANES)
    plan = PoolPlan("chat-small", workers=2, slots=8, free_slots=free, lanes=shown)
    situation = Situation({"chat-small": PoolView(plan)}, NOW_S, 0.5, 0.1)
    ask = Ask(contract, (Candidate(SMALL, 100, 50, 50, 50),), "here")
    decision = admit(ask, situation, AdmitParams())
    assert decision.contract.deadline_s == contract.deadline_s
    if decision.refusal is None:
        assert decision.latest_start_s < contract.deadline_s
        assert decision.fire_at_s <= max(NOW_S, contract.not_before_s, decision.latest_start_s)


@given(
    jobs=st.lists(st.tuples(seconds, st.floats(0.0, 50.0), seconds), min_size=1, max_size=8), rate=st.floats(0.0, 4.0)
)
def test_no_fire_time_lies_after_a_latest_start(jobs: list[tuple[float, float, float]], rate: float):
    dues = sorted(
        (fire.Due(f"j{i}", 0.0, NOW_S + start_s, cost) for i, (start_s, cost, _) in enumerate(jobs)),
        key=lambda due: due.latest_start_s,
    )
    for due, at_s in zip(dues, fire.stagger(dues, now_s=NOW_S, floor_rate=rate), strict=True):
        assert at_s <= max(NOW_S, due.latest_start_s)


# --- budgets -----------------------------------------------------------------------------------------

loads = st.builds(
    lambda decoding, priority, sent, strict, target_s: interference.Load(
        StepTimes(0.005, 1e-4, 1e-7, 2e-5, 512), target_s, 1.0, 32, decoding=decoding, context_tokens=300 * decoding,
        priority=priority, priority_decoding=min(priority, decoding), priority_context=100, recent=priority > 0,
        strict=strict, lower_prompt_tokens=sent,
    ),
    counts, counts, st.integers(0, 20_000), st.booleans(), st.sampled_from([0.004, 0.03, 0.1]),
)  # fmt: skip
acts = st.lists(st.tuples(loads, st.integers(1, 8_000), st.floats(0.0, 2.0)), max_size=12)


@given(acts=acts, in_slices=st.booleans(), bulk=st.booleans())
def test_the_interference_budget_owes_no_more_than_its_guard(
    acts: list[tuple[interference.Load, int, float]], in_slices: bool, bulk: bool
):
    """Whatever waits, passes and is charged: credit stays within the debt Q and the depth, and what is granted within
    what is left and the guard."""
    params, credit = interference.InterferenceParams(), 0.0
    for load, left, passed_s in acts:
        guard, depth = interference.guard_tokens(load, params), interference.depth_tokens(load, params)
        prompt = interference.Prompt(left, in_slices, bulk)
        needed = interference.credit_needed(prompt, load, params)
        credit = interference.refilled(credit, passed_s, load, 0.8, params, needed)
        assert credit >= -guard
        granted = interference.may_submit(prompt, credit, load, params)
        assert 0 <= granted <= left
        if in_slices and granted:
            assert load.lower_prompt_tokens + granted <= guard
            assert granted == left or granted % load.block_tokens == 0
        if granted and load.priority:
            assert credit > 0.0, "nothing goes on credit that is not there"
        credit = interference.charged(credit, granted, load, params)
        assert credit >= -guard
        assert interference.credit_rate(load, 0.8, params) > 0.0, "lower lanes always move"
        assert 0.02 <= interference.phi_max(load, 0.8, params) <= 1.0
        assert depth > 0


@given(p95=st.lists(st.none() | st.floats(0.0, 3.0), max_size=30), begin=st.floats(0.0, 1.0))
def test_theta_stays_within_its_bounds(p95: list[float | None], begin: float):
    params, theta = interference.InterferenceParams(), begin
    for measured in p95:
        theta = interference.next_theta(theta, measured, 10.0, params)
        assert params.theta_min <= theta <= params.theta_max


@given(acts=st.lists(st.tuples(st.sampled_from(["first", "spend", "refund"]), st.floats(0.0, 5.0)), max_size=40))
def test_a_retry_budget_never_goes_below_nothing(acts: list[tuple[str, float]]):
    params, budget, now_s = retry.RetryParams(), retry.RetryBudget(), NOW_S
    for act, passed_s in acts:
        now_s += passed_s
        if act == "spend":
            before = budget.left(now_s, params)
            spent = budget.spend(now_s, params)
            assert (spent is None) == (before < 1.0 - 1e-9)
            budget = spent or budget
        else:
            change = budget.first_attempt if act == "first" else budget.refund
            budget = change(now_s, params)
        assert budget.left(now_s, params) >= -1e-9


runs = st.builds(
    lambda i, lane, kv, made, yielded: Standing(
        f"j{i}", lane, began_s=0.0, kv_tokens=kv, prompt_tokens=100, generated=made, predicted=400,
        deadline_s=NOW_S + 1e4, preemptions=yielded,
    ),
    st.integers(0, 99), st.sampled_from(LANES), st.integers(0, 900), st.integers(0, 400), st.integers(0, 3),
)  # fmt: skip


@given(
    found=st.lists(runs, max_size=6, unique_by=lambda run: run.job_id),
    need=st.integers(1, 900),
    free=st.integers(0, 500),
)
def test_who_yields_makes_room_is_not_priority_and_did_not_yield_too_often(found: list[Standing], need: int, free: int):
    params = PreemptParams()
    victim = choose_victim(
        found, need_kv_tokens=need, free_kv_tokens=free, speeds=Speeds(1000.0, 50.0), now_s=NOW_S, params=params
    )
    if victim is not None:
        assert victim.lane is not Lane.PRIORITY
        assert victim.kv_tokens + free >= need
        assert victim.preemptions < params.preemptions_max
        assert victim.generated <= params.done_max * victim.predicted


# --- what is written about them ----------------------------------------------------------------------

TOLD = {
    "complexity": re.compile(r"\bO\(|Complexity|Cost:", re.IGNORECASE),
    "failure mode": re.compile(r"failure modes?", re.IGNORECASE),
    "units": re.compile(r"_s\b|second|token|blocks|jobs|\bms\b", re.IGNORECASE),
    "source": re.compile(r"policy\.md|DESIGN|measured|Source|arXiv|OSDI|TRAIL|Valve|reference", re.IGNORECASE),
}
NO_DECISIONS = {
    "asking": "values that a verdict is decided from",
    "contract": "arithmetic of a contract, in one line each",
    "grouping": "a hash",
    "tenants": "a cut of a list",
    "parked": "an index, with its costs at its methods",
    "demand": "a curve, whose resolution is its failure mode",
}


def modules() -> list[str]:
    return [info.name for info in pkgutil.iter_modules(laneway.policy.__path__)]


@pytest.mark.parametrize("name", [name for name in modules() if name not in NO_DECISIONS])
def test_a_module_of_decisions_says_in_what_units_where_from_at_what_cost_and_how_it_fails(name: str):
    """In its own docstring or in those of its public functions and classes: not every function repeats them."""
    module = importlib.import_module(f"laneway.policy.{name}")
    texts = [module.__doc__ or ""]
    for key, value in vars(module).items():
        own = getattr(value, "__module__", "") == module.__name__ and not key.startswith("_")
        if own and (inspect.isfunction(value) or inspect.isclass(value)):
            texts.append(value.__doc__ or "")
            texts += [method.__doc__ or "" for method in vars(value).values() if inspect.isfunction(method)]
    text = " ".join(" ".join(texts).split())
    missing = [what for what, pattern in TOLD.items() if not pattern.search(text)]
    assert not missing
