"""An OpenAI-compatible provider that counts strictly and refuses with 429 what is beyond its quota."""

from __future__ import annotations

import asyncio
from random import Random

from tests.support.scripted_openai import Asked, Reply, ScriptedOpenAi, error_reply, text_event, usage_event
from tests.support.strict_count import StrictCount


class CountingProvider(ScriptedOpenAi):
    """Answers take `answer_s`, and have some of the tokens asked for: how many is drawn from `shares` of them."""

    def __init__(self, count: StrictCount, answer_s: float, shares: tuple[float, float], seed: int = 1) -> None:
        super().__init__()
        self.count = count
        self._answer_s = answer_s
        self._shares = shares
        self._random = Random(seed)

    def reply_to(self, asked: Asked) -> Reply:
        loop = asyncio.get_running_loop()
        prompt_tokens, max_tokens = len(asked.body["prompt"]), asked.body["max_tokens"]
        judged = self.count.arrive(loop.time(), prompt_tokens, max_tokens)
        if not judged.allowed:
            return error_reply(429, "the quota is used up")
        tokens = max(1, round(max_tokens * self._random.uniform(*self._shares)))
        ended = asyncio.Event()

        def end() -> None:
            judged.used = prompt_tokens + tokens
            ended.set()

        loop.call_later(self._answer_s, end)
        first = tokens // 2
        return Reply(
            [
                text_event("a" * first),
                ended,
                text_event("b" * (tokens - first)),
                text_event("", "stop"),
                usage_event(prompt_tokens, tokens),
                "[DONE]",
            ]
        )
