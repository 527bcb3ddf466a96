"""Workers with simulated engines in the test's process, jobs put into their lanes by hand, and a door of bytes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.structs import replace
from nats.aio.msg import Msg

from laneway.core import subjects
from laneway.core.clock import Clock
from laneway.core.job import GenerateTask, JobRecord, LaneJob, Sampling
from laneway.core.lanes import Lane
from laneway.runtime.bus import Bus
from laneway.runtime.catalogue import catalogue_of
from laneway.runtime.clock import SystemClock
from laneway.runtime.engine_options import EngineOptions
from laneway.runtime.lanes import LaneStore
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.records import RecordStore, StoredRecord
from laneway.runtime.settings import (
    ModelSettings,
    PolicySettings,
    ProcessSettings,
    Settings,
    WorkerSettings,
)
from laneway.runtime.tokenizer import load_tokenizer
from laneway.v1 import admission_pb2, bus_pb2
from laneway.workers.engines.registry import make_engine
from laneway.workers.server import options_of
from laneway.workers.service import Worker
from tests.support.nats import POOL, REGION, TENANT, connected, eventually, make_record, nats_settings, provision_region

PACE_S = 0.002


def worker_settings(server: LocalNats, **changes: Any) -> Settings:
    """Simulated pool `chat-small`. Keys of [[models]], [worker], [policy], [nats], engine options and drain_s."""
    model: dict[str, Any] = {
        "engine": "simulated",
        "slots": 4,
        "kv_tokens": 16_384,
        "context_length": 4096,
        "queue_length": 1000,
    }
    engine: dict[str, Any] = {"pace_s": PACE_S}
    # Nobody releases what a worker parks here; jobs are alike, and each is to take the place of one.
    policy = {"preemptions_max": 0, "single_flight": False}
    sections: dict[str, dict[str, Any]] = {"worker": {}, "policy": policy, "nats": {}, "process": {}}
    for key, value in changes.items():
        section, _, name = key.partition("__")
        {"model": model, "engine": engine, **sections}[section][name] = value
    return Settings(
        nats=nats_settings(server, **sections["nats"]),
        models=(
            ModelSettings(
                name="chat",
                tier="small",
                pool=POOL,
                engine_options=EngineOptions(**engine),
                **model,
            ),
        ),
        worker=WorkerSettings(**sections["worker"]),
        policy=PolicySettings(**sections["policy"]),
        process=ProcessSettings(**sections["process"]),
    )


@dataclass
class RunningWorker:
    worker: Worker
    bus: Bus
    stop: asyncio.Event
    task: asyncio.Task[None]

    @property
    def id(self) -> str:
        return self.worker.snapshot().worker_id

    async def drain(self) -> None:
        self.stop.set()
        await self.task

    async def die(self) -> None:
        """As kill -9 looks to others: no drain, and the lease is left to expire."""
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task
        await self.bus.close()

    def idle(self) -> bool:
        lease = self.worker.snapshot()
        return not (lease.running or lease.kv_tokens_used or any(lease.running_by_lane.values()))

    def engine_empty(self) -> bool:
        return not len(self.worker.sequences)


@dataclass
class Yard:
    """One region with its workers."""

    server: LocalNats
    bus: Bus
    settings: Settings
    records: RecordStore
    lanes: LaneStore
    workers: list[RunningWorker] = field(default_factory=list)

    async def start_worker(self, name: str = "", *, clock: Clock | None = None, **changes: Any) -> RunningWorker:
        """`clock`: its host's."""
        settings = self.settings
        given = {"name": name or f"w{len(self.workers)}", **changes}
        settings = msgspec.structs.replace(settings, worker=msgspec.structs.replace(settings.worker, **given))
        options = options_of(settings)
        engine_options = settings.engine_options_of(options.pool.name)
        token_bytes = load_tokenizer(options.pool.tokenizer).token_bytes
        bus = await Bus.connect(settings.nats, name=options.worker_id)
        clock = clock or SystemClock()
        worker = Worker(bus, options, lambda: make_engine(options.pool, engine_options), token_bytes, clock)
        stop, ready = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(worker.run(stop, ready.set), name=f"worker-{given['name']}")
        running = RunningWorker(worker, bus, stop, task)
        self.workers.append(running)
        waiting = asyncio.ensure_future(ready.wait())
        await asyncio.wait({waiting, task}, return_when=asyncio.FIRST_COMPLETED, timeout=20)
        waiting.cancel()
        if task.done():
            await task
        assert ready.is_set(), "the worker did not become ready"
        return running

    async def submit(
        self,
        record: JobRecord | None = None,
        *,
        copies: int = 1,
        caller_at: ByteDoor | None = None,
        **changes: Any,
    ) -> StoredRecord:
        """A job in its ready lane. Changes: fields of the record, or `prompt`, `sampling` of the task.

        `caller_at`: a caller is attached there, and the door follows the job.
        """
        prompt = tuple(changes.pop("prompt", b"Hello"))
        sampling = changes.pop("sampling", None)
        lane = changes.pop("lane", Lane.PRIORITY)
        contract = changes.pop("contract", {})
        max_tokens = changes.pop("max_tokens", sampling.max_tokens if sampling else 8)
        record = record or make_record(lane=lane, prompt_tokens=len(prompt), max_tokens=max_tokens, **changes)
        record = replace(record, contract=replace(record.contract, **contract))
        if caller_at is not None:
            record = replace(record, attached=True, door=caller_at.name)
            caller_at.following[record.job_id] = 0
        job = LaneJob(record, GenerateTask(prompt, sampling or Sampling(max_tokens=max_tokens, temperature=0.0)))
        sequence = await self.records.create(record)
        for copy in range(copies):
            if copy:  # the lane's dedupe would drop a second copy with the same id
                await self._copy(job, sequence)
            else:
                await self.lanes.put_ready(job, sequence)
        return StoredRecord(record, sequence)

    async def _copy(self, job: LaneJob, sequence: int) -> None:
        from laneway.runtime.wire.records import encode_lane_job

        record = job.record
        subject = subjects.ready(REGION, record.contract.lane, record.pool, record.tenant, record.job_id)
        await self.bus.store(subject, encode_lane_job(job), {subjects.H_RECORD_SEQUENCE: str(sequence)})

    async def record(self, job_id: str) -> JobRecord:
        stored = await self.records.get(REGION, TENANT, job_id, leader=True)
        assert stored is not None
        return stored.record

    async def ended(self, *job_ids: str, timeout_s: float = 20.0) -> list[JobRecord]:
        """The terminal records of these jobs."""

        async def all_terminal() -> list[JobRecord] | None:
            records = [await self.record(job_id) for job_id in job_ids]
            return records if all(record.state.terminal for record in records) else None

        return await eventually(all_terminal, timeout_s)

    async def messages(self, lane: Lane) -> int:
        """Lane messages that are still stored."""
        info = await self.bus.api(f"STREAM.INFO.{subjects.lane_stream(REGION, lane)}", {})
        return int(info["state"]["messages"])

    async def lanes_empty(self) -> bool:
        return not sum([await self.messages(lane) for lane in Lane])

    async def tell(self, worker_id: str, **control: Any) -> None:
        message = bus_pb2.WorkerControl(**control)
        await self.bus.emit(subjects.control(worker_id), message.SerializeToString())


