"""Runs the cases on an engine, one after another, and reports of each what came out.

A case that the engine does not offer is never passed. A case that fails, or leaves the engine unsound, costs the next
one nothing: it gets a new engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from laneway.workers.conformance import aborts, counts, life, limits, sampling, streams, texts
from laneway.workers.conformance.case import Broken, Case, NotOffered
from laneway.workers.conformance.counts import REST_IS_ZERO
from laneway.workers.conformance.listener import Breach
from laneway.workers.conformance.rig import Rig
from laneway.workers.conformance.subject import Subject

CASES: tuple[Case, ...] = (
    *streams.CASES,
    *texts.CASES,
    *sampling.CASES,
    *limits.CASES,
    *aborts.CASES,
    *counts.CASES,
    *life.CASES,
)
KILL = "kill"  # needed by cases that end an engine without its consent


class Outcome(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_OFFERED = "not offered"


class Result(Struct, frozen=True):
    case: str
    outcome: Outcome
    message: str = ""  # what was seen; of what is not offered, what is missing


class Report(Struct, frozen=True):
    results: tuple[Result, ...]

    @property
    def failed(self) -> list[str]:
        """Names of the cases that failed."""
        return [result.case for result in self.results if result.outcome is Outcome.FAILED]

    def of(self, name: str) -> Result:
        """KeyError for a case that was not run."""
        found = next((result for result in self.results if result.case == name), None)
        if found is None:
            raise KeyError(name)
        return found


async def run_kit(
    subject: Subject, cases: Sequence[Case] = CASES, tell: Callable[[str], None] = lambda name: None
) -> Report:
    """Runs cases in their order; `tell` hears the name of each before it. EngineStartError if no engine starts."""
    judge = Judge(subject)
    try:
        await judge.start()
        for case in cases:
            tell(case.name)
            await judge.run(case)
    finally:
        await judge.close()
    return judge.report()


class Judge:
    """Runs one case after another on one engine, in whatever order they are asked for."""

    def __init__(self, subject: Subject) -> None:
        self._rig = Rig(subject)
        self._results: list[Result] = []

    async def start(self) -> None:
        """Starts the first engine. Raises EngineStartError."""
        await self._rig.restart()

    async def run(self, case: Case) -> Result:
        """What came out, as far as it is known by now."""
        rig = self._rig
        lacking = [name for name in case.needs if not _has(rig.subject, name)]
        if lacking:
            result = Result(case.name, Outcome.NOT_OFFERED, f"needs {', '.join(lacking)}")
        else:
            result = await _result(rig, case)
            await _bring_to_rest(rig)
        self._results.append(result)
        return _with_breaches(result, rig.breaches)

    def report(self) -> Report:
        """Of all that was run; a case that passed may have failed since, by what was heard later."""
        return Report(tuple(_with_breaches(result, self._rig.breaches) for result in self._results))

    async def close(self) -> None:
        await self._rig.close()


async def _result(rig: Rig, case: Case) -> Result:
    try:
        if not rig.started:
            await rig.restart()
        async with asyncio.timeout(rig.subject.case_s):
            await case.run(rig)
        return Result(case.name, Outcome.PASSED)
    except NotOffered as reason:
        return Result(case.name, Outcome.NOT_OFFERED, str(reason))
    except Broken as broken:
        return Result(case.name, Outcome.FAILED, str(broken))
    except TimeoutError:
        return Result(case.name, Outcome.FAILED, f"not done after {rig.subject.case_s:g} s")
    except Exception as error:  # noqa: BLE001 - whatever an engine raises is this case's failure and no other's
        return Result(case.name, Outcome.FAILED, f"{type(error).__name__}: {error}")


async def _bring_to_rest(rig: Rig) -> None:
    """The next case finds nothing running, or another engine."""
    if not rig.started:
        return
    try:
        await rig.stop(sorted(rig.listener.live))
        await rig.expect_rest()
    except Broken as broken:
        rig.breaches.append(Breach(REST_IS_ZERO, f"after a case: {broken}"))
        await rig.close()


def _has(subject: Subject, name: str) -> bool:
    return subject.kill is not None if name == KILL else bool(getattr(subject.can, name))


def _with_breaches(result: Result, breaches: Sequence[Breach]) -> Result:
    """What must never be fails the case that says so, whichever was running."""
    found = [breach.message for breach in breaches if breach.case == result.case]
    if not found:
        return result
    said = [result.message] if result.outcome is Outcome.FAILED else []
    return replace(result, outcome=Outcome.FAILED, message="; ".join(dict.fromkeys([*said, *found])))
