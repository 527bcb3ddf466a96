"""`laneway drill` as people use it: on a stack that `laneway up` runs, and on a door that keeps no promise."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from laneway.cli.endpoint import Endpoint, read_endpoint
from laneway.client import Client, JobState, SchedulerClient
from tests.support.door import Door, Event, accepted, chunk, finished, serving, words
from tests.support.nats import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.drill, pytest.mark.timeout(240)]

SAFE = ["accept", "re-attach", "cancel", "idempotency", "deadline", "refused", "drain"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if not name.startswith("LANEWAY_")}
    return {**found, "LANEWAY_ENDPOINT_FILE": str(tmp_path / "endpoint.json"), "TMPDIR": str(tmp_path)}


async def laneway(environment: dict[str, str], *arguments: str) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "laneway.cli", *arguments, stdout=PIPE, stderr=PIPE, env=environment
    )


async def drilled(environment: dict[str, str], *arguments: str) -> tuple[int, dict[str, dict[str, Any]], str]:
    """Exit code, what each drill found, and what was said meanwhile."""
    process = await laneway(environment, "drill", "--json", *arguments)
    out, err = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode is not None
    assert out, err.decode()
    report = json.loads(out)
    assert report["held"] == (process.returncode == 0)
    return process.returncode, {each["name"]: each for each in report["drills"]}, err.decode()


@asynccontextmanager
async def up(environment: dict[str, str]) -> AsyncIterator[Endpoint]:
    process = await laneway(environment, "up", "--engine", "simulated", "--workers", "3", "--set", "process.drain_s=5")
    path = Path(environment["LANEWAY_ENDPOINT_FILE"])
    try:
        found = await eventually(lambda: read_endpoint(path) or process.returncode is not None, timeout_s=60)
        assert isinstance(found, Endpoint), (await process.communicate())[1].decode()
        yield found
    finally:
        process.send_signal(signal.SIGINT)
        await asyncio.wait_for(process.communicate(), 60)


async def test_every_promise_holds_on_a_local_stack_and_nothing_is_left_behind(environment: dict[str, str]) -> None:
    async with up(environment) as stack:
        code, found, said = await drilled(environment)
        assert list(found) == SAFE
        assert not [each for each in found.values() if each["broken"] or each["skipped"]]
        assert code == 0
        told = [line.split()[1].rstrip(":") for line in said.splitlines() if line[:1].isdigit()]
        assert told == SAFE, "each was announced"
        async with Client(stack.admission) as client, SchedulerClient(stack.scheduler) as scheduler:
            jobs = [job async for job in client.list_jobs()]
            assert len(jobs) >= 60
            assert all(job.state.terminal and "laneway-drill" in job.contract.labels for job in jobs)
            assert not [lane async for lane in scheduler.list_lanes() if lane.paused]
            before = {worker.name: worker async for worker in scheduler.list_workers()}
            assert {worker.state for worker in before.values()} == {"READY"}

            elsewhere = {**environment, "LANEWAY_ENDPOINT_FILE": environment["LANEWAY_ENDPOINT_FILE"] + ".none"}
            addresses = ["--address", stack.admission, "--scheduler-address", stack.scheduler]
            code, found, said = await drilled(elsewhere, "refused", "--kill", *addresses)
            assert code == 0
            assert "only workers of a stack" in found["kill"]["skipped"], "it kills nothing that is not its user's own"

            code, found, said = await drilled(environment, "refused", "--kill")
            assert list(found) == ["refused", "kill"]
            assert code == 0, found
            assert not found["kill"]["skipped"]
            assert "kill -9 of worker" in said

            async def one_less() -> bool:
                return len([worker async for worker in scheduler.list_workers()]) == len(before) - 1

            await eventually(one_less, 20.0)
            async for job in client.list_jobs(labels={"name": "kill"}):
                assert job.state is JobState.SUCCEEDED


async def test_broken_promises_are_named_and_the_exit_code_is_1(environment: dict[str, str]) -> None:
    async def from_the_beginning(_request: object, _context: object) -> AsyncIterator[Event]:
        """What a caller asked for from a later index is given to it from the first."""
        yield accepted()
        yield chunk(0, "a", "b")
        yield finished(tokens=2)

    door = Door(scripts=[lambda *_: words("a", "b", *"c" * 50)], watches=[from_the_beginning])
    async with serving(door):
        addresses = ["--address", door.address, "--scheduler-address", "127.0.0.1:1"]
        code, found, said = await drilled(environment, "re-attach", "refused", "drain", *addresses)
    assert code == 1
    assert not found["re-attach"]["held"]
    assert "expected token 12 and got 0" in str(found["re-attach"]["broken"])
    assert "a request with a bad model was accepted" in found["refused"]["broken"]
    assert "broken: a request with a bad model was accepted" in said
    assert "operator" in found["drain"]["skipped"]
