"""The catalogue as the settings describe it, and what each engine can do.

An ability is listed here only if the engine's adapter has it and a test shows it: whatever is missing is refused at
the door, naming the field.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from laneway.core.catalogue import Capabilities, Catalogue, Pool
from laneway.core.errors import ConfigError
from laneway.core.fleet import StepTimes
from laneway.core.selectors import Conflict, conflicts
from laneway.runtime.engine_options import EngineOptions
from laneway.runtime.engine_profile import (
    EngineProfile,
    decode_tokens_per_s,
    load_profile,
    prefill_tokens_per_s,
    step_times,
)
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
        prefix_cache=True,
        strict_isolation=True,
        priority_inside=True,
        abort_steps=1,
        kv_figures=True,
    ),
    # Its next token depends on the seed and all tokens before it, so that a seeded run could go on from its ids. It
    # does not say so: it stands for engines that keep the state of their draws to themselves, as those of GPUs do.
    "simulated": Capabilities(
        logprobs=True,
        top_logprobs=5,
        min_p=True,
        top_k=True,
        seed=True,
        penalties=True,
        min_tokens=True,
        ignore_eos=True,
        exact=True,
        prefix_cache=True,
        strict_isolation=True,
        priority_inside=True,
        abort_steps=1,
        kv_figures=True,
    ),
    # What servers of this kind have in common: for the rest some have no field, or another name. Seeds are kept as well
    # as may be, and of penalties repetition is missing, so neither is offered. Ids go in where all its providers take
    # them (capabilities_of); those that come out are made of text.
    "openai": Capabilities(logprobs=True, top_k=False, ignore_eos=False, token_ids_out=False),
    # As read in its sources; the rest of that as of trtllm_grpc. What the installed version lacks of it (salts and
    # priority of requests in old ones) is found at the start, and refused. Not known: step times on a GPU, so strict
    # isolation is not offered. The overlap scheduler has an iteration under way when an abort comes, and one begun.
    "trtllm": Capabilities(
        logprobs=True,
        top_logprobs=5,
        min_p=True,
        top_k=True,
        penalties=True,
        min_tokens=True,
        ignore_eos=True,
        cache_salt=True,
        prefix_cache=True,
        priority_inside=True,
        abort_steps=2,
        kv_figures=True,
    ),
    # As read in the server's sources. Not offered: seeds, since its sampler keeps one for a whole batch (a seeded
    # answer changes with its company); cache salts, which its gRPC drops; biases, which it wants for the whole
    # vocabulary with each request; schemas and adapters, of which it does not say whether it was started with them.
    "trtllm_grpc": Capabilities(
        logprobs=True,
        top_logprobs=5,
        min_p=True,
        top_k=True,
        penalties=True,
        min_tokens=True,
        ignore_eos=True,
        prefix_cache=True,
    ),
    # What all three dialects of TensorRT-LLM's models for Triton have: with it a pool does whose options name none.
    "triton": Capabilities(ignore_eos=False, token_ids_in=False, token_ids_out=False),
}
# As read in the models' sources. `llmapi` knows no repetition penalty, no least length and no end token to be ignored,
# gives no log probabilities of single tokens, and its sampler keeps one seed for a whole batch. In text an end token is
# not to be seen, so neither text dialect can go on past one.
TRITON_CAPABILITIES: dict[str, Capabilities] = {
    "llmapi": ENGINE_CAPABILITIES["triton"],
    "bls": replace(ENGINE_CAPABILITIES["triton"], logprobs=True, seed=True, penalties=True, min_tokens=True),
    "ids": Capabilities(logprobs=True, seed=True, penalties=True, min_tokens=True),
}


LOAD_S, PREFILL_TOKENS_PER_S, DECODE_TOKENS_PER_S = 10.0, 1000.0, 50.0  # where nothing else is known
VOCABULARY_SIZES = {"bytes": 260, "smollm2": 49_152}  # of the tokenizers that are known by name


def capabilities_of(engine: str, options: EngineOptions | None = None, *, exact: bool = False) -> Capabilities:
    """What a pool of this engine offers, with these options where they are known.

    ConfigError for an engine that this release has no adapter for.
    """
    offered = ENGINE_CAPABILITIES.get(engine)
    if engine == "triton" and options is not None and options.dialect:
        offered = TRITON_CAPABILITIES[options.dialect]
    if offered is None:
        raise ConfigError(f"there is no engine {engine!r}; known: {', '.join(sorted(ENGINE_CAPABILITIES))}")
    offered = replace(offered, exact=offered.exact or exact)
    if engine == "openai" and options is not None:
        return replace(offered, token_ids_in=all(provider.takes_ids for provider in options.providers))
    if engine == "trtllm" and options is not None:
        return replace(offered, json_schema=bool(options.guided_decoding), adapters=bool(options.adapters))
    return offered


def _shared_capabilities(model: ModelSettings) -> Capabilities:
    """What every engine of its pool offers."""
    offered = capabilities_of(model.engine, model.engine_options, exact=model.exact)
    for engine in model.other_engines:
        offered = offered.shared(capabilities_of(engine))
    return replace(offered, strict_isolation=offered.strict_isolation and _keeps_isolation(model))


def pool_of(model: ModelSettings) -> Pool:
    profile = profile_of(model)
    prior = _prior_of(model, profile)
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
        capabilities=_shared_capabilities(model),
        max_tokens_default=model.max_tokens_default,
        temperature_default=model.temperature_default,
        queue_length=model.queue_length,
        load_s=model.load_s or prior.load_s,
        prefill_tokens_per_s=model.prefill_tokens_per_s or prior.prefill_tokens_per_s,
        decode_tokens_per_s=model.decode_tokens_per_s or prior.decode_tokens_per_s,
        price_per_million_prompt_tokens=model.price_per_million_prompt_tokens,
        price_per_million_completion_tokens=model.price_per_million_completion_tokens,
        home_slots=model.workers if model.home_slots is None else model.home_slots,
        bulk=model.bulk,
        step_times=prior.step_times,
        selector=model.selector,
        weights=model.weights,
        precision=model.precision,
        price_per_device_s=model.price_per_device_s,
    )


def _keeps_isolation(model: ModelSettings) -> bool:
    """Whether its workers can keep lower-lane prompts from slowing a token by more than a twentieth: the engine finds
    slices of a prompt again in its prefix cache, and its steps take as long as what is in them asks for."""
    options = model.engine_options or EngineOptions()
    timed = model.engine != "simulated" or bool(options.profile)
    return options.prefix_cache and timed


def profile_of(model: ModelSettings) -> EngineProfile | None:
    """What is known of the pool's engine beforehand; a simulated one does as its own profile says. ConfigError."""
    own = model.engine_options.profile if model.engine == "simulated" and model.engine_options is not None else ""
    if not (model.profile or own):
        return None
    try:
        profile = load_profile(model.profile or own)
    except ConfigError as error:
        raise ConfigError(f"models: pool {model.pool_name}: {error}") from None
    figures = profile.engine
    if not model.profile or figures is None:
        return profile
    if figures.engine != model.engine and model.engine != "simulated":
        raise ConfigError(
            f'models: pool {model.pool_name}: profile = "{model.profile}" is of the engine {figures.engine}, '
            f"not of {model.engine}"
        )
    if 0 < figures.kv_tokens < model.kv_tokens:
        raise ConfigError(
            f"models: pool {model.pool_name}: kv_tokens = {model.kv_tokens} is more than the {figures.kv_tokens} "
            f'tokens of KV that profile = "{model.profile}" found; calibrate again, or set fewer'
        )
    return profile


