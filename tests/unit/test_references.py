"""What is said of a prompt or result that is in the object store instead, and how an answer is cut for its reader."""

from __future__ import annotations

import asyncio
import random
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from laneway.core import subjects
from laneway.core.errors import ObjectLost, ObjectStoreFull, StorageFull
from laneway.core.job import (
    SCHEMA,
    SCHEMA_BY_REFERENCE,
    GenerateTask,
    LaneJob,
    ReferredJob,
    Result,
    Sampling,
    TokenLogprob,
    Usage,
    answer_tokens,
    by_reference,
)
from laneway.core.lanes import FinishReason, JobState
from laneway.core.objects import TASK, ObjectName, ObjectRef, result_kind
from laneway.runtime.objects import ObjectStore
from laneway.runtime.references import References, is_whole
from laneway.runtime.wire.chunks import PIECE_BYTES_MAX, merged, piece_ids, rest_of
from laneway.runtime.wire.records import (
    decode_lane_job,
    decode_record,
    decode_result,
    decode_task,
    encode_lane_job,
    encode_record,
    encode_result,
    encode_task,
)
from laneway.runtime.wire.responses import finished_of, record_to_job
from laneway.v1 import admission_pb2, bus_pb2
from tests.support.nats import make_job, make_record
from tests.support.pulling import seats_of

REF = ObjectRef("acme/local-job1/task/65000000-65000100-0a0b0c0d", 700_000, bytes(range(32)))
RESULT = Result("héllo", (5, 6, 7), (1, 0, 4), FinishReason.STOP, Usage(3, 1, 3, 0.5), (TokenLogprob(-0.5),) * 3)
DONE = make_record("local-done", state=JobState.SUCCEEDED, attempt=2, result=RESULT)
_token = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)
_seconds = st.integers(0, 2**32 - 1)
_tag = st.from_regex(r"[0-9a-f]{8}", fullmatch=True)


# --- names ------------------------------------------------------------------------------------------


@given(st.builds(ObjectName, _token, _token, _token, _seconds, _seconds, _tag))
def test_a_name_is_read_back_from_all_that_is_made_of_it(name: ObjectName):
    assert ObjectName.parse(str(name)) == name
    assert subjects.object_parts(subjects.object_facts("eu", name)) == (name, True)
    assert subjects.object_parts(subjects.object_chunk("eu", name, 12)) == (name, False)
    assert subjects.object_chunk("eu", name).removesuffix(".*") == f"$O.OBJECTS_eu.C.{subjects.object_id(name)}"[:-2]
    assert len(subjects.object_facts("eu", name)) <= subjects.SUBJECT_BYTES_MAX


@pytest.mark.parametrize(
    "name", ["", "a", "a/b/c", "a/b/c/d", "a/b/c/1-2", "a/b/c/x-2-t", "a.b/c/task/1-2-t", "/b/c/1-2-t"]
)
def test_what_is_no_name_of_ours_is_not_taken_for_one(name: str):
    with pytest.raises(ValueError, match=r"."):
        ObjectName.parse(name)


def test_subjects_of_others_are_not_taken_for_ours():
    for subject in (
        "$O.OBJECTS_eu.M.bm90ZXM=",
        "$O.OBJECTS_eu.M.!",
        "$O.OBJECTS_eu.C.c8T9Zk2",
        "$O.OBJECTS_eu.C.a.b.c",
    ):
        with pytest.raises(ValueError, match=r"."):
            subjects.object_parts(subject)


def test_attempts_have_results_of_their_own():
    assert [result_kind(attempt) for attempt in (1, 2)] == ["result-1", "result-2"]


# --- messages ---------------------------------------------------------------------------------------


def test_a_lane_message_by_reference_is_read_back_and_says_no_task():
    job = ReferredJob(make_record(prompt_tokens=200_000, max_tokens=16), REF)
    data = encode_lane_job(job)
    assert decode_lane_job(data) == job
    message = bus_pb2.LaneMessage.FromString(data)
    assert (message.schema, message.record.schema) == (SCHEMA_BY_REFERENCE, SCHEMA)
    assert not message.HasField("task")
    assert len(data) < 1024
    assert seats_of(8).ask(job).tokens == 200_016, "and what room it needs is in its record"


def test_what_refers_to_nothing_keeps_the_schema_that_older_releases_read():
    assert bus_pb2.LaneMessage.FromString(encode_lane_job(make_job(make_record()))).schema == SCHEMA
    assert bus_pb2.JobRecord.FromString(encode_record(DONE)).schema == SCHEMA


def test_a_record_by_reference_keeps_the_small_facts():
    record = by_reference(DONE, REF)
    again = decode_record(encode_record(record))
    assert again == record
    assert bus_pb2.JobRecord.FromString(encode_record(record)).schema == SCHEMA_BY_REFERENCE
    assert (answer_tokens(again), answer_tokens(DONE), answer_tokens(make_record())) == (3, 3, 0)
    assert (is_whole(again), is_whole(DONE), is_whole(make_record())) == (False, True, True)
    assert record_to_job(again).usage == record_to_job(DONE).usage
    assert finished_of(again) == finished_of(DONE)


def test_tasks_and_results_are_read_back_as_they_were():
    task = GenerateTask((1, 2, 300_000), Sampling(max_tokens=5, stop=("x",)), json_schema="{}")
    assert decode_task(encode_task(task)) == task
    assert decode_result(encode_result(RESULT)) == RESULT


# --- which tasks are large --------------------------------------------------------------------------


