"""Long prompts in slices on workers with a real nats-server: whatever happens meanwhile, a job ends once."""

from __future__ import annotations

import os
import signal
from typing import Any

from laneway.core.job import Sampling
from laneway.core.lanes import JobState, Lane
from laneway.runtime.local_nats import LocalNats
from laneway.workers.prewarm import Entry
from tests.support.nats import eventually
from tests.support.worker import RunningWorker, Yard, yard

# 96 slices of a chunk each; with a TPOT target of 12 ms for the steps of 10 ms, the budget takes its time over them.
SLOW: dict[str, Any] = {
    "engine__pace_s": 0.01, "engine__prefill_chunk_tokens": 32, "model__context_length": 8192, "model__slots": 8,
    "model__kv_tokens": 65_536,
}  # fmt: skip
PROMPT = bytes(97 + n * n % 19 for n in range(3000))


async def talking(place: Yard, tokens: int = 3000) -> str:
    """A priority job that decodes."""
    sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    stored = await place.submit(prompt=b"talk", sampling=sampling)
    await eventually(lambda: any(running.worker.sequences.stats().decoding for running in place.workers))
    return stored.record.job_id


def entries(running: RunningWorker) -> list[Entry]:
    return [entry for entry in running.worker.budget._entries if entry.lane is not Lane.PRIORITY]


async def in_slices(place: Yard, **changes: Any) -> str:
    """A batch job of which some slices are computed, and most of it is not."""
    values: dict[str, Any] = {"lane": Lane.BATCH, "prompt": PROMPT, "max_tokens": 5} | changes
    stored = await place.submit(**values)
    await eventually(lambda: any(e.slices >= 3 for w in place.workers for e in entries(w)))
    assert not any(e.submitted for w in place.workers for e in entries(w))
    return stored.record.job_id


async def test_a_job_in_slices_ends_like_any_other_and_its_usage_knows_nothing_of_them(nats_server: LocalNats):
    async with yard(nats_server, workers=1, **SLOW) as place:
        await talking(place, 2000)
        job_id = await in_slices(place)
        (record,) = await place.ended(job_id)
        assert record.state is JobState.SUCCEEDED
        assert record.attempt == 1
        assert record.result is not None
        assert (record.result.usage.prompt_tokens, record.result.usage.cached_tokens) == (3000, 0)
        again = await place.submit(lane=Lane.BATCH, prompt=PROMPT, max_tokens=5)
        (record_again,) = await place.ended(again.record.job_id)
        assert record_again.result is not None
        assert record_again.result.token_ids == record.result.token_ids
        assert record_again.result.usage.cached_tokens > 2900


async def test_a_job_whose_engine_dies_among_its_slices_goes_on_and_ends_once(nats_server: LocalNats):
    async with yard(nats_server, workers=1, **SLOW) as place:
        await talking(place, 400)
        job_id = await in_slices(place)
        engine: Any = place.workers[0].worker.engine._engine
        os.kill(engine.process_id, signal.SIGKILL)
        (record,) = await place.ended(job_id, timeout_s=40.0)
        assert record.state is JobState.SUCCEEDED
        assert record.attempt == 2
        assert record.result is not None
        assert len(record.result.token_ids) == 5
        await eventually(place.lanes_empty)


async def test_a_job_in_slices_that_is_stopped_frees_the_engine_and_its_seat(nats_server: LocalNats):
    async with yard(nats_server, workers=1, **SLOW) as place:
        talk = await talking(place)
        job_id = await in_slices(place)
        worker = place.workers[0].worker
        assert worker.runs is not None
        next(run for run in worker.runs if run.job_id == job_id).stop()
        await eventually(lambda: len(worker.sequences) == 1, 1.0)
        assert entries(place.workers[0]) == []
        assert worker.budget.load().lower_prompt_tokens == 0
        for run in worker.runs:
            run.hand_back()
        assert talk


async def test_a_job_in_slices_ends_at_its_deadline(nats_server: LocalNats):
    async with yard(nats_server, workers=1, **SLOW) as place:
        await talking(place)
        now_s = place.workers[0].worker.snapshot().renewed_s
        job_id = await in_slices(place, contract={"deadline_s": now_s + 1.0})
        (record,) = await place.ended(job_id)
        assert record.state is JobState.EXPIRED
        assert record.error is not None
        assert record.error.message == "the deadline passed during prefill"


async def test_a_job_in_slices_is_handed_back_by_a_drain_and_goes_on_elsewhere(nats_server: LocalNats):
    async with yard(nats_server, workers=1, process__drain_s=0.3, **SLOW) as place:
        await talking(place)
        job_id = await in_slices(place)
        await place.start_worker("other")
        await place.workers[0].drain()
        (record,) = await place.ended(job_id)
        assert record.state is JobState.SUCCEEDED
        assert record.lineage[-1].owner != record.lineage[0].owner


async def test_the_lease_says_what_lower_lanes_may_have(nats_server: LocalNats):
    async with yard(nats_server, workers=1, **SLOW) as place:
        await talking(place, 100)
        lease = place.workers[0].worker.snapshot()
        assert lease.theta == 0.8
        assert lease.lower_tokens_per_s > 0.0
        assert lease.step_times.chunk_tokens == 32
        await eventually(lambda: 0.007 < place.workers[0].worker.snapshot().step_times.decode_s(1, 50) < 0.014)
        await eventually(lambda: place.workers[0].worker.snapshot().priority_tpot_p95_s > 0.0)
