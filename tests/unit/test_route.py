"""Routing: filters are kept, the score is in seconds, and the reason for no region says whether waiting helps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneway.core.catalogue import Capabilities, Catalogue, Pool
from laneway.core.fleet import HOT_PREFIXES_MAX, LanePlan, Plan, PoolPlan
from laneway.core.lanes import LANES, Lane
from laneway.policy.route import Ask, ModelDigest, RegionDigest, Sighting, digest_of, route


def seen(region: str, *, workers: int = 1, ttft: float = 0.1, batch: float = 0.0, **more) -> Sighting:
    model = more.pop("model", "chat")
    age_s, lost = more.pop("age_s", 0.0), more.pop("lost", False)
    models = (ModelDigest(model, "small", workers, 1, ttft, batch),)
    return Sighting(RegionDigest(region, models=models, **more), age_s, lost)


def test_home_wins_unless_leaving_saves_enough() -> None:
    assert route(Ask("chat"), [seen("eu"), seen("us")], home="eu").reason == "HOME_IS_BEST"
    out = route(Ask("chat"), [seen("eu", ttft=3.0), seen("us", round_trip_s=0.1)], home="eu")
    assert (out.region, out.reason) == ("us", "LOWER_SCORE")
    assert [s.region for s in out.scores] == ["us", "eu"]
    assert out.scores[1].score_s == pytest.approx(3.0)


def test_each_lane_looks_at_its_own_wait() -> None:
    regions = [seen("eu", ttft=0.1, batch=5000.0), seen("us", ttft=2.0, batch=10.0)]
    assert route(Ask("chat", Lane.PRIORITY), regions, home="eu").region == "eu"
    assert route(Ask("chat", Lane.BATCH), regions, home="eu").region == "us"


def test_price_is_worth_more_to_batch() -> None:
    regions = [seen("eu", price_factor=1.2), seen("us", batch=200.0, ttft=5.0)]
    assert route(Ask("chat", Lane.PRIORITY), regions, home="eu").region == "eu"
    assert route(Ask("chat", Lane.BATCH), regions, home="eu").region == "us"


def test_a_cold_region_pays_for_loading_and_old_news_for_its_age() -> None:
    assert route(Ask("chat"), [seen("eu", workers=0), seen("us", ttft=5.0)], home="eu").region == "us"
    assert route(Ask("chat"), [seen("eu", ttft=1.0, age_s=4.0), seen("us", ttft=2.0)], home="eu").region == "us"


@pytest.mark.parametrize(
    ("regions", "ask", "reason"),
    [
        ([seen("eu")], Ask("chat", regions=("us",)), "REGION_NOT_ALLOWED"),
        ([], Ask("chat"), "REGION_NOT_ALLOWED"),
        ([seen("eu")], Ask("other"), "MODEL_NOT_FOUND"),
        ([seen("eu")], Ask("chat/strong"), "MODEL_NOT_FOUND"),
        ([seen("eu", draining=True)], Ask("chat"), "DRAINING"),
        ([seen("eu", healthy=False)], Ask("chat"), "UNHEALTHY"),
        ([seen("eu", lost=True)], Ask("chat"), "NOT_HEARD_OF"),
        ([seen("eu", draining=True), seen("us", model="x")], Ask("chat"), "DRAINING"),
        ([seen("eu", model="x"), seen("us")], Ask("chat", regions=("eu",)), "REGION_NOT_ALLOWED"),
    ],
)
def test_why_nowhere(regions: list[Sighting], ask: Ask, reason: str) -> None:
    out = route(ask, regions, home="eu")
    assert (out.region, out.reason) == ("", reason)
    assert all(score.excluded for score in out.scores)


def test_one_region_that_may_be_chosen_is_chosen() -> None:
    out = route(Ask("chat/small", regions=("us",)), [seen("eu"), seen("us", ttft=50.0)], home="eu")
    assert (out.region, out.reason) == ("us", "ONLY_REGION")


@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans(), st.floats(0, 100), st.floats(0, 2)), max_size=6),
    st.sets(st.integers(0, 5)),
    st.sampled_from(LANES),
)
def test_never_a_region_that_is_excluded_and_always_the_best_of_the_others(
    rows: list[tuple[bool, bool, bool, float, float]], allowed: set[int], lane: Lane
) -> None:
    regions = [
        seen(f"r{i}", draining=draining, healthy=healthy, lost=lost, ttft=eta, batch=eta, round_trip_s=rtt)
        for i, (draining, healthy, lost, eta, rtt) in enumerate(rows)
    ]
    ask = Ask("chat", lane, tuple(f"r{i}" for i in allowed))
    out = route(ask, regions, home="r0")
    may = {
        f"r{i}"
        for i, (draining, healthy, lost, _, _) in enumerate(rows)
        if healthy and not draining and not lost and (not allowed or i in allowed)
    }
    assert (out.region in may) == bool(may)
    assert len(out.scores) == len(regions)
    assert {s.region for s in out.scores if not s.excluded} == may
    open_scores = [s.score_s for s in out.scores if not s.excluded]
    assert open_scores == sorted(open_scores)


POOL = Pool(
    name="p", model="chat", tier="small", engine="simulated", context_length=4096, vocabulary_size=300, slots=4,
    workers=2, kv_tokens=16384, tokenizer="bytes", capabilities=Capabilities(), load_s=10.0, decode_tokens_per_s=50.0,
)  # fmt: skip


def test_a_digest_shows_free_places_and_waits() -> None:
    pool = PoolPlan(
        "p", workers=2, slots=8, free_slots=3, service_s=4.0,
        lanes=(LanePlan(Lane.PRIORITY, ready=1), LanePlan(Lane.BATCH, ready=4, parked=10, parked_device_s=20.0)),
    )  # fmt: skip
    plan = Plan("eu", pools=(pool,))
    digest = digest_of(plan, Catalogue((POOL,)), fresh=True, region="eu", zones=("z1",), draining=False, now_s=9.0)
    assert digest.healthy
    assert digest.zones == ("z1",)
    (model,) = digest.models
    assert (model.workers, model.free_slots) == (2, 0), "five ready jobs take the three free places"
    assert model.ttft_eta_s == pytest.approx(0.02)
    assert model.batch_eta_s == pytest.approx((20.0 + 4 * 4.0 / 4) / 2)


def test_without_a_valid_plan_a_region_is_not_healthy_and_a_cold_pool_takes_its_load_time() -> None:
    for plan, fresh in ((None, True), (Plan("eu"), False)):
        digest = digest_of(plan, Catalogue((POOL,)), fresh=fresh, region="eu", draining=True, now_s=100.0)
        assert not digest.healthy
        assert digest.draining
        assert digest.models[0].ttft_eta_s > 10.0


def test_a_digest_names_the_hot_prefixes_of_each_pool_and_no_more_than_the_limit():
    hot = tuple(range(HOT_PREFIXES_MAX + 1))
    told = digest_of(
        Plan("local", pools=(PoolPlan("p", hot_prefixes=hot),)),
        Catalogue((POOL,)),
        fresh=True,
        region="local",
        draining=False,
        now_s=0.0,
    )
    assert told.models[0].hot_prefixes == hot[:HOT_PREFIXES_MAX]
