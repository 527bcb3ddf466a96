"""What producers publish to the wrong place, or in a way that makes admission fail, harms nobody else."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from nats.errors import NoRespondersError

from laneway.admission import ingest
from laneway.admission.ingest import Ingest
from laneway.core import subjects
from laneway.core.lanes import JobState, Lane
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.reading import subject_list
from laneway.v1 import admission_pb2 as pb
from laneway.v1 import bus_pb2
from tests.support.admission import Gate, PuppetWorker, open_gate, spec
from tests.support.nats import REGION, eventually

ACME = "acme"
BODY = pb.SubmitRequest(spec=spec()).SerializeToString()


@pytest.fixture
async def opened(nats_server: LocalNats, tmp_path: Path) -> AsyncIterator[tuple[Gate, PuppetWorker]]:
    async with open_gate(nats_server, tmp_path) as both:
        yield both


async def served(door: Gate, worker: PuppetWorker) -> None:
    """A good message still becomes a job that runs."""
    await door.bus.store(f"ingest.{REGION}.batch.{ACME}", BODY)
    await worker.finish(await worker.take(Lane.BATCH), "ok")


async def raw_publish(door: Gate, subject: str) -> bytes:
    """As any NATS client does, which checks no more than its library. The answer is the stream's, if one took it."""
    return (await door.bus.nc.request(subject, BODY, timeout=5)).data


@pytest.mark.parametrize("tail", ["batch", "batch.a.b", "batch.a.>", "batch.a.>.b"])
async def test_a_publish_to_a_subject_of_another_shape_is_refused_to_its_producer(
    opened: tuple[Gate, PuppetWorker], tail: str
):
    door, worker = opened
    with pytest.raises(NoRespondersError):
        await raw_publish(door, f"ingest.{REGION}.{tail}")
    await served(door, worker)


@pytest.mark.parametrize("tenant", [">", "*", "a/b", "x" * 65])
async def test_a_tenant_that_is_no_token_gets_no_job_and_the_next_message_is_served(
    opened: tuple[Gate, PuppetWorker], tenant: str
):
    door, worker = opened
    await raw_publish(door, f"ingest.{REGION}.batch.{tenant}")
    await served(door, worker)
    assert len(await subject_list(door.bus, subjects.jobs_stream(REGION), subjects.records_of(REGION))) == 1
    consumer = f"CONSUMER.INFO.{subjects.ingest_stream(REGION)}.admission"

    async def settled() -> bool:
        info = await door.bus.api(consumer, {})
        return not (info["num_ack_pending"] or info["num_pending"])

    await eventually(settled)


async def test_a_message_that_makes_admission_fail_each_time_gets_a_verdict_and_stops_nobody(
    opened: tuple[Gate, PuppetWorker], monkeypatch: pytest.MonkeyPatch
):
    door, worker = opened
    accepted = Ingest._accepted

    async def fails(self, delivery, arrival, lane_word):
        if delivery.data == b"bad":
            raise RuntimeError("a bug that this message meets")
        return await accepted(self, delivery, arrival, lane_word)

    monkeypatch.setattr(Ingest, "_accepted", fails)
    monkeypatch.setattr(ingest, "PUT_OFF_S_MIN", 0.01)
    await door.bus.store(f"ingest.{REGION}.batch.{ACME}", b"bad")
    stream = subjects.verdict_stream(REGION)
    (subject,) = await eventually(lambda: subject_list(door.bus, stream, f"verdict.{REGION}.{ACME}.*"))
    verdict = bus_pb2.IngestVerdict.FromString(
        (await door.bus.request(f"$JS.API.DIRECT.GET.{stream}.{subject}", b"")).data
    )
    assert verdict.error.message == "handling the message failed"
    assert (await door.record(verdict.job_id, ACME)).state is JobState.REFUSED
    await eventually(lambda: _empty(door))
    await served(door, worker)


async def _empty(door: Gate) -> bool:
    return not await door.messages(subjects.ingest_stream(REGION))