@asynccontextmanager
async def yard(server: LocalNats, *, workers: int = 0, **changes: Any) -> AsyncIterator[Yard]:
    """A provisioned region with so many workers; all of them are gone afterwards."""
    settings = worker_settings(server, **changes)
    async with connected(server) as bus:
        nats = {
            "ack_wait_" + k: getattr(settings.nats, "ack_wait_" + k) for k in ("priority_s", "deferrable_s", "batch_s")
        }
        await provision_region(bus, catalogue_of(settings), **nats)
        place = Yard(server, bus, settings, RecordStore(bus), LaneStore(bus, REGION))
        try:
            await asyncio.gather(*(place.start_worker(f"w{i}") for i in range(workers)))
            yield place
        finally:
            for running in place.workers:
                if not running.task.done():
                    running.task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await running.task
                await running.bus.close()


class ByteDoor:
    """A door without callers: keeps what workers send it, and beats for what it follows."""

    def __init__(self, bus: Bus, name: str = "door-a") -> None:
        self.bus = bus
        self.name = name
        self.deltas: dict[str, list[bus_pb2.SequenceDelta]] = {}
        self.events: dict[str, list[bus_pb2.JobEvent]] = {}
        self.owner: dict[str, str] = {}
        self.following: dict[str, int] = {}  # job id -> attempt
        self.batches = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._subscriptions: list[Any] = []

    async def __aenter__(self) -> ByteDoor:
        self._subscriptions = [
            await self.bus.listen(subjects.tokens(self.name), self._tokens),
            await self.bus.listen(subjects.events(REGION), self._event),
        ]
        self._spawn(self._beat())
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        for subscription in self._subscriptions:
            await self.bus.unsubscribe(subscription)

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _tokens(self, msg: Msg) -> None:
        batch = bus_pb2.TokenBatch.FromString(msg.data)
        self.batches += 1
        for delta in batch.deltas:
            self.deltas.setdefault(delta.job_id, []).append(delta)

    def _event(self, msg: Msg) -> None:
        event = bus_pb2.JobEvent.FromString(msg.data)
        self.events.setdefault(event.job_id, []).append(event)
        if event.record:
            self.owner.pop(event.job_id, None)
        if event.job_id in self.following and not event.record and event.attempt:
            self.owner[event.job_id] = event.worker_id
            self.following[event.job_id] = event.attempt
            self._spawn(self.beat(event.job_id, attach=True))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            by_worker: dict[str, list[bus_pb2.Attachment]] = {}
            for job_id, worker_id in self.owner.items():
                if job_id in self.following:
                    by_worker.setdefault(worker_id, []).append(self._attachment(job_id))
            for worker_id, attachments in by_worker.items():
                await self._tell(worker_id, attachments)

    async def beat(self, job_id: str, *, attach: bool = False, replay_from: int | None = None) -> None:
        if job_id in self.following:
            await self._tell(self.owner[job_id], [self._attachment(job_id, attach, replay_from)])

    def _attachment(self, job_id: str, attach: bool = False, replay_from: int | None = None) -> bus_pb2.Attachment:
        ids = self.ids(job_id)
        return bus_pb2.Attachment(
            job_id=job_id,
            attempt=self.following[job_id],
            next_index=len(ids) if replay_from is None else replay_from,
            delivered_ids=ids if attach else (),
            replay=replay_from is not None or (attach and bool(ids)),
        )

    async def _tell(self, worker_id: str, attachments: list[bus_pb2.Attachment]) -> None:
        message = bus_pb2.WorkerControl(beat=bus_pb2.DoorBeat(door=self.name, attachments=attachments))
        await self.bus.emit(subjects.control(worker_id), message.SerializeToString())

    def chunks(self, job_id: str) -> list[Any]:
        return [
            admission_pb2.GenerateResponse.FromString(delta.response).chunk for delta in self.deltas.get(job_id, [])
        ]

    def ids(self, job_id: str) -> list[int]:
        """Token ids in order, each index once, as a door forwards them; fails at a gap."""
        out: list[int] = []
        for delta, chunk in zip(self.deltas.get(job_id, []), self.chunks(job_id), strict=True):
            assert delta.first_index == chunk.first_index
            assert delta.count == len(chunk.token_ids)
            if delta.first_index + delta.count <= len(out):
                continue  # sent again
            assert delta.first_index <= len(out), f"a gap before {delta.first_index} of {job_id}"
            out.extend(chunk.token_ids[len(out) - delta.first_index :])
        return out

    def text(self, job_id: str) -> str:
        """The text of the chunks that a door forwards; what was sent again is left out."""
        out, next_index = "", 0
        for chunk in self.chunks(job_id):
            if chunk.first_index + len(chunk.token_ids) > next_index:
                assert chunk.first_index == next_index
                out += chunk.text
                next_index += len(chunk.token_ids)
        return out


def ids_of(records: Sequence[StoredRecord]) -> list[str]:
    return [stored.record.job_id for stored in records]
