"""The player of a replay in virtual time: when callers ask, how long they stay, and what is noted of them."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

import numpy as np
import pytest

from laneway.cli.replaying.asking import LABEL, SUBMISSIONS, Manner
from laneway.cli.replaying.fleet_watch import FleetWatch
from laneway.cli.replaying.notes import LATE_S, Notes
from laneway.cli.replaying.player import Player
from laneway.cli.replaying.prompts import Prompts, letters
from laneway.client import Cancelled, Chunk, Finished, Job, LaneStatus, RequestFields, Submitted, Worker
from laneway.core.errors import DeadlineExceeded, Infeasible, LaneSaturated, LanewayError, Unavailable
from laneway.core.fleet import StepTimes
from laneway.core.job import Contract, Timings, Usage, Verdict
from laneway.core.lanes import FinishReason, JobState, Lane, VerdictKind
from laneway.simulator.outcomes import End, Outcomes
from laneway.simulator.trace import Trace
from laneway.simulator.usage import device_s
from tests.support.traces import asked, trace

pytestmark = pytest.mark.looptime

TTFT_S, GAP_S = 1.0, 0.5
UNIX_S = 1_700_000_000.0


class ScriptedAnswer:
    """Its first token after `ttft_s`, the next ones after gaps; a pause of any length."""

    def __init__(self, door: ScriptedDoor, request: Mapping[str, Any]) -> None:
        self.job_id = "job"
        self._door, self._request = door, request
        tokens = request["max_tokens"]
        usage = Usage(len(request["prompt"]), cached_tokens=3, completion_tokens=tokens)
        self.finished = Finished(
            "job", JobState.SUCCEEDED, FinishReason.LENGTH, usage, Timings(), 1, None, None, 0.0, 0.0
        )

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        for index in range(self._request["max_tokens"]):
            await asyncio.sleep(GAP_S if index else self._door.ttft_s)
            yield Chunk(index, (97,), "a")


@dataclass
class ScriptedDoor:
    """Answers every request alike, but for refusals, which the first attempts get. Notes what is asked, and when."""

    ttft_s: float = TTFT_S
    submit_s: float = 0.0
    refusals: list[LanewayError] = field(default_factory=list)
    calls: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    open: int = 0
    most_open: int = 0
    state: JobState = JobState.SUCCEEDED

    @asynccontextmanager
    async def generate(
        self,
        *,
        idempotency_key: str | None = None,
        timeout_s: float | None = None,
        retry_s_max: float | None = None,
        **request: Unpack[RequestFields],
    ) -> AsyncIterator[ScriptedAnswer]:
        assert retry_s_max == 0.0, "the client would ask again by itself"
        self._take(request)
        async with self._opened():
            yield ScriptedAnswer(self, request)

    async def submit(
        self,
        *,
        idempotency_key: str | None = None,
        timeout_s: float | None = None,
        retry_s_max: float | None = None,
        **request: Unpack[RequestFields],
    ) -> Submitted:
        self._take(request)
        number = len(self.calls) - 1
        await asyncio.sleep(self.submit_s)
        return Submitted(str(number), Verdict(VerdictKind.ACCEPTED, "", "", Lane.BATCH))

    @asynccontextmanager
    async def watch(self, job_id: str) -> AsyncIterator[ScriptedAnswer]:
        async with self._opened():
            yield ScriptedAnswer(self, self.calls[int(job_id)][1])

    async def get_job(self, job_id: str) -> Job:
        """As if it had begun 20 s after it was taken, and ended at 30 s."""
        request = self.calls[int(job_id)][1]
        timings = Timings(created_s=UNIX_S, first_token_s=UNIX_S + 20.0, ended_s=UNIX_S + 30.0)
        usage = Usage(len(request["prompt"]), 0, request["max_tokens"])
        contract = Contract(Lane(request["lane"]), 1.0, 1.0, 2e9)
        return Job(job_id, "default", "chat", self.state, contract, None, 1, timings, usage, 1, 1, preemptions=2)

    async def cancel(self, job_id: str) -> Cancelled:
        self.cancelled.append(job_id)
        return Cancelled(job_id, JobState.CANCELLED, 0.0)

    def _take(self, request: Mapping[str, Any]) -> None:
        self.calls.append((asyncio.get_running_loop().time(), dict(request)))
        if self.refusals:
            raise self.refusals.pop(0)

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[None]:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            yield
        finally:
            self.open -= 1


@dataclass
class Played:
    player: Player
    door: ScriptedDoor
    begin_s: float

    @property
    def outcomes(self) -> Outcomes:
        return self.player.notes.outcomes

    @property
    def ends(self) -> list[End]:
        return [End(end) for end in self.outcomes.end]

    @property
    def asked_at_s(self) -> list[float]:
        """As the door saw it, from the trace's begin."""
        return [round(at_s - self.begin_s, 6) for at_s, _ in self.door.calls]


