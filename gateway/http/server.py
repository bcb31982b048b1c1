"""The HTTP front: OpenAI's API, KServe's, health, readiness, version and metrics."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from gateway.auth.http_middleware import AuthMiddleware
from gateway.auth.keys import Authenticator
from gateway.body_memory import BodyMemory
from gateway.http.api_route import openapi_route
from gateway.http.middleware import ANY_HOST, DrainMiddleware, HostMiddleware, UnexpectedErrorMiddleware
from gateway.http.probes import probe_routes
from gateway.http.protocol import HttpLimits, LimitedProtocol, Places
from gateway.http.tls_listener import TlsListener
from gateway.kserve.rest_servicer import kserve_routes
from gateway.kserve.servicer import KServeServicer
from gateway.metrics import GatewayMetrics
from gateway.openai.body import BodyLimits
from gateway.openai.request_ids import RequestIdMiddleware
from gateway.openai.routes import error_handlers, openai_routes
from gateway.requests.generator import Generator
from gateway.settings import GatewaySettings
from quire.rpc.address import TcpAddress, check_bindable, is_local
from quire.rpc.tls import HttpsFiles, ServerTls

_GRACE_S = 2
# Longer than clients and proxies keep connections that are idle, so that none is closed as it is used again.
_KEEP_ALIVE_S = 75
_MAX_HEADER_BYTES = 64 * 1024


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
    """Where hosts are named it holds always, else where nothing but loopback keeps others out."""
    is_open_on_loopback = is_local(str(TcpAddress(settings.http_host, 0))) and not settings.keys_files
    if ANY_HOST in settings.allowed_hosts or not (settings.allowed_hosts or is_open_on_loopback):
        return []
    return [Middleware(HostMiddleware, allowed_hosts=settings.allowed_hosts)]


def _cross_origin(allowed_origins: Sequence[str]) -> list[Middleware]:
    """What answers browsers that ask whether a page of another origin may call."""
    if not allowed_origins:
        return []
    exposed = ("x-request-id", "retry-after")
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=exposed,
        )
    ]


class HttpServer(uvicorn.Server):
    """Serves an application in the running event loop, on a socket that is bound at once."""

    def __init__(
        self,
        app: Starlette,
        listener: socket.socket,
        limits: HttpLimits,
        bodies: BodyMemory,
        on_refusal: Callable[[], None],
        https: HttpsFiles | None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=LimitedProtocol,
                log_config=None,
                # Its warnings are about what clients send, and any client could fill the log by them.
                log_level="error",
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=_GRACE_S,
                timeout_keep_alive=_KEEP_ALIVE_S,
            )
        )
        self._listener = listener
        self._limits = limits
        self._places = Places(limits.max_connections, on_refusal)
        self._bodies = bodies
        self._https = https
        self.address = str(TcpAddress(*listener.getsockname()[:2]))

    @classmethod
    def bind(
        cls,
        app: Starlette,
        settings: GatewaySettings,
        bodies: BodyMemory,
        on_refusal: Callable[[], None],
        tls: ServerTls | None,
    ) -> "HttpServer":
        """Listens where the settings say; `on_refusal` is told of each connection that is too many.

        Raises:
            ConfigurationError: it cannot listen there, or the files of `tls` are no good.
        """
        limits = HttpLimits(
            max_header_bytes=_MAX_HEADER_BYTES,
            max_connections=settings.max_connections,
            handshake_timeout_s=settings.handshake_timeout,
            sender_timeout_s=settings.slow_sender_timeout,
            reader_timeout_s=settings.slow_reader_timeout,
        )
        https = None if tls is None else HttpsFiles(tls)
        host, port = settings.http_host, settings.http_port
        check_bindable(TcpAddress(host, port), reuse_port=settings.reuse_port)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=1024, reuse_port=settings.reuse_port)
        return cls(app, listener, limits, bodies, on_refusal, https)

    async def run_until_stopped(self) -> None:
        await self.serve(sockets=[self._listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """In the place of uvicorn's, which knows neither these limits nor certificates that change."""
        self.servers = [await self._listen(each) for each in sockets or []]
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # The servers close their sockets.
        await super().shutdown()

    async def _listen(self, listener: socket.socket) -> Any:
        if self._https is not None:
            context = self._https.context()
            return TlsListener(listener, context, self._make_protocol, self._limits, self._places)
        loop = asyncio.get_running_loop()
        return await loop.create_server(self._make_protocol, sock=listener, backlog=self.config.backlog)

    def _make_protocol(self, handshake: object | None = None) -> asyncio.Protocol:
        return LimitedProtocol(
            config=self.config,
            server_state=self.server_state,
            app_state={},
            limits=self._limits,
            places=self._places,
            bodies=self._bodies,
            handshake=handshake,
        )

    def close(self) -> None:
        """Lets go of the socket of a server that never ran."""
        self._listener.close()

    def hand_over(self) -> None:
        """Leaves the port to those who share it. What came by it is served on."""
        for server in self.servers:
            server.close()

    def stop(self) -> None:
        """`run_until_stopped` returns soon."""
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's business."""
        yield
