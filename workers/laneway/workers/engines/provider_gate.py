"""Who may be asked, and when: what an engine in front of rented servers asks before each request.

A gate knows of quotas, prices and of servers that are down; the engine knows how to ask one. Each `enter` gives a
ticket, and each ticket ends with exactly one of its three calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from laneway.workers.engines.protocol import EngineRequest


class Ticket(Protocol):
    """Leave to ask one provider once."""

    provider: str  # name of the provider to ask

    def used(self, prompt_tokens: int, completion_tokens: int) -> None:
        """It ended well; the counts as the server gave them, or ours where it gave none."""
        ...

    def failed(self, status: int, headers: Mapping[str, str]) -> float | None:
        """An answer that was no output: 429, 5xx, or 0 where there was none. Names of headers are in lower case.

        Returns seconds after which the request may be asked again, anywhere; None: give it up.
        """
        ...

    def dropped(self) -> None:
        """Aborted by us, or broken after output."""
        ...


class Gate(Protocol):
    async def enter(self, request: EngineRequest, provider: str = "") -> Ticket:
        """Waits until some provider may be asked, or the one that is named. Raises RemoteRefusal. Cancelled, it holds
        nothing."""
        ...

    def heard(self, provider: str, headers: Mapping[str, str]) -> None:
        """Headers of any answer (x-ratelimit-*, retry-after), names in lower case; told before its ticket ends."""
        ...


class OpenGate:
    """One provider, always open. What fails is given up: when it is tried again is the business of its job."""

    def __init__(self, provider: str) -> None:
        self._provider = provider

    async def enter(self, request: EngineRequest, provider: str = "") -> Ticket:
        return OpenTicket(provider or self._provider)

    def heard(self, provider: str, headers: Mapping[str, str]) -> None:
        pass


class OpenTicket:
    """A Ticket that counts nothing."""

    def __init__(self, provider: str) -> None:
        self.provider = provider

    def used(self, prompt_tokens: int, completion_tokens: int) -> None:
        pass

    def failed(self, status: int, headers: Mapping[str, str]) -> float | None:
        return None

    def dropped(self) -> None:
        pass
