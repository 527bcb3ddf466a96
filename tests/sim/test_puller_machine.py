"""A puller under every order of messages, statuses, timeouts, lost connections and calls.

The server is a script: what it sends need not make sense, and nothing that it sends may be lost or given twice.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

import laneway.runtime.puller as puller_module
from laneway.runtime.puller import DRAIN_TIMEOUT_S, PULL_TIMEOUT_S, QUIET_S, Delivery, Puller
from tests.support.step_loop import Listener, ScriptedBus, StepLoop, message, status

CODES = ["404", "408", "409", "503", "100"]
QUIET_CODES = ("404", "408")
ENDLESS_S = 1e9


@dataclass(frozen=True)
class Arrival:
    reply: str
    stream_sequence: int


@dataclass
class Call:
    """A pull, a held pull or a collect under way, and what is known of its end."""

    kind: str
    batch: int
    until_s: float = ENDLESS_S  # when the puller loses patience
    task: asyncio.Task[list[Delivery]] | None = None
    draining: Listener | None = None  # it gave its pull up
    drain_until_s: float = ENDLESS_S


class PullerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = StepLoop()
        self.bus = ScriptedBus()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(puller_module, "listen", self.bus.listen)
        self.puller = Puller(self.bus.as_bus(), "STREAM", "consumer")
        self.loop.run_until_complete(self.puller.start())
        self.waiting: list[Arrival] = []  # arrived, and not given yet
        self.deliveries: dict[int, int] = {}  # by stream sequence
        self.call: Call | None = None  # pull or collect
        self.held: Call | None = None
        self.abandoned: Listener | None = None  # by a held pull that is not collected yet
        self.uncollected = False
        self.heard = self.heard_wanted = 0
        self.takes = False  # what is offered
        self.closed = False

    # --- calls -------------------------------------------------------------------------------------------

    @rule(batch=st.integers(1, 3), wait_s=st.sampled_from([0.0, 5.0]))
    @precondition(lambda self: self.may_call())
    def pull(self, batch: int, wait_s: float) -> None:
        posts, missing = len(self.bus.pulls), batch - len(self.waiting)
        call = self.call = Call("pull", batch, self.loop.now_s + PULL_TIMEOUT_S + wait_s)
        call.task = self.loop.start(self.puller.pull(batch, wait_s=wait_s))
        if missing > 0 and self.can_post():
            assert len(self.bus.pulls) == posts + 1
            assert b'"batch":%d,' % missing in self.bus.pulls[-1][0]
            assert not call.task.done()
        else:
            assert len(self.bus.pulls) == posts
            assert bool(self.puller.trouble) or missing <= 0
            self.ends()

    @rule(wait_s=st.sampled_from([0.0, 60.0]), takes=st.booleans())
    @precondition(lambda self: self.may_call())
    def hold(self, wait_s: float, takes: bool) -> None:
        posts = len(self.bus.pulls)
        self.takes, self.uncollected = takes, True
        opens = not self.waiting and self.can_post()
        self.held = Call("hold", 1, self.loop.now_s + PULL_TIMEOUT_S + wait_s)
        self.loop.act(lambda: self.puller.hold(wait_s, self.on_heard, self.on_offer))
        assert len(self.bus.pulls) == posts + opens
        if not opens:
            assert bool(self.puller.trouble) or self.takes or self.waiting
            self.held_ends()

    @rule()
    @precondition(lambda self: self.held is not None)
    def let_go(self) -> None:
        """It is taken off the server with the collect; what comes until then is given all the same."""
        self.abandoned = self.bus.open()[-1]
        self.loop.act(self.puller.let_go)
        assert self.puller.trouble == ""
        self.held_ends()

    @rule(wait_s=st.sampled_from([0.0, 60.0]))
    @precondition(lambda self: self.may_call() and not self.waiting)
    def a_held_pull_that_nobody_answers(self, wait_s: float) -> None:
        self.hold(wait_s, False)
        self.time_passes(PULL_TIMEOUT_S + wait_s + 0.01)
        self.collect()

    @rule()
    @precondition(lambda self: self.uncollected and self.held is None and self.call is None and not self.closed)
    def collect(self) -> None:
        self.uncollected = False
        call = self.call = Call("collect", 1)
        gave_up, self.abandoned = self.abandoned, None
        call.task = self.loop.start(self.puller.collect())
        if gave_up is not None:
            self.drains(call, gave_up)
        else:
            self.ends()

    @rule()
    @precondition(lambda self: self.open_pull() is not None)
    def a_second_call_is_a_mistake(self) -> None:
        posts = len(self.bus.pulls)
        with pytest.raises(AssertionError, match="one pull at a time"):
            self.loop.run_until_complete(self.puller.pull(4))
        with pytest.raises(AssertionError, match="one pull at a time"):
            self.loop.act(lambda: self.puller.hold(1.0, self.on_heard))
        assert len(self.bus.pulls) == posts

    @rule(late=st.booleans(), odds=st.integers(0, 7))
    @precondition(lambda self: self.call is None and not self.closed)
    def close_seldom(self, late: bool, odds: int) -> None:
        if odds == 1:
            self.close(late)

    def close(self, late: bool) -> None:
        self.closed, self.held, self.uncollected = True, None, False
        last = self.bus.open()[-1]
        closing = self.loop.start(self.puller.close())
        if late and last.open:
            self.arrives(last, 0)
        self.loop.advance(DRAIN_TIMEOUT_S + 0.01)
        closing.result()
        assert not self.bus.open()
        assert not self.bus.on_lost
        newest = {arrival.stream_sequence: arrival.reply for arrival in self.waiting}
        wanted = [(reply, b"-NAK") for reply in newest.values()] if self.bus.connected else []
        assert self.bus.emitted == wanted
        self.waiting.clear()

    @rule()
    @precondition(lambda self: self.closed)
    def a_closed_puller_serves_nobody(self) -> None:
        self.loop.run_until_complete(self.puller.close())
        with pytest.raises(RuntimeError):
            self.loop.run_until_complete(self.puller.pull(1))
        with pytest.raises(RuntimeError):
            self.loop.act(lambda: self.puller.hold(1.0, self.on_heard))

    # --- what the server and the connection do -----------------------------------------------------------

    @rule(which=st.integers(0, 1), again=st.integers(0, 3))
    @precondition(lambda self: self.bus.open())
    def message_arrives(self, which: int, again: int) -> None:
        listeners = self.bus.open()
        self.arrives(listeners[which % len(listeners)], again)

    def arrives(self, listener: Listener, again: int) -> None:
        """A new message, or another delivery of one of the last."""
        known = len(self.deliveries)
        sequence = known + 1 - again if again < known + 1 else known + 1
        self.deliveries[sequence] = self.deliveries.get(sequence, 0) + 1
        msg = message(self.deliveries[sequence], sequence, sum(self.deliveries.values()))
        self.waiting.append(Arrival(msg.reply, sequence))
        self.loop.act(lambda: listener.receive(msg))
        call = self.call
        if self.held is not None:
            self.held_ends()
        elif call is not None and call.kind == "pull" and call.draining is None:
            if len(self.waiting) >= call.batch:
                assert self.puller.trouble == ""
                self.ends()
            else:
                call.until_s = self.loop.now_s + QUIET_S

    @rule(code=st.sampled_from(CODES), age=st.sampled_from([0, 0, 0, 1, 2]), which=st.integers(0, 1))
    @precondition(lambda self: self.bus.pulls and self.bus.open())
    def status_arrives(self, code: str, age: int, which: int) -> None:
        """Of the last pull, or of one that has ended long ago."""
        _, reply = self.bus.pulls[-1 - min(age, len(self.bus.pulls) - 1)]
        listeners = [listener for listener in self.bus.open() if reply.startswith(f"{listener.inbox}.")]
        if not listeners:
            return
        self.loop.act(lambda: listeners[0].receive(status(code, reply)))
        if self.open_pull() is not None and reply == self.bus.pulls[-1][1] and code != "100":
            assert bool(self.puller.trouble) == (code not in QUIET_CODES)
            self.open_pull_ends()

    @rule(connected=st.sampled_from([*[True] * 7, False]), post_fails=st.sampled_from([*[False] * 7, True]))
    def connection(self, connected: bool, post_fails: bool) -> None:
        lost = self.bus.connected and not connected
        self.bus.post_fails = post_fails
        self.loop.act(lambda: self.bus.set_connected(connected))
        if lost and self.open_pull() is not None:
            assert "connection" in self.puller.trouble
            self.open_pull_ends()

    @rule(seconds=st.sampled_from([0.003, QUIET_S * 1.1, DRAIN_TIMEOUT_S * 1.1, PULL_TIMEOUT_S * 1.1, 70.0]))
    def time_passes(self, seconds: float) -> None:
        self.loop.advance(seconds)
        now_s, call, held = self.loop.now_s, self.call, self.held
        if held is not None and now_s >= held.until_s:
            assert "no end" in self.puller.trouble
            self.abandoned = self.bus.open()[-1]
            self.held_ends()
        elif call is not None and now_s >= call.drain_until_s:
            self.ends()
        elif call is not None and now_s >= call.until_s:
            assert "no end" in self.puller.trouble
            self.drains(call, self.bus.open()[0])

    @rule()
    @precondition(lambda self: self.call is not None and self.call.draining is not None)
    def drained(self) -> None:
        assert self.call is not None
        assert self.call.draining is not None
        self.loop.act(self.call.draining.drained.set)
        self.ends()

    # --- what must follow --------------------------------------------------------------------------------

    def may_call(self) -> bool:
        return self.call is None and self.held is None and not self.uncollected and not self.closed

    def can_post(self) -> bool:
        return self.bus.connected and not self.bus.post_fails

    def open_pull(self) -> Call | None:
        """What the server may still answer."""
        if self.held is not None:
            return self.held
        return self.call if self.call is not None and self.call.draining is None else None

    def open_pull_ends(self) -> None:
        if self.held is not None:
            self.held_ends()
        else:
            self.ends()

    def drains(self, call: Call, listener: Listener) -> None:
        """It took its pull off the server, and waits for what is on its way."""
        assert self.bus.open()[-1] is not listener
        call.until_s, call.draining, call.drain_until_s = ENDLESS_S, listener, self.loop.now_s + DRAIN_TIMEOUT_S
        if not self.bus.connected:
            self.ends()

    def ends(self) -> None:
        """The call under way is over, and gave the oldest of what had arrived."""
        call, self.call = self.call, None
        assert call is not None
        assert call.task is not None
        assert call.task.done()
        given = [delivery._reply for delivery in call.task.result()]
        sequences = [delivery.stream_sequence for delivery in call.task.result()]
        assert len(set(sequences)) == len(given) <= call.batch
        places = [place for place, arrival in enumerate(self.waiting) if arrival.reply in given]
        assert len(places) == len(given), "given twice, or never arrived"
        taken = self.waiting[: places[-1] + 1] if places else []
        newest = {arrival.stream_sequence: arrival.reply for arrival in taken}
        assert given == list(newest.values()), "lost, out of order, or not the newest"
        self.waiting = self.waiting[len(taken) :]
        assert len(given) == call.batch or not self.waiting, "something is kept back"

    def held_ends(self) -> None:
        self.held = None
        self.heard_wanted += 1

    def on_heard(self) -> None:
        self.heard += 1
        assert not self.puller.held

    def on_offer(self, delivery: Delivery) -> bool:
        assert delivery._reply == self.waiting[0].reply, "the oldest is offered"
        if self.takes:
            self.waiting.pop(0)
        return self.takes

    @invariant()
    def what_is_over_is_over_and_nothing_else(self) -> None:
        assert self.puller.held == (self.held is not None)
        assert self.heard == self.heard_wanted
        assert self.call is None or (self.call.task is not None and not self.call.task.done())
        assert len(self.bus.open()) <= 2
        assert not self.loop.faults

    def teardown(self) -> None:
        if self.call is not None:
            self.loop.act(lambda: self.bus.set_connected(False))
            self.loop.advance(DRAIN_TIMEOUT_S + 0.01)
            self.ends()
        if not self.closed:
            self.close(late=True)
        assert not self.loop.faults
        self.patch.undo()
        self.loop.shut()


FAST = settings(
    max_examples=160, stateful_step_count=40, derandomize=True, deadline=None, print_blob=True, database=None
)
MANY = settings(FAST, max_examples=1000, stateful_step_count=60, derandomize=False)


def test_a_puller_gives_each_message_once_whatever_the_server_sends():
    run_state_machine_as_test(PullerMachine, settings=FAST)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_pullers_give_each_message_once_in_many_more_orders():
    run_state_machine_as_test(PullerMachine, settings=MANY)
