"""`laneway up` in a terminal: Ctrl-C is a character typed there, reaches the foreground group, and ends it all."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.nats import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

CTRL_C = b"\x03"
# Runs a command on a terminal of its own and types there what comes on standard input.
TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
UP = (
    sys.executable,
    "-m",
    "laneway.cli",
    "up",
    "--engine",
    "simulated",
    "--workers",
    "2",
    "--set",
    "process.drain_s=5",
)


@asynccontextmanager
async def terminal(folder: Path) -> AsyncIterator[tuple[Process, list[psutil.Process]]]:
    """A terminal in which `laneway up` serves, and every process that began in it."""
    endpoint = folder / "endpoint.json"
    found = {name: value for name, value in os.environ.items() if not name.startswith("LANEWAY_")}
    environment = {**found, "LANEWAY_ENDPOINT_FILE": str(endpoint), "TMPDIR": str(folder)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", TERMINAL, *UP, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=environment
    )
    try:
        await eventually(lambda: endpoint.exists() or process.returncode is not None, timeout_s=60)
        assert endpoint.exists()
        processes = psutil.Process(process.pid).children(recursive=True)
        assert len(processes) >= 9, "up, NATS, three services, two workers and their engines"
        yield process, processes
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


async def type_in(process: Process, characters: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(characters)
    await process.stdin.drain()


async def says(process: Process, words: bytes) -> None:
    assert process.stdout is not None
    shown = b""
    async with asyncio.timeout(60):
        while words not in shown:
            more = await process.stdout.read(4096)
            assert more, shown.decode(errors="replace")
            shown += more


async def test_ctrl_c_in_the_terminal_of_up_stops_all_of_it_in_order(tmp_path: Path):
    async with terminal(tmp_path) as (process, processes):
        await type_in(process, CTRL_C)
        out, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, out.decode(errors="replace")
    assert alive(processes) == []
    assert [path.name for path in tmp_path.iterdir()] == [], "neither an endpoint nor a store is left"


@pytest.mark.drill
async def test_a_second_ctrl_c_stops_it_at_once_and_leaves_nothing_either(tmp_path: Path):
    async with terminal(tmp_path) as (process, processes):
        for stopped in processes:
            if "worker" in stopped.cmdline():
                stopped.send_signal(signal.SIGSTOP)  # they will not answer the first
        await type_in(process, CTRL_C)
        await says(process, b"press Ctrl-C again")
        await type_in(process, CTRL_C)
        await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode != 0
    await eventually(lambda: alive(processes) == [])


@pytest.mark.drill
async def test_a_terminal_that_is_closed_takes_the_stack_with_it(tmp_path: Path):
    async with terminal(tmp_path) as (process, processes):
        process.kill()
        await process.communicate()
        await eventually(lambda: alive(processes) == [], timeout_s=60)
