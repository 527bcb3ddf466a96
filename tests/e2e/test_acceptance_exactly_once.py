"""A crowd of detached jobs through the composed stack: all lanes, both ways in, three workers; each ends just once."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from laneway.cli.stack import LocalStack, StackOptions
from laneway.client import Client, JobState, Lane, RequestFields
from laneway.client.request import build_spec
from laneway.core import subjects
from laneway.core.job import JobRecord
from laneway.core.lanes import LANES
from laneway.runtime.bus import Bus
from laneway.runtime.clock import SystemClock
from laneway.runtime.records import RecordStore
from tests.support.nats import REGION, eventually
from tests.support.producer import TENANT, Producer, producer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

JOBS = 500
WORKERS = 3
AT_ONCE = 24
PATIENT: RequestFields = {"model": "chat", "ttft_target_s": 600.0, "deadline_s": 900.0}
OPTIONS = StackOptions(
    settings={
        "models": [
            {
                "name": "chat",
                "engine": "simulated",
                "workers": WORKERS,
                "queue_length": JOBS,  # the priority lane takes what comes: refusals have tests of their own
                "engine_options": {"pace_s": 0.003},
            }
        ],
        "policy": {"preemptions_max": 0},  # what yields is claimed again, by design
        "process": {"drain_s": 5.0},
    }
)


def request_of(number: int) -> RequestFields:
    return {
        **PATIENT,
        "prompt": f"Job {number}",
        "lane": LANES[number % len(LANES)],
        "max_tokens": 2 + number % 11,
        "temperature": 0.0,
        "ignore_eos": True,
    }


async def test_500_detached_jobs_over_three_lanes_and_three_workers_end_exactly_once():
    async with LocalStack(OPTIONS) as stack, producer(stack.addresses.nats, nkeys=stack.nkeys) as watcher:
        job_ids = await submit_all(stack.addresses.admission, watcher)
        assert len(set(job_ids.values())) == JOBS
        await eventually(lambda: watcher.ends.total() >= JOBS, timeout_s=120)
        bus = await Bus.connect(stack.nats_settings("operator"), name="test", role="operator")
        try:
            await eventually(lambda: nothing_waits(bus), timeout_s=30)
            records = {number: await record_of(bus, job_id) for number, job_id in job_ids.items()}
        finally:
            await bus.close()
    for number, record in records.items():
        assert record.state is JobState.SUCCEEDED, record.error
        assert (record.attempt, record.starts, len(record.lineage)) == (1, 1, 1)
        assert record.result is not None
        assert len(record.result.token_ids) == request_of(number).get("max_tokens")
        assert record.contract.lane is LANES[number % len(LANES)]
    once = Counter(dict.fromkeys(job_ids.values(), 1))
    assert +watcher.ends == once, "one end heard of each"
    assert +watcher.terminal_writes == once, "one try to write the end of each"
    assert +watcher.claims == once, "one claim of each"
    assert len({record.lineage[0].owner for record in records.values()}) == WORKERS, "every worker had a share"
    assert Counter(record.origin for record in records.values()) == {"GRPC": JOBS - JOBS // 4, "NATS": JOBS // 4}


async def submit_all(address: str, watcher: Producer) -> dict[int, str]:
    """Submits every job, each fourth through NATS; gives the ids by number."""
    job_ids: dict[int, str] = {}
    room = asyncio.Semaphore(AT_ONCE)

    async def one(client: Client, number: int) -> None:
        async with room:
            request = request_of(number)
            if number % 4:
                job_ids[number] = (await client.submit(**request)).job_id
                return
            key = f"key-{number}"
            spec = build_spec(request, SystemClock().now())
            await watcher.publish(key, spec, Lane(request.get("lane", "")))
            verdict = await watcher.verdict(key)
            assert not verdict.HasField("error"), verdict.error
            job_ids[number] = verdict.job_id

    async with Client(address) as client, asyncio.TaskGroup() as group:
        for number in range(JOBS):
            group.create_task(one(client, number))
    return job_ids


async def nothing_waits(bus: Bus) -> bool:
    """Whether no lane holds a message, ready or parked."""
    infos = [await bus.api(f"STREAM.INFO.{subjects.lane_stream(REGION, lane)}", {}) for lane in LANES]
    return not any(info["state"]["messages"] for info in infos)


async def record_of(bus: Bus, job_id: str) -> JobRecord:
    stored = await RecordStore(bus).get(REGION, TENANT, job_id, leader=True)
    assert stored is not None
    return stored.record
