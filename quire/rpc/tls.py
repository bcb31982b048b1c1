"""TLS on TCP links: identities of processes, permitted callers, and certificates that may change while they run.

Certificates name the role of their holder; docs/security.md explains how to make them. Each handshake uses the files as
they are then; open connections keep the files that they began with. Unix sockets are not encrypted: a process that may
open the file may call.
"""

import asyncio
import contextlib
import functools
import logging
import ssl
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
import grpc.aio

from quire.rpc.address import TcpAddress, UnixAddress, is_local
from quire.rpc.errors import PermissionDenied
from quire.rpc.interceptors import Continuation, abort_with, around, remake
from quire.runtime.settings import ConfigurationError

AUTHORITY_FILE = "ca.pem"
ROLE_URI = "quire://role/"
"""Certificates name the role of their holder by a URI among the subject's alternative names."""
_HEALTH = "/grpc.health.v1.Health/"
_FIRST_MESSAGE_S = 1.0
_KEEPING = "%s; keeping the certificate from before"
_logger = logging.getLogger(__name__)


class Role(StrEnum):
    """The role in a process's certificate. Its files in a directory of certificates are ROLE.pem and ROLE.key."""

    GATEWAY = "gateway"
    SCHEDULER = "scheduler"
    WORKER = "worker"
    OPERATOR = "operator"
    CLIENT = "client"


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    """The proof of a process's identity, and the authority that it trusts. Files in PEM.

    Attributes:
        certificate: of this process, followed by the chain up to the authority.
        key: of the certificate, not encrypted.
        authority: certificates of the trusted authorities; None if callers need no certificate.
    """

    certificate: Path
    key: Path
    authority: Path | None

    @classmethod
    def of(cls, directory: Path, role: Role) -> "TlsIdentity":
        """The files of a role in a directory that `quire certs` made. ConfigurationError when they cannot be used."""
        identity = cls(directory / f"{role}.pem", directory / f"{role}.key", directory / AUTHORITY_FILE)
        identity.read()
        return identity

    def read(self) -> "TlsMaterial":
        """The contents of the files. ConfigurationError when one cannot be read or they do not belong together."""
        try:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self.authority)
            self.load_into(context)
            authority = None if self.authority is None else self.authority.read_bytes()
            return TlsMaterial(self.certificate.read_bytes(), self.key.read_bytes(), authority)
        except OSError as error:  # ssl.SSLError included
            files = ", ".join(map(str, self._files()))
            raise ConfigurationError(f"TLS: {files} cannot be used: {error}") from error

    def load_into(self, context: ssl.SSLContext) -> None:
        """Makes a context show the certificate. OSError when the files cannot be used."""
        # With a password, even a wrong one, an encrypted key is an error; without one, OpenSSL prompts at the terminal.
        context.load_cert_chain(self.certificate, self.key, password="")

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

    def server_configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self.key, self.certificate)], self.authority)


@dataclass(frozen=True, slots=True)
class ServerTls:
    """The proof of a service's identity, and its permitted callers.

    Attributes:
        asks_for_certificates: whether callers must show one that the authority has signed.
        roles: the roles of callers that may call any method but health; None allows all of them.
        roles_of_methods: of methods, by their full names, that are for other roles.
    """

    identity: TlsIdentity
    asks_for_certificates: bool = True
    roles: frozenset[Role] | None = None
    roles_of_methods: Mapping[str, frozenset[Role]] = field(default_factory=dict[str, frozenset[Role]])

    @classmethod
    def for_operators(cls, identity: TlsIdentity) -> "ServerTls":
        """The TLS of the ports for metrics and channelz, which only operators may call."""
        return cls(identity, roles=frozenset({Role.OPERATOR}))

    def credentials(self) -> grpc.ServerCredentials:
        watch = _FileWatch(self.identity)

        # gRPC calls it before each handshake, in a thread of its own. None means "unchanged"; the type hints lack that.
        def reload() -> Any:
            material = watch.changed()
            return None if material is None else material.server_configuration()

        configuration = self.identity.read().server_configuration()
        return grpc.dynamic_ssl_server_credentials(configuration, reload, self.asks_for_certificates)


