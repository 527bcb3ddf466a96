"""What a hundred thousand and a million parked jobs cost: to park, list, release and cancel, and to start again with.

Jobs are put into NATS as admission writes them (a record, then the schedule message), pipelined by this process while
no scheduler runs; all belong to one tenant, which is the hardest case for a list. Then a new scheduler starts, and the
time counts from starting its process until a plan of its own shows every job. Pages are listed and jobs cancelled
through gRPC, by a real admission process. Releases are what the scheduler does when a worker with many free places
appears: a lease of this process, which runs nothing. Priority messages are published one by one into the server with
the parked jobs and into an empty one beside it, in turns, so that both meet the same noise.

CPU seconds stand beside wall times: on a machine that others use too, they are what compares.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

import grpc.aio
import psutil
from msgspec.structs import replace
from nats.aio.msg import Msg
from report import Bar, Report, main, percentile

from laneway.cli.child import Child
from laneway.core import subjects
from laneway.core.catalogue import Catalogue
from laneway.core.fleet import Plan, WorkerLease, WorkerState
from laneway.core.ids import new_job_id
from laneway.core.job import Contract, GenerateTask, JobRecord, LaneJob, Sampling, Timings, Verdict
from laneway.core.lanes import PARKING_LANES, Lane, VerdictKind
from laneway.runtime.bus import Bus
from laneway.runtime.catalogue import catalogue_of
from laneway.runtime.clock import SystemClock
from laneway.runtime.lanes import LaneStore
from laneway.runtime.leases import LeaseKeeper
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.plans import PlanView
from laneway.runtime.provision import provision
from laneway.runtime.puller import LanePuller
from laneway.runtime.reading import subject_pages
from laneway.runtime.records import RecordStore
from laneway.runtime.settings import NatsSettings, load_settings
from laneway.v1 import admission_pb2, admission_pb2_grpc

if TYPE_CHECKING:
    from laneway.v1.admission_pb2_grpc import AdmissionServiceAsyncStub as Stub

SIZES = (100_000, 1_000_000)
REBUILD_S_MAX = {100_000: 5.0, 1_000_000: 30.0}
MEMORY_MIB_MAX = 1024.0
PUBLISH_RATIO_MAX = 1.5
REGION, POOL, TENANT = "local", "chat-small", "default"
STORAGE_BYTES, RECORDS_BYTES = 32 << 30, 8 << 30
IN_FLIGHT = 2_000  # messages published and not yet acknowledged
DUE_TIMES = 1_000
FIRST_DUE_S, DUE_GAP_S = 6 * 3600.0, 60.0
PAGES, PAGE_SIZE = 5, 1000
CANCELS, CALLERS = 2_000, 32
RELEASES, PLACES = 5_000, 512
ROUNDS, PUBLISHES = 10, 200
PUBLISH_GAP_S = 0.002  # what comes faster is written together with what follows (SafeClient.post)
WAIT_S = 240.0
MODEL = {
    "name": "chat", "pool": POOL, "engine": "simulated", "slots": 8, "workers": 1, "queue_length": 1_000_000,
    "context_length": 4096, "kv_tokens": 4096,
}  # fmt: skip


# --- jobs as they are stored -----------------------------------------------------------------------


@dataclass(frozen=True)
class Message:
    subject: str
    payload: bytes
    headers: Mapping[str, str]


class Recorder:
    """Takes what a store would publish."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    async def store(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None, *, patient: bool = False
    ) -> int:
        self.messages.append(Message(subject, payload, headers or {}))
        return 1


NAME = "X" * len(new_job_id(REGION, 0.0, bytes(10)))  # stands for the job's in a pattern


async def patterns(lane: Lane) -> list[list[Message]]:
    """For each latest start, the messages of a job of NAME."""
    out: list[list[Message]] = []
    now_s = time.time()
    for number in range(DUE_TIMES):
        recorder = Recorder()
        bus = cast("Bus", recorder)  # only stores
        due_s = round(now_s + FIRST_DUE_S + number * DUE_GAP_S, 3)
        contract = Contract(lane=lane, ttft_target_s=600.0, tpot_target_s=1.0, deadline_s=round(due_s + 600.0, 3))
        record = JobRecord(
            job_id=NAME, tenant=TENANT, region=REGION, model="chat", tier="small", pool=POOL, contract=contract,
            verdict=Verdict(VerdictKind.HELD, "HELD", "", lane, tier="small", region=REGION, pool=POOL),
            prompt_tokens=64, max_tokens=64, latest_start_s=due_s, device_ms=100 + number, door="door-0123456789ab",
            publish_by_s=round(now_s + 10.0, 3), timings=Timings(created_s=round(now_s, 3)),
        )  # fmt: skip
        job = LaneJob(record, GenerateTask(tuple(range(97, 97 + 64)), Sampling(max_tokens=64)))
        await RecordStore(bus).create(record)
        if lane.may_park:
            await LaneStore(bus, REGION).park(job, 1, fire_at_s=due_s, group=f"group{number % 50:05}")
        else:
            await LaneStore(bus, REGION).put_ready(job, 1)
        out.append(recorder.messages)
    return out


