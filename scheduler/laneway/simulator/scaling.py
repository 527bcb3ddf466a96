"""The load of a trace, changed without changing its kind.

Load is raised by compressing time, and never by thinning: dividing all times leaves the coefficient of variation of
gaps as it is, whereas leaving out requests at random, or laying copies over each other, makes bursty traffic look
smooth (of an hour of code completion with a CV of 13.2, a random quarter has 6.6, four shifted copies have 8 to 10).
Copies are for more tenants of the same kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from laneway.simulator.columns import begin_s, joined, later_turns, select
from laneway.simulator.trace import Floats, Trace

TICK_S = 1.0  # shorter steps are a clock's resolution, not ticks
JITTER, REGULAR = 0.01, 0.95  # how far a step may be off, in ticks, and the share of steps that are not
CLUMPED = 0.5  # share of gaps of zero length from which on arrivals look recorded in ticks


def compressed(trace: Trace, factor: float) -> Trace:
    """Arrivals and think times so many times as fast, more than 0. Promises and patience stay as they are."""
    if not factor > 0.0:
        raise ValueError(f"{trace.name}: time cannot be compressed by {factor}")
    if factor == 1.0:
        return trace
    note = f"time compressed by {factor:g}"
    return replace(
        trace, arrival_s=trace.arrival_s / factor, think_s=trace.think_s / factor, notes=(*trace.notes, note)
    )


def excerpt(trace: Trace, from_s: float, until_s: float) -> Trace:
    """What arrives, and sessions that begin, from the one time to before the other; the begin becomes 0."""
    begins_s = begin_s(trace)
    part = select(trace, (begins_s >= from_s) & (begins_s < until_s))
    arrival_s = np.maximum(0.0, part.arrival_s - from_s)
    note = f"seconds {from_s:g} to {until_s:g} of it"
    return replace(part, arrival_s=arrival_s, notes=(*trace.notes, note))


def superposed(trace: Trace, shifts_s: Sequence[float], *, span_s: float | None = None) -> Trace:
    """A copy for each shift, moved around the circle of the trace's span, with tenants and prefixes of its own.

    `span_s`: more than the last arrival; without it the last arrival and one mean gap.
    """
    round_s = circle_s(trace) if span_s is None else span_s
    note = f"{len(shifts_s)} copies, each with tenants of its own, shifted around the trace's span"
    copies = []
    for number, shift_s in enumerate(shifts_s, 1):
        moved_s = np.where(later_turns(trace), 0.0, (trace.arrival_s + shift_s) % round_s)
        moved = replace(trace, arrival_s=moved_s, tenants=tuple(f"{tenant}.{number}" for tenant in trace.tenants))
        copies.append(select(moved, np.argsort(begin_s(moved), kind="stable")))
    return joined(trace.name, copies, (*trace.notes, note))


def circle_s(trace: Trace) -> float:
    """The span in which the requests come at their mean rate: the last arrival and one mean gap."""
    begins = len(trace) - int(np.count_nonzero(later_turns(trace)))
    return trace.span_s * begins / (begins - 1) if begins > 1 else max(trace.span_s, 1.0)


def tick_of(arrival_s: Floats) -> float | None:
    """The tick in which arrivals were recorded, where more than half of the gaps are zero; else None. Seconds."""
    gaps = np.diff(arrival_s)
    if not len(gaps) or np.count_nonzero(gaps == 0.0) <= CLUMPED * len(gaps):
        return None
    steps_s = gaps[gaps > 0.0]
    tick_s = float(np.median(steps_s)) if len(steps_s) else 0.0
    if tick_s < TICK_S:
        return None
    off = np.abs(steps_s / tick_s - np.round(steps_s / tick_s))
    return tick_s if np.count_nonzero(off < JITTER) >= REGULAR * len(steps_s) else None


def spread_ticks(arrival_s: Floats, tick_s: float, random: np.random.Generator | None) -> Floats:
    """Arrivals within the tick that begins at each: drawn uniformly, or evenly spaced where there is no generator."""
    _, first, counts = np.unique(arrival_s, return_index=True, return_counts=True)
    if random is None:
        inside = np.arange(len(arrival_s)) - np.repeat(first, counts)
        shares = (inside + 0.5) / np.repeat(counts, counts)
    else:
        shares = random.random(len(arrival_s))
    spread = arrival_s + tick_s * shares
    spread.sort()  # who came when inside a tick is not known: rows keep their order
    return spread
