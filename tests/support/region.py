"""A region in the test's process: scheduler, admission and workers run by their own `serve` on a real nats-server, each
engine in its own process with a witness in it. What is live is recounted from every place that claims to know."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

import laneway.admission.server
import laneway.scheduler.server
import laneway.workers.server
from laneway.client import Client, SchedulerClient, VerdictKind
from laneway.core import subjects
from laneway.core.job import JobRecord
from laneway.core.lanes import LANES
from laneway.runtime.bus import Bus
from laneway.runtime.engine_options import EngineOptions
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.records import RecordStore
from laneway.runtime.settings import (
    AdmissionSettings,
    ModelSettings,
    PolicySettings,
    ProcessSettings,
    SchedulerSettings,
    Settings,
)
from laneway.workers.engines import child
from tests.support.drill_count import NOT_LIVE
from tests.support.nats import REGION, connected, eventually, nats_settings
from tests.support.recording_host import RECORD_FILE, Aborted, Added, Entry, Step

TENANT = "default"  # of callers on this host where no tokens are configured
ROOT = Path(__file__).parents[2]
# Ends of the names of gauges that say what there is or should be, not what is live.
_Serve = Callable[[Settings, asyncio.Event], Awaitable[None]]


def region_settings(
    server: LocalNats,
    *,
    options: dict[str, Any] | None = None,
    policy: dict[str, Any] | None = None,
    scheduler: dict[str, Any] | None = None,
    **model: Any,
) -> Settings:
    """One pool; keys of [[models]], of its engine options, of [policy] and of [scheduler]."""
    return Settings(
        nats=nats_settings(server),
        models=(ModelSettings(name="chat", engine_options=EngineOptions(**(options or {})), **model),),
        admission=AdmissionSettings(listen="127.0.0.1:0"),
        scheduler=SchedulerSettings(listen="127.0.0.1:0", **(scheduler or {})),
        policy=PolicySettings(**(policy or {})),
        process=ProcessSettings(drain_s=3.0),
    )


@dataclass(frozen=True)
class EngineLog:
    """What the witness in an engine's process wrote down."""

    path: Path

    def entries(self) -> list[Entry]:
        data = self.path.read_bytes() if self.path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        return [msgspec.json.decode(line, type=Entry) for line in whole.splitlines()]

    def steps(self) -> list[Step]:
        return [entry for entry in self.entries() if isinstance(entry, Step)]

    def added(self) -> list[Added]:
        return [entry for entry in self.entries() if isinstance(entry, Added)]

    def sequence_of(self, prompt_ids: tuple[int, ...]) -> Added | None:
        """The sequence with this prompt, once it has reached the engine."""
        return next((entry for entry in self.added() if entry.prompt_ids == prompt_ids), None)

    def abort_of(self, sequence_id: int) -> Aborted | None:
        found = (entry for entry in self.entries() if isinstance(entry, Aborted) and entry.id == sequence_id)
        return next(found, None)

    def tokens_of(self, sequence_id: int) -> int:
        return sum(step.tokens.get(sequence_id, 0) for step in self.steps())


@dataclass
class Part:
    """A service that runs in this process, and what it wrote into its ready file."""

    task: asyncio.Future[None]
    stop_event: asyncio.Event
    note: dict[str, str]

    @property
    def stopped(self) -> bool:
        return self.task.done()

    async def stop(self) -> None:
        self.stop_event.set()
        await self.task


