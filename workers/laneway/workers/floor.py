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

    def running(self, job_id: str) -> Holder | None:
        """What runs the job here, if anything does."""
        ...

    def launch(self, delivery: Delivery, job: QueuedJob, *, kept: bool) -> None:
        """Starts a job, for which there is room. `kept`: it does not yield to priority."""
        ...

    def dispose_expired(self, delivery: Delivery, job: QueuedJob) -> None: ...

    def dispose_too_large(self, delivery: Delivery, job: QueuedJob) -> None: ...

    def dispose_unreadable(self, delivery: Delivery, lane: Lane, why: str) -> None: ...


class Gate(Protocol):
    """How much lower-lane work may join what the engine has. The pull loop asks before each step, and again when the
    engine stepped, room was freed or `look_in_s` has passed. Calls return at once and change nothing."""

    def lower_places(self) -> int:
        """Lower-lane jobs that may start now; 0: none, and `why` says what is in the way."""
        ...

    def floor_places(self) -> int:
        """The same where the floor of the lower lanes is due: headroom does not count, the guard of first tokens and
        the debt that the budget may run into still do."""
        ...

    def reserved_slots(self) -> int:
        """Slots that lower lanes leave free for priority that may come."""
        ...

    def reserved_kv_tokens(self) -> int:
        """KV tokens that lower lanes leave free for the same."""
        ...

    def look_in_s(self) -> float | None:
        """When `lower_places` may rise by itself, as credit refills; None: with an event only."""
        ...

    def why(self) -> str:
        """UPPER_SNAKE reason while `lower_places` is 0: BUDGET, GUARD, TPOT, HEADROOM."""
        ...


class Relief(Protocol):
    """Room for priority where there is none. Calls return at once."""

    def wait_s(self, *, staged: bool) -> float | None:
        """How long a priority job must have been waiting for room before a run yields to it; None: none may yield.

        `staged`: it waits here, where no other worker can start it.
        """
        ...

    def make_room(self, kv_tokens: int, job_id: str) -> bool:
        """Lets one run yield, so that this job, which reserves so much, can start once the engine is rid of that run.

        False: no single run would do.
        """
        ...


class NoRelief:
    """Nobody yields."""

    def wait_s(self, *, staged: bool) -> float | None:
        return None

    def make_room(self, kv_tokens: int, job_id: str) -> bool:
        return False
