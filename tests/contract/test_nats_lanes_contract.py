"""What we rely on of NATS for lanes and pulls: held by the real server and by the one that simulations use."""

import asyncio
from functools import partial
from pathlib import Path

import pytest

from laneway.core import subjects
from laneway.core.lanes import Lane
from laneway.runtime.bells import Ring
from laneway.runtime.bus import ApiError, Bus, StreamFull
from laneway.runtime.lanes import LaneDepth, LaneStore
from laneway.runtime.puller import Bell, Delivery, LanePuller
from tests.contract.nats_twins import Twin, Twins, twins_of
from tests.support.lanes import message_count, seen_by
from tests.support.nats import POOL, REGION, TENANT, eventually, make_job, make_record, small_catalogue

LANE = Lane.BATCH
STREAM = subjects.lane_stream(REGION, LANE)
CONSUMER = subjects.consumer(LANE, POOL)
SHORT_S = 0.3  # ack wait, where a redelivery is waited for


@pytest.fixture(
    params=[pytest.param("real", marks=pytest.mark.wire), pytest.param("memory", marks=pytest.mark.looptime)]
)
def twins(request: pytest.FixtureRequest, tmp_path: Path) -> Twins:
    return twins_of(request.param, tmp_path)


def puller_of(bus: Bus) -> LanePuller:
    return LanePuller(bus, REGION, LANE, POOL)


def ready_of(job: str, lane: Lane = LANE) -> str:
    return subjects.ready(REGION, lane, POOL, TENANT, job)


async def send(twin: Twin, *jobs: str) -> None:
    for job in jobs:
        await twin.bus.store(ready_of(job), job.encode(), {"Nats-Msg-Id": f"{job}:1:ready"})


async def put(twin: Twin, *jobs: str) -> None:
    """As `send`, and a pull that does not wait sees them."""
    async with seen_by(twin.bus, LANE, len(jobs)):
        await send(twin, *jobs)


def jobs_of(deliveries: list[Delivery]) -> list[str]:
    return [delivery.data.decode() for delivery in deliveries]


async def depth(twin: Twin, lane: Lane = LANE) -> LaneDepth:
    return await LaneStore(twin.bus, REGION).depths(lane, POOL)


async def depth_is(twin: Twin, ready: int, running: int) -> None:
    """Waits for it: acknowledgements are not answered."""

    async def reached() -> bool:
        return await depth(twin) == LaneDepth(ready, running)

    await eventually(reached)


async def waiting_pulls(twin: Twin) -> int:
    return (await twin.bus.api(f"CONSUMER.INFO.{STREAM}.{CONSUMER}", {}))["num_waiting"]


async def set_consumer(twin: Twin, **changes: object) -> None:
    config = (await twin.bus.api(f"CONSUMER.INFO.{STREAM}.{CONSUMER}", {}))["config"] | changes
    body = {"stream_name": STREAM, "config": config, "action": "update"}
    await twin.bus.api(f"CONSUMER.CREATE.{STREAM}.{CONSUMER}.{config['filter_subject']}", body)


# --- in --------------------------------------------------------------------------------------------------


async def test_a_ready_job_arrives_as_it_was_put(twins: Twins):
    async with twins() as twin:
        job = make_job(make_record(lane=LANE))
        async with seen_by(twin.bus, LANE, 1):
            await LaneStore(twin.bus, REGION).put_ready(job, 42)
        async with puller_of(twin.bus) as puller:
            (delivery,) = await puller.pull(4)
            assert (delivery.job, delivery.record_sequence, delivery.deliveries) == (job, 42, 1)


