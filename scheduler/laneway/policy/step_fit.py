"""What a step of an engine costs, learned from the steps it makes: `StepFit` gives `StepTimes` at any moment.

Formula. A step takes

    t = base + sequence x b + context_token x K + prefill_token x p        (seconds)

for `b` decoding sequences that hold `K` tokens of KV together, and `p` prompt tokens that it computes. Both parts are
least squares with forgetting (0.99 a step: about the last hundred count), each beside a prior that is not forgotten:

- base, sequence and context_token from steps without prompt tokens. The prior weighs like a tenth of a step, so where
  steps say something it hardly counts, and where they do not (always the same batch, say) the coefficients stay near
  it: that bounds the covariance. Coefficients are never negative: the most negative one is set to 0 and the others are
  solved again.
- prefill_token from what steps with prompt tokens take longer than that, weighted by tokens. It is forgotten by such
  steps only, so a night without prompts loses nothing. Steps that decode nothing count only as long as no others were
  seen: engines price a prompt alone otherwise than beside decoding, and the latter is what callers feel. One that was
  shorter than its decoding alone is thought to be says so of that as well: where no step is without prompt tokens.

A step far off what was expected counts as being 3 typical deviations off (Huber), so a hiccup of the host moves nothing
much; typical deviations grow by a tenth with each such step, so that a real change is taken over within some 30 steps.

An engine that does not say what its steps compute has the prior times one ratio (`observe_ratio`).

Source: docs/policy.md, "Interference"; the guards are those of the reference policy's "Fit". Complexity: O(1) a step, a
3 x 3 system solved when somebody asks. Failure mode: costs that are not linear (attention of very long prompts, the
first few sequences of a batch) are met on the mean of what was seen lately; the budget's outer loop corrects for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from laneway.core.fleet import StepTimes

FORGETTING = 0.99
PRIOR_STEPS = 0.1  # what the prior weighs, in steps of one unit each
# Units in which the prior weighs about equally on all coefficients: a usual batch and its context.
SEQUENCES_UNIT = 16.0
CONTEXT_UNIT = 8192.0
PREFILL_UNIT = 128.0
PLAIN_STEPS = 10  # the first steps are taken as they are: the prior may be far off
DEVIATIONS_CAP = 3.0
DEVIATION_MIN = 0.05  # of what is expected
DEVIATION_WEIGHT = 0.05
RATIO_WEIGHT = 0.05
RATIO_MIN, RATIO_CAP = 0.05, 20.0


class StepSeen(Struct, frozen=True):
    """One step as it was."""

    length_s: float
    sequences: int  # that decoded
    context_tokens: int  # which these held
    prompt_tokens: int  # that it computed


class StepFit:
    """Owned by one worker; fed with each step of its engine."""

    def __init__(self, prior: StepTimes) -> None:
        """`prior`: from calibration, a profile or the catalogue's rates."""
        self._prior = prior
        self._start = (prior.base_s, prior.sequence_s * SEQUENCES_UNIT, prior.context_token_s * CONTEXT_UNIT)
        self._matrix = [[0.0] * 3 for _ in range(3)]
        self._right = [0.0] * 3
        self._decode = self._start  # solved
        self._decode_spread = _Spread()
        self._prefill_num = 0.0
        self._prefill_den = 0.0
        self._prefill_spread = _Spread()
        self._mixed = False  # a step with both prompt tokens and decoding was seen
        self._ratio = 1.0
        self._ratio_only = False
        self._times: StepTimes | None = None

    @property
    def times(self) -> StepTimes:
        """As far as is known now. All coefficients are at least 0."""
        if self._times is None:
            self._times = self._solved()
        return self._times

    @property
    def ratio(self) -> float:
        """Moving average of real / expected step times: 1 where the fit is right, and what it is off by where it
        cannot follow."""
        return self._ratio

    def observe(self, step: StepSeen) -> None:
        """Takes a step of an engine that says what its steps compute."""
        if not 0.0 < step.length_s < 3600.0 or step.sequences + step.prompt_tokens <= 0:
            return
        times = self.times
        expected_s = times.step_s(step.sequences, step.context_tokens, step.prompt_tokens)
        self._learn_ratio(step.length_s, expected_s)
        if step.prompt_tokens <= 0:
            self._learn_decode(step, expected_s)
        elif step.sequences > 0 or not self._mixed:
            if step.sequences > 0 and not self._mixed:
                self._mixed = True
                self._prefill_num = self._prefill_den = 0.0
            if step.length_s < times.decode_s(step.sequences, step.context_tokens):
                self._learn_decode(step, expected_s)  # without the prompt it would not have been longer
            self._learn_prefill(step, times)
        self._times = None

    def observe_ratio(self, length_s: float, expected_s: float) -> None:
        """Takes what something took and what the prior says of it: all that is learned of an engine without
        statistics."""
        if 0.0 < length_s < 3600.0 and expected_s > 0.0:
            self._ratio_only = True
            self._learn_ratio(length_s, expected_s)
            self._times = None

    def _learn_ratio(self, length_s: float, expected_s: float) -> None:
        if expected_s > 0.0:
            ratio = min(RATIO_CAP, max(RATIO_MIN, length_s / expected_s))
            self._ratio += RATIO_WEIGHT * (ratio - self._ratio)

    def _learn_decode(self, step: StepSeen, expected_s: float) -> None:
        length_s = self._decode_spread.bounded(step.length_s, expected_s)
        row = (1.0, step.sequences / SEQUENCES_UNIT, step.context_tokens / CONTEXT_UNIT)
        for i in range(3):
            for j in range(3):
                self._matrix[i][j] = FORGETTING * self._matrix[i][j] + row[i] * row[j]
            self._right[i] = FORGETTING * self._right[i] + row[i] * length_s

    def _learn_prefill(self, step: StepSeen, times: StepTimes) -> None:
        units = step.prompt_tokens / PREFILL_UNIT
        decode_s = times.decode_s(step.sequences, step.context_tokens)
        expected_s = decode_s + times.prefill_token_s * step.prompt_tokens
        extra_s = self._prefill_spread.bounded(step.length_s, expected_s) - decode_s
        self._prefill_num = FORGETTING * self._prefill_num + units * extra_s
        self._prefill_den = FORGETTING * self._prefill_den + units * units

    def _solved(self) -> StepTimes:
        prior = self._prior
        if self._ratio_only:
            ratio = self._ratio
            return replace(
                prior,
                base_s=prior.base_s * ratio,
                sequence_s=prior.sequence_s * ratio,
                context_token_s=prior.context_token_s * ratio,
                prefill_token_s=prior.prefill_token_s * ratio,
            )
        base, sequence, context = _least_squares(self._matrix, self._right, self._start)
        prefill = self._prefill_num + PRIOR_STEPS * prior.prefill_token_s * PREFILL_UNIT
        return StepTimes(
            base_s=base,
            sequence_s=sequence / SEQUENCES_UNIT,
            context_token_s=context / CONTEXT_UNIT,
            prefill_token_s=max(0.0, prefill / (self._prefill_den + PRIOR_STEPS)) / PREFILL_UNIT,
            chunk_tokens=prior.chunk_tokens,
        )


