"""HTTP in a world: sockets over its simulated network, with the gateway's own HTTP server at one end."""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from gateway.server.connections import HttpServer
from quire.rpc.address import TcpAddress
from quire.rpc.transport import TRANSPORT
from tests.sim.world.network import Connection, Listener, Network
from tests.sim.world.transport import SimTransport
from tests.sim.world.world import Node

_PATIENCE_S = 7200.0
"""Seconds that the kernel waits for a silent peer."""
_CONNECT_S = 10.0
_HIGH_WATER = 64 * 1024
_SPLIT = 0.2
"""The share of writes that arrive in two parts, cut anywhere."""
_LOSSES = frozenset({"Connection reset by peer", "ping timeout"})
"""Reasons that the kernel reports as an error; other ends of a connection are an end of file."""


class Socket(asyncio.Transport):
    """One end of a connection, as an asyncio transport: written data waits until the other end's window has room, and
    reading makes room there."""

    def __init__(self, network: Network, connection: Connection, *, is_client: bool) -> None:
        super().__init__()
        self._connection, self._is_client = connection, is_client
        self._node = connection.client if is_client else connection.server
        self._pipe = connection.up if is_client else connection.down
        self._chance = network.world.generator(f"{self._pipe.name} parts")
        self._window = self._room = network.weather.window_bytes
        self._high_water = min(_HIGH_WATER, 4 * self._window)
        self._waiting = bytearray()
        self._unread: deque[bytes] = deque()
        self._num_read = 0
        self._protocol: Any = None
        self._reads = True
        self._is_full = self._is_closing = self._is_over = False
        self._loss: str | None = None
        self.peer: Socket | None = None
        if is_client:
            connection.on_client_lost = self._lost
        else:
            connection.on_server_lost = self._lost

    def open(self, protocol: Any) -> None:
        self._protocol = protocol
        protocol.connection_made(self)

    # The surface of asyncio.Transport

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return (self._connection.client.host, 1) if name == "peername" and not self._is_client else default

    def write(self, data: Any) -> None:
        if self._loss is not None:
            self._end(BrokenPipeError(self._loss))
        if not self._is_closing:
            self._waiting += data
            self._flush()
            if not self._is_full and len(self._waiting) > self._high_water:
                self._is_full = True
                self._protocol.pause_writing()

    def get_write_buffer_size(self) -> int:
        return len(self._waiting)

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        """Closes after the written data has gone out."""
        if not self._is_closing:
            self._is_closing = True
            self._end_if_written()

    def abort(self) -> None:
        self._is_closing = True
        self._waiting.clear()
        self._end_if_written()

    def is_reading(self) -> bool:
        return self._reads and not self._is_closing

    def pause_reading(self) -> None:
        self._reads = False

    def resume_reading(self) -> None:
        if not self._reads:
            self._reads = True
            self._node.loop.call_soon(self._read)

    # Below

    def _flush(self) -> None:
        while self._waiting and self._room > 0 and self.peer is not None:
            count = min(len(self._waiting), self._room)
            if self._chance.random() < _SPLIT:
                count = self._chance.randint(1, count)
            self._pipe.send("bytes", partial(self.peer.arrive, bytes(self._waiting[:count])), count)
            del self._waiting[:count]
            self._room -= count
        if self._is_full and len(self._waiting) <= self._high_water // 4 and not self._is_over:
            self._is_full = False
            self._protocol.resume_writing()

    def arrive(self, part: bytes) -> None:
        """Receives bytes. The kernel drops them if this end is closing."""
        if not self._is_closing:
            self._unread.append(part)
            self._read()

    def give_room(self, num_bytes: int) -> None:
        """The other end has read bytes."""
        self._room += num_bytes
        self._flush()
        if self._is_closing:
            self._end_if_written()

    def _read(self) -> None:
        while self._unread and self._reads and not self._is_closing:
            part = self._unread.popleft()
            self._num_read += len(part)
            if self._num_read >= self._window // 4 and self.peer is not None:
                self._pipe.send("window", partial(self.peer.give_room, self._num_read))
                self._num_read = 0
            self._protocol.data_received(part)
        if self._loss is not None and self._reads and not self._unread:
            self._end(None)

    def _lost(self, why: str) -> None:
        self._loss = why
        if why in _LOSSES:
            self._unread.clear()
            self._end(ConnectionResetError(why))
        else:
            self._read()

    def _end_if_written(self) -> None:
        if not self._waiting and not self._is_over:
            self._connection.close_client() if self._is_client else self._connection.close_server()
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        if not self._is_over:
            self._is_closing = self._is_over = True
            self._waiting.clear()
            if error is None and self._loss is not None:
                self._protocol.eof_received()
            self._node.loop.call_soon(self._protocol.connection_lost, error)


