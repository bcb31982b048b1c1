"""A registry of Prometheus metrics over HTTP, and HTTPS; and the metrics that every service has.

The application and the server's base class are prometheus_client's. Its own `start_http_server` does the TLS handshake
in the thread that accepts connections, where one silent client blocks all others; it has no limit of connections, no
check of the caller's role, and never reads changed certificates.
"""

import copy
import datetime as dt
import logging
import re
import socket
import socketserver
import ssl
import sys
import threading
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self
from wsgiref.simple_server import WSGIRequestHandler

import grpc
from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import ThreadingWSGIServer, make_wsgi_app
from prometheus_client.registry import Collector

from quire.rpc.address import TcpAddress, check_bindable
from quire.rpc.tls import HttpsFiles, Role, ServerTls, roles_of_certificate
from quire.runtime import clock
from quire.version import VERSION

MAX_CONNECTIONS = 32
_TIMEOUT_S = 10.0
_TEXT = "text/plain; version=0.0.4"
_CERTIFICATE = "quire.peer_certificate"
_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_SEQUENCE, _UTC_TIME, _GENERALIZED_TIME, _VERSION = 0x30, 0x17, 0x18, 0xA0
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
        model: str | None = None,
    ) -> Self:
        """Listens; port 0 picks a free one. With `tls`, HTTPS for callers of its roles only.

        `before_scrape` is called before the metrics are read, in the thread of the connection. `model` is the label
        `model` of all metrics.

        Raises:
            ConfigurationError: the port is in use or cannot be bound, or the files of `tls` cannot be used.
        """
        https = None if tls is None else HttpsFiles(tls)
        check_bindable(TcpAddress(host, port))
        server = (_Server if ":" not in host else _Server6)((host, port), _Handler)
        metrics = _refreshed(before_scrape, make_wsgi_app(registry if model is None else _OfModel(registry, model)))
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


class _OfModel(CollectorRegistry):
    """A registry whose samples have the label `model`, too."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        super().__init__()
        self._registry = registry
        self._model = model

    def collect(self) -> Iterable[Metric]:
        for family in self._registry.collect():
            labelled = copy.copy(family)
            labelled.samples = [
                sample._replace(labels={"model": self._model, **sample.labels}) for sample in family.samples
            ]
            yield labelled


class _Server(ThreadingWSGIServer):
    """Has a thread for each of at most MAX_CONNECTIONS connections and closes further ones."""

    request_queue_size = 2 * MAX_CONNECTIONS

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        super().__init__(address, handler)
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)

    def server_bind(self) -> None:
        """Does not ask for the full name of the host, unlike http.server: if name servers do not answer, that takes
        many seconds, in which the event loop of the service stands still."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

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
    """The application, which answers in the text format even if the scraper prefers another one.

    prometheus_client's OpenMetrics has an underscore for each colon in a name, unless the scraper asks for names in
    UTF-8, which Prometheus does from version 3 on: earlier ones would find none of vLLM's names.
    """

    def refreshed(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        before_scrape()
        return application({**environ, "HTTP_ACCEPT": _TEXT}, start_response)

    return refreshed


def _only_for(roles: frozenset[Role], application: _Application) -> _Application:
    """The application for callers whose certificate names one of `roles`; 403 for others."""

    def guarded(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if roles & roles_of_certificate(environ.get(_CERTIFICATE)):
            return application(environ, start_response)
        start_response("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
        return [f"metrics are for certificates of the role {' or '.join(sorted(roles))}\n".encode()]

    return guarded


def register_process(registry: CollectorRegistry, certificates: Iterable[Path | None] = ()) -> None:
    """Adds the metrics of every service: its version, its process (memory, processor time, open files, start), and the
    validity of the certificates in files; None is no file."""
    # Else each counter and histogram of the library has one more series, which says when it was made.
    disable_created_metrics()
    registry.register(_BuildInfo())
    ProcessCollector(registry=registry)
    if files := [path for path in certificates if path is not None]:
        registry.register(CertificateExpiry(files))


class _BuildInfo(Collector):
    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily("quire_build_info", "The version; the value is 1.", labels=["version"])
        family.add_metric([VERSION], 1)
        yield family


class CallCounts(Collector):
    """The number of finished gRPC calls to a service, by method and status."""

    def __init__(self, service: str, registry: CollectorRegistry) -> None:
        self._name = f"quire_{service}_grpc_calls"
        self._counts: Tally[tuple[str, str]] = Tally()
        registry.register(self)

    def add(self, method: str, code: grpc.StatusCode) -> None:
        """Counts a call that is over."""
        self._counts[method, code.name] += 1

    def collect(self) -> Iterable[Metric]:
        help_text = "gRPC calls that are over, refused ones included."
        family = CounterMetricFamily(self._name, help_text, labels=["method", "code"])
        for labels, count in list(self._counts.items()):
            family.add_metric(labels, count)
        yield family


class CertificateExpiry(Collector):
    """The validity of the certificates in files, as the files are at each scrape.

    Services have no library that reads certificates, and Python's `ssl` reads only certificates of authorities: this
    finds the one field that is needed.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = tuple(dict.fromkeys(files))

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            "quire_certificate_seconds_left",
            "Until the first certificate in a file expires; negative after that, absent where it cannot be read.",
            labels=["file"],
        )
        for path in self._files:
            try:
                family.add_metric(
                    [str(path)], expires_at(path.read_text(encoding="utf-8", errors="replace")) - clock.unix_s()
                )
            except (OSError, ValueError) as error:
                _logger.warning("%s: the end of its validity cannot be read: %s", path, error)
        yield family


def expires_at(pem: str) -> float:
    """When the first one of the certificates in a PEM file expires, in seconds since the Unix epoch.

    Raises ValueError if there is none, or one cannot be read.
    """
    found = _PEM.findall(pem)
    if not found:
        raise ValueError("it has no certificate")
    try:
        return min(_not_after(ssl.PEM_cert_to_DER_cert(each)) for each in found)
    except IndexError as error:
        raise ValueError("a certificate ends early") from error


def _not_after(der: bytes) -> float:
    """RFC 5280, section 4.1: a sequence whose first element has, after an optional version, a serial number, an
    algorithm and an issuer, the two times of the validity."""
    certificate = _elements(der, 0, len(der))[0]
    fields = _elements(der, *certificate[1:])[0]
    parts = _elements(der, *fields[1:])
    validity = parts[4 if parts[0][0] == _VERSION else 3]
    if validity[0] != _SEQUENCE:
        raise ValueError("a certificate is malformed")
    kind, begin, end = _elements(der, *validity[1:])[1]
    text = der[begin:end].decode("ascii")
    if kind == _UTC_TIME:
        # Years from 50 on are of the last century.
        text = ("19" if int(text[:2]) >= 50 else "20") + text
    elif kind != _GENERALIZED_TIME:
        raise ValueError("a certificate has a time of an unknown type")
    return dt.datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=dt.UTC).timestamp()


def _elements(der: bytes, begin: int, end: int) -> Sequence[tuple[int, int, int]]:
    """The elements of DER between two places: the type of each, and where its content begins and ends."""
    found: list[tuple[int, int, int]] = []
    while begin < end:
        kind, length = der[begin], der[begin + 1]
        begin += 2
        if length & 0x80:
            size = length & 0x7F
            length = int.from_bytes(der[begin : begin + size])
            begin += size
        found.append((kind, begin, begin + length))
        begin += length
    return found
