"""An admission service in the test's process on a real nats-server, and a worker whose every step the test makes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import msgspec
from msgspec.structs import replace
from nats.aio.msg import Msg

from laneway.admission.server import serve
from laneway.core import subjects
from laneway.core.clock import Clock
from laneway.core.fleet import LanePlan, Plan, PoolPlan, WorkerLease, WorkerState
from laneway.core.job import GenerateTask, JobRecord, LaneJob, Result, Usage, claim, fail, succeed
from laneway.core.lanes import LANES, FinishReason, JobState, Lane
from laneway.runtime.auth import Caller
from laneway.runtime.bus import Bus, WrongSequence
from laneway.runtime.clock import SystemClock
from laneway.runtime.grpc_errors import from_rpc_error
from laneway.runtime.lanes import LaneStore
from laneway.runtime.leases import LeaseKeeper
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.plans import PlanPublisher
from laneway.runtime.puller import Delivery, LanePuller
from laneway.runtime.records import RecordStore, StoredRecord
from laneway.runtime.settings import AdmissionSettings, ModelSettings, ProcessSettings, Settings
from laneway.runtime.wire.times import timestamp_of
from laneway.v1 import admission_pb2 as pb
from laneway.v1 import admission_pb2_grpc, bus_pb2, common_pb2, task_pb2
from laneway.workers import messages
from laneway.workers.messages import CancelHint, DoorBeat, parse_control
from tests.support.nats import POOL, REGION, connected, eventually, nats_settings
from tests.support.scheduling import provision_for

CLOCK = SystemClock()
TENANT = "default"  # of callers on this host where no tokens are configured
CALLER = Caller(TENANT, "operator")
WIRE_LANE = {
    Lane.PRIORITY: common_pb2.LANE_PRIORITY,
    Lane.DEFERRABLE: common_pb2.LANE_DEFERRABLE,
    Lane.BATCH: common_pb2.LANE_BATCH,
}


def admission_settings(server: LocalNats, *, queue_length: int = 8, slots: int = 4, **admission: Any) -> Settings:
    """Keys of [admission]; one simulated pool `chat-small` with the tokenizer of bytes."""
    model = ModelSettings(
        name="chat",
        engine="simulated",
        tokenizer="bytes",
        context_length=1024,
        slots=slots,
        workers=1,
        kv_tokens=100_000,
        queue_length=queue_length,
        max_tokens_default=16,
        load_s=2.0,
    )
    options: dict[str, Any] = {"listen": "127.0.0.1:0", "beat_s": 0.2, "silence_s": 0.6, **admission}
    return Settings(
        nats=nats_settings(server),
        models=(model,),
        admission=AdmissionSettings(**options),
        process=ProcessSettings(drain_s=1.0),
    )


@dataclass
class Gate:
    """An admission service, a channel to it, and the test's own connection to its NATS."""

    settings: Settings
    address: str
    bus: Bus
    channel: grpc.aio.Channel
    records: RecordStore
    lanes: LaneStore
    stop: asyncio.Event
    task: asyncio.Task[None]

    @property
    def stub(self) -> admission_pb2_grpc.AdmissionServiceAsyncStub:
        return admission_pb2_grpc.AdmissionServiceStub(self.channel)

    async def record(self, job_id: str, tenant: str = TENANT) -> JobRecord:
        stored = await self.records.get(REGION, tenant, job_id, leader=True)
        assert stored is not None, "there is no record"
        return stored.record

    async def reaches(self, job_id: str, state: JobState, tenant: str = TENANT) -> JobRecord:
        async def there() -> JobRecord | None:
            stored = await self.records.get(REGION, tenant, job_id, leader=True)
            return stored.record if stored is not None and stored.record.state is state else None

        return await eventually(there)

    async def messages(self, stream: str = "") -> int:
        """Stored messages of a stream; of all lanes together."""
        names = [stream] if stream else [subjects.lane_stream(REGION, lane) for lane in LANES]
        infos = [await self.bus.api(f"STREAM.INFO.{name}", {}) for name in names]
        return sum(int(info["state"]["messages"]) for info in infos)

    async def job_ids(self) -> list[str]:
        return await self.records.list_ids(REGION, TENANT)

    async def plan(self, *, workers: int = 1, free_slots: int = 4, lanes: Sequence[LanePlan] = (), **more: Any) -> None:
        """Publishes a plan that stays valid. The door follows in its own time: see `quotes`."""
        now_s = CLOCK.now()
        pool = PoolPlan(POOL, workers=workers, slots=4 * workers, free_slots=free_slots, lanes=tuple(lanes), **more)
        plan = Plan(REGION, 1, round(now_s * 1000), now_s, now_s + 600.0, (pool,))
        await PlanPublisher(self.bus, REGION).publish(plan)

    async def quotes(self, reason: str, **request: Any) -> None:
        """Waits until the door answers such a request with this reason."""

        async def answered() -> bool:
            quote = await self.stub.Quote(pb.QuoteRequest(spec=spec(**request)))
            return bool(quote.verdict.reason == reason)

        await eventually(answered)


