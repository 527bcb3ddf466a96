"""How many places a worker keeps free for priority jobs that have not come yet: learned from how they came.

Formula. Arrivals are counted in windows of tau seconds over the last five minutes. With their rate lambda and their
index of dispersion F (variance / mean of the counts, bounded to [1, 50]: 1 is Poisson, bursts are more),

    N = lambda tau + z sqrt(F lambda tau),    or the empirical 99th percentile of the windows, if that is more
    slots = ceil(N / workers),    KV = slots x p90(prompt + output of priority jobs)

where tau is the time in which a place can be freed, as far as jobs stay that long: with a mean stay of s it is
m = min(tau, s), the window's percentile is scaled by m / tau, and of the priority jobs that are here the share m / s
leaves meanwhile, which is taken off. (The reference does without: where jobs are shorter than tau it would keep the
same place free for several jobs that use it one after the other, and keep whole workers empty.) At most half of a
worker's slots and KV are kept: preemption is the backstop for what is rarer.

Source: reference policy (b4), z = 2.33 for one in a hundred. Units: seconds, slots, tokens. What is not used fades:
five minutes after the last priority job nothing is kept but the floor that the settings say. Complexity: O(1) an
arrival, O(windows log windows) to ask. Failure mode: learned on a quiet night it keeps the floor only, and the first
burst of the morning meets lower work (preemption); a worker that takes no priority jobs learns none.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from msgspec import Struct

SPAN_S = 300.0  # of arrivals that count
DISPERSION_MIN, DISPERSION_CAP = 1.0, 50.0
SIZES_KEPT = 200
KEPT_SHARE = 0.5  # most of a worker that is kept free


@dataclass(frozen=True, slots=True)
class HeadroomParams:
    window_s: float = 2.0  # tau
    z: float = 2.33  # 0: nothing is learned, the floor alone holds
    slots_min: int = 0  # the floor

    def __post_init__(self) -> None:
        if not 0.1 <= self.window_s <= 60.0:
            raise ValueError("window_s must be from 0.1 to 60")
        if not self.z >= 0.0:
            raise ValueError("z must be at least 0")
        if not self.slots_min >= 0:
            raise ValueError("slots_min must be at least 0")


class Kept(Struct, frozen=True):
    slots: int = 0
    kv_tokens: int = 0


class Arrivals:
    """Owned by one worker: when priority jobs came, how large they were, and how long they stayed."""

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._windows: deque[tuple[int, int]] = deque()  # number of the window, arrivals in it; empty ones left out
        self._began: int | None = None  # the window in which looking began
        self._sizes: deque[int] = deque(maxlen=SIZES_KEPT)
        self._stay_s = 0.0
        self._stays = 0

    def arrived(self, now_s: float) -> None:
        """A priority job came."""
        window = self._look(now_s)
        if self._windows and self._windows[-1][0] == window:
            self._windows[-1] = window, self._windows[-1][1] + 1
        else:
            self._windows.append((window, 1))

    def left(self, tokens: int, stay_s: float) -> None:
        """One ended, with so many tokens of prompt and output, so long after it came."""
        self._sizes.append(tokens)
        self._stays += 1
        self._stay_s += (max(0.0, stay_s) - self._stay_s) * max(0.05, 1.0 / self._stays)

    @property
    def stay_s(self) -> float:
        """Mean time that a job stays; 0: not known."""
        return self._stay_s

    @property
    def size_p90_tokens(self) -> int:
        return sorted(self._sizes)[int(0.9 * (len(self._sizes) - 1))] if self._sizes else 0

    def counts(self, now_s: float) -> list[int]:
        """Arrivals of each whole window, empty ones included; the present one is left out unless it is the first."""
        window = self._look(now_s)
        assert self._began is not None
        first = max(self._began, window - int(SPAN_S / self.window_s) + 1)
        last = max(window - 1, first)
        by_window = dict(self._windows)
        return [by_window.get(each, 0) for each in range(first, last + 1)]

    def _look(self, now_s: float) -> int:
        window = int(now_s // self.window_s)
        if self._began is None:
            self._began = window
        while self._windows and self._windows[0][0] <= window - SPAN_S / self.window_s:
            self._windows.popleft()
        return window


def dispersion(counts: list[int]) -> float:
    """Index of dispersion of counts: 1 where there are too few to tell."""
    mean = sum(counts) / len(counts) if counts else 0.0
    if len(counts) < 2 or mean <= 0.0:
        return DISPERSION_MIN
    variance = math.fsum((count - mean) ** 2 for count in counts) / (len(counts) - 1)
    return min(DISPERSION_CAP, max(DISPERSION_MIN, variance / mean))


def expected_jobs(counts: list[int], stay_s: float, here: int, window_s: float, z: float) -> float:
    """N less what leaves: places that priority may need within the window beyond those that it has."""
    if not counts or not any(counts):
        return 0.0
    span_s = min(window_s, stay_s) if stay_s > 0.0 else window_s
    share = span_s / window_s
    mean = sum(counts) / len(counts) * share
    surge = mean + z * math.sqrt(dispersion(counts) * mean)
    empirical = sorted(counts)[math.ceil(0.99 * len(counts)) - 1] * share
    leaving = here * span_s / stay_s if stay_s > 0.0 else 0.0
    return max(0.0, max(surge, empirical) - leaving)


def headroom(
    arrivals: Arrivals, now_s: float, *, here: int, slots: int, kv_tokens: int, params: HeadroomParams, workers: int = 1
) -> Kept:
    """What lower lanes leave free now. `here`: priority jobs of the worker; `workers`: among which arrivals divide."""
    learned = 0
    if params.z > 0.0:
        jobs = expected_jobs(arrivals.counts(now_s), arrivals.stay_s, here, arrivals.window_s, params.z)
        learned = min(math.ceil(jobs / max(1, workers) - 1e-9), int(KEPT_SHARE * slots))
    kept = max(params.slots_min, learned)
    return Kept(kept, min(int(KEPT_SHARE * kv_tokens), learned * arrivals.size_p90_tokens))
