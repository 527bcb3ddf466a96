"""Jobs put straight into the lanes of a worker, and a door that times their tokens: for what a worker decides alone.

There is no admission and no scheduler: every job is ready at once, attached to the door here, and kept whatever comes.
It works on any bus and in any time, so that benchmarks (real NATS, real time) and simulations share it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from nats.aio.msg import Msg

from laneway.core import subjects
from laneway.core.ids import new_job_id
from laneway.core.job import Contract, GenerateTask, JobRecord, LaneJob, Sampling, Timings, Verdict
from laneway.core.lanes import Isolation, Lane, OnDisconnect, VerdictKind
from laneway.runtime.bus import Bus
from laneway.runtime.lanes import LaneStore
from laneway.runtime.records import RecordStore
from laneway.v1 import bus_pb2

REGION, POOL, TENANT, DOOR = "local", "chat-small", "bench", "door-bench"
BEAT_S = 1.0


@dataclass(eq=False)
class Call:
    """One job, as its door sees it. Times are of the site's clock."""

    job_id: str
    wanted: int  # tokens
    prompt_tokens: int
    asked_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    gap_s: float = 0.0  # the longest between two tokens
    tokens: int = 0
    attempt: int = 0
    owner: str = ""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.asked_s

    @property
    def tpot_s(self) -> float:
        return (self.last_s - self.first_s) / max(1, self.tokens - 1)


@dataclass(frozen=True)
class Promise:
    """What a job is promised."""

    ttft_target_s: float = 1.0
    tpot_target_s: float = 0.1
    isolation: Isolation = Isolation.SLO


class Site:
    """The way to the workers of a region."""

    def __init__(self, bus: Bus, monotonic: Callable[[], float], wall: Callable[[], float]) -> None:
        self._bus = bus
        self._monotonic = monotonic
        self._wall = wall
        self._records = RecordStore(bus)
        self._lanes = LaneStore(bus, REGION)
        self._numbers = itertools.count(1)
        self.calls: dict[str, Call] = {}  # that have not ended

    @asynccontextmanager
    async def door(self) -> AsyncIterator[None]:
        await self._bus.listen(subjects.tokens(DOOR), self._on_tokens)
        await self._bus.listen(subjects.events(REGION), self._on_event)
        beats = asyncio.create_task(self._beat())
        try:
            yield
        finally:
            beats.cancel()
            with suppress(asyncio.CancelledError):
                await beats

    async def submit(self, lane: Lane, prompt: tuple[int, ...], tokens: int, promise: Promise) -> Call:
        """Puts a job into its lane. It gives exactly so many tokens."""
        now_s = self._wall()
        contract = Contract(
            lane, promise.ttft_target_s, promise.tpot_target_s, round(now_s + 600.0, 3), isolation=promise.isolation,
            on_disconnect=OnDisconnect.KEEP,
        )  # fmt: skip
        record = JobRecord(
            job_id=new_job_id(REGION, now_s, next(self._numbers).to_bytes(10, "big")), tenant=TENANT, region=REGION,
            model="chat", tier="small", pool=POOL, contract=contract, prompt_tokens=len(prompt), max_tokens=tokens,
            verdict=Verdict(VerdictKind.ACCEPTED, "OK", "", lane, tier="small", region=REGION, pool=POOL), door=DOOR,
            attached=True, latest_start_s=round(now_s + 500.0, 3), device_ms=100, timings=Timings(round(now_s, 3)),
        )  # fmt: skip
        call = self.calls[record.job_id] = Call(record.job_id, tokens, len(prompt))
        sequence = await self._records.create(record)
        call.asked_s = self._monotonic()
        sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        await self._lanes.put_ready(LaneJob(record, GenerateTask(prompt, sampling)), sequence)
        return call

    async def run(self, lane: Lane, prompt: tuple[int, ...], tokens: int, promise: Promise) -> Call:
        """Submits a job and returns when all its tokens have come."""
        call = await self.submit(lane, prompt, tokens, promise)
        await call.done.wait()
        if call.error:
            raise RuntimeError(f"{call.job_id}: {call.error}")
        return call

    def _on_tokens(self, msg: Msg) -> None:
        now_s = self._monotonic()
        for delta in bus_pb2.TokenBatch.FromString(msg.data).deltas:
            call = self.calls.get(delta.job_id)
            if call is None or delta.first_index + delta.count <= call.tokens:
                continue
            if delta.first_index > call.tokens:
                self._end(call, f"a gap before token {delta.first_index}")
                continue
            if call.first_s:
                call.gap_s = max(call.gap_s, now_s - call.last_s)
            call.first_s = call.first_s or now_s
            call.last_s, call.tokens = now_s, delta.first_index + delta.count
            if call.tokens >= call.wanted:
                self._end(call)

    def _on_event(self, msg: Msg) -> None:
        event = bus_pb2.JobEvent.FromString(msg.data)
        call = self.calls.get(event.job_id)
        if call is None:
            return
        call.attempt, call.owner = event.attempt or call.attempt, event.worker_id or call.owner
        if event.record:  # its last tokens may be on their way
            asyncio.get_running_loop().call_later(BEAT_S, self._end, call, "its record ended before its tokens came")

    def _end(self, call: Call, error: str = "") -> None:
        if not call.done.is_set():
            call.error = error
            call.done.set()
            self.calls.pop(call.job_id, None)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            attached: dict[str, list[bus_pb2.Attachment]] = {}
            for call in self.calls.values():
                if call.owner:
                    each = bus_pb2.Attachment(job_id=call.job_id, attempt=call.attempt, next_index=call.tokens)
                    attached.setdefault(call.owner, []).append(each)
            for owner, attachments in attached.items():
                beat = bus_pb2.WorkerControl(beat=bus_pb2.DoorBeat(door=DOOR, attachments=attachments))
                await self._bus.emit(subjects.control(owner), beat.SerializeToString())
