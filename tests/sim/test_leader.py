"""The election under virtual time: lost answers, partitions, frozen processes and clocks of different speed.

Each scheduler has a bus of its own to one register; what goes wrong happens between them, by seeded chance.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import cast

import pytest

from laneway.runtime.bus import ApiError, Bus, OutOfStorage, PublishUnknown, WrongSequence
from laneway.runtime.bus_errors import ERR_MESSAGE_NOT_FOUND
from laneway.runtime.headers import EXPECTED_SUBJECT_SEQUENCE
from laneway.scheduler.leader import GRACE, Leadership

TTL_S = 3.0
DRIFT = 0.02  # clocks run this much faster or slower at most
TAKEOVER_S = TTL_S * (1.0 + GRACE) * (1.0 + DRIFT) + 0.2  # and what the messages take


@dataclass
class Register:
    """The key as the stream's leader has it."""

    data: bytes = b""
    sequence: int = 0
    watchers: dict[int, Callable[[bytes], None]] = field(default_factory=dict)
    full: bool = False
    tries: int = 0
    late_s: float = 0.0  # between telling who listens and storing

    def store(self, data: bytes, expected: int) -> int:
        self.tries += 1
        if expected != self.sequence:
            raise WrongSequence("the key changed")
        if self.full:  # who listens hears it all the same
            self.tell(data)
            raise OutOfStorage("resource limits exceeded")
        self.data, self.sequence = data, self.sequence + 1
        if not self.late_s:
            self.tell(data)
        return self.sequence

    def tell(self, data: bytes) -> None:
        for changed in list(self.watchers.values()):
            changed(data)


@dataclass
class DriftingClock:
    speed: float

    def now(self) -> float:
        return 1_800_000_000.0 + asyncio.get_running_loop().time()

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time() * self.speed


class Line:
    """What one process has of the bus. Requests take a while, may be cut off on either way, and never fail by rule."""

    def __init__(self, register: Register, random: Random, *, lost: float = 0.0) -> None:
        self.cut = False
        self._register = register
        self._random = random
        self._lost = lost

    async def api(self, subject: str, body: Mapping[str, object], *, timeout_s: float) -> dict[str, object]:
        await self._trip(timeout_s)
        register = self._register
        answer = {"message": {"data": base64.b64encode(register.data).decode(), "seq": register.sequence}}
        await self._trip(timeout_s)
        if not register.sequence:
            raise ApiError(404, ERR_MESSAGE_NOT_FOUND, "no message found")
        return cast("dict[str, object]", answer)

    async def store(self, subject: str, data: bytes, headers: Mapping[str, str], *, timeout_s: float) -> int:
        await self._trip(timeout_s)
        if self._register.late_s:
            self._register.tell(data)
            await asyncio.sleep(self._register.late_s)
        sequence = self._register.store(data, int(headers[EXPECTED_SUBJECT_SEQUENCE]))
        await self._trip(timeout_s)
        return sequence

    async def _trip(self, timeout_s: float) -> None:
        await asyncio.sleep(self._random.uniform(0.0, 0.02))
        if self.cut or self._random.random() < self._lost:
            await asyncio.sleep(timeout_s)
            raise PublishUnknown("no answer")

    async def listen(self, subject: str, heard: Callable[..., None]) -> int:
        @dataclass
        class Message:
            data: bytes

        def deliver(data: bytes) -> None:
            if not self.cut and self._random.random() >= self._lost:
                heard(Message(data))

        key = id(deliver)
        self._register.watchers[key] = deliver
        return key

    async def unsubscribe(self, subscription: int) -> None:
        self._register.watchers.pop(subscription, None)


class Candidate:
    """A process that campaigns, keeps and campaigns again."""

    def __init__(self, name: str, register: Register, random: Random, *, lost: float = 0.0, speed: float = 1.0) -> None:
        self.line = Line(register, random, lost=lost)
        self.clock = DriftingClock(speed)
        self.leadership = Leadership(cast("Bus", self.line), "local", self.clock, who=name, ttl_s=TTL_S)
        self.epochs: list[int] = []
        self.task: asyncio.Task[None] | None = None

    @property
    def leads(self) -> bool:
        return self.leadership.held()

    async def run(self) -> None:
        while True:
            self.epochs.append(await self.leadership.campaign())
            await self.leadership.keep()


@asynccontextmanager
async def running(candidates: list[Candidate]) -> AsyncIterator[None]:
    for candidate in candidates:
        candidate.task = asyncio.create_task(candidate.run())
    try:
        yield
    finally:
        for candidate in candidates:
            assert candidate.task is not None
            candidate.task.cancel()
        await asyncio.gather(*(c.task for c in candidates if c.task), return_exceptions=True)


