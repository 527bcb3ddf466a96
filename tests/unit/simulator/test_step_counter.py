"""The simulator's engine against the simulated engine of the workers: the same first tokens and ends."""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laneway.core.fleet import StepTimes
from laneway.core.lanes import FinishReason
from laneway.runtime.engine_options import EngineOptions
from laneway.runtime.engine_profile import load_profile
from laneway.runtime.step_price import FixedPace, LinearPrice, ProfilePrice
from laneway.simulator.engine import DONE, EVICTED, FIRST, Engine, Work
from laneway.workers.engines.protocol import EngineCapacity, EngineRequest, EngineStats
from laneway.workers.engines.simulated import SimulatedCore

BLOCK = 32
REL = 1e-9  # of times: what rounding leaves of a sum of some thousand steps
EOS = 259
PROFILE = ProfilePrice(load_profile("h100-8b-fp8"))
LINEAR = LinearPrice(StepTimes(0.004, 5e-5, 2e-8, 1.6e-5))
PRICES = {"profile": PROFILE, "linear": LINEAR, "pace": FixedPace(0.01)}


@dataclass(frozen=True)
class Ask:
    at_s: float
    prompt: tuple[int, ...]
    output: int
    priority: float = 0.5
    abort_s: float = math.inf
    room: int = 0  # that it may take beyond its output


@dataclass(frozen=True)
class Size:
    slots: int = 8
    kv_tokens: int = 4096
    chunk: int = 128
    paged: bool = False
    prefix: bool = False


@dataclass
class Seen:
    """By request."""

    first_s: dict[int, float] = field(default_factory=dict)
    end_s: dict[int, float] = field(default_factory=dict)
    made: dict[int, int] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    evictions: int = 0
    totals: tuple[int, int, int] = (0, 0, 0)
    busy_s: float = 0.0


# Begin and end of a step, and the core's figures before it.
Look = tuple[float, float, EngineStats]


class Ending(SimulatedCore):
    """Ends an answer by itself after the length that is asked for here: some of what is reserved is not used."""

    __slots__ = ("lengths",)
    lengths: dict[int, int]

    def _ends_itself(self, sequence, draw):
        return EOS if sequence.made == self.lengths[sequence.request.id] - 1 else None


def core_of(size: Size, price, asks: list[Ask]) -> SimulatedCore:
    capacity = EngineCapacity(size.slots, size.kv_tokens, 10**6, 260, BLOCK, size.chunk, size.paged)
    core = Ending(capacity, price, EngineOptions(prefix_cache=size.prefix), frozenset([EOS]), size.chunk)
    core.lengths = {i: ask.output if ask.room else 0 for i, ask in enumerate(asks)}  # the last token is then the EOS
    return core


def step_by_step(asks: list[Ask], size: Size, price, looks: list[Look] | None = None) -> Seen:
    """Joins and aborts take effect between steps; the rest is the core's."""
    core, seen, now_s = core_of(size, price, asks), Seen(), 0.0
    acts = [(ask.at_s, 0, i) for i, ask in enumerate(asks)]
    acts += [(ask.abort_s, 1, i) for i, ask in enumerate(asks) if ask.abort_s < math.inf]
    heapq.heapify(acts)
    while acts or core.busy():
        if not core.busy():
            now_s = max(now_s, acts[0][0])
        while acts and acts[0][0] <= now_s:
            _, abort, i = heapq.heappop(acts)
            if abort:
                core.abort(i)
            else:
                core.add(EngineRequest(i, asks[i].prompt, asks[i].output + asks[i].room, priority=asks[i].priority))
        begin_s, before = now_s, core.stats()
        outcome = core.step(now_s)
        now_s = outcome.ends_s
        if looks is not None:
            looks.append((begin_s, now_s, before))
        for step in outcome.steps:
            gone = step.finish is FinishReason.CANCELLED
            made = len(step.token_ids) + (step.finish is FinishReason.STOP)
            if not gone and step.id not in seen.first_s:
                seen.first_s[step.id] = now_s
                seen.cached[step.id] = step.cached_tokens
            seen.made[step.id] = seen.made.get(step.id, 0) + made
            if step.finish is not None and not gone:
                seen.end_s[step.id] = now_s
    stats = core.stats()
    seen.evictions, seen.busy_s = core.evictions, stats.busy_s
    seen.totals = stats.steps, stats.prefilled_tokens, sum(seen.made.values())
    return seen


