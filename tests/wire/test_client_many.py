"""submit_many() against scripted and real doors: every item gets one outcome, whatever happens to calls on the way."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from laneway.client import Client, InvalidRequest, LaneSaturated, ManyItem, ManyOutcome, Surroundings, Unavailable, sync
from laneway.core.clock import ManualClock
from laneway.core.errors import Unauthenticated
from laneway.runtime.grpc_errors import to_status
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.wire import jobs
from laneway.v1 import admission_pb2 as pb
from tests.support.admission import open_gate
from tests.support.door import VERDICT, Door, serving

pytestmark = pytest.mark.wire


class Time:
    """Virtual time for the client: a sleep moves the clock and is kept."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.clock.advance(seconds)
        await asyncio.sleep(0)

    @property
    def surroundings(self) -> Surroundings:
        return Surroundings(self.clock, self.sleep, lambda: 0.5)


def numbered(count: int) -> list[ManyItem]:
    return [ManyItem({"model": "chat", "prompt": f"Prompt {i}", "lane": "batch"}) for i in range(count)]


def accepted(item: pb.SubmitManyItem) -> pb.SubmitManyOutcome:
    """The job's id is the item's key, so that a repetition shows."""
    answer = pb.SubmitResponse(job_id=item.idempotency_key, verdict=jobs.verdict_to_proto(VERDICT))
    return pb.SubmitManyOutcome(client_ref=item.client_ref, accepted=answer)


def refused(item: pb.SubmitManyItem, error: Any) -> pb.SubmitManyOutcome:
    return pb.SubmitManyOutcome(client_ref=item.client_ref, error=to_status(error))


async def read(context: Any) -> list[pb.SubmitManyItem] | None:
    """The next message's items; None at the half-close."""
    data = await context.read()
    return None if data is grpc.aio.EOF else list(pb.SubmitManyRequest.FromString(data).items)


async def answer(context: Any, *outcomes: pb.SubmitManyOutcome, window: int = 0) -> None:
    await context.write(pb.SubmitManyResponse(window=window, outcomes=outcomes))


async def accepting(context: Any) -> None:
    await answer(context, window=8)
    while (items := await read(context)) is not None:
        await answer(context, *map(accepted, reversed(items)))


@asynccontextmanager
async def scripted(*scripts: Any, time: Time | None = None) -> AsyncIterator[tuple[Door, Client]]:
    async with serving(Door(manys=list(scripts))) as door:
        client = Client(door.address, surroundings=time.surroundings) if time else Client(door.address)
        async with client:
            yield door, client


async def collected(client: Client, items: Any, **more: Any) -> dict[str, ManyOutcome]:
    found = [outcome async for outcome in client.submit_many(items, **more)]
    named = {outcome.ref: outcome for outcome in found}
    assert len(named) == len(found), "an item has two outcomes"
    return named


async def test_every_item_has_an_outcome_under_its_own_name():
    async with scripted(accepting) as (door, client):
        items = [*numbered(40), ManyItem({"model": "chat", "prompt": "Hi"}, "mine", "my key")]
        found = await collected(client, items)
        assert set(found) == {*map(str, range(40)), "mine"}
        assert all(outcome.submitted is not None and outcome.error is None for outcome in found.values())
        mine = found["mine"].submitted
        assert mine is not None
        assert (mine.job_id, mine.verdict.reason) == ("my key", "LANE_OPEN")
        assert door.many_calls == 1


async def test_no_items_make_no_call():
    async with scripted(accepting) as (door, client):
        assert await collected(client, []) == {}
        assert door.many_calls == 0


async def test_no_more_is_taken_than_the_window_and_the_reader_have_room_for():
    taken = 0
    window = 8

    def items() -> Iterator[ManyItem]:
        nonlocal taken
        for item in numbered(100):
            taken += 1
            yield item

    async with scripted(accepting) as (_, client):
        given = 0
        async for _ in client.submit_many(items()):
            given += 1
            assert taken - given <= max(window, 64) + 1
        assert given == 100


async def test_an_async_source_is_taken_as_it_comes():
    async def source() -> AsyncIterator[ManyItem]:
        for item in numbered(20):
            await asyncio.sleep(0)
            yield item

    async with scripted(accepting) as (_, client):
        assert len(await collected(client, source())) == 20


async def test_a_lost_call_is_taken_up_again_with_the_same_keys():
    seen: list[tuple[str, str]] = []

    async def breaking(context: Any) -> None:
        await answer(context, window=64)
        items = await read(context) or []
        seen.extend((item.client_ref, item.idempotency_key) for item in items)
        await answer(context, *map(accepted, items[:3]))
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")

    async def going_on(context: Any) -> None:
        await answer(context, window=64)
        while (items := await read(context)) is not None:
            seen.extend((item.client_ref, item.idempotency_key) for item in items)
            await answer(context, *map(accepted, items))

    async with scripted(breaking, going_on, time=Time()) as (door, client):
        found = await collected(client, numbered(20))
        assert len(found) == 20
        assert door.many_calls == 2
        assert len(set(seen)) == 20, "a repetition has the key of the first"
        assert len(seen) == 20 + 17, "what had an outcome is not sent again"


