"""Wire tests run against a real nats-server each."""

from tests.support.nats import bus, catalogue, nats_server, provisioned_bus

__all__ = ["bus", "catalogue", "nats_server", "provisioned_bus"]
