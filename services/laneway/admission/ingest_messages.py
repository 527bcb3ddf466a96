"""What producers publish and what they get back, as bytes: ingest bodies in, IngestVerdicts out."""

from __future__ import annotations

from google.protobuf import json_format
from google.protobuf.message import DecodeError

from laneway.core.errors import InvalidRequest
from laneway.core.ids import is_token
from laneway.core.job import SCHEMA, JobRecord
from laneway.core.lanes import Lane
from laneway.runtime.wire import checks, enums, jobs
from laneway.v1 import admission_pb2, bus_pb2

CONTENT_TYPE = "Content-Type"
JSON = "application/json"


def parse_body(data: bytes, content_type: str = "") -> admission_pb2.SubmitRequest:
    """A SubmitRequest as protobuf, or in protobuf's JSON mapping when it says so or begins with a brace."""
    if content_type.partition(";")[0].strip().lower() == JSON or data[:1] == b"{":
        try:
            return json_format.Parse(data, admission_pb2.SubmitRequest())
        except (json_format.ParseError, UnicodeDecodeError, RecursionError):
            # The parser's own message may repeat a caller's text.
            raise _malformed("the body is not a SubmitRequest in protobuf's JSON mapping") from None
    try:
        return admission_pb2.SubmitRequest.FromString(data)
    except (DecodeError, UnicodeDecodeError):
        raise _malformed("the body is not a SubmitRequest: not a protobuf message of its type") from None


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
