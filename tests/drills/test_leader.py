"""The leading scheduler is killed, frozen or cut off while jobs are parked: a standby leads within 5 s, and each job
runs once. The old one comes back and believes that it leads still, for the moment that it takes to hear otherwise.
"""

from __future__ import annotations

import asyncio
import signal

import pytest

from laneway.cli.stack import Child, LocalStack, StackOptions
from laneway.client import Client, JobState, Lane, RequestFields
from tests.support.nats import eventually
from tests.support.proxy import proxied
from tests.support.watching import Watcher, one_more, watching

pytestmark = [pytest.mark.e2e, pytest.mark.drill, pytest.mark.timeout(240)]

TAKEOVER_S_MAX = 5.0
MODEL = {"name": "chat", "engine": "simulated", "slots": 4, "workers": 1, "engine_options": {"pace_s": 0.01}}
OPTIONS = StackOptions(settings={"models": [MODEL], "process": {"drain_s": 3.0}})
BEFORE, MEANWHILE, AFTER = 150, 30, 20
PATIENT: RequestFields = {"model": "chat", "ttft_target_s": 900.0, "deadline_s": 1200.0, "max_tokens": 24}


async def submit(client: Client, count: int, *, gap_s: float = 0.0) -> list[str]:
    job_ids: list[str] = []
    for number in range(count):
        lane = Lane.BATCH if number % 2 else Lane.DEFERRABLE
        request: RequestFields = {**PATIENT, "prompt": f"Story {number}.", "lane": lane}
        submitted = await client.submit(**request)
        job_ids.append(submitted.job_id)
        await asyncio.sleep(gap_s)
    return job_ids


async def each_ran_once(watcher: Watcher, job_ids: list[str]) -> None:
    await eventually(lambda: all(watcher.terminal_writes[job_id] for job_id in job_ids), 120.0)
    assert watcher.claims == watcher.terminal_writes == dict.fromkeys(job_ids, 1)
    assert watcher.ends == {JobState.SUCCEEDED: len(job_ids)}


def says(child: Child, event: str) -> int:
    return child.log.read_text(errors="replace").count(event)


@pytest.mark.parametrize("fault", ["killed", "frozen", "cut off"])
async def test_a_standby_takes_over_within_5_s_and_each_job_runs_once(fault: str) -> None:
    async with LocalStack(OPTIONS) as stack, proxied(stack.addresses.nats) as line:
        first = stack.child("scheduler")
        first.environment["LANEWAY_NATS__URL"] = line.url
        await stack.restart("scheduler")
        async with (
            watching(stack) as watcher,
            one_more(stack, "scheduler") as (second, _),
            Client(stack.addresses.admission) as client,
        ):
            _, term = await watcher.led()
            assert not says(second, "leadership_taken")
            job_ids = await submit(client, BEFORE)
            loop = asyncio.get_running_loop()
            began_s, lost = loop.time(), says(first, "leadership_lost")
            assert watcher.ends.total() < BEFORE / 2, "most are parked"
            match fault:
                case "killed":
                    first.kill()
                case "frozen":
                    first.signal(signal.SIGSTOP)
                case _:
                    line.cut()
            meanwhile = asyncio.ensure_future(submit(client, MEANWHILE, gap_s=0.1))
            led_s, successor = await watcher.led(after=term.epoch)
            planned_s, _ = await watcher.planned(after=term.epoch)
            print(f"{fault}: led after {led_s - began_s:.2f} s, planned after {planned_s - began_s:.2f} s")
            assert led_s - began_s <= TAKEOVER_S_MAX
            assert planned_s - began_s <= TAKEOVER_S_MAX
            job_ids += await meanwhile
            match fault:
                case "killed":
                    await stack.restart("scheduler")
                case "frozen":
                    first.signal(signal.SIGCONT)
                case _:
                    line.heal()
            if fault != "killed":
                await eventually(lambda: says(first, "leadership_lost") > lost, 30.0)
            job_ids += await submit(client, AFTER)
            await each_ran_once(watcher, job_ids)
            assert (await watcher.stored_plan()).epoch == successor.epoch, "nobody put an older plan over it"
            assert [t.epoch for _, t in watcher.terms if t.holder][-1] == successor.epoch, "one takeover, no other"
            assert says(second, "leadership_lost") == 0
