"""An engine that has loaded is tried out: what it must do before it is ready, and what is said if it does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from laneway.core.catalogue import Capabilities
from laneway.core.errors import InvalidRequest
from laneway.core.lanes import FinishReason
from laneway.core.prompt import ChatTurn
from laneway.runtime.tokenizer import ByteTokenizer, load_tokenizer
from laneway.workers.engines.protocol import EngineGone, EngineRequest, EngineStartError, EngineStats, SequenceStep
from laneway.workers.first_token import REQUEST_ID, FirstToken, trial_prompt, trial_request

TRIAL = EngineRequest(REQUEST_ID, (1,), 1, ignore_eos=True)


class Heard:
    """The worker's own sink."""

    def __init__(self) -> None:
        self.steps: list[SequenceStep] = []
        self.closed: list[str] = []

    def on_step(self, steps: Sequence[SequenceStep], stats: EngineStats) -> None:
        self.steps += steps

    def on_closed(self, reason: str) -> None:
        self.closed.append(reason)


class Answering:
    """Of an engine, what a trial asks for."""

    def __init__(self, answer: Callable[[], None]) -> None:
        self._answer = answer

    def submit(self, request: EngineRequest) -> None:
        self._answer()


async def tried(answer: Callable[[FirstToken], None], request: EngineRequest = TRIAL) -> tuple[FirstToken, Heard]:
    heard = Heard()
    sink = FirstToken(heard)
    await sink.of(Answering(lambda: answer(sink)), request, 0.05)  # type: ignore[arg-type] # a part of one
    return sink, heard


def gives(*steps: SequenceStep) -> Callable[[FirstToken], None]:
    def answer(sink: FirstToken) -> None:
        for step in steps:
            sink.on_step([step], EngineStats())

    return answer


def raises(error: Exception) -> Callable[[FirstToken], None]:
    def answer(sink: FirstToken) -> None:
        raise error

    return answer


async def test_after_its_first_token_all_that_an_engine_says_is_passed_on():
    sink, heard = await tried(gives(SequenceStep(REQUEST_ID, [5], finish=FinishReason.LENGTH)))
    assert sink.passed
    assert not heard.steps, "jobs see nothing of the trial"
    later = SequenceStep(1, [7])
    sink.on_step([later], EngineStats())
    sink.on_closed("gone")
    assert (heard.steps, heard.closed) == ([later], ["gone"])


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (gives(SequenceStep(REQUEST_ID, [], finish=FinishReason.ERROR, message="no memory")), "first request: no mem"),
        (gives(SequenceStep(REQUEST_ID, [], finish=FinishReason.STOP)), "without a token"),
        (gives(SequenceStep(REQUEST_ID, [5])), r"gave no token within 0\.05 s"),
        (gives(SequenceStep(7, [5], finish=FinishReason.LENGTH)), r"gave no token within 0\.05 s"),
        (lambda sink: sink.on_closed("killed"), "died on its first request: killed"),
        (raises(EngineGone("gone")), "was gone before its first token"),
    ],
)
async def test_what_is_no_token_is_no_start(answer, said: str):
    with pytest.raises(EngineStartError, match=said):
        await tried(answer)


async def test_a_request_that_a_busy_server_lost_is_tried_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("laneway.workers.first_token.AGAIN_S", 0.001)
    ends = [
        SequenceStep(REQUEST_ID, [], finish=FinishReason.CANCELLED),
        SequenceStep(REQUEST_ID + 1, [], finish=FinishReason.CANCELLED),
        SequenceStep(REQUEST_ID + 2, [5], finish=FinishReason.LENGTH),
    ]
    sink, _ = await tried(lambda sink: sink.on_step([ends.pop(0)], EngineStats()))
    assert sink.passed
    assert not ends


async def test_an_engine_that_may_end_by_itself_needs_no_token():
    end = gives(SequenceStep(REQUEST_ID, [], finish=FinishReason.STOP))
    sink, _ = await tried(end, EngineRequest(REQUEST_ID, (1,), 1))
    assert sink.passed


@pytest.mark.parametrize("name", ["bytes", "smollm2"])
def test_the_first_request_is_a_short_chat(name: str):
    tokenizer = load_tokenizer(name)
    request = trial_request(Capabilities(), trial_prompt(tokenizer))
    assert "Hi" in b"".join(map(tokenizer.token_bytes, request.prompt_ids)).decode()
    assert list(request.prompt_ids) == tokenizer.encode_chat([ChatTurn("user", "Hi")])
    assert (request.max_tokens, request.temperature, request.ignore_eos) == (1, 0.0, True)
    assert not trial_request(Capabilities(ignore_eos=False), (1,)).ignore_eos


def test_a_model_without_a_template_is_given_plain_text(monkeypatch: pytest.MonkeyPatch):
    def refuse(self: ByteTokenizer, messages: object) -> list[int]:
        raise InvalidRequest("the model has no chat template")

    monkeypatch.setattr(ByteTokenizer, "encode_chat", refuse)
    assert trial_prompt(ByteTokenizer()) == tuple(b"Hi")
