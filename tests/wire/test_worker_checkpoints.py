"""Jobs whose worker goes away go on from their checkpoints: the same answer, and little of it computed twice."""

from __future__ import annotations

import math
import os
import signal
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from laneway.core import subjects
from laneway.core.job import JobRecord, Result, Sampling
from laneway.core.lanes import JobState, Lane, OnDisconnect
from laneway.runtime.checkpoints import CheckpointStore, writer_of
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.reading import subject_list
from laneway.runtime.wire.checkpoints import encode_checkpoint
from laneway.workers import metrics
from laneway.workers.checkpointing import TOKENS
from laneway.workers.run import JobRun
from tests.support.nats import REGION, eventually
from tests.support.worker import ByteDoor, RunningWorker, Yard, yard
from tests.support.worker_process import worker_process

pytestmark = [pytest.mark.wire, pytest.mark.timeout(120)]

QUICK: dict[str, Any] = {"nats__ack_wait_priority_s": 1.0, "nats__ack_wait_batch_s": 1.0, "engine__pace_s": 0.01}
PLAIN = Sampling(max_tokens=300, temperature=0.0)
WITH_LOGPROBS = Sampling(max_tokens=300, temperature=0.0, logprobs=True, top_logprobs=2)
SEEDED = Sampling(max_tokens=150, temperature=1.0, seed=7)
PENALISED = Sampling(max_tokens=150, temperature=0.0, repetition_penalty=1.2)


async def undisturbed(place: Yard, sampling: Sampling, prompt: bytes = b"Hello") -> Result:
    """The answer of a worker that nobody disturbs."""
    stored = await place.submit(sampling=sampling, prompt=prompt)
    (record,) = await place.ended(stored.record.job_id)
    assert record.result is not None
    assert record.attempt == 1
    return record.result


def same_answer(record: JobRecord, wanted: Result) -> None:
    assert record.state is JobState.SUCCEEDED, record.error
    assert record.result is not None
    assert (record.result.text, record.result.token_ids) == (wanted.text, wanted.token_ids)
    assert record.result.text_lengths == wanted.text_lengths
    assert record.result.logprobs == wanted.logprobs
    assert not any(math.isnan(each.logprob) for each in record.result.logprobs)


async def deltas(place: Yard, job_id: str) -> list[tuple[int, int]]:
    """(attempt, first index) of all that is stored of a job."""
    stream = subjects.checkpoint_stream(REGION)
    found = await subject_list(place.bus, stream, subjects.checkpoints_of(REGION, job_id))
    return sorted(subjects.checkpoint_parts(subject) for subject in found)


async def kept(place: Yard, job_id: str) -> int:
    """Tokens from which another worker would go on."""
    return len(await CheckpointStore(place.bus).read(await place.record(job_id)))


async def kept_at_least(place: Yard, job_id: str, tokens: int) -> None:
    async def enough() -> bool:
        return await kept(place, job_id) >= tokens

    await eventually(enough, 20)


async def removed(place: Yard, *job_ids: str) -> None:
    async def none() -> bool:
        return not any([await deltas(place, job_id) for job_id in job_ids])

    await eventually(none)


@dataclass
class Counted:
    """What a metric counted since this was made."""

    counter: Any
    lane: Lane = Lane.PRIORITY
    before: float = 0.0

    def __post_init__(self) -> None:
        self.before = self._now()

    def _now(self) -> float:
        return self.counter.labels("chat-small", self.lane.value)._value.get()

    @property
    def tokens(self) -> float:
        return self._now() - self.before


# --- killed ------------------------------------------------------------------------------------------


@pytest.mark.drill
async def test_detached_jobs_go_on_from_their_checkpoints_after_kill_9(nats_server: LocalNats, tmp_path: Path):
    async with yard(nats_server, **QUICK) as place:
        samplings = {"plain": PLAIN, "logprobs": WITH_LOGPROBS}
        async with worker_process(place.settings, tmp_path / "ready.json") as apart:
            ids = {
                name: (await place.submit(sampling=sampling, lane=Lane.BATCH)).record.job_id
                for name, sampling in samplings.items()
            }
            for job_id in ids.values():
                await kept_at_least(place, job_id, 2 * TOKENS)
            os.kill(apart.process.pid, signal.SIGKILL)
            await apart.process.wait()
        known = {name: await kept(place, job_id) for name, job_id in ids.items()}
        resumed = Counted(metrics.RESUMED, Lane.BATCH)
        await place.start_worker("taker")
        for name, job_id in ids.items():
            (record,) = await place.ended(job_id, timeout_s=60)
            assert [each.start_index for each in record.lineage] == [0, known[name]]
            assert record.lineage[1].begun
            same_answer(record, await undisturbed(place, samplings[name]))
        assert resumed.tokens == sum(known.values())
        await removed(place, *ids.values())


