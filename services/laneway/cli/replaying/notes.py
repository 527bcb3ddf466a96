"""What became of each request, as it becomes known: the one writer of a replay's outcomes and counts.

Counts are kept by name: `refused.LANE_SATURATED`, `failed.NO_SERVICE`. Whether the player itself kept
up is noted here too, since the figures of a replay that was late are not the system's.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from laneway.core.fleet import StepTimes
from laneway.core.lanes import LANES, Lane
from laneway.simulator.outcomes import End, Outcomes
from laneway.simulator.trace import Trace
from laneway.simulator.usage import device_s

PRIORITY = LANES.index(Lane.PRIORITY)
LATE_S = 0.02  # a start later than this is counted; promises of TTFT are some hundred milliseconds
LATE_SHARE = 0.01  # of late starts from which a replay did not keep up


@dataclass(frozen=True, slots=True)
class Keeping:
    """How well the player itself kept up."""

    starts: int  # of priority requests
    late: int  # of them, begun more than LATE_S after their time
    late_p50_s: float
    late_p99_s: float
    late_most_s: float
    lower_late_most_s: float  # of the other lanes, whose promises are minutes
    pulse_p99_s: float  # how late the player's own loop woke up: what chunks may have waited to be heard

    @property
    def kept_up(self) -> bool:
        return self.late <= LATE_SHARE * self.starts and self.pulse_p99_s <= LATE_S


class Notes:
    """Times in seconds from the replay's begin. `on_end` hears of each request that ended; `times` say what an answer
    is worth, where the engine's step times are known."""

    def __init__(
        self, trace: Trace, on_end: Callable[[int, float], None] | None = None, times: StepTimes | None = None
    ) -> None:
        self.outcomes = Outcomes.of_size(len(trace))
        self.counts: Counter[str] = Counter()
        self.lane_tokens = np.zeros(len(LANES), dtype=np.int64)  # that callers got so far
        self.lane_device_s = np.full(len(LANES), np.nan if times is None else 0.0)  # of answers that were whole
        self.on_end = on_end
        self.ended = 0
        self.begun = 0
        self._trace = trace
        self._times = times
        self._late_s = array("d")  # of priority requests
        self._lower_late_most_s = 0.0
        self._pulses_s = array("d")
        self._prompt_errors = array("q")  # tokens that the model read beyond those of the trace

    # --- requests ----------------------------------------------------------------------------------------

    def begins(self, request: int, asked_s: float) -> None:
        """It is its time: what its caller waits for counts from now."""
        self.outcomes.asked_s[request] = self.outcomes.accepted_s[request] = asked_s
        self.begun += 1

    def asks(self, request: int, at_s: float) -> None:
        """The first call is made for it, at its time or later."""
        late_s = max(0.0, at_s - float(self.outcomes.asked_s[request]))
        if self._trace.lane[request] == PRIORITY:
            self._late_s.append(late_s)
        else:
            self._lower_late_most_s = max(self._lower_late_most_s, late_s)

    def asks_again(self, request: int, at_s: float, reason: str) -> None:
        self.outcomes.accepted_s[request] = at_s
        self.outcomes.retries[request] += 1
        self.counts[f"retried.{reason}"] += 1

    def heard(self, request: int, tokens: int, at_s: float) -> None:
        """More tokens of its answer came."""
        if self.outcomes.tokens[request] == 0:
            self.outcomes.first_s[request] = at_s
        self.outcomes.tokens[request] += tokens
        self.lane_tokens[self._trace.lane[request]] += tokens

    def usage(self, request: int, prompt_tokens: int, cached_tokens: int) -> None:
        """What the answer said of its prompt."""
        self.outcomes.cached_tokens[request] = cached_tokens
        self._prompt_errors.append(prompt_tokens - int(self._trace.prompt_tokens[request]))

    def timed(self, request: int, first_s: float) -> None:
        """Its first token's time as the services have it, of an answer that was collected later."""
        self.outcomes.first_s[request] = first_s

    def ends(self, request: int, end: End, at_s: float, reason: str = "") -> None:
        outcomes = self.outcomes
        assert outcomes.end[request] == End.OPEN, f"request {request} ended before"
        outcomes.end[request], outcomes.end_s[request] = end, at_s
        self.ended += 1
        if reason:
            self.counts[f"{end.name.lower()}.{reason}"] += 1
        if end is End.DONE:
            self._worth(request)
        if self.on_end is not None:
            self.on_end(request, at_s)

    def _worth(self, request: int) -> None:
        trace, tokens = self._trace, int(self.outcomes.tokens[request])
        if tokens != trace.output_tokens[request]:
            self.counts["answers.of_another_length"] += 1
        if self._times is not None:
            worth_s = device_s(int(trace.prompt_tokens[request]), tokens, self._times)
            self.lane_device_s[trace.lane[request]] += worth_s

    # --- the player itself -------------------------------------------------------------------------------

    def pulse(self, late_s: float) -> None:
        self._pulses_s.append(late_s)

    def keeping(self) -> Keeping:
        late_s = np.array(self._late_s or [0.0])
        return Keeping(
            starts=len(self._late_s),
            late=int(np.count_nonzero(late_s > LATE_S)),
            late_p50_s=float(np.quantile(late_s, 0.5)),
            late_p99_s=float(np.quantile(late_s, 0.99)),
            late_most_s=float(late_s.max()),
            lower_late_most_s=self._lower_late_most_s,
            pulse_p99_s=float(np.quantile(self._pulses_s, 0.99, method="lower")) if self._pulses_s else 0.0,
        )

    def prompt_tokens_off(self) -> tuple[float, int]:
        """Of the prompts whose answers told their length: mean and largest deviation from the trace, in tokens."""
        if not self._prompt_errors:
            return 0.0, 0
        errors = np.abs(np.array(self._prompt_errors))
        return float(errors.mean()), int(errors.max())
