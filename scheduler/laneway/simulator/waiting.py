"""Who waits inside a simulated engine, and in which order."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from laneway.simulator.work import Work


class Waiting:
    """Higher priority first, equal ones as they came; one that is put back comes first of all, whatever its priority.

    A newcomer passes those of lower priority from the end on, as far as the first of its own or a higher one.
    """

    __slots__ = ("_back", "_rest")

    def __init__(self) -> None:
        self._back: list[Work] = []  # put back, and who passed one of them; the head comes last
        self._rest: list[Work] = []  # by falling priority

    def __len__(self) -> int:
        return len(self._back) + len(self._rest)

    def __iter__(self) -> Iterator[Work]:
        yield from reversed(self._back)
        yield from self._rest

    @property
    def head(self) -> Work:
        return self._back[-1] if self._back else self._rest[0]

    def add(self, work: Work) -> None:
        rest, back, priority = self._rest, self._back, work.priority
        if rest and rest[-1].priority >= priority:
            rest.append(work)
        elif rest and rest[0].priority >= priority:
            rest.insert(bisect_right(rest, -priority, key=lambda each: -each.priority), work)
        else:
            passed = 0
            while passed < len(back) and back[passed].priority < priority:
                passed += 1
            if passed:
                back.insert(passed, work)
            else:
                rest.insert(0, work)

    def pop(self) -> Work:
        return self._back.pop() if self._back else self._rest.pop(0)

    def put_back(self, work: Work) -> None:
        self._back.append(work)

    def remove(self, work: Work) -> None:
        (self._back if work in self._back else self._rest).remove(work)
