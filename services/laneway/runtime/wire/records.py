"""Durable and internal messages as bytes: job records, lane messages, leases.

Durable messages carry a schema number; readers take the present one and the one before. What cannot be read raises
UnreadableMessage, and whoever pulled it decides (a worker terminates the message and counts it).
"""

from __future__ import annotations

from laneway.core.fleet import WorkerLease, WorkerState
from laneway.core.job import (
    SCHEMA,
    SCHEMA_BY_REFERENCE,
    Attempt,
    GenerateTask,
    JobRecord,
    LaneJob,
    QueuedJob,
    ReferredJob,
    Result,
)
from laneway.core.objects import ObjectRef
from laneway.runtime.wire import enums, jobs
from laneway.runtime.wire.plans import step_times_from_proto, step_times_to_proto
from laneway.runtime.wire.reading import UnreadableMessage, parse_message
from laneway.runtime.wire.times import timestamp_of, unix_s
from laneway.v1 import bus_pb2, task_pb2

_RECORD_TAG = bytes([bus_pb2.LaneMessage.RECORD_FIELD_NUMBER << 3 | 2])  # a field of a known length


def encode_record(record: JobRecord) -> bytes:
    return record_to_proto(record).SerializeToString()


def decode_record(data: bytes) -> JobRecord:
    message = bus_pb2.JobRecord()
    parse_message(message, data, "job record")
    check_schema(message.schema, "job record")
    try:
        return record_from_proto(message)
    except (KeyError, ValueError) as error:
        raise UnreadableMessage(f"the job record holds an unknown value: {error}") from None


def encode_lane_job(job: QueuedJob, record: bytes = b"") -> bytes:
    """`record`: the job's record, where it has been encoded already."""
    if isinstance(job, ReferredJob):
        message = bus_pb2.LaneMessage(schema=_schema(refers=True), task_object=_object_to_proto(job.task_object))
    else:
        message = bus_pb2.LaneMessage(schema=SCHEMA, task=jobs.task_to_proto(job.task))
    rest = message.SerializeToString()
    return _RECORD_TAG + _varint_bytes(len(record := record or encode_record(job.record))) + record + rest


def decode_lane_job(data: bytes) -> QueuedJob:
    message = bus_pb2.LaneMessage()
    parse_message(message, data, "lane message")
    check_schema(message.schema, "lane message")
    try:
        if message.HasField("task_object"):
            return ReferredJob(record_from_proto(message.record), _object_from_proto(message.task_object))
        return LaneJob(record_from_proto(message.record), jobs.task_from_proto(message.task))
    except (KeyError, ValueError) as error:
        raise UnreadableMessage(f"the lane message holds an unknown value: {error}") from None


def encode_task(task: GenerateTask) -> bytes:
    return jobs.task_to_proto(task).SerializeToString()


def decode_task(data: bytes) -> GenerateTask:
    message = task_pb2.GenerateTask()
    parse_message(message, data, "task")
    return jobs.task_from_proto(message)


def encode_result(result: Result) -> bytes:
    return jobs.result_to_proto(result).SerializeToString()


def decode_result(data: bytes) -> Result:
    message = task_pb2.Result()
    parse_message(message, data, "result")
    try:
        return jobs.result_from_proto(message)
    except (KeyError, ValueError) as error:
        raise UnreadableMessage(f"the result holds an unknown value: {error}") from None


def record_to_proto(record: JobRecord) -> bus_pb2.JobRecord:
    return bus_pb2.JobRecord(
        schema=_schema(refers=record.result_object is not None),
        job_id=record.job_id,
        tenant=record.tenant,
        region=record.region,
        model=record.model,
        tier=record.tier,
        pool=record.pool,
        state=enums.JOB_STATE_TO_WIRE[record.state],
        attempt=record.attempt,
        lineage=[
            bus_pb2.Attempt(
                attempt=a.attempt,
                start_index=a.start_index,
                owner=a.owner,
                claimed_at=timestamp_of(a.claimed_s),
                begun=a.begun,
                yielded_at=timestamp_of(a.yielded_s),
                reason=a.reason,
                yield_reason=a.yield_reason,
            )
            for a in record.lineage
        ],
        starts=record.starts,
        clean=record.clean,
        preemptions=record.preemptions,
        retries=record.retries,
        owner=record.owner,
        door=record.door,
        publish_by=timestamp_of(record.publish_by_s),
        body_digest=record.body_digest,
        contract=jobs.contract_to_proto(record.contract),
        verdict=jobs.verdict_to_proto(record.verdict),
        checkpoint_index=record.checkpoint_index,
        result=jobs.result_to_proto(record.result) if record.result else None,
        error=jobs.job_error_to_proto(record.error) if record.error else None,
        timings=jobs.timings_to_proto(record.timings),
        attached=record.attached,
        prompt_tokens=record.prompt_tokens,
        max_tokens=record.max_tokens,
        latest_start=timestamp_of(record.latest_start_s),
        device_ms=record.device_ms,
        idempotency_key=record.idempotency_key,
        origin=record.origin,
        requeued_from=record.requeued_from,
        result_object=_object_to_proto(record.result_object) if record.result_object else None,
        route=record.route,
        affinity_key=record.affinity_key,
        home=record.home,
    )


