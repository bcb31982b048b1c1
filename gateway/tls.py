"""Which certificates the gateway shows to whom."""

from dataclasses import dataclass
from typing import Self

from gateway.settings import GatewaySettings
from quire.rpc.tls import AUTHORITY_FILE, Role, ServerTls, TlsIdentity


@dataclass(frozen=True, slots=True)
class GatewayTls:
    """None encrypts nothing.

    Attributes:
        public: of the ports for clients.
        inner: as whom schedulers are called.
        operators: of the ports of metrics and channelz.
    """

    public: ServerTls | None
    inner: TlsIdentity | None
    operators: ServerTls | None

    @classmethod
    def of(cls, settings: GatewaySettings) -> Self:
        """Raises ConfigurationError when files are no good."""
        inner = None if settings.tls_dir is None else TlsIdentity.of(settings.tls_dir, Role.GATEWAY)
        public = public_identity(settings) or inner
        return cls(
            None if public is None else ServerTls(public, asks_for_certificates=settings.tls_client_auth),
            inner,
            None if inner is None else ServerTls.for_operators(inner),
        )


def public_identity(settings: GatewaySettings) -> TlsIdentity | None:
    """The certificate for clients alone, if there is one; clients' own are still verified by the authority inside."""
    if settings.public_cert is None or settings.public_key is None:
        return None
    authority = settings.tls_dir / AUTHORITY_FILE if settings.tls_client_auth and settings.tls_dir else None
    identity = TlsIdentity(settings.public_cert, settings.public_key, authority)
    identity.read()
    return identity