def named(message: Message, job_id: str) -> Message:
    headers = {name: value.replace(NAME, job_id) for name, value in message.headers.items()}
    return Message(
        message.subject.replace(NAME, job_id), message.payload.replace(NAME.encode(), job_id.encode()), headers
    )


async def park(bus: Bus, made: Mapping[Lane, list[list[Message]]], count: int) -> list[str]:
    """Stores that many parked jobs, and returns their ids."""
    acknowledged, refused = 0, list[bytes]()
    moved = asyncio.Event()

    def on_ack(msg: Msg) -> None:
        nonlocal acknowledged
        acknowledged += 1
        if b'"error"' in msg.data:
            refused.append(msg.data)
        moved.set()

    inbox = bus.nc.new_inbox()
    subscription = await bus.listen(inbox, on_ack)
    jobs: list[str] = []
    sent = 0
    for number in range(count):
        job_id = new_job_id(REGION, time.time(), secrets.token_bytes(10))
        jobs.append(job_id)
        lane = Lane.BATCH if number % 4 else Lane.DEFERRABLE
        for message in made[lane][number % DUE_TIMES]:
            own = named(message, job_id)
            bus.nc.post(own.subject, own.payload, inbox, own.headers)
            sent += 1
        while sent - acknowledged > IN_FLIGHT:
            moved.clear()
            await moved.wait()
    while acknowledged < sent:
        moved.clear()
        await moved.wait()
    await bus.unsubscribe(subscription)
    if refused:
        raise RuntimeError(f"{len(refused)} messages were refused: {refused[0].decode()}")
    return jobs


# --- processes -------------------------------------------------------------------------------------


@dataclass
class Ground:
    """One server with its region, and the processes on it."""

    nats: LocalNats
    bus: Bus
    folder: Path
    children: dict[str, Child] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)

    async def start(self, name: str) -> None:
        ready = self.folder / f"{name}.json"
        models = "[" + ", ".join(_toml_table(model) for model in (MODEL,)) + "]"
        config = self.folder / "laneway.toml"
        config.write_text(f"models = {models}\n[nats]\nrecords_bytes_max = {RECORDS_BYTES}\n", encoding="utf-8")
        own = {
            "LANEWAY_CONFIG": str(config),
            "LANEWAY_NATS__URL": self.nats.url,
            "LANEWAY_PROCESS__READY_FILE": str(ready),
            f"LANEWAY_{name.upper()}__LISTEN": "127.0.0.1:0",
        }
        child = self.children[name] = Child(
            name,
            [sys.executable, "-m", "laneway.cli", name],
            environment={**os.environ, **own},
            log=self.folder / f"{name}.log",
            ready_file=ready,
        )
        await child.start()
        self.addresses[name] = (await child.ready(60.0)).address

    def process(self, name: str) -> psutil.Process:
        return psutil.Process(self.nats.process_id if name == "nats" else self.children[name].pid)

    def cpu_s(self, name: str) -> float:
        return float(sum(self.process(name).cpu_times()[:2]))

    def memory_mib(self, name: str) -> float:
        return float(self.process(name).memory_info().rss) / (1 << 20)

    async def close(self) -> None:
        for child in self.children.values():
            await child.stop(15.0)
            child.kill_group()


def _toml_table(values: Mapping[str, object]) -> str:
    return "{" + ", ".join(f"{k} = {v if isinstance(v, int) else repr(str(v))}" for k, v in values.items()) + "}"


@asynccontextmanager
async def ground(catalogue: Catalogue) -> AsyncIterator[Ground]:
    with tempfile.TemporaryDirectory(prefix="laneway-lanes-") as folder:
        async with LocalNats(Path(folder) / "store", storage_bytes=STORAGE_BYTES) as nats:
            settings = NatsSettings(url=nats.url, records_bytes_max=RECORDS_BYTES)
            bus = await Bus.connect(settings, name="bench")
            found = Ground(nats, bus, Path(folder))
            try:
                await provision(bus, REGION, catalogue, settings, ack_wait_s=settings.ack_wait_s)
                yield found
            finally:
                await found.close()
                await bus.close()


# --- what is measured ------------------------------------------------------------------------------


@dataclass
class Findings:
    figures: dict[str, float] = field(default_factory=dict)
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)


