"""Seeds until stopped: SOAK_S bounds the seconds, SOAK_SEED says where to begin. Ctrl-C ends it with a summary."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections import Counter
from random import SystemRandom

import psutil
import pytest

from tests.sim.system.run import Report, simulate

SOAK_S = float(os.environ.get("SOAK_S", "0")) or float("inf")
WARM_UP = 30  # runs, until caches have their size
KEPT_BYTES_A_RUN_MAX = 64 * 1024  # of some 1,000,000 that a run takes while it lasts


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_seeds_until_stopped(capsys: pytest.CaptureFixture[str]):
    first = int(os.environ.get("SOAK_SEED", "0")) or SystemRandom().randrange(1_000, 1_000_000_000)
    failed: list[Report] = []
    ends: Counter[str] = Counter()
    began_s, seed, base = time.monotonic(), first, 0
    stopped: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: stopped.append(number))
    try:
        while not stopped and time.monotonic() - began_s < SOAK_S:
            report = simulate(seed)
            ends.update(report.ended)
            seed += 1
            if seed - first == WARM_UP:
                base = used_bytes()
            with capsys.disabled():
                if report.complaints:
                    failed.append(report)
                    print(f"\n{report}\n", flush=True)
                print(f"\r{seed - first} seeds from {first}, {len(failed)} failed", end="", flush=True)
    finally:
        signal.signal(signal.SIGINT, before)
    runs = seed - first
    with capsys.disabled():
        print(f"\n{runs} runs of {(time.monotonic() - began_s) / runs:.2f} s; jobs ended: {dict(ends)}")
    assert not failed, f"seeds that failed: {[report.seed for report in failed]}"
    if runs > 4 * WARM_UP:
        kept = (used_bytes() - base) / (runs - WARM_UP)
        assert kept < KEPT_BYTES_A_RUN_MAX, f"{kept:.0f} bytes are kept of each run"


def used_bytes() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss
