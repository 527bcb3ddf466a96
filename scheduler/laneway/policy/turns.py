"""How long queued work of a lane takes while other lanes come first: their turns, what comes in above, and how both
change meanwhile.

Formula: work flows. Of a capacity c(t) the lane has at least `share` while work of lanes above waits, and afterwards
what these leave, c(t) - a(t), a(t) what comes in above. Capacity and inflow go from what they are now to their long-run
means with a time constant of REVERSION_S, in steps of growing length; within a step they stand still. So a peak or a
trough is not taken to last for a wait of minutes.

Units: device-seconds, device-seconds a second. O(STEPS). Monotone in the work. Source: fluid limit of weighted turns;
policy.md (a) has the forecast of priority demand over the horizon in its place. Failure mode: what grows beyond its
long-run mean for good is believed only as fast as that mean learns.
"""

from __future__ import annotations

import math

from msgspec import Struct

REVERSION_S = 45.0
FIRST_STEP_S, STEP_GROWTH, STEPS = 2.0, 1.7, 14  # some 45 minutes; what takes longer goes on as in the last step


class Supply(Struct, frozen=True):
    """What a lane's work meets; `now` and in the long run."""

    capacity: float
    capacity_later: float
    inflow: float = 0.0  # into the lanes above it
    inflow_later: float = 0.0
    share: float = 1.0  # its least part of the capacity while those have work

    def less(self, by: float, floor: float) -> Supply:
        """With so much less capacity, and the floor at least."""
        return Supply(
            max(floor, self.capacity - by),
            max(floor, self.capacity_later - by),
            self.inflow,
            self.inflow_later,
            self.share,
        )


def turns_s(own: float, above: float, supply: Supply) -> float:
    """Seconds until `own` is done, behind `above`."""
    if supply.capacity == supply.capacity_later and supply.inflow == supply.inflow_later:  # nothing changes meanwhile
        return _steady_s(own, above, supply.capacity, supply.share, supply.inflow)
    at_s, step_s = 0.0, FIRST_STEP_S
    for _ in range(STEPS):
        old = math.exp(-(at_s + step_s / 2.0) / REVERSION_S)
        capacity = supply.capacity_later + (supply.capacity - supply.capacity_later) * old
        inflow = supply.inflow_later + (supply.inflow - supply.inflow_later) * old
        needs_s = _steady_s(own, above, capacity, supply.share, inflow)
        if needs_s <= step_s:
            return at_s + needs_s
        own, above = _after(own, above, capacity, supply.share, inflow, step_s)
        at_s += step_s
        step_s *= STEP_GROWTH
    return at_s + _steady_s(own, above, supply.capacity_later, supply.share, supply.inflow_later)


def _steady_s(own: float, above: float, capacity: float, share: float, inflow: float) -> float:
    least, rest = share * capacity, max(share * capacity, capacity - inflow)
    if above <= 0.0:
        return own / rest
    gain = capacity - least - inflow  # by which what waits above gets less, a second
    if gain <= 0.0:
        return own / least
    first_s = above / gain
    done = least * first_s
    return own / least if own <= done else first_s + (own - done) / rest


def _after(
    own: float, above: float, capacity: float, share: float, inflow: float, span_s: float
) -> tuple[float, float]:
    """What is left of both after a time in which `own` is not done."""
    least, rest = share * capacity, max(share * capacity, capacity - inflow)
    gain = capacity - least - inflow
    if above > 0.0:
        first_s = above / gain if gain > 0.0 else math.inf
        if span_s <= first_s:
            return own - least * span_s, above - gain * span_s
        own -= least * first_s
        span_s -= first_s
    return max(0.0, own - rest * span_s), 0.0
