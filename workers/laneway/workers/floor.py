"""What the pull loop asks of the worker around it."""

from __future__ import annotations

from typing import Protocol

from laneway.core.job import QueuedJob
from laneway.core.lanes import Lane
from laneway.runtime.puller import Delivery


class Holder(Protocol):
    """Whoever holds a delivery of a job; a newer delivery of the same message replaces it."""

    delivery: Delivery


class Floor(Protocol):
    """Where deliveries go. Calls return at once."""

    def may_start(self) -> bool:
        """Whether jobs may start now: the engine runs, and nothing runs alone."""
        ...

    def lower_prefills(self) -> int:
        """Lower-lane jobs without their first token."""
        ...

    def running(self, job_id: str) -> Holder | None:
        """What runs the job here, if anything does."""
        ...

    def launch(self, delivery: Delivery, job: QueuedJob, *, kept: bool) -> None:
        """Starts a job, for which there is room. `kept`: it does not yield to priority."""
        ...

    def dispose_expired(self, delivery: Delivery, job: QueuedJob) -> None: ...

    def dispose_too_large(self, delivery: Delivery, job: QueuedJob) -> None: ...

    def dispose_unreadable(self, delivery: Delivery, lane: Lane, why: str) -> None: ...


class Relief(Protocol):
    """Room for priority where there is none. Calls return at once."""

    def wait_s(self, *, staged: bool) -> float | None:
        """How long a priority job must have been waiting for room before a run yields to it; None: none may yield.

        `staged`: it waits here, where no other worker can start it.
        """
        ...

    def make_room(self, kv_tokens: int) -> bool:
        """Lets one run yield, so that a job which reserves so much can start once the engine is rid of that run.

        False: no single run would do.
        """
        ...


class NoRelief:
    """Nobody yields."""

    def wait_s(self, *, staged: bool) -> float | None:
        return None

    def make_room(self, kv_tokens: int) -> bool:
        return False
