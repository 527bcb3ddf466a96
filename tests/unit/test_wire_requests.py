"""What callers send: each bad field is refused by its name, and nothing that is sent is ignored."""

import math
from typing import Any, Literal

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from laneway.core.catalogue import Capabilities, Catalogue, Pool
from laneway.core.errors import InvalidRequest, Unsupported
from laneway.core.lanes import Isolation, Lane, OnDisconnect
from laneway.core.prompt import ChatPrompt, ChatTurn, TextPrompt, TokenPrompt
from laneway.runtime.catalogue import ENGINE_CAPABILITIES, pool_of
from laneway.runtime.engine_options import EngineOptions
from laneway.runtime.settings import ModelSettings, PolicySettings
from laneway.runtime.wire.requests import ParsedSpec, parse_spec
from laneway.v1 import common_pb2, task_pb2

NOW_S = 1_800_000_000.0
POLICY = PolicySettings()
ALL = Capabilities(
    logprobs=True, top_logprobs=20, min_p=True, seed=True, penalties=True, logit_bias=True, n=4, min_tokens=True,
    json_schema=True, regex=True, grammar=True, adapters=True, cache_salt=True, strict_isolation=True,
)  # fmt: skip
NONE = Capabilities(top_k=False, ignore_eos=False)


def pool(tier: str = "small", capabilities: Capabilities = ALL, vocabulary_size: int = 260) -> Pool:
    return Pool(
        name=f"chat-{tier}", model="chat", tier=tier, engine="simulated", context_length=2048,
        vocabulary_size=vocabulary_size, slots=4, workers=1, kv_tokens=8192, tokenizer="bytes",
        capabilities=capabilities, temperature_default=0.7,
    )  # fmt: skip


ABLE = Catalogue((pool(),))
UNABLE = Catalogue((pool(capabilities=NONE),))


def spec(**changes: Any) -> task_pb2.JobSpec:
    """A valid request; keywords set fields of sampling, contract or the generate task, whichever has the name."""
    made = task_pb2.JobSpec(model="chat", generate=task_pb2.GenerateTask(text="hello"))
    for name, value in changes.items():
        for message in (made.generate.sampling, made.contract, made.generate, made):
            if name in message.DESCRIPTOR.fields_by_name:
                break
        else:
            raise AssertionError(name)
        if isinstance(value, (str, bytes, int, float, bool)):
            setattr(message, name, value)
        elif isinstance(value, dict):
            getattr(message, name).update(value)
        elif isinstance(value, list):
            getattr(message, name).extend(value)
        else:
            getattr(message, name).CopyFrom(value)
    return made


def parse(request: task_pb2.JobSpec, catalogue: Catalogue = ABLE, **options: Any) -> ParsedSpec:
    return parse_spec(request, catalogue, NOW_S, POLICY, **options)


def refused(request: task_pb2.JobSpec, catalogue: Catalogue = ABLE) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(request, catalogue)
    return caught.value


def at(seconds_ahead: float) -> Timestamp:
    whole = math.floor(NOW_S + seconds_ahead)
    return Timestamp(seconds=whole, nanos=round((NOW_S + seconds_ahead - whole) * 1e9))


def chat(*messages: task_pb2.ChatMessage, **fields: Any) -> task_pb2.ChatPrompt:
    return task_pb2.ChatPrompt(messages=messages, **fields)


def message(role: str = "user", *texts: str, **fields: Any) -> task_pb2.ChatMessage:
    return task_pb2.ChatMessage(role=role, parts=[task_pb2.ContentPart(text=t) for t in texts or ("hi",)], **fields)


SAMPLING = "spec.generate.sampling"
CONTRACT = "spec.contract"
CHAT = "spec.generate.chat"

NOT_NUMBERS = (math.nan, math.inf, -math.inf)
FLOATS: dict[str, tuple[float, ...]] = {
    "temperature": (-0.1, -1e-12, 2.0000001, 1e9),
    "top_p": (0.0, -0.0, -0.1, 1.0000001, 1e9),
    "min_p": (-0.1, -1e-12, 1.1, 1e9),
    "repetition_penalty": (0.0, -0.0, -1.0, 2.1, 1e9),
    "presence_penalty": (-2.1, 2.1, 1e9),
    "frequency_penalty": (-2.1, 2.1, 1e9),
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in FLOATS.items() for v in (*vs, *NOT_NUMBERS)])
def test_a_number_out_of_range_or_no_number_is_refused(name, value):
    assert refused(spec(**{name: value})).field == f"{SAMPLING}.{name}"


