"""When held work is meant to go: into the troughs of priority demand that are forecast. policy.md (c).

    price of a slot   pi(s) = u(s) / capacity           u: priority demand, capacity: workers
    free in a slot    f(s)  = max(0, 0.85 capacity - u(s)) x 60 s, device-seconds

Each minute the parked work of a pool is walked in groups of 10 s of latest starts, not job by job, and each group is
poured into the cheapest slots with room that begin within half of the slack that it had when it was first planned:
half, so that a wrong forecast leaves room to put it right. What fits nowhere is not held at all. The outcome is an
amount, not a list of jobs: how much work may have been released by a time. Which jobs these are is decided late, by
`policy.release` (urgent ones, then fair turns), and a slot's amount is spread evenly over its minute, so that not
everything leaves at its beginning.

The plan holds nothing back
- while the pool is less than `busy` in use (work conservation: an idle pool never waits for a better time);
- of what was planned for a slot that is no more than `price_slack` cheaper than this moment;
- without a season in the forecast (there is no trough to wait for), or while the forecast is broken;
- of a job within two services of its latest start (policy.release).

Cost: O((H + S) log S), H groups of latest starts, S slots of a minute; one look at the plan: O(S).
Known failure modes: jobs that came after the plan was made share its amounts until the next one, a minute later; a
forecast that is wrong in one direction spends half of the slack of what it held.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from msgspec import Struct
from msgspec.structs import replace

SLOTS_MAX = 1_440  # a day of minutes: work due later is planned into the first day


@dataclass(frozen=True, slots=True)
class HoldParams:
    on: bool = True
    utilisation: float = 0.85  # of a pool that may be planned with
    slot_s: float = 60.0
    busy: float = 0.6  # below this part of its places in use a pool is idle enough to hold nothing
    price_slack: float = 0.05
    slack_share: float = 0.5  # of a group's slack that it may be held


class Portion(Struct, frozen=True):
    """A part of the work due by a time, and the slot that it was poured into."""

    due_s: float  # Unix seconds
    device_s: float
    start_s: float  # Unix seconds
    price: float


class HoldPlan(Struct, frozen=True):
    made_s: float
    portions: tuple[Portion, ...]  # those that are to wait
    open_device_s: float  # what need not wait
    slots: tuple[Portion, ...] = ()  # the portions of each slot together; due with the first of them

    def planned(self, due_s: float) -> Portion | None:
        """Where work due then goes, at the earliest."""
        parts = [each for each in self.portions if each.due_s >= due_s]
        nearest = min((each.due_s for each in parts), default=None)
        return min((each for each in parts if each.due_s == nearest), key=lambda each: each.start_s, default=None)


class Hold(Struct, frozen=True):
    """How much more of a pool's parked work may be released at this moment, device-seconds, and why no more."""

    device_s: float = math.inf
    price: float = 0.0  # of this moment
    low: bool = False  # it is about as cheap as the slot that was planned for what may go

    @property
    def holds(self) -> bool:
        return self.device_s < math.inf


NO_HOLD = Hold()


def plan_holds(
    demand: Sequence[tuple[float, float]],
    forecast: Sequence[float],
    *,
    workers: float,
    now_s: float,
    limits: Mapping[float, float] = MappingProxyType({}),
    params: HoldParams = HoldParams(),
) -> HoldPlan:
    """`demand`: (latest start in Unix seconds, device-seconds), earliest first; `forecast`: priority demand of the
    slots from now on, in workers; `limits`: by latest start, until when an earlier plan was to hold such work at most.
    See the module."""
    usage = list(forecast[:SLOTS_MAX])
    price = [u / workers if workers > 0.0 else math.inf for u in usage]
    free = [max(0.0, params.utilisation * workers - u) * params.slot_s for u in usage]
    cheapest: list[tuple[float, int]] = []  # heap of the slots within reach of the group in hand
    reached = 0
    portions: list[Portion] = []
    open_device_s = 0.0
    until = [min(held_until_s(due_s, now_s, params), limits.get(due_s, math.inf)) for due_s, _ in demand]
    for limit_s, (due_s, device_s) in sorted(zip(until, demand, strict=True)):
        within = max(1, math.floor((limit_s - now_s) / params.slot_s) + 1)
        while reached < min(within, len(price)):
            heapq.heappush(cheapest, (price[reached], reached))
            reached += 1
        left_s = device_s
        while left_s > 0.0 and cheapest:
            slot = cheapest[0][1]
            device = min(left_s, free[slot])
            free[slot] -= device
            left_s -= device
            if free[slot] <= 0.0:
                heapq.heappop(cheapest)
            if device <= 0.0:
                continue
            if slot == 0:
                open_device_s += device
            else:
                portions.append(Portion(due_s, device, now_s + slot * params.slot_s, price[slot]))
        open_device_s += left_s
    slots_s: dict[float, Portion] = {}
    for part in portions:
        had = slots_s.get(part.start_s)
        slots_s[part.start_s] = replace(had, device_s=had.device_s + part.device_s) if had else part
    return HoldPlan(now_s, tuple(portions), open_device_s, tuple(slots_s.values()))


def held_until_s(due_s: float, now_s: float, params: HoldParams = HoldParams()) -> float:
    """Until when work that is planned now for the first time may be held."""
    return now_s + max(0.0, due_s - now_s) * params.slack_share


def hold_now(
    plan: HoldPlan,
    *,
    released_device_s: float,
    price_now: float,
    in_use: float,
    now_s: float,
    params: HoldParams = HoldParams(),
) -> Hold:
    """How much may go now. `released_device_s`: since the plan was made; `price_now`: priority demand over capacity at
    this moment; `in_use`: part of the pool's places that are taken."""
    if in_use < params.busy:
        return Hold(price=price_now)
    allowed, waits = plan.open_device_s, False
    for part in plan.slots:
        share = min(1.0, max(0.0, (now_s - part.start_s) / params.slot_s))
        if price_now <= part.price + params.price_slack:
            share = 1.0
        allowed += part.device_s * share
        waits = waits or share < 1.0
    low = bool(plan.portions)
    return Hold(max(0.0, allowed - released_device_s) if waits else math.inf, price_now, low)