async def test_a_full_priority_lane_refuses_until_a_job_is_acknowledged(twins: Twins):
    async with twins(catalogue=small_catalogue(slots=1, workers=1, queue_length=1)) as twin:
        async with seen_by(twin.bus, Lane.PRIORITY, 2):
            for job in ("a", "b"):
                await twin.bus.store(ready_of(job, Lane.PRIORITY), b"", {"Nats-Msg-Id": job})
        with pytest.raises(StreamFull, match="maximum messages exceeded"):
            await twin.bus.store(ready_of("c", Lane.PRIORITY), b"")
        # What is there already is not refused.
        again = await twin.bus.store_checked(ready_of("b", Lane.PRIORITY), b"", {"Nats-Msg-Id": "b"})
        assert (again.duplicate, again.sequence) == (True, 2)
        async with LanePuller(twin.bus, REGION, Lane.PRIORITY, POOL) as puller:
            (delivery,) = await puller.pull(1)
            with pytest.raises(StreamFull):
                await twin.bus.store(ready_of("c", Lane.PRIORITY), b"")
            await delivery.ack()

            async def has_room() -> bool:
                return (await depth(twin, Lane.PRIORITY)).running == 0

            await eventually(has_room)
        assert await twin.bus.store(ready_of("c", Lane.PRIORITY), b"") == 3


async def test_a_message_is_known_again_after_it_was_acknowledged(twins: Twins):
    async with twins() as twin:
        await put(twin, "a")
        async with puller_of(twin.bus) as puller:
            (delivery,) = await puller.pull(1)
            await delivery.ack()
            await depth_is(twin, 0, 0)
            assert (await twin.bus.store_checked(ready_of("a"), b"a", {"Nats-Msg-Id": "a:1:ready"})).duplicate
            assert await puller.pull(1) == []
            async with seen_by(twin.bus, LANE, 1):
                assert not (await twin.bus.store_checked(ready_of("a"), b"a", {"Nats-Msg-Id": "a:2:ready"})).duplicate
            assert jobs_of(await puller.pull(1)) == ["a"]


async def test_a_message_is_known_again_after_it_was_purged(twins: Twins):
    """So a job that was cancelled and is put again under the same id is not put."""
    async with twins() as twin:
        await put(twin, "a", "b")
        answer = await twin.bus.api(f"STREAM.PURGE.{STREAM}", {"filter": ready_of("b")})
        assert answer["purged"] == 1
        for job in ("a", "b"):
            assert (await twin.bus.store_checked(ready_of(job), b"", {"Nats-Msg-Id": f"{job}:1:ready"})).duplicate
        assert await message_count(twin.bus, LANE) == 1


async def test_a_lane_refuses_a_time_to_live(twins: Twins):
    async with twins() as twin:
        with pytest.raises(ApiError, match="10166"):
            await twin.bus.store(ready_of("a"), b"", {"Nats-TTL": "60s"})
        assert await message_count(twin.bus, LANE) == 0


async def test_a_ready_job_rings_with_headers_only(twins: Twins):
    async with twins() as twin:
        rung: list[Ring] = []
        heard: list[tuple[bytes, dict[str, str]]] = []
        await twin.bus.listen(subjects.bell(">"), lambda msg: heard.append((msg.data, msg.headers or {})))
        async with Bell(twin.bus, REGION, POOL, rung.append) as bell:
            sequence = await twin.bus.store(ready_of("a"), b"body", {"Own": "header"})
            await bell.ring.wait()
        assert rung == [Ring(LANE, "any")]
        ((data, headers),) = heard
        assert data == b""
        assert {
            "Own": "header",
            "Nats-Sequence": str(sequence),
            "Nats-Subject": ready_of("a"),
        }.items() <= headers.items()


# --- out -------------------------------------------------------------------------------------------------


async def test_a_pull_gives_what_is_there_and_never_more_than_asked(twins: Twins):
    async with twins() as twin:
        await put(twin, *"abcde")
        async with puller_of(twin.bus) as puller:
            first, rest, none = await puller.pull(2), await puller.pull(10), await puller.pull(10)
            assert (jobs_of(first), jobs_of(rest), none, puller.trouble) == (["a", "b"], ["c", "d", "e"], [], "")
            assert [d.pending for d in first + rest] == [4, 3, 2, 1, 0]
            assert await waiting_pulls(twin) == 0
            await depth_is(twin, 0, 5)


async def test_a_pull_may_wait_for_the_first_message(twins: Twins):
    async with twins() as twin, puller_of(twin.bus) as puller:
        assert (await puller.pull(4, wait_s=0.05), puller.trouble) == ([], "")
        pull = asyncio.ensure_future(puller.pull(4, wait_s=50.0))
        await eventually(lambda: waiting_pulls(twin))
        await send(twin, "a")
        assert (jobs_of(await pull), puller.trouble) == (["a"], "")
        assert await waiting_pulls(twin) == 0


