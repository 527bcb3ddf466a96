"""The file that says how a `trtllm` engine builds its `tensorrt_llm.LLM`: typed, and an unknown key stops the process.

What the pool says already (slots, context length, KV tokens) is not in it. The library itself is not imported here.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from laneway.core.catalogue import Pool
from laneway.core.errors import ConfigError

STEP_TOKENS_LEAST = 256  # below, a GPU is not busy with a step
STEP_TOKENS_MOST = 8192  # upstream's default of max_num_tokens
STEP_TOKENS_UNIT = 64

Ranks = Annotated[int, Meta(ge=1, le=1024)]
Fraction = Annotated[float, Meta(gt=0, le=1)]
DraftTokens = Annotated[int, Meta(ge=0, le=64)]


class KvFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """KvCacheConfig. Its max_tokens are the pool's kv_tokens, its block reuse the engine option prefix_cache."""

    free_gpu_memory_fraction: Fraction = 0.9  # at most, of what weights leave free
    dtype: str = "auto"
    host_cache_bytes: Annotated[int, Meta(ge=0)] = 0  # blocks that leave the GPU go here
    partial_reuse: bool = True
    tokens_per_block: Annotated[int, Meta(ge=0, le=1024)] = 0  # 0: as the library has it


class SpeculationFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Speculative decoding; all of it is fixed at the start. How much is drafted by the size of the batch is the
    schedule's business: it is the library's own way of speculating by load."""

    kind: Literal["draft", "eagle", "mtp", "ngram"]
    max_draft_len: Annotated[int, Meta(ge=1, le=64)]
    model: str = ""  # what drafts: of draft and eagle
    draft_len_schedule: dict[str, DraftTokens] = {}  # from so many sequences in the batch, so many draft tokens

    def __post_init__(self) -> None:
        if (self.kind in ("draft", "eagle")) != bool(self.model):
            raise ValueError("model names what drafts: draft and eagle have one, mtp and ngram none")
        sizes = list(self.draft_len_schedule)
        if not all(size.isdecimal() and int(size) >= 1 for size in sizes):
            raise ValueError("the keys of draft_len_schedule are batch sizes of 1 and more")
        if sizes and self.draft_len_schedule.get("1") != self.max_draft_len:
            raise ValueError("draft_len_schedule begins with 1 = max_draft_len")

    @property
    def schedule(self) -> dict[int, int]:
        return {int(size): self.draft_len_schedule[size] for size in sorted(self.draft_len_schedule, key=int)}


class LlmFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model: str  # a folder, or a name that the library resolves
    tokenizer: str = ""  # of the library, where it needs one; empty: the model's
    trust_remote_code: bool = False
    revision: str = ""
    dtype: str = "auto"
    tensor_parallel_size: Ranks = 1
    pipeline_parallel_size: Ranks = 1
    moe_tensor_parallel_size: Ranks | None = None
    moe_expert_parallel_size: Ranks | None = None
    enable_attention_dp: bool = False
    max_lora_rank: Annotated[int, Meta(ge=1, le=1024)] = 64
    attn_backend: str = ""  # empty: as the library has it
    overlap_scheduler: bool = True  # off: an abort takes an iteration less, every iteration a little longer
    tpot_target_s: Annotated[float, Meta(gt=0, le=60)] = 0.1  # a step with as much prompt as it takes keeps this
    max_num_tokens: Annotated[int, Meta(ge=0, le=2**20)] = 0  # of a step, prompt and decode; 0: from the TPOT target
    # reserve: a sequence joins the batch when prompt and max_tokens fit, and is never evicted (GUARANTEED_NO_EVICT);
    # page: KV is handed out as sequences grow, and one is paused where it runs out (MAX_UTILIZATION).
    capacity: Literal["reserve", "page"] = "reserve"
    kv: KvFile = KvFile()
    speculation: SpeculationFile | None = None


def load_llm_file(path: str) -> LlmFile:
    """Raises ConfigError."""
    if not path:
        raise ConfigError("the trtllm engine needs engine_options.llm_file: a TOML file with its model")
    try:
        return msgspec.toml.decode(Path(path).read_bytes(), type=LlmFile)
    except OSError as error:
        raise ConfigError(f"engine_options.llm_file: {path} cannot be read ({error.strerror})") from None
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise ConfigError(f"engine_options.llm_file: {path}: {error}") from None


def step_tokens(file: LlmFile, pool: Pool, chunk_tokens: int) -> int:
    """max_num_tokens: a full batch decodes beside that much prompt within the TPOT target, as far as the pool's rates
    or profile say. `chunk_tokens`: of the engine options, goes before."""
    if file.max_num_tokens:
        return file.max_num_tokens
    if chunk_tokens:
        return pool.slots + chunk_tokens
    times = pool.step_times
    if times.base_s:
        decode_s = times.decode_s(pool.slots, min(pool.kv_tokens, pool.slots * pool.context_length) // 2)
        token_s = times.prefill_token_s or 1.0 / pool.prefill_tokens_per_s
    else:
        decode_s, token_s = 1.0 / pool.decode_tokens_per_s, 1.0 / pool.prefill_tokens_per_s
    room = math.floor((file.tpot_target_s - decode_s) / token_s / STEP_TOKENS_UNIT) * STEP_TOKENS_UNIT
    return pool.slots + min(STEP_TOKENS_MOST, max(STEP_TOKENS_LEAST, room))
