"""The simplest gate: so many lower-lane prompts at a time, and a fixed number of slots for priority."""

from __future__ import annotations

from collections.abc import Callable


class PlainGate:
    """`lower_prefills`: lower-lane jobs here without their first token."""

    def __init__(
        self, lower_prefills: Callable[[], int] = lambda: 0, *, lower_prefills_max: int = 64, reserved: int = 0
    ) -> None:
        self._lower_prefills = lower_prefills
        self._lower_prefills_max = lower_prefills_max
        self._reserved = reserved

    def lower_places(self) -> int:
        return max(0, self._lower_prefills_max - self._lower_prefills())

    def floor_places(self) -> int:
        return self.lower_places()

    def reserved_slots(self) -> int:
        return self._reserved

    def reserved_kv_tokens(self) -> int:
        return 0

    def look_in_s(self) -> float | None:
        return None

    def why(self) -> str:
        return "GUARD"
