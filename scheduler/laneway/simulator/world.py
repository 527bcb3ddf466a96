"""One pool under virtual time: requests that arrive, engines that step, and a discipline that decides.

The world knows no policy. It tells a `Discipline` what happens (a request arrives, gets its first token, ends, leaves;
a worker comes, goes, has stepped) and does what that asks for: start a request at a worker, stop it, refuse it, add or
remove workers. Everything happens in the order of time, and at one time in the order in which it was asked for, so one
seed gives one run.

Of callers: one whose first token has not come within its patience leaves, and so does one that has heard enough; one
that is refused comes again when it was told to, or after a back-off, at most `retries` times; a turn of a session comes
its think time after the turn before has ended.

Units: seconds from the trace's begin, tokens. Cost: O(log) for each event, about ten of a request.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from laneway.core.fleet import StepTimes
from laneway.simulator.engine import DONE, FIRST, Engine, Event, Work
from laneway.simulator.outcomes import End, Outcomes, Run
from laneway.simulator.ticket import Ticket, next_turns, tickets
from laneway.simulator.trace import Trace
from laneway.simulator.usage import Meter

CHUNK_ROWS = 65_536  # of a trace that are turned into Python values together
AFTER_S = 3600.0  # a run goes on for so long after the last arrival


@dataclass(frozen=True, slots=True)
class FleetParams:
    """What every discipline gets: the same engines, callers and clock."""

    workers: int
    boot_s: float = 155.0  # from asking for a worker until it can start a request; source: SageServe's spin-up
    retries: int = 2  # of a refused caller
    retry_s: float = 1.0  # back-off of a refusal without a time to come again, doubled each time
    tick_s: float = 0.25  # between two looks of the discipline
    lease_s: float = 3.0  # until the loss of a worker is noticed
    sample_s: float = 10.0  # of the usage figures


class Worker:
    """An engine in the fleet. `mind` is the discipline's own."""

    __slots__ = ("engine", "mind", "number", "ready_s", "tickets", "up", "version")

    def __init__(self, number: int, engine: Engine, ready_s: float) -> None:
        self.number = number
        self.engine = engine
        self.ready_s = ready_s  # from when it can start requests
        self.up = False
        self.version = 0  # of its next event: older entries of the heap say nothing
        self.tickets: dict[Work, Ticket] = {}
        self.mind: Any = None


class Discipline(Protocol):
    """Decides. It holds what waits, and asks the world to act; it is never asked twice for one thing."""

    name: str

    def begin(self, world: World) -> None:
        """Before anything else; the first workers are up already."""

    def arrive(self, ticket: Ticket) -> None:
        """A request comes, or comes again: keep it, start it, or `world.refuse` it."""

    def first(self, ticket: Ticket) -> None:
        """Its first token came."""

    def sliced(self, ticket: Ticket, worker: Worker) -> None:
        """A part of its prompt that `world.warm` asked for is in the worker's prefix cache."""

    def ended(self, ticket: Ticket, worker: Worker) -> None:
        """It left its worker's engine for good."""

    def left(self, ticket: Ticket) -> None:
        """Its caller went away while it waited with the discipline: forget it."""

    def lost(self, tickets: Sequence[Ticket], worker: Worker) -> None:
        """A worker died, and these ran there; they have what their callers have."""

    def joined(self, worker: Worker) -> None:
        """A worker is up."""

    def stepped(self, worker: Worker) -> None:
        """Something happened in the worker's engine: there may be room."""

    def tick(self) -> None:
        """Every `tick_s`."""

    def waiting(self) -> Sequence[int]:
        """How many wait with it, by lane."""
        ...

    def parameters(self) -> dict[str, float | str | bool]:
        """For the report."""
        ...


