"""Runs as a report: figures, and series short enough to draw."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from laneway.core.fleet import StepTimes
from laneway.core.lanes import LANES
from laneway.simulator.judge import Mask, judged, kept, span_s
from laneway.simulator.outcomes import End, Run
from laneway.simulator.report.figures import VERSION, About, Curve, Report, TimeLine, TraceFacts, UsageLine
from laneway.simulator.report.rows import cost_bars, fleet_rows, harvest_bars, lane_rows
from laneway.simulator.trace import Floats, Trace

BINS = 60  # of a plot over time
CURVE_POINTS = 200
SHORTEST_BIN_S = 10.0


def report_of(
    runs: Sequence[Run],
    times: StepTimes,
    about: About,
    *,
    loads: Sequence[float | None] | None = None,
    load_shown: float | None = None,
    silo: str | None = None,
    alone: str | None = None,
    weights: dict[str, float] | None = None,
    until_s: float = np.inf,
) -> Report:
    """`loads`: of each run, in units of rho99; runs at `load_shown` (without it: at the first run's) are plotted over
    time. `silo`, `alone`: policies that decide whether a harvest counts. `weights`: of tenants by name. `until_s`: the
    harvest's end.

    Raises ValueError without a run, or if `loads` is of another length.
    """
    if not runs:
        raise ValueError("a report needs a run")
    of_run = [None] * len(runs) if loads is None else list(loads)
    if len(of_run) != len(runs):
        raise ValueError(f"{len(runs)} runs need as many loads, not {len(of_run)}")
    shown_load = of_run[0] if load_shown is None else load_shown
    shown = [run for run, load in zip(runs, of_run, strict=True) if load == shown_load]
    if not shown:
        raise ValueError(f"no run has the load {shown_load}")
    verdicts = [judged(run, times, weights, load=load, until_s=until_s) for run, load in zip(runs, of_run, strict=True)]
    at_load = [verdict for verdict in verdicts if verdict.load == shown_load]
    return Report(
        version=VERSION,
        about=about,
        load_shown=shown_load,
        silo=silo,
        alone=alone,
        traces=_traces(runs),
        lanes=lane_rows(verdicts),
        fleets=fleet_rows(verdicts),
        harvest=harvest_bars(at_load, silo, alone),
        gpu_hours=cost_bars(at_load),
        attainment=[line for same in _by_policy(shown) for line in _attainment(same, _bin_s(shown))],
        curves=[curve for same in _by_policy(shown) for curve in _curves(same)],
        usage=[line for same in _by_policy(shown) if (line := _usage(same[0])) is not None],
        verdicts=verdicts,
    )


def _by_policy(runs: Sequence[Run]) -> list[list[Run]]:
    order = list(dict.fromkeys(run.policy for run in runs))
    ranked = sorted(runs, key=lambda run: order.index(run.policy))
    return [list(same) for _, same in groupby(ranked, key=lambda run: run.policy)]


def _traces(runs: Sequence[Run]) -> list[TraceFacts]:
    """Each once: seeds of one trace differ in their requests or span."""
    facts = [_facts(run.trace) for run in runs]
    return list({(each.name, each.requests, each.span_s): each for each in facts}.values())


def _facts(trace: Trace) -> TraceFacts:
    some = len(trace) > 0
    return TraceFacts(
        name=trace.name,
        requests=len(trace),
        span_s=trace.span_s,
        tenants=len(trace.tenants),
        lanes={lane.value: int(np.count_nonzero(trace.of_lane(lane))) for lane in LANES},
        prompt_tokens_p50=float(np.median(trace.prompt_tokens)) if some else 0.0,
        output_tokens_p50=float(np.median(trace.output_tokens)) if some else 0.0,
        notes=trace.notes,
    )


def _bin_s(runs: Sequence[Run]) -> float:
    return max(SHORTEST_BIN_S, max(run.trace.span_s for run in runs) / BINS)


def _attainment(runs: Sequence[Run], bin_s: float) -> list[TimeLine]:
    """By when a request was asked for."""
    lines = []
    bins = max(1, int(np.ceil(max(span_s(run) for run in runs) / bin_s)))
    for lane in LANES:
        asked, good = np.zeros(bins), np.zeros(bins)
        for run in runs:
            asked_s = np.where(np.isnan(run.outcomes.asked_s), run.trace.arrival_s, run.outcomes.asked_s)
            mine = run.trace.of_lane(lane)
            edges = np.arange(bins + 1) * bin_s
            asked += np.histogram(asked_s[mine], bins=edges)[0]
            good += np.histogram(asked_s[mine & kept(run)], bins=edges)[0]
        if asked.any():
            last = int(np.flatnonzero(asked)[-1]) + 1
            share = [float(g / a) if a else None for g, a in zip(good[:last], asked[:last], strict=True)]
            at_s = ((np.arange(last) + 0.5) * bin_s).tolist()
            lines.append(TimeLine(runs[0].policy, lane.value, at_s, share))
    return lines


def _curves(runs: Sequence[Run]) -> list[Curve]:
    """Pooled over seeds. TTFT of all that had a first token; the others of what was done."""
    found = []
    for number, lane in enumerate(LANES):
        masks = [np.equal(run.trace.lane, number) for run in runs]
        offered = sum(int(np.count_nonzero(mask)) for mask in masks)
        if not offered:
            continue
        measured = {
            "ttft": [(run.outcomes.ttft_s, run.trace.ttft_s, mask) for run, mask in zip(runs, masks, strict=True)],
            "tpot": [
                (run.outcomes.tpot_s, run.trace.tpot_s, _done(run, mask)) for run, mask in zip(runs, masks, strict=True)
            ],
            "completion": [
                (run.outcomes.end_s - run.outcomes.asked_s, run.trace.deadline_s, _done(run, mask))
                for run, mask in zip(runs, masks, strict=True)
            ],
        }
        for measure, parts in measured.items():
            values = np.concatenate([value[mask] for value, _, mask in parts])
            promised = np.concatenate([promise[mask] for _, promise, mask in parts])
            curve = _curve(runs[0].policy, lane.value, measure, values, promised, offered)
            if curve is not None:
                found.append(curve)
    return found


def _done(run: Run, mask: Mask) -> Mask:
    return mask & np.equal(run.outcomes.end, End.DONE)


def _curve(policy: str, lane: str, measure: str, values: Floats, promised: Floats, offered: int) -> Curve | None:
    known = np.sort(values[~np.isnan(values)])
    if not len(known):
        return None
    place = np.unique(np.linspace(0, len(known) - 1, CURVE_POINTS).astype(np.int64))
    same = float(promised[0]) if np.isfinite(promised[0]) and np.all(promised == promised[0]) else None
    return Curve(policy, lane, measure, known[place].tolist(), ((place + 1) / offered).tolist(), same)


def _usage(run: Run) -> UsageLine | None:
    usage = run.usage
    rows = len(usage.busy)
    if not rows:
        return None
    each = max(1, -(-rows // (2 * BINS)))  # rows of a bin
    edges = np.arange(0, rows, each)
    lengths = np.diff(np.append(edges, rows))
    paid_s = np.add.reduceat(np.nan_to_num(usage.workers), edges) * usage.every_s
    useful = np.add.reduceat(np.nan_to_num(usage.device_s), edges, axis=0) / np.maximum(paid_s, 1e-9)[:, None]

    def binned(values: Floats) -> list[float | None]:
        means = np.add.reduceat(values, edges) / lengths
        return [None if np.isnan(value) else float(value) for value in means]

    return UsageLine(
        policy=run.policy,
        at_s=((edges + lengths / 2.0) * usage.every_s).tolist(),
        workers=binned(usage.workers),
        busy=binned(usage.busy),
        kv=binned(usage.kv),
        lanes={lane.value: useful[:, number].tolist() for number, lane in enumerate(LANES)},
    )
