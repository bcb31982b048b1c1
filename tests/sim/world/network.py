"""Hosts, and connections between their processes: bytes arrive in order, late, or not at all."""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.sim.world.world import Node, World

_ATTEMPTS, _ATTEMPTS_S = 40, 3.0
"""No service tries more often than that to connect to an address within so many seconds."""
_OWN_NAMES = frozenset({"127.0.0.1", "localhost", "0.0.0.0", "[::]", "[::1]"})


@dataclass(frozen=True, slots=True)
class Weather:
    """How the network of a world is.

    Attributes:
        min_delay_s, max_delay_s: What a message takes from host to host; each connection has its own order.
        bytes_per_s: The bandwidth of a connection.
        window_bytes: How much of a stream's messages may be on the way to a reader that does not read.
    """

    min_delay_s: float = 0.000_05
    max_delay_s: float = 0.001
    bytes_per_s: float = 1e9
    window_bytes: int = 128 * 1024


class Network:
    """Who listens where, and which ways are cut.

    A way that is cut loses nothing: what is sent waits, as TCP sends it again and again, until the way is open or an
    end gives the connection up.
    """

    def __init__(self, world: World, weather: Weather | None = None) -> None:
        self.world = world
        self.weather = weather or Weather()
        self.listeners: dict[tuple[str, str], Listener] = {}
        self.dark: set[str] = set()
        """Hosts without power: they answer nothing, not even that nobody listens."""
        self.names: dict[str, str] = {}
        """The host of each IP address that one has."""
        self._cut: set[tuple[str, str]] = set()
        self._pipes: list[Pipe] = []
        self.connections: list[Connection] = []
        self._numbers: dict[tuple[str, str], itertools.count[int]] = {}
        self._ports = itertools.count(20_001)
        self._attempts: dict[tuple[str, str], deque[float]] = {}

    def free_port(self) -> int:
        return next(self._ports)

    def attempt(self, node: Node, address: str) -> None:
        """A process tries to connect. Services that nobody answers try less and less often."""
        times = self._attempts.setdefault((node.name, address), deque(maxlen=_ATTEMPTS))
        is_service = node.host.startswith(("gateway", "scheduler"))
        if is_service and len(times) == _ATTEMPTS and self.world.now - times[0] < _ATTEMPTS_S:
            node.fail(AssertionError(f"{_ATTEMPTS + 1} attempts to connect to {address} within {_ATTEMPTS_S:g} s"))
        times.append(self.world.now)

    def resolve(self, host: str, address: str) -> tuple[str, str]:
        """The host and the port, or the path, that an address means on a host."""
        if address.startswith("unix:"):
            return host, address
        name, _, port = address.rpartition(":")
        return (host if name in _OWN_NAMES else self.names.get(name, name)), port

    def next_number(self, client: Node, server: Node) -> int:
        """How many connections there have been from one process to the other, with this one."""
        return next(self._numbers.setdefault((client.name, server.name), itertools.count(1)))

    def is_open(self, source: str, destination: str) -> bool:
        return source == destination or (
            (source, destination) not in self._cut and source not in self.dark and destination not in self.dark
        )

    def cut(self, source: str, destination: str) -> None:
        """From one host to the other; the way back stays open."""
        self.world.note("cut", source, destination)
        self._cut.add((source, destination))
        self._doubt(source, destination)

    def heal(self, source: str, destination: str) -> None:
        self.world.note("heal", source, destination)
        self._cut.discard((source, destination))
        for pipe in self._pipes:
            if (pipe.source.host, pipe.destination.host) == (source, destination):
                pipe.flush()

    def power_off(self, host: str) -> None:
        """All processes of the host end, and nobody is told: their connections stay half open."""
        self.world.note("power off", host)
        self.dark.add(host)
        for node in self.world.nodes:
            if node.host == host:
                node.kill()
        for connection in self.connections:
            if host in connection.hosts:
                connection.watch()

    def power_on(self, host: str) -> None:
        """It answers again: that it knows nothing of the connections from before."""
        self.world.note("power on", host)
        self.dark.discard(host)
        for connection in list(self.connections):
            if host in connection.hosts:
                connection.close_client_end("Connection reset by peer")
                connection.close_server_end("Connection reset by peer")

    def _doubt(self, source: str, destination: str) -> None:
        for connection in self.connections:
            if set(connection.hosts) == {source, destination}:
                connection.watch()

    def add_pipe(self, pipe: "Pipe") -> None:
        self._pipes.append(pipe)

    def forget(self, connection: "Connection") -> None:
        if connection in self.connections:
            self.connections.remove(connection)
        for pipe in (connection.up, connection.down):
            if pipe in self._pipes:
                self._pipes.remove(pipe)


class Listener:
    """A server's end: takes connections."""

    def __init__(
        self, node: Node, accept: Callable[["Connection", Callable[[], None]], None], patience_s: float
    ) -> None:
        self.node = node
        self.accept = accept
        self.patience_s = patience_s


