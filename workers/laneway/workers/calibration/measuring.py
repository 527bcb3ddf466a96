"""Measures an engine from end to end: how long it loads, prefills, decodes and lets go, and what it holds.

One thing after the other on an engine that has nothing else to do; each prompt is new to it, so that its prefix cache
finds only what it is meant to find. What would take too long at the rate found so far is left out, and said.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from statistics import median, quantiles

from msgspec import Struct

from laneway.core.clock import Clock
from laneway.policy.step_fit import StepSeen
from laneway.workers.calibration.probe import CalibrationFailed, Probe, Trial
from laneway.workers.calibration.sizes import Sizes, sizes_of
from laneway.workers.engines.protocol import Engine, EngineCapacity

CHUNK_GUESS = 64  # prompt tokens of a step, where an engine does not say: makes room for more steps than are needed
FILL_PROMPT_TOKENS = 8  # of sequences that only reserve
FILL_STEPS = 8


class Point(Struct, frozen=True):
    """One thing, measured several times. Seconds."""

    samples_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return median(self.samples_s)

    @property
    def spread(self) -> float:
        """What lies between the quarters of its samples, as a share of the median."""
        if len(self.samples_s) < 2 or not self.median_s:
            return 0.0
        low, _, high = quantiles(self.samples_s, n=4, method="inclusive")
        return (high - low) / self.median_s


class DecodePoint(Struct, frozen=True):
    point: Point
    context_tokens: float  # that all sequences held together, on average of the window


class Measured(Struct, frozen=True):
    """What was found."""

    capacity: EngineCapacity
    load_s: float
    prefill: dict[int, Point]  # by prompt tokens
    prefixed: dict[tuple[int, int], Point]  # by cached and new tokens
    decode: dict[tuple[int, int], DecodePoint]  # by batch and context
    aborts: dict[str, Point]  # queued, prefilling, decoding
    steps: tuple[StepSeen, ...]
    chunk_tokens: int
    kv_filled_tokens: int

    @property
    def spread(self) -> float:
        """Three of four points are spread no more than this."""
        points = [*self.prefill.values(), *self.prefixed.values(), *(each.point for each in self.decode.values())]
        spreads = [point.spread for point in points]
        return quantiles(spreads, n=4, method="inclusive")[2] if len(spreads) > 1 else max(spreads, default=0.0)


class Calibration:
    """`run` once, on an engine that was not started yet; the caller closes it."""

    def __init__(
        self, engine: Engine, probe: Probe, clock: Clock, say: Callable[[str], None], *, quick: bool = False
    ) -> None:
        self._engine = engine
        self._probe = probe
        self._clock = clock
        self._say = say
        self._quick = quick
        self._prefill_tokens_per_s = 0.0
        self._capacity: EngineCapacity
        self._sizes: Sizes

    async def run(self) -> Measured:
        """Raises EngineStartError, or CalibrationFailed."""
        load_s, self._capacity = await self._probe.start(self._engine)
        prefix_cache = self._engine.capabilities().prefix_cache
        self._sizes = sizes_of(self._capacity, prefix_cache=prefix_cache, quick=self._quick)
        self._say(
            f"loaded in {load_s:.1f} s: {self._capacity.slots} sequences, {self._capacity.kv_tokens} tokens of KV"
        )
        prefill = await self._prefill()
        prefixed = await self._prefixed()
        decode = await self._decode()
        aborts = {
            "queued": await self._aborts("queued", self._abort_queued),
            "prefilling": await self._aborts("prefilling", self._abort_prefilling),
            "decoding": await self._aborts("decoding", self._abort_decoding),
        }
        filled = await self._fill()
        if not decode:
            raise CalibrationFailed("no batch could be measured: the KV of the pool holds none of the sizes tried")
        return Measured(
            self._capacity, load_s, prefill, prefixed, decode, aborts, tuple(self._probe.seen),
            self._capacity.chunk_tokens or self._probe.chunk_tokens, filled,
        )  # fmt: skip

    # --- prompts -------------------------------------------------------------------------------------

    async def _prefill(self) -> dict[int, Point]:
        await self._probe.run(self._probe.prompt(self._sizes.prompts[0]))  # the first may build what later ones find
        found: dict[int, Point] = {}
        for tokens in self._sizes.prompts:
            if found and self._prefill_s(tokens) > self._sizes.cell_s_max:
                self._say(f"prefill of {tokens} tokens: left out, it would take {self._prefill_s(tokens):.0f} s")
                continue
            trials = [await self._probe.run(self._probe.prompt(tokens)) for _ in range(self._sizes.repeats)]
            point = found[tokens] = Point(tuple(trial.prefill_s for trial in trials))
            self._prefill_tokens_per_s = tokens / point.median_s
            self._say(f"prefill of {tokens} tokens: {_words(point)}, {tokens / point.median_s:.0f} tokens/s")
        return found

    async def _prefixed(self) -> dict[tuple[int, int], Point]:
        found: dict[tuple[int, int], Point] = {}
        for prefix_tokens in self._sizes.prefixes:
            if self._prefill_s(prefix_tokens) > self._sizes.cell_s_max:
                continue
            prefix = self._probe.prompt(prefix_tokens)
            await self._probe.run((*prefix, *self._probe.prompt(1)))
            for tail in self._sizes.tails:
                trials = [
                    await self._probe.run((*prefix, *self._probe.prompt(tail))) for _ in range(self._sizes.repeats)
                ]
                point = found[prefix_tokens, tail] = Point(tuple(trial.prefill_s for trial in trials))
                self._say(f"prefill of {tail} tokens after {prefix_tokens} cached ones: {_words(point)}")
        return found

    def _prefill_s(self, tokens: int) -> float:
        return tokens / self._prefill_tokens_per_s if self._prefill_tokens_per_s else 0.0

    # --- batches -------------------------------------------------------------------------------------

    async def _decode(self) -> dict[tuple[int, int], DecodePoint]:
        found: dict[tuple[int, int], DecodePoint] = {}
        for batch in self._sizes.batches:
            for context in self._sizes.contexts:
                cell = await self._decode_cell(batch, context)
                if cell is not None:
                    found[batch, context] = cell
                    self._say(f"decode of {batch} x {context} tokens: {_words(cell.point)} a step")
        return found

    async def _decode_cell(self, batch: int, context: int) -> DecodePoint | None:
        """A batch in which every sequence has about that context; None where it has no room, or takes too long."""
        window = self._sizes.window_steps
        prompt_tokens = max(1, context - window // 2)
        joining_steps = -(-batch * prompt_tokens // (self._capacity.chunk_tokens or CHUNK_GUESS)) + batch
        max_tokens = window + joining_steps + 4
        if not self._has_room(batch, prompt_tokens + max_tokens):
            return None
        if self._prefill_s(batch * prompt_tokens) > self._sizes.cell_s_max:
            return None
        trials = [self._probe.submit(self._probe.prompt(prompt_tokens), max_tokens) for _ in range(batch)]
        await self._probe.until(lambda: all(trial.began for trial in trials))
        seen, mark = self._probe.seen, len(self._probe.seen)
        await self._probe.until(lambda: len(seen) - mark >= window or any(trial.ended for trial in trials))
        await self._probe.end(trials)
        steps = [step for step in seen[mark:] if step.sequences == batch and not step.prompt_tokens]
        if len(steps) < window // 2:
            return None
        contexts = sum(step.context_tokens for step in steps) / len(steps)
        return DecodePoint(Point(tuple(step.length_s for step in steps)), contexts)

    def _has_room(self, sequences: int, tokens: int) -> bool:
        block, capacity = self._capacity.block_tokens, self._capacity
        reserved = sequences * (-(-tokens // block) * block)
        return tokens <= capacity.context_length and sequences <= capacity.slots and reserved <= capacity.kv_tokens

    # --- aborts --------------------------------------------------------------------------------------

    async def _aborts(self, what: str, once: Callable[[], Awaitable[float | None]]) -> Point:
        samples = [sample for _ in range(self._sizes.repeats) if (sample := await once()) is not None]
        point = Point(tuple(samples) or (0.0,))
        self._say(f"abort while {what}: {_words(point) if samples else 'not seen in time'}")
        return point

    async def _abort_decoding(self) -> float | None:
        trial = self._probe.submit(self._probe.prompt(16), self._room_to_decode())
        await self._probe.until(lambda: trial.made >= 3 or trial.ended)
        return await self._abort(trial)

    async def _abort_prefilling(self) -> float | None:
        """Of a prompt that takes several steps, once the first is done."""
        chunk = self._capacity.chunk_tokens or self._probe.chunk_tokens
        tokens = min(8 * chunk, self._capacity.context_length - 2, self._capacity.kv_tokens - 2)
        trial = self._probe.submit(self._probe.prompt(tokens), 1)
        steps = self._probe.stats.steps
        await self._probe.until(lambda: trial.ended or self._probe.stats.steps > steps)
        return await self._abort(trial)

    async def _abort_queued(self) -> float | None:
        """One more than there are slots."""
        running = [
            self._probe.submit(self._probe.prompt(16), self._room_to_decode()) for _ in range(self._capacity.slots)
        ]
        await self._probe.until(lambda: any(trial.began for trial in running))
        trial = self._probe.submit(self._probe.prompt(16), 1)
        steps = self._probe.stats.steps
        await self._probe.until(lambda: self._probe.stats.steps > steps + 1 or trial.ended)
        latency_s = await self._abort(trial)
        await self._probe.end(running)
        return latency_s

    async def _abort(self, trial: Trial) -> float | None:
        if trial.ended:
            return None
        asked_s = self._clock.monotonic()
        await self._probe.end([trial])
        return trial.ended_s - asked_s

    def _room_to_decode(self) -> int:
        """Tokens that each of a full batch of short prompts may make."""
        each = self._capacity.kv_tokens // self._capacity.slots // self._capacity.block_tokens
        return max(1, min(self._capacity.context_length - 16, each * self._capacity.block_tokens - 16, 512))

    # --- memory --------------------------------------------------------------------------------------

    async def _fill(self) -> int:
        """Tokens of KV that so many sequences as there are slots held in one step; 0: slots and context cannot fill it,
        or it would take too long. Nothing else runs, so nothing is harmed where the engine has less than it says."""
        capacity = self._capacity
        each = capacity.kv_tokens // capacity.block_tokens // capacity.slots * capacity.block_tokens
        joining_steps = capacity.slots * each // (capacity.chunk_tokens or CHUNK_GUESS) + capacity.slots
        prompt_tokens = each - joining_steps - FILL_STEPS if capacity.paged else FILL_PROMPT_TOKENS
        if each > capacity.context_length or not 0 < prompt_tokens < each - FILL_STEPS:
            self._say("KV: taken as the engine says, since its slots cannot fill it")
            return 0
        if self._prefill_s(capacity.slots * prompt_tokens) > 2 * self._sizes.cell_s_max:
            self._say("KV: taken as the engine says, since filling it would take long")
            return 0
        seen, mark = self._probe.seen, len(self._probe.seen)
        trials = [
            self._probe.submit(self._probe.prompt(prompt_tokens), each - prompt_tokens) for _ in range(capacity.slots)
        ]
        await self._probe.until(lambda: all(t.began for t in trials) or any(t.ended for t in trials))
        begun = len(seen)
        await self._probe.until(lambda: len(seen) - begun >= FILL_STEPS // 2 or any(t.ended for t in trials))
        await self._probe.end(trials)
        most = max((s.context_tokens if capacity.paged else s.sequences * each for s in seen[mark:]), default=0)
        self._say(f"KV: {most} of {capacity.kv_tokens} tokens were held at once")
        return most


def _words(point: Point) -> str:
    return f"{point.median_s * 1e3:.1f} ms (spread {point.spread:.0%})"
