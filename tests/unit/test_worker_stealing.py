"""A pull loop among several home slots: its own, what nobody serves, and what others are late with."""

import asyncio

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from laneway.core.lanes import LANES, Lane
from laneway.policy.pull import PullParams
from laneway.runtime.bells import Ring
from tests.support.pulling import ME, HeldDelivery, PlainFloor, Servers, World, delivery_of, loop_of, running, settle
from tests.support.pulling import seats_of as seats_of_slots


class Pool:
    """A worker of home h0 with other homes beside it."""

    def __init__(self, slots: int = 8, **homes: str) -> None:
        self.world = World(home_slots=max(2, len(homes)))
        self.world.serve(homes or {"h0": ME, "h1": "other"})
        self.servers = Servers()
        self.seats = seats_of_slots(slots)
        self.floor = PlainFloor(self.seats)
        self.pulls = loop_of(self.servers, self.seats, world=self.world, floor=self.floor)

    async def put(self, lane: Lane, home: str, *, bell: bool = True) -> HeldDelivery:
        delivery = delivery_of(lane)
        delivery.back = self.servers[lane, home].queue
        delivery.back.append(delivery)
        if bell:
            self.pulls.ring(Ring(lane, home))
        await settle()
        return delivery

    async def pass_time(self, seconds: float) -> None:
        self.world.clock.advance(seconds)
        self.pulls.room_changed()
        await settle()

    def started(self, *deliveries: HeldDelivery) -> bool:
        return self.floor.job_ids == [each.job_id for each in deliveries]


@pytest.mark.parametrize("lane", LANES)
async def test_jobs_of_our_home_and_of_any_are_taken_at_once(lane: Lane):
    pool = Pool()
    async with running(pool.pulls):
        if lane is Lane.PRIORITY:
            return  # by held pulls: test_worker_held_pull
        ours, anyones = await pool.put(lane, "h0"), await pool.put(lane, "any")
        assert pool.started(ours, anyones)
        assert (ours.steal, anyones.steal) == ("", "")


@pytest.mark.parametrize("lane", LANES)
async def test_another_workers_job_is_taken_once_it_has_waited(lane: Lane):
    pool = Pool()
    async with running(pool.pulls):
        theirs = await pool.put(lane, "h1")
        await pool.pass_time(0.49)
        assert pool.started()
        assert pool.servers[lane, "h1"].pulls == 0
        await pool.pass_time(0.02)
        assert pool.started(theirs)
        assert theirs.steal == "STEAL_WAITED"


async def test_a_dead_workers_home_is_taken_from_at_once_and_without_a_bell():
    pool = Pool()
    pool.world.dead.add("other")
    async with running(pool.pulls):
        theirs = await pool.put(Lane.DEFERRABLE, "h1", bell=False)
        pool.pulls.go_on()  # as at each look without a bell
        await settle()
        assert pool.started(theirs)
        assert theirs.steal == "STEAL_ORPHAN"


async def test_what_waited_when_its_worker_died_is_taken_at_once():
    pool = Pool()
    async with running(pool.pulls):
        theirs = await pool.put(Lane.PRIORITY, "h1")
        assert pool.started()
        pool.world.dead.add("other")
        await pool.pass_time(0.0)
        assert pool.started(theirs)
        assert theirs.steal == "STEAL_ORPHAN"


async def test_a_home_that_the_plan_gives_to_nobody_is_anyones():
    pool = Pool(h0=ME, h1="")
    async with running(pool.pulls):
        theirs = await pool.put(Lane.BATCH, "h1")
        assert pool.started(theirs)
        assert theirs.steal == "STEAL_ORPHAN"


async def test_without_a_fresh_plan_every_home_is_anyones_and_our_own_stays_ours():
    pool = Pool()
    pool.world.is_fresh = False
    async with running(pool.pulls):
        assert pool.servers.held == [(Lane.PRIORITY, "any"), (Lane.PRIORITY, "h0")]
        theirs, ours = await pool.put(Lane.BATCH, "h1"), await pool.put(Lane.BATCH, "h0")
        assert pool.started(theirs, ours)
        assert (theirs.steal, ours.steal) == ("STEAL_NO_PLAN", "")


