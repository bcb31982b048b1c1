"""Hosts, and connections between their processes: bytes arrive in order, late, or not at all."""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.sim.world.world import Node, World

_ATTEMPTS, _ATTEMPTS_S = 40, 3.0
"""Maximum attempts of a service to connect to an address, in this many seconds."""
_OWN_NAMES = frozenset({"127.0.0.1", "localhost", "0.0.0.0", "[::]", "[::1]"})


@dataclass(frozen=True, slots=True)
class Weather:
    """Properties of a world's network.

    Attributes:
        min_delay_s, max_delay_s: Range of a message's delay between hosts; each connection has its own order.
        bytes_per_s: The bandwidth of a connection.
        window_bytes: Maximum bytes of a stream's messages on the way to a reader that does not read.
    """

    min_delay_s: float = 0.000_05
    max_delay_s: float = 0.001
    bytes_per_s: float = 1e9
    window_bytes: int = 128 * 1024


class Network:
    """The listeners of all hosts, and the directions that are cut.

    A cut loses no data: TCP retransmits it until the direction is open again or one end gives up the connection.
    """

    def __init__(self, world: World, weather: Weather | None = None) -> None:
        self.world = world
        self.weather = weather or Weather()
        self.listeners: dict[tuple[str, str], Listener] = {}
        self.dark: set[str] = set()
        """Hosts without power: they answer nothing, not even that a port is closed."""
        self.names: dict[str, str] = {}
        """Hosts by their IP addresses, if they have one."""
        self._cut: set[tuple[str, str]] = set()
        self._pipes: list[Pipe] = []
        self.connections: list[Connection] = []
        self._numbers: dict[tuple[str, str], itertools.count[int]] = {}
        self._ports = itertools.count(20_001)
        self._attempts: dict[tuple[str, str], deque[float]] = {}

    def free_port(self) -> int:
        return next(self._ports)

    def attempt(self, node: Node, address: str) -> None:
        """Records an attempt to connect. A service must back off if its attempts fail."""
        times = self._attempts.setdefault((node.name, address), deque(maxlen=_ATTEMPTS))
        is_service = node.host.startswith(("gateway", "scheduler"))
        if is_service and len(times) == _ATTEMPTS and self.world.now - times[0] < _ATTEMPTS_S:
            node.fail(AssertionError(f"{_ATTEMPTS + 1} attempts to connect to {address} within {_ATTEMPTS_S:g} s"))
        times.append(self.world.now)

    def resolve(self, host: str, address: str) -> tuple[str, str]:
        """The host, and the port or path, of an address as seen from a host."""
        if address.startswith("unix:"):
            return host, address
        name, _, port = address.rpartition(":")
        return (host if name in _OWN_NAMES else self.names.get(name, name)), port

    def next_number(self, client: Node, server: Node) -> int:
        """The number of connections from one process to the other so far, with this one."""
        return next(self._numbers.setdefault((client.name, server.name), itertools.count(1)))

    def is_open(self, source: str, destination: str) -> bool:
        return source == destination or (
            (source, destination) not in self._cut and source not in self.dark and destination not in self.dark
        )

    def cut(self, source: str, destination: str) -> None:
        """Cuts one direction; the opposite one stays open."""
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
        """Ends all processes of the host without notice: their connections stay half open."""
        self.world.note("power off", host)
        self.dark.add(host)
        for node in self.world.nodes:
            if node.host == host:
                node.kill()
        for connection in self.connections:
            if host in connection.hosts:
                connection.watch()

    def power_on(self, host: str) -> None:
        """Lets the host answer again: it knows nothing of its old connections."""
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
    """A server's listening end, which accepts connections."""

    def __init__(
        self, node: Node, accept: Callable[["Connection", Callable[[], None]], None], patience_s: float
    ) -> None:
        self.node = node
        self.accept = accept
        self.patience_s = patience_s


class Pipe:
    """One direction of a connection, or of an attempt to connect."""

    def __init__(self, network: Network, source: Node, destination: Node, name: str) -> None:
        self.source = source
        self.destination = destination
        self._network = network
        self.name = name
        self._chance = network.world.generator(name)
        self._arrives_at = 0.0
        self._sent: deque[tuple[str, Callable[[], None]]] = deque()
        """Messages that have not arrived, in order: nothing overtakes a message that waits for an open direction."""
        self._num_held = 0
        """Number of these messages that would have arrived if the direction were open."""
        self.is_silent = False
        """Whether sent messages no longer arrive."""
        network.add_pipe(self)

    def send(self, what: str, action: Callable[[], None], size: int = 0) -> None:
        """Runs `action` in the process at the other end when the message arrives there. A dead process sends nothing,
        even if the call in which it was killed still runs for a moment."""
        if not self.source.is_dead:
            self.deliver(what, action, size)

    def deliver(self, what: str, action: Callable[[], None], size: int = 0) -> None:
        """The same for messages of the kernel."""
        self._sent.append((what, action))
        self._carry(size)

    def flush(self) -> None:
        """Delivers the held messages, since the direction is open again."""
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
    """A connection between two processes. The `on_lost` of an end is called once, when it learns of the other's end."""

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
        """Closes the client's end; the server learns of it."""
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
        """Resets the connection from between its ends: both learn of it."""
        self.network.world.note("reset", *self.hosts)
        self.close_client_end("Connection reset by peer")
        self.close_server_end("Connection reset by peer")

    def go_silent(self) -> None:
        """Makes a device between the ends forget the connection: it is half open until the ends' pings fail."""
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
        """Starts the pings of both ends after a cut: an end without an answer within its patience gives up."""
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
