"""One provider as one worker sees it: those who wait for it here, what was granted, and the record of all workers.

Owns nothing but its own part of the record. A task writes it: one compare-and-set takes grants for all who wait,
settles what has ended, and renews the rest. What may be granted is decided in policy.quota; this reads, writes, and
waits for the time that it says, for a change that another worker made, or for whoever comes. Changes are heard on core
NATS, where writes that lost are heard as well: so what was heard says only when to look, and each write reads first.

A write whose outcome is unknown is made again. What it may have taken is found in the record under numbers that nobody
here holds, and is given back.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from random import Random

import structlog
from msgspec import Struct

from laneway.core.clock import Clock
from laneway.policy import quota as quotas
from laneway.policy.breaker import BreakerParams
from laneway.policy.quota import Amount, Grant, Quota, QuotaRecord
from laneway.policy.rate_headers import Told
from laneway.runtime.bus import BusError, WrongSequence
from laneway.runtime.kv import Key
from laneway.runtime.wire.quotas import decode_quota, encode_quota
from laneway.runtime.wire.reading import UnreadableMessage
from laneway.workers import metrics

GRANT_S = 15.0  # a worker that was not heard of for this long is dead, and its grants are spent
PLACE_S = 6.0  # a place in the record lasts as long unless it is renewed: a dead worker holds up others no longer
SETTLE_S = 0.1  # what ends within it is settled in one write
SETTLE_SOON_S = 0.01  # where somebody may be waiting for its place among the requests at once
RETRY_S = 0.5  # after a write that failed
CONFLICT_S, CONFLICT_S_MAX = 0.004, 0.1  # after one that lost against another worker's: jittered, and doubled each time
BREAKER = BreakerParams()

_log = structlog.get_logger(__name__)


class Outcome(StrEnum):
    """What the end of a grant says about how well the provider is."""

    WELL = "well"
    BROKEN = "broken"
    UNKNOWN = "unknown"


class _End(Struct, frozen=True):
    outcome: Outcome
    spent: Amount


@dataclass(eq=False)
class Waiting:
    """Somebody here who waits for the provider."""

    want: Amount
    order: float  # lower ones first
    granted: asyncio.Future[Grant] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass(frozen=True)
class _Edit:
    """What a write would bring about, once it is stored."""

    record: QuotaRecord
    ends: dict[int, _End]
    granted: list[tuple[Waiting, Grant]]
    rest_until_s: float
    told: tuple[Told, ...]


@dataclass
class Writes:
    """How many writes of the record there were."""

    stored: int = 0
    lost: int = 0  # against a write of another worker
    granted: int = 0


class Desk:
    """`run` serves those who join until it is cancelled."""

    def __init__(self, key: Key, name: str, quota: Quota, pool: str, holder: str, clock: Clock, random: Random) -> None:
        self.name = name
        self._pool = pool
        self.quota = quota
        self.writes = Writes()
        self._key = key
        self._holder = holder
        self._clock = clock  # of NATS, so that all workers agree
        self._random = random
        self._record = QuotaRecord()  # as last heard of
        self._waiting: list[Waiting] = []
        self._live: set[int] = set()  # numbers of grants that somebody here holds
        self._ends: dict[int, _End] = {}  # and that are not settled in the record yet
        self._next_number = 1
        self._rest_until_s = 0.0  # asked for, and not in the record yet
        self._told: dict[str, Told] = {}
        self._changed_s = inf  # since when something of these waits to be written
        self._wake = asyncio.Event()

    # --- for those who ask ---------------------------------------------------------------------------

    def join(self, want: Amount, order: float) -> Waiting:
        waiting = Waiting(quotas.cut_to(self.quota, want), order)
        bisect.insort(self._waiting, waiting, key=lambda each: each.order)
        self._wake.set()
        return waiting

    def leave(self, waiting: Waiting) -> None:
        """Whoever joined and does not want any more, whether granted or not."""
        if waiting in self._waiting:
            self._waiting.remove(waiting)
            waiting.granted.cancel()
            self._wake.set()
        elif not waiting.granted.cancelled():
            self.end(waiting.granted.result(), Outcome.UNKNOWN, Amount())

    def end(self, grant: Grant, outcome: Outcome, spent: Amount) -> None:
        """A grant's end; it is settled in the record soon."""
        self._ends[grant.number] = _End(outcome, spent)
        self._change()

    def rest(self, until_s: float) -> None:
        self._rest_until_s = max(self._rest_until_s, until_s)
        self._change()

    def tell(self, told: Iterable[Told]) -> None:
        """The provider's own counts: written with the next end, as every answer brings both."""
        self._told |= {each.kind: each for each in told}

    def wait_s(self, want: Amount, waiting: Waiting | None = None) -> float:
        """About how long one more would wait here, or somebody who does."""
        before = self._waiting[: self._waiting.index(waiting)] if waiting in self._waiting else self._waiting
        first, *rest = (*(each.want for each in before), quotas.cut_to(self.quota, want))
        turn_s = quotas.turn_s(self._record, self.quota, self._holder, first, self._clock.now())
        return turn_s + max(_spans_s(self.quota, sum(rest, Amount())), default=0.0)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    # --- the record ----------------------------------------------------------------------------------

    async def run(self) -> None:
        while True:
            try:
                async with self._key.watch(self._heard):
                    await self._serve()
            except (BusError, UnreadableMessage) as error:
                _log.warning("provider_quota_unavailable", provider=self.name, error=str(error))
            await asyncio.sleep(RETRY_S * (1.0 + self._random.random()))

    async def close(self) -> None:
        """Settles what is left, if that can be done at once; else it counts as spent in full."""
        for waiting in list(self._waiting):
            self.leave(waiting)
        if self._ends or self._own_place() is not None:
            with contextlib.suppress(BusError, UnreadableMessage):
                await self._write()

    async def _serve(self) -> None:
        self._heard((await self._key.read()).data)
        while True:
            while (due_s := self._due_in_s()) > 0.0:
                self._wake.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if due_s == inf else due_s):
                        await self._wake.wait()
            await self._write()

    def _heard(self, data: bytes) -> None:
        try:
            self._record = decode_quota(data)
        except UnreadableMessage as error:  # nothing is granted by us until somebody mends it
            _log.warning("provider_quota_unreadable", provider=self.name, error=str(error))
            return
        self._wake.set()

    def _due_in_s(self) -> float:
        """Seconds until there is something to write."""
        now_s = self._clock.now()
        settle_s = SETTLE_SOON_S if self.quota.concurrency and self._record.queue else SETTLE_S
        due_s = [self._changed_s + settle_s - self._clock.monotonic()]
        place = self._own_place()
        if self._waiting and place is None:
            return 0.0
        if self._waiting and place is not None:
            want = self._waiting[0].want
            due_s += [
                quotas.turn_s(self._record, self.quota, self._holder, want, now_s),
                place.until_s - now_s - PLACE_S / 2,
            ]
        elif place is not None:  # nobody waits here any more
            return 0.0
        due_s += (g.until_s - now_s - GRANT_S * 2 / 3 for g in self._record.grants if g.holder == self._holder)
        return min(due_s)

    def _own_place(self) -> quotas.Waiter | None:
        return next((place for place in self._record.queue if place.holder == self._holder), None)

    async def _write(self) -> None:
        """Raises a BusError, or UnreadableMessage."""
        patience_s = CONFLICT_S
        while True:
            value = await self._key.read()
            edit = self._edit(decode_quota(value.data))
            try:
                await self._key.write(encode_quota(edit.record), value.sequence)
            except WrongSequence:
                self.writes.lost += 1
                metrics.PROVIDER_WRITES.labels(self._pool, "lost").inc()
                await asyncio.sleep(patience_s * self._random.random())
                patience_s = min(CONFLICT_S_MAX, 2 * patience_s)
                continue
            self._stored(edit)
            return

    def _edit(self, record: QuotaRecord) -> _Edit:
        now_s, me, ends = self._clock.now(), self._holder, dict(self._ends)
        for number, end in ends.items():
            record = self._with_end(record, number, end, now_s)
        for grant in record.grants:
            if grant.holder == me and grant.number not in self._live:  # of a write of whose outcome nobody heard
                record = self._with_end(record, grant.number, _End(Outcome.UNKNOWN, Amount()), now_s)
        record = quotas.renewed(record, me, now_s + GRANT_S)
        record = quotas.rested(record, self._rest_until_s)
        told = tuple(self._told.values())
        record = quotas.told(record, told)
        waiting = list(self._waiting)
        taken = quotas.take(
            record,
            self.quota,
            me,
            [each.want for each in waiting],
            now_s,
            first_number=self._next_number,
            grant_s=GRANT_S,
            place_s=PLACE_S,
        )
        self._next_number += len(taken.grants)  # used up, whatever becomes of the write
        granted = list(zip(waiting, taken.grants, strict=False))
        return _Edit(taken.record, ends, granted, self._rest_until_s, told)

    def _with_end(self, record: QuotaRecord, number: int, end: _End, now_s: float) -> QuotaRecord:
        me = self._holder
        match end.outcome:
            case Outcome.WELL:
                record = quotas.succeeded(record, me, number)
            case Outcome.BROKEN:
                record = quotas.failed(record, me, number, now_s, BREAKER)
            case Outcome.UNKNOWN:
                record = quotas.undecided(record, me, number)
        return quotas.settled(record, self.quota, me, number, end.spent)

    def _stored(self, edit: _Edit) -> None:
        self.writes.stored += 1
        metrics.PROVIDER_WRITES.labels(self._pool, "stored").inc()
        self.writes.granted += len(edit.granted)
        self._record = edit.record
        for number in edit.ends:
            del self._ends[number]
            self._live.discard(number)
        if self._rest_until_s <= edit.rest_until_s:
            self._rest_until_s = 0.0
        for told in edit.told:
            if self._told.get(told.kind) is told:
                del self._told[told.kind]
        self._changed_s = self._clock.monotonic() if self._ends or self._rest_until_s else inf
        for waiting, grant in edit.granted:
            self._live.add(grant.number)
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                waiting.granted.set_result(grant)
            else:  # gone while this was written
                self.end(grant, Outcome.UNKNOWN, Amount())

    def _change(self) -> None:
        self._changed_s = min(self._changed_s, self._clock.monotonic())
        self._wake.set()


def _spans_s(quota: Quota, amount: Amount) -> Iterable[float]:
    """How long each window takes to give so much."""
    for window in quota.windows:
        yield from (getattr(amount, kind) / limit * window.window_s for kind, limit in window.limits())
