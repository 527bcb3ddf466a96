"""How a channel to an engine's server is set up: a connection of its own, whose death is noticed within a minute."""

from __future__ import annotations

# Such servers take a ping without data every five minutes and hang up on the third that comes earlier, so no more than
# gRPC's own two are sent into a silence (docs/engines.md). Health checks are data.
KEEPALIVE_S = 30.0
KEEPALIVE_TIMEOUT_S = 10.0
RECONNECT_S = 0.5


def channel_options(message_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.max_send_message_length", message_bytes),
        ("grpc.keepalive_time_ms", round(KEEPALIVE_S * 1000)),
        ("grpc.keepalive_timeout_ms", round(KEEPALIVE_TIMEOUT_S * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", round(RECONNECT_S * 1000)),
        ("grpc.max_reconnect_backoff_ms", round(RECONNECT_S * 1000)),
        ("grpc.use_local_subchannel_pool", 1),  # a new engine makes a connection of its own
    ]
