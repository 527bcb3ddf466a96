"""What a worker says and hears on core NATS beside tokens, bytes to values and back: events and control messages.

The only module of the workers that knows these messages' field names.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError
from msgspec import Struct

from laneway.core.lanes import JobState
from laneway.runtime.wire import enums
from laneway.runtime.wire.answers import Answered, answer_to_proto
from laneway.v1 import bus_pb2


class CancelHint(Struct, frozen=True):
    job_id: str


class DrainHint(Struct, frozen=True):
    draining: bool


class Attachment(Struct, frozen=True):
    job_id: str
    attempt: int  # 0: whatever runs
    next_index: int  # first token that the door's caller has not got
    delivered_ids: tuple[int, ...]  # ids 0 .. next_index, where the door holds them
    replay: bool  # send again from next_index


class DoorBeat(Struct, frozen=True):
    door: str
    attachments: tuple[Attachment, ...]


Control = CancelHint | DrainHint | DoorBeat


def parse_control(data: bytes) -> Control | None:
    """A control message; None when it is malformed or of a kind that this release does not know."""
    message = bus_pb2.WorkerControl()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return None
    match message.WhichOneof("control"):
        case "cancel":
            return CancelHint(message.cancel.job_id)
        case "drain":
            return DrainHint(message.drain.draining)
        case "beat":
            return DoorBeat(message.beat.door, tuple(_attachment(a) for a in message.beat.attachments))
        case _:
            return None


def _attachment(message: bus_pb2.Attachment) -> Attachment:
    return Attachment(message.job_id, message.attempt, message.next_index, tuple(message.delivered_ids), message.replay)


def event(
    job_id: str, state: JobState, attempt: int, worker_id: str, record: bytes = b"", answer: Answered | None = None
) -> bytes:
    """A serialised JobEvent; `record` is the stored record of a job that ended, or empty."""
    return bus_pb2.JobEvent(
        job_id=job_id,
        state=enums.JOB_STATE_TO_WIRE[state],
        attempt=attempt,
        worker_id=worker_id,
        record=record,
        answer=answer_to_proto(answer),
    ).SerializeToString()
