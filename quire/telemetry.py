"""Logs and metrics of a service process."""

import logging
import sys
import threading
from typing import Self
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server

from quire.rpc.address import TcpAddress, check_bindable

LOG_LEVELS = ("debug", "info", "warning", "error")


def configure_logging(service: str, level: str = "info") -> None:
    """Sends the process's logs to stderr, one line a record: time, level, service, logger, message.

    Libraries that log every request stay at warnings, unless `level` is "debug".
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s.%(msecs)03d %(levelname)s {service} %(name)s %(message)s", "%Y-%m-%dT%H:%M:%S")
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if level != "debug":
        for noisy in ("asyncio", "httpx", "httpcore", "uvicorn.access"):
            logging.getLogger(noisy).setLevel(logging.WARNING)


class MetricsServer:
    """Serves a registry as Prometheus text at http://HOST:PORT/metrics from a thread of its own."""

    def __init__(self, server: WSGIServer, thread: threading.Thread) -> None:
        self.port: int = server.server_port
        self._server = server
        self._thread = thread

    @classmethod
    def start(cls, host: str, port: int, registry: CollectorRegistry) -> Self:
        """Listens; port 0 picks a free one. ConfigurationError when the port is in use or cannot be bound."""
        check_bindable(TcpAddress(host, port))
        server, thread = start_http_server(port, addr=host, registry=registry)
        return cls(server, thread)

    def stop(self) -> None:
        """Stops listening and ends the thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