class HttpsFiles:
    """The TLS of an HTTP port."""

    def __init__(self, tls: ServerTls) -> None:
        """Raises ConfigurationError when the files cannot be used."""
        self._tls = tls
        self._watch = _FileWatch(tls.identity)
        self._current = self._read()
        self._lock = threading.Lock()

    def context(self) -> ssl.SSLContext:
        """The TLS context of a server. Each connection gets the current context after the client's hello."""
        entry = self._read()
        entry.sni_callback = self._choose
        return entry

    def _choose(self, connection: ssl.SSLObject | ssl.SSLSocket, _host: str | None, _entry: ssl.SSLContext) -> None:
        """Called for every client, also for one that names no host, in the thread of the connection."""
        with self._lock:
            if self._watch.changed() is not None:
                try:
                    self._current = self._read()
                except ConfigurationError as error:  # changed again since the watch looked
                    _logger.error(_KEEPING, error)
            connection.context = self._current

    def _read(self) -> ssl.SSLContext:
        identity = self._tls.identity
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            identity.load_into(context)
            if identity.authority is not None:
                context.load_verify_locations(identity.authority)
        except OSError as error:  # ssl.SSLError included
            raise ConfigurationError(
                f"TLS: {identity.certificate}, its key or its authority cannot be used: {error}"
            ) from error
        if self._tls.asks_for_certificates:
            context.verify_mode = ssl.CERT_REQUIRED
            # A resumed session shows no certificate again: one signed by a removed authority would stay valid.
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.num_tickets = 0
        return context


class _FileWatch:
    """Notices when the files of an identity have changed to something that can be used."""

    def __init__(self, identity: TlsIdentity) -> None:
        self._identity = identity
        self._stamp = identity.stamp()

    def changed(self) -> TlsMaterial | None:
        """The files' contents if they have changed since the last call; None otherwise, or if they are unusable."""
        try:
            stamp = self._identity.stamp()
            if stamp == self._stamp:
                return None
            self._stamp = stamp
            material = self._identity.read()
        except (OSError, ConfigurationError) as error:
            _logger.error(_KEEPING, error)
            return None
        _logger.info("TLS: read %s again", self._identity.certificate)
        return material


class RoleInterceptor(grpc.aio.ServerInterceptor):
    """Refuses every method but health to callers of other roles: PERMISSION_DENIED, reason WRONG_ROLE.

    Must come before ErrorInterceptor, which decodes: nothing that a wrong caller sends is parsed.
    """

    def __init__(
        self, roles: Collection[Role], roles_of_methods: Mapping[str, frozenset[Role]] = MappingProxyType({})
    ) -> None:
        self._roles = frozenset(roles)
        self._roles_of_methods = roles_of_methods

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_HEALTH):
            return handler
        check = functools.partial(self._checked, handler_call_details.method)
        guard = functools.partial(around, prepare=check)
        return remake(handler, guard, request_deserializer=handler.request_deserializer)

    async def _checked(self, method: str, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """The request, as it is, of a caller that may make it."""
        shown = _roles_of_caller(context.auth_context())
        roles = self._roles_of_methods.get(method, self._roles)
        if not roles & shown:
            wanted, had = " or ".join(sorted(roles)), ", ".join(sorted(shown)) or "no role"
            message = f"this is for {wanted}; the caller's certificate names {had}"
            if hasattr(request, "__aiter__"):
                # A status at the first write of a stream reaches grpc.aio's clients as INTERNAL.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_FIRST_MESSAGE_S):
                        await anext(aiter(request), None)
            await abort_with(PermissionDenied(message, reason="WRONG_ROLE"), context, method)
        return request


def role_interceptors(address: TcpAddress | UnixAddress, tls: ServerTls | None) -> list[RoleInterceptor]:
    """The interceptors that check the callers of a server at this address; none for unix sockets, which have no TLS."""
    if tls is None or tls.roles is None or not isinstance(address, TcpAddress):
        return []
    return [RoleInterceptor(tls.roles, tls.roles_of_methods)]


def roles_of_certificate(certificate: Mapping[str, Any] | None) -> frozenset[Role]:
    """The roles in a peer's certificate, the result of `ssl.SSLSocket.getpeercert`; none without one."""
    names = (certificate or {}).get("subjectAltName", ())
    return _roles_among(name for kind, name in names if kind == "URI")


def _roles_of_caller(auth_context: Mapping[str, Any]) -> frozenset[Role]:
    """The roles in a peer's certificate, given gRPC's authentication context."""
    return _roles_among(
        name.decode(errors="replace")
        for property_name in ("x509_subject_alternative_name", "x509_uri")
        for name in auth_context.get(property_name, ())
    )


def _roles_among(names: Iterable[str]) -> frozenset[Role]:
    shown = {name.removeprefix(ROLE_URI) for name in names if name.startswith(ROLE_URI)}
    return frozenset(role for role in Role if role in shown)


def warn_if_open(address: str, tls: ServerTls | None) -> None:
    """Logs a warning if a service that identifies callers only by certificates is reachable without TLS."""
    if tls is None and not is_local(address):
        _logger.warning(
            "this service accepts calls at %s from other machines without certificates; --tls-dir requires them",
            address,
        )
