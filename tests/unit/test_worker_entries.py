"""What the budget counts of its runs equals a recount, whatever comes in which order."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from laneway.core.lanes import LANES, Lane
from laneway.workers.entries import Entries, Near
from laneway.workers.prewarm import Entry

CONTRACTS = [(0.05, 1.0, False), (0.03, 2.0, False), (0.05, 0.5, True)]


class Run:
    """Of an entry what is counted."""

    def __init__(self, lane: Lane, prompt_tokens: int, contract: tuple[float, float, bool]) -> None:
        self.lane = lane
        self.prompt_tokens = prompt_tokens
        self.tpot_target_s, self.ttft_target_s, self.strict = contract
        self.made = self.in_flight_tokens = self.slices = 0
        self.submitted = False


def counted(entries: Entries) -> dict[str, Any]:
    return {
        "runs": len(entries),
        "context": entries.context_tokens,
        "priority": (entries.priority, entries.priority_decoding, entries.priority_context),
        "near": entries.near,
        "next": entries.next_lower,
    }


def recounted(runs: list[Run]) -> dict[str, Any]:
    decoding = [run for run in runs if run.made]
    priority = [run for run in runs if run.lane is Lane.PRIORITY]
    mine = [run for run in priority if run.made]
    near = Near(
        min((run.tpot_target_s for run in priority), default=0.0),
        min((run.ttft_target_s for run in priority), default=0.0),
        any(run.strict for run in priority),
    )
    return {
        "runs": len(runs),
        "context": sum(run.prompt_tokens + run.made for run in decoding),
        "priority": (len(priority), len(mine), sum(run.prompt_tokens + run.made for run in mine)),
        "near": near if priority else None,
        "next": next((run for run in runs if run.lane is not Lane.PRIORITY and not run.submitted), None),
    }


@given(st.data())
def test_what_is_counted_equals_a_recount_after_every_change(data: st.DataObject):
    entries, runs = Entries(), list[Run]()
    for _ in range(data.draw(st.integers(1, 30))):
        run = data.draw(st.sampled_from([None, *runs]))
        if run is None:
            run = Run(
                data.draw(st.sampled_from(LANES)), data.draw(st.integers(1, 50)), data.draw(st.sampled_from(CONTRACTS))
            )
            runs.append(run)
            entries.enter(cast(Entry, run))
        elif data.draw(st.booleans()):
            runs.remove(run)
            entries.leave(cast(Entry, run))
            entries.gave(cast(Entry, run), 3)  # what comes late counts for nothing
        elif run.submitted:
            tokens = data.draw(st.integers(1, 5))
            run.made += tokens
            entries.gave(cast(Entry, run), tokens)
        else:
            run.submitted = True
            entries.sent(cast(Entry, run))
        assert counted(entries) == recounted(runs)
        assert {id(entry) for entry in entries} == {id(run) for run in runs}
        assert all(cast(Entry, run) in entries for run in runs)


def test_prompts_in_the_engine_are_counted_by_whose_they_are():
    entries, chunk = Entries(), 512
    runs = [Run(lane, 2000, CONTRACTS[0]) for lane in (Lane.PRIORITY, Lane.BATCH, Lane.DEFERRABLE)]
    for run, in_flight in zip(runs, (100, 200, 0), strict=True):
        run.in_flight_tokens, run.slices = in_flight, 1
        entries.enter(cast(Entry, run))
    for run, last in zip(runs, (10, 10, 600), strict=True):
        cast(Any, run).last_tokens = last
    assert entries.priority_prompt_tokens() == 100
    assert [id(entry) for entry in entries.lower_in_flight()] == [id(runs[1])]
    assert entries.in_slices(cast(Entry, runs[0])) == 2
    assert entries.last_slices(chunk) == 1
