"""The interference budget: credit, guard, slices and pace follow what they should, and never go beyond it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from laneway.core.fleet import StepTimes
from laneway.policy import interference as policy
from laneway.policy.interference import Decoder, InterferenceParams, Load, Prompt

# The embedded engine on two quiet cores, and Llama 3.1 8B on an H100: chunk 128 and 512.
CPU = StepTimes(0.0083, 0.00079, 0.0, 0.00035, 128)
H100 = StepTimes(0.0051, 0.00003, 2.2e-8, 0.0000168, 512)
PARAMS = InterferenceParams()


def busy(times: StepTimes = H100, **changes: Any) -> Load:
    """Sixteen chats of priority, half a thousand tokens each."""
    values: dict[str, Any] = {
        "times": times, "tpot_target_s": 0.05, "ttft_target_s": 1.0, "block_tokens": 32, "decoding": 16,
        "context_tokens": 8000, "priority": 16, "priority_decoding": 16, "priority_context": 8000, "recent": True,
    }  # fmt: skip
    return Load(**(values | changes))


IDLE = Load(H100, 0.05, 1.0, 32)

times_drawn = st.builds(
    StepTimes, st.floats(0.0, 0.1), st.floats(0.0, 0.01), st.floats(0.0, 1e-6), st.floats(0.0, 0.002),
    st.sampled_from((0, 64, 128, 512, 2048)),
)  # fmt: skip
loads = st.builds(
    Load, times_drawn, st.floats(0.001, 1.0), st.floats(0.01, 60.0),
    block_tokens=st.sampled_from((1, 32, 64)), decoding=st.integers(0, 256), context_tokens=st.integers(0, 500_000),
    priority=st.integers(0, 64), priority_decoding=st.integers(0, 64), recent=st.booleans(), strict=st.booleans(),
    phi_priority=st.floats(0.0, 1.0), lower_prompt_tokens=st.integers(0, 20_000),
)  # fmt: skip


class TestCredit:
    def test_a_share_of_steps_may_carry_a_chunk_as_far_as_the_target_allows(self):
        load = busy(CPU, tpot_target_s=0.05, decoding=4, context_tokens=400, priority=4)
        step_s = CPU.decode_s(4)
        assert policy.phi_max(load, 0.8, PARAMS) == pytest.approx((0.04 - step_s) / (0.00035 * load.chunk_tokens))

    def test_without_priority_here_nothing_limits_it(self):
        assert policy.phi_max(IDLE, 0.8, PARAMS) == 1.0
        assert policy.refilled(-500.0, 0.0, IDLE, 0.8, PARAMS) == policy.depth_tokens(IDLE, PARAMS)

    def test_strict_leaves_about_what_the_reference_computed_for_an_h100(self):
        """64 decodes at +5 %: about 2,300 prompt tokens a second against 41,000 alone."""
        load = busy(strict=True, decoding=64, context_tokens=64_000, priority=64, priority_decoding=64)
        load = replace(load, priority_context=64_000)
        assert 1500 < policy.credit_rate(load, 0.8, PARAMS) < 3500
        assert policy.credit_rate(busy(decoding=64, context_tokens=64_000, priority=64), 0.8, PARAMS) > 25_000

    @given(loads, st.floats(0.5, 0.9))
    def test_the_share_stays_in_its_bounds_and_falls_with_more_sequences(self, load, theta):
        phi = policy.phi_max(load, theta, PARAMS)
        assert policy.PHI_MIN <= phi <= 1.0
        more = replace(load, decoding=load.decoding + 1)
        assert policy.phi_max(more, theta, PARAMS) * more.chunk_tokens <= phi * load.chunk_tokens + 1e-6, (
            "tokens a step"
        )
        assert policy.phi_max(load, min(0.9, theta + 0.05), PARAMS) >= phi - 1e-9
        assert policy.credit_rate(load, theta, PARAMS) > 0.0

    @given(loads, st.lists(st.tuples(st.floats(0.0, 5.0), st.integers(0, 5000), st.floats(0.3, 3.0)), max_size=30))
    def test_debt_never_goes_beyond_q_nor_credit_beyond_its_depth(self, load, events):
        credit = 0.0
        for passed_s, left, factor in events:
            credit = policy.refilled(credit, passed_s, load, 0.8, PARAMS)
            assert credit <= max(policy.depth_tokens(load, PARAMS), 0.0) + 1e-6
            tokens = policy.may_submit(Prompt(left), credit, load, PARAMS) if left else 0
            q = policy.guard_tokens(load, PARAMS)
            if load.priority:
                assert credit - tokens >= -q - 1e-6, "a slice never leads beyond the debt by itself"
            credit = policy.charged(credit, tokens * factor, load, PARAMS)
            assert credit >= -q

    @given(loads, st.floats(-5000.0, 5000.0), st.floats(0.0, 3.0), st.floats(0.0, 3.0))
    def test_more_time_never_gives_less_credit(self, load, credit, first_s, more_s):
        one = policy.refilled(credit, first_s, load, 0.8, PARAMS)
        assert policy.refilled(credit, first_s + more_s, load, 0.8, PARAMS) >= one - 1e-6

    def test_as_much_is_saved_up_as_may_be_owed_within_some_chunks(self):
        for load in (busy(), busy(CPU), busy(strict=True)):
            guard, chunk = policy.guard_tokens(load, PARAMS), load.chunk_tokens
            assert policy.depth_tokens(load, PARAMS) == min(max(guard, 2 * chunk), 8 * chunk)
        assert policy.depth_tokens(busy(strict=True), PARAMS) == 2 * busy().chunk_tokens


class TestGuard:
    def test_what_is_submitted_takes_a_quarter_of_the_ttft_target_at_most(self):
        for load in (busy(CPU), busy(H100), IDLE):
            q = policy.guard_tokens(load, PARAMS)
            whole_s = q * load.times.prefill_token_s + q / load.chunk_tokens * load.step_s
            assert 0.2 * load.ttft_target_s < whole_s <= 0.25 * load.ttft_target_s

    def test_strict_is_one_chunk(self):
        load = busy(strict=True)
        assert policy.guard_tokens(load, PARAMS) == load.chunk_tokens == 480

    @given(loads)
    def test_it_is_whole_blocks_and_at_least_one(self, load):
        q = policy.guard_tokens(load, PARAMS)
        assert q >= load.block_tokens
        assert q % load.block_tokens == 0

    @given(loads, st.floats(-1000.0, 4000.0), st.integers(1, 20_000))
    def test_no_slice_goes_beyond_it_nor_beyond_a_chunk_while_priority_is_near(self, load, credit, left):
        tokens = policy.may_submit(Prompt(left), credit, load, PARAMS)
        assert 0 <= tokens <= left
        if tokens:
            assert load.lower_prompt_tokens + tokens <= policy.guard_tokens(load, PARAMS)
        if tokens and load.recent:
            assert tokens <= policy.blocks(load.chunk_tokens, load.block_tokens)
        if 0 < tokens < left:
            assert tokens % load.block_tokens == 0

    @given(loads)
    def test_a_prompt_with_credit_and_nothing_before_it_always_goes_on(self, load):
        assert policy.may_submit(Prompt(5000), 1.0, replace(load, lower_prompt_tokens=0), PARAMS) > 0

    @given(loads, st.integers(0, 20_000))
    def test_with_full_credit_it_goes_on_also_where_priority_prompts_fill_the_chunk(self, load, priority_tokens):
        load = replace(load, lower_prompt_tokens=0, priority_prompt_tokens=priority_tokens)
        assert policy.may_submit(Prompt(5000), policy.depth_tokens(load, PARAMS), load, PARAMS) >= load.block_tokens


class TestWhole:
    """Prompts that the engine's cache does not find again."""

    def test_a_short_one_goes_like_any_slice(self):
        assert policy.may_submit(Prompt(100, in_slices=False), 1.0, busy(), PARAMS) == 100

    def test_a_long_one_waits_until_priority_was_gone_for_a_while(self):
        long = Prompt(50_000, in_slices=False)
        assert policy.may_submit(long, 1024.0, busy(), PARAMS) == 0
        assert policy.may_submit(long, 1024.0, replace(IDLE, recent=True), PARAMS) == 0
        assert policy.may_submit(long, 1024.0, IDLE, PARAMS) == 50_000

    def test_on_a_bulk_pool_it_saves_up_for_all_that_would_go_beyond_the_debt(self):
        bulk, load = Prompt(50_000, in_slices=False, bulk=True), busy()
        need = policy.credit_needed(bulk, load, PARAMS)
        assert need == 50_000 - policy.guard_tokens(load, PARAMS)
        assert policy.may_submit(bulk, need - 1.0, load, PARAMS) == 0
        assert policy.may_submit(bulk, need, load, PARAMS) == 50_000
        assert policy.charged(need, 50_000, load, PARAMS) == -policy.guard_tokens(load, PARAMS)
        assert policy.refilled(1024.0, 1e6, load, 0.8, PARAMS, depth=need) == need

    def test_without_the_budget_everything_goes_at_once(self):
        off = InterferenceParams(budget=False)
        assert policy.may_submit(Prompt(50_000, in_slices=False), -1e9, busy(strict=True), off) == 50_000


