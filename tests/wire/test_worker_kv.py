"""Workers with a paged engine, on a real nats-server: more runs at once than reservations allow, also when answers get
longer than was learned."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from laneway.core.job import JobRecord
from laneway.core.lanes import JobState, Lane
from laneway.core.subjects import ParkSubject
from laneway.runtime.clock import SystemClock
from laneway.runtime.engine_options import EngineOptions
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.metrics import exposition
from laneway.workers.engines.protocol import EngineCapacity, EngineRequest
from laneway.workers.engines.simulated import make_core
from tests.support.nats import eventually
from tests.support.worker import Yard, yard

# Reservations of 5 + 400 tokens: four fit.
PAGED: dict[str, Any] = {
    "model__slots": 16, "model__kv_tokens": 2000, "engine__paged": True, "policy__lower_lane_prefills_max": 16,
    "policy__interference_budget": False, "policy__lower_lane_floor": 0.0,
}  # fmt: skip
LEARNED = 50  # answers
TOKENS = 400


def prompt_of(job: int) -> bytes:
    """Another one for each: identical jobs would share a sequence."""
    return b"job %4d" % job


def answer_to(prompt: bytes) -> tuple[int, ...]:
    """What the engine gives when it has nothing else to do."""
    core = make_core(EngineCapacity(1, 2000, 2000, 260), frozenset(), EngineOptions())
    core.add(EngineRequest(1, tuple(prompt), TOKENS, temperature=0.0))
    ids: list[int] = []
    while core.busy():
        ids += [token_id for step in core.step(0.0).steps for token_id in step.token_ids]
    return tuple(ids)


async def learn(place: Yard, tokens: int) -> None:
    """So many answers of that length."""
    stored = [
        await place.submit(lane=Lane.BATCH, prompt=prompt_of(1000 + i), max_tokens=tokens) for i in range(LEARNED)
    ]
    await place.ended(*(each.record.job_id for each in stored))


async def most_running(place: Yard, jobs: int, **changes: Any) -> tuple[int, list[JobRecord]]:
    """Submits so many batch jobs; the most that ran at once, and their ends."""
    stored = [await place.submit(lane=Lane.BATCH, prompt=prompt_of(i), **changes) for i in range(jobs)]
    ending = asyncio.ensure_future(place.ended(*(each.record.job_id for each in stored), timeout_s=40.0))
    most = 0
    while not ending.done():
        most = max(most, place.workers[0].worker.snapshot().running)
        await asyncio.sleep(0.005)
    return most, await ending


def shown(name: str) -> float:
    lines = exposition().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{"))


@pytest.mark.parametrize("prediction", [True, False])
async def test_learned_lengths_let_more_run_than_reservations_would(nats_server: LocalNats, prediction: bool):
    short = {"engine__eos_mean_tokens": 20.0, "engine__pace_s": 0.005, "policy__kv_prediction": prediction}
    async with yard(nats_server, workers=1, **PAGED, **short) as place:
        await learn(place, TOKENS)  # they end by themselves far below it
        most, ended = await most_running(place, 24, max_tokens=TOKENS)
        assert most > 6 if prediction else most <= 4
        assert {record.state for record in ended} == {JobState.SUCCEEDED}


async def test_answers_that_all_get_longer_than_learned_end_whole(nats_server: LocalNats):
    async with yard(nats_server, workers=1, **PAGED) as place:
        await learn(place, 8)
        outgrown = shown("laneway_worker_kv_outgrown_total")
        most, ended = await most_running(place, 16, max_tokens=TOKENS)
        assert most > 8  # by what was learned; nobody may yield here, so the engine evicts
        assert shown("laneway_worker_kv_outgrown_total") > outgrown
        for i, record in enumerate(ended):
            assert record.state is JobState.SUCCEEDED
            assert record.result is not None
            assert record.result.token_ids == answer_to(prompt_of(i))
        worker = place.workers[0]
        assert await eventually(worker.idle)
        assert worker.engine_empty()


@pytest.mark.parametrize("cache", [True, False])
async def test_what_prompts_begin_with_is_counted_once_only_where_the_engine_keeps_it(
    nats_server: LocalNats, cache: bool
):
    slow = {"engine__prefix_cache": cache, "engine__pace_s": 0.02}
    async with yard(nats_server, workers=1, **PAGED, **slow) as place:
        for last in (b"a", b"b"):
            await place.submit(prompt=b"x" * 500 + last, max_tokens=100)
        (worker,) = place.workers
        await eventually(lambda: worker.worker.snapshot().running == 2)
        assert worker.worker.snapshot().kv_tokens_used == 1202 - 500 * cache


async def test_a_batch_run_yields_before_the_engine_evicts(nats_server: LocalNats):
    async with yard(nats_server, workers=1, **{**PAGED, "policy__preemptions_max": 2}) as place:
        await learn(place, 8)
        stored = [await place.submit(lane=Lane.BATCH, prompt=prompt_of(i), max_tokens=TOKENS) for i in range(8)]

        async def yielded() -> list[ParkSubject]:
            return await place.lanes.parked(Lane.BATCH)

        parked = await eventually(yielded)
        record = await place.record(parked[0].job)
        assert record.preemptions == 1
        assert record.lineage[-1].yield_reason == "KV_OUTGROWN"
        assert record.checkpoint_index > 0

        async def all_ended() -> list[JobRecord] | None:
            for park in await place.lanes.parked(Lane.BATCH):
                await place.lanes.release(park, now_s=SystemClock().now(), reason="TEST")
            records = [await place.record(each.record.job_id) for each in stored]
            return records if all(each.state.terminal for each in records) else None

        ended = await eventually(all_ended, 40.0)
        assert {each.state for each in ended} == {JobState.SUCCEEDED}
        answers = [each.result.token_ids for each in ended if each.result is not None]
        assert answers == [answer_to(prompt_of(i)) for i in range(8)]
