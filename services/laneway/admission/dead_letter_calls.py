"""The gRPC front of dead letters: messages to core values and back. Decides nothing."""

from __future__ import annotations

import grpc.aio

from laneway.admission.dead_letters import DeadLetters
from laneway.core.clock import Clock
from laneway.runtime.auth import current_caller
from laneway.runtime.dead_letters import DeadLetterFilter
from laneway.runtime.wire import checks, enums, jobs
from laneway.runtime.wire.contracts import parse_deadline
from laneway.runtime.wire.dead_letters import dead_letter_to_proto
from laneway.v1 import admission_pb2 as pb
from laneway.v1 import admission_pb2_grpc

PURGE_IDS_MAX = 1000  # jobs that one purge names


class DeadLetterCalls(admission_pb2_grpc.AdmissionServiceServicer):
    """The part of AdmissionService that is about dead letters."""

    _dead_letters: DeadLetters
    _clock: Clock

    async def ListDeadLetters(
        self,
        request: pb.ListDeadLettersRequest,
        context: grpc.aio.ServicerContext[pb.ListDeadLettersRequest, pb.ListDeadLettersResponse],
    ) -> pb.ListDeadLettersResponse:
        wanted = _filter(request)
        page, token = await self._dead_letters.page(current_caller(), wanted, request.page_size, request.page_token)
        return pb.ListDeadLettersResponse(
            dead_letters=[dead_letter_to_proto(letter) for letter in page], next_page_token=token
        )

    async def RequeueDeadLetter(
        self,
        request: pb.RequeueDeadLetterRequest,
        context: grpc.aio.ServicerContext[pb.RequeueDeadLetterRequest, pb.RequeueDeadLetterResponse],
    ) -> pb.RequeueDeadLetterResponse:
        checks.no_unknown_fields(request, "request")
        job_id = checks.token(request.job_id, "job_id")
        deadline_s = None
        if request.HasField("deadline"):
            deadline_s = parse_deadline(request.deadline, self._clock.now(), "deadline")
        record = await self._dead_letters.requeue(current_caller(), job_id, deadline_s)
        return pb.RequeueDeadLetterResponse(job_id=record.job_id, verdict=jobs.verdict_to_proto(record.verdict))

    async def PurgeDeadLetters(
        self,
        request: pb.PurgeDeadLettersRequest,
        context: grpc.aio.ServicerContext[pb.PurgeDeadLettersRequest, pb.PurgeDeadLettersResponse],
    ) -> pb.PurgeDeadLettersResponse:
        wanted = _filter(request)
        if not request.job_ids:
            return pb.PurgeDeadLettersResponse(purged=await self._dead_letters.purge(current_caller(), wanted))
        checks.at_most(request.job_ids, PURGE_IDS_MAX, "job_ids")
        if wanted != DeadLetterFilter():
            checks.refuse("job_ids", "must be empty where lane, reason, tenant or before select")
        job_ids = [checks.token(job_id, f"job_ids[{i}]") for i, job_id in enumerate(request.job_ids)]
        return pb.PurgeDeadLettersResponse(purged=await self._dead_letters.purge_jobs(current_caller(), job_ids))


def _filter(request: pb.ListDeadLettersRequest | pb.PurgeDeadLettersRequest) -> DeadLetterFilter:
    checks.no_unknown_fields(request, "request")
    before_s = 0.0
    if isinstance(request, pb.PurgeDeadLettersRequest) and request.HasField("before"):
        before_s = checks.time_s(request.before, "before")
        if not before_s:
            checks.refuse("before", "is the beginning of time; leave it out for any time")
    return DeadLetterFilter(
        lane=checks.word(enums.LANE_FROM_WIRE, request.lane, None, "lane"),
        reason=checks.token(request.reason, "reason") if request.reason else "",
        tenant=checks.token(request.tenant, "tenant") if request.tenant else "",
        before_s=before_s,
    )
