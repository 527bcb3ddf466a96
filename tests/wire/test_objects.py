"""The object store against a real nats-server: what is put comes back, whole or not at all, and others can read it."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace

from laneway.core import subjects
from laneway.core.catalogue import Catalogue
from laneway.core.clock import ManualClock
from laneway.core.errors import ObjectLost, ObjectStoreFull
from laneway.core.objects import TASK, ObjectName
from laneway.runtime import objects as module
from laneway.runtime.bus import Bus, NotPermitted, PublishUnknown
from laneway.runtime.clock import SystemClock
from laneway.runtime.objects import (
    CHUNK_BYTES,
    KEPT_BEYOND_S,
    ObjectStore,
    ObjectTooLarge,
)
from laneway.runtime.reading import last_from_leader
from laneway.scheduler.object_sweep import ORPHAN_S, ObjectSweep
from tests.support.nats import REGION, TENANT, provision_region
from tests.support.rights import guarded_region

pytestmark = pytest.mark.wire

STREAM = subjects.objects_stream(REGION)
JOB = f"{REGION}-job1"


@pytest.fixture
async def store(provisioned_bus: Bus) -> ObjectStore:
    return ObjectStore(provisioned_bus, REGION)


def some(size: int, seed: int = 7) -> bytes:
    return Random(seed).randbytes(size)


async def put(store: ObjectStore, data: bytes, kind: str = TASK, left_s: float = 600.0):
    return await store.put(TENANT, JOB, kind, data, until_s=SystemClock().now() + left_s)


async def messages(bus: Bus) -> int:
    return int((await bus.api(f"STREAM.INFO.{STREAM}", {}))["state"]["messages"])


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 9 * CHUNK_BYTES + 5])
async def test_what_is_put_comes_back(store: ObjectStore, size: int):
    data = some(size)
    ref = await put(store, data)
    assert (ref.size_bytes, ref.sha256) == (size, hashlib.sha256(data).digest())
    assert await store.get(ref) == data
    (listed,) = await store.listed()
    assert (str(listed.name), listed.whole) == (ref.name, True)


async def test_the_official_client_reads_lists_and_deletes_what_we_put(store: ObjectStore, provisioned_bus: Bus):
    data = some(5 * CHUNK_BYTES + 17)
    ref = await put(store, data)
    theirs = await provisioned_bus.nc.jetstream().object_store(subjects.objects_bucket(REGION))
    (info,) = await theirs.list()
    assert (info.name, info.size, info.chunks) == (ref.name, len(data), 6)
    assert (await theirs.get(ref.name)).data == data
    await theirs.delete(ref.name)
    with pytest.raises(ObjectLost, match="gone"):
        await store.get(ref)


@pytest.mark.slow
async def test_objects_of_the_official_client_are_left_alone(store: ObjectStore, provisioned_bus: Bus):
    theirs = await provisioned_bus.nc.jetstream().object_store(subjects.objects_bucket(REGION))
    await theirs.put("notes", b"by hand")
    assert await store.listed() == []


@pytest.mark.slow
async def test_an_object_has_a_limit(store: ObjectStore, provisioned_bus: Bus, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "OBJECT_BYTES_MAX", CHUNK_BYTES)
    ref = await put(store, some(CHUNK_BYTES))
    assert await store.get(ref) == some(CHUNK_BYTES)
    before = await messages(provisioned_bus)
    with pytest.raises(ObjectTooLarge, match=f"{CHUNK_BYTES + 1} bytes.*{CHUNK_BYTES}"):
        await put(store, some(CHUNK_BYTES + 1))
    assert await messages(provisioned_bus) == before
    with pytest.raises(ObjectLost, match="more than an object may have"):
        await store.get(replace(ref, size_bytes=CHUNK_BYTES + 1))


async def test_what_is_not_what_was_put_is_lost(store: ObjectStore, provisioned_bus: Bus):
    ref = await put(store, some(2 * CHUNK_BYTES))
    name = ObjectName.parse(ref.name)
    for wrong in (replace(ref, sha256=bytes(32)), replace(ref, size_bytes=3), replace(ref, size_bytes=10**6)):
        with pytest.raises(ObjectLost):
            await store.get(wrong)
    with pytest.raises(ObjectLost, match="names no object"):
        await store.get(replace(ref, name="../other"))
    await provisioned_bus.store(subjects.object_chunk(REGION, name, 1), some(CHUNK_BYTES, seed=8))
    with pytest.raises(ObjectLost, match="not what was put"):
        await store.get(ref)


@pytest.mark.slow
async def test_removing_leaves_nothing_and_may_be_repeated(store: ObjectStore, provisioned_bus: Bus):
    kept, gone = await put(store, b"kept"), await put(store, some(3 * CHUNK_BYTES))
    for _ in range(2):
        await store.remove(ObjectName.parse(gone.name))
    assert await messages(provisioned_bus) == 2
    assert await store.get(kept) == b"kept"
    with pytest.raises(ObjectLost, match="gone"):
        await store.get(gone)


@pytest.mark.slow
async def test_each_put_is_an_object_of_its_own(store: ObjectStore):
    first, second = await put(store, b"one", "result-1"), await put(store, b"two", "result-1")
    assert (await store.get(first), await store.get(second)) == (b"one", b"two")


async def test_a_full_store_refuses_and_keeps_nothing_of_it(bus: Bus, catalogue: Catalogue):
    await provision_region(bus, catalogue, objects_bytes_max=4 * CHUNK_BYTES)
    store = ObjectStore(bus, REGION)
    ref = await put(store, some(CHUNK_BYTES))
    with pytest.raises(ObjectStoreFull) as refused:
        await put(store, some(5 * CHUNK_BYTES))
    assert (refused.value.reason, refused.value.row.label) == ("OBJECT_STORE_FULL", "storage_full")
    assert await messages(bus) == 2
    assert await store.get(ref) == some(CHUNK_BYTES)
    assert await store.get(await put(store, some(2 * CHUNK_BYTES, seed=9))) == some(2 * CHUNK_BYTES, seed=9)


@pytest.mark.slow
async def test_everything_of_an_object_expires_a_day_after_its_record(store: ObjectStore, provisioned_bus: Bus):
    await put(store, some(CHUNK_BYTES + 1), left_s=600.0)
    for sequence in (1, 2, 3):
        answer = await provisioned_bus.api(f"STREAM.MSG.GET.{STREAM}", {"seq": sequence})
        stored = await last_from_leader(provisioned_bus, STREAM, answer["message"]["subject"])
        assert stored is not None
        assert 600 + KEPT_BEYOND_S <= int(stored.headers["Nats-TTL"].removesuffix("s")) <= 602 + KEPT_BEYOND_S


@pytest.mark.slow
async def test_a_chunk_whose_acknowledgement_is_lost_is_stored_once(
    store: ObjectStore, provisioned_bus: Bus, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "RETRY_S", 0.001)
    true_store, lost = provisioned_bus.store, 0

    async def store_and_lose(subject: str, *args, **kwargs):
        nonlocal lost
        sequence = await true_store(subject, *args, **kwargs)
        if lost < 3:
            lost += 1
            raise PublishUnknown("lost")
        return sequence

    monkeypatch.setattr(provisioned_bus, "store", store_and_lose)
    data = some(3 * CHUNK_BYTES)
    ref = await put(store, data)
    assert (lost, await messages(provisioned_bus)) == (3, 4)
    assert await store.get(ref) == data


@pytest.mark.slow
async def test_who_is_cancelled_while_it_puts_leaves_a_part_that_can_be_told(
    store: ObjectStore, provisioned_bus: Bus, monkeypatch: pytest.MonkeyPatch
):
    true_store, stuck = provisioned_bus.store, asyncio.Event()

    async def store_some(subject: str, *args, **kwargs):
        if subject.endswith(".4"):
            stuck.set()
            await asyncio.Event().wait()
        return await true_store(subject, *args, **kwargs)

    monkeypatch.setattr(provisioned_bus, "store", store_some)
    putting = asyncio.ensure_future(put(store, some(6 * CHUNK_BYTES)))
    await stuck.wait()
    putting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await putting
    (listed,) = await store.listed()
    assert (listed.name.job_id, listed.whole) == (JOB, False)


async def test_a_producer_reads_the_objects_of_its_own_tenant_alone(tmp_path: Path):
    async with (
        guarded_region(tmp_path) as region,
        region.bus("worker") as worker,
        region.bus("producer-acme") as acme,
        region.bus("producer-other") as other,
    ):
        data = some(2 * CHUNK_BYTES)
        ref = await ObjectStore(worker, REGION).put("acme", JOB, "result-1", data, until_s=SystemClock().now() + 60.0)
        assert await ObjectStore(acme, REGION).get(ref) == data
        with pytest.raises(NotPermitted):
            await ObjectStore(other, REGION).get(ref)
        for body in (b'{"seq":1}', b'{"multi_last":["$O.>"]}'):
            stolen = await other.request(f"$JS.API.DIRECT.GET.{STREAM}.$O.OBJECTS_{REGION}.C.other.any", body)
            assert stolen.data == b"", "a body does not widen what the subject says"


async def test_every_role_has_the_rights_for_its_part_and_others_have_none(tmp_path: Path):
    clock = ManualClock(SystemClock().now())
    async with guarded_region(tmp_path) as region, region.bus("scheduler") as scheduler:
        for user in ("admission", "worker"):
            async with region.bus(user) as bus:
                store = ObjectStore(bus, REGION, clock=clock)
                kept, gone = await put(store, some(CHUNK_BYTES + 1), left_s=10_000.0), await put(store, b"in vain")
                assert await store.get(kept) == some(CHUNK_BYTES + 1)
                await store.remove(ObjectName.parse(gone.name))
                with pytest.raises(ObjectLost):  # by the leader's word
                    await store.get(gone)
        async with region.bus("admission") as bus:
            assert await ObjectStore(bus, REGION).used() > 0.0
        assert len(await ObjectStore(scheduler, REGION).listed()) == 2
        clock.advance(ORPHAN_S + 1.0)
        await ObjectSweep(scheduler, REGION, clock, may_act=lambda: True).sweep()
        assert await ObjectStore(scheduler, REGION).listed() == []
        for user in ("scheduler", "routing", "operator", "producer-acme"):
            async with region.bus(user) as bus:
                with pytest.raises(NotPermitted):
                    await put(ObjectStore(bus, REGION), b"not theirs")
