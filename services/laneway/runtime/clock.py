"""The clock of a running process: the only place that reads the time modules. Tests pass a ManualClock instead."""

from __future__ import annotations

import time


class SystemClock:
    """laneway.core.clock.Clock over the operating system's clocks."""

    now = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)
