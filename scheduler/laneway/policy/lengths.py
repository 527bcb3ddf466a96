"""How long answers get: quantiles of output lengths, learned for each (tenant, model), backing off to the model.

Lengths fall into log-spaced buckets whose counts decay, so that a changed prompt is forgotten old habits of within some
hundred answers. What is not learned yet is assumed: half of max_tokens where the middle is asked for, all of it where
the upper end is.
"""

from __future__ import annotations

import math
from collections import OrderedDict

BUCKETS_PER_OCTAVE = 4  # 19 % wide: far below the spread of lengths
BUCKET_COUNT = 20 * BUCKETS_PER_OCTAVE  # up to a million tokens
OBSERVATIONS_MIN = 50  # below, the parent key answers (policy: admission)
HALF_LIFE = 500  # observations
KEYS_MAX = 4096  # least recently used keys are forgotten


class LengthSketch:
    """Decaying counts of lengths in log-spaced buckets."""

    __slots__ = ("_counts", "total")

    def __init__(self) -> None:
        self._counts = [0.0] * BUCKET_COUNT
        self.total = 0.0

    def add(self, tokens: int) -> None:
        if self.total >= 2 * HALF_LIFE:
            self._counts = [count / 2 for count in self._counts]
            self.total /= 2
        bucket = min(BUCKET_COUNT - 1, int(math.log2(max(1, tokens)) * BUCKETS_PER_OCTAVE))
        self._counts[bucket] += 1.0
        self.total += 1.0

    def quantile(self, q: float) -> int:
        """Upper edge of the bucket that holds the q-quantile; 0 when nothing was seen."""
        left = q * self.total
        for bucket, count in enumerate(self._counts):
            left -= count
            if count and left <= 1e-9:
                return math.ceil(2 ** ((bucket + 1) / BUCKETS_PER_OCTAVE))
        return 0


class LengthBook:
    """Sketches by tenant and model. One owner feeds it with the answers it saw end by themselves or at their limit."""

    def __init__(self) -> None:
        self._sketches: OrderedDict[tuple[str, str], LengthSketch] = OrderedDict()

    def observe(self, tenant: str, model: str, tokens: int) -> None:
        for key in ((tenant, model), ("", model)):
            sketch = self._sketches.setdefault(key, LengthSketch())
            self._sketches.move_to_end(key)
            sketch.add(tokens)
        while len(self._sketches) > KEYS_MAX:
            self._sketches.popitem(last=False)

    def predict(self, tenant: str, model: str, q: float, max_tokens: int, *, min_tokens: int = 0) -> int:
        """The q-quantile of output tokens, between min_tokens and max_tokens."""
        for key in ((tenant, model), ("", model)):
            sketch = self._sketches.get(key)
            if sketch is not None and sketch.total >= OBSERVATIONS_MIN:
                return max(1, min_tokens, min(sketch.quantile(q), max_tokens))
        unlearned = math.ceil(max_tokens * min(1.0, q)) if q < 0.75 else max_tokens
        return max(1, min_tokens, min(unlearned, max_tokens))
