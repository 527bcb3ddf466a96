"""The simulated engine's core under virtual time: what a step holds, what it costs, what it yields."""

import json
import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from laneway.core.errors import ConfigError
from laneway.core.lanes import FinishReason
from laneway.runtime.engine_options import EngineOptions
from laneway.runtime.engine_profile import load_profile
from laneway.runtime.step_price import ProfilePrice
from laneway.runtime.tokenizer import EOS, TURN_END
from laneway.workers.engines.protocol import EngineCapacity, EngineRequest
from laneway.workers.engines.simulated import InjectedCrash, InjectedHang, SimulatedCore, make_core

EOS_IDS = frozenset({EOS, TURN_END})
PACE_S = 0.01


def core(slots=4, kv_tokens=100_000, context_length=50_000, **options: Any) -> SimulatedCore:
    capacity = EngineCapacity(slots, kv_tokens, context_length, 260)
    return make_core(capacity, EOS_IDS, replace(EngineOptions(pace_s=PACE_S), **options))


def request(request_id, prompt=b"a prompt", max_tokens=10, **changes) -> EngineRequest:
    return EngineRequest(request_id, tuple(prompt), max_tokens, **changes)


@dataclass
class Run:
    """A core driven to its end, with what each sequence got and when."""

    core: SimulatedCore
    now_s: float = 0.0
    ids: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    times: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    finish: dict[int, FinishReason] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    batch_max: int = 0

    def step(self) -> None:
        outcome = self.core.step(self.now_s)
        assert outcome.ends_s >= self.now_s
        assert outcome.stats == self.core.stats()
        self.now_s = outcome.ends_s
        self.batch_max = max(self.batch_max, outcome.stats.running)
        for delta in outcome.steps:
            assert delta.id not in self.finish
            self.ids[delta.id] += delta.token_ids
            self.times[delta.id] += [self.now_s] * len(delta.token_ids)
            self.cached[delta.id] += delta.cached_tokens
            if delta.finish is not None:
                self.finish[delta.id] = delta.finish

    def to_end(self) -> "Run":
        while self.core.busy():
            self.step()
        return self

    def prefill_steps(self, request_id: int, **changes) -> int:
        """Steps from joining an idle core to the first token."""
        self.core.add(request(request_id, max_tokens=1, **changes))
        before = self.core.stats().steps
        self.to_end()
        return self.core.stats().steps - before


class TestTokens:
    @given(st.binary(min_size=1, max_size=40), st.integers(0, 19), st.sampled_from(["words", "unicode"]))
    def test_a_run_resumed_anywhere_goes_on_as_if_uninterrupted(self, prompt, kept, alphabet):
        run = Run(core(alphabet=alphabet))
        run.core.add(request(1, prompt, 20))
        whole = run.to_end().ids[1]
        run.core.add(request(2, bytes([*prompt, *whole[:kept]]), 20 - kept))
        assert run.to_end().ids[2] == whole[kept:]

    def test_company_in_the_batch_changes_nothing(self):
        alone = Run(core())
        alone.core.add(request(0))
        together = Run(core(slots=16))
        for i in range(16):
            together.core.add(request(i, b"a prompt" + bytes(i)))
        assert together.to_end().ids[0] == alone.to_end().ids[0]
        assert len({tuple(ids) for ids in together.ids.values()}) == 16

    def test_words_are_lower_case_ascii(self):
        run = Run(core())
        run.core.add(request(1, max_tokens=500))
        text = bytes(run.to_end().ids[1]).decode()
        assert set(text) <= set("abcdefghijklmnopqrstuvwxyz ")
        assert "  " not in text

    def test_unicode_is_sound_and_has_characters_of_every_length(self):
        run = Run(core(alphabet="unicode"))
        run.core.add(request(1, max_tokens=500))
        text = bytes(run.to_end().ids[1]).decode(errors="ignore")
        assert {len(c.encode()) for c in text} == {1, 2, 3, 4}
        assert len(text.encode()) >= 497  # the end may cut a character and nothing else is unsound

    def test_a_seed_counts_where_tokens_are_drawn(self):
        run = Run(core())
        for i, (seed, temperature) in enumerate([(1, 1.0), (1, 1.0), (2, 1.0), (1, 0.0), (None, 1.0)]):
            run.core.add(request(i, seed=seed, temperature=temperature))
        ids = run.to_end().ids
        assert ids[0] == ids[1] != ids[2]
        assert ids[3] == ids[4] != ids[0]

    def test_log_probabilities_come_with_each_token_when_asked(self):
        engine = core()
        engine.add(request(1, logprobs=True, top_logprobs=3, max_tokens=1))
        (delta,) = engine.step(0.0).steps
        assert delta.logprobs is not None
        assert delta.top is not None
        assert delta.top[0][0] == (delta.token_ids[0], delta.logprobs[0])
        assert [p for _, p in delta.top[0]] == sorted((p for _, p in delta.top[0]), reverse=True)
        assert len({i for i, _ in delta.top[0]}) == 3


