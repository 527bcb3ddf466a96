"""Dead letters as values: whose they are, what they say, and the request that they become again."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from laneway.core import ids, subjects
from laneway.core.catalogue import Capabilities, Catalogue
from laneway.core.dead_letters import POISON, TASK_LOST, UNREADABLE_JOB, DeadLetter, given_up
from laneway.core.errors import Code
from laneway.core.job import Attempt, GenerateTask, JobError, JobRecord, LaneJob, Sampling
from laneway.core.lanes import JobState, Lane, OnDisconnect
from laneway.core.prompt import TokenPrompt
from laneway.runtime.rights import Role, service_rights
from laneway.runtime.settings import PolicySettings
from laneway.runtime.wire.dead_letters import (
    dead_letter_to_proto,
    decode_dead_letter,
    encode_dead_letter,
    requeue_spec,
)
from laneway.runtime.wire.reading import UnreadableMessage
from laneway.runtime.wire.records import encode_lane_job
from laneway.runtime.wire.requests import parse_spec
from laneway.v1 import bus_pb2
from tests.support.nats import make_job, make_record, small_catalogue

NOW_S = 1_800_000_000.25
OLD = "local-01900000-0000-7000-8000-000000000001"


def dead(reason: str = POISON, **changes: object) -> JobRecord:
    record = make_record(OLD, Lane.BATCH)
    lineage = tuple(Attempt(n, 0, f"w{n}", NOW_S + n) for n in (1, 2, 3))
    record = replace(record, starts=3, attempt=3, lineage=lineage, state=JobState.FAILED)
    record = replace(record, error=JobError(Code.INTERNAL, reason, "3 attempts ended without a result"))
    timings = replace(record.timings, created_s=NOW_S, ended_s=NOW_S + 9.0)
    return replace(record, contract=replace(record.contract, deadline_s=NOW_S + 60.0), timings=timings, **changes)


@pytest.mark.parametrize(("reason", "requeueable"), [(POISON, True), (UNREADABLE_JOB, True), (TASK_LOST, False)])
def test_what_workers_give_up_is_dead(reason: str, requeueable: bool):
    assert given_up(dead(reason))
    letter = DeadLetter(dead(reason), make_job(make_record()), NOW_S)
    assert letter.requeueable is dead_letter_to_proto(letter).requeueable is requeueable


@pytest.mark.parametrize(
    "record",
    [
        make_record(),
        replace(dead(), state=JobState.EXPIRED),
        replace(dead(), error=JobError(Code.INTERNAL, "ENGINE_FAILED", "")),
        replace(dead(), error=JobError(Code.INVALID_ARGUMENT, "CONTEXT_EXCEEDED", "")),
        replace(dead(), state=JobState.SUCCEEDED, error=None),
    ],
)
def test_every_other_end_is_its_callers_business(record: JobRecord):
    assert not given_up(record)


def test_a_letter_keeps_the_record_and_the_job_as_it_was_delivered():
    record = dead(requeued_from="local-before")
    job = make_job(make_record(OLD, Lane.BATCH))
    letter = decode_dead_letter(encode_dead_letter(record, encode_lane_job(job), NOW_S + 9.0))
    assert letter == DeadLetter(record, job, NOW_S + 9.0)
    assert (letter.reason, letter.span_s) == (POISON, 60.0)
    shown = dead_letter_to_proto(letter)
    assert [(a.attempt, a.worker_id) for a in shown.attempts] == [(1, "w1"), (2, "w2"), (3, "w3")]
    assert (shown.job_id, shown.tenant, shown.reason, shown.requeued_from) == (OLD, "acme", POISON, "local-before")
    assert shown.requeueable


@pytest.mark.parametrize("message", [b"", b"\xff\xff not a job", b"\x12\x02\xff\xff"])
def test_a_job_that_cannot_be_read_leaves_a_letter_without_it(message: bytes):
    data = encode_dead_letter(dead(UNREADABLE_JOB), message, NOW_S)
    letter = decode_dead_letter(data)
    assert letter.job is None
    assert not dead_letter_to_proto(letter).requeueable
    assert not bus_pb2.StoredDeadLetter.FromString(data).HasField("message")


@pytest.mark.parametrize("readable", [True, False])
def test_a_list_does_without_the_prompts_and_says_the_same_of_them(readable: bool):
    task = bus_pb2.LaneMessage.FromString(encode_lane_job(make_job(make_record(OLD))))
    task.task.tokens.ids[:] = range(50_000)
    if not readable:
        task.schema = 99
    data = encode_dead_letter(dead(), task.SerializeToString(), NOW_S)
    listed, whole = decode_dead_letter(data, listed=True), decode_dead_letter(data)
    assert listed.job is None
    assert listed.requeueable is whole.requeueable is readable
    assert dead_letter_to_proto(listed) == dead_letter_to_proto(whole)


def test_a_job_of_a_later_release_stays_in_its_letter_for_that_release():
    message = bus_pb2.LaneMessage.FromString(encode_lane_job(make_job(make_record(OLD))))
    message.schema = 99
    data = encode_dead_letter(dead(UNREADABLE_JOB), message.SerializeToString(), NOW_S)
    assert decode_dead_letter(data).job is None
    assert bus_pb2.StoredDeadLetter.FromString(data).message.schema == 99


def test_a_letter_of_a_later_release_is_told_from_a_broken_one():
    later = bus_pb2.StoredDeadLetter.FromString(encode_dead_letter(dead(), b"", NOW_S))
    later.schema = 99
    for data in (later.SerializeToString(), b"\xff\xff"):
        with pytest.raises(UnreadableMessage, match="dead letter"):
            decode_dead_letter(data)


# --- running it again --------------------------------------------------------------------------------

ABLE = Capabilities(
    logprobs=True, top_logprobs=5, min_p=True, seed=True, penalties=True, logit_bias=True, n=4, min_tokens=True,
    json_schema=True, adapters=True, cache_salt=True,
)  # fmt: skip
TASKS = [
    GenerateTask((72, 105, 33), Sampling(max_tokens=16)),
    GenerateTask((72,), Sampling(max_tokens=16, temperature=0.0)),
    GenerateTask(
        (72, 105),
        Sampling(
            max_tokens=16, temperature=0.5, top_p=0.75, top_k=40, min_p=0.125, seed=7, stop=("\n\n",),
            stop_token_ids=(0, 1), logprobs=True, top_logprobs=2, repetition_penalty=1.25, presence_penalty=0.5,
            frequency_penalty=-0.5, logit_bias={72: 1.5}, n=2, min_tokens=1, ignore_eos=True,
        ),
        json_schema='{"type":"object"}',
        adapter="legal",
        cache_salt="acme-1",
    ),
]  # fmt: skip


@pytest.mark.parametrize("task", TASKS)
def test_what_is_submitted_again_is_the_task_as_it_was(task: GenerateTask):
    """Through the parser of every request: prompt, sampling and format come out as they were accepted."""
    pool = replace(small_catalogue().pools[0], capabilities=ABLE)
    spec = requeue_spec(dead(), task, NOW_S + 100.0)
    parsed = parse_spec(spec, Catalogue((pool,)), NOW_S, PolicySettings(), attached=False)
    assert parsed.prompt == TokenPrompt(task.prompt_ids)
    assert parsed.task_of(pool, task.prompt_ids, task.sampling.max_tokens) == task


def test_the_contract_is_as_it_was_but_for_its_times_and_a_caller_who_is_gone():
    record = dead()
    contract = replace(
        record.contract, not_before_s=NOW_S + 5.0, labels={"a": "b"}, on_disconnect=OnDisconnect.CANCEL, cost_max=2.0
    )
    spec = requeue_spec(replace(record, contract=contract), TASKS[0], NOW_S + 100.0)
    parsed = parse_spec(spec, small_catalogue(), NOW_S, PolicySettings(), attached=False)
    expected = replace(contract, deadline_s=NOW_S + 100.0, not_before_s=0.0, on_disconnect=OnDisconnect.KEEP)
    assert parsed.contract == expected


def test_a_requeue_has_one_id_that_no_key_of_a_caller_gives():
    mine = ids.requeued_job_id("eu", "acme", OLD)
    assert mine == ids.requeued_job_id("eu", "acme", OLD)
    others = [
        ids.requeued_job_id("us", "acme", OLD),
        ids.requeued_job_id("eu", "other", OLD),
        ids.requeued_job_id("eu", "acme", mine),
        *(ids.keyed_job_id("eu", tenant, key) for tenant in ("acme", "requeue") for key in (OLD, f"acme {OLD}")),
    ]
    assert mine not in others
    assert len(set(others)) == len(others)
    assert ids.job_region(mine) == "eu"


def test_subjects_of_dead_letters():
    assert subjects.dead_letter("eu", Lane.BATCH, POISON, OLD) == f"dead.eu.batch.POISON.{OLD}"
    assert subjects.dead_letters("eu") == "dead.eu.*.*.*"
    assert subjects.dead_letters("eu", Lane.BATCH, POISON, OLD) == f"dead.eu.batch.POISON.{OLD}"
    assert subjects.dead_letters("eu", reason=POISON) == "dead.eu.*.POISON.*"


def test_workers_write_dead_letters_and_admission_reads_and_removes_them():
    worker, admission = (service_rights(role, "eu").publish for role in (Role.WORKER, Role.ADMISSION))
    reading = {f"$JS.API.STREAM.{verb}.DEAD_eu" for verb in ("INFO", "MSG.GET", "PURGE")}
    assert "dead.eu.*.*.*" in worker
    assert not reading & set(worker)
    assert reading <= set(admission)
    assert not any(subject.startswith("dead.") for subject in admission)


def test_the_job_in_a_letter_is_the_delivered_one():
    job = LaneJob(make_record(OLD, Lane.BATCH), TASKS[2])
    assert decode_dead_letter(encode_dead_letter(dead(), encode_lane_job(job), NOW_S)).job == job
