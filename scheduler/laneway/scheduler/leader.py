"""Who leads the schedulers of a region: a term in KV, kept by compare-and-set and renewed while its holder lives.

A holder counts its term from before a renewal was sent, a standby from when it saw the renewal, both by their own
monotonic clocks; so the holder gives up before a standby takes over. A process that was paused finds its term over, and
one whose clock stood still meanwhile gives up when it hears a plan of a later term. Nothing depends on there being only
one leader: releases are guarded and plans carry the epoch. Two just waste work.
"""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
import structlog

from laneway.core import subjects
from laneway.core.clock import Clock
from laneway.runtime.bus import Bus, BusError, WrongSequence
from laneway.runtime.kv import Key, Value

KEY = "leader"
GRACE = 0.15  # of the term: how much longer than the holder a standby waits; far more than clocks differ in speed
LOOK_AGAIN_S = 0.02  # NATS tells who listens of a write before it has stored it; then twice as long, and so on

_log = structlog.get_logger(__name__)


class Term(msgspec.Struct, frozen=True):
    """The value of the key. An empty holder has resigned."""

    holder: str
    epoch: int


class Leadership:
    """One scheduler's part in the election. `who` names this process and no other."""

    def __init__(self, bus: Bus, region: str, clock: Clock, *, who: str, ttl_s: float = 3.0) -> None:
        self.epoch = 0
        self._key = Key(bus, subjects.leader_bucket(region), KEY)
        self._clock = clock
        self._who = who
        self._ttl_s = ttl_s
        self._sequence = 0
        self._held_until_s = float("-inf")
        self._deposed = asyncio.Event()  # wakes keep
        self._epoch_heard = 0

    def held(self) -> bool:
        """Whether this process leads now. Ask right before each act."""
        return self._clock.monotonic() < self._held_until_s and self._epoch_heard <= self.epoch

    def heard(self, epoch: int) -> None:
        """Somebody published in that term. A later one than ours means that ours is over, whatever our clock says."""
        self._epoch_heard = max(self._epoch_heard, epoch)
        if self._epoch_heard > self.epoch:
            self._deposed.set()

    async def campaign(self) -> int:
        """Waits until this process leads; returns the epoch of its term."""
        changed = asyncio.Event()
        patience_s = self._ttl_s * (1.0 + GRACE)
        seen, since_s = Value(sequence=-1), 0.0
        pause_s = self._ttl_s / 3
        async with self._key.watch(lambda _: changed.set()):
            while True:
                pause_s = LOOK_AGAIN_S if changed.is_set() else 2.0 * pause_s
                changed.clear()
                wait_s = min(pause_s, self._ttl_s / 3)
                try:
                    value = await self._key.read(timeout_s=self._ttl_s)
                    if value.sequence != seen.sequence:
                        seen, since_s = value, self._clock.monotonic()
                    left_s = since_s + patience_s - self._clock.monotonic()
                    if (left_s <= 0.0 or self._vacant(value)) and await self._take(value):
                        return self.epoch
                    wait_s = min(wait_s, max(left_s, wait_s / 10))
                except BusError as error:
                    seen = Value(sequence=-1)  # what was not seen does not count as silence
                    _log.warning("leadership_unknown", error=error.message)
                    # A write that was refused, as where the storage is full, is heard all the same: by us too.
                    await asyncio.sleep(wait_s / 10)
                    changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await changed.wait()

    async def keep(self) -> None:
        """Renews the term until it is lost, and returns then."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._ttl_s / 3):
                    await self._deposed.wait()
            if not self._deposed.is_set():
                await self._try_to_renew()
            if not self.held():
                _log.warning("leadership_lost", epoch=self.epoch, epoch_heard=self._epoch_heard)
                return

    async def resign(self) -> None:
        """Gives the term up, so that a standby need not wait for its end."""
        if not self.held():
            return
        self._held_until_s = float("-inf")
        vacant = msgspec.json.encode(Term("", self.epoch))
        with contextlib.suppress(BusError):
            try:
                await self._key.write(vacant, self._sequence, timeout_s=1.0)
            except WrongSequence:  # a renewal was cut off before its answer came
                if await self._still_mine():
                    await self._key.write(vacant, self._sequence, timeout_s=1.0)

    def _vacant(self, value: Value) -> bool:
        # One's own name: an earlier write of this process whose outcome was unknown.
        return _term(value).holder in ("", self._who)

    async def _take(self, value: Value) -> bool:
        # Never below the wall time, so that epochs rise even if the bucket was lost with its storage.
        epoch = max(_term(value).epoch + 1, self._epoch_heard + 1, int(self._clock.now()))
        began_s = self._clock.monotonic()
        try:
            self._sequence = await self._key.write(
                msgspec.json.encode(Term(self._who, epoch)), value.sequence, timeout_s=self._ttl_s
            )
        except WrongSequence:
            return False
        self.epoch = epoch
        self._held_until_s = began_s + self._ttl_s
        if self._epoch_heard <= epoch:
            self._deposed.clear()
        _log.info("leadership_taken", epoch=epoch)
        return self.held()

    async def _try_to_renew(self) -> None:
        try:
            await self._renew()
        except WrongSequence:
            if not await self._still_mine():
                self._held_until_s = float("-inf")
        except BusError as error:
            _log.warning("leadership_not_renewed", error=error.message)

    async def _renew(self) -> None:
        began_s = self._clock.monotonic()
        self._sequence = await self._key.write(
            msgspec.json.encode(Term(self._who, self.epoch)), self._sequence, timeout_s=self._ttl_s / 3
        )
        self._held_until_s = began_s + self._ttl_s

    async def _still_mine(self) -> bool:
        """After a refused renewal: an earlier one with an unknown outcome may be what was found."""
        try:
            value = await self._key.read(timeout_s=self._ttl_s / 3)
        except BusError:
            return True  # the term runs out by itself
        if _term(value) != Term(self._who, self.epoch):
            return False
        self._sequence = value.sequence
        return True


def _term(value: Value) -> Term:
    if not value.data:
        return Term("", 0)
    try:
        return msgspec.json.decode(value.data, type=Term)
    except msgspec.DecodeError:
        _log.error("leader_key_unreadable")
        return Term("", 0)