async def until(predicate: Callable[[], object], limit_s: float) -> float:
    """The virtual time that it took."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    async with asyncio.timeout(limit_s):
        while not predicate():  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.01)
    return loop.time() - began_s


def candidates_of(seed: int, count: int, *, lost: float = 0.0) -> list[Candidate]:
    random, register = Random(seed), Register()
    return [
        Candidate(f"s{n}", register, random, lost=lost, speed=random.uniform(1.0 - DRIFT, 1.0 + DRIFT))
        for n in range(count)
    ]


@pytest.mark.looptime
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("fault", ["killed", "partitioned"])
async def test_a_standby_leads_within_a_term_and_its_grace(seed: int, fault: str) -> None:
    candidates = candidates_of(seed, 2)
    async with running(candidates):
        await until(lambda: any(c.leads for c in candidates), 1.0)
        await asyncio.sleep(Random(seed).uniform(3.0, 6.0))
        (leader,) = [c for c in candidates if c.leads]
        (standby,) = [c for c in candidates if c is not leader]
        if fault == "killed":
            assert leader.task is not None
            leader.task.cancel()
            await asyncio.gather(leader.task, return_exceptions=True)
        leader.line.cut = True
        took_s = await until(lambda: standby.leads, TAKEOVER_S)
        assert took_s <= 5.0
        assert not leader.leads, "it gave up before"
        assert standby.leadership.epoch > leader.leadership.epoch


@pytest.mark.looptime
@pytest.mark.parametrize("seed", range(6))
async def test_never_two_at_once_whatever_the_network_does_and_somebody_once_it_is_well(seed: int) -> None:
    random = Random(seed)
    candidates = candidates_of(seed, 3, lost=0.05)
    async with running(candidates):
        for _ in range(40):
            for candidate in candidates:
                candidate.line.cut = random.random() < 0.3
            for _ in range(random.randrange(10, 80)):
                await asyncio.sleep(0.05)
                assert sum(c.leads for c in candidates) <= 1
        for candidate in candidates:
            candidate.line.cut = False
        await until(lambda: any(c.leads for c in candidates), 4 * TAKEOVER_S)
    epochs = [epoch for c in candidates for epoch in c.epochs]
    assert len(set(epochs)) == len(epochs), "an epoch is of one term"
    for candidate in candidates:
        assert candidate.epochs == sorted(candidate.epochs)


@pytest.mark.looptime
async def test_one_that_hears_a_later_term_gives_up_though_its_clock_stood_still() -> None:
    first, second = candidates_of(1, 2)
    async with running([first, second]):
        await until(lambda: first.leads or second.leads, 1.0)
        old, new = (first, second) if first.leads else (second, first)
        old.clock.speed = 0.0  # as in a virtual machine that was stopped
        old.line.cut = True
        await until(lambda: new.leads, TAKEOVER_S)
        assert old.leads, "it cannot know"
        old.leadership.heard(new.leadership.epoch)
        assert not old.leads
        old.clock.speed, old.line.cut = 1.0, False
        new.line.cut = True
        await until(lambda: old.leads, 2 * TAKEOVER_S)
        assert old.leadership.epoch > new.leadership.epoch


@pytest.mark.looptime
async def test_a_term_is_above_every_epoch_that_was_heard() -> None:
    """Also where the leader's key was lost with its storage and our wall clock is behind."""
    (candidate,) = candidates_of(1, 1)
    candidate.leadership.heard(4_000_000_000)
    async with running([candidate]):
        await until(lambda: candidate.leads, 1.0)
    assert candidate.leadership.epoch == 4_000_000_001


@pytest.mark.looptime
@pytest.mark.parametrize("seed", range(6))
async def test_one_that_resigns_in_the_middle_of_a_renewal_is_followed_at_once(seed: int) -> None:
    candidates = candidates_of(seed, 2)
    async with running(candidates):
        await until(lambda: any(c.leads for c in candidates), 1.0)
        (leader,) = [c for c in candidates if c.leads]
        (standby,) = [c for c in candidates if c is not leader]
        await asyncio.sleep(TTL_S / 3 + Random(seed).uniform(0.0, 0.04))  # a renewal takes up to 40 ms
        assert leader.task is not None
        leader.task.cancel()
        await asyncio.gather(leader.task, return_exceptions=True)
        await leader.leadership.resign()
        assert await until(lambda: standby.leads, TAKEOVER_S) < 0.5


@pytest.mark.looptime
@pytest.mark.parametrize("late_s", [0.05, 0.2])
async def test_a_standby_that_hears_of_a_write_before_it_is_stored_does_not_miss_it(late_s: float) -> None:
    leader, standby = candidates_of(1, 2)
    async with running([leader, standby]):
        await until(lambda: leader.leads or standby.leads, 1.0)
        if standby.leads:
            leader, standby = standby, leader
        await asyncio.sleep(0.5)
        leader.line._register.late_s = late_s
        assert leader.task is not None
        leader.task.cancel()
        await asyncio.gather(leader.task, return_exceptions=True)
        await leader.leadership.resign()
        assert await until(lambda: standby.leads, TAKEOVER_S) < 2.0 * late_s + 0.2, "not at its next look in a second"


@pytest.mark.looptime
async def test_while_the_storage_is_full_nobody_tries_without_a_pause() -> None:
    candidates = candidates_of(1, 2)
    register = candidates[0].line._register
    async with running(candidates):
        await until(lambda: any(c.leads for c in candidates), 1.0)
        register.full = True
        await until(lambda: not any(c.leads for c in candidates), TAKEOVER_S)
        before = register.tries
        await asyncio.sleep(60.0)
        assert register.tries - before < 60 * 2 * 10 / TTL_S * 3
        register.full = False
        await until(lambda: any(c.leads for c in candidates), TAKEOVER_S)
