"""Characters of several tokens reach a caller whole, piece by piece and in the result, and both say the same."""

from laneway.core.job import Sampling
from laneway.core.lanes import FinishReason, JobState
from laneway.runtime.local_nats import LocalNats
from tests.support.nats import eventually
from tests.support.worker import ByteDoor, ids_of, yard

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
TOKENS = 80  # of a byte or two each


async def test_pieces_and_result_have_the_same_whole_characters(nats_server: LocalNats):
    async with yard(nats_server, workers=1, engine__alphabet="unicode") as place, ByteDoor(place.bus) as door:
        stored = [await place.submit(caller_at=door, prompt=f"{n}".encode(), max_tokens=TOKENS) for n in range(8)]
        records = await place.ended(*ids_of(stored))
        await eventually(lambda: all(len(door.ids(job_id)) == TOKENS for job_id in ids_of(stored)))
        for record in records:
            assert record.state is JobState.SUCCEEDED
            assert record.result is not None
            text = record.result.text
            assert len(text.encode()) > len(text), "some are wide"
            assert REPLACEMENT not in text[:-1], "only the last may be cut off, by the end of the answer"
            assert door.text(record.job_id) == text


async def test_a_wide_stop_string_never_shows_in_pieces_or_result(nats_server: LocalNats):
    async with yard(nats_server, workers=1, engine__alphabet="unicode") as place, ByteDoor(place.bus) as door:
        (whole,) = await place.ended((await place.submit(max_tokens=TOKENS)).record.job_id)
        assert whole.result is not None
        text = whole.result.text
        at = next(i for i, character in enumerate(text) if i > 4 and len(character.encode()) > 2)
        stop = text[at : at + 3]
        sampling = Sampling(max_tokens=TOKENS, temperature=0.0, stop=(stop,))
        stored = await place.submit(sampling=sampling, caller_at=door)
        (record,) = await place.ended(stored.record.job_id)
        assert record.result is not None
        assert record.result.finish_reason is FinishReason.STOP_STRING
        assert record.result.text == text[: text.index(stop)]
        used = len(record.result.token_ids)
        await eventually(lambda: len(door.ids(record.job_id)) == used)
        assert door.text(record.job_id) == record.result.text
