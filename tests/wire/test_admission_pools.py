"""Which pool of a tier a request goes to is decided at the door, told in the quote and kept with the job."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from laneway.core.errors import InvalidRequest
from laneway.core.lanes import Lane
from laneway.runtime.local_nats import LocalNats
from laneway.scheduler.explain import explain
from laneway.v1 import admission_pb2 as pb
from tests.support.admission import Gate, admission_settings, error_of_call, gate, spec


@pytest.fixture
async def door(nats_server: LocalNats, tmp_path: Path) -> AsyncIterator[Gate]:
    """A tier of three pools, and a dearer one that takes priority only."""
    settings = admission_settings(nats_server)
    (entry,) = settings.models
    models = (
        replace(entry, pool="bulk", lanes=(Lane.DEFERRABLE, Lane.BATCH)),
        replace(entry, pool="seeds", features=("seed",)),
        replace(entry, pool="chat-small"),
        replace(entry, pool="strong", tier="strong", lanes=(Lane.PRIORITY,), price_per_device_s=3.0),
    )
    async with gate(nats_server, tmp_path, replace(settings, models=models)) as opened:
        await opened.plan()  # chat-small has a worker
        yield opened


def seeded(**request: Any) -> Any:
    wanted = spec(**request)
    wanted.generate.sampling.seed = 5
    wanted.generate.sampling.temperature = 1.0
    return wanted


async def test_a_quote_says_which_pool_and_why(door: Gate):
    for wanted, pool, because in (
        (spec(lane=Lane.BATCH), "bulk", "lanes deferrable, batch"),
        (seeded(lane=Lane.BATCH), "seeds", "features seed"),
    ):
        verdict = (await door.stub.Quote(pb.QuoteRequest(spec=wanted))).verdict
        assert (verdict.pool, verdict.facts["chosen_for"]) == (pool, because)
    await door.quotes("LANE_OPEN")
    verdict = (await door.stub.Quote(pb.QuoteRequest(spec=spec()))).verdict
    assert (verdict.pool, verdict.facts["chosen_for"]) == ("chat-small", "what no other pool of its tier takes")


async def test_a_job_goes_to_its_pool_and_its_explanation_says_why(door: Gate):
    stored = await door.stub.Submit(pb.SubmitRequest(spec=spec(lane=Lane.BATCH)))
    record = await door.record(stored.job_id)
    assert record.pool == "bulk"
    assert explain(record, [])[0].facts["chosen_for"] == "lanes deferrable, batch"


async def test_a_lane_that_no_pool_of_the_tier_takes_is_refused_with_its_field(door: Gate):
    error = await error_of_call(door.stub.Quote(pb.QuoteRequest(spec=spec(model="chat/strong", lane=Lane.BATCH))))
    assert isinstance(error, InvalidRequest)
    assert (error.field, error.reason) == ("spec.contract.lane", "LANE_NOT_SERVED")


async def test_device_seconds_have_their_part_in_costs_and_their_limit(door: Gate):
    wanted = spec(model="chat/strong")
    verdict = (await door.stub.Quote(pb.QuoteRequest(spec=wanted))).verdict
    assert verdict.cost > 0.0
    wanted.contract.cost_max = verdict.cost / 100
    refused = (await door.stub.Quote(pb.QuoteRequest(spec=wanted))).verdict
    assert refused.reason == "COST_ABOVE_MAX"
