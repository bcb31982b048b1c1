"""A client's channel to gateways: its addresses, its encryption, its API key, and gRPC's retries."""

import ipaddress
import json
import logging
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from quire.gateway.v1 import (
    embedding_pb2,
    embedding_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    prefix_pb2,
    prefix_pb2_grpc,
)
from quire.rpc.address import TcpAddress, UnixAddress, is_local, parse_address
from quire.rpc.channel import channel_options
from quire.rpc.errors import Unauthenticated, Unavailable
from quire.rpc.transport import TRANSPORT
from quire.runtime.settings import ConfigurationError

_log = logging.getLogger(__name__)

LookUp = Callable[[str], Sequence[str]]
"""Returns the IP addresses of a host name; raises OSError if it is unknown."""

_API_KEY = re.compile(r"[\x21-\x7e]{1,512}")
_GENERATION: ServiceDescriptor = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]
_MODELS: ServiceDescriptor = model_pb2.DESCRIPTOR.services_by_name["ModelService"]
_PREFIXES: ServiceDescriptor = prefix_pb2.DESCRIPTOR.services_by_name["PrefixService"]
_EMBEDDINGS: ServiceDescriptor = embedding_pb2.DESCRIPTOR.services_by_name["EmbeddingService"]
_IDEMPOTENT: tuple[MethodDescriptor, ...] = tuple(
    service.methods_by_name[name]
    for service, names in (
        # Each by its name: a method that is added to a service may be none.
        (_MODELS, ("ListModels", "GetModel", "GetServerInfo", "ListAdapters")),
        (_PREFIXES, ("PinPrefix", "UnpinPrefix")),
        (_GENERATION, ("Cancel", "Tokenize", "Detokenize")),
        (_EMBEDDINGS, ("Embed", "Rerank", "Score")),
    )
    for name in names
)
"""Methods that may be called twice, as the protos say."""


@dataclass(frozen=True, slots=True)
class ClientTls:
    """The gateways that a client trusts, and the client's identity. Files in PEM, read when a client is made.

    Attributes:
        authority: certificates of the authorities that sign gateways' certificates; None takes gRPC's list of public
            ones.
        certificate: of this client, and its `key`, if the gateway requires one.
        server_name: the name in the gateway's certificate, if it is not the host of its address, or if there are
            gateways on several hosts.
    """

    authority: str | PathLike[str] | None = None
    certificate: str | PathLike[str] | None = None
    key: str | PathLike[str] | None = None
    server_name: str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files. Raises ConfigurationError if a file cannot be read, or a certificate has no key."""
        if (self.certificate is None) != (self.key is None):
            raise ConfigurationError("TLS: the certificate of a client and its key must be given together")
        return grpc.ssl_channel_credentials(*(_read(path) for path in (self.authority, self.key, self.certificate)))

    def options(self) -> list[tuple[str, str]]:
        return [] if self.server_name is None else [("grpc.ssl_target_name_override", self.server_name)]


@dataclass(frozen=True, slots=True)
class Stubs:
    """The stubs of the gateway's services, of either gRPC API; generated stubs have no types."""

    generation: Any
    models: Any
    prefixes: Any
    embeddings: Any


def open_channel(api: Any, address: str | Sequence[str], tls: ClientTls | None) -> Any:
    """A channel to the gateways at `address`, of either gRPC API: `api` is the module `grpc` or `grpc.aio`.

    Raises:
        ConfigurationError: an address is malformed, a file of `tls` cannot be read, or gateways on several hosts come
            without a `server_name`.
        Unavailable: all of several names are unknown.
    """
    target = find_target(address)
    options = _options(target)
    credentials = None
    if tls is not None:
        if len(target.hosts) > 1 and tls.server_name is None:
            raise ConfigurationError(
                f"TLS: the certificates of gateways on several hosts ({', '.join(target.hosts)}) must share one name; "
                "give it by server_name"
            )
        credentials, options = tls.credentials(), [*options, *tls.options()]
    if api is grpc.aio:
        return TRANSPORT.get().channel(target.uri, credentials, options)
    if credentials is None:
        return api.insecure_channel(target.uri, options=options)
    return api.secure_channel(target.uri, credentials, options=options)


