"""A grpc.aio server as all our services run it: one edge around the handlers, health, reflection, bounded drain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import cast

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from laneway.core.errors import ConfigError
from laneway.runtime import metrics
from laneway.runtime.auth import check_binding, load_authenticator
from laneway.runtime.grpc_edge import CallEdge
from laneway.runtime.grpc_options import server_options
from laneway.runtime.logging import get_logger
from laneway.runtime.settings import Settings
from laneway.runtime.tls import server_credentials

log = get_logger("laneway.grpc")

STOP_GRACE_S = 1.0  # for the connections themselves, after our own calls have ended or had their time


class GrpcServer:
    """add, start, (serve), drain. The caller owns it; drain is idempotent and bounded."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._credentials = server_credentials(settings.grpc)
        self._edge = CallEdge(load_authenticator(settings.admission), calls_max=settings.grpc.calls_max)
        self._server = grpc.aio.server(options=server_options(settings.grpc))
        self._server.add_generic_rpc_handlers((self._edge,))
        self._health = health.aio.HealthServicer()
        self.address = ""  # host:port, once started
        self._names: list[str] = []
        self._gauges = ExitStack()
        self._drained = False
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._services)

    def add(self, name: str, register: Callable[[grpc.aio.Server], None]) -> None:
        """Adds a service: its full name, and a function that registers it, such as
        `lambda s: add_AdmissionServiceServicer_to_server(servicer, s)`."""
        register(self._services)
        self._names.append(name)

    @property
    def _services(self) -> grpc.aio.Server:
        """What generated code may add services to."""
        return cast("grpc.aio.Server", self._edge)

    async def start(self, listen: str) -> str:
        """Serves on host:port; returns the bound address (port 0 takes a free one)."""
        check_binding(listen, self._settings.admission, tls=self._credentials is not None)
        names = [*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(  # type: ignore[no-untyped-call]  # in its stub
            reflection.aio.ReflectionServicer(names), self._services
        )
        try:
            if self._credentials is not None:
                port = self._server.add_secure_port(listen, self._credentials)
            else:
                port = self._server.add_insecure_port(listen)
        except RuntimeError:
            raise ConfigError(f"cannot listen on {listen}: it is taken, or not an address of this host") from None
        await self._server.start()
        self._gauges.enter_context(
            metrics.live_gauge("laneway_grpc_live_calls", "Calls being served.", ("method",), self._live_samples)
        )
        await self.set_serving(True)
        self.address = f"{listen.rpartition(':')[0]}:{port}"
        return self.address

    async def set_serving(self, serving: bool, names: Sequence[str] = ()) -> None:
        """What health says of the services (all, or the named ones)."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in names or ("", *self._names):
            await self._health.set(name, status)

    def live_calls(self) -> int:
        return len(self._edge.live_calls())

    async def drain(self, grace_s: float) -> bool:
        """Takes no new calls, waits at most grace_s for the live ones, then stops. False if some were cut off."""
        if self._drained:
            return True
        self._drained = True
        self._edge.draining = True
        await self._health.enter_graceful_shutdown()
        quiet = await self._edge.wait_quiet(grace_s)
        if not quiet:
            log.warning("calls_cut_off", live=self.live_calls(), grace_s=grace_s)
        await self._server.stop(STOP_GRACE_S if quiet else 0.0)
        # stop() returns before the handlers' clean-up has run.
        await self._edge.wait_quiet(STOP_GRACE_S)
        self._gauges.close()
        return quiet

    def _live_samples(self) -> Iterable[metrics.Sample]:
        counts = Counter(call.names.method.rpartition("/")[2] for call in tuple(self._edge.live))
        return [({"method": method}, float(count)) for method, count in counts.items()]