class Pipe:
    """One direction of a connection, or of its beginning."""

    def __init__(self, network: Network, source: Node, destination: Node, name: str) -> None:
        self.source = source
        self.destination = destination
        self._network = network
        self.name = name
        self._chance = network.world.generator(name)
        self._arrives_at = 0.0
        self._sent: deque[tuple[str, Callable[[], None]]] = deque()
        """What has not arrived, in its order: what waited for a way to open is overtaken by nothing."""
        self._num_held = 0
        """How much of it would have arrived, were the way open."""
        self.is_silent = False
        """Nothing that is sent arrives any more."""
        network.add_pipe(self)

    def send(self, what: str, action: Callable[[], None], size: int = 0) -> None:
        """Does `action` in the process at the other end, when the message has arrived there. A process that is dead
        sends nothing: what still runs of it are the last moments of the call that it was killed in."""
        if not self.source.is_dead:
            self.deliver(what, action, size)

    def deliver(self, what: str, action: Callable[[], None], size: int = 0) -> None:
        """The same for what the kernel sends."""
        self._sent.append((what, action))
        self._carry(size)

    def flush(self) -> None:
        """The way is open again."""
        num_held, self._num_held = self._num_held, 0
        for _ in range(num_held):
            self._carry(0)

    def _carry(self, size: int) -> None:
        world, weather = self._network.world, self._network.weather
        local = self.source.host == self.destination.host
        delay = weather.min_delay_s if local else self._chance.uniform(weather.min_delay_s, weather.max_delay_s)
        self._arrives_at = max(self._arrives_at, world.now + delay) + size / weather.bytes_per_s
        world.at(self._arrives_at, self._arrive)

    def _arrive(self) -> None:
        if self.is_silent:
            return
        if self._num_held or not self._network.is_open(self.source.host, self.destination.host):
            self._num_held += 1
            return
        what, action = self._sent.popleft()
        node = self.destination
        if not node.is_dead:
            self._network.world.note(self.name, what)
            node.loop.put(asyncio.Handle(action, (), node.loop, node.context))


class Connection:
    """A connection between two processes. `on_lost` of an end is called once, where it learns of the other's end."""

    def __init__(
        self, network: Network, client: Node, server: Node, *, client_patience_s: float, server_patience_s: float
    ) -> None:
        self.network = network
        self.client, self.server = client, server
        name = f"connection {network.next_number(client, server)} of {client.name} to {server.name}"
        self.up = Pipe(network, client, server, f"{name} up")
        self.down = Pipe(network, server, client, f"{name} down")
        self.on_client_lost: Callable[[str], None] = lambda _: None
        self.on_server_lost: Callable[[str], None] = lambda _: None
        self.on_going_away: Callable[[], None] | None = None
        self.server_end: Any = None
        self._patience = (client_patience_s, server_patience_s)
        self._client_open = self._server_open = True
        network.connections.append(self)
        client.on_end.append(self._client_died)
        server.on_end.append(self._server_died)

    @property
    def hosts(self) -> tuple[str, str]:
        return self.client.host, self.server.host

    @property
    def is_open(self) -> bool:
        return self._client_open and self._server_open

    def close_client(self) -> None:
        """The client leaves; the server learns of it."""
        if self._client_open:
            self._client_open = False
            self.up.send("close", lambda: self._lose_server("the client closed the connection"))
            self._forget_if_over()

    def close_server(self) -> None:
        if self._server_open:
            self._server_open = False
            self.down.send("close", lambda: self._lose_client("Socket closed"))
            self._forget_if_over()

    def reset(self) -> None:
        """Something between them ends it: both learn of it."""
        self.network.world.note("reset", *self.hosts)
        self.close_client_end("Connection reset by peer")
        self.close_server_end("Connection reset by peer")

    def go_silent(self) -> None:
        """What is between its ends has forgotten it: it is half open until the ends notice that by pings."""
        self.network.world.note("silent", *self.hosts)
        self.up.is_silent = self.down.is_silent = True
        self.watch()

    def close_client_end(self, why: str) -> None:
        node = self.client
        if not node.is_dead:
            node.loop.put(asyncio.Handle(self._lose_client, (why,), node.loop, node.context))

    def close_server_end(self, why: str) -> None:
        node = self.server
        if not node.is_dead:
            node.loop.put(asyncio.Handle(self._lose_server, (why,), node.loop, node.context))

    def watch(self) -> None:
        """A way is cut: each end pings, and gives the connection up when it gets no answer for its patience."""
        for patience, give_up in zip(self._patience, (self.close_client_end, self.close_server_end), strict=True):
            jitter = self.network.world.random.uniform(0.5, 1.0)

            def check(give_up: Callable[[str], None] = give_up) -> None:
                there, back = self.hosts
                is_open = self.network.is_open(there, back) and self.network.is_open(back, there)
                if self.up.is_silent or not is_open:
                    give_up("ping timeout")

            self.network.world.after(patience * jitter, check)

    def _lose_client(self, why: str) -> None:
        if self._client_open:
            self._client_open = False
            self.on_client_lost(why)
            self.up.send("close", lambda: self._lose_server("the client gave the connection up"))
            self._forget_if_over()

    def _lose_server(self, why: str) -> None:
        if self._server_open:
            self._server_open = False
            self.on_server_lost(why)
            self.down.send("close", lambda: self._lose_client("Socket closed"))
            self._forget_if_over()

    def _client_died(self) -> None:
        self._client_open = False
        if self.client.host not in self.network.dark:
            self.up.deliver("close", lambda: self._lose_server("the client died"))

    def _server_died(self) -> None:
        self._server_open = False
        if self.server.host not in self.network.dark:
            self.down.deliver("close", lambda: self._lose_client("Socket closed"))

    def _forget_if_over(self) -> None:
        if not self._client_open and not self._server_open:
            self.network.forget(self)
            for node, died in ((self.client, self._client_died), (self.server, self._server_died)):
                if died in node.on_end:
                    node.on_end.remove(died)
