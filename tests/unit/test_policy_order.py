"""No decision depends on the order in which something happened to be listed: every public function of the policy that
takes a collection gives the same answer for it in another order, or is excused because the order is what it is told.

The list of functions is made from the modules, so that a new one has to be added here.
"""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given as given_all
from hypothesis import settings
from hypothesis import strategies as st
from msgspec.structs import replace

import laneway.policy
from laneway.core.catalogue import Capabilities, Catalogue, Pool
from laneway.core.fleet import (
    Demand,
    EtaFit,
    HomePlan,
    LanePlan,
    Plan,
    PoolPlan,
    StepTimes,
    WorkerLease,
    WorkerState,
)
from laneway.core.job import Contract
from laneway.core.lanes import LANES, PARKING_LANES, Lane
from laneway.core.subjects import ParkSubject
from laneway.policy import (
    affinity,
    calibration,
    desired,
    eta,
    fairness,
    headroom,
    interference,
    kv,
    parked,
    plan,
    preempt,
    providers,
    pull,
    quota,
    rate_headers,
    release,
    route,
    stealing,
    step_fit,
    step_prior,
    tenants,
)
from laneway.policy.admit import AdmitParams, Ask, Candidate, Situation, admit
from laneway.policy.tpots import Tpot, Tpots

NOW_S = 1_000_000.0
A_COLLECTION = re.compile(
    r"\b(Sequence|Iterable|Iterator|Collection|Container|Mapping|list|tuple|dict|set|frozenset)\b"
)
EXCUSED = {  # their order is what they are told
    "admit.admit": "tiers come cheapest first, and the first that will do is taken; all else it takes is tested below",
    "demand.demand_curve": "sums by time, earliest first",
    "desired.merged": "curves, each by time",
    "fire.stagger": "jobs by latest start; it gives a time for each, in their order",
    "holding.plan_holds": "sums by latest start, and a forecast by time",
    "quota.take": "wants, granted in their order",
    "route.digest_of": "zones are passed on as they are",
    "single_flight.may_join": "token ids",
    "step_prior.relative_errors": "an error for each step, in their order",
    "forecast.PoolForecast.coming": "gives a forecast by time",
    "calibration.Factor.add": "a span is two numbers",
}
COVERED: set[str] = set()


def given(**strategies: Any) -> Callable[[Any], Any]:
    """Few examples: each test has a small space, and there are many tests."""
    return lambda test: settings(max_examples=60)(given_all(**strategies)(test))


def covers(*names: str) -> Callable[[Any], Any]:
    """Says which functions a test shows it for."""
    COVERED.update(names)
    return lambda test: test


def some(element: st.SearchStrategy[Any], most: int = 6) -> st.SearchStrategy[tuple[list[Any], list[Any]]]:
    """The same things in two orders."""
    return st.lists(element, max_size=most).flatmap(lambda found: st.permutations(found).map(lambda o: (found, o)))


