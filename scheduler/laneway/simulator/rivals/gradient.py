"""An adaptive limit on priority requests in flight, in front of strict priority: Netflix's Gradient2."""

from __future__ import annotations

from dataclasses import dataclass

from laneway.simulator.rivals.base import Rival
from laneway.simulator.rivals.order import ByKey, Order, by_lane
from laneway.simulator.rivals.params import Common
from laneway.simulator.ticket import Ticket
from laneway.simulator.world import World


@dataclass(frozen=True, slots=True)
class GradientParams(Common):
    tolerance: float = 1.5  # of the present latency over the long one
    learns: bool = True  # the long latency is a mean of what came; else it is that of an idle engine
    smoothing: float = 0.2  # weight of the new limit
    growth: int = 4  # requests by which the limit grows at no gradient, each worker
    least: int = 8  # of the limit, each worker; it begins at the slots
    most: int = 128  # the same
    window_s: float = 1.0  # whose mean latency is one sample
    samples: int = 10  # that a window must have


class Limit:
    """Gradient2 for one pool. A latency here is measured / predicted, so that long prompts are not slow ones.

    gradient = clamp(tolerance x long / short, 0.5, 1);  limit' = (1 - s) limit + s (gradient x limit + growth)
    with `short` the last window's mean and `long` its exponential mean over 600 windows, or 1; no growth when less than
    half the limit is in flight. Source: Netflix's concurrency-limits, Gradient2Limit.
    """

    MEMORY = 600  # windows
    WARM_UP = 10

    def __init__(self, workers: int, params: GradientParams) -> None:
        self.value = float(min(params.most, max(params.least, params.slots)) * workers)
        self.long = 1.0
        self._params = params
        self._workers = workers
        self._windows = 0
        self._begin_s = 0.0
        self._sum, self._count, self._inflight = 0.0, 0, 0

    def sample(self, latency: float, inflight: int, now_s: float) -> None:
        self._sum, self._count = self._sum + latency, self._count + 1
        self._inflight = max(self._inflight, inflight)
        if now_s - self._begin_s >= self._params.window_s and self._count >= self._params.samples:
            short = self._sum / self._count
            if self._params.learns:
                self._learn(short)
            self._move(short, self._inflight)
            self._sum, self._count, self._inflight, self._begin_s = 0.0, 0, 0, now_s

    def _learn(self, short: float) -> None:
        self._windows += 1
        if self._windows <= self.WARM_UP:
            before = self.long if self._windows > 1 else 0.0
            self.long = before + (short - before) / self._windows
        else:
            self.long += (short - self.long) * 2.0 / (self.MEMORY + 1)
        if self.long / short > 2.0:  # what an overload has taught is forgotten sooner
            self.long *= 0.95

    def _move(self, short: float, inflight: int) -> None:
        params = self._params
        gradient = max(0.5, min(1.0, params.tolerance * self.long / short))
        if inflight < self.value / 2.0:
            return
        aim = gradient * self.value + params.growth * self._workers
        value = (1.0 - params.smoothing) * self.value + params.smoothing * aim
        self.value = min(max(value, params.least * self._workers), params.most * self._workers)


class Gradient(Rival[GradientParams]):
    """Strict priority behind a door that refuses priority requests beyond the limit; lower lanes wait instead.

    The latency is to the first token, from when the caller asked, over what its prompt takes alone in an idle engine:
    the part of a call that load stretches first, and known while the answer still runs.
    """

    name = "gradient"

    def begin(self, world: World) -> None:
        self.limit = Limit(max(1, len(world.workers)), self.params)
        self.inside: set[Ticket] = set()  # priority requests that were let in and have not ended
        super().begin(world)

    def make_order(self) -> Order:
        return ByKey(by_lane)

    def admits(self, ticket: Ticket) -> bool:
        if ticket.lane:
            return True
        if len(self.inside) >= self.limit.value:
            return False
        self.inside.add(ticket)
        return True

    def first(self, ticket: Ticket) -> None:
        super().first(ticket)
        if ticket in self.inside and ticket.starts == 1:
            waited_s = ticket.first_s - ticket.came_s
            self.limit.sample(waited_s / self._alone_s(ticket), len(self.inside), self.world.now_s)

    def over(self, ticket: Ticket) -> None:
        self.inside.discard(ticket)

    def _alone_s(self, ticket: Ticket) -> float:
        chunk = max(1, self.params.chunk_tokens)
        steps = -(-ticket.prompt_tokens // chunk)
        return steps * self.times.base_s + ticket.prompt_tokens * self.times.prefill_token_s