def made(played: Trace, door: ScriptedDoor, *, calls: int = 1000) -> Player:
    manner = Manner(model="chat", run="run", ignore_eos=True, draw=lambda: 0.5)
    return Player(played, Prompts(played, letters(), block_salt="", own_salt=""), [door], manner, calls=calls)


async def play(played: Trace, door: ScriptedDoor | None = None, *, calls: int = 1000) -> Played:
    door = door or ScriptedDoor()
    player = made(played, door, calls=calls)
    begin_s = asyncio.get_running_loop().time() + 0.5
    await player.play(begin_s)
    assert door.open == 0, "a call was left open"
    assert player.notes.ended == len(played)
    return Played(player, door, begin_s)


# --- when callers ask --------------------------------------------------------------------------------


async def test_each_request_is_asked_at_its_time_while_others_are_under_way():
    played = await play(trace(*(asked(at_s) for at_s in (0.0, 0.25, 0.25, 100.0))))
    assert played.asked_at_s == [0.0, 0.25, 0.25, 100.0]
    assert played.outcomes.asked_s.tolist() == [0.0, 0.25, 0.25, 100.0]
    assert played.player.notes.keeping().late == 0
    assert played.player.notes.keeping().kept_up
    assert played.door.most_open == 3


async def test_what_is_heard_is_noted_as_it_comes():
    played = await play(trace(asked(2.0, prompt_tokens=7, output_tokens=5), asked(2.0, output_tokens=1)))
    assert played.ends == [End.DONE, End.DONE]
    assert played.outcomes.ttft_s == pytest.approx([TTFT_S, TTFT_S])
    assert played.outcomes.tpot_s == pytest.approx([GAP_S, 0.0])
    assert played.outcomes.end_s == pytest.approx([2.0 + TTFT_S + 4 * GAP_S, 2.0 + TTFT_S])
    assert played.outcomes.tokens.tolist() == [5, 1]
    assert played.outcomes.cached_tokens.tolist() == [3, 3]
    assert played.player.notes.lane_tokens.tolist() == [6, 0, 0]
    assert played.player.notes.prompt_tokens_off() == (0.0, 0)


async def test_a_turn_is_asked_its_think_time_after_the_turn_before_has_ended():
    played = await play(
        trace(
            asked(1.0, session=7, output_tokens=3),
            asked(session=7, think_s=10.0, output_tokens=1),
            asked(session=7, think_s=0.5),
            asked(2.0, session=8),
        )
    )
    first_end_s = 1.0 + TTFT_S + 2 * GAP_S
    second_s = first_end_s + 10.0
    third_s = second_s + TTFT_S + 0.5
    assert played.outcomes.asked_s == pytest.approx([1.0, second_s, third_s, 2.0])
    assert played.asked_at_s == pytest.approx([1.0, 2.0, second_s, third_s])
    assert [request["session_id"] for _, request in played.door.calls] == ["run-7", "run-8", "run-7", "run-7"]


async def test_a_turn_follows_a_turn_that_was_refused_as_well():
    door = ScriptedDoor(refusals=[Infeasible()])
    played = await play(trace(asked(1.0, session=7), asked(session=7, think_s=10.0)), door)
    assert played.ends == [End.REFUSED, End.DONE]
    assert played.outcomes.asked_s.tolist() == pytest.approx([1.0, 11.0])


async def test_no_more_calls_are_open_than_allowed_and_what_begins_late_is_told():
    played = await play(trace(*(asked(0.0, output_tokens=1) for _ in range(4))), calls=2)
    assert played.door.most_open == 2
    assert played.asked_at_s == pytest.approx([0.0, 0.0, TTFT_S, TTFT_S])
    assert played.outcomes.ttft_s == pytest.approx([TTFT_S, TTFT_S, 2 * TTFT_S, 2 * TTFT_S])
    keeping = played.player.notes.keeping()
    assert (keeping.starts, keeping.late, keeping.kept_up) == (4, 2, False)
    assert keeping.late_most_s == pytest.approx(TTFT_S)


