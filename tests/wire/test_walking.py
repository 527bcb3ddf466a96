"""Pages of a stream, last written first, while jobs come, change and go."""

import random

import pytest

from laneway.core import subjects
from laneway.runtime.bus import Bus
from laneway.runtime.walking import Place, Walk
from tests.support.nats import REGION, TENANT

pytestmark = pytest.mark.wire
STREAM = subjects.jobs_stream(REGION)


async def write(bus: Bus, job: int, tenant: str = TENANT) -> int:
    return await bus.store(subjects.record(REGION, tenant, f"j{job}"), b"j%d" % job)


def walk_of(bus: Bus, tenant: str = TENANT) -> Walk:
    return Walk(bus, STREAM, subjects.records_of(REGION, tenant))


async def rest(walk: Walk, place: Place, count: int) -> list[str]:
    out: list[str] = []
    while True:
        found, place = await walk.step(place, count)
        if not found:
            return out
        out += [message.data.decode() for message in found]


@pytest.mark.parametrize("seed", range(3))
async def test_a_walk_gives_each_message_once_from_the_last_to_the_first(provisioned_bus: Bus, seed: int) -> None:
    """With other tenants' records between, in clumps and alone, and old ones written again."""
    rng = random.Random(seed)
    written: list[str] = []
    for number in range(150):
        tenant = TENANT if rng.random() < rng.choice((0.05, 0.9)) else "other"
        job = rng.randrange(100) if tenant == TENANT else number
        await write(provisioned_bus, job, tenant)
        if tenant == TENANT:
            written = [each for each in written if each != f"j{job}"] + [f"j{job}"]
    walk = walk_of(provisioned_bus)
    assert await rest(walk, await walk.start(), rng.choice((1, 7, 500))) == written[::-1]
    assert await rest(walk_of(provisioned_bus, "nobody"), await walk.start(), 3) == []


async def test_what_changes_during_a_walk_is_not_missed(provisioned_bus: Bus) -> None:
    for job in range(6):
        await write(provisioned_bus, job)
    walk = walk_of(provisioned_bus)
    found, place = await walk.step(await walk.start(), 2)
    assert [message.data for message in found] == [b"j5", b"j4"]
    await write(provisioned_bus, 1)
    await write(provisioned_bus, 6)
    assert not await walk.at_end(place)
    assert await rest(walk, Place.parse(str(place)), 2) == ["j3", "j2", "j0", "j1", "j6"]


async def test_the_end_is_known_without_another_page(provisioned_bus: Bus) -> None:
    walk = walk_of(provisioned_bus)
    assert await walk.at_end(await walk.start())
    for job in range(4):
        await write(provisioned_bus, job)
    _, half = await walk.step(await walk.start(), 2)
    assert not await walk.at_end(half)
    _, done = await walk.step(half, 2)
    assert await walk.at_end(done)


async def test_a_page_reads_about_as_many_messages_as_it_gives(
    provisioned_bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clump of another tenant's records, then ours: counted requests, not time."""
    for job in range(300):
        await write(provisioned_bus, job)
    for job in range(300):
        await write(provisioned_bus, job, "other")
    asked = 0
    plain = provisioned_bus.api

    async def counted(*args, **kwargs):
        nonlocal asked
        asked += 1
        return await plain(*args, **kwargs)

    monkeypatch.setattr(provisioned_bus, "api", counted)
    walk = walk_of(provisioned_bus)
    place = await walk.start()
    found, _ = await walk.step(place, 10)
    assert len(found) == 10
    assert asked <= 150


@pytest.mark.parametrize("text", ["", "7", "7.", "a.b", "-1.7", "7.-1", "1.2.3", f"7.{2**63}", f"{2**63 + 1}.7"])
def test_a_place_that_is_none_is_told_from_one(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Place.parse(text)


@pytest.mark.parametrize("place", [Place(0, 0), Place(2**63, 2**63 - 1)])
async def test_every_place_that_can_be_told_can_be_gone_to(provisioned_bus: Bus, place: Place) -> None:
    await write(provisioned_bus, 1)
    walk = walk_of(provisioned_bus)
    place = Place.parse(str(place))
    await rest(walk, place, 2)
    await walk.at_end(place)
