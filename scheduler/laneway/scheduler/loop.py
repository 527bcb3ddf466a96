"""The scheduler of a region: stands by, leads when it is elected, and shows what it knows either way."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random

import structlog

from laneway.core.catalogue import Catalogue
from laneway.core.clock import Clock
from laneway.core.fleet import Plan
from laneway.core.lanes import Lane
from laneway.runtime.bus import Bus, BusError
from laneway.runtime.clock import SYSTEM_RANDOM
from laneway.runtime.leases import LeaseWatcher
from laneway.runtime.live_policy import LivePolicy
from laneway.runtime.nats_clock import NatsClock
from laneway.runtime.plans import PlanView
from laneway.runtime.records import RecordStore
from laneway.runtime.settings import Settings
from laneway.runtime.settings_source import SettingsSource
from laneway.scheduler.decisions import DecisionLog
from laneway.scheduler.lead import Lead
from laneway.scheduler.leader import Leadership
from laneway.scheduler.pauses import Pauses
from laneway.scheduler.policy_reload import PolicyReload

RETRY_S = 0.5

_log = structlog.get_logger(__name__)


class Scheduler:
    """One process's part. `watching` first, then `run`; everything else may be read at any time."""

    def __init__(
        self,
        bus: Bus,
        settings: Settings,
        catalogue: Catalogue,
        system: Clock,
        *,
        connect: Callable[[str], Awaitable[Bus]] | None = None,
        random: Random = SYSTEM_RANDOM,
        source: SettingsSource | None = None,
    ) -> None:
        """`connect` makes one more connection of a given name, by default to the settings' NATS. `source`: where the
        settings are read from again; None: they are not."""
        region = settings.region.name
        clock = NatsClock(bus, system)
        self.region = region
        self.catalogue = catalogue
        self.clock = clock
        self.bus = bus
        self.policy = LivePolicy(settings.policy)
        self.lead: Lead | None = None  # while this process leads
        self.decisions = DecisionLog()
        self.released: Counter[tuple[str, Lane]] = Counter()
        self.records = RecordStore(bus, retention_s=settings.nats.retention_s, clock=clock, random=random)
        self.leases = LeaseWatcher(bus, region, clock)
        self.plans = PlanView(bus, region, clock, on_change=self._plan_changed)
        self.leadership = Leadership(
            bus, region, clock, who=f"{bus.name}-{random.randbytes(8).hex()}", ttl_s=settings.scheduler.leader_ttl_s
        )
        self._look_now = asyncio.Event()
        self.reload = PolicyReload(settings, self.policy, source, self._look_now.set) if source else None
        self.pauses = Pauses(bus, region, self._look_now.set)
        self._settings = settings
        self._connect = connect or self._connect_as_set
        self._lists: Bus  # for what would hold up others on the same connection; while watching
        self._plan_watchers: set[asyncio.Event] = set()
        self._stopped = False

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Follows leases, plans and pauses, leading or not. Raises a BusError, or what keeps a second connection from
        being made (ConfigError, Unavailable)."""
        async with AsyncExitStack() as stack:
            self._lists = await self._connect(f"{self.bus.name}-lists")
            stack.push_async_callback(self._lists.close)
            await stack.enter_async_context(self.clock.kept())
            stack.push_async_callback(self.leases.close)
            await self.leases.start()
            stack.push_async_callback(self.plans.close)
            await self.plans.start()
            await stack.enter_async_context(self.pauses.watch())
            stack.enter_context(self.policy.gauge())
            if self.reload is not None:
                stack.enter_context(self.reload.gauge())
            yield

    async def _connect_as_set(self, name: str) -> Bus:
        return await Bus.connect(self._settings.nats, name=name, role="scheduler")

    async def run(self, stop: asyncio.Event) -> None:
        """Stands by and leads in turns until told to stop; streams of plans end then."""
        reload = self.reload.run() if self.reload else asyncio.Event().wait()
        try:
            await first_of(self._stand_by_and_lead(stop), reload)
        finally:
            self._stopped = True
            self._wake_watchers()

    async def _stand_by_and_lead(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await first_of(stop.wait(), self.leadership.campaign())
            if not self.leadership.held():
                continue
            self.lead = self._new_lead()
            try:
                await first_of(stop.wait(), self.leadership.keep(), self.lead.run())
            except BusError as error:
                _log.warning("term_ended", error=error.message)
                await first_of(stop.wait(), asyncio.sleep(RETRY_S))
            finally:
                self.lead = None
                await self.leadership.resign()

    async def plan_news(self) -> AsyncGenerator[Plan, None]:
        """The present plan, then each newer one until this scheduler stops; a slow reader skips plans."""
        news = asyncio.Event()
        self._plan_watchers.add(news)
        try:
            seen: Plan | None = None
            while not self._stopped:
                news.clear()
                plan = self.plans.plan
                if plan is not None and plan is not seen:
                    seen = plan
                    yield plan
                await news.wait()
        finally:
            self._plan_watchers.discard(news)

    def _plan_changed(self, plan: Plan) -> None:
        self.leadership.heard(plan.epoch)
        self._wake_watchers()

    def _wake_watchers(self) -> None:
        for news in self._plan_watchers:
            news.set()

    def _new_lead(self) -> Lead:
        return Lead(
            self.bus,
            self._settings,
            self.catalogue,
            self.clock,
            lists=self._lists,
            leadership=self.leadership,
            leases=self.leases,
            pauses=self.pauses,
            records=self.records,
            decisions=self.decisions,
            released=self.released,
            look_now=self._look_now,
            before=self.plans.plan,
            policy=self.policy,
            reload=self.reload,
        )


async def first_of(*acts: Coroutine[object, object, object]) -> None:
    """Runs all until the first one ends, then ends the others and waits for them. Raises what any of them raised."""
    tasks = [asyncio.ensure_future(act) for act in acts]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for outcome in ended:
        if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):
            raise outcome
