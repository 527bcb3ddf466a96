"""Pools without a worker hold what can wait, say so, ask for one, and let go when it comes; groups leave together."""

import asyncio
from functools import partial
from pathlib import Path

import grpc.aio
import pytest
from msgspec.structs import replace

from laneway.core.fleet import PoolPlan
from laneway.core.lanes import Lane
from laneway.runtime.bus import Bus
from laneway.runtime.grpc_errors import from_rpc_error
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.settings import SchedulerSettings, Settings
from laneway.scheduler.loop import Scheduler
from laneway.v1 import admission_pb2 as pb
from laneway.v1 import common_pb2
from tests.support.admission import PuppetWorker, admission_settings, gate, spec
from tests.support.nats import POOL, eventually
from tests.support.scheduling import FakeWorker, park_job, ready_jobs, running_scheduler, scheduler_settings

pytestmark = pytest.mark.wire

LOAD_S = 2.0  # of the pool of admission_settings


def cold_settings(server: LocalNats) -> Settings:
    settings = admission_settings(server)
    own = SchedulerSettings(listen="127.0.0.1:0", plan_interval_s=0.05, leader_ttl_s=0.6)
    return replace(settings, scheduler=own, models=(replace(settings.models[0], workers=0),))


def planned(scheduler: Scheduler) -> PoolPlan:
    plan = scheduler.plans.plan
    return plan.pool(POOL) if plan is not None else PoolPlan(POOL)


async def test_a_cold_pool_holds_what_can_wait_asks_for_a_worker_and_lets_go_when_it_comes(
    nats_server: LocalNats, tmp_path: Path
) -> None:
    settings = cold_settings(nats_server)
    async with running_scheduler(nats_server, settings) as scheduler, gate(nats_server, tmp_path, settings) as door:
        await door.quotes("HELD_FOR_WORKERS", lane=Lane.BATCH)
        assert planned(scheduler).desired_workers == 0, "a pool that is planned to have none and has nothing to do"
        jobs: dict[Lane, str] = {}
        for lane in (Lane.DEFERRABLE, Lane.BATCH):
            answer = await door.stub.Submit(pb.SubmitRequest(spec=spec(lane=lane)))
            jobs[lane] = answer.job_id
            assert answer.verdict.kind == common_pb2.VERDICT_KIND_HELD
            assert answer.verdict.reason == "HELD_FOR_WORKERS"
            assert answer.verdict.completion_eta.ToMilliseconds() >= LOAD_S * 1000
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await door.stub.Submit(pb.SubmitRequest(spec=spec(lane=Lane.PRIORITY)))
        error = from_rpc_error(refused.value)
        assert (refused.value.code(), error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_WORKER")
        assert error.retry_after_s is not None
        assert 0.8 * LOAD_S <= error.retry_after_s <= 1.3 * LOAD_S
        await eventually(lambda: planned(scheduler).desired_workers >= 1)
        assert planned(scheduler).desired_reason in ("COLD", "DUE")
        await eventually(lambda: planned(scheduler).lane(Lane.BATCH).demand)
        lead, plan = scheduler.lead, scheduler.plans.plan
        assert lead is not None
        assert plan is not None
        for job in jobs.values():
            park = lead.parking.index.get(job)
            assert park is not None
            assert lead.releaser.held_because(park, plan).reason == "NO_WORKER"
        async with FakeWorker(door.bus).alive():
            for lane, job in jobs.items():
                await eventually(partial(has_ready, door.bus, lane, job))
            await eventually(lambda: planned(scheduler).workers == 1)


async def has_ready(bus: Bus, lane: Lane, job: str) -> bool:
    return job in await ready_jobs(bus, lane)


async def test_jobs_of_a_group_wait_for_each_other_in_a_full_pool_and_leave_together(
    nats_server: LocalNats, bus: Bus
) -> None:
    settings = scheduler_settings(nats_server)
    async with running_scheduler(nats_server, settings) as scheduler, FakeWorker(bus, slots=0).alive() as worker:
        await eventually(lambda: planned(scheduler).workers == 1)
        jobs = []
        for _ in range(6):
            record, _ = await park_job(bus, lane=Lane.BATCH, due_in_s=5_000.0, fire_in_s=4_000.0)
            jobs.append(record.job_id)
            await asyncio.sleep(0.02)
        lead, plan = scheduler.lead, scheduler.plans.plan
        assert lead is not None
        assert plan is not None
        await eventually(lambda: len(lead.parking.index) == 6)
        held = [step.reason for job in jobs for step in scheduler.decisions.of(job)]
        assert "COALESCING" in held, "from the second on the next is expected at once"
        await worker.show(slots=8)
        await eventually(lambda: scheduler.released[POOL, Lane.BATCH] == 6)
        assert await ready_jobs(bus, Lane.BATCH) == dict.fromkeys(jobs, 1)
        why = [scheduler.decisions.of(job)[-1].reason for job in jobs]
        assert "COALESCED" in why


async def test_a_group_waits_for_nobody_where_the_pool_has_nothing_else_to_run(
    nats_server: LocalNats, bus: Bus
) -> None:
    settings = scheduler_settings(nats_server)
    async with running_scheduler(nats_server, settings) as scheduler, FakeWorker(bus, slots=20).alive():
        await eventually(lambda: planned(scheduler).free_slots == 20)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        for _ in range(6):
            await park_job(bus, lane=Lane.BATCH, due_in_s=5_000.0, fire_in_s=4_000.0)
        await eventually(lambda: scheduler.released[POOL, Lane.BATCH] == 6)
        assert loop.time() - began_s < 10.0, "a batch group may gather for a minute"


async def test_who_was_fired_by_nats_is_charged_as_well(nats_server: LocalNats, bus: Bus) -> None:
    async with running_scheduler(nats_server, scheduler_settings(nats_server)) as scheduler:
        await eventually(lambda: scheduler.lead is not None)
        lead = scheduler.lead
        assert lead is not None
        await park_job(bus, lane=Lane.BATCH, fire_in_s=0.5, due_in_s=500.0)
        await eventually(lambda: ready_jobs(bus, Lane.BATCH))
        await eventually(lambda: lead.releaser.ledger.awaited == 1)
        assert scheduler.released[POOL, Lane.BATCH] == 0


async def test_what_a_job_used_corrects_what_its_tenant_was_charged(nats_server: LocalNats, tmp_path: Path) -> None:
    settings = cold_settings(nats_server)
    async with running_scheduler(nats_server, settings) as scheduler, gate(nats_server, tmp_path, settings) as door:
        await door.quotes("HELD_FOR_WORKERS", lane=Lane.BATCH)
        answer = await door.stub.Submit(pb.SubmitRequest(spec=spec(lane=Lane.BATCH)))
        lead = scheduler.lead
        assert lead is not None
        async with PuppetWorker(door.bus).alive() as worker:
            held = await worker.take(Lane.BATCH)
            assert held.record.job_id == answer.job_id
            assert lead.releaser.ledger.awaited == 1
            await worker.finish(held, "answer")
            await eventually(lambda: lead.releaser.ledger.awaited == 0)
            means = lead.releaser.ledger.means(POOL)
            assert means.computed_tokens > 0.0
            assert lead.releaser.job_tokens(POOL) > 0.0
