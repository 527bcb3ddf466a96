"""Where a worker's jobs come from: the home slots of each lane, what is known of each, and whose turn it is.

Owns one puller for each (lane, home) that was ever used, and the hints that it may hold a job. From which one to take
is policy.stealing's decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import structlog

from laneway.core import subjects
from laneway.core.clock import Clock
from laneway.core.fleet import Plan
from laneway.core.lanes import LANES, Lane
from laneway.policy import stealing
from laneway.policy.stealing import Slot, Turn
from laneway.runtime.bells import Ring
from laneway.runtime.puller import LanePuller
from laneway.workers.homes import Homes, is_home

# A bell may be ahead of its message: about one pull in 800 made at once after it finds nothing (measured on nats-server
# 2.15.1). So a rung source that looks empty is looked at again, without waiting for it: others may have taken the job.
LOOK_AGAIN_S = (0.002, 0.015)
DUE_LOOKS = 8  # jobs that are looked at for one that is due
STRAY_LOOKS = 8  # slots that nobody serves, in each lane, that are looked at without a bell, in turn

_log = structlog.get_logger(__name__)


@dataclass(eq=False, slots=True)
class Source:
    """One home slot of one lane."""

    lane: Lane
    home: str
    puller: LanePuller | None = None
    hint: bool = False  # may hold a job
    wanted_s: float = 0.0  # monotonic: since when
    turn_s: float = 0.0  # monotonic: when it was last taken from
    held_s: float = -math.inf  # monotonic: when a pull of it was last held open
    hold_from_s: float = 0.0  # monotonic: before that none is
    looks: int = 0  # how often it may still be looked at again
    due_looks: int = DUE_LOOKS  # jobs that may still be looked at for one whose latest start has come
    misses: int = 0
    trouble: str = ""

    def want(self, now_s: float) -> None:
        if not self.hint:
            self.wanted_s = now_s
        self.hint = True

    def hear_trouble(self) -> None:
        trouble = self.puller.trouble if self.puller is not None else ""
        if trouble and trouble != self.trouble:
            _log.warning("pull_failed", lane=self.lane.value, home=self.home, reason=trouble)
        self.trouble = trouble


@dataclass(slots=True)
class _Lane:
    sources: dict[str, Source] = field(default_factory=dict)
    stray: int = 0  # where the next looks begin


class Sources:
    """`open_puller` makes a puller, not started. `patience_s`: how long a lane's jobs are left to their own worker."""

    def __init__(
        self,
        homes: Homes,
        open_puller: Callable[[Lane, str], LanePuller],
        clock: Clock,
        patience_s: Callable[[Lane], float],
    ) -> None:
        self._homes = homes
        self._open_puller = open_puller
        self._clock = clock
        self._patience_s = patience_s
        self._lanes = {lane: _Lane() for lane in LANES}
        self._own = ""  # as it was at the last look
        self._plan: Plan | None = None
        self._settled = False
        for home in (subjects.HOME_ANY, *homes.names):
            self._add(home)

    def _add(self, home: str) -> None:
        for lane in LANES:
            self._lanes[lane].sources.setdefault(home, Source(lane, home))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for source in self._all():
            await self._close(source)

    # --- which are ours ------------------------------------------------------------------------------

    @property
    def home(self) -> str:
        """The slot that this worker serves; empty: none."""
        return self._own

    def ours(self, lane: Lane) -> list[Source]:
        """Those from which pulls may be held: `any` and our own slot."""
        sources = self._lanes[lane].sources
        return [sources[home] for home in (subjects.HOME_ANY, self._own) if home in sources]

    @property
    def settled(self) -> bool:
        """Whether the newest plan was taken on."""
        return self._settled and self._homes.plan is self._plan

    def lost(self) -> list[Source]:
        """Those that the newest plan gave to somebody else, or to nobody."""
        own = self._homes.own
        return [lane.sources[self._own] for lane in self._lanes.values() if self._own and own != self._own]

    async def settle(self) -> None:
        """Takes on what the newest plan says. Nothing of a slot that we lose may be held or uncollected."""
        for source in self.lost():
            await self._close(source)  # what came too late goes back
        if self._homes.own != self._own:
            self._own = self._homes.own
            if self._own:
                self._add(self._own)
                self._hint_home(self._own)
                _log.info("home_changed", home=self._own)
        for lane in LANES:
            for source in self.ours(lane):
                await self.puller(source)
        self._hear_plan()
        self._settled = True

    def _hear_plan(self) -> None:
        """Jobs that wait in slots of others have had their bells, perhaps before we listened."""
        plan, now_s = self._homes.plan, self._clock.monotonic()
        if plan is self._plan:
            return
        self._plan = plan
        for home, planned in self._homes.planned().items():
            if planned.ready and home != self._own:
                self._add(home)
                for lane in LANES:
                    source = self._lanes[lane].sources[home]
                    if not source.hint:
                        source.want(now_s - planned.oldest_wait_s)

    async def puller(self, source: Source) -> LanePuller:
        if source.puller is None:
            source.puller = self._open_puller(source.lane, source.home)
            await source.puller.start()
        return source.puller

    async def _close(self, source: Source) -> None:
        puller, source.puller = source.puller, None
        if puller is not None:
            await puller.close()

    # --- hints ---------------------------------------------------------------------------------------

    def ring(self, ring: Ring) -> None:
        if ring.home and is_home(ring.home):
            self._add(ring.home)
        now_s = self._clock.monotonic()
        for source in self._lanes[ring.lane].sources.values():
            if ring.home in ("", source.home):
                source.looks = len(LOOK_AGAIN_S)
                source.due_looks = DUE_LOOKS if ring.due else source.due_looks
                source.want(now_s)

    def look_everywhere(self) -> None:
        """Into all that we may take from at any time: bells may be lost, and delays make no sound."""
        now_s, fresh, planned = self._clock.monotonic(), self._homes.fresh(), self._homes.planned()
        for lane in self._lanes.values():
            for source in self._ours_of(lane):
                source.want(now_s)
            strays = [
                source
                for home, source in sorted(lane.sources.items())
                if not self._is_ours(home) and not (fresh and self._homes.served(planned.get(home)))
            ]
            for source in (strays[lane.stray :] + strays[: lane.stray])[:STRAY_LOOKS]:
                source.want(now_s)
            lane.stray = (lane.stray + STRAY_LOOKS) % len(strays) if len(strays) > STRAY_LOOKS else 0

    def hint_lane(self, lane: Lane) -> None:
        for source in self._ours_of(self._lanes[lane]):
            source.want(self._clock.monotonic())

    def _hint_home(self, home: str) -> None:
        for lane in self._lanes.values():
            lane.sources[home].want(self._clock.monotonic())

    def wanted_since_s(self, lane: Lane) -> float:
        """Since when the lane may have a job for us (monotonic); now, when it has none."""
        hinted = (source.wanted_s for source in self._ours_of(self._lanes[lane]) if source.hint)
        return min(hinted, default=self._clock.monotonic())

    def waiting_s(self, lane: Lane, held: frozenset[Source]) -> float:
        """How long a job of ours may have waited since we last looked for one; 0 where none may."""
        since = (
            max(source.wanted_s, source.turn_s)
            for source in self._ours_of(self._lanes[lane])
            if source.hint and source not in held
        )
        return self._clock.monotonic() - min(since, default=self._clock.monotonic())

    def may_be_due(self, lane: Lane) -> bool:
        return any(source.hint and source.due_looks > 0 for source in self._lanes[lane].sources.values())

    # --- whose turn it is ----------------------------------------------------------------------------

    def turn(self, lane: Lane, held: frozenset[Source], idle: Callable[[], bool]) -> Turn | None:
        """Where the lane's next job may be taken from. `held`: sources of which a pull is open already. Who has no
        room, not `idle`, leaves to others what they serve."""
        slots = self._slots(lane, held)
        if not slots:
            return None
        patience_s = math.inf
        if not all(slot.ours for slot in slots) and idle():
            patience_s = self._patience_s(lane)
        return stealing.next_turn(slots, plan_fresh=self._homes.fresh(), patience_s=patience_s)

    def source(self, lane: Lane, home: str) -> Source:
        return self._lanes[lane].sources[home]

    def look_in_s(self) -> float | None:
        """When another's jobs will have waited long enough for us to take them; None: no such time is known."""
        if not self._homes.names:
            return None
        looks = (
            stealing.look_in_s(self._slots(lane, frozenset()), patience_s=self._patience_s(lane)) for lane in LANES
        )
        return min((look_s for look_s in looks if look_s is not None), default=None)

    def _slots(self, lane: Lane, held: frozenset[Source]) -> list[Slot]:
        hinted = [source for source in self._lanes[lane].sources.values() if source.hint and source not in held]
        if not hinted:
            return []
        now_s = self._clock.monotonic()
        if all(self._is_ours(source.home) for source in hinted):  # as nearly always
            return [Slot(each.home, True, now_s - max(each.wanted_s, each.turn_s)) for each in hinted]
        planned, fresh, slots = self._homes.planned(), self._homes.fresh(), []
        for source in hinted:
            ours, plan = self._is_ours(source.home), planned.get(source.home)
            left = not ours and fresh and self._homes.served(plan)  # to another worker
            since_s = source.wanted_s if left else max(source.wanted_s, source.turn_s)
            ready = plan.ready if plan is not None else 0
            slots.append(Slot(source.home, ours, now_s - since_s, left, ready, source.misses))
        return slots

    def _is_ours(self, home: str) -> bool:
        return home in (subjects.HOME_ANY, self._own)

    def _ours_of(self, lane: _Lane) -> list[Source]:
        return [source for home, source in lane.sources.items() if self._is_ours(home)]

    def _all(self) -> list[Source]:
        return [source for lane in self._lanes.values() for source in lane.sources.values()]
