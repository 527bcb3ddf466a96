"""What a worker says of its own speed."""

from laneway.workers.rates import PREFILL_SAMPLE_TOKENS_MIN, Rates


def test_short_prompts_do_not_make_a_fast_engine_look_slow():
    rates = Rates(prefill_prior=10_000.0)
    rates.prefilled(24, 0.015)  # one step
    assert rates.prefill_tokens_per_s == 0.0  # not measured: the prior stands
    rates.prefilled(4 * PREFILL_SAMPLE_TOKENS_MIN, 0.1)
    assert rates.prefill_tokens_per_s == 40 * PREFILL_SAMPLE_TOKENS_MIN
    rates.prefilled(24, 0.015)
    assert rates.prefill_tokens_per_s == 40 * PREFILL_SAMPLE_TOKENS_MIN


def test_a_short_prompt_may_show_that_the_prior_is_too_low():
    rates = Rates(prefill_prior=1000.0)
    rates.prefilled(100, 0.02)
    assert rates.prefill_tokens_per_s == 5000.0