class _Prior(Struct, frozen=True):
    load_s: float = LOAD_S
    prefill_tokens_per_s: float = PREFILL_TOKENS_PER_S
    decode_tokens_per_s: float = DECODE_TOKENS_PER_S
    step_times: StepTimes = StepTimes()


def _prior_of(model: ModelSettings, profile: EngineProfile | None) -> _Prior:
    if profile is None:
        return _Prior()
    times = step_times(profile)
    chunk = model.engine_options.prefill_chunk_tokens if model.engine_options is not None else 0
    load_s = profile.engine.load_s if profile.engine is not None else 0.0
    return _Prior(
        load_s or LOAD_S,
        prefill_tokens_per_s(profile),
        decode_tokens_per_s(profile, max(1, model.slots // 2)),
        replace(times, chunk_tokens=chunk) if chunk else times,
    )


def catalogue_of(settings: Settings) -> Catalogue:
    """The pools in the order of the settings: a model's later tier is the better one. ConfigError names the field."""
    catalogue = Catalogue(tuple(pool_of(model) for model in settings.models))
    for wrong in (*conflicts(catalogue.pools), *variants(catalogue.pools), *_not_offered(catalogue.pools)):
        raise ConfigError(f"models[{wrong.index}].{wrong.field}: {wrong.message}")
    return catalogue


# All pools of a tier serve one variant of its model: whoever asks for it gets the same whichever pool takes the job.
_OF_THE_TIER = ("weights", "precision", "tokenizer", "vocabulary_size")


def variants(pools: Sequence[Pool]) -> Iterator[Conflict]:
    """Pools that serve something else than the first of their tier. What only one of them tells is no difference."""
    first: dict[tuple[str, str], Pool] = {}
    for index, pool in enumerate(pools):
        other = first.setdefault((pool.model, pool.tier), pool)
        for name in _OF_THE_TIER:
            mine, theirs = getattr(pool, name), getattr(other, name)
            if mine and theirs and mine != theirs:
                yield Conflict(
                    index, name,
                    f"{mine} of pool {pool.name} is not the {theirs} of pool {other.name}, which serves the same tier; "
                    "give it a tier of its own",
                )  # fmt: skip


def _not_offered(pools: Sequence[Pool]) -> Iterator[Conflict]:
    for index, pool in enumerate(pools):
        for name in pool.selector.features:
            offered = getattr(pool.capabilities, name)
            if not offered or (name == "n" and offered == 1):
                yield Conflict(
                    index, "features", f"{name} is nothing that the {pool.engine} engine offers, so no job reaches it"
                )
