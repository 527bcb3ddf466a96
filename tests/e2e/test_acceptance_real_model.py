"""The composed stack with the real model in exact mode: one text whichever way in and whoever else runs, and bad input
that harms only itself."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc.aio
import psutil
import pytest
import pytest_asyncio

from laneway.cli.stack import LocalStack, StackOptions
from laneway.client import Client, JobCancelled, JobState, Lane, RequestFields
from laneway.client.request import build_spec
from laneway.runtime.clock import SystemClock
from laneway.v1 import admission_pb2 as pb
from laneway.v1 import admission_pb2_grpc, common_pb2, task_pb2
from tests.support.bad_requests import GROUPS, ODD, refusal_of
from tests.support.producer import Producer, producer

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.model,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(180),
]

SLOTS = 16
OPTIONS = StackOptions(
    workers=1,
    settings={
        # No slot is kept for priority, so that sixteen sequences of all lanes really share each step.
        "models": [{"name": "chat", "exact": True, "slots": SLOTS, "workers": 1}],
        "policy": {"priority_reserved_slots": 0},
        "process": {"drain_s": 3.0},
    },
)
QUESTION: RequestFields = {
    "model": "chat",
    "messages": [
        {"role": "system", "content": "You answer briefly."},
        {"role": "user", "content": "Name three rivers of Europe."},
    ],
    "temperature": 0.0,
    "max_tokens": 24,
}
PATIENT: RequestFields = {  # what a slow machine needs; and nobody is kept out of the batch for a target's sake
    "model": "chat",
    "ttft_target_s": 600.0,
    "tpot_target_s": 10.0,
    "deadline_s": 900.0,
}
_numbers = itertools.count()
WAYS = ("attached", "detached", "ingested", "ingested as json")


def question(lane: Lane) -> RequestFields:
    return {**QUESTION, **PATIENT, "lane": lane}


@dataclass
class Running:
    """A stack that serves the real model, and the two kinds of callers."""

    stack: LocalStack
    client: Client
    producer: Producer

    async def text(self, way: str) -> str:
        """The answer to QUESTION, which went in and came out that way."""
        if way == "attached":
            async with self.client.generate(**question(Lane.PRIORITY)) as stream:
                return await stream.text()
        if way == "detached":
            job_id = (await self.client.submit(**question(Lane.DEFERRABLE))).job_id
        else:
            job_id = await self.ingested(json=way.endswith("json"))
        job = await self.client.wait(job_id, timeout_s=120)
        assert job.state is JobState.SUCCEEDED, job.error
        assert job.attempt == 1
        assert job.result is not None
        return job.result.text

    async def ingested(self, *, json: bool) -> str:
        key = f"question-{next(_numbers)}"
        spec = build_spec(question(Lane.BATCH), SystemClock().now())
        await self.producer.publish(key, spec, Lane.BATCH, json=json)
        verdict = await self.producer.verdict(key)
        assert not verdict.HasField("error"), verdict.error
        return verdict.job_id

    async def few_words(self) -> str:
        """A small answer, always the same."""
        async with self.client.generate(model="chat", prompt="The sea is", temperature=0.0, max_tokens=2) as stream:
            return await stream.text()

    def processes(self) -> dict[int, float]:
        """The worker and what it started, its engine among them, with their times of birth."""
        worker = psutil.Process(self.stack.workers[0].pid)
        return {p.pid: p.create_time() for p in (worker, *worker.children(recursive=True))}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Running]:
    async with (
        LocalStack(OPTIONS) as stack,
        Client(stack.addresses.admission) as client,
        producer(stack.addresses.nats, nkeys=stack.nkeys) as made,
    ):
        yield Running(stack, client, made)


# --- one text --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def texts() -> set[str]:
    """Every text that QUESTION was answered with."""
    return set()


@pytest.mark.parametrize("way", WAYS)
async def test_the_same_prompt_has_the_same_text_whichever_way_in(running: Running, texts: set[str], way: str):
    texts.add(await running.text(way))
    assert len(texts) == 1
    assert all(texts)


async def test_the_same_prompt_has_the_same_text_beside_15_others_of_all_lanes(running: Running, texts: set[str]):
    others = SLOTS - len(WAYS)
    async with beside(running, others) as job_ids:
        texts.update(await asyncio.gather(*map(running.text, WAYS)))
        states = [(await running.client.get_job(job_id)).state for job_id in job_ids]
        assert states == [JobState.RUNNING] * others, "the others ran all the while"
    assert len(texts) == 1


@asynccontextmanager
async def beside(running: Running, count: int) -> AsyncIterator[list[str]]:
    """So many others of all lanes that decode until the block ends; their prompts and ages differ."""
    client, started = running.client, asyncio.Queue[str]()
    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(decode_on(client, started, number))
        job_ids = [await started.get() for _ in range(count)]
        yield job_ids
        for job_id in job_ids:
            await client.cancel(job_id)


async def decode_on(client: Client, started: asyncio.Queue[str], number: int) -> None:
    """One of the others: says its job id once it has its first token, and reads until somebody cancels the job."""
    lane = list(Lane)[number % len(Lane)]
    request: RequestFields = {
        **PATIENT,
        "prompt": f"Story {number}: " + "once upon a time, " * (number * 2),
        "temperature": 0.0 if number % 2 else 0.8,
        "max_tokens": 900,
        "ignore_eos": True,
        "lane": lane,
    }
    if lane is Lane.PRIORITY:
        stream = client.generate(**request)
    else:
        stream = client.watch((await client.submit(**request)).job_id)
    async with stream:
        await anext(stream)
        started.put_nowait(stream.job_id)
        with pytest.raises(JobCancelled):
            await stream.text()


# --- bad input -------------------------------------------------------------------------------------


@pytest_asyncio.fixture(loop_scope="module")
async def channel(running: Running) -> AsyncIterator[grpc.aio.Channel]:
    """A channel that sends bytes as they are, however many."""
    limits = [("grpc.max_send_message_length", -1), ("grpc.max_metadata_size", 2**24)]
    async with grpc.aio.insecure_channel(running.stack.addresses.admission, options=limits) as made:
        yield made


@pytest.mark.parametrize("group", GROUPS)
async def test_bad_input_is_refused_naming_the_field_and_harms_nobody(
    running: Running, channel: grpc.aio.Channel, group: str
):
    processes, right = running.processes(), await running.few_words()
    for case in GROUPS[group]:
        for _ in range(2):  # what is refused once and taken the next time ends engines
            refusal = await refusal_of(channel, case)
            assert refusal is not None, f"{case.name} was served"
            assert (refusal.code, refusal.fields) == (case.code, case.fields), f"{case.name}: {refusal}"
        assert await running.few_words() == right, f"after {case.name}"
    assert running.processes() == processes


@pytest.mark.parametrize("name", ODD)
async def test_odd_input_that_has_a_meaning_is_served(running: Running, name: str):
    processes, right = running.processes(), await running.few_words()
    wanted = task_pb2.JobSpec.FromString(ODD[name].SerializeToString())
    wanted.generate.sampling.max_tokens = 3
    channel = grpc.aio.insecure_channel(running.stack.addresses.admission)
    async with channel:
        stub = admission_pb2_grpc.AdmissionServiceStub(channel)
        events = [event async for event in stub.Generate(pb.GenerateRequest(spec=wanted), timeout=60)]
    assert events[-1].finished.finish_reason in (common_pb2.FINISH_REASON_LENGTH, common_pb2.FINISH_REASON_STOP)
    assert await running.few_words() == right
    assert running.processes() == processes
