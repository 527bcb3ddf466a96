"""Bodies of producers' messages: what cannot be taken names its field, and repeats nothing of the text."""

import json

import pytest

from laneway.admission.ingest_messages import parse_body
from laneway.core.errors import InvalidRequest
from laneway.v1 import admission_pb2

BAD = [
    ('{"spec": {"model": "chat", "promt": "x"}}', "spec.promt", "UNKNOWN_FIELD"),
    ('{"spec": {"generate": {"sampling": {"nope": 1}}}}', "spec.generate.sampling.nope", "UNKNOWN_FIELD"),
    ('{"spec": {"generate": {"sampling": {"maxTokens": "a secret"}}}}', "spec.generate.sampling.max_tokens", ""),
    ('{"spec": {"generate": {"sampling": {"max_tokens": 1e40}}}}', "spec.generate.sampling.max_tokens", ""),
    ('{"spec": {"generate": {"chat": {"messages": [{}, {"contnt": "a secret"}]}}}}',
     "spec.generate.chat.messages[1].contnt", "UNKNOWN_FIELD"),
    ('{"spec": {"generate": {"chat": {"messages": {"role": 1}}}}}', "spec.generate.chat.messages", ""),
    ('{"spec": {"contract": {"deadline": "a secret"}}}', "spec.contract.deadline", ""),
    ('{"spec": {"contract": {"lane": "A_SECRET"}}}', "spec.contract.lane", ""),
    ('{"spec": {"contract": {"labels": {"a": 5}}}}', "spec.contract.labels", ""),
    ('{"spec": {"a secret": 1}}', "spec", "UNKNOWN_FIELD"),
    ('{"a secret": 1}', "body", "UNKNOWN_FIELD"),
    ('{"idempotencyKey": 5}', "idempotency_key", ""),
    ('{"spec": {"text": "a", "text": "b"}}', "spec.text", "UNKNOWN_FIELD"),
    ('{"spec": ', "body", ""),
    ('{"spec": ' + "[" * 5_000, "body", ""),
    ('{"idempotencyKey": "a", "idempotencyKey": "b"}', "body", ""),
]  # fmt: skip


@pytest.mark.parametrize(("body", "field", "reason"), BAD, ids=[field for _, field, _ in BAD])
def test_a_json_body_that_cannot_be_taken_names_its_field(body: str, field: str, reason: str):
    with pytest.raises(InvalidRequest) as caught:
        parse_body(body.encode())
    assert (caught.value.field, caught.value.reason) == (field, reason or "MALFORMED_REQUEST")
    assert "secret" not in caught.value.message.lower()


def test_a_json_body_says_the_same_by_either_of_a_fields_names():
    one = {"spec": {"generate": {"sampling": {"maxTokens": 5}}}, "idempotencyKey": "k"}
    other = {"spec": {"generate": {"sampling": {"max_tokens": 5}}}, "idempotency_key": "k"}
    found = [parse_body(json.dumps(each).encode()) for each in (one, other)]
    assert found[0] == found[1]
    assert parse_body(found[0].SerializeToString()) == found[0]
    assert isinstance(found[0], admission_pb2.SubmitRequest)
