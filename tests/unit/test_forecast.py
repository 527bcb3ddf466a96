"""The forecast of priority work: level, season, spread, burstiness, and that a break is noticed and mended."""

import math
import random

import pytest

from laneway.policy.forecast import COUNT_S, DAY_SLOTS, SLOT_S, WEEK_SLOTS, PoolForecast, Series

BEGIN = 20_000 * DAY_SLOTS  # a midnight


def day(slot: int) -> float:
    """Between 2 and 10 jobs, lowest at midnight."""
    return 6.0 - 4.0 * math.cos(2 * math.pi * slot / DAY_SLOTS)


def fed(days: float, load=day, noise: float = 0.0, seed: int = 1) -> tuple[Series, int]:
    series, rng = Series(), random.Random(seed)
    slots = int(days * DAY_SLOTS)
    for slot in range(BEGIN, BEGIN + slots):
        series.close(slot, max(0.0, load(slot) * (1 + noise * rng.uniform(-1, 1))))
    return series, BEGIN + slots


def test_without_history_the_level_is_expected_of_every_minute() -> None:
    series, now = fed(0.1, lambda slot: 5.0)
    assert series.expected(now) == series.expected(now + 500) == pytest.approx(5.0)
    assert not series.seasonal(now + 500)


def test_after_a_day_its_shape_is_expected_again() -> None:
    series, now = fed(1.5, noise=0.2)
    for ahead in (10, 200, 600):
        assert series.seasonal(now + ahead)
        assert series.expected(now + ahead) == pytest.approx(day(now + ahead), rel=0.25)
    assert series.expected(now + DAY_SLOTS // 2) < 0.5 * series.expected(now)


def test_a_week_back_is_better_than_a_day_back() -> None:
    def weekly(slot: int) -> float:
        return 1.0 if (slot // DAY_SLOTS) % 7 == 3 else 8.0

    series, now = fed(9, weekly)
    slot = now + 12 * 60
    while (slot // DAY_SLOTS) % 7 != 3:
        slot += DAY_SLOTS
    assert slot - now < WEEK_SLOTS
    assert series._season(slot) == 1.0


def test_a_busier_day_lifts_the_season_at_most_twofold() -> None:
    series, now = fed(1.0)
    for slot in range(now, now + 60):
        series.close(slot, 1.4 * day(slot))
    assert series.expected(now + 70) == pytest.approx(1.4 * day(now + 70), rel=0.2)
    for slot in range(now + 60, now + 62):  # two minutes are no break yet
        series.close(slot, 50 * day(slot))
    assert series.expected(now + 70) <= 2.0 * day(now + 70) * 1.01


def test_three_minutes_far_above_break_the_forecast_and_three_within_mend_it() -> None:
    series, now = fed(2.0)
    for i in range(2):
        series.close(now + i, 2.0 * day(now + i) + 10)
    assert not series.broken
    series.close(now + 2, 2.0 * day(now + 2) + 10)
    assert series.broken
    assert series.expected(now + 500) == series.level, "reactive only"
    for i in range(3, 60):
        series.close(now + i, day(now + i))
        if not series.broken:
            break
    assert not series.broken


def test_a_quantile_is_what_was_seen_beyond_the_forecast() -> None:
    series, _ = fed(2.0, noise=0.5)
    q80, q90 = series.quantile(0.8, 1.0), series.quantile(0.9, 1.0)
    assert 1.15 <= q80 <= 1.45
    assert q80 <= q90 <= 1.6
    fresh = Series(4.0)
    assert fresh.quantile(0.9, 1.0) == pytest.approx(1.0 + 1.28 / math.sqrt(4.0 * SLOT_S))
    assert fresh.quantile(0.9, 9.0) > fresh.quantile(0.9, 1.0)
    assert Series().quantile(0.9, 1.0) == 1.0


def arrive(forecast: PoolForecast, counts: list[int], begin_s: float = 0.0) -> None:
    for i, count in enumerate(counts):
        for j in range(count):
            forecast.arrived(begin_s + i * COUNT_S + j * 0.001)
        forecast.observe(0, begin_s + i * COUNT_S + 1.9)


def test_burstiness_tells_steady_from_random_from_clumps() -> None:
    rng = random.Random(3)
    steady, clumps = [3] * 150, [30 if i % 10 == 0 else 0 for i in range(150)]
    poisson = [sum(rng.random() < 0.03 for _ in range(100)) for _ in range(150)]
    found = {}
    for name, counts in (("steady", steady), ("poisson", poisson), ("clumps", clumps)):
        forecast = PoolForecast(0.0)
        arrive(forecast, [*counts, 0])
        found[name] = forecast.burstiness
    assert found["steady"] == 1.0, "never below Poisson"
    assert 1.0 <= found["poisson"] <= 1.6
    assert found["clumps"] > 15.0


def test_places_that_a_burst_may_need_are_told() -> None:
    forecast = PoolForecast(0.0)
    assert forecast.outlook(10.0).surge == 0.0
    arrive(forecast, [4 if i % 5 == 0 else 0 for i in range(150)])
    assert 3.0 <= forecast.outlook(10.0).surge <= 8.0


def test_a_new_leader_begins_with_what_the_plan_before_said() -> None:
    forecast = PoolForecast(0.0, per_s=7.0, burstiness=4.0)
    outlook = forecast.outlook(10.0)
    assert (outlook.per_s, outlook.burstiness) == (7.0, 4.0)
    assert not outlook.seasonal
    assert forecast.coming(60, 4) == ()


def test_minutes_are_means_over_time_and_a_burst_need_not_wait_for_the_minutes_end() -> None:
    forecast = PoolForecast(0.0)
    for tenth in range(1, 651):
        now_s = tenth / 10
        if tenth % 5 == 0:
            forecast.arrived(now_s)
        forecast.observe(4 if tenth % 2 else 8, now_s)
    assert forecast.jobs.level == pytest.approx(6.0, rel=0.02)
    assert forecast.rate.level == pytest.approx(2.0, rel=0.05)
    for tenth in range(651, 801):
        forecast.arrived(tenth / 10)
        forecast.observe(6, tenth / 10)
    assert forecast.outlook(10.0).per_s > 6.0


def test_what_is_coming_is_told_in_workers_and_only_with_a_season() -> None:
    forecast = PoolForecast(BEGIN * SLOT_S)
    now_s = BEGIN * SLOT_S
    for _ in range(DAY_SLOTS + 5):
        now_s += SLOT_S
        forecast.observe(round(day(int(now_s // SLOT_S) - 1)), now_s)
    coming = forecast.coming(DAY_SLOTS, 4)
    assert len(coming) == DAY_SLOTS
    assert min(coming) == pytest.approx(0.5, rel=0.5)
    assert max(coming) == pytest.approx(2.5, rel=0.5)
    assert coming.index(max(coming)) == pytest.approx(DAY_SLOTS / 2, abs=120)
    forecast.jobs.broken = True
    assert forecast.coming(DAY_SLOTS, 4) == ()


def test_a_long_silence_of_the_leader_is_no_quiet_hour() -> None:
    forecast = PoolForecast(0.0)
    forecast.observe(5, 59.0)
    forecast.observe(5, 61.0)
    level = forecast.jobs.level
    forecast.observe(5, 4_000.0)  # nothing was seen in between: it counts with what is seen now
    assert forecast.jobs.level == pytest.approx(level, rel=0.02)