def make_stubs(channel: Any, api_key: str | None) -> Stubs:
    """The stubs of a channel. Raises Unauthenticated if no header can hold the key."""
    calls = channel if api_key is None else KeyedChannel(channel, api_key)
    return Stubs(
        generation_pb2_grpc.GenerationServiceStub(calls),
        model_pb2_grpc.ModelServiceStub(calls),
        prefix_pb2_grpc.PrefixServiceStub(calls),
        embedding_pb2_grpc.EmbeddingServiceStub(calls),
    )


class KeyedChannel:
    """A channel, of either gRPC API, that sends an API key with every call. It only makes calls.

    It uses no call credentials, which gRPC refuses to send without TLS, even to this machine, and no interceptors,
    which wrap each call in an object with behaviour of its own.
    """

    def __init__(self, channel: Any, api_key: str) -> None:
        """Raises Unauthenticated if no header can hold the key."""
        if not _API_KEY.fullmatch(api_key):
            description = "must be 1 to 512 printable ASCII characters without spaces"
            raise Unauthenticated(f"the API key {description}", reason="INVALID_API_KEY")
        self._channel = channel
        self._header = ("authorization", f"Bearer {api_key}")

    def unary_unary(self, method: str, *args: Any, **options: Any) -> Any:
        return self._keyed(self._channel.unary_unary(method, *args, **options))

    def unary_stream(self, method: str, *args: Any, **options: Any) -> Any:
        return self._keyed(self._channel.unary_stream(method, *args, **options))

    def stream_unary(self, method: str, *args: Any, **options: Any) -> Any:
        return self._keyed(self._channel.stream_unary(method, *args, **options))

    def stream_stream(self, method: str, *args: Any, **options: Any) -> Any:
        return self._keyed(self._channel.stream_stream(method, *args, **options))

    def _keyed(self, call: Any) -> Any:
        def with_key(*args: Any, metadata: Any = None, **options: Any) -> Any:
            return call(*args, metadata=(*(metadata or ()), self._header), **options)

        return with_key


@dataclass(frozen=True, slots=True)
class Target:
    """The target of a channel.

    Attributes:
        uri: In gRPC's form.
        addresses: As they were given.
        hosts: The hosts of several TCP addresses, in order and each once; empty for a single address, whose host gRPC
            finds in the URI.
    """

    uri: str
    addresses: tuple[str, ...]
    hosts: tuple[str, ...] = ()

    @property
    def is_list(self) -> bool:
        return len(self.addresses) > 1

    @property
    def is_one_place(self) -> bool:
        """True for an IP address or a socket; a name may stand for several places."""
        if self.is_list:
            return False
        try:
            address = parse_address(self.addresses[0])
        except ConfigurationError:
            return False
        return isinstance(address, UnixAddress) or _is_ip(address.host)


def split_addresses(address: str | Sequence[str]) -> tuple[str, ...]:
    """The addresses of a text with commas, or of a sequence, each once.

    Raises ConfigurationError if there is none, one is empty, or one of several is malformed.
    """
    parts = tuple(part.strip() for part in (address.split(",") if isinstance(address, str) else address))
    if not parts or not all(parts):
        raise ConfigurationError(f'address "{address}" has an empty part; expected HOST:PORT,HOST:PORT or unix:PATH')
    addresses = tuple(dict.fromkeys(parts))
    if len(addresses) > 1:
        for each in addresses:
            _parse(each)
    return addresses


def _look_up(host: str) -> Sequence[str]:
    return [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]


