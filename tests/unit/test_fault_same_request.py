"""Two requests that differ in anything that shapes the answer, or in their tenant, are never taken for one another."""

from typing import Any

import pytest

from laneway.admission.service import digest_of
from laneway.core.ids import keyed_job_id
from laneway.v1 import common_pb2, task_pb2

# A value for each field of Sampling: the first test fails for a field that is added and not listed.
SAMPLING: dict[str, Any] = {
    "max_tokens": 7,
    "temperature": 0.0,  # said, which is not the same as left out
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.5,
    "seed": 0,
    "stop": ["END"],
    "stop_token_ids": [5],
    "logprobs": True,
    "top_logprobs": 2,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {5: 1.0},
    "n": 2,
    "min_tokens": 2,
    "ignore_eos": True,
}


def spec(text: str = "Hi", model: str = "chat", **sampling: Any) -> task_pb2.JobSpec:
    return task_pb2.JobSpec(
        model=model, generate=task_pb2.GenerateTask(text=text, sampling=task_pb2.Sampling(**sampling))
    )


def test_every_field_of_sampling_is_looked_at_here():
    assert set(SAMPLING) == set(task_pb2.Sampling.DESCRIPTOR.fields_by_name)


def test_requests_that_differ_in_one_field_are_different_requests():
    plain = spec()
    others = [spec(**{name: value}) for name, value in SAMPLING.items()]
    others += [spec(text="Ho"), spec(model="chat/small"), spec(seed=1), spec(stop=["EN", "D"])]
    for name in ("adapter", "cache_salt"):
        changed = spec()
        setattr(changed.generate, name, "x")
        others.append(changed)
    formatted = spec()
    formatted.generate.response_format.json_object = True
    batch = spec()
    batch.contract.lane = common_pb2.LANE_BATCH
    digests = [digest_of(each) for each in (plain, *others, formatted, batch)]
    assert len(set(digests)) == len(digests)


def test_the_same_request_is_the_same_whatever_the_order_of_its_maps():
    biases = dict.fromkeys(range(100), 1.0)
    backwards = dict(reversed(biases.items()))
    assert digest_of(spec(logit_bias=biases)) == digest_of(spec(logit_bias=backwards))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("local", "acme", "k"), ("local", "other", "k")),
        (("local", "acme", "k"), ("local", "acme", "K")),
        (("local", "acme", "k1"), ("local", "acmek", "1")),
        (("local", "acme", "k"), ("eu", "acme", "k")),
    ],
)
def test_a_key_is_of_one_tenant_and_region(one: tuple[str, str, str], other: tuple[str, str, str]):
    assert keyed_job_id(*one) == keyed_job_id(*one)
    assert keyed_job_id(*one) != keyed_job_id(*other)