def record_from_proto(message: bus_pb2.JobRecord) -> JobRecord:
    return JobRecord(
        job_id=message.job_id,
        tenant=message.tenant,
        region=message.region,
        model=message.model,
        tier=message.tier,
        pool=message.pool,
        contract=jobs.contract_from_proto(message.contract),
        verdict=jobs.verdict_from_proto(message.verdict),
        prompt_tokens=message.prompt_tokens,
        max_tokens=message.max_tokens,
        state=enums.JOB_STATE_FROM_WIRE[message.state],
        attempt=message.attempt,
        lineage=tuple(
            Attempt(
                a.attempt,
                a.start_index,
                a.owner,
                unix_s(a.claimed_at),
                a.begun,
                unix_s(a.yielded_at),
                a.reason,
                a.yield_reason,
            )
            for a in message.lineage
        ),
        starts=message.starts,
        clean=message.clean,
        preemptions=message.preemptions,
        retries=message.retries,
        owner=message.owner,
        door=message.door,
        attached=message.attached,
        publish_by_s=unix_s(message.publish_by),
        body_digest=message.body_digest,
        checkpoint_index=message.checkpoint_index,
        latest_start_s=unix_s(message.latest_start),
        device_ms=message.device_ms,
        result=jobs.result_from_proto(message.result) if message.HasField("result") else None,
        error=jobs.job_error_from_proto(message.error) if message.HasField("error") else None,
        timings=jobs.timings_from_proto(message.timings),
        idempotency_key=message.idempotency_key,
        origin=message.origin,
        requeued_from=message.requeued_from,
        result_object=_object_from_proto(message.result_object) if message.HasField("result_object") else None,
        route=message.route,
        affinity_key=message.affinity_key,
        home=message.home,
    )


def _object_to_proto(ref: ObjectRef) -> bus_pb2.ObjectRef:
    return bus_pb2.ObjectRef(name=ref.name, size_bytes=ref.size_bytes, sha256=ref.sha256)


def _object_from_proto(message: bus_pb2.ObjectRef) -> ObjectRef:
    return ObjectRef(message.name, message.size_bytes, message.sha256)


# --- leases ----------------------------------------------------------------------------------------


def encode_lease(lease: WorkerLease) -> bytes:
    return bus_pb2.WorkerLease(
        schema=SCHEMA,
        worker_id=lease.worker_id,
        name=lease.name,
        pool=lease.pool,
        engine=lease.engine,
        state=lease.state.value,
        detail=lease.detail,
        slots=lease.slots,
        running=lease.running,
        kv_tokens=lease.kv_tokens,
        kv_tokens_used=lease.kv_tokens_used,
        prefill_tokens_per_s=lease.prefill_tokens_per_s,
        decode_tokens_per_s=lease.decode_tokens_per_s,
        service_s=lease.service_s,
        started_at=timestamp_of(lease.started_s),
        renewed_at=timestamp_of(lease.renewed_s),
        jobs_done=lease.jobs_done,
        tokens_done=lease.tokens_done,
        busy_s=lease.busy_s,
        capabilities=lease.capabilities,
        running_by_lane={int(enums.LANE_TO_WIRE[lane]): count for lane, count in lease.running_by_lane.items()},
        process_id=lease.process_id,
        home=lease.home,
        step_times=step_times_to_proto(lease.step_times),
        lower_tokens_per_s=lease.lower_tokens_per_s,
        priority_tpot_p95_s=lease.priority_tpot_p95_s,
        theta=lease.theta,
        hot_prefixes=lease.hot_prefixes,
        block_tokens=lease.block_tokens,
        lower_places=lease.lower_places,
        load_progress=lease.load_progress,
        engine_deaths=lease.engine_deaths,
    ).SerializeToString()


def decode_lease(data: bytes) -> WorkerLease:
    message = bus_pb2.WorkerLease()
    parse_message(message, data, "worker lease")
    check_schema(message.schema, "worker lease")
    try:
        return WorkerLease(
            worker_id=message.worker_id,
            name=message.name,
            pool=message.pool,
            engine=message.engine,
            state=WorkerState(message.state),
            detail=message.detail,
            slots=message.slots,
            running=message.running,
            kv_tokens=message.kv_tokens,
            kv_tokens_used=message.kv_tokens_used,
            prefill_tokens_per_s=message.prefill_tokens_per_s,
            decode_tokens_per_s=message.decode_tokens_per_s,
            service_s=message.service_s,
            started_s=unix_s(message.started_at),
            renewed_s=unix_s(message.renewed_at),
            jobs_done=message.jobs_done,
            tokens_done=message.tokens_done,
            busy_s=message.busy_s,
            capabilities=tuple(message.capabilities),
            running_by_lane={enums.LANE_FROM_WIRE[lane]: count for lane, count in message.running_by_lane.items()},
            process_id=message.process_id,
            home=message.home,
            step_times=step_times_from_proto(message.step_times),
            lower_tokens_per_s=message.lower_tokens_per_s,
            priority_tpot_p95_s=message.priority_tpot_p95_s,
            theta=message.theta,
            hot_prefixes=tuple(message.hot_prefixes),
            block_tokens=message.block_tokens,
            lower_places=message.lower_places,
            load_progress=message.load_progress,
            engine_deaths=message.engine_deaths,
        )
    except (KeyError, ValueError) as error:
        raise UnreadableMessage(f"the worker lease holds an unknown value: {error}") from None


def _varint_bytes(number: int) -> bytes:
    """The base-128 form in which protobuf writes lengths."""
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)


def check_schema(schema: int, what: str) -> None:
    newest = _schema(refers=True)
    if not max(1, SCHEMA - 1) <= schema <= newest:
        raise UnreadableMessage(f"the {what} has schema {schema}; this release reads up to {newest}")


def _schema(*, refers: bool) -> int:
    return max(SCHEMA, SCHEMA_BY_REFERENCE) if refers else SCHEMA
