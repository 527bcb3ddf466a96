"""What is known of an engine beforehand: a profile, as `laneway calibrate engine` writes it or as it was computed.

A JSON file. `prefill` and `decode` hold the times of steps as tables: milliseconds for so many new prompt tokens by
themselves, and for a decode step by batch and context. `engine`, where the engine was measured, holds everything else.
The policy takes its priors from it and the simulated engine its pace, so this module belongs to neither.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from importlib import resources
from itertools import pairwise
from pathlib import Path

import msgspec

from laneway.core.errors import ConfigError
from laneway.core.fleet import StepTimes
from laneway.policy.step_fit import StepSeen
from laneway.policy.step_prior import fit_steps

FULL_TOKENS = 2048  # new tokens from which a prefill step costs in proportion, where no chunk was measured
DECODE_CONTEXT = 512  # tokens of each sequence in what a profile says of decoding as one number


class PrefillTimes(msgspec.Struct, frozen=True):
    new_tokens: list[int]
    ms: list[float]  # of all new tokens, however many steps they take


class PrefixTimes(msgspec.Struct, frozen=True):
    prefix_tokens: list[int]  # found in the prefix cache
    new_tokens: list[int]
    ms: list[list[float]]  # a row for each prefix, a column for each number of new tokens


class DecodeTimes(msgspec.Struct, frozen=True):
    batch: list[int]
    context: list[int]
    ms: list[list[float]]  # a row for each batch, a column for each context


class EngineFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured beside the tables."""

    engine: str  # adapter
    version: str = ""
    machine: str = ""
    date: str = ""  # of the measurement, ISO 8601
    step_times: StepTimes  # least squares of all steps that were measured
    step_error: float = 0.0  # of these: nine of ten measured steps were expected as near as this, relative
    slots: int = 0
    block_tokens: int = 1
    kv_tokens: int = 0  # as the engine says
    kv_filled_tokens: int = 0  # as it was filled without an eviction or a wait; 0: not tried
    paged: bool = False
    chunk_tokens: int = 0
    load_s: float = 0.0
    abort_queued_s: float = 0.0
    abort_prefilling_s: float = 0.0
    abort_decoding_s: float = 0.0
    spread: float = 0.0  # of repeated measurements: three of four have half of theirs within this share of the median


class EngineProfile(msgspec.Struct, frozen=True):
    prefill: PrefillTimes
    decode: DecodeTimes
    kv_capacity_tokens: int
    name: str = ""
    what: str = ""
    source: str = ""
    licence: str = ""
    prefill_with_prefix: PrefixTimes | None = None
    engine: EngineFigures | None = None

    @property
    def chunk_tokens(self) -> int:
        """Most prompt tokens of one step; 0: not measured."""
        return self.engine.chunk_tokens if self.engine is not None else 0

    @property
    def full_tokens(self) -> int:
        """New tokens from which prefill costs in proportion."""
        return min(self.chunk_tokens or FULL_TOKENS, self.prefill.new_tokens[-1])


def step_times(profile: EngineProfile) -> StepTimes:
    """As measured, or the least squares of the tables within the KV that there is."""
    if profile.engine is not None:
        return profile.engine.step_times
    return fit_steps(_steps_of(profile), profile.full_tokens)


def prefill_tokens_per_s(profile: EngineProfile) -> float:
    """Of one prompt of some length that has the engine to itself."""
    times = profile.prefill
    at = max((i for i, tokens in enumerate(times.new_tokens) if tokens <= FULL_TOKENS), default=0)
    return times.new_tokens[at] / times.ms[at] * 1e3


def decode_tokens_per_s(profile: EngineProfile, sequences: int) -> float:
    """Of one of so many sequences of usual length."""
    return 1.0 / step_times(profile).decode_s(sequences, sequences * DECODE_CONTEXT)


