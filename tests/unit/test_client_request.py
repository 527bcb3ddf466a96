"""From keyword arguments to the message that is sent."""

import math
from datetime import UTC, datetime
from typing import Any

import pytest

from laneway.client import InvalidRequest, Lane, Message, Tool, ToolCall
from laneway.client.request import RequestFields, build_spec, lane_of
from laneway.v1 import common_pb2, task_pb2

NOW_S = 1_800_000_000.0


def spec(**fields: Any) -> task_pb2.JobSpec:
    request: RequestFields = {"model": "chat", **fields}  # type: ignore[typeddict-item]  # the point: any argument
    return build_spec(request, NOW_S)


def test_what_is_not_said_is_not_sent():
    message = spec(prompt="Hi")
    assert message.generate.text == "Hi"
    assert message.generate.sampling == task_pb2.Sampling()
    assert message.contract == common_pb2.Contract(lane=common_pb2.LANE_PRIORITY)
    assert not message.generate.HasField("response_format")
    assert not message.generate.HasField("tool_choice")


def test_an_empty_prompt_is_a_prompt_and_the_services_to_judge():
    assert spec(prompt="").generate.WhichOneof("prompt") == "text"
    assert spec(token_ids=[]).generate.WhichOneof("prompt") == "tokens"
    assert spec(messages=[]).generate.WhichOneof("prompt") == "chat"


def test_zero_is_sent_and_is_not_the_default():
    sampling = spec(prompt="", temperature=0.0, seed=0, max_tokens=0, n=0, min_p=0.0).generate.sampling
    for name in ("temperature", "seed", "max_tokens", "n", "min_p"):
        assert sampling.HasField(name)


def test_values_out_of_range_of_the_contract_are_the_services_to_judge():
    assert math.isnan(spec(prompt="", temperature=math.nan).generate.sampling.temperature)
    assert spec(prompt="", top_p=7.0).generate.sampling.top_p == 7.0


def test_messages_with_tools_and_images():
    call = ToolCall("1", "weather", "{}")
    message = spec(
        messages=[
            Message("user", "Look", images=(b"png", "https://example.org/a.png")),
            Message("assistant", tool_calls=(call,)),
            Message("tool", "sunny", tool_call_id="1"),
        ],
        continue_final_message=True,
        tools=[Tool("weather", "of a place", "{}")],
        tool_choice="weather",
    )
    chat = message.generate.chat
    assert chat.continue_final_message
    look, called, answer = chat.messages
    assert [part.WhichOneof("part") for part in look.parts] == ["text", "image", "image_url"]
    assert not called.parts
    assert called.tool_calls[0].name == "weather"
    assert answer.tool_call_id == "1"
    assert message.generate.tools[0].description == "of a place"
    assert message.generate.tool_choice.name == "weather"
    assert spec(prompt="", tool_choice="none").generate.tool_choice.mode == task_pb2.TOOL_CHOICE_MODE_NONE


def test_spans_and_moments_become_moments():
    contract = spec(prompt="", deadline_s=60.0, not_before_at=datetime(2027, 1, 15, 8, 0, 1, tzinfo=UTC)).contract
    assert contract.deadline.seconds == NOW_S + 60
    assert contract.not_before.seconds == NOW_S + 1


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "prompt"),
        ({"prompt": "", "messages": []}, "prompt"),
        ({"prompt": "", "deadline_s": 1.0, "deadline_at": datetime(2030, 1, 1, tzinfo=UTC)}, "deadline_at"),
        ({"prompt": "", "not_before_at": datetime(2030, 1, 1)}, "not_before_at"),  # noqa: DTZ001 - no zone, on purpose
        ({"prompt": "", "json_object": True, "regex": "a"}, "regex"),
        ({"prompt": "", "stop": "text"}, "stop"),
        ({"prompt": "", "lane": "fast"}, "lane"),
        ({"messages": [{"role": "user", "content": "", "extra": ""}]}, "messages"),
        ({"prompt": "", "top_k": -1}, ""),
        ({"prompt": "", "top_k": "many"}, ""),
        ({"prompt": 3}, ""),
        ({"token_ids": [2**33]}, ""),
        ({"prompt": "", "deadline_s": math.inf}, ""),
        ({"prompt": "", "isolation": "none"}, ""),
        ({"prompt": "\ud800"}, ""),
    ],
)
def test_what_no_message_can_carry_is_refused(fields: dict[str, Any], field: str):
    with pytest.raises(InvalidRequest) as refused:
        spec(**fields)
    assert refused.value.field == field


def test_lanes_may_be_words():
    assert lane_of({"model": "chat", "lane": "batch"}) is Lane.BATCH
    assert lane_of({"model": "chat"}) is Lane.PRIORITY