@asynccontextmanager
async def gate(
    server: LocalNats, folder: Path, settings: Settings | None = None, *, clock: Clock | None = None
) -> AsyncIterator[Gate]:
    """A provisioned region with a running admission service. `clock`: its host's."""
    settings = settings or admission_settings(server)
    ready_file = folder / "admission.json"
    process = msgspec.structs.replace(settings.process, ready_file=str(ready_file))
    settings = msgspec.structs.replace(settings, process=process)
    async with connected(server) as bus:
        await provision_for(bus, settings)
        stop = asyncio.Event()
        task = asyncio.ensure_future(serve(settings, stop, clock=clock))

        def ready() -> str:
            if task.done():
                task.result()
            return msgspec.json.decode(ready_file.read_bytes())["address"] if ready_file.exists() else ""

        try:
            address = await eventually(ready)
            async with grpc.aio.insecure_channel(address) as channel:
                yield Gate(settings, address, bus, channel, RecordStore(bus), LaneStore(bus, REGION), stop, task)
        finally:
            stop.set()
            await task


@asynccontextmanager
async def open_gate(
    server: LocalNats, folder: Path, settings: Settings | None = None
) -> AsyncIterator[tuple[Gate, PuppetWorker]]:
    """A gate that takes every lane at once, and a worker behind it."""
    async with gate(server, folder, settings) as door, PuppetWorker(door.bus).alive() as worker:
        await door.plan()
        await door.quotes("LANE_OPEN", lane=Lane.BATCH)
        yield door, worker


# --- requests --------------------------------------------------------------------------------------


def spec(
    text: str = "Hello", *, lane: Lane | None = None, due_s: float | None = None, model: str = "chat", **contract: Any
) -> task_pb2.JobSpec:
    if lane is not None:
        contract["lane"] = WIRE_LANE[lane]
    if due_s is not None:
        contract["deadline"] = timestamp_of(CLOCK.now() + due_s)
    task = task_pb2.GenerateTask(text=text)
    return task_pb2.JobSpec(model=model, generate=task, contract=common_pb2.Contract(**contract))


def generate(text: str = "Hello", key: str = "", **more: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(spec=spec(text, **more), idempotency_key=key)


async def opening(call: Any) -> pb.Accepted:
    """The first message of a stream, which must be Accepted."""
    event = await call.read()
    assert event.HasField("accepted"), event
    return event.accepted


async def next_text(call: Any) -> str:
    """The text of the next message of a stream, which must be a chunk."""
    event = await call.read()
    assert event.HasField("chunk"), event
    return str(event.chunk.text)


async def rest(call: Any) -> list[Any]:
    """What a stream still gives; `read` and `async for` must not be mixed on one call."""
    events = []
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event)
    return events


async def error_of_call(call: Any) -> Any:
    """The LanewayError that a call ends with."""
    try:
        if hasattr(call, "read"):
            await rest(call)
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    raise AssertionError("the call succeeded")


def text_of(events: Sequence[Any]) -> str:
    return "".join(event.chunk.text for event in events if event.HasField("chunk"))


def ids_of(events: Sequence[Any]) -> list[int]:
    """The token ids, whose chunks must follow each other."""
    out: list[int] = []
    for event in events:
        if event.HasField("chunk"):
            assert event.chunk.first_index == len(out) or not out, "an index is missing or came twice"
            out.extend(event.chunk.token_ids)
    return out


# --- a worker of strings and wire ------------------------------------------------------------------


@dataclass
class Held:
    """A job that the puppet has claimed."""

    delivery: Delivery
    stored: StoredRecord

    @property
    def record(self) -> JobRecord:
        return self.stored.record

    @property
    def task(self) -> GenerateTask:
        job = self.delivery.job
        assert isinstance(job, LaneJob), "the task is in the object store"
        return job.task