def in_runs(asks: list[Ask], size: Size, price, blocks: list[list[int]] | None = None) -> Seen:
    """As the world drives it: what is asked in the order of time, and the engine's events when it says."""
    seen = Seen()
    engine = Engine(
        price, slots=size.slots, kv_tokens=size.kv_tokens, chunk_tokens=size.chunk, block_tokens=BLOCK,
        paged=size.paged, prefix_blocks=size.kv_tokens // BLOCK if size.prefix else 0,
    )  # fmt: skip
    works = [
        Work(i, len(ask.prompt), ask.output, len(ask.prompt) + ask.output + ask.room, ask.priority,
             blocks[i] if blocks else None)
        for i, ask in enumerate(asks)
    ]  # fmt: skip
    acts = [(ask.at_s, 0, i) for i, ask in enumerate(asks)]
    acts += [(ask.abort_s, 1, i) for i, ask in enumerate(asks) if ask.abort_s < math.inf]
    heapq.heapify(acts)
    last_s = 0.0
    while acts or engine.next_s < math.inf:
        if acts and acts[0][0] <= engine.next_s:
            at_s, abort, i = heapq.heappop(acts)
            (engine.abort if abort else engine.submit)(works[i], at_s)
            continue
        due_s = engine.next_s
        for at_s, kind, work in engine.advance(due_s):
            assert last_s <= at_s == due_s, "in the order of time, when it was said"
            last_s = at_s
            if kind == FIRST:
                seen.first_s[work.request] = at_s
                assert work.first_s == at_s
            elif kind == DONE:
                seen.end_s[work.request] = at_s
            else:
                assert kind == EVICTED
                seen.evictions += 1
    assert_idle(engine, size)
    seen.made = {work.request: work.made for work in works}
    seen.cached = {i: works[i].cached_tokens for i in seen.first_s}
    seen.totals, seen.busy_s = (engine.steps, engine.prefilled_tokens, engine.decoded_tokens), engine.busy_s
    return seen


def assert_idle(engine: Engine, size: Size) -> None:
    assert (engine.decoding, engine.prefilling, engine.queued) == (0, 0, 0)
    assert (engine.context_tokens, engine.kv_tokens_used, engine.prompt_tokens_left) == (0, 0, 0)
    assert engine.free_kv_tokens == size.kv_tokens


def assert_same(asks: list[Ask], size: Size, price, blocks: list[list[int]] | None = None) -> Seen:
    core, engine = step_by_step(asks, size, price), in_runs(asks, size, price, blocks)
    assert engine.first_s == pytest.approx(core.first_s, rel=REL)
    assert engine.end_s == pytest.approx(core.end_s, rel=REL)
    assert engine.made == {i: core.made.get(i, 0) for i in range(len(asks))}
    assert engine.evictions == core.evictions
    assert engine.totals == core.totals
    assert engine.busy_s == pytest.approx(core.busy_s, rel=REL)
    if size.prefix:
        assert engine.cached == core.cached
    return engine


def some_asks(
    seed: int, count: int, span_s: float, *, prompt: int = 400, output: int = 60, priorities: int = 1,
    aborts: float = 0.0, shared: int = 0, room: int = 0,
) -> list[Ask]:  # fmt: skip
    """`aborts`: share of them that leave again. `shared`: prompts begin with one of so many texts."""
    draw = random.Random(seed)
    texts = [tuple(draw.randrange(256) for _ in range(8 * BLOCK)) for _ in range(shared)]
    asks = []
    for _ in range(count):
        at_s = draw.random() * span_s
        tokens: tuple[int, ...] = tuple(draw.randrange(256) for _ in range(draw.randint(1, prompt)))
        if shared and draw.random() < 0.8:
            tokens = draw.choice(texts)[: draw.randint(1, 8) * BLOCK] + tokens[: draw.choice([0, len(tokens)])]
        abort_s = at_s + draw.expovariate(4.0 / span_s) if draw.random() < aborts else math.inf
        priority = draw.randrange(priorities) / priorities
        asks.append(Ask(at_s, tokens, draw.randint(1, output), priority, abort_s, draw.randint(0, room)))
    return asks


def blocks_of(asks: list[Ask]) -> list[list[int]]:
    """Ids of the blocks of prompt and answer, which one core that runs each ask alone has said."""
    ids: dict[tuple[int, ...], int] = {}
    blocks = []
    for i, ask in enumerate(asks):
        core = core_of(Size(kv_tokens=10**6, chunk=10**6), FixedPace(0.0), asks)
        core.add(EngineRequest(i, ask.prompt, ask.output + ask.room))
        tokens = list(ask.prompt)
        while core.busy():
            for step in core.step(0.0).steps:
                tokens += step.token_ids
        ends = range(BLOCK, len(tokens) + 1, BLOCK)
        blocks.append([ids.setdefault(tuple(tokens[:end]), len(ids)) for end in ends])
    return blocks


@pytest.mark.parametrize("price", PRICES.values(), ids=PRICES)
@pytest.mark.parametrize("paged", [False, True], ids=["reserved", "paged"])
@pytest.mark.parametrize("size", [Size(), Size(slots=32, chunk=512, kv_tokens=16_384), Size(slots=3, chunk=4)],
                         ids=["small", "large", "chunks of a token"])  # fmt: skip
