"""Which beginnings of prompts the engine probably still has: what this worker had it compute, newest last.

A guess, for how large a slice may be: what the engine really found is in its first output. It is wrong where the engine
has dropped what is here, which costs one larger slice.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence


class KnownPrefixes:
    """Hashes of whole blocks, each of everything up to its end. As many as the engine's KV cache has blocks."""

    def __init__(self, block_tokens: int, blocks_max: int) -> None:
        self.block_tokens = block_tokens
        self._blocks_max = blocks_max
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def learn(self, ids: Sequence[int], space: object) -> None:
        """The engine has computed these. `space`: what else must be equal for them to be found again."""
        for block in reversed(list(self._hashes(ids, space))):  # the end of a prefix is forgotten first
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._blocks_max:
            self._blocks.popitem(last=False)

    def known_tokens(self, ids: Sequence[int], space: object) -> int:
        """How many of the first ids are likely to be found, at least one left over."""
        known = 0
        for block in self._hashes(ids[:-1], space):
            if block not in self._blocks:
                break
            known += self.block_tokens
        return known

    def forget(self) -> None:
        """Another engine begins with nothing."""
        self._blocks.clear()

    def _hashes(self, ids: Sequence[int], space: object) -> Iterator[int]:
        state = hash(space)
        for start in range(0, len(ids) - self.block_tokens + 1, self.block_tokens):
            state = hash((state, *ids[start : start + self.block_tokens]))
            yield state
