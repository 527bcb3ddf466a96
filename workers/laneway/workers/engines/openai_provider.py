"""One provider of an `openai` pool: which of its models is asked, whether it is well, and its answers as steps.

What is said on the wire is in openai_wire, how it gets there in openai_http.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import structlog

from laneway.core.errors import InvalidRequest
from laneway.core.prompt import ChatTurn
from laneway.runtime.engine_options import ProviderOptions
from laneway.runtime.tokenizer import Tokenizer
from laneway.workers.engines.chat_turns import ChatTurns, NotTurns
from laneway.workers.engines.openai_http import Endpoint
from laneway.workers.engines.openai_logprobs import Vocabulary
from laneway.workers.engines.openai_models import check_model, model_of
from laneway.workers.engines.openai_wire import DONE, Answer, ServerUsage, chat_body, completion_body, text_of
from laneway.workers.engines.openai_words import NO_ANSWER, ServerError
from laneway.workers.engines.protocol import EngineCapacity, EngineRequest, EngineStartError, SequenceStep
from laneway.workers.engines.provider_gate import Gate
from laneway.workers.engines.remote import RemoteRefusal
from laneway.workers.engines.text_ids import Spelling

LOOK_S_MIN, LOOK_S_MAX = 0.5, 10.0  # between two tries at a server that is not ready yet
HEALTH_LOOKS = 2  # that fail, one after another, until a server is taken for gone
HEALTH_LOOK_S = 1.0  # between these
USAGE_S = 5.0  # for the counts that may follow an answer's end
END_S = 0.5  # for a stream to end after all that it is read for
_NO_LIST = (404, 405, 501)  # some servers list no models

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Counted:
    """Tokens of one answer, as the server counted them, or we where it did not say."""

    prompt_tokens: int = 0
    completion_tokens: int = 0

    def take(self, request: EngineRequest, answer: Answer) -> None:
        usage = answer.usage or ServerUsage(len(request.prompt_ids), answer.given_tokens)
        self.prompt_tokens, self.completion_tokens = usage.prompt_tokens, usage.completion_tokens


class Provider:
    """One server. `connect` first; then `answer`, also concurrently."""

    def __init__(self, options: ProviderOptions, key: str, tokenizer: Tokenizer, gate: Gate) -> None:
        self.name = options.name
        self.trouble = "nothing answers there"  # why it is not ready, or seems to be gone
        self._options = options
        self._tokenizer = tokenizer
        self._spelling = Spelling(tokenizer)
        self._turns = ChatTurns(tokenizer) if options.route == "chat" else None
        self._vocabulary: Vocabulary | None = None
        self._model = options.served_model
        self._gate = gate
        self._endpoint = Endpoint(
            options.base_url, key, options.tls_ca_file, lambda headers: gate.heard(options.name, headers)
        )

    async def ready(self, pool: EngineCapacity) -> None:
        """Returns once it has given a token, however long that takes. Raises EngineStartError if it never will."""
        look_s = LOOK_S_MIN
        while True:
            try:
                await self._find_model(pool)
                await self._one_token()
            except ServerError as error:
                if not error.may_pass:
                    raise EngineStartError(f"{self.name}: {error}") from None
                self.trouble = str(error)
            except (EngineStartError, RemoteRefusal) as error:
                raise EngineStartError(f"{self.name}: {error}") from None
            else:
                log.info("provider_found", provider=self.name, route=self._options.route, model=self._model)
                return
            await asyncio.sleep(look_s)
            look_s = min(LOOK_S_MAX, 2 * look_s)

    def connect(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        try:
            self._endpoint.open()
        except OSError as error:
            raise EngineStartError(f"{self.name}: tls_ca_file cannot be read: {error.strerror}") from None

    async def answer(self, request: EngineRequest, counted: Counted) -> AsyncGenerator[SequenceStep, None]:
        """The answer as it comes, and what was counted of it before its last step.

        Raises ServerError; RemoteRefusal where the request or the answer makes no sense for this server.
        """
        assert self._vocabulary is not None
        body = await self._body(request)
        is_ids = isinstance(body.get("prompt"), list)
        answer = Answer(request, self._spelling, self._vocabulary, prompt_was_ids=is_ids)
        route = "completions" if self._turns is None else "chat/completions"
        async with aclosing(self._endpoint.events(route, body)) as events:
            async for data in events:
                if data == DONE:
                    break
                step = answer.read(data)
                if step is not None and step.finish is not None:
                    counted.take(request, answer)
                    yield step  # the rest is not wanted
                    return
                if step is not None:
                    yield step
                if answer.finished:
                    break
            if not answer.finished:
                raise ServerError(NO_ANSWER, "the server ended its answer before it was whole")
            await _read_rest(events, answer)
        last = answer.last()
        counted.take(request, answer)
        yield last

    async def is_well(self) -> bool:
        """Whether it answers, whatever it says; `trouble` says why not."""
        for look in range(HEALTH_LOOKS):
            if look:
                await asyncio.sleep(HEALTH_LOOK_S)
            try:
                await self._endpoint.models()
            except ServerError as error:
                if (error.status != NO_ANSWER and error.status < 500) or error.status in _NO_LIST:
                    return True
                self.trouble = str(error)
            else:
                return True
        return False

    async def close(self) -> None:
        await self._endpoint.close()

    async def _find_model(self, pool: EngineCapacity) -> None:
        try:
            listed = await self._endpoint.models()
        except ServerError as error:
            if error.status in _NO_LIST and self._model:
                return
            raise
        model = model_of(listed, self._options.served_model)
        check_model(pool, model)
        self._model = str(model["id"])

    async def _one_token(self) -> None:
        """What is listed may still be loading, or serve nobody with this key."""
        try:
            prompt = self._tokenizer.encode_chat([ChatTurn("user", "Hi")])
        except InvalidRequest:  # no template
            prompt = self._tokenizer.encode("Hi")
        if self._turns is None and not self._options.prompt_ids:
            prompt = self._tokenizer.encode("Hi")
        request, counted = EngineRequest(0, tuple(prompt), 1, temperature=0.0), Counted()
        self.trouble = "it may not be asked: its quota is used up, or it asked to be left alone"
        ticket = await self._gate.enter(request, self.name)
        ended = False
        try:
            async with aclosing(self.answer(request, counted)) as steps:
                async for _ in steps:
                    pass
            ended = True
            ticket.used(counted.prompt_tokens, counted.completion_tokens)
        except ServerError as error:
            ended = True
            ticket.failed(error.status, error.headers)
            raise
        finally:
            if not ended:
                ticket.dropped()

    async def _body(self, request: EngineRequest) -> dict[str, Any]:
        hidden = [i for i in request.stop_token_ids if not self._tokenizer.token_bytes(i)]
        if not self._tokenizer.eos_ids.issuperset(hidden):
            raise RemoteRefusal("a stop token is a control token, which does not show in the text of the server")
        if self._turns is None:
            ids = list(request.prompt_ids)
            prompt = ids if self._options.prompt_ids else text_of(ids, self._tokenizer)
            return completion_body(request, self._model, prompt)
        try:
            turns = await asyncio.to_thread(self._turns.of, request.prompt_ids)
        except NotTurns:
            raise RemoteRefusal(
                "the prompt is no chat of the pool's template that ends where an answer begins, and the pool's "
                "provider takes messages only: send messages, without continue_final_message"
            ) from None
        return chat_body(request, self._model, turns)


async def _read_rest(events: AsyncGenerator[str, None], answer: Answer) -> None:
    """Counts may come in an event of their own. A stream that is read to its end leaves its connection to the next."""
    now = asyncio.get_running_loop().time
    with contextlib.suppress(TimeoutError, ServerError, RemoteRefusal):
        async with asyncio.timeout(USAGE_S if answer.usage is None else END_S) as limit:
            async for data in events:
                if data != DONE:
                    answer.read(data)
                if data == DONE or answer.usage is not None:
                    limit.reschedule(now() + END_S)
