"""A line of a batch file as a request: the client's own arguments, or a line of an OpenAI batch file.

Pure. Whatever is wrong names the field. Defaults are those of the command's options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, cast, get_type_hints

import msgspec

from laneway.client import RequestFields, Tool
from laneway.core.errors import InvalidRequest
from laneway.core.lanes import Isolation, Lane, OnDisconnect

# What a line may hold besides the arguments of submit().
ID, KEY = "id", "idempotency_key"
_OPENAI_URLS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}
_OPENAI_LINE = {"custom_id", "method", "url", "body"}

# As in RequestFields, but where JSON leaves no choice of types.
_TYPES: dict[str, Any] = {
    **get_type_hints(RequestFields),
    "messages": list[dict[str, str]],
    "tools": list[Tool],
    "lane": Lane,
    "isolation": Isolation,
    "on_disconnect": OnDisconnect,
    ID: str,
    KEY: str,
}


@dataclass(frozen=True, slots=True)
class Line:
    request: RequestFields
    id: str  # the line's own name; empty if it has none
    key: str = ""  # idempotency key; empty if it has none


@dataclass(frozen=True, slots=True)
class Defaults:
    """For what a line does not say. Spans count from `began`, so that a line means the same whenever it is sent."""

    began: datetime
    request: Mapping[str, object] = field(default_factory=dict)


def parse_line(data: bytes, defaults: Defaults) -> Line:
    """Raises InvalidRequest, whose field is the line's."""
    try:
        found = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the line is not JSON: {error}", reason="MALFORMED_REQUEST") from None
    if not isinstance(found, dict):
        raise InvalidRequest("the line is not a JSON object", reason="MALFORMED_REQUEST")
    if "body" in found or "custom_id" in found:
        found = _from_openai(found)
    values = {name: _value(name, value) for name, value in found.items() if value is not None}
    name, key = str(values.pop(ID, "")), str(values.pop(KEY, ""))
    for absent, value in defaults.request.items():
        if absent not in values and not (absent == "deadline_s" and "deadline_at" in values):
            values[absent] = value
    _fix_times(values, defaults.began)
    return Line(cast("RequestFields", values), name, key)


def _value(name: str, value: object) -> object:
    kind = _TYPES.get(name)
    if kind is None:
        raise InvalidRequest(f"{name} is no field of a request", field=name, reason="UNKNOWN_FIELD")
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{name}: {error}", field=name) from None


def _fix_times(values: dict[str, object], began: datetime) -> None:
    """A span from now would make another request of the same line when it is sent again."""
    for name in ("deadline", "not_before"):
        span_s = values.pop(f"{name}_s", None)
        if isinstance(span_s, float | int):
            if f"{name}_at" in values:
                raise InvalidRequest(f"give {name}_s or {name}_at, not both", field=f"{name}_at")
            values[f"{name}_at"] = datetime.fromtimestamp(began.timestamp() + span_s, began.tzinfo)


# --- OpenAI's batch files --------------------------------------------------------------------------


def _from_openai(line: dict[str, Any]) -> dict[str, object]:
    unknown = sorted(set(line) - _OPENAI_LINE)
    if unknown:
        raise InvalidRequest(f"{unknown[0]} is no field of a batch line", field=unknown[0], reason="UNKNOWN_FIELD")
    url, body = line.get("url", "/v1/chat/completions"), line.get("body")
    if url not in _OPENAI_URLS:
        raise InvalidRequest(f"url must be {' or '.join(_OPENAI_URLS)}", field="url")
    if not isinstance(body, dict):
        raise InvalidRequest("body must be an object", field="body")
    request: dict[str, object] = {ID: line["custom_id"]} if "custom_id" in line else {}
    for name, value in body.items():
        convert = _OPENAI_FIELDS.get(name)
        if convert is None:
            raise InvalidRequest(f"body.{name} is not supported", field=f"body.{name}", reason="UNKNOWN_FIELD")
        if value is not None:
            request |= convert(value)
    return request


def _named(name: str) -> Callable[[Any], dict[str, object]]:
    return lambda value: {name: value}


def _off(name: str) -> Callable[[Any], dict[str, object]]:
    def refuse(value: object) -> dict[str, object]:
        if value:
            raise InvalidRequest(f"body.{name} is not supported", field=f"body.{name}")
        return {}

    return refuse


def _messages(value: Any) -> dict[str, object]:
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise InvalidRequest("body.messages must be a list of objects", field="body.messages")
    return {"messages": [{**message, "content": _content(message.get("content"))} for message in value]}


def _content(content: Any) -> object:
    if not isinstance(content, list):
        return content
    parts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
    if not all(isinstance(part, str) for part in parts):
        raise InvalidRequest("body.messages may hold text alone", field="body.messages")
    return "".join(cast("list[str]", parts))


def _response_format(value: Any) -> dict[str, object]:
    match value:
        case {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"json_object": True}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return {"json_schema": msgspec.json.encode(schema).decode()}
        case _:
            raise InvalidRequest("body.response_format is not supported", field="body.response_format")


_OPENAI_FIELDS: dict[str, Callable[[Any], dict[str, object]]] = {
    **{
        name: _named(name)
        for name in (
            "model", "prompt", "max_tokens", "temperature", "top_p", "seed", "logprobs", "top_logprobs",
            "presence_penalty", "frequency_penalty", "n",
        )
    },
    "messages": _messages,
    "max_completion_tokens": _named("max_tokens"),
    "stop": lambda value: {"stop": [value] if isinstance(value, str) else value},
    "logit_bias": lambda value: {"logit_bias": value},
    "response_format": _response_format,
    "metadata": _named("labels"),
    "stream": _off("stream"),
}  # fmt: skip
