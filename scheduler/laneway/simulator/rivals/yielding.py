"""Who makes room for another: the fewest that will do, those first that have least claim to stay."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from laneway.simulator.rivals.order import Key
from laneway.simulator.rivals.station import Seat, Station
from laneway.simulator.ticket import Ticket

if TYPE_CHECKING:
    from laneway.simulator.rivals.base import Rival

Claim = Callable[[Ticket], Key]


def newest_of_lowest(ticket: Ticket) -> Key:
    """The greatest yields first: the lowest lane, and of it who came to the engine last and has least to lose.

    Source: vLLM's priority policy (lowest priority, latest arrival).
    """
    seat: Seat = ticket.mind
    return float(ticket.lane), seat.began_s, float(seat.order)


def yield_to(
    ticket: Ticket, rival: Rival[Any], may: Callable[[Ticket], bool], claim: Claim, victims: int | None = None
) -> Station | None:
    """The worker where those who `may` have made room for it: that where the fewest computed tokens are lost.

    None, and nobody yields, where no worker has enough of them, or only more than so many `victims`.
    """
    best: tuple[float, Station, list[Ticket]] | None = None
    for station in rival.stations():
        if not any(station.lanes[ticket.lane + 1 :]):
            continue
        slots, blocks = 1 - station.slots_free, rival.need(ticket, station) - station.blocks_free
        chosen = _enough(filter(may, station.running), slots, blocks, claim)
        if chosen is None or (victims is not None and len(chosen) > victims):
            continue
        if rival.prefills(station, sum(each.mind.prefill for each in chosen if not each.mind.begun)):
            continue
        lost = sum(_computed_tokens(each, station, rival.world.now_s) for each in chosen)
        if best is None or lost < best[0]:
            best = lost, station, chosen
    if best is None:
        return None
    _, station, chosen = best
    for each in chosen:
        if each.mind.station is station:
            rival.preempt(each)
    return station


def _enough(tickets: Iterable[Ticket], slots: int, blocks: int, claim: Claim) -> list[Ticket] | None:
    chosen: list[Ticket] = []
    for ticket in sorted(tickets, key=claim, reverse=True):
        if slots <= 0 and blocks <= 0:
            break
        chosen.append(ticket)
        slots -= 1
        blocks -= ticket.mind.blocks
    return chosen if slots <= 0 and blocks <= 0 else None


def _computed_tokens(ticket: Ticket, station: Station, now_s: float) -> float:
    """KV tokens that its engine has computed, as far as who reads its stream can tell."""
    seat: Seat = ticket.mind
    if not seat.begun:
        return 0.0
    return ticket.prompt_tokens + ticket.made + (now_s - seat.first_s) / station.step_s
