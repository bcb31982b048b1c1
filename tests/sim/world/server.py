"""Servers of the simulated transport: they replace gRPC's core and cygrpc below handlers and interceptors."""

import asyncio
import functools
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import grpc
import grpc.aio
from grpc._cython import cygrpc  # type: ignore[attr-defined]
from grpc.aio import _server  # type: ignore[attr-defined]

from quire.runtime import clock
from tests.sim.world.network import Connection, Listener, Network
from tests.sim.world.streams import Metadata, Status, Stream, Window
from tests.sim.world.world import Node

_logger = logging.getLogger("grpc._cython.cygrpc")
_NO_PATIENCE_S = 7200.0 + 20.0
_STOPPED = "Server already stopped."


class SimServer(_server.Server):
    """A server of grpc.aio over the simulated network."""

    def __init__(
        self, network: Network, node: Node, interceptors: Sequence[grpc.aio.ServerInterceptor], options: dict[str, Any]
    ) -> None:
        self._loop = node.loop
        self._server: Any = ServerCore(network, node, tuple(interceptors), options)

    def __del__(self) -> None:
        """Omits the shutdown that the base class schedules: with real sockets, these would outlive the server."""


class ServerCore:
    """Has the surface of cygrpc's AioServer."""

    def __init__(self, network: Network, node: Node, interceptors: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.network, self.node, self.loop = network, node, node.loop
        self.interceptors = interceptors
        self.max_receive_bytes: int = options.get("grpc.max_receive_message_length", 4 * 1024 * 1024)
        self.is_stopped = False
        self._patience_s = _NO_PATIENCE_S
        if "grpc.keepalive_time_ms" in options:
            self._patience_s = (
                options["grpc.keepalive_time_ms"] + options.get("grpc.keepalive_timeout_ms", 20_000)
            ) / 1e3
        self._handlers: list[Any] = []
        self._bound: list[tuple[str, str]] = []
        self._ends: list[ServerEnd] = []
        self._is_stopping = False
        self._idle: asyncio.Future[None] | None = None
        self._terminated: list[asyncio.Future[None]] = []

    # The surface of AioServer

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        self._handlers.extend(handlers)

    def add_insecure_port(self, address: bytes) -> int:
        host, port = self.network.resolve(self.node.host, address.decode())
        if port == "0":
            port = str(self.network.free_port())
        if (host, port) in self.network.listeners:
            return 0
        self._bound.append((host, port))
        # A port bound now accepts from `start` on. A real connection would wait in between; this one is refused.
        return int(port) if port.isdigit() else 1

    def add_secure_port(self, address: bytes, credentials: Any) -> int:
        raise NotImplementedError("TLS is not simulated")

    async def start(self) -> None:
        for place in self._bound:
            self.network.listeners[place] = Listener(self.node, self._accept, self._patience_s)
        self.node.on_end.append(self._stop_listening)

    async def shutdown(self, grace: float | None) -> None:
        if self.is_stopped:
            return
        if not self._is_stopping:
            self._is_stopping = True
            self._stop_listening()
            for end in self._ends:
                end.go_away()
        if grace and self._calls():
            self._idle = self.loop.create_future()
            await asyncio.wait([self._idle], timeout=grace)
        for call in self._calls():
            call.cancel_by_server()
        while running := [call.task for call in self._calls() if call.task is not None]:
            await asyncio.wait(running)
        self.is_stopped = True
        for end in list(self._ends):
            end.connection.close_server()
        for waiter in self._terminated:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_for_termination(self, timeout: float | None) -> bool:  # noqa: ASYNC109  (the name in grpc.aio)
        if self.is_stopped:
            return True
        waiter = self.loop.create_future()
        self._terminated.append(waiter)
        done, _ = await asyncio.wait([waiter], timeout=timeout)
        return not done

    def is_running(self) -> bool:
        return not self._is_stopping

    # Connections and calls

    def find(self, details: Any) -> Any:
        for handler in self._handlers:
            if (found := handler.service(details)) is not None:
                return found
        return None

    def ended(self, end: "ServerEnd") -> None:
        if end in self._ends:
            self._ends.remove(end)
        self.call_ended()

    def call_ended(self) -> None:
        if self._idle is not None and not self._idle.done() and not self._calls():
            self._idle.set_result(None)

    def _calls(self) -> list["ServerCall"]:
        return [call for end in self._ends for call in end.calls.values()]

    def _accept(self, connection: Connection, welcome: Callable[[], None]) -> None:
        if self._is_stopping:
            connection.close_server()
            return
        end = ServerEnd(self, connection)
        self._ends.append(end)
        connection.server_end = end
        connection.down.send("welcome", welcome)

    def _stop_listening(self) -> None:
        for place in self._bound:
            listener = self.network.listeners.get(place)
            if listener is not None and listener.node is self.node:
                del self.network.listeners[place]


class ServerEnd:
    """The server's end of a connection: its calls by stream id."""

    def __init__(self, server: ServerCore, connection: Connection) -> None:
        self.server, self.connection = server, connection
        self.calls: dict[int, ServerCall] = {}
        self.is_going_away = False
        connection.on_server_lost = self._lost

    def go_away(self) -> None:
        """Tells the client to open no more calls here."""
        self.is_going_away = True
        if (on_going_away := self.connection.on_going_away) is not None:
            self.connection.down.send("go away", on_going_away)

    def called(self, stream_id: int, method: str, metadata: Metadata, timeout_s: float | None, client: Any) -> None:
        if self.is_going_away:
            refusal = Status(grpc.StatusCode.UNAVAILABLE, "the connection goes away")
            self.connection.down.send("refuse", lambda: client.lost(refusal))
            return
        self.calls[stream_id] = call = ServerCall(self, stream_id, method, metadata, timeout_s, client)
        call.begin()

    def message(self, stream_id: int, message: bytes) -> None:
        if (call := self.calls.get(stream_id)) is not None:
            call.take_message(message)

    def half_closed(self, stream_id: int) -> None:
        if (call := self.calls.get(stream_id)) is not None:
            call.inbox.end(drop_unread=False)

    def credit(self, stream_id: int, num_bytes: int) -> None:
        if (call := self.calls.get(stream_id)) is not None:
            call.window.give(num_bytes)

    def reset(self, stream_id: int) -> None:
        if (call := self.calls.get(stream_id)) is not None:
            call.client_left()

    def ended(self, stream_id: int) -> None:
        self.calls.pop(stream_id, None)
        self.server.call_ended()

    def _lost(self, why: str) -> None:
        for call in list(self.calls.values()):
            call.client_left()
        self.server.ended(self)


class ServerCall:
    """One call at its server, and its servicer context."""

    def __init__(
        self, end: ServerEnd, stream_id: int, method: str, metadata: Metadata, timeout_s: float | None, client: Any
    ) -> None:
        self.end, self.stream_id, self.method, self.metadata = end, stream_id, method, metadata
        self.loop = end.server.loop
        self.client = client
        self.deadline = None if timeout_s is None else clock.monotonic() + timeout_s
        self.inbox = Stream(self.loop)
        self.window = Window(self.loop, end.server.network.weather.window_bytes)
        self.task: asyncio.Task[None] | None = None
        self.abort_error: BaseException | None = None
        self.status_sent = False
        self.metadata_sent = False
        self.client_closed = False
        self.code: grpc.StatusCode | None = None
        self.details = ""
        self.trailing: Metadata = ()
        self.callbacks: list[Callable[[], None]] = []
        self._timer = None if timeout_s is None else self.loop.call_later(timeout_s, self.client_left)

    def begin(self) -> None:
        self.task = self.loop.create_task(self._guard(self._serve()), name=f"serve {self.method}")
        self.task.add_done_callback(self._over)
        if (wait_ended := self.client.on_wait_ended) is not None:
            self.loop.watch_waits(self.task, lambda: wait_ended(self.client_left))

    def take_message(self, message: bytes) -> None:
        limit = self.end.server.max_receive_bytes
        if 0 <= limit < len(message):
            text = f"SERVER: Received message larger than max ({len(message)} vs. {limit})"
            self._send_status(Status(grpc.StatusCode.RESOURCE_EXHAUSTED, text))
            self.client_left()
            return
        self.inbox.put(message)

    def client_left(self) -> None:
        """The client cancelled the call, its deadline passed, or the connection is gone."""
        if self.client_closed:
            return
        self.client_closed = True
        self.inbox.end(drop_unread=True)
        self.window.close()
        if self.task is not None and not self.task.done() and not self.status_sent:
            self.task.cancel()

    def cancel_by_server(self) -> None:
        """Cancels the call, since the server stops before it is over."""
        if not self.status_sent:
            self._send_status(Status(grpc.StatusCode.UNAVAILABLE, "Cancelling all calls"))
            self.status_sent = False
        self.client_left()

    def check_running(self) -> None:
        if self.abort_error is not None:
            raise self.abort_error
        if self.status_sent:
            raise cygrpc.UsageError("RPC already finished.")
        if self.end.server.is_stopped:
            raise cygrpc._ServerStoppedError(_STOPPED)

    async def receive(self) -> bytes | None:
        message = await self.inbox.take()
        if message is not None and not self.client_closed:
            window_bytes = self.end.server.network.weather.window_bytes
            if num_bytes := self.inbox.credit(len(message), window_bytes):
                client = self.client
                self.end.connection.down.send("credit", lambda: client.take_credit(num_bytes))
        return message

    async def send(self, message: bytes) -> None:
        if self.client_closed:
            raise cygrpc.ExecuteBatchError("the client is gone")
        self.send_metadata(())
        client = self.client
        self.window.take(len(message))
        self.end.connection.down.send("message", lambda: client.take_message(message), len(message))
        if not await self.window.is_open():
            raise cygrpc.ExecuteBatchError("the client is gone")

    def send_metadata(self, metadata: Metadata) -> None:
        if not self.metadata_sent:
            self.metadata_sent = True
            client = self.client
            self.end.connection.down.send("metadata", lambda: client.take_metadata(metadata))

    def finish(self, status: Status) -> None:
        self.status_sent = True
        self._send_status(status)

    def _send_status(self, status: Status) -> None:
        self.status_sent = True
        if not self.client_closed:
            client = self.client
            self.send_metadata(())
            self.end.connection.down.send(f"status {status.grpc_code.name}", lambda: client.take_status(status))

    def _over(self, _: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.end.ended(self.stream_id)
        for callback in self.callbacks:
            callback()

    async def _guard(self, serving: Coroutine[Any, Any, None]) -> None:
        try:
            await serving
        except (grpc.aio.AbortError, asyncio.CancelledError):
            pass
        except cygrpc.ExecuteBatchError:
            if not self.client_closed:
                _logger.exception("a batch of %s failed", self.method)
        except Exception as error:
            if isinstance(error, cygrpc._ServerStoppedError):
                return
            _logger.exception("Unexpected [%s] raised by servicer method [%s]", type(error).__name__, self.method)
            if not self.status_sent:
                code = grpc.StatusCode.UNKNOWN if self.code in (None, grpc.StatusCode.OK) else self.code
                assert code is not None
                self.finish(Status(code, f"Unexpected {type(error)}: {error}", self.trailing))

    async def _serve(self) -> None:
        details = cygrpc._HandlerCallDetails(self.method, self.metadata)
        handler = await _intercept(iter(self.end.server.interceptors), self.end.server.find, details)
        if handler is None:
            self.finish(Status(grpc.StatusCode.UNIMPLEMENTED, "Method not found!"))
            return
        context = SimContext(self, handler.request_deserializer, handler.response_serializer)
        if handler.request_streaming:
            request: Any = _Requests(context)
        else:
            raw = await self.receive()
            if raw is None:
                return
            request = _decode(handler.request_deserializer, raw)
        behavior = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        if handler.response_streaming:
            if inspect.iscoroutinefunction(behavior):
                await behavior(request, context)
            elif inspect.isasyncgenfunction(behavior):
                async for response in behavior(request, context):
                    self.check_running()
                    await context.write(response)
            else:
                for response in behavior(request, context):
                    await context.write(response)
            self.check_running()
        else:
            response = await behavior(request, context)
            self.check_running()
            if self.code in (None, grpc.StatusCode.OK):
                await self.send(_encode(handler.response_serializer, response))
        self.finish(Status(self.code or grpc.StatusCode.OK, self.details, self.trailing))


class SimContext:
    """A call as its handlers see it, with the surface of grpc.aio's ServicerContext."""

    def __init__(self, call: ServerCall, deserialize: Any, serialize: Any) -> None:
        self._call = call
        self._deserialize, self._serialize = deserialize, serialize

    async def read(self) -> Any:
        self._call.check_running()
        raw = await self._call.receive()
        self._call.check_running()
        return cygrpc.EOF if raw is None else _decode(self._deserialize, raw)

    async def write(self, message: Any) -> None:
        self._call.check_running()
        await self._call.send(_encode(self._serialize, message))

    async def send_initial_metadata(self, metadata: Metadata) -> None:
        self._call.check_running()
        if self._call.metadata_sent:
            raise cygrpc.UsageError("Send initial metadata failed: already sent")
        self._call.send_metadata(tuple(metadata))

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> None:
        call = self._call
        if call.abort_error is not None:
            raise cygrpc.UsageError("Abort already called!")
        call.abort_error = grpc.aio.AbortError("Locally aborted.")
        call.code, call.details = code, details or call.details
        call.trailing = tuple(trailing_metadata) or call.trailing
        call.finish(Status(code, call.details, call.trailing))
        raise call.abort_error

    async def abort_with_status(self, status: Any) -> None:
        await self.abort(status.code, status.details, status.trailing_metadata)

    def set_trailing_metadata(self, metadata: Metadata) -> None:
        self._call.trailing = tuple(metadata)

    def trailing_metadata(self) -> Metadata:
        return self._call.trailing

    def invocation_metadata(self) -> Metadata:
        return self._call.metadata

    def set_code(self, code: grpc.StatusCode) -> None:
        self._call.code = code

    def code(self) -> grpc.StatusCode | None:
        return self._call.code

    def set_details(self, details: str) -> None:
        self._call.details = details

    def details(self) -> str:
        return self._call.details

    def peer(self) -> str:
        return f"ipv4:{self._call.end.connection.client.host}"

    def peer_identities(self) -> None:
        return None

    def auth_context(self) -> dict[str, Sequence[bytes]]:
        return {}

    def time_remaining(self) -> float | None:
        deadline = self._call.deadline
        return None if deadline is None else max(deadline - clock.monotonic(), 0)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._call.callbacks.append(functools.partial(callback, self))

    def done(self) -> bool:
        return self._call.status_sent

    def cancelled(self) -> bool:
        return self._call.code is grpc.StatusCode.CANCELLED

    def disable_next_message_compression(self) -> None:
        """Does nothing: messages are not compressed."""


class _Requests:
    """The requests of a stream, for `async for`; one generator, as grpc.aio has it."""

    def __init__(self, context: SimContext) -> None:
        self._context = context
        self._messages: AsyncIterator[Any] | None = None

    def __aiter__(self) -> AsyncIterator[Any]:
        if self._messages is None:
            self._messages = self._receive()
        return self._messages

    async def __anext__(self) -> Any:
        return await anext(aiter(self))

    async def _receive(self) -> AsyncIterator[Any]:
        while (message := await self._context.read()) is not cygrpc.EOF:
            yield message


async def _intercept(interceptors: Any, find: Callable[[Any], Any], details: Any) -> Any:
    interceptor = next(interceptors, None)
    if interceptor is None:
        return find(details)
    return await interceptor.intercept_service(functools.partial(_intercept, interceptors, find), details)


def _encode(serialize: Callable[[Any], bytes] | None, message: Any) -> bytes:
    return message if serialize is None else serialize(message)


def _decode(deserialize: Callable[[bytes], Any] | None, data: bytes) -> Any:
    return data if deserialize is None else deserialize(data)
