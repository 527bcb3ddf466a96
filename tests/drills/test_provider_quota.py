"""Four workers want many times what a provider allows, which counts by itself; one is killed while it holds a grant.

At the provider: no window has more than 2 % over the quota, each uses 95 % of it or more, no job is lost, and no more
than 1.1 requests are made for each. The true figures (100 requests and 20,000 tokens in 60 s) are run for three
windows, and the same with windows of a tenth for a quick look.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from laneway.core import subjects
from laneway.core.lanes import JobState, Lane
from laneway.policy.quota import QuotaRecord
from laneway.runtime.clock import SystemClock
from laneway.runtime.engine_options import ProviderOptions, QuotaOptions
from laneway.runtime.kv import Key
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.wire.quotas import decode_quota
from tests.support.counting_provider import CountingProvider
from tests.support.nats import REGION, eventually
from tests.support.strict_count import StrictCount
from tests.support.worker import Yard, yard
from tests.support.worker_process import WorkerProcess, worker_process

pytestmark = [pytest.mark.drill, pytest.mark.slow, pytest.mark.wire, pytest.mark.timeout(180)]

WORKERS, SLOTS = 4, 8
NAME = "provider"
OVER, USED, ATTEMPTS = 1.02, 0.95, 1.1
MAX_TOKENS, SHARES = 120, (0.7, 0.97)  # with prompts of 80 to 120: 200 tokens a request, so that both quotas bind


@dataclass
class Play:
    place: Yard
    provider: CountingProvider
    workers: dict[str, WorkerProcess]  # by incarnation

    async def record(self) -> QuotaRecord:
        key = Key(self.place.bus, subjects.plan_bucket(REGION), subjects.quota_key(NAME))
        return decode_quota((await key.read()).data)

    async def kill_a_holder(self) -> str:
        """By SIGKILL, a worker that holds a grant at this moment."""

        async def holder() -> str:
            grants = (await self.record()).grants
            return next((grant.holder for grant in grants if grant.holder in self.workers), "")

        killed = await eventually(holder, 60.0)
        os.kill(self.workers[killed].process.pid, signal.SIGKILL)
        await self.workers.pop(killed).process.wait()
        return killed


@asynccontextmanager
async def playing(folder: Path, window_s: float, requests: int, tokens: int, answer_s: float) -> AsyncIterator[Play]:
    count = StrictCount(requests, tokens, window_s)
    async with AsyncExitStack() as stack:
        provider = await stack.enter_async_context(CountingProvider(count, answer_s, SHARES))
        server = await stack.enter_async_context(LocalNats(folder / "nats"))
        options = ProviderOptions(
            name=NAME,
            base_url=provider.base_url,
            quotas=(QuotaOptions(window_s=window_s, requests=requests, tokens=tokens),),
        )
        place = await stack.enter_async_context(
            yard(
                server,
                model__engine="openai",
                model__tokenizer="bytes",
                model__slots=SLOTS,
                engine__providers=(options,),
                nats__ack_wait_priority_s=3.0,
                nats__ack_wait_deferrable_s=3.0,
                nats__ack_wait_batch_s=3.0,
            )
        )
        workers = await asyncio.gather(
            *(
                stack.enter_async_context(worker_process(place.settings, folder / f"w{n}.ready", f"w{n}"))
                for n in range(WORKERS)
            )
        )
        yield Play(place, provider, {worker.id: worker for worker in workers})


@pytest.mark.parametrize(
    ("window_s", "requests", "tokens", "answer_s", "windows"),
    [
        pytest.param(6.0, 100, 20_000, 0.1, 3, id="a tenth of a minute"),
        pytest.param(60.0, 100, 20_000, 1.0, 3, id="a minute", marks=pytest.mark.timeout(420)),
    ],
)
async def test_the_quota_is_used_and_not_exceeded_and_no_job_is_lost_with_its_worker(
    tmp_path: Path, window_s: float, requests: int, tokens: int, answer_s: float, windows: int
):
    random, loop = Random(1), asyncio.get_running_loop()
    async with playing(tmp_path, window_s, requests, tokens, answer_s) as play:
        count = play.provider.count
        far_s = SystemClock().now() + 3600.0  # none of these jobs is to end by its deadline
        jobs = []
        for number in range(round(requests * (windows + 0.2))):
            lane = (Lane.PRIORITY, Lane.DEFERRABLE, Lane.BATCH)[number % 3]
            prompt = bytes(random.choices(b"abcdefgh ", k=random.randint(80, 120)))
            stored = await play.place.submit(
                prompt=prompt, lane=lane, max_tokens=MAX_TOKENS, contract={"deadline_s": far_s}
            )
            jobs.append(stored.record.job_id)
        await asyncio.sleep(count.began_s + window_s * 1.4 - loop.time())
        await play.kill_a_holder()
        ended = await play.place.ended(*jobs, timeout_s=window_s * 2 + 60.0)
        await asyncio.sleep(max(0.0, count.began_s + windows * window_s - loop.time()))
        record = await play.record()

    assert {job.state for job in ended} == {JobState.SUCCEEDED}
    asked, spent = count.wanted()
    shares = [(asked[n] / requests, spent[n] / tokens) for n in range(windows)]
    most_requests, most_tokens = count.most_in_any(window_s)
    told = (
        f"of each window's requests and tokens: {shares}; most in any such span: {most_requests} and {most_tokens}; "
        f"{len(count.log)} requests for {len(jobs)} jobs"
    )
    print(told)
    assert all(share <= OVER for window in shares for share in window), told
    assert all(share >= USED for window in shares for share in window), told
    assert most_requests <= OVER * requests, told
    assert most_tokens <= OVER * tokens, told
    assert len(count.log) <= ATTEMPTS * len(jobs), told
    assert sum(job.attempt for job in ended) <= ATTEMPTS * len(jobs), told
    assert not record.queue
