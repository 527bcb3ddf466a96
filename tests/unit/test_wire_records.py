"""What Laneway stores, it reads back as it was; what it cannot read, it says so."""

import contextlib
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from laneway.core.errors import Code
from laneway.core.fleet import LanePlan, Plan, PoolPlan, WorkerLease, WorkerState
from laneway.core.job import (
    SCHEMA,
    SCHEMA_BY_REFERENCE,
    Attempt,
    Contract,
    GenerateTask,
    JobError,
    JobRecord,
    LaneJob,
    Result,
    Sampling,
    Timings,
    TokenLogprob,
    Usage,
    Verdict,
)
from laneway.core.lanes import FinishReason, Isolation, JobState, Lane, OnDisconnect, Phase, VerdictKind
from laneway.runtime.wire import enums
from laneway.runtime.wire.plans import decode_plan, encode_plan
from laneway.runtime.wire.reading import UnreadableMessage
from laneway.runtime.wire.records import (
    decode_lane_job,
    decode_lease,
    decode_record,
    encode_lane_job,
    encode_lease,
    encode_record,
)
from laneway.runtime.wire.responses import finished_of, record_to_job, result_chunks
from laneway.v1 import bus_pb2, common_pb2

# Wall times of now and later, and none; spans in whole nanoseconds; finite numbers.
_wall = st.just(0.0) | st.floats(1.0e9, 4.0e9)
_span = st.integers(0, 10**13).map(lambda nanos: nanos // 10**9 + nanos % 10**9 / 10**9)
_number = st.floats(allow_nan=False, allow_infinity=False)
_u32 = st.integers(0, 2**32 - 1)
_ids = st.lists(_u32, max_size=4).map(tuple)
_u64 = st.integers(0, 2**64 - 1)
_text = st.text(max_size=8)
_maybe = st.none()

_contracts = st.builds(
    Contract, lane=st.sampled_from(Lane), ttft_target_s=_span, tpot_target_s=_span, deadline_s=_wall,
    not_before_s=_wall, isolation=st.sampled_from(Isolation), least_tier=_text, cost_max=_maybe | _number,
    regions=st.lists(_text, max_size=3).map(tuple), on_disconnect=st.sampled_from(OnDisconnect),
    labels=st.dictionaries(_text, _text, max_size=3),
)  # fmt: skip
_verdicts = st.builds(
    Verdict, kind=st.sampled_from(VerdictKind), reason=_text, message=_text, lane=st.sampled_from(Lane), tier=_text,
    region=_text, pool=_text, ttft_eta_s=_maybe | _span, completion_eta_s=_maybe | _span,
    hold_until_s=_maybe | st.floats(1.0e9, 4.0e9), retry_after_s=_maybe | _span, cost=_number,
)  # fmt: skip
_logprobs = st.builds(TokenLogprob, _number, st.lists(st.tuples(_u32, _number), max_size=2).map(tuple))
_results = st.builds(
    Result, text=_text, token_ids=_ids, text_lengths=_ids,
    finish_reason=st.sampled_from(FinishReason), usage=st.builds(Usage, _u32, _u32, _u32, _number),
    logprobs=st.lists(_logprobs, max_size=2).map(tuple),
)  # fmt: skip
_errors = st.builds(JobError, st.sampled_from(Code), _text, _text, _maybe | st.sampled_from(Phase), _text)
_timings = st.builds(Timings, _wall, _wall, _wall, _wall, _span, _span)
_records = st.builds(
    JobRecord, job_id=_text, tenant=_text, region=_text, model=_text, tier=_text, pool=_text, contract=_contracts,
    verdict=_verdicts, prompt_tokens=_u32, max_tokens=_u32, state=st.sampled_from(JobState), attempt=_u32,
    lineage=st.lists(st.builds(Attempt, _u32, _u32, _text, _wall, st.booleans(), _wall), max_size=2).map(tuple),
    starts=_u32, clean=_u32, preemptions=_u32,
    owner=_text, door=_text, attached=st.booleans(), publish_by_s=_wall, body_digest=st.binary(max_size=32),
    checkpoint_index=_u32, latest_start_s=_wall, device_ms=_u64, result=_maybe | _results, error=_maybe | _errors,
    timings=_timings, idempotency_key=_text, origin=_text,
)  # fmt: skip
_samplings = st.builds(
    Sampling, max_tokens=_u32, temperature=_number, top_p=_maybe | _number, top_k=_maybe | _u32, min_p=_maybe | _number,
    seed=_maybe | _u64, stop=st.lists(_text, max_size=2).map(tuple), stop_token_ids=_ids,
    logprobs=st.booleans(), top_logprobs=_maybe | _u32, repetition_penalty=_maybe | _number,
    presence_penalty=_maybe | _number, frequency_penalty=_maybe | _number,
    logit_bias=st.dictionaries(_u32, _number, max_size=2), n=_u32, min_tokens=_maybe | _u32, ignore_eos=st.booleans(),
)  # fmt: skip
_formats = st.sampled_from(
    [{}, {"json_object": True}, {"json_schema": "{}"}, {"regex": "a+"}, {"grammar": "root ::= a"}]
)
_tasks = st.builds(
    lambda form, **fields: GenerateTask(**form, **fields), _formats, prompt_ids=st.lists(_u32, max_size=9).map(tuple),
    sampling=_samplings, adapter=_text, cache_salt=_text,
)  # fmt: skip
_leases = st.builds(
    WorkerLease, worker_id=_text, name=_text, pool=_text, engine=_text, state=st.sampled_from(WorkerState),
    detail=_text, slots=_u32, running=_u32, kv_tokens=_u64, kv_tokens_used=_u64, prefill_tokens_per_s=_number,
    decode_tokens_per_s=_number, service_s=_number, started_s=_wall, renewed_s=_wall, jobs_done=_u64, tokens_done=_u64,
    busy_s=_number, capabilities=st.lists(_text, max_size=2).map(tuple),
    running_by_lane=st.dictionaries(st.sampled_from(Lane), _u32), process_id=_u32,
)  # fmt: skip
_lanes = st.builds(LanePlan, st.sampled_from(Lane), _u64, _u64, _u64, _number, _u64, _span)
_plans = st.builds(
    Plan, region=_text, epoch=_u64, version=_u64, made_s=_wall, valid_until_s=_wall,
    pools=st.lists(
        st.builds(
            PoolPlan, pool=_text, workers=_u32, slots=_u32, free_slots=_u32, kv_tokens=_u64, free_kv_tokens=_u64,
            prefill_tokens_per_s=_number, decode_tokens_per_s=_number, service_s=_number, desired_workers=_u32,
            lanes=st.lists(_lanes, max_size=2).map(tuple),
        ),
        max_size=2,
    ).map(tuple),
    paused=st.frozensets(st.sampled_from(Lane)),
)  # fmt: skip


@given(_records)
def test_a_record_is_read_back_as_it_was_written(record):
    assert decode_record(encode_record(record)) == record


@given(_records, _tasks)
def test_a_lane_message_is_read_back_as_it_was_written(record, task):
    job = LaneJob(record, task)
    assert decode_lane_job(encode_lane_job(job)) == job


@given(_leases)
def test_a_lease_is_read_back_as_it_was_written(lease):
    assert decode_lease(encode_lease(lease)) == lease


@given(_plans)
def test_a_plan_is_read_back_as_it_was_written(plan):
    assert decode_plan(encode_plan(plan)) == plan


@pytest.mark.parametrize("decode", [decode_record, decode_lane_job, decode_lease, decode_plan])
@given(data=st.binary(max_size=40))
def test_any_bytes_are_read_or_called_unreadable(decode, data):
    with contextlib.suppress(UnreadableMessage):  # anything else fails the test
        decode(data)


RECORD = JobRecord(
    job_id="local-1", tenant="default", region="local", model="chat", tier="small", pool="chat-small",
    contract=Contract(Lane.PRIORITY, 1.0, 0.1, 1.8e9), prompt_tokens=3, max_tokens=9,
    verdict=Verdict(VerdictKind.ACCEPTED, "LANE_OPEN", "", Lane.PRIORITY),
)  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "readable"),
    [(SCHEMA, True), (SCHEMA_BY_REFERENCE, True), (SCHEMA_BY_REFERENCE + 1, False), (0, False)],
)
def test_a_schema_of_the_future_is_not_guessed_at(schema, readable):
    message = bus_pb2.JobRecord.FromString(encode_record(RECORD))
    message.schema = schema
    if readable:
        assert decode_record(message.SerializeToString()) == RECORD
    else:
        with pytest.raises(UnreadableMessage, match=f"schema {schema}"):
            decode_record(message.SerializeToString())


