"""What checkpoints amount to: the longest sound prefix, whatever was lost, repeated or written by stale workers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from laneway.core.checkpoints import Delta, Prefix, longest_prefix, spans
from laneway.core.job import (
    Attempt,
    JobRecord,
    Timings,
    TokenLogprob,
    claim,
    hand_back,
    has_begun,
    requeue,
    set_start_index,
)
from laneway.core.subjects import checkpoint, checkpoint_parts, checkpoints_of
from laneway.runtime.checkpoints import writer_of
from laneway.runtime.wire.checkpoints import decode_checkpoint, encode_checkpoint
from laneway.runtime.wire.records import decode_record, encode_record
from laneway.v1 import bus_pb2
from tests.support.nats import make_record

# --- the model ---------------------------------------------------------------------------------------


@dataclass
class Writer:
    """One attempt: all tokens of its run, of which those before `start` are older attempts'."""

    number: int
    truth: list[int]
    start: int = 0
    sent: int = 0
    begun: bool = True


@dataclass
class World:
    """Attempts that go on from each other, and every one of them goes on writing for ever."""

    writers: list[Writer] = field(default_factory=lambda: [Writer(1, [])])
    deltas: list[Delta] = field(default_factory=list)

    @property
    def lineage(self) -> list[Attempt]:
        return [Attempt(w.number, w.start, f"w{w.number}", 0.0, w.begun and w.number > 1) for w in self.writers]

    @property
    def present(self) -> Writer:
        return [writer for writer in self.writers if writer.begun][-1]

    def prefix(self) -> tuple[int, ...]:
        found = longest_prefix(self.lineage, self.deltas).ids
        assert found == tuple(self.present.truth[: len(found)]), "a prefix of the run that others go on from"
        return found

    def generate(self, which: int, count: int) -> Writer:
        begun = [writer for writer in self.writers if writer.begun]
        writer = begun[which % len(begun)]
        writer.truth += [writer.number * 100_000 + len(writer.truth) + i for i in range(count)]
        return writer

    def write(self, which: int, count: int, copies: int, back: int) -> None:
        """A delta of what is new, perhaps again with some of what was sent before."""
        writer = self.generate(which, count)
        start = max(0, writer.sent - back)
        if ids := tuple(writer.truth[start:]):
            self.deltas += [Delta(writer.number, start, ids)] * copies
        writer.sent = len(writer.truth)

    def take_over(self, begins: bool, delivered: int) -> None:
        """Another attempt; a door has so many tokens of the run, at most."""
        kept = self.prefix()
        number = len(self.writers) + 1
        if not begins:
            self.writers.append(Writer(number, [], begun=False))
            return
        start = max(len(kept), min(delivered, len(self.present.truth)))
        self.writers.append(Writer(number, self.present.truth[:start], start, sent=len(kept)))


index = st.integers(0, 9)
writes = st.tuples(st.just("write"), index, st.integers(1, 9), st.integers(0, 2), st.sampled_from([0, 0, 5]))
takes = st.tuples(st.just("take"), st.booleans(), st.integers(0, 60))
events = st.lists(writes | writes | takes | st.tuples(st.just("generate"), index, st.integers(1, 9)), max_size=40)


@given(events)
def test_the_prefix_is_always_of_one_run(events: list[tuple]):
    world = World()
    for kind, *what in events:
        match kind:
            case "write":
                world.write(*what)
            case "take":
                world.take_over(*what)
            case _:
                world.generate(*what)
        world.prefix()


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.booleans(), st.integers(0, 60)), max_size=30))
def test_nothing_that_was_stored_is_missing_from_it(steps: list[tuple[int, bool, bool, int]]):
    """Each owner writes while it owns the job, nothing is lost, and stale writers go on."""
    world = World()
    for count, takes_over, begins, delivered in steps:
        world.write(len([w for w in world.writers if w.begun]) - 1, count, 1, 0)
        assert world.prefix() == tuple(world.present.truth)
        if takes_over:
            world.take_over(begins, delivered)
            world.write(0, 3, 1, 0)


# --- single rules ------------------------------------------------------------------------------------


def lineage(*starts: int | None) -> list[Attempt]:
    """Attempts with these start indexes; None: it has not begun."""
    return [
        Attempt(i, start or 0, f"w{i}", 0.0, begun=start is not None and i > 1) for i, start in enumerate(starts, 1)
    ]


def ids(*values: int) -> tuple[int, ...]:
    return values


