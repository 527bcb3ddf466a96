"""What a step's output goes through, and in which order."""

import asyncio

from laneway.core.clock import ManualClock
from laneway.core.lanes import FinishReason
from laneway.workers.engines.protocol import EngineRequest, EngineStats, SequenceStep
from laneway.workers.sequences import LiveSequence, Sequences


class Engine:
    """Takes everything, computes nothing."""

    def submit(self, request: EngineRequest) -> None: ...

    def abort(self, request_id: int) -> None: ...


class Owner:
    def __init__(self, name: str, heard: list[str]) -> None:
        self.name = name
        self.heard = heard

    def on_step(self, step: SequenceStep, now_s: float) -> None:
        self.heard.append(f"{self.name}{list(step.token_ids)}")

    def on_engine_lost(self, reason: str) -> None:
        self.heard.append(f"{self.name} lost")

    def on_fault(self, error: Exception) -> None:
        raise AssertionError(error)


class Place:
    def __init__(self) -> None:
        self.heard: list[str] = []
        self.sequences = Sequences(ManualClock(), lambda: None, lambda: self.heard.append("sent"))
        self.sequences.attach(Engine())  # type: ignore[arg-type]  # all that sequences ask of an engine

    def submit(self, name: str) -> LiveSequence:
        return self.sequences.submit(Owner(name, self.heard), lambda number: EngineRequest(number, (1,), 4))

    def step(self, *outputs: tuple[LiveSequence, int], finish: FinishReason | None = None) -> None:
        steps = [SequenceStep(sequence.id, [token], finish=finish) for sequence, token in outputs]
        self.sequences.on_step(steps, EngineStats())


async def test_first_outputs_are_sent_before_the_rest_of_the_step_is_looked_at():
    place = Place()
    old, older = place.submit("a"), place.submit("b")
    place.step((old, 1), (older, 1))
    assert place.heard == ["a[1]", "b[1]", "sent"]
    place.heard.clear()
    new = place.submit("c")
    place.step((old, 2), (older, 2), (new, 1))
    assert place.heard == ["c[1]", "sent"]
    await asyncio.sleep(0)
    assert place.heard == ["c[1]", "sent", "a[2]", "b[2]", "sent"]


async def test_a_step_is_taken_whole_before_the_next_and_before_the_engine_s_end():
    place = Place()
    old = place.submit("a")
    place.step((old, 1))
    place.step((old, 2), (new := place.submit("b"), 1))
    place.step((old, 3), (new, 2))
    assert place.heard == ["a[1]", "sent", "b[1]", "sent", "a[2]", "sent", "a[3]", "b[2]", "sent"]
    place.heard.clear()
    place.step((old, 4), (place.submit("c"), 1))
    place.sequences.on_closed("gone")
    assert place.heard == ["c[1]", "sent", "a[4]", "sent", "a lost", "b lost", "c lost"]
    await asyncio.sleep(0)
    assert len(place.heard) == 7


async def test_a_sequence_that_ends_with_its_first_output_is_gone_at_once():
    place = Place()
    old = place.submit("a")
    place.step((old, 1))
    new = place.submit("b")
    place.step((old, 2), (new, 9), finish=FinishReason.LENGTH)
    assert (new.ended, old.ended) == (True, False)
    await asyncio.sleep(0)
    assert old.ended
    assert len(place.sequences) == 0
