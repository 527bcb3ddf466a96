"""One worker process: from its settings to a worker that serves.

Provisions nothing: streams and consumers are there, or the first pulls say that they are not.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
from random import Random

from msgspec.structs import replace

from laneway.core.catalogue import Capabilities, Pool
from laneway.core.clock import Clock
from laneway.core.errors import ConfigError
from laneway.core.ids import TOKEN_LENGTH_MAX
from laneway.runtime import metrics
from laneway.runtime.bus import Bus
from laneway.runtime.catalogue import capabilities_of, catalogue_of
from laneway.runtime.clock import SYSTEM_RANDOM, SystemClock
from laneway.runtime.lifecycle import announce_ready
from laneway.runtime.settings import Settings
from laneway.runtime.tokenizer import load_tokenizer
from laneway.workers.engines.protocol import Engine
from laneway.workers.engines.provider_gate import Gate
from laneway.workers.engines.registry import make_engine
from laneway.workers.first_token import trial_prompt
from laneway.workers.rented import gate_of
from laneway.workers.service import Worker, WorkerOptions


async def serve(settings: Settings, stop: asyncio.Event, *, clock: Clock | None = None) -> None:
    """Runs one worker until `stop` is set, then drains. ConfigError says what to mend."""
    clock = clock or SystemClock()
    options = options_of(settings)
    tokenizer = load_tokenizer(options.pool.tokenizer)
    engine_options = settings.engine_options_of(options.pool.name)

    if options.pool.capabilities.strict_isolation and not engine_options.prefix_cache:
        raise ConfigError(
            f"pool {options.pool.name} offers strict_isolation, which its workers keep by the engine's prefix cache; "
            "set engine_options.prefix_cache = false in its [[models]] entry, not in [worker]"
        )

    gate: Gate | None = None  # once there is a worker, which makes engines later

    def engine() -> Engine:
        made = make_engine(options.pool, engine_options, gate)
        check_capabilities(options.pool, made.capabilities())
        return made

    with metrics.metrics_listener(settings.process.metrics_listen) as metrics_address:
        bus = await Bus.connect(settings.nats, name=options.worker_id, role="worker")
        try:
            worker = Worker(bus, options, engine, tokenizer.token_bytes, clock)
            async with gate_of(
                bus, options.region, options.pool, engine_options, options.worker_id, worker.clock
            ) as gate:
                await worker.run(
                    stop, lambda: announce_ready(settings, "worker", options.worker_id, metrics=metrics_address)
                )
        finally:
            await bus.close()


def options_of(settings: Settings, random: Random = SYSTEM_RANDOM) -> WorkerOptions:
    """What the settings mean for this process, which gets a new incarnation."""
    catalogue = catalogue_of(settings)
    name = settings.worker.pool or catalogue.pools[0].name
    pool = catalogue.pool(name)
    if pool is None:
        known = ", ".join(p.name for p in catalogue.pools)
        raise ConfigError(f"worker.pool = {name!r}: there is no such pool; known: {known}")
    worker_name = settings.worker.name or _default_name()
    return WorkerOptions(
        region=settings.region.name,
        name=worker_name,
        worker_id=f"{worker_name[: TOKEN_LENGTH_MAX - 9]}-{random.randbytes(4).hex()}",
        pool=_own(settings, pool),
        policy=settings.policy,
        ack_wait_s=settings.nats.ack_wait_s,
        slots=settings.worker.slots,
        prefix_cache=settings.engine_options_of(pool.name).prefix_cache,
        pull_fallback_s=settings.worker.pull_fallback_s,
        step_timeout_s=settings.worker.step_timeout_s,
        retention_s=settings.nats.retention_s,
        drain_s=settings.process.drain_s,
        trial_prompt=trial_prompt(load_tokenizer(pool.tokenizer)),
    )


def _own(settings: Settings, pool: Pool) -> Pool:
    """The pool as this worker serves it: with its own engine of those that the pool has, and what that one can do."""
    model = settings.model_of(pool.name)
    own = settings.worker.engine or model.engine
    if own not in (known := (model.engine, *model.other_engines)):
        raise ConfigError(
            f'worker.engine = "{own}": pool {pool.name} has {", ".join(known)}; name it in other_engines of its '
            "[[models]] entry, so that the doors promise only what it can do as well"
        )
    options = settings.engine_options_of(pool.name)
    able = capabilities_of(own, options, exact=options.exact)
    return replace(pool, engine=own, capabilities=replace(able, strict_isolation=pool.capabilities.strict_isolation))


def check_capabilities(pool: Pool, engine: Capabilities) -> None:
    """ConfigError when the catalogue promises what the engine cannot do."""
    missing = [
        name
        for name in Capabilities.__struct_fields__
        if _exceeds(getattr(pool.capabilities, name), getattr(engine, name))
    ]
    if missing:
        raise ConfigError(f"pool {pool.name} offers {', '.join(missing)}, which its {pool.engine} engine cannot do")


def _exceeds(offered: object, able: object) -> bool:
    return isinstance(offered, int) and isinstance(able, int) and offered > able


def _default_name() -> str:
    host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:40] or "worker"
    return f"{host}-{os.getpid()}"