async def test_a_worker_that_has_no_home_takes_of_any_and_what_is_late():
    pool = Pool(h0="one", h1="two")
    async with running(pool.pulls):
        assert pool.pulls.home == ""
        assert pool.servers.held == [(Lane.PRIORITY, "any")]
        anyones, theirs = await pool.put(Lane.BATCH, "any"), await pool.put(Lane.BATCH, "h1")
        assert pool.started(anyones)
        await pool.pass_time(0.6)
        assert pool.started(anyones, theirs)


async def test_a_home_slot_of_another_release_is_heard_by_its_bell():
    pool = Pool()
    async with running(pool.pulls):
        stray = await pool.put(Lane.BATCH, "h7")
        assert pool.started(stray)
        assert stray.steal == "STEAL_ORPHAN"


async def test_a_bell_of_what_is_no_home_slot_is_not_followed():
    pool = Pool()
    async with running(pool.pulls):
        for home in ("x", "h", "h64", "hot", "7"):
            await pool.put(Lane.BATCH, home)
            assert pool.servers[Lane.BATCH, home].started == 0


async def test_the_plan_tells_of_jobs_whose_bells_were_before_our_time():
    pool = Pool()
    async with running(pool.pulls):
        theirs = await pool.put(Lane.BATCH, "h1", bell=False)
        pool.world.serve({"h0": ME, "h1": "other"}, ready={"h1": 1}, oldest_s=0.4)
        await pool.pass_time(0.05)
        assert pool.started()
        await pool.pass_time(0.2)
        assert pool.started(theirs)


async def test_stealing_takes_one_job_at_a_time_and_only_with_room():
    pool = Pool(slots=2)
    async with running(pool.pulls):
        theirs = [await pool.put(Lane.PRIORITY, "h1") for _ in range(4)]
        await pool.pass_time(0.6)
        assert pool.started(*theirs[:2])
        assert pool.servers[Lane.PRIORITY, "h1"].queue == theirs[2:]
        assert pool.servers[Lane.PRIORITY, "h1"].pulls == 2


async def test_an_empty_steal_makes_patient():
    pool = Pool()
    async with running(pool.pulls):
        for pulls, wait_s in ((1, 0.5), (2, 1.0), (3, 2.0)):
            pool.pulls.ring(Ring(Lane.BATCH, "h1"))  # its worker took the job meanwhile
            await pool.pass_time(wait_s - 0.01)
            assert pool.servers[Lane.BATCH, "h1"].pulls == pulls - 1
            await pool.pass_time(0.02)
            assert pool.servers[Lane.BATCH, "h1"].pulls == pulls
            await pool.pass_time(100.0)


async def test_late_priority_of_others_goes_before_lower_work_of_ours():
    pool = Pool(slots=4)
    async with running(pool.pulls):
        theirs = delivery_of(Lane.PRIORITY)
        pool.servers[Lane.PRIORITY, "h1"].queue.append(theirs)
        pool.pulls.ring(Ring(Lane.PRIORITY, "h1"))
        await settle()
        ours = delivery_of(Lane.BATCH)
        pool.servers[Lane.BATCH, "h0"].queue.append(ours)
        pool.world.clock.advance(0.6)
        pool.pulls.ring(Ring(Lane.BATCH, "h0"))
        await settle()
        assert pool.started(theirs, ours)


# --- the floor under overload --------------------------------------------------------------------------


