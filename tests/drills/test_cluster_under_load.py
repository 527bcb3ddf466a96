"""Three NATS servers with three replicas, under load: the leaders of streams are killed, one server is cut off for
longer than an election takes, one stands still for most of each moment as with a slow disk. Services live through it.

A caller who does not repeat anything is told in bounded time that the region is UNAVAILABLE and when to come again, or
that the outcome is unknown, with the job's id.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import pytest

from laneway.cli.stack import StackOptions
from laneway.client import Client, LanewayError, RequestFields, RetryParams, SchedulerClient
from laneway.core import subjects
from laneway.core.errors import Code
from laneway.core.lanes import Lane
from laneway.runtime.bus import Bus
from tests.support.drill_count import all_records, ends_of, judge, nothing_is_live, stalls, verdicts
from tests.support.drill_faults import slow_down
from tests.support.drill_load import Callers, drawn, workers_seen
from tests.support.drill_stack import CLUSTER_SIZE, DrillStack
from tests.support.nats import REGION, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.drill, pytest.mark.timeout(400)]

SEED = 5
JOBS, WORKERS, SPAN_S = 500, 6, 62.0
ANSWER_S_MAX = 16.0  # publish_s_max, and what reading the outcome takes
ELECTION_S = 9.0  # at most: a new leader of a stream is chosen within 4 to 9 s
MODEL = {
    "name": "chat",
    "engine": "simulated",
    "slots": 4,
    "workers": WORKERS,
    "queue_length": 1000,
    "engine_options": {"pace_s": 0.04},
}

SMALL: RequestFields = {"model": "chat", "token_ids": [97, 98], "max_tokens": 2, "ttft_target_s": 30.0}


@dataclass
class Prober:
    """Small requests one after the other, none repeated: what each is told, and after how long."""

    address: str
    told: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    gap_s: float = 0.0  # longest time from one success to the next
    slowest_s: float = 0.0

    async def run(self) -> None:
        last_s = time.monotonic()
        async with Client(self.address, retry_budget=RetryParams.never()) as client:
            while True:
                began_s = time.monotonic()
                try:
                    async with client.generate(idempotency_key="", **SMALL) as stream:
                        await stream.text()
                    self.told["ok"] += 1
                    self.gap_s, last_s = max(self.gap_s, time.monotonic() - last_s), time.monotonic()
                except LanewayError as error:
                    self.told[error.reason] += 1
                    self._look_at(error)
                took_s = time.monotonic() - began_s
                self.slowest_s = max(self.slowest_s, took_s)
                await asyncio.sleep(0.2)

    def _look_at(self, error: LanewayError) -> None:
        bounded = error.reason == "OUTCOME_UNKNOWN" and error.job_id
        refused = error.row.code in (Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED) and error.retry_after_s is not None
        if not (bounded or refused):
            self.wrong.append(f"{error.row.code.name} {error.reason}: {error.message}")


async def test_leaders_die_and_servers_are_cut_off_and_nothing_is_lost() -> None:
    print(f"seed {SEED}")
    settings = {"models": [MODEL], "process": {"drain_s": 3.0}, "nats": {"replicas": 3}}
    waits = {"priority": 3.0, "deferrable": 3.0, "batch": 3.0}
    asked = drawn(SEED, JOBS, SPAN_S)
    async with AsyncExitStack() as exits:
        options = StackOptions(settings=settings, ack_wait_s=waits)
        stack = await exits.enter_async_context(DrillStack(options, doors=2, schedulers=2, servers=CLUSTER_SIZE))
        bus = await exits.enter_async_context(stack.observed())
        async with SchedulerClient(stack.addresses.scheduler) as scheduler:
            await workers_seen(scheduler, WORKERS)
        ends = await exits.enter_async_context(ends_of(bus))
        callers = Callers(stack.doors, lambda: bus, asked)
        exits.push_async_callback(callers.close)
        prober = Prober(stack.doors[1])
        probing = asyncio.ensure_future(prober.run())
        exits.callback(probing.cancel)
        services = [child for child in stack.children if child not in stack.servers]
        began = {child.name: child.pid for child in services}
        async with asyncio.TaskGroup() as group:
            group.create_task(callers.run())
            for fault in (_leader_of_records_dies, _leader_of_consumer_dies, _one_is_cut_off, _one_is_slow):
                await asyncio.sleep(2.0)
                await _measured(fault, stack, bus, prober)
        await asyncio.sleep(2.0)
        probing.cancel()
        await nothing_is_live(stack, bus)
        records = await all_records(bus)
        known = {each.job_id for each in asked}
        theirs = {job_id: record for job_id, record in records.items() if job_id in known}
        verdict = judge(asked, theirs, ends, await verdicts(bus))
        print(verdict)
        print(f"a caller who repeats nothing was told {dict(prober.told)}, after {prober.slowest_s:.1f} s at most")
        print(f"stalls of streams: {stalls(asked)}")
        assert not verdict.wrong, "\n".join(verdict.wrong[:40])
        assert not prober.wrong, prober.wrong[:10]
        assert prober.slowest_s <= ANSWER_S_MAX
        assert {child.name: child.pid for child in services} == began
        assert all(child.alive for child in services), "none of the services had to be started again"


Fault = Callable[[DrillStack, Bus], Awaitable[None]]


async def _measured(fault: Fault, stack: DrillStack, bus: Bus, prober: Prober) -> None:
    prober.gap_s = 0.0
    await fault(stack, bus)
    served = prober.told["ok"]
    await eventually(lambda: prober.told["ok"] >= served + 10, 60.0)
    print(f"{fault.__name__.strip('_')}: {prober.gap_s:.1f} s without a success")


async def _leader_of_records_dies(stack: DrillStack, bus: Bus) -> None:
    leader = await stack.leader_of(bus, subjects.jobs_stream(REGION))
    leader.kill()
    await leader.wait()
    await asyncio.sleep(ELECTION_S)
    await stack.restart(leader.name)


async def _leader_of_consumer_dies(stack: DrillStack, bus: Bus) -> None:
    """The one that hands out priority jobs."""
    stream = subjects.lane_stream(REGION, Lane.PRIORITY)
    consumer = subjects.consumer(Lane.PRIORITY, "chat-small")
    info = await bus.api(f"CONSUMER.INFO.{stream}.{consumer}", {})
    leader = stack.servers[int(info["cluster"]["leader"].removeprefix("n"))]
    leader.kill()
    await leader.wait()
    await asyncio.sleep(ELECTION_S)
    await stack.restart(leader.name)


async def _one_is_cut_off(stack: DrillStack, bus: Bus) -> None:
    """Frozen for longer than an election: its clients and the others hear nothing of it, and it does not know."""
    leader = await stack.leader_of(bus, subjects.lane_stream(REGION, Lane.PRIORITY))
    leader.signal(signal.SIGSTOP)
    await asyncio.sleep(ELECTION_S + 3.0)
    leader.signal(signal.SIGCONT)


async def _one_is_slow(stack: DrillStack, bus: Bus) -> None:
    await slow_down(await stack.leader_of(bus, subjects.jobs_stream(REGION)), 8.0)
