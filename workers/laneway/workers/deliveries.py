"""Deliveries as they are pulled, and how they are answered.

Best effort on both ways: an answer that is lost means another delivery, and the record decides.
"""

from __future__ import annotations

import structlog

from laneway.core.job import QueuedJob
from laneway.runtime.bus import BusError
from laneway.runtime.puller import Delivery
from laneway.runtime.records import StoredRecord
from laneway.workers.claims import Ack, Answer, Delivered, Nak

SUBJECT_TOKENS = 7  # of subjects.ready

_log = structlog.get_logger(__name__)


def delivered_of(delivery: Delivery, job: QueuedJob, ack_wait_s: float) -> Delivered:
    record = job.record
    accepted = StoredRecord(record, delivery.record_sequence)
    return Delivered(
        record.region,
        record.tenant,
        record.job_id,
        accepted,
        delivery.deliveries > 1,
        ack_wait_s,
        reason=delivery.reason,
    )


def unreadable_of(delivery: Delivery, ack_wait_s: float) -> Delivered | None:
    """Of a message whose body cannot be read: its subject names the job. None: it names none, so that it is none."""
    parts = delivery.subject.split(".")
    if len(parts) != SUBJECT_TOKENS:
        return None
    _, region, _, _, _, tenant, job_id = parts
    return Delivered(region, tenant, job_id, None, delivery.deliveries > 1, ack_wait_s)


async def answer(delivery: Delivery, what: Answer) -> None:
    try:
        match what:
            case Ack():
                await delivery.ack()
            case Nak(delay_s, _):
                await delivery.nak(delay_s)
            case _:
                _log.warning("lane_message_terminated", subject=delivery.subject, reason=what.reason)
                await delivery.term(what.reason)
    except BusError as error:
        _log.warning("delivery_not_answered", subject=delivery.subject, reason=error.reason)


def word_of(what: Answer) -> str:
    """What became of the delivery, as a word for metrics."""
    match what:
        case Ack(stored):
            return stored.record.state.value if stored is not None else "ended"
        case Nak(_, reason):
            return reason
        case _:
            return "terminated"
