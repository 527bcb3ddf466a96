"""What goes to an OpenAI-compatible server and comes back, event by event, by its two routes. Pure: no connection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from laneway.core.lanes import FinishReason
from laneway.core.prompt import ChatTurn
from laneway.runtime.tokenizer import Tokenizer
from laneway.workers.engines.openai_logprobs import Told, Vocabulary, told_of
from laneway.workers.engines.openai_words import error_of, object_of, status_of
from laneway.workers.engines.protocol import EngineRequest, SequenceStep
from laneway.workers.engines.remote import RemoteRefusal
from laneway.workers.engines.text_ids import NotSpelled, Spelling, TextIds

DONE = "[DONE]"  # the last event of a stream


class ServerUsage(Struct, frozen=True):
    """What a server says that it counted of one request, in tokens of its own."""

    prompt_tokens: int
    completion_tokens: int


def completion_body(request: EngineRequest, model: str, prompt: str | list[int]) -> dict[str, Any]:
    return _body(request, model) | {"prompt": prompt} | ({"logprobs": 1} if request.logprobs else {})


def chat_body(request: EngineRequest, model: str, turns: Sequence[ChatTurn]) -> dict[str, Any]:
    messages = [{"role": turn.role, "content": turn.content} for turn in turns]
    return _body(request, model) | {"messages": messages} | ({"logprobs": True} if request.logprobs else {})


def _body(request: EngineRequest, model: str) -> dict[str, Any]:
    """What both routes have. What the API has no field for was refused before."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.temperature > 0.0:
        # Said even where it cuts nothing: some servers have another default.
        body["top_p"] = 1.0 if request.top_p is None else request.top_p
    return body


