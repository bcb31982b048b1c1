"""Metrics of a service process over HTTP, and HTTPS."""

import logging
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Collection, Iterable
from typing import Any, Self
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import ThreadingWSGIServer, make_wsgi_app

from quire.rpc.address import TcpAddress, check_bindable
from quire.rpc.https import HttpsFiles
from quire.rpc.roles import roles_of_certificate
from quire.rpc.tls import Role, ServerTls

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
    def start(cls, host: str, port: int, registry: CollectorRegistry, tls: ServerTls | None = None) -> Self:
        """Listens; port 0 picks a free one. With `tls`, HTTPS for callers of its roles alone.

        Raises:
            ConfigurationError: the port is in use or cannot be bound, or the files of `tls` are no good.
        """
        https = None if tls is None else HttpsFiles(tls)
        check_bindable(TcpAddress(host, port))
        server = (_Server if ":" not in host else _Server6)((host, port), _Handler)
        server.set_app(_application(registry, None if tls is None else tls.roles))
        if https is not None:
            # The handshake is the business of the connection's own thread, which has a time for it.
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
    """Has a thread for each of some connections, closes further ones, and goes on whatever goes wrong in one."""

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
    """One connection, with a limit on how long its client may keep it waiting."""

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
        """Scrapes are no news."""


def _application(registry: CollectorRegistry, roles: Collection[Role] | None) -> _Application:
    """The metrics, for callers whose certificate names one of `roles`; for everyone where that is None."""
    metrics: _Application = make_wsgi_app(registry)
    if roles is None:
        return metrics

    def guarded(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if roles_of_certificate(environ.get(_CERTIFICATE)) & frozenset(roles):
            return metrics(environ, start_response)
        start_response("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
        return [f"metrics are for certificates of the role {' or '.join(sorted(roles))}\n".encode()]

    return guarded
