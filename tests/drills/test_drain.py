"""Each kind of service is told to go while jobs of every kind run: it takes nothing new, gives back what it has not
begun, finishes or hands over the rest within its time and exits 0. Then all are told at once, and one is told twice.

Messages wait 30 s for an acknowledgement here, so whatever is left lying instead of given back is late by that much.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from laneway.cli.child import Child
from laneway.cli.stack import StackOptions
from laneway.client import Client, JobState, Lane, SchedulerClient
from laneway.core.job import JobRecord
from laneway.runtime.bus import Bus
from tests.support.drill_count import Ends, all_records, ends_of, judge, nothing_is_live, verdicts
from tests.support.drill_load import PATIENCE, Asked, Callers, Way, drawn, workers_seen
from tests.support.drill_stack import DrillStack
from tests.support.nats import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.drill, pytest.mark.timeout(240)]

WORKERS, DRAIN_S = 4, 2.0
CLEAN_UP_S = 5.0  # beyond drain_s: to hand back and to close connections
CLAIM_S_MAX = 1.0  # a claim that was under way when the signal came
LYING_S_MAX = 15.0  # half of the time that an abandoned message lies
ACK_WAIT_S = {"priority": 30.0, "deferrable": 30.0, "batch": 30.0}
MODEL = {
    "name": "chat",
    "engine": "simulated",
    "slots": 8,
    "workers": WORKERS,
    "queue_length": 1000,
    "kv_tokens": 512,  # of each worker: less than its slots would need, so some wait there with their claims not begun
    "context_length": 512,
    "max_tokens_default": 64,
    "engine_options": {"pace_s": 0.04},
}
MIX = {Way.ATTACHED: 40, Way.KEPT: 20, Way.DETACHED: 20, Way.PRODUCED: 20}


@dataclass
class Drained:
    """A stack under load, and what is checked of whoever leaves."""

    stack: DrillStack
    bus: Bus
    ends: Ends
    asked: list[Asked]
    left: list[tuple[str, float]]  # incarnations that were told to go, and when (Unix seconds)

    async def leaves(self, child: Child) -> None:
        """Told once: it ends by itself, in time, with 0. Started again, as a supervisor does."""
        if child.ready_file is not None and child.name.startswith("chat-"):
            self.left.append((json.loads(child.ready_file.read_text())["address"], time.time()))
        told_s = time.monotonic()
        child.stopping = True
        child.signal(signal.SIGTERM)
        async with asyncio.timeout(DRAIN_S + CLEAN_UP_S + 10.0):
            status = await child.wait()
        took_s = time.monotonic() - told_s
        print(f"{child.name} left within {took_s:.2f} s")
        assert status == 0, f"{child.name} ended with {status}{child.log_tail()}"
        assert took_s <= DRAIN_S + CLEAN_UP_S, f"{child.name} took {took_s:.1f} s"

    async def all_ended_well(self) -> dict[str, JobRecord]:
        await nothing_is_live(self.stack, self.bus)
        records = await all_records(self.bus)
        verdict = judge(self.asked, records, self.ends, await verdicts(self.bus))
        print(verdict)
        assert not verdict.wrong, "\n".join(verdict.wrong[:40])
        for job_id, record in records.items():
            for incarnation, told_s in self.left:
                late = [a for a in record.lineage if a.owner == incarnation and a.claimed_s > told_s + CLAIM_S_MAX]
                assert not late, f"{incarnation} claimed {job_id} {late[0].claimed_s - told_s:.1f} s after it was told"
            for earlier, later in zip(record.lineage, record.lineage[1:], strict=False):
                lay_s = later.claimed_s - earlier.claimed_s
                assert lay_s < LYING_S_MAX, f"{job_id} lay for {lay_s:.1f} s"
            waited_s = (record.lineage[0].claimed_s - record.timings.created_s) if record.lineage else 0.0
            assert waited_s < LYING_S_MAX, f"{job_id} waited for {waited_s:.1f} s"
        return records


@asynccontextmanager
async def under_load(seed: int, jobs: int, span_s: float) -> AsyncIterator[tuple[Drained, asyncio.Task[None]]]:
    print(f"seed {seed}")
    settings = {"models": [MODEL], "process": {"drain_s": DRAIN_S}}
    options = StackOptions(settings=settings, ack_wait_s=ACK_WAIT_S)
    async with DrillStack(options, doors=2, schedulers=2) as stack, stack.observed() as bus, ends_of(bus) as ends:
        async with SchedulerClient(stack.addresses.scheduler) as scheduler:
            await workers_seen(scheduler, WORKERS)
        asked = drawn(seed, jobs, span_s, MIX, tokens=80)
        callers = Callers(stack.doors, lambda: bus, asked)
        running = asyncio.ensure_future(callers.run())
        try:
            await eventually(lambda: len([each for each in asked if each.told]) >= 10, 30.0)
            yield Drained(stack, bus, ends, asked, []), running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await callers.close()


async def test_each_kind_of_service_leaves_under_load_without_a_trace() -> None:
    async with under_load(seed=11, jobs=220, span_s=30.0) as (drained, running):
        stack = drained.stack
        kinds = ["chat-small-1", "admission", "chat-small-2", "scheduler", "routing", "admission-2", "scheduler-2"]
        for name in kinds:
            await drained.leaves(stack.child(name))
            await stack.restart(name)
            await asyncio.sleep(0.5)
        assert not running.done(), "there was load to the end"
        await running
        records = await drained.all_ended_well()
        assert any(record.attempt > 1 for record in records.values()), "some were handed over"


async def test_all_services_are_told_at_once_and_nothing_is_lost() -> None:
    async with under_load(seed=12, jobs=120, span_s=14.0) as (drained, running):
        everybody = [child for child in drained.stack.children if child not in drained.stack.servers]
        async with asyncio.TaskGroup() as group:
            for child in everybody:
                group.create_task(drained.leaves(child))
        async with asyncio.TaskGroup() as group:
            for child in everybody:
                group.create_task(drained.stack.restart(child.name))
        await running
        await drained.all_ended_well()


async def test_a_second_signal_ends_a_worker_at_once_and_its_jobs_go_on_elsewhere() -> None:
    settings = {"models": [{**MODEL, "workers": 2, "kv_tokens": 8192}], "process": {"drain_s": 60.0}}
    async with (
        DrillStack(StackOptions(settings=settings)) as stack,
        stack.observed() as bus,
        ends_of(bus) as ends,
        Client(stack.addresses.admission, retry_budget=PATIENCE) as client,
    ):
        jobs = [
            (await client.submit(model="chat", token_ids=[97 + n], max_tokens=200, lane=Lane.PRIORITY, ignore_eos=True,
                                 temperature=0.0, ttft_target_s=600.0, deadline_s=900.0)).job_id
            for n in range(8)
        ]  # fmt: skip
        leaving = stack.workers[0]

        async def all_run() -> bool:
            return all([(await client.get_job(job_id)).state is JobState.RUNNING for job_id in jobs])

        await eventually(all_run, 30.0)
        leaving.stopping = True
        leaving.signal(signal.SIGTERM)
        await eventually(lambda: "worker_draining" in leaving.log.read_text(), 10.0)
        told_s = time.monotonic()
        leaving.signal(signal.SIGTERM)
        assert await asyncio.wait_for(leaving.wait(), 10.0) == 128 + signal.SIGTERM
        assert time.monotonic() - told_s < 2.0
        done = [await client.wait(job_id, timeout_s=90.0) for job_id in jobs]
        assert {job.state for job in done} == {JobState.SUCCEEDED}
        assert {job.attempt for job in done} == {1, 2}, "those of the worker that left began again elsewhere"
        assert not ends.twice
