"""What lower-lane prompts cost priority work, under virtual time: H100 with an 8B model, prompts in chunks of 512."""

from __future__ import annotations

import asyncio
import itertools
from random import Random
from statistics import mean

import pytest
from msgspec.structs import replace

from laneway.core.lanes import Isolation, Lane
from laneway.policy import interference
from laneway.runtime.engine_options import EngineOptions
from laneway.workers.engines.protocol import EngineRequest
from laneway.workers.outcomes import Kind, Outcome
from tests.support.budgeted import Call, EngineYard, p99, pool_of

pytestmark = pytest.mark.looptime

TIGHT = {"ttft_target_s": 0.4, "tpot_target_s": 0.010}  # t(16) is about 6 ms, and 15 ms with a chunk
_numbers = itertools.count(1)


def unique(tokens: int) -> bytes:
    """A prompt that shares no block with any other."""
    number = next(_numbers)
    return b"%08d" % number + bytes(97 + (n * number) % 23 for n in range(tokens - 8))


async def chats(yard: EngineYard, random: Random, span_s: float, contract: dict, rate: float = 8.0) -> None:
    """Poisson arrivals of short questions with answers of 120 to 240 tokens."""
    ends_s = asyncio.get_running_loop().time() + span_s
    while asyncio.get_running_loop().time() < ends_s:
        await asyncio.sleep(random.expovariate(rate))
        if yard.seats.slots_free:
            yard.submit(Lane.PRIORITY, unique(random.randint(50, 400)), random.randint(120, 240), **contract)


async def mixed(span_s: float, contract: dict, *, bulk: bool = True, seed: int = 1, **policy) -> EngineYard:
    yard = await EngineYard(pool_of(), **policy).start()
    if bulk:
        for _ in range(3000):
            yard.lower.append((Lane.BATCH, unique(2000), 16, {}))
        yard.pull()
    await chats(yard, Random(seed), span_s, contract)
    yard.lower.clear()
    await yard.until(*yard.of(Lane.PRIORITY))
    return yard


def felt(yard: EngineYard) -> tuple[float, float]:
    """99th percentiles of TTFT and TPOT of priority."""
    calls = yard.of(Lane.PRIORITY)
    assert all(call.outcome is not None and call.outcome.kind is Kind.FINISHED for call in calls)
    return p99([call.ttft_s for call in calls]), p99([call.tpot_s for call in calls])


def harvested(yard: EngineYard, span_s: float) -> float:
    done = [call for call in yard.of(Lane.BATCH) if call.tokens_s]
    return sum(len(call.job.task.prompt_ids) for call in done) / span_s


async def test_priority_keeps_its_times_beside_bulk_prompts_with_the_budget_and_not_without():
    alone = felt(await mixed(10.0, TIGHT, bulk=False))
    yard = await mixed(10.0, TIGHT)
    with_budget = felt(yard)
    free = felt(await mixed(10.0, TIGHT, interference_budget=False, lower_lane_prefills_max=4, headroom_z=0.0))
    chunk_s = 0.009
    assert with_budget[0] <= alone[0] + 2.5 * chunk_s, "little more than the chunk that it came upon"
    assert with_budget[1] <= TIGHT["tpot_target_s"]
    assert free[0] > 2.0 * with_budget[0]
    assert free[1] > TIGHT["tpot_target_s"]
    assert harvested(yard, 10.0) > 4000, "and there is work done all the same"


async def test_nothing_of_it_goes_beyond_what_is_stated():
    yard = await mixed(10.0, TIGHT)
    assert yard.debt_max <= 1.0
    assert yard.in_flight_max <= interference.guard_tokens(yard.budget.load(), yard.budget._params())


