"""TLS on TCP links: certificates of services by role, read anew when their files change. docs/security.md says how.

Unix sockets are not encrypted: who may open the file may call.
"""

import logging
import ssl
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import grpc

from quire.rpc.address import is_local
from quire.settings import ConfigurationError

AUTHORITY_FILE = "ca.pem"
ROLE_URI = "quire://role/"
"""Certificates name the role of their holder by a URI among the subject's alternative names."""
_logger = logging.getLogger(__name__)


class Role(StrEnum):
    """What a process with a certificate is. Its files in a directory of certificates are ROLE.pem and ROLE.key."""

    GATEWAY = "gateway"
    SCHEDULER = "scheduler"
    WORKER = "worker"
    OPERATOR = "operator"
    CLIENT = "client"


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    """Who a process is towards others, and whose word it takes for who they are. Files in PEM.

    Attributes:
        certificate: of this process, the chain up to the authority after it.
        key: of the certificate, not encrypted.
        authority: certificates of those whose signature is believed; None where nobody has to prove anything.
    """

    certificate: Path
    key: Path
    authority: Path | None

    @classmethod
    def of(cls, directory: Path, role: Role) -> "TlsIdentity":
        """The files of a role in a directory as `quire certs` makes it. ConfigurationError when they are no good."""
        identity = cls(directory / f"{role}.pem", directory / f"{role}.key", directory / AUTHORITY_FILE)
        identity.read()
        return identity

    def read(self) -> "TlsMaterial":
        """The contents of the files. ConfigurationError when one cannot be read or they do not belong together."""
        try:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self.authority)
            load_certificate(context, self)
            authority = None if self.authority is None else self.authority.read_bytes()
            return TlsMaterial(self.certificate.read_bytes(), self.key.read_bytes(), authority)
        except OSError as error:  # of which ssl.SSLError is one
            files = ", ".join(map(str, self._files()))
            raise ConfigurationError(f"TLS: {files} cannot be used: {error}") from error

    def stamp(self) -> tuple[int, ...]:
        """Changes when one of the files does; OSError when one is gone."""
        stats = [path.stat() for path in self._files()]
        return tuple(number for each in stats for number in (each.st_mtime_ns, each.st_size, each.st_ino))

    def _files(self) -> list[Path]:
        return [path for path in (self.certificate, self.key, self.authority) if path is not None]


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """Certificates and key, in PEM."""

    certificate: bytes
    key: bytes = field(repr=False)
    authority: bytes | None

    def channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)


@dataclass(frozen=True, slots=True)
class ServerTls:
    """How a service proves who it is, and who may call it.

    Attributes:
        asks_for_certificates: callers must show one that the authority has signed.
        roles: of such callers, the ones that may call any method but health; none lets all of them.
    """

    identity: TlsIdentity
    asks_for_certificates: bool = True
    roles: frozenset[Role] | None = None

    @classmethod
    def for_operators(cls, identity: TlsIdentity) -> "ServerTls":
        """Of ports for people and machines that look into a service: metrics and channelz."""
        return cls(identity, roles=frozenset({Role.OPERATOR}))

    def credentials(self) -> grpc.ServerCredentials:
        """Each handshake uses the files as they are then; running connections stay as they are."""
        # None tells gRPC that nothing has changed, which its type hints do not know.
        reload: Any = _Reload(self.identity)
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self.identity.read()), reload, self.asks_for_certificates
        )


def load_certificate(context: ssl.SSLContext, identity: TlsIdentity) -> None:
    """Has a context show the certificate. OSError when the files cannot be used."""
    # With a password, though a wrong one, an encrypted key is an error; without one, OpenSSL asks at the terminal.
    context.load_cert_chain(identity.certificate, identity.key, password="")


def warn_if_open(address: str, tls: ServerTls | None) -> None:
    """For services that know their callers by certificates alone."""
    if tls is None and not is_local(address):
        _logger.warning(
            "everyone who reaches %s from other machines may command this service; --tls-dir asks for certificates",
            address,
        )


class FileWatch:
    """Tells whether the files of an identity have changed to something that can be used."""

    def __init__(self, identity: TlsIdentity) -> None:
        self._identity = identity
        self._stamp = identity.stamp()

    def changed(self) -> TlsMaterial | None:
        """What the files hold since they were changed last; None while they are the same, or are no good."""
        try:
            stamp = self._identity.stamp()
            if stamp == self._stamp:
                return None
            self._stamp = stamp
            material = self._identity.read()
        except (OSError, ConfigurationError) as error:
            _logger.error("%s; going on with the certificate from before", error)
            return None
        _logger.info("TLS: %s was read anew", self._identity.certificate)
        return material


class _Reload:
    """What gRPC asks before each handshake, in a thread of its own."""

    def __init__(self, identity: TlsIdentity) -> None:
        self._watch = FileWatch(identity)

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        material = self._watch.changed()
        return None if material is None else _configuration(material)


def _configuration(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(material.key, material.certificate)], material.authority)
