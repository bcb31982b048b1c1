"""Channels of the simulated transport: they replace gRPC's core below grpc.aio, whose own calls run unchanged."""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
from grpc._cython import cygrpc  # type: ignore[attr-defined]
from grpc.aio import _channel, _utils  # type: ignore[attr-defined]

from quire.runtime import clock, entropy
from tests.sim.world.hang_ups import ON_WAIT_ENDED
from tests.sim.world.network import Connection, Network
from tests.sim.world.streams import Metadata, Status, Stream, Window
from tests.sim.world.world import Node

_CONNECT_TIMEOUT_S = 20.0
_NO_PATIENCE_S = 7200.0
_Connectivity = grpc.ChannelConnectivity

# grpc.aio derives deadlines from `time.time()`. Outside of worlds the seam gives the same time.
_utils.time = SimpleNamespace(time=clock.unix_s)  # pyrefly: ignore[bad-assignment]


class SimChannel(_channel.Channel):
    """A channel of grpc.aio over the simulated network."""

    def __init__(self, core: "ChannelCore") -> None:
        # The base class sets these attributes, but its own constructor opens a connection of gRPC's core.
        self._unary_unary_interceptors = []
        self._unary_stream_interceptors = []
        self._stream_unary_interceptors = []
        self._stream_stream_interceptors = []
        self._loop = core.loop
        self._channel = core

    async def _close(self, grace: float | None) -> None:
        """Cancels the calls that have grpc.aio tasks, as the base class does; other calls live on. The base class finds
        these tasks in a set, in an order that differs between runs."""
        core: Any = self._channel
        if core.closed():
            return
        core.closing()
        calls: list[CallCore] = core.all_calls()
        found: list[tuple[asyncio.Task[Any], Any]] = []
        for task in core.loop.tasks:
            stack = task.get_stack(limit=1)
            owner = stack[0].f_locals.get("self") if stack else None
            if isinstance(owner, grpc.aio.Call) and getattr(owner, "_cython_call", None) in calls:
                found.append((task, owner))
        if grace and found:
            await asyncio.wait([task for task, _ in found], timeout=grace)
        for _, call in found:
            call.cancel()
        core.close()


@dataclass(frozen=True, slots=True)
class _Backoff:
    initial_s: float
    maximum_s: float
    connect_s: float


