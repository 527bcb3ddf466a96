"""The scheduler's plan in KV: one writer at a time in effect, any number of readers with a local copy.

A reader keeps the highest (epoch, version) it saw, so that a deposed scheduler's late plan changes nothing. Whether a
plan is still good is for its reader to ask: a stale plan means conservative admission. Its age counts by the reader's
monotonic clock since it was heard, since wall clocks of two machines may differ by more than a plan is valid.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime

import structlog
from msgspec.structs import replace
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from laneway.core import subjects
from laneway.core.clock import Clock
from laneway.core.errors import Code, ErrorRow
from laneway.core.fleet import Plan
from laneway.runtime.bus import Bus, BusError, WrongSequence
from laneway.runtime.headers import EXPECTED_SUBJECT_SEQUENCE, TIME_STAMP
from laneway.runtime.reading import StoredMessage, last_from_leader, last_message
from laneway.runtime.wire.plans import decode_plan, encode_plan
from laneway.runtime.wire.reading import UnreadableMessage

PUBLISH_ATTEMPTS = 4

_log = structlog.get_logger(__name__)


class NewerPlan(BusError):
    """A newer plan is stored: whoever publishes this one was deposed. Nothing was stored."""

    row = ErrorRow(Code.ABORTED, 409, False, "conflict")
    default_reason = "NEWER_PLAN"


class PlanTooLarge(BusError):
    """The plan does not fit into one message, even without its details. Nothing was stored."""

    row = ErrorRow(Code.INTERNAL, 500, False, "internal")
    default_reason = "PLAN_TOO_LARGE"


class PlanPublisher:
    """Puts plans over older ones, by compare-and-set: a scheduler that was stopped in the middle of a publish must not
    put its own over that of its successor, for those who read it then."""

    def __init__(self, bus: Bus, region: str) -> None:
        self._bus = bus
        self._stream = f"KV_{subjects.plan_bucket(region)}"
        self._subject = subjects.plan_changes(region)
        self._sequence = 0  # of the plan that the next one goes over

    async def publish(self, plan: Plan) -> None:
        """Raises NewerPlan, or another BusError; the next plan is due soon anyway."""
        data = self._fitting(plan)
        for left in reversed(range(PUBLISH_ATTEMPTS)):
            headers = {EXPECTED_SUBJECT_SEQUENCE: str(self._sequence)}
            try:
                self._sequence = await self._bus.store(self._subject, data, headers)
                return
            except WrongSequence:  # the first of a term, after a publish whose outcome was unknown, or deposed
                if not left:
                    raise
                self._sequence = await self._sequence_below(plan)

    def _fitting(self, plan: Plan) -> bytes:
        """A plan that NATS would not take says less: readers then take all parked work for due."""
        data = encode_plan(plan)
        if len(data) <= self._bus.payload_bytes_max:
            return data
        less = encode_plan(without_details(plan))
        _log.error("plan_too_large", size_bytes=len(data), limit_bytes=self._bus.payload_bytes_max, left=len(less))
        if len(less) > self._bus.payload_bytes_max:
            raise PlanTooLarge(f"the plan has {len(less)} bytes, the limit is {self._bus.payload_bytes_max}")
        return less

    async def _sequence_below(self, plan: Plan) -> int:
        """Of what is stored, if it is no newer than this plan."""
        found = await last_from_leader(self._bus, self._stream, self._subject)
        if found is None:
            return 0
        try:
            stored = decode_plan(found.data)
        except UnreadableMessage as error:  # nobody here could follow it
            _log.warning("plan_unreadable", error=str(error))
            return found.sequence
        if _order(stored) > _order(plan):
            raise NewerPlan(f"a plan of epoch {stored.epoch} is stored, and this one is of epoch {plan.epoch}")
        return found.sequence


class PlanView:
    """The newest plan of a region. `on_change` is called for each plan taken and must be short."""

    def __init__(self, bus: Bus, region: str, clock: Clock, on_change: Callable[[Plan], None] | None = None) -> None:
        self.plan: Plan | None = None
        self._heard_s = float("-inf")  # monotonic
        self._bus = bus
        self._clock = clock
        self._stream = f"KV_{subjects.plan_bucket(region)}"
        self._subject = subjects.plan_changes(region)
        self._on_change = on_change
        self._subscription: Subscription | None = None
        self._unregister: Callable[[], None] = lambda: None
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._subscription = await self._bus.listen(self._subject, self._received)
        self._unregister = self._bus.on_reconnect(self._read_again)
        await self._read()

    def _read_again(self) -> None:
        """After a reconnect: the plan of the time between was published to nobody here."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._try_to_read(), name="plan-read")

    async def _try_to_read(self) -> None:
        try:
            await self._read()
        except BusError as error:  # the next plan comes by itself, and until then the old one runs out
            _log.warning("plan_not_read", error=error.message)

    async def _read(self) -> None:
        found = await last_message(self._bus, self._stream, self._subject)
        if found is not None:
            self._take(found.data, self._clock.monotonic() - await self._age_s(found))

    async def _age_s(self, found: StoredMessage) -> float:
        """How long ago a message was stored, by the clock of NATS at both ends: it is asked, since ours may not be
        measured yet."""
        stored_s = datetime.fromisoformat(found.headers[TIME_STAMP]).timestamp()
        return max(0.0, await self._bus.server_time_s() - stored_s)

    def _received(self, msg: Msg) -> None:
        self._take(msg.data, self._clock.monotonic())

    def _take(self, data: bytes, heard_s: float) -> None:
        if not data:
            return  # the key was deleted; the plan we have runs out by itself
        try:
            plan = decode_plan(data)
        except UnreadableMessage as error:
            _log.warning("plan_unreadable", error=str(error))
            return
        known = _order(self.plan) if self.plan is not None else (-1, -1)
        if _order(plan) == known:  # heard as well as read
            self._heard_s = max(self._heard_s, heard_s)
        if _order(plan) <= known:
            return
        self.plan, self._heard_s = plan, heard_s
        if self._on_change is not None:
            self._on_change(plan)

    def fresh(self) -> bool:
        """Whether the newest plan was published no longer ago than it is valid."""
        if self.plan is None:
            return False
        valid_s = self.plan.valid_until_s - self.plan.made_s  # both by its scheduler's clock
        return self._clock.monotonic() - self._heard_s < valid_s

    async def close(self) -> None:
        self._unregister()
        await self._bus.unsubscribe(self._subscription)
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})


def without_details(plan: Plan) -> Plan:
    """Without what readers can do without."""
    pools = tuple(
        replace(pool, lanes=tuple(replace(lane, demand=()) for lane in pool.lanes), hot_prefixes=())
        for pool in plan.pools
    )
    return replace(plan, pools=pools)


def _order(plan: Plan) -> tuple[int, int]:
    return plan.epoch, plan.version