async def test_lower_lanes_never_wait_inside_the_engine():
    """Without questions that come meanwhile, whatever the engine has queued is a lower lane's."""
    yard = await EngineYard(pool_of()).start()
    for _ in range(40):
        yard.lower.append((Lane.BATCH, unique(2000), 16, {}))
        yard.lower.append((Lane.DEFERRABLE, unique(40), 16, {}))
    yard.pull()
    await asyncio.sleep(5.0)
    assert yard.queued_max <= 1
    assert all(call.outcome for call in yard.calls)
    assert len(yard.calls) == 80


async def test_strict_isolation_costs_a_twentieth_of_a_token_and_slo_does_not_hold_back_for_it():
    strict = {"ttft_target_s": 0.4, "tpot_target_s": 0.1, "isolation": Isolation.STRICT}
    alone = await mixed(8.0, strict, bulk=False)
    beside = await mixed(8.0, strict)
    slo = await mixed(8.0, {**strict, "isolation": Isolation.SLO})
    of = [mean(call.tpot_s for call in yard.of(Lane.PRIORITY)) for yard in (alone, beside, slo)]
    assert of[1] < 1.12 * of[0]
    assert of[2] > 1.3 * of[0]
    assert 300 < harvested(beside, 8.0) < 0.4 * harvested(slo, 8.0)


async def test_without_priority_near_a_bulk_prompt_goes_whole_and_at_full_rate():
    yard = await EngineYard(pool_of()).start()
    began_s = asyncio.get_running_loop().time()
    for _ in range(100):
        yard.lower.append((Lane.BATCH, unique(2000), 16, {}))
    yard.pull()
    while yard.lower:
        await yard.until(*yard.calls)
    await yard.until(*yard.calls)
    rate = 200_000 / (asyncio.get_running_loop().time() - began_s)
    assert rate > 30_000  # chunks of 512 beside decoding: 41,000 a second at best
    assert sum(call.generation._entry.slices for call in yard.calls[20:] if call.generation._entry) == 0


async def test_with_a_tight_guard_bulk_prompts_go_on_slice_by_slice_though_nobody_else_is_there():
    yard = await EngineYard(pool_of(prefill_tokens_per_s=400.0), ttft_guard_fraction=0.02).start()
    for _ in range(5):
        yard.lower.append((Lane.BATCH, unique(6000), 4, {}))
    yard.pull()
    while yard.lower:
        await yard.until(*yard.calls)
    await yard.until(*yard.calls)
    assert all(call.generation._entry is not None and call.generation._entry.slices > 3 for call in yard.calls)
    assert yard.queued_max <= 1


# --- slices ------------------------------------------------------------------------------------------


async def sliced(yard: EngineYard, tokens: int = 6000, **contract) -> tuple[list[Call], Call]:
    """A long lower-lane prompt that is in slices beside sixteen chats."""
    talk = [yard.submit(Lane.PRIORITY, unique(300), 4000, **(TIGHT | contract)) for _ in range(16)]
    await asyncio.sleep(1.0)
    call = yard.submit(Lane.BATCH, unique(tokens), 8)
    await asyncio.sleep(0.2)
    assert call.generation._entry is not None
    assert call.generation._entry.slices >= 1
    assert not call.generation._entry.submitted
    return talk, call


async def moment(call: Call, *, in_flight: bool) -> None:
    """Until a slice of it is in the engine, or none is."""
    entry = call.generation._entry
    assert entry is not None
    for _ in range(10_000):
        if bool(entry.in_flight_tokens) is in_flight and not entry.submitted:
            return
        await asyncio.sleep(0.0005)
    raise AssertionError("the moment never came")


async def test_a_run_in_slices_is_told_of_nothing_but_its_own_tokens():
    yard = await EngineYard(pool_of()).start()
    _, call = await sliced(yard)
    await yard.until(call)
    whole = await EngineYard(pool_of()).start()
    same = whole.submit(Lane.BATCH, call.job.task.prompt_ids, 8)
    await whole.until(same)
    assert call.generation.transcript.ids == same.generation.transcript.ids
    assert call.outcomes == 1
    assert call.generation.transcript.cached_tokens == 0, "what its own slices computed is no hit of the caller"
    again = yard.submit(Lane.BATCH, call.job.task.prompt_ids, 8)
    await yard.until(again)
    assert again.generation.transcript.cached_tokens >= 5900, "and what was there before is one"


