"""HTTP connections: the server socket, TLS, and limits on connections, headers, bodies and slow clients."""

import asyncio
import contextlib
import logging
import re
import socket
import ssl
from collections.abc import Callable
from email.utils import formatdate
from http import HTTPStatus
from typing import Any

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api.answers import OPENAI, STREAM_PART, ErrorAnswer, HttpError, error_answer, send_answer
from gateway.api.websocket import SWITCH_PROTOCOL
from gateway.request.body_memory import BodyMemory, message_memory
from gateway.server.uvicorn_internals import MAX_HEADER_LINES, ConnectionState, Protocol, ServerState, make_config
from gateway.settings import GatewaySettings
from quire.model_files.progress import shown_bytes
from quire.rpc.address import TcpAddress, check_bindable
from quire.rpc.errors import QuireError, ResourceExhausted
from quire.rpc.listeners import BACKLOG, address_of, listen
from quire.rpc.patience import LAST_LOOK_S, PatientTimer
from quire.rpc.tls import HttpsFiles, ServerTls
from quire.runtime import clock

# Longer than the idle timeouts of clients and proxies, so that no connection is closed while it is being reused.
_KEEP_ALIVE_S = 75
_ABSOLUTE = re.compile(rb"(?i:https?)://(?:[^/?#@]*@)?([^/?#@]+)([^#]*)")
_MAX_HEADER_BYTES = 64 * 1024
_ACCEPT_PAUSE_S = 0.5
# The time for requests that still run when the server stops, and before that for requests in transit.
_GRACE_S = 2
_LAST_REQUESTS_S = 0.1
# Each chunk of a body takes some microseconds, even if it is short, and all chunks of one read are parsed at once.
_MAX_SHORT_CHUNKS = 1 << 13
_MIN_MEAN_CHUNK_BYTES = 256
_logger = logging.getLogger(__name__)
_CLOSE = (b"connection", b"close")
# Limits of the body that is dropped after an answer: most clients read an answer only after sending their whole body.
_MAX_DRAINED_BYTES = 16 * 1024 * 1024
_MAX_DRAIN_S = 2.0
# A piece of an answer stays in this process's memory until the client reads it.
_PIECE_BYTES = 1 << 16
_LONG_ANSWER_BYTES = 1 << 18


