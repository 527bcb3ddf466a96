"""A job that waits in a worker for KV: what it is predicted to need may change before there is room."""

from __future__ import annotations

from laneway.core.lanes import Lane
from laneway.workers.engines.protocol import EngineCapacity
from laneway.workers.ledger import Seats
from tests.support.pulling import PlainFloor, Servers, delivery_of, loop_of, running, settle


async def test_a_job_that_is_predicted_longer_by_now_waits_on_and_ends_no_worker():
    predicted = 80
    capacity = EngineCapacity(slots=4, kv_tokens=100, context_length=100, vocabulary_size=260, paged=True)
    seats = Seats(capacity, predict=lambda job: predicted)
    servers, floor = Servers(), PlainFloor(seats)
    pulls = loop_of(servers, seats, floor=floor, reserved=0)
    first, second = delivery_of(Lane.BATCH, tokens=90), delivery_of(Lane.BATCH, tokens=97)
    servers[Lane.BATCH, "any"].queue += [first, second]
    async with running(pulls):
        assert floor.job_ids == [first.job_id]
        assert list(pulls.staged) == [Lane.BATCH], "there is no room for both"
        seats.give_back(floor.live.pop())
        predicted = 5
        assert second.job is not None
        shorter = seats.take(Lane.BATCH, seats.ask(second.job))
        predicted = 97  # meanwhile long answers were learned: there is room for what it was before
        pulls.room_changed()
        await settle()
        assert floor.job_ids == [first.job_id]
        assert list(pulls.staged) == [Lane.BATCH]
        seats.give_back(shorter)
        pulls.room_changed()
        await settle()
        assert floor.job_ids == [first.job_id, second.job_id]
