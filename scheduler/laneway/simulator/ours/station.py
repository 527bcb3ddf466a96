"""One simulated worker of Laneway: what it starts next, and who yields; policy.pull, kv and preempt applied to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from laneway.core.fleet import StepTimes
from laneway.core.lanes import LANES, Lane
from laneway.policy.kv import Growth, blocks_of, limit_blocks, peak_blocks, rest_tokens
from laneway.policy.overload import Waits, overloaded
from laneway.policy.preempt import Speeds, Standing, choose_victim
from laneway.policy.pull import (
    LaneView,
    MakeRoom,
    Room,
    Start,
    Turns,
    floor_is_due,
    lower_waits,
    next_step,
    short_of_room,
    started,
)
from laneway.policy.stealing import PrefixSaved, StealReason, Turn, patience_s
from laneway.simulator.ours.budget import Budget
from laneway.simulator.ours.entry import Entry
from laneway.simulator.ours.jobs import ANY, Job, Lanes
from laneway.simulator.ours.params import OurParams
from laneway.simulator.ticket import Ticket
from laneway.simulator.world import Worker, World

_LOWER = (Lane.DEFERRABLE, Lane.BATCH)


class Station:
    def __init__(
        self,
        world: World,
        worker: Worker,
        lanes: Lanes,
        times: StepTimes,
        params: OurParams,
        predicted: Callable[[Ticket], int],
        yielded: Callable[[Ticket], None],
    ) -> None:
        """`predicted`: tokens of an answer; `yielded`: takes a ticket that made room for another."""
        self.worker = worker
        self.hungry = True  # may have room for what becomes ready
        self.home = ANY  # the home slot that it serves; ANY: none
        self.done = 0
        self.service_s = 0.0  # mean time from start to end
        self._world = world
        self._lanes = lanes
        self._times = times
        self._params = params
        self._predicted = predicted
        self._yielded = yielded
        engine = worker.engine
        self._block = engine.block_tokens
        self._capacity = engine.kv_tokens // self._block
        self.budget = Budget(worker, times, params, self._block)
        self._staged: dict[Lane, Ticket] = {}
        self._relieved = False  # somebody yielded to the staged priority job
        self._turns = Turns()
        self._waits = Waits()
        self._saved = PrefixSaved()
        self._next: dict[Lane, Turn | None] = dict.fromkeys(LANES)
        self._largest = self._block  # KV tokens of the largest job so far
        self._reserved = 0  # KV blocks of what runs, where they are set aside
        self._looking = False
        self._timer_s = math.inf
        self._speeds = Speeds(
            1.0 / max(1e-9, times.prefill_token_s + times.base_s / max(1, times.chunk_tokens)),
            1.0 / times.decode_s(max(1, engine.slots // 2), 0),
        )

    # --- room --------------------------------------------------------------------------------------------

    @property
    def slots_free(self) -> int:
        return self.worker.engine.slots - len(self.budget.entries)

    def kv_free(self) -> int:
        """KV tokens that the ledger would still give away."""
        paged = self.worker.engine.paged
        limit = limit_blocks(self._capacity, 0.0, self._params.kv, paged=paged)
        if not (paged and self._params.kv.prediction):
            return (limit - self._reserved) * self._block
        return (limit - peak_blocks(self._growths())) * self._block

    def _growths(self) -> Iterator[Growth]:
        for entry in self.budget.entries:
            made = self.budget.made(entry)
            ticket = entry.ticket
            rest = rest_tokens(ticket.made + made, self._predicted(ticket), ticket.max_tokens)
            yield Growth(blocks_of(entry.prompt + made, self._block), blocks_of(rest, self._block))

    def need(self, ticket: Ticket) -> int:
        tokens = ticket.prompt_tokens + ticket.max_tokens
        if self.worker.engine.paged and self._params.kv.prediction:
            tokens = ticket.prompt_tokens + rest_tokens(0, self._predicted(ticket), ticket.max_tokens)
        blocks = blocks_of(tokens, self._block)
        self._largest = max(self._largest, blocks * self._block)
        return blocks * self._block

    def takes_priority(self, ticket: Ticket) -> bool:
        """Whether a pull of a priority job is open here that this one could be the answer to."""
        return (
            Lane.PRIORITY not in self._staged and self.slots_free > 0 and self.need(ticket) <= self.kv_free()
        )  # fmt: skip

    def lower_places(self) -> int:
        return max(0, self.budget.lower_places(self._world.now_s, self.slots_free))

    # --- what happens ------------------------------------------------------------------------------------

    def take(self, ticket: Ticket) -> None:
        """A priority job that an open pull brought."""
        now_s = self._world.now_s
        self._waits.heard(now_s - ticket.came_s, min(ticket.ttft_s, 1e6), now_s)
        self._launch(ticket, Lane.PRIORITY, self._views(now_s))

    def first(self, ticket: Ticket) -> None:
        entry = ticket.mind.entry
        self.budget.gave_first(entry, self._world.now_s)
        if self.home != ANY and ticket.mind.home == self.home and ticket.work is not None:
            self._saved.heard(max(0, ticket.work.cached_tokens - entry.sliced))

    def sliced(self, ticket: Ticket) -> None:
        self.budget.computed(ticket.mind.entry)

    def ended(self, ticket: Ticket) -> None:
        entry = ticket.mind.entry
        now_s = self._world.now_s
        self.budget.leave(entry, now_s)
        self._reserved -= entry.reserved // self._block
        self.done += 1
        took_s = now_s - entry.entered_s
        self.service_s += (took_s - self.service_s) * max(0.05, 1.0 / self.done)
        ticket.mind.entry = None

    def stepped(self) -> None:
        self.budget.stepped(self._world.now_s)
        self._pump()
        self.look()
        self.hungry = self.slots_free > 0

    def emptied(self) -> list[Ticket]:
        """The worker is gone: what was staged."""
        staged = list(self._staged.values())
        self._staged.clear()
        return staged

    def forget(self, ticket: Ticket) -> bool:
        """A caller left whose job may be staged here."""
        for lane, staged in self._staged.items():
            if staged is ticket:
                del self._staged[lane]
                return True
        return False

    # --- prompts -----------------------------------------------------------------------------------------

    def _pump(self) -> None:
        for entry in list(self.budget.unsent):
            if entry.waiting:
                self._advance(entry)
        first = next((entry for entry in self.budget.unsent if entry.waiting), None)
        if first is not None:
            self._wake_in(self.budget.submits_in_s(first, self._world.now_s))

    def _advance(self, entry: Entry) -> None:
        tokens = self.budget.grant(entry, self._world.now_s)
        if not tokens:
            return
        self.budget.sent(entry, tokens)
        upto = entry.done + tokens
        if upto >= entry.prompt:
            entry.submitted = True
            self.budget.unsent.pop(entry, None)
            priority = 1.0 if entry.lane is Lane.PRIORITY else 0.0
            self._world.start(entry.ticket, self.worker, priority=priority, cached_tokens=entry.done)
        else:
            entry.slices += 1
            self._world.warm(entry.ticket, self.worker, upto, entry.done)

    def _wake_in(self, in_s: float) -> None:
        now_s = self._world.now_s
        at_s = now_s + max(1e-3, in_s)
        if now_s < self._timer_s <= at_s:
            return
        self._timer_s = at_s
        self._world.call_at(at_s, self._woken)

    def _woken(self) -> None:
        if self._world.now_s < self._timer_s or not self.worker.up:
            return
        self._timer_s = math.inf
        self._pump()
        self.look()

    # --- pulls -------------------------------------------------------------------------------------------

    def look(self, *, relieve: bool = False) -> None:
        """Starts what may start now. `relieve`: running lower work may yield to priority that waits."""
        if self._looking or not self.worker.up:
            return
        self._looking = True
        try:
            self._round(relieve)
        finally:
            self._looking = False

    def _round(self, relieve: bool) -> None:
        while True:
            now_s = self._world.now_s
            views = self._views(now_s)
            if not any(view.wants for view in views):
                return
            room = self._room(views, now_s, relieve)
            step = next_step(views, room, self._turns, self._params.pull)
            if step is None:
                self._rest(views, room, now_s)
                return
            if isinstance(step, Start):
                ticket = self._staged.pop(step.lane)
                self._relieved = self._relieved and step.lane is not Lane.PRIORITY
                self._launch(ticket, step.lane, views)
            elif isinstance(step, MakeRoom):
                if not self._make_room():
                    return
            elif not self._pull(step.lane, step.batch, views, now_s):  # type: ignore[union-attr]  # nothing is held
                return

    def _rest(self, views: list[LaneView], room: Room, now_s: float) -> None:
        if room.slots > 0:
            for lane in LANES:
                if self._lanes.waits(lane) and self._next[lane] is None:
                    in_s = self._lanes.look_in_s(lane, self.home, now_s, self._patience_s(lane))
                    if in_s is not None:
                        self._wake_in(in_s)
        if lower_waits(views) and room.lower_places <= 0 and room.slots > 0:
            in_s = self.budget.look_in_s(now_s)
            if in_s is not None:
                self._wake_in(in_s)

    def _pull(self, lane: Lane, batch: int, views: list[LaneView], now_s: float) -> bool:
        """False when nothing came of it."""
        moved = False
        turn = self._next[lane]
        if turn is None:
            return False
        for _ in range(1 if turn.reason is StealReason.WAITED else batch):
            ticket = self._lanes.pop(lane, turn.home, now_s)
            if ticket is None:
                break
            moved = True
            if lane is Lane.PRIORITY:
                self._waits.heard(now_s - ticket.came_s, min(ticket.ttft_s, 1e6), now_s)
            if self._has_room(lane, ticket, views, now_s):
                self._launch(ticket, lane, views)
            elif lane not in self._staged:
                self._staged[lane] = ticket
            else:
                self._lanes.give_back(ticket, now_s)
                break
            if turn.reason is not None:
                self._world.count("steals")
        return moved

    def _patience_s(self, lane: Lane) -> float:
        """How long a job of another's home is left to it."""
        head = self._lanes.head(lane)
        target_s = min(head.ttft_s, self._params.ttft_default_s[lane]) if head is not None else 1.0
        return patience_s(self._saved.tokens, self._speeds.prefill, target_s, self._params.steal)

    def _has_room(self, lane: Lane, ticket: Ticket, views: list[LaneView], now_s: float) -> bool:
        need = self.need(ticket)
        if lane is Lane.PRIORITY:
            return self.slots_free > 0 and need <= self.kv_free()
        if self.slots_free <= 0:
            return False
        if lane in floor_is_due(views, self._turns, self._params.pull, overloaded=self._overloaded(now_s)):
            return need <= self.kv_free() and self.budget.floor_places(now_s) > 0
        reserve = min(self.budget.kept(now_s).kv_tokens, self.worker.engine.kv_tokens - need)
        return self.lower_places() > 0 and need + reserve <= self.kv_free()

    def _launch(self, ticket: Ticket, lane: Lane, views: list[LaneView]) -> None:
        now_s = self._world.now_s
        overload = self._overloaded(now_s)
        kept = lane is not Lane.PRIORITY and lane in floor_is_due(
            views, self._turns, self._params.pull, overloaded=overload
        )
        self._turns = started(self._turns, lane, 1, views)
        job: Job = ticket.mind
        reserved = self.need(ticket)
        entry = job.entry = Entry(ticket, reserved, now_s, kept=kept, preemptions=job.preemptions)
        self._reserved += reserved // self._block
        self.budget.enter(entry, now_s)
        self._advance(entry)
        if entry.waiting:
            self._wake_in(self.budget.submits_in_s(entry, now_s))

    def _views(self, now_s: float) -> list[LaneView]:
        views = []
        for lane in LANES:
            staged = self._staged.get(lane)
            turn = None
            if staged is None and self._lanes.waits(lane):
                turn = self._lanes.turn(lane, self.home, now_s, self._patience_s(lane))
            self._next[lane] = turn
            waiting, due = turn is not None, False
            if lane is not Lane.PRIORITY:
                head = staged if staged is not None else self._lanes.head(lane)
                due = head is not None and head.mind.latest_start_s <= now_s
            views.append(LaneView(lane, waiting, False, self.need(staged) if staged is not None else None, due))
        return views

    def _room(self, views: list[LaneView], now_s: float, relieve: bool) -> Room:
        lower = lower_waits(views)
        kept = self.budget.kept(now_s) if lower else None
        staged_most = max((view.staged_tokens or 0 for view in views if view.lane is not Lane.PRIORITY), default=0)
        room = Room(
            self.slots_free,
            self.kv_free(),
            self._largest,
            lower_places=self.lower_places() if lower else 0,
            floor_places=self.budget.floor_places(now_s) if lower else 0,
            reserved_slots=kept.slots if kept else 0,
            reserved_kv_tokens=min(kept.kv_tokens, self.worker.engine.kv_tokens - staged_most) if kept else 0,
            overloaded=lower and self._overloaded(now_s),
        )
        yields = relieve and not self._relieved and self._params.preempt.preemptions_max and short_of_room(views, room)
        if not yields or not any(entry.lane in _LOWER for entry in self.budget.entries):
            return room
        return Room(**{name: getattr(room, name) for name in Room.__struct_fields__ if name != "yields"}, yields=True)

    def _overloaded(self, now_s: float) -> bool:
        staged = self._staged.get(Lane.PRIORITY)
        head = staged if staged is not None else self._lanes.head(Lane.PRIORITY)
        waiting_s = now_s - head.came_s if head is not None else 0.0
        return overloaded(
            self._waits, waiting_s=waiting_s, tpot_p95_s=self.budget.tpot_p95_s(now_s), now_s=now_s,
            params=self._params.overload,
        )  # fmt: skip

    # --- yielding ----------------------------------------------------------------------------------------

    def _make_room(self) -> bool:
        """One run yields to the staged priority job; where none may, the job goes back to its lane."""
        staged = self._staged[Lane.PRIORITY]
        now_s, free = self._world.now_s, self.kv_free()
        entries = {str(entry.ticket.index): entry for entry in self.budget.entries if entry.lane in _LOWER}
        victim = choose_victim(
            [self._standing(entry) for entry in entries.values()],
            need_kv_tokens=self.need(staged),
            free_kv_tokens=free,
            speeds=self._speeds,
            now_s=now_s,
            params=self._params.preempt,
        )
        if victim is None:
            del self._staged[Lane.PRIORITY]
            self._lanes.give_back(staged, now_s)
            return False
        self._relieved = True
        self.preempt(entries[victim.job_id])
        return True

    def preempt(self, entry: Entry) -> None:
        ticket, job = entry.ticket, entry.ticket.mind
        if ticket.where is not None:
            self._world.stop(ticket)
        if job.entry is not entry:  # it ended at this very moment
            return
        self.ended(ticket)
        job.preemptions += 1
        self._world.count("preemptions")
        self._yielded(ticket)

    def _standing(self, entry: Entry) -> Standing:
        ticket = entry.ticket
        made = ticket.made + self.budget.made(entry)
        predicted = self._predicted(ticket)
        return Standing(
            str(ticket.index),
            entry.lane,
            began_s=entry.entered_s,
            kv_tokens=entry.reserved,
            prompt_tokens=ticket.prompt_tokens,
            generated=made,
            predicted=predicted if made < predicted else ticket.max_tokens,
            deadline_s=ticket.due_s,
            preemptions=entry.preemptions,
            kept=entry.kept,
        )