async def test_a_cancelled_run_in_slices_frees_the_engine_within_a_chunk():
    yard = await EngineYard(pool_of()).start()
    talk, call = await sliced(yard, 12_000)
    await moment(call, in_flight=True)
    call.end(Outcome(Kind.STOPPED))
    steps = yard.sequences.stats().steps
    await call.generation.gone()
    assert yard.sequences.stats().steps - steps <= 2  # the step that ran, and the one that says so
    await asyncio.sleep(0.1)
    assert yard.sequences.stats().running == len(yard.sequences) == 16
    assert yard.budget.load().lower_prompt_tokens == 0
    for each in talk:
        each.end(Outcome(Kind.STOPPED))
    await asyncio.sleep(0.1)
    assert yard.sequences.stats().kv_tokens_used == 0


async def test_a_run_in_slices_whose_engine_dies_ends_once_whether_or_not_a_slice_is_in_flight():
    for in_flight in (True, False):
        yard = await EngineYard(pool_of()).start()
        _, call = await sliced(yard, 12_000)
        await moment(call, in_flight=in_flight)
        yard.engine.crash("told to")
        await asyncio.sleep(1.0)
        assert call.outcome is not None
        assert call.outcome.kind is Kind.ENGINE_LOST
        assert call.outcomes == 1
        assert not yard.budget._entries


async def test_a_request_that_the_engine_would_not_take_can_be_asked_for_again():
    yard = await EngineYard(pool_of()).start()
    submit, tries = yard.engine.submit, []

    def refuse_once(request: EngineRequest) -> None:
        tries.append(request.id)
        if len(tries) == 1:
            raise ValueError("not to be put into a frame")
        submit(request)

    yard.engine.submit = refuse_once
    with pytest.raises(ValueError, match="frame"):
        yard.submit(Lane.PRIORITY, unique(100), 4)
    (call,) = yard.calls
    assert not call.generation.submitted
    assert not yard.budget._entries
    await yard.until(call.begin())
    assert len(call.tokens_s) == 4


async def test_a_request_that_fails_when_its_turn_comes_harms_no_other():
    yard = await EngineYard(pool_of()).start()
    _, call = await sliced(yard)
    next_one = yard.submit(Lane.BATCH, unique(600), 4)
    submit, faults = yard.engine.submit, []

    def refuse_long_ones(request: EngineRequest) -> None:
        if request.prompt_ids[:16] == call.job.task.prompt_ids[:16] and len(request.prompt_ids) > 3000:
            raise ValueError("not to be put into a frame")
        submit(request)

    def fault(error: Exception) -> None:
        faults.append(error)
        call.end(Outcome(Kind.ENGINE_FAILED))

    call.on_fault = fault  # type: ignore[method-assign]
    yard.engine.submit = refuse_long_ones
    async with asyncio.timeout(60.0):
        await yard.until(call, next_one)
    assert len(faults) == 1
    assert len(next_one.tokens_s) == 4


async def test_an_error_in_a_slice_is_the_answer_to_the_whole():
    options = EngineOptions(profile="h100-8b-fp8", prefill_chunk_tokens=512, fault_error_token_id=5)
    yard = await EngineYard(pool_of(), options).start()
    for _ in range(16):
        yard.submit(Lane.PRIORITY, unique(300), 4000, **TIGHT)
    await asyncio.sleep(1.0)
    call = yard.submit(Lane.BATCH, bytes([5]) + unique(5000), 8)
    await yard.until(call)
    assert call.outcome is not None
    assert call.outcome.kind is Kind.ENGINE_FAILED
    assert call.outcomes == 1