async def test_a_draining_door_is_left_for_as_long_as_it_says():
    async def draining(context: Any) -> None:
        await answer(context, window=64)
        items = await read(context) or []
        await answer(context, *map(accepted, items[:1]))
        raise Unavailable("shutting down", reason="DRAINING", retry_after_s=1.0)

    time = Time()
    async with scripted(draining, accepting, time=time) as (_, client):
        assert len(await collected(client, numbered(5))) == 5
        assert len(time.slept) == 1
        assert time.slept[0] >= 1.0


async def test_an_outage_has_an_end():
    async def breaking(context: Any) -> None:
        await answer(context, window=64)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")

    time = Time()
    async with scripted(breaking, time=time) as (_, client):
        with pytest.raises(Unavailable):
            await collected(client, numbered(5))
        assert 30.0 < sum(time.slept) < 120.0


async def test_what_no_repetition_can_mend_is_raised_at_once():
    async def refusing(context: Any) -> None:
        raise Unauthenticated("the token is not known")

    async with scripted(refusing) as (door, client):
        with pytest.raises(Unauthenticated):
            await collected(client, numbered(5))
        assert door.many_calls == 1


async def test_a_refusal_with_a_time_is_sent_again_then_and_others_are_outcomes():
    tries: list[str] = []

    async def choosing(context: Any) -> None:
        await answer(context, window=64)
        while (items := await read(context)) is not None:
            for item in items:
                tries.append(item.client_ref)
                error: Exception | None = None
                if item.client_ref == "1" and tries.count("1") < 3:
                    error = LaneSaturated("full", retry_after_s=7.0)
                if item.client_ref == "2":
                    error = InvalidRequest("no", field="spec.model")
                await answer(context, refused(item, error) if error else accepted(item))

    time = Time()
    async with scripted(choosing, time=time) as (_, client):
        found = await collected(client, numbered(4))
    assert sorted(tries) == ["0", "1", "1", "1", "2", "3"]
    assert time.slept == [7.0, 7.0]
    assert found["1"].submitted is not None
    refusal = found["2"].error
    assert isinstance(refusal, InvalidRequest)
    assert refusal.field == "spec.model"


async def test_a_refusal_is_not_repeated_for_ever():
    async def full(context: Any) -> None:
        await answer(context, window=64)
        while (items := await read(context)) is not None:
            await answer(context, *(refused(item, LaneSaturated("full", retry_after_s=7.0)) for item in items))

    time = Time()
    async with scripted(full, time=time) as (_, client):
        found = await collected(client, numbered(1), retry_s_max=20.0)
    assert isinstance(found["0"].error, LaneSaturated)
    assert time.slept == [7.0, 7.0]


async def test_what_cannot_be_sent_is_an_outcome_as_well():
    items: list[Any] = [
        *numbered(1),
        ManyItem({"model": "chat"}, "no prompt"),
        ManyItem({"model": "chat", "prompt": "x" * 8_400_000}, "long"),
        ManyItem({"model": "chat", "prompt": "Hi"}, "\ud800"),
    ]
    async with scripted(accepting) as (_, client):
        found = await collected(client, items)
    assert found["0"].submitted is not None
    reasons = {ref: found[ref].error.reason for ref in ("no prompt", "long", "\ud800")}  # type: ignore[union-attr]
    assert reasons["long"] == "MESSAGE_TOO_LARGE"
    assert all(isinstance(found[ref].error, InvalidRequest) for ref in reasons)


async def test_an_error_of_the_source_ends_it_as_it_is():
    def items() -> Iterator[ManyItem]:
        yield from numbered(3)
        raise KeyError("mine")

    async with scripted(accepting) as (_, client):
        with pytest.raises(KeyError, match="mine"):
            await collected(client, items())


async def test_leaving_early_ends_the_call():
    async with scripted(accepting) as (door, client):
        async with contextlib.aclosing(client.submit_many(numbered(1000))) as outcomes:
            async for _ in outcomes:
                break
        assert door.server is not None
        assert await door.server._edge.wait_quiet(10)


async def test_a_real_door_accepts_them_and_a_second_time_the_same_jobs(nats_server: LocalNats, tmp_path: Path):
    async with open_gate(nats_server, tmp_path) as (door, _):
        address = door.address
        items = [
            ManyItem({"model": "chat", "prompt": f"{i}", "lane": "batch", "max_tokens": 4}, f"{i}", f"key {i}")
            for i in range(600)
        ]
        async with Client(address) as client:
            first = await collected(client, items)
        assert all(outcome.submitted for outcome in first.values())
        assert await door.messages() == len(items)

        def again() -> dict[str, ManyOutcome]:
            with sync.Client(address) as client:
                return {outcome.ref: outcome for outcome in client.submit_many(items)}

        second = await asyncio.to_thread(again)
        assert {ref: outcome.submitted.job_id for ref, outcome in first.items() if outcome.submitted} == {
            ref: outcome.submitted.job_id for ref, outcome in second.items() if outcome.submitted
        }
        assert await door.messages() == len(items)
