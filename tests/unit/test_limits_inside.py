"""Limits on what processes remember, send together and do at once: N fits, N + 1 does not, and nothing else is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
from google.rpc import error_details_pb2
from nats.aio.msg import Msg

from laneway.admission import ledger as ledgers
from laneway.admission.ledger import Ledger
from laneway.admission.signals import ATTACHMENT_SIZE, BEAT_SIZE_MAX, Attachment, encode_beats
from laneway.admission.storage import AGAIN_S, ANSWER_S_MAX, POLLS_MISSED_MAX, StorageWatch
from laneway.client import many as client_many
from laneway.client.channel import Surroundings
from laneway.client.many import ManyItem, Submission
from laneway.client.request import RequestFields
from laneway.core import subjects
from laneway.core.clock import ManualClock
from laneway.core.errors import JobNotFound
from laneway.core.ids import REGION_LENGTH_MAX, TOKEN_LENGTH_MAX
from laneway.core.lanes import Lane
from laneway.core.subjects import SUBJECT_BYTES_MAX, ParkSubject
from laneway.policy.eta import Load
from laneway.policy.lengths import KEYS_MAX, OBSERVATIONS_MIN, LengthBook
from laneway.policy.parked import ParkIndex
from laneway.policy.release import ReleaseParams
from laneway.routing import exchange as exchanges
from laneway.routing.exchange import Exchange
from laneway.runtime import grpc_errors
from laneway.runtime.lanes import ReleaseOutcome
from laneway.runtime.records import TTL_S_MAX, RecordStore
from laneway.scheduler import decisions, parking, planner, releaser, stagger
from laneway.scheduler.decisions import DecisionLog, Step
from laneway.scheduler.parking import Parking
from laneway.scheduler.planner import ReadyAges
from laneway.scheduler.releaser import Releaser
from laneway.scheduler.stagger import Staggerer
from laneway.v1 import routing_pb2
from tests.support.nats import make_record

POOL = "p"


def park(job: str, *, due_s: float = 1_900_000_000.0, cost_ms: int = 1000) -> ParkSubject:
    return ParkSubject("local", Lane.BATCH, POOL, "acme", 0, round(due_s * 1000), cost_ms, "g" * 10, job)


# --- names -----------------------------------------------------------------------------------------


def test_the_longest_names_fit_into_a_subject():
    name, region = "t" * TOKEN_LENGTH_MAX, "r" * REGION_LENGTH_MAX
    far_ms = 253_402_300_799_000  # the end of the year 9999
    parked = ParkSubject(region, Lane.DEFERRABLE, name, name, far_ms, far_ms, 10**15, "g" * 10, name)
    longest = [
        subjects.record(region, name, name),
        subjects.ready(region, Lane.DEFERRABLE, name, name, name, home=name),
        str(parked),
        subjects.bell(str(parked)),
        subjects.verdict(region, name, name),
        subjects.event(region, name),
    ]
    assert max(map(len, longest)) <= SUBJECT_BYTES_MAX
    with pytest.raises(ValueError, match="not a subject token"):
        subjects.record(region, name + "t", name)


# --- errors ----------------------------------------------------------------------------------------


def facts_of(error: JobNotFound) -> dict[str, str]:
    info = error_details_pb2.ErrorInfo()
    assert grpc_errors.to_status(error).details[0].Unpack(info)
    return dict(info.metadata)


def test_an_error_carries_so_many_facts_of_such_a_length_and_no_more():
    most, length = grpc_errors.FACTS_MAX, grpc_errors.FACT_BYTES_MAX
    assert len(facts_of(JobNotFound(facts={f"f{i}": "x" for i in range(most)}))) == most
    assert len(facts_of(JobNotFound(facts={f"f{i}": "x" for i in range(most + 1)}))) == most
    assert facts_of(JobNotFound(facts={"f": "x" * length}))["f"] == "x" * length
    assert len(facts_of(JobNotFound(facts={"f": "x" * (length + 1)}))["f"].encode()) <= length


def test_a_message_of_an_error_is_cut_beyond_its_limit():
    length = grpc_errors.MESSAGE_BYTES_MAX
    assert grpc_errors.to_status(JobNotFound("x" * length)).message == "x" * length
    cut = grpc_errors.to_status(JobNotFound("é" * length)).message
    assert len(cut.encode()) <= length
    assert cut.endswith("…")


# --- admission -------------------------------------------------------------------------------------


def test_a_door_awaits_the_ends_of_so_many_jobs_and_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ledgers, "LIVE_JOBS_MAX", 3)
    ledger = Ledger(ManualClock())
    for i in range(3):
        ledger.add(POOL, f"j{i}", Load(jobs=1), 1000.0)
    assert all(ledger.awaits(f"j{i}") for i in range(3))
    ledger.add(POOL, "j3", Load(jobs=1), 1000.0)
    assert [ledger.awaits(f"j{i}") for i in range(4)] == [False, True, True, True]


def test_a_beat_carries_so_many_ids_and_the_rest_goes_into_another():
    def beats(count: int) -> int:
        ids = BEAT_SIZE_MAX // 2 - ATTACHMENT_SIZE
        return len(list(encode_beats("door", [Attachment(f"j{i}", 2, ids, (1,) * ids) for i in range(count)])))

    assert (beats(2), beats(3)) == (1, 2)


class Storage:
    async def storage_used(self) -> float:
        return 0.5

    async def used(self) -> float:
        return 0.5


async def test_storage_counts_as_unknown_after_so_many_missed_polls():
    clock = ManualClock()
    watch = StorageWatch(cast(Any, Storage()), cast(Any, Storage()), clock, poll_s=2.0)
    await watch.poll()
    clock.advance(POLLS_MISSED_MAX * 2.0)
    assert watch.used() == 0.5
    clock.advance(0.001)
    assert watch.used() is None


@pytest.mark.looptime
async def test_who_does_not_say_how_full_the_storage_is_is_soon_asked_again():
    """A request to a server that died is never answered; another server may know by then."""

    class Silent(Storage):
        asked_s: ClassVar[list[float]] = []

        async def storage_used(self) -> float:
            self.asked_s.append(asyncio.get_running_loop().time())
            await asyncio.Event().wait()
            raise AssertionError

    watch = StorageWatch(cast(Any, Silent()), cast(Any, Storage()), ManualClock(), poll_s=2.0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(10.0):
            await watch.run()
    assert Silent.asked_s == pytest.approx([n * (ANSWER_S_MAX + AGAIN_S) for n in range(4)])


def test_the_lengths_of_so_many_tenants_are_known_and_the_oldest_is_forgotten():
    book = LengthBook()
    for _ in range(OBSERVATIONS_MIN):
        book.observe("first", "chat", 10)
    for i in range(KEYS_MAX - 2):  # beside `first` and all tenants together
        book.observe(f"t{i}", "chat", 1000)
    assert book.predict("first", "chat", 0.5, 5000) < 20
    book.observe("one more", "chat", 1000)
    assert book.predict("first", "chat", 0.5, 5000) > 500, "what is known of all"


def test_a_record_is_kept_no_longer_than_its_limit():
    clock = ManualClock()
    store = RecordStore(cast(Any, None), retention_s=3600.0, clock=clock)

    def ttl_s(due_in_s: float) -> int:
        record = make_record()
        contract = record.contract.__class__(Lane.BATCH, 1.0, 1.0, deadline_s=clock.now() + due_in_s)
        return store._ttl_s(make_record(contract=contract))

    assert ttl_s(TTL_S_MAX - 3600.0 - 1) == TTL_S_MAX - 1
    assert ttl_s(TTL_S_MAX - 3600.0) == ttl_s(2 * TTL_S_MAX) == TTL_S_MAX


# --- the scheduler ---------------------------------------------------------------------------------


def test_the_decision_log_keeps_so_many_jobs_and_so_many_steps_of_each():
    log = DecisionLog(jobs_max=3, steps_max=2)
    for i in range(3):
        log.add(f"j{i}", Step(0.0, "held", "A"))
    assert log.of("j0")
    log.add("j3", Step(0.0, "held", "A"))
    assert [len(log.of(f"j{i}")) for i in range(4)] == [0, 1, 1, 1]
    for reason in ("B", "C"):
        log.add("j3", Step(0.0, "held", reason))
    assert [step.reason for step in log.of("j3")] == ["B", "C"]
    assert (DecisionLog()._jobs_max, DecisionLog()._steps_max) == (decisions.JOBS_MAX, decisions.STEPS_MAX)


def test_so_many_newcomers_get_a_line_and_all_are_in_the_index(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parking, "NEWCOMERS_MAX", 3)
    parked = Parking(cast(Any, None), "local", ManualClock(), lambda: None)
    for i in range(4):
        parked._parked(park(f"j{i}"))
    assert parked.newcomers() == ["j0", "j1", "j2"]
    assert len(parked.index) == 4
    parked._add([park(f"k{i}") for i in range(4)])
    assert parked.newcomers() == ["k0", "k1", "k2"]


def test_the_ages_of_so_many_ready_messages_are_known(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(planner, "WAITS_MAX", 3)
    clock = ManualClock()
    ages = ReadyAges(clock)
    for _ in range(3):
        ages.rang(POOL, Lane.BATCH)
        clock.advance(1.0)
    assert ages.oldest_s(POOL, Lane.BATCH, ready=5) == 3.0
    ages.rang(POOL, Lane.BATCH)
    assert ages.oldest_s(POOL, Lane.BATCH, ready=5) == 2.0, "of those that are known"


class Releases:
    """Counts releases that are under way at a time, and fire times that were moved."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.moved: list[str] = []

    async def release(self, park: ParkSubject, *, now_s: float, reason: str) -> ReleaseOutcome:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        return ReleaseOutcome.RELEASED

    async def restagger(self, park: ParkSubject, at_s: float, *, now_s: float) -> ReleaseOutcome:
        self.moved.append(park.job)
        return ReleaseOutcome.RELEASED


