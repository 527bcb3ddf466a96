"""Prompts and results that no message holds go by the object store, and whoever asks for them does not notice."""

from __future__ import annotations

import asyncio
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import msgspec
import nats
import pytest
from msgspec.structs import replace

from laneway.core import subjects
from laneway.core.errors import AlreadyExists, InvalidRequest, ObjectStoreFull, ResultTooLarge
from laneway.core.job import GenerateTask, JobRecord, ReferredJob, Result, Sampling, Usage, by_reference, succeed
from laneway.core.lanes import FinishReason, JobState, Lane
from laneway.runtime.bus import NoAnswer
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.metrics import REGISTRY
from laneway.runtime.objects import ObjectStore
from laneway.runtime.references import INLINE_BYTES_MAX, References
from laneway.runtime.settings import GrpcSettings, NatsSettings, Settings
from laneway.runtime.tokenizer import ByteTokenizer
from laneway.runtime.wire.records import encode_task
from laneway.v1 import admission_pb2 as pb
from laneway.v1 import bus_pb2, common_pb2, task_pb2
from laneway.workers import messages
from tests.support.admission import (
    CLOCK,
    WIRE_LANE,
    Gate,
    Held,
    PuppetWorker,
    admission_settings,
    error_of_call,
    gate,
    generate,
    ids_of,
    open_gate,
    opening,
    rest,
    spec,
    text_of,
)
from tests.support.nats import REGION, eventually, provision_region

pytestmark = pytest.mark.wire

MIB = 1024 * 1024
ROOT = Path(__file__).parents[2]
WIDE = 200  # of the tokenizer of bytes; two bytes on the wire
OBJECTS = subjects.objects_stream(REGION)


def large_settings(server: LocalNats, **admission: Any) -> Settings:
    """A context that holds what these tests send."""
    settings = admission_settings(server, **admission)
    (model,) = settings.models
    model = msgspec.structs.replace(
        model, context_length=2_000_000, kv_tokens=8_000_000, prefill_tokens_per_s=1e9, decode_tokens_per_s=1e6
    )
    return msgspec.structs.replace(settings, models=(model,))


def large_spec(count: int, lane: Lane = Lane.BATCH, token: int = WIDE, **contract: Any) -> task_pb2.JobSpec:
    task = task_pb2.GenerateTask(tokens=task_pb2.TokenPrompt(ids=[token] * count), sampling={"max_tokens": 16})
    return task_pb2.JobSpec(model="chat", generate=task, contract=common_pb2.Contract(lane=WIRE_LANE[lane], **contract))


def resolver(door: Gate) -> References:
    return References(ObjectStore(door.bus, REGION))


async def objects(door: Gate) -> int:
    return len(await ObjectStore(door.bus, REGION).listed())


async def finish_by_reference(held: Held, worker: PuppetWorker, result: Result, *, announce: bool = True) -> JobRecord:
    """What a worker makes of an answer that its record cannot hold."""
    references = References(ObjectStore(worker.bus, REGION))
    stored = await references.put_result(held.record, result, CLOCK.now())
    done = by_reference(succeed(held.record, worker.id, held.record.attempt, result, held.record.timings), stored)
    held.stored = replace(held.stored, record=done, sequence=await worker._records.update(done, held.stored.sequence))
    if announce:
        from laneway.runtime.wire.records import encode_record

        event = messages.event(done.job_id, done.state, done.attempt, worker.id, encode_record(done))
        await worker.bus.emit(subjects.event(REGION, done.job_id), event)
    await held.delivery.ack()
    return done


def long_result(count: int) -> Result:
    text = "".join(chr(97 + number * 7 % 26) for number in range(count))
    ids = tuple(text.encode())
    return Result(text, ids, (1,) * count, FinishReason.LENGTH, Usage(5, 0, count, 0.25))


# --- prompts ----------------------------------------------------------------------------------------


