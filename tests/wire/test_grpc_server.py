"""The gRPC edge over real connections: what a caller gets for good calls, bad bytes, our errors and our bugs."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import msgspec.structs
import pytest
from google.protobuf import descriptor_pool
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from laneway.core.errors import ConfigError, DeadlineExceeded, InvalidRequest, LaneSaturated, LanewayError, NotFound
from laneway.core.lanes import Phase
from laneway.runtime.auth import current_caller, require_operator
from laneway.runtime.grpc_errors import from_rpc_error
from laneway.runtime.grpc_options import channel_options
from laneway.runtime.grpc_server import GrpcServer
from laneway.runtime.settings import AdmissionSettings, GrpcSettings, Settings
from laneway.v1 import admission_pb2, admission_pb2_grpc, task_pb2

pytestmark = pytest.mark.wire

NAME = "laneway.v1.AdmissionService"


class Door(admission_pb2_grpc.AdmissionServiceServicer):
    """Does as the job id or the model says."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.running = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.cleaned: list[str] = []

    async def GetJob(self, request, context):
        match request.job_id:
            case "unknown":
                raise NotFound
            case "bug":
                raise KeyError("/srv/secret/path")
            case "full":
                raise LaneSaturated("the lane is full", retry_after_s=7.0, facts={"lane": "priority", "eta_ms": "9000"})
            case "quota":
                raise LaneSaturated("too much", reason="QUOTA_EXCEEDED", facts={"quota": "tokens_per_day"})
            case "late":
                raise DeadlineExceeded(phase=Phase.PREFILL, job_id="local-1")
            case "field":
                raise InvalidRequest("not good", field="spec.model")
            case "group":
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._refuse())
            case "long":
                raise NotFound("x" * 20_000)
            case "wait":
                self.running.set()
                try:
                    await self.release.wait()
                except asyncio.CancelledError:
                    self.cancelled.set()
                    raise
                finally:
                    self.cleaned.append("wait")
            case _:
                pass
        caller = current_caller()
        job = admission_pb2.Job(job_id=request.job_id, tenant=caller.tenant, model=caller.role)
        return admission_pb2.GetJobResponse(job=job)

    async def _refuse(self) -> None:
        raise NotFound("from a task")

    async def Submit(self, request, context):
        return admission_pb2.SubmitResponse(job_id=request.idempotency_key)

    async def CancelJob(self, request, context):
        require_operator()
        return admission_pb2.CancelJobResponse()

    async def ListJobs(self, request, context):
        raise NotImplementedError

    async def SubmitMany(self, requests, context):  # type: ignore[override]
        raise NotImplementedError

    async def Quote(self, request, context) -> Any:
        return b"\x10\x07"  # already serialised: prompt_tokens = 7

    async def ListDeadLetters(self, request, context):
        raise NotImplementedError

    async def RequeueDeadLetter(self, request, context):
        raise NotImplementedError

    async def PurgeDeadLetters(self, request, context):
        raise NotImplementedError

    async def Generate(self, request, context):  # type: ignore[override]  # aio's other style of streaming handlers
        """A coroutine that writes bytes, as the door does."""
        ready = admission_pb2.GenerateResponse(chunk=task_pb2.Chunk(text="é", first_index=1)).SerializeToString()
        await context.write(admission_pb2.GenerateResponse(accepted=admission_pb2.Accepted(job_id="j")))
        await context.write(ready)
        if request.idempotency_key == "fail":
            raise LanewayError("broke", reason="ENGINE_FAILED")
        if request.idempotency_key == "silent":
            self.running.set()
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        await context.write(admission_pb2.GenerateResponse(finished=admission_pb2.Finished(job_id="j")))

    async def Watch(self, request, context) -> AsyncIterator[Any]:
        """An async generator that yields both."""
        yield admission_pb2.WatchResponse(accepted=admission_pb2.Accepted(job_id=request.job_id))
        yield admission_pb2.WatchResponse(chunk=task_pb2.Chunk(text="b")).SerializeToString()
        if request.job_id == "fail":
            raise NotFound


@contextlib.asynccontextmanager
async def serving(settings: Settings | None = None, listen: str = "127.0.0.1:0") -> AsyncIterator[tuple]:
    door = Door()
    server = GrpcServer(settings or Settings())
    server.add(NAME, lambda s: admission_pb2_grpc.add_AdmissionServiceServicer_to_server(door, s))
    address = await server.start(listen)
    try:
        async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
            yield door, server, channel, admission_pb2_grpc.AdmissionServiceStub(channel)
    finally:
        await server.drain(0.0)


