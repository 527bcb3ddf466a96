"""When two policies are equal, what a harvest then counts, and what a load is measured in."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

POINT = 0.01  # of attainment


class Attained(msgspec.Struct, frozen=True):
    """Shares of what was offered, 0 to 1. `deferrable`: None where the trace has none."""

    priority: float
    deferrable: float | None = None


def equal(ours: Attained, silo: Attained, alone: Attained) -> bool:
    """Whether priority attains at least what it does in the silo and at most a point less than alone, and deferrable at
    most a point less than in the silo."""
    if not (ours.priority >= silo.priority and ours.priority >= alone.priority - POINT):
        return False
    if silo.deferrable is None:
        return True
    return ours.deferrable is not None and ours.deferrable >= silo.deferrable - POINT


def counted_harvest(device_s: float, ours: Attained, silo: Attained, alone: Attained) -> float:
    """Device-seconds: nothing where the others paid for it."""
    return device_s if equal(ours, silo, alone) else 0.0


def rho99(
    attains: Callable[[float], float],
    *,
    share: float = 0.99,
    lowest: float = 1 / 64,
    highest: float = 64.0,
    tolerance: float = 0.01,
) -> float:
    """By how much a trace's time is compressed at most for priority alone to attain `share`: the load of 1.

    `attains`: the attainment at a factor. Doubles or halves from 1 until the answer lies between two factors, then
    halves what lies between, in the ratio, to `tolerance`; the answer is a factor that was tried and held. Where
    attainment is not falling throughout it is one of the edges. Raises ValueError if it fails at `lowest` or holds at
    `highest`.
    """
    holds, fails = 1.0, 1.0
    if attains(1.0) >= share:
        while True:
            fails = min(highest, 2.0 * holds)
            if not attains(fails) >= share:
                break
            if fails >= highest:
                raise ValueError(f"{share:.0%} is attained at {highest:g} times the trace's own speed: add requests")
            holds = fails
    else:
        while True:
            holds = max(lowest, fails / 2.0)
            if attains(holds) >= share:
                break
            if holds <= lowest:
                raise ValueError(f"{share:.0%} is not attained at {lowest:g} times the trace's own speed: add workers")
            fails = holds
    while fails / holds > 1.0 + tolerance:
        middle = float((holds * fails) ** 0.5)
        if attains(middle) >= share:
            holds = middle
        else:
            fails = middle
    return holds