async def test_pulls_that_wait_are_served_in_turn(twins: Twins):
    async with twins() as twin:
        pullers = [puller_of(twin.bus) for _ in range(3)]
        heard: list[int] = []
        for n, puller in enumerate(pullers):
            await puller.start()
            puller.hold(50.0, partial(heard.append, n))
        await twin.bus.flush()
        await send(twin, "a", "b", "c")
        await eventually(lambda: len(heard) == 3)
        assert heard == [0, 1, 2]
        assert [jobs_of(await puller.collect()) for puller in pullers] == [["a"], ["b"], ["c"]]
        for puller in pullers:
            await puller.close()


async def test_acknowledgements_do_what_they_say(twins: Twins):
    async with twins() as twin:
        await put(twin, *"abcd")
        async with puller_of(twin.bus) as puller:
            acked, given_back, delayed, removed = await puller.pull(4)
            await acked.ack()
            await removed.term("bad body")
            await given_back.nak()
            await delayed.nak(3600.0)
            again = await eventually(lambda: puller.pull(4))
            assert (jobs_of(again), again[0].deliveries, again[0].pending) == (["b"], 2, 0)
            # The delayed one counts as in flight.
            await depth_is(twin, 0, 2)
            assert await puller.pull(4) == []
            assert await message_count(twin.bus, LANE) == 2


async def test_what_is_not_acknowledged_comes_again_and_progress_holds_it_off(twins: Twins):
    async with twins(ack_wait_s=SHORT_S) as twin, puller_of(twin.bus) as puller:
        await put(twin, "held", "dropped")
        held, _ = await puller.pull(2)
        seen: list[Delivery] = []
        while not seen:
            await held.progress()
            seen = await puller.pull(2, wait_s=SHORT_S / 10)
        assert (seen[0].data, seen[0].deliveries) == (b"dropped", 2)


async def test_an_acknowledgement_of_an_earlier_delivery_counts(twins: Twins):
    """A worker that was slow ends the job, whoever has it again."""
    async with twins(ack_wait_s=SHORT_S) as twin, puller_of(twin.bus) as puller:
        await put(twin, "a")
        (first,) = await puller.pull(1)
        (again,) = await puller.pull(1, wait_s=10.0)
        assert again.deliveries == 2
        await first.ack()
        await depth_is(twin, 0, 0)
        assert await message_count(twin.bus, LANE) == 0
        await again.ack()  # harmless
        assert await puller.pull(1, wait_s=1.5 * SHORT_S) == []


async def test_at_max_ack_pending_a_pull_gets_no_answer_and_one_given_up_claims_nothing(twins: Twins):
    async with twins() as twin, puller_of(twin.bus) as puller:
        await set_consumer(twin, max_ack_pending=1)
        await put(twin, "a", "b", "c")
        (first,) = await puller.pull(1)
        assert await puller.pull(2, timeout_s=0.2) == []
        assert "max_ack_pending" in puller.trouble

        async def none_waits() -> bool:
            return await waiting_pulls(twin) == 0

        await eventually(none_waits)
        await first.ack()
        await depth_is(twin, 2, 0)
        assert jobs_of(await puller.pull(1)) == ["b"]


async def test_a_held_pull_that_is_let_go_claims_nothing_more(twins: Twins):
    async with twins() as twin, puller_of(twin.bus) as puller:
        heard: list[bool] = []
        puller.hold(60.0, lambda: heard.append(True))
        await eventually(lambda: waiting_pulls(twin))
        puller.let_go()
        assert heard == [True]
        assert await puller.collect() == []
        assert puller.trouble == ""
        await put(twin, "a")
        await depth_is(twin, 1, 0)
        assert jobs_of(await puller.pull(1)) == ["a"]


async def test_what_a_held_pull_brought_before_it_was_let_go_is_given(twins: Twins):
    async with twins() as twin, puller_of(twin.bus) as puller:
        puller.hold(60.0, lambda: None)
        await eventually(lambda: waiting_pulls(twin))
        await send(twin, "a", "b")  # the first is on its way, or here
        puller.let_go()
        assert jobs_of(await puller.collect()) == ["a"]
        await depth_is(twin, 1, 1)


