"""What a job that waits at its worker keeps from others, and how its waits end: fetches, staged jobs, reads, writes."""

from __future__ import annotations

import asyncio
import math
from typing import Any, cast

from msgspec.structs import replace

from laneway.core.catalogue import Capabilities
from laneway.core.checkpoints import Prefix
from laneway.core.clock import ManualClock
from laneway.core.job import GenerateTask, LaneJob, ReferredJob, Sampling, TokenLogprob, claim, hand_back
from laneway.core.lanes import Lane
from laneway.core.objects import ObjectRef
from laneway.runtime.bus import PayloadTooLarge
from laneway.runtime.records import StoredRecord
from laneway.workers.ackwait import AckWait
from laneway.workers.claims import Nak
from laneway.workers.endings import Endings
from laneway.workers.fetching import Fetch
from laneway.workers.ledger import KvAsk, Seat
from laneway.workers.takeover import Takeover
from tests.support.nats import make_record
from tests.support.pulling import HeldDelivery, PlainFloor, Servers, loop_of, seats_of

TASK = GenerateTask((1, 2, 3), Sampling(max_tokens=8, logprobs=True))


# --- fetches -----------------------------------------------------------------------------------------


class Objects:
    """Gives no job, or fails."""

    def __init__(self, failure: Exception | None = None) -> None:
        self._failure = failure

    async def job(self, job: object) -> LaneJob:
        if self._failure is not None:
            raise self._failure
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


def fetch_of() -> Fetch:
    job = ReferredJob(make_record(), ObjectRef("t/j/task", 1, b""))
    return Fetch(
        job, cast(Any, HeldDelivery()), Seat(Lane.BATCH, KvAsk(16, 16), 32), AckWait.begin(30.0, 0.0, 0), kept=False
    )


async def test_a_fetch_may_be_stopped_at_any_moment():
    objects = Objects()
    early = fetch_of()
    early.stop()
    assert await early.get(cast(Any, objects)) == Nak(0.0, "stopped")
    under_way = fetch_of()
    getting = asyncio.create_task(under_way.get(cast(Any, objects)))
    await asyncio.sleep(0)
    for _ in range(2):
        under_way.stop()
    assert await getting == Nak(0.0, "stopped")
    under_way.stop()


async def test_a_fault_of_ours_with_one_fetch_ends_no_worker():
    assert await fetch_of().get(cast(Any, Objects(ValueError("ours")))) == Nak(10.0, "fault")


# --- staged ------------------------------------------------------------------------------------------


class Closed(PlainFloor):
    """Nothing may start: a suspect runs alone, or there is no engine."""

    open = True

    def may_start(self) -> bool:
        return self.open


async def test_a_staged_job_goes_back_where_nothing_may_start():
    seats, delivery = seats_of(1), HeldDelivery()
    floor = Closed(seats)
    pulls = loop_of(Servers(), seats, floor=floor)
    record = make_record(lane=Lane.PRIORITY)
    job = LaneJob(replace(record, contract=replace(record.contract, deadline_s=4e9)), TASK)
    pulls._staging.put(Lane.PRIORITY, cast(Any, delivery), job, seats.ask(job), 0.0)
    await pulls.look_after_staged()
    assert (list(pulls.staged), delivery.naks) == ([Lane.PRIORITY], [])
    floor.open = False
    await pulls.look_after_staged()
    assert (list(pulls.staged), delivery.naks) == ([], [0.0])


# --- reads -------------------------------------------------------------------------------------------


class ShortStore:
    """Holds fewer tokens than the record says, and one whose log probability nobody knows."""

    def __init__(self) -> None:
        self.reads = 0

    async def read(self, record: object) -> Prefix:
        self.reads += 1
        return Prefix((7, 8), (TokenLogprob(-0.5), TokenLogprob(math.nan)))


async def test_what_a_second_read_of_checkpoints_gives_again_is_all_there_is():
    store = ShortStore()
    record = make_record(checkpoint_index=3)
    takeover = Takeover(LaneJob(record, TASK), cast(Any, store), lambda: False, "pool")
    plan = await takeover.plan(record, Capabilities())
    assert (plan.start_index, store.reads) == (2, 2)


# --- writes ------------------------------------------------------------------------------------------


class SmallRecords:
    """Takes no record."""

    def __init__(self) -> None:
        self.tries = 0

    async def update(self, record: object, expected_sequence: int) -> int:
        self.tries += 1
        raise PayloadTooLarge(2_000, 1_000)


async def test_a_record_that_never_fits_keeps_no_other_run_waiting():
    records = SmallRecords()
    endings = Endings(cast(Any, records), cast(Any, None), "w1", ManualClock(), 1_000)
    owned = StoredRecord(claim(make_record(), "w1", 1.0), 1)
    writing = asyncio.create_task(endings.write(owned, lambda record: hand_back(record, "w1", 1)))
    for _ in range(10):
        await asyncio.sleep(0)
    writing.cancel()
    await asyncio.wait({writing})
    assert writing.cancelled()
    assert 1 <= records.tries <= 2
