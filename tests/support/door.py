"""A scripted AdmissionService on a real gRPC server with the runtime's edge: for tests of whatever calls a door."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from laneway.core.errors import JobNotFound, LanewayError
from laneway.core.job import Verdict
from laneway.core.lanes import Lane, VerdictKind
from laneway.runtime.grpc_server import GrpcServer
from laneway.runtime.settings import GrpcSettings, Settings
from laneway.runtime.wire import jobs
from laneway.v1 import admission_pb2, admission_pb2_grpc, common_pb2, task_pb2

SERVICE = admission_pb2.DESCRIPTOR.services_by_name["AdmissionService"].full_name
VERDICT = Verdict(VerdictKind.ACCEPTED, "LANE_OPEN", "accepted", Lane.PRIORITY, region="local", pool="chat-small")

Event = admission_pb2.GenerateResponse
Script = Callable[[Any, grpc.aio.ServicerContext], AsyncIterator[Event]]  # Any: a Generate or a Watch request


def accepted(job_id: str = "local-job") -> Event:
    return Event(accepted=admission_pb2.Accepted(job_id=job_id, verdict=jobs.verdict_to_proto(VERDICT)))


def chunk(first_index: int, *words: str, output: int = 0) -> Event:
    """A chunk with one token a word."""
    ids = range(first_index, first_index + len(words))
    return Event(chunk=task_pb2.Chunk(first_index=first_index, token_ids=ids, text="".join(words), output=output))


def finished(job_id: str = "local-job", tokens: int = 0) -> Event:
    return Event(
        finished=admission_pb2.Finished(
            job_id=job_id,
            state=common_pb2.JOB_STATE_SUCCEEDED,
            finish_reason=common_pb2.FINISH_REASON_STOP,
            usage=common_pb2.Usage(prompt_tokens=3, completion_tokens=tokens),
            attempt=1,
        )
    )


async def words(*answer: str) -> AsyncIterator[Event]:
    """An answer of one token a chunk."""
    yield accepted()
    for index, word in enumerate(answer):
        yield chunk(index, word)
    yield finished(tokens=len(answer))


@dataclass
class Door(admission_pb2_grpc.AdmissionServiceServicer):
    """Answers each call with the next of its scripts; the last one goes on. Keeps what it was asked."""

    scripts: list[Script] = field(default_factory=list)
    submits: list[LanewayError | None] = field(default_factory=list)  # None: accepted
    jobs: list[admission_pb2.Job] = field(default_factory=list)
    calls: list[admission_pb2.GenerateRequest] = field(default_factory=list)
    submitted: list[admission_pb2.SubmitRequest] = field(default_factory=list)
    watched: list[admission_pb2.WatchRequest] = field(default_factory=list)
    watches: list[Script] = field(default_factory=list)
    listed: list[admission_pb2.ListJobsRequest] = field(default_factory=list)
    manys: list[Callable[[Any], Awaitable[None]]] = field(default_factory=list)  # by call of SubmitMany; bytes in
    many_calls: int = 0
    time_left_s: list[float | None] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # a caller ended its stream
    address: str = ""
    server: GrpcServer | None = None

    async def Generate(self, request, context):
        self.calls.append(request)
        self.time_left_s.append(context.time_remaining())
        script = self.scripts[min(len(self.calls), len(self.scripts)) - 1]
        async for event in self._noticed(script(request, context)):
            yield event

    async def Watch(self, request, context):
        self.watched.append(request)
        script = self.watches[min(len(self.watched), len(self.watches)) - 1]
        async for event in self._noticed(script(request, context)):
            yield admission_pb2.WatchResponse.FromString(event.SerializeToString())

    async def Submit(self, request, context):
        self.submitted.append(request)
        self.time_left_s.append(context.time_remaining())
        outcome = self.submits[min(len(self.submitted), len(self.submits)) - 1] if self.submits else None
        if outcome is not None:
            raise outcome
        return admission_pb2.SubmitResponse(job_id="local-job", verdict=jobs.verdict_to_proto(VERDICT))

    async def SubmitMany(self, requests, context):  # type: ignore[override]  # aio's other style
        script = self.manys[min(self.many_calls, len(self.manys) - 1)]
        self.many_calls += 1
        await script(context)

    async def GetJob(self, request, context):
        for job in self.jobs:
            if job.job_id == request.job_id:
                return admission_pb2.GetJobResponse(job=job)
        raise JobNotFound("there is no such job")

    async def ListJobs(self, request, context):
        self.listed.append(request)
        start = int(request.page_token or 0)
        end = start + request.page_size
        more = str(end) if end < len(self.jobs) else ""
        return admission_pb2.ListJobsResponse(jobs=self.jobs[start:end], next_page_token=more)

    async def CancelJob(self, request, context):
        return admission_pb2.CancelJobResponse(state=common_pb2.JOB_STATE_CANCELLED)

    async def Quote(self, request, context):
        return admission_pb2.QuoteResponse(
            verdict=jobs.verdict_to_proto(VERDICT),
            prompt_tokens=7,
            max_tokens=request.spec.generate.sampling.max_tokens,
        )

    async def ListDeadLetters(self, request, context):
        raise NotImplementedError

    async def RequeueDeadLetter(self, request, context):
        raise NotImplementedError

    async def PurgeDeadLetters(self, request, context):
        raise NotImplementedError

    async def _noticed(self, events: AsyncIterator[Event]) -> AsyncIterator[Event]:
        try:
            async for event in events:
                yield event
        except (asyncio.CancelledError, GeneratorExit):
            self.gone.set()
            raise


@asynccontextmanager
async def serving(door: Door, grpc_settings: GrpcSettings | None = None) -> AsyncIterator[Door]:
    """The door on a free port."""
    door.server = GrpcServer(Settings(grpc=grpc_settings or GrpcSettings()))
    door.server.add(SERVICE, lambda server: admission_pb2_grpc.add_AdmissionServiceServicer_to_server(door, server))
    door.address = await door.server.start("127.0.0.1:0")
    try:
        yield door
    finally:
        await door.server.drain(0.0)


async def forever() -> None:
    await asyncio.Event().wait()
