"""`laneway replay` against a real local stack with the simulated engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from laneway.cli.replaying.source import Line
from laneway.cli.stack import LocalStack, StackOptions
from laneway.client import Client, JobState, Lane
from laneway.workers.engines.simulated_prefix import BLOCK_TOKENS
from tests.support.traces import asked

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(120)]

BLOCKS = tuple(range(100, 110))  # of 16 tokens
PATIENT: dict[str, Any] = {"ttft_s": 5.0, "tpot_s": 1.0, "deadline_s": 60.0}


@pytest.fixture
async def stack() -> AsyncIterator[LocalStack]:
    async with LocalStack(StackOptions(engine="simulated", workers=1, settings={"process": {"drain_s": 5.0}})) as stack:
        yield stack


async def start(stack: LocalStack, file: Path, lines: list[Line], *options: str) -> Process:
    file.write_bytes(b"\n".join(msgspec.json.encode(line, order="sorted") for line in map(finite, lines)))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LANEWAY_")}
    addresses = ("--address", stack.addresses.admission, "--scheduler-address", stack.addresses.scheduler)
    arguments = ("-m", "laneway.cli", "replay", "--trace", str(file), "--json", *addresses, *options)
    return await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=PIPE, stderr=PIPE, env=environment)


def finite(line: Line) -> dict[str, Any]:
    return {name: value for name, value in msgspec.to_builtins(line).items() if value not in (float("inf"), None)}


async def replayed(stack: LocalStack, file: Path, lines: list[Line], *options: str) -> dict[str, Any]:
    process = await start(stack, file, lines, *options)
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    return json.loads(out)


def ends(played: dict[str, Any], lane: Lane) -> dict[str, int]:
    (found,) = [each for each in played["lanes"] if each["lane"] == lane]
    return {end: count for end, count in found["ends"].items() if count}


async def test_every_kind_of_caller_gets_through_the_stack_what_it_came_for(stack: LocalStack, tmp_path: Path):
    lines = [
        asked(0.0, 80, 10, session=1, **PATIENT),
        asked(0.0, 120, 10, session=1, think_s=0.2, **PATIENT),
        asked(0.1, 60, 400, leaves_after=20, **PATIENT),
        asked(0.2, 60, 400, ttft_s=5.0, deadline_s=0.5),  # 4 s of work
        asked(0.3, 60, 20, Lane.DEFERRABLE, deadline_s=60.0),
        asked(0.4, 60, 20, Lane.BATCH),
    ]
    played = await replayed(stack, tmp_path / "mixed.jsonl", lines, "--profile", "h100-8b-fp8")
    priority = ends(played, Lane.PRIORITY)
    assert priority["done"] == 2
    assert priority["left"] == 1
    assert priority.get("refused", 0) + priority.get("expired", 0) == 1
    assert ends(played, Lane.DEFERRABLE) == ends(played, Lane.BATCH) == {"done": 1}
    assert played["counts"]["prompt_tokens_off_most"] == 0
    assert "answers.of_another_length" not in played["counts"]
    assert played["player"]["starts"] == 4
    assert played["usage"]["workers"] == 1.0
    async with Client(stack.addresses.admission) as client:
        label = {"laneway-replay": played["parameters"]["run"]}
        jobs = [job async for job in client.list_jobs(labels=label)]
    assert {job.contract.lane for job in jobs} == set(Lane)
    assert all(job.state.terminal for job in jobs)


async def test_prefixes_are_shared_within_a_replay_and_met_before_only_by_warm_caches(
    stack: LocalStack, tmp_path: Path
):
    lines = [asked(i / 4, 160, 2, blocks=BLOCKS, **PATIENT) for i in range(4)]

    async def cached_tokens(*options: str) -> int:
        (lane,) = (await replayed(stack, tmp_path / "shared.jsonl", lines, *options))["lanes"]
        assert lane["ends"]["done"] == 4
        return round(lane["cached_share"] * 4 * 160)

    # The last token is computed in any case, so of a prompt that was met before a whole block is.
    block = BLOCK_TOKENS
    assert await cached_tokens() == await cached_tokens() == 3 * (160 - block)
    assert await cached_tokens("--caches", "warm") == 4 * (160 - block)


async def test_ctrl_c_ends_a_replay_in_order_with_the_figures_so_far(stack: LocalStack, tmp_path: Path):
    lines = [
        asked(0.0, 40, 2, **PATIENT),
        asked(0.0, 40, 4000, ttft_s=5.0, deadline_s=600.0),
        asked(0.0, 40, 4000, Lane.BATCH),
        asked(500.0, 40, 2),
    ]
    process = await start(stack, tmp_path / "long.jsonl", lines)
    async with Client(stack.addresses.admission) as client:
        while len([job async for job in client.list_jobs(state=JobState.RUNNING)]) < 2:  # noqa: ASYNC110 - a server's
            await asyncio.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, err = await asyncio.wait_for(process.communicate(), 60)
        jobs = [job async for job in client.list_jobs()]
    assert process.returncode == 130, err.decode()
    played = json.loads(out)
    assert ends(played, Lane.PRIORITY) == {"done": 1, "open": 1}
    assert ends(played, Lane.BATCH) == {"open": 1}
    assert sorted(job.state.value for job in jobs) == ["cancelled", "cancelled", "succeeded"]
