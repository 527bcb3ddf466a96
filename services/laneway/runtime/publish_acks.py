"""What JetStream answers to a publish: stored, or refused and why."""

from __future__ import annotations

import msgspec

from laneway.runtime.bus_errors import PublishUnknown, publish_error


class _Refusal(msgspec.Struct):
    code: int = 0
    err_code: int = 0
    description: str = ""


class _PubAck(msgspec.Struct):
    seq: int = 0
    duplicate: bool = False
    error: _Refusal | None = None


class Stored(msgspec.Struct, frozen=True):
    """A JetStream acknowledgement. `duplicate`: the server had this Nats-Msg-Id and stored nothing new."""

    sequence: int
    duplicate: bool


_decoder = msgspec.json.Decoder(_PubAck)


def read_ack(subject: str, data: bytes) -> Stored:
    """Raises the error that a refusal means; PublishUnknown where the answer is none."""
    try:
        ack = _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise PublishUnknown(f"publish to {subject}: the acknowledgement does not parse") from error
    if ack.error is not None:
        raise publish_error(ack.error.code, ack.error.err_code, ack.error.description)
    return Stored(ack.seq, ack.duplicate)
