"""One key of a key-value bucket: read from the stream's leader, written by compare-and-set, watched on core NATS.

For the few small facts that services of a region share: who leads, which lanes are paused, whether the region drains.
Never used across domains.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from msgspec import Struct

from laneway.core import subjects
from laneway.runtime.bus import ApiError, Bus, WrongSequence
from laneway.runtime.bus_errors import ERR_MESSAGE_NOT_FOUND
from laneway.runtime.headers import EXPECTED_SUBJECT_SEQUENCE

CHANGE_ATTEMPTS = 8


class Value(Struct, frozen=True):
    """What a key holds; sequence 0 and no data where it was never written."""

    data: bytes = b""
    sequence: int = 0


class Key:
    def __init__(self, bus: Bus, bucket: str, key: str) -> None:
        self._bus = bus
        self._stream = f"KV_{bucket}"
        self._subject = subjects.kv_subject(bucket, key)

    async def read(self, *, timeout_s: float = 2.0) -> Value:
        """Raises a BusError."""
        try:
            answer = await self._bus.api(
                f"STREAM.MSG.GET.{self._stream}", {"last_by_subj": self._subject}, timeout_s=timeout_s
            )
        except ApiError as error:
            if error.err_code == ERR_MESSAGE_NOT_FOUND:
                return Value()
            raise
        message = answer["message"]
        return Value(base64.b64decode(message.get("data", "")), int(message["seq"]))

    async def write(self, data: bytes, expected_sequence: int, *, timeout_s: float = 2.0) -> int:
        """Writes if the key is as expected (0: absent); returns its new sequence. Raises WrongSequence, BusError."""
        headers = {EXPECTED_SUBJECT_SEQUENCE: str(expected_sequence)}
        return await self._bus.store(self._subject, data, headers, timeout_s=timeout_s)

    async def change(self, edit: Callable[[bytes], bytes]) -> bytes:
        """Applies an edit that may run again on what another writer left; returns what the key holds then."""
        for _ in range(CHANGE_ATTEMPTS - 1):
            try:
                return await self._change_once(edit)
            except WrongSequence:
                continue
        return await self._change_once(edit)

    async def _change_once(self, edit: Callable[[bytes], bytes]) -> bytes:
        value = await self.read()
        data = edit(value.data)
        if data != value.data:
            await self.write(data, value.sequence)
        return data

    @asynccontextmanager
    async def watch(self, changed: Callable[[bytes], None]) -> AsyncIterator[None]:
        """Calls back with each new value as it is written: a hint that may get lost, so look at intervals as well."""
        subscription = await self._bus.listen(self._subject, lambda msg: changed(msg.data))
        try:
            yield
        finally:
            await self._bus.unsubscribe(subscription)
