"""The local stack as a whole, with the simulated engine: used as people use it, and gone without a trace."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import psutil
import pytest

from laneway.cli.stack import LocalStack, StackError, StackOptions
from laneway.client import Client, JobCancelled, JobState, Lane, NotFound, SchedulerClient
from tests.support.nats import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

OPTIONS = StackOptions(engine="simulated", workers=1, settings={"process": {"drain_s": 5.0}})


def still_running(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


async def test_a_stack_serves_every_way_in_and_leaves_nothing():
    before = set(descendants(os.getpid()))
    async with LocalStack(OPTIONS) as stack:
        processes = [p for p in descendants(os.getpid()) if p not in before]
        assert len(processes) >= len(stack.children)
        async with Client(stack.addresses.admission) as client:
            async with client.generate(model="chat", prompt="Hi", max_tokens=5) as stream:
                assert len(await stream.text()) == 5
            assert stream.finished.usage.completion_tokens == 5

            submitted = await client.submit(model="chat", prompt="Hi", lane="batch", max_tokens=5)
            async with client.watch(submitted.job_id) as stream:
                assert len(await stream.text()) == 5
            job = await client.wait(submitted.job_id)
            assert job.state is JobState.SUCCEEDED
            assert job.result is not None

            endless = await client.submit(model="chat", prompt="Hi", lane="deferrable", max_tokens=5000)
            assert (await client.cancel(endless.job_id)).state is JobState.CANCELLED
            with pytest.raises(JobCancelled):
                async with client.watch(endless.job_id) as stream:
                    await stream.text()
            assert (await client.wait(endless.job_id)).state is JobState.CANCELLED

            listed = [job.job_id async for job in client.list_jobs()]
            assert listed[:2] == [endless.job_id, submitted.job_id]
            assert [job.job_id async for job in client.list_jobs(lane=Lane.BATCH)] == [submitted.job_id]
            with pytest.raises(NotFound):
                await client.get_job("local-00000000-0000-7000-8000-000000000000")
        async with SchedulerClient(stack.addresses.scheduler) as scheduler:
            (worker,) = [worker async for worker in scheduler.list_workers()]
            assert worker.process_id == stack.workers[0].pid
            steps = (await scheduler.explain_job(submitted.job_id)).steps
            assert steps[-1].action == "succeeded"
    assert still_running(processes) == []
    assert not stack.directory.exists()


async def test_parts_can_be_killed_and_started_again():
    async with LocalStack(OPTIONS) as stack, Client(stack.addresses.admission) as client:
        first = stack.workers[0]
        first.kill()
        await first.wait()
        second = await stack.add_worker()
        async with client.generate(model="chat", prompt="Hi", max_tokens=3, lane="deferrable") as stream:
            assert len(await stream.text()) == 3
        assert second.name != first.name
        admission = stack.child("admission")
        admission.kill()
        await admission.wait()
        await stack.restart("admission")
        job = await client.submit(model="chat", prompt="Hi", lane="deferrable", max_tokens=3)
        assert (await client.wait(job.job_id)).state is JobState.SUCCEEDED


async def test_a_part_that_cannot_start_is_named_and_the_rest_is_stopped():
    before = set(descendants(os.getpid()))
    bad = StackOptions(engine="simulated", process_settings={"admission": {"admission": {"tokens_file": "/none"}}})
    with pytest.raises(StackError, match=r"(?s)admission ended with status 2.*tokens_file"):
        async with LocalStack(bad):
            pass
    assert still_running([p for p in descendants(os.getpid()) if p not in before]) == []


# --- the command -----------------------------------------------------------------------------------


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if not name.startswith("LANEWAY_")}
    return {**found, "LANEWAY_ENDPOINT_FILE": str(tmp_path / "endpoint.json"), "TMPDIR": str(tmp_path)}


async def laneway(environment: dict[str, str], *arguments: str) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "laneway.cli", *arguments, stdout=PIPE, stderr=PIPE, env=environment
    )


async def output(environment: dict[str, str], *arguments: str) -> str:
    process = await laneway(environment, *arguments)
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    return out.decode()


async def up(environment: dict[str, str]) -> Process:
    process = await laneway(environment, "up", "--engine", "simulated", "--workers", "1", "--set", "process.drain_s=5")
    endpoint = Path(environment["LANEWAY_ENDPOINT_FILE"])
    await eventually(lambda: endpoint.exists() or process.returncode is not None, timeout_s=60)
    assert endpoint.exists()
    return process


async def test_up_is_found_by_the_other_commands_and_ctrl_c_stops_all_of_it(environment: dict[str, str]):
    process = await up(environment)
    processes = descendants(process.pid)
    try:
        assert len(await output(environment, "generate", "Hi", "--max-tokens", "4", "--raw")) == 5
        job_id = (await output(environment, "submit", "Hi", "--max-tokens", "4")).strip()
        assert len(await output(environment, "watch", job_id)) == 5
        assert job_id in [job["job_id"] for job in json.loads(await output(environment, "jobs", "--json"))]
        assert "succeeded" in await output(environment, "explain", job_id)
        assert {lane["lane"] for lane in json.loads(await output(environment, "lanes", "--json"))} == set(Lane)
        (worker,) = json.loads(await output(environment, "workers", "--json"))
        assert worker["state"] == "READY"
        assert json.loads(await output(environment, "models", "--json"))[0]["name"] == "chat"
        assert json.loads(await output(environment, "regions", "--json"))[0]["region"] == "local"
        levels = {finding["level"] for finding in json.loads(await output(environment, "doctor", "--json"))}
        assert "broken" not in levels
    finally:
        process.send_signal(signal.SIGINT)
        _, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    stops = [line.split()[0] for line in err.decode().splitlines() if " stopped" in line]
    assert stops == ["admission", "chat-small-1", "scheduler", "routing", "nats"]
    assert still_running(processes) == []
    assert not Path(environment["LANEWAY_ENDPOINT_FILE"]).exists()


async def test_nothing_outlives_a_stack_that_is_killed(environment: dict[str, str]):
    process = await up(environment)
    processes = descendants(process.pid)
    assert len(processes) >= 5
    process.kill()
    await process.communicate()
    await eventually(lambda: still_running(processes) == [])


async def test_a_second_ctrl_c_stops_at_once(environment: dict[str, str]):
    process = await up(environment)
    processes = descendants(process.pid)
    caller = await laneway(environment, "generate", "Hi", "--raw", "--max-tokens", "4000")
    assert caller.stdout is not None
    await asyncio.wait_for(caller.stdout.readexactly(1), 30)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while b"again to stop at once" not in await asyncio.wait_for(process.stderr.readline(), 30):
        pass
    process.send_signal(signal.SIGINT)
    await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 1
    await eventually(lambda: still_running(processes) == [])
    _, err = await asyncio.wait_for(caller.communicate(), 30)
    assert caller.returncode == 1
    assert "broke" in err.decode()
