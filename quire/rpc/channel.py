"""Channels between the services."""

import grpc.aio

from quire.rpc.address import TcpAddress, parse_address
from quire.rpc.server import DEFAULT_MAX_MESSAGE_BYTES
from quire.rpc.tls import TlsIdentity
from quire.rpc.transport import TRANSPORT


def open_channel(
    address: str,
    *,
    tls: TlsIdentity | None = None,
    host_name: str | None = None,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
) -> grpc.aio.Channel:
    """A channel to "HOST:PORT" or "unix:PATH" that connects on first use and notices a dead peer within 20 s.

    Args:
        tls: The identity to show at a TCP address; its files are read now.
        host_name: The host that the service's certificate must name; None for the one of `address`.

    Raises:
        ConfigurationError: the files of `tls` cannot be used.
    """
    options: list[tuple[str, int | str]] = [*channel_options(max_message_bytes=max_message_bytes)]
    if host_name is not None:
        options.append(("grpc.default_authority", host_name))
    credentials = None
    if tls is not None and isinstance(parse_address(address), TcpAddress):
        credentials = tls.read().channel_credentials()
    return TRANSPORT.get().channel(address, credentials, options)


def channel_options(*, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES) -> list[tuple[str, int]]:
    """The options of a channel, for either gRPC API."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # gRPC waits up to two minutes between attempts by default; a restarted process is back in a second.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.min_reconnect_backoff_ms", 5_000),
        # Channels of one process to one address must not share a connection: each has its own flow control and fate.
        ("grpc.use_local_subchannel_pool", 1),
        # gRPC would send prompts to the proxy of https_proxy, by which machines reach a hub of models.
        ("grpc.enable_http_proxy", 0),
    ]
