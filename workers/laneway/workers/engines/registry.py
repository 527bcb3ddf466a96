"""Which engine serves a pool: from the name in the catalogue to an engine that can be started.

An engine in a server of its own is made here as it is. All others are built twice over: the worker makes a
`ProcessEngine` from the pool, and the process that it starts makes the engine itself from the `EngineSpec` it is sent.
Only that process imports an engine's libraries.
"""

from __future__ import annotations

import msgspec

from laneway.core.catalogue import Capabilities, Pool
from laneway.core.errors import ConfigError
from laneway.runtime.engine_options import EngineOptions
from laneway.runtime.tokenizer import load_tokenizer
from laneway.workers.engines.protocol import Engine, EngineCapacity, StepEngine
from laneway.workers.engines.provider_gate import Gate

STEP_ENGINES = ("openvino", "simulated")
ASYNC_ENGINES = ("trtllm",)  # in a process of their own as well, without a loop of steps


class EngineSpec(msgspec.Struct, frozen=True):
    """All that an engine in a process of its own needs to know of its pool; what travels there."""

    engine: str
    tokenizer: str
    eos_ids: tuple[int, ...]
    capacity: EngineCapacity
    capabilities: Capabilities
    options: EngineOptions


def make_engine(pool: Pool, options: EngineOptions, gate: Gate | None = None) -> Engine:
    """The engine of a pool, not yet started. `gate`: of the providers of rented engines, where their use is limited.

    Raises ConfigError when there is none of that name.
    """
    if pool.engine == "trtllm_grpc":
        try:
            from laneway.workers.engines.trtllm_grpc import make_trtllm_grpc
        except ImportError as error:
            raise ConfigError(
                f"the trtllm_grpc engine needs the package smg-grpc-proto: pip install 'laneway[trtllm-grpc]' ({error})"
            ) from error
        return make_trtllm_grpc(pool, options)
    if pool.engine == "openai":
        try:
            from laneway.workers.engines.openai import make_openai
        except ImportError as error:
            raise ConfigError(
                f"the openai engine needs the package httpx2: pip install 'laneway[openai]' ({error})"
            ) from error
        return make_openai(pool, options, gate)
    if pool.engine == "triton":
        try:
            from laneway.workers.engines.triton import make_triton
        except ImportError as error:
            raise ConfigError(
                f"the triton engine needs the package tritonclient: pip install 'laneway[triton]' ({error})"
            ) from error
        return make_triton(pool, options)
    if pool.engine not in (*STEP_ENGINES, *ASYNC_ENGINES):
        known = ", ".join((*STEP_ENGINES, *ASYNC_ENGINES, "openai", "triton", "trtllm_grpc"))
        raise ConfigError(f'engine = "{pool.engine}" of pool {pool.name}: known engines are {known}')
    from laneway.workers.engines.host import ProcessEngine

    return ProcessEngine(spec_of(pool, options))


def spec_of(pool: Pool, options: EngineOptions) -> EngineSpec:
    """Raises ConfigError."""
    chunk_tokens = 0
    if pool.engine == "trtllm":
        from laneway.workers.engines.trtllm_settings import load_llm_file, step_tokens

        chunk_tokens = step_tokens(load_llm_file(options.llm_file), pool, options.prefill_chunk_tokens)
    return EngineSpec(
        engine=pool.engine,
        tokenizer=pool.tokenizer,
        eos_ids=tuple(sorted(load_tokenizer(pool.tokenizer).eos_ids)),
        capacity=EngineCapacity(
            pool.slots, pool.kv_tokens, pool.context_length, pool.vocabulary_size, chunk_tokens=chunk_tokens
        ),
        capabilities=pool.capabilities,
        options=options,
    )


def make_async_engine(spec: EngineSpec) -> Engine:
    """Called in the engine's own process, on its event loop. Raises ConfigError."""
    from laneway.workers.engines.trtllm import make_trtllm

    return make_trtllm(spec)


def make_step_engine(spec: EngineSpec) -> StepEngine:
    """Called in the engine's own process. Raises ConfigError."""
    if spec.engine == "simulated":
        from laneway.workers.engines.simulated import SimulatedEngine, make_core

        return SimulatedEngine(make_core(spec.capacity, frozenset(spec.eos_ids), spec.options))
    if spec.engine == "openvino":
        try:
            from laneway.workers.engines.openvino import OpenVinoEngine
        except ImportError as error:
            raise ConfigError(
                f"the openvino engine needs the package openvino-genai: pip install 'laneway[local]' ({error})"
            ) from error
        return OpenVinoEngine(spec.capacity, spec.tokenizer, frozenset(spec.eos_ids), spec.options)
    raise ConfigError(f'engine = "{spec.engine}" is no step engine')
