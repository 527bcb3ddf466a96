"""How fast this worker is: measured rates for its lease, which admission and the scheduler plan with.

Moving averages weighted by jobs, so that idle time neither ages nor skews them. 0 means not measured yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from laneway.policy.stealing import PrefixSaved

WEIGHT = 0.1  # of the newest job; about the last 20 jobs count
# A shorter prompt takes a step or two whatever its length: it says how fast prefill is at least, not how fast it is.
PREFILL_SAMPLE_TOKENS_MIN = 256


@dataclass(slots=True)
class Average:
    """A moving average that starts as the plain mean."""

    value: float = 0.0
    count: int = 0

    def add(self, sample: float) -> None:
        self.count += 1
        self.value += (sample - self.value) * max(WEIGHT, 1.0 / self.count)


class Rates:
    """Owns the measured rates and totals of one worker incarnation."""

    def __init__(self, prefill_prior: float = 0.0) -> None:
        self._prefill = Average()
        self._prefill_prior = prefill_prior  # the catalogue's, tokens a second
        self._prefill_least = 0.0
        self._decode = Average()
        self._service = Average()
        self.saved = PrefixSaved()
        self.jobs_done = 0
        self.tokens_done = 0

    def prefilled(self, tokens: int, span_s: float) -> None:
        """`tokens` prompt tokens were computed in `span_s`, from submission to the first token."""
        if tokens <= 0 or span_s <= 0.0:
            return
        rate = tokens / span_s
        if tokens >= PREFILL_SAMPLE_TOKENS_MIN:
            self._prefill.add(rate)
        else:
            self._prefill_least = max(self._prefill_least, rate)

    def decoded(self, tokens: int, span_s: float) -> None:
        """`tokens` tokens of one sequence after its first one came in `span_s`."""
        if tokens > 0 and span_s > 0.0:
            self._decode.add(tokens / span_s)

    def finished(self, tokens: int, service_s: float) -> None:
        """A job ended with a result, `service_s` after its claim."""
        self.answered(tokens)
        self._service.add(service_s)

    def answered(self, tokens: int) -> None:
        """A job ended with a result that says nothing of how fast the engine is."""
        self.jobs_done += 1
        self.tokens_done += tokens

    @property
    def prefill_tokens_per_s(self) -> float:
        if self._prefill.count:
            return self._prefill.value
        return self._prefill_least if self._prefill_least > self._prefill_prior else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        return self._decode.value

    @property
    def service_s(self) -> float:
        return self._service.value
