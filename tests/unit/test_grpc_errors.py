"""An error leaves as a status with details, and comes back as the same error."""

from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from laneway.core import errors
from laneway.core.errors import Code, LanewayError
from laneway.core.job import JobError
from laneway.core.lanes import Phase
from laneway.runtime import bus_errors
from laneway.runtime.grpc_errors import (
    error_of,
    from_rpc_error,
    from_status,
    job_error_of,
    status_message,
    to_status,
    trailing_metadata,
)

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, LanewayError) and kind is not LanewayError
]

BUS_KINDS = [
    kind
    for kind in vars(bus_errors).values()
    if isinstance(kind, type) and issubclass(kind, bus_errors.BusError) and kind.row.retryable
]


def as_call_error(error: LanewayError) -> grpc.aio.AioRpcError:
    status = to_status(error)
    code = next(c for c in grpc.StatusCode if c.value[0] == status.code)
    metadata = grpc.aio.Metadata(*trailing_metadata(error))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details=status.message)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_kind_comes_back_as_itself(kind: type[LanewayError]):
    sent = kind("why", field="spec.model", retry_after_s=1.25, phase=Phase.QUEUE, job_id="j-1", facts={"a": "b"})
    got = from_rpc_error(as_call_error(sent))
    assert type(got) is kind
    assert (got.message, got.reason, got.field, got.retry_after_s, got.phase, got.job_id, got.facts) == (
        "why", kind.default_reason, "spec.model", 1.25, Phase.QUEUE, "j-1", {"a": "b"},
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_kind_ends_a_job_and_is_raised_again(kind: type[LanewayError]):
    stored = job_error_of(kind("why", field="f", phase=Phase.DECODE))
    raised = error_of(stored, "j-1")
    assert type(raised) is kind
    assert (raised.message, raised.field, raised.phase, raised.job_id) == ("why", "f", Phase.DECODE, "j-1")


@given(
    message=st.text(max_size=2000), reason=st.text(max_size=30), field=st.text(max_size=30),
    retry_after_s=st.none() | st.floats(0.0, 1e6),
    facts=st.dictionaries(st.text(max_size=5), st.text(max_size=900), max_size=30),
)  # fmt: skip
def test_any_error_fits_the_headers(message, reason, field, retry_after_s, facts):
    error = errors.LaneSaturated(message, reason=reason, field=field, retry_after_s=retry_after_s, facts=facts)
    encoded = sum(
        4 * len(value) / 3 if isinstance(value, bytes) else len(value) for _, value in trailing_metadata(error)
    )
    assert encoded + 3 * len(status_message(error).encode()) < 8192
    assert from_status(to_status(error)).row.code is Code.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(("delay_s", "shown"), [(0.0, "0"), (0.0001, "1"), (1.0, "1000"), (1.2345, "1235")])
def test_the_delay_is_rounded_up(delay_s, shown):
    metadata = dict(trailing_metadata(errors.Unavailable(retry_after_s=delay_s)))
    assert metadata["grpc-retry-pushback-ms"] == shown


@pytest.mark.parametrize("kind", BUS_KINDS, ids=lambda kind: kind.__name__)
def test_what_nats_refuses_for_now_says_when_to_ask_again_wherever_it_surfaces(kind: type[bus_errors.BusError]):
    """As to who cancels a job while the stream of records is full."""
    assert kind.row.retryable
    assert kind("why").retry_after_s is not None


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_can_never_succeed_tells_grpc_libraries_not_to_retry(kind: type[LanewayError]):
    error = kind("why")
    shown = dict(trailing_metadata(error)).get("grpc-retry-pushback-ms")
    assert shown == (None if kind.row.retryable else "-1")
    assert from_rpc_error(as_call_error(error)).retry_after_s is None


class TestForeignStatuses:
    @staticmethod
    def failed(code: grpc.StatusCode, details: str = "", *metadata: tuple[str, Any]) -> LanewayError:
        return from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), details))

    @pytest.mark.parametrize("code", [c for c in grpc.StatusCode if c is not grpc.StatusCode.OK])
    def test_a_bare_code_becomes_an_error_of_its_kind(self, code):
        error = self.failed(code, "gone")
        assert error.message == "gone"
        assert error.retry_after_s is None
        assert error.row.code.value == code.value[0] or error.facts["code"] == code.name

    def test_pushback_alone_is_a_delay(self):
        error = self.failed(grpc.StatusCode.UNAVAILABLE, "", ("grpc-retry-pushback-ms", "1500"))
        assert error.retry_after_s == 1.5

    @pytest.mark.parametrize("pushback", ["-1", "soon", ""])
    def test_a_pushback_that_is_no_delay_is_none(self, pushback):
        error = self.failed(grpc.StatusCode.UNAVAILABLE, "", ("grpc-retry-pushback-ms", pushback))
        assert error.retry_after_s is None

    def test_details_that_do_not_parse_leave_the_code(self):
        error = self.failed(grpc.StatusCode.NOT_FOUND, "x", ("grpc-status-details-bin", b"\xff"))
        assert isinstance(error, errors.NotFound)

    def test_another_systems_reason_is_not_taken_for_ours(self):
        status = status_pb2.Status(code=8)
        status.details.add().Pack(error_details_pb2.ErrorInfo(reason="STORAGE_FULL", domain="other"))
        error = self.failed(
            grpc.StatusCode.RESOURCE_EXHAUSTED, "x", ("grpc-status-details-bin", status.SerializeToString())
        )
        assert error.reason == errors.LaneSaturated.default_reason

    def test_a_message_beyond_the_limit_is_no_reason_to_try_again(self):
        error = self.failed(grpc.StatusCode.RESOURCE_EXHAUSTED, "CLIENT: Sent message larger than max (9 vs. 8)")
        assert isinstance(error, errors.InvalidRequest)
        assert not error.row.retryable


def test_a_job_error_with_a_reason_of_its_own_keeps_it():
    raised = error_of(JobError(Code.ABORTED, "WORKER_LOST", "m"))
    assert (type(raised), raised.reason) == (errors.Aborted, "WORKER_LOST")