async def test_so_many_releases_are_under_way_at_once():
    lanes, clock, count = Releases(), ManualClock(), 2 * releaser.CONCURRENT_MAX
    parked = Parking(cast(Any, None), "local", clock, lambda: None)
    parks = [park(f"j{i}") for i in range(count)]
    parked.index.add_all(parks, now_ms=0)
    released: Counter[tuple[str, Lane]] = Counter()
    acting = Releaser(cast(Any, lanes), parked, DecisionLog(), clock, ReleaseParams, lambda: True, released)
    await acting.rescue(parks)
    assert released[POOL, Lane.BATCH] == count
    assert lanes.most == releaser.CONCURRENT_MAX


@pytest.mark.parametrize(("jobs", "moved"), [(stagger.MOVES_MAX, 0), (stagger.MOVES_MAX + 1, 1)])
async def test_a_round_moves_so_many_fire_times_and_the_next_one_goes_on(jobs: int, moved: int):
    lanes, clock = Releases(), ManualClock()
    # All due at once, each of ten seconds' work, so that all but the last must fire earlier.
    due_s = clock.now() + 100_000.0
    index = ParkIndex([park(f"j{i:05}", due_s=due_s, cost_ms=10_000) for i in range(jobs + 1)])
    rounds = Staggerer(cast(Any, lanes), clock, lambda: True)
    assert await rounds.stagger(index, POOL, floor_rate=1.0) == stagger.MOVES_MAX
    assert await rounds.stagger(index, POOL, floor_rate=1.0) == moved
    assert len(lanes.moved) == len(set(lanes.moved)) == jobs


