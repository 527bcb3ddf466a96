"""Which lane a worker turns to next: priority first, a floor for the others, and never more than fits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from laneway.core.lanes import LANES, Lane
from laneway.policy.pull import (
    LaneView,
    LetGo,
    MakeRoom,
    Pull,
    PullParams,
    Room,
    Start,
    Turns,
    floor_is_due,
    next_step,
    started,
)

PARAMS = PullParams(floor_turns=10, deferrable_per_batch=4)


def room_of(
    slots: int,
    kv_tokens: int,
    job_tokens_max: int,
    *,
    lower: int = 64,
    reserved: int = 0,
    kv: int = 0,
    yields: bool = False,
) -> Room:
    """`lower`: places that the gate has for lower lanes, a due floor included."""
    return Room(slots, kv_tokens, job_tokens_max, lower, lower, reserved, kv, yields=yields)


WIDE = room_of(8, 8000, 1000)


def lanes(*waiting: Lane, paused: tuple[Lane, ...] = (), staged: dict[Lane, int] | None = None) -> list[LaneView]:
    staged = staged or {}
    return [LaneView(lane, lane in waiting, lane in paused, staged.get(lane)) for lane in LANES]


def test_priority_goes_first_whenever_it_may_have_work():
    assert next_step(lanes(*LANES), WIDE, Turns(), PARAMS) == Pull(Lane.PRIORITY, 8)


def test_a_lane_without_a_hint_is_not_asked():
    assert next_step(lanes(Lane.BATCH), WIDE, Turns(), PARAMS) == Pull(Lane.BATCH, 8)
    assert next_step(lanes(), WIDE, Turns(), PARAMS) is None


def test_nothing_is_pulled_without_a_free_slot_or_free_kv():
    assert next_step(lanes(*LANES), room_of(0, 8000, 1000), Turns(), PARAMS) is None
    assert next_step(lanes(*LANES), room_of(8, 0, 1000), Turns(), PARAMS) is None


def test_a_paused_lane_is_neither_pulled_nor_started():
    view = lanes(Lane.PRIORITY, Lane.BATCH, paused=(Lane.PRIORITY,), staged={Lane.PRIORITY: 10})
    assert next_step(view, WIDE, Turns(), PARAMS) == Pull(Lane.BATCH, 8)


def test_a_pull_stops_where_the_floor_begins():
    assert next_step(lanes(*LANES), room_of(64, 10**6, 1000), Turns(priority_run=6), PARAMS) == Pull(Lane.PRIORITY, 3)


def test_the_floor_gives_one_turn_to_a_starved_lane():
    view = lanes(*LANES)
    assert not floor_is_due(view, Turns(priority_run=8), PARAMS)
    assert floor_is_due(view, Turns(priority_run=9), PARAMS)
    assert next_step(view, WIDE, Turns(priority_run=9), PARAMS) == Pull(Lane.DEFERRABLE, 1)


def test_the_floor_counts_only_jobs_started_while_a_lower_lane_waited():
    assert started(Turns(), Lane.PRIORITY, 5, lanes(Lane.PRIORITY)) == Turns()
    assert started(Turns(3), Lane.PRIORITY, 5, lanes(Lane.PRIORITY, Lane.BATCH)) == Turns(8)


def test_a_floor_of_zero_is_no_floor():
    assert next_step(lanes(*LANES), WIDE, Turns(priority_run=10**6), PullParams(floor_turns=0)) == Pull(
        Lane.PRIORITY, 8
    )


def test_deferrable_and_batch_share_four_to_one():
    view = lanes(Lane.DEFERRABLE, Lane.BATCH)
    assert next_step(view, WIDE, Turns(), PARAMS) == Pull(Lane.DEFERRABLE, 4)
    assert next_step(view, WIDE, Turns(deferrable_run=4), PARAMS) == Pull(Lane.BATCH, 1)
    assert started(Turns(0, 4), Lane.BATCH, 1, view) == Turns(0, 0)


def test_no_more_is_pulled_than_would_fit_at_the_largest_size():
    assert next_step(lanes(Lane.BATCH), room_of(8, 2500, 1000), Turns(), PARAMS) == Pull(Lane.BATCH, 2)
    assert next_step(lanes(Lane.BATCH), room_of(8, 400, 1000), Turns(), PARAMS) == Pull(Lane.BATCH, 1)


def test_a_staged_job_starts_as_soon_as_it_fits():
    view = lanes(Lane.BATCH, staged={Lane.BATCH: 300})
    assert next_step(view, room_of(1, 299, 1000), Turns(), PARAMS) is None
    assert next_step(view, room_of(1, 300, 1000), Turns(), PARAMS) == Start(Lane.BATCH)


def test_priority_never_waits_behind_a_staged_lower_job():
    view = lanes(Lane.PRIORITY, staged={Lane.BATCH: 900, Lane.DEFERRABLE: 900})
    for run in (0, 9, 50):
        assert next_step(view, room_of(2, 500, 1000), Turns(priority_run=run), PARAMS) == Pull(Lane.PRIORITY, 1)


@pytest.mark.parametrize("run", [0, 9, 50])
def test_nothing_takes_the_kv_that_a_staged_priority_job_waits_for(run: int):
    view = lanes(*LANES, staged={Lane.PRIORITY: 900, Lane.BATCH: 100})
    assert next_step(view, room_of(2, 500, 1000), Turns(priority_run=run), PARAMS) is None
    assert next_step(view, room_of(2, 900, 1000), Turns(priority_run=run), PARAMS) == Start(Lane.PRIORITY)


def test_a_staged_lower_job_holds_back_the_lower_lane_behind_it():
    view = lanes(Lane.BATCH, staged={Lane.DEFERRABLE: 900})
    assert next_step(view, room_of(2, 500, 1000), Turns(), PARAMS) is None


def test_lower_lanes_leave_the_reserved_slots_to_priority():
    view = lanes(Lane.BATCH)
    assert next_step(view, room_of(5, 8000, 1000, reserved=2), Turns(), PARAMS) == Pull(Lane.BATCH, 3)
    two = room_of(2, 8000, 1000, reserved=2)
    assert next_step(view, two, Turns(), PARAMS) is None
    assert next_step(lanes(Lane.PRIORITY), two, Turns(), PARAMS) == Pull(Lane.PRIORITY, 2)
    staged = lanes(staged={Lane.BATCH: 10})
    assert next_step(staged, two, Turns(), PARAMS) is None
    assert next_step(staged, room_of(3, 8000, 1000, reserved=2), Turns(), PARAMS) == Start(Lane.BATCH)


def test_lower_lanes_leave_the_reserved_kv_to_priority():
    room = room_of(8, 3000, 1000, kv=1000)
    assert next_step(lanes(Lane.BATCH), room, Turns(), PARAMS) == Pull(Lane.BATCH, 2)
    assert next_step(lanes(Lane.PRIORITY), room, Turns(), PARAMS) == Pull(Lane.PRIORITY, 3)
    assert next_step(lanes(staged={Lane.BATCH: 2001}), room, Turns(), PARAMS) is None
    assert next_step(lanes(staged={Lane.BATCH: 2000}), room, Turns(), PARAMS) == Start(Lane.BATCH)
    assert next_step(lanes(Lane.BATCH), room_of(8, 1000, 1000, kv=1000), Turns(), PARAMS) is None


def test_a_due_floor_may_use_what_is_reserved():
    room = room_of(1, 500, 1000, reserved=1, kv=500)
    due = Turns(priority_run=9)
    assert next_step(lanes(*LANES), room, due, PARAMS) == Pull(Lane.DEFERRABLE, 1)
    assert next_step(lanes(Lane.PRIORITY, staged={Lane.BATCH: 500}), room, due, PARAMS) == Start(Lane.BATCH)


def test_a_due_floor_has_places_of_its_own_from_the_gate():
    room = Room(4, 8000, 1000, lower_places=0, floor_places=1)
    assert next_step(lanes(Lane.BATCH), room, Turns(), PARAMS) is None
    assert next_step(lanes(*LANES), room, Turns(priority_run=9), PARAMS) == Pull(Lane.DEFERRABLE, 1)
    none = Room(4, 8000, 1000, lower_places=4, floor_places=0)
    assert next_step(lanes(*LANES), none, Turns(priority_run=9), PARAMS) == Pull(Lane.PRIORITY, 1)


def test_a_staged_lower_job_waits_while_the_gate_has_no_place():
    view = lanes(staged={Lane.BATCH: 10, Lane.DEFERRABLE: 10})
    assert next_step(view, room_of(4, 8000, 1000, lower=0), Turns(), PARAMS) is None


@pytest.mark.parametrize("prefilling", [0, 1, 2])
def test_lower_lanes_never_queue_inside_the_engine(prefilling: int):
    room = room_of(8, 8000, 1000, lower=2 - prefilling)
    step = next_step(lanes(Lane.BATCH), room, Turns(), PARAMS)
    assert step == (Pull(Lane.BATCH, 2 - prefilling) if prefilling < 2 else None)
    assert next_step(lanes(*LANES), room, Turns(), PARAMS) == Pull(Lane.PRIORITY, 8)


def test_priority_goes_on_while_a_due_lower_lane_waits_for_a_prefill():
    room = room_of(1, 8000, 1000, lower=0)
    assert next_step(lanes(*LANES), room, Turns(priority_run=9), PullParams()) == Pull(Lane.PRIORITY, 1)


@pytest.mark.parametrize(("slots", "kv"), [(0, 500), (2, 0), (2, 500)])
def test_without_room_one_priority_job_is_pulled_where_a_run_may_yield_to_it(slots: int, kv: int):
    full = room_of(slots, kv, 1000)
    yielding = room_of(slots, kv, 1000, yields=True)
    staged = lanes(Lane.BATCH, staged={Lane.PRIORITY: 900})
    assert next_step(staged, full, Turns(), PARAMS) is None
    assert next_step(staged, yielding, Turns(), PARAMS) == MakeRoom()
    if not (slots and kv):
        assert next_step(lanes(*LANES), full, Turns(), PARAMS) is None
        assert next_step(lanes(*LANES), yielding, Turns(priority_run=9), PARAMS) == Pull(Lane.PRIORITY, 1)


def test_nothing_yields_to_a_lower_lane_or_to_a_paused_one():
    full = room_of(0, 0, 1000, yields=True)
    assert next_step(lanes(Lane.DEFERRABLE, Lane.BATCH, staged={Lane.BATCH: 10}), full, Turns(), PARAMS) is None
    assert next_step(lanes(*LANES, paused=(Lane.PRIORITY,)), full, Turns(), PARAMS) is None
    held = lanes(Lane.BATCH, paused=(Lane.PRIORITY,), staged={Lane.PRIORITY: 10})
    assert next_step(held, full, Turns(), PARAMS) is None


def test_what_fits_starts_though_a_run_might_yield():
    room = room_of(1, 900, 1000, yields=True)
    assert next_step(lanes(staged={Lane.PRIORITY: 900}), room, Turns(), PARAMS) == Start(Lane.PRIORITY)
    assert next_step(lanes(*LANES), room, Turns(), PARAMS) == Pull(Lane.PRIORITY, 1)


def test_a_pull_that_is_held_has_its_slot():
    assert next_step(lanes(Lane.PRIORITY), held(4, 1), Turns(), PARAMS) == Pull(Lane.PRIORITY, 3)
    assert next_step(lanes(Lane.BATCH), held(4, 1), Turns(), PARAMS) == Pull(Lane.BATCH, 3)
    assert next_step(lanes(), held(1, 1), Turns(), PARAMS) is None


@pytest.mark.parametrize("view", [lanes(Lane.PRIORITY), lanes(Lane.BATCH), lanes(staged={Lane.DEFERRABLE: 10})])
def test_a_held_pull_is_let_go_for_whoever_may_have_its_slot(view: list[LaneView]):
    assert next_step(view, held(1, 1), Turns(), PARAMS) == LetGo()
    assert next_step(view, held(2, 2), Turns(), PARAMS) == LetGo()


def test_no_held_pull_is_let_go_for_a_job_that_does_not_fit_or_may_not_start():
    assert next_step(lanes(staged={Lane.PRIORITY: 9000}), held(1, 1), Turns(), PARAMS) is None
    assert next_step(lanes(staged={Lane.BATCH: 9000}), held(1, 1), Turns(), PARAMS) is None
    assert next_step(lanes(Lane.BATCH), held(1, 1, reserved=1), Turns(), PARAMS) is None
    assert next_step(lanes(Lane.BATCH), held(1, 1, lower=0), Turns(), PARAMS) is None


def test_a_due_floor_has_a_held_pull_let_go():
    due = Turns(priority_run=9)
    assert next_step(lanes(Lane.BATCH), held(1, 1, reserved=1), due, PARAMS) == LetGo()


def held(slots: int, count: int, *, lower: int = 64, reserved: int = 0) -> Room:
    return Room(slots, 8000, 1000, lower, lower, reserved, held=count)


def test_the_floor_yields_while_priority_misses_its_targets():
    due, room = Turns(priority_run=9), replace(WIDE, overloaded=True)
    assert next_step(lanes(*LANES), room, due, PARAMS) == Pull(Lane.PRIORITY, 8)
    assert next_step(lanes(Lane.DEFERRABLE, Lane.BATCH), room, due, PARAMS) == Pull(Lane.DEFERRABLE, 4)


def test_a_lane_with_a_job_at_its_latest_start_has_its_floor_whatever_priority_misses():
    due, room = Turns(priority_run=9), replace(WIDE, overloaded=True)
    view = [replace(each, due=each.lane is Lane.BATCH) for each in lanes(*LANES)]
    assert floor_is_due(view, due, PARAMS, overloaded=True) == {Lane.BATCH}
    assert next_step(view, room, due, PARAMS) == Pull(Lane.BATCH, 1)
    staged = [replace(each, due=each.lane is Lane.BATCH) for each in lanes(*LANES, staged={Lane.BATCH: 10})]
    assert next_step(staged, room, due, PARAMS) == Start(Lane.BATCH)
    assert next_step(staged, replace(room, floor_places=0), due, PARAMS) == Pull(Lane.PRIORITY, 8)


@pytest.mark.parametrize(
    "params",
    [
        {"floor_turns": 1},
        {"floor_turns": -3},
        {"deferrable_per_batch": 0},
    ],
)
def test_params_out_of_range_are_refused(params: dict[str, int]):
    with pytest.raises(ValueError, match="must be"):
        PullParams(**params)


views = st.lists(
    st.builds(LaneView, st.just(Lane.PRIORITY), st.booleans(), st.booleans(), st.none() | st.integers(1, 2000)),
    min_size=1,
    max_size=1,
).flatmap(
    lambda first: st.tuples(
        *(
            st.builds(LaneView, st.just(lane), st.booleans(), st.booleans(), st.none() | st.integers(1, 2000))
            for lane in (Lane.DEFERRABLE, Lane.BATCH)
        )
    ).map(lambda rest: [*first, *rest])
)
rooms = st.builds(
    Room,
    st.integers(0, 64),
    st.integers(0, 100_000),
    st.integers(1, 4096),
    st.integers(0, 64),
    st.integers(0, 64),
    st.integers(0, 4),
    st.integers(0, 4096),
    st.integers(0, 4),
    st.booleans(),
)
turns_ = st.builds(Turns, st.integers(0, 50), st.integers(0, 50))


@given(views, rooms, turns_)
def test_a_step_never_exceeds_the_room(view: list[LaneView], room: Room, turns: Turns):
    step = next_step(view, room, turns, PARAMS)
    if isinstance(step, Pull):
        assert 1 <= step.batch <= room.slots
        assert step.batch == 1 or step.batch * room.job_tokens_max <= room.kv_tokens
    elif isinstance(step, Start):
        staged = next(v for v in view if v.lane is step.lane).staged_tokens
        assert staged is not None
        assert staged <= room.kv_tokens


@given(views, rooms, turns_)
def test_work_is_conserved(view: list[LaneView], room: Room, turns: Turns):
    """A worker acts whenever a lane wants something that it has room for, and nothing staged is in the way."""
    free = room.slots > 0 and room.kv_tokens > 0
    # Where the floor is due the gate is asked for its places, and it has no fewer of these.
    places = min(room.lower_places, room.floor_places)
    lower = min(room.slots - room.reserved_slots, places, room.kv_tokens - room.reserved_kv_tokens) > 0
    able = [v for v in view if v.wants and v.staged_tokens is None and (v.lane is Lane.PRIORITY or lower)]
    if free and able and all(v.staged_tokens is None for v in view):
        assert next_step(view, room, turns, PARAMS) is not None


@given(views, rooms, turns_)
def test_a_step_stays_within_what_its_lane_may_take(view: list[LaneView], room: Room, turns: Turns):
    """No lower lane exceeds the gate, and none takes what is reserved or held, unless its floor is due."""
    step = next_step(view, room, turns, PARAMS)
    if not isinstance(step, Pull | Start):
        return
    jobs = step.batch if isinstance(step, Pull) else 1
    assert jobs <= room.slots - room.held
    if step.lane is Lane.PRIORITY:
        return
    if step.lane in floor_is_due(view, turns, PARAMS, overloaded=room.overloaded):
        assert jobs <= room.floor_places
    else:
        assert jobs <= room.lower_places
        assert jobs <= room.slots - room.reserved_slots
        assert room.kv_tokens > room.reserved_kv_tokens


@given(views, rooms, turns_, st.permutations(range(3)))
def test_the_order_of_the_lanes_decides_nothing(view: list[LaneView], room: Room, turns: Turns, order: list[int]):
    assert next_step([view[i] for i in order], room, turns, PARAMS) == next_step(view, room, turns, PARAMS)


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=200))
def test_no_lane_gets_more_than_its_share_while_another_waits(waiting: list[tuple[bool, bool, bool]]):
    """Job by job, whoever waits: after any stretch in which all waited, priority has at most floor_turns - 1 of
    floor_turns starts, and batch at most one of deferrable_per_batch + 1 of the lower lanes'."""
    turns, run, lower_run = Turns(), 0, 0
    for flags in waiting:
        view = [LaneView(lane, flag) for lane, flag in zip(LANES, flags, strict=True)]
        step = next_step(view, room_of(1, 8000, 1000), turns, PARAMS)
        if step is None:
            continue
        assert isinstance(step, Pull)
        priority, lower_waits = step.lane is Lane.PRIORITY, flags[1] or flags[2]
        run = run + 1 if priority and lower_waits else 0
        assert run < PARAMS.floor_turns
        if not priority:
            lower_run = lower_run + 1 if step.lane is Lane.DEFERRABLE and flags[2] else 0
            assert lower_run <= PARAMS.deferrable_per_batch
        turns = started(turns, step.lane, 1, view)