class Busy(Pool):
    """Priority waits without an end, and each job waited for so long."""

    def __init__(self, waited_s: float) -> None:
        super().__init__(slots=64)
        self.pulls = loop_of(
            self.servers, self.seats, world=self.world, floor=self.floor, params=PullParams(floor_turns=4)
        )
        now_s = self.world.clock.now()
        for _ in range(24):
            delivery = delivery_of()
            delivery.stored_s = now_s - waited_s
            self.servers.priority("any").queue.append(delivery)

    def lower(self, lane: Lane, **changes: object) -> HeldDelivery:
        delivery = delivery_of(lane, **changes)  # type: ignore[arg-type]  # as given
        self.servers[lane, "any"].queue.append(delivery)
        return delivery


async def test_the_floor_gives_turns_while_priority_is_served_in_time():
    pool = Busy(0.1)
    pool.lower(Lane.BATCH)
    async with running(pool.pulls):
        assert Lane.BATCH in pool.floor.lanes[:5]
        assert pool.floor.kept[pool.floor.lanes.index(Lane.BATCH)]


async def test_the_floor_yields_where_priority_waited_too_long():
    pool = Busy(0.9)
    lower = pool.lower(Lane.BATCH)
    async with running(pool.pulls):
        await settle()
        assert pool.floor.lanes == [Lane.PRIORITY] * 24
    assert lower.naks == [1.0]  # it might have been due, and was looked at


@pytest.mark.parametrize("released", [True, False])
async def test_a_job_at_its_latest_start_has_its_floor_whatever_waits(released: bool):
    pool = Busy(0.9)
    due = pool.lower(Lane.BATCH) if released else pool.lower(Lane.BATCH, latest_start_s=pool.world.clock.now() - 1.0)
    due.headers = {"Laneway-Released-By": "LATEST_START_NEAR"} if released else {}
    async with running(pool.pulls):
        await settle()
        assert Lane.BATCH in pool.floor.lanes[:5]


async def test_jobs_before_a_due_one_go_to_the_end_of_their_lane_under_overload():
    pool = Busy(0.9)
    early = [pool.lower(Lane.BATCH, latest_start_s=pool.world.clock.now() + 0.4) for _ in range(2)]
    due = pool.lower(Lane.BATCH)
    due.headers = {"Laneway-Released-By": "OVERDUE"}
    async with running(pool.pulls):
        await settle()
        batch = [job.record.job_id for job in pool.floor.launched if job.record.contract.lane is Lane.BATCH]
        assert batch[0] == due.job_id
        assert all(each.naks == [pytest.approx(0.4)] for each in early)


# --- whatever comes ------------------------------------------------------------------------------------

SOURCES = [(lane, home) for lane in LANES for home in ("any", "h0", "h1", "h2")]


@settings(max_examples=20, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(
    st.lists(st.tuples(st.sampled_from(SOURCES), st.booleans()), max_size=30),
    st.integers(2, 6),
    st.booleans(),
    st.booleans(),
)
def test_all_that_waits_is_taken_in_time_and_nothing_twice(
    jobs: list[tuple[tuple[Lane, str], bool]], slots: int, fresh: bool, dead: bool
):
    """Whatever is rung or not, served or not: with places that come free everything runs, once."""

    async def play() -> None:
        pool = Pool(slots=slots, h0=ME, h1="other", h2="")
        pool.world.is_fresh = fresh
        if dead:
            pool.world.dead.add("other")
        async with running(pool.pulls):
            put = [await pool.put(lane, home, bell=bell) for (lane, home), bell in jobs]
            ready = {"h1": len(jobs)}  # of those in h1 that were not rung, the plan tells
            for _ in range(len(jobs) + 8):
                pool.world.serve({"h0": ME, "h1": "other", "h2": ""}, ready=ready, oldest_s=1.0)
                for server in tuple(pool.servers.values()):
                    if server.held and server.queue:  # as NATS would
                        server.end("", server.queue.pop(0), offered=True)
                        await settle()
                await pool.pass_time(20.0)
                pool.pulls._sources.look_everywhere()
                pool.pulls.room_changed()
                await settle()
                while pool.floor.live:  # all end
                    pool.seats.give_back(pool.floor.live.pop())
            assert sorted(pool.floor.job_ids) == sorted(each.job_id for each in put)

    asyncio.run(play())
