"""What the reply subject of a delivery says, in both of its versions."""

import pytest

from laneway.runtime.headers import AckSubject, ack_sequence

V1 = "$JS.ACK.BATCH_eu.batch_small_any.2.17.9.1700000000000000000.5"
V2 = "$JS.ACK._.hash.BATCH_eu.batch_small_any.2.17.9.1700000000000000000.5"


@pytest.mark.parametrize("reply", [V1, V2, V2.replace("_", "hub", 1), f"{V2}.random"])
def test_both_versions_say_the_same(reply: str):
    assert AckSubject.parse(reply) == AckSubject(
        deliveries=2, stream_sequence=17, consumer_sequence=9, stored_s=1_700_000_000.0, pending=5
    )
    assert ack_sequence(reply) == 17


@pytest.mark.parametrize("reply", ["", "_INBOX.abc.1", "$JS.FC.a.b.c.d.e.f.g", "$JS.ACK.a.b.1.2.3"])
def test_other_subjects_are_refused(reply: str):
    with pytest.raises(ValueError, match="not the reply subject"):
        AckSubject.parse(reply)
