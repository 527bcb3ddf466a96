"""The containers as they are deployed: what can reach them, how fast they start, and what their deaths cost callers."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable

import pytest

from laneway.client import Client, LanewayError, Unauthenticated, VerdictKind
from tests.stack.composed import WORKERS, Composed, Container
from tests.stack.kills import (
    HOLD_S,
    PATIENCE,
    PUBLISHED,
    STREAM_TOKENS,
    STREAMS,
    SUBMITS,
    Kill,
    Stream,
    end_of,
    producer,
    submit,
)
from tests.support.nats import eventually

pytestmark = [pytest.mark.stack, pytest.mark.timeout(2400)]

START_S_MAX = 15.0


# --- starting and stopping -------------------------------------------------------------------------


def test_with_images_built_it_is_up_within_15_s(composed: Composed):
    # What others took of the machine is not the stack's time. On an idle one the limit is what it says.
    assert composed.took_s["second start"] * (1.0 - composed.others_share) <= START_S_MAX


def test_told_to_stop_each_process_ends_by_itself_and_well(composed: Composed):
    assert set(composed.exit_codes.values()) == {0}, composed.exit_codes


# --- reach -----------------------------------------------------------------------------------------


def test_the_door_alone_is_published_and_to_this_host_alone(composed: Composed):
    published = {
        (each.service, binding["HostIp"])
        for each in composed.containers()
        for bindings in each.inspect()["NetworkSettings"]["Ports"].values()
        for binding in bindings or ()
    }
    assert published == {("admission", "127.0.0.1")}
    edge = {each.service for each in composed.containers() if any("edge" in name for name in _networks(each))}
    assert edge == {"admission"}, "nobody else has a way out"


def test_containers_have_no_more_than_they_need(composed: Composed):
    for each in composed.containers():
        found = each.inspect()
        host = found["HostConfig"]
        assert host["ReadonlyRootfs"], each.name
        assert host["CapDrop"] == ["ALL"], each.name
        assert host["Memory"] > 0, each.name
        assert host["RestartPolicy"]["Name"] == ("on-failure" if each.service == "provision" else "unless-stopped")
        if each.service != "nats":
            assert found["Config"]["User"].split(":")[0] not in ("", "0", "root"), each.name


async def test_a_caller_without_a_token_is_turned_away(composed: Composed):
    async with Client(composed.address(), token="guessed") as client:
        with pytest.raises(Unauthenticated):
            await submit(client, 0)


def test_an_operator_sees_the_workers_through_a_scheduler(composed: Composed):
    def ready() -> int:
        workers = json.loads(composed.compose("run", "--rm", "--no-TTY", "--no-deps", "cli", "workers", "--json"))
        return sum(worker["state"] == "READY" for worker in workers)

    assert ready() == WORKERS


# --- deaths ----------------------------------------------------------------------------------------


async def test_everything_accepted_ends_once_when_a_worker_is_killed(composed: Composed, kill_report: list[Kill]):
    kill = await _killed(composed, "a worker", composed.container_of)
    kill_report.append(kill)
    _all_ended_once(kill)
    assert [stream.error for stream in kill.streams] == [""] * STREAMS
    assert any(stream.attempt > 1 for stream in kill.streams), "another worker went on with what it was saying"


async def test_everything_accepted_ends_once_when_the_leading_scheduler_is_killed(
    composed: Composed, kill_report: list[Kill]
):
    before = composed.leader()
    kill = await _killed(composed, "the leading scheduler", lambda _: composed.leader().container)
    kill_report.append(kill)
    _all_ended_once(kill)
    assert [stream.error for stream in kill.streams] == [""] * STREAMS
    after = composed.leader()
    assert after.epoch > before.epoch
    assert kill.under_way["parked"], "something was left for the other to release"
    kill.note = f"{before.container.name} led; {after.container.name} led {after.since_s - kill.at_s:.1f} s later"


async def test_everything_accepted_ends_once_when_nats_is_killed(composed: Composed, kill_report: list[Kill]):
    kill = await _killed(composed, "nats", lambda _: composed.containers("nats")[0])
    kill_report.append(kill)
    _all_ended_once(kill, may_miss_events=True)


async def _killed(stack: Composed, victim: str, choose: Callable[[str], Container]) -> Kill:
    """Kills it while streams run, batch jobs wait and run, and a producer publishes more; waits until all has ended.

    `choose` is given the worker of a stream.
    """
    kill = Kill(victim)

    def on_retry(error: LanewayError, wait_s: float) -> None:
        kill.retried[error.reason] += 1

    async with (
        Client(stack.address(), token=stack.token(), retry_budget=PATIENCE, on_retry=on_retry) as client,
        producer(stack) as publishing,
    ):
        await publishing.until("ready")
        await _serves(client)
        kill.streams = [Stream() for _ in range(STREAMS)]
        async with asyncio.TaskGroup() as group:
            for number, stream in enumerate(kill.streams):
                group.create_task(stream.run(client, number))
            kill.jobs += [await submit(client, number) for number in range(SUBMITS // 3)]
            await publishing.until("received", PUBLISHED // 4)
            await eventually(
                lambda: all(len(each.indices) >= 3 or each.error for each in kill.streams), timeout_s=120.0
            )
            assert all(len(stream.indices) < STREAM_TOKENS for stream in kill.streams), "it is to die in the middle"
            kill.jobs += [await submit(client, number, hold_s=HOLD_S) for number in range(SUBMITS // 3)]
            container = await asyncio.to_thread(choose, await publishing.worker_of(kill.streams[0].job_id))
            kill.under_way = Counter([job.state.value async for job in client.list_jobs() if not job.state.terminal])
            kill.at_s = time.time()
            back = await asyncio.to_thread(container.kill_main_process)
            returning = group.create_task(asyncio.to_thread(back))
            kill.jobs += [await submit(client, number) for number in range(SUBMITS // 3)]
        kill.back_s = returning.result()
        for job_id in kill.jobs:
            kill.states[await end_of(client, job_id)] += 1
        kill.produced = await publishing.until("accepted")
        kill.states.update(kill.produced["states"])
        kill.ends = await publishing.ends_of(kill.accepted())
    return kill


def _all_ended_once(kill: Kill, *, may_miss_events: bool = False) -> None:
    assert kill.produced["refused"] == 0
    assert len(kill.produced["accepted"]) == PUBLISHED
    assert dict(kill.states) == {"succeeded": SUBMITS + PUBLISHED}
    for stream in kill.streams:
        if not stream.error:
            assert stream.indices == list(range(STREAM_TOKENS))
    # What is told on core NATS while it is down reaches nobody.
    assert set(kill.ends.values()) <= ({0, 1} if may_miss_events else {1}), kill.ends


async def _serves(client: Client) -> None:
    """Waits until the door has heard of the workers."""

    async def accepts() -> bool:
        quote = await client.quote(model="chat", prompt="x", max_tokens=1, lane="priority")
        return quote.verdict.kind is not VerdictKind.REFUSED

    await eventually(accepts, timeout_s=60.0)


def _networks(container: Container) -> list[str]:
    return list(container.inspect()["NetworkSettings"]["Networks"])
