"""The rule of each baseline, as seen in what it starts, when and where."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from laneway.core.lanes import Lane
from laneway.simulator.outcomes import End
from laneway.simulator.rivals.gradient import GradientParams, Limit
from laneway.simulator.trace import Prefixes, Trace
from tests.unit.simulator.test_rivals import Play
from tests.unit.simulator.test_world import BATCH, DEFERRABLE, PRIORITY, ends, trace_of, traffic


def crowd(priority_from_s: float = 2.0, batch: int = 100) -> Trace:
    """Batch that fills every slot for long, and 60 priority requests that come into it."""
    rows = [(0.0, BATCH, 300, 1500, math.inf, math.inf, 3600.0)] * batch
    rows += [(priority_from_s + 0.02 * n, PRIORITY, 300, 60, 0.5, 0.03, 60.0) for n in range(60)]
    return trace_of(rows)


def priority_ttft_s(play: Play) -> np.ndarray[Any, np.dtype[np.float64]]:
    return play.run.outcomes.ttft_s[play.trace.of_lane(Lane.PRIORITY)]


# --- FIFO and strict priority ----------------------------------------------------------------------------


def test_fifo_starts_in_the_order_of_arrival_and_wastes_no_slot() -> None:
    wasted: list[float] = []

    def watch(play: Play) -> None:
        if sum(play.rival.order.counts()) and any(station.slots_free for station in play.rival.stations()):
            wasted.append(play.rival.world.now_s)

    play = Play("fifo", traffic(2, priority_per_s=40.0, span_s=15.0), pending_tokens=0, watch=watch)
    assert play.order == list(range(len(play.trace)))
    assert not wasted


def test_a_lower_lane_starts_only_when_no_higher_one_waits() -> None:
    above: list[int] = []

    def watch(play: Play) -> None:
        counts = play.rival.order.counts()
        for _, ticket, _ in play.starts[len(above) :]:
            above.append(sum(counts[: ticket.lane]))

    play = Play("strict", traffic(2, priority_per_s=60.0, span_s=10.0, batch=200), watch=watch)
    assert len(above) == len(play.trace)
    assert not any(above)
    assert "preemptions" not in play.run.counts
    assert priority_ttft_s(play).mean() < priority_ttft_s(Play("fifo", play.trace)).mean() / 2.0


def test_lower_lanes_yield_when_there_is_no_room_and_go_on_where_they_were() -> None:
    trace = crowd()
    play, strict = Play("strict-preempt", trace), Play("strict", trace)
    batch = trace.of_lane(Lane.BATCH)
    assert 0 < play.run.counts["preemptions"] <= 60
    assert ends(play.run) == {End.DONE: len(trace)}
    assert np.array_equal(play.run.outcomes.tokens, trace.output_tokens)
    assert play.run.outcomes.recomputed_tokens[batch].sum() > 0
    assert not play.run.outcomes.recomputed_tokens[~batch].any()
    assert np.all(priority_ttft_s(play) <= 0.5)
    assert np.any(priority_ttft_s(strict) > 0.5)


def test_nobody_yields_while_there_is_room() -> None:
    play = Play("strict-preempt", crowd(batch=20), slots=64)
    assert "preemptions" not in play.run.counts


def test_those_yield_of_whom_least_was_computed() -> None:
    rows = [(at_s, BATCH, 300, 3000, math.inf, math.inf, 3600.0) for at_s in (0.0, 3.0)]
    rows += [(4.0, PRIORITY, 300, 20, 0.5, 0.03, 60.0)]
    play = Play("strict-preempt", trace_of(rows), 2, slots=1)
    assert play.run.outcomes.recomputed_tokens.tolist()[0] == 0
    assert 300 < play.run.outcomes.recomputed_tokens[1] < 700


def test_who_yields_after_its_deadline_is_not_computed_again() -> None:
    rows = [(0.0, BATCH, 300, 2000, math.inf, math.inf, 2.0), (4.0, PRIORITY, 300, 20, 0.5, 0.03, 60.0)]
    play = Play("strict-preempt", trace_of(rows), 1, slots=1)
    assert [End(end) for end in play.run.outcomes.end] == [End.EXPIRED, End.DONE]
    assert len(play.starts) == 2


def test_nobody_yields_before_the_other_has_waited() -> None:
    at_once, later = Play("strict-preempt", crowd()), Play("strict-preempt", crowd(), after_s=0.2)
    assert 0 < later.run.counts["preemptions"] < at_once.run.counts["preemptions"]
    waited_s = [at_s - ticket.came_s for at_s, ticket, _ in later.starts if ticket.lane == PRIORITY]
    assert 0.2 <= max(waited_s) < 0.5


def test_a_request_yields_so_many_times_and_no_more() -> None:
    rows = [(0.0, BATCH, 300, 4000, math.inf, math.inf, 3600.0)] * 2
    rows += [(1.0 + n, PRIORITY, 300, 20, 0.5, 0.03, 60.0) for n in range(20)]
    trace = trace_of(rows)
    for yields in (1, 3):
        assert Play("strict-preempt", trace, 1, slots=2, yields=yields).run.counts["preemptions"] == 2 * yields
    assert Play("strict-preempt", trace, 1, slots=2, yields=0).run.counts["preemptions"] > 6


# --- inside the engine, reserved slots --------------------------------------------------------------------


@pytest.mark.parametrize("by_budget", [True, False])
def test_engines_start_priority_first_of_all_that_wait_in_them(by_budget: bool) -> None:
    trace = crowd()
    play = Play("in-engine", trace, by_budget=by_budget)
    first_s = play.run.outcomes.first_s
    batch_s = first_s[trace.lane == BATCH]
    for index in np.flatnonzero(trace.lane == PRIORITY):
        passed = (batch_s > trace.arrival_s[index] + 0.3) & (batch_s < first_s[index])
        assert not passed.any(), "no batch that was not in the batch already goes first"
    ranks = {ticket.lane: play.rival.engine_priority(ticket) for _, ticket, _ in play.starts}
    assert ranks == {PRIORITY: 0.0, BATCH: -2.0}


def test_an_engine_without_a_budget_gets_everything_at_once() -> None:
    trace = crowd()
    play = Play("in-engine", trace, by_budget=False)
    assert play.order == list(range(len(trace)))
    assert all(at_s == ticket.asked_s for at_s, ticket, _ in play.starts)


def test_a_request_starts_where_it_was_sent_to_though_another_engine_would_have_room_sooner() -> None:
    """Half of them are bound to the engine whose first answer turns out to be long, while the other one is idle."""
    rows = [
        (0.0, PRIORITY, 100, 3000, math.inf, math.inf, 600.0),
        (0.001, PRIORITY, 200, 20, math.inf, math.inf, 600.0),
    ]
    rows += [(0.002, PRIORITY, 100, 20, math.inf, math.inf, 600.0)] * 4
    trace = trace_of(rows, max_tokens=np.full(6, 3000))
    bound, pulled = Play("in-engine", trace, slots=1), Play("strict", trace, slots=1)
    assert len({station.worker.number for _, _, station in bound.starts[2:]}) == 2
    assert len({station.worker.number for _, _, station in pulled.starts[2:]}) == 1
    assert bound.run.outcomes.first_s.max() > 3.0 * pulled.run.outcomes.first_s.max()


def test_reserved_slots_are_left_free_by_lower_lanes_and_taken_by_priority() -> None:
    lower: list[int] = []

    def watch(play: Play) -> None:
        lower.append(sum(play.rival.inflight[1:]))

    play = Play("reserved", crowd(), slots_kept=0.25, kv_kept=0.0, watch=watch)
    assert max(lower) == 64 - 16
    assert np.all(priority_ttft_s(play) < 0.5)
    assert ends(play.run) == {End.DONE: len(play.trace)}


def test_priority_uses_its_reservation_up_before_it_takes_from_others() -> None:
    beyond: list[int] = []

    def watch(play: Play) -> None:
        priority, lower = play.rival.inflight[0], sum(play.rival.inflight[1:])
        beyond.append(lower + max(priority, 16) - 64)

    Play("reserved", traffic(3, priority_per_s=40.0, span_s=10.0, batch=200), slots_kept=0.25, kv_kept=0.0, watch=watch)
    assert max(beyond) <= 0


def test_kv_of_a_reservation_is_left_free_too() -> None:
    lower: list[float] = []

    def watch(play: Play) -> None:
        for station in play.rival.stations():
            blocks = sum(ticket.mind.blocks for ticket in station.running if ticket.lane)
            lower.append(blocks / station.blocks)

    Play("reserved", crowd(), kv_kept=0.4, slots_kept=0.0, watch=watch, kv_ceiling=0.1)
    assert 0.5 < max(lower) <= 0.6


def test_a_reservation_takes_slots_only_of_those_without_a_token() -> None:
    rows = [(0.0, BATCH, 6000, 50, math.inf, math.inf, 3600.0)] * 20
    rows += [(0.3, PRIORITY, 100, 20, 0.5, 0.03, 60.0)] * 4
    values: dict[str, Any] = {"slots_kept": 0.0, "kv_kept": 0.0, "slots": 8, "pending_tokens": 0}
    play = Play("reserved", trace_of(rows), 1, preempts=True, **values)
    assert play.run.counts["preemptions"] == 4
    assert not play.run.outcomes.recomputed_tokens.any()
    assert "preemptions" not in Play("reserved", trace_of(rows), 1, **values).run.counts
    answering = [(0.0, BATCH, 100, 500, math.inf, math.inf, 3600.0)] * 8 + rows[20:]
    assert "preemptions" not in Play("reserved", trace_of(answering), 1, preempts=True, **values).run.counts


# --- deadlines -------------------------------------------------------------------------------------------


def test_edf_starts_by_deadline_whatever_the_lane() -> None:
    random = np.random.default_rng(1)
    rows = [(0.0, PRIORITY, 100, 300, math.inf, math.inf, 600.0)]
    lanes, deadlines = random.integers(3, size=40).tolist(), random.uniform(50, 500, size=40).tolist()
    rows += [(0.1, lane, 100, 20, math.inf, math.inf, due) for lane, due in zip(lanes, deadlines, strict=True)]
    play = Play("edf", trace_of(rows), 1, slots=1)
    due = [play.trace.deadline_s[index] for index in play.order[1:]]
    assert due == sorted(due)


def test_edf_holds_a_promised_first_token_to_be_due_and_relegates_one_that_is_missed() -> None:
    rows = [(0.0, BATCH, 100, 400, math.inf, math.inf, 600.0)]
    rows += [(0.1, BATCH, 100, 20, math.inf, math.inf, 20.0), (0.2, PRIORITY, 100, 20, 0.5, 0.03, 60.0)]
    trace = trace_of(rows)
    assert trace.output_tokens[0] * 0.004 > 0.7, "the promise is missed before the slot is free"
    assert Play("edf", trace, 1, slots=1, relegates=True).order == [0, 1, 2]
    assert Play("edf", trace, 1, slots=1, relegates=False).order == [0, 2, 1]


def test_least_laxity_starts_first_what_needs_longest_of_two_that_are_due_together() -> None:
    rows = [(0.0, BATCH, 100, 100, math.inf, math.inf, 600.0)]
    rows += [(0.1, BATCH, 100, 50, math.inf, math.inf, 60.0), (0.1, BATCH, 12_000, 50, math.inf, math.inf, 60.01)]
    trace = trace_of(rows)
    assert Play("least-laxity", trace, 1, slots=1).order == [0, 2, 1]
    assert Play("edf", trace, 1, slots=1).order == [0, 1, 2]


@pytest.mark.parametrize("name", ["edf", "least-laxity"])
def test_promised_first_tokens_may_make_those_yield_that_are_due_last(name: str) -> None:
    play = Play(name, crowd(), urgent_s=0.3)
    assert 0 < play.run.counts["preemptions"] <= 60
    assert np.all(priority_ttft_s(play) <= 0.5)
    assert ends(play.run) == {End.DONE: len(play.trace)}
    assert "preemptions" not in Play(name, crowd(), relegates=False).run.counts
    sooner = [(0.0, BATCH, 300, 3000, math.inf, math.inf, 1.2), (1.0, PRIORITY, 300, 20, 0.5, 0.03, 60.0)]
    assert "preemptions" not in Play(name, trace_of(sooner), 1, slots=1, urgent_s=9.0).run.counts


# --- the gate and the feed ---------------------------------------------------------------------------------


def test_the_gate_hands_on_below_its_ceilings_only() -> None:
    seen: list[tuple[int, float]] = []

    def watch(play: Play) -> None:
        seen.extend((ticket.lane, play.rival.saturation) for _, ticket, _ in play.starts[len(seen) :])

    trace = traffic(2, priority_per_s=40.0, span_s=15.0, batch=600)
    play = Play("gate", trace, deferrable_ceiling=0.25, batch_ceiling=0.25, ceiling=1.0, kv_share=0.1, watch=watch)
    assert len(seen) == len(trace)
    assert max(saturation for lane, saturation in seen if lane) < 0.25
    assert 0.25 < max(saturation for lane, saturation in seen if not lane) < 1.0
    assert ends(play.run) == {End.DONE: len(trace)}


def test_a_gate_that_looks_rarely_hands_on_more_than_engines_have_room_for() -> None:
    """The herd of stale telemetry; the detector that counts has none."""
    queued = {0: [0], 16: [0]}

    for inflight, most in queued.items():

        def watch(play: Play, most: list[int] = most) -> None:
            most[0] = max(most[0], *(worker.engine.queued for worker in play.rival.world.workers))

        Play("gate", crowd(), inflight=inflight, watch=watch)
    assert queued[0][0] > 5
    assert queued[16][0] <= 16


def test_the_gate_counts_requests_in_flight_and_keeps_lower_bands_from_the_rest() -> None:
    most = [0, 0]

    def watch(play: Play) -> None:
        most[0] = max(most[0], sum(play.rival.inflight))
        if play.starts and play.starts[-1][1].lane:
            most[1] = max(most[1], sum(play.rival.inflight))

    Play("gate", crowd(), inflight=20, batch_ceiling=0.5, watch=watch)
    assert most == [40, 20]


def test_a_band_that_is_held_holds_those_below_whatever_their_ceilings() -> None:
    passed: list[int] = []
    seen = [0]

    def watch(play: Play) -> None:
        started, seen[0] = play.starts[seen[0] :], len(play.starts)
        if play.rival.order.counts()[PRIORITY]:
            passed.extend(ticket.index for _, ticket, _ in started if ticket.lane)

    play = Play("gate", crowd(), inflight=20, ceiling=0.5, batch_ceiling=1.0, watch=watch)
    assert not passed
    assert ends(play.run) == {End.DONE: len(play.trace)}


def test_tenants_of_a_band_take_turns_at_the_gate() -> None:
    rows = [(0.0, BATCH, 500, 50, math.inf, math.inf, 3600.0)] * 60
    trace = trace_of(rows)
    tenants = np.where(np.arange(60) < 50, 0, 1)
    play = Play("gate", replace(trace, tenant=tenants, tenants=("much", "little")), 1, inflight=4)
    began = [play.trace.tenant[index] for index in play.order[4:24]]
    assert sum(began) == 10


def test_slow_requests_are_fed_a_few_at_a_time_while_kv_is_little_used() -> None:
    fed: list[tuple[float, int]] = []
    lower = [0]

    def watch(play: Play) -> None:
        for _, ticket, station in play.starts[lower[0] :]:
            lower[0] += 1
            if ticket.lane:
                engine = station.worker.engine
                fed.append((engine.kv_tokens_used / engine.kv_tokens, sum(station.waiting[1:])))

    trace = traffic(2, priority_per_s=30.0, span_s=10.0, batch=300)
    trace = replace(trace, max_tokens=trace.output_tokens)
    play = Play("feed", trace, kv_share=0.03, watch=watch)
    assert all(used < 0.6 for used, _ in fed)
    assert max(waiting for _, waiting in fed) == 2
    assert max(waiting for used, waiting in fed if used >= 0.5) == 1
    assert ends(play.run) == {End.DONE: len(trace)}
    assert all(ticket.lane for at_s, ticket, _ in play.starts if at_s > ticket.came_s), "fast ones never wait"


def test_a_slow_request_that_has_little_time_left_is_fast() -> None:
    rows = [(0.0, PRIORITY, 2200, 1500, math.inf, math.inf, 600.0)] * 20
    rows += [(7.0, DEFERRABLE, 500, 50, math.inf, math.inf, 3.0)] * 3
    trace = trace_of(rows)
    values: dict[str, Any] = {"kv_share": 0.08, "slots": 64}
    patient = Play("feed", trace, 1, **values)
    hurried = Play("feed", trace, 1, urgent_s=6.0, **values)
    assert hurried.run.counts["hurried"] == 3
    assert {hurried.rival.engine_priority(ticket) for _, ticket, _ in hurried.starts} == {1.0}
    assert {patient.rival.engine_priority(ticket) for _, ticket, _ in patient.starts} == {1.0}, "none was fed"
    lower = trace.lane == DEFERRABLE
    assert hurried.run.outcomes.end_s[lower].max() < 10.0
    assert ends(patient.run, DEFERRABLE) == {End.EXPIRED: 3}


# --- fairness ----------------------------------------------------------------------------------------------


def two_tenants() -> Trace:
    """One asks for four times as much as the other, and both for more than there is, for as long as they ask."""
    rows = [(0.01 * n, PRIORITY, 1500, 100, math.inf, math.inf, 600.0) for n in range(900)]
    trace = trace_of(rows, max_tokens=np.full(900, 100))
    return replace(trace, tenant=np.where(np.arange(900) % 5 == 0, 1, 0), tenants=("much", "little"))


@pytest.mark.parametrize(("name", "least"), [("vtc", 0.85), ("dlpm", 0.85)])
def test_backlogged_tenants_get_the_same_however_much_they_ask_for(name: str, least: float) -> None:
    def served(name: str) -> list[int]:
        play = Play(name, two_tenants(), 1, slots=16)
        began = [ticket.tenant for at_s, ticket, _ in play.starts if 2.0 <= at_s <= 8.0]
        return [began.count(0), began.count(1)]

    fair, unfair = served(name), served("fifo")
    assert min(fair) / max(fair) > least
    assert min(unfair) / max(unfair) < 0.35


def test_long_answers_count_for_what_they_were() -> None:
    """The lane's mean is charged at first; what came is put right, so that tokens are shared and not requests."""
    rows = [(0.005 * n, PRIORITY, 200, 400 if n % 2 else 50, math.inf, math.inf, 600.0) for n in range(1200)]
    trace = trace_of(rows, max_tokens=np.full(1200, 400), tenant=np.arange(1200) % 2, tenants=("short", "long"))
    play = Play("vtc", trace, 1, slots=8)
    began = [ticket.tenant for at_s, ticket, _ in play.starts if at_s < 6.0]
    assert began.count(0) > 2.5 * began.count(1)