class TestEnds:
    def test_an_answer_goes_on_to_max_tokens(self):
        run = Run(core())
        run.core.add(request(1, max_tokens=300))
        assert len(run.to_end().ids[1]) == 300
        assert run.finish[1] is FinishReason.LENGTH

    def test_a_stop_token_ends_it_and_is_not_among_its_ids(self):
        run = Run(core())
        run.core.add(request(1, max_tokens=50))
        whole = run.to_end().ids[1]
        run.core.add(request(2, max_tokens=50, stop_token_ids=(whole[7],)))
        assert run.to_end().ids[2] == whole[: whole.index(whole[7])]
        assert run.finish[2] is FinishReason.STOP

    def test_answers_end_by_themselves_about_where_they_should(self):
        run = Run(core(slots=200, eos_mean_tokens=20))
        for i in range(200):
            run.core.add(request(i, b"p%d" % i, 1000))
        run.to_end()
        assert 14 < sum(map(len, run.ids.values())) / 200 < 27
        assert set(run.finish.values()) == {FinishReason.STOP}

    def test_ignore_eos_and_min_tokens_hold(self):
        run = Run(core(eos_mean_tokens=2))
        run.core.add(request(1, max_tokens=40, ignore_eos=True))
        run.core.add(request(2, max_tokens=40, min_tokens=30))
        run.to_end()
        assert len(run.ids[1]) == 40
        assert 30 <= len(run.ids[2]) <= 40


class TestBatch:
    def test_every_step_takes_the_pace(self):
        run = Run(core())
        run.core.add(request(1, max_tokens=100))
        run.to_end()
        assert run.times[1] == pytest.approx([PACE_S * (n + 1) for n in range(100)])

    def test_slots_are_never_exceeded_and_the_queue_moves_up(self):
        run = Run(core(slots=3))
        for i in range(10):
            run.core.add(request(i))
        run.to_end()
        assert run.batch_max == 3
        assert len(run.finish) == 10

    def test_memory_is_reserved_in_full_before_a_sequence_joins(self):
        run = Run(core(kv_tokens=100))
        for i in range(4):
            run.core.add(request(i, bytes(20), 20))  # two fit
        run.step()
        assert (run.core.stats().running, run.core.stats().queued) == (2, 2)
        assert run.to_end().batch_max == 2
        assert len(run.finish) == 4

    def test_a_large_request_is_not_passed_by_small_ones(self):
        run = Run(core(kv_tokens=100))
        run.core.add(request(0, bytes(30), 30))
        run.core.add(request(1, bytes(50), 50))
        run.core.add(request(2, bytes(5), 5))
        run.to_end()
        assert run.times[0][-1] < run.times[1][0] < run.times[2][0]

    def test_higher_priority_leaves_the_queue_first(self):
        run = Run(core(slots=1))
        for i, priority in enumerate([0.5, 0.1, 0.9, 0.5]):
            run.core.add(request(i, priority=priority))
        run.to_end()
        assert sorted(run.times, key=lambda i: run.times[i][0]) == [2, 0, 3, 1]

    def test_a_long_prompt_is_computed_in_chunks_while_others_decode(self):
        run = Run(core(prefill_chunk_tokens=100))
        run.core.add(request(1, b"short", 20))
        run.step()
        run.core.add(request(2, bytes(1000), 5))
        run.to_end()
        assert len(run.times[1]) == 20
        assert run.times[1] == pytest.approx([PACE_S * (n + 1) for n in range(20)])  # never held up
        assert run.times[2][0] == pytest.approx(PACE_S * (1 + 11))  # 99 tokens a step beside the decoding one

    @settings(max_examples=50)
    @given(st.integers(0, 2**32))
    def test_counts_equal_a_recount_whatever_happens(self, seed):
        rng = random.Random(seed)
        run = Run(core(slots=3, kv_tokens=400, prefill_chunk_tokens=16))
        live: set[int] = set()
        for i in range(60):
            match rng.randrange(3):
                case 0:
                    run.core.add(request(i, bytes(rng.randrange(1, 60)), rng.randrange(1, 20)))
                    live.add(i)
                case 1:
                    run.core.abort(rng.randrange(60))
                case _:
                    run.step()
                    live -= set(run.finish)
                    stats = run.core.stats()
                    assert stats.running + stats.queued == len(live)
        run.to_end()
        stats = run.core.stats()
        assert (stats.running, stats.queued, stats.prefilling_tokens, stats.kv_tokens_used) == (0, 0, 0, 0)