def test_one_late_start_of_a_hundred_is_kept_up_with_and_two_are_not():
    for late, kept_up in ((1, True), (2, False)):
        notes = Notes(trace(*(asked() for _ in range(100))))
        for request in range(100):
            notes.begins(request, 0.0)
            notes.asks(request, 2 * LATE_S if request < late else LATE_S)
        assert notes.keeping().kept_up is kept_up


def test_an_answer_is_worth_device_seconds_where_step_times_are_known_and_only_when_it_is_whole():
    times, whole = StepTimes(0.01, 0.001, 1e-6, 1e-5, 512), trace(asked(output_tokens=9), asked(output_tokens=9))
    known, unknown = Notes(whole, times=times), Notes(whole)
    for notes in (known, unknown):
        notes.heard(0, 9, 1.0)
        notes.ends(0, End.DONE, 1.0)
        notes.heard(1, 5, 1.0)
        notes.ends(1, End.FAILED, 1.0)
    assert known.lane_device_s == pytest.approx([device_s(40, 9, times), 0.0, 0.0])
    assert np.isnan(unknown.lane_device_s).all()


def test_an_answer_of_another_length_than_the_traces_is_counted():
    notes = Notes(trace(asked(output_tokens=9)))
    notes.heard(0, 8, 1.0)
    notes.ends(0, End.DONE, 1.0)
    assert notes.counts["answers.of_another_length"] == 1


# --- patience ----------------------------------------------------------------------------------------


async def test_a_caller_leaves_when_its_first_token_has_not_come_in_its_patience_and_not_after_it():
    played = await play(trace(asked(1.0, patience_s=TTFT_S - 0.1), asked(1.0, patience_s=TTFT_S + 0.1)))
    assert played.ends == [End.LEFT, End.DONE]
    assert played.outcomes.end_s[0] == pytest.approx(1.0 + TTFT_S - 0.1)
    assert math.isnan(played.outcomes.first_s[0])


async def test_a_caller_leaves_after_as_many_tokens_as_it_wants_to_hear():
    played = await play(trace(asked(output_tokens=9, leaves_after=3), asked(output_tokens=3, leaves_after=3)))
    assert played.ends == [End.LEFT, End.DONE]
    assert played.outcomes.tokens.tolist() == [3, 3]


async def test_a_caller_who_leaves_a_submitted_job_cancels_it():
    door = ScriptedDoor(ttft_s=60.0)
    played = await play(trace(asked(lane=Lane.BATCH, patience_s=10.0)), door)
    assert played.ends == [End.LEFT]
    assert door.cancelled == ["0"]


# --- refusals ----------------------------------------------------------------------------------------


async def test_a_refused_caller_comes_again_when_it_was_told_to_and_waits_since_its_arrival():
    door = ScriptedDoor(refusals=[LaneSaturated(retry_after_s=3.0), LaneSaturated(retry_after_s=4.0)])
    played = await play(trace(asked(1.0)), door)
    assert played.asked_at_s == [1.0, 4.0, 8.0]
    assert played.ends == [End.DONE]
    assert played.outcomes.retries.tolist() == [2]
    assert played.outcomes.accepted_s.tolist() == pytest.approx([8.0])
    assert played.outcomes.ttft_s == pytest.approx([7.0 + TTFT_S])


async def test_a_caller_that_was_refused_three_times_stays_away():
    full = LaneSaturated(retry_after_s=1.0, job_id="a-refusal-may-have-a-record")
    door = ScriptedDoor(refusals=[full, full, full])
    played = await play(trace(asked(), asked(50.0)), door)
    assert played.asked_at_s == [0.0, 1.0, 2.0, 50.0]
    assert played.ends == [End.REFUSED, End.DONE]
    counts = played.player.notes.counts
    assert (counts["retried.LANE_SATURATED"], counts["refused.LANE_SATURATED"]) == (2, 1)


async def test_a_refusal_without_a_time_is_waited_out_longer_each_time():
    door = ScriptedDoor(refusals=[LaneSaturated(), LaneSaturated()])
    played = await play(trace(asked(lane=Lane.DEFERRABLE)), door)
    assert played.asked_at_s == [0.0, 1.0, 3.0]


