"""Which pool of a tier takes a job, and what no catalogue may say: pools in each other's way, or out of reach."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from laneway.core.catalogue import Capabilities, Pool
from laneway.core.errors import ConfigError, Unsupported
from laneway.core.fleet import PoolPlan
from laneway.core.lanes import LANES, Lane
from laneway.core.selectors import GENERAL, GENERAL_RANK, Selector, choose, conflicts, reason_of
from laneway.policy.cost import job_cost
from laneway.runtime.catalogue import catalogue_of
from laneway.runtime.settings import Feature, ModelSettings, Settings, load_settings

CONTEXT = 4096


def pool(name: str, tier: str = "small", **selector: Any) -> Pool:
    return Pool(
        name=name, model="chat", tier=tier, engine="simulated", context_length=CONTEXT, vocabulary_size=260, slots=4,
        workers=1, kv_tokens=16_384, tokenizer="bytes", capabilities=Capabilities(), decode_tokens_per_s=10.0,
        prefill_tokens_per_s=100.0, selector=Selector(**selector),
    )  # fmt: skip


def chosen(pools: list[Pool], lane: Lane = Lane.PRIORITY, tokens: int = 10, *features: str) -> list[str]:
    return [each.name for each in choose(pools, lane, lambda _: tokens, frozenset(features))]


RANKS = [
    pool("general"),
    pool("fast", lanes=(Lane.PRIORITY,), prompt_tokens_max=1000),
    pool("long", prompt_tokens_min=1001),
    pool("schemas", features=("json_schema", "adapters")),
]


@pytest.mark.parametrize(
    ("lane", "tokens", "features", "name"),
    [
        (Lane.PRIORITY, 1000, (), "fast"),
        (Lane.PRIORITY, 1001, (), "long"),
        (Lane.BATCH, 1000, (), "general"),
        (Lane.BATCH, 1001, ("seed",), "long"),
        (Lane.PRIORITY, 10, ("json_schema",), "schemas"),
        (Lane.BATCH, 2000, ("seed", "adapters"), "schemas"),
    ],
)
def test_features_go_before_lanes_and_lengths_and_these_before_what_is_general(lane, tokens, features, name):
    assert chosen(RANKS, lane, tokens, *features) == [name]


def test_each_tier_has_its_choice_and_general_pools_are_asked_in_their_order():
    pools = [pool("a"), pool("b"), pool("c", "strong", lanes=(Lane.BATCH,)), pool("d", "strong")]
    assert chosen(pools, Lane.PRIORITY) == ["a", "b", "d"]
    assert chosen(pools, Lane.BATCH) == ["a", "b", "c"]


def test_a_tier_that_takes_no_such_job_is_left_out():
    pools = [pool("a", lanes=(Lane.BATCH,)), pool("b", "strong")]
    assert chosen(pools, Lane.PRIORITY) == ["b"]


@pytest.mark.parametrize(
    ("selector", "field", "reason", "said"),
    [
        ({"lanes": (Lane.BATCH,)}, "spec.contract.lane", "LANE_NOT_SERVED", "lanes taken: batch"),
        ({"prompt_tokens_min": 11}, "spec.generate.prompt", "PROMPT_LENGTH_NOT_SERVED", "prompts from 11 tokens"),
        ({"features": ("seed", "adapters")}, "spec.generate", "POOL_KEPT_FOR_FEATURES", "adapters or seed"),
    ],
)
def test_a_job_that_no_pool_takes_is_refused_with_the_field(selector, field: str, reason: str, said: str):
    with pytest.raises(Unsupported) as caught:
        chosen([pool("a", **selector)], Lane.PRIORITY, 10)
    assert (caught.value.field, caught.value.reason) == (field, reason)
    assert said in caught.value.message


def test_why_a_pool_was_chosen_is_told_where_there_was_a_choice():
    assert reason_of(RANKS[1], RANKS, frozenset()) == "lanes priority; prompts to 1000 tokens"
    assert reason_of(RANKS[3], RANKS, frozenset({"adapters", "seed"})) == "features adapters"
    assert reason_of(RANKS[0], RANKS, frozenset()) == GENERAL
    assert not reason_of(pool("a"), [pool("a"), pool("b")], frozenset())


# --- configurations ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "field"),
    [
        ({"lanes": (Lane.PRIORITY,)}, {"lanes": (Lane.BATCH, Lane.PRIORITY)}, "lanes"),
        ({"lanes": (Lane.PRIORITY,)}, {"prompt_tokens_min": 100}, "prompt_tokens_min"),
        ({"prompt_tokens_max": 100}, {"prompt_tokens_min": 100}, "prompt_tokens_min"),
        ({"prompt_tokens_min": 100}, {"prompt_tokens_max": 100}, "prompt_tokens_max"),
        ({"features": ("seed", "n")}, {"features": ("n", "tools")}, "features"),
        ({"lanes": (Lane.PRIORITY,)}, {"lanes": (Lane.BATCH,)}, None),
        ({"prompt_tokens_max": 99}, {"prompt_tokens_min": 100}, None),
        ({"features": ("seed",)}, {"features": ("n",)}, None),
        ({"features": ("seed",)}, {"lanes": (Lane.BATCH,)}, None),
        ({}, {}, None),
    ],
)
def test_two_pools_of_a_tier_may_not_take_the_same_jobs(one, other, field: str | None):
    found = [(wrong.index, wrong.field) for wrong in conflicts([pool("a", **one), pool("b", **other)])]
    assert found == ([(1, field)] if field else [])
    assert not list(conflicts([pool("a", **one), pool("b", "strong", **other)])), "another tier is no rival"


@pytest.mark.parametrize(
    ("selectors", "unreached"),
    [
        ([{"lanes": LANES}, {}], [1]),
        ([{}, {"prompt_tokens_max": 100}, {"prompt_tokens_min": 101}], [0]),
        ([{}, {"prompt_tokens_max": 100}, {"prompt_tokens_min": 102}], []),
        ([{}, {"prompt_tokens_max": CONTEXT - 2}], []),
        ([{}, {"prompt_tokens_max": CONTEXT - 1}], [0]),
        ([{}, {"lanes": (Lane.PRIORITY,)}, {"lanes": (Lane.BATCH,)}], []),
        ([{}, {"prompt_tokens_min": CONTEXT - 1}], []),
        ([{}, {"prompt_tokens_min": CONTEXT}], [1]),
    ],
)
def test_a_pool_that_no_job_reaches_is_found(selectors, unreached):
    pools = [pool(f"p{at}", **selector) for at, selector in enumerate(selectors)]
    assert [wrong.index for wrong in conflicts(pools)] == unreached


SELECTORS = st.builds(
    Selector,
    lanes=st.lists(st.sampled_from(LANES), unique=True, max_size=3).map(tuple),
    prompt_tokens_min=st.sampled_from((0, 100, 2000)),
    prompt_tokens_max=st.sampled_from((0, 99, 1999, CONTEXT)),
    features=st.lists(st.sampled_from(("seed", "n")), unique=True, max_size=2).map(tuple),
).filter(lambda s: not s.prompt_tokens_max or s.prompt_tokens_min <= s.prompt_tokens_max)


@given(st.lists(SELECTORS, min_size=1, max_size=4))
def test_without_conflicts_a_job_has_one_pool_and_a_pool_has_jobs(selectors):
    pools = [replace(pool(f"p{at}"), selector=each) for at, each in enumerate(selectors)]
    assume(not list(conflicts(pools)))
    reached: set[str] = set()
    for lane in LANES:
        for tokens in (1, 99, 100, 1999, 2000, CONTEXT - 1):
            for features in ((), ("seed",), ("n",), ("seed", "n")):
                try:
                    names = chosen(pools, lane, tokens, *features)
                except Unsupported:
                    continue
                special = [each for each in pools if each.name in names and each.selector.rank < GENERAL_RANK]
                assert len(special) in (0, 1)
                assert not special or len(names) == 1
                reached.update(names)
    assert reached == {each.name for each in pools}


# --- settings ----------------------------------------------------------------------------------------


def settings(*entries: dict[str, Any]) -> Settings:
    return Settings(models=tuple(ModelSettings(name="chat", engine="simulated", **each) for each in entries))


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (
            [{"pool": "a", "lanes": (Lane.BATCH,)}, {"pool": "b", "lanes": (Lane.BATCH,)}],
            r"models\[1\].lanes: pool b \(lanes batch\) and pool a of models\[0\] \(lanes batch\) take the same jobs",
        ),
        ([{"pool": "a"}, {"pool": "b", "lanes": LANES}], r"models\[0\].pool: no job reaches pool a"),
        ([{"prompt_tokens_min": 8192}], r"models\[0\].prompt_tokens_min: 8192 is not below .* context_length of 8192"),
        ([{"features": ("adapters",)}], r"models\[0\].features: adapters is nothing that the simulated engine offers"),
        (
            [{"pool": "a", "precision": "fp8"}, {"pool": "b", "precision": "int4"}],
            r"models\[1\].precision: int4 of pool b is not the fp8 of pool a, .* a tier of its own",
        ),
        ([{"pool": "a", "weights": "x"}, {"pool": "b", "weights": "y"}], r"models\[1\].weights: "),
    ],
)
def test_a_catalogue_that_contradicts_itself_stops_the_process_with_the_field(entries, said: str):
    with pytest.raises(ConfigError, match=said):
        catalogue_of(settings(*entries))


def test_precisions_of_a_model_are_tiers():
    pools = catalogue_of(settings({"tier": "int4", "precision": "int4"}, {"tier": "fp8", "precision": "fp8"})).pools
    assert [(each.name, each.precision) for each in pools] == [("chat-int4", "int4"), ("chat-fp8", "fp8")]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('lanes = ["fast"]', "models[0].lanes"),
        ('features = ["speed"]', "models[0].features"),
        ('precision = "int3"', "models[0].precision"),
        ("prompt_tokens_min = 5\nprompt_tokens_max = 4", "prompt_tokens_max must not be below prompt_tokens_min"),
        ("price_per_device_s = -1.0", "models[0].price_per_device_s"),
    ],
)
def test_a_wrong_selector_is_named(tmp_path, line: str, said: str):
    (tmp_path / "laneway.toml").write_text(f'[[models]]\nname = "chat"\n{line}\n')
    with pytest.raises(ConfigError) as caught:
        load_settings(directory=tmp_path, environ={})
    assert said in str(caught.value)


def test_every_feature_is_an_ability():
    assert set(get_args(Feature)) <= set(Capabilities.__struct_fields__)


def test_the_weights_of_an_openvino_pool_are_what_its_engine_loads():
    made = Settings(models=(ModelSettings(name="chat", weights="/models/ir"),))
    assert made.engine_options_of("chat-small").model_file == "/models/ir"
    assert catalogue_of(made).pools[0].weights == "/models/ir"


# --- cost --------------------------------------------------------------------------------------------


def test_a_job_pays_for_its_tokens_and_for_its_share_of_a_worker():
    plain = pool("a")
    priced = replace(plain, price_per_device_s=2.0, price_per_million_prompt_tokens=1e6)
    assert job_cost(plain, None, 100, 20) == 0.0
    # 1 s of prefill and 2 s of decode on one of four slots, at 2 a second; and 100 tokens at 1 each.
    assert job_cost(priced, None, 100, 20) == pytest.approx(100.0 + 2.0 * 3.0 / 4)
    busy = PoolPlan("a", workers=1, slots=4, free_slots=0, prefill_tokens_per_s=100.0, decode_tokens_per_s=5.0)
    assert job_cost(priced, busy, 100, 20) == pytest.approx(100.0 + 2.0 * 5.0 / 4), "as slow as the pool is now"