async def test_a_round_looks_so_many_jobs_ahead(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stagger, "LOOK_AHEAD_MAX", 3)
    lanes, clock = Releases(), ManualClock()
    due_s = clock.now() + 100_000.0
    index = ParkIndex([park(f"j{i}", due_s=due_s, cost_ms=10_000) for i in range(5)])
    await Staggerer(cast(Any, lanes), clock, lambda: True).stagger(index, POOL, floor_rate=1.0)
    assert lanes.moved == ["j0", "j1"], "of the first three, the last keeps its time"


# --- routing ---------------------------------------------------------------------------------------


def test_so_many_regions_are_heard_of_and_a_known_one_always(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(exchanges, "REGIONS_MAX", 2)
    settings = SimpleNamespace(
        region=SimpleNamespace(name="own", zones=()), routing=SimpleNamespace(digest_interval_s=1.0, digest_valid_s=5.0)
    )
    heard = Exchange(cast(Any, None), cast(Any, settings), cast(Any, None), ManualClock())
    for region in ("a", "b", "c", "a", "own"):
        digest = routing_pb2.RegionDigest(region=region, price_factor=1.0).SerializeToString()
        heard._hear(Msg(_client=cast(Any, None), subject=subjects.digest(region), data=digest))
    assert sorted(heard._heard) == ["a", "b"]


# --- the client ------------------------------------------------------------------------------------


def submission() -> Submission:
    surroundings = cast(Surroundings, SimpleNamespace(clock=ManualClock()))
    return Submission([], cast(Any, None), "", cast(Any, None), surroundings, 1.0)


def sized(count: int) -> ManyItem:
    return ManyItem(RequestFields(model="chat", prompt="x" * count), idempotency_key="k")


def test_an_item_has_so_many_bytes_and_no_more():
    sending = submission()
    near = client_many.ITEM_BYTES_MAX - 1000
    sending._hold(sized(near), "a")
    room = client_many.ITEM_BYTES_MAX - sending._held["a"].size
    sending._hold(sized(near + room), "b")
    sending._hold(sized(near + room + 1), "c")
    assert sending._held["b"].size == client_many.ITEM_BYTES_MAX
    outcome = sending._outcomes.get_nowait()
    assert outcome is not None
    assert (outcome.ref, outcome.error and outcome.error.reason) == ("c", "MESSAGE_TOO_LARGE")


def test_a_message_of_the_client_has_so_many_items_and_bytes():
    sending = submission()
    for i in range(client_many.MESSAGE_ITEMS_MAX + 1):
        sending._hold(sized(10), f"r{i}")
    assert [len(sending._next_message().items) for _ in range(2)] == [client_many.MESSAGE_ITEMS_MAX, 1]
    third = client_many.MESSAGE_BYTES_MAX // 3
    for i in range(4):
        sending._hold(sized(third), f"big{i}")
    assert [len(sending._next_message().items) for _ in range(2)] == [2, 2]
    sending._hold(sized(2 * client_many.MESSAGE_BYTES_MAX), "huge")
    assert len(sending._next_message().items) == 1, "one larger item is sent alone"


def test_the_client_holds_so_many_bytes_without_an_outcome():
    sending = submission()
    quarter = client_many.HELD_BYTES_MAX // 8
    for i in range(7):
        sending._hold(sized(quarter), f"r{i}")
    assert not sending._full
    sending._hold(sized(quarter), "r7")
    assert sending._full
