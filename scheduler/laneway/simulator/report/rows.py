"""Figures of single runs as rows and bars over seeds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from laneway.core.lanes import LANES, Lane
from laneway.simulator.intervals import Interval, mean_interval, ratio
from laneway.simulator.judge import Judged, Verdict
from laneway.simulator.report.figures import Bar, FleetRow, LaneRow
from laneway.simulator.verdicts import POINT, Attained, equal

Key = tuple[str, float | None]  # policy, load


def by_policy_and_load(verdicts: Iterable[Verdict]) -> dict[Key, list[Verdict]]:
    """In the order in which they come."""
    found: dict[Key, list[Verdict]] = {}
    for each in verdicts:
        found.setdefault((each.policy, each.load), []).append(each)
    return found


def lane_rows(verdicts: Iterable[Verdict]) -> list[LaneRow]:
    rows = []
    for key, seeds in by_policy_and_load(verdicts).items():
        for lane in LANES:
            here = [(verdict, found) for verdict in seeds if (found := verdict.lane(lane)) is not None]
            if here:
                rows.append(_lane_row(key, lane, here))
    return rows


def _lane_row(key: Key, lane: Lane, here: list[tuple[Verdict, Judged]]) -> LaneRow:
    groups = [group for _, group in here]
    fairness = [verdict.fairness[lane.value] for verdict, _ in here]
    ended = {name: sum(group.ends[name] for group in groups) for name in groups[0].ends}
    return LaneRow(
        policy=key[0],
        load=key[1],
        lane=lane.value,
        seeds=len(groups),
        offered=sum(group.offered for group in groups),
        attainment=_pooled(groups),
        ttft_p50_s=mean(group.ttft.p50_s for group in groups),
        ttft_p99_s=mean(group.ttft.p99_s for group in groups),
        tpot_p50_s=mean(group.tpot.p50_s for group in groups),
        tpot_p99_s=mean(group.tpot.p99_s for group in groups),
        completion_p50_s=mean(group.completion.p50_s for group in groups),
        completion_p99_s=mean(group.completion.p99_s for group in groups),
        lateness_p99_s=mean(group.lateness.p99_s for group in groups),
        few=any(group.ttft.few for group in groups),
        goodput_requests_per_s=mean(group.goodput_requests_per_s for group in groups) or 0.0,
        goodput_tokens_per_s=mean(group.goodput_tokens_per_s for group in groups) or 0.0,
        refused=ended["refused"],
        left=ended["left"],
        expired=ended["expired"],
        failed=ended["failed"],
        open=ended["open"],
        retries=sum(group.retries for group in groups),
        wasted_tokens=sum(group.wasted_tokens for group in groups),
        rework_share=mean(group.rework_share for group in groups) or 0.0,
        cached_share=mean(group.cached_share for group in groups) or 0.0,
        jain=mean(each.mean for each in fairness),
        jain_windows=sum(each.windows for each in fairness),
    )


def fleet_rows(verdicts: Iterable[Verdict]) -> list[FleetRow]:
    return [
        FleetRow(
            policy=policy,
            load=load,
            seeds=len(seeds),
            workers=mean(each.fleet.workers for each in seeds),
            busy=mean(each.fleet.busy for each in seeds),
            kv=mean(each.fleet.kv for each in seeds),
            useful=mean(each.fleet.useful for each in seeds),
        )
        for (policy, load), seeds in by_policy_and_load(verdicts).items()
    ]


def harvest_bars(shown: Sequence[Verdict], silo: str | None, alone: str | None) -> list[Bar]:
    """Device-hours of batch jobs done in time, of the verdicts of one load.

    Whether a harvest counts is judged on attainment pooled over seeds; the ratio to the silo is paired by seed, and 0
    where it does not count.
    """
    policies = {policy: seeds for (policy, _), seeds in by_policy_and_load(shown).items()}
    theirs = policies.get(silo or "")
    best = policies.get(alone or "")
    bars = []
    for policy, seeds in policies.items():
        if not any(each.lane(Lane.BATCH) for each in seeds):
            continue
        counts, why = (None, "") if theirs is None or best is None else _equal(seeds, theirs, best)
        hours = [each.harvest_device_s / 3600.0 for each in seeds]
        bars.append(Bar(policy, _mean_of(hours), _interval(hours), _ratio(seeds, theirs, counts), counts, why))
    return bars


def cost_bars(shown: Sequence[Verdict]) -> list[Bar]:
    bars = []
    for (policy, _), seeds in by_policy_and_load(shown).items():
        hours = [each.fleet.gpu_hours for each in seeds if each.fleet.gpu_hours is not None]
        if hours:
            bars.append(Bar(policy, _mean_of(hours), _interval(hours)))
    return bars


def attained(seeds: Sequence[Verdict]) -> Attained:
    """Pooled: over all that was offered at all seeds."""
    lanes = {lane: [found for each in seeds if (found := each.lane(lane)) is not None] for lane in LANES}
    deferrable = lanes[Lane.DEFERRABLE]
    return Attained(_pooled(lanes[Lane.PRIORITY]), _pooled(deferrable) if deferrable else None)


def mean(values: Iterable[float | None]) -> float | None:
    """Of those that are known."""
    known = [value for value in values if value is not None]
    return _mean_of(known) if known else None


def _equal(seeds: Sequence[Verdict], silo: Sequence[Verdict], alone: Sequence[Verdict]) -> tuple[bool, str]:
    ours, theirs, best = attained(seeds), attained(silo), attained(alone)
    if equal(ours, theirs, best):
        return True, ""
    floor = max(theirs.priority, best.priority - POINT)
    if not ours.priority >= floor:
        return False, f"priority attains {ours.priority:.1%}, less than {floor:.1%}"
    return False, f"deferrable attains {ours.deferrable or 0.0:.1%}, less than {(theirs.deferrable or 0.0) - POINT:.1%}"


def _ratio(seeds: Sequence[Verdict], silo: Sequence[Verdict] | None, counts: bool | None) -> Interval | None:
    theirs = {each.seed: each.harvest_device_s for each in silo or ()}
    pairs = [(each.harvest_device_s, theirs[each.seed]) for each in seeds if each.seed in theirs]
    if len(pairs) < 2 or not all(below > 0.0 for _, below in pairs):
        return None
    return ratio([0.0 if counts is False else above for above, _ in pairs], [below for _, below in pairs])


def _interval(values: Sequence[float]) -> Interval | None:
    return mean_interval(np.array(values)) if len(values) > 1 else None


def _pooled(groups: Sequence[Judged]) -> float:
    offered = sum(group.offered for group in groups)
    return sum((group.attainment or 0.0) * group.offered for group in groups) / offered if offered else 0.0


def _mean_of(values: Sequence[float]) -> float:
    return float(np.mean(values))
