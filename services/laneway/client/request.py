"""From a caller's keyword arguments to a JobSpec. Checks only what cannot be said on the wire: the door validates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Required, TypedDict

from laneway.client.values import Message, Tool
from laneway.core.errors import InvalidRequest
from laneway.core.lanes import Isolation, Lane, OnDisconnect
from laneway.runtime.wire import enums
from laneway.runtime.wire.times import duration_of, timestamp_of
from laneway.v1 import common_pb2, task_pb2

TOOL_CHOICE_MODES = {
    "none": task_pb2.TOOL_CHOICE_MODE_NONE,
    "auto": task_pb2.TOOL_CHOICE_MODE_AUTO,
    "required": task_pb2.TOOL_CHOICE_MODE_REQUIRED,
}


class RequestFields(TypedDict, total=False):
    """What generate(), submit() and quote() take. What is left out has the lane's or the model's default."""

    model: Required[str]  # "chat", or "chat/small" for one tier
    # exactly one prompt
    messages: Sequence[Message | Mapping[str, str]]  # a mapping has `role` and `content`
    prompt: str
    token_ids: Sequence[int]
    continue_final_message: bool  # the last message is an opening of the answer to go on with
    # sampling
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    logprobs: bool
    top_logprobs: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    n: int
    min_tokens: int
    ignore_eos: bool
    # output
    tools: Sequence[Tool]
    tool_choice: str  # none, auto, required, or the name of a tool
    json_object: bool
    json_schema: str
    regex: str
    grammar: str
    adapter: str
    cache_salt: str
    session_id: str  # requests of one session meet the same worker's caches, if they can
    route: str  # a name for this kind of request: how long its answers get is learned
    # contract
    lane: Lane | str
    ttft_target_s: float
    tpot_target_s: float
    deadline_s: float  # the whole answer is due this many seconds from now
    deadline_at: datetime  # or at this time; use it with an idempotency key of your own: the body must be the same
    not_before_s: float  # not started within this many seconds
    not_before_at: datetime
    isolation: Isolation | str
    least_tier: str
    cost_max: float
    regions: Sequence[str]
    on_disconnect: OnDisconnect | str
    labels: Mapping[str, str]


_SAMPLING = frozenset(task_pb2.Sampling.DESCRIPTOR.fields_by_name)  # the arguments have the names of the wire fields
_FORMATS = ("json_object", "json_schema", "regex", "grammar")


def lane_of(fields: RequestFields) -> Lane:
    """The lane asked for; InvalidRequest if there is no such lane."""
    lane = fields.get("lane", Lane.PRIORITY)
    try:
        return Lane(lane)
    except ValueError:
        raise InvalidRequest(f"lane must be one of {', '.join(Lane)}, not {lane}", field="lane") from None


def build_spec(fields: RequestFields, now_s: float) -> task_pb2.JobSpec:
    """The JobSpec of a request. InvalidRequest names the argument that no message can carry."""
    try:
        return task_pb2.JobSpec(
            model=fields["model"],
            generate=_task(fields),
            contract=_contract(fields, now_s),
            route=fields.get("route", ""),
        )
    except (TypeError, ValueError, OverflowError) as error:  # out of range or of the wrong kind for its wire field
        raise InvalidRequest(f"the request cannot be sent: {error}") from None


def _task(fields: RequestFields) -> task_pb2.GenerateTask:
    task = task_pb2.GenerateTask(
        sampling=_sampling(fields),
        tools=[
            task_pb2.Tool(name=t.name, description=t.description, parameters_json_schema=t.parameters_json_schema)
            for t in fields.get("tools", ())
        ],
        adapter=fields.get("adapter", ""),
        cache_salt=fields.get("cache_salt", ""),
        session_id=fields.get("session_id", ""),
    )
    _set_prompt(task, fields)
    if "tool_choice" in fields:
        choice = fields["tool_choice"]
        mode = TOOL_CHOICE_MODES.get(choice)
        task.tool_choice.CopyFrom(task_pb2.ToolChoice(name=choice) if mode is None else task_pb2.ToolChoice(mode=mode))
    given = {name: value for name, value in fields.items() if name in _FORMATS and value}
    if len(given) > 1:
        raise InvalidRequest(f"give at most one of {', '.join(_FORMATS)}", field=sorted(given)[1])
    for name, value in given.items():
        setattr(task.response_format, name, value)
    return task


def _set_prompt(task: task_pb2.GenerateTask, fields: RequestFields) -> None:
    given = [name for name in ("messages", "prompt", "token_ids") if name in fields]
    if len(given) != 1:
        raise InvalidRequest(
            f"give exactly one of messages, prompt and token_ids, not {' and '.join(given) or 'none'}", field="prompt"
        )
    if "messages" in fields:
        messages = [_message(m) for m in fields["messages"]]
        task.chat.CopyFrom(
            task_pb2.ChatPrompt(messages=messages, continue_final_message=fields.get("continue_final_message", False))
        )
    elif "prompt" in fields:
        task.text = fields["prompt"]
    elif "token_ids" in fields:
        task.tokens.CopyFrom(task_pb2.TokenPrompt(ids=fields["token_ids"]))


def _message(message: Message | Mapping[str, str]) -> task_pb2.ChatMessage:
    if not isinstance(message, Message):
        unknown = sorted(set(message) - {"role", "content", "name"})
        if unknown or "role" not in message:
            raise InvalidRequest(
                f"a message given as a mapping has role, content and name; {', '.join(unknown) or 'role is missing'}",
                field="messages",
            )
        message = Message(message["role"], message.get("content", ""), message.get("name", ""))
    parts = [task_pb2.ContentPart(text=message.text)] if message.text or not message.images else []
    parts += [
        task_pb2.ContentPart(image_url=image) if isinstance(image, str) else task_pb2.ContentPart(image=image)
        for image in message.images
    ]
    if not message.text and message.tool_calls and not message.images:
        parts = []
    return task_pb2.ChatMessage(
        role=message.role,
        parts=parts,
        name=message.name,
        tool_call_id=message.tool_call_id,
        tool_calls=[
            task_pb2.ToolCall(id=call.id, name=call.name, arguments_json=call.arguments_json)
            for call in message.tool_calls
        ],
    )


def _sampling(fields: RequestFields) -> task_pb2.Sampling:
    sampling = task_pb2.Sampling()
    for name, value in fields.items():
        if name not in _SAMPLING or name == "logit_bias" or value is None:
            continue
        if name in ("stop", "stop_token_ids"):
            if isinstance(value, str):
                raise InvalidRequest(f"{name} must be a list", field=name)
            getattr(sampling, name).extend(value)
        else:
            setattr(sampling, name, value)
    sampling.logit_bias.update(fields.get("logit_bias", {}))
    return sampling


def _contract(fields: RequestFields, now_s: float) -> common_pb2.Contract:
    deadline_s = _moment(fields.get("deadline_s"), fields.get("deadline_at"), now_s, "deadline")
    not_before_s = _moment(fields.get("not_before_s"), fields.get("not_before_at"), now_s, "not_before")
    return common_pb2.Contract(
        lane=enums.LANE_TO_WIRE[lane_of(fields)],
        ttft_target=duration_of(fields.get("ttft_target_s")),
        tpot_target=duration_of(fields.get("tpot_target_s")),
        deadline=timestamp_of(deadline_s),
        not_before=timestamp_of(not_before_s),
        isolation=enums.ISOLATION_TO_WIRE[Isolation(fields["isolation"])] if "isolation" in fields else None,
        least_tier=fields.get("least_tier", ""),
        cost_max=fields.get("cost_max"),
        regions=fields.get("regions", ()),
        on_disconnect=(
            enums.ON_DISCONNECT_TO_WIRE[OnDisconnect(fields["on_disconnect"])] if "on_disconnect" in fields else None
        ),
        labels=fields.get("labels", {}),
    )


def _moment(span_s: float | None, at: datetime | None, now_s: float, name: str) -> float:
    """A wall time given as a span or a moment; 0 if neither."""
    if span_s is not None and at is not None:
        raise InvalidRequest(f"give {name}_s or {name}_at, not both", field=f"{name}_at")
    if at is not None:
        if at.tzinfo is None:
            raise InvalidRequest(f"{name}_at needs a time zone", field=f"{name}_at")
        return at.timestamp()
    return now_s + span_s if span_s is not None else 0.0
