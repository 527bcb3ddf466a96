"""A worker: one engine, the lanes of one pool, and the runs between them.

Composes the owners of state (pulls, seats, runs, engine, lease) and looks after them a few times a second. Ends by
draining: no new pulls, unstarted work back at once, running work to its end within the time there is, the rest handed
back for others to go on with.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine, Mapping
from random import Random
from typing import Any

import structlog
from msgspec import Struct

from laneway.core.catalogue import Pool
from laneway.core.clock import Clock
from laneway.core.fleet import Plan, WorkerLease, WorkerState
from laneway.core.lanes import LANES, Lane
from laneway.policy import stealing
from laneway.policy.lengths import LengthBook
from laneway.policy.retry import RetryParams
from laneway.runtime.bells import Bell
from laneway.runtime.bus import Bus, BusError
from laneway.runtime.checkpoints import CheckpointStore
from laneway.runtime.clock import SYSTEM_RANDOM
from laneway.runtime.dead_letters import DeadLetterStore
from laneway.runtime.lanes import LaneStore
from laneway.runtime.leases import LeaseKeeper, LeaseWatcher
from laneway.runtime.link import LinkWatch
from laneway.runtime.live_policy import LivePolicy
from laneway.runtime.nats_clock import NatsClock
from laneway.runtime.objects import ObjectStore
from laneway.runtime.params import kv_params, overload_params, preempt_params, pull_params, steal_params
from laneway.runtime.plans import PlanView
from laneway.runtime.puller import LanePuller
from laneway.runtime.records import RecordStore
from laneway.runtime.references import References
from laneway.runtime.settings import PolicySettings
from laneway.workers import metrics
from laneway.workers.bench import Bench
from laneway.workers.budget import Budget
from laneway.workers.checkpointing import Checkpointing
from laneway.workers.claims import Claims
from laneway.workers.control import Control
from laneway.workers.dead_letters import DeadLetters
from laneway.workers.disposal import Disposal
from laneway.workers.emitter import Emitter
from laneway.workers.endings import Endings
from laneway.workers.engine_keeper import EngineKeeper
from laneway.workers.engines.protocol import Engine
from laneway.workers.first_token import trial_request
from laneway.workers.homes import Homes, retired_homes_or_none
from laneway.workers.hot_prefixes import HotPrefixes
from laneway.workers.ledger import Seats
from laneway.workers.predicting import predicted_tokens
from laneway.workers.pulling import PullLoop
from laneway.workers.rates import Rates
from laneway.workers.reparking import Reparking
from laneway.workers.retries import Retries
from laneway.workers.runs import Runs
from laneway.workers.sequences import Sequences
from laneway.workers.sources import Sources
from laneway.workers.step_watch import StepWatch
from laneway.workers.yielding import Yielding

HOUSEKEEPING_S = 0.25
HAND_BACK_S = 5.0  # for handing back what did not finish while draining

_log = structlog.get_logger(__name__)


class WorkerOptions(Struct, frozen=True):
    """What a worker is told, resolved from settings."""

    region: str
    name: str  # stable across restarts
    worker_id: str  # this incarnation
    pool: Pool
    ack_wait_s: Mapping[Lane, float]
    policy: PolicySettings = PolicySettings()  # until a plan says otherwise
    slots: int = 0  # fewer than the engine has; 0: all
    prefix_cache: bool = True  # the engine keeps what prompts have in common, if it can
    pull_fallback_s: float = 0.25
    step_timeout_s: float = 30.0
    retention_s: float = 86_400.0
    drain_s: float = 30.0
    trial_prompt: tuple[int, ...] = (0,)  # what a new engine gives its first token for


class Worker:
    """`run` serves until told to stop."""

    def __init__(
        self,
        bus: Bus,
        options: WorkerOptions,
        make_engine: Callable[[], Engine],
        token_bytes: Callable[[int], bytes],
        system: Clock,
        random: Random = SYSTEM_RANDOM,
    ) -> None:
        self._bus = bus
        self._options = options
        self._clock = clock = NatsClock(bus, system)
        self._started_s = clock.now()
        region, me = options.region, options.worker_id
        self.rates = Rates(options.pool.prefill_tokens_per_s)
        self._lengths = LengthBook()
        self.lease = LeaseKeeper(bus, region, self.snapshot, clock)
        self._watcher = LeaseWatcher(bus, region, clock)
        self.policy = LivePolicy(options.policy)
        self._plans = PlanView(bus, region, clock, self._plan_arrived)
        self._link = LinkWatch(bus, self._heard_again)
        self.emitter = Emitter(bus.post, me)
        self._dropped = 0  # token messages, as the metric has them
        self.sequences = Sequences(clock, self._look_at_lease, self._stepped)
        self._reuses = options.prefix_cache and options.pool.capabilities.prefix_cache
        self.budget = Budget(options.pool, self.policy, clock, self.sequences, prefix_cache=self._reuses)
        self.sequences.watcher = self.budget
        self.engine = EngineKeeper(
            make_engine, self.sequences, clock, self._engine_changed,
            trial_request(options.pool.capabilities, options.trial_prompt),
            load_s=options.pool.load_s, trial_s=options.step_timeout_s,
        )  # fmt: skip
        records = RecordStore(bus, retention_s=options.retention_s, clock=clock, random=random)
        retries = Retries(clock, random, RetryParams.of_worker(options.slots or options.pool.slots))
        claims = Claims(records, me, clock, self._watcher.alive, retries)
        objects = ObjectStore(bus, region, clock=clock, random=random)
        self._references = References(objects, retention_s=options.retention_s)
        endings = Endings(records, bus.emit, me, clock, bus.payload_bytes_max, random, self._references)
        dead_letters = DeadLetters(DeadLetterStore(bus, region), clock)
        self._disposal = Disposal(claims, endings, dead_letters, clock)
        self.checkpointing = Checkpointing(CheckpointStore(bus), clock, options.pool.name)
        self._bench = Bench(
            worker_id=me,
            pool=options.pool,
            exact=options.pool.capabilities.exact,
            clock=clock,
            ack_wait_s=options.ack_wait_s,
            token_bytes=token_bytes,
            claims=claims,
            endings=endings,
            checkpointing=self.checkpointing,
            dead_letters=dead_letters,
            emitter=self.emitter,
            sequences=self.sequences,
            rates=self.rates,
            retries=retries,
            lengths=self._lengths,
            hot_prefixes=HotPrefixes(),
            reparking=Reparking(LaneStore(bus, region), options.pool, self._fresh_plan, clock, self._floor),
            single_flight=lambda: self.policy.settings.single_flight,
            budget=self.budget,
        )
        self._tasks = asyncio.TaskGroup()
        self.seats: Seats | None = None
        self.runs: Runs | None = None
        self.pulls: PullLoop | None = None
        self.yielding: Yielding | None = None
        self._control: Control | None = None
        self._stopping = False
        self._idle = asyncio.Event()  # pulsed whenever a run leaves
        self._step_watch = StepWatch(options.step_timeout_s)

    # --- life ----------------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event, on_ready: Callable[[], None] = lambda: None) -> None:
        """Serves until `stop` is set, then drains. Raises EngineStartError, or what the bus says."""
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self._clock.kept())
            self._started_s = self._clock.now()
            await self._watcher.start()
            stack.push_async_callback(self._watcher.close)
            await self._plans.start()
            stack.push_async_callback(self._plans.close)
            await self._link.start()
            stack.push_async_callback(self._link.close)
            await self._serve(stop, on_ready)

    async def _serve(self, stop: asyncio.Event, on_ready: Callable[[], None]) -> None:
        async with self._tasks:
            background = [
                self._spawn(self.engine.run()),
                self._spawn(self.lease.run()),
                self._spawn(self.checkpointing.run()),
            ]
            try:
                if await self._engine_ready(stop):
                    await self._work(stop, on_ready)
            finally:
                for task in background:
                    task.cancel()
        with contextlib.suppress(BusError):
            await self.lease.release()

    async def _engine_ready(self, stop: asyncio.Event) -> bool:
        """Waits for the engine; False when told to stop before it was ready."""
        waits = {asyncio.ensure_future(self.engine.ready()), asyncio.ensure_future(stop.wait())}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return not stop.is_set()

    async def _work(self, stop: asyncio.Event, on_ready: Callable[[], None]) -> None:
        options = self._options
        capacity = await self.engine.ready()
        seats = self.seats = Seats(
            capacity,
            options.slots,
            predict=lambda job: predicted_tokens(job, self._lengths),
            params=self.policy.derive(kv_params),
            prefix_cache=self._reuses,
        )
        self.sequences.followers_max = seats.slots
        runs = self.runs = Runs(self._bench, seats, self._disposal, self._references, self._spawn, self._run_left)
        self.budget.started(capacity, seats, runs.lower_prefills)
        async with contextlib.AsyncExitStack() as stack:
            sources = await stack.enter_async_context(await self._sources())
            yielding = self.yielding = self._yielding(runs, seats)
            pulls = self.pulls = PullLoop(
                sources,
                seats,
                runs,
                self.budget,
                self.policy.derive(pull_params),
                self._clock,
                ack_wait_s=options.ack_wait_s,
                fallback_s=options.pull_fallback_s,
                paused=self._paused,
                engine_steps=self._engine_steps,
                relief=yielding,
                overload=self.policy.derive(overload_params),
                tpot_p95_s=lambda: self.budget.priority_tpot_p95_s,
            )
            await stack.enter_async_context(Bell(self._bus, options.region, options.pool.name, pulls.ring))
            self._control = Control(
                self._bus, options.region, options.worker_id, runs, pulls, self.emitter, self._clock, self._spawn, self
            )
            await stack.enter_async_context(self._control)
            stack.enter_context(metrics.gauges(options.pool.name, self))
            stack.enter_context(self.policy.gauge())
            await self.lease.renew()
            self._look_at_lease()
            on_ready()
            background = [self._spawn(pulls.run()), self._spawn(self._keep_house(runs, pulls))]
            try:
                await stop.wait()
                await self._drain(runs, pulls)
            finally:
                for task in background:
                    task.cancel()

    async def _drain(self, runs: Runs, pulls: PullLoop) -> None:
        self._stopping = True
        _log.info("worker_draining", running=len(runs), drain_s=self._options.drain_s)
        await pulls.pause()
        runs.stop_fetches()
        await self._renew()
        if not await self._until_idle(runs, self._options.drain_s):
            for run in runs:
                run.hand_back()
            if not await self._until_idle(runs, HAND_BACK_S):
                # Runs that were handed back wait for an engine which does not answer, and so would we for them.
                self.engine.give_up("the engine does not let go of what was aborted")
                if not await self._until_idle(runs, HAND_BACK_S):
                    _log.error("runs_abandoned", running=len(runs))
        _log.info("worker_drained")

    async def _until_idle(self, runs: Runs, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while len(runs):
                    self._idle.clear()
                    await self._idle.wait()
        return not len(runs)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._tasks.create_task(work)

    # --- looking after everything --------------------------------------------------------------------

    async def _keep_house(self, runs: Runs, pulls: PullLoop) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            now_s = self._clock.monotonic()
            await self._ask_for_time(runs, now_s)
            await pulls.look_after_staged()
            if self._link.sound() and self._control is not None:
                for run in runs:
                    run.check_doors(now_s, self._control.heard_s)
            self._look_at_lease()
            self.budget.pump()
            self.checkpointing.look(now_s)
            self._check_engine(now_s)
            self._count_dropped()

    def _count_dropped(self) -> None:
        dropped, self._dropped = self.emitter.dropped - self._dropped, self.emitter.dropped
        if dropped:
            metrics.DROPPED.labels(self._options.pool.name).inc(dropped)
            _log.warning("token_messages_dropped", count=dropped)

    def _look_at_lease(self) -> None:
        """Without a lease nothing leaves; with it again, every run first makes sure that its job was not taken over."""
        held, was_held = self.lease.held(), self.emitter.may_emit
        self.emitter.may_emit = held
        if held and not was_held:
            for run in self.runs or ():
                run.confirm_ownership()

    async def _ask_for_time(self, runs: Runs, now_s: float) -> None:
        steps = self._engine_steps()
        for run in runs.holders():
            if run.ack_wait.ask(now_s, steps):
                with contextlib.suppress(BusError):  # the next try is near, and a late one costs a redelivery
                    await run.delivery.progress()

    def _check_engine(self, now_s: float) -> None:
        live = len(self.sequences)
        if self._step_watch.hung(now_s, self._engine_steps(), has_work=live > 0):
            self.engine.give_up(f"no step for {self._options.step_timeout_s:g} s with {live} sequences")

    def _engine_steps(self) -> int:
        return self.sequences.stats().steps

    def _stepped(self) -> None:
        self.budget.pump()
        self.emitter.flush()
        self.checkpointing.write_due()
        if self.seats is not None:
            self.seats.observe(self.sequences.stats())
        if self.yielding is not None:
            self.yielding.look_at_kv()
        if self.pulls is not None:
            self.pulls.engine_stepped()

    def _run_left(self) -> None:
        self._idle.set()
        self._room_changed()

    def _room_changed(self) -> None:
        if self.pulls is not None:
            self.pulls.room_changed()

    async def _sources(self) -> Sources:
        bus, options = self._bus, self._options
        region, pool = options.region, options.pool
        retired = await retired_homes_or_none(bus, region, pool)
        homes = Homes(
            pool, options.worker_id, lambda: self._plans.plan, self._plans.fresh, self._watcher.alive, retired
        )
        steal = self.policy.derive(steal_params)

        def patience_s(lane: Lane) -> float:
            prefill_tokens_per_s = self.rates.prefill_tokens_per_s or pool.prefill_tokens_per_s
            target_s = self.policy.settings.lane(lane).ttft_target_s
            return stealing.patience_s(self.rates.saved.tokens, prefill_tokens_per_s, target_s, steal())

        return Sources(
            homes, lambda lane, home: LanePuller(bus, region, lane, pool.name, home), self._clock, patience_s
        )

    def _yielding(self, runs: Runs, seats: Seats) -> Yielding:
        options = self._options
        return Yielding(
            runs, seats, options.pool, self.rates, self._lengths, self._fresh_plan, self._clock,
            self.policy.derive(preempt_params),
        )  # fmt: skip

    def _plan_arrived(self, plan: Plan) -> None:
        self.policy.take(plan)
        self._room_changed()

    def _floor(self) -> float:
        return self.policy.settings.lower_lane_floor

    def _fresh_plan(self) -> Plan | None:
        return self._plans.plan if self._plans.fresh() else None

    def _paused(self) -> frozenset[Lane]:
        return self._plans.plan.paused if self._plans.plan is not None else frozenset()

    def _heard_again(self) -> None:
        now_s = self._clock.monotonic()
        if self._control is not None:
            self._control.excuse(now_s)
        for run in self.runs or ():
            run.excuse_doors(now_s)

    async def _engine_changed(self) -> None:
        if self.engine.state is WorkerState.BROKEN and self.runs is not None:
            await self._until_idle(self.runs, HAND_BACK_S)
        if self.engine.state is not WorkerState.READY:
            self._bench.hot_prefixes.clear()
        await self._renew()
        self._room_changed()

    @property
    def clock(self) -> Clock:
        """Of jobs, and of all that workers share: that of NATS, kept while the worker runs."""
        return self._clock

    @property
    def stopping(self) -> bool:
        return self._stopping

    async def drain_changed(self) -> None:
        """An operator drained or undrained this worker."""
        await self._renew()

    async def _renew(self) -> None:
        with contextlib.suppress(BusError):
            await self.lease.renew()

    # --- what others see -----------------------------------------------------------------------------

    def snapshot(self) -> WorkerLease:
        """The lease as it is now."""
        options, seats, state = self._options, self.seats, self.engine.state
        draining = self._stopping or (self.pulls is not None and self.pulls.draining)
        if state is WorkerState.READY and draining:
            state = WorkerState.DRAINING
        return WorkerLease(
            worker_id=options.worker_id,
            name=options.name,
            pool=options.pool.name,
            engine=options.pool.engine,
            state=state,
            detail=self.engine.detail,
            load_progress=self.engine.load_progress,
            engine_deaths=self.engine.deaths,
            slots=seats.slots if seats is not None else 0,
            running=len(seats) if seats is not None else 0,
            kv_tokens=seats.kv_tokens if seats is not None else 0,
            kv_tokens_used=seats.kv_tokens_used if seats is not None else 0,
            prefill_tokens_per_s=self.rates.prefill_tokens_per_s,
            decode_tokens_per_s=self.rates.decode_tokens_per_s,
            service_s=self.rates.service_s,
            started_s=self._started_s,
            renewed_s=self._clock.now(),
            jobs_done=self.rates.jobs_done,
            tokens_done=self.rates.tokens_done,
            busy_s=self.engine.busy_s,
            capabilities=tuple(options.pool.capabilities.names()),
            running_by_lane=self.running_by_lane(),
            process_id=os.getpid(),
            hot_prefixes=self._bench.hot_prefixes.top(),
            block_tokens=seats.block_tokens if seats is not None else 0,
            step_times=self.budget.step_times,
            lower_tokens_per_s=self.budget.lower_tokens_per_s,
            priority_tpot_p95_s=self.budget.priority_tpot_p95_s,
            theta=self.budget.theta,
            lower_places=self.budget.lower_places() if state is WorkerState.READY else 0,
            home=self.pulls.home if self.pulls is not None else "",
        )

    def running_by_lane(self) -> Mapping[Lane, int]:
        return self.seats.by_lane() if self.seats is not None else dict.fromkeys(LANES, 0)

    def staged_by_lane(self) -> Mapping[Lane, int]:
        staged = self.pulls.staged if self.pulls else {}
        return {lane: int(lane in staged) for lane in LANES}

    def kv_tokens(self) -> tuple[int, int]:
        return (self.seats.kv_tokens_used, self.seats.kv_tokens) if self.seats is not None else (0, 0)

    def interference(self) -> Mapping[str, float]:
        return self.budget.seen()

    def slots(self) -> int:
        return self.seats.slots if self.seats is not None else 0

    def ready_workers(self) -> int:
        return int(self.engine.state is WorkerState.READY)