@pytest.mark.parametrize("value", [-0.01, *NOT_NUMBERS])
def test_a_cost_that_is_no_amount_is_refused(value):
    assert refused(spec(cost_max=value)).field == f"{CONTRACT}.cost_max"


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("temperature", 1e-12, 0.0),
        ("temperature", 9.99e-4, 0.0),
        ("temperature", -0.0, 0.0),
        ("temperature", 1e-3, 1e-3),
        ("temperature", 2.0, 2.0),
        ("top_p", 1e-12, 1e-12),
        ("top_p", 1.0, None),
        ("min_p", 0.0, None),
        ("min_p", -0.0, None),
        ("repetition_penalty", 1.0, None),
        ("repetition_penalty", 1e-12, 1e-12),
        ("presence_penalty", -0.0, None),
        ("presence_penalty", -2.0, -2.0),
        ("frequency_penalty", 2.0, 2.0),
        ("min_tokens", 0, None),
    ],
)
def test_edge_values_have_one_meaning(name, value, meant):
    got = getattr(parse(spec(**{name: value})).sampling, name)
    assert got == meant
    assert got is None or math.copysign(1.0, got) == math.copysign(1.0, meant)


BAD: list[tuple[str, task_pb2.JobSpec]] = [
    ("spec.model", spec(model="")),
    ("spec.model", spec(model="nothing")),
    ("spec.model", spec(model="chat/none")),
    ("spec.model", spec(model="chat/")),
    ("spec.model", spec(model="chat\x00")),
    ("spec.model", spec(model="chat/small/x")),
    ("spec.model", spec(model="x" * 65)),
    ("spec.generate", task_pb2.JobSpec(model="chat")),
    ("spec.embed", task_pb2.JobSpec(model="chat", embed=task_pb2.EmbedTask(inputs=["a"]))),
    ("spec.score", task_pb2.JobSpec(model="chat", score=task_pb2.ScoreTask(query="a"))),
    ("spec.generate.prompt", task_pb2.JobSpec(model="chat", generate=task_pb2.GenerateTask())),
    ("spec.generate.text", spec(text="")),
    ("spec.generate.text", spec(text="a\x00b")),
    ("spec.generate.tokens.ids", spec(tokens=task_pb2.TokenPrompt())),
    ("spec.generate.tokens.ids[1]", spec(tokens=task_pb2.TokenPrompt(ids=[259, 260, 261]))),
    (f"{CHAT}.messages", spec(chat=chat())),
    (f"{CHAT}.messages", spec(chat=chat(*[message()] * 2049))),
    (f"{CHAT}.messages[1].role", spec(chat=chat(message(), message("boss")))),
    (f"{CHAT}.messages[0].role", spec(chat=chat(message("")))),
    (f"{CHAT}.messages[0].parts", spec(chat=chat(task_pb2.ChatMessage(role="user")))),
    (f"{CHAT}.messages[0].parts", spec(chat=chat(message("user", *["a"] * 257)))),
    (f"{CHAT}.messages[0].parts[1].text", spec(chat=chat(message("user", "a", "\x00")))),
    (
        f"{CHAT}.messages[0].parts[0]",
        spec(chat=chat(task_pb2.ChatMessage(role="user", parts=[task_pb2.ContentPart()]))),
    ),
    (f"{CHAT}.messages[0].name", spec(chat=chat(message(name="bob")))),
    (f"{CHAT}.continue_final_message", spec(chat=chat(message(), continue_final_message=True))),
    (f"{SAMPLING}.max_tokens", spec(max_tokens=0)),
    (f"{SAMPLING}.top_k", spec(top_k=0)),
    (f"{SAMPLING}.stop", spec(stop=["x"] * 17)),
    (f"{SAMPLING}.stop[1]", spec(stop=["x", ""])),
    (f"{SAMPLING}.stop[0]", spec(stop=["x" * 257])),
    (f"{SAMPLING}.stop[0]", spec(stop=["é" * 129])),
    (f"{SAMPLING}.stop[0]", spec(stop=["a\x00"])),
    (f"{SAMPLING}.stop_token_ids", spec(stop_token_ids=[1] * 65)),
    (f"{SAMPLING}.stop_token_ids[0]", spec(stop_token_ids=[260])),
    (f"{SAMPLING}.top_logprobs", spec(logprobs=True, top_logprobs=0)),
    (f"{SAMPLING}.top_logprobs", spec(logprobs=True, top_logprobs=21)),
    (f"{SAMPLING}.top_logprobs", spec(top_logprobs=2)),
    (f"{SAMPLING}.logit_bias", spec(logit_bias=dict.fromkeys(range(1025), 1.0))),
    (f"{SAMPLING}.logit_bias[7]", spec(logit_bias={7: math.nan})),
    (f"{SAMPLING}.logit_bias[7]", spec(logit_bias={7: -100.1})),
    (f"{SAMPLING}.logit_bias[0]", spec(logit_bias={260: 1.0})),
    (f"{SAMPLING}.n", spec(n=0)),
    (f"{SAMPLING}.n", spec(n=17)),
    (f"{SAMPLING}.n", spec(n=5)),
    (f"{SAMPLING}.min_tokens", spec(max_tokens=4, min_tokens=5)),
    ("spec.generate.response_format", spec(response_format=task_pb2.ResponseFormat())),
    ("spec.generate.response_format.json_object", spec(response_format=task_pb2.ResponseFormat(json_object=False))),
    ("spec.generate.response_format.json_schema", spec(response_format=task_pb2.ResponseFormat(json_schema="{"))),
    ("spec.generate.response_format.json_schema", spec(response_format=task_pb2.ResponseFormat(json_schema="[]"))),
    (
        "spec.generate.response_format.json_schema",
        spec(response_format=task_pb2.ResponseFormat(json_schema="[" * 60_000)),
    ),
    ("spec.generate.response_format.regex", spec(response_format=task_pb2.ResponseFormat(regex=""))),
    ("spec.generate.response_format.grammar", spec(response_format=task_pb2.ResponseFormat(grammar="g" * 65_537))),
    ("spec.generate.tool_choice", spec(tool_choice=task_pb2.ToolChoice())),
    ("spec.generate.tool_choice.mode", spec(tool_choice=task_pb2.ToolChoice(mode=9))),  # type: ignore[arg-type]  # on purpose
    ("spec.generate.adapter", spec(adapter="a b")),
    ("spec.generate.cache_salt", spec(cache_salt="a\x00")),
    (f"{CONTRACT}.lane", spec(lane=99)),
    (f"{CONTRACT}.isolation", spec(isolation=-1)),
    (f"{CONTRACT}.on_disconnect", spec(on_disconnect=7)),
    (f"{CONTRACT}.ttft_target", spec(ttft_target=Duration())),
    (f"{CONTRACT}.ttft_target", spec(ttft_target=Duration(seconds=-1))),
    (f"{CONTRACT}.ttft_target", spec(ttft_target=Duration(nanos=-1))),
    (f"{CONTRACT}.ttft_target", spec(ttft_target=Duration(seconds=1, nanos=-1))),
    (f"{CONTRACT}.ttft_target", spec(ttft_target=Duration(nanos=2_000_000_000))),
    (f"{CONTRACT}.ttft_target", spec(ttft_target=Duration(nanos=999_999))),
    (f"{CONTRACT}.ttft_target", spec(ttft_target=Duration(seconds=3600, nanos=1000))),
    (f"{CONTRACT}.tpot_target", spec(tpot_target=Duration(seconds=61))),
    (f"{CONTRACT}.deadline", spec(deadline=at(0.0))),
    (f"{CONTRACT}.deadline", spec(deadline=at(-1.0))),
    (f"{CONTRACT}.deadline", spec(deadline=at(30 * 86_400.0 + 1.0))),
    (f"{CONTRACT}.deadline", spec(deadline=Timestamp(seconds=-1))),
    (f"{CONTRACT}.deadline", spec(deadline=Timestamp(seconds=1 << 40))),
    (f"{CONTRACT}.deadline", spec(deadline=Timestamp(seconds=round(NOW_S) + 9, nanos=-1))),
    (f"{CONTRACT}.not_before", spec(not_before=at(1.0))),
    (f"{CONTRACT}.not_before", spec(lane=3, deadline=at(10.0), not_before=at(10.0))),
    (f"{CONTRACT}.least_tier", spec(least_tier="none")),
    (f"{CONTRACT}.least_tier", spec(least_tier="small\x00")),
    (f"{CONTRACT}.regions", spec(regions=["r"] * 17)),
    (f"{CONTRACT}.regions[1]", spec(regions=["a", "a.b"])),
    (f"{CONTRACT}.regions[0]", spec(regions=["r" * 28])),
    (f"{CONTRACT}.labels", spec(labels={str(i): "" for i in range(17)})),
    (f"{CONTRACT}.labels", spec(labels={"": "a"})),
    (f"{CONTRACT}.labels", spec(labels={"k" * 65: "a"})),
    (f"{CONTRACT}.labels", spec(labels={"k": "v" * 65})),
    (f"{CONTRACT}.labels", spec(labels={"k": "\x00"})),
]


