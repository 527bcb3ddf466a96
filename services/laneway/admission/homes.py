"""Where this door sends jobs: the home slot of each, and what is at the homes already.

The choice is policy.affinity's. A job that is to run now is weighed against what is at each home now. What will be at a
home when a parked job is released nobody knows: those are shared out evenly, by what this door parked before.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque

from laneway.core.catalogue import Pool
from laneway.core.clock import Clock
from laneway.core.fleet import HomePlan, Plan
from laneway.core.job import GenerateTask
from laneway.policy.affinity import affinity_key, choose_home, others_at, served_loads
from laneway.runtime.plans import PlanView

COUNTED_WITHIN_S = 0.3  # before a plan was made: it may have counted then, and news of ends may have been under way
LONGEST_LAG_S = 1.0  # from then until it came, whatever the clocks say
LAST_HOMES_MAX = 16_384  # keys whose last home is remembered; those not used for longest begin anew
LIVE_JOBS_MAX = 100_000  # jobs whose end is awaited; of those forgotten the plan tells
PARKED_MEMORY = 512  # parked jobs of a pool that count in sharing out the next; older ones count half, and so on

_Home = tuple[str, str]  # pool, home


class HomeLedger:
    """What is at each home: exactly what this door has there, and by the newest plan what others have. Times are
    monotonic."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._jobs: OrderedDict[str, _Home] = OrderedDict()  # sent and not heard to have ended
        self._own: Counter[_Home] = Counter()  # how many, by home
        self._changes: deque[tuple[float, _Home, int]] = deque()  # of late
        self._others: dict[_Home, int] = {}

    def plan_arrived(self, plan: Plan) -> None:
        lag_s = min(LONGEST_LAG_S, max(0.0, self._clock.now() - plan.made_s))
        self._drop_before(self._clock.monotonic() - lag_s - COUNTED_WITHIN_S)
        own, least, most = dict(self._own), dict(self._own), dict(self._own)
        for _, at, change in reversed(self._changes):  # thousands, where jobs are short
            before = own[at] = own[at] - change
            if before < least[at]:
                least[at] = before
            elif before > most[at]:
                most[at] = before
        self._others = {
            (pool.pool, home.home): others_at(
                home, least.get((pool.pool, home.home), 0), most.get((pool.pool, home.home), 0)
            )
            for pool in plan.pools
            for home in pool.homes
        }

    def sent(self, job_id: str, pool: str, home: str) -> None:
        self.ended(job_id)  # the same key again counts once
        self._jobs[job_id] = pool, home
        if len(self._jobs) > LIVE_JOBS_MAX:
            self._change(self._jobs.popitem(last=False)[1], -1)
        self._change((pool, home), 1)

    def ended(self, job_id: str) -> None:
        at = self._jobs.pop(job_id, None)
        if at is not None:
            self._change(at, -1)

    def load(self, pool: str, home: str) -> int:
        return max(0, self._own[pool, home] + self._others.get((pool, home), 0))

    def _change(self, at: _Home, change: int) -> None:
        now_s = self._clock.monotonic()
        self._own[at] += change
        self._changes.append((now_s, at, change))
        self._drop_before(now_s - LONGEST_LAG_S - COUNTED_WITHIN_S)

    def _drop_before(self, then_s: float) -> None:
        while self._changes and self._changes[0][0] < then_s:
            self._changes.popleft()


class Homes:
    """Gives each accepted job its affinity key and home."""

    def __init__(self, plans: PlanView, ledger: HomeLedger) -> None:
        self._plans = plans
        self._ledger = ledger
        self._last: OrderedDict[str, str] = OrderedDict()  # key -> home
        self._plan: Plan | None = None  # of which are
        self._known: dict[str, tuple[HomePlan, ...]] = {}  # by pool: the homes of the settings
        self._parked: dict[str, dict[str, float]] = {}  # pool: home: jobs parked, old ones counting less

    def choose(self, job_id: str, pool: Pool, tenant: str, task: GenerateTask, *, parked: bool) -> tuple[str, str]:
        """Key and home, either may be empty; the job counts from now on."""
        if not pool.capabilities.prefix_cache:
            return "", ""  # there is nothing to meet again
        key = affinity_key(pool.name, tenant, task)
        if not key or pool.home_slots < 2 or self._plans.plan is None or not self._plans.fresh():
            return key, ""
        homes = self._homes_of(self._plans.plan, pool)
        if parked:
            loads = self._parked_loads(pool.name, [each.home for each in homes])
        else:
            loads = served_loads(homes, lambda home: self._ledger.load(pool.name, home))
        home = choose_home(key, loads, self._last.get(key, ""))
        if home:
            self._remember(key, home)
            if parked:
                self._parked[pool.name][home] = loads[home] + 1.0
            else:
                self._ledger.sent(job_id, pool.name, home)
        return key, home

    def _homes_of(self, plan: Plan, pool: Pool) -> tuple[HomePlan, ...]:
        """Those that jobs may be sent to: a home that was taken away is in the plan until it is empty, and would never
        be if it got what is parked meanwhile."""
        if plan is not self._plan:
            self._plan, self._known = plan, {}
        homes = self._known.get(pool.name)
        if homes is None:
            names = frozenset(pool.homes)
            shown = plan.pool(pool.name)
            homes = tuple(each for each in shown.homes if each.home in names)
            if shown.workers and not any(each.worker_id for each in homes):
                homes = ()  # workers of a release that takes jobs of no home
            self._known[pool.name] = homes
        return homes

    def _parked_loads(self, pool: str, homes: list[str]) -> dict[str, float]:
        """What this door parked for each home, faded so that new homes and new keys count soon."""
        if len(homes) < 2:
            return {}
        before = self._parked.get(pool, {})
        fade = 0.5 if sum(before.values()) >= PARKED_MEMORY else 1.0
        loads = self._parked[pool] = {home: before.get(home, 0.0) * fade for home in homes}
        return dict(loads)

    def _remember(self, key: str, home: str) -> None:
        self._last[key] = home
        self._last.move_to_end(key)
        if len(self._last) > LAST_HOMES_MAX:
            self._last.popitem(last=False)
