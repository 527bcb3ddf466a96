"""A reader gets each token once and in order, whatever was sent twice, late, never, or by another attempt."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from laneway.admission.streams import COMPACT_PIECES, Offer, Stream, StreamLimits, spliced
from laneway.core.errors import Aborted
from laneway.core.job import Attempt, Contract, JobRecord, Result, Usage, Verdict
from laneway.core.lanes import FinishReason, JobState, Lane, VerdictKind
from laneway.runtime.wire.chunks import merge_pieces, piece_ids
from laneway.v1 import admission_pb2, task_pb2

RECORD = JobRecord(
    job_id="local-x",
    tenant="t",
    region="local",
    model="chat",
    tier="small",
    pool="chat-small",
    contract=Contract(Lane.PRIORITY, 1.0, 0.1, 2e9),
    verdict=Verdict(VerdictKind.ACCEPTED, "LANE_OPEN", "", Lane.PRIORITY),
    prompt_tokens=1,
    max_tokens=10,
)


def piece(first: int, count: int, salt: int = 0) -> bytes:
    ids = [1000 * salt + i for i in range(first, first + count)]
    chunk = task_pb2.Chunk(first_index=first, token_ids=ids, text="".join(f"<{i}>" for i in ids))
    return admission_pb2.GenerateResponse(chunk=chunk).SerializeToString()


def offer(stream: Stream, first: int, count: int, attempt: int = 1, salt: int = 0) -> Offer:
    return stream.offer("w1", attempt, first, count, piece(first, count, salt))


def ids_of(pieces: list[bytes]) -> list[int]:
    return [i for p in pieces for i in piece_ids(p)]


def ended(count: int, *, attempt: int = 1, start: int = 0, salt: int = 0) -> JobRecord:
    ids = tuple(1000 * salt + i for i in range(count))
    text = "".join(f"<{i}>" for i in ids)
    result = Result(text, ids, tuple(len(f"<{i}>") for i in ids), FinishReason.LENGTH, Usage(1, 0, count))
    lineage = tuple(Attempt(a, start if a == attempt else 0, "w", 0.0) for a in range(1, attempt + 1))
    return replace(RECORD, state=JobState.SUCCEEDED, attempt=attempt, lineage=lineage, result=result)


def test_the_offers_of_the_table():
    stream = Stream(RECORD, StreamLimits())
    assert offer(stream, 0, 2) is Offer.TAKEN
    assert offer(stream, 0, 2) is Offer.DROPPED
    assert offer(stream, 3, 1) is Offer.GAP
    assert offer(stream, 2, 1) is Offer.TAKEN
    assert offer(stream, 3, 1, attempt=2) is Offer.TAKEN
    assert offer(stream, 4, 1, attempt=1) is Offer.DROPPED
    assert offer(stream, 1, 2, attempt=2) is Offer.DROPPED, "the same ids again are no splice"
    assert offer(stream, 1, 2, attempt=3, salt=7) is Offer.BROKEN
    assert ids_of(stream.take()) == [0, 1, 2, 3]


def test_a_piece_across_the_next_index_is_asked_for_again():
    stream = Stream(RECORD, StreamLimits())
    offer(stream, 0, 2)
    assert offer(stream, 1, 3) is Offer.GAP
    assert stream.next_index == 2
    assert offer(stream, 2, 2) is Offer.TAKEN


def test_what_lies_before_the_first_token_wanted_is_nobodys_business():
    stream = Stream(RECORD, StreamLimits(), from_index=3)
    assert offer(stream, 0, 2) is Offer.DROPPED
    assert offer(stream, 2, 2) is Offer.GAP
    assert offer(stream, 0, 1, attempt=2, salt=9) is Offer.DROPPED
    assert offer(stream, 3, 1, attempt=2) is Offer.TAKEN


def test_without_the_ids_an_overlap_of_another_attempt_is_a_splice():
    stream = Stream(RECORD, StreamLimits(), from_index=5)
    offer(stream, 5, 2)
    assert stream.delivered_ids() is None
    assert offer(stream, 6, 1, attempt=2) is Offer.BROKEN


async def test_a_slow_reader_fills_only_its_buffer_and_is_sent_the_rest_again():
    size = len(piece(1, 1))
    stream = Stream(RECORD, StreamLimits(unread_bytes=3 * size))
    caught_up: list[Stream] = []
    stream.on_caught_up = caught_up.append
    assert [offer(stream, i, 1) for i in range(5)] == [Offer.TAKEN] * 3 + [Offer.BEHIND] * 2
    assert stream.next_index == 3
    assert stream.unread_bytes <= 3 * size
    assert not caught_up
    assert ids_of(await stream.read()) == [0, 1, 2]
    assert caught_up == [stream]
    assert offer(stream, 3, 1) is Offer.TAKEN


def test_a_piece_larger_than_the_buffer_passes_alone():
    stream = Stream(RECORD, StreamLimits(unread_bytes=10))
    assert offer(stream, 0, 3) is Offer.TAKEN
    assert offer(stream, 3, 3) is Offer.BEHIND
    stream.take()
    assert offer(stream, 3, 3) is Offer.TAKEN


async def test_pieces_come_before_the_error_that_ended_the_stream():
    stream = Stream(RECORD, StreamLimits())
    offer(stream, 0, 1)
    stream.fail(spliced("local-x", 1))
    assert ids_of(await stream.read()) == [0]
    with pytest.raises(Aborted) as error:
        await stream.read()
    assert error.value.facts["next_index"] == "1"


async def test_a_reader_wakes_when_the_message_is_flushed():
    stream = Stream(RECORD, StreamLimits())
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(stream.read())
        await asyncio.sleep(0)
        offer(stream, 0, 1)
        offer(stream, 1, 1)
        await asyncio.sleep(0)
        assert not reading.done()
        stream.flush()
    assert ids_of(reading.result()) == [0, 1]
    stream.end(ended(2), b"")
    assert await stream.read() == []
    assert stream.record.state is JobState.SUCCEEDED


def test_many_pieces_are_kept_as_ids_and_too_many_not_at_all():
    stream = Stream(RECORD, StreamLimits(delivered_ids=600))
    for i in range(COMPACT_PIECES + 10):
        offer(stream, i, 1)
    assert len(stream._kept) == 10
    assert list(stream.delivered_ids() or ()) == list(range(COMPACT_PIECES + 10))
    for i in range(COMPACT_PIECES + 10, 601):
        offer(stream, i, 1)
    assert stream.delivered_ids() is None
    assert stream.next_index == 601


def test_a_result_of_another_run_contradicts_what_was_delivered():
    stream = Stream(RECORD, StreamLimits())
    offer(stream, 0, 3)
    assert not stream.contradicts(ended(5))
    assert not stream.contradicts(ended(5, attempt=2, start=3))
    assert stream.contradicts(ended(5, attempt=2, salt=3))
    late = Stream(RECORD, StreamLimits(), from_index=2)
    offer(late, 2, 2)
    assert not late.contradicts(ended(6, attempt=2, start=4))
    late = Stream(RECORD, StreamLimits(), from_index=2)
    offer(late, 2, 2)
    assert late.contradicts(ended(6, attempt=2, start=3))


def test_merged_pieces_say_the_same():
    merged = admission_pb2.GenerateResponse.FromString(merge_pieces([piece(0, 2), piece(2, 1), piece(3, 4)])).chunk
    assert (merged.first_index, list(merged.token_ids), merged.text) == (0, list(range(7)), "<0><1><2><3><4><5><6>")
    assert merge_pieces([piece(5, 1)]) == piece(5, 1)


cuts = st.lists(st.integers(1, 3), min_size=1, max_size=12)


@settings(deadline=None)
@given(cuts=cuts, data=st.data(), from_index=st.integers(0, 3), tight=st.booleans())
def test_each_index_once_and_in_order(cuts, data, from_index, tight):
    """Pieces are lost, repeated and shuffled within limits; what is missing comes from the record."""
    total = sum(cuts)
    from_index = min(from_index, total)
    borders = [sum(cuts[:i]) for i in range(len(cuts))]
    sends = [(first, count) for first, count in zip(borders, cuts, strict=True) if first + count > from_index]
    noise = data.draw(st.lists(st.sampled_from(sends), max_size=20) if sends else st.just([]))
    order = data.draw(st.permutations([*sends, *noise]))
    stream = Stream(RECORD, StreamLimits(unread_bytes=60 if tight else 100_000), from_index=from_index)
    got: list[int] = []
    for first, count in order:
        offer(stream, first, count)
        if data.draw(st.booleans()):
            got += ids_of(stream.take())
    record = ended(total)
    rest = [piece(stream.next_index, total - stream.next_index)] if stream.next_index < total else [b""]
    stream.end(record, rest[0])
    got += ids_of(stream.take())
    assert got == list(range(from_index, total))


def test_a_reader_who_says_what_he_got_is_never_given_the_rest_of_another_run():
    running = replace(RECORD, state=JobState.RUNNING, attempt=2, owner="w1")

    def stream() -> Stream:
        return Stream(running, StreamLimits(), from_index=3, given=[0, 1, 2])

    same, other = stream(), stream()
    assert offer(same, 0, 3, attempt=2) is Offer.DROPPED
    assert offer(same, 3, 1, attempt=2) is Offer.TAKEN
    assert offer(other, 0, 3, attempt=2, salt=1) is Offer.BROKEN
    assert not stream().contradicts(ended(5, attempt=2))
    assert stream().contradicts(ended(5, attempt=2, salt=1))
    assert stream().contradicts(ended(5, attempt=3, salt=1))
    # No worker goes on from what a reader says.
    assert stream().offered_ids() is None
    assert list(stream().delivered_ids() or ()) == [0, 1, 2]