class TestAborts:
    def test_a_sequence_is_gone_with_the_next_step_wherever_it_was(self):
        run = Run(core(slots=2, prefill_chunk_tokens=50))
        run.core.add(request(0, max_tokens=1000))
        run.core.add(request(1, bytes(5000)))
        run.core.add(request(2))
        for _ in range(3):
            run.step()
        made = len(run.ids[0])
        for i in (0, 1, 2, 77):
            run.core.abort(i)
        run.step()
        assert run.finish == dict.fromkeys((0, 1, 2), FinishReason.CANCELLED)
        assert len(run.ids[0]) == made
        assert not run.core.busy()

    def test_aborting_takes_no_time(self):
        run = Run(core())
        run.core.add(request(1))
        run.core.abort(1)
        assert run.to_end().now_s == 0.0


class TestPrefixes:
    def test_a_prompt_seen_before_is_not_computed_again(self):
        run = Run(core(prefill_chunk_tokens=64))
        prompt = bytes(range(100)) * 10
        assert run.prefill_steps(1, prompt=prompt) == 16
        assert run.prefill_steps(2, prompt=prompt) == 1
        assert (run.cached[1], run.cached[2]) == (0, 992)

    def test_an_answer_is_a_prefix_of_the_next_turn(self):
        run = Run(core())
        run.core.add(request(1, bytes(64), 64))
        answer = run.to_end().ids[1]
        run.core.add(request(2, bytes([*bytes(64), *answer, 1, 2, 3]), 1))
        assert run.to_end().cached[2] == 96  # the last token's own KV was never computed

    def test_only_equal_prefixes_count(self):
        run = Run(core())
        run.core.add(request(1, bytes(64) + b"a" * 64, 1))
        run.to_end()
        run.core.add(request(2, b"b" + bytes(63) + b"a" * 64, 1))
        run.core.add(request(3, bytes(64) + b"c" * 64, 1))
        run.to_end()
        assert (run.cached[2], run.cached[3]) == (0, 64)

    def test_it_can_be_switched_off_and_is_as_large_as_the_memory(self):
        run = Run(core(prefix_cache=False))
        for i in (1, 2):
            run.prefill_steps(i, prompt=bytes(320))
        assert run.cached[2] == 0
        run = Run(core(kv_tokens=400))
        for i, fill in enumerate((1, 2, 1)):
            run.prefill_steps(i, prompt=bytes([fill]) * 320)
        assert run.cached[2] < 320


