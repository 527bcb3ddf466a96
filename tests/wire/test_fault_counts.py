"""Nothing that is counted up stays up: after ten of each bad end, as much is admitted as before the first."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from laneway.core.errors import DeadlineExceeded, EngineFailed, InvalidRequest, LanewayError, TenantLimit
from laneway.core.job import claim
from laneway.core.lanes import JobState, Lane
from laneway.runtime import metrics
from laneway.runtime.clock import SystemClock
from laneway.runtime.grpc_errors import job_error_of
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.settings import GrpcSettings
from tests.support.admission import (
    CLOCK,
    Gate,
    Held,
    PuppetWorker,
    admission_settings,
    error_of_call,
    generate,
    open_gate,
    opening,
    rest,
    text_of,
)
from tests.support.nats import REGION, eventually
from tests.support.worker import ids_of, yard

TIMES = 10
SLOTS = 2
ERROR_ID = 8


async def test_a_worker_has_all_its_slots_after_ten_of_each_bad_end(nats_server: LocalNats):
    async with yard(
        nats_server, workers=1, model__slots=SLOTS, engine__fault_error_token_id=ERROR_ID, policy__lower_lane_floor=0.0
    ) as place:
        soon = {"deadline_s": SystemClock().now() + 0.6}
        wrong: list[dict[str, Any]] = [
            {"prompt": (1, ERROR_ID), "max_tokens": 50},
            {"prompt": bytes(100), "max_tokens": 30_000},
            {"max_tokens": 4000, "contract": soon},
        ]
        stored = [await place.submit(**each) for _ in range(TIMES) for each in wrong]
        records = await place.ended(*ids_of(stored))
        reasons = [record.error.reason for record in records if record.error]
        assert Counter(reasons) == dict.fromkeys(("ENGINE_FAILED", "CONTEXT_EXCEEDED", "DEADLINE_EXCEEDED"), TIMES)
        worker = place.workers[0]
        await eventually(worker.idle)
        await eventually(worker.engine_empty)
        long = [await place.submit(max_tokens=400) for _ in range(SLOTS)]
        await eventually(lambda: worker.worker.running_by_lane()[Lane.PRIORITY] == SLOTS)
        assert {r.state for r in await place.ended(*ids_of(long))} == {JobState.SUCCEEDED}
        await eventually(worker.idle)
        assert await eventually(place.lanes_empty)


def quiet() -> bool:
    """The door counts nothing as live."""
    counts = (("laneway_door_streams", {"lane": "priority"}), ("laneway_grpc_live_calls", {"method": "Generate"}))
    return not any(metrics.REGISTRY.get_sample_value(name, labels) for name, labels in counts)


async def all_at_once(door: Gate, **fields: Any) -> list[Any]:
    """As many calls as the door takes, for so short an answer that none is in the way of another's deadline."""
    await eventually(quiet)
    requests = [generate(**fields) for _ in range(TIMES)]
    for request in requests:
        request.spec.generate.sampling.max_tokens = 2
    return [door.stub.Generate(request) for request in requests]


async def errors_of(calls: list[Any]) -> set[type[LanewayError]]:
    return {type(error) for error in await asyncio.gather(*map(error_of_call, calls))}


async def bad_ends(door: Gate, worker: PuppetWorker) -> None:
    """As many as the door takes of each: left, refused, late, failed."""
    for call in (left := await all_at_once(door)):
        await opening(call)
    for call in left:
        call.cancel()
    assert await errors_of(await all_at_once(door, model="nothing")) == {InvalidRequest}
    assert await errors_of(await all_at_once(door, due_s=1.2)) == {DeadlineExceeded}
    failing = await all_at_once(door)
    for call in failing:
        await opening(call)
    for _ in failing:
        await worker.fail(await worker.take(), job_error_of(EngineFailed("the engine failed")))
    assert {error.reason for error in await asyncio.gather(*map(error_of_call, failing))} == {"ENGINE_FAILED"}


async def test_a_door_admits_as_many_calls_after_ten_of_each_bad_end(nats_server: LocalNats, tmp_path: Path):
    settings = admission_settings(nats_server, queue_length=2 * TIMES)
    settings = msgspec.structs.replace(settings, grpc=GrpcSettings(calls_max=TIMES))
    async with open_gate(nats_server, tmp_path, settings) as (door, worker):
        await bad_ends(door, worker)

        last = await all_at_once(door)
        for call in last:
            await opening(call)
        refused = await error_of_call(door.stub.Generate(generate()))
        assert refused.reason == "TOO_MANY_CALLS", "no more than the limit, and no fewer"
        for _ in last:
            await worker.finish(await worker.take(), "ok")
        assert [text_of(await rest(call)) for call in last] == ["ok"] * TIMES
        await eventually(quiet)
        assert await door.messages() == 0


@pytest.mark.slow
async def test_a_tenant_has_all_its_streams_after_ten_of_each_bad_end(nats_server: LocalNats, tmp_path: Path):
    settings = admission_settings(nats_server, queue_length=4 * TIMES, tenant_streams_max=TIMES)
    quick = msgspec.structs.replace(settings.nats, ack_wait_priority_s=1.0)
    settings = msgspec.structs.replace(settings, nats=quick)
    async with open_gate(nats_server, tmp_path, settings) as (door, worker):
        await bad_ends(door, worker)

        orphans = await all_at_once(door)
        for call in orphans:
            await opening(call)
        async with PuppetWorker(door.bus, "dies").alive() as victim:
            for _ in orphans:
                await victim.take()
        for _ in orphans:  # each comes again, its worker having died in the middle
            await worker.finish(await taken_over(door, worker), "ok")
        assert [text_of(await rest(call)) for call in orphans] == ["ok"] * TIMES

        last = await all_at_once(door)
        for call in last:
            await opening(call)
        refused = await error_of_call(door.stub.Generate(generate()))
        assert isinstance(refused, TenantLimit), "no more than the limit, and no fewer"
        assert refused.retry_after_s is not None
        for _ in last:
            await worker.finish(await worker.take(), "ok")
        assert [text_of(await rest(call)) for call in last] == ["ok"] * TIMES
        await eventually(quiet)
        assert await door.messages() == 0


async def taken_over(door: Gate, worker: PuppetWorker) -> Held:
    """A job that another worker left, by `worker`, which knows that its owner is dead."""
    delivery = await worker.pull()
    record = delivery.job.record
    changed = await door.records.change(
        REGION, record.tenant, record.job_id, lambda found: claim(found, worker.id, CLOCK.now(), owner_is_dead=True)
    )
    held = Held(delivery, changed)
    await worker.announce(held)
    return held
