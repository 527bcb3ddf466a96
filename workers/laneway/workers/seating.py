"""What a run asks about its place in the engine: its own seat, or that of an identical job whose sequence it shares.

A seat belongs to a sequence. The first of its runs took it, and whichever leaves last gives it back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from laneway.workers.run import JobRun


class Seating(Protocol):
    """Whose place in the engine a run has. Calls return at once."""

    def joined(self, run: JobRun) -> None:
        """The run shares the sequence of another from now on, and needs no seat but that one's."""
        ...

    def alone(self, run: JobRun) -> bool:
        """Sees to it that the run has a seat of its own, for a sequence of its own; False where there is no room."""
        ...

    def shared(self, run: JobRun) -> bool:
        """Whether others sit where the run does."""
        ...