class ChannelCore:
    """A channel's connection, which may be lost and made again. It has the surface of cygrpc's AioChannel."""

    def __init__(self, network: Network, node: Node, address: str, options: dict[str, Any]) -> None:
        self.node = node
        self.loop = node.loop
        self.network = network
        self.calls: list[CallCore] = []
        self.max_receive_bytes: int = options.get("grpc.max_receive_message_length", 4 * 1024 * 1024)
        self.authority = options.get("grpc.default_authority", address)
        self._address = address
        self._backoff = _Backoff(
            options.get("grpc.initial_reconnect_backoff_ms", 1000) / 1e3,
            options.get("grpc.max_reconnect_backoff_ms", 120_000) / 1e3,
            options.get("grpc.min_reconnect_backoff_ms", 20_000) / 1e3,
        )
        self._patience_s = _NO_PATIENCE_S
        if "grpc.keepalive_time_ms" in options:
            self._patience_s = (
                options["grpc.keepalive_time_ms"] + options.get("grpc.keepalive_timeout_ms", 20_000)
            ) / 1e3
        self._state = _Connectivity.IDLE
        self._watchers: list[asyncio.Future[None]] = []
        self._waiting: list[CallCore] = []
        self._num_failures = 0
        self._connection: Connection | None = None
        self._streams: dict[int, CallCore] = {}
        self._ids = itertools.count(1, 2)
        self._is_closed = False
        self._problem = ""
        self.on_state: Callable[[grpc.ChannelConnectivity], None] = lambda _: None

    # The surface of AioChannel

    def call(self, method: bytes, deadline: float | None, credentials: Any, wait_for_ready: bool | None) -> "CallCore":
        if self._is_closed:
            raise cygrpc.UsageError("Channel is closed.")
        return CallCore(self, method.decode(), deadline, wait_for_ready=bool(wait_for_ready))

    def all_calls(self) -> "list[CallCore]":
        """Calls of the channel that are not over."""
        return list(self.calls)

    def closing(self) -> None:
        """Accepts no new calls."""
        self._is_closed = True

    def close(self) -> None:
        self._is_closed = True
        self._set_state(_Connectivity.SHUTDOWN)
        self._leave_connection()

    def closed(self) -> bool:
        return self._is_closed

    def check_connectivity_state(self, try_to_connect: bool) -> int:
        if try_to_connect and self._state is _Connectivity.IDLE:
            self._connect()
        return self._state.value[0]

    async def watch_connectivity_state(self, last_observed_state: int, deadline: float | None) -> bool:
        if self._state.value[0] == last_observed_state:
            changed = self.loop.create_future()
            self._watchers.append(changed)
            await changed
        return True

    # Calls

    def place(self, call: "CallCore") -> None:
        """Starts a call on the connection. Without a connection the call fails, unless it waits for one."""
        if self._connection is not None:
            self._start(call, self._connection)
        elif self._state is _Connectivity.TRANSIENT_FAILURE and not call.waits_for_ready:
            call.fail(Status(grpc.StatusCode.UNAVAILABLE, self._problem))
        else:
            self._waiting.append(call)
            if self._state is _Connectivity.IDLE:
                self._connect()

    def leave(self, call: "CallCore") -> None:
        """Removes a call that is over."""
        for calls in (self.calls, self._waiting):
            if call in calls:
                calls.remove(call)
        if call.stream_id is not None:
            self._streams.pop(call.stream_id, None)
        if self._is_closed:
            self._leave_connection()

    def _leave_connection(self) -> None:
        """Closes the connection of a closed channel after its last call."""
        if not self.calls and self._connection is not None:
            self._connection.close_client()
            self._connection = None

    def _start(self, call: "CallCore", connection: Connection) -> None:
        stream_id = next(self._ids)
        self._streams[stream_id] = call
        call.started(stream_id, connection)

    # Connecting

    def _connect(self) -> None:
        self._set_state(_Connectivity.CONNECTING)
        self.network.attempt(self.node, self._address)
        attempt = _Attempt(self)
        attempt.begin()

    def connected(self, connection: Connection) -> None:
        connection.on_client_lost = lambda why: self._lost(connection, why)
        connection.on_going_away = lambda: self.going_away(connection)
        self._connection = connection
        self._num_failures = 0
        self._set_state(_Connectivity.READY)
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            self.place(call)

    def going_away(self, connection: Connection) -> None:
        """The server takes no new calls on this connection."""
        if self._connection is connection:
            self._connection = None
            self._set_state(_Connectivity.IDLE)

    def refused(self, why: str) -> None:
        if self._is_closed:
            return
        self._problem = f"failed to connect to all addresses; last error: UNAVAILABLE: ipv4:{self._address}: {why}"
        backoff = self._backoff
        delay_s = min(backoff.initial_s * 1.6**self._num_failures, backoff.maximum_s)
        self._num_failures += 1
        self._set_state(_Connectivity.TRANSIENT_FAILURE)
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            self.place(call)
        self.loop.call_later(delay_s * entropy.uniform(0.8, 1.2), self._connect_again)

    def _connect_again(self) -> None:
        if not self._is_closed and self._state is _Connectivity.TRANSIENT_FAILURE:
            self._connect()

    def _lost(self, connection: Connection, why: str) -> None:
        lost = [call for call in self._streams.values() if call.connection is connection]
        for call in lost:
            call.lost(Status(grpc.StatusCode.UNAVAILABLE, why))
        if self._connection is connection:
            self._connection = None
            self._set_state(_Connectivity.IDLE)

    def _set_state(self, state: _Connectivity) -> None:
        self._state = state
        self.on_state(state)
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            if not watcher.done():
                watcher.set_result(None)

    def connect(self) -> None:
        """Connects if the channel is idle."""
        if self._state is _Connectivity.IDLE and not self._is_closed:
            self._connect()

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    @property
    def problem(self) -> str:
        """The error of the last attempt to connect."""
        return self._problem

    @property
    def address(self) -> str:
        return self._address

    @property
    def patience_s(self) -> float:
        return self._patience_s

    @property
    def connect_s(self) -> float:
        return self._backoff.connect_s

    @property
    def is_closed(self) -> bool:
        return self._is_closed