def mapping(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    return dict(pairs)


def keyed(keys: st.SearchStrategy[Any], values: st.SearchStrategy[Any], most: int = 6) -> st.SearchStrategy[Any]:
    """One mapping, filled in two orders."""
    pairs = st.lists(st.tuples(keys, values), max_size=most, unique_by=lambda pair: pair[0])
    return pairs.flatmap(lambda found: st.permutations(found).map(lambda other: (dict(found), dict(other))))


# --- the list ----------------------------------------------------------------------------------------


def public_functions() -> dict[str, Any]:
    """Functions, and methods of classes, by module.name."""
    found: dict[str, Any] = {}
    for info in pkgutil.iter_modules(laneway.policy.__path__):
        module = importlib.import_module(f"laneway.policy.{info.name}")
        for name, value in vars(module).items():
            if name.startswith("_") or getattr(value, "__module__", "") != module.__name__:
                continue
            if inspect.isfunction(value):
                found[f"{info.name}.{name}"] = value
            elif inspect.isclass(value):
                for key, method in vars(value).items():
                    if inspect.isfunction(method) and not key.startswith("_"):
                        found[f"{info.name}.{name}.{key}"] = method
    return found


def takes_a_collection(function: Any) -> bool:
    annotations = {k: v for k, v in inspect.get_annotations(function).items() if k != "return"}
    return any(A_COLLECTION.search(str(each)) for each in annotations.values())


def test_every_function_that_takes_a_collection_is_shown_to_mind_no_order_or_is_excused():
    taking = {name for name, function in public_functions().items() if takes_a_collection(function)}
    assert taking - COVERED - EXCUSED.keys() == set(), "shown nowhere, and not excused"
    everything = public_functions().keys()
    assert COVERED - everything == set(), "there is no such function"
    assert EXCUSED.keys() - everything == set(), "there is no such function"


# --- admission ---------------------------------------------------------------------------------------

SMALL = Pool(
    name="chat-small", model="chat", tier="small", engine="simulated", context_length=4096, vocabulary_size=1000,
    slots=4, workers=2, kv_tokens=16_384, tokenizer="bytes", capabilities=Capabilities(),
)  # fmt: skip
STRONG = replace(SMALL, name="chat-strong", tier="strong")
counts = st.integers(0, 40)
rates = st.sampled_from([0.0, 0.1, 0.3, 1 / 3, 7.7, 1000.1])
lanes = st.sampled_from(LANES)
ids = st.text("abcdef", min_size=1, max_size=4)


@st.composite
def pool_plans(draw: st.DrawFn, pool: str) -> PoolPlan:
    slots = draw(counts)
    shown = tuple(LanePlan(lane, ready=draw(counts), running=draw(counts), parked=draw(counts)) for lane in LANES)
    return PoolPlan(
        pool, workers=draw(st.integers(0, 5)), slots=slots, free_slots=draw(st.integers(0, slots)), lanes=shown
    )


@given(
    lane=lanes,
    small=pool_plans("chat-small"),
    strong=pool_plans("chat-strong"),
    refusing=st.booleans(),
    due_s=st.floats(0.1, 100.0),
)
def test_admission_minds_no_order_but_that_of_the_tiers(
    lane: Lane, small: PoolPlan, strong: PoolPlan, refusing: bool, due_s: float
):
    contract = Contract(lane, 1.0, 0.1, NOW_S + due_s, regions=("here", "there"))
    tiers = tuple(Candidate(pool, 100, 50, 50, 50) for pool in (SMALL, STRONG))
    views = [(each.pool, eta.PoolView(each)) for each in (small, strong)]
    both = ("chat-small", "chat-strong")
    limits = {Lane.PRIORITY: 50, Lane.BATCH: 5}
    later = [(name, eta.Load(jobs=1)) for name in both]

    def decide(flip: int) -> object:
        situation = Situation(
            mapping(views[::flip]), NOW_S, 0.5, 0.1, refusing=frozenset(both[::flip] if refusing else ()),
            redeeming=frozenset(both[::flip]), promised_later=mapping(later[::flip]),
        )  # fmt: skip
        params = AdmitParams(tenant_jobs_max=mapping(list(limits.items())[::flip]), ttft_default_s={})
        return admit(Ask(replace(contract, regions=contract.regions[::flip]), tiers, "here"), situation, params)

    one, other = decide(1), decide(-1)
    assert (one.verdict, one.placement, one.fire_at_s) == (other.verdict, other.placement, other.fire_at_s)  # type: ignore[attr-defined]


@covers("tenants.near_limit")
@given(some=keyed(st.tuples(ids, lanes), counts), limits=keyed(lanes, counts, 3))
def test_near_limits(some: Any, limits: Any):
    assert tenants.near_limit(some[0], limits[0]) == tenants.near_limit(some[1], limits[1])


@st.composite
def leases(draw: st.DrawFn) -> WorkerLease:
    slots = draw(st.integers(1, 8))
    return WorkerLease(
        worker_id=draw(ids), name=draw(st.sampled_from("xyz")), pool=draw(st.sampled_from(["chat-small", "other"])),
        engine="simulated", state=draw(st.sampled_from([WorkerState.READY, WorkerState.DRAINING])), slots=slots,
        running=draw(st.integers(0, slots)), kv_tokens=draw(counts), kv_tokens_used=draw(counts),
        prefill_tokens_per_s=draw(rates), decode_tokens_per_s=draw(rates), service_s=draw(rates),
        started_s=draw(st.integers(0, 3)), home=draw(st.sampled_from(["", "h0", "h1", "h2"])),
        step_times=StepTimes(draw(rates), draw(rates), draw(rates), draw(rates), 512),
        lower_tokens_per_s=draw(rates), theta=draw(st.sampled_from([0.0, 0.8])), lower_places=draw(counts),
        hot_prefixes=tuple(draw(st.lists(st.integers(0, 5), max_size=3, unique=True))),
    )  # fmt: skip


unique_leases = st.lists(leases(), max_size=6, unique_by=lambda lease: lease.worker_id)
shuffled_leases = unique_leases.flatmap(lambda found: st.permutations(found).map(lambda other: (found, other)))


@covers("eta.pool_view")
@given(leases=shuffled_leases)
def test_the_view_of_a_pool(leases: Any):
    one, other = (eta.pool_view("chat-small", None, each, eta.Load(), fresh=False) for each in leases)
    assert one == other


# --- homes -------------------------------------------------------------------------------------------

homes = st.sampled_from([f"h{i}" for i in range(6)])


@covers("affinity.choose_home", "affinity.room_of")
@given(key=ids, loads=keyed(homes, st.integers(0, 80).map(lambda n: n / 2)), last=st.sampled_from(["", "h0", "h5"]))
def test_the_home_of_a_job(key: str, loads: Any, last: str):
    assert affinity.choose_home(key, loads[0], last) == affinity.choose_home(key, loads[1], last)
    if loads[0]:
        assert affinity.room_of(loads[0]) == affinity.room_of(loads[1])


@st.composite
def home_plans(draw: st.DrawFn) -> HomePlan:
    return HomePlan(draw(homes), draw(st.sampled_from(["", "w1", "w2"])), ready=draw(counts), running=draw(counts))


@covers("affinity.served_loads", "affinity.home_again")
@given(
    data=st.data(),
    found=st.lists(
        home_plans(), max_size=6, unique_by=(lambda each: each.home, lambda each: each.worker_id or each.home)
    ),
)
def test_what_homes_may_be_chosen_from(data: st.DataObject, found: list[HomePlan]):
    other = data.draw(st.permutations(found))
    shown = {each.home: float(each.ready) for each in found}
    assert affinity.served_loads(found, shown.__getitem__) == affinity.served_loads(other, shown.__getitem__)
    assert affinity.home_again("key", found, "w1") == affinity.home_again("key", other, "w1")


@covers("affinity.assign_homes")
@given(homes=some(homes), leases=shuffled_leases, previous=keyed(homes, st.sampled_from("xyz")))
def test_who_serves_which_home(homes: Any, leases: Any, previous: Any):
    one = affinity.assign_homes(list(dict.fromkeys(homes[0])), leases[0], previous[0])
    other = affinity.assign_homes(list(dict.fromkeys(homes[1])), leases[1], previous[1])
    assert one == other


@covers("affinity.merge_hot")
@given(per_worker=some(st.lists(st.integers(0, 9), max_size=5, unique=True)))
def test_the_hottest_prefixes(per_worker: Any):
    assert affinity.merge_hot(per_worker[0], 4) == affinity.merge_hot(per_worker[1], 4)


@st.composite
def slots(draw: st.DrawFn) -> stealing.Slot:
    return stealing.Slot(
        draw(homes), draw(st.booleans()), draw(st.sampled_from([0.0, 0.1, 0.5])), served=draw(st.booleans()),
        ready=draw(st.integers(0, 2)), misses=draw(st.integers(0, 3)),
    )  # fmt: skip


@covers("stealing.next_turn", "stealing.look_in_s")
@given(data=st.data(), found=st.lists(slots(), max_size=6, unique_by=lambda slot: slot.home), fresh=st.booleans())
def test_which_slot_to_take_from(data: st.DataObject, found: list[stealing.Slot], fresh: bool):
    other = data.draw(st.permutations(found))
    one = stealing.next_turn(found, plan_fresh=fresh, patience_s=0.1)
    assert one == stealing.next_turn(other, plan_fresh=fresh, patience_s=0.1)
    assert stealing.look_in_s(found, patience_s=0.1) == stealing.look_in_s(other, patience_s=0.1)


# --- the worker --------------------------------------------------------------------------------------


@st.composite
def lane_views(draw: st.DrawFn) -> tuple[list[pull.LaneView], list[pull.LaneView]]:
    views = [
        pull.LaneView(
            lane, draw(st.booleans()), paused=draw(st.booleans()), due=draw(st.booleans()),
            staged_tokens=draw(st.none() | counts),
        )
        for lane in LANES
    ]  # fmt: skip
    return views, draw(st.permutations(views))


@covers("pull.next_step", "pull.lower_waits", "pull.short_of_room", "pull.started", "pull.floor_is_due")
@given(
    views=lane_views(),
    lane=lanes,
    slots=st.integers(0, 4),
    held=st.integers(0, 1),
    kv=counts,
    places=st.integers(0, 3),
    reserved=st.integers(0, 2),
    flags=st.tuples(st.booleans(), st.booleans()),
    runs=st.tuples(counts, counts),
)
def test_what_a_worker_does_next(
    views: Any, lane: Lane, slots: int, held: int, kv: int, places: int, reserved: int, flags: Any, runs: Any
):
    room = pull.Room(slots, kv, 10, places, places, reserved, 5, held, *flags)
    turns, params = pull.Turns(*runs), pull.PullParams()
    for decide in (
        lambda found: pull.next_step(found, room, turns, params),
        pull.lower_waits,
        lambda found: pull.short_of_room(found, room),
        lambda found: pull.started(turns, lane, 1, found),
        lambda found: pull.floor_is_due(found, turns, params, overloaded=flags[0]),
    ):
        assert decide(views[0]) == decide(views[1])


@st.composite
def standings(draw: st.DrawFn) -> preempt.Standing:
    return preempt.Standing(
        draw(ids), draw(lanes), began_s=draw(st.sampled_from([0.0, 1.0])), kv_tokens=draw(st.sampled_from([300, 600])),
        prompt_tokens=draw(st.sampled_from([100, 200])), generated=draw(st.sampled_from([0, 50])), predicted=500,
        deadline_s=NOW_S + 1000.0, kept=draw(st.booleans()),
    )  # fmt: skip


@covers("preempt.choose_victim")
@given(data=st.data(), found=st.lists(standings(), max_size=6, unique_by=lambda run: run.job_id))
def test_who_yields(data: st.DataObject, found: list[preempt.Standing]):
    def victim(runs: list[preempt.Standing]) -> object:
        return preempt.choose_victim(
            runs, need_kv_tokens=200, free_kv_tokens=0, speeds=preempt.Speeds(1000.0, 50.0), now_s=NOW_S,
            params=preempt.PreemptParams(),
        )  # fmt: skip

    assert victim(found) == victim(data.draw(st.permutations(found)))


growths = st.builds(kv.Growth, counts, counts, st.integers(1, 3))


@covers("kv.peak_blocks")
@given(found=some(growths), shared=counts)
def test_the_peak_of_the_kv(found: Any, shared: int):
    assert kv.peak_blocks(found[0], shared) == kv.peak_blocks(found[1], shared)


decoders = st.builds(
    interference.Decoder, st.integers(1, 300), counts, st.floats(0.0, 3.0), st.sampled_from([0.02, 0.1]), st.booleans()
)


@covers("interference.long_prompt")
@given(found=some(decoders), left=st.integers(1, 20_000), time_left_s=st.floats(-1.0, 5.0))
def test_how_a_long_prompt_is_submitted(found: Any, left: int, time_left_s: float):
    load = interference.Load(StepTimes(0.005, 1e-4, 1e-7, 2e-5, 512), 0.03, 1.0, decoding=4, context_tokens=2000)
    params = interference.InterferenceParams()
    one, other = (interference.long_prompt(left, time_left_s, 1, each, load, params, 0.8) for each in found)
    assert one == other


@covers("headroom.dispersion", "headroom.expected_jobs")
@given(found=some(counts, 20))
def test_what_is_kept_for_priority_depends_on_how_many_came_not_on_when(found: Any):
    for decide in (headroom.dispersion, lambda windows: headroom.expected_jobs(windows, 1.5, 2, 2.0, 2.33)):
        assert decide(found[0]) == decide(found[1])


@covers("step_prior.fit_steps")
@given(found=some(st.builds(step_fit.StepSeen, st.floats(0.001, 0.1), counts, counts, counts), 12))
def test_what_a_step_costs(found: Any):
    one, other = (step_prior.fit_steps(each, 512) for each in found)
    for name in ("base_s", "sequence_s", "context_token_s", "prefill_token_s"):
        assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-3, abs=1e-9), "but for rounding"


