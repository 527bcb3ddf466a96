"""How many jobs a second one admission process accepts, each with a stored record and a stored lane message.

The three ways in for volume: unary Submit by many callers at once, SubmitMany over one call, and messages published to
NATS, which count once their verdict is stored. The jobs are held for an hour, so that no worker takes CPU of the same
two cores. CPU for each job is what every process used, divided by the jobs; it says what a faster or a freer machine
would give, where the rate only says what this one gave with everything on it. The calling side is this process, with
requests that are serialised beforehand.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc.aio
import psutil
from report import Bar, Report, main

from laneway.cli.stack import LocalStack, StackOptions
from laneway.core import subjects
from laneway.core.lanes import Lane
from laneway.runtime.bus import Bus
from laneway.runtime.connecting import SafeClient
from laneway.runtime.requests import listen
from laneway.v1 import admission_pb2, common_pb2, task_pb2

REGION, TENANT = "local", "default"
JOBS = 12_000
ROUNDS = 3
CALLERS = 64  # unary calls at once
ITEMS = 32  # to a message of SubmitMany
PUBLISHED = 1024  # messages published and without a verdict
HELD_S = 3600
PROMPT = list(range(97, 97 + 24))
MODEL = {
    "name": "chat", "engine": "simulated", "slots": 64, "workers": 1, "context_length": 4096, "kv_tokens": 1 << 20,
    "prefill_tokens_per_s": 1e6, "decode_tokens_per_s": 1e6,
}  # fmt: skip


def _spec() -> task_pb2.JobSpec:
    contract = common_pb2.Contract(lane=common_pb2.LANE_BATCH, labels={"run": "bench"})
    contract.not_before.FromSeconds(int(time.time()) + HELD_S)
    contract.deadline.FromSeconds(int(time.time()) + 4 * HELD_S)
    task = task_pb2.GenerateTask(
        tokens=task_pb2.TokenPrompt(ids=PROMPT), sampling=task_pb2.Sampling(max_tokens=64, temperature=0.0)
    )
    return task_pb2.JobSpec(model="chat", generate=task, contract=contract)


@dataclass
class Way:
    """One way in: `send` gets that many jobs accepted and says how many were."""

    name: str
    send: Callable[[int], Awaitable[int]]
    least_per_s: float
    rates: list[float] = field(default_factory=list)
    cpu_s: dict[str, float] = field(default_factory=dict)
    sent: int = 0
    accepted: int = 0


class Processes:
    """CPU seconds by process; this one is the caller."""

    def __init__(self, stack: LocalStack) -> None:
        self._known = {child.name: psutil.Process(child.pid) for child in stack.children if child.alive}
        self._known["caller"] = psutil.Process()

    def cpu_s(self) -> dict[str, float]:
        return {name: sum(process.cpu_times()[:2]) for name, process in self._known.items()}


async def measure(smoke: bool) -> Report:
    jobs, rounds = (600, 1) if smoke else (JOBS, ROUNDS)
    limits = {"tenant_jobs_max": {"batch": 1_000_000}}  # all ways and rounds together leave more than the default
    options = StackOptions(settings={"models": [MODEL], "process": {"log_level": "warning"}, "admission": limits})
    async with (
        LocalStack(options) as stack,
        _bus(stack) as bus,
        _producer(stack) as producer,
        grpc.aio.insecure_channel(stack.addresses.admission) as channel,
    ):
        ways = [
            Way("Submit", _unary(channel), 1500.0),
            Way("SubmitMany", _many(channel), 4000.0),
            Way("NATS ingest", await _ingest(producer), 4000.0),
        ]
        processes = Processes(stack)
        for way in ways:
            await way.send(min(jobs, 500))  # the first of all
        before = await _stored(bus)
        for _, way in itertools.product(range(rounds), ways):
            await _round(way, jobs, processes)
        after = await _stored(bus)
    total = sum(way.sent for way in ways)
    counts = {f"accepted by {way.name}": (way.accepted, way.sent) for way in ways}
    counts |= {what: (after[what] - before[what], total) for what in before}
    figures = {f"{_snake(way.name)}_per_s": max(way.rates) for way in ways}
    for way in ways:
        for name, used_s in way.cpu_s.items():
            figures[f"{_snake(way.name)}_cpu_us_{_snake(name)}"] = 1e6 * used_s / way.sent
    bars = [] if smoke else [_bar(way) for way in ways]
    rows = [[way.name, f"{max(way.rates):,.0f}", f"{min(way.rates):,.0f}", _cpu(way)] for way in ways]
    columns = ["way in", "best round, jobs/s", "worst", "CPU a job, µs"]
    return Report("Accepting jobs that are held", columns, rows, figures, bars, counts)


async def _round(way: Way, jobs: int, processes: Processes) -> None:
    before, began_s = processes.cpu_s(), time.perf_counter()
    way.accepted += await way.send(jobs)
    took_s = time.perf_counter() - began_s
    after = processes.cpu_s()
    way.rates.append(jobs / took_s)
    way.sent += jobs
    for name, used_s in after.items():
        way.cpu_s[name] = way.cpu_s.get(name, 0.0) + used_s - before[name]


def _bar(way: Way) -> Bar:
    return Bar(f"{way.name}, jobs a second", max(way.rates), way.least_per_s, "/s", at_least=True)


def _cpu(way: Way) -> str:
    used = sorted(way.cpu_s.items(), key=lambda each: -each[1])
    return ", ".join(f"{name} {1e6 * used_s / way.sent:.0f}" for name, used_s in used)


def _snake(name: str) -> str:
    return name.lower().replace(" ", "_").replace("-", "_")


# --- the ways in -----------------------------------------------------------------------------------


def _unary(channel: grpc.aio.Channel) -> Callable[[int], Awaitable[int]]:
    submit = channel.unary_unary("/laneway.v1.AdmissionService/Submit")
    request = admission_pb2.SubmitRequest(spec=_spec()).SerializeToString()

    async def send(jobs: int) -> int:
        left, accepted = jobs, 0

        async def caller() -> None:
            nonlocal left, accepted
            while left > 0:
                left -= 1
                await submit(request)
                accepted += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(CALLERS):
                group.create_task(caller())
        return accepted

    return send


def _many(channel: grpc.aio.Channel) -> Callable[[int], Awaitable[int]]:
    submit_many = channel.stream_stream("/laneway.v1.AdmissionService/SubmitMany")
    spec = _spec()
    parts: list[bytes] = []

    async def send(jobs: int) -> int:
        for first in range(len(parts) * ITEMS, jobs, ITEMS):
            refs = range(first, first + ITEMS)
            items = [admission_pb2.SubmitManyItem(client_ref=str(ref), spec=spec) for ref in refs]
            parts.append(admission_pb2.SubmitManyRequest(items=items).SerializeToString())
        whole, rest = divmod(jobs, ITEMS)
        call = submit_many()

        async def write() -> None:
            for part in parts[:whole]:
                await call.write(part)
            if rest:
                last = admission_pb2.SubmitManyRequest.FromString(parts[whole])
                await call.write(admission_pb2.SubmitManyRequest(items=last.items[:rest]).SerializeToString())
            await call.done_writing()

        writing = asyncio.ensure_future(write())
        accepted = 0
        async for data in call:
            outcomes = admission_pb2.SubmitManyResponse.FromString(data).outcomes
            accepted += sum(outcome.HasField("accepted") for outcome in outcomes)
        await writing
        return accepted

    return send


async def _ingest(producer: SafeClient) -> Callable[[int], Awaitable[int]]:
    subject = subjects.ingest(REGION, Lane.BATCH, TENANT)
    body = admission_pb2.SubmitRequest(spec=_spec()).SerializeToString()
    verdicts = 0
    heard = asyncio.Event()

    def count(_: object) -> None:
        nonlocal verdicts
        verdicts += 1
        heard.set()

    await listen(producer, subjects.verdict(REGION, TENANT, "*"), count)

    async def send(jobs: int) -> int:
        before, published = verdicts, 0
        while verdicts - before < jobs:
            while published < jobs and published - (verdicts - before) < PUBLISHED:
                producer.post(subject, body)
                published += 1
            heard.clear()
            await heard.wait()
        return verdicts - before

    return send


# --- what is stored --------------------------------------------------------------------------------


@asynccontextmanager
async def _bus(stack: LocalStack) -> AsyncIterator[Bus]:
    bus = await Bus.connect(stack.nats_settings("operator"), name="operator")
    try:
        yield bus
    finally:
        await bus.close()


@asynccontextmanager
async def _producer(stack: LocalStack) -> AsyncIterator[SafeClient]:
    """Without a credential: a producer of the tenant that callers without tokens are."""
    client = SafeClient()
    await client.connect(stack.addresses.nats)
    try:
        yield client
    finally:
        await client.close()


async def _stored(bus: Bus) -> dict[str, int]:
    """Records, and messages of the lane: each accepted job has one of both."""
    streams = {"records": subjects.jobs_stream(REGION), "lane messages": subjects.lane_stream(REGION, Lane.BATCH)}
    infos = {what: await bus.api(f"STREAM.INFO.{name}", {}) for what, name in streams.items()}
    return {what: int(info["state"]["messages"]) for what, info in infos.items()}


if __name__ == "__main__":
    main(measure, __doc__ or "")