@pytest.mark.parametrize(("field", "request_"), BAD, ids=[f"{field}-{i}" for i, (field, _) in enumerate(BAD)])
def test_a_bad_field_is_refused_by_its_name_each_time(field, request_):
    first, second = refused(request_), refused(request_)
    assert first.field == second.field == field
    assert first.message == second.message


@pytest.mark.parametrize("model", ["nothing", "nothing/small", "chat/none"])
def test_an_unknown_model_has_one_reason_as_at_the_router(model):
    assert refused(spec(model=model)).reason == "MODEL_NOT_FOUND"


@pytest.mark.parametrize("length", [1, 4, 300])
def test_no_refusal_repeats_the_callers_text(length):
    secret = "s3cret" * length
    for request in (
        spec(model=secret),
        spec(text=f"{secret}\x00"),
        spec(stop=[f"{secret}\x00"]),
        spec(labels={secret * 20: secret}),
        spec(least_tier=secret),
        spec(regions=[f"{secret}."]),
        spec(chat=chat(message(secret))),
        spec(response_format=task_pb2.ResponseFormat(json_schema=secret)),
    ):
        assert "s3cret" not in str(refused(request))


ABILITIES: list[tuple[str, task_pb2.JobSpec]] = [
    (f"{SAMPLING}.logprobs", spec(logprobs=True)),
    (f"{SAMPLING}.top_k", spec(top_k=5)),
    (f"{SAMPLING}.min_p", spec(min_p=0.1)),
    (f"{SAMPLING}.seed", spec(seed=1)),
    (f"{SAMPLING}.repetition_penalty", spec(repetition_penalty=1.1)),
    (f"{SAMPLING}.presence_penalty", spec(presence_penalty=0.5)),
    (f"{SAMPLING}.frequency_penalty", spec(frequency_penalty=-0.5)),
    (f"{SAMPLING}.logit_bias", spec(logit_bias={5: 1.0})),
    (f"{SAMPLING}.n", spec(n=2)),
    (f"{SAMPLING}.min_tokens", spec(min_tokens=2)),
    (f"{SAMPLING}.ignore_eos", spec(ignore_eos=True)),
    ("spec.generate.tools", spec(tools=[task_pb2.Tool(name="t")])),
    ("spec.generate.tool_choice", spec(tool_choice=task_pb2.ToolChoice(name="t"))),
    (f"{CHAT}.messages[0].role", spec(chat=chat(message("tool")))),
    (f"{CHAT}.messages[0].tool_call_id", spec(chat=chat(message(tool_call_id="a")))),
    (f"{CHAT}.messages[0].tool_calls", spec(chat=chat(message("assistant", tool_calls=[task_pb2.ToolCall()])))),
    (
        f"{CHAT}.messages[0].parts[0].image_url",
        spec(chat=chat(task_pb2.ChatMessage(role="user", parts=[task_pb2.ContentPart(image_url="u")]))),
    ),
    (
        f"{CHAT}.messages[0].parts[0].image",
        spec(chat=chat(task_pb2.ChatMessage(role="user", parts=[task_pb2.ContentPart(image=b"x")]))),
    ),
    ("spec.generate.response_format.json_object", spec(response_format=task_pb2.ResponseFormat(json_object=True))),
    ("spec.generate.response_format.json_schema", spec(response_format=task_pb2.ResponseFormat(json_schema="{}"))),
    ("spec.generate.response_format.regex", spec(response_format=task_pb2.ResponseFormat(regex="a"))),
    ("spec.generate.response_format.grammar", spec(response_format=task_pb2.ResponseFormat(grammar="a"))),
    ("spec.generate.adapter", spec(adapter="lora")),
    ("spec.generate.cache_salt", spec(cache_salt="salt")),
    (f"{CONTRACT}.isolation", spec(isolation=common_pb2.ISOLATION_STRICT)),
]


