"""A step-accurate engine without a model: real batching, chunked prefill and KV accounting, invented tokens.

`SimulatedCore` is pure: given the time at which a step begins it says what the step yields and when it ends, so the
same core runs under virtual time. `SimulatedEngine` sleeps until then and is what a worker drives.

The next token is a function of all tokens before it and of nothing else (but the seed, where one is set). So an output
is the same alone and in a batch, and a run resumed from any of its ids goes on as the uninterrupted run would have.

Memory is reserved as TensorRT-LLM does by default (GUARANTEED_NO_EVICT): a sequence joins the batch when prompt and
max_tokens fit beside what the others have reserved, and is never evicted. With `paged` it is handed out as sequences
grow, as OpenVINO GenAI and vLLM do: where a step needs more than there is, the newest sequence leaves the batch and is
computed again, all that it had given included, when there is room.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field

from laneway.core.errors import ConfigError
from laneway.core.lanes import FinishReason
from laneway.runtime.engine_options import EngineOptions
from laneway.runtime.engine_profile import load_profile
from laneway.runtime.step_price import FixedPace, ProfilePrice, StepPrice
from laneway.workers.engines.checks import check_request
from laneway.workers.engines.protocol import EngineCapacity, EngineRequest, EngineStats, SequenceStep
from laneway.workers.engines.simulated_prefix import BLOCK_TOKENS, PrefixCache

CHUNK_TOKENS_PACED = 512
CHUNK_TOKENS_PROFILE = 2048
SPACE = 0x20
# Their first bytes differ, so the bytes so far always say which one is being spelled.
WIDE_CHARACTERS = {c.encode()[0]: c.encode() for c in ("é", "Д", "漢", "ह", "👩", "‍")}


class InjectedCrash(Exception):
    """A fault that the options ask for: the engine dies here."""


class InjectedHang(Exception):
    """A fault that the options ask for: this step never ends."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    ends_s: float
    steps: list[SequenceStep]
    stats: EngineStats


@dataclass(slots=True)
class _Sequence:
    request: EngineRequest
    hash: int  # of the seed and all tokens so far
    tail: tuple[int, ...]  # the last three tokens
    blocks: list[int]  # hashes at the ends of whole blocks
    cached: int = 0
    computed: int = 0  # tokens whose KV is in the cache
    made: int = 0
    again: int = 0  # of these, tokens that are computed again with the prompt, since it was evicted

    @property
    def reserved(self) -> int:
        return len(self.request.prompt_ids) + self.request.max_tokens

    @property
    def prefill_left(self) -> int:
        return max(0, len(self.request.prompt_ids) + self.again - self.computed)

    @property
    def held(self) -> int:
        """Tokens of KV that it was handed out."""
        return max(self.computed, len(self.request.prompt_ids) + self.again)


