"""What is asked for when, by whom and in which lane: from a recorded trace, or made up from a seed."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from laneway.core.lanes import Lane

SHARES = ((Lane.PRIORITY, 0.5), (Lane.DEFERRABLE, 0.25), (Lane.BATCH, 0.25))
DUE_S = {Lane.PRIORITY: (20.0, 60.0), Lane.DEFERRABLE: (20.0, 90.0), Lane.BATCH: (120.0, 300.0)}
TENANTS = tuple(f"tenant{n}" for n in range(8))
TOKENS_IN_MAX, TOKENS_OUT_MAX = 600, 120


@dataclass(frozen=True)
class Wish:
    at_s: float
    lane: Lane
    tenant: str
    tokens_in: int
    tokens_out: int
    due_s: float


def recorded(path: Path, *, seed: int, shrink_in: float, shrink_out: float, pace: float, span_s: float) -> list[Wish]:
    """A trace of (t_ms, tokens_in, tokens_out): lengths divided, times divided by `pace` and repeated from the start
    until `span_s`. Lanes and tenants, which traces do not have, are drawn."""
    with path.open(encoding="utf-8", newline="") as lines:
        rows = [
            (float(row["t_ms"]) / 1000, int(row["tokens_in"]), int(row["tokens_out"])) for row in csv.DictReader(lines)
        ]
    random = Random(f"{seed} lanes of a trace")
    length_s = rows[-1][0] / pace
    wishes: list[Wish] = []
    for round_number in range(math.ceil(span_s / length_s)):
        for at_s, tokens_in, tokens_out in rows:
            when_s = round_number * length_s + at_s / pace
            if when_s < span_s:
                wishes.append(_wish(random, when_s, tokens_in / shrink_in, tokens_out / shrink_out))
    return wishes


def bursty(
    *, seed: int, per_s: float, cv: float, span_s: float, mean_in: float = 80.0, mean_out: float = 26.0
) -> list[Wish]:
    """Gamma gaps with a coefficient of variation, log-normal lengths, and a load that swings by 40 % in 200 s."""
    random = Random(f"{seed} bursty")
    wishes: list[Wish] = []
    at_s, shape = 0.0, 1.0 / cv**2
    while True:
        swing = 1.0 + 0.4 * math.sin(2 * math.pi * at_s / 200.0)
        at_s += random.gammavariate(shape, 1.0 / (shape * per_s * swing))
        if at_s >= span_s:
            return wishes
        wishes.append(_wish(random, at_s, _length(random, mean_in), _length(random, mean_out)))


def _length(random: Random, mean: float, sigma: float = 0.8) -> float:
    return random.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)


def _wish(random: Random, at_s: float, tokens_in: float, tokens_out: float) -> Wish:
    lane = random.choices([lane for lane, _ in SHARES], [share for _, share in SHARES])[0]
    tenant = random.choices(TENANTS, [1 / (n + 1) for n in range(len(TENANTS))])[0]
    return Wish(
        at_s,
        lane,
        tenant,
        max(4, min(TOKENS_IN_MAX, round(tokens_in))),
        max(1, min(TOKENS_OUT_MAX, round(tokens_out))),
        random.uniform(*DUE_S[lane]),
    )


def shifted(wishes: Sequence[Wish], by_s: float) -> list[Wish]:
    return [Wish(w.at_s + by_s, w.lane, w.tenant, w.tokens_in, w.tokens_out, w.due_s) for w in wishes]
