"""What Laneway's rules leave to the lower lanes of a fleet, in the mean: prompt tokens a second and places.

The rules are those of laneway.policy, asked with the mean worker of a region. Its workers are of two kinds: those that
hold priority work at the moment, where credit and the TPOT limit bind, and those that do not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from laneway.core.fleet import StepTimes
from laneway.policy import interference as policy
from laneway.policy.headroom import DISPERSION_CAP, DISPERSION_MIN, KEPT_SHARE, HeadroomParams
from laneway.policy.interference import InterferenceParams, Load
from laneway.simulator.trace import Floats

SPAN_S = 300  # of priority arrivals that headroom is learned from


@dataclass(frozen=True, slots=True)
class State:
    """Means of one worker, a row for each region."""

    workers: Floats  # of the region
    with_priority: Floats  # share of workers that hold priority work
    decoding: Floats  # sequences, of all lanes
    priority: Floats  # sequences of priority
    context_tokens: Floats  # of a sequence
    phi_priority: Floats  # share of the steps' chunk that priority prompts take
    alone_per_s: Floats  # prompt tokens a second, if the engine does what it can
    kept_slots: Floats


@dataclass(frozen=True, slots=True)
class Targets:
    tpot_s: float
    ttft_s: float
    strict: bool


@dataclass(frozen=True, slots=True)
class Grant:
    """A row for each region."""

    tokens_per_s: Floats  # of the whole region
    beside_per_s: Floats  # of a worker that holds priority work
    places: Floats  # of the whole region, for all lanes together, beyond which no lower-lane sequence starts


def grants(
    state: State, times: StepTimes, theta: Floats, slots: int, targets: Targets, params: InterferenceParams
) -> Grant:
    beside, fits = state.alone_per_s.copy(), np.full(len(theta), math.inf)
    for region in np.flatnonzero((state.with_priority > 1e-9) & (state.workers > 0.0)) if params.budget else ():
        load = _load(state, int(region), times, targets)
        share = float(theta[region])
        beside[region] = min(beside[region], policy.credit_rate(load, share, params))
        each_s = times.sequence_s + times.context_token_s * float(state.context_tokens[region])
        fits[region] = max(0.0, (policy.limit_s(load, share, params) - times.base_s) / max(each_s, 1e-12))
    there, most = state.with_priority, np.maximum(0.0, slots - state.kept_slots)
    tokens = there * beside + (1.0 - there) * state.alone_per_s
    places = there * np.minimum(fits, most) + (1.0 - there) * most
    return Grant(state.workers * tokens, beside, state.workers * places)


def _load(state: State, region: int, times: StepTimes, targets: Targets) -> Load:
    context = float(state.context_tokens[region])
    mine = float(state.priority[region] / state.with_priority[region])
    # Lower-lane sequences are everywhere, priority's are where priority is.
    decoding = float(state.decoding[region] - state.priority[region]) + mine
    return Load(
        times,
        targets.tpot_s,
        targets.ttft_s,
        decoding=round(decoding),
        context_tokens=round(decoding * context),
        priority=max(1, round(mine)),
        priority_decoding=max(1, round(mine)),
        priority_context=round(mine * context),
        recent=True,
        strict=targets.strict,
        phi_priority=float(state.phi_priority[region]),
    )


def headroom(
    counts: Floats, workers: Floats, here: Floats, slots: int, dispersion: float, params: HeadroomParams
) -> Floats:
    """Places that each worker keeps free for priority: the formula of laneway.policy.headroom, with the counts of a
    region's windows thinned to one worker (mean m / n, index of dispersion 1 + (F - 1) / n).

    `counts`: priority arrivals by second (row) and region; `here`: priority sequences at a worker.
    """
    window = max(1, round(params.window_s))
    whole = len(counts) // window * window
    if not whole or params.z <= 0.0:
        return np.full(len(workers), float(params.slots_min))
    windows = counts[:whole].reshape(-1, window, counts.shape[1]).sum(axis=1)
    average, workers = np.maximum(windows.mean(axis=0), 1e-9), np.maximum(workers, 1.0)
    index = dispersion + windows.var(axis=0) / average
    index = np.clip(1.0 + (index - 1.0) / workers, DISPERSION_MIN, DISPERSION_CAP)
    mean = average / workers
    stay_s = np.maximum(here * window / mean, 1e-3)
    share = np.minimum(1.0, stay_s / window)
    jobs = share * mean + params.z * np.sqrt(index * share * mean) - here * np.minimum(1.0, window / stay_s)
    jobs = np.where(windows.any(axis=0), np.maximum(jobs, 0.0), 0.0)
    kept = np.minimum(np.ceil(jobs - 1e-9), int(KEPT_SHARE * slots))
    return np.asarray(np.maximum(float(params.slots_min), kept))
