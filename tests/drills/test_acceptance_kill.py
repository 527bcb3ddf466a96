"""Parts of a running stack are killed or told to go while callers are attached: no caller notices more than a pause."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import pytest

from laneway.cli.stack import LocalStack, StackOptions
from laneway.client import (
    Client,
    Job,
    JobState,
    Lane,
    OnDisconnect,
    RequestFields,
    RetryParams,
    SchedulerClient,
    TokenStream,
)
from laneway.workers.checkpointing import TOKENS as CHECKPOINT_TOKENS
from tests.support.nats import eventually
from tests.support.producer import producer

pytestmark = [pytest.mark.e2e, pytest.mark.drill, pytest.mark.timeout(240)]

PATIENT: RequestFields = {"model": "chat", "ttft_target_s": 600.0, "deadline_s": 900.0}  # what a slow machine needs
ACK_WAIT_S = {"priority": 3.0, "deferrable": 3.0, "batch": 3.0}
TOKENS = 80
# A door needs a second to start again; by default the client gives up on an unreachable one before that.
PATIENCE = RetryParams(attempts_max=dict.fromkeys(Lane, 100), floor_per_s=10.0)


@dataclass
class Caller:
    """One attached caller, who checks that every index comes once and in order."""

    request: RequestFields
    job_id: str = ""
    indices: list[int] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    attempt: int = 0

    @property
    def text(self) -> str:
        return "".join(self.parts)

    async def call(self, stream: TokenStream) -> None:
        async with stream:
            async for chunk in stream:
                self.job_id = stream.job_id
                self.indices += range(chunk.first_index, chunk.first_index + len(chunk.token_ids))
                self.parts.append(chunk.text)
        self.attempt = stream.finished.attempt
        assert self.indices == list(range(stream.finished.usage.completion_tokens))


def question(
    number: int,
    *,
    lane: Lane = Lane.PRIORITY,
    max_tokens: int = TOKENS,
    on_disconnect: OnDisconnect | None = None,
) -> RequestFields:
    request: RequestFields = {
        **PATIENT,
        "messages": [{"role": "user", "content": f"Tell me a story about the number {number}."}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "lane": lane,
    }
    if on_disconnect is not None:
        request["on_disconnect"] = on_disconnect
    return request


async def answers(client: Client, numbers: range) -> dict[int, str]:
    """The undisturbed answers."""
    callers = {number: Caller(question(number)) for number in numbers}
    await asyncio.gather(*(caller.call(client.generate(**caller.request)) for caller in callers.values()))
    assert all(caller.attempt == 1 for caller in callers.values())
    return {number: caller.text for number, caller in callers.items()}


# --- kill -9 of a worker ---------------------------------------------------------------------------

SLOTS = 4  # fewer than there are callers: both workers run some of them
SLOW = {"pace_s": 0.03}
KINDS = {
    "openvino": {"name": "chat", "exact": True, "slots": SLOTS, "workers": 2},
    "simulated": {"name": "chat", "engine": "simulated", "slots": SLOTS, "workers": 2, "engine_options": SLOW},
}


@pytest.mark.parametrize("kind", ["simulated", pytest.param("openvino", marks=pytest.mark.model)])
async def test_answers_survive_kill_9_of_a_worker_word_for_word_and_detached_jobs_end_once(kind: str):
    options = StackOptions(settings={"models": [KINDS[kind]], "process": {"drain_s": 3.0}}, ack_wait_s=ACK_WAIT_S)
    async with (
        LocalStack(options) as stack,
        Client(stack.addresses.admission) as client,
        producer(stack.addresses.nats, nkeys=stack.nkeys) as watcher,
    ):
        numbers = range(6)
        undisturbed = await answers(client, numbers)
        before = watcher.ends.total()
        callers = {number: Caller(question(number)) for number in numbers}
        async with asyncio.TaskGroup() as group:
            for caller in callers.values():
                group.create_task(caller.call(client.generate(**caller.request)))
            await eventually(lambda: all(len(caller.indices) >= 5 for caller in callers.values()), timeout_s=60)
            detached = [
                (await client.submit(**question(n, lane=lane))).job_id
                for n in numbers
                for lane in (Lane.DEFERRABLE, Lane.BATCH)
            ]
            stack.workers[0].kill()
            assert all(len(caller.indices) < TOKENS for caller in callers.values()), "it died in the middle"
        assert {number: caller.text for number, caller in callers.items()} == undisturbed
        assert {caller.attempt for caller in callers.values()} == {1, 2}, "some ran on the dead worker, some did not"
        for index, job_id in enumerate(detached):
            job = await client.wait(job_id, timeout_s=120)
            assert job.state is JobState.SUCCEEDED, job.error
            assert job.result is not None
            assert job.result.text == undisturbed[numbers[index // 2]]
        await eventually(lambda: watcher.ends.total() >= before + len(callers) + len(detached))
        job_ids = [*(caller.job_id for caller in callers.values()), *detached]
        assert {job_id: watcher.ends[job_id] for job_id in job_ids} == dict.fromkeys(job_ids, 1)
        assert Counter(watcher.terminal_writes[job_id] for job_id in job_ids) == {1: len(job_ids)}


LONG = 240  # tokens: several checkpoints
SEEN = 100  # when the worker is killed


@pytest.mark.parametrize("kind", ["simulated", pytest.param("openvino", marks=pytest.mark.model)])
async def test_a_detached_job_that_is_killed_in_mid_decode_goes_on_from_its_checkpoint_word_for_word(kind: str):
    options = StackOptions(settings={"models": [KINDS[kind]], "process": {"drain_s": 3.0}}, ack_wait_s=ACK_WAIT_S)
    async with (
        LocalStack(options) as stack,
        Client(stack.addresses.admission) as client,
        SchedulerClient(stack.addresses.scheduler) as scheduler,
    ):
        whole = Caller(question(0, max_tokens=LONG))
        await whole.call(client.generate(**whole.request))
        job_id = (await client.submit(**question(0, lane=Lane.BATCH, max_tokens=LONG))).job_id
        seen = 0
        async with client.watch(job_id) as stream:
            async for chunk in stream:
                seen = chunk.first_index + len(chunk.token_ids)
                if seen >= SEEN:
                    break
        owner = (await claims(scheduler, job_id))[0]["worker"]
        pids = {worker.worker_id: worker.process_id async for worker in scheduler.list_workers()}
        next(child for child in stack.workers if child.pid == pids[owner]).kill()
        job = await client.wait(job_id, timeout_s=120)
        assert job.state is JobState.SUCCEEDED, job.error
        assert job.result is not None
        assert (job.attempt, job.result.text) == (2, whole.text)
        first, second = await claims(scheduler, job_id)
        assert first["worker"] != second["worker"]
        # At most what came since the last delta was computed again; a slow machine may be some deltas behind.
        assert seen - 2 * CHECKPOINT_TOKENS <= int(second["start_index"]) < LONG


async def claims(scheduler: SchedulerClient, job_id: str) -> list[dict[str, str]]:
    """What is told of each attempt."""
    steps = (await scheduler.explain_job(job_id)).steps
    return [dict(step.facts) for step in steps if step.action == "claimed"]


# --- SIGTERM of a worker ---------------------------------------------------------------------------


async def test_a_worker_that_is_told_to_go_finishes_what_it_runs_and_takes_nothing_more():
    settings = {"models": [KINDS["simulated"]], "process": {"drain_s": 20.0}}
    async with LocalStack(StackOptions(settings=settings)) as stack, Client(stack.addresses.admission) as client:
        undisturbed = await answers(client, range(8))
        callers = {number: Caller(question(number)) for number in range(8)}
        leaving, staying = stack.workers
        async with asyncio.TaskGroup() as group, SchedulerClient(stack.addresses.scheduler) as scheduler:
            for caller in callers.values():
                group.create_task(caller.call(client.generate(**caller.request)))
            await eventually(lambda: all(len(caller.indices) >= 3 for caller in callers.values()), timeout_s=60)
            leaving.signal(signal.SIGTERM)
            await eventually(lambda: _only_ready(scheduler, staying.pid))
            late = [await client.submit(**question(number, lane=Lane.DEFERRABLE)) for number in range(8)]
        assert {number: caller.text for number, caller in callers.items()} == undisturbed
        assert {caller.attempt for caller in callers.values()} == {1}, "none was interrupted"
        assert await asyncio.wait_for(leaving.wait(), 30) == 0
        for number, submitted in enumerate(late):
            job = await client.wait(submitted.job_id, timeout_s=60)
            assert job.result is not None
            assert (job.attempt, job.result.text) == (1, undisturbed[number])


async def test_what_a_leaving_worker_cannot_finish_goes_on_elsewhere_word_for_word():
    settings = {"models": [KINDS["simulated"]], "process": {"drain_s": 0.3}}
    async with LocalStack(StackOptions(settings=settings)) as stack, Client(stack.addresses.admission) as client:
        undisturbed = await answers(client, range(8))
        callers = {number: Caller(question(number)) for number in range(8)}
        leaving = stack.workers[0]
        async with asyncio.TaskGroup() as group:
            for caller in callers.values():
                group.create_task(caller.call(client.generate(**caller.request)))
            await eventually(lambda: all(len(caller.indices) >= 3 for caller in callers.values()), timeout_s=60)
            leaving.signal(signal.SIGTERM)
        assert {number: caller.text for number, caller in callers.items()} == undisturbed
        assert {caller.attempt for caller in callers.values()} == {1, 2}, "some were handed over"
        assert await asyncio.wait_for(leaving.wait(), 30) == 0


async def _only_ready(scheduler: SchedulerClient, pid: int) -> bool:
    ready = [worker.process_id async for worker in scheduler.list_workers() if worker.state == "READY"]
    return ready == [pid]


# --- kill -9 of the door ---------------------------------------------------------------------------


async def test_a_watch_goes_on_through_a_new_door_from_where_it_was():
    settings = {"models": [KINDS["simulated"]], "process": {"drain_s": 3.0}}
    async with (
        LocalStack(StackOptions(settings=settings)) as stack,
        Client(stack.addresses.admission, retry_budget=PATIENCE) as client,
    ):
        undisturbed = await answers(client, range(2))
        callers = {number: Caller(question(number)) for number in range(2)}
        async with asyncio.TaskGroup() as group:
            for number, caller in callers.items():
                submitted = await client.submit(**question(number, lane=Lane.DEFERRABLE))
                group.create_task(caller.call(client.watch(submitted.job_id)))
            await eventually(lambda: all(len(caller.indices) >= 5 for caller in callers.values()), timeout_s=60)
            stack.child("admission").kill()
            await stack.child("admission").wait()
            await stack.restart("admission")
        assert {number: caller.text for number, caller in callers.items()} == undisturbed
        assert {caller.attempt for caller in callers.values()} == {1}, "the job itself noticed nothing"


async def test_attached_jobs_of_a_dead_door_end_or_go_on_as_their_contracts_say():
    settings = {"models": [KINDS["simulated"]], "process": {"drain_s": 3.0}}
    async with (
        LocalStack(StackOptions(settings=settings)) as stack,
        Client(stack.addresses.admission, retry_budget=PATIENCE) as client,
        AsyncExitStack() as callers,
    ):
        job_ids: dict[OnDisconnect, str] = {}
        for number, kind in enumerate(OnDisconnect):
            tokens = 4000 if kind is OnDisconnect.CANCEL else 200
            request = question(number, max_tokens=tokens, on_disconnect=kind)
            stream = await callers.enter_async_context(client.generate(**request))
            await anext(stream)
            job_ids[kind] = stream.job_id
        stack.child("admission").kill()
        await stack.child("admission").wait()
        await stack.restart("admission")

        async def ended(kind: OnDisconnect) -> Job | None:
            job = await client.get_job(job_ids[kind])
            return job if job.state.terminal else None

        cancelled = await eventually(lambda: ended(OnDisconnect.CANCEL), timeout_s=60)
        kept = await eventually(lambda: ended(OnDisconnect.KEEP), timeout_s=60)
    assert (cancelled.state, cancelled.attempt) == (JobState.CANCELLED, 1)
    assert (kept.state, kept.attempt) == (JobState.SUCCEEDED, 1)
    assert kept.result is not None
    assert len(kept.result.token_ids) == 200
