"""What a worker makes of an engine's tokens: chunks that join to the result, replays, resumes, and bounded buffers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from laneway.admission.streams import Offer as StreamOffer
from laneway.admission.streams import Stream, StreamLimits, spliced
from laneway.core.catalogue import Capabilities
from laneway.core.checkpoints import UNKNOWN, Prefix
from laneway.core.job import Attempt, GenerateTask, Sampling, TokenLogprob, Usage
from laneway.core.lanes import FinishReason, Lane
from laneway.runtime.bus import NotConnected
from laneway.v1 import admission_pb2, bus_pb2, task_pb2
from laneway.workers.emitter import Emitter
from laneway.workers.engine_requests import priority_of, request_of
from laneway.workers.engines.protocol import SequenceStep
from laneway.workers.outlets import Outlets
from laneway.workers.resume import Continue, Offer, Rerun, Unsound, completed, plan_resume
from laneway.workers.transcript import CHUNK_TOKENS_MAX, Transcript
from tests.support.nats import make_record

GREEDY = Sampling(max_tokens=64, temperature=0.0)


def task(sampling: Sampling = GREEDY) -> GenerateTask:
    return GenerateTask((1, 2, 3), sampling)


def transcript(sampling: Sampling = GREEDY) -> Transcript:
    return Transcript(lambda token_id: bytes([token_id]), task(sampling))


def chunk(data: bytes) -> task_pb2.Chunk:
    return admission_pb2.GenerateResponse.FromString(data).chunk


class Doors:
    """An emitter whose messages are kept."""

    def __init__(self, **limits: int) -> None:
        self.sent: list[tuple[str, bus_pb2.TokenBatch]] = []
        self.fail = False
        self.emitter = Emitter(self._post, "w-1", **limits)

    def _post(self, subject: str, payload: bytes) -> None:
        if self.fail:
            raise NotConnected
        self.sent.append((subject, bus_pb2.TokenBatch.FromString(payload)))


# --- transcript --------------------------------------------------------------------------------------


texts = st.text(alphabet="ab é漢👩", min_size=0, max_size=30)
stops = st.lists(st.text(alphabet="ab ", min_size=1, max_size=4), max_size=2)


@given(texts, stops, st.lists(st.integers(1, 4), max_size=40))
def test_chunks_of_any_split_join_to_the_result(text: str, stop: list[str], sizes: list[int]):
    """Also when each token leaves as soon as it may, and with every index in exactly one chunk."""
    out = transcript(Sampling(max_tokens=64, temperature=0.0, stop=tuple(stop)))
    data, at, sent, joined = text.encode(), 0, 0, ""
    for size in [*sizes, len(data)]:
        if out.stopped or at >= len(data):
            break
        out.take(SequenceStep(1, list(data[at : at + size])))
        at += size
        assert out.ready >= len(out) - 1, "at most the last token is held"
        if out.ready > sent:
            joined += chunk(out.response(sent, out.ready)).text
            sent = out.ready
    out.finish()
    if out.ready > sent:
        joined += chunk(out.response(sent, out.ready)).text
    assert out.ready == len(out)
    result = out.result(FinishReason.STOP, Usage())
    assert joined == result.text
    assert sum(result.text_lengths) == len(result.text)
    assert len(result.text_lengths) == len(result.token_ids)
    if not out.stopped:
        assert result.text == text
    else:
        assert not any(s in result.text for s in stop)


@given(texts, st.integers(0, 60))
def test_a_resumed_output_continues_the_text_of_the_first(text: str, cut: int):
    data = text.encode()
    cut = min(cut, len(data))
    whole, resumed = transcript(), transcript()
    for byte in data:
        whole.take(SequenceStep(1, [byte]))
    resumed.replay(Prefix(tuple(data[:cut])))
    for byte in data[cut:]:
        resumed.take(SequenceStep(1, [byte]))
    for out in (whole, resumed):
        out.finish()
    assert whole.result(FinishReason.STOP, Usage()) == resumed.result(FinishReason.STOP, Usage())


def test_the_first_token_leaves_at_once():
    out = transcript()
    out.take(SequenceStep(1, [97]))
    assert out.ready == 1


def test_a_token_whose_text_may_change_waits_for_the_next():
    out = transcript(Sampling(max_tokens=64, stop=("bcd",)))
    out.take(SequenceStep(1, [97]))
    out.take(SequenceStep(1, [98]))
    assert out.ready == 1
    out.take(SequenceStep(1, [99]))
    assert out.ready == 2
    out.finish()
    assert out.ready == 3
    assert chunk(out.response(2, 3)).text == "bc"


def test_an_answer_without_tokens_is_empty():
    out = transcript()
    out.finish()
    result = out.result(FinishReason.STOP, Usage())
    assert (result.text, result.token_ids, out.ready) == ("", (), 0)


def test_log_probabilities_go_with_their_tokens_and_are_unknown_where_no_checkpoint_has_them():
    out = transcript(Sampling(max_tokens=64, logprobs=True, top_logprobs=1))
    out.replay(Prefix((97,)))
    out.take(SequenceStep(1, [98, 99], [-0.5, -0.25], [[(98, -0.5)], [(99, -0.25)]]))
    sent = chunk(out.response(1, 3))
    assert [p.logprob for p in sent.logprobs] == [-0.5, -0.25]
    assert sent.logprobs[1].top[0].token_id == 99
    out.finish()
    assert math.isnan(out.result(FinishReason.STOP, Usage()).logprobs[0].logprob)


def test_log_probabilities_of_a_checkpoint_are_those_of_its_tokens():
    out = transcript(Sampling(max_tokens=64, logprobs=True))
    out.replay(Prefix((97, 98), (TokenLogprob(-0.5, ((97, -0.5),)), UNKNOWN)))
    out.take(SequenceStep(1, [99], [-0.25]))
    assert out.since(1)[0] == [98, 99]
    out.finish()
    result = out.result(FinishReason.STOP, Usage())
    assert result.logprobs[0] == TokenLogprob(-0.5, ((97, -0.5),))
    assert math.isnan(result.logprobs[1].logprob)
    assert result.logprobs[2] == TokenLogprob(-0.25) == out.since(2)[1][0]


# --- outlets and emitter -----------------------------------------------------------------------------


async def test_one_message_for_each_step_and_door():
    doors = Doors()
    outs = [transcript() for _ in range(3)]
    outlets = [Outlets(doors.emitter, f"local-{i}", 0.0) for i in range(3)]
    for i, outlet in enumerate(outlets):
        outlet.open("door-a" if i < 2 else "door-b", 0, 0.0)
    for step in range(2):
        for out, outlet in zip(outs, outlets, strict=True):
            out.take(SequenceStep(1, [97 + step]))
            outlet.send(out, 1)
        doors.emitter.flush()
    assert [(subject, len(batch.deltas)) for subject, batch in doors.sent] == [
        ("tok.door-a", 2),
        ("tok.door-b", 1),
        ("tok.door-a", 2),
        ("tok.door-b", 1),
    ]
    delta = doors.sent[2][1].deltas[1]
    assert (delta.job_id, delta.attempt, delta.first_index, delta.count) == ("local-1", 1, 1, 1)


@pytest.mark.parametrize("tokens", [CHUNK_TOKENS_MAX, CHUNK_TOKENS_MAX + 1])
async def test_a_replay_is_cut_into_chunks(tokens: int):
    doors = Doors()
    out = transcript()
    out.take(SequenceStep(1, [97] * tokens))
    outlets = Outlets(doors.emitter, "local-1", 0.0)
    outlets.open("door-a", 0, 0.0)
    outlets.send(out, 1)
    doors.emitter.flush()
    (batch,) = (batch for _, batch in doors.sent)
    assert [delta.count for delta in batch.deltas] == [CHUNK_TOKENS_MAX, 1][: 1 + (tokens > CHUNK_TOKENS_MAX)]


async def test_a_door_is_sent_each_token_once_unless_it_asks_again():
    doors = Doors()
    out = transcript()
    outlets = Outlets(doors.emitter, "local-1", 0.0)
    outlets.open("door-a", 0, 0.0)
    for i in range(5):
        out.take(SequenceStep(1, [97 + i]))
        outlets.send(out, 1)
        outlets.send(out, 1)
    outlets.open("door-a", 2, 1.0)
    outlets.send(out, 1)
    doors.emitter.flush()
    spans = [(d.first_index, d.count) for _, batch in doors.sent for d in batch.deltas]
    assert spans == [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1), (2, 3)]


async def test_a_door_that_is_ahead_is_sent_only_what_it_lacks():
    doors = Doors()
    out = transcript()
    outlets = Outlets(doors.emitter, "local-1", 0.0)
    outlets.open("door-a", 3, 0.0)
    for i in range(5):
        out.take(SequenceStep(1, [97 + i]))
        outlets.send(out, 2)
    doors.emitter.flush()
    assert [d.first_index for _, batch in doors.sent for d in batch.deltas] == [3, 4]


@pytest.mark.parametrize(("silence_s", "left"), [(3.0, 1), (3.001, 0)])
def test_a_silent_door_is_forgotten(silence_s: float, left: int):
    outlets = Outlets(Doors().emitter, "local-1", 0.0)
    outlets.open("door-a", 0, 10.0)
    outlets.close_silent(10.0 + silence_s, 3.0)
    assert len(outlets) == left


async def test_a_large_step_is_split_into_several_messages():
    doors = Doors(batch_bytes_max=1000)
    for i in range(20):
        doors.emitter.add("door-a", "local-1", 1, i, 1, b"x" * 100)
    doors.emitter.flush()
    indexes = [delta.first_index for _, batch in doors.sent for delta in batch.deltas]
    assert indexes == list(range(20))
    assert len(doors.sent) > 1
    assert all(len(batch.SerializeToString()) < 1500 for _, batch in doors.sent)


async def test_a_message_that_cannot_be_sent_is_counted_and_does_not_stop_the_next():
    doors = Doors()
    doors.fail = True
    doors.emitter.add("door-a", "local-1", 1, 0, 1, b"x")
    doors.emitter.flush()
    doors.fail = False
    doors.emitter.add("door-a", "local-1", 1, 1, 1, b"y")
    doors.emitter.flush()
    assert doors.emitter.dropped == 1
    assert len(doors.sent) == 1


# --- doors that are ahead of a run ----------------------------------------------------------------------


def sent_to(door: Stream, doors: Doors) -> list[StreamOffer]:
    """What the door makes of all that is sent, as laneway.admission.door does."""
    doors.emitter.flush()
    told: list[StreamOffer] = []
    for delta in [delta for _, batch in doors.sent for delta in batch.deltas]:
        told.append(door.offer("w-2", delta.attempt, delta.first_index, delta.count, delta.response))
        if told[-1] is StreamOffer.BROKEN:
            door.fail(spliced("local-1", door.next_index))
    doors.sent.clear()
    return told


def a_door_with(*ids: int) -> Stream:
    door = Stream(make_record(), StreamLimits())
    out = transcript()
    out.take(SequenceStep(1, list(ids)))
    out.finish()
    assert door.offer("w-1", 1, 0, len(ids), out.response(0, len(ids))) is StreamOffer.TAKEN
    door.adopt(2, "w-2")
    return door


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("steps", [1, 3, 9])
def test_a_door_that_is_ahead_of_a_run_compares_what_the_run_computes_anew(early: bool, steps: int):
    """Four tokens are taken over, the door has six: the next two are compared, then it goes on, at any pace."""
    doors, out = Doors(), transcript()
    door = a_door_with(*b"abcdef")
    outlets = Outlets(doors.emitter, "local-1", 0.0)
    if early:  # but not heard as the one whose caller waits
        outlets.open("door-a", 6, 0.0)
    outlets.begin(4)
    if not early:
        outlets.open("door-a", 6, 0.0)
    out.replay(Prefix(tuple(b"abcd")))
    told: list[StreamOffer] = []
    for at in range(0, 9, steps):
        out.take(SequenceStep(1, list(b"efghijklm"[at : at + steps])))
        outlets.send(out, 2)
        told += sent_to(door, doors)
        outlets.open("door-a", door.next_index, 1.0)  # it may always ask again
    assert set(told) == {StreamOffer.DROPPED, StreamOffer.TAKEN}
    assert bytes(list(door.delivered_ids() or ())) == b"abcdefghijklm"


def test_a_door_that_is_ahead_of_another_run_is_not_sent_a_splice():
    doors, out = Doors(), transcript()
    door = a_door_with(*b"abcdef")
    outlets = Outlets(doors.emitter, "local-1", 0.0)
    outlets.begin(4)
    outlets.open("door-a", 6, 0.0)
    out.replay(Prefix(tuple(b"abcd")))
    out.take(SequenceStep(1, list(b"eXgh")))
    outlets.send(out, 2)
    assert sent_to(door, doors)[0] is StreamOffer.BROKEN
    assert door.next_index == 6


def test_a_door_that_is_known_to_agree_is_sent_only_what_it_lacks():
    doors, out = Doors(), transcript()
    outlets = Outlets(doors.emitter, "local-1", 0.0)
    outlets.begin(1)
    out.take(SequenceStep(1, list(b"abcdef")))
    outlets.open("door-a", 5, 0.0, agreed=True)
    outlets.send(out, 2)
    doors.emitter.flush()
    assert [(d.first_index, d.count) for _, batch in doors.sent for d in batch.deltas] == [(5, 1)]


# --- resume ------------------------------------------------------------------------------------------

SEEDED = Sampling(max_tokens=64, temperature=1.0, seed=1)
PENALISED = Sampling(max_tokens=64, temperature=0.0, repetition_penalty=1.1)
SAMPLED = Sampling(max_tokens=64, temperature=1.0)


def goes_on(*ids: int, kept: int = 0) -> Continue:
    return Continue(Prefix(ids), kept)


@pytest.mark.parametrize(
    ("sampling", "delivered", "exact", "plan"),
    [
        (SAMPLED, Offer(0, ()), False, goes_on()),
        (SEEDED, Offer(0, ()), False, goes_on()),
        (SAMPLED, Offer(2, (5, 6)), False, goes_on(5, 6)),
        (SAMPLED, Offer(2, ()), False, Unsound(2)),
        (SAMPLED, Offer(2, (5,)), True, Unsound(2)),
        (SEEDED, Offer(2, (5, 6)), True, Unsound(2)),
        (PENALISED, Offer(2, (5, 6)), False, Unsound(2)),
        (PENALISED, Offer(2, (5, 6)), True, Rerun(2, (5, 6))),
        (GREEDY, Offer(2, ()), True, Rerun(2, ())),
        (GREEDY, Offer(2, (5, 6)), False, goes_on(5, 6)),
    ],
)
def test_an_attempt_goes_on_only_where_that_is_sound(sampling, delivered, exact, plan):
    assert plan_resume(task(sampling), delivered, can=Capabilities(exact=exact)) == plan


@pytest.mark.parametrize(
    ("delivered", "others", "checkpoint", "plan"),
    [
        (Offer(0, ()), [], (5, 6), goes_on(5, 6, kept=2)),
        (Offer(1, (5,)), [], (5, 6), goes_on(5, 6, kept=2)),
        (Offer(3, (5, 6, 7)), [], (5, 6), goes_on(5, 6, 7, kept=2)),
        (Offer(2, (5, 6)), [], (5, 6), goes_on(5, 6, kept=2)),
        (Offer(2, (5, 9)), [], (5, 6, 7), goes_on(5, 9)),  # what was delivered is the authority
        (Offer(2, ()), [], (5, 6, 7), Unsound(2)),  # nobody can say whether the checkpoint is what was delivered
        (Offer(0, ()), [Offer(4, (5, 6, 7, 8))], (5, 6), goes_on(5, 6, 7, 8, kept=2)),
        (Offer(1, (5,)), [Offer(2, (5, 6)), Offer(3, (5, 6, 7))], (), goes_on(5, 6, 7)),
        (Offer(1, (5,)), [Offer(3, (9, 9, 9))], (), goes_on(5)),  # of another run
        (Offer(0, ()), [Offer(4, ())], (5, 6), goes_on(5, 6, kept=2)),  # who watches from the middle decides nothing
    ],
)
def test_the_longest_sound_prefix_wins(delivered, others, checkpoint, plan):
    assert plan_resume(task(SAMPLED), delivered, others, Prefix(checkpoint), can=Capabilities()) == plan


@pytest.mark.parametrize("sampling", [SEEDED, PENALISED])
def test_a_checkpoint_is_of_no_use_where_ids_do_not_carry_the_sampling_state(sampling):
    assert plan_resume(task(sampling), checkpoint=Prefix((5, 6)), can=Capabilities()) == goes_on()


@pytest.mark.parametrize("sampling", [SEEDED, PENALISED, Sampling(max_tokens=64, temperature=0.0, min_tokens=8)])
def test_a_run_goes_on_from_ids_where_its_engine_finds_the_sampling_state_in_them(sampling):
    can = Capabilities(resumable_sampling=True)
    assert plan_resume(task(sampling), Offer(2, (5, 6)), can=can) == goes_on(5, 6)
    assert plan_resume(task(sampling), checkpoint=Prefix((5, 6)), can=can) == goes_on(5, 6, kept=2)


def test_several_answers_never_go_on_from_ids():
    can = Capabilities(resumable_sampling=True, exact=True)
    assert plan_resume(task(replace(SAMPLED, n=2)), Offer(2, (5, 6)), can=can) == Unsound(2)


@pytest.mark.parametrize(("can", "plan"), [({}, Unsound(2)), ({"exact": True}, Rerun(2, (5, 6)))])
def test_an_engine_that_is_given_text_does_not_go_on_from_ids(can, plan):
    assert plan_resume(task(GREEDY), Offer(2, (5, 6)), can=Capabilities(token_ids_in=False, **can)) == plan


def test_tokens_that_an_earlier_attempt_gave_count_for_the_least_length():
    sampling = Sampling(max_tokens=64, min_tokens=3)
    least = [request_of(1, task(sampling), Lane.BATCH, ids).min_tokens for ids in ((), (5, 6), (5, 6, 7, 8))]
    assert least == [3, 1, 0]


FIRST, NOT_BEGUN = Attempt(1, 0, "w1", 0.0, begun=True), Attempt(2, 0, "w2", 0.0)
SECOND = Attempt(2, 1, "w2", 0.0, begun=True)


@pytest.mark.parametrize(
    ("delivered", "checkpoint", "lineage", "known"),
    [
        (Offer(2, ()), (5, 6, 7), [FIRST, NOT_BEGUN], (5, 6)),  # more tokens than a door keeps, of one run
        (Offer(2, (5,)), (5, 6, 7), [FIRST, NOT_BEGUN], (5, 6)),
        (Offer(2, (9,)), (5, 6, 7), [FIRST, NOT_BEGUN], (9,)),
        (Offer(3, ()), (5, 6), [FIRST, NOT_BEGUN], ()),
        (Offer(2, ()), (5, 6, 7), [FIRST, SECOND, NOT_BEGUN], ()),  # who knows of which run the door's are
        (
            Offer(2, ()),
            (5, 6, 7),
            [FIRST, NOT_BEGUN, NOT_BEGUN],
            (),
        ),  # the second may be of a release that does not say
        (Offer(2, (8, 9)), (5, 6, 7), [FIRST, NOT_BEGUN], (8, 9)),
    ],
)
def test_a_checkpoint_says_what_a_door_has_forgotten_if_there_was_one_run(delivered, checkpoint, lineage, known):
    assert completed(delivered, Prefix(checkpoint), lineage) == Offer(delivered.next_index, known)


def test_log_probabilities_of_a_checkpoint_stay_known_behind_which_a_door_is_ahead():
    known = TokenLogprob(-0.5)
    plan = plan_resume(task(), Offer(2, (5, 6)), checkpoint=Prefix((5,), (known,)), can=Capabilities())
    assert isinstance(plan, Continue)
    assert plan.prefix.logprobs[0] == known
    assert math.isnan(plan.prefix.logprobs[1].logprob)


class TestPriority:
    """For engines that order inside."""

    def test_the_lane_goes_before_any_slack(self):
        urgent = [priority_of(lane, 0.0) for lane in (Lane.BATCH, Lane.DEFERRABLE, Lane.PRIORITY)]
        easy = [priority_of(lane, math.inf) for lane in (Lane.BATCH, Lane.DEFERRABLE, Lane.PRIORITY)]
        assert urgent == [0.25, 0.625, 1.0]
        assert easy == [0.0, 0.375, 0.75]

    def test_less_slack_is_never_less_urgent_and_about_the_same_is_the_same(self):
        slacks = [-5.0, 0.0, 1.0, 10.0, 30.0, 60.0, 600.0, 86_400.0]
        given = [priority_of(Lane.PRIORITY, slack_s) for slack_s in slacks]
        assert given == sorted(given, reverse=True)
        assert len(set(given)) >= 5
        assert priority_of(Lane.PRIORITY, 30.0) == priority_of(Lane.PRIORITY, 30.2)
