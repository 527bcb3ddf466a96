"""Channel options of servers and clients, set together: limits of messages and metadata, and keepalive.

A server closes a connection whose client pings more often than it permits (`too_many_pings`), even in the middle of
a long prefill; so what clients do by default and what servers permit come from the same settings.
"""

from __future__ import annotations

from laneway.runtime.settings import GrpcSettings

Options = list[tuple[str, int | str]]


def server_options(settings: GrpcSettings) -> Options:
    return [
        *_common(settings),
        ("grpc.max_receive_message_length", settings.request_bytes_max),
        ("grpc.max_send_message_length", settings.response_bytes_max),
        ("grpc.http2.min_ping_interval_without_data_ms", _ms(settings.keepalive_permit_s)),
        ("grpc.http2.max_ping_strikes", 2),
        ("grpc.so_reuseport", 0),  # a second server on the same port must fail, not share its calls
    ]


def channel_options(settings: GrpcSettings | None = None) -> Options:
    """Options of a client's channel to a Laneway service."""
    settings = settings or GrpcSettings()
    return [
        *_common(settings),
        ("grpc.max_receive_message_length", settings.response_bytes_max),
        ("grpc.max_send_message_length", settings.request_bytes_max),
        ("grpc.http2.max_pings_without_data", 0),  # go on pinging while a stream is silent
        ("grpc.enable_retries", 0),  # one layer retries: the typed client
    ]


def _common(settings: GrpcSettings) -> Options:
    return [
        ("grpc.max_metadata_size", settings.metadata_bytes_max),
        ("grpc.absolute_max_metadata_size", settings.metadata_bytes_max),
        ("grpc.keepalive_time_ms", _ms(settings.keepalive_s)),
        ("grpc.keepalive_timeout_ms", _ms(settings.keepalive_timeout_s)),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
