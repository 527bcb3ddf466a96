"""A stack under a little load, to which faults are done while callers listen: what streams and new requests notice.

reliability.py has the faults and the report. Whoever imports this can import the drills' own helpers, in tests/.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the drills' own helpers

from laneway.cli.child import Child, StackError
from laneway.cli.stack import StackOptions
from laneway.client import (
    Client,
    JobState,
    Lane,
    LanewayError,
    OnDisconnect,
    RequestFields,
    RetryParams,
    SchedulerClient,
)
from laneway.runtime.bus import Bus
from laneway.runtime.records import RecordStore
from tests.support.drill_count import Ends, ends_of
from tests.support.drill_load import PATIENCE, TENANT, answer_of, workers_seen
from tests.support.drill_stack import DrillStack
from tests.support.nats import REGION, eventually
from tests.support.proxy import Proxy, proxied

STREAMS, TOKENS, PACE_S = 8, 200, 0.02
WORKERS = 3
STEP_TIMEOUT_S = 5.0
DRAIN_S = 1.0
MODEL = {
    "name": "chat", "engine": "simulated", "slots": 8, "workers": WORKERS, "queue_length": 200,
    "engine_options": {"pace_s": PACE_S}, "decode_tokens_per_s": 1 / PACE_S,
}  # fmt: skip
SETTINGS = {"models": [MODEL], "process": {"drain_s": DRAIN_S}, "worker": {"step_timeout_s": STEP_TIMEOUT_S}}
WAITS = {"priority": 3.0, "deferrable": 3.0, "batch": 3.0}


@dataclass(frozen=True)
class Case:
    name: str
    fault: Callable[[Bench], Awaitable[None]]
    kind: OnDisconnect = OnDisconnect.CANCEL
    lane: Lane = Lane.PRIORITY  # of the streams


@dataclass
class Stream:
    number: int
    on_disconnect: OnDisconnect
    lane: Lane = Lane.PRIORITY
    tokens: int = TOKENS
    ids: list[int] = field(default_factory=list)
    job_id: str = ""
    told: str = ""
    silence_s: float = 0.0
    told_after_s: float = 0.0  # from the last token to an error

    @property
    def prompt_ids(self) -> list[int]:
        return list(f"stream {self.number:06d}".encode())

    @property
    def request(self) -> RequestFields:
        return {
            "model": "chat", "token_ids": self.prompt_ids, "max_tokens": self.tokens, "ignore_eos": True,
            "temperature": 0.0, "lane": self.lane, "ttft_target_s": 60.0, "deadline_s": 300.0,
            "on_disconnect": self.on_disconnect,
        }  # fmt: skip

    async def run(self, client: Client) -> None:
        last_s = 0.0
        try:
            async with client.generate(**self.request) as stream:
                self.job_id = stream.job_id
                async for chunk in stream:
                    now_s = time.monotonic()
                    self.silence_s = max(self.silence_s, now_s - last_s if last_s else 0.0)
                    last_s = now_s
                    self.ids += chunk.token_ids
            self.told = stream.finished.state.value
        except LanewayError as error:
            self.told = error.reason
            self.told_after_s = time.monotonic() - last_s if last_s else 0.0


@dataclass
class Sample:
    """One repeat of one fault."""

    silence_s: float = 0.0
    refused_s: float = 0.0  # longest time between two successful new requests
    lost: int = 0
    doubled: int = 0
    told: Counter[str] = field(default_factory=Counter)  # by callers that repeat nothing


@dataclass
class Bench:
    """A stack under a little load. Streams go through the first door; new requests through the last."""

    stack: DrillStack
    bus: Bus
    ends: Ends
    lines: dict[str, Proxy] = field(default_factory=dict)  # by worker: its way to NATS, which can be cut
    victim: str = ""  # a worker that runs some of the streams
    _number: int = 0

    def worker(self) -> Child:
        return self.stack.child(self.victim)

    async def back(self, child: Child) -> None:
        if child.alive:
            return
        for _ in range(100):
            try:
                await self.stack.restart(child.name)
                return
            except StackError:
                await asyncio.sleep(0.2)
        raise RuntimeError(f"{child.name} does not come back")

    async def sample(self, case: Case) -> Sample:
        sample, streams = Sample(), []
        for _ in range(STREAMS):
            self._number += 1
            streams.append(Stream(self._number, case.kind, case.lane))
        twice = len(self.ends.twice)
        async with (
            Client(self.stack.doors[0], retry_budget=PATIENCE) as client,
            Client(self.stack.doors[-1], retry_budget=RetryParams.never()) as new,
        ):
            probing = asyncio.ensure_future(self._probe(new, sample))
            async with asyncio.TaskGroup() as group:
                for each in streams:
                    group.create_task(each.run(client))
                await eventually(lambda: all(len(each.ids) > 20 for each in streams), 30.0)
                stored = await RecordStore(self.bus).get(REGION, TENANT, streams[0].job_id, leader=True)
                assert stored is not None
                self.victim = stored.record.owner.rpartition("-")[0]  # an incarnation is a name and some digits
                await case.fault(self)
            good = sample.told["ok"]
            with contextlib.suppress(TimeoutError):  # shows as what it is: nothing is served any more
                await eventually(lambda: sample.told["ok"] > good + 2, 30.0)
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)
            for each in streams:
                await self._look_at(client, each, sample)
        sample.doubled += len(self.ends.twice) - twice
        return sample

    async def _look_at(self, client: Client, each: Stream, sample: Sample) -> None:
        expected = answer_of(each.prompt_ids, TOKENS)
        sample.silence_s = max(sample.silence_s, each.silence_s, each.told_after_s)
        sample.doubled += each.ids != expected[: len(each.ids)]
        if each.told == JobState.SUCCEEDED:
            sample.lost += len(each.ids) != TOKENS
            return
        sample.told[f"stream {each.told}"] += 1
        job = await client.wait(each.job_id, timeout_s=60.0)
        kept = each.on_disconnect is OnDisconnect.KEEP
        sample.lost += kept or not job.state.terminal

    async def _probe(self, client: Client, sample: Sample) -> None:
        last_s = time.monotonic()
        request: RequestFields = {
            "model": "chat", "token_ids": [97, 98], "max_tokens": 1, "ttft_target_s": 30.0, "deadline_s": 60.0,
        }  # fmt: skip
        while True:
            try:
                async with client.generate(idempotency_key="", **request) as stream:
                    await stream.text()
                sample.told["ok"] += 1
                sample.refused_s = max(sample.refused_s, time.monotonic() - last_s)
                last_s = time.monotonic()
            except LanewayError as error:
                sample.told[error.reason] += 1
            await asyncio.sleep(0.05)


@asynccontextmanager
async def benched(servers: int) -> AsyncIterator[Bench]:
    replicas = {"nats": {"replicas": 3 if servers > 1 else 1}}
    options = StackOptions(settings={**SETTINGS, **replicas}, ack_wait_s=WAITS)
    async with AsyncExitStack() as exits:
        stack = DrillStack(options, doors=2, schedulers=2, servers=servers)
        stack = await exits.enter_async_context(stack)
        bus = await exits.enter_async_context(stack.observed())
        ends = await exits.enter_async_context(ends_of(bus))
        lines: dict[str, Proxy] = {}
        for worker in stack.workers if servers == 1 else ():
            line = lines[worker.name] = await exits.enter_async_context(proxied(stack.addresses.nats))
            worker.environment["LANEWAY_NATS__URL"] = line.url
            await stack.restart(worker.name)
        async with SchedulerClient(stack.addresses.scheduler) as scheduler:
            await workers_seen(scheduler, WORKERS)
        yield Bench(stack, bus, ends, lines)


async def ready(bench: Bench) -> None:
    """Everything that a fault took away is back."""
    async with SchedulerClient(bench.stack.addresses.scheduler) as scheduler:

        async def all_ready() -> bool:
            try:
                return len([w async for w in scheduler.list_workers() if w.state == "READY"]) == WORKERS
            except LanewayError:
                return False

        await eventually(all_ready, 60.0)
