"""What each tenant has open at this moment, as far as one door knows: jobs by lane, and live streams.

Open jobs are those that the newest plan counted, and of this door's own: what it accepted since and what ended since.
A plan says up to which write of a record it counts, so a job is counted by the plan or here, not by both. Records that
are stored late have no such number; of them the live ones of this door are a lower bound. Doors do not know of each
other: several together may go beyond a limit by what the others accept until the next plan.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from types import TracebackType

from msgspec import Struct

from laneway.core.clock import Clock
from laneway.core.errors import TenantLimit
from laneway.core.fleet import Plan
from laneway.core.lanes import Lane

FRESH_MAX = 100_000  # jobs accepted since the last plan; beyond this the oldest are forgotten
STORED_WITHIN_S = 0.5  # a record that is left to its first claim is stored and counted within this
STREAMS_RETRY_S = 1.0  # an answer may end at any moment

_Key = tuple[str, Lane]


class _Fresh(Struct, frozen=True):
    key: _Key
    sequence: int = 0  # of the record's first write; 0: not known yet


class _Live(Struct, frozen=True):
    key: _Key
    accepted_s: float  # monotonic
    stored: bool = True  # False: its record is left to its first claim


class TenantLedger:
    """Of jobs. Times are monotonic."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._counted: dict[_Key, int] = {}  # by the plan
        self._counted_before = 0  # writes of a lower sequence are in the plan
        self._heard_s = 0.0  # when it came
        self._fresh: OrderedDict[str, _Fresh] = OrderedDict()
        self._fresh_of: Counter[_Key] = Counter()
        self._live: dict[str, _Live] = {}  # jobs whose callers wait here
        self._live_of: dict[_Key, set[str]] = {}
        self._ended_of: Counter[_Key] = Counter()  # jobs that the plan counts, and that ended since it came

    def plan_arrived(self, plan: Plan) -> None:
        self._counted = {(each.tenant, each.lane): each.open for each in plan.tenants}
        self._counted_before, self._heard_s = plan.counted_before, self._clock.monotonic()
        self._ended_of.clear()
        if not plan.counted_before:  # an older scheduler, whose plan says nothing of tenants
            self._fresh.clear()
            self._fresh_of.clear()
            return
        for job_id in [job for job, fresh in self._fresh.items() if 0 < fresh.sequence < self._counted_before]:
            self._forget_fresh(job_id)

    def accepted(self, job_id: str, tenant: str, lane: Lane, *, attached: bool) -> None:
        """A job is about to be stored; perhaps again, by another request with the same key."""
        key = (tenant, lane)
        if job_id in self._fresh:
            self._forget_fresh(job_id)
        self._fresh[job_id] = _Fresh(key)
        self._fresh_of[key] += 1
        if len(self._fresh) > FRESH_MAX:
            self._forget_fresh(next(iter(self._fresh)))
        if attached:
            self._live[job_id] = _Live(key, self._clock.monotonic())
            self._live_of.setdefault(key, set()).add(job_id)

    def stored(self, job_id: str, sequence: int) -> None:
        """`sequence` of its record's first write; 0: it is left to the first claim."""
        fresh, live = self._fresh.get(job_id), self._live.get(job_id)
        if fresh is None:
            return
        if sequence and sequence >= self._counted_before:
            self._fresh[job_id] = _Fresh(fresh.key, sequence)
            return
        self._forget_fresh(job_id)
        if live is not None and not sequence:
            self._live[job_id] = _Live(live.key, live.accepted_s, stored=False)

    def ended(self, job_id: str) -> None:
        """A job ended, or was not accepted after all. Those of other doors are ignored."""
        fresh = self._fresh.get(job_id)
        live = self.left(job_id)
        if fresh is not None:
            self._forget_fresh(job_id)
        elif live is not None and (live.stored or self._heard_s - live.accepted_s > STORED_WITHIN_S):
            self._ended_of[live.key] += 1

    def left(self, job_id: str) -> _Live | None:
        """Its caller is gone, and the job may go on."""
        live = self._live.pop(job_id, None)
        if live is not None:
            jobs = self._live_of[live.key]
            jobs.discard(job_id)
            if not jobs:
                del self._live_of[live.key]
        return live

    def open(self, tenant: str, lane: Lane) -> int:
        """Jobs that were accepted and have not ended."""
        key = (tenant, lane)
        counted = self._counted.get(key, 0) + self._fresh_of[key] - self._ended_of[key]
        return max(counted, len(self._live_of.get(key, ())))

    def recount(self, tenant: str, lane: Lane) -> int:
        """As `open`, from the jobs themselves: for those who check it."""
        key = (tenant, lane)
        fresh = sum(each.key == key for each in self._fresh.values())
        live = sum(each.key == key for each in self._live.values())
        return max(self._counted.get(key, 0) + fresh - self._ended_of[key], live)

    def _forget_fresh(self, job_id: str) -> None:
        key = self._fresh.pop(job_id).key
        self._fresh_of[key] -= 1
        if not self._fresh_of[key]:
            del self._fresh_of[key]


class TenantStreams:
    """Of the live streams. Whoever holds one does so by `with`, so that no end of any kind leaves it counted."""

    def __init__(self, streams_max: int) -> None:
        """`streams_max`: of one tenant; 0 for no limit."""
        self._max = streams_max
        self._held: dict[str, set[_Seat]] = {}

    def take(self, tenant: str) -> _Seat:
        """To be entered; raises TenantLimit there."""
        return _Seat(self, tenant)

    def live(self, tenant: str) -> int:
        return len(self._held.get(tenant, ()))

    def add(self, seat: _Seat) -> None:
        if self._max and self.live(seat.tenant) >= self._max:
            raise TenantLimit(
                f"the tenant has {self._max} live streams here, and may have no more",
                retry_after_s=STREAMS_RETRY_S,
                facts={"quota": "tenant_streams_max", "limit": str(self._max)},
            )
        self._held.setdefault(seat.tenant, set()).add(seat)

    def remove(self, seat: _Seat) -> None:
        seats = self._held[seat.tenant]
        seats.remove(seat)
        if not seats:
            del self._held[seat.tenant]


class _Seat:
    """One stream's place. A class, since a generator would take three times as long."""

    __slots__ = ("_streams", "tenant")

    def __init__(self, streams: TenantStreams, tenant: str) -> None:
        self._streams = streams
        self.tenant = tenant

    def __enter__(self) -> None:
        self._streams.add(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._streams.remove(self)