async def measured(base: Ground, names: tuple[str, ...], act: Callable[[], Awaitable[None]]) -> tuple[float, float]:
    """Wall and CPU seconds; CPU of some processes."""
    cpu_s = sum(base.cpu_s(name) for name in names)
    began_s = time.perf_counter()
    await act()
    return time.perf_counter() - began_s, sum(base.cpu_s(name) for name in names) - cpu_s


async def until(done: Callable[[], Awaitable[bool]], pause_s: float = 0.02) -> None:
    async with asyncio.timeout(WAIT_S):
        while not await done():  # noqa: ASYNC110 - what is waited for is in other processes
            await asyncio.sleep(pause_s)


def parked_of(plan: Plan | None) -> int:
    return sum(lane.parked for pool in plan.pools for lane in pool.lanes) if plan else -1


async def rebuild(base: Ground, size: int, out: Findings) -> None:
    """From nothing to a plan that knows every job, and until the records are read as well."""
    plans = PlanView(base.bus, REGION, SystemClock())
    await plans.start()

    async def complete() -> bool:
        return parked_of(plans.plan) == size

    began_s = time.perf_counter()
    nats_cpu_s = base.cpu_s("nats")
    await base.start("scheduler")
    await until(complete)
    out.figures["rebuild_s"] = time.perf_counter() - began_s
    out.figures["rebuild_scheduler_cpu_s"] = base.cpu_s("scheduler")
    out.figures["rebuild_nats_cpu_s"] = base.cpu_s("nats") - nats_cpu_s

    async def followed() -> bool:
        """Whether the heads of all records have been delivered."""
        answer = await base.bus.api(f"CONSUMER.LIST.{subjects.jobs_stream(REGION)}", {"offset": 0})
        return any(each["delivered"]["consumer_seq"] >= size for each in answer["consumers"])

    await until(followed)
    out.figures["records_known_s"] = time.perf_counter() - began_s
    out.figures["records_known_scheduler_cpu_s"] = base.cpu_s("scheduler")
    out.counts["jobs in the new scheduler's plan"] = (parked_of(plans.plan), size)
    await plans.close()


