"""NATS header names that Laneway uses, and what an acknowledgement subject says."""

from __future__ import annotations

from msgspec import Struct
from nats.js.api import Header

STATUS = "Status"
DESCRIPTION = Header.DESCRIPTION  # nats-py keys it by its enum member, whose hash is not that of the string
MSG_ID = "Nats-Msg-Id"
TTL = "Nats-TTL"
WRITE = "Laneway-Write"  # names one write of a record, so that its writer knows it again
EXPECTED_SUBJECT_SEQUENCE = "Nats-Expected-Last-Subject-Sequence"
EXPECTED_SUBJECT_SEQUENCE_SUBJECT = "Nats-Expected-Last-Subject-Sequence-Subject"
SCHEDULE = "Nats-Schedule"
SCHEDULE_TARGET = "Nats-Schedule-Target"
SCHEDULE_NEXT = "Nats-Schedule-Next"
SCHEDULER = "Nats-Scheduler"
ROLLUP = "Nats-Rollup"  # of the facts of an object alone, as the official clients set it
CONSUMER_STALLED = "Nats-Consumer-Stalled"
# In direct gets and republished copies.
SEQUENCE = "Nats-Sequence"
SUBJECT = "Nats-Subject"
TIME_STAMP = "Nats-Time-Stamp"  # by the server's clock


class AckSubject(Struct, frozen=True):
    """The reply subject of a delivery: $JS.ACK.[<domain>.<account>.]<stream>.<consumer>.<deliveries>.<sequence>.…"""

    deliveries: int
    stream_sequence: int
    consumer_sequence: int
    stored_s: float  # Unix seconds, by the server's clock
    pending: int

    @classmethod
    def parse(cls, reply: str) -> AckSubject:
        tokens = _ack_tokens(reply)
        return cls(int(tokens[4]), int(tokens[5]), int(tokens[6]), int(tokens[7]) / 1e9, int(tokens[8]))


def ack_sequence(reply: str) -> int:
    """The stream sequence of a delivered message."""
    return int(_ack_tokens(reply)[5])


def _ack_tokens(reply: str) -> list[str]:
    tokens = reply.split(".")
    if len(tokens) < 9 or tokens[0] != "$JS" or tokens[1] != "ACK":
        raise ValueError(f"not the reply subject of a delivery: {reply!r}")
    return tokens[2:] if len(tokens) >= 11 else tokens  # version 2 has a domain and an account hash before the stream
