"""Functions that want to be told of something that happens in a callback of the NATS client."""

from __future__ import annotations

from collections.abc import Callable

import structlog

_log = structlog.get_logger(__name__)


class Callbacks:
    def __init__(self) -> None:
        self._callbacks: list[Callable[[], None]] = []

    def add(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Returns what takes it off."""
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback) if callback in self._callbacks else None

    def call(self) -> None:
        for callback in tuple(self._callbacks):
            try:
                callback()
            except Exception as error:  # noqa: BLE001 - raising here would end nats-py's reconnecting for good
                _log.error("bus_callback_failed", error=repr(error), exc_info=error)
