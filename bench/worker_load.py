"""Workers on a real NATS for benchmarks of what a worker lets into its engine; tests/support/worker_site.py puts jobs
into their lanes and times their tokens.

`site_with_worker` has the worker in this process (its engine in one of its own, as always), so that a benchmark may
change its policy between arms and read its engine's counts. `site_with_process` has it in a process of its own.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec.structs import replace

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the tests' own helpers

from laneway.cli.child import Child
from laneway.cli.toml_text import toml_text
from laneway.runtime.bus import Bus
from laneway.runtime.catalogue import catalogue_of
from laneway.runtime.clock import SystemClock
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.logging import set_up_logging
from laneway.runtime.provision import provision
from laneway.runtime.settings import Settings, load_settings
from laneway.runtime.tokenizer import load_tokenizer
from laneway.workers.engines.registry import make_engine
from laneway.workers.server import options_of
from laneway.workers.service import Worker
from tests.support.worker_site import POOL, REGION, Call, Promise, Site

__all__ = ["Call", "Promise", "WorkerApart", "WorkerHere", "site_with_process", "site_with_worker"]

IDLE_S = 60.0  # that an engine may take to become empty
START_S = 60.0


class WorkerHere:
    """A worker in this process, and the way to it."""

    def __init__(self, site: Site, worker: Worker, settings: Settings) -> None:
        self.site = site
        self.worker = worker
        self._own = settings.policy

    def policy(self, **changes: object) -> None:
        """The worker goes by these from now on, and by the settings that it began with otherwise."""
        self.worker.policy.set(replace(self._own, **changes))

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens that the engine computed since it began."""
        return self.worker.sequences.stats().prefilled_tokens

    async def empty(self) -> None:
        """Returns once nothing runs."""
        async with asyncio.timeout(IDLE_S):
            while len(self.worker.sequences) or self.site.calls:  # noqa: ASYNC110 - the engine says nothing by itself
                await asyncio.sleep(0.02)


class WorkerApart:
    """A worker in a process of its own, and the way to it."""

    def __init__(self, site: Site, metrics: str) -> None:
        self.site = site
        self._metrics = metrics

    async def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        url = f"http://{self._metrics}/metrics"
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=5).read().decode())
        lines = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        return sum(float(line.rpartition(" ")[2]) for line in lines)


def _flags(model: Mapping[str, object], policy: Mapping[str, object]) -> dict[str, object]:
    """Identical jobs share nothing here, and none yields, since nobody would release it again."""
    return {
        "models": [{"name": "chat", "pool": POOL, "workers": 1, "queue_length": 10_000, **model}],
        "worker.name": "bench",
        "policy.single_flight": False,
        "policy.preemptions_max": 0,
        **{f"policy.{key}": value for key, value in policy.items()},
    }


@asynccontextmanager
async def _region(flags: Mapping[str, object]) -> AsyncIterator[tuple[Settings, Bus, Site, Path]]:
    set_up_logging("bench", level="warning")
    with tempfile.TemporaryDirectory(prefix="laneway-bench-") as folder:
        async with LocalNats(Path(folder) / "store") as nats:
            settings = load_settings(flags={**flags, "nats.url": nats.url}, environ={})
            bus = await Bus.connect(settings.nats, name="bench")
            try:
                await provision(bus, REGION, catalogue_of(settings), settings.nats, ack_wait_s=settings.nats.ack_wait_s)
                site = Site(bus, time.monotonic, time.time)
                async with site.door():
                    yield settings, bus, site, Path(folder)
            finally:
                await bus.close()


@asynccontextmanager
async def site_with_worker(
    model: Mapping[str, object], policy: Mapping[str, object] | None = None
) -> AsyncIterator[WorkerHere]:
    """A worker of `model`, as in laneway.toml, with these keys of [policy]."""
    async with _region(_flags(model, policy or {})) as (settings, _, site, _):
        options = options_of(settings)
        bus = await Bus.connect(settings.nats, name=options.worker_id)
        engine_options = settings.engine_options_of(options.pool.name)
        token_bytes = load_tokenizer(options.pool.tokenizer).token_bytes
        worker = Worker(bus, options, lambda: make_engine(options.pool, engine_options), token_bytes, SystemClock())
        stop, ready = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(worker.run(stop, ready.set))
        waiting = asyncio.create_task(ready.wait())
        try:
            await asyncio.wait({waiting, task}, return_when=asyncio.FIRST_COMPLETED)
            yield WorkerHere(site, worker, settings)
        finally:
            waiting.cancel()
            stop.set()
            await task
            await bus.close()


@asynccontextmanager
async def site_with_process(
    model: Mapping[str, object], policy: Mapping[str, object] | None = None, *, start_s: float = START_S
) -> AsyncIterator[WorkerApart]:
    """The same with the worker in a process of its own, which serves after `start_s` at most."""
    given = _flags(model, policy or {})
    async with _region(given) as (settings, _, site, folder):
        config, ready = folder / "laneway.toml", folder / "ready.json"
        sections: dict[str, dict[str, object]] = {}
        for key, value in given.items():
            section, _, name = key.partition(".")
            if name:
                sections.setdefault(section, {})[name] = value
        config.write_text(toml_text({**sections, "models": given["models"]}), encoding="utf-8")
        own = {
            "LANEWAY_CONFIG": str(config),
            "LANEWAY_NATS__URL": settings.nats.url,
            "LANEWAY_PROCESS__READY_FILE": str(ready),
            "LANEWAY_PROCESS__METRICS_LISTEN": "127.0.0.1:0",
        }
        child = Child(
            "worker", [sys.executable, "-m", "laneway.cli", "worker"], environment={**os.environ, **own},
            log=folder / "worker.log", ready_file=ready,
        )  # fmt: skip
        await child.start()
        try:
            note = await child.ready(start_s)
            yield WorkerApart(site, note.metrics)
        finally:
            await child.stop(15.0)
            child.kill_group()
