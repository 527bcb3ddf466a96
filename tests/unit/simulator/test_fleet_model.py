"""Fleet mode's formulas against closed forms, and its lines against hand counts."""

from __future__ import annotations

import math

import numpy as np
import pytest

from laneway.simulator.fleet_lines import Lines
from laneway.simulator.fleet_model import (
    idle_share,
    normal_cdf,
    residual_s,
    spread,
    wait_for_places,
    wait_for_prefill,
)


def of(value: float) -> np.ndarray:
    return np.array([value])


def erlang_c(places: int, offered: float) -> float:
    blocked = 1.0
    for n in range(1, places + 1):
        blocked = offered * blocked / (n + offered * blocked)
    return blocked / (1.0 - offered / places * (1.0 - blocked))


@pytest.mark.parametrize(("places", "load"), [(20, 0.8), (50, 0.9), (200, 0.9), (400, 0.95), (1000, 0.98)])
def test_the_wait_for_places_is_that_of_a_queue_with_so_many_servers(places, load):
    wait = wait_for_places(of(places), of(places * load), of(2.0), 1.0)
    assert wait.probability[0] == pytest.approx(erlang_c(places, places * load), abs=0.035 if places < 50 else 0.025)
    assert wait.mean_s[0] == pytest.approx(2.0 / (places * (1.0 - load)))


def test_burstier_arrivals_wait_more_often_and_longer_for_places():
    smooth, bursty = (wait_for_places(of(100.0), of(90.0), of(1.0), index) for index in (1.0, 4.0))
    assert bursty.probability[0] > 1.5 * smooth.probability[0]
    assert bursty.mean_s[0] == pytest.approx(4.0 * smooth.mean_s[0])


@pytest.mark.parametrize(("square", "mean_s"), [(1.0, 0.6 / 0.8), (2.0, 0.6 / 0.4)])
def test_prompts_at_one_worker_wait_as_in_a_queue_with_equal_or_exponential_service(square, mean_s):
    """M/D/1: rho S / (2 (1 - rho)); M/M/1: rho S / (1 - rho)."""
    wait = wait_for_prefill(of(0.6), of(1.0), of(square), of(1.0))
    assert wait.probability[0] * wait.mean_s[0] == pytest.approx(mean_s)
    assert wait.within(of(-0.1))[0] == 0.0
    assert wait.within(of(0.0))[0] == pytest.approx(0.4)
    assert wait.within(of(math.inf))[0] == 1.0


def test_idle_workers_are_those_of_a_poisson_count_for_one_and_of_fewer_where_they_take_turns():
    alone, many = spread(1.0, of(1.0)), spread(1.0, of(1e9))
    assert idle_share(of(0.7), alone)[0] == pytest.approx(math.exp(-0.7), rel=1e-3)
    assert idle_share(of(0.5), many)[0] == pytest.approx(0.5)  # at most one sequence each
    assert idle_share(of(0.0), many)[0] == 1.0


def test_the_rest_of_a_step_under_way_counts_long_steps_more():
    assert residual_s(of(0.01), of(0.03), of(0.0))[0] == pytest.approx(0.005)
    assert residual_s(of(0.01), of(0.03), of(0.5))[0] == pytest.approx((0.01**2 + 0.04**2) / 2 / (2 * 0.025))


def test_the_normal_distribution_is_near_the_exact_one():
    x = np.linspace(-5.0, 5.0, 201)
    exact = np.array([0.5 * (1.0 + math.erf(each / math.sqrt(2.0))) for each in x])
    assert np.abs(normal_cdf(x) - exact).max() < 2e-4


def lines(span_s: int) -> Lines:
    """Two classes of the first lane, one of the second; one region."""
    lane = np.array([0, 0, 1])
    return Lines(span_s, 1, lane, (lane[:, None] == np.arange(3)).astype(float))


def shares(first: float, second: float = 0.0) -> np.ndarray:
    return np.array([[first, second, 0.0]])


def test_half_served_lines_have_a_head_that_waits_half_the_time():
    line = lines(100)
    waited = np.zeros((1, 3))
    for _ in range(100):
        line.add(np.array([[6.0, 4.0, 1.0]]))
        _, waited = line.take(shares(5.0 / line.waiting[0, :2].sum(), 1.0))
    assert line.waiting.tolist() == [[pytest.approx(300.0), pytest.approx(200.0), pytest.approx(0.0)]]
    assert line.head_s[0, :2].tolist() == [pytest.approx(50.0), pytest.approx(100.0)]
    assert waited[0, 0] == pytest.approx(49.75, abs=0.3)
    assert waited[0, 1] == 0.0


def test_who_came_first_goes_first_whatever_its_class():
    line = lines(2)
    line.add(np.array([[10.0, 0.0, 0.0]]))
    line.take(shares(0.0))
    line.add(np.array([[0.0, 10.0, 0.0]]))
    first, _ = line.take(shares(0.5))
    second, _ = line.take(shares(1.0))
    assert first.tolist() == [[pytest.approx(10.0), 0.0, 0.0]]
    assert second.tolist() == [[0.0, pytest.approx(10.0), 0.0]]


def test_all_that_came_before_a_time_can_be_dropped_and_no_more():
    line = lines(3)
    for count in (1.0, 2.0, 4.0):
        line.add(np.array([[count, 0.0, count]]))
    late = line.drop_before(np.array([2.0, 0.0, 0.0]))
    assert late.tolist() == [[pytest.approx(3.0), 0.0, 0.0]]
    assert line.waiting.tolist() == [[pytest.approx(4.0), 0.0, pytest.approx(7.0)]]
