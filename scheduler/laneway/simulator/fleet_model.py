"""The formulas of fleet mode: what workers do in a second on average, and how single requests vary around it.

All are elementwise on numpy arrays. Units: seconds, tokens, requests. With n workers, b sequences decoding at each, p
prompt tokens computed a second at each, step times (base, sigma, kappa, gamma), chunk C:

- A step without prompts takes t(b) = base + (sigma + kappa c) b, c = mean context. Prompts take the share gamma p of
  the time, so a token takes t(b) / (1 - gamma p) on average.
- How many sequences a worker has varies with the index I = variance / mean = (1 + F / n) / 2: n workers take turns, so
  each sees every n-th arrival of a stream with dispersion F, and a stream of squared variation c^2 fills a service
  station without a limit with peakedness (1 + c^2) / 2 (heavy traffic; exponential times; Eckberg 1983, Whitt 1984).
  One worker with Poisson arrivals has I = 1.
- What a running sequence sees is the size-biased mean b + I (of which one is itself), and a worker is idle with
  probability I^(b / (1 - I)): a binomial count of that mean and variance, e^-b for I = 1.
- All places busy: P = 1 / (1 + z Phi(z) / phi(z)), z = (places - offered) / sqrt(offered x peakedness), and then a
  wait that is exponential with mean peakedness x S / (places - offered) (Halfin and Whitt 1981; with peakedness after
  Whitt 2004). For M/M/c this is Erlang-C in the limit of many places.
- Prompts at one worker queue for its prefill: mean wait rho S / (1 - rho) x (ca^2 + cs^2) / 2 (Allen and Cunneen;
  exact for M/G/1, Pollaczek and Khinchine), of which rho wait at all, exponentially.
- TPOT of a request is the mean of the steps of its answer: with o tokens they see the prompts that arrive at its worker
  in o steps, a sum of random length with variance lambda o T (E[P^2] - (1 - F / n) E[P]^2), and the variation of b.
  Taken as normal.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from laneway.core.fleet import StepTimes
from laneway.simulator.trace import Floats

SMALL = 1e-12
SPREAD_LEAST, SPREAD_MOST = 0.05, 0.999


def normal_cdf(x: Floats) -> Floats:
    """Within 2e-4. Source: E. Page, Applied Statistics 26 (1977), 75."""
    x = np.clip(x, -8.0, 8.0)
    y = 0.7988 * x * (1.0 + 0.04417 * x * x)
    return np.asarray(1.0 / (1.0 + np.exp(-2.0 * y)))


def spread(dispersion: float, workers: Floats) -> Floats:
    """Index I of the number of sequences at a worker."""
    return np.asarray(0.5 * (1.0 + dispersion / np.maximum(workers, 1.0)))


def idle_share(sequences: Floats, index: Floats) -> Floats:
    """Of workers that hold `sequences` on average, those with none."""
    index = np.clip(index, SPREAD_LEAST, SPREAD_MOST)
    return np.asarray(np.exp(np.log(index) / (1.0 - index) * np.maximum(sequences, 0.0)))


@dataclass(frozen=True, slots=True)
class Wait:
    """Above 0 with `probability`, and then exponential with the mean `mean_s`."""

    probability: Floats
    mean_s: Floats

    def within(self, limit_s: Floats) -> Floats:
        """Share that waits at most so long; below 0: nobody does."""
        waits = self.probability * np.exp(-np.maximum(limit_s, 0.0) / np.maximum(self.mean_s, SMALL))
        return np.where(limit_s >= 0.0, 1.0 - waits, 0.0)


def wait_for_places(places: Floats, offered: Floats, stay_s: Floats, peakedness: float | Floats) -> Wait:
    """`offered`: places that would be busy if there were no limit. Beyond nearly all of them the queue is no longer a
    chance event, and grows in the fluid: the mean stays finite here."""
    scale = np.sqrt(np.maximum(offered, SMALL) * peakedness)
    z = np.maximum((places - offered) / scale, 0.05)
    density = np.exp(-0.5 * np.minimum(z, 30.0) ** 2) / np.sqrt(2.0 * np.pi)
    probability = density / (density + z * normal_cdf(z))
    return Wait(np.where(offered > 0.0, probability, 0.0), peakedness * stay_s / np.maximum(z * scale, SMALL))


def wait_for_prefill(rho: Floats, mean_s: Floats, square_s2: Floats, arrivals_scv: Floats) -> Wait:
    """One server: its load, mean and mean square of a service time, squared variation of arrivals."""
    rho = np.clip(rho, 0.0, 0.98)
    variation = np.maximum(square_s2 / np.maximum(mean_s, SMALL) ** 2 - 1.0, 0.0)
    return Wait(rho, mean_s / (1.0 - rho) * 0.5 * (arrivals_scv + variation))


def decode_s(times: StepTimes, sequences: Floats, context_tokens: Floats) -> Floats:
    """A step without prompts, of so many sequences with a mean context of `context_tokens` each."""
    return np.asarray(times.base_s + (times.sequence_s + times.context_token_s * context_tokens) * sequences)


def residual_s(step_s: Floats, chunk_s: Floats, share: Floats) -> Floats:
    """Rest of the step under way when a prompt comes, if `share` of steps carry a chunk that takes `chunk_s`."""
    square = step_s**2 + share * (2.0 * step_s * chunk_s + chunk_s**2)
    return np.asarray(square / (2.0 * np.maximum(step_s + share * chunk_s, SMALL)))


def tpot_sd_s(
    times: StepTimes, token_s: Floats, steps: Floats, prompts_per_s: Floats, prompt_square: Floats, sequences: Floats,
    index: Floats, context_tokens: Floats,
) -> Floats:  # fmt: skip
    """Standard deviation of the mean time between tokens, of answers of so many steps. `prompts_per_s`: of a worker,
    those whose time nobody chooses (what a budget paces does not vary); `prompt_square`: their mean square, less what
    regular arrivals take off it."""
    seen = prompts_per_s * prompt_square * token_s / np.maximum(steps, 1.0)
    crowd = (times.sequence_s + times.context_token_s * context_tokens) ** 2 * sequences * index
    return np.asarray(np.sqrt(times.prefill_token_s**2 * seen + crowd))
