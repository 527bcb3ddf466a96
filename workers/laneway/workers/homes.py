"""The home slots of a worker's pool, and who serves them as far as this worker knows: the plan, and the leases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import structlog

from laneway.core.catalogue import Pool
from laneway.core.fleet import HomePlan, Plan
from laneway.runtime.bus import Bus, BusError
from laneway.runtime.provision import retired_homes

SLOTS_KNOWN = 64  # as many as the settings allow

_log = structlog.get_logger(__name__)


def is_home(name: str) -> bool:
    """Whether a token of a subject names a home slot, of these settings or of others."""
    number = name.removeprefix("h")
    return number != name and number.isdecimal() and int(number) < SLOTS_KNOWN


class Homes:
    """Asks at each look; owns nothing but the names."""

    def __init__(
        self,
        pool: Pool,
        me: str,
        plan: Callable[[], Plan | None],
        fresh: Callable[[], bool],
        alive: Callable[[str], bool | None],
        retired: Iterable[str] = (),
    ) -> None:
        """`plan`: the newest, however old; `fresh`: whether it still holds. `alive`: what the leases say of a worker.

        `retired`: slots that the settings have no longer, in which jobs may still be.
        """
        self._pool = pool.name
        self._me = me
        self._plan = plan
        self._fresh = fresh
        self._alive = alive
        self._read: tuple[Plan | None, Mapping[str, HomePlan]] = (None, {})
        self.names: tuple[str, ...] = tuple(dict.fromkeys((*pool.homes, *retired)))

    @property
    def plan(self) -> Plan | None:
        return self._plan()

    def planned(self) -> Mapping[str, HomePlan]:
        """The slots as the newest plan has them."""
        plan = self._plan()
        if plan is not self._read[0]:
            homes = plan.pool(self._pool).homes if plan is not None else ()
            self._read = plan, {each.home: each for each in homes}
        return self._read[1]

    def fresh(self) -> bool:
        """Whether it is known who serves which slot."""
        return self._fresh() and bool(self.planned())

    @property
    def own(self) -> str:
        """The slot that this worker serves; it goes on with it while there is no fresh plan. Empty: none."""
        return next((each.home for each in self.planned().values() if each.worker_id == self._me), "")

    def served(self, home: HomePlan | None) -> bool:
        """Whether another worker serves the slot that may be alive."""
        return home is not None and bool(home.worker_id) and self._alive(home.worker_id) is not False


async def retired_homes_or_none(bus: Bus, region: str, pool: Pool) -> tuple[str, ...]:
    """Slots that the settings have no longer. Where they cannot be read, their bells tell of their jobs."""
    try:
        return await retired_homes(bus, region, pool)
    except BusError as error:
        _log.warning("retired_homes_not_read", error=error.message)
        return ()
