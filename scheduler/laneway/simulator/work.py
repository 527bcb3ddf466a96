"""A sequence that a simulated engine was asked for, and what the engine says of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

FIRST: Final = 0  # its first token
DONE: Final = 1  # its last token
EVICTED: Final = 2  # it left the batch for want of KV, and is computed again when there is room

# Where a sequence is.
APART: Final = 0  # not yet submitted, or ended
QUEUED: Final = 1
PREFILLING: Final = 2
DECODING: Final = 3


class Work:
    """One sequence: asked for once, of one engine. What is below the line is the engine's, not to be set by others.

    To go on with one that was aborted, ask for a new one whose prompt holds the tokens that it made.
    """

    __slots__ = (
        "again_tokens", "base_step", "blocks", "cached_tokens", "computed_tokens", "first_s", "joined", "known_tokens",
        "made", "output_tokens", "priority", "prompt_tokens", "request", "reserve_tokens", "state",
    )  # fmt: skip

    def __init__(
        self,
        request: int,
        prompt_tokens: int,
        output_tokens: int,
        reserve_tokens: int,
        priority: float = 0.0,
        blocks: Sequence[int] | None = None,
    ) -> None:
        self.request = request  # index in the trace
        self.prompt_tokens = prompt_tokens  # at least 1
        self.output_tokens = output_tokens  # at least 1
        self.reserve_tokens = reserve_tokens  # prompt + max_tokens
        self.priority = priority  # in the engine's queue, higher first
        # Ids of the prompt's whole blocks, each of which stands for everything up to its end; those of the answer's
        # may follow. None: it shares nothing with others.
        self.blocks = blocks
        self.known_tokens = 0  # of the prompt, which the caller knows to be in the engine's prefix cache
        # ---
        self.cached_tokens = 0  # of the prompt, found in the prefix cache when it joined the batch
        self.made = 0  # tokens of the answer: as of FIRST, DONE, EVICTED or its abort
        self.first_s = math.nan  # of its first token
        self.state: int = APART
        self.again_tokens = 0  # of those made, that are computed again with the prompt
        self.computed_tokens = 0  # with KV, while it is prefilling
        self.base_step = 0  # while it decodes, steps of the engine less tokens with KV: the same until its end
        self.joined = 0  # the batch, as the so many-th

    @property
    def prefill_tokens(self) -> int:
        """To compute before its next token, from its begin."""
        return self.prompt_tokens + self.again_tokens

    @property
    def last_step(self) -> int:
        """While it decodes: how many steps the engine will have made at its end."""
        return self.base_step + self.prompt_tokens + self.output_tokens - 1

    def made_by(self, steps: int) -> int:
        """While it decodes: tokens, after so many steps of the engine."""
        return steps - self.base_step - self.prompt_tokens + 1


class Event(NamedTuple):
    at_s: float
    kind: int  # FIRST, DONE or EVICTED
    work: Work
