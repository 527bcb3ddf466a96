"""Prices of steps: a run of them as a line is the sum of its steps, and a step is what its table says."""

from __future__ import annotations

import random
from bisect import bisect_left

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from laneway.core.fleet import StepTimes
from laneway.runtime.engine_profile import (
    DecodeTimes,
    EngineFigures,
    EngineProfile,
    PrefillTimes,
    load_profile,
)
from laneway.runtime.step_price import FOREVER, FixedPace, LinearPrice, ProfilePrice

H100 = load_profile("h100-8b-fp8")
BENT = EngineProfile(  # attention that is cheaper, then dearer than a full chunk's share
    PrefillTimes([16, 100, 200, 450, 1000], [5.0, 9.0, 12.0, 14.0, 60.0]),
    DecodeTimes([2, 5, 9], [10, 37, 200], [[1.0, 2.0, 9.0], [1.5, 2.0, 20.0], [4.0, 4.5, 21.0]]),
    100_000,
)
MEASURED = replace(
    BENT, engine=EngineFigures(engine="x", step_times=StepTimes(1e-3, 1e-4, 1e-6, 7e-5), chunk_tokens=150)
)
ONE = EngineProfile(PrefillTimes([10], [3.0]), DecodeTimes([4], [100], [[2.0]]), 1000)
PROFILES = {"h100": H100, "bent": BENT, "measured": MEASURED, "one": ONE}


def between(xs, ys, x: float) -> float:
    """The line through the two points around x; constant before the first, the last line beyond the last."""
    if x <= xs[0] or len(xs) == 1:
        return ys[0]
    right = min(bisect_left(xs, x), len(xs) - 1)
    share = (x - xs[right - 1]) / (xs[right] - xs[right - 1])
    return ys[right - 1] * (1.0 - share) + ys[right] * share


def by_the_table(profile: EngineProfile, prefill, decode) -> float:
    """Seconds of a step, read from the profile's tables one after the other."""
    pre, dec, full = profile.prefill, profile.decode, profile.full_tokens
    ms = 0.0
    if decode:
        mean = sum(decode) / len(decode)
        ms += between(dec.batch, [between(dec.context, row, mean) for row in dec.ms], len(decode))
    if prefill:
        new = sum(n for _, n in prefill)
        rate_ms = between(pre.new_tokens, pre.ms, full) / full
        alone_ms = between(pre.new_tokens, pre.ms, new)
        measured_ms = profile.engine.step_times.prefill_token_s * 1e3 if profile.engine is not None else 0.0
        beside_ms = measured_ms * new if measured_ms else min(alone_ms, new * rate_ms)
        ms += beside_ms if decode and new <= full else alone_ms
        for context, n in prefill:
            if context >= full:
                upto, before = (between(pre.new_tokens, pre.ms, tokens) for tokens in (context + n, context))
                more_ms = upto - before - n * rate_ms
                ms += max(0.0, more_ms) if decode else more_ms
    return ms / 1e3


each_profile = pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)


@each_profile
def test_a_step_costs_what_the_table_says(profile: EngineProfile):
    draw = random.Random(1)
    price = ProfilePrice(profile)
    for _ in range(3000):
        decode = [draw.randrange(1, draw.choice([60, 4000]))] * draw.randrange(0, 12)
        prefill = [
            (draw.randrange(0, draw.choice([300, 6000])), draw.randrange(1, 300)) for _ in range(draw.randrange(3))
        ]
        assert price.step_s(prefill, decode) == pytest.approx(by_the_table(profile, prefill, decode), abs=1e-12)


PRICES: dict[str, FixedPace | LinearPrice | ProfilePrice] = {
    name: ProfilePrice(profile) for name, profile in PROFILES.items()
}
PRICES |= {"linear": LinearPrice(StepTimes(0.004, 5e-5, 2e-8, 1.6e-5)), "pace": FixedPace(0.02)}


@pytest.mark.parametrize("price", PRICES.values(), ids=PRICES)
@settings(max_examples=50, deadline=None)
@given(
    batch=st.integers(0, 12), context=st.integers(1, 600), begin=st.integers(0, 1500), new=st.integers(0, 120),
)  # fmt: skip
def test_as_far_as_a_line_holds_its_steps_cost_what_they_do_one_by_one(price, batch, context, begin, new):
    if not batch and not new:
        return
    held = context * batch + batch // 2
    for _ in range(40):  # lines in a row
        line = price.line([(begin, new)] if new else [], batch, held)
        assert 1 <= line.steps <= FOREVER
        last = min(line.steps, 300) - 1
        for step in (0, last // 2, last):
            prefill = [(begin + step * new, new)] if new else []
            contexts = [held // batch + step + (i < held % batch) for i in range(batch)]
            assert line.first_s + step * line.grow_s == pytest.approx(price.step_s(prefill, contexts), abs=1e-12)
        if line.steps > 10**9:  # the last, without end
            return
        begin, held = begin + line.steps * new, held + line.steps * batch


def test_lines_are_long():
    """Some for each point of a table, not some for each step: that is what makes a simulation cheap."""
    price, lines, held, begin = ProfilePrice(H100), 0, 64 * 100, 0
    while held < 64 * 60_000:
        steps = price.line([(begin, 256)] if begin < 60_000 else [], 64, held).steps
        held, begin, lines = held + 64 * min(steps, 60_000), begin + 256 * min(steps, 60_000), lines + 1
    assert lines < 40


def test_several_pieces_are_one_step():
    for price in (ProfilePrice(H100), LinearPrice(StepTimes(0.004, 5e-5, 2e-8, 1.6e-5))):
        assert price.line([(0, 10), (0, 20)], 3, 500).steps == 1
