"""Which prompt prefixes a simulated engine still has in its KV cache. Whole blocks, least recently used first out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

BLOCK_TOKENS = 32


class PrefixCache:
    """Blocks by the hash of everything up to their end, so equal hashes mean equal prefixes."""

    def __init__(self, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def keep(self, blocks: Sequence[int]) -> None:
        # Last block first: what is evicted first is the end of a prefix, never the part that others may share.
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._blocks_max:
            self._blocks.popitem(last=False)

    def found_tokens(self, blocks: Sequence[int]) -> int:
        """Tokens of the longest known prefix."""
        found = 0
        for block in blocks:
            if block not in self._blocks:
                break
            found += BLOCK_TOKENS
        return found
