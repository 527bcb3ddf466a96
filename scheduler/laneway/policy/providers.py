"""Which of several providers of a tier is asked: the cheapest that fits the deadline.

Where none fits it, the one that is done soonest; the deadline itself is enforced elsewhere. Seconds, and money in one
currency; DESIGN 5 (the cheapest feasible) asks no more. O(providers). Known failure modes: without a deadline the
cheapest is asked whatever the wait; estimates of two providers differ, and the cheaper one's error is what counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, isinf

from msgspec import Struct


class Offer(Struct, frozen=True):
    """What one provider would be for one request."""

    name: str
    cost: float
    wait_s: float  # until it may be asked; inf: never
    service_s: float  # from then to the end of the answer

    @property
    def done_in_s(self) -> float:
        return self.wait_s + self.service_s


def choose(offers: Iterable[Offer], deadline_in_s: float = inf) -> Offer | None:
    """None: no provider may ever be asked. Of equal ones the sooner, then the first by name."""
    possible = [offer for offer in offers if not isinf(offer.wait_s)]
    in_time = [offer for offer in possible if offer.done_in_s <= deadline_in_s]
    if in_time:
        return min(in_time, key=lambda offer: (offer.cost, offer.done_in_s, offer.name, offer.wait_s))
    return min(possible, key=lambda offer: (offer.done_in_s, offer.cost, offer.name, offer.wait_s), default=None)
