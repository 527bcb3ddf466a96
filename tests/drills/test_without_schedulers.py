"""The lanes outlive their brain: 2,000 jobs due at one moment are parked, then every scheduler is killed for good.

NATS fires each job at the time that admission and the scheduler gave it, spread so that the workers can do them all in
time, and not at one instant. Nobody is there to release, re-order or sweep.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta

import pytest

from laneway.cli.stack import StackOptions
from laneway.client import Client, JobState, Lane, ManyItem, RequestFields
from laneway.core import subjects
from tests.support.drill_count import all_records, ends_of
from tests.support.drill_load import answer_of
from tests.support.drill_stack import DrillStack
from tests.support.nats import REGION, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.drill, pytest.mark.timeout(240)]

JOBS, TOKENS = 2000, 8
HELD_S, DUE_S = 8.0, 45.0  # from the first submission: nothing starts before, everything is due then
SHARE_IN_TIME = 0.99
# The workers begin some 150 such jobs a second, and a third of that is enough: a worker begins one job of the lower
# lanes at a time, whatever places it has (policy.lower_lane_prefills_max).
MODEL = {
    "name": "chat",
    "engine": "simulated",
    "slots": 8,
    "workers": 6,
    "queue_length": 100,
    "decode_tokens_per_s": 50.0,
    "engine_options": {"pace_s": 0.02},
}


async def test_jobs_due_together_end_in_time_though_every_scheduler_is_dead() -> None:
    options = StackOptions(settings={"models": [MODEL], "process": {"drain_s": 3.0}})
    async with AsyncExitStack() as exits:
        stack = await exits.enter_async_context(DrillStack(options, schedulers=2))
        bus = await exits.enter_async_context(stack.observed())
        ends = await exits.enter_async_context(ends_of(bus))
        client = await exits.enter_async_context(Client(stack.addresses.admission))
        now = datetime.now(UTC)
        due = now + timedelta(seconds=DUE_S)

        def request(number: int) -> RequestFields:
            return {
                "model": "chat",
                "token_ids": prompt(number),
                "max_tokens": TOKENS,
                "ignore_eos": True,
                "temperature": 0.0,
                "lane": Lane.BATCH if number % 2 else Lane.DEFERRABLE,
                "not_before_at": now + timedelta(seconds=HELD_S),
                "deadline_at": due,
            }

        outcomes = client.submit_many(ManyItem(request(number), ref=str(number)) for number in range(JOBS))
        accepted: dict[str, int] = {}
        async with contextlib.aclosing(outcomes):
            async for outcome in outcomes:
                assert outcome.submitted is not None, outcome.error
                accepted[outcome.submitted.job_id] = int(outcome.ref)
        assert len(accepted) == JOBS
        parked_s = (datetime.now(UTC) - now).total_seconds()
        assert parked_s < HELD_S, "all were parked before the first could start"
        for scheduler in stack.of("scheduler"):
            scheduler.kill()
            await scheduler.wait()

        fired = await _fired_over(stack, bus, due)
        await eventually(lambda: len(ends.stored) == JOBS, DUE_S)
        records = await all_records(bus)
        assert set(records) == set(accepted)
        in_time = [
            record
            for record in records.values()
            if record.state is JobState.SUCCEEDED and record.timings.ended_s <= due.timestamp()
        ]
        spans = [record.timings.claimed_s - now.timestamp() for record in in_time]
        print(f"parked in {parked_s:.1f} s; {len(in_time)} of {JOBS} in time; started {min(spans):.0f} to"
              f" {max(spans):.0f} s after the beginning; most ready at once {fired}")  # fmt: skip
        assert len(in_time) >= SHARE_IN_TIME * JOBS
        assert not ends.twice
        for job_id, number in accepted.items():
            result = records[job_id].result
            assert result is None or list(result.token_ids) == answer_of(prompt(number), TOKENS)


async def _fired_over(stack: DrillStack, bus, due: datetime) -> int:
    """Waits until nothing is parked any more, or the deadline; the most jobs that were ready at once."""
    most = 0
    while time.time() < due.timestamp():
        ready = parked = 0
        for lane in (Lane.DEFERRABLE, Lane.BATCH):
            stream = subjects.lane_stream(REGION, lane)
            for wanted in (f"lane.{REGION}.>", f"park.{REGION}.>"):
                info = await bus.api(f"STREAM.INFO.{stream}", {"subjects_filter": wanted})
                count = len(info["state"].get("subjects") or {})
                ready, parked = (ready + count, parked) if wanted.startswith("lane") else (ready, parked + count)
        most = max(most, ready)
        if not parked:
            break
        await asyncio.sleep(0.5)
    return most


def prompt(number: int) -> list[int]:
    return list(f"row {number:05d}".encode())