class _Spread:
    """How far steps typically are from what was expected, and what becomes of those that are further off."""

    def __init__(self) -> None:
        self._deviation_s = 0.0
        self._count = 0

    def bounded(self, length_s: float, expected_s: float) -> float:
        self._count += 1
        off_s = abs(length_s - expected_s)
        if self._count <= PLAIN_STEPS:
            self._deviation_s += (off_s - self._deviation_s) / self._count
            return length_s
        limit_s = DEVIATIONS_CAP * max(self._deviation_s, DEVIATION_MIN * expected_s)
        self._deviation_s += DEVIATION_WEIGHT * (min(off_s, limit_s) - self._deviation_s)
        return min(max(length_s, expected_s - limit_s), expected_s + limit_s)


def _least_squares(
    matrix: Sequence[Sequence[float]], right: Sequence[float], prior: tuple[float, float, float]
) -> tuple[float, float, float]:
    """The best coefficients of at least 0 beside the prior."""
    free = [0, 1, 2]
    while free:
        rows = [[matrix[i][j] + (PRIOR_STEPS if i == j else 0.0) for j in free] for i in free]
        found = _eliminate(rows, [right[i] + PRIOR_STEPS * prior[i] for i in free])
        least = min(range(len(free)), key=lambda at: found[at])
        if found[least] >= 0.0:
            values = [0.0, 0.0, 0.0]
            for at, index in enumerate(free):
                values[index] = found[at]
            return values[0], values[1], values[2]
        del free[least]
    return 0.0, 0.0, 0.0


def _eliminate(rows: list[list[float]], right: list[float]) -> list[float]:
    """Solves a small symmetric positive definite system."""
    size = len(right)
    for i in range(size):
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            for k in range(i, size):
                rows[j][k] -= factor * rows[i][k]
            right[j] -= factor * right[i]
    found = [0.0] * size
    for i in reversed(range(size)):
        found[i] = (right[i] - sum(rows[i][j] * found[j] for j in range(i + 1, size))) / rows[i][i]
    return found
