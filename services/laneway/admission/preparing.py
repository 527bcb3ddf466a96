"""A parsed request in the tokens of each pool that may serve it: exact counts, room for the answer, predicted lengths.

Short prompts are tokenised at once; longer ones in a thread, since a tokenizer may take milliseconds and the event loop
serves every stream of the door. Tokenizers never truncate, so what is counted here is what the engine will see.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct

from laneway.core.catalogue import Pool
from laneway.core.errors import InvalidRequest
from laneway.core.job import GenerateTask
from laneway.core.lanes import Lane
from laneway.core.prompt import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from laneway.core.selectors import GENERAL_RANK, choose, reason_of
from laneway.policy.admit import Candidate
from laneway.policy.contract import beyond_context, output_room
from laneway.policy.lengths import LengthBook
from laneway.runtime.tokenizer import Tokenizer
from laneway.runtime.wire.requests import ParsedSpec

INLINE_CHARACTERS_MAX = 2048
MEASURED_CHARACTERS_MAX = 262_144  # longer prompts are measured before they are tokenised: 1 MB takes a second or two
NORMAL_FORM_SHRINKS = 4  # no text has fewer characters in a normal form than one for so many
# Quantiles of the output length that a lane's estimates use (docs/policy.md): the middle where a wrong guess costs a
# moment of waiting, more where a deadline hangs on it.
ETA_QUANTILE = {Lane.PRIORITY: 0.5, Lane.DEFERRABLE: 0.8, Lane.BATCH: 0.5}
LONG_QUANTILE = 0.9


class Option(Struct, frozen=True):
    """One pool that could serve the request, and the task it would run."""

    candidate: Candidate
    task: GenerateTask


class Preparer:
    def __init__(self, tokenizers: Mapping[str, Tokenizer], lengths: LengthBook, threads: ThreadPoolExecutor) -> None:
        self._tokenizers = tokenizers
        self._lengths = lengths
        self._threads = threads
        self._widest: dict[str, int] = {}  # by tokenizer, once it was asked for

    async def options(self, parsed: ParsedSpec, tenant: str) -> list[Option]:
        """At least one, cheapest first. InvalidRequest where no pool's context holds prompt and answer."""
        ids_of: dict[str, tuple[int, ...]] = {}
        fitting: list[Pool] = []
        objection: InvalidRequest | None = None
        for pool in parsed.pools:
            if (least := await self._least_tokens(parsed.prompt, pool)) >= pool.context_length:
                objection = objection or beyond_context(pool, f"at least {least}", least)
                continue
            if pool.tokenizer not in ids_of:
                ids_of[pool.tokenizer] = await self._tokenise(parsed.prompt, self._tokenizers[pool.tokenizer])
            fitting.append(pool)
        options: list[Option] = []
        for pool in self._taking(fitting, ids_of, parsed) if fitting else ():
            try:
                options.append(self._option(pool, ids_of[pool.tokenizer], parsed, tenant))
            except InvalidRequest as error:
                objection = objection or error
        if objection is not None and not options:
            raise objection
        return options

    def _taking(
        self, pools: Sequence[Pool], ids_of: Mapping[str, tuple[int, ...]], parsed: ParsedSpec
    ) -> Sequence[Pool]:
        """The pools whose selectors take the request, which may be of other lengths in other tokens."""
        if all(pool.selector.rank == GENERAL_RANK for pool in pools):
            return pools
        return choose(pools, parsed.contract.lane, lambda pool: len(ids_of[pool.tokenizer]), parsed.features)

    async def _least_tokens(self, prompt: Prompt, pool: Pool) -> int:
        """A lower bound, without tokenising: what can never fit must not take a thread for seconds."""
        if isinstance(prompt, TokenPrompt) or _length(prompt) <= MEASURED_CHARACTERS_MAX:
            return 0
        widest = self._widest.get(pool.tokenizer)
        if widest is None:
            tokenizer = self._tokenizers[pool.tokenizer]
            widest = await asyncio.get_running_loop().run_in_executor(self._threads, _widest, tokenizer)
            self._widest[pool.tokenizer] = widest
        return _length(prompt) // (widest * NORMAL_FORM_SHRINKS)

    def _option(self, pool: Pool, ids: tuple[int, ...], parsed: ParsedSpec, tenant: str) -> Option:
        max_tokens = output_room(pool, len(ids), parsed.max_tokens)
        task = parsed.task_of(pool, ids, max_tokens)
        sampling, lane = task.sampling, parsed.contract.lane
        least = max_tokens if sampling.ignore_eos else sampling.min_tokens or 0
        expected, long = (
            sampling.n * self._lengths.predict(tenant, pool.model, q, max_tokens, min_tokens=least, route=parsed.route)
            for q in (ETA_QUANTILE[lane], LONG_QUANTILE)
        )
        because = reason_of(pool, parsed.pools, parsed.features)
        return Option(Candidate(pool, len(ids), sampling.n * max_tokens, expected, long, because), task)

    async def _tokenise(self, prompt: Prompt, tokenizer: Tokenizer) -> tuple[int, ...]:
        if isinstance(prompt, TokenPrompt):
            return prompt.ids
        if _length(prompt) <= INLINE_CHARACTERS_MAX:
            return _encode(prompt, tokenizer)
        return await asyncio.get_running_loop().run_in_executor(self._threads, _encode, prompt, tokenizer)


def _widest(tokenizer: Tokenizer) -> int:
    """Bytes of the longest token."""
    return max(1, *(len(tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.vocabulary_size)))


def _length(prompt: TextPrompt | ChatPrompt) -> int:
    return len(prompt.text) if isinstance(prompt, TextPrompt) else sum(len(turn.content) for turn in prompt.turns)


def _encode(prompt: TextPrompt | ChatPrompt, tokenizer: Tokenizer) -> tuple[int, ...]:
    if isinstance(prompt, TextPrompt):
        ids = tokenizer.encode(prompt.text)
    else:
        ids = tokenizer.encode_chat(prompt.turns, continue_final=prompt.continue_final)
    if not ids:
        raise InvalidRequest("the prompt has no tokens", field="spec.generate.prompt", reason="EMPTY_PROMPT")
    return tuple(ids)