def text_of(prompt_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """A prompt for a completions route that takes text only. RemoteRefusal where text cannot say the same."""
    pieces = [tokenizer.token_bytes(token_id) for token_id in prompt_ids]
    # The first may be a begin mark: servers add their own.
    if not all(pieces[1:]) or not any(pieces):
        raise RemoteRefusal(
            "the prompt has control tokens (as a chat has), which text cannot hold: set prompt_ids = true where the "
            'server takes token ids, or route = "chat"'
        )
    try:
        return b"".join(pieces).decode()
    except UnicodeDecodeError:
        raise RemoteRefusal("the prompt has an unfinished character, which text cannot hold") from None


class Answer:
    """Reads the events of one stream: text that becomes ids, then a finish, then what was counted."""

    def __init__(
        self, request: EngineRequest, spelling: Spelling, vocabulary: Vocabulary, *, prompt_was_ids: bool
    ) -> None:
        self._request = request
        self._text = TextIds(spelling)
        self._told = _ToldText(vocabulary) if request.logprobs else None
        self._prompt_was_ids = prompt_was_ids
        self._reason = ""
        self.given_tokens = 0  # ids
        self.usage: ServerUsage | None = None

    @property
    def finished(self) -> bool:
        """The server has said why it ended. Its counts may follow."""
        return self._reason != ""

    def read(self, data: str) -> SequenceStep | None:
        """None where an event has no ids. With a finish, ours, the rest is not wanted.

        Raises RemoteRefusal where it makes no sense, ServerError where it is an error.
        """
        event = object_of(data)
        if not event:
            raise RemoteRefusal("the server's answer could not be read: an event of its stream is no JSON object")
        if event.get("error") is not None:
            raise error_of(status_of(event), event)
        self.usage = _usage(event.get("usage")) or self.usage
        choice = _first_choice(event.get("choices"))
        if choice is None or self.finished:
            return None
        text, reason = _text(choice), choice.get("finish_reason")
        if isinstance(reason, str):
            self._reason = reason
        try:
            step = self._told_step(choice, text) if self._told is not None else self._text_step(text)
        except NotSpelled as character:
            raise RemoteRefusal(
                f"the server gave {character}, which the pool's vocabulary cannot express: is the pool's tokenizer "
                "that of the server's model?"
            ) from None
        return step if step.token_ids or step.finish is not None else None

    def last(self) -> SequenceStep:
        """The end as the server gave it. Raises RemoteRefusal if it gave none, or if its counts are wrong."""
        request, usage = self._request, self.usage
        if self._prompt_was_ids and usage is not None and 0 < usage.prompt_tokens < len(request.prompt_ids):
            raise RemoteRefusal(
                f"the server read {usage.prompt_tokens} of the {len(request.prompt_ids)} tokens of the prompt"
            )
        if self._told is not None:
            self._told.check()
        match self._reason:
            case "stop":
                return SequenceStep(request.id, [], finish=FinishReason.STOP)
            case "length" if usage is not None and 0 < usage.completion_tokens < request.max_tokens:
                raise RemoteRefusal(
                    f"the server gave {usage.completion_tokens} of {request.max_tokens} tokens and stopped: its "
                    "context is shorter than the pool's context_length"
                )
            case "length":
                return SequenceStep(request.id, [], finish=FinishReason.LENGTH)
            case "content_filter":
                raise RemoteRefusal("the server's content filter ended the answer")
            case _:
                raise RemoteRefusal("the server ended the answer for a reason that is not known here")

    def _text_step(self, text: str) -> SequenceStep:
        ids = self._text.feed(text) if text else []
        if self.finished:
            ids += self._text.end()
        return self._cut(SequenceStep(self._request.id, ids))

    def _told_step(self, choice: Mapping[str, Any], text: str) -> SequenceStep:
        """The tokens as the server had them; of an end token it may tell in an event without text."""
        assert self._told is not None
        told = [] if self.finished and not text else self._told.read(choice.get("logprobs"), text)
        return self._cut(SequenceStep(self._request.id, [t.token_id for t in told], [t.logprob for t in told]))

    def _cut(self, step: SequenceStep) -> SequenceStep:
        """Up to a stop token, and at most max_tokens: the server counts in tokens of its own."""
        request, ids = self._request, step.token_ids
        end = next((at for at, token_id in enumerate(ids) if token_id in request.stop_token_ids), len(ids))
        if end < len(ids):
            step.finish = FinishReason.STOP
        room = request.max_tokens - self.given_tokens
        if end > room:
            end, step.finish = room, FinishReason.LENGTH
        step.token_ids = ids[:end]
        step.logprobs = None if step.logprobs is None else step.logprobs[:end]
        self.given_tokens += end
        return step


class _ToldText:
    """Tokens by their log probabilities, held against the text that came beside them."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._spelled = bytearray()
        self._text = ""

    def read(self, said: object, text: str) -> list[Told]:
        told = list(told_of(said, self._vocabulary))
        for each in told:
            self._spelled += self._vocabulary.bytes_of(each.token_id)
        self._text += text
        return told

    def check(self) -> None:
        """The text may lack a last unfinished character. Raises RemoteRefusal."""
        spelled = self._spelled.decode(errors="replace").rstrip("\ufffd")
        if spelled != self._text.rstrip("\ufffd"):
            raise RemoteRefusal("the server gave log probabilities of other tokens than those of its text")


# --- reading ---------------------------------------------------------------------------------------------


def _first_choice(choices: object) -> Mapping[str, Any] | None:
    if not isinstance(choices, list):
        return None
    return next((each for each in choices if isinstance(each, Mapping) and each.get("index", 0) == 0), None)


def _text(choice: Mapping[str, Any]) -> str:
    """Of completions, or of a chat."""
    delta = choice.get("delta")
    text = delta.get("content") if isinstance(delta, Mapping) else choice.get("text")
    return text if isinstance(text, str) else ""


def _usage(said: object) -> ServerUsage | None:
    if not isinstance(said, Mapping):
        return None
    counts = [said.get("prompt_tokens"), said.get("completion_tokens")]
    whole = [count for count in counts if isinstance(count, int) and count >= 0]
    return ServerUsage(*whole) if len(whole) == len(counts) else None
