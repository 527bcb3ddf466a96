"""Priority work behind a crowd of batch work, live: the next free slot is its own. Counted in steps of the engine, by a
witness in its process; tests/sim shows the same order under virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from laneway.client import RequestFields
from laneway.runtime.local_nats import LocalNats
from tests.support.nats import eventually
from tests.support.recording_host import Added, Entry, Step
from tests.support.region import LocalRegion, local_region, region_settings

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

SLOTS = 4
BATCH_JOBS = 400
TRIALS = 7
AT_ONCE = 32
# Between a slot's becoming free and the next sequence's arrival lie two exchanges with NATS, a few milliseconds. Steps
# are long against that, and against the pauses of a busy machine.
PACE_S = 0.03
PATIENT: RequestFields = {"model": "chat", "ttft_target_s": 600.0, "deadline_s": 900.0}


async def test_priority_behind_400_batch_jobs_gets_the_next_free_slot_and_its_first_token_two_steps_later(
    tmp_path: Path,
):
    async with LocalNats(tmp_path / "nats") as server:
        settings = region_settings(
            server, options={"pace_s": PACE_S},
            policy={"priority_reserved_slots": 0, "headroom_z": 0.0, "lower_lane_floor": 0.0},
            engine="simulated", slots=SLOTS, workers=1, kv_tokens=65_536,
        )  # fmt: skip
        async with local_region(server, tmp_path, settings) as region:
            await crowd(region)
            trials = [await trial(region, number) for number in range(TRIALS)]
    assert [trial.between for trial in trials] == [0] * TRIALS, "no batch job takes a slot that priority waits for"
    # The step in which the slot became free, the one in progress when the sequence arrives, and its prefill. The middle
    # one of the trials, for a host that stops everything for a moment is no fault of ours.
    steps = sorted(trial.first_token_step - trial.free_step for trial in trials)
    assert steps[TRIALS // 2] <= 2, f"steps from the free slot to the first token: {steps}"


@dataclass(frozen=True)
class Trial:
    free_step: int  # the first step since the job was accepted in which a sequence ended
    first_token_step: int
    between: int  # batch sequences that reached the engine after that step and before the job


async def crowd(region: LocalRegion) -> None:
    """Batch jobs that fill every slot, and hundreds more that wait."""
    room = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        async with room:
            request: RequestFields = {**PATIENT, "prompt": f"Batch {number}", "lane": "batch", "ignore_eos": True}
            request["max_tokens"] = 6 + number % 5
            await region.client.submit(**request)

    async with asyncio.TaskGroup() as group:
        for number in range(BATCH_JOBS):
            group.create_task(one(number))
    await eventually(lambda: region.log.steps()[-1].running == SLOTS)


async def trial(region: LocalRegion, number: int) -> Trial:
    prompt = f"Urgent {number}"
    request: RequestFields = {**PATIENT, "prompt": prompt, "max_tokens": 3, "temperature": 0.0}
    waiting = BATCH_JOBS - len(region.log.added())
    assert waiting > 200, "the crowd still waits"
    await eventually(lambda: region.log.steps()[-1].running == SLOTS)
    async with region.client.generate(**request) as stream:
        accepted_at = len(region.log.entries())
        await stream.text()
    return judged(region.log.entries(), accepted_at, tuple(prompt.encode()))


def judged(entries: list[Entry], accepted_at: int, prompt_ids: tuple[int, ...]) -> Trial:
    ours = next(i for i, entry in enumerate(entries) if isinstance(entry, Added) and entry.prompt_ids == prompt_ids)
    sequence = entries[ours]
    assert isinstance(sequence, Added)
    steps = [(i, entry) for i, entry in enumerate(entries) if isinstance(entry, Step)]
    free_at, free = next((i, step) for i, step in steps if i >= accepted_at and step.finished)
    first = next(step for _, step in steps if step.tokens.get(sequence.id))
    between = sum(isinstance(entry, Added) for entry in entries[free_at:ours])
    return Trial(free.number, first.number, between)
