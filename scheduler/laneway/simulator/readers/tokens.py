"""Token counts as a trace has them."""

from __future__ import annotations

import numpy as np

from laneway.simulator.trace import Ints


def at_least_one(tokens: Ints, what: str, notes: list[str]) -> Ints:
    """Counts of 0 become 1, with a note: the request was offered, and a failed answer is no reason to thin the load."""
    none = int(np.count_nonzero(tokens < 1))
    if none:
        notes.append(f"{none} {what} of 0 tokens count as 1")
    return np.maximum(tokens, 1)
