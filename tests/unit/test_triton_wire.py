"""What goes to Triton's TensorRT-LLM models and comes back, in each dialect, by the names of docs/engines.md."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
from msgspec.structs import replace

from laneway.core.lanes import FinishReason
from laneway.runtime.tokenizer import ByteTokenizer, load_tokenizer
from laneway.workers.engines.protocol import EngineRequest, EngineStartError, SequenceStep
from laneway.workers.engines.remote import RemoteRefusal
from laneway.workers.engines.text_ids import Spelling
from laneway.workers.engines.triton_wire import (
    Answer,
    Served,
    answer_of,
    priority_level,
    request_tensors,
    served_of,
    stop_tensors,
)

BYTES = ByteTokenizer()
LLMAPI = Served("llmapi", batched=False, stoppable=True, accumulates=True)
BLS = Served("bls", batched=True, stoppable=False, accumulates=True)
IDS = Served("ids", batched=True, stoppable=True, accumulates=False)
REQUEST = EngineRequest(7, tuple(b"Why?"), 5, temperature=0.0)


def plain(tensors: dict[str, Any]) -> dict[str, Any]:
    """Names with values, shapes kept; flags that are set are True."""
    return {name: value.tolist() for name, value in tensors.items()}


def dtypes(tensors: dict[str, Any]) -> dict[str, str]:
    return {name: str(value.dtype) for name, value in tensors.items()}


class Said:
    """The outputs of one response."""

    def __init__(self, **tensors: Any) -> None:
        self._tensors = {name: numpy.array(value) for name, value in tensors.items()}

    def __call__(self, name: str) -> Any:
        return self._tensors.get(name)


def answer(served: Served, **changes: Any) -> Answer:
    return answer_of(replace(REQUEST, **changes), served, BYTES, Spelling(BYTES))


def text(said: str, **more: Any) -> Said:
    return Said(text_output=numpy.array([said.encode()], dtype=numpy.object_), **more)


def joined(answer: Answer, *responses: Said) -> SequenceStep:
    """All that an answer gives, its end included, as one step."""
    steps: list[SequenceStep] = []
    for response in responses:
        step = answer.read(response)
        if step is not None:
            steps.append(step)
            if step.finish is not None:
                break
    else:
        steps.append(answer.end())
    return SequenceStep(
        7,
        [token_id for step in steps for token_id in step.token_ids],
        [logprob for step in steps for logprob in step.logprobs or []],
        finish=steps[-1].finish,
        message=steps[-1].message,
    )


class TestTheModel:
    LLMAPI_INPUTS = ("text_input", "streaming", "sampling_param_max_tokens", "stop")
    BLS_INPUTS = ("text_input", "max_tokens", "stream")
    IDS_INPUTS = ("input_ids", "input_lengths", "request_output_len", "stop")

    def test_its_tensors_say_which_dialect_it_speaks(self):
        assert served_of(self.LLMAPI_INPUTS, ["text_output"], {}) == LLMAPI
        accumulating = {"accumulate_tokens": "True"}
        assert served_of(self.BLS_INPUTS, ["text_output"], accumulating, max_batch_size=8) == BLS
        assert served_of(self.IDS_INPUTS, ["output_ids"], {}, max_batch_size=8) == IDS

    def test_an_unset_parameter_of_the_template_means_pieces(self):
        served = served_of(self.BLS_INPUTS, ["text_output"], {"accumulate_tokens": "${accumulate_tokens}"})
        assert not served.accumulates

    @pytest.mark.parametrize(
        ("inputs", "outputs", "changes", "said"),
        [
            (["INPUT0"], ["OUTPUT0"], {}, "set served_model to tensorrt_llm"),
            (["text_input"], ["text_output"], {}, "set served_model to tensorrt_llm"),
            (BLS_INPUTS, ["text_output"], {"wanted": "ids"}, 'speaks bls; engine_options have dialect = "ids"'),
            (IDS_INPUTS, ["output_ids"], {"decoupled": False}, "set decoupled"),
        ],
    )
    def test_one_that_we_cannot_speak_to_is_refused_with_what_to_do(
        self, inputs: Any, outputs: Any, changes: Any, said: str
    ):
        with pytest.raises(EngineStartError, match=said):
            served_of(inputs, outputs, {}, **changes)

    @pytest.mark.parametrize(
        ("priority", "levels", "level"), [(1.0, 10, 1), (0.5, 3, 2), (0.0, 10, 10), (0.9, 0, 0), (0.0, 1, 1)]
    )
    def test_a_priority_is_one_of_its_levels(self, priority: float, levels: int, level: int):
        assert priority_level(priority, levels) == level


class TestRequests:
    def test_llmapi(self):
        tensors = request_tensors(replace(REQUEST, temperature=0.7, top_p=0.9, top_k=20), LLMAPI, BYTES)
        assert plain(tensors) == {
            "text_input": [b"Why?"],
            "streaming": [True],
            "sampling_param_exclude_input_from_output": [True],
            "return_finish_reason": [True],
            "sampling_param_max_tokens": [5],
            "sampling_param_temperature": [pytest.approx(0.7)],
            "sampling_param_top_k": [20],
            "sampling_param_top_p": [pytest.approx(0.9)],
        }
        assert dtypes(tensors)["text_input"] == "object"
        assert dtypes(tensors)["sampling_param_temperature"] == "float32"
        assert dtypes(tensors)["sampling_param_max_tokens"] == "int32"

    def test_bls(self):
        wanted = replace(
            REQUEST,
            temperature=1.0,
            seed=2**63 + 1,
            min_tokens=2,
            repetition_penalty=1.5,
            presence_penalty=-0.5,
            frequency_penalty=0.5,
        )
        tensors = request_tensors(wanted, BLS, BYTES)
        assert plain(tensors) == {
            "text_input": [[b"Why?"]],
            "stream": [[True]],
            "exclude_input_in_output": [[True]],
            "return_log_probs": [[True]],
            "max_tokens": [[5]],
            "temperature": [[1.0]],
            "seed": [[2**63 + 1]],
            "min_tokens": [[2]],
            "repetition_penalty": [[1.5]],
            "presence_penalty": [[-0.5]],
            "frequency_penalty": [[0.5]],
        }
        assert dtypes(tensors)["seed"] == "uint64"

    def test_ids(self):
        tensors = request_tensors(replace(REQUEST, stop_token_ids=(9,), logprobs=True), IDS, BYTES)
        assert plain(tensors) == {
            "input_ids": [list(b"Why?")],
            "input_lengths": [[4]],
            "request_output_len": [[5]],
            "streaming": [[True]],
            "exclude_input_in_output": [[True]],
            "end_id": [[257]],
            "runtime_top_k": [[1]],
            "stop_words_list": [[[9, 257, 259], [1, 2, 3]]],
            "return_log_probs": [[True]],
        }
        assert {dtypes(tensors)[name] for name in ("input_ids", "end_id", "stop_words_list")} == {"int32"}

    def test_ids_that_go_on_past_the_end_stop_at_no_token(self):
        tensors = request_tensors(replace(REQUEST, ignore_eos=True), IDS, BYTES)
        assert tensors["end_id"].tolist() == [[-1]]
        assert "stop_words_list" not in tensors

    def test_greedy_is_the_likeliest_of_one_in_every_dialect(self):
        for served, name in ((LLMAPI, "sampling_param_top_k"), (BLS, "top_k"), (IDS, "runtime_top_k")):
            tensors = request_tensors(replace(REQUEST, top_k=50, top_p=0.5), served, BYTES)
            assert tensors[name].ravel().tolist() == [1]
            assert not any("temperature" in each or "top_p" in each for each in tensors)

    def test_a_stop_request_has_what_its_model_requires(self):
        assert plain(stop_tensors(LLMAPI)) == {"text_input": [b""], "stop": [True]}
        assert set(stop_tensors(IDS)) == {"input_ids", "input_lengths", "request_output_len", "stop"}
        assert stop_tensors(IDS)["stop"].tolist() == [[True]]

    def test_a_prompt_that_is_no_text_is_refused(self):
        for served in (LLMAPI, BLS):
            with pytest.raises(RemoteRefusal, match="within a character"):
                request_tensors(replace(REQUEST, prompt_ids=tuple("é".encode()[:1])), served, BYTES)


class TestIds:
    def test_ids_are_given_as_they_come_and_end_at_their_number(self):
        reader = answer(IDS, max_tokens=3)
        first = reader.read(Said(output_ids=[[[65, 66]]]))
        assert first is not None
        assert (first.token_ids, first.finish) == ([65, 66], None)
        last = reader.read(Said(output_ids=[[[67]]]))
        assert last is not None
        assert (last.token_ids, last.finish) == ([67], FinishReason.LENGTH)

    def test_an_end_token_ends_the_answer_and_is_not_given(self):
        whole = joined(answer(IDS), Said(output_ids=[[[65]]]), Said(output_ids=[[[66, 257]]]))
        assert (whole.token_ids, whole.finish) == ([65, 66], FinishReason.STOP)

    def test_an_answer_that_is_shorter_than_asked_for_ended_by_itself(self):
        whole = joined(answer(IDS), Said(output_ids=[[[65]]]))
        assert (whole.token_ids, whole.finish) == ([65], FinishReason.STOP)

    def test_an_empty_response_says_nothing(self):
        assert answer(IDS).read(Said(output_ids=numpy.zeros((1, 1, 0), numpy.int32))) is None
        assert answer(IDS).read(Said(output_ids=[[[-1]]])) is None, "-1 fills up"

    @pytest.mark.parametrize("second", [[[[-0.5, -0.25]]], [[[-0.25]]]])
    def test_log_probabilities_come_of_the_whole_answer_or_of_what_is_new(self, second: Any):
        reader = answer(IDS, logprobs=True, max_tokens=2)
        whole = joined(
            reader,
            Said(output_ids=[[[65]]], output_log_probs=[[[-0.5]]]),
            Said(output_ids=[[[66]]], output_log_probs=second),
        )
        assert whole.logprobs == [-0.5, -0.25]

    def test_what_makes_no_sense_is_refused(self):
        with pytest.raises(RemoteRefusal, match="outside the vocabulary of 260"):
            answer(IDS).read(Said(output_ids=[[[260]]]))
        with pytest.raises(RemoteRefusal, match="0 log probabilities for 1 tokens"):
            answer(IDS, logprobs=True).read(Said(output_ids=[[[65]]]))


class TestText:
    def test_text_of_the_whole_answer_is_taken_piece_by_piece(self):
        whole = joined(
            answer(LLMAPI, max_tokens=99),
            text("a b", finish_reason=[b"None"]),
            text("a b c d", finish_reason=[b"None"]),
            text("a b c d e", finish_reason=[b"stop"]),
        )
        assert bytes(whole.token_ids) == b"a b c d e"
        assert whole.finish is FinishReason.STOP

    def test_ids_come_while_the_answer_goes_on(self):
        step = answer(LLMAPI, max_tokens=99).read(text("first second", finish_reason=[b"None"]))
        assert step is not None
        assert bytes(step.token_ids) == b"first"

    def test_text_in_pieces_is_joined(self):
        pieces = replace(BLS, accumulates=False)
        whole = joined(answer(pieces, max_tokens=99), text("a b"), text(" c"), text(" d"))
        assert bytes(whole.token_ids) == b"a b c d"

    def test_a_character_that_is_not_whole_is_waited_for(self):
        whole = joined(answer(BLS, max_tokens=99), text("x \ufffd"), text("x \ufffd\ufffd"), text("x 漢"))
        assert bytes(whole.token_ids).decode() == "x 漢"

    def test_a_character_that_stays_broken_is_given_at_the_end(self):
        whole = joined(answer(BLS, max_tokens=99), text("x"), text("x\ufffd"))
        assert bytes(whole.token_ids).decode() == "x\ufffd"

    def test_no_more_ids_are_given_than_were_asked_for(self):
        whole = joined(answer(LLMAPI, max_tokens=4), text("a b c d e f", finish_reason=[b"length"]))
        assert (bytes(whole.token_ids), whole.finish) == (b"a b ", FinishReason.LENGTH)

    def test_a_stop_token_ends_the_answer_and_is_not_given(self):
        stopping = answer(LLMAPI, stop_token_ids=(ord("c"),), max_tokens=99)
        whole = joined(stopping, text("a b c d", finish_reason=[b"length"]))
        assert (bytes(whole.token_ids), whole.finish) == (b"a b ", FinishReason.STOP)

    @pytest.mark.parametrize(("tokens", "finish"), [(2, FinishReason.STOP), (3, FinishReason.LENGTH)])
    def test_bls_does_not_say_why_it_ended_and_its_log_probabilities_count_the_tokens(
        self, tokens: int, finish: FinishReason
    ):
        said = text("a", output_log_probs=[[[-0.5] * tokens]])
        assert joined(answer(BLS, max_tokens=3), said).finish is finish

    @pytest.mark.parametrize(
        ("reason", "said"),
        [("cancelled", "by somebody else"), ("timeout", "time limit"), ("None", "did not say why")],
    )
    def test_an_end_that_is_none_is_an_error_in_our_words(self, reason: str, said: str):
        whole = joined(answer(LLMAPI), text("a", finish_reason=[reason.encode()]))
        assert whole.finish is FinishReason.ERROR
        assert said in whole.message

    def test_text_that_is_taken_back_is_refused(self):
        reader = answer(LLMAPI)
        reader.read(text("a b", finish_reason=[b"None"]))
        with pytest.raises(RemoteRefusal, match="changed text"):
            reader.read(text("a c", finish_reason=[b"None"]))

    @pytest.mark.parametrize("growing", [True, False])
    def test_log_probabilities_of_its_tokens_are_laid_onto_our_ids(self, growing: bool):
        """Three tokens, `ab`, ` c` and one without text, become four ids of one byte."""
        told = [[-1.0], [-1.0, -2.0], [-1.0, -2.0, -4.0]] if growing else [[-1.0], [-2.0], [-4.0]]
        texts = ["ab", "ab c", "ab c"]
        whole = joined(
            answer(BLS, max_tokens=99, logprobs=True),
            *(text(t, output_log_probs=[[p]]) for t, p in zip(texts, told, strict=True)),
        )
        assert bytes(whole.token_ids) == b"ab c"
        assert whole.logprobs == [-1.0, 0.0, -2.0, 0.0]

    def test_a_token_that_spans_two_of_its_own_counts_both(self):
        smollm2 = load_tokenizer("smollm2")
        reader = answer_of(replace(REQUEST, logprobs=True, max_tokens=99), BLS, smollm2, Spelling(smollm2))
        whole = joined(
            reader, text("hel", output_log_probs=[[[-1.0]]]), text("hello", output_log_probs=[[[-1.0, -2.0]]])
        )
        assert (whole.token_ids, whole.logprobs) == (smollm2.encode("hello"), [-3.0])