@dataclass(slots=True)
class SimulatedCore:
    """Who shares a step, and what it yields. Time goes in and comes out as numbers."""

    capacity: EngineCapacity
    price: StepPrice
    options: EngineOptions
    eos_ids: frozenset[int] = frozenset()
    chunk_tokens: int = CHUNK_TOKENS_PACED
    _queue: list[_Sequence] = field(default_factory=list)
    _batch: dict[int, _Sequence] = field(default_factory=dict)
    _cancelled: list[int] = field(default_factory=list)
    _prefixes: PrefixCache = field(init=False)
    _steps: int = 0
    _busy_s: float = 0.0
    _prefilled: int = 0
    _decoded: int = 0
    evictions: int = 0

    def __post_init__(self) -> None:
        self._prefixes = PrefixCache(self.capacity.kv_tokens // BLOCK_TOKENS if self.options.prefix_cache else 0)

    def add(self, request: EngineRequest) -> None:
        check_request(request, self.capacity)
        seeded = request.seed is not None and request.temperature > 0.0
        state = _fold(request.seed or 0, 0) if seeded else 0
        blocks: list[int] = []
        for start in range(0, len(request.prompt_ids), BLOCK_TOKENS):
            block = request.prompt_ids[start : start + BLOCK_TOKENS]
            for token_id in block:
                state = _fold(state, token_id)
            if len(block) == BLOCK_TOKENS:
                blocks.append(state)
        sequence = _Sequence(request, state, request.prompt_ids[-3:], blocks)
        position = len(self._queue)  # higher priority first, equal ones in the order they came
        while position and self._queue[position - 1].request.priority < request.priority:
            position -= 1
        self._queue.insert(position, sequence)

    def abort(self, request_id: int) -> None:
        if self._batch.pop(request_id, None) is not None:
            self._cancelled.append(request_id)
            return
        queued = [s for s in self._queue if s.request.id != request_id]
        if len(queued) < len(self._queue):
            self._queue = queued
            self._cancelled.append(request_id)

    def busy(self) -> bool:
        return bool(self._batch or self._queue or self._cancelled)

    def stats(self) -> EngineStats:
        live = [*self._batch.values(), *self._queue]
        return EngineStats(
            running=len(self._batch),
            queued=len(self._queue),
            prefilling_tokens=sum(s.prefill_left for s in live),
            kv_tokens_used=sum(s.computed for s in self._batch.values()),
            steps=self._steps,
            busy_s=self._busy_s,
            prefilled_tokens=self._prefilled,
            decoded_tokens=self._decoded,
            decoding=sum(s.made > 0 and not s.prefill_left for s in self._batch.values()),
        )

    def step(self, now_s: float) -> StepOutcome:
        """One step that begins at `now_s`. Raises InjectedCrash or InjectedHang where the options ask for it."""
        out = [SequenceStep(i, [], finish=FinishReason.CANCELLED) for i in self._cancelled]
        self._cancelled.clear()
        self._admit()
        if not self._batch:
            return StepOutcome(now_s, out, self.stats())
        self._inject_at_step()
        self._evict()
        decoding = [s for s in self._batch.values() if not s.prefill_left]
        prefilling = self._prefill_pieces(len(decoding))
        if any(_holds(s.request, self.options.fault_crash_token_id) for s, _ in prefilling):
            raise InjectedCrash("fault_crash_token_id in a prompt")
        length_s = self.price.step_s([(s.computed, n) for s, n in prefilling], [s.computed for s in decoding])
        for sequence in decoding:
            sequence.computed += 1
            out.append(self._emit(sequence))
        for sequence, new_tokens in prefilling:
            sequence.computed += new_tokens
            self._prefilled += new_tokens
            if _holds(sequence.request, self.options.fault_error_token_id):
                del self._batch[sequence.request.id]
                message = "the engine failed on this prompt (a fault that was asked for)"
                out.append(SequenceStep(sequence.request.id, [], finish=FinishReason.ERROR, message=message))
            elif not sequence.prefill_left:
                self._prefixes.keep(sequence.blocks)
                out.append(self._emit(sequence))
        self._steps += 1
        self._busy_s += length_s
        self._decoded += sum(len(step.token_ids) for step in out)
        return StepOutcome(now_s + length_s, out, self.stats())

    def _admit(self) -> None:
        """In order: a sequence that does not fit yet holds back those behind it, so that it cannot starve."""
        paged = self.capacity.paged
        free = self.capacity.kv_tokens - sum(self._taken(s) if paged else s.reserved for s in self._batch.values())
        while self._queue and len(self._batch) < self.capacity.slots:
            sequence = self._queue[0]
            free -= self._taken(sequence) if paged else sequence.reserved
            if free < 0:
                break
            self._queue.pop(0)
            known = self._prefixes.found_tokens(sequence.blocks)
            if known == len(sequence.request.prompt_ids) + sequence.again:
                known -= BLOCK_TOKENS  # the last token is computed in any case, for it gives the first of the answer
            sequence.cached = sequence.computed = known
            self._batch[sequence.request.id] = sequence

    def _taken(self, sequence: _Sequence) -> int:
        """Tokens of KV that it must have in this step, in whole blocks."""
        block = self.capacity.block_tokens
        return -(-(sequence.held + (not sequence.prefill_left)) // block) * block

    def _evict(self) -> None:
        """Makes room for what the batch adds in this step. One sequence alone always has room."""
        if not self.capacity.paged:
            return
        while sum(map(self._taken, self._batch.values())) > self.capacity.kv_tokens:
            _, newest = self._batch.popitem()
            newest.computed, newest.again = 0, newest.made
            self._queue.insert(0, newest)
            self.evictions += 1

    def _prefill_pieces(self, decoding: int) -> list[tuple[_Sequence, int]]:
        budget = max(1, self.chunk_tokens - decoding)
        pieces: list[tuple[_Sequence, int]] = []
        for sequence in self._batch.values():
            if budget and (left := sequence.prefill_left):
                new_tokens = min(left, budget)
                budget -= new_tokens
                pieces.append((sequence, new_tokens))
        return pieces

    def _emit(self, sequence: _Sequence) -> SequenceStep:
        """The next token of a sequence; ends it when that was its last."""
        request = sequence.request
        draw = _mix(sequence.hash)
        token_id = self._ends_itself(sequence, draw)
        if token_id is None:
            token_id = _next_token(draw, sequence.tail, wide=self.options.alphabet == "unicode")
        cached = 0 if sequence.made else sequence.cached
        if token_id in request.stop_token_ids or (token_id in self.eos_ids and not request.ignore_eos):
            self._end(sequence)
            logprobs: list[float] | None = [] if request.logprobs else None
            return SequenceStep(request.id, [], logprobs, finish=FinishReason.STOP, cached_tokens=cached)
        sequence.made += 1
        sequence.hash = _fold(sequence.hash, token_id)
        sequence.tail = (*sequence.tail[-2:], token_id)
        if (len(request.prompt_ids) + sequence.made) % BLOCK_TOKENS == 0:
            sequence.blocks.append(sequence.hash)
        step = SequenceStep(request.id, [token_id], cached_tokens=cached)
        if sequence.made >= request.max_tokens:
            step.finish = FinishReason.LENGTH
            self._end(sequence)
        if request.logprobs:
            step.logprobs = [_logprob(draw)]
            if request.top_logprobs:
                step.top = [_top(token_id, _logprob(draw), request.top_logprobs)]
        return step

    def _end(self, sequence: _Sequence) -> None:
        del self._batch[sequence.request.id]
        self._prefixes.keep(sequence.blocks[: sequence.computed // BLOCK_TOKENS])

    def _ends_itself(self, sequence: _Sequence, draw: int) -> int | None:
        mean = self.options.eos_mean_tokens
        request = sequence.request
        if not (mean and self.eos_ids) or request.ignore_eos or sequence.made < request.min_tokens:
            return None
        return min(self.eos_ids) if (draw >> 32) / 2**32 < 1.0 / mean else None

    def _inject_at_step(self) -> None:
        if self._steps + 1 == self.options.fault_crash_step:
            raise InjectedCrash("fault_crash_step reached")
        if self._steps + 1 == self.options.fault_hang_step:
            raise InjectedHang("fault_hang_step reached")


class SimulatedEngine:
    """The StepEngine in real time. Steps that follow each other keep an absolute schedule, so a pace does not drift."""

    # A later start than this after the last end is an idle gap or an overloaded host: it is not made up for.
    CATCH_UP_S = 0.05

    def __init__(self, core: SimulatedCore) -> None:
        self._core = core
        self._ended_s = float("-inf")

    def load(self) -> EngineCapacity:
        return self._core.capacity

    def add(self, request: EngineRequest) -> None:
        if not self._core.busy():
            self._ended_s = float("-inf")
        self._core.add(request)

    def abort(self, request_id: int) -> None:
        self._core.abort(request_id)

    def busy(self) -> bool:
        return self._core.busy()

    def step(self) -> tuple[list[SequenceStep], EngineStats]:
        now_s = time.monotonic()
        start_s = self._ended_s if now_s - self._ended_s < self.CATCH_UP_S else now_s
        try:
            outcome = self._core.step(start_s)
        except InjectedCrash as fault:
            print(f"crashing: {fault}", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
            raise
        except InjectedHang as fault:
            print(f"hanging: {fault}", file=sys.stderr, flush=True)
            threading.Event().wait()
            raise
        self._ended_s = outcome.ends_s
        time.sleep(max(0.0, outcome.ends_s - time.monotonic()))
        return outcome.steps, outcome.stats

    def close(self) -> None:
        pass


def make_core(capacity: EngineCapacity, eos_ids: frozenset[int], options: EngineOptions) -> SimulatedCore:
    """The core for a pool's figures; a profile may hold less KV cache than the pool asks for. Raises ConfigError."""
    if options.alphabet not in ("words", "unicode"):
        raise ConfigError(f'alphabet = "{options.alphabet}": must be "words" or "unicode"')
    if capacity.vocabulary_size < 256:
        raise ConfigError(f"the simulated engine spells bytes; a vocabulary of {capacity.vocabulary_size} is too small")
    price: StepPrice
    block_tokens = 1
    if options.profile:
        profile = load_profile(options.profile)
        price = ProfilePrice(profile)
        chunk = options.prefill_chunk_tokens or profile.chunk_tokens or CHUNK_TOKENS_PROFILE
        kv_tokens = min(capacity.kv_tokens, profile.kv_capacity_tokens)
        block_tokens = profile.engine.block_tokens if profile.engine is not None else 1
    else:
        price = FixedPace(options.pace_s)
        chunk = options.prefill_chunk_tokens or CHUNK_TOKENS_PACED
        kv_tokens = capacity.kv_tokens
    capacity = EngineCapacity(
        capacity.slots,
        kv_tokens,
        capacity.context_length,
        capacity.vocabulary_size,
        block_tokens,
        chunk_tokens=chunk,
        paged=options.paged,
    )
    return SimulatedCore(capacity, price, options, eos_ids, chunk)


def _holds(request: EngineRequest, fault_token_id: int) -> bool:
    return fault_token_id >= 0 and fault_token_id in request.prompt_ids


_MASK = 2**64 - 1


def _fold(state: int, token_id: int) -> int:
    return (state * 0x5851F42D4C957F2D + token_id + 1) & _MASK


def _mix(state: int) -> int:
    """splitmix64's finaliser: neighbours give unrelated draws."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def _next_token(draw: int, tail: tuple[int, ...], *, wide: bool) -> int:
    if wide:
        for length in range(1, len(tail) + 1):
            character = WIDE_CHARACTERS.get(tail[-length])
            if character is not None and length < len(character) and tuple(character[:length]) == tail[-length:]:
                return character[length]
        if draw % 4 == 1:
            return list(WIDE_CHARACTERS)[(draw >> 8) % len(WIDE_CHARACTERS)]
    if draw % 6 == 0 and tail[-1] != SPACE:
        return SPACE
    return 0x61 + (draw >> 16) % 26


def _logprob(draw: int) -> float:
    return -((draw >> 40) % 2000) / 1000.0


def _top(token_id: int, logprob: float, count: int) -> list[tuple[int, float]]:
    """The chosen one first, then letters that follow it, each less likely."""
    others = [i for i in range(0x61, 0x7B) if i != token_id]
    return [(token_id, logprob), *((i, logprob - 0.5 * (n + 1)) for n, i in enumerate(others[: count - 1]))]
