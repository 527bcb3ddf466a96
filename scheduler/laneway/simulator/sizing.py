"""How many workers it takes: the fewest with which a promise holds."""

from __future__ import annotations

from collections.abc import Callable


def fewest(holds: Callable[[int], bool], most: int) -> int | None:
    """The fewest workers, 1 to `most`, with which it holds; None: not with `most` either.

    Doubles until it holds, then halves what lies between. Where more workers are not always better (bursts fall on them
    otherwise), the answer holds and one less does not: what was found by halving is asked again downwards. About
    2 log2(answer) questions, each asked once.
    """
    known: dict[int, bool] = {}

    def ask(workers: int) -> bool:
        if workers not in known:
            known[workers] = holds(workers)
        return known[workers]

    high = 1
    while not ask(high):
        if high >= most:
            return None
        high = min(most, 2 * high)
    low = high // 2 if high > 1 else 0  # did not hold, or is none
    while high - low > 1:
        middle = (low + high) // 2
        if ask(middle):
            high = middle
        else:
            low = middle
    while high > 1 and ask(high - 1):
        high -= 1
    return high
