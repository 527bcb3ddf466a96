"""What a run came to, in figures: of each lane, tenant and size, of the fleet, and the harvest.

Attainment counts over all that was offered: what was refused, left or dropped has missed. A request kept its promise if
it was DONE within all that the trace promises it together: TTFT, mean time between tokens and its deadline, where inf
is no promise. Deferrable and batch requests thus usually have their deadline alone.

Goodput is over the time in which the trace brings requests, the same for all policies: over a run's own length, one
that takes longer over what is left at the end would seem to serve less all along.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from laneway.core.fleet import StepTimes
from laneway.core.lanes import LANES, Lane
from laneway.simulator.outcomes import End, Run
from laneway.simulator.trace import Floats, Ints
from laneway.simulator.usage import device_s

P99_REQUESTS = 2_000  # a p99 of fewer is marked
QUARTILES = 4

Mask = NDArray[np.bool_]


class Quantiles(msgspec.Struct, frozen=True):
    """In seconds, of `of` requests that were done; None: of none. `few`: too few for the p99 to be quoted."""

    of: int
    p50_s: float | None
    p95_s: float | None
    p99_s: float | None
    few: bool


class Judged(msgspec.Struct, frozen=True):
    """Of one group of requests."""

    name: str
    offered: int
    attainment: float | None  # 0 to 1; None: nothing was offered
    ends: dict[str, int]  # by the name of the End
    retries: int
    ttft: Quantiles
    tpot: Quantiles  # of answers of more than one token
    completion: Quantiles  # from asking to the answer's end
    lateness: Quantiles  # beyond the deadline; 0 for what was in time
    goodput_requests_per_s: float  # that kept their promises, and ended while the trace still brought requests
    goodput_tokens_per_s: float
    wasted_tokens: int  # prompt and answer tokens computed for callers who had left, of those whose answer had begun
    rework_share: float  # of all tokens computed
    cached_share: float  # of the prompts' tokens of what was done


class Fleet(msgspec.Struct, frozen=True):
    """Over the whole run; None: not known (of a replay)."""

    span_s: float
    workers: float | None  # paid for, on average
    gpu_hours: float | None  # paid for, booting included
    busy: float | None  # share of the paid time in which steps ran
    kv: float | None  # share of KV in use
    useful: float | None  # device-seconds of answers by the profile, without re-work, in a second paid for


class Fairness(msgspec.Struct, frozen=True):
    """Jain's index over service / weight of the tenants that waited through a whole window; None: no window had two."""

    windows: int
    mean: float | None
    least: float | None


class Verdict(msgspec.Struct, frozen=True):
    policy: str
    trace: str
    seed: int
    load: float | None  # in units of rho99; None: not said
    lanes: list[Judged]
    tenants: list[Judged]
    sizes: list[Judged]  # quartiles of the priority lane's work by the profile, smallest first
    fleet: Fleet
    fairness: dict[str, Fairness]  # by lane
    harvest_device_s: float
    counts: dict[str, float]
    parameters: dict[str, float | str | bool]

    def lane(self, lane: Lane) -> Judged | None:
        return next((each for each in self.lanes if each.name == lane), None)


def judged(
    run: Run,
    times: StepTimes,
    weights: dict[str, float] | None = None,
    *,
    load: float | None = None,
    until_s: float = np.inf,
) -> Verdict:
    """`times`: of the profile, for what work is worth; `weights`: of tenants by name, 1 for those not named; `until_s`:
    the harvest's end, for batch work whose deadlines lie beyond what is played."""
    trace = run.trace
    lanes = [lane for lane in LANES if trace.of_lane(lane).any()]
    return Verdict(
        policy=run.policy,
        trace=trace.name,
        seed=run.seed,
        load=load,
        lanes=[_group(run, lane.value, trace.of_lane(lane)) for lane in lanes],
        tenants=[_group(run, name, np.equal(trace.tenant, number)) for number, name in enumerate(trace.tenants)],
        sizes=[_group(run, f"quartile {number}", mask) for number, mask in enumerate(size_quartiles(run, times), 1)],
        fleet=fleet(run),
        fairness={lane.value: jain(run, times, trace.of_lane(lane), weights) for lane in lanes},
        harvest_device_s=harvest_device_s(run, times, until_s=until_s),
        counts=dict(run.counts),
        parameters=dict(_flat(run.parameters)),
    )


def _flat(parameters: Mapping[str, object], above: str = "") -> Iterator[tuple[str, float | str | bool]]:
    """A mapping among them (a figure for each lane) as a parameter for each of its keys."""
    for key, value in parameters.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value if isinstance(value, bool | int | float | str) else str(value)