async def lists(base: Ground, stub: Stub, size: int, out: Findings) -> None:
    names = 0
    stream = subjects.lane_stream(REGION, Lane.BATCH)

    async def names_of_lane() -> None:
        nonlocal names
        async for page in subject_pages(base.bus, stream, subjects.park_filter(REGION, Lane.BATCH)):
            names += len(page)

    wall_s, cpu_s = await measured(base, ("nats",), names_of_lane)
    out.figures["names_per_s"] = names / wall_s
    out.figures["names_nats_cpu_us"] = 1e6 * cpu_s / names
    seen: set[str] = set()
    pages_s: list[float] = []
    size_of_page = min(PAGE_SIZE, max(1, size // (2 * PAGES)))

    async def pages() -> None:
        token = ""
        for _ in range(PAGES):
            began_s = time.perf_counter()
            page = await stub.ListJobs(admission_pb2.ListJobsRequest(page_size=size_of_page, page_token=token))
            pages_s.append(time.perf_counter() - began_s)
            token = page.next_page_token
            seen.update(job.job_id for job in page.jobs)

    wall_s, cpu_s = await measured(base, ("nats", "admission"), pages)
    out.counts["different jobs listed"] = (len(seen), PAGES * size_of_page)
    out.figures["listed_per_s"] = len(seen) / wall_s
    out.figures["listed_cpu_us"] = 1e6 * cpu_s / len(seen)
    out.figures["list_page_p50_ms"] = 1000 * percentile(pages_s, 50)


async def cancels(base: Ground, stub: Stub, jobs: list[str], out: Findings) -> None:
    left = iter(jobs)
    ended = 0

    async def caller() -> None:
        nonlocal ended
        for job_id in left:
            answer = await stub.CancelJob(admission_pb2.CancelJobRequest(job_id=job_id))
            ended += answer.HasField("ended_at")

    async def all_callers() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(CALLERS):
                group.create_task(caller())

    wall_s, cpu_s = await measured(base, ("nats", "admission", "scheduler"), all_callers)
    out.counts["jobs cancelled"] = (ended, len(jobs))
    out.figures["cancelled_per_s"] = len(jobs) / wall_s
    out.figures["cancelled_cpu_us"] = 1e6 * cpu_s / len(jobs)


async def publishes(full: Ground, empty: Ground, rounds: int, out: Findings) -> None:
    """Priority messages, one by one, into both servers in turns."""
    ready = (await patterns(Lane.PRIORITY))[0][-1]
    took_s: dict[str, list[float]] = {"full": [], "empty": []}
    for _, (name, base) in itertools.product(range(rounds), (("full", full), ("empty", empty))):
        for _ in range(PUBLISHES):
            message = named(ready, new_job_id(REGION, time.time(), secrets.token_bytes(10)))
            began_s = time.perf_counter()
            await base.bus.store(message.subject, message.payload, message.headers)
            took_s[name].append(time.perf_counter() - began_s)
            await asyncio.sleep(PUBLISH_GAP_S)
        await base.bus.api(f"STREAM.PURGE.{subjects.lane_stream(REGION, Lane.PRIORITY)}", {})
    for name, values in took_s.items():
        for q in (50, 99):
            out.figures[f"publish_{name}_p{q}_ms"] = 1000 * percentile(values, q)
    out.figures["publish_p99_ratio"] = out.figures["publish_full_p99_ms"] / out.figures["publish_empty_p99_ms"]


async def releases(base: Ground, count: int, out: Findings) -> None:
    """A worker with many free places pulls what is released and is done at once, until it has had that many."""
    lease = WorkerLease("bench-1a", "bench", POOL, "simulated", WorkerState.READY, slots=PLACES, kv_tokens=1 << 30)
    keeper = LeaseKeeper(base.bus, REGION, lambda: lease, SystemClock())
    had: set[str] = set()

    async def pulling(lane: Lane) -> None:
        async with LanePuller(base.bus, REGION, lane, POOL) as puller:
            while len(had) < count:
                for delivery in await puller.pull(PLACES, wait_s=0.1):
                    had.add(delivery.subject)
                    await delivery.ack()

    async def give() -> None:
        await keeper.renew()
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
            for lane in PARKING_LANES:
                group.create_task(pulling(lane))

    keeping = asyncio.ensure_future(keeper.run())
    try:
        wall_s, cpu_s = await measured(base, ("nats", "scheduler"), give)
    finally:
        lease = replace(lease, state=WorkerState.DRAINING)
        await keeper.renew()
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
    out.figures["released_per_s"] = len(had) / wall_s
    out.figures["released_cpu_us"] = 1e6 * cpu_s / len(had)


async def at(size: int, catalogue: Catalogue, *, smoke: bool) -> Findings:
    out = Findings()
    cancel, release = min(CANCELS, size // 10), min(RELEASES, size // 10)
    async with AsyncExitStack() as stack:
        base = await stack.enter_async_context(ground(catalogue))
        empty = await stack.enter_async_context(ground(catalogue))
        await base.start("admission")
        jobs: list[str] = []
        made = {lane: await patterns(lane) for lane in PARKING_LANES}

        async def parking() -> None:
            jobs.extend(await park(base.bus, made, size))

        wall_s, cpu_s = await measured(base, ("nats",), parking)
        out.figures["parked_per_s"] = size / wall_s
        out.figures["parked_nats_cpu_us"] = 1e6 * cpu_s / size
        await rebuild(base, size, out)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(base.addresses["admission"]))
        stub: Stub = admission_pb2_grpc.AdmissionServiceStub(channel)
        await lists(base, stub, size, out)
        await publishes(base, empty, 1 if smoke else ROUNDS, out)
        await cancels(base, stub, jobs[:: size // cancel][:cancel], out)
        await releases(base, release, out)
        for name in ("scheduler", "admission", "nats"):
            out.figures[f"{name}_mib"] = base.memory_mib(name)
    return out


async def measure(smoke: bool) -> Report:
    settings = load_settings(flags={"models": [MODEL]}, environ={})
    catalogue = catalogue_of(settings)
    sizes = (2_000,) if smoke else tuple(int(n) for n in os.environ.get("LANES_SIZES", "").split()) or SIZES
    figures: dict[str, float] = {}
    counts: dict[str, tuple[int, int]] = {}
    bars: list[Bar] = []
    found: dict[int, Findings] = {}
    for size in sizes:
        out = found[size] = await at(size, catalogue, smoke=smoke)
        figures |= {f"{name}_{size}": value for name, value in out.figures.items()}
        counts |= {f"{name}, {size} parked": count for name, count in out.counts.items()}
        bars.append(
            Bar(f"publish p99 against an empty lane's, {size} parked", out.figures["publish_p99_ratio"],
                PUBLISH_RATIO_MAX, "times")
        )  # fmt: skip
        if size in REBUILD_S_MAX:
            bars.append(Bar(f"index rebuilt, {size} parked", out.figures["rebuild_s"], REBUILD_S_MAX[size], "s"))
        bars += [
            Bar(f"{name} memory, {size} parked", out.figures[f"{name}_mib"], MEMORY_MIB_MAX, "MiB")
            for name in ("scheduler", "admission")
        ]
    rows = [[name, *(f"{found[size].figures[name]:,.2f}" for size in sizes)] for name in found[sizes[0]].figures]
    return Report("Parked jobs", ["", *(f"{size:,} parked" for size in sizes)], rows, figures, bars, counts)


if __name__ == "__main__":
    main(measure, __doc__ or "")