# --- the scheduler -----------------------------------------------------------------------------------


@st.composite
def parks(draw: st.DrawFn) -> ParkSubject:
    due_ms = int(NOW_S * 1000) + draw(st.sampled_from([-5_000, 1_000, 12_000, 60_000, 60_001, 3_600_000]))
    return ParkSubject(
        "local", draw(st.sampled_from(PARKING_LANES)), "p", draw(st.sampled_from(["acme", "bolt", "cog"])),
        draw(st.sampled_from([0, int(NOW_S * 1000) + 500_000])), due_ms, draw(st.sampled_from([100, 300])),
        draw(st.sampled_from(["g", "h"])), draw(ids),
    )  # fmt: skip


shuffled_parks = st.lists(parks(), max_size=10, unique_by=lambda park: park.job).flatmap(
    lambda found: st.permutations(found).map(lambda other: (found, other))
)


def index_of(found: list[ParkSubject], *, singly: bool = False) -> parked.ParkIndex:
    index = parked.ParkIndex([] if singly else found, now_ms=int(NOW_S * 1000))
    for park in found if singly else ():
        index.add(park, now_ms=int(NOW_S * 1000))
    return index


@covers(
    "parked.ParkIndex.add_all",
    "parked.ParkIndex.demand",
    "parked.ParkIndex.by_due",
    "release.choose",
    "release.why_held",
)
@given(
    found=shuffled_parks,
    idle=st.integers(0, 4),
    queue=st.integers(0, 4),
    paused=st.sampled_from(PARKING_LANES) | st.none(),
    some_jobs=st.lists(ids, max_size=4),
    busy=some(st.sampled_from(["g", "h"]), 2),
)
def test_what_is_released_depends_on_no_order_of_arrival_or_list(
    found: Any, idle: int, queue: int, paused: Lane | None, some_jobs: list[str], busy: Any
):
    one, other = index_of(found[0]), index_of(found[1], singly=True)
    room = release.Room("p", idle, queue, 1.0, 2)
    for lanes in (PARKING_LANES, PARKING_LANES[::-1]):
        assert list(one.by_due("p", lanes)) == list(other.by_due("p", PARKING_LANES))
        assert one.demand("p", lanes) == other.demand("p", PARKING_LANES)
    stopped = frozenset([paused] if paused else [])

    def chosen(index: parked.ParkIndex, flip: int) -> list[release.Release]:
        return release.choose(
            index,
            room,
            fairness.Ledger(),
            now_s=NOW_S,
            paused=stopped,
            coalesced=some_jobs[::flip],
            busy=busy[flip > 0],
        )

    assert chosen(one, 1) == chosen(other, -1)
    for park in found[0]:
        reasons = {
            release.why_held(park, room, awake=True, now_s=NOW_S, paused=frozenset(each))
            for each in (stopped, tuple(stopped)[::-1])
        }
        assert len(reasons) == 1


