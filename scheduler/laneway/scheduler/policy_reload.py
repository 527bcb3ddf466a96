"""Reads the settings again while the scheduler runs, and takes their [policy] section, or says why not.

Looks at the file's content every few seconds, since editors put another file in its place, and at once on SIGHUP.
Settings that do not load change nothing: the parameters before them stay in force. Other sections hold from the start
of a process to its end; where one of them changed, that is said.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import structlog

from laneway.core.errors import ConfigError
from laneway.runtime import metrics
from laneway.runtime.config_load import leaves
from laneway.runtime.live_policy import LivePolicy
from laneway.runtime.params import check_params
from laneway.runtime.settings import Settings
from laneway.runtime.settings_source import SettingsSource

POLL_S = 2.0
SETTLE_S = 0.25  # a file is read once it has not changed for so long: it may be half written

_log = structlog.get_logger(__name__)
_reloads = metrics.counter("laneway_policy_reloads_total", "Changes of the settings, taken or refused.", ("outcome",))


class PolicyReload:
    """Of one process, leading or not. `run` until cancelled."""

    def __init__(
        self, settings: Settings, policy: LivePolicy, source: SettingsSource, news: Callable[[], None]
    ) -> None:
        """`news` is called when what there is to publish may have changed."""
        self.refused = ""  # why the settings as they stand now were not taken
        self.restart: tuple[str, ...] = ()  # keys whose change waits for a restart
        self._started_with = settings
        self._policy = policy
        self._source = source
        self._news = news
        self._asked = asyncio.Event()

    def gauge(self) -> AbstractContextManager[None]:
        """1 while the settings as they are now are not in force, for Prometheus."""
        text = "1 while the settings as they stand now are refused."
        return metrics.live_gauge("laneway_policy_refused_state", text, (), lambda: [({}, float(bool(self.refused)))])

    def ask(self) -> None:
        """Reads at once, whether or not the file changed."""
        self._asked.set()

    async def run(self) -> None:
        seen = await self._content()
        await self.reread()  # it may have changed since the process read it
        while True:
            asked = await self._pause()
            content = await self._content()
            if not asked:
                if content == seen:
                    continue
                await asyncio.sleep(SETTLE_S)
                if await self._content() != content:
                    continue
            if content is None and seen is not None:
                self._refuse("the settings file is gone")
            else:
                await self.reread()
            seen = content

    async def reread(self) -> None:
        """Takes the settings as they are now, or says why not."""
        try:
            settings = await asyncio.to_thread(self._source.load)
            check_params(settings.policy)
        except ConfigError as error:
            self._refuse(str(error))
            return
        self._say_restart(settings)
        if self.refused:
            self.refused = ""
            _log.info("policy_reload_mended")
            self._news()
        before = self._policy.settings
        if settings.policy == before:
            return
        self._policy.set(settings.policy)
        _reloads.labels("reloaded").inc()
        _log.info("policy_reloaded", changed=changes(dict(leaves(before)), dict(leaves(settings.policy))))
        self._news()

    def _refuse(self, why: str) -> None:
        _reloads.labels("refused").inc()
        _log.error("policy_reload_refused", error=why, kept="the parameters before it")
        self.refused = why
        self._news()

    def _say_restart(self, settings: Settings) -> None:
        now, then = dict(leaves(settings)), dict(leaves(self._started_with))
        restart = tuple(key for key in changes(then, now) if not key.startswith("policy."))
        if restart and restart != self.restart:
            _log.warning("settings_need_restart", changed=restart)
        if restart != self.restart:
            self.restart = restart
            self._news()

    async def _pause(self) -> bool:
        """Until it is time to look again; True when somebody asked for it."""
        try:
            async with asyncio.timeout(POLL_S):
                await self._asked.wait()
        except TimeoutError:
            return False
        self._asked.clear()
        return True

    async def _content(self) -> bytes | None:
        return await asyncio.to_thread(self._source.content)


def changes(before: Mapping[str, object], after: Mapping[str, object]) -> dict[str, str]:
    """Which keys changed, and from what to what, for people."""
    keys = sorted(before.keys() | after.keys())
    return {key: f"{before.get(key)} -> {after.get(key)}" for key in keys if before.get(key) != after.get(key)}
