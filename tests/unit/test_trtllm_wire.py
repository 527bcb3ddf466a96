"""Requests to `trtllm-serve --grpc` and its answers, message by message."""

from __future__ import annotations

from typing import Any

import pytest
from smg_grpc_proto import trtllm_service_pb2 as pb

from laneway.core.catalogue import Capabilities
from laneway.core.lanes import FinishReason
from laneway.runtime.catalogue import capabilities_of
from laneway.workers.engines.checks import check_abilities
from laneway.workers.engines.protocol import EngineCapacity, EngineRequest, EngineStartError
from laneway.workers.engines.remote import RemoteRefusal
from laneway.workers.engines.trtllm_answers import has_penalties
from laneway.workers.engines.trtllm_wire import Answer, capacity_of, generate_request

CAN = capabilities_of("trtllm_grpc")
POOL = EngineCapacity(slots=16, kv_tokens=16_384, context_length=2048, vocabulary_size=260)
EOS = frozenset({257, 259})
PLAIN: dict[str, Any] = {"id": 7, "prompt_ids": (1, 2, 3), "max_tokens": 9, "temperature": 0.5}

# What each field of a request becomes; None: its use is refused.
SENT: dict[str, tuple[Any, dict[str, Any] | None]] = {
    "id": (8, {"request_id": "x-8"}),
    "prompt_ids": ((4, 5), {"tokenized": {"input_token_ids": [4, 5]}}),
    "max_tokens": (3, {"max_tokens": 3}),
    "temperature": (0.25, {"sampling_config": {"temperature": 0.25}}),
    "top_p": (0.5, {"sampling_config": {"top_p": 0.5}}),
    "top_k": (40, {"sampling_config": {"top_k": 40}}),
    "min_p": (0.125, {"sampling_config": {"min_p": 0.125}}),
    "seed": (5, None),
    "stop_token_ids": ((66, 65), {"stop_token_ids": [65, 66, 257, 259]}),
    "logprobs": (True, {"output_config": {"logprobs": 1}}),
    "top_logprobs": (3, {"output_config": {"logprobs": 3}}),
    "repetition_penalty": (1.25, {"sampling_config": {"repetition_penalty": 1.25}}),
    "presence_penalty": (-0.5, {"sampling_config": {"presence_penalty": -0.5}}),
    "frequency_penalty": (0.5, {"sampling_config": {"frequency_penalty": 0.5}}),
    "logit_bias": ({65: 1.0}, None),
    "min_tokens": (2, {"sampling_config": {"min_tokens": 2}}),
    "ignore_eos": (True, {"ignore_eos": True, "stop_token_ids": []}),
    "json_schema": ("{}", None),
    "adapter": ("a", None),
    "cache_salt": ("s", None),
}
NOT_IN_THE_PROTO = {"priority", "deadline_in_s"}  # only breaks ties inside an engine; the worker enforces it


def sent(**changes: Any) -> pb.GenerateRequest:
    request = EngineRequest(**PLAIN | changes)
    check_abilities(request, CAN)
    return generate_request(request, f"x-{request.id}", EOS)


def answer(**changes: Any) -> Answer:
    return Answer(EngineRequest(**PLAIN | changes), EOS, 260)


def chunk(*ids: int, **fields: Any) -> pb.GenerateResponse:
    return pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=ids, **fields))


def logprob(token_id: int, value: float, **top: float) -> pb.TokenLogprob:
    tops = [pb.TopLogprob(token_id=int(each[1:]), logprob=p) for each, p in top.items()]
    return pb.TokenLogprob(token_id=token_id, logprob=value, top_logprobs=tops)


def test_every_field_of_a_request_is_sent_or_refused():
    assert set(EngineRequest.__struct_fields__) == set(SENT) | NOT_IN_THE_PROTO


@pytest.mark.parametrize("name", SENT)
def test_a_field_changes_its_own_place_in_the_message_and_nothing_else(name: str):
    value, place = SENT[name]
    if place is None:
        with pytest.raises(ValueError, match=f"does not offer {name}"):
            sent(**{name: value})
        return
    base = {"logprobs": True} if name == "top_logprobs" else {}
    message, expected = sent(**base, **{name: value}), sent(**base)
    for part, filled in place.items():
        target = getattr(expected, part)
        if isinstance(filled, dict):
            for key, each in filled.items():
                if isinstance(each, list):
                    getattr(target, key)[:] = each
                else:
                    setattr(target, key, each)
        elif isinstance(filled, list):
            target[:] = filled
        else:
            setattr(expected, part, filled)
    assert message == expected
    assert message != sent()


def test_a_plain_request_streams_one_answer_and_asks_for_no_more_than_it_needs():
    message = sent()
    assert message.streaming
    assert (message.sampling_config.beam_width, message.sampling_config.num_return_sequences) == (1, 1)
    assert not message.output_config.HasField("logprobs")
    assert not message.stop
    for name in ("top_p", "top_k", "min_p", "seed", "min_tokens", "repetition_penalty"):
        assert not message.sampling_config.HasField(name)


def test_greedy_is_said_in_a_way_that_every_version_knows():
    config = sent(temperature=0.0, top_p=0.5, top_k=40, min_p=0.5, seed=5).sampling_config
    assert (config.temperature, config.top_k) == (0.0, 1)
    assert not config.HasField("top_p")
    assert not config.HasField("min_p")
    assert not config.HasField("seed")


