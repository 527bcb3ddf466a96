"""The output of one run so far: ids, text, log probabilities, and how pieces of it look on the wire.

Owns what may leave and when: a token leaves once its text is final, or once another token followed it. So only the
last token is ever held, and only while the text it opened (part of a character, the beginning of a stop string) may
still change. That makes every token's text part of exactly one chunk, whatever happens at the end of the output, and
the chunks of a stream equal the result. Because the whole output is kept until the job ends (it becomes the result),
any piece of it can be sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from laneway.core.checkpoints import UNKNOWN, Prefix
from laneway.core.job import GenerateTask, Result, TokenLogprob, Usage
from laneway.core.lanes import FinishReason
from laneway.runtime.wire.jobs import token_logprobs_to_proto
from laneway.v1 import admission_pb2
from laneway.workers.engines.protocol import SequenceStep
from laneway.workers.text import TextAssembler

CHUNK_TOKENS_MAX = 512  # of one chunk; a replay is cut into chunks of at most this, far below NATS' payload limit


class Transcript:
    """Fed with each step of one sequence, in order; finished once."""

    def __init__(self, token_bytes: Callable[[int], bytes], task: GenerateTask) -> None:
        self._assembler = TextAssembler(token_bytes, task.sampling.stop)
        self._wants_logprobs = task.sampling.logprobs
        self.ids: list[int] = []
        self._texts: list[str] = []  # text that became final with each token
        self._logprobs: list[TokenLogprob] = []
        self._finished = False
        self.stopped = False  # a stop string is complete: the output ends here
        self.cached_tokens = 0

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, step: SequenceStep) -> None:
        """Takes the tokens of a step, up to the end of a stop string."""
        assert not self._finished, "a finished output takes no tokens"
        if step.cached_tokens:
            self.cached_tokens = step.cached_tokens
        ids = step.token_ids
        if len(ids) == 1 and not self.stopped:
            self._texts.append(self._assembler.feed_one(ids[0]))
            self.ids.append(ids[0])
            self.stopped = self._assembler.stopped
            used = 1
        else:
            used = self._take_ids(ids)
        if self._wants_logprobs and step.logprobs:
            tops: Sequence[Sequence[tuple[int, float]]] = step.top or [()] * used
            pairs = zip(step.logprobs[:used], tops, strict=False)
            self._logprobs.extend(TokenLogprob(value, tuple(top)) for value, top in pairs)

    def replay(self, prefix: Prefix) -> None:
        """Takes tokens that an earlier attempt generated. Done before any step.

        Log probabilities that no checkpoint has went to the caller and are known to nobody else: NaN in the result.
        """
        used = self._take_ids(prefix.ids)
        if self._wants_logprobs:
            self._logprobs.extend((prefix.logprobs or [UNKNOWN] * used)[:used])

    def since(self, start: int) -> tuple[list[int], list[TokenLogprob]]:
        """The ids from `start` on, and their log probabilities where they are wanted: for a checkpoint."""
        return self.ids[start:], self._logprobs[start:]

    def finish(self) -> None:
        """The output has ended: what was held becomes the last token's text."""
        if self._finished:
            return
        self._finished = True
        rest = self._assembler.flush()
        if rest and self._texts:
            self._texts[-1] += rest

    @property
    def ready(self) -> int:
        """Tokens that may leave."""
        count = len(self.ids)
        return count - 1 if count and not self._finished and self._assembler.holding else count

    def response(self, start: int, stop: int) -> bytes:
        """Tokens start .. stop as a serialised GenerateResponse with a chunk."""
        message = admission_pb2.GenerateResponse()
        chunk = message.chunk
        chunk.first_index = start
        if stop - start == 1:
            chunk.token_ids.append(self.ids[start])
            chunk.text = self._texts[start]
        else:
            chunk.token_ids.extend(self.ids[start:stop])
            chunk.text = "".join(self._texts[start:stop])
        if self._logprobs:
            chunk.logprobs.extend(token_logprobs_to_proto(self._logprobs[start:stop]))
        return message.SerializeToString()

    def result(self, reason: FinishReason, usage: Usage) -> Result:
        """The whole output; `finish` was called."""
        assert self._finished, "a result is made of a finished output"
        return Result(
            text="".join(self._texts),
            token_ids=tuple(self.ids),
            text_lengths=tuple(len(text) for text in self._texts),
            finish_reason=reason,
            usage=usage,
            logprobs=tuple(self._logprobs),
        )

    def _take_ids(self, ids: Sequence[int]) -> int:
        assert not self._finished, "a finished output takes no tokens"
        made = self._assembler.feed(ids)
        self.ids.extend(ids[: made.used])
        at = 0
        for length in made.lengths:
            self._texts.append(made.text[at : at + length])
            at += length
        self.stopped = made.stopped
        return made.used
