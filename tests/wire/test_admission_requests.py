"""What is wrong with a request is said by status and field, harms nothing, and a key makes a request repeatable."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from laneway.core.errors import AlreadyExists, Infeasible, InvalidRequest, LaneSaturated, RegionNotAllowed, Unsupported
from laneway.core.lanes import JobState, Lane
from laneway.runtime.local_nats import LocalNats
from laneway.v1 import admission_pb2 as pb
from laneway.v1 import common_pb2, task_pb2
from tests.support.admission import (
    Gate,
    PuppetWorker,
    admission_settings,
    error_of_call,
    generate,
    open_gate,
    opening,
    rest,
    spec,
    text_of,
)

INF, NAN = float("inf"), float("nan")


@pytest.fixture
async def opened(nats_server: LocalNats, tmp_path: Path) -> AsyncIterator[tuple[Gate, PuppetWorker]]:
    async with open_gate(nats_server, tmp_path) as both:
        yield both


def sampled(**sampling) -> task_pb2.JobSpec:
    wanted = spec()
    wanted.generate.sampling.CopyFrom(task_pb2.Sampling(**sampling))
    return wanted


def prompted(**prompt) -> task_pb2.JobSpec:
    return task_pb2.JobSpec(model="chat", generate=task_pb2.GenerateTask(**prompt))


def chat(*messages: tuple[str, str]) -> task_pb2.JobSpec:
    return prompted(
        chat=task_pb2.ChatPrompt(
            messages=[task_pb2.ChatMessage(role=r, parts=[task_pb2.ContentPart(text=t)]) for r, t in messages]
        )
    )


BAD = [
    (spec(model=""), InvalidRequest, "spec.model"),
    (spec(model="nothing"), InvalidRequest, "spec.model"),
    (spec(model="chat/huge"), InvalidRequest, "spec.model"),
    (spec(text=""), InvalidRequest, "spec.generate.text"),
    (spec(text="a\x00b"), InvalidRequest, "spec.generate.text"),
    (task_pb2.JobSpec(model="chat"), InvalidRequest, "spec.generate"),
    (prompted(), InvalidRequest, "spec.generate.prompt"),
    (chat(), InvalidRequest, "spec.generate.chat.messages"),
    (chat(("robot", "hi")), InvalidRequest, "spec.generate.chat.messages[0].role"),
    (prompted(tokens=task_pb2.TokenPrompt(ids=[260])), InvalidRequest, "spec.generate.tokens.ids[0]"),
    (prompted(tokens=task_pb2.TokenPrompt(ids=[1] * 1024)), InvalidRequest, "spec.generate.prompt"),
    (spec(text="x" * 1025), InvalidRequest, "spec.generate.prompt"),
    (spec(text="x" * 5000), InvalidRequest, "spec.generate.prompt"),
    (sampled(max_tokens=0), InvalidRequest, "spec.generate.sampling.max_tokens"),
    (sampled(max_tokens=1020), InvalidRequest, "spec.generate.sampling.max_tokens"),
    (sampled(max_tokens=2**31 - 1), InvalidRequest, "spec.generate.sampling.max_tokens"),
    (sampled(temperature=NAN), InvalidRequest, "spec.generate.sampling.temperature"),
    (sampled(temperature=INF), InvalidRequest, "spec.generate.sampling.temperature"),
    (sampled(temperature=-0.1), InvalidRequest, "spec.generate.sampling.temperature"),
    (sampled(top_p=NAN), InvalidRequest, "spec.generate.sampling.top_p"),
    (sampled(top_p=0.0), InvalidRequest, "spec.generate.sampling.top_p"),
    (sampled(stop=[""]), InvalidRequest, "spec.generate.sampling.stop[0]"),
    (sampled(min_tokens=20), InvalidRequest, "spec.generate.sampling.min_tokens"),
    (sampled(n=2), Unsupported, "spec.generate.sampling.n"),
    (spec(lane=None, least_tier="giant"), InvalidRequest, "spec.contract.least_tier"),
    (spec(cost_max=-1.0), InvalidRequest, "spec.contract.cost_max"),
    (spec(cost_max=NAN), InvalidRequest, "spec.contract.cost_max"),
    (spec(due_s=-5.0), InvalidRequest, "spec.contract.deadline"),
    (spec(due_s=31 * 86_400.0), InvalidRequest, "spec.contract.deadline"),
]


async def test_each_bad_request_names_its_field_and_the_next_one_is_served(opened: tuple[Gate, PuppetWorker]):
    door, worker = opened
    for wanted, kind, field in BAD:
        for _ in range(2):
            error = await error_of_call(door.stub.Generate(pb.GenerateRequest(spec=wanted)))
            assert (type(error), error.field) == (kind, field), f"{wanted} gave {error}"
            assert "xxx" not in error.message
        error = await error_of_call(door.stub.Submit(pb.SubmitRequest(spec=wanted)))
        assert (type(error), error.field) == (kind, field)
    assert await door.job_ids() == []
    assert await door.messages() == 0
    call = door.stub.Generate(generate())
    await opening(call)
    await worker.finish(await worker.take(), "ok")
    assert text_of(await rest(call)) == "ok"


async def test_what_can_never_be_kept_is_infeasible(opened: tuple[Gate, PuppetWorker]):
    door, _ = opened
    for wanted, kind, reason in [
        (spec(regions=["eu"]), RegionNotAllowed, "REGION_NOT_ALLOWED"),
        (spec(due_s=0.05), Infeasible, "DEADLINE_INFEASIBLE"),
    ]:
        error = await error_of_call(door.stub.Generate(pb.GenerateRequest(spec=wanted)))
        assert (type(error), error.reason, error.retry_after_s) == (kind, reason, None)
    assert await door.job_ids() == []


async def test_both_numbers_are_said_when_a_prompt_does_not_fit(opened: tuple[Gate, PuppetWorker]):
    door, worker = opened
    wanted = spec(text="x" * 1000)
    wanted.generate.sampling.max_tokens = 25
    error = await error_of_call(door.stub.Generate(pb.GenerateRequest(spec=wanted)))
    assert {"1000", "25", "1024"} <= set(error.facts.values())
    wanted.generate.sampling.max_tokens = 24
    call = door.stub.Generate(pb.GenerateRequest(spec=wanted))
    await opening(call)
    held = await worker.take()
    assert (held.record.prompt_tokens, held.record.max_tokens) == (1000, 24)
    call.cancel()


async def test_a_quote_counts_and_stores_nothing(opened: tuple[Gate, PuppetWorker]):
    door, _ = opened
    quote = await door.stub.Quote(pb.QuoteRequest(spec=spec(text="x" * 1000)))
    assert (quote.prompt_tokens, quote.max_tokens) == (1000, 16)
    assert quote.verdict.kind == common_pb2.VERDICT_KIND_ACCEPTED
    assert quote.verdict.completion_eta.ToSeconds() >= 1 or quote.verdict.completion_eta.nanos
    assert await door.job_ids() == []


async def test_a_bad_body_is_an_invalid_argument(opened: tuple[Gate, PuppetWorker]):
    door, _ = opened
    raw: Any = door.channel.unary_stream("/laneway.v1.AdmissionService/Generate")
    error = await error_of_call(raw(b"\xff\xff\xff"))
    assert isinstance(error, InvalidRequest)


# --- idempotency keys ------------------------------------------------------------------------------


async def test_the_same_key_and_body_is_the_same_job(opened: tuple[Gate, PuppetWorker]):
    door, worker = opened
    request = pb.SubmitRequest(spec=spec(lane=Lane.BATCH), idempotency_key="k1")
    answers = await asyncio.gather(*(door.stub.Submit(request) for _ in range(8)))
    assert len({answer.job_id for answer in answers}) == 1
    assert await door.messages() == 1
    await worker.finish(await worker.take(Lane.BATCH), "ok")
    again = await door.stub.Submit(request)
    assert again.job_id == answers[0].job_id
    assert await door.messages() == 0


async def test_the_same_key_with_another_body_is_a_conflict(opened: tuple[Gate, PuppetWorker]):
    door, worker = opened
    first = door.stub.Generate(generate(key="k1"))
    accepted = await opening(first)
    error = await error_of_call(door.stub.Generate(generate(text="Other", key="k1")))
    assert isinstance(error, AlreadyExists)
    assert error.job_id == accepted.job_id
    held = await worker.take()
    await worker.finish(held, "ok")
    assert text_of(await rest(first)) == "ok", "the conflict did not touch the first"


async def test_a_second_caller_with_the_key_gets_the_whole_answer(opened: tuple[Gate, PuppetWorker]):
    door, worker = opened
    first = door.stub.Generate(generate(key="k1"))
    accepted = await opening(first)
    held = await worker.take()
    await worker.send(held, 0, "ab")
    second = door.stub.Generate(generate(key="k1"))
    assert (await opening(second)).job_id == accepted.job_id
    await worker.send(held, 2, "c")
    first.cancel()  # somebody else is still listening: no reason to cancel
    await worker.finish(held, "abcd")
    assert text_of(await rest(second)) == "abcd"
    late = door.stub.Generate(generate(key="k1"))
    assert text_of(await rest(late)) == "abcd"
    assert (await door.record(accepted.job_id)).state is JobState.SUCCEEDED


async def test_an_accepted_key_is_answered_when_the_lane_has_filled_since(opened: tuple[Gate, PuppetWorker]):
    door, _ = opened
    request = pb.SubmitRequest(spec=spec(), idempotency_key="k1")
    answer = await door.stub.Submit(request)
    await door.plan(workers=0, free_slots=0)
    await door.quotes("NO_WORKER")
    assert (await door.stub.Submit(request)).job_id == answer.job_id


async def test_a_refused_key_may_try_again(nats_server: LocalNats, tmp_path: Path):
    settings = admission_settings(nats_server, slots=1, queue_length=1)
    async with open_gate(nats_server, tmp_path, settings) as (door, worker):
        request = pb.SubmitRequest(spec=spec(due_s=900.0), idempotency_key="k1")
        request.spec.contract.ttft_target.FromSeconds(600)
        for key in ("a", "b"):
            await door.stub.Submit(pb.SubmitRequest(spec=request.spec, idempotency_key=key))
        error = await error_of_call(door.stub.Submit(request))
        assert isinstance(error, LaneSaturated)
        assert (await door.record(error.job_id)).state is JobState.REFUSED
        await worker.finish(await worker.take(), "ok")
        answer = await door.stub.Submit(request)
        assert answer.job_id == error.job_id
        assert (await door.record(answer.job_id)).state is JobState.WAITING
