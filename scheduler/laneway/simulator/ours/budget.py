"""The interference budget of one simulated worker: laneway.policy.interference, fed as laneway.workers.budget feeds it.

What differs from the live one: step times are those of the engine's profile (nothing is fitted), and shares of steps
are taken over the steps between two events, in closed form.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from laneway.core.fleet import StepTimes
from laneway.core.lanes import Lane
from laneway.policy import headroom as rooms
from laneway.policy import interference as policy
from laneway.policy.interference import Decoder, Load, Prompt
from laneway.policy.tpots import LIVE_TOKENS_MIN, Tpot, Tpots
from laneway.simulator.ours.entry import Entry
from laneway.simulator.ours.params import OurParams
from laneway.simulator.world import Worker

RECENT_S = 5.0  # priority counts as near for so long after it was here
PHI_WEIGHT = 0.02  # of the newest step
REMAINING_TOKENS_MIN = 32
HEADROOM_AGE = 0.1  # of a window: for so long what is kept free stands


class Budget:
    def __init__(self, worker: Worker, times: StepTimes, params: OurParams, block_tokens: int) -> None:
        self.entries: dict[Entry, None] = {}
        self.unsent: dict[Entry, None] = {}
        self.decoding: dict[Entry, None] = {}
        self.credit = 0.0
        self.theta = params.interference.theta
        self.phi_priority = 0.0
        self.arrivals = rooms.Arrivals(params.headroom.window_s)
        self.tpots = Tpots()
        self.priority = 0
        self.priority_decoding = 0
        self._priority_base = 0  # of the context of priority's decoding sequences: what does not grow
        self._worker = worker
        self._times = times
        self._params = params
        self._block_tokens = block_tokens
        self._credit_s = 0.0
        self._theta_s = 0.0
        self._near_s = -math.inf
        self._near = (math.inf, math.inf)  # tightest TPOT and TTFT of the priority jobs that are here, or were last
        self._contracts: dict[tuple[float, float], int] = {}  # (TPOT, TTFT) of priority: how many
        self._lower_prefilling: dict[Entry, None] = {}  # without their first token
        self._in_flight = {True: 0, False: 0}  # prompt tokens, of priority and of the others
        self._steps = 0
        self._prefilled = 0
        self._lower_computed = 0
        self._kept: tuple[float, rooms.Kept] = (-math.inf, rooms.Kept())
        self._load: Load | None = None

    # --- entries -----------------------------------------------------------------------------------------

    def enter(self, entry: Entry, now_s: float) -> None:
        self.refill(now_s)
        self.entries[entry] = self.unsent[entry] = None
        if entry.lane is Lane.PRIORITY:
            self.priority += 1
            self.arrivals.arrived(now_s)
            contract = entry.ticket.tpot_s, entry.ticket.ttft_s
            self._contracts[contract] = self._contracts.get(contract, 0) + 1
        else:
            self._lower_prefilling[entry] = None
        self.changed()

    def sent(self, entry: Entry, tokens: int) -> None:
        """So many of its prompt tokens are on their way."""
        entry.in_flight = tokens
        self._in_flight[entry.lane is Lane.PRIORITY] += tokens
        self.changed()

    def gave_first(self, entry: Entry, now_s: float) -> None:
        entry.first_s, entry.first_step = now_s, self._worker.engine.steps
        self.decoding[entry] = None
        if entry.lane is Lane.PRIORITY:
            self.priority_decoding += 1
            self._priority_base += entry.prompt + 1 - entry.first_step
        self._lower_prefilling.pop(entry, None)
        self.computed(entry)

    def computed(self, entry: Entry) -> None:
        """What it had in flight is computed."""
        if entry.lane is not Lane.PRIORITY:
            self._lower_computed += entry.in_flight
        self._in_flight[entry.lane is Lane.PRIORITY] -= entry.in_flight
        entry.done += entry.in_flight
        if not entry.submitted:
            entry.sliced = entry.done
        entry.in_flight = 0
        self.changed()

    def leave(self, entry: Entry, now_s: float) -> None:
        self.refill(now_s)
        entry.left = True
        self.entries.pop(entry, None)
        self.unsent.pop(entry, None)
        self._lower_prefilling.pop(entry, None)
        self._in_flight[entry.lane is Lane.PRIORITY] -= entry.in_flight
        if entry.lane is Lane.PRIORITY:
            self.priority -= 1
            contract = entry.ticket.tpot_s, entry.ticket.ttft_s
            self._contracts[contract] -= 1
            if not self._contracts[contract]:
                del self._contracts[contract]
            made = self.made(entry)
            self.arrivals.left(entry.prompt + made, now_s - entry.entered_s)
            if made > 1:
                self.tpots.ended(now_s, (now_s - entry.first_s) / (made - 1), _finite(entry.ticket.tpot_s))
        if self.decoding.pop(entry, entry) is None and entry.lane is Lane.PRIORITY:
            self.priority_decoding -= 1
            self._priority_base -= entry.prompt + 1 - entry.first_step
        self.changed()

    def made(self, entry: Entry) -> int:
        return 0 if math.isnan(entry.first_s) else self._worker.engine.steps - entry.first_step + 1

    # --- grants ------------------------------------------------------------------------------------------

    def grant(self, entry: Entry, now_s: float) -> int:
        """How many of its next prompt tokens may be submitted now."""
        self.refill(now_s)
        load, params = self.load(now_s), self._params.interference
        if entry.lane is Lane.PRIORITY:
            tokens = self._grant_priority(entry, load, now_s)
        elif entry is not self.next_lower:
            return 0
        else:
            tokens = policy.may_submit(Prompt(entry.left_tokens, params.slices), self.credit, load, params)
            self.credit = policy.charged(self.credit, tokens, load, params)
        if tokens:
            self.changed()
        return tokens

    def _grant_priority(self, entry: Entry, load: Load, now_s: float) -> int:
        if entry.left_tokens <= load.chunk_tokens or not self._params.interference.slices:
            return entry.left_tokens
        sharing = sum(1 for each in self.unsent if each.slices and each is not entry)
        pace = policy.long_prompt(
            entry.left_tokens, entry.ticket.came_s + _finite(entry.ticket.ttft_s) - now_s, sharing + 1,
            self._decoders(entry, now_s), load, self._params.interference, self.theta,
        )  # fmt: skip
        if not pace.tokens_per_s:
            return entry.left_tokens
        if now_s < entry.next_slice_s:
            return 0
        entry.next_slice_s = max(now_s, entry.next_slice_s) + pace.slice_tokens / pace.tokens_per_s
        return pace.slice_tokens

    def _decoders(self, but: Entry, now_s: float) -> Iterator[Decoder]:
        for entry in self.decoding:
            if entry is not but:
                made = self.made(entry)
                left = min(entry.ticket.max_tokens - made, max(made, REMAINING_TOKENS_MIN))
                strict = self._params.strict and entry.lane is Lane.PRIORITY
                yield Decoder(made, max(0, left), now_s - entry.first_s, _finite(entry.ticket.tpot_s), strict)

    @property
    def next_lower(self) -> Entry | None:
        return next((entry for entry in self.unsent if entry.lane is not Lane.PRIORITY), None)

    # --- the gate ----------------------------------------------------------------------------------------

    def lower_places(self, now_s: float, slots_free: int) -> int:
        self.refill(now_s)
        if slots_free <= self.kept(now_s).slots:
            return 0
        prefilling, params = self._prefilling(), self._params.interference
        why = policy.may_join(self.credit, prefilling, self.load(now_s), self.theta, params)
        return params.lower_prefills_max - prefilling if why == policy.OPEN else 0

    def floor_places(self, now_s: float) -> int:
        self.refill(now_s)
        prefilling, params = self._prefilling(), self._params.interference
        may = policy.floor_may_join(self.credit, prefilling, self.load(now_s), params)
        return params.lower_prefills_max - prefilling if may else 0

    def look_in_s(self, now_s: float) -> float | None:
        """When credit will do for one more lower-lane job; None: it is not credit that keeps them away."""
        return policy.join_in_s(self.credit, self.load(now_s), self.theta, self._params.interference)

    def submits_in_s(self, entry: Entry, now_s: float) -> float:
        """When a prompt that waits for a grant should ask again, if nothing else happens before."""
        if entry.lane is Lane.PRIORITY:
            return max(1e-3, entry.next_slice_s - now_s)
        load = self.load(now_s)
        rate = policy.credit_rate(load, self.theta, self._params.interference)
        missing = max(0.0, -self.credit) + 1.0
        return max(load.step_s, missing / rate) if load.priority and rate > 0.0 else RECENT_S

    def _prefilling(self) -> int:
        chunk = self._times.chunk_tokens
        lower = self._lower_prefilling
        return len(lower) - sum(1 for entry in lower if entry.slices and entry.last_tokens < chunk)

    def kept(self, now_s: float) -> rooms.Kept:
        """What lower lanes leave free."""
        params, engine = self._params.headroom, self._worker.engine
        if now_s - self._kept[0] >= HEADROOM_AGE * params.window_s:
            kept = rooms.headroom(
                self.arrivals, now_s, here=self.priority, slots=engine.slots, kv_tokens=engine.kv_tokens, params=params
            )
            self._kept = now_s, kept
        return self._kept[1]

    # --- the engine --------------------------------------------------------------------------------------

    def stepped(self, now_s: float) -> None:
        """The engine made some steps since the last time."""
        self.refill(now_s)
        engine = self._worker.engine
        steps = engine.steps - self._steps
        if steps > 0:
            priority = max(0, engine.prefilled_tokens - self._prefilled - self._lower_computed)
            share = min(1.0, priority / (steps * self.load(now_s).chunk_tokens))
            self.phi_priority = share + (self.phi_priority - share) * (1.0 - PHI_WEIGHT) ** steps
            self._steps, self._prefilled, self._lower_computed = engine.steps, engine.prefilled_tokens, 0
        if now_s - self._theta_s >= policy.THETA_STEP_S:
            self._move_theta(now_s)
        self.changed()

    def _move_theta(self, now_s: float) -> None:
        passed_s, self._theta_s = min(now_s - self._theta_s, 2.0 * policy.THETA_STEP_S), now_s
        running = []
        for entry in self.decoding:
            made = self.made(entry)
            if entry.lane is Lane.PRIORITY and made >= LIVE_TOKENS_MIN and entry.ticket.tpot_s < math.inf:
                running.append(Tpot(now_s, (now_s - entry.first_s) / (made - 1), entry.ticket.tpot_s))
        measured = self.tpots.ratio_p95(now_s, passed_s, running)
        self.theta = policy.next_theta(self.theta, measured, passed_s, self._params.interference)

    def lower_tokens_per_s(self, now_s: float) -> float:
        return policy.credit_rate(self.load(now_s), self.theta, self._params.interference)

    def tpot_p95_s(self, now_s: float) -> float:
        return self.tpots.p95_s(now_s)

    def load(self, now_s: float) -> Load:
        if self._load is None:
            self._load = self._made_load(now_s)
        return self._load

    def changed(self) -> None:
        self._load = None

    def _made_load(self, now_s: float) -> Load:
        engine = self._worker.engine
        if self.priority:
            self._near_s = now_s
            self._near = min(tpot_s for tpot_s, _ in self._contracts), min(ttft_s for _, ttft_s in self._contracts)
        return Load(
            self._times,
            _finite(self._near[0]),
            _finite(self._near[1]),
            self._block_tokens,
            decoding=len(self.decoding),
            context_tokens=int(engine.context_tokens),
            priority=self.priority,
            priority_decoding=self.priority_decoding,
            priority_context=self._priority_base + self.priority_decoding * engine.steps,
            recent=now_s - self._near_s <= RECENT_S,
            strict=self._params.strict,
            phi_priority=self.phi_priority,
            lower_prompt_tokens=self._in_flight[False],
            priority_prompt_tokens=self._in_flight[True],
        )

    def refill(self, now_s: float) -> None:
        passed_s, self._credit_s = now_s - self._credit_s, now_s
        if passed_s <= 0.0:
            return
        load, params, head = self.load(now_s), self._params.interference, self.next_lower
        depth = policy.credit_needed(Prompt(head.left_tokens, params.slices), load, params) if head else 0.0
        self.credit = policy.refilled(self.credit, passed_s, load, self.theta, params, depth)
        if load.recent and now_s - self._near_s > RECENT_S:
            self.changed()


def _finite(target_s: float) -> float:
    """A promise that was not made is one that is kept by whatever comes."""
    return min(target_s, 1e6)
