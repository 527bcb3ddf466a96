"""The catalogue as the settings describe it, and what each engine can do.

An ability is listed here only if the engine's adapter has it and a test shows it: whatever is missing is refused at
the door, naming the field.
"""

from __future__ import annotations

from msgspec.structs import replace

from laneway.core.catalogue import Capabilities, Catalogue, Pool
from laneway.core.errors import ConfigError
from laneway.runtime.settings import ModelSettings, Settings

ENGINE_CAPABILITIES: dict[str, Capabilities] = {
    # As tried on openvino-genai 2026.4.1: rng_seed holds for each request, also in a batch; the log probability of the
    # chosen token comes without alternatives; a JSON schema that its compiler refuses makes every later step raise,
    # for all requests, so structured output is not offered.
    "openvino": Capabilities(
        logprobs=True,
        min_p=True,
        top_k=True,
        seed=True,
        penalties=True,
        min_tokens=True,
        ignore_eos=True,
        token_ids=True,
        prefix_cache=True,
    ),
    "simulated": Capabilities(
        logprobs=True,
        top_logprobs=5,
        min_p=True,
        top_k=True,
        seed=True,
        penalties=True,
        min_tokens=True,
        ignore_eos=True,
        token_ids=True,
        exact=True,
        prefix_cache=True,
    ),
}


VOCABULARY_SIZES = {"bytes": 260, "smollm2": 49_152}  # of the tokenizers that are known by name


def capabilities_of(engine: str, *, exact: bool = False) -> Capabilities:
    """What a pool of this engine offers; ConfigError for an engine that this release has no adapter for."""
    offered = ENGINE_CAPABILITIES.get(engine)
    if offered is None:
        raise ConfigError(f"there is no engine {engine!r}; known: {', '.join(sorted(ENGINE_CAPABILITIES))}")
    return replace(offered, exact=offered.exact or exact)


def pool_of(model: ModelSettings) -> Pool:
    tokenizer = model.tokenizer or ("bytes" if model.engine == "simulated" else "smollm2")
    vocabulary_size = model.vocabulary_size or VOCABULARY_SIZES.get(tokenizer, 0)
    if not vocabulary_size:
        raise ConfigError(
            f"pool {model.pool_name}: set vocabulary_size, as {tokenizer} is not a tokenizer known by name"
        )
    return Pool(
        name=model.pool_name,
        model=model.name,
        tier=model.tier,
        engine=model.engine,
        context_length=model.context_length,
        vocabulary_size=vocabulary_size,
        slots=model.slots,
        workers=model.workers,
        kv_tokens=model.kv_tokens,
        tokenizer=tokenizer,
        capabilities=capabilities_of(model.engine, exact=model.exact),
        max_tokens_default=model.max_tokens_default,
        temperature_default=model.temperature_default,
        queue_length=model.queue_length,
        load_s=model.load_s,
        prefill_tokens_per_s=model.prefill_tokens_per_s,
        decode_tokens_per_s=model.decode_tokens_per_s,
        price_per_million_prompt_tokens=model.price_per_million_prompt_tokens,
        price_per_million_completion_tokens=model.price_per_million_completion_tokens,
        home_slots=model.workers if model.home_slots is None else model.home_slots,
        bulk=model.bulk,
    )


def catalogue_of(settings: Settings) -> Catalogue:
    """The pools in the order of the settings: a model's later tier is the better one."""
    return Catalogue(tuple(pool_of(model) for model in settings.models))