class World:
    def __init__(
        self,
        trace: Trace,
        discipline: Discipline,
        fleet: FleetParams,
        make_engine: Callable[[], Engine],
        times: StepTimes,
        *,
        seed: int = 0,
        deaths: Iterable[tuple[float, int]] = (),
    ) -> None:
        """`times`: of the profile, for what work is worth. `deaths`: (time, number of a worker)."""
        self.trace = trace
        self.fleet = fleet
        self.times = times
        self.seed = seed
        self.now_s = 0.0
        self.outcomes = Outcomes.of_size(len(trace))
        self.workers: list[Worker] = []  # up
        self.counts: dict[str, float] = {}
        self.random = np.random.default_rng(np.random.SeedSequence([seed, 7]))
        self._discipline = discipline
        self._make_engine = make_engine
        self._booting: list[Worker] = []
        self._made_workers = 0
        self._heap: list[tuple[float, int, Callable[[], None] | None, Worker | None, int]] = []
        self._order = 0
        self._open = 0  # requests that have not ended, later turns of open sessions included
        self._next_turn = next_turns(trace)
        self._turns = set(self._next_turn.values())
        self._meter = Meter(fleet.sample_s, times)
        self._deaths = tuple(deaths)

    # --- what a discipline asks for --------------------------------------------------------------------

    def start(self, ticket: Ticket, worker: Worker, *, priority: float = 0.0, cached_tokens: int = 0) -> None:
        """Gives the whole request to a worker's engine. `cached_tokens`: of its prompt, put there by `warm`."""
        index = ticket.index
        rest = ticket.output_tokens - ticket.made
        leaves = int(self.trace.leaves_after[index])
        if leaves:
            rest = min(rest, max(1, leaves - ticket.made))
        prompt = ticket.prompt_tokens + ticket.made
        work = Work(index, prompt, rest, ticket.prompt_tokens + ticket.max_tokens, priority, ticket.blocks)
        work.known_tokens = cached_tokens
        ticket.work, ticket.where, ticket.warming = work, worker, False
        ticket.starts += 1
        worker.tickets[work] = ticket
        worker.engine.submit(work, self.now_s)
        self._expect(worker)

    def warm(self, ticket: Ticket, worker: Worker, upto_tokens: int, cached_tokens: int) -> None:
        """Computes the prompt's first `upto_tokens`, of which the first `cached_tokens` are there already."""
        work = Work(ticket.index, upto_tokens, 1, upto_tokens + 1, 0.0, None)
        work.known_tokens = cached_tokens
        ticket.work, ticket.where, ticket.warming = work, worker, True
        worker.tickets[work] = ticket
        worker.engine.submit(work, self.now_s)
        self._expect(worker)

    def stop(self, ticket: Ticket) -> None:
        """Takes it out of its engine; what it made stays with its caller, and is computed again when it starts."""
        worker, work = ticket.where, ticket.work
        assert worker is not None, "it does not run"
        assert work is not None
        self._take(worker, worker.engine.advance(self.now_s))
        if ticket.work is not work:  # it ended at this very moment
            return
        worker.engine.abort(work, self.now_s)
        self._leave_engine(ticket, worker, work)
        self._expect(worker)

    def observe(self, worker: Worker) -> None:
        """From now what its engine shows is as of this time; else it is as of its last event, or what was asked."""
        self._take(worker, worker.engine.advance(self.now_s))
        self._expect(worker)

    def refuse(self, ticket: Ticket, retry_after_s: float | None = None) -> None:
        """It comes again after `retry_after_s`, where it has retries left; None: nobody knows when to."""
        index = ticket.index
        if ticket.retries >= self.fleet.retries:
            self._finish(ticket, End.REFUSED)
            return
        if retry_after_s is None:
            retry_after_s = self.fleet.retry_s * 2.0**ticket.retries * (0.5 + float(self.random.random()))
        at_s = self.now_s + retry_after_s
        if at_s >= ticket.asked_s + float(self.trace.patience_s[index]):
            self.call_at(max(self.now_s, ticket.asked_s + float(self.trace.patience_s[index])),
                         lambda: self._finish(ticket, End.LEFT))  # fmt: skip
            return
        ticket.retries += 1
        self.outcomes.retries[index] = ticket.retries
        self.call_at(at_s, lambda: self._again(ticket))

    def _again(self, ticket: Ticket) -> None:
        ticket.due_s += self.now_s - ticket.came_s
        ticket.came_s = self.now_s
        self.outcomes.accepted_s[ticket.index] = self.now_s
        self._discipline.arrive(ticket)

    def drop(self, ticket: Ticket) -> None:
        """It is of no use any more: its deadline is over."""
        self._finish(ticket, End.EXPIRED)

    def call_at(self, at_s: float, act: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (max(at_s, self.now_s), self._order, act, None, 0))

    def add_worker(self, *, at_once: bool = False) -> Worker:
        ready_s = self.now_s if at_once else self.now_s + self.fleet.boot_s
        worker = Worker(self._made_workers, self._make_engine(), ready_s)
        self._made_workers += 1
        if at_once:
            self._up(worker)
        else:
            self._booting.append(worker)
            self.call_at(ready_s, lambda: self._booted(worker))
        self._meter.paid(self.now_s, len(self.workers) + len(self._booting))
        return worker

    def remove_worker(self, worker: Worker | None = None) -> None:
        """An idle one, or the newest that boots; the discipline has stopped what ran there."""
        if worker is None:
            self._booting.pop().up = False
        else:
            assert not worker.tickets, "something runs there"
            worker.up = False
            worker.version += 1
            self.workers.remove(worker)
            self._meter.gone(worker.engine)
        self._meter.paid(self.now_s, len(self.workers) + len(self._booting))

    @property
    def booting(self) -> int:
        return len(self._booting)

    def count(self, what: str, amount: float = 1.0) -> None:
        self.counts[what] = self.counts.get(what, 0.0) + amount

    # --- the run ---------------------------------------------------------------------------------------

    def run(self) -> Run:
        """Until every request has ended, or `AFTER_S` after the last arrival."""
        for _ in range(self.fleet.workers):
            self.add_worker(at_once=True)
        self._discipline.begin(self)
        for at_s, number in self._deaths:
            self.call_at(at_s, lambda number=number: self._die(number))  # type: ignore[misc]
        arrivals = self._arrivals()
        ticket = next(arrivals, None)
        tick_s = self.fleet.tick_s
        end_s = self.trace.span_s + AFTER_S
        while (ticket is not None or self._open) and self.now_s <= end_s:
            next_s = self._heap[0][0] if self._heap else math.inf
            if ticket is not None and ticket.asked_s <= next_s and ticket.asked_s <= tick_s:
                self._pass_to(ticket.asked_s)
                self._arrive(ticket)
                ticket = next(arrivals, None)
            elif tick_s <= next_s:
                self._pass_to(tick_s)
                self._discipline.tick()
                tick_s += self.fleet.tick_s
            else:
                self._pass_to(next_s)
                self._next_event()
        return self._result()

    def _pass_to(self, at_s: float) -> None:
        self.now_s = at_s
        if at_s >= self._meter.due_s:
            self._meter.sample(at_s, self.workers, len(self._booting), self._discipline.waiting())

    def _next_event(self) -> None:
        _, _, act, worker, version = heapq.heappop(self._heap)
        if act is not None:
            act()
        elif worker is not None and version == worker.version:
            events = worker.engine.advance(self.now_s)
            self._take(worker, events)
            self._expect(worker)
            if events:
                self._discipline.stepped(worker)

    def _expect(self, worker: Worker) -> None:
        worker.version += 1
        next_s = worker.engine.next_s
        if next_s < math.inf:
            self._order += 1
            heapq.heappush(self._heap, (next_s, self._order, None, worker, worker.version))

    def _arrivals(self) -> Iterator[Ticket]:
        trace, turns = self.trace, self._turns
        for begin in range(0, len(trace), CHUNK_ROWS):
            for ticket in tickets(trace, begin, min(len(trace), begin + CHUNK_ROWS)):
                if ticket.index not in turns:
                    yield ticket

    def _arrive(self, ticket: Ticket) -> None:
        index = ticket.index
        self._open += 1
        self.outcomes.asked_s[index] = self.outcomes.accepted_s[index] = ticket.asked_s
        patience_s = float(self.trace.patience_s[index])
        if patience_s < math.inf:
            self.call_at(ticket.asked_s + patience_s, lambda: self._impatient(ticket))
        self._discipline.arrive(ticket)

    def _impatient(self, ticket: Ticket) -> None:
        if not math.isnan(ticket.first_s) or self.outcomes.end[ticket.index] != End.OPEN:
            return
        if ticket.where is not None:
            worker = ticket.where
            self.stop(ticket)
            if self.outcomes.end[ticket.index] != End.OPEN:  # it had its answer at this very moment
                return
            self._finish(ticket, End.LEFT)
            self._discipline.ended(ticket, worker)
            self._discipline.stepped(worker)
        else:
            self._discipline.left(ticket)
            self._finish(ticket, End.LEFT)

    # --- what engines say --------------------------------------------------------------------------------

    def _take(self, worker: Worker, events: Iterable[Event]) -> None:
        for at_s, kind, work in events:
            ticket = worker.tickets.get(work)
            if ticket is None or ticket.work is not work:
                continue
            if kind == FIRST:
                if not ticket.warming:
                    self._first(ticket, work, at_s)
            elif kind == DONE and ticket.warming:
                del worker.tickets[work]
                ticket.work = ticket.where = None
                self._discipline.sliced(ticket, worker)
            elif kind == DONE:
                self._done(ticket, worker, work, at_s)
            else:
                self.count("evictions")

    def _first(self, ticket: Ticket, work: Work, at_s: float) -> None:
        if math.isnan(ticket.first_s):
            ticket.first_s = at_s
            self.outcomes.first_s[ticket.index] = at_s
            self.outcomes.cached_tokens[ticket.index] = work.cached_tokens
        self._discipline.first(ticket)

    def _done(self, ticket: Ticket, worker: Worker, work: Work, at_s: float) -> None:
        del worker.tickets[work]
        ticket.made += work.made
        ticket.work = ticket.where = None
        self.outcomes.worker[ticket.index] = worker.number
        left = ticket.made < ticket.output_tokens
        self._finish(ticket, End.LEFT if left else End.DONE, at_s)
        self._discipline.ended(ticket, worker)

    def _leave_engine(self, ticket: Ticket, worker: Worker, work: Work) -> None:
        worker.tickets.pop(work, None)
        if work.made and not ticket.warming:
            ticket.made += work.made
            ticket.recomputed += work.prompt_tokens + work.made
        ticket.work = ticket.where = None

    def _finish(self, ticket: Ticket, end: End, at_s: float | None = None) -> None:
        index, outcomes = ticket.index, self.outcomes
        if outcomes.end[index] != End.OPEN:
            return
        at_s = self.now_s if at_s is None else at_s
        outcomes.end[index] = end
        outcomes.end_s[index] = at_s
        outcomes.tokens[index] = ticket.made
        outcomes.recomputed_tokens[index] = ticket.recomputed
        if end is End.DONE:
            self._meter.done(ticket.lane, ticket.prompt_tokens, ticket.made)
        self._open -= 1
        following = self._next_turn.get(index)
        if following is not None:
            self._follow(following, at_s)

    def _follow(self, index: int, at_s: float) -> None:
        ticket = next(tickets(self.trace, index, index + 1))
        asked_s = at_s + float(self.trace.think_s[index])
        ticket.due_s += asked_s - ticket.asked_s
        ticket.asked_s = ticket.came_s = asked_s
        self._open += 1

        def arrive() -> None:
            self._open -= 1
            self._arrive(ticket)

        self.call_at(asked_s, arrive)

    # --- workers that come and go ------------------------------------------------------------------------

    def _up(self, worker: Worker) -> None:
        worker.up = True
        self.workers.append(worker)

    def _booted(self, worker: Worker) -> None:
        if worker in self._booting:
            self._booting.remove(worker)
            self._up(worker)
            self._discipline.joined(worker)

    def _die(self, number: int) -> None:
        worker = next((each for each in self.workers if each.number == number), None)
        if worker is None:
            return
        self._take(worker, worker.engine.advance(self.now_s))
        worker.up = False
        worker.version += 1
        self.workers.remove(worker)
        self._meter.gone(worker.engine)
        tickets = list(worker.tickets.values())
        for work, ticket in list(worker.tickets.items()):
            self._leave_engine(ticket, worker, work)
        self.call_at(self.now_s + self.fleet.lease_s, lambda: self._discipline.lost(tickets, worker))
        self.count("deaths")

    def _result(self) -> Run:
        self._meter.sample(self.now_s, self.workers, len(self._booting), self._discipline.waiting())
        parameters: dict[str, float | str | bool] = {
            name: getattr(self.fleet, name) for name in FleetParams.__dataclass_fields__
        }
        return Run(
            self._discipline.name,
            self.seed,
            self.trace,
            self.outcomes,
            self._meter.usage(),
            parameters | self._discipline.parameters(),
            self.counts,
        )