class _Attempt:
    """One attempt to connect: one message in each direction, or a timeout."""

    def __init__(self, channel: ChannelCore) -> None:
        self._channel = channel
        self._is_over = False
        self._timer = channel.loop.call_later(channel.connect_s, self._end, None, "connection attempt timed out")

    def begin(self) -> None:
        channel = self._channel
        network, node = channel.network, channel.node
        host, port = network.resolve(node.host, channel.address)
        network.world.note("connect", node.name, channel.address)
        if host == node.host or network.is_open(node.host, host):
            listener = network.listeners.get((host, port))
            delay = network.world.random.uniform(network.weather.min_delay_s, network.weather.max_delay_s)
            if listener is None:
                network.world.after(2 * delay, lambda: self._answer("Connection refused"))
                return
            connection = Connection(
                network,
                node,
                listener.node,
                client_patience_s=channel.patience_s,
                server_patience_s=listener.patience_s,
            )
            connection.on_client_lost = lambda why: self._end(None, why)

            def accept() -> None:
                listener.accept(connection, lambda: self._end(connection, ""))

            connection.up.send("hello", accept)

    def _answer(self, why: str) -> None:
        loop, node = self._channel.loop, self._channel.node
        loop.put(asyncio.Handle(self._end, (None, why), loop, node.context))

    def _end(self, connection: Connection | None, why: str) -> None:
        if self._is_over or self._channel.is_closed:
            if connection is not None:
                connection.close_client()
            return
        self._is_over = True
        self._timer.cancel()
        if connection is None:
            self._channel.refused(why)
        else:
            self._channel.connected(connection)


