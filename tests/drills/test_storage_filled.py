"""The queue's storage is full across the time at which parked jobs fire, and is then freed: nothing is left lying.

While it is full, NATS fires nothing and refuses every release and every end; new requests are refused with a time to
come again. Afterwards each job ends once: in time what still can, the rest by its deadline, and no parked message stays
behind. Nothing is restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from laneway.cli.stack import StackOptions
from laneway.client import Client, JobState, Lane, LanewayError, ManyItem, RequestFields, RetryParams, SchedulerClient
from laneway.runtime.bus import Bus, BusError
from laneway.runtime.settings import NatsSettings
from tests.support.drill_count import all_records, ends_of, nothing_is_live
from tests.support.drill_load import answer_of, workers_seen
from tests.support.drill_stack import DrillStack
from tests.support.nats import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.drill, pytest.mark.timeout(240)]

MIB = 1024 * 1024
STORAGE_BYTES = 48 * MIB
STREAM_BYTES = 4 * MIB
JOBS, TOKENS = 60, 8
FULL_S = 14.0
FIRES_S = 7.0  # after the jobs were parked: while it is full
WAITS_S, WAITED_FOR = 60.0, 3.0  # deadline of those that can wait; of those due while it is full, beyond FIRES_S
MODEL = {
    "name": "chat", "engine": "simulated", "slots": 4, "workers": 2, "queue_length": 100,
    "engine_options": {"pace_s": 0.02}, "decode_tokens_per_s": 50.0,
}  # fmt: skip
LIMITS = {name: STREAM_BYTES for name in NatsSettings.__struct_fields__ if name.endswith("_bytes_max")}


def prompt(number: int) -> list[int]:
    return list(f"full {number:04d}".encode())


async def test_nothing_is_stranded_when_storage_was_full_while_jobs_were_due() -> None:
    settings = {"models": [MODEL], "process": {"drain_s": 3.0}, "nats": LIMITS}
    async with (
        DrillStack(StackOptions(settings=settings), schedulers=2, storage_bytes=STORAGE_BYTES) as stack,
        stack.observed() as bus,
        ends_of(bus) as ends,
        Client(stack.addresses.admission) as client,
        SchedulerClient(stack.addresses.scheduler) as scheduler,
    ):
        await workers_seen(scheduler, 2)
        began_s = time.time()
        parked = await _park(client)
        processes = {child.name: child.pid for child in stack.children}
        async with _full(bus):
            told = await _asked_meanwhile(stack, began_s + FULL_S)
            assert not [state for found in ends.stored.values() for state in found.values()], "nothing could end"
        freed_s = time.time()
        print(f"full for {freed_s - began_s:.0f} s; callers were told {dict(told)}")
        assert told["STORAGE_FULL"] >= 1
        assert not set(told) - {"STORAGE_FULL", "STORAGE_UNKNOWN", "OUTCOME_UNKNOWN"}

        await eventually(lambda: len(ends.stored) >= JOBS, 60.0)
        print(f"all ended {time.time() - freed_s:.1f} s after it was freed")
        records = {job_id: record for job_id, record in (await all_records(bus)).items() if job_id in parked}
        assert set(records) == set(parked)
        waiting = [records[job_id] for job_id, number in parked.items() if number % 2]
        due = [records[job_id] for job_id, number in parked.items() if not number % 2]
        assert Counter(record.state for record in waiting) == {JobState.SUCCEEDED: JOBS // 2}
        assert Counter(record.state for record in due) == {JobState.EXPIRED: JOBS // 2}, "what was due meanwhile"
        for job_id, number in parked.items():
            result = records[job_id].result
            assert result is None or list(result.token_ids) == answer_of(prompt(number), TOKENS)
        assert not ends.twice
        await nothing_is_live(stack, bus)
        assert {child.name: child.pid for child in stack.children} == processes
        await eventually(lambda: _accepted(client), 20.0)


async def _park(client: Client) -> dict[str, int]:
    def request(number: int) -> RequestFields:
        waits = number % 2
        return {
            "model": "chat", "token_ids": prompt(number), "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0.0,
            "lane": Lane.BATCH if number % 4 < 2 else Lane.DEFERRABLE, "not_before_s": FIRES_S,
            "deadline_s": WAITS_S if waits else FIRES_S + WAITED_FOR,
        }  # fmt: skip

    outcomes = client.submit_many(ManyItem(request(n), ref=str(n)) for n in range(JOBS))
    parked: dict[str, int] = {}
    async with contextlib.aclosing(outcomes):
        async for outcome in outcomes:
            assert outcome.submitted is not None, outcome.error
            parked[outcome.submitted.job_id] = int(outcome.ref)
    return parked


@asynccontextmanager
async def _full(bus: Bus) -> AsyncIterator[None]:
    """Somebody else's stream takes all that is left, to the last bytes."""
    config = {"name": "FILLER", "subjects": ["filler.>"], "storage": "file", "retention": "limits", "discard": "new"}
    await bus.api("STREAM.CREATE.FILLER", config)
    for size in (MIB // 2, 10_000, 100):
        with contextlib.suppress(BusError):
            for n in range(100_000):
                await bus.store(f"filler.{size}.{n}", bytes(size))
    try:
        yield
    finally:
        await bus.api("STREAM.DELETE.FILLER", {})


async def _asked_meanwhile(stack: DrillStack, until_s: float) -> Counter[str]:
    """Requests that nobody repeats: each is refused with a time to come again."""
    told: Counter[str] = Counter()
    async with Client(stack.addresses.admission, retry_budget=RetryParams.never()) as client:
        while time.time() < until_s:
            try:
                await client.submit(model="chat", token_ids=[97], max_tokens=1, lane=Lane.BATCH, idempotency_key="")
                told["ok"] += 1
            except LanewayError as error:
                known = error.retry_after_s is not None or error.job_id
                told[error.reason if known else f"{error.reason} without a time to come again"] += 1
            await asyncio.sleep(0.5)
    return told


async def _accepted(client: Client) -> bool:
    try:
        await client.submit(model="chat", token_ids=[97], max_tokens=1, lane=Lane.BATCH)
    except LanewayError:
        return False
    return True
