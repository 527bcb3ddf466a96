"""Keeps the times that this door told refused callers (policy.promises), and counts whether they were kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from laneway.core.clock import Clock
from laneway.core.job import Contract
from laneway.core.lanes import Lane
from laneway.policy import eta as etas
from laneway.policy.admit import Candidate, Decision
from laneway.policy.eta import Load, PoolView
from laneway.policy.promises import NOTHING, Ahead, Place, Promises
from laneway.runtime import metrics

_places = metrics.counter(
    "laneway_admission_places_total",
    "Places of refused requests: promised, denied, lapsed, and of those that were come for, accepted or refused.",
    ("lane", "outcome"),
)


class Looked(Struct, frozen=True):
    """What was promised at a request's pools, and its own place where its time has come."""

    ahead: Mapping[str, Ahead] = {}
    places: Mapping[str, Place] = {}

    def near(self, pool: str) -> Load:
        return self.ahead.get(pool, NOTHING).near


class Places:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._promises = Promises()

    def __len__(self) -> int:
        return len(self._promises)

    def look(
        self, tenant: str, contract: Contract, now_s: float, pools: Sequence[tuple[Candidate, PoolView]]
    ) -> Looked:
        """`now_s` on the wall; places are kept on the monotonic clock."""
        promises, at_s, lane = self._promises, self._clock.monotonic(), contract.lane
        if not len(promises):
            return Looked()
        for gone in promises.expire(at_s):
            _places.labels(lane=gone.lane.value, outcome="lapsed").inc()
        ahead: dict[str, Ahead] = {}
        places: dict[str, Place] = {}
        for candidate, view in pools:
            pool = candidate.pool.name
            place = promises.redeem(pool, lane, tenant, at_s)
            if place is not None:
                places[pool] = place
                continue
            service_s = etas.rates(candidate.pool, view.plan).service_s(
                candidate.prompt_tokens, candidate.expected_tokens
            )
            held_s = service_s + contract.ttft_target_s if lane is Lane.PRIORITY else contract.deadline_s - now_s
            load, first_s = _load(candidate, lane, service_s), at_s + contract.ttft_target_s
            ahead[pool] = promises.ahead(pool, lane, tenant, load, at_s + held_s, first_s)
        return Looked(ahead, places)

    def settle(self, decision: Decision, looked: Looked, tenant: str) -> Decision:
        """After the verdict on a request that is to run: its place is used up, or it gets one."""
        lane = decision.contract.lane
        for place in looked.places.values():
            self._promises.done(place)
            outcome = "accepted" if decision.refusal is None else "refused"
            _places.labels(lane=lane.value, outcome=outcome).inc()
        if decision.place_s is None:
            return decision
        candidate, at_s = decision.candidate, self._clock.monotonic()
        load = _load(candidate, lane, decision.service_s)
        promised = self._promises.promise(candidate.pool.name, lane, tenant, load, at_s, decision.place_s)
        _places.labels(lane=lane.value, outcome="promised" if promised else "denied").inc()
        if not promised:
            return decision
        verdict = decision.verdict
        facts = (*verdict.facts, ("place_s", f"{decision.place_s:.4g}"))
        return replace(decision, verdict=replace(verdict, retry_after_s=decision.place_s, facts=facts))


def _load(candidate: Candidate, lane: Lane, service_s: float) -> Load:
    """What a request brings to its pool once it is accepted."""
    device_s = etas.device_s(candidate.pool, service_s) if lane.may_park else 0.0
    return Load(1, candidate.prompt_tokens, device_s)