@pytest.mark.parametrize(
    ("attempts", "deltas", "kept"),
    [
        ([], [], ()),
        (lineage(0, None), [], ()),
        (lineage(0, None), [Delta(1, 0, ids(1, 2)), Delta(1, 2, ids(3))], (1, 2, 3)),
        (lineage(0, None), [Delta(1, 2, ids(3)), Delta(1, 0, ids(1, 2))], (1, 2, 3)),
        (lineage(0, None), [Delta(1, 1, ids(2, 3))], ()),  # the first was lost
        (lineage(0, None), [Delta(1, 0, ids(1)), Delta(1, 2, ids(3))], (1,)),
        (lineage(0, None), [Delta(1, 0, ids(1, 2, 3)), Delta(1, 0, ids(1))], (1, 2, 3)),
        (lineage(0, None, None), [Delta(1, 0, ids(1, 2)), Delta(2, 2, ids(9))], (1, 2)),  # it had not begun
        (lineage(0, 1, None), [Delta(1, 0, ids(1, 2, 3)), Delta(2, 1, ids(7))], (1, 7)),
        (lineage(0, 2, None), [Delta(1, 0, ids(1)), Delta(2, 1, ids(2, 7))], (1, 2, 7)),  # with what a door handed over
        (lineage(0, 2, None), [Delta(1, 0, ids(1)), Delta(2, 2, ids(7))], (1,)),  # that was lost
        (lineage(0, 0, None), [Delta(1, 0, ids(1, 2, 3))], ()),  # it began anew
        (lineage(0, 2, None), [Delta(1, 0, ids(1, 2)), Delta(2, 0, ids(5, 6, 7))], (5, 6, 7)),  # from something else
        (lineage(0, None), [Delta(3, 0, ids(1))], ()),  # nobody's
    ],
)
def test_what_counts(attempts: list[Attempt], deltas: list[Delta], kept: tuple[int, ...]):
    assert longest_prefix(attempts, deltas).ids == kept


def test_log_probabilities_come_along_and_are_filled_in():
    known = [TokenLogprob(-0.5, ((7, -0.5),)), TokenLogprob(-0.25)]
    deltas = [Delta(1, 0, (1, 2), tuple(known)), Delta(2, 2, (3, 4), (TokenLogprob(math.nan), TokenLogprob(-1.0)))]
    found = longest_prefix(lineage(0, 3, None), deltas)
    assert found.ids == (1, 2, 3, 4)
    assert [round(each.logprob, 3) for each in found.logprobs if not math.isnan(each.logprob)] == [-0.5, -0.25, -1.0]
    assert math.isnan(found.logprobs[2].logprob)
    assert longest_prefix(lineage(0, None), [Delta(1, 0, (1, 2))]) == Prefix((1, 2))


def test_records_of_older_releases_do_not_say_who_has_begun():
    old = [Attempt(1, 0, "a", 0.0), Attempt(2, 0, "b", 0.0), Attempt(3, 5, "c", 0.0)]
    assert [has_begun(each) for each in old] == [True, False, True]
    assert [(span.attempt, span.start, span.end) for span in spans(old)] == [(1, 0, 5.0), (3, 5, math.inf)]


# --- the record --------------------------------------------------------------------------------------


def taken(*, checkpoint_index: int = 0) -> JobRecord:
    back = requeue(claim(make_record(), "w1", 1.0), "w1", 1, checkpoint_index)
    return claim(back, "w2", 2.0)


def test_a_first_attempt_has_begun_with_its_claim_and_a_later_one_when_it_says_so():
    record = taken()
    assert [each.begun for each in record.lineage] == [True, False]
    assert not has_begun(record.lineage[1])
    begun = set_start_index(record, "w2", 2, 0)
    assert (begun.lineage[1].begun, begun.lineage[1].start_index) == (True, 0)


@pytest.mark.parametrize("give_back", [hand_back, requeue])
def test_the_record_says_how_much_was_kept_when_it_was_given_back(give_back):
    record = set_start_index(taken(checkpoint_index=40), "w2", 2, 40)
    assert record.checkpoint_index == 40
    assert give_back(record, "w2", 2, 70).checkpoint_index == 70
    assert give_back(record, "w2", 2).checkpoint_index == 40


def test_an_attempt_that_begins_anew_leaves_nothing_kept():
    assert set_start_index(taken(checkpoint_index=40), "w2", 2, 10).checkpoint_index == 10


# --- messages ----------------------------------------------------------------------------------------


def test_a_checkpoint_is_read_back_as_it_was_written():
    logprobs = (TokenLogprob(-0.5, ((7, -0.5), (9, -2.0))), TokenLogprob(-0.125))
    assert decode_checkpoint(encode_checkpoint("w1", (7, 70_000), logprobs), "w1", 2, 30) == Delta(
        2, 30, (7, 70_000), logprobs
    )
    assert decode_checkpoint(encode_checkpoint("w1", (7,)), "w1", 1, 0) == Delta(1, 0, (7,))


def test_what_another_wrote_or_nobody_can_read_is_left_aside():
    newer = bus_pb2.Checkpoint.FromString(encode_checkpoint("w1", (7,)))
    newer.schema = 9
    for data, owner in ((encode_checkpoint("w1", (7,)), "w2"), (b"\xff", "w1"), (newer.SerializeToString(), "w1")):
        assert decode_checkpoint(data, owner, 1, 0) is None


def test_a_job_that_has_the_id_of_an_earlier_one_has_other_checkpoints_also_at_the_same_worker():
    job = claim(make_record(timings=Timings(created_s=1_800_000_000.001)), "w1", 1_800_000_001.0)
    later = replace(job, timings=replace(job.timings, created_s=1_800_000_000.002))
    left = encode_checkpoint(writer_of(job, "w1"), (7,))
    stored = decode_record(encode_record(job))
    assert decode_checkpoint(left, writer_of(stored, "w1"), 1, 0) == Delta(1, 0, (7,))
    assert decode_checkpoint(left, writer_of(later, "w1"), 1, 0) is None


def test_the_subject_says_whose_and_from_where():
    subject = checkpoint("local", "local-1", 3, 64)
    assert subject == "ckpt.local.local-1.3.64"
    assert checkpoint_parts(subject) == (3, 64)
    assert checkpoints_of("local", "local-1") == "ckpt.local.local-1.>"
