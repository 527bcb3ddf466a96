"""How real times compare with what verdicts said, learned online: what the next ETAs and bounds are multiplied by.

Formula, for each pool, lane and kind of time (first token, whole answer):

    p50 = median of real / estimate          stated ETA   = p50 x estimate
    p90 = Q_level(real / estimate's bound)   stated bound = p90 x estimate's bound
    level += GAIN x (missed - 0.1)           missed: the real time was above the stated bound

Estimates are those of the model before correction (Verdict.estimate), so what was learned before does not count twice,
and jobs that are under way while the factors move do no harm. The quantiles come from two DDSketches half a life apart.
The level is adaptive conformal inference (Gibbs and Candes): where loads drift, the plain quantile of the past covers
too little or too much, and the level moves until 90 % are covered. Factors begin at 1 and BOUND_PRIOR, and what is
learned is believed by n / (n + PRIOR) of its logarithm, so a few odd jobs do not move them. Units: ratios. Cost: some
10 us for each job that ends. Source: policy.md (a), rho.

What counts: an answer counts with its real time when the job succeeded, however often it was preempted or taken over
before, since that is what its caller got. The first token counts of jobs that had one attempt (a record keeps the first
token of its last attempt alone). A job that expired counts as missed where its bound had passed by then; one that was
cancelled or failed, or expired before its bound, says nothing of the answer. Refused jobs and those with a not-before
count nowhere.

Failure modes: short jobs end first, so after a start or a jump of the load the first factors are those of the fast
ones, for about the length of a job; factors are of a lane, so a minority of very unlike requests may be covered much
worse than the lane; what expires before its bound hides the worst of an overload.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ddsketch.ddsketch import LogCollapsingLowestDenseDDSketch
from msgspec import Struct
from msgspec.structs import replace

from laneway.core.fleet import EtaFit, LanePlan, Plan
from laneway.core.job import Estimate, JobRecord
from laneway.core.lanes import JobState, Lane

COVERAGE = 0.9
GAIN = 0.005  # of the level for each job
LEVEL_MIN, LEVEL_MAX = 0.7, 0.995
HALF_LIFE = 500  # jobs: what is older than twice as many is forgotten; fewer would run behind swings of the load
PRIOR = 10.0  # jobs that speak for the factors before anything is known
BOUND_PRIOR = 1.5  # of bounds: a model that was never tried is doubted
FACTOR_MIN, FACTOR_MAX = 0.1, 10.0  # no factor is believed beyond
RATIO_MAX = 100.0  # a real time counts as so many times its estimate at most
ACCURACY = 0.01
BINS_MAX = 512
REFRESH_SHARE = 50  # factors are made anew when their sketch grew by this part


UNKNOWN = EtaFit()


class Span(Struct, frozen=True, array_like=True):
    """One time of a job that ended: what was said of it and what it came to."""

    estimate_s: float
    estimate_bound_s: float
    bound_s: float
    real_s: float
    over: bool = False  # the real time is more than `real_s`, and nobody knows how much

    @property
    def missed(self) -> bool:
        return self.real_s > self.bound_s


class Outcome(Struct, frozen=True, array_like=True):
    pool: str
    lane: Lane
    ttft: Span | None = None  # None: it says nothing
    completion: Span | None = None


def outcome_of(record: JobRecord) -> Outcome | None:
    """What a record says of its verdict; None unless it has ended and says something."""
    verdict, timings, contract = record.verdict, record.timings, record.contract
    estimate = verdict.estimate
    if estimate is None or not record.state.terminal or record.state is JobState.REFUSED:
        return None
    if contract.not_before_s > timings.created_s or not timings.ended_s:
        return None
    took_s = timings.ended_s - timings.created_s
    expired = record.state is JobState.EXPIRED
    ttft = completion = None
    if verdict.ttft_bound_s is not None and estimate.ttft_s > 0.0:
        first_s = timings.first_token_s - timings.created_s
        if record.attempt == 1 and first_s > 0.0:
            ttft = Span(estimate.ttft_s, estimate.ttft_bound_s, verdict.ttft_bound_s, first_s)
        elif expired and not record.attempt and took_s > verdict.ttft_bound_s:
            ttft = Span(estimate.ttft_s, estimate.ttft_bound_s, verdict.ttft_bound_s, took_s, over=True)
    if verdict.completion_bound_s is not None and estimate.completion_s > 0.0:
        said = (estimate.completion_s, estimate.completion_bound_s, verdict.completion_bound_s)
        if record.state is JobState.SUCCEEDED:
            completion = Span(*said, max(0.0, took_s))
        elif expired and took_s > verdict.completion_bound_s:
            completion = Span(*said, took_s, over=True)
    if ttft is None and completion is None:
        return None
    return Outcome(record.pool, contract.lane, ttft, completion)


class Factor:
    """The quantiles of one kind of time; see the module."""

    __slots__ = ("_bound", "_bound_next", "_fit", "_middle", "_middle_next", "_serves", "level", "samples")

    def __init__(self, fit: EtaFit = UNKNOWN) -> None:
        """`fit`: what an earlier owner published, believed until as much was seen here."""
        self.level = COVERAGE
        self.samples = 0
        self._middle, self._middle_next = _sketch(), _sketch()
        self._bound, self._bound_next = _sketch(), _sketch()
        self._serves = 0
        if fit.samples:
            for _ in range(min(fit.samples, 2 * int(PRIOR))):
                self._middle.add(fit.p50)
                self._bound.add(fit.p90)
            self.samples = min(fit.samples, 2 * int(PRIOR))
        self._fit = fit

    def add(self, span: Span) -> None:
        self.level += GAIN * (float(span.missed) - (1.0 - COVERAGE))
        self.level = min(LEVEL_MAX, max(LEVEL_MIN, self.level))
        if self._middle.count >= 2 * HALF_LIFE:
            self._middle, self._middle_next = self._middle_next, _sketch()
            self._bound, self._bound_next = self._bound_next, _sketch()
        worst = RATIO_MAX if span.over else 0.0
        middle = max(worst, min(RATIO_MAX, span.real_s / span.estimate_s))
        bound = max(worst, min(RATIO_MAX, span.real_s / max(span.estimate_s, span.estimate_bound_s)))
        self._middle.add(middle)
        self._bound.add(bound)
        if self._middle.count > HALF_LIFE:
            self._middle_next.add(middle)
            self._bound_next.add(bound)
        self.samples += 1
        self._serves -= 1

    def fit(self) -> EtaFit:
        if self._serves <= 0 and self.samples:
            trust = self._middle.count / (self._middle.count + PRIOR)
            p50 = _believed(self._middle.get_quantile_value(0.5), trust, 1.0)
            p90 = _believed(self._bound.get_quantile_value(self.level), trust, BOUND_PRIOR)
            self._fit = EtaFit(p50, p90, self.samples)
            self._serves = 1 + round(self._middle.count) // REFRESH_SHARE
        return self._fit


class Calibrator:
    """All factors of a region, fed with every outcome that its owner hears of. Bounded by pools x lanes x 2."""

    def __init__(self) -> None:
        self._factors: dict[tuple[str, Lane], tuple[Factor, Factor]] = {}

    def resume(self, pool: str, lane: Lane, ttft: EtaFit, completion: EtaFit) -> None:
        """Goes on from what a plan of an earlier owner said, where nothing was seen yet."""
        self._factors.setdefault((pool, lane), (Factor(ttft), Factor(completion)))

    def add(self, outcome: Outcome) -> None:
        ttft, completion = self._of(outcome.pool, outcome.lane)
        if outcome.ttft is not None:
            ttft.add(outcome.ttft)
        if outcome.completion is not None:
            completion.add(outcome.completion)

    def fits(self, pool: str, lane: Lane) -> tuple[EtaFit, EtaFit]:
        """Of the first token and of the whole answer."""
        factors = self._factors.get((pool, lane))
        return (factors[0].fit(), factors[1].fit()) if factors else (UNKNOWN, UNKNOWN)

    def _of(self, pool: str, lane: Lane) -> tuple[Factor, Factor]:
        factors = self._factors.get((pool, lane))
        if factors is None:
            factors = self._factors[pool, lane] = Factor(), Factor()
        return factors


def with_fits(plan: Plan, fits: Mapping[tuple[str, Lane], tuple[EtaFit, EtaFit]]) -> Plan:
    """The plan with what was learned of each pool and lane, to three digits: less would be news without a meaning."""

    def shown(lane: LanePlan, pool: str) -> LanePlan:
        ttft, completion = (_shown(fit) for fit in fits.get((pool, lane.lane), (UNKNOWN, UNKNOWN)))
        return replace(lane, ttft_fit=ttft, completion_fit=completion)

    pools = (replace(pool, lanes=tuple(shown(lane, pool.pool) for lane in pool.lanes)) for pool in plan.pools)
    return replace(plan, pools=tuple(pools))


def _shown(fit: EtaFit) -> EtaFit:
    return EtaFit(float(f"{fit.p50:.3g}"), float(f"{fit.p90:.3g}"), int(float(f"{fit.samples:.2g}")))


class Stated(Struct, frozen=True):
    """The times of a verdict, corrected; each bound is at least its ETA."""

    ttft_s: float
    ttft_bound_s: float
    completion_s: float
    completion_bound_s: float


def stated(estimate: Estimate, ttft: EtaFit, completion: EtaFit, *, delay_s: float = 0.0) -> Stated:
    """`delay_s`: a wait that no load makes longer (a not-before); it is part of the estimate and not corrected."""

    def corrected(estimate_s: float, bound_s: float, fit: EtaFit) -> tuple[float, float]:
        eta_s = delay_s + fit.p50 * max(0.0, estimate_s - delay_s)
        p90 = fit.p90 if fit.samples else BOUND_PRIOR
        return eta_s, max(eta_s, delay_s + p90 * max(0.0, bound_s - delay_s))

    return Stated(
        *corrected(estimate.ttft_s, estimate.ttft_bound_s, ttft),
        *corrected(estimate.completion_s, estimate.completion_bound_s, completion),
    )


def _believed(quantile: float | None, trust: float, prior: float) -> float:
    factor = min(FACTOR_MAX, max(FACTOR_MIN, quantile or prior))
    return math.exp(trust * math.log(factor) + (1.0 - trust) * math.log(prior))


def _sketch() -> LogCollapsingLowestDenseDDSketch:
    return LogCollapsingLowestDenseDDSketch(relative_accuracy=ACCURACY, bin_limit=BINS_MAX)
