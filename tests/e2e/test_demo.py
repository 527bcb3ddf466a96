"""The demo as people run it, in short and with the simulated engine: what it leaves, and what it says when it ends."""

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

import psutil
import pytest

from tests.support.nats import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

# The real one with a simulated model and two seconds of arrivals.
PROGRAM = """
import sys
from laneway.cli.demo import play
from laneway.cli.demo.script import Arrival, Way
from laneway.cli.stack import LocalStack, Progress, StackError, StackOptions
from laneway.core.errors import Unavailable
from laneway.core.lanes import Lane

play.KILL_AT_S, play.REFUSAL_AT_S, play.REPLACED_AFTER_S = 0.4, 0.8, 0.0
play.DOCUMENTS_AT_S = 0.1

def arrivals(data, tokens):
    lanes = ((Lane.PRIORITY, Way.STREAM), (Lane.DEFERRABLE, Way.SUBMIT), (Lane.BATCH, Way.PRODUCER))
    return [Arrival(0.1 * n, f"{lane}-{n}", lane, way, "Hi", 8, 60.0) for n in range(4) for lane, way in lanes]

def stack(console, queue_length):
    show = lambda step: step.state == "ready" and console.print(step.part, step.detail)
    settings = {"process": {"drain_s": 5.0}}
    return LocalStack(StackOptions(engine="simulated", workers=2, settings=settings), on_progress=show)

async def fail(*_):
    raise Unavailable("no room for the trial")

play.arrivals, play._stack = arrivals, stack
if "unmeasured" in sys.argv:
    play._measure = fail
play.broken_promises = lambda run: ["this one"] if "broken" in sys.argv else []
sys.exit(play.demo(fifo=False, keep="keep" in sys.argv))
"""


@asynccontextmanager
async def showing(folder: Path, *words: str) -> AsyncIterator[Process]:
    found = {name: value for name, value in os.environ.items() if not name.startswith("LANEWAY_")}
    environment = {**found, "LANEWAY_ENDPOINT_FILE": str(folder / "endpoint.json"), "TMPDIR": str(folder)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, *words, stdout=PIPE, stderr=asyncio.subprocess.STDOUT, env=environment
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def until(process: Process, words: str) -> None:
    assert process.stdout is not None
    said = ""
    while words not in (line := (await asyncio.wait_for(process.stdout.readline(), 60)).decode()):
        said += line
        assert line, f"it ended without {words!r}:\n{said}"


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


async def end(process: Process) -> str:
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    return out.decode()


async def test_a_demo_that_stays_up_is_judged_found_by_other_commands_and_leaves_nothing(tmp_path: Path):
    endpoint = tmp_path / "endpoint.json"
    async with showing(tmp_path, "keep", "broken") as process:
        for words in ("Promised and got", "broken promise: this one", "Try next", "admission 127.", "NATS nats://"):
            await until(process, words)
        await until(process, "stays up")
        processes = psutil.Process(process.pid).children(recursive=True)
        address = json.loads(endpoint.read_text())["admission"]
        environment = {**os.environ, "LANEWAY_ENDPOINT_FILE": str(endpoint)}
        asked = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "laneway.cli", "generate", "Hi", "--max-tokens", "4", env=environment, stdout=PIPE
        )
        await asyncio.wait_for(asked.communicate(), 60)
        assert asked.returncode == 0, address
        process.send_signal(signal.SIGINT)
        out = await end(process)
    assert process.returncode == 1, "as the promises were judged, not as it was ended"
    assert "Traceback" not in out
    assert alive(processes) == []
    assert list(tmp_path.iterdir()) == [], "neither an endpoint nor a store is left"


@pytest.mark.parametrize("moment", ["nats", "joined"])
async def test_ctrl_c_at_any_moment_leaves_nothing_and_says_one_line(moment: str, tmp_path: Path):
    async with showing(tmp_path) as process:
        await until(process, moment)
        processes = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        out = await end(process)
    assert process.returncode == 130
    said = [line for line in out.splitlines() if "127.0.0.1" not in line]  # but for a part that was just ready
    assert said[-1] == "stopped; nothing is left running"
    assert "Traceback" not in out
    assert "rror" not in out
    await eventually(lambda: alive(processes) == [])
    assert list(tmp_path.iterdir()) == []


async def test_a_failure_in_the_middle_says_what_failed(tmp_path: Path):
    async with showing(tmp_path, "unmeasured") as process:
        out = await end(process)
    assert process.returncode == 1
    last = "the demo failed while measuring this machine with trial documents: no room for the trial"
    assert out.splitlines()[-1] == last
    assert list(tmp_path.iterdir()) == []
