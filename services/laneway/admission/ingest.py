"""The NATS front: producers' messages become jobs, and each gets a durable verdict.

Order for each message: the job is stored, then its verdict, then the message is acknowledged; so any of it may happen
again after a crash and changes nothing. What cannot be accepted for lack of room is put off, never refused; what can
never be accepted becomes a terminal record and a verdict, never a redelivery.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from laneway.admission.application import Admission, Request
from laneway.admission.ingest_messages import (
    CONTENT_TYPE,
    encode_verdict,
    key_of,
    lane_of,
    parse_body,
    put_lane,
    safe_model,
)
from laneway.admission.service import digest_of
from laneway.core import ids, subjects
from laneway.core.catalogue import Catalogue
from laneway.core.clock import Clock
from laneway.core.errors import (
    AlreadyExists,
    InvalidRequest,
    LaneSaturated,
    LanewayError,
    OutcomeUnknown,
    TenantLimit,
    Unavailable,
)
from laneway.core.job import Contract, JobRecord, Timings, Verdict
from laneway.core.lanes import JobState, Lane, VerdictKind
from laneway.runtime.auth import Caller
from laneway.runtime.bus import Bus, BusError
from laneway.runtime.grpc_errors import job_error_of
from laneway.runtime.layout import INGEST_CONSUMER
from laneway.runtime.live_policy import LivePolicy
from laneway.runtime.logging import get_logger
from laneway.runtime.puller import Delivery, Puller
from laneway.runtime.records import RecordExists, RecordStore
from laneway.runtime.wire.requests import parse_spec
from laneway.v1 import admission_pb2

PULL_WAIT_S = 1.0  # the server holds a pull for so long while there is nothing
TROUBLE_S = 0.5  # between pulls that could not be answered
FINISH_S = 2.0  # for what is in flight when this door closes
PUT_OFF_S_MIN = 0.5
INTERRUPTED_S = 2.0  # until a message is tried again that NATS kept from being settled
PUT_OFF_S_MAX = 30.0
FAILURES_MAX = 5  # deliveries of a message that makes us fail; then it is refused
ORIGIN = "NATS"

log = get_logger("laneway.admission.ingest")


@dataclass(slots=True)
class _Arrival:
    """A message and what is known of it so far."""

    tenant: str
    job_id: str  # by stream and sequence; replaced once a key is known
    lane: Lane = Lane.BATCH
    key: str = ""
    request: admission_pb2.SubmitRequest | None = None


class Ingest:
    def __init__(
        self,
        bus: Bus,
        region: str,
        records: RecordStore,
        admission: Admission,
        catalogue: Catalogue,
        policy: LivePolicy,
        clock: Clock,
        inflight_max: int,
    ) -> None:
        self._bus = bus
        self._region = region
        self._records = records
        self._admission = admission
        self._catalogue = catalogue
        self._policy = policy
        self._clock = clock
        self._inflight_max = inflight_max
        self._inflight: set[asyncio.Task[None]] = set()
        self._finished = asyncio.Event()
        self._stream_created = ""

    async def run(self) -> None:
        """Consumes until cancelled; what was pulled by then is finished, or given back where that takes too long."""
        stream = subjects.ingest_stream(self._region)
        try:
            # The puller closes first: what its open pull could still be given must go to others.
            async with Puller(self._bus, stream, INGEST_CONSUMER) as puller:
                while True:
                    await self._pull(puller)
        finally:
            await self._finish()

    async def _pull(self, puller: Puller) -> None:
        # A quarter of all at least: a pull costs as much as some messages.
        while (free := self._inflight_max - len(self._inflight)) < (self._inflight_max + 3) // 4:
            self._finished.clear()
            await self._finished.wait()
        for delivery in await puller.pull(free, wait_s=PULL_WAIT_S):
            task = asyncio.create_task(self._handle(delivery), name=f"ingest {delivery.stream_sequence}")
            self._inflight.add(task)
            task.add_done_callback(self._done)
        if puller.trouble:
            await asyncio.sleep(TROUBLE_S)

    async def _finish(self) -> None:
        """Ends what is in flight: by itself, or cancelled, which gives the message back."""
        try:
            if self._inflight:
                await asyncio.wait(self._inflight, timeout=FINISH_S)
        finally:  # also when cancelled once more
            late = set(self._inflight)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._inflight.discard(task)
        self._finished.set()

    # --- one message ---------------------------------------------------------------------------------

    async def _handle(self, delivery: Delivery) -> None:
        try:
            await self._settle(delivery)
        except asyncio.CancelledError:  # this door closes: another need not wait for the ack wait to be over
            with contextlib.suppress(BusError):
                await delivery.nak()
            raise
        except (
            BusError
        ) as error:  # everything so far may happen again, soon or, where we are cut off, after the ack wait
            log.warning("ingest_interrupted", sequence=delivery.stream_sequence, error=error.message)
            with contextlib.suppress(BusError):
                await delivery.nak(INTERRUPTED_S)
        except Exception as error:
            # The edge of this front: a message that makes us fail must neither stop the others nor come for ever.
            log.exception("ingest_failed", sequence=delivery.stream_sequence, deliveries=delivery.deliveries)
            await self._put_aside(delivery, type(error).__name__)

    async def _put_aside(self, delivery: Delivery, why: str) -> None:
        """A message that made us fail: again later, or its last verdict. Whatever fails here is tried again too."""
        try:
            if delivery.deliveries < FAILURES_MAX:
                await delivery.nak(PUT_OFF_S_MIN * 2**delivery.deliveries)
            else:
                await self._give_up(delivery)
                await delivery.term(f"failed {delivery.deliveries} times: {why}")
        except Exception as error:  # noqa: BLE001 - as above: nothing that a message does may end the consumer
            log.warning("ingest_not_put_aside", sequence=delivery.stream_sequence, error=repr(error))

    async def _settle(self, delivery: Delivery) -> None:
        _, lane_word, tenant = subjects.ingest_parts(delivery.subject)
        if not ids.is_token(tenant):  # no verdict can be addressed to it
            log.warning("ingest_tenant_invalid", sequence=delivery.stream_sequence)
            return await delivery.term("the subject's tenant is no token")
        arrival = _Arrival(tenant, await self._job_id(delivery.stream_sequence))
        try:
            record = await self._accepted(delivery, arrival, lane_word)
        except BusError:
            raise
        except TenantLimit as refusal:  # waiting for one tenant's jobs to end would hold up all others behind it
            record = await self._refused(arrival, refusal)
        except (OutcomeUnknown, LaneSaturated, Unavailable) as later:
            after_s = later.retry_after_s if later.retry_after_s is not None else PUT_OFF_S_MIN
            return await delivery.nak(min(PUT_OFF_S_MAX, max(PUT_OFF_S_MIN, after_s)))
        except LanewayError as never:
            record = await self._refused(arrival, never)
        await self._tell(record, arrival.key)
        await delivery.ack()
        return None

    async def _give_up(self, delivery: Delivery) -> None:
        """The verdict on a message that made us fail each time."""
        tenant = subjects.ingest_parts(delivery.subject)[2]
        arrival = _Arrival(tenant, await self._job_id(delivery.stream_sequence))
        await self._tell(await self._refused(arrival, LanewayError("handling the message failed")), "")

    async def _tell(self, record: JobRecord, key: str) -> None:
        subject = subjects.verdict(self._region, record.tenant, record.job_id)
        await self._bus.store(subject, encode_verdict(record, key), patient=True)

    async def _accepted(self, delivery: Delivery, arrival: _Arrival, lane_word: str) -> JobRecord:
        """The job's record; raises why there is none (yet)."""
        arrival.lane = lane_of(lane_word)
        arrival.request = request = parse_body(delivery.data, delivery.headers.get(CONTENT_TYPE, ""))
        arrival.key = key_of(request, delivery.headers.get(subjects.H_KEY, ""))
        if delivery.deliveries > 1 and (settled := await self._settled_before(arrival)) is not None:
            return settled
        put_lane(request, arrival.lane)
        spec = parse_spec(request.spec, self._catalogue, self._clock.now(), self._policy.settings, attached=False)
        job_id = "" if arrival.key else arrival.job_id
        wanted = Request(spec, digest_of(request.spec), arrival.key, origin=ORIGIN, job_id=job_id)
        return await self._admission.submit_here(Caller(arrival.tenant), wanted)

    async def _settled_before(self, arrival: _Arrival) -> JobRecord | None:
        """What an earlier delivery of this message came to. Without a key the record alone says it: its id is ours.

        None also where it is not certain that the job came into its lane: accepting it again finds out.
        """
        job_id = arrival.job_id
        if arrival.key:
            job_id = ids.keyed_job_id(self._region, arrival.tenant, arrival.key)
        stored = await self._records.get(self._region, arrival.tenant, job_id)
        if stored is None or _put_off(stored.record):
            return None
        record = stored.record
        if arrival.key:
            # Others use the key too. But what one of them was told for good of a limit may have been told to this one.
            return record if _limited(record) else None
        return record if record.state is not JobState.WAITING or record.attempt else None

    async def _refused(self, arrival: _Arrival, error: LanewayError) -> JobRecord:
        """The terminal record of a message that can never be accepted."""
        job_id = arrival.job_id
        if arrival.key and not isinstance(error, AlreadyExists):
            job_id = ids.keyed_job_id(self._region, arrival.tenant, arrival.key)
        record = _refusal(arrival, job_id, self._region, error, self._clock.now())
        try:
            await self._records.create(record)
        except RecordExists as exists:
            found = exists.stored
            if found.record.state is JobState.REFUSED:
                return found.record
            if job_id != arrival.job_id:  # the key's job was accepted with another body: this refusal is not its end
                return await self._refused(_Arrival(arrival.tenant, arrival.job_id, arrival.lane), error)
            return found.record
        return record

    async def _job_id(self, sequence: int) -> str:
        """Names the message: a stream made anew counts from 1 again, so its creation time is part of the name."""
        if not self._stream_created:
            info = await self._bus.api(f"STREAM.INFO.{subjects.ingest_stream(self._region)}", {})
            self._stream_created = str(info["created"])
        # No tenant has a space in its name, so no key of a producer gives the same id.
        return ids.keyed_job_id(self._region, f"ingest {self._stream_created}", str(sequence))


