"""What is served: models, their tiers, the pools that serve them, and what each pool can do. Pure values."""

from __future__ import annotations

from msgspec import Struct, field

from laneway.core.errors import InvalidRequest
from laneway.core.fleet import StepTimes
from laneway.core.selectors import Selector


class Capabilities(Struct, frozen=True):
    """Optional abilities of a pool. A request that needs one the pool lacks is refused naming the field."""

    logprobs: bool = False
    top_logprobs: int = 0  # most alternatives a token
    min_p: bool = False
    top_k: bool = True
    seed: bool = False
    penalties: bool = False
    logit_bias: bool = False
    n: int = 1  # most answers to a prompt
    min_tokens: bool = False
    ignore_eos: bool = True
    tools: bool = False
    json_schema: bool = False
    regex: bool = False
    grammar: bool = False
    adapters: bool = False
    cache_salt: bool = False
    image_input: bool = False
    embed: bool = False
    score: bool = False
    strict_isolation: bool = False  # keeps Isolation.STRICT
    # facts about the engine, for operators and policy
    token_ids_in: bool = True  # takes token ids; else text, which it tokenises anew, so that no run goes on from ids
    token_ids_out: bool = True  # gives token ids; else text, of which the worker makes ids
    exact: bool = False  # same text alone, batched and resumed at temperature 0
    resumable_sampling: bool = False  # seeds, penalties and min_tokens hold from ids on: nothing else carries them
    prefix_cache: bool = False
    priority_inside: bool = False  # what waits in it is ordered by priority
    abort_steps: int = 0  # steps from an abort's arrival in which the sequence may still be computed; 0: not known
    speculation_control: bool = False  # how much it drafts can be changed while it runs
    kv_figures: bool = False  # tells what KV it has and uses; else the settings are believed, and tokens counted

    def shared(self, other: Capabilities) -> Capabilities:
        """What both offer, limits at the lower one."""
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in self.__struct_fields__}
        return Capabilities(**{name: min(pair) for name, pair in pairs.items()})

    def names(self) -> list[str]:
        """Names of the abilities offered, limits as name=limit."""
        out: list[str] = []
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is True:
                out.append(name)
            elif value is not False and value > 0 and not (name == "n" and value == 1):
                out.append(f"{name}={value}")
        return out


class Pool(Struct, frozen=True):
    """The workers of one region that serve one tier of one model."""

    name: str
    model: str
    tier: str
    engine: str
    context_length: int  # tokens: prompt + output
    vocabulary_size: int
    slots: int  # sequences of one worker
    workers: int  # planned
    kv_tokens: int  # KV capacity of one worker, tokens
    tokenizer: str  # "bytes", or a GGUF or tokenizer.json file
    capabilities: Capabilities
    max_tokens_default: int = 256
    temperature_default: float = 1.0
    queue_length: int = 32  # priority jobs that may wait beyond the slots
    load_s: float = 10.0  # time a cold worker needs to become ready
    prefill_tokens_per_s: float = 1000.0  # prior until measured
    decode_tokens_per_s: float = 50.0  # of one sequence; prior until measured
    price_per_million_prompt_tokens: float = 0.0
    price_per_million_completion_tokens: float = 0.0
    home_slots: int = 0  # affinity slots; below 2: every job may go to any worker
    bulk: bool = False  # its lower-lane prompts may be submitted whole where the engine has no prefix cache
    step_times: StepTimes = StepTimes()  # prior until measured, from the engine's profile; a base of 0: none
    selector: Selector = Selector()  # which jobs of its tier it takes
    weights: str = ""  # what is served: a file, folder or name; empty: not told
    precision: str = ""  # of the weights; empty: not told
    price_per_device_s: float = 0.0  # of a second of one worker

    @property
    def homes(self) -> tuple[str, ...]:
        """Names of its home slots."""
        return tuple(f"h{i}" for i in range(self.home_slots)) if self.home_slots > 1 else ()

    @property
    def priority_limit(self) -> int:
        """Most messages of the priority lane, running ones included."""
        return self.slots * self.workers + self.queue_length

    def cost(self, prompt_tokens: int, completion_tokens: int, device_s: float = 0.0) -> float:
        """`device_s`: of a worker's time, that the job takes for itself."""
        tokens = (
            prompt_tokens * self.price_per_million_prompt_tokens
            + completion_tokens * self.price_per_million_completion_tokens
        )
        return tokens / 1e6 + device_s * self.price_per_device_s


class Catalogue(Struct, frozen=True):
    """Pools in the order of quality: a model's later tier is the better one."""

    pools: tuple[Pool, ...] = field(default_factory=tuple)

    def pool(self, name: str) -> Pool | None:
        return next((p for p in self.pools if p.name == name), None)

    def tiers(self, model: str) -> tuple[Pool, ...]:
        return tuple(p for p in self.pools if p.model == model)

    def resolve(self, model: str, least_tier: str = "") -> tuple[Pool, ...]:
        """Pools that may serve `model` (or `model/tier`), cheapest first. InvalidRequest names the field."""
        name, _, tier = model.partition("/")
        tiers = self.tiers(name)
        if not tiers:
            known = ", ".join(sorted({p.model for p in self.pools})) or "none"
            raise InvalidRequest(
                f"there is no such model; known: {known}", field="spec.model", reason="MODEL_NOT_FOUND"
            )
        names = [p.tier for p in tiers]
        if tier:
            if tier not in names:
                raise InvalidRequest(
                    f"the model has no such tier; known: {', '.join(names)}",
                    field="spec.model",
                    reason="MODEL_NOT_FOUND",
                )
            tiers = tuple(p for p in tiers if p.tier == tier)
        if least_tier:
            if least_tier not in names:
                raise InvalidRequest(
                    f"the model has no such tier; known: {', '.join(names)}", field="spec.contract.least_tier"
                )
            least = names.index(least_tier)
            tiers = tuple(p for p in tiers if names.index(p.tier) >= least)
            if not tiers:
                raise InvalidRequest("the tier asked for is below least_tier", field="spec.contract.least_tier")
        return tiers