async def test_the_next_turn_of_a_conversation_is_not_cut_where_its_beginning_is_cached():
    yard = await EngineYard(pool_of()).start()
    for _ in range(16):
        yard.submit(Lane.PRIORITY, unique(300), 4000, **TIGHT)
    first = yard.submit(Lane.DEFERRABLE, unique(4000), 40)
    await yard.until(first)
    turn = (*first.job.task.prompt_ids, *first.generation.transcript.ids, *unique(200))
    second = yard.submit(Lane.DEFERRABLE, turn, 8)
    await yard.until(second)
    assert second.generation._entry is not None
    assert second.generation._entry.slices <= 1
    assert second.generation.transcript.cached_tokens >= 3900


async def test_without_a_prefix_cache_a_long_prompt_waits_for_priority_to_go_or_for_credit_on_a_bulk_pool():
    options = EngineOptions(profile="h100-8b-fp8", prefill_chunk_tokens=512, prefix_cache=False)
    for bulk in (False, True):
        yard = await EngineYard(pool_of(bulk=bulk), options).start()
        talk = [yard.submit(Lane.PRIORITY, unique(300), 1000, **TIGHT) for _ in range(16)]
        await asyncio.sleep(1.0)
        call = yard.submit(Lane.BATCH, unique(20_000), 8)
        await asyncio.sleep(4.0)
        assert bool(call.tokens_s) is bulk
        assert yard.debt_max <= 1.0
        await yard.until(*talk)
        await asyncio.sleep(6.0)
        yard.budget.pump()  # as the worker does a few times a second
        await yard.until(call)
        assert call.generation._entry is not None
        assert call.generation._entry.slices == 0


async def test_without_a_prefix_cache_a_long_prompt_waits_no_longer_than_half_a_minute_for_priority_to_go():
    options = EngineOptions(profile="h100-8b-fp8", prefill_chunk_tokens=512, prefix_cache=False)
    yard = await EngineYard(pool_of(), options).start()
    yard.submit(Lane.PRIORITY, unique(60), 20_000, **TIGHT)
    bulk = yard.submit(Lane.BATCH, unique(3000), 4)
    await asyncio.sleep(29.0)
    assert not bulk.tokens_s
    await asyncio.sleep(6.0)
    assert bulk.tokens_s, "and those behind it need not wait for their deadlines"


async def test_a_lower_prompt_comes_to_its_end_beside_priority_prompts_that_always_fill_the_chunk():
    yard = await EngineYard(pool_of()).start()

    async def ask() -> None:
        while call.outcome is None:
            await yard.until(yard.submit(Lane.PRIORITY, unique(3000), 4, ttft_target_s=1.0, tpot_target_s=0.05))

    warm = [yard.submit(Lane.PRIORITY, unique(3000), 4, ttft_target_s=1.0, tpot_target_s=0.05) for _ in range(3)]
    call = yard.submit(Lane.BATCH, unique(2000), 4)
    async with asyncio.timeout(30.0), asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(ask())
    await yard.until(*warm)
    assert p99([each.ttft_s for each in yard.of(Lane.PRIORITY)]) < 0.5, "half of the target"


# --- long prompts of priority ------------------------------------------------------------------------


async def long_prompt(target_s: float, *, comes: bool = True, **policy) -> tuple[float, float]:
    """99th percentile TPOT of sixteen chats of 200 tokens, and the TTFT of a prompt of 8,000 that comes among them."""
    yard = await EngineYard(pool_of(), **policy).start()
    contract = {"tpot_target_s": target_s, "ttft_target_s": 3.0}
    talk = []
    for _ in range(16):
        talk.append(yard.submit(Lane.PRIORITY, unique(300), 300, **contract))
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.5)
    ttft_s = 0.0
    if comes:
        call = yard.submit(Lane.PRIORITY, unique(8000), 8, **contract)
        await yard.until(call)
        ttft_s = call.ttft_s
    await yard.until(*talk)
    return p99([call.tpot_s for call in talk]), ttft_s


