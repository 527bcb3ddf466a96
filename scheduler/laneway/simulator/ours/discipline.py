"""Laneway in the simulator: doors judge, the scheduler releases, workers pull."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass

from laneway.core.catalogue import Pool
from laneway.core.fleet import StepTimes
from laneway.core.lanes import LANES, PARKING_LANES, Lane
from laneway.policy.admit import Placement
from laneway.policy.affinity import choose_home
from laneway.simulator.ours.door import Door, retry_after_s
from laneway.simulator.ours.jobs import ANY, Job, Lanes
from laneway.simulator.ours.params import OurParams
from laneway.simulator.ours.scheduler import Scheduler
from laneway.simulator.ours.station import Station
from laneway.simulator.ticket import Ticket
from laneway.simulator.world import Worker, World


class Laneway:
    name = "laneway"

    def __init__(self, pool: Pool, times: StepTimes, params: OurParams, *, name: str = "laneway") -> None:
        """`pool`: as the catalogue would have it; `times`: of its engine's profile."""
        self.name = name
        self._pool = pool
        self._times = times
        self._params = params
        self._lanes = Lanes()
        self._open: dict[Worker, None] = {}  # in the turn in which their open pulls are answered
        self._ringing = False
        self._stations: dict[str, Station] = {}  # by home
        self._last_home: dict[str, str] = {}  # of each key

    # --- the world's calls -------------------------------------------------------------------------------

    def begin(self, world: World) -> None:
        self._world = world
        tenants = world.trace.tenants
        self._door = Door(self._pool, self._params, tenants, world.random)
        self._scheduler = Scheduler(self._pool, self._params, tenants, self._lanes)
        for worker in world.workers:
            self._equip(worker)
        self.tick()

    def arrive(self, ticket: Ticket) -> None:
        now_s = self._world.now_s
        lane = LANES[ticket.lane]
        if ticket.mind is None:
            ticket.mind = Job(ticket.max_tokens)
        if lane is Lane.PRIORITY and not ticket.retries:
            self._scheduler.forecast.arrived(now_s)
        decision = self._door.judge(ticket, now_s)
        if decision.refusal is not None:
            self._world.count(f"refused_{decision.verdict.reason}")
            self._world.refuse(ticket, retry_after_s(decision))
            return
        job: Job = ticket.mind
        job.decision, job.latest_start_s = decision, decision.latest_start_s
        if self._params.affinity:
            self._choose_home(ticket)
        if decision.placement is Placement.PARKED:
            self._scheduler.park(ticket, now_s)
        else:
            self._ready(ticket)

    def first(self, ticket: Ticket) -> None:
        assert ticket.where is not None
        station: Station = ticket.where.mind
        station.first(ticket)

    def sliced(self, ticket: Ticket, worker: Worker) -> None:
        worker.mind.sliced(ticket)

    def ended(self, ticket: Ticket, worker: Worker) -> None:
        worker.mind.ended(ticket)
        self._over(ticket)

    def left(self, ticket: Ticket) -> None:
        job: Job = ticket.mind
        if job.entry is not None:  # in a worker's hands, with nothing of it in the engine at this moment
            station: Station = self._where(job)
            station.ended(ticket)
        elif not self._scheduler.unpark(ticket) and not any(w.mind.forget(ticket) for w in self._world.workers):
            self._lanes.forget(ticket)
        job.gone = True
        self._over(ticket)

    def lost(self, tickets: Sequence[Ticket], worker: Worker) -> None:
        self._gone(worker)
        station: Station = worker.mind
        held = [entry.ticket for entry in station.budget.entries]
        for ticket in (*dict.fromkeys((*tickets, *held)), *station.emptied()):
            job: Job = ticket.mind
            job.entry = None
            if not job.gone:
                self._again(ticket)

    def joined(self, worker: Worker) -> None:
        self._equip(worker)
        worker.mind.look()

    def stepped(self, worker: Worker) -> None:
        worker.mind.stepped()

    def tick(self) -> None:
        now_s = self._world.now_s
        stations = [worker.mind for worker in self._world.workers]
        released = self._scheduler.look(stations, now_s)
        plan = self._scheduler.plan
        assert plan is not None
        self._door.plan_arrived(plan, now_s)
        for ticket in released:
            self._lanes.put(ticket, now_s)
        if self._params.autoscale:
            self._scale()
        for ticket in self._scheduler.overdue(now_s):
            ticket.mind.gone = True
            self._world.drop(ticket)
        self._ring()

    def waiting(self) -> Sequence[int]:
        return [ready + parked for ready, parked in zip(self._lanes.counts(), self._scheduler.counts(), strict=True)]

    def parameters(self) -> dict[str, float | str | bool]:
        out: dict[str, float | str | bool] = {}
        for field in fields(self._params):
            value = getattr(self._params, field.name)
            if is_dataclass(value):
                out |= {f"{field.name}.{name.name}": str(getattr(value, name.name)) for name in fields(value)}
            else:
                out[field.name] = value
        return out

    # --- jobs --------------------------------------------------------------------------------------------

    def _ready(self, ticket: Ticket) -> None:
        """Its message is in its lane."""
        home = ticket.mind.home
        if home != ANY:
            station = self._stations.get(home)
            if station is not None and ticket.lane == 0 and station.takes_priority(ticket):
                station.take(ticket)
                return
        elif ticket.lane == 0 and not self._lanes.waits(Lane.PRIORITY):
            for worker in list(self._open):
                if worker.mind.takes_priority(ticket):
                    del self._open[worker]
                    self._open[worker] = None
                    worker.mind.take(ticket)
                    return
        self._lanes.put(ticket, self._world.now_s)
        if home != ANY and home in self._stations:
            self._stations[home].look()
        if ticket.lane == 0:
            if not self._ringing:
                self._ringing = True
                self._world.call_at(self._world.now_s + self._params.preempt.delay_s, self._relieve)
        else:
            self._ring()

    def _relieve(self) -> None:
        """Priority waits without room: workers let one run yield for each such job."""
        self._ringing = False
        for worker in list(self._open):
            if not self._lanes.waits(Lane.PRIORITY):
                return
            del self._open[worker]
            self._open[worker] = None
            worker.mind.look(relieve=True)
        if self._lanes.waits(Lane.PRIORITY):
            self._ringing = True
            self._world.call_at(self._world.now_s + self._world.fleet.tick_s, self._relieve)

    def _ring(self) -> None:
        """Lower-lane jobs became ready: workers that may have room look."""
        for worker in list(self._open):
            if not any(self._lanes.waits(lane) for lane in PARKING_LANES):
                return
            station: Station = worker.mind
            if station.hungry:
                del self._open[worker]
                self._open[worker] = None
                station.hungry = False
                station.look()

    def _again(self, ticket: Ticket) -> None:
        """It goes on where it stopped: through the scheduler, or at once where it is priority or due."""
        self._door.ended(ticket)
        if ticket.lane == 0:
            self._ready(ticket)
        else:
            self._scheduler.park(ticket, self._world.now_s)

    def _over(self, ticket: Ticket) -> None:
        self._door.ended(ticket)
        if ticket.made >= ticket.output_tokens:
            self._door.answered(ticket)
            self._scheduler.ended(ticket, ticket.first_s, self._world.now_s)

    # --- workers -----------------------------------------------------------------------------------------

    def _equip(self, worker: Worker) -> None:
        station = worker.mind = Station(
            self._world, worker, self._lanes, self._times, self._params, self._door.predicted, self._again
        )
        self._open[worker] = None
        if self._params.affinity:
            station.home = self._free_home()
            self._stations[station.home] = station
            self._lanes.served[station.home] = worker.number

    def _free_home(self) -> str:
        """The lowest home slot that nobody serves: a worker that takes the place of another meets its jobs."""
        return next(home for n in range(len(self._stations) + 1) if (home := f"h{n}") not in self._stations)

    def _gone(self, worker: Worker) -> None:
        self._open.pop(worker, None)
        home = worker.mind.home
        if home != ANY:
            self._stations.pop(home, None)
            self._lanes.served.pop(home, None)

    def _choose_home(self, ticket: Ticket) -> None:
        job: Job = ticket.mind
        if ticket.session >= 0:
            job.key = f"session {ticket.session}"
        elif ticket.blocks:
            job.key = f"prefix {ticket.blocks[0]}"
        if not job.key or len(self._stations) < 2:
            return
        loads = {
            home: float(len(station.budget.entries) + self._lanes.at_home(home))
            for home, station in self._stations.items()
        }
        job.home = choose_home(job.key, loads, self._last_home.get(job.key, ""))
        if job.home:
            self._last_home[job.key] = job.home

    def _where(self, job: Job) -> Station:
        for worker in self._world.workers:
            if job.entry in worker.mind.budget.entries:
                station: Station = worker.mind
                return station
        raise AssertionError("a job in a worker's hands is at one of them")

    def _scale(self) -> None:
        world, wanted = self._world, self._scheduler.desired
        there = len(world.workers) + world.booting
        for _ in range(wanted - there):
            world.add_worker()
        while there > max(1, wanted):
            if world.booting:
                world.remove_worker()
            else:
                idle = next((w for w in reversed(world.workers) if not w.mind.budget.entries and not w.tickets), None)
                if idle is None:
                    return
                self._gone(idle)
                world.remove_worker(idle)
            there -= 1
