"""Which replicas there are: the schedulers that `--schedulers` names, and those that its DNS names resolve to.

A name is resolved every few seconds, and at once when a scheduler that it had resolved to is lost, as gRPC clients do.
An address that it resolves to is a replica, until the name no longer has it and its requests are over:

- An address that the name no longer has gets no new requests while there are others. Its stream is closed when it is
  idle and the name has lacked it several times in a row, so that one incomplete answer of a DNS server changes little.
- An address that the name no longer has and that is not connected is gone, and its requests go elsewhere at once.
- A name that cannot be resolved, or has no address now, keeps those that it had.
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
    """Asks the system. Of a name with IPv4 and IPv6 addresses, those of the kind that the system puts first: they are
    the same hosts, and a scheduler takes one stream of a gateway."""
    found = await asyncio.get_running_loop().getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM)
    return {str(TcpAddress(str(where[0]), name.port)) for family, *_, where in found if family == found[0][0]}


@dataclass(frozen=True, slots=True)
class Resolver:
    """How names are resolved.

    Attributes:
        resolve: Gives the addresses of a name, "HOST:PORT" each. Raises OSError where it cannot.
        interval_s: Seconds from one answer to the next question.
    """

    resolve: Callable[[DnsName], Awaitable[Collection[str]]] = resolve_name
    interval_s: float = 5.0


@dataclass(slots=True)
class _Name:
    """A DNS name: the addresses that it has now, and for how many answers it has lacked those that are still linked."""

    target: DnsName
    addresses: frozenset[str] = frozenset()
    missed: dict[str, int] = field(default_factory=dict[str, int])
    problem: str | None = None
    is_due: asyncio.Event = field(default_factory=asyncio.Event)


class MembersListener(Protocol):
    """Is told who comes and goes. `is_idle` says whether no request is placed at an address; `on_gone` is called after
    its link has left."""

    def is_idle(self, address: str) -> bool: ...
    def on_found(self, address: str) -> None: ...
    def on_gone(self, address: str) -> None: ...


class LinkMaker(Protocol):
    """Makes the link to an address, whose certificate names `host_name` if that is given."""

    def __call__(self, address: str, *, host_name: str | None = None) -> SchedulerLink: ...


def may_be_several(targets: Sequence[str]) -> bool:
    """Whether there may ever be more than one replica."""
    return len(targets) > 1 or any(isinstance(parse_target(target), DnsName) for target in targets)


class Members:
    """Keeps a stream to each replica open while `run` runs.

    Attributes:
        links: The streams, by address. They come and go while `run` runs, if there are names.
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
        """Why names are not resolved, and why streams are not open."""
        names = [f"{name.target}: {name.problem}" for name in self._names if name.problem is not None]
        return names + [f"{address}: {link.problem}" for address, link in self.links.items() if link.problem]

    def is_listed(self, address: str) -> bool:
        """Whether an address is one of `--schedulers`, or of its names as they resolve now."""
        return address in self._fixed or any(address in name.addresses for name in self._names)

    def lost(self, address: str) -> None:
        """The stream to an address broke: it may be gone, or replaced by another one."""
        for name in self._names:
            if address in name.addresses or address in name.missed:
                name.is_due.set()
        self._drop_gone()

    async def run(self) -> None:
        """Opens the streams, and opens them again; ends only by cancellation."""
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
            # Many that are lost at once are one reason to ask.
            await asyncio.sleep(min(_MIN_INTERVAL_S, self._resolver.interval_s))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._resolver.interval_s):
                    await name.is_due.wait()

    async def _look_up(self, name: _Name) -> None:
        problem = None
        try:
            found = frozenset(await self._resolver.resolve(name.target))
        except (OSError, UnicodeError) as error:
            # UnicodeError: no name of a host can be like this.
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
        """Ends the links to addresses that no name has any more, unless they have requests to end, or might be back."""
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
