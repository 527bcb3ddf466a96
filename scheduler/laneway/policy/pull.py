"""Which lane a worker turns to next, and how many jobs it asks for.

A worker has room (free sequences and free KV tokens) and lanes that may hold jobs. This module answers "what next":
start the job that was pulled earlier and did not fit then, pull so many from this lane, make room for the priority job
that waits here, or nothing. The rules:

- Priority goes first whenever it may have work.
- While a lower lane waits, one started job in `floor_turns` is a lower lane's, so that a busy priority lane cannot
  starve it. The floor counts only jobs started while a lower lane was waiting: who was not starved has no claim. It
  yields while priority misses its targets here (policy.overload), except to jobs whose latest start has come.
- Deferrable and batch share what is left as `deferrable_per_batch` : 1, when both wait.
- A job's size is known only after it was pulled. At most one job a lane is *staged* (pulled, unclaimed, waiting for
  KV). So more than one is asked for at a time only when that many of the largest possible jobs would fit.
- A staged priority job stops every other start, a due floor included: what they would take is what it waits for.
  A staged lower job stops the lower lanes behind it, and never priority.
- Lower lanes start at most `lower_places` jobs (the interference budget, the guard of first tokens: an engine cannot
  be asked to pause a prompt) and leave `reserved_slots` and `reserved_kv_tokens` free. Where the floor is due they may
  take any free slot and KV, and start `floor_places` jobs. Priority ignores all of it.
- A priority pull that is held open at the server has a slot of its own: whoever else wants that slot, a due floor or
  priority of another home, has it let go first, so that no two jobs are ever claimed for one slot.
- Without room nothing is pulled, with one exception: where running lower work may yield (policy.preempt), one priority
  job is pulled and staged, so that it is here alone, and then room is made for it. Many workers that heard of one job
  thus let one run yield, and none when the job is gone to a worker with room.

Everything is counted in started jobs, so the same history always gives the same order. The caller keeps the `Turns`
and owns the pulls; nothing here knows of NATS, engines or time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from msgspec import Struct

from laneway.core.lanes import Lane


@dataclass(frozen=True, slots=True)
class PullParams:
    floor_turns: int = 10  # of so many started jobs one is a lower lane's while these wait; 0: no floor
    deferrable_per_batch: int = 4  # deferrable jobs for each batch job while both wait

    def __post_init__(self) -> None:
        if not (self.floor_turns == 0 or self.floor_turns >= 2):
            raise ValueError("floor_turns must be 0 or at least 2")
        if not self.deferrable_per_batch >= 1:
            raise ValueError("deferrable_per_batch must be at least 1")


class LaneView(Struct, frozen=True):
    """What a worker knows of one of its lanes."""

    lane: Lane
    waiting: bool  # may hold jobs: its bell rang, the last pull was filled, or it is time to look again
    paused: bool = False
    staged_tokens: int | None = None  # KV that the staged job needs; None: no job is staged
    due: bool = False  # a job in it may have come to its latest start

    @property
    def wants(self) -> bool:
        """Whether the lane may have a job to start."""
        return not self.paused and (self.waiting or self.staged_tokens is not None)


class Room(Struct, frozen=True):
    """What the worker can still take."""

    slots: int  # free sequences
    kv_tokens: int  # free KV tokens
    job_tokens_max: int  # KV tokens of the largest job that can run here
    lower_places: int = 0  # lower-lane jobs that may start now
    floor_places: int = 0  # the same where the floor is due
    reserved_slots: int = 0  # that lower lanes leave free, unless the floor is due
    reserved_kv_tokens: int = 0  # the same in KV tokens
    held: int = 0  # slots of priority pulls that are open at the server
    overloaded: bool = False  # priority misses its targets here
    yields: bool = False  # running lower work may yield its place to a priority job now


class Turns(Struct, frozen=True):
    """Whose turn it is, as counts of started jobs."""

    priority_run: int = 0  # priority jobs since a lower lane had a turn, while one was waiting
    deferrable_run: int = 0  # deferrable jobs since batch had a turn, while it was waiting


class Pull(Struct, frozen=True):
    lane: Lane
    batch: int


class Start(Struct, frozen=True):
    """Start the job staged for this lane; it fits."""

    lane: Lane


class MakeRoom(Struct, frozen=True):
    """Let a run yield its place to the priority job that is staged here."""


class LetGo(Struct, frozen=True):
    """Take a held priority pull off the server: its slot is wanted. What it brought meanwhile has the slot."""


Step = Pull | Start | MakeRoom | LetGo


def next_step(lanes: Sequence[LaneView], room: Room, turns: Turns, params: PullParams) -> Step | None:
    """What to do next; None: nothing until a bell rings, room frees, or it is time to look again.

    The rules are the module's; places are jobs, KV is tokens. Sources: policy.md (b2) for the order of lanes and the
    floor, (b4) and (b5) for what the gate says, DESIGN 5. O(lanes); the order in which `lanes` come does not matter.
    Failure mode: shares are counted in jobs, so that a lane of long jobs gets more of the engine than its share.
    """
    if room.yields and short_of_room(lanes, room):
        staged = any(view.lane is Lane.PRIORITY and view.staged_tokens is not None for view in lanes)
        return MakeRoom() if staged else Pull(Lane.PRIORITY, 1)
    if room.slots <= 0 or room.kv_tokens <= 0:
        return None
    due = floor_is_due(lanes, turns, params, overloaded=room.overloaded)
    lower_waits = True  # behind no staged job
    for view in _in_order(lanes, due, turns, params):
        priority = view.lane is Lane.PRIORITY
        places, kv_tokens = _room_for(view.lane, room, due)
        if places <= 0 or kv_tokens <= 0 or not (priority or lower_waits):
            continue
        if view.staged_tokens is not None and view.staged_tokens > kv_tokens:
            if priority:
                return None
            lower_waits = False
        elif room.slots <= room.held:
            return LetGo()
        elif view.staged_tokens is not None:
            return Start(view.lane)
        else:
            most = min(places, room.slots - room.held, kv_tokens // max(1, room.job_tokens_max))
            return Pull(view.lane, _batch(view.lane, most, lanes, room, turns, params))
    return None


def short_of_room(lanes: Sequence[LaneView], room: Room) -> bool:
    """Whether priority may have work that cannot start here as things are."""
    for view in lanes:
        if view.lane is Lane.PRIORITY and view.wants:
            return room.slots <= 0 or room.kv_tokens <= 0 or (view.staged_tokens or 0) > room.kv_tokens
    return False


def started(turns: Turns, lane: Lane, jobs: int, lanes: Sequence[LaneView]) -> Turns:
    """The turns after `jobs` jobs of `lane` were started; `lanes` says who was waiting meanwhile."""
    if jobs <= 0:
        return turns
    if lane is Lane.PRIORITY:
        return Turns(turns.priority_run + jobs if lower_waits(lanes) else 0, turns.deferrable_run)
    if lane is Lane.DEFERRABLE:
        return Turns(0, turns.deferrable_run + jobs if _wants(lanes, Lane.BATCH) else 0)
    return Turns(0, 0)


def floor_is_due(
    lanes: Sequence[LaneView], turns: Turns, params: PullParams, *, overloaded: bool = False
) -> frozenset[Lane]:
    """The lanes of which one was starved long enough for the next start to be its own; empty: the floor is not due.

    Starved: floor_turns - 1 priority jobs were started while a lower lane waited. Where priority misses its targets
    (`overloaded`) these are only lanes in which a job may have come to its latest start.
    """
    if params.floor_turns == 0 or turns.priority_run < params.floor_turns - 1:
        return frozenset()
    if any(view.lane is Lane.PRIORITY and view.staged_tokens is not None for view in lanes):
        return frozenset()
    lower = (view for view in lanes if view.lane is not Lane.PRIORITY and view.wants)
    return frozenset(view.lane for view in lower if view.due or not overloaded)


def _in_order(lanes: Sequence[LaneView], due: frozenset[Lane], turns: Turns, params: PullParams) -> Iterator[LaneView]:
    """The lanes that may have work, in the order in which they may start a job now."""
    batch_turn = turns.deferrable_run >= params.deferrable_per_batch and _wants(lanes, Lane.BATCH)
    lower = (Lane.BATCH, Lane.DEFERRABLE) if batch_turn else (Lane.DEFERRABLE, Lane.BATCH)
    order = (*(lane for lane in lower if lane in due), Lane.PRIORITY, *(lane for lane in lower if lane not in due))
    for lane in order:
        for view in lanes:
            if view.lane is lane and view.wants:
                yield view


def _room_for(lane: Lane, room: Room, due: frozenset[Lane]) -> tuple[int, int]:
    """Most jobs of the lane that may start now, and the KV tokens that they may take."""
    if lane is Lane.PRIORITY:
        return room.slots, room.kv_tokens
    if lane in due:
        return min(room.slots, room.floor_places), room.kv_tokens
    return min(room.slots - room.reserved_slots, room.lower_places), room.kv_tokens - room.reserved_kv_tokens


def _batch(lane: Lane, most: int, lanes: Sequence[LaneView], room: Room, turns: Turns, params: PullParams) -> int:
    """How many to ask for: no more than fit whatever their size, nor beyond the next lane's turn."""
    if lane is Lane.PRIORITY:
        if params.floor_turns and lower_waits(lanes) and not room.overloaded:
            most = min(most, params.floor_turns - 1 - turns.priority_run)
    elif _wants(lanes, Lane.PRIORITY):
        most = 1
    elif lane is Lane.DEFERRABLE and _wants(lanes, Lane.BATCH):
        most = min(most, params.deferrable_per_batch - turns.deferrable_run)
    elif lane is Lane.BATCH and _wants(lanes, Lane.DEFERRABLE):
        most = 1
    return max(1, most)


def lower_waits(lanes: Sequence[LaneView]) -> bool:
    """Whether a lower lane may have a job to start."""
    return _wants(lanes, Lane.DEFERRABLE) or _wants(lanes, Lane.BATCH)


def _wants(lanes: Sequence[LaneView], lane: Lane) -> bool:
    return any(view.wants for view in lanes if view.lane is lane)
