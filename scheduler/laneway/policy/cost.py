"""What a job is expected to cost at a pool: its tokens by their price, and its share of a worker by the price of that.

A worker's second costs the same however full it is, so a job pays for one slot's part of the time that it would take
now: the same part that capacity is counted in (policy.eta, device_s). What it came to is in the usage of its result.

Unit: that of the prices in the settings. Source: reference/policy.md (d), expected cost. O(1). Known failure mode: the
time is an estimate, so under a price of device-seconds a job may come to more than its verdict said, and than its
cost_max.
"""

from __future__ import annotations

from laneway.core.catalogue import Pool
from laneway.core.fleet import PoolPlan
from laneway.policy import eta as etas


def job_cost(pool: Pool, plan: PoolPlan | None, prompt_tokens: int, completion_tokens: int) -> float:
    """`plan`: the pool as it is now; None: nothing is known of it but its settings."""
    if not pool.price_per_device_s:
        return pool.cost(prompt_tokens, completion_tokens)
    rate = etas.rates(pool, plan or PoolPlan(pool.name), context_tokens=prompt_tokens)
    return pool.cost(
        prompt_tokens, completion_tokens, etas.device_s(pool, rate.service_s(prompt_tokens, completion_tokens))
    )