async def failure(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def details_of(error: Any) -> dict[str, Any]:
    metadata = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(metadata["grpc-status-details-bin"])
    assert status.code == error.code().value[0]
    found: dict[str, Any] = {"pushback": metadata.get("grpc-retry-pushback-ms")}
    for detail in status.details:
        kind = detail.type_url.rpartition(".")[2]
        message = getattr(error_details_pb2, kind)()
        assert detail.Unpack(message)
        found[kind] = message
    return found


def health_stub(channel: grpc.aio.Channel) -> Any:
    return health_pb2_grpc.HealthStub(channel)  # its typing stub lacks the methods


class TestCalls:
    async def test_a_unary_call_is_answered_as_the_default_tenant(self):
        async with serving() as (_, _, _, stub):
            job = (await stub.GetJob(admission_pb2.GetJobRequest(job_id="a"))).job
            assert (job.job_id, job.tenant, job.model) == ("a", "default", "operator")

    async def test_a_unary_handler_may_return_bytes(self):
        async with serving() as (_, _, _, stub):
            assert (await stub.Quote(admission_pb2.QuoteRequest())).prompt_tokens == 7

    @pytest.mark.parametrize("method", ["Generate", "Watch"])
    async def test_a_stream_mixes_messages_and_bytes(self, method):
        async with serving() as (_, _, _, stub):
            request = admission_pb2.GenerateRequest() if method == "Generate" else admission_pb2.WatchRequest()
            events = [r.WhichOneof("event") async for r in getattr(stub, method)(request)]
            assert events[:2] == ["accepted", "chunk"]

    async def test_ipv6_loopback_may_call(self):
        async with serving(listen="[::1]:0") as (_, _, _, stub):
            assert (await stub.GetJob(admission_pb2.GetJobRequest(job_id="a"))).job.tenant == "default"


class TestBadBytes:
    @pytest.mark.parametrize("method", ["GetJob", "Submit"])
    @pytest.mark.parametrize("body", [b"\xff\xff\xff", b"\x0a\x05ab", b"\x0a\x02\xc3\x28"])
    async def test_bytes_that_do_not_parse_are_an_invalid_argument(self, method, body):
        async with serving() as (_, _, channel, stub):
            call = channel.unary_unary(f"/{NAME}/{method}")
            error = await failure(call(body))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert method in error.details()
            assert details_of(error)["ErrorInfo"].reason == "MALFORMED_REQUEST"
            assert (await stub.GetJob(admission_pb2.GetJobRequest(job_id="a"))).job.job_id == "a"

    async def test_a_stream_call_refuses_them_too(self):
        async with serving() as (_, _, channel, _):
            error = await failure(channel.unary_stream(f"/{NAME}/Generate")(b"\xff").read())
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT

    async def test_an_unknown_method_is_unimplemented(self):
        async with serving() as (_, _, channel, _):
            error = await failure(channel.unary_unary(f"/{NAME}/Nothing")(b""))
            assert error.code() is grpc.StatusCode.UNIMPLEMENTED


class TestStatuses:
    async def test_a_refusal_says_when_to_try_again(self):
        async with serving() as (_, _, _, stub):
            error = await failure(stub.GetJob(admission_pb2.GetJobRequest(job_id="full")))
            details = details_of(error)
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert details["RetryInfo"].retry_delay.ToMilliseconds() == 7000
            assert details["pushback"] == "7000"
            info = details["ErrorInfo"]
            assert (info.reason, info.domain, info.metadata["eta_ms"]) == ("LANE_SATURATED", "laneway", "9000")

    async def test_a_deadline_names_the_phase_and_the_job(self):
        async with serving() as (_, _, _, stub):
            info = details_of(await failure(stub.GetJob(admission_pb2.GetJobRequest(job_id="late"))))["ErrorInfo"]
            assert info.metadata == {"phase": "PREFILL", "job_id": "local-1"}

    async def test_a_bad_field_is_named(self):
        async with serving() as (_, _, _, stub):
            details = details_of(await failure(stub.GetJob(admission_pb2.GetJobRequest(job_id="field"))))
            assert details["BadRequest"].field_violations[0].field == "spec.model"
            assert details["pushback"] == "-1"  # not at all
            assert "RetryInfo" not in details

    async def test_a_quota_is_named(self):
        async with serving() as (_, _, _, stub):
            details = details_of(await failure(stub.GetJob(admission_pb2.GetJobRequest(job_id="quota"))))
            assert details["QuotaFailure"].violations[0].subject == "tokens_per_day"

    async def test_an_error_inside_a_task_group_keeps_its_status(self):
        async with serving() as (_, _, _, stub):
            error = await failure(stub.GetJob(admission_pb2.GetJobRequest(job_id="group")))
            assert (error.code(), error.details()) == (grpc.StatusCode.NOT_FOUND, "from a task")

    async def test_a_bug_gives_a_reference_and_no_internals(self):
        async with serving() as (_, _, _, stub):
            error = await failure(stub.GetJob(admission_pb2.GetJobRequest(job_id="bug")))
            assert error.code() is grpc.StatusCode.INTERNAL
            assert re.fullmatch(r"internal error; reference [0-9a-f]{8}", error.details())
            assert "secret" not in repr(error)

    async def test_a_long_message_still_arrives(self):
        async with serving() as (_, _, _, stub):
            error = await failure(stub.GetJob(admission_pb2.GetJobRequest(job_id="long")))
            assert error.code() is grpc.StatusCode.NOT_FOUND
            assert error.details() == "x" * 509 + "…"

    async def test_a_stream_that_fails_keeps_what_it_sent(self):
        async with serving() as (_, _, _, stub):
            call = stub.Generate(admission_pb2.GenerateRequest(idempotency_key="fail"))
            assert [(await call.read()).WhichOneof("event") for _ in range(2)] == ["accepted", "chunk"]
            assert from_rpc_error(await failure(call.read())).reason == "ENGINE_FAILED"

    async def test_the_client_gets_the_same_error_back(self):
        async with serving() as (_, _, _, stub):
            full = from_rpc_error(await failure(stub.GetJob(admission_pb2.GetJobRequest(job_id="full"))))
            assert isinstance(full, LaneSaturated)
            assert (full.retry_after_s, full.facts) == (7.0, {"lane": "priority", "eta_ms": "9000"})
            late = from_rpc_error(await failure(stub.GetJob(admission_pb2.GetJobRequest(job_id="late"))))
            assert isinstance(late, DeadlineExceeded)
            assert (late.phase, late.job_id) == (Phase.PREFILL, "local-1")


class TestLimits:
    async def test_a_request_beyond_the_limit_is_refused_and_the_connection_lives(self):
        limit = 4096
        async with serving(Settings(grpc=GrpcSettings(request_bytes_max=limit))) as (_, _, channel, stub):
            call = channel.unary_unary(f"/{NAME}/Submit")
            at_limit = b"\x12" + b"\xfd\x1f" + b"k" * (limit - 3)
            assert len(at_limit) == limit
            await call(at_limit)
            error = await failure(call(b"\x12\xfe\x1f" + b"k" * (limit - 2)))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert isinstance(from_rpc_error(error), InvalidRequest)
            assert (await stub.GetJob(admission_pb2.GetJobRequest(job_id="a"))).job.job_id == "a"

    async def test_calls_beyond_the_limit_are_refused_with_a_delay(self):
        async with serving(Settings(grpc=GrpcSettings(calls_max=1))) as (door, _, _, stub):
            first = asyncio.ensure_future(stub.GetJob(admission_pb2.GetJobRequest(job_id="wait")))
            await door.running.wait()
            error = from_rpc_error(await failure(stub.GetJob(admission_pb2.GetJobRequest(job_id="a"))))
            assert (error.reason, error.retry_after_s) == ("TOO_MANY_CALLS", 1.0)
            door.release.set()
            await first

    async def test_two_servers_cannot_share_a_port(self):
        async with serving() as (_, server, _, _):
            other = GrpcServer(Settings())
            with pytest.raises(ConfigError, match="cannot listen"):
                await other.start(server.address)
            await other.drain(0.0)


class TestLiveCalls:
    async def test_a_cancelled_call_ends_its_handler_and_leaves_the_count(self):
        async with serving() as (door, server, _, stub):
            call = stub.Generate(admission_pb2.GenerateRequest(idempotency_key="silent"))
            await call.read()
            await door.running.wait()
            assert server.live_calls() == 1
            call.cancel()
            await asyncio.wait_for(door.cancelled.wait(), 5)
            assert await server._edge.wait_quiet(5)
            assert server.live_calls() == 0

    async def test_failed_and_refused_calls_leave_the_count(self):
        async with serving() as (_, server, channel, stub):
            for job_id in ("unknown", "bug", "full", "group"):
                await failure(stub.GetJob(admission_pb2.GetJobRequest(job_id=job_id)))
            await failure(channel.unary_unary(f"/{NAME}/GetJob")(b"\xff"))
            assert server.live_calls() == 0


class TestDrain:
    async def test_live_calls_finish_and_new_ones_are_told_to_go_elsewhere(self):
        async with serving() as (door, server, _, stub):
            live = asyncio.ensure_future(stub.GetJob(admission_pb2.GetJobRequest(job_id="wait")))
            await door.running.wait()
            draining = asyncio.ensure_future(server.drain(10.0))
            await asyncio.sleep(0)
            error = from_rpc_error(await failure(stub.GetJob(admission_pb2.GetJobRequest(job_id="a"))))
            assert (error.reason, error.retry_after_s) == ("DRAINING", 1.0)
            door.release.set()
            assert (await live).job.job_id == "wait"
            assert await draining

    async def test_the_wait_is_bounded_and_the_handlers_clean_up_has_run(self):
        async with serving() as (door, server, _, stub):
            live = asyncio.ensure_future(stub.GetJob(admission_pb2.GetJobRequest(job_id="wait")))
            await door.running.wait()
            assert not await server.drain(0.05)
            assert door.cleaned == ["wait"]
            assert (await failure(live)).code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)

    async def test_a_watcher_of_health_does_not_hold_it_up(self):
        async with serving() as (_, server, channel, _):
            watch = health_stub(channel).Watch(health_pb2.HealthCheckRequest(service=NAME))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            assert await server.drain(5.0)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            watch.cancel()