def test_a_random_mix_has_the_times_of_the_steps_one_by_one(price, paged, size):
    for seed in range(3):
        prompt = 40 if size.chunk < 10 else 900
        asks = some_asks(seed, 50, 2.0, prompt=prompt, output=90, priorities=3, aborts=0.2, room=seed * 60)
        assert_same(asks, Size(size.slots, size.kv_tokens, size.chunk, paged), price)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_is_asked_it_has_the_times_of_the_steps_one_by_one(data):
    whole = st.integers
    size = Size(
        slots=data.draw(whole(1, 12)),
        kv_tokens=data.draw(whole(10, 40)) * BLOCK,
        chunk=data.draw(whole(1, 200)),
        paged=data.draw(st.booleans()),
    )
    asks = some_asks(
        data.draw(whole(0, 10**6)), data.draw(whole(1, 25)), data.draw(st.sampled_from([0.0, 0.05, 1.0])) + 1e-6,
        prompt=data.draw(whole(1, 150)), output=data.draw(whole(1, 90)), priorities=data.draw(whole(1, 3)),
        aborts=data.draw(st.sampled_from([0.0, 0.5])), room=data.draw(st.sampled_from([0, 70])),
    )  # fmt: skip
    assert_same(asks, size, data.draw(st.sampled_from(list(PRICES.values()))))


def test_long_contexts_cost_the_same_in_runs_and_step_by_step():
    size = Size(slots=6, kv_tokens=200_000, chunk=700)
    asks = [replace_prompt(ask, 41) for ask in some_asks(5, 12, 3.0, prompt=500, output=2500)]
    assert_same(asks, size, PROFILE)


def replace_prompt(ask: Ask, times: int) -> Ask:
    return Ask(ask.at_s, ask.prompt * times, ask.output)


def test_where_kv_is_paged_the_newest_is_evicted_and_ends_with_all_its_tokens():
    asks = some_asks(11, 30, 0.5, prompt=100, output=300)
    seen = assert_same(asks, Size(slots=16, kv_tokens=40 * BLOCK, paged=True), PROFILE)
    assert seen.evictions > 10
    assert seen.made == {i: ask.output for i, ask in enumerate(asks)}


@pytest.mark.parametrize("paged", [False, True], ids=["reserved", "paged"])
@pytest.mark.parametrize("kv_blocks", [24, 60, 2000])
def test_what_is_found_in_the_prefix_cache_is_what_the_engine_finds(paged, kv_blocks):
    """With little room the cache drops what was used least lately; answers are kept, and found after an eviction."""
    for seed in range(3):
        asks = some_asks(seed, 40, 1.0, prompt=150, output=120, shared=5, aborts=0.1)
        size = Size(slots=8, kv_tokens=max(kv_blocks, 17) * BLOCK, paged=paged, prefix=True)
        seen = assert_same(asks, size, PROFILE, blocks_of(asks))
        assert kv_blocks < 60 or sum(seen.cached.values()) > 1000


def test_those_submitted_at_one_moment_join_by_priority():
    draw = random.Random(3)
    asks = [Ask(1.0, (1,) * 60, draw.randint(5, 50), draw.randrange(4) / 4) for _ in range(30)]
    assert_same(asks, Size(slots=4), PROFILE)


def test_it_matters_not_how_often_it_is_asked():
    asks = some_asks(4, 40, 2.0, output=200)
    sizes = Size(), Size(paged=True, kv_tokens=1024)
    for size in sizes:
        calm = in_runs(asks, size, PROFILE)
        engine = Engine(PROFILE, slots=size.slots, kv_tokens=size.kv_tokens, chunk_tokens=size.chunk,
                        block_tokens=BLOCK, paged=size.paged)  # fmt: skip
        ends: dict[int, float] = {}
        draw, now_s, left = random.Random(1), 0.0, sorted(enumerate(asks), key=lambda each: each[1].at_s)
        while left or engine.next_s < math.inf:
            now_s += draw.expovariate(200.0)
            while left and left[0][1].at_s <= now_s:
                i, ask = left.pop(0)
                engine.submit(
                    Work(i, len(ask.prompt), ask.output, len(ask.prompt) + ask.output, ask.priority), ask.at_s
                )
            ends |= {work.request: at_s for at_s, kind, work in engine.advance(now_s) if kind == DONE}
            assert engine.kv_tokens_used <= size.kv_tokens
            assert engine.free_kv_tokens >= 0
        assert ends == pytest.approx(calm.end_s, rel=REL)


