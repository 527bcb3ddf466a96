"""What a step of an engine costs, from steps that were measured on purpose: the prior that `step_fit` begins with.

Formula. As in `step_fit`: t = base + sequence x b + context_token x K + prefill_token x p. `base`, `sequence` and
`context_token` are the least squares of steps without prompt tokens, `prefill_token` that of what steps beside decoding
took longer for their prompt tokens; of steps that only prefill where there are no others. Both of *relative* errors
(each step's row is divided by its length), since a tenth too much matters as much in a step of 5 ms as in one of
50 ms. No coefficient is negative: of all ways to leave some out, the best without a negative one. Steps that are more
than three typical deviations off are then left out as hiccups of the host, and the rest is fitted again.

Times in seconds. Complexity: O(steps), and eight systems of at most 3 x 3. The order of steps changes nothing but
rounding. Failure mode: costs that are not linear (kernels of very small batches, attention of very long contexts) are
met on the mean; `relative_errors` says how well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from statistics import median

from msgspec.structs import replace

from laneway.core.fleet import StepTimes
from laneway.policy.step_fit import StepSeen

DEVIATIONS = 4.5  # times the median error: three standard deviations
DEVIATION_MIN = 0.1  # costs are not quite linear: what is off by less is no hiccup
SINGULAR = 1e-12  # of the diagonal: what steps of one kind only say nothing about


def fit_steps(steps: Iterable[StepSeen], chunk_tokens: int = 0) -> StepTimes:
    """All coefficients 0 where no step says anything."""
    seen = [step for step in steps if step.length_s > 0.0]
    plain = [step for step in seen if step.sequences and not step.prompt_tokens]
    times = _decode_of(plain, StepTimes(chunk_tokens=chunk_tokens))
    times = _decode_of(_calm(plain, times), times)
    mixed = [step for step in seen if step.sequences and step.prompt_tokens]
    prefill = mixed or [step for step in seen if step.prompt_tokens]
    times = _prefill_of(prefill, times)
    return _prefill_of(_calm(prefill, times), times)


def relative_errors(steps: Iterable[StepSeen], times: StepTimes) -> list[float]:
    """(expected - real) / real of each step."""
    return [
        times.step_s(step.sequences, step.context_tokens, step.prompt_tokens) / step.length_s - 1.0
        for step in steps
        if step.length_s > 0.0
    ]


def _calm(steps: Sequence[StepSeen], times: StepTimes) -> list[StepSeen]:
    off = [abs(error) for error in relative_errors(steps, times)]
    limit = max(DEVIATION_MIN, DEVIATIONS * median(off)) if off else 0.0
    return [step for step, error in zip(steps, off, strict=True) if error <= limit]


def _decode_of(steps: Sequence[StepSeen], times: StepTimes) -> StepTimes:
    base_s, sequence_s, context_token_s = _non_negative(
        [((1.0, float(step.sequences), float(step.context_tokens)), step.length_s) for step in steps]
    )
    return replace(times, base_s=base_s, sequence_s=sequence_s, context_token_s=context_token_s)


def _prefill_of(steps: Sequence[StepSeen], times: StepTimes) -> StepTimes:
    """Seconds for each prompt token, beyond what the step would take without any."""
    num = den = 0.0
    for step in steps:
        tokens = step.prompt_tokens / step.length_s
        num += tokens * (step.length_s - times.decode_s(step.sequences, step.context_tokens)) / step.length_s
        den += tokens * tokens
    return replace(times, prefill_token_s=max(0.0, num / den) if den else 0.0)


def _non_negative(rows: Sequence[tuple[tuple[float, float, float], float]]) -> tuple[float, float, float]:
    """Least squares of relative errors with three coefficients of at least 0."""
    scaled = [tuple(value / length_s for value in row) for row, length_s in rows if length_s > 0.0]
    best, least = (0.0, 0.0, 0.0), float(len(scaled)) or 1.0
    for size in (3, 2, 1):
        for kept in combinations(range(3), size):
            found = _solved(scaled, kept)
            if found is None or min(found) < 0.0:
                continue
            values = [0.0, 0.0, 0.0]
            for at, index in enumerate(kept):
                values[index] = found[at]
            error = sum((sum(v * x for v, x in zip(values, row, strict=True)) - 1.0) ** 2 for row in scaled)
            if error < least * (1.0 - 1e-9):
                best, least = (values[0], values[1], values[2]), error
    return best


def _solved(rows: Sequence[Sequence[float]], kept: Sequence[int]) -> list[float] | None:
    """The coefficients of the kept columns whose sum is nearest to 1 in every row; None where rows cannot tell."""
    size = len(kept)
    units = [max((abs(row[i]) for row in rows), default=0.0) for i in kept]
    if not all(units):
        return None
    scaled = [[row[i] / unit for i, unit in zip(kept, units, strict=True)] for row in rows]
    matrix = [[sum(row[i] * row[j] for row in scaled) for j in range(size)] for i in range(size)]
    right = [sum(row[i] for row in scaled) for i in range(size)]
    for i in range(size):
        if matrix[i][i] <= SINGULAR * len(rows):
            return None
        for j in range(i + 1, size):
            factor = matrix[j][i] / matrix[i][i]
            matrix[j] = [x - factor * y for x, y in zip(matrix[j], matrix[i], strict=True)]
            right[j] -= factor * right[i]
    found = [0.0] * size
    for i in reversed(range(size)):
        found[i] = (right[i] - sum(matrix[i][j] * found[j] for j in range(i + 1, size))) / matrix[i][i]
    return [value / unit for value, unit in zip(found, units, strict=True)]
