"""The scheduler of a simulated pool: parked jobs, the plan, and what is released; policy.release and policy.plan."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import replace

from laneway.core.catalogue import Catalogue, Pool
from laneway.core.fleet import Demand, Plan, WorkerLease, WorkerState
from laneway.core.job import Usage
from laneway.core.lanes import LANES, PARKING_LANES, Lane
from laneway.core.subjects import ParkSubject
from laneway.policy.calibration import Calibrator, Outcome, Span, with_fits
from laneway.policy.demand import demand_curve
from laneway.policy.desired import NEAR_JOBS, Scaling
from laneway.policy.fairness import Ledger, nominal_tokens_per_ms
from laneway.policy.forecast import Outlook, PoolForecast
from laneway.policy.holds import Holds
from laneway.policy.parked import ParkIndex
from laneway.policy.plan import Depth, Parked, Snapshot, make_plan
from laneway.policy.release import Release, choose, room_of
from laneway.simulator.ours.jobs import Job, Lanes
from laneway.simulator.ours.params import OurParams
from laneway.simulator.ours.station import Station
from laneway.simulator.ticket import Ticket

REGION = "sim"
OUTLOOK_AGE_S = 5.0
DEMAND_AGE_S = 5.0
SWEEP_S = 5.0  # between two looks for jobs past their deadline


class Scheduler:
    def __init__(self, pool: Pool, params: OurParams, tenants: Sequence[str], lanes: Lanes) -> None:
        self.pool = pool
        self.plan: Plan | None = None
        self.forecast = PoolForecast(0.0)
        self.parked: dict[str, Ticket] = {}  # by job
        self._catalogue = Catalogue((pool,))
        self._params = params
        self._tenants = tenants
        self._lanes = lanes
        self._index = ParkIndex()
        self._ledger = Ledger(params.release.fair)
        self._scaling = Scaling(pool.workers)
        self._calibrator = Calibrator()
        self._holds = Holds({pool.name: self.forecast})
        self._outlook = Outlook()
        self._outlook_s = self._demand_s = self._swept_s = -math.inf
        self._demand: dict[tuple[str, Lane], tuple[Demand, ...]] = {}
        self._near: Sequence[tuple[str, float, float]] = ()
        self._version = 0

    def park(self, ticket: Ticket, now_s: float) -> None:
        job: Job = ticket.mind
        if job.park is None:
            assert job.decision is not None
            job.park = ParkSubject(
                REGION, LANES[ticket.lane], self.pool.name, self._tenants[ticket.tenant], 0,
                round(min(job.latest_start_s, 1e9) * 1000.0), max(1, round(job.decision.device_s * 1000.0)), "-",
                str(ticket.index),
            )  # fmt: skip
        self.parked[job.park.job] = ticket
        self._index.add(job.park, now_ms=round(now_s * 1000.0))

    def unpark(self, ticket: Ticket) -> bool:
        job: Job = ticket.mind
        if job.park is None or self.parked.pop(job.park.job, None) is None:
            return False
        self._index.discard(job.park.job)
        return True

    def look(self, stations: Sequence[Station], now_s: float) -> list[Ticket]:
        """Makes the plan of this moment; the jobs that become ready now."""
        leases = [_lease(station, self.pool.name, now_s) for station in stations]
        self.plan = plan = self._planned(leases, stations, now_s)
        self._index.wake(round(now_s * 1000.0))
        released = self._choose(plan, leases, now_s)
        out = []
        for release in released:
            self._ledger.charge(release.park, release.charge)
            self._holds.released(release.park)
            self._index.discard(release.park.job)
            out.append(self.parked.pop(release.park.job))
        return out

    def ended(self, ticket: Ticket, first_s: float, end_s: float) -> None:
        """A job is done: its tenant's account is put right, and its verdict compared with what came of it."""
        job: Job = ticket.mind
        if job.park is not None:
            self._ledger.ended(job.park.job, Usage(ticket.prompt_tokens, ticket.made))
        verdict = job.decision.verdict if job.decision is not None else None
        if verdict is None or verdict.estimate is None:
            return
        said, ttft, completion = verdict.estimate, None, None
        if verdict.ttft_bound_s is not None and said.ttft_s > 0.0 and ticket.starts == 1:
            ttft = Span(said.ttft_s, said.ttft_bound_s, verdict.ttft_bound_s, first_s - ticket.came_s)
        if verdict.completion_bound_s is not None and said.completion_s > 0.0:
            bound_s = verdict.completion_bound_s
            completion = Span(said.completion_s, said.completion_bound_s, bound_s, end_s - ticket.came_s)
        self._calibrator.add(Outcome(self.pool.name, LANES[ticket.lane], ttft, completion))

    def overdue(self, now_s: float) -> list[Ticket]:
        """Parked past its deadline: of no use to anybody any more."""
        if now_s - self._swept_s < SWEEP_S:
            return []
        self._swept_s = now_s
        parks = self._index.by_due(self.pool.name, PARKING_LANES, round(now_s * 1000.0))
        over = [ticket for park in parks if (ticket := self.parked[park.job]).due_s <= now_s]
        for ticket in over:
            self.unpark(ticket)
        return over

    def counts(self) -> list[int]:
        """Parked jobs by lane."""
        return [self._index.count(self.pool.name, lane) for lane in LANES]

    @property
    def desired(self) -> int:
        return self.plan.pool(self.pool.name).desired_workers if self.plan is not None else self.pool.workers

    def _choose(self, plan: Plan, leases: Sequence[WorkerLease], now_s: float) -> list[Release]:
        pool = plan.pool(self.pool.name)
        if not len(self._index):
            return []
        self._ledger.nominal(pool.pool, nominal_tokens_per_ms(pool, self._params.release.fair))
        tokens = self._ledger.means(pool.pool).computed_tokens
        room = room_of(pool, self._params.release, leases=leases, prompt_tokens=tokens)
        params = self._params.release
        hold = self._holds.look(pool, self._index, now_s, params.hold)
        return choose(self._index, room, self._ledger, now_s=now_s, params=params, hold=hold)

    def _planned(self, leases: Sequence[WorkerLease], stations: Sequence[Station], now_s: float) -> Plan:
        name = self.pool.name
        running = dict.fromkeys(LANES, 0)
        for station in stations:
            for entry in station.budget.entries:
                running[entry.lane] += 1
        depths = {(name, lane): Depth(self._lanes.count(lane), running[lane]) for lane in LANES}
        self.forecast.observe(depths[name, Lane.PRIORITY].ready + running[Lane.PRIORITY], now_s)
        if now_s - self._outlook_s >= OUTLOOK_AGE_S:
            self._outlook_s, self._outlook = now_s, self.forecast.outlook(self.pool.load_s)
        if now_s - self._demand_s >= DEMAND_AGE_S:
            self._demand_s = now_s
            self._demand = {
                (name, lane): demand_curve(self._index.demand(name, [lane]), now_s) for lane in PARKING_LANES
            }
            self._near = self._index.near(name, NEAR_JOBS) if self._params.autoscale else ()
        snapshot = Snapshot(
            leases=leases,
            depths=depths,
            parked={
                (name, lane): Parked(self._index.count(name, lane), self._index.device_s(name, lane))
                for lane in PARKING_LANES
            },
            demand=self._demand,
            near={name: self._near},
            outlook={name: self._outlook},
            job_tokens={name: self._ledger.means(name).kv_tokens},
        )
        self._version += 1
        plan = make_plan(
            snapshot, self._catalogue, region=REGION, epoch=1, version=self._version, now_s=now_s, valid_s=5.0,
            params=self._params.desired,
        )  # fmt: skip
        workers = self._scaling.step(
            plan.pools[0].desired_workers, now_s, load_s=self.pool.load_s, there=len(leases),
            params=self._params.desired,
        )  # fmt: skip
        plan = replace(plan, pools=(replace(plan.pools[0], desired_workers=workers),))
        return with_fits(plan, {(name, lane): self._calibrator.fits(name, lane) for lane in LANES})


def _lease(station: Station, pool: str, now_s: float) -> WorkerLease:
    budget, worker = station.budget, station.worker
    engine = worker.engine
    load = budget.load(now_s)
    return WorkerLease(
        str(worker.number),
        str(worker.number),
        pool,
        "simulated",
        WorkerState.READY,
        slots=engine.slots,
        running=len(budget.entries),
        kv_tokens=engine.kv_tokens,
        kv_tokens_used=engine.kv_tokens - max(0, station.kv_free()),
        service_s=station.service_s,
        started_s=worker.ready_s,
        renewed_s=now_s,
        step_times=load.times,
        lower_tokens_per_s=budget.lower_tokens_per_s(now_s),
        priority_tpot_p95_s=budget.tpot_p95_s(now_s),
        theta=budget.theta,
        lower_places=station.lower_places(),
    )
