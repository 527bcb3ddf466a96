"""What a stream measures, and which keys attempts carry."""

from laneway.client.admission import _Keys
from laneway.client.stream import Meter
from laneway.core.clock import ManualClock
from laneway.core.errors import LaneSaturated, OutcomeUnknown, Unavailable
from laneway.v1 import admission_pb2


def test_times_are_those_of_the_caller_and_include_waits_and_gaps():
    clock = ManualClock()
    meter = Meter(clock)
    clock.advance(7.5)  # refused, waited, accepted
    meter.chunk(1)
    clock.advance(0.1)
    meter.chunk(2)
    clock.advance(2.0)  # resumed elsewhere
    meter.chunk(1)
    clock.advance(0.5)
    end = meter.finished(admission_pb2.Finished())
    assert end.ttft_s == 7.5
    assert end.tpot_s is not None
    assert abs(end.tpot_s - 2.1 / 3) < 1e-9
    assert abs(end.stall_s - 2.0) < 1e-9
    assert abs(end.total_s - 10.1) < 1e-9


def test_what_did_not_happen_has_no_time():
    clock = ManualClock()
    meter = Meter(clock)
    clock.advance(1.0)
    none = meter.finished(admission_pb2.Finished())
    assert (none.ttft_s, none.tpot_s, none.stall_s) == (None, None, 0.0)
    meter.chunk(1)
    one = meter.finished(admission_pb2.Finished())
    assert (one.ttft_s, one.tpot_s, one.stall_s) == (1.0, None, 0.0)


def counted() -> _Keys:
    numbers = iter("abcdef")
    return _Keys(None, lambda: next(numbers))


def test_our_own_key_lives_until_it_was_definitely_refused():
    keys = counted()
    assert keys.safe
    assert keys.after(None) == "a"
    assert keys.after(OutcomeUnknown(retry_after_s=1.0)) == "a"
    assert keys.after(Unavailable()) == "a"  # the connection broke: the request may have arrived
    assert keys.after(LaneSaturated(retry_after_s=1.0)) == "b"
    assert keys.after(OutcomeUnknown(retry_after_s=1.0)) == "b"


def test_a_callers_key_is_never_replaced_and_an_empty_one_is_none():
    keys = _Keys("mine")
    assert keys.after(LaneSaturated(retry_after_s=1.0)) == "mine"
    assert not _Keys("").safe