class TestHealthAndReflection:
    async def test_health_names_each_service(self):
        async with serving() as (_, server, channel, _):
            stub = health_stub(channel)
            for name in ("", NAME):
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            await server.set_serving(False, [NAME])
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=NAME))
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
            error = await failure(stub.Check(health_pb2.HealthCheckRequest(service="nothing")))
            assert error.code() is grpc.StatusCode.NOT_FOUND

    async def test_reflection_lists_our_service_and_its_descriptor(self):
        async with serving() as (_, _, channel, _):
            requests = [
                reflection_pb2.ServerReflectionRequest(list_services=""),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol=NAME),
            ]
            reflect: Any = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
            call = reflect(iter(requests))
            listed, found = [answer async for answer in call]
            assert NAME in {s.name for s in listed.list_services_response.service}
            files = found.file_descriptor_response.file_descriptor_proto
            assert descriptor_pool.Default().FindServiceByName(NAME).file.serialized_pb in list(files)


class PingingPeer:
    """As much of an HTTP/2 client as it takes to ping: gRPC's own leaves a second between its pings."""

    GOAWAY, PING = 7, 6

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + self.frame(4, 0, b""))

    @staticmethod
    def frame(kind: int, flags: int, payload: bytes) -> bytes:
        return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + bytes(4) + payload

    async def ping(self) -> bool:
        """Pings and waits for the answer; False if the server says goodbye instead."""
        self.writer.write(self.frame(self.PING, 0, b"laneway!"))
        while True:
            head = await self.reader.readexactly(9)
            payload = await self.reader.readexactly(int.from_bytes(head[:3], "big"))
            if head[3] == self.GOAWAY:
                assert b"too_many_pings" in payload
                return False
            if head[3] == self.PING and head[4] & 1:
                return True