def test_an_unknown_state_is_not_guessed_at():
    message = bus_pb2.JobRecord.FromString(encode_record(RECORD))
    message.state = 77  # type: ignore[assignment]  # on purpose
    with pytest.raises(UnreadableMessage, match="unknown value"):
        decode_record(message.SerializeToString())


@pytest.mark.parametrize(
    ("table", "wire"),
    [
        (enums.LANE_TO_WIRE, common_pb2.Lane), (enums.ISOLATION_TO_WIRE, common_pb2.Isolation),
        (enums.ON_DISCONNECT_TO_WIRE, common_pb2.OnDisconnect), (enums.JOB_STATE_TO_WIRE, common_pb2.JobState),
        (enums.PHASE_TO_WIRE, common_pb2.Phase), (enums.FINISH_REASON_TO_WIRE, common_pb2.FinishReason),
        (enums.VERDICT_KIND_TO_WIRE, common_pb2.VerdictKind),
    ],
)  # fmt: skip
def test_every_word_has_its_number_and_every_number_its_word(table, wire):
    kind: Any = type(next(iter(table)))
    assert set(table) == set(kind)
    assert set(table.values()) == set(wire.values()) - {0}
    prefix = wire.Name(0).removesuffix("UNSPECIFIED")
    assert {wire.Name(number) for number in table.values()} == {prefix + word.name for word in table}


