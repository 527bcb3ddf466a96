"""What others tell this worker on `ctl.<worker>`: jobs that ended elsewhere, doors that follow, drains.

Every message is a hint. A door's beat also says that the door lives.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

import structlog
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from laneway.core import subjects
from laneway.core.clock import Clock
from laneway.core.ids import is_token
from laneway.core.lanes import JobState
from laneway.runtime.bus import Bus, BusError
from laneway.workers import messages
from laneway.workers.emitter import Emitter
from laneway.workers.messages import CancelHint, DoorBeat, DrainHint
from laneway.workers.pulling import PullLoop
from laneway.workers.runs import Runs, Spawn

DOORS_FORGOTTEN_S = 60.0  # after so long a dead door needs no memory

_log = structlog.get_logger(__name__)


class Drainable(Protocol):
    @property
    def stopping(self) -> bool:
        """Whether it drains for good."""
        ...

    async def drain_changed(self) -> None: ...


class Control:
    """Listens while open."""

    def __init__(
        self,
        bus: Bus,
        region: str,
        worker_id: str,
        runs: Runs,
        pulls: PullLoop,
        emitter: Emitter,
        clock: Clock,
        spawn: Spawn,
        worker: Drainable,
    ) -> None:
        self._bus = bus
        self._region = region
        self._worker_id = worker_id
        self._runs = runs
        self._pulls = pulls
        self._emitter = emitter
        self._clock = clock
        self._spawn = spawn
        self._worker = worker
        self._heard_s: dict[str, float] = {}
        self._subscription: Subscription | None = None

    async def __aenter__(self) -> Control:
        self._subscription = await self._bus.listen(subjects.control(self._worker_id), self._received)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._bus.unsubscribe(self._subscription)

    def heard_s(self, door: str) -> float:
        """When the door was last heard of; long ago if never."""
        return self._heard_s.get(door, float("-inf"))

    def excuse(self, now_s: float) -> None:
        """Nobody could be heard until now."""
        self._heard_s = dict.fromkeys(self._heard_s, now_s)

    def _received(self, msg: Msg) -> None:
        match messages.parse_control(msg.data):
            case DoorBeat() as beat:
                self._beat(beat)
            case CancelHint(job_id) if is_token(job_id):
                self._cancel(job_id)
            case DrainHint(draining):
                self._spawn(self._drain(draining))
            case _:
                _log.warning("control_message_ignored", size_bytes=len(msg.data))

    def _beat(self, beat: DoorBeat) -> None:
        if not is_token(beat.door):
            return
        now_s = self._clock.monotonic()
        if beat.door not in self._heard_s:
            self._heard_s = {door: at for door, at in self._heard_s.items() if now_s - at < DOORS_FORGOTTEN_S}
        self._heard_s[beat.door] = now_s
        for attachment in beat.attachments:
            run = self._runs.running(attachment.job_id)
            if run is not None:
                run.attach(beat.door, attachment, now_s)
        self._emitter.flush()

    def _cancel(self, job_id: str) -> None:
        """The job's record is terminal. The run says so on `ev` when it has let go; else we do it for it."""
        run = self._runs.running(job_id)
        if run is not None:
            run.stop()
        else:
            self._spawn(self._not_here(job_id))

    async def _not_here(self, job_id: str) -> None:
        await self._pulls.unstage(job_id)
        event = messages.event(job_id, JobState.CANCELLED, 0, self._worker_id)
        try:
            await self._bus.emit(subjects.event(self._region, job_id), event)
        except BusError as error:
            _log.warning("event_not_sent", job_id=job_id, reason=error.reason)

    async def _drain(self, draining: bool) -> None:
        if draining:
            await self._pulls.pause()
            self._runs.stop_fetches()
        elif not self._worker.stopping:
            self._pulls.go_on()
        _log.info("worker_drain_changed", draining=draining)
        await self._worker.drain_changed()