class TestAbilities:
    @pytest.mark.parametrize(("field", "request_"), ABILITIES, ids=[field for field, _ in ABILITIES])
    def test_one_that_the_pool_lacks_is_refused_by_its_field(self, field, request_):
        error = refused(request_, UNABLE)
        assert isinstance(error, Unsupported)
        assert error.field == field

    def test_strict_isolation_is_kept_where_prompts_go_in_slices_and_steps_are_timed(self):
        def keeps(engine: Literal["openvino", "simulated"], **options: Any) -> bool:
            model = ModelSettings(name="chat", engine=engine, engine_options=EngineOptions(**options))
            return pool_of(model).capabilities.strict_isolation

        assert keeps("openvino")
        assert not keeps("openvino", prefix_cache=False)
        assert not keeps("simulated")
        assert keeps("simulated", profile="h100-8b-fp8")

    def test_strict_isolation_by_default_binds_priority_where_a_pool_can_keep_it(self):
        strict = PolicySettings(isolation="strict")
        for capabilities, lane, wanted in (
            (ALL, common_pb2.LANE_PRIORITY, Isolation.STRICT),
            (ALL, common_pb2.LANE_BATCH, Isolation.SLO),
            (Capabilities(), common_pb2.LANE_PRIORITY, Isolation.SLO),
        ):
            able = Catalogue((pool(capabilities=capabilities),))
            parsed = parse_spec(spec(lane=lane), able, NOW_S, strict)
            assert parsed.contract.isolation is wanted
        both = Catalogue((pool("cheap", Capabilities()), pool("best", ALL)))
        assert [found.name for found in parse_spec(spec(), both, NOW_S, strict).pools] == ["chat-best"]
        said = spec(isolation=common_pb2.ISOLATION_SLO)
        assert parse_spec(said, both, NOW_S, strict).contract.isolation is Isolation.SLO

    def test_a_limit_is_named(self):
        error = refused(
            spec(logprobs=True, top_logprobs=6), Catalogue((pool(capabilities=replace(ALL, top_logprobs=5)),))
        )
        assert isinstance(error, Unsupported)
        assert (error.field, "beyond 5" in error.message) == (f"{SAMPLING}.top_logprobs", True)
        assert parse(spec(n=4)).sampling.n == 4

    def test_what_is_off_needs_no_ability(self):
        request = spec(
            top_p=1.0, min_p=0.0, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, n=1, min_tokens=0
        )
        parsed = parse(request, UNABLE)
        assert parsed.pools == UNABLE.pools

    def test_a_seed_of_a_greedy_answer_needs_none(self):
        assert parse(spec(seed=3, temperature=0.0), UNABLE).sampling.seed == 3
        assert refused(spec(seed=3, temperature=0.5), UNABLE).field == f"{SAMPLING}.seed"

    def test_the_tiers_that_can_do_it_remain(self):
        both = Catalogue((pool("small", NONE), pool("strong", ALL, vocabulary_size=1000)))
        assert [p.tier for p in parse(spec(), both).pools] == ["small", "strong"]
        assert [p.tier for p in parse(spec(logprobs=True), both).pools] == ["strong"]
        assert [p.tier for p in parse(spec(tokens=task_pb2.TokenPrompt(ids=[500])), both).pools] == ["strong"]
        assert [p.tier for p in parse(spec(least_tier="strong"), both).pools] == ["strong"]
        assert refused(spec(model="chat/small", logprobs=True), both).field == f"{SAMPLING}.logprobs"

    def test_no_engine_claims_what_a_parsed_request_does_not_carry(self):
        for offered in ENGINE_CAPABILITIES.values():
            assert {offered.tools, offered.image_input, offered.embed, offered.score} == {False}


