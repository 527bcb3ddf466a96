"""Intervals over seeds: against tables, and by how often they cover what is true."""

from __future__ import annotations

import numpy as np
import pytest

from laneway.simulator.intervals import Interval, bootstrap_ratio, difference, ratio, t_quantile


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (9, 2.26216), (10, 2.22814), (30, 2.04227)],
)
def test_the_t_quantile_is_that_of_the_tables(freedom: int, expected: float):
    assert t_quantile(0.975, freedom) == pytest.approx(expected, abs=1e-4)
    assert t_quantile(0.95, 9) == pytest.approx(1.83311, abs=1e-4)


def test_an_interval_by_hand():
    found = difference([3.0, 5.0, 7.0], [1.0, 2.0, 3.0])
    assert found.mean == pytest.approx(3.0)
    assert found.high - found.mean == pytest.approx(4.30265 / 3**0.5, abs=1e-4)
    assert found.seeds == 3


def test_pairs_take_a_seeds_luck_out():
    luck = np.array([1.0, 5.0, 2.0, 9.0, 4.0])
    found = ratio(list(1.6 * luck), list(luck))
    assert found.low == pytest.approx(1.6)
    assert found.high == pytest.approx(1.6)


def test_a_gate_is_passed_on_the_bound_and_not_on_the_mean():
    found = Interval(1.7, 1.55, 1.85, 10)
    assert found.mean > 1.6
    assert not found.at_least(1.6)
    assert found.at_least(1.55)
    assert not found.at_most(1.8)
    assert found.at_most(1.85)


def test_a_harvest_that_does_not_count_at_a_seed_widens_the_ratio_and_does_not_hide():
    found = ratio([1.7, 1.7, 0.0, 1.7], [1.0, 1.0, 1.0, 1.0])
    assert found.mean == pytest.approx(1.275)
    assert found.low < 0.5


@pytest.mark.parametrize("seeds", [5, 10])
def test_intervals_cover_the_truth_as_often_as_they_say(seeds: int):
    random = np.random.default_rng(7)
    plain = ratios = 0
    for _ in range(800):
        luck = random.lognormal(0.0, 0.5, seeds)
        noise = random.normal(0.0, 0.2, seeds)
        interval = difference(list(luck + 0.3 + noise), list(luck))
        plain += interval.low <= 0.3 <= interval.high
        interval = ratio(list(luck * 1.6 * np.exp(noise)), list(luck))
        ratios += interval.low <= 1.6 <= interval.high
    assert 0.93 <= plain / 800 <= 0.97
    assert 0.93 <= ratios / 800 <= 0.97


def test_the_bootstrap_agrees_with_the_t_interval_and_is_the_narrower():
    random = np.random.default_rng(3)
    covered = 0
    for _ in range(200):
        luck = random.lognormal(0.0, 0.3, 10)
        found = bootstrap_ratio(list(luck * 1.6 * np.exp(random.normal(0, 0.1, 10))), list(luck), random, draws=400)
        covered += found.low <= 1.6 * np.exp(0.005) <= found.high
    assert 0.84 <= covered / 200 <= 0.97


def test_what_has_no_interval_is_told():
    with pytest.raises(ValueError, match="two seeds"):
        difference([1.0], [1.0])
    with pytest.raises(ValueError, match="pairs"):
        difference([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="finite"):
        difference([1.0, float("nan")], [1.0, 1.0])
    with pytest.raises(ValueError, match="below the line"):
        ratio([1.0, 1.0], [1.0, 0.0])
    with pytest.raises(ValueError, match="quantile"):
        t_quantile(0.4, 3)