class PuppetWorker:
    """Pulls, claims, streams and ends jobs when the test says so; its lease is real."""

    def __init__(self, bus: Bus, name: str = "puppet", slots: int = 4) -> None:
        self.id = f"{name}-1a"
        self.bus = bus
        self.lease = WorkerLease(self.id, name, POOL, "simulated", WorkerState.READY, slots=slots)
        self.beats: list[DoorBeat] = []
        self.hints: list[str] = []
        self.answers_hints = True
        self._tasks: list[asyncio.Future[None]] = []
        self._records = RecordStore(bus)
        self._keeper = LeaseKeeper(bus, REGION, lambda: self.lease, CLOCK)
        self._pullers = {lane: LanePuller(bus, REGION, lane, POOL) for lane in LANES}

    @asynccontextmanager
    async def alive(self) -> AsyncIterator[PuppetWorker]:
        await self._keeper.renew()
        subscription = await self.bus.listen(subjects.control(self.id), self._told)
        renewing = asyncio.ensure_future(self._keeper.run())
        for puller in self._pullers.values():
            await puller.start()
        try:
            yield self
        finally:
            for puller in self._pullers.values():
                await puller.close()
            renewing.cancel()
            await asyncio.gather(renewing, *self._tasks, return_exceptions=True)
            await self.bus.unsubscribe(subscription)

    def _told(self, msg: Msg) -> None:
        match parse_control(msg.data):
            case DoorBeat() as beat:
                self.beats.append(beat)
            case CancelHint(job_id):
                self.hints.append(job_id)
                if self.answers_hints:
                    self._tasks.append(asyncio.ensure_future(self.answer_hint(job_id)))
            case _:
                pass

    async def answer_hint(self, job_id: str) -> None:
        event = messages.event(job_id, JobState.CANCELLED, 0, self.id)
        await self.bus.emit(subjects.event(REGION, job_id), event)

    async def seen(self) -> None:
        """Shows the lease again: a door that just started knows this worker afterwards."""
        await self._keeper.renew()

    async def pull(self, lane: Lane = Lane.PRIORITY) -> Delivery:
        async def one() -> Delivery | None:
            found = await self._pullers[lane].pull(1)
            return found[0] if found else None

        return await eventually(one)

    async def take(self, lane: Lane = Lane.PRIORITY, *, announce: bool = True) -> Held:
        """Pulls a job and claims it."""
        delivery = await self.pull(lane)
        record, sequence = delivery.job.record, delivery.record_sequence
        try:
            mine = claim(record, self.id, CLOCK.now())
            held = Held(delivery, StoredRecord(mine, await self._records.update(mine, sequence)))
        except WrongSequence:  # its door has stored it meanwhile
            changed = await self._records.change(
                REGION, record.tenant, record.job_id, lambda found: claim(found, self.id, CLOCK.now())
            )
            held = Held(delivery, changed)
        if announce:
            await self.announce(held)
        return held

    async def announce(self, held: Held) -> None:
        record = held.record
        event = messages.event(record.job_id, JobState.RUNNING, record.attempt, self.id)
        await self.bus.emit(subjects.event(REGION, record.job_id), event)

    async def send(self, held: Held, first: int, text: str, *, attempt: int = 0, door: str = "") -> None:
        """One token a character, as one chunk."""
        await self.send_batch([(held, first, text)], attempt=attempt, door=door)

    async def send_batch(self, pieces: Sequence[tuple[Held, int, str]], *, attempt: int = 0, door: str = "") -> None:
        deltas = [
            bus_pb2.SequenceDelta(
                job_id=held.record.job_id,
                attempt=attempt or held.record.attempt,
                first_index=first,
                count=len(text),
                response=chunk_bytes(first, text),
            )
            for held, first, text in pieces
        ]
        batch = bus_pb2.TokenBatch(worker_id=self.id, deltas=deltas)
        to = door or pieces[0][0].record.door
        await self.bus.emit(subjects.tokens(to), batch.SerializeToString())

    async def finish(self, held: Held, text: str, *, with_record: bool = True, tell: bool = True) -> JobRecord:
        """Ends the job with this answer, one token a character."""
        ids = tuple(text.encode())
        result = Result(text, ids, (1,) * len(ids), FinishReason.LENGTH, Usage(held.record.prompt_tokens, 0, len(ids)))
        timings = replace(held.record.timings, ended_s=CLOCK.now())
        return await self._end(
            held, succeed(held.record, self.id, held.record.attempt, result, timings), with_record, tell
        )

    async def fail(self, held: Held, error: Any) -> JobRecord:
        record = fail(held.record, self.id, held.record.attempt, error, CLOCK.now())
        return await self._end(held, record, True, True)

    async def _end(self, held: Held, record: JobRecord, with_record: bool, tell: bool) -> JobRecord:
        from laneway.runtime.wire.records import encode_record

        await self._records.update(record, held.stored.sequence)
        if tell:
            body = encode_record(record) if with_record else b""
            event = messages.event(record.job_id, record.state, record.attempt, self.id, body)
            await self.bus.emit(subjects.event(REGION, record.job_id), event)
        await held.delivery.ack()
        return record


def chunk_bytes(first: int, text: str) -> bytes:
    chunk = task_pb2.Chunk(first_index=first, token_ids=list(text.encode()), text=text)
    return pb.GenerateResponse(chunk=chunk).SerializeToString()
