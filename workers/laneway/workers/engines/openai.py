"""Any OpenAI-compatible server as an engine: llama.cpp's, vLLM, trtllm-serve, a hosted provider; or several of them.

Owns the providers of one pool: asks the one that the gate names, again where the gate says so and nothing was given
out, and knows when none of them answers any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, asynccontextmanager

from laneway.core.catalogue import Capabilities, Pool
from laneway.runtime.catalogue import capabilities_of
from laneway.runtime.engine_options import EngineOptions
from laneway.runtime.tokenizer import Tokenizer, load_tokenizer
from laneway.workers.engines.openai_logprobs import Vocabulary
from laneway.workers.engines.openai_options import checked_providers, key_of
from laneway.workers.engines.openai_provider import Counted, Provider
from laneway.workers.engines.openai_words import NO_ANSWER, ServerError
from laneway.workers.engines.protocol import EngineCapacity, EngineRequest, SequenceStep
from laneway.workers.engines.provider_gate import Gate, OpenGate, Ticket
from laneway.workers.engines.remote import RemoteEngine, RemoteGone, RemoteLost, RemoteRefusal

# To read an event takes a third of a millisecond, so the streams of one step take their time: 8 of them came in half as
# many calls as they had deltas where 1 ms was waited for them, in a quarter with this.
GATHER_S = 0.005
SIGN_S = 0.8  # between two signs of life of what waits for its turn: without, its job would be delivered again


class _Again(Exception):
    """Nothing was given out, and the request may be asked again after `delay_s`."""

    def __init__(self, delay_s: float) -> None:
        super().__init__()
        self.delay_s = delay_s


class OpenAiServer:
    """The providers of a pool as one RemoteServer."""

    def __init__(
        self,
        providers: Mapping[str, Provider],
        pool: EngineCapacity,
        tokenizer: Tokenizer,
        gate: Gate,
        health_interval_s: float,
    ) -> None:
        self._providers = providers
        self._pool = pool
        self._tokenizer = tokenizer
        self._gate = gate
        self._health_interval_s = health_interval_s

    @property
    def name(self) -> str:
        return f"the server {next(iter(self._providers))}" if len(self._providers) == 1 else "each of the providers"

    @property
    def trouble(self) -> str:
        if len(self._providers) == 1:
            return next(iter(self._providers.values())).trouble
        return "; ".join(f"{provider.name}: {provider.trouble}" for provider in self._providers.values())

    async def open(self) -> EngineCapacity:
        """One that is ready is enough; one that never will be is an error of the settings."""
        vocabulary = await asyncio.to_thread(Vocabulary, self._tokenizer)
        for provider in self._providers.values():
            provider.connect(vocabulary)
        opening = [asyncio.create_task(provider.ready(self._pool)) for provider in self._providers.values()]
        try:
            done, _ = await asyncio.wait(opening, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in opening:
                task.cancel()
            await asyncio.gather(*opening, return_exceptions=True)
        return self._pool

    def able(self, offered: Capabilities) -> Capabilities:
        return offered

    async def generate(self, request: EngineRequest) -> AsyncGenerator[SequenceStep, None]:
        """What waits says now and then that nothing came yet."""
        while True:
            async with self._entering(request) as entering:
                while not (await asyncio.wait([entering], timeout=SIGN_S))[0]:
                    yield SequenceStep(request.id, [])
            try:
                async with aclosing(self._attempt(entering.result(), request)) as steps:
                    async for step in steps:
                        yield step
                return
            except _Again as again:
                delay_s = again.delay_s
            while delay_s > SIGN_S:
                await asyncio.sleep(SIGN_S)
                delay_s -= SIGN_S
                yield SequenceStep(request.id, [])
            await asyncio.sleep(delay_s)

    @asynccontextmanager
    async def _entering(self, request: EngineRequest) -> AsyncGenerator[asyncio.Task[Ticket], None]:
        """The ticket to come. Where the wait for it is broken off, one that came meanwhile is dropped."""
        entering = asyncio.create_task(self._gate.enter(request), name=f"gate-{request.id}")
        try:
            yield entering
        except BaseException:
            entering.cancel()
            await asyncio.gather(entering, return_exceptions=True)
            if not entering.cancelled() and entering.exception() is None:
                entering.result().dropped()
            raise

    async def _attempt(self, ticket: Ticket, request: EngineRequest) -> AsyncGenerator[SequenceStep, None]:
        """One request to one provider; its ticket has ended with it."""
        given, settled, counted = False, False, Counted()
        try:
            async with aclosing(self._providers[ticket.provider].answer(request, counted)) as steps:
                async for step in steps:
                    given = given or bool(step.token_ids)
                    if step.finish is not None:
                        settled = True
                        ticket.used(counted.prompt_tokens, counted.completion_tokens)
                    yield step
        except ServerError as error:
            if not given:
                settled = True
                delay_s = ticket.failed(error.status, error.headers)
                if delay_s is not None:
                    raise _Again(delay_s) from None
            raise await self._meaning_of(error) from None
        finally:
            if not settled:
                ticket.dropped()

    async def stop(self, request_id: int) -> None:
        """Closing the connection is all that there is to say."""

    async def lost(self) -> str:
        while True:
            await asyncio.sleep(self._health_interval_s)
            if trouble := await self._trouble():
                return trouble

    async def close(self) -> None:
        for provider in self._providers.values():
            await provider.close()

    async def _trouble(self) -> str:
        """Why the engine is taken for gone; empty while a provider is well."""
        looks = [asyncio.create_task(provider.is_well()) for provider in self._providers.values()]
        try:
            if any(await asyncio.gather(*looks)):
                return ""
        finally:
            for look in looks:
                look.cancel()
        return f"{self.name} is gone: {self.trouble}"

    async def _meaning_of(self, error: ServerError) -> RemoteGone | RemoteLost | RemoteRefusal:
        """Of one that the gate gave up, or that broke after output."""
        if error.status == NO_ANSWER and (trouble := await self._trouble()):
            return RemoteGone(trouble)
        return RemoteLost(str(error)) if error.may_pass else RemoteRefusal(str(error))


def make_openai(pool: Pool, options: EngineOptions, gate: Gate | None = None) -> RemoteEngine:
    """Without a gate the first provider is asked, always. Raises ConfigError."""
    named = checked_providers(pool, options.providers)
    gate = gate or OpenGate(named[0].name)
    tokenizer = load_tokenizer(pool.tokenizer)
    providers = {each.name: Provider(each, key_of(pool, each), tokenizer, gate) for each in named}
    capacity = EngineCapacity(pool.slots, pool.kv_tokens, pool.context_length, pool.vocabulary_size)
    server = OpenAiServer(providers, capacity, tokenizer, gate, options.health_interval_s)
    return RemoteEngine(
        server, capabilities_of("openai", options), options.start_timeout_s, gather_s=GATHER_S, gave_token=True
    )
