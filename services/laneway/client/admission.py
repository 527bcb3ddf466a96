"""The client of AdmissionService: generate, submit, watch, look up, list, cancel, quote, and run dead letters again.

Owns the idempotency keys: each generate() and submit() gets one, so that trying again is safe when an answer was lost.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Unpack

import grpc

from laneway.client import decode
from laneway.client.channel import Deadline, ServiceConnection, least
from laneway.client.many import ManyItem, ManyOutcome, Submission
from laneway.client.request import RequestFields, build_spec, lane_of
from laneway.client.stream import Opening, TokenStream
from laneway.client.values import Cancelled, DeadLetter, Job, Quote, Submitted
from laneway.core.errors import DeadlineExceeded, LanewayError, NotFound, Unavailable
from laneway.core.lanes import JobState, Lane, OnDisconnect
from laneway.runtime.wire import enums
from laneway.runtime.wire.times import timestamp_of
from laneway.v1 import admission_pb2, admission_pb2_grpc, task_pb2

PAGE_SIZE = 100
PURGE_IDS = 1000  # of one call
PURGE_S_MAX = 120.0  # a selection may have to look at every letter
MANY_RETRY_S_MAX = 300.0  # for an item that is refused for want of room


class Client(ServiceConnection):
    """Runs jobs. `async with Client("127.0.0.1:7070") as client: ...`; one client serves many concurrent calls."""

    @functools.cached_property
    def _stub(self) -> admission_pb2_grpc.AdmissionServiceAsyncStub:
        return admission_pb2_grpc.AdmissionServiceStub(self._channel)

    def generate(
        self,
        *,
        idempotency_key: str | None = None,
        timeout_s: float | None = None,
        retry_s_max: float | None = None,
        **request: Unpack[RequestFields],
    ) -> TokenStream:
        """An answer as a stream: `async with client.generate(model="chat", prompt="Hi") as stream`.

        Entering waits for the verdict and raises a refusal. `timeout_s` bounds the whole call, waits between attempts
        included; the job's deadline becomes the earlier of it and the contract's. No attempt to run the job begins
        later than `retry_s_max` after the call; 0: one attempt. Leaving the block ends the call.
        """
        spec, lane = self._spec(request), lane_of(request)
        keys = _Keys(idempotency_key)

        def open_call(
            failure: LanewayError | None, left_s: float | None
        ) -> grpc.aio.UnaryStreamCall[admission_pb2.GenerateRequest, admission_pb2.GenerateResponse]:
            message = admission_pb2.GenerateRequest(spec=spec, idempotency_key=keys.after(failure))
            return self._stub.Generate(message, timeout=left_s, metadata=self._metadata)

        keep = OnDisconnect(request.get("on_disconnect", OnDisconnect.CANCEL)) is OnDisconnect.KEEP
        opening = Opening(
            address=self.address,
            open=open_call,
            follow=self._follow if keep else None,
            accepts=True,
            lane=lane,
            idempotent=keys.safe,
            timeout_s=timeout_s,
            retry_s_max=least(retry_s_max, self._span_to_deadline_s(spec)),
        )
        return TokenStream(opening, self._retrier, self._surroundings.clock)

    async def submit(
        self,
        *,
        idempotency_key: str | None = None,
        timeout_s: float | None = None,
        retry_s_max: float | None = None,
        **request: Unpack[RequestFields],
    ) -> Submitted:
        """Leaves a job whose result is collected later, by watch() or wait(). `timeout_s` bounds only this call;
        `retry_s_max` as in generate()."""
        spec = self._spec(request)
        keys = _Keys(idempotency_key)

        def make(failure: LanewayError | None) -> admission_pb2.SubmitRequest:
            return admission_pb2.SubmitRequest(spec=spec, idempotency_key=keys.after(failure))

        response = await self._call(
            self._stub.Submit,
            make,
            timeout_s=timeout_s,
            lane=lane_of(request),
            idempotent=keys.safe,
            retry_s_max=retry_s_max,
        )
        return decode.submitted_of(response)

    def submit_many(
        self, items: Iterable[ManyItem] | AsyncIterable[ManyItem], *, retry_s_max: float = MANY_RETRY_S_MAX
    ) -> AsyncGenerator[ManyOutcome, None]:
        """Leaves many jobs over one call: `async for outcome in client.submit_many(items)`, in the order of outcomes.

        Items are taken as there is room for them. A refused one is an outcome and ends nothing; where the service says
        when to come again, it is sent again for up to `retry_s_max`. A lost call is taken up again, and what had no
        outcome is sent again with its key, until nothing was heard for `RetryParams.outage_s_max`. Close the iterator
        (contextlib.aclosing) to end the call; what was accepted stays accepted.
        """
        submission = Submission(
            items,
            lambda: self._stub.SubmitMany(metadata=self._metadata),
            self.address,
            self._retrier,
            self._surroundings,
            retry_s_max,
        )
        return submission.outcomes()

    def watch(
        self,
        job_id: str,
        *,
        from_index: int = 0,
        delivered_ids: Sequence[int] = (),
        timeout_s: float | None = None,
    ) -> TokenStream:
        """Follows a job from a token index, while it runs or after it ended. Leaving the block never touches the job.

        `delivered_ids`: all tokens before `from_index`, where the caller has them: should the job go on in another run
        than the one that gave them, the stream ends with Aborted, and is no mixture of two answers.

        A lost connection is taken up again where it broke, until nothing was heard for `RetryParams.outage_s_max`. The
        end of a job that did not succeed raises its error.
        """
        opening = Opening(
            address=self.address,
            open=lambda _, left_s: self._follow(job_id, from_index, delivered_ids, left_s),
            follow=self._follow,
            accepts=False,
            lane=Lane.PRIORITY,
            idempotent=True,
            timeout_s=timeout_s,
            retry_s_max=None,
        )
        return TokenStream(
            opening,
            self._retrier,
            self._surroundings.clock,
            job_id=job_id,
            from_index=from_index,
            delivered_ids=delivered_ids,
        )

    async def wait(self, job_id: str, *, timeout_s: float | None = None) -> Job:
        """The job once it has ended, whatever its end; DeadlineExceeded if that takes longer than `timeout_s`.

        Outlasts a door that is away as watch() does.
        """
        deadline = Deadline(self._surroundings.clock, timeout_s)
        while True:
            # The job's own end comes as an error too, and its record tells all; NotFound alone is the answer itself.
            stream = self.watch(job_id, timeout_s=deadline.left_s())
            try:
                async with stream:
                    await stream.text()
            except NotFound:
                raise
            except LanewayError:
                deadline.left_s()
            try:
                job = await self.get_job(job_id, timeout_s=deadline.left_s())
                if job.state.terminal:
                    return job
            except (Unavailable, DeadlineExceeded):
                deadline.left_s()
                if stream.outlasted:
                    raise
            await self._surroundings.sleep(_WAIT_AGAIN_S)

    async def get_job(self, job_id: str, *, timeout_s: float | None = None) -> Job:
        """A job as it stands, with its result if it has one."""
        message = admission_pb2.GetJobRequest(job_id=job_id)
        response = await self._call(self._stub.GetJob, lambda _: message, timeout_s=timeout_s)
        return decode.job_of(response.job)

    def list_jobs(
        self,
        *,
        lane: Lane | None = None,
        state: JobState | None = None,
        labels: Mapping[str, str] | None = None,
        limit: int | None = None,
        timeout_s: float | None = None,
    ) -> AsyncIterator[Job]:
        """The caller's jobs without results, those that changed last first; `timeout_s` bounds each page."""

        async def page(token: str) -> tuple[list[Job], str]:
            message = admission_pb2.ListJobsRequest(
                page_size=PAGE_SIZE if limit is None else max(1, min(limit, PAGE_SIZE)),
                page_token=token,
                lane=enums.LANE_TO_WIRE[lane] if lane else None,
                state=enums.JOB_STATE_TO_WIRE[state] if state else None,
                labels=labels or {},
            )
            response = await self._call(self._stub.ListJobs, lambda _: message, timeout_s=timeout_s)
            return [decode.job_of(job) for job in response.jobs], response.next_page_token

        return self._pages(page, limit)

    async def cancel(self, job_id: str, *, timeout_s: float | None = None) -> Cancelled:
        """Cancels a job in any state; the answer tells where that left it."""
        message = admission_pb2.CancelJobRequest(job_id=job_id)
        response = await self._call(self._stub.CancelJob, lambda _: message, timeout_s=timeout_s)
        return decode.cancelled_of(job_id, response)

    async def quote(self, *, timeout_s: float | None = None, **request: Unpack[RequestFields]) -> Quote:
        """What would happen to a request, without running it. A refusal is a quote too."""
        message = admission_pb2.QuoteRequest(spec=self._spec(request))
        response = await self._call(self._stub.Quote, lambda _: message, timeout_s=timeout_s)
        return decode.quote_of(response)

    # --- jobs that were given up ---------------------------------------------------------------------

    def list_dead_letters(
        self,
        *,
        lane: Lane | None = None,
        reason: str = "",
        tenant: str = "",
        limit: int | None = None,
        timeout_s: float | None = None,
    ) -> AsyncIterator[DeadLetter]:
        """Jobs that were given up, newest first: the caller's own, or for operators those of every tenant, or of
        `tenant`. `timeout_s` bounds each page."""

        async def page(token: str) -> tuple[list[DeadLetter], str]:
            message = admission_pb2.ListDeadLettersRequest(
                page_size=PAGE_SIZE if limit is None else max(1, min(limit, PAGE_SIZE)),
                page_token=token,
                lane=enums.LANE_TO_WIRE[lane] if lane else None,
                reason=reason,
                tenant=tenant,
            )
            response = await self._call(self._stub.ListDeadLetters, lambda _: message, timeout_s=timeout_s)
            return [decode.dead_letter_of(letter) for letter in response.dead_letters], response.next_page_token

        return self._pages(page, limit)

    async def requeue_dead_letter(
        self, job_id: str, *, deadline_s: float | None = None, timeout_s: float | None = None
    ) -> Submitted:
        """Runs a job that was given up again, as a new job to be collected later, and removes its dead letter. The
        answer is due `deadline_s` from now; by default after as long as the old one had. Repeated, it gives the same
        new job; a refusal leaves the letter."""
        due_s = None if deadline_s is None else self._surroundings.clock.now() + deadline_s
        message = admission_pb2.RequeueDeadLetterRequest(
            job_id=job_id, deadline=None if due_s is None else timestamp_of(due_s)
        )
        response = await self._call(self._stub.RequeueDeadLetter, lambda _: message, timeout_s=timeout_s)
        return decode.submitted_of(response)

    async def purge_dead_letters(
        self,
        job_ids: Sequence[str] | None = None,
        *,
        lane: Lane | None = None,
        reason: str = "",
        tenant: str = "",
        before_s: float | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Removes dead letters for good and returns how many: those of `job_ids`, or where that is None all that match
        the rest, which may be every one that the caller sees. `before_s`: given up before that time, Unix seconds.
        Without a `timeout_s` it may take two minutes."""
        parts = [()] if job_ids is None else [job_ids[i : i + PURGE_IDS] for i in range(0, len(job_ids), PURGE_IDS)]
        deadline = Deadline(self._surroundings.clock, PURGE_S_MAX if timeout_s is None else timeout_s)
        purged = 0
        for part in parts:
            message = admission_pb2.PurgeDeadLettersRequest(
                job_ids=part,
                lane=enums.LANE_TO_WIRE[lane] if lane else None,
                reason=reason,
                tenant=tenant,
                before=timestamp_of(before_s) if before_s is not None else None,
            )
            purged += await self._purge(message, deadline.left_s())
        return purged

    async def _purge(self, message: admission_pb2.PurgeDeadLettersRequest, timeout_s: float | None) -> int:
        response = await self._call(self._stub.PurgeDeadLetters, lambda _: message, timeout_s=timeout_s)
        return response.purged

    # --- shared --------------------------------------------------------------------------------------

    def _follow(
        self, job_id: str, from_index: int, delivered_ids: Sequence[int], left_s: float | None
    ) -> grpc.aio.UnaryStreamCall[admission_pb2.WatchRequest, admission_pb2.WatchResponse]:
        message = admission_pb2.WatchRequest(job_id=job_id, from_index=from_index, delivered_ids=delivered_ids)
        return self._stub.Watch(message, timeout=left_s, metadata=self._metadata)

    def _spec(self, request: RequestFields) -> task_pb2.JobSpec:
        return build_spec(request, self._surroundings.clock.now())

    def _span_to_deadline_s(self, spec: task_pb2.JobSpec) -> float | None:
        if not spec.contract.HasField("deadline"):
            return None
        return spec.contract.deadline.ToNanoseconds() / 1e9 - self._surroundings.clock.now()


_WAIT_AGAIN_S = 0.5  # after a watch that broke, before the next


class _Keys:
    """The idempotency key of each attempt. A caller's key is kept. One of our own is kept while an earlier attempt may
    have been stored, and replaced once it was definitely refused: the refusal is what the old key now names."""

    def __init__(self, given: str | None, make: Callable[[], str] = lambda: str(uuid.uuid4())) -> None:
        self._given = given
        self._make = make
        self._key = make() if given is None else given

    @property
    def safe(self) -> bool:
        """Whether the service can recognise a repeated attempt; an empty key of the caller asks for none."""
        return bool(self._key)

    def after(self, failure: LanewayError | None) -> str:
        refused = failure is not None and failure.retry_after_s is not None and failure.reason != "OUTCOME_UNKNOWN"
        if self._given is None and refused:
            self._key = self._make()
        return self._key
