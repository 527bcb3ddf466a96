"""Which prompt beginnings and sessions a worker's prefix cache is most likely to hold: those that it ran most of late.

Space-saving counts (Metwally 2005) of the affinity keys of started runs: with COUNTED counters, a key that made more
than 1 / COUNTED of the runs is among them, and no count is too high by more than that share. Counts halve every
HALF_LIFE runs, so that what is not asked for any more is forgotten, as the cache forgets it. It says nothing of single
blocks: an engine evicts as it likes, and does not tell.
"""

from __future__ import annotations

from heapq import nsmallest

from laneway.core.fleet import HOT_PREFIXES_MAX
from laneway.policy.affinity import prefix_hash

COUNTED = 4 * HOT_PREFIXES_MAX
HALF_LIFE = 1024  # runs
FORGOTTEN = 0.5  # counts below are dropped


class HotPrefixes:
    """One worker's. `top` is what its lease shows."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}
        self._left = HALF_LIFE

    def met(self, key: str) -> None:
        """A run of this affinity key has started; empty: of none. O(1), but O(COUNTED) for a key that is new to it."""
        if not key:
            return
        counts = self._counts
        if key in counts or len(counts) < COUNTED:
            counts[key] = counts.get(key, 0.0) + 1.0
        else:
            coldest = min(counts, key=lambda each: counts[each])
            counts[key] = counts.pop(coldest) + 1.0
        self._left -= 1
        if not self._left:
            self._left = HALF_LIFE
            self._counts = {each: count / 2 for each, count in counts.items() if count / 2 >= FORGOTTEN}

    def top(self) -> tuple[int, ...]:
        """Hashes of at most HOT_PREFIXES_MAX keys, hottest first."""
        hottest = nsmallest(HOT_PREFIXES_MAX, self._counts.items(), key=lambda item: (-item[1], item[0]))
        return tuple(prefix_hash(key) for key, _ in hottest)

    def clear(self) -> None:
        """The engine was started anew: its cache is empty."""
        self._counts.clear()