@pytest.mark.parametrize("delay_s", [0.0, 0.2])
async def test_a_redelivery_needs_no_room_and_comes_before_what_is_newer(twins: Twins, delay_s: float):
    async with twins() as twin, puller_of(twin.bus) as puller:
        await set_consumer(twin, max_ack_pending=1)
        await put(twin, "a", "b")
        (first,) = await puller.pull(1)
        await first.nak(delay_s)
        again = await puller.pull(1, wait_s=10.0)
        assert (jobs_of(again), again[0].deliveries) == (["a"], 2)


async def test_a_purge_takes_back_what_is_queued_and_what_is_delivered(twins: Twins):
    async with twins() as twin, puller_of(twin.bus) as puller:
        await put(twin, "a", "b", "c")
        running, other = await puller.pull(2)
        for job in ("a", "c"):
            assert (await twin.bus.api(f"STREAM.PURGE.{STREAM}", {"filter": ready_of(job)}))["purged"] == 1
        await depth_is(twin, 0, 1)
        await running.progress()
        await running.nak()
        await running.ack()
        await other.nak()
        again = await puller.pull(4, wait_s=5.0)
        assert jobs_of(again) == ["b"]
        assert await puller.pull(4) == []
        assert await message_count(twin.bus, LANE) == 1


async def test_a_purge_against_a_pull_leaves_all_or_nothing(twins: Twins):
    async with twins() as twin:
        other = await twin.connect("other")
        async with puller_of(other) as puller:
            for n in range(20):
                await send(twin, f"j{n}")
                purge = twin.bus.api(f"STREAM.PURGE.{STREAM}", {"filter": ready_of(f"j{n}")})
                pulled, answer = await asyncio.gather(puller.pull(1), purge)
                assert answer["purged"] == 1
                assert len(pulled) <= 1
        await depth_is(twin, 0, 0)


# --- trouble ---------------------------------------------------------------------------------------------


async def test_a_consumer_that_is_deleted_ends_the_pull(twins: Twins):
    async with twins() as twin, puller_of(twin.bus) as puller:
        pull = asyncio.ensure_future(puller.pull(1, wait_s=30.0))
        await eventually(lambda: waiting_pulls(twin))
        await twin.bus.api(f"CONSUMER.DELETE.{STREAM}.{CONSUMER}", {})
        assert await pull == []
        assert puller.trouble == "409 Consumer Deleted"
        assert await puller.pull(1, timeout_s=30.0) == []
        assert "provisioned" in puller.trouble


async def test_what_comes_after_the_timeout_is_given_by_the_next_pull(twins: Twins):
    async with twins() as twin, puller_of(twin.bus) as puller:
        await put(twin, "a", "b")
        twin.pause()
        pull = asyncio.ensure_future(puller.pull(2, timeout_s=0.2))
        await eventually(lambda: puller.trouble)
        twin.resume()
        got = await pull
        while len(got) < 2:
            got += await puller.pull(2)
        assert jobs_of(got) == ["a", "b"]
        assert {delivery.deliveries for delivery in got} == {1}


async def test_a_killed_server_keeps_jobs_and_forgets_who_waits_and_perhaps_who_was_given_one(twins: Twins):
    """What a consumer did in the last moments before a kill may not have been saved: then it delivers a first time."""
    async with twins() as twin, puller_of(twin.bus) as puller:
        await put(twin, "a", "b")
        async with puller_of(twin.bus) as idle:
            given = await idle.pull(2)
            heard = asyncio.Event()
            idle.hold(60.0, heard.set)
            await eventually(lambda: waiting_pulls(twin))
            await twin.kill()
            await heard.wait()
            assert await idle.collect() == []
            assert "connection" in idle.trouble
            await twin.start()
            await twin.bus.wait_connected(10.0)
            assert await waiting_pulls(twin) == 0
            after = await depth(twin)
            assert after.ready + after.running == await message_count(twin.bus, LANE) == 2
        for delivery in given:
            await delivery.nak()
        again = await puller.pull(2, wait_s=10.0)
        while len(again) < 2:
            again += await puller.pull(1, wait_s=10.0)
        assert sorted(jobs_of(again)) == ["a", "b"]
        assert {delivery.deliveries for delivery in again} <= {1, 2}
