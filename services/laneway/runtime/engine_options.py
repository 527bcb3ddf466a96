"""How a worker runs its engine: the options of every engine in one typed struct, part of the settings.

They say how a pool is served on this host, not what it offers: slots, context and KV capacity belong to the pool.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=0, le=2**20)]
NiceLevel = Annotated[int, Meta(ge=0, le=19)]
TimeoutSeconds = Annotated[float, Meta(gt=0, le=3600)]
PaceSeconds = Annotated[float, Meta(ge=0, le=60)]
MeanTokens = Annotated[float, Meta(ge=0, le=1e6)]
WindowSeconds = Annotated[float, Meta(ge=1, le=31 * 86_400)]
Price = Annotated[float, Meta(ge=0, le=1e6)]
QuotaTokens = Annotated[int, Meta(ge=0, le=10**12)]


class QuotaOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a provider allows in any span of `window_s` seconds, to all workers together; 0: without limit."""

    window_s: WindowSeconds = 60.0
    requests: Count = 0
    tokens: QuotaTokens = 0  # of prompts and answers
    spend: Price = 0.0  # in the currency of the provider's prices


class ProviderOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An OpenAI-compatible server that an `openai` engine asks."""

    base_url: str  # up to its version, as https://api.example.com/v1
    name: str = ""  # in messages, logs and quotas; empty: its host
    route: Literal["completions", "chat"] = "completions"  # chat: messages go out, and no answer is gone on with
    served_model: str = ""  # as the server calls it; empty: the only one that it lists
    prompt_ids: bool = True  # its completions take token ids; else text, and no answer is gone on with
    api_key_file: str = ""
    api_key_env: str = ""  # name of an environment variable that holds the key
    tls_ca_file: str = ""  # who may have signed its certificate; empty: whom this machine trusts
    plain_http: bool = False  # http also to another machine: prompts, answers and the key can be read on the way
    quotas: tuple[QuotaOptions, ...] = ()  # each of which holds
    concurrency: Count = 0  # requests at once, of all workers together; 0: without limit
    counts_asked_tokens: bool = False  # its quota counts max_tokens of a request, whatever comes of it
    price_per_million_prompt_tokens: Price = 0.0  # what it costs, not what tenants are charged
    price_per_million_completion_tokens: Price = 0.0

    @property
    def limited(self) -> bool:
        return bool(self.quotas) or self.concurrency > 0

    @property
    def takes_ids(self) -> bool:
        return self.route == "completions" and self.prompt_ids


class EngineOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    start_timeout_s: TimeoutSeconds = 180.0  # until the engine can take requests

    # every engine that runs in a process of its own
    nice: NiceLevel = 0  # added to the worker's nice level
    threads: Count = 0  # CPU threads of a step; 0: one less than there are cores, at least 1

    # engines that live in a server of their own, which the worker does not start
    address: str = ""  # host:port of it; plain text, so on this machine or in a network that is trusted
    health_interval_s: TimeoutSeconds = 10.0  # between two looks whether it is well, also while nothing runs

    # openai
    providers: tuple[ProviderOptions, ...] = ()  # one, or several of the same model

    # triton
    served_model: str = ""  # the model's name on the server
    dialect: Literal["", "llmapi", "bls", "ids"] = ""  # its tensors; empty: as they are found, but offer the least
    metrics_address: str = ""  # host:port of the server's metrics, where capacity is read; empty: the pool's figures
    server_timeout_s: TimeoutSeconds = 3600.0  # told to the server with each request; deadlines are the worker's

    # engines that compute prompts in slices and keep them
    prefill_chunk_tokens: Count = 0  # most tokens of a step: how long a prompt holds up others; 0: as suits the engine
    prefix_cache: bool = True  # keep what prompts have in common

    # openvino
    model_file: str = ""  # GGUF file or OpenVINO IR folder; empty: the one that the pool's tokenizer names
    exact: bool = False  # float32 throughout: the same text alone, batched and resumed, at about 1.65 times the time

    # trtllm
    llm_file: str = ""  # TOML file that says how tensorrt_llm.LLM is made: docs/engines.md, trtllm
    guided_decoding: Literal["", "xgrammar", "llguidance"] = ""  # what keeps answers to JSON schemas; empty: nothing
    adapters: tuple[Annotated[str, Meta(pattern=r"^[^=]+=.+\Z")], ...] = ()  # LoRA adapters, each name=folder

    # simulated
    pace_s: PaceSeconds = 0.01  # length of a step where no profile is given
    profile: str = ""  # name of a packaged GPU profile, or path of a JSON file
    paged: bool = False  # hand KV out as answers grow, and compute the newest again where none is left; else reserve
    alphabet: Literal["words", "unicode"] = "words"  # lower-case ASCII, or characters of one to four bytes among it
    eos_mean_tokens: MeanTokens = 0.0  # mean length at which answers end by themselves; 0: they go on to max_tokens
    fault_error_token_id: int = -1  # a prompt with this id ends with an engine error
    fault_crash_token_id: int = -1  # a prompt with this id kills the engine process when its prefill begins
    fault_crash_step: Count = 0  # the process dies instead of computing this step; 0: never
    fault_hang_step: Count = 0  # this step never ends; 0: never

    @property
    def adapter_folders(self) -> dict[str, str]:
        """By name, in the order of names."""
        return {name: folder for name, _, folder in sorted(each.partition("=") for each in self.adapters)}
