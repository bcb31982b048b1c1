"""How much of a server the connections to it may take."""

from dataclasses import dataclass

_MAX_METADATA_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """None sets no limit.

    Attributes:
        max_connections: Connections at once; further ones are closed.
        max_streams: Calls at once in one connection; a client keeps further ones back until one ends.
        handshake_timeout_s: A connection that is not set up by then is closed.
    """

    max_connections: int | None = None
    max_streams: int | None = None
    handshake_timeout_s: float = 10.0

    def options(self) -> list[tuple[str, int]]:
        """The same for a gRPC server, and the most metadata that a call may have."""
        limits = {
            "grpc.max_allowed_incoming_connections": self.max_connections,
            "grpc.max_concurrent_streams": self.max_streams,
        }
        return [
            *((name, limit) for name, limit in limits.items() if limit is not None),
            ("grpc.server_handshake_timeout_ms", int(self.handshake_timeout_s * 1000)),
            ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", 2 * _MAX_METADATA_BYTES),
        ]
