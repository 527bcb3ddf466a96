"""The core NATS messages between doors and workers, as bytes. Field names of bus.proto appear here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from google.protobuf.message import DecodeError
from msgspec import Struct

from laneway.core.ids import is_token
from laneway.core.job import JobRecord
from laneway.core.lanes import JobState
from laneway.runtime.wire import enums
from laneway.runtime.wire.answers import Answered, answer_from_proto, answer_to_proto, answered
from laneway.runtime.wire.reading import UnreadableMessage
from laneway.runtime.wire.records import decode_record, encode_record
from laneway.v1 import bus_pb2

# In ids, of three bytes or so each. One attachment may hold as many ids as a door keeps for a stream.
BEAT_SIZE_MAX = 65_536
ATTACHMENT_SIZE = 32  # of the rest of an attachment


class Attachment(Struct, frozen=True):
    """What a door streams, or wants to stream, from a worker."""

    job_id: str
    attempt: int  # 0: whatever runs
    next_index: int  # first token the caller has not got
    delivered_ids: Sequence[int] = ()  # from index 0, where the door holds them all
    replay: bool = False


def encode_beats(door: str, attachments: Iterable[Attachment]) -> Iterator[bytes]:
    """As few messages as keep below NATS' limit for one: delivered ids are many after a worker with many runs died."""
    part: list[Attachment] = []
    size = 0
    for attachment in attachments:
        adds = ATTACHMENT_SIZE + len(attachment.delivered_ids)
        if part and size + adds > BEAT_SIZE_MAX:
            yield _encode_beat(door, part)
            part, size = [], 0
        part.append(attachment)
        size += adds
    if part:
        yield _encode_beat(door, part)


def _encode_beat(door: str, attachments: Iterable[Attachment]) -> bytes:
    beat = bus_pb2.DoorBeat(
        door=door,
        attachments=[
            bus_pb2.Attachment(
                job_id=a.job_id,
                attempt=a.attempt,
                next_index=a.next_index,
                delivered_ids=a.delivered_ids,
                replay=a.replay,
            )
            for a in attachments
        ],
    )
    return bus_pb2.WorkerControl(beat=beat).SerializeToString()


def encode_cancel_hint(job_id: str) -> bytes:
    return bus_pb2.WorkerControl(cancel=bus_pb2.CancelHint(job_id=job_id)).SerializeToString()


def encode_event(record: JobRecord, *, worker_id: str = "", with_record: bool = False) -> bytes:
    return bus_pb2.JobEvent(
        job_id=record.job_id,
        state=enums.JOB_STATE_TO_WIRE[record.state],
        attempt=record.attempt,
        worker_id=worker_id,
        record=encode_record(record) if with_record else b"",
        answer=answer_to_proto(answered(record)),
    ).SerializeToString()


class Event(Struct, frozen=True):
    """A hint that something happened to a job; the record decides."""

    job_id: str
    state: JobState
    attempt: int
    worker_id: str
    record: JobRecord | None
    answer: Answered | None = None


def decode_event(data: bytes) -> Event:
    """Raises UnreadableMessage."""
    try:
        message = bus_pb2.JobEvent.FromString(data)
    except DecodeError:
        raise UnreadableMessage("the job event is not a valid protobuf message") from None
    state = enums.JOB_STATE_FROM_WIRE.get(message.state)
    if state is None:
        raise UnreadableMessage(f"the job event has the unknown state {message.state}")
    _check_worker(message.worker_id)
    record = decode_record(message.record) if message.record else None
    return Event(message.job_id, state, message.attempt, message.worker_id, record, answer_from_proto(message))


def decode_answer(data: bytes) -> Answered | None:
    """What an event of another door's job says of the length of its answer; None where it is not of such an end."""
    try:
        return answer_from_proto(bus_pb2.JobEvent.FromString(data))
    except DecodeError:
        return None


def decode_tokens(data: bytes) -> bus_pb2.TokenBatch:
    """All that one engine step gave to this door. Raises UnreadableMessage.

    The one message that is not turned into values of ours: it comes once a step for all streams, and copying its
    deltas would cost as much as forwarding them.
    """
    try:
        batch = bus_pb2.TokenBatch.FromString(data)
    except DecodeError:
        raise UnreadableMessage("the token batch is not a valid protobuf message") from None
    _check_worker(batch.worker_id)
    return batch


def _check_worker(worker_id: str) -> None:
    """It becomes part of the subject on which the worker is told of us. Doors' own events name none."""
    if worker_id and not is_token(worker_id):
        raise UnreadableMessage("the message names a worker that can be none")