@dataclass
class LocalRegion:
    server: LocalNats
    settings: Settings
    bus: Bus
    client: Client
    scheduler: SchedulerClient
    metrics: str
    scheduler_part: Part
    logs: list[EngineLog] = field(default_factory=list)
    job_ids: set[str] = field(default_factory=set)  # whose records must be terminal in the end

    @property
    def log(self) -> EngineLog:
        return self.logs[0]

    @property
    def records(self) -> RecordStore:
        return RecordStore(self.bus)

    async def record(self, job_id: str) -> JobRecord:
        stored = await self.records.get(REGION, TENANT, job_id, leader=True)
        assert stored is not None, "there is no record"
        return stored.record

    async def messages(self) -> dict[str, int]:
        """Stored messages of each lane, ready and parked."""
        streams = [subjects.lane_stream(REGION, lane) for lane in LANES]
        return {name: (await self.bus.api(f"STREAM.INFO.{name}", {}))["state"]["messages"] for name in streams}

    async def gauges(self) -> dict[str, float]:
        """Every gauge of live things, as an operator's Prometheus reads it, summed over its labels."""
        request = f"http://{self.metrics}/metrics"
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=10).read().decode())
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            if family.type == "gauge" and not family.name.endswith(NOT_LIVE):
                found[family.name] = sum(sample.value for sample in family.samples)
        return found

    async def live(self) -> dict[str, float]:
        """A recount of all that is live, from everybody who counts."""
        counts: dict[str, float] = {**await self.messages(), **await self.gauges()}
        counts["records not terminal"] = sum(
            [not (await self.record(job_id)).state.terminal for job_id in self.job_ids]
        )
        if not self.scheduler_part.stopped:
            async for worker in self.scheduler.list_workers():
                counts[f"running at {worker.name}"] = worker.running
                counts[f"KV of {worker.name}"] = worker.kv_tokens_used
        for number, log in enumerate(self.logs):
            for step in log.steps()[-1:]:
                counts[f"sequences of engine {number}"] = step.running + step.queued
                counts[f"prompt tokens of engine {number}"] = step.prefilling_tokens
        return counts

    async def nothing_is_live(self) -> None:
        """Waits until every count is zero; fails with those that are not."""
        try:
            await eventually(self._nothing, timeout_s=15)
        except TimeoutError:
            left = {name: count for name, count in (await self.live()).items() if count}
            assert not left, f"still live: {left}"

    async def _nothing(self) -> bool:
        counts = await self.live()
        assert {"laneway_worker_running_jobs", "laneway_worker_kv_reserved_tokens"} <= counts.keys()
        return not any(counts.values())


@asynccontextmanager
async def local_region(
    server: LocalNats, folder: Path, settings: Settings, *, workers: int = 1
) -> AsyncIterator[LocalRegion]:
    """The region, once its door accepts."""
    async with AsyncExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(child, "HOST_MODULE", "tests.support.recording_host")
        patch.setenv("PYTHONPATH", str(ROOT))
        enter = stack.enter_async_context
        scheduler = await enter(_served(laneway.scheduler.server.serve, settings, folder / "scheduler.json"))
        door = await enter(_served(laneway.admission.server.serve, settings, folder / "admission.json"))
        logs: list[EngineLog] = []
        metrics = ""
        for number in range(workers):
            logs.append(EngineLog(folder / f"engine-{number}.jsonl"))
            patch.setenv(RECORD_FILE, str(logs[-1].path))
            own = msgspec.structs.replace(
                settings,
                worker=msgspec.structs.replace(settings.worker, name=f"w{number}"),
                process=msgspec.structs.replace(settings.process, metrics_listen="" if number else "127.0.0.1:0"),
            )
            worker = await enter(_served(laneway.workers.server.serve, own, folder / f"w{number}.json"))
            metrics = metrics or worker.note["metrics"]
        bus = await enter(connected(server))
        client = await enter(Client(door.note["address"]))
        operator = await enter(SchedulerClient(scheduler.note["address"]))
        if workers:
            await eventually(lambda: accepts(client), timeout_s=30)
        yield LocalRegion(server, settings, bus, client, operator, metrics, scheduler, logs)


async def accepts(client: Client) -> bool:
    """Whether the door would take a small priority request now; its plan follows the region a moment later."""
    verdict = (await client.quote(model="chat", token_ids=[1], max_tokens=1)).verdict
    return verdict.kind is not VerdictKind.REFUSED


@asynccontextmanager
async def _served(serve: _Serve, settings: Settings, ready_file: Path) -> AsyncIterator[Part]:
    """A service until the block ends, if nobody stops it before."""
    process = msgspec.structs.replace(settings.process, ready_file=str(ready_file))
    stop = asyncio.Event()
    task = asyncio.ensure_future(serve(msgspec.structs.replace(settings, process=process), stop))

    def ready() -> dict[str, str] | None:
        if task.done():
            task.result()
        return json.loads(ready_file.read_text()) if ready_file.exists() else None

    try:
        yield Part(task, stop, await eventually(ready, timeout_s=60))
    finally:
        stop.set()
        await task
