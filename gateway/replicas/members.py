"""The set of replicas: the scheduler addresses in `--schedulers`, and the addresses to which its DNS names resolve.

A name is resolved every few seconds, and at once after the stream to one of its addresses breaks, as gRPC clients do.
An address is a replica until its name no longer resolves to it and its requests are over:

- An address that is no longer in the DNS answer gets no new requests while there are others. Its stream is closed when
  it is idle and several answers in a row lack it, so that one incomplete answer of a DNS server changes little.
- An address that is no longer in the DNS answer and not connected is removed, and its requests move at once.
- A name that cannot be resolved, or that has no address at the moment, keeps its previous addresses.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gateway.replicas.link import SchedulerLink
from quire.rpc.address import DnsName, TcpAddress, parse_target

_MIN_INTERVAL_S = 0.5
_MISSES_OF_THE_GONE = 3
_logger = logging.getLogger(__name__)


async def resolve_name(name: DnsName) -> Collection[str]:
    """Resolves a name with the system's resolver. If the name has IPv4 and IPv6 addresses, returns only the family that
    comes first: both lead to the same hosts, and a scheduler accepts one stream per gateway."""
    found = await asyncio.get_running_loop().getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM)
    return {str(TcpAddress(str(where[0]), name.port)) for family, *_, where in found if family == found[0][0]}


@dataclass(frozen=True, slots=True)
class Resolver:
    """A way to resolve names.

    Attributes:
        resolve: Returns the addresses of a name, each as "HOST:PORT". Raises OSError on failure.
        interval_s: Seconds from one answer to the next query.
    """

    resolve: Callable[[DnsName], Awaitable[Collection[str]]] = resolve_name
    interval_s: float = 5.0


@dataclass(slots=True)
class _Name:
    """A DNS name, its current `addresses`, and for each removed address with a link the count of answers without it."""

    target: DnsName
    addresses: frozenset[str] = frozenset()
    missed: dict[str, int] = field(default_factory=dict[str, int])
    problem: str | None = None
    is_due: asyncio.Event = field(default_factory=asyncio.Event)


class MembersListener(Protocol):
    """Callbacks for new and removed replicas. `is_idle` returns whether no request is placed on a replica; `on_gone` is
    called after its link was removed."""

    def is_idle(self, address: str) -> bool: ...
    def on_found(self, address: str) -> None: ...
    def on_gone(self, address: str) -> None: ...


class LinkMaker(Protocol):
    """Makes the link to an address. Its certificate must have the name `host_name`, if given."""

    def __call__(self, address: str, *, host_name: str | None = None) -> SchedulerLink: ...


def may_be_several(targets: Sequence[str]) -> bool:
    """Whether there can be more than one replica, now or later."""
    return len(targets) > 1 or any(isinstance(parse_target(target), DnsName) for target in targets)


class Members:
    """Keeps a stream to each replica open while `run` runs.

    Attributes:
        links: The streams, by address. They change while `run` runs, if there are DNS names.
    """

    def __init__(
        self, targets: Sequence[str], open_link: LinkMaker, listener: MembersListener, resolver: Resolver
    ) -> None:
        """`targets` are addresses, and names as "dns:///NAME:PORT"."""
        self._open_link = open_link
        self._listener = listener
        self._resolver = resolver
        names = {target: parse_target(target) for target in targets}
        self._names = [_Name(name) for name in names.values() if isinstance(name, DnsName)]
        self._fixed = [target for target, name in names.items() if not isinstance(name, DnsName)]
        self.links = {address: open_link(address) for address in self._fixed}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def problems(self) -> list[str]:
        """Reasons why names are not resolved and streams are not open."""
        names = [f"{name.target}: {name.problem}" for name in self._names if name.problem is not None]
        return names + [f"{address}: {link.problem}" for address, link in self.links.items() if link.problem]

    def is_listed(self, address: str) -> bool:
        """Whether an address is in `--schedulers`, or one of its names currently resolves to it."""
        return address in self._fixed or any(address in name.addresses for name in self._names)

    def on_disconnected(self, address: str) -> None:
        """Resolves the names of an address again, after its stream broke: it may be gone or replaced."""
        for name in self._names:
            if address in name.addresses or address in name.missed:
                name.is_due.set()
        self._drop_gone()

    async def run(self) -> None:
        """Keeps the streams open until cancelled."""
        async with asyncio.TaskGroup() as group:
            for link in self.links.values():
                group.create_task(link.run(), name=f"scheduler {link.address}")
            for name in self._names:
                group.create_task(self._follow(name, group), name=str(name.target))

    async def _follow(self, name: _Name, group: asyncio.TaskGroup) -> None:
        while True:
            name.is_due.clear()
            await self._look_up(name)
            for address in sorted(name.addresses - self.links.keys()):
                link = self.links[address] = self._open_link(address, host_name=name.target.host)
                self._tasks[address] = group.create_task(link.run(), name=f"scheduler {address}")
                _logger.info("%s has the scheduler %s", name.target, address)
                self._listener.on_found(address)
            self._drop_gone()
            # Several streams that break at once cause only one query.
            await asyncio.sleep(min(_MIN_INTERVAL_S, self._resolver.interval_s))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._resolver.interval_s):
                    await name.is_due.wait()

    async def _look_up(self, name: _Name) -> None:
        problem = None
        try:
            found = frozenset(await self._resolver.resolve(name.target))
        except (OSError, UnicodeError) as error:
            # UnicodeError: the name is not a valid host name.
            found, problem = frozenset[str](), getattr(error, "strerror", None) or str(error)
        if not found:
            problem = problem or "it has no address"
            if problem != name.problem:
                _logger.warning("%s: %s; the schedulers known so far stay", name.target, problem)
            name.problem = problem
            return
        if name.problem is not None:
            _logger.info("%s is resolved again", name.target)
        missing = (name.addresses | name.missed.keys()) - found
        name.missed = {address: name.missed.get(address, 0) + 1 for address in sorted(missing)}
        name.addresses, name.problem = found, None

    def _drop_gone(self) -> None:
        """Ends links to addresses to which no name resolves, except links that have requests or may be listed again."""
        for name in self._names:
            for address, missed in list(name.missed.items()):
                link = self.links.get(address)
                if link is None or self.is_listed(address):
                    del name.missed[address]
                elif not link.is_connected or (missed >= _MISSES_OF_THE_GONE and self._listener.is_idle(address)):
                    del name.missed[address], self.links[address]
                    self._tasks.pop(address).cancel()
                    _logger.info("%s no longer has the scheduler %s", name.target, address)
                    self._listener.on_gone(address)
