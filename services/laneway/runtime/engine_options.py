"""How a worker runs its engine: the options of every engine in one typed struct, part of the settings.

They say how a pool is served on this host, not what it offers: slots, context and KV capacity belong to the pool.
Options of another engine than the pool's are refused by the engine registry unless they have their default.
"""

from __future__ import annotations

import msgspec


class EngineOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    # every engine that runs in a process of its own
    start_timeout_s: float = 180.0  # from the start of the process to the first request it could take
    nice: int = 0  # added to the worker's nice level, 0 .. 19
    threads: int = 0  # CPU threads of a step; 0: one less than there are cores, at least 1

    # engines that compute prompts in slices and keep them
    prefill_chunk_tokens: int = 0  # most tokens a step computes: the stall a long prompt causes to others; 0: engine's
    prefix_cache: bool = True  # keep what prompts have in common

    # openvino
    model_file: str = ""  # GGUF file or OpenVINO IR folder; empty: the one that the pool's tokenizer names
    exact: bool = False  # float32 throughout: the same text alone, batched and resumed, at about 1.65 times the time

    # simulated
    pace_s: float = 0.01  # length of a step; used where no profile is given
    profile: str = ""  # name of a packaged GPU profile or path of a JSON file
    alphabet: str = "words"  # "words": lower-case ASCII; "unicode": characters of one to four bytes among them
    eos_mean_tokens: float = 0.0  # mean length after which answers end by themselves; 0: they go on to max_tokens
    fault_error_token_id: int = -1  # a prompt with this id ends with an engine error
    fault_crash_token_id: int = -1  # a prompt with this id kills the engine process when its prefill begins
    fault_crash_step: int = 0  # the process dies instead of computing this step; 0: never
    fault_hang_step: int = 0  # this step never ends; 0: never
