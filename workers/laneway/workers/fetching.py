"""A job whose task is in the object store, from its delivery until its task is here: it has its seat, and does not run.

It is not claimed meanwhile, so whatever goes wrong for now gives it back to its lane. An object that is gone ends the
job: nobody could run it.
"""

from __future__ import annotations

import asyncio

import structlog

from laneway.core.errors import ObjectLost
from laneway.core.job import LaneJob, ReferredJob
from laneway.runtime.bus import BusError
from laneway.runtime.puller import Delivery
from laneway.runtime.references import References
from laneway.workers.ackwait import AckWait
from laneway.workers.claims import Nak
from laneway.workers.ledger import Seat
from laneway.workers.messages import Attachment

FETCH_S_MAX = 10.0
RETRY_S = 1.0  # before a job whose task could not be had is delivered again
STOPPED = Nak(0.0, "stopped")

_log = structlog.get_logger(__name__)


class Fetch:
    """Takes the place of a run until there is one. `get` once; the rest is called on the event loop and never waits."""

    def __init__(self, job: ReferredJob, delivery: Delivery, seat: Seat, ack_wait: AckWait, *, kept: bool) -> None:
        self.job = job
        self.job_id = job.record.job_id
        self.lane = job.record.contract.lane
        self.delivery = delivery  # a newer one of the same message replaces it
        self.seat = seat
        self.ack_wait = ack_wait
        self.kept = kept
        self._limit: asyncio.Timeout | None = None  # from when it is under way
        self._stopped = False

    async def get(self, references: References) -> LaneJob | Nak | ObjectLost:
        """The job with its task, or why it does not run here now, or never."""
        try:
            async with asyncio.timeout(0.0 if self._stopped else FETCH_S_MAX) as self._limit:
                job = await references.job(self.job)
        except TimeoutError:
            return STOPPED if self._stopped else Nak(RETRY_S, "task_not_fetched")
        except ObjectLost as lost:
            return lost
        except BusError as error:
            _log.warning("task_not_fetched", job_id=self.job_id, reason=error.reason)
            return Nak(RETRY_S, "task_not_fetched")
        except Exception as error:  # noqa: BLE001 - one job's fault must not end the others
            _log.error("fetch_failed", job_id=self.job_id, error=repr(error), exc_info=error)
            return Nak(self.ack_wait.interval_s, "fault")
        return STOPPED if self._stopped else job

    def stop(self) -> None:
        """It is not to run here: this worker drains, or somebody ended the job, as its next delivery finds out."""
        self._stopped = True
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time())

    def attach(self, door: str, attachment: Attachment, now_s: float) -> None:
        """A door follows the job. It says so again once there is a run, which announces itself."""