class IncomingBody:
    """Limits the body of one HTTP request, between the server and the application.

    Reading fails with 408 if the body takes longer than `timeout_s` from the end of the headers, and with 429 if its
    memory is needed for other requests. An answer before the end of the body has the header `connection: close`; the
    rest is then dropped for a while, since a client that still sends would lose the answer if the connection closed.
    """

    def __init__(
        self, receive: Receive, send: Send, memory: BodyMemory, timeout_s: float, has_come: Callable[[], bool]
    ) -> None:
        """`has_come` returns whether the server has received the whole body. `held` is the body's memory."""
        self._receive = receive
        self._send = send
        self._memory = memory
        self._timeout_s = timeout_s
        self._due_at = asyncio.get_running_loop().time() + timeout_s
        self._has_come = has_come
        self.held = memory.begin(self._give_up)
        self._is_given_up = False
        self._is_overdue = False
        self._is_read = False
        self._drains = False
        # The start of the answer while it waits for the answer's body, and whether an error was sent instead.
        self._start: Message | None = None
        self._is_refused = False
        self._reading: asyncio.Timeout | None = None

    async def receive(self) -> Message:
        """Receives a message. Raises HttpError or QuireError if the body comes too slowly or is given up."""
        if self._is_read:
            return await self._receive()
        if self._is_given_up:
            raise self._memory.refusal()
        message = await self._receive_in_time()
        if message["type"] == "http.request":
            self.held.add(len(message.get("body", b"")))
        if not message.get("more_body", False):
            self._is_read = True
            self.held.complete()
        return message

    async def _receive_in_time(self) -> Message:
        if self._has_come():
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._due_at) as self._reading:
                return await self._receive()
        except TimeoutError:
            if self._is_given_up or self._is_overdue:
                raise self._refusal() from None
        finally:
            self._reading = None
        # If this process was suspended, data that arrived meanwhile can be read now.
        self._is_overdue = True
        self._due_at = asyncio.get_running_loop().time() + LAST_LOOK_S
        return await self._receive_in_time()

    async def send(self, message: Message) -> None:
        """Sends a part of the answer, no faster than the client reads. A long answer in one piece counts as memory of
        the request until it is sent; if there is no room, an error is sent instead."""
        if message["type"] == "http.response.start":
            # The start of an answer in one piece is sent with its body.
            self._start = message
            if not any(name.lower() == b"content-length" for name, _ in message.get("headers", ())):
                await self._send_start()
            return
        body = message.get("body", b"")
        if self._start is not None:
            try:
                if len(body) > _LONG_ANSWER_BYTES:
                    self.held.add_answer(len(body))
            except ResourceExhausted as error:
                await send_answer(self.send, error_answer(error))
                self._is_refused = True
            await self._send_start()
        if self._is_refused:
            return
        last = (len(body) - 1) // _PIECE_BYTES * _PIECE_BYTES if body else 0
        for begin in range(0, last, _PIECE_BYTES):
            piece = body[begin : begin + _PIECE_BYTES]
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        message = {**message, "body": body[last:]}
        if self._drains and not message.get("more_body", False):
            await self._send({**message, "more_body": True})
            await self._drain()
            message = {"type": "http.response.body", "body": b""}
        await self._send(message)

    async def _send_start(self) -> None:
        message, self._start = self._start, None
        if message is None:
            return
        if not self._has_come():
            self._drains = True
            others = [header for header in message.get("headers", ()) if header[0].lower() != _CLOSE[0]]
            message = {**message, "headers": [*others, _CLOSE]}
        await self._send(message)

    def release(self) -> None:
        """Frees the body's memory at the end of the request, unless other work holds it (`keep_memory`)."""
        if not self.held.is_kept:
            self.held.release()

    def _give_up(self) -> None:
        """Interrupts the reading of the body. Called while another request runs."""
        self._is_given_up = True
        if self._reading is not None and not self._reading.expired():
            self._reading.reschedule(asyncio.get_running_loop().time())

    def _refusal(self) -> HttpError | QuireError:
        if self._is_given_up:
            return self._memory.refusal()
        return HttpError(ErrorAnswer(408, f"the body did not come within {self._timeout_s:g} s", "slow_sender"))

    async def _drain(self) -> None:
        """Drops the rest of the body until it ends, the client disconnects, or a limit is reached."""
        self.held.release()
        ends_at = min(self._due_at, asyncio.get_running_loop().time() + _MAX_DRAIN_S)
        num_bytes = 0
        try:
            async with asyncio.timeout_at(ends_at):
                while num_bytes <= _MAX_DRAINED_BYTES:
                    message = await self._receive()
                    num_bytes += len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return
        except TimeoutError:
            return


