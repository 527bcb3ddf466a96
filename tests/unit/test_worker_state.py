"""The small owners of a worker's state: seats, ack waits, restarts, suspects, rates, settings."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneway.core.catalogue import Capabilities
from laneway.core.errors import ConfigError
from laneway.core.lanes import LANES, Lane
from laneway.policy.pull import PullParams
from laneway.runtime.catalogue import catalogue_of
from laneway.runtime.engine_options import EngineOptions
from laneway.runtime.params import headroom_params, interference_params, pull_params
from laneway.runtime.settings import ModelSettings, PolicySettings, Settings, WorkerSettings
from laneway.workers.ackwait import AckWait
from laneway.workers.engine_keeper import RESTART_WINDOW_S, RESTARTS_MAX, restart_delay_s
from laneway.workers.engines.protocol import EngineCapacity
from laneway.workers.ledger import KvAsk, Seat, Seats
from laneway.workers.rates import PREFILL_SAMPLE_TOKENS_MIN, Rates
from laneway.workers.server import check_capabilities, options_of, serve
from laneway.workers.suspects import Suspects
from tests.support.nats import small_catalogue

CAPACITY = EngineCapacity(slots=4, kv_tokens=1000, context_length=500, vocabulary_size=256, block_tokens=32)


# --- seats -------------------------------------------------------------------------------------------


def of(tokens: int) -> KvAsk:
    return KvAsk(tokens - 1, 1)


def test_kv_is_reserved_in_whole_blocks():
    seats = Seats(CAPACITY)
    assert (seats.kv_tokens, seats.need(of(1)), seats.need(of(32)), seats.need(of(33))) == (992, 32, 32, 64)
    seats.take(Lane.BATCH, of(33))
    assert (seats.kv_tokens_used, seats.kv_tokens_free) == (64, 928)


@pytest.mark.parametrize(("tokens", "ever"), [(500, True), (501, False)])
def test_what_exceeds_the_context_never_fits(tokens: int, ever: bool):
    assert Seats(CAPACITY).can_ever_fit(of(tokens)) is ever


@pytest.mark.parametrize(("tokens", "ever"), [(992, True), (993, False)])
def test_what_exceeds_the_cache_never_fits(tokens: int, ever: bool):
    capacity = EngineCapacity(4, 1000, 4096, 256, block_tokens=32)
    assert Seats(capacity).can_ever_fit(of(tokens)) is ever
    assert Seats(capacity).largest == 992


def test_slots_and_kv_both_limit():
    seats = Seats(CAPACITY, slots=2)
    seats.take(Lane.PRIORITY, of(10))
    assert seats.fits(of(500))
    seats.take(Lane.BATCH, of(480))
    assert not seats.fits(of(1))
    assert seats.by_lane() == {Lane.PRIORITY: 1, Lane.DEFERRABLE: 0, Lane.BATCH: 1}


@given(st.lists(st.tuples(st.sampled_from(LANES), st.integers(1, 500), st.booleans()), max_size=60))
def test_seats_given_back_leave_nothing_behind(events: list[tuple[Lane, int, bool]]):
    seats = Seats(CAPACITY)
    live: list[Seat] = []
    for lane, tokens, leave in events:
        if leave and live:
            seat = live.pop()
            seats.give_back(seat)
            seats.give_back(seat)
        elif seats.fits(of(tokens)):
            live.append(seats.take(lane, of(tokens)))
        assert len(seats) == len(live) <= 4
        assert seats.kv_tokens_used == sum(-(-seat.ask.tokens // 32) * 32 for seat in live) <= seats.kv_tokens
        assert sum(seats.by_lane().values()) == len(live)
    for seat in live:
        seats.give_back(seat)
    assert (len(seats), seats.kv_tokens_used, seats.slots_free) == (0, 0, 4)


# --- time asked for ----------------------------------------------------------------------------------


def test_time_is_asked_for_at_a_third_and_only_while_the_engine_advances():
    wait = AckWait.begin(3.0, now_s=10.0, steps=5)
    assert not wait.ask(10.9, 6)
    assert not wait.ask(11.0, 5), "no step since"
    assert wait.ask(11.25, 6)
    assert not wait.ask(12.0, 7)
    assert wait.ask(12.25, 7)
    assert not wait.ask(99.0, 7), "the engine stands still"


# --- restarts ----------------------------------------------------------------------------------------


def test_restarts_back_off_and_end():
    deaths = [float(i) for i in range(RESTARTS_MAX)]
    delays = [restart_delay_s(deaths[: i + 1], 10.0) for i in range(RESTARTS_MAX)]
    assert delays == sorted(delays, key=lambda delay: delay or 0.0)
    assert all(delays)
    assert restart_delay_s([*deaths, 9.0], 10.0) is None


def test_old_deaths_are_forgiven():
    deaths = [0.0] * RESTARTS_MAX
    assert restart_delay_s([*deaths, RESTART_WINDOW_S], RESTART_WINDOW_S) == restart_delay_s([0.0], 0.0)


# --- suspects ----------------------------------------------------------------------------------------


async def test_a_suspect_waits_until_it_is_alone_and_a_second_one_is_sent_away():
    runs = {"suspect", "innocent", "second"}
    suspects = Suspects(lambda run: len(runs - {run}))
    waiting = asyncio.create_task(suspects.alone("suspect"))
    await asyncio.sleep(0)
    assert suspects.any
    assert not await suspects.alone("second")
    for gone in ("second", "innocent"):
        assert not waiting.done()
        runs.discard(gone)
        suspects.run_left(gone)
        await asyncio.sleep(0)
    assert await waiting
    assert await suspects.alone("suspect"), "asked again, it still is"
    runs.discard("suspect")
    suspects.run_left("suspect")
    assert not suspects.any


async def test_a_suspect_does_not_keep_others_waiting_for_long():
    suspects = Suspects(lambda run: 1, wait_s_max=0.01)
    assert not await suspects.alone("suspect")
    assert not suspects.any


# --- rates -------------------------------------------------------------------------------------------


def test_rates_start_as_means_and_then_follow():
    rates = Rates()
    assert rates.prefill_tokens_per_s == 0.0
    rates.prefilled(PREFILL_SAMPLE_TOKENS_MIN, 1.0)
    rates.prefilled(3 * PREFILL_SAMPLE_TOKENS_MIN, 1.0)
    assert rates.prefill_tokens_per_s == 2 * PREFILL_SAMPLE_TOKENS_MIN
    for _ in range(200):
        rates.prefilled(1000, 2.0)
    assert rates.prefill_tokens_per_s == pytest.approx(500.0, rel=0.01)
    rates.decoded(0, 1.0)
    rates.decoded(5, 0.0)
    assert rates.decode_tokens_per_s == 0.0
    rates.finished(7, 2.0)
    assert (rates.jobs_done, rates.tokens_done, rates.service_s) == (1, 7, 2.0)


@pytest.mark.parametrize(("prior", "rate"), [(50.0, 100.0), (100.0, 0.0)])
def test_a_short_prompt_says_only_how_fast_prefill_is_at_least(prior: float, rate: float):
    rates = Rates(prior)
    rates.prefilled(100, 1.0)
    rates.prefilled(10, 1.0)
    assert rates.prefill_tokens_per_s == rate


# --- settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "slots", "params", "reserved", "prefills_max"),
    [
        (PolicySettings(), 8, PullParams(10, 4), 1, 1),
        (PolicySettings(), 3, PullParams(10, 4), 0, 1),
        (PolicySettings(lower_lane_floor=0.0), 8, PullParams(0, 4), 1, 1),
        (PolicySettings(lower_lane_floor=0.9, priority_reserved_slots=3), 8, PullParams(2, 4), 3, 1),
        (
            PolicySettings(deferrable_weight=1.0, batch_weight=2.0, lower_lane_prefills_max=5),
            8,
            PullParams(10, 1),
            1,
            5,
        ),
    ],
)
def test_shares_become_counts_of_jobs(
    policy: PolicySettings, slots: int, params: PullParams, reserved: int, prefills_max: int
):
    assert pull_params(policy) == params
    assert headroom_params(policy, slots).slots_min == reserved
    assert interference_params(policy).lower_prefills_max == prefills_max


def test_a_worker_refuses_a_pool_that_is_not_in_the_catalogue():
    with pytest.raises(ConfigError, match="no such pool; known: chat-small"):
        options_of(Settings(worker=WorkerSettings(pool="nowhere")))


def test_a_worker_has_an_engine_of_its_pool():
    models = (ModelSettings(name="chat", other_engines=("simulated",)),)
    settings = Settings(models=models, worker=WorkerSettings(engine="simulated"))
    assert options_of(settings).pool.capabilities.exact, "what it can do, whatever the others cannot"
    assert not catalogue_of(settings).pools[0].capabilities.exact
    assert options_of(Settings(models=models)).pool.engine == "openvino"
    assert options_of(Settings(models=models, worker=WorkerSettings(engine="openvino"))).pool.engine == "openvino"
    assert options_of(Settings(models=models, worker=WorkerSettings(engine="simulated"))).pool.engine == "simulated"
    with pytest.raises(ConfigError, match='"trtllm_grpc": pool chat-small has openvino, simulated; name it in other'):
        options_of(Settings(models=models, worker=WorkerSettings(engine="trtllm_grpc")))


async def test_a_worker_refuses_a_promise_of_isolation_that_its_own_options_break():
    """The door goes by the catalogue; what [worker] says of the engine only this worker knows."""
    worker = WorkerSettings(engine_options=EngineOptions(prefix_cache=False))
    with pytest.raises(ConfigError, match="offers strict_isolation"):
        await serve(Settings(worker=worker), asyncio.Event())


def test_every_incarnation_has_a_name_of_its_own():
    settings = Settings(worker=WorkerSettings(name="w" * 64))
    first, second = options_of(settings), options_of(settings)
    assert first.worker_id != second.worker_id
    assert len(first.worker_id) == 64


def test_a_catalogue_may_not_promise_what_the_engine_cannot_do():
    pool = small_catalogue().pools[0]
    check_capabilities(pool, pool.capabilities)
    check_capabilities(pool, Capabilities(top_logprobs=5, seed=True))
    with pytest.raises(ConfigError, match="offers top_k, which its simulated engine cannot do"):
        check_capabilities(pool, Capabilities(top_k=False))
