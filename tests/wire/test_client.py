"""The typed client against a scripted door on a real gRPC connection."""

import asyncio
from datetime import UTC, datetime
from typing import Any

import grpc
import pytest

from laneway.client import (
    BrokenStream,
    Client,
    DeadlineExceeded,
    InvalidRequest,
    JobCancelled,
    JobState,
    Lane,
    LaneSaturated,
    Message,
    NotFound,
    OutcomeUnknown,
    RetryParams,
    Surroundings,
    Unavailable,
)
from laneway.client.channel import KEEPALIVE_S
from laneway.core.clock import ManualClock
from laneway.core.errors import Aborted
from laneway.core.lanes import FinishReason, Phase
from laneway.runtime.settings import GrpcSettings
from laneway.v1 import admission_pb2, common_pb2, task_pb2
from tests.support.door import Door, accepted, chunk, finished, forever, serving, words

pytestmark = pytest.mark.wire


class Time:
    """Virtual time for the client: a sleep moves the clock and is kept."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.clock.advance(seconds)

    @property
    def surroundings(self) -> Surroundings:
        return Surroundings(self.clock, self.sleep, lambda: 0.5)


def answering(*answer: str):
    return lambda request, context: words(*answer)


def refusing(error: Exception):
    async def script(request, context):
        raise error
        yield

    return script


async def test_a_stream_gives_the_verdict_then_chunks_in_order_then_the_end():
    async with serving(Door([answering("Hel", "lo", "!")])) as door, Client(door.address) as client:
        async with client.generate(model="chat", prompt="Hi", max_tokens=3) as stream:
            assert stream.job_id == "local-job"
            assert stream.verdict is not None
            assert stream.verdict.reason == "LANE_OPEN"
            chunks = [c async for c in stream]
        assert [c.first_index for c in chunks] == [0, 1, 2]
        assert "".join(c.text for c in chunks) == "Hello!"
        end = stream.finished
        assert end.finish_reason is FinishReason.STOP
        assert end.usage.completion_tokens == 3
        assert end.ttft_s is not None
        assert end.tpot_s is not None
        assert 0.0 <= end.ttft_s <= end.total_s
        assert end.tpot_s <= end.stall_s <= end.total_s
        assert not door.gone.is_set(), "a stream that ended by itself was not cancelled"


async def test_text_collects_the_whole_answer_and_several_answers():
    async def two(request, context):
        yield accepted()
        yield chunk(0, "a", output=0)
        yield chunk(0, "x", "y", output=1)
        yield chunk(1, "b", output=0)
        yield finished()

    async with serving(Door([answering("a", "b"), two])) as door, Client(door.address) as client:
        async with client.generate(model="chat", prompt="Hi") as stream:
            assert not stream.ended
            with pytest.raises(RuntimeError, match="not ended"):
                _ = stream.finished
            assert await stream.text() == "ab"
            assert stream.ended
        async with client.generate(model="chat", prompt="Hi", n=2) as stream:
            assert await stream.texts() == {0: "ab", 1: "xy"}


@pytest.mark.parametrize("leave", ["break", "raise", "before the first chunk"])
async def test_leaving_the_block_ends_the_call(leave: str):
    async def endless(request, context):
        yield accepted()
        yield chunk(0, "a")
        await forever()

    async with serving(Door([endless])) as door, Client(door.address) as client:
        try:
            async with client.generate(model="chat", prompt="Hi") as stream:
                if leave != "before the first chunk":
                    async for _ in stream:
                        if leave == "raise":
                            raise KeyError("the caller's own")
                        break
        except KeyError:
            assert leave == "raise"
        await asyncio.wait_for(door.gone.wait(), 5)


async def test_a_cancelled_caller_ends_the_call():
    started = asyncio.Event()

    async def silent(request, context):
        yield accepted()
        started.set()
        await forever()

    async def caller(client: Client):
        async with client.generate(model="chat", prompt="Hi") as stream:
            await stream.text()

    async with serving(Door([silent])) as door, Client(door.address) as client:
        task = asyncio.ensure_future(caller(client))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(door.gone.wait(), 5)


async def test_every_field_of_a_request_arrives():
    async with serving(Door([answering("a")])) as door, Client(door.address, token="secret") as client:
        async with client.generate(
            model="chat/small",
            messages=[Message("system", "Be brief."), {"role": "user", "content": "Hi"}],
            lane="deferrable",
            max_tokens=5,
            temperature=0.0,
            top_p=0.9,
            stop=["\n"],
            logit_bias={3: -1.0},
            seed=0,
            logprobs=True,
            json_schema="{}",
            deadline_at=datetime(2030, 1, 1, tzinfo=UTC),
            ttft_target_s=0.5,
            cost_max=0.0,
            regions=["local"],
            labels={"team": "a"},
            idempotency_key="mine",
        ) as stream:
            await stream.text()
        (request,) = door.calls
    spec = request.spec
    assert request.idempotency_key == "mine"
    assert spec.model == "chat/small"
    assert [m.role for m in spec.generate.chat.messages] == ["system", "user"]
    assert spec.generate.chat.messages[1].parts[0].text == "Hi"
    sampling = spec.generate.sampling
    assert sampling.HasField("temperature")
    assert sampling.HasField("seed")
    assert not sampling.HasField("top_k")
    assert list(sampling.stop) == ["\n"]
    assert dict(sampling.logit_bias) == {3: -1.0}
    assert spec.generate.response_format.json_schema == "{}"
    assert spec.contract.lane == common_pb2.LANE_DEFERRABLE
    assert spec.contract.deadline.ToDatetime(UTC) == datetime(2030, 1, 1, tzinfo=UTC)
    assert spec.contract.ttft_target.ToMilliseconds() == 500
    assert spec.contract.HasField("cost_max")
    assert dict(spec.contract.labels) == {"team": "a"}


# --- errors ----------------------------------------------------------------------------------------


async def test_an_error_says_what_to_do_about_it():
    async with serving(Door()) as door, Client(door.address) as client:
        door.scripts = [
            refusing(InvalidRequest("temperature must be 0 to 2", field="spec.generate.sampling.temperature"))
        ]
        with pytest.raises(InvalidRequest) as invalid:
            async with client.generate(model="chat", prompt="Hi"):
                pass
        assert invalid.value.field == "spec.generate.sampling.temperature"

        async def late(request, context):
            yield accepted()
            raise DeadlineExceeded("the deadline passed", phase=Phase.QUEUE)

        door.scripts = [late]
        with pytest.raises(DeadlineExceeded) as expired:
            async with client.generate(model="chat", prompt="Hi") as stream:
                await stream.text()
        assert expired.value.phase is Phase.QUEUE
        assert expired.value.job_id == "local-job"


async def test_a_job_that_somebody_cancelled_ends_as_an_error_and_not_as_a_cancelled_task():
    async def cancelled(request, context):
        yield accepted()
        raise JobCancelled("the job was cancelled")

    async with serving(Door([cancelled])) as door, Client(door.address) as client:
        with pytest.raises(JobCancelled):
            async with client.generate(model="chat", prompt="Hi") as stream:
                await stream.text()


async def test_a_chunk_out_of_order_is_an_error():
    async def gap(request, context):
        yield accepted()
        yield chunk(0, "a")
        yield chunk(2, "c")

    async with serving(Door([gap])) as door, Client(door.address) as client:
        with pytest.raises(BrokenStream):
            async with client.generate(model="chat", prompt="Hi") as stream:
                await stream.text()


async def test_an_end_without_a_result_is_an_error():
    async def empty(request, context):
        yield accepted()

    async with serving(Door([empty])) as door, Client(door.address) as client:
        with pytest.raises(BrokenStream):
            async with client.generate(model="chat", prompt="Hi") as stream:
                await stream.text()


async def test_arguments_that_no_message_can_carry_are_refused_at_once():
    wrong: list[dict[str, Any]] = [{}, {"prompt": "", "token_ids": [1]}, {"prompt": "", "lane": "fast"}]
    async with Client("127.0.0.1:1") as client:
        for bad in wrong:
            with pytest.raises(InvalidRequest):
                client.generate(model="chat", **bad)
            with pytest.raises(InvalidRequest):
                await client.submit(model="chat", **bad)
            with pytest.raises(InvalidRequest):
                await client.quote(model="chat", **bad)


# --- deadlines -------------------------------------------------------------------------------------


async def test_a_time_limit_becomes_the_calls_deadline_and_ends_it():
    async def silent(request, context):
        yield accepted()
        await forever()

    async with serving(Door([silent])) as door, Client(door.address) as client:
        with pytest.raises(DeadlineExceeded):
            async with client.generate(model="chat", prompt="Hi", timeout_s=0.3) as stream:
                await stream.text()
        (left_s,) = door.time_left_s
        assert left_s is not None
        assert 0.0 < left_s < 1.0  # gRPC rounds a time limit up
        await asyncio.wait_for(door.gone.wait(), 5)


async def test_calls_with_one_answer_have_a_limit_even_if_the_caller_names_none():
    async with serving(Door()) as door, Client(door.address) as client:
        await client.submit(model="chat", prompt="Hi")
        (left_s,) = door.time_left_s
        assert left_s is not None
        assert left_s < 11.0  # gRPC rounds a time limit up


# --- retries ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lane", "attempts"), [("priority", 2), ("deferrable", 4)])
async def test_no_attempt_comes_before_the_delay_and_attempts_are_bounded(lane: str, attempts: int):
    time = Time()
    seen: list[float] = []

    async def full(request, context):
        seen.append(time.clock.monotonic())
        raise LaneSaturated("full", retry_after_s=7.0)
        yield

    async with (
        serving(Door([full])) as door,
        Client(door.address, surroundings=time.surroundings) as client,
    ):
        with pytest.raises(LaneSaturated) as refused:
            async with client.generate(model="chat", prompt="Hi", lane=lane):
                pass
    assert refused.value.retry_after_s == 7.0
    assert seen == [7.0 * n for n in range(attempts)]
    keys = [call.idempotency_key for call in door.calls]
    assert len(set(keys)) == attempts, "a refused key is not used again"


async def test_no_attempt_that_cannot_end_before_the_deadline():
    time = Time()
    async with (
        serving(Door([refusing(LaneSaturated(retry_after_s=7.0))])) as door,
        Client(door.address, surroundings=time.surroundings) as client,
    ):
        with pytest.raises(LaneSaturated):
            async with client.generate(model="chat", prompt="Hi", lane="deferrable", deadline_s=10.0):
                pass
        assert len(door.calls) == 2  # at 0 s and 7 s; 14 s is too late
        with pytest.raises(LaneSaturated):
            async with client.generate(model="chat", prompt="Hi", lane="deferrable", timeout_s=6.0):
                pass
        assert len(door.calls) == 3


async def test_a_caller_may_allow_less_time_for_retries_or_none():
    full = LaneSaturated(retry_after_s=7.0)
    time = Time()
    async with (
        serving(Door([refusing(full)], submits=[full])) as door,
        Client(door.address, surroundings=time.surroundings) as client,
    ):
        with pytest.raises(LaneSaturated):
            await client.submit(model="chat", prompt="Hi", retry_s_max=0.0)
        with pytest.raises(LaneSaturated):
            async with client.generate(model="chat", prompt="Hi", retry_s_max=6.9):
                pass
        assert (len(door.submitted), len(door.calls)) == (1, 1)
        assert time.slept == []


async def test_an_unknown_outcome_is_asked_again_with_the_same_key():
    time = Time()
    unknown = OutcomeUnknown(retry_after_s=0.5)
    async with (
        serving(Door(submits=[unknown, None])) as door,
        Client(door.address, surroundings=time.surroundings) as client,
    ):
        submitted = await client.submit(model="chat", prompt="Hi")
        assert submitted.job_id == "local-job"
        first, second = door.submitted
        assert first.idempotency_key == second.idempotency_key != ""
        assert first == second


async def test_an_unknown_outcome_without_a_key_is_the_callers_to_resolve():
    async with serving(Door(submits=[OutcomeUnknown(retry_after_s=0.5)])) as door, Client(door.address) as client:
        with pytest.raises(OutcomeUnknown):
            await client.submit(model="chat", prompt="Hi", idempotency_key="")
        assert len(door.submitted) == 1


async def test_a_run_that_gave_a_token_is_never_begun_again():
    async def dies(request, context):
        yield accepted()
        yield chunk(0, "a")
        raise Unavailable("the door is going down", retry_after_s=0.1)

    time = Time()
    async with (
        serving(Door([dies])) as door,
        Client(door.address, surroundings=time.surroundings) as client,
    ):
        async with client.generate(model="chat", prompt="Hi") as stream:
            assert (await anext(stream)).text == "a"
            with pytest.raises(Unavailable):
                await anext(stream)
        assert len(door.calls) == 1
        assert time.slept == []


async def test_what_cannot_succeed_is_not_retried():
    async with serving(Door([refusing(Aborted())])) as door, Client(door.address) as client:
        with pytest.raises(Aborted):
            async with client.generate(model="chat", prompt="Hi"):
                pass
        assert len(door.calls) == 1


async def test_a_storm_of_failures_adds_a_bounded_share_of_retries():
    time = Time()
    async with (
        serving(Door([refusing(Unavailable(retry_after_s=0.0))])) as door,
        Client(door.address, surroundings=time.surroundings) as client,
    ):
        for _ in range(100):
            with pytest.raises(Unavailable):
                async with client.generate(model="chat", prompt="Hi"):
                    pass
        # 100 first attempts earn 10 retries, and a fresh budget holds 10
        assert len(door.calls) == 120


async def test_no_door_at_all_is_unavailable_after_the_attempts_of_the_lane():
    time = Time()
    async with Client("127.0.0.1:1", surroundings=time.surroundings) as client:
        with pytest.raises(Unavailable, match=r"^no service answers at 127\.0\.0\.1:1$") as caught:
            async with client.generate(model="chat", prompt="Hi"):
                pass
        assert caught.value.reason == "NO_SERVICE"
        assert "failed to connect" in caught.value.facts["transport"]
        with pytest.raises(Unavailable, match="no service answers"):
            await client.get_job("local-job")
    assert time.slept[0] == pytest.approx(0.1)  # half of the first ceiling


async def test_a_connection_that_breaks_is_told_apart_from_none_and_from_what_a_service_says():
    async def breaks(request, context):
        yield accepted()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    async with (
        serving(Door([breaks, refusing(Unavailable("full"))])) as door,
        Client(door.address, retry_budget=RetryParams.never()) as client,
    ):
        with pytest.raises(Unavailable, match=f"^the connection to {door.address} broke: Socket closed$") as caught:
            async with client.generate(model="chat", prompt="Hi") as stream:
                await stream.text()
        assert caught.value.reason == "CONNECTION_LOST"
        with pytest.raises(Unavailable, match="full") as caught:
            async with client.generate(model="chat", prompt="Hi"):
                pass
        assert (caught.value.reason, caught.value.facts) == ("UNAVAILABLE", {})


# --- following -------------------------------------------------------------------------------------


async def test_a_watch_goes_on_where_its_connection_broke():
    async def breaks(request, context):
        yield chunk(4, "a", "b")
        await context.abort(grpc.StatusCode.UNAVAILABLE, "connection lost")

    async def rest(request, context):
        yield chunk(request.from_index, "c")
        yield finished()

    time = Time()
    async with (
        serving(Door(watches=[breaks, rest])) as door,
        Client(door.address, surroundings=time.surroundings) as client,
    ):
        async with client.watch("local-job", from_index=4) as stream:
            assert await stream.text() == "abc"
        assert [w.from_index for w in door.watched] == [4, 6]


async def test_a_kept_job_is_followed_when_its_stream_breaks():
    async def breaks(request, context):
        yield accepted()
        yield chunk(0, "a")
        await context.abort(grpc.StatusCode.UNAVAILABLE, "connection lost")

    async def rest(request, context):
        yield chunk(request.from_index, "b")
        yield finished()

    time = Time()
    async with (
        serving(Door([breaks], watches=[rest])) as door,
        Client(door.address, surroundings=time.surroundings) as client,
    ):
        async with client.generate(model="chat", prompt="Hi", on_disconnect="keep") as stream:
            assert await stream.text() == "ab"
        assert len(door.calls) == 1
        assert [len(w.delivered_ids) for w in door.watched] == [1], "it says what it has"


async def test_wait_gives_the_job_whatever_its_end():
    job = admission_pb2.Job(
        job_id="local-job",
        state=common_pb2.JOB_STATE_FAILED,
        error=common_pb2.JobError(code=13, reason="ENGINE_FAILED", message="broken"),
    )
    async with serving(Door(watches=[refusing(Aborted())], jobs=[job])) as door, Client(door.address) as client:
        found = await client.wait("local-job")
        assert found.state is JobState.FAILED
        assert found.error is not None
        assert found.error.reason == "ENGINE_FAILED"
        door.watches = [refusing(NotFound())]
        with pytest.raises(NotFound):
            await client.wait("local-none")


# --- other calls -----------------------------------------------------------------------------------


async def test_a_list_runs_over_all_pages_and_asks_no_more_than_needed():
    jobs = [admission_pb2.Job(job_id=f"local-{n}", state=common_pb2.JOB_STATE_WAITING) for n in range(250)]
    async with serving(Door(jobs=jobs)) as door, Client(door.address) as client:
        assert [j.job_id async for j in client.list_jobs()] == [f"local-{n}" for n in range(250)]
        assert [r.page_token for r in door.listed] == ["", "100", "200"]
        door.listed.clear()
        some = [j async for j in client.list_jobs(limit=3, lane=Lane.BATCH, state=JobState.RUNNING, labels={"a": "b"})]
        assert len(some) == 3
        (asked,) = door.listed
        assert (asked.page_size, asked.lane, asked.state) == (3, common_pb2.LANE_BATCH, common_pb2.JOB_STATE_RUNNING)


async def test_look_up_cancel_and_quote():
    job = admission_pb2.Job(
        job_id="local-job",
        state=common_pb2.JOB_STATE_SUCCEEDED,
        result=task_pb2.Result(text="Hi", token_ids=[1], text_lengths=[2], finish_reason=common_pb2.FINISH_REASON_STOP),
    )
    async with serving(Door(jobs=[job])) as door, Client(door.address) as client:
        found = await client.get_job("local-job")
        assert found.result is not None
        assert found.result.text == "Hi"
        assert (await client.cancel("local-job")).state is JobState.CANCELLED
        quote = await client.quote(model="chat", prompt="Hi", max_tokens=9)
        assert (quote.prompt_tokens, quote.max_tokens) == (7, 9)
        with pytest.raises(NotFound):
            await client.get_job("local-none")


# --- keepalive -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("permit_s", "lives"), [(0.5, True), (60.0, False)])
async def test_a_silent_stream_outlives_pings_that_the_server_permits(permit_s: float, lives: bool):
    """The ratio of the defaults (ping each 10 s, 5 s permitted) at a tenth of the time. The second case shows that the
    first one would notice."""
    pause = asyncio.Event()

    async def silent(request, context):
        yield accepted()
        await pause.wait()
        yield chunk(0, "a")
        yield finished()

    async with (
        serving(Door([silent]), GrpcSettings(keepalive_permit_s=permit_s)) as door,
        Client(door.address, keepalive_s=1.0, retry_budget=RetryParams.never()) as client,
        client.generate(model="chat", prompt="Hi") as stream,
    ):
        asyncio.get_running_loop().call_later(5.0, pause.set)  # after the third ping too many
        if lives:
            assert await stream.text() == "a"
        else:
            with pytest.raises(Unavailable, match="Too many pings"):
                await stream.text()


def test_the_defaults_of_client_and_server_fit():
    assert 2 * GrpcSettings().keepalive_permit_s <= KEEPALIVE_S
