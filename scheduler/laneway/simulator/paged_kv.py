"""KV blocks that are handed out as sequences grow, counted without looking at each sequence in each step.

All that decode grow by one token a step, so one whose tokens filled its blocks after step s needs a new block after
every `block_tokens` steps from s on: it is enough to know how many sequences there are for each remainder of s.
"""

from __future__ import annotations


class PagedKv:
    __slots__ = ("_block_tokens", "_blocks", "_decoding", "_due", "_held")

    def __init__(self, kv_tokens: int, block_tokens: int) -> None:
        self._blocks = kv_tokens // block_tokens
        self._block_tokens = block_tokens
        self._held = 0  # blocks, the ones that the next step fills included
        self._decoding = 0
        self._due = [0] * block_tokens  # sequences that need a new block, by remainder of the step

    @property
    def free_blocks(self) -> int:
        """Below 0: the next step needs more than there is."""
        return self._blocks - self._held

    def of_prompt(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)

    def prompt_joins(self, tokens: int) -> None:
        self._held += self.of_prompt(tokens)

    def prompt_leaves(self, tokens: int) -> None:
        self._held -= self.of_prompt(tokens)

    def decode_joins(self, base_step: int, steps: int) -> None:
        """After so many steps; it has `steps - base_step` tokens, and the next step adds one."""
        self._held += (steps - base_step) // self._block_tokens + 1
        self._due[base_step % self._block_tokens] += 1
        self._decoding += 1

    def decode_leaves(self, base_step: int, steps: int) -> None:
        self._held -= (steps - base_step) // self._block_tokens + 1
        self._due[base_step % self._block_tokens] -= 1
        self._decoding -= 1

    def pass_steps(self, steps: int, more: int) -> None:
        """The engine made so many, and now some more."""
        rounds, rest = divmod(more, self._block_tokens)
        self._held += rounds * self._decoding
        if rest:
            begin = (steps + 1) % self._block_tokens
            end = begin + rest
            self._held += sum(self._due[begin:end])
            if end > self._block_tokens:
                self._held += sum(self._due[: end - self._block_tokens])

    def room_for(self, steps: int, wanted: int) -> int:
        """Of the wanted next steps, how many there is room for; at least 1 where `free_blocks` is not below 0."""
        free = self._blocks - self._held
        if free >= self._decoding * ((wanted - 1) // self._block_tokens + 1):
            return wanted
        rounds, free = divmod(free, self._decoding)
        fitting = rounds * self._block_tokens + 1
        while fitting < wanted:
            free -= self._due[(steps + fitting) % self._block_tokens]
            if free < 0:
                break
            fitting += 1
        return min(fitting, wanted)