class _Port:
    """The listening port of an HTTP server, with the surface of a socket and of asyncio's server."""

    def __init__(self, network: Network, node: Node, address: TcpAddress) -> None:
        self._network, self._node, self._address = network, node, address
        self._place = network.resolve(node.host, str(address))

    def listen(self, make_protocol: Callable[[], Any]) -> None:
        def accept(connection: Connection, welcome: Callable[[], None]) -> None:
            end = connection.server_end = Socket(self._network, connection, is_client=False)
            connection.down.send("welcome", welcome)
            end.open(make_protocol())

        self._network.listeners[self._place] = Listener(self._node, accept, _PATIENCE_S)
        self._node.on_end.append(self.close)

    def getsockname(self) -> tuple[str, int]:
        return self._address.host, self._address.port

    def close(self) -> None:
        listener = self._network.listeners.get(self._place)
        if listener is not None and listener.node is self._node:
            del self._network.listeners[self._place]

    async def wait_closed(self) -> None:
        """Returns at once."""


class _Connections(dict[Any, None]):
    """A set in the order of arrival: protocols have no order that is the same in every process."""

    def add(self, connection: Any) -> None:
        self[connection] = None

    def discard(self, connection: Any) -> None:
        self.pop(connection, None)


class SimHttpServer(HttpServer):
    """The gateway's HTTP server over the simulated network."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.state.connections = cast(Any, _Connections())

    def _bind(self, host: str, port: int, *, reuse_port: bool) -> Any:
        transport = TRANSPORT.get()
        assert isinstance(transport, SimTransport)
        return _Port(transport.network, transport.node, TcpAddress(host, port))

    async def _listen(self) -> Any:
        listener = cast(Any, self._listener)
        listener.listen(self.make_protocol)
        return listener


async def connect(network: Network, node: Node, address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connects a client. Raises OSError if no server answers."""
    place = network.resolve(node.host, address)
    listener = network.listeners.get(place)
    network.world.note("connect", node.name, address)
    if not network.is_open(node.host, place[0]):
        await asyncio.sleep(_CONNECT_S)
        raise TimeoutError("nobody answers")
    if listener is None:
        await asyncio.sleep(2 * network.weather.max_delay_s)
        raise ConnectionRefusedError("nobody listens")
    connection = Connection(
        network, node, listener.node, client_patience_s=_PATIENCE_S, server_patience_s=listener.patience_s
    )
    loop = asyncio.get_running_loop()
    opened: asyncio.Future[None] = loop.create_future()
    reader = asyncio.StreamReader(limit=network.weather.window_bytes)
    protocol = asyncio.StreamReaderProtocol(reader)

    def welcomed() -> None:
        if not opened.done():
            socket.peer, connection.server_end.peer = connection.server_end, socket
            socket.open(protocol)
            opened.set_result(None)

    def lost(why: str) -> None:
        if not opened.done():
            opened.set_exception(ConnectionResetError(why))

    socket = Socket(network, connection, is_client=True)
    connection.on_client_lost, on_lost = lost, connection.on_client_lost
    connection.up.send("hello", lambda: listener.accept(connection, welcomed))
    try:
        async with asyncio.timeout(_CONNECT_S):
            await opened
    except BaseException as error:
        # A process that was stopped meanwhile finds its connection open.
        is_open = opened.done() and not opened.cancelled() and opened.exception() is None
        if not (is_open and isinstance(error, TimeoutError)):
            connection.close_client()
            raise
    connection.on_client_lost = on_lost
    return reader, asyncio.StreamWriter(socket, protocol, reader, loop)
