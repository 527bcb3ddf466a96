"""What a run learns of the attempts before it, and the plan that follows from it.

Doors are heard, not asked: the announcement of the claim has them attach. Checkpoints are read meanwhile. Both are
bounded, for nothing runs until the plan stands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from laneway.core.catalogue import Capabilities
from laneway.core.checkpoints import Prefix
from laneway.core.job import JobRecord, LaneJob
from laneway.runtime.bus import BusError, NotPermitted
from laneway.runtime.checkpoints import CheckpointStore
from laneway.workers import metrics
from laneway.workers.resume import NOTHING, Continue, Offer, Plan, Rerun, completed, goes_on, plan_resume

ATTACH_WAIT_S = 0.2  # a taker waits so long for the caller's door to say what it delivered
READ_S_MAX = 5.0  # for reading checkpoints, where NATS has trouble: as long as a stream may be without a leader
READ_AGAIN_S = 0.1  # before another try

_log = structlog.get_logger(__name__)


class Takeover:
    """Of one run. `over`: whether it has its outcome already; `heard` is to be called whenever that changes."""

    def __init__(self, job: LaneJob, store: CheckpointStore, over: Callable[[], bool], pool: str) -> None:
        self._job = job
        self._store = store
        self._over = over
        self._pool = pool
        self._offers: dict[str, Offer] = {}
        self._wake = asyncio.Event()

    def offer(self, door: str, offer: Offer) -> None:
        self._offers[door] = offer
        self._wake.set()

    def heard(self) -> None:
        self._wake.set()

    async def plan(self, record: JobRecord, can: Capabilities) -> Plan:
        """How the attempt of this record, which is claimed, begins on an engine that can do so much."""
        task = self._job.task
        async with asyncio.TaskGroup() as group:
            group.create_task(self._hear_door(record))
            reading = group.create_task(self._read(record)) if goes_on(task, can) else None
        checkpoint = reading.result() if reading is not None else Prefix()
        own = self._offers.get(record.door, NOTHING) if record.attached else NOTHING
        others = [offer for door, offer in self._offers.items() if not (record.attached and door == record.door)]
        plan = plan_resume(task, completed(own, checkpoint, record.lineage), others, checkpoint, can=can)
        self._count(record, plan, max(len(checkpoint), record.checkpoint_index, own.next_index))
        return plan

    async def _hear_door(self, record: JobRecord) -> None:
        """Waits until the caller's door has attached, but not long; not at all where nobody is attached."""
        if not record.attached:
            return
        try:
            async with asyncio.timeout(ATTACH_WAIT_S):
                while record.door not in self._offers and not self._over():
                    self._wake.clear()
                    await self._wake.wait()
        except TimeoutError:
            _log.info("door_not_attached", job_id=record.job_id, attempt=record.attempt)

    async def _read(self, record: JobRecord) -> Prefix:
        """What the checkpoints hold; when they cannot be read, nothing. Tries again for what is known to be there."""
        found: Prefix | None = None
        try:
            async with asyncio.timeout(READ_S_MAX):
                while not self._over():
                    try:
                        before, found = found, await self._store.read(record)
                    except NotPermitted:
                        raise
                    except BusError as error:
                        _log.warning("checkpoints_not_read", job_id=record.job_id, reason=error.reason)
                    else:
                        # A replica may be behind for a moment; what was dropped does not come back.
                        # By their ids: a log probability that nobody knows equals none.
                        if len(found) >= record.checkpoint_index or (before is not None and found.ids == before.ids):
                            return found
                    await asyncio.sleep(READ_AGAIN_S)
        except (TimeoutError, BusError) as error:
            _log.warning("checkpoints_given_up", job_id=record.job_id, error=repr(error))
        return found or Prefix()

    def _count(self, record: JobRecord, plan: Plan, known: int) -> None:
        """`known`: tokens that earlier attempts are known to have computed."""
        resumed = plan.start_index if isinstance(plan, Continue) else 0
        again = known - resumed if isinstance(plan, Continue | Rerun) else 0
        labels = self._pool, record.contract.lane.value
        metrics.RESUMED.labels(*labels).inc(resumed)
        metrics.RECOMPUTED.labels(*labels).inc(max(0, again))
        _log.info(
            "job_taken_up", job_id=record.job_id, attempt=record.attempt, how=type(plan).__name__.lower(),
            start_index=plan.start_index, known=known,
        )  # fmt: skip
