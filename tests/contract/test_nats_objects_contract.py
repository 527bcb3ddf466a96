"""What the object store relies on of NATS: both servers alike."""

from pathlib import Path

import pytest

from laneway.core.clock import ManualClock
from laneway.core.errors import ObjectLost, ObjectStoreFull
from laneway.core.objects import TASK, ObjectName, ObjectRef
from laneway.runtime.clock import SystemClock
from laneway.runtime.objects import CHUNK_BYTES, ObjectStore
from laneway.runtime.records import RecordStore
from laneway.scheduler.object_sweep import ORPHAN_S, ObjectSweep
from tests.contract.nats_twins import Twin, Twins, twins_of
from tests.support.nats import REGION, TENANT, make_record

DATA = bytes(range(256)) * 2000


@pytest.fixture(
    params=[pytest.param("real", marks=pytest.mark.wire), pytest.param("memory", marks=pytest.mark.looptime)]
)
def twins(request: pytest.FixtureRequest, tmp_path: Path) -> Twins:
    return twins_of(request.param, tmp_path)


async def put(twin: Twin, job_id: str = f"{REGION}-job1", data: bytes = DATA) -> ObjectRef:
    store = ObjectStore(twin.bus, REGION)
    return await store.put(TENANT, job_id, TASK, data, until_s=SystemClock().now() + 10_000.0)


async def test_an_object_is_stored_read_listed_and_removed(twins: Twins):
    async with twins() as twin:
        store, ref = ObjectStore(twin.bus, REGION), await put(twin)
        assert await store.get(ref) == DATA
        assert [(str(each.name), each.whole) for each in await store.listed()] == [(ref.name, True)]
        assert await store.used() > 0.0
        await store.remove(ObjectName.parse(ref.name))
        assert await store.listed() == []
        with pytest.raises(ObjectLost):
            await store.get(ref)


async def test_a_full_store_refuses_and_keeps_nothing_of_what_it_refused(twins: Twins):
    async with twins(objects_bytes_max=4 * CHUNK_BYTES) as twin:
        first = await put(twin, data=DATA[: CHUNK_BYTES + 1])
        with pytest.raises(ObjectStoreFull):
            await put(twin)
        store = ObjectStore(twin.bus, REGION)
        assert [str(each.name) for each in await store.listed()] == [first.name]
        assert await store.get(first) == DATA[: CHUNK_BYTES + 1]


async def test_what_has_no_record_is_swept(twins: Twins):
    async with twins() as twin:
        record = make_record()
        await RecordStore(twin.bus).create(record)
        kept, _ = await put(twin, record.job_id), await put(twin, f"{REGION}-orphan")
        clock = ManualClock(SystemClock().now() + ORPHAN_S + 1.0)
        await ObjectSweep(twin.bus, REGION, clock, may_act=lambda: True).sweep()
        assert [str(each.name) for each in await ObjectStore(twin.bus, REGION).listed()] == [kept.name]
