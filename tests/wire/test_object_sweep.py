"""What nobody refers to goes from the object store, and nothing else, by a clock that the test moves."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from laneway.core import subjects
from laneway.core.clock import ManualClock
from laneway.core.errors import Code
from laneway.core.job import JobError, JobRecord, refuse
from laneway.core.objects import TASK, ObjectName
from laneway.runtime.bus import Bus
from laneway.runtime.clock import SystemClock
from laneway.runtime.objects import KEPT_BEYOND_S, ListedObject, ObjectStore
from laneway.runtime.records import RecordStore
from laneway.runtime.references import References
from laneway.scheduler import object_sweep as module
from laneway.scheduler.object_sweep import ORPHAN_S, ObjectSweep, verdict_on
from tests.support.nats import REGION, make_record

pytestmark = pytest.mark.wire

DAY_S = 86_400.0


class Place:
    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.clock = ManualClock(SystemClock().now())
        self.objects = ObjectStore(bus, REGION, clock=self.clock)
        self.references = References(self.objects)
        self.may_act = True
        self.sweep = ObjectSweep(bus, REGION, self.clock, may_act=lambda: self.may_act)

    async def put(self, record: JobRecord, kind: str = TASK) -> str:
        now_s = self.clock.now()
        until_s = record.contract.deadline_s + DAY_S
        assert until_s > now_s
        return (await self.objects.put(record.tenant, record.job_id, kind, b"x" * 300_000, until_s=until_s)).name

    async def left(self) -> set[str]:
        return {str(each.name) for each in await self.objects.listed()}

    async def messages(self) -> int:
        return int((await self.bus.api(f"STREAM.INFO.{subjects.objects_stream(REGION)}", {}))["state"]["messages"])


@pytest.fixture
async def place(provisioned_bus: Bus) -> Place:
    return Place(provisioned_bus)


async def test_an_object_without_a_record_goes_after_an_hour_and_one_with_a_record_stays(place: Place):
    record, orphan = make_record(), make_record()
    await RecordStore(place.bus).create(record)
    kept, gone = await place.put(record), await place.put(orphan)
    await place.sweep.sweep()
    assert await place.left() == {kept, gone}
    place.clock.advance(ORPHAN_S - 2.0)
    await place.sweep.sweep()
    assert await place.left() == {kept, gone}
    place.clock.advance(3.0)
    await place.sweep.sweep()
    assert await place.left() == {kept}
    assert await place.messages() == 4, "three chunks and the facts of the one that stays"


async def test_a_put_that_was_never_finished_goes_though_its_job_has_a_record(place: Place):
    record = make_record()
    await RecordStore(place.bus).create(record)
    whole, part = await place.put(record), await place.put(record, "result-1")
    await place.bus.api(
        f"STREAM.PURGE.{subjects.objects_stream(REGION)}",
        {"filter": subjects.object_facts(REGION, ObjectName.parse(part))},
    )
    place.clock.advance(ORPHAN_S + 1.0)
    await place.sweep.sweep()
    assert await place.left() == {whole}
    assert await place.messages() == 4


async def test_an_object_outlives_its_record_by_a_day(place: Place):
    """The record is gone here as if it had expired; the server removes the object by its TTL, and the sweep agrees."""
    name = await place.put(make_record())
    parsed = ObjectName.parse(name)
    place.clock.advance(parsed.until_s - place.clock.now() + 1.0)
    await place.sweep.sweep()
    assert await place.left() == {name}
    place.clock.advance(KEPT_BEYOND_S)
    await place.sweep.sweep()
    assert await place.left() == set()


@pytest.mark.slow
async def test_a_record_in_any_state_keeps_its_objects(place: Place):
    record = make_record()
    refused = refuse(record, JobError(Code.RESOURCE_EXHAUSTED, "LANE_SATURATED", ""), 1.0)
    await RecordStore(place.bus).create(refused)
    name = await place.put(record)
    place.clock.advance(ORPHAN_S + 1.0)
    await place.sweep.sweep()
    assert await place.left() == {name}


@pytest.mark.slow
async def test_who_does_not_lead_takes_nothing_away(place: Place):
    name = await place.put(make_record())
    place.clock.advance(ORPHAN_S + 1.0)
    place.may_act = False
    await place.sweep.sweep()
    assert await place.left() == {name}


@pytest.mark.slow
@pytest.mark.parametrize(("looks", "sweeps"), [(4, 1), (3, 2), (1, 4)])
async def test_each_sweep_looks_for_a_bounded_number_of_records_and_all_get_their_turn(
    place: Place, monkeypatch: pytest.MonkeyPatch, looks: int, sweeps: int
):
    monkeypatch.setattr(module, "LOOKS_MAX", looks)
    for number in range(4):
        record = make_record(f"{REGION}-{number}")
        if number % 2:
            await RecordStore(place.bus).create(record)
        await place.put(record)
    place.clock.advance(ORPHAN_S + 1.0)
    asked = 0
    true_look = place.sweep._has_record

    async def look(name: ObjectName) -> bool:
        nonlocal asked
        asked += 1
        return await true_look(name)

    monkeypatch.setattr(place.sweep, "_has_record", look)
    for count in range(1, sweeps + 1):
        await place.sweep.sweep()
        assert asked <= looks * count
    assert {ObjectName.parse(name).job_id for name in await place.left()} == {f"{REGION}-1", f"{REGION}-3"}


@pytest.mark.parametrize(
    ("age_s", "whole", "verdict"),
    [
        (ORPHAN_S - 1, True, None),
        (ORPHAN_S - 1, False, None),
        (ORPHAN_S, True, ""),
        (ORPHAN_S, False, "incomplete"),
        (9_999, True, ""),
        (10_000, True, None),
        (10_000 + KEPT_BEYOND_S - 1, True, None),
        (10_000 + KEPT_BEYOND_S, True, "expired"),
        (10_000 + KEPT_BEYOND_S, False, "incomplete"),
    ],
)
def test_what_becomes_of_an_object_at_each_age(age_s: float, whole: bool, verdict: str | None):
    name = ObjectName("acme", "local-1", TASK, made_s=50_000, until_s=60_000, tag="t")
    assert verdict_on(ListedObject(name, whole), 50_000 + age_s) == verdict
    assert verdict_on(replace(ListedObject(name, whole), name=replace(name, made_s=50_000)), 0.0) is None