@pytest.mark.drill
async def test_jobs_that_cannot_be_resumed_start_again_cleanly(nats_server: LocalNats, tmp_path: Path):
    async with yard(nats_server, **QUICK) as place:
        async with worker_process(place.settings, tmp_path / "ready.json") as apart:
            ids = [(await place.submit(sampling=sampling)).record.job_id for sampling in (SEEDED, PENALISED)]
            plain = (await place.submit(sampling=PLAIN)).record.job_id
            await kept_at_least(place, plain, TOKENS)
            os.kill(apart.process.pid, signal.SIGKILL)
            await apart.process.wait()
        assert [await deltas(place, job_id) for job_id in ids] == [[], []]
        await place.start_worker("taker")
        for job_id, sampling in zip(ids, (SEEDED, PENALISED), strict=True):
            (record,) = await place.ended(job_id, timeout_s=60)
            assert [(each.start_index, each.begun) for each in record.lineage] == [(0, True), (0, True)]
            same_answer(record, await undisturbed(place, sampling))


@pytest.mark.drill
async def test_a_stale_worker_spoils_nothing(nats_server: LocalNats, tmp_path: Path):
    """It is stopped, taken over and wakes up; and even what it could write then would not count."""
    async with yard(nats_server, **QUICK) as place:
        async with (
            worker_process(place.settings, tmp_path / "stale.json", "stale") as stale,
            worker_process(place.settings, tmp_path / "taker.json", "taker") as taker,
        ):
            await place.tell(taker.id, drain={"draining": True})
            sampling = Sampling(max_tokens=900, temperature=0.0)
            job_id = (await place.submit(sampling=sampling)).record.job_id
            await kept_at_least(place, job_id, TOKENS)
            os.kill(stale.process.pid, signal.SIGSTOP)
            await place.tell(taker.id, drain={"draining": False})

            async def taken() -> bool:
                record = await place.record(job_id)
                return record.attempt == 2 and record.lineage[1].begun

            await eventually(taken, 30)
            record = await place.record(job_id)
            start = record.lineage[1].start_index
            assert start >= TOKENS
            await kept_at_least(place, job_id, start + TOKENS)
            os.kill(stale.process.pid, signal.SIGCONT)
            # As if it had written more of its own before it noticed: beyond the start of the other, and before it.
            for index in (0, start, start + TOKENS, start + 2 * TOKENS):
                subject = subjects.checkpoint(REGION, job_id, 1, index)
                if index:
                    await place.bus.store(subject, encode_checkpoint(writer_of(record, stale.id), (1,) * 200))
            await kept_at_least(place, job_id, start + 4 * TOKENS)
            forged = {(1, start), (1, start + TOKENS), (1, start + 2 * TOKENS)}
            assert all(index <= start for attempt, index in set(await deltas(place, job_id)) - forged if attempt == 1)
            os.kill(taker.process.pid, signal.SIGKILL)
            os.kill(stale.process.pid, signal.SIGKILL)
            await taker.process.wait()
            known = await kept(place, job_id)
        await place.start_worker("third")
        (record,) = await place.ended(job_id, timeout_s=60)
        assert [each.start_index for each in record.lineage] == [0, start, known]
        same_answer(record, await undisturbed(place, sampling))


async def test_a_checkpoint_that_comes_after_its_job_was_taken_up_is_removed_with_the_others(nats_server: LocalNats):
    """Its writer could not be heard for a while; the taker found none, and writes none itself."""
    async with yard(nats_server, workers=1, **QUICK) as place:
        job_id = (await place.submit(sampling=Sampling(max_tokens=TOKENS - 2, temperature=0.0))).record.job_id
        await eventually(lambda: place.workers[0].worker.sequences.stats().running == 1)
        before = await place.record(job_id)
        await place.workers[0].die()
        await place.start_worker("taker")

        async def taken() -> bool:
            return (await place.record(job_id)).attempt == 2

        await eventually(taken, 30)
        late = encode_checkpoint(writer_of(before, before.owner), (1,) * 3)
        await place.bus.store(subjects.checkpoint(REGION, job_id, 1, 0), late)
        (record,) = await place.ended(job_id, timeout_s=60)
        assert record.state is JobState.SUCCEEDED

        async def none_is_left() -> bool:
            return not await deltas(place, job_id)

        assert await eventually(none_is_left)


