"""Whether a provider that keeps failing may be asked: a circuit breaker whose whole state is a value.

Closed, it lets everything through and counts failures in a row. At `failures_max` of them it opens, for a time that
doubles with each opening without a success between. After that time one request may try (the probe); its success closes
the breaker, its failure opens it again. Whoever stores the value decides who knows of it: here all workers of a region
share one, so that one of them probes and not each. Libraries have breakers that wrap the call and read a clock
themselves (ADR 15).

Seconds on the clock of whoever passes `now_s`; the number of failures is policy.md's (e), the times are a first guess.
O(1). Known failure modes: a provider that fails now and then is never left alone, as failures in a row are counted; one
that fails for some models only is left alone for all.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct
from msgspec.structs import replace


@dataclass(frozen=True, slots=True)
class BreakerParams:
    failures_max: int = 5  # in a row (policy.md e: Envoy's)
    open_s: float = 5.0
    open_s_max: float = 60.0


class Breaker(Struct, frozen=True):
    failures: int = 0  # in a row, while closed
    openings: int = 0  # in a row; 0: closed
    open_until_s: float = 0.0
    probing: bool = False  # one request is out to try


def wait_s(breaker: Breaker, now_s: float) -> float | None:
    """Seconds until somebody may ask, 0 being now; None: once the probe that is out has come back."""
    if breaker.openings == 0:
        return 0.0
    if breaker.probing:
        return None
    return max(0.0, breaker.open_until_s - now_s)


def asked(breaker: Breaker) -> Breaker:
    """After a request that was let through: the probe, if the breaker is open."""
    return replace(breaker, probing=True) if breaker.openings else breaker


def succeeded(breaker: Breaker, *, probe: bool) -> Breaker:
    """A success of an earlier request says nothing about an open breaker."""
    return Breaker() if probe or not breaker.openings else breaker


def failed(breaker: Breaker, now_s: float, *, probe: bool, params: BreakerParams) -> Breaker:
    """Failures of requests from before it opened change nothing."""
    if breaker.openings and not probe:
        return breaker
    failures = breaker.failures + 1
    if not probe and failures < params.failures_max:
        return replace(breaker, failures=failures)
    open_s = min(params.open_s_max, params.open_s * 2.0 ** min(breaker.openings, 32))
    return Breaker(failures=0, openings=breaker.openings + 1, open_until_s=now_s + open_s)


def probe_lost(breaker: Breaker) -> Breaker:
    """The probe ended without a word about the provider: another may try."""
    return replace(breaker, probing=False)