async def test_a_caller_whose_patience_ends_before_it_may_come_again_does_not():
    door = ScriptedDoor(refusals=[LaneSaturated(retry_after_s=5.0)])
    played = await play(trace(asked(1.0, patience_s=4.0)), door)
    assert played.asked_at_s == [1.0]
    assert played.ends == [End.LEFT]
    assert played.outcomes.end_s == pytest.approx([5.0])
    assert played.outcomes.retries.tolist() == [0]


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (Infeasible(), End.REFUSED),
        (DeadlineExceeded(), End.EXPIRED),
        (Unavailable(reason="NO_SERVICE", retry_after_s=100.0), End.EXPIRED),
    ],
)
async def test_an_end_without_an_answer_has_its_reason(error: LanewayError, end: End):
    played = await play(trace(asked(deadline_s=60.0)), ScriptedDoor(refusals=[error]))
    assert played.ends == [end]
    assert len(played.asked_at_s) == 1


async def test_a_service_that_stays_away_is_a_failure_and_no_refusal():
    door = ScriptedDoor(refusals=[Unavailable(reason="NO_SERVICE") for _ in range(3)])
    played = await play(trace(asked()), door)
    assert played.ends == [End.FAILED]
    assert played.player.notes.counts["failed.NO_SERVICE"] == 1


# --- submitted jobs ----------------------------------------------------------------------------------


async def test_a_submitted_job_has_the_times_of_its_services():
    played = await play(trace(asked(5.0, lane=Lane.BATCH), asked(6.0, lane=Lane.DEFERRABLE)))
    assert played.ends == [End.DONE, End.DONE]
    assert played.outcomes.first_s == pytest.approx([25.0, 26.0])
    assert played.outcomes.end_s == pytest.approx([35.0, 36.0])
    assert played.player.notes.counts["preemptions"] == 4


async def test_jobs_beyond_the_calls_are_followed_one_after_the_other_and_hold_up_nobody():
    played = await play(trace(*(asked(0.0, lane=Lane.BATCH) for _ in range(6)), asked(0.5)), calls=2)
    assert played.ends == [End.DONE] * 7
    assert played.asked_at_s[-1] == 0.5
    assert played.door.most_open == 3  # two follow, one streams


async def test_a_heap_of_batch_jobs_is_submitted_some_at_a_time_and_no_chat_waits_for_it():
    door = ScriptedDoor(submit_s=1.0)
    played = await play(trace(*(asked(0.0, lane=Lane.BATCH) for _ in range(4 * SUBMISSIONS)), asked(0.5)), door)
    assert Counter(played.asked_at_s) == {0.0: SUBMISSIONS, 0.5: 1} | {float(s): SUBMISSIONS for s in (1, 2, 3)}
    keeping = played.player.notes.keeping()
    assert (keeping.starts, keeping.late_most_s, keeping.lower_late_most_s) == (1, 0.0, 3.0)


async def test_callers_who_were_refused_keep_no_other_from_asking():
    door = ScriptedDoor(refusals=[LaneSaturated(retry_after_s=100.0) for _ in range(SUBMISSIONS)])
    played = await play(
        trace(*(asked(0.0, lane=Lane.BATCH) for _ in range(SUBMISSIONS)), asked(1.0, lane=Lane.BATCH)), door
    )
    assert played.asked_at_s[SUBMISSIONS] == 1.0
    assert set(played.asked_at_s[SUBMISSIONS + 1 :]) == {100.0}


@pytest.mark.parametrize(
    ("state", "end"),
    [(JobState.EXPIRED, End.EXPIRED), (JobState.FAILED, End.FAILED), (JobState.CANCELLED, End.FAILED)],
)
async def test_a_job_ends_for_its_caller_as_its_record_says(state: JobState, end: End):
    assert (await play(trace(asked(lane=Lane.BATCH)), ScriptedDoor(state=state))).ends == [end]


# --- what is asked -----------------------------------------------------------------------------------


async def test_a_request_carries_the_traces_contract_and_the_answers_length():
    played = await play(
        trace(asked(prompt_tokens=9, output_tokens=4, ttft_s=0.5, tpot_s=0.03, deadline_s=20.0), asked(lane=Lane.BATCH))
    )
    (_, first), (_, second) = played.door.calls
    assert (first["lane"], first["max_tokens"], first["ignore_eos"], len(first["prompt"])) == (
        Lane.PRIORITY,
        4,
        True,
        9,
    )
    assert (first["ttft_target_s"], first["tpot_target_s"]) == (0.5, 0.03)
    assert first["deadline_s"] == pytest.approx(20.0, abs=0.01)
    assert first["labels"] == {LABEL: "run"}
    assert second["lane"] is Lane.BATCH
    assert "session_id" not in second


