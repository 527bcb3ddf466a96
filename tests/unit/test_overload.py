"""When priority misses its targets at a worker: slow tokens, or waits for a worker that take half the TTFT target."""

from __future__ import annotations

import pytest

from laneway.policy.overload import OverloadParams, Waits, overloaded

PARAMS = OverloadParams(ttft_target_s=1.0, tpot_target_s=0.1)


def missed(waits: Waits | None = None, *, waiting_s: float = 0.0, tpot_p95_s: float = 0.0, now_s: float = 10.0) -> bool:
    return overloaded(waits or Waits(), waiting_s=waiting_s, tpot_p95_s=tpot_p95_s, now_s=now_s, params=PARAMS)


@pytest.mark.parametrize(("tpot_p95_s", "wanted"), [(0.0, False), (0.1, False), (0.11, True)])
def test_slow_tokens_are_an_overload(tpot_p95_s: float, wanted: bool):
    assert missed(tpot_p95_s=tpot_p95_s) is wanted


@pytest.mark.parametrize(("waiting_s", "wanted"), [(0.0, False), (0.5, False), (0.51, True)])
def test_a_wait_of_more_than_half_the_target_is_an_overload(waiting_s: float, wanted: bool):
    assert missed(waiting_s=waiting_s) is wanted


def test_the_wait_of_the_last_job_counts_for_a_while_against_its_own_target():
    waits = Waits()
    waits.heard(3.0, ttft_target_s=4.0, now_s=10.0)
    assert missed(waits)
    assert missed(waits, now_s=15.0)
    assert not missed(waits, now_s=15.1)
    waits.heard(1.0, ttft_target_s=4.0, now_s=16.0)
    assert not missed(waits, now_s=16.0)
