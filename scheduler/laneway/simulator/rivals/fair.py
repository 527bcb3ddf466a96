"""Fairness between the tenants of a lane: virtual token counters, and deficits with the longest prefix match."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from laneway.simulator.rivals.base import Rival
from laneway.simulator.rivals.flows import ByDeficit, ByTokens
from laneway.simulator.rivals.order import Order
from laneway.simulator.rivals.params import Common
from laneway.simulator.rivals.station import Station
from laneway.simulator.ticket import Ticket


@dataclass(frozen=True, slots=True)
class VtcParams(Common):
    input_price: float = 1.0  # of a prompt token
    output_price: float = 2.0  # of a token of the answer


@dataclass(frozen=True, slots=True)
class DlpmParams(VtcParams):
    quantum: float = 4096.0  # weighted tokens of a tenant's round


V = TypeVar("V", bound=VtcParams)


class Charging(Rival[V], Generic[V]):
    """Tenants are charged when a request starts, for its prompt and the answer that its lane makes on average; what
    came instead is put right when it leaves the engine."""

    flows: ByTokens | ByDeficit

    def make_order(self) -> Order:
        self.flows = self.make_flows()
        return self.flows

    def make_flows(self) -> ByTokens | ByDeficit:
        raise NotImplementedError

    def started(self, ticket: Ticket, station: Station) -> None:
        """Computing again what its caller has already is not its tenant's doing."""
        seat, params = ticket.mind, self.params
        prompt_tokens = seat.prefill if not ticket.starts else 0
        seat.mark = float(max(ticket.made, self.expected_tokens(ticket)))
        answer_tokens = seat.mark - ticket.made
        self.flows.charge(ticket, params.input_price * prompt_tokens + params.output_price * answer_tokens)

    def stopped(self, ticket: Ticket) -> None:
        self.flows.charge(ticket, self.params.output_price * (ticket.made - ticket.mind.mark))


class Vtc(Charging[VtcParams]):
    """Strict between lanes; in a lane the tenant that was served the fewest weighted tokens.

    Source: virtual token counters (VTC, OSDI'24), in the variant with predicted lengths. Cached prompt tokens are free.
    Simplified: all tenants have one weight.
    """

    name = "vtc"

    def make_flows(self) -> ByTokens:
        return ByTokens()


class Dlpm(Charging[DlpmParams]):
    """Strict between lanes; in a lane tenants spend a quantum each, and of those that have some left that one is next
    of whose oldest prompt most is cached.

    Source: D2LPM (arXiv 2501.14312), with the refill of SGLang's deficit scheduler. Simplified: it matches each
    tenant's oldest request, where the paper sorts all that wait; and the worker is the one that answers soonest,
    cached prefixes counted, instead of a second deficit for each worker.
    """

    name = "dlpm"

    def make_flows(self) -> ByDeficit:
        return ByDeficit(self.params.quantum, self._cached_tokens)

    def _cached_tokens(self, ticket: Ticket) -> int:
        if not ticket.blocks:
            return 0
        prompt = ticket.prompt_tokens + ticket.made
        return max((prompt - self.uncached(ticket, station) for station in self.stations()), default=0)
