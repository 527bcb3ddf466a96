"""A router's guess at what a worker's prefix cache holds: the blocks that were sent there lately.

As llm-d's and SMG's routers have it (an approximate prefix tree, least recently used out first), here without a tree:
blocks are known by their id, and a prompt matches as far as its ids are known one after the other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class SentPrefixes:
    def __init__(self, blocks: int) -> None:
        """`blocks`: most that are remembered; at 0 nothing is."""
        self._most = blocks
        self._sent: OrderedDict[int, None] = OrderedDict()

    def match(self, blocks: Sequence[int]) -> int:
        """How many of the first blocks are there."""
        count = 0
        for block in blocks:
            if block not in self._sent:
                break
            count += 1
        return count

    def sent(self, blocks: Sequence[int]) -> None:
        """The tail goes in first, so that it is forgotten before the head, without which it is of no use."""
        for block in reversed(blocks):
            self._sent[block] = None
            self._sent.move_to_end(block)
        while len(self._sent) > self._most:
            self._sent.popitem(last=False)
