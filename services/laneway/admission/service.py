"""The gRPC front: AdmissionService's messages to core values and back. Decides nothing."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterable
from typing import TypeAlias

import grpc.aio

from laneway.admission.answers import Answer
from laneway.admission.application import Admission, Request
from laneway.admission.chores import Chores
from laneway.admission.dead_letter_calls import DeadLetterCalls
from laneway.admission.dead_letters import DeadLetters
from laneway.admission.many import Context as ManyContext
from laneway.admission.many import ManyCall
from laneway.admission.results import JobFilter
from laneway.core.catalogue import Catalogue
from laneway.core.clock import Clock
from laneway.runtime.auth import current_caller
from laneway.runtime.live_policy import LivePolicy
from laneway.runtime.wire import checks, enums, jobs
from laneway.runtime.wire.requests import ParsedSpec, parse_spec
from laneway.runtime.wire.responses import finished_of, record_to_job
from laneway.runtime.wire.times import timestamp_of
from laneway.v1 import admission_pb2 as pb
from laneway.v1 import task_pb2

SERVICE = pb.DESCRIPTOR.services_by_name["AdmissionService"].full_name

StreamContext: TypeAlias = grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]
WatchContext: TypeAlias = grpc.aio.ServicerContext[pb.WatchRequest, pb.WatchResponse]


class AdmissionService(DeadLetterCalls):
    def __init__(
        self,
        admission: Admission,
        dead_letters: DeadLetters,
        catalogue: Catalogue,
        policy: LivePolicy,
        clock: Clock,
        chores: Chores,
        draining: asyncio.Event,
    ) -> None:
        self._admission = admission
        self._dead_letters = dead_letters
        self._catalogue = catalogue
        self._policy = policy
        self._clock = clock
        self._chores = chores
        self._draining = draining  # set once this process takes nothing more

    # --- streams: coroutines that write serialised messages, aio's cheaper style ----------------------

    async def Generate(self, request: pb.GenerateRequest, context: StreamContext) -> None:  # type: ignore[override]
        wanted = self._request(request, request.spec, request.idempotency_key, attached=True, context=context)
        async with self._admission.generate(current_caller(), wanted) as answer:
            await _write(answer, context)

    async def Watch(self, request: pb.WatchRequest, context: WatchContext) -> None:  # type: ignore[override]
        checks.no_unknown_fields(request, "request")
        given = tuple(request.delivered_ids)
        async with self._admission.watch(current_caller(), request.job_id, request.from_index, given) as answer:
            await _write(answer, context)

    async def SubmitMany(  # type: ignore[override]
        self, requests: AsyncIterable[pb.SubmitManyRequest], context: ManyContext
    ) -> None:
        caller = current_caller()

        async def submit(item: pb.SubmitManyItem) -> pb.SubmitResponse:
            wanted = self._request(item, item.spec, item.idempotency_key, attached=False)
            record = await self._admission.submit_here(caller, wanted)
            return pb.SubmitResponse(job_id=record.job_id, verdict=jobs.verdict_to_proto(record.verdict))

        await ManyCall(context, submit, self._chores, self._draining).run()

    # --- one answer ----------------------------------------------------------------------------------

    async def Submit(
        self, request: pb.SubmitRequest, context: grpc.aio.ServicerContext[pb.SubmitRequest, pb.SubmitResponse]
    ) -> pb.SubmitResponse:
        wanted = self._request(request, request.spec, request.idempotency_key, attached=False)
        record = await self._admission.submit(current_caller(), wanted)
        return pb.SubmitResponse(job_id=record.job_id, verdict=jobs.verdict_to_proto(record.verdict))

    async def GetJob(
        self, request: pb.GetJobRequest, context: grpc.aio.ServicerContext[pb.GetJobRequest, pb.GetJobResponse]
    ) -> pb.GetJobResponse:
        checks.no_unknown_fields(request, "request")
        view = await self._admission.book.get(current_caller(), request.job_id)
        return pb.GetJobResponse(job=record_to_job(view.record, view.state, include_result=True))

    async def ListJobs(
        self, request: pb.ListJobsRequest, context: grpc.aio.ServicerContext[pb.ListJobsRequest, pb.ListJobsResponse]
    ) -> pb.ListJobsResponse:
        checks.no_unknown_fields(request, "request")
        wanted = JobFilter(
            lane=checks.word(enums.LANE_FROM_WIRE, request.lane, None, "lane"),
            state=checks.word(enums.JOB_STATE_FROM_WIRE, request.state, None, "state"),
            labels=dict(request.labels),
        )
        page, token = await self._admission.book.page(current_caller(), wanted, request.page_size, request.page_token)
        return pb.ListJobsResponse(
            jobs=[record_to_job(view.record, view.state) for view in page], next_page_token=token
        )

    async def CancelJob(
        self, request: pb.CancelJobRequest, context: grpc.aio.ServicerContext[pb.CancelJobRequest, pb.CancelJobResponse]
    ) -> pb.CancelJobResponse:
        checks.no_unknown_fields(request, "request")
        record = await self._admission.book.cancel(current_caller(), request.job_id)
        return pb.CancelJobResponse(
            state=enums.JOB_STATE_TO_WIRE[record.state], ended_at=timestamp_of(record.timings.ended_s)
        )

    async def Quote(
        self, request: pb.QuoteRequest, context: grpc.aio.ServicerContext[pb.QuoteRequest, pb.QuoteResponse]
    ) -> pb.QuoteResponse:
        checks.no_unknown_fields(request, "request")
        quote = await self._admission.quote(current_caller(), self._parsed(request.spec, attached=True))
        return pb.QuoteResponse(
            verdict=jobs.verdict_to_proto(quote.verdict),
            prompt_tokens=quote.prompt_tokens,
            max_tokens=quote.max_tokens,
        )

    # --- in ------------------------------------------------------------------------------------------

    def _request(
        self,
        request: pb.GenerateRequest | pb.SubmitRequest | pb.SubmitManyItem,
        spec: task_pb2.JobSpec,
        key: str,
        *,
        attached: bool,
        context: StreamContext | None = None,
    ) -> Request:
        checks.no_unknown_fields(request, "request")
        return Request(
            spec=self._parsed(spec, attached=attached),
            digest=digest_of(spec),
            key=checks.idempotency_key(key),
            time_remaining_s=context.time_remaining() if context is not None else None,
        )

    def _parsed(self, spec: task_pb2.JobSpec, *, attached: bool) -> ParsedSpec:
        return parse_spec(spec, self._catalogue, self._clock.now(), self._policy.settings, attached=attached)


def digest_of(spec: task_pb2.JobSpec) -> bytes:
    """What makes two requests with one idempotency key the same request."""
    return hashlib.sha256(spec.SerializeToString(deterministic=True)).digest()


async def _write(answer: Answer, context: StreamContext | WatchContext) -> None:
    """Accepted, the pieces, Finished. GenerateResponse and WatchResponse have the same fields and numbers."""
    write = context.write
    accepted = pb.Accepted(job_id=answer.job_id, verdict=jobs.verdict_to_proto(answer.verdict))
    await write(pb.GenerateResponse(accepted=accepted))  # type: ignore[arg-type]
    async for piece in answer.pieces():
        await write(piece)  # type: ignore[arg-type]  # serialised already
    finished = finished_of(answer.finished())
    await write(pb.GenerateResponse(finished=finished))  # type: ignore[arg-type]
