"""Fleet mode: a whole day of ten thousand workers in minutes, from means: no request and no worker is followed.

For each region and request class (lane x lengths) it keeps how many wait and how many decode, second by second. Lanes
are served in their order by Laneway's rules in the mean: priority first; what the interference budget, the headroom
and the TPOT limit of laneway.policy leave goes to the lower lanes (fleet_budget). How single requests vary around the
means within a second comes from queueing formulas (fleet_model), so the shares of requests that keep their promise are
good for comparing fleets. No p99 is to be read from them: that is what the exact mode is for.

In a second with s starts of a class, token time T and o tokens of an answer after the first:

    decoding' = decoding e + s o T (1 - e),    e = exp(-1 / (o T)),    T = t(b + I) / (1 - gamma p)

(the linear balance, solved with T held; T is found in a few rounds). What starts is the most that fits: prompt tokens
within C / (t(b) + gamma C) a worker, places, KV, and for lower lanes what the policy grants.
Left out: preemption, prefix caches, sessions, retries, callers who leave, tenants, hold windows (lower lanes start
where there is room), forecasts. What a lost worker held starts again from nothing. What batch gets is near the exact
mode's as long as priority leaves a good part of the prefill; near saturation it is off by up to a fifth either way.
Units: seconds, tokens, requests. Cost: O(regions x classes) a second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from laneway.core.catalogue import Pool
from laneway.core.fleet import Demand
from laneway.core.lanes import LANES
from laneway.policy.desired import DesiredParams
from laneway.policy.headroom import HeadroomParams
from laneway.policy.interference import THETA_STEP_S, InterferenceParams, next_theta
from laneway.policy.pull import PullParams
from laneway.simulator import fleet_budget
from laneway.simulator import fleet_model as model
from laneway.simulator.fleet_budget import Grant, State, Targets
from laneway.simulator.fleet_lines import Lines
from laneway.simulator.fleet_load import FleetLoad
from laneway.simulator.fleet_result import FleetResult, Recorder
from laneway.simulator.fleet_scale import Loss, Workers, load_for
from laneway.simulator.fleet_spill import spill
from laneway.simulator.fleet_starts import Asked, Room
from laneway.simulator.fleet_starts import shares as starts_of
from laneway.simulator.trace import Floats

ROUNDS = 3  # in which a second's token time is found
P95 = 1.645  # standard deviations above the mean
ADMIT_SHARE = 0.8  # of the wait that a promise leaves, what a door lets in by
BACKLOG_S = 0.05  # of arrivals: a longer line is one of the fluid
FAR_S = 1e6  # a promise that was not made


@dataclass(frozen=True, slots=True)
class FleetRules:
    """What differs between fleets of the same load."""

    interference: InterferenceParams = field(default_factory=InterferenceParams)
    headroom: HeadroomParams = field(default_factory=HeadroomParams)
    pull: PullParams = field(default_factory=PullParams)
    strict: bool = False
    refuse: bool = True  # priority requests whose wait alone would break their TTFT promise
    lower: bool = True  # off: only priority is served (the bound without batch)
    autoscale: DesiredParams | None = None
    losses: Sequence[Loss] = ()
    rtt_s: Sequence[Sequence[float]] | None = None  # between regions; None: nothing is spilled


class Fleet:
    """One run: `Fleet(pool, load, rules).run()`. `pool`: of each region, with its workers, slots, KV and step times."""

    def __init__(self, pool: Pool, load: FleetLoad, rules: FleetRules | None = None) -> None:
        self._pool, self._load, self._rules = pool, load, rules or FleetRules()
        times = self._times = pool.step_times
        if not (times.base_s > 0.0 and times.chunk_tokens > 0):
            raise ValueError("fleet mode needs the pool's step times, and its chunk")
        classes = self._classes = load.classes
        regions, shape = load.regions, (load.regions, len(classes))
        self._of_lane = classes.of_lane
        self._priority = classes.lane == 0
        self._steps = np.maximum(classes.output_tokens - 1.0, 0.5)  # after the first token
        self._lines = Lines(load.span_s, regions, classes.lane, self._of_lane)
        self._workers = [Workers(pool, self._rules.autoscale) for _ in range(regions)]
        self._up = np.full(regions, float(pool.workers))
        self._decoding, self._prefilling = np.zeros(shape), np.zeros(shape)
        self._timely = np.zeros(shape)  # of those that decode, the ones that will have kept their promise
        self._token_s = np.full(shape, times.decode_s(1))
        self._prompts, self._priority_prompts = np.zeros(regions), np.zeros(regions)  # tokens a second and worker
        self._grant = Grant(np.zeros(regions), np.zeros(regions), np.zeros(regions))
        self._theta = np.full(regions, self._rules.interference.theta)
        self._tpot_ratio = np.zeros(regions)  # of priority's TPOT to its target, near the upper end
        self._far_share, self._far_s = np.zeros(regions), np.zeros(regions)  # spilled here of what comes, and its RTT
        self._counts = np.zeros((fleet_budget.SPAN_S, regions))  # priority arrivals by second
        self._kept = np.zeros(regions)
        self._started = np.zeros(regions)  # priority requests, in the last second
        self._behind = np.zeros(regions, dtype=np.bool_)  # priority has a backlog
        tpot_s, ttft_s = (min([FAR_S, *column[self._priority]]) for column in (classes.tpot_s, classes.ttft_s))
        self._targets = Targets(tpot_s, ttft_s, self._rules.strict)
        self._deadline_s = np.array([max([0.0, *classes.deadline_s[classes.lane == n]]) for n in range(len(LANES))])

    def run(self) -> FleetResult:
        record = Recorder(self._load)
        for second in range(self._load.span_s):
            again = self._fleet_changes(second, record)
            self._arrive(second, again, record)
            if second % int(THETA_STEP_S) == 0:
                self._look(second)
            self._serve(second, record)
        return record.result(sum(each.reversals for each in self._workers))

    # --- what comes ----------------------------------------------------------------------------------------

    def _arrive(self, second: int, again: Floats, record: Recorder) -> None:
        arrived = np.asarray(self._load.arrivals[second], dtype=np.float64)
        came = arrived
        prompt = self._mean_prompt(arrived)
        can = self._prefill_rate()[0] / prompt  # starts a second of priority
        can = np.where(self._behind, np.minimum(can, self._started), can)
        if self._rules.rtt_s is not None and len(arrived) > 1:
            waiting = (self._lines.waiting @ self._of_lane)[:, 0]
            rtt_s = np.asarray(self._rules.rtt_s, dtype=np.float64)
            came, self._far_share, self._far_s = spill(arrived, self._priority, waiting, can, self._up > 0.0, rtt_s)
        refused = self._refused(came, can)
        record.came(second, came, refused)
        self._counts[second % len(self._counts)] = came[:, self._priority].sum(axis=1)
        self._lines.add(came - refused + again)
        upto = np.maximum(0.0, np.ceil(second + 1 - self._deadline_s))
        record.dropped(second, self._lines.drop_before(np.where(np.isfinite(upto), upto, 0.0)))

    def _mean_prompt(self, came: Floats) -> Floats:
        mine = came[:, self._priority]
        total = mine.sum(axis=1)
        mean = mine @ self._classes.prompt_tokens[self._priority] / np.maximum(total, model.SMALL)
        return np.where(total > 0.0, mean, 1.0)

    def _refused(self, came: Floats, can: Floats) -> Floats:
        """Priority whose wait would be longer than its TTFT promise allows, or that meets no worker."""
        if not self._rules.refuse:
            return np.zeros_like(came)
        mine = came[:, self._priority].sum(axis=1)
        may_wait_s = np.minimum(self._classes.ttft_s, FAR_S) - self._prefill_s(self._decoding)
        room = can[:, None] * (1.0 + ADMIT_SHARE * np.maximum(0.0, may_wait_s))
        waiting = (self._lines.waiting @ self._of_lane)[:, :1]
        share = 1.0 - np.clip(_ratio(room - waiting, mine[:, None]), 0.0, 1.0)
        return came * np.where(self._priority, share, 0.0)

    # --- workers -------------------------------------------------------------------------------------------

    def _fleet_changes(self, second: int, record: Recorder) -> Floats:
        """Workers that come and go; what runs on lost ones waits again, from now."""
        before = self._up
        for loss in self._rules.losses:
            if loss.at_s == second:
                self._workers[loss.region].lose(loss)
        self._up = np.array([float(each.up(second)) for each in self._workers])
        # A worker that is given back is drained; one that is lost takes its share with it.
        lost = np.zeros(len(before))
        for loss in self._rules.losses:
            if loss.at_s == second:
                gone = before[loss.region] if loss.until_s else float(loss.workers)
                lost[loss.region] += min(1.0, gone / max(before[loss.region], 1.0))
        share = np.minimum(lost, 1.0)[:, None]
        return self._take_back(second, np.broadcast_to(share, self._decoding.shape), record)

    def _take_back(self, second: int, share: Floats, record: Recorder) -> Floats:
        """Of those that decode: they have to start again."""
        if not share.any():
            return np.zeros_like(self._decoding)
        lost, timely = self._decoding * share, self._timely * share
        self._decoding, self._timely = self._decoding - lost, self._timely - timely
        record.withdrawn(second, lost, timely)
        return lost

    def _look(self, second: int) -> None:
        here = self._decoding[:, self._priority].sum(axis=1) / np.maximum(self._up, 1.0)
        seen = self._counts[: min(second + 1, len(self._counts))]
        self._kept = fleet_budget.headroom(
            seen, self._up, here, self._pool.slots, self._load.dispersion, self._rules.headroom
        )
        params = self._rules.interference
        self._theta = np.array([
            next_theta(float(theta), float(ratio) if ratio > 0.0 else None, THETA_STEP_S, params)
            for theta, ratio in zip(self._theta, self._tpot_ratio, strict=True)
        ])  # fmt: skip
        if self._rules.autoscale is not None:
            self._scale(second, seen)

    def _scale(self, second: int, seen: Floats) -> None:
        waiting, running = self._lines.waiting @ self._of_lane, (self._decoding + self._prefilling) @ self._of_lane
        worth = self._lines.waiting * self._classes.device_s
        heads = self._lines.head_s
        for region, workers in enumerate(self._workers):
            due_s, work_s = heads[region] + self._deadline_s, worth[region] @ self._of_lane
            demand = [
                [Demand(float(due_s[lane]), float(work_s[lane]))]
                if work_s[lane] > 0.0 and due_s[lane] < math.inf
                else []
                for lane in range(1, len(LANES))
            ]
            load = load_for(
                self._pool, waiting[region], running[region], float(seen[:, region].mean()), self._load.dispersion,
                demand, int(self._up[region]),
            )  # fmt: skip
            workers.scale(load, float(second))

    # --- service -------------------------------------------------------------------------------------------

    def _serve(self, second: int, record: Recorder) -> None:
        waiting, before = self._lines.waiting, self._decoding
        self._grant = self._granted()
        shares = np.zeros((len(self._up), len(LANES)))
        for _ in range(ROUNDS):
            stays, grow = self._balance()
            shares = self._shares(waiting, before * stays, grow)
            starts = waiting * shares[:, self._classes.lane]
            self._pace(starts, 0.5 * (before + before * stays + starts * grow))
        starts, waited_s = self._lines.take(shares)
        stays, grow = self._balance()
        self._started = starts @ self._priority
        self._behind = self._lines.waiting @ self._priority > BACKLOG_S * self._started
        kept, wait_s = self._judge(starts, waited_s)
        self._decoding = before * stays + starts * grow
        timely = self._timely * stays + starts * kept * grow
        done, timely_done = before + starts - self._decoding, self._timely + starts * kept - timely
        self._timely = timely
        record.started(second, starts, starts * kept, wait_s)
        record.ended(second, done, timely_done, self._lines.waiting, self._decoding)
        self._record_fleet(second, record)

    def _record_fleet(self, second: int, record: Recorder) -> None:
        held = self._decoding + self._prefilling
        workers = np.maximum(self._up, 1.0)
        idle = model.idle_share(held.sum(axis=1) / workers, self._index)
        kv = (held @ self._classes.reserve_tokens) / (workers * max(1, self._pool.kv_tokens))
        tpot_s = self._token_s[:, self._priority].mean(axis=1) if self._priority.any() else self._token_s.mean(axis=1)
        paid = np.array([float(each.paid) for each in self._workers])
        record.fleet(second, np.where(self._up > 0.0, 1.0 - idle, 0.0), kv, tpot_s, paid)

    def _balance(self) -> tuple[Floats, Floats]:
        """By class: share of those that decode who still do a second later, and of the starts of this second."""
        life_s = self._steps * self._token_s
        stays = np.exp(-1.0 / life_s)
        stays = np.where(self._up[:, None] > 0.0, stays, 1.0)
        return stays, np.where(self._up[:, None] > 0.0, life_s * (1.0 - stays), 1.0)

    @property
    def _index(self) -> Floats:
        return model.spread(self._load.dispersion, self._up)

    def _worker(self, decoding: Floats) -> tuple[Floats, Floats]:
        """Of a worker: sequences, and their mean context."""
        total = decoding.sum(axis=1)
        context = decoding @ self._classes.context_tokens / np.maximum(total, model.SMALL)
        context = np.where(total > model.SMALL, context, self._classes.context_tokens.mean())
        return total / np.maximum(self._up, 1.0), context

    def _pace(self, starts: Floats, decoding: Floats) -> None:
        """Times of a token and of a prefill, if so many start and decode."""
        classes, gamma = self._classes, self._times.prefill_token_s
        workers = np.maximum(self._up, 1.0)
        mean, context = self._worker(decoding)
        self._prompts = (starts @ classes.prompt_tokens) / workers
        self._priority_prompts = (starts * self._priority) @ classes.prompt_tokens / workers
        lower = self._prompts - self._priority_prompts
        beside = lower * _ratio(self._grant.beside_per_s * workers, self._grant.tokens_per_s, 0.0)
        seen = np.minimum(np.maximum(mean + self._index, 1.0), max(1, self._pool.slots))
        step_s = model.decode_s(self._times, np.maximum(seen, mean), context)
        with_priority = step_s / (1.0 - np.minimum(gamma * (self._priority_prompts + beside), 0.98))
        without = step_s / (1.0 - np.minimum(gamma * self._prompts, 0.98))
        self._token_s = np.where(self._priority, with_priority[:, None], without[:, None])
        self._prefilling = starts * self._prefill_s(decoding)

    def _prefill_rate(self) -> tuple[Floats, Floats, Floats]:
        """Prompt tokens a second of a region at most; of a worker, a step without prompts and what it has for them."""
        mean, context = self._worker(self._decoding)
        step_s = model.decode_s(self._times, mean, context)
        chunk = np.maximum(self._times.chunk_tokens - mean, 1.0)
        return self._up * chunk / (step_s + self._times.prefill_token_s * chunk), step_s, chunk

    def _prefill_s(self, decoding: Floats) -> Floats:
        """By class: from a start to the first token, without waiting for other prompts."""
        mean, context = self._worker(decoding)
        step_s, gamma = model.decode_s(self._times, mean, context), self._times.prefill_token_s
        chunk = np.maximum(self._times.chunk_tokens - mean, 1.0)
        free = np.maximum(1.0 - gamma * self._prompts, 0.02)
        rest_s = model.residual_s(step_s, gamma * chunk, np.minimum(1.0, self._prompts * step_s / (chunk * free)))
        busy = 1.0 - model.idle_share(mean, self._index)
        prompt = self._classes.prompt_tokens
        steps = np.maximum(1.0, prompt / chunk[:, None] + 0.5)
        own_s = (rest_s * busy)[:, None] + steps * step_s[:, None] + gamma * prompt
        paced_s = prompt * self._up[:, None] / np.maximum(self._grant.tokens_per_s[:, None], 1.0)
        return np.where(self._priority, own_s, np.maximum(own_s, paced_s))

    # --- what may start ------------------------------------------------------------------------------------

    def _granted(self) -> Grant:
        rate, step_s, chunk = self._prefill_rate()
        workers = np.maximum(self._up, 1.0)
        if not self._rules.lower or self._priority.all():
            return Grant(np.zeros_like(rate), np.zeros_like(rate), np.zeros_like(rate))
        mine = (self._decoding + self._prefilling)[:, self._priority].sum(axis=1) / workers
        mean, context = self._worker(self._decoding)
        steps_per_s = np.maximum(1.0 - self._times.prefill_token_s * self._prompts, 0.02) / step_s
        state = State(
            self._up, 1.0 - model.idle_share(mine, self._index), mean, mine, context,
            np.minimum(1.0, self._priority_prompts / (steps_per_s * chunk)), rate / workers, self._kept,
        )  # fmt: skip
        return fleet_budget.grants(
            state, self._times, self._theta, self._pool.slots, self._targets, self._rules.interference
        )

    def _shares(self, waiting: Floats, staying: Floats, grow: Floats) -> Floats:
        """Of each lane's line, what starts now. `staying`: those that decode and will still do so at the second's end;
        `grow`: what a start adds to them."""
        reserve, lane_of = self._classes.reserve_tokens, self._of_lane
        adds = grow + self._prefill_s(self._decoding)
        tokens, places = (waiting * self._classes.prompt_tokens) @ lane_of, (waiting * adds) @ lane_of
        kv = (waiting * adds * reserve) @ lane_of
        rate = self._prefill_rate()[0]
        free = self._up * self._pool.slots - staying.sum(axis=1)
        kv_free = self._up * (self._pool.kv_tokens or FAR_S * FAR_S) - staying @ reserve
        asked = Asked(waiting @ lane_of, tokens, places, kv)
        if not self._rules.lower:
            asked = Asked(*(each * np.eye(len(LANES))[0] for each in (asked.count, tokens, places, kv)))
        lower_places = self._grant.places - staying.sum(axis=1)
        room = Room(rate, free, kv_free)
        out = starts_of(asked, room, self._grant.tokens_per_s, lower_places, self._rules.pull)
        served = [True, self._rules.lower, self._rules.lower]
        return np.where((self._up > 0.0)[:, None] & np.array(served), out, 0.0)

    # --- promises ------------------------------------------------------------------------------------------

    def _judge(self, starts: Floats, waited_s: Floats) -> tuple[Floats, Floats]:
        """By class: share of those that start that will keep their promise; by lane: how long they waited."""
        classes = self._classes
        places, prefill = self._waits(starts)
        fluid_s = waited_s[:, classes.lane]
        own_s = self._prefill_s(self._decoding)
        left_s = classes.ttft_s - fluid_s - own_s  # what is left for chance
        near, far = (places.within(x) * prefill.within(x) for x in (left_s, left_s - self._far_s[:, None]))
        in_time = near + self._far_share[:, None] * (far - near)
        in_time = np.where(np.isinf(classes.ttft_s), 1.0, in_time)
        sd_s = self._tpot_sd_s(starts)
        paced = model.normal_cdf((np.minimum(classes.tpot_s, FAR_S) - self._token_s) / (sd_s + model.SMALL))
        high = np.where(self._priority, (self._token_s + P95 * sd_s) / classes.tpot_s, 0.0)
        self._tpot_ratio = _ratio((high * starts).sum(axis=1), (starts * self._priority).sum(axis=1), 0.0)
        answer_s = np.maximum(classes.deadline_s - fluid_s - own_s, -FAR_S) / self._token_s
        deviation = np.sqrt(np.maximum(classes.answer_square - classes.output_tokens**2, 1.0))
        whole = model.normal_cdf((np.minimum(answer_s, FAR_S * FAR_S) - self._steps) / deviation)
        chance_s = places.probability * places.mean_s + prefill.probability * prefill.mean_s
        wait_s = waited_s + np.where(np.arange(len(LANES)) == 0, chance_s, 0.0)
        return in_time * paced * whole, wait_s

    def _tpot_sd_s(self, starts: Floats) -> Floats:
        """By class. Prompts of lower lanes are paced, so those of priority are what varies."""
        mine = starts * self._priority
        per_s = mine.sum(axis=1)
        workers = np.maximum(self._up, 1.0)
        cut = self._rules.interference.budget and self._rules.interference.slices
        regular = np.maximum(0.0, 1.0 - self._load.dispersion / workers)
        mean_tokens = _ratio(mine @ self._classes.prompt_tokens, per_s, 0.0)
        # A prompt of more than a chunk goes in slices where it would break the TPOT of others.
        sliced = self._classes.prompt_tokens * self._times.chunk_tokens
        squares = np.minimum(self._classes.prompt_square, sliced) if cut else self._classes.prompt_square
        square = _ratio(mine @ squares, per_s, 0.0) - regular * mean_tokens**2
        mean, context = self._worker(self._decoding)
        return model.tpot_sd_s(
            self._times, self._token_s, self._steps, (per_s / workers)[:, None], np.maximum(square, 0.0)[:, None],
            mean[:, None], self._index[:, None], context[:, None],
        )  # fmt: skip

    def _waits(self, starts: Floats) -> tuple[model.Wait, model.Wait]:
        """Of priority, beyond the fluid: for a place, and for prompts ahead at its worker. By region, as columns."""
        mine = starts * self._priority
        per_s = mine.sum(axis=1)
        offered = ((self._decoding + self._prefilling) * self._priority).sum(axis=1)
        index = 0.5 * (1.0 + self._load.dispersion)  # of the whole region, which shares its places
        stay_s = _ratio(offered, per_s, 0.0)
        places = model.wait_for_places(self._up * self._pool.slots, offered, stay_s, index)
        mean, context = self._worker(self._decoding)
        step_s = model.decode_s(self._times, mean, context)
        token_s = self._times.prefill_token_s + step_s / np.maximum(self._times.chunk_tokens - mean, 1.0)
        service_s = token_s * _ratio(mine @ self._classes.prompt_tokens, per_s, 0.0)
        square = token_s**2 * _ratio(mine @ self._classes.prompt_square, per_s, 0.0)
        workers = np.maximum(self._up, 1.0)
        prefill = model.wait_for_prefill(
            per_s / workers * service_s, service_s, square, self._load.dispersion / workers
        )
        return _column(places, ~self._behind), _column(prefill, ~self._behind)


def _column(wait: model.Wait, clear: NDArray[np.bool_]) -> model.Wait:
    return model.Wait((wait.probability * clear)[:, None], wait.mean_s[:, None])


def _ratio(amount: Floats | float, of: Floats, otherwise: float = math.inf) -> Floats:
    """`otherwise`: of nothing."""
    return np.where(of > model.SMALL, amount / np.maximum(of, model.SMALL), otherwise)
