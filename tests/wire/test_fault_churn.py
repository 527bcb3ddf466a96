"""Workers come, go and die under load: every job ends, and each token reaches its door once."""

from __future__ import annotations

import pytest

from laneway.core.lanes import LANES, JobState
from laneway.runtime.local_nats import LocalNats
from tests.support.nats import eventually
from tests.support.worker import ByteDoor, RunningWorker, yard

TOKENS = 100
CHANGES = 6
MORE = 16


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_no_job_is_left_waiting_while_workers_come_and_go(nats_server: LocalNats):
    waits = {f"nats__ack_wait_{lane}_s": 1.0 for lane in LANES}
    async with (
        yard(nats_server, workers=3, engine__pace_s=0.01, process__drain_s=0.3, **waits) as place,
        ByteDoor(place.bus) as door,
    ):
        ids: list[str] = []

        async def busy(worker: RunningWorker) -> None:
            await eventually(lambda: not worker.idle(), 30.0)

        for change in range(CHANGES):
            for number in range(MORE):  # more than there are slots, so that all are busy
                prompt, lane = f"{change} {number}?".encode(), LANES[number % 3]
                stored = await place.submit(caller_at=door, lane=lane, prompt=prompt, max_tokens=TOKENS)
                ids.append(stored.record.job_id)
            oldest = place.workers[change]
            await busy(oldest)
            await place.start_worker(f"new{change}")
            await (oldest.die() if change % 2 else oldest.drain())
        records = await place.ended(*ids, timeout_s=60.0)
        assert {record.state for record in records} == {JobState.SUCCEEDED}
        assert any(record.starts > 1 for record in records), "some had to move"
        for record in records:
            assert record.result is not None
            assert len(record.result.token_ids) == TOKENS
        await eventually(lambda: all(len(door.ids(job_id)) == TOKENS for job_id in ids))
        assert [tuple(door.ids(r.job_id)) for r in records] == [r.result.token_ids for r in records if r.result]
        assert await eventually(place.lanes_empty)
        assert all(worker.idle() for worker in place.workers[CHANGES:])