class TestUnknownFields:
    NEWER = b"\xf8\x06\x01"  # field 111, a number that this release does not have

    @pytest.mark.parametrize(
        ("field", "path"),
        [
            ("spec", ()),
            ("spec.generate", ("generate",)),
            (SAMPLING, ("generate", "sampling")),
            (CONTRACT, ("contract",)),
            (CHAT, ("generate", "chat")),
            ("spec.generate.response_format", ("generate", "response_format")),
            ("spec.generate.tool_choice", ("generate", "tool_choice")),
        ],
    )
    def test_a_field_of_a_later_release_is_refused_not_dropped(self, field, path):
        request = spec()
        part: Any = request
        for name in path:
            part = getattr(part, name)
        part.MergeFromString(self.NEWER)
        part.SetInParent()
        if path[-1:] == ("chat",):
            part.messages.append(message())
        error = refused(request)
        assert (error.field, error.reason) == (field, "UNKNOWN_FIELD")
        assert "111" in error.message


class TestGoodRequests:
    def test_defaults_of_the_lane_and_the_pool(self):
        parsed = parse(spec())
        assert parsed.prompt == TextPrompt("hello")
        assert parsed.max_tokens is None
        contract = parsed.contract
        assert (contract.lane, contract.isolation, contract.on_disconnect) == (
            Lane.PRIORITY, Isolation.SLO, OnDisconnect.CANCEL,
        )  # fmt: skip
        assert (contract.ttft_target_s, contract.tpot_target_s, contract.deadline_s) == (1.0, 0.1, NOW_S + 60.0)
        task = parsed.task_of(parsed.pools[0], (1, 2), 9)
        assert (task.prompt_ids, task.sampling.max_tokens, task.sampling.temperature) == ((1, 2), 9, 0.7)

    @pytest.mark.parametrize(("lane", "deadline_s"), [(2, 3600.0), (3, 86_400.0)])
    def test_each_lane_has_a_deadline_of_its_own(self, lane, deadline_s):
        assert parse(spec(lane=lane)).contract.deadline_s == NOW_S + deadline_s

    def test_a_submitted_job_is_kept_when_its_caller_goes(self):
        assert parse(spec(), attached=False).contract.on_disconnect is OnDisconnect.KEEP
        assert parse(spec(on_disconnect=1), attached=False).contract.on_disconnect is OnDisconnect.CANCEL

    def test_limits_themselves_are_allowed(self):
        parsed = parse(
            spec(
                stop=["x" * 256] + ["é" * 128] * 15,
                stop_token_ids=[259] * 64,
                logprobs=True,
                top_logprobs=20,
                logit_bias={259: -100.0},
                labels={f"{i}" + "k" * 62: "v" * 64 for i in range(10)},
                regions=["r" * 27],
                ttft_target=Duration(nanos=1_000_000),
                tpot_target=Duration(seconds=60),
                deadline=at(30 * 86_400.0),
                lane=3,
                not_before=at(86_400.0),
                cost_max=-0.0,
            )
        )
        contract = parsed.contract
        assert (contract.ttft_target_s, contract.tpot_target_s) == (0.001, 60.0)
        assert contract.not_before_s == NOW_S + 86_400.0
        assert math.copysign(1.0, contract.cost_max or 0.0) == 1.0

    def test_a_not_before_that_has_passed_is_none(self):
        assert parse(spec(lane=2, not_before=at(-5.0))).contract.not_before_s == 0.0

    def test_a_conversation_keeps_its_text(self):
        request = spec(
            chat=chat(message("system", ""), message("user", "a", " b"), message("assistant", "<|im_end|>"),
                      continue_final_message=True)
        )  # fmt: skip
        turns = (ChatTurn("system", ""), ChatTurn("user", "a b"), ChatTurn("assistant", "<|im_end|>"))
        assert parse(request).prompt == ChatPrompt(turns, continue_final=True)

    def test_ids_are_taken_as_they_are(self):
        assert parse(spec(tokens=task_pb2.TokenPrompt(ids=[0, 259]))).prompt == TokenPrompt((0, 259))

    def test_the_answers_length_bounds_min_tokens_even_by_default(self):
        parsed = parse(spec(min_tokens=10))
        with pytest.raises(InvalidRequest) as caught:
            parsed.task_of(parsed.pools[0], (1,), 9)
        assert caught.value.field == f"{SAMPLING}.min_tokens"


