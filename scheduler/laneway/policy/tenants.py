"""Which tenants a plan names: those whose open jobs come near what they may have in a lane. Pure.

A plan is read by every door several times a second, so it names few: where the limit is small enough for a burst
between two plans to pass it, all; else from a tenth of the limit on. A tenant that is not named counts as having none.
"""

from __future__ import annotations

from collections.abc import Mapping

from laneway.core.fleet import TenantDepth
from laneway.core.lanes import Lane

TENANTS_MAX = 256  # entries of a plan; those nearest to their limits come first
SMALL_LIMIT = 1_000  # jobs; of such a lane each tenant is named
NAMED_SHARE = 0.1  # of a larger limit


def near_limit(open_jobs: Mapping[tuple[str, Lane], int], limits: Mapping[Lane, int]) -> tuple[TenantDepth, ...]:
    """`limits`: jobs by lane; 0 for no limit. The entries are in the order of their names, whatever order was given."""
    named = [
        (count / limits[lane], tenant, lane, count)
        for (tenant, lane), count in open_jobs.items()
        if count > 0 and limits.get(lane, 0) and count >= named_from(limits[lane])
    ]
    named.sort(key=lambda each: (-each[0], each[1], each[2].value))
    depths = (TenantDepth(tenant, lane, count) for _, tenant, lane, count in named[:TENANTS_MAX])
    return tuple(sorted(depths, key=lambda depth: (depth.tenant, depth.lane.value)))


def named_from(limit: int) -> float:
    """How many open jobs a tenant of this limit has that is named."""
    return 1.0 if limit <= SMALL_LIMIT else NAMED_SHARE * limit
