"""Two workers with the small real model: conversations meet the caches that hold them, and few of them twice anew."""

from __future__ import annotations

import pytest

from tests.support.affinity_play import OPENVINO, SESSIONS, WORKERS, Play, cold_turns, hot, place, reuse

pytestmark = [pytest.mark.e2e, pytest.mark.drill, pytest.mark.model, pytest.mark.timeout(400)]


async def test_sessions_reuse_what_one_cache_would_and_a_killed_worker_costs_each_one_cold_prefill() -> None:
    play = Play(OPENVINO)
    async with place(OPENVINO) as here:
        turns = await play.talk(here.client, SESSIONS, 3)
        print(f"reuse {reuse(turns):.3f}, cold {sum(cold_turns(turns).values())}")
        assert reuse(turns) >= 0.85
        worker = here.stack.workers[0]
        worker.kill()
        await worker.wait()
        after = await play.talk(here.client, SESSIONS, 2)
        cold = cold_turns(after)
        print(f"cold after the kill: {cold}")
        assert len(after) == 2 * SESSIONS
        assert max(cold.values()) <= 1


async def test_a_prefix_that_all_jobs_share_loads_no_worker_above_one_and_a_half_times_the_mean() -> None:
    jobs = 48
    async with place(OPENVINO) as here:
        before = await here.jobs_by_worker()
        cached = await hot(Play(OPENVINO, seed=2), here.client, jobs, prefix_tokens=512, at_once=16)
        after = await here.jobs_by_worker()
    ran = {name: after[name] - before[name] for name in after}
    print(f"jobs {ran}, prompt tokens from caches {cached} of {jobs * 520}")
    assert sum(ran.values()) == jobs
    assert max(ran.values()) <= 1.5 * jobs / WORKERS
    assert cached > 0.3 * jobs * 512, "those that came first found nothing"
