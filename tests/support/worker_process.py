"""A worker with its simulated engine in a process of its own, to be killed, stopped or told to go."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from laneway.runtime.settings import Settings
from tests.support.nats import eventually

PROGRAM = """
import sys
import msgspec
from laneway.runtime.lifecycle import run_service
from laneway.runtime.settings import Settings
from laneway.workers.server import serve
settings = msgspec.json.decode(sys.stdin.buffer.read(), type=Settings)
sys.exit(run_service("worker", settings, serve))
"""


@dataclass
class WorkerProcess:
    process: asyncio.subprocess.Process
    id: str


@asynccontextmanager
async def worker_process(settings: Settings, ready_file: Path, name: str = "apart") -> AsyncIterator[WorkerProcess]:
    """A worker in a process of its own."""
    settings = msgspec.structs.replace(
        settings,
        process=msgspec.structs.replace(settings.process, ready_file=str(ready_file)),
        worker=msgspec.structs.replace(settings.worker, name=name),
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(settings))
        process.stdin.close()
        await eventually(lambda: ready_file.exists() or process.returncode is not None, 30)
        yield WorkerProcess(process, json.loads(ready_file.read_text())["address"])
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