@pytest.mark.slow
async def test_a_kept_job_whose_worker_and_door_both_die_goes_on(nats_server: LocalNats):
    async with yard(nats_server, workers=1, **QUICK) as place:
        async with ByteDoor(place.bus) as door:
            keep = {"on_disconnect": OnDisconnect.KEEP}
            longer = Sampling(max_tokens=1000, temperature=0.0)  # than a door may be silent
            ids = [
                (await place.submit(caller_at=door, sampling=sampling, contract=contract)).record.job_id
                for sampling, contract in ((PLAIN, keep), (longer, {}))
            ]
            await kept_at_least(place, ids[0], 2 * TOKENS)
            assert await deltas(place, ids[1]) == [], "the door holds those"
            await place.workers[0].die()
        known = await kept(place, ids[0])
        await place.start_worker("taker")
        record, dropped = await place.ended(*ids, timeout_s=60)
        assert [each.start_index for each in record.lineage] == [0, known]
        same_answer(record, await undisturbed(place, PLAIN))
        assert (dropped.state, dropped.error.reason if dropped.error else "") == (JobState.CANCELLED, "CALLER_GONE")


# --- given back --------------------------------------------------------------------------------------


async def generated(running: RunningWorker, job_id: str, tokens: int) -> None:
    runs = running.worker.runs
    assert runs is not None
    await eventually(lambda: isinstance(run := runs.running(job_id), JobRun) and run.generated >= tokens)


async def test_nothing_that_was_computed_is_lost_by_a_drain(nats_server: LocalNats):
    """Also of an attached job, and the log probabilities, which its door does not hold."""
    async with (
        yard(nats_server, workers=1, engine__pace_s=0.004, process__drain_s=0.0) as place,
        ByteDoor(place.bus) as door,
    ):
        first = place.workers[0]
        wanted = await undisturbed(place, WITH_LOGPROBS)
        ids = [
            (await place.submit(sampling=WITH_LOGPROBS)).record.job_id,
            (await place.submit(sampling=WITH_LOGPROBS, caller_at=door)).record.job_id,
        ]
        for job_id in ids:
            await generated(first, job_id, TOKENS + 5)
        await first.drain()
        back = [await place.record(job_id) for job_id in ids]
        assert [(r.state, r.clean) for r in back] == [(JobState.WAITING, 1)] * 2
        assert [r.checkpoint_index for r in back] == [await kept(place, job_id) for job_id in ids]
        assert min(r.checkpoint_index for r in back) >= TOKENS + 5
        again = Counted(metrics.RECOMPUTED)
        door.following[ids[0]] = 0  # somebody begins to watch it from its first token
        await place.start_worker("second")
        ended = await place.ended(*ids)
        for record, before in zip(ended, back, strict=True):
            assert record.lineage[1].start_index == before.checkpoint_index
            same_answer(record, wanted)
        assert again.tokens == 0
        await eventually(lambda: [tuple(door.ids(job_id)) for job_id in ids] == [wanted.token_ids] * 2)
        await removed(place, *ids)


@pytest.mark.slow
async def test_nothing_that_was_computed_is_lost_by_a_crash_of_the_engine(nats_server: LocalNats):
    async with yard(nats_server, workers=1, engine__fault_crash_step=200, engine__pace_s=0.004) as place:
        job_id = (await place.submit(sampling=PLAIN)).record.job_id
        (record,) = await place.ended(job_id, timeout_s=60)
        assert (record.attempt, record.starts - record.clean) == (2, 2)
        assert record.lineage[1].start_index == record.checkpoint_index >= 198
        assert record.result is not None
        assert len(record.result.token_ids) == 300
    async with yard(nats_server, workers=1) as place:
        same_answer(record, await undisturbed(place, PLAIN))


@pytest.mark.slow
async def test_a_job_that_is_handed_on_many_times_is_still_one_answer(nats_server: LocalNats):
    async with yard(nats_server, engine__pace_s=0.02, process__drain_s=0.0) as place:
        job_id = (await place.submit(sampling=PLAIN)).record.job_id
        for turn in range(4):
            running = await place.start_worker(f"w{turn}")
            await generated(running, job_id, (await place.record(job_id)).checkpoint_index + 5)
            await running.drain()
        await place.start_worker("last")
        (record,) = await place.ended(job_id)
        starts = [each.start_index for each in record.lineage]
        assert len(starts) == 5
        assert all(later >= sooner + 5 for sooner, later in pairwise(starts))
        same_answer(record, await undisturbed(place, PLAIN))
