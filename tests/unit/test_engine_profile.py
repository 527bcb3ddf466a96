"""What is known of an engine beforehand: fitted step times, and what pools take from a profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneway.core.errors import ConfigError
from laneway.core.fleet import StepTimes
from laneway.policy.step_fit import StepSeen
from laneway.policy.step_prior import fit_steps, relative_errors
from laneway.runtime.catalogue import pool_of
from laneway.runtime.engine_options import EngineOptions
from laneway.runtime.engine_profile import load_profile, prefill_tokens_per_s, step_times
from laneway.runtime.settings import ModelSettings
from laneway.runtime.step_price import ProfilePrice
from laneway.workers.engines.protocol import EngineCapacity
from laneway.workers.engines.simulated import make_core

H100 = "h100-8b-fp8"


def seen(times: StepTimes, shapes: list[tuple[int, int, int]]) -> list[StepSeen]:
    return [StepSeen(times.step_s(*shape), *shape) for shape in shapes]


SHAPES = [(b, b * c, p) for b in (1, 2, 8, 32) for c in (64, 512, 2048) for p in (0, 128)]
coefficient = st.floats(0.0, 1e-3)


@given(st.floats(1e-4, 0.1), coefficient, st.floats(0.0, 1e-6), coefficient)
def test_a_linear_engine_is_found_back(base: float, sequence: float, context: float, prefill: float):
    true = StepTimes(base, sequence, context, prefill, 128)
    steps = seen(true, SHAPES)
    fitted = fit_steps(steps, 128)
    assert max(map(abs, relative_errors(steps, fitted))) < 1e-3
    assert fitted.chunk_tokens == 128


@given(st.lists(st.tuples(st.integers(0, 64), st.integers(0, 9999), st.integers(0, 512), st.floats(1e-4, 1.0))))
def test_no_coefficient_is_ever_negative(rows: list[tuple[int, int, int, float]]):
    fitted = fit_steps([StepSeen(length_s, b, k, p) for b, k, p, length_s in rows])
    assert min(fitted.base_s, fitted.sequence_s, fitted.context_token_s, fitted.prefill_token_s) >= 0.0


def test_steps_of_one_kind_say_what_they_can():
    alike = fit_steps([StepSeen(0.01, 4, 400, 0)] * 5)
    assert alike.decode_s(4, 400) == pytest.approx(0.01)
    assert fit_steps([]) == StepTimes()
    assert fit_steps([StepSeen(0.05, 0, 0, 100)]).prefill_token_s == pytest.approx(0.0005)


def test_prompts_beside_decoding_count_where_there_are_any():
    plain = StepSeen(0.01, 1, 0, 0)
    fitted = fit_steps([plain, StepSeen(0.02, 1, 0, 100), StepSeen(0.05, 0, 0, 100)])
    assert fitted.prefill_token_s == pytest.approx(0.0001)


def test_nine_of_ten_steps_of_the_packaged_profile_are_met_within_5_percent():
    profile = load_profile(H100)
    decode = [
        StepSeen(ms / 1e3, batch, batch * context, 0)
        for batch, row in zip(profile.decode.batch, profile.decode.ms, strict=True)
        for context, ms in zip(profile.decode.context, row, strict=True)
        if batch * context <= profile.kv_capacity_tokens
    ]
    times = step_times(profile)
    errors = sorted(map(abs, relative_errors(decode, times)))
    assert errors[int(0.9 * len(errors))] < 0.05
    assert errors[-1] < 0.1
    price = ProfilePrice(profile)
    beside = price.step_s([(0, 512)], [1024] * 16) - price.step_s([], [1024] * 16)
    assert times.prefill_token_s * 512 == pytest.approx(beside, rel=0.05)


# --- what a pool takes from it -----------------------------------------------------------------------

MEASURED: dict[str, Any] = {
    "prefill": {"new_tokens": [32, 128, 2048], "ms": [40.0, 100.0, 1000.0]},
    "decode": {"batch": [1, 4], "context": [128, 512], "ms": [[10.0, 11.0], [20.0, 22.0]]},
    "kv_capacity_tokens": 4096,
    "engine": {
        "engine": "openvino",
        "step_times": {
            "base_s": 0.01, "sequence_s": 0.002, "context_token_s": 1e-6, "prefill_token_s": 5e-4, "chunk_tokens": 128,
        },
        "block_tokens": 32, "kv_tokens": 4096, "chunk_tokens": 128, "load_s": 2.5, "paged": True,
    },
}  # fmt: skip


@pytest.fixture
def measured(tmp_path: Path) -> str:
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(MEASURED))
    return str(path)


def openvino(**changes: Any) -> ModelSettings:
    values: dict[str, Any] = {"name": "chat", "kv_tokens": 4096, "context_length": 2048, "slots": 8}
    return ModelSettings(**(values | changes))


def test_a_pool_begins_with_what_its_profile_measured(measured: str):
    pool = pool_of(openvino(profile=measured))
    assert pool.step_times == StepTimes(0.01, 0.002, 1e-6, 5e-4, 128)
    assert pool.load_s == 2.5
    assert pool.prefill_tokens_per_s == pytest.approx(2048.0)
    assert pool.decode_tokens_per_s == pytest.approx(1.0 / (0.01 + 4 * 0.002 + 4 * 512e-6))


def test_what_the_settings_say_goes_before_the_profile(measured: str):
    pool = pool_of(openvino(profile=measured, load_s=60.0, prefill_tokens_per_s=9.0, decode_tokens_per_s=8.0))
    assert (pool.load_s, pool.prefill_tokens_per_s, pool.decode_tokens_per_s) == (60.0, 9.0, 8.0)


def test_without_a_profile_a_pool_has_rates_and_no_step_times():
    pool = pool_of(openvino())
    assert (pool.load_s, pool.prefill_tokens_per_s, pool.decode_tokens_per_s) == (10.0, 1000.0, 50.0)
    assert pool.step_times == StepTimes()


def test_a_simulated_pool_knows_the_profile_that_its_engine_goes_by():
    options = EngineOptions(profile=H100, prefill_chunk_tokens=512)
    pool = pool_of(ModelSettings(name="chat", engine="simulated", engine_options=options))
    assert pool.step_times.chunk_tokens == 512
    assert pool.step_times.prefill_token_s == step_times(load_profile(H100)).prefill_token_s
    assert pool.prefill_tokens_per_s == pytest.approx(prefill_tokens_per_s(load_profile(H100)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"profile": "nowhere"}, 'pool chat-small: profile = "nowhere": no such profile'),
        ({"profile": "no/such.json"}, r"pool chat-small: profile = .*cannot read the file"),
        ({"kv_tokens": 4128}, r"pool chat-small: kv_tokens = 4128 is more than the 4096 tokens"),
    ],
)
def test_a_profile_that_does_not_fit_the_pool_stops_the_process(measured: str, changes: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        pool_of(openvino(**{"profile": measured} | changes))


@pytest.mark.parametrize(
    "change",
    [
        {"engine": MEASURED["engine"] | {"block_tokens": 0}},
        {"engine": MEASURED["engine"] | {"step_times": {"base_s": 0.0}}},
        {"engine": MEASURED["engine"] | {"step_times": {"base_s": 0.01, "sequence_s": -1.0}}},
        {"engine": {"engine": "openvino"}},
        {"prefill_with_prefix": {"prefix_tokens": [1], "new_tokens": [1, 2], "ms": [[1.0]]}},
    ],
)
def test_a_measured_profile_that_makes_no_sense_is_refused(tmp_path: Path, change: dict[str, Any]):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(MEASURED | change))
    with pytest.raises(ConfigError, match=r"bad\.json"):
        load_profile(str(path))


def test_another_engines_profile_is_no_prior(measured: str, tmp_path: Path):
    other = tmp_path / "other.json"
    other.write_text(json.dumps(MEASURED | {"engine": MEASURED["engine"] | {"engine": "simulated"}}))
    with pytest.raises(ConfigError, match="is of the engine simulated, not of openvino"):
        pool_of(openvino(profile=str(other)))


def test_the_simulated_engine_goes_by_what_was_measured(measured: str):
    core = make_core(EngineCapacity(8, 10**6, 2048, 260), frozenset(), EngineOptions(profile=measured))
    assert (core.capacity.kv_tokens, core.capacity.block_tokens, core.capacity.chunk_tokens) == (4096, 32, 128)
    price = ProfilePrice(load_profile(measured))
    assert price.step_s([(0, 128)], []) == pytest.approx(0.1)  # alone
    assert price.step_s([(0, 64)], [128]) == pytest.approx(0.010 + 64 * 5e-4)  # beside decoding
    chunks = [(start, 128) for start in range(0, 2048, 128)]
    assert sum(price.step_s([chunk], []) for chunk in chunks) == pytest.approx(1.0)
