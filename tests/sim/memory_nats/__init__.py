"""A NATS server with JetStream in memory, under a clock that is handed in, for simulations of the whole system.

MemoryNats is the server: streams, consumers, schedules, times to live, core messages. It has a heap of timed events;
its owner moves the clock and calls `run_due`, or lets `drive` do it on the event loop's time, virtual or not. MemoryBus
is the product's own Bus over a client whose wire is a queue instead of a socket, so that everything above the wire,
errors and timeouts included, is the code that runs in production. The tests/contract/test_nats_*_contract.py hold both
servers to the same behaviour.

Left out: clusters and what comes of them (stale replicas; but consumers may get another leader, see `change_leaders`),
flow control and slow consumers, max_deliver, backoff, consumers that share a work queue's subjects by mistake, rights
and TLS, priority groups, sources.
A bell never arrives before the consumer knows of the message; a schedule fires on the instant.
"""

from tests.sim.memory_nats.client import MemoryBus, MemoryClient
from tests.sim.memory_nats.server import MemoryNats
from tests.sim.memory_nats.timers import LoopClock, LoopDriver

__all__ = ["LoopClock", "LoopDriver", "MemoryBus", "MemoryClient", "MemoryNats"]