class HttpServer:
    """Serves an application in the running event loop, on a socket that the constructor binds.

    Attributes:
        address: Where it listens, as HOST:PORT.
        config, state, settings, bodies: Shared by its connections.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: GatewaySettings,
        bodies: BodyMemory,
        on_refusal: Callable[[], None],
        tls: ServerTls | None,
        listener: socket.socket | None = None,
    ) -> None:
        """Listens on the address of the settings, or takes an inherited `listener`. `on_refusal` is called for each
        connection beyond the maximum.

        Raises:
            ConfigurationError: the address or the files of `tls` cannot be used.
        """
        self.config = make_config(app, _KEEP_ALIVE_S)
        self.state = ServerState()
        self._stopping = asyncio.Event()
        self.settings = settings
        self.bodies = bodies
        self._on_refusal = on_refusal
        # The holders of places. Each connection has a place from its start to its end.
        self._holders: set[object] = set()
        self._https = None if tls is None else HttpsFiles(tls)
        self._listener = listener or self._bind(settings.http_host, settings.http_port, reuse_port=settings.reuse_port)
        self.address = str(address_of(self._listener))

    def _bind(self, host: str, port: int, *, reuse_port: bool) -> socket.socket:
        check_bindable(TcpAddress(host, port), reuse_port=reuse_port)
        return listen(host, port, reuse_port=reuse_port)

    async def run_until_stopped(self) -> None:
        """Serves until `stop`, then ends the connections."""
        self._server = await self._listen()
        while not self._stopping.is_set():
            date = formatdate(clock.unix_s(), usegmt=True).encode()
            self.state.default_headers = [(b"date", date), *self.config.encoded_headers]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await self._stopping.wait()
        self.hand_over()
        if self.state.connections:
            # A request that a client has just sent over an idle connection is still answered.
            await asyncio.sleep(_LAST_REQUESTS_S)
        for connection in list(self.state.connections):
            connection.shutdown()
        # Idle connections close in the next iteration of the event loop.
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(_GRACE_S):
                while self.state.connections or self.state.tasks:  # noqa: ASYNC110  (uvicorn does not report the ends)
                    await asyncio.sleep(0.1)
                await self._server.wait_closed()
        except TimeoutError:
            for task in self.state.tasks:
                task.cancel("the server stops")

    def hand_over(self) -> None:
        """Stops listening; other gateways share the port, or its socket. Open connections continue."""
        self._server.close()

    def stop(self) -> None:
        """Makes `run_until_stopped` return soon."""
        self._stopping.set()

    async def _listen(self) -> Any:
        """Accepts connections; returns an object with `close` and `wait_closed`."""
        if self._https is not None:
            return TlsListener(self, self._listener, self._https.context())
        loop = asyncio.get_running_loop()
        return await loop.create_server(self.make_protocol, sock=self._listener, backlog=BACKLOG)

    def make_protocol(self, handshake: object | None = None) -> asyncio.Protocol:
        """The protocol of a connection; `handshake` is the holder of its place in the TLS handshake."""
        return HttpConnection(self, handshake)

    def take_place(self, holder: object) -> bool:
        """Takes a place for a connection; returns whether one was free."""
        if len(self._holders) >= self.settings.max_connections:
            self._on_refusal()
            return False
        self._holders.add(holder)
        return True

    def free_place(self, holder: object) -> None:
        """Frees a place. Idempotent."""
        self._holders.discard(holder)

    def close(self) -> None:
        """Closes the socket of a server that never ran."""
        self._listener.close()


class TlsListener:
    """Accepts TLS connections. A connection takes its place when it is accepted; the server of `loop.create_server`
    reports a connection only after its handshake, and never if the handshake fails."""

    def __init__(self, server: HttpServer, listener: socket.socket, context: ssl.SSLContext) -> None:
        self._server = server
        self._listener = listener
        self._context = context
        self._handshakes: dict[asyncio.Task[None], None] = {}
        self._listener.setblocking(False)
        self._accepting = asyncio.get_running_loop().create_task(self._accept_all(), name="HTTPS")
        # The listener is closed only after the event loop stops watching it.
        self._accepting.add_done_callback(lambda _: listener.close())

    def close(self) -> None:
        """Stops accepting connections, and closes the port soon. Handshakes continue. Idempotent."""
        self._accepting.cancel()

    async def wait_closed(self) -> None:
        """Ends the handshakes that still run. The listener must be closed."""
        for each in self._handshakes:
            each.cancel()
        await asyncio.gather(self._accepting, *self._handshakes, return_exceptions=True)

    async def _accept_all(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # too many open files, no memory, or the client disconnected
                _logger.warning("cannot accept an HTTPS connection: %s", error)
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            holder = object()
            if not self._server.take_place(holder):
                connection.close()
                continue
            handshake = loop.create_task(self._handshake(connection, holder))
            self._handshakes[handshake] = None
            handshake.add_done_callback(self._handshakes.pop)

    async def _handshake(self, connection: socket.socket, holder: object) -> None:
        try:
            connection.setblocking(False)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._server.make_protocol(holder),
                connection,
                ssl=self._context,
                ssl_handshake_timeout=self._server.settings.handshake_timeout,
            )
        except OSError as error:  # includes ssl.SSLError and broken connections
            _logger.debug("a TLS handshake failed: %s", error)
        finally:
            self._server.free_place(holder)


class _CheckedState(ConnectionState):
    """h11's state of one connection. It also rejects a body of very many chunks that are short on average, and a body
    with an ambiguous length: a proxy that reads another length parses the rest as the next request."""

    def __init__(self) -> None:
        super().__init__(_MAX_HEADER_BYTES)
        self._num_chunks = 0
        self._num_bytes = 0

    def next_event(self) -> Any:
        """The next event. Raises RemoteProtocolError if the client violates the protocol or these limits."""
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._num_chunks += event.chunk_start
            self._num_bytes += len(event.data)
            if self._num_chunks > max(_MAX_SHORT_CHUNKS, self._num_bytes // _MIN_MEAN_CHUNK_BYTES):
                raise h11.RemoteProtocolError("the chunks of a body are too short")
        elif isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
            # RFC 9112 (6.1) calls such a body faulty. h11 checks the rest of the framing.
            names = {name for name, _ in event.headers}
            if b"transfer-encoding" in names and (b"content-length" in names or event.http_version < b"1.1"):
                raise h11.RemoteProtocolError("the length of the body is ambiguous")
            return _in_origin_form(event)
        return event


def _in_origin_form(request: h11.Request) -> h11.Request:
    """The request with only the path as its target. If the target is a whole URL, as for proxies, its host replaces
    the Host header (RFC 9112, 3.2.2)."""
    match = None if request.target.startswith(b"/") else _ABSOLUTE.fullmatch(request.target)
    if match is None:
        return request
    headers = [(b"host", match[1]), *((name, value) for name, value in request.headers if name != b"host")]
    path = match[2] if match[2].startswith(b"/") else b"/" + match[2]
    return h11.Request(method=request.method, target=path, headers=headers, http_version=request.http_version)


class HttpConnection(Protocol):
    """The protocol of one HTTP connection, with limits."""

    def __init__(self, server: HttpServer, handshake: object | None) -> None:
        """`handshake` is the holder of the place during the TLS handshake."""
        super().__init__(server.config, server.state, _CheckedState(), self._answer, self._refuse_malformed)
        self._owner, self._settings = server, server.settings
        self._handshake = handshake
        # Runs while the write buffer is above its limit.
        self._writing: PatientTimer | None = None
        # Runs while the headers of a request are due.
        self._reading: PatientTimer | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._owner.free_place(self._handshake)
        if self._owner.take_place(self):
            self._reading = PatientTimer(self._settings.slow_sender_timeout, self._cut, "sent no request in time")
        else:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._reading = _stopped(self._reading)
        elif self._reading is None:
            why = "did not end its headers in time"
            self._reading = PatientTimer(self._settings.slow_sender_timeout, self._cut, why)

    def _refuse_malformed(self, problem: BaseException | None) -> None:
        """Answers invalid HTTP. If another answer has begun, closes the connection instead."""
        if self.conn.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
            self._cut("sent what is not HTTP")
            return
        answer = _answer_to_malformed(problem)
        body = OPENAI.error_body(answer)
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        for event in (
            h11.Response(
                status_code=answer.status, headers=list(headers.items()), reason=HTTPStatus(answer.status).phrase
            ),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        _stopped(self._writing)
        self._watch_reader()

    def resume_writing(self) -> None:
        self._writing = _stopped(self._writing)
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._writing = _stopped(self._writing)
        self._reading = _stopped(self._reading)
        self._owner.free_place(self)
        super().connection_lost(exc)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the application for one request. If the server stops before the answer, the client gets a 503."""
        has_started = False

        async def send_and_note(message: Message) -> None:
            nonlocal has_started
            has_started = True
            if message.get("status") == HTTPStatus.SWITCHING_PROTOCOLS:
                return self.switch_protocol(message["headers"])
            return await send(message)

        timeout_s = self._settings.slow_sender_timeout
        body = IncomingBody(
            receive, send_and_note, self._owner.bodies, timeout_s, lambda: self.conn.their_state is not h11.SEND_BODY
        )
        message_memory.set(body.held)
        if scope["http_version"] == "1.1" and scope["method"] == "POST":
            scope["extensions"] = {**scope.get("extensions", {}), STREAM_PART: self}
        if self.may_switch:
            scope["extensions"] = {**scope.get("extensions", {}), SWITCH_PROTOCOL: self.hand_over}
        try:
            await self._application(scope, body.receive, body.send)
        except asyncio.CancelledError:
            # Requests are cancelled only when the server stops.
            if has_started:
                self.transport.abort()
            else:
                answer = ErrorAnswer(503, "this gateway stopped before the request was answered; try again", "draining")
                await send_answer(send, answer, {"retry-after": "1", "connection": "close"})
        finally:
            body.release()

    def _watch_reader(self) -> None:
        """Closes the connection if the client reads nothing within the time limit."""
        num_waiting = self.transport.get_write_buffer_size()
        self._writing = PatientTimer(self._settings.slow_reader_timeout, self._check_reader, num_waiting)

    def _check_reader(self, num_waited: int) -> None:
        if self.transport.get_write_buffer_size() < num_waited:
            self._watch_reader()
        else:
            self._cut("took nothing in time")

    def _cut(self, why: str) -> None:
        _logger.info("an HTTP client %s; its connection is cut", why)
        self.transport.abort()


def _answer_to_malformed(problem: BaseException | None) -> ErrorAnswer:
    if getattr(problem, "error_status_hint", 400) == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
        size = shown_bytes(_MAX_HEADER_BYTES)
        message = f"the request line and the headers have more than {size} or {MAX_HEADER_LINES:,} lines"
        return ErrorAnswer(431, message, "headers_too_large")
    return ErrorAnswer(400, f"the request is not valid HTTP: {problem!s:.200}", "malformed_http")


def _stopped(timer: PatientTimer | None) -> None:
    if timer is not None:
        timer.cancel()
