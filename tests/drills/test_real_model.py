"""The small real model in exact mode: a worker is killed, frozen, told to go, loses its engine, while callers listen.

The text is that of the undisturbed run, word for word, at every caller and in every record.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable

import pytest

from laneway.cli.child import Child
from laneway.cli.stack import StackOptions
from laneway.client import Client, JobState, Lane, OnDisconnect, RequestFields, SchedulerClient
from tests.support.drill_count import ends_of, nothing_is_live
from tests.support.drill_faults import LEASE_S, kill_engine
from tests.support.drill_load import PATIENCE, workers_seen
from tests.support.drill_stack import DrillStack
from tests.support.nats import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.drill, pytest.mark.model, pytest.mark.timeout(300)]

TOKENS, STREAMS, WORKERS = 48, 4, 2
MODEL = {"name": "chat", "exact": True, "slots": 4, "workers": WORKERS}
OPTIONS = StackOptions(
    settings={"models": [MODEL], "process": {"drain_s": 0.3}},
    ack_wait_s={"priority": 3.0, "deferrable": 3.0, "batch": 3.0},
)


def question(number: int, lane: Lane = Lane.PRIORITY, kind: OnDisconnect = OnDisconnect.CANCEL) -> RequestFields:
    return {
        "model": "chat",
        "messages": [{"role": "user", "content": f"Tell me a story about a house with {number} doors."}],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "temperature": 0.0,
        "lane": lane,
        "on_disconnect": kind,
        "ttft_target_s": 600.0,
        "deadline_s": 900.0,
    }


class Listener:
    """One caller; each index comes once and in order."""

    def __init__(self) -> None:
        self.count, self.text, self.attempt = 0, "", 0

    async def listen(self, client: Client, request: RequestFields) -> None:
        async with client.generate(**request) as stream:
            async for chunk in stream:
                assert chunk.first_index == self.count
                self.count += len(chunk.token_ids)
                self.text += chunk.text
        self.attempt = stream.finished.attempt


async def kill(stack: DrillStack, worker: Child) -> None:
    worker.kill()
    await worker.wait()
    await stack.restart(worker.name)


async def freeze(stack: DrillStack, worker: Child) -> None:
    worker.signal(signal.SIGSTOP)
    await asyncio.sleep(2 * LEASE_S)
    worker.signal(signal.SIGCONT)


async def tell_to_go(stack: DrillStack, worker: Child) -> None:
    worker.stopping = True
    worker.signal(signal.SIGTERM)
    assert await asyncio.wait_for(worker.wait(), 30.0) == 0
    await stack.restart(worker.name)


async def lose_its_engine(stack: DrillStack, worker: Child) -> None:
    await kill_engine(worker)


Fault = Callable[[DrillStack, Child], Awaitable[None]]


async def test_the_text_is_that_of_the_undisturbed_run_whatever_happens_to_a_worker() -> None:
    async with (
        DrillStack(OPTIONS) as stack,
        stack.observed() as bus,
        ends_of(bus) as ends,
        Client(stack.addresses.admission, retry_budget=PATIENCE) as client,
        SchedulerClient(stack.addresses.scheduler) as scheduler,
    ):
        await workers_seen(scheduler, WORKERS)
        calm = [Listener() for _ in range(STREAMS)]
        await asyncio.gather(*(one.listen(client, question(n)) for n, one in enumerate(calm)))
        undisturbed = [one.text for one in calm]
        for fault in (kill, freeze, tell_to_go, lose_its_engine):
            await _under(fault, stack, client, undisturbed)
            await workers_seen(scheduler, WORKERS)
        await nothing_is_live(stack, bus)
        assert not ends.twice


async def _under(fault: Fault, stack: DrillStack, client: Client, undisturbed: list[str]) -> None:
    callers = [Listener() for _ in range(STREAMS)]
    kinds = list(OnDisconnect)
    async with asyncio.TaskGroup() as group:
        for n, one in enumerate(callers):
            group.create_task(one.listen(client, question(n, kind=kinds[n % 2])))
        left = [(await client.submit(**question(n, Lane.BATCH))).job_id for n in range(2)]
        await eventually(lambda: all(one.count >= 3 for one in callers), 60.0)
        assert all(one.count < TOKENS for one in callers), "it happens in the middle"
        await fault(stack, stack.workers[0])
    attempts = [one.attempt for one in callers]
    print(f"{fault.__name__}: attempts {attempts}")
    assert max(attempts) > 1, f"{fault.__name__}: nobody was interrupted"
    assert [one.text for one in callers] == undisturbed, fault.__name__
    for n, job_id in enumerate(left):
        job = await client.wait(job_id, timeout_s=120.0)
        assert job.state is JobState.SUCCEEDED, job.error
        assert job.result is not None
        assert job.result.text == undisturbed[n], fault.__name__
