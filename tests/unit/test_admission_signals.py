"""What doors tell workers, as messages that NATS takes."""

from __future__ import annotations

from laneway.admission.signals import Attachment, encode_beats
from laneway.workers.messages import DoorBeat, parse_control

LIMIT_BYTES = 1024 * 1024 - 4096


def test_a_beat_that_hands_over_many_long_answers_is_cut_into_messages_that_nats_takes():
    """A worker with 64 runs died, and one worker took them all."""
    ids = tuple(range(140_000, 150_000))
    attachments = [Attachment(f"local-{i}", 2, len(ids), ids, replay=True) for i in range(64)]
    attachments.append(Attachment("local-longest", 2, 65_536, tuple(range(65_536)), replay=True))
    messages = list(encode_beats("door-a", attachments))
    assert max(map(len, messages)) < LIMIT_BYTES
    beats = [parse_control(message) for message in messages]
    assert all(isinstance(beat, DoorBeat) and beat.door == "door-a" for beat in beats)
    named = [a for beat in beats if isinstance(beat, DoorBeat) for a in beat.attachments]
    assert [(a.job_id, a.delivered_ids) for a in named] == [(a.job_id, a.delivered_ids) for a in attachments]


def test_ordinary_beats_are_one_message():
    attachments = [Attachment(f"local-{i}", 1, 10) for i in range(500)]
    assert len(list(encode_beats("door-a", attachments))) == 1
    assert list(encode_beats("door-a", [])) == []
