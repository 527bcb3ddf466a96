"""Dead letters: as bytes in their stream, as their owners see them, and as the request that runs a job again."""

from __future__ import annotations

import contextlib

from google.protobuf.message import DecodeError
from msgspec.structs import replace

from laneway.core.dead_letters import DeadLetter
from laneway.core.job import SCHEMA, GenerateTask, JobRecord
from laneway.core.lanes import OnDisconnect
from laneway.runtime.wire import enums, jobs, records
from laneway.runtime.wire.reading import UnreadableMessage, parse_message
from laneway.runtime.wire.times import timestamp_of, unix_s
from laneway.v1 import admission_pb2, bus_pb2, task_pb2


def encode_dead_letter(record: JobRecord, message: bytes, died_s: float) -> bytes:
    """`message`: the lane message as it was delivered. One that cannot even be a message of ours is left out; one that
    only this release cannot read is kept, for a release that can."""
    letter = bus_pb2.StoredDeadLetter(
        schema=SCHEMA, record=records.record_to_proto(record), died_at=timestamp_of(died_s)
    )
    if message:
        try:
            letter.message.ParseFromString(message)
        except DecodeError:
            letter.ClearField("message")
    return letter.SerializeToString()


def decode_dead_letter(data: bytes, *, listed: bool = False) -> DeadLetter:
    """`listed`: without its job, whose prompt alone takes longer than all the rest. Raises UnreadableMessage."""
    message = bus_pb2.StoredDeadLetter()
    parse_message(message, data, "dead letter")
    records.check_schema(message.schema, "dead letter")
    try:
        record = records.record_from_proto(message.record)
    except (KeyError, ValueError) as error:
        raise UnreadableMessage(f"the dead letter holds an unknown value: {error}") from None
    job = None
    if message.HasField("message"):
        if listed and message.message.HasField("task"):
            message.message.task.ClearField("tokens")
        with contextlib.suppress(UnreadableMessage):  # the letter is worth seeing without
            job = records.decode_lane_job(message.message.SerializeToString())
    if listed:
        return DeadLetter(record, None, unix_s(message.died_at), left_out=job is not None)
    return DeadLetter(record, job, unix_s(message.died_at))


def dead_letter_to_proto(letter: DeadLetter) -> admission_pb2.DeadLetter:
    record = letter.record
    return admission_pb2.DeadLetter(
        job_id=record.job_id,
        tenant=record.tenant,
        model=record.model,
        lane=enums.LANE_TO_WIRE[record.contract.lane],
        reason=letter.reason,
        message=record.error.message if record.error else "",
        died_at=timestamp_of(letter.died_s),
        attempts=[
            admission_pb2.DeadAttempt(attempt=a.attempt, worker_id=a.owner, claimed_at=timestamp_of(a.claimed_s))
            for a in record.lineage
        ],
        requeueable=letter.requeueable,
        prompt_tokens=record.prompt_tokens,
        max_tokens=record.max_tokens,
        labels=record.contract.labels,
        requeued_from=record.requeued_from,
    )


def requeue_spec(record: JobRecord, task: GenerateTask, deadline_s: float) -> task_pb2.JobSpec:
    """What a caller would send to have the same done until `deadline_s`, as soon as there is room, and with nobody at a
    stream whose leaving could end it."""
    contract = replace(record.contract, deadline_s=deadline_s, not_before_s=0.0, on_disconnect=OnDisconnect.KEEP)
    return task_pb2.JobSpec(
        model=record.model,
        generate=jobs.task_to_proto(task),
        contract=jobs.contract_to_proto(contract),
    )