@covers("fairness.Counters.meet")
@given(active=some(st.sampled_from(["acme", "bolt", "cog"])), charges=keyed(ids, st.floats(0.0, 9.0)))
def test_tenants_meet_in_any_order(active: Any, charges: Any):
    levels = []
    for met, charged in zip(active, charges, strict=True):
        counters = fairness.Counters()
        counters.meet(list(charged))
        for tenant, cost in charged.items():
            counters.charge(tenant, cost)
        counters.meet(met)
        levels.append([counters.of(tenant) for tenant in ("acme", "bolt", "cog", *sorted(charged))])
    assert levels[0] == levels[1]


@covers("release.room_of")
@given(leases=shuffled_leases, shown=pool_plans("chat-small"))
def test_the_room_of_a_pool(leases: Any, shown: PoolPlan):
    assert release.room_of(shown, leases=leases[0]) == release.room_of(shown, leases=leases[1])


@covers("plan.make_plan", "desired.desired")
@given(
    leases=shuffled_leases,
    depths=keyed(st.tuples(st.sampled_from(["chat-small", "other"]), lanes), st.builds(plan.Depth, counts, counts)),
    held=keyed(st.tuples(st.just("chat-small"), lanes), st.builds(plan.Parked, counts, rates)),
    waits=keyed(st.tuples(st.just("chat-small"), lanes), rates),
)
def test_the_plan(leases: Any, depths: Any, held: Any, waits: Any):
    catalogue = Catalogue((SMALL,))

    def made(i: int) -> Plan:
        snapshot = plan.Snapshot(leases=leases[i], depths=depths[i], parked=held[i], oldest_wait_s=waits[i])
        return plan.make_plan(snapshot, catalogue, region="local", epoch=1, version=1, now_s=NOW_S, valid_s=1.0)

    assert made(0) == made(1)


