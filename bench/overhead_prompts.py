"""What engine_overhead.py asks of everybody that it compares."""

from __future__ import annotations

import random

WORDS = ("road", "house", "river", "seven", "winter", "garden", "north", "letter", "bread", "silver", "music", "green")
WORDS_OF_A_PROMPT = 24


def prompts(seed: int, streams: int) -> list[str]:
    """No two begin alike, so that nothing comes from a prefix cache; the same for all who are compared."""
    rng = random.Random(f"prompts {seed}")
    return [f"{rng.randrange(10**9)}. {' '.join(rng.choices(WORDS, k=WORDS_OF_A_PROMPT))}" for _ in range(streams)]
