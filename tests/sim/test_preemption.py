"""Batch work that yields to priority: jobs of a minute, and priority jobs that cannot wait for their end."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from laneway.core.lanes import Lane
from laneway.policy.preempt import PreemptParams
from tests.support.yielding_region import ABORT_S, LONG, fill, region_of, waited_s

pytestmark = pytest.mark.looptime


async def test_a_priority_job_with_a_budget_of_2_s_starts_within_it_though_60_s_jobs_hold_all_slots():
    async with region_of(workers=3, slots=4) as region:
        batch = await fill(region)
        urgent = region.submit(Lane.PRIORITY, 50)
        await asyncio.sleep(2.0)
        assert waited_s(urgent) < 0.05 + ABORT_S + 0.02
        assert sum(region.preempted.values()) == 1, "one run yields, whoever heard of the job"
        await asyncio.sleep(80.0)
        assert all(life.ends == 1 and life.made == LONG for life in batch)
        assert (urgent.ends, urgent.made) == (1, 50)


async def test_without_preemption_the_same_job_waits_for_an_end():
    async with region_of(workers=1, slots=4, preempt=PreemptParams(preemptions_max=0)) as region:
        await fill(region)
        urgent = region.submit(Lane.PRIORITY, 50)
        await asyncio.sleep(50.0)
        assert not urgent.starts_s
        assert not region.preempted


async def test_a_worker_with_room_is_first_and_nobody_yields():
    async with region_of(workers=19, slots=2) as region:
        await fill(region)
        region.add_worker()
        await asyncio.sleep(1.0)
        urgent = [region.submit(Lane.PRIORITY, 50) for _ in range(2)]
        await asyncio.sleep(2.0)
        assert max(waited_s(life) for life in urgent) < 0.01
        assert not region.preempted


async def test_each_of_a_burst_of_priority_jobs_lets_one_run_yield():
    async with region_of(workers=2, slots=4) as region:
        await fill(region)
        urgent = [region.submit(Lane.PRIORITY, 500) for _ in range(6)]
        await asyncio.sleep(1.0)
        assert all(life.starts_s for life in urgent)
        assert sum(region.preempted.values()) == 6
        assert max(waited_s(life) for life in urgent) < 0.5


async def test_room_that_the_plan_shows_elsewhere_is_waited_for_but_not_for_long():
    async with region_of(workers=2, slots=2) as region:
        await fill(region)
        region.show_plan(free_slots=1)  # of a moment ago
        urgent = region.submit(Lane.PRIORITY, 50)
        await asyncio.sleep(0.45)
        assert not region.preempted
        await asyncio.sleep(0.55)
        assert sum(region.preempted.values()) == 1
        assert waited_s(urgent) < 0.6


async def test_equal_priorities_never_evict_each_other():
    async with region_of(workers=2, slots=2) as region:
        await fill(region, Lane.PRIORITY)
        more = [region.submit(Lane.PRIORITY, 50) for _ in range(4)]
        await asyncio.sleep(30.0)
        assert not region.preempted
        assert not any(life.starts_s for life in more)
    async with region_of(workers=2, slots=2) as region:
        await fill(region, Lane.BATCH)
        more = [region.submit(lane, 50) for lane in (Lane.BATCH, Lane.DEFERRABLE)]
        await asyncio.sleep(30.0)
        assert not region.preempted


async def test_a_job_yields_twice_and_is_pinned_then():
    async with region_of(workers=1, slots=1) as region:
        (batch,) = await fill(region)
        urgent = []
        for _ in range(3):
            urgent.append(region.submit(Lane.PRIORITY, 50))
            await asyncio.sleep(5.0)
        assert waited_s(urgent[0]) < 0.2
        assert waited_s(urgent[1]) < 0.2
        assert not urgent[2].starts_s, "it runs to its end now"
        await asyncio.sleep(60.0)
        assert urgent[2].starts_s[0] >= batch.starts_s[-1]
        assert region.preempted == {batch.job.record.job_id: 2}
        assert batch.ends == 1
        assert batch.made == LONG
        assert len(batch.starts_s) == 3


async def test_a_job_that_yielded_stays_away_while_priority_is_short_of_room():
    async with region_of(workers=1, slots=1) as region:
        (batch,) = await fill(region)
        urgent = [region.submit(Lane.PRIORITY, 100) for _ in range(5)]  # 10 s of work
        await asyncio.sleep(30.0)
        assert sum(region.preempted.values()) == 1
        assert len(batch.starts_s) == 2
        assert batch.starts_s[1] > max(life.starts_s[0] for life in urgent)


async def test_what_the_floor_started_does_not_yield():
    async with region_of(workers=1, slots=1, floor_turns=3) as region:
        urgent = [region.submit(Lane.PRIORITY, 10) for _ in range(30)]
        batch = [region.submit(Lane.BATCH, 10) for _ in range(8)]
        await asyncio.sleep(30.0)
        assert all(life.ends == 1 for life in (*urgent, *batch))
        assert not region.preempted


async def test_a_job_for_which_no_single_run_would_do_is_left_to_others():
    async with region_of(workers=1, slots=2) as region:
        await fill(region)
        large = region.submit(Lane.PRIORITY, 38_000)  # of 50,000 KV tokens two runs hold 3,100 each
        await asyncio.sleep(1.0)
        assert sum(region.preempted.values()) == 1
    async with region_of(workers=1, slots=2) as region:
        await fill(region, tokens=20_000)
        large = region.submit(Lane.PRIORITY, 38_000)
        await asyncio.sleep(2.0)
        assert not region.preempted
        assert not large.starts_s
        region.add_worker()
        await asyncio.sleep(1.0)
        assert large.starts_s, "it was not kept where it cannot start"


async def test_a_run_that_lacks_kv_only_is_relieved_too():
    async with region_of(workers=1, slots=4) as region:
        batch = [region.submit(Lane.BATCH, 20_000) for _ in range(2)]
        await asyncio.sleep(1.0)
        assert all(life.starts_s for life in batch)
        urgent = region.submit(Lane.PRIORITY, 15_000)
        await asyncio.sleep(1.0)
        assert waited_s(urgent) < 0.2
        assert sum(region.preempted.values()) == 1


async def test_nobody_yields_to_a_paused_lane_in_a_drain_or_beside_a_suspect():
    async with region_of(workers=1, slots=1) as region:
        await fill(region)
        region.paused = frozenset({Lane.PRIORITY})
        urgent = region.submit(Lane.PRIORITY, 50)
        await asyncio.sleep(2.0)
        assert not region.preempted
        region.paused = frozenset()
        region.floors[0].alone = True
        await asyncio.sleep(2.0)
        assert not region.preempted
        region.floors[0].alone = False
        await region.pulls[0].pause()
        await asyncio.sleep(2.0)
        assert not region.preempted
        region.pulls[0].go_on()
        await asyncio.sleep(1.0)
        assert urgent.starts_s
        assert sum(region.preempted.values()) == 1


async def test_a_run_that_ends_by_itself_meanwhile_counts_as_room():
    async with region_of(workers=1, slots=1) as region:
        (batch,) = await fill(region, tokens=100)  # ends 2 s after its start, which was 1 s ago
        await asyncio.sleep(0.97)
        urgent = region.submit(Lane.PRIORITY, 50)
        await asyncio.sleep(1.0)
        assert urgent.starts_s
        assert not region.preempted
        assert batch.ends == 1


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 30))])
async def test_preempted_work_ends_once_with_all_its_tokens_whatever_the_load(seed: int):
    print(f"seed {seed}")
    dice = Random(seed)
    async with region_of(workers=dice.randint(1, 2), slots=dice.randint(1, 3), floor_turns=10) as region:
        lower = [
            region.submit(
                dice.choice((Lane.BATCH, Lane.DEFERRABLE)), dice.randint(1, 1000), min_tokens=dice.choice((0, 0, 1))
            )
            for _ in range(15)
        ]
        urgent = []
        for _ in range(30):
            await asyncio.sleep(dice.expovariate(1.0))
            urgent.append(region.submit(Lane.PRIORITY, dice.randint(1, 100)))
        while not all(life.ends for life in (*lower, *urgent)):  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(1.0)
        await asyncio.sleep(3.0)
        for life in (*lower, *urgent):
            assert life.ends == 1
            assert life.made == life.job.task.sampling.max_tokens
        assert region.preempted or seed > 1
        assert all(count <= 2 for count in region.preempted.values())
        unsound = {life.job.record.job_id for life in lower if life.job.task.sampling.min_tokens}
        assert all(len(region.lives[job_id].starts_s) == 1 for job_id in unsound - set(region.preempted))
        assert not {life.job.record.job_id for life in urgent} & set(region.preempted)
