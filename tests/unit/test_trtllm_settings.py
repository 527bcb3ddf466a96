"""The file from which `tensorrt_llm.LLM` is made: what it may say, and how large a step comes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from laneway.core.catalogue import Pool
from laneway.core.errors import ConfigError
from laneway.core.fleet import StepTimes
from laneway.runtime.catalogue import capabilities_of
from laneway.runtime.engine_options import EngineOptions
from laneway.workers.engines.registry import make_engine, spec_of
from laneway.workers.engines.trtllm_settings import (
    STEP_TOKENS_LEAST,
    STEP_TOKENS_MOST,
    LlmFile,
    load_llm_file,
    step_tokens,
)

POOL = Pool(
    name="chat-small",
    model="chat",
    tier="small",
    engine="trtllm",
    context_length=4096,
    vocabulary_size=260,
    slots=64,
    workers=1,
    kv_tokens=100_000,
    tokenizer="bytes",
    capabilities=capabilities_of("trtllm"),
    prefill_tokens_per_s=20_000.0,
    decode_tokens_per_s=50.0,
)


@pytest.fixture
def file(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "llm.toml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def test_a_full_file_is_read(file):
    read = load_llm_file(
        file("""
            model = "/models/llama"
            tensor_parallel_size = 2
            capacity = "page"
            tpot_target_s = 0.05
            [kv]
            free_gpu_memory_fraction = 0.8
            [speculation]
            kind = "eagle"
            model = "/models/draft"
            max_draft_len = 4
            draft_len_schedule = { 1 = 4, 16 = 2, 4 = 3, 32 = 0 }
            """)
    )
    assert (read.model, read.tensor_parallel_size, read.capacity) == ("/models/llama", 2, "page")
    assert read.kv.free_gpu_memory_fraction == 0.8
    assert read.speculation is not None
    assert list(read.speculation.schedule.items()) == [(1, 4), (4, 3), (16, 2), (32, 0)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model = 'm'\nmax_batch_size = 8", "max_batch_size"),
        ("model = 'm'\n[kv]\nmax_tokens = 8", "max_tokens"),
        ("", "model"),
        ("model = 'm'\ntensor_parallel_size = 0", "tensor_parallel_size"),
        ("model = 'm'\ntensor_parallel_size = 1025", "tensor_parallel_size"),
        ("model = 'm'\ncapacity = 'guess'", "capacity"),
        ("model = [", "llm.toml"),
        ("model = 'm'\n[speculation]\nkind = 'eagle'\nmax_draft_len = 4", "draft and eagle"),
        ("model = 'm'\n[speculation]\nkind = 'ngram'\nmodel = 'd'\nmax_draft_len = 4", "draft and eagle"),
        ("model = 'm'\n[speculation]\nkind = 'mtp'\nmax_draft_len = 65", "max_draft_len"),
        (
            "model = 'm'\n[speculation]\nkind = 'mtp'\nmax_draft_len = 4\ndraft_len_schedule = { 1 = 3 }",
            "1 = max_draft_len",
        ),
        (
            "model = 'm'\n[speculation]\nkind = 'mtp'\nmax_draft_len = 4\ndraft_len_schedule = { many = 4 }",
            "batch sizes",
        ),
    ],
)
def test_what_it_cannot_say_is_refused_with_its_name(file, text, said):
    with pytest.raises(ConfigError, match=said):
        load_llm_file(file(text))


def test_it_has_to_be_there(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read"):
        load_llm_file(str(tmp_path / "none.toml"))
    with pytest.raises(ConfigError, match="llm_file"):
        make_engine(POOL, EngineOptions())


class TestStepTokens:
    def test_a_full_batch_and_so_much_prompt_keep_the_tpot_target(self):
        file = LlmFile(model="m", tpot_target_s=0.1)
        assert step_tokens(file, POOL, 0) == 64 + 1600  # 0.08 s of 20,000 tokens/s beside steps of 0.02 s

    def test_measured_step_times_go_before_rates(self):
        times = StepTimes(0.01, 0.0001, 1e-7, 2e-5)
        file = LlmFile(model="m", tpot_target_s=0.05)
        room_s = 0.05 - times.decode_s(64, 50_000)
        assert step_tokens(file, replace(POOL, step_times=times), 0) == 64 + int(room_s / 2e-5) // 64 * 64

    def test_it_is_neither_too_small_for_a_gpu_nor_without_end(self):
        hurried, slow = LlmFile(model="m", tpot_target_s=0.001), LlmFile(model="m", tpot_target_s=60.0)
        assert step_tokens(hurried, POOL, 0) == 64 + STEP_TOKENS_LEAST
        assert step_tokens(slow, POOL, 0) == 64 + STEP_TOKENS_MOST

    def test_who_says_a_number_gets_it(self):
        assert step_tokens(LlmFile(model="m", max_num_tokens=2048), POOL, 512) == 2048
        assert step_tokens(LlmFile(model="m"), POOL, 512) == 64 + 512

    def test_the_engine_is_told(self, file):
        spec = spec_of(POOL, EngineOptions(llm_file=file("model = 'm'\nmax_num_tokens = 2048")))
        assert spec.capacity.chunk_tokens == 2048