def load_profile(name: str) -> EngineProfile:
    """A packaged profile by name, or a file by path; `path#name` picks from a file that holds several."""
    path_text, _, inner = name.partition("#")
    if not path_text.endswith(".json"):
        folder = resources.files("laneway.runtime") / "profiles"
        known = sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json"))
        if name not in known:
            raise ConfigError(f'profile = "{name}": no such profile; packaged: {", ".join(known)}; or a .json file')
        raw = (folder / f"{name}.json").read_bytes()
    else:
        try:
            raw = Path(path_text).read_bytes()
        except OSError as error:
            raise ConfigError(f'profile = "{name}": cannot read the file: {error.strerror}') from error
    return _decoded(raw, name, inner)


@lru_cache(maxsize=32)
def _decoded(raw: bytes, name: str, inner: str) -> EngineProfile:
    try:
        if inner:
            profiles = msgspec.json.decode(raw, type=_ProfileFile).profiles
            if inner not in profiles:
                raise ConfigError(f'profile = "{name}": the file holds {", ".join(sorted(profiles))}')
            profile = profiles[inner]
        else:
            profile = msgspec.json.decode(raw, type=EngineProfile)
    except msgspec.DecodeError as error:
        raise ConfigError(f'profile = "{name}": not a profile: {error}') from error
    _check(profile, name)
    return profile


class _ProfileFile(msgspec.Struct):
    profiles: dict[str, EngineProfile]


def _check(profile: EngineProfile, name: str) -> None:
    pre, dec, prefix = profile.prefill, profile.decode, profile.prefill_with_prefix
    fits = (
        len(pre.new_tokens) == len(pre.ms)
        and len(dec.batch) == len(dec.ms)
        and all(len(row) == len(dec.context) for row in dec.ms)
    )
    axes = [pre.new_tokens, dec.batch, dec.context]
    rows = [pre.ms, *dec.ms]
    if prefix is not None:
        fits = fits and len(prefix.prefix_tokens) == len(prefix.ms)
        fits = fits and all(len(row) == len(prefix.new_tokens) for row in prefix.ms)
        axes += [prefix.prefix_tokens, prefix.new_tokens]
        rows += prefix.ms
    rising = all(axis and axis[0] > 0 and all(a < b for a, b in pairwise(axis)) for axis in axes)
    positive = all(math.isfinite(ms) and ms > 0.0 for row in rows for ms in row)
    if not (fits and rising and positive and profile.kv_capacity_tokens > 0):
        raise ConfigError(f'profile = "{name}": axes must rise, times be positive, and tables fit their axes')
    if profile.engine is not None and not _sound(profile.engine):
        raise ConfigError(
            f'profile = "{name}": engine: times must be at least 0, base_s above 0, block_tokens at least 1'
        )


def _sound(figures: EngineFigures) -> bool:
    times = figures.step_times
    coefficients = (times.base_s, times.sequence_s, times.context_token_s, times.prefill_token_s, figures.load_s)
    whole = (figures.kv_tokens, figures.chunk_tokens, times.chunk_tokens, figures.slots)
    return (
        all(math.isfinite(value) and value >= 0.0 for value in coefficients)
        and times.base_s > 0.0
        and figures.block_tokens >= 1
        and min(whole) >= 0
    )


def _steps_of(profile: EngineProfile) -> Iterator[StepSeen]:
    """The tables as steps. Beside decoding new tokens cost their share of a full chunk: the weights are read anyway."""
    decode = profile.decode
    for batch, row in zip(decode.batch, decode.ms, strict=True):
        for context, ms in zip(decode.context, row, strict=True):
            if batch * context <= profile.kv_capacity_tokens:
                yield StepSeen(ms / 1e3, batch, batch * context, 0)
    prefill = profile.prefill
    upto = [
        (tokens, ms) for tokens, ms in zip(prefill.new_tokens, prefill.ms, strict=True) if tokens <= profile.full_tokens
    ]
    full, full_ms = upto[-1] if upto else (prefill.new_tokens[0], prefill.ms[0])
    for tokens, ms in upto:
        extra_ms = min(ms, full_ms * tokens / full)
        yield StepSeen((decode.ms[0][0] + extra_ms) / 1e3, decode.batch[0], decode.batch[0] * decode.context[0], tokens)