def _limited(record: JobRecord) -> bool:
    """Whether a REFUSED record says that the tenant had too much open: a verdict, though there may be room by now."""
    told = record.error.reason if record.error is not None else ""
    return record.state is JobState.REFUSED and told == TenantLimit.default_reason


def _put_off(record: JobRecord) -> bool:
    """Whether a REFUSED record only says that there was no room at the time."""
    if record.state is not JobState.REFUSED or record.error is None or _limited(record):
        return False
    return record.error.code in (LaneSaturated.row.code, Unavailable.row.code)


def _refusal(arrival: _Arrival, job_id: str, region: str, error: LanewayError, now_s: float) -> JobRecord:
    field = f"{error.field}: " if isinstance(error, InvalidRequest) and error.field else ""
    message = f"{field}{error.message}"
    verdict = Verdict(
        VerdictKind.REFUSED, error.reason, message, arrival.lane, region=region, retry_after_s=error.retry_after_s
    )
    return JobRecord(
        job_id=job_id,
        tenant=arrival.tenant,
        region=region,
        model=safe_model(arrival.request),
        tier="",
        pool="",
        contract=Contract(arrival.lane, ttft_target_s=0.0, tpot_target_s=0.0, deadline_s=now_s),
        verdict=verdict,
        prompt_tokens=0,
        max_tokens=0,
        state=JobState.REFUSED,
        error=job_error_of(error),
        timings=Timings(created_s=now_s, ended_s=now_s),
        idempotency_key=arrival.key,
        origin=ORIGIN,
    )