class TestJoining:
    def test_one_more_sequence_is_refused_where_it_alone_would_break_the_target(self):
        load = busy(CPU, tpot_target_s=0.025, decoding=13, context_tokens=0)
        assert policy.may_join(100.0, 0, load, 0.8, PARAMS) == policy.OPEN
        assert policy.may_join(100.0, 0, replace(load, decoding=14), 0.8, PARAMS) == policy.TPOT
        assert policy.may_join(100.0, 0, replace(load, decoding=14, priority=0), 0.8, PARAMS) == policy.OPEN

    def test_a_job_joins_for_the_credit_of_the_next_step_and_the_time_until_then_is_told(self):
        load = busy(CPU)
        paid = policy.credit_step(load, 0.8, PARAMS)
        assert 0.0 < paid < load.chunk_tokens
        assert policy.may_join(1.0 - paid, 0, load, 0.8, PARAMS) == policy.OPEN
        assert policy.join_in_s(1.0 - paid, load, 0.8, PARAMS) is None
        wait_s = policy.join_in_s(-paid - 100.0, load, 0.8, PARAMS)
        assert wait_s is not None
        soon = policy.refilled(-paid - 100.0, wait_s + 1e-6, load, 0.8, PARAMS)
        assert policy.may_join(soon, 0, load, 0.8, PARAMS) == policy.OPEN
        assert policy.may_join(soon - 1.0, 0, load, 0.8, PARAMS) == policy.BUDGET

    def test_what_is_in_the_way_is_named(self):
        assert policy.may_join(1.0, 1, busy(), 0.8, PARAMS) == policy.GUARD
        assert policy.may_join(-busy().chunk_tokens, 0, busy(), 0.8, PARAMS) == policy.BUDGET
        assert policy.may_join(1.0, 0, busy(lower_prompt_tokens=100_000), 0.8, PARAMS) == policy.GUARD

    def test_the_floor_passes_the_target_and_credit_but_neither_full_debt_nor_the_guard(self):
        load = busy(CPU, tpot_target_s=0.001)
        q = policy.guard_tokens(load, PARAMS)
        assert policy.may_join(1.0, 0, load, 0.8, PARAMS) == policy.TPOT
        assert policy.floor_may_join(-q + 1.0, 0, load, PARAMS)
        assert not policy.floor_may_join(-q, 0, load, PARAMS)
        assert not policy.floor_may_join(1.0, 0, replace(load, lower_prompt_tokens=q), PARAMS)
        assert not policy.floor_may_join(1.0, 1, load, PARAMS)


