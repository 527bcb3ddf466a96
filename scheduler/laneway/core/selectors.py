"""Which of a tier's pools takes a job: by its lane, the length of its prompt and the abilities that it uses.

A tier may have several pools: one for priority alone, one for long prompts, one whose workers have adapters. Each
says what it takes (Selector). Of a tier's pools

1. those that name a feature which the job uses go before all others,
2. then those that name lanes or lengths,
3. then those that name nothing, in the order of the settings.

Only the first of these kinds that has a pool for the job is asked: a job for long prompts does not slip into the pool
for short ones because that is idle. Within 1 and 2 no two pools of a tier may take the same job, so that it is always
clear which one; and each must be reachable. `conflicts` finds what breaks that. Pure; pools are judged by their fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from msgspec import Struct

from laneway.core.errors import Unsupported
from laneway.core.lanes import LANES, Lane

GENERAL = "what no other pool of its tier takes"
GENERAL_RANK = 3


class Selector(Struct, frozen=True):
    """What a pool takes; what it does not name it takes whatever it is."""

    lanes: tuple[Lane, ...] = ()
    prompt_tokens_min: int = 0
    prompt_tokens_max: int = 0  # 0: as many as its context holds
    features: tuple[str, ...] = ()  # abilities; a job must use one of them

    @property
    def rank(self) -> int:
        """1 is asked first."""
        if self.features:
            return 1
        return 2 if self.lanes or self.prompt_tokens_min or self.prompt_tokens_max else GENERAL_RANK

    def takes_lane(self, lane: Lane) -> bool:
        return not self.lanes or lane in self.lanes

    def takes_length(self, prompt_tokens: int) -> bool:
        return self.prompt_tokens_min <= prompt_tokens and (
            not self.prompt_tokens_max or prompt_tokens <= self.prompt_tokens_max
        )

    def used_features(self, features: frozenset[str]) -> tuple[str, ...]:
        return tuple(name for name in self.features if name in features)

    def words(self, features: frozenset[str] | None = None) -> str:
        """What it takes, for people. `features`: those that a job uses; others are left out."""
        named = self.features if features is None else self.used_features(features)
        said = [f"features {', '.join(named)}"] if named else []
        if self.lanes:
            said.append(f"lanes {', '.join(lane.value for lane in self.lanes)}")
        if self.prompt_tokens_min:
            said.append(f"prompts from {self.prompt_tokens_min} tokens")
        if self.prompt_tokens_max:
            said.append(f"prompts to {self.prompt_tokens_max} tokens")
        return "; ".join(said) or GENERAL


class Selected(Protocol):
    """What is read of a pool."""

    @property
    def name(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def tier(self) -> str: ...
    @property
    def context_length(self) -> int: ...
    @property
    def selector(self) -> Selector: ...


P = TypeVar("P", bound=Selected)


def choose(pools: Sequence[P], lane: Lane, prompt_tokens: Callable[[P], int], features: frozenset[str]) -> list[P]:
    """Of each tier the pools that take the job, in the order of the tiers. Unsupported, naming the field, if none does.

    `pools`: of one model, able to serve the job. `prompt_tokens`: in a pool's tokens. O(pools x tiers).
    """
    chosen: list[P] = []
    for tier in dict.fromkeys(pool.tier for pool in pools):
        fitting = [
            pool
            for pool in pools
            if pool.tier == tier
            and pool.selector.takes_lane(lane)
            and pool.selector.takes_length(prompt_tokens(pool))
            and (not pool.selector.features or pool.selector.used_features(features))
        ]
        first = min((pool.selector.rank for pool in fitting), default=0)
        asked = [pool for pool in fitting if pool.selector.rank == first]
        # A job may use features of two pools; both can do all it needs, and one of them is enough.
        chosen += asked[:1] if first == 1 else asked
    if not chosen:
        raise _nobody_takes(pools, lane, prompt_tokens(pools[0]))
    return chosen


def reason_of(pool: Selected, pools: Sequence[Selected], features: frozenset[str]) -> str:
    """Why this pool of its tier; empty where there was no choice to make. `pools`: as the catalogue has them."""
    mates = [other for other in pools if other.model == pool.model and other.tier == pool.tier]
    return pool.selector.words(features) if any(mate.selector.rank < GENERAL_RANK for mate in mates) else ""


def _nobody_takes(pools: Sequence[Selected], lane: Lane, prompt_tokens: int) -> Unsupported:
    in_lane = [pool for pool in pools if pool.selector.takes_lane(lane)]
    facts = {"lane": lane.value, "prompt_tokens": str(prompt_tokens)}
    if not in_lane:
        taken = [each.value for each in LANES if any(pool.selector.takes_lane(each) for pool in pools)]
        return Unsupported(
            f"no pool of this model takes jobs of the {lane} lane for what is asked; lanes taken: {', '.join(taken)}",
            field="spec.contract.lane", reason="LANE_NOT_SERVED", facts=facts,
        )  # fmt: skip
    if not any(pool.selector.takes_length(prompt_tokens) for pool in in_lane):
        taken = [pool.selector.words() for pool in in_lane]
        return Unsupported(
            f"no pool of this model takes a prompt of {prompt_tokens} tokens in the {lane} lane; there are: "
            f"{' | '.join(dict.fromkeys(taken))}",
            field="spec.generate.prompt", reason="PROMPT_LENGTH_NOT_SERVED", facts=facts,
        )  # fmt: skip
    named = sorted({name for pool in in_lane for name in pool.selector.features})
    return Unsupported(
        f"the pools of this model that would take the job are kept for those that use {' or '.join(named)}",
        field="spec.generate", reason="POOL_KEPT_FOR_FEATURES", facts=facts,
    )  # fmt: skip


# --- configurations ----------------------------------------------------------------------------------


class Conflict(Struct, frozen=True):
    """What is wrong with the selectors of a catalogue."""

    index: int  # of the pool
    field: str
    message: str


def conflicts(pools: Sequence[Selected]) -> Iterator[Conflict]:
    """Pools that take the same jobs as another of their tier, and pools that no job reaches."""
    for index, pool in enumerate(pools):
        if pool.selector.prompt_tokens_min >= pool.context_length:
            yield Conflict(
                index, "prompt_tokens_min",
                f"{pool.selector.prompt_tokens_min} is not below the pool's context_length of {pool.context_length}, "
                "so no job reaches it",
            )  # fmt: skip
        mates = [(at, other) for at, other in enumerate(pools[:index]) if _mates(other, pool)]
        for at, other in mates:
            if (field := _shared(pool.selector, other.selector)) is not None:
                yield Conflict(
                    index, field,
                    f"pool {pool.name} ({pool.selector.words()}) and pool {other.name} of models[{at}] "
                    f"({other.selector.words()}) take the same jobs of tier {pool.tier}",
                )  # fmt: skip
    yield from _unreached(pools)


def _mates(one: Selected, other: Selected) -> bool:
    return one.model == other.model and one.tier == other.tier


def _shared(one: Selector, other: Selector) -> str | None:
    """The field by which two selectors of one rank are to be put apart, if they take the same jobs."""
    if one.rank != other.rank or one.rank == GENERAL_RANK:
        return None
    if one.features and not set(one.features) & set(other.features):
        return None
    if one.lanes and other.lanes and not set(one.lanes) & set(other.lanes):
        return None
    if _top(one) < other.prompt_tokens_min or _top(other) < one.prompt_tokens_min:
        return None
    if one.lanes:
        return "lanes"
    if one.prompt_tokens_min:
        return "prompt_tokens_min"
    return "prompt_tokens_max" if one.prompt_tokens_max else "features"


def _top(selector: Selector) -> float:
    return selector.prompt_tokens_max or float("inf")


def _unreached(pools: Sequence[Selected]) -> Iterator[Conflict]:
    """Pools that name nothing, where others take every lane and every length of prompt that they have room for."""
    for index, pool in enumerate(pools):
        if pool.selector.rank != GENERAL_RANK:
            continue
        before = [mate.selector for mate in pools if _mates(mate, pool) and mate.selector.rank == 2]
        starts = {1, *(selector.prompt_tokens_max + 1 for selector in before if selector.prompt_tokens_max)}
        lengths = [length for length in starts if length < pool.context_length]
        reached = any(
            not any(selector.takes_lane(lane) and selector.takes_length(length) for selector in before)
            for lane in LANES
            for length in lengths
        )
        if not reached:
            yield Conflict(
                index, "pool",
                f"no job reaches pool {pool.name}: others of tier {pool.tier} take every lane and length; "
                "leave it out, or name what it is for",
            )  # fmt: skip
