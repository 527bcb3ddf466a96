"""What holds for each of the baselines: nothing is lost, ledgers end empty, one seed gives one run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from laneway.runtime.engine_profile import load_profile
from laneway.simulator.outcomes import End, Run
from laneway.simulator.rivals import RIVALS
from laneway.simulator.rivals.base import Rival
from laneway.simulator.rivals.params import Common
from laneway.simulator.rivals.prefixes import SentPrefixes
from laneway.simulator.rivals.station import Station
from laneway.simulator.setup import EngineSize, Setup
from laneway.simulator.ticket import Ticket
from laneway.simulator.trace import Prefixes, Trace
from laneway.simulator.world import FleetParams, World
from tests.unit.simulator.test_world import BATCH, PRIORITY, ends, trace_of, traffic

each_rival = pytest.mark.parametrize("name", RIVALS)
PUSHING = ("gate",)  # an engine gets what it has no room for
PUSHES_PRIORITY = (*PUSHING, "feed")


class Play:
    """One rival on one trace. `watch` is called after each time it looked for what may start."""

    def __init__(
        self, name: str, trace: Trace, workers: int = 2, *, seed: int = 0, deaths: Any = (), kv_share: float = 1.0,
        paged: bool = False, watch: Callable[[Play], None] | None = None, **values: Any,
    ) -> None:  # fmt: skip
        entry = RIVALS[name]
        chosen: dict[str, Any] = {"slots": 32, **values}
        params = entry.params(**chosen)
        setup = Setup(load_profile("h100-8b-fp8"), params.size(EngineSize(kv_share=kv_share, paged=paged)), workers)
        self.trace = trace
        self.rival: Any = entry.make(setup.times, params)
        self.starts: list[tuple[float, Ticket, Station]] = []
        self.backlogs: list[int] = []  # prompt tokens that each of these found in its engine
        self._watch = watch
        self._spy()
        fleet = FleetParams(workers=workers, boot_s=20.0)
        self.world = World(trace, self.rival, fleet, setup.engine, setup.times, seed=seed, deaths=deaths)
        self.run: Run = self.world.run()

    def _spy(self) -> None:
        rival, started, dispatch = self.rival, self.rival.started, self.rival.dispatch

        def spied(ticket: Ticket, station: Station) -> None:
            self.starts.append((rival.world.now_s, ticket, station))
            self.backlogs.append(sum(station.prefill_tokens) - ticket.mind.prefill)
            started(ticket, station)

        def watched() -> None:
            dispatch()
            if self._watch is not None:
                self._watch(self)

        rival.started, rival.dispatch = spied, watched

    @property
    def order(self) -> list[int]:
        """Requests in the order in which they were started for the first time."""
        return list(dict.fromkeys(ticket.index for _, ticket, _ in self.starts))


def left_over(rival: Rival[Any]) -> list[str]:
    """What its ledgers hold that should be empty when all is over."""
    out = [f"waits {count}" for count in rival.order.counts() if count]
    out += [f"in flight {count}" for count in rival.inflight if count]
    for station in rival.stations():
        sums = (len(station.running), station.blocks_given, *station.lanes, *station.waiting, *station.prefill_tokens)
        out += [f"{station.worker.number}: {sums}"] if any(sums) else []
    return out


@each_rival
def test_everything_ends_once_with_all_its_tokens(name: str) -> None:
    trace = traffic()
    play = Play(name, trace)
    outcomes = play.run.outcomes
    assert ends(play.run) == {End.DONE: len(trace)}
    assert np.array_equal(outcomes.tokens, trace.output_tokens)
    assert np.all(outcomes.first_s >= trace.arrival_s)
    assert play.run.usage.tokens.sum() == trace.output_tokens.sum()
    assert not left_over(play.rival)


@each_rival
def test_whatever_callers_and_workers_do_nothing_is_left_behind(name: str) -> None:
    trace = traffic(5, priority_per_s=60.0, deferrable_per_s=4.0, span_s=15.0)
    rows = np.arange(len(trace))
    trace = replace(
        trace,
        patience_s=np.where((trace.lane == PRIORITY) & (rows % 3 > 0), 0.4, math.inf),
        leaves_after=np.where(rows % 7 == 0, 3, 0),
        deadline_s=np.where(trace.lane == BATCH, 20.0, 5.0),
        tenant=rows % 5,
        tenants=tuple("abcde"),
    )
    play = Play(name, trace, 3, kv_share=0.1, deaths=[(4.0, 0), (9.0, 1)])
    counts = ends(play.run)
    assert End.OPEN not in counts
    assert counts[End.LEFT] > 50
    assert counts[End.EXPIRED] > 0
    assert not left_over(play.rival)
    done = play.run.outcomes.end == End.DONE
    assert np.array_equal(play.run.outcomes.tokens[done], trace.output_tokens[done])


@each_rival
def test_the_same_seed_gives_the_same_run_wherever_its_objects_lie(name: str) -> None:
    trace = traffic(3, priority_per_s=40.0, span_s=12.0)
    trace = replace(trace, tenant=np.arange(len(trace)) % 7, tenants=tuple("abcdefg"))
    first = Play(name, trace, kv_share=0.2, deaths=[(5.0, 1)])
    clutter = [object() for _ in range(999)]
    again = Play(name, trace, kv_share=0.2, deaths=[(5.0, 1)])
    assert len(clutter) == 999
    assert np.array_equal(first.run.outcomes.end_s, again.run.outcomes.end_s, equal_nan=True)
    assert [(at_s, ticket.index) for at_s, ticket, _ in first.starts] == [
        (at_s, ticket.index) for at_s, ticket, _ in again.starts
    ]


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("name", [name for name in RIVALS if name not in PUSHES_PRIORITY])
def test_no_more_is_given_than_slots_and_kv_allow(name: str, paged: bool) -> None:
    most = [0.0, 0.0]

    def watch(play: Play) -> None:
        for station in play.rival.stations():
            most[0] = max(most[0], len(station.running) / station.slots)
            most[1] = max(most[1], station.blocks_given / station.blocks)

    trace = traffic(8, priority_per_s=30.0, span_s=10.0)
    Play(name, trace, kv_share=0.12, kv_ceiling=0.8, pending_tokens=0, paged=paged, watch=watch)
    assert most[0] <= 1.0
    assert 0.8 < most[1] <= 1.0, "KV was what was short"


@pytest.mark.parametrize("name", [name for name, entry in RIVALS.items() if "pending_tokens" in entry.grid])
def test_an_engine_that_has_prompts_enough_is_given_no_more(name: str) -> None:
    trace = traffic(8, priority_per_s=40.0, span_s=8.0, batch=80)
    assert max(Play(name, trace, slots=8, pending_tokens=3000).backlogs) < 3000
    assert max(Play(name, trace, slots=8, pending_tokens=0).backlogs) > 3000


@each_rival
def test_what_comes_while_there_is_no_worker_waits_for_the_next_one(name: str) -> None:
    def watch(play: Play) -> None:
        if not play.world.workers and not play.world.booting:
            play.world.add_worker()

    rows = [(0.2 * n, PRIORITY, 300, 50, 0.5, 0.03, 60.0) for n in range(20)]
    play = Play(name, trace_of(rows), 1, deaths=[(2.0, 0)], watch=watch)
    assert ends(play.run) == {End.DONE: 20}
    assert play.run.outcomes.first_s.max() > 22.0


def test_what_waits_for_an_engine_that_dies_goes_to_others() -> None:
    rows = [(0.0, BATCH, 500, 400, math.inf, math.inf, 3600.0)] * 60
    play = Play("in-engine", trace_of(rows), 2, slots=8, deaths=[(1.0, 0)])
    assert ends(play.run) == {End.DONE: 60}


@each_rival
def test_who_was_not_begun_by_its_deadline_is_dropped(name: str) -> None:
    long = [(0.0, PRIORITY, 200, 1000, math.inf, math.inf, 60.0)] * 2
    short = [(0.5, BATCH, 200, 10, math.inf, math.inf, 2.0)] * 3
    values: dict[str, Any] = {"slots_kept": 0.0} if name == "reserved" else {}
    play = Play(name, trace_of(long + short), 1, slots=2, **values)
    assert ends(play.run) == {End.DONE: 2, End.EXPIRED: 3}
    late = play.run.outcomes.end_s[play.run.outcomes.end == End.EXPIRED]
    assert np.all((late >= 2.5) & (late <= 3.0))


@pytest.mark.parametrize("name", [name for name in RIVALS if name not in PUSHING])
def test_what_can_never_fit_an_engine_is_refused(name: str) -> None:
    rows = [(0.0, PRIORITY, 60_000, 10, 0.5, 0.03, 60.0), (0.0, PRIORITY, 100, 10, 0.5, 0.03, 60.0)]
    play = Play(name, trace_of(rows), 1, kv_share=0.05)
    assert [End(end) for end in play.run.outcomes.end] == [End.REFUSED, End.DONE]


def test_a_large_request_is_not_passed_over_for_ever_and_other_workers_go_on() -> None:
    small = [(0.1 * n, PRIORITY, 500, 300, math.inf, math.inf, 600.0) for n in range(300)]
    large = [(5.0, PRIORITY, 20_000, 10, math.inf, math.inf, 600.0)]
    trace = trace_of(small + large, max_tokens=np.full(301, 1000))
    kv_share = 25_000 / load_profile("h100-8b-fp8").kv_capacity_tokens
    play = Play("fifo", trace, 2, kv_share=kv_share)
    large_index = int(np.argmax(trace.prompt_tokens))
    at = play.order.index(large_index)
    waited_s = next(at_s for at_s, ticket, _ in play.starts if ticket.index == large_index) - 5.0
    assert 0.0 < waited_s < 10.0
    assert large_index < at < large_index + 150
    assert ends(play.run) == {End.DONE: 301}


def test_requests_with_a_common_prefix_meet_at_one_worker() -> None:
    rows = [(2.0 * n, PRIORITY, 3_200, 5, math.inf, math.inf, 60.0) for n in range(12)]
    ids = np.concatenate([1000 * (n % 3) + np.arange(100) for n in range(12)])
    prefixes = Prefixes(32, ids, np.arange(13) * 100)
    trace = trace_of(rows, prefixes=prefixes)
    followed, spread = Play("fifo", trace, 3), Play("fifo", trace, 3, affinity=False)
    homes = {(ticket.index % 3, station.worker.number) for _, ticket, station in followed.starts}
    assert len(homes) == 3
    assert followed.run.outcomes.cached_tokens.sum() >= spread.run.outcomes.cached_tokens.sum()


def test_a_router_forgets_the_tail_of_what_it_sent_longest_ago() -> None:
    prefixes = SentPrefixes(5)
    prefixes.sent([1, 2, 3])
    prefixes.sent([7, 8, 9])
    assert prefixes.match([7, 8, 9, 10]) == 3
    assert prefixes.match([1, 2, 3]) == 2
    assert prefixes.match([4, 7, 8]) == 0


def hard() -> Trace:
    """Everything is short: time, KV, slots; with five tenants, long prompts that some share, and late batch."""
    trace = traffic(9, priority_per_s=75.0, deferrable_per_s=6.0, span_s=5.0, batch=60)
    rows = np.arange(len(trace))
    blocks = trace.prompt_tokens // 32
    ids = np.concatenate(
        [np.arange(count) + 10_000 * (row if row % 3 else 0) for row, count in zip(rows, blocks, strict=True)]
    )
    return replace(
        trace,
        deadline_s=np.where(trace.lane == BATCH, 30.0, 8.0),
        tenant=rows % 5,
        tenants=tuple("abcde"),
        prefixes=Prefixes(32, ids, np.concatenate([[0], np.cumsum(blocks)])),
    )


@each_rival
def test_every_parameter_of_the_grid_changes_something(name: str) -> None:
    trace = hard()

    def ends_s(key: str, value: float | bool) -> bytes:
        chosen: dict[str, Any] = {"learns": False} if name == "gradient" else {}
        chosen |= {"slots": 8} if key == "least" else {}  # the limit begins at the slots
        chosen[key] = value
        return Play(name, trace, kv_share=0.06, **chosen).run.outcomes.end_s.tobytes()

    for key, values in RIVALS[name].grid.items():
        usual = ends_s(key, values[0])
        assert any(ends_s(key, other) != usual for other in reversed(values[1:])), key


@each_rival
def test_every_value_of_the_grid_is_one_of_a_parameter_and_is_reported(name: str) -> None:
    entry = RIVALS[name]
    for key, values in entry.grid.items():
        assert len(set(values)) == len(values) > 1
        for value in values:
            chosen: dict[str, Any] = {key: value}
            params = entry.params(**chosen)
            rival = entry.make(Setup(load_profile("h100-8b-fp8"), EngineSize(), 1).times, params)
            assert rival.parameters()[key] == value
    size = entry.params(slots=17, chunk_tokens=333).size(EngineSize(kv_share=0.5))
    assert (size.slots, size.chunk_tokens, size.kv_share) == (17, 333, 0.5)


def test_parameters_of_another_rival_are_not_taken() -> None:
    with pytest.raises(AssertionError, match="gate has GateParams"):
        RIVALS["gate"].make(Setup(load_profile("h100-8b-fp8"), EngineSize(), 1).times, Common())
