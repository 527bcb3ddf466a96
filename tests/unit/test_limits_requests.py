"""Each limit on a field of a request: at N it is taken, at N + 1 it is refused by the field's name."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
from msgspec.structs import replace

from laneway.admission import many
from laneway.core import ids
from laneway.core.catalogue import Catalogue
from laneway.core.errors import InvalidRequest
from laneway.routing import service as routing
from laneway.runtime.wire import checks, contracts, prompts, requests, sampling
from laneway.v1 import common_pb2, routing_pb2, task_pb2
from tests.unit.test_wire_requests import ALL, CHAT, CONTRACT, SAMPLING, at, chat, message, parse, pool, spec

WIDE = Catalogue((pool(capabilities=replace(ALL, n=32), vocabulary_size=5000),))
Build = Callable[[int], task_pb2.JobSpec]

FIELDS: list[tuple[ModuleType, str, Build, str]] = [
    (ids, "REGION_LENGTH_MAX", lambda n: spec(regions=["r" * n]), f"{CONTRACT}.regions[0]"),
    (contracts, "REGIONS_MAX", lambda n: spec(regions=[f"r{i}" for i in range(n)]), f"{CONTRACT}.regions"),
    (contracts, "LABELS_MAX", lambda n: spec(labels={f"k{i}": "" for i in range(n)}), f"{CONTRACT}.labels"),
    (contracts, "LABEL_CHARACTERS_MAX", lambda n: spec(labels={"k" * n: "v"}), f"{CONTRACT}.labels"),
    (contracts, "LABEL_CHARACTERS_MAX", lambda n: spec(labels={"k": "é" * n}), f"{CONTRACT}.labels"),
    (contracts, "DEADLINE_S_MAX", lambda n: spec(deadline=at(n)), f"{CONTRACT}.deadline"),
    (prompts, "MESSAGES_MAX", lambda n: spec(chat=chat(*[message()] * n)), f"{CHAT}.messages"),
    (prompts, "PARTS_MAX", lambda n: spec(chat=chat(message("user", *["a"] * n))), f"{CHAT}.messages[0].parts"),
    (sampling, "STOP_MAX", lambda n: spec(stop=["x"] * n), f"{SAMPLING}.stop"),
    (sampling, "STOP_BYTES_MAX", lambda n: spec(stop=["x" * n]), f"{SAMPLING}.stop[0]"),
    (sampling, "STOP_TOKEN_IDS_MAX", lambda n: spec(stop_token_ids=[1] * n), f"{SAMPLING}.stop_token_ids"),
    (sampling, "TOP_LOGPROBS_MAX", lambda n: spec(logprobs=True, top_logprobs=n), f"{SAMPLING}.top_logprobs"),
    (sampling, "LOGIT_BIAS_MAX", lambda n: spec(logit_bias=dict.fromkeys(range(n), 1.0)), f"{SAMPLING}.logit_bias"),
    (requests, "SESSION_ID_LENGTH_MAX", lambda n: spec(session_id="é" * n), "spec.generate.session_id"),
    (sampling, "N_MAX", lambda n: spec(n=n), f"{SAMPLING}.n"),
    (
        sampling,
        "FORMAT_BYTES_MAX",
        lambda n: spec(response_format=task_pb2.ResponseFormat(grammar="g" * n)),
        "spec.generate.response_format.grammar",
    ),
]


@pytest.mark.parametrize(("owner", "name", "build", "field"), FIELDS, ids=[name for _, name, _, _ in FIELDS])
def test_a_field_is_taken_at_its_limit_and_refused_by_name_beyond(
    owner: ModuleType, name: str, build: Build, field: str
):
    limit = int(getattr(owner, name))
    parse(build(limit), WIDE)
    with pytest.raises(InvalidRequest) as refused:
        parse(build(limit + 1), WIDE)
    assert refused.value.field == field


def test_an_idempotency_key_has_so_many_characters_and_no_more():
    assert checks.idempotency_key("é" * checks.KEY_CHARACTERS_MAX)
    with pytest.raises(InvalidRequest) as refused:
        checks.idempotency_key("k" * (checks.KEY_CHARACTERS_MAX + 1))
    assert refused.value.field == "idempotency_key"


def test_a_client_ref_has_so_many_characters_and_no_more():
    many._check_ref("r" * many.REF_CHARACTERS_MAX)
    with pytest.raises(InvalidRequest) as refused:
        many._check_ref("r" * (many.REF_CHARACTERS_MAX + 1))
    assert refused.value.field == "client_ref"


def test_a_token_of_a_subject_has_so_many_characters_and_no_more():
    assert ids.is_token("t" * ids.TOKEN_LENGTH_MAX)
    assert not ids.is_token("t" * (ids.TOKEN_LENGTH_MAX + 1))


def test_a_route_is_asked_for_so_many_regions_and_so_long_a_model_and_no_more():
    def ask(regions: int = 0, model: int = 4) -> object:
        names = [f"r{i}" for i in range(regions)]
        lane = common_pb2.LANE_BATCH
        return routing._ask(routing_pb2.RouteRequest(model="m" * model, regions=names, lane=lane))

    assert ask(regions=routing.REGIONS_ASKED_MAX, model=routing.MODEL_LENGTH_MAX)
    with pytest.raises(InvalidRequest) as refused:
        ask(regions=routing.REGIONS_ASKED_MAX + 1)
    assert refused.value.field == "regions"
    with pytest.raises(InvalidRequest) as refused:
        ask(model=routing.MODEL_LENGTH_MAX + 1)
    assert refused.value.field == "model"