class TestResponses:
    RESULT = Result("héllo", (5, 6, 7), (1, 0, 4), FinishReason.STOP, Usage(3, 1, 3, 0.5), (TokenLogprob(-0.5),) * 3)
    DONE = replace(RECORD, state=JobState.SUCCEEDED, attempt=2, result=RESULT, timings=Timings(created_s=1.8e9))

    @pytest.mark.parametrize("first", range(4))
    def test_a_result_goes_on_from_any_token(self, first):
        (head,) = result_chunks(self.RESULT, 0, 1000)
        if first == 3:
            assert list(result_chunks(self.RESULT, first, 1000)) == []
            return
        (tail,) = result_chunks(self.RESULT, first, 1000)
        assert tail.first_index == first
        assert list(tail.token_ids) == list(head.token_ids)[first:]
        assert tail.text == "héllo"[sum((1, 0, 4)[:first]) :]
        assert len(tail.logprobs) == 3 - first

    def test_an_end_has_usage_and_attempt(self):
        end = finished_of(self.DONE)
        assert (end.job_id, end.state, end.attempt) == ("local-1", common_pb2.JOB_STATE_SUCCEEDED, 2)
        assert (end.finish_reason, end.usage.completion_tokens) == (common_pb2.FINISH_REASON_STOP, 3)

    def test_a_job_shows_how_often_it_yielded(self):
        assert record_to_job(replace(self.DONE, preemptions=2)).preemptions == 2

    def test_a_job_shows_its_result_only_when_asked(self):
        assert not record_to_job(self.DONE).HasField("result")
        assert record_to_job(self.DONE).usage.cost == 0.5
        assert record_to_job(self.DONE, include_result=True).result.text == "héllo"

    def test_a_waiting_job_is_shown_parked_or_ready(self):
        assert record_to_job(RECORD).state == common_pb2.JOB_STATE_WAITING
        assert record_to_job(RECORD, JobState.PARKED).state == common_pb2.JOB_STATE_PARKED


@given(st.floats(1.0e9, 4.0e9))
def test_wall_times_survive_exactly(wall_s):
    record = replace(RECORD, publish_by_s=wall_s)
    assert decode_record(encode_record(record)).publish_by_s == wall_s
    assert math.isfinite(wall_s)
