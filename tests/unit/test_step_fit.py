"""The fit of step times: right on what it saw, sane where it saw nothing, and calm when the host hiccups."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laneway.core.fleet import StepTimes
from laneway.policy.step_fit import StepFit, StepSeen
from laneway.runtime.engine_profile import load_profile
from laneway.runtime.step_price import ProfilePrice

TRUE = StepTimes(0.008, 0.0004, 3e-8, 0.00035, 128)
WRONG = StepTimes(0.02, 0.00005, 0.0, 0.001, 128)  # a prior that is off by factors


def drawn(random: Random, times: StepTimes, noise: float = 0.0) -> StepSeen:
    b = random.randint(1, 32)
    context = b * random.randint(50, 3000)
    prompt = random.choice((0, 0, 0, 32, 128))
    length_s = times.step_s(b, context, prompt) * (1.0 + noise * random.gauss(0.0, 1.0))
    return StepSeen(max(1e-4, length_s), b, context, prompt)


def learned(prior: StepTimes, steps: int, seed: int = 1, noise: float = 0.0) -> StepFit:
    fit, random = StepFit(prior), Random(seed)
    for _ in range(steps):
        fit.observe(drawn(random, TRUE, noise))
    return fit


def error(times: StepTimes, true: StepTimes = TRUE) -> float:
    """Largest share by which a step is misjudged, over what is likely."""
    cases = [(b, b * 800, p) for b in (1, 4, 16, 32) for p in (0, 128)]
    return max(abs(times.step_s(*case) / true.step_s(*case) - 1.0) for case in cases)


def test_it_finds_the_true_times_from_a_prior_that_is_off_by_factors():
    fit = learned(WRONG, 400)
    assert error(fit.times) < 0.05
    assert fit.times.prefill_token_s == pytest.approx(TRUE.prefill_token_s, rel=0.05)
    assert fit.times.chunk_tokens == 128


def test_noise_of_a_fifth_costs_little():
    assert error(learned(WRONG, 800, noise=0.2).times) < 0.15


def test_before_any_step_it_is_the_prior():
    assert StepFit(TRUE).times == TRUE


def test_a_hiccup_of_the_host_moves_nothing_much():
    fit, random = learned(TRUE, 300, noise=0.05), Random(7)
    before = fit.times
    for _ in range(3):
        fit.observe(StepSeen(2.0, 8, 6000, 0))
        fit.observe(StepSeen(3.0, 8, 6000, 128))
    worst = error(fit.times, before)
    assert worst < 0.15
    for _ in range(100):
        fit.observe(drawn(random, TRUE, 0.05))
    assert error(fit.times) < 0.1


def test_an_engine_that_really_became_slower_is_followed_within_a_few_seconds():
    fit, random = learned(TRUE, 300, noise=0.05), Random(8)
    slow = StepTimes(TRUE.base_s * 3, TRUE.sequence_s * 3, TRUE.context_token_s * 3, TRUE.prefill_token_s * 3, 128)
    for _ in range(600):
        fit.observe(drawn(random, slow, 0.05))
    assert error(fit.times, slow) < 0.1


def test_a_night_without_prompts_forgets_nothing_of_what_prompts_cost():
    fit, random = learned(WRONG, 400), Random(9)
    known = fit.times.prefill_token_s
    for _ in range(5000):
        b = random.randint(1, 32)
        fit.observe(StepSeen(TRUE.decode_s(b, 800 * b), b, 800 * b, 0))
    assert fit.times.prefill_token_s == known


def test_always_the_same_batch_leaves_the_rest_near_the_prior():
    """What one batch size cannot tell apart is bounded by the prior, however long it goes on."""
    fit = StepFit(TRUE)
    for _ in range(20_000):
        fit.observe(StepSeen(TRUE.decode_s(8, 8 * 500) * 1.02, 8, 8 * 500, 0))
    assert error(fit.times) < 0.1


def test_prompts_alone_count_until_one_beside_decoding_was_seen():
    fit = StepFit(WRONG)
    for _ in range(200):
        fit.observe(StepSeen(WRONG.base_s + 128 * 0.0001, 0, 0, 128))
    assert fit.times.prefill_token_s == pytest.approx(0.0001, rel=0.1)
    for _ in range(30):
        fit.observe(StepSeen(WRONG.decode_s(4, 2000) + 128 * 0.0003, 4, 2000, 128))
        fit.observe(StepSeen(WRONG.base_s + 128 * 0.0001, 0, 0, 128))
    assert fit.times.prefill_token_s == pytest.approx(0.0003, rel=0.3)


def test_where_every_step_has_a_prompt_a_prior_that_is_too_slow_is_not_held_on_to():
    fit, random = StepFit(StepTimes(0.02, 0.0, 0.0, 0.001, 512)), Random(5)
    for _ in range(400):
        b = random.randint(8, 32)
        fit.observe(StepSeen(0.005 + 500 * 0.000017, b, 800 * b, 500))
    assert fit.times.decode_s(16, 12_800) < 0.0145
    assert fit.times.step_s(16, 12_800, 500) == pytest.approx(0.0135, rel=0.1)


def test_an_engine_without_statistics_keeps_the_shape_and_learns_one_ratio():
    fit = StepFit(TRUE)
    for _ in range(200):
        fit.observe_ratio(0.3, 0.2)
    assert fit.ratio == pytest.approx(1.5, rel=0.01)
    assert fit.times.base_s == pytest.approx(TRUE.base_s * 1.5, rel=0.01)
    assert fit.times.prefill_token_s == pytest.approx(TRUE.prefill_token_s * 1.5, rel=0.01)
    assert fit.times.sequence_s / fit.times.base_s == pytest.approx(TRUE.sequence_s / TRUE.base_s)


@settings(max_examples=60)
@given(
    st.lists(
        st.builds(
            StepSeen,
            st.one_of(st.floats(-1.0, 100.0), st.just(float("nan")), st.just(float("inf"))),
            st.integers(0, 300),
            st.integers(0, 500_000),
            st.integers(0, 4096),
        ),
        max_size=60,
    )
)
def test_whatever_it_sees_coefficients_are_finite_and_never_negative(steps):
    fit = StepFit(TRUE)
    for step in steps:
        fit.observe(step)
        times = fit.times
        for value in (times.base_s, times.sequence_s, times.context_token_s, times.prefill_token_s, fit.ratio):
            assert 0.0 <= value < 1e6


def test_it_learns_the_packaged_gpu_profile_well_enough_to_plan_with():
    profile, random = load_profile("h100-8b-fp8"), Random(3)
    price = ProfilePrice(profile)
    fit = StepFit(StepTimes(0.02, 0.0, 0.0, 0.001, 512))
    cases = []
    for _ in range(3000):
        b, context = random.randint(4, 64), random.choice((500, 1000, 2000))
        prompt = random.choice((0, 0, 64, 512 - b))
        step_s = price.step_s([(0, prompt)] if prompt else [], [context] * b)
        fit.observe(StepSeen(step_s, b, b * context, prompt))
        cases.append((b, b * context, prompt, step_s))
    worst = max(abs(fit.times.step_s(*case[:3]) / case[3] - 1.0) for case in cases[-500:])
    assert worst < 0.15
    gamma_s = fit.times.prefill_token_s
    assert gamma_s == pytest.approx(profile.prefill.ms[4] / 2048 / 1e3, rel=0.1), "its share of a full chunk"
