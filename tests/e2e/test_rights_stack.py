"""Every service does its whole job with no more than the rights of its role, and what is refused shows."""

from __future__ import annotations

import asyncio
import urllib.request

import nats
import pytest
from prometheus_client.parser import text_string_to_metric_families

from laneway.cli.stack import LocalStack, StackOptions
from laneway.client import Client, Lane, RoutingClient, SchedulerClient
from laneway.core.errors import ConfigError
from laneway.core.lanes import JobState
from laneway.runtime.bus import Bus
from laneway.v1 import admission_pb2, bus_pb2, task_pb2
from tests.support.nats import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

MODEL = {"name": "chat", "engine": "simulated", "workers": 2, "slots": 2, "engine_options": {"pace_s": 0.002}}


async def every_kind_of_work(stack: LocalStack) -> None:
    """Streams, jobs that are parked, released, cancelled and listed, operators' words, and a producer."""
    async with (
        Client(stack.addresses.admission) as client,
        SchedulerClient(stack.addresses.scheduler) as scheduler,
        RoutingClient(stack.addresses.routing) as routing,
    ):
        async with client.generate(model="chat", prompt="Hi", max_tokens=8, ignore_eos=True) as stream:
            assert await stream.text()
        # More than the slots take: some are parked, and the scheduler releases them.
        jobs = [
            (await client.submit(model="chat", prompt=f"{n}", lane=lane, max_tokens=40, ignore_eos=True)).job_id
            for n in range(12)
            for lane in (Lane.DEFERRABLE, Lane.BATCH)
        ]
        assert (await client.cancel(jobs[-1])).state is JobState.CANCELLED
        async with client.watch(jobs[0]) as watched:
            await watched.text()
        assert {job.job_id async for job in client.list_jobs()} > set(jobs)
        for job_id in jobs[:-1]:
            assert (await client.wait(job_id)).state is JobState.SUCCEEDED
        assert (await scheduler.explain_job(jobs[1])).steps
        await scheduler.pause_lane(Lane.BATCH)
        await scheduler.resume_lane(Lane.BATCH)
        (name, *_) = [worker.name async for worker in scheduler.list_workers()]
        await scheduler.drain_worker(name)
        await scheduler.undrain_worker(name)
        await routing.drain_region("local")
        await routing.undrain_region("local")
    await _produce(stack)


async def _produce(stack: LocalStack) -> None:
    """Without a credential: as any NATS client on this machine, for the tenant `default`."""
    nc = await nats.connect(stack.addresses.nats)
    try:
        verdicts = await nc.subscribe("verdict.local.default.*")
        spec = task_pb2.JobSpec(model="chat", generate=task_pb2.GenerateTask(text="Hi"))
        await nc.jetstream().publish(
            "ingest.local.batch.default", admission_pb2.SubmitRequest(spec=spec).SerializeToString()
        )
        verdict = bus_pb2.IngestVerdict.FromString((await verdicts.next_msg(timeout=30)).data)
        assert not verdict.HasField("error"), verdict
    finally:
        await nc.close()


async def bus_errors(stack: LocalStack) -> dict[str, float]:
    """Of every process, as an operator's Prometheus reads it."""
    found = {}
    for name, address in stack.addresses.metrics.items():
        if not stack.child(name).alive:
            continue
        text = await asyncio.to_thread(_read, f"http://{address}/metrics")
        for family in text_string_to_metric_families(text):
            counts = [s.value for s in family.samples if s.name == "laneway_bus_errors_total"]
            if counts:
                found[name] = sum(counts)
    return found


def _read(url: str) -> str:
    return str(urllib.request.urlopen(url, timeout=10).read().decode())


def violations(stack: LocalStack) -> list[str]:
    """What the server and the services say of refusals."""
    lines = [line for path in stack.logs.iterdir() for line in path.read_text(errors="replace").splitlines()]
    return [line for line in lines if " violation" in line.lower()]


@pytest.mark.slow
async def test_a_whole_stack_works_with_the_rights_of_its_roles_alone():
    async with LocalStack(StackOptions(settings={"models": [MODEL]})) as stack:
        await every_kind_of_work(stack)
        # Another part of each kind, and one that takes over: their first moments too.
        for name in ("scheduler", "routing", "admission"):
            await stack.restart(name)
        stack.workers[0].kill()
        await stack.add_worker()
        async with Client(stack.addresses.admission) as client:
            await eventually(lambda: _answers(client), timeout_s=30)
        errors = await bus_errors(stack)
        assert violations(stack) == []
        assert errors == dict.fromkeys(["scheduler", "routing", "admission", "chat-small-2", "chat-small-3"], 0.0)


async def _answers(client: Client) -> bool:
    async with client.generate(model="chat", prompt="Hi", max_tokens=2, ignore_eos=True) as stream:
        return bool(await stream.text())


async def test_nobody_gets_more_by_leaving_the_credential_away():
    async with LocalStack(StackOptions(settings={"models": [{**MODEL, "workers": 1}]})) as stack:
        refused: list[str] = []

        async def noted(error: Exception) -> None:
            refused.append(str(error))

        nc = await nats.connect(stack.addresses.nats, error_cb=noted)
        try:
            for subject in ("lane.local.batch.chat-small.any.default.j", "job.local.default.j", "ctl.w"):
                await nc.publish(subject, b"")
            await nc.subscribe("ev.local.*")
            await nc.flush()
            await eventually(lambda: len(refused) == 4)  # told by a task of the client's own
        finally:
            await nc.close()
        assert [text.split('"')[1].split(".")[0] for text in refused] == ["lane", "job", "ctl", "ev"]
        await eventually(lambda: len(violations(stack)) >= 4)
        with pytest.raises(ConfigError, match=r"nats\.nkey_file is that of another role"):
            await Bus.connect(stack.nats_settings("worker"), name="scheduler")
