"""The interference budget of one worker: policy.interference applied to what its engine has and does.

Owns the entries of all runs that asked for the engine (entries.py), credit, theta, and what is learned of step times,
of priority's tokens and of its arrivals. Fed with every step of the engine, before their owners are told; asked by the
pull loop (it is its Gate) and by entries (prewarm). All of it on the event loop, and nothing waits.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence

from laneway.core.catalogue import Pool
from laneway.core.clock import Clock
from laneway.core.fleet import StepTimes
from laneway.core.job import LaneJob
from laneway.core.lanes import Lane
from laneway.policy import headroom as rooms
from laneway.policy import interference as policy
from laneway.policy.interference import Decoder, Load, Prompt
from laneway.policy.step_fit import StepFit, StepSeen
from laneway.policy.tpots import LIVE_TOKENS_MIN, Tpot, Tpots
from laneway.runtime.live_policy import LivePolicy
from laneway.runtime.params import headroom_params, interference_params
from laneway.workers import metrics
from laneway.workers.engines.protocol import EngineCapacity, EngineRequest, EngineStats
from laneway.workers.entries import Entries, Near
from laneway.workers.ledger import Seats
from laneway.workers.prefixes import KnownPrefixes
from laneway.workers.prewarm import Entry
from laneway.workers.sequences import SequenceOwner, Sequences

RECENT_S = 5.0  # priority counts as near for so long after it was here
WHOLE_AFTER_S = 30.0  # a prompt that no slice can carry goes whole then, as on a bulk pool: others wait behind it
PHI_WEIGHT = 0.02  # of the newest step; about the last 50 count
BLOCK_TOKENS = 32  # of a prefix cache whose engine does not say: the largest that those in use have
REMAINING_TOKENS_MIN = 32  # a run goes on for as long as it was, or for so many tokens
COST_MIN, COST_CAP = 0.5, 3.0  # of its tokens, what a slice may be charged by the time it took


class Budget:
    """See the module. Inert until `started`."""

    def __init__(
        self, pool: Pool, policy_now: LivePolicy, clock: Clock, sequences: Sequences, *, prefix_cache: bool
    ) -> None:
        """`prefix_cache`: the engine finds again what it computed of a prompt."""
        self._pool = pool
        self._policy = policy_now
        self._params = policy_now.derive(interference_params)
        self._clock = clock
        self._sequences = sequences
        self._reuses = prefix_cache
        self._entries = Entries()
        self._seats: Seats | None = None
        self._lower_prefills: Callable[[], int] = lambda: 0
        self._headroom = policy_now.derive(lambda values: headroom_params(values, pool.slots))
        self.arrivals = rooms.Arrivals(self._headroom().window_s)
        self._kept: tuple[float, rooms.Kept] = (-math.inf, rooms.Kept())
        self._prior = prior_times(pool, 0)
        self.fit = StepFit(self._prior)
        self._block_tokens = BLOCK_TOKENS
        self._prefixes = KnownPrefixes(BLOCK_TOKENS, 0)
        self._stats = EngineStats()
        self.theta = self._theta_set = self._params().theta
        self.credit = 0.0
        self.phi_priority = 0.0
        self._credit_s = clock.monotonic()
        self._near: Near | None = None  # of the priority jobs that are here, or were last
        self._near_s = -math.inf
        self._theta_s = clock.monotonic()
        self._tpots = Tpots()
        self._load: Load | None = None
        self._why = policy.OPEN
        self._pumping = False
        self._protected = metrics.PROTECTED.labels(pool.name)
        self._granted = metrics.GRANTED.labels(pool.name)
        policy_now.on_change(self._settings_changed)

    def _settings_changed(self) -> None:
        params = self._params()
        if params.theta != self._theta_set:
            self.theta = self._theta_set = params.theta
        self._changed()

    def started(self, capacity: EngineCapacity, seats: Seats, lower_prefills: Callable[[], int]) -> None:
        """An engine runs. `lower_prefills`: lower-lane jobs here without their first token."""
        self._seats = seats
        self._lower_prefills = lower_prefills
        self._headroom = self._policy.derive(lambda values: headroom_params(values, seats.slots))
        self._block_tokens = capacity.block_tokens if capacity.block_tokens > 1 else BLOCK_TOKENS
        self._prefixes = KnownPrefixes(self._block_tokens, capacity.kv_tokens // self._block_tokens)
        self._prior = prior_times(self._pool, capacity.chunk_tokens)
        self.fit = StepFit(self._prior)
        self._changed()

    # --- runs ----------------------------------------------------------------------------------------

    def enter(self, owner: SequenceOwner, job: LaneJob, request: EngineRequest, submit: Callable[[], None]) -> Entry:
        """A run asks for the engine. `submit` asks it for the whole of `request`, which is done when granted; the
        caller says when to begin (`Entry.advance`, `Entry.whole`)."""
        now_s = self._clock.monotonic()
        self._refill(now_s)
        created_s = job.record.timings.created_s
        entry = Entry(
            self, self._sequences, owner, job, request, submit,
            now_s=now_s,
            waited_s=max(0.0, self._clock.now() - created_s) if created_s else 0.0,
            known_tokens=self._prefixes.known_tokens(request.prompt_ids, _space(request)) if self._reuses else 0,
        )  # fmt: skip
        self._entries.enter(entry)
        if entry.lane is Lane.PRIORITY:
            self.arrivals.arrived(now_s)
        self._changed()
        return entry

    def leave(self, entry: Entry) -> None:
        now_s = self._clock.monotonic()
        self._refill(now_s)
        if entry not in self._entries:
            return
        self._entries.leave(entry)
        if entry.lane is Lane.PRIORITY:
            self.arrivals.left(entry.prompt_tokens + entry.made, now_s - entry.entered_s)
            self._tpots.ended(now_s, entry.tpot_s, entry.tpot_target_s)
        self._changed()
        self._pump_soon()

    def learn(self, entry: Entry, ids: Sequence[int]) -> None:
        """The engine has computed these, in the course of a run."""
        if self._reuses:
            self._prefixes.learn(ids, _space(entry.request))

    def sent(self, entry: Entry) -> None:
        self._entries.sent(entry)

    def gave(self, entry: Entry, tokens: int) -> None:
        self._entries.gave(entry, tokens)

    def computed(self, entry: Entry, sent_tokens: int, tokens: int) -> None:
        self._changed()
        if entry.submitted:
            self.learn(entry, entry.request.prompt_ids)
        if entry.lane is Lane.PRIORITY:
            return
        took = entry.cost_tokens or float(tokens)
        cost = min(COST_CAP * sent_tokens, max(COST_MIN * min(sent_tokens, tokens), took))
        self.credit = policy.charged(self.credit, cost - sent_tokens, self.load(), self._params())

    # --- grants --------------------------------------------------------------------------------------

    def grant(self, entry: Entry) -> int:
        now_s = self._clock.monotonic()
        self._refill(now_s)
        if entry.lane is Lane.PRIORITY:
            tokens = self._grant_priority(entry, now_s)
        elif entry is not self._entries.next_lower:
            tokens = 0
        else:
            load, params = self.load(), self._params()
            tokens = policy.may_submit(self._prompt(entry), self.credit, load, params)
            self.credit = policy.charged(self.credit, tokens, load, params)
        if tokens:
            if tokens < entry.left_tokens:
                metrics.SLICES.labels(self._pool.name, entry.lane.value).inc()
            self._changed()
        return tokens

    def _grant_priority(self, entry: Entry, now_s: float) -> int:
        if not self._reuses or entry.left_tokens <= self.load().chunk_tokens:
            return entry.left_tokens
        in_slices = self._entries.in_slices(entry)
        since_s = entry.waited_s + now_s - entry.entered_s
        pace = policy.long_prompt(
            entry.left_tokens, entry.ttft_target_s - since_s, in_slices + 1, self._decoders(entry, now_s), self.load(),
            self._params(), self.theta,
        )  # fmt: skip
        if not pace.tokens_per_s:
            return entry.left_tokens
        if now_s < entry.next_slice_s:
            return 0
        entry.next_slice_s = max(now_s, entry.next_slice_s) + pace.slice_tokens / pace.tokens_per_s
        return pace.slice_tokens

    def _decoders(self, but: Entry, now_s: float) -> Iterator[Decoder]:
        for entry in self._entries.decoding:
            if entry is not but:
                left = min(entry.max_tokens - entry.made, max(entry.made, REMAINING_TOKENS_MIN))
                strict = entry.strict and entry.lane is Lane.PRIORITY
                yield Decoder(entry.made, max(0, left), now_s - entry.first_s, entry.tpot_target_s, strict)

    def _prompt(self, entry: Entry) -> Prompt:
        slices = self._params().slices
        # Without a prefix cache a long prompt waits for a time without priority; others of its lanes wait behind it.
        waited = self._clock.monotonic() - entry.entered_s >= WHOLE_AFTER_S
        return Prompt(entry.left_tokens, self._reuses and slices, self._pool.bulk or not slices or waited)

    def pump(self) -> None:
        """Lets prompts go on that wait for a grant. Called after each step and whenever something changed."""
        self._pumping = False
        self._changed()  # who was told of the step has taken it
        if not self._entries.waits:
            return
        now_s = self._clock.monotonic()
        self._refill(now_s)
        with self._sequences.together():  # the last slice of a prompt and the first of the next share a step
            for entry in tuple(self._entries.unsent):
                if entry.waiting:
                    entry.retry(now_s)

    # --- the engine ----------------------------------------------------------------------------------

    def stepped(self, stats: EngineStats, now_s: float) -> None:
        """The engine made a step; its output is told to its owners after this."""
        self._refill(now_s)
        before, self._stats = self._stats, stats
        if stats.steps == before.steps + 1:
            self._learn_step(before, stats)
        if now_s - self._theta_s >= policy.THETA_STEP_S:
            self._move_theta(now_s)
        self._changed()

    def closed(self, reason: str) -> None:
        """The engine is gone, and whoever had something in it was told."""
        self._stats = EngineStats()
        self._prefixes.forget()
        for entry in tuple(self._entries.unsent):
            if entry.waiting:
                entry.lost(reason)
        self._changed()

    def _learn_step(self, before: EngineStats, stats: EngineStats) -> None:
        length_s, prompt = stats.busy_s - before.busy_s, stats.prefilled_tokens - before.prefilled_tokens
        priority, lower = self._entries.priority_prompt_tokens(), self._entries.lower_in_flight()
        if not (stats.prefilled_tokens or stats.decoded_tokens):  # an engine that does not say what its steps compute
            load = self.load()
            if not priority and not lower and load.decoding:
                self.fit.observe_ratio(length_s, self._prior.decode_s(load.decoding, load.context_tokens))
            prompt = min(self.load().chunk_tokens, priority + sum(e.in_flight_tokens for e in lower))
        else:
            self.fit.observe(StepSeen(length_s, before.decoding, before.kv_tokens_used, prompt))
        chunk = self.load().chunk_tokens
        self.phi_priority += PHI_WEIGHT * (min(1.0, min(prompt, priority) / chunk) - self.phi_priority)
        if lower and prompt and (token_s := self.fit.times.prefill_token_s) > 0.0:
            extra_s = max(0.0, length_s - self.fit.times.decode_s(before.decoding, before.kv_tokens_used))
            flying = priority + sum(e.in_flight_tokens for e in lower)
            for entry in lower:
                entry.cost_tokens += extra_s / token_s * entry.in_flight_tokens / flying

    def _move_theta(self, now_s: float) -> None:
        # Steps may be longer than a look, but hours without any say nothing.
        passed_s, self._theta_s = min(now_s - self._theta_s, 2.0 * policy.THETA_STEP_S), now_s
        running = [
            Tpot(now_s, e.tpot_s, e.tpot_target_s)
            for e in self._entries.decoding
            if e.lane is Lane.PRIORITY and e.made >= LIVE_TOKENS_MIN and e.tpot_target_s > 0.0
        ]
        measured = self._tpots.ratio_p95(now_s, passed_s, running)
        self.theta = policy.next_theta(self.theta, measured, passed_s, self._params())

    # --- what it comes to ----------------------------------------------------------------------------

    def load(self) -> Load:
        """What the engine has, made once for each change."""
        if self._load is None:
            self._load = self._made_load()
        return self._load

    def _made_load(self) -> Load:
        now_s, lane, here = self._clock.monotonic(), self._policy.settings.priority, self._entries
        if here.near is not None:
            self._near_s, self._near = now_s, here.near
        recent = now_s - self._near_s <= RECENT_S
        near = self._near if recent and self._near is not None else Near(lane.tpot_target_s, lane.ttft_target_s)
        return Load(
            self.fit.times,
            near.tpot_target_s,
            near.ttft_target_s,
            self._block_tokens,
            decoding=len(here.decoding),
            context_tokens=here.context_tokens,
            priority=here.priority,
            priority_decoding=here.priority_decoding,
            priority_context=here.priority_context,
            recent=recent,
            strict=near.strict,
            phi_priority=self.phi_priority,
            lower_prompt_tokens=sum(e.in_flight_tokens for e in here.lower_in_flight()),
            priority_prompt_tokens=here.priority_prompt_tokens(),
        )

    def _changed(self) -> None:
        self._load = None

    def _refill(self, now_s: float) -> None:
        passed_s, self._credit_s = now_s - self._credit_s, now_s
        load, params, head = self.load(), self._params(), self._entries.next_lower
        depth = policy.credit_needed(self._prompt(head), load, params) if head is not None else 0.0
        self.credit = policy.refilled(self.credit, max(0.0, passed_s), load, self.theta, params, depth)
        if load.priority and passed_s > 0.0:
            self._protected.inc(passed_s)
            self._granted.inc(passed_s * policy.credit_rate(load, self.theta, params))
        if now_s - self._near_s > RECENT_S and load.recent:
            self._changed()

    def _pump_soon(self) -> None:
        if not self._pumping and self._entries.waits:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self.pump)

    # --- the pull loop's Gate ------------------------------------------------------------------------

    def lower_places(self) -> int:
        why = self._obstacle()
        if why != self._why:
            self._why = why
            if why != policy.OPEN:
                metrics.GATE_CLOSED.labels(self._pool.name, why).inc()
        return self._params().lower_prefills_max - self._prefilling() if why == policy.OPEN else 0

    def _obstacle(self) -> str:
        self._refill(self._clock.monotonic())
        if self._seats is not None and self._seats.slots_free <= self.reserved_slots():
            return policy.HEADROOM
        return policy.may_join(self.credit, self._prefilling(), self.load(), self.theta, self._params())

    def _prefilling(self) -> int:
        """Lower-lane jobs without their first token, but for one of which no more than its last slice is to come: that
        shares a step with the first slice of the next, which must be here by then."""
        return self._lower_prefills() - self._entries.last_slices(self.load().chunk_tokens)

    def floor_places(self) -> int:
        self._refill(self._clock.monotonic())
        prefilling, params = self._prefilling(), self._params()
        may = policy.floor_may_join(self.credit, prefilling, self.load(), params)
        return params.lower_prefills_max - prefilling if may else 0

    def reserved_slots(self) -> int:
        return self._kept_free().slots

    def reserved_kv_tokens(self) -> int:
        return self._kept_free().kv_tokens

    def look_in_s(self) -> float | None:
        if self.why() != policy.BUDGET:
            return None
        return policy.join_in_s(self.credit, self.load(), self.theta, self._params())

    def why(self) -> str:
        self.lower_places()
        return self._why

    def _kept_free(self) -> rooms.Kept:
        """Asked before every pull, and looked at anew a few times a window."""
        now_s, params = self._clock.monotonic(), self._headroom()
        if self._seats is None:
            return rooms.Kept(params.slots_min)
        if now_s - self._kept[0] >= 0.1 * params.window_s or self._kept[1].slots < params.slots_min:
            if params.window_s != self.arrivals.window_s:
                self.arrivals = rooms.Arrivals(params.window_s)
            kept = rooms.headroom(
                self.arrivals, now_s, here=self.load().priority, slots=self._seats.slots,
                kv_tokens=self._seats.kv_tokens, params=params,
            )  # fmt: skip
            self._kept = now_s, kept
        return self._kept[1]

    # --- what others see -----------------------------------------------------------------------------

    def seen(self) -> dict[str, float]:
        return {"credit": self.credit, "theta": self.theta, "phi_priority": self.phi_priority}

    @property
    def step_times(self) -> StepTimes:
        return self.fit.times

    @property
    def lower_tokens_per_s(self) -> float:
        return policy.credit_rate(self.load(), self.theta, self._params())

    @property
    def priority_tpot_p95_s(self) -> float:
        return self._tpots.p95_s(self._clock.monotonic())


def prior_times(pool: Pool, chunk_tokens: int) -> StepTimes:
    """Of the pool's profile; without one what the catalogue's rates come to."""
    times = pool.step_times
    if times.base_s <= 0.0:
        times = StepTimes(
            base_s=1.0 / pool.decode_tokens_per_s if pool.decode_tokens_per_s > 0.0 else 0.02,
            prefill_token_s=1.0 / pool.prefill_tokens_per_s if pool.prefill_tokens_per_s > 0.0 else 0.001,
        )
    return StepTimes(
        times.base_s, times.sequence_s, times.context_token_s, times.prefill_token_s, chunk_tokens or times.chunk_tokens
    )


def _space(request: EngineRequest) -> tuple[str, str]:
    return request.adapter, request.cache_salt
