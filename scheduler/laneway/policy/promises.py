"""Places that refused requests were promised: a virtual queue in which a retry time is a turn.

A refusal for its ETA says when the work ahead will have gone, *if none comes meanwhile*. Under overload more comes, and
callers who kept to their times would be refused again behind others who came first. So the door remembers each retry
time as a place, with the work that comes to it:

- a newcomer of tenant t sees promised work as work ahead: what falls due while it would hold its own place decides on
  its verdict (`near`: a pool at rest must not refuse for the sake of what comes later; of prompts only those that fall
  due before its own first token), all of it on the time that it is told when refused (`later`). Of other tenants'
  places it sees at most (tenants with places) x (what t holds + its own), which is what turns by tenant would give: a
  flood of one tenant's refusals puts off another's first request by one of its jobs only;
- a request of the tenant that comes from its time on, within GRACE, redeems its oldest place, is judged without any
  promised work before it, and by expectations alone (policy.admit). Refused again, it stands first, not last;
- a place that nobody redeems within its grace is gone, and the tenant's next ones weigh less.

Limits: no place lies more than `place_s_max` ahead (policy.admit), so that places never come to more than what the pool
can do until then; PLACES_MAX places in all, of which a tenant may hold its share, PLACES_MAX / (tenants with places or
about to have one). Beyond, a refusal has a retry time and no place.

Units: Unix seconds; loads as policy.eta.Load. O(log places + NEAR_MAX) a call. Source: policy.md (a), "time until
predicted W falls to feasible", made true for those who come back.

Failure modes: each door knows its own promises, so a caller who comes back through another door is a newcomer there;
callers who come early, or never, cost a part of the capacity until their weight has fallen (some ten places); a pool
that loses workers cannot keep what it promised, and says a new time; tenants that come later take the last places of
one that had all.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from itertools import islice
from operator import attrgetter

from msgspec import Struct

from laneway.core.lanes import Lane
from laneway.policy.eta import Load

PLACES_MAX = 4096  # of a door
NEAR_MAX = 256  # places that are looked at for one verdict: far more than a target has room for
HABITS_MAX = 1024  # tenants whose habits are remembered
GRACE_S, GRACE_SHARE = 1.0, 0.2  # after the promised time: the larger of both, the latter of the time that was told
EARLY_S = 0.05  # clocks and timers differ by so much
HABIT_WEIGHT = 0.1  # of the newest place in a tenant's habit
HABIT_PRIOR = 0.8  # of a tenant that nothing is known of

_Queue = tuple[str, Lane]


class Place(Struct, eq=False):
    """One promise. `load` is what its request will bring, weighted by how likely it comes."""

    tenant: str
    pool: str
    lane: Lane
    due_s: float
    until_s: float
    load: Load
    weight: float
    open: bool = True


class Ahead(Struct, frozen=True):
    near: Load = Load()
    later: Load = Load()


NOTHING = Ahead()


class _Sum:
    __slots__ = ("device_s", "jobs", "tokens")

    def __init__(self) -> None:
        self.jobs = self.tokens = self.device_s = 0.0

    def add(self, place: Place, sign: float = 1.0, *, prompt: bool = True) -> None:
        share = sign * place.weight
        self.jobs += share * place.load.jobs
        self.tokens += share * place.load.prompt_tokens if prompt else 0.0
        self.device_s += share * place.load.device_s


class _Line:
    """The open places of one pool and lane."""

    __slots__ = ("by_due", "by_tenant", "of_tenant", "total")

    def __init__(self) -> None:
        self.by_due: list[Place] = []
        self.by_tenant: dict[str, deque[Place]] = {}  # by due time
        self.of_tenant: dict[str, _Sum] = {}
        self.total = _Sum()


class Promises:
    """One owner: the door that refuses."""

    def __init__(self) -> None:
        self._lines: dict[_Queue, _Line] = {}
        self._ends: list[tuple[float, int, Place]] = []  # heap by end of grace
        self._habits: OrderedDict[str, float] = OrderedDict()  # tenant: share of its places that it came for
        self._places_of: dict[str, int] = {}  # open places by tenant
        self._count = 0
        self._numbers = 0

    def __len__(self) -> int:
        return self._count

    def ahead(
        self, pool: str, lane: Lane, tenant: str, own: Load, near_until_s: float, first_until_s: float = math.inf
    ) -> Ahead:
        """Promised work that a newcomer sees before it. Call `expire` first. `near_until_s`: until when it would hold
        its own place; `first_until_s`: by when its prompt is to be computed, what comes later is behind it."""
        line = self._lines.get((pool, lane))
        if line is None:
            return NOTHING
        others, mine, tenants = _Sum(), _Sum(), set[str]()
        for place in islice(line.by_due, NEAR_MAX):
            if place.due_s > near_until_s:
                break
            prompt = place.due_s <= first_until_s
            if place.tenant == tenant:
                mine.add(place, prompt=prompt)
            else:
                others.add(place, prompt=prompt)
                tenants.add(place.tenant)
        near = _before(others, mine, len(tenants), own)
        every, all_mine = _Sum(), line.of_tenant.get(tenant) or _Sum()
        every.jobs = line.total.jobs - all_mine.jobs
        every.tokens = line.total.tokens - all_mine.tokens
        every.device_s = line.total.device_s - all_mine.device_s
        whole = _before(every, all_mine, len(line.of_tenant) - (tenant in line.of_tenant), own)
        later = Load(
            max(0, whole.jobs - near.jobs),
            max(0, whole.prompt_tokens - near.prompt_tokens),
            max(0.0, whole.device_s - near.device_s),
        )
        return Ahead(near, later)

    def redeem(self, pool: str, lane: Lane, tenant: str, now_s: float) -> Place | None:
        """The tenant's oldest place whose time has come; it stays open until `done`."""
        line = self._lines.get((pool, lane))
        places = line.by_tenant.get(tenant) if line is not None else None
        place = places[0] if places else None
        return place if place is not None and place.due_s - EARLY_S <= now_s <= place.until_s else None

    def done(self, place: Place) -> None:
        """A request came for it and was answered, one way or the other."""
        if place.open:
            self._close(place)
            self._learn(place.tenant, came=True)

    def promise(self, pool: str, lane: Lane, tenant: str, load: Load, now_s: float, in_s: float) -> bool:
        """Takes a place `in_s` from now; False where the tenant may hold no more."""
        others = len(self._places_of) - (tenant in self._places_of)
        share = PLACES_MAX // (others + 1)
        if self._places_of.get(tenant, 0) >= share or (self._count >= PLACES_MAX and not self._make_room(share)):
            return False
        due_s = now_s + in_s
        until_s = due_s + max(GRACE_S, GRACE_SHARE * in_s)
        place = Place(tenant, pool, lane, due_s, until_s, load, self.habit(tenant))
        line = self._lines.setdefault((pool, lane), _Line())
        insort(line.by_due, place, key=_due_s)
        own = line.by_tenant.setdefault(tenant, deque())
        own.append(place)
        if len(own) > 1 and own[-2].due_s > due_s:
            line.by_tenant[tenant] = deque(sorted(own, key=_due_s))
        line.of_tenant.setdefault(tenant, _Sum()).add(place)
        line.total.add(place)
        self._numbers += 1
        heapq.heappush(self._ends, (until_s, self._numbers, place))
        self._places_of[tenant] = self._places_of.get(tenant, 0) + 1
        self._count += 1
        return True

    def _make_room(self, share: int) -> bool:
        """Takes the last place from the tenant that has the most, where that is more than its share by now."""
        tenant = max(self._places_of, key=lambda each: (self._places_of[each], each))
        if self._places_of[tenant] <= share:
            return False
        held = [line.by_tenant[tenant][-1] for line in self._lines.values() if tenant in line.by_tenant]
        self._close(max(held, key=_due_s))
        return True

    def expire(self, now_s: float) -> list[Place]:
        """Lets go of places that nobody came for; those."""
        lapsed: list[Place] = []
        while self._ends and (self._ends[0][0] < now_s or not self._ends[0][2].open):
            place = heapq.heappop(self._ends)[2]
            if place.open:
                self._close(place)
                self._learn(place.tenant, came=False)
                lapsed.append(place)
        return lapsed

    def habit(self, tenant: str) -> float:
        """The share of a tenant's places that it comes for."""
        return self._habits.get(tenant, HABIT_PRIOR)

    def _close(self, place: Place) -> None:
        place.open = False
        tenant, key = place.tenant, (place.pool, place.lane)
        line = self._lines[key]
        line.total.add(place, -1.0)
        line.of_tenant[tenant].add(place, -1.0)
        own = line.by_tenant[tenant]
        own.remove(place)
        if not own:
            del line.by_tenant[tenant], line.of_tenant[tenant]
        at = bisect_left(line.by_due, place.due_s, key=_due_s)
        while line.by_due[at] is not place:
            at += 1
        del line.by_due[at]
        if not line.by_due:
            del self._lines[key]
        left = self._places_of[tenant] - 1
        if left:
            self._places_of[tenant] = left
        else:
            del self._places_of[tenant]
        self._count -= 1
        if len(self._ends) > 2 * PLACES_MAX:  # closed ones wait there for their time
            self._ends = [each for each in self._ends if each[2].open]
            heapq.heapify(self._ends)

    def _learn(self, tenant: str, *, came: bool) -> None:
        share = self.habit(tenant)
        self._habits[tenant] = share + HABIT_WEIGHT * (float(came) - share)
        self._habits.move_to_end(tenant)
        if len(self._habits) > HABITS_MAX:
            self._habits.popitem(last=False)


_due_s = attrgetter("due_s")


def _before(others: _Sum, mine: _Sum, turns: int, own: Load) -> Load:
    """All of one's own, and of others no more than as many turns as one takes oneself."""
    return Load(
        round(mine.jobs + min(others.jobs, turns * (mine.jobs + own.jobs))),
        round(mine.tokens + min(others.tokens, turns * (mine.tokens + own.prompt_tokens))),
        max(0.0, mine.device_s + min(others.device_s, turns * (mine.device_s + own.device_s))),
    )