def test_a_tenant_that_was_away_does_not_catch_up_on_what_it_did_not_ask_for() -> None:
    rows = [(0.02 * n, PRIORITY, 1500, 100, math.inf, math.inf, 600.0) for n in range(600)]
    trace = trace_of(rows, max_tokens=np.full(600, 100))
    late = np.where((np.arange(600) >= 300) & (np.arange(600) % 2 == 0), 1, 0)
    play = Play("vtc", replace(trace, tenant=late, tenants=("here", "late")), 1, slots=8)
    began = [ticket.tenant for at_s, ticket, _ in play.starts if at_s >= 6.5][:60]
    assert 25 <= began.count(1) <= 35


def test_among_tenants_with_something_left_the_longest_cached_prefix_goes_first() -> None:
    rows = [(0.0, PRIORITY, 3200, 200, math.inf, math.inf, 600.0)]
    rows += [(0.5, PRIORITY, 3200, 20, math.inf, math.inf, 600.0)] * 3
    ids = np.concatenate([np.arange(100) + start for start in (0, 5000, 9000, 0)])
    trace = trace_of(rows, prefixes=Prefixes(32, ids, np.arange(5) * 100), tenant=np.arange(4), tenants=tuple("abcd"))
    assert Play("dlpm", trace, 1, slots=1, quantum=1e6).order == [0, 3, 1, 2]
    assert Play("vtc", trace, 1, slots=1).order == [0, 1, 2, 3]


