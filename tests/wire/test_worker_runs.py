"""Workers with a real nats-server and simulated engines: jobs end exactly once, with what was promised."""

from __future__ import annotations

from collections import Counter

from laneway.core.fleet import WorkerState
from laneway.core.job import Sampling
from laneway.core.lanes import LANES, FinishReason, JobState, Lane
from laneway.runtime.clock import SystemClock
from laneway.runtime.leases import LeaseWatcher
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.metrics import exposition
from tests.support.nats import REGION, eventually
from tests.support.worker import ByteDoor, ids_of, yard


async def test_a_job_runs_and_its_stream_equals_its_result(nats_server: LocalNats):
    async with yard(nats_server, workers=1) as place, ByteDoor(place.bus) as door:
        stored = await place.submit(caller_at=door, max_tokens=20)
        job_id = stored.record.job_id
        (record,) = await place.ended(job_id)
        assert record.state is JobState.SUCCEEDED
        assert record.result is not None
        assert record.result.finish_reason is FinishReason.LENGTH
        assert record.result.usage.completion_tokens == 20
        assert record.attempt == 1
        await eventually(lambda: len(door.ids(job_id)) == 20)
        assert tuple(door.ids(job_id)) == record.result.token_ids
        assert door.text(job_id) == record.result.text
        states = [event.state for event in door.events[job_id]]
        assert len(states) == 2
        assert door.events[job_id][1].record
        assert await eventually(place.lanes_empty)
        assert await eventually(place.workers[0].idle)


async def test_500_jobs_over_three_lanes_and_three_workers_end_exactly_once(nats_server: LocalNats):
    async with yard(nats_server, workers=3, policy__lower_lane_prefills_max=4) as place:
        lanes = [LANES[i % 3] for i in range(500)]
        stored = [await place.submit(lane=lane, max_tokens=4) for lane in lanes]
        records = await place.ended(*ids_of(stored), timeout_s=50)
        assert Counter(record.state for record in records) == {JobState.SUCCEEDED: 500}
        assert all(record.attempt == 1 and record.starts == 1 for record in records)
        assert await eventually(place.lanes_empty)
        for running in place.workers:
            await eventually(running.idle)
            assert len(running.worker.sequences) == 0
        assert sum(running.worker.rates.jobs_done for running in place.workers) == 500
        assert all(running.worker.rates.jobs_done for running in place.workers)


async def test_copies_of_a_lane_message_run_once(nats_server: LocalNats):
    async with yard(nats_server, workers=2, nats__ack_wait_priority_s=1.0) as place:
        stored = [await place.submit(copies=3, max_tokens=30) for _ in range(10)]
        records = await place.ended(*ids_of(stored))
        assert {(record.state, record.starts) for record in records} == {(JobState.SUCCEEDED, 1)}
        assert await eventually(place.lanes_empty)
        assert sum(running.worker.rates.jobs_done for running in place.workers) == 10


async def test_a_stop_string_ends_the_answer_and_frees_the_engine(nats_server: LocalNats):
    async with yard(nats_server, workers=1) as place, ByteDoor(place.bus) as door:
        whole = await place.submit(max_tokens=64)
        (record,) = await place.ended(whole.record.job_id)
        assert record.result is not None
        stop = record.result.text[10:13]
        wanted = record.result.text[: record.result.text.index(stop)]
        sampling = Sampling(max_tokens=64, temperature=0.0, stop=(stop,))
        cut = await place.submit(sampling=sampling, caller_at=door)
        (record,) = await place.ended(cut.record.job_id)
        assert record.result is not None
        assert record.result.finish_reason is FinishReason.STOP_STRING
        assert record.result.text == wanted
        job_id = cut.record.job_id
        await eventually(lambda: len(door.ids(job_id)) == len(record.result.token_ids))  # type: ignore[union-attr] # above
        assert door.text(job_id) == wanted
        assert await eventually(place.workers[0].idle)


async def test_a_detached_job_says_nothing_to_any_door(nats_server: LocalNats):
    async with yard(nats_server, workers=1) as place, ByteDoor(place.bus) as door:
        stored = await place.submit(lane=Lane.BATCH, door=door.name, max_tokens=10)
        await place.ended(stored.record.job_id)
        assert not door.batches


async def test_an_idle_workers_lease_says_all_that_it_can_take(nats_server: LocalNats):
    async with yard(nats_server, workers=1) as place:
        watcher = LeaseWatcher(place.bus, REGION, SystemClock())
        await watcher.start()
        (lease,) = watcher.live()
        assert (lease.state, lease.slots, lease.running) == (WorkerState.READY, 4, 0)
        assert (lease.kv_tokens, lease.kv_tokens_used) == (16_384, 0)
        assert "exact" in lease.capabilities
        await place.ended((await place.submit()).record.job_id)
        await eventually(lambda: watcher.live()[0].jobs_done == 1)
        assert watcher.live()[0].decode_tokens_per_s > 0.0
        await place.workers[0].drain()
        await eventually(lambda: not watcher.live())
        await watcher.close()


async def test_a_result_costs_its_tokens_and_its_share_of_a_workers_time(nats_server: LocalNats):
    prices = {"model__price_per_device_s": 8.0, "model__price_per_million_completion_tokens": 1e6}
    async with yard(nats_server, workers=1, engine__pace_s=0.02, **prices) as place:
        (record,) = await place.ended((await place.submit(max_tokens=10)).record.job_id)
        assert record.result is not None
        # Ten steps of 20 ms at least, on one of four slots, at 8 a second; and ten tokens at 1 each.
        assert record.result.usage.cost >= 10.0 + 9 * 0.02 / 4 * 8.0


async def test_gauges_are_recounts_and_end_with_their_worker(nats_server: LocalNats):
    async with yard(nats_server, workers=1) as place:
        stored = [await place.submit(lane=lane, max_tokens=300) for lane in LANES]
        await eventually(lambda: sum(place.workers[0].worker.running_by_lane().values()) == 3)
        shown = exposition().decode()
        for lane in LANES:
            assert f'laneway_worker_running_jobs{{lane="{lane}",pool="chat-small"}} 1.0' in shown
        await place.ended(*ids_of(stored))
        await eventually(place.workers[0].idle)
        assert 'laneway_worker_running_jobs{lane="batch",pool="chat-small"} 0.0' in exposition().decode()
        await place.workers[0].drain()
        assert "laneway_worker_running_jobs{" not in exposition().decode()


async def test_a_priority_job_behind_400_batch_jobs_starts_before_any_further_batch_job(nats_server: LocalNats):
    async with yard(nats_server, workers=1, model__slots=3, engine__pace_s=0.005) as place:
        batch = [await place.submit(lane=Lane.BATCH, max_tokens=4) for _ in range(400)]
        await eventually(lambda: place.workers[0].worker.rates.jobs_done > 20)
        priority = await place.submit(max_tokens=4)
        (first,) = await place.ended(priority.record.job_id)
        records = [await place.record(job_id) for job_id in ids_of(batch)]
        claimed_s = [record.timings.claimed_s for record in records if record.timings.claimed_s]
        between = [at for at in claimed_s if priority.record.timings.created_s < at < first.timings.claimed_s]
        assert len(between) <= 1, "only one whose pull was under way may come between"
        assert len(claimed_s) < 400
