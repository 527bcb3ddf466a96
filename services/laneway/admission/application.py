"""Admission itself, whatever protocol a request came by: core values and a caller in, answers and verdicts out.

Fronts (gRPC here, ingest, gateways) translate and decide nothing. Order of an accepted job, which nothing here may
change: stream opened, record created, job published, caller told. (Of most attached jobs the first claim creates the
record: late_records.)
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from types import TracebackType
from typing import Any

from msgspec import Struct
from prometheus_client import Counter

from laneway.admission.accept import UNREACHABLE_RETRY_S, Acceptance, Acceptor
from laneway.admission.answers import Answer
from laneway.admission.chores import Chores
from laneway.admission.door import Door
from laneway.admission.ending import Ender
from laneway.admission.homes import Homes
from laneway.admission.judging import Judge, Judged
from laneway.admission.late_records import LateRecords
from laneway.admission.preparing import Preparer
from laneway.admission.results import JobBook
from laneway.admission.streams import Stream, beyond_end
from laneway.admission.tenants import TenantStreams
from laneway.core import ids
from laneway.core.clock import Clock
from laneway.core.errors import AlreadyExists, InvalidRequest, LanewayError, NotFound, OutcomeUnknown, Unavailable
from laneway.core.job import Contract, JobRecord, Timings, Verdict, stored_late
from laneway.core.lanes import Lane, OnDisconnect, Phase
from laneway.policy.admit import Placement
from laneway.policy.contract import bounded_by_call
from laneway.runtime import metrics
from laneway.runtime.auth import Caller, require_lane
from laneway.runtime.logging import get_logger
from laneway.runtime.wire.requests import ParsedSpec

PRIORITY_PUBLISH_S_MAX = 5.0  # a caller who wants an answer now is not kept longer on a queue that does not answer
LEFT_RETRY_S = 1.0  # between tries to cancel a job whose caller left, while NATS does not let us

log = get_logger("laneway.admission")

_requests = metrics.counter("laneway_requests_total", "Requests by lane and what became of them.", ("lane", "outcome"))


class Request(Struct, frozen=True):
    """What a front hands over, besides the caller."""

    spec: ParsedSpec
    digest: bytes  # SHA-256 of the request as it was sent: the same key with another digest is a conflict
    key: str = ""  # idempotency key; empty: none
    time_remaining_s: float | None = None  # of an attached call
    origin: str = "GRPC"
    job_id: str = ""  # decided by the front; empty: made here
    requeued_from: str = ""  # the job that was given up and that this one runs again


class Quote(Struct, frozen=True):
    verdict: Verdict
    prompt_tokens: int
    max_tokens: int


class Admission:
    def __init__(
        self,
        region: str,
        door: Door,
        preparer: Preparer,
        judge: Judge,
        acceptor: Acceptor,
        ender: Ender,
        late_records: LateRecords,
        book: JobBook,
        chores: Chores,
        clock: Clock,
        random_bytes: Callable[[int], bytes],
        publish_s_max: float,
        connected: Callable[[], bool],
        streams: TenantStreams,
        homes: Homes,
    ) -> None:
        self.book = book
        self._region = region
        self._door = door
        self._preparer = preparer
        self._judge = judge
        self._acceptor = acceptor
        self._ender = ender
        self._late_records = late_records
        self._chores = chores
        self._clock = clock
        self._random_bytes = random_bytes
        self._publish_s_max = publish_s_max
        self._connected = connected  # whether NATS can be reached now
        self._streams = streams
        self._homes = homes

    # --- attached ------------------------------------------------------------------------------------

    @asynccontextmanager
    async def generate(self, caller: Caller, request: Request) -> AsyncIterator[Answer]:
        """Accepts a job and holds its stream. Leaving the block before the job ended is the caller's leaving."""
        received_s = self._clock.monotonic()
        contract = bounded_by_call(request.spec.contract, self._clock.now(), request.time_remaining_s)
        with _Counted(contract.lane), self._streams.take(caller.tenant):
            decided = await self._decide(caller, request, contract, attached=True)
            stream = self._door.open(decided.record)
            try:
                attaching = self._attach(self._accept(decided), stream)
            except BaseException:
                await self._door.close_stream(stream)
                raise
            accepting = self._chores.start(attaching, f"accept {decided.record.job_id}")
            ours = True
            try:
                accepted = await asyncio.shield(accepting)
                if accepted.existing:
                    ours = False
                    _check_body(accepted.record, request)
                    ours = True
                if accepted.existing or accepted.record.state.terminal:
                    await self._door.close_stream(stream)
                    stream = await self._door.follow(accepted.record)
                yield Answer(stream, self._clock, received_s)
            finally:
                if ours and not stream.record.state.terminal and not _failed(accepting):
                    self._chores.start(self._caller_left(accepting, stream), f"left {decided.record.job_id}")
                self._judge.left(decided.record.job_id, ended=stream.record.state.terminal)
                await self._door.close_stream(stream)

    async def _attach(self, accepting: Coroutine[Any, Any, Acceptance], stream: Stream) -> Acceptance:
        """Sees to it that the job gets its record, whether or not its caller is still there."""
        try:
            accepted = await accepting
        except OutcomeUnknown:
            if stream.worker_id or stream.next_index:  # a worker has it, so that the lane had it
                return Acceptance(stream.record, 0)
            if stored_late(stream.record):
                self._late_records.store(stream.record)  # and the scheduler finds out
            raise
        if accepted.unstored:
            self._late_records.watch(stream)
        return accepted

    async def _caller_left(self, accepting: asyncio.Task[Acceptance], stream: Stream) -> None:
        """Applies the contract of a job whose caller is gone, once it is known whether it was accepted at all."""
        try:
            record = (await accepting).record
        except LanewayError:
            return
        if record.contract.on_disconnect is OnDisconnect.KEEP:
            return
        while not self._door.streams_of(record.job_id):
            try:
                if self._clock.now() >= record.contract.deadline_s:
                    begun = stream.next_index > stream.from_index
                    phase = Phase.DECODE if begun else Phase.PREFILL if stream.worker_id else Phase.QUEUE
                    await self._ender.expire(record, phase)
                else:
                    await self._ender.cancel(record, message="the caller went away")
                return
            except NotFound:
                return
            except LanewayError as error:
                # Nobody else would: its worker only ends what a dead door leaves, or what is over its deadline.
                log.warning("job_not_cancelled", job_id=record.job_id, error=error.message)
                if self._clock.now() >= record.contract.deadline_s:
                    return
            await asyncio.sleep(LEFT_RETRY_S)

    # --- detached ------------------------------------------------------------------------------------

    async def submit(self, caller: Caller, request: Request) -> JobRecord:
        """Accepts a job whose result is collected later; the record of the one that the same key made before.

        A caller who stops waiting does not stop the accepting.
        """
        return await asyncio.shield(self._chores.start(self.submit_here(caller, request), "submit"))

    async def submit_here(self, caller: Caller, request: Request) -> JobRecord:
        """As `submit`, by a task that nobody cancels while it accepts."""
        contract = request.spec.contract
        with _Counted(contract.lane):
            decided = await self._decide(caller, request, contract, attached=False)
            accepted = await self._accept(decided)
            if accepted.existing:
                _check_body(accepted.record, request)
            return accepted.record

    async def quote(self, caller: Caller, spec: ParsedSpec) -> Quote:
        """What would happen to a request, without running it. A refusal is an answer here."""
        require_lane(caller, spec.contract.lane)
        options = await self._preparer.options(spec, caller.tenant)
        judged = self._judge.judge(options, spec.contract, caller.tenant)
        task = judged.option.task
        return Quote(judged.decision.verdict, len(task.prompt_ids), task.sampling.max_tokens)

    # --- watching ------------------------------------------------------------------------------------

    @asynccontextmanager
    async def watch(
        self, caller: Caller, job_id: str, from_index: int, given: Sequence[int] = ()
    ) -> AsyncIterator[Answer]:
        """Follows a job in any state from a token on. Leaving never touches the job. `given`: see Stream."""
        if given and len(given) != from_index:
            raise InvalidRequest(
                f"delivered_ids has {len(given)} tokens, and from_index is {from_index}", field="delivered_ids"
            )
        record = (await self.book.find(caller, job_id)).record
        if from_index > record.max_tokens:
            raise beyond_end(from_index, record.max_tokens)
        with self._streams.take(caller.tenant):
            stream = await self._door.follow(record, from_index, given)
            try:
                yield Answer(stream, self._clock, None)
            finally:
                await self._door.close_stream(stream)

    # --- accepting -----------------------------------------------------------------------------------

    async def _decide(self, caller: Caller, request: Request, contract: Contract, *, attached: bool) -> _Decided:
        """A record to be stored and what it runs, or the record that the same key made before. Raises refusals."""
        require_lane(caller, contract.lane)
        if not self._connected():
            raise Unavailable(
                "the queue cannot be reached now", reason="NOT_CONNECTED", retry_after_s=UNREACHABLE_RETRY_S
            )
        options = await self._preparer.options(request.spec, caller.tenant)
        job_id = request.job_id or self._job_id(caller, request)
        judged = self._judge.judge(options, contract, caller.tenant, job_id, attached=attached)
        if judged.decision.refusal is None:
            return _Decided(self._record(caller, request, judged, job_id, attached=attached), judged)
        if request.key or request.job_id:
            # What was accepted stays accepted, however full the lanes are by now.
            earlier = await self.book.earlier(caller.tenant, job_id)
            if earlier is not None:
                return _Decided(earlier, None)
        raise judged.decision.error()

    def _accept(self, decided: _Decided) -> Coroutine[Any, Any, Acceptance]:
        """What can be sent at once is on its way when this returns."""
        record, judged = decided.record, decided.judged
        accepting = None
        if judged is not None:
            try:
                accepting = self._acceptor.accept(record, judged.option.task, judged.decision, judged.full_retry_s)
            except BaseException:
                self._judge.withdraw(record.job_id)
                raise
        return self._accepted(decided, accepting)

    async def _accepted(self, decided: _Decided, accepting: Coroutine[Any, Any, Acceptance] | None) -> Acceptance:
        if accepting is None:
            return Acceptance(decided.record, 0, existing=True)
        ours = False
        try:
            accepted = await accepting
            ours = not accepted.existing
            if ours:
                self._judge.stored(decided.record.job_id, accepted.sequence)
            return accepted
        finally:
            if not ours:
                self._judge.withdraw(decided.record.job_id)

    def _job_id(self, caller: Caller, request: Request) -> str:
        if request.key:
            return ids.keyed_job_id(self._region, caller.tenant, request.key)
        return ids.new_job_id(self._region, self._clock.now(), self._random_bytes(10))

    def _record(self, caller: Caller, request: Request, judged: Judged, job_id: str, *, attached: bool) -> JobRecord:
        decision, pool, task = judged.decision, judged.option.candidate.pool, judged.option.task
        now_s, contract = self._clock.now(), decision.contract
        publish_s = self._publish_s_max
        if contract.lane is Lane.PRIORITY:
            publish_s = min(publish_s, PRIORITY_PUBLISH_S_MAX)
        parked = decision.placement is Placement.PARKED
        affinity, home = self._homes.choose(job_id, pool, caller.tenant, task, parked=parked)
        return JobRecord(
            job_id=job_id,
            tenant=caller.tenant,
            region=self._region,
            model=request.spec.model,
            tier=pool.tier,
            pool=pool.name,
            contract=contract,
            verdict=decision.verdict,
            prompt_tokens=len(task.prompt_ids),
            max_tokens=task.sampling.max_tokens,
            door=self._door.id,
            attached=attached,
            publish_by_s=min(now_s + publish_s, contract.deadline_s),
            body_digest=request.digest,
            latest_start_s=decision.latest_start_s,
            device_ms=math.ceil(decision.device_s * 1000),
            timings=Timings(created_s=now_s),
            idempotency_key=request.key,
            origin=request.origin,
            requeued_from=request.requeued_from,
            affinity_key=affinity,
            home=home,
        )


class _Decided(Struct, frozen=True):
    record: JobRecord
    judged: Judged | None  # None: the record was there before


def _check_body(existing: JobRecord, request: Request) -> None:
    if existing.body_digest != request.digest:
        raise AlreadyExists(
            "the idempotency key was used with another request", field="idempotency_key", job_id=existing.job_id
        )


def _failed(task: asyncio.Task[Acceptance]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


class _Counted:
    """What becomes of a request within the block. A class, since a generator would take three times as long."""

    __slots__ = ("_lane",)

    def __init__(self, lane: Lane) -> None:
        self._lane = lane

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        outcome = "ok"
        if isinstance(error, LanewayError):
            outcome = error.row.label
        elif error is not None:
            outcome = "cancelled" if isinstance(error, asyncio.CancelledError | GeneratorExit) else "internal"
        _count_of(self._lane, outcome).inc()


@lru_cache(128)  # looking a counter up costs more than counting
def _count_of(lane: Lane, outcome: str) -> Counter:
    return _requests.labels(lane=lane.value, outcome=outcome)
