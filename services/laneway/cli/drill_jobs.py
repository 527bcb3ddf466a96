"""Drills on jobs: accepted ones end once, streams are taken up again, cancelled ones free, repeats and refusals."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from laneway.cli.drill_play import TOKENS, Drill, Heard, Play, Skipped
from laneway.core.errors import AlreadyExists, DeadlineExceeded, Infeasible, JobCancelled, LanewayError
from laneway.core.ids import new_job_id
from laneway.core.lanes import LANES, JobState, Lane

if TYPE_CHECKING:
    from laneway.client import RequestFields

FREED_S_MAX = 5.0
QUIET_S_MAX = 3.0  # workers say what they hold once a second
LATE_S_MAX = 3.0  # a caller is told of its deadline
SWEPT_S_MAX = 8.0  # a job that waits in a lane is ended by a sweep
HEARD_S = 1.0  # every worker has heard of a pause by then
LONG_TOKENS = 512
HOLD_S = 3600.0
WITHIN_S = 2.0  # a deadline that a long answer cannot keep


async def accept_and_count(play: Play) -> None:
    """Every third job is attached."""
    heard: dict[str, Heard] = {}

    async def attached(number: int, lane: Lane) -> None:
        one = Heard()
        async with play.client.generate(**play.request(number, lane)) as stream:
            await one.listen(stream)
        heard[one.job_id] = one

    async def detached(number: int, lane: Lane) -> str:
        job_id = (await play.client.submit(**play.request(number, lane))).job_id
        await play.client.wait(job_id)
        return job_id

    async with asyncio.TaskGroup() as group:
        waiting = [
            group.create_task(attached(number, LANES[number // 3 % 3]))
            if number % 3 == 0
            else group.create_task(detached(number, LANES[number % 3]))
            for number in range(play.jobs)
        ]
    ids = [task.result() for task in waiting if task.result()]
    jobs = {job.job_id: job for job in await play.listed()}
    states = Counter(job.state.value for job in jobs.values())
    play.found(f"{play.jobs} jobs, {len(heard)} of them streams: {', '.join(f'{n} {s}' for s, n in states.items())}")
    play.expect(len(jobs) == play.jobs, f"{play.jobs} jobs were accepted and {len(jobs)} are listed")
    play.expect(set(jobs) == {*ids, *heard}, "the jobs that are listed are not those that were accepted")
    play.expect(set(states) == {JobState.SUCCEEDED.value}, f"not every job succeeded: {dict(states)}")
    for job_id, one in heard.items():
        await _equal_to_the_stored(play, job_id, one)


async def re_attach(play: Play) -> None:
    """The caller's connection is cut in the middle; the job is kept, and is taken up where it was."""
    heard = Heard()
    async with play.client.generate(**play.request(0, tokens=2 * TOKENS, keep=True)) as stream:
        await heard.listen(stream, tokens_max=TOKENS // 2)
    before = len(heard.ids)
    async with play.client.watch(heard.job_id, from_index=before) as stream:
        await heard.listen(stream)
    play.found(f"cut after {before} tokens, {len(heard.ids) - before} more heard by Watch")
    play.expect(before > 0, "nothing was heard before the cut")
    play.expect(len(heard.ids) == 2 * TOKENS, f"{len(heard.ids)} of {2 * TOKENS} tokens were heard")
    await _equal_to_the_stored(play, heard.job_id, heard)
    again = Heard()
    async with play.client.watch(heard.job_id) as stream:
        await again.listen(stream)
    play.expect(again.ids == heard.ids, "Watch from the beginning gives another answer than was heard")


async def cancel_in_each_state(play: Play) -> None:
    """Parked, running, ended, and cancelled before."""

    async def idle() -> bool:
        return await _running(play) == 0

    quiet = await play.until(idle, QUIET_S_MAX)
    parked = play.request(0, Lane.BATCH)
    parked["not_before_s"], parked["deadline_s"] = HOLD_S, 2 * HOLD_S
    job_id = (await play.client.submit(**parked)).job_id
    state = (await play.client.get_job(job_id)).state
    play.expect(state is JobState.PARKED, f"a job that may not start for an hour is {state}, not parked")
    await _is_cancelled(play, job_id, "parked")
    await _is_cancelled(play, job_id, "cancelled before")

    heard = Heard()
    try:
        async with play.client.generate(**play.request(1, tokens=LONG_TOKENS, keep=True)) as stream:
            await heard.listen(stream, tokens_max=2)
            await _is_cancelled(play, heard.job_id, "running")
            await heard.listen(stream)
        play.expect(False, "the stream of a cancelled job ended as if it had succeeded")
    except JobCancelled:
        play.found(f"a running one ended after {len(heard.ids)} tokens")
    play.expect(len(heard.ids) < LONG_TOKENS, "the cancelled job went on to its end")

    ended = await play.client.wait((await play.client.submit(**play.request(2))).job_id)
    left = await play.client.cancel(ended.job_id)
    play.expect(left.state is ended.state, f"a job that had {ended.state} is {left.state} after a cancel")
    if not quiet:
        play.found("others' work runs here: what the workers freed was not counted")
        return

    play.expect(await play.until(idle, FREED_S_MAX), "workers still hold places of jobs that were cancelled")


async def idempotency(play: Play) -> None:
    """The same key and request at once and again, then the same key with another request."""
    key = f"{play.run}-{uuid.uuid4()}"
    request = play.request(0, Lane.DEFERRABLE)
    del request["deadline_s"]  # a moment: the repeats must be the same request
    request["deadline_at"] = datetime.now(UTC) + timedelta(seconds=HOLD_S)
    at_once = await asyncio.gather(*(play.client.submit(idempotency_key=key, **request) for _ in range(5)))
    ids = {submitted.job_id for submitted in at_once}
    job = await play.client.wait(at_once[0].job_id)
    ids.add((await play.client.submit(idempotency_key=key, **request)).job_id)
    listed = await play.listed()
    play.found(f"6 requests with one key made {len(ids)} job, which ran {job.attempt} time")
    play.expect(len(ids) == 1, f"one key gave {len(ids)} jobs")
    play.expect(len(listed) == 1, f"one key left {len(listed)} records")
    try:
        request["max_tokens"] = TOKENS + 1
        await play.client.submit(idempotency_key=key, **request)
        play.expect(False, "the same key with another request was accepted")
    except AlreadyExists:
        pass


async def deadlines(play: Play) -> None:
    """What cannot be done in time is refused, or ends at its deadline with a clear status; never later."""
    loop = asyncio.get_running_loop()
    request = play.request(0, tokens=LONG_TOKENS)
    request["deadline_s"] = WITHIN_S
    began_s = loop.time()
    try:
        async with play.client.generate(retry_s_max=0.0, **request) as stream:
            await stream.text()
        told = "was done in time"
    except Infeasible as error:
        told = f"was refused at the door ({error.reason})"
    except DeadlineExceeded as error:
        told = f"ended at its deadline in phase {error.phase}"
        play.expect(error.phase is not None, "a deadline that was missed names no phase")
    took_s = loop.time() - began_s
    play.found(f"{LONG_TOKENS} tokens within {WITHIN_S:g} s: {told}")
    play.expect(took_s <= WITHIN_S + LATE_S_MAX, f"a job due in {WITHIN_S:g} s was told its end after {took_s:.1f} s")
    await _held_up(play)


async def _held_up(play: Play) -> None:
    """A batch job that its lane holds back beyond its deadline, where that holds up nobody else's."""
    try:
        lanes = [lane async for lane in play.scheduler.list_lanes() if lane.lane is Lane.BATCH]
        if any(lane.ready + lane.running + lane.parked or lane.paused for lane in lanes):
            play.found("others' batch work is there: the lane was not paused for the other half")
            return
        await play.scheduler.pause_lane(Lane.BATCH)
    except LanewayError as error:
        play.found(f"no right to pause a lane ({error.reason}): the other half was left out")
        return
    try:
        await asyncio.sleep(HEARD_S)
        request = play.request(1, Lane.BATCH)
        quoted = (await play.client.quote(**request)).verdict.completion_eta_s or 0.0
        request["deadline_s"] = quoted + WITHIN_S
        submitted = await play.client.submit(**request)
        job = await play.client.wait(submitted.job_id, timeout_s=quoted + WITHIN_S + 2 * SWEPT_S_MAX)
    finally:
        await play.put_back(
            play.scheduler.resume_lane(Lane.BATCH), "the batch lane is still paused: laneway resume batch"
        )
    late_s = job.timings.ended_s - job.contract.deadline_s
    phase = job.error.phase if job.error else None
    play.found(f"a batch job in a paused lane: {job.state} in phase {phase}, {late_s:.1f} s after its deadline")
    play.expect(job.state is JobState.EXPIRED, f"a job that its lane held beyond its deadline is {job.state}")
    play.expect(phase is not None, "a job that expired names no phase")
    play.expect(-0.1 <= late_s <= SWEPT_S_MAX, f"a job expired {late_s:.1f} s after its deadline")


async def refused_leave_nothing(play: Play) -> None:
    """Requests that must be refused, each for another reason."""
    plain = play.request(0)
    bad: dict[str, RequestFields] = {
        "max_tokens": {**plain, "max_tokens": 2**31 - 1},
        "model": {**plain, "model": "no-such-model"},
        "temperature": {**plain, "temperature": -1.0},
        "deadline": {**plain, "deadline_s": -5.0},
        "top_p": {**plain, "top_p": float("nan")},
        "region": {**plain, "regions": ["nowhere"]},
    }
    reasons: Counter[str] = Counter()
    for what, request in bad.items():
        try:
            await play.client.submit(retry_s_max=0.0, **request)
            play.expect(False, f"a request with a bad {what} was accepted")
        except LanewayError as error:
            reasons[error.reason] += 1
            play.expect(bool(error.message), f"the refusal of a bad {what} says nothing")
    try:
        await play.client.get_job(new_job_id("local", 0.0, bytes(10)))
        play.expect(False, "a job that never was is found")
    except LanewayError as error:
        reasons[error.reason] += 1
    play.found(f"refused: {', '.join(f'{n} {reason}' for reason, n in reasons.items())}")
    play.expect(not await play.listed(), "a refused request left a job")


async def _is_cancelled(play: Play, job_id: str, before: str) -> None:
    left = await play.client.cancel(job_id)
    play.expect(left.state is JobState.CANCELLED, f"cancelling a job that was {before} left it {left.state}")
    job = await play.client.get_job(job_id)
    play.expect(job.state is JobState.CANCELLED, f"a cancelled job that was {before} is {job.state}")


async def _equal_to_the_stored(play: Play, job_id: str, heard: Heard) -> None:
    job = await play.client.get_job(job_id)
    if job.result is None:
        play.expect(False, f"{job_id} was heard to its end and is {job.state}")
        return
    play.expect(heard.contiguous, f"{job_id}: a token came twice, was left out or came out of order")
    play.expect(heard.ids == list(job.result.token_ids), f"{job_id}: the tokens heard are not those stored")
    play.expect(heard.text == job.result.text, f"{job_id}: the text heard is not the one stored")


async def _running(play: Play) -> int:
    try:
        return sum([w.running async for w in play.scheduler.list_workers()])
    except LanewayError as error:
        raise Skipped(f"it needs an operator's view of the workers: {error.reason}") from None


JOB_DRILLS = (
    Drill("accept", "send {jobs} small jobs through all lanes, attached and detached, and count their ends",
          accept_and_count),
    Drill("re-attach", "cut a stream in the middle and follow its job from there", re_attach),
    Drill("cancel", "cancel a parked, a running, an ended and a cancelled job of its own", cancel_in_each_state),
    Drill("idempotency", "send one request six times with one key, and another with the same key", idempotency),
    Drill("deadline", f"ask for more than can be done within {WITHIN_S:g} s; pause the batch lane for some seconds if"
          " it is empty, and let a job miss its deadline there", deadlines),
    Drill("refused", "send seven requests that must be refused, and look for what they left", refused_leave_nothing),
)  # fmt: skip