@pytest.mark.parametrize(
    ("reason", "finish", "words"),
    [
        ("stop", FinishReason.STOP, ""),
        ("length", FinishReason.LENGTH, ""),
        ("cancelled", FinishReason.ERROR, "by somebody else"),
        ("timeout", FinishReason.ERROR, "time limit"),
        ("error", FinishReason.ERROR, "not known here"),
        ("", FinishReason.ERROR, "not known here"),
    ],
)
def test_finish_reasons(reason: str, finish: FinishReason, words: str):
    step = answer(max_tokens=2).read(
        pb.GenerateResponse(complete=pb.GenerateComplete(output_token_ids=[65, 66], finish_reason=reason))
    )
    assert step is not None
    assert (step.token_ids, step.finish) == ([65, 66], finish)
    assert words in step.message


def test_a_chunk_without_tokens_says_nothing():
    assert answer().read(chunk()) is None
    assert answer().read(pb.GenerateResponse()) is None


def test_what_the_cache_had_is_told_with_the_first_tokens_alone():
    reader = answer()
    steps = [reader.read(chunk(65, cached_tokens=64)) for _ in range(2)]
    assert [step.cached_tokens for step in steps if step is not None] == [64, 0]


class TestLogprobs:
    def test_each_id_has_one_and_an_end_token_none(self):
        step = answer(logprobs=True).read(
            chunk(65, 66, 257, logprobs=[logprob(65, -0.5), logprob(66, -1.0), logprob(257, -2.0)])
        )
        assert step is not None
        assert (step.token_ids, step.logprobs, step.finish) == ([65, 66], [-0.5, -1.0], FinishReason.STOP)
        assert step.top is None

    def test_the_likeliest_are_as_many_as_asked_for_with_the_chosen_one_at_its_rank(self):
        told = [logprob(65, -2.0, t65=-2.0, t70=-0.5, t71=-1.0)]
        step = answer(logprobs=True, top_logprobs=2).read(chunk(65, logprobs=told))
        assert step is not None
        assert (step.logprobs, step.top) == ([-2.0], [[(70, -0.5), (71, -1.0)]])

    @pytest.mark.parametrize(
        "told",
        [[], [logprob(65, -1.0)], [logprob(66, -1.0), logprob(65, -1.0)], [logprob(65, -1.0)] * 3],
        ids=["none", "too few", "of others", "too many"],
    )
    def test_any_other_count_is_an_error(self, told: list[pb.TokenLogprob]):
        with pytest.raises(RemoteRefusal, match=f"{len(told)} log probabilities for 2 tokens"):
            answer(logprobs=True).read(chunk(65, 66, logprobs=told))

    def test_a_chosen_token_that_the_server_has_no_figure_of_is_an_error_and_not_certain(self):
        with pytest.raises(RemoteRefusal, match="chosen token"):
            answer(logprobs=True).read(chunk(65, logprobs=[logprob(65, 0.0, t70=-0.5)]))
        certain = answer(logprobs=True).read(chunk(65, logprobs=[logprob(65, 0.0, t65=0.0)]))
        assert certain is not None
        assert certain.logprobs == [0.0]


class TestCapacity:
    def test_what_the_server_does_not_tell_is_the_pools(self):
        assert capacity_of(POOL, pb.GetModelInfoResponse()) == POOL

    def test_fewer_sequences_than_the_pool_has_slots_are_taken_over(self):
        assert capacity_of(POOL, pb.GetModelInfoResponse(max_batch_size=4)).slots == 4
        assert capacity_of(POOL, pb.GetModelInfoResponse(max_batch_size=64)).slots == 16

    def test_a_length_that_only_stands_in_for_one_not_given_is_not_believed(self):
        assert capacity_of(POOL, pb.GetModelInfoResponse(max_input_len=1024, max_seq_len=1024)) == POOL

    def test_a_shorter_context_or_a_larger_vocabulary_is_refused(self):
        exact = pb.GetModelInfoResponse(max_input_len=1024, max_seq_len=2048, vocab_size=260)
        assert capacity_of(POOL, exact) == POOL
        with pytest.raises(EngineStartError, match="2047"):
            capacity_of(POOL, pb.GetModelInfoResponse(max_input_len=1024, max_seq_len=2047))
        with pytest.raises(EngineStartError, match="261"):
            capacity_of(POOL, pb.GetModelInfoResponse(vocab_size=261))


@pytest.mark.parametrize(
    ("version", "has"),
    [
        ("1.3.0rc24", True),
        ("1.3.0rc23", False),
        ("1.3.0rc9", False),
        ("1.3.0", True),
        ("1.4.0rc4", True),
        ("2.0.0+local", True),
        ("1.2.1", False),
        ("unknown", False),
        ("", False),
    ],
)
def test_versions_with_penalties(version: str, has: bool):
    assert has_penalties(version) is has


def test_what_is_offered_is_what_was_read_to_work():
    assert (
        Capabilities(
            logprobs=True,
            top_logprobs=5,
            min_p=True,
            penalties=True,
            min_tokens=True,
            prefix_cache=True,
        )
        == CAN
    )