def chat(
    made: int = 100, left: int = 100, tpot_s: float = 0.006, target_s: float = 0.05, *, strict: bool = False
) -> Decoder:
    return Decoder(made, left, made * tpot_s, target_s, strict)


class TestLongPrompts:
    def pace(
        self,
        left: int = 8000,
        time_left_s: float = 1.0,
        sharing: int = 1,
        decoders: Sequence[Decoder] | None = None,
        load: Load | None = None,
        params: InterferenceParams = PARAMS,
    ) -> policy.Pace:
        decoders = [chat()] * 16 if decoders is None else decoders
        return policy.long_prompt(left, time_left_s, sharing, decoders, load or busy(), params, 0.8)

    def test_it_goes_whole_while_everybody_can_afford_it(self):
        assert self.pace() == policy.Pace(8000)

    def test_it_goes_in_chunks_where_it_would_break_somebodys_tokens(self):
        tight = [chat(target_s=0.05)] * 15 + [chat(made=150, left=50, target_s=0.008)]
        pace = self.pace(decoders=tight, time_left_s=4.0)
        assert pace.slice_tokens == busy().chunk_tokens == 480
        assert 8000 / pace.tokens_per_s < 4.0

    def test_its_own_promise_counts_as_much_as_theirs(self):
        tight = [chat(target_s=0.007)]
        slow, fast = self.pace(decoders=tight, time_left_s=8.0), self.pace(decoders=tight, time_left_s=1.0)
        assert 0.0 < slow.tokens_per_s < fast.tokens_per_s
        assert self.pace(decoders=tight, time_left_s=0.1) == policy.Pace(8000), "late already"

    def test_a_strict_one_is_kept_to_what_it_has_alone(self):
        assert self.pace(decoders=[chat(strict=True)], time_left_s=4.0).tokens_per_s > 0.0

    def test_short_prompts_empty_engines_and_switches_leave_it_whole(self):
        tight = [chat(target_s=0.001)]
        assert self.pace(left=480, decoders=tight) == policy.Pace(480)
        assert self.pace(decoders=[]) == policy.Pace(8000)
        assert self.pace(decoders=tight, params=InterferenceParams(slices=False)) == policy.Pace(8000)

    @given(
        st.integers(1, 100_000), st.floats(-10.0, 60.0), st.integers(1, 8), loads,
        st.lists(st.builds(Decoder, st.integers(1, 999), st.integers(0, 999), st.floats(0, 60), st.floats(0.001, 1))),
    )  # fmt: skip
    def test_its_pace_is_sound_and_in_time_whatever_the_load(self, left, time_left_s, sharing, load, decoders):
        pace = self.pace(left, time_left_s, sharing, decoders, load)
        if not pace.tokens_per_s:
            assert pace.slice_tokens == left
            return
        assert 0 < pace.slice_tokens < left
        assert pace.slice_tokens % load.block_tokens == 0
        assert left / pace.tokens_per_s <= time_left_s + pace.slice_tokens / pace.tokens_per_s


class TestTheta:
    def test_it_falls_faster_than_it_rises_and_stays_without_measurements(self):
        assert policy.next_theta(0.8, 1.01, 10.0, PARAMS) == 0.75
        assert abs(policy.next_theta(0.8, 0.99, 10.0, PARAMS) - 0.81) < 1e-9
        assert policy.next_theta(0.8, None, 10.0, PARAMS) == 0.8

    @given(st.floats(0.0, 2.0), st.lists(st.one_of(st.none(), st.floats(0.0, 100.0)), max_size=60))
    def test_it_never_leaves_its_bounds(self, theta, looks):
        for measured in looks:
            theta = policy.next_theta(theta, measured, 10.0, PARAMS)
            assert 0.5 <= theta <= 0.9


@given(loads, st.floats(-2000.0, 2000.0), st.integers(1, 9000))
def test_more_theta_never_closes_what_less_leaves_open(load, credit, left):
    assume(not load.strict)
    if policy.may_join(credit, 0, load, 0.6, PARAMS) == policy.OPEN:
        assert policy.may_join(credit, 0, load, 0.8, PARAMS) == policy.OPEN
