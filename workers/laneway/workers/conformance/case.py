"""What a case is, and how it says that its requirement does not hold."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from laneway.workers.conformance.rig import Rig


class Broken(Exception):
    """The requirement does not hold; the message says what was seen."""


class NotOffered(Exception):
    """This engine cannot be asked, though it has the abilities that the case needs; the message says why."""


@dataclass(frozen=True)
class Case:
    """One requirement. `needs` names abilities (Capabilities) without which it is not asked; `kill`: a way to do so."""

    name: str
    holds: str  # what must hold, one line
    run: Callable[[Rig], Awaitable[None]]
    needs: tuple[str, ...] = ()


def case(name: str, holds: str, *, needs: tuple[str, ...] = ()) -> Callable[[Callable[[Rig], Awaitable[None]]], Case]:
    """Makes a case of the function that asks for it."""
    return lambda run: Case(name, holds, run, needs)


def expect(holds: bool, otherwise: str) -> None:
    """Not an assert: the kit must judge under `python -O` too."""
    if not holds:
        raise Broken(otherwise)
