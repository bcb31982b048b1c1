"""Whom a client believes, and who it is, where a gateway speaks TLS."""

from dataclasses import dataclass
from pathlib import Path

import grpc

from quire.settings import ConfigurationError


@dataclass(frozen=True, slots=True)
class ClientTls:
    """Files in PEM, read when a client is made.

    Attributes:
        authority: certificates of those who sign gateways' certificates; None takes gRPC's list of public ones.
        certificate: of this client, and its `key`, where the gateway asks for one.
        server_name: what the gateway's certificate is made out to, where that is not the host of its address, or there
            are gateways on several hosts.
    """

    authority: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    server_name: str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """ConfigurationError when a file cannot be read, or a certificate has no key."""
        if (self.certificate is None) != (self.key is None):
            raise ConfigurationError("TLS: a certificate of a client and its key go together")
        return grpc.ssl_channel_credentials(*(_read(path) for path in (self.authority, self.key, self.certificate)))

    def options(self) -> list[tuple[str, str]]:
        """Of the channel."""
        return [] if self.server_name is None else [("grpc.ssl_target_name_override", self.server_name)]


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"TLS: {path} cannot be read: {error.strerror}") from error
