"""Three servers, three replicas: races across nodes, and the death of a stream's leader."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from laneway.core import subjects
from laneway.core.job import claim
from laneway.core.lanes import Lane
from laneway.core.objects import TASK, ObjectRef
from laneway.runtime.bus import Bus, BusError, WrongSequence
from laneway.runtime.lanes import LaneStore, ReleaseOutcome
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.objects import ObjectStore
from laneway.runtime.provision import provision
from laneway.runtime.puller import LanePuller
from laneway.runtime.records import RecordExists, RecordStore
from laneway.runtime.settings import NatsSettings
from tests.support.cluster import SIZE, cluster, connected_at
from tests.support.lanes import pull_all
from tests.support.nats import POOL, REGION, TENANT, eventually, make_job, make_record, small_catalogue

pytestmark = [pytest.mark.wire, pytest.mark.slow]


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[list[LocalNats]]:
    async with cluster(tmp_path) as servers:
        yield servers


@pytest.fixture
async def buses(servers: list[LocalNats]) -> AsyncIterator[list[Bus]]:
    """One connection beginning at each server."""
    made = [await connected_at(servers, i) for i in range(SIZE)]
    settings = NatsSettings(replicas=3)
    async with asyncio.TaskGroup() as tasks:
        for bus in made:
            tasks.create_task(eventually_provisioned(bus, settings))
    yield made
    for bus in made:
        await bus.close()


async def eventually_provisioned(bus: Bus, settings: NatsSettings) -> None:
    async def done() -> bool:
        try:
            await provision(bus, REGION, small_catalogue(), settings, ack_wait_s=settings.ack_wait_s)
        except BusError:
            return False
        return True

    await eventually(done, 30.0)


async def test_of_claims_and_creates_across_nodes_one_wins(buses: list[Bus]):
    stores = [RecordStore(bus) for bus in buses]
    for _ in range(10):
        record = make_record()
        made = await asyncio.gather(*(store.create(record) for store in stores), return_exceptions=True)
        (accepted,) = (outcome for outcome in made if isinstance(outcome, int))
        assert sum(isinstance(outcome, RecordExists) for outcome in made) == SIZE - 1
        claims = await asyncio.gather(
            *(store.update(claim(record, f"w{i}", 1.0), accepted) for i, store in enumerate(stores * 3)),
            return_exceptions=True,
        )
        assert sum(isinstance(outcome, int) for outcome in claims) == 1
        assert sum(isinstance(outcome, WrongSequence) for outcome in claims) == 3 * SIZE - 1


async def test_concurrent_changes_across_nodes_all_take_place(buses: list[Bus]):
    record = make_record()
    stores = [RecordStore(bus) for bus in buses]
    await stores[0].create(record)
    await asyncio.gather(
        *(
            store.change(REGION, TENANT, record.job_id, lambda r: replace(r, checkpoint_index=r.checkpoint_index + 1))
            for store in stores * 2
        )
    )
    stored = await stores[0].get(REGION, TENANT, record.job_id, leader=True)
    assert stored is not None
    assert stored.record.checkpoint_index == 2 * SIZE


async def test_releasers_on_three_nodes_make_one_copy(buses: list[Bus]):
    stores = [LaneStore(bus, REGION) for bus in buses]
    now_s = make_record().timings.created_s
    parked = [
        await stores[0].park(make_job(make_record(lane=Lane.BATCH)), 1, fire_at_s=now_s + 900.0, group="abcdefghij")
        for _ in range(20)
    ]
    outcomes = await asyncio.gather(
        *(store.release(subject, now_s=now_s, reason="race") for subject in parked for store in stores)
    )
    assert Counter(outcomes)[ReleaseOutcome.RELEASED] == len(parked)
    delivered = [delivery.job.record.job_id for delivery in await pull_all(buses[1], Lane.BATCH)]
    assert sorted(delivered) == sorted(subject.job for subject in parked)


async def test_the_death_of_the_leaders_node_loses_no_job_and_no_write(servers: list[LocalNats], buses: list[Bus]):
    info = await buses[0].api(f"STREAM.INFO.{subjects.lane_stream(REGION, Lane.BATCH)}", {})
    victim = int(info["cluster"]["leader"].removeprefix("n"))
    bus = buses[(victim + 1) % SIZE]
    records, lanes = RecordStore(bus), LaneStore(bus, REGION)
    record = make_record(lane=Lane.BATCH)
    await records.create(record)
    put = {record.job_id}
    await lanes.put_ready(make_job(record), 1)
    async with LanePuller(bus, REGION, Lane.BATCH, POOL) as puller:
        await servers[victim].kill()
        change = asyncio.ensure_future(records.change(REGION, TENANT, record.job_id, lambda r: claim(r, "w", 1.0)))

        async def put_another() -> bool:
            another = make_record(lane=Lane.BATCH)
            try:
                await lanes.put_ready(make_job(another), 1)
            except BusError:
                return False
            put.add(another.job_id)
            return True

        await eventually(put_another, 40.0)
        assert (await change).record.attempt == 1
        got: set[str] = set()

        async def pulled() -> bool:
            got.update(delivery.job.record.job_id for delivery in await puller.pull(10))
            return put <= got

        await eventually(pulled, 40.0)


async def test_objects_are_read_at_every_node_and_survive_the_death_of_their_leader(
    servers: list[LocalNats], buses: list[Bus]
):
    stores = [ObjectStore(bus, REGION) for bus in buses]
    data = bytes(range(256)) * 8_000
    until_s = make_record().contract.deadline_s
    refs: list[ObjectRef] = []
    for number in range(6):  # replicas may be behind: then the leader answers
        ref = await stores[number % SIZE].put(TENANT, f"{REGION}-job{number}", TASK, data, until_s=until_s)
        refs.append(ref)
        assert await asyncio.gather(*(store.get(ref) for store in stores)) == [data] * SIZE
    info = await buses[0].api(f"STREAM.INFO.{subjects.objects_stream(REGION)}", {})
    victim = int(info["cluster"]["leader"].removeprefix("n"))
    await servers[victim].kill()
    store = stores[(victim + 1) % SIZE]
    refused: list[str] = []

    async def put_another() -> ObjectRef | None:
        try:
            return await store.put(TENANT, f"{REGION}-late", TASK, data, until_s=until_s)
        except BusError as error:
            refused.append(error.reason)
            return None

    late = await eventually(put_another, 40.0)
    assert await store.get(late) == data
    assert await store.get(refs[-1]) == data
