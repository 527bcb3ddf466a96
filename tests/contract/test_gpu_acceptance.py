"""tools/gpu_acceptance.sh, from end to end on engines that need no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.trtllm_fake import Options
from tests.support.trtllm_site import TrtllmSite, toml

ROOT = Path(__file__).resolve().parents[2]
SIMULATED = {"engine": "simulated", "slots": 16, "context_length": 2048}
OPTIONS = {"pace_s": 0.002, "alphabet": "unicode", "eos_mean_tokens": 30.0, "prefill_chunk_tokens": 64}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def accept(folder: Path, model: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    config = folder / "laneway.toml"
    lines = [f"{name} = {toml(value)}" for name, value in {"name": "chat", "pool": "apart", **model}.items()]
    config.write_text("\n".join(["[[models]]", *lines]), encoding="utf-8")
    command = [str(ROOT / "tools" / "gpu_acceptance.sh"), str(config), "apart", str(folder / "out")]
    own = {**os.environ, "PYTHON": sys.executable, "ACCEPTANCE_SMOKE": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=own)


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / "out" / name).read_text(encoding="utf-8"))


def test_a_sound_engine_is_accepted_with_its_figures(tmp_path: Path):
    done = accept(tmp_path, {**SIMULATED, "engine_options": OPTIONS})
    assert done.returncode == 0, done.stderr
    outcomes = {each["case"]: each["outcome"] for each in read(tmp_path, "conformance.json")["results"]}
    assert outcomes.pop("resume-sampled") == "not offered"
    assert set(outcomes.values()) == {"passed"}
    mixed = read(tmp_path, "mixed.json")
    got, expected = mixed["counts"]["tokens"]
    assert got == expected > 100
    assert mixed["figures"]["with_bulk_bulk_prompt_tokens_per_s"] > 0


def test_one_that_breaks_is_not_and_all_is_run_in_any_case(tmp_path: Path):
    done = accept(tmp_path, {**SIMULATED, "engine_options": {**OPTIONS, "fault_crash_step": 60}})
    assert done.returncode == 1
    assert "not accepted: conformance" in done.stderr
    assert (tmp_path / "out" / "mixed.json").exists()


def test_the_adapter_of_the_library_is_held_to_it_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As on a GPU host, but for the library."""
    site = TrtllmSite(tmp_path, "1.4", monkeypatch)
    options = site.options(llm={"max_num_tokens": 80}, fake=Options())
    own = {"engine": "trtllm", "tokenizer": "bytes", "slots": 16, "context_length": 2048}
    done = accept(tmp_path, {**own, "engine_options": {"llm_file": options.llm_file}})
    assert done.returncode == 1, "the signatures are looked for in the real one"
    assert done.stderr.splitlines()[-1] == "not accepted: signatures"
    outcomes = {each["case"]: each["outcome"] for each in read(tmp_path, "conformance.json")["results"]}
    assert set(outcomes.values()) == {"passed", "not offered"}
    assert read(tmp_path, "mixed.json")["counts"]["tokens"][0] > 100


def test_without_a_file_it_says_what_it_wants(tmp_path: Path):
    command = [str(ROOT / "tools" / "gpu_acceptance.sh"), str(tmp_path / "none.toml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "tools/gpu_acceptance.sh CONFIG [POOL [FOLDER]]" in done.stderr
