"""What a simulation runs on: an engine profile, the size of a worker, and the pool as the catalogue would have it."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from laneway.core.catalogue import Capabilities, Pool
from laneway.core.fleet import StepTimes
from laneway.runtime.engine_profile import EngineProfile, decode_tokens_per_s, prefill_tokens_per_s, step_times
from laneway.runtime.step_price import ProfilePrice
from laneway.simulator.engine import Engine

BLOCK_TOKENS = 32
POOL = "pool"
MODEL = "model"


@dataclass(frozen=True, slots=True)
class EngineSize:
    """What a discipline may choose of an engine. Tokens, sequences; `kv_share`: of the profile's capacity."""

    slots: int = 64
    chunk_tokens: int = 512
    kv_share: float = 1.0
    paged: bool = False
    prefix_cache: bool = True


@dataclass(frozen=True, slots=True)
class Setup:
    profile: EngineProfile
    size: EngineSize
    workers: int
    context_length: int = 131_072

    @property
    def times(self) -> StepTimes:
        """Least squares of the profile, at this chunk."""
        return replace(step_times(self.profile), chunk_tokens=self.size.chunk_tokens)

    @property
    def kv_tokens(self) -> int:
        return int(self.profile.kv_capacity_tokens * self.size.kv_share) // BLOCK_TOKENS * BLOCK_TOKENS

    def engine(self) -> Engine:
        """A new one. Its steps cost what the profile's tables say."""
        prefix_blocks = self.kv_tokens // BLOCK_TOKENS if self.size.prefix_cache else 0
        return Engine(
            ProfilePrice(self.profile),
            slots=self.size.slots,
            kv_tokens=self.kv_tokens,
            chunk_tokens=self.size.chunk_tokens,
            block_tokens=BLOCK_TOKENS,
            paged=self.size.paged,
            prefix_blocks=prefix_blocks,
        )

    def pool(self) -> Pool:
        return Pool(
            name=POOL,
            model=MODEL,
            tier="t",
            engine="simulated",
            context_length=self.context_length,
            vocabulary_size=0,
            slots=self.size.slots,
            workers=self.workers,
            kv_tokens=self.kv_tokens,
            tokenizer="bytes",
            capabilities=Capabilities(),
            prefill_tokens_per_s=prefill_tokens_per_s(self.profile),
            decode_tokens_per_s=decode_tokens_per_s(self.profile, max(1, self.size.slots // 2)),
            step_times=self.times,
        )