lane_plans = st.builds(LanePlan, lanes, ready=counts, running=counts, parked=counts)


@given(found=st.lists(lane_plans, max_size=3, unique_by=lambda lane: lane.lane), data=st.data())
def test_how_many_workers_are_wanted_whatever_the_order_of_the_lanes(found: list[LanePlan], data: st.DataObject):
    due = (Demand(NOW_S + 60.0, 5.0), Demand(NOW_S + 90.0, 9.0))
    one = desired.desired(SMALL, desired.Load(lanes=found, deferrable=due), NOW_S)
    other = desired.desired(SMALL, desired.Load(lanes=data.draw(st.permutations(found)), deferrable=due), NOW_S)
    assert one == other
    curve = (Demand(NOW_S + 70.0, 4.0),)
    assert desired.merged(due, curve) == desired.merged(curve, due)


@covers("calibration.with_fits")
@given(
    shown=pool_plans("chat-small"),
    fits=keyed(st.tuples(st.just("chat-small"), lanes), st.just((EtaFit(), EtaFit(2.0, 3.0, 9)))),
)
def test_what_was_learned_of_verdicts(shown: PoolPlan, fits: Mapping[Any, Any]):
    found = Plan("local", 1, 1, NOW_S, NOW_S + 1.0, pools=(shown,))
    assert calibration.with_fits(found, fits[0]) == calibration.with_fits(found, fits[1])