async def test_a_large_prompt_among_small_ones_runs_and_the_others_notice_nothing(
    nats_server: LocalNats, tmp_path: Path
):
    async with open_gate(nats_server, tmp_path, large_settings(nats_server)) as (door, worker):
        small = [door.stub.Generate(generate(f"small {number}")) for number in range(3)]
        large = door.stub.Submit(pb.SubmitRequest(spec=large_spec(3 * MIB // 2)))  # 3 MiB of ids
        await asyncio.gather(*map(opening, small))
        held = [await worker.take() for _ in small]
        for number, each in enumerate(held):
            await worker.send(each, 0, f"answer {number}")
            await worker.finish(each, f"answer {number}")
        texts = {text_of(await rest(call)) for call in small}
        assert texts == {"answer 0", "answer 1", "answer 2"}
        job_id = (await large).job_id
        delivery = await worker.pull(Lane.BATCH)
        assert len(delivery.data) < 4096
        job = delivery.job
        assert isinstance(job, ReferredJob)
        assert (job.record.job_id, job.record.prompt_tokens) == (job_id, 3 * MIB // 2)
        assert (await resolver(door).job(job)).task.prompt_ids == (WIDE,) * (3 * MIB // 2)
        stats = door.bus.nc.stats
        assert (stats["reconnects"], stats["errors_received"]) == (0, 0)


@pytest.mark.slow
async def test_a_prompt_beyond_the_context_is_refused_by_name_and_stores_nothing(
    nats_server: LocalNats, tmp_path: Path
):
    async with open_gate(nats_server, tmp_path) as (door, _):
        error = await error_of_call(door.stub.Submit(pb.SubmitRequest(spec=large_spec(3 * MIB // 2))))
        assert isinstance(error, InvalidRequest)
        assert (error.field, error.reason) == ("spec.generate.prompt", "CONTEXT_LENGTH_EXCEEDED")
        assert (await objects(door), await door.messages(), await door.job_ids()) == (0, 0, [])


@pytest.mark.slow
async def test_a_text_that_can_never_fit_is_refused_before_it_is_tokenised(
    nats_server: LocalNats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def unexpected(*_: object) -> list[int]:
        raise AssertionError("it was tokenised")

    async with open_gate(nats_server, tmp_path) as (door, _):  # with a context of 1024 tokens
        monkeypatch.setattr(ByteTokenizer, "encode", unexpected)
        error = await error_of_call(door.stub.Submit(pb.SubmitRequest(spec=spec("x" * (3 * MIB), lane=Lane.BATCH))))
        assert (type(error), error.field) == (InvalidRequest, "spec.generate.prompt")
        assert error.reason == "CONTEXT_LENGTH_EXCEEDED"


async def test_a_task_at_the_limit_travels_in_its_message_and_one_above_it_by_reference(
    nats_server: LocalNats, tmp_path: Path
):
    async with open_gate(nats_server, tmp_path, large_settings(nats_server)) as (door, worker):
        for size, referred in ((INLINE_BYTES_MAX, False), (INLINE_BYTES_MAX + 1, True)):
            plain = encode_task(GenerateTask((WIDE,) * 200_000, Sampling(max_tokens=16)))
            wide, narrow = divmod(size - len(plain), 2)
            wanted = large_spec(200_000 + wide)
            wanted.generate.tokens.ids.extend([1] * narrow)
            await door.stub.Submit(pb.SubmitRequest(spec=wanted))
            delivery = await worker.pull(Lane.BATCH)
            assert isinstance(delivery.job, ReferredJob) is referred
            task = (await resolver(door).job(delivery.job)).task
            assert len(encode_task(task)) == size
            assert task.prompt_ids == tuple(wanted.generate.tokens.ids)
            await delivery.ack()
        assert await objects(door) == 1


@pytest.mark.slow
async def test_a_request_at_the_limit_is_judged_and_one_byte_more_is_not_taken(nats_server: LocalNats, tmp_path: Path):
    limit = GrpcSettings().request_bytes_max
    async with gate(nats_server, tmp_path) as door:
        empty = pb.SubmitRequest(spec=spec(), idempotency_key="k" * limit).ByteSize() - limit
        at = pb.SubmitRequest(spec=spec(), idempotency_key="k" * (limit - empty))
        assert at.ByteSize() == limit
        error = await error_of_call(door.stub.Submit(at))
        assert (type(error), error.field) == (InvalidRequest, "idempotency_key")
        beyond = pb.SubmitRequest(spec=spec(), idempotency_key="k" * (limit - empty + 1))
        error = await error_of_call(door.stub.Submit(beyond))
        assert (type(error), error.reason) == (InvalidRequest, "MESSAGE_TOO_LARGE")


@pytest.mark.slow
async def test_a_parked_large_job_is_moved_as_a_small_message(nats_server: LocalNats, tmp_path: Path):
    async with open_gate(nats_server, tmp_path, large_settings(nats_server)) as (door, worker):
        not_before = {"seconds": int(CLOCK.now()) + 600}
        job_id = (
            await door.stub.Submit(pb.SubmitRequest(spec=large_spec(MIB, Lane.BATCH, not_before=not_before)))
        ).job_id
        record = await door.record(job_id)
        assert await door.lanes.is_parked(record)
        (park,) = await door.lanes.parked(Lane.BATCH)
        await door.lanes.release(park, now_s=CLOCK.now(), reason="test")
        delivery = await worker.pull(Lane.BATCH)
        assert len(delivery.data) < 4096
        assert (await resolver(door).job(delivery.job)).task.prompt_ids == (WIDE,) * MIB


async def test_a_key_names_one_large_job_and_its_prompt_stands(nats_server: LocalNats, tmp_path: Path):
    async with open_gate(nats_server, tmp_path, large_settings(nats_server)) as (door, worker):
        first = pb.SubmitRequest(spec=large_spec(MIB), idempotency_key="one")
        ids = {(await door.stub.Submit(first)).job_id for _ in range(3)}
        assert (len(ids), await objects(door)) == (1, 1)
        other = pb.SubmitRequest(spec=large_spec(MIB, token=WIDE + 1), idempotency_key="one")
        assert isinstance(await error_of_call(door.stub.Submit(other)), AlreadyExists)
        assert await objects(door) == 1
        job = (await worker.pull(Lane.BATCH)).job
        assert (await resolver(door).job(job)).task.prompt_ids == (WIDE,) * MIB


@pytest.mark.slow
async def test_a_large_attached_job_has_its_record_before_its_message(nats_server: LocalNats, tmp_path: Path):
    """Else an object could be swept whose job waits in its lane."""
    async with open_gate(nats_server, tmp_path, large_settings(nats_server)) as (door, worker):
        call = door.stub.Generate(pb.GenerateRequest(spec=large_spec(MIB, Lane.PRIORITY)))
        job_id = (await opening(call)).job_id
        delivery = await worker.pull()
        assert delivery.record_sequence > 0
        assert (await door.record(job_id)).state is JobState.WAITING
        call.cancel()


@pytest.mark.slow
async def test_many_and_producers_may_send_what_is_large_as_well(nats_server: LocalNats, tmp_path: Path):
    async with open_gate(nats_server, tmp_path, large_settings(nats_server)) as (door, worker):
        call = door.stub.SubmitMany()
        await call.read()
        items = [pb.SubmitManyItem(client_ref=str(n), spec=large_spec(n)) for n in (300_000, 3)]
        await call.write(pb.SubmitManyRequest(items=items))
        await call.done_writing()
        outcomes = [outcome for response in await rest(call) for outcome in response.outcomes]
        assert {outcome.client_ref: outcome.HasField("accepted") for outcome in outcomes} == {"300000": True, "3": True}
        request = pb.SubmitRequest(spec=large_spec(400_000))
        await door.bus.store(f"ingest.{REGION}.batch.default", request.SerializeToString())
        jobs = [(await worker.pull(Lane.BATCH)).job for _ in range(3)]
        told = sorted((job.record.prompt_tokens, isinstance(job, ReferredJob)) for job in jobs)
        assert told == [(3, False), (300_000, True), (400_000, True)]


async def test_a_full_object_store_refuses_large_prompts_alone(nats_server: LocalNats, tmp_path: Path):
    settings = large_settings(nats_server, storage_fraction_max=1.0)
    async with open_gate(nats_server, tmp_path, settings) as (door, _):
        await _limit_store(door, settings, 3 * MIB)
        await door.stub.Submit(pb.SubmitRequest(spec=large_spec(MIB)))  # of 2 MiB
        error = await error_of_call(door.stub.Submit(pb.SubmitRequest(spec=large_spec(MIB))))
        assert (type(error), error.reason) == (ObjectStoreFull, "OBJECT_STORE_FULL")
        assert error.retry_after_s is not None
        assert (await objects(door), len(await door.job_ids())) == (1, 1)
        await door.stub.Submit(pb.SubmitRequest(spec=spec(lane=Lane.BATCH)))


@pytest.mark.slow
async def test_prompts_leave_room_for_results_in_the_object_store(nats_server: LocalNats, tmp_path: Path):
    settings = large_settings(nats_server, storage_fraction_max=0.5, storage_poll_s=0.3)
    async with open_gate(nats_server, tmp_path, settings) as (door, worker):
        await _limit_store(door, settings, 4 * MIB)
        await door.stub.Submit(pb.SubmitRequest(spec=large_spec(MIB)))

        await eventually(lambda: (REGISTRY.get_sample_value("laneway_objects_used_ratio") or 0.0) > 0.5)
        error = await error_of_call(door.stub.Submit(pb.SubmitRequest(spec=large_spec(300_000))))
        assert error.reason == "OBJECT_STORE_FULL"
        held = await worker.take(Lane.BATCH)
        await finish_by_reference(held, worker, long_result(100_000))


async def _limit_store(door: Gate, settings: Settings, size: int) -> None:
    from laneway.runtime.catalogue import catalogue_of

    nats = msgspec.structs.asdict(NatsSettings(objects_bytes_max=size))
    await provision_region(door.bus, catalogue_of(settings), objects_bytes_max=nats["objects_bytes_max"])


# --- results ----------------------------------------------------------------------------------------


async def test_a_large_result_reads_the_same_through_every_door(nats_server: LocalNats, tmp_path: Path):
    """Streamed in part by the worker, and the rest from the object: as the caller's stream, a watch and a read."""
    result = long_result(700_000)  # 2.1 MB
    settings = large_settings(nats_server)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    async with (
        open_gate(nats_server, tmp_path / "a", settings) as (door, worker),
        gate(nats_server, tmp_path / "b", settings) as other,
    ):
        wanted = spec(lane=Lane.PRIORITY)
        wanted.generate.sampling.max_tokens = 1_000_000
        call = door.stub.Generate(pb.GenerateRequest(spec=wanted))
        job_id = (await opening(call)).job_id
        held = await worker.take()
        watching = other.stub.Watch(pb.WatchRequest(job_id=job_id, from_index=2))
        await opening(watching)
        await worker.send(held, 0, result.text[:3])
        await finish_by_reference(held, worker, result)
        events, watched = await rest(call), await rest(watching)
        assert text_of(events) == result.text
        assert ids_of(events) == list(result.token_ids)
        assert max(len(event.SerializeToString()) for event in events) < MIB
        assert text_of(watched) == result.text[2:]
        assert events[-1].finished.usage.completion_tokens == 700_000
        for each in (door, other):
            job = (await each.stub.GetJob(pb.GetJobRequest(job_id=job_id))).job
            assert (job.result.text, tuple(job.result.token_ids)) == (result.text, result.token_ids)
            assert job.usage.completion_tokens == 700_000
        late = await rest(other.stub.Watch(pb.WatchRequest(job_id=job_id, from_index=699_999)))
        assert text_of(late) == result.text[-1]
        beyond = await error_of_call(other.stub.Watch(pb.WatchRequest(job_id=job_id, from_index=700_001)))
        assert (type(beyond), beyond.field) == (InvalidRequest, "from_index")


@pytest.mark.slow
async def test_a_producer_reads_a_large_result_as_the_example_does(nats_server: LocalNats, tmp_path: Path):
    example = spec_from_file_location("producer_example", ROOT / "examples" / "producer.py")
    assert example is not None
    assert example.loader is not None
    module = module_from_spec(example)
    example.loader.exec_module(module)
    async with open_gate(nats_server, tmp_path, large_settings(nats_server)) as (door, worker):
        request = pb.SubmitRequest(spec=spec(lane=Lane.BATCH))
        await door.bus.store(f"ingest.{REGION}.batch.default", request.SerializeToString())
        result = long_result(500_000)
        done = await finish_by_reference(await worker.take(Lane.BATCH), worker, result)
        nc = await nats.connect(nats_server.url)
        try:
            js = nc.jetstream()
            subject = subjects.record(REGION, done.tenant, done.job_id)
            record = bus_pb2.JobRecord.FromString(await module.last(js, f"JOBS_{REGION}", subject))
            assert (await module.result_of(js, record)).text == result.text
            record.result_object.sha256 = bytes(32)
            with pytest.raises(ValueError, match="damaged"):
                await module.result_of(js, record)
        finally:
            await nc.close()


@pytest.mark.slow
async def test_lists_tell_of_large_results_without_fetching_them(
    nats_server: LocalNats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with open_gate(nats_server, tmp_path, large_settings(nats_server)) as (door, worker):
        await door.stub.Submit(pb.SubmitRequest(spec=spec(lane=Lane.BATCH)))
        await finish_by_reference(await worker.take(Lane.BATCH), worker, long_result(400_000))

        async def unexpected(*_: object) -> bytes:
            raise AssertionError("a list fetched an object")

        monkeypatch.setattr(ObjectStore, "get", unexpected)
        (job,) = (await door.stub.ListJobs(pb.ListJobsRequest())).jobs
        assert job.usage.completion_tokens == 400_000
        assert not job.HasField("result")


async def test_a_stream_that_has_every_token_ends_without_a_fetch(
    nats_server: LocalNats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with open_gate(nats_server, tmp_path, large_settings(nats_server)) as (door, worker):
        call = door.stub.Generate(generate())
        await opening(call)
        held = await worker.take()
        await worker.send(held, 0, "abc")
        fetched = 0
        true_get = ObjectStore.get

        async def get(store: ObjectStore, ref: Any) -> bytes:
            nonlocal fetched
            fetched += 1
            return await true_get(store, ref)

        monkeypatch.setattr(ObjectStore, "get", get)
        result = Result("abc", tuple(b"abc"), (1, 1, 1), FinishReason.STOP, Usage(5, 0, 3, 0.0))
        await finish_by_reference(held, worker, result)
        assert text_of(await rest(call)) == "abc"
        assert fetched == 0


@pytest.mark.slow
async def test_a_read_beyond_a_response_says_to_watch(nats_server: LocalNats, tmp_path: Path):
    settings = large_settings(nats_server)
    settings = msgspec.structs.replace(settings, grpc=GrpcSettings(response_bytes_max=2 * MIB))
    async with open_gate(nats_server, tmp_path, settings) as (door, worker):
        job_id = (await door.stub.Submit(pb.SubmitRequest(spec=spec(lane=Lane.BATCH)))).job_id
        result = long_result(800_000)
        await finish_by_reference(await worker.take(Lane.BATCH), worker, result)
        error = await error_of_call(door.stub.GetJob(pb.GetJobRequest(job_id=job_id)))
        assert (type(error), error.reason) == (ResultTooLarge, "RESULT_BEYOND_RESPONSE")
        assert (error.facts["limit_bytes"], error.retry_after_s) == (str(2 * MIB), None)
        assert text_of(await rest(door.stub.Watch(pb.WatchRequest(job_id=job_id)))) == result.text


@pytest.mark.slow
async def test_a_lost_result_is_said_to_be_lost(nats_server: LocalNats, tmp_path: Path):
    async with open_gate(nats_server, tmp_path, large_settings(nats_server)) as (door, worker):
        call = door.stub.Generate(generate())
        job_id = (await opening(call)).job_id
        held = await worker.take()
        done = await finish_by_reference(held, worker, long_result(300_000), announce=False)
        assert done.result_object is not None
        await References(ObjectStore(door.bus, REGION)).remove(done.result_object)
        for ended in (
            call,
            door.stub.Watch(pb.WatchRequest(job_id=job_id)),
            door.stub.GetJob(pb.GetJobRequest(job_id=job_id)),
        ):
            assert (await error_of_call(ended)).reason == "OBJECT_LOST"


@pytest.mark.slow
async def test_a_result_that_cannot_be_had_now_is_asked_for_again(
    nats_server: LocalNats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with open_gate(nats_server, tmp_path, large_settings(nats_server)) as (door, worker):
        call = door.stub.Generate(generate())
        await opening(call)
        held = await worker.take()
        failures = 2
        true_get = ObjectStore.get

        async def get(store: ObjectStore, ref: Any) -> bytes:
            nonlocal failures
            if failures:
                failures -= 1
                raise NoAnswer
            return await true_get(store, ref)

        monkeypatch.setattr(ObjectStore, "get", get)
        result = long_result(300_000)
        await finish_by_reference(held, worker, result)
        assert text_of(await rest(call)) == result.text
        assert failures == 0