class TestRefusals:
    @pytest.mark.parametrize(
        ("bad", "word"),
        [
            ({"prompt": b""}, "empty"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"max_tokens": -1}, "max_tokens"),
            ({"prompt": bytes(41), "max_tokens": 60}, "41 \\+ 60"),
            ({"stop_token_ids": (260,)}, "vocabulary"),
            ({"logit_bias": {-1: 1.0}}, "vocabulary"),
            ({"temperature": float("nan")}, "temperature"),
            ({"top_p": float("nan")}, "top_p"),
            ({"top_p": 0.0}, "top_p"),
            ({"min_p": float("inf")}, "min_p"),
        ],
    )
    def test_what_cannot_run_is_refused(self, bad, word):
        with pytest.raises(ValueError, match=word):
            core(context_length=100).add(request(1, **bad))

    def test_a_prompt_id_outside_the_vocabulary_is_refused(self):
        for outside in (-1, 260):
            with pytest.raises(ValueError, match="vocabulary of 260"):
                core().add(EngineRequest(1, (1, outside), 5))

    def test_the_limits_themselves_are_allowed(self):
        core(context_length=100).add(request(1, bytes(40), 60))
        core(kv_tokens=100).add(request(1, bytes(40), 60))
        with pytest.raises(ValueError, match="KV cache holds 100"):
            core(kv_tokens=100).add(request(1, bytes(41), 60))

    @pytest.mark.parametrize(
        "options", [{"alphabet": "x"}, {"pace_s": -1.0}, {"pace_s": float("nan")}, {"profile": "nowhere"}]
    )
    def test_wrong_options_are_named(self, options):
        with pytest.raises(ConfigError, match=next(iter(options))):
            core(**options)


class TestFaults:
    def test_an_engine_error_harms_one_request_only(self):
        run = Run(core(fault_error_token_id=7))
        run.core.add(request(1))
        run.core.add(EngineRequest(2, (1, 7), 10))
        run.to_end()
        assert run.finish == {1: FinishReason.LENGTH, 2: FinishReason.ERROR}

    def test_crashes_and_hangs_come_where_asked(self):
        poisoned = core(fault_crash_token_id=7)
        poisoned.add(EngineRequest(1, (1, 7), 10))
        with pytest.raises(InjectedCrash):
            poisoned.step(0.0)
        for options, fault in (({"fault_crash_step": 3}, InjectedCrash), ({"fault_hang_step": 3}, InjectedHang)):
            run = Run(core(**options))
            run.core.add(request(1))
            run.step()
            run.step()
            with pytest.raises(fault):
                run.step()


