"""Credentials over real connections: a caller is what its token says, and nothing else it sends."""

import contextlib
import hashlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from laneway.core.errors import LanewayError, PermissionDenied, Unauthenticated
from laneway.core.lanes import LANES, Lane
from laneway.runtime.auth import current_caller, require_lane, require_operator
from laneway.runtime.grpc_errors import from_rpc_error
from laneway.runtime.grpc_options import channel_options
from laneway.runtime.grpc_server import GrpcServer
from laneway.runtime.settings import AdmissionSettings, Settings
from laneway.v1 import admission_pb2, admission_pb2_grpc

pytestmark = pytest.mark.wire

NAME = "laneway.v1.AdmissionService"


class Door(admission_pb2_grpc.AdmissionServiceServicer):
    async def GetJob(self, request, context):
        caller = current_caller()
        return admission_pb2.GetJobResponse(job=admission_pb2.Job(tenant=caller.tenant, model=caller.role))

    async def CancelJob(self, request, context):
        require_operator()
        return admission_pb2.CancelJobResponse()

    async def Submit(self, request, context):
        for lane in LANES:
            if request.spec.contract.lane == list(LANES).index(lane) + 1:
                require_lane(current_caller(), lane)
        return admission_pb2.SubmitResponse()

    async def Generate(self, request, context):  # type: ignore[override]  # aio's other style of streaming handlers
        await context.write(admission_pb2.GenerateResponse(accepted=admission_pb2.Accepted(job_id="j")))

    async def Watch(self, request, context):
        yield admission_pb2.WatchResponse()

    async def ListJobs(self, request, context):
        raise NotImplementedError

    async def SubmitMany(self, requests, context):  # type: ignore[override]
        raise NotImplementedError

    async def Quote(self, request, context):
        raise NotImplementedError

    async def ListDeadLetters(self, request, context):
        raise NotImplementedError

    async def RequeueDeadLetter(self, request, context):
        raise NotImplementedError

    async def PurgeDeadLetters(self, request, context):
        raise NotImplementedError


@contextlib.asynccontextmanager
async def door(tmp_path) -> AsyncIterator[Any]:
    path = tmp_path / "tokens.toml"
    entries = [("acme", "tenant", "acme-token", '["batch"]'), ("ops", "operator", "ops-token", "[]")]
    path.write_text(
        "".join(
            f'[[token]]\ntenant = "{tenant}"\nrole = "{role}"\nlanes = {lanes}\n'
            f'sha256 = "{hashlib.sha256(token.encode()).hexdigest()}"\n'
            for tenant, role, token, lanes in entries
        )
    )
    server = GrpcServer(Settings(admission=AdmissionSettings(tokens_file=str(path))))
    server.add(NAME, lambda s: admission_pb2_grpc.add_AdmissionServiceServicer_to_server(Door(), s))
    address = await server.start("127.0.0.1:0")
    try:
        async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
            yield channel
    finally:
        await server.drain(0.0)


def with_token(token: str, *more: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"), *more)


async def failure(call: Any) -> LanewayError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def test_a_call_is_its_tokens_tenant_whatever_else_it_says(tmp_path):
    async with door(tmp_path) as channel:
        stub: Any = admission_pb2_grpc.AdmissionServiceStub(channel)
        metadata = with_token("acme-token", ("x-tenant-id", "ops"), ("x-role", "operator"))
        job = (await stub.GetJob(admission_pb2.GetJobRequest(), metadata=metadata)).job
        assert (job.tenant, job.model) == ("acme", "tenant")


@pytest.mark.parametrize("metadata", [(), with_token("nope"), (("authorization", "ops-token"),)])
async def test_a_call_without_a_known_token_is_refused(tmp_path, metadata):
    async with door(tmp_path) as channel:
        stub: Any = admission_pb2_grpc.AdmissionServiceStub(channel)
        assert isinstance(await failure(stub.GetJob(admission_pb2.GetJobRequest(), metadata=metadata)), Unauthenticated)
        stream = stub.Generate(admission_pb2.GenerateRequest(), metadata=metadata)
        assert isinstance(await failure(stream.read()), Unauthenticated)


async def test_a_refused_caller_learns_nothing_of_its_request(tmp_path):
    """The credential is judged before the body is."""
    async with door(tmp_path) as channel:
        error = await failure(channel.unary_unary(f"/{NAME}/GetJob")(b"\xff"))
        assert isinstance(error, Unauthenticated)


async def test_operator_calls_need_the_operators_role(tmp_path):
    async with door(tmp_path) as channel:
        stub: Any = admission_pb2_grpc.AdmissionServiceStub(channel)
        request = admission_pb2.CancelJobRequest()
        await stub.CancelJob(request, metadata=with_token("ops-token"))
        assert isinstance(await failure(stub.CancelJob(request, metadata=with_token("acme-token"))), PermissionDenied)


async def test_a_lane_the_token_does_not_name_is_denied_by_its_field(tmp_path):
    async with door(tmp_path) as channel:
        stub: Any = admission_pb2_grpc.AdmissionServiceStub(channel)
        request = admission_pb2.SubmitRequest()
        request.spec.contract.lane = 3  # type: ignore[assignment]  # LANE_BATCH
        await stub.Submit(request, metadata=with_token("acme-token"))
        request.spec.contract.lane = 1  # type: ignore[assignment]  # LANE_PRIORITY
        error = await failure(stub.Submit(request, metadata=with_token("acme-token")))
        assert isinstance(error, PermissionDenied)
        assert (error.field, Lane.BATCH.value in error.message) == ("spec.contract.lane", True)


async def test_health_answers_without_a_token_and_reflection_does_not(tmp_path):
    async with door(tmp_path) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        reflect: Any = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        asked = [reflection_pb2.ServerReflectionRequest(list_services="")]
        assert isinstance(await failure(reflect(iter(asked)).read()), Unauthenticated)
        answer = await reflect(iter(asked), metadata=with_token("acme-token")).read()
        assert NAME in {service.name for service in answer.list_services_response.service}
