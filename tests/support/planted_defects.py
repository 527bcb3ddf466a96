"""Engines that are sound but for one thing: what the conformance kit must find."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from msgspec.structs import replace

from laneway.core.catalogue import Capabilities
from laneway.core.lanes import FinishReason
from laneway.workers.conformance.listener import in_our_words
from laneway.workers.engines.protocol import (
    EngineCapacity,
    EngineRequest,
    EngineStartError,
    EngineStats,
    SequenceStep,
    StepSink,
)
from laneway.workers.engines.simulated_inline import InlineEngine

END_TOKEN = 257  # of the tokenizer of bytes


class Sound:
    """Passes everything on, both ways, and knows what is live. A defect is a class that changes one method of it."""

    def __init__(self, inner: InlineEngine, number: int) -> None:
        self.inner = inner
        self.number = number  # of this engine: 1 for the first that the kit made, 2 for the one in its place
        self.sink: StepSink | None = None
        self.live: dict[int, EngineRequest] = {}
        self.told: dict[int, int] = {}  # ids told of each live sequence
        self.capacity = EngineCapacity(1, 1, 1, 1)

    async def start(self, sink: StepSink) -> EngineCapacity:
        self.sink = sink
        self.capacity = await self.inner.start(self)
        return self.capacity

    def capabilities(self) -> Capabilities:
        return self.inner.capabilities()

    def submit(self, request: EngineRequest) -> None:
        self.inner.submit(request)
        self.live[request.id] = request
        self.told[request.id] = 0

    def together(self) -> AbstractContextManager[None]:
        return self.inner.together()

    def abort(self, request_id: int) -> None:
        self.inner.abort(request_id)

    def stats(self) -> EngineStats:
        return self.inner.stats()

    async def drain(self, timeout_s: float) -> bool:
        return await self.inner.drain(timeout_s)

    async def close(self) -> None:
        await self.inner.close()

    # the inner engine's sink

    def on_step(self, steps: Sequence[SequenceStep], stats: EngineStats) -> None:
        changed = [self.changed(step) for step in steps]
        for step in steps:
            self.told[step.id] += len(step.token_ids)
            if step.finish is not None:
                del self.live[step.id]
        self.tell(changed, self.counted(stats))

    def on_closed(self, reason: str) -> None:
        assert self.sink is not None
        self.sink.on_closed(reason)

    def tell(self, steps: Sequence[SequenceStep], stats: EngineStats) -> None:
        assert self.sink is not None
        self.sink.on_step(steps, stats)

    # what most defects change

    def changed(self, step: SequenceStep) -> SequenceStep:
        """A delta as it is told; its sequence is live still."""
        return step

    def counted(self, stats: EngineStats) -> EngineStats:
        return stats


# --- streams -----------------------------------------------------------------------------------------


class LastChunkLost(Sound):
    def changed(self, step):
        return replace(step, token_ids=[], logprobs=None) if step.finish is FinishReason.LENGTH else step


class HeldTailLost(Sound):
    """Holds the newest id back, as who looks for stop strings does, and forgets it where a stop token ends the run."""

    def __init__(self, inner, number):
        super().__init__(inner, number)
        self.held: dict[int, list[int]] = {}

    def changed(self, step):
        ready = [*self.held.pop(step.id, []), *step.token_ids]
        if step.finish is None:
            self.held[step.id] = ready[-1:]
            ready = ready[:-1]
        elif step.finish is FinishReason.STOP:
            ready = []
        return replace(step, token_ids=ready, logprobs=None)


class AllAtTheEnd(HeldTailLost):
    """Gives a whole answer with its end; a long one as it is made, or the test would take long."""

    def changed(self, step):
        if self.live[step.id].max_tokens > 100:
            return step
        ready = [*self.held.pop(step.id, []), *step.token_ids]
        if step.finish is None:
            self.held[step.id], ready = ready, []
        return replace(step, token_ids=ready)


class FinishToldTwice(Sound):
    def tell(self, steps, stats):
        super().tell(steps, stats)
        if ended := [step for step in steps if step.finish is not None]:
            super().tell([replace(step, token_ids=[], logprobs=None) for step in ended], stats)


class DeltaAfterFinish(Sound):
    def tell(self, steps, stats):
        super().tell(steps, stats)
        if ended := [step for step in steps if step.finish is FinishReason.LENGTH]:
            super().tell([SequenceStep(step.id, []) for step in ended], stats)


class TokenAfterAbort(Sound):
    """The step that ran when an abort was answered still gives its token."""

    def tell(self, steps, stats):
        super().tell(steps, stats)
        if aborted := [step for step in steps if step.finish is FinishReason.CANCELLED]:
            super().tell([SequenceStep(step.id, [97]) for step in aborted], stats)


class OneCallPerSequence(Sound):
    def tell(self, steps, stats):
        for step in steps:
            super().tell([step], stats)


class EndTokenGiven(Sound):
    def changed(self, step):
        request = self.live[step.id]
        by_itself = step.finish is FinishReason.STOP and not request.stop_token_ids
        return replace(step, token_ids=[*step.token_ids, END_TOKEN]) if by_itself else step


class CompanyShows(Sound):
    """Arithmetic that depends on the batch."""

    def submit(self, request):
        drawn = (
            replace(request, temperature=1.0, seed=len(self.live)) if self.live and not request.temperature else None
        )
        super().submit(drawn or request)


class ResumeRepeatsToken(Sound):
    """Takes the last id of a prompt that goes on from an earlier one for its first answer."""

    def __init__(self, inner, number):
        super().__init__(inner, number)
        self.prompts: set[tuple[int, ...]] = set()
        self.late: dict[int, int] = {}  # ids that are told one call later

    def submit(self, request):
        if any(request.prompt_ids[: len(prompt)] == prompt != request.prompt_ids for prompt in self.prompts):
            self.late[request.id] = request.prompt_ids[-1]
        self.prompts.add(request.prompt_ids)
        super().submit(request)

    def changed(self, step):
        if step.id not in self.late or not step.token_ids:
            return step
        first, self.late[step.id] = self.late[step.id], step.token_ids[-1]
        return replace(step, token_ids=[first, *step.token_ids[:-1]])


# --- texts -------------------------------------------------------------------------------------------


class SplitCharacters(Sound):
    """Decodes the ids of each step by themselves, and encodes the text again."""

    def changed(self, step):
        data = bytes(i for i in step.token_ids if i < 256)
        return replace(step, token_ids=list(data.decode(errors="replace").encode()))


class LongRunsSwapIds(Sound):
    """Runs that may get long take another path, which gives two ids in the wrong order."""

    def __init__(self, inner, number):
        super().__init__(inner, number)
        self.kept: dict[int, list[int]] = {}

    def changed(self, step):
        if self.live[step.id].max_tokens <= 100 or step.finish is not None:
            return step
        if self.told[step.id] == 10:
            self.kept[step.id] = step.token_ids
            return replace(step, token_ids=[])
        return replace(step, token_ids=[*step.token_ids, *self.kept.pop(step.id, [])])


# --- sampling ----------------------------------------------------------------------------------------


class LogprobsMissing(Sound):
    def changed(self, step):
        return replace(step, logprobs=None)


class LogprobForEverySecondId(Sound):
    def changed(self, step):
        return replace(step, logprobs=[]) if step.logprobs and self.told[step.id] % 2 else step


class ProbabilitiesForLogprobs(Sound):
    def changed(self, step):
        return replace(step, logprobs=[2.718**p for p in step.logprobs]) if step.logprobs else step


class OneAlternativeShort(Sound):
    def changed(self, step):
        return replace(step, top=[top[:-1] for top in step.top]) if step.top else step


class SeedIgnored(Sound):
    def submit(self, request):
        super().submit(replace(request, seed=request.id) if request.temperature else request)


class OneSeedForAll(Sound):
    def submit(self, request):
        super().submit(replace(request, seed=1) if request.temperature else request)


class SeedOfCompany(Sound):
    """One generator for a batch."""

    def submit(self, request):
        super().submit(replace(request, seed=request.seed + len(self.live)) if request.seed is not None else request)


class SeedDrawsFromTheStart(Sound):
    """Draws as at the first id of an answer, however much of it the prompt holds."""

    def submit(self, request):
        super().submit(
            replace(request, seed=request.seed + len(request.prompt_ids)) if request.seed is not None else request
        )


class PriorityIgnored(Sound):
    def submit(self, request):
        super().submit(replace(request, priority=0.5))


class UnknownAbilityIgnored(Sound):
    def submit(self, request):
        super().submit(replace(request, logit_bias={}))


# --- limits ------------------------------------------------------------------------------------------


class LongPromptCut(Sound):
    """Takes the end of a prompt that does not fit the context."""

    def submit(self, request):
        room = max(1, self.capacity.context_length - max(1, request.max_tokens))
        super().submit(replace(request, prompt_ids=request.prompt_ids[-room:]))


class PromptCutInside(Sound):
    """A limit of its own below the context length, that nobody is told of."""

    def submit(self, request):
        super().submit(replace(request, prompt_ids=request.prompt_ids[-256:]))


class ContextOneShort(Sound):
    def submit(self, request):
        full = len(request.prompt_ids) + request.max_tokens == self.capacity.context_length
        super().submit(replace(request, max_tokens=request.max_tokens + 1) if full else request)


class BadRequestEndsEngine(Sound):
    def changed(self, step):
        if step.finish is FinishReason.ERROR:
            self.inner.crash("a step raised")
        return step


class BadRequestEndsOthers(Sound):
    """A step that raises fails all that share it."""

    def changed(self, step):
        if step.finish is FinishReason.ERROR:
            for request_id in self.live.keys() - {step.id}:
                self.inner.abort(request_id)
        return step


class WordsOfALibrary(Sound):
    def changed(self, step):
        words = f"Check 'max_tokens > 0' failed at src/generation_config.cpp:204: {step.message}"
        assert not in_our_words(words)
        return replace(step, message=words) if step.finish is FinishReason.ERROR else step


class CachedBeyondPrompt(Sound):
    """Counts whole blocks, the last one too where the prompt ends inside it."""

    def changed(self, step):
        prompt = len(self.live[step.id].prompt_ids)
        return replace(step, cached_tokens=(prompt // 32 + 1) * 32) if step.cached_tokens else step


class CacheUntold(Sound):
    def changed(self, step):
        return replace(step, cached_tokens=0)


# --- aborts ------------------------------------------------------------------------------------------


class AbortIgnored(Sound):
    def abort(self, request_id):
        pass


class AbortWaitsForFirstToken(Sound):
    """Looks for aborts only among sequences that decode."""

    def __init__(self, inner, number):
        super().__init__(inner, number)
        self.wanted: set[int] = set()

    def abort(self, request_id: int) -> None:
        if self.told.get(request_id):
            super().abort(request_id)
        else:
            self.wanted.add(request_id)

    def changed(self, step):
        if step.id in self.wanted and step.token_ids:
            self.inner.abort(step.id)
        return step


class AbortWaitsForPrefill(AbortWaitsForFirstToken):
    """The like, but what is in the queue is found."""

    def abort(self, request_id: int) -> None:
        if self.inner.stats().queued:
            self.inner.abort(request_id)
        else:
            super().abort(request_id)


class AbortOfEndedStrikesNext(Sound):
    """Keeps the mark of an abort that found nothing."""

    marked = False

    def abort(self, request_id):
        self.marked = self.marked or (request_id not in self.live and request_id in self.told)
        super().abort(request_id)

    def submit(self, request):
        super().submit(request)
        if self.marked:
            self.marked = False
            self.inner.abort(request.id)


class AbortOfUnknownEndsAll(Sound):
    def abort(self, request_id):
        for live in [request_id] if request_id in self.live else list(self.live):
            super().abort(live)


class AbortsDropped(Sound):
    """Has room for so many aborts between two steps."""

    aborts = 0

    def abort(self, request_id):
        self.aborts += 1
        if self.aborts <= 64:
            super().abort(request_id)

    def on_step(self, steps, stats):
        self.aborts = 0
        super().on_step(steps, stats)


# --- counts ------------------------------------------------------------------------------------------


class SlotLeaked(Sound):
    """Counts by hand, and forgets to take off what was aborted."""

    leaked = 0

    def changed(self, step):
        self.leaked += step.finish is FinishReason.CANCELLED
        return step

    def counted(self, stats):
        return replace(stats, running=stats.running + self.leaked)


class KvLeaked(Sound):
    """Blocks of aborted sequences never come back."""

    leaked = 0

    def changed(self, step):
        self.leaked += 32 * (step.finish is FinishReason.CANCELLED)
        return step

    def stats(self):
        stats = super().stats()
        return replace(stats, kv_tokens_used=stats.kv_tokens_used + self.leaked)


class CountersFall(Sound):
    """A register of too few bits."""

    def counted(self, stats):
        return replace(stats, prefilled_tokens=stats.prefilled_tokens % 512)


class TokensCountedTwice(Sound):
    """Counts the last token of each run once more."""

    more = 0

    def changed(self, step):
        self.more += step.finish is FinishReason.LENGTH
        return step

    def counted(self, stats):
        return replace(stats, decoded_tokens=stats.decoded_tokens + self.more)


class SubmittedUncounted(Sound):
    """Says what its last step said, whatever was submitted since."""

    last = EngineStats()

    def counted(self, stats):
        self.last = stats
        return stats

    def stats(self):
        return self.last


# --- life --------------------------------------------------------------------------------------------


class DrainReturnsEarly(Sound):
    async def drain(self, timeout_s):
        return True


class DeathToldTwice(Sound):
    """The watcher of its process and the reader of its socket both tell."""

    def on_closed(self, reason):
        super().on_closed(reason)
        super().on_closed(reason)


class DeathUntold(Sound):
    def on_closed(self, reason):
        pass


class NewEngineForgetsLastId(Sound):
    """The engine in place of one that died leaves out the last id it is given."""

    def submit(self, request):
        forgets = self.number > 1 and len(request.prompt_ids) > 1
        super().submit(replace(request, prompt_ids=request.prompt_ids[:-1]) if forgets else request)


class StartsOnce(Sound):
    """Leaves something behind that the next one trips over."""

    async def start(self, sink):
        if self.number > 1:
            raise EngineStartError("the port is taken")
        return await super().start(sink)


class CloseToldAsDeath(Sound):
    async def close(self):
        await super().close()
        self.on_closed("the process ended")