def kept(run: Run) -> Mask:
    """Of each request whether it was done within all that it was promised."""
    trace, outcomes = run.trace, run.outcomes
    with np.errstate(invalid="ignore"):
        return (
            np.equal(outcomes.end, End.DONE)
            & (outcomes.ttft_s <= trace.ttft_s)
            & (outcomes.tpot_s <= trace.tpot_s)
            & (outcomes.end_s - outcomes.asked_s <= trace.deadline_s)
        )


def span_s(run: Run) -> float:
    """Until the fleet's last row, or the last that is known of a request."""
    if len(run.usage.busy):
        return run.usage.every_s * len(run.usage.busy)
    known = run.outcomes.end_s[~np.isnan(run.outcomes.end_s)]
    return float(max(known.max(initial=0.0), run.trace.span_s))


def harvest_device_s(run: Run, times: StepTimes, jobs: Mask | None = None, until_s: float = np.inf) -> float:
    """What the jobs of a fixed list that were done by their deadlines and `until_s` are worth by the profile.

    `jobs`: the list; the batch lane without it. A job is worth the same however it was made: a cached prefix saves
    nothing of it, and what was computed twice adds nothing.
    """
    trace = run.trace
    listed = trace.of_lane(Lane.BATCH) if jobs is None else jobs
    with np.errstate(invalid="ignore"):
        done = kept(run) & listed & (run.outcomes.end_s <= until_s)
    return float(worth_s(trace.prompt_tokens[done], run.outcomes.tokens[done], times).sum())


def worth_s(prompt_tokens: Ints, output_tokens: Ints, times: StepTimes) -> Floats:
    """Device-seconds of each request by the profile: `device_s` of columns of whole tokens."""
    return device_s(prompt_tokens.astype(np.float64), output_tokens.astype(np.float64), times)


def size_quartiles(run: Run, times: StepTimes) -> list[Mask]:
    """Four groups of the priority lane by what a request is worth, of equal counts to within one; [] without one.

    By ranks: requests of one size do not all fall into one group.
    """
    trace = run.trace
    mine = np.flatnonzero(trace.of_lane(Lane.PRIORITY))
    if not len(mine):
        return []
    worth = worth_s(trace.prompt_tokens[mine], trace.output_tokens[mine], times)
    groups = []
    for part in np.array_split(mine[np.argsort(worth, kind="stable")], QUARTILES):
        mask = np.zeros(len(trace), dtype=np.bool_)
        mask[part] = True
        groups.append(mask)
    return groups


def fleet(run: Run) -> Fleet:
    usage, length_s = run.usage, span_s(run)
    workers = _known_mean(usage.workers)
    paid_s = None if workers is None else workers * length_s
    return Fleet(
        span_s=length_s,
        workers=workers,
        gpu_hours=None if paid_s is None else paid_s / 3600.0,
        busy=_known_mean(usage.busy, usage.workers),
        kv=_known_mean(usage.kv, usage.workers),
        useful=float(np.nansum(usage.device_s)) / paid_s if paid_s else None,
    )


def jain_index(shares: Floats) -> float:
    """(sum x)^2 / (n sum x^2), 1/n to 1 (Jain, Chiu, Hawe 1984); 1 where nobody got anything."""
    squares = float(np.square(shares).sum())
    return float(shares.sum()) ** 2 / (len(shares) * squares) if squares else 1.0


def jain(
    run: Run, times: StepTimes, among: Mask, weights: dict[str, float] | None = None, *, window_s: int = 60
) -> Fairness:
    """Of each window the index over the tenants that had a request waiting at each of its seconds.

    Service: what a request is worth by the profile, its prompt at the first token, its answer evenly from then to the
    end. `among`: the requests that compete; between lanes there is an order and no fairness.
    """
    trace, outcomes = run.trace, run.outcomes
    windows = int(span_s(run)) // window_s
    if not windows:
        return Fairness(0, None, None)
    seconds = np.arange(windows * window_s, dtype=np.float64)
    edges = np.arange(windows + 1, dtype=np.float64) * window_s
    begun_s = np.where(np.isnan(outcomes.first_s), outcomes.end_s, outcomes.first_s)
    begun_s = np.where(np.isnan(begun_s), np.inf, begun_s)  # waits to the end of the run
    served, backlogged = [], []
    for number, name in enumerate(trace.tenants):
        mine = among & np.equal(trace.tenant, number) & ~np.isnan(outcomes.asked_s)
        if not mine.any():
            continue
        came = np.searchsorted(np.sort(outcomes.asked_s[mine]), seconds, side="right")
        went = np.searchsorted(np.sort(begun_s[mine]), seconds, side="right")
        backlogged.append((came > went).reshape(windows, window_s).all(axis=1))
        served.append(_service(run, times, mine, edges) / (weights or {}).get(name, 1.0))
    found = [
        jain_index(shares[waiting])
        for shares, waiting in zip(np.array(served).T, np.array(backlogged).T, strict=True)
        if np.count_nonzero(waiting) > 1
    ]
    return Fairness(len(found), float(np.mean(found)), float(np.min(found))) if found else Fairness(0, None, None)