async def test_a_retry_has_what_is_left_of_the_deadline():
    door = ScriptedDoor(refusals=[LaneSaturated(retry_after_s=3.0)])
    played = await play(trace(asked(deadline_s=20.0)), door)
    assert [round(request["deadline_s"], 3) for _, request in played.door.calls] == [20.0, 17.0]


async def test_each_tenant_calls_through_its_own_door():
    played = trace(asked(tenant="b"), asked(tenant="a"))
    doors = [ScriptedDoor(), ScriptedDoor()]
    manner = Manner(model="chat", run="run", ignore_eos=True, draw=lambda: 0.5)
    prompts = Prompts(played, letters(), block_salt="", own_salt="")
    await Player(played, prompts, doors, manner).play(asyncio.get_running_loop().time())
    assert [door.calls[0][1]["prompt"] for door in doors] == [prompts.text(1), prompts.text(0)]


# --- an early end ------------------------------------------------------------------------------------


async def test_a_stopped_replay_closes_what_is_open_and_keeps_what_has_ended():
    door = ScriptedDoor()
    player = made(trace(asked(0.0, output_tokens=1), asked(0.5, output_tokens=100), asked(500.0)), door)
    begin_s = asyncio.get_running_loop().time()
    async with asyncio.TaskGroup() as group:
        playing = group.create_task(player.play(begin_s))
        await asyncio.sleep(10.0)
        player.stop()
        await playing
    assert door.open == 0
    assert player.notes.outcomes.end.tolist() == [End.DONE, End.OPEN, End.OPEN]
    assert np.isnan(player.notes.outcomes.asked_s).tolist() == [False, False, True]
    assert asyncio.get_running_loop().time() - begin_s == pytest.approx(10.0)


# --- the fleet ---------------------------------------------------------------------------------------

WORKER = Worker(
    "w-1",
    "w",
    "pool",
    "simulated",
    "READY",
    "",
    8,
    0,
    1000,
    250,
    0.0,
    0.0,
    0.0,
    0.0,
    0,
    0,
    (),
    busy_s=0.0,
    process_id=1,
)


class ScriptedScheduler:
    """Two workers of the pool, one busy half of its time and one always, and one of another pool."""

    def __init__(self) -> None:
        self.away = False

    async def list_workers(self) -> AsyncIterator[Worker]:
        if self.away:
            raise Unavailable
        now_s = asyncio.get_running_loop().time()
        yield replace(WORKER, busy_s=now_s)
        yield replace(WORKER, worker_id="w-2", busy_s=now_s / 2, kv_tokens_used=750)
        yield replace(WORKER, worker_id="w-3", pool="another", busy_s=now_s)

    async def list_lanes(self) -> AsyncIterator[LaneStatus]:
        yield LaneStatus(Lane.BATCH, "pool", False, 3, 1, 4, 0, 0.0, 0)
        yield LaneStatus(Lane.BATCH, "another", False, 3, 1, 4, 0, 0.0, 0)


async def test_a_row_of_usage_tells_what_the_pools_workers_did_and_what_callers_got():
    notes, scheduler = Notes(trace(asked(output_tokens=9))), ScriptedScheduler()
    watch = FleetWatch(scheduler, frozenset({"pool"}), notes, every_s=5.0)
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch.run(asyncio.get_running_loop().time()))
        await asyncio.sleep(3.0)
        notes.heard(0, 9, 3.0)
        await asyncio.sleep(8.0)
        scheduler.away = True
        await asyncio.sleep(5.0)
        watching.cancel()
    usage = watch.usage()
    assert usage.workers.tolist() == [2.0, 2.0, 2.0]
    assert usage.busy[:2] == pytest.approx([0.75, 0.75])
    assert math.isnan(usage.busy[2])
    assert usage.kv.tolist() == [0.5, 0.5, 0.5]
    assert usage.tokens.tolist() == [[9.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert usage.waiting.tolist() == [[0.0, 0.0, 7.0]] * 3
    assert watch.trouble is not None
