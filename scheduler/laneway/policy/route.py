"""Which region a request should run in, and what each region tells the others about itself.

Filters first (allowed, serves the model, not draining, heard of and healthy), then a score in seconds, lower is better:
round trip, wait for a place, time to load a model that is not resident, price by what the lane may pay for a second,
and a small pull towards home. Knows nothing of how digests travel.

Source: policy.md (e). O(R log R) for R regions. Known failure mode: several callers choose the same region between two
digests; waits of old digests are stretched, and a region that is not heard of is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from laneway.core.catalogue import Catalogue
from laneway.core.fleet import HOT_PREFIXES_MAX, Plan, PoolPlan
from laneway.core.lanes import LANES, PARKING_LANES, Lane


class ModelDigest(Struct, frozen=True):
    model: str
    tier: str
    workers: int = 0
    free_slots: int = 0
    ttft_eta_s: float = 0.0  # of a short priority request
    batch_eta_s: float = 0.0  # until parked work is worked off
    hot_prefixes: tuple[int, ...] = ()  # hashes of prompt beginnings that its workers' caches hold, hottest first


class RegionDigest(Struct, frozen=True):
    """What a region tells the others, each second."""

    region: str
    made_s: float = 0.0  # Unix seconds
    draining: bool = False
    healthy: bool = True
    zones: tuple[str, ...] = ()
    models: tuple[ModelDigest, ...] = ()
    price_factor: float = 1.0
    round_trip_s: float = 0.0  # from the region that answers

    def serving(self, model: str) -> tuple[ModelDigest, ...]:
        """Tiers of `model`, or the one tier of `model/tier`."""
        name, _, tier = model.partition("/")
        return tuple(each for each in self.models if each.model == name and tier in ("", each.tier))


@dataclass(frozen=True, slots=True)
class RouteParams:
    load_s: float = 10.0  # to bring up a worker where there is none
    home_s: float = 0.05  # what leaving home must save at least
    # Seconds that saving a tenth of the price is worth.
    price_s: Mapping[Lane, float] = field(
        default_factory=lambda: {Lane.PRIORITY: 1.0, Lane.DEFERRABLE: 30.0, Lane.BATCH: 300.0}
    )
    age_s_max: float = 1.0  # older digests make waits look longer, by half for each second


class Ask(Struct, frozen=True):
    model: str
    lane: Lane = Lane.PRIORITY
    regions: tuple[str, ...] = ()  # allowed; empty: all
    prompt_tokens: int = 0
    max_tokens: int = 0


class Score(Struct, frozen=True):
    region: str
    score_s: float
    excluded: str = ""  # why it may not be chosen


class Route(Struct, frozen=True):
    """The choice; `region` is empty where no region may be chosen, and `reason` says why."""

    region: str
    reason: str
    scores: tuple[Score, ...]  # best first, excluded ones last


class Sighting(Struct, frozen=True):
    """A digest as this region has it."""

    digest: RegionDigest
    age_s: float = 0.0  # since it came, monotonic
    lost: bool = False  # too old to be believed


def route(ask: Ask, sightings: Sequence[Sighting], *, home: str, params: RouteParams = RouteParams()) -> Route:
    prices = [s.digest.price_factor for s in sightings if not _excluded(ask, s)]
    cheapest = min(prices, default=1.0)
    scores = [
        Score(s.digest.region, float("inf"), why)
        if (why := _excluded(ask, s))
        else Score(s.digest.region, _score_s(ask, s, home, cheapest, params))
        for s in sightings
    ]
    scores.sort(key=lambda score: (bool(score.excluded), score.score_s, score.region != home, score.region))
    if scores and not scores[0].excluded:
        best = scores[0].region
        open_count = sum(not score.excluded for score in scores)
        reason = "ONLY_REGION" if open_count == 1 else "HOME_IS_BEST" if best == home else "LOWER_SCORE"
        return Route(best, reason, tuple(scores))
    return Route("", _nowhere(ask, sightings), tuple(scores))


def digest_of(
    plan: Plan | None,
    catalogue: Catalogue,
    *,
    fresh: bool,
    region: str,
    zones: Sequence[str] = (),
    draining: bool,
    now_s: float,
    price_factor: float = 1.0,
) -> RegionDigest:
    """What a region says of itself; without a fresh plan it is not healthy."""
    healthy = plan is not None and fresh
    models = []
    for pool in catalogue.pools:
        seen = plan.pool(pool.name) if plan is not None else PoolPlan(pool.name)
        service_s = seen.service_s or (pool.max_tokens_default / pool.decode_tokens_per_s)
        parked_s = sum(seen.lane(lane).parked_device_s for lane in PARKING_LANES)
        ready_s = sum(seen.lane(lane).ready for lane in PARKING_LANES) * service_s / max(1, pool.slots)
        workers = seen.workers or max(1, pool.workers)
        load_s = 0.0 if seen.workers else pool.load_s
        models.append(
            ModelDigest(
                model=pool.model,
                tier=pool.tier,
                workers=seen.workers,
                free_slots=max(0, seen.free_slots - sum(seen.lane(lane).ready for lane in LANES)),
                ttft_eta_s=load_s + _slot_wait_s(seen, service_s) + 1.0 / pool.decode_tokens_per_s,
                batch_eta_s=load_s + (parked_s + ready_s) / workers,
                hot_prefixes=seen.hot_prefixes[:HOT_PREFIXES_MAX],
            )
        )
    return RegionDigest(region, now_s, draining, healthy, tuple(zones), tuple(models), price_factor)


def _slot_wait_s(pool: PoolPlan, service_s: float) -> float:
    """Expected wait of one more priority job for a place."""
    ahead = pool.lane(Lane.PRIORITY).ready - pool.free_slots
    return 0.0 if ahead < 0 else (ahead + 1) * service_s / max(1, pool.slots)


def _excluded(ask: Ask, sighting: Sighting) -> str:
    digest = sighting.digest
    if ask.regions and digest.region not in ask.regions:
        return "REGION_NOT_ALLOWED"
    if not digest.serving(ask.model):
        return "MODEL_NOT_FOUND"
    if digest.draining:
        return "DRAINING"
    if sighting.lost:
        return "NOT_HEARD_OF"
    if not digest.healthy:
        return "UNHEALTHY"
    return ""


def _score_s(ask: Ask, sighting: Sighting, home: str, cheapest: float, params: RouteParams) -> float:
    digest = sighting.digest
    tiers = digest.serving(ask.model)
    resident = [tier for tier in tiers if tier.workers]
    waits = [tier.batch_eta_s if ask.lane.may_park else tier.ttft_eta_s for tier in resident or tiers]
    aged = 1.0 + (sighting.age_s / 2.0 if sighting.age_s > params.age_s_max else 0.0)
    load_s = 0.0 if resident else params.load_s
    dearer = (digest.price_factor / cheapest - 1.0) * 10.0 if cheapest > 0.0 else 0.0
    away_s = 0.0 if digest.region == home else params.home_s
    return digest.round_trip_s + min(waits) * aged + load_s + dearer * params.price_s[ask.lane] + away_s


def _nowhere(ask: Ask, sightings: Sequence[Sighting]) -> str:
    """The nearest thing to a way out decides: REGION_NOT_ALLOWED and MODEL_NOT_FOUND are final, the others pass."""
    reasons = {_excluded(ask, sighting) for sighting in sightings}
    for reason in ("DRAINING", "UNHEALTHY", "NOT_HEARD_OF"):
        if reason in reasons:
            return reason
    served = any(sighting.digest.serving(ask.model) for sighting in sightings)
    return "REGION_NOT_ALLOWED" if served or not sightings else "MODEL_NOT_FOUND"