def _service(run: Run, times: StepTimes, mine: Mask, edges: Floats) -> Floats:
    """Device-seconds in each window between the edges."""
    trace, outcomes = run.trace, run.outcomes
    begun = mine & ~np.isnan(outcomes.first_s)
    first_s = outcomes.first_s[begun]
    end_s = np.where(np.isnan(outcomes.end_s[begun]), np.maximum(first_s, edges[-1]), outcomes.end_s[begun])
    prompts = trace.prompt_tokens[begun]
    total = worth_s(prompts, outcomes.tokens[begun], times)
    prompt = worth_s(prompts, np.zeros_like(prompts), times)
    made = np.histogram(first_s, bins=edges, weights=prompt)[0]
    per_s = (total - prompt) / np.maximum(end_s - first_s, 1e-9)
    for window in range(len(edges) - 1):
        inside_s = np.minimum(end_s, edges[window + 1]) - np.maximum(first_s, edges[window])
        made[window] += float((per_s * np.maximum(inside_s, 0.0)).sum())
    return made


def _group(run: Run, name: str, mine: Mask) -> Judged:
    trace, outcomes = run.trace, run.outcomes
    offered = int(np.count_nonzero(mine))
    good = kept(run) & mine
    done = np.equal(outcomes.end, End.DONE) & mine
    left = np.equal(outcomes.end, End.LEFT) & mine & ~np.isnan(outcomes.first_s)
    begun = mine & ~np.isnan(outcomes.first_s)
    answer_s = outcomes.end_s - outcomes.asked_s
    dated = done & np.isfinite(trace.deadline_s)
    again = int(outcomes.recomputed_tokens[mine].sum())
    once = int((trace.prompt_tokens - outcomes.cached_tokens)[begun].sum() + outcomes.tokens[begun].sum())
    prompts = int(trace.prompt_tokens[done].sum())
    length_s = run.trace.span_s or span_s(run)
    with np.errstate(invalid="ignore"):
        soon = good & (outcomes.end_s <= length_s)
    return Judged(
        name=name,
        offered=offered,
        attainment=int(np.count_nonzero(good)) / offered if offered else None,
        ends={end.name.lower(): int(np.count_nonzero(mine & np.equal(outcomes.end, end))) for end in End},
        retries=int(outcomes.retries[mine].sum()),
        ttft=quantiles(outcomes.ttft_s[done]),
        tpot=quantiles(outcomes.tpot_s[done & (outcomes.tokens > 1)]),
        completion=quantiles(answer_s[done]),
        lateness=quantiles(np.maximum(0.0, answer_s[dated] - trace.deadline_s[dated])),
        goodput_requests_per_s=int(np.count_nonzero(soon)) / length_s if length_s else 0.0,
        goodput_tokens_per_s=int(outcomes.tokens[soon].sum()) / length_s if length_s else 0.0,
        wasted_tokens=int((trace.prompt_tokens - outcomes.cached_tokens)[left].sum() + outcomes.tokens[left].sum()),
        rework_share=again / (again + once) if again + once else 0.0,
        cached_share=int(outcomes.cached_tokens[done].sum()) / prompts if prompts else 0.0,
    )


def quantiles(values_s: Floats) -> Quantiles:
    known = values_s[~np.isnan(values_s)]
    few = len(known) < P99_REQUESTS
    if not len(known):
        return Quantiles(0, None, None, None, few)
    p50, p95, p99 = (float(value) for value in np.quantile(known, (0.5, 0.95, 0.99)))
    return Quantiles(len(known), p50, p95, p99, few)


def _known_mean(values: Floats, weights: Floats | None = None) -> float | None:
    weights = np.ones(len(values)) if weights is None else np.where(np.isnan(weights), 1.0, weights)
    known = ~np.isnan(values)
    total = float(weights[known].sum())
    return float((values[known] * weights[known]).sum()) / total if total else None