class TestKeepalive:
    """A server with gRPC's own defaults ends a connection that pings more often than every 5 minutes."""

    @staticmethod
    async def pings(settings: GrpcSettings, gap_s: float, count: int) -> list[bool]:
        async with serving(Settings(grpc=settings)) as (_, server, _, _):
            host, _, port = server.address.rpartition(":")
            peer = PingingPeer(*await asyncio.open_connection(host, int(port)))
            answers: list[bool] = []
            for _ in range(count):
                answers.append(await peer.ping())
                if not answers[-1]:
                    break
                await asyncio.sleep(gap_s)  # the gap that the server measures
            peer.writer.close()
            return answers

    async def test_pings_at_the_permitted_gap_are_answered(self):
        assert await self.pings(GrpcSettings(keepalive_permit_s=0.02), 0.03, 10) == [True] * 10

    async def test_pings_below_it_end_the_connection(self):
        assert not (await self.pings(GrpcSettings(keepalive_permit_s=5.0), 0.0, 10))[-1]

    @pytest.mark.slow
    async def test_a_silent_stream_outlives_its_clients_pings(self):
        settings = GrpcSettings(keepalive_s=0.5, keepalive_permit_s=0.5)
        async with (
            serving(Settings(grpc=settings)) as (door, server, _, _),
            grpc.aio.insecure_channel(server.address, options=channel_options(settings)) as pinging,
        ):
            stub: Any = admission_pb2_grpc.AdmissionServiceStub(pinging)
            call = stub.Generate(admission_pb2.GenerateRequest(idempotency_key="silent"))
            await call.read()
            await call.read()
            await asyncio.sleep(6.0)  # gRPC's least gap is 1 s, and the server's defaults cut off at the fourth ping
            door.release.set()
            assert (await call.read()).WhichOneof("event") == "finished"


def test_the_clients_pings_are_ones_the_server_permits():
    settings = GrpcSettings()
    assert settings.keepalive_s >= settings.keepalive_permit_s
    assert settings.keepalive_permit_s <= 10.0  # a foreign client with a keepalive of 10 s is served


async def test_other_hosts_are_refused_at_start_without_credentials():
    server = GrpcServer(Settings())
    with pytest.raises(ConfigError, match="insecure_remote"):
        await server.start("0.0.0.0:0")
    await server.drain(0.0)
    open_door = msgspec.structs.replace(Settings(), admission=AdmissionSettings(insecure_remote=True))
    async with serving(open_door, "0.0.0.0:0"):
        pass
