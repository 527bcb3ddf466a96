"""An engine is measured and its profile written: what goes in comes out again, and a noisy machine writes nothing."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import structlog
from msgspec.structs import replace
from typer.testing import CliRunner

from laneway.cli.calibrate import NOISY_SPREAD, keep
from laneway.cli.main import app
from laneway.runtime.catalogue import capabilities_of, pool_of
from laneway.runtime.engine_options import EngineOptions
from laneway.runtime.engine_profile import EngineProfile, load_profile, step_times
from laneway.runtime.settings import ModelSettings
from laneway.workers.calibration.measuring import Calibration, Measured, Point
from laneway.workers.calibration.probe import CalibrationFailed, Probe
from laneway.workers.calibration.sizes import sizes_of
from laneway.workers.calibration.writing import profile_of
from laneway.workers.engines.protocol import EngineCapacity
from laneway.workers.engines.simulated import make_core
from laneway.workers.engines.simulated_inline import InlineEngine
from laneway.workers.engines.simulated_profile import ProfilePrice

H100 = "h100-8b-fp8"
CAPACITY = EngineCapacity(64, 200_000, 16_384, 260)


class LoopClock:
    """The virtual time of the running loop."""

    def now(self) -> float:
        return 1_800_000_000.0 + self.monotonic()

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()


async def measured(
    capacity: EngineCapacity = CAPACITY, *, quick: bool = True, said: list[str] | None = None, **options: Any
) -> Measured:
    values: dict[str, Any] = {"profile": H100}
    core = make_core(capacity, frozenset(), EngineOptions(**(values | options)))
    engine = InlineEngine(core, capabilities_of("simulated"), load_s=3.0)
    clock = LoopClock()
    say = said.append if said is not None else lambda line: None
    return await Calibration(engine, Probe(clock, Random(7)), clock, say, quick=quick).run()


def written(found: Measured) -> EngineProfile:
    return profile_of(found, name="p", engine="simulated", version="1", machine="none", model="m", date="2026-01-01")


@pytest.mark.looptime
@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)])
async def test_the_h100_profile_is_found_back(quick: bool):
    true = load_profile(H100)
    found_in = await measured(quick=quick)
    profile = written(found_in)
    figures = profile.engine
    assert figures is not None
    assert figures.load_s == 3.0
    assert (figures.chunk_tokens, figures.kv_tokens, figures.slots) == (2048, 200_000, 64)
    assert figures.kv_filled_tokens == 200_000
    assert figures.spread < 0.01
    for tokens, ms in zip(profile.prefill.new_tokens, profile.prefill.ms, strict=True):
        assert ms == pytest.approx(dict(zip(true.prefill.new_tokens, true.prefill.ms, strict=True))[tokens], rel=0.01)
    price = ProfilePrice(true)
    for batch, row in zip(profile.decode.batch, profile.decode.ms, strict=True):
        for context, ms in zip(profile.decode.context, row, strict=True):
            measured_there = (batch, context) in found_in.decode  # the KV does not hold the largest; these are fitted
            expected_ms = price.step_s([], [context] * batch) * 1e3
            assert ms == pytest.approx(expected_ms, rel=0.01 if measured_there else 0.08)
    found, expected = figures.step_times, step_times(true)
    assert found.base_s == pytest.approx(expected.base_s, rel=0.03)
    assert found.prefill_token_s == pytest.approx(expected.prefill_token_s, rel=0.05)
    for batch, context in ((1, 512), (16, 1024), (64, 1024)):
        assert found.decode_s(batch, batch * context) == pytest.approx(price.step_s([], [context] * batch), rel=0.05)
    assert figures.step_error < 0.05


@pytest.mark.looptime
async def test_an_engine_simulated_from_a_measured_profile_is_as_fast_as_the_one_measured(tmp_path: Path):
    path = tmp_path / "one.json"
    first = written(await measured())
    assert keep(path, first, noisy=False) == 0
    second = written(await measured(profile=str(path)))
    assert load_profile(str(path)) == first
    assert second.prefill.ms == pytest.approx(first.prefill.ms, rel=0.01)
    for again, before in zip(second.decode.ms, first.decode.ms, strict=True):
        assert again == pytest.approx(before, rel=0.02)
    assert first.engine is not None
    assert second.engine is not None
    assert second.engine.step_times.prefill_token_s == pytest.approx(first.engine.step_times.prefill_token_s, rel=0.05)


@pytest.mark.looptime
async def test_a_pool_begins_with_what_was_measured(tmp_path: Path):
    path = tmp_path / "one.json"
    profile = written(await measured())
    keep(path, profile, noisy=False)
    pool = pool_of(ModelSettings(name="chat", engine="simulated", slots=16, profile=str(path)))
    assert profile.engine is not None
    assert pool.step_times == profile.engine.step_times
    assert pool.load_s == 3.0


@pytest.mark.looptime
async def test_an_abort_takes_a_step_at_most_and_less_where_nothing_runs_for_it():
    found = await measured(CAPACITY, prefill_chunk_tokens=128)
    longest_s = ProfilePrice(load_profile(H100)).step_s([(0, 128)], [1024] * 64)
    assert all(0.0 <= point.median_s <= longest_s for point in found.aborts.values())
    assert found.aborts["queued"].median_s > 0.0


@pytest.mark.looptime
async def test_a_small_engine_is_measured_as_far_as_it_goes():
    said: list[str] = []
    found = await measured(EngineCapacity(1, 400, 300, 260), said=said)
    assert sorted(found.prefill) == [32, 128]
    assert sorted(found.decode) == [(1, 128)]
    assert "KV: taken as the engine says, since its slots cannot fill it" in said
    profile = written(found)
    assert profile.decode.context == [128]


@pytest.mark.looptime
async def test_an_engine_that_dies_is_said_to_have_died():
    with pytest.raises(CalibrationFailed, match="the engine ended: fault_crash_step reached"):
        await measured(fault_crash_step=30)


@pytest.mark.parametrize("quick", [True, False])
def test_sizes_fit_the_engine_and_rise(quick: bool):
    sizes = sizes_of(EngineCapacity(48, 8192, 4096, 260, chunk_tokens=384), prefix_cache=True, quick=quick)
    for axis in (sizes.prompts, sizes.contexts, sizes.batches, sizes.prefixes):
        assert list(axis) == sorted(set(axis))
    assert max(*sizes.prompts, *sizes.contexts) <= 4094
    assert 384 in sizes.prompts
    assert sizes.batches[0] == 1
    assert sizes.batches[-1] == 48
    assert not sizes_of(CAPACITY, prefix_cache=False, quick=quick).prefixes


def test_the_spread_of_a_point_is_what_lies_between_its_quarters():
    assert Point((1.0, 1.0, 1.0)).spread == 0.0
    assert Point((0.5,)).spread == 0.0
    assert Point((0.8, 1.0, 1.0, 1.2, 9.0)).spread == pytest.approx(0.2)


# --- the command -------------------------------------------------------------------------------------

runner = CliRunner()


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Settings of one small pool; what the command sets up of the process's logging is undone."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    monkeypatch.chdir(tmp_path)
    (tmp_path / "laneway.toml").write_text(
        '[[models]]\nname = "chat"\nengine = "simulated"\nslots = 4\nkv_tokens = 2000\ncontext_length = 1000\n'
        f'engine_options = {{ profile = "{H100}" }}\n'
    )
    yield
    root.handlers[:], level = before
    root.setLevel(level)
    structlog.reset_defaults()


def test_the_command_writes_a_profile_that_can_be_used(tmp_path: Path):
    result = runner.invoke(app, ["calibrate", "engine", "--quick"])
    assert result.exit_code == 0, result.output
    assert "prefill of 128 tokens" in result.stderr
    assert "blocks of 1, reserved when a sequence joins; 2000 tokens were held at once" in result.stdout
    profile = load_profile(str(tmp_path / "chat-small.profile.json"))
    assert profile.engine is not None
    assert profile.engine.machine == f"the profile {H100}"


def test_with_json_the_profile_is_all_there_is_on_standard_output(tmp_path: Path):
    result = runner.invoke(app, ["calibrate", "engine", "--quick", "--json", "--pool", "chat-small"])
    assert result.exit_code == 0, result.output
    path = tmp_path / "from_json.json"
    path.write_text(result.stdout)
    assert load_profile(str(path)).kv_capacity_tokens == 2000
    assert json.loads(result.stdout)["name"] == "chat-small"
    assert not list(tmp_path.glob("*.profile.json"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--pool", "nowhere"], "there is no pool nowhere; known: chat-small"),
        (["--out", "no/such/folder/p.json"], "is no folder that can be written to"),
        (["--set", "policy.kv_target=0"], "kv_target"),
    ],
)
def test_wrong_words_stop_it_before_it_begins(words: list[str], said: str):
    result = runner.invoke(app, ["calibrate", "engine", *words])
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.looptime
async def test_a_noisy_machine_writes_nothing_unless_told_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    profile = written(await measured())
    assert profile.engine is not None
    noisy = replace(profile, engine=replace(profile.engine, spread=NOISY_SPREAD + 0.01))
    path = tmp_path / "p.json"
    assert keep(path, noisy, noisy=False) == 1
    assert not path.exists()
    assert "differ by 16% (at most 15%): nothing was written" in capsys.readouterr().err
    assert keep(path, noisy, noisy=True) == 0
    assert (
        keep(tmp_path / "q.json", replace(noisy, engine=replace(profile.engine, spread=NOISY_SPREAD)), noisy=False) == 0
    )


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(300)
def test_the_real_model_is_measured(tmp_path: Path):
    (tmp_path / "laneway.toml").write_text('[[models]]\nname = "chat"\nslots = 4\nkv_tokens = 8192\n')
    result = runner.invoke(app, ["calibrate", "engine", "--quick", "--noisy"])
    assert result.exit_code == 0, result.output
    profile = load_profile(str(tmp_path / "chat-small.profile.json"))
    figures = profile.engine
    assert figures is not None
    assert (figures.engine, figures.block_tokens, figures.chunk_tokens, figures.paged) == ("openvino", 32, 128, True)
    assert figures.kv_tokens == 8192
    assert profile.prefill.ms[-1] > 2 * profile.prefill.ms[0]
    prefix = profile.prefill_with_prefix
    assert prefix is not None
    assert prefix.ms[0][0] < profile.prefill.ms[profile.prefill.new_tokens.index(512)]  # the prefix was found
    assert figures.step_times.prefill_token_s > 0.0
    pool = pool_of(ModelSettings(name="chat", slots=4, kv_tokens=8192, profile="chat-small.profile.json"))
    assert pool.step_times == figures.step_times
    core = make_core(EngineCapacity(4, 8192, 8192, 260), frozenset(), EngineOptions(profile="chat-small.profile.json"))
    assert core.capacity.block_tokens == 32
