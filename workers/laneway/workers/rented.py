"""What a worker's settings say of the providers that it rents: from engine options to the gate in front of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from laneway.core.catalogue import Pool
from laneway.core.clock import Clock
from laneway.policy.quota import Quota, WindowQuota
from laneway.runtime.bus import Bus
from laneway.runtime.engine_options import EngineOptions, ProviderOptions
from laneway.workers.engines.openai_options import checked_providers
from laneway.workers.provider_quota import Provider, ProviderGate, provider_gate


@asynccontextmanager
async def gate_of(
    bus: Bus, region: str, pool: Pool, options: EngineOptions, holder: str, clock: Clock
) -> AsyncIterator[ProviderGate | None]:
    """While the block runs; None where there is nothing to choose or to count. Raises ConfigError."""
    named = checked_providers(pool, options.providers) if pool.engine == "openai" else ()
    if len(named) < 2 and not any(each.limited for each in named):
        yield None
        return
    providers = [provider_of(each) for each in named]
    async with provider_gate(
        bus, region, pool.name, providers, holder, clock, tokens_per_s=pool.decode_tokens_per_s
    ) as gate:
        yield gate


def provider_of(options: ProviderOptions) -> Provider:
    windows = tuple(
        WindowQuota(each.window_s, requests=each.requests, tokens=each.tokens, spend=each.spend)
        for each in options.quotas
    )
    return Provider(
        name=options.name,
        quota=Quota(windows, options.concurrency),
        price_per_million_prompt_tokens=options.price_per_million_prompt_tokens,
        price_per_million_completion_tokens=options.price_per_million_completion_tokens,
        counts_asked=options.counts_asked_tokens,
    )
