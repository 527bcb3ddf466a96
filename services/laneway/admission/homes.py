"""Where this door sends jobs: the home slot of each, and what it sent that the newest plan does not show yet.

The choice is policy.affinity's. A job that is to run now is weighed against what the plan shows at each home and what
this door sent and saw end since. What will be at a home when a parked job is released nobody knows: those are shared
out evenly, by what this door parked before.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping

from laneway.core.catalogue import Pool
from laneway.core.clock import Clock
from laneway.core.job import GenerateTask
from laneway.policy.affinity import affinity_key, choose_home, served_loads
from laneway.runtime.plans import PlanView

# A plan says when it was made, by a clock that agrees with ours to some milliseconds, from numbers a moment older. What
# was sent in between counts twice if that is taken for too long, which moves warm sessions where there are few jobs.
READ_S = 0.05
LONGEST_LAG_S = 1.0  # whatever the clocks say
LAST_HOMES_MAX = 16_384  # keys whose last home is remembered; those not used for longest begin anew
LIVE_JOBS_MAX = 100_000  # jobs whose end is awaited; a forgotten one counts at its home until the next plan
PARKED_MEMORY = 512  # parked jobs of a pool that count in sharing out the next; older ones count half, and so on


class HomeLedger:
    """Sent to homes and ended since the newest plan was made; times are monotonic."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._live: OrderedDict[str, tuple[str, str]] = OrderedDict()  # job -> pool, home
        self._entries: deque[tuple[float, str, str, int]] = deque()  # when, pool, home, change
        self._since: dict[str, dict[str, int]] = {}  # pool: home: sum of its entries

    def plan_arrived(self, made_s: float) -> None:
        """`made_s`: when the plan was made, Unix seconds."""
        lag_s = min(LONGEST_LAG_S, max(0.0, self._clock.now() - made_s) + READ_S)
        self._drop_before(self._clock.monotonic() - lag_s)

    def sent(self, job_id: str, pool: str, home: str) -> None:
        self._live[job_id] = pool, home
        if len(self._live) > LIVE_JOBS_MAX:
            self._live.popitem(last=False)
        self._enter(pool, home, 1)

    def ended(self, job_id: str) -> None:
        live = self._live.pop(job_id, None)
        if live is not None:
            self._enter(*live, -1)

    def since(self, pool: str) -> Mapping[str, int]:
        """The change at each home of a pool."""
        return self._since.get(pool, {})

    def _enter(self, pool: str, home: str, change: int) -> None:
        self._entries.append((self._clock.monotonic(), pool, home, change))
        at_homes = self._since.setdefault(pool, {})
        at_homes[home] = at_homes.get(home, 0) + change

    def _drop_before(self, then_s: float) -> None:
        while self._entries and self._entries[0][0] < then_s:
            _, pool, home, change = self._entries.popleft()
            self._since[pool][home] -= change


class Homes:
    """Gives each accepted job its affinity key and home."""

    def __init__(self, plans: PlanView, ledger: HomeLedger) -> None:
        self._plans = plans
        self._ledger = ledger
        self._last: OrderedDict[str, str] = OrderedDict()  # key -> home
        self._parked: dict[str, dict[str, float]] = {}  # pool: home: jobs parked, old ones counting less

    def choose(self, job_id: str, pool: Pool, tenant: str, task: GenerateTask, *, parked: bool) -> tuple[str, str]:
        """Key and home, either may be empty; the job counts from now on."""
        if not pool.capabilities.prefix_cache:
            return "", ""  # there is nothing to meet again
        key = affinity_key(pool.name, tenant, task)
        if not (key and pool.homes) or self._plans.plan is None or not self._plans.fresh():
            return key, ""
        homes = self._plans.plan.pool(pool.name).homes
        if parked:
            loads = self._parked_loads(pool.name, [each.home for each in homes])
        else:
            loads = served_loads(homes, self._ledger.since(pool.name))
        home = choose_home(key, loads, self._last.get(key, ""))
        if home:
            self._remember(key, home)
            if parked:
                self._parked[pool.name][home] = loads[home] + 1.0
            else:
                self._ledger.sent(job_id, pool.name, home)
        return key, home

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
