"""By deadline, across lanes: earliest deadline first, and least laxity first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from laneway.simulator.rivals.base import Rival
from laneway.simulator.rivals.order import ByKey, Key, Order
from laneway.simulator.rivals.params import Common
from laneway.simulator.rivals.station import Seat, Station
from laneway.simulator.rivals.yielding import yield_to
from laneway.simulator.ticket import Ticket


@dataclass(frozen=True, slots=True)
class DeadlineParams(Common):
    relegates: bool = True  # who has missed its first token is due with its whole answer only
    urgent_s: float = 0.0  # whose promised first token is due in less makes lower lanes yield, due last first; 0: none
    yields: int = 3  # of one request; then it stays to its end


class ByDeadline(ByKey):
    """Relegates the head, where that is wanted, when its time for the first token is over."""

    def __init__(self, key: Callable[[Ticket], Key], over: Callable[[Ticket], bool]) -> None:
        super().__init__(key)
        self._over = over

    def head(self, lanes: Sequence[int]) -> Ticket | None:
        while (ticket := super().head(lanes)) is not None and self._over(ticket):
            self.take(ticket)
            ticket.mind.mark = math.inf
            self.put_back(ticket)
        return ticket


class Edf(Rival[DeadlineParams]):
    """Earliest deadline first: of a first token that is promised and not missed, else of the whole answer.

    Source: Liu and Layland's rule, as QLM and SCORPIO apply it to requests; relegation as in Niyama, since EDF alone
    serves the hopeless first in an overload. Preemption, where it is on, is asked for by promised first tokens only:
    between answers due in minutes it would compute again what it just stopped.
    """

    name = "edf"

    def make_order(self) -> Order:
        return ByDeadline(self.key, self._missed)

    def key(self, ticket: Ticket) -> Key:
        return (min(self.latest_first_s(ticket), self.latest_answer_s(ticket)),)

    def latest_first_s(self, ticket: Ticket) -> float:
        """inf: it has its first token, was promised none, or missed it."""
        relegated = ticket.mind.mark == math.inf
        return ticket.came_s + ticket.ttft_s if math.isnan(ticket.first_s) and not relegated else math.inf

    def latest_answer_s(self, ticket: Ticket) -> float:
        return ticket.due_s

    def make_room(self, ticket: Ticket) -> Station | None:
        urgent_s = self.params.urgent_s
        if not urgent_s or self.latest_first_s(ticket) - self.world.now_s >= urgent_s:
            return None
        mine, yields = self.key(ticket), self.params.yields

        def may(each: Ticket) -> bool:
            return each.lane > ticket.lane and each.mind.yields < yields and self.key(each) > mine

        return yield_to(ticket, self, may, self._claim)

    def _claim(self, ticket: Ticket) -> Key:
        seat: Seat = ticket.mind
        return (*self.key(ticket), float(seat.order))

    def _missed(self, ticket: Ticket) -> bool:
        return self.params.relegates and self.latest_first_s(ticket) < self.world.now_s


class LeastLaxity(Edf):
    """Least slack first: the deadline less what the engine still needs for it. Slack shrinks alike for all that
    waits, so the order is that of the latest start and does not change while they wait.

    Source: Mok's least laxity rule. What an answer needs: its prompt at full chunks and, at half a batch, a step for
    each token that its lane makes on average.
    """

    name = "least-laxity"

    def latest_first_s(self, ticket: Ticket) -> float:
        return super().latest_first_s(ticket) - self._prefill_s(ticket)

    def latest_answer_s(self, ticket: Ticket) -> float:
        rest = max(1, self.expected_tokens(ticket) - ticket.made)
        step_s = self.times.decode_s(max(1, self.params.slots // 2))
        return ticket.due_s - self._prefill_s(ticket) - rest * step_s

    def _prefill_s(self, ticket: Ticket) -> float:
        chunk = max(1, self.params.chunk_tokens)
        return (ticket.prompt_tokens + ticket.made) * (self.times.prefill_token_s + self.times.base_s / chunk)
