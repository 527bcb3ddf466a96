"""2,000 jobs of every kind, 20 workers, and a plan of faults from one seed: processes are killed and frozen, NATS too.

Nothing is lost, nothing ends twice, every caller hears the tokens of the undisturbed run, each once and in order, and
in the end nobody counts anything that is not there. DRILL_SEED names the seed; without it, it is drawn.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from contextlib import AsyncExitStack

import pytest

from laneway.cli.stack import StackOptions
from laneway.client import SchedulerClient
from tests.support.drill_count import all_records, ends_of, judge, nothing_is_live, stalls, verdicts
from tests.support.drill_faults import Saboteur, plan
from tests.support.drill_load import Callers, drawn, workers_seen
from tests.support.drill_stack import DrillStack

pytestmark = [pytest.mark.e2e, pytest.mark.drill, pytest.mark.timeout(400)]

JOBS, WORKERS = 2000, 20
SPAN_S = 50.0
MODEL = {
    "name": "chat",
    "engine": "simulated",
    "slots": 4,
    "workers": WORKERS,
    "queue_length": 1000,
    "engine_options": {"pace_s": 0.04},
}
OPTIONS = StackOptions(
    settings={"models": [MODEL], "process": {"drain_s": 3.0}},
    ack_wait_s={"priority": 3.0, "deferrable": 3.0, "batch": 3.0},
)


def seed_of_run() -> int:
    given = os.environ.get("DRILL_SEED")
    seed = int(given) if given else random.SystemRandom().randrange(10_000)
    print(f"DRILL_SEED={seed}")
    return seed


async def test_nothing_is_lost_or_said_twice_while_everything_is_killed_and_frozen() -> None:
    seed = seed_of_run()
    asked = drawn(seed, JOBS, SPAN_S)
    async with AsyncExitStack() as exits:
        stack = await exits.enter_async_context(DrillStack(OPTIONS, doors=2, schedulers=2))
        bus = await exits.enter_async_context(stack.observed())
        async with SchedulerClient(stack.addresses.scheduler) as scheduler:
            await workers_seen(scheduler, WORKERS)
        ends = await exits.enter_async_context(ends_of(bus))
        callers = Callers(stack.doors, lambda: bus, asked)
        exits.push_async_callback(callers.close)
        saboteur = Saboteur(stack, plan(seed, SPAN_S))
        began_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            group.create_task(saboteur.run())
            group.create_task(callers.run())
        print(f"all told after {time.monotonic() - began_s:.0f} s; done {dict(saboteur.done)}; left out"
              f" {dict(saboteur.skipped)}")  # fmt: skip
        await nothing_is_live(stack, bus)
        verdict = judge(asked, await all_records(bus), ends, await verdicts(bus))
        print(verdict)
        print(f"stalls of streams: {stalls(asked)}")
        assert not verdict.wrong, "\n".join(verdict.wrong[:40])
        assert set(ends.stored) == {each.job_id for each in asked if each.job_id} | set(ends.stored), "all seen"
        assert sum(saboteur.done.values()) >= 20
        assert max(verdict.attempts) >= 2, "some ran on a worker that died"
