"""The doors that follow one run, and how far each of them has been sent.

A job that nobody follows has none, and then no chunk of it is made.

A door may have more tokens of an earlier attempt than this run went on from, because it was not heard in time or does
not hold all of them. It is sent those tokens again as this run computes them, in pieces that end where its own end: the
door compares, and goes on behind them or ends its stream. It is never sent what follows alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from laneway.workers.emitter import Emitter
from laneway.workers.transcript import CHUNK_TOKENS_MAX, Transcript


@dataclass(slots=True)
class _Place:
    next_index: int  # first token not sent yet
    heard_s: float  # when the door last named the job; monotonic
    theirs: int = 0  # tokens before it the door has from an earlier attempt: no piece goes across it


class Outlets:
    """Owned by one run."""

    def __init__(self, emitter: Emitter, job_id: str, now_s: float) -> None:
        self._emitter = emitter
        self._job_id = job_id
        self._places: dict[str, _Place] = {}
        self._start_index: int | None = None  # of this attempt; None: it is the first, or has not begun
        self.heard_s = now_s  # when any door last named the job; at first when the run began

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, door: str) -> bool:
        return door in self._places

    def begin(self, start_index: int) -> None:
        """The run goes on after an earlier attempt: tokens from here on are its own."""
        self._start_index = start_index
        for place in self._places.values():
            if place.next_index > start_index:
                place.theirs, place.next_index = place.next_index, start_index

    def open(self, door: str, next_index: int, now_s: float, *, agreed: bool = False) -> None:
        """The door follows from `next_index`; again to be sent once more what it lacks.

        `agreed`: what it has is known to be what this run has.
        """
        self.heard_s = now_s
        old = self._places.get(door)
        if self._start_index is None or agreed or next_index <= self._start_index:
            self._places[door] = _Place(next_index, now_s)
        elif old is None:
            self._places[door] = _Place(self._start_index, now_s, theirs=next_index)
        elif old.next_index < old.theirs:  # it still compares
            old.heard_s = now_s
        else:  # what it has beyond our start is from us
            self._places[door] = _Place(next_index, now_s)

    def heard(self, door: str, now_s: float) -> None:
        """The door, which follows, still does."""
        self._places[door].heard_s = now_s
        self.heard_s = now_s

    def excuse(self, now_s: float) -> None:
        """Nobody could be heard until now."""
        for place in self._places.values():
            place.heard_s = now_s
        self.heard_s = now_s

    def close_silent(self, now_s: float, silence_s: float) -> None:
        """Forgets the doors that did not name the job for so long."""
        silent = [door for door, place in self._places.items() if now_s - place.heard_s > silence_s]
        for door in silent:
            del self._places[door]

    def send(self, transcript: Transcript, attempt: int) -> None:
        """Gives each door what may leave and it was not sent."""
        ready = transcript.ready
        made_from = made_to = -1
        response = b""
        for door, place in self._places.items():
            start = place.next_index
            while start < ready:
                stop = min(ready, start + CHUNK_TOKENS_MAX)
                if start < place.theirs:
                    stop = min(stop, place.theirs)
                if start != made_from or stop != made_to:  # doors are usually equally far: one chunk serves all
                    made_from, made_to, response = start, stop, transcript.response(start, stop)
                self._emitter.add(door, self._job_id, attempt, start, stop - start, response)
                place.next_index = start = stop
