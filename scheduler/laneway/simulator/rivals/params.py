"""What every rival may choose: the engine it runs on, how much KV it gives away, and whether it follows prefixes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from laneway.simulator.setup import EngineSize


@dataclass(frozen=True, slots=True)
class Common:
    """Searched per load for each rival alike. Rivals with more to choose add their own."""

    chunk_tokens: int = 512  # most prompt tokens of one step
    slots: int = 64  # most sequences of one engine: the batch cap
    kv_ceiling: float = 1.0  # share of an engine's KV that is given away, 0 to 1; the rest keeps cached prefixes
    pending_tokens: int = 4096  # an engine with so many of prompts to compute is given no more; 0: no such end
    affinity: bool = True  # goes where the uncached part of the prompt is short

    def size(self, of: EngineSize) -> EngineSize:
        """`of` with the chunk and the batch cap of these: what engines must be made with."""
        return replace(of, slots=self.slots, chunk_tokens=self.chunk_tokens)
