"""The region's object store: what is too large for a message, in the official format but by our own requests.

Owns how an object is stored, read, removed and listed. Whose prompt or result it is, is references.py's business; when
one is given up, that of the scheduler's sweep. Objects are never changed: each put makes one with a name of its own.

An object is its chunks, stored first, and then its facts, from which the official tools read it; we read it by the
reference alone, and check size and SHA-256. All messages of an object expire by themselves, a day after its job's
record.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from random import Random

import msgspec
import structlog
from msgspec import Struct

from laneway.core import subjects
from laneway.core.clock import Clock
from laneway.core.errors import Code, ErrorRow, LanewayError, ObjectLost, ObjectStoreFull
from laneway.core.objects import ObjectName, ObjectRef
from laneway.runtime import metrics
from laneway.runtime.bus import Bus, BusError, NotConnected, OutOfStorage, PublishUnknown, StreamFull, WrongSequence
from laneway.runtime.clock import SYSTEM_RANDOM, SystemClock
from laneway.runtime.headers import EXPECTED_SUBJECT_SEQUENCE, ROLLUP, TTL
from laneway.runtime.reading import last_from_leader, last_message, subject_pages

OBJECT_BYTES_MAX = 32 * 1024 * 1024
CHUNK_BYTES = 128 * 1024  # as the official clients have it
AT_ONCE = 4  # chunks of an object that are on their way: small messages on the same connection go between them
STORE_TRIES = 4
RETRY_S = 0.1
KEPT_BEYOND_S = 86_400.0  # objects outlive their job's record by this

_log = structlog.get_logger(__name__)
_stored = metrics.counter("laneway_objects_stored_total", "Prompts and results put into the object store.")
_stored_bytes = metrics.counter("laneway_objects_stored_bytes", "Bytes put into the object store.")


class ObjectTooLarge(LanewayError):
    """It is larger than an object may be; nothing was stored."""

    row = ErrorRow(Code.RESOURCE_EXHAUSTED, 413, False, "too_large")
    default_reason = "OBJECT_TOO_LARGE"

    def __init__(self, size_bytes: int) -> None:
        super().__init__(f"it has {size_bytes} bytes, an object at most {OBJECT_BYTES_MAX}")


class ListedObject(Struct, frozen=True):
    """What the subjects in the store say of an object."""

    name: ObjectName
    whole: bool  # its facts are there, and they come last


class _Facts(Struct):
    """As the official clients write them."""

    name: str
    bucket: str
    nuid: str
    size: int
    chunks: int
    digest: str
    mtime: str
    options: dict[str, int]


class ObjectStore:
    """Of one region. Safe to share; any number of processes may use the same store."""

    def __init__(self, bus: Bus, region: str, *, clock: Clock | None = None, random: Random = SYSTEM_RANDOM) -> None:
        self._bus = bus
        self._region = region
        self._stream = subjects.objects_stream(region)
        self._clock = clock or SystemClock()
        self._random = random

    # --- one object ----------------------------------------------------------------------------------

    async def put(self, tenant: str, job_id: str, kind: str, data: bytes, *, until_s: float) -> ObjectRef:
        """Stores an object whose job's record is kept until `until_s`, Unix seconds.

        Raises ObjectStoreFull, ObjectTooLarge, and other BusErrors, most of which are for now; what was stored by then
        is taken away again, or swept.
        """
        if len(data) > OBJECT_BYTES_MAX:
            raise ObjectTooLarge(len(data))
        now_s = self._clock.now()
        until_s = max(now_s, until_s)
        tag = self._random.randbytes(4).hex()
        name = ObjectName(tenant, job_id, kind, int(now_s), math.ceil(until_s), tag)
        ref = ObjectRef(str(name), len(data), hashlib.sha256(data).digest())
        try:
            await self._put(name, ref, data, {TTL: f"{math.ceil(until_s + KEPT_BEYOND_S - now_s)}s"})
        except BusError as error:
            if not isinstance(error, NotConnected):  # else it is swept
                with contextlib.suppress(BusError):
                    await self.remove(name)
            if isinstance(error, StreamFull | OutOfStorage):
                raise ObjectStoreFull(f"the object store is full: {error.message}") from error
            raise
        _stored.inc()
        _stored_bytes.inc(len(data))
        return ref

    async def _put(self, name: ObjectName, ref: ObjectRef, data: bytes, headers: dict[str, str]) -> None:
        width = min(CHUNK_BYTES, self._bus.payload_bytes_max // 2)
        count = max(1, math.ceil(len(data) / width))
        for first in range(0, count, AT_ONCE):
            part = range(first, min(first + AT_ONCE, count))
            # All of a part have ended before the first failure is raised: nothing is stored behind our back.
            ended = await asyncio.gather(
                *(
                    self._store(
                        subjects.object_chunk(self._region, name, n), data[n * width : (n + 1) * width], headers
                    )
                    for n in part
                ),
                return_exceptions=True,
            )
            for failure in ended:
                if failure is not None:
                    raise failure
        facts = _Facts(
            name=str(name),
            bucket=subjects.objects_bucket(self._region),
            nuid=subjects.object_id(name),
            size=ref.size_bytes,
            chunks=count,
            digest=f"SHA-256={urlsafe_b64encode(ref.sha256).decode()}",
            mtime=datetime.fromtimestamp(name.made_s, UTC).isoformat(),
            options={"max_chunk_size": width},
        )
        await self._store(
            subjects.object_facts(self._region, name), msgspec.json.encode(facts), headers | {ROLLUP: "sub"}
        )

    async def _store(self, subject: str, data: bytes, headers: dict[str, str]) -> None:
        """Stores the one message of a subject, of which only we know."""
        trouble: BusError | None = None
        for attempt in range(STORE_TRIES):
            if attempt:
                await asyncio.sleep(RETRY_S * 2**attempt)
            try:
                await self._bus.store(subject, data, headers | {EXPECTED_SUBJECT_SEQUENCE: "0"}, patient=True)
                return
            except PublishUnknown as error:
                trouble = error
            except WrongSequence as error:  # an earlier try arrived after all, or is on its way
                if await last_from_leader(self._bus, self._stream, subject) is not None:
                    return
                trouble = error
        assert trouble is not None
        raise trouble

    async def get(self, ref: ObjectRef) -> bytes:
        """What was put. Raises ObjectLost; what a BusError says is for now."""
        try:
            name = ObjectName.parse(ref.name)
        except ValueError:
            raise ObjectLost("the reference names no object") from None
        if ref.size_bytes > OBJECT_BYTES_MAX:
            raise ObjectLost(f"the reference is to {ref.size_bytes} bytes, more than an object may have")
        first = await self._chunk(name, 0)
        count = math.ceil(ref.size_bytes / len(first)) if first else 1
        chunks, digest = [first], hashlib.sha256(first)
        for low in range(1, count, AT_ONCE):
            part = await asyncio.gather(*(self._chunk(name, n) for n in range(low, min(low + AT_ONCE, count))))
            for chunk in part:
                digest.update(chunk)
            chunks += part
        if sum(map(len, chunks)) != ref.size_bytes or digest.digest() != ref.sha256:
            raise ObjectLost(f"the object {ref.name} is not what was put there")
        return b"".join(chunks)

    async def _chunk(self, name: ObjectName, number: int) -> bytes:
        subject = subjects.object_chunk(self._region, name, number)
        found = await last_message(self._bus, self._stream, subject)
        if found is None:  # a replica may be behind: only the leader can say that there is none
            found = await last_from_leader(self._bus, self._stream, subject)
        if found is None:
            raise ObjectLost(f"the object {name} is gone from the store")
        return found.data

    async def remove(self, name: ObjectName) -> None:
        """Takes an object away, whole or not; nothing happens where there is none. Raises a BusError."""
        # The facts first: what has none is incomplete, and swept soon.
        for subject in (subjects.object_facts(self._region, name), subjects.object_chunk(self._region, name)):
            await self._bus.api(f"STREAM.PURGE.{self._stream}", {"filter": subject})

    # --- all of them ---------------------------------------------------------------------------------

    async def listed(self) -> list[ListedObject]:
        """All objects, by their subjects alone. Objects that come or go meanwhile may be missed or given in part."""
        whole: dict[ObjectName, bool] = {}
        async for name, is_facts in self._subjects():
            whole[name] = whole.get(name, False) or is_facts
        return [ListedObject(name, complete) for name, complete in whole.items()]

    async def used(self) -> float:
        """How full the store is, 0 to 1. Raises a BusError."""
        info = await self._bus.api(f"STREAM.INFO.{self._stream}", {})
        limit: int = info["config"]["max_bytes"]
        return float(info["state"]["bytes"] / limit) if limit > 0 else 0.0

    async def _subjects(self) -> AsyncIterator[tuple[ObjectName, bool]]:
        async for page in subject_pages(self._bus, self._stream, subjects.objects(self._region)):
            for subject in page:
                try:
                    yield subjects.object_parts(subject)
                except ValueError:  # somebody's who uses the official tools: not ours to judge
                    _log.debug("object_not_ours", subject=subject)
