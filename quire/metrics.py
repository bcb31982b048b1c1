"""A registry of Prometheus metrics over HTTP, and HTTPS.

The application and the server's base class are prometheus_client's. Its own `start_http_server` does the TLS handshake
in the thread that accepts connections, where one silent client blocks all others; it has no limit of connections, no
check of the caller's role, and never reads changed certificates.
"""

import logging
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any, Self
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import ThreadingWSGIServer, make_wsgi_app

from quire.rpc.address import TcpAddress, check_bindable
from quire.rpc.tls import HttpsFiles, Role, ServerTls, roles_of_certificate

MAX_CONNECTIONS = 32
_TIMEOUT_S = 10.0
_CERTIFICATE = "quire.peer_certificate"
_logger = logging.getLogger(__name__)
_Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class MetricsServer:
    """Serves a registry as Prometheus text at http://HOST:PORT/metrics, or https://, from threads of its own."""

    def __init__(self, server: ThreadingWSGIServer, thread: threading.Thread) -> None:
        self.port: int = server.server_port
        self._server = server
        self._thread = thread

    @classmethod
    def start(
        cls,
        host: str,
        port: int,
        registry: CollectorRegistry,
        tls: ServerTls | None = None,
        before_scrape: Callable[[], object] = lambda: None,
    ) -> Self:
        """Listens; port 0 picks a free one. With `tls`, HTTPS for callers of its roles only.

        `before_scrape` is called before the metrics are read, in the thread of the connection.

        Raises:
            ConfigurationError: the port is in use or cannot be bound, or the files of `tls` cannot be used.
        """
        https = None if tls is None else HttpsFiles(tls)
        check_bindable(TcpAddress(host, port))
        server = (_Server if ":" not in host else _Server6)((host, port), _Handler)
        metrics = _refreshed(before_scrape, make_wsgi_app(registry))
        server.set_app(metrics if tls is None or tls.roles is None else _only_for(tls.roles, metrics))
        if https is not None:
            # The connection's own thread does the handshake, within its timeout.
            server.socket = https.context().wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
        thread.start()
        return cls(server, thread)

    def stop(self) -> None:
        """Stops listening and ends the thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingWSGIServer):
    """Has a thread for each of at most MAX_CONNECTIONS connections and closes further ones."""

    request_queue_size = 2 * MAX_CONNECTIONS

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        super().__init__(address, handler)
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        _logger.info("a connection for metrics from %s failed: %s", client_address[0], sys.exc_info()[1])


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    """One connection, with a limit on how long its client may be silent."""

    timeout = _TIMEOUT_S

    def setup(self) -> None:
        super().setup()
        if isinstance(self.connection, ssl.SSLSocket):
            self.connection.do_handshake()

    def get_environ(self) -> dict[str, Any]:
        environ = super().get_environ()
        if isinstance(self.connection, ssl.SSLSocket):
            environ[_CERTIFICATE] = self.connection.getpeercert()
        return environ

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not logged."""


def _refreshed(before_scrape: Callable[[], object], application: _Application) -> _Application:
    def refreshed(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        before_scrape()
        return application(environ, start_response)

    return refreshed


def _only_for(roles: frozenset[Role], application: _Application) -> _Application:
    """The application for callers whose certificate names one of `roles`; 403 for others."""

    def guarded(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if roles & roles_of_certificate(environ.get(_CERTIFICATE)):
            return application(environ, start_response)
        start_response("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
        return [f"metrics are for certificates of the role {' or '.join(sorted(roles))}\n".encode()]

    return guarded
