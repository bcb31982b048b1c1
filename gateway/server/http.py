"""The HTTP server: the application and its routes, the socket, and how much of the gateway connections may take.

It builds on private classes of uvicorn. So pyproject.toml bounds uvicorn's version, and each limit has a test over a
real socket: test_connection_limits.py, test_slow_clients.py, test_http_bodies.py and test_https.py in
tests/service/gateway.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from gateway.api.body import BodyLimits
from gateway.api.errors import ErrorAnswer, error_handlers, send_answer
from gateway.api.kserve.rest import kserve_routes
from gateway.api.kserve.servicer import KServeServicer
from gateway.api.openai.routes import openai_routes
from gateway.api.openapi import openapi_route
from gateway.auth.keys import Authenticator
from gateway.metrics import GatewayMetrics
from gateway.request.generator import Generator
from gateway.server.bodies import BodyMemory, IncomingBody
from gateway.server.middleware import (
    ANY_HOST,
    AuthMiddleware,
    DrainMiddleware,
    HostMiddleware,
    RequestIdMiddleware,
    TraceMiddleware,
    UnexpectedErrorMiddleware,
    probe_routes,
)
from gateway.settings import GatewaySettings
from quire.rpc.address import TcpAddress, check_bindable, is_local
from quire.rpc.tls import HttpsFiles, ServerTls

_GRACE_S = 2
# Longer than clients and proxies keep idle connections, so that none is closed as it is used again.
_KEEP_ALIVE_S = 75
_MAX_HEADER_BYTES = 64 * 1024
_ACCEPT_PAUSE_S = 0.5
# Each chunk of a body takes some microseconds, however short it is, and all chunks of one read are taken in one turn.
_MAX_SHORT_CHUNKS = 1 << 13
_MIN_MEAN_CHUNK_BYTES = 256
_logger = logging.getLogger(__name__)


def make_http_app(
    generator: Generator,
    kserve: KServeServicer,
    metrics: GatewayMetrics,
    authenticator: Authenticator,
    settings: GatewaySettings,
    *,
    started_at_s: int,
) -> Starlette:
    """The application. `started_at_s` is the time in seconds since the Unix epoch that models report as theirs."""
    body_limits = BodyLimits(settings.max_message_bytes, settings.max_chat_messages)
    routes = [
        *openai_routes(generator, body_limits, keep_alive_s=settings.sse_keepalive, started_at_s=started_at_s),
        *kserve_routes(kserve, body_limits),
        *probe_routes(generator, metrics),
    ]
    return Starlette(
        routes=[*routes, openapi_route(routes)],
        # The first one is the first to see a request.
        middleware=[
            *([Middleware(TraceMiddleware)] if settings.otlp_traces_endpoint is not None else ()),
            *_cross_origin(settings.allowed_origins),
            Middleware(DrainMiddleware, is_draining=lambda: generator.is_draining),
            Middleware(RequestIdMiddleware),
            Middleware(UnexpectedErrorMiddleware),
            *_host_check(settings),
            Middleware(
                AuthMiddleware,
                authenticator=authenticator,
                on_refusal=metrics.count_refused_caller,
                open_metrics=settings.open_metrics,
            ),
        ],
        exception_handlers=error_handlers(),
    )


def _host_check(settings: GatewaySettings) -> list[Middleware]:
    """Always where hosts are named, else where only loopback keeps others out."""
    is_open_on_loopback = is_local(str(TcpAddress(settings.http_host, 0))) and not settings.keys_files
    if ANY_HOST in settings.allowed_hosts or not (settings.allowed_hosts or is_open_on_loopback):
        return []
    return [Middleware(HostMiddleware, allowed_hosts=settings.allowed_hosts)]


def _cross_origin(allowed_origins: Sequence[str]) -> list[Middleware]:
    """Answers browsers that ask whether a page of another origin may call."""
    if not allowed_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=("x-request-id", "retry-after"),
        )
    ]


class Places:
    """Counts the connections to one port. Each holds a place from its first moment to its last."""

    def __init__(self, max_connections: int, on_refusal: Callable[[], None]) -> None:
        """`on_refusal` is called for each connection that finds no place."""
        self._max_connections = max_connections
        self._on_refusal = on_refusal
        self._holders: set[object] = set()

    def take(self, holder: object) -> bool:
        """Returns whether there was a place."""
        if len(self._holders) >= self._max_connections:
            self._on_refusal()
            return False
        self._holders.add(holder)
        return True

    def give_back(self, holder: object) -> None:
        """Idempotent."""
        self._holders.discard(holder)


class HttpServer(uvicorn.Server):
    """Serves an application in the running event loop, on a socket that is bound at once."""

    def __init__(
        self,
        app: Starlette,
        settings: GatewaySettings,
        bodies: BodyMemory,
        on_refusal: Callable[[], None],
        tls: ServerTls | None,
    ) -> None:
        """Listens where the settings say. `on_refusal` is called for each connection that is too many.

        Raises:
            ConfigurationError: it cannot listen there, or the files of `tls` cannot be used.
        """
        super().__init__(
            uvicorn.Config(
                app,
                http=HttpConnection,
                log_config=None,
                # Its warnings are about what clients send: any client could fill the log with them.
                log_level="error",
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=_GRACE_S,
                timeout_keep_alive=_KEEP_ALIVE_S,
            )
        )
        self._settings = settings
        self._places = Places(settings.max_connections, on_refusal)
        self._bodies = bodies
        self._https = None if tls is None else HttpsFiles(tls)
        host, port = settings.http_host, settings.http_port
        check_bindable(TcpAddress(host, port), reuse_port=settings.reuse_port)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=1024, reuse_port=settings.reuse_port)
        self.address = str(TcpAddress(*self._listener.getsockname()[:2]))

    async def run_until_stopped(self) -> None:
        await self.serve(sockets=[self._listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Replaces uvicorn's, which knows neither these limits nor certificates that change."""
        self.servers = [await self._listen(each) for each in sockets or []]
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # The servers close their sockets.
        await super().shutdown()

    async def _listen(self, listener: socket.socket) -> Any:
        if self._https is not None:
            context = self._https.context()
            return TlsListener(listener, context, self._make_protocol, self._settings.handshake_timeout, self._places)
        loop = asyncio.get_running_loop()
        return await loop.create_server(self._make_protocol, sock=listener, backlog=self.config.backlog)

    def _make_protocol(self, handshake: object | None = None) -> asyncio.Protocol:
        return HttpConnection(
            config=self.config,
            server_state=self.server_state,
            app_state={},
            settings=self._settings,
            places=self._places,
            bodies=self._bodies,
            handshake=handshake,
        )

    def close(self) -> None:
        """Closes the socket of a server that never ran."""
        self._listener.close()

    def hand_over(self) -> None:
        """Closes the port, for those who share it. Open connections are served on."""
        for server in self.servers:
            server.close()

    def stop(self) -> None:
        """`run_until_stopped` returns soon."""
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The process handles signals."""
        yield


class TlsListener:
    """Accepts connections and encrypts them. A connection takes its place when it is accepted; the server of
    `loop.create_server` reports it only after its handshake, and never when the handshake fails."""

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        make_protocol: Callable[[object], asyncio.Protocol],
        handshake_timeout_s: float,
        places: Places,
    ) -> None:
        """`make_protocol` makes the protocol of a connection, from the holder of its place during the handshake."""
        self._listener = listener
        self._context = context
        self._make_protocol = make_protocol
        self._handshake_timeout_s = handshake_timeout_s
        self._places = places
        self._handshakes: set[asyncio.Task[None]] = set()
        self._listener.setblocking(False)
        self._accepting = asyncio.get_running_loop().create_task(self._accept_all(), name="HTTPS")
        # Not before the event loop no longer watches it.
        self._accepting.add_done_callback(lambda _: listener.close())

    def close(self) -> None:
        """Accepts no more connections, and closes the port soon. Handshakes go on. Idempotent."""
        self._accepting.cancel()

    async def wait_closed(self) -> None:
        """Ends the handshakes that still run. The listener is closed."""
        for each in self._handshakes:
            each.cancel()
        await asyncio.gather(self._accepting, *self._handshakes, return_exceptions=True)

    async def _accept_all(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # too many open files, no memory, or the client left
                _logger.warning("cannot accept an HTTPS connection: %s", error)
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            holder = object()
            if not self._places.take(holder):
                connection.close()
                continue
            handshake = loop.create_task(self._shake_hands(connection, holder))
            self._handshakes.add(handshake)
            handshake.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, connection: socket.socket, holder: object) -> None:
        try:
            connection.setblocking(False)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._make_protocol(holder),
                connection,
                ssl=self._context,
                ssl_handshake_timeout=self._handshake_timeout_s,
            )
        except OSError as error:  # of which ssl.SSLError and broken connections are some
            _logger.debug("a TLS handshake failed: %s", error)
        finally:
            self._places.give_back(holder)


class _ConnectionState(h11.Connection):
    """h11's state of one connection. It refuses a body of very many chunks that are short on average."""

    def __init__(self, max_incomplete_event_size: int) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size)
        self._num_chunks = 0
        self._num_bytes = 0

    def next_event(self) -> Any:
        """Raises RemoteProtocolError where the other side does not speak HTTP as it should."""
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._num_chunks += event.chunk_start
            self._num_bytes += len(event.data)
            if self._num_chunks > max(_MAX_SHORT_CHUNKS, self._num_bytes // _MIN_MEAN_CHUNK_BYTES):
                raise h11.RemoteProtocolError("the chunks of a body are too short")
        elif isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
        return event


class HttpConnection(H11Protocol):
    """The protocol of one HTTP connection within limits."""

    def __init__(
        self,
        *args: Any,
        settings: GatewaySettings,
        places: Places,
        bodies: BodyMemory,
        handshake: object | None = None,
        **kwargs: Any,
    ) -> None:
        """Takes the arguments of uvicorn's protocol. `handshake` holds the place that this connection already has."""
        super().__init__(*args, **kwargs)
        self.conn = _ConnectionState(_MAX_HEADER_BYTES)
        self._settings = settings
        self._places = places
        self._handshake = handshake
        self._bodies = bodies
        # What uvicorn calls for each request.
        self._application = self.app
        self.app = self._answer
        # Runs while more waits to be sent than is to be kept.
        self._writing: asyncio.TimerHandle | None = None
        # Runs while headers of a request are due.
        self._reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._places.give_back(self._handshake)
        if self._places.take(self):
            self._reading = self._cut_later(self._settings.slow_sender_timeout, "sent no request in time")
        else:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._reading = _stopped(self._reading)
        elif self._reading is None:
            self._reading = self._cut_later(self._settings.slow_sender_timeout, "did not end its headers in time")

    def send_400_response(self, msg: str) -> None:
        """Called for what is not HTTP. An answer that has begun cannot be followed by another one."""
        if self.conn.our_state is h11.SEND_RESPONSE:
            super().send_400_response(msg)
        else:
            self._cut("sent what is not HTTP")

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
        self._places.give_back(self)
        super().connection_lost(exc)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the application for one request. Where the server stops before the answer, the client gets a 503."""
        has_started = False

        async def send_and_note(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        timeout_s = self._settings.slow_sender_timeout
        body = IncomingBody(receive, send_and_note, self._bodies, timeout_s, self._has_whole_body)
        try:
            await self._application(scope, body.receive, body.send)
        except asyncio.CancelledError:
            # Only a server that stops cancels requests.
            if has_started:
                self.transport.abort()
            else:
                answer = ErrorAnswer(503, "this gateway stopped before the request was answered; try again", "draining")
                await send_answer(send, answer, {"retry-after": "1", "connection": "close"})
        finally:
            body.release()

    def _has_whole_body(self) -> bool:
        return self.conn.their_state is not h11.SEND_BODY

    def _watch_reader(self) -> None:
        """Cuts the connection where the client has taken nothing when the time is over."""
        num_waiting = self.transport.get_write_buffer_size()
        self._writing = self.loop.call_later(self._settings.slow_reader_timeout, self._look_at_reader, num_waiting)

    def _look_at_reader(self, num_waited: int) -> None:
        if self.transport.get_write_buffer_size() < num_waited:
            self._watch_reader()
        else:
            self._cut("took nothing in time")

    def _cut_later(self, delay_s: float, why: str) -> asyncio.TimerHandle:
        return self.loop.call_later(delay_s, self._cut, why)

    def _cut(self, why: str) -> None:
        _logger.info("an HTTP client %s; its connection is cut", why)
        self.transport.abort()


def _stopped(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
