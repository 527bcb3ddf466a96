"""What goes to an OpenAI-compatible server and what is read of its events: no connection, no server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneway.core.lanes import FinishReason
from laneway.core.prompt import ChatTurn
from laneway.runtime.tokenizer import load_tokenizer
from laneway.workers.engines.openai_logprobs import Vocabulary
from laneway.workers.engines.openai_models import check_model, model_of
from laneway.workers.engines.openai_wire import Answer, chat_body, completion_body, text_of
from laneway.workers.engines.openai_words import ServerError, codes_of, error_of
from laneway.workers.engines.protocol import EngineCapacity, EngineRequest, EngineStartError, SequenceStep
from laneway.workers.engines.remote import RemoteRefusal
from laneway.workers.engines.text_ids import Spelling
from laneway.workers.text import TextAssembler
from tests.support.scripted_openai import chat_event, text_event, usage_event

BYTES = load_tokenizer("bytes")
SPELLING, VOCABULARY = Spelling(BYTES), Vocabulary(BYTES)
POOL = EngineCapacity(slots=4, kv_tokens=8192, context_length=2048, vocabulary_size=260)
EOS = min(BYTES.eos_ids)


def request(max_tokens: int = 100, **changes: Any) -> EngineRequest:
    return EngineRequest(1, tuple(b"a prompt"), max_tokens, **changes)


def answer_to(asked: EngineRequest, *, ids: bool = True) -> Answer:
    return Answer(asked, SPELLING, VOCABULARY, prompt_was_ids=ids)


def read(answer: Answer, events: Sequence[Any]) -> list[SequenceStep]:
    """All steps up to the end."""
    steps = []
    for event in events:
        step = answer.read(json.dumps(event))
        if step is not None:
            steps.append(step)
            if step.finish is not None:
                return steps
    return [*steps, answer.last()]


def ids_of(steps: Sequence[SequenceStep]) -> list[int]:
    return [i for step in steps for i in step.token_ids]


# --- what is asked -------------------------------------------------------------------------------------


def test_a_request_says_all_that_it_asks_for_and_nothing_else():
    assert completion_body(request(7, temperature=0.0), "m", [1, 2]) == {
        "model": "m",
        "prompt": [1, 2],
        "max_tokens": 7,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    drawn = completion_body(request(temperature=0.5, top_p=0.25, logprobs=True), "m", "text")
    assert (drawn["temperature"], drawn["top_p"], drawn["logprobs"], drawn["prompt"]) == (0.5, 0.25, 1, "text")
    assert completion_body(request(), "m", "")["top_p"] == 1.0, "some servers have another default"


def test_a_chat_is_asked_with_its_messages():
    body = chat_body(request(logprobs=True), "m", [ChatTurn("system", "s"), ChatTurn("user", "u")])
    assert body["messages"] == [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert body["logprobs"] is True
    assert "prompt" not in body


def test_a_prompt_that_text_cannot_hold_is_refused():
    assert text_of(list("héllo".encode()), BYTES) == "héllo"
    assert text_of([256, *b"x"], BYTES) == "x", "a begin mark is the server's business"
    for ids in ([*b"x", EOS, *b"y"], [EOS], list("é".encode())[:1], BYTES.encode_chat([ChatTurn("user", "x")])):
        with pytest.raises(RemoteRefusal):
            text_of(ids, BYTES)


# --- what comes back -----------------------------------------------------------------------------------


@pytest.mark.parametrize("event", [text_event, chat_event])
@given(pieces=st.lists(st.text(max_size=8), max_size=8))
def test_the_workers_text_is_the_servers_text_however_it_was_cut(event: Any, pieces: list[str]):
    answer = answer_to(request(10_000))
    steps = read(answer, [*map(event, pieces), event("", "stop"), usage_event(8, 3)])
    text = TextAssembler(BYTES.token_bytes)
    written = "".join(text.feed(step.token_ids).text for step in steps) + text.flush()
    assert written == "".join(pieces)
    assert [step.finish for step in steps] == [None] * (len(steps) - 1) + [FinishReason.STOP]
    assert answer.given_tokens == len(ids_of(steps))


def test_ends_are_told_as_the_server_tells_them_and_strange_ones_are_errors():
    for reason, finish in (("stop", FinishReason.STOP), ("length", FinishReason.LENGTH)):
        assert read(answer_to(request()), [text_event("x"), text_event("", reason)])[-1].finish is finish
    for reason, words in (("content_filter", "content filter"), ("tool_calls", "not known here"), ("error", "not")):
        with pytest.raises(RemoteRefusal, match=words):
            read(answer_to(request()), [text_event("x", reason)])


def test_what_was_cut_without_a_word_is_an_error_with_both_numbers():
    with pytest.raises(RemoteRefusal, match="gave 5 of 100 tokens"):
        read(answer_to(request(100)), [text_event("x", "length"), usage_event(8, 5)])
    with pytest.raises(RemoteRefusal, match="read 3 of the 8 tokens"):
        read(answer_to(request()), [text_event("x", "stop"), usage_event(3, 1)])
    read(answer_to(request(), ids=False), [text_event("x", "stop"), usage_event(3, 1)])  # it tokenises anew


def test_no_more_than_max_tokens_and_nothing_from_a_stop_token_on_is_given():
    long = [text_event("abc def ghi jkl"), text_event("", "length")]
    for asked, text, finish in (
        (request(5), b"abc d", FinishReason.LENGTH),
        (request(stop_token_ids=(ord("e"),)), b"abc d", FinishReason.STOP),
    ):
        steps = read(answer_to(asked), long)
        assert (bytes(ids_of(steps)), steps[-1].finish) == (text, finish)


def test_other_choices_and_what_follows_the_end_are_passed_over():
    other = {"choices": [{"index": 1, "text": "other"}]}
    role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": None}}]}
    events = [role, other, {"choices": []}, {"object": "new"}, chat_event("x"), chat_event("", "stop"), chat_event("y")]
    assert bytes(ids_of(read(answer_to(request()), events))) == b"x"


@pytest.mark.parametrize("data", ["", "nonsense", "[]", "3", "null", '"x"', "[" * 100_000])
def test_an_event_that_is_no_object_is_an_error_in_our_words(data: str):
    with pytest.raises(RemoteRefusal, match="could not be read"):
        answer_to(request()).read(data)


@pytest.mark.parametrize(
    "choice", [None, 3, "x", {"text": 3}, {"delta": 3}, {"delta": {"content": {}}}, {"finish_reason": 3, "text": None}]
)
def test_odd_shapes_have_no_text(choice: Any):
    assert answer_to(request()).read(json.dumps({"choices": [choice], "usage": {"prompt_tokens": "x"}})) is None


def test_half_a_character_pair_of_one_event_waits_for_the_next():
    answer = answer_to(request())
    steps = [answer.read('{"choices":[{"text":"\\ud83d"}]}'), answer.read('{"choices":[{"text":"\\ude00"}]}')]
    assert bytes(ids_of([*(s for s in steps if s), *read(answer, [text_event("", "stop")])])).decode() == "😀"


def test_what_the_vocabulary_cannot_spell_names_the_character():
    tokenizer = load_tokenizer("smollm2")
    answer = Answer(request(), Spelling(tokenizer), Vocabulary(tokenizer), prompt_was_ids=False)
    with pytest.raises(RemoteRefusal, match=r"U\+0004"):
        read(answer, [text_event("\4", "stop")])


# --- log probabilities ---------------------------------------------------------------------------------


def entry(token: str, logprob: object = -0.5, **more: Any) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())} | more


def told(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"logprobs": {"content": list(entries)}}


def side_by_side(tokens: list[str], logprobs: list[Any]) -> dict[str, Any]:
    return {"logprobs": {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": []}}


@pytest.mark.parametrize(
    "said",
    [
        told(entry("a", -0.25, id=97), entry("b", -1.0, id=98)),
        told(entry("a", -0.25), entry("b", -1.0)),
        told(entry("a", -0.25, bytes=None), entry("b", -1.0)),
        side_by_side(["a", "b"], [-0.25, -1.0]),
    ],
)
def test_log_probabilities_are_told_of_the_servers_own_tokens(said: dict[str, Any]):
    steps = read(answer_to(request(logprobs=True)), [text_event("ab", None, **said), text_event("", "stop")])
    assert (steps[0].token_ids, steps[0].logprobs) == ([97, 98], [-0.25, -1.0])
    assert steps[1].logprobs is None or not steps[1].logprobs


def test_an_end_token_without_text_has_no_log_probability_and_a_rounding_error_is_zero():
    events = [text_event("a", **told(entry("a", 1e-7))), text_event("", "stop", **told(entry("</s>", -0.1)))]
    (step, _) = read(answer_to(request(logprobs=True)), events)
    assert (step.token_ids, step.logprobs) == ([97], [0.0])


@pytest.mark.parametrize(
    "event",
    [
        text_event("ab"),  # none at all
        text_event("ab", **told(entry("a"))),  # of one token too few
        text_event("ab", **told(entry("ab"))),  # of no token of ours
        text_event("a", **told(entry("a", id=98))),  # of another token
        text_event("a", **told(entry("a", None))),
        text_event("a", **told(entry("a", "x"))),
        text_event("a", **told(entry("a", 2.0))),
        text_event("ab", **side_by_side(["a", "b"], [-1.0])),
    ],
)
def test_log_probabilities_that_are_not_of_each_token_are_an_error(event: dict[str, Any]):
    with pytest.raises(RemoteRefusal):
        read(answer_to(request(logprobs=True)), [event, text_event("", "stop")])


def test_a_last_character_that_was_cut_off_is_no_contradiction():
    part: dict[str, Any] = {"logprobs": {"content": [{"token": "�", "bytes": [0xC3], "logprob": -1.0, "id": 0xC3}]}}
    for text in ("", "�"):
        steps = read(answer_to(request(1, logprobs=True)), [text_event(text, **part), text_event("", "length")])
        assert ids_of(steps) == [0xC3]


# --- errors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [301, 400, 401, 402, 403, 404, 405, 408, 413, 418, 422, 429, 500, 502, 503, 504])
def test_errors_are_told_in_our_words_only(status: int):
    error = error_of(status, {"error": {"message": "/their/path.cpp sk-secret Traceback", "code": "x"}})
    assert str(status) in str(error)
    assert not any(word in str(error) for word in ("sk-secret", "/", ".cpp", "Traceback"))
    assert error.may_pass == (status >= 500 or status in (408, 429))


@pytest.mark.parametrize(
    ("body", "limit"),
    [
        ({"error": {"code": 400, "type": "exceed_context_size_error", "message": "x", "n_ctx": 2048}}, " of 2048 "),
        ({"error": {"message": "This model's maximum context length is 4096 tokens. However"}}, " of 4096 "),
        ({"object": "error", "message": "maximum context length is 512 tokens", "code": 400}, " of 512 "),
        ({"error": {"code": "context_length_exceeded"}}, "context: set"),
    ],
)
def test_what_does_not_fit_the_server_is_told_with_its_limit(body: dict[str, Any], limit: str):
    assert limit in str(error_of(400, body))


def test_an_error_within_a_stream_has_the_status_that_it_names():
    for error, status in (({"code": 429}, 429), ({"code": "x"}, 500), ({"message": "x"}, 500), ("x", 500)):
        with pytest.raises(ServerError) as raised:
            answer_to(request()).read(json.dumps({"error": error}))
        assert raised.value.status == status


def test_of_an_error_only_short_codes_may_be_logged():
    body = {"error": {"type": "invalid_request_error", "code": "bad key sk-secret", "param": "x", "message": "sk"}}
    assert codes_of(body) == {"type": "invalid_request_error"}
    odd: Any
    for odd in (None, [], "x", {"error": 3}, {"error": {}}):
        assert codes_of(odd) == {}


# --- models --------------------------------------------------------------------------------------------


def listed(*models: dict[str, Any]) -> dict[str, Any]:
    return {"object": "list", "data": list(models)}


def test_the_only_model_is_taken_and_one_of_several_has_to_be_named():
    assert model_of(listed({"id": "a"}), "")["id"] == "a"
    assert model_of(listed({"id": "a"}, {"id": "b"}), "b")["id"] == "b"
    with pytest.raises(EngineStartError, match="several models: set served_model to one of a, b"):
        model_of(listed({"id": "a"}, {"id": "b"}), "")
    with pytest.raises(EngineStartError, match="no model 'c': set served_model to one of a"):
        model_of(listed({"id": "a"}), "c")
    for nothing in ({}, listed(), {"data": 3}, {"data": [3, {"id": ""}]}):
        with pytest.raises(EngineStartError, match="lists no model"):
            model_of(nothing, "a")


def test_a_pool_that_wants_more_than_the_model_has_is_refused_with_both_numbers():
    for model in ({"max_model_len": 1024}, {"meta": {"n_ctx": 1024}}):
        with pytest.raises(EngineStartError, match=r"1024 tokens .* 2048: set context_length = 1024"):
            check_model(POOL, model)
    with pytest.raises(EngineStartError, match=r"has 300 tokens, .* is 260"):
        check_model(POOL, {"meta": {"n_vocab": 300}})
    harmless: list[dict[str, Any]] = [
        {},
        {"max_model_len": 2048, "meta": {"n_vocab": 256}},
        {"max_model_len": "x", "meta": 3},
    ]
    for each in harmless:
        check_model(POOL, each)
