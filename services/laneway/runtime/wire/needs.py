"""Which optional abilities a request uses, and whether a pool has them. A missing one is refused naming the field."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from laneway.core.catalogue import Pool
from laneway.core.errors import Unsupported


class Need(Struct, frozen=True):
    ability: str  # an attribute of core.catalogue.Capabilities
    field: str  # the request field that uses it
    amount: int = 1  # of an ability with a limit


def check_needs(pool: Pool, needs: Iterable[Need]) -> None:
    for need in needs:
        offered = getattr(pool.capabilities, need.ability)
        if offered is True or (offered is not False and offered >= need.amount):
            continue
        limit = f" beyond {offered}" if offered is not False and offered > 0 else ""
        raise Unsupported(
            f"{need.field} is not offered by the {pool.tier} tier of this model{limit}",
            field=need.field,
            facts={"ability": need.ability, "pool": pool.name},
        )
