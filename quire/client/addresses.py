"""Which gateways a client calls: one address, or several that share its calls."""

import ipaddress
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from quire.rpc.address import TcpAddress, UnixAddress, parse_address
from quire.rpc.errors import Unavailable
from quire.settings import ConfigurationError

_log = logging.getLogger(__name__)

LookUp = Callable[[str], Sequence[str]]
"""The IP addresses of a host name; OSError when it is not known."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a channel connects to.

    Attributes:
        uri: As gRPC takes it.
        addresses: As they were given.
        hosts: Of several TCP addresses the hosts, in order and each once; of a single address none, since gRPC knows
            its host by itself.
    """

    uri: str
    addresses: tuple[str, ...]
    hosts: tuple[str, ...] = ()

    @property
    def is_list(self) -> bool:
        return len(self.addresses) > 1

    @property
    def is_one_place(self) -> bool:
        """An IP address or a socket, where a name may stand for several."""
        if self.is_list:
            return False
        try:
            address = parse_address(self.addresses[0])
        except ConfigurationError:
            return False
        return isinstance(address, UnixAddress) or _is_ip(address.host)


def split_addresses(address: str | Sequence[str]) -> tuple[str, ...]:
    """The addresses of a text with commas, or of a sequence, each once.

    Raises ConfigurationError where there is none, one is empty, or one of several is malformed.
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
    """Where to connect to.

    One address goes to gRPC as it is, which follows a name as its addresses change. gRPC has no such thing for a list
    of names: they are looked up here, once, and those that nobody knows now are left out.

    Raises:
        ConfigurationError: an address of several is malformed, or they are of TCP and of unix sockets.
        Unavailable: none of several names is known.
    """
    addresses = split_addresses(address)
    if len(addresses) == 1:
        return Target(addresses[0], addresses)
    parsed = [_parse(text) for text in addresses]
    sockets = [str(each.path) for each in parsed if isinstance(each, UnixAddress)]
    if len(sockets) == len(parsed):
        return Target("unix:" + ",".join(quote(path) for path in sockets), addresses)
    if sockets:
        raise ConfigurationError(f'addresses "{",".join(addresses)}" are of TCP and of unix sockets; expected one kind')
    tcp = [each for each in parsed if isinstance(each, TcpAddress)]
    return Target(_uri(_resolve(tcp, look_up)), addresses, tuple(dict.fromkeys(each.host for each in tcp)))


def _parse(text: str) -> TcpAddress | UnixAddress:
    """An address of a list, which gRPC writes with commas in between."""
    if "," in text:
        raise ConfigurationError(f'address "{text}" of several has a comma in it')
    return parse_address(text)


def _resolve(addresses: Sequence[TcpAddress], look_up: LookUp) -> list[TcpAddress]:
    """The same with IP addresses for names, which may be more or fewer; each once."""
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
        raise Unavailable(f"no gateway's name is known: {', '.join(unknown)}")
    for text in unknown:
        _log.warning("a gateway is left out, since its name is not known: %s", text)
    return list(dict.fromkeys(found))


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _uri(addresses: Sequence[TcpAddress]) -> str:
    """IP addresses as one URI, which is of one family: among IPv6 addresses those of IPv4 are mapped ones."""
    if all(":" not in address.host for address in addresses):
        return "ipv4:" + ",".join(map(str, addresses))
    mapped = (a if ":" in a.host else TcpAddress(f"::ffff:{a.host}", a.port) for a in addresses)
    return "ipv6:" + ",".join(quote(str(address), safe="[]:") for address in mapped)
