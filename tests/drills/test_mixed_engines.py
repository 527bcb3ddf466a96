"""One pool whose workers have different engines of the same model: OpenVINO in process, a real Triton server, and
llama.cpp's OpenAI-compatible one. Each worker is killed under load, and each server.

Nothing is lost or ends twice, no index comes twice or is left out, and what a caller heard is what is stored. A stream
that was cut goes on where the engine of the worker that takes it up can go on from ids; else it says so.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest

from laneway.cli.child import Child
from laneway.cli.stack import StackOptions
from laneway.client import Client, JobState, Lane, LanewayError, RequestFields, SchedulerClient
from laneway.core.job import JobRecord
from tests.support.drill_count import all_records, ends_of, nothing_is_live
from tests.support.drill_load import PATIENCE, workers_seen
from tests.support.drill_stack import DrillStack
from tests.support.nats import eventually
from tests.support.openai_server import LlamaOptions, LlamaProcess
from tests.support.triton_server import SMOLLM2, TritonServer

pytestmark = [pytest.mark.e2e, pytest.mark.drill, pytest.mark.model, pytest.mark.timeout(400)]

ENGINES = ("openvino", "triton", "openai")
SLOTS, TOKENS, AT_ONCE, DETACHED = 4, 48, 8, 12
NOT_RESUMABLE = "NOT_RESUMABLE"


@dataclass
class Caller:
    """Of a stream; each index comes once and in order."""

    number: int
    job_id: str = ""
    count: int = 0
    text: str = ""
    told: str = ""

    async def listen(self, client: Client) -> None:
        try:
            async with client.generate(**question(self.number, Lane.PRIORITY)) as stream:
                async for chunk in stream:
                    assert chunk.first_index == self.count
                    self.count += len(chunk.token_ids)
                    self.text += chunk.text
            self.job_id, self.told = stream.job_id, stream.finished.state.value
        except LanewayError as error:
            self.job_id, self.told = error.job_id, error.reason


def question(number: int, lane: Lane) -> RequestFields:
    return {
        "model": "chat",
        "prompt": f"Once upon a time there was a house with {number} doors. ",
        "max_tokens": TOKENS,
        "temperature": 0.0,
        "lane": lane,
        "ttft_target_s": 600.0,
        "deadline_s": 900.0,
    }


def options_for(triton: str, openai: str) -> StackOptions:
    model = {
        "name": "chat", "slots": SLOTS, "workers": len(ENGINES), "context_length": 1024, "kv_tokens": 8192,
        "tokenizer": "smollm2", "other_engines": ["triton", "openai"],
    }  # fmt: skip
    own: dict[str, dict[str, object]] = {
        "triton": {"address": triton, "served_model": SMOLLM2, "health_interval_s": 1.0},
        "openai": {"providers": [{"name": "llama", "base_url": openai}], "health_interval_s": 1.0},
    }
    return StackOptions(
        settings={"models": [model], "process": {"drain_s": 0.3}},
        process_settings={
            name_of(engine): {"worker": {"engine": engine, "engine_options": options}}
            for engine, options in own.items()
        },
        ack_wait_s={"priority": 3.0, "deferrable": 3.0, "batch": 3.0},
    )


def name_of(engine: str) -> str:
    return f"chat-small-{ENGINES.index(engine) + 1}"


def engine_of(owner: str) -> str:
    return next(engine for engine in ENGINES if owner.startswith(f"{name_of(engine)}-"))


class Load:
    """AT_ONCE streams in a closed loop, until `stopped`, and jobs that nobody waits for."""

    def __init__(self, client: Client) -> None:
        self.callers: list[Caller] = []
        self.detached: list[str] = []
        self.stopped = False
        self._client = client
        self._numbers = itertools.count(1)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(self._streams())
            group.create_task(self._submit())

    async def _streams(self) -> None:
        while not self.stopped:
            caller = Caller(next(self._numbers))
            self.callers.append(caller)
            await caller.listen(self._client)

    async def _submit(self) -> None:
        for _ in range(DETACHED):
            submitted = await self._client.submit(**question(next(self._numbers), Lane.BATCH))
            self.detached.append(submitted.job_id)
            await asyncio.sleep(1.0)


class Servers:
    """What the engines of two workers are, in processes of their own: killed, and started again where they were."""

    def __init__(self) -> None:
        self.triton = TritonServer([SMOLLM2])
        self.llama = LlamaProcess(LlamaOptions(slots=SLOTS, context_length=1024))
        self.triton.wait_ready()

    def close(self) -> None:
        self.triton.kill()
        self.llama.kill()

    async def kill_triton(self) -> None:
        self.triton.kill()
        self.triton = TritonServer([SMOLLM2], port=int(self.triton.address.rpartition(":")[2]))
        await asyncio.to_thread(self.triton.wait_ready)

    async def kill_llama(self) -> None:
        port = self.llama.port
        self.llama.kill()
        self.llama = LlamaProcess(LlamaOptions(slots=SLOTS, context_length=1024, port=port))


Fault = Callable[[], Awaitable[None]]


async def test_workers_with_three_engines_serve_one_pool_and_any_may_be_killed() -> None:
    async with AsyncExitStack() as exits:
        servers = await asyncio.to_thread(Servers)
        exits.callback(servers.close)
        options = options_for(servers.triton.address, servers.llama.base_url)
        stack = await exits.enter_async_context(DrillStack(options))
        bus = await exits.enter_async_context(stack.observed())
        ends = await exits.enter_async_context(ends_of(bus))
        client = await exits.enter_async_context(Client(stack.addresses.admission, retry_budget=PATIENCE))
        scheduler = await exits.enter_async_context(SchedulerClient(stack.addresses.scheduler))
        await workers_seen(scheduler, len(ENGINES))
        load = Load(client)
        faults: Sequence[tuple[str, Fault]] = (
            *((engine, _kill(stack, stack.workers[n])) for n, engine in enumerate(ENGINES)),
            ("triton", servers.kill_triton),
            ("openai", servers.kill_llama),
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(load.run())
            for engine, fault in faults:
                await _busy(scheduler, engine)
                await fault()
                await workers_seen(scheduler, len(ENGINES))
            load.stopped = True
        await nothing_is_live(stack, bus)
        _judge(load, await all_records(bus))
        assert not ends.twice


def _kill(stack: DrillStack, worker: Child) -> Fault:
    async def kill() -> None:
        worker.kill()
        await worker.wait()
        await asyncio.sleep(1.0)
        await stack.restart(worker.name)

    return kill


async def _busy(scheduler: SchedulerClient, engine: str) -> None:
    """Waits until the worker with this engine has several runs, and has had them for long enough to be heard of."""

    async def busy() -> bool:
        return any([worker.engine == engine and worker.running >= 2 async for worker in scheduler.list_workers()])

    await eventually(busy, 60.0)
    await asyncio.sleep(0.3)


def _judge(load: Load, records: dict[str, JobRecord]) -> None:
    told = Counter(caller.told for caller in load.callers)
    attempts = [attempt for record in records.values() for attempt in record.lineage]
    served = Counter(engine_of(record.lineage[-1].owner) for record in records.values() if record.lineage)
    resumed = Counter(engine_of(attempt.owner) for attempt in attempts if attempt.start_index)
    print(f"callers were told {dict(told)}; ended by {dict(served)}; went on from ids at {dict(resumed)}")
    assert not set(told) - {JobState.SUCCEEDED.value, NOT_RESUMABLE}, told
    assert set(served) == set(ENGINES)
    assert resumed, "some streams went on"
    for caller in load.callers:
        record = records[caller.job_id]
        if caller.told == NOT_RESUMABLE:
            assert record.state is JobState.FAILED
            assert caller.count, "what nobody has heard begins anew"
            continue
        assert record.result is not None
        assert (caller.text, caller.count) == (record.result.text, len(record.result.token_ids))
    assert len(load.detached) == DETACHED
    for job_id in load.detached:
        assert records[job_id].state is JobState.SUCCEEDED, records[job_id].error
