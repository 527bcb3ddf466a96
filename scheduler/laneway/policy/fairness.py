"""Whose turn it is: virtual token counters of the lanes of a pool and of the tenants of a lane.

    counter += (1 x uncached prompt + 0.1 x cached prompt + 2 x output tokens) / weight

The lowest counter goes next (VTC, OSDI'24; policy.md (i)). A park subject knows device time, not tokens, so a release
is charged what its predicted device time usually means in tokens in this pool (learned from what ended), and corrected
by
what the record says at the end. A job is charged once however often it runs: what a yielding or a dying worker makes
others compute again is the system's. Urgent jobs are charged double.

Who comes back after having had nothing to do is lifted to the lowest counter of those that had: no one owns a past.
Locality may cost `locality_tokens` (Q) of fairness twice: a turn goes on with jobs of one group while the tenant is
less than Q ahead, and a tenant whose next job belongs to a busy home counts as Q ahead (DLPM-like).

Bound: two tenants that both have work differ by at most 2 Q + U, where U is the largest single charge over its weight,
plus what predictions were wrong by for jobs that have not ended. (Served is who has the least key; a key is the counter
or the counter + Q, and a turn ends Q beyond the next key: so before its last charge a served counter is at most 2 Q
above any other.) With Q = 0 and every prediction right this is VTC's bound: U <= w_p x prompt + w_q x output.

Cost: O(T) a look to meet the tenants that have work (set operations), O(log T) a turn.
Known failure modes: counters are the leader's alone and begin at zero with a new one; a tenant with many names pays as
many; the first jobs of a pool are charged by its nominal rates, and put right as they end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from laneway.core.fleet import PoolPlan
from laneway.core.job import Usage
from laneway.core.lanes import Lane
from laneway.core.subjects import ParkSubject

OPEN_JOBS_MAX = 100_000  # released and not ended; the oldest beyond keep what was predicted of them
FORGET_AT = 10_000  # charges between two looks for counters that say nothing any more
LEARN_RATE = 0.02  # of the means over ended jobs: they follow some fifty jobs


@dataclass(frozen=True, slots=True)
class FairParams:
    lane_weights: Mapping[Lane, float] = field(default_factory=lambda: {Lane.DEFERRABLE: 4.0, Lane.BATCH: 1.0})
    tenant_weights: Mapping[str, float] = field(default_factory=dict)  # 1 where none is given
    prompt_weight: float = 1.0  # of a prompt token that must be computed
    cached_weight: float = 0.1  # of one that a prefix cache holds
    output_weight: float = 2.0
    locality_tokens: float = 4096.0  # Q: weighted tokens that keeping a group together may cost the others
    turn_jobs_max: int = 16  # of one group in one turn

    def tenant_weight(self, tenant: str) -> float:
        return self.tenant_weights.get(tenant, 1.0)

    def tokens(self, usage: Usage) -> float:
        """Weighted tokens of a job that ended."""
        cached = min(usage.cached_tokens, usage.prompt_tokens)
        uncached = usage.prompt_tokens - cached
        return (
            self.prompt_weight * uncached
            + self.cached_weight * cached
            + self.output_weight * usage.completion_tokens
        )  # fmt: skip


def nominal_tokens_per_ms(pool: PoolPlan, params: FairParams) -> float:
    """Weighted tokens that a device-millisecond is taken for until jobs ended: a worker that decodes in all places."""
    each = pool.slots / pool.workers if pool.workers else 0.0
    return params.output_weight * each * pool.decode_tokens_per_s / 1000.0


class Counters:
    """What each key was given, in weighted tokens over its weight; the lowest is next."""

    def __init__(self, base: Counters | None = None) -> None:
        self._base = base
        self._counters: dict[str, float] = {}
        self._level: float = base._level if base else 0.0  # where a newcomer begins
        self._active: frozenset[str] = frozenset()

    def of(self, key: str) -> float:
        known = self._counters.get(key)
        if known is None:
            known = self._base._counters.get(key) if self._base is not None else None
        return self._level if known is None else known

    def meet(self, active: Collection[str]) -> None:
        """These have work now. Who had none at the last meeting is lifted to the lowest of those that had and have, or
        where all of these have gone, of those that had."""
        present = frozenset(active)
        if present == self._active:
            return
        stayed = self._active & present or self._active
        if stayed:
            self._level = max(self._level, min(self._counters.get(key, self._level) for key in stayed))
        for key in present - self._active:
            if self._counters.get(key, self._level) < self._level:
                self._counters[key] = self._level
        self._active = present

    def charge(self, key: str, cost: float) -> None:
        self._counters[key] = self.of(key) + cost

    def draft(self) -> Counters:
        """A copy to try on, that costs nothing to make."""
        return Counters(self)

    def forget(self) -> None:
        """Drops who would not be told from a newcomer."""
        self._counters = {
            key: counter
            for key, counter in self._counters.items()
            if key in self._active or counter > self._level
        }  # fmt: skip

    @property
    def known(self) -> int:
        """Keys that have a counter of their own."""
        return len(self._counters)


class Means(Struct):
    """Of the jobs of a pool that ended: what predicted device time means in tokens, and how large jobs are."""

    tokens_per_ms: float = 0.0  # weighted tokens for each predicted device-millisecond; 0: nothing ended yet
    computed_tokens: float = 0.0  # of a prompt, without what caches held
    kv_tokens: float = 0.0  # prompt and output

    def learn(self, cost_ms: int, tokens: float, usage: Usage) -> None:
        self.tokens_per_ms = _mean(self.tokens_per_ms, tokens / max(1, cost_ms))
        computed = max(0, usage.prompt_tokens - usage.cached_tokens)
        self.computed_tokens = _mean(self.computed_tokens, float(computed))
        self.kv_tokens = _mean(self.kv_tokens, float(usage.prompt_tokens + usage.completion_tokens))


def _mean(mean: float, value: float) -> float:
    return value if mean == 0.0 else mean + LEARN_RATE * (value - mean)


class _Charged(Struct, frozen=True):
    park: ParkSubject
    factor: float
    tokens: float


class Ledger:
    """The counters of each pool's lanes and tenants; kept by the caller between decisions."""

    def __init__(self, params: FairParams = FairParams()) -> None:
        self.params = params
        self._lanes: dict[str, Counters] = {}
        self._tenants: dict[tuple[str, Lane], Counters] = {}
        self._means: dict[str, Means] = {}
        self._nominal: dict[str, float] = {}
        self._open: OrderedDict[str, _Charged] = OrderedDict()
        self._charges = 0

    def lanes(self, pool: str) -> Counters:
        return self._lanes.setdefault(pool, Counters())

    def tenants(self, pool: str, lane: Lane) -> Counters:
        return self._tenants.setdefault((pool, lane), Counters())

    def means(self, pool: str) -> Means:
        return self._means.setdefault(pool, Means())

    def nominal(self, pool: str, tokens_per_ms: float) -> None:
        """Weighted tokens for each device-millisecond by the pool's rates: what is charged until jobs ended."""
        if tokens_per_ms > 0.0:
            self._nominal[pool] = tokens_per_ms

    def predicted(self, park: ParkSubject, factor: float) -> float:
        """Weighted tokens that a release is charged. A job that was charged already costs nothing more."""
        if park.job in self._open:
            return 0.0
        per_ms = self.means(park.pool).tokens_per_ms or self._nominal.get(park.pool, 1.0)
        return max(1, park.cost_ms) * per_ms * factor

    def charge(self, park: ParkSubject, factor: float) -> None:
        tokens = self.predicted(park, factor)
        if not tokens:
            return
        self._spend(park, tokens)
        self._open[park.job] = _Charged(park, factor, tokens)
        if len(self._open) > OPEN_JOBS_MAX:
            self._open.popitem(last=False)
        self._charges += 1
        if self._charges % FORGET_AT == 0:
            for counters in (*self._lanes.values(), *self._tenants.values()):
                counters.forget()

    def ended(self, job: str, usage: Usage | None) -> None:
        """Puts right what was charged. `usage`: None where the record does not say; then what was predicted stands."""
        charged = self._open.pop(job, None)
        if charged is None or usage is None:
            return
        tokens = self.params.tokens(usage)
        self._spend(charged.park, tokens * charged.factor - charged.tokens)
        self.means(charged.park.pool).learn(charged.park.cost_ms, tokens, usage)

    def _spend(self, park: ParkSubject, tokens: float) -> None:
        self.lanes(park.pool).charge(park.lane.value, tokens / self.params.lane_weights[park.lane])
        self.tenants(park.pool, park.lane).charge(park.tenant, tokens / self.params.tenant_weight(park.tenant))

    @property
    def awaited(self) -> int:
        """Jobs that were charged and have not ended."""
        return len(self._open)