class CallCore:
    """One call at the level of gRPC's core. It has the surface of cygrpc's _AioCall."""

    def __init__(self, channel: ChannelCore, method: str, deadline: float | None, *, wait_for_ready: bool) -> None:
        self._channel = channel
        self._loop = channel.loop
        self._method = method
        self._deadline = deadline
        self.waits_for_ready = wait_for_ready
        self.stream_id: int | None = None
        self.connection: Connection | None = None
        self._metadata: Metadata = ()
        # State of the Python layer.
        self._status: Status | None = None
        self._initial_metadata: Metadata | None = None
        self._status_waiters: list[asyncio.Future[None]] = []
        self._metadata_waiters: list[asyncio.Future[None]] = []
        self._done_callbacks: list[Callable[[], None]] = []
        self._is_locally_cancelled = False
        # State of the core.
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._received_metadata: asyncio.Future[Metadata] = self._loop.create_future()
        self._received_status: asyncio.Future[Status] = self._loop.create_future()
        self._final: Status | None = None
        self._inbox = Stream(self._loop)
        self._window: Window | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.on_wait_ended = ON_WAIT_ENDED.get()
        channel.calls.append(self)
        if deadline is not None:
            self._timer = self._loop.call_later(max(deadline - clock.unix_s(), 0), self._expire)

    # The surface of _AioCall

    def done(self) -> bool:
        return self._status is not None

    def cancelled(self) -> bool:
        return self._status is not None and self._status.grpc_code is grpc.StatusCode.CANCELLED

    def is_ok(self) -> bool:
        return self._status is not None and self._status.grpc_code is grpc.StatusCode.OK

    def is_locally_cancelled(self) -> bool:
        return self._is_locally_cancelled

    def time_remaining(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - clock.unix_s())

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        if self.done():
            callback()
        else:
            self._done_callbacks.append(callback)

    def cancel(self, details: str) -> None:
        self._is_locally_cancelled = True
        status = Status(grpc.StatusCode.CANCELLED, details)
        self._set_status(status)
        self._abandon(status)

    async def status(self) -> Status:
        while self._status is None:
            waiter = self._loop.create_future()
            self._status_waiters.append(waiter)
            await waiter
        return self._status

    async def initial_metadata(self) -> Metadata:
        while self._initial_metadata is None:
            waiter = self._loop.create_future()
            self._metadata_waiters.append(waiter)
            await waiter
        return self._initial_metadata

    def set_internal_error(self, error_str: str) -> None:
        self._set_status(Status(grpc.StatusCode.INTERNAL, "Internal error from Core"))

    async def unary_unary(self, request: bytes, metadata: Metadata, context: Any = None) -> bytes | None:
        self._begin(metadata)
        try:
            await self._started
            await self._send(request, half_close=True)
        except cygrpc.ExecuteBatchError:
            pass
        self._set_initial_metadata(await self._received_metadata)
        message = await self._inbox.take()
        self._note_read(message)
        return await self._unary_end(message)

    async def initiate_unary_stream(self, request: bytes, metadata: Metadata, context: Any = None) -> None:
        watching = self._loop.create_task(self._take_status())
        self._begin(metadata)
        try:
            await self._started
            await self._send(request, half_close=True)
            self._set_initial_metadata(await self._received_metadata)
        except cygrpc.ExecuteBatchError:
            await watching

    async def stream_unary(self, metadata: Metadata, on_sent: Callable[[], None], context: Any = None) -> bytes | None:
        self._begin(metadata)
        try:
            await self._started
            on_sent()
            self._set_initial_metadata(await self._received_metadata)
        except cygrpc.ExecuteBatchError:
            await self._take_status()
            on_sent()
            return None
        message = await self._inbox.take()
        self._note_read(message)
        return await self._unary_end(message)

    async def initiate_stream_stream(
        self, metadata: Metadata, on_sent: Callable[[], None], context: Any = None
    ) -> None:
        watching = self._loop.create_task(self._take_status())
        self._begin(metadata)
        try:
            await self._started
            on_sent()
            self._set_initial_metadata(await self._received_metadata)
        except cygrpc.ExecuteBatchError:
            await watching
            on_sent()

    async def send_serialized_message(self, message: bytes) -> None:
        await self._send(message)

    async def send_receive_close(self) -> None:
        if self._final is None and self.connection is not None:
            stream_id, server = self.stream_id, self._server()
            self.connection.up.send("half close", lambda: server.half_closed(stream_id))

    async def receive_serialized_message(self) -> Any:
        message = await self._inbox.take()
        if message is None:
            return cygrpc.EOF
        self._note_read(message)
        return message

    def move_to(self, channel: ChannelCore) -> None:
        """Starts the call on one of several channels."""
        self._channel = channel
        channel.calls.append(self)
        channel.place(self)

    # Events of the connection

    def started(self, stream_id: int, connection: Connection) -> None:
        self.stream_id, self.connection = stream_id, connection
        self._window = Window(self._loop, connection.network.weather.window_bytes)
        if not self._started.done():
            self._started.set_result(None)
        remaining = self.time_remaining()
        server, method, metadata = self._server(), self._method, self._metadata
        connection.up.send(f"call {method}", lambda: server.called(stream_id, method, metadata, remaining, self))

    def take_metadata(self, metadata: Metadata) -> None:
        if not self._received_metadata.done():
            self._received_metadata.set_result(metadata)

    def take_message(self, message: bytes) -> None:
        if self._final is not None:
            return
        limit = self._channel.max_receive_bytes
        if 0 <= limit < len(message):
            text = f"CLIENT: Received message larger than max ({len(message)} vs. {limit})"
            self._abandon(Status(grpc.StatusCode.RESOURCE_EXHAUSTED, text))
            return
        self._inbox.put(message)

    def take_status(self, status: Status) -> None:
        """The server has ended the call; unread messages stay."""
        self._end(status, drop_unread=False)

    def take_credit(self, num_bytes: int) -> None:
        if self._window is not None:
            self._window.give(num_bytes)

    def lost(self, status: Status) -> None:
        """The connection is lost, and unread messages with it."""
        self._end(status, drop_unread=True)

    def fail(self, status: Status) -> None:
        """The call could not be started."""
        self._end(status, drop_unread=True)

    # Below

    def _server(self) -> Any:
        assert self.connection is not None
        return self.connection.server_end

    def _begin(self, metadata: Metadata) -> None:
        self._metadata = tuple(metadata)
        if self._final is None:
            self._channel.place(self)

    async def _send(self, message: bytes, *, half_close: bool = False) -> None:
        window = self._window
        if self._final is not None or window is None:
            raise cygrpc.ExecuteBatchError("the call is over")
        stream_id, server, connection = self.stream_id, self._server(), self.connection
        assert connection is not None
        window.take(len(message))
        connection.up.send("message", lambda: server.message(stream_id, message), len(message))
        if half_close:
            connection.up.send("half close", lambda: server.half_closed(stream_id))
        if not await window.is_open():
            raise cygrpc.ExecuteBatchError("the call is over")

    def _note_read(self, message: bytes | None) -> None:
        if message is not None and self.connection is not None and self._final is None:
            stream_id, server = self.stream_id, self._server()
            if num_bytes := self._inbox.credit(len(message), self.connection.network.weather.window_bytes):
                self.connection.up.send("credit", lambda: server.credit(stream_id, num_bytes))
        self._publish_status()

    async def _unary_end(self, message: bytes | None) -> bytes | None:
        status = await self._received_status
        if self._is_locally_cancelled:
            return None
        self._set_status(status)
        return message if self.is_ok() else None

    async def _take_status(self) -> None:
        status = await self._received_status
        if not self._is_locally_cancelled:
            self._set_status(status)

    def _expire(self) -> None:
        self._abandon(Status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def _abandon(self, status: Status) -> None:
        """Ends the call from this side, and notifies the server."""
        if self._final is None and self.connection is not None:
            stream_id, server = self.stream_id, self._server()
            self.connection.up.send("reset", lambda: server.reset(stream_id))
        self._end(status, drop_unread=True)

    def _end(self, status: Status, *, drop_unread: bool) -> None:
        if self._final is not None:
            return
        self._final = status
        self._channel.leave(self)
        if self._timer is not None:
            self._timer.cancel()
        if not self._started.done():
            self._started.set_exception(cygrpc.ExecuteBatchError("the call has failed"))
            # Marks the error as retrieved: asyncio would report it if no task waits for it.
            self._started.exception()
        self.take_metadata(())
        if self._window is not None:
            self._window.close()
        self._inbox.end(drop_unread=drop_unread)
        self._publish_status()

    def _publish_status(self) -> None:
        """Publishes the status after the last message was read."""
        if self._final is not None and self._inbox.is_empty and not self._received_status.done():
            self._received_status.set_result(self._final)

    def _set_status(self, status: Status) -> None:
        self._status = status
        self._set_initial_metadata(())
        for waiter in self._status_waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._status_waiters.clear()
        for callback in self._done_callbacks:
            callback()
        self._done_callbacks = []

    def _set_initial_metadata(self, metadata: Metadata) -> None:
        if self._initial_metadata is not None:
            return
        self._initial_metadata = metadata
        for waiter in self._metadata_waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._metadata_waiters.clear()
