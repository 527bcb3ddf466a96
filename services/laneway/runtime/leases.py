"""Signs of life of workers: who keeps one, who watches them, and when an owner may be taken for dead.

A lease is a key of the KV bucket WORKERS, written each RENEW_S with a time to live: the bucket holds the living only.
Liveness is judged by the watcher's own monotonic clock from what it heard, never by wall times. A watcher that could
have heard nothing, being cut off from NATS or stopped itself, calls nobody dead.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import structlog
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from laneway.core import subjects
from laneway.core.clock import Clock
from laneway.core.fleet import LEASE_S, RENEW_S, WorkerLease
from laneway.runtime.bus import Bus, BusError
from laneway.runtime.headers import TTL
from laneway.runtime.link import LinkWatch
from laneway.runtime.reading import last_message, subject_list
from laneway.runtime.wire.reading import UnreadableMessage
from laneway.runtime.wire.records import decode_lease, encode_lease

KV_OPERATION = "KV-Operation"

_log = structlog.get_logger(__name__)


class LeaseKeeper:
    """Keeps the lease of one worker incarnation. `snapshot` gives its present contents and must be cheap."""

    def __init__(self, bus: Bus, region: str, snapshot: Callable[[], WorkerLease], clock: Clock) -> None:
        self._bus = bus
        self._bucket = subjects.workers_bucket(region)
        self._snapshot = snapshot
        self._clock = clock
        self._renewed_s: float | None = None  # monotonic, when the last renewal that succeeded began
        self._released = False

    def held(self) -> bool:
        """Whether others must still take this worker for alive. A worker that lost its lease stops emitting."""
        return (
            not self._released and self._renewed_s is not None and self._clock.monotonic() - self._renewed_s < LEASE_S
        )

    async def renew(self) -> None:
        """Writes the lease once. Raises a BusError."""
        began_s = self._clock.monotonic()  # of the request, not of its answer: watchers may have heard it that early
        lease = self._snapshot()
        await self._bus.store(
            subjects.kv_subject(self._bucket, lease.worker_id),
            encode_lease(lease),
            {TTL: f"{math.ceil(LEASE_S)}s"},
            timeout_s=RENEW_S,
        )
        self._renewed_s = began_s

    async def run(self) -> None:
        """Renews each RENEW_S until cancelled; failures are logged and tried again."""
        while True:
            try:
                await self.renew()
            except BusError as error:
                _log.warning("lease_not_renewed", held=self.held(), error=error.message)
            await asyncio.sleep(RENEW_S)

    async def release(self) -> None:
        """Removes the lease: this incarnation owns nothing any more and need not be waited for."""
        self._released = True
        lease = self._snapshot()
        subject = subjects.kv_subject(self._bucket, lease.worker_id)
        await self._bus.store(subject, b"", {KV_OPERATION: "PURGE", TTL: "10s"}, timeout_s=RENEW_S)


class LeaseWatcher:
    """Follows all leases of a region. Ages are this process's monotonic clock."""

    def __init__(self, bus: Bus, region: str, clock: Clock) -> None:
        self._bus = bus
        self._bucket = subjects.workers_bucket(region)
        self._clock = clock
        self._link = LinkWatch(bus, self._could_hear_again)
        self._heard_s: dict[str, float] = {}
        self._leases: dict[str, WorkerLease] = {}
        self._subscription: Subscription | None = None
        self._since_s: float | None = None  # since when leases could be heard without a gap

    async def start(self) -> None:
        """Subscribes, then reads what is there: a lease read says nothing of its age, so it counts as heard now."""
        self._subscription = await self._bus.listen(subjects.kv_subject(self._bucket, ">"), self._heard)
        await self._read()
        await self._link.start()
        self._since_s = self._clock.monotonic()

    async def _read(self) -> None:
        stream = f"KV_{self._bucket}"
        for subject in await subject_list(self._bus, stream, subjects.kv_subject(self._bucket, ">")):
            found = await last_message(self._bus, stream, subject)
            if found is not None and _worker_id(subject) not in self._heard_s:
                self._take(subject, found.data, found.headers.get(KV_OPERATION))

    def _heard(self, msg: Msg) -> None:
        self._take(msg.subject, msg.data, (msg.headers or {}).get(KV_OPERATION))

    def _take(self, subject: str, data: bytes, operation: str | None) -> None:
        worker_id = _worker_id(subject)
        if operation is not None or not data:
            self._forget(worker_id)
            return
        try:
            self._leases[worker_id] = decode_lease(data)
        except UnreadableMessage as error:
            # Alive, whatever it says: an unreadable lease must not cost a worker its jobs.
            _log.warning("lease_unreadable", worker_id=worker_id, error=str(error))
        self._heard_s[worker_id] = self._clock.monotonic()

    def _could_hear_again(self) -> None:
        # Nobody could be heard during the gap, so everybody gets a whole lease from now.
        self._since_s = self._clock.monotonic()

    def live(self) -> list[WorkerLease]:
        """Leases of all that are not known to be dead."""
        return [lease for worker_id, lease in list(self._leases.items()) if self.alive(worker_id) is not False]

    def alive(self, worker_id: str) -> bool | None:
        """False only after LEASE_S of silence in which this watcher could have heard it. None: cannot say yet."""
        now_s = self._clock.monotonic()
        heard_s = self._heard_s.get(worker_id)
        if heard_s is not None and now_s - heard_s < LEASE_S:
            return True
        if self._since_s is None or now_s - self._since_s < LEASE_S or not self._link.sound():
            return None
        self._forget(worker_id)
        return False

    def _forget(self, worker_id: str) -> None:
        self._heard_s.pop(worker_id, None)
        self._leases.pop(worker_id, None)

    async def close(self) -> None:
        await self._link.close()
        await self._bus.unsubscribe(self._subscription)


def _worker_id(subject: str) -> str:
    return subject.rsplit(".", 1)[1]