class TestProfiles:
    profile = ProfilePrice(load_profile("h100-8b-fp8"))

    @pytest.mark.parametrize(
        ("batch", "context", "ms"),
        [(1, 128, 5.126), (8, 1024, 5.467), (8, 1536, 5.537), (12, 1024, 5.608), (1, 1, 5.126), (512, 128, 10.973)],
    )
    def test_decode_steps_are_interpolated_and_go_on_beyond_the_table(self, batch, context, ms):
        assert self.profile.step_s([], [context] * batch) * 1e3 == pytest.approx(ms, abs=0.01)

    def test_a_prompt_alone_costs_what_was_measured(self):
        for tokens, ms in ((32, 6.079), (2048, 34.499)):
            assert self.profile.step_s([(0, tokens)], []) * 1e3 == pytest.approx(ms)

    def test_a_step_is_priced_by_all_its_new_tokens(self):
        many = self.profile.step_s([(0, 128)] * 16, [])
        assert many == pytest.approx(self.profile.step_s([(0, 2048)], []))

    def test_few_tokens_beside_decoding_cost_their_share(self):
        decode = self.profile.step_s([], [1024] * 8)
        assert self.profile.step_s([(0, 64)], [1024] * 8) - decode == pytest.approx(34.499e-3 * 64 / 2048)

    @pytest.mark.parametrize("tokens", [4096, 32_768])
    def test_a_long_prompt_in_chunks_costs_about_what_it_does_at_once(self, tokens):
        chunks = [(start, 2048) for start in range(0, tokens, 2048)]
        at_once = self.profile.step_s([(0, tokens)], [])
        assert sum(self.profile.step_s([c], []) for c in chunks) == pytest.approx(at_once, rel=0.05)

    def test_it_bounds_the_memory_of_an_engine(self):
        assert core(kv_tokens=10**9, profile="h100-8b-fp8").capacity.kv_tokens == 1_002_295
        assert core(kv_tokens=1000, profile="h100-8b-fp8").capacity.kv_tokens == 1000

    def test_files_by_path_hold_one_profile_or_several(self, tmp_path):
        table = {
            "prefill": {"new_tokens": [1, 2], "ms": [1.0, 2.0]},
            "decode": {"batch": [1], "context": [1], "ms": [[3.0]]},
            "kv_capacity_tokens": 5,
        }
        one, several = tmp_path / "one.json", tmp_path / "several.json"
        one.write_text(json.dumps(table))
        several.write_text(json.dumps({"profiles": {"a": table}}))
        assert load_profile(str(one)) == load_profile(f"{several}#a")
        assert ProfilePrice(load_profile(str(one))).step_s([], [9, 9]) == pytest.approx(0.003)
        with pytest.raises(ConfigError, match="the file holds a"):
            load_profile(f"{several}#b")

    @pytest.mark.parametrize("change", [{"ms": [1.0]}, {"ms": [1.0, -1.0]}, {"new_tokens": [2, 1]}, {"ms": "x"}])
    def test_a_table_that_does_not_fit_is_refused(self, tmp_path, change):
        table = {
            "prefill": {"new_tokens": [1, 2], "ms": [1.0, 2.0]} | change,
            "decode": {"batch": [1], "context": [1], "ms": [[3.0]]},
            "kv_capacity_tokens": 5,
        }
        path = tmp_path / "bad.json"
        path.write_text(json.dumps(table))
        with pytest.raises(ConfigError, match=r"bad\.json"):
            load_profile(str(path))

    def test_the_packaged_file_names_its_source_and_licence(self):
        from importlib import resources

        raw = (resources.files("laneway.runtime") / "profiles" / "h100-8b-fp8.json").read_text()
        assert "Apache-2.0" in json.loads(raw)["licence"]


class TestPaged:
    @given(
        st.lists(st.tuples(st.integers(1, 60), st.integers(1, 120)), min_size=1, max_size=12),
        st.integers(200, 600),
    )
    def test_what_was_evicted_goes_on_as_if_it_had_not_been(self, shapes, kv_tokens):
        alone = {}
        for i, (prompt, tokens) in enumerate(shapes):
            run = Run(core())
            run.core.add(request(i, bytes([33 + i]) * prompt, tokens))
            alone[i] = run.to_end().ids[i]
        tight = Run(core(slots=8, kv_tokens=kv_tokens, paged=True, prefix_cache=False))
        for i, (prompt, tokens) in enumerate(shapes):
            tight.core.add(request(i, bytes([33 + i]) * prompt, tokens))
        while tight.core.busy():
            tight.step()
            assert tight.core.stats().kv_tokens_used <= kv_tokens
        assert dict(tight.ids) == alone

    def test_more_run_at_once_than_reservations_allow_and_the_newest_pays(self):
        paged, reserving = (Run(core(slots=8, kv_tokens=400, paged=each)) for each in (True, False))
        for run in (paged, reserving):
            for i in range(8):
                run.core.add(request(i, bytes([65 + i]) * 20, 100))
            run.step()
        assert (paged.core.stats().running, reserving.core.stats().running) == (8, 3)
        paged.to_end()
        assert paged.core.evictions > 0
        assert paged.times[0][-1] < paged.times[7][-1]

    def test_without_need_nothing_is_evicted(self):
        run = Run(core(slots=4, kv_tokens=1000, paged=True))
        for i in range(4):
            run.core.add(request(i, bytes([65 + i]) * 20, 100))
        run.to_end()
        assert run.core.evictions == 0
