"""How long an answer was, as the end of its job is announced with: what doors learn lengths from."""

from __future__ import annotations

from msgspec import Struct

from laneway.core.job import JobRecord, answer_tokens
from laneway.core.lanes import JobState
from laneway.v1 import bus_pb2


class Answered(Struct, frozen=True):
    tenant: str
    model: str  # without a tier
    route: str
    tokens: int


def answered(record: JobRecord) -> Answered | None:
    """Of a job that ended by itself or at its limit; what was cut short says nothing."""
    tokens = answer_tokens(record) if record.state is JobState.SUCCEEDED else 0
    return Answered(record.tenant, record.model.partition("/")[0], record.route, tokens) if tokens else None


def answer_to_proto(answer: Answered | None) -> bus_pb2.AnswerLength | None:
    if answer is None:
        return None
    return bus_pb2.AnswerLength(tenant=answer.tenant, model=answer.model, route=answer.route, tokens=answer.tokens)


def answer_from_proto(message: bus_pb2.JobEvent) -> Answered | None:
    answer = message.answer
    if not (message.HasField("answer") and answer.tokens):
        return None
    return Answered(answer.tenant, answer.model, answer.route, answer.tokens)
