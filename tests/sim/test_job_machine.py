"""The life of one job under every order of steps: its doors, its workers, lost answers, late writes, dead processes.

The transitions, the claims, the workers' writes and the doors' changes are the real ones. The record's subject, the
lane message and the leases are small models, and Hypothesis chooses each next step.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from msgspec.structs import replace

from laneway.core import job as jobs
from laneway.core.clock import ManualClock
from laneway.core.job import IllegalTransition, JobRecord
from laneway.core.lanes import JobState
from laneway.runtime.bus import NoAnswer, NotConnected, PublishUnknown, StreamFull, WrongSequence
from laneway.runtime.records import StoredRecord
from laneway.workers.claims import STRIKES_MAX, Ack, Answer, Term
from tests.support.job_actors import ACK_WAIT_S, ERROR, RESULT, Door, Worker
from tests.support.nats import make_record
from tests.support.stepped import (
    Actor,
    Alone,
    Fate,
    History,
    Message,
    Publish,
    Put,
    Question,
    Read,
    Running,
    Sleep,
    Tell,
    sleep,
)

START_S = 1_800_000_000.0
DEADLINE_S = START_S + 600.0
ACTORS_MAX = 8
STEPS_MAX = 100  # of one actor without a fault; it needs a handful

index = st.integers(0, ACTORS_MAX - 1)
fates = st.sampled_from([*[Fate.DONE] * 5, Fate.UNHEARD, Fate.LATE, Fate.REFUSED])
three = st.integers(0, 2)
GIVES_BACK = ("hand_back", "requeue", "give_way")
outcomes = st.sampled_from([*GIVES_BACK * 3, *("start", "confirm") * 2, "succeed", "fail", "expire", "cancel"])


def _refused(change: Callable[[], JobRecord]) -> None:
    with pytest.raises(IllegalTransition):
        change()


class JobMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock(START_S)
        self.history = History(self._check_write)
        self.actors: list[Actor] = []
        self.messages: list[Message] = []
        self.flying: list[tuple[Put | Publish, Actor]] = []
        self.leases: dict[str, bool] = {}
        self.lapsed: set[int] = set()  # attempts whose owner was without its lease at some time
        self.claimants: dict[int, Actor] = {}  # by attempt; but for claims that landed late
        self.holders: dict[int, Actor | None] = {}  # the same, once they know
        self.workers = [self._new_worker() for _ in range(3)]

    @initialize(late=st.booleans(), fault=st.integers(0, 3))
    def accept(self, late: bool, fault: int) -> None:
        record = make_record("local-job", attached=late, door="door-1")
        record = replace(record, contract=replace(record.contract, deadline_s=DEADLINE_S))
        assert jobs.stored_late(record) or not late
        self.door = Door(record, self.clock, self.messages)
        self._begin("accept", self.door.accept())
        while fault and not self.messages:
            self._step(self.actors[0], Fate.DONE, False)

    # --- steps and faults --------------------------------------------------------------------------------

    @rule(which=index, fate=fates, behind=st.booleans())
    def step(self, which: int, fate: Fate, behind: bool) -> None:
        if (actor := self._pick(which)) is not None:
            self._step(actor, fate, behind)

    @rule(which=index)
    def go_on(self, which: int) -> None:
        """Without a fault, as most do."""
        if (actor := self._pick(which)) is not None:
            self._go_on(actor)

    @rule(which=index, what=outcomes)
    def outcome(self, which: int, what: str) -> None:
        running = [actor for actor in self.actors if isinstance(actor.question, Running)]
        if running:
            self._resume(running[which % len(running)], what)

    @rule(which=three, fate=fates)
    def deliver(self, which: int, fate: Fate) -> None:
        """To a worker whose first step has this fate: most often that is the claim."""
        run = self._pass_to(self.workers[which])
        if run is not None and fate is not Fate.DONE and not isinstance(run.question, Running):
            self._step(run, fate, False)

    def _pass_to(self, worker: Worker) -> Actor | None:
        ready = [message for message in self.messages if not message.gone and not message.in_flight]
        if ready:
            self._deliver(ready[0], worker)
        return worker.run if ready else None

    @rule(which=three, what=st.sampled_from(["", *GIVES_BACK]))
    def attempt(self, which: int, what: str) -> None:
        """A whole attempt without a fault, or its beginning; the message may be another's still."""
        self.ack_wait_ends()
        worker = self.workers[which]
        self._pass_to(worker)
        if worker.run is not None:
            self._go_on(worker.run)
        if worker.run is not None and what:
            self._resume(run := worker.run, what)
            self._go_on(run)

    @rule()
    def ack_wait_ends(self) -> None:
        for message in self.messages:
            message.in_flight = False

    @rule(which=three, leased=st.booleans(), watching=st.sampled_from([True, True, False]))
    def lease(self, which: int, leased: bool, watching: bool) -> None:
        """A worker that is paused loses its lease, and goes on later; one that was cut off knows nothing of others."""
        self._set_lease(self.workers[which].name, leased)
        self.workers[which].watching = watching

    @rule(which=three, lapsed=st.booleans())
    def kill_worker(self, which: int, lapsed: bool) -> None:
        """Its place is taken by another incarnation. Without `lapsed` its lease goes on for a while."""
        worker = self.workers[which]
        if worker.run is not None:
            worker.run.stop()
        if lapsed:
            self._set_lease(worker.name, False)
        self.workers[which] = self._new_worker()
        self._sweep()

    @rule(what=st.sampled_from(["leases", "door", "cancel", "another", "late", "wait"]), which=index)
    def rarely(self, what: str, which: int) -> None:
        match what:
            case "leases":
                self.leases_of_the_dead_end()
            case "door":
                for actor in [actor for actor in self.actors if not actor.worker][which:]:
                    actor.stop()
                self._sweep()
            case "cancel" if which < 2:
                self._begin("cancel", self.door.cancel())
            case "another" if self.messages and self.messages[0].accepted.sequence and len(self.messages) == 1:
                # A second try of a request with a key may put its job into the lane twice.
                self.messages.append(Message(self.messages[0].accepted))
            case "late" if self.flying:
                self._land(which % len(self.flying), which < 6)
            case "wait":
                self.clock.advance(700.0 if which == 1 else 0.001 if which % 2 else 3.0)
                if self.clock.now() >= DEADLINE_S:
                    self._begin("expire", self.door.expire())
            case _:
                pass

    def leases_of_the_dead_end(self) -> None:
        for name in self.leases.keys() - {worker.name for worker in self.workers}:
            self._set_lease(name, False)

    # --- what must hold ----------------------------------------------------------------------------------

    def _check_write(self, old: JobRecord | None, new: JobRecord, writer: Actor) -> None:
        """Of every write, whoever made it and whenever it lands."""
        assert new.starts - new.clean <= STRIKES_MAX
        assert len(new.lineage) == new.attempt == new.starts >= new.clean
        assert (new.state is JobState.RUNNING) == bool(new.owner)
        assert new.preemptions == sum(attempt.yielded_s > 0.0 for attempt in new.lineage) <= new.clean
        if old is None:
            assert new.attempt <= 1
            assert new.attempt == 0 or new.owner == writer.worker
            return
        assert not old.state.terminal, "a job ends once"
        if new.state.terminal:
            assert new.attempt == old.attempt
            return
        if new.attempt == old.attempt:
            assert old.state is JobState.RUNNING
            assert old.owner == writer.worker, "only the owner writes"
            assert new.lineage[:-1] == old.lineage[:-1]
            return
        assert new.attempt == old.attempt + 1
        assert new.state is JobState.RUNNING
        assert new.owner == new.lineage[-1].owner == writer.worker
        assert new.lineage[:-1] == old.lineage
        if old.state is JobState.RUNNING:
            assert self.claimants.get(old.attempt) is not writer, "a claim whose answer was lost is made anew"
            assert old.owner == writer.worker or old.attempt in self.lapsed, "the owner was never without its lease"

    def _holds(self, attempt: int, run: Actor | None) -> None:
        assert self.holders.setdefault(attempt, run) is run, "two runs hold one attempt"

    def _told(self, actor: Actor, what: Answer) -> None:
        assert not isinstance(what, Term), "every message here has a record, or may make one"
        if isinstance(what, Ack) and not actor.parked:
            assert self.history.ended
            assert actor.saw_end

    @invariant()
    def the_transitions_refuse_what_is_not_theirs(self) -> None:
        record, now_s = self.history.record, self.clock.now()
        if record is None:
            return
        for last in record.lineage:
            if (last.attempt, last.owner) == (record.attempt, record.owner):
                continue
            who = (record, last.owner, last.attempt)
            _refused(partial(jobs.set_start_index, *who, 1))
            _refused(partial(jobs.succeed, *who, RESULT, record.timings))
            _refused(partial(jobs.fail, *who, ERROR, now_s))
            _refused(partial(jobs.hand_back, *who))
            _refused(partial(jobs.requeue, *who))
            _refused(partial(jobs.give_way, *who, now_s))
        if record.state is not JobState.WAITING:
            _refused(partial(jobs.claim, record, "worker-x", now_s))
        if record.state.terminal:
            _refused(partial(jobs.claim, record, "worker-x", now_s, owner_is_dead=True))
            for end in (jobs.cancel, jobs.expire, jobs.refuse, jobs.reject):
                _refused(partial(end, record, ERROR, now_s))

    @invariant()
    def a_refused_job_was_not_accepted(self) -> None:
        record = self.history.record
        assert record is None or record.state is not JobState.REFUSED or not self.door.accepted

    def teardown(self) -> None:
        """All faults end. Then the job ends too, and nothing of it stays in its lane."""
        if not hasattr(self, "door"):
            return
        while self.flying:
            self._land(0, True)
        self.leases_of_the_dead_end()
        for worker in self.workers:
            self._set_lease(worker.name, True)
            worker.watching = True
        for turn in range(60):
            for actor in tuple(self.actors):
                self._go_on(actor)
                if actor.question is not None:
                    self._resume(actor, "succeed")
            self.ack_wait_ends()
            self.clock.advance(ACK_WAIT_S)
            self._pass_to(self.workers[turn % 3])
        assert not self.actors
        assert self.history.ended or not self.door.accepted
        assert all(message.gone for message in self.messages)
        assert self.history.ended or not self.messages

    # --- the models --------------------------------------------------------------------------------------

    def _new_worker(self) -> Worker:
        worker = Worker(f"worker-{len(self.leases)}", self.clock, self.leases, self._holds)
        self.leases[worker.name] = True
        return worker

    def _set_lease(self, name: str, leased: bool) -> None:
        self.leases[name] = leased
        record = self.history.record
        if not leased and record is not None and record.owner == name:
            self.lapsed.add(record.attempt)

    def _begin(self, name: str, coroutine: Coroutine[Question, None, None], worker: Worker | None = None) -> None:
        actor = Actor(name, worker.name if worker is not None else "", coroutine)
        if worker is not None:
            worker.run = actor
        self.actors.append(actor)
        actor.start()
        self._sweep()

    def _sweep(self) -> None:
        self.actors = [actor for actor in self.actors if actor.question is not None]
        for worker in self.workers:
            if worker.run is not None and worker.run.question is None:
                worker.run = worker.message = None

    def _pick(self, which: int) -> Actor | None:
        """One of those that do not wait for their engine."""
        asking = [actor for actor in self.actors if not isinstance(actor.question, Running)]
        return asking[which % len(asking)] if asking else None

    def _go_on(self, actor: Actor) -> None:
        """Until it has ended, or waits for its engine."""
        for _ in range(STEPS_MAX):
            if actor.question is None or isinstance(actor.question, Running):
                return
            self._step(actor, Fate.DONE, False)
        raise AssertionError(f"{actor.name} goes on without an end: {actor.question}")

    def _resume(self, actor: Actor, value: object = None, error: Exception | None = None) -> None:
        if error is not None:
            actor.fail(error)
        else:
            actor.answer(value)
        self._sweep()

    def _step(self, actor: Actor, fate: Fate, behind: bool) -> None:
        match actor.question:
            case Put() | Publish() as write:
                self._write(actor, write, fate)
            case Read(leader) if fate in (Fate.DONE, Fate.UNHEARD):
                found = self.history.read(behind=behind and not leader)
                actor.saw_end |= found is not None and found.stored.record.state.terminal
                self._resume(actor, found)
            case Read():
                self._resume(actor, error=NoAnswer())
            case Tell(message, what):
                self._told(actor, what)
                if fate in (Fate.DONE, Fate.UNHEARD):  # otherwise it is lost: nobody is told
                    message.gone |= isinstance(what, Ack)
                    message.in_flight = False
                self._resume(actor)
            case Alone():
                self._resume(actor, fate is Fate.DONE)
            case Sleep():
                self._resume(actor)
            case _:
                raise AssertionError(actor.question)

    def _write(self, actor: Actor, write: Put | Publish, fate: Fate) -> None:
        if fate is Fate.REFUSED:
            full = isinstance(write, Publish) and not self.messages  # what is stored already is a duplicate, not full
            self._resume(actor, error=StreamFull() if full else NotConnected())
            return
        if fate is Fate.LATE:
            self.flying.append((write, actor))
            self._resume(actor, error=PublishUnknown())
            return
        try:
            sequence = self._store(write, actor)
            if isinstance(write, Put) and write.record.owner == actor.worker != "":
                self.claimants.setdefault(write.record.attempt, actor)
        except WrongSequence as error:
            self._resume(actor, error=error if fate is Fate.DONE else PublishUnknown())
        else:
            self._resume(actor, sequence, PublishUnknown() if fate is Fate.UNHEARD else None)

    def _store(self, write: Put | Publish, actor: Actor) -> int:
        if isinstance(write, Publish):
            # What is of one attempt has one message id, and a duplicate is not stored.
            if all(message.accepted.record.attempt != write.record.attempt for message in self.messages):
                self.messages.append(Message(StoredRecord(write.record, write.sequence)))
            actor.parked |= bool(actor.worker)
            return 0
        sequence = self.history.put(write, actor)
        actor.saw_end |= write.record.state.terminal
        if write.record.owner and not self.leases[write.record.owner]:
            self.lapsed.add(write.record.attempt)
        return sequence

    def _land(self, which: int, lands: bool) -> None:
        write, actor = self.flying.pop(which)
        if lands:
            with contextlib.suppress(WrongSequence):
                self._store(write, actor)

    def _deliver(self, message: Message, worker: Worker) -> None:
        message.deliveries += 1
        message.in_flight = True
        if worker.message is not None:  # held here already
            if worker.message is not message:
                message.in_flight = False
            return
        worker.message = message
        self._begin(f"run on {worker.name}", worker.take(message), worker)


FAST = settings(
    max_examples=200, stateful_step_count=40, derandomize=True, deadline=None, print_blob=True, database=None
)
MANY = settings(FAST, max_examples=1000, stateful_step_count=60, derandomize=False)


@pytest.fixture(autouse=True)
def _pauses_are_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "sleep", sleep)


def test_a_job_ends_once_whatever_happens_to_its_writers():
    run_state_machine_as_test(JobMachine, settings=FAST)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_many_jobs_end_once_whatever_happens_to_their_writers():
    run_state_machine_as_test(JobMachine, settings=MANY)