def references(inline_bytes_max: int) -> References:
    return References(cast("ObjectStore", None), inline_bytes_max=inline_bytes_max)


@given(
    st.lists(st.integers(0, 10_000_000), min_size=1, max_size=60).map(tuple),
    st.text(max_size=60),
    st.integers(0, 400),
)
def test_a_task_is_large_exactly_above_the_limit(ids: tuple[int, ...], grammar: str, slack: int):
    task = GenerateTask(ids, Sampling(max_tokens=1), grammar=grammar)
    data = encode_task(task)
    size = len(data)
    assert references(size - 1).large(task) == data
    assert references(size + slack).large(task) == b""


# --- resolving --------------------------------------------------------------------------------------


class Shelf:
    """Objects in memory."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.at_once = self.most = 0

    async def put(self, tenant: str, job_id: str, kind: str, data: bytes, *, until_s: float) -> ObjectRef:
        name = str(ObjectName(tenant, job_id, kind, 1, int(until_s), "0"))
        self.objects[name] = data
        return ObjectRef(name, len(data), b"")

    async def get(self, ref: ObjectRef) -> bytes:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        return self.objects[ref.name]


async def test_a_reference_resolves_to_what_was_put():
    shelf = Shelf()
    both = References(cast("ObjectStore", shelf), retention_s=100.0)
    record, task = make_record(), GenerateTask((1, 2, 3), Sampling(max_tokens=4))
    stored = await both.put_task(record, encode_task(task), record.contract.deadline_s - 50.0)
    assert await both.job(ReferredJob(record, stored)) == LaneJob(record, task)
    assert ObjectName.parse(stored.name).kind == TASK
    assert ObjectName.parse(stored.name).until_s == int(record.contract.deadline_s + 100.0)
    result = await both.put_result(DONE, RESULT, DONE.contract.deadline_s)
    assert ObjectName.parse(result.name).kind == "result-2"
    assert replace(await both.record(by_reference(DONE, result)), result_object=None) == DONE
    whole = make_job(record)
    assert await both.job(whole) is whole
    assert await both.record(DONE) is DONE


async def test_few_objects_are_held_at_once():
    shelf = Shelf()
    both = References(cast("ObjectStore", shelf))
    result = await both.put_result(DONE, RESULT, 0.0)
    await asyncio.gather(*(both.record(by_reference(DONE, result)) for _ in range(40)))
    assert shelf.most == 4


async def test_an_object_that_is_no_task_is_lost_and_nothing_worse():
    shelf = Shelf()
    both = References(cast("ObjectStore", shelf))
    record = make_record()
    stored = await both.put_task(record, b"\xff\xff", 0.0)
    with pytest.raises(ObjectLost, match="cannot be read"):
        await both.job(ReferredJob(record, stored))
    with pytest.raises(ObjectLost, match="cannot be read"):
        await both.record(by_reference(DONE, stored))


def test_a_full_object_store_is_full_storage():
    assert issubclass(ObjectStoreFull, StorageFull)
    assert ObjectStoreFull().row.label == "storage_full"


# --- cutting ----------------------------------------------------------------------------------------


def answer(count: int, *, logprobs: int = 0, seed: int = 3) -> Result:
    chance = random.Random(seed)
    lengths = tuple(chance.choice((0, 1, 1, 5, 40)) for _ in range(count))
    text = "".join(chance.choice("aé漢😀") for _ in range(sum(lengths)))
    top = tuple((number, -1.0 - number) for number in range(logprobs))
    each = (TokenLogprob(-0.5, top),) * count if logprobs else ()
    return Result(
        text, tuple(chance.randrange(50_000) for _ in range(count)), lengths, FinishReason.STOP, Usage(), each
    )


@pytest.mark.parametrize("first", [0, 1, 2_999, 6_000])
def test_a_long_answer_is_cut_into_pieces_that_say_the_same(first: int):
    result = answer(6_000, logprobs=5)
    pieces = rest_of(result, first)
    chunks = [admission_pb2.GenerateResponse.FromString(piece).chunk for piece in pieces]
    assert all(len(piece) <= PIECE_BYTES_MAX for piece in pieces)
    assert [i for chunk in chunks for i in chunk.token_ids] == list(result.token_ids[first:])
    assert "".join(chunk.text for chunk in chunks) == result.text[sum(result.text_lengths[:first]) :]
    assert sum(len(chunk.logprobs) for chunk in chunks) == 6_000 - first
    at = first
    for chunk in chunks:
        assert chunk.first_index == at
        at += len(chunk.token_ids)
    assert bool(pieces) is (first < 6_000)
    assert len(pieces) < 40


def test_what_waits_is_joined_up_to_the_limit_and_no_further():
    long = rest_of(answer(20_000), 0)
    steps = answer(1_000)
    short = [piece for index in range(1_000) for piece in rest_of(replace_end(steps, index + 1), index)]
    for waiting in (long, short, long[:1], []):
        joined = list(merged(waiting))
        assert all(len(piece) <= PIECE_BYTES_MAX for piece in joined)
        assert [i for piece in joined for i in piece_ids(piece)] == [i for piece in waiting for i in piece_ids(piece)]
    assert (len(short), len(list(merged(short)))) == (1_000, 1)
    assert len(list(merged(long))) > 2


def replace_end(result: Result, end: int) -> Result:
    """The answer as if it had ended there."""
    lengths = result.text_lengths[:end]
    return replace(result, token_ids=result.token_ids[:end], text_lengths=lengths, text=result.text[: sum(lengths)])