def find_target(address: str | Sequence[str], look_up: LookUp = _look_up) -> Target:
    """The addresses to connect to.

    A single address goes to gRPC as it is, which follows a name as its addresses change. gRPC cannot do so for a list
    of names: they are looked up here, once, and unknown ones are left out.

    Raises:
        ConfigurationError: an address of several is malformed, or they mix TCP and unix sockets.
        Unavailable: all of several names are unknown.
    """
    addresses = split_addresses(address)
    if len(addresses) == 1:
        return Target(addresses[0], addresses)
    parsed = [_parse(text) for text in addresses]
    sockets = [str(each.path) for each in parsed if isinstance(each, UnixAddress)]
    if len(sockets) == len(parsed):
        return Target("unix:" + ",".join(quote(path) for path in sockets), addresses)
    if sockets:
        raise ConfigurationError(f'addresses "{",".join(addresses)}" mix TCP and unix sockets; expected one kind')
    tcp = [each for each in parsed if isinstance(each, TcpAddress)]
    return Target(_uri(_resolve(tcp, look_up)), addresses, tuple(dict.fromkeys(each.host for each in tcp)))


def _parse(text: str) -> TcpAddress | UnixAddress:
    """An address of a list, which gRPC writes with commas in between."""
    if "," in text:
        raise ConfigurationError(f'address "{text}" of several has a comma in it')
    return parse_address(text)


def _resolve(addresses: Sequence[TcpAddress], look_up: LookUp) -> list[TcpAddress]:
    """The addresses with IP addresses for names, each once; a name may have several."""
    found: list[TcpAddress] = []
    unknown: list[str] = []
    for address in addresses:
        try:
            ips = [address.host] if _is_ip(address.host) else look_up(address.host)
        except OSError as error:
            unknown.append(f"{address} ({error.strerror or error})")
            continue
        found.extend(TcpAddress(ip, address.port) for ip in ips)
    if not found:
        raise Unavailable(f"no gateway's name resolves: {', '.join(unknown)}")
    for text in unknown:
        _log.warning("a gateway is not used, because its name does not resolve: %s", text)
    return list(dict.fromkeys(found))


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _uri(addresses: Sequence[TcpAddress]) -> str:
    """IP addresses as one URI of one family: IPv4 addresses among IPv6 addresses become mapped ones."""
    if all(":" not in address.host for address in addresses):
        return "ipv4:" + ",".join(map(str, addresses))
    mapped = (a if ":" in a.host else TcpAddress(f"::ffff:{a.host}", a.port) for a in addresses)
    return "ipv6:" + ",".join(quote(str(address), safe="[]:") for address in mapped)


def _read(path: str | PathLike[str] | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"TLS: {path} cannot be read: {error.strerror}") from error


def _options(target: Target) -> list[tuple[str, Any]]:
    options: dict[str, Any] = dict(channel_options())
    options["grpc.enable_http_proxy"] = int(not (target.is_list or is_local(target.addresses[0])))
    options["grpc.service_config"] = json.dumps(service_config(spread=not target.is_one_place))
    if target.is_list:
        # gRPC would take the whole list for the name of the server, and above for the name of one host behind a proxy.
        options["grpc.default_authority"] = target.addresses[0] if target.hosts else "localhost"
    return list(options.items())


def service_config(*, spread: bool) -> dict[str, Any]:
    """How gRPC spreads calls over addresses, and which calls it retries after a lost connection.

    It ignores the gateways' health: one whose worker restarts is not healthy, and accepts requests all the same.

    Args:
        spread: Whether there may be several addresses. With one, gRPC connects when it is called: a gateway that has
            just come back is called at once, and not when the wait after the last refusal is over.
    """
    return {
        "loadBalancingConfig": [{"round_robin": {}} if spread else {"pick_first": {}}],
        "methodConfig": [
            {
                "name": [_name(each) for each in _IDEMPOTENT],
                "retryPolicy": {
                    "maxAttempts": 4,
                    "initialBackoff": "0.1s",
                    "maxBackoff": "1s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ],
        # Gateways that fail most calls are not called four times as often.
        "retryThrottling": {"maxTokens": 20, "tokenRatio": 0.1},
    }


def _name(method: MethodDescriptor) -> dict[str, str]:
    return {"service": method.containing_service.full_name, "method": method.name}
