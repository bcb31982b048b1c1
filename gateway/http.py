"""The HTTP front: OpenAI's API, health, readiness, version and metrics."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Response, status
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from gateway.auth.authenticator import Authenticator
from gateway.auth.http_middleware import AuthMiddleware
from gateway.generator import Generator
from gateway.metrics import GatewayMetrics
from gateway.openai.body import BodyLimits
from gateway.openai.request_ids import RequestIdMiddleware
from gateway.openai.routes import answer_errors, make_router
from gateway.settings import GatewaySettings
from gateway.slow_clients import http_protocol
from quire.rpc.address import TcpAddress, check_bindable
from quire.rpc.tls import FileWatch, ServerTls
from quire.version import VERSION

_GRACE_S = 2
_RELOAD_INTERVAL_S = 1.0


def make_http_app(
    generator: Generator,
    metrics: GatewayMetrics,
    authenticator: Authenticator,
    settings: GatewaySettings,
    *,
    started_at_s: int,
) -> FastAPI:
    """The application. `started_at_s` is the time in seconds since the Unix epoch that models report as theirs."""
    app = FastAPI(title="Quire", version=VERSION, openapi_url=None)
    # The last one is the first to see a request.
    app.add_middleware(
        AuthMiddleware,
        authenticator=authenticator,
        on_refusal=metrics.count_refused_caller,
        open_metrics=settings.open_metrics,
    )
    app.add_middleware(RequestIdMiddleware)
    answer_errors(app)
    body_limits = BodyLimits(settings.max_message_bytes, settings.slow_sender_timeout)
    app.include_router(make_router(generator, body_limits, started_at_s=started_at_s))

    @app.get("/health")
    async def health() -> dict[str, str]:
        """The process is up."""
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """A request would run at once."""
        if generator.is_ready:
            return JSONResponse({"status": "ready"})
        return JSONResponse(
            {"status": "not ready", "reason": _reason_not_ready(generator)}, status.HTTP_503_SERVICE_UNAVAILABLE
        )

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": VERSION}

    @app.get("/metrics")
    async def prometheus_metrics() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return app


def _reason_not_ready(generator: Generator) -> str:
    if generator.is_draining:
        return "draining"
    if generator.replicas.num_connected:
        return "no scheduler has its worker"
    return "no scheduler is connected"


def _tls_options(tls: ServerTls | None) -> dict[str, Any]:
    if tls is None:
        return {}
    return {
        "ssl_certfile": tls.identity.certificate,
        "ssl_keyfile": tls.identity.key,
        "ssl_ca_certs": str(tls.identity.authority),
        "ssl_cert_reqs": ssl.CERT_REQUIRED if tls.asks_for_certificates else ssl.CERT_NONE,
    }


class HttpServer(uvicorn.Server):
    """Serves an application in the running event loop, on a socket that is bound at once."""

    def __init__(
        self, app: FastAPI, listener: socket.socket, protocol: type[asyncio.Protocol], tls: ServerTls | None
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,
                log_config=None,
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=_GRACE_S,
                **_tls_options(tls),
            )
        )
        self._tls = tls
        self._listener = listener
        self.address = str(TcpAddress(*listener.getsockname()[:2]))

    @classmethod
    def bind(
        cls, app: FastAPI, host: str, port: int, *, reader_timeout_s: float, tls: ServerTls | None = None
    ) -> "HttpServer":
        """Raises AddressInUse or ConfigurationError when it cannot listen there."""
        check_bindable(TcpAddress(host, port))
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=1024)
        return cls(app, listener, http_protocol(reader_timeout_s), tls)

    async def run_until_stopped(self) -> None:
        reloading = None if self._tls is None else asyncio.create_task(self._reload(self._tls), name="TLS files")
        try:
            await self.serve(sockets=[self._listener])
        finally:
            if reloading is not None:
                reloading.cancel()

    async def _reload(self, tls: ServerTls) -> None:
        """New connections get the certificate that the files hold then."""
        watch = FileWatch(tls.identity)
        while True:
            await asyncio.sleep(_RELOAD_INTERVAL_S)
            if watch.changed() is not None and self.config.ssl is not None:
                self.config.ssl.load_cert_chain(tls.identity.certificate, tls.identity.key)
                self.config.ssl.load_verify_locations(tls.identity.authority)

    def close(self) -> None:
        """Lets go of the socket of a server that never ran."""
        self._listener.close()

    def stop(self) -> None:
        """`run_until_stopped` returns soon."""
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's business."""
        yield
