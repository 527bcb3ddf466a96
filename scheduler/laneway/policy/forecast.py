"""How much priority work will come: a forecast for each minute, its spread, and how bursty arrivals are.

Seen at each look of the scheduler: the priority jobs that are in the pool (ready and running: by Little's law their
mean is arrivals x time in the system, in places), and each arrival (its bell). Of each minute the means are kept.

    forecast(minute) = level                                   without history of this time of day
                     = season(minute) x clamp(level / season now, 0.5, 2)   with it

level: EWMA over some ten minutes; season: what was seen a week before where that is known, else a day before (seasonal
naive). q80 and q90 are the forecast times that quantile of actual / forecast over the last two hours; before there are
ten of these, a normal spread around the level with the burstiness. Drift: actual / forecast above 1.5 for three minutes
in a row breaks the forecast; three minutes that are not mend it. While it is broken nothing is held for a trough.

Burstiness F = variance / mean of arrivals in windows of 2 s over the last 5 minutes, within [1, 50] (a Poisson process
has 1). Source: policy.md (b4) and (c). Cost: O(1) an observation, O(S) a forecast of S minutes.

Known failure modes: history is the leader's memory alone, so that after a change of leader there is no season for a
day (only level and burstiness are taken from the plan before): nothing is held then. A holiday looks like a break.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct

from laneway.policy.headroom import dispersion, expected_jobs

SLOT_S = 60.0
DAY_SLOTS = 1_440
WEEK_SLOTS = 7 * DAY_SLOTS
COUNT_S = 2.0  # arrivals are counted in spans of this length
WINDOWS = 150  # five minutes
Z = 2.33  # one in a hundred
RATIOS = 120  # actual / forecast that are remembered: two hours


@dataclass(frozen=True, slots=True)
class ForecastParams:
    level_rate: float = 0.1  # of the EWMA, a minute
    drift_ratio: float = 1.5
    drift_slots: int = 3
    ratios_min: int = 10


class Series:
    """One quantity in minutes: what was seen, and what is expected."""

    def __init__(self, level: float = 0.0, params: ForecastParams = ForecastParams(), *, noise: float = 0.01) -> None:
        """`noise`: what is no news: a pool that sleeps must not look as if anything were a multiple of nothing."""
        self.level = level
        self.broken = False
        self._params = params
        self._noise = noise
        self._known = level > 0.0
        self._history = array("d", [-1.0]) * WEEK_SLOTS
        self._written = array("q", [-1]) * WEEK_SLOTS  # slot number of each entry
        self._means = array("d", [0.0]) * WEEK_SLOTS  # of the minutes around each
        self._meant = array("q", [-1]) * WEEK_SLOTS
        self._ratios: deque[float] = deque(maxlen=RATIOS)
        self._off = 0  # slots in a row that speak for the other state
        self._last = -1

    def close(self, slot: int, actual: float) -> None:
        """A minute is over. `slot`: its number since the epoch."""
        expected = self.expected(slot)
        if self._known:
            ratio = (actual + self._noise) / (expected + self._noise)
            self._ratios.append(ratio)
            speaks = (ratio > self._params.drift_ratio) != self.broken
            self._off = self._off + 1 if speaks else 0
            if self._off >= self._params.drift_slots:
                self.broken, self._off = not self.broken, 0
            self.level += self._params.level_rate * (actual - self.level)
        else:
            self.level, self._known = actual, True
        self._history[slot % WEEK_SLOTS] = actual
        self._written[slot % WEEK_SLOTS] = slot
        for each in (slot - 2, slot - 1, slot):
            self._smooth(each)
        self._last = slot

    def _smooth(self, slot: int) -> None:
        """The mean of five minutes around one: one minute of yesterday is mostly noise."""
        seen = [
            self._history[each % WEEK_SLOTS]
            for each in range(slot - 2, slot + 3)
            if each >= 0 and self._written[each % WEEK_SLOTS] == each
        ]
        if len(seen) >= 3:
            self._means[slot % WEEK_SLOTS] = sum(seen) / len(seen)
            self._meant[slot % WEEK_SLOTS] = slot

    def _season(self, slot: int) -> float | None:
        week, day = slot - WEEK_SLOTS, slot - DAY_SLOTS
        if self._meant[week % WEEK_SLOTS] == week:
            return self._means[week % WEEK_SLOTS]
        return self._means[day % WEEK_SLOTS] if self._meant[day % WEEK_SLOTS] == day else None

    def seasonal(self, slot: int) -> bool:
        return self._season(slot) is not None

    def expected(self, slot: int) -> float:
        """The mean of that minute."""
        season = self._season(slot)
        return self.level if season is None or self.broken else season * self._scale()

    def coming(self, first: int, slots: int) -> list[float]:
        """The means of so many minutes, without those that have no season; none while the forecast is broken."""
        seasons = [self._season(slot) for slot in range(first, first + slots)]
        scale = self._scale()
        return [] if self.broken else [each * scale for each in seasons if each is not None]

    def _scale(self) -> float:
        """How the present level compares with the season of now."""
        now = self._season(self._last)
        return 1.0 if now is None or now <= 0.0 else min(2.0, max(0.5, self.level / now))

    def quantile(self, q: float, burstiness: float) -> float:
        """What a forecast is multiplied by for the q-quantile of that minute."""
        if len(self._ratios) >= self._params.ratios_min:
            ordered = sorted(self._ratios)
            return max(1.0, ordered[min(len(ordered) - 1, math.ceil(q * len(ordered)) - 1)])
        if self.level <= 0.0:
            return 1.0
        return 1.0 + _Z[q] * math.sqrt(burstiness / (self.level * SLOT_S))


_Z = {0.8: 0.84, 0.9: 1.28}


class Outlook(Struct, frozen=True):
    """What is expected of a pool's priority work."""

    per_s: float = 0.0  # arrivals a second
    burstiness: float = 1.0
    jobs: float = 0.0  # in the pool at once, on average of the next minutes
    jobs_q90: float = 0.0
    surge: float = 0.0  # places that priority may need within two seconds beyond those that it has (policy.headroom)
    broken: bool = False
    seasonal: bool = False