# --- the limit -----------------------------------------------------------------------------------------------


def test_the_door_refuses_priority_beyond_the_limit_and_nobody_else() -> None:
    over: list[float] = []

    def watch(play: Play) -> None:
        over.append(len(play.rival.inside) - play.rival.limit.value)

    trace = traffic(4, priority_per_s=120.0, span_s=15.0, batch=50)
    play = Play("gradient", trace, learns=False, tolerance=3.0, least=4, watch=watch)
    assert ends(play.run, PRIORITY)[End.REFUSED] > 50
    assert ends(play.run, BATCH) == {End.DONE: 50}
    assert play.run.outcomes.retries.sum() > 100
    assert not play.rival.inside
    assert np.median(priority_ttft_s(play)[~np.isnan(priority_ttft_s(play))]) < np.median(
        priority_ttft_s(Play("strict", trace))
    )


@pytest.mark.parametrize("learns", [True, False])
def test_the_limit_falls_with_latency_down_to_its_least_and_grows_back_to_its_most(learns: bool) -> None:
    limit = Limit(2, GradientParams(learns=learns, least=8, most=64, slots=32, samples=1))
    now_s, values = 0.0, [limit.value]

    def windows(latency: float, count: int) -> float:
        nonlocal now_s
        for _ in range(count):
            now_s += 1.0
            limit.sample(latency, int(limit.value), now_s)
            values.append(limit.value)
        return limit.value

    assert values == [64.0]
    assert windows(1.0, 60) == 128.0
    slow = windows(20.0, 60)
    assert slow == pytest.approx(16.0, rel=0.1)
    assert windows(1.0, 120) == 128.0
    assert all(16.0 <= value <= 128.0 for value in values)


def test_the_limit_does_not_grow_while_less_than_half_of_it_is_used() -> None:
    limit = Limit(1, GradientParams(samples=1, slots=32))
    for second in range(1, 20):
        limit.sample(1.0, 15, float(second))
    assert limit.value == 32.0