def test_what_it_shows_is_as_of_the_last_step_that_ended():
    asks = some_asks(9, 60, 3.0, prompt=600, output=120, aborts=0.3)
    looks: list[Look] = []
    size = Size(slots=12, kv_tokens=6000)
    step_by_step(asks, size, PROFILE, looks)
    engine = Engine(PROFILE, slots=size.slots, kv_tokens=size.kv_tokens, chunk_tokens=size.chunk, block_tokens=BLOCK)
    works = [Work(i, len(ask.prompt), ask.output, len(ask.prompt) + ask.output) for i, ask in enumerate(asks)]
    acts = [(ask.at_s, engine.submit, work) for ask, work in zip(asks, works, strict=True)]
    acts += [(ask.abort_s, engine.abort, work) for ask, work in zip(asks, works, strict=True) if ask.abort_s < math.inf]
    acts.sort(key=lambda act: act[0])
    for begin_s, end_s, then in looks:
        while acts and acts[0][0] <= begin_s:
            at_s, act, work = acts.pop(0)
            act(work, at_s)
        engine.advance((begin_s + end_s) / 2)  # in the midst of a step
        assert (engine.steps, engine.prefilled_tokens, engine.decoded_tokens) == (
            then.steps, then.prefilled_tokens, then.decoded_tokens,
        )  # fmt: skip
        assert (engine.decoding, engine.decoding + engine.prefilling + engine.queued) == (
            then.decoding, then.running + then.queued,
        )  # fmt: skip
        assert (engine.kv_tokens_used, engine.prompt_tokens_left) == (then.kv_tokens_used, then.prefilling_tokens)
        assert engine.busy_s == pytest.approx(then.busy_s, rel=REL)


def test_steps_without_a_length_end_at_once():
    asks = some_asks(2, 30, 1.0, aborts=0.3)
    assert_same(asks, Size(), FixedPace(0.0))


def test_an_abort_gives_back_what_was_made_and_takes_the_token_of_the_step_that_runs():
    engine = Engine(FixedPace(1.0), slots=2, kv_tokens=1000, chunk_tokens=100, block_tokens=1)
    work = Work(0, 50, 100, 150)
    engine.submit(work, 0.0)
    assert [event[:2] for event in engine.advance(5.5)] == [(1.0, FIRST)]
    engine.abort(work, 5.5)
    assert (work.made, engine.decoding) == (5, 1)
    assert engine.advance(6.0) == []
    assert (work.made, engine.decoding, engine.next_s) == (6, 0, math.inf)
    again = Work(0, 56, 94, 150)
    engine.submit(again, 10.0)
    engine.advance(200.0)
    assert (again.first_s, again.made) == (11.0, 94)


def test_an_abort_of_what_ends_with_that_step_comes_too_late():
    engine = Engine(FixedPace(1.0), slots=2, kv_tokens=1000, chunk_tokens=100, block_tokens=1)
    work = Work(0, 50, 3, 53)
    engine.submit(work, 0.0)
    engine.abort(work, 2.5)
    assert [event[:2] for event in engine.advance(9.0)] == [(1.0, FIRST), (3.0, DONE)]
    engine.abort(work, 9.5)
    assert (work.made, engine.next_s) == (3, math.inf)


def test_what_the_caller_knows_to_be_cached_is_not_computed():
    engine = Engine(FixedPace(1.0), slots=2, kv_tokens=10_000, chunk_tokens=100, block_tokens=BLOCK)
    works = [Work(i, 1000, 1, 1001) for i in range(3)]
    for work, known in zip(works, (0, 950, 1000), strict=True):
        work.known_tokens = known
        engine.submit(work, 100.0 * work.request)
        engine.advance(100.0 * work.request + 99.0)
    assert [work.cached_tokens for work in works] == [0, 950, 992]
    assert [work.first_s for work in works] == [10.0, 101.0, 201.0]
    assert engine.prefilled_tokens == 1000 + 50 + 8


def test_what_could_never_run_is_refused():
    engine = Engine(FixedPace(1.0), slots=2, kv_tokens=100, chunk_tokens=100, block_tokens=1)
    engine.submit(Work(0, 50, 50, 100), 0.0)
    with pytest.raises(ValueError, match="request 1 may need 101 tokens of KV; there are 100"):
        engine.submit(Work(1, 50, 50, 101), 0.0)


def test_a_request_takes_a_few_runs_whatever_its_length():
    runs = 0

    class Counting(LinearPrice):
        def line(self, prefill, batch, context_tokens):
            nonlocal runs
            runs += 1
            return super().line(prefill, batch, context_tokens)

    asks = [replace_prompt(ask, 20) for ask in some_asks(1, 200, 100.0, prompt=300, output=1000)]
    size = Size(slots=32, kv_tokens=300_000, chunk=256)
    seen = in_runs(asks, size, Counting(StepTimes(0.004, 5e-5, 2e-8, 1.6e-5)))
    assert seen.totals[0] > 10_000
    assert runs < 6 * len(asks)