class PoolForecast:
    """The estimator of one pool. Fed by the leader: `arrived` for each priority message, `observe` at each look."""

    def __init__(
        self, now_s: float, *, per_s: float = 0.0, burstiness: float = 1.0, params: ForecastParams = ForecastParams()
    ) -> None:
        """`per_s`, `burstiness`: as the plan of the leader before said."""
        self.rate = Series(per_s, params, noise=0.1)
        self.jobs = Series(0.0, params, noise=0.5)
        self._params = params
        self._burstiness = burstiness
        self._slot = int(now_s // SLOT_S)
        self._arrivals = 0
        self._began_s = now_s
        self._job_s = 0.0
        self._here = 0
        self._seen_s = now_s
        self._windows: deque[int] = deque(maxlen=WINDOWS)
        self._window = int(now_s // COUNT_S)
        self._in_window = 0

    def arrived(self, now_s: float) -> None:
        self._roll_window(now_s)
        self._in_window += 1
        self._arrivals += 1

    def observe(self, jobs: int, now_s: float) -> None:
        """So many priority jobs are ready or run."""
        self._roll_window(now_s)
        span_s = max(0.0, now_s - self._seen_s)
        self._job_s += jobs * span_s
        self._here = jobs
        self._seen_s = max(self._seen_s, now_s)
        slot = int(now_s // SLOT_S)
        if slot == self._slot:
            return
        seen_s = max(1.0, now_s - self._began_s)
        if seen_s >= SLOT_S / 2:  # less says too little; a longer pause of the looks counts for its last minute
            self.rate.close(slot - 1, self._arrivals / seen_s)
            self.jobs.close(slot - 1, self._job_s / seen_s)
        self._slot, self._arrivals, self._job_s, self._began_s = slot, 0, 0.0, now_s

    def _roll_window(self, now_s: float) -> None:
        window = int(now_s // COUNT_S)
        missed = window - self._window
        if missed <= 0:
            return
        self._windows.append(self._in_window)
        self._windows.extend([0] * min(missed - 1, WINDOWS))
        self._window, self._in_window = window, 0

    @property
    def burstiness(self) -> float:
        """F of the last five minutes; before there are some windows with arrivals, what was known before."""
        total = sum(self._windows)
        if len(self._windows) < 15 or total < 10:
            return self._burstiness
        return dispersion(list(self._windows))

    @property
    def broken(self) -> bool:
        return self.jobs.broken or self.rate.broken

    def outlook(self, lead_s: float) -> Outlook:
        """For the time from now until `lead_s` from now."""
        slots = range(self._slot, self._slot + max(1, math.ceil(lead_s / SLOT_S)) + 1)
        burstiness = self.burstiness
        jobs = max(self.jobs.expected(slot) for slot in slots)
        per_s = max(self.rate.expected(self._slot), self._this_minute())
        return Outlook(
            per_s=per_s,
            burstiness=burstiness,
            jobs=jobs,
            jobs_q90=jobs * self.jobs.quantile(0.9, burstiness) if jobs > 0.0 else 0.0,
            surge=expected_jobs(list(self._windows), self._stay_s, self._here, COUNT_S, Z),
            broken=self.broken,
            seasonal=self.jobs.seasonal(self._slot),
        )

    @property
    def _stay_s(self) -> float:
        """Mean time of a priority job in the pool, by Little's law; 0: not known."""
        return self.jobs.level / self.rate.level if self.rate.level > 0.0 else 0.0

    def _this_minute(self) -> float:
        """Arrivals of the running minute, once they say something: a burst need not wait for the minute's end."""
        span_s = self._seen_s - self._began_s
        return self._arrivals / span_s if span_s >= 10.0 else 0.0

    def coming(self, slots: int, places_of_worker: int, q: float = 0.8) -> Sequence[float]:
        """Priority demand of the next minutes in workers, the q-quantile; empty without a season, or broken."""
        coming = () if self.broken else self.jobs.coming(self._slot, min(slots, DAY_SLOTS))
        if len(coming) < min(slots, DAY_SLOTS):
            return ()
        factor = self.jobs.quantile(q, self.burstiness) / max(1, places_of_worker)
        return [each * factor for each in coming]
