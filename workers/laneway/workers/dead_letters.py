"""The dead letter of a job that was given up: stored after its record has ended, and before its lane message goes.

The record goes first because its caller waits for it: a full or broken stream of dead letters must not keep an end from
anybody. So that a crash in between loses no letter, whoever finds such a record when a message is delivered stores it
again before he acknowledges.
"""

from __future__ import annotations

import structlog

from laneway.core.clock import Clock
from laneway.core.dead_letters import given_up
from laneway.runtime.bus import BusError
from laneway.runtime.dead_letters import DeadLetterStore
from laneway.runtime.puller import Delivery
from laneway.workers import metrics
from laneway.workers.claims import Ack, Answer, Nak

RETRY_S = 5.0  # until a letter that could not be stored is tried again
TRY_S_MAX = 600.0  # since the job ended; after that its message no longer takes a place in the lane

_log = structlog.get_logger(__name__)


class DeadLetters:
    """Shared by all runs of a worker."""

    def __init__(self, store: DeadLetterStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    async def before(self, what: Answer, delivery: Delivery) -> Answer:
        """How to answer a delivery: as `what`, or, where that acknowledges a job whose dead letter cannot be stored
        now, with a NAK, for TRY_S_MAX at most. A letter that is lost then is counted, and its record still says all
        but the request."""
        if not isinstance(what, Ack) or what.stored is None or not given_up(what.stored.record):
            return what
        record = what.stored.record
        assert record.error is not None
        job_id, lane, reason = record.job_id, record.contract.lane.value, record.error.reason
        try:
            if await self._store.store(record, delivery.data):
                metrics.DEAD_LETTERS.labels(lane, reason).inc()
                _log.error("job_given_up", job_id=job_id, lane=lane, tenant=record.tenant, reason=reason)
        except BusError as error:
            if self._clock.now() - record.timings.ended_s < TRY_S_MAX:
                _log.warning("dead_letter_not_stored", job_id=job_id, error=error.message)
                return Nak(RETRY_S, "no_dead_letter")
            metrics.DEAD_LETTERS_LOST.labels(lane, reason).inc()
            _log.error("dead_letter_lost", job_id=job_id, lane=lane, tenant=record.tenant, reason=reason)
        return what
