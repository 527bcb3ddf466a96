"""What producers publish and what they get back, as bytes: ingest bodies in, IngestVerdicts out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, cast

from google.protobuf import json_format
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from laneway.core.errors import InvalidRequest
from laneway.core.ids import is_token
from laneway.core.job import SCHEMA, JobRecord
from laneway.core.lanes import Lane
from laneway.runtime.wire import checks, enums, jobs
from laneway.v1 import admission_pb2, bus_pb2

CONTENT_TYPE = "Content-Type"
JSON = "application/json"
SEARCHED_BYTES = 64 * 1024  # of a bad body at most: a larger one would take the loop for a second
_FIELD_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


def parse_body(data: bytes, content_type: str = "") -> admission_pb2.SubmitRequest:
    """A SubmitRequest as protobuf, or in protobuf's JSON mapping when it says so or begins with a brace."""
    if content_type.partition(";")[0].strip().lower() == JSON or data[:1] == b"{":
        try:
            return json_format.Parse(data, admission_pb2.SubmitRequest())
        except (json_format.ParseError, UnicodeDecodeError, RecursionError):
            # The parser's own message may repeat a caller's text.
            raise _objection(data) from None
    try:
        return admission_pb2.SubmitRequest.FromString(data)
    except (DecodeError, UnicodeDecodeError):
        raise _malformed("the body is not a SubmitRequest: not a protobuf message of its type") from None


def _objection(data: bytes) -> InvalidRequest:
    """What is wrong with a JSON body that does not parse, by the field if one is to blame."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return _malformed("the body is not valid JSON")
    searched = isinstance(tree, dict) and len(data) <= SEARCHED_BYTES
    found = _bad_field(tree, admission_pb2.SubmitRequest, "") if searched else None
    return found or _malformed("the body is not a SubmitRequest in protobuf's JSON mapping")


def _bad_field(tree: Mapping[str, object], message: type[Message], path: str) -> InvalidRequest | None:
    """The first field of a message that the mapping cannot take: the innermost one. Called for bad bodies alone, each
    level parses what is below it again."""
    fields = {name: field for field in message.DESCRIPTOR.fields for name in (field.name, field.json_name)}
    for key, value in tree.items():
        field = fields.get(key)
        if field is None:
            known = _FIELD_NAME.fullmatch(key) is not None  # anything else may be text that should not be repeated
            where = f"{path}{key}" if known else path.rstrip(".") or "body"
            what = f"there is no field {where}" if known else f"{where} has a field whose name is none"
            return InvalidRequest(what, field=where, reason="UNKNOWN_FIELD")
        try:
            json_format.ParseDict({key: value}, message())
        except (json_format.ParseError, RecursionError):
            inner = cast(Any, field.message_type)  # the stubs have two names for its type
            nested = None
            if inner and inner.file.package == message.DESCRIPTOR.file.package and not inner.GetOptions().map_entry:
                nested = GetMessageClass(inner)
            return _bad_value(value, nested, f"{path}{field.name}", repeated=field.is_repeated)
    return None


def _bad_value(value: object, message: type[Message] | None, path: str, *, repeated: bool) -> InvalidRequest:
    """What is wrong with a field; `message`: of our own that it holds, if it does."""
    items = {path: value} if message is not None and not repeated else {}
    if message is not None and repeated and isinstance(value, list):
        items = {f"{path}[{i}]": item for i, item in enumerate(value)}
    for where, item in items.items():
        if message and isinstance(item, dict) and (found := _bad_field(item, message, f"{where}.")) is not None:
            return found
    return InvalidRequest(f"{path} has a value that this field cannot have", field=path, reason="MALFORMED_REQUEST")


def _malformed(message: str) -> InvalidRequest:
    return InvalidRequest(message, field="body", reason="MALFORMED_REQUEST")


def lane_of(word: str) -> Lane:
    """The lane that a subject names."""
    try:
        return Lane(word)
    except ValueError:
        known = ", ".join(Lane)
        raise InvalidRequest(f"the subject names no lane; known: {known}", field="subject.lane") from None


def put_lane(request: admission_pb2.SubmitRequest, lane: Lane) -> None:
    """The subject's lane is the one that counts; a body may repeat it and may not differ."""
    number = enums.LANE_TO_WIRE[lane]
    if request.spec.contract.lane not in (0, number):
        raise InvalidRequest(
            f"the body asks for another lane than the subject's, {lane}",
            field="spec.contract.lane",
            reason="LANE_MISMATCH",
        )
    request.spec.contract.lane = number


def key_of(request: admission_pb2.SubmitRequest, header: str) -> str:
    """The producer's idempotency key: the header's, or the body's."""
    key = checks.idempotency_key(header, "Laneway-Key")
    body_key = checks.idempotency_key(request.idempotency_key)
    if key and body_key and key != body_key:
        raise InvalidRequest("the body's key differs from the header Laneway-Key", field="idempotency_key")
    return key or body_key


def safe_model(request: admission_pb2.SubmitRequest | None) -> str:
    """The model to show in the record of a refused request, unless it is some text that should not be there."""
    name = request.spec.model if request is not None else ""
    return name if all(map(is_token, name.split("/", 1))) else ""


def encode_verdict(record: JobRecord, key: str) -> bytes:
    return bus_pb2.IngestVerdict(
        schema=SCHEMA,
        job_id=record.job_id,
        key=key,
        verdict=jobs.verdict_to_proto(record.verdict),
        error=jobs.job_error_to_proto(record.error) if record.error else None,
    ).SerializeToString()
