"""Which prompt prefixes a simulated engine has in its KV cache. Whole blocks, least recently used first out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice


class PrefixCache:
    """Blocks by ids that stand for everything up to their end. It never holds more than `blocks`."""

    __slots__ = ("_blocks", "_held")

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._held: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def keep(self, ids: Sequence[int], count: int) -> None:
        """The first `count` of the ids, or as many as there are."""
        held = self._held
        touch = held.move_to_end
        # Last block first: what is dropped first is the end of a prefix, never the part that others may share.
        for block in reversed(ids[:count]):
            held[block] = None
            touch(block)
        while len(held) > self._blocks:
            held.popitem(last=False)

    def found(self, ids: Sequence[int], count: int) -> int:
        """How many of the first `count` ids are known, from the first on."""
        held, found = self._held, 0
        for block in islice(ids, count):
            if block not in held:
                break
            found += 1
        return found
