"""What a step's output goes through, and in which order."""

import asyncio

from laneway.core.clock import ManualClock
from laneway.core.lanes import FinishReason, Lane
from laneway.workers.engines.protocol import EngineRequest, EngineStats, SequenceStep
from laneway.workers.sequences import Flight, LiveSequence, Sequences


class Engine:
    """Takes everything, computes nothing."""

    def __init__(self) -> None:
        self.submitted = 0
        self.aborted: list[int] = []

    def submit(self, request: EngineRequest) -> None:
        self.submitted += 1

    def abort(self, request_id: int) -> None:
        self.aborted.append(request_id)


class Owner:
    def __init__(self, name: str, heard: list[str]) -> None:
        self.name = name
        self.heard = heard
        self.steps: list[SequenceStep] = []
        self.fails = False

    def on_step(self, step: SequenceStep, now_s: float) -> None:
        if self.fails:
            raise ValueError(step)
        self.steps.append(step)
        self.heard.append(f"{self.name}{list(step.token_ids)}")

    def on_engine_lost(self, reason: str) -> None:
        self.heard.append(f"{self.name} lost")

    def on_fault(self, error: Exception) -> None:
        assert self.fails, error
        self.heard.append(f"{self.name} fault")


class Place:
    def __init__(self) -> None:
        self.heard: list[str] = []
        self.sequences = Sequences(ManualClock(), lambda: None, lambda: self.heard.append("sent"))
        self.engine = Engine()
        self.sequences.attach(self.engine)  # type: ignore[arg-type]  # all that sequences ask of an engine

    def submit(self, name: str, flight: Flight | None = None) -> LiveSequence:
        return self.sequences.submit(Owner(name, self.heard), lambda number: EngineRequest(number, (1,), 4), flight)

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


def flight(lane: Lane = Lane.PRIORITY, prefix: tuple[int, ...] = (), start: int | None = None) -> Flight:
    return Flight("same", lane, prefix, len(prefix) if start is None else start)


def sharing(followers_max: int = 8) -> Place:
    place = Place()
    place.sequences.followers_max = followers_max
    return place


async def test_the_second_of_identical_jobs_gets_all_tokens_in_order_and_the_engine_computes_once():
    place = sharing()
    first = place.submit("a", flight())
    place.step((first, 1))
    place.step((first, 2))
    second = place.submit("b", flight())
    assert (second.joined, second.id, len(place.sequences)) == (True, first.id, 1)
    await asyncio.sleep(0)
    assert place.heard[-2:] == ["b[1, 2]", "sent"], "what was there came at once"
    place.heard.clear()
    place.step((first, 3), finish=FinishReason.LENGTH)
    assert place.heard == ["a[3]", "b[3]", "sent"]
    assert first.ended
    assert second.ended
    assert not place.submit("c", flight()).joined, "it is over"
    assert place.engine.submitted == 2


async def test_a_step_that_comes_before_what_was_missed_waits_for_it():
    place = sharing()
    first = place.submit("a", flight())
    place.step((first, 1))
    place.submit("b", flight())
    place.heard.clear()
    place.step((first, 2))
    assert place.heard == ["b[1]", "sent", "a[2]", "b[2]", "sent"]
    await asyncio.sleep(0)
    assert len(place.heard) == 5


async def test_what_was_held_until_the_next_turn_reaches_who_joined_meanwhile_once():
    place = sharing()
    first = place.submit("a", flight())
    place.step((first, 1))
    place.step((first, 2), (place.submit("x"), 9))  # the output of `a` waits for its turn
    place.submit("b", flight())
    await asyncio.sleep(0)
    assert [each for each in place.heard if each.startswith("b")] == ["b[1]", "b[2]"]


async def test_the_engine_is_told_to_stop_only_when_the_last_has_left():
    place = sharing()
    first, second = place.submit("a", flight()), place.submit("b", flight())
    place.sequences.abort(first)
    await first.gone()
    assert place.engine.aborted == []
    place.step((second, 1))
    assert [each for each in place.heard if each[0] in "ab"] == ["b[1]"]
    place.sequences.abort(second)
    assert place.engine.aborted == [second.id]
    assert not second.ended, "until the engine says so"
    assert not place.submit("c", flight()).joined


async def test_one_s_fault_and_one_s_discard_cost_the_other_nothing():
    place = sharing()
    first, second, third = (place.submit(name, flight()) for name in "abc")
    first.owner.fails = True  # type: ignore[attr-defined]  # an Owner of this module
    await place.sequences.discard(third)
    place.step((second, 1))
    assert [each for each in place.heard if each != "sent"] == ["a fault", "b[1]"]
    assert place.engine.aborted == []
    assert not second.ended


async def test_all_are_told_when_the_engine_dies():
    place = sharing()
    first, second = place.submit("a", flight()), place.submit("b", flight())
    place.sequences.on_closed("gone")
    assert [each for each in place.heard if each != "sent"] == ["a lost", "b lost"]
    assert first.ended
    assert second.ended
    assert not len(place.sequences)


async def test_who_goes_on_from_tokens_gets_those_that_follow():
    place = sharing()
    first = place.submit("a", flight())
    for token in (1, 2, 3):
        place.step((first, token))
    assert place.submit("b", flight(prefix=(1, 2))).joined
    assert place.submit("c", flight(prefix=(1, 2), start=0)).joined, "it computes them again, and compares"
    assert not place.submit("d", flight(prefix=(1, 7))).joined, "those are another answer's"
    assert not place.submit("e", flight(prefix=(1, 2, 3, 4))).joined, "nobody knows yet whether they agree"
    await asyncio.sleep(0)
    assert [each for each in place.heard if each[0] in "bcde"] == ["b[3]", "c[1, 2, 3]"]


async def test_log_probabilities_come_along():
    place = sharing()
    first = place.submit("a", flight())
    place.sequences.on_step([SequenceStep(first.id, [1], [-0.5], [[(1, -0.5)]])], EngineStats())
    place.sequences.on_step([SequenceStep(first.id, [2], [-0.25], [[(2, -0.25)]])], EngineStats())
    second = place.submit("b", flight())
    await asyncio.sleep(0)
    (step,) = second.owner.steps  # type: ignore[attr-defined]  # an Owner of this module
    assert (step.logprobs, step.top) == ([-0.5, -0.25], [[(1, -0.5)], [(2, -0.25)]])


async def test_no_more_share_than_the_worker_has_room_for():
    place = sharing(followers_max=2)
    parts = [place.submit(name, flight()) for name in "abcd"]
    assert [part.joined for part in parts] == [False, True, True, False]
    place.sequences.abort(parts[2])
    assert [place.submit(name, flight()).joined for name in "ef"] == [True, False]
