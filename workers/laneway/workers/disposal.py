"""Jobs that end here without ever running: too late, too large, unreadable, without their prompt.

Their records are ended by compare-and-set from where they wait, by the same rules as a claim, and only then does the
lane message go.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from laneway.core import job as jobs
from laneway.core.clock import Clock
from laneway.core.dead_letters import TASK_LOST, UNREADABLE_JOB
from laneway.core.errors import Code
from laneway.core.job import JobError, JobRecord, QueuedJob
from laneway.runtime.bus import BusError
from laneway.runtime.puller import Delivery
from laneway.workers.claims import Ack, Claims, Delivered, Nak, Term, queue_deadline_error
from laneway.workers.dead_letters import DeadLetters
from laneway.workers.deliveries import answer, word_of
from laneway.workers.endings import Endings

_log = structlog.get_logger(__name__)


class Disposal:
    """Each method answers the delivery and returns what became of it, as a word for metrics."""

    def __init__(self, claims: Claims, endings: Endings, dead_letters: DeadLetters, clock: Clock) -> None:
        self._claims = claims
        self._endings = endings
        self._dead_letters = dead_letters
        self._clock = clock

    async def expired(self, delivery: Delivery, delivered: Delivered) -> str:
        return await self._end(
            delivery, delivered, lambda record: jobs.expire(record, queue_deadline_error(), self._clock.now())
        )

    async def never_fits(self, delivery: Delivery, delivered: Delivered, job: QueuedJob, limit: int) -> str:
        prompt, wanted = job.record.prompt_tokens, job.record.max_tokens
        message = f"prompt and max_tokens are {prompt} + {wanted} tokens; the worker can hold {limit}"
        error = JobError(Code.INVALID_ARGUMENT, "CONTEXT_EXCEEDED", message, field="spec.generate.sampling.max_tokens")
        return await self._end(delivery, delivered, lambda record: jobs.reject(record, error, self._clock.now()))

    async def unreadable(self, delivery: Delivery, delivered: Delivered, why: str) -> str:
        _log.error("lane_message_unreadable", subject=delivery.subject, error=why)
        error = JobError(Code.INTERNAL, UNREADABLE_JOB, "the stored job cannot be read by its workers")
        return await self._end(delivery, delivered, lambda record: jobs.reject(record, error, self._clock.now()))

    async def task_lost(self, delivery: Delivery, delivered: Delivered, why: str) -> str:
        _log.error("task_lost", job_id=delivered.job_id, error=why)
        error = JobError(Code.DATA_LOSS, TASK_LOST, "the job's stored prompt is gone or damaged; it cannot be run")
        return await self._end(delivery, delivered, lambda record: jobs.reject(record, error, self._clock.now()))

    async def stray(self, delivery: Delivery) -> str:
        """What is no job has no record to end."""
        what = Term("NO_JOB")
        await answer(delivery, what)
        return word_of(what)

    async def _end(self, delivery: Delivery, delivered: Delivered, change: Callable[[JobRecord], JobRecord]) -> str:
        try:
            what = await self._claims.end(delivered, change)
        except BusError as error:
            _log.warning("job_not_ended", job_id=delivered.job_id, reason=error.reason)
            what = Nak(delivered.ack_wait_s, "undecided")
        if isinstance(what, Ack) and what.stored is not None:
            await self._endings.announce(what.stored.record, with_record=True)
        what = await self._dead_letters.before(what, delivery)
        await answer(delivery, what)
        return word_of(what)
