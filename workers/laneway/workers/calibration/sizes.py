"""Which prompts, batches and contexts are worth measuring on an engine of a given capacity."""

from __future__ import annotations

from msgspec import Struct

from laneway.workers.engines.protocol import EngineCapacity

PROMPTS = (32, 128, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)
PREFIXES = (512, 2048, 8192)
TAILS = (32, 256)
CONTEXTS = (128, 512, 1024, 2048, 4096, 8192, 16_384)
QUICK_MOST = 1024  # tokens of a prompt or context


class Sizes(Struct, frozen=True):
    prompts: tuple[int, ...]
    prefixes: tuple[int, ...]  # empty: the engine keeps none
    tails: tuple[int, ...]  # new tokens after a prefix
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    repeats: int  # of a prompt, and of each abort
    window_steps: int  # of a batch
    cell_s_max: float  # of prefill for one point; what would take longer is left out


def sizes_of(capacity: EngineCapacity, *, prefix_cache: bool, quick: bool) -> Sizes:
    """Rising sizes that fit; `quick` measures fewer of them, less often."""
    most = min(capacity.context_length - 2, capacity.kv_tokens // 2)
    if quick:
        most = min(most, QUICK_MOST)
    chunk = (capacity.chunk_tokens,) if capacity.chunk_tokens else ()
    batches = [1]
    while batches[-1] * (4 if quick else 2) < capacity.slots:
        batches.append(batches[-1] * (4 if quick else 2))
    if capacity.slots > batches[-1]:
        batches.append(capacity.slots)
    return Sizes(
        prompts=tuple(sorted({tokens for tokens in (*PROMPTS, *chunk) if tokens <= most})) or (max(1, most),),
        prefixes=tuple(tokens for tokens in PREFIXES if tokens + TAILS[-1] <= most) if prefix_cache else (),
        tails=TAILS,
        batches=tuple(batches),
        contexts=tuple(tokens for tokens in CONTEXTS if tokens <= most) or (max(1, most),),
        repeats=3 if quick else 5,
        window_steps=12 if quick else 24,
        cell_s_max=3.0 if quick else 15.0,
    )