async def test_a_long_priority_prompt_goes_whole_where_the_others_can_afford_it():
    without, _ = await long_prompt(0.05, comes=False)
    tpot_s, ttft_s = await long_prompt(0.05)
    assert tpot_s <= 1.25 * without
    assert ttft_s < 0.3


async def test_it_goes_in_slices_where_they_cannot_and_is_in_time_all_the_same():
    without, _ = await long_prompt(0.0073, comes=False)
    whole, _ = await long_prompt(0.0073, slices=False)
    tpot_s, ttft_s = await long_prompt(0.0073)
    assert tpot_s < whole
    assert tpot_s <= 1.25 * without
    assert ttft_s < 3.0


# --- headroom, theta and the gate --------------------------------------------------------------------


async def test_lower_lanes_leave_room_for_the_bursts_that_have_come_lately():
    yard = await EngineYard(pool_of(slots=32)).start()
    assert yard.budget.reserved_slots() == 1, "the floor, before anything was learned"
    for _ in range(12):
        for _ in range(10):
            yard.submit(Lane.PRIORITY, unique(100), 200)
        await asyncio.sleep(6.0)
    kept = yard.budget.reserved_slots()
    assert 8 <= kept <= 16
    for _ in range(100):
        yard.lower.append((Lane.BATCH, unique(100), 8000, {}))
    yard.pull()
    await asyncio.sleep(1.0)
    assert yard.seats.slots_free == kept
    assert yard.budget.why() == interference.HEADROOM
    yard.lower.clear()
    for call in yard.calls:
        call.end(Outcome(Kind.STOPPED))
    await asyncio.sleep(400.0)
    assert yard.budget.reserved_slots() == 1, "it fades"


async def test_theta_falls_while_tokens_are_late_and_settings_move_it_at_once():
    yard = await EngineYard(pool_of()).start()
    late = [yard.submit(Lane.PRIORITY, unique(100), 20_000, tpot_target_s=0.001) for _ in range(2)]
    await asyncio.sleep(21.0)
    assert yard.budget.theta == pytest.approx(0.7)
    yard.policy.set(replace(yard.policy.settings, theta=0.6))
    assert yard.budget.theta == 0.6
    for each in late:
        each.end(Outcome(Kind.STOPPED))
    await asyncio.sleep(25.0)
    assert yard.budget.theta == 0.6, "without measurements it stays"


async def test_hours_without_work_say_nothing_of_theta():
    yard = await EngineYard(pool_of()).start()
    await yard.until(yard.submit(Lane.PRIORITY, unique(100), 100, tpot_target_s=0.05))
    before = yard.budget.theta
    await asyncio.sleep(7200.0)
    await yard.until(yard.submit(Lane.PRIORITY, unique(100), 100, tpot_target_s=0.05))
    assert yard.budget.theta <= before + 0.02


async def test_what_keeps_lower_jobs_out_is_named_and_when_to_look_again_is_told():
    yard = await EngineYard(pool_of()).start()
    talk = [yard.submit(Lane.PRIORITY, unique(300), 4000, **TIGHT) for _ in range(16)]
    await asyncio.sleep(1.0)
    assert yard.budget.lower_places() == 1
    call = yard.submit(Lane.BATCH, unique(3000), 8)
    assert yard.budget.lower_places() == 0
    assert yard.budget.why() == interference.GUARD
    await yard.until(call)
    while yard.budget.why() != interference.BUDGET:
        if yard.budget.lower_places():
            yard.submit(Lane.BATCH, unique(512), 1)
        await asyncio.sleep(0.001)
    wait_s = yard.budget.look_in_s()
    assert wait_s is not None
    await asyncio.sleep(wait_s * 1.5 + 0.01)
    assert yard.budget.lower_places() == 1
    talk.append(yard.submit(Lane.PRIORITY, unique(50), 100, tpot_target_s=0.005))
    assert yard.budget.lower_places() == 0
    assert yard.budget.why() in (interference.TPOT, interference.GUARD)
