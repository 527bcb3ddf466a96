"""What a fault costs the callers of a running stack: the longest silence of a stream, the longest time without a
successful new request, what was lost and what came twice. docs/reliability.md shows its table.

For each fault, repeated: eight streams run, and small requests follow each other, none of them repeated by its caller;
the fault happens in the middle. A stream's gap is its longest silence as its caller measures it, less the longest of a
run without a fault; "lost" are streams and detached jobs that were accepted and did not end well, "doubled" are tokens
or ends that came twice, and answers that differ from the undisturbed one. The engine is simulated, 20 ms a token, so
that the gaps are Laneway's and NATS'. A part that was killed is started again at once, as a supervisor does.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from report import Report, main, percentile

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
from laneway.core import subjects
from laneway.runtime.bus import Bus
from laneway.runtime.records import RecordStore
from tests.support.drill_count import Ends, ends_of
from tests.support.drill_faults import kill_engine, slow_down
from tests.support.drill_load import PATIENCE, TENANT, answer_of, workers_seen
from tests.support.drill_stack import CLUSTER_SIZE, DrillStack
from tests.support.nats import REGION, eventually
from tests.support.proxy import Proxy, proxied

REPEATS = 3
LIMIT_S = 1200.0  # of the whole
STREAMS, TOKENS, PACE_S = 8, 200, 0.02
WORKERS = 3
STEP_TIMEOUT_S = 5.0
DRAIN_S = 1.0
FREEZE_S = 6.0
OUTAGE_S = 5.0  # a partition, or no scheduler
FILL_BYTES = 64 * 1024 * 1024
MODEL = {
    "name": "chat", "engine": "simulated", "slots": 8, "workers": WORKERS, "queue_length": 200,
    "engine_options": {"pace_s": PACE_S}, "decode_tokens_per_s": 1 / PACE_S,
}  # fmt: skip
SETTINGS = {"models": [MODEL], "process": {"drain_s": DRAIN_S}, "worker": {"step_timeout_s": STEP_TIMEOUT_S}}
WAITS = {"priority": 3.0, "deferrable": 3.0, "batch": 3.0}


# --- what is measured ------------------------------------------------------------------------------


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


# --- faults ----------------------------------------------------------------------------------------


async def nothing(_: Bench) -> None:
    await asyncio.sleep(1.0)


async def kill_worker(bench: Bench) -> None:
    bench.worker().kill()
    await bench.worker().wait()
    await bench.back(bench.worker())


async def freeze_worker(bench: Bench) -> None:
    bench.worker().signal(signal.SIGSTOP)
    await asyncio.sleep(FREEZE_S)
    bench.worker().signal(signal.SIGCONT)


async def drain_worker(bench: Bench) -> None:
    bench.worker().stopping = True
    bench.worker().signal(signal.SIGTERM)
    await bench.worker().wait()
    await bench.back(bench.worker())


async def cut_worker_off(bench: Bench) -> None:
    line = bench.lines[bench.victim]
    line.cut()
    await asyncio.sleep(OUTAGE_S + 3.0)
    line.heal()


async def crash_engine(bench: Bench) -> None:
    await kill_engine(bench.worker())


async def hang_engine(bench: Bench) -> None:
    for process in psutil.Process(bench.worker().pid).children(recursive=True):
        process.suspend()
    await asyncio.sleep(STEP_TIMEOUT_S + 3.0)


async def kill_leader(bench: Bench) -> None:
    scheduler = bench.stack.child("scheduler")
    scheduler.kill()
    await scheduler.wait()
    await asyncio.sleep(OUTAGE_S)
    await bench.back(scheduler)


async def kill_schedulers(bench: Bench) -> None:
    schedulers = bench.stack.of("scheduler")
    for each in schedulers:
        each.kill()
        await each.wait()
    await asyncio.sleep(OUTAGE_S)
    for each in schedulers:
        await bench.back(each)


async def kill_door(bench: Bench) -> None:
    door = bench.stack.child("admission")
    door.kill()
    await door.wait()
    await bench.back(door)


async def restart_nats(bench: Bench) -> None:
    server = bench.stack.servers[0]
    server.kill()
    await server.wait()
    await bench.stack.restart(server.name)


async def slow_nats(bench: Bench) -> None:
    await slow_down(bench.stack.servers[0], OUTAGE_S)


async def slow_reader(bench: Bench) -> None:
    """Callers that ask for much and read nothing; only the others are measured."""
    async with Client(bench.stack.doors[0]) as client, AsyncExitStack() as held:
        for number in range(4):
            idle = Stream(900_000 + number, OnDisconnect.CANCEL, tokens=2000)
            await held.enter_async_context(client.generate(**idle.request))
        await asyncio.sleep(3.0)


async def preempt(bench: Bench) -> None:
    """More priority work than there is room for beside the batch streams that are measured."""
    async with Client(bench.stack.doors[-1], retry_budget=PATIENCE) as client, asyncio.TaskGroup() as group:
        for number in range(8 * WORKERS):
            more = Stream(800_000 + number, OnDisconnect.CANCEL)
            group.create_task(more.run(client))


async def kill_records_leader(bench: Bench) -> None:
    leader = await bench.stack.leader_of(bench.bus, subjects.jobs_stream(REGION))
    leader.kill()
    await leader.wait()
    await asyncio.sleep(8.0)
    await bench.stack.restart(leader.name)


async def kill_lane_leader(bench: Bench) -> None:
    """Whoever leads the lane hands its messages out: a new one delivers again what healthy workers run."""
    leader = await bench.stack.leader_of(bench.bus, subjects.lane_stream(REGION, Lane.PRIORITY))
    leader.kill()
    await leader.wait()
    await asyncio.sleep(8.0)
    await bench.stack.restart(leader.name)


@dataclass(frozen=True)
class Case:
    name: str
    fault: Callable[[Bench], Awaitable[None]]
    kind: OnDisconnect = OnDisconnect.CANCEL
    lane: Lane = Lane.PRIORITY  # of the streams


CASES = (
    Case("nothing", nothing),
    Case("worker: kill -9", kill_worker),
    Case(f"worker: frozen for {FREEZE_S:g} s", freeze_worker),
    Case("worker: SIGTERM", drain_worker),
    Case(f"worker: cut off for {OUTAGE_S + 3:g} s", cut_worker_off),
    Case("engine: kill -9", crash_engine),
    Case(f"engine: hangs (step_timeout_s {STEP_TIMEOUT_S:g})", hang_engine),
    Case("leading scheduler: kill -9", kill_leader),
    Case(f"all schedulers: dead for {OUTAGE_S:g} s", kill_schedulers),
    Case("door: kill -9, KEEP", kill_door, OnDisconnect.KEEP),
    Case("door: kill -9, CANCEL", kill_door),
    Case("NATS, one server: kill -9", restart_nats),
    Case(f"NATS: slow for {OUTAGE_S:g} s", slow_nats),
    Case("slow readers", slow_reader),
    Case("batch work yields to priority", preempt, lane=Lane.BATCH),
)
CLUSTER_CASES = (
    Case("NATS, three servers: records' leader kill -9", kill_records_leader),
    Case("NATS, three servers: lane's leader kill -9", kill_lane_leader),
)


# --- the run ---------------------------------------------------------------------------------------


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


async def measure(smoke: bool) -> Report:
    rows: list[list[str]] = []
    figures: dict[str, float] = {}
    counts: dict[str, tuple[int, int]] = {}
    quiet_s = 0.0
    for servers, cases in ((1, CASES), (CLUSTER_SIZE, CLUSTER_CASES)):
        if smoke and servers > 1:
            continue
        async with benched(servers) as bench:
            for case in cases[:2] if smoke else cases:
                samples = []
                for _ in range(1 if smoke else REPEATS):
                    samples.append(await bench.sample(case))
                    await ready(bench)
                if case.fault is nothing:
                    quiet_s = max(sample.silence_s for sample in samples)
                row, key = _row(case, samples, quiet_s)
                rows.append(row)
                print("  ".join(row), file=sys.stderr, flush=True)
                figures[f"{key}_gap_median_s"] = percentile([s.silence_s for s in samples], 50)
                figures[f"{key}_gap_max_s"] = max(s.silence_s for s in samples)
                figures[f"{key}_refused_max_s"] = max(s.refused_s for s in samples)
                counts[f"lost: {case.name}"] = (sum(s.lost for s in samples), 0)
                counts[f"doubled: {case.name}"] = (sum(s.doubled for s in samples), 0)
    columns = ["fault", "gap s, median", "gap s, longest", "new requests s", "lost", "doubled", "told meanwhile"]
    notes = [(f"{REPEATS} repeats of {STREAMS} streams of {TOKENS} tokens; without a fault the longest silence is"
             f" {quiet_s:.2f} s")]  # fmt: skip
    return Report("What a fault costs", columns, rows, figures, counts=counts, notes=notes)


def _row(case: Case, samples: list[Sample], quiet_s: float) -> tuple[list[str], str]:
    gaps = [sample.silence_s for sample in samples]
    told: Counter[str] = Counter()
    for sample in samples:
        told.update({word: count for word, count in sample.told.items() if word != "ok"})
    words = ", ".join(f"{count} {word}" for word, count in told.most_common(4))
    key = "".join(c if c.isalnum() else "_" for c in case.name.lower()).strip("_")
    row = [
        case.name,
        f"{percentile(gaps, 50):.2f}",
        f"{max(gaps):.2f}",
        f"{max(sample.refused_s for sample in samples):.2f}",
        str(sum(sample.lost for sample in samples)),
        str(sum(sample.doubled for sample in samples)),
        words or "-",
    ]
    return row, key


if __name__ == "__main__":
    main(measure, __doc__ or "", limit_s=LIMIT_S)