# --- whatever arrives ------------------------------------------------------------------------------

_small = st.text(max_size=4)
_number = st.floats() | st.integers(-2, 70).map(float)
_count = st.integers(0, 70) | st.integers(0, 2**32 - 1)
_duration = st.builds(
    Duration, seconds=st.integers(-(2**63), 2**63 - 1) | st.integers(-1, 4), nanos=st.integers(-(2**31), 2**31 - 1)
)
_stamp = st.builds(
    Timestamp,
    seconds=st.integers(-(2**63), 2**63 - 1) | st.integers(int(NOW_S) - 2, int(NOW_S) + 99),
    nanos=st.integers(-(2**31), 2**31 - 1) | st.just(0),
)


def _maybe(**fields: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


_sampling = _maybe(
    max_tokens=_count, temperature=_number, top_p=_number, top_k=_count, min_p=_number,
    seed=st.integers(0, 2**64 - 1), stop=st.lists(_small, max_size=3), stop_token_ids=st.lists(_count, max_size=3),
    logprobs=st.booleans(), top_logprobs=_count, repetition_penalty=_number, presence_penalty=_number,
    frequency_penalty=_number, logit_bias=st.dictionaries(_count, _number, max_size=2), n=_count, min_tokens=_count,
    ignore_eos=st.booleans(),
).map(lambda fields: task_pb2.Sampling(**fields))  # fmt: skip
_contract = _maybe(
    lane=st.integers(-(2**31), 2**31 - 1) | st.integers(0, 3), ttft_target=_duration, tpot_target=_duration,
    deadline=_stamp, not_before=_stamp, isolation=st.integers(-1, 4), least_tier=st.just("small") | _small,
    cost_max=_number, regions=st.lists(_small, max_size=3), on_disconnect=st.integers(-1, 4),
    labels=st.dictionaries(_small, _small, max_size=2),
).map(lambda fields: common_pb2.Contract(**fields))  # fmt: skip
_part = st.one_of(
    st.builds(task_pb2.ContentPart), st.builds(task_pb2.ContentPart, text=_small),
    st.builds(task_pb2.ContentPart, image=st.binary(max_size=3)),
)  # fmt: skip
_message = st.builds(
    task_pb2.ChatMessage, role=st.sampled_from(["user", "assistant", "tool", ""]), parts=st.lists(_part, max_size=2),
    name=st.just("") | _small,
)  # fmt: skip
_format = _maybe(json_object=st.booleans(), json_schema=_small).map(lambda fields: task_pb2.ResponseFormat(**fields))
_task = _maybe(
    text=_small, chat=st.builds(task_pb2.ChatPrompt, messages=st.lists(_message, max_size=3)),
    tokens=st.builds(task_pb2.TokenPrompt, ids=st.lists(_count, max_size=3)), sampling=_sampling,
    response_format=_format, adapter=_small, cache_salt=_small,
).map(lambda fields: task_pb2.GenerateTask(**fields))  # fmt: skip
_specs = st.builds(
    task_pb2.JobSpec,
    model=st.just("chat") | _small,
    generate=_task,
    contract=_contract | st.just(common_pb2.Contract()),
)


def check_parsed(request: task_pb2.JobSpec) -> None:
    """Either a refusal that names a field, or values that an engine may be handed."""
    try:
        parsed = parse(request)
        sampling = parsed.sampling_of(parsed.pools[0], parsed.max_tokens or 16)
    except InvalidRequest as error:
        if error.field.split(".")[0] == "spec":
            return
        raise
    numbers = [sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty,
               sampling.presence_penalty, sampling.frequency_penalty, *sampling.logit_bias.values(),
               parsed.contract.ttft_target_s, parsed.contract.deadline_s, parsed.contract.cost_max]  # fmt: skip
    assert all(math.isfinite(number) for number in numbers if number is not None)
    assert sampling.temperature == 0.0 or sampling.temperature >= 1e-3
    assert NOW_S < parsed.contract.deadline_s <= NOW_S + 30 * 86_400
    assert sampling.max_tokens >= 1


@given(_specs)
def test_any_request_is_parsed_or_refused_by_field(request):
    check_parsed(request)


@given(st.binary(max_size=60))
def test_any_bytes_are_malformed_or_parsed_or_refused(data):
    request = spec()
    try:
        request.MergeFromString(data)
    except DecodeError:
        return
    check_parsed(request)
