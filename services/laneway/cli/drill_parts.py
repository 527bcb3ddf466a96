"""Drills on parts: a worker is drained and taken back; with --kill, one of a local stack is killed under load."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from laneway.cli.drill_play import Drill, Heard, Play, Skipped
from laneway.cli.endpoint import Endpoint
from laneway.core.errors import LanewayError
from laneway.core.lanes import JobState, Lane

STATE_S_MAX = 10.0
STREAMS = 4
KILL_TOKENS = 256  # a worker says once a second what it runs


async def drain_a_worker(play: Play) -> None:
    """Jobs go on at the others; the drained one takes none."""
    try:
        workers = await play.workers()
    except LanewayError as error:
        raise Skipped(f"it needs an operator's rights: {error.reason}") from None
    if len(workers) < 2:
        raise Skipped(f"it needs two ready workers of {play.model}, and there is {len(workers)}")
    leaving = workers[0]

    async def is_in(state: str) -> bool:
        found = [w async for w in play.scheduler.list_workers() if w.name == leaving.name]
        return bool(found) and found[0].state == state

    try:
        await play.scheduler.drain_worker(leaving.worker_id)
        play.expect(await play.until(lambda: is_in("DRAINING"), STATE_S_MAX), f"{leaving.name} does not drain")
        idle = await play.until(lambda: _holds(play, leaving.name, 0), STATE_S_MAX)
        before = await _done(play, leaving.name)
        submitted = [await play.client.submit(**play.request(n, Lane.DEFERRABLE)) for n in range(play.jobs // 4 or 1)]
        jobs = [await play.client.wait(each.job_id) for each in submitted]
        ended = sum(job.state is JobState.SUCCEEDED for job in jobs)
        play.found(f"{ended} of {len(jobs)} jobs ended while {leaving.name} was drained")
        play.expect(ended == len(jobs), "jobs did not go on while a worker was drained")
        if idle:
            play.expect(await _done(play, leaving.name) == before, f"{leaving.name} took work while it was drained")
    finally:
        undrained = play.scheduler.undrain_worker(leaving.worker_id)
        await play.put_back(undrained, f"{leaving.name} is still drained: laneway undrain {leaving.name}")
    play.expect(await play.until(lambda: is_in("READY"), STATE_S_MAX), f"{leaving.name} does not come back")


def kill_drill(endpoint: Endpoint | None, scheduler_address: str) -> Drill:
    """Only where the stack is one that `laneway up` runs on this machine, for this user."""

    async def play_it(play: Play) -> None:
        if endpoint is None or endpoint.scheduler != scheduler_address:
            raise Skipped("it kills only workers of a stack that `laneway up` runs on this machine")
        workers = [w for w in await play.workers() if _is_part_of(w.process_id, endpoint.pid)]
        if len(workers) < 2:
            raise Skipped(f"it needs two ready workers of its own stack, and there is {len(workers)}")
        heard = [Heard() for _ in range(STREAMS * len(workers))]
        victim = workers[0]

        async def attached(number: int) -> None:
            request = play.request(number, tokens=KILL_TOKENS, keep=True)
            async with play.client.generate(**request) as stream:
                await heard[number].listen(stream)

        async with asyncio.TaskGroup() as group:
            for number in range(len(heard)):
                group.create_task(attached(number))
            if not await play.until(lambda: _holds(play, victim.name, 1, at_least=True), STATE_S_MAX):
                raise Skipped(f"{victim.name} was not seen at work, so that nothing was killed")
            play.say(f"  kill -9 of worker {victim.name}, process {victim.process_id}")
            os.kill(victim.process_id, signal.SIGKILL)
        attempts = []
        for one in heard:
            job = await play.client.get_job(one.job_id)
            attempts.append(job.attempt)
            stored = list(job.result.token_ids) if job.result else []
            play.expect(job.state is JobState.SUCCEEDED, f"{one.job_id} is {job.state}")
            play.expect(one.contiguous and one.ids == stored, f"{one.job_id}: the tokens heard are not those stored")
        moved = sum(attempt > 1 for attempt in attempts)
        play.found(f"{len(heard)} streams, {moved} of them went on at another worker; {victim.name} is gone for good")

    return Drill(
        "kill", "kill -9 a worker of the stack that `laneway up` runs here, which does not start it again", play_it
    )


def _is_part_of(process_id: int, stack_pid: int) -> bool:
    """Whether a process is a child of the stack's, by /proc; False where that cannot be told."""
    seen = process_id
    for _ in range(8):
        if seen == stack_pid:
            return process_id != stack_pid
        try:
            stat = Path(f"/proc/{seen}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            return False
        seen = int(stat.rpartition(")")[2].split()[1])
        if seen <= 1:
            return False
    return False


async def _holds(play: Play, name: str, running: int, *, at_least: bool = False) -> bool:
    found = [w.running async for w in play.scheduler.list_workers() if w.name == name]
    return bool(found) and (found[0] >= running if at_least else found[0] == running)


async def _done(play: Play, name: str) -> int:
    return sum([w.jobs_done async for w in play.scheduler.list_workers() if w.name == name])


DRAIN_DRILL = Drill("drain", "drain one worker, send jobs, and take the worker back", drain_a_worker)