@st.composite
def sightings(draw: st.DrawFn) -> route.Sighting:
    models = tuple(
        route.ModelDigest("chat", "small", draw(st.integers(0, 3)), draw(st.integers(0, 2)), draw(rates), draw(rates))
        for _ in range(draw(st.integers(0, 1)))
    )
    digest = route.RegionDigest(
        draw(ids), models=models, price_factor=draw(st.sampled_from([1.0, 1.1])), draining=draw(st.booleans())
    )
    return route.Sighting(digest, draw(rates), draw(st.booleans()))


@covers("route.route")
@given(
    data=st.data(),
    lane=lanes,
    found=st.lists(sightings(), max_size=5, unique_by=lambda sighting: sighting.digest.region),
)
def test_where_a_request_goes(data: st.DataObject, lane: Lane, found: list[route.Sighting]):
    other = data.draw(st.permutations(found))
    ask = route.Ask("chat", lane)
    assert route.route(ask, found, home="a") == route.route(ask, other, home="a")


# --- rented providers --------------------------------------------------------------------------------

waits = st.sampled_from([0.0, 0.5, 3.0, math.inf])
offers = st.builds(providers.Offer, st.sampled_from("ab"), st.sampled_from([0.0, 1.0, 2.0]), waits, waits)
told = st.builds(
    rate_headers.Told,
    st.sampled_from(["requests", "tokens"]),
    st.just(10.0),
    st.sampled_from([0.0, 1.0, 2.0]),
    st.sampled_from([NOW_S, NOW_S + 1.0]),
    st.just(NOW_S + 9.0),
)


@covers("providers.choose")
@given(both=some(offers), deadline_in_s=st.sampled_from([1.0, 5.0, math.inf]))
def test_a_provider_is_chosen_in_any_order(
    both: tuple[list[providers.Offer], list[providers.Offer]], deadline_in_s: float
):
    one, other = both
    assert providers.choose(one, deadline_in_s) == providers.choose(other, deadline_in_s)


@covers("quota.told")
@given(both=some(told))
def test_a_providers_counts_are_taken_in_any_order(both: tuple[list[rate_headers.Told], list[rate_headers.Told]]):
    one, other = both
    assert quota.told(quota.QuotaRecord(), one) == quota.told(quota.QuotaRecord(), other)


HEADERS = [
    "retry-after", "retry-after-ms", "x-ratelimit-limit-requests", "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens",
]  # fmt: skip


@covers("rate_headers.retry_after_s", "rate_headers.told_of")
@given(both=keyed(st.sampled_from(HEADERS), st.sampled_from(["1", "20", "3s", "soon"])))
def test_headers_say_the_same_in_any_order(both: tuple[dict[str, str], dict[str, str]]):
    one, other = both
    assert rate_headers.retry_after_s(one, NOW_S) == rate_headers.retry_after_s(other, NOW_S)
    assert rate_headers.told_of(one, NOW_S) == rate_headers.told_of(other, NOW_S)


@covers("tpots.Tpots.ratio_p95")
@given(runs=some(st.builds(Tpot, st.just(1.0), st.floats(0.001, 1.0), st.floats(0.001, 1.0))))
def test_what_tokens_took_is_asked_of_runs_in_any_order(runs: tuple[list[Tpot], list[Tpot]]):
    one, other = runs
    assert Tpots().ratio_p95(2.0, 10.0, one) == Tpots().ratio_p95(2.0, 10.0, other)
