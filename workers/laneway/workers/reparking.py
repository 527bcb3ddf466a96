"""A job that gave way to priority work goes back among the parked, where it waits as it did before it was released.

Its record is WAITING already, so the job lives whatever happens here: until the new message is stored, the old one is
the job, and afterwards there may be both for a while. The claim takes one.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog
from msgspec.structs import replace

from laneway.core.catalogue import Pool
from laneway.core.clock import Clock
from laneway.core.fleet import Plan
from laneway.core.job import GenerateTask, JobRecord
from laneway.policy.affinity import home_again
from laneway.policy.eta import Load, pool_view, work_ahead_s
from laneway.policy.fire import fire_at_s
from laneway.policy.grouping import group_of
from laneway.runtime.bus import BusError, PayloadTooLarge, PublishUnknown
from laneway.runtime.lanes import LaneStore
from laneway.runtime.puller import Delivery
from laneway.runtime.records import StoredRecord
from laneway.runtime.wire.records import encode_lane_job

PARK_TRIES = 3

_log = structlog.get_logger(__name__)


class Reparking:
    """`plan`: the scheduler's newest plan; None while there is no fresh one. `floor`: the share of a pool that its
    lower lanes always get, as it holds now."""

    def __init__(
        self, lanes: LaneStore, pool: Pool, plan: Callable[[], Plan | None], clock: Clock, floor: Callable[[], float]
    ) -> None:
        self._lanes = lanes
        self._pool = pool
        self._plan = plan
        self._clock = clock
        self._floor = floor

    async def park(self, stored: StoredRecord, task: GenerateTask, delivery: Delivery) -> bool:
        """Parks the job of this delivery from its present record. False: it may not be stored, and the delivery must
        not be acknowledged."""
        record = replace(stored.record, home=self._home_of(stored.record))
        job = replace(delivery.job, record=record)  # with its task as it came, inside or by reference
        data = encode_lane_job(job)
        fire_s = self.fire_at_s(record)
        group = group_of(record.pool, record.tenant, task)
        for _ in range(PARK_TRIES):
            try:
                await self._lanes.park(job, stored.sequence, data, fire_at_s=fire_s, group=group)
            except PublishUnknown:
                continue  # the message id makes a repetition harmless
            except (BusError, PayloadTooLarge) as error:  # its record has grown since it was accepted
                _log.warning("job_not_parked_again", job_id=record.job_id, reason=error.reason)
                return False
            else:
                return True
        return False

    def _home_of(self, record: JobRecord) -> str:
        plan = self._plan()
        ran = record.lineage[-1].owner if record.lineage else ""
        return home_again(record.affinity_key, plan.pool(record.pool).homes, ran) if plan is not None else ""

    def fire_at_s(self, record: JobRecord) -> float:
        """When NATS releases it without a scheduler, by the rule of admission: never after its latest start, unless
        that has passed."""
        view = pool_view(record.pool, self._plan(), (), Load(), fresh=True)
        service_s = record.device_ms / 1000.0 * max(1, self._pool.slots)
        return fire_at_s(
            now_s=self._clock.now(),
            not_before_s=record.contract.not_before_s,
            latest_start_s=record.latest_start_s,
            parked_device_s_ahead=work_ahead_s(self._pool, view, record.contract.lane, service_s=service_s),
            floor_rate=self._floor() * max(1, view.plan.workers or self._pool.workers),
        )
