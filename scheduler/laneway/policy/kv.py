"""How much KV the sequences of an engine may come to hold together: whether one more fits.

Everything is counted in blocks, rounded up, since that is how engines hand KV out.

- A **reserving** engine (TensorRT-LLM's default, GUARANTEED_NO_EVICT) sets prompt + max_tokens aside when a sequence
  joins. So does the ledger: the sum may fill the whole cache and never more, and nothing is predicted.
- A **paged** engine hands out blocks as sequences grow, and evicts one when there is none left. There the ledger
  predicts: sequences end one after the other, so they never hold their largest sizes at the same time. With `l` the
  blocks that a sequence holds, `r` those that it is predicted to add, and sequences sorted by falling `r`

      peak = max_i ( sum_{j <= i} l_j + n_i x r_i )        n_i: sequences among the first i

  is what they hold together at the fullest moment: just before i ends, all with a longer way to go have grown as much.
  A job fits when the peak with it is at most `target x capacity - drift`.

`l` and `r` are each rounded up, so the peak may be one block a sequence too high and is never too low. Blocks that
several live sequences share (a common beginning, kept once by the engine's prefix cache) are counted once, beside the
sum and for as long as two hold them. On an empty engine whatever fits its whole cache fits, so that work is conserved.

`r` comes from a high quantile of output lengths; what outlives that is expected to go on to its limit. **Drift** is
what the engine holds beyond what the ledger knows, averaged: it only ever takes room away, so the ledger never goes
below what is certain.

Source: policy.md b3 and its "Ledger" (Past-Future, arXiv 2507.10150). Complexity: O(b log b) in b running sequences.
The order in which they are listed changes nothing. Failure modes: many answers longer than predicted at once (the
length sketches follow within some hundred answers; meanwhile `overrun_blocks` says when a run should yield by
checkpoint before the engine evicts one); sequences that do not advance together, as while others prefill, which makes
the peak come later and not higher where all wait alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from msgspec import Struct

DRIFT_WEIGHT = 0.05  # of the newest look at the engine; about the last 20 steps count


@dataclass(frozen=True, slots=True)
class KvParams:
    prediction: bool = True  # on paged engines; off: prompt + max_tokens everywhere
    target: float = 0.95  # share of the capacity that predicted peaks may fill

    def __post_init__(self) -> None:
        if not 0.0 < self.target <= 1.0:
            raise ValueError("target must be above 0 and at most 1")


class Growth(Struct, frozen=True):
    """What one request holds and will hold, in blocks."""

    held_blocks: int  # that only it holds
    rest_blocks: int  # that each of its sequences will add; 0 where all is set aside already
    sequences: int = 1


def blocks_of(tokens: int, block_tokens: int) -> int:
    return -(-tokens // block_tokens)


def rest_tokens(made: int, predicted: int, max_tokens: int) -> int:
    """Tokens that an answer is expected to add to `made`. One that outlives its prediction goes on to its limit."""
    return max(0, (predicted if made < predicted else max_tokens) - made)


def peak_blocks(growths: Iterable[Growth], shared_blocks: int = 0) -> int:
    """Blocks held at the fullest moment; `shared_blocks` are those with several holders, each counted once."""
    held = sequences = peak = 0
    for growth in sorted(growths, key=lambda each: -each.rest_blocks):
        held += growth.held_blocks
        sequences += growth.sequences
        peak = max(peak, held + sequences * growth.rest_blocks)
    return peak + shared_blocks


def limit_blocks(capacity_blocks: int, drift_blocks: float, params: KvParams, *, paged: bool) -> int:
    """What the peak may be. A reserving engine can fill all that it has, since nothing is guessed there."""
    limit = params.target * capacity_blocks if paged and params.prediction else float(capacity_blocks)
    return max(0, int(limit - drift_blocks))


def overrun_blocks(certain_blocks: int, sequences: int, capacity_blocks: int, drift_blocks: float) -> int:
    """Blocks that must be freed lest the engine evict a sequence: each that runs may need one more at any step."""
    return max(0, certain_blocks + sequences + int(drift_blocks) - capacity_blocks)


class Drift:
    """What the engine holds beyond what the ledger knows of, as a moving average of tokens; at least 0."""

    __slots__ = ("_tokens",)

    def __init__(self) -> None:
        self._tokens = 0.0

    def observe(self, engine_tokens: int, ledger_tokens: int) -> None:
        """Both of the same moment: what the engine says it holds or has yet to prefill, and what it was given."""
        drifted = self._tokens + (engine_tokens - ledger_tokens - self._tokens) * DRIFT_WEIGHT
        self._tokens = max(0.0, drifted)

    @property
    def tokens(self) -> float:
        return self._tokens
