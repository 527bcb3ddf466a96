"""The clock and the chance of a running process: the only place that reads time and entropy modules.

Tests pass a ManualClock, and simulations a seeded Random, instead. Identities are drawn from the same Random, so that a
simulation can be run again exactly.
"""

from __future__ import annotations

import random
import time


class SystemClock:
    """laneway.core.clock.Clock over the operating system's clocks."""

    now = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)


SYSTEM_RANDOM: random.Random = random.SystemRandom()  # jitter, and names that nobody else has: randbytes(n).hex()
